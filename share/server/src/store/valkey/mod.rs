//! Keeps shares in a Valkey (or Redis) server, for daemons on several machines that serve the same links.
//!
//! A share is one hash with its version and its record. A change reads it, decides here, and writes by a script that compares the
//! version first (Store rule 1); who comes second decides again. Requests that wait together share their round trips. Time is the
//! daemons' own, so their machines must agree on it; a failover of the server may lose what its replica did not have yet.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use lockbox_share_protocol::handle::Handle;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;
use zeroize::Zeroizing;

use super::clock::{Clock, StoreClock};
use super::record::{Content, Place, decode, encode};
use super::segments::Durability;
use super::share::{Key, Share};
use super::{
    Auth, ClaimId, Claimed, Created, Figures, Finish, Info, Lease, LeaseToken, NewShare, OwnerToken, Pending, Periods,
    Result, ShareStore, StoreError, check, random,
};
use crate::store::spool::Spool;

mod payloads;
mod server;
#[cfg(test)]
mod tests;

use payloads::payload_name;
use server::{connect, open, promise, shared_secret, unavailable};

/// Connections, each with a thread.
const CONNECTIONS: usize = 4;
/// Requests that share a round trip at most.
const TOGETHER: usize = 64;
/// The server must answer in this time.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A change that always comes second gives up: others have made it pointless by then.
const ROUNDS: usize = 1000;
/// Keys live a little longer than what they hold, so that the server's clock decides nothing.
const SLACK_MS: u64 = 60_000;
/// Written only so that it is waited for.
const FENCE: &str = "lockbox:share:fence";
/// Records are bound to nothing else here: the server keeps each under its key.
const PLACE: Place = Place { nonce: 0, at: 0 };

/// Writes when nobody else did since. The version holds the time of creation, so that a handle that is used again differs.
const COMPARE_AND_SET: &str = "if (redis.call('HGET', KEYS[1], 'v') or '') ~= ARGV[1] then return 0 end \
    redis.call('HSET', KEYS[1], 'v', ARGV[2], 'r', ARGV[3]) redis.call('PEXPIRE', KEYS[1], ARGV[4]) \
    local payload = tonumber(ARGV[5]) \
    if payload > 0 then redis.call('SET', KEYS[2], '1', 'PX', payload) elseif payload == 0 then redis.call('DEL', KEYS[2]) end \
    return 1";

/// Where the server is and what is asked of it.
pub struct ValkeySettings {
    /// `valkey://HOST:PORT/DB` or `valkey+unix:///PATH?db=DB`, without a password.
    pub url: String,
    pub password: Option<Zeroizing<String>>,
    /// `Commit` wants a server that can promise it.
    pub durability: Durability,
    pub periods: Periods,
    pub clock: Arc<dyn Clock>,
}

/// Shares on a server.
pub struct ValkeyStore {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

struct Inner {
    client: redis::Client,
    queue: Mutex<Queue>,
    wanted: Condvar,
    /// The store is being closed.
    ended: Condvar,
    clock: StoreClock,
    periods: Periods,
    secret: [u8; 16],
    decoy: Share,
    promise: Promise,
    /// Why the newest exchange failed.
    trouble: Mutex<Option<String>>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Box<dyn Job>>,
    stopped: bool,
}

/// How a change becomes durable before its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Promise {
    /// Nothing is promised.
    Nothing,
    /// The server syncs before each reply.
    Always,
    /// WAITAOF after the changes.
    Wait,
}

/// A record as the server has it.
struct Stored {
    version: Vec<u8>,
    share: Share,
    capsule: Bytes,
}

/// Version and record of a hash, when it is there.
type Fields = (Option<Vec<u8>>, Option<Vec<u8>>);

/// What is to be written.
struct Write {
    expected: Vec<u8>,
    version: String,
    record: Vec<u8>,
    milliseconds: u64,
    /// The name that stands for the payload, and how long it is needed.
    payload: Option<(String, u64)>,
}

/// A request under way.
trait Job: Send {
    fn name(&self) -> &str;
    /// Decides on what is there. None when nothing is to be written: the answer is ready.
    fn decide(&mut self, inner: &Inner, stored: Option<Stored>) -> Option<Write>;
    /// Gives the answer, or the reason why there is none.
    fn reply(self: Box<Self>, outcome: Result<()>);
}

