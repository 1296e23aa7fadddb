//! Collects credentials from the command line, the keyring and prompts, in this order and with
//! retries, and unlocks an archive with them.

use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;

use lockbox::Error;
use lockbox::crypto::{KeyFile, Passphrase, Prompts, RecoveryCode};
use lockbox::keys::{self, KeyKind, Secrets, UnlockLimits, UnlockedKey};
use lockbox::storage::ArchiveSource;

use crate::failure::about;
use crate::proc::available_kib;
use crate::secrets::{self, Cache, Keyring, Sources, Spinner, ask_openly, confirm_openly, is_marked};
use crate::{Failure, Program, WRONG_KEY};

/// Number of passphrase prompts. A script has one try: its answer does not change.
const TRIES: u32 = 3;

/// Credentials gathered for one archive.
pub struct Credentials {
    pub secrets: Secrets,
    /// Error of a typed text that looks like a recovery code but is not valid.
    mistyped: Option<Error>,
}

impl From<Secrets> for Credentials {
    fn from(secrets: Secrets) -> Credentials {
        Credentials { secrets, mistyped: None }
    }
}

impl Credentials {
    pub fn add_typed(&mut self, typed: Passphrase) {
        self.mistyped = self.secrets.add_typed(typed);
    }

    /// Adds the passphrase of the archive at `path`, from the source that the command line names.
    ///
    /// # Errors
    /// Those of the source.
    pub fn add_passphrase(&mut self, path: &Path, sources: &Sources) -> secrets::Result<()> {
        self.add_typed(sources.passphrase.passphrase(path)?.into());
        Ok(())
    }

    /// Runs `attempt` with all secrets until it returns a value: a passphrase typed at a terminal
    /// may be typed three times. Returns None when it was wrong each time.
    ///
    /// # Errors
    /// Those of `attempt`.
    pub fn open<P: Program, T, E>(
        &mut self,
        path: &Path,
        sources: &Sources,
        mut attempt: impl FnMut(&Secrets) -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        let mut attempt = |secrets: &Secrets| {
            // Identities may ask for a touch or a PIN, on the same line of the terminal.
            let _working = Spinner::deriving(sources.passphrase.advises() && secrets.identities.is_empty());
            attempt(secrets)
        };
        for _ in 1..if self.is_typed(sources) { TRIES } else { 1 } {
            if let Some(opened) = attempt(&self.secrets)? {
                return Ok(Some(opened));
            }
            let why = self.mistyped.as_ref().map_or_else(|| "Wrong passphrase".to_owned(), Failure::<P>::sentence);
            // An empty answer gives up.
            let Ok(again) = sources.passphrase.once_more(&why, path) else { return Ok(None) };
            self.add_typed(again.into());
        }
        attempt(&self.secrets)
    }

    /// Returns whether the passphrase was typed, so that it can be asked for again.
    pub fn is_typed(&self, sources: &Sources) -> bool {
        self.secrets.passphrase.is_some() && sources.passphrase.is_typed()
    }

    /// Returns the failure of unlocking the archive at `path` with the wrong ones.
    pub fn wrong<P: Program>(&self, path: &Path) -> Failure<P> {
        let mut failure = match &self.mistyped {
            Some(error) => Failure::new(WRONG_KEY, about::<P>(path, Failure::<P>::sentence(error))),
            None => P::failure(path, Error::WrongKey),
        };
        if self.secrets.passphrase.as_ref().is_some_and(|passphrase| is_marked(passphrase.bytes())) {
            failure.message += "; the passphrase begins with a byte order mark, as editors of Windows write it: save its file as UTF-8 without one";
        }
        failure
    }
}

/// Returns the secrets that the command line names, or else a passphrase.
///
/// # Errors
/// Those of the sources.
pub fn gather<P: Program>(path: &Path, sources: &Sources) -> Result<Credentials, Failure<P>> {
    sources.passphrase.check()?;
    let mut secrets = Secrets::default();
    if let Some((content, name)) = sources.key_file()? {
        let read = KeyFile::read(content);
        let read = read.map_err(|error| Failure::other(format!("{name}: {}", Failure::<P>::sentence(&error))))?;
        secrets.key_file = Some(read);
    }
    let prompts = Prompter::<P>::prompts(sources);
    for (content, name) in sources.identities()? {
        secrets.identities.add(&content, &name, &prompts)?;
    }
    if let Some(code) = sources.recovery_code()? {
        secrets.recovery_code = Some(RecoveryCode::parse(&code)?);
    }
    let mut given = Credentials::from(secrets);
    if sources.passphrase.any_named() || !sources.names_file() {
        given.add_passphrase(path, sources)?;
    }
    Ok(given)
}

