//! Builds responses: messages, failures, and ciphertext that is bound to its lease while it is sent
//! (Store rule 11).
//!
//! A part of the file is read where the page cache has it, and on another thread where the disk
//! must be waited for.

use std::collections::HashMap;
use std::fs::File;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{self, HeaderValue};
use hyper::{Response, StatusCode};
use lockbox_share_protocol::message::ErrorCode;
use lockbox_share_protocol::token::{Handle, LeaseToken};
use parking_lot::Mutex;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use serde::Serialize;
use tokio::task::JoinHandle;

use super::Daemon;
use super::admission::ActiveRequest;
use super::request::HttpRefusal;
use crate::store::{LeaseFinish, LeaseGrant, PendingReply, StoreError};

/// Response body; its request is in flight until the body's end.
pub(super) struct ReplyBody {
    content: BodyContent,
    _under_way: Option<ActiveRequest>,
}

enum BodyContent {
    Whole(Bytes),
    File(Box<FileBody>),
}

pub(super) type Reply = Response<ReplyBody>;

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match &mut self.get_mut().content {
            BodyContent::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            BodyContent::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            BodyContent::File(file) => file.poll(cx).map(|part| part.map(|result| result.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left() == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left())
    }
}

impl ReplyBody {
    pub(super) fn file(file: FileBody) -> ReplyBody {
        ReplyBody { content: BodyContent::File(Box::new(file)), _under_way: None }
    }

    pub(super) fn of(self, request: Option<ActiveRequest>) -> ReplyBody {
        ReplyBody { _under_way: request, ..self }
    }

    fn left(&self) -> u64 {
        match &self.content {
            BodyContent::Whole(bytes) => bytes.len() as u64,
            BodyContent::File(file) => file.left(),
        }
    }
}

impl HttpRefusal {
    pub(super) fn reply(self) -> Reply {
        let status = StatusCode::from_u16(self.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let (retry_after, allow, code) = (self.retry_after, self.allow, self.code);
        let mut reply = json(status, &self.failure());
        let headers = reply.headers_mut();
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(methods) = allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(methods));
        }
        if code == ErrorCode::Unauthorized {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        reply
    }
}

pub(super) fn json(status: StatusCode, message: &impl Serialize) -> Reply {
    // The messages have text keys and no failing serializers, so this cannot fail; an empty body
    // would be noticed.
    let bytes = serde_json::to_vec(message).unwrap_or_default();
    with_type(status, "application/json", Bytes::from(bytes))
}

pub(super) fn with_type(status: StatusCode, content_type: &'static str, bytes: Bytes) -> Reply {
    let mut reply = empty(status);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply.body_mut().content = BodyContent::Whole(bytes);
    reply
}

/// Creates a reply without a body. No cache may keep it, unless its handler says otherwise.
pub(super) fn empty(status: StatusCode) -> Reply {
    let mut reply = Response::new(ReplyBody { content: BodyContent::Whole(Bytes::new()), _under_way: None });
    *reply.status_mut() = status;
    let headers = reply.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    reply
}

