//! The space map in memory.
