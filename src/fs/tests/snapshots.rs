//! Snapshots compared with a model: up to twenty, taken and removed in any order and restored from,
//! each compared with the model of its time.
//!
//! `SEED=17 STEPS=100000 cargo test -p lockbox --lib fs::tests::snapshots` runs longer.

use std::collections::{BTreeSet, HashMap};

use super::model::{Model, Node};
use super::names::{Driver, assert_same};
use super::support::{CREATOR, NAME_KEY, assert_sound};
use crate::env::{seeds, variable};
use crate::error::{Error, Result};
use crate::exchange::{OfflineNamespace, Restore};
use crate::format::{Ino, ROOT_INO};
use crate::fs::FileSystem;

/// Snapshots that there are at once at most.
const MOST: usize = 20;

/// Names from the root.
type Path = Vec<Vec<u8>>;

impl FileSystem {
    /// Removes snapshots by their ids. Errors: `NotFound` when one of them does not exist.
    pub(crate) fn remove_snapshots(&self, ids: &[u64]) -> Result<()> {
        self.remove_chosen_snapshots(&mut |all| {
            let is_there = |id: &u64| all.iter().any(|(other, _)| other == id);
            if ids.iter().all(is_there) { Ok(ids.to_vec()) } else { Err(Error::NotFound) }
        })
    }
}

/// A snapshot, and the model at its time.
struct Kept {
    name: Vec<u8>,
    model: Model,
}

#[derive(Default)]
struct Counts {
    most: usize,
    removed: usize,
    whole: usize,
    paths: usize,
    refused: usize,
}

/// Applies a restore of a snapshot to the model of the live tree, with the new numbers that the
/// file system allocated.
struct Restoring<'a> {
    live: &'a mut Model,
    kept: &'a Model,
    fs: &'a FileSystem,
    /// By the number in the snapshot; files with several names are made once.
    made: HashMap<Ino, Ino>,
}

impl Restoring<'_> {
    fn run(mut self, paths: &[Path]) -> Result<Vec<Ino>> {
        // The stage came and went.
        self.live.touch(ROOT_INO, true);
        let whole = paths.is_empty();
        let root = &self.kept.nodes[&ROOT_INO];
        let tops: BTreeSet<Path> = match whole {
            true => root.entries.iter().map(|(name, _)| vec![name.clone()]).collect(),
            false => paths.iter().cloned().collect(),
        };
        let is_below = |path: &Path| (1..path.len()).any(|length| tops.contains(&path[..length]));
        let restored = tops.iter().filter(|path| !is_below(path)).try_for_each(|path| self.top(path));
        if whole {
            for (name, ino) in self.live.nodes[&ROOT_INO].entries.clone() {
                if root.get(&name).is_none() {
                    self.live.remove_entry(ROOT_INO, &name);
                    self.delete(ino);
                }
            }
            let live = self.live.node(ROOT_INO);
            (live.mode, live.gid, live.mtime) = (root.mode, root.gid, root.mtime);
            live.xattrs.clone_from(&root.xattrs);
            self.made.insert(ROOT_INO, ROOT_INO);
        }
        for made in self.made.values() {
            self.live.forget_touch(*made);
            self.live.node(*made).ctime = self.fs.attributes(*made).unwrap().ctime;
        }
        restored.map(|()| self.made.into_values().collect())
    }

    fn top(&mut self, path: &Path) -> Result<()> {
        let (mut directory, mut there, mut replaced) = (ROOT_INO, 0, None);
        while let Some(found) = self.live.nodes[&directory].get(&path[there]) {
            if there + 1 == path.len() {
                replaced = Some(found);
                break;
            }
            if !self.live.nodes[&found].is_directory() {
                return Err(Error::invalid(""));
            }
            (directory, there) = (found, there + 1);
        }
        let mut kept = ROOT_INO;
        for name in &path[..=there] {
            kept = self.kept.find(kept, name).unwrap();
        }
        let made = self.build(kept, directory, &path[there], &path[there + 1..]);
        match replaced {
            Some(replaced) => {
                self.live.set_entry(directory, &path[there], made);
                self.delete(replaced);
            }
            None => self.live.add_entry(directory, &path[there], made),
        }
        Ok(())
    }

    /// Creates an object of the snapshot, now under this name, without the name; `rest` is the only
    /// part below it if it is only an ancestor.
    fn build(&mut self, kept: Ino, directory: Ino, name: &[u8], rest: &[Vec<u8>]) -> Ino {
        let made = self.fs.lookup(directory, name).unwrap().ino;
        let node = &self.kept.nodes[&kept];
        if let Some(before) = self.made.insert(kept, made) {
            assert_eq!(before, made, "names of one file");
            self.live.node(made).links += 1;
            return made;
        }
        let links = if node.is_directory() { 2 } else { 1 };
        let new = Node { links, entries: Vec::new(), parent: directory, ..node.clone() };
        assert!(self.live.nodes.insert(made, new).is_none(), "number used twice: {made:?}");
        let (only, rest) = rest.split_first().map_or((None, rest), |(first, rest)| (Some(first), rest));
        for (name, child) in node.entries.iter().filter(|(name, _)| only.is_none_or(|only| only == name)) {
            let child = self.build(*child, made, name, rest);
            self.live.add_entry(made, name, child);
        }
        // The entries moved its times.
        self.live.node(made).mtime = node.mtime;
        made
    }

    /// Objects that lost their names, with everything below them.
    fn delete(&mut self, ino: Ino) {
        for (name, child) in self.live.nodes[&ino].entries.clone() {
            self.live.remove_entry(ino, &name);
            self.delete(child);
        }
        self.live.drop_name(ino);
    }
}

