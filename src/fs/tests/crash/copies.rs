//! Backups onto a second storage, which loses power as well, and the resulting files.
//!
//! The promise of lockbox-backup(1): stopped, killed, or without space or medium, a backup leaves
//! the previous one or the new one, or none where there was none; and BACKUP-5: a refused backup
//! changes nothing.

use std::sync::Arc;

use super::super::support::{KEY, open_to_read, try_open_on};
use super::history::{Recorder, TRACE_LIMIT};
use super::seen::{Seen, see_tree};
use crate::archive::{BackupReport, BackupSource, BackupStep, Backups};
use crate::crypto::SecretKey;
use crate::env::SeededEnvironment;
use crate::error::{Error, Refusal, Result};
use crate::format::{Generation, ROOT_INO};
use crate::fs::{Creator, FileSystem, mode};
use crate::keys::header::Header;
use crate::storage::Storage;
use crate::storage::simulated::{SimulatedStorage, Trace};

/// One backup of a run, by the state of its file.
pub(super) struct Copying {
    pub(super) trace: Trace,
    /// Number of completed operations of the archive when its version was pinned, and when the
    /// backup ended.
    pub(super) pinned: usize,
    pub(super) ended: usize,
    /// Version in the file before; `None` for a new one.
    old: Option<Seen>,
    /// `None` if it was interrupted.
    new: Option<Seen>,
}

impl Copying {
    /// An interrupted backup to a new file leaves nothing: the file is removed.
    pub(super) fn leaves_file(&self) -> bool {
        self.old.is_some() || self.new.is_some()
    }

    pub(super) fn is_old(&self, found: &Seen) -> bool {
        self.old.as_ref() == Some(found)
    }

    /// Allowed versions in the file, `None` being no backup yet; `whole` if all operations had
    /// returned.
    pub(super) fn allowed(&self, whole: bool) -> Vec<Option<Seen>> {
        match &self.new {
            Some(new) if whole => vec![Some(new.clone())],
            Some(new) => vec![self.old.clone(), Some(new.clone())],
            None => vec![self.old.clone()],
        }
    }
}

/// Target file of backups, and the version in it.
pub(super) struct BackupTarget {
    file: Arc<SimulatedStorage>,
    shows: Option<Seen>,
}

fn on(_: BackupStep) -> Result<()> {
    Ok(())
}

/// Pins the version of an open archive.
pub(super) fn pin(fs: &Arc<FileSystem>, storage: &Arc<SimulatedStorage>) -> BackupSource {
    Backups::of(fs.clone(), storage.clone()).pin().unwrap()
}

impl BackupTarget {
    pub(super) fn new() -> BackupTarget {
        BackupTarget { file: SimulatedStorage::new(), shows: None }
    }

    /// Backs the archive up, completely or in part; `meanwhile` runs between the steps, like
    /// concurrent writers.
    pub(super) fn back_up(
        mut self,
        recorder: &Recorder<'_>,
        meanwhile: &mut dyn FnMut(),
    ) -> (Copying, Option<BackupTarget>) {
        let source = pin(recorder.fs, recorder.storage);
        let pinned = recorder.position();
        recorder.promise();
        let now = shown(source.generation(), recorder.fs);
        let mut left = if recorder.below(5) == 0 { 1 + recorder.below(12) } else { u64::MAX };
        if recorder.below(2) == 0 {
            meanwhile();
        }
        self.file.record(TRACE_LIMIT);
        let done = bring(&source, &self.file, self.shows.is_some(), &mut |_| {
            if recorder.below(6) == 0 {
                meanwhile();
            }
            left -= 1;
            if left == 0 { Err(Error::Interrupted(2)) } else { Ok(()) }
        });
        let trace = self.file.recorded().expect("the storage records");
        assert!(trace.is_complete(), "the recording took too much memory");
        let new = match done {
            Err(Error::Interrupted(_)) => None,
            done => done.map(|_| Some(now)).unwrap(),
        };
        let copying = Copying { trace, pinned, ended: recorder.position(), old: self.shows.clone(), new: new.clone() };
        if let Some(new) = new {
            let file: Arc<dyn Storage> = self.file.clone();
            source.verify(&file, 100, &mut on).unwrap();
            self.shows = Some(new);
        }
        let target = copying.leaves_file().then_some(self);
        (copying, target)
    }
}

