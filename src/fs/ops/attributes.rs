//! lookup, getattr, setattr.

use super::{acl, xattr};
use crate::error::{Error, Result, Timestamp};
use crate::format::values::{InodeValue, inode_flags};
use crate::format::{BLOCK, Ino, MAX_OFFSET, ROOT_INO};
use crate::fs::directory::{self, Target, check_name};
use crate::fs::write_buffer::Presence;
use crate::fs::{Attributes, FileSystem, SetAttributes, SetTime, inode, mode};
use crate::txn::{Operation, View};

/// Bytes that st_size of a directory says per entry: about what both records of a short name take.
const ENTRY_BYTES: u64 = 32;
const GROUP_EXECUTE: u32 = 0o010;
/// What chown(2) and writes by ordinary users take away together with the set-id bits.
const CAPABILITY: &[u8] = b"security.capability";

/// Flags of an inode that say how its content is stored.
const STORING: u32 = inode_flags::NO_PACK | inode_flags::NO_COMPRESS;

impl FileSystem {
    /// `.` and `..` are understood; names are bytes without `/` and NUL, at most 255.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `NameTooLong`, `Stale` when `directory` no longer exists, or has no name any more.
    pub fn lookup(&self, directory: Ino, name: &[u8]) -> Result<Attributes> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        match find(view, &self.name_key, directory, name)? {
            Found::Dots(ino) => self.attributes(ino).map_err(or_not_found),
            Found::Entry(target) => self.attributes_of_entry(view, directory, target),
        }
    }

    /// From the newest version, because staged sizes belong to it; the name may be gone there, or name something else. So what disagrees
    /// there is damage only when it does so in the version of the entry.
    fn attributes_of_entry(&self, view: View<'_>, directory: Ino, target: Target) -> Result<Attributes> {
        match self.staging.presence(target.ino) {
            Ok((inode, presence)) => {
                if !directory::agrees(directory, target, &inode) {
                    directory::follow(view, directory, target)?;
                }
                Ok(attributes_of(target.ino, &inode, presence))
            }
            Err(Error::Stale) => directory::follow(view, directory, target).and(Err(Error::NotFound)),
            Err(error) => Err(error),
        }
    }

    /// Includes the size and blocks of staged data.
    pub fn attributes(&self, ino: Ino) -> Result<Attributes> {
        let (inode, presence) = self.staging.presence(ino)?;
        Ok(attributes_of(ino, &inode, presence))
    }

    /// Changes what is given, all or nothing. Sets ctime to now unless given, and so does a size that differs with mtime; of regular files
    /// only without `brings_times`. A size beyond 2^63-1 is `FileTooLarge`.
    ///
    /// `kill_set_id` also removes the file's capabilities and leaves directories alone.
    pub fn set_attributes(&self, ino: Ino, set: &SetAttributes) -> Result<Attributes> {
        for time in [set.atime, set.mtime, set.ctime].into_iter().flatten() {
            if matches!(time, SetTime::To(time) if time.nanos >= 1_000_000_000) {
                return Err(Error::invalid("nanoseconds of a time are out of range"));
            }
        }
        if let Some(size) = set.size {
            return self.set_size(ino, size, set);
        }
        // The inode, its access list, and an xattr that goes. Permissions can be taken away on a full disk.
        let records = 1 + acl::RECORDS_OF_CHMOD + xattr::RECORDS_OF_VALUE;
        let inode = self.volume.operate(records, true, |op| {
            let now = self.environment.stamp();
            let mut inode = inode::load(op.view(), ino)?;
            self.change_privileges(op, ino, &mut inode, set)?;
            apply(&mut inode, set, now);
            inode::store(op, ino, &inode)?;
            Ok(inode)
        })?;
        self.finish_change()?;
        Ok(attributes_of(ino, &inode, self.staging.presence(ino)?.1))
    }

    /// Lets the content of a file be stored as that of the file that a snapshot shows: packed and compressed or not. It comes before the content, which may be
    /// written out at any time; most files are that way already.
    ///
    /// # Errors
    /// `Stale` when one of the two is gone.
    pub(crate) fn restore_storing(&self, moment: &FileSystem, kept: Ino, target: Ino) -> Result<()> {
        let state = moment.volume.state();
        let wanted = inode::load(moment.volume.view(&state), kept)?.flags & STORING;
        let state = self.volume.state();
        if inode::load(self.volume.view(&state), target)?.flags & STORING == wanted {
            return Ok(());
        }
        drop(state);
        self.volume.operate(1, false, |op| {
            let before = inode::load(op.view(), target)?;
            inode::store(op, target, &InodeValue { flags: (before.flags & !STORING) | wanted, ..before })
        })?;
        self.finish_change()
    }

    /// Gives an object the owner, mode, access, modification and birth time that a snapshot shows of another one of the same type. The attributes are
    /// those already: an access control list says of the mode what the mode says.
    ///
    /// # Errors
    /// `Stale` when one of the two is gone.
    pub(crate) fn restore_inode(&self, moment: &FileSystem, kept: Ino, target: Ino) -> Result<()> {
        let state = moment.volume.state();
        let kept = inode::load(moment.volume.view(&state), kept)?;
        self.volume.operate(1, false, |op| {
            let now = self.environment.stamp();
            let before = inode::load(op.view(), target)?;
            let restored = InodeValue {
                mode: (before.mode & mode::TYPE) | (kept.mode & mode::PERMISSIONS),
                uid: kept.uid,
                gid: kept.gid,
                atime: kept.atime,
                mtime: kept.mtime,
                ctime: now,
                btime: kept.btime,
                flags: (before.flags & !STORING) | (kept.flags & STORING),
                ..before
            };
            inode::store(op, target, &restored)
        })?;
        self.finish_change()
    }

    fn set_size(&self, ino: Ino, size: u64, set: &SetAttributes) -> Result<Attributes> {
        if size > MAX_OFFSET {
            return Err(Error::FileTooLarge);
        }
        let before = self.attributes(ino)?;
        match before.mode & mode::TYPE {
            mode::REGULAR => {}
            mode::DIRECTORY => return Err(Error::IsDirectory),
            _ => return Err(Error::invalid("only regular files have a size to set")),
        }
        let mut set = *set;
        if before.size != size && set.mtime.is_none() && !set.brings_times {
            set.mtime = Some(SetTime::Now);
        }
        if set.kill_set_id || set.mode.is_some() {
            self.set_privileges(ino, &set)?;
        }
        let now = self.environment.stamp();
        let inode = self.truncate(ino, size, &mut |inode| apply(inode, &set, now))?;
        self.finish_change()?;
        Ok(attributes_of(ino, &inode, self.staging.presence(ino)?.1))
    }

    /// A step of its own before the content changes: fewer privileges than asked for is the safe side when the second step fails.
    pub(super) fn strip_capability(&self, ino: Ino, kill_set_id: bool) -> Result<()> {
        let state = self.volume.state();
        let has_some = |inode: &InodeValue| {
            inode.mode & mode::TYPE != mode::DIRECTORY && inode.flags & inode_flags::HAS_XATTRS != 0
        };
        if !kill_set_id || !has_some(&inode::load(self.volume.view(&state), ino)?) {
            return Ok(());
        }
        drop(state);
        // The inode and an xattr that goes.
        self.volume.operate(1 + xattr::RECORDS_OF_VALUE, true, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            if has_some(&inode) && xattr::remove_entry(op, &self.name_key, ino, &mut inode, CAPABILITY)? {
                inode::store(op, ino, &inode)?;
            }
            Ok(())
        })
    }

    /// Mode, access list and capabilities. The caller stores the inode.
    fn change_privileges(
        &self,
        op: &mut Operation<'_>,
        ino: Ino,
        inode: &mut InodeValue,
        set: &SetAttributes,
    ) -> Result<()> {
        if let Some(mode) = set.mode {
            acl::change_mode(op, &self.name_key, ino, inode, mode)?;
        }
        if drops_set_id(inode, set) && inode.flags & inode_flags::HAS_XATTRS != 0 {
            xattr::remove_entry(op, &self.name_key, ino, inode, CAPABILITY)?;
        }
        Ok(())
    }

    /// `change_privileges` in a step of its own before the size changes: the safe side when the second step fails, since
    /// nobody gets more than was asked for.
    fn set_privileges(&self, ino: Ino, set: &SetAttributes) -> Result<()> {
        // The inode, its access list, and an xattr that goes.
        self.volume.operate(1 + acl::RECORDS_OF_CHMOD + xattr::RECORDS_OF_VALUE, true, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            let before = inode;
            self.change_privileges(op, ino, &mut inode, set)?;
            if inode != before { inode::store(op, ino, &inode) } else { Ok(()) }
        })
    }
}

