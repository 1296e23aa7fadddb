//! The process that asks the server of an archive which is no file of this host.
//!
//! It reaches the network and has no key; the daemon has the key and, in its sandbox, reaches no network. It starts before the mount is there,
//! which may hide what it is made of, and ends when the daemon does, however that ends.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lockbox_host::elsewhere::{self, Access, Place, Remote};
use nix::sys::signal::SigSet;

use crate::journal::{self, Target};

/// The hidden argument that makes the program this process.
pub const ARGUMENT: &str = "--fetcher";

/// Starts it, and returns when the archive is open there.
///
/// # Errors
/// Those of opening it.
pub(crate) fn start(archive: &Path, how: &Remote, access: Access, log: &Target<'_>) -> lockbox::Result<Place> {
    let mut command = Command::new("/proc/self/exe");
    // A terminal's interrupt is for the daemon alone.
    command.arg0("mount.lockbox").arg(ARGUMENT).args(journal::argument(log)).process_group(0);
    command.stderr(if matches!(log, Target::Terminal) { Stdio::inherit() } else { Stdio::null() });
    Place::apart(&mut command, archive, how, access)
}

/// The process itself.
///
/// # Errors
/// When nothing asks on its standard input, or no log can be written.
pub fn run() -> io::Result<()> {
    // A supervisor that stops the whole group means the daemon, which still needs this process then.
    SigSet::all().thread_block()?;
    let log = std::env::args_os().nth(2).map(PathBuf::from);
    journal::start(&journal::target(log.as_deref()), false).map_err(|failure| io::Error::other(failure.message))?;
    elsewhere::fetch(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?))
}
