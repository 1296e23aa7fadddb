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

mod records;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::compact::replace::{self, OldArchive};
use super::{Archive, OpenOptions};
use crate::env::{Environment, SystemEnvironment};
use crate::error::{Error, Refusal, Result, Timestamp};
use crate::format::header::Framing;
use crate::format::record::BackupOrigin;
use crate::format::values::Extent;
use crate::format::{ArchiveId, BLOCK, Generation, Key, kind};
use crate::fs::FileSystem;
use crate::keys::header::{self, Header};
use crate::keys::{RollbackOptions, UnlockedKey};
use crate::storage::{ArchiveSource, FileStorage, HostEntry, IpcStorage, Storage};
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
pub(crate) type BackupWatch<'a> = dyn FnMut(BackupStep) -> Result<()> + 'a;

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
        seen: &RollbackOptions,
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

    /// Reads the current state back from the medium: all records, and `percent` of the file data,
    /// chosen at random. Returns the bytes of file data read.
    ///
    /// # Errors
    /// `Refused` when it is damaged; that of `watch`.
    pub fn read_back(&self, percent: u8, watch: &mut BackupWatch<'_>) -> Result<u64> {
        settle(&*self.storage)?;
        let sample = Sample { percent, environment: &SystemEnvironment };
        records::read_back(&self.fs.volume, &sample, watch)
    }
}

/// Random choice of the extents that are verified.
struct Sample<'a> {
    percent: u8,
    environment: &'a dyn Environment,
}

impl Sample<'_> {
    fn has_next(&self) -> Result<bool> {
        if self.percent >= 100 {
            return Ok(true);
        }
        let mut random = [0; 4];
        self.environment.fill_random(&mut random)?;
        Ok(u64::from(u32::from_le_bytes(random)) * 100 < u64::from(self.percent) << 32)
    }
}

impl Backups {
    #[cfg(any(test, debug_assertions))]
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
        let Some((base, copies)) = self.examine(file)? else { return Ok(None) };
        let sequence = Header::of_copy(&copies[0])?.framing().sequence;
        let environment = Arc::new(SystemEnvironment);
        let backup = self.volume().open_backup(&self.pinned, file.clone(), environment, sequence, MEMORY);
        let backup = backup.map_err(in_backup)?;
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

    /// Reads a backup of this version back from the medium and compares it with the archive: all
    /// records, and `percent` of the file data, chosen at random. Returns the bytes of file data
    /// compared.
    ///
    /// # Errors
    /// `Refused` for a backup that is damaged or differs; errors of reading the archive; that of
    /// `watch`.
    pub fn verify(&self, file: &Arc<dyn Storage>, percent: u8, watch: &mut BackupWatch<'_>) -> Result<u64> {
        let _work = self.fs.hold_open()?;
        let sample = Sample { percent, environment: &SystemEnvironment };
        records::verify(self, file, &sample, &mut |step| self.go_on(step, watch))
    }

    fn go_on(&self, step: BackupStep, watch: &mut BackupWatch<'_>) -> Result<()> {
        self.fs.check_closing()?;
        watch(step)
    }

