//! What a writer made and no store has yet, kept on this host.
//!
//! A mount that has to end while its store does not answer, or whose record was refused because another writer came first, would take with it what was written last. So the
//! objects go into a file, in the order in which the store is to get them, as sealed as they are. The next writer of this user here sends them before anything else; and
//! when that cannot be any more, because another writer's commits follow upon the last one that the store has, they are kept under another name, to be read and
//! thrown away by whoever wrote them.
//!
//! # Invariants
//! SPOOL-1  What lies in the file is what the store would have got, byte for byte, in that order, and on the medium before anybody is told so. A file that was torn ends
//!     before the first entry that is not whole: nobody was told of that one.
//! SPOOL-2  While something is held back everything that comes after it is, and is read from here: the store never gets an object whose predecessor it may not have.
//! SPOOL-3  What is sent later is what was to be sent then, or nothing: each record has to follow upon the store's newest one by that one's hash, or to be there. Whoever came
//!     as a writer since has the number of the first one, with a record that is never removed (BUCKET-3), so it is not free again, as one may be that a commit had.
//! SPOOL-4  Nothing is thrown away that the store does not have, but by order of who owns it.
//!
//! The file: a head (magic, version and length of the address of 32 bits each, the address, SHA-256 of all that), and entries (lengths of name and object of 64 bits each,
//! SHA-256 of both, the name, the object). Integers are little-endian.

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
use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, unlinkat};
use sha2::{Digest, Sha256};

use super::layout::Incarnation;
use super::object_names::{hex, id_of, random};
use super::object_ref::Id;
use super::objects::{Barred, Created, Listed, Objects, Part};
use crate::cache::{is_own, make, own, private, unseen};
use crate::range_source::Trouble;

const MAGIC: &[u8; 8] = b"LBXSPOOL";
const VERSION: u32 = 1;
const HASH: usize = 32;
/// Of an entry before its name.
const ENTRY: u64 = 16 + HASH as u64;
const LONGEST_ADDRESS: u32 = 8 << 10;
const LONGEST_NAME: u64 = 1 << 10;
/// Longer than any object.
const LONGEST_OBJECT: u64 = 128 << 20;
/// How often, and how long after another, a file is asked for that somebody else has.
const TRIES: usize = 20;
const AGAIN: Duration = Duration::from_millis(10);
/// What waits to be sent, and what cannot be sent any more.
const WAITS: &str = ".unsent";
const REFUSED: &str = ".refused";

/// The objects that a host keeps for one archive, by who writes it or reads them.
pub(crate) struct Spool {
    directory: OwnedFd,
    address: String,
    /// Of the file that waits.
    name: String,
    kept: Mutex<Kept>,
    /// SPOOL-2
    holds_back: AtomicBool,
    /// Bytes of this writer's that were refused.
    refused: AtomicU64,
}

struct Kept {
    /// None when another one has to be made for what comes next.
    file: Option<File>,
    entries: Vec<Entry>,
    end: u64,
}

struct Entry {
    name: String,
    at: u64,
    length: u64,
}

/// What a host keeps of one archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsent {
    /// The name of the file.
    pub file: String,
    pub address: String,
    pub bytes: u64,
    /// When it was written last.
    pub time: SystemTime,
    /// Another writer came first: it is never sent.
    pub refused: bool,
    /// A writer is there that may still send it.
    pub used: bool,
}

impl Spool {
    /// For who writes to the archive at `address` that has this incarnation: one address may be of different archives, by whoever is asked, and by time. None where nothing can
    /// be kept, which is told in the log, and where another process keeps what it writes there.
    ///
    /// # Errors
    /// When something waits there and cannot be sent: whoever came as a writer all the same would be the other one that came first (SPOOL-4).
    pub(super) fn open(directory: &Path, address: &str, incarnation: &Incarnation) -> Result<Option<Spool>> {
        let name = stem(address, incarnation) + WAITS;
        let opened = make(directory).and_then(|()| private(directory)).and_then(|directory| {
            let file = taken(&directory, &name)?;
            let (entries, end) = file.as_ref().map_or(Ok((Vec::new(), 0)), |file| read(file, address))?;
            let kept = Mutex::new(Kept { file, entries, end });
            let (holds_back, refused) = (AtomicBool::new(false), AtomicU64::new(0));
            Ok(Spool { directory, address: address.to_owned(), name: name.clone(), kept, holds_back, refused })
        });
        match opened {
            Ok(spool) => Ok(Some(spool).filter(|spool| spool.kept.lock().file.is_some())),
            Err(error) => {
                let path = directory.join(name);
                let shown = lockbox_terminal::display(path.as_os_str().as_encoded_bytes()).to_string();
                if waits(&path) {
                    let what =
                        format!("{address}: what was not sent lies in {shown}, and cannot be sent as it lies there");
                    return Err(Error::io(what, error));
                }
                tracing::warn!("{shown}: what a store does not take is not kept: {error}");
                Ok(None)
            }
        }
    }

