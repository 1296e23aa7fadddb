//! Tests of every store, and of the group commit in all interleavings; a simulated disk and clock.

#[cfg(test)]
pub(crate) mod conformance;
#[cfg(test)]
mod model;
pub(crate) mod simulated;
