//! Gets the passphrase: from a file, a command, standard input or a prompt.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lockbox::crypto::Passphrase;
use zeroize::Zeroizing;

use crate::exit::Failure;
use crate::options::Options;

/// Longer input is a mistake, such as a wrong file.
const MAX_BYTES: usize = 64 << 10;

/// The first source that is given: `passfile=`, `LOCKBOX_PASSFILE`, `LOCKBOX_PASSCOMMAND`, a standard input that is no
/// terminal, a prompt. One line end is cut off.
pub fn obtain(options: &Options) -> Result<Passphrase, Failure> {
    let environment = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let file = options.passfile.clone().or_else(|| environment("LOCKBOX_PASSFILE").map(PathBuf::from));
    let mut bytes = if let Some(path) = file {
        from_file(&path, options.passfile_any)?
    } else if let Some(command) = environment("LOCKBOX_PASSCOMMAND") {
        from_command(&command)?
    } else if !io::stdin().is_terminal() {
        read(io::stdin().lock()).map_err(|e| Failure::other(format!("cannot read the passphrase: {e}")))?
    } else {
        let typed = rpassword::prompt_password("Passphrase: ")
            .map_err(|e| Failure::other(format!("cannot ask for the passphrase: {e}")))?;
        Zeroizing::new(typed.into_bytes())
    };
    cut_line_end(&mut bytes);
    if bytes.is_empty() {
        return Err(Failure::other("no passphrase was given: use passfile=, LOCKBOX_PASSCOMMAND or a terminal"));
    }
    Ok(Passphrase::new(std::mem::take(&mut *bytes)))
}

fn from_file(path: &Path, any_mode: bool) -> Result<Zeroizing<Vec<u8>>, Failure> {
    let failed = |e: io::Error| Failure::other(format!("cannot read the passphrase from {}: {e}", path.display()));
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_file() && metadata.mode() & 0o077 != 0 && !any_mode {
        return Err(Failure::other(format!(
            "{} may be read by others (mode {:04o}): protect it with 'chmod 600', or allow it with the option passfile_any",
            path.display(),
            metadata.mode() & 0o7777
        )));
    }
    read(file).map_err(failed)
}

fn from_command(command: &std::ffi::OsStr) -> Result<Zeroizing<Vec<u8>>, Failure> {
    let failed = |e: io::Error| Failure::other(format!("LOCKBOX_PASSCOMMAND failed: {e}"));
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

/// Reads into memory reserved beforehand: a vector that grew would leave copies behind.
fn read(mut source: impl Read) -> io::Result<Zeroizing<Vec<u8>>> {
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

fn cut_line_end(bytes: &mut Vec<u8>) {
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file(content: &[u8], mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn one_line_end_is_cut_off() {
        for (content, expected) in [("abc\n", "abc"), ("abc\r\n", "abc"), ("abc", "abc"), ("abc\n\n", "abc\n")] {
            let file = file(content.as_bytes(), 0o600);
            let options = Options { passfile: Some(file.path().into()), ..Options::default() };
            assert_eq!(obtain(&options).ok().unwrap().bytes(), expected.as_bytes());
        }
    }

    #[test]
    fn a_file_that_others_read_is_refused_unless_allowed() {
        let file = file(b"abc\n", 0o640);
        let mut options = Options { passfile: Some(file.path().into()), ..Options::default() };
        let failure = obtain(&options).err().unwrap();
        assert!(failure.message.contains("chmod 600"), "{failure}");
        options.passfile_any = true;
        assert!(obtain(&options).is_ok());
    }

    #[test]
    fn an_empty_or_endless_passphrase_is_refused() {
        let empty = file(b"\n", 0o600);
        assert!(obtain(&Options { passfile: Some(empty.path().into()), ..Options::default() }).is_err());
        assert!(obtain(&Options { passfile: Some("/dev/zero".into()), ..Options::default() }).is_err());
    }
}
