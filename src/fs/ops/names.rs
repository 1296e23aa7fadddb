//! Link, unlink, rmdir, and rename with its four modes.

use super::create::{NewObject, begin_object};
use crate::error::{Error, Result, Timestamp};
use crate::format::values::InodeValue;
use crate::format::{Ino, ROOT_INO};
use crate::fs::directory::{self, DirectoryEditor, DirectoryRecord, EntryTarget, MAX_LINKS, check_name, is_dot};
use crate::fs::reclaim::NameRemoval;
use crate::fs::{Attributes, Creator, FileSystem, RenameMode, inode, mode};
use crate::txn::{Operation, View};

/// Source directory: inode, index and list. Target directory: the same. Moved inode, replaced
/// inode, whiteout.
const RECORDS: u64 = 3 + 3 + 3;
/// Maximum depth before a cycle, which only damage can create, is assumed: deeper than any real
/// tree.
const MAX_DEPTH: u64 = 1 << 24;

/// Directories of a rename; one if both names are in the same.
struct RenameDirectories {
    source: DirectoryEditor,
    other: Option<DirectoryEditor>,
}

impl RenameDirectories {
    fn target(&mut self) -> &mut DirectoryEditor {
        self.other.as_mut().unwrap_or(&mut self.source)
    }

    fn store(&mut self, op: &mut Operation<'_>, now: Timestamp) -> Result<()> {
        self.source.store(op, now)?;
        match &mut self.other {
            Some(other) => other.store(op, now),
            None => Ok(()),
        }
    }
}

/// A rename within one operation.
struct RenameStep<'a> {
    name: &'a [u8],
    new_name: &'a [u8],
    moved: DirectoryRecord,
    parents: RenameDirectories,
    now: Timestamp,
}

impl FileSystem {
    /// Renames atomically. Refuses to move a directory below itself (`Invalid`).
    pub fn rename(
        &self,
        directory: Ino,
        name: &[u8],
        new_directory: Ino,
        new_name: &[u8],
        rename_mode: RenameMode,
    ) -> Result<()> {
        check_name(name)?;
        check_name(new_name)?;
        if is_dot(name) || is_dot(new_name) {
            return Err(Error::invalid("`.` and `..` cannot be renamed"));
        }
        self.reclaim.operate_removing(RECORDS, false, |op, removal| {
            let now = self.environment.stamp();
            let source = DirectoryEditor::load(op.view(), directory)?;
            let other =
                if directory == new_directory { None } else { Some(DirectoryEditor::load(op.view(), new_directory)?) };
            let moved = directory::find(op.view(), &self.name_key, directory, name)?.ok_or(Error::NotFound)?;
            let existing = directory::find(op.view(), &self.name_key, new_directory, new_name)?;
            // An inode that does not agree with its entry gets no other one (NAME-5).
            directory::load_target(op.view(), directory, moved.target)?;
            if let Some(existing) = &existing {
                directory::load_target(op.view(), new_directory, existing.target)?;
            }
            match (rename_mode, existing) {
                (RenameMode::NoReplace, Some(_)) => return Err(Error::Exists),
                (RenameMode::Exchange, None) => return Err(Error::NotFound),
                // Two names of one inode: POSIX requires success without a change.
                (_, Some(existing)) if existing.target.ino == moved.target.ino => return Ok(()),
                _ => {}
            }
            if other.is_some() && moved.target.is_directory() {
                check_not_below(op.view(), moved.target.ino, new_directory)?;
            }
            let change = RenameStep { name, new_name, moved, parents: RenameDirectories { source, other }, now };
            match existing {
                Some(existing) if rename_mode == RenameMode::Exchange => self.exchange(op, change, existing),
                _ => {
                    let whiteout = match rename_mode {
                        RenameMode::Whiteout(creator) => Some(creator),
                        _ => None,
                    };
                    self.replace(op, removal, change, existing, whiteout)
                }
            }
        })?;
        self.finish_change()
    }

    fn exchange(&self, op: &mut Operation<'_>, change: RenameStep<'_>, existing: DirectoryRecord) -> Result<()> {
        let RenameStep { name, new_name, moved, mut parents, now } = change;
        if parents.other.is_some() && existing.target.is_directory() {
            check_not_below(op.view(), existing.target.ino, parents.source.ino)?;
        }
        let (source, target) = (parents.source.ino, parents.target().ino);
        parents.source.retarget(op, &self.name_key, name, moved, existing.target)?;
        parents.target().retarget(op, &self.name_key, new_name, existing, moved.target)?;
        parents.store(op, now)?;
        store_moved(op, moved.target, target, now)?;
        store_moved(op, existing.target, source, now)
    }

    fn replace(
        &self,
        op: &mut Operation<'_>,
        removal: &mut NameRemoval<'_>,
        change: RenameStep<'_>,
        existing: Option<DirectoryRecord>,
        whiteout: Option<Creator>,
    ) -> Result<()> {
        let RenameStep { name, new_name, moved, mut parents, now } = change;
        let replaced = match existing {
            Some(existing) => Some((existing, load_replaceable(op.view(), moved.target, existing.target)?)),
            None => None,
        };
        let key = &self.name_key;
        if let Some(creator) = whiteout {
            let left = store_whiteout(op, &parents.source, creator, now)?;
            parents.source.retarget(op, key, name, moved, left)?;
        } else if parents.other.is_some() || replaced.is_some() {
            parents.source.remove(op, key, name, moved)?;
        }
        let is_new_entry = whiteout.is_some() || parents.other.is_some();
        let target = parents.target();
        match &replaced {
            Some((existing, _)) => target.retarget(op, key, new_name, *existing, moved.target)?,
            None if is_new_entry => target.insert(op, key, new_name, moved.target)?,
            None => target.rename(op, key, name, new_name, moved)?,
        }
        let new_parent = target.ino;
        parents.store(op, now)?;
        store_moved(op, moved.target, new_parent, now)?;
        match replaced {
            Some((existing, mut inode)) => removal.drop_name(op, existing.target.ino, &mut inode, now),
            None => Ok(()),
        }
    }
}