    /// What was kept last of the archive at `address` that has this incarnation, to be read.
    ///
    /// # Errors
    /// `Io` of the kind `NotFound` when there is nothing; those of the host.
    pub(super) fn of_last(directory: &Path, address: &str, incarnation: &Incarnation) -> Result<Spool> {
        let failed = |error: io::Error| unseen(directory, error);
        let stem = stem(address, incarnation);
        let found = unsent(directory)?.into_iter().filter(|unsent| unsent.file.starts_with(&stem));
        let Some(last) = found.max_by_key(|unsent| unsent.time) else {
            let none = format!("{address}: everything that was written here was sent");
            return Err(Error::request(none, io::ErrorKind::NotFound));
        };
        let directory = private(directory).map_err(failed)?;
        let gone = || failed(io::ErrorKind::NotFound.into());
        let (file, _) = own(&directory, &last.file).map_err(failed)?.ok_or_else(gone)?;
        let (entries, end) = read(&file, address).map_err(failed)?;
        let kept = Mutex::new(Kept { file: Some(file), entries, end });
        let (holds_back, refused) = (AtomicBool::new(true), AtomicU64::new(0));
        Ok(Spool { directory, address: address.to_owned(), name: last.file, kept, holds_back, refused })
    }

    pub(super) fn holds_back(&self) -> bool {
        self.holds_back.load(Ordering::Acquire)
    }

    /// Bytes of this writer's that are here and not in the store.
    pub(super) fn bytes(&self) -> u64 {
        let waiting = if self.holds_back() { bytes(&self.kept.lock().entries) } else { 0 };
        waiting + self.refused.load(Ordering::Relaxed)
    }

    /// Keeps an object, which is on the medium when this returns (SPOOL-1). With `held`, nothing is sent from then on (SPOOL-2).
    ///
    /// # Errors
    /// Those of the host; `NoSpace`.
    pub(super) fn keep(&self, name: &str, object: &[u8], held: bool) -> Result<()> {
        let mut kept = self.kept.lock();
        let is_here = kept.entries.iter().any(|entry| entry.name == name && entry.length == object.len() as u64);
        let done = if is_here { Ok(()) } else { self.try_keep(&mut kept, name, object) };
        if held && done.is_ok() {
            self.holds_back.store(true, Ordering::Release);
        }
        done.map_err(|error| {
            Error::io(format!("what was not sent to {} cannot be kept on this machine", self.address), error)
        })
    }

    fn try_keep(&self, kept: &mut Kept, name: &str, object: &[u8]) -> io::Result<()> {
        if kept.file.is_none() {
            kept.file = taken(&self.directory, &self.name)?;
            kept.end = 0;
        }
        let file = kept.file.as_ref().ok_or(io::ErrorKind::WouldBlock)?;
        if kept.end == 0 {
            let head = head(&self.address);
            file.set_len(0)?;
            file.write_all_at(&head, 0)?;
            kept.end = head.len() as u64;
        }
        let mut entry = Vec::with_capacity(ENTRY as usize + name.len());
        entry.extend_from_slice(&(name.len() as u64).to_le_bytes());
        entry.extend_from_slice(&(object.len() as u64).to_le_bytes());
        entry.extend_from_slice(&sum(name, object));
        entry.extend_from_slice(name.as_bytes());
        let at = kept.end + entry.len() as u64;
        file.write_all_at(&entry, kept.end)?;
        file.write_all_at(object, at)?;
        file.sync_data()?;
        host_call::sync(&self.directory)?;
        kept.end = at + object.len() as u64;
        kept.entries.push(Entry { name: name.to_owned(), at, length: object.len() as u64 });
        Ok(())
    }

