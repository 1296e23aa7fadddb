//! The built-in store: append-only files by shard and minute of expiry, found through an index on disk.
//!
//! Everything about a share stands in the file that goes when the share is over, so that expiry is an unlink. A change appends one
//! record; the newest record of a share counts. Memory holds a few words for each file and a cache of fixed size for the index.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use lockbox_share_protocol::handle::Handle;
use nix::fcntl::{Flock, FlockArg};
use parking_lot::{Condvar, Mutex};

use super::clock::{Clock, StoreClock, SystemClock};
use super::disk::{Directory, Disk, DiskFile};
use super::group::Group;
use super::record::{Content, Place, decode, encode};
use super::share::{Key, Share};
use super::{
    Auth, ClaimId, Claimed, Created, Figures, Finish, Info, Lease, LeaseToken, NewShare, OwnerToken, Pending, Periods,
    Result, ShareStore, StoreError, check, random,
};
use crate::store::spool::Spool;

#[cfg(test)]
mod crash;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing {
    //! The head of a file that somebody made up.

    use super::scan::{Class, Head};

    pub(crate) fn head(nonce: u64, minute: u64, audit: bool, shard: u8) -> Vec<u8> {
        let class = if audit { Class::Audit } else { Class::Content };
        Head { nonce, minute, class, shard }.encode().to_vec()
    }
}
mod index;
mod replay;
mod scan;
mod shard;
mod sweep;
#[cfg(test)]
mod tests;

pub use replay::Replayed;
use shard::{RESERVE, Shard, Shared, refused};

/// What survives what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The end of the process, however it comes. A power cut may lose or repeat anything of the last half minute or so.
    None,
    /// As `None`; a power cut loses or repeats at most the last 50 milliseconds.
    Periodic,
    /// A reply is given after its barrier.
    Commit,
}

/// How often a barrier is made in mode `periodic`.
const PERIOD: Duration = Duration::from_millis(50);
/// Few enough that a group of changes has few files to sync, enough that two threads seldom meet.
const SHARDS: usize = 4;
const IDENTITY: &str = "store";
const MAGIC: &[u8; 8] = b"LBXSHS1\0";
/// The record of the decoy, as long as that of a usual capsule.
const DECOY_CAPSULE: usize = 512;

/// The index of a million live shares fits, with room for what is consumed meanwhile; what is not used is not touched. With a quarter
/// of it flows were at 0.7 of those of an empty store, because most pages came through a system call.
const CACHE: usize = 32 << 20;

/// How a store is opened.
#[derive(Clone)]
pub struct Settings {
    pub durability: Durability,
    pub periods: Periods,
    /// Bytes that payloads may take together.
    pub spool_capacity: u64,
    /// Bytes of memory for the index.
    pub cache: usize,
    /// How often expiry and compaction are looked after; None leaves it to [`SegmentStore::sweep`].
    pub background: Option<Duration>,
    pub clock: Arc<dyn Clock>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            durability: Durability::Commit,
            periods: Periods::default(),
            spool_capacity: 10 << 30,
            cache: CACHE,
            background: Some(Duration::from_secs(1)),
            clock: Arc::new(SystemClock),
        }
    }
}

/// Shares in a directory of one process.
pub struct SegmentStore {
    inner: Arc<Inner>,
    replayed: Replayed,
    threads: Vec<JoinHandle<()>>,
    /// Held as long as the store is open.
    _lock: Option<Flock<std::fs::File>>,
}

struct Inner {
    shared: Arc<Shared>,
    group: Arc<Group>,
    shards: Vec<Mutex<Shard>>,
    secret: [u8; 16],
    decoy: Share,
    decoy_file: Arc<dyn DiskFile>,
    clock: StoreClock,
    periods: Periods,
    durability: Durability,
    spool: Option<Arc<Spool>>,
    reserve_bytes: usize,
    stopped: Mutex<bool>,
    stop: Condvar,
    /// The background said that it cannot do its work.
    trouble: AtomicBool,
}

