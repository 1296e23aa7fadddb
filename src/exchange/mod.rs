//! Exchange with the host: import, extraction, mirroring, tar streams, listings and comparison.
//!
//! Imports `storage` for `Identity`, which distinguishes host files, and for listing host
//! directories. Archive bytes are not accessed here.

pub(crate) mod attributes;
mod copy;
mod counting;
mod deletion;
mod extract;
pub(crate) mod host;
mod import;
mod mirror;
mod path_ops;
mod progress;
mod skipped;
mod snapshot;
pub(crate) mod staging_dir;
mod tar;
mod tree_diff;
pub(crate) mod walk;

pub use copy::{copy, rewrite};
pub use counting::{count_archive_files, count_host_files};
pub use deletion::{Deletion, MirrorPlan};
pub(crate) use extract::write_all;
pub use extract::{ExtractOptions, ExtractReport, extract};
pub use host::{device_number, split_device_number};
pub use import::{ImportOptions, ImportReport, import};
pub use mirror::{MirrorChange, MirrorWatch, plan_mirror};
pub use path_ops::{CopyDestination, components, make_directories, remove, rename, resolve};
pub use progress::{CopyCounts, FileTotals, Progress};
pub use skipped::{SkippedCount, SkippedItems};
pub use snapshot::{LiveNamespace, OfflineNamespace, PathChange, PathChangeKind, Restore, RestoreReport, compare};
pub use tar::{
    PackReport, TarExport, TarImport, TarImportOptions, UnpackReport, export_tar, export_tree, import_tar, pack_tree,
    unpack_tar,
};
pub use tree_diff::{DiffRoot, MetadataDifference, TreeDifference, compare_trees};
pub use walk::{Entries, Filter, ListingEntry};

use std::fmt;

use lockbox_terminal::display;

use crate::error::{Error, Result};

/// Failure of one object during an import or extraction.
#[derive(Debug)]
pub struct Problem {
    pub path: Vec<u8>,
    pub cause: ProblemCause,
}

/// Cause of a [`Problem`].
#[derive(Debug)]
pub enum ProblemCause {
    /// The file changed while it was read: its copy may mix two versions.
    Changed,
    /// The archive's own file is in the source, and cannot contain itself.
    Itself,
    Failed(Error),
}

impl Problem {
    /// Returns whether the source may have objects that are unknown because of this failure.
    fn hides_something(&self) -> bool {
        matches!(self.cause, ProblemCause::Failed(_))
    }

    /// Records a failure of the object at `path`. Returns an error that ends the whole operation:
    /// no space, a read-only target, or an interrupt.
    pub(crate) fn tolerate<T>(
        problems: &mut Vec<Problem>,
        path: &[u8],
        result: Result<Option<T>>,
    ) -> Result<Option<T>> {
        match result {
            Ok(value) => Ok(value),
            Err(error @ (Error::NoSpace(_) | Error::ReadOnly(_) | Error::Interrupted(_))) => Err(error),
            Err(error) => {
                problems.push(Problem { path: path.to_vec(), cause: ProblemCause::Failed(error) });
                Ok(None)
            }
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", display(&self.path))?;
        match &self.cause {
            ProblemCause::Changed => f.write_str("the file changed while it was read"),
            ProblemCause::Itself => f.write_str("the archive cannot hold itself"),
            ProblemCause::Failed(error) => match std::error::Error::source(error) {
                Some(source) => write!(f, "{error}: {source}"),
                None => write!(f, "{error}"),
            },
        }
    }
}
