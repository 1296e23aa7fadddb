//! Disk cache of a remote archive, kept between mounts.
//!
//! One file per archive, of a fixed size: a header, a table, and positions for slots. The cache is
//! eight-way set associative with least-recently-used replacement. A table entry names the slot and
//! has a checksum of slot number, range key and content. A slot with a wrong checksum (after a
//! crash, on a bad disk, or written for another version) counts as missing. The identity in the
//! header covers the address and the cache scope of the versions; for a file without a scope, its
//! one version and its commits. Under another identity the cache is empty.
//!
//! The checksum detects accidents and is computed for every slot that is read, so it is a fast one.
//! It does not authenticate: a program that can write to the file can forge content, and the
//! archive's tags check cached bytes exactly as they check bytes from the server. The content is as
//! sealed as on the server, so the cache needs no secret. The file is named by a hash of the
//! address, which is stored after the header for listings.
//!
//! The cache is optional: a full or failing disk, a directory that other users can write to, or a
//! file locked by another process disables it.
//!
//! Listing and deleting go through the descriptor of the user's private directory; links and files
//! with another owner or name are skipped. A cache is unlinked by its name and not modified: a
//! mount that has it open keeps using it, and the space is freed when the last user closes it. A
//! concurrent open creates a new file.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::SystemTime;

use lockbox::{Error, Result};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::Xxh3Default;

use crate::RemoteOptions;
use crate::address::Address;
use crate::credentials::{home, is_owned_by_root};
use crate::hex;
use crate::range_source::RangeKey;
use crate::slot_cache::SLOT;

const MAGIC: [u8; 8] = *b"lbxcache";
const VERSION: u32 = 3;
const HEADER_BYTES: u64 = 4096;
/// Layout of a table entry: slot number plus one in little-endian order, and 16 bytes of XXH3 over
/// number, range key and content; then zeros.
const ENTRY_BYTES: u64 = 32;
/// Positions per set.
const WAYS: u64 = 8;
/// Offset of the address: its length in 16 bits, and its bytes.
const ADDRESS_OFFSET: u64 = 52;
/// Default upper bound in bytes.
const MAX_DEFAULT_BYTES: u64 = 20 << 30;
/// Maximum bytes of an unnamed file in memory: seven segments of a bucket.
const MAX_MEMORY_BYTES: u64 = 64 << 20;

const SUFFIX: &str = ".cache";

/// SHA-256 that identifies the content of a cache.
pub(crate) type CacheIdentity = [u8; 32];

pub(crate) struct DiskCache {
    file: File,
    positions: u64,
    table: Mutex<Table>,
    /// Set by the first failure.
    disabled: AtomicBool,
    hits: AtomicU64,
}

struct Table {
    /// Slot at each position, plus one.
    slots: Vec<u64>,
    /// Last use of each position, by a counter of uses.
    used: Vec<u32>,
    clock: u32,
}

/// Returns the cache directory: `$XDG_CACHE_HOME/lockbox` or `~/.cache/lockbox`. Root with the HOME
/// of another user gets that of the system, because the other user could redirect the writes.
pub fn cache_directory() -> Option<PathBuf> {
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    named.or_else(|| Some(cache_home(home()?, rustix::process::geteuid().is_root()))).map(|path| path.join("lockbox"))
}

fn cache_home(home: PathBuf, is_root: bool) -> PathBuf {
    if is_root && !is_owned_by_root(&home) { PathBuf::from("/var/cache") } else { home.join(".cache") }
}

/// Returns the bytes of a cache in this directory; `own` bytes of it are taken already.
fn default_bytes(directory: &OwnedFd, own: u64) -> io::Result<u64> {
    let host = rustix::fs::fstatvfs(directory)?;
    let free = host.f_bavail.saturating_mul(host.f_frsize).saturating_add(own);
    Ok((free / 10).min(MAX_DEFAULT_BYTES))
}

