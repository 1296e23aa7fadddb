//! Request pipeline to the server: the requests of a few threads with one connection each share
//! round trips.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use redis::{Pipeline, RedisError, RedisResult};
use tokio::sync::oneshot;

use crate::store::env::{StoreTime, random};
use crate::store::record::{CapsuleRef, RecordPosition, decode, encode};
use crate::store::share::{Key, Share, StoreTiming};
use crate::store::{Result, StoreError, spool};

/// Maximum number of requests that share a round trip.
const TOGETHER: usize = 64;
/// A change that always comes second gives up: others have made it pointless by then.
const ROUNDS: usize = 1000;

/// Compare-and-set script. The version has the time of creation, so that a reused handle differs.
const COMPARE_AND_SET: &str = "if (redis.call('HGET', KEYS[1], 'v') or '') ~= ARGV[1] then return 0 end \
    redis.call('HSET', KEYS[1], 'v', ARGV[2], 'r', ARGV[3]) redis.call('PEXPIRE', KEYS[1], ARGV[4]) \
    local payload = tonumber(ARGV[5]) \
    if payload > 0 then redis.call('SET', KEYS[2], '1', 'PX', payload) elseif payload == 0 then redis.call('DEL', KEYS[2]) end \
    return 1";

pub(super) struct ValkeyEngine {
    pub(super) client: redis::Client,
    pub(super) queue: Mutex<Queue>,
    pub(super) wanted: Condvar,
    /// The store is being closed.
    pub(super) ended: Condvar,
    pub(super) timing: StoreTiming,
    pub(super) secret: [u8; 16],
    pub(super) decoy: Share,
    pub(super) durability_method: DurabilityMethod,
    /// Why the newest exchange failed.
    pub(super) last_error: Mutex<Option<String>>,
}

#[derive(Default)]
pub(super) struct Queue {
    pub(super) jobs: VecDeque<Box<dyn QueuedRequest>>,
    pub(super) stopped: bool,
}

/// Version and record of a hash, when it is there.
type Fields = (Option<Vec<u8>>, Option<Vec<u8>>);
type Jobs = Vec<Box<dyn QueuedRequest>>;

impl ValkeyEngine {
    pub(super) fn serve_connection(&self) {
        let mut connection = None;
        loop {
            let mut jobs: Jobs = {
                let mut queue = self.queue.lock();
                self.wanted.wait_while(&mut queue, |queue| queue.jobs.is_empty() && !queue.stopped);
                if queue.jobs.is_empty() {
                    return;
                }
                let count = queue.jobs.len().min(TOGETHER);
                queue.jobs.drain(..count).collect()
            };
            // A connection that was closed meanwhile shows at its next use. What was asked then is
            // asked once more: a change that was made before its answer was lost is found as made,
            // by the claim's id, the deposit's proofs or the lease's state.
            let mut outcome = self.run_requests(&mut connection, &mut jobs);
            if outcome.is_err() {
                connection = None;
                outcome = self.run_requests(&mut connection, &mut jobs);
            }
            if let Err(error) = outcome {
                *self.last_error.lock() = Some(error.to_string());
                connection = None;
                let why = match error.code() {
                    Some("OOM") => StoreError::Full,
                    _ => StoreError::Unavailable(format!("the store's server does not answer: {error}")),
                };
                jobs.into_iter().for_each(|job| job.reply(Err(why.clone())));
            }
        }
    }

    /// Runs requests to completion. On an error those left in `jobs` have no reply yet.
    fn run_requests(&self, kept: &mut Option<redis::Connection>, jobs: &mut Jobs) -> RedisResult<()> {
        let connection = match kept {
            Some(connection) => connection,
            None => kept.insert(connect(&self.client)?),
        };
        for _ in 0..ROUNDS {
            if jobs.is_empty() {
                return Ok(());
            }
            self.run_round(connection, jobs)?;
        }
        let busy = StoreError::Unavailable("the share changes too often".into());
        jobs.drain(..).for_each(|job| job.reply(Err(busy.clone())));
        Ok(())
    }

