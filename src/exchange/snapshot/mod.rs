//! Moments of one archive beside each other: what differs between two, and bringing objects of one back into the live tree.

mod build;
mod compare;
mod content;
mod restore;

pub(super) use build::Builder;
pub use compare::{Differing, DifferingKind, compare};
pub(super) use content::{Bytes, Seen, bytes_differ, kind, xattrs};
pub use restore::{Alone, Names, Restore, RestoreReport};
