//! Brings objects of a snapshot back into the live tree.
//!
//! # Order
//! Each object is built with all that is below it in a directory of its own at the root, the stage, which only its maker can enter, and then takes the place
//! of what is in its way by one rename: exchanged with that where there is something. What was exchanged lies in the stage then and is deleted.
//! Every commit is one moment of this order (STAGE-3), so after a crash each path has what it had before or all that the snapshot shows, and
//! what else there is lies in the stage. The next restore finds that by name and mark and deletes it before anything else. No node of the
//! snapshot's tree becomes one of the live tree's: all inodes and entries are new, and data pages are shared as COPY-4 says.

use std::collections::BTreeSet;

use super::build::Builder;
use crate::error::{Error, Result};
use crate::exchange::deletion::delete_tree;
use crate::exchange::path::{components, if_there, resolve, resolve_or_make};
use crate::exchange::{Copied, Entries};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, Creator, FileSystem, RenameMode, XattrMode};
use lockbox_terminal::display;

/// The stage's name at the root of the archive.
const STAGE: &[u8] = b".lockbox-restore";
/// Only the stage has this attribute. A directory of its name without it is one of the user's, unless it is empty: then it is what was
/// left when an interruption came before the mark.
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
    /// `Invalid` for a path that the snapshot does not have, and when the archive has a directory of the stage's name that is none;
    /// `Exists` for what is in the way; what reading and deleting meet.
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
        remove_stage(live)?;
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
        let stage = make_stage(self.live)?;
        let mut report = RestoreReport::default();
        let restored = self.all(stage, go_on, &mut report);
        let removed = remove_stage(self.live);
        restored.and(removed)?;
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

    fn delete(&self, stage: Ino, name: &[u8]) -> Result<u64> {
        let found = self.live.lookup(stage, name)?;
        delete_tree(self.live, stage, name, &found)
    }
}

impl Top {
    fn name(&self) -> Result<&[u8]> {
        self.path.last().map(Vec::as_slice).ok_or_else(|| Error::invalid("the root has no name"))
    }
}

fn is_stage(fs: &FileSystem, name: &[u8], found: &Attributes) -> Result<bool> {
    if name != STAGE || !found.is_directory() {
        return Ok(false);
    }
    match fs.xattr(found.ino, MARK) {
        Err(Error::NoAttribute) => Ok(false),
        marked => marked.map(|_| true),
    }
}

/// Deletes what a restore left, if there is something.
fn remove_stage(live: &FileSystem) -> Result<()> {
    let Some(found) = if_there(live.lookup(ROOT_INO, STAGE))? else { return Ok(()) };
    if is_stage(live, STAGE, &found)? {
        return delete_tree(live, ROOT_INO, STAGE, &found).map(drop);
    }
    let in_the_way = || {
        let text = "the archive has a /.lockbox-restore that no restore has left; give it another name first";
        Error::invalid(text)
    };
    match live.remove_directory(ROOT_INO, STAGE) {
        Err(Error::NotEmpty | Error::NotDirectory) => Err(in_the_way()),
        removed => removed,
    }
}

fn make_stage(live: &FileSystem) -> Result<Ino> {
    let made = live.make_directory(ROOT_INO, STAGE, 0o700, MAKER)?;
    live.set_xattr(made.ino, MARK, b"1", XattrMode::Set)?;
    Ok(made.ino)
}
