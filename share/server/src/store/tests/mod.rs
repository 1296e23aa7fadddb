//! Tests of every store, and of the group commit in all interleavings.

pub(crate) mod conformance;
mod model;
