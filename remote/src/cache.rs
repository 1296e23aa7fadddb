//! What was read of an archive elsewhere, kept on disk from one mount to the next.
//!
//! One file for an archive, of a fixed size that it never outgrows: a head, a table, and places for slots. A slot has eight places that it may
//! lie in, and takes the one that was used longest ago. An entry of the table names the slot and has a sum of it and of its label; a slot whose sum
//! is wrong, after a crash, on a bad disk, or because it is of another version that has other bytes there, is one that is not there. The key in the head
//! names the address and the lineage of the versions whose labels may be compared, or the one version and its commits of a file that has none: under another key the cache
//! is empty. A sum finds what a crash, a disk or another version did, and is made of every slot that is read: so it is a fast one. It is no proof of who wrote the slot: whoever
//! can write to this user's file could give any content its sum, of whatever kind, and what comes from here is opened under the archive's tags as what comes from the server is.
//! What lies in it is as sealed as on the server, so it needs no secret. The file is named by a hash of the address, which stands behind the head for those who
//! list what is kept.
//!
//! Nothing depends on it: a disk that is full or fails, a directory that others can write to, or a file that somebody else uses turn it off.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use lockbox::Error;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Mode, OFlags, openat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::Xxh3Default;

use crate::credentials::home;
use crate::hex::hex;
use crate::range_source::Label;
use crate::settings_file::is_of_root;
use crate::slot_cache::SLOT;

const MAGIC: [u8; 8] = *b"lbxcache";
const VERSION: u32 = 3;
const HEAD: u64 = 4096;
/// Number of the slot plus one in little-endian order, and 16 bytes of XXH3 over number, label and content; then zeros.
const ENTRY: u64 = 32;
/// Places that a slot may lie in.
const WAYS: u64 = 8;
/// The address stands here: its length in 16 bits, and its bytes.
const NAMED: u64 = 52;
/// More is not taken without being asked for.
const MOST: u64 = 20 << 30;

/// What names of caches end with.
pub(crate) const SUFFIX: &str = ".cache";

/// SHA-256 of what a cache is for.
pub(crate) type Key = [u8; 32];

pub(crate) struct Cache {
    file: File,
    places: u64,
    table: Mutex<Table>,
    /// Set by the first failure.
    off: AtomicBool,
    hits: AtomicU64,
}

struct Table {
    /// The slot of each place, plus one.
    slots: Vec<u64>,
    /// When each place was used, by a clock of uses.
    used: Vec<u32>,
    clock: u32,
}

/// The directory of caches: `$XDG_CACHE_HOME/lockbox`, `~/.cache/lockbox`; for root with the HOME
/// of another user, that of the system, because the other user could redirect the writes.
pub(crate) fn directory() -> Option<PathBuf> {
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    named.or_else(|| Some(cache_home(home()?, rustix::process::geteuid().is_root()))).map(|path| path.join("lockbox"))
}

fn cache_home(home: PathBuf, is_root: bool) -> PathBuf {
    if is_root && !is_of_root(&home) { PathBuf::from("/var/cache") } else { home.join(".cache") }
}

impl Cache {
    /// The cache of the archive at `address`, empty unless it has this key. None when there can be none, which is told in the log.
    pub(crate) fn open(directory: &Path, address: &str, key: Key, most: Option<u64>) -> Option<Cache> {
        match Cache::try_open(directory, address, key, most) {
            Ok(cache) => cache,
            Err(error) => {
                tracing::info!("nothing is kept on disk: {}: {error}", directory.display());
                None
            }
        }
    }