impl SegmentStore {
    /// Opens the store in `state`, or makes one: `store/` has the shares, `spool/` the payloads.
    ///
    /// # Errors
    /// `Unavailable` when another process has it, when it is damaged, or with what the disk says; `Full`.
    pub fn open(state: &Path, settings: &Settings) -> Result<SegmentStore> {
        let context = |error: io::Error| match refused(error) {
            StoreError::Unavailable(why) => StoreError::Unavailable(format!("{}: {why}", state.display())),
            other => other,
        };
        let disk = Directory::open(&state.join("store")).map_err(context)?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(state.join("lock"));
        let lock = Flock::lock(lock.map_err(context)?, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
            let why = if errno == nix::errno::Errno::EWOULDBLOCK {
                "another lockbox-share uses this state directory".to_owned()
            } else {
                format!("the state directory cannot be locked: {errno}")
            };
            StoreError::Unavailable(format!("{}: {why}", state.display()))
        })?;
        let spool = Spool::open(&state.join("spool"), settings.spool_capacity).map_err(context)?;
        let mut store = SegmentStore::open_on(Arc::new(disk), Some(spool), settings)?;
        store._lock = Some(lock);
        Ok(store)
    }

    /// # Errors
    /// As [`SegmentStore::open`].
    pub(crate) fn open_on(disk: Arc<dyn Disk>, spool: Option<Arc<Spool>>, settings: &Settings) -> Result<SegmentStore> {
        let group = Group::new();
        let shared = Arc::new(Shared {
            names: disk.names(),
            ids: AtomicU32::new(0),
            pages: settings.cache / SHARDS / 1040,
            group: Arc::clone(&group),
            disk,
        });
        let secret = identity(&shared)?;
        let saved = read_clock(&shared.disk);
        let clock = saved.and_then(|saved| StoreClock::resume(Arc::clone(&settings.clock), &saved));
        let clock = clock.unwrap_or_else(|| StoreClock::fresh(Arc::clone(&settings.clock)));
        let shards = (0..SHARDS).map(|number| Ok(Mutex::new(Shard::new(number as u8, Arc::clone(&shared))?)));
        let shards = shards.collect::<io::Result<Vec<_>>>().map_err(refused)?;
        let decoy = Share::decoy(random()?);
        let inner = Arc::new(Inner {
            decoy_file: decoy_file(&shared, &decoy).map_err(refused)?,
            decoy,
            shards,
            secret,
            clock,
            periods: settings.periods,
            durability: settings.durability,
            spool,
            reserve_bytes: RESERVE,
            stopped: Mutex::new(false),
            stop: Condvar::new(),
            trouble: AtomicBool::new(false),
            group,
            shared,
        });
        let replayed = inner.replay().map_err(refused)?;
        inner.save_clock()?;
        inner.restore_reserve();
        // What was replayed may be in the host's cache alone, and whoever asks is told of it from now on.
        inner.settle_replayed()?;
        let threads = inner.start(settings.background)?;
        Ok(SegmentStore { inner, replayed, threads, _lock: None })
    }

    /// What the start found.
    pub fn replayed(&self) -> Replayed {
        self.replayed
    }

    /// Where payloads are deposited and read.
    pub fn spool(&self) -> Option<&Arc<Spool>> {
        self.inner.spool.as_ref()
    }

    /// Removes what is over, and compacts segments that are mostly dead. The background does the same.
    ///
    /// # Errors
    /// `Full`, `Unavailable`; what was done until then stays done.
    pub fn sweep(&self) -> Result<()> {
        self.inner.sweep(false)
    }

    /// Removes everything that nothing needs, however little it is.
    ///
    /// # Errors
    /// As [`SegmentStore::sweep`].
    pub fn compact(&self) -> Result<()> {
        self.inner.sweep(true)
    }
}

impl Drop for SegmentStore {
    fn drop(&mut self) {
        *self.inner.stopped.lock() = true;
        self.inner.stop.notify_all();
        // A store that failed has told so already.
        let _ = self.inner.group.barrier();
        self.inner.group.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn start(self: &Arc<Self>, background: Option<Duration>) -> Result<Vec<JoinHandle<()>>> {
        let mut threads = Vec::new();
        let mut spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let builder = std::thread::Builder::new().name(name.into()).stack_size(256 * 1024);
            threads.push(builder.spawn(run).map_err(refused)?);
            Ok::<(), StoreError>(())
        };
        let group = Arc::clone(&self.group);
        let period = match self.durability {
            Durability::Periodic => Some(PERIOD),
            Durability::None | Durability::Commit => None,
        };
        spawn("barriers", Box::new(move || group.run(period)))?;
        if let Some(every) = background {
            let inner = Arc::clone(self);
            spawn("sweeper", Box::new(move || inner.background(every)))?;
        }
        Ok(threads)
    }

    /// A kill may have left records that no barrier covers: before they are told to anybody they are made durable.
    fn settle_replayed(&self) -> Result<()> {
        if self.durability == Durability::None {
            return Ok(());
        }
        for shard in &self.shards {
            let mut shard = shard.lock();
            let ids: Vec<u32> = shard.segments.keys().copied().collect();
            for id in ids {
                shard.file(id).and_then(|file| file.sync()).map_err(refused)?;
            }
        }
        self.shared.names.sync().map_err(refused)
    }