type Decide<T> = Box<dyn FnMut(&Inner, Option<(&Share, &Bytes)>) -> (Result<T>, Option<(Share, Bytes)>) + Send>;

struct Request<T> {
    key: Key,
    name: String,
    decide: Decide<T>,
    answer: Option<Result<T>>,
    sender: oneshot::Sender<Result<T>>,
}

impl<T: Send> Job for Request<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&mut self, inner: &Inner, stored: Option<Stored>) -> Option<Write> {
        let now = inner.clock.now();
        let known = stored.as_ref().filter(|stored| stored.share.audit_until(&inner.periods) > now);
        let (answer, change) = (self.decide)(inner, known.map(|stored| (&stored.share, &stored.capsule)));
        self.answer = Some(answer);
        let (share, capsule) = change?;
        let content =
            if share.content_until(&inner.periods) > now { Content::Here(&capsule) } else { Content::Nowhere };
        let mut record = Vec::new();
        encode(&self.key, &share, content, PLACE, &mut record);
        Some(Write {
            expected: stored.map(|stored| stored.version).unwrap_or_default(),
            version: format!("{}-{}", share.created.0, share.version),
            record,
            milliseconds: share.audit_until(&inner.periods).0.saturating_sub(now.0) + SLACK_MS,
            payload: share.payload.map(|payload| {
                (payload_name(&payload.id), share.content_until(&inner.periods).0.saturating_sub(now.0))
            }),
        })
    }

    fn reply(self: Box<Self>, outcome: Result<()>) {
        let answer = self.answer.unwrap_or_else(|| Err(StoreError::Unavailable("the request was not decided".into())));
        // Whoever asked may have gone.
        let _ = self.sender.send(outcome.and(answer));
    }
}

impl ValkeyStore {
    /// Connects and asks the server what it can promise.
    ///
    /// # Errors
    /// `Invalid` for an address that is none, `Unavailable` when the server does not answer or cannot promise what is asked.
    pub fn connect(settings: &ValkeySettings) -> Result<ValkeyStore> {
        use redis::IntoConnectionInfo;
        let address = "the store's address is valkey://HOST:PORT/DB or valkey+unix:///PATH, without a password";
        let info = settings.url.as_str().into_connection_info().map_err(|_| StoreError::Invalid(address))?;
        if info.redis_settings().password().is_some() {
            return Err(StoreError::Invalid("the password of the store belongs into a file, not into its address"));
        }
        let info = match &settings.password {
            Some(password) => {
                let with = info.redis_settings().clone().set_password(password.as_str());
                info.set_redis_settings(with)
            }
            None => info,
        };
        let client = redis::Client::open(info).map_err(unavailable)?;
        let mut connection = open(&client)?;
        let promise = match settings.durability {
            Durability::Commit => promise(&mut connection)?,
            Durability::None | Durability::Periodic => Promise::Nothing,
        };
        let secret = shared_secret(&mut connection)?;
        let inner = Arc::new(Inner {
            client,
            queue: Mutex::default(),
            wanted: Condvar::new(),
            ended: Condvar::new(),
            clock: StoreClock::fresh(Arc::clone(&settings.clock)),
            periods: settings.periods,
            secret,
            decoy: Share::decoy(random()?),
            promise,
            trouble: Mutex::new(None),
        });
        let mut threads = Vec::new();
        for _ in 0..CONNECTIONS {
            let inner = Arc::clone(&inner);
            let builder = std::thread::Builder::new().name("valkey".into()).stack_size(512 * 1024);
            let thread = builder.spawn(move || inner.work());
            threads.push(thread.map_err(|error| StoreError::Unavailable(error.to_string()))?);
        }
        Ok(ValkeyStore { inner, threads })
    }

