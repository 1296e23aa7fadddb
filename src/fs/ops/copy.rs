//! copy_file_range(2): a copy shares the pages of its source; ranges that cannot be shared are
//! copied.
//!
//! # Invariants
//! COPY-1  A page with parts of several files is referenced only by the first `PACK` bytes of files
//!     that writeback packed: an extent that ends there is never shared. So a copy never ties files
//!     of several owners together, not even through a copy of a copy.
//! COPY-2  No dirty data is over the target's range when its extents change, and everything
//!     accepted of the source before the call is in extents or inline data by then.
//! COPY-3  Every step is one operation, so a copy that fails or stops early leaves a prefix copied
//!     and the rest unchanged.
//! COPY-4  A page in a snapshot may be shared by the live tree as long as the snapshot has its
//!     name, which each step checks in its own operation.
//!
//! # Why the counts stay right when the source is a snapshot (COPY-4)
//! For each extent of the snapshot's tree there is one count of its page, which is not released
//! while the snapshot has its name. Either the live tree still has the extent; or it was removed
//! there, and was `born` no later than the snapshot, so `release` put it with its count on the dead
//! list of the snapshot that was the newest then: this one or a later one. When a later one is
//! removed, extents born no later than its predecessor move to the predecessor's list, count and
//! all, and this snapshot is not passed over. So the page is in use with a count of at least one,
//! whether or not it is on a dead list, and one more is right. The new extent is `born` in the open
//! transaction, which is later than every snapshot: its release drops its own count, or hands it to
//! a snapshot that was taken since and has it. No node of the snapshot's tree is used.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use super::attributes::clear_set_id;
use crate::error::{Error, Result};
use crate::format::values::{Extent, InodeValue, inode_flags};
use crate::format::{BLOCK, Ino, MAX_OFFSET, MAX_VALUE};
use crate::fs::extents::{self, MappedExtent, compression_of};
use crate::fs::write_buffer::{DirtyFile, LockedFile};
use crate::fs::{FileSystem, inode};
use crate::txn::{Operation, View};

/// Maximum extents that one step adds, and removes of the target: 256 MiB of a file written in one
/// go.
const STEP: usize = 2048;
/// Maximum extents that one call adds; the caller calls again for the rest.
const MAX_EXTENTS_PER_CALL: usize = 32 * STEP;
/// Maximum bytes that one step copies, and one call.
const COPY_STEP_BYTES: u64 = 1 << 20;
const COPY_CALL_BYTES: u64 = 64 << 20;
/// A shorter part is copied: an extent of its own would cost as much and pin a whole page.
const MIN_SHARED: u64 = BLOCK;

struct CopyJob<'a> {
    /// Snapshot that has the source; `None` for the live tree.
    snapshot: Option<&'a FileSystem>,
    source: Ino,
    target: &'a Arc<DirtyFile>,
    kill_set_id: bool,
}

struct CopyRange {
    from: u64,
    to: u64,
    length: u64,
}

/// Content of the source at the beginning of a range.
enum SourceContent {
    /// Holes and extents to be shared, over this many bytes.
    Shared(u64, Vec<MappedExtent>),
    /// Bytes that have to be copied.
    Bytes(u64),
}

