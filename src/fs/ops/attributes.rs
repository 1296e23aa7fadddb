//! Lookup, readdir by sequence number, getattr, setattr, and access times like Linux's relatime.

use std::ops::ControlFlow;

use super::xattr;
use crate::error::{Error, Result, Timestamp};
use crate::format::values::{InodeValue, ListEntry, decode_list, inode_flags};
use crate::format::{BLOCK, Ino, MAX_OFFSET, ROOT_INO};
use crate::fs::directory::{self, DIRECTORY_TYPE, EntryTarget, FIRST_SEQUENCE, check_name, list_key, load_directory};
use crate::fs::write_buffer::ContentSize;
use crate::fs::{Attributes, DirectoryEntry, FileSystem, SetAttributes, SetTime, inode, mode};
use crate::txn::{Operation, ReadView, State, View};

/// Bytes per entry in st_size of a directory: about the size of both records of a short name.
const ENTRY_BYTES: u64 = 32;
const GROUP_EXECUTE: u32 = 0o010;
/// Attribute that chown(2) and writes by ordinary users remove together with the set-id bits.
const CAPABILITY: &[u8] = b"security.capability";

/// Flags of an inode that select how its content is stored.
const STORING: u32 = inode_flags::NO_PACK | inode_flags::NO_COMPRESS;

