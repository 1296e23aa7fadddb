//! Upload spool: objects kept on this host until the store takes them.
//!
//! A mount that ends while its store does not respond, or loses its record to another writer, would
//! lose its last writes. So its objects are appended to a file, sealed as they are, in upload
//! order. The next writer of this user on this host sends them first. If another writer's commits
//! follow the store's last record, they can no longer be sent: they are renamed, and kept for the
//! user to read or delete.
//!
//! # Invariants
//! SPOOL-1  The file contains the exact bytes of the uploads, in upload order, and is durable
//!     before an append succeeds. After the last whole entry it has only bytes of an append that
//!     did not succeed; a file with other bytes there is damaged.
//! SPOOL-2  While spooling is active, all later objects are spooled as well, and read from the
//!     spool: the store never gets an object without its predecessor.
//! SPOOL-3  A replay sends the original records or nothing: each must follow the store's newest
//!     record by its hash, or already exist. A writer that acquired the archive since has taken the
//!     first number with a record that is never removed (BUCKET-3), so that number is not free
//!     again, as the number of a commit may be.
//! SPOOL-4  Objects that the store lacks are deleted only by order of their owner. A damaged file
//!     is not changed, and no writer here acquires the archive before its owner truncates it to its
//!     whole entries, or moves it away.
//! SPOOL-5  No other writer here acquires the archive while a process has a file with content open:
//!     its first record would take the number of the record that this process sends.
//!
//! # Interrupted appends
//! An append truncates the file to its whole entries, makes the name and the object durable after a
//! gap for the entry's header, and only then writes that header. The file's header is durable
//! before the first entry. So an append that ends early (a killed process, a loss of power, a full
//! disk) leaves:
//! - no byte;
//! - or a gap, which reads as zeros, and any part of the name and the object of one entry;
//! - or, before the first entry, at most as many bytes as the file's header has.
//!
//! It cannot leave a header without its whole entry, a whole entry after a gap, nor a file header
//! that is invalid before entries: such bytes were durable once and have been altered. The write of
//! an entry's header can be torn, too, by a loss of power at the border of two sectors; the file
//! counts as damaged then. A last entry with a zeroed header looks like an interrupted append.
//!
//! The file: a header (magic, version and address length of 32 bits each, the address, SHA-256 of
//! all that), and entries (lengths of name and object of 64 bits each, SHA-256 of both, the name,
//! the object). Integers are little-endian.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, SystemTime};

use lockbox::storage::{host_call, rename_to_free_name};
use lockbox::{Error, Result};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Mode, OFlags, openat, unlinkat};
use sha2::{Digest, Sha256};

use super::layout::{Incarnation, MAX_CHECKPOINT};
use super::map::ObjectId;
use super::objects::{BatchReply, ListedObject, ObjectCreation, ObjectRange, ObjectStore, parse_path, random_bytes};
use crate::cache::{
    cannot_read_dir, create_private_dir, is_own_file, list_private_dir, open_own_file, open_private_dir,
};
use crate::hex;
use crate::range_source::{RemoteError, RemoteResult};

const MAGIC: &[u8; 8] = b"LBXSPOOL";
const VERSION: u32 = 1;
const HASH: usize = 32;
/// Size of an entry before its name.
const ENTRY_HEADER: u64 = 16 + HASH as u64;
/// Digits of the incarnation before the first slash of an object's name.
const NAME_DIGITS: usize = 2 * size_of::<Incarnation>();
const MAX_ADDRESS: u32 = 8 << 10;
const MAX_NAME: u64 = 1 << 10;
/// Upper bound above the size of any object.
const MAX_OBJECT: u64 = 128 << 20;
/// Maximum size of the entry of one append: no object is longer than a checkpoint.
pub(super) const MAX_ENTRY: u64 = ENTRY_HEADER + MAX_NAME + MAX_CHECKPOINT;
/// Attempts to lock a file of another process, and their interval.
const MAX_LOCK_ATTEMPTS: usize = 20;
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Suffixes of files to be sent, and of refused ones.
const PENDING_SUFFIX: &str = ".unsent";
const REFUSED_SUFFIX: &str = ".refused";

/// Spooled objects of one archive, for its writer or for readers.
pub(crate) struct UploadSpool {
    directory: OwnedFd,
    address: String,
    /// Name of the pending file.
    name: String,
    state: Mutex<SpoolState>,
    /// SPOOL-2
    is_spooling: AtomicBool,
    /// Bytes of this writer that were refused.
    refused: AtomicU64,
}