    fn try_open(directory: &Path, address: &str, key: Key, most: Option<u64>) -> io::Result<Option<Cache>> {
        make(directory)?;
        let directory = private(directory)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = File::from(openat(&directory, file_of(address), flags, Mode::RUSR | Mode::WUSR)?);
        let metadata = file.metadata()?;
        if !is_own(&metadata) {
            return Err(io::Error::other("the cache is not a file of this user's alone"));
        }
        // Another mount of the archive goes without.
        if file.try_lock().is_err() {
            return Ok(None);
        }
        let host = rustix::fs::fstatvfs(&directory)?;
        let free = host.f_bavail.saturating_mul(host.f_frsize).saturating_add(metadata.blocks() * 512);
        let places_of = |bytes: u64| bytes.saturating_sub(HEAD) / (SLOT + ENTRY) / WAYS * WAYS;
        let wanted = places_of(most.unwrap_or_else(|| (free / 10).min(MOST)));
        let found = read_head(&file).filter(|(found, _)| *found == key).map(|(_, places)| places);
        // What is free changes from one mount to the next, and is no reason to begin anew.
        let found = found.filter(|places| match most {
            Some(_) => *places == wanted,
            None => *places > 0 && *places <= places_of(MOST) && places % WAYS == 0,
        });
        let places = found.unwrap_or(wanted);
        if places == 0 {
            return Ok(None);
        }
        let mut slots = vec![0; usize::try_from(places).map_err(io::Error::other)?];
        if found.is_some() && metadata.len() == length(places) {
            let mut table = vec![0; slots.len() * ENTRY as usize];
            file.read_exact_at(&mut table, HEAD)?;
            for (slot, entry) in slots.iter_mut().zip(table.chunks_exact(ENTRY as usize)) {
                *slot = u64::from_le_bytes(entry[..8].try_into().unwrap_or_default());
            }
        } else {
            file.set_len(0)?;
            file.set_len(length(places))?;
            file.write_all_at(&head(&key, places), 0)?;
        }
        // At each opening, so that the file's time tells when it was used last.
        file.write_all_at(&named(address), NAMED)?;
        let used = vec![0; slots.len()];
        let table = Mutex::new(Table { slots, used, clock: 0 });
        Ok(Some(Cache { file, places, table, off: AtomicBool::new(false), hits: AtomicU64::new(0) }))
    }

    /// Whether there is something of the slot: whether it is whole and of which label only [`Cache::get`] tells.
    pub(crate) fn has(&self, slot: u64) -> bool {
        let set = self.set(slot);
        self.table.lock().slots[set as usize..(set + WAYS) as usize].contains(&(slot + 1))
    }

    /// Fills `out` with the slot when it is there, whole, and of this label.
    pub(crate) fn get(&self, slot: u64, label: &Label, out: &mut [u8]) -> bool {
        let Some(place) = self.table.lock().find(self.set(slot), slot) else { return false };
        let mut entry = [0; ENTRY as usize];
        let read = self.file.read_exact_at(&mut entry, HEAD + place * ENTRY);
        let read = read.and_then(|()| self.file.read_exact_at(out, self.place(place)));
        let whole = read.is_ok() && entry == self::entry(slot, label, out);
        if whole {
            self.hits.fetch_add(1, Ordering::Relaxed);
        } else {
            self.table.lock().forget(place, slot);
        }
        whole
    }

    /// Keeps the slot. Readers of the place that it takes find a wrong sum, or the old slot with its sum.
    pub(crate) fn put(&self, slot: u64, label: &Label, bytes: &[u8]) {
        if self.off.load(Ordering::Relaxed) || bytes.len() as u64 > SLOT {
            return;
        }
        // Held over the writes: two slots that take one place would leave the table of one and the content of the other.
        let mut table = self.table.lock();
        let place = table.take(self.set(slot), slot);
        let written = self.file.write_all_at(bytes, self.place(place));
        let written = written.and_then(|()| self.file.write_all_at(&entry(slot, label, bytes), HEAD + place * ENTRY));
        if let Err(error) = written {
            table.forget(place, slot);
            self.off.store(true, Ordering::Relaxed);
            tracing::warn!("nothing more is kept on disk: {error}");
        }
    }

    /// Forgets slots that are not what they should be.
    pub(crate) fn forget(&self, slots: &Range<u64>) {
        let gone = |slot: &u64| slot.checked_sub(1).is_some_and(|slot| slots.contains(&slot));
        self.table.lock().slots.iter_mut().filter(|slot| gone(slot)).for_each(|slot| *slot = 0);
    }

    /// Slots that came from here.
    pub(crate) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// The first of the places that the slot may lie in. Neighbours lie side by side, so that a disk reads them in one go.
    fn set(&self, slot: u64) -> u64 {
        slot % (self.places / WAYS) * WAYS
    }

    /// Ways of a set lie far from each other, those of neighbours side by side.
    fn place(&self, place: u64) -> u64 {
        let (set, way) = (place / WAYS, place % WAYS);
        HEAD + self.places * ENTRY + (way * (self.places / WAYS) + set) * SLOT
    }
}

impl Table {
    fn find(&mut self, set: u64, slot: u64) -> Option<u64> {
        let place = (set..set + WAYS).find(|place| self.slots[*place as usize] == slot + 1)?;
        self.touch(place);
        Some(place)
    }

