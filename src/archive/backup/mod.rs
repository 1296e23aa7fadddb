//! Copies the current version of an archive into a separate file, and updates such a file to a
//! later version.
//!
//! # Invariants
//! BACKUP-1  The source version is pinned and does not change while the archive is written
//!     concurrently (ORIGIN-1). Writers wait only for the commit that makes it durable.
//! BACKUP-2  A backup has the same records of files as the source version, including orphans and
//!     pending truncations. Only its pages are at other addresses, sealed again under the same
//!     volume key.
//! BACKUP-3  The file is always a backup of the old or of the new version, never of a mixture. A
//!     new file has zeros in place of its header until everything else is durable, and gets its
//!     name after that. In an existing file the pages are written to free space of its durable
//!     record, and all records change in one operation, so in one commit (ORIGIN-3).
//! BACKUP-4  Unchanged data is identified by immutable properties: the source version descends from
//!     the origin of the file, so nothing has changed below nodes that are not newer than the
//!     origin (`btree/difference.rs`), where all commits since count on from it (ORIGIN-2), and an
//!     extent that was born no later names the same bytes (EXTENT-2: each new extent is born in its
//!     own transaction). If the descent cannot be proved, or too much has changed for one commit,
//!     everything is copied.
//! BACKUP-5  A file that is not a backup of this archive, or that contains changes which the
//!     archive lacks, is not modified.
//!
//! Several extents of one copied page share the copy, but an extent created since the origin does
//! not find the copy used by an older one: data cloned in between is stored twice in the backup,
//! until the next full backup.

mod destination;
mod records;

use std::sync::Arc;

pub use destination::{BackupDestination, NewBackupFile};

use super::{Archive, OpenOptions};
use crate::env::SystemEnvironment;
use crate::error::{Error, Refusal, Result, Timestamp};
use crate::format::header::Framing;
use crate::format::record::BackupOrigin;
use crate::format::values::Extent;
use crate::format::{BLOCK, Generation, Key, kind};
use crate::fs::FileSystem;
use crate::keys::header::{self, Header};
use crate::keys::{SeenOptions, UnlockedKey};
use crate::storage::{ArchiveSource, Storage};
use crate::txn::{Ancestry, Pinned, View, Volume};

/// Memory of the backup's own nodes and caches, in bytes.
const MEMORY: u64 = 64 << 20;

/// Progress of a backup, in bytes of file data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackupStep {
    /// `total` is an estimate, `None` if unknown.
    Copying { done: u64, total: Option<u64> },
    /// `total` is an estimate.
    Verifying { done: u64, total: u64 },
}

/// Progress callback; its error aborts the backup, and the destination is unchanged then.
pub type BackupWatch<'a> = dyn FnMut(BackupStep) -> Result<()> + 'a;

/// Result of a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupReport {
    /// Time and generation of the commit in the backup.
    pub time: Timestamp,
    pub generation: Generation,
    /// Everything was copied, not only the changes.
    pub whole: bool,
    /// Bytes of file data copied.
    pub copied_bytes: u64,
}

/// Creates backups of an open archive concurrently with its other users.
pub struct Backups {
    fs: Arc<FileSystem>,
    storage: Arc<dyn Storage>,
    /// Checksums of the header copies.
    sums: Option<header::Sums>,
}

/// Pinned version of an open archive. Pages reachable from it are not reused while it exists.
pub struct BackupSource {
    fs: Arc<FileSystem>,
    storage: Arc<dyn Storage>,
    sums: Option<header::Sums>,
    pinned: Pinned,
}

impl Archive {
    /// Opens an archive that no process has open as the source of a backup. A file that was not
    /// closed is recovered before, if it is writable.
    ///
    /// # Errors
    /// As [`Archive::open_seen`].
    pub fn open_for_backup<'a>(
        site: impl Into<ArchiveSource<'a>>,
        key: &UnlockedKey,
        seen: &SeenOptions,
    ) -> Result<Archive> {
        let site = site.into();
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let archive = Archive::open_seen(site, key, &options, seen)?;
        let volume = &archive.fs.volume;
        let lays_log = volume.lays_log();
        // A backup is only read: opening it for writing would remove its mark.
        if (volume.durable().closed && !lays_log) || volume.origin().is_some() {
            return Ok(archive);
        }
        drop(archive);
        let written = Archive::open_seen(site, key, &OpenOptions { read_only: false, ..options }, seen);
        match written.and_then(Archive::close) {
            // An archive that cannot be recovered can be copied as it is, unless its log has
            // entries: these are in no tree.
            Err(_) if !lays_log => {}
            closed => closed?,
        }
        Archive::open_seen(site, key, &options, seen)
    }

    pub fn backups(&self) -> Backups {
        Backups { fs: self.fs.clone(), storage: self.storage.clone(), sums: Some(self.header_sums) }
    }
}

