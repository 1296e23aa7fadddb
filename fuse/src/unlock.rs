//! Gives the library the secrets that the mounting command was told of; the daemon gets the key alone.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use lockbox::Error;
use lockbox::archive::{Archive, KeyKind, Secrets, UnlockLimits, UnlockedKey};
use lockbox::crypto::{KeyFile, Passphrase, Prompts, RecoveryCode};
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
        archive: Archive::identify(path)?,
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
        let key = UnlockedKey::from_bytes(kept).ok()?;
        Archive::check_key(self.path, &key).ok().map(|()| key)
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
        match RecoveryCode::parse(&passphrase) {
            Ok(code) => self.secrets.recovery_code = Some(code),
            Err(error) if lockbox_secrets::resembles_recovery_code(&passphrase) => self.mistyped = Some(error),
            Err(_) => {}
        }
        self.secrets.passphrase = Some(typed(passphrase));
    }

    fn wants_both(&self) -> bool {
        let kinds = Archive::key_kinds(self.path).unwrap_or_default();
        kinds.iter().any(|(_, kind)| *kind == KeyKind::KeyFileAndPassphrase)
    }

    fn attempt(&self) -> Result<Option<UnlockedKey>, Failure> {
        match Archive::unlock_with(self.path, &self.secrets, &self.limits) {
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

/// Moves the bytes, so that there is no second copy of them.
fn typed(mut bytes: Bytes) -> Passphrase {
    Passphrase::new(std::mem::take(&mut *bytes))
}

/// Lets identities and their plugins ask on the terminal, when the mounting command has one.
struct Asker(Sources);

impl Prompts for Asker {
    fn message(&self, text: &str) {
        let _ = writeln!(io::stderr(), "mount.lockbox: {text}");
    }

    fn confirm(&self, question: &str, yes: &str, no: Option<&str>) -> Option<bool> {
        let choice = no.map_or_else(|| format!("[y: {yes}, n]"), |no| format!("[y: {yes}, n: {no}]"));
        let answer = lockbox_secrets::ask_openly(&format!("{question} {choice} "))?;
        Some(["y", "yes"].iter().any(|word| answer.trim().eq_ignore_ascii_case(word)))
    }

    fn public(&self, question: &str) -> Option<String> {
        lockbox_secrets::ask_openly(&format!("{question} "))
    }

    fn secret(&self, question: &str) -> Option<Passphrase> {
        self.0.answer(&format!("{} ", question.trim_end())).map(typed)
    }
}
