//! Loads and stores inode values; counts open handles.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::format::{Ino, Key, kind};
use crate::txn::{Operation, View};

fn key(ino: Ino) -> Key {
    Key::new(ino.0, kind::INODE, 0)
}

pub(crate) fn load(view: View<'_>, ino: Ino) -> Result<InodeValue> {
    view.get(key(ino), InodeValue::decode)?.ok_or(Error::Stale)
}

pub(crate) fn store(op: &mut Operation<'_>, ino: Ino, inode: &InodeValue) -> Result<()> {
    op.insert(key(ino), &inode.encode())?;
    Ok(())
}

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
