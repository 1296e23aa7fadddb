//! Fetcher process: talks to the server of a remote archive.
//!
//! It has network access and no key; the daemon has the key and, in its sandbox, no network. It
//! starts before the mount, which may cover its program and libraries, and ends with the daemon,
//! however that ends.
//!
//! It parses data of servers, so it enters a sandbox of its own, before the first request and
//! before its first thread: no capabilities, no new privileges, only files of its caches
//! ([`crate::sandbox`]), and a list of system calls ([`crate::filter`]). A third process, the
//! broker, resolves host names and credentials, which the sandbox denies. None of them can be
//! traced, and the confined ones cannot trace processes outside: neither can read the daemon's
//! memory.
//!
//! The broker starts before the fetcher enters its sandbox, and ends with it. Its standard input is
//! a socket for queries. Over standard output it receives the listener of the fetcher's system call
//! filter; it answers and logs the refused calls.

use std::ffi::OsStr;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::{io, thread};

use lockbox_host::remote::{self, Access, ArchiveLocation, FetcherReach, RemoteOptions};
use nix::sys::signal::SigSet;
use nix::unistd::geteuid;
use rustix::thread::CapabilitySet;

use crate::logging::{self, LogTarget};
use crate::mount::send_descriptor;
use crate::{filter, sandbox};

/// Hidden argument that runs the program as the fetcher.
pub const ARGUMENT: &str = "--fetcher";
/// Argument values: with or without the sandbox.
const CONFINED: &str = "confined";
const FREE: &str = "free";

/// Starts the fetcher, and returns when it has opened the archive. Errors: failures of opening the
/// archive.
pub(crate) fn start(
    archive: &Path,
    options: &RemoteOptions,
    access: Access,
    log: &LogTarget<'_>,
    confined: bool,
) -> lockbox::Result<ArchiveLocation> {
    let arguments = [ARGUMENT, if confined { CONFINED } else { FREE }].map(OsStr::new);
    let mut command = logging::process_command(&arguments, log);
    ArchiveLocation::open_in_fetcher(&mut command, archive, options, access)
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
    let log = logging::start_process(log.as_deref())?;
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    if !confined {
        return remote::fetch(control, None, |_| {});
    }
    let brokerage = Brokerage::start(&log)?;
    let questions = brokerage.questions.try_clone()?;
    let served = remote::fetch(control, Some(questions), |reach| confine(reach, &brokerage.refusals));
    brokerage.end();
    served
}

/// Enters the sandbox. If the machine refuses a part of it, fetching continues with a log line.
fn confine(reach: &FetcherReach, refusals: &UnixStream) {
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
    let kept = if bounded { needed_capabilities(reach) } else { CapabilitySet::empty() };
    if let Err(error) = sandbox::keep_capabilities(kept) {
        tracing::warn!("the fetcher keeps its capabilities: {error}");
    }
    if let Err(error) =
        filter::enter(filter::ConfinedProcess::Fetcher, |listener| send_descriptor(refusals, listener.as_fd()))
    {
        tracing::warn!("the filter of the fetcher's system calls was refused: {error}");
    }
}

/// Returns the capabilities for objects in a directory of another user, which only root can name.
/// Landlock limits them to the paths of `reach`.
fn needed_capabilities(reach: &FetcherReach) -> CapabilitySet {
    if reach.written.iter().any(|path| has_other_owner(path)) {
        CapabilitySet::DAC_OVERRIDE
    } else if reach.objects.as_deref().is_some_and(has_other_owner) {
        CapabilitySet::DAC_READ_SEARCH
    } else {
        CapabilitySet::empty()
    }
}

fn has_other_owner(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.uid() != geteuid().as_raw())
}

/// Hidden argument that runs the program as the broker.
pub const BROKER_ARGUMENT: &str = "--broker";

/// Fetcher's side of the connections to the broker.
struct Brokerage {
    child: Child,
    questions: UnixStream,
    /// Carries the listener of the fetcher's filter.
    refusals: UnixStream,
}

impl Brokerage {
    fn start(log: &LogTarget<'_>) -> io::Result<Brokerage> {
        let (questions, their_questions) = UnixStream::pair()?;
        let (refusals, their_refusals) = UnixStream::pair()?;
        let mut command = logging::process_command(&[BROKER_ARGUMENT.as_ref()], log);
        command.stdin(OwnedFd::from(their_questions)).stdout(OwnedFd::from(their_refusals));
        let child = command.spawn()?;
        Ok(Brokerage { child, questions, refusals })
    }

    /// Ends the process and waits for it: a container may have no process that reaps it.
    fn end(mut self) {
        // Threads may hold duplicates.
        let _ = self.questions.shutdown(Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// Runs the broker process: answers until the fetcher is gone.
///
/// # Errors
/// Fails without a peer on standard input, or if the log cannot be opened.
pub fn run_broker() -> io::Result<()> {
    SigSet::all().thread_block()?;
    let log = std::env::args_os().nth(2).map(PathBuf::from);
    logging::start_process(log.as_deref())?;
    let refusals = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    thread::Builder::new().name("listener".into()).spawn(move || filter::log_refusals(&refusals, "fetcher"))?;
    remote::answer_fetcher(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_another_user_is_read_or_written_by_the_right_to_do_that() {
        let (own, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (own, mut other) = (own.path().to_owned(), place.path().to_owned());
        if geteuid().is_root() {
            std::os::unix::fs::chown(&other, Some(1), None).unwrap();
        } else {
            other = "/".into();
        }
        let needed = |written: &Path, objects: &Path| {
            let (written, objects) = (vec![written.to_owned()], Some(objects.to_owned()));
            needed_capabilities(&FetcherReach { written, objects, ..FetcherReach::default() })
        };
        assert_eq!(needed(&own, &own), CapabilitySet::empty());
        assert_eq!(needed(&own, &other), CapabilitySet::DAC_READ_SEARCH);
        assert_eq!(needed(&other, &other), CapabilitySet::DAC_OVERRIDE);
    }
}
