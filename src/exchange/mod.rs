//! Exchange with the host: copies trees into an archive and out of it, mirrors, tars, and the lists of what is there.
//!
//! It sees `storage` for what tells one file of the host from another (`Identity`) and for the names of a host's directory; no bytes of an
//! archive pass here.

pub(crate) mod attributes;
mod copy;
mod counting;
mod deletion;
mod difference;
mod extract;
mod filter;
pub(crate) mod host;
mod import;
mod listing;
mod mirror;
mod path;
mod path_ops;
mod progress;
mod skipped;
mod snapshot;
pub(crate) mod staging_dir;
mod tar;
mod tree_diff;
pub(crate) mod walk;

pub use copy::{copy, rewrite};
pub use counting::{count_sources, count_stored};
pub use deletion::{Deletion, MirrorPlan};
pub(crate) use extract::write_all;
pub use extract::{ExtractOptions, ExtractReport, extract};
pub use filter::Filter;
pub use host::{device_number, split_device_number};
pub use import::{ImportOptions, ImportReport, import};
pub use listing::{Entries, Entry};
pub use mirror::{Change, Changed, plan_mirror};
pub use path::{components, resolve};
pub use path_ops::{Destination, make_directories, remove, rename};
pub use progress::Amount;
pub use skipped::{Left, LeftOut};
pub use snapshot::{Alone, Differing, DifferingKind, Names, Restore, RestoreReport, compare};
pub use tar::{
    Packed, TarExport, TarImport, TarImportOptions, Unpacked, export_tar, export_tree, import_tar, pack_tree,
    unpack_tar,
};
pub use tree_diff::{Top, Unlike, UnlikeMetadata, compare_trees};

use std::fmt;

use lockbox_terminal::display;

use crate::error::{Error, Result};

/// A part of an import or extraction that failed while the rest went on.
#[derive(Debug)]
pub struct Problem {
    pub path: Vec<u8>,
    pub cause: Cause,
}

/// Why something is not as it should be.
#[derive(Debug)]
pub enum Cause {
    /// The file changed while it was read: its copy may mix two versions.
    Changed,
    /// The archive lies in the source, and cannot hold itself.
    Itself,
    Failed(Error),
}

impl Problem {
    /// Whether something of the source is not known that may be there.
    fn hides_something(&self) -> bool {
        matches!(self.cause, Cause::Failed(_))
    }

    /// Notes a failure that concerns the object at `path`, passes on one that ends everything: the host takes no more, or whoever waits wants no more.
    pub(crate) fn tolerate<T>(
        problems: &mut Vec<Problem>,
        path: &[u8],
        result: Result<Option<T>>,
    ) -> Result<Option<T>> {
        match result {
            Ok(value) => Ok(value),
            Err(error @ (Error::NoSpace(_) | Error::ReadOnly(_) | Error::Interrupted(_))) => Err(error),
            Err(error) => {
                problems.push(Problem { path: path.to_vec(), cause: Cause::Failed(error) });
                Ok(None)
            }
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", display(&self.path))?;
        match &self.cause {
            Cause::Changed => f.write_str("the file changed while it was read"),
            Cause::Itself => f.write_str("the archive cannot hold itself"),
            Cause::Failed(error) => match std::error::Error::source(error) {
                Some(source) => write!(f, "{error}: {source}"),
                None => write!(f, "{error}"),
            },
        }
    }
}

/// How far an import or extraction is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    pub files: u64,
    pub bytes: u64,
    /// What of all that is to be copied is done with: also what was there already, or could not be copied.
    pub passed: Amount,
    /// What is being copied.
    pub path: &'a [u8],
}

impl<'a> Progress<'a> {
    /// Of a copy that passes what it copies.
    pub(crate) fn copied(files: u64, bytes: u64, path: &'a [u8]) -> Progress<'a> {
        Progress { files, bytes, passed: Amount { files, bytes }, path }
    }
}

/// What was copied, in or out, by kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Copied {
    pub files: u64,
    pub directories: u64,
    /// Further names of files.
    pub links: u64,
    pub symlinks: u64,
    /// FIFOs, sockets and devices.
    pub others: u64,
    /// Content of the files.
    pub bytes: u64,
}

impl Copied {
    /// On the way at `path`, of which `within` bytes are done that do not count yet.
    pub(crate) fn progress<'a>(&self, path: &'a [u8], within: u64) -> Progress<'a> {
        Progress::copied(self.files, self.bytes + within, path)
    }
}
