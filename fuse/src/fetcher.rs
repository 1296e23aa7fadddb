//! Fetcher process: talks to the server of a remote archive.
//!
//! It has network access and no key; the daemon has the key and, in its sandbox, no network. It
//! starts before the mount, which may cover its program and libraries, and ends with the daemon,
//! however that ends.
//!
//! It parses data of servers, so it enters a sandbox of its own, before the first request and
//! before its first thread: no capabilities, no new privileges, only files of its caches
//! ([`crate::sandbox`]), and a list of system calls ([`crate::filter`]). A third process resolves
//! host names and credentials, which the sandbox denies ([`crate::broker`]). None of them can be
//! traced, and the confined ones cannot trace processes outside: neither can read the daemon's
//! memory.

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
use crate::logging::{self, LogTarget};
use crate::mount::send_descriptor;
use crate::{capabilities, filter, sandbox};

/// Hidden argument that runs the program as the fetcher.
pub const ARGUMENT: &str = "--fetcher";
/// Argument values: with or without the sandbox.
const CONFINED: &str = "confined";
const FREE: &str = "free";

/// Starts the fetcher, and returns when it has opened the archive.
///
/// # Errors
/// Errors of opening the archive.
pub(crate) fn start(
    archive: &Path,
    options: &Remote,
    access: Access,
    log: &LogTarget<'_>,
    confined: bool,
) -> lockbox::Result<ArchiveLocation> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("mount.lockbox").arg(ARGUMENT).arg(if confined { CONFINED } else { FREE });
    // A terminal's interrupt is meant for the daemon alone.
    command.args(logging::to_argument(log)).process_group(0);
    command.stderr(if matches!(log, LogTarget::Terminal) { Stdio::inherit() } else { Stdio::null() });
    ArchiveLocation::apart(&mut command, archive, options, access)
}

/// Runs the fetcher process.
///
/// # Errors
/// Fails without a peer on standard input, or if the log cannot be opened.
pub fn run() -> io::Result<()> {
    // A supervisor that stops the whole group means the daemon, which still needs this process
    // then.
    SigSet::all().thread_block()?;
    let mut arguments = std::env::args_os().skip(2);
    let confined = arguments.next().is_none_or(|word| word != FREE);
    let log = arguments.next().map(PathBuf::from);
    let log = logging::from_argument(log.as_deref());
    logging::start(&log, false).map_err(|failure| io::Error::other(failure.message))?;
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    if !confined {
        return remote::fetch(control, None, |_| {});
    }
    let brokerage = Brokerage::start(&log)?;
    let served = remote::fetch(control, Some(brokerage.questions()?), |reach| confine(reach, &brokerage.refusals));
    brokerage.end();
    served
}

/// Enters the sandbox. If the machine refuses a part of it, fetching continues with a log line.
fn confine(reach: &FetcherReach, refusals: &UnixStream) {
    let another = reach.written.iter().any(|path| has_other_owner(path));
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
    // Objects in a directory of another user, which only root can name: within Landlock's limits.
    let kept_capabilities = if another && bounded { CapabilitySet::DAC_OVERRIDE } else { CapabilitySet::empty() };
    if let Err(error) = capabilities::keep_only(kept_capabilities) {
        tracing::warn!("the fetcher keeps its capabilities: {error}");
    }
    if let Err(error) =
        filter::enter(filter::ConfinedProcess::Fetcher, |listener| send_descriptor(refusals, listener.as_fd()))
    {
        tracing::warn!("the filter of the fetcher's system calls was refused: {error}");
    }
}

fn has_other_owner(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.uid() != geteuid().as_raw())
}
