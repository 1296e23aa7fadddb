//! Exchange with the host: import, extraction, mirroring, tar streams, listings and comparison.
//!
//! Imports `storage` for `Identity`, which distinguishes host files, and for listing host
//! directories. Archive bytes are not accessed here.

pub(crate) mod attributes;
mod extract;
mod import;
mod path_ops;
mod restore;
mod snapshot_diff;
pub(crate) mod staging_dir;
mod tar;
mod tree_diff;
pub(crate) mod walk;

pub use attributes::{SkippedCount, SkippedItems, device_number, split_device_number};
pub(crate) use extract::write_all;
pub use extract::{ExtractOptions, ExtractReport, count_archive_files, extract};
pub use import::{
    Deletion, ImportOptions, ImportReport, MirrorChange, MirrorPlan, count_host_files, import, plan_mirror,
};
pub use path_ops::{CopyDestination, components, copy, make_directories, remove, rename, resolve, rewrite};
pub use restore::{LiveNamespace, OfflineNamespace, Restore, RestoreReport};
pub use snapshot_diff::{PathChange, PathChangeKind, compare};
pub use tar::{
    PackReport, TarExport, TarImport, TarImportOptions, UnpackReport, export_tar, export_tree, import_tar, pack_tree,
    unpack_tar,
};
pub use tree_diff::{DiffRoot, MetadataDifference, TreeDifference, compare_trees};
pub use walk::{Entries, Filter, ListingEntry};

use std::collections::HashSet;
use std::fmt;

use rustix::fs::Stat;

use lockbox_terminal::display;

use crate::error::{Error, Result};
use crate::fs::{Attributes, mode};

/// Failure of one object during an import or extraction.
#[derive(Debug)]
pub struct Problem {
    pub path: Vec<u8>,
    pub cause: ProblemCause,
}

#[derive(Debug)]
pub enum ProblemCause {
    /// The file changed while it was read: its copy may mix two versions.
    Changed,
    /// The archive's own file is in the source, and cannot contain itself.
    Itself,
    Failed(Error),
}

impl Problem {
    /// Records a failure of the object at `path`. Returns an error that ends the whole operation:
    /// no space, a read-only target, an unavailable server, or an interrupt.
    pub(crate) fn tolerate<T>(
        problems: &mut Vec<Problem>,
        path: &[u8],
        result: Result<Option<T>>,
    ) -> Result<Option<T>> {
        let ends = |error: &Error| matches!(error, Error::NoSpace(_) | Error::ReadOnly(_) | Error::Interrupted(_));
        Problem::tolerate_unless(ends, problems, path, result)
    }

    /// Like [`Problem::tolerate`]; returns the errors that `ends` matches, and that of a server.
    fn tolerate_unless<T>(
        ends: impl Fn(&Error) -> bool,
        problems: &mut Vec<Problem>,
        path: &[u8],
        result: Result<Option<T>>,
    ) -> Result<Option<T>> {
        result.or_else(|error| {
            if ends(&error) || error.is_server_unavailable() {
                return Err(error);
            }
            problems.push(Problem { path: path.to_vec(), cause: ProblemCause::Failed(error) });
            Ok(None)
        })
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", display(&self.path))?;
        match &self.cause {
            ProblemCause::Changed => f.write_str("the file changed while it was read"),
            ProblemCause::Itself => f.write_str("the archive cannot hold itself"),
            ProblemCause::Failed(error) => f.write_str(&error.with_cause()),
        }
    }
}

/// Progress of an import or extraction.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    pub files: u64,
    pub bytes: u64,
    /// Completed part of the total: includes objects that were unchanged or could not be copied.
    pub passed: FileTotals,
    /// Path of the current object.
    pub path: &'a [u8],
}

/// Numbers of copied objects by kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct CopyCounts {
    pub files: u64,
    pub directories: u64,
    /// Further hard links of files.
    pub links: u64,
    pub symlinks: u64,
    /// FIFOs, sockets and devices.
    pub others: u64,
    /// Bytes of file content.
    pub bytes: u64,
}

impl CopyCounts {
    /// Returns the progress at `path`, with `within` bytes that are not in the totals yet.
    pub(crate) fn progress<'a>(&self, path: &'a [u8], within: u64) -> Progress<'a> {
        let (files, bytes) = (self.files, self.bytes + within);
        Progress { files, bytes, passed: FileTotals { files, bytes }, path }
    }
}

/// Number of regular files and bytes of their content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileTotals {
    pub files: u64,
    pub bytes: u64,
}

/// Counter of files as a copy encounters them: regular files with their sizes including holes, each
/// once regardless of its hard links. The same counter counts the total before a copy and the
/// completed part, which therefore does not exceed it unless the tree grew meanwhile.
#[derive(Default)]
struct CopyTally {
    met: FileTotals,
    /// Totals without the current object.
    passed: FileTotals,
    /// Files with several hard links, by device and inode number.
    several: HashSet<(u64, u64)>,
}

impl CopyTally {
    /// Completes the current object, whether it was copied or not.
    fn start_next(&mut self) {
        self.passed = self.met;
    }

    fn add_host_file(&mut self, stat: &Stat) {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.meet(stat.st_mode, (stat.st_dev, stat.st_ino), stat.st_nlink == 1, size);
    }

    fn add_stored_file(&mut self, attributes: &Attributes) {
        self.meet(attributes.mode, (0, attributes.ino.0), attributes.links == 1, attributes.size);
    }

    fn meet(&mut self, mode: u32, id: (u64, u64), has_one_name: bool, size: u64) {
        if mode & mode::TYPE == mode::REGULAR && (has_one_name || self.several.insert(id)) {
            self.met.files += 1;
            // Sizes in an archive are unverified.
            self.met.bytes = self.met.bytes.saturating_add(size);
        }
    }

    /// Returns the completed totals, with at most `within` bytes of the current object.
    fn passed(&self, within: u64) -> FileTotals {
        FileTotals { bytes: self.passed.bytes.saturating_add(within).min(self.met.bytes), ..self.passed }
    }
}
