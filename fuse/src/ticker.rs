//! Periodic work of the daemon: background steps, cache invalidation, flushes, commits and
//! scheduled snapshots.
//!
//! Background steps and invalidation run every second. Unless `sync=never`, a flush runs every five
//! seconds, and a commit one second after it. Scheduled snapshots run in a separate thread, because
//! one may take long.
//!
//! # Rules
//! 1  A commit runs [`ARRIVAL`] after its flush: syncfs(2) on a FUSE mount sends WRITE requests and
//!    does not wait for the replies, so an immediate commit would miss some. Data that arrives
//!    later is part of the next commit.
//! 2  A flush runs [`PERIOD`] after the previous flush, or at the next tick. So data that the
//!    daemon received before a flush is durable one commit later, and data that a program wrote is
//!    at most PERIOD + ARRIVAL + STEP old when its commit begins.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lockbox::archive::SnapshotManager;
use lockbox::fs::{FileSystem, SyncProfile};
use lockbox::keys::RollbackGuard;
use lockbox::{Error, Result};

use crate::kernel_cache::KernelCache;
use crate::schedule;
use crate::shutdown::{ARRIVAL, MountHandle};
use crate::snapshot_requests::collect_writes;

const STEP: Duration = Duration::from_secs(1);
/// Interval between flushes of the kernel's pages.
const PERIOD: Duration = Duration::from_secs(5);
/// Interval between updates of the rollback state, during which an older copy could pass for the
/// newest; each update costs an fsync in addition to the archive's. Also bounds the time that data
/// stays in a read buffer after it was deleted.
const REMEMBER_PERIOD: Duration = Duration::from_secs(60);
/// Maximum of consecutive background steps per tick.
const MAX_STEPS: u32 = 64;

/// Running timer threads; dropping it stops and joins them.
pub(crate) struct Ticker {
    /// A thread runs until its sender is dropped.
    threads: Vec<(Sender<()>, JoinHandle<()>)>,
}

impl Ticker {
    pub(crate) fn start(
        fs: Arc<FileSystem>,
        witness: Arc<RollbackGuard>,
        cache: Arc<KernelCache>,
        mount: Arc<MountHandle>,
        profile: SyncProfile,
        snapshot_schedule: Option<(Arc<schedule::SnapshotSchedule>, SnapshotManager)>,
    ) -> std::io::Result<Ticker> {
        let mut ticker = Ticker { threads: Vec::new() };
        if let Some((snapshots, moments)) = snapshot_schedule {
            let (cache, mount) = (Arc::clone(&cache), Arc::clone(&mount));
            // It waits until deleted data is reclaimed, and logs its own failures.
            ticker
                .spawn_each_second("snapshots", move || snapshots.step(&moments, || collect_writes(&mount, &cache)))?;
        }
        let mut work = BackgroundWork { fs, cache, mount, last_error: String::new() };
        let mut schedule = (profile != SyncProfile::Never).then(|| FlushSchedule::new(Instant::now()));
        let mut remembered = Instant::now();
        ticker.spawn_each_second("ticker", move || {
            let done = match schedule.as_mut().and_then(|schedule| schedule.due(Instant::now())) {
                Some(PeriodicStep::Flush) => work.flush(),
                Some(PeriodicStep::Commit) => work.commit(),
                None => Ok(()),
            };
            work.report(done);
            // Counts from the end of the flush, when its data is in flight.
            if let Some(schedule) = &mut schedule {
                schedule.finish_step(Instant::now());
            }
            let done = work.maintain();
            work.report(done);
            work.invalidate_attributes();
            if remembered.elapsed() >= REMEMBER_PERIOD {
                witness.remember();
                work.fs.wipe_buffers();
                remembered = Instant::now();
            }
        })?;
        Ok(ticker)
    }

    fn spawn_each_second(&mut self, name: &str, mut step: impl FnMut() + Send + 'static) -> std::io::Result<()> {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            while stopped.recv_timeout(STEP) == Err(RecvTimeoutError::Timeout) {
                step();
            }
        })?;
        self.threads.push((stop, thread));
        Ok(())
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        let (stops, threads): (Vec<_>, Vec<_>) = self.threads.drain(..).unzip();
        drop(stops);
        for thread in threads {
            let _ = thread.join();
        }
    }
}

/// Step that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeriodicStep {
    Flush,
    Commit,
}

/// Next step and its time.
struct FlushSchedule {
    next: PeriodicStep,
    at: Instant,
    flush_began: Instant,
    waits: bool,
}

