//! Gathers the credentials for a change of keys: everything named on the command line, and never
//! the keyring's copy.
use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::crypto::{KeyFile, Passphrase};
use lockbox::keys::{self, KeyAccess, KeyKind, Secrets};
use lockbox_host::remote::ArchiveLocation;
use lockbox_host::secrets::{PassphraseSources, Sources};
use lockbox_host::{Credentials, Program, WRONG_KEY, gather, shown};

use crate::exit::{Failure, Lockbox};
use crate::progress::Bar;
use crate::rollback_state::SeenArgs;
use crate::secrets::LimitArgs;

/// What opens the archive
#[derive(clap::Args)]
pub(crate) struct UnlockArgs {
    #[command(flatten)]
    sources: Sources,
    #[command(flatten)]
    limit: LimitArgs,
    #[command(flatten)]
    seen: SeenArgs,
}

impl UnlockArgs {
    pub(crate) fn bar(&self) -> Bar {
        Bar::new(self.sources.passphrase.quiet)
    }

    /// Runs `action`, which a key of the archive allows, with all given secrets. A passphrase typed
    /// at a terminal has three tries, so `action` must change nothing when it is wrong.
    ///
    /// # Errors
    /// Those of the sources, and those of `action` in the words of [`failure`].
    pub(crate) fn with_access<T>(
        &self,
        archive: &ArchiveLocation,
        action: impl FnMut(&KeyAccess<'_>) -> lockbox::Result<T>,
    ) -> Result<T, Failure> {
        self.attempt(archive, &mut self.given(archive)?, action)
    }

    /// Like [`UnlockArgs::with_access`], with credentials gathered before.
    pub(crate) fn attempt<T>(
        &self,
        archive: &ArchiveLocation,
        given: &mut Credentials,
        mut action: impl FnMut(&KeyAccess<'_>) -> lockbox::Result<T>,
    ) -> Result<T, Failure> {
        let attempt = |secrets: &Secrets| match action(&self.access(secrets, archive)) {
            Err(Error::WrongKey) => Ok(None),
            done => done.map(Some),
        };
        let done = given.open::<Lockbox, _, _>(archive.path(), &self.sources, attempt);
        done.and_then(|done| done.ok_or(Error::WrongKey)).map_err(|error| failure(archive, error))
    }

    /// Like [`UnlockArgs::given`], but reports a wrong passphrase typed at a terminal before
    /// anything else is asked or shown. That derives its key once more than the command does, so it
    /// is not for programs.
    pub(crate) fn verified(&self, archive: &ArchiveLocation) -> Result<Credentials, Failure> {
        let mut given = self.given(archive)?;
        if given.is_typed(&self.sources) {
            self.attempt(archive, &mut given, |access| keys::list(archive.site(), access))?;
        }
        Ok(given)
    }

    /// Returns all given credentials; the passphrase is requested only when something may need it.
    pub(crate) fn given(&self, archive: &ArchiveLocation) -> Result<Credentials, Failure> {
        let mut given = gather::<Lockbox>(archive.path(), &self.sources)?;
        if given.secrets.passphrase.is_none() && self.needs_passphrase(archive) {
            given.add_passphrase(archive.path(), &self.sources)?;
        }
        Ok(given)
    }

    /// Like [`UnlockArgs::verified`], with a new passphrase, from `new` or as
    /// [`PassphraseSources::old_and_new`] reads them.
    pub(crate) fn given_and_new(
        &self,
        new: Option<&Path>,
        archive: &ArchiveLocation,
    ) -> Result<(Credentials, Passphrase), Failure> {
        self.sources.check()?;
        let passphrase = &self.sources.passphrase;
        if new.is_none() && passphrase.is_typed() {
            return Ok((self.verified(archive)?, passphrase.new_one(None, archive.path())?.into()));
        }
        let mut files = self.sources.clone();
        files.passphrase = PassphraseSources { passfile_any: passphrase.passfile_any, ..Default::default() };
        let mut given = if self.sources.names_file() {
            gather(archive.path(), &files)?
        } else {
            Credentials::from(Secrets::default())
        };
        if !self.sources.names_file() || passphrase.any_named() || self.needs_passphrase(archive) {
            let (old, new) = passphrase.old_and_new(new, archive.path())?;
            given.add_typed(old.into());
            return Ok((given, new.into()));
        }
        Ok((given, passphrase.new_one(new, archive.path())?.into()))
    }

    /// Returns whether hints and progress are shown.
    pub(crate) fn advises(&self) -> bool {
        self.sources.passphrase.advises()
    }

    pub(crate) fn access<'a>(&self, secrets: &'a Secrets, archive: &ArchiveLocation) -> KeyAccess<'a> {
        KeyAccess { secrets, limits: self.limit.limits(), seen: self.seen.options(archive.path()) }
    }

    /// Reads a key file that is to open the archive from now on; it must be private like any other.
    pub(crate) fn new_key_file(&self, path: &Path) -> Result<KeyFile, Failure> {
        let passphrase = PassphraseSources { passfile_any: self.sources.passphrase.passfile_any, ..Default::default() };
        let sources = Sources { keyfile: Some(PathBuf::from(path)), passphrase, ..Sources::default() };
        let gathered = gather(path, &sources)?.secrets.key_file;
        gathered.ok_or_else(|| Failure::other(format!("{} is no key file", shown(path))))
    }

    /// Returns whether the key file opens nothing without a passphrase.
    fn needs_passphrase(&self, archive: &ArchiveLocation) -> bool {
        // A header that cannot be read is the business of the command.
        let kinds = keys::kinds(archive.site()).unwrap_or_default();
        let has = |kind| kinds.iter().any(|(_, other)| *other == kind);
        self.sources.keyfile.is_some() && has(KeyKind::KeyFileAndPassphrase) && !has(KeyKind::KeyFile)
    }
}

pub(crate) fn failure(place: &ArchiveLocation, error: Error) -> Failure {
    let path = place.path();
    match &error {
        Error::WrongKey => {
            let mut kinds: Vec<&str> =
                keys::kinds(place.site()).unwrap_or_default().into_iter().map(|(_, kind)| kind.name()).collect();
            kinds.sort_unstable();
            kinds.dedup();
            let opens =
                if kinds.is_empty() { String::new() } else { format!(" (it opens with: {})", kinds.join(", ")) };
            Failure::new(WRONG_KEY, format!("{}: wrong passphrase or key{opens}", shown(path)))
        }
        _ => Lockbox::failure(path, error),
    }
}