/// Returns a path in the snapshot.
fn some_path(kept: &Model, below: &dyn Fn(usize) -> usize) -> Option<Path> {
    let (mut directory, mut path) = (ROOT_INO, Path::new());
    loop {
        let entries = &kept.nodes[&directory].entries;
        if entries.is_empty() {
            break;
        }
        let (name, ino) = &entries[below(entries.len())];
        path.push(name.clone());
        if !kept.nodes[ino].is_directory() || below(3) == 0 {
            break;
        }
        directory = *ino;
    }
    (!path.is_empty()).then_some(path)
}

fn restore(driver: &mut Driver, kept: &Kept, counts: &mut Counts) {
    let below = |bound| driver.below(bound);
    let paths: Vec<Path> = match below(3) {
        0 => Vec::new(),
        _ => (0..1 + below(3)).filter_map(|_| some_path(&kept.model, &below)).collect(),
    };
    let joined: Vec<Vec<u8>> = paths.iter().map(|path| path.join(&b"/"[..])).collect();
    let fs = driver.fs.clone();
    let moment = fs.open_snapshot(&kept.name).unwrap();
    let restored = Restore::prepare(&fs, &moment, &joined, None, &mut OfflineNamespace(&fs, CREATOR))
        .and_then(|restore| restore.run(&mut || Ok(())));
    let modelled = Restoring { live: &mut driver.model, kept: &kept.model, fs: &fs, made: HashMap::new() }.run(&paths);
    let what = format!("restore {paths:?} of {}", String::from_utf8_lossy(&kept.name));
    match modelled {
        Ok(made) => {
            assert_same(&restored, &Ok(()), &what);
            driver.known.extend(made);
            *(if paths.is_empty() { &mut counts.whole } else { &mut counts.paths }) += 1;
        }
        Err(error) => {
            assert_same(&restored, &Err(error), &what);
            counts.refused += 1;
        }
    }
    driver.model.assert_equal(&fs);
}

fn assert_kept(fs: &FileSystem, kept: &[Kept]) {
    let all: Vec<Vec<u8>> = fs.volume.readable_snapshots().unwrap().into_iter().map(|(_, one)| one.name).collect();
    assert_eq!(all, kept.iter().map(|kept| kept.name.clone()).collect::<Vec<_>>());
    for kept in kept {
        kept.model.assert_shown(&fs.open_snapshot(&kept.name).unwrap());
    }
}

fn assert_all_sound(fs: &FileSystem) {
    assert_sound(fs);
    let findings = fs.volume.check_space(true, &mut |_, _| {}).unwrap();
    assert!(findings.is_empty(), "{findings:#?}");
}

/// Frees some of the space that only the snapshot used, or all of it, or none.
fn remove(driver: &Driver, gone: &Kept) {
    let fs = &driver.fs;
    let (id, _) = fs.volume.snapshot_named(&gone.name).unwrap();
    fs.remove_snapshots(&[id]).unwrap();
    match driver.below(3) {
        0 => fs.finish_removals(&mut || Ok(())).unwrap(),
        1 => drop(fs.volume.removal_step().unwrap()),
        _ => {}
    }
}

fn run(seed: u64, steps: u64, counts: &mut Counts) {
    let mut driver = Driver::new(seed, NAME_KEY);
    let mut kept: Vec<Kept> = Vec::new();
    for step in 1..=steps {
        match driver.below(100) {
            0..12 if kept.len() < MOST => {
                let name = format!("of step {step}").into_bytes();
                driver.fs.take_snapshot(&name).unwrap();
                kept.push(Kept { name, model: driver.model.clone() });
                counts.most = counts.most.max(kept.len());
            }
            12..16 if !kept.is_empty() => {
                remove(&driver, &kept.remove(driver.below(kept.len())));
                counts.removed += 1;
            }
            16..20 if !kept.is_empty() => {
                let one = driver.below(kept.len());
                restore(&mut driver, &kept[one], counts);
            }
            20 => driver.fs.sync().unwrap(),
            21 => drop(driver.fs.maintain().unwrap()),
            22 => driver.fs.purge().unwrap(),
            _ => driver.step(),
        }
        if !kept.is_empty() {
            let one = &kept[driver.below(kept.len())];
            one.model.assert_shown(&driver.fs.open_snapshot(&one.name).unwrap());
        }
        if step % 50 == 0 {
            assert_kept(&driver.fs, &kept);
            assert_all_sound(&driver.fs);
        }
        if step % 200 == 0 {
            driver = driver.open_again(step % 400 == 0);
            assert_kept(&driver.fs, &kept);
        }
    }
    // In any order too, and nothing goes with them.
    while !kept.is_empty() {
        remove(&driver, &kept.remove(driver.below(kept.len())));
        assert_kept(&driver.fs, &kept);
    }
    driver.fs.finish_removals(&mut || Ok(())).unwrap();
    driver.model.assert_equal(&driver.fs);
    driver = driver.open_again(true);
    assert!(driver.fs.volume.snapshots().unwrap().is_empty());
}

#[test]
fn twenty_snapshots_show_and_give_back_what_the_model_was() {
    let steps = variable("STEPS").unwrap_or(600);
    let mut counts = Counts::default();
    for seed in seeds(21..=23) {
        run(seed, steps, &mut counts);
    }
    let Counts { most, removed, whole, paths, refused } = counts;
    println!("{most} at once, {removed} removed, {whole} restored, {paths} times paths, {refused} refused");
    assert!(most == MOST && removed > 20 && whole > 5 && paths > 10, "{most} {removed} {whole} {paths} {refused}");
}
