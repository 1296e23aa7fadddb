//! Brings objects of a snapshot back into the live tree.
//!
//! # Order
//! Each object is built with all that is below it within a directory of its own at the root, the stage, which only its maker can enter, and then takes the place
//! of what is in its way by one rename: exchanged with that where there is something. What was exchanged lies in the stage then and is deleted.
//! Every commit is one moment of this order (STAGE-3), so after a crash each path has what it had before or all that the snapshot shows, and
//! what else there is lies in the stage. The next restore finds that by name and mark and deletes it before anything else. No node of the
//! snapshot's tree becomes one of the live tree's: all inodes and entries are new, and data pages are shared as COPY-4 says.
//!
//! # Beside users of the archive
//! Whoever serves the archive to others believes what they know of its names and objects ([`Names`]). So names that they may know change by `Names` alone; what
//! is being built lies in a directory of the stage into which nobody can look until it is whole; and each object of the stage has a number of its own for a name.
//! Files that somebody has open stay what they were, as after any unlink(2).
//!
//! # The stage
//! It is a directory at the root with a name that nothing has which a restore touches: neither the live root nor that of the snapshot has it, and the
//! directory that takes what is restored is not below it. So no object that is restored has the stage in its way, nor lies in it when that is deleted.
//! It has its mark from its first moment on, in the operation that makes it, so every commit tells a stage from a directory of the user's with such
//! a name. A snapshot that was taken of an archive with a leftover shows a stage too: that is nobody's, and is not brought back.

use std::collections::BTreeSet;

use super::build::Builder;
use crate::error::{Error, Result};
use crate::exchange::deletion::delete_beside_users;
use crate::exchange::path::{components, if_there, resolve};
use crate::exchange::walk::join;
use crate::exchange::{Copied, Entries};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, Creator, FileSystem, RenameMode};
use lockbox_terminal::display;

/// With what the stage's name at the root of the archive begins; a number follows.
const STAGE: &[u8] = b".lockbox-restore-";
/// Only a stage has this attribute. A directory of such a name without it is one of the user's.
const MARK: &[u8] = b"trusted.lockbox.restore";
/// The directory of the stage in which objects are built.
const BUILDING: &[u8] = b"building";
/// Whose the stage and directories above a target are, when the snapshot says nothing of them.
const MAKER: Creator = Creator { uid: 0, gid: 0, umask: None };

/// How names change that others may know, and what they are told of the rest.
pub trait Names {
    /// Who renames out of the stage.
    fn maker(&self) -> Creator {
        MAKER
    }

    /// Gives an object of the live tree another path from the root: one that nothing has or, with `exchange`, that of an object which gets its path.
    ///
    /// # Errors
    /// As [`FileSystem::rename`].
    fn rename(&mut self, from: &[u8], to: &[u8], exchange: bool) -> Result<()>;

    /// Makes a directory.
    ///
    /// # Errors
    /// As [`FileSystem::make_directory`].
    fn make_directory(&mut self, path: &[u8]) -> Result<()>;

    /// A number for the stage that no earlier one had, where somebody may still be about to use the name of an earlier one.
    fn number(&mut self) -> u64 {
        1
    }

    /// From now on nobody looks into this directory.
    fn hide(&mut self, directory: Ino);

    /// A name that nobody else uses has come or gone in a directory.
    fn changed_name(&mut self, directory: Ino, name: &[u8]);

    /// Attributes of an object have changed.
    fn changed(&mut self, ino: Ino);
}

/// Of an archive that nobody else uses.
pub struct Alone<'a>(pub &'a FileSystem);

impl Names for Alone<'_> {
    fn rename(&mut self, from: &[u8], to: &[u8], exchange: bool) -> Result<()> {
        let ((from, name), (to, new_name)) = (parent(self.0, from)?, parent(self.0, to)?);
        let mode = if exchange { RenameMode::Exchange } else { RenameMode::NoReplace };
        self.0.rename(from, name, to, new_name, mode)
    }

    fn make_directory(&mut self, path: &[u8]) -> Result<()> {
        let (directory, name) = parent(self.0, path)?;
        self.0.make_directory(directory, name, 0o755, MAKER).map(drop)
    }

    fn hide(&mut self, _: Ino) {}

    fn changed_name(&mut self, _: Ino, _: &[u8]) {}

    fn changed(&mut self, _: Ino) {}
}

