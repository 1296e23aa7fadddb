//! Keeps the ciphertext of larger shares, one file each, in a directory with a limit.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use lockbox_share_protocol::token;
use sha2::{Digest, Sha256};

use super::barrier_group::PendingReply;
use super::contract::SpoolEntry;
use super::env::random;
use super::{Result, StoreError};

const UNFINISHED: &str = "part";
/// Time without a write after which another daemon has ended: stalled uploads end much earlier.
const ABANDONED: Duration = Duration::from_secs(3600);

pub struct Spool {
    directory: PathBuf,
    capacity: u64,
    /// Bytes of finished payloads.
    stored: AtomicU64,
    /// Bytes of unfinished deposits of this process.
    incoming: AtomicU64,
}

/// A payload on its way in. Dropped without [`Deposit::finish`] it leaves nothing.
pub struct Deposit {
    spool: Arc<Spool>,
    /// None after it was finished.
    file: Option<File>,
    id: [u8; 16],
    length: u64,
    hash: Sha256,
}

impl Spool {
    /// Opens or creates the directory, and removes unfinished deposits. `capacity` is in bytes.
    ///
    /// # Errors
    /// The host's error.
    pub fn open(directory: &Path, capacity: u64) -> io::Result<Arc<Spool>> {
        let spool = Spool::open_shared(directory, capacity)?;
        spool.remove_unfinished(Duration::ZERO)?;
        Ok(spool)
    }

    /// Opens a directory that other daemons use concurrently; their unfinished deposits stay.
    ///
    /// # Errors
    /// The host's error.
    pub fn open_shared(directory: &Path, capacity: u64) -> io::Result<Arc<Spool>> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let (stored, incoming) = (AtomicU64::new(0), AtomicU64::new(0));
        let spool = Spool { directory: directory.into(), capacity, stored, incoming };
        spool.recount()?;
        Ok(Arc::new(spool))
    }

    /// Counts the finished payloads: other daemons of a shared directory add and remove some.
    pub(crate) fn recount(&self) -> io::Result<()> {
        let mut stored = 0;
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            if id_of(&entry.file_name().to_string_lossy()).is_some() {
                match entry.metadata() {
                    // Another daemon removed it meanwhile.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    metadata => stored += metadata?.size(),
                }
            }
        }
        self.stored.store(stored, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn remove_abandoned(&self) -> io::Result<()> {
        self.remove_unfinished(ABANDONED)
    }

    fn remove_unfinished(&self, age: Duration) -> io::Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            if !is_unfinished(&path) || (!age.is_zero() && !is_older(&path, age)) {
                continue;
            }
            match fs::remove_file(&path) {
                // It has its name by now, or another daemon was first.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Bytes of all payloads, those on their way in included.
    pub fn bytes(&self) -> u64 {
        self.stored.load(Ordering::Relaxed) + self.incoming.load(Ordering::Relaxed)
    }

    /// # Errors
    /// `Full`, `Unavailable`.
    pub fn begin(self: &Arc<Self>) -> Result<Deposit> {
        let id = random()?;
        let path = self.path(&id).with_extension(UNFINISHED);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Deposit { spool: Arc::clone(self), file: Some(file), id, length: 0, hash: Sha256::new() })
    }

    /// The payload, for reading in ranges.
    ///
    /// # Errors
    /// `Unavailable` when the file is missing or has another length than it should.
    pub fn read(&self, entry: &SpoolEntry) -> Result<File> {
        let file = File::open(self.path(&entry.id))?;
        if file.metadata()?.len() != entry.length {
            return Err(StoreError::Unavailable("a payload in the spool has been changed".into()));
        }
        Ok(file)
    }

    /// Removes the payload of a share that was not created or has ended. It may be missing.
    pub fn remove(&self, id: &[u8; 16]) {
        let path = self.path(id);
        let length = fs::metadata(&path).map_or(0, |meta| meta.size());
        match fs::remove_file(&path) {
            Ok(()) => {
                // A payload of another daemon may not have been counted here yet.
                let less = |stored: u64| Some(stored.saturating_sub(length));
                let _ = self.stored.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // The next start tries again.
            Err(error) => tracing::warn!("a payload cannot be removed: {error}"),
        }
    }

    /// Removes all payloads that are not in `needed`. Files with other names do not belong to the
    /// spool and stay: the state directory may be misconfigured, as /var, which has a spool as
    /// well.
    pub(crate) fn retain(&self, needed: &HashSet<[u8; 16]>) -> io::Result<()> {
        let names: HashSet<String> = needed.iter().map(name).collect();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if id_of(&name).is_some() && !names.contains(name.as_ref()) {
                let length = entry.metadata()?.size();
                fs::remove_file(entry.path())?;
                self.stored.fetch_sub(length, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Finished payloads that were written longer ago than `age`.
    pub(crate) fn older_than(&self, age: Duration) -> Result<Vec<[u8; 16]>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let Some(id) = id_of(&entry.file_name().to_string_lossy()) else { continue };
            // Not one that was removed meanwhile: there is nothing to do.
            if is_older(&entry.path(), age) {
                found.push(id);
            }
        }
        Ok(found)
    }

    fn path(&self, id: &[u8; 16]) -> PathBuf {
        self.directory.join(name(id))
    }
}

impl Deposit {
    /// Adds ciphertext. It goes to the host's cache; the barrier comes with [`Deposit::finish`].
    ///
    /// # Errors
    /// `Full` when the capacity or the disk is; the deposit is lost then.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let length = bytes.len() as u64;
        self.spool.incoming.fetch_add(length, Ordering::Relaxed);
        self.length += length;
        if self.spool.bytes() > self.spool.capacity {
            return Err(StoreError::Full);
        }
        self.hash.update(bytes);
        let finished = || StoreError::Unavailable("the deposit is finished".into());
        Ok(self.file.as_mut().ok_or_else(finished)?.write_all(bytes)?)
    }

    /// Makes the payload durable and gives it its name. A thread of its own waits for the disk.
    pub fn finish(self) -> PendingReply<SpoolEntry> {
        let (work, pending) = self.finishing();
        let spawned = std::thread::Builder::new().name("deposit".into()).stack_size(256 * 1024).spawn(work);
        spawned.map_or_else(|error| PendingReply::ready(Err(error.into())), |_| pending)
    }

    /// The work of [`Deposit::finish`], and the result that is pending until then.
    fn finishing(mut self) -> (impl FnOnce() + Send + 'static, PendingReply<SpoolEntry>) {
        let digest = token::Digest::new(self.hash.finalize_reset().into());
        let entry = SpoolEntry { id: self.id, length: self.length, digest };
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let work = move || {
            let finished = self.persist().map(|()| Finished { spool: Some(Arc::clone(&self.spool)), entry });
            // A payload that no receiver takes is removed with the message.
            let _ = sender.send(finished);
        };
        let abandoned = || StoreError::Unavailable("a deposit was abandoned".into());
        let pending = PendingReply::remote(async move { receiver.await.map_err(|_| abandoned())?.map(Finished::take) });
        (work, pending)
    }

    fn persist(&mut self) -> Result<()> {
        let Some(file) = self.file.take() else { return Ok(()) };
        let path = self.spool.path(&self.id);
        let unfinished = path.with_extension(UNFINISHED);
        let persisted = file.sync_data().and_then(|()| {
            fs::rename(&unfinished, &path)?;
            File::open(&self.spool.directory)?.sync_all()
        });
        match &persisted {
            Ok(()) => _ = self.spool.stored.fetch_add(self.length, Ordering::Relaxed),
            Err(_) => {
                let _ = fs::remove_file(&unfinished);
                let _ = fs::remove_file(&path);
            }
        }
        self.spool.incoming.fetch_sub(self.length, Ordering::Relaxed);
        Ok(persisted?)
    }
}

impl Drop for Deposit {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            let _ = fs::remove_file(self.spool.path(&self.id).with_extension(UNFINISHED));
            self.spool.incoming.fetch_sub(self.length, Ordering::Relaxed);
        }
    }
}

