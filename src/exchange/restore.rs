//! Restores objects of a snapshot into the live tree.
//!
//! # Order
//!
//! Each object is built with its descendants in a directory of its own at the root, the stage,
//! which only its creator can enter. One rename then moves it to its path, exchanging it with an
//! existing object, which is in the stage afterwards and is deleted. Every commit is one state of
//! this sequence (STAGE-3). After a crash, each path therefore has its previous object or the
//! complete restored one, and everything else is in the stage. The next restore finds the stage by
//! name and mark and deletes it first. Nodes of the snapshot's tree never become nodes of the live
//! tree: all inodes and entries are new, and data pages are shared according to COPY-4.
//!
//! # Concurrent users of the archive
//!
//! The server of a mount caches names and objects ([`LiveNamespace`]). Names that clients may have
//! cached are therefore changed through `LiveNamespace` only; objects are built in a hidden
//! directory of the stage; and each object in the stage has a unique number as its name. Open files
//! remain valid, as after any unlink(2).
//!
//! # The stage
//!
//! The stage is a directory at the root with a name that the restore does not use otherwise: it
//! exists neither in the live root nor in that of the snapshot, and the target directory is not
//! below it. No restored object therefore conflicts with the stage, or is in it when it is deleted.
//! The operation that creates it also sets its mark, so in every commit a stage can be
//! distinguished from a user's directory of such a name. A snapshot of an archive with a leftover
//! contains a stage too; that belongs to no restore in progress, and is not restored.

use std::collections::BTreeSet;

use lockbox_terminal::display;

use super::path_ops::{Builder, components, delete_beside_users, none_if_missing, resolve};
use super::walk::join;
use super::{CopyCounts, Entries};
use crate::error::{Error, Result};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, Creator, FileSystem, RenameMode};

/// Prefix of the stage's name at the root of the archive; a number follows.
const STAGE: &[u8] = b".lockbox-restore-";
/// Extended attribute that marks a stage. A directory of such a name without it belongs to a user.
const MARK: &[u8] = b"trusted.lockbox.restore";
/// Directory of the stage in which objects are built.
const BUILDING: &[u8] = b"building";
/// Owner of the stage.
const MAKER: Creator = Creator { uid: 0, gid: 0, umask: None };

/// Namespace of the live tree as its users see it: renames through it, and cache invalidations.
pub trait LiveNamespace {
    /// Returns the user that renames out of the stage.
    fn maker(&self) -> Creator {
        MAKER
    }

    /// Moves an object of the live tree to another path, relative to the root: to an unused one or,
    /// with `exchange`, exchanging it with the object there. Errors: as [`FileSystem::rename`].
    fn rename(&mut self, from: &[u8], to: &[u8], exchange: bool) -> Result<()>;

    /// Creates a directory. Errors: as [`FileSystem::make_directory`].
    fn make_directory(&mut self, path: &[u8]) -> Result<()>;

    /// Returns a number for the stage that no earlier one had, in case the name of an earlier one
    /// may still be used.
    fn number(&mut self) -> u64 {
        1
    }

    /// Hides the content of this directory from users.
    fn hide(&mut self, directory: Ino);

    /// Invalidates a name in a directory that only the restore uses.
    fn changed_name(&mut self, directory: Ino, name: &[u8]);

    /// Invalidates the attributes of an object.
    fn changed(&mut self, ino: Ino);
}

/// Namespace of an archive that has no other users, with the creator of directories above a target.
pub struct OfflineNamespace<'a>(pub &'a FileSystem, pub Creator);

impl LiveNamespace for OfflineNamespace<'_> {
    fn rename(&mut self, from: &[u8], to: &[u8], exchange: bool) -> Result<()> {
        let ((from, name), (to, new_name)) = (parent(self.0, from)?, parent(self.0, to)?);
        let mode = if exchange { RenameMode::Exchange } else { RenameMode::NoReplace };
        self.0.rename(from, name, to, new_name, mode)
    }

    fn make_directory(&mut self, path: &[u8]) -> Result<()> {
        let (directory, name) = parent(self.0, path)?;
        self.0.make_directory(directory, name, 0o755, self.1).map(drop)
    }

    fn hide(&mut self, _: Ino) {}

    fn changed_name(&mut self, _: Ino, _: &[u8]) {}

    fn changed(&mut self, _: Ino) {}
}

fn parent<'p>(fs: &FileSystem, path: &'p [u8]) -> Result<(Ino, &'p [u8])> {
    let slash = path.iter().rposition(|&byte| byte == b'/');
    let (directory, name) = slash.map_or((&path[..0], path), |at| (&path[..at], &path[at + 1..]));
    Ok((resolve(fs, directory)?.ino, name))
}

