//! Rollback state: a user's memory of an archive outside of it. It holds the last commit seen, so
//! that an older copy and a fork are noticed, and the place where the archive was opened, so that
//! another archive there is noticed (`known_places.rs`).
//!
//! # Invariants
//! SEEN-1  A commit is remembered only when it is durable (LINEAGE-1): so no crash makes the
//!     archive older than the remembered commit. A crash between the two leaves the archive newer,
//!     which is no alarm. So is an entry of the log, with the record that it extends: a writer
//!     remembers the last one that is durable, a reader the one before the last that it sees. So a
//!     host that loses its cache loses at most one that no reader remembers.
//! SEEN-2  The remembered state goes to recovery as evidence (LINEAGE-2): a remembered commit with
//!     a bad page is damage and is not undone.
//! SEEN-3  A header is remembered by the lowest sequence number of its valid copies: copies are
//!     written one after the other with a barrier between, so a lower number in either can only be
//!     an older header put back.
//! SEEN-4  The file is replaced as a whole: new file, fsync, rename, fsync of the directory. Losing
//!     it, or an older one, weakens the watch and raises no alarm. Any failure with it costs one
//!     warning, never the opening of the archive.
//! SEEN-5  Fewer entries of the remembered record mean an older copy. Another tag at the remembered
//!     number means a diverged copy (LINEAGE-4), and so does a later record of a session that began
//!     without that entry. No honest program causes this. A crash keeps durable entries, and
//!     nothing is written over an entry before a later record is durable; then that record is the
//!     newest, and contains the entries or names them as pending. `compact` closes the archive
//!     before it copies it, so its first record follows one without a log, and its new ring has no
//!     records to compare entries with; `rekey` makes another archive. A backup that is put back,
//!     and a copy of an archive that was in use, are older copies, as they are by their records. A
//!     loss in the middle is damage, which later entries prove, and no older copy.
//!
//! Remembered entries are as old as the last call of [`RollbackGuard::remember`], like remembered
//! records: an fsync does not wait for a second one outside the archive. So entries that were
//! written since then can be cut off unnoticed. The same is true of all entries that are in no
//! record yet, for a user that opens the archive only after a later record hides the loss: after
//! more commits than the ring has, or on a machine that never saw them.
//!
//! The file's name and content are sealed under keys that come from the volume key. A reader of the
//! directory learns how many archives this user opened and when each was used last, not which ones,
//! nor how often they were written. A writer of the directory can make the user forget, not
//! remember wrongly.

mod known_places;
#[cfg(test)]
mod places_tests;
#[cfg(test)]
mod tests;

pub(crate) use known_places::KnownPlaces;
pub use known_places::{Fingerprint, PlaceName, is_known_place, remember_place};

use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lockbox_terminal::hex;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, linkat, openat, renameat, renameat_with, unlinkat};
use rustix::io::Errno;

use crate::crypto::SecretKey;
use crate::crypto::aead::{NONCE, TAG, XaesKey};
use crate::crypto::kdf::hkdf;
use crate::env::{Environment, SystemEnvironment};
use crate::error::{Error, Result, Timestamp};
use crate::format::{ArchiveId, Generation, array_at, u64_at};
use crate::storage::host_call;
use crate::txn::{Ancestry, Durable, EntryMark, Mark, Volume};
#[cfg(any(test, debug_assertions))]
pub(crate) use known_places::Known;
use known_places::Opened;

/// Location of a user's rollback state, and the contradictions to accept.
#[derive(Clone, Debug, Default)]
pub struct RollbackOptions {
    /// Directory of the rollback state; without one nothing is remembered.
    pub directory: Option<PathBuf>,
    /// Go on with an older copy of the archive, and remember that one.
    pub accept_older: bool,
    /// Go on with a copy that was written apart from the one seen, and remember that one.
    pub accept_fork: bool,
    /// Continue with another archive than the one remembered at the place, and remember the new
    /// one.
    pub accept_other: bool,
    /// The names by which the archive is reached (PLACE-1); without any nothing is compared with
    /// the place.
    pub places: Vec<PlaceName>,
}