/// A payload that has its name, on its way to the caller. Where the caller goes away before or
/// after it was sent, no share names the file, and it is removed.
struct Finished {
    /// None after it was taken.
    spool: Option<Arc<Spool>>,
    entry: SpoolEntry,
}

impl Finished {
    fn take(mut self) -> SpoolEntry {
        self.spool = None;
        self.entry
    }
}

impl Drop for Finished {
    fn drop(&mut self) {
        if let Some(spool) = &self.spool {
            spool.remove(&self.entry.id);
        }
    }
}

pub(crate) fn name(id: &[u8; 16]) -> String {
    lockbox_terminal::hex(id)
}

fn is_unfinished(path: &Path) -> bool {
    let is_ours = |stem: &std::ffi::OsStr| stem.as_encoded_bytes().iter().all(u8::is_ascii_hexdigit);
    path.extension().is_some_and(|ending| ending == UNFINISHED) && path.file_stem().is_some_and(is_ours)
}

/// Returns whether a file was not modified for `age`; false when the time cannot be read.
fn is_older(path: &Path, age: Duration) -> bool {
    let modified = fs::symlink_metadata(path).and_then(|meta| meta.modified());
    modified.is_ok_and(|modified| SystemTime::now().duration_since(modified).is_ok_and(|old| old >= age))
}

