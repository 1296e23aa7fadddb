//! Mirrors sources: plans the deletions before anything is changed, skips unchanged objects,
//! replaces ones of another type, and deletes missing ones after the copying.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::vec;

use rustix::fs::{AtFlags, FileType, OFlags, Stat};

use lockbox_terminal::display;

use super::{ImportedDirectory, Importer, top_name};
use crate::error::{Error, Result};
use crate::exchange::attributes::{
    self, FileDifference, HostName, XattrObject, attributes_of, compare_with_host, host_error, version,
};
use crate::exchange::path_ops::{self, delete_tree, none_if_missing};
use crate::exchange::staging_dir::open_directory;
use crate::exchange::walk::{ArchiveWalk, TreeWalk, WalkStep, join};
use crate::exchange::{Entries, ImportOptions, ListingEntry, ProblemCause};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, RenameMode, SetAttributes, SetTime, mode};
use crate::storage;

/// Effect of a mirror operation on one object, as far as it is known without reading content. Hard
/// links are compared separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorChange {
    /// The object with all its descendants.
    Add,
    Replace,
    /// Owner, mode, times or attributes only.
    Update,
}

/// Callback for each change, with the path within the archive.
pub(crate) type MirrorWatch<'a> = dyn FnMut(MirrorChange, &[u8]) + 'a;

/// Compares names and types of the sources with the archive. With `changed`, other differences are
/// also reported, object by object.
///
/// # Errors
/// A source that cannot be read, or two sources of the same name: nothing can be mirrored then. An
/// unreadable directory below a source is left unchanged.
pub fn plan_mirror<'a>(
    fs: &'a FileSystem,
    sources: &[PathBuf],
    options: &'a ImportOptions,
    changed: Option<&'a mut MirrorWatch<'a>>,
) -> Result<MirrorPlan> {
    options.refuse_duplicate_names(sources)?;
    let target = none_if_missing(path_ops::resolve(fs, &options.to))?;
    let mut planning =
        MirrorPlanner { fs, options, changed, plan: MirrorPlan::default(), path: Vec::new(), top_length: 0, device: 0 };
    for source in sources {
        let name = options.name_of(source)?;
        planning.source(source, target.as_ref(), &name)?;
    }
    Ok(planning.plan)
}

struct MirrorPlanner<'a> {
    fs: &'a FileSystem,
    options: &'a ImportOptions,
    changed: Option<&'a mut MirrorWatch<'a>>,
    plan: MirrorPlan,
    /// Path of the current object in the archive; its first `top_length` bytes name the source.
    path: Vec<u8>,
    top_length: usize,
    /// Device of the current source.
    device: u64,
}

/// Walk over directories on both sides: remaining subdirectories, and the host directory.
type PairedWalk = TreeWalk<vec::IntoIter<(Vec<u8>, Ino)>, OwnedFd>;

