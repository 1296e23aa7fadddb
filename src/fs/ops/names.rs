//! Names: mknod, create, mkdir, symlink, link, unlink, rmdir, and rename with its four modes.

use std::ops::ControlFlow;

use super::xattr::{self, RECORDS_INHERITED};
use crate::error::{Error, Result, Timestamp};
use crate::format::values::{Extent, InodeValue, NO_TRIM, inode_flags};
use crate::format::{Ino, MAX_VALUE, ROOT_INO};
use crate::fs::directory::{
    self, DirectoryEditor, DirectoryRecord, EntryTarget, FIRST_SEQUENCE, MAX_LINKS, check_name, check_new_name, is_dot,
};
use crate::fs::extents::{self, compression_of};
use crate::fs::reclaim::NameRemoval;
use crate::fs::{Attributes, Creator, FileSystem, RenameMode, XattrMode, inode, mode};
use crate::txn::{Operation, UnreferencedPages, View, Volume};

/// PATH_MAX without its NUL.
pub(in crate::fs) const MAX_TARGET: usize = 4095;
/// Records of a new object: its inode, and the directory's inode, index and list.
const RECORDS: u64 = 4;
/// Records of a symlink's target: inline, or an extent (a piece of a fragmented write holds more
/// than 4,095 bytes).
const RECORDS_OF_TARGET: u64 = 1;

/// A new object without a number.
#[derive(Clone, Copy)]
pub(super) struct NewObject {
    /// Includes the type bits.
    pub(super) mode: u32,
    pub(super) rdev: u32,
    pub(super) creator: Creator,
}

impl FileSystem {
    /// Creates a regular file, FIFO, socket or device, by the type bits of `mode` (none: regular).
    /// In a set-gid directory the group is inherited. `rdev` is `major << 20 | minor`, and 0 for
    /// everything but devices.
    pub fn make_node(&self, directory: Ino, name: &[u8], mode: u32, rdev: u32, creator: Creator) -> Result<Attributes> {
        let mode = match mode & mode::TYPE {
            0 => mode | mode::REGULAR,
            mode::REGULAR | mode::FIFO | mode::SOCKET | mode::CHARACTER | mode::BLOCK => mode,
            mode::DIRECTORY => return Err(Error::NotPermitted),
            _ => return Err(Error::invalid("mknod does not make this type")),
        };
        let rdev = if matches!(mode & mode::TYPE, mode::CHARACTER | mode::BLOCK) { rdev } else { 0 };
        self.make(directory, name, NewObject { mode, rdev, creator }, &mut |_, _, _| Ok(()))
    }

    /// Creates a regular file like `make_node`, and counts one open handle for it in the same step.
    pub fn create_and_open(&self, directory: Ino, name: &[u8], mode: u32, creator: Creator) -> Result<Attributes> {
        let object = NewObject { mode: (mode & mode::PERMISSIONS) | mode::REGULAR, rdev: 0, creator };
        let mut opened = None;
        // Counted before the publication, when no other caller can open or unlink the file.
        let created = self.make(directory, name, object, &mut |_, ino, _| {
            self.reclaim.open(ino);
            opened = Some(ino);
            Ok(())
        });
        if let (Err(_), Some(ino)) = (&created, opened) {
            self.reclaim.cancel_open(ino);
        }
        created
    }

    pub fn make_directory(&self, directory: Ino, name: &[u8], mode: u32, creator: Creator) -> Result<Attributes> {
        let object = NewObject { mode: (mode & mode::PERMISSIONS) | mode::DIRECTORY, rdev: 0, creator };
        self.make(directory, name, object, &mut |_, _, _| Ok(()))
    }

    /// Creates a directory with an attribute, atomically: no commit contains the one without the
    /// other. The value is short enough for the record, and the attribute is not an access control
    /// list. Errors: `Exists`; errors of the operation.
    pub(crate) fn make_marked_directory(
        &self,
        directory: Ino,
        name: &[u8],
        mode: u32,
        creator: Creator,
        mark: (&[u8], &[u8]),
    ) -> Result<Attributes> {
        let object = NewObject { mode: (mode & mode::PERMISSIONS) | mode::DIRECTORY, rdev: 0, creator };
        // The record is counted as that of a symlink's target.
        self.make(directory, name, object, &mut |op, ino, inode| {
            xattr::put_entry(op, &self.name_key, ino, inode, mark.0, mark.1, XattrMode::Create)
        })
    }

