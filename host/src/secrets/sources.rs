//! Sources of credentials on the command line: a passphrase, a key file, identities.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};

use clap::Args;
use lockbox::crypto::identity::is_public_key;

use super::Bytes;
use super::error::Result;
use super::passphrase::PassphraseSources;
use super::read::{self, Privacy, SecretKind};
use crate::shown;

const IDENTITY: SecretKind = SecretKind { name: "identity", most: 1 << 20 };
/// The reader of the file applies the limit.
const KEY_FILE: SecretKind = SecretKind { name: "key file", most: usize::MAX };

/// Where the secrets that open an archive come from; nothing in here is secret.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Secrets")]
pub struct Sources {
    #[command(flatten)]
    pub passphrase: PassphraseSources,
    /// Open with the key file FILE; a passphrase is asked for only when a key slot wants both
    #[arg(long, value_name = "FILE")]
    pub keyfile: Option<PathBuf>,
    /// Open with the identities in FILE: those of age and its plugins, or an OpenSSH private key; may be repeated
    #[arg(long, value_name = "FILE")]
    pub identity: Vec<PathBuf>,
    /// Open with the recovery code in FILE, or on standard input for -; it may also be given as a passphrase
    #[arg(long, value_name = "FILE")]
    pub recovery_code: Option<PathBuf>,
}

impl Sources {
    /// # Errors
    /// As [`PassphraseSources::check`].
    pub fn check(&self) -> Result<()> {
        self.passphrase.check()
    }

    /// Returns whether the command line names any secret that opens an archive, and not just a way
    /// of asking.
    pub(crate) fn any_named(&self) -> bool {
        self.passphrase.any_named() || self.names_file()
    }

    /// Returns whether it names a file that opens an archive without any passphrase.
    pub fn names_file(&self) -> bool {
        self.keyfile.is_some() || self.recovery_code.is_some() || !self.identity.is_empty()
    }

    /// Returns the same options for the command line of another program of lockbox.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut arguments = self.passphrase.arguments();
        let files = self.keyfile.iter().map(|path| ("--keyfile=", path));
        let files = files.chain(self.recovery_code.iter().map(|path| ("--recovery-code=", path)));
        for (name, path) in files.chain(self.identity.iter().map(|path| ("--identity=", path))) {
            let mut argument = OsString::from(name);
            argument.push(path);
            arguments.push(argument);
        }
        arguments
    }

    /// Overrides fields with those set in `later`, as later options do; identities add up.
    pub fn overridden_by(&mut self, later: &Sources) {
        self.passphrase.overridden_by(&later.passphrase);
        if later.keyfile.is_some() {
            self.keyfile.clone_from(&later.keyfile);
        }
        if later.recovery_code.is_some() {
            self.recovery_code.clone_from(&later.recovery_code);
        }
        self.identity.extend_from_slice(&later.identity);
    }

    /// Returns the key file, opened, and its name for messages.
    ///
    /// # Errors
    /// One sentence when it cannot be opened or others may read it.
    pub fn key_file(&self) -> Result<Option<(File, String)>> {
        let open = |path: &PathBuf| Ok((read::open(path, &KEY_FILE, self.passphrase.privacy())?, shown(path)));
        self.keyfile.as_ref().map(open).transpose()
    }

    /// Returns the recovery code.
    ///
    /// # Errors
    /// One sentence when it cannot be read or others may read it.
    pub fn recovery_code(&self) -> Result<Option<Bytes>> {
        self.recovery_code.as_ref().map(|path| self.passphrase.bytes(path)).transpose()
    }

    /// Returns the content of each identity file and its name for messages.
    ///
    /// # Errors
    /// One sentence when one cannot be read or others may read it.
    pub fn identities(&self) -> Result<Vec<(Bytes, String)>> {
        let read = |path: &PathBuf| Ok((self.identity_file(path)?, shown(path)));
        self.identity.iter().map(read).collect()
    }

    fn identity_file(&self, path: &Path) -> Result<Bytes> {
        let private = read::file(path, &IDENTITY, self.passphrase.privacy());
        // The public half of a key may be readable by others, and protecting it is no remedy: the
        // attempt to use it reports that it is public. A pipe would block.
        let public = || {
            let content = path.is_file().then(|| read::file(path, &IDENTITY, Privacy::Waived).ok()).flatten();
            content.filter(|content| is_public_key(content))
        };
        private.or_else(|error| public().ok_or(error))
    }

    /// Answers a question of an identity or its plugin without echo. Returns None when no person
    /// can be asked.
    pub fn answer(&self, question: &str) -> Option<Bytes> {
        self.passphrase.answer(question)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        sources: Sources,
    }

    #[test]
    fn arguments_for_another_program_say_the_same() {
        let given = ["--passfd=5", "--passfile-any", "--keyfile=-a, b", "--identity=one", "--identity=two"];
        let parse = |arguments: &[OsString]| {
            let name = [OsString::from("program")];
            Program::try_parse_from(name.iter().chain(arguments)).ok().unwrap().sources
        };
        let sources = parse(&given.map(OsString::from));
        assert_eq!(sources.arguments(), given);
        assert_eq!(parse(&sources.arguments()), sources);
        for given in [
            "--recovery-code=-",
            "--passfile=x",
            "--passcommand=echo a, b",
            "--credential=name",
            "--ask-password",
            "--quiet",
        ] {
            let sources = parse(&[given.into()]);
            assert_eq!(sources.arguments(), [given]);
        }
    }

    #[test]
    fn later_options_replace_earlier_ones_and_identities_add_up() {
        let one = Sources { keyfile: Some("a".into()), identity: vec!["x".into()], ..Sources::default() };
        let other = Sources { keyfile: Some("b".into()), identity: vec!["y".into()], ..Sources::default() };
        let mut both = one.clone();
        both.overridden_by(&other);
        assert_eq!((both.keyfile, both.identity), (Some("b".into()), vec!["x".into(), "y".into()]));
        let mut both = one.clone();
        both.overridden_by(&Sources::default());
        assert_eq!(both, one);
    }
}
