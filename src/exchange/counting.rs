//! Counts what a copy is to copy, for whoever shows how far it is.

use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use super::progress::{Amount, Tally};
use super::walk::{Names, Step, Tree, Walk};
use super::{Filter, ImportOptions, path};
use crate::fs::{FileSystem, mode};

/// Directories within each other whose descriptors a count holds at most: beside a copy, which needs its own, it is not to use them up.
const DEEPEST: usize = 100;

/// What [`extract`](super::extract()) and [`export_tar`](super::export_tar()) are to copy of an archive, but for what cannot be read; None as soon as nobody wants to know.
pub fn count_stored(fs: &FileSystem, paths: &[Vec<u8>], filter: &Filter, wanted: &dyn Fn() -> bool) -> Option<Amount> {
    let mut tally = Tally::default();
    let everything = [Vec::new()];
    for given in if paths.is_empty() { &everything } else { paths } {
        let Ok(top) = path::resolve_given(fs, given) else { continue };
        tally.meet_stored(&top);
        let (mut tree, mut path) = (Tree::new(), Vec::new());
        if top.is_directory() {
            let _ = tree.descend(fs, &path, top.ino, ());
        }
        while let Some(step) = tree.next(&mut path) {
            if !wanted() {
                return None;
            }
            let Ok(Step::Entry(entry, _)) = step else { continue };
            let is_directory = entry.attributes.is_directory();
            if filter.leaves_out(&path, is_directory) {
                continue;
            }
            tally.meet_stored(&entry.attributes);
            if is_directory {
                let _ = tree.descend(fs, &path, entry.attributes.ino, ());
            }
        }
    }
    Some(tally.met())
}

/// What [`import`](super::import()) is to copy of the host, but for what cannot be read; None as soon as nobody wants to know, and of a tree that is too
/// deep.
pub fn count_sources(sources: &[PathBuf], options: &ImportOptions, wanted: &dyn Fn() -> bool) -> Option<Amount> {
    let mut tally = Tally::default();
    for source in sources {
        let (mut walk, mut path) = (Walk::new(), Vec::new());
        if let Some(names) = count(&mut tally, CWD, source.as_os_str().as_bytes(), options.follow, &path, options) {
            walk.enter(&path, names, ());
        }
        while let Some(step) = walk.step(&mut path, Iterator::next, |entry| entry.file_name().to_bytes()) {
            if !wanted() {
                return None;
            }
            let Ok(Step::Entry(entry, directory)) = step else { continue };
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

/// Counts one object of the host; what is in it if it is a directory.
fn count(
    tally: &mut Tally,
    at: impl AsFd,
    name: &[u8],
    follow: bool,
    path: &[u8],
    options: &ImportOptions,
) -> Option<Names> {
    let (at_flags, open_flags) =
        if follow { (AtFlags::empty(), OFlags::empty()) } else { (AtFlags::SYMLINK_NOFOLLOW, OFlags::NOFOLLOW) };
    let stat = rustix::fs::statat(&at, name, at_flags).ok()?;
    let is_directory = stat.st_mode & mode::TYPE == mode::DIRECTORY;
    if options.filter.leaves_out(path, is_directory) {
        return None;
    }
    tally.meet_host(&stat);
    if !is_directory {
        return None;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | open_flags;
    Names::of(rustix::fs::openat(&at, name, flags, Mode::empty()).ok()?).ok()
}
