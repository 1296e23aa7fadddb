//! Loads and stores inode values; counts open handles.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::types::{Attributes, mode};
use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::format::{Ino, Key, kind};
use crate::txn::{Operation, View};

fn key(ino: Ino) -> Key {
    Key::new(ino.0, kind::INODE, 0)
}

/// # Errors
/// `Stale`: the inode was removed; somebody held on to its number.
pub(crate) fn load(view: View<'_>, ino: Ino) -> Result<InodeValue> {
    view.get(key(ino), InodeValue::decode)?.ok_or(Error::Stale)
}

/// A directory that something is to be created or found in.
///
/// # Errors
/// `NotFound` when it was removed while somebody held it, as POSIX wants for a removed working directory; `NotDirectory`.
pub(crate) fn load_directory(view: View<'_>, ino: Ino) -> Result<InodeValue> {
    let inode = view.get(key(ino), InodeValue::decode)?.ok_or(Error::NotFound)?;
    if !is_directory(&inode) {
        return Err(Error::NotDirectory);
    }
    Ok(inode)
}

pub(crate) fn store(op: &mut Operation<'_>, ino: Ino, inode: &InodeValue) -> Result<()> {
    op.insert(key(ino), &inode.encode())?;
    Ok(())
}

pub(crate) fn remove(op: &mut Operation<'_>, ino: Ino) -> Result<()> {
    op.remove(key(ino))?;
    op.inode_gone();
    Ok(())
}

pub(crate) fn is_directory(inode: &InodeValue) -> bool {
    inode.mode & mode::TYPE == mode::DIRECTORY
}

pub(crate) fn is_regular(inode: &InodeValue) -> bool {
    inode.mode & mode::TYPE == mode::REGULAR
}

/// Bytes that a directory shows for each entry.
const ENTRY_BYTES: u64 = 32;

/// What stat tells of an inode; `staged` overlays (size, staged bytes) of a regular file.
pub(crate) fn attributes(ino: Ino, inode: &InodeValue, staged: Option<(u64, u64)>) -> Attributes {
    let (size, bytes) = match inode.mode & mode::TYPE {
        // As on ext4: whole blocks that grow with the number of entries.
        mode::DIRECTORY => {
            let size = (inode.size * ENTRY_BYTES).max(1).next_multiple_of(4096);
            (size, size)
        }
        _ => {
            let (size, staged) = staged.unwrap_or((inode.size, 0));
            // Staged bytes may lie over extents, so their sum is an upper bound; never more than the file has.
            (size, (inode.bytes + staged).min(size.next_multiple_of(512)))
        }
    };
    Attributes {
        ino,
        mode: inode.mode,
        links: inode.links,
        uid: inode.uid,
        gid: inode.gid,
        rdev: inode.rdev,
        size,
        blocks: bytes.div_ceil(512),
        atime: inode.atime,
        mtime: inode.mtime,
        ctime: inode.ctime,
        btime: inode.btime,
    }
}

/// Handles of the kernel and of other users of the library; an unlinked inode lives as long as it has one.
#[derive(Default)]
pub(crate) struct OpenHandles(Mutex<HashMap<Ino, u64>>);

impl OpenHandles {
    pub(crate) fn open(&self, ino: Ino) {
        *self.0.lock().entry(ino).or_default() += 1;
    }

    /// Answers whether it was the last handle.
    pub(crate) fn release(&self, ino: Ino) -> bool {
        let mut handles = self.0.lock();
        let Some(count) = handles.get_mut(&ino) else { return false };
        *count -= 1;
        if *count > 0 {
            return false;
        }
        handles.remove(&ino);
        true
    }

    pub(crate) fn is_open(&self, ino: Ino) -> bool {
        self.0.lock().contains_key(&ino)
    }
}
