//! Where the requests of one connection wait.

use std::os::fd::{AsFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A connection, as far as its waiting requests go.
pub trait RequestQueue: Send + Sync {
    /// Whether a read would return at once.
    fn has_request(&self) -> bool;
}

/// The device of a connection, by whichever of its descriptors.
impl RequestQueue for OwnedFd {
    fn has_request(&self) -> bool {
        // The end of the connection is an event too; a failure leaves it to the read.
        poll(&mut [PollFd::new(self.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}
