//! Comparison of versions: exactly the user-visible changes are reported.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::super::{Archive, CreateOptions, OpenOptions};
use super::passphrase;
use super::sample::{OWNER, fresh, noise, put};
use crate::crypto::kdf::KdfCost;
use crate::env::{SeededEnvironment, seeds};
use crate::error::Error;
use crate::exchange::{Entries, PathChangeKind, compare};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, FileSystem, RenameMode, SetAttributes, SetTime, XattrMode, mode};
use crate::keys;

/// Returns letters and paths in one line.
fn short(older: &FileSystem, newer: &FileSystem) -> String {
    let text = |path: Vec<u8>| String::from_utf8(path).unwrap();
    let told = compare(older, newer, &mut |_| Ok(())).unwrap().into_iter().map(|one| {
        let letters = match one.kind {
            PathChangeKind::Added => "A",
            PathChangeKind::Removed => "D",
            PathChangeKind::Changed => "M",
            PathChangeKind::TypeChanged => "T",
            PathChangeKind::Renamed { changed: false } => "R",
            PathChangeKind::Renamed { changed: true } => "RM",
        };
        let from = one.from.map_or_else(String::new, |from| format!("{} -> ", text(from)));
        format!("{letters} {from}{}", text(one.path))
    });
    told.collect::<Vec<_>>().join(", ")
}

fn attribute(fs: &FileSystem, ino: Ino, set: SetAttributes) {
    fs.set_attributes(ino, &set).unwrap();
}

fn at(seconds: i64) -> Option<SetTime> {
    Some(SetTime::To(crate::format::Timestamp { seconds, nanos: 5 }))
}

#[test]
fn each_kind_of_change_is_told_once_and_by_path() {
    let (_, fs) = fresh(1);
    let directory = |parent, name: &[u8]| fs.make_directory(parent, name, 0o755, OWNER).unwrap().ino;
    let a = directory(ROOT_INO, b"a");
    let deep = directory(a, b"deep");
    let file = put(&fs, deep, b"file", b"content");
    let large = put(&fs, deep, b"large", &noise(1, 300_000));
    let linked = put(&fs, a, b"one", &noise(2, 50_000));
    fs.link(linked, deep, b"other").unwrap();
    let link = fs.make_symlink(a, b"link", b"target", OWNER).unwrap().ino;
    put(&fs, ROOT_INO, b"gone", b"x");
    put(&fs, ROOT_INO, b"becomes", b"x");
    let moved = directory(ROOT_INO, b"moved");
    put(&fs, moved, b"with", b"x");
    fs.take_snapshot(b"s").unwrap();
    let old = fs.open_snapshot(b"s").unwrap();
    assert_eq!(short(&old, &fs), "");

    // Changes of metadata that is not compared.
    attribute(&fs, file, SetAttributes { atime: at(7), ..SetAttributes::default() });
    attribute(&fs, deep, SetAttributes { mtime: at(8), ..SetAttributes::default() });
    fs.link(file, ROOT_INO, b"more").unwrap();
    fs.unlink(ROOT_INO, b"more").unwrap();
    assert_eq!(short(&old, &fs), "");

    fs.write(large, 200_000, b"elsewhere").unwrap();
    assert_eq!(short(&old, &fs), "M a/deep/large", "staged, with the old times");
    fs.sync().unwrap();
    assert_eq!(short(&old, &fs), "M a/deep/large");
    fs.write(linked, 5, b"both names").unwrap();
    fs.set_xattr(file, b"user.note", &noise(3, 2000), XattrMode::Set).unwrap();
    attribute(&fs, deep, SetAttributes { mode: Some(0o700), ..SetAttributes::default() });
    let middle = "M a/deep, M a/deep/file, M a/deep/large, M a/deep/other, M a/one";
    assert_eq!(short(&old, &fs), middle);
    fs.take_snapshot(b"t").unwrap();

    fs.unlink(ROOT_INO, b"gone").unwrap();
    fs.unlink(ROOT_INO, b"becomes").unwrap();
    let becomes = directory(ROOT_INO, b"becomes");
    put(&fs, becomes, b"a directory", b"x");
    fs.rename(ROOT_INO, b"moved", a, b"here", RenameMode::NoReplace).unwrap();
    put(&fs, moved, b"too", b"y");
    fs.unlink(a, b"link").unwrap();
    let again = fs.make_symlink(a, b"link", b"target", OWNER).unwrap().ino;
    let then = fs.attributes(link).map(|link| link.mtime);
    assert!(then.is_err());
    let mtime = old.attributes(link).unwrap().mtime;
    attribute(&fs, again, SetAttributes { mtime: Some(SetTime::To(mtime)), ..SetAttributes::default() });
    let last = "R moved -> a/here, A a/here/too, T becomes, A becomes/a directory, D gone";
    let newer = fs.open_snapshot(b"t").unwrap();
    assert_eq!(short(&newer, &fs), last);
    assert_eq!(short(&old, &newer), middle);
    // In the reverse direction every change is reversed.
    assert_eq!(short(&fs, &newer), "D a/here/too, T becomes, D becomes/a directory, A gone, R a/here -> moved");
    attribute(&fs, ROOT_INO, SetAttributes { uid: Some(5), ..SetAttributes::default() });
    assert!(short(&newer, &fs).starts_with("M , R moved -> a/here"));
}

