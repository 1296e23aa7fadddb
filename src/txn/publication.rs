//! Publication marks: tell whether a state contains an operation, without a search of the trees.
//!
//! # The argument
//! A publication is a cell that holds 0 until an operation that carries it is published, and the
//! number of that operation's state from then on. `OpenTransaction::publish` takes the number when
//! nothing can fail any more, and `announce` writes it into the cells before it has the state
//! stored. Both happen under the writers' lock, so that states are stored in the order of their
//! numbers. Nothing returns between the two stores.
//!
//! - A failed operation leaves its cells at 0, whether it failed itself, found no space for its
//!   nodes, or was the flush of a commit that was given up. It never counts as done, and another
//!   operation may carry the same cell. A crash leaves neither cells nor callers that wait for
//!   them.
//! - A holder of a state of this number or a later one finds the number in the cell. It was written
//!   before that state was stored; storing releases and loading acquires (each is a sequentially
//!   consistent exchange of `ArcSwap`). So the cell itself needs no order of its own.
//! - A reader of the cell between the two stores, or a holder of an older state, has a state of a
//!   lower number: "not yet" is true of that state.
//! - A published operation is never undone: the cell is written once, and later states have higher
//!   numbers. A state that a commit stores again (`OpenTransaction::forget_written`) has the same
//!   trees and the same number.
//! - The result of an operation that changed nothing is true of the state that it began with, whose
//!   number its cells get. A caller that loaded that state earlier may see "not yet", and sees the
//!   same content in it.
//!
//! So `is_in` is exact for every state, and costs one load.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::state::State;

/// See the argument above.
#[derive(Clone, Debug, Default)]
pub(crate) struct Publication(Arc<AtomicU64>);

impl Publication {
    /// Returns whether the state contains the operation.
    pub(crate) fn is_in(&self, state: &State) -> bool {
        (1..=state.sequence).contains(&self.0.load(Ordering::Relaxed))
    }

    /// Returns whether an operation that carried this was published; under the writers' lock, the
    /// present state then contains it.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    /// Writes the number into the cells of an operation that cannot fail any more, and then stores
    /// its state.
    pub(super) fn announce(carried: &[Publication], sequence: u64, store: impl FnOnce()) {
        carried.iter().for_each(|publication| publication.0.store(sequence, Ordering::Relaxed));
        store();
    }
}
