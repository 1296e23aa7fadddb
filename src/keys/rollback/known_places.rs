//! Remembers which archive a user opened at which place, so that another archive put there is
//! noticed.
//!
//! An attacker that controls the storage and knows a public key of the user (an SSH key, an age
//! recipient) can make an archive that the user's private key opens. Of two archives with one
//! passphrase the attacker can put either in the other's place. Both are authentic archives: only a
//! memory outside of the storage tells that they are not the expected one.
//!
//! # Invariants
//! PLACE-1  A place is a name by which a command reached an archive: an address, or a path. Each
//!     symbolic link on the way of a path makes one more name, with everything before the link
//!     resolved and everything from it on as it was. So an attacker that replaces a file or a
//!     directory by a link cannot lead a command past the names that are remembered. All names of a
//!     command are compared and remembered alike.
//! PLACE-2  Archives are distinguished by their [`Fingerprint`], which is derived from the volume
//!     key. The archive id does not count: it stands in the clear, so an attacker can copy it into
//!     another archive.
//! PLACE-3  One place has one archive. An archive that contradicts that is refused, whichever kind
//!     of secret opened it, and the memory stays as it is; an archive that is accepted takes the
//!     place of the one remembered. A place that is not known is remembered when the archive there
//!     was admitted.
//! PLACE-4  Commands that put another archive in place themselves (`create`, `key rekey`) remember
//!     the new fingerprint in addition to the old one before the new archive has its name, and
//!     alone afterwards. So a crash at any moment leaves a memory that the archive at the place
//!     does not contradict.
//! PLACE-5  An archive with another volume key and the same id is the same one, if its history
//!     contains the commit that was remembered, after a `key rekey` of another user or machine. The
//!     id of the session in that commit is random and sealed: only a holder of a key can have put
//!     it into a history. An archive with a fingerprint that is remembered needs no such proof.
//! PLACE-6  Losing a file of the memory, or finding one altered, makes the place unknown and costs
//!     one warning. It never keeps an archive from being opened, and raises no alarm (as SEEN-4).
//!
//! Before an archive is open there is no key of it, and the previous archive here has another key.
//! So this part of the memory is sealed under a random key of the user that lies in the same
//! directory. A reader of the whole directory can find out whether a guessed place is in it, and
//! then which archive was there. A writer of the directory can make the user forget; that is the
//! most, as a forged entry only makes an archive known or raises an alarm.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use lockbox_terminal::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{MARK, RollbackOptions, SealedFile, mark_at, open_directory, put_mark, read_in, write_in};
use crate::crypto::SecretKey;
use crate::crypto::aead::XaesKey;
use crate::crypto::kdf::hkdf;
use crate::env::{Environment, SystemEnvironment};
use crate::error::{Error, Result, Timestamp};
use crate::format::{ArchiveId, array_at, u64_at};
use crate::txn::{Ancestry, Mark, Volume};

/// Label of the fingerprint, which is derived from the volume key.
const FINGERPRINT_LABEL: &str = "lockbox/v1/fingerprint";
/// Label of the key that seals the memory of places, derived from the user's random key; associated
/// data begin with it.
const KEY_LABEL: &str = "lockbox/v1/place";
const NAME_LABEL: &str = "lockbox/v1/place/name";
/// The file with the user's random key.
const KEY_FILE: &str = "places.key";
/// Age from which the remembered part of the history is brought up to date: 4,096 sessions, which a
/// history has, take longer.
const REFRESH_SECONDS: i64 = 86_400;

/// A name by which a command reached an archive (PLACE-1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceName(Vec<u8>);

impl PlaceName {
    /// A path as it is; the caller has made it absolute.
    pub fn of_path(path: &Path) -> PlaceName {
        PlaceName([&b"path\0"[..], path.as_os_str().as_bytes()].concat())
    }

    /// A directory with the objects of an archive.
    pub fn of_directory(path: &Path) -> PlaceName {
        PlaceName([&b"directory\0"[..], path.as_os_str().as_bytes()].concat())
    }

