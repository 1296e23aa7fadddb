//! In-memory storage for tests and benchmarks: barriers do nothing, holes are tracked per block.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::error::{Error, Result};
use crate::storage::{Replacement, Storage, end_of, truncated};

/// Sparse in-memory file with an optional capacity to simulate a full disk.
pub(crate) struct MemoryStorage {
    state: RwLock<State>,
}

#[derive(Clone)]
struct State {
    image: SparseImage,
    capacity: Option<u64>,
}

/// Blocks are shared until one side writes.
impl Clone for MemoryStorage {
    fn clone(&self) -> Self {
        MemoryStorage { state: RwLock::new(self.state.read().clone()) }
    }
}

impl MemoryStorage {
    pub(crate) fn new() -> MemoryStorage {
        MemoryStorage { state: RwLock::new(State { image: SparseImage::default(), capacity: None }) }
    }

    /// Sets the host capacity in bytes of allocated blocks. Growth, allocation and writes into
    /// holes beyond it fail with `NoSpace`.
    pub(crate) fn set_capacity(&self, bytes: Option<u64>) {
        self.state.write().capacity = bytes;
    }

    pub(crate) fn allocated(&self) -> u64 {
        self.state.read().image.allocated()
    }

    /// Returns a copy of the content, with holes as zeros.
    pub(crate) fn contents(&self) -> Vec<u8> {
        self.state.read().image.to_bytes()
    }

    pub(crate) fn from_contents(bytes: Vec<u8>) -> MemoryStorage {
        MemoryStorage { state: RwLock::new(State { image: SparseImage::from_bytes(&bytes), capacity: None }) }
    }
}

impl Default for MemoryStorage {
    fn default() -> Self {
        Self::new()
    }
}

impl Storage for MemoryStorage {
    fn allocated(&self) -> Result<u64> {
        Ok(MemoryStorage::allocated(self))
    }

    fn len(&self) -> Result<u64> {
        Ok(self.state.read().image.len())
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.state.read().image.read(offset, out)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        end_of(offset, data.len() as u64)?;
        let state = &mut *self.state.write();
        state.image.check_capacity(offset, data.len() as u64, state.capacity)?;
        state.image.put(offset, data);
        Ok(())
    }

    fn allocate(&self, offset: u64, length: u64) -> Result<()> {
        end_of(offset, length)?;
        let state = &mut *self.state.write();
        state.image.check_capacity(offset, length, state.capacity)?;
        state.image.allocate(offset, length);
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> Result<()> {
        self.state.write().image.punch(offset, length);
        Ok(())
    }

    fn set_len(&self, length: u64) -> Result<()> {
        end_of(length, 0)?;
        self.state.write().image.set_len(length);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn evict(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        Ok(self.state.read().image.next_data(offset))
    }

    fn begin_replace(&self) -> Result<Box<dyn Replacement + '_>> {
        Ok(Box::new(MemoryReplacement { place: self, fresh: Arc::default() }))
    }

    fn read_only(&self) -> bool {
        false
    }
}

struct MemoryReplacement<'a> {
    place: &'a MemoryStorage,
    fresh: Arc<MemoryStorage>,
}

impl Replacement for MemoryReplacement<'_> {
    fn storage(&self) -> Arc<dyn Storage> {
        self.fresh.clone()
    }

    fn publish(self: Box<Self>) -> Result<()> {
        self.place.state.write().image = self.fresh.state.read().image.clone();
        Ok(())
    }
}

// ---- sparse image ----

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

