//! The archive as a whole: creates, opens, checks and compacts it, gives it another key, and keeps moments of it.

mod backup;
mod check;
mod compact;
mod create;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod open;
mod rekey;
mod relay;
mod retention;
mod snapshots;
#[cfg(test)]
pub(crate) mod tests;

pub use backup::{BackedUp, BackupSource, BackupStep, BackupWatch, Backups, Beside, Destination};
pub use check::{CheckReport, CheckStep, Findings};
pub use compact::{CompactOptions, CompactReport, CompactStep};
pub use create::Created;
pub use rekey::{KeepKeys, RekeyOptions, RekeyReport};
pub use retention::{Keep, KeepRule};
pub use snapshots::{Moments, Now, Snapshot, name_of_time, time_of_scheduled};

pub use crate::txn::{Finding, FindingKind, Lost, Severity};

use std::sync::Arc;

pub use crate::crypto::kdf::KdfCost;
use crate::error::Result;
pub use crate::format::Generation;
use crate::format::{ArchiveId, SessionId, Timestamp};
use crate::fs::{Creator, FileSystem, FsOptions, SyncProfile};
use crate::keys::{Fingerprint, Witness};
use crate::storage::{Identity, Storage};

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

/// What can be told of an archive that is open.
#[derive(Clone, Debug)]
pub struct Info {
    pub archive: ArchiveId,
    /// Unique to this archive and not forgeable; the id is not, since it stands in the clear.
    pub fingerprint: Fingerprint,
    /// A sentence when nothing but a public key may vouch for it
    /// ([`crate::keys::SeenOptions::places`]).
    pub first_use: Option<String>,
    pub format_version: u32,
    pub generation: Generation,
    /// Id of the writing session that made the newest commit.
    pub session: SessionId,
    pub committed: Timestamp,
    pub closed: bool,
    /// Whether small fsyncs go into a log (specification 9.4).
    pub log: bool,
    pub inodes: u64,
    pub file_bytes: u64,
    pub used_bytes: u64,
    /// Number and kind of each slot in use.
    pub key_slots: Vec<(u8, u8)>,
    /// The number and the time of the commit that it is a backup of, if it is one.
    pub backup_of: Option<(Generation, Timestamp)>,
    /// A sentence when recovery left the newest commit out: it was interrupted, or damaged since.
    pub fallback: Option<String>,
    /// A sentence about each thing outside of the pages that opening it for writing put in order.
    pub mended: Vec<String>,
}

impl Info {
    /// What whoever opens it is told: sentences.
    pub fn notices(&self) -> Vec<String> {
        let backup = self.backup_of.map(|(generation, time)| {
            format!("this is a backup: the archive as it was at commit {} on {} UTC", generation.0, time.utc())
        });
        let first_use = self.first_use.clone().into_iter();
        first_use.chain(backup).chain(self.fallback.clone()).chain(self.mended.clone()).collect()
    }
}

/// An open archive.
pub struct Archive {
    fs: Arc<FileSystem>,
    storage: Arc<dyn Storage>,
    identity: Option<Identity>,
    archive: ArchiveId,
    fingerprint: Fingerprint,
    first_use: Option<String>,
    witness: Arc<Witness>,
    key_slots: Vec<(u8, u8)>,
    /// Of both copies of the header as they are to be.
    header_sums: crate::keys::header::Sums,
    /// Flaw of the header copy that is not used, and whether a crash explains it.
    header_flaw: Option<(String, bool)>,
    mended: Vec<String>,
}

impl Archive {
    pub fn file_system(&self) -> &Arc<FileSystem> {
        &self.fs
    }

    /// What tells the archive's file from every other one of the host; None where it is no file of the host.
    pub fn identity(&self) -> Option<Identity> {
        self.identity
    }

    /// The uid that owns the archive's file, as it is open; None where it is no file of the host.
    ///
    /// # Errors
    /// The host's.
    pub fn owner(&self) -> Result<Option<u32>> {
        self.storage.owner()
    }

    /// What remembers this archive for its user; call [`Witness::remember`] now and then while it is open.
    pub fn witness(&self) -> &Arc<Witness> {
        &self.witness
    }

    pub fn read_only(&self) -> bool {
        self.storage.read_only()
    }

    /// Returns whether the archive's file was removed or replaced, so that its content is lost when
    /// it is closed.
    pub fn is_nameless(&self) -> bool {
        self.storage.is_nameless()
    }
}
