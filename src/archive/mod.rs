//! Facade of the library: creates, opens, checks, compacts and rekeys archives, and manages their
//! snapshots and backups.

mod backup;
mod compact;
mod create;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod rekey;
mod snapshots;
#[cfg(test)]
pub(crate) mod tests;

pub use crate::crypto::kdf::KdfCost;
pub use crate::format::Generation;
pub use crate::txn::{Finding, FindingKind, Lost, Severity};
pub use backup::{BackupDestination, BackupReport, BackupSource, BackupStep, BackupWatch, Backups, NewBackupFile};
pub use compact::{CompactOptions, CompactReport, CompactStep};
pub use create::NewArchive;
pub use rekey::{KeepKeys, RekeyOptions, RekeyReport};
pub use snapshots::{
    PinnedState, RetentionPolicy, RetentionRule, Snapshot, SnapshotManager, name_of_time, time_of_scheduled,
};

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use crate::env::StampingEnvironment;
use crate::error::{Error, Result};
use crate::format::{ArchiveId, BLOCK, FORMAT_VERSION, ROOT_INO, SessionId, Timestamp};
use crate::frame::PageCipher;
use crate::fs::{Creator, DataReading, FileSystem, FsOptions, StructureReport, SyncProfile};
use crate::keys::rollback::RollbackCheck;
use crate::keys::{Fingerprint, LEAST_MEMORY, RollbackGuard, SeenOptions, UnlockedKey, header};
use crate::storage::{ArchiveSource, FileIdentity, FileStorage, LockMode, Storage};
use crate::txn::{self, Audit, LostPage, Volume};
use create::name_key;

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
    header_sums: header::Sums,
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

impl Archive {
    /// Returns whether no other process holds a conflicting lock at the moment.
    ///
    /// # Errors
    /// Failures to open or lock the file itself.
    pub fn is_free(path: &Path, read_only: bool) -> Result<bool> {
        FileStorage::is_free(path, if read_only { LockMode::Shared } else { LockMode::Exclusive })
    }

