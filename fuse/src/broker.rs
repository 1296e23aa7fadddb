//! Broker process: resolves host names and credentials for the sandboxed fetcher.
//!
//! It starts before the fetcher enters its sandbox, and ends with it. Standard input is a socket
//! for queries. Over standard output it receives the listener of the fetcher's system call filter;
//! it answers and logs the refused calls.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;

use lockbox_host::remote;
use nix::sys::signal::SigSet;

use crate::filter;
use crate::logging::{self, LogTarget};

/// Hidden argument that runs the program as the broker.
pub const ARGUMENT: &str = "--broker";

/// Fetcher's side of the connections.
pub(crate) struct Brokerage {
    child: Child,
    questions: UnixStream,
    /// Carries the listener of the fetcher's filter.
    pub(crate) refusals: UnixStream,
}

impl Brokerage {
    /// # Errors
    /// Fails if the process cannot be started.
    pub(crate) fn start(log: &LogTarget<'_>) -> io::Result<Brokerage> {
        let (questions, their_questions) = UnixStream::pair()?;
        let (refusals, their_refusals) = UnixStream::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("mount.lockbox").arg(ARGUMENT).args(logging::to_argument(log)).process_group(0);
        command.stdin(OwnedFd::from(their_questions)).stdout(OwnedFd::from(their_refusals));
        command.stderr(if matches!(log, LogTarget::Terminal) { Stdio::inherit() } else { Stdio::null() });
        let child = command.spawn()?;
        Ok(Brokerage { child, questions, refusals })
    }

    /// Duplicates the socket for queries.
    pub(crate) fn questions(&self) -> io::Result<UnixStream> {
        self.questions.try_clone()
    }

    /// Ends the process and waits for it: a container may have no process that reaps it.
    pub(crate) fn end(mut self) {
        // Threads may hold duplicates.
        let _ = self.questions.shutdown(Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// Runs the broker process: answers until the fetcher is gone.
///
/// # Errors
/// Fails without a peer on standard input, or if the log cannot be opened.
pub fn run() -> io::Result<()> {
    SigSet::all().thread_block()?;
    let log = std::env::args_os().nth(2).map(PathBuf::from);
    logging::start(&logging::from_argument(log.as_deref()), false)
        .map_err(|failure| io::Error::other(failure.message))?;
    let refusals = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    thread::Builder::new().name("listener".into()).spawn(move || filter::log_refusals(&refusals, "fetcher"))?;
    remote::answer_fetcher(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?))
}
