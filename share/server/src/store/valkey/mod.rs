//! Store in a Valkey (or Redis) server, for daemons on several machines that serve the same links.
//!
//! A share is one hash with its version and its record. A change reads it, decides in this process,
//! and writes with a script that compares the version first (Store rule 1); a request that loses
//! the race decides again. Requests that wait together share their round trips. Time is that of the
//! daemons, so the clocks of their machines must agree; a failover of the server may lose changes
//! that its replica had not received.

mod pipeline;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use lockbox_share_protocol::token::Handle;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;
use zeroize::Zeroizing;

use self::pipeline::{
    Decide, DurabilityMethod, Request, SECRET, ValkeyEngine, connect, durability_method, payload_name, share_name,
    shared_secret, unavailable,
};
use super::barrier_group::PendingReply;
use super::contract::{Durability, NewShare, Periods, ShareTimes, StoreMaintenance, StoreStats};
use super::env::{Clock, StoreClock, random};
use super::share::{Key, Share, ShareBackend, StepReply, StoreTiming};
use super::spool::Spool;
use super::{Result, StoreError};

/// Connections, each with a thread.
const CONNECTIONS: usize = 4;

/// Address, password and durability of the server.
pub struct ValkeySettings {
    /// `valkey://HOST:PORT/DB` or `valkey+unix:///PATH?db=DB`, without a password.
    pub url: String,
    pub password: Option<Zeroizing<String>>,
    /// `Commit` wants a server that can promise it.
    pub durability: Durability,
    pub periods: Periods,
    pub clock: Arc<dyn Clock>,
}

pub struct ValkeyStore {
    inner: Arc<ValkeyEngine>,
    threads: Vec<JoinHandle<()>>,
}

impl ValkeyStore {
    /// Connects and checks which durability the server can provide.
    ///
    /// # Errors
    /// `Invalid` for a malformed address, `Unavailable` when the server does not answer or cannot
    /// provide the requested durability.
    pub fn connect(settings: &ValkeySettings) -> Result<ValkeyStore> {
        use redis::IntoConnectionInfo;
        let address = "the store's address is valkey://HOST:PORT/DB or valkey+unix:///PATH, without a password";
        let mut info = settings.url.as_str().into_connection_info().map_err(|_| StoreError::Invalid(address))?;
        if info.redis_settings().password().is_some() {
            return Err(StoreError::Invalid("the password of the store belongs into a file, not into its address"));
        }
        if let Some(password) = &settings.password {
            let with_password = info.redis_settings().clone().set_password(password.as_str());
            info = info.set_redis_settings(with_password);
        }
        let client = redis::Client::open(info).map_err(unavailable)?;
        let mut connection = connect(&client).map_err(unavailable)?;
        let durability_method = match settings.durability {
            Durability::Commit => durability_method(&mut connection)?,
            Durability::None | Durability::Periodic => DurabilityMethod::Nothing,
        };
        let secret = shared_secret(&mut connection)?;
        let inner = Arc::new(ValkeyEngine {
            client,
            queue: Mutex::default(),
            wanted: Condvar::new(),
            ended: Condvar::new(),
            timing: StoreTiming { clock: StoreClock::fresh(Arc::clone(&settings.clock)), periods: settings.periods },
            secret,
            decoy: Share::decoy(random()?),
            durability_method,
            last_error: Mutex::new(None),
        });
        let mut store = ValkeyStore { inner, threads: Vec::new() };
        for _ in 0..CONNECTIONS {
            let inner = Arc::clone(&store.inner);
            store.spawn("valkey", move || inner.serve_connection())?;
        }
        Ok(store)
    }

    /// Has a thread remove payloads that no share needs. Daemons that serve the same links share
    /// this directory as well.
    ///
    /// # Errors
    /// `Unavailable` when there can be no thread.
    pub fn sweep_in_background(&mut self, spool: Arc<Spool>) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        self.spawn("spool", move || inner.sweep_in_background(&spool))
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let builder = std::thread::Builder::new().name(name.into()).stack_size(512 * 1024);
        self.threads.push(builder.spawn(run)?);
        Ok(())
    }

    fn ask<T: Send + 'static>(&self, key: Key, decide: Decide<T>) -> PendingReply<T> {
        let (sender, receiver) = oneshot::channel();
        let name = share_name(&key);
        let job = Box::new(Request { key, name, decide, answer: None, sender });
        self.inner.queue.lock().jobs.push_back(job);
        self.inner.wanted.notify_one();
        PendingReply::remote(async move {
            receiver.await.unwrap_or_else(|_| Err(StoreError::Unavailable("the store was closed".into())))
        })
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

