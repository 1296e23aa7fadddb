//! Comparing moments of an archive: told is what a user sees change, and nothing else.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::{Archive, CreateOptions, OpenOptions};
use super::passphrase;
use super::sample::{OWNER, fresh, noise, put};
use crate::crypto::kdf::KdfCost;
use crate::env::SeededEnvironment;
use crate::exchange::{Differing, DifferingKind, Entries, compare};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, FileSystem, RenameMode, SetAttributes, SetTime, XattrMode, mode};
use crate::keys;

fn told(older: &FileSystem, newer: &FileSystem) -> Vec<(DifferingKind, String)> {
    let found = compare(older, newer, &mut || Ok(())).unwrap();
    found.into_iter().map(|Differing { path, kind }| (kind, String::from_utf8(path).unwrap())).collect()
}

/// Letters and paths, in one line.
fn short(older: &FileSystem, newer: &FileSystem) -> String {
    let letter = |kind| match kind {
        DifferingKind::Added => 'A',
        DifferingKind::Removed => 'D',
        DifferingKind::Changed => 'M',
        DifferingKind::TypeChanged => 'T',
    };
    let told = told(older, newer).into_iter().map(|(kind, path)| format!("{} {path}", letter(kind)));
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
    let old = fs.moment(b"s").unwrap();
    assert_eq!(short(&old, &fs), "");

    // What says nothing of content, by itself.
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
    let last = "A a/here, A a/here/too, A a/here/with, T becomes, A becomes/a directory, D gone, D moved, D moved/with";
    let newer = fs.moment(b"t").unwrap();
    assert_eq!(short(&newer, &fs), last);
    assert_eq!(short(&old, &newer), middle);
    // The other way round everything is the other way round.
    assert_eq!(
        short(&fs, &newer),
        "D a/here, D a/here/too, D a/here/with, T becomes, D becomes/a directory, A gone, A moved, A moved/with"
    );
    attribute(&fs, ROOT_INO, SetAttributes { uid: Some(5), ..SetAttributes::default() });
    assert!(short(&newer, &fs).starts_with("M , A a/here"));
}

/// Small files share pages; when one of them goes the others are written anew elsewhere.
#[test]
fn content_that_lies_elsewhere_is_the_same_content() {
    let (_, fs) = fresh(1);
    for n in 0..30u64 {
        put(&fs, ROOT_INO, format!("file{n}").as_bytes(), &noise(n, 3000));
    }
    fs.take_snapshot(b"s").unwrap();
    let old = fs.moment(b"s").unwrap();
    fs.unlink(ROOT_INO, b"file7").unwrap();
    fs.purge().unwrap();
    let mut elsewhere = 0;
    fs.changes_since(&old, &mut |change| {
        elsewhere += u32::from(change.content);
        Ok(())
    })
    .unwrap();
    assert!(elsewhere > 10, "nothing was packed anew");
    assert_eq!(short(&old, &fs), "D file7");
    // Written again as it was, with its time: a copy that a program put in its place.
    let kept = fs.lookup(ROOT_INO, b"file3").unwrap();
    fs.unlink(ROOT_INO, b"file3").unwrap();
    let new = fs.make_node(ROOT_INO, b"file3", kept.mode, 0, OWNER).unwrap().ino;
    fs.write(new, 0, &noise(3, 3000)).unwrap();
    attribute(&fs, new, SetAttributes { mtime: Some(SetTime::To(kept.mtime)), ..SetAttributes::default() });
    assert_eq!(short(&old, &fs), "D file7");
    fs.write(new, 2999, b"!").unwrap();
    assert_eq!(short(&old, &fs), "M file3, D file7");
}

/// Everything that a comparison looks at, by path.
type Described = BTreeMap<Vec<u8>, (u32, String)>;

fn describe(fs: &FileSystem) -> Described {
    let mut all = Described::new();
    let root = fs.attributes(ROOT_INO).unwrap();
    all.insert(Vec::new(), one(fs, &root));
    below(fs, ROOT_INO, b"", &mut all);
    all
}

fn one(fs: &FileSystem, is: &Attributes) -> (u32, String) {
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
    (is.mode & mode::TYPE, text)
}

fn below(fs: &FileSystem, directory: Ino, path: &[u8], all: &mut Described) {
    for entry in Entries::new(fs, directory).unwrap() {
        let entry = entry.unwrap();
        let path = if path.is_empty() { entry.name } else { [path, b"/", &entry.name].concat() };
        all.insert(path.clone(), one(fs, &entry.attributes));
        if entry.attributes.is_directory() {
            below(fs, entry.attributes.ino, &path, all);
        }
    }
}

