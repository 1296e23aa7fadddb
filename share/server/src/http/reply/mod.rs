//! Sends ciphertext, and binds each running response to its lease (Store rule 11).
//!
//! A part of the file is read where the page cache has it, and on another thread where the disk
//! must be waited for.

use std::fs::File;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::token::LeaseToken;
use parking_lot::Mutex;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use tokio::task::JoinHandle;

use super::daemon::Daemon;
use super::leases::TransferLimit;
use super::request::Refusal;
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

/// Bytes that are read at a time: large enough that calls cost little, small enough that a thousand
/// slow downloads fit in memory.
pub(super) const PART: usize = 128 * 1024;

/// The bytes of one answer.
pub(super) struct FileBody {
    file: Arc<File>,
    end: u64,
    buffers: Arc<Mutex<Vec<Vec<u8>>>>,
    reading: Option<JoinHandle<io::Result<Part>>>,
    transfer: Transfer,
}

/// Read buffer; its memory returns to the body after sending.
struct Part {
    bytes: Vec<u8>,
    length: usize,
    home: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.home.lock().push(std::mem::take(&mut self.bytes));
    }
}

impl FileBody {
    /// The bytes up to but not with `end`, for as long as `transfer` lets them go.
    pub(super) fn new(file: File, end: u64, transfer: Transfer) -> FileBody {
        FileBody { file: Arc::new(file), end, buffers: Arc::default(), reading: None, transfer }
    }

    /// Bytes that were not handed over yet.
    pub(super) fn left(&self) -> u64 {
        self.end.saturating_sub(self.transfer.at())
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.left() == 0 {
            return Poll::Ready(None);
        }
        if self.reading.is_none() {
            let last = self.left() <= PART as u64;
            if let Err(error) = ready!(self.transfer.poll_leave(cx, last)) {
                return Poll::Ready(Some(Err(error)));
            }
            let wanted = usize::try_from(self.left()).unwrap_or(PART).min(PART);
            let mut bytes = self.buffers.lock().pop().unwrap_or_default();
            bytes.resize(PART, 0);
            let mut part = Part { bytes, length: 0, home: self.buffers.clone() };
            let flags = ReadWriteFlags::NOWAIT;
            let mut slices = [IoSliceMut::new(&mut part.bytes[..wanted])];
            match preadv2(&self.file, &mut slices, self.transfer.at(), flags) {
                Ok(length) if length > 0 => {
                    part.length = length;
                    return Poll::Ready(Some(Ok(self.hand_over(part))));
                }
                // Nothing cached, or a file system that cannot tell: wait for it elsewhere. Nothing
                // read is the end of the file, which the blocking read reports as an error.
                Ok(_) | Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS | Errno::INTR) => {}
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
            let (file, at) = (self.file.clone(), self.transfer.at());
            self.reading = Some(tokio::task::spawn_blocking(move || {
                file.read_exact_at(&mut part.bytes[..wanted], at)?;
                part.length = wanted;
                Ok(part)
            }));
        }
        let Some(reading) = &mut self.reading else { return Poll::Ready(None) };
        let part = ready!(Pin::new(reading).poll(cx)).map_err(io::Error::other);
        self.reading = None;
        Poll::Ready(Some(part.and_then(|part| part).map(|part| self.hand_over(part))))
    }

    fn hand_over(&mut self, part: Part) -> Bytes {
        self.transfer.handed_over(part.length as u64);
        Bytes::from_owner(part)
    }
}

#[cfg(test)]
mod tests;
