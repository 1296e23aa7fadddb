//! Extended attributes: names, values up to 64 KiB, a computed one for the birth time, and access
//! control lists: their inheritance, and consistency with the mode.

use std::ops::{ControlFlow, Range};

use crate::error::{Error, Result};
use crate::format::values::{
    InodeValue, MAX_XATTR, XATTR_PIECE, XattrEntry, decode_xattrs, encode_xattrs, inode_flags,
};
use crate::format::{Ino, Key, MAX_NAME, MAX_VALUE, kind};
use crate::fs::acl::{self, Acl, AclKind};
use crate::fs::directory::{DirectoryEditor, has_records, name_hash};
use crate::fs::{FileSystem, XattrMode, inode, mode};
use crate::txn::{Operation, View};

/// Maximum value inside the record: two of them with the longest names still fit into one leaf
/// value of 3,500 bytes.
const MAX_INSIDE: usize = 1024;
/// Maximum records changed by writing or removing one value: its entry and its pieces.
pub(super) const RECORDS_OF_VALUE: u64 = 1 + MAX_XATTR.div_ceil(XATTR_PIECE) as u64;

/// Computed attribute with the birth time, which FUSE cannot pass to statx(2). No file has a stored
/// attribute of this name, and it is not listed: programs that copy attributes would try to set it.
pub(in crate::fs) const BIRTH: &[u8] = b"user.lockbox.btime";
/// Namespaces of attributes that are stored unchanged. The kernel controls access to them.
const NAMESPACES: [&[u8]; 3] = [b"user.", TRUSTED, b"security."];
const TRUSTED: &[u8] = b"trusted.";
/// Maximum bytes of all names of an inode with their NULs, the limit of listxattr(2).
pub(in crate::fs) const MAX_LIST: usize = 65_536;

/// Class of an attribute by its name.
enum Attribute {
    Plain,
    List(AclKind),
    Birth,
}

impl FileSystem {
    /// Returns the value of an attribute.
    ///
    /// # Errors
    /// `NoAttribute`, `Unsupported` for a namespace that is not stored.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        read(self.volume.view(&self.volume.state()), &self.name_key, ino, name)
    }

    /// Sets an attribute with all privileges.
    ///
    /// # Errors
    /// Errors of [`FileSystem::set_xattr_for`].
    pub fn set_xattr(&self, ino: Ino, name: &[u8], value: &[u8], how: XattrMode) -> Result<()> {
        self.set_xattr_for(ino, name, value, how, &|_| true)
    }

    /// Sets an attribute. An access list also sets the mode, and clears the set-gid bit unless
    /// `keeps_set_gid` returns true for the file's group.
    ///
    /// # Errors
    /// `Exists` (Create), `NoAttribute` (Replace), `AttributeTooLarge` beyond 64 KiB,
    /// `RangeTooSmall` for names beyond 255, `Unsupported` for other namespaces, `NotPermitted` for
    /// the birth time, `NoSpace` when the names of all attributes would exceed 64 KiB, the limit of
    /// listxattr(2). For an access control list: `Invalid` when it is malformed, `PermissionDenied`
    /// for a default list of anything but a directory.
    pub fn set_xattr_for(
        &self,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        how: XattrMode,
        keeps_set_gid: &dyn Fn(u32) -> bool,
    ) -> Result<()> {
        match classify(name)? {
            Attribute::Birth => return Err(Error::NotPermitted),
            Attribute::List(kind) => return self.set_acl(ino, kind, value, how, keeps_set_gid),
            Attribute::Plain => {}
        }
        if value.len() > MAX_XATTR {
            return Err(Error::AttributeTooLarge);
        }
        // The inode, the old value and the new one.
        self.volume.operate(1 + 2 * RECORDS_OF_VALUE, false, |op| {
            let now = self.environment.stamp();
            let mut inode = inode::load(op.view(), ino)?;
            put_entry(op, &self.name_key, ino, &mut inode, name, value, how)?;
            inode.ctime = now;
            inode::store(op, ino, &inode)
        })?;
        self.finish_change()
    }

    /// Returns all names, each followed by NUL, in the format of listxattr(2).
    pub(crate) fn list_xattrs(&self, ino: Ino) -> Result<Vec<u8>> {
        self.list_xattrs_for(ino, &|| true)
    }

    /// Lists `trusted.` names only for privileged callers, like the kernel's own file systems;
    /// `is_trusted` is called if there is such a name.
    pub fn list_xattrs_for(&self, ino: Ino, is_trusted: &dyn Fn() -> bool) -> Result<Vec<u8>> {
        list(self.volume.view(&self.volume.state()), ino, is_trusted)
    }

    /// Returns whether [`FileSystem::add_files`] accepts an attribute of this name: neither an
    /// access control list nor the computed one.
    pub(crate) fn is_plain_xattr(name: &[u8]) -> bool {
        matches!(classify(name), Ok(Attribute::Plain))
    }

    /// Removes an attribute.
    ///
    /// # Errors
    /// `NoAttribute` (except for access control lists), `NotPermitted` for the birth time.
    pub fn remove_xattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        match classify(name)? {
            Attribute::Birth => return Err(Error::NotPermitted),
            Attribute::List(kind) => return self.remove_acl(ino, kind),
            Attribute::Plain => {}
        }
        // The inode and the old value.
        self.volume.operate(1 + RECORDS_OF_VALUE, true, |op| {
            let now = self.environment.stamp();
            let mut inode = inode::load(op.view(), ino)?;
            if !remove_entry(op, &self.name_key, ino, &mut inode, name)? {
                return Err(Error::NoAttribute);
            }
            inode.ctime = now;
            inode::store(op, ino, &inode)
        })?;
        self.finish_change()
    }
}

