//! Reads passphrases from programs: the user's command, and systemd's.

use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::process::{Child, Command, ExitStatus, Stdio};

use super::Bytes;
use super::error::{Error, Result};
use super::read::{self, SecretKind};

/// Returns the output of a shell command. `name` is the source of the command; the command itself
/// may be secret.
pub(crate) fn shell(command: &OsStr, name: &str, what: &SecretKind) -> Result<Bytes> {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command);
    output_of(&mut shell, name, what)
}

const ASKER: &str = "systemd-ask-password";

/// Returns the answer given to systemd's password agents.
pub(crate) fn ask(question: &str, what: &SecretKind) -> Result<Bytes> {
    let mut asker = Command::new(ASKER);
    asker
        .args(["--no-tty", "--id=lockbox", "--icon=drive-harddisk", "--", &lockbox_terminal::sentence(question)])
        .stdin(Stdio::null());
    output_of(&mut asker, ASKER, what)
}

fn output_of(command: &mut Command, name: &str, what: &SecretKind) -> Result<Bytes> {
    let failed = |e: io::Error| match e.kind() {
        ErrorKind::NotFound => Error::source(format!("{name} is not there to be run")),
        _ => Error::host(format!("{name} failed"), &e),
    };
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(failed)?;
    let (bytes, status) = answer_of(&mut child, name, what)?;
    if !status.success() {
        return Err(Error::source(format!("{name} failed: {status}")));
    }
    Ok(bytes)
}

/// Returns the output of a started program and its exit status.
pub(crate) fn answer_of(child: &mut Child, name: &str, what: &SecretKind) -> Result<(Bytes, ExitStatus)> {
    let bytes = match child.stdout.take() {
        Some(stdout) => read::all(stdout, what, name),
        None => Ok(Bytes::default()),
    };
    if bytes.is_err() {
        // It may have more to say for ever.
        let _ = child.kill();
    }
    let status = end_of(child).map_err(|e| Error::host(format!("{name} failed"), &e))?;
    Ok((bytes?, status))
}

fn end_of(child: &mut Child) -> io::Result<ExitStatus> {
    loop {
        match child.wait() {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            ended => return ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::read::PASSPHRASE;
    use super::*;

    fn run(command: &str) -> std::result::Result<Vec<u8>, String> {
        shell(OsStr::new(command), "COMMAND", &PASSPHRASE).map(|bytes| bytes.to_vec()).map_err(|e| e.sentence)
    }

    #[test]
    fn a_command_that_fails_or_never_ends_gives_one_sentence_without_its_output() {
        assert_eq!(run("echo secret"), Ok(b"secret\n".to_vec()));
        assert_eq!(run("echo secret; exit 3"), Err("COMMAND failed: exit status: 3".into()));
        assert_eq!(run("kill -9 $$"), Err("COMMAND failed: signal: 9 (SIGKILL)".into()));
        let endless = "the passphrase from COMMAND is longer than 64 KiB, which must be a mistake";
        assert_eq!(run("trap '' PIPE; while :; do echo secret; done 2>/dev/null"), Err(endless.into()));
        assert!(run("/missing/program 2>/dev/null").unwrap_err().starts_with("COMMAND failed: exit status: 127"));
    }
}
