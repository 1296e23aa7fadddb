//! Brings objects of a snapshot back into the live tree.
//!
//! # Order
//! Each object is built with all that is below it in a directory of its own at the root, the stage, which only its maker can enter, and then takes the place
//! of what is in its way by one rename: exchanged with that where there is something. What was exchanged lies in the stage then and is deleted.
//! Every commit is one moment of this order (STAGE-3), so after a crash each path has what it had before or all that the snapshot shows, and
//! what else there is lies in the stage. The next restore finds that by name and mark and deletes it before anything else. No node of the
//! snapshot's tree becomes one of the live tree's: all inodes and entries are new, and data pages are shared as COPY-4 says.
//!
//! # The stage
//! It is a directory at the root with a name that nothing has which a restore touches: neither the live root nor that of the snapshot has it, and the
//! directory that takes what is restored is not below it. So no object that is restored has the stage in its way, nor lies in it when that is deleted.
//! It has its mark from its first moment on, in the operation that makes it, so every commit tells a stage from a directory of the user's with such
//! a name. A snapshot that was taken of an archive with a leftover shows a stage too: that is nobody's, and is not brought back.

use std::collections::BTreeSet;

use super::build::Builder;
use crate::error::{Error, Result};
use crate::exchange::deletion::delete_tree;
use crate::exchange::path::{components, if_there, resolve, resolve_or_make};
use crate::exchange::{Copied, Entries};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, Creator, FileSystem, RenameMode};
use lockbox_terminal::display;

/// With what the stage's name at the root of the archive begins; a number follows.
const STAGE: &[u8] = b".lockbox-restore-";
/// Only a stage has this attribute. A directory of such a name without it is one of the user's.
const MARK: &[u8] = b"trusted.lockbox.restore";
/// What is being built, and what made way for it.
const NEW: &[u8] = b"new";
const OLD: &[u8] = b"old";
/// Whose the stage and directories above a target are, when the snapshot says nothing of them.
const MAKER: Creator = Creator { uid: 0, gid: 0, umask: None };

/// A restore that was checked, and has changed nothing yet but what an interrupted one left.
pub struct Restore<'a> {
    live: &'a FileSystem,
    moment: &'a FileSystem,
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
        let restore = Restore { live, moment, tops, to: to.map(<[u8]>::to_vec), whole: whole && to.is_none() };
        restore.refuse_what_is_in_the_way()?;
        remove_stages(live)?;
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
    /// `NotDirectory` for a path whose way leads through something else in the live tree; what reading and writing meet.
    pub fn run(self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<RestoreReport> {
        let (stage, name) = self.make_stage()?;
        let mut report = RestoreReport::default();
        let restored = self.all(stage, go_on, &mut report);
        let removed = self.delete(ROOT_INO, &name);
        restored?;
        removed?;
        if self.whole {
            let mut nothing = || Ok(());
            Builder::new(self.live, self.moment, &mut nothing).xattrs(ROOT_INO, ROOT_INO)?;
            self.live.restore_inode(self.moment, ROOT_INO, ROOT_INO)?;
        }
        self.live.make_durable()?;
        Ok(report)
    }

    fn all(&self, stage: Ino, go_on: &mut dyn FnMut() -> Result<()>, report: &mut RestoreReport) -> Result<()> {
        let mut builder = Builder::new(self.live, self.moment, go_on);
        let target = match &self.to {
            None => None,
            Some(to) => {
                Some(resolve_or_make(self.live, to, |at, name| self.live.make_directory(at, name, 0o755, MAKER))?)
            }
        };
        for top in &self.tops {
            let result = match target {
                Some(directory) => self.top_into(&mut builder, stage, top, directory),
                None => self.top_in_place(&mut builder, stage, top).map(|deleted| report.deleted += deleted),
            };
            report.copied = builder.copied;
            result?;
        }
        if self.whole {
            let kept: BTreeSet<&[u8]> = self.tops.iter().map(Top::name).collect::<Result<_>>()?;
            for name in Restore::entries(self.live)? {
                if !kept.contains(&name[..]) {
                    (builder.go_on)()?;
                    self.live.rename(ROOT_INO, &name, stage, OLD, RenameMode::NoReplace)?;
                    report.deleted += self.delete(stage, OLD)?;
                }
            }
        }
        Ok(())
    }

    /// Beside what `directory` has.
    fn top_into(&self, builder: &mut Builder<'_>, stage: Ino, top: &Top, directory: Ino) -> Result<()> {
        let kept = self.kept(&top.path)?;
        builder.tree(&kept, stage, NEW)?;
        self.live.rename(stage, NEW, directory, top.name()?, RenameMode::NoReplace)
    }

    /// Where the snapshot has it; answers how many objects were deleted for it.
    fn top_in_place(&self, builder: &mut Builder<'_>, stage: Ino, top: &Top) -> Result<u64> {
        // The directory that takes it; of the way there, what the live tree does not have is built with it.
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
        let name = &top.path[there];
        self.build(builder, stage, top, there + 1)?;
        if existing.is_none() {
            return self.live.rename(stage, NEW, directory, name, RenameMode::NoReplace).map(|()| 0);
        }
        self.live.rename(stage, NEW, directory, name, RenameMode::Exchange)?;
        self.delete(stage, NEW)
    }

    /// Builds the object at `length` names of the path: with all below it, or with the rest of the path alone when that goes on.
    fn build(&self, builder: &mut Builder<'_>, stage: Ino, top: &Top, length: usize) -> Result<()> {
        let (mut parent, mut name) = (stage, NEW);
        let mut above = Vec::new();
        for end in length..top.path.len() {
            let kept = self.kept(&top.path[..end])?;
            let made = builder.object(&kept, parent, name)?;
            above.push((kept.ino, made));
            (parent, name) = (made, &top.path[end]);
        }
        builder.tree(&self.kept(&top.path)?, parent, name)?;
        above.into_iter().rev().try_for_each(|(kept, made)| self.live.restore_inode(self.moment, kept, made))
    }

    fn kept(&self, path: &[Vec<u8>]) -> Result<Attributes> {
        resolve(self.moment, &path.join(&b"/"[..]))
    }

    /// Under the first name that is free everywhere: see above.
    fn make_stage(&self) -> Result<(Ino, Vec<u8>)> {
        let to = self.to.as_ref().map(|to| components(to)).transpose()?.unwrap_or_default();
        for number in 1u64.. {
            let name = [STAGE, number.to_string().as_bytes()].concat();
            let is_free = if_there(self.live.lookup(ROOT_INO, &name))?.is_none()
                && if_there(self.moment.lookup(ROOT_INO, &name))?.is_none()
                && to.first().is_none_or(|first| *first != &name[..]);
            if is_free {
                let mark = (MARK, &b"1"[..]);
                let made = self.live.make_marked_directory(ROOT_INO, &name, 0o700, MAKER, mark)?;
                return Ok((made.ino, name));
            }
        }
        Err(Error::Exists)
    }

    fn delete(&self, parent: Ino, name: &[u8]) -> Result<u64> {
        let found = self.live.lookup(parent, name)?;
        delete_tree(self.live, parent, name, &found)
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

/// Deletes what restores left, if there is something.
fn remove_stages(live: &FileSystem) -> Result<()> {
    let mut left = Vec::new();
    for entry in Entries::new(live, ROOT_INO)? {
        let entry = entry?;
        if is_stage(live, &entry.name, &entry.attributes)? {
            left.push(entry);
        }
    }
    left.iter().try_for_each(|entry| delete_tree(live, ROOT_INO, &entry.name, &entry.attributes).map(drop))
}
