//! What is kept on disk of archives elsewhere, for those who want to see it or to have the space back.
//!
//! All of it goes through the descriptor of the directory, which is this user's alone, and what is a link, or has another owner or name, is passed over. A cache is
//! removed by its name, and nothing in it is changed: whoever reads from it, as a mount does, has it open and goes on with it, and the space comes back when the
//! last one ends. An opening that comes between finds no file and makes a new one.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::time::SystemTime;

use lockbox::{Error, Result};
use rustix::fs::{AtFlags, Dir, unlinkat};

use crate::Options;
use crate::address::Address;
use crate::cache::{SUFFIX, address_in, file_of, own, private, unseen};

/// Bytes of a cache's name before the suffix.
const DIGITS: usize = 32;

/// What is kept of one archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The name of the file.
    pub file: String,
    /// None where the file does not say it.
    pub address: Option<String>,
    /// What it takes of the disk.
    pub bytes: u64,
    /// What it may take.
    pub most: u64,
    /// When it was opened or written last.
    pub used: SystemTime,
}

/// What is kept, by address; nothing where there is no directory for it.
///
/// # Errors
/// Those of the host; a directory that others own or can write to is none of ours.
pub fn kept(options: &Options) -> Result<Vec<Kept>> {
    let Some(directory) = directory(options)? else { return Ok(Vec::new()) };
    let failed = |error: io::Error| failed(options, error);
    let mut found = Vec::new();
    for entry in Dir::read_from(&directory).map_err(|error| failed(error.into()))? {
        let entry = entry.map_err(|error| failed(error.into()))?;
        if let Some(name) = name_of(entry.file_name())
            && let Some((_, kept)) = look(&directory, name).map_err(failed)?
        {
            found.push(kept);
        }
    }
    found.sort_by(|one, other| (&one.address, &one.file).cmp(&(&other.address, &other.file)));
    Ok(found)
}

/// Removes what is kept of the archive at `address`, or of all of them. Gives what was removed, and of each whether somebody uses it still.
///
/// # Errors
/// As of [`kept`].
pub fn remove_kept(options: &Options, address: Option<&Address>) -> Result<Vec<(Kept, bool)>> {
    let Some(directory) = directory(options)? else { return Ok(Vec::new()) };
    let names = match address {
        Some(address) => vec![file_of(&address.to_string())],
        None => kept(options)?.into_iter().map(|kept| kept.file).collect(),
    };
    let mut removed = Vec::new();
    for name in names {
        let Some((file, mut kept)) = look(&directory, &name).map_err(|error| failed(options, error))? else { continue };
        match unlinkat(&directory, &*name, AtFlags::empty()) {
            Ok(()) => {}
            // Somebody else removed it.
            Err(rustix::io::Errno::NOENT) => continue,
            Err(error) => return Err(failed(options, error.into())),
        }
        if let Some(address) = address {
            kept.address = Some(address.to_string());
        }
        // Nobody opens it any more, so nobody is kept from using it by this.
        removed.push((kept, file.try_lock().is_err()));
    }
    Ok(removed)
}

fn directory(options: &Options) -> Result<Option<OwnedFd>> {
    let Some(path) = &options.cache_directory else { return Ok(None) };
    match private(path) {
        Ok(directory) => Ok(Some(directory)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(options, error)),
    }
}

fn failed(options: &Options, error: io::Error) -> Error {
    unseen(options.cache_directory.as_deref().unwrap_or("".as_ref()), error)
}

/// The name when it is one of a cache.
fn name_of(name: &CStr) -> Option<&str> {
    let name = name.to_str().ok()?;
    let digits = name.strip_suffix(SUFFIX)?;
    let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
    (digits.len() == DIGITS && digits.bytes().all(is_digit)).then_some(name)
}

