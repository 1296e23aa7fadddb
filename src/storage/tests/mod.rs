//! Storages for tests and fuzzers: in memory, counting, and simulating crashes and failures.

#[cfg(test)]
mod counting;
mod memory;
pub(crate) mod simulated;

#[cfg(test)]
pub(crate) use counting::CountingStorage;
pub(crate) use memory::MemoryStorage;
