//! File system operations, one file per family; each is one core call of an adapter.

mod access;
mod acl;
mod allocate;
mod attributes;
mod bulk;
mod changes;
mod copy;
mod create;
mod file_data;
mod holes;
mod links;
mod listing;
mod paths;
mod rename;
mod seek;
mod snapshot_view;
mod snapshots;
mod statistics;
mod sync;
mod truncate;
mod usage;
mod xattr;

pub use bulk::{MAX_SMALL_FILE, NewFile};
pub(crate) use changes::ChangedInode;
pub(super) use create::MAX_TARGET;
pub use snapshot_view::SnapshotView;
pub use sync::PendingSync;
#[cfg(test)]
pub(super) use xattr::put_entry;
pub(super) use xattr::{BIRTH, value_of_entry};

use crate::error::Result;
use crate::fs::{FileSystem, SyncProfile};

impl FileSystem {
    /// Ends every successful change of the namespace: under `sync=always` it is durable before it
    /// returns.
    fn finish_change(&self) -> Result<()> {
        if self.options.sync == SyncProfile::Always {
            self.volume.commit()?;
        }
        Ok(())
    }
}