/// What a name leads to.
pub(super) enum Found {
    /// `.` and `..` are no entries.
    Dots(Ino),
    Entry(Target),
}

/// Looks for a name as [`FileSystem::lookup`] does.
pub(super) fn find(view: View<'_>, name_key: &[u8; 16], directory: Ino, name: &[u8]) -> Result<Found> {
    check_name(name)?;
    // What is held without a name cannot be found again, not even by its number.
    let parent = Some(inode::load(view, directory)?).filter(|inode| inode.links > 0).ok_or(Error::Stale)?;
    match name {
        // An NFS server asks for `.` of any inode by its bare number.
        b"." => Ok(Found::Dots(directory)),
        _ if parent.mode & mode::TYPE != mode::DIRECTORY => Err(Error::NotDirectory),
        b".." if directory == ROOT_INO => Ok(Found::Dots(ROOT_INO)),
        b".." => Ok(Found::Dots(parent.parent)),
        _ => {
            let found = directory::find(view, name_key, directory, name)?.ok_or(Error::NotFound)?;
            Ok(Found::Entry(found.target))
        }
    }
}

pub(super) fn or_not_found(error: Error) -> Error {
    match error {
        Error::Stale => Error::NotFound,
        other => other,
    }
}

fn drops_set_id(inode: &InodeValue, set: &SetAttributes) -> bool {
    set.kill_set_id && inode.mode & mode::TYPE != mode::DIRECTORY
}