/// Small files share pages; when one of them is deleted, the others are repacked.
#[test]
fn repacked_content_is_the_same_content() {
    let (_, fs) = fresh(1);
    for n in 0..30u64 {
        put(&fs, ROOT_INO, format!("file{n}").as_bytes(), &noise(n, 3000));
    }
    fs.take_snapshot(b"s").unwrap();
    let old = fs.open_snapshot(b"s").unwrap();
    fs.unlink(ROOT_INO, b"file7").unwrap();
    fs.purge().unwrap();
    let (mut repacked, mut changed) = (0, 0);
    fs.changes_since(&old, &mut |change| {
        repacked += u32::from(change.is_only_repacked());
        changed += u32::from(change.content);
        Ok(())
    })
    .unwrap();
    assert!(repacked > 10, "nothing was repacked");
    assert_eq!(changed, 1, "of the deleted file");
    assert_eq!(short(&old, &fs), "D file7");
    // Rewritten with equal content and time, as by a copying program.
    let kept = fs.lookup(ROOT_INO, b"file3").unwrap();
    fs.unlink(ROOT_INO, b"file3").unwrap();
    let new = fs.make_node(ROOT_INO, b"file3", kept.mode, 0, OWNER).unwrap().ino;
    fs.write(new, 0, &noise(3, 3000)).unwrap();
    attribute(&fs, new, SetAttributes { mtime: Some(SetTime::To(kept.mtime)), ..SetAttributes::default() });
    assert_eq!(short(&old, &fs), "D file7");
    fs.write(new, 2999, b"!").unwrap();
    assert_eq!(short(&old, &fs), "M file3, D file7");
}

/// A truncation of many extents hides them and frees them later; until then their records are the
/// same in both versions.
#[test]
fn content_hidden_by_a_truncation_differs() {
    let (_, fs) = fresh(1);
    let file = put(&fs, ROOT_INO, b"file", b"");
    let pieces = 600;
    for n in 0..pieces {
        fs.write(file, n * 256 * 1024, &noise(n, 4096)).unwrap();
    }
    fs.take_snapshot(b"s").unwrap();
    let old = fs.open_snapshot(b"s").unwrap();
    let before = fs.attributes(file).unwrap();
    fs.set_attributes(file, &SetAttributes { size: Some(4096), ..SetAttributes::default() }).unwrap();
    let mtime = Some(SetTime::To(before.mtime));
    fs.set_attributes(file, &SetAttributes { size: Some(before.size), mtime, ..SetAttributes::default() }).unwrap();
    assert_eq!(short(&old, &fs), "M file");
}

/// Object as compared: inode, type and everything else.
type One = (Ino, u32, String);
type Described = BTreeMap<Vec<u8>, One>;