    /// Creates a symlink; `target` has 1 to 4095 bytes.
    pub fn make_symlink(&self, directory: Ino, name: &[u8], target: &[u8], creator: Creator) -> Result<Attributes> {
        match target.len() {
            0 => return Err(Error::NotFound),
            1..=MAX_TARGET => {}
            _ => return Err(Error::NameTooLong),
        }
        if target.contains(&0) {
            return Err(Error::invalid("a symlink's target contains NUL"));
        }
        let object = NewObject { mode: mode::SYMLINK | 0o777, rdev: 0, creator };
        if target.len() <= MAX_VALUE {
            return self.make(directory, name, object, &mut |op, ino, inode| {
                (inode.size, inode.bytes) = (target.len() as u64, target.len() as u64);
                op.insert(extents::inline_key(ino), target)?;
                Ok(())
            });
        }
        let mut reservation = self.volume.reserve_data(target.len() as u64, 1)?;
        let mut written = UnreferencedPages::new(&self.volume);
        let attributes = self.publish_object(directory, name, object, &mut |op, ino, inode| {
            let compression = compression_of(&self.options, inode.flags);
            written = self.volume.write_data(&mut reservation, ino, 0, target, compression)?;
            inode.size = target.len() as u64;
            extents::link_pages(op, inode, &mut written)
        })?;
        // The symlink exists; the next caller that needs durability gets the error.
        if let Err(error) = self.volume.limit_unsynced() {
            tracing::warn!(%error, "cannot make written data durable early");
        }
        self.finish_change()?;
        Ok(attributes)
    }

    /// Returns the target; `Invalid` for anything but a symlink.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        link_target(&self.volume, self.volume.view(&self.volume.state()), ino)
    }

    /// Writes the root directory of a new archive (mode 0755, owned by `creator`).
    pub(crate) fn format(&self, creator: Creator) -> Result<()> {
        // The inode.
        self.volume.operate(1, false, |op| {
            let now = self.environment.stamp();
            if op.allocate_ino()? != ROOT_INO {
                return Err(Error::Exists);
            }
            let object = NewObject { mode: mode::DIRECTORY | 0o755, rdev: 0, creator };
            inode::store(op, ROOT_INO, &new_inode(object, ROOT_INO, now))
        })?;
        self.finish_change()
    }

    fn make(
        &self,
        directory: Ino,
        name: &[u8],
        object: NewObject,
        fill: &mut ObjectInitializer<'_>,
    ) -> Result<Attributes> {
        let attributes = self.publish_object(directory, name, object, fill)?;
        self.finish_change()?;
        Ok(attributes)
    }

    /// Creates an object and its name in one operation, with the additions of `fill`.
    fn publish_object(
        &self,
        directory: Ino,
        name: &[u8],
        object: NewObject,
        fill: &mut ObjectInitializer<'_>,
    ) -> Result<Attributes> {
        check_new_name(name)?;
        let (ino, inode) = self.volume.operate(RECORDS + RECORDS_OF_TARGET + RECORDS_INHERITED, false, |op| {
            let now = self.environment.stamp();
            let mut parent = DirectoryEditor::load(op.view(), &self.name_key, directory)?;
            if directory::find(op.view(), &self.name_key, directory, name)?.is_some() {
                return Err(Error::Exists);
            }
            let (ino, mut inode) = begin_object(op, &parent, object, now)?;
            xattr::inherit_acls(op, &self.name_key, &parent, object.creator.umask, ino, &mut inode)?;
            fill(op, ino, &mut inode)?;
            inode::store(op, ino, &inode)?;
            parent.insert(op, name, EntryTarget::of(ino, &inode))?;
            parent.store(op, now)?;
            Ok((ino, inode))
        })?;
        Ok(Attributes::of_published(ino, &inode))
    }
}