    /// An address in its only spelling.
    pub fn of_address(address: &str) -> PlaceName {
        PlaceName([&b"address\0"[..], address.as_bytes()].concat())
    }

    /// For messages.
    fn text(&self) -> String {
        let text = self.0.splitn(2, |&byte| byte == 0).nth(1).unwrap_or_default();
        lockbox_terminal::display(text)
    }
}

/// Identity of an archive: derived from the volume key, so that an attacker without the key cannot
/// make an archive that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint([u8; 16]);

impl Fingerprint {
    pub(crate) fn new(volume_key: &SecretKey, archive: &ArchiveId) -> Fingerprint {
        Fingerprint(array_at(hkdf(volume_key, archive, FINGERPRINT_LABEL).bytes(), 0))
    }

    /// Parses the digits that [`Display`](std::fmt::Display) wrote.
    pub fn parse(digits: &str) -> Option<Fingerprint> {
        let value = u128::from_str_radix(digits, 16).ok()?;
        (digits.len() == 32 && !digits.starts_with('+')).then(|| Fingerprint(value.to_be_bytes()))
    }
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&hex(&self.0))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(super) time: Timestamp,
    pub(super) archive: ArchiveId,
    /// A commit of it (PLACE-5).
    pub(super) mark: Option<Mark>,
    /// Fingerprint of the archive, and of the one that replaces it (PLACE-4).
    pub(super) fingerprints: Vec<Fingerprint>,
}

/// Version u8, number of fingerprints u8, 1 with a mark u8, zero (5), time 12, zero u32, archive id
/// (16), mark (48).
const HEAD: usize = 88;
const FINGERPRINT: usize = 16;
const MOST_FINGERPRINTS: usize = 2;
const VERSION: u8 = 1;

impl Known {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION, self.fingerprints.len() as u8, u8::from(self.mark.is_some()), 0, 0, 0, 0, 0]; // one or two
        out.extend_from_slice(&self.time.seconds.to_le_bytes());
        out.extend_from_slice(&self.time.nanos.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.archive);
        match &self.mark {
            Some(mark) => put_mark(&mut out, mark),
            None => out.extend_from_slice(&[0; MARK]),
        }
        self.fingerprints.iter().for_each(|fingerprint| out.extend_from_slice(&fingerprint.0));
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Known> {
        let malformed = || Error::damaged("the memory of the place does not decode");
        let (head, rest) = bytes.split_first_chunk::<HEAD>().ok_or_else(malformed)?;
        let count = usize::from(head[1]);
        let right = head[0] == VERSION && (1..=MOST_FINGERPRINTS).contains(&count) && head[2] <= 1;
        if !right || rest.len() != count * FINGERPRINT {
            return Err(malformed());
        }
        Ok(Known {
            time: Timestamp { seconds: u64_at(head, 8) as i64, nanos: u64_at(head, 16) as u32 },
            archive: array_at(head, 24),
            mark: (head[2] == 1).then(|| mark_at(head, 40)),
            fingerprints: rest.chunks_exact(FINGERPRINT).map(|chunk| Fingerprint(array_at(chunk, 0))).collect(),
        })
    }
}

struct Place {
    name: PlaceName,
    file: SealedFile,
    known: Option<Known>,
}

/// The places of a command, with the archive that it opens there. Without places nothing is
/// compared and nothing remembered.
pub(crate) struct KnownPlaces {
    places: Vec<Place>,
    archive: ArchiveId,
    pub(super) fingerprint: Fingerprint,
}

impl Default for KnownPlaces {
    fn default() -> KnownPlaces {
        KnownPlaces { places: Vec::new(), archive: [0; 16], fingerprint: Fingerprint([0; 16]) }
    }
}

/// Facts about the opening of an archive on which a refusal depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Opened {
    /// By a secret with a public half that is enough to make an archive that it opens.
    pub(crate) by_recipient: bool,
    /// This user opened the archive before, at any place.
    pub(crate) before: bool,
}

impl KnownPlaces {
    /// Failures of reading cost one warning (PLACE-6).
    pub(crate) fn at(options: &RollbackOptions, volume_key: &SecretKey, archive: &ArchiveId) -> KnownPlaces {
        KnownPlaces::of(options, *archive, Fingerprint::new(volume_key, archive))
    }

