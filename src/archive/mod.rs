//! Facade of the library: creates, opens, checks, compacts and rekeys archives, and manages their
//! snapshots and backups.

mod backup;
mod compact;
mod create;
#[cfg(any(test, debug_assertions))]
#[doc(hidden)]
pub mod fuzzing;
mod snapshots;
#[cfg(test)]
pub(crate) mod tests;

pub use crate::crypto::kdf::KdfCost;
pub use crate::format::header::recognize;
pub use crate::format::{ArchiveId, FORMAT_VERSION, Generation};
pub use crate::txn::{Finding, FindingKind, Lost, Severity};
pub use backup::{BackupDestination, BackupReport, BackupSource, BackupStep, Backups, NewBackupFile};
pub use compact::{CompactOptions, CompactReport, CompactStep};
pub use create::NewArchive;
pub use snapshots::{PinnedState, RetentionPolicy, RetentionRule, Snapshot, SnapshotManager, name_of_time};

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use crate::crypto::kdf::constant_time_eq;
use crate::crypto::{Prompts, SecretKey};
use crate::env::{StampingEnvironment, SystemEnvironment};
use crate::error::{Error, Refusal, Result};
use crate::format::header::{Framing, SLOT_EMPTY, encode};
use crate::format::{BLOCK, KEY_SLOTS, ROOT_INO, SessionId, Timestamp};
use crate::frame::PageCipher;
use crate::fs::{Compression, Creator, DataReading, FileSystem, FsOptions, StructureReport, SyncProfile};
use crate::keys::header::{self, Header, SlotBlock, random_slots};
use crate::keys::rollback::RollbackCheck;
use crate::keys::slots::{self, OpenedSlot, SlotAddress};
use crate::keys::{
    Fingerprint, KeyAccess, KeyInfo, KeyKind, KeyName, LEAST_MEMORY, RollbackGuard, RollbackOptions, UnlockedKey,
    listed, open_header,
};
use crate::storage::{ArchiveSource, FileIdentity, FileStorage, LockMode, Storage};
use crate::txn::{self, Audit, LostPage, Volume};
use compact::{CompactTarget, with_log};
use create::{name_key, random_key};

pub struct CreateOptions {
    pub kdf: KdfCost,
    /// Owner of the root directory.
    pub creator: Creator,
}

#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    pub read_only: bool,
    /// Limit in bytes for frame cache, node cache, dirty data and space map together.
    pub memory: u64,
    pub sync: SyncProfile,
    pub pack: bool,
    pub compression: Compression,
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
            compression: Compression::Default,
            size_limit: None,
        }
    }
}

impl OpenOptions {
    /// Dirty data may use a quarter of the memory, and less while programs sync
    /// (`DirtyThrottle`), because one fsync may wait for all of it.
    fn file_system_options(&self) -> FsOptions {
        let max_dirty_bytes = (self.memory / 4).max(4 << 20);
        FsOptions { max_dirty_bytes, sync: self.sync, pack: self.pack, compression: self.compression }
    }
}

/// Properties of an open archive.
#[derive(Clone, Debug)]
pub struct ArchiveInfo {
    pub archive: ArchiveId,
    /// Unique to this archive and unforgeable; the id is not, since it is stored unencrypted.
    pub fingerprint: Fingerprint,
    /// Warning when the archive is authenticated by a public key only
    /// ([`crate::keys::RollbackOptions::places`]).
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

    /// Returns the rollback guard of this archive; call [`RollbackGuard::remember`] periodically
    /// while it is open.
    pub fn witness(&self) -> &Arc<RollbackGuard> {
        &self.witness
    }

    pub(crate) fn read_only(&self) -> bool {
        self.storage.read_only()
    }

    /// Returns whether it was a backup of an archive when it was opened.
    pub fn is_backup(&self) -> bool {
        self.fs.volume.origin().is_some()
    }

