//! Access times, updated like Linux's relatime.

use crate::error::{Result, Timestamp};
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::{FileSystem, inode};

/// Seconds after which an access time is updated although nothing changed.
const DAY: i64 = 24 * 60 * 60;

impl FileSystem {
    /// Sets the access time to now if it is not newer than the last change of content and
    /// attributes, or a day old. So a file that is read all the time costs one small change a day,
    /// and programs that compare the times, such as mail readers, see that new content was read.
    /// Returns whether it was set; a read-only archive stays unchanged. The change becomes durable
    /// with the next commit, under every profile.
    pub fn note_access(&self, ino: Ino) -> Result<bool> {
        if self.volume.read_only() {
            return Ok(false);
        }
        let now = self.environment.stamp();
        let state = self.volume.state();
        if !is_due(&inode::load(self.volume.view(&state), ino)?, now) {
            return Ok(false);
        }
        drop(state);
        // The inode.
        self.volume.operate(1, false, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            let due = is_due(&inode, now);
            if due {
                inode.atime = now;
                inode::store(op, ino, &inode)?;
            }
            Ok(due)
        })
    }
}

fn is_due(inode: &InodeValue, now: Timestamp) -> bool {
    inode.atime <= inode.mtime || inode.atime <= inode.ctime || now.seconds.saturating_sub(inode.atime.seconds) >= DAY
}