/// Asks the questions of plugins and protected identities on the terminal, when there is one.
pub struct Prompter<P> {
    sources: Sources,
    program: PhantomData<fn() -> P>,
}

impl<P: Program> Prompter<P> {
    /// Returns prompts for identities: the passphrase that the sources name answers them too.
    pub fn prompts(sources: &Sources) -> Arc<dyn Prompts> {
        Arc::new(Prompter::<P> { sources: sources.clone(), program: PhantomData })
    }
}

impl<P: Program> Prompts for Prompter<P> {
    fn message(&self, text: &str) {
        lockbox_terminal::complain(P::NAME, text);
    }

    fn confirm(&self, question: &str, yes: &str, no: Option<&str>) -> Option<bool> {
        confirm_openly(question, yes, no)
    }

    fn public(&self, question: &str) -> Option<String> {
        ask_openly(&format!("{question} "))
    }

    fn secret(&self, question: &str) -> Option<Passphrase> {
        self.sources.passphrase.answer(&format!("{} ", question.trim_end())).map(Passphrase::from)
    }
}

/// Returns the limits on the cost of unlocking: the defaults, or the total to which the user raised
/// them. Half of the unused memory is for concurrent derivations, so that later allocations
/// succeed.
pub fn unlock_limits(raised: Option<u64>) -> UnlockLimits {
    let limits = raised.map_or_else(UnlockLimits::default, UnlockLimits::raised);
    UnlockLimits { together_mib: available_kib() / 1024 / 2, ..limits }
}

/// Unlocks the archive at the location, which the user calls `name`, and caches its key when the
/// user wants that. The second value is the reason why it could not be cached.
///
/// A cached key is used before everything except secrets that the command line names. A key file or
/// an identity is tried without a passphrase, unless the command line names one too; when a slot
/// wants both, the passphrase is requested then.
///
/// # Errors
/// Those of the sources and the archive; before any prompt, when a key is to be cached and no cache
/// is available.
pub fn unlock<P: Program>(
    site: ArchiveSource<'_>,
    name: &Path,
    sources: &Sources,
    cache: &Cache,
    limits: &UnlockLimits,
) -> Result<(UnlockedKey, Option<String>), Failure<P>> {
    let id = keys::identify(site).map_err(|error| P::failure(name, error))?;
    UnlockTarget { lock: &ArchiveLock { site, limits, unlock: keys::unlock_with }, path: name, sources }
        .open(&id, cache)
}

/// Unlocks an archive whose header may be damaged. Its id is not certain, so no cached key is used.
///
/// # Errors
/// As [`unlock`].
pub fn unlock_damaged<P: Program>(
    site: ArchiveSource<'_>,
    name: &Path,
    sources: &Sources,
    limits: &UnlockLimits,
) -> Result<UnlockedKey, Failure<P>> {
    UnlockTarget { lock: &ArchiveLock { site, limits, unlock: keys::unlock_damaged }, path: name, sources }.ask()
}

/// Archive on which secrets are tried.
trait Lock {
    /// Returns whether a key slot wants a key file and a passphrase together.
    fn wants_both(&self) -> bool;

    fn opens(&self, secrets: &Secrets) -> lockbox::Result<UnlockedKey>;

    /// Validates a cached key; None when it does not, or no longer, open the archive.
    fn accept(&self, kept: &[u8]) -> Option<UnlockedKey>;

    fn kinds(&self) -> Vec<KeyKind>;
}

struct ArchiveLock<'a> {
    site: ArchiveSource<'a>,
    limits: &'a UnlockLimits,
    unlock: fn(ArchiveSource<'a>, &Secrets, &UnlockLimits) -> lockbox::Result<UnlockedKey>,
}

impl Lock for ArchiveLock<'_> {
    fn wants_both(&self) -> bool {
        keys::wants_both(self.site)
    }

    fn opens(&self, secrets: &Secrets) -> lockbox::Result<UnlockedKey> {
        (self.unlock)(self.site, secrets, self.limits)
    }

    fn accept(&self, kept: &[u8]) -> Option<UnlockedKey> {
        keys::accept_kept(self.site, kept)
    }

    fn kinds(&self) -> Vec<KeyKind> {
        // A header that is not whole any more has nothing to suggest.
        keys::kinds(self.site).unwrap_or_default().into_iter().map(|(_, kind)| kind).collect()
    }
}