fn bring(
    source: &BackupSource,
    file: &Arc<SimulatedStorage>,
    is_there: bool,
    watch: &mut dyn FnMut(BackupStep) -> Result<()>,
) -> Result<BackupReport> {
    let file: Arc<dyn Storage> = file.clone();
    if !is_there {
        return source.fill(&file, watch);
    }
    source.bring_up_to_date(&file, watch).map(|done| done.expect("it is little enough for one commit"))
}

/// Returns the version in the file of a backup, which must be as sound as any archive; `None`
/// without a whole header, when the next backup creates a new file.
pub(super) fn read(file: &Arc<SimulatedStorage>, environment: &Arc<SeededEnvironment>) -> Option<Seen> {
    let header = match Header::read(&**file) {
        Err(Error::NotArchive(_) | Error::Damaged(_)) => return None,
        header => header.unwrap(),
    };
    header.authenticate(&SecretKey::new(KEY)).unwrap();
    let fs = open_to_read(file.clone(), environment.clone())
        .unwrap_or_else(|error| panic!("the backup does not open: {error}"));
    let origin = fs.volume.origin().expect("it is marked as a backup");
    let findings = fs.check_structure(true).unwrap();
    assert!(findings.is_empty(), "structure of the backup: {findings:?}");
    let findings = fs.volume.check_space(true, &mut |_, _| {}).unwrap();
    assert!(findings.is_empty(), "space of the backup: {findings:?}");
    Some(shown(origin.generation, &fs))
}

/// Checks that the file is a backup of this commit, and is marked as one.
pub(super) fn shown(commit: Generation, fs: &FileSystem) -> Seen {
    format!("of commit {}\n{}", commit.0, see_tree(fs).0).into()
}

/// Returns the version in the file of a backup after a crash.
pub(super) fn judge(
    file: &Arc<SimulatedStorage>,
    allowed: &[Option<Seen>],
    environment: &Arc<SeededEnvironment>,
) -> Option<Seen> {
    let found = read(file, environment);
    assert!(allowed.contains(&found), "the backup shows\n{found:#?}\nwhere only this may be:\n{allowed:#?}");
    found
}

/// After the loss of the archive, continues with its backup, as it is on the medium.
pub(super) fn take_its_place(file: &Arc<SimulatedStorage>, environment: &Arc<SeededEnvironment>) {
    let file = file.process_death();
    file.barrier().unwrap();
    file.evict(0, file.len().unwrap()).unwrap();
    let Some(shows) = read(&file, environment) else { return };
    let fs = try_open_on(file.clone(), environment.clone()).unwrap();
    let origin = fs.volume.origin().expect("it was a backup");
    assert!(shown(origin.generation, &fs) == shows, "as an archive it shows something else than\n{shows}");
    // The first change makes it an archive of its own.
    let owner = Creator { uid: 1, gid: 1, umask: None };
    fs.make_node(ROOT_INO, b"of-its-own", mode::REGULAR | 0o600, 0, owner).unwrap();
    let expected = see_tree(&fs).0;
    fs.close().unwrap();
    let fs = open_to_read(file, environment.clone()).unwrap();
    assert!(fs.volume.origin().is_none() && see_tree(&fs).0 == expected);
}

/// Runs the next backup, of the version in `source`: it continues after a crash (`found`) or
/// creates a new file. Returns the file.
pub(super) fn go_on(
    source: &BackupSource,
    shows: &Seen,
    file: &Arc<SimulatedStorage>,
    found: Option<&Seen>,
    environment: &Arc<SeededEnvironment>,
) -> Arc<SimulatedStorage> {
    let anew = || {
        let file = SimulatedStorage::new();
        bring(source, &file, false, &mut on).unwrap();
        file
    };
    let file = if found.is_none() {
        anew()
    } else {
        match bring(source, file, true, &mut on) {
            // The header was in the cache of a host that failed to write it.
            Err(Error::Refused(Refusal::Destination { .. })) if Header::read(&**file).is_err() => anew(),
            done => {
                done.unwrap();
                file.clone()
            }
        }
    };
    let storage: Arc<dyn Storage> = file.clone();
    source.verify(&storage, 100, &mut on).unwrap();
    let now = read(&file, environment);
    assert!(now.as_ref() == Some(shows), "the next backup shows\n{now:#?}\ninstead of\n{shows}");
    file
}