impl FileSystem {
    /// Looks up a name, including `.` and `..`; names are bytes without `/` and NUL, at most 255.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `NameTooLong`, `Stale` when `directory` no longer exists, or has
    /// no name any more.
    pub fn lookup(&self, directory: Ino, name: &[u8]) -> Result<Attributes> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        match find(view, &self.name_key, directory, name)? {
            LookupTarget::Dots(ino) => self.attributes(ino).map_err(stale_to_not_found),
            LookupTarget::Entry(target) => self.attributes_of_entry(view, directory, target),
        }
    }

    /// Returns attributes of the newest version, to which dirty sizes belong; the name may be
    /// removed there, or reference another inode. So a mismatch there is damage only if it is one
    /// in the version of the entry too.
    fn attributes_of_entry(&self, view: View<'_>, directory: Ino, target: EntryTarget) -> Result<Attributes> {
        match self.write_buffer.load_inode(target.ino) {
            Ok((inode, presence)) => {
                if !directory::is_consistent_target(directory, target, &inode) {
                    directory::load_target(view, directory, target)?;
                }
                Ok(attributes_of(target.ino, &inode, presence))
            }
            Err(Error::Stale) => directory::load_target(view, directory, target).and(Err(Error::NotFound)),
            Err(error) => Err(error),
        }
    }

    /// Returns the attributes, including the size and blocks of dirty data.
    pub fn attributes(&self, ino: Ino) -> Result<Attributes> {
        let (inode, presence) = self.write_buffer.load_inode(ino)?;
        Ok(attributes_of(ino, &inode, presence))
    }

    /// Applies all changes or none. Sets ctime to now unless given, and a changed size sets mtime
    /// likewise; for regular files only without `keeps_times`. A size beyond 2^63-1 is
    /// `FileTooLarge`.
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
        // The inode, its access list, and a removed xattr. Permissions can be removed on a full
        // disk.
        let records = 1 + xattr::RECORDS_OF_CHMOD + xattr::RECORDS_OF_VALUE;
        let inode = self.volume.operate(records, true, |op| {
            let now = self.environment.stamp();
            let mut inode = inode::load(op.view(), ino)?;
            self.change_privileges(op, ino, &mut inode, set)?;
            apply(&mut inode, set, now);
            inode::store(op, ino, &inode)?;
            Ok(inode)
        })?;
        self.finish_change()?;
        Ok(attributes_of(ino, &inode, self.write_buffer.load_inode(ino)?.1))
    }

    /// Copies the storage flags (packed, compressed) of a file in a snapshot to another file. To be
    /// called before the content is written, since writeback may happen at any time; most files
    /// have the flags already. Errors: `Stale` when one of the two is removed.
    pub(crate) fn restore_storage_flags(&self, snapshot: &FileSystem, source: Ino, target: Ino) -> Result<()> {
        let wanted = snapshot.published_inode(source)?.flags & STORING;
        if self.published_inode(target)?.flags & STORING == wanted {
            return Ok(());
        }
        self.volume.operate(1, false, |op| {
            let before = inode::load(op.view(), target)?;
            inode::store(op, target, &InodeValue { flags: (before.flags & !STORING) | wanted, ..before })
        })?;
        self.finish_change()
    }

    /// Copies owner, mode, access, modification and birth time of an object in a snapshot to
    /// another object of the same type. The extended attributes are copied already, so an access
    /// control list agrees with the mode. Errors: `Stale` when one of the two is removed.
    pub(crate) fn restore_inode(&self, snapshot: &FileSystem, source: Ino, target: Ino) -> Result<()> {
        let source = snapshot.published_inode(source)?;
        self.volume.operate(1, false, |op| {
            let now = self.environment.stamp();
            let before = inode::load(op.view(), target)?;
            let restored = InodeValue {
                mode: (before.mode & mode::TYPE) | (source.mode & mode::PERMISSIONS),
                uid: source.uid,
                gid: source.gid,
                atime: source.atime,
                mtime: source.mtime,
                ctime: now,
                btime: source.btime,
                flags: (before.flags & !STORING) | (source.flags & STORING),
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
        if before.size != size && set.mtime.is_none() && !set.keeps_times {
            set.mtime = Some(SetTime::Now);
        }
        if set.kill_set_id || set.mode.is_some() {
            self.set_privileges(ino, &set)?;
        }
        let now = self.environment.stamp();
        let inode = self.truncate(ino, size, &mut |inode| apply(inode, &set, now))?;
        self.finish_change()?;
        Ok(attributes_of(ino, &inode, self.write_buffer.load_inode(ino)?.1))
    }

    /// Removes the capabilities, in an operation before the content changes: when the change fails,
    /// fewer privileges than requested are the safe side.
    pub(super) fn strip_capability(&self, ino: Ino, kill_set_id: bool) -> Result<()> {
        let has_some = |inode: &InodeValue| {
            inode.mode & mode::TYPE != mode::DIRECTORY && inode.flags & inode_flags::HAS_XATTRS != 0
        };
        if !kill_set_id || !has_some(&self.published_inode(ino)?) {
            return Ok(());
        }
        // The inode and a removed xattr.
        self.volume.operate(1 + xattr::RECORDS_OF_VALUE, true, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            if has_some(&inode) && xattr::remove_entry(op, &self.name_key, ino, &mut inode, CAPABILITY)? {
                inode::store(op, ino, &inode)?;
            }
            Ok(())
        })
    }

    /// Changes mode, access list and capabilities. The caller stores the inode.
    fn change_privileges(
        &self,
        op: &mut Operation<'_>,
        ino: Ino,
        inode: &mut InodeValue,
        set: &SetAttributes,
    ) -> Result<()> {
        if let Some(mode) = set.mode {
            xattr::change_mode(op, &self.name_key, ino, inode, mode)?;
        }
        if drops_set_id(inode, set) && inode.flags & inode_flags::HAS_XATTRS != 0 {
            xattr::remove_entry(op, &self.name_key, ino, inode, CAPABILITY)?;
        }
        Ok(())
    }

    /// Runs `change_privileges` in an operation before the size changes: when the second one fails,
    /// no caller has more privileges than requested.
    fn set_privileges(&self, ino: Ino, set: &SetAttributes) -> Result<()> {
        // The inode, its access list, and a removed xattr.
        self.volume.operate(1 + xattr::RECORDS_OF_CHMOD + xattr::RECORDS_OF_VALUE, true, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            let before = inode;
            self.change_privileges(op, ino, &mut inode, set)?;
            if inode != before { inode::store(op, ino, &inode) } else { Ok(()) }
        })
    }
}

pub(super) enum LookupTarget {
    /// `.` and `..` are not stored as entries.
    Dots(Ino),
    Entry(EntryTarget),
}

pub(super) fn find(view: View<'_>, name_key: &[u8; 16], directory: Ino, name: &[u8]) -> Result<LookupTarget> {
    check_name(name)?;
    // An open directory without a name cannot be found again, not even by its number.
    let parent = Some(inode::load(view, directory)?).filter(|inode| inode.links > 0).ok_or(Error::Stale)?;
    match name {
        // An NFS server asks for `.` of any inode by its bare number.
        b"." => Ok(LookupTarget::Dots(directory)),
        _ if parent.mode & mode::TYPE != mode::DIRECTORY => Err(Error::NotDirectory),
        b".." if directory == ROOT_INO => Ok(LookupTarget::Dots(ROOT_INO)),
        b".." => Ok(LookupTarget::Dots(parent.parent)),
        _ => {
            let found = directory::find(view, name_key, directory, name)?.ok_or(Error::NotFound)?;
            Ok(LookupTarget::Entry(found.target))
        }
    }
}