    /// Locks and opens; opening for writing recovers, and repairs data outside of pages (reported
    /// in [`ArchiveInfo::mended`]).
    pub fn open<'a>(site: impl Into<ArchiveSource<'a>>, key: &UnlockedKey, options: &OpenOptions) -> Result<Archive> {
        Archive::open_seen(site, key, options, &SeenOptions::default())
    }

    /// Opens an archive like [`Archive::open`], and compares it with the rollback state of this
    /// user.
    ///
    /// # Errors
    /// `Replaced`, `Older` and `Forked` unless they are accepted.
    pub fn open_seen<'a>(
        site: impl Into<ArchiveSource<'a>>,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen_options: &SeenOptions,
    ) -> Result<Archive> {
        Archive::open_at(site.into(), key, options, seen_options, None, None)
    }

    /// Opens an archive that has continued at its location: compares it with the state that its
    /// `witness` saw, in case the user's rollback state is no longer accessible.
    ///
    /// # Errors
    /// As [`Archive::open_seen`].
    pub fn open_again<'a>(
        site: impl Into<ArchiveSource<'a>>,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen_options: &SeenOptions,
        witness: &RollbackGuard,
    ) -> Result<Archive> {
        Archive::open_at(site.into(), key, options, seen_options, Some(witness.looked()), None)
    }

    /// Opens the newest state, or the snapshot of this name.
    pub(super) fn open_at(
        site: ArchiveSource<'_>,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen_options: &SeenOptions,
        looked: Option<RollbackCheck>,
        snapshot: Option<&[u8]>,
    ) -> Result<Archive> {
        if options.memory < LEAST_MEMORY {
            return Err(Error::invalid(format!("memory={} is below {LEAST_MEMORY} bytes", options.memory)));
        }
        let lock = if options.read_only { LockMode::Shared } else { LockMode::Exclusive };
        let storage = site.open(lock)?;
        if matches!(site, ArchiveSource::Storage(_)) && !options.read_only && storage.read_only() {
            return Err(Error::ReadOnly("the archive can only be read where it is".into()));
        }
        let mut header = key.read_header(&*storage)?;
        if !options.read_only {
            header.check_writable()?;
        }
        let length = storage.len()?;
        let environment = Arc::new(StampingEnvironment::new());
        let cipher = PageCipher::new(&key.volume_key, key.archive, header.framing().has_log(), environment.clone());
        let fs_options = options.file_system_options();
        let volume_options =
            txn::OpenOptions { read_only: options.read_only, memory: options.memory - fs_options.max_dirty_bytes };
        let sequence = header.framing().sequence;
        let looked = looked.unwrap_or_else(|| {
            RollbackCheck::at(seen_options, &key.volume_key, &key.archive).opened_by_recipient(key.by_recipient)
        });
        let mark = looked.mark();
        let volume = Volume::open_seen(storage.clone(), cipher, environment.clone(), sequence, &volume_options, mark)?;
        let replace = looked.admit(&volume, sequence, seen_options, options.read_only)?;
        let first_use = looked.first_use();
        let mut mended = Vec::new();
        if !options.read_only {
            // Before the first record carries the number, and not from an older header that was
            // just refused.
            mended.extend(header.repair(&*storage, &key.volume_key)?);
            mended.extend(partial_block(length).map(|what| format!("{what}; that was cut off")));
        }
        let interrupted = header.is_interrupted(&*storage, &key.volume_key, volume.durable().header_sequence)?;
        let header_flaw = header.flaw(&key.volume_key).map(|flaw| (flaw, interrupted));
        let witness = Arc::new(RollbackGuard::new(volume.clone(), header.durable_sequence(), looked, replace));
        if let Some(limit) = options.size_limit {
            volume.limit_size(limit);
        }
        if let Some(name) = snapshot {
            volume.show_snapshot(name)?;
        }
        let fs = FileSystem::new(volume, environment, name_key(&key.volume_key, &key.archive), fs_options)?;
        // Reports a damaged root now, with its name, instead of through the kernel later.
        fs.attributes(ROOT_INO)?;
        let slots = header.framing().slots;
        let key_slots = (0..).zip(slots).filter(|(_, kind)| *kind != 0).collect();
        let identity = match site {
            // Under the lock the path denotes the file that was opened.
            ArchiveSource::File(path) => Some(FileIdentity::from(
                &rustix::fs::stat(path).map_err(|e| Error::io(format!("cannot read {}", path.display()), e.into()))?,
            )),
            ArchiveSource::Storage(_) => None,
        };
        witness.remember();
        Ok(Archive {
            fs,
            storage,
            identity,
            archive: key.archive,
            fingerprint: key.fingerprint(),
            first_use,
            witness,
            key_slots,
            header_sums: header.sums(&key.volume_key),
            header_flaw,
            mended,
        })
    }

    pub fn id(&self) -> ArchiveId {
        self.archive
    }

    /// Returns the unforgeable fingerprint of the archive.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    pub fn info(&self) -> Result<ArchiveInfo> {
        let volume = &self.fs.volume;
        let record = volume.durable();
        Ok(ArchiveInfo {
            archive: self.archive,
            fingerprint: self.fingerprint,
            first_use: self.first_use.clone(),
            format_version: FORMAT_VERSION,
            generation: record.generation,
            session: record.session,
            committed: record.time,
            closed: record.closed,
            log: volume.has_log(),
            inodes: volume.state().inodes(),
            file_bytes: self.storage.len()?,
            used_bytes: volume.space().1.saturating_mul(BLOCK), // unverified
            key_slots: self.key_slots.clone(),
            backup_of: volume.origin().filter(|_| self.read_only()).map(|origin| (origin.generation, origin.time)),
            fallback: volume.fallback(),
            mended: self.mended.clone(),
        })
    }

    /// Commits, erases free space and writes the closed record; a read-only archive is only closed.
    /// Background tasks are stopped before.
    pub fn close(self) -> Result<()> {
        self.close_telling().map(drop)
    }

    /// Closes the archive like [`Self::close`], and returns [`Archive::pending_upload_bytes`] at
    /// the end.
    pub fn close_telling(self) -> Result<u64> {
        self.fs.close()?;
        if !self.storage.read_only() {
            self.witness.remember();
        }
        self.pending_upload_bytes()
    }

    /// Returns the number of durable bytes that other readers cannot see yet
    /// ([`pending_upload_bytes`](crate::storage::Storage::pending_upload_bytes)).
    pub fn pending_upload_bytes(&self) -> Result<u64> {
        self.storage.pending_upload_bytes()
    }
}

/// Findings of one check, in order of discovery.
pub type Findings = Vec<Finding>;

/// Result of a check.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// Blocks in use by pages.
    pub blocks: u64,
    pub inodes: u64,
    pub directories: u64,
    pub bytes: u64,
    /// Faults; empty for a sound archive.
    pub findings: Findings,
    /// Normal states after a crash, which are not faults.
    pub notes: Findings,
}

/// Progress of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckStep {
    /// Reading all pages, in bytes; only in a full check, before the tree.
    Pages { done: u64, total: u64 },
    /// Checking the tree of files, in inodes.
    Tree { done: u64, total: u64 },
}