struct SpoolState {
    /// None if the next append has to create a file.
    file: Option<File>,
    entries: Vec<SpoolEntry>,
    end: u64,
}

impl SpoolState {
    /// Opens, locks and reads the file, created if missing; returns None if another process has it
    /// open. Errors: as of [`read`]; `InvalidData` for a damaged file (SPOOL-1).
    fn open(directory: &OwnedFd, name: &str, address: &str) -> io::Result<Option<SpoolState>> {
        let Some(file) = open_locked(directory, name)? else { return Ok(None) };
        let (entries, end) = read(&file, address)?;
        if let Some(damage) = describe_damage(&file, address, end)? {
            return Err(io::Error::new(io::ErrorKind::InvalidData, damage));
        }
        Ok(Some(SpoolState { file: Some(file), entries, end }))
    }
}

struct SpoolEntry {
    name: String,
    at: u64,
    length: u64,
}

/// Spool file of one archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingUpload {
    /// File name.
    pub file: String,
    pub address: String,
    pub bytes: u64,
    /// Time of the last write.
    pub time: SystemTime,
    /// Another writer was first: the file is never sent.
    pub refused: bool,
    /// A writer has it open and may still send it.
    pub used: bool,
}

impl UploadSpool {
    /// Opens the spool for a writer of the archive at `address` with this incarnation: one address
    /// may lead to different archives, by user and over time. Returns None if spooling is
    /// impossible, which is logged, or if another process has the empty file open. Errors: when a
    /// pending file exists that cannot be sent: acquiring the archive would make it unsendable
    /// (SPOOL-4); `InUse` when another process has it open (SPOOL-5).
    pub(super) fn open(directory: &Path, address: &str, incarnation: &Incarnation) -> Result<Option<UploadSpool>> {
        let name = stem(address, incarnation) + PENDING_SUFFIX;
        let opened = create_private_dir(directory).and_then(|()| open_private_dir(directory)).and_then(|directory| {
            let Some(state) = SpoolState::open(&directory, &name, address)?.map(Mutex::new) else { return Ok(None) };
            let (is_spooling, refused, name) = (AtomicBool::new(false), AtomicU64::new(0), name.clone());
            Ok(Some(UploadSpool { directory, address: address.to_owned(), name, state, is_spooling, refused }))
        });
        let path = directory.join(name);
        let shown = lockbox_terminal::display(path.as_os_str().as_encoded_bytes());
        let failure = format!("{address}: cannot send the unsent data in {shown}");
        match opened {
            Ok(None) if has_content(&path) => {
                Err(Error::InUse(format!("{failure}: another process has it open; wait until that process ends")))
            }
            Err(error) if has_content(&path) => Err(Error::io(failure, error)),
            Err(error) => {
                tracing::warn!(
                    "cannot store unsent data in {shown}: {error}; writes that the remote store does not accept are lost"
                );
                Ok(None)
            }
            Ok(spool) => Ok(spool),
        }
    }

    /// Opens the latest spool file of the archive at `address` with this incarnation, for reading.
    /// Logs a warning if the file is damaged: the bytes after its whole entries are not read.
    /// Errors: `Io` of the kind `NotFound` when there is nothing; I/O errors of the host.
    pub(super) fn open_latest(directory: &Path, address: &str, incarnation: &Incarnation) -> Result<UploadSpool> {
        let path = directory;
        let failed = |error: io::Error| cannot_read_dir(path, error);
        let stem = stem(address, incarnation);
        let found = pending_uploads(directory)?.into_iter().filter(|pending| pending.file.starts_with(&stem));
        let Some(last) = found.max_by_key(|pending| pending.time) else {
            let none = format!("{address}: all data written on this machine was sent");
            return Err(Error::request(none, io::ErrorKind::NotFound));
        };
        let directory = open_private_dir(directory).map_err(failed)?;
        let gone = || failed(io::ErrorKind::NotFound.into());
        let (file, _) = open_own_file(&directory, &last.file).map_err(failed)?.ok_or_else(gone)?;
        let (entries, end) = read(&file, address).map_err(failed)?;
        // A writer may append to a used file between the two reads; it does not open a damaged one.
        let damage = if last.used { None } else { describe_damage(&file, address, end).map_err(failed)? };
        if let Some(damage) = damage {
            let shown = path.join(&last.file);
            let shown = lockbox_terminal::display(shown.as_os_str().as_encoded_bytes());
            tracing::warn!("{address}: cannot read all unsent data in {shown}: {damage}");
        }
        let state = Mutex::new(SpoolState { file: Some(file), entries, end });
        let (is_spooling, refused) = (AtomicBool::new(true), AtomicU64::new(0));
        Ok(UploadSpool { directory, address: address.to_owned(), name: last.file, state, is_spooling, refused })
    }