/// Restore after its arguments were checked. Nothing was changed yet, except that leftovers of an
/// interrupted restore were removed.
pub struct Restore<'a> {
    live: &'a FileSystem,
    snapshot: &'a FileSystem,
    names: &'a mut dyn LiveNamespace,
    tops: Vec<RestoreItem>,
    /// Target directory of the live tree; its entries are not replaced.
    to: Option<Vec<u8>>,
    /// All other objects of the live tree are deleted.
    whole: bool,
}

/// Components of a path in the snapshot that is restored with its descendants.
type RestoreItem = Vec<Vec<u8>>;

struct RestoreStage {
    ino: Ino,
    name: Vec<u8>,
    building: Ino,
    /// Number of names assigned in it.
    names_used: u64,
}

impl RestoreStage {
    /// Returns an unused name in the stage, and its path from the root.
    fn next(&mut self) -> (Vec<u8>, Vec<u8>) {
        self.names_used += 1;
        let name = self.names_used.to_string().into_bytes();
        let path = [&self.name[..], b"/", &name].concat();
        (name, path)
    }
}

/// Result of a restore.
#[derive(Clone, Copy, Debug, Default)]
pub struct RestoreReport {
    pub copied: CopyCounts,
    /// Deleted objects: those replaced by restored ones, including descendants.
    pub deleted: u64,
}

