//! Frees unlinked and trimmed file content in bounded steps.

use std::ops::ControlFlow;

use super::FileSystem;
use crate::error::Result;
use crate::format::values::{Extent, InodeValue};
use crate::format::{Ino, Key, kind};
use crate::txn::Operation;

pub(crate) const REMOVED_RECORDS: u64 = 64;

pub(crate) fn removed(op: &mut Operation<'_>, ino: Ino, inode: &InodeValue, open: bool) -> Result<bool> {
    let _ = inode;
    if open {
        op.insert(Key::new(0, kind::ORPHAN, ino.0), &[])?;
        return Ok(false);
    }
    let mut keys = Vec::new();
    op.view().scan(Key::new(ino.0, 0, 0), Key::new(ino.0 + 1, 0, 0), &mut |key, value| {
        keys.push((key, if key.kind == kind::EXTENT { Some(Extent::decode(value)?) } else { None }));
        Ok(ControlFlow::Continue(()))
    })?;
    for (key, extent) in keys {
        op.remove(key)?;
        if let Some(extent) = extent {
            op.release(&extent.page, extent.born)?;
        }
    }
    op.inode_gone();
    Ok(true)
}

impl FileSystem {
    pub(crate) fn queue_reclaim(&self, ino: Ino) {
        let _ = self.volume.operate(64, true, |op| {
            if op.remove(Key::new(0, kind::ORPHAN, ino.0))? {
                removed(op, ino, &InodeValue::default(), false)?;
            }
            Ok(())
        });
    }
}