/// The directory of a path, and its name there.
fn parent<'p>(fs: &FileSystem, path: &'p [u8]) -> Result<(Ino, &'p [u8])> {
    let slash = path.iter().rposition(|&byte| byte == b'/');
    let (directory, name) = slash.map_or((&path[..0], path), |at| (&path[..at], &path[at + 1..]));
    Ok((resolve(fs, directory)?.ino, name))
}

/// A restore that was checked, and has changed nothing yet but what an interrupted one left.
pub struct Restore<'a> {
    live: &'a FileSystem,
    moment: &'a FileSystem,
    names: &'a mut dyn Names,
    tops: Vec<Top>,
    /// Directory of the live tree that takes them; what it has is not replaced.
    to: Option<Vec<u8>>,
    /// The live tree is to have nothing else.
    whole: bool,
}

/// An object that takes one place.
struct Top {
    /// In the snapshot.
    path: Vec<Vec<u8>>,
}

/// Where objects wait for their places.
struct Stage {
    ino: Ino,
    name: Vec<u8>,
    building: Ino,
    /// How many names in it were given.
    given: u64,
}

impl Stage {
    /// A name in the stage that nothing had, and its path from the root.
    fn next(&mut self) -> (Vec<u8>, Vec<u8>) {
        self.given += 1;
        let name = self.given.to_string().into_bytes();
        let path = [&self.name[..], b"/", &name].concat();
        (name, path)
    }
}

/// What a restore did.
#[derive(Clone, Copy, Debug, Default)]
pub struct RestoreReport {
    pub copied: Copied,
    /// Objects that were deleted: what the restored ones replaced, with everything below.
    pub deleted: u64,
}