/// Additions to a new object besides its inode and name.
type ObjectInitializer<'a> = dyn FnMut(&mut Operation<'_>, Ino, &mut InodeValue) -> Result<()> + 'a;

/// Allocates the number of a new object of `parent` and inherits flags and group; the caller stores
/// the inode.
fn begin_object(
    op: &mut Operation<'_>,
    parent: &DirectoryEditor<'_>,
    object: NewObject,
    now: Timestamp,
) -> Result<(Ino, InodeValue)> {
    let mut inode = new_inode(object, parent.ino, now);
    inode.flags = parent.inode.flags & (inode_flags::NO_PACK | inode_flags::NO_COMPRESS);
    if parent.inode.mode & mode::SET_GID != 0 {
        inode.gid = parent.inode.gid;
        if inode.mode & mode::TYPE == mode::DIRECTORY {
            inode.mode |= mode::SET_GID;
        }
    }
    Ok((op.allocate_ino()?, inode))
}

pub(super) fn new_inode(object: NewObject, parent: Ino, now: Timestamp) -> InodeValue {
    let is_directory = object.mode & mode::TYPE == mode::DIRECTORY;
    InodeValue {
        mode: object.mode,
        uid: object.creator.uid,
        gid: object.creator.gid,
        links: if is_directory { 2 } else { 1 },
        atime: now,
        mtime: now,
        ctime: now,
        btime: now,
        rdev: object.rdev,
        parent: if is_directory { parent } else { Ino(0) },
        next_sequence: if is_directory { FIRST_SEQUENCE } else { 0 },
        trim: NO_TRIM,
        next_piece: 1,
        ..InodeValue::default()
    }
}

pub(super) fn link_target(volume: &Volume, view: View<'_>, ino: Ino) -> Result<Vec<u8>> {
    let inode = inode::load(view, ino)?;
    if inode.mode & mode::TYPE != mode::SYMLINK {
        return Err(Error::invalid("not a symbolic link"));
    }
    if let Some(target) = view.get(extents::inline_key(ino), |value| Ok(value.to_vec()))? {
        return Ok(target);
    }
    let mut target = Vec::new();
    view.scan(extents::key(ino, 0), extents::end_key(ino), &mut |key, value| {
        let extent = Extent::decode(value)?;
        let start = target.len();
        if key.sub != start as u64 || start + extent.length as usize > MAX_TARGET {
            return Err(Error::damaged(format!("a symlink's extents are out of place: inode={}", ino.0)));
        }
        target.resize(start + extent.length as usize, 0);
        volume.read_data(&extent.page, extent.start, &mut target[start..])?;
        Ok(ControlFlow::Continue(()))
    })?;
    if target.is_empty() || target.len() as u64 != inode.size {
        return Err(Error::damaged(format!("a symlink's target is incomplete: inode={}", ino.0)));
    }
    Ok(target)
}

/// Source directory: inode, index and list. Target directory: the same. Moved inode, replaced
/// inode, whiteout.
const RECORDS_OF_RENAME: u64 = 3 + 3 + 3;
/// Maximum depth before a cycle, which only damage can create, is assumed: deeper than any real
/// tree.
const MAX_DEPTH: u64 = 1 << 24;

/// Directories of a rename; one if both names are in the same.
struct RenameDirectories<'k> {
    source: DirectoryEditor<'k>,
    other: Option<DirectoryEditor<'k>>,
}

impl<'k> RenameDirectories<'k> {
    fn target(&mut self) -> &mut DirectoryEditor<'k> {
        self.other.as_mut().unwrap_or(&mut self.source)
    }

    fn store(&mut self, op: &mut Operation<'_>, now: Timestamp) -> Result<()> {
        self.source.store(op, now)?;
        self.other.as_mut().map_or(Ok(()), |other| other.store(op, now))
    }
}

