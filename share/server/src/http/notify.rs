//! Notifies an owner's watchers and running responses of a share's changes.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use lockbox_share_protocol::handle::Handle;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Number of notification slots; shares in the same slot wake each other's watchers.
const SLOTS: usize = 64;

pub(super) struct ShareNotifier([Slot; SLOTS]);

#[derive(Default)]
struct Slot {
    changed: Notify,
    withdrawals: AtomicU64,
}

impl Default for ShareNotifier {
    fn default() -> ShareNotifier {
        ShareNotifier(std::array::from_fn(|_| Slot::default()))
    }
}

impl ShareNotifier {
    fn slot(&self, handle: Handle) -> &Slot {
        // Handles are random, so their own digits spread them.
        &self.0[handle.number() as usize % SLOTS]
    }

    /// Ends with the next change of the share.
    pub(super) fn next(&self, handle: Handle) -> Notified<'_> {
        self.slot(handle).changed.notified()
    }

    /// Wakes the watchers of a share.
    pub(super) fn changed(&self, handle: Handle) {
        self.slot(handle).changed.notify_waiters();
    }

    /// Withdraws a share's leases from its running responses, and wakes its watchers.
    pub(super) fn withdraw(&self, handle: Handle) {
        self.slot(handle).withdrawals.fetch_add(1, Relaxed);
        self.changed(handle);
    }

    /// Grows when leases of this share were taken back. Others may have the same number.
    pub(super) fn withdrawals(&self, handle: Handle) -> u64 {
        self.slot(handle).withdrawals.load(Relaxed)
    }

    /// Wakes all watchers, because the daemon stops.
    pub(super) fn wake_all(&self) {
        self.0.iter().for_each(|slot| slot.changed.notify_waiters());
    }
}
