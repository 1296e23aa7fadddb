//! Takes the mount away: when nobody uses it, or detached from the tree while its last users finish.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::adapter::Shared;
use crate::handover::HandOver;
use crate::unmounter::Unmounter;

pub(crate) use crate::unmounter::Unmounted;

/// How long a flush may take where it has to wait: with locking before a sleep it has to fit into logind's five seconds.
const FLUSH: Duration = Duration::from_secs(2);

/// Longer than any order takes, unless the kernel is stuck.
const LAST_ORDER: Duration = Duration::from_secs(2);

/// Whether our mount is still there, and its connection's end. The lock also keeps the periodic flush, which opens the root for
/// a moment, from making the mount look busy.
pub(crate) struct Place {
    /// The kernel's file that aborts the connection, opened while no other connection can have its number.
    abort: Option<File>,
    attached: Mutex<Attached>,
    handover: HandOver,
}

struct Attached {
    there: bool,
    /// None once it was sent away.
    unmounter: Option<Unmounter>,
}

impl Place {
    pub(crate) fn new(abort: Option<File>, unmounter: Unmounter, shared: Arc<Shared>) -> Place {
        let attached = Mutex::new(Attached { there: true, unmounter: Some(unmounter) });
        Place { abort, attached, handover: HandOver::new(shared) }
    }

    /// Has every request fail, under way or later, so that the event loops end.
    ///
    /// # Errors
    /// When the kernel did not let us have its file for that.
    pub(crate) fn abort(&self) -> io::Result<()> {
        self.abort.as_ref().ok_or(io::ErrorKind::NotFound)?.write_all(b"1")
    }

    /// Whether the mount answers. Not asked by this process: while every event loop is busy it would wait for itself.
    pub(crate) fn look(&self) -> io::Result<()> {
        match &mut self.attached.lock().unmounter {
            Some(unmounter) => unmounter.look(),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// A new connection to the bus of the system.
    ///
    /// # Errors
    /// When nobody answers there.
    pub(crate) fn dial(&self) -> io::Result<UnixStream> {
        self.attached.lock().unmounter.as_mut().ok_or(io::ErrorKind::NotConnected)?.dial()
    }

    /// Unmounts, which makes the kernel write its pages to us first; with `detach` also when busy.
    pub(crate) fn unmount(&self, detach: bool) -> Unmounted {
        let mut attached = self.attached.lock();
        if !attached.there {
            return Unmounted::Gone;
        }
        let unmounted = match &mut attached.unmounter {
            Some(unmounter) => unmounter.unmount(detach),
            None => Unmounted::Gone,
        };
        attached.there = !matches!(unmounted, Unmounted::Gone | Unmounted::Detached);
        unmounted
    }

    /// Makes the kernel write its dirty pages to us. What it cannot write stays dirty and is tried again the next time.
    ///
    /// # Errors
    /// When the process that flushes for us is gone.
    pub(crate) fn flush(&self) -> std::io::Result<()> {
        if !self.flush_by_path()? {
            // What does not arrive in time is on its way.
            self.hand_over(FLUSH);
        }
        Ok(())
    }

    /// Answers whether there is a path to our mount.
    fn flush_by_path(&self) -> std::io::Result<bool> {
        let mut attached = self.attached.lock();
        if !attached.there {
            return Ok(false);
        }
        match &mut attached.unmounter {
            Some(unmounter) => unmounter.flush(),
            None => Ok(false),
        }
    }

    /// Has the kernel write what it caches of open files, wherever the mount is, and answers whether that ended within `limit`.
    pub(crate) fn hand_over(&self, limit: Duration) -> bool {
        self.handover.within(limit)
    }

    /// The archive is closed: the process that unmounts is told so and ends.
    pub(crate) fn dismiss(&self) {
        // A flush before a sleep may hold it for ever, and the end is not to wait for that.
        let Some(mut attached) = self.attached.try_lock_for(LAST_ORDER) else { return };
        attached.there = false;
        drop(attached.unmounter.take());
    }
}
