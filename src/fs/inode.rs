//! Loads and stores inode values.

use super::types::mode;
use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::format::{Ino, Key, kind};
use crate::txn::{Operation, View};

#[cfg(test)]
thread_local! {
    /// Number of inode lookups of this thread.
    pub(crate) static LOOKUPS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

pub(crate) fn key(ino: Ino) -> Key {
    Key::new(ino.0, kind::INODE, 0)
}

pub(crate) fn find(view: View<'_>, ino: Ino) -> Result<Option<InodeValue>> {
    #[cfg(test)]
    LOOKUPS.with(|lookups| lookups.set(lookups.get() + 1));
    view.get(key(ino), InodeValue::decode)
}

/// Returns the inode of a number that the caller got earlier: `Stale` when it is gone.
pub(crate) fn load(view: View<'_>, ino: Ino) -> Result<InodeValue> {
    find(view, ino)?.ok_or(Error::Stale)
}

pub(crate) fn load_regular(view: View<'_>, ino: Ino) -> Result<InodeValue> {
    let inode = load(view, ino)?;
    match inode.mode & mode::TYPE {
        mode::REGULAR => Ok(inode),
        mode::DIRECTORY => Err(Error::IsDirectory),
        _ => Err(Error::invalid(format!("not a regular file: ino={}", ino.0))),
    }
}

/// Returns the inode that an authentic record of the same version names: its absence is damage.
pub(crate) fn load_named(view: View<'_>, ino: Ino) -> Result<InodeValue> {
    find(view, ino)?.ok_or_else(|| Error::damaged(format!("an entry names an inode that is missing: inode={}", ino.0)))
}

pub(crate) fn store(op: &mut Operation<'_>, ino: Ino, inode: &InodeValue) -> Result<()> {
    op.insert(key(ino), &inode.encode()).map(drop)
}