/// Returns the directory in which a user's programs remember archives: `state_home`
/// (`$XDG_STATE_HOME`) or `home`/.local/state, with `lockbox` in it; for root without a
/// `state_home` /var/lib/lockbox. Relative paths do not count.
pub fn state_directory(state_home: Option<OsString>, home: Option<OsString>, root: bool) -> Option<PathBuf> {
    let absolute = |path: Option<OsString>| path.map(PathBuf::from).filter(|path| path.is_absolute());
    match absolute(state_home) {
        Some(state) => Some(state.join("lockbox")),
        None if root => Some(PathBuf::from("/var/lib/lockbox")),
        None => absolute(home).map(|home| home.join(".local/state/lockbox")),
    }
}

/// Returns the part of [`state_directory`] that holds only rollback state: a mount's daemon keeps
/// access to that alone.
pub fn seen_directory(state_home: Option<OsString>, home: Option<OsString>, root: bool) -> Option<PathBuf> {
    state_directory(state_home, home, root).map(|directory| directory.join("seen"))
}

/// Sessions that are remembered, to tell an older copy from a fork with a lower number: 48 bytes
/// each.
const TRAIL: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RollbackState {
    /// When it was seen.
    time: Timestamp,
    pub(crate) header_sequence: u64,
    /// The commit, and the last ones of the sessions before it, newest first. Never empty.
    trail: Vec<Mark>,
    /// The last entry of the log of that commit.
    entry: Option<EntryMark>,
}

/// Version, zero (7), time 12, count u32, header sequence u64.
const HEAD: usize = 32;
const MARK: usize = 48;
/// Number u32, zero u32, tag 16.
const ENTRY: usize = 24;
/// Without an entry: programs from before the log read it.
const VERSION: u8 = 1;
/// With one behind the marks.
const VERSION_WITH_ENTRY: u8 = 2;

impl RollbackState {
    pub(crate) fn mark(&self) -> &Mark {
        &self.trail[0]
    }

    /// Returns the generation and the number of the last log entry; a greater pair is later.
    fn reach(&self) -> (Generation, u32) {
        (self.mark().generation, self.entry.map_or(0, |entry| entry.number))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + MARK * self.trail.len() + ENTRY);
        let version = if self.entry.is_some() { VERSION_WITH_ENTRY } else { VERSION };
        out.extend_from_slice(&[version, 0, 0, 0, 0, 0, 0, 0]);
        out.extend_from_slice(&self.time.seconds.to_le_bytes());
        out.extend_from_slice(&self.time.nanos.to_le_bytes());
        out.extend_from_slice(&(self.trail.len() as u32).to_le_bytes()); // at most TRAIL
        out.extend_from_slice(&self.header_sequence.to_le_bytes());
        self.trail.iter().for_each(|mark| put_mark(&mut out, mark));
        if let Some(entry) = &self.entry {
            out.extend_from_slice(&entry.number.to_le_bytes());
            out.extend_from_slice(&[0; 4]);
            out.extend_from_slice(&entry.tag);
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<RollbackState> {
        let malformed = || Error::damaged("the memory of the archive does not decode");
        let (head, rest) = bytes.split_at_checked(HEAD).ok_or_else(malformed)?;
        let packed = u64_at(head, 16);
        let (nanos, count) = (packed as u32, (packed >> 32) as usize);
        if !(1..=TRAIL).contains(&count) {
            return Err(malformed());
        }
        let (marks, entry) = rest.split_at_checked(count * MARK).ok_or_else(malformed)?;
        let entry = match (head[0], entry.split_last_chunk()) {
            (VERSION, _) if entry.is_empty() => None,
            (VERSION_WITH_ENTRY, Some((_, tag))) if entry.len() == ENTRY => {
                let number = u64_at(entry, 0);
                Some(EntryMark { number: u32::try_from(number).map_err(|_| malformed())?, tag: *tag })
            }
            _ => return Err(malformed()),
        };
        if entry.is_some_and(|entry| entry.number == 0) {
            return Err(malformed());
        }
        Ok(RollbackState {
            time: Timestamp { seconds: u64_at(head, 8) as i64, nanos },
            header_sequence: u64_at(head, 24),
            trail: marks.chunks_exact(MARK).map(|mark| mark_at(mark, 0)).collect(),
            entry,
        })
    }

    /// Returns whether a commit with a lower number than the remembered one is its ancestor, as far
    /// as the trail reaches.
    fn comes_after(&self, older: &Mark) -> bool {
        // Marks descend: if `older` is in this line, the first session that began early enough
        // wrote it.
        match self.trail.iter().find(|mark| mark.first <= older.generation) {
            // Before all that is remembered.
            None => true,
            Some(mark) => {
                let same_session = mark.session == older.session && mark.first == older.first;
                same_session
                    && older.generation <= mark.generation
                    && (older.generation < mark.generation || older.tag == mark.tag)
            }
        }
    }
}

/// Appends the [`MARK`] bytes of a commit.
fn put_mark(out: &mut Vec<u8>, mark: &Mark) {
    out.extend_from_slice(&mark.session);
    out.extend_from_slice(&mark.first.0.to_le_bytes());
    out.extend_from_slice(&mark.generation.0.to_le_bytes());
    out.extend_from_slice(&mark.tag);
}

fn mark_at(bytes: &[u8], at: usize) -> Mark {
    let (first, generation) = (Generation(u64_at(bytes, at + 16)), Generation(u64_at(bytes, at + 24)));
    Mark { session: array_at(bytes, at), first, generation, tag: array_at(bytes, at + 32) }
}

const KEY_LABEL: &str = "lockbox/v1/seen";
const NAME_LABEL: &str = "lockbox/v1/seen/name";
/// Associated data: there is one kind of message under the key.
const AAD: &[u8] = b"lockbox/v1/seen";

/// A sealed file of the user's memory of archives (one for each archive, and for each place), by
/// its name in an open directory.
///
/// The directory is opened once, when the archive is: later the archive may be mounted over it, and
/// a daemon that looks below its own mount waits for itself. So a directory that could not be had
/// then is not tried again.
struct SealedFile {
    directory: rustix::io::Result<OwnedFd>,
    name: String,
    /// For messages.
    path: PathBuf,
    key: XaesKey,
    aad: Vec<u8>,
}

pub(crate) struct RollbackStateFile(SealedFile);

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat(CWD, path, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            DirBuilder::new().recursive(true).mode(0o700).create(path)?;
            Ok(openat(CWD, path, flags, Mode::empty())?)
        }
        opened => Ok(opened?),
    }
}