impl Backups {
    #[cfg(any(test, fuzzing))]
    pub(crate) fn of(fs: Arc<FileSystem>, storage: Arc<dyn Storage>) -> Backups {
        Backups { fs, storage, sums: None }
    }

    /// Pins the current version.
    ///
    /// # Errors
    /// Errors of a commit; `Invalid` while the archive is being closed, for a mounted snapshot, and
    /// if the log was replayed for reading only.
    pub fn pin(self) -> Result<BackupSource> {
        // A reader may see a record that is only in the host's cache; a backup must not name one
        // that a crash undoes.
        self.storage.barrier()?;
        let pinned = self.fs.pin()?;
        Ok(BackupSource { fs: self.fs, storage: self.storage, sums: self.sums, pinned })
    }
}

impl BackupSource {
    fn volume(&self) -> &Volume {
        &self.fs.volume
    }

    fn origin(&self) -> &BackupOrigin {
        self.pinned.origin()
    }

    #[cfg(test)]
    pub(crate) fn generation(&self) -> Generation {
        self.origin().generation
    }

    /// Returns both copies of the header. They were authentic when the archive was opened, and
    /// cannot be changed while it is open.
    fn header(&self) -> Result<[Vec<u8>; 2]> {
        let copies = header::whole_copies(&*self.storage)?;
        if self.sums.is_some_and(|sums| sums != header::sums(&copies)) {
            return Err(Error::damaged("the header was altered since the archive was opened"));
        }
        Ok(copies)
    }

    fn backed_up(&self, whole: bool, copied_bytes: u64) -> BackupReport {
        let BackupOrigin { time, generation, .. } = *self.origin();
        BackupReport { time, generation, whole, copied_bytes }
    }

    /// Copies everything into an empty file, which is a backup afterwards.
    ///
    /// # Errors
    /// Errors of reading the archive and writing the file; that of `watch`.
    pub fn fill(&self, file: &Arc<dyn Storage>, watch: &mut BackupWatch<'_>) -> Result<BackupReport> {
        let _work = self.fs.hold_open()?;
        let copies = self.header()?;
        let environment = Arc::new(SystemEnvironment);
        let sequence = Header::of_copy(&copies[0])?.framing().sequence;
        let backup = self.volume().begin_backup(&self.pinned, file.clone(), environment, sequence);
        let backup = backup.map_err(in_backup)?;
        let copied = records::copy(self.volume(), &self.pinned, &backup, &mut |step| self.go_on(step, watch))?;
        header::write_copies(&**file, &copies).map_err(in_backup)?;
        Ok(self.backed_up(true, copied))
    }

    /// Updates an existing backup of this archive to this version by copying the changes. Returns
    /// `None` if there are too many for one commit, with nothing changed.
    ///
    /// # Errors
    /// `Refused` for a file that is not a backup of this archive, is newer, has diverged, or is
    /// damaged; errors of reading the archive and writing the file; that of `watch`. The file is
    /// unchanged then.
    pub fn bring_up_to_date(
        &self,
        file: &Arc<dyn Storage>,
        watch: &mut BackupWatch<'_>,
    ) -> Result<Option<BackupReport>> {
        let _work = self.fs.hold_open()?;
        settle(&**file)?;
        let (backup, base, copies) = match self.examine(file)? {
            DestinationState::Full => return Ok(None),
            DestinationState::Incremental(base, copies) => (self.open(file, &copies)?, base, copies),
        };
        if backup.origin() != Some(base) {
            return Err(in_backup(Error::damaged("its newest commit is lost; try again")));
        }
        // Copies the archive's key slots, so that removed keys no longer open the backup. The
        // header is written before a record carries its number (9.1 rule 6), and also if there was
        // no commit since: a key change on a full disk has no commit of its own (`vouch`).
        header::write_copies(&**file, &copies).map_err(in_backup)?;
        if base == *self.origin() {
            return Ok(Some(self.backed_up(false, 0)));
        }
        let watch = &mut |step| self.go_on(step, watch);
        let prepared = records::prepare(self.volume(), &self.pinned, &base, &backup, watch);
        let copied = prepared
            .and_then(|prepared| prepared.map(|prepared| prepared.publish(&backup, &self.pinned)).transpose())
            .inspect_err(|_| cut_part_of_block(&**file))?;
        Ok(copied.map(|copied| self.backed_up(false, copied)))
    }