impl ShareBackend for ValkeyStore {
    fn deposit(&self, handle: Handle, share: NewShare) -> PendingReply<ShareTimes> {
        let mut deposited: Option<Share> = None;
        let decide = move |timing: &StoreTiming, stored: Option<(&Share, &Bytes)>| match (stored, &deposited) {
            // Our own, whose answer was lost with the connection.
            (Some((there, _)), Some(kept)) if there == kept => (Ok(kept.created(&timing.clock)), None),
            (Some(_), _) => (Err(StoreError::Taken), None),
            (None, _) => {
                let kept = *deposited.insert(Share::new(&share, timing.clock.now()));
                (Ok(kept.created(&timing.clock)), Some((kept, share.capsule.clone())))
            }
        };
        self.ask(Key::of(handle, &self.inner.secret), Box::new(decide))
    }

    fn step<T: StepReply>(
        &self,
        handle: Handle,
        mut step: impl FnMut(&StoreTiming, &mut Share) -> Result<T> + Send + 'static,
    ) -> PendingReply<T> {
        let decoy = self.inner.decoy;
        let decide = move |timing: &StoreTiming, stored: Option<(&Share, &Bytes)>| {
            let Some((share, capsule)) = stored else {
                // Nobody has proof of the decoy (Store rule 5).
                return (Err(step(timing, &mut decoy.clone()).err().unwrap_or(StoreError::Unknown)), None);
            };
            let mut changed = *share;
            let mut answer = step(timing, &mut changed);
            if let Ok(answer) = &mut answer {
                answer.add_capsule(capsule.clone());
            }
            (answer, (changed.version != share.version).then(|| (changed, capsule.clone())))
        };
        self.ask(Key::of(handle, &self.inner.secret), Box::new(decide))
    }
}

impl StoreMaintenance for ValkeyStore {
    fn stats(&self) -> StoreStats {
        StoreStats::default()
    }

    fn ready(&self) -> Result<()> {
        self.inner.last_error.lock().clone().map_or(Ok(()), |why| Err(StoreError::Unavailable(why)))
    }

    fn flush(&self) -> PendingReply<()> {
        // Every answer was given after its change: a request of any kind comes after all of them.
        self.ask(Key([0; 16]), Box::new(|_, _| (Ok(()), None)))
    }
}

/// How often payloads that no share needs are looked for.
const SPOOL_SWEEP: Duration = Duration::from_secs(30);
/// A payload is younger than its share: it is not looked for before the share must be there.
const YOUNG: Duration = Duration::from_secs(lockbox_share_protocol::api::UPLOAD_SECONDS + 300);

impl ValkeyEngine {
    fn sweep_in_background(&self, spool: &Spool) {
        loop {
            {
                let mut queue = self.queue.lock();
                self.ended.wait_while_for(&mut queue, |queue| !queue.stopped, SPOOL_SWEEP);
                if queue.stopped {
                    return;
                }
            }
            if let Err(error) = self.sweep_spool(spool, YOUNG) {
                tracing::warn!("the spool was not swept: {error}");
            }
        }
    }

    /// Removes payloads older than `young` that no share needs.
    fn sweep_spool(&self, spool: &Spool, young: Duration) -> Result<()> {
        spool.remove_abandoned()?;
        spool.recount()?;
        let ids = spool.older_than(young)?;
        if ids.is_empty() {
            return Ok(());
        }
        let mut connection = connect(&self.client).map_err(unavailable)?;
        // A server that came back empty, or another one, needs no payload at all: that is no reason
        // to remove them.
        let secret: Option<Vec<u8>> = redis::cmd("GET").arg(SECRET).query(&mut connection).map_err(unavailable)?;
        if secret.as_deref() != Some(&self.secret[..]) {
            return Err(StoreError::Unavailable("the server is not the server of these shares".into()));
        }
        for ids in ids.chunks(1000) {
            let mut asked = redis::Pipeline::with_capacity(ids.len());
            for id in ids {
                asked.cmd("EXISTS").arg(payload_name(id));
            }
            let needed: Vec<bool> = asked.query(&mut connection).map_err(unavailable)?;
            ids.iter().zip(needed).filter(|(_, needed)| !needed).for_each(|(id, _)| spool.remove(id));
        }
        Ok(())
    }
}
