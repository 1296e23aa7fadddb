//! What can end a mount, as the thread that waits for its end is told of it.

use std::io;
use std::sync::mpsc::Sender;

use lockbox::control::Response;
use nix::sys::signal::Signal;

pub(crate) enum MountEvent {
    /// The event loops have ended: unmounted by whomever.
    LoopsEnded(io::Result<()>),
    Signal(Signal),
    Stop {
        lazy: bool,
        /// Also when the mount has the last copy of the archive.
        abandon: bool,
        answer: Sender<Response>,
    },
    /// Nobody used the mount for the time of `idle=`.
    Idle,
    /// The daemon waits for itself, and its connection is aborted.
    Deadlocked,
    /// The machine is about to sleep; a closed channel says that the archive is closed.
    Sleep(Sender<SuspendReply>),
}

/// What became of the attempt to unmount before a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SuspendReply {
    Busy,
}
