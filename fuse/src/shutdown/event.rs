//! Events that the thread which waits for the end of a mount receives.

use std::io;
use std::sync::mpsc::Sender;

use lockbox::control::Response;
use nix::sys::signal::Signal;

pub(crate) enum MountEvent {
    /// The event loops have ended, after any kind of unmount.
    LoopsEnded(io::Result<()>),
    Signal(Signal),
    Stop {
        lazy: bool,
        /// Unmount even if the mount holds the last copy of the archive.
        abandon: bool,
        answer: Sender<Response>,
    },
    /// The mount was unused for the time of `idle=`.
    Idle,
    /// The daemon deadlocked on its own mount, and its connection is aborted.
    Deadlocked,
    /// The machine is about to sleep. The channel is closed when the archive is closed.
    Sleep(Sender<SuspendReply>),
}

/// Negative result of an unmount before a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SuspendReply {
    Busy,
}