/// Opens an unnamed file in the cache directory, or in memory where there can be no cache. Returns
/// it with the bytes that it may take.
pub(crate) fn unnamed_file(options: &RemoteOptions) -> io::Result<(File, u64)> {
    let on_disk = |path: &Path| {
        create_private_dir(path)?;
        let directory = open_private_dir(path)?;
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = File::from(openat(&directory, ".", flags, Mode::RUSR | Mode::WUSR)?);
        io::Result::Ok((file, options.cache_bytes.map_or_else(|| default_bytes(&directory, 0), Ok)?))
    };
    let wanted = options.cache_directory.as_deref().filter(|_| options.cache_bytes != Some(0));
    match wanted.map(on_disk) {
        Some(Ok(opened)) => Ok(opened),
        found => {
            if let Some(Err(error)) = found {
                tracing::info!("no temporary file in the cache directory: {error}");
            }
            let file = rustix::fs::memfd_create("objects", rustix::fs::MemfdFlags::CLOEXEC)?;
            Ok((file.into(), MAX_MEMORY_BYTES))
        }
    }
}

impl DiskCache {
    /// Opens the cache of the archive at `address`, empty unless it has this identity. Returns None
    /// if there can be none, and logs the reason.
    pub(crate) fn open(directory: &Path, address: &str, key: CacheIdentity, most: Option<u64>) -> Option<DiskCache> {
        match DiskCache::try_open(directory, address, key, most) {
            Ok(cache) => cache,
            Err(error) => {
                tracing::info!("the cache on disk is off: {}: {error}", directory.display());
                None
            }
        }
    }

    fn try_open(
        directory: &Path,
        address: &str,
        key: CacheIdentity,
        most: Option<u64>,
    ) -> io::Result<Option<DiskCache>> {
        create_private_dir(directory)?;
        let directory = open_private_dir(directory)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = File::from(openat(&directory, cache_file_name(address), flags, Mode::RUSR | Mode::WUSR)?);
        let metadata = file.metadata()?;
        if !is_own_file(&metadata) {
            return Err(io::Error::other("not a regular file of this user with a single link"));
        }
        // Another mount of the archive goes without.
        if file.try_lock().is_err() {
            return Ok(None);
        }
        let positions_for = |bytes: u64| bytes.saturating_sub(HEADER_BYTES) / (SLOT + ENTRY_BYTES) / WAYS * WAYS;
        let wanted = positions_for(most.map_or_else(|| default_bytes(&directory, metadata.blocks() * 512), Ok)?);
        let found = read_head(&file).filter(|(found, _)| *found == key).map(|(_, positions)| positions);
        // The free space varies between mounts and is no reason to discard the cache.
        let found = found.filter(|positions| match most {
            Some(_) => *positions == wanted,
            None => *positions > 0 && *positions <= positions_for(MAX_DEFAULT_BYTES) && positions % WAYS == 0,
        });
        let positions = found.unwrap_or(wanted);
        if positions == 0 {
            return Ok(None);
        }
        let mut slots = vec![0; usize::try_from(positions).map_err(io::Error::other)?];
        if found.is_some() && metadata.len() == length(positions) {
            let mut table = vec![0; slots.len() * ENTRY_BYTES as usize];
            file.read_exact_at(&mut table, HEADER_BYTES)?;
            for (slot, entry) in slots.iter_mut().zip(table.chunks_exact(ENTRY_BYTES as usize)) {
                *slot = u64::from_le_bytes(entry[..8].try_into().unwrap_or_default());
            }
        } else {
            file.set_len(0)?;
            file.set_len(length(positions))?;
            file.write_all_at(&head(&key, positions), 0)?;
        }
        // At each opening, so that the file's time tells when it was used last.
        file.write_all_at(&encode_address(address), ADDRESS_OFFSET)?;
        let used = vec![0; slots.len()];
        let table = Mutex::new(Table { slots, used, clock: 0 });
        Ok(Some(DiskCache { file, positions, table, disabled: AtomicBool::new(false), hits: AtomicU64::new(0) }))
    }

    /// Returns whether the table names the slot; only [`DiskCache::get`] checks its content.
    pub(crate) fn may_contain(&self, slot: u64) -> bool {
        let set = self.set_start(slot);
        self.table.lock().slots[set as usize..(set + WAYS) as usize].contains(&(slot + 1))
    }

    /// Fills `out` with the slot if it is cached, intact, and has this key.
    pub(crate) fn get(&self, slot: u64, key: &RangeKey, out: &mut [u8]) -> bool {
        let Some(position) = self.table.lock().find(self.set_start(slot), slot) else { return false };
        let mut entry = [0; ENTRY_BYTES as usize];
        let read = self.file.read_exact_at(&mut entry, HEADER_BYTES + position * ENTRY_BYTES);
        let read = read.and_then(|()| self.file.read_exact_at(out, self.offset_of(position)));
        let whole = read.is_ok() && entry == self::entry(slot, key, out);
        if whole {
            self.hits.fetch_add(1, Ordering::Relaxed);
        } else {
            self.table.lock().forget(position, slot);
        }
        whole
    }

