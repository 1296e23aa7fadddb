//! Moments of one archive beside each other: what differs between two, and bringing objects of one back into the live tree.

mod build;
mod compare;
mod content;
mod restore;

pub use compare::{Differing, DifferingKind, compare};
pub use restore::{Alone, Names, Restore, RestoreReport};