impl MirrorPlanner<'_> {
    fn source(&mut self, source: &Path, target: Option<&Attributes>, name: &[u8]) -> Result<()> {
        self.path.clear();
        for part in path_ops::components(&self.options.to)?.into_iter().chain([name]) {
            self.path.push(b'/');
            self.path.extend_from_slice(part);
        }
        self.top_length = self.path.len();
        let failed = |errno: rustix::io::Errno| Error::io(format!("cannot read {}", source.display()), errno.into());
        let host = top_name(source, self.options);
        let stat = host.stat().map_err(failed)?;
        self.device = stat.st_dev;
        let existing = target.map(|target| none_if_missing(self.fs.lookup(target.ino, name))).transpose()?.flatten();
        let Some(existing) = existing else {
            self.report(MirrorChange::Add);
            return Ok(());
        };
        self.plan.entries += 1;
        if !self.both(host, &stat, &existing)? {
            return Ok(());
        }
        let host = host.open(OFlags::DIRECTORY).map_err(failed)?;
        let before = (self.plan.entries, self.plan.deleted);
        let mut walk = PairedWalk::new();
        let is_empty = self.directory(&mut walk, host, existing.ino)?;
        if is_empty && (self.plan.entries, self.plan.deleted) != before {
            self.plan.empty.push(source.to_path_buf());
        }
        while let Some(step) = walk.step(&mut self.path, |below| below.next().map(Ok), |(name, _)| name) {
            let WalkStep::Entry((name, ino), directory) = step? else { continue };
            // An unreadable directory is reported by the copy, and nothing below it is deleted.
            if let Ok(host) = open_directory(&directory.state, &name) {
                self.directory(&mut walk, host, ino)?;
            }
        }
        Ok(())
    }

    /// Plans for the entries of one directory, and queues subdirectories for the walk. Returns
    /// whether the host directory is empty.
    fn directory(&mut self, walk: &mut PairedWalk, host: OwnedFd, ino: Ino) -> Result<bool> {
        let path_length = self.path.len();
        let mut below = Vec::new();
        // Nothing is deleted because of an incomplete listing.
        let Ok(mut names) = self.host_names(&host) else { return Ok(false) };
        let is_empty = names.is_empty();
        let mut entries = Entries::new(self.fs, ino)?;
        while let Some(entry) = entries.next_entry() {
            let entry = entry?;
            self.step(path_length, entry.name);
            let is_directory = entry.attributes.is_directory();
            if self.excludes(is_directory) {
                continue;
            }
            let Some(stat) = names.remove(entry.name) else {
                self.plan_deletion(ino, entry.name, entry.attributes)?;
                continue;
            };
            self.plan.entries += 1;
            let object = HostName { directory: host.as_fd(), name: entry.name, follow: false };
            let crosses = self.options.one_file_system && stat.st_dev != self.device;
            if self.both(object, &stat, entry.attributes)? && !crosses {
                below.push((entry.name.to_vec(), entry.attributes.ino));
            }
        }
        for name in names.into_keys() {
            self.step(path_length, &name);
            self.report(MirrorChange::Add);
        }
        self.path.truncate(path_length);
        below.reverse();
        walk.enter(&self.path, below.into_iter(), host);
        Ok(is_empty)
    }

    /// Plans for an object on both sides; returns true if both are directories.
    fn both(&mut self, host: HostName<'_>, stat: &Stat, existing: &Attributes) -> Result<bool> {
        let was_directory = existing.is_directory();
        let is_directory = stat.st_mode & mode::TYPE == mode::DIRECTORY;
        if was_directory && !is_directory {
            let (below, keeps) = self.count_below(existing.ino)?;
            if keeps {
                let path = display(&self.path);
                return Err(Error::invalid(format!(
                    "{path} is no longer a directory, but the archive has excluded entries below it"
                )));
            }
            self.plan.count(self.path.clone(), below);
            self.plan.replaceable.insert(existing.ino);
        }
        if self.changed.is_some() {
            match compare_with_host(self.fs, existing, stat, &XattrObject::Named(host))? {
                FileDifference::None => {}
                FileDifference::Metadata => self.report(MirrorChange::Update),
                FileDifference::Content => self.report(MirrorChange::Replace),
            }
        }
        Ok(was_directory && is_directory)
    }

    /// Returns the names of a host directory that are not excluded. Entries that vanish meanwhile
    /// are treated as deleted.
    fn host_names(&self, host: &OwnedFd) -> Result<HashMap<Vec<u8>, Stat>> {
        let failed = host_error("cannot read the directory");
        let mut names = HashMap::new();
        let mut relative = self.relative().to_vec();
        let base = relative.len();
        for name in storage::names(host).map_err(&failed)? {
            let stat = match rustix::fs::statat(host, &name[..], AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(rustix::io::Errno::NOENT) => continue,
                Err(errno) => return Err(failed(errno)),
            };
            relative.truncate(base);
            join(&mut relative, &name);
            let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            if !self.options.filter.excludes(&relative, is_directory) {
                names.insert(name, stat);
            }
        }
        Ok(names)
    }

    /// Plans the deletion of an object, except excluded objects and their parent directories.
    fn plan_deletion(&mut self, parent: Ino, name: &[u8], attributes: &Attributes) -> Result<()> {
        let mut waiting = vec![(parent, self.path.clone(), name.to_vec(), *attributes)];
        while let Some((parent, path, name, attributes)) = waiting.pop() {
            self.path = path;
            let is_directory = attributes.is_directory();
            if self.excludes(is_directory) {
                continue;
            }
            self.plan.entries += 1;
            let (below, keeps) = if is_directory { self.count_below(attributes.ino)? } else { (0, false) };
            if keeps {
                let length = self.path.len();
                let mut entries = Entries::new(self.fs, attributes.ino)?;
                while let Some(entry) = entries.next_entry() {
                    let entry = entry?;
                    self.step(length, entry.name);
                    waiting.push((attributes.ino, self.path.clone(), entry.name.to_vec(), *entry.attributes));
                }
                continue;
            }
            self.plan.count(self.path.clone(), below);
            let doomed = PlannedDeletion { ino: attributes.ino, path: self.path.clone() };
            self.plan.doomed.insert((parent, name), doomed);
        }
        Ok(())
    }

    /// Counts the objects below the archive directory at `self.path`; returns also whether some are
    /// excluded.
    fn count_below(&mut self, ino: Ino) -> Result<(u64, bool)> {
        let (mut count, mut keeps) = (0, false);
        let mut tree = ArchiveWalk::below(self.fs, &self.path, ino, ())?;
        while let Some(step) = tree.next(&mut self.path) {
            let WalkStep::Entry(ListingEntry { attributes, .. }, _) = step? else { continue };
            if self.excludes(attributes.is_directory()) {
                keeps = true;
                continue;
            }
            count += 1;
            if attributes.is_directory() {
                let ino = attributes.ino;
                tree.descend(self.fs, &self.path, ino, ())?;
            }
        }
        Ok((count, keeps))
    }

    fn step(&mut self, length: usize, name: &[u8]) {
        self.path.truncate(length);
        join(&mut self.path, name);
    }

    fn relative(&self) -> &[u8] {
        self.path.get(self.top_length + 1..).unwrap_or_default()
    }

    fn excludes(&self, is_directory: bool) -> bool {
        self.options.filter.excludes(self.relative(), is_directory)
    }

    fn report(&mut self, change: MirrorChange) {
        if let Some(changed) = &mut self.changed {
            changed(change, &self.path);
        }
    }
}