impl SealedFile {
    /// `aad` begins with a label that no other kind of file under the same key has.
    fn new(directory: &Path, name: String, key: XaesKey, aad: Vec<u8>) -> SealedFile {
        SealedFile {
            directory: open_directory(directory).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            path: directory.join(&name),
            name,
            key,
            aad,
        }
    }

    /// The opened content, of at most `most` bytes; None when there is no file. Errors: `Io`,
    /// `Damaged` when the file was altered.
    fn load(&self, most: usize) -> Result<Option<Vec<u8>>> {
        // Without a directory there is nothing to read; the failure is reported on the first write.
        let Ok(directory) = &self.directory else { return Ok(None) };
        let read = read_in(directory, &self.name, NONCE + most + TAG);
        let path = self.path.display();
        let Some(bytes) = read.map_err(|e| Error::io(format!("cannot read {path}"), e))? else { return Ok(None) };
        let altered = || Error::damaged(format!("{path} was altered"));
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE>().ok_or_else(altered)?;
        let (sealed, tag) = sealed.split_last_chunk::<TAG>().ok_or_else(altered)?;
        let mut plain = sealed.to_vec();
        self.key.open(nonce, &self.aad, &mut plain, tag).map_err(|_| altered())?;
        Ok(Some(plain))
    }

    /// Replaces the file (SEEN-4).
    fn save(&self, mut sealed: Vec<u8>, environment: &dyn Environment) -> Result<()> {
        let failed = |e| Error::io(format!("cannot write {}", self.path.display()), e);
        let mut nonce = [0; NONCE];
        environment.fill_random(&mut nonce)?;
        let tag = self.key.seal(&nonce, &self.aad, &mut sealed);
        let directory = self.directory.as_ref().map_err(|&errno| failed(errno.into()))?;
        let bytes = [&nonce[..], &sealed, &tag].concat();
        write_in(directory, &self.name, &nonce[..8], &bytes, true).map_err(failed)
    }
}