    fn of(options: &RollbackOptions, archive: ArchiveId, fingerprint: Fingerprint) -> KnownPlaces {
        let places = places(options).unwrap_or_else(|error| {
            tracing::warn!("{}; another archive in the place of this one would not be noticed", error.with_cause());
            Vec::new()
        });
        KnownPlaces { places, archive, fingerprint }
    }

    pub(crate) fn are_new(&self) -> bool {
        !self.places.is_empty() && self.places.iter().all(|place| place.known.is_none())
    }

    /// Compares the archive with the memory of its places. `volume` is its commits, where they
    /// could be opened. Errors: `Replaced` unless that is accepted.
    pub(crate) fn judge(&self, options: &RollbackOptions, volume: Option<&Volume>, opened: Opened) -> Result<()> {
        let contradicted = self.places.iter().find_map(|place| {
            place.known.as_ref().filter(|known| !self.is_same(known, volume)).map(|known| (&place.name, known))
        });
        let Some((name, known)) = contradicted else { return Ok(()) };
        // From before a `key rekey` that this user saw: that is an older copy, and judged as one.
        if options.accept_older && opened.before && known.archive == self.archive {
            return Ok(());
        }
        let facts = self.facts(name, known);
        if options.accept_other {
            tracing::warn!("{facts}: accepted as asked");
            return Ok(());
        }
        Err(Error::Replaced(format!("{facts}. {}", self.causes(known, opened))))
    }

    fn is_same(&self, known: &Known, volume: Option<&Volume>) -> bool {
        if known.fingerprints.contains(&self.fingerprint) {
            return true;
        }
        // PLACE-5
        known.archive == self.archive
            && known.mark.zip(volume).is_some_and(|(mark, volume)| {
                volume.descent_from(&mark).is_ok_and(|descent| descent == Ancestry::Descendant)
            })
    }

    fn facts(&self, name: &PlaceName, known: &Known) -> String {
        let before = known.fingerprints.first().map(Fingerprint::to_string).unwrap_or_default();
        format!(
            "at {} this user had the archive with the fingerprint {before} (last compared on {} UTC), and now there is one with the fingerprint {}",
            name.text(),
            known.time.utc(),
            self.fingerprint
        )
    }

    /// Separates the possible acts of the user from the possible acts of an attacker, in a
    /// sentence.
    fn causes(&self, known: &Known, opened: Opened) -> String {
        let own = match (known.archive == self.archive, opened.before) {
            (true, _) => {
                "It has the same id and another volume key. If you restored a copy from before a 'key rekey', all is well"
            }
            (false, true) => {
                "This user opened it before, at another place. If you moved or copied it here, or turned a link to it, all is well"
            }
            (false, false) => "If you put it here yourself, by other means than lockbox, all is well",
        };
        let public = match opened.by_recipient {
            true => "; a public key is enough to make an archive that yours opens",
            false => "",
        };
        format!(
            "{own}. If not, an attacker with access to the storage exchanged the archive{public}: add nothing to it"
        )
    }

    /// Remembers the admitted archive at its places (PLACE-3). Failing costs one warning.
    pub(crate) fn remember(&self, volume: Option<&Volume>) {
        let now = SystemEnvironment.now();
        let mark = volume.and_then(Volume::durable_point).map(|point| point.mark);
        let known = Known { time: now, archive: self.archive, mark, fingerprints: vec![self.fingerprint] };
        let is_current = |known: &Known| {
            let age = now.seconds.saturating_sub(known.time.seconds);
            known.fingerprints == [self.fingerprint]
                && (0..REFRESH_SECONDS).contains(&age)
                && (known.mark.is_some() || mark.is_none())
        };
        let stale = self.places.iter().filter(|place| !place.known.as_ref().is_some_and(is_current));
        self.save(stale.map(|place| (place, known.clone())));
    }