    /// The object of this name, when it is here.
    pub(super) fn object(&self, name: &str) -> Option<io::Result<Vec<u8>>> {
        let kept = self.kept.lock();
        let entry = kept.entries.iter().find(|entry| entry.name == name)?;
        let mut object = vec![0; entry.length as usize];
        let file = kept.file.as_ref()?;
        Some(file.read_exact_at(&mut object, entry.at).map(|()| object))
    }

    /// Whatever is kept is in the store, but for what is held back.
    ///
    /// # Errors
    /// Those of the host.
    pub(super) fn clear(&self) -> Result<()> {
        let mut kept = self.kept.lock();
        if kept.end == 0 || self.holds_back() {
            return Ok(());
        }
        kept.entries.clear();
        kept.end = 0;
        let Some(file) = &kept.file else { return Ok(()) };
        let cleared = file.set_len(0).and_then(|()| file.sync_data());
        cleared.map_err(|error| Error::io("cannot empty what was kept of an archive", error))
    }

    /// What is kept is never to be sent: another writer came first (SPOOL-4). Gives the bytes of it.
    ///
    /// # Errors
    /// Those of the host.
    pub(super) fn refuse(&self) -> Result<u64> {
        let mut kept = self.kept.lock();
        if kept.entries.is_empty() {
            return Ok(0);
        }
        let stem = self.name.strip_suffix(WAITS).unwrap_or(&self.name);
        let renamed = random().map(|chance| format!("{stem}-{}{REFUSED}", hex(&chance)));
        let cannot = |error: io::Error| Error::io("cannot keep what another writer came before", error);
        let directory = self.directory.as_fd();
        rename_to_free_name(directory, self.name.as_bytes(), directory, renamed?.as_bytes())
            .and_then(|()| host_call::sync(&self.directory))
            .map_err(|error| cannot(error.into()))?;
        let refused = bytes(&kept.entries);
        *kept = Kept { file: None, entries: Vec::new(), end: 0 };
        self.holds_back.store(false, Ordering::Release);
        Ok(refused)
    }

    /// Keeps a record that was refused, which is the last of its writer.
    ///
    /// # Errors
    /// Those of the host.
    pub(super) fn keep_refused(&self, name: &str, object: &[u8]) -> Result<()> {
        self.keep(name, object, false)?;
        self.refused.store(self.refuse()?, Ordering::Relaxed);
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn names(&self) -> Vec<String> {
        self.kept.lock().entries.iter().map(|entry| entry.name.clone()).collect()
    }

    /// Objects up to the last record, in their order: what comes behind it is named by nothing.
    pub(super) fn whole(&self, incarnation: &Incarnation) -> Vec<(String, Id)> {
        let kept = self.kept.lock();
        let named =
            kept.entries.iter().filter_map(|entry| Some((entry.name.clone(), id_of(incarnation, &entry.name)?)));
        let mut objects: Vec<_> = named.collect();
        let records = objects.iter().rposition(|(_, id)| matches!(id, Id::Log(_)));
        objects.truncate(records.map_or(0, |last| last + 1));
        objects
    }
}

impl Drop for Spool {
    /// An empty file says nothing.
    fn drop(&mut self) {
        let kept = self.kept.get_mut();
        if kept.file.is_some() && kept.entries.is_empty() && !self.holds_back.load(Ordering::Relaxed) {
            let _ = unlinkat(&self.directory, &*self.name, AtFlags::empty());
        }
    }
}

/// Whether a file of this user's has something there. An empty one says nothing.
fn waits(path: &Path) -> bool {
    let is_ours = |metadata: &Metadata| metadata.uid() == rustix::process::geteuid().as_raw();
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file() && is_ours(&metadata) && metadata.len() > 0)
}

fn bytes(entries: &[Entry]) -> u64 {
    entries.iter().map(|entry| entry.length).sum()
}

/// What the names of files of one archive begin with.
fn stem(address: &str, incarnation: &Incarnation) -> String {
    let hash = Sha256::new().chain_update(incarnation).chain_update(address.as_bytes()).finalize();
    hex(&hash[..16])
}

/// The file of this name, made when it is missing, locked; None when another process has it.
fn taken(directory: &OwnedFd, name: &str) -> io::Result<Option<File>> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    for _ in 0..TRIES {
        let file = File::from(openat(directory, name, flags, Mode::RUSR | Mode::WUSR)?);
        if file.try_lock().is_err() {
            // Who lists what is here asks by a lock, too, and has it for a moment.
            thread::sleep(AGAIN);
            continue;
        }
        let metadata = file.metadata()?;
        // Whoever had it before may have removed it since it was opened.
        if metadata.nlink() == 0 {
            continue;
        }
        if !is_own(&metadata) {
            return Err(io::Error::other("what is to be kept there is not a file of this user's alone"));
        }
        return Ok(Some(file));
    }
    Ok(None)
}