    /// Returns whether the archive's file was removed or replaced, so that its content is lost when
    /// it is closed.
    pub fn is_unlinked(&self) -> bool {
        self.storage.is_unlinked()
    }

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
        Archive::open_seen(site, key, options, &RollbackOptions::default())
    }

    /// Opens an archive like [`Archive::open`], and compares it with the rollback state of this
    /// user.
    ///
    /// # Errors
    /// `Replaced`, `OlderCopy` and `ForkedCopy` unless they are accepted.
    pub fn open_seen<'a>(
        site: impl Into<ArchiveSource<'a>>,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen_options: &RollbackOptions,
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
        seen_options: &RollbackOptions,
        witness: &RollbackGuard,
    ) -> Result<Archive> {
        Archive::open_at(site.into(), key, options, seen_options, Some(witness.looked()), None)
    }

    /// Opens the newest state, or the snapshot of this name.
    pub(super) fn open_at(
        site: ArchiveSource<'_>,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen_options: &RollbackOptions,
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
            mended.extend(partial_block(length).map(|flaw| format!("{flaw}; the file was truncated")));
        }
        let interrupted = header.is_interrupted(&*storage, &key.volume_key, volume.durable().header_sequence)?;
        let header_flaw = header.flaw(&key.volume_key).map(|flaw| (flaw, interrupted));
        let witness = Arc::new(RollbackGuard::new(volume.clone(), header.durable_sequence(), looked, replace));
        if let Some(limit) = options.size_limit {
            volume.allocator().limit_size(limit);
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
            used_bytes: volume.allocator().space().1.saturating_mul(BLOCK), // unverified
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
pub(crate) type Findings = Vec<Finding>;

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
            let detail =
                format!("{flaw}; the archive depends on the other copy alone, until it is next opened for writing");
            let severity = if *is_interrupted { Severity::Note } else { Severity::Minor };
            Finding::new(FindingKind::Header, severity, detail)
        });
        let length = partial_block(self.storage.len()?).map(|flaw| {
            let detail = format!("{flaw}; the next writable opening truncates the file");
            Finding::new(FindingKind::Length, Severity::Note, detail)
        });
        let log = self.fs.volume.lost().map(|lost| {
            let detail = format!("durable data is lost: {lost}");
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
    (part > 0).then(|| format!("the file ends with a partial block of {part} bytes, which is not part of the archive"))
}

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

/// Selection of the keys that open the archive afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeepKeys {
    All,
    Only(Vec<KeyName>),
    Drop(Vec<KeyName>),
}

pub struct RekeyOptions<'a> {
    pub keep: KeepKeys,
    /// As for a compaction; `seen` is that of the access.
    pub break_links: bool,
    /// Only report which keys would be kept.
    pub dry_run: bool,
    /// Prompts for the plugins of age recipients.
    pub prompts: &'a Arc<dyn Prompts>,
}

#[derive(Clone, Debug)]
pub struct RekeyReport {
    pub kept: Vec<KeyInfo>,
    pub dropped: Vec<KeyInfo>,
    pub sizes: CompactReport,
}

impl Archive {
    /// Rewrites the archive under a new volume key, verifies it and replaces the old one, as
    /// [`Archive::compact`] does.
    ///
    /// # Errors
    /// As [`Archive::compact`] and [`crate::keys::unlock_with`]; `Invalid` when no key would be
    /// kept, and for a slot that cannot be wrapped: one of an unknown kind, without a description,
    /// or of a plugin that fails. Everything is unchanged then.
    pub fn rekey<'a>(
        site: impl Into<ArchiveSource<'a>>,
        access: &KeyAccess<'_>,
        options: &RekeyOptions<'_>,
        step: &mut dyn FnMut(CompactStep) -> Result<()>,
    ) -> Result<RekeyReport> {
        let site = site.into();
        let (header, opened) = open_header(site, access.secrets, &access.limits)?;
        let (kept, dropped) = choose(&header, &opened, &options.keep)?;
        let sequence = header.framing().sequence;
        let key = UnlockedKey {
            archive: header.framing().archive,
            volume_key: SecretKey::new(*opened.volume_key.bytes()),
            by_recipient: slots::is_recipient(&header, opened.slot),
        };
        let compaction = CompactOptions {
            dry_run: options.dry_run,
            break_links: options.break_links,
            compression: None,
            seen: access.seen.clone(),
        };
        let mut prepare = |header: &Header, _: &UnlockedKey| {
            // The slots were chosen from this header, which can no longer change because the file
            // is locked.
            if header.framing().sequence != sequence {
                return Err(Error::InUse("another process changed its keys meanwhile; try again".into()));
            }
            target(header, &opened, &kept, access, options.prompts)
        };
        let sizes = compact::rewrite(site, &key, &compaction, &mut prepare, step)?;
        Ok(RekeyReport { kept, dropped, sizes })
    }
}