    pub(super) fn is_spooling(&self) -> bool {
        self.is_spooling.load(Ordering::Acquire)
    }

    /// Returns the bytes of this writer that are here and not in the store.
    pub(super) fn bytes(&self) -> u64 {
        let waiting = if self.is_spooling() { bytes(&self.state.lock().entries) } else { 0 };
        waiting + self.refused.load(Ordering::Relaxed)
    }

    /// Appends an object durably (SPOOL-1). With `exclusive`, starts spooling: nothing is sent from
    /// then on (SPOOL-2). Errors: I/O errors of the host; `NoSpace`.
    pub(super) fn append(&self, name: &str, object: &[u8], exclusive: bool) -> Result<()> {
        let mut state = self.state.lock();
        let is_here = state.entries.iter().any(|entry| entry.name == name && entry.length == object.len() as u64);
        let done = if is_here { Ok(()) } else { self.try_append(&mut state, name, object) };
        if exclusive && done.is_ok() {
            self.is_spooling.store(true, Ordering::Release);
        }
        done.map_err(|error| {
            Error::io(format!("cannot store the unsent data of {} on this machine", self.address), error)
        })
    }

    fn try_append(&self, state: &mut SpoolState, name: &str, object: &[u8]) -> io::Result<()> {
        if state.file.is_none() {
            let found = SpoolState::open(&self.directory, &self.name, &self.address)?;
            let found = found.ok_or(io::ErrorKind::WouldBlock)?;
            // A later writer left them to be sent.
            if !found.entries.is_empty() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            *state = found;
        }
        let file = state.file.as_ref().ok_or(io::ErrorKind::WouldBlock)?;
        // The order is that of "Interrupted appends" above.
        file.set_len(state.end)?;
        if state.end == 0 {
            let header = encode_header(&self.address);
            file.write_all_at(&header, 0)?;
            file.sync_data()?;
            state.end = header.len() as u64;
        }
        let named = state.end + ENTRY_HEADER;
        let at = named + name.len() as u64;
        file.write_all_at(name.as_bytes(), named)?;
        file.write_all_at(object, at)?;
        file.sync_data()?;
        let lengths = [name.len() as u64, object.len() as u64].map(u64::to_le_bytes).concat();
        file.write_all_at(&[&lengths[..], &checksum(name, object)].concat(), state.end)?;
        file.sync_data()?;
        host_call::sync(&self.directory)?;
        state.end = at + object.len() as u64;
        state.entries.push(SpoolEntry { name: name.to_owned(), at, length: object.len() as u64 });
        Ok(())
    }

    pub(super) fn object(&self, name: &str) -> Option<io::Result<Vec<u8>>> {
        let state = self.state.lock();
        let entry = state.entries.iter().find(|entry| entry.name == name)?;
        let mut object = vec![0; entry.length as usize];
        let file = state.file.as_ref()?;
        Some(file.read_exact_at(&mut object, entry.at).map(|()| object))
    }

    /// Empties the file once the store has its objects; does nothing while spooling.
    pub(super) fn clear(&self) -> Result<()> {
        let mut state = self.state.lock();
        if state.end == 0 || self.is_spooling() {
            return Ok(());
        }
        state.entries.clear();
        state.end = 0;
        let Some(file) = &state.file else { return Ok(()) };
        let cleared = file.set_len(0).and_then(|()| file.sync_data());
        cleared.map_err(|error| Error::io("cannot empty the file of unsent data", error))
    }

    /// Renames the file as refused: it is never sent, since another writer was first (SPOOL-4).
    /// Returns its bytes. Errors: I/O errors of the host.
    pub(super) fn mark_refused(&self) -> Result<u64> {
        let mut state = self.state.lock();
        if state.entries.is_empty() {
            return Ok(0);
        }
        let stem = self.name.strip_suffix(PENDING_SUFFIX).unwrap_or(&self.name);
        let renamed = random_bytes().map(|chance| format!("{stem}-{}{REFUSED_SUFFIX}", hex(&chance)));
        let directory = self.directory.as_fd();
        let done = rename_to_free_name(directory, self.name.as_bytes(), directory, renamed?.as_bytes())
            .and_then(|()| host_call::sync(&self.directory));
        let context = "cannot preserve the unsent data that another writer superseded";
        done.map_err(|error| Error::io(context, error.into()))?;
        let refused = bytes(&state.entries);
        *state = SpoolState { file: None, entries: Vec::new(), end: 0 };
        self.is_spooling.store(false, Ordering::Release);
        Ok(refused)
    }

