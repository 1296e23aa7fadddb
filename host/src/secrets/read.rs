//! Reads secrets from files, descriptors, standard input and programs: bounded and unbuffered.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IsTerminal, Read};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use zeroize::Zeroizing;

use super::{Bytes, Error, Result};
use crate::shown;

/// Time that a FIFO may wait for a writer. A person who types there needs seconds; a boot must not
/// wait for ever.
const WRITER_DEADLINE: Duration = Duration::from_secs(60);

/// Kind of secret: its name in messages, and its largest size in bytes. A larger one is a mistake,
/// such as a wrong file.
pub(crate) struct SecretKind {
    pub(crate) name: &'static str,
    pub(crate) most: usize,
}

pub(crate) const PASSPHRASE: SecretKind = SecretKind { name: "passphrase", most: 64 << 10 };

/// Something secret that opens nothing.
const VALUE: SecretKind = SecretKind { name: "value", most: 64 << 10 };

/// Reads a secret that opens nothing, such as a token to store, from `file` or standard input, and
/// strips one line end.
///
/// # Errors
/// One sentence when it cannot be read or is longer than 64 KiB.
pub fn value(from: Option<&Path>) -> Result<Bytes> {
    let read = match from {
        Some(path) => file(path, &VALUE, Privacy::Waived)?,
        None => input(&VALUE)?,
    };
    Ok(without_line_end(read))
}

/// Cuts one line end off.
pub fn without_line_end(mut bytes: Bytes) -> Bytes {
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
    }
    bytes
}

/// Policy for files that other users may read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Privacy {
    Demanded,
    /// The user allows it, or the directory protects the file.
    Waived,
}

pub(crate) fn file(path: &Path, what: &SecretKind, privacy: Privacy) -> Result<Bytes> {
    all(open(path, what, privacy)?, what, &shown(path))
}

/// Opens a file to read a secret from: private, and with a writer if it is a FIFO.
pub(crate) fn open(path: &Path, what: &SecretKind, privacy: Privacy) -> Result<File> {
    open_within(path, what, privacy, WRITER_DEADLINE)
}

fn open_within(path: &Path, what: &SecretKind, privacy: Privacy, deadline: Duration) -> Result<File> {
    let failed = |e: io::Error| Error::host(format!("cannot read the {} from {}", what.name, shown(path)), &e);
    // Without waiting: opening a FIFO without a writer would last until there is one.
    let flags = (OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let kind = metadata.file_type();
    if (kind.is_file() || kind.is_fifo()) && metadata.mode() & 0o077 != 0 && privacy == Privacy::Demanded {
        return Err(Error::source(format!(
            "{} may be read by others (mode {:04o}): protect it with 'chmod 600', or allow it with --passfile-any",
            shown(path),
            metadata.mode() & 0o7777
        )));
    }
    if kind.is_fifo() && !has_writer(&file, deadline).map_err(failed)? {
        return Err(Error::source(format!(
            "no program wrote the {} to {} within {} seconds",
            what.name,
            shown(path),
            deadline.as_secs()
        )));
    }
    wait_again(&file).map_err(failed)?;
    Ok(file)
}

/// Waits until there is something to read, or an end.
fn has_writer(fifo: &File, deadline: Duration) -> io::Result<bool> {
    let timeout = PollTimeout::try_from(deadline).unwrap_or(PollTimeout::MAX);
    let mut asked = [PollFd::new(fifo.as_fd(), PollFlags::POLLIN)];
    Ok(poll(&mut asked, timeout)? > 0)
}

/// Undoes the opening without waiting.
fn wait_again(file: &File) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    fcntl(file, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Reads a descriptor inherited at the start of the program, and closes it, so that no child
/// inherits it.
pub(crate) fn descriptor(number: RawFd, what: &SecretKind) -> Result<Bytes> {
    let name = format!("descriptor {number}");
    let failed = |e: io::Error| Error::host(format!("cannot read the {} from {name}", what.name), &e);
    let file = if number == 0 { input_file().map_err(failed)? } else { take(number).map_err(failed)?.into() };
    if file.is_terminal() {
        return Err(Error::source(format!(
            "{name} is a terminal, which would show the {}; without the option there is a prompt",
            what.name
        )));
    }
    all(file, what, &name)
}

#[allow(unsafe_code)]
fn take(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: used for one system call, which answers EBADF for a number that is not open.
    let inherited = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(inherited, FcntlArg::F_GETFD)?;
    // SAFETY: the descriptor is open, as was just checked, and the user states that it was opened
    // for this program to read a secret from. The programs ask for secrets before they open
    // anything that they keep, so no descriptor of their own has the number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

pub(crate) fn input(what: &SecretKind) -> Result<Bytes> {
    let file = input_file().map_err(|e| Error::host(format!("cannot read the {}", what.name), &e))?;
    all(file, what, "standard input")
}

/// Past the standard library's buffer, which would keep a copy.
fn input_file() -> io::Result<File> {
    Ok(io::stdin().as_fd().try_clone_to_owned()?.into())
}

/// Reads to the end, into memory reserved beforehand: a growing vector would leave copies in
/// memory.
pub(crate) fn all(mut source: impl Read, what: &SecretKind, name: &str) -> Result<Bytes> {
    let mut bytes = Zeroizing::new(vec![0; what.most + 1]);
    let mut length = 0;
    loop {
        match source.read(&mut bytes[length..]) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::host(format!("cannot read the {} from {name}", what.name), &e)),
        }
        if length > what.most {
            return Err(Error::source(format!(
                "the {} from {name} is longer than {} KiB, which must be a mistake",
                what.name,
                what.most >> 10
            )));
        }
    }
    bytes.truncate(length);
    Ok(bytes)
}

/// Returns the output of a shell command. `name` is the source of the command; the command itself
/// may be secret.
pub(crate) fn shell(command: &OsStr, name: &str, what: &SecretKind) -> Result<Bytes> {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command);
    output_of(&mut shell, name, what)
}