    /// Has a thread remove payloads that no share needs. Daemons that serve the same links share this directory as well.
    ///
    /// # Errors
    /// `Unavailable` when there can be no thread.
    pub fn look_after(&mut self, spool: Arc<Spool>) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        let builder = std::thread::Builder::new().name("spool".into()).stack_size(256 * 1024);
        let thread = builder.spawn(move || inner.look_after(&spool));
        self.threads.push(thread.map_err(|error| StoreError::Unavailable(error.to_string()))?);
        Ok(())
    }

    /// Removes payloads older than `young` that no share needs. A thread does it all the time.
    ///
    /// # Errors
    /// `Unavailable`.
    pub fn sweep_spool(&self, spool: &Spool, young: Duration) -> Result<()> {
        self.inner.sweep_spool(spool, young)
    }

    fn ask<T: Send + 'static>(&self, key: Key, decide: Decide<T>) -> Pending<T> {
        let (sender, receiver) = oneshot::channel();
        let name = format!("lockbox:share:{}", crate::store::spool::name(&key.0));
        let job = Box::new(Request { key, name, decide, answer: None, sender });
        self.inner.queue.lock().jobs.push_back(job);
        self.inner.wanted.notify_one();
        Pending::remote(async move {
            receiver.await.unwrap_or_else(|_| Err(StoreError::Unavailable("the store was closed".into())))
        })
    }

    /// One request on a share that is there, or on the decoy.
    fn request<S, T: Send + 'static>(
        &self,
        handle: Handle,
        mut step: impl FnMut(&Inner, &mut Share) -> Result<S> + Send + 'static,
        tell: impl Fn(&Inner, &Share, S, &Bytes) -> T + Send + 'static,
    ) -> Pending<T> {
        let key = Key::of(handle, &self.inner.secret);
        let decide = move |inner: &Inner, stored: Option<(&Share, &Bytes)>| match stored {
            Some((share, capsule)) => {
                let mut share = *share;
                let before = share.version;
                let answer = step(inner, &mut share).map(|decided| tell(inner, &share, decided, capsule));
                (answer, (share.version != before).then(|| (share, capsule.clone())))
            }
            // Nobody has proof of the decoy (Store rule 5).
            None => (Err(step(inner, &mut inner.decoy.clone()).err().unwrap_or(StoreError::Unknown)), None),
        };
        self.ask(key, Box::new(decide))
    }
}