    fn shard(&self, key: &Key) -> &Mutex<Shard> {
        &self.shards[key.shard(self.shards.len())]
    }

    /// One request: `step` decides, the change is written, and `tell` makes the answer from the share and its capsule.
    fn request<S, T>(
        &self,
        handle: Handle,
        capsule: bool,
        step: impl FnOnce(&mut Share) -> Result<S>,
        tell: impl FnOnce(&Share, S, Bytes) -> T,
    ) -> Pending<T> {
        let key = Key::of(handle, &self.secret);
        let mut shard = self.shard(&key).lock();
        let found = match shard.find(&key) {
            Ok(Some(found)) => found,
            Ok(None) => {
                drop(shard);
                return Pending::ready(self.missed(step));
            }
            Err(error) => return Pending::ready(Err(refused(error))),
        };
        let mut segment = found.location.segment;
        let answer =
            self.decide(&mut shard, found, capsule, step, &mut segment).map(|(s, c, share)| tell(&share, s, c));
        // Without proof nothing may be learned, not even whether a barrier is under way (Store rule 5).
        let waits = self.durability == Durability::Commit && !matches!(answer, Err(StoreError::Unknown));
        let noted = if waits { shard.noted(segment) } else { 0 };
        drop(shard);
        Pending::after(answer, if waits { self.group.ticket(noted) } else { None })
    }

    fn decide<S>(
        &self,
        shard: &mut Shard,
        mut found: shard::Found,
        capsule: bool,
        step: impl FnOnce(&mut Share) -> Result<S>,
        segment: &mut u32,
    ) -> Result<(S, Bytes, Share)> {
        let before = found.share;
        let decided = step(&mut found.share)?;
        let capsule = if capsule {
            let lost = || StoreError::Unavailable("the content of the share is damaged".into());
            shard.capsule(&found).map_err(refused)?.ok_or_else(lost)?
        } else {
            Bytes::new()
        };
        if found.share.version != before.version {
            self.group.check()?;
            let now = self.clock.now();
            let over = found.share.content_until(&self.periods) <= now;
            *segment = shard.change(&found, &before, over, now.after(self.periods.repeat))?.segment;
            self.look_after(shard, &found.key, &found.share, now);
        }
        Ok((decided, capsule, found.share))
    }

    /// The same work as for a share that is there, up to the proof (Store rule 5).
    fn missed<S, T>(&self, step: impl FnOnce(&mut Share) -> Result<S>) -> Result<T> {
        let mut bytes = [0; 1024];
        let read = self.decoy_file.read_at(&mut bytes, 0).map_err(refused)?;
        let mut decoy = decode(&bytes[..read], Place { nonce: 0, at: 0 }).map_or(self.decoy, |record| record.share);
        match step(&mut decoy) {
            Err(error) => Err(error),
            // Nobody has proof of the decoy, which is noise of this process.
            Ok(_) => Err(StoreError::Unknown),
        }
    }

    fn deposit(&self, handle: Handle, share: &NewShare) -> Result<(Created, u64)> {
        check(share)?;
        self.group.check()?;
        let key = Key::of(handle, &self.secret);
        let mut shard = self.shard(&key).lock();
        let now = self.clock.now();
        let mut kept = Share::new(share, now);
        if let Some(found) = shard.find(&key).map_err(refused)? {
            if found.share.audit_until(&self.periods) > now {
                return Err(StoreError::Taken);
            }
            // The old share's records may still be there at the next start, where of one handle's records the highest version
            // counts: the new share's are above all of them.
            kept.version = found.share.version.saturating_add(1);
            shard.moved(&key, found.location, None)?;
            shard.count(found.location.segment, &found.share, false);
        }
        let location = shard.insert(&key, &kept, &share.capsule, kept.expires)?;
        let created = Created { at: self.clock.wall(kept.created), expires: self.clock.wall(kept.expires) };
        Ok((created, shard.noted(location.segment)))
    }
}

impl ShareStore for SegmentStore {
    fn create(&self, handle: Handle, share: NewShare) -> Pending<Created> {
        match self.inner.deposit(handle, &share) {
            Ok((created, noted)) if self.inner.durability == Durability::Commit => {
                Pending::after(Ok(created), self.inner.group.ticket(noted))
            }
            other => Pending::ready(other.map(|(created, _)| created)),
        }
    }