fn describe(fs: &FileSystem) -> Described {
    let mut all = Described::new();
    let root = fs.attributes(ROOT_INO).unwrap();
    all.insert(Vec::new(), one(fs, &root));
    below(fs, ROOT_INO, b"", &mut all);
    all
}

fn one(fs: &FileSystem, is: &Attributes) -> One {
    let content = match is.mode & mode::TYPE {
        mode::REGULAR => fs.read(is.ino, 0, is.size as usize).unwrap(),
        mode::SYMLINK => fs.read_link(is.ino).unwrap(),
        _ => Vec::new(),
    };
    let times = if is.is_directory() { None } else { Some((is.mtime, is.size)) };
    let mut text = format!("{:o} {} {} {} {times:?} {content:?}", is.mode, is.uid, is.gid, is.rdev);
    for name in fs.list_xattrs(is.ino).unwrap().split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        text.push_str(&format!("{name:?}={:?}", fs.xattr(is.ino, name).unwrap()));
    }
    (is.ino, is.mode & mode::TYPE, text)
}

fn below(fs: &FileSystem, directory: Ino, path: &[u8], all: &mut Described) {
    let mut entries = Entries::new(fs, directory).unwrap();
    while let Some(entry) = entries.next_entry() {
        let entry = entry.unwrap();
        let path = if path.is_empty() { entry.name.to_vec() } else { [path, b"/", entry.name].concat() };
        all.insert(path.clone(), one(fs, entry.attributes));
        if entry.attributes.is_directory() {
            below(fs, entry.attributes.ino, &path, all);
        }
    }
}

/// Maps a path of the older version to the newer one by the reported renames: by its longest
/// renamed prefix.
fn renamed(path: &[u8], renames: &BTreeMap<&[u8], &[u8]>) -> Vec<u8> {
    let ends = (0..=path.len()).rev().filter(|&end| end > 0 && (end == path.len() || path[end] == b'/'));
    let found = ends.into_iter().find_map(|end| Some([renames.get(&path[..end])?, &path[end..]].concat()));
    found.unwrap_or_else(|| path.to_vec())
}

/// Applies the reported changes to the old paths, which must give the new paths, and checks that
/// the changes of each object are reported completely, and no others.
fn assert_tells(older: &FileSystem, newer: &FileSystem, old: &Described, new: &Described, what: &str) -> usize {
    let told = compare(older, newer, &mut |_| Ok(())).unwrap();
    let what = format!("{what}: {}", short(older, newer));
    assert!(told.is_sorted_by(|a, b| a < b), "{what}");
    let of = |kind: PathChangeKind| -> BTreeSet<&[u8]> {
        told.iter().filter(|one| one.kind == kind).map(|one| &one.path[..]).collect()
    };
    let (removed, added) = (of(PathChangeKind::Removed), of(PathChangeKind::Added));
    let (changed, of_other_type) = (of(PathChangeKind::Changed), of(PathChangeKind::TypeChanged));
    let mut renames: BTreeMap<&[u8], &[u8]> = BTreeMap::new();
    for one in &told {
        let is_renamed = matches!(one.kind, PathChangeKind::Renamed { .. });
        assert_eq!(one.from.is_some(), is_renamed, "{what}");
        if let Some(from) = &one.from {
            assert!(renames.insert(from, &one.path).is_none(), "twice: {what}");
            assert_eq!(old[from].0, new[&one.path].0, "another object: {what}");
        }
    }
    // Each old path is removed or maps to one new path, and all others are added.
    let mut led_to: BTreeMap<Vec<u8>, &Vec<u8>> = BTreeMap::new();
    for path in old.keys().filter(|path| !removed.contains(&path[..])) {
        assert!(led_to.insert(renamed(path, &renames), path).is_none(), "two at one path: {what}");
    }
    assert!(removed.iter().all(|path| old.contains_key(*path)), "{what}");
    let expected: BTreeSet<&[u8]> = new.keys().map(|path| &path[..]).collect();
    let all: BTreeSet<&[u8]> = led_to.keys().map(|path| &path[..]).chain(added.iter().copied()).collect();
    assert_eq!(all, expected, "{what}");
    assert_eq!(led_to.len() + added.len(), new.len(), "told twice: {what}");
    // A remaining object is reported if and only if it differs, once, with its rename if it has
    // one.
    for (path, from) in &led_to {
        let ((_, kind, before), (_, new_kind, after)) = (&old[*from], &new[path]);
        let rename = renames.get(&from[..]).map(|_| of(PathChangeKind::Renamed { changed: true }).contains(&path[..]));
        let tells = (changed.contains(&path[..]), of_other_type.contains(&path[..]), rename.unwrap_or(false));
        let differs = before != after && kind == new_kind;
        let expected = (differs && rename.is_none(), kind != new_kind, differs && rename.is_some());
        assert_eq!(tells, expected, "{}: {what}", String::from_utf8_lossy(path));
    }
    // A rename implied by that of the directory is not reported.
    for (from, to) in &renames {
        let cut = from.iter().rposition(|&byte| byte == b'/').map_or(0, |at| at + 1);
        let directory = from[..cut].strip_suffix(b"/").unwrap_or_default();
        let place = [&renamed(directory, &renames)[..], &from[cut - usize::from(cut > 0)..]].concat();
        let place = place.strip_prefix(b"/").unwrap_or(&place);
        assert!(removed.contains(directory) || place != *to, "needless: {what}");
    }
    // An object is not reported both as removed and as added.
    let removed: BTreeSet<Ino> = removed.iter().map(|path| old[*path].0).collect();
    assert!(added.iter().all(|path| !removed.contains(&new[*path].0)), "{what}");
    renames.len()
}

