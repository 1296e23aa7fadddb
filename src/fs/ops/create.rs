//! mknod, create, mkdir, symlink.

use std::ops::ControlFlow;

use super::xattr::{self, RECORDS_INHERITED};
use crate::error::{Error, Result, Timestamp};
use crate::format::values::{Extent, InodeValue, NO_TRIM, inode_flags};
use crate::format::{Ino, MAX_VALUE, ROOT_INO};
use crate::fs::directory::{self, DirectoryEditor, EntryTarget, FIRST_SEQUENCE, check_name, is_dot};
use crate::fs::packing::compresses;
use crate::fs::{Attributes, Creator, FileSystem, XattrMode, extents, inode, mode};
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
    /// list.
    ///
    /// # Errors
    /// `Exists`; errors of the operation.
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
            let compress = compresses(&self.options, inode.flags);
            written = self.volume.write_data(&mut reservation, ino, 0, target, compress)?;
            inode.size = target.len() as u64;
            extents::link_pages(op, inode, &mut written)
        })?;
        // The symlink exists; the next caller that needs durability gets the error.
        if let Err(error) = self.volume.limit_unsynced() {
            tracing::warn!(%error, "what was written could not be made durable early");
        }
        self.finish_change()?;
        Ok(attributes)
    }

    /// Returns the target; `Invalid` for anything but a symlink.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        let state = self.volume.state();
        link_target(&self.volume, self.volume.view(&state), ino)
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
        check_name(name)?;
        if is_dot(name) {
            return Err(Error::Exists);
        }
        let (ino, inode) = self.volume.operate(RECORDS + RECORDS_OF_TARGET + RECORDS_INHERITED, false, |op| {
            let now = self.environment.stamp();
            let mut parent = DirectoryEditor::load(op.view(), directory)?;
            if directory::find(op.view(), &self.name_key, directory, name)?.is_some() {
                return Err(Error::Exists);
            }
            let (ino, mut inode) = begin_object(op, &parent, object, now)?;
            xattr::inherit_acls(op, &self.name_key, &parent, object.creator.umask, ino, &mut inode)?;
            fill(op, ino, &mut inode)?;
            inode::store(op, ino, &inode)?;
            parent.insert(op, &self.name_key, name, EntryTarget::of(ino, &inode))?;
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
pub(super) fn begin_object(
    op: &mut Operation<'_>,
    parent: &DirectoryEditor,
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

/// See [`FileSystem::read_link`].
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
