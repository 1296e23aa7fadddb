//! Request pipeline to the server: a few threads with one connection each, whose requests share
//! round trips.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};
use redis::RedisError;

use super::job::{QueuedRequest, StoredRecord};
use super::server::{DurabilityMethod, FENCE, TIMEOUT, connect};
use crate::store::error::StoreError;
use crate::store::share::{Share, StoreTiming};

/// Requests that share a round trip at most.
const TOGETHER: usize = 64;
/// A change that always comes second gives up: others have made it pointless by then.
const ROUNDS: usize = 1000;

/// Compare-and-set script. The version includes the time of creation, so that a reused handle
/// differs.
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

impl ValkeyEngine {
    /// The loop of one connection.
    pub(super) fn serve_connection(&self) {
        let mut connection = None;
        loop {
            let mut jobs: Vec<Box<dyn QueuedRequest>> = {
                let mut queue = self.queue.lock();
                while queue.jobs.is_empty() && !queue.stopped {
                    self.wanted.wait(&mut queue);
                }
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
    fn run_requests(
        &self,
        kept: &mut Option<redis::Connection>,
        jobs: &mut Vec<Box<dyn QueuedRequest>>,
    ) -> Result<(), RedisError> {
        if kept.is_none() {
            *kept = Some(connect(&self.client)?);
        }
        let Some(connection) = kept else { return Ok(()) };
        for _ in 0..ROUNDS {
            if jobs.is_empty() {
                return Ok(());
            }
            self.run_round(connection, jobs)?;
        }
        let busy = StoreError::Unavailable("the share changes all the time".into());
        jobs.drain(..).for_each(|job| job.reply(Err(busy.clone())));
        Ok(())
    }

    /// Reads for all requests, decides, and writes for all. A request whose share was changed
    /// concurrently stays in `jobs`.
    fn run_round(
        &self,
        connection: &mut redis::Connection,
        jobs: &mut Vec<Box<dyn QueuedRequest>>,
    ) -> Result<(), RedisError> {
        let mut reads = redis::Pipeline::with_capacity(jobs.len());
        for job in jobs.iter() {
            reads.cmd("HMGET").arg(job.name()).arg("v").arg("r");
        }
        let stored: Vec<Fields> = reads.query(connection)?;
        let mut writes = redis::Pipeline::new();
        let mut decided = Vec::with_capacity(jobs.len());
        for (job, (version, record)) in jobs.iter_mut().zip(stored) {
            let stored = version.zip(record).and_then(|(version, record)| StoredRecord::read(version, &record));
            let write = job.decide(&self.timing, stored);
            if let Some(write) = &write {
                let (payload, needed) = match &write.payload {
                    Some((name, needed)) => (name.as_str(), i64::try_from(*needed).unwrap_or(i64::MAX)),
                    None => (job.name(), -1),
                };
                writes.cmd("EVAL").arg(COMPARE_AND_SET).arg(2).arg(job.name()).arg(payload);
                writes.arg(&write.expected).arg(&write.version).arg(&write.record).arg(write.milliseconds).arg(needed);
            }
            decided.push(write.is_some());
        }
        let mut first = Vec::new();
        if decided.contains(&true) {
            first = writes.query::<Vec<bool>>(connection)?;
        }
        if self.durability_method == DurabilityMethod::Wait {
            // Also for answers without a change: what they tell may be another's change that is not
            // durable yet. The server waits for this connection's own last write alone, so there
            // must be one behind everything that was read.
            let mut fence = redis::Pipeline::with_capacity(2);
            fence.cmd("SET").arg(FENCE).arg(1).ignore();
            fence.cmd("WAITAOF").arg(1).arg(0).arg(TIMEOUT.as_millis() as u64);
            let ((synced, _),): ((u64, u64),) = fence.query(connection)?;
            if synced == 0 {
                return Err(RedisError::from(std::io::Error::other("the server did not sync in time")));
            }
        }
        // Before anybody has an answer: behind it this could cover the trouble of a later exchange.
        *self.last_error.lock() = None;
        let mut first = first.into_iter();
        let mut second = Vec::new();
        for (job, wrote) in jobs.drain(..).zip(decided) {
            if !wrote || first.next() == Some(true) {
                job.reply(Ok(()));
            } else {
                second.push(job);
            }
        }
        *jobs = second;
        Ok(())
    }
}
