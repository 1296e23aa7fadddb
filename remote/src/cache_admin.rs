//! Lists and deletes disk caches of remote archives.
//!
//! All access goes through the descriptor of the user's private directory; links and files with
//! another owner or name are skipped. A cache is unlinked by its name and not modified: a mount
//! that has it open keeps using it, and the space is freed when the last user closes it. A
//! concurrent open creates a new file.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::time::SystemTime;

use lockbox::{Error, Result};
use rustix::fs::{AtFlags, Dir, unlinkat};

use crate::RemoteOptions;
use crate::address::Address;
use crate::cache::{SUFFIX, address_in, cache_file_name, cannot_read_dir, open_own_file, open_private_dir};

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
    let Some(directory) = directory(options)? else { return Ok(Vec::new()) };
    let failed = |error: io::Error| failed(options, error);
    let mut found = Vec::new();
    for dir_entry in Dir::read_from(&directory).map_err(|error| failed(error.into()))? {
        let dir_entry = dir_entry.map_err(|error| failed(error.into()))?;
        if let Some(name) = name_of(dir_entry.file_name())
            && let Some((_, entry)) = inspect(&directory, name).map_err(failed)?
        {
            found.push(entry);
        }
    }
    found.sort_by(|one, other| (&one.address, &one.file).cmp(&(&other.address, &other.file)));
    Ok(found)
}

/// Deletes the cache of the archive at `address`, or all caches. Returns the deleted caches, each
/// with whether it is still in use.
///
/// # Errors
/// As of [`cache_entries`].
pub fn remove_cache_entries(options: &RemoteOptions, address: Option<&Address>) -> Result<Vec<(CacheEntry, bool)>> {
    let Some(directory) = directory(options)? else { return Ok(Vec::new()) };
    let names = match address {
        Some(address) => vec![cache_file_name(&address.to_string())],
        None => cache_entries(options)?.into_iter().map(|entry| entry.file).collect(),
    };
    let mut removed = Vec::new();
    for name in names {
        let Some((file, mut entry)) = inspect(&directory, &name).map_err(|error| failed(options, error))? else {
            continue;
        };
        match unlinkat(&directory, &*name, AtFlags::empty()) {
            Ok(()) => {}
            // Another process removed it.
            Err(rustix::io::Errno::NOENT) => continue,
            Err(error) => return Err(failed(options, error.into())),
        }
        if let Some(address) = address {
            entry.address = Some(address.to_string());
        }
        // The name is gone, so this lock cannot keep another process from opening the cache.
        removed.push((entry, file.try_lock().is_err()));
    }
    Ok(removed)
}

fn directory(options: &RemoteOptions) -> Result<Option<OwnedFd>> {
    let Some(path) = &options.cache_directory else { return Ok(None) };
    match open_private_dir(path) {
        Ok(directory) => Ok(Some(directory)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(options, error)),
    }
}

fn failed(options: &RemoteOptions, error: io::Error) -> Error {
    cannot_read_dir(options.cache_directory.as_deref().unwrap_or("".as_ref()), error)
}

/// Returns the name if it is one of a cache.
fn name_of(name: &CStr) -> Option<&str> {
    let name = name.to_str().ok()?;
    let digits = name.strip_suffix(SUFFIX)?;
    let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
    (digits.len() == HEX_DIGITS && digits.bytes().all(is_digit)).then_some(name)
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
    use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
    use std::path::Path;

    use super::*;
    use crate::cache::DiskCache;
    use crate::range_source::RangeKey;
    use crate::slot_cache::SLOT;

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
        drop(fill(directory.path(), OTHER, 5));
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
