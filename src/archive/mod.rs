//! The facade: create, open, check, change keys, import and extract; what programs use.

mod check;
mod create;
mod extract;
mod import;
mod open;
mod passphrase;

pub use check::CheckReport;
pub use extract::{ExtractOptions, ExtractReport};
pub use import::{ImportOptions, ImportReport};

use std::path::Path;
use std::sync::Arc;

use crate::crypto::kdf::KdfCost;
use crate::crypto::{Passphrase, SecretKey};
use crate::error::Result;
use crate::format::{ArchiveId, Generation, Timestamp};
use crate::fs::{Creator, FileSystem, SyncProfile};

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
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { read_only: false, memory: 256 << 20, sync: SyncProfile::Periodic, pack: true, compress: true }
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
        todo!()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<UnlockedKey> {
        let _ = bytes;
        todo!()
    }
}

/// What can be told of an archive that is open.
#[derive(Clone, Debug)]
pub struct Info {
    pub archive: ArchiveId,
    pub format_version: u32,
    pub generation: Generation,
    pub committed: Timestamp,
    pub closed: bool,
    pub inodes: u64,
    pub file_bytes: u64,
    pub used_bytes: u64,
    pub key_slots: Vec<(u8, u8)>,
    /// A sentence when recovery had to fall back one commit.
    pub fallback: Option<String>,
}

/// An open archive.
pub struct Archive {
    fs: Arc<FileSystem>,
}

impl Archive {
    /// Creates `path` (which must not exist), syncs it and its directory, and closes it.
    pub fn create(path: &Path, passphrase: &Passphrase, options: &CreateOptions) -> Result<()> {
        let _ = (path, passphrase, options);
        todo!()
    }

    /// Reads the header and tries the passphrase on every passphrase slot. Needs no lock.
    ///
    /// # Errors
    /// `NotFound`/`Io`, `NotArchive`, `UnsupportedVersion`, `Damaged` (both header copies), `WrongKey`.
    pub fn unlock(path: &Path, passphrase: &Passphrase) -> Result<UnlockedKey> {
        let _ = (path, passphrase);
        todo!()
    }

    /// The archive's id, readable without a key.
    pub fn identify(path: &Path) -> Result<ArchiveId> {
        let _ = path;
        todo!()
    }

    /// Locks and opens; a writable open repairs the older header copy first and recovers.
    pub fn open(path: &Path, key: &UnlockedKey, options: &OpenOptions) -> Result<Archive> {
        let _ = (path, key, options);
        todo!()
    }

    pub fn file_system(&self) -> &Arc<FileSystem> {
        &self.fs
    }

    pub fn info(&self) -> Result<Info> {
        todo!()
    }

    /// Verifies structure (quick) or every page, reference and count (full); `progress` gets (done, total) blocks.
    pub fn check(&self, full: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<CheckReport> {
        let _ = (full, progress);
        todo!()
    }

    /// Replaces the slot that `old` opens by one for `new`, in both header copies, one after the other with barriers.
    pub fn change_passphrase(path: &Path, old: &Passphrase, new: &Passphrase, kdf: KdfCost) -> Result<()> {
        let _ = (path, old, new, kdf);
        todo!()
    }

    /// Commits, erases free space and writes the closed record.
    pub fn close(self) -> Result<()> {
        todo!()
    }
}
