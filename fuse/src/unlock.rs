//! Gives the library the secrets that the mounting command was told of; the daemon gets the key alone.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use lockbox::Error;
use lockbox::crypto::{KeyFile, Passphrase, Prompts, RecoveryCode};
use lockbox::keys::{self, Secrets, UnlockLimits, UnlockedKey};
use lockbox_secrets::{Bytes, Lock, Sources};

use crate::exit::{Failure, WRONG_KEY};
use crate::options::Options;

/// The key of the archive at `path`, and why it could not be kept in the keyring when that was wanted. `name` is what the user calls it.
///
/// # Errors
/// One sentence and the exit code of what is wrong with the sources, the secrets or the archive.
pub fn unlock(path: &Path, name: &Path, options: &Options) -> Result<(UnlockedKey, Option<String>), Failure> {
    let mut door = Door {
        path,
        archive: keys::identify(path)?,
        limits: options.unlock_limits(),
        secrets: Secrets::default(),
        prompts: Arc::new(Asker(options.sources.clone())),
        mistyped: None,
    };
    let (key, refused) = lockbox_secrets::open(&mut door, name, &options.sources, &options.cache)?;
    Ok((key, refused.map(|error| error.sentence)))
}

/// An archive and the secrets that are tried on it.
struct Door<'a> {
    path: &'a Path,
    archive: [u8; 16],
    limits: UnlockLimits,
    secrets: Secrets,
    prompts: Arc<dyn Prompts>,
    /// Why what looks like a recovery code is none.
    mistyped: Option<Error>,
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
        let named = |error: Error| Failure::other(format!("{name}: {}", Failure::from(error)));
        self.secrets.key_file = Some(KeyFile::read(content).map_err(named)?);
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
        match keys::unlock_with(self.path, &self.secrets, &self.limits) {
            Ok(key) => Ok(Some(key)),
            Err(Error::WrongKey) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn wrong(&self) -> Failure {
        match &self.mistyped {
            Some(error) => Failure::new(WRONG_KEY, error.to_string()),
            None => Error::WrongKey.into(),
        }
    }
}

/// Lets identities and their plugins ask on the terminal, when the mounting command has one.
struct Asker(Sources);

impl Prompts for Asker {
    fn message(&self, text: &str) {
        lockbox_terminal::complain("mount.lockbox", text);
    }

    fn confirm(&self, question: &str, yes: &str, no: Option<&str>) -> Option<bool> {
        lockbox_secrets::confirm_openly(question, yes, no)
    }

    fn public(&self, question: &str) -> Option<String> {
        lockbox_secrets::ask_openly(&format!("{question} "))
    }

    fn secret(&self, question: &str) -> Option<Passphrase> {
        self.0.answer(&format!("{} ", question.trim_end())).map(Passphrase::from)
    }
}