/// Deletions of a mirror operation. Planned before the copying, executed after it.
#[derive(Clone, Debug, Default)]
pub struct MirrorPlan {
    /// Subtrees to delete, unordered.
    pub deletions: Vec<Deletion>,
    /// Number of objects in these subtrees.
    pub deleted: u64,
    /// Objects of the archive below the sources' targets, without excluded ones.
    pub entries: u64,
    /// Sources that are empty directories although their target has entries.
    pub empty: Vec<PathBuf>,
    doomed: HashMap<(Ino, Vec<u8>), PlannedDeletion>,
    /// Directories that the sources replace with objects of another type.
    replaceable: HashSet<Ino>,
}

/// Subtree of the archive that is to be deleted.
#[derive(Clone, Debug)]
pub struct Deletion {
    /// Path from the root of the archive.
    pub path: Vec<u8>,
    /// Number of objects in the subtree.
    pub entries: u64,
}

#[derive(Clone, Debug)]
struct PlannedDeletion {
    ino: Ino,
    path: Vec<u8>,
}

impl MirrorPlan {
    /// Counts the deletion of an object with its `below` descendants.
    fn count(&mut self, path: Vec<u8>, below: u64) {
        self.entries += below;
        self.deleted += below + 1;
        self.deletions.push(Deletion { path, entries: below + 1 });
    }

    /// Cancels the deletion of an object that exists in the source.
    pub(super) fn keep(&mut self, parent: Ino, name: &[u8]) {
        if !self.doomed.is_empty() {
            self.doomed.remove(&(parent, name.to_vec()));
        }
    }

    /// Checks that an object of the archive may be replaced by one of the source. A directory may
    /// be replaced only if its deletion was planned, and so counted. Errors: `Invalid` if it may
    /// not be replaced.
    pub(super) fn check_replaceable(&self, existing: &Attributes) -> Result<()> {
        if existing.is_directory() && !self.replaceable.contains(&existing.ino) {
            return Err(Error::invalid("its type changed after the plan was made"));
        }
        Ok(())
    }
}

/// Deletes an object and restores its directory's times, which were copied from the source.
fn delete_keeping_time(fs: &FileSystem, parent: Ino, name: &[u8], found: &Attributes) -> Result<u64> {
    let before = fs.attributes(parent)?;
    let count = delete_tree(fs, parent, name, found)?;
    let set = SetAttributes { mtime: Some(SetTime::To(before.mtime)), ..SetAttributes::default() };
    fs.set_attributes(parent, &set)?;
    Ok(count)
}

