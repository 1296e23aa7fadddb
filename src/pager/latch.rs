//! The sticky write error.
pub(crate) struct Latch;
