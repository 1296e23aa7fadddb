//! A second process that unmounts and flushes for the daemon, which may not do so itself once it is in its sandbox.
//!
//! It starts before the daemon gives its rights up, knows the mount point and no secret, takes one byte per order on its standard input,
//! and answers with a line of JSON. It ends when the daemon does, however that ends: the pipe is closed then.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use nix::sys::signal::SigSet;
use serde::{Deserialize, Serialize};

use crate::mount::{self, UnmountError};
use crate::mountinfo;

/// The hidden argument that makes the program the unmounter.
pub const ARGUMENT: &str = "--unmounter";
const POLITELY: u8 = b'u';
const DETACH: u8 = b'd';
const FLUSH: u8 = b'f';

/// What became of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Unmounted {
    /// Our mount is not there any more, or somebody mounted over it.
    Gone,
    Busy,
    Detached,
    Failed(String),
}

/// Unmounts what has this device number at `point`; with `detach` also when it is busy.
pub(crate) fn unmount(point: &Path, device: u64, detach: bool) -> Unmounted {
    if !mountinfo::at(point).is_ok_and(|m| m.is_some_and(|m| m.device == device)) {
        // Somebody was faster, or mounted over us: what is there is not ours to take away.
        return Unmounted::Gone;
    }
    match mount::unmount(point, false) {
        Err(UnmountError::Busy) if detach => {}
        Err(UnmountError::Busy) => return Unmounted::Busy,
        Err(UnmountError::Other(message)) => return Unmounted::Failed(message),
        Ok(()) => return Unmounted::Gone,
    }
    match mount::unmount(point, true) {
        Ok(()) => Unmounted::Detached,
        Err(UnmountError::Busy) => Unmounted::Busy,
        Err(UnmountError::Other(message)) => Unmounted::Failed(message),
    }
}

/// Makes the kernel write the dirty pages of the mount with this device number.
pub(crate) fn flush(point: &Path, device: u64) {
    if let Ok(root) = mount::open_root(point, device) {
        let _ = nix::unistd::syncfs(&root);
    }
}

/// The daemon's side.
pub(crate) struct Unmounter {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Unmounter {
    /// Returns when the process waits for orders.
    pub(crate) fn start(point: &Path, device: u64) -> io::Result<Unmounter> {
        let mut child = Command::new("/proc/self/exe")
            .arg0("mount.lockbox")
            .arg(ARGUMENT)
            .arg(point)
            .arg(device.to_string())
            // A terminal's interrupt is for the daemon alone.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let orders = child.stdin.take();
        let answers = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut unmounter = Unmounter { child, orders, answers: BufReader::new(answers) };
        let mut ready = String::new();
        unmounter.answers.read_line(&mut ready)?;
        if ready != "ready\n" {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(unmounter)
    }

    pub(crate) fn unmount(&mut self, detach: bool) -> Unmounted {
        match self.ask(if detach { DETACH } else { POLITELY }) {
            Ok(unmounted) => unmounted,
            Err(error) => Unmounted::Failed(format!("the process that unmounts does not answer: {error}")),
        }
    }

    /// Makes the kernel write its dirty pages to the daemon. What fails is tried again five seconds later.
    pub(crate) fn flush(&mut self) {
        let _ = self.ask(FLUSH);
    }

    fn ask(&mut self, order: u8) -> io::Result<Unmounted> {
        self.orders.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.write_all(&[order])?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Unmounter {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

/// The other process: serves orders until the daemon is gone.
pub fn run() -> io::Result<()> {
    // A supervisor that stops the whole group means the daemon, which still needs this process then.
    SigSet::all().thread_block()?;
    let mut arguments = std::env::args_os().skip(2);
    let (Some(point), Some(device)) = (arguments.next().map(PathBuf::from), arguments.next()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let device = device.to_str().and_then(|text| text.parse().ok()).ok_or(io::ErrorKind::InvalidInput)?;
    let (mut orders, mut answers) = (io::stdin().lock(), io::stdout().lock());
    answers.write_all(b"ready\n")?;
    answers.flush()?;
    let mut order = [0];
    while orders.read(&mut order)? > 0 {
        let answer = if order[0] == FLUSH {
            flush(&point, device);
            Unmounted::Busy
        } else {
            unmount(&point, device, order[0] == DETACH)
        };
        let mut line = serde_json::to_vec(&answer)?;
        line.push(b'\n');
        answers.write_all(&line)?;
        answers.flush()?;
    }
    Ok(())
}
