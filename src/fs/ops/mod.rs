//! The operations, one file per family; each is one core call of an adapter.

mod attributes;
mod create;
mod data;
mod links;
mod listing;
mod rename;
mod statistics;
mod sync;
mod xattr;

use super::{FileSystem, SyncProfile};
use crate::error::Result;

impl FileSystem {
    /// With `sync=always` a change of names or attributes is durable before the call returns.
    pub(super) fn finish_change<T>(&self, done: T) -> Result<T> {
        if self.options.sync == SyncProfile::Always {
            self.volume.commit()?;
        }
        Ok(done)
    }
}
