//! Request queue of one FUSE connection.

use std::os::fd::{AsFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Source of requests that can be checked without blocking.
pub trait RequestQueue: Send + Sync {
    /// Returns whether a read would return at once.
    fn has_request(&self) -> bool;
}

/// The FUSE device; any descriptor of the connection will do.
impl RequestQueue for OwnedFd {
    fn has_request(&self) -> bool {
        // The end of the connection also counts as an event; errors are left to the read.
        poll(&mut [PollFd::new(self.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}
