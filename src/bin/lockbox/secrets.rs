//! Gets passphrases: from a file, a command, standard input or a prompt, never from the command line.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lockbox::archive::UnlockLimits;
use lockbox::crypto::Passphrase;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use zeroize::Zeroizing;

use crate::exit::{self, Failure, shown};

/// Longer input is a mistake, such as a wrong file.
const MAX_BYTES: usize = 64 << 10;

/// Where the passphrase comes from
#[derive(clap::Args)]
pub(crate) struct SecretArgs {
    /// Read the passphrase from FILE; without it from LOCKBOX_PASSFILE, the output of LOCKBOX_PASSCOMMAND, standard input when
    /// it is no terminal, or a prompt
    #[arg(long, value_name = "FILE")]
    pub(crate) passfile: Option<PathBuf>,
    /// Accept a passfile that others may read
    #[arg(long)]
    pub(crate) passfile_any: bool,
}

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

/// What a source of passphrases has.
enum Source {
    File(PathBuf),
    Command(OsString),
    Input,
    Prompt,
}

impl SecretArgs {
    fn source(&self) -> Source {
        let environment = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(path) = self.passfile.clone().or_else(|| environment("LOCKBOX_PASSFILE").map(PathBuf::from)) {
            Source::File(path)
        } else if let Some(command) = environment("LOCKBOX_PASSCOMMAND") {
            Source::Command(command)
        } else if io::stdin().is_terminal() {
            Source::Prompt
        } else {
            Source::Input
        }
    }

    /// The passphrase of an archive that exists.
    pub(crate) fn existing(&self, archive: &Path) -> Result<Passphrase, Failure> {
        match self.source() {
            Source::Prompt => prompt(&format!("Passphrase of {}: ", shown(archive))),
            source => self.read(&source),
        }
    }

    /// The same for a command whose standard input is something else: the terminal is asked instead.
    pub(crate) fn existing_with_input_taken(&self, archive: &Path) -> Result<Passphrase, Failure> {
        match self.source() {
            Source::Input if File::open("/dev/tty").is_err() => Err(Failure::usage(
                "standard input is not for the passphrase here: use --passfile, LOCKBOX_PASSFILE or LOCKBOX_PASSCOMMAND",
            )),
            Source::Input | Source::Prompt => prompt(&format!("Passphrase of {}: ", shown(archive))),
            source => self.read(&source),
        }
    }

    /// A passphrase to be set: typed twice.
    pub(crate) fn to_set(&self, archive: &Path) -> Result<Passphrase, Failure> {
        match self.source() {
            Source::Prompt => prompt_twice(archive),
            source => self.read(&source),
        }
    }

    /// The old and the new passphrase. Standard input gives both when it has to, one a line.
    pub(crate) fn both(&self, new: Option<&Path>, archive: &Path) -> Result<(Passphrase, Passphrase), Failure> {
        let source = self.source();
        if let Some(path) = new {
            let old = self.existing(archive)?;
            return Ok((old, checked(from_file(path, self.passfile_any)?)?));
        }
        match source {
            Source::Input => {
                let mut both = from_input()?;
                let Some(end) = both.iter().position(|&b| b == b'\n') else {
                    return Err(Failure::other("standard input must have the old and the new passphrase, one a line"));
                };
                let mut second = Zeroizing::new(Vec::with_capacity(both.len()));
                second.extend_from_slice(&both[end + 1..]);
                both.truncate(end + 1);
                Ok((checked(both)?, checked(second)?))
            }
            _ if io::stdin().is_terminal() => Ok((self.existing(archive)?, prompt_twice(archive)?)),
            source => Ok((self.read(&source)?, checked(from_input()?)?)),
        }
    }

    fn read(&self, source: &Source) -> Result<Passphrase, Failure> {
        checked(match source {
            Source::File(path) => from_file(path, self.passfile_any)?,
            Source::Command(command) => from_command(command)?,
            Source::Input | Source::Prompt => from_input()?,
        })
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

fn prompt(question: &str) -> Result<Passphrase, Failure> {
    let typed = rpassword::prompt_password(question).map_err(|e| exit::host("cannot ask for the passphrase", &e))?;
    checked(Zeroizing::new(typed.into_bytes()))
}

fn prompt_twice(archive: &Path) -> Result<Passphrase, Failure> {
    let first = prompt(&format!("New passphrase of {}: ", shown(archive)))?;
    let second = prompt("The same again: ")?;
    if first.bytes() != second.bytes() {
        return Err(Failure::other("the two passphrases differ; nothing was changed"));
    }
    Ok(first)
}

fn from_file(path: &Path, any_mode: bool) -> Result<Zeroizing<Vec<u8>>, Failure> {
    let failed = |e: io::Error| exit::host(format!("cannot read the passphrase from {}", shown(path)), &e);
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_file() && metadata.mode() & 0o077 != 0 && !any_mode {
        return Err(Failure::other(format!(
            "{} may be read by others (mode {:04o}): protect it with 'chmod 600', or allow it with --passfile-any",
            shown(path),
            metadata.mode() & 0o7777
        )));
    }
    read(file).map_err(failed)
}

fn from_command(command: &OsString) -> Result<Zeroizing<Vec<u8>>, Failure> {
    let failed = |e: io::Error| exit::host("LOCKBOX_PASSCOMMAND failed", &e);
    let mut child = Command::new("sh").arg("-c").arg(command).stdout(Stdio::piped()).spawn().map_err(failed)?;
    let bytes = match child.stdout.take() {
        Some(stdout) => read(stdout).map_err(failed)?,
        None => Zeroizing::default(),
    };
    let status = child.wait().map_err(failed)?;
    if !status.success() {
        return Err(Failure::other(format!("LOCKBOX_PASSCOMMAND failed: {status}")));
    }
    Ok(bytes)
}

fn from_input() -> Result<Zeroizing<Vec<u8>>, Failure> {
    read(io::stdin().lock()).map_err(|e| exit::host("cannot read the passphrase", &e))
}

/// Reads into memory reserved beforehand: a vector that grew would leave copies behind.
pub(crate) fn read(mut source: impl Read) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(vec![0; MAX_BYTES + 1]);
    let mut length = 0;
    loop {
        match source.read(&mut bytes[length..]) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
        if length > MAX_BYTES {
            return Err(io::Error::other("longer than 64 KiB"));
        }
    }
    bytes.truncate(length);
    Ok(bytes)
}

pub(crate) fn without_line_end(mut bytes: Zeroizing<Vec<u8>>) -> Zeroizing<Vec<u8>> {
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
    }
    bytes
}

/// Cuts one line end and refuses what is empty then.
fn checked(bytes: Zeroizing<Vec<u8>>) -> Result<Passphrase, Failure> {
    let mut bytes = without_line_end(bytes);
    if bytes.is_empty() {
        return Err(Failure::other("the passphrase is empty: use --passfile, LOCKBOX_PASSCOMMAND or a terminal"));
    }
    Ok(Passphrase::new(std::mem::take(&mut *bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_end_is_cut_and_nothing_is_refused() {
        let cut = |text: &str| checked(Zeroizing::new(text.as_bytes().to_vec())).ok().map(|p| p.bytes().to_vec());
        assert_eq!(cut("abc\n"), Some(b"abc".to_vec()));
        assert_eq!(cut("abc\n\n"), Some(b"abc\n".to_vec()));
        assert_eq!(cut(" abc\r\n"), Some(b" abc".to_vec()));
        assert_eq!(cut("\n"), None);
    }
}