impl FlushSchedule {
    fn new(now: Instant) -> FlushSchedule {
        FlushSchedule { next: PeriodicStep::Flush, at: now + PERIOD, flush_began: now, waits: true }
    }

    /// Returns the step that is due; `finish_step` reports its end.
    fn due(&mut self, now: Instant) -> Option<PeriodicStep> {
        if now < self.at {
            return None;
        }
        self.waits = false;
        if self.next == PeriodicStep::Flush {
            self.flush_began = now;
        }
        Some(self.next)
    }

    /// Records that the due step, if there was one, ended at `now`.
    fn finish_step(&mut self, now: Instant) {
        if std::mem::replace(&mut self.waits, true) {
            return;
        }
        (self.next, self.at) = match self.next {
            PeriodicStep::Flush => (PeriodicStep::Commit, now + ARRIVAL),
            PeriodicStep::Commit => (PeriodicStep::Flush, self.flush_began + PERIOD),
        };
    }
}

struct BackgroundWork {
    fs: Arc<FileSystem>,
    cache: Arc<KernelCache>,
    mount: Arc<MountHandle>,
    last_error: String,
}

impl BackgroundWork {
    /// Requests the kernel's dirty pages. Called without a lock of the file system, because they
    /// arrive as requests.
    fn flush(&self) -> Result<()> {
        // Without a writer the kernel has none (KERNEL-3), and opening the root would make
        // `umount` fail as busy.
        if self.cache.has_any_writer() {
            self.mount.flush().map_err(|e| Error::io("the process that flushes the mount does not answer", e))?;
            tracing::debug!("flushed dirty pages of the kernel");
        }
        Ok(())
    }

    fn commit(&self) -> Result<()> {
        // The file system knows of a change from its acceptance on, even during a commit.
        if self.fs.is_dirty() { self.fs.sync_in_background() } else { Ok(()) }
    }

    fn maintain(&mut self) -> Result<()> {
        for _ in 0..MAX_STEPS {
            if !self.fs.maintain()? {
                break;
            }
        }
        Ok(())
    }

    /// Invalidates the block counts that WRITEs and writeback changed.
    fn invalidate_attributes(&self) {
        self.cache.invalidate_written(&self.fs);
        for ino in self.fs.take_block_count_changes() {
            self.cache.invalidate_blocks(ino);
        }
    }

    /// Logs an error that repeats every second once.
    fn report(&mut self, done: Result<()>) {
        let Err(error) = done else { return };
        let message = error.to_string();
        if message != self.last_error {
            tracing::error!("background work failed: {message}");
            self.last_error = message;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks every STEP, with steps that take the time `takes` returns, and returns the steps with
    /// their start and end.
    fn run(seconds: u64, takes: impl Fn(PeriodicStep) -> Duration) -> Vec<(PeriodicStep, Duration, Duration)> {
        let start = Instant::now();
        let mut now = start;
        let mut schedule = FlushSchedule::new(now);
        let mut done = Vec::new();
        while now < start + Duration::from_secs(seconds) {
            now += STEP;
            let began = now;
            let due = schedule.due(now);
            if let Some(due) = due {
                now += takes(due);
                done.push((due, began - start, now - start));
            }
            schedule.finish_step(now);
        }
        done
    }

    #[test]
    fn written_data_is_in_a_commit_that_begins_seven_seconds_later() {
        let done = run(600, |_| Duration::from_millis(3));
        let flushes: Vec<_> = done.iter().filter(|(due, ..)| *due == PeriodicStep::Flush).collect();
        // A byte that just missed a flush is sent by the next one and committed after that.
        for pair in flushes.windows(2) {
            let missed = pair[0].1;
            let commit = done.iter().find(|(due, began, _)| *due == PeriodicStep::Commit && *began > pair[1].1);
            let Some((_, began, _)) = commit else { continue };
            assert!(*began - missed <= PERIOD + ARRIVAL + STEP, "{missed:?} {began:?}");
        }
        assert!(flushes.len() > 90);
    }

    #[test]
    fn each_commit_leaves_the_pages_of_its_flush_time_to_arrive() {
        for slow in [0, 30, 4_000, 9_000] {
            let done = run(600, |due| Duration::from_millis(if due == PeriodicStep::Flush { slow } else { slow / 2 }));
            for pair in done.windows(2) {
                assert_ne!(pair[0].0, pair[1].0, "in turn");
                if pair[1].0 == PeriodicStep::Commit {
                    assert!(pair[1].1 - pair[0].2 >= ARRIVAL, "{pair:?}");
                }
            }
            assert!(done.len() > 40);
        }
    }
}