pub(super) fn stale_to_not_found(error: Error) -> Error {
    match error {
        Error::Stale => Error::NotFound,
        other => other,
    }
}

fn drops_set_id(inode: &InodeValue, set: &SetAttributes) -> bool {
    set.kill_set_id && inode.mode & mode::TYPE != mode::DIRECTORY
}

/// Applies everything but the size and the parts tied to an access list.
fn apply(inode: &mut InodeValue, set: &SetAttributes, now: Timestamp) {
    let at = |time: SetTime| match time {
        SetTime::Now => now,
        SetTime::To(time) => time,
    };
    if drops_set_id(inode, set) {
        clear_set_id(inode, set.kill_set_gid);
    }
    inode.uid = set.uid.unwrap_or(inode.uid);
    inode.gid = set.gid.unwrap_or(inode.gid);
    inode.atime = set.atime.map_or(inode.atime, at);
    inode.mtime = set.mtime.map_or(inode.mtime, at);
    let stays = set.keeps_times && inode.mode & mode::TYPE == mode::REGULAR;
    inode.ctime = set.ctime.map_or(if stays { inode.ctime } else { now }, at);
}

/// Clears the set-id bits like a write by an ordinary user; set-gid only if the group may execute,
/// unless `set_gid`.
pub(super) fn clear_set_id(inode: &mut InodeValue, set_gid: bool) {
    inode.mode &= !mode::SET_UID;
    // Without group execution the bit means mandatory locking and grants no privileges.
    if inode.mode & GROUP_EXECUTE != 0 || set_gid {
        inode.mode &= !mode::SET_GID;
    }
}

impl Attributes {
    pub(crate) fn of_published(ino: Ino, inode: &InodeValue) -> Attributes {
        attributes_of(ino, inode, ContentSize::published(inode))
    }
}