/// Tree with random changes.
pub(super) struct World {
    pub(super) fs: Arc<FileSystem>,
    pub(super) dice: SeededEnvironment,
}

impl World {
    pub(super) fn below(&self, bound: u64) -> u64 {
        self.dice.next_u64() % bound
    }

    fn directories(&self) -> Vec<Ino> {
        let mut all = vec![ROOT_INO];
        let mut at = 0;
        while at < all.len() {
            let mut entries = Entries::new(&self.fs, all[at]).unwrap();
            while let Some(entry) = entries.next_entry() {
                let attributes = entry.unwrap().attributes;
                all.extend(attributes.is_directory().then_some(attributes.ino));
            }
            at += 1;
        }
        all
    }

    /// Returns a directory and a name in it, used or not.
    fn place(&self) -> (Ino, Vec<u8>) {
        let directories = self.directories();
        (directories[self.below(directories.len() as u64) as usize], format!("n{}", self.below(5)).into_bytes())
    }

    /// Makes a random change; some are refused.
    pub(super) fn change(&self) {
        let fs = &self.fs;
        let ((parent, name), (other, other_name)) = (self.place(), self.place());
        let Ok(found) = fs.lookup(parent, &name) else {
            let _ = match self.below(6) {
                0 | 1 => fs.make_directory(parent, &name, 0o750, OWNER).map(drop),
                2 => fs.make_symlink(parent, &name, &noise(self.below(3), 9).map_zeros(), OWNER).map(drop),
                3 => fs.make_node(parent, &name, mode::FIFO | 0o600, 0, OWNER).map(drop),
                _ => {
                    let size = [10, 3000, 60_000][self.below(3) as usize];
                    put(fs, parent, &name, &noise(self.below(50), size));
                    Ok(())
                }
            };
            return;
        };
        let ino = found.ino;
        let _ = match self.below(10) {
            0 => fs.unlink(parent, &name),
            1 => fs.remove_directory(parent, &name),
            2 => fs.rename(parent, &name, other, &other_name, RenameMode::Replace),
            3 => fs.rename(parent, &name, other, &other_name, RenameMode::Exchange),
            4 => fs.link(ino, other, &other_name).map(drop),
            5 => fs.write(ino, self.below(4000), &noise(self.below(9), 200)),
            6 => fs.set_xattr(ino, b"user.note", &noise(self.below(9), 1500), XattrMode::Set),
            7 => {
                let set = SetAttributes { mode: Some(0o700 + self.below(3) as u32), ..SetAttributes::default() };
                fs.set_attributes(ino, &set).map(drop)
            }
            8 => {
                let set = SetAttributes { atime: at(self.below(3) as i64), mtime: at(9), ..SetAttributes::default() };
                fs.set_attributes(ino, &set).map(drop)
            }
            _ => fs.truncate(ino, self.below(found.size + 2), &mut |_| {}).map(drop),
        };
    }
}

