//! File system operations, one file per family; each is one core call of an adapter.

mod attributes;
mod bulk;
mod copy;
mod create;
mod file_data;
mod listing;
mod names;
mod paths;
mod snapshots;
mod sparse;
mod sync;
mod xattr;

pub use bulk::{MAX_SMALL_FILE, NewFile};
pub(super) use create::MAX_TARGET;
pub(crate) use snapshots::ChangedInode;
pub use snapshots::SnapshotView;
pub use sync::PendingSync;
#[cfg(test)]
pub(super) use xattr::put_entry;
pub(super) use xattr::{BIRTH, load_value};

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