    /// Spools a refused record, the last one of its writer. Errors: I/O errors of the host.
    pub(super) fn append_refused(&self, name: &str, object: &[u8]) -> Result<()> {
        self.append(name, object, false)?;
        self.refused.store(self.mark_refused()?, Ordering::Relaxed);
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn names(&self) -> Vec<String> {
        self.state.lock().entries.iter().map(|entry| entry.name.clone()).collect()
    }

    /// Returns the objects up to the last record, in order: no record names the later ones.
    pub(super) fn replayable_objects(&self, incarnation: &Incarnation) -> Vec<(String, ObjectId)> {
        let state = self.state.lock();
        let named =
            state.entries.iter().filter_map(|entry| Some((entry.name.clone(), parse_path(incarnation, &entry.name)?)));
        let mut objects: Vec<_> = named.collect();
        let records = objects.iter().rposition(|(_, id)| matches!(id, ObjectId::Log(_)));
        objects.truncate(records.map_or(0, |last| last + 1));
        objects
    }
}

impl Drop for UploadSpool {
    /// Removes the file if it is empty.
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if state.file.is_some() && state.entries.is_empty() && !self.is_spooling.load(Ordering::Relaxed) {
            let _ = unlinkat(&self.directory, &*self.name, AtFlags::empty());
        }
    }
}

/// Returns whether a file of this user exists and is not empty.
fn has_content(path: &Path) -> bool {
    let is_ours = |metadata: &Metadata| metadata.uid() == rustix::process::geteuid().as_raw();
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file() && is_ours(&metadata) && metadata.len() > 0)
}

fn bytes(entries: &[SpoolEntry]) -> u64 {
    entries.iter().map(|entry| entry.length).sum()
}

/// Returns the common prefix of the file names of one archive.
fn stem(address: &str, incarnation: &Incarnation) -> String {
    let hash = Sha256::new().chain_update(incarnation).chain_update(address.as_bytes()).finalize();
    hex(&hash[..16])
}

/// Opens and locks the file, created if missing; returns None if another process has it.
fn open_locked(directory: &OwnedFd, name: &str) -> io::Result<Option<File>> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    for _ in 0..MAX_LOCK_ATTEMPTS {
        let file = File::from(openat(directory, name, flags, Mode::RUSR | Mode::WUSR)?);
        if file.try_lock().is_err() {
            // A listing takes the lock for a moment, too.
            thread::sleep(LOCK_RETRY_INTERVAL);
            continue;
        }
        let metadata = file.metadata()?;
        // Its previous user may have removed it since it was opened.
        if metadata.nlink() == 0 {
            continue;
        }
        if !is_own_file(&metadata) {
            return Err(io::Error::other("not a regular file of this user with a single link"));
        }
        return Ok(Some(file));
    }
    Ok(None)
}

fn encode_header(address: &str) -> Vec<u8> {
    let numbers = [VERSION, address.len() as u32].map(u32::to_le_bytes).concat();
    let header = [&MAGIC[..], &numbers, address.as_bytes()].concat();
    [&header[..], &Sha256::digest(&header)].concat()
}

fn checksum(name: &str, object: &[u8]) -> [u8; HASH] {
    Sha256::new().chain_update(name.as_bytes()).chain_update(object).finalize().into()
}

/// Returns the address in the header and the offset of the entries; None if it is not a spool file.
fn address_in(file: &File) -> io::Result<Option<(String, u64)>> {
    let mut fixed = [0; 16];
    let length = file.metadata()?.len();
    if length < fixed.len() as u64 {
        return Ok(None);
    }
    file.read_exact_at(&mut fixed, 0)?;
    let number = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
    let end = 16 + u64::from(number(12)) + HASH as u64;
    if !fixed.starts_with(MAGIC) || number(8) != VERSION || number(12) > MAX_ADDRESS || length < end {
        return Ok(None);
    }
    let mut whole = vec![0; end as usize];
    file.read_exact_at(&mut whole, 0)?;
    let Ok(address) = String::from_utf8(whole[16..16 + number(12) as usize].to_vec()) else { return Ok(None) };
    Ok((whole == encode_header(&address)).then_some((address, end)))
}