trait MapZeros {
    /// A symlink's target has no NUL.
    fn map_zeros(self) -> Vec<u8>;
}

impl MapZeros for Vec<u8> {
    fn map_zeros(self) -> Vec<u8> {
        self.into_iter().map(|byte| byte.max(1)).collect()
    }
}

#[test]
fn what_is_told_makes_the_new_paths_of_the_old_ones_and_leaves_nothing_out() {
    let mut renames = 0;
    for seed in seeds(1..=8) {
        let (_, fs) = fresh(seed);
        let world = World { fs, dice: SeededEnvironment::new(seed) };
        let fs = &world.fs;
        let mut kept = Vec::new();
        for round in 0..6u64 {
            for _ in 0..[80, 3, 25][(round % 3) as usize] {
                world.change();
            }
            match world.below(4) {
                0 => fs.purge().unwrap(),
                1 => fs.sync().unwrap(),
                _ => {}
            }
            let live = describe(fs);
            for (moment, described) in &kept {
                let moment: &Arc<FileSystem> = moment;
                renames += assert_tells(moment, fs, described, &live, &format!("seed {seed}, round {round}: now"));
            }
            let name = format!("{round}").into_bytes();
            fs.take_snapshot(&name).unwrap();
            kept.push((fs.open_snapshot(&name).unwrap(), live));
        }
        for (one, described) in &kept {
            for (other, also) in &kept {
                assert_tells(one, other, described, also, &format!("seed {seed}"));
            }
        }
    }
    assert!(renames > 50, "{renames}");
}

/// One line for a directory regardless of its content; a renamed and changed object is reported
/// once; a replacing object is reported separately.
#[test]
fn renames_are_told_as_such() {
    let (_, fs) = fresh(1);
    let directory = |parent, name: &[u8]| fs.make_directory(parent, name, 0o755, OWNER).unwrap().ino;
    let rename = |from: (Ino, &[u8]), to: (Ino, &[u8])| {
        fs.rename(from.0, from.1, to.0, to.1, RenameMode::Replace).unwrap();
    };
    let (a, b) = (directory(ROOT_INO, b"a"), directory(ROOT_INO, b"b"));
    let inner = directory(a, b"inner");
    for n in 0..9u64 {
        put(&fs, inner, format!("file{n}").as_bytes(), &noise(n, 3000));
    }
    let log = put(&fs, ROOT_INO, b"log", b"old lines");
    let linked = put(&fs, ROOT_INO, b"linked", b"x");
    put(&fs, ROOT_INO, b"lost", b"y");
    put(&fs, b, b"out", b"z");
    put(&fs, b, b"stays", b"z");
    fs.take_snapshot(b"s").unwrap();
    let old = fs.open_snapshot(b"s").unwrap();

    rename((ROOT_INO, b"a"), (b, b"moved"));
    assert_eq!(short(&old, &fs), "R a -> b/moved");
    let third = fs.lookup(inner, b"file3").unwrap().ino;
    fs.write(third, 5, b"changed").unwrap();
    rename((inner, b"file4"), (inner, b"renamed"));
    put(&fs, inner, b"new", b"n");
    fs.unlink(inner, b"file5").unwrap();
    assert_eq!(
        short(&old, &fs),
        "D a/inner/file5, R a -> b/moved, M b/moved/inner/file3, A b/moved/inner/new, R a/inner/file4 -> b/moved/inner/renamed"
    );
    fs.take_snapshot(b"t").unwrap();
    let old = fs.open_snapshot(b"t").unwrap();
    // A rotated log, with more lines than before.
    fs.write(log, 9, b", more").unwrap();
    rename((ROOT_INO, b"log"), (ROOT_INO, b"log.1"));
    put(&fs, ROOT_INO, b"log", b"new lines");
    // A second hard link of a file that keeps the first one; then the first one is removed.
    fs.link(linked, ROOT_INO, b"second").unwrap();
    assert_eq!(short(&old, &fs), "A log, RM log -> log.1, A second");
    fs.unlink(ROOT_INO, b"linked").unwrap();
    // The replaced object is deleted.
    rename((b, b"out"), (ROOT_INO, b"lost"));
    assert_eq!(short(&old, &fs), "A log, RM log -> log.1, D lost, R b/out -> lost, R linked -> second");
    // A directory recreated with its entries: the paths show no rename.
    fs.take_snapshot(b"u").unwrap();
    let old = fs.open_snapshot(b"u").unwrap();
    let again = directory(ROOT_INO, b"again");
    for name in [&b"stays"[..], b"moved"] {
        rename((b, name), (again, name));
    }
    fs.remove_directory(ROOT_INO, b"b").unwrap();
    rename((ROOT_INO, b"again"), (ROOT_INO, b"b"));
    assert_eq!(short(&old, &fs), "");
    let stays = fs.lookup(again, b"stays").unwrap().ino;
    fs.write(stays, 0, b"!").unwrap();
    assert_eq!(short(&old, &fs), "M b/stays");
    // Among several names, one that was removed and created again has stayed, and one that moved
    // unchanged to another directory is the rename.
    let (one, other) = (directory(ROOT_INO, b"one"), directory(ROOT_INO, b"other"));
    for (parent, name) in [(one, &b"x"[..]), (one, b"y"), (other, b"x")] {
        fs.link(linked, parent, name).unwrap();
    }
    fs.take_snapshot(b"v").unwrap();
    let old = fs.open_snapshot(b"v").unwrap();
    for (parent, name) in [(one, &b"x"[..]), (one, b"y"), (other, b"x")] {
        fs.unlink(parent, name).unwrap();
    }
    fs.link(linked, other, b"x").unwrap();
    fs.link(linked, other, b"y").unwrap();
    assert_eq!(short(&old, &fs), "D one/x, R one/y -> other/y");
    fs.unlink(other, b"y").unwrap();
    fs.link(linked, again, b"x").unwrap();
    assert_eq!(short(&old, &fs), "R one/x -> b/x, D one/y");
}