pub(super) fn read(view: View<'_>, name_key: &[u8; 16], ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
    let attribute = classify(name)?;
    let inode = inode::load(view, ino)?;
    if let Attribute::Birth = attribute {
        return Ok(format!("{}.{:09}", inode.btime.seconds, inode.btime.nanos).into_bytes());
    }
    find_value(view, name_key, ino, &inode, name)?.ok_or(Error::NoAttribute)
}

pub(super) fn list(view: View<'_>, ino: Ino, is_trusted: &dyn Fn() -> bool) -> Result<Vec<u8>> {
    let names = load_names(view, ino, &inode::load(view, ino)?)?;
    let has_trusted = names.split(|&byte| byte == 0).any(|name| name.starts_with(TRUSTED));
    if !has_trusted || is_trusted() {
        return Ok(names);
    }
    let shown = names.split_inclusive(|&byte| byte == 0).filter(|name| !name.starts_with(TRUSTED));
    Ok(shown.flatten().copied().collect())
}

fn classify(name: &[u8]) -> Result<Attribute> {
    match name.len() {
        1..=MAX_NAME if !name.contains(&0) => {}
        0..=MAX_NAME => return Err(Error::invalid("an attribute's name is empty or contains NUL")),
        _ => return Err(Error::RangeTooSmall),
    }
    if name == BIRTH {
        return Ok(Attribute::Birth);
    }
    if let Some(kind) = AclKind::of_name(name) {
        return Ok(Attribute::List(kind));
    }
    match NAMESPACES.into_iter().find_map(|namespace| name.strip_prefix(namespace)) {
        Some([]) => Err(Error::invalid("an attribute's name is a namespace only")),
        Some(_) => Ok(Attribute::Plain),
        None => Err(Error::Unsupported("attributes of this namespace".into())),
    }
}

fn find_value(
    view: View<'_>,
    hash_key: &[u8; 16],
    ino: Ino,
    inode: &InodeValue,
    name: &[u8],
) -> Result<Option<Vec<u8>>> {
    let entries = load(view, inode, record_key(hash_key, ino, name))?;
    entries.into_iter().find(|entry| entry.name == name).map(|entry| load_value(view, ino, entry)).transpose()
}