/// Reads the complete entries; returns them with the offset of the next one: 0 if the file has no
/// header for this address. Errors: I/O errors of the host; a file of another version is an error
/// and does not count as torn.
fn read(file: &File, address: &str) -> io::Result<(Vec<SpoolEntry>, u64)> {
    let mut fixed = [0; 12];
    if file.metadata()?.len() >= fixed.len() as u64 {
        file.read_exact_at(&mut fixed, 0)?;
        if fixed.starts_with(MAGIC) && fixed[8..] != VERSION.to_le_bytes() {
            return Err(io::Error::other("another version of lockbox wrote it, which can send it"));
        }
    }
    let Some((_, mut at)) = address_in(file)?.filter(|(found, _)| found == address) else {
        return Ok((Vec::new(), 0));
    };
    let mut entries = Vec::new();
    while let Some(entry) = read_entry(file, at)? {
        at = entry.at + entry.length;
        entries.push(entry);
    }
    Ok((entries, at))
}

/// Reads the entry at an offset; None unless it is whole.
fn read_entry(file: &File, at: u64) -> io::Result<Option<SpoolEntry>> {
    let length = file.metadata()?.len();
    if at + ENTRY_HEADER > length {
        return Ok(None);
    }
    let mut fixed = [0; ENTRY_HEADER as usize];
    file.read_exact_at(&mut fixed, at)?;
    let (lengths, hash) = fixed.split_at(16);
    let (name, object) = lengths.split_at(8);
    let number = |bytes: &[u8]| bytes.try_into().map_or(u64::MAX, u64::from_le_bytes);
    let (name, object) = (number(name), number(object));
    if name > MAX_NAME || object > MAX_OBJECT || at + ENTRY_HEADER + name + object > length {
        return Ok(None);
    }
    let mut bytes = vec![0; (name + object) as usize];
    file.read_exact_at(&mut bytes, at + ENTRY_HEADER)?;
    let (named, content) = bytes.split_at(name as usize);
    let Ok(named) = std::str::from_utf8(named) else { return Ok(None) };
    let entry = SpoolEntry { name: named.to_owned(), at: at + ENTRY_HEADER + name, length: object };
    Ok((checksum(named, content) == hash).then_some(entry))
}

/// Returns the reason and the remedy for a message about a damaged file (SPOOL-1); None for an
/// undamaged one.
fn describe_damage(file: &File, address: &str, end: u64) -> io::Result<Option<String>> {
    if is_torn_append(file, address, end)? {
        return Ok(None);
    }
    Ok(Some(if end == 0 {
        "its header is damaged; move the file away to go on without it".into()
    } else {
        format!(
            "its bytes from {end} on are damaged; to delete them and send the data before them, run truncate -s {end} on the file"
        )
    }))
}