impl<'a> Restore<'a> {
    /// Checks that all paths are in the snapshot that `moment` shows and, with `to`, that nothing is in their way in that directory. Without paths it is
    /// the whole tree, and the live tree is to have nothing else afterwards, unless there is a `to`. Deletes what an interrupted restore left.
    ///
    /// # Errors
    /// `Invalid` for a path that the snapshot does not have or that an interrupted restore had left in it, and for what is in the way; what reading and
    /// deleting meet.
    pub fn prepare(
        live: &'a FileSystem,
        moment: &'a FileSystem,
        paths: &[Vec<u8>],
        to: Option<&[u8]>,
        names: &'a mut dyn Names,
    ) -> Result<Restore<'a>> {
        let mut tops = BTreeSet::new();
        for path in paths {
            let parts: Vec<Vec<u8>> = components(path)?.into_iter().map(<[u8]>::to_vec).collect();
            match resolve(moment, path) {
                Err(Error::NotFound | Error::NotDirectory) => {
                    return Err(Error::invalid(format!("the snapshot has no {}", display(path))));
                }
                found => drop(found?),
            }
            if let Some(name) = parts.first()
                && is_stage(moment, name, &moment.lookup(ROOT_INO, name)?)?
            {
                return Err(Error::invalid(format!(
                    "{} is what an interrupted restore had left when the snapshot was taken, and is not brought back",
                    display(path)
                )));
            }
            tops.insert(parts);
        }
        // The root stands for everything.
        let whole = tops.is_empty() || tops.contains(&Vec::new());
        if whole {
            tops = Restore::entries(moment)?.into_iter().map(|name| vec![name]).collect();
        }
        // What lies below another one comes with it.
        let is_below = |path: &Vec<Vec<u8>>| (1..path.len()).any(|length| tops.contains(&path[..length]));
        let tops = tops.iter().filter(|path| !is_below(path)).map(|path| Top { path: path.clone() }).collect();
        let to = to.map(|to| Ok(components(to)?.join(&b"/"[..]))).transpose()?;
        let mut restore = Restore { live, moment, names, tops, whole: whole && to.is_none(), to };
        restore.refuse_what_is_in_the_way()?;
        restore.remove_stages()?;
        Ok(restore)
    }

    /// The names at a root but for a stage.
    fn entries(fs: &FileSystem) -> Result<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        for entry in Entries::new(fs, ROOT_INO)? {
            let entry = entry?;
            if !is_stage(fs, &entry.name, &entry.attributes)? {
                names.push(entry.name);
            }
        }
        Ok(names)
    }

    fn refuse_what_is_in_the_way(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        let target = self.to.as_ref().map(|to| if_there(resolve(self.live, to))).transpose()?.flatten();
        for top in &self.tops {
            let name = top.name()?;
            if self.to.is_some() && !names.insert(name) {
                return Err(Error::invalid(format!("two of the paths would get the name {}", display(name))));
            }
            if let Some(target) = &target
                && if_there(self.live.lookup(target.ino, name))?.is_some()
            {
                return Err(Error::invalid(format!(
                    "{} is there already, and nothing is replaced in another directory",
                    display(name)
                )));
            }
        }
        Ok(())
    }

    /// Brings everything back; `go_on` is asked before each object, and now and then within it. When it ends this, or something fails, each path has what it
    /// had or all of what the snapshot shows, and doing it again completes it.
    ///
    /// # Errors
    /// `NotDirectory` for a path whose way leads through something else in the live tree; what reading, writing and renaming meet; `Invalid` when the archive
    /// is being closed.
    pub fn run(mut self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<RestoreReport> {
        let live = self.live;
        let report = {
            let _work = live.work()?;
            let go_on = &mut || live.check_closing().and_then(|()| go_on());
            let mut stage = self.make_stage()?;
            let mut report = RestoreReport::default();
            let restored = self.all(&mut stage, go_on, &mut report);
            if restored.is_err() {
                self.withdraw(&stage)?;
            }
            // Also when its client is gone. Who closes the archive does not wait for it: the next restore finds the stage.
            let removed = self.delete(ROOT_INO, &stage.name, &mut || live.check_closing());
            self.names.changed_name(ROOT_INO, &stage.name);
            restored?;
            removed?;
            if self.whole {
                let mut nothing = || Ok(());
                Builder::new(live, self.moment, &mut nothing).xattrs(ROOT_INO, ROOT_INO)?;
                live.restore_inode(self.moment, ROOT_INO, ROOT_INO)?;
                self.names.changed(ROOT_INO);
            }
            report
        };
        live.make_durable()?;
        Ok(report)
    }

    /// Takes back what somebody was told to rename and may rename at any time: it is where he finds nothing, or in its place already.
    fn withdraw(&mut self, stage: &Stage) -> Result<()> {
        let last = stage.given.to_string().into_bytes();
        match self.live.rename(stage.ino, &last, stage.building, &last, RenameMode::NoReplace) {
            Err(Error::NotFound | Error::Exists) => Ok(()),
            withdrawn => withdrawn.map(|()| self.names.changed_name(stage.ino, &last)),
        }
    }

    fn all(
        &mut self,
        stage: &mut Stage,
        go_on: &mut dyn FnMut() -> Result<()>,
        report: &mut RestoreReport,
    ) -> Result<()> {
        let mut builder = Builder::new(self.live, self.moment, go_on);
        if let Some(to) = &self.to {
            make_directories(self.live, self.names, to)?;
        }
        for top in std::mem::take(&mut self.tops) {
            let result = match self.to.clone() {
                Some(directory) => self.top_into(&mut builder, stage, &top, &directory),
                None => self.top_in_place(&mut builder, stage, &top).map(|deleted| report.deleted += deleted),
            };
            report.copied = builder.copied;
            result?;
        }
        if self.whole {
            let kept: BTreeSet<Vec<u8>> = Restore::entries(self.moment)?.into_iter().collect();
            for name in Restore::entries(self.live)? {
                if !kept.contains(&name) {
                    (builder.go_on)()?;
                    let (old, path) = stage.next();
                    match self.names.rename(&name, &path, false) {
                        Err(error) if is_gone(&error) => continue,
                        renamed => renamed?,
                    }
                    report.deleted += self.delete(stage.ino, &old, builder.go_on)?;
                }
            }
        }
        Ok(())
    }

    /// Beside what `directory` has.
    fn top_into(&mut self, builder: &mut Builder<'_>, stage: &mut Stage, top: &Top, directory: &[u8]) -> Result<()> {
        let (_, built) = self.build(builder, stage, top, top.path.len())?;
        let mut path = directory.to_vec();
        join(&mut path, top.name()?);
        self.names.rename(&built, &path, false)
    }

    /// Where the snapshot has it; answers how many objects were deleted for it.
    fn top_in_place(&mut self, builder: &mut Builder<'_>, stage: &mut Stage, top: &Top) -> Result<u64> {
        // How much of the way there is in the live tree; what is not is built with it.
        let (mut directory, mut there) = (ROOT_INO, 0);
        let mut existing = None;
        for name in &top.path {
            existing = if_there(self.live.lookup(directory, name))?;
            match &existing {
                Some(found) if there + 1 < top.path.len() => {
                    if !found.is_directory() {
                        return Err(Error::invalid(format!(
                            "{} is no directory any more, and is not to be replaced",
                            display(&top.path[..=there].join(&b"/"[..]))
                        )));
                    }
                    (directory, there) = (found.ino, there + 1);
                }
                _ => break,
            }
        }
        let (name, built) = self.build(builder, stage, top, there + 1)?;
        // Building took its time.
        let exchange = match &top.path[there..] {
            [last] => if_there(self.live.lookup(directory, last))?.is_some(),
            _ => existing.is_some(),
        };
        self.names.rename(&built, &top.path[..=there].join(&b"/"[..]), exchange)?;
        if exchange { self.delete(stage.ino, &name, builder.go_on) } else { Ok(0) }
    }

    /// Builds the object at `length` names of the path: with all below it, or with the rest of the path alone when that goes on. It is in the stage then, under
    /// the name and the path that are answered.
    fn build(
        &mut self,
        builder: &mut Builder<'_>,
        stage: &mut Stage,
        top: &Top,
        length: usize,
    ) -> Result<(Vec<u8>, Vec<u8>)> {
        let (built, path) = stage.next();
        let (mut parent, mut name) = (stage.building, &built);
        let mut above = Vec::new();
        for end in length..top.path.len() {
            let kept = self.kept(&top.path[..end])?;
            let made = builder.object(&kept, parent, name)?;
            above.push((kept.ino, made));
            (parent, name) = (made, &top.path[end]);
        }
        builder.tree(&self.kept(&top.path)?, parent, name)?;
        above.into_iter().rev().try_for_each(|(kept, made)| self.live.restore_inode(self.moment, kept, made))?;
        self.live.rename(stage.building, &built, stage.ino, &built, RenameMode::NoReplace)?;
        self.names.changed_name(stage.ino, &built);
        Ok((built, path))
    }

    fn kept(&self, path: &[Vec<u8>]) -> Result<Attributes> {
        resolve(self.moment, &path.join(&b"/"[..]))
    }

    /// Under the first name that is free everywhere: see above.
    fn make_stage(&mut self) -> Result<Stage> {
        let to = self.to.as_ref().map(|to| components(to)).transpose()?.unwrap_or_default();
        for number in self.names.number().. {
            let name = [STAGE, number.to_string().as_bytes()].concat();
            let is_free = if_there(self.live.lookup(ROOT_INO, &name))?.is_none()
                && if_there(self.moment.lookup(ROOT_INO, &name))?.is_none()
                && to.first().is_none_or(|first| *first != &name[..]);
            if is_free {
                let maker = self.names.maker();
                let made = self.live.make_marked_directory(ROOT_INO, &name, 0o700, maker, (MARK, b"1"))?;
                let building = self.live.make_directory(made.ino, BUILDING, 0o700, maker)?;
                self.names.hide(building.ino);
                self.names.changed_name(ROOT_INO, &name);
                return Ok(Stage { ino: made.ino, name, building: building.ino, given: 0 });
            }
        }
        Err(Error::Exists)
    }

    /// Deletes what restores left, if there is something.
    fn remove_stages(&mut self) -> Result<()> {
        let _work = self.live.work()?;
        let mut left = Vec::new();
        for entry in Entries::new(self.live, ROOT_INO)? {
            let entry = entry?;
            if is_stage(self.live, &entry.name, &entry.attributes)? {
                left.push(entry.name);
            }
        }
        left.iter().try_for_each(|name| {
            self.delete(ROOT_INO, name, &mut || self.live.check_closing())?;
            self.names.changed_name(ROOT_INO, name);
            Ok(())
        })
    }

    /// What others keep from being deleted stays for the next restore.
    fn delete(&mut self, parent: Ino, name: &[u8], go_on: &mut dyn FnMut() -> Result<()>) -> Result<u64> {
        let found = self.live.lookup(parent, name)?;
        let names = &mut *self.names;
        delete_beside_users(self.live, (parent, name), &found, &mut |other| names.changed(other), go_on)
    }
}

impl Top {
    fn name(&self) -> Result<&[u8]> {
        self.path.last().map(Vec::as_slice).ok_or_else(|| Error::invalid("the root has no name"))
    }
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

/// Whether a name that was to be changed is not there.
fn is_gone(error: &Error) -> bool {
    match error {
        Error::NotFound => true,
        Error::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    }
}

/// Makes what is missing of the way to a directory.
fn make_directories(live: &FileSystem, names: &mut dyn Names, path: &[u8]) -> Result<()> {
    let parts = components(path)?;
    for length in 1..=parts.len() {
        let path = parts[..length].join(&b"/"[..]);
        match if_there(resolve(live, &path))? {
            None => names.make_directory(&path)?,
            Some(found) if found.is_directory() => {}
            Some(_) => return Err(Error::NotDirectory),
        }
    }
    Ok(())
}