impl<'a> Restore<'a> {
    /// Checks that all paths exist in `snapshot` and, with `to`, that their names do not
    /// exist in that directory. Without paths the whole tree is restored and, unless `to` is given,
    /// all other objects of the live tree are deleted. Deletes leftovers of an interrupted restore.
    ///
    /// # Errors
    /// `Invalid` for a path that does not exist in the snapshot, for one that is a leftover of an
    /// interrupted restore in it, and for an existing target; errors of reading and deleting.
    pub fn prepare(
        live: &'a FileSystem,
        snapshot: &'a FileSystem,
        paths: &[Vec<u8>],
        to: Option<&[u8]>,
        names: &'a mut dyn LiveNamespace,
    ) -> Result<Restore<'a>> {
        let mut tops = BTreeSet::new();
        for path in paths {
            let parts: Vec<Vec<u8>> = components(path)?.into_iter().map(<[u8]>::to_vec).collect();
            match resolve(snapshot, path) {
                Err(Error::NotFound | Error::NotDirectory) => {
                    return Err(Error::invalid(format!("the snapshot has no {}", display(path))));
                }
                found => drop(found?),
            }
            if let Some(name) = parts.first()
                && is_stage(snapshot, name, &snapshot.lookup(ROOT_INO, name)?)?
            {
                return Err(Error::invalid(format!(
                    "{} is a leftover of an interrupted restore in the snapshot, and is not restored",
                    display(path)
                )));
            }
            tops.insert(parts);
        }
        // The root stands for everything.
        let whole = tops.is_empty() || tops.contains(&Vec::new());
        if whole {
            tops = root_names(snapshot, false)?.into_iter().map(|name| vec![name]).collect();
        }
        // Descendants of another path are restored with it.
        let is_below = |path: &RestoreItem| (1..path.len()).any(|length| tops.contains(&path[..length]));
        let tops = tops.iter().filter(|path| !is_below(path)).cloned().collect();
        let to = to.map(|to| Ok(components(to)?.join(&b"/"[..]))).transpose()?;
        let mut restore = Restore { live, snapshot, names, tops, whole: whole && to.is_none(), to };
        restore.refuse_what_is_in_the_way()?;
        restore.remove_stages()?;
        Ok(restore)
    }

    fn refuse_what_is_in_the_way(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        let target = self.to.as_ref().map(|to| none_if_missing(resolve(self.live, to))).transpose()?.flatten();
        for top in &self.tops {
            let name = last_name(top)?;
            if self.to.is_some() && !names.insert(name) {
                return Err(Error::invalid(format!("two of the paths would get the name {}", display(name))));
            }
            if let Some(target) = &target
                && none_if_missing(self.live.lookup(target.ino, name))?.is_some()
            {
                return Err(Error::invalid(format!(
                    "{} already exists, and nothing is replaced in another directory",
                    display(name)
                )));
            }
        }
        Ok(())
    }

    /// Restores everything; `go_on` is called before each object, and periodically within it. On
    /// failure each path has its previous object or the complete restored one; running the restore
    /// again completes it.
    ///
    /// # Errors
    /// `NotDirectory` for a path below a non-directory of the live tree; errors of reading, writing
    /// and renaming; `Invalid` when the archive is being closed.
    pub fn run(mut self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<RestoreReport> {
        let live = self.live;
        let work = live.hold_open()?;
        let go_on = &mut || live.check_closing().and_then(|()| go_on());
        let mut stage = self.make_stage()?;
        let mut report = RestoreReport::default();
        let restored = self.all(&mut stage, go_on, &mut report);
        if restored.is_err() {
            self.withdraw_rename(&stage)?;
        }
        // Also when the client has disconnected. Closing the archive does not wait for the
        // removal: the next restore finds the stage.
        let removed = self.delete(ROOT_INO, &stage.name, &mut || live.check_closing());
        self.names.changed_name(ROOT_INO, &stage.name);
        restored?;
        removed?;
        if self.whole {
            let mut nothing = || Ok(());
            Builder::new(live, self.snapshot, &mut nothing).xattrs(ROOT_INO, ROOT_INO)?;
            live.restore_inode(self.snapshot, ROOT_INO, ROOT_INO)?;
            self.names.changed(ROOT_INO);
        }
        drop(work);
        live.make_durable()?;
        Ok(report)
    }

    /// Withdraws the last rename request, which the client may still execute: moves the object to a
    /// directory where the client does not find it, unless it was moved already.
    fn withdraw_rename(&mut self, stage: &RestoreStage) -> Result<()> {
        let last = stage.names_used.to_string().into_bytes();
        match self.live.rename(stage.ino, &last, stage.building, &last, RenameMode::NoReplace) {
            Err(Error::NotFound | Error::Exists) => Ok(()),
            withdrawn => withdrawn.map(|()| self.names.changed_name(stage.ino, &last)),
        }
    }

    fn all(
        &mut self,
        stage: &mut RestoreStage,
        go_on: &mut dyn FnMut() -> Result<()>,
        report: &mut RestoreReport,
    ) -> Result<()> {
        let mut builder = Builder::new(self.live, self.snapshot, go_on);
        if let Some(to) = &self.to {
            make_directories(self.live, self.names, to)?;
        }
        for top in std::mem::take(&mut self.tops) {
            let result = match self.to.clone() {
                Some(mut path) => self.build(&mut builder, stage, &top, top.len()).and_then(|(_, built)| {
                    join(&mut path, last_name(&top)?);
                    self.names.rename(&built, &path, false)
                }),
                None => self.top_in_place(&mut builder, stage, &top).map(|deleted| report.deleted += deleted),
            };
            report.copied = builder.copied;
            result?;
        }
        if self.whole {
            let source: BTreeSet<Vec<u8>> = root_names(self.snapshot, false)?.into_iter().collect();
            for name in root_names(self.live, false)?.iter().filter(|name| !source.contains(*name)) {
                (builder.go_on)()?;
                let (old, path) = stage.next();
                match self.names.rename(name, &path, false) {
                    Err(error) if is_gone(&error) => continue,
                    renamed => renamed?,
                }
                report.deleted += self.delete(stage.ino, &old, builder.go_on)?;
            }
        }
        Ok(())
    }

    /// Restores to the path in the snapshot; returns the number of deleted objects.
    fn top_in_place(&mut self, builder: &mut Builder<'_>, stage: &mut RestoreStage, top: &[Vec<u8>]) -> Result<u64> {
        // Length of the path that exists in the live tree; the rest is built with the object.
        let (mut directory, mut there) = (ROOT_INO, 0);
        let mut existing = None;
        for name in top {
            existing = none_if_missing(self.live.lookup(directory, name))?;
            match &existing {
                Some(found) if there + 1 < top.len() => {
                    if !found.is_directory() {
                        return Err(Error::invalid(format!(
                            "{} is no longer a directory, and is not replaced",
                            display(&top[..=there].join(&b"/"[..]))
                        )));
                    }
                    (directory, there) = (found.ino, there + 1);
                }
                _ => break,
            }
        }
        let (name, built) = self.build(builder, stage, top, there + 1)?;
        // The target may have changed while the object was built.
        let exchange = match &top[there..] {
            [last] => none_if_missing(self.live.lookup(directory, last))?.is_some(),
            _ => existing.is_some(),
        };
        self.names.rename(&built, &top[..=there].join(&b"/"[..]), exchange)?;
        if exchange { self.delete(stage.ino, &name, builder.go_on) } else { Ok(0) }
    }

    /// Builds the object at the first `length` components of the path: with its descendants, or
    /// with only the rest of the path. Returns its name in the stage and its path.
    fn build(
        &mut self,
        builder: &mut Builder<'_>,
        stage: &mut RestoreStage,
        top: &[Vec<u8>],
        length: usize,
    ) -> Result<(Vec<u8>, Vec<u8>)> {
        let (built, path) = stage.next();
        let (mut parent, mut name) = (stage.building, &built);
        let mut above = Vec::new();
        for end in length..top.len() {
            let source = self.snapshot_object(&top[..end])?;
            let copy = builder.object(&source, parent, name)?;
            above.push((source.ino, copy));
            (parent, name) = (copy, &top[end]);
        }
        builder.tree(&self.snapshot_object(top)?, parent, name)?;
        above.into_iter().rev().try_for_each(|(source, copy)| self.live.restore_inode(self.snapshot, source, copy))?;
        self.live.rename(stage.building, &built, stage.ino, &built, RenameMode::NoReplace)?;
        self.names.changed_name(stage.ino, &built);
        Ok((built, path))
    }

    fn snapshot_object(&self, path: &[Vec<u8>]) -> Result<Attributes> {
        resolve(self.snapshot, &path.join(&b"/"[..]))
    }

    /// Creates the stage under the first name that is unused everywhere, see the module.
    fn make_stage(&mut self) -> Result<RestoreStage> {
        let to = self.to.as_ref().map(|to| components(to)).transpose()?.unwrap_or_default();
        for number in self.names.number().. {
            let name = [STAGE, number.to_string().as_bytes()].concat();
            let is_free = none_if_missing(self.live.lookup(ROOT_INO, &name))?.is_none()
                && none_if_missing(self.snapshot.lookup(ROOT_INO, &name))?.is_none()
                && to.first().is_none_or(|first| *first != &name[..]);
            if is_free {
                let maker = self.names.maker();
                let copy = self.live.make_marked_directory(ROOT_INO, &name, 0o700, maker, (MARK, b"1"))?;
                let building = self.live.make_directory(copy.ino, BUILDING, 0o700, maker)?;
                self.names.hide(building.ino);
                self.names.changed_name(ROOT_INO, &name);
                return Ok(RestoreStage { ino: copy.ino, name, building: building.ino, names_used: 0 });
            }
        }
        Err(Error::Exists)
    }

    fn remove_stages(&mut self) -> Result<()> {
        let _work = self.live.hold_open()?;
        root_names(self.live, true)?.iter().try_for_each(|name| {
            self.delete(ROOT_INO, name, &mut || self.live.check_closing())?;
            self.names.changed_name(ROOT_INO, name);
            Ok(())
        })
    }

    /// Deletes a tree; objects that other users keep changing remain for the next restore.
    fn delete(&mut self, parent: Ino, name: &[u8], go_on: &mut dyn FnMut() -> Result<()>) -> Result<u64> {
        let found = self.live.lookup(parent, name)?;
        let names = &mut *self.names;
        delete_beside_users(self.live, (parent, name), &found, &mut |other| names.changed(other), go_on)
    }
}

