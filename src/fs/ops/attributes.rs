//! lookup, getattr, setattr.

use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::format::{Ino, ROOT_INO, Timestamp};
use crate::fs::{Attributes, FileSystem, SetAttributes, SetTime, inode, mode};

/// Greatest size of a file: what off_t can say.
pub(crate) const MAX_SIZE: u64 = i64::MAX as u64;

impl FileSystem {
    /// `.` and `..` are understood; names are bytes without `/` and NUL, at most 255.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `NameTooLong`, `Stale` when `directory` no longer exists.
    pub fn lookup(&self, directory: Ino, name: &[u8]) -> Result<Attributes> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let parent = inode::load(view, directory)?;
        // An NFS server asks for `.` of any inode by its bare number.
        let ino = match name {
            b"." => directory,
            _ if !inode::is_directory(&parent) => return Err(Error::NotDirectory),
            b".." if directory == ROOT_INO => ROOT_INO,
            b".." => parent.parent,
            _ if name.len() > 255 => return Err(Error::NameTooLong),
            _ => self.find_entry(view, directory, name)?.ok_or(Error::NotFound)?.ino,
        };
        Ok(self.overlaid(ino, &inode::load(view, ino)?))
    }

    /// Includes the size and blocks of staged data.
    pub fn attributes(&self, ino: Ino) -> Result<Attributes> {
        let state = self.volume.state();
        Ok(self.overlaid(ino, &inode::load(self.volume.view(&state), ino)?))
    }

    pub(super) fn overlaid(&self, ino: Ino, value: &InodeValue) -> Attributes {
        let staged = if inode::is_regular(value) { self.staged_size(ino) } else { None };
        inode::attributes(ino, value, staged)
    }

    /// Changes what is given, all or nothing. Sets ctime to now unless given. A size beyond 2^63-1 is `FileTooLarge`.
    pub fn set_attributes(&self, ino: Ino, set: &SetAttributes) -> Result<Attributes> {
        let now = self.environment.now();
        let mut change = |inode: &mut InodeValue| apply(inode, set, now);
        let inode = match set.size {
            Some(size) if size > MAX_SIZE => return Err(Error::FileTooLarge),
            Some(size) => {
                {
                    let state = self.volume.state();
                    let inode = inode::load(self.volume.view(&state), ino)?;
                    if inode::is_directory(&inode) {
                        return Err(Error::IsDirectory);
                    }
                    if !inode::is_regular(&inode) {
                        return Err(Error::invalid("only regular files have a size to set"));
                    }
                }
                self.truncate(ino, size, &mut change)?
            }
            None => self.volume.operate(1, true, |op| {
                let mut inode = inode::load(op.view(), ino)?;
                let before = inode;
                change(&mut inode);
                if inode != before {
                    inode::store(op, ino, &inode)?;
                }
                Ok(inode)
            })?,
        };
        self.finish_change(self.overlaid(ino, &inode))
    }
}

fn apply(inode: &mut InodeValue, set: &SetAttributes, now: Timestamp) {
    let time = |set: SetTime| match set {
        SetTime::Now => now,
        SetTime::To(time) => time,
    };
    if let Some(bits) = set.mode {
        inode.mode = inode.mode & mode::TYPE | bits & mode::PERMISSIONS;
    }
    if set.kill_set_id && !inode::is_directory(inode) {
        kill_set_id(inode);
    }
    inode.uid = set.uid.unwrap_or(inode.uid);
    inode.gid = set.gid.unwrap_or(inode.gid);
    inode.atime = set.atime.map_or(inode.atime, time);
    if let Some(mtime) = set.mtime {
        inode.mtime = time(mtime);
    } else if set.size.is_some() {
        inode.mtime = now;
    }
    inode.ctime = set.ctime.map_or(now, time);
}

/// As the kernel does on a write by somebody without the capability: set-gid without group execution means mandatory locking and stays.
fn kill_set_id(inode: &mut InodeValue) {
    inode.mode &= !mode::SET_UID;
    if inode.mode & 0o010 != 0 {
        inode.mode &= !mode::SET_GID;
    }
}
