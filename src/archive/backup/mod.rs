//! Copies a moment of an archive into a file of its own, and brings such a file up to a later moment.
//!
//! # Invariants
//! BACKUP-1  What is copied is pinned: one moment, whoever writes to the archive meanwhile (ORIGIN-1). Writers wait for the commit that makes it
//!     durable, and for nothing else.
//! BACKUP-2  A backup has the same records of files as the moment, orphans and cuts not carried out yet among them; only its pages lie elsewhere, sealed anew
//!     under the same volume key.
//! BACKUP-3  The file is a backup of the old moment or of the new one, never of something between. A new file has zeros in the place of its header until
//!     all the rest is durable, and gets its name after that. In an existing one the pages go where its durable record has free space, and all records
//!     change in one operation, so in one commit (ORIGIN-3).
//! BACKUP-4  What was there already is found by what cannot have changed: the moment comes from the origin of the file (it is in its line), so below nodes
//!     that are no newer than the origin all is as it was (`btree/changed.rs`), where all commits since count on from it (ORIGIN-2), and an extent that was born no later names the same bytes (EXTENT-2:
//!     each new extent is born in its own transaction). Where the line cannot be proved, or too much has changed for one commit, everything is copied.
//! BACKUP-5  A file that is no backup of this archive, or that has what the archive lacks, stays as it is.
//!
//! Several extents of a page that is copied share the copy, but an extent that came since the origin does not find the copy that an older one has: what was
//! cloned in between lies twice in the backup, until that is made anew.

mod destination;
mod full;
mod incremental;
mod verify;

use std::sync::Arc;

pub use destination::{Beside, Destination};

use super::{Archive, OpenOptions};
use crate::env::SystemEnvironment;
use crate::error::{Error, Refusal, Result, Timestamp};
use crate::format::header::Framing;
use crate::format::record::Origin;
use crate::format::values::Extent;
use crate::format::{BLOCK, Generation, Key, kind};
use crate::fs::FileSystem;
use crate::keys::header::{self, Header};
use crate::keys::{SeenOptions, UnlockedKey};
use crate::storage::{Site, Storage};
use crate::txn::{Descent, Pinned, Volume};

/// For the backup's own nodes and caches.
const MEMORY: u64 = 64 << 20;

/// How far a backup is, in bytes of file data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackupStep {
    /// Of about `total`, or of what nobody knows.
    Copying { done: u64, total: Option<u64> },
    /// Of about `total`.
    Verifying { done: u64, total: u64 },
}

/// Told how far it is; an error ends the work, and the destination is as it was.
pub type BackupWatch<'a> = dyn FnMut(BackupStep) -> Result<()> + 'a;

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackedUp {
    /// When the commit was made that the backup shows, and its number.
    pub time: Timestamp,
    pub generation: Generation,
    /// Everything was copied, not what changed alone.
    pub whole: bool,
    /// Bytes of file data that were copied.
    pub copied_bytes: u64,
}

/// Makes backups of an open archive beside its other users.
pub struct Backups {
    fs: Arc<FileSystem>,
    storage: Arc<dyn Storage>,
    /// Of the copies of the header.
    sums: Option<header::Sums>,
}

/// A moment of an open archive, to be copied. As long as it lives, what it reaches keeps its space.
pub struct BackupSource {
    fs: Arc<FileSystem>,
    storage: Arc<dyn Storage>,
    sums: Option<header::Sums>,
    pinned: Pinned,
}