#[test]
fn files_far_from_their_directories_are_found_by_all_their_names() {
    let (_, fs) = fresh(1);
    let mut directories = vec![ROOT_INO];
    for n in 0..40u64 {
        let parent = directories[(n / 3) as usize];
        directories.push(fs.make_directory(parent, format!("d{n}").as_bytes(), 0o755, OWNER).unwrap().ino);
    }
    // Each is created in the last directory and then moved; some have a second name.
    let mut files = Vec::new();
    for n in 0..60u64 {
        let name = format!("f{n}").into_bytes();
        let made = put(&fs, directories[40], &name, b"x");
        let to = directories[(n * 7 % 39) as usize];
        fs.rename(directories[40], &name, to, &name, RenameMode::NoReplace).unwrap();
        if n % 3 == 0 {
            fs.link(made, directories[(n * 5 % 40) as usize], b"again")
                .unwrap_or_else(|_| fs.attributes(made).unwrap());
        }
        files.push(made);
    }
    let wanted = files.iter().chain(&directories).copied().collect();
    let found = fs.paths_of(&wanted, &mut || Ok(())).unwrap();
    let mut names: BTreeMap<Ino, Vec<Vec<u8>>> = BTreeMap::new();
    let mut waiting = vec![(ROOT_INO, Vec::new())];
    names.insert(ROOT_INO, vec![Vec::new()]);
    while let Some((directory, path)) = waiting.pop() {
        let mut entries = Entries::new(&fs, directory).unwrap();
        while let Some(entry) = entries.next_entry() {
            let entry = entry.unwrap();
            let path = if path.is_empty() { entry.name.to_vec() } else { [&path[..], b"/", entry.name].concat() };
            names.entry(entry.attributes.ino).or_default().push(path.clone());
            if entry.attributes.is_directory() {
                waiting.push((entry.attributes.ino, path));
            }
        }
    }
    assert_eq!(names.len(), found.len());
    for (ino, paths) in found {
        let (mut paths, names) = (paths, names.get_mut(&ino).unwrap());
        paths.sort();
        names.sort();
        assert_eq!(&paths, names, "{ino:?}");
    }
}

