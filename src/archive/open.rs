//! Unlocks and opens an archive.