    fn take(&mut self, set: u64, slot: u64) -> u64 {
        let place = self.find(set, slot);
        let oldest =
            || (set..set + WAYS).min_by_key(|place| (self.slots[*place as usize] != 0, self.used[*place as usize]));
        let place = place.or_else(oldest).unwrap_or(set);
        self.slots[place as usize] = slot + 1;
        self.touch(place);
        place
    }

    fn touch(&mut self, place: u64) {
        self.clock = self.clock.wrapping_add(1);
        self.used[place as usize] = self.clock;
    }

    fn forget(&mut self, place: u64, slot: u64) {
        if self.slots[place as usize] == slot + 1 {
            self.slots[place as usize] = 0;
        }
    }
}

/// Magic, version, key, count of places.
fn head(key: &Key, places: u64) -> [u8; NAMED as usize] {
    let mut head = [0; NAMED as usize];
    head[..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..44].copy_from_slice(key);
    head[44..].copy_from_slice(&places.to_le_bytes());
    head
}

fn read_head(file: &File) -> Option<(Key, u64)> {
    let mut found = [0; NAMED as usize];
    file.read_exact_at(&mut found, 0).ok()?;
    let key = found[12..44].try_into().ok()?;
    let places = u64::from_le_bytes(found[44..].try_into().ok()?);
    (found == head(&key, places)).then_some((key, places))
}

fn length(places: u64) -> u64 {
    HEAD + places * (ENTRY + SLOT)
}

fn entry(slot: u64, label: &Label, bytes: &[u8]) -> [u8; ENTRY as usize] {
    let mut sum = Xxh3Default::new();
    sum.update(&slot.to_le_bytes());
    sum.update(label);
    sum.update(bytes);
    let mut entry = [0; ENTRY as usize];
    entry[..8].copy_from_slice(&(slot + 1).to_le_bytes());
    entry[8..24].copy_from_slice(&sum.digest128().to_le_bytes());
    entry
}

/// What the cache of an address is called.
pub(crate) fn file_of(address: &str) -> String {
    hex(&Sha256::digest(address.as_bytes())[..16]) + SUFFIX
}

/// The address as it stands behind the head: nothing of one that has no room.
fn named(address: &str) -> Vec<u8> {
    let bytes = if NAMED as usize + 2 + address.len() <= HEAD as usize { address.as_bytes() } else { &[] };
    [&(bytes.len() as u16).to_le_bytes(), bytes].concat()
}

/// The address that a cache of this name is of, where it says so.
pub(crate) fn address_in(file: &File, name: &str) -> Option<String> {
    let mut length = [0; 2];
    file.read_exact_at(&mut length, NAMED).ok()?;
    let length = usize::from(u16::from_le_bytes(length));
    let mut bytes = vec![0; (length <= HEAD as usize).then_some(length)?];
    file.read_exact_at(&mut bytes, NAMED + 2).ok()?;
    // Half of it may have been written, or it may be of an older program.
    String::from_utf8(bytes).ok().filter(|address| file_of(address) == name)
}

/// Whether it is a file that this user alone gave its content.
pub(crate) fn is_own(metadata: &Metadata) -> bool {
    metadata.is_file() && metadata.nlink() == 1 && metadata.uid() == rustix::process::geteuid().as_raw()
}

