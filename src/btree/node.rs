//! A node in memory: entries of a leaf over one heap of values, or children of an internal node.

use std::sync::OnceLock;

use crate::format::{Generation, Pointer};

/// See the module's invariants.
pub(crate) struct Node {
    /// Transaction that made this node; of a loaded node the generation of its page.
    pub(crate) born: Generation,
    /// Set once, when a commit has written it.
    pub(crate) stored: OnceLock<Pointer>,
}