/// Reads a file of the directory, and of a longer one `most + 1` bytes; None when it is missing.
fn read_in(directory: &OwnedFd, name: &str, most: usize) -> io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match openat(directory, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e.into()),
        Ok(file) => {
            let mut bytes = Vec::new();
            File::from(file).take(most as u64 + 1).read_to_end(&mut bytes)?;
            Ok(Some(bytes))
        }
    }
}

/// Writes a whole file of the directory, durably: in the place of one that is there, or else
/// failing with `AlreadyExists`.
fn write_in(directory: &OwnedFd, name: &str, random: &[u8], bytes: &[u8], replaces: bool) -> io::Result<()> {
    // The name is random: two processes do not collide, and no link of another user is followed.
    let stem = name.split('.').next().unwrap_or(name);
    let temporary = format!("{stem}.{}.new", hex(random));
    let write = || -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut file = File::from(openat(directory, &temporary, flags, Mode::RUSR | Mode::WUSR)?);
        file.write_all(bytes)?;
        file.sync_all()?;
        match replaces {
            true => renameat(directory, &temporary, directory, name)?,
            false => match renameat_with(directory, &temporary, directory, name, RenameFlags::NOREPLACE) {
                // File systems without the flag have hard links instead.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    linkat(directory, &temporary, directory, name, AtFlags::empty())?;
                    unlinkat(directory, &temporary, AtFlags::empty())?;
                }
                named => named?,
            },
        }
        // File systems without the notion answer EINVAL; the name stands all the same.
        let _ = host_call::sync_directory(directory);
        Ok(())
    };
    write().inspect_err(|_| {
        let _ = unlinkat(directory, &temporary, AtFlags::empty());
    })
}

impl RollbackStateFile {
    pub(crate) fn new(directory: &Path, volume_key: &SecretKey, archive: &ArchiveId) -> RollbackStateFile {
        let name = hex(&hkdf(volume_key, archive, NAME_LABEL).bytes()[..16]);
        let key = XaesKey::new(&hkdf(volume_key, archive, KEY_LABEL));
        RollbackStateFile(SealedFile::new(directory, format!("{name}.seen"), key, AAD.to_vec()))
    }

    /// None when nothing is remembered. Errors: `Io`, `Damaged` when the file was altered.
    pub(crate) fn load(&self) -> Result<Option<RollbackState>> {
        self.0.load(HEAD + MARK * TRAIL + ENTRY)?.map(|plain| RollbackState::decode(&plain)).transpose()
    }

    pub(crate) fn save(&self, seen: &RollbackState, environment: &dyn Environment) -> Result<()> {
        self.0.save(seen.encode(), environment)
    }
}

/// Rollback state and known places, loaded before the archive is opened.
#[derive(Default)]
pub(crate) struct RollbackCheck {
    pub(crate) file: Option<Arc<RollbackStateFile>>,
    pub(crate) seen: Option<RollbackState>,
    pub(crate) places: KnownPlaces,
    by_recipient: bool,
}

impl RollbackCheck {
    /// A file that cannot be read or was altered is one warning (SEEN-4).
    pub(crate) fn at(options: &RollbackOptions, volume_key: &SecretKey, archive: &ArchiveId) -> RollbackCheck {
        let directory = options.directory.as_deref();
        let file = directory.map(|directory| RollbackStateFile::new(directory, volume_key, archive));
        let seen = file.as_ref().and_then(|file| {
            file.load().unwrap_or_else(|error| {
                tracing::warn!("{}; an older copy of this archive would not be noticed", error.with_cause());
                None
            })
        });
        let places = KnownPlaces::at(options, volume_key, archive);
        RollbackCheck { file: file.map(Arc::new), seen, places, by_recipient: false }
    }

    /// With the kind of secret that opened the archive, on which first uses and refusals depend.
    pub(crate) fn opened_by_recipient(self, by_recipient: bool) -> RollbackCheck {
        RollbackCheck { by_recipient, ..self }
    }

