//! What opens an archive for a change of its keys: everything that the command line names, and never what the keyring keeps.
use std::path::{Path, PathBuf};

use lockbox::crypto::{KeyFile, Passphrase};
use lockbox::keys::{self, KeyAccess, KeyKind, Secrets};
use lockbox_host::secrets::{PassphraseSources, Sources};
use lockbox_host::{Program, WRONG_KEY, gather, shown};

use crate::exit::{Failure, Lockbox};
use crate::secrets::LimitArgs;
use crate::seen::SeenArgs;

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
    /// Everything that was given; the passphrase is asked for only when something may need it.
    pub(crate) fn secrets(&self, archive: &Path) -> Result<Secrets, Failure> {
        let mut secrets = gather(archive, &self.sources)?;
        if secrets.passphrase.is_none() && self.needs_passphrase(archive) {
            secrets.passphrase = Some(self.sources.passphrase.passphrase(archive)?.into());
        }
        Ok(secrets)
    }

    /// The same and a new passphrase, from `new` or as [`PassphraseSources::old_and_new`] reads them.
    pub(crate) fn secrets_and_new(&self, new: Option<&Path>, archive: &Path) -> Result<(Secrets, Passphrase), Failure> {
        self.sources.check()?;
        let mut files = self.sources.clone();
        files.passphrase =
            PassphraseSources { passfile_any: self.sources.passphrase.passfile_any, ..Default::default() };
        let mut secrets = if self.sources.names_file() { gather(archive, &files)? } else { Secrets::default() };
        if !self.sources.names_file() || self.sources.passphrase.any_named() || self.needs_passphrase(archive) {
            let (old, new) = self.sources.passphrase.old_and_new(new, archive)?;
            secrets.add_typed(old.into());
            return Ok((secrets, new.into()));
        }
        Ok((secrets, self.sources.passphrase.new_one(new, archive)?.into()))
    }

    pub(crate) fn access<'a>(&self, secrets: &'a Secrets) -> KeyAccess<'a> {
        KeyAccess { secrets, limits: self.limit.limits(), seen: self.seen.options() }
    }

    /// A key file that is to open the archive from now on; private like any other.
    pub(crate) fn new_key_file(&self, path: &Path) -> Result<KeyFile, Failure> {
        let passphrase = PassphraseSources { passfile_any: self.sources.passphrase.passfile_any, ..Default::default() };
        let sources = Sources { keyfile: Some(PathBuf::from(path)), passphrase, ..Sources::default() };
        let gathered = gather(path, &sources)?.key_file;
        gathered.ok_or_else(|| Failure::other(format!("{} is no key file", shown(path))))
    }

    /// Whether the key file opens nothing without a passphrase.
    fn needs_passphrase(&self, archive: &Path) -> bool {
        // A header that cannot be read is the business of the command.
        let kinds = keys::kinds(archive).unwrap_or_default();
        let has = |kind| kinds.iter().any(|(_, other)| *other == kind);
        self.sources.keyfile.is_some() && has(KeyKind::KeyFileAndPassphrase) && !has(KeyKind::KeyFile)
    }
}

/// The failure of a change of keys.
pub(crate) fn failure(path: &Path, error: lockbox::Error) -> Failure {
    match &error {
        lockbox::Error::WrongKey => {
            let mut kinds: Vec<&str> =
                keys::kinds(path).unwrap_or_default().into_iter().map(|(_, kind)| kind.name()).collect();
            kinds.sort_unstable();
            kinds.dedup();
            let opens =
                if kinds.is_empty() { String::new() } else { format!(" (it opens with: {})", kinds.join(", ")) };
            Failure::new(WRONG_KEY, format!("{}: wrong passphrase or key{opens}", shown(path)))
        }
        _ => Lockbox::failure(path, error),
    }
}