impl Importer<'_> {
    /// Returns whether the archive already has the object; updates its metadata if only that
    /// differs. Hard links of one file must be hard links of one file in the archive, and no
    /// others.
    pub(super) fn is_unchanged(&mut self, stat: &Stat, host: HostName<'_>, parent: Ino, name: &[u8]) -> Result<bool> {
        let Some(existing) = none_if_missing(self.fs.lookup(parent, name))? else { return Ok(false) };
        let id = version(stat);
        let linked = self.links.get(&id).copied();
        let same_names = match linked {
            Some((ino, _)) => ino == existing.ino,
            None => !self.claimed.contains(&existing.ino) && (existing.links == 1 || stat.st_nlink > 1),
        };
        if !same_names {
            return Ok(false);
        }
        let object = XattrObject::Named(host);
        match compare_with_host(self.fs, &existing, stat, &object)? {
            FileDifference::Content => return Ok(false),
            FileDifference::None => self.report.unchanged += 1,
            FileDifference::Metadata => {
                attributes::update(&object, self.fs, existing.ino, &self.path, &mut self.report.skipped)?;
                self.fs.set_attributes(existing.ino, &attributes_of(stat))?;
                self.report.updated += 1;
            }
        }
        if stat.st_nlink > 1 {
            let remaining = linked.map_or(stat.st_nlink, |(_, remaining)| remaining).saturating_sub(1);
            self.links.insert(id, (existing.ino, remaining));
            self.claimed.insert(existing.ino);
        }
        Ok(true)
    }

    pub(super) fn update_directory(&mut self, object: &XattrObject<'_>, state: &ImportedDirectory) -> Result<()> {
        let existing = self.fs.attributes(state.ino)?;
        if compare_with_host(self.fs, &existing, &state.stat, object)? != FileDifference::None {
            attributes::update(object, self.fs, state.ino, &self.path, &mut self.report.skipped)?;
            self.fs.set_attributes(state.ino, &attributes_of(&state.stat))?;
        }
        Ok(())
    }

    /// Executes the planned deletions, unless a part of the sources could not be copied.
    pub(super) fn delete_remaining(&mut self) -> Result<()> {
        let Some(plan) = self.plan.take() else { return Ok(()) };
        // Only a failure can hide objects of the source; the other causes name what they leave out.
        if self.report.problems.iter().any(|problem| matches!(problem.cause, ProblemCause::Failed(_))) {
            self.report.deletions_skipped = plan.doomed.len() as u64;
            return Ok(());
        }
        for ((parent, name), doomed) in plan.doomed {
            let deleted = match self.fs.lookup(parent, &name) {
                // Replaced or deleted since.
                Err(Error::NotFound) => Ok(0),
                Ok(found) if found.ino != doomed.ino => Ok(0),
                Ok(found) => delete_keeping_time(self.fs, parent, &name, &found),
                Err(error) => Err(error),
            };
            self.path = doomed.path;
            self.report.deleted += self.tolerate(deleted.map(Some))?.unwrap_or(0);
        }
        Ok(())
    }

    /// Renames the new object over the old one, which may have any type when mirroring.
    pub(super) fn put_in_place(&mut self, parent: Ino, temporary: &[u8], name: &[u8], made: &Attributes) -> Result<()> {
        let existing = self.fs.lookup(parent, name)?;
        if existing.ino == made.ino {
            // A rename between hard links of one file has no effect: the temporary name would stay.
            return self.fs.unlink(parent, temporary);
        }
        // Another name of a file that was copied before brings no attributes to that.
        let is_first_name = made.links == 1;
        if self.plan.is_some() && is_first_name && (existing.mode ^ made.mode) & mode::TYPE == 0 {
            attributes::keep_unlisted(self.fs, existing.ino, made.ino)?;
        }
        if !existing.is_directory() && !made.is_directory() {
            return self.fs.rename(parent, temporary, parent, name, RenameMode::Replace);
        }
        self.fs.rename(parent, temporary, parent, name, RenameMode::Exchange)?;
        self.report.deleted += delete_tree(self.fs, parent, temporary, &existing)?;
        Ok(())
    }
}