    /// Starts new rollback state for an archive that replaces a checked one.
    pub(crate) fn of_successor(
        options: &RollbackOptions,
        volume_key: &SecretKey,
        archive: &ArchiveId,
    ) -> RollbackCheck {
        RollbackCheck { seen: None, ..RollbackCheck::at(options, volume_key, archive) }
    }

    /// Returns a sentence for a user when the secret alone does not show the author of this
    /// archive: its public half is enough to make one, and this user remembers neither the archive
    /// nor the place.
    pub(crate) fn first_use(&self) -> Option<String> {
        let is_first = self.by_recipient && self.seen.is_none() && self.places.are_new();
        is_first.then(|| {
            format!(
                "this is the first use of this archive by this user, and a public key is enough to make an archive that your private key opens: compare the \
                 fingerprint {} with the fingerprint that the author of the archive has",
                self.places.fingerprint
            )
        })
    }

    /// Returns whether the memory has to be replaced, and remembers the place, for an archive that
    /// may be used. Errors: `Replaced`, `OlderCopy` and `ForkedCopy` unless accepted.
    pub(crate) fn admit(
        &self,
        volume: &Volume,
        header_sequence: u64,
        options: &RollbackOptions,
        only_reads: bool,
    ) -> Result<bool> {
        let replace = judge(volume, header_sequence, self.seen.as_ref(), options, only_reads)?;
        self.judge_places(options, Some(volume))?;
        self.places.remember(Some(volume));
        Ok(replace)
    }

    /// Judges the places alone, with the commits of the archive if it could be opened. Errors:
    /// `Replaced` unless accepted.
    pub(crate) fn judge_places(&self, options: &RollbackOptions, volume: Option<&Volume>) -> Result<()> {
        let opened = Opened { by_recipient: self.by_recipient, before: self.seen.is_some() };
        self.places.judge(options, volume, opened)
    }

    pub(crate) fn mark(&self) -> Option<&Mark> {
        self.seen.as_ref().map(RollbackState::mark)
    }
}

/// Judges whether the archive may be used; returns whether it must replace the remembered state.
/// `only_reads`: this command does not write to the archive. Errors: `OlderCopy` and `ForkedCopy`
/// unless accepted. The header is judged also when nothing is remembered.
pub(crate) fn judge(
    volume: &Volume,
    header_sequence: u64,
    seen: Option<&RollbackState>,
    options: &RollbackOptions,
    only_reads: bool,
) -> Result<bool> {
    let record = volume.durable();
    // A reader of a backup is shown its version, and neither compares nor remembers anything.
    let seen = seen.filter(|_| !(only_reads && volume.origin().is_some()));
    let known = record.header_sequence.max(seen.map_or(0, |seen| seen.header_sequence));
    if header_sequence < known && !options.accept_older {
        return Err(older_header(header_sequence, known));
    }
    let Some(seen) = seen else { return Ok(header_sequence < known) };
    let descent = volume.descent_from(seen.mark()).or_else(|error| match error {
        // A damaged history is no reason to refuse the files.
        Error::Damaged(reason) => {
            tracing::warn!("the history of the archive cannot be read ({reason}): a fork would not be noticed");
            Ok(Ancestry::Unknown)
        }
        error => Err(error),
    })?;
    let descent = match (descent, &seen.entry) {
        (Ancestry::Descendant, Some(entry)) => volume.descent_from_entry(seen.mark(), entry),
        (descent, _) => descent,
    };
    let forked = match descent {
        Ancestry::Descendant => return Ok(header_sequence < known),
        Ancestry::Unknown => {
            tracing::warn!(
                "the archive has had too many writing sessions since {} to verify that it is the same one",
                seen.time.utc()
            );
            return Ok(false);
        }
        Ancestry::Diverged => true,
        Ancestry::Older => !volume.opened_at().is_some_and(|newest| seen.comes_after(&newest)),
    };
    let facts = facts(seen, volume, record.time);
    match forked {
        false if options.accept_older => {}
        true if options.accept_fork => {}
        false => {
            return Err(Error::OlderCopy(format!(
                "{facts}. It is a copy from before then, such as a restored backup, or its newest commits were destroyed: \
                 continuing with it discards all later changes"
            )));
        }
        true => {
            return Err(Error::ForkedCopy(format!(
                "{facts}, and its history does not contain the commit seen before: two copies of the archive have diverged. \
                 Keep both files"
            )));
        }
    }
    tracing::warn!("{facts}: accepted as asked");
    Ok(true)
}