    /// Reads, decides and writes for all requests. If a share was changed concurrently, its request
    /// stays in `jobs`.
    fn run_round(&self, connection: &mut redis::Connection, jobs: &mut Jobs) -> RedisResult<()> {
        let mut reads = Pipeline::with_capacity(jobs.len());
        for job in jobs.iter() {
            reads.cmd("HMGET").arg(job.name()).arg("v").arg("r");
        }
        let stored: Vec<Fields> = reads.query(connection)?;
        let mut writes = Pipeline::new();
        let mut decided = Vec::with_capacity(jobs.len());
        for (job, (version, record)) in jobs.iter_mut().zip(stored) {
            let stored = version.zip(record).and_then(|(version, record)| StoredRecord::read(version, &record));
            decided.push(job.decide(&self.timing, stored, &mut writes));
        }
        let mut written: Vec<bool> = Vec::new();
        if decided.contains(&true) {
            written = writes.query(connection)?;
        }
        if self.durability_method == DurabilityMethod::Wait {
            // Also for answers without a change: what they tell may be another's change that is not
            // durable yet. The server waits for this connection's own last write alone, so there
            // must be one behind everything that was read.
            let mut fence = Pipeline::with_capacity(2);
            fence.cmd("SET").arg(FENCE).arg(1).ignore();
            fence.cmd("WAITAOF").arg(1).arg(0).arg(TIMEOUT.as_millis() as u64);
            let ((synced, _),): ((u64, u64),) = fence.query(connection)?;
            if synced == 0 {
                return Err(RedisError::from(std::io::Error::other("the server did not sync in time")));
            }
        }
        // Before any client has an answer: after it this could cover the failure of a later exchange.
        *self.last_error.lock() = None;
        let mut written = written.into_iter();
        for (job, has_write) in std::mem::take(jobs).into_iter().zip(decided) {
            if !has_write || written.next() == Some(true) {
                job.reply(Ok(()));
            } else {
                jobs.push(job);
            }
        }
        Ok(())
    }
}

/// Extra lifetime of keys, so that the server's clock decides nothing.
const SLACK_MS: u64 = 60_000;
/// Records are bound to nothing else here: the server keeps each under its key.
const POSITION: RecordPosition = RecordPosition { nonce: 0, at: 0 };

pub(super) struct StoredRecord {
    version: Vec<u8>,
    share: Share,
    capsule: Bytes,
}

pub(super) trait QueuedRequest: Send {
    fn name(&self) -> &str;
    /// Decides on the stored record. Returns whether it added a write; without one the reply is
    /// ready.
    fn decide(&mut self, timing: &StoreTiming, stored: Option<StoredRecord>, writes: &mut Pipeline) -> bool;
    /// Gives the answer, or the reason why there is none.
    fn reply(self: Box<Self>, outcome: Result<()>);
}

/// Answers a request on the share as it is, and returns the share to write if it changed.
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

    fn decide(&mut self, timing: &StoreTiming, stored: Option<StoredRecord>, writes: &mut Pipeline) -> bool {
        let now = timing.clock.now();
        let known = stored.as_ref().filter(|stored| stored.share.audit_until(&timing.periods) > now);
        let (answer, change) = (self.decide)(timing, known.map(|stored| (&stored.share, &stored.capsule)));
        self.answer = Some(answer);
        let Some((share, capsule)) = change else { return false };
        let content_until = share.content_until(&timing.periods);
        let content = if content_until > now { CapsuleRef::Here(&capsule) } else { CapsuleRef::Nowhere };
        let mut record = Vec::new();
        encode(&self.key, &share, content, POSITION, &mut record);
        let milliseconds_to = |until: StoreTime| until.0.saturating_sub(now.0);
        // The name that stands for the payload, and how long it is needed.
        let (payload, needed) = match share.payload {
            Some(payload) => {
                (payload_name(&payload.id), i64::try_from(milliseconds_to(content_until)).unwrap_or(i64::MAX))
            }
            None => (self.name.clone(), -1),
        };
        let expected = stored.map(|stored| stored.version).unwrap_or_default();
        writes.cmd("EVAL").arg(COMPARE_AND_SET).arg(2).arg(&self.name).arg(payload);
        writes.arg(expected).arg(format!("{}-{}", share.created.0, share.version)).arg(record);
        writes.arg(milliseconds_to(share.audit_until(&timing.periods)) + SLACK_MS).arg(needed);
        true
    }

    fn reply(self: Box<Self>, outcome: Result<()>) {
        let answer = self.answer.unwrap_or_else(|| Err(StoreError::Unavailable("the request was not decided".into())));
        // The caller may have gone.
        let _ = self.sender.send(outcome.and(answer));
    }
}

