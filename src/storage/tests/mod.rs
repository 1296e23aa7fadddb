//! Storages for tests and fuzzers: in memory, counting, and simulating crashes and failures.

// Fuzz targets, which a debug build has, use a part of what tests do.
#![cfg_attr(not(test), allow(dead_code, unused_imports))]

#[cfg(test)]
mod counting;
mod memory;
pub(crate) mod simulated;

#[cfg(test)]
pub(crate) use counting::CountingStorage;
pub(crate) use memory::MemoryStorage;