/// The header has a lower number than one that the archive had already.
pub(crate) fn older_header(header_sequence: u64, known: u64) -> Error {
    Error::OlderCopy(format!(
        "its header (number {header_sequence}) is older than one that this archive had already (number {known}): a passphrase that \
             was changed or removed since then would open it again"
    ))
}

fn facts(seen: &RollbackState, volume: &Volume, time: Timestamp) -> String {
    let (generation, time, ends) = match volume.origin() {
        None => (volume.durable().generation, time, "ends with"),
        Some(origin) => (origin.generation, origin.time, "is a backup of"),
    };
    let of_log = |entries: usize| match entries {
        0 => String::new(),
        1 => " and an entry of its log".into(),
        several => format!(" and {several} entries of its log"),
    };
    let entries = seen.entry.map_or(0, |entry| entry.number as usize);
    // Of another commit they compare with nothing.
    let found = if entries > 0 && seen.mark().generation == generation { volume.opened_entries() } else { 0 };
    format!(
        "this user saw commit {}{} of the archive on {} UTC, but this file {ends} commit {}{} of {} UTC",
        seen.mark().generation.0,
        of_log(entries),
        seen.time.utc(),
        generation.0,
        of_log(found),
        time.utc()
    )
}

/// Remembers an open archive for its user.
pub struct RollbackGuard {
    volume: Arc<Volume>,
    file: Option<Arc<RollbackStateFile>>,
    header_sequence: u64,
    saved: Mutex<Option<RollbackState>>,
    complained: AtomicBool,
}

impl RollbackGuard {
    /// `replace`: the rollback state was contradicted, and the user accepted that.
    pub(crate) fn new(
        volume: Arc<Volume>,
        header_sequence: u64,
        looked: RollbackCheck,
        replace: bool,
    ) -> RollbackGuard {
        let saved = Mutex::new(looked.seen.filter(|_| !replace));
        RollbackGuard { volume, file: looked.file, header_sequence, saved, complained: AtomicBool::new(false) }
    }

    /// Returns the check for another opening of the same archive, without opening the state file
    /// again.
    pub(crate) fn looked(&self) -> RollbackCheck {
        // The key binds a later open to this archive, whichever file lies at its place.
        RollbackCheck { file: self.file.clone(), seen: self.saved.lock().clone(), ..RollbackCheck::default() }
    }

    /// Remembers the newest durable commit, and the last durable entry of its log, if they are not
    /// remembered yet. A failure costs one warning (SEEN-4). A commit with pending uploads is not
    /// remembered: the remote archive would be older than that.
    pub fn remember(&self) {
        if let Some(file) = &self.file
            && let Err(error) = self.try_remember(file)
            && !self.complained.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("{}; an older copy of this archive would not be noticed later", error.with_cause());
        }
    }

    fn try_remember(&self, file: &RollbackStateFile) -> Result<()> {
        let mut saved = self.saved.lock();
        let Some(Durable { mark, entry }) = self.volume.durable_point() else { return Ok(()) };
        let reach = (mark.generation, entry.map_or(0, |entry| entry.number));
        // A reader knows one commit or entry less than the writer that it follows (LINEAGE-1).
        let known = saved.as_ref().filter(|saved| saved.reach() >= reach);
        if known.is_some_and(|known| known.header_sequence >= self.header_sequence) {
            return Ok(());
        }
        // Asked after the point was read: when nothing is kept back now, nothing of it was.
        if self.volume.pending_upload_bytes()? > 0 {
            return Ok(());
        }
        let environment = SystemEnvironment;
        let (trail, entry) = match known {
            Some(known) => (known.trail.clone(), known.entry),
            // Of a damaged history the newest commit is remembered at least.
            None => (self.volume.trail(mark, TRAIL).unwrap_or_else(|_| vec![mark]), entry),
        };
        let seen = RollbackState { time: environment.now(), header_sequence: self.header_sequence, trail, entry };
        file.save(&seen, &environment)?;
        *saved = Some(seen);
        Ok(())
    }
}
