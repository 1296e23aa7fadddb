//! Holds an answer that goes out to its lease (Store rule 11).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::token::LeaseToken;

use super::daemon::Daemon;
use super::leases::TransferLimit;
use super::refusal::Refusal;
use crate::store::{LeaseFinish, LeaseGrant, PendingReply, StoreError};

/// An answer that goes out asks so often whether its lease still stands: a lease of an hour is
/// renewed in time, and a thousand answers cost the store a hundred looks in a second.
const ASK_EVERY: Duration = Duration::from_secs(10);

/// One answer with ciphertext, from its first byte to its end.
pub(super) struct Transfer {
    daemon: Arc<Daemon>,
    handle: Handle,
    token: LeaseToken,
    first: u64,
    at: u64,
    length: u64,
    /// By the daemon's steady clock, in milliseconds.
    asked: u64,
    /// Until when the lease stood by the newest answer of the store.
    stands_until: u64,
    /// Revocations and rearmings when the store was asked.
    withdrawals: u64,
    /// Nothing was handed over since the store was asked.
    fresh: bool,
    asking: Option<PendingReply<LeaseGrant>>,
}

impl Transfer {
    /// Takes a place for an answer that begins at `first`, and notes that a byte goes out (Store
    /// rule 2).
    pub(super) async fn begin(
        daemon: &Arc<Daemon>,
        handle: Handle,
        token: &LeaseToken,
        first: u64,
    ) -> Result<Transfer, Refusal> {
        daemon.leases.begin(token).map_err(|busy| {
            Refusal::unavailable(match busy {
                TransferLimit::Daemon => "too many downloads run at this time",
                TransferLimit::Lease => "too many parts of this download are under way at this time",
            })
        })?;
        let withdrawals = daemon.notifier.withdrawals(handle);
        // From here on the place is given back when this is dropped.
        let mut transfer = Transfer {
            daemon: daemon.clone(),
            handle,
            token: LeaseToken::new(*token.as_bytes()),
            first,
            at: first,
            length: u64::MAX,
            asked: daemon.clock.steady(),
            stands_until: 0,
            withdrawals,
            fresh: true,
            asking: None,
        };
        let lease = daemon.store.payload(handle, token).await?;
        transfer.length = lease.payload.length;
        transfer.confirmed(&lease);
        Ok(transfer)
    }

    /// Where the next part begins.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Ready when another part may be handed over; `last` when the answer ends with it.
    pub(super) fn poll_leave(&mut self, cx: &mut Context<'_>, last: bool) -> Poll<io::Result<()>> {
        if self.asking.is_none() {
            let withdrawals = self.daemon.notifier.withdrawals(self.handle);
            let now = self.daemon.clock.steady();
            let due = now >= self.asked + ASK_EVERY.as_millis() as u64;
            if !due && withdrawals == self.withdrawals && (!last || self.fresh) {
                return Poll::Ready(Ok(()));
            }
            self.withdrawals = withdrawals;
            self.asking = Some(self.daemon.store.payload(self.handle, &self.token));
        }
        let Some(asking) = &mut self.asking else { return Poll::Ready(Ok(())) };
        let answer = ready!(Pin::new(asking).poll(cx));
        self.asking = None;
        let now = self.daemon.clock.steady();
        Poll::Ready(match answer {
            Ok(lease) => {
                self.confirmed(&lease);
                Ok(())
            }
            // A store that cannot answer or renew takes no lease away; it ends by its time.
            Err(StoreError::Unavailable(_) | StoreError::Full) if now < self.stands_until => {
                self.asked = now;
                self.fresh = true;
                Ok(())
            }
            Err(error) => {
                self.daemon.metrics.stopped.fetch_add(1, Relaxed);
                Err(io::Error::new(io::ErrorKind::PermissionDenied, error))
            }
        })
    }

    /// So many bytes were handed over.
    pub(super) fn handed_over(&mut self, bytes: u64) {
        self.fresh = false;
        self.at += bytes;
        self.daemon.metrics.sent_bytes.fetch_add(bytes, Relaxed);
    }

    fn confirmed(&mut self, lease: &LeaseGrant) {
        let left = lease.until.0.saturating_sub(self.daemon.clock.wall().0);
        self.asked = self.daemon.clock.steady();
        self.stands_until = self.asked.saturating_add(left);
        self.fresh = true;
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let ended = self.daemon.leases.end(&self.token, self.first..self.at, self.length);
        if ended.whole {
            self.daemon.metrics.completed.fetch_add(1, Relaxed);
        }
        if ended.finishes {
            finish_later(&self.daemon, self.handle, &self.token);
        }
    }
}

/// After the last byte the claimant has some time to ask again, and then the share is consumed.
fn finish_later(daemon: &Arc<Daemon>, handle: Handle, token: &LeaseToken) {
    // Called here and not on the task: a request for the next part comes after it.
    let noted = daemon.store.finish(handle, token, LeaseFinish::After(daemon.settings.grace));
    // Without a runtime the daemon is at its end.
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    let daemon = daemon.clone();
    runtime.spawn(async move {
        // Any other error says that the lease was over already.
        if let Err(error @ (StoreError::Unavailable(_) | StoreError::Full)) = noted.await {
            // It ends by its time all the same.
            tracing::warn!(%error, "the end of a download was not noted");
        }
        daemon.notifier.changed(handle);
    });
}

#[cfg(test)]
mod tests;
