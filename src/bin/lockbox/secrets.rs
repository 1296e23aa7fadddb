//! Gives the library the secrets that the command line names or somebody types.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use lockbox::Error;
use lockbox::crypto::{KeyFile, Passphrase, Prompts, RecoveryCode};
use lockbox::keys::{self, Secrets, UnlockLimits, UnlockedKey};
use lockbox_secrets::{Bytes, Cache, Keyring, Lock, PassphraseSources, Sources};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::exit::{self, Failure, shown};
use crate::{opening, output, prompts};

/// What unlocking may cost
#[derive(clap::Args)]
pub(crate) struct LimitArgs {
    /// Let all key slots together ask for up to N MiB times passes of key derivation
    #[arg(long, value_name = "N")]
    kdf_limit: Option<u64>,
}

impl LimitArgs {
    pub(crate) fn limits(&self) -> UnlockLimits {
        self.kdf_limit.map_or_else(UnlockLimits::default, UnlockLimits::raised)
    }
}

/// The key of the archive at `path`: what the keyring keeps, or what the secrets open.
pub(crate) fn unlock(
    path: &Path,
    sources: &Sources,
    cache: &Cache,
    limits: &UnlockLimits,
) -> Result<UnlockedKey, Failure> {
    let archive = keys::identify(path).map_err(|error| opening::failure(path, error))?;
    let mut door = Door::new(path, archive, sources, Box::new(|secrets| keys::unlock_with(path, secrets, limits)));
    let (key, refused) = lockbox_secrets::open(&mut door, path, sources, cache)?;
    if let Some(error) = refused {
        output::complain(&error.sentence);
    }
    Ok(key)
}

/// The same for an archive whose header may be damaged; nothing that is kept is used.
pub(crate) fn unlock_damaged(path: &Path, sources: &Sources, limits: &UnlockLimits) -> Result<UnlockedKey, Failure> {
    let opens = Box::new(|secrets: &Secrets| keys::unlock_damaged(path, secrets, limits));
    let mut door = Door::new(path, [0; 16], sources, opens);
    lockbox_secrets::ask(&mut door, path, sources)
}

/// What the command line names, and a passphrase when that is nothing: for changes of the keys, which nothing that is kept may make.
pub(crate) fn gather(path: &Path, sources: &Sources) -> Result<Secrets, Failure> {
    let mut door = Door::new(path, [0; 16], sources, Box::new(|_| Err(Error::WrongKey)));
    lockbox_secrets::gather(&mut door, path, sources)?;
    Ok(door.secrets)
}

/// Drops what this user's keyring keeps of the archive: whoever changes its keys wants to be asked for them the next time.
pub(crate) fn forget_kept(path: &Path) {
    // Without keyrings nothing is kept, and an archive without an id never was.
    let (Ok(keyring), Ok(archive)) = (Keyring::open(), keys::identify(path)) else { return };
    if let Err(error) = keyring.forget(&archive) {
        output::complain(&error.sentence);
    }
}

/// A passphrase to be set.
pub(crate) fn to_set(sources: &PassphraseSources, archive: &Path) -> Result<Passphrase, Failure> {
    Ok(sources.new_passphrase(archive)?.into())
}

type Opens<'a> = Box<dyn Fn(&Secrets) -> lockbox::Result<UnlockedKey> + 'a>;

/// An archive and the secrets that are tried on it.
struct Door<'a> {
    path: &'a Path,
    archive: [u8; 16],
    opens: Opens<'a>,
    secrets: Secrets,
    prompts: Arc<dyn Prompts>,
    /// Why what looks like a recovery code is none.
    mistyped: Option<Error>,
}

impl<'a> Door<'a> {
    fn new(path: &'a Path, archive: [u8; 16], sources: &Sources, opens: Opens<'a>) -> Door<'a> {
        let prompts = prompts::asking(sources);
        Door { path, archive, opens, secrets: Secrets::default(), prompts, mistyped: None }
    }

    fn failed(&self, error: Error) -> Failure {
        opening::failure(self.path, error)
    }
}

impl Lock for Door<'_> {
    type Key = UnlockedKey;
    type Failure = Failure;

    fn archive(&self) -> [u8; 16] {
        self.archive
    }

    fn accept(&self, kept: &[u8]) -> Option<UnlockedKey> {
        keys::accept_kept(self.path, kept)
    }

    fn to_keep(&self, key: &UnlockedKey) -> Bytes {
        key.to_bytes()
    }

    fn add_key_file(&mut self, content: File, name: &str) -> Result<(), Failure> {
        let read = KeyFile::read(content).map_err(|e| Failure::other(format!("{name}: {}", exit::sentence(&e))))?;
        self.secrets.key_file = Some(read);
        Ok(())
    }

    fn add_identities(&mut self, content: &[u8], name: &str) -> Result<(), Failure> {
        Ok(self.secrets.identities.add(content, name, &self.prompts)?)
    }

    fn add_recovery_code(&mut self, code: &[u8]) -> Result<(), Failure> {
        self.secrets.recovery_code = Some(RecoveryCode::parse(code)?);
        Ok(())
    }

    fn add_passphrase(&mut self, passphrase: Bytes) {
        self.mistyped = self.secrets.add_typed(passphrase.into());
    }

    fn wants_both(&self) -> bool {
        keys::wants_both(self.path)
    }

    fn attempt(&self) -> Result<Option<UnlockedKey>, Failure> {
        match (self.opens)(&self.secrets) {
            Ok(key) => Ok(Some(key)),
            Err(Error::WrongKey) => Ok(None),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn wrong(&self) -> Failure {
        let failure = self.failed(Error::WrongKey);
        match &self.mistyped {
            Some(error) => Failure::new(failure.code, format!("{}: {}", shown(self.path), exit::sentence(error))),
            None => failure,
        }
    }
}

/// What the limit of core dumps was.
#[derive(Clone, Copy)]
pub(crate) struct CoreLimit(Option<(u64, u64)>);

impl CoreLimit {
    /// For a program that takes this one's place.
    pub(crate) fn restore(self) {
        if let Some((soft, hard)) = self.0 {
            let _ = setrlimit(Resource::RLIMIT_CORE, soft, hard);
        }
    }
}

/// No core dump and no debugger sees what is in memory. A host that refuses costs this protection, not the work.
pub(crate) fn keep_out_of_core_dumps() -> CoreLimit {
    let before = getrlimit(Resource::RLIMIT_CORE).ok();
    // The hard limit stays, because nobody but root could undo it.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, before.map_or(0, |(_, hard)| hard));
    let _ = nix::sys::prctl::set_dumpable(false);
    CoreLimit(before)
}