    /// Reads a backup of this version back from the medium and compares it with the archive.
    ///
    /// # Errors
    /// `Refused` for a backup that is damaged or differs; errors of reading the archive; that of
    /// `watch`.
    pub fn verify(&self, file: &Arc<dyn Storage>, watch: &mut BackupWatch<'_>) -> Result<()> {
        let _work = self.fs.hold_open()?;
        records::verify(self, file, &mut |step| self.go_on(step, watch))
    }

    fn go_on(&self, step: BackupStep, watch: &mut BackupWatch<'_>) -> Result<()> {
        self.fs.check_closing()?;
        watch(step)
    }

    fn open(&self, file: &Arc<dyn Storage>, copies: &[Vec<u8>; 2]) -> Result<Arc<Volume>> {
        let sequence = Header::of_copy(&copies[0])?.framing().sequence;
        let environment = Arc::new(SystemEnvironment);
        self.volume().open_backup(&self.pinned, file.clone(), environment, sequence, MEMORY).map_err(in_backup)
    }

    /// Decides between an incremental and a full backup (BACKUP-5), without writing.
    fn examine(&self, file: &Arc<dyn Storage>) -> Result<DestinationState> {
        let refused = |why: &'static str| Err(Error::Refused(Refusal::Destination { why }));
        let copies = self.header()?;
        let ours = Header::of_copy(&copies[0])?;
        let theirs = match Header::read(&**file) {
            Err(Error::NotArchive(_)) => return refused(destination::NO_ARCHIVE),
            theirs => theirs.map_err(in_backup)?,
        };
        let (ours, theirs): (&Framing, &Framing) = (ours.framing(), theirs.framing());
        if theirs.archive != ours.archive {
            return refused(destination::OTHER_ARCHIVE);
        }
        if theirs.commitment != ours.commitment {
            return refused("it has the volume key of before a change of that: choose another file, or remove it");
        }
        if theirs.sequence > ours.sequence {
            return refused("its keys are newer than those of the archive");
        }
        let volume = self.volume().read_copy(file.clone(), theirs.sequence, MEMORY).map_err(in_backup)?;
        let Some(base) = volume.origin() else {
            return refused("it is an archive of its own, or a backup that was written to since");
        };
        match self.volume().descent_now(&base)? {
            Ancestry::Descendant => Ok(DestinationState::Incremental(base, copies)),
            // Its records are those of this archive as far as known, but its missing changes cannot
            // be determined.
            Ancestry::Unknown => Ok(DestinationState::Full),
            Ancestry::Older => refused("it is newer than the archive"),
            Ancestry::Diverged => refused("it has what the archive lacks: the two were written apart from each other"),
        }
    }
}

/// Syncs the file and drops it from the host's cache, so that the medium is read: an earlier run
/// may have crashed.
fn settle(file: &dyn Storage) -> Result<()> {
    file.barrier().and_then(|()| file.evict(0, file.len()?)).map_err(in_backup)
}

/// Truncates a partial block that a failed extension left, which `check` would report although the
/// backup is intact.
fn cut_part_of_block(file: &dyn Storage) {
    if let Ok(length) = file.len()
        && !length.is_multiple_of(BLOCK)
        && let Err(error) = file.set_len(length - length % BLOCK)
    {
        tracing::warn!("a part of a block stays at the end of the backup: {error}");
    }
}

/// Marks an error as one of the backup file, because the archive itself may be intact.
fn in_backup(error: Error) -> Error {
    match error {
        Error::Damaged(detail) => Error::Refused(Refusal::DamagedBackup { detail }),
        Error::WriteFailed(detail) => Error::Refused(Refusal::FailedBackup { detail }),
        Error::Io { context, source } => {
            Error::Refused(Refusal::FailedBackup { detail: format!("{context}: {source}") })
        }
        error => error,
    }
}

/// Suitability of an existing file.
enum DestinationState {
    /// Backup with this origin; with the header copies for the updated file.
    Incremental(BackupOrigin, [Vec<u8>; 2]),
    /// Requires a full backup.
    Full,
}

/// Returns the next records of a range, at most `most`; empty at its end.
fn batch(view: &View<'_>, from: &mut Key, to: Key, most: usize) -> Result<Vec<(Key, Vec<u8>)>> {
    let mut records = Vec::new();
    view.scan(*from, to, &mut |key, value| {
        records.push((key, value.to_vec()));
        Ok(if records.len() < most { std::ops::ControlFlow::Continue(()) } else { std::ops::ControlFlow::Break(()) })
    })?;
    *from = records.last().and_then(|(key, _)| key.next()).unwrap_or(to);
    Ok(records)
}

fn extent(key: Key, value: &[u8]) -> Result<Option<Extent>> {
    if key.kind == kind::EXTENT { Extent::decode(value).map(Some) } else { Ok(None) }
}