/// An answer that goes out asks so often whether its lease still stands: a lease of an hour is
/// renewed in time, and a thousand answers cost the store a hundred looks in a second.
const ASK_EVERY: Duration = Duration::from_secs(10);

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
    /// Takes a place for an answer from `first` on, and notes that a byte goes out (Store rule 2).
    pub(super) async fn begin(
        daemon: &Arc<Daemon>,
        handle: Handle,
        token: &LeaseToken,
        first: u64,
    ) -> Result<Transfer, HttpRefusal> {
        daemon.leases.begin(token).map_err(|limit| match limit {
            TransferLimit::Daemon => HttpRefusal::unavailable("too many concurrent downloads"),
            TransferLimit::Lease => HttpRefusal::unavailable("too many concurrent range requests for this download"),
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

    /// Ready when another part may be handed over; `last` when the answer ends with it.
    fn poll_leave(&mut self, cx: &mut Context<'_>, last: bool) -> Poll<io::Result<()>> {
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

    fn handed_over(&mut self, bytes: u64) {
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
            tracing::warn!(%error, "cannot record the end of a download");
        }
        daemon.notifier.changed(handle);
    });
}

/// Bytes that are read at a time: large enough that calls cost little, small enough that a thousand
/// slow downloads fit in memory.
const PART: usize = 128 * 1024;

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

    fn left(&self) -> u64 {
        self.end.saturating_sub(self.transfer.at)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
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
            let mut slices = [IoSliceMut::new(&mut part.bytes[..wanted])];
            match preadv2(&self.file, &mut slices, self.transfer.at, ReadWriteFlags::NOWAIT) {
                Ok(length) if length > 0 => {
                    part.length = length;
                    return Poll::Ready(Some(Ok(self.hand_over(part))));
                }
                // Nothing cached, or a file system that cannot tell: wait for it elsewhere. Nothing
                // read is the end of the file, which the blocking read reports as an error.
                Ok(_) | Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS | Errno::INTR) => {}
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
            let (file, at) = (self.file.clone(), self.transfer.at);
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

/// Maximum concurrent ciphertext responses. Each holds a descriptor and at most two parts of 128
/// KiB, so all of them hold 256 MiB: a quarter of the limit in the service's unit.
const MAX_BODIES: usize = 1024;
/// Maximum concurrent responses per lease (browser connections plus parallel ranges). Filling all
/// places takes over a hundred claims with proof.
const MAX_BODIES_OF_LEASE: usize = 8;
/// Maximum leases with remembered byte ranges; 100 bytes each.
const MAX_REMEMBERED: usize = 16 * 1024;
/// No lease lasts longer.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Maximum disjoint byte ranges per lease. With more, only the claimant reports completion.
const MAX_RUNS: usize = 64;

#[derive(Default)]
pub(super) struct LeaseTransfers(Mutex<Table>);

#[derive(Default)]
struct Table {
    bodies: usize,
    entries: HashMap<[u8; LeaseToken::LENGTH], LeaseEntry>,
}

struct LeaseEntry {
    bodies: usize,
    /// Bytes that were handed to a connection, sorted and apart.
    runs: Vec<Range<u64>>,
    /// The last byte went out in one of the answers that run or ran together.
    reached_end: bool,
    /// Everything went out, which was counted.
    whole: bool,
    touched: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferLimit {
    Daemon,
    Lease,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TransferEnd {
    /// No answer of the lease runs any more, and the last byte, or everything, went out.
    finishes: bool,
    /// Everything went out now, for the first time.
    whole: bool,
}

impl LeaseTransfers {
    /// Takes a place for an answer. [`LeaseTransfers::end`] gives it back.
    fn begin(&self, token: &LeaseToken) -> Result<(), TransferLimit> {
        let mut table = self.0.lock();
        if table.bodies >= MAX_BODIES {
            return Err(TransferLimit::Daemon);
        }
        table.make_room();
        let entry = table.entries.entry(*token.as_bytes()).or_insert_with(LeaseEntry::new);
        if entry.bodies >= MAX_BODIES_OF_LEASE {
            return Err(TransferLimit::Lease);
        }
        if entry.bodies == 0 {
            entry.reached_end = false;
        }
        entry.bodies += 1;
        table.bodies += 1;
        Ok(())
    }

    /// An answer is over that handed out these bytes of `length`.
    fn end(&self, token: &LeaseToken, sent: Range<u64>, length: u64) -> TransferEnd {
        let mut table = self.0.lock();
        table.bodies = table.bodies.saturating_sub(1);
        let Some(entry) = table.entries.get_mut(token.as_bytes()) else { return TransferEnd::default() };
        entry.bodies = entry.bodies.saturating_sub(1);
        entry.touched = Instant::now();
        entry.reached_end |= sent.end == length && (sent.start < sent.end || length == 0);
        entry.add(sent);
        let whole = !entry.whole && (length == 0 || entry.runs.first().is_some_and(|run| *run == (0..length)));
        entry.whole |= whole;
        TransferEnd { finishes: entry.bodies == 0 && (entry.reached_end || entry.whole), whole }
    }

    /// Notes that the claimant has everything, and returns whether that was counted before.
    pub(super) fn completed(&self, token: &LeaseToken) -> bool {
        let mut table = self.0.lock();
        match table.entries.get_mut(token.as_bytes()) {
            // An answer that runs still gives its place back under its entry.
            Some(entry) if entry.bodies > 0 => std::mem::replace(&mut entry.whole, true),
            Some(_) => table.entries.remove(token.as_bytes()).is_some_and(|entry| entry.whole),
            None => false,
        }
    }

    pub(super) fn forget_old(&self) {
        self.0.lock().entries.retain(|_, entry| entry.bodies > 0 || entry.touched.elapsed() < LONGEST);
    }

    pub(super) fn running(&self) -> usize {
        self.0.lock().bodies
    }
}

impl Table {
    /// Removes the older half at a time, so that this is rare. Only the sent ranges are lost.
    fn make_room(&mut self) {
        if self.entries.len() < MAX_REMEMBERED {
            return;
        }
        let mut times: Vec<Instant> = self.entries.values().map(|entry| entry.touched).collect();
        let middle = times.len() / 2;
        let median = *times.select_nth_unstable(middle).1;
        self.entries.retain(|_, entry| entry.bodies > 0 || entry.touched > median);
    }
}

impl LeaseEntry {
    fn new() -> LeaseEntry {
        LeaseEntry { bodies: 0, runs: Vec::new(), reached_end: false, whole: false, touched: Instant::now() }
    }

    fn add(&mut self, mut sent: Range<u64>) {
        if sent.is_empty() {
            return;
        }
        self.runs.retain(|run| {
            let apart = run.end < sent.start || sent.end < run.start;
            if !apart {
                sent = sent.start.min(run.start)..sent.end.max(run.end);
            }
            apart
        });
        if self.runs.len() < MAX_RUNS {
            let place = self.runs.partition_point(|run| run.start < sent.start);
            self.runs.insert(place, sent);
        }
    }
}

#[cfg(test)]
mod tests;
