//! Inserts and removes with copy-on-write, splits and merges.
