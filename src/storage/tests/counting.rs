//! Test storage that counts reads and records prefetch hints.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::MemoryStorage;
use crate::error::Result;
use crate::format::{BLOCK, RESERVED};
use crate::storage::Storage;

/// Wrapper of `memory` that counts reads; direct access to `memory` is not counted.
#[derive(Default)]
pub(crate) struct CountingStorage {
    pub(crate) memory: MemoryStorage,
    /// Set to act as remote storage.
    is_remote: bool,
    requests: AtomicU64,
    bytes: AtomicU64,
    /// Read requests without a preceding hint, except header and ring, which are part of the
    /// archive's start.
    unexpected: AtomicU64,
    blocks: Mutex<BTreeMap<u64, u64>>,
    hints: Mutex<Vec<Range<u64>>>,
    started: Mutex<Vec<Range<u64>>>,
    /// Snapshot that reads see until the next eviction.
    frozen: Mutex<Option<MemoryStorage>>,
}

impl CountingStorage {
    pub(crate) fn from_contents(bytes: Vec<u8>) -> CountingStorage {
        CountingStorage { memory: MemoryStorage::from_contents(bytes), ..CountingStorage::default() }
    }

    /// Creates a storage that acts as remote or local.
    pub(crate) fn new(is_remote: bool) -> CountingStorage {
        CountingStorage { is_remote, ..CountingStorage::default() }
    }

    /// Freezes the content that reads see until the next eviction, regardless of writes.
    pub(crate) fn freeze(&self) {
        *self.frozen.lock() = Some(MemoryStorage::from_contents(self.memory.contents()));
    }

    /// Returns (requests, bytes) since the last call.
    pub(crate) fn take(&self) -> (u64, u64) {
        (self.requests.swap(0, Ordering::Relaxed), self.bytes.swap(0, Ordering::Relaxed))
    }

    /// Returns the requests since the last call that no single hint since the last
    /// [`CountingStorage::take_hints`] covered completely.
    pub(crate) fn take_unexpected(&self) -> u64 {
        self.unexpected.swap(0, Ordering::Relaxed)
    }

    /// Returns the number of reads of each block since the last call.
    pub(crate) fn take_blocks(&self) -> BTreeMap<u64, u64> {
        std::mem::take(&mut self.blocks.lock())
    }

    /// Returns the ranges hinted by [`Storage::will_need`] since the last call.
    pub(crate) fn take_hints(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.hints.lock())
    }

    /// Returns the ranges of [`Storage::start_writeback`] since the last call.
    pub(crate) fn take_started(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.started.lock())
    }
}

impl Storage for CountingStorage {
    fn len(&self) -> Result<u64> {
        self.memory.len()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(out.len() as u64, Ordering::Relaxed);
        let named = |hint: &Range<u64>| hint.start <= offset && offset + out.len() as u64 <= hint.end;
        let is_start = RESERVED.iter().any(|(start, end)| (*start..*end).contains(&(offset / BLOCK)));
        if !is_start && !self.hints.lock().iter().any(named) {
            self.unexpected.fetch_add(1, Ordering::Relaxed);
        }
        let touched = offset / BLOCK..(offset + out.len() as u64).div_ceil(BLOCK);
        let mut blocks = self.blocks.lock();
        touched.for_each(|block| *blocks.entry(block).or_default() += 1);
        drop(blocks);
        self.frozen.lock().as_ref().unwrap_or(&self.memory).read_at(offset, out)
    }

    fn is_remote(&self) -> bool {
        self.is_remote
    }

    fn will_need(&self, offset: u64, length: u64) {
        self.hints.lock().push(offset..offset + length);
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.memory.write_at(offset, data)
    }

    fn allocate(&self, offset: u64, length: u64) -> Result<()> {
        self.memory.allocate(offset, length)
    }

    fn punch(&self, offset: u64, length: u64) -> Result<()> {
        self.memory.punch(offset, length)
    }

    fn set_len(&self, length: u64) -> Result<()> {
        self.memory.set_len(length)
    }

    fn start_writeback(&self, range: Range<u64>) {
        self.started.lock().push(range);
    }

    fn barrier(&self) -> Result<()> {
        self.memory.barrier()
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        *self.frozen.lock() = None;
        self.memory.evict(offset, length)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.memory.next_data(offset)
    }

    fn read_only(&self) -> bool {
        self.memory.read_only()
    }
}
