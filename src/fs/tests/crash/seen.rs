//! Visible state of a tree, and the part of it that a restore brings back.

use std::collections::{BTreeSet, HashMap};
use std::hash::BuildHasher;
use std::ops::ControlFlow;
use std::sync::Arc;

use foldhash::quality::FixedState;

use crate::format::{Ino, ROOT_INO};
use crate::fs::{FileSystem, mode};

/// Prefix in a line before attributes that other names of an object change.
const LINKS: &str = " links=";
/// Prefix in a line before attributes that a restore sets to new values.
const NUMBER: &str = " ino=";
/// Prefix of the paths of a restore's stage; no other name begins with it in these tests.
const STAGE: &str = "/.lockbox-restore-";

/// Lists everything visible, one line per object: path, attributes, digests of content and extended
/// attributes.
pub(in crate::fs::tests) type Seen = Arc<str>;

fn digest(bytes: &[u8]) -> u64 {
    FixedState::default().hash_one(bytes)
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
        // The file system determines their order.
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

/// Returns the whole visible tree with the names of the snapshots, and the inodes reachable in it.
pub(in crate::fs::tests) fn see(fs: &FileSystem) -> (Seen, BTreeSet<Ino>) {
    let (mut text, inodes) = see_tree(fs);
    for (_, snapshot) in fs.volume.readable_snapshots().unwrap() {
        text.push_str(&format!("snapshot {}\n", String::from_utf8_lossy(&snapshot.name)));
    }
    (text.into(), inodes)
}

/// Returns the permanent content of a snapshot that is taken now.
pub(super) fn see_tree(fs: &FileSystem) -> (String, BTreeSet<Ino>) {
    let mut text = String::new();
    let mut inodes = BTreeSet::from([ROOT_INO]);
    describe(fs, ROOT_INO, "", &mut inodes, &mut text);
    (text, inodes)
}

/// Returns all directories, the root first.
pub(super) fn directories(fs: &FileSystem) -> Vec<Ino> {
    let is_directory = |ino: &Ino| fs.attributes(*ino).unwrap().mode & mode::TYPE == mode::DIRECTORY;
    see_tree(fs).1.into_iter().filter(is_directory).collect()
}

/// Returns the path of a line.
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

/// Returns the parts of a tree that restoring everything brings back, in any order of listing.
pub(super) fn whole(text: &str) -> BTreeSet<&str> {
    text.lines().map(|line| cut(line, NUMBER)).collect()
}

/// Returns the parts of a tree that restoring one path brings back, without those that other paths
/// change: other names of its files.
pub(super) fn part<'a>(text: &'a str, top: &str) -> BTreeSet<&'a str> {
    text.lines().filter(|line| is_below(path(line), top)).map(|line| cut(line, LINKS)).collect()
}

/// Returns [`part`] of each of these paths, none of which is below another, in one pass.
pub(super) fn parts<'a>(text: &'a str, tops: &[String]) -> Vec<BTreeSet<&'a str>> {
    let index: HashMap<&str, usize> = tops.iter().enumerate().map(|(n, top)| (top.as_str(), n)).collect();
    let mut parts = vec![BTreeSet::new(); tops.len()];
    for line in text.lines() {
        let path = path(line);
        let mut ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
        if let Some(n) = ends.find_map(|end| index.get(&path[..end])) {
            parts[*n].insert(cut(line, LINKS));
        }
    }
    parts
}

/// Returns the parts that restoring these paths does not change: all except them, the directories
/// above them, and the stage of an interrupted restore.
pub(super) fn beside<'a>(text: &'a str, tops: &[String]) -> BTreeSet<&'a str> {
    let is_beside =
        |path: &str| !path.starts_with(STAGE) && !tops.iter().any(|top| is_below(path, top) || is_below(top, path));
    text.lines().filter(|line| is_beside(path(line))).map(|line| cut(line, LINKS)).collect()
}