/// Returns the stat(2) attributes of an inode with this content, dirty data included.
///
/// A directory's size is 32 bytes per entry, rounded up to whole blocks and at least one, and its
/// blocks are computed from that size.
pub(super) fn attributes_of(ino: Ino, inode: &InodeValue, content: ContentSize) -> Attributes {
    let (size, blocks) = match inode.mode & mode::TYPE {
        mode::DIRECTORY => {
            // The number of entries is read from the archive and may be absurd.
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

/// Seconds after which an access time is updated although nothing changed.
const DAY: i64 = 24 * 60 * 60;

impl FileSystem {
    /// Sets the access time to now if it is not newer than the last change of content and
    /// attributes, or a day old. So a file that is read all the time costs one small change a day,
    /// and programs that compare the times, such as mail readers, see that new content was read.
    /// Returns whether it was set; a read-only archive stays unchanged. The change becomes durable
    /// with the next commit, under every profile.
    pub fn note_access(&self, ino: Ino) -> Result<bool> {
        if self.volume.read_only() {
            return Ok(false);
        }
        let now = self.environment.stamp();
        if !is_due(&self.published_inode(ino)?, now) {
            return Ok(false);
        }
        // The inode.
        self.volume.operate(1, false, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            let due = is_due(&inode, now);
            if due {
                inode.atime = now;
                inode::store(op, ino, &inode)?;
            }
            Ok(due)
        })
    }
}

fn is_due(inode: &InodeValue, now: Timestamp) -> bool {
    inode.atime <= inode.mtime || inode.atime <= inode.ctime || now.seconds.saturating_sub(inode.atime.seconds) >= DAY
}

const SELF_COOKIE: u64 = 1;
const PARENT_COOKIE: u64 = 2;

impl FileSystem {
    /// Returns the bound of a listing that starts now: the directory's next sequence number.
    pub fn directory_bound(&self, directory: Ino) -> Result<u64> {
        Ok(load_directory(self.volume.view(&self.volume.state()), directory)?.next_sequence)
    }

    /// Calls `f` with the entries after `cookie` (0 at the start) and before `bound`: `.` (cookie
    /// 1), `..` (cookie 2), then the entries in creation order. With `with_attributes` each has its
    /// attributes, except for entries that must not be followed (NAME-5) or that have a damaged
    /// inode. All entries of one call are from one version. `f` must not call this file system's
    /// changing operations: it runs while the version is read.
    ///
    /// # Errors
    /// `Damaged` also when an unreadable entry was skipped: `f` got the others all the same.
    pub fn list_directory(
        &self,
        directory: Ino,
        cookie: u64,
        bound: u64,
        with_attributes: bool,
        f: &mut dyn FnMut(&DirectoryEntry<'_>, Option<&Attributes>) -> ControlFlow<()>,
    ) -> Result<()> {
        // Checked before the version is taken: data accepted until then is in that version, unless
        // some is dirty.
        let nothing_dirty = self.write_buffer.is_empty();
        let reading = ReadView::of(&self.volume, self.volume.state());
        let attributes = |ino: Ino, inode: &InodeValue| match nothing_dirty {
            true => Ok(Attributes::of_published(ino, inode)),
            false => self.load_listed_attributes(reading.state(), ino, inode),
        };
        let attributes: Option<&AttributeLoader<'_>> = if with_attributes { Some(&attributes) } else { None };
        list(reading.view(), directory, cookie, bound, attributes, f)
    }

    fn load_listed_attributes(&self, state: &State, ino: Ino, inode: &InodeValue) -> Result<Attributes> {
        if inode.mode & mode::TYPE != mode::REGULAR {
            return Ok(Attributes::of_published(ino, inode));
        }
        // Dirty data belongs to the newest version: if that is a later one by now, all attributes
        // are taken from it.
        let newest = self.write_buffer.load_dirty_inode(ino).and_then(|(newest, dirty)| {
            if newest.sequence != state.sequence {
                return self.attributes(ino);
            }
            let content_size = dirty.map_or_else(|| ContentSize::published(inode), |(_, content_size)| content_size);
            Ok(attributes_of(ino, inode, content_size))
        });
        match newest {
            // Removed meanwhile; the older version has it.
            Err(Error::Stale) => Ok(Attributes::of_published(ino, inode)),
            newest => newest,
        }
    }
}

/// Returns the attributes of a listed inode.
pub(super) type AttributeLoader<'a> = dyn Fn(Ino, &InodeValue) -> Result<Attributes> + 'a;

/// Lists like [`FileSystem::list_directory`], with the attributes that `attributes` returns for
/// each existing inode.
pub(super) fn list(
    view: View<'_>,
    directory: Ino,
    cookie: u64,
    bound: u64,
    attributes: Option<&AttributeLoader<'_>>,
    f: &mut dyn FnMut(&DirectoryEntry<'_>, Option<&Attributes>) -> ControlFlow<()>,
) -> Result<()> {
    // A removed directory that is still open lists nothing, not even itself.
    let listed = match load_directory(view, directory) {
        Ok(listed) if listed.links > 0 => listed,
        Ok(_) | Err(Error::NotFound) => return Ok(()),
        Err(error) => return Err(error),
    };
    let load_attributes = |ino: Ino, load: &dyn Fn() -> Result<InodeValue>| -> Result<Option<Attributes>> {
        let Some(attributes) = attributes else { return Ok(None) };
        match load().and_then(|inode| attributes(ino, &inode)) {
            Ok(attributes) => Ok(Some(attributes)),
            Err(Error::Damaged(_)) => Ok(None),
            Err(error) => Err(error),
        }
    };
    // `.` and `..` are not stored as entries: their types are known, or read from the inode.
    let parent = if directory == ROOT_INO { ROOT_INO } else { listed.parent };
    for (ino, name, place) in [(directory, &b"."[..], SELF_COOKIE), (parent, b"..", PARENT_COOKIE)] {
        if cookie < place {
            let entry = DirectoryEntry { ino, file_type: DIRECTORY_TYPE, name, cookie: place };
            let found = load_attributes(ino, &|| inode::load_named(view, ino))?;
            if f(&entry, found.as_ref()).is_break() {
                return Ok(());
            }
        }
    }
    let from = cookie.saturating_add(1).max(FIRST_SEQUENCE);
    if from >= bound {
        return Ok(());
    }
    let mut unreadable = Ok(());
    view.scan(list_key(directory, from), list_key(directory, bound), &mut |key, value| {
        let ListEntry { name, file_type, ino } = match decode_list(value) {
            Ok(entry) => entry,
            Err(error) => {
                unreadable = Err(error);
                return Ok(ControlFlow::Continue(()));
            }
        };
        let found = load_attributes(ino, &|| directory::load_target(view, directory, EntryTarget { ino, file_type }))?;
        Ok(f(&DirectoryEntry { ino, file_type, name, cookie: key.sub }, found.as_ref()))
    })?;
    unreadable
}