struct RenameStep<'a> {
    name: &'a [u8],
    new_name: &'a [u8],
    moved: DirectoryRecord,
    parents: RenameDirectories<'a>,
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
        self.reclaim.operate_removing(RECORDS_OF_RENAME, false, |op, removal| {
            let now = self.environment.stamp();
            let load = |directory| DirectoryEditor::load(op.view(), &self.name_key, directory);
            let source = load(directory)?;
            let other = if directory == new_directory { None } else { Some(load(new_directory)?) };
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
            match (rename_mode, existing) {
                (RenameMode::Exchange, Some(existing)) => self.exchange(op, change, existing),
                (RenameMode::Whiteout(creator), _) => self.replace(op, removal, change, existing, Some(creator)),
                _ => self.replace(op, removal, change, existing, None),
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
        parents.source.retarget(op, name, moved, existing.target)?;
        parents.target().retarget(op, new_name, existing, moved.target)?;
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
        let load = |existing: &DirectoryRecord| load_replaceable(op.view(), moved.target, existing.target);
        let replaced = existing.map(|existing| load(&existing).map(|inode| (existing, inode))).transpose()?;
        if let Some(creator) = whiteout {
            // As overlayfs expects it: a 0:0 character device without permissions.
            let object = NewObject { mode: mode::CHARACTER, rdev: 0, creator };
            let (ino, inode) = begin_object(op, &parents.source, object, now)?;
            inode::store(op, ino, &inode)?;
            parents.source.retarget(op, name, moved, EntryTarget::of(ino, &inode))?;
        } else if parents.other.is_some() || replaced.is_some() {
            parents.source.remove(op, name, moved)?;
        }
        let is_new_entry = whiteout.is_some() || parents.other.is_some();
        let target = parents.target();
        match &replaced {
            Some((existing, _)) => target.retarget(op, new_name, *existing, moved.target)?,
            None if is_new_entry => target.insert(op, new_name, moved.target)?,
            None => target.rename(op, name, new_name, moved)?,
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

impl FileSystem {
    /// Adds a name, up to 2^32 - 2 links; directories are refused with `NotPermitted`, an inode
    /// without any name with `NotFound`.
    pub fn link(&self, ino: Ino, directory: Ino, name: &[u8]) -> Result<Attributes> {
        check_new_name(name)?;
        // The directory's inode, index and list; the linked inode.
        self.volume.operate(4, false, |op| {
            let now = self.environment.stamp();
            let mut linked = inode::find(op.view(), ino)?.ok_or(Error::NotFound)?;
            let target = EntryTarget::of(ino, &linked);
            if target.is_directory() {
                return Err(Error::NotPermitted);
            }
            let mut parent = DirectoryEditor::load(op.view(), &self.name_key, directory)?;
            if directory::find(op.view(), &self.name_key, directory, name)?.is_some() {
                return Err(Error::Exists);
            }
            match linked.links {
                0 => return Err(Error::NotFound),
                MAX_LINKS.. => return Err(Error::TooManyLinks),
                _ => linked.links += 1,
            }
            linked.ctime = now;
            parent.insert(op, name, target)?;
            parent.store(op, now)?;
            inode::store(op, ino, &linked)
        })?;
        self.finish_change()?;
        self.attributes(ino)
    }

    /// Removes a name. The last link of a file that is not open frees it at once when small, else
    /// in steps.
    pub fn unlink(&self, directory: Ino, name: &[u8]) -> Result<()> {
        match name {
            b"." => Err(Error::invalid("`.` cannot be unlinked")),
            b".." => Err(Error::IsDirectory),
            _ => self.remove_name(directory, name, false),
        }
    }

    pub fn remove_directory(&self, directory: Ino, name: &[u8]) -> Result<()> {
        match name {
            b"." => Err(Error::invalid("`.` cannot be removed")),
            b".." => Err(Error::NotEmpty),
            _ => self.remove_name(directory, name, true),
        }
    }

    fn remove_name(&self, directory: Ino, name: &[u8], want_directory: bool) -> Result<()> {
        check_name(name)?;
        // The directory's inode, index and list; the removed inode.
        self.reclaim.operate_removing(4, true, |op, removal| {
            let now = self.environment.stamp();
            let mut parent = DirectoryEditor::load(op.view(), &self.name_key, directory)?;
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
            parent.remove(op, name, found)?;
            parent.store(op, now)?;
            removal.drop_name(op, found.target.ino, &mut removed, now)
        })?;
        self.finish_change()
    }
}