impl StoredRecord {
    pub(super) fn read(version: Vec<u8>, record: &[u8]) -> Option<StoredRecord> {
        let record = decode(record, POSITION)?;
        let capsule = match record.content {
            CapsuleRef::Here(capsule) => Bytes::copy_from_slice(capsule),
            CapsuleRef::At(_) | CapsuleRef::Nowhere => Bytes::new(),
        };
        Some(StoredRecord { version, share: record.share, capsule })
    }
}

/// Time within which the server must answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
/// Where the server keeps the key of handles.
pub(super) const SECRET: &str = "lockbox:share:secret";
/// Written only so that it is waited for.
pub(super) const FENCE: &str = "lockbox:share:fence";

pub(super) fn share_name(key: &Key) -> String {
    format!("lockbox:share:{}", spool::name(&key.0))
}

/// Stands on the server as long as the payload is needed.
pub(super) fn payload_name(id: &[u8; 16]) -> String {
    format!("lockbox:payload:{}", spool::name(id))
}

/// Method by which a change becomes durable before its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DurabilityMethod {
    Nothing,
    /// The server syncs before each reply.
    Always,
    /// WAITAOF after the changes.
    Wait,
}

pub(super) fn connect(client: &redis::Client) -> RedisResult<redis::Connection> {
    let connection = client.get_connection_with_timeout(TIMEOUT)?;
    // WAITAOF itself may take its whole time.
    connection.set_read_timeout(Some(TIMEOUT * 2))?;
    connection.set_write_timeout(Some(TIMEOUT))?;
    Ok(connection)
}

pub(super) fn unavailable(error: RedisError) -> StoreError {
    StoreError::Unavailable(format!("the store's server: {error}"))
}

pub(super) fn durability_method(connection: &mut redis::Connection) -> Result<DurabilityMethod> {
    let waited: RedisResult<(u64, u64)> = redis::cmd("WAITAOF").arg(1).arg(0).arg(1000).query(connection);
    if waited.is_ok() {
        return Ok(DurabilityMethod::Wait);
    }
    let mut setting = |name: &str| -> Result<String> {
        let answer: Vec<String> = redis::cmd("CONFIG").arg("GET").arg(name).query(connection).map_err(unavailable)?;
        Ok(answer.into_iter().nth(1).unwrap_or_default())
    };
    if setting("appendonly")? == "yes" && setting("appendfsync")? == "always" {
        return Ok(DurabilityMethod::Always);
    }
    Err(StoreError::Unavailable(
        "durability commit needs a server with WAITAOF, or with appendonly yes and appendfsync always".into(),
    ))
}

/// The key of handles, which the first daemon makes for all.
pub(super) fn shared_secret(connection: &mut redis::Connection) -> Result<[u8; 16]> {
    let fresh: [u8; 16] = random()?;
    redis::cmd("SETNX").arg(SECRET).arg(&fresh[..]).query::<bool>(connection).map_err(unavailable)?;
    let kept: Vec<u8> = redis::cmd("GET").arg(SECRET).query(connection).map_err(unavailable)?;
    kept.try_into().map_err(|_| StoreError::Unavailable(format!("{SECRET} on the store's server has been changed")))
}
