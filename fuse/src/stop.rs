//! Takes the mount away: when nobody uses it, or detached from the tree while its last users finish.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::adapter::Shared;
use crate::handover::HandOver;
use crate::unmounter::{self, Unmounter};

pub(crate) use crate::unmounter::Unmounted;

/// How long a flush may take where it has to wait: with locking before a sleep it has to fit into logind's five seconds.
const FLUSH: Duration = Duration::from_secs(2);

/// Longer than any order takes, unless the kernel is stuck.
const LAST_ORDER: Duration = Duration::from_secs(2);

/// The mount point and whether our mount is still there. The lock also keeps the periodic flush, which opens the root for
/// a moment, from making the mount look busy.
pub(crate) struct Place {
    point: PathBuf,
    device: u64,
    attached: Mutex<Attached>,
    handover: HandOver,
}

struct Attached {
    there: bool,
    /// Once this process may not unmount.
    unmounter: Option<Unmounter>,
}

impl Place {
    pub(crate) fn new(point: PathBuf, device: u64, unmounter: Option<Unmounter>, shared: Arc<Shared>) -> Place {
        let attached = Mutex::new(Attached { there: true, unmounter });
        Place { point, device, attached, handover: HandOver::new(shared) }
    }

    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    /// Unmounts, which makes the kernel write its pages to us first; with `detach` also when busy.
    pub(crate) fn unmount(&self, detach: bool) -> Unmounted {
        let mut attached = self.attached.lock();
        if !attached.there {
            return Unmounted::Gone;
        }
        let unmounted = match &mut attached.unmounter {
            Some(unmounter) => unmounter.unmount(detach),
            None => unmounter::unmount(&self.point, self.device, detach),
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
            None => Ok(unmounter::flush(&self.point, self.device)),
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