/// The cache of this name; None when there is none, or something else.
fn look(directory: &OwnedFd, name: &str) -> io::Result<Option<(File, Kept)>> {
    let Some((file, metadata)) = own(directory, name)? else { return Ok(None) };
    let kept = Kept {
        file: name.to_owned(),
        address: address_in(&file, name),
        bytes: metadata.blocks() * 512,
        most: metadata.len(),
        used: metadata.modified()?,
    };
    Ok(Some((file, kept)))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;
    use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
    use std::path::Path;

    use super::*;
    use crate::cache::Cache;
    use crate::range_source::Label;
    use crate::slot_cache::SLOT;

    const ONE: &str = "https://example.org/one.lbx";
    const OTHER: &str = "s3://bucket/other";

    fn at(place: &Path) -> Options {
        Options { cache_directory: Some(place.to_owned()), ..Options::default() }
    }

    fn fill(place: &Path, address: &str, slots: u64) -> Cache {
        let cache = Cache::open(place, address, [1; 32], Some(8 << 20)).unwrap();
        (0..slots).for_each(|number| cache.put(number, &Label::default(), &vec![number as u8; SLOT as usize]));
        cache
    }

    fn address(text: &str) -> Address {
        Address::parse(OsStr::new(text)).unwrap().unwrap()
    }

    #[test]
    fn what_is_kept_is_listed_with_its_address_and_nothing_else_is() {
        let place = tempfile::tempdir().unwrap();
        let caches = place.path().join("caches");
        assert_eq!(kept(&at(&caches)).unwrap(), []);
        assert!(!caches.exists(), "who looks makes nothing");
        drop(fill(&caches, ONE, 3));
        drop(fill(&caches, OTHER, 20));
        let long = format!("s3://bucket/{}", "long".repeat(1100));
        drop(fill(&caches, &long, 1));
        // What is none: by its name, by what it is, by whom else it belongs to.
        fs::write(caches.join("notes.cache"), b"mine").unwrap();
        fs::write(place.path().join("precious"), b"precious").unwrap();
        symlink(place.path().join("precious"), caches.join(file_of("link"))).unwrap();
        fs::hard_link(place.path().join("precious"), caches.join(file_of("hard"))).unwrap();
        fs::create_dir(caches.join(file_of("directory"))).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            caches.join(file_of("fifo")),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        let found = kept(&at(&caches)).unwrap();
        let addresses: Vec<_> = found.iter().map(|kept| kept.address.as_deref()).collect();
        assert_eq!(addresses, [None, Some(ONE), Some(OTHER)], "{found:?}");
        assert_eq!(found[0].file, file_of(&long));
        assert!(found[1].bytes >= 3 * SLOT && found[2].bytes >= 20 * SLOT && found[1].bytes < found[2].bytes);
        assert!(found[1].most <= 8 << 20);
        // Of an older program, or torn: the name alone is not made up.
        fs::File::options().write(true).open(caches.join(file_of(ONE))).unwrap().write_all_at(b"\xff\xff", 52).unwrap();
        assert_eq!(kept(&at(&caches)).unwrap().iter().filter(|kept| kept.address.is_none()).count(), 2);
        // All that is removed is what was listed.
        assert_eq!(remove_kept(&at(&caches), None).unwrap().len(), 3);
        assert_eq!(kept(&at(&caches)).unwrap(), []);
        assert_eq!(fs::read_dir(&caches).unwrap().count(), 5);
        assert_eq!(fs::read(place.path().join("precious")).unwrap(), b"precious");
    }

    #[test]
    fn what_is_removed_under_its_reader_serves_it_to_the_end() {
        let place = tempfile::tempdir().unwrap();
        let reader = fill(place.path(), ONE, 5);
        drop(fill(place.path(), OTHER, 5));
        let removed = remove_kept(&at(place.path()), Some(&address(ONE))).unwrap();
        assert_eq!(removed.len(), 1);
        assert!(removed[0].1 && removed[0].0.address.as_deref() == Some(ONE), "{removed:?}");
        let has = |cache: &Cache, slot: u64| {
            let mut out = vec![0; SLOT as usize];
            cache.get(slot, &Label::default(), &mut out) && out == vec![slot as u8; SLOT as usize]
        };
        assert!((0..5).all(|slot| has(&reader, slot)));
        reader.put(9, &Label::default(), &vec![9; SLOT as usize]);
        assert!(has(&reader, 9));
        // Somebody else begins with an empty one.
        let next = Cache::open(place.path(), ONE, [1; 32], Some(8 << 20)).unwrap();
        assert!(!has(&next, 0));
        assert_eq!(remove_kept(&at(place.path()), Some(&address("s3://bucket/none"))).unwrap(), []);
        let removed = remove_kept(&at(place.path()), None).unwrap();
        let used: Vec<_> = removed.iter().map(|(kept, used)| (kept.address.as_deref().unwrap(), *used)).collect();
        assert_eq!(used, [(ONE, true), (OTHER, false)]);
    }

    #[test]
    fn in_a_directory_that_others_can_write_to_nothing_is_listed_or_removed() {
        let place = tempfile::tempdir().unwrap();
        let caches = place.path().join("caches");
        drop(fill(&caches, ONE, 1));
        fs::set_permissions(&caches, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(kept(&at(&caches)).is_err() && remove_kept(&at(&caches), None).is_err());
        assert!(remove_kept(&at(&caches), Some(&address(ONE))).is_err());
        fs::set_permissions(&caches, fs::Permissions::from_mode(0o700)).unwrap();
        symlink(&caches, place.path().join("link")).unwrap();
        assert!(remove_kept(&at(&place.path().join("link")), None).is_err());
        assert_eq!(kept(&at(&caches)).unwrap().len(), 1);
    }
}