impl Archive {
    /// Verifies the structure (quick), or every page, reference and count (full), reading each page
    /// of file data once.
    pub fn check(&self, full: bool, progress: &mut dyn FnMut(CheckStep)) -> Result<CheckReport> {
        let mut report = check(&self.fs, full, progress)?;
        let reported: HashSet<u64> = report.findings.iter().filter_map(|finding| finding.block).collect();
        let mut outside = self.check_outside()?;
        // Losses already reported with the affected file are not repeated.
        outside.extend(
            self.lost_of_commit().into_iter().filter(|page| page.block.is_none_or(|block| !reported.contains(&block))),
        );
        let (notes, findings): (Vec<_>, Vec<_>) =
            outside.into_iter().partition(|finding| finding.severity == Severity::Note);
        report.notes = notes;
        report.findings.splice(0..0, findings);
        Ok(report)
    }

    /// Returns the pages of the newest commit that do not open: a quick check reads no other page
    /// of file data.
    fn lost_of_commit(&self) -> Vec<Finding> {
        let volume = &self.fs.volume;
        let generation = volume.durable().generation.0;
        let find = |page: &LostPage| {
            let text = format!("a page that commit {generation} brought in is lost: {}", page.reason);
            Finding::new(FindingKind::Commit, Severity::Lost, text).at_block(page.run.address)
        };
        volume.lost_pages().iter().map(find).collect()
    }

    /// Checks everything outside of pages: the unused header copy, the end of the file, and lost
    /// log entries.
    fn check_outside(&self) -> Result<Vec<Finding>> {
        let header = self.header_flaw.as_ref().map(|(flaw, is_interrupted)| {
            let detail = format!(
                "{flaw}; without the other copy nothing would open, and the next writable opening writes it anew"
            );
            let severity = if *is_interrupted { Severity::Note } else { Severity::Minor };
            Finding::new(FindingKind::Header, severity, detail)
        });
        let length = partial_block(self.storage.len()?).map(|what| {
            let detail = format!("{what}, and the next writable opening cuts it off");
            Finding::new(FindingKind::Length, Severity::Note, detail)
        });
        let log = self.fs.volume.lost().map(|lost| {
            let detail = format!("what was durable is lost: {lost}");
            Finding::new(FindingKind::Log, Severity::Lost, detail)
        });
        Ok(header.into_iter().chain(length).chain(log).collect())
    }
}

/// Returns a message if a file of this length ends with a partial block. Complete blocks after the
/// archive are not a fault: after a crash the file may have grown for a commit that was not
/// completed.
fn partial_block(length: u64) -> Option<String> {
    let part = length % BLOCK;
    (part > 0).then(|| format!("the file ends with a part of a block ({part} bytes) that belongs to nothing"))
}

/// [`Archive::check`] of any file system.
fn check(fs: &FileSystem, full: bool, progress: &mut dyn FnMut(CheckStep)) -> Result<CheckReport> {
    let pages = &mut |done: u64, total: u64| {
        progress(CheckStep::Pages { done: done.saturating_mul(BLOCK), total: total.saturating_mul(BLOCK) });
    };
    let Audit { mut findings, of_files, data } = fs.volume.audit(full, pages)?;
    let reading = if full { DataReading::But(&data) } else { DataReading::Nothing };
    let StructureReport { counts, findings: structure, lost_pages } =
        fs.walk_structure(reading, &mut |done, total| progress(CheckStep::Tree { done, total }))?;
    let records_lost = structure.iter().any(|finding| finding.kind == FindingKind::RecordsLost);
    findings.extend(structure);
    // Lost blocks are reported on their own only if no affected file is known.
    findings.extend(of_files.into_iter().filter(|finding| match finding.kind {
        FindingKind::DataLost => finding.block.is_none_or(|block| !lost_pages.contains(&block)),
        FindingKind::RecordsLost => !records_lost,
        FindingKind::More => true,
        _ => false,
    }));
    say_more_once(&mut findings);
    let record = fs.volume.durable();
    Ok(CheckReport {
        blocks: record.used_blocks,
        inodes: counts.inodes,
        directories: counts.directories,
        bytes: counts.bytes,
        findings,
        notes: Vec::new(),
    })
}

/// Merges the notes of several walks that there are more findings into one at the end.
fn say_more_once(findings: &mut Vec<Finding>) {
    let more = findings.iter().find(|finding| finding.kind == FindingKind::More).cloned();
    findings.retain(|finding| finding.kind != FindingKind::More);
    findings.extend(more);
}
