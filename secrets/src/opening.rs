//! The order in which secrets are tried: what the command line names, what the keyring keeps, what is asked for.

use std::fs::File;
use std::path::Path;

use crate::error::Error;
use crate::keyring::{Cache, Keyring};
use crate::{Bytes, Sources};

/// An archive that a program wants to open, with the secrets that it got so far.
pub trait Lock {
    type Key;
    type Failure: From<Error>;

    fn archive(&self) -> [u8; 16];

    /// The key that was kept; None when it does not open the archive, or not any more.
    fn accept(&self, kept: &[u8]) -> Option<Self::Key>;

    /// What is to be kept of a key.
    fn to_keep(&self, key: &Self::Key) -> Bytes;

    /// # Errors
    /// For what cannot be a key file.
    fn add_key_file(&mut self, content: File, name: &str) -> Result<(), Self::Failure>;

    /// # Errors
    /// For what has no identity in it, and identities that cannot be used.
    fn add_identities(&mut self, content: &[u8], name: &str) -> Result<(), Self::Failure>;

    /// # Errors
    /// For what is no recovery code.
    fn add_recovery_code(&mut self, code: &[u8]) -> Result<(), Self::Failure>;

    /// Also for what is a recovery code.
    fn add_passphrase(&mut self, passphrase: Bytes);

    /// Whether a key slot wants a key file and a passphrase together.
    fn wants_both(&self) -> bool;

    /// Tries all secrets; None when they are the wrong ones.
    ///
    /// # Errors
    /// Whatever else is wrong with the archive or the secrets.
    fn attempt(&self) -> Result<Option<Self::Key>, Self::Failure>;

    /// What to say when they are the wrong ones.
    fn wrong(&self) -> Self::Failure;
}

/// Opens `lock`, the archive at `path`, and keeps its key when the user wants that. The second value says why it could not be kept.
///
/// A key that is kept comes before everything but what the command line names. A key file or an identity is tried without a passphrase,
/// unless the command line names one too; when a slot wants both, the passphrase is got then.
///
/// # Errors
/// Those of the sources and the lock; before anything is asked, when a key is to be kept where none can be.
pub fn open<L: Lock>(
    lock: &mut L,
    path: &Path,
    sources: &Sources,
    cache: &Cache,
) -> Result<(L::Key, Option<Error>), L::Failure> {
    sources.check()?;
    let named = sources.any_named();
    let keyring = match cache.keyring_cache {
        Some(_) => Some(Keyring::open()?),
        None if named => None,
        // Without keyrings nothing is kept either.
        None => Keyring::open().ok(),
    };
    let key = match keyring.as_ref().filter(|_| !named).and_then(|keyring| kept(lock, keyring)) {
        Some(key) => key,
        None => ask(lock, path, sources)?,
    };
    let refused = match (&keyring, cache.keyring_cache) {
        (Some(keyring), Some(timeout)) => keyring.keep(&lock.archive(), &lock.to_keep(&key), timeout).err(),
        _ => None,
    };
    Ok((key, refused))
}

fn kept<L: Lock>(lock: &L, keyring: &Keyring) -> Option<L::Key> {
    let bytes = keyring.kept(&lock.archive())?;
    let key = lock.accept(&bytes);
    if key.is_none() {
        // The archive has another key since.
        let _ = keyring.forget(&lock.archive());
    }
    key
}

/// Opens `lock` with what the command line names or somebody types, and never with what is kept.
///
/// # Errors
/// As [`open`].
pub fn ask<L: Lock>(lock: &mut L, path: &Path, sources: &Sources) -> Result<L::Key, L::Failure> {
    gather(lock, path, sources)?;
    if let Some(key) = lock.attempt()? {
        return Ok(key);
    }
    let alone = sources.keyfile.is_some() && !sources.passphrase.any_named();
    if !alone || !lock.wants_both() {
        return Err(lock.wrong());
    }
    lock.add_passphrase(sources.passphrase.passphrase(path)?);
    lock.attempt()?.ok_or_else(|| lock.wrong())
}

