//! Counts the files that a copy will process, for progress reports.

use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use super::progress::{CopyTally, FileTotals};
use super::walk::{ArchiveWalk, HostEntries, TreeWalk, WalkStep};
use super::{Filter, ImportOptions, path_ops};
use crate::fs::{FileSystem, mode};

/// Maximum nesting of open directories: a count runs concurrently with a copy and must leave it
/// enough descriptors.
const DEEPEST: usize = 100;

/// Counts the files that [`extract`](super::extract()) and [`export_tar`](super::export_tar()) will
/// copy, except unreadable ones. Returns `None` as soon as `wanted` returns false.
pub fn count_archive_files(
    fs: &FileSystem,
    paths: &[Vec<u8>],
    filter: &Filter,
    wanted: &dyn Fn() -> bool,
) -> Option<FileTotals> {
    let mut tally = CopyTally::default();
    let everything = [Vec::new()];
    for given in if paths.is_empty() { &everything } else { paths } {
        let Ok(top) = path_ops::resolve_argument(fs, given) else { continue };
        tally.add_stored_file(&top);
        let (mut tree, mut path) = (ArchiveWalk::new(), Vec::new());
        if top.is_directory() {
            let _ = tree.descend(fs, &path, top.ino, ());
        }
        while let Some(step) = tree.next(&mut path) {
            if !wanted() {
                return None;
            }
            let Ok(WalkStep::Entry(entry, _)) = step else { continue };
            let is_directory = entry.attributes.is_directory();
            if filter.excludes(&path, is_directory) {
                continue;
            }
            tally.add_stored_file(&entry.attributes);
            if is_directory {
                let _ = tree.descend(fs, &path, entry.attributes.ino, ());
            }
        }
    }
    Some(tally.met())
}

/// Counts the files that [`import`](super::import()) will copy, except unreadable ones. Returns
/// `None` as soon as `wanted` returns false, and for a tree that is too deep.
pub fn count_host_files(sources: &[PathBuf], options: &ImportOptions, wanted: &dyn Fn() -> bool) -> Option<FileTotals> {
    let mut tally = CopyTally::default();
    for source in sources {
        let (mut walk, mut path) = (TreeWalk::new(), Vec::new());
        if let Some(names) = count(&mut tally, CWD, source.as_os_str().as_bytes(), options.follow, &path, options) {
            walk.enter(&path, names, ());
        }
        while let Some(step) = walk.step(&mut path, Iterator::next, |entry| entry.file_name().to_bytes()) {
            if !wanted() {
                return None;
            }
            let Ok(WalkStep::Entry(entry, directory)) = step else { continue };
            let Ok(host) = directory.entries.descriptor() else { continue };
            if let Some(names) = count(&mut tally, host, entry.file_name().to_bytes(), false, &path, options) {
                walk.enter(&path, names, ());
            }
            if walk.depth() > DEEPEST {
                return None;
            }
        }
    }
    Some(tally.met())
}

/// Counts one host object; returns the entries of a directory.
fn count(
    tally: &mut CopyTally,
    at: impl AsFd,
    name: &[u8],
    follow: bool,
    path: &[u8],
    options: &ImportOptions,
) -> Option<HostEntries> {
    let (at_flags, open_flags) =
        if follow { (AtFlags::empty(), OFlags::empty()) } else { (AtFlags::SYMLINK_NOFOLLOW, OFlags::NOFOLLOW) };
    let stat = rustix::fs::statat(&at, name, at_flags).ok()?;
    let is_directory = stat.st_mode & mode::TYPE == mode::DIRECTORY;
    if options.filter.excludes(path, is_directory) {
        return None;
    }
    tally.add_host_file(&stat);
    if !is_directory {
        return None;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | open_flags;
    HostEntries::of(rustix::fs::openat(&at, name, flags, Mode::empty()).ok()?).ok()
}