    /// Remembers that this archive is about to take the place of the one remembered, if there is
    /// one (PLACE-4).
    pub(crate) fn announce(&self) {
        let announced = self.places.iter().filter_map(|place| {
            let mut known = place.known.clone()?;
            known.fingerprints.truncate(1);
            if known.fingerprints[0] != self.fingerprint {
                known.fingerprints.push(self.fingerprint);
            }
            Some((place, known))
        });
        self.save(announced);
    }

    fn save<'a>(&self, known: impl Iterator<Item = (&'a Place, Known)>) {
        for (place, known) in known {
            if let Err(error) = place.file.save(known.encode(), &SystemEnvironment) {
                tracing::warn!(
                    "{}; another archive in the place of this one would not be noticed later",
                    error.with_cause()
                );
                return;
            }
        }
    }
}

/// Remembers an archive that the user's own command put at the places, in place of the one that was
/// there before.
pub fn remember_place(options: &RollbackOptions, archive: ArchiveId, fingerprint: Fingerprint) {
    KnownPlaces::of(options, archive, fingerprint).remember(None);
}

/// Returns whether an archive is remembered at one of the places.
pub fn is_known_place(options: &RollbackOptions) -> bool {
    // Without the memory every place is new (PLACE-6).
    places(options).is_ok_and(|places| places.iter().any(|place| place.known.is_some()))
}

/// Errors: `Io` and `Damaged` of the user's key. An altered file of one place is a warning, and the
/// place is unknown.
fn places(options: &RollbackOptions) -> Result<Vec<Place>> {
    let Some(directory) = options.directory.as_deref().filter(|_| !options.places.is_empty()) else {
        return Ok(Vec::new());
    };
    // A failure to remember is reported with the rollback state of the archive itself.
    let Ok(opened) = open_directory(directory) else { return Ok(Vec::new()) };
    let Some(key) = user_key(&opened, directory)? else { return Ok(Vec::new()) };
    let place = |name: &PlaceName| {
        let digest: [u8; 32] = Sha256::digest(&name.0).into();
        let name_digits = hex(&hkdf(&key, &digest, NAME_LABEL).bytes()[..16]);
        let aad = [KEY_LABEL.as_bytes(), &digest].concat();
        let sealing = XaesKey::new(&hkdf(&key, &[], KEY_LABEL));
        let file = SealedFile::new(directory, format!("{name_digits}.place"), sealing, aad);
        let loaded = file.load(HEAD + MOST_FINGERPRINTS * FINGERPRINT);
        let known = loaded.and_then(|plain| plain.map(|plain| Known::decode(&plain)).transpose());
        let known = known.unwrap_or_else(|error| {
            tracing::warn!("{}; another archive in the place of this one would not be noticed", error.with_cause());
            None
        });
        Place { name: name.clone(), file, known }
    };
    Ok(options.places.iter().map(place).collect())
}

/// The user's random key; made at the first use. None where it cannot be made, as on a read-only
/// file system.
fn user_key(directory: &OwnedFd, path: &Path) -> Result<Option<SecretKey>> {
    let path = path.join(KEY_FILE);
    let name = path.display();
    let failed = |e: io::Error| Error::io(format!("cannot read {name}"), e);
    let read = || read_in(directory, KEY_FILE, 32).map_err(failed);
    let mut bytes = read()?;
    if bytes.is_none() {
        let mut fresh = zeroize::Zeroizing::new([0; 32]);
        let mut random = [0; 8];
        SystemEnvironment.fill_random(&mut *fresh)?;
        SystemEnvironment.fill_random(&mut random)?;
        match write_in(directory, KEY_FILE, &random, &*fresh, false) {
            // Another process may have made it meanwhile: the first one counts.
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                tracing::warn!(
                    "cannot write {name}: {error}; another archive in the place of this one would not be noticed later"
                );
                return Ok(None);
            }
        }
        bytes = read()?;
    }
    let bytes = bytes.map(zeroize::Zeroizing::new).unwrap_or_default();
    let key = <[u8; 32]>::try_from(&bytes[..])
        .map_err(|_| Error::damaged(format!("{name} was altered; remove it and the files *.place next to it")))?;
    Ok(Some(SecretKey::new(key)))
}
