//! Gets together what opens an archive: a passphrase, a key file, identities, a recovery code, and what that may cost.

use std::fs::File;
use std::path::{Path, PathBuf};

use lockbox::archive::{Archive, KeyAccess, KeyKind, Secrets};
use lockbox::crypto::{KeyFile, Passphrase, RecoveryCode};

use crate::exit::{self, Failure, shown};
use crate::opening;
use crate::prompts;
use crate::secrets::{LimitArgs, SecretArgs};
use crate::seen::SeenArgs;

/// What opens the archive
#[derive(clap::Args)]
pub(crate) struct UnlockArgs {
    #[command(flatten)]
    pub(crate) secret: SecretArgs,
    /// Open with the key file FILE; what needs a passphrase as well asks for that
    #[arg(long, value_name = "FILE")]
    keyfile: Option<PathBuf>,
    /// Open with the age identities or the SSH private key in FILE; may be given several times
    #[arg(long, value_name = "FILE")]
    identity: Vec<PathBuf>,
    /// Open with the recovery code in FILE, or on standard input for -
    #[arg(long, value_name = "FILE")]
    recovery_code: Option<PathBuf>,
    #[command(flatten)]
    limit: LimitArgs,
    #[command(flatten)]
    seen: SeenArgs,
}

impl UnlockArgs {
    /// Everything that was given; the passphrase is asked for only when something may need it.
    pub(crate) fn secrets(&self, archive: &Path) -> Result<Secrets, Failure> {
        let passphrase = if self.needs_passphrase(archive)? { Some(self.secret.existing(archive)?) } else { None };
        self.with_passphrase(passphrase)
    }

    /// The secrets and a new passphrase, from `new` or as [`SecretArgs::both`] reads them.
    pub(crate) fn secrets_and_new(&self, new: Option<&Path>, archive: &Path) -> Result<(Secrets, Passphrase), Failure> {
        if self.needs_passphrase(archive)? {
            let (old, new) = self.secret.both(new, archive)?;
            return Ok((self.with_passphrase(Some(old))?, new));
        }
        let secrets = self.with_passphrase(None)?;
        Ok((secrets, self.secret.new_one(new, archive)?))
    }

    pub(crate) fn access<'a>(&self, secrets: &'a Secrets) -> KeyAccess<'a> {
        KeyAccess { secrets, limits: self.limit.limits(), seen: self.seen.options() }
    }

    pub(crate) fn limits(&self) -> lockbox::archive::UnlockLimits {
        self.limit.limits()
    }

    fn needs_passphrase(&self, archive: &Path) -> Result<bool, Failure> {
        if self.keyfile.is_none() && self.identity.is_empty() && self.recovery_code.is_none() || self.secret.given() {
            return Ok(true);
        }
        // A header that cannot be read is the business of the command.
        let kinds = Archive::key_kinds(archive).unwrap_or_default();
        let has = |kind| kinds.iter().any(|(_, other)| *other == kind);
        Ok(self.keyfile.is_some() && has(KeyKind::KeyFileAndPassphrase) && !has(KeyKind::KeyFile))
    }

    fn with_passphrase(&self, passphrase: Option<Passphrase>) -> Result<Secrets, Failure> {
        let mut secrets = Secrets { passphrase, ..Secrets::default() };
        if let Some(path) = &self.keyfile {
            secrets.key_file = Some(key_file(path)?);
        }
        let prompts = prompts::terminal();
        for path in &self.identity {
            let content = self.secret.bytes(path)?;
            secrets.identities.add(&content, &shown(path), &prompts)?;
        }
        if let Some(path) = &self.recovery_code {
            secrets.recovery_code = Some(RecoveryCode::parse(&self.secret.bytes(path)?)?);
        }
        Ok(secrets)
    }
}

/// Reads a key file; who may read it is its owner's business, as it may be a picture or a song.
pub(crate) fn key_file(path: &Path) -> Result<KeyFile, Failure> {
    let failed = |e: std::io::Error| exit::host(format!("cannot read the key file {}", shown(path)), &e);
    let file = File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.is_dir() {
        return Err(Failure::other(format!("the key file {} is a directory", shown(path))));
    }
    KeyFile::read(file).map_err(|error| Failure::other(format!("{}: {}", shown(path), exit::sentence(&error))))
}

/// The failure of a change of keys.
pub(crate) fn failure(path: &Path, error: lockbox::Error) -> Failure {
    match &error {
        lockbox::Error::WrongKey => {
            let mut kinds: Vec<&str> =
                Archive::key_kinds(path).unwrap_or_default().into_iter().map(|(_, kind)| kind.name()).collect();
            kinds.sort_unstable();
            kinds.dedup();
            let opens =
                if kinds.is_empty() { String::new() } else { format!(" (it opens with: {})", kinds.join(", ")) };
            Failure::new(exit::WRONG_KEY, format!("{}: wrong password or key{opens}", shown(path)))
        }
        _ => opening::failure(path, error),
    }
}