    /// Stores the slot. A concurrent reader of the evicted position finds a wrong checksum, or the
    /// old slot with its checksum.
    pub(crate) fn put(&self, slot: u64, key: &RangeKey, bytes: &[u8]) {
        if self.disabled.load(Ordering::Relaxed) || bytes.len() as u64 > SLOT {
            return;
        }
        // Held over the writes: two slots that take one place would leave the table of one and the
        // content of the other.
        let mut table = self.table.lock();
        let position = table.take(self.set_start(slot), slot);
        let written = self.file.write_all_at(bytes, self.offset_of(position));
        let written = written
            .and_then(|()| self.file.write_all_at(&entry(slot, key, bytes), HEADER_BYTES + position * ENTRY_BYTES));
        if let Err(error) = written {
            table.forget(position, slot);
            self.disabled.store(true, Ordering::Relaxed);
            tracing::warn!("the cache on disk is now off: {error}");
        }
    }

    pub(crate) fn forget(&self, slots: &Range<u64>) {
        let gone = |slot: &u64| slot.checked_sub(1).is_some_and(|slot| slots.contains(&slot));
        self.table.lock().slots.iter_mut().filter(|slot| gone(slot)).for_each(|slot| *slot = 0);
    }

    pub(crate) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// Returns the first position of the slot's set. Consecutive slots have consecutive sets, so
    /// that a disk reads them sequentially.
    fn set_start(&self, slot: u64) -> u64 {
        slot % (self.positions / WAYS) * WAYS
    }

    /// Returns the file offset of a position. The ways of one set are far apart; equal ways of
    /// consecutive sets are adjacent.
    fn offset_of(&self, position: u64) -> u64 {
        let (set, way) = (position / WAYS, position % WAYS);
        HEADER_BYTES + self.positions * ENTRY_BYTES + (way * (self.positions / WAYS) + set) * SLOT
    }
}

impl Table {
    fn find(&mut self, set: u64, slot: u64) -> Option<u64> {
        let position = (set..set + WAYS).find(|position| self.slots[*position as usize] == slot + 1)?;
        self.mark_used(position);
        Some(position)
    }

    fn take(&mut self, set: u64, slot: u64) -> u64 {
        let position = self.find(set, slot);
        let oldest = || {
            (set..set + WAYS)
                .min_by_key(|position| (self.slots[*position as usize] != 0, self.used[*position as usize]))
        };
        let position = position.or_else(oldest).unwrap_or(set);
        self.slots[position as usize] = slot + 1;
        self.mark_used(position);
        position
    }

    fn mark_used(&mut self, position: u64) {
        self.clock = self.clock.wrapping_add(1);
        self.used[position as usize] = self.clock;
    }

    fn forget(&mut self, position: u64, slot: u64) {
        if self.slots[position as usize] == slot + 1 {
            self.slots[position as usize] = 0;
        }
    }
}

fn head(key: &CacheIdentity, positions: u64) -> [u8; ADDRESS_OFFSET as usize] {
    let mut head = [0; ADDRESS_OFFSET as usize];
    head[..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..44].copy_from_slice(key);
    head[44..].copy_from_slice(&positions.to_le_bytes());
    head
}

fn read_head(file: &File) -> Option<(CacheIdentity, u64)> {
    let mut found = [0; ADDRESS_OFFSET as usize];
    file.read_exact_at(&mut found, 0).ok()?;
    let key = found[12..44].try_into().ok()?;
    let positions = u64::from_le_bytes(found[44..].try_into().ok()?);
    (found == head(&key, positions)).then_some((key, positions))
}

fn length(positions: u64) -> u64 {
    HEADER_BYTES + positions * (ENTRY_BYTES + SLOT)
}

fn entry(slot: u64, key: &RangeKey, bytes: &[u8]) -> [u8; ENTRY_BYTES as usize] {
    let mut sum = Xxh3Default::new();
    sum.update(&slot.to_le_bytes());
    sum.update(key);
    sum.update(bytes);
    let mut entry = [0; ENTRY_BYTES as usize];
    entry[..8].copy_from_slice(&(slot + 1).to_le_bytes());
    entry[8..24].copy_from_slice(&sum.digest128().to_le_bytes());
    entry
}

