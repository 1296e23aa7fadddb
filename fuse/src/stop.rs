//! Takes the mount away: when nobody uses it, or detached from the tree while its last users finish.

use std::path::PathBuf;

use parking_lot::Mutex;

use crate::mount::{self, UnmountError};
use crate::mountinfo;

/// The mount point and whether our mount is still there. The lock also keeps the periodic flush, which opens the root for
/// a moment, from making the mount look busy.
pub(crate) struct Place {
    point: PathBuf,
    device: u64,
    attached: Mutex<bool>,
}

/// What became of an attempt.
pub(crate) enum Unmounted {
    Done,
    Busy,
    Failed(String),
}

impl Place {
    pub(crate) fn new(point: PathBuf, device: u64) -> Place {
        Place { point, device, attached: Mutex::new(true) }
    }

    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    /// Unmounts, which makes the kernel write its pages to us first; with `detach` also when busy.
    pub(crate) fn unmount(&self, detach: bool) -> Unmounted {
        let mut attached = self.attached.lock();
        let on_top = mountinfo::at(&self.point).is_ok_and(|m| m.is_some_and(|m| m.device == self.device));
        if !*attached || !on_top {
            // Somebody was faster, or mounted over us: what is there is not ours to take away.
            *attached = false;
            return Unmounted::Done;
        }
        match mount::unmount(&self.point, false) {
            Err(UnmountError::Busy) if detach => {}
            Err(UnmountError::Busy) => return Unmounted::Busy,
            Err(UnmountError::Other(message)) => return Unmounted::Failed(message),
            Ok(()) => {
                *attached = false;
                return Unmounted::Done;
            }
        }
        match mount::unmount(&self.point, true) {
            Ok(()) => {
                *attached = false;
                Unmounted::Busy
            }
            Err(UnmountError::Busy) => Unmounted::Busy,
            Err(UnmountError::Other(message)) => Unmounted::Failed(message),
        }
    }

    /// Makes the kernel write its dirty pages to us.
    pub(crate) fn flush(&self) {
        let attached = self.attached.lock();
        if *attached && let Ok(root) = mount::open_root(&self.point, self.device) {
            let _ = nix::unistd::syncfs(&root);
        }
    }
}