const ASKER: &str = "systemd-ask-password";

pub(crate) fn ask_agents(question: &str, what: &SecretKind) -> Result<Bytes> {
    let mut asker = Command::new(ASKER);
    asker
        .args(["--no-tty", "--id=lockbox", "--icon=drive-harddisk", "--", &lockbox_terminal::sentence(question)])
        .stdin(Stdio::null());
    output_of(&mut asker, ASKER, what)
}

fn output_of(command: &mut Command, name: &str, what: &SecretKind) -> Result<Bytes> {
    let failed = |e: io::Error| match e.kind() {
        ErrorKind::NotFound => Error::source(format!("{name}: command not found")),
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
        Some(stdout) => all(stdout, what, name),
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

/// Message about an empty answer.
pub(super) const TYPED: &str = "nothing was typed";

/// Strips one trailing newline.
///
/// # Errors
/// `empty` if nothing is left.
pub fn checked(bytes: Bytes, empty: &str) -> Result<Bytes> {
    let bytes = without_line_end(bytes);
    if bytes.is_empty() {
        return Err(Error::source(empty));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::io::Write;
    use std::os::fd::IntoRawFd;
    use std::os::unix::fs::PermissionsExt;
    use std::thread;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    const SHORTLY: Duration = Duration::from_millis(50);

    fn sentence(result: Result<Bytes>) -> String {
        result.err().unwrap().sentence
    }

    #[test]
    fn a_fifo_is_read_when_somebody_writes_and_left_when_nobody_does() {
        let place = tempfile::tempdir().unwrap();
        let fifo = place.path().join("fifo");
        mkfifo(&fifo, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let waited = open_within(&fifo, &PASSPHRASE, Privacy::Demanded, SHORTLY);
        assert!(waited.err().unwrap().sentence.starts_with("no program wrote the passphrase to "));
        let writer = thread::spawn({
            let fifo = fifo.clone();
            // Opening waits for the reader.
            move || OpenOptions::new().write(true).open(fifo).unwrap().write_all(b"secret\n").unwrap()
        });
        assert_eq!(*file(&fifo, &PASSPHRASE, Privacy::Demanded).unwrap(), b"secret\n");
        writer.join().unwrap();
        fs::set_permissions(&fifo, Permissions::from_mode(0o644)).unwrap();
        assert!(sentence(file(&fifo, &PASSPHRASE, Privacy::Demanded)).contains("chmod 600"));
    }

    #[test]
    fn a_file_that_others_read_is_refused_unless_allowed() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("pass");
        fs::write(&path, "secret").unwrap();
        for mode in [0o640, 0o604, 0o620, 0o601] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let refused = sentence(file(&path, &PASSPHRASE, Privacy::Demanded));
            assert!(refused.contains(&format!("mode {mode:04o}")) && !refused.contains("secret"), "{refused}");
            assert_eq!(*file(&path, &PASSPHRASE, Privacy::Waived).unwrap(), b"secret");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(*file(&path, &PASSPHRASE, Privacy::Demanded).unwrap(), b"secret");
    }

    #[test]
    fn what_is_endless_no_file_or_missing_is_one_sentence() {
        let read = |path: &str| sentence(file(Path::new(path), &PASSPHRASE, Privacy::Demanded));
        assert_eq!(read("/dev/zero"), "the passphrase from /dev/zero is longer than 64 KiB, which must be a mistake");
        assert_eq!(read("/proc"), "cannot read the passphrase from /proc: Is a directory");
        assert_eq!(
            read("/missing\x1b[2J"),
            "cannot read the passphrase from /missing\\x1b[2J: No such file or directory"
        );
    }

    #[test]
    fn a_descriptor_is_read_and_closed() {
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"secret").unwrap();
        drop(writer);
        let number = reader.into_raw_fd();
        assert_eq!(*descriptor(number, &PASSPHRASE).unwrap(), b"secret");
        // High enough that nothing else of the test program gets the number meanwhile.
        let closed = sentence(descriptor(987, &PASSPHRASE));
        assert_eq!(closed, "cannot read the passphrase from descriptor 987: Bad file descriptor");
    }

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