pub(in crate::fs) fn load_value(view: View<'_>, ino: Ino, entry: XattrEntry) -> Result<Vec<u8>> {
    if entry.piece == 0 {
        return Ok(entry.value);
    }
    let mut value = Vec::with_capacity(entry.length as usize);
    let pieces = pieces(ino, &entry);
    view.scan(pieces.start, pieces.end, &mut |key, bytes| {
        if (key.sub - pieces.start.sub) * XATTR_PIECE as u64 == value.len() as u64 {
            value.extend_from_slice(bytes);
        }
        Ok(ControlFlow::Continue(()))
    })?;
    if value.len() != entry.length as usize {
        return Err(Error::damaged(format!("an attribute's value is incomplete: inode={}", ino.0)));
    }
    Ok(value)
}

/// Returns every name with its NUL; `AttributeTooLarge` beyond MAX_LIST, which this program never
/// writes.
fn load_names(view: View<'_>, ino: Ino, inode: &InodeValue) -> Result<Vec<u8>> {
    let mut names = Vec::new();
    if inode.flags & inode_flags::HAS_XATTRS == 0 {
        return Ok(names);
    }
    let all = records(ino);
    view.scan(all.start, all.end, &mut |_, value| {
        for entry in decode_xattrs(value)? {
            names.extend_from_slice(&entry.name);
            names.push(0);
        }
        if names.len() > MAX_LIST {
            return Err(Error::AttributeTooLarge);
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(names)
}

/// Writes an attribute; the caller stores the inode. Changes at most twice as many records as the
/// value takes.
pub(in crate::fs) fn put_entry(
    op: &mut Operation<'_>,
    hash_key: &[u8; 16],
    ino: Ino,
    inode: &mut InodeValue,
    name: &[u8],
    value: &[u8],
    how: XattrMode,
) -> Result<()> {
    let key = record_key(hash_key, ino, name);
    let mut entries = load(op.view(), inode, key)?;
    let old = entries.iter().position(|entry| entry.name == name).map(|at| entries.remove(at));
    match (how, old) {
        (XattrMode::Create, Some(_)) => return Err(Error::Exists),
        (XattrMode::Replace, None) => return Err(Error::NoAttribute),
        (_, Some(old)) => remove_pieces(op, ino, &old)?,
        (_, None) => {
            // Stops a flood of attributes. The names are counted each time: hundreds of them take
            // microseconds, and there is no counter to maintain.
            if load_names(op.view(), ino, inode)?.len() + name.len() + 1 > MAX_LIST {
                return Err(Error::NoSpace("an inode's attributes have 64 KiB of names".into()));
            }
        }
    }
    let mut entry = XattrEntry { name: name.to_vec(), length: value.len() as u32, piece: 0, value: Vec::new() };
    if value.len() <= MAX_INSIDE {
        entry.value = value.to_vec();
    } else {
        entry.piece = inode.next_piece;
        let next = entry.piece.checked_add(1);
        inode.next_piece = next.ok_or_else(|| Error::NoSpace("an inode's piece numbers are used up".into()))?;
        let first = pieces(ino, &entry).start;
        for (index, bytes) in value.chunks(XATTR_PIECE).enumerate() {
            op.insert(Key { sub: first.sub + index as u64, ..first }, bytes)?;
        }
    }
    entries.push(entry);
    let record = encode_xattrs(&entries);
    if record.len() > MAX_VALUE {
        // Three long values with the same keyed 64-bit hash: infeasible to find without the key.
        return Err(Error::NoSpace("too many attributes share one hash".into()));
    }
    op.insert(key, &record)?;
    inode.flags |= inode_flags::HAS_XATTRS;
    Ok(())
}

/// Removes an attribute if it exists; the caller stores the inode. Changes at most RECORDS_OF_VALUE
/// records.
pub(super) fn remove_entry(
    op: &mut Operation<'_>,
    hash_key: &[u8; 16],
    ino: Ino,
    inode: &mut InodeValue,
    name: &[u8],
) -> Result<bool> {
    let key = record_key(hash_key, ino, name);
    let mut entries = load(op.view(), inode, key)?;
    let Some(at) = entries.iter().position(|entry| entry.name == name) else { return Ok(false) };
    let old = entries.remove(at);
    remove_pieces(op, ino, &old)?;
    if !entries.is_empty() {
        op.insert(key, &encode_xattrs(&entries))?;
        return Ok(true);
    }
    op.remove(key)?;
    if !has_records(op.view(), records(ino))? {
        inode.flags &= !inode_flags::HAS_XATTRS;
    }
    Ok(true)
}

fn record_key(hash_key: &[u8; 16], ino: Ino, name: &[u8]) -> Key {
    Key::new(ino.0, kind::XATTR, name_hash(hash_key, ino, name))
}

fn records(ino: Ino) -> Range<Key> {
    Key::new(ino.0, kind::XATTR, 0)..Key::new(ino.0, kind::XATTR_PIECE, 0)
}

fn pieces(ino: Ino, entry: &XattrEntry) -> Range<Key> {
    let first = u64::from(entry.piece) << 32;
    let count = (entry.length as usize).div_ceil(XATTR_PIECE) as u64;
    Key::new(ino.0, kind::XATTR_PIECE, first)..Key::new(ino.0, kind::XATTR_PIECE, first + count)
}

fn load(view: View<'_>, inode: &InodeValue, key: Key) -> Result<Vec<XattrEntry>> {
    if inode.flags & inode_flags::HAS_XATTRS == 0 {
        return Ok(Vec::new());
    }
    Ok(view.get(key, decode_xattrs)?.unwrap_or_default())
}

fn remove_pieces(op: &mut Operation<'_>, ino: Ino, entry: &XattrEntry) -> Result<()> {
    if entry.piece != 0 {
        let Range { start, end } = pieces(ino, entry);
        for sub in start.sub..end.sub {
            op.remove(Key { sub, ..start })?;
        }
    }
    Ok(())
}

/// Maximum records changed by writing one list: its entry and its pieces.
const RECORDS_OF_LIST: u64 = 1 + acl::MAX_BYTES.div_ceil(XATTR_PIECE) as u64;
/// Maximum records that an object inherits: both lists.
pub(super) const RECORDS_INHERITED: u64 = 2 * RECORDS_OF_LIST;
/// Maximum records changed by a change of the mode, in addition to the inode: a list replaced by
/// one of the same length.
pub(super) const RECORDS_OF_CHMOD: u64 = 2 * RECORDS_OF_LIST;

impl FileSystem {
    /// Sets the list, and with an access list the mode (ACL-2). `keeps_set_gid` returns whether the
    /// caller may keep the set-gid bit on objects of the group; otherwise an access list clears it,
    /// like chmod(2). It is called before the change begins.
    fn set_acl(
        &self,
        ino: Ino,
        kind: AclKind,
        value: &[u8],
        how: XattrMode,
        keeps_set_gid: &dyn Fn(u32) -> bool,
    ) -> Result<()> {
        let Some(list) = Acl::parse(value)? else { return self.remove_acl(ino, kind) };
        let before = self.attributes(ino)?;
        let set_gid = kind == AclKind::Access && before.mode & mode::SET_GID != 0;
        let retained_gid = (set_gid && keeps_set_gid(before.gid)).then_some(before.gid);
        // The inode, the old list and the new one.
        self.volume.operate(1 + 2 * RECORDS_OF_LIST, false, |op| {
            let now = self.environment.stamp();
            let mut inode = inode::load(op.view(), ino)?;
            check_placement(kind, inode.mode)?;
            if kind == AclKind::Access {
                inode.mode = (inode.mode & !mode::ACCESS) | list.mode_bits();
                if retained_gid != Some(inode.gid) {
                    inode.mode &= !mode::SET_GID;
                }
            }
            if kind == AclKind::Access && list.is_minimal() {
                remove_entry(op, &self.name_key, ino, &mut inode, kind.name())?;
            } else {
                put_entry(op, &self.name_key, ino, &mut inode, kind.name(), &list.encode(), how)?;
            }
            inode.ctime = now;
            inode::store(op, ino, &inode)
        })?;
        self.finish_change()
    }

    /// Removes the list; without one it succeeds, as on every Linux file system. The mode keeps the
    /// bits of the list.
    fn remove_acl(&self, ino: Ino, kind: AclKind) -> Result<()> {
        // The inode and the list.
        self.volume.operate(1 + RECORDS_OF_LIST, true, |op| {
            let now = self.environment.stamp();
            let mut inode = inode::load(op.view(), ino)?;
            if remove_entry(op, &self.name_key, ino, &mut inode, kind.name())? {
                inode.ctime = now;
                inode::store(op, ino, &inode)?;
            }
            Ok(())
        })?;
        self.finish_change()
    }
}

/// Checks ACL-3.
fn check_placement(kind: AclKind, mode: u32) -> Result<()> {
    match (kind, mode & mode::TYPE) {
        (_, mode::SYMLINK) => Err(Error::Unsupported("access control lists of symbolic links".into())),
        (AclKind::Access, _) | (AclKind::Default, mode::DIRECTORY) => Ok(()),
        (AclKind::Default, _) => Err(Error::PermissionDenied),
    }
}

fn load_acl(view: View<'_>, hash_key: &[u8; 16], ino: Ino, inode: &InodeValue, kind: AclKind) -> Result<Option<Acl>> {
    let Some(value) = find_value(view, hash_key, ino, inode, kind.name())? else { return Ok(None) };
    // Only valid lists are stored: another program wrote this one.
    let damaged = |error| Error::damaged(format!("{error}: inode={}", ino.0));
    let list = Acl::parse(&value).and_then(|list| list.ok_or_else(|| Error::invalid("an empty list")));
    list.map(Some).map_err(damaged)
}

/// Changes the permission bits of `inode` and its access list (ACL-2). The caller stores the inode.
pub(super) fn change_mode(
    op: &mut Operation<'_>,
    hash_key: &[u8; 16],
    ino: Ino,
    inode: &mut InodeValue,
    mode: u32,
) -> Result<()> {
    inode.mode = (inode.mode & mode::TYPE) | (mode & mode::PERMISSIONS);
    let Some(mut list) = load_acl(op.view(), hash_key, ino, inode, AclKind::Access)? else { return Ok(()) };
    list.set_mode(mode);
    put_entry(op, hash_key, ino, inode, AclKind::Access.name(), &list.encode(), XattrMode::Replace)
}

/// Sets the permissions of a new object of `parent`: the permissions in both the directory's
/// default list and the mode, or without a list the mode without the umask. Without a umask the
/// mode is exact and nothing is inherited. The caller stores the inode.
pub(super) fn inherit_acls(
    op: &mut Operation<'_>,
    hash_key: &[u8; 16],
    parent: &DirectoryEditor<'_>,
    umask: Option<u32>,
    ino: Ino,
    inode: &mut InodeValue,
) -> Result<()> {
    let file_type = inode.mode & mode::TYPE;
    let Some(umask) = umask.filter(|_| file_type != mode::SYMLINK) else { return Ok(()) };
    let Some(default) = load_acl(op.view(), hash_key, parent.ino, &parent.inode, AclKind::Default)? else {
        inode.mode &= !(umask & mode::ACCESS);
        return Ok(());
    };
    let (access, bits) = default.inherit(inode.mode);
    inode.mode = (inode.mode & !mode::ACCESS) | bits;
    if let Some(access) = access {
        put_entry(op, hash_key, ino, inode, AclKind::Access.name(), &access.encode(), XattrMode::Create)?;
    }
    if file_type == mode::DIRECTORY {
        put_entry(op, hash_key, ino, inode, AclKind::Default.name(), &default.encode(), XattrMode::Create)?;
    }
    Ok(())
}