    fn claim(&self, handle: Handle, auth: &Auth, id: ClaimId) -> Pending<Claimed> {
        let inner = &self.inner;
        inner.request(
            handle,
            true,
            |share| share.claim(auth, id, &inner.clock, &inner.periods, || random().map(LeaseToken)),
            |share, step, capsule| share.claimed(&step, capsule, &inner.clock),
        )
    }

    fn lease(&self, handle: Handle, token: &LeaseToken) -> Pending<Lease> {
        let inner = &self.inner;
        inner.request(handle, false, |share| share.lease(token, &inner.clock), |_, lease, _| lease)
    }

    fn payload(&self, handle: Handle, token: &LeaseToken) -> Pending<Lease> {
        let inner = &self.inner;
        inner.request(handle, false, |share| share.payload(token, &inner.clock, &inner.periods), |_, lease, _| lease)
    }

    fn finish(&self, handle: Handle, token: &LeaseToken, how: Finish) -> Pending<bool> {
        self.inner.request(handle, false, |share| share.finish(token, how, &self.inner.clock), |_, news, _| news)
    }

    fn info(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        self.inner.request(handle, false, |share| share.info(owner, &self.inner.clock), |_, info, _| info)
    }

    fn revoke(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        self.inner.request(handle, false, |share| share.revoke(owner, &self.inner.clock), |_, info, _| info)
    }

    fn rearm(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        self.inner.request(handle, false, |share| share.rearm(owner, &self.inner.clock), |_, info, _| info)
    }

    fn figures(&self) -> Figures {
        let mut figures = Figures::default();
        for shard in &self.inner.shards {
            let shard = shard.lock();
            figures.live += shard.segments.values().map(|segment| segment.live).sum::<u64>();
            figures.segment_files += shard.segments.len() as u64;
            figures.segment_bytes += shard.segments.values().map(|segment| segment.length).sum::<u64>();
            figures.index_bytes += shard.index.bytes();
            figures.expired += shard.expired;
            figures.expired_bytes_pending += self.inner.expired_bytes(&shard);
        }
        figures.spool_bytes = self.inner.spool.as_ref().map_or(0, |spool| spool.bytes());
        (figures.barriers, figures.barrier_micros) = self.inner.group.figures();
        figures
    }

    fn ready(&self) -> Result<()> {
        self.inner.group.check()
    }

    fn flush(&self) -> Pending<()> {
        let answer = self.inner.save_clock();
        Pending::after(answer, self.inner.group.ticket_for_all())
    }
}

/// The key of handles, made with the store.
fn identity(shared: &Shared) -> Result<[u8; 16]> {
    let damaged = || StoreError::Unavailable("the file that identifies the store is damaged".into());
    if shared.disk.list().map_err(refused)?.iter().any(|name| name == IDENTITY) {
        let mut bytes = [0; 40];
        let read = shared.disk.open(IDENTITY).and_then(|file| file.read_at(&mut bytes, 0)).map_err(refused)?;
        let sum = super::record::head_checksum(&bytes[..32]).to_le_bytes();
        if read != bytes.len() || &bytes[..8] != MAGIC || bytes[32..] != sum || usize::from(bytes[24]) != SHARDS {
            return Err(damaged());
        }
        return bytes[8..24].try_into().map_err(|_| damaged());
    }
    let secret: [u8; 16] = random()?;
    let mut bytes = [0; 40];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..24].copy_from_slice(&secret);
    bytes[24] = SHARDS as u8;
    let sum = super::record::head_checksum(&bytes[..32]).to_le_bytes();
    bytes[32..].copy_from_slice(&sum);
    let made = shared.disk.create("store.new").and_then(|file| {
        file.write_at(&bytes, 0)?;
        file.sync()?;
        shared.disk.rename("store.new", IDENTITY)?;
        shared.names.sync()
    });
    made.map_err(refused).map(|()| secret)
}

fn read_clock(disk: &Arc<dyn Disk>) -> Option<String> {
    let mut bytes = [0; 256];
    let read = disk.open("clock").ok()?.read_at(&mut bytes, 0).ok()?;
    String::from_utf8(bytes[..read].to_vec()).ok()
}

fn decoy_file(shared: &Shared, decoy: &Share) -> io::Result<Arc<dyn DiskFile>> {
    let file = shared.disk.create("decoy")?;
    let mut bytes = Vec::new();
    let share = Share { capsule_bytes: DECOY_CAPSULE as u32, ..*decoy };
    encode(&Key([0; 16]), &share, Content::Here(&[0; DECOY_CAPSULE]), Place { nonce: 0, at: 0 }, &mut bytes);
    file.write_at(&bytes, 0)?;
    Ok(file)
}
