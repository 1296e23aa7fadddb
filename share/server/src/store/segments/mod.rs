//! The built-in store: append-only files by shard and minute of expiry, found through an index on
//! disk.
//!
//! Everything about a share stands in the file that goes when the share is over, so that expiry is
//! an unlink. A change appends one record; the newest record of a share counts. Memory holds a few
//! words for each file and a cache of fixed size for the index.

mod engine;
mod files;
#[cfg(any(test, debug_assertions))]
pub(crate) mod fuzzing {
    //! A forged head of a file.

    use super::files::{SegmentClass, SegmentHeader};

    pub(crate) fn head(nonce: u64, minute: u64, audit: bool, shard: u8) -> Vec<u8> {
        let class = if audit { SegmentClass::Audit } else { SegmentClass::Content };
        SegmentHeader { nonce, minute, class, shard }.encode().to_vec()
    }
}
mod index;
mod shard;
#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use lockbox_share_protocol::token::Handle;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use self::engine::SegmentEngine;
use super::barrier_group::PendingReply;
use super::contract::{Durability, NewShare, Periods, ShareTimes, StoreMaintenance, StoreStats};
use super::env::{Clock, DirectoryDisk, Disk, SystemClock};
use super::share::{Share, ShareBackend, StepReply, StoreTiming};
use super::spool::Spool;
use super::{Result, StoreError};

/// How often a barrier is made in mode `periodic`.
const PERIOD: Duration = Duration::from_millis(50);

/// Default index cache: it holds a million live shares, plus space for consumed ones; unused memory
/// is not touched. With a quarter of it the flow rate was 0.7 of that of an empty store, because
/// most pages came through a system call.
const CACHE: usize = 32 << 20;

#[derive(Clone)]
pub struct SegmentSettings {
    pub durability: Durability,
    pub periods: Periods,
    /// Bytes that payloads may take together.
    pub spool_capacity: u64,
    /// Bytes of memory for the index.
    pub cache: usize,
    /// How often the sweeper runs, which expires and compacts; None leaves it to
    /// [`SegmentStore::sweep`].
    pub background: Option<Duration>,
    pub clock: Arc<dyn Clock>,
}

impl Default for SegmentSettings {
    fn default() -> Self {
        SegmentSettings {
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
    inner: Arc<SegmentEngine>,
    threads: Vec<JoinHandle<()>>,
    /// Held as long as the store is open.
    _lock: Option<Flock<File>>,
}

impl SegmentStore {
    /// Opens or creates the store in `state`: `store/` has the shares, `spool/` the payloads.
    ///
    /// # Errors
    /// `Unavailable` when another process uses it, when it is damaged, or with the disk's error;
    /// `Full`.
    pub fn open(state: &Path, settings: &SegmentSettings) -> Result<SegmentStore> {
        let context = |error: io::Error| match StoreError::from(error) {
            StoreError::Unavailable(why) => StoreError::Unavailable(format!("{}: {why}", state.display())),
            other => other,
        };
        let disk = DirectoryDisk::open(&state.join("store")).map_err(context)?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(state.join("lock"));
        let lock = Flock::lock(lock.map_err(context)?, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
            let why = match errno {
                Errno::EWOULDBLOCK => "another lockbox-share uses this state directory".to_owned(),
                errno => format!("the state directory cannot be locked: {errno}"),
            };
            StoreError::Unavailable(format!("{}: {why}", state.display()))
        })?;
        let spool = Spool::open(&state.join("spool"), settings.spool_capacity).map_err(context)?;
        let mut store = SegmentStore::open_on(Arc::new(disk), Some(spool), settings)?;
        store._lock = Some(lock);
        Ok(store)
    }

    pub(crate) fn open_on(
        disk: Arc<dyn Disk>,
        spool: Option<Arc<Spool>>,
        settings: &SegmentSettings,
    ) -> Result<SegmentStore> {
        let clock = files::resume_clock(&*disk, &settings.clock);
        let timing = StoreTiming { clock, periods: settings.periods };
        let inner = Arc::new(SegmentEngine::new(disk, spool, settings.cache, settings.durability, timing)?);
        inner.replay()?;
        inner.save_clock()?;
        files::restore_reserve(&*inner.shared.disk);
        // What was replayed may be in the host's cache alone, and clients hear of it from now on.
        inner.sync_replayed()?;
        let threads = start(&inner, settings)?;
        Ok(SegmentStore { inner, threads, _lock: None })
    }

    pub fn spool(&self) -> Option<&Arc<Spool>> {
        self.inner.spool.as_ref()
    }

    /// Removes expired shares, and compacts mostly dead segments. The background thread does the
    /// same.
    ///
    /// # Errors
    /// `Full`, `Unavailable`; completed steps are not undone.
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
        self.inner.stop();
        // A store that failed has reported that already.
        let _ = self.inner.shared.group.barrier();
        self.inner.shared.group.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn start(inner: &Arc<SegmentEngine>, settings: &SegmentSettings) -> Result<Vec<JoinHandle<()>>> {
    let builder = |name: &str| std::thread::Builder::new().name(name.into()).stack_size(256 * 1024);
    let group = Arc::clone(&inner.shared.group);
    let period = (settings.durability == Durability::Periodic).then_some(PERIOD);
    let mut threads = vec![builder("barriers").spawn(move || group.run(period))?];
    if let Some(every) = settings.background {
        let inner = Arc::clone(inner);
        threads.push(builder("sweeper").spawn(move || inner.background(every))?);
    }
    Ok(threads)
}

impl ShareBackend for SegmentStore {
    fn deposit(&self, handle: Handle, share: NewShare) -> PendingReply<ShareTimes> {
        self.inner.deposit(handle, &share)
    }

    fn step<T: StepReply>(
        &self,
        handle: Handle,
        step: impl FnMut(&StoreTiming, &mut Share) -> Result<T> + Send + 'static,
    ) -> PendingReply<T> {
        self.inner.step(handle, step)
    }
}

impl StoreMaintenance for SegmentStore {
    fn stats(&self) -> StoreStats {
        let mut figures = StoreStats::default();
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
        (figures.barriers, figures.barrier_micros) = self.inner.shared.group.stats();
        figures
    }

    fn ready(&self) -> Result<()> {
        self.inner.shared.group.check()
    }

    fn flush(&self) -> PendingReply<()> {
        let answer = self.inner.save_clock();
        PendingReply::after(answer, self.inner.shared.group.ticket_for_all())
    }
}
