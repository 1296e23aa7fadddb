//! Collects credentials from the command line and prompts, with retries.

use std::path::Path;
use std::sync::Arc;

use lockbox::Error;
use lockbox::crypto::{KeyFile, Passphrase, Prompts, RecoveryCode};
use lockbox::keys::Secrets;

use crate::failure::about;
use crate::secrets::{self, Sources, ask_openly, confirm_openly, is_marked};
use crate::{Failure, Program, Spinner, WRONG_KEY};

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
    sources.check()?;
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
    program: std::marker::PhantomData<fn() -> P>,
}

impl<P: Program> Prompter<P> {
    /// Returns prompts for identities: the passphrase that the sources name answers them too.
    pub fn prompts(sources: &Sources) -> Arc<dyn Prompts> {
        Arc::new(Prompter::<P> { sources: sources.clone(), program: std::marker::PhantomData })
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
        self.sources.answer(&format!("{} ", question.trim_end())).map(Passphrase::from)
    }
}