fn id_of(text: &str) -> Option<[u8; 16]> {
    let id = u128::from_str_radix(text, 16).ok()?.to_be_bytes();
    (name(&id) == text).then_some(id)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn deposit(spool: &Arc<Spool>, bytes: &[u8]) -> SpoolEntry {
        let mut deposit = spool.begin().unwrap();
        bytes.chunks(7).for_each(|part| deposit.write(part).unwrap());
        deposit.finish().wait().unwrap()
    }

    #[test]
    fn what_was_deposited_is_read_and_goes_once() {
        let directory = tempfile::tempdir().unwrap();
        let spool = Spool::open(directory.path(), 1000).unwrap();
        let entry = deposit(&spool, b"sealed with something");
        assert_eq!((entry.length, spool.bytes()), (21, 21));
        assert_eq!(entry.digest.as_bytes()[..], Sha256::digest(b"sealed with something")[..]);
        let mut text = String::new();
        spool.read(&entry).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "sealed with something");
        spool.remove(&entry.id);
        spool.remove(&entry.id);
        assert_eq!(spool.bytes(), 0);
        assert!(spool.read(&entry).is_err());
    }

    #[test]
    fn a_full_spool_takes_nothing_and_forgets_what_was_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let spool = Spool::open(directory.path(), 30).unwrap();
        let entry = deposit(&spool, &[1; 20]);
        let mut second = spool.begin().unwrap();
        second.write(&[2; 10]).unwrap();
        assert_eq!(second.write(&[2; 1]).err(), Some(StoreError::Full));
        drop(second);
        assert_eq!(spool.bytes(), 20);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        spool.remove(&entry.id);
        deposit(&spool, &[3; 30]);
    }

    /// A client that went away between the end of its upload and the answer: before the message for
    /// it was sent, or when the message already lay there.
    #[test]
    fn a_payload_whose_depositor_went_away_before_it_heard_of_it_goes() {
        for is_sent in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let spool = Spool::open(directory.path(), 1000).unwrap();
            let mut deposit = spool.begin().unwrap();
            deposit.write(&[1; 20]).unwrap();
            let path = spool.path(&deposit.id);
            let (work, pending) = deposit.finishing();
            if is_sent {
                work();
                assert!(path.exists() && spool.bytes() == 20);
                drop(pending);
            } else {
                drop(pending);
                work();
            }
            assert!(!path.exists() && spool.bytes() == 0, "sent: {is_sent}");
        }
    }

    #[test]
    fn a_start_in_a_shared_directory_leaves_what_other_daemons_take_in() {
        let directory = tempfile::tempdir().unwrap();
        let first = Spool::open_shared(directory.path(), 1000).unwrap();
        let mut deposit = first.begin().unwrap();
        deposit.write(&[1; 20]).unwrap();
        let second = Spool::open_shared(directory.path(), 1000).unwrap();
        second.remove_abandoned().unwrap();
        let entry = deposit.finish().wait().unwrap();
        assert!(second.read(&entry).is_ok());
        let left = directory.path().join("00.part");
        fs::write(&left, [0; 5]).unwrap();
        let file = File::options().write(true).open(&left).unwrap();
        file.set_modified(SystemTime::now() - ABANDONED - Duration::from_secs(60)).unwrap();
        second.remove_abandoned().unwrap();
        assert!(!left.exists() && second.read(&entry).is_ok());
    }

    #[test]
    fn payloads_that_another_daemon_removed_are_not_counted() {
        let directory = tempfile::tempdir().unwrap();
        let first = Spool::open_shared(directory.path(), 30).unwrap();
        let second = Spool::open_shared(directory.path(), 30).unwrap();
        let entry = deposit(&first, &[1; 20]);
        let mut running = first.begin().unwrap();
        running.write(&[2; 5]).unwrap();
        second.remove(&entry.id);
        first.recount().unwrap();
        assert_eq!(first.bytes(), 5);
        drop(running);
        assert_eq!(first.bytes(), 0);
        deposit(&first, &[3; 30]);
    }

    #[test]
    fn a_start_removes_what_nobody_needs() {
        let directory = tempfile::tempdir().unwrap();
        let spool = Spool::open(directory.path(), 1000).unwrap();
        let (kept, orphan) = (deposit(&spool, &[1; 20]), deposit(&spool, &[2; 30]));
        fs::write(directory.path().join("00.part"), [0; 5]).unwrap();
        let spool = Spool::open(directory.path(), 1000).unwrap();
        assert_eq!(spool.bytes(), 50);
        spool.retain(&HashSet::from([kept.id])).unwrap();
        assert_eq!(spool.bytes(), 20);
        assert!(spool.read(&kept).is_ok() && spool.read(&orphan).is_err());
    }

    #[test]
    fn a_start_leaves_what_is_somebody_elses() {
        let directory = tempfile::tempdir().unwrap();
        let place = |name: &str| directory.path().join(name);
        fs::create_dir(place("cron")).unwrap();
        fs::write(place("letters"), "precious").unwrap();
        fs::write(place("film.part"), "precious").unwrap();
        let (upper, signed) = ("A".repeat(32), format!("+{}", "1".repeat(31)));
        fs::write(place(&upper), "precious").unwrap();
        fs::write(place(&signed), "precious").unwrap();
        std::os::unix::fs::symlink("../mail", place("mail")).unwrap();
        let spool = Spool::open(directory.path(), 1000).unwrap();
        assert_eq!(spool.bytes(), 0);
        let orphan = deposit(&spool, &[1; 20]);
        spool.retain(&HashSet::new()).unwrap();
        assert!(spool.read(&orphan).is_err());
        let left = ["cron", "letters", "film.part", "mail", &upper, &signed];
        assert!(left.iter().all(|name| place(name).symlink_metadata().is_ok()));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), left.len());
    }
}
