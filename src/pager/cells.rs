//! The frame cache: decompressed cells of data pages in a sharded LRU with a byte budget.
pub(crate) struct CellCache;