fn head(address: &str) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    head.extend_from_slice(&VERSION.to_le_bytes());
    head.extend_from_slice(&(address.len() as u32).to_le_bytes());
    head.extend_from_slice(address.as_bytes());
    let hash = Sha256::digest(&head);
    head.extend_from_slice(&hash);
    head
}

fn sum(name: &str, object: &[u8]) -> [u8; HASH] {
    Sha256::new().chain_update(name.as_bytes()).chain_update(object).finalize().into()
}

/// The address in the head, and where the entries begin; None for what is no such file.
fn address_in(file: &File) -> io::Result<Option<(String, u64)>> {
    let mut fixed = [0; 16];
    let length = file.metadata()?.len();
    if length < fixed.len() as u64 {
        return Ok(None);
    }
    file.read_exact_at(&mut fixed, 0)?;
    let number = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
    let end = 16 + u64::from(number(12)) + HASH as u64;
    if !fixed.starts_with(MAGIC) || number(8) != VERSION || number(12) > LONGEST_ADDRESS || length < end {
        return Ok(None);
    }
    let mut address = vec![0; number(12) as usize];
    file.read_exact_at(&mut address, 16)?;
    let Ok(address) = String::from_utf8(address) else { return Ok(None) };
    let mut whole = vec![0; end as usize];
    file.read_exact_at(&mut whole, 0)?;
    Ok((whole == head(&address)).then_some((address, end)))
}

/// The entries that are whole, and where the next one is to stand: 0 for a file that has no head for this address.
///
/// # Errors
/// Those of the host; what another version made is no file that was torn.
fn read(file: &File, address: &str) -> io::Result<(Vec<Entry>, u64)> {
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
    let length = file.metadata()?.len();
    let mut entries = Vec::new();
    while at + ENTRY <= length {
        let mut fixed = [0; ENTRY as usize];
        file.read_exact_at(&mut fixed, at)?;
        let (lengths, hash) = fixed.split_at(16);
        let (name, object) = lengths.split_at(8);
        let number = |bytes: &[u8]| bytes.try_into().map_or(u64::MAX, u64::from_le_bytes);
        let (name, object) = (number(name), number(object));
        if name > LONGEST_NAME || object > LONGEST_OBJECT || at + ENTRY + name + object > length {
            break;
        }
        let mut bytes = vec![0; (name + object) as usize];
        file.read_exact_at(&mut bytes, at + ENTRY)?;
        let (named, content) = bytes.split_at(name as usize);
        let Ok(named) = std::str::from_utf8(named) else { break };
        if sum(named, content) != hash {
            break;
        }
        entries.push(Entry { name: named.to_owned(), at: at + ENTRY + name, length: object });
        at += ENTRY + name + object;
    }
    Ok((entries, at))
}

/// What is kept in this directory of archives whose stores do not have it, by address and time.
///
/// # Errors
/// Those of the host; a directory that others own or can write to is none of ours.
pub(crate) fn unsent(directory: &Path) -> Result<Vec<Unsent>> {
    let failed = |error: io::Error| unseen(directory, error);
    let opened = match private(directory) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut found = Vec::new();
    for entry in Dir::read_from(&opened).map_err(|error| failed(error.into()))? {
        let entry = entry.map_err(|error| failed(error.into()))?;
        if let Ok(name) = entry.file_name().to_str() {
            found.extend(look(&opened, name).map_err(failed)?);
        }
    }
    found.sort_by(|one, other| (&one.address, one.time).cmp(&(&other.address, other.time)));
    Ok(found)
}

/// The file of this name; None for what is none, or has nothing.
fn look(directory: &OwnedFd, name: &str) -> io::Result<Option<Unsent>> {
    let refused = name.ends_with(REFUSED);
    if !refused && !name.ends_with(WAITS) {
        return Ok(None);
    }
    let Some((file, metadata)) = own(directory, name)? else { return Ok(None) };
    let Some((address, start)) = address_in(&file)? else { return Ok(None) };
    // It may have been begun since.
    let bytes = metadata.len().saturating_sub(start);
    let used = !refused && file.try_lock().is_err();
    let (file, time) = (name.to_owned(), metadata.modified()?);
    Ok((bytes > 0).then_some(Unsent { file, address, bytes, time, refused, used }))
}

