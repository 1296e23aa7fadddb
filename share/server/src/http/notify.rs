//! Tells whoever waits that a share changed: its owner who watches it, and the answers that go out under its leases.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use lockbox_share_protocol::handle::Handle;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Shares whose handles fall into the same slot are not told apart.
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

    /// Wakes whoever watches the share.
    pub(super) fn changed(&self, handle: Handle) {
        self.slot(handle).changed.notify_waiters();
    }

    /// Takes the leases of a share from the answers that run under them, and wakes whoever watches it.
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
