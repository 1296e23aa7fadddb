//! Comparison of two versions of an archive, and restore of objects from a snapshot into the live
//! tree.

mod build;
mod compare;
mod restore;

pub(super) use build::Builder;
pub(super) use compare::{ContentReader, SnapshotObject, bytes_differ, kind, xattrs};
pub use compare::{PathChange, PathChangeKind, compare};
pub use restore::{LiveNamespace, OfflineNamespace, Restore, RestoreReport};
