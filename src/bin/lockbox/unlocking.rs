//! Gets together what opens an archive for a change of its keys, a new passphrase, and what that may cost.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockbox::archive::{Archive, KeyAccess, KeyKind, Secrets, UnlockLimits};
use lockbox::crypto::{KeyFile, Passphrase, Prompts};
use lockbox_secrets::{PassphraseSources, Sources};

use crate::exit::{self, Failure, shown};
use crate::opening;
use crate::secrets::{self, LimitArgs, typed};
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
        let mut secrets = secrets::gather(archive, &self.sources)?;
        if secrets.passphrase.is_none() && secrets.key_file.is_some() {
            // A header that cannot be read is the business of the command.
            let kinds = Archive::key_kinds(archive).unwrap_or_default();
            let has = |kind| kinds.iter().any(|(_, other)| *other == kind);
            if has(KeyKind::KeyFileAndPassphrase) && !has(KeyKind::KeyFile) {
                secrets.passphrase = Some(typed(self.sources.passphrase.passphrase(archive)?));
            }
        }
        Ok(secrets)
    }

    /// The secrets and a new passphrase, from the file `new` or as [`secrets::both`] reads them.
    pub(crate) fn secrets_and_new(
        &self,
        new: Option<&PathBuf>,
        archive: &Path,
    ) -> Result<(Secrets, Passphrase), Failure> {
        let of = &self.sources.passphrase;
        let any = PassphraseSources { passfile_any: of.passfile_any, ..PassphraseSources::default() };
        let by_file = self.sources.keyfile.is_some() || !self.sources.identity.is_empty();
        if !by_file || *of != any {
            return secrets::both(&self.sources, new.map(PathBuf::as_path), archive);
        }
        Ok((self.secrets(archive)?, new_passphrase(new, of.passfile_any, archive)?))
    }

    pub(crate) fn access<'a>(&self, secrets: &'a Secrets) -> KeyAccess<'a> {
        KeyAccess { secrets, limits: self.limit.limits(), seen: self.seen.options() }
    }

    pub(crate) fn limits(&self) -> UnlockLimits {
        self.limit.limits()
    }

    pub(crate) fn prompts(&self) -> Arc<dyn Prompts> {
        secrets::prompts(&self.sources)
    }
}

/// A passphrase to be set, by somebody who opens the archive without one.
pub(crate) fn new_passphrase(
    file: Option<&PathBuf>,
    passfile_any: bool,
    archive: &Path,
) -> Result<Passphrase, Failure> {
    let sources = PassphraseSources { passfile: file.cloned(), passfile_any, ..PassphraseSources::default() };
    secrets::to_set(&sources, archive)
}

/// Reads a key file that is to be added; who may read it is told when it is used.
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