/// Hands `lock` what the command line names, and a passphrase when that is nothing.
///
/// # Errors
/// Those of the sources and the lock.
pub fn gather<L: Lock>(lock: &mut L, path: &Path, sources: &Sources) -> Result<(), L::Failure> {
    sources.check()?;
    if let Some((content, name)) = sources.key_file()? {
        lock.add_key_file(content, &name)?;
    }
    for (content, name) in sources.identities()? {
        lock.add_identities(&content, &name)?;
    }
    if let Some(code) = sources.recovery_code()? {
        lock.add_recovery_code(&code)?;
    }
    if sources.passphrase.any_named() || !sources.names_file() {
        lock.add_passphrase(sources.passphrase.passphrase(path)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;

    /// A lock that some secrets together open, by their names.
    struct Door {
        id: [u8; 16],
        opens: &'static [&'static str],
        both: bool,
        given: Vec<&'static str>,
        attempts: Cell<u32>,
        kept: [u8; 48],
    }

    impl Door {
        fn new(number: u8, opens: &'static [&'static str]) -> Door {
            let mut id = [number; 16];
            id[..4].copy_from_slice(&std::process::id().to_le_bytes());
            Door { id, opens, both: false, given: Vec::new(), attempts: 0.into(), kept: [number; 48] }
        }
    }

    impl Lock for Door {
        type Key = [u8; 48];
        type Failure = Error;

        fn archive(&self) -> [u8; 16] {
            self.id
        }

        fn accept(&self, kept: &[u8]) -> Option<[u8; 48]> {
            (kept == self.kept).then_some(self.kept)
        }

        fn to_keep(&self, key: &[u8; 48]) -> Bytes {
            Bytes::new(key.to_vec())
        }

        fn add_key_file(&mut self, _: File, _: &str) -> Result<(), Error> {
            self.given.push("key file");
            Ok(())
        }

        fn add_identities(&mut self, _: &[u8], _: &str) -> Result<(), Error> {
            self.given.push("identity");
            Ok(())
        }

        fn add_recovery_code(&mut self, _: &[u8]) -> Result<(), Error> {
            self.given.push("code");
            Ok(())
        }

        fn add_passphrase(&mut self, _: Bytes) {
            self.given.push("passphrase");
        }

        fn wants_both(&self) -> bool {
            self.both
        }

        fn attempt(&self) -> Result<Option<[u8; 48]>, Error> {
            self.attempts.set(self.attempts.get() + 1);
            Ok(self.opens.iter().all(|secret| self.given.contains(secret)).then_some(self.kept))
        }

        fn wrong(&self) -> Error {
            Error::source("wrong")
        }
    }

    struct Place {
        directory: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Place {
            let directory = tempfile::tempdir().unwrap();
            let place = Place { directory };
            for name in ["pass", "key", "identity"] {
                fs::write(place.path(name), name).unwrap();
                fs::set_permissions(place.path(name), Permissions::from_mode(0o600)).unwrap();
            }
            place
        }

        fn path(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        fn sources(&self, passphrase: bool, key_file: bool, identity: bool) -> Sources {
            let mut sources = Sources::default();
            sources.passphrase.passfile = passphrase.then(|| self.path("pass"));
            sources.keyfile = key_file.then(|| self.path("key"));
            sources.identity.extend(identity.then(|| self.path("identity")));
            sources
        }
    }

    fn opens(door: &mut Door, sources: &Sources, cache: &Cache) -> bool {
        open(door, Path::new("a.lbx"), sources, cache).is_ok()
    }

    #[test]
    fn everything_that_is_named_is_tried_and_nothing_else() {
        let place = Place::new();
        let off = Cache::default();
        for (sources, given) in [
            (place.sources(true, false, false), &["passphrase"][..]),
            (place.sources(false, true, false), &["key file"]),
            (place.sources(false, false, true), &["identity"]),
            (place.sources(true, true, false), &["key file", "passphrase"]),
            (place.sources(true, true, true), &["key file", "identity", "passphrase"]),
        ] {
            let mut door = Door::new(1, &[]);
            assert!(opens(&mut door, &sources, &off));
            assert_eq!(door.given, given);
        }
    }

    #[test]
    fn a_key_file_gets_a_passphrase_only_when_a_slot_wants_both() {
        let place = Place::new();
        let off = Cache::default();
        let key_file = place.sources(false, true, false);
        let mut alone = Door { both: true, ..Door::new(2, &["key file"]) };
        assert!(opens(&mut alone, &key_file, &off));
        assert_eq!(alone.given, ["key file"]);
        let mut neither = Door { both: false, ..Door::new(2, &["key file", "passphrase"]) };
        assert!(!opens(&mut neither, &key_file, &off));
        assert_eq!(neither.given, ["key file"]);
        // Standard input of the tests is empty: what matters is that a passphrase was wanted.
        let mut both = Door { both: true, ..Door::new(2, &["key file", "passphrase"]) };
        let failed = open(&mut both, Path::new("a.lbx"), &place.sources(true, true, false), &off);
        assert!(failed.is_ok());
        assert_eq!(both.attempts.get(), 1, "both were named, so they are tried at once");
    }

    #[test]
    fn a_kept_key_comes_before_asking_unless_a_source_is_named_or_it_is_the_wrong_one() {
        let place = Place::new();
        let keyring = match Keyring::open() {
            Ok(keyring) => keyring,
            Err(error) => return println!("not tested: {error}"),
        };
        let (off, on) = (Cache::default(), Cache { keyring_cache: Some(Duration::from_secs(60)) });
        let named = place.sources(true, false, false);
        let asked = |door: &mut Door, sources: &Sources, cache: &Cache| {
            let before = door.attempts.get();
            let opened = opens(door, sources, cache);
            (opened, door.attempts.get() > before)
        };
        let mut door = Door::new(3, &["passphrase"]);
        assert_eq!(asked(&mut door, &named, &off), (true, true));
        assert!(keyring.kept(&door.id).is_none(), "nothing is kept unless that is wanted");
        assert_eq!(asked(&mut door, &named, &on), (true, true));
        let unnamed = Sources::default();
        assert_eq!(asked(&mut door, &unnamed, &off), (true, false));
        assert_eq!(asked(&mut door, &named, &off), (true, true));
        let mut asking = Sources::default();
        asking.passphrase.ask_password = true;
        assert_eq!(asked(&mut door, &asking, &off), (true, false));
        let changed = Door { kept: [9; 48], ..Door::new(3, &["passphrase"]) };
        assert!(kept(&changed, &keyring).is_none());
        assert!(keyring.kept(&door.id).is_none(), "a key that opens nothing is dropped");
    }
}
