//! A listing concurrent with changes of the directory, against a model of its entries.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use super::support::{CREATOR, assert_sound, fresh};
use crate::env::{SeededEnvironment, seeds};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{FileSystem, RenameMode, mode};

/// An entry of the directory: a name may go to another inode, and an entry may get another name, in
/// place.
#[derive(Clone, Copy)]
struct Entry {
    /// Each entry that ever was made has one.
    number: u64,
    ino: Ino,
}

struct Bench<'a> {
    fs: &'a FileSystem,
    dice: SeededEnvironment,
    directory: Ino,
    /// Where entries go to and come from.
    outside: Ino,
    entries: BTreeMap<Vec<u8>, Entry>,
    away: Vec<Vec<u8>>,
    made: u64,
}

impl Bench<'_> {
    fn below(&self, bound: usize) -> usize {
        (self.dice.next_u64() % bound as u64) as usize
    }

    fn some(&self) -> Option<Vec<u8>> {
        let names: Vec<&Vec<u8>> = self.entries.keys().collect();
        (!names.is_empty()).then(|| names[self.below(names.len())].clone())
    }

    fn new_name(&mut self) -> Vec<u8> {
        self.made += 1;
        // Of different lengths, so that leaves split and merge.
        format!("{}-{}", self.made, "n".repeat(self.below(120))).into_bytes()
    }

    fn enter(&mut self, name: Vec<u8>, ino: Ino) {
        self.made += 1;
        self.entries.insert(name, Entry { number: self.made, ino });
    }

    fn make(&mut self) {
        let name = self.new_name();
        let ino = self.fs.make_node(self.directory, &name, mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
        self.enter(name, ino);
    }

    fn rename(&self, from: (Ino, &[u8]), to: (Ino, &[u8]), how: RenameMode) {
        self.fs.rename(from.0, from.1, to.0, to.1, how).unwrap();
    }

    /// Changes an entry, listed already or not.
    fn change(&mut self) {
        let here = self.directory;
        let (Some(name), Some(other)) = (self.some(), self.some()) else { return self.make() };
        match self.below(8) {
            0 | 1 => self.make(),
            2 => {
                self.fs.unlink(here, &name).unwrap();
                self.entries.remove(&name);
            }
            3 => {
                let new = self.new_name();
                self.rename((here, &name), (here, &new), RenameMode::Replace);
                let entry = self.entries.remove(&name).unwrap();
                self.entries.insert(new, entry);
            }
            4 if name != other => {
                self.rename((here, &name), (here, &other), RenameMode::Replace);
                let ino = self.entries.remove(&name).unwrap().ino;
                self.entries.get_mut(&other).unwrap().ino = ino;
            }
            5 if name != other => {
                self.rename((here, &name), (here, &other), RenameMode::Exchange);
                let (one, two) = (self.entries[&name].ino, self.entries[&other].ino);
                self.entries.get_mut(&name).unwrap().ino = two;
                self.entries.get_mut(&other).unwrap().ino = one;
            }
            6 => {
                self.rename((here, &name), (self.outside, &name), RenameMode::Replace);
                self.entries.remove(&name);
                self.away.push(name);
            }
            _ => {
                let Some(name) = self.away.pop() else { return };
                self.rename((self.outside, &name), (here, &name), RenameMode::Replace);
                let ino = self.fs.lookup(here, &name).unwrap().ino;
                self.enter(name, ino);
            }
        }
    }

    /// Lists at most `count` entries after `cookie` in the current version; returns the cookie of
    /// the last one.
    fn list(&self, cookie: u64, bound: u64, count: usize, shown: &mut Vec<u64>) -> Option<u64> {
        let (mut at, mut left) = (None, count);
        self.fs
            .list_directory(self.directory, cookie, bound, true, &mut |entry, _| {
                at = Some(entry.cookie);
                if entry.cookie > 2 {
                    let known = self.entries.get(entry.name).expect("a name that is not there");
                    assert_eq!(known.ino, entry.ino);
                    shown.push(known.number);
                }
                left -= 1;
                if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
            .unwrap();
        at
    }
}

/// Entries are created, removed, renamed, replaced, exchanged or moved away and back during a
/// listing, before or after its position. Each entry that exists from start to end is listed once,
/// none twice, no entry created since, and the listing ends.
#[test]
fn a_listing_shows_what_stays_exactly_once() {
    for seed in seeds(1..=12) {
        let (_storage, fs) = fresh(seed);
        let directory = fs.make_directory(ROOT_INO, b"directory", 0o755, CREATOR).unwrap().ino;
        let outside = fs.make_directory(ROOT_INO, b"outside", 0o755, CREATOR).unwrap().ino;
        let dice = SeededEnvironment::new(seed);
        let (entries, away) = (BTreeMap::new(), Vec::new());
        let mut bench = Bench { fs: &fs, dice, directory, outside, entries, away, made: 0 };
        for _ in 0..400 {
            bench.make();
        }
        for _ in 0..4 {
            let bound = fs.directory_bound(directory).unwrap();
            let start: BTreeSet<u64> = bench.entries.values().map(|entry| entry.number).collect();
            let (mut shown, mut cookie) = (Vec::new(), 0);
            while let Some(at) = bench.list(cookie, bound, 1 + bench.below(8), &mut shown) {
                assert!(at > cookie);
                cookie = at;
                for _ in 0..bench.below(6) {
                    bench.change();
                }
            }
            let end: BTreeSet<u64> = bench.entries.values().map(|entry| entry.number).collect();
            let once: BTreeSet<u64> = shown.iter().copied().collect();
            assert_eq!(once.len(), shown.len(), "an entry was shown twice");
            assert!(once.is_subset(&start), "an entry was shown that had been made since");
            assert!(start.intersection(&end).all(|number| once.contains(number)), "an entry was left out");
        }
        assert_sound(&fs);
    }
}