fn cache_file_name(address: &str) -> String {
    hex(&Sha256::digest(address.as_bytes())[..16]) + SUFFIX
}

/// Encodes the address after the header; empty if it does not fit.
fn encode_address(address: &str) -> Vec<u8> {
    let bytes =
        if ADDRESS_OFFSET as usize + 2 + address.len() <= HEADER_BYTES as usize { address.as_bytes() } else { &[] };
    [&(bytes.len() as u16).to_le_bytes(), bytes].concat()
}

fn address_in(file: &File, name: &str) -> Option<String> {
    let mut length = [0; 2];
    file.read_exact_at(&mut length, ADDRESS_OFFSET).ok()?;
    let length = usize::from(u16::from_le_bytes(length));
    let mut bytes = vec![0; (length <= HEADER_BYTES as usize).then_some(length)?];
    file.read_exact_at(&mut bytes, ADDRESS_OFFSET + 2).ok()?;
    // Half of it may have been written, or it may be of an older program.
    String::from_utf8(bytes).ok().filter(|address| cache_file_name(address) == name)
}

/// Returns whether it is a regular file that only this user can have written.
pub(crate) fn is_own_file(metadata: &Metadata) -> bool {
    metadata.is_file() && metadata.nlink() == 1 && metadata.uid() == rustix::process::geteuid().as_raw()
}

/// Opens the file of this name for reading; returns None if it does not exist or is something else.
pub(crate) fn open_own_file(directory: &OwnedFd, name: &str) -> io::Result<Option<(File, Metadata)>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match openat(directory, name, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        // A link, a socket, or removed meanwhile.
        Err(Errno::LOOP | Errno::NXIO | Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let metadata = file.metadata()?;
    Ok(is_own_file(&metadata).then_some((file, metadata)))
}

pub(crate) fn cannot_read_dir(directory: &Path, error: io::Error) -> Error {
    let directory = lockbox_terminal::display(directory.as_os_str().as_encoded_bytes());
    Error::io(format!("cannot read {directory}"), error)
}

pub(crate) fn create_private_dir(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Opens the directory. Rejects one that other users own or can write to: entries could link
/// anywhere.
pub(crate) fn open_private_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::statat(&directory, "", AtFlags::EMPTY_PATH)?;
    if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_mode & 0o022 != 0 {
        return Err(io::Error::other("the directory is not this user's alone"));
    }
    Ok(directory)
}

/// Opens the directory like [`open_private_dir`]; returns None if it does not exist.
fn find_private_dir(path: &Path) -> Result<Option<OwnedFd>> {
    match open_private_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(|error| cannot_read_dir(path, error)),
    }
}

/// Describes the files of a private directory that `inspect` recognises; none if it does not exist.
pub(crate) fn list_private_dir<T>(
    path: &Path,
    inspect: impl Fn(&OwnedFd, &str) -> io::Result<Option<T>>,
) -> Result<Vec<T>> {
    let Some(directory) = find_private_dir(path)? else { return Ok(Vec::new()) };
    let failed = |error: io::Error| cannot_read_dir(path, error);
    let mut found = Vec::new();
    for entry in Dir::read_from(&directory).map_err(|error| failed(error.into()))? {
        let entry = entry.map_err(|error| failed(error.into()))?;
        if let Ok(name) = entry.file_name().to_str() {
            found.extend(inspect(&directory, name).map_err(failed)?);
        }
    }
    Ok(found)
}

/// Hexadecimal digits of a cache's name before the suffix.
const HEX_DIGITS: usize = 32;

/// Disk cache of one archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheEntry {
    /// File name.
    pub file: String,
    /// Address of the archive; None if it is not recorded.
    pub address: Option<String>,
    /// Allocated bytes on the disk.
    pub bytes: u64,
    /// Maximum size in bytes.
    pub most: u64,
    /// Time of the last open or write.
    pub used: SystemTime,
}

