//! The facade: create, open, check, change keys, import and extract; what programs use.

mod attributes;
mod backup;
mod check;
mod compact;
mod create;
mod difference;
mod extract;
mod filter;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod host;
mod import;
mod keys;
mod left;
mod listing;
mod mirror;
mod open;
mod path;
mod rekey;
mod rescue;
mod scan;
mod seen;
mod slots;
mod stage;
mod tar;
#[cfg(test)]
mod tests;
mod vouch;

pub use backup::Restored;
pub use check::CheckReport;
pub use compact::{CompactOptions, CompactReport, CompactStep};
pub use extract::{ExtractOptions, ExtractReport};
pub use filter::Filter;
pub use host::{device_number, split_device_number};
pub use import::{ImportOptions, ImportReport};
pub use keys::{KeyAbout, KeyAccess, KeyInfo, KeyName, PassphraseChange};
pub use left::{Left, LeftOut};
pub use listing::{Entries, Entry};
pub use lockbox_terminal::display;
pub use mirror::{Change, Changed, Deletion, MirrorPlan};
pub use path::resolve;
pub use rekey::{KeepKeys, RekeyOptions, RekeyReport};
pub use rescue::{Later, PARTIAL, RescueOptions, RescueProgress, RescueReport, RescueState, Rescued, UNNAMED};
pub use seen::{SeenOptions, Witness, seen_directory, state_directory};
pub use slots::{KeyKind, NewKey, Secrets};
pub use tar::{TarExport, TarImport, TarImportOptions};

pub use crate::txn::{Finding, FindingKind, Lost, Severity};

use std::fmt;
use std::sync::Arc;

use crate::crypto::SecretKey;
pub use crate::crypto::kdf::KdfCost;
use crate::error::{Error, Result};
use crate::format::{ArchiveId, Generation, SessionId, Timestamp};
use crate::fs::{Creator, FileSystem, FsOptions, SyncProfile};
use crate::storage::{FileStorage, Storage};

/// How to create an archive.
pub struct CreateOptions {
    pub kdf: KdfCost,
    /// Owner of the root directory.
    pub creator: Creator,
}

/// How to open an archive.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    pub read_only: bool,
    /// Cap in bytes of frame cache, node cache, dirty data and space map together.
    pub memory: u64,
    pub sync: SyncProfile,
    pub pack: bool,
    pub compress: bool,
    /// Most bytes that the archive's file may have; one that has more already does not grow.
    pub size_limit: Option<u64>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            read_only: false,
            memory: 256 << 20,
            sync: SyncProfile::Periodic,
            pack: true,
            compress: true,
            size_limit: None,
        }
    }
}

impl OpenOptions {
    /// A quarter of the memory may hold staged data, but no more than 32 MiB: one fsync waits for at most that much.
    fn file_system_options(&self) -> FsOptions {
        let staged_bytes = (self.memory / 4).clamp(4 << 20, 32 << 20);
        FsOptions { staged_bytes, sync: self.sync, pack: self.pack, compress: self.compress }
    }
}

/// What unlocking may cost, whatever the header of a hostile archive asks for.
#[derive(Clone, Copy, Debug)]
pub struct UnlockLimits {
    /// MiB times passes, over all slots that are tried.
    pub cost_mib: u64,
    /// MiB of one derivation.
    pub memory_mib: u32,
}

impl UnlockLimits {
    /// For archives that are trusted: any memory that the format allows.
    pub fn raised(cost_mib: u64) -> UnlockLimits {
        UnlockLimits { cost_mib, memory_mib: 4096 }
    }
}

impl Default for UnlockLimits {
    /// Eight slots of 1 GiB and 3 passes each, the least that a calibrated slot has, and a second or two each on common machines: a hostile
    /// header with 32 slots costs as much as that and no more. 1 GiB is the most that a calibrated slot asks for.
    fn default() -> Self {
        UnlockLimits { cost_mib: 8 * 3 * 1024, memory_mib: 1024 }
    }
}

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
    fn settle<T>(problems: &mut Vec<Problem>, path: &[u8], result: Result<Option<T>>) -> Result<Option<T>> {
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
    /// What is being copied.
    pub path: &'a [u8],
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
    fn progress<'a>(&self, path: &'a [u8], within: u64) -> Progress<'a> {
        Progress { files: self.files, bytes: self.bytes + within, path }
    }
}

/// The unlocked volume key with the archive that it belongs to; what a mounting command hands to the daemon.
pub struct UnlockedKey {
    pub(crate) archive: ArchiveId,
    pub(crate) volume_key: SecretKey,
}

impl UnlockedKey {
    /// 48 bytes for a private pipe between two processes: archive id, volume key.
    pub fn to_bytes(&self) -> zeroize::Zeroizing<Vec<u8>> {
        // Allocated at once: a vector that grows leaves copies behind.
        let mut bytes = zeroize::Zeroizing::new(Vec::with_capacity(48));
        bytes.extend_from_slice(&self.archive);
        bytes.extend_from_slice(self.volume_key.bytes());
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<UnlockedKey> {
        let wrong = || Error::invalid(format!("an unlocked key has 48 bytes: given={}", bytes.len()));
        let (archive, key) = bytes.split_first_chunk::<16>().ok_or_else(wrong)?;
        let key = zeroize::Zeroizing::new(<[u8; 32]>::try_from(key).map_err(|_| wrong())?);
        Ok(UnlockedKey { archive: *archive, volume_key: SecretKey::new(*key) })
    }
}

/// What can be told of an archive that is open.
#[derive(Clone, Debug)]
pub struct Info {
    pub archive: ArchiveId,
    pub format_version: u32,
    pub generation: Generation,
    /// Id of the writing session that made the newest commit.
    pub session: SessionId,
    pub committed: Timestamp,
    pub closed: bool,
    pub inodes: u64,
    pub file_bytes: u64,
    pub used_bytes: u64,
    /// Number and kind of each slot in use.
    pub key_slots: Vec<(u8, u8)>,
    /// A sentence when recovery had to fall back one commit.
    pub fallback: Option<String>,
    /// A sentence about each thing outside of the pages that opening it for writing put in order.
    pub mended: Vec<String>,
}

/// An open archive.
pub struct Archive {
    fs: Arc<FileSystem>,
    storage: Arc<FileStorage>,
    /// Device and inode of the file.
    identity: (u64, u64),
    archive: ArchiveId,
    witness: Arc<Witness>,
    key_slots: Vec<(u8, u8)>,
    /// What is wrong with the header copy that is not used.
    header_flaw: Option<String>,
    mended: Vec<String>,
}

impl Archive {
    pub fn file_system(&self) -> &Arc<FileSystem> {
        &self.fs
    }

    /// What remembers this archive for its user; call [`Witness::remember`] now and then while it is open.
    pub fn witness(&self) -> &Arc<Witness> {
        &self.witness
    }

    pub fn read_only(&self) -> bool {
        self.storage.read_only()
    }
}