/// Returns whether an interrupted append can have left the bytes from the end of the entries on.
fn is_torn_append(file: &File, address: &str, end: u64) -> io::Result<bool> {
    let rest = file.metadata()?.len().saturating_sub(end);
    if end == 0 {
        return Ok(rest <= encode_header(address).len() as u64);
    }
    if rest > MAX_ENTRY {
        return Ok(false);
    }
    let mut bytes = vec![0; rest as usize];
    file.read_exact_at(&mut bytes, end)?;
    if bytes.iter().take(ENTRY_HEADER as usize).any(|byte| *byte != 0) {
        return Ok(false);
    }
    // A whole entry after the gap is found by its name.
    for (slash, _) in bytes.iter().enumerate().filter(|(_, byte)| **byte == b'/') {
        let Some(name) = slash.checked_sub(NAME_DIGITS) else { continue };
        let header = (end + name as u64).checked_sub(ENTRY_HEADER).filter(|header| *header > end);
        let Some(header) = header.filter(|_| bytes[name..slash].iter().all(u8::is_ascii_hexdigit)) else { continue };
        if read_entry(file, header)?.is_some() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Lists the spool files in a directory by address and time. Errors: I/O errors of the host;
/// rejects a directory that other users own or can write to.
pub(crate) fn pending_uploads(directory: &Path) -> Result<Vec<PendingUpload>> {
    let mut found = list_private_dir(directory, inspect)?;
    found.sort_by(|one, other| (&one.address, one.time).cmp(&(&other.address, other.time)));
    Ok(found)
}

/// Describes the file; None if it is not a spool file, or is empty.
fn inspect(directory: &OwnedFd, name: &str) -> io::Result<Option<PendingUpload>> {
    let refused = name.ends_with(REFUSED_SUFFIX);
    if !refused && !name.ends_with(PENDING_SUFFIX) {
        return Ok(None);
    }
    let Some((file, metadata)) = open_own_file(directory, name)? else { return Ok(None) };
    let Some((address, start)) = address_in(&file)? else { return Ok(None) };
    // It may have been begun since.
    let bytes = metadata.len().saturating_sub(start);
    let used = !refused && file.try_lock().is_err();
    let (file, time) = (name.to_owned(), metadata.modified()?);
    Ok((bytes > 0).then_some(PendingUpload { file, address, bytes, time, refused, used }))
}

/// Deletes refused and pending files for `address` and returns them. Errors: as of
/// [`pending_uploads`]; `InUse` when an active writer may still send one: then nothing is removed.
pub(crate) fn discard(directory: &Path, address: &str) -> Result<Vec<PendingUpload>> {
    let found: Vec<PendingUpload> =
        pending_uploads(directory)?.into_iter().filter(|pending| pending.address == address).collect();
    if found.is_empty() {
        return Ok(found);
    }
    let failed = |error: io::Error| cannot_read_dir(directory, error);
    let opened = open_private_dir(directory).map_err(failed)?;
    // Each is locked until it is gone: a writer that came since would go on with a file that has no
    // name.
    let mut held = Vec::new();
    for pending in found.iter().filter(|pending| !pending.refused) {
        let file = open_own_file(&opened, &pending.file).map_err(failed)?.map(|(file, _)| file);
        if pending.used || file.as_ref().is_some_and(|file| file.try_lock().is_err()) {
            return Err(Error::InUse(format!(
                "{address}: the archive is open for writing, and its unsent data may still be sent; unmount it first"
            )));
        }
        held.extend(file);
    }
    for pending in &found {
        unlinkat(&opened, &*pending.file, AtFlags::empty()).map_err(|error| failed(error.into()))?;
    }
    Ok(found)
}

/// Store overlaid with the spooled objects.
pub(super) struct SpoolOverlay {
    pub(super) inner: Arc<dyn ObjectStore>,
    pub(super) spool: Arc<OnceLock<UploadSpool>>,
}

impl SpoolOverlay {
    /// Reads an object from the spool while spooling.
    fn object(&self, name: &str) -> Option<RemoteResult<Vec<u8>>> {
        let object = self.spool.get().filter(|spool| spool.is_spooling())?.object(name)?;
        Some(object.map_err(|error| RemoteError::Damaged(format!("cannot read the unsent data: {error}"))))
    }
}

impl ObjectStore for SpoolOverlay {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.inner.create(name, bytes)
    }

    fn can_hide_missing(&self) -> bool {
        self.inner.can_hide_missing()
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        let Some(object) = self.object(name) else { return self.inner.get(name, part) };
        part.slice(&object?)
    }

    /// Lists spooled records before stored ones: the newest record sorts first.
    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        let mut here: Vec<ListedObject> = Vec::new();
        // For lists of the log, and of the whole prefix (see `BucketStore::find_archive`).
        let shows_newest = prefix.is_empty() || prefix.ends_with("/log/");
        if let Some(spool) = self.spool.get().filter(|spool| spool.is_spooling() && shows_newest) {
            let state = spool.state.lock();
            let is_record = |name: &str| name.starts_with(prefix) && name.contains("/log/");
            let named = state.entries.iter().filter(|entry| is_record(&entry.name));
            here.extend(named.map(|entry| ListedObject { name: entry.name.clone(), bytes: entry.length, time: None }));
        }
        here.sort_by(|one, other| one.name.cmp(&other.name));
        // Records of the store with equal or higher numbers are of the writer that was first.
        let Some(last) = here.last().map(|last| last.name.clone()) else { return self.inner.list(prefix, after, most) };
        here.retain(|listed| *listed.name > *after);
        here.truncate(most);
        if here.len() < most {
            let behind = if *after > *last { after } else { &last };
            here.extend(self.inner.list(prefix, behind, most - here.len())?);
        }
        Ok(here)
    }

    fn sweep(&self, above: &str) -> RemoteResult<()> {
        self.inner.sweep(above)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.inner.remove(name)
    }

    fn remove_batch(&self, names: &[String]) -> RemoteResult<BatchReply> {
        self.inner.remove_batch(names)
    }
}