impl Archive {
    /// Opens an archive that nobody has open, to copy what it has. A file that was not closed is put in order before, if it can be written.
    ///
    /// # Errors
    /// As [`Archive::open_seen`].
    pub fn open_for_backup<'a>(site: impl Into<Site<'a>>, key: &UnlockedKey, seen: &SeenOptions) -> Result<Archive> {
        let site = site.into();
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let archive = Archive::open_seen(site, key, &options, seen)?;
        let volume = &archive.fs.volume;
        let lays_log = volume.lays_log();
        // A backup is only read: whoever writes to it takes its mark away.
        if (volume.durable().closed && !lays_log) || volume.origin().is_some() {
            return Ok(archive);
        }
        drop(archive);
        let written = Archive::open_seen(site, key, &OpenOptions { read_only: false, ..options }, seen);
        match written.and_then(Archive::close) {
            // What is on the medium can be copied as it is, but for what its log has: that is in no tree.
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

    /// Pins what is there now.
    ///
    /// # Errors
    /// Those of a commit; `Invalid` while the archive is being closed, and where a snapshot is shown in its place or the log was laid over it for
    /// reading.
    pub fn pin(self) -> Result<BackupSource> {
        // Whoever reads may see a record that is in the host's cache alone; a backup must not name one that a crash undoes.
        self.storage.barrier()?;
        let pinned = self.fs.pin()?;
        Ok(BackupSource { fs: self.fs, storage: self.storage, sums: self.sums, pinned })
    }
}

impl BackupSource {
    fn volume(&self) -> &Volume {
        &self.fs.volume
    }

    fn origin(&self) -> &Origin {
        self.pinned.origin()
    }

    #[cfg(test)]
    pub(crate) fn generation(&self) -> Generation {
        self.origin().generation
    }

    /// Both copies of the header, which are those that were authentic when the archive was opened: they cannot be changed while it is.
    fn header(&self) -> Result<[Vec<u8>; 2]> {
        let copies = header::whole_copies(&*self.storage)?;
        if self.sums.is_some_and(|sums| sums != header::sums(&copies)) {
            return Err(Error::damaged("the header was altered since the archive was opened"));
        }
        Ok(copies)
    }

    fn backed_up(&self, whole: bool, copied_bytes: u64) -> BackedUp {
        let Origin { time, generation, .. } = *self.origin();
        BackedUp { time, generation, whole, copied_bytes }
    }

    /// Fills an empty file, which is a backup from the end of this call on.
    ///
    /// # Errors
    /// Those of reading the archive and writing the file; that of `watch`.
    pub fn fill(&self, file: &Arc<dyn Storage>, watch: &mut BackupWatch<'_>) -> Result<BackedUp> {
        let _work = self.fs.work()?;
        let copies = self.header()?;
        let environment = Arc::new(SystemEnvironment);
        let sequence = Header::of_copy(&copies[0])?.framing().sequence;
        let backup = self.volume().begin_backup(&self.pinned, file.clone(), environment, sequence);
        let backup = backup.map_err(in_backup)?;
        let copied = full::copy(self.volume(), &self.pinned, &backup, &mut |step| self.go_on(step, watch))?;
        header::write_copies(&**file, &copies).map_err(in_backup)?;
        Ok(self.backed_up(true, copied))
    }

    /// Makes a backup of this archive one of this moment by copying what changed. None when that is too much for one commit: nothing was changed then.
    ///
    /// # Errors
    /// `Refused` for a file that is no backup of this archive, or newer than it, or of a copy that was written apart, or damaged; those of reading the
    /// archive and writing the file; that of `watch`. The file shows what it showed then.
    pub fn bring_up_to_date(&self, file: &Arc<dyn Storage>, watch: &mut BackupWatch<'_>) -> Result<Option<BackedUp>> {
        let _work = self.fs.work()?;
        settle(&**file)?;
        let (backup, base, copies) = match self.examine(file)? {
            Examined::Whole => return Ok(None),
            Examined::Next(base, copies) => (self.open(file, &copies)?, base, copies),
        };
        if backup.origin() != Some(base) {
            return Err(in_backup(Error::damaged("its newest commit is lost; try again")));
        }
        // The keys of the archive; those that were removed open it no more. Before a record carries the number (9.1 rule 6), and also where no commit came
        // since: a change of the keys on a full disk has none of its own (`vouch`).
        header::write_copies(&**file, &copies).map_err(in_backup)?;
        if base == *self.origin() {
            return Ok(Some(self.backed_up(false, 0)));
        }
        let watch = &mut |step| self.go_on(step, watch);
        let prepared = incremental::prepare(self.volume(), &self.pinned, &base, &backup, watch);
        let copied = prepared
            .and_then(|prepared| prepared.map(|prepared| prepared.publish(&backup, &self.pinned)).transpose())
            .inspect_err(|_| cut_part_of_block(&**file))?;
        Ok(copied.map(|copied| self.backed_up(false, copied)))
    }

    /// Reads a backup of this moment back from the medium and compares it with the archive.
    ///
    /// # Errors
    /// `Refused` for a backup that is damaged or differs; those of reading the archive; that of `watch`.
    pub fn verify(&self, file: &Arc<dyn Storage>, watch: &mut BackupWatch<'_>) -> Result<()> {
        let _work = self.fs.work()?;
        verify::verify(self, file, &mut |step| self.go_on(step, watch))
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

    /// BACKUP-5, by reading alone.
    fn examine(&self, file: &Arc<dyn Storage>) -> Result<Examined> {
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
            Descent::Continues => Ok(Examined::Next(base, copies)),
            // Its records are as far as is known those of this archive, but what it lacks cannot be told.
            Descent::Unknown => Ok(Examined::Whole),
            Descent::Earlier => refused("it is newer than the archive"),
            Descent::Apart => refused("it has what the archive lacks: the two were written apart from each other"),
        }
    }
}

/// What is on the medium counts, not what the host's cache has: an earlier run may not have ended well.
fn settle(file: &dyn Storage) -> Result<()> {
    file.barrier().and_then(|()| file.evict(0, file.len()?)).map_err(in_backup)
}

/// What a host left of growth that it refused belongs to nothing, and a check would call it a flaw of a backup that is as sound as before.
fn cut_part_of_block(file: &dyn Storage) {
    if let Ok(length) = file.len()
        && !length.is_multiple_of(BLOCK)
        && let Err(error) = file.set_len(length - length % BLOCK)
    {
        tracing::warn!("a part of a block stays at the end of the backup: {error}");
    }
}

/// What fails in the backup is not said of the archive, which nothing need be wrong with.
fn in_backup(error: Error) -> Error {
    match error {
        Error::Damaged(detail) => Error::Refused(Refusal::DamagedBackup { detail }),
        Error::Latched(detail) => Error::Refused(Refusal::FailedBackup { detail }),
        Error::Io { context, source } => {
            Error::Refused(Refusal::FailedBackup { detail: format!("{context}: {source}") })
        }
        error => error,
    }
}

/// What an existing file is to a source.
enum Examined {
    /// A backup of it, of this origin; with the copies of the header that it is to have.
    Next(Origin, [Vec<u8>; 2]),
    /// Perhaps one.
    Whole,
}

/// The next records of a range, at most so many; empty at its end.
fn batch(view: &crate::txn::View<'_>, from: &mut Key, to: Key, most: usize) -> Result<Vec<(Key, Vec<u8>)>> {
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
