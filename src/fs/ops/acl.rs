//! Inheritance of access control lists, and consistency of list and mode.

use super::xattr::{find_value, put_entry, remove_entry};
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::format::values::{InodeValue, XATTR_PIECE};
use crate::fs::acl::{self, Acl, AclKind};
use crate::fs::directory::DirectoryEditor;
use crate::fs::{FileSystem, XattrMode, inode, mode};
use crate::txn::{Operation, View};

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
    pub(super) fn set_acl(
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
    pub(super) fn remove_acl(&self, ino: Ino, kind: AclKind) -> Result<()> {
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

/// Loads the stored list of an inode.
fn load(view: View<'_>, hash_key: &[u8; 16], ino: Ino, inode: &InodeValue, kind: AclKind) -> Result<Option<Acl>> {
    let Some(value) = find_value(view, hash_key, ino, inode, kind.name())? else { return Ok(None) };
    // Only valid lists are stored: another program wrote this one.
    let damaged = |error| Error::damaged(format!("{error}: inode={}", ino.0));
    Acl::parse(&value)
        .map_err(damaged)?
        .map_or_else(|| Err(damaged(Error::invalid("an empty list"))), |list| Ok(Some(list)))
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
    let Some(mut list) = load(op.view(), hash_key, ino, inode, AclKind::Access)? else { return Ok(()) };
    list.set_mode(mode);
    put_entry(op, hash_key, ino, inode, AclKind::Access.name(), &list.encode(), XattrMode::Replace)
}

/// Sets the permissions of a new object of `parent`: the permissions in both the directory's
/// default list and the mode, or without a list the mode without the umask. Without a umask the
/// mode is exact and nothing is inherited. The caller stores the inode.
pub(super) fn inherit(
    op: &mut Operation<'_>,
    hash_key: &[u8; 16],
    parent: &DirectoryEditor,
    umask: Option<u32>,
    ino: Ino,
    inode: &mut InodeValue,
) -> Result<()> {
    let file_type = inode.mode & mode::TYPE;
    let Some(umask) = umask.filter(|_| file_type != mode::SYMLINK) else { return Ok(()) };
    let Some(default) = load(op.view(), hash_key, parent.ino, &parent.inode, AclKind::Default)? else {
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