/// The file of this name, to be looked at; None when there is none, or something else.
pub(crate) fn own(directory: &OwnedFd, name: &str) -> io::Result<Option<(File, Metadata)>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match openat(directory, name, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        // A link, a socket, or removed meanwhile.
        Err(Errno::LOOP | Errno::NXIO | Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let metadata = file.metadata()?;
    Ok(is_own(&metadata).then_some((file, metadata)))
}

/// What is said when a directory of what this user keeps cannot be looked at.
pub(crate) fn unseen(directory: &Path, error: io::Error) -> Error {
    let directory = lockbox_terminal::display(directory.as_os_str().as_encoded_bytes());
    Error::io(format!("cannot look at what is kept in {directory}"), error)
}

pub(crate) fn make(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// The directory. What lies in one that others own or write to could be a link to anywhere.
pub(crate) fn private(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::statat(&directory, "", AtFlags::EMPTY_PATH)?;
    if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_mode & 0o022 != 0 {
        return Err(io::Error::other("the directory is not this user's alone"));
    }
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LABEL: Label = [7; 32];

    fn slot(number: u64) -> Vec<u8> {
        (0..SLOT).map(|at| (at.wrapping_mul(31) ^ number) as u8).collect()
    }

    fn open(place: &Path, key: u8, most: u64) -> Cache {
        Cache::try_open(&place.join("c"), "a", [key; 32], Some(most)).unwrap().unwrap()
    }

    fn has(cache: &Cache, number: u64) -> bool {
        let mut out = vec![0; SLOT as usize];
        let found = cache.get(number, &LABEL, &mut out);
        assert!(!found || out == slot(number), "slot {number} is not what was put");
        found
    }

    #[test]
    fn what_was_kept_is_there_after_a_restart_and_not_under_another_key() {
        let place = tempfile::tempdir().unwrap();
        let cache = open(place.path(), 1, 8 << 20);
        (0..20).for_each(|number| cache.put(number, &LABEL, &slot(number)));
        cache.put(77, &LABEL, &slot(77)[..1000]);
        assert!(Cache::try_open(&place.path().join("c"), "a", [1; 32], Some(8 << 20)).unwrap().is_none(), "it is used");
        drop(cache);
        let cache = open(place.path(), 1, 8 << 20);
        assert!((0..20).all(|number| has(&cache, number)) && !has(&cache, 20));
        let mut short = vec![0; 1000];
        assert!(cache.get(77, &LABEL, &mut short) && short == slot(77)[..1000]);
        drop(cache);
        let cache = open(place.path(), 2, 8 << 20);
        assert!((0..20).all(|number| !has(&cache, number)));
    }

    #[test]
    fn a_slot_of_another_version_is_one_that_is_not_there() {
        let place = tempfile::tempdir().unwrap();
        let cache = open(place.path(), 1, 8 << 20);
        cache.put(3, &LABEL, &slot(3));
        assert!(!cache.get(3, &[8; 32], &mut vec![0; SLOT as usize]));
        cache.put(3, &[8; 32], &slot(4));
        let mut out = vec![0; SLOT as usize];
        assert!(cache.get(3, &[8; 32], &mut out) && out == slot(4));
        assert!(!has(&cache, 3));
    }

    #[test]
    fn it_never_outgrows_its_size_and_keeps_what_is_used() {
        let place = tempfile::tempdir().unwrap();
        let most = 4 << 20;
        let cache = open(place.path(), 1, most);
        for number in 0..1000 {
            cache.put(number, &LABEL, &slot(number));
            assert!(has(&cache, number));
            assert!(has(&cache, 0), "after {number}");
        }
        assert!(cache.file.metadata().unwrap().len() <= most);
        let kept = (0..1000).filter(|number| has(&cache, *number)).count() as u64;
        assert_eq!(kept, cache.places);
    }

    /// Each byte of the file in turn would take long; each that is looked at by itself is one of every kind.
    #[test]
    fn a_torn_slot_is_not_there() {
        let place = tempfile::tempdir().unwrap();
        let cache = open(place.path(), 1, 1 << 20);
        cache.put(5, &LABEL, &slot(5));
        let at = (0..cache.places).find(|at| cache.table.lock().slots[*at as usize] == 6).unwrap();
        let places: Vec<u64> =
            [HEAD + at * ENTRY, HEAD + at * ENTRY + 31, cache.place(at), cache.place(at) + SLOT - 1].into();
        drop(cache);
        for byte in places {
            let path = place.path().join("c").join(file_of("a"));
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let mut old = [0];
            file.read_exact_at(&mut old, byte).unwrap();
            file.write_all_at(&[old[0] ^ 1], byte).unwrap();
            assert!(!has(&open(place.path(), 1, 1 << 20), 5), "byte {byte}");
            file.write_all_at(&old, byte).unwrap();
            assert!(has(&open(place.path(), 1, 1 << 20), 5));
        }
    }

    #[test]
    fn what_others_can_write_to_is_not_used() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let place = tempfile::tempdir().unwrap();
        let (open, victim) = (place.path().join("open"), place.path().join("victim"));
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Cache::try_open(&open, "a", [1; 32], Some(1 << 20)).is_err());
        let own = place.path().join("own");
        std::fs::write(&victim, b"precious").unwrap();
        std::fs::create_dir(&own).unwrap();
        symlink(&victim, own.join(file_of("a"))).unwrap();
        assert!(Cache::try_open(&own, "a", [1; 32], Some(1 << 20)).is_err());
        std::fs::hard_link(&victim, own.join(file_of("b"))).unwrap();
        assert!(Cache::try_open(&own, "b", [1; 32], Some(1 << 20)).is_err());
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    }
}
