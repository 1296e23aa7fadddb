//! In-memory content of a sparse file by block; clones share blocks until one side writes.

use std::ops::Range;
use std::sync::Arc;

use super::{end_of, truncated};
use crate::error::{Error, Result};

/// Block size of the simulated host in bytes.
pub(super) const HOST_BLOCK: u64 = 4096;

type Bytes = [u8; HOST_BLOCK as usize];

/// Allocation state and content of a host block.
#[derive(Clone, Default)]
enum Slot {
    /// Not allocated; reads as zeros.
    #[default]
    Hole,
    /// Allocated without content (an unwritten extent); reads as zeros and is not data for
    /// `SEEK_DATA`.
    Unwritten,
    Data(Arc<Bytes>),
}

/// Sparse file: length and blocks. Slots past the end of the vector are holes.
///
/// Bytes of a data block at or after `len` are zero, so that growing shows zeros.
#[derive(Clone, Default)]
pub(super) struct SparseImage {
    len: u64,
    slots: Vec<Slot>,
    allocated: u64,
}

/// Splits `offset..end` at block boundaries into (block number, range within it).
fn pieces(offset: u64, end: u64) -> impl Iterator<Item = (usize, Range<usize>)> {
    let first = offset / HOST_BLOCK;
    (first..end.div_ceil(HOST_BLOCK).max(first)).map(move |block| {
        let base = block * HOST_BLOCK;
        (block as usize, (offset.max(base) - base) as usize..(end.min(base + HOST_BLOCK) - base) as usize)
    })
}

impl SparseImage {
    pub(super) fn from_bytes(bytes: &[u8]) -> SparseImage {
        let mut image = SparseImage::default();
        image.put(0, bytes);
        image
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![0; self.len as usize];
        self.copy_out(0, &mut out);
        out
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the bytes of allocated blocks.
    pub(super) fn allocated(&self) -> u64 {
        self.allocated * HOST_BLOCK
    }

    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = end_of(offset, out.len() as u64)?;
        if end > self.len {
            return Err(truncated(self.len, end));
        }
        self.copy_out(offset, out);
        Ok(())
    }

    fn copy_out(&self, offset: u64, out: &mut [u8]) {
        let mut rest = out;
        for (block, range) in pieces(offset, offset + rest.len() as u64) {
            let (piece, tail) = rest.split_at_mut(range.len());
            match self.slots.get(block) {
                Some(Slot::Data(bytes)) => piece.copy_from_slice(&bytes[range]),
                _ => piece.fill(0),
            }
            rest = tail;
        }
    }

    /// Returns the number of unallocated blocks in a range.
    pub(super) fn holes(&self, offset: u64, length: u64) -> Result<u64> {
        let is_hole = |block: usize| matches!(self.slots.get(block), None | Some(Slot::Hole));
        Ok(pieces(offset, end_of(offset, length)?).filter(|(block, _)| is_hole(*block)).count() as u64)
    }

    /// Fails if a write would allocate more than `capacity` bytes in total; changes nothing.
    pub(super) fn check_capacity(&self, offset: u64, length: u64, capacity: Option<u64>) -> Result<()> {
        let Some(capacity) = capacity else { return Ok(()) };
        let holes = self.holes(offset, length)?;
        // Content from before the capacity was lowered stays, as on a host with a lowered quota.
        if holes > 0 && self.allocated() + holes * HOST_BLOCK > capacity {
            return Err(Error::NoSpace(format!("capacity={capacity} allocated={}", self.allocated())));
        }
        Ok(())
    }

    /// Writes `data` and grows the file; an empty write does not grow it. The caller has checked
    /// that `offset + data.len()` does not overflow.
    pub(super) fn put(&mut self, offset: u64, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        let end = offset + data.len() as u64;
        self.reach(end);
        let mut rest = data;
        for (block, range) in pieces(offset, end) {
            let (piece, tail) = rest.split_at(range.len());
            let slot = &mut self.slots[block];
            if matches!(slot, Slot::Hole) {
                self.allocated += 1;
            }
            match slot {
                Slot::Data(bytes) => Arc::make_mut(bytes)[range].copy_from_slice(piece),
                Slot::Hole | Slot::Unwritten => {
                    let mut bytes = [0; HOST_BLOCK as usize];
                    bytes[range].copy_from_slice(piece);
                    *slot = Slot::Data(Arc::new(bytes));
                }
            }
            rest = tail;
        }
    }

    fn reach(&mut self, end: u64) {
        self.len = self.len.max(end);
        let blocks = end.div_ceil(HOST_BLOCK) as usize;
        if self.slots.len() < blocks {
            self.slots.resize(blocks, Slot::Hole);
        }
    }

    pub(super) fn allocate(&mut self, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        self.reach(offset + length);
        for (block, _) in pieces(offset, offset + length) {
            if matches!(self.slots[block], Slot::Hole) {
                self.slots[block] = Slot::Unwritten;
                self.allocated += 1;
            }
        }
    }

    /// Turns whole blocks into holes and zeroes partial ones; the length stays.
    pub(super) fn punch(&mut self, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.slots.len() as u64 * HOST_BLOCK);
        if offset >= end {
            return;
        }
        for (block, range) in pieces(offset, end) {
            // The host frees the last block if all its bytes up to the end of the file are punched.
            let whole = range.start == 0
                && (range.len() as u64 == HOST_BLOCK || block as u64 * HOST_BLOCK + range.end as u64 >= self.len);
            let slot = &mut self.slots[block];
            if whole {
                if !matches!(std::mem::take(slot), Slot::Hole) {
                    self.allocated -= 1;
                }
            } else if let Slot::Data(bytes) = slot {
                Arc::make_mut(bytes)[range].fill(0);
            }
        }
    }

    pub(super) fn set_len(&mut self, length: u64) {
        if length < self.len {
            let keep = length.div_ceil(HOST_BLOCK) as usize;
            if keep < self.slots.len() {
                let gone = self.slots.drain(keep..).filter(|slot| !matches!(slot, Slot::Hole)).count();
                self.allocated -= gone as u64;
            }
            let part = (length % HOST_BLOCK) as usize;
            if let (1.., Some(Slot::Data(bytes))) = (part, self.slots.get_mut((length / HOST_BLOCK) as usize)) {
                Arc::make_mut(bytes)[part..].fill(0);
            }
        }
        self.len = length;
    }

    pub(super) fn next_data(&self, offset: u64) -> Option<Range<u64>> {
        let is_data = |slot: &Slot| matches!(slot, Slot::Data(_));
        let from = (offset / HOST_BLOCK) as usize;
        let first = from + self.slots.get(from..)?.iter().position(is_data)?;
        let count = self.slots[first..].iter().position(|slot| !is_data(slot)).unwrap_or(self.slots.len() - first);
        let start = (first as u64 * HOST_BLOCK).max(offset);
        let end = ((first + count) as u64 * HOST_BLOCK).min(self.len);
        (start < end).then_some(start..end)
    }

    /// Copies a block from `other`; the length stays.
    pub(super) fn copy_block(&mut self, block: u64, other: &SparseImage) {
        let index = block as usize;
        let replacement = other.slots.get(index).cloned().unwrap_or_default();
        if index >= self.slots.len() {
            if matches!(replacement, Slot::Hole) {
                return;
            }
            self.slots.resize(index + 1, Slot::Hole);
        }
        self.allocated += u64::from(!matches!(replacement, Slot::Hole));
        self.allocated -= u64::from(!matches!(self.slots[index], Slot::Hole));
        self.slots[index] = replacement;
    }
}
