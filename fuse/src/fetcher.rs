//! The process that asks the server of an archive which is no file of this host.
//!
//! It reaches the network and has no key; the daemon has the key and, in its sandbox, reaches no network. It starts before the mount is there,
//! which may hide its program and libraries, and ends when the daemon does, however that ends.
//!
//! It reads data of servers, so it has a sandbox of its own, before the first request and before
//! its first thread: no capabilities, no new privileges, files of its caches alone
//! ([`crate::sandbox`]), system calls of a list ([`crate::filter`]). A third process looks up names
//! and credentials, which it may not ([`crate::broker`]). None of them can be traced, and the
//! confined ones trace no process outside: neither reads the memory of the daemon.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lockbox_host::remote::{self, Access, ArchiveLocation, FetcherReach, Remote};
use nix::sys::signal::SigSet;
use nix::unistd::geteuid;
use rustix::thread::CapabilitySet;

use crate::broker::Brokerage;
use crate::journal::{self, Target};
use crate::mount::send_descriptor;
use crate::{capabilities, filter, sandbox};

/// The hidden argument that makes the program this process.
pub const ARGUMENT: &str = "--fetcher";
/// Whether it enters its sandbox.
const CONFINED: &str = "confined";
const FREE: &str = "free";

/// Starts it, and returns when the archive is open there.
///
/// # Errors
/// Those of opening it.
pub(crate) fn start(
    archive: &Path,
    how: &Remote,
    access: Access,
    log: &Target<'_>,
    confined: bool,
) -> lockbox::Result<ArchiveLocation> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("mount.lockbox").arg(ARGUMENT).arg(if confined { CONFINED } else { FREE });
    // A terminal's interrupt is for the daemon alone.
    command.args(journal::argument(log)).process_group(0);
    command.stderr(if matches!(log, Target::Terminal) { Stdio::inherit() } else { Stdio::null() });
    ArchiveLocation::apart(&mut command, archive, how, access)
}

/// The process itself.
///
/// # Errors
/// When nothing asks on its standard input, or no log can be written.
pub fn run() -> io::Result<()> {
    // A supervisor that stops the whole group means the daemon, which still needs this process then.
    SigSet::all().thread_block()?;
    let mut arguments = std::env::args_os().skip(2);
    let confined = arguments.next().is_none_or(|word| word != FREE);
    let log = arguments.next().map(PathBuf::from);
    let log = journal::target(log.as_deref());
    journal::start(&log, false).map_err(|failure| io::Error::other(failure.message))?;
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    if !confined {
        return remote::fetch(control, None, |_| {});
    }
    let brokerage = Brokerage::start(&log)?;
    let served = remote::fetch(control, Some(brokerage.questions()?), |reach| confine(reach, &brokerage.refusals));
    brokerage.end();
    served
}

/// A machine that refuses a part of it fetches all the same, with a line in the log.
fn confine(reach: &FetcherReach, refusals: &UnixStream) {
    let another = reach.written.iter().any(|path| is_of_another(path));
    let bounded = match sandbox::enter_fetcher(reach) {
        Ok(true) => true,
        Ok(false) => {
            tracing::info!("this kernel has no Landlock: the fetcher keeps access to the files of its user");
            false
        }
        Err(error) => {
            tracing::warn!("the sandbox of the fetcher was refused: {error}");
            false
        }
    };
    // Objects in a directory of another user, which root alone can name: within what Landlock leaves.
    let kept = if another && bounded { CapabilitySet::DAC_OVERRIDE } else { CapabilitySet::empty() };
    if let Err(error) = capabilities::keep_only(kept) {
        tracing::warn!("the fetcher keeps its capabilities: {error}");
    }
    if let Err(error) = filter::enter(filter::Process::Fetcher, |listener| send_descriptor(refusals, listener.as_fd()))
    {
        tracing::warn!("the filter of the fetcher's system calls was refused: {error}");
    }
}

fn is_of_another(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.uid() != geteuid().as_raw())
}