impl FileSystem {
    /// Copies up to `length` bytes to another file or to another part of the same one. Returns the
    /// bytes copied: fewer at the end of the source and when there is much to do, and 0 only when
    /// there is nothing to copy. Holes become holes. Does not touch times, like
    /// [`FileSystem::write`]; `kill_set_id` as in [`crate::fs::SetAttributes`].
    ///
    /// # Errors
    /// `Invalid` when the ranges overlap within one file or for anything but regular files
    /// (`IsDirectory`), `FileTooLarge` beyond 2^63-1, `NoSpace`. After a part was copied its length
    /// is returned instead.
    pub fn copy_range(
        &self,
        source: Ino,
        from: u64,
        target: Ino,
        to: u64,
        length: u64,
        kill_set_id: bool,
    ) -> Result<u64> {
        let wanted = self.check_copy(source, from, target, to, length)?;
        if wanted == 0 {
            return Ok(0);
        }
        self.strip_capability(target, kill_set_id)?;
        let entry = self.write_buffer.file(target);
        self.land_source(source, &entry, from..from + wanted)?;
        let copy = CopyJob { snapshot: None, source, target: &entry, kill_set_id };
        let (mut done, mut named, mut copied) = (0, 0, 0);
        while done < wanted && named < MAX_EXTENTS_PER_CALL && copied < COPY_CALL_BYTES {
            let part = CopyRange { from: from + done, to: to + done, length: wanted - done };
            match self.copy_step(&copy, part) {
                Ok(SourceContent::Shared(length, extents)) => {
                    done += length;
                    named += extents.len();
                }
                Ok(SourceContent::Bytes(length)) => {
                    done += length;
                    copied += length;
                    self.throttle_dirty();
                }
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        drop(entry);
        self.finish_change()?;
        Ok(done)
    }

    /// Copies the content of `source` in a snapshot to `target`, an empty file. Returns the bytes
    /// that were copied and not shared. `go_on` is called before each step. Errors: `Stale` when
    /// the snapshot is being removed, `Invalid` when it is one of another archive or these are not
    /// regular files, `NoSpace`; errors of `go_on`. The target then has a part of the content.
    pub(crate) fn restore_content(
        &self,
        snapshot: &FileSystem,
        source: Ino,
        target: Ino,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<u64> {
        if !self.volume.shares_pages_with(&snapshot.volume) {
            return Err(Error::invalid("the snapshot is not one of this archive"));
        }
        let size = snapshot.attributes(source)?.size;
        let entry = self.write_buffer.file(target);
        let copy = CopyJob { snapshot: Some(snapshot), source, target: &entry, kill_set_id: false };
        let (mut done, mut copied) = (0, 0);
        while done < size {
            go_on()?;
            match self.copy_step(&copy, CopyRange { from: done, to: done, length: size - done })? {
                SourceContent::Shared(length, _) => done += length,
                SourceContent::Bytes(length) => {
                    done += length;
                    copied += length;
                    self.throttle_dirty();
                }
            }
        }
        self.finish_change()?;
        Ok(copied)
    }

    fn check_copy(&self, source: Ino, from: u64, target: Ino, to: u64, length: u64) -> Result<u64> {
        for ino in [source, target] {
            inode::load_regular(self.volume.view(&self.volume.state()), ino)?;
        }
        let size = self.write_buffer.load_inode(source)?.1.size;
        let wanted = length.min(size.saturating_sub(from));
        if to.checked_add(wanted).is_none_or(|end| end > MAX_OFFSET) {
            return Err(Error::FileTooLarge);
        }
        if source == target && from < to.saturating_add(wanted) && to < from.saturating_add(wanted) {
            return Err(Error::invalid(format!("the ranges overlap: ino={} from={from} to={to}", source.0)));
        }
        Ok(wanted)
    }

    /// Writes back the dirty data of the source range (COPY-2).
    fn land_source(&self, source: Ino, target: &Arc<DirtyFile>, range: Range<u64>) -> Result<()> {
        if source == target.ino() {
            return self.writeback.clear(&target.lock(), &range);
        }
        let Some(file) = self.write_buffer.find(source) else { return Ok(()) };
        self.writeback.clear(&file.lock(), &range)
    }

    fn copy_step(&self, copy: &CopyJob<'_>, part: CopyRange) -> Result<SourceContent> {
        let target = copy.target.lock();
        loop {
            let state = self.volume.state();
            let view = self.volume.view(&state);
            let inode = inode::load_regular(view, target.ino())?;
            let found = copy.find_content(view, &inode, &part)?;
            drop(state);
            let (length, count) = match found {
                SourceContent::Bytes(length) => {
                    return self.copy_bytes(copy, &target, &part, length).map(SourceContent::Bytes);
                }
                SourceContent::Shared(length, extents) => (length, extents.len() as u64),
            };
            let range = part.to..part.to + length;
            if inode.trim < range.end {
                self.reclaim.complete_trim(&target, range.end)?;
            }
            self.writeback.clear(&target, &range)?;
            self.move_inline_to_page(&target)?;
            // Inode; extents of both; removals from the target are bounded in the step itself.
            let records = 1 + count * extents::RECORDS_PER_PIECE + STEP as u64;
            let step = self.volume.operate(records, false, |op| {
                if !self.writeback.is_clear(&target, op, &range) {
                    return Ok(None);
                }
                let mut inode = inode::load(op.view(), target.ino())?;
                let has_inline = extents::load_inline(op.view(), target.ino(), &inode)?.is_some();
                if inode.trim < range.end || has_inline {
                    return Ok(None);
                }
                if let Some(snapshot) = copy.snapshot {
                    op.require_snapshot(&snapshot.volume)?; // COPY-4
                }
                let SourceContent::Shared(length, extents) = copy.find_content(op.view(), &inode, &part)? else {
                    return Ok(None);
                };
                let length = length.min(range.end - range.start);
                let (length, extents) = share(op, target.ino(), &mut inode, &part, length, extents)?;
                inode.size = inode.size.max(part.to + length);
                if copy.kill_set_id {
                    clear_set_id(&mut inode, false);
                }
                inode::store(op, target.ino(), &inode)?;
                Ok(Some(SourceContent::Shared(length, extents)))
            })?;
            // A commit or another writer intervened: try again.
            if let Some(done) = step {
                return Ok(done);
            }
        }
    }

    /// Copies bytes like a read and a write.
    fn copy_bytes(&self, copy: &CopyJob<'_>, target: &LockedFile<'_>, part: &CopyRange, length: u64) -> Result<u64> {
        let mut data = copy.snapshot.unwrap_or(self).read(copy.source, part.from, length as usize)?;
        // The source may have been truncated since: the rest is a hole.
        data.resize(length as usize, 0);
        self.write_locked(target, part.to..part.to + length, &data)?;
        if copy.kill_set_id {
            self.volume.operate(1, true, |op| {
                let mut inode = inode::load(op.view(), target.ino())?;
                clear_set_id(&mut inode, false);
                inode::store(op, target.ino(), &inode)
            })?;
        }
        Ok(length)
    }

    /// Moves inline data to a page, since a file with extents has none.
    fn move_inline_to_page(&self, file: &LockedFile<'_>) -> Result<()> {
        loop {
            self.writeback.finish_older_batches(file)?;
            let state = self.volume.state();
            let view = self.volume.view(&state);
            let inode = inode::load_regular(view, file.ino())?;
            let Some(content) = extents::load_inline(view, file.ino(), &inode)? else { return Ok(()) };
            drop(state);
            let mut reserved = self.volume.reserve_data(content.len() as u64, 1)?;
            let compression = compression_of(&self.options, inode.flags);
            let mut pages = self.volume.write_data(&mut reserved, file.ino(), 0, &content, compression)?;
            self.volume.limit_unsynced()?;
            let records = 2 + pages.pieces().len() as u64 * extents::RECORDS_PER_PIECE;
            let moved = self.volume.operate(records, false, |op| {
                let mut inode = inode::load(op.view(), file.ino())?;
                let same = extents::load_inline(op.view(), file.ino(), &inode)?.as_ref() == Some(&content);
                if !same || !file.is_unsealed(&self.volume, op) {
                    return Ok(false);
                }
                extents::set_inline(op, file.ino(), &mut inode, &[])?;
                extents::link_pages(op, &mut inode, &mut pages)?;
                inode::store(op, file.ino(), &inode)?;
                Ok(true)
            })?;
            if moved {
                return Ok(());
            }
        }
    }
}

impl CopyJob<'_> {
    /// Returns the content at the beginning of `part`, for a target with this inode; `live` is the
    /// version of the live tree.
    fn find_content(&self, live: View<'_>, target: &InodeValue, part: &CopyRange) -> Result<SourceContent> {
        let Some(snapshot) = self.snapshot else { return find_content(live, self.source, target, part) };
        let state = snapshot.volume.state();
        find_content(snapshot.volume.view(&state), self.source, target, part)
    }
}

/// Returns the content of `source` at the beginning of `part`, for a target with this inode.
fn find_content(view: View<'_>, source: Ino, target: &InodeValue, part: &CopyRange) -> Result<SourceContent> {
    let inode = inode::load(view, source)?;
    let range = part.from..part.from + part.length;
    if inode.bytes <= MAX_VALUE as u64
        && let Some(content) = extents::load_inline(view, source, &inode)?
        && content.len() as u64 > range.start
    {
        return Ok(SourceContent::Bytes((content.len() as u64).min(range.end) - range.start));
    }
    let end = if inode.bytes == 0 { 0 } else { inode.trim.min(inode.size) };
    let visible = range.start..range.end.min(end).max(range.start);
    // A compressed page is not shared with a file that must not be compressed.
    let compressed = target.flags & inode_flags::NO_COMPRESS != 0 && inode.flags & inode_flags::NO_COMPRESS == 0;
    let mut shared = Vec::new();
    let (mut shared_end, mut bytes_end) = (range.end, range.start);
    extents::visit(view, source, visible.clone(), &mut |mapped| {
        let length = mapped.overlap(&visible);
        let copied = compressed || length < MIN_SHARED || extents::may_be_packed(mapped.offset, mapped.extent.length);
        if copied && shared.is_empty() && mapped.offset <= bytes_end && bytes_end - range.start < COPY_STEP_BYTES {
            bytes_end = mapped.end().min(visible.end);
            return Ok(ControlFlow::Continue(()));
        }
        if copied || bytes_end > range.start || shared.len() == STEP {
            shared_end = mapped.offset.max(range.start);
            return Ok(ControlFlow::Break(()));
        }
        shared.push(mapped);
        Ok(ControlFlow::Continue(()))
    })?;
    if bytes_end > range.start {
        return Ok(SourceContent::Bytes(bytes_end - range.start));
    }
    Ok(SourceContent::Shared(shared_end - range.start, shared))
}

/// Adds the extents to the target. Returns how far it got, since the target's own extents are
/// removed in bounded steps too.
fn share(
    op: &mut Operation<'_>,
    ino: Ino,
    inode: &mut InodeValue,
    part: &CopyRange,
    length: u64,
    mut found: Vec<MappedExtent>,
) -> Result<(u64, Vec<MappedExtent>)> {
    debug_assert!(inode.trim >= part.to + length, "the caller completed the trim");
    let replaced = extents::find_overlapping(op.view(), ino, part.to..part.to + length, STEP + 1)?;
    let length = replaced.get(STEP).map_or(length, |next| next.offset - part.to);
    let source = part.from..part.from + length;
    found.retain(|mapped| mapped.overlap(&source) > 0);
    // Shared before anything is released: the target may reference the same pages already.
    op.share_all(found.iter().map(|mapped| mapped.extent.page.run))?;
    extents::remove_range(op, ino, inode, part.to..part.to + length)?;
    let born = op.generation();
    for mapped in &found {
        let (start, end) = (mapped.offset.max(source.start), mapped.end().min(source.end));
        let extent = Extent {
            page: mapped.extent.page,
            start: mapped.extent.start + (start - mapped.offset) as u32,
            length: (end - start) as u32,
            born,
        };
        op.insert(extents::key(ino, part.to + (start - part.from)), &extent.encode())?;
        inode.bytes += end - start;
    }
    Ok((length, found))
}