fn last_name(path: &[Vec<u8>]) -> Result<&[u8]> {
    path.last().map(Vec::as_slice).ok_or_else(|| Error::invalid("the root has no name"))
}

/// Returns the names at the root: of stages, or of all other objects.
fn root_names(fs: &FileSystem, stages: bool) -> Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    let mut entries = Entries::new(fs, ROOT_INO)?;
    while let Some(entry) = entries.next_entry() {
        let entry = entry?;
        if is_stage(fs, entry.name, entry.attributes)? == stages {
            names.push(entry.name.to_vec());
        }
    }
    Ok(names)
}

fn is_stage(fs: &FileSystem, name: &[u8], found: &Attributes) -> Result<bool> {
    let number = name.strip_prefix(STAGE).unwrap_or_default();
    if number.is_empty() || !number.iter().all(u8::is_ascii_digit) || !found.is_directory() {
        return Ok(false);
    }
    match fs.xattr(found.ino, MARK) {
        Err(Error::NoAttribute) => Ok(false),
        marked => marked.map(|_| true),
    }
}

fn is_gone(error: &Error) -> bool {
    match error {
        Error::NotFound => true,
        Error::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    }
}

fn make_directories(live: &FileSystem, names: &mut dyn LiveNamespace, path: &[u8]) -> Result<()> {
    let parts = components(path)?;
    for length in 1..=parts.len() {
        let path = parts[..length].join(&b"/"[..]);
        match none_if_missing(resolve(live, &path))? {
            None => names.make_directory(&path)?,
            Some(found) if found.is_directory() => {}
            Some(_) => return Err(Error::NotDirectory),
        }
    }
    Ok(())
}