fn choose(header: &Header, opened: &OpenedSlot, keep: &KeepKeys) -> Result<(Vec<KeyInfo>, Vec<KeyInfo>)> {
    let keys = listed(header, &opened.volume_key, std::slice::from_ref(opened));
    let (names, keeps_named): (&[KeyName], bool) = match keep {
        KeepKeys::All => (&[][..], false),
        KeepKeys::Only(names) => (&names[..], true),
        KeepKeys::Drop(names) => (&names[..], false),
    };
    let named = names.iter().map(|name| Ok(name.find(&keys)?.slot)).collect::<Result<Vec<u8>>>()?;
    let (kept, dropped): (Vec<KeyInfo>, Vec<KeyInfo>) =
        keys.into_iter().partition(|key| named.contains(&key.slot) == keeps_named);
    if kept.is_empty() {
        return Err(Error::invalid("no key slot would remain, so the archive could not be opened"));
    }
    for key in &kept {
        if matches!(key.kind, KeyKind::Unknown(_)) {
            return Err(Error::Refused(Refusal::UnknownKey { slot: key.slot.into() }));
        }
        if key.about.is_none() {
            return Err(Error::Refused(Refusal::UndescribedKey { slot: key.slot.into() }));
        }
    }
    Ok((kept, dropped))
}

fn target(
    header: &Header,
    opened: &OpenedSlot,
    kept: &[KeyInfo],
    access: &KeyAccess<'_>,
    prompts: &Arc<dyn Prompts>,
) -> Result<CompactTarget> {
    let environment = SystemEnvironment;
    let archive = header.framing().archive;
    let volume_key = random_key(&environment)?;
    let mut blocks = random_slots(&environment)?;
    let mut framing = Framing {
        sequence: header.framing().sequence + 1,
        commitment: header::commitment(&volume_key, &archive),
        slots: [SLOT_EMPTY; 32],
        ..with_log(header.framing())
    };
    for key in kept {
        let slot = usize::from(key.slot);
        // The slot's own description, under its own key, is preferred to the one that any holder of
        // the volume key may have written.
        let own = opened.own.clone().filter(|_| opened.slot == slot);
        let description = own.or_else(|| slots::description(header, slot, &opened.volume_key));
        let description = description.ok_or_else(|| Error::damaged(format!("key slot {slot} lost its description")))?;
        let address = SlotAddress { archive: &archive, slot, volume_key: &volume_key };
        let wrapped = slots::rewrap(&address, header, &description, prompts, &environment);
        (framing.slots[slot], blocks[slot]) = wrapped.map_err(|error| match error {
            Error::Invalid(reason) => Error::Refused(Refusal::UnkeptKey { slot, reason }),
            error => error,
        })?;
    }
    if framing.slots[opened.slot] != SLOT_EMPTY {
        prove_opens(&framing, &blocks, opened.slot, access, &volume_key)?;
    }
    Ok(CompactTarget { key: UnlockedKey { archive, volume_key, by_recipient: false }, framing, slots: blocks })
}

/// Checks that the given secret opens the new slot, before anything is written: a holder of the
/// volume key could have altered the data for which it is wrapped.
fn prove_opens(
    framing: &Framing,
    blocks: &[SlotBlock; KEY_SLOTS],
    slot: usize,
    access: &KeyAccess<'_>,
    volume_key: &SecretKey,
) -> Result<()> {
    let made = Header::of_copy(&encode(framing, blocks))?;
    match slots::unlock(&made, access.secrets, &access.limits) {
        Ok(opened) if constant_time_eq(opened.volume_key.bytes(), volume_key.bytes()) => Ok(()),
        Ok(_) | Err(Error::WrongKey) => Err(Error::damaged(format!(
            "key slot {slot} would not open with its own secret after the change: its description was altered; nothing was changed"
        ))),
        Err(error) => Err(error),
    }
}