/// What comparing every path tells.
fn expected(old: &Described, new: &Described) -> Vec<Differing> {
    let paths: std::collections::BTreeSet<&Vec<u8>> = old.keys().chain(new.keys()).collect();
    let kind = |path: &Vec<u8>| match (old.get(path), new.get(path)) {
        (None, _) => Some(DifferingKind::Added),
        (_, None) => Some(DifferingKind::Removed),
        (Some(old), Some(new)) if old.0 != new.0 => Some(DifferingKind::TypeChanged),
        (Some(old), Some(new)) => (old != new).then_some(DifferingKind::Changed),
    };
    paths.into_iter().filter_map(|path| kind(path).map(|kind| Differing { path: path.clone(), kind })).collect()
}

/// A tree that changes by chance.
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
            let entries = Entries::new(&self.fs, all[at]).unwrap().map(Result::unwrap);
            all.extend(entries.filter(|entry| entry.attributes.is_directory()).map(|entry| entry.attributes.ino));
            at += 1;
        }
        all
    }

    /// A directory and a name in it that may be free or not.
    fn place(&self) -> (Ino, Vec<u8>) {
        let directories = self.directories();
        (directories[self.below(directories.len() as u64) as usize], format!("n{}", self.below(5)).into_bytes())
    }

    /// One change of something, whichever it is; some are refused.
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
fn what_is_told_is_what_comparing_every_path_tells() {
    for seed in 1..=6 {
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
                let told = compare(moment, fs, &mut || Ok(())).unwrap();
                assert_eq!(told, expected(described, &live), "seed {seed}, round {round}: now");
            }
            let name = format!("{round}").into_bytes();
            fs.take_snapshot(&name).unwrap();
            kept.push((fs.moment(&name).unwrap(), live));
        }
        for (one, described) in &kept {
            for (other, also) in &kept {
                let told = compare(one, other, &mut || Ok(())).unwrap();
                assert_eq!(told, expected(described, also), "seed {seed}");
            }
        }
    }
}

#[test]
fn files_far_from_their_directories_are_found_by_all_their_names() {
    let (_, fs) = fresh(1);
    let mut directories = vec![ROOT_INO];
    for n in 0..40u64 {
        let parent = directories[(n / 3) as usize];
        directories.push(fs.make_directory(parent, format!("d{n}").as_bytes(), 0o755, OWNER).unwrap().ino);
    }
    // Each is made in the last directory and lies in another one then; some have a second name.
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
    let found = fs.paths_of(&wanted).unwrap();
    let mut names: BTreeMap<Ino, Vec<Vec<u8>>> = BTreeMap::new();
    let mut waiting = vec![(ROOT_INO, Vec::new())];
    names.insert(ROOT_INO, vec![Vec::new()]);
    while let Some((directory, path)) = waiting.pop() {
        for entry in Entries::new(&fs, directory).unwrap() {
            let entry = entry.unwrap();
            let path = if path.is_empty() { entry.name } else { [&path[..], b"/", &entry.name].concat() };
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

/// Files that lie as they were made are found where they have to be, however many there are.
#[test]
fn a_name_is_found_by_reading_few_nodes() {
    let (_, fs) = fresh(1);
    let mut files = Vec::new();
    for directory in 0..2u64 {
        let made = fs.make_directory(ROOT_INO, &[b'a' + directory as u8], 0o755, OWNER).unwrap().ino;
        // One with few files in it lies between.
        let small = fs.make_directory(made, b"small", 0o755, OWNER).unwrap().ino;
        files.push(put(&fs, small, b"file", b"x"));
        let many: Vec<Ino> = (0..10_000u64).map(|n| put(&fs, made, format!("file{n}").as_bytes(), b"x")).collect();
        files.push(many[6700]);
    }
    fs.take_snapshot(b"s").unwrap();
    for file in files {
        let moment = fs.moment(b"s").unwrap();
        let paths = moment.paths_of(&[file].into_iter().collect()).unwrap();
        let read = moment.usage().nodes.misses;
        let names = paths[&file][0].split(|&byte| byte == b'/');
        let found = names.fold(ROOT_INO, |at, name| moment.lookup(at, name).unwrap().ino);
        assert_eq!((paths[&file].len(), found), (1, file));
        assert!(read <= 20, "{read} nodes were read for {:?}", String::from_utf8_lossy(&paths[&file][0]));
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
            archive.take_snapshot(b"s").unwrap();
            archive
        })
        .collect();
    let moment = archives[0].moment(b"s").unwrap();
    assert!(compare(&moment, archives[1].file_system(), &mut || Ok(())).is_err());
    assert_eq!(compare(&moment, archives[0].file_system(), &mut || Ok(())).unwrap(), []);
    assert!(archives[0].moment(b"t").is_err());
}
