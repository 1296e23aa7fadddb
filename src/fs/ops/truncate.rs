//! Sets the size of a file, in one operation however large it is.

use crate::error::{Error, Result};
use crate::format::values::{InodeValue, NO_TRIM};
use crate::format::{Ino, Key, kind};
use crate::fs::reclaim::STEP;
use crate::fs::write_buffer::LockedFile;
use crate::fs::{FileSystem, extents, inode};
use crate::txn::{Operation, View};

/// Maximum size of a file: the limit of a signed 64-bit offset.
pub(super) const MAX_SIZE: u64 = i64::MAX as u64;

impl FileSystem {
    /// Sets the size and applies `change` to the inode in the same operation. Data after a smaller
    /// size is removed at once: if it is a lot, the trim offset hides it, and it is freed later in
    /// steps. Growing makes a hole.
    ///
    /// # Errors
    /// `FileTooLarge`, `IsDirectory`, `Invalid` for anything else that is not a regular file.
    pub(crate) fn truncate(&self, ino: Ino, size: u64, change: &mut dyn FnMut(&mut InodeValue)) -> Result<InodeValue> {
        if size > MAX_SIZE {
            return Err(Error::FileTooLarge);
        }
        let inode = self.truncate_locked(&self.write_buffer.file(ino).lock(), size, change)?;
        if inode.trim != NO_TRIM {
            self.reclaim.enqueue(ino);
        }
        Ok(inode)
    }

    fn truncate_locked(
        &self,
        file: &LockedFile<'_>,
        size: u64,
        change: &mut dyn FnMut(&mut InodeValue),
    ) -> Result<InodeValue> {
        loop {
            self.writeback.finish_older_batches(file)?;
            let state = self.volume.state();
            let view = self.volume.view(&state);
            let inode = inode::load_regular(view, file.ino())?;
            let end = file.end();
            let (cuts, _) = extents::measure(view, file.ino(), size..inode.trim.max(size), STEP + 1)?;
            drop(state);
            // Inode, inline data, trim record.
            let records = 3 + cuts * extents::RECORDS_PER_CUT;
            let shrinks = size < inode.size.max(end);
            let cut = self.volume.operate(records, shrinks, |op| self.truncate_here(op, file, size, change))?;
            if let Some(inode) = cut {
                file.drop_published(&self.volume);
                return Ok(inode);
            }
        }
    }

    /// Returns `None` when a commit intervened and the caller has to try again.
    fn truncate_here(
        &self,
        op: &mut Operation<'_>,
        file: &LockedFile<'_>,
        size: u64,
        change: &mut dyn FnMut(&mut InodeValue),
    ) -> Result<Option<InodeValue>> {
        if !file.is_unsealed(&self.volume, op) {
            return Ok(None);
        }
        let mut inode = inode::load(op.view(), file.ino())?;
        cut(op, file.ino(), &mut inode, size)?;
        inode.size = size;
        change(&mut inode);
        inode::store(op, file.ino(), &inode)?;
        file.supersede(op, size..u64::MAX);
        Ok(Some(inode))
    }
}

/// Removes or hides everything from `size` on.
fn cut(op: &mut Operation<'_>, ino: Ino, inode: &mut InodeValue, size: u64) -> Result<()> {
    if let Some(old) = extents::inline(op.view(), ino, inode)?
        && old.len() as u64 > size
    {
        extents::set_inline(op, ino, inode, &old[..size as usize])?;
    }
    if inode.trim <= size {
        return Ok(());
    }
    let behind = extents::overlapping(op.view(), ino, size..inode.trim, STEP as usize + 1)?;
    if behind.len() as u64 <= STEP {
        return extents::remove_range(op, ino, inode, size..inode.trim);
    }
    if let Some(first) = behind.first().filter(|first| first.offset < size) {
        extents::remove_range(op, ino, inode, size..first.end())?;
    }
    inode.bytes = kept_bytes(op.view(), ino, inode, size)?;
    inode.trim = size;
    op.insert(Key::new(0, kind::TRIM, ino.0), &[])?;
    Ok(())
}

/// Returns the bytes of extents before `size`, counted on the side that is likely shorter.
fn kept_bytes(view: View<'_>, ino: Ino, inode: &InodeValue, size: u64) -> Result<u64> {
    if size <= inode.size / 2 {
        return Ok(extents::measure(view, ino, 0..size, u64::MAX)?.1);
    }
    let (_, gone) = extents::measure(view, ino, size..inode.trim, u64::MAX)?;
    Ok(inode.bytes.saturating_sub(gone))
}