/// Sparse file: length and blocks; clones share blocks until one side writes. Slots past the end of
/// the vector are holes.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn reads_back_what_was_written_and_zeros_between() {
        let storage = MemoryStorage::new();
        storage.write_at(10_000, b"hello").unwrap();
        assert_eq!(storage.len().unwrap(), 10_005);
        let mut out = [1; 16];
        storage.read_at(9_989, &mut out).unwrap();
        assert_eq!(&out, b"\0\0\0\0\0\0\0\0\0\0\0hello");
        assert_eq!(storage.allocated(), 4096);
        assert!(matches!(storage.read_at(9_990, &mut out), Err(Error::Damaged(_))));
        assert_eq!(MemoryStorage::from_contents(storage.contents()).allocated(), 12_288);
    }

    #[test]
    fn a_clone_goes_its_own_way() {
        let storage = MemoryStorage::from_contents(vec![7; 8192]);
        let other = storage.clone();
        other.write_at(100, &[1]).unwrap();
        storage.punch(4096, 4096).unwrap();
        let (mut here, mut there) = ([0; 8192], [0; 8192]);
        storage.read_at(0, &mut here).unwrap();
        other.read_at(0, &mut there).unwrap();
        assert_eq!((here[100], here[8000], there[100], there[8000]), (7, 0, 1, 7));
    }

    #[test]
    fn an_allocated_block_takes_space_but_is_no_data() {
        let storage = MemoryStorage::new();
        storage.allocate(4096, 8192).unwrap();
        assert_eq!((storage.len().unwrap(), storage.allocated()), (12_288, 8192));
        assert_eq!(storage.next_data(0).unwrap(), None);
        storage.write_at(8192, &[1]).unwrap();
        assert_eq!(storage.next_data(0).unwrap(), Some(8192..12_288));
        assert_eq!(storage.next_data(9000).unwrap(), Some(9000..12_288));
        assert_eq!(storage.next_data(12_288).unwrap(), None);
        assert_eq!(storage.allocated(), 8192);
    }

    #[test]
    fn punching_frees_whole_blocks_and_zeroes_parts() {
        let storage = MemoryStorage::from_contents(vec![7; 16_384]);
        storage.punch(4000, 4200).unwrap();
        assert_eq!(storage.allocated(), 12_288);
        let bytes = storage.contents();
        assert!(bytes[4000..8200].iter().all(|&b| b == 0) && bytes[3999] == 7 && bytes[8200] == 7);
        assert_eq!(storage.next_data(0).unwrap(), Some(0..4096));
        assert_eq!(storage.next_data(4096).unwrap(), Some(8192..16_384));
        storage.punch(0, u64::MAX).unwrap();
        assert_eq!((storage.len().unwrap(), storage.allocated()), (16_384, 0));
    }

    #[test]
    fn shrinking_forgets_and_growing_shows_zeros() {
        let storage = MemoryStorage::from_contents(vec![7; 10_000]);
        storage.set_len(5000).unwrap();
        storage.set_len(10_000).unwrap();
        let bytes = storage.contents();
        assert!(bytes[..5000].iter().all(|&b| b == 7) && bytes[5000..].iter().all(|&b| b == 0));
        assert_eq!(storage.allocated(), 8192);
        storage.set_len(0).unwrap();
        assert_eq!(storage.allocated(), 0);
    }

    #[test]
    fn a_full_host_refuses_new_blocks_and_nothing_else() {
        let storage = MemoryStorage::new();
        storage.set_capacity(Some(8192));
        storage.allocate(0, 8192).unwrap();
        assert!(matches!(storage.write_at(8192, &[1]), Err(Error::NoSpace(_))));
        assert!(matches!(storage.allocate(4096, 8192), Err(Error::NoSpace(_))));
        assert_eq!(storage.len().unwrap(), 8192);
        storage.write_at(0, &[1; 8192]).unwrap();
        storage.punch(0, 4096).unwrap();
        storage.write_at(8192, &[1]).unwrap();
        assert!(matches!(storage.write_at(0, &[1]), Err(Error::NoSpace(_))));
    }

    #[test]
    fn nothing_does_not_grow_the_storage() {
        let storage = MemoryStorage::new();
        storage.write_at(100, &[]).unwrap();
        storage.allocate(100, 0).unwrap();
        storage.punch(100, 0).unwrap();
        assert_eq!((storage.len().unwrap(), storage.allocated()), (0, 0));
    }

    #[test]
    fn ranges_beyond_the_largest_offset_are_refused() {
        let storage = MemoryStorage::new();
        assert!(matches!(storage.write_at(u64::MAX, &[1, 2]), Err(Error::Invalid(_))));
        assert!(matches!(storage.allocate(u64::MAX, 2), Err(Error::Invalid(_))));
    }
}