/// Files at their original position in a directory are found there, regardless of their number.
#[test]
fn a_name_is_found_by_reading_few_nodes() {
    let (_, fs) = fresh(1);
    let mut files = Vec::new();
    for directory in 0..2u64 {
        let made = fs.make_directory(ROOT_INO, &[b'a' + directory as u8], 0o755, OWNER).unwrap().ino;
        // Separated by a directory with few files.
        let small = fs.make_directory(made, b"small", 0o755, OWNER).unwrap().ino;
        files.push(put(&fs, small, b"file", b"x"));
        let many: Vec<Ino> = (0..10_000u64).map(|n| put(&fs, made, format!("file{n}").as_bytes(), b"x")).collect();
        files.push(many[6700]);
    }
    fs.take_snapshot(b"s").unwrap();
    for file in files {
        let moment = fs.open_snapshot(b"s").unwrap();
        let paths = moment.paths_of(&[file].into_iter().collect(), &mut || Ok(())).unwrap();
        let read = moment.usage().nodes.misses;
        let names = paths[&file][0].split(|&byte| byte == b'/');
        let found = names.fold(ROOT_INO, |at, name| moment.lookup(at, name).unwrap().ino);
        assert_eq!((paths[&file].len(), found), (1, file));
        assert!(read <= 20, "{read} nodes were read for {:?}", String::from_utf8_lossy(&paths[&file][0]));
    }
}

/// The callback is called at each step with the amount of memory in use.
#[test]
fn a_comparison_ends_when_it_is_told_to() {
    let (_, fs) = fresh(2);
    let directory = fs.make_directory(ROOT_INO, b"d", 0o755, OWNER).unwrap().ino;
    for n in 0..40u64 {
        put(&fs, directory, format!("file{n}").as_bytes(), &noise(n, 100));
    }
    fs.take_snapshot(b"s").unwrap();
    let old = fs.open_snapshot(b"s").unwrap();
    for n in 0..20 {
        fs.unlink(directory, format!("file{n}").as_bytes()).unwrap();
        fs.rename(directory, format!("file{}", n + 20).as_bytes(), ROOT_INO, b"moved", RenameMode::Replace).unwrap();
    }
    let (mut asked, mut most) = (0, 0);
    let found = compare(&old, &fs, &mut |held| {
        (asked, most) = (asked + 1, most.max(held));
        Ok(())
    })
    .unwrap();
    assert!(asked > 40 && most >= found.len() && found.len() >= 40, "{asked} {most} {}", found.len());
    for step in 0..asked {
        let mut left = i64::from(step);
        let ended = compare(&old, &fs, &mut |_| {
            left -= 1;
            if left < 0 { Err(Error::Interrupted(2)) } else { Ok(()) }
        });
        assert!(matches!(ended, Err(Error::Interrupted(2))), "step {step}");
    }
}

#[test]
fn moments_of_two_archives_are_not_compared() {
    let directory = tempfile::tempdir().unwrap();
    let archives: Vec<Archive> = ["a", "b"]
        .iter()
        .map(|name| {
            let path = directory.path().join(name);
            Archive::create(&path, &passphrase("p"), &CreateOptions { kdf: KdfCost::TEST, creator: OWNER }).unwrap();
            let key = keys::unlock(&path, &passphrase("p")).unwrap();
            let archive = Archive::open(&path, &key, &OpenOptions::default()).unwrap();
            archive.snapshot_manager().create(b"s").unwrap();
            archive
        })
        .collect();
    let moment = archives[0].snapshot_manager().snapshot_view(b"s").unwrap();
    assert!(compare(&moment, archives[1].file_system(), &mut |_| Ok(())).is_err());
    assert_eq!(compare(&moment, archives[0].file_system(), &mut |_| Ok(())).unwrap(), []);
    assert!(archives[0].snapshot_manager().snapshot_view(b"t").is_err());
}