/// Lists the caches, sorted by address; empty without a cache directory.
///
/// # Errors
/// I/O errors of the host; rejects a directory that other users own or can write to.
pub fn cache_entries(options: &RemoteOptions) -> Result<Vec<CacheEntry>> {
    let Some(path) = &options.cache_directory else { return Ok(Vec::new()) };
    let mut found = list_private_dir(path, |directory, name| match is_cache_name(name) {
        true => Ok(inspect(directory, name)?.map(|(_, entry)| entry)),
        false => Ok(None),
    })?;
    found.sort_by(|one, other| (&one.address, &one.file).cmp(&(&other.address, &other.file)));
    Ok(found)
}

/// Deletes the cache of the archive at `address`, or all caches. Returns the deleted caches, each
/// with whether it is still in use.
///
/// # Errors
/// As of [`cache_entries`].
pub fn remove_cache_entries(options: &RemoteOptions, address: Option<&Address>) -> Result<Vec<(CacheEntry, bool)>> {
    let Some(path) = &options.cache_directory else { return Ok(Vec::new()) };
    let Some(directory) = find_private_dir(path)? else { return Ok(Vec::new()) };
    let failed = |error: io::Error| cannot_read_dir(path, error);
    let names = match address {
        Some(address) => vec![cache_file_name(&address.to_string())],
        None => cache_entries(options)?.into_iter().map(|entry| entry.file).collect(),
    };
    let mut removed = Vec::new();
    for name in names {
        let Some((file, mut entry)) = inspect(&directory, &name).map_err(failed)? else { continue };
        match unlinkat(&directory, &*name, AtFlags::empty()) {
            Ok(()) => {}
            // Another process removed it.
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(failed(error.into())),
        }
        if let Some(address) = address {
            entry.address = Some(address.to_string());
        }
        // The name is gone, so this lock cannot keep another process from opening the cache.
        removed.push((entry, file.try_lock().is_err()));
    }
    Ok(removed)
}

fn is_cache_name(name: &str) -> bool {
    let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
    name.strip_suffix(SUFFIX).is_some_and(|digits| digits.len() == HEX_DIGITS && digits.bytes().all(is_digit))
}