/// Everything but the size and what an access list is tied to.
fn apply(inode: &mut InodeValue, set: &SetAttributes, now: Timestamp) {
    let at = |time: SetTime| match time {
        SetTime::Now => now,
        SetTime::To(time) => time,
    };
    if drops_set_id(inode, set) {
        lose_set_id(inode, set.kill_set_gid);
    }
    inode.uid = set.uid.unwrap_or(inode.uid);
    inode.gid = set.gid.unwrap_or(inode.gid);
    inode.atime = set.atime.map_or(inode.atime, at);
    inode.mtime = set.mtime.map_or(inode.mtime, at);
    let stays = set.brings_times && inode.mode & mode::TYPE == mode::REGULAR;
    inode.ctime = set.ctime.map_or(if stays { inode.ctime } else { now }, at);
}

/// The set-id bits go as with a write by an ordinary user; set-gid only where the group may execute, unless `set_gid`.
pub(super) fn lose_set_id(inode: &mut InodeValue, set_gid: bool) {
    inode.mode &= !mode::SET_UID;
    // Without group execution the bit means mandatory locking, which has nothing to do with privileges.
    if inode.mode & GROUP_EXECUTE != 0 || set_gid {
        inode.mode &= !mode::SET_GID;
    }
}

impl Attributes {
    /// Of an inode that nothing is staged of.
    pub(crate) fn of_published(ino: Ino, inode: &InodeValue) -> Attributes {
        attributes_of(ino, inode, Presence::published(inode))
    }
}

/// What stat(2) tells of an inode with this content, staged data included.
///
/// A directory's size is 32 bytes per entry, rounded up to whole blocks and at least one, and its blocks are those of that size.
pub(super) fn attributes_of(ino: Ino, inode: &InodeValue, content: Presence) -> Attributes {
    let (size, blocks) = match inode.mode & mode::TYPE {
        mode::DIRECTORY => {
            // The number of entries is the archive's word, and may be absurd.
            let size = inode.size.saturating_mul(ENTRY_BYTES).clamp(1, MAX_OFFSET - BLOCK).next_multiple_of(BLOCK);
            (size, size / 512)
        }
        _ => (content.size, content.bytes.min(content.size).div_ceil(512)),
    };
    Attributes {
        ino,
        mode: inode.mode,
        links: inode.links,
        uid: inode.uid,
        gid: inode.gid,
        rdev: inode.rdev,
        size,
        blocks,
        atime: inode.atime,
        mtime: inode.mtime,
        ctime: inode.ctime,
        btime: inode.btime,
    }
}