/// Throws away what was refused of any archive that was at `address`, and what waits for it. Gives what was removed.
///
/// # Errors
/// As of [`unsent`]; `InUse` when a writer is there that may still send it: then nothing is removed.
pub(crate) fn forget(directory: &Path, address: &str) -> Result<Vec<Unsent>> {
    let found: Vec<Unsent> = unsent(directory)?.into_iter().filter(|unsent| unsent.address == address).collect();
    if found.is_empty() {
        return Ok(found);
    }
    let failed = |error: io::Error| unseen(directory, error);
    let opened = private(directory).map_err(failed)?;
    // Each is locked until it is gone: a writer that came since would go on with a file that has no name.
    let mut held = Vec::new();
    for unsent in found.iter().filter(|unsent| !unsent.refused) {
        let file = own(&opened, &unsent.file).map_err(failed)?.map(|(file, _)| file);
        if unsent.used || file.as_ref().is_some_and(|file| file.try_lock().is_err()) {
            return Err(Error::InUse(format!("{address}: it is open for writing, and what waits may still be sent")));
        }
        held.extend(file);
    }
    for unsent in &found {
        unlinkat(&opened, &*unsent.file, AtFlags::empty()).map_err(|error| failed(error.into()))?;
    }
    Ok(found)
}

/// A store as it would be if it had what is kept here.
pub(super) struct Spooled {
    pub(super) inner: Arc<dyn Objects>,
    pub(super) spool: Arc<OnceLock<Spool>>,
}

impl Spooled {
    /// What is read from here.
    fn object(&self, name: &str) -> Option<std::result::Result<Vec<u8>, Trouble>> {
        let object = self.spool.get().filter(|spool| spool.holds_back())?.object(name)?;
        Some(object.map_err(|error| Trouble::Damaged(format!("what was kept cannot be read: {error}"))))
    }
}

impl Objects for Spooled {
    fn create(&self, name: &str, bytes: &[u8]) -> std::result::Result<Created, Trouble> {
        self.inner.create(name, bytes)
    }

    fn hides(&self) -> bool {
        self.inner.hides()
    }

    fn get(&self, name: &str, part: Part) -> std::result::Result<Vec<u8>, Trouble> {
        let Some(object) = self.object(name) else { return self.inner.get(name, part) };
        part.of(&object?)
    }

    /// The newest record is the first of its list.
    fn list(&self, prefix: &str, after: &str, most: usize) -> std::result::Result<Vec<Listed>, Trouble> {
        let mut here: Vec<Listed> = Vec::new();
        // Of its log, and of all that lies there (see `Store::look`).
        let shows_newest = prefix.is_empty() || prefix.ends_with("/log/");
        if let Some(spool) = self.spool.get().filter(|spool| spool.holds_back() && shows_newest) {
            let kept = spool.kept.lock();
            let is_record = |name: &str| name.starts_with(prefix) && name.contains("/log/");
            let named = kept.entries.iter().filter(|entry| is_record(&entry.name));
            here.extend(named.map(|entry| Listed { name: entry.name.clone(), bytes: entry.length, time: None }));
        }
        here.sort_by(|one, other| one.name.cmp(&other.name));
        // Whatever the store has of records with numbers as high as these is of whoever came first.
        let Some(last) = here.last().map(|last| last.name.clone()) else { return self.inner.list(prefix, after, most) };
        here.retain(|listed| *listed.name > *after);
        here.truncate(most);
        if here.len() < most {
            let behind = if *after > *last { after } else { &last };
            here.extend(self.inner.list(prefix, behind, most - here.len())?);
        }
        Ok(here)
    }

    fn list_what_can_be(
        &self,
        prefix: &str,
        after: &str,
        most: usize,
        barred: &mut Barred<'_>,
    ) -> std::result::Result<Vec<Listed>, Trouble> {
        self.inner.list_what_can_be(prefix, after, most, barred)
    }

    fn sweep(&self, above: &str) -> std::result::Result<(), Trouble> {
        self.inner.sweep(above)
    }

    fn remove(&self, name: &str) -> std::result::Result<(), Trouble> {
        self.inner.remove(name)
    }
}
