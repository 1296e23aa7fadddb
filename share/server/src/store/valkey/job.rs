//! Queued request to the server: decides on the stored record, and returns the record to write.

use bytes::Bytes;
use tokio::sync::oneshot;

use super::server::payload_name;
use crate::store::error::{Result, StoreError};
use crate::store::record::{CapsuleRef, RecordPosition, decode, encode};
use crate::store::share::{Key, Share, StoreTiming};

/// Extra lifetime of keys, so that the server's clock decides nothing.
const SLACK_MS: u64 = 60_000;
/// Records are bound to nothing else here: the server keeps each under its key.
const POSITION: RecordPosition = RecordPosition { nonce: 0, at: 0 };

/// A record as the server has it.
pub(super) struct StoredRecord {
    version: Vec<u8>,
    share: Share,
    capsule: Bytes,
}

/// Record to be written.
pub(super) struct RecordWrite {
    pub(super) expected: Vec<u8>,
    pub(super) version: String,
    pub(super) record: Vec<u8>,
    pub(super) milliseconds: u64,
    /// The name that stands for the payload, and how long it is needed.
    pub(super) payload: Option<(String, u64)>,
}

/// A request under way.
pub(super) trait QueuedRequest: Send {
    fn name(&self) -> &str;
    /// Decides on the stored record. `None` when there is no write: the reply is ready.
    fn decide(&mut self, timing: &StoreTiming, stored: Option<StoredRecord>) -> Option<RecordWrite>;
    /// Gives the answer, or the reason why there is none.
    fn reply(self: Box<Self>, outcome: Result<()>);
}

/// Answers a request on the share as it is, and gives the share that is to be written when it
/// changed.
pub(super) type Decide<T> =
    Box<dyn FnMut(&StoreTiming, Option<(&Share, &Bytes)>) -> (Result<T>, Option<(Share, Bytes)>) + Send>;

pub(super) struct Request<T> {
    pub(super) key: Key,
    pub(super) name: String,
    pub(super) decide: Decide<T>,
    pub(super) answer: Option<Result<T>>,
    pub(super) sender: oneshot::Sender<Result<T>>,
}

impl<T: Send> QueuedRequest for Request<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&mut self, timing: &StoreTiming, stored: Option<StoredRecord>) -> Option<RecordWrite> {
        let now = timing.clock.now();
        let known = stored.as_ref().filter(|stored| stored.share.audit_until(&timing.periods) > now);
        let (answer, change) = (self.decide)(timing, known.map(|stored| (&stored.share, &stored.capsule)));
        self.answer = Some(answer);
        let (share, capsule) = change?;
        let content =
            if share.content_until(&timing.periods) > now { CapsuleRef::Here(&capsule) } else { CapsuleRef::Nowhere };
        let mut record = Vec::new();
        encode(&self.key, &share, content, POSITION, &mut record);
        Some(RecordWrite {
            expected: stored.map(|stored| stored.version).unwrap_or_default(),
            version: format!("{}-{}", share.created.0, share.version),
            record,
            milliseconds: share.audit_until(&timing.periods).0.saturating_sub(now.0) + SLACK_MS,
            payload: share.payload.map(|payload| {
                (payload_name(&payload.id), share.content_until(&timing.periods).0.saturating_sub(now.0))
            }),
        })
    }

    fn reply(self: Box<Self>, outcome: Result<()>) {
        let answer = self.answer.unwrap_or_else(|| Err(StoreError::Unavailable("the request was not decided".into())));
        // The caller may have gone.
        let _ = self.sender.send(outcome.and(answer));
    }
}

impl StoredRecord {
    /// Reads a hash of the server; None when it holds no sound record.
    pub(super) fn read(version: Vec<u8>, record: &[u8]) -> Option<StoredRecord> {
        let record = decode(record, POSITION)?;
        let capsule = match record.content {
            CapsuleRef::Here(capsule) => Bytes::copy_from_slice(capsule),
            CapsuleRef::At(_) | CapsuleRef::Nowhere => Bytes::new(),
        };
        Some(StoredRecord { version, share: record.share, capsule })
    }
}
