//! The process that looks up names and credentials for the fetcher, which may not do so itself once
//! it is in its sandbox.
//!
//! It starts before the fetcher is confined, and ends when that does. Its standard input is a
//! socket for questions; its standard output is one by which the listener of the fetcher's filter
//! comes: the calls that are refused are answered and named here.

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
use crate::journal::{self, Target};

/// The hidden argument that makes the program this process.
pub const ARGUMENT: &str = "--broker";

/// The fetcher's ends of its sockets.
pub(crate) struct Brokerage {
    child: Child,
    questions: UnixStream,
    /// Takes the listener of the fetcher's filter.
    pub(crate) refusals: UnixStream,
}

impl Brokerage {
    /// # Errors
    /// The errors of starting a process.
    pub(crate) fn start(log: &Target<'_>) -> io::Result<Brokerage> {
        let (questions, their_questions) = UnixStream::pair()?;
        let (refusals, their_refusals) = UnixStream::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("mount.lockbox").arg(ARGUMENT).args(journal::argument(log)).process_group(0);
        command.stdin(OwnedFd::from(their_questions)).stdout(OwnedFd::from(their_refusals));
        command.stderr(if matches!(log, Target::Terminal) { Stdio::inherit() } else { Stdio::null() });
        let child = command.spawn()?;
        Ok(Brokerage { child, questions, refusals })
    }

    /// Another descriptor of the socket for questions.
    pub(crate) fn questions(&self) -> io::Result<UnixStream> {
        self.questions.try_clone()
    }

    /// Returns when the process has ended: a container may have no process that reaps it.
    pub(crate) fn end(mut self) {
        // Threads may have it, too.
        let _ = self.questions.shutdown(Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// The process itself: answers until the fetcher is gone.
///
/// # Errors
/// When nothing asks on its standard input, or no log can be written.
pub fn run() -> io::Result<()> {
    SigSet::all().thread_block()?;
    let log = std::env::args_os().nth(2).map(PathBuf::from);
    journal::start(&journal::target(log.as_deref()), false).map_err(|failure| io::Error::other(failure.message))?;
    let refusals = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    thread::Builder::new().name("listener".into()).spawn(move || filter::name_refusals(&refusals, "fetcher"))?;
    remote::answer_fetcher(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?))
}
