//! File data written but not yet sealed: bounded, visible to readers at once.
pub(crate) struct Staging;
