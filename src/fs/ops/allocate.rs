//! Plain fallocate(2): checks the space and extends the size.

use super::attributes::clear_set_id;
use super::holes::checked_range;
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::{FileSystem, extents, inode};
use crate::txn::View;

impl FileSystem {
    /// Checks that the range could be written in full, by the available space that statfs reports,
    /// and without `keep_size` extends the file to its end. No blocks are reserved: a copy-on-write
    /// archive could not put later writes into them, so the checked space is not kept for this
    /// file. Waits for pending frees like a write. `host_free` as in [`FileSystem::statistics`].
    /// Does not touch times, like [`FileSystem::write`].
    ///
    /// # Errors
    /// `NoSpace`, and nothing has changed; `Invalid` for an empty range or anything but a regular
    /// file, `FileTooLarge` beyond 2^63-1.
    pub fn allocate(
        &self,
        ino: Ino,
        offset: u64,
        length: u64,
        keep_size: bool,
        kill_set_id: bool,
        host_free: u64,
    ) -> Result<()> {
        let range = checked_range(offset, length)?;
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let inode = inode::load_regular(view, ino)?;
        let wanted = length.saturating_sub(present(view, ino, &inode, range.start, range.end)?);
        // A reader would delay the frees that this waits for.
        drop(state);
        let fits = || Ok(wanted <= self.writable_now(host_free)?);
        if !self.volume.have_room(&fits)? {
            let free = self.writable_now(host_free)?;
            return Err(Error::NoSpace(format!("the range needs more than is free: bytes={wanted} free={free}")));
        }
        self.strip_capability(ino, kill_set_id)?;
        let entry = self.write_buffer.file(ino);
        // The size is changed under the file's lock (truncation compares it with the dirty data).
        let file = entry.lock();
        self.volume.operate(1, false, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            if !keep_size {
                inode.size = inode.size.max(range.end);
            }
            if kill_set_id {
                clear_set_id(&mut inode, false);
            }
            inode::store(op, ino, &inode)
        })?;
        drop(file);
        self.finish_change()
    }
}

/// Returns the bytes of the range that extents hold already.
fn present(view: View<'_>, ino: Ino, inode: &InodeValue, start: u64, end: u64) -> Result<u64> {
    Ok(extents::measure(view, ino, start..end.min(inode.trim).min(inode.size).max(start), u64::MAX)?.1)
}
