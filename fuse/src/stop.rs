//! Takes the mount away: when nobody uses it, or detached from the tree while its last users finish.

use std::path::PathBuf;

use parking_lot::Mutex;

use crate::unmounter::{self, Unmounter};

pub(crate) use crate::unmounter::Unmounted;

/// The mount point and whether our mount is still there. The lock also keeps the periodic flush, which opens the root for
/// a moment, from making the mount look busy.
pub(crate) struct Place {
    point: PathBuf,
    device: u64,
    attached: Mutex<Attached>,
}

struct Attached {
    there: bool,
    /// Once this process may not unmount.
    unmounter: Option<Unmounter>,
}

impl Place {
    pub(crate) fn new(point: PathBuf, device: u64, unmounter: Option<Unmounter>) -> Place {
        Place { point, device, attached: Mutex::new(Attached { there: true, unmounter }) }
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
        let mut attached = self.attached.lock();
        if !attached.there {
            return Ok(());
        }
        match &mut attached.unmounter {
            Some(unmounter) => unmounter.flush(),
            None => {
                unmounter::flush(&self.point, self.device);
                Ok(())
            }
        }
    }
}
