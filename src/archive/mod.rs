//! Facade of the library: creates, opens, checks, compacts and rekeys archives, and manages their
//! snapshots and backups.

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

pub use backup::{BackupDestination, BackupReport, BackupSource, BackupStep, BackupWatch, Backups, NewBackupFile};
pub use check::{CheckReport, CheckStep, Findings};
pub use compact::{CompactOptions, CompactReport, CompactStep};
pub use create::NewArchive;
pub use rekey::{KeepKeys, RekeyOptions, RekeyReport};
pub use retention::{RetentionPolicy, RetentionRule};
pub use snapshots::{PinnedState, Snapshot, SnapshotManager, name_of_time, time_of_scheduled};

pub use crate::txn::{Finding, FindingKind, Lost, Severity};

use std::sync::Arc;

pub use crate::crypto::kdf::KdfCost;
use crate::error::Result;
pub use crate::format::Generation;
use crate::format::{ArchiveId, SessionId, Timestamp};
use crate::fs::{Creator, FileSystem, FsOptions, SyncProfile};
use crate::keys::{Fingerprint, RollbackGuard};
use crate::storage::{FileIdentity, Storage};

/// Options of creating an archive.
pub struct CreateOptions {
    pub kdf: KdfCost,
    /// Owner of the root directory.
    pub creator: Creator,
}

/// Options of opening an archive.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    pub read_only: bool,
    /// Limit in bytes for frame cache, node cache, dirty data and space map together.
    pub memory: u64,
    pub sync: SyncProfile,
    pub pack: bool,
    pub compress: bool,
    /// Maximum length of the archive's file in bytes; a longer file does not grow.
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
    /// Dirty data may use a quarter of the memory, at most 32 MiB, because one fsync may wait for
    /// all of it.
    fn file_system_options(&self) -> FsOptions {
        let max_dirty_bytes = (self.memory / 4).clamp(4 << 20, 32 << 20);
        FsOptions { max_dirty_bytes, sync: self.sync, pack: self.pack, compress: self.compress }
    }
}

/// Properties of an open archive.
#[derive(Clone, Debug)]
pub struct ArchiveInfo {
    pub archive: ArchiveId,
    /// Unique to this archive and unforgeable; the id is not, since it is stored unencrypted.
    pub fingerprint: Fingerprint,
    /// Warning when the archive is authenticated by a public key only
    /// ([`crate::keys::SeenOptions::places`]).
    pub first_use: Option<String>,
    pub format_version: u32,
    pub generation: Generation,
    /// Id of the writing session that made the newest commit.
    pub session: SessionId,
    pub committed: Timestamp,
    pub closed: bool,
    /// Small fsyncs are written to a log (specification 9.4).
    pub log: bool,
    pub inodes: u64,
    pub file_bytes: u64,
    pub used_bytes: u64,
    /// Number and kind of each slot in use.
    pub key_slots: Vec<(u8, u8)>,
    /// Generation and time of the source commit, if it is a backup.
    pub backup_of: Option<(Generation, Timestamp)>,
    /// Message when recovery skipped the newest commit: it was interrupted, or damaged since.
    pub fallback: Option<String>,
    /// Messages about repairs outside of pages when it was opened for writing.
    pub mended: Vec<String>,
}

impl ArchiveInfo {
    /// Returns messages for the user at opening.
    pub fn notices(&self) -> Vec<String> {
        let backup = self.backup_of.map(|(generation, time)| {
            format!("this is a backup: the archive as it was at commit {} on {} UTC", generation.0, time.utc())
        });
        let first_use = self.first_use.clone().into_iter();
        first_use.chain(backup).chain(self.fallback.clone()).chain(self.mended.clone()).collect()
    }
}

/// Open archive.
pub struct Archive {
    fs: Arc<FileSystem>,
    storage: Arc<dyn Storage>,
    identity: Option<FileIdentity>,
    archive: ArchiveId,
    fingerprint: Fingerprint,
    first_use: Option<String>,
    witness: Arc<RollbackGuard>,
    key_slots: Vec<(u8, u8)>,
    /// Checksums of both header copies.
    header_sums: crate::keys::header::Sums,
    /// Fault of the unused header copy, and whether a crash explains it.
    header_flaw: Option<(String, bool)>,
    mended: Vec<String>,
}

impl Archive {
    pub fn file_system(&self) -> &Arc<FileSystem> {
        &self.fs
    }

    /// Returns the identity of the archive's file; `None` if it is not a file of the host.
    pub fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }

    /// Returns the uid that owns the archive's open file; `None` if it is not a file of the host.
    ///
    /// # Errors
    /// Failures of the host.
    pub fn owner(&self) -> Result<Option<u32>> {
        self.storage.owner()
    }

    /// Returns the rollback guard of this archive; call [`Witness::remember`] periodically while it
    /// is open.
    pub fn witness(&self) -> &Arc<RollbackGuard> {
        &self.witness
    }

    pub fn read_only(&self) -> bool {
        self.storage.read_only()
    }

    /// Returns whether the archive's file was removed or replaced, so that its content is lost when
    /// it is closed.
    pub fn is_unlinked(&self) -> bool {
        self.storage.is_unlinked()
    }
}