/// Lists the ways other than a passphrase that open the archive, by kinds alone: the names of keys
/// are shown only after unlocking.
fn other_ways(kinds: &[KeyKind]) -> Option<String> {
    let ways = [
        (KeyKind::RecoveryCode, "a recovery code, typed in place of the passphrase"),
        (KeyKind::KeyFile, "a key file (--keyfile)"),
        (KeyKind::KeyFileAndPassphrase, "a key file with its passphrase (--keyfile)"),
        (KeyKind::SshKey, "an SSH key (--identity)"),
        (KeyKind::Age, "an age identity (--identity)"),
    ];
    let ways: Vec<&str> = ways.iter().filter(|(kind, _)| kinds.contains(kind)).map(|(_, way)| *way).collect();
    (!ways.is_empty()).then(|| ways.join(", or "))
}

/// Archive to unlock, and the sources of its secrets.
struct UnlockTarget<'a, L> {
    lock: &'a L,
    path: &'a Path,
    sources: &'a Sources,
}

impl<L: Lock> UnlockTarget<'_, L> {
    fn open<P: Program>(&self, id: &[u8; 16], cache: &Cache) -> Result<(UnlockedKey, Option<String>), Failure<P>> {
        self.sources.passphrase.check()?;
        let named = self.sources.any_named();
        let keyring = match cache.keyring_cache {
            Some(_) => Some(Keyring::open()?),
            None if named => None,
            // Without keyrings nothing is kept either.
            None => Keyring::open().ok(),
        };
        let key = match keyring.as_ref().filter(|_| !named).and_then(|keyring| self.kept(keyring, id)) {
            Some(key) => key,
            None => self.ask()?,
        };
        let refused = match (&keyring, cache.keyring_cache) {
            (Some(keyring), Some(timeout)) => keyring.keep(id, &key.to_bytes(), timeout).err(),
            _ => None,
        };
        Ok((key, refused.map(|error| error.sentence)))
    }

    fn kept(&self, keyring: &Keyring, id: &[u8; 16]) -> Option<UnlockedKey> {
        let bytes = keyring.kept(id)?;
        let key = self.lock.accept(&bytes);
        if key.is_none() {
            // The archive has another key since.
            let _ = keyring.forget(id);
        }
        key
    }

    /// Unlocks with named or typed secrets, never with a cached key.
    fn ask<P: Program>(&self) -> Result<UnlockedKey, Failure<P>> {
        let mut given = gather::<P>(self.path, self.sources)?;
        let alone = self.sources.keyfile.is_some() && !self.sources.passphrase.any_named();
        if alone && self.lock.wants_both() {
            if let Some(key) = self.attempt(&given.secrets)? {
                return Ok(key);
            }
            given.add_passphrase(self.path, self.sources)?;
        }
        if let Some(key) = given.open::<P, _, _>(self.path, self.sources, |secrets| self.attempt(secrets))? {
            return Ok(key);
        }
        let mut failure = given.wrong(self.path);
        if given.is_typed(self.sources)
            && let Some(ways) = other_ways(&self.lock.kinds())
        {
            failure.message.push_str(&format!("; it also opens with {ways}"));
        }
        Err(failure)
    }

    /// Tries all secrets; None when they are the wrong ones.
    fn attempt<P: Program>(&self, secrets: &Secrets) -> Result<Option<UnlockedKey>, Failure<P>> {
        match self.lock.opens(secrets) {
            Ok(key) => Ok(Some(key)),
            Err(Error::WrongKey) => Ok(None),
            Err(error) => Err(P::failure(self.path, error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;

    struct Test;

    impl Program for Test {
        const NAME: &'static str = "test";
        const NAMES_ARCHIVE: bool = false;

        fn remedy(_: &Error) -> String {
            String::new()
        }
    }

    /// A lock that some secrets together open, by their names.
    struct Slots {
        id: [u8; 16],
        opens: &'static [&'static str],
        both: bool,
        given: RefCell<Vec<&'static str>>,
        attempts: Cell<u32>,
        key: [u8; 48],
    }

    impl Slots {
        fn new(number: u8, opens: &'static [&'static str]) -> Slots {
            let mut id = [number; 16];
            id[..4].copy_from_slice(&std::process::id().to_le_bytes());
            Slots { id, opens, both: false, given: RefCell::default(), attempts: 0.into(), key: [number; 48] }
        }

        fn door<'a>(&'a self, sources: &'a Sources) -> UnlockTarget<'a, Slots> {
            UnlockTarget { lock: self, path: Path::new("a.lbx"), sources }
        }

        fn open(&self, sources: &Sources, cache: &Cache) -> bool {
            self.door(sources).open::<Test>(&self.id, cache).is_ok()
        }
    }

    impl Lock for Slots {
        fn wants_both(&self) -> bool {
            self.both
        }

        fn opens(&self, secrets: &Secrets) -> lockbox::Result<UnlockedKey> {
            self.attempts.set(self.attempts.get() + 1);
            let given = [
                ("key file", secrets.key_file.is_some()),
                ("identity", !secrets.identities.is_empty()),
                ("code", secrets.recovery_code.is_some()),
                ("passphrase", secrets.passphrase.is_some()),
            ];
            let given: Vec<&str> = given.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect();
            let opens = self.opens.iter().all(|secret| given.contains(secret));
            self.given.replace(given);
            if opens { UnlockedKey::from_bytes(&self.key) } else { Err(Error::WrongKey) }
        }

        fn accept(&self, kept: &[u8]) -> Option<UnlockedKey> {
            (kept == self.key).then(|| UnlockedKey::from_bytes(kept).unwrap())
        }

        fn kinds(&self) -> Vec<KeyKind> {
            Vec::new()
        }
    }

    const KEY_FILE: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const IDENTITY: &str = "AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33";

    struct Place {
        directory: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Place {
            let directory = tempfile::tempdir().unwrap();
            let place = Place { directory };
            for (name, content) in [("pass", "pass"), ("key", KEY_FILE), ("identity", IDENTITY)] {
                fs::write(place.path(name), content).unwrap();
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
            let slots = Slots::new(1, &[]);
            assert!(slots.open(&sources, &off));
            assert_eq!(*slots.given.borrow(), given);
        }
    }

    #[test]
    fn other_ways_are_kinds_that_the_archive_has() {
        use KeyKind::{KeyFile, Passphrase, RecoveryCode, SshKey, Unknown};
        assert_eq!(other_ways(&[Passphrase, Passphrase, Unknown(9)]), None);
        assert_eq!(
            other_ways(&[SshKey, KeyFile, Passphrase, KeyFile]).as_deref(),
            Some("a key file (--keyfile), or an SSH key (--identity)")
        );
        assert!(other_ways(&[RecoveryCode]).is_some_and(|way| way.contains("in place of the passphrase")));
    }

    #[test]
    fn a_key_file_gets_a_passphrase_only_when_a_slot_wants_both() {
        let place = Place::new();
        let off = Cache::default();
        let key_file = place.sources(false, true, false);
        let alone = Slots { both: true, ..Slots::new(2, &["key file"]) };
        assert!(alone.open(&key_file, &off));
        assert_eq!(*alone.given.borrow(), ["key file"]);
        let neither = Slots { both: false, ..Slots::new(2, &["key file", "passphrase"]) };
        assert!(!neither.open(&key_file, &off));
        assert_eq!(*neither.given.borrow(), ["key file"]);
        // Standard input of the tests is empty: the point is that a passphrase was wanted.
        let both = Slots { both: true, ..Slots::new(2, &["key file", "passphrase"]) };
        assert!(both.open(&place.sources(true, true, false), &off));
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
        let slots = Slots::new(3, &["passphrase"]);
        let asked = |sources: &Sources, cache: &Cache| {
            let before = slots.attempts.get();
            let opened = slots.open(sources, cache);
            (opened, slots.attempts.get() > before)
        };
        assert_eq!(asked(&named, &off), (true, true));
        assert!(keyring.kept(&slots.id).is_none(), "nothing is kept unless that is wanted");
        assert_eq!(asked(&named, &on), (true, true));
        let unnamed = Sources::default();
        assert_eq!(asked(&unnamed, &off), (true, false));
        assert_eq!(asked(&named, &off), (true, true));
        let mut asking = Sources::default();
        asking.passphrase.ask_password = true;
        assert_eq!(asked(&asking, &off), (true, false));
        let changed = Slots { key: [9; 48], ..Slots::new(3, &["passphrase"]) };
        assert!(changed.door(&unnamed).kept(&keyring, &slots.id).is_none());
        assert!(keyring.kept(&slots.id).is_none(), "a key that opens nothing is dropped");
    }
}
