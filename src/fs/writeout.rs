//! Turns staged data into pages and extents.

use super::{FileSystem, inode};
use crate::error::Result;
use crate::format::Ino;
use crate::format::values::InodeValue;

impl FileSystem {
    pub(crate) fn truncate(&self, ino: Ino, size: u64, change: &mut dyn FnMut(&mut InodeValue)) -> Result<InodeValue> {
        self.volume.operate(1, true, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            inode.size = size;
            change(&mut inode);
            inode::store(op, ino, &inode)?;
            Ok(inode)
        })
    }
}