/// Returns the inode that `moved` replaces, if allowed.
fn load_replaceable(view: View<'_>, moved: EntryTarget, existing: EntryTarget) -> Result<InodeValue> {
    match (moved.is_directory(), existing.is_directory()) {
        (true, false) => return Err(Error::NotDirectory),
        (false, true) => return Err(Error::IsDirectory),
        _ => {}
    }
    let inode = inode::load_named(view, existing.ino)?;
    if existing.is_directory() && directory::has_entries(view, existing.ino, &inode)? {
        return Err(Error::NotEmpty);
    }
    Ok(inode)
}

/// Fails with `Invalid` when `ancestor` is `directory` or above it.
fn check_not_below(view: View<'_>, ancestor: Ino, directory: Ino) -> Result<()> {
    let mut at = directory;
    for _ in 0..MAX_DEPTH {
        if at == ancestor {
            return Err(Error::invalid("a directory cannot be moved below itself"));
        }
        if at == ROOT_INO {
            return Ok(());
        }
        at = inode::load_named(view, at)?.parent;
    }
    Err(Error::damaged(format!("the parents of a directory never reach the root: inode={}", directory.0)))
}

/// Stores the new parent and ctime of a moved inode. Changes 1 record.
fn store_moved(op: &mut Operation<'_>, moved: EntryTarget, parent: Ino, now: Timestamp) -> Result<()> {
    let mut inode = inode::load_named(op.view(), moved.ino)?;
    if moved.is_directory() {
        inode.parent = parent;
    }
    inode.ctime = now;
    inode::store(op, moved.ino, &inode)
}

/// Creates an overlayfs whiteout: a 0:0 character device without permissions. Changes 1 record.
fn store_whiteout(
    op: &mut Operation<'_>,
    parent: &DirectoryEditor,
    creator: Creator,
    now: Timestamp,
) -> Result<EntryTarget> {
    let creator = Creator { umask: None, ..creator };
    let object = NewObject { mode: mode::CHARACTER, rdev: 0, creator };
    let (ino, inode) = begin_object(op, parent, object, now)?;
    inode::store(op, ino, &inode)?;
    Ok(EntryTarget::of(ino, &inode))
}

impl FileSystem {
    /// Adds a name, up to 2^32 - 2 links; directories are refused with `NotPermitted`, an inode
    /// without any name with `NotFound`.
    pub fn link(&self, ino: Ino, directory: Ino, name: &[u8]) -> Result<Attributes> {
        check_name(name)?;
        if is_dot(name) {
            return Err(Error::Exists);
        }
        // The directory's inode, index and list; the linked inode.
        self.volume.operate(4, false, |op| {
            let now = self.environment.stamp();
            let mut linked = inode::find(op.view(), ino)?.ok_or(Error::NotFound)?;
            let target = EntryTarget::of(ino, &linked);
            if target.is_directory() {
                return Err(Error::NotPermitted);
            }
            let mut parent = DirectoryEditor::load(op.view(), directory)?;
            if directory::find(op.view(), &self.name_key, directory, name)?.is_some() {
                return Err(Error::Exists);
            }
            match linked.links {
                0 => return Err(Error::NotFound),
                MAX_LINKS.. => return Err(Error::TooManyLinks),
                _ => linked.links += 1,
            }
            linked.ctime = now;
            parent.insert(op, &self.name_key, name, target)?;
            parent.store(op, now)?;
            inode::store(op, ino, &linked)
        })?;
        self.finish_change()?;
        self.attributes(ino)
    }

    /// Removes a name. The last link of a file that is not open frees it at once when small, else
    /// in steps.
    pub fn unlink(&self, directory: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        match name {
            b"." => return Err(Error::invalid("`.` cannot be unlinked")),
            b".." => return Err(Error::IsDirectory),
            _ => {}
        }
        self.remove_name(directory, name, false)
    }

    pub fn remove_directory(&self, directory: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        match name {
            b"." => return Err(Error::invalid("`.` cannot be removed")),
            b".." => return Err(Error::NotEmpty),
            _ => {}
        }
        self.remove_name(directory, name, true)
    }

    fn remove_name(&self, directory: Ino, name: &[u8], want_directory: bool) -> Result<()> {
        // The directory's inode, index and list; the removed inode.
        self.reclaim.operate_removing(4, true, |op, removal| {
            let now = self.environment.stamp();
            let mut parent = DirectoryEditor::load(op.view(), directory)?;
            let found = directory::find(op.view(), &self.name_key, directory, name)?.ok_or(Error::NotFound)?;
            match (found.target.is_directory(), want_directory) {
                (true, false) => return Err(Error::IsDirectory),
                (false, true) => return Err(Error::NotDirectory),
                _ => {}
            }
            let mut removed = directory::load_target(op.view(), directory, found.target)?;
            if want_directory && directory::has_entries(op.view(), found.target.ino, &removed)? {
                return Err(Error::NotEmpty);
            }
            parent.remove(op, &self.name_key, name, found)?;
            parent.store(op, now)?;
            removal.drop_name(op, found.target.ino, &mut removed, now)
        })?;
        self.finish_change()
    }
}