/// Describes the cache of this name; None if it does not exist or is something else.
fn inspect(directory: &OwnedFd, name: &str) -> io::Result<Option<(File, CacheEntry)>> {
    let Some((file, metadata)) = open_own_file(directory, name)? else { return Ok(None) };
    let entry = CacheEntry {
        file: name.to_owned(),
        address: address_in(&file, name),
        bytes: metadata.blocks() * 512,
        most: metadata.len(),
        used: metadata.modified()?,
    };
    Ok(Some((file, entry)))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const LABEL: RangeKey = [7; 32];

    fn slot(number: u64) -> Vec<u8> {
        (0..SLOT).map(|at| (at.wrapping_mul(31) ^ number) as u8).collect()
    }

    fn open(directory: &Path, key: u8, most: u64) -> DiskCache {
        DiskCache::try_open(&directory.join("c"), "a", [key; 32], Some(most)).unwrap().unwrap()
    }

    /// Unlocks and closes the cache: a child process of another test shares the open file until its
    /// exec, so closing alone may leave the lock.
    fn close(cache: DiskCache) {
        cache.file.unlock().unwrap();
    }

    fn has(cache: &DiskCache, number: u64) -> bool {
        let mut out = vec![0; SLOT as usize];
        let found = cache.get(number, &LABEL, &mut out);
        assert!(!found || out == slot(number), "slot {number} is not what was put");
        found
    }

    #[test]
    fn what_was_kept_is_there_after_a_restart_and_not_under_another_key() {
        let directory = tempfile::tempdir().unwrap();
        let cache = open(directory.path(), 1, 8 << 20);
        (0..20).for_each(|number| cache.put(number, &LABEL, &slot(number)));
        cache.put(77, &LABEL, &slot(77)[..1000]);
        assert!(
            DiskCache::try_open(&directory.path().join("c"), "a", [1; 32], Some(8 << 20)).unwrap().is_none(),
            "it is used"
        );
        close(cache);
        let cache = open(directory.path(), 1, 8 << 20);
        assert!((0..20).all(|number| has(&cache, number)) && !has(&cache, 20));
        let mut short = vec![0; 1000];
        assert!(cache.get(77, &LABEL, &mut short) && short == slot(77)[..1000]);
        close(cache);
        let cache = open(directory.path(), 2, 8 << 20);
        assert!((0..20).all(|number| !has(&cache, number)));
    }

    #[test]
    fn a_slot_of_another_version_is_one_that_is_not_there() {
        let directory = tempfile::tempdir().unwrap();
        let cache = open(directory.path(), 1, 8 << 20);
        cache.put(3, &LABEL, &slot(3));
        assert!(!cache.get(3, &[8; 32], &mut vec![0; SLOT as usize]));
        cache.put(3, &[8; 32], &slot(4));
        let mut out = vec![0; SLOT as usize];
        assert!(cache.get(3, &[8; 32], &mut out) && out == slot(4));
        assert!(!has(&cache, 3));
    }

    #[test]
    fn it_never_outgrows_its_size_and_keeps_what_is_used() {
        let directory = tempfile::tempdir().unwrap();
        let most = 4 << 20;
        let cache = open(directory.path(), 1, most);
        for number in 0..1000 {
            cache.put(number, &LABEL, &slot(number));
            assert!(has(&cache, number));
            assert!(has(&cache, 0), "after {number}");
        }
        assert!(cache.file.metadata().unwrap().len() <= most);
        let cached = (0..1000).filter(|number| has(&cache, *number)).count() as u64;
        assert_eq!(cached, cache.positions);
    }

    /// Each byte of the file in turn would take long; each that is looked at by itself is one of
    /// every kind.
    #[test]
    fn a_torn_slot_is_not_there() {
        let directory = tempfile::tempdir().unwrap();
        let cache = open(directory.path(), 1, 1 << 20);
        cache.put(5, &LABEL, &slot(5));
        let at = (0..cache.positions).find(|at| cache.table.lock().slots[*at as usize] == 6).unwrap();
        let positions: Vec<u64> = [
            HEADER_BYTES + at * ENTRY_BYTES,
            HEADER_BYTES + at * ENTRY_BYTES + 31,
            cache.offset_of(at),
            cache.offset_of(at) + SLOT - 1,
        ]
        .into();
        close(cache);
        let is_cached = || {
            let cache = open(directory.path(), 1, 1 << 20);
            let found = has(&cache, 5);
            close(cache);
            found
        };
        for byte in positions {
            let path = directory.path().join("c").join(cache_file_name("a"));
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let mut old = [0];
            file.read_exact_at(&mut old, byte).unwrap();
            file.write_all_at(&[old[0] ^ 1], byte).unwrap();
            assert!(!is_cached(), "byte {byte}");
            file.write_all_at(&old, byte).unwrap();
            assert!(is_cached());
        }
    }

    #[test]
    fn what_others_can_write_to_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let (open, victim) = (directory.path().join("open"), directory.path().join("victim"));
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(DiskCache::try_open(&open, "a", [1; 32], Some(1 << 20)).is_err());
        let own = directory.path().join("own");
        std::fs::write(&victim, b"precious").unwrap();
        std::fs::create_dir(&own).unwrap();
        symlink(&victim, own.join(cache_file_name("a"))).unwrap();
        assert!(DiskCache::try_open(&own, "a", [1; 32], Some(1 << 20)).is_err());
        std::fs::hard_link(&victim, own.join(cache_file_name("b"))).unwrap();
        assert!(DiskCache::try_open(&own, "b", [1; 32], Some(1 << 20)).is_err());
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    }

    const ONE: &str = "https://example.org/one.lbx";
    const OTHER: &str = "s3://bucket/other";

    fn at(directory: &Path) -> RemoteOptions {
        RemoteOptions { cache_directory: Some(directory.to_owned()), ..RemoteOptions::default() }
    }

    fn fill(directory: &Path, address: &str, slots: u64) -> DiskCache {
        let cache = DiskCache::open(directory, address, [1; 32], Some(8 << 20)).unwrap();
        (0..slots).for_each(|number| cache.put(number, &RangeKey::default(), &vec![number as u8; SLOT as usize]));
        cache
    }

    fn address(text: &str) -> Address {
        Address::parse(OsStr::new(text)).unwrap().unwrap()
    }

    #[test]
    fn what_is_kept_is_listed_with_its_address_and_nothing_else_is() {
        let directory = tempfile::tempdir().unwrap();
        let caches = directory.path().join("caches");
        assert_eq!(cache_entries(&at(&caches)).unwrap(), []);
        assert!(!caches.exists(), "who looks makes nothing");
        drop(fill(&caches, ONE, 3));
        drop(fill(&caches, OTHER, 20));
        let long = format!("s3://bucket/{}", "long".repeat(1100));
        drop(fill(&caches, &long, 1));
        // What is none: by its name, by what it is, by whom else it belongs to.
        fs::write(caches.join("notes.cache"), b"mine").unwrap();
        fs::write(directory.path().join("precious"), b"precious").unwrap();
        symlink(directory.path().join("precious"), caches.join(cache_file_name("link"))).unwrap();
        fs::hard_link(directory.path().join("precious"), caches.join(cache_file_name("hard"))).unwrap();
        fs::create_dir(caches.join(cache_file_name("directory"))).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            caches.join(cache_file_name("fifo")),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        let found = cache_entries(&at(&caches)).unwrap();
        let addresses: Vec<_> = found.iter().map(|entry| entry.address.as_deref()).collect();
        assert_eq!(addresses, [None, Some(ONE), Some(OTHER)], "{found:?}");
        assert_eq!(found[0].file, cache_file_name(&long));
        assert!(found[1].bytes >= 3 * SLOT && found[2].bytes >= 20 * SLOT && found[1].bytes < found[2].bytes);
        assert!(found[1].most <= 8 << 20);
        // Of an older program, or torn: the name alone is not made up.
        fs::File::options()
            .write(true)
            .open(caches.join(cache_file_name(ONE)))
            .unwrap()
            .write_all_at(b"\xff\xff", 52)
            .unwrap();
        assert_eq!(cache_entries(&at(&caches)).unwrap().iter().filter(|entry| entry.address.is_none()).count(), 2);
        // All that is removed is what was listed.
        assert_eq!(remove_cache_entries(&at(&caches), None).unwrap().len(), 3);
        assert_eq!(cache_entries(&at(&caches)).unwrap(), []);
        assert_eq!(fs::read_dir(&caches).unwrap().count(), 5);
        assert_eq!(fs::read(directory.path().join("precious")).unwrap(), b"precious");
    }

    #[test]
    fn what_is_removed_under_its_reader_serves_it_to_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let reader = fill(directory.path(), ONE, 5);
        close(fill(directory.path(), OTHER, 5));
        let removed = remove_cache_entries(&at(directory.path()), Some(&address(ONE))).unwrap();
        assert_eq!(removed.len(), 1);
        assert!(removed[0].1 && removed[0].0.address.as_deref() == Some(ONE), "{removed:?}");
        let has = |cache: &DiskCache, slot: u64| {
            let mut out = vec![0; SLOT as usize];
            cache.get(slot, &RangeKey::default(), &mut out) && out == vec![slot as u8; SLOT as usize]
        };
        assert!((0..5).all(|slot| has(&reader, slot)));
        reader.put(9, &RangeKey::default(), &vec![9; SLOT as usize]);
        assert!(has(&reader, 9));
        // Somebody else begins with an empty one.
        let next = DiskCache::open(directory.path(), ONE, [1; 32], Some(8 << 20)).unwrap();
        assert!(!has(&next, 0));
        assert_eq!(remove_cache_entries(&at(directory.path()), Some(&address("s3://bucket/none"))).unwrap(), []);
        let removed = remove_cache_entries(&at(directory.path()), None).unwrap();
        let used: Vec<_> = removed.iter().map(|(entry, used)| (entry.address.as_deref().unwrap(), *used)).collect();
        assert_eq!(used, [(ONE, true), (OTHER, false)]);
    }

    #[test]
    fn in_a_directory_that_others_can_write_to_nothing_is_listed_or_removed() {
        let directory = tempfile::tempdir().unwrap();
        let caches = directory.path().join("caches");
        drop(fill(&caches, ONE, 1));
        fs::set_permissions(&caches, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(cache_entries(&at(&caches)).is_err() && remove_cache_entries(&at(&caches), None).is_err());
        assert!(remove_cache_entries(&at(&caches), Some(&address(ONE))).is_err());
        fs::set_permissions(&caches, fs::Permissions::from_mode(0o700)).unwrap();
        symlink(&caches, directory.path().join("link")).unwrap();
        assert!(remove_cache_entries(&at(&directory.path().join("link")), None).is_err());
        assert_eq!(cache_entries(&at(&caches)).unwrap().len(), 1);
    }
}
