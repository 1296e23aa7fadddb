//! An archive in memory, for tests and benchmarks: a barrier does nothing, holes are known per block.

use std::ops::Range;

use super::Storage;
use crate::error::Result;

/// A vector of bytes with a note of which blocks hold data; optionally bounded, so that a full disk can be played.
pub struct MemoryStorage {}

impl MemoryStorage {
    pub fn new() -> MemoryStorage {
        todo!()
    }

    /// Host capacity in bytes of allocated blocks; growth, allocation and writes into holes beyond it answer NoSpace.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        let _ = bytes;
        todo!()
    }

    /// Bytes of the blocks that are allocated.
    pub fn allocated(&self) -> u64 {
        todo!()
    }

    /// A copy of the content, as somebody who copies the file would get it.
    pub fn contents(&self) -> Vec<u8> {
        todo!()
    }

    pub fn from_contents(bytes: Vec<u8>) -> MemoryStorage {
        let _ = bytes;
        todo!()
    }
}

impl Default for MemoryStorage {
    fn default() -> Self {
        Self::new()
    }
}

impl Storage for MemoryStorage {
    fn len(&self) -> Result<u64> {
        todo!()
    }
    fn read_at(&self, _offset: u64, _out: &mut [u8]) -> Result<()> {
        todo!()
    }
    fn write_at(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        todo!()
    }
    fn allocate(&self, _offset: u64, _length: u64) -> Result<()> {
        todo!()
    }
    fn punch(&self, _offset: u64, _length: u64) -> Result<()> {
        todo!()
    }
    fn set_len(&self, _length: u64) -> Result<()> {
        todo!()
    }
    fn barrier(&self) -> Result<()> {
        todo!()
    }
    fn evict(&self, _offset: u64, _length: u64) -> Result<()> {
        todo!()
    }
    fn next_data(&self, _offset: u64) -> Result<Option<Range<u64>>> {
        todo!()
    }
    fn read_only(&self) -> bool {
        todo!()
    }
}
