//! What a user sees of a tree, and what of that a restore brings back.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hasher};
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::format::{Ino, ROOT_INO};
use crate::fs::{FileSystem, mode};

/// In a line before what the names of an object elsewhere change.
const LINKS: &str = " links=";
/// In a line before what a restore gives anew.
const NUMBER: &str = " ino=";
/// With what the paths of a restore's stage begin; nobody else makes such a name here.
const STAGE: &str = "/.lockbox-restore-";

/// Everything that a user can see, one line an object: path, attributes, digests of content and extended attributes.
pub(in crate::fs::tests) type Seen = Arc<str>;

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

fn entries(fs: &FileSystem, directory: Ino) -> Vec<(Ino, Vec<u8>)> {
    let mut children = Vec::new();
    fs.list_directory(directory, 2, u64::MAX, false, &mut |entry, _| {
        children.push((entry.ino, entry.name.to_vec()));
        ControlFlow::Continue(())
    })
    .unwrap();
    children
}

fn describe(fs: &FileSystem, directory: Ino, path: &str, inodes: &mut BTreeSet<Ino>, into: &mut String) {
    for (ino, name) in entries(fs, directory) {
        let is = fs.attributes(ino).unwrap();
        let path = format!("{path}/{}", String::from_utf8_lossy(&name));
        let is_directory = is.mode & mode::TYPE == mode::DIRECTORY;
        let content = match is.mode & mode::TYPE {
            mode::REGULAR => fs.read(ino, 0, is.size as usize).unwrap(),
            mode::SYMLINK => fs.read_link(ino).unwrap(),
            _ => Vec::new(),
        };
        into.push_str(&format!(
            "{path} mode={:o} owner={}:{} rdev={} size={} times={:?} {:?} content={:016x}",
            is.mode,
            is.uid,
            is.gid,
            is.rdev,
            is.size,
            is.mtime,
            is.btime,
            digest(&content)
        ));
        let listed = fs.list_xattrs(ino).unwrap();
        // Their order is the file system's own.
        let names: BTreeSet<&[u8]> = listed.split(|&b| b == 0).filter(|name| !name.is_empty()).collect();
        for name in names {
            let value = fs.xattr(ino, name).unwrap();
            into.push_str(&format!(" {}={:016x}", String::from_utf8_lossy(name), digest(&value)));
        }
        into.push_str(&format!("{LINKS}{}{NUMBER}{} changed={:?}\n", is.links, ino.0, is.ctime));
        inodes.insert(ino);
        if is_directory {
            describe(fs, ino, &path, inodes, into);
        }
    }
}

/// The whole tree as a user sees it with the names of the snapshots, and the inodes that it reaches.
pub(in crate::fs::tests) fn see(fs: &FileSystem) -> (Seen, BTreeSet<Ino>) {
    let (mut text, inodes) = see_tree(fs);
    for (_, snapshot) in fs.volume.readable_snapshots().unwrap() {
        text.push_str(&format!("snapshot {}\n", String::from_utf8_lossy(&snapshot.name)));
    }
    (text.into(), inodes)
}

/// What a snapshot that is taken now has to show for ever.
pub(super) fn see_tree(fs: &FileSystem) -> (String, BTreeSet<Ino>) {
    let mut text = String::new();
    let mut inodes = BTreeSet::from([ROOT_INO]);
    describe(fs, ROOT_INO, "", &mut inodes, &mut text);
    (text, inodes)
}

/// All directories, the root first.
pub(super) fn directories(fs: &FileSystem) -> Vec<Ino> {
    let is_directory = |ino: &Ino| fs.attributes(*ino).unwrap().mode & mode::TYPE == mode::DIRECTORY;
    see_tree(fs).1.into_iter().filter(is_directory).collect()
}

/// The path of a line.
fn path(line: &str) -> &str {
    line.split(' ').next().unwrap_or_default()
}

pub(super) fn paths(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(path)
}

fn cut<'a>(line: &'a str, mark: &str) -> &'a str {
    line.split(mark).next().unwrap_or_default()
}

pub(super) fn is_below(path: &str, top: &str) -> bool {
    path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

pub(super) fn has_stage(text: &str) -> bool {
    text.lines().any(|line| line.starts_with(STAGE))
}

/// All that restoring everything brings back of a tree, whichever order its names are listed in.
pub(super) fn whole(text: &str) -> BTreeSet<&str> {
    text.lines().map(|line| cut(line, NUMBER)).collect()
}

/// What restoring one path brings back of a tree, without what other paths change: other names of its files.
pub(super) fn part<'a>(text: &'a str, top: &str) -> BTreeSet<&'a str> {
    text.lines().filter(|line| is_below(path(line), top)).map(|line| cut(line, LINKS)).collect()
}

/// What restoring these paths leaves as it is: all but them, the directories above them, and the stage of an interrupted restore.
pub(super) fn beside<'a>(text: &'a str, tops: &[String]) -> BTreeSet<&'a str> {
    let is_beside =
        |path: &str| !path.starts_with(STAGE) && !tops.iter().any(|top| is_below(path, top) || is_below(top, path));
    text.lines().filter(|line| is_beside(path(line))).map(|line| cut(line, LINKS)).collect()
}