impl Drop for ValkeyStore {
    fn drop(&mut self) {
        self.inner.queue.lock().stopped = true;
        self.inner.wanted.notify_all();
        self.inner.ended.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Inner {
    /// The loop of one connection.
    fn work(&self) {
        let mut connection = None;
        loop {
            let mut jobs: Vec<Box<dyn Job>> = {
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
            // A connection that was closed meanwhile shows at its next use. What was asked then is asked once more: a change that
            // was made before its answer was lost is found as made, by the claim's id, the deposit's proofs or the lease's state.
            let mut outcome = self.settle(&mut connection, &mut jobs);
            if outcome.is_err() {
                connection = None;
                outcome = self.settle(&mut connection, &mut jobs);
            }
            *self.trouble.lock() = outcome.as_ref().err().map(ToString::to_string);
            if let Err(error) = outcome {
                connection = None;
                let why = match error.code() {
                    Some("OOM") => StoreError::Full,
                    _ => StoreError::Unavailable(format!("the store's server does not answer: {error}")),
                };
                jobs.into_iter().for_each(|job| job.reply(Err(why.clone())));
            }
        }
    }

    /// Brings jobs to their end. On an error those that are left in `jobs` are open.
    fn settle(
        &self,
        kept: &mut Option<redis::Connection>,
        jobs: &mut Vec<Box<dyn Job>>,
    ) -> std::result::Result<(), redis::RedisError> {
        if kept.is_none() {
            *kept = Some(connect(&self.client)?);
        }
        let Some(connection) = kept else { return Ok(()) };
        for _ in 0..ROUNDS {
            if jobs.is_empty() {
                return Ok(());
            }
            self.round(connection, jobs)?;
        }
        let busy = StoreError::Unavailable("the share changes all the time".into());
        jobs.drain(..).for_each(|job| job.reply(Err(busy.clone())));
        Ok(())
    }

    /// Reads for all jobs, decides, writes for all; who came second stays in `jobs`.
    fn round(
        &self,
        connection: &mut redis::Connection,
        jobs: &mut Vec<Box<dyn Job>>,
    ) -> std::result::Result<(), redis::RedisError> {
        let mut reads = redis::Pipeline::with_capacity(jobs.len());
        for job in jobs.iter() {
            reads.cmd("HMGET").arg(job.name()).arg("v").arg("r");
        }
        let stored: Vec<Fields> = reads.query(connection)?;
        let mut writes = redis::Pipeline::new();
        let mut decided = Vec::with_capacity(jobs.len());
        for (job, (version, record)) in jobs.iter_mut().zip(stored) {
            let stored = version.zip(record).and_then(|(version, record)| read(version, &record));
            let write = job.decide(self, stored);
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
        if self.promise == Promise::Wait {
            // Also for answers without a change: what they tell may be another's change that is not durable yet. The server waits for
            // this connection's own last write alone, so there must be one behind everything that was read.
            let mut fence = redis::Pipeline::with_capacity(2);
            fence.cmd("SET").arg(FENCE).arg(1).ignore();
            fence.cmd("WAITAOF").arg(1).arg(0).arg(TIMEOUT.as_millis() as u64);
            let ((synced, _),): ((u64, u64),) = fence.query(connection)?;
            if synced == 0 {
                return Err(redis::RedisError::from(std::io::Error::other("the server did not sync in time")));
            }
        }
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

fn read(version: Vec<u8>, record: &[u8]) -> Option<Stored> {
    let record = decode(record, PLACE)?;
    let capsule = match record.content {
        Content::Here(capsule) => Bytes::copy_from_slice(capsule),
        Content::At(_) | Content::Nowhere => Bytes::new(),
    };
    Some(Stored { version, share: record.share, capsule })
}

impl ShareStore for ValkeyStore {
    fn create(&self, handle: Handle, share: NewShare) -> Pending<Created> {
        if let Err(error) = check(&share) {
            return Pending::ready(Err(error));
        }
        let mut deposited: Option<Share> = None;
        let decide = move |inner: &Inner, stored: Option<(&Share, &Bytes)>| {
            let created =
                |kept: &Share| Created { at: inner.clock.wall(kept.created), expires: inner.clock.wall(kept.expires) };
            match (stored, &deposited) {
                // Our own, whose answer was lost with the connection.
                (Some((there, _)), Some(kept)) if there == kept => (Ok(created(kept)), None),
                (Some(_), _) => (Err(StoreError::Taken), None),
                (None, _) => {
                    let kept = Share::new(&share, inner.clock.now());
                    deposited = Some(kept);
                    (Ok(created(&kept)), Some((kept, share.capsule.clone())))
                }
            }
        };
        self.ask(Key::of(handle, &self.inner.secret), Box::new(decide))
    }

    fn claim(&self, handle: Handle, auth: &Auth, id: ClaimId) -> Pending<Claimed> {
        let auth = Auth(auth.0);
        self.request(
            handle,
            move |inner, share| share.claim(&auth, id, &inner.clock, &inner.periods, || random().map(LeaseToken)),
            |inner, share, step, capsule| share.claimed(&step, capsule.clone(), &inner.clock),
        )
    }

    fn lease(&self, handle: Handle, token: &LeaseToken) -> Pending<Lease> {
        let token = *token;
        self.request(handle, move |inner, share| share.lease(&token, &inner.clock), |_, _, lease, _| lease)
    }

    fn payload(&self, handle: Handle, token: &LeaseToken) -> Pending<Lease> {
        let token = *token;
        let step = move |inner: &Inner, share: &mut Share| share.payload(&token, &inner.clock, &inner.periods);
        self.request(handle, step, |_, _, lease, _| lease)
    }

    fn finish(&self, handle: Handle, token: &LeaseToken, how: Finish) -> Pending<bool> {
        let token = *token;
        self.request(handle, move |inner, share| share.finish(&token, how, &inner.clock), |_, _, news, _| news)
    }

    fn info(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        let owner = OwnerToken(owner.0);
        self.request(handle, move |inner, share| share.info(&owner, &inner.clock), |_, _, info, _| info)
    }

    fn revoke(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        let owner = OwnerToken(owner.0);
        self.request(handle, move |inner, share| share.revoke(&owner, &inner.clock), |_, _, info, _| info)
    }

    fn rearm(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        let owner = OwnerToken(owner.0);
        self.request(handle, move |inner, share| share.rearm(&owner, &inner.clock), |_, _, info, _| info)
    }

    fn figures(&self) -> Figures {
        Figures::default()
    }

    fn ready(&self) -> Result<()> {
        match &*self.inner.trouble.lock() {
            Some(why) => Err(StoreError::Unavailable(why.clone())),
            None => Ok(()),
        }
    }

    fn flush(&self) -> Pending<()> {
        // Every answer was given after its change: a request of any kind comes after all of them.
        let probe = Key([0; 16]);
        self.ask(probe, Box::new(|_, _| (Ok(()), None)))
    }
}