    /// Decides between an incremental and a full backup (BACKUP-5), without writing: returns the
    /// origin of the existing file, and the header copies for the updated file; `None` if it
    /// requires a full backup.
    fn examine(&self, file: &Arc<dyn Storage>) -> Result<Option<(BackupOrigin, [Vec<u8>; 2])>> {
        let refused = |why: &'static str| Err(Error::Refused(Refusal::Destination { why }));
        let copies = self.header()?;
        let ours = Header::of_copy(&copies[0])?;
        let theirs = match Header::read(&**file) {
            Err(Error::NotArchive(_)) => return refused(NO_ARCHIVE),
            theirs => theirs.map_err(in_backup)?,
        };
        let (ours, theirs): (&Framing, &Framing) = (ours.framing(), theirs.framing());
        if theirs.archive != ours.archive {
            return refused(OTHER_ARCHIVE);
        }
        if theirs.commitment != ours.commitment {
            return refused("it has an earlier volume key: choose another file, or remove it");
        }
        if theirs.sequence > ours.sequence {
            return refused("its keys are newer than the archive's keys");
        }
        let volume = self.volume().read_copy(file.clone(), theirs.sequence, MEMORY).map_err(in_backup)?;
        let Some(base) = volume.origin() else {
            return refused("it is an archive of its own, or a backup that was written to since");
        };
        match self.volume().descent_now(&base)? {
            Ancestry::Descendant => Ok(Some((base, copies))),
            // Its records are those of this archive as far as known, but its missing changes cannot
            // be determined.
            Ancestry::Unknown => Ok(None),
            Ancestry::Older => refused("it is newer than the archive"),
            Ancestry::Diverged => refused("it has commits that the archive lacks: the two have diverged"),
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
        Error::WriteFailed(detail) | Error::ReadOnly(detail) => Error::Refused(Refusal::FailedBackup { detail }),
        Error::Io { context, source } => {
            Error::Refused(Refusal::FailedBackup { detail: format!("{context}: {source}") })
        }
        error => error,
    }
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

/// Word in the name of an unfinished backup.
const UNFINISHED: &str = "backup";

/// Timeout of one response over a lent socket.
const LENT: Duration = Duration::from_secs(600);
/// Word in the name of a temporary file for a pipe.
const PASSING: &str = "pipe";

const OTHER_ARCHIVE: &str = "it is, or is a backup of, another archive";
const NO_ARCHIVE: &str = "it is not an archive";

/// Destination path of a backup. File and names belong to the requesting user; the daemon that
/// reads the archive receives open files only.
pub struct BackupDestination {
    entry: HostEntry,
    /// Existing file with that name.
    old: Option<OldArchive>,
}

/// New file in the directory of the destination, removed on drop until it has the name.
pub struct NewBackupFile(replace::UnfinishedFile);

impl NewBackupFile {
    pub fn file(&self) -> Arc<FileStorage> {
        self.0.storage.clone()
    }

    /// Unlinks the file, so that it is deleted when it is closed, even if the process is killed. To
    /// be called after the file is filled, so that no data is written to a file that the user
    /// cannot find.
    ///
    /// # Errors
    /// Failures of the host.
    pub fn without_name(self) -> Result<Arc<FileStorage>> {
        self.0.without_name()
    }
}

impl BackupDestination {
    /// Opens the destination. With `follow` the path may be a symbolic link: a caller that lets
    /// another user's daemon write there must not follow links that this user may have created.
    ///
    /// # Errors
    /// `InUse` when another process has it open, failures of the host.
    pub fn open(path: &Path, follow: bool) -> Result<BackupDestination> {
        let failed = |e| Error::io(format!("cannot inspect {}", path.display()), e);
        let there = if follow { std::fs::canonicalize(path) } else { path.symlink_metadata().map(|_| path.into()) };
        match there {
            Ok(real) => {
                let old = OldArchive::open(&real)?;
                Ok(BackupDestination { entry: old.entry.try_clone().map_err(failed)?, old: Some(old) })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let entry = HostEntry::of(path).map_err(failed)?;
                Ok(BackupDestination { entry, old: None })
            }
            Err(e) => Err(failed(e)),
        }
    }

    /// Checks by its header, without a key, that a file belongs to this archive. A caller that lets
    /// a daemon write the file calls this before that, and before the file gets a name.
    ///
    /// # Errors
    /// `Refused` for another archive or no archive.
    pub fn check_archive(file: &dyn Storage, archive: &ArchiveId) -> Result<()> {
        match Header::read(file) {
            Ok(header) if header.framing().archive == *archive => Ok(()),
            Ok(_) => Err(Error::Refused(Refusal::Destination { why: OTHER_ARCHIVE })),
            Err(Error::NotArchive(_)) => Err(Error::Refused(Refusal::Destination { why: NO_ARCHIVE })),
            Err(error) => Err(in_backup(error)),
        }
    }

    /// Returns the existing file with the name.
    pub fn existing(&self) -> Option<&Arc<FileStorage>> {
        self.old.as_ref().map(|old| &old.storage)
    }

    /// Returns the storage of a file, which another process opened, locked and names; or of a
    /// socket, over which it lends another kind of storage.
    ///
    /// # Errors
    /// As [`FileStorage::adopt`], and failures of the socket.
    pub fn adopt(file: OwnedFd) -> Result<Arc<dyn Storage>> {
        let failed = |error: io::Error| Error::io("cannot inspect the destination of the backup", error);
        let stat = rustix::fs::fstat(&file).map_err(|error| failed(error.into()))?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
            return Ok(Arc::new(FileStorage::adopt(file, Path::new("the backup"))?));
        }
        let socket = UnixStream::from(file);
        // The lender may wait for a network, but not without limit, because the end of the mount
        // waits for this.
        socket.set_read_timeout(Some(LENT)).and_then(|()| socket.set_write_timeout(Some(LENT))).map_err(failed)?;
        Ok(Arc::new(IpcStorage::new(vec![socket], true)?))
    }

    /// Creates a temporary file for a backup into a pipe, removed on drop. Leftovers of killed runs
    /// are removed now.
    ///
    /// # Errors
    /// Failures of the host.
    pub fn temporary() -> Result<NewBackupFile> {
        BackupDestination::temporary_in(&std::env::temp_dir())
    }

    fn temporary_in(directory: &Path) -> Result<NewBackupFile> {
        let entry = HostEntry::of(&directory.join("lockbox"))
            .map_err(|e| Error::io(format!("cannot inspect {}", directory.display()), e))?;
        // Complete or not: these files were never meant to be kept.
        replace::remove_leftovers(&entry, PASSING, &mut |_| Ok(true));
        Ok(NewBackupFile(replace::UnfinishedFile::new(&entry, PASSING)?))
    }

    /// Creates a new file, and removes leftovers of earlier runs.
    ///
    /// # Errors
    /// Failures of the host.
    pub fn create_new(&self) -> Result<NewBackupFile> {
        self.old.as_ref().map_or(Ok(()), check_links)?;
        // Without a header it is not an archive yet (BACKUP-3).
        let others =
            replace::remove_leftovers(&self.entry, UNFINISHED, &mut |retained| Ok(!header::is_begun(&*retained)?));
        for name in others {
            tracing::warn!(
                name,
                "an earlier run may have left this file in the directory of the backup; check it, then remove it"
            );
        }
        replace::UnfinishedFile::new(&self.entry, UNFINISHED).map(NewBackupFile).map_err(in_backup)
    }

    /// Checks that the name still denotes the file that was opened.
    ///
    /// # Errors
    /// `InUse`.
    pub fn check(&self) -> Result<()> {
        let Some(old) = &self.old else { return Ok(()) };
        match self.entry.refers_to(&*old.storage) {
            Ok(true) => Ok(()),
            _ => Err(Error::InUse(format!("the updated file no longer has the name {}", self.entry.path().display()))),
        }
    }

    /// Renames the new file over the existing one.
    ///
    /// # Errors
    /// `InUse` when the name denotes another file by now, with nothing changed.
    pub fn take(self, new_file: NewBackupFile) -> Result<()> {
        let Some(old) = self.old else { return new_file.0.publish(&self.entry) };
        check_links(&old)?;
        new_file.0.copy_metadata(&old)?;
        if let Some(retained) = new_file.0.replace(&old)? {
            retained.report(&old, false)?;
        }
        Ok(())
    }
}

/// Checks that the file has one name. Errors: `Refused` for a file that cannot be replaced under
/// all its names.
fn check_links(old: &OldArchive) -> Result<()> {
    match old.links()? {
        0 | 1 => Ok(()),
        _ => Err(Error::Refused(Refusal::Destination {
            why: "it has several hard links; the others would still have the old backup",
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl BackupSource {
        pub(crate) fn generation(&self) -> Generation {
            self.origin().generation
        }
    }

    #[test]
    fn a_sample_has_about_as_many_extents_as_it_is_to_have() {
        for seed in crate::env::seeds(1..=3) {
            let environment = crate::env::SeededEnvironment::new(seed);
            let taken = |percent| {
                let sample = Sample { percent, environment: &environment };
                (0..10_000).filter(|_| sample.has_next().unwrap()).count()
            };
            assert_eq!(taken(100), 10_000);
            // Eight standard deviations.
            for (percent, expected) in [(1, 100), (25, 2500), (99, 9900)] {
                let deviation = f64::from(expected * (100 - i32::from(percent)) / 100).sqrt();
                assert!((taken(percent) as f64 - f64::from(expected)).abs() < 8.0 * deviation, "{percent}");
            }
        }
    }

    #[test]
    fn what_goes_into_a_pipe_has_no_name_when_it_is_filled_and_leaves_none() {
        let directory = tempfile::tempdir().unwrap();
        let names = || std::fs::read_dir(directory.path()).unwrap().count();
        let killed = BackupDestination::temporary_in(directory.path()).unwrap();
        killed.file().write_at(0, &[7; 9000]).unwrap();
        let next = BackupDestination::temporary_in(directory.path()).unwrap();
        assert_eq!(names(), 2, "somebody is about it");
        // Without its end; the lock goes with the process.
        let path = directory.path().join(".lockbox.pipe-0123456789abcdef");
        std::fs::copy(std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path(), &path).unwrap();
        drop((killed, next));
        assert_eq!(names(), 1);
        let filled = BackupDestination::temporary_in(directory.path()).unwrap();
        assert!(!path.exists() && names() == 1);
        filled.file().write_at(0, &[7; 9000]).unwrap();
        let file = filled.without_name().unwrap();
        assert_eq!(names(), 0);
        let mut back = [0; 9000];
        file.read_at(0, &mut back).unwrap();
        assert_eq!(back, [7; 9000]);
    }
}
