//! Periodic work of the daemon: background steps, cache invalidation, flushes, commits and
//! scheduled snapshots.
//!
//! Background steps and invalidation run every second. Unless `sync=never`, a flush runs every five
//! seconds, and a commit one second after it. Scheduled snapshots run in a separate thread, because
//! one may take long. In debug builds tests may have this clock run faster ([`clock_speed`]).
//!
//! # Rules of flushes and commits
//! 1  A commit runs [`ARRIVAL`] after its flush: syncfs(2) on a FUSE mount sends WRITE requests and
//!    does not wait for the replies, so an immediate commit would miss some. Data that arrives
//!    later is part of the next commit.
//! 2  A flush runs [`PERIOD`] after the previous flush, or at the next tick. So data that the
//!    daemon received before a flush is durable one commit later, and data that a program wrote is
//!    at most PERIOD + ARRIVAL + STEP old when its commit begins.
//!
//! # Rules of scheduled snapshots (`snapshots=`)
//! 1  At most one snapshot is taken per shortest period (hour, day, ...) of the system clock. Names
//!    contain the time, so this also holds across mounts and after the clock was set back.
//! 2  None is taken while the live tree equals the newest snapshot, whether scheduled or manual.
//!    Commits without a change of the tree do not count.
//! 3  Snapshots with other names than the scheduler's are neither counted nor removed: they belong
//!    to the user.
//! 4  A failure is logged once, shown by `status`, and retried after [`RETRY_SECONDS`]. The mount
//!    continues.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lockbox::Result;
use lockbox::archive::{RetentionPolicy, RetentionRule, SnapshotManager};
use lockbox::error::Timestamp;
use lockbox::fs::{FileSystem, SyncProfile};
use lockbox::keys::RollbackGuard;
use lockbox_host::control;
use lockbox_host::mount_options::format_rules;
use parking_lot::Mutex;

use crate::Failure;
use crate::kernel_cache::{ARRIVAL, KernelCache};
use crate::shutdown::MountHandle;
use crate::snapshot_requests::collect_or_warn;

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
        snapshot_schedule: Option<(Arc<SnapshotSchedule>, SnapshotManager)>,
    ) -> std::io::Result<Ticker> {
        let mut ticker = Ticker { threads: Vec::new() };
        if let Some((snapshots, moments)) = snapshot_schedule {
            let (cache, mount) = (Arc::clone(&cache), Arc::clone(&mount));
            // It waits until deleted data is reclaimed, and logs its own failures.
            ticker.spawn_each_second("snapshots", move || {
                snapshots.step(&moments, || collect_or_warn(&mount, &cache, "a scheduled snapshot"))
            })?;
        }
        let mut work = BackgroundWork { fs, cache, mount, last_error: String::new() };
        let (begun, speed) = (Instant::now(), clock_speed());
        let now = move || begun + begun.elapsed() * speed;
        let mut schedule = (profile != SyncProfile::Never).then(|| FlushSchedule::new(now()));
        let mut remembered = Instant::now();
        ticker.spawn_each_second("ticker", move || {
            let done = match schedule.as_mut().and_then(|schedule| schedule.due(now())) {
                Some(PeriodicStep::Flush) => work.flush(),
                Some(PeriodicStep::Commit) => work.fs.sync_in_background(),
                None => Ok(()),
            };
            work.report(done);
            // Counts from the end of the flush, when its data is in flight.
            if let Some(schedule) = &mut schedule {
                schedule.finish_step(now());
            }
            work.mount.limit_write_back(work.fs.programs_sync());
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

    pub(crate) fn start_each_second(name: &str, step: impl FnMut() + Send + 'static) -> std::io::Result<Ticker> {
        let mut ticker = Ticker { threads: Vec::new() };
        ticker.spawn_each_second(name, step)?;
        Ok(ticker)
    }

    fn spawn_each_second(&mut self, name: &str, mut step: impl FnMut() + Send + 'static) -> std::io::Result<()> {
        let (stop, stopped) = mpsc::channel();
        let step_time = STEP / clock_speed();
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            while stopped.recv_timeout(step_time) == Err(RecvTimeoutError::Timeout) {
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

/// Returns the speed of the clock of steps, flushes and commits: 1 in release builds, the value of
/// `LOCKBOX_TEST_CLOCK` (1 to 100) in debug builds. Proportions between them do not change.
fn clock_speed() -> u32 {
    let given = if cfg!(debug_assertions) { std::env::var("LOCKBOX_TEST_CLOCK").ok() } else { None };
    given.and_then(|speed| speed.parse::<u32>().ok()).filter(|speed| (1..=100).contains(speed)).unwrap_or(1)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeriodicStep {
    Flush,
    Commit,
}

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
        if self.cache.writers.has_any() {
            self.mount.flush()?;
            tracing::debug!("flushed dirty pages of the kernel");
        }
        Ok(())
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

/// Delay in seconds after a failed attempt.
const RETRY_SECONDS: i64 = 60;

/// Retention rules of one mount, and the state of their execution.
pub(crate) struct SnapshotSchedule {
    keep: RetentionPolicy,
    rule: RetentionRule,
    clock: Box<dyn Fn() -> Timestamp + Send + Sync>,
    state: Mutex<ScheduleState>,
}

#[derive(Default)]
struct ScheduleState {
    /// Period in which a snapshot was found or taken.
    taken_in: Option<i64>,
    /// Due time of the next one, as of the last check.
    next: Timestamp,
    failure: Option<String>,
    /// Time of the failure, in seconds.
    failed: i64,
}

impl SnapshotSchedule {
    /// Returns None for rules that keep nothing.
    pub(crate) fn new(
        keep: RetentionPolicy,
        clock: impl Fn() -> Timestamp + Send + Sync + 'static,
    ) -> Option<SnapshotSchedule> {
        let (rule, _) = keep.rules().next()?;
        let next = rule.beginning_of(rule.period_of(clock()));
        let state = Mutex::new(ScheduleState { next, ..ScheduleState::default() });
        Some(SnapshotSchedule { keep, rule, clock: Box::new(clock), state })
    }

    /// Takes a snapshot if it is due; called about once a second. `collect` returns when the
    /// kernel's cached writes have arrived.
    pub(crate) fn step(&self, moments: &SnapshotManager, collect: impl FnOnce() -> lockbox::Result<()>) {
        let now = (self.clock)();
        let period = self.rule.period_of(now);
        {
            let state = self.state.lock();
            let waits =
                state.failure.is_some() && (0..RETRY_SECONDS).contains(&now.seconds.saturating_sub(state.failed));
            if state.taken_in == Some(period) || waits {
                return;
            }
        }
        // Not under the lock: a status request must not wait for the host.
        let taken = moments.take_scheduled(self.rule, &self.keep, now, collect);
        let mut state = self.state.lock();
        match taken {
            Ok(there) => {
                state.taken_in = there.then_some(period);
                state.next = self.rule.beginning_of(if there { period.saturating_add(1) } else { period });
                state.failure = None;
            }
            Err(error) => {
                let sentence = Failure::sentence(&error);
                if state.failure.as_ref() != Some(&sentence) {
                    tracing::error!("snapshots= could not take or prune a snapshot: {sentence}");
                }
                state.next = self.rule.beginning_of(period);
                (state.failure, state.failed) = (Some(sentence), now.seconds);
            }
        }
    }

    /// Returns the state for `status`.
    pub(crate) fn describe(&self) -> control::ScheduleStatus {
        let state = self.state.lock();
        control::ScheduleStatus {
            rules: format_rules(&self.keep),
            next: state.next.seconds,
            failure: state.failure.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

    use lockbox::archive::Archive;
    use lockbox::fs::{Ino, ROOT_INO};

    use super::*;
    use crate::snapshot_requests::tests::{CREATOR, opened};
    use lockbox_host::mount_options::MountOptions;

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

    const HOUR: i64 = 3600;
    /// 2026-11-23T00:00:00Z
    const BEGIN: i64 = 1_795_392_000;

    /// Archive with a file, whose schedule has a manual clock.
    struct Place {
        _directory: tempfile::TempDir,
        archive: Archive,
        file: Ino,
        clock: Arc<AtomicI64>,
        collected: AtomicUsize,
    }

    impl Place {
        fn new() -> Place {
            let (directory, archive) = opened();
            let file = archive.file_system().create_and_open(ROOT_INO, b"file", 0o644, CREATOR).unwrap().ino;
            let clock = Arc::new(AtomicI64::new(BEGIN));
            Place { _directory: directory, archive, file, clock, collected: AtomicUsize::new(0) }
        }

        fn schedule(&self, rules: &str) -> SnapshotSchedule {
            let keep = MountOptions::parse(&[format!("snapshots={rules}")]).unwrap().snapshots;
            let clock = Arc::clone(&self.clock);
            let now = move || Timestamp { seconds: clock.load(Ordering::SeqCst), nanos: 0 };
            SnapshotSchedule::new(keep, now).unwrap()
        }

        fn write(&self, byte: u8) {
            self.archive.file_system().write(self.file, 0, &[byte; 100]).unwrap();
        }

        fn names(&self) -> Vec<String> {
            let all = self.archive.snapshot_manager().list().unwrap();
            all.iter().map(|one| String::from_utf8(one.name.clone()).unwrap()).collect()
        }

        fn step(&self, schedule: &SnapshotSchedule, at: i64) -> Vec<String> {
            self.clock.store(BEGIN + at, Ordering::SeqCst);
            schedule.step(&self.archive.snapshot_manager(), || {
                self.collected.fetch_add(1, Ordering::SeqCst);
                Ok(())
            });
            self.names()
        }
    }

    #[test]
    fn a_snapshot_is_taken_in_each_period_with_changes() {
        let place = Place::new();
        let schedule = place.schedule("hourly:2,daily:9");
        let next = || schedule.describe().next - BEGIN;
        assert_eq!((schedule.describe().rules.as_str(), next()), ("hourly:2,daily:9", 0));
        assert_eq!(place.step(&schedule, 60), ["auto-2026-11-23T00-01-00Z"]);
        assert_eq!((next(), place.collected.load(Ordering::SeqCst)), (HOUR, 1));
        place.write(1);
        assert_eq!(place.step(&schedule, 3599).len(), 1, "the hour has one");
        assert_eq!(place.step(&schedule, HOUR).last().unwrap(), "auto-2026-11-23T01-00-00Z");
        // Its own commit, confirming commits and the first commit of another mount are no changes.
        let fs = place.archive.file_system();
        while fs.maintain().unwrap() {}
        fs.make_durable().unwrap();
        fs.purge().unwrap();
        assert_eq!(place.step(&schedule, 2 * HOUR + 5).len(), 2, "nothing changed");
        assert_eq!(next(), 2 * HOUR);
        assert_eq!(place.step(&place.schedule("hourly:2,daily:9"), 2 * HOUR + 6).len(), 2, "nor for the next mount");
        place.write(2);
        assert_eq!(
            place.step(&schedule, 2 * HOUR + 7),
            ["auto-2026-11-23T01-00-00Z", "auto-2026-11-23T02-00-07Z"],
            "the oldest is of no hour and no day that is kept"
        );
        place.write(3);
        assert_eq!(place.step(&schedule, 2 * HOUR + 8).len(), 2);
        assert_eq!(place.step(&schedule, 26 * HOUR).len(), 2, "the one of the first hour goes");
        assert_eq!(next(), 27 * HOUR);
        // After the clock was set back: the hour has one.
        place.write(4);
        assert_eq!(place.step(&schedule, 2 * HOUR + 9).len(), 2);
        assert_eq!(place.step(&schedule, 26 * HOUR + 1).len(), 2);
        place.archive.file_system().release(place.file).unwrap();
    }

    /// Snapshots taken while the clock was ahead do not replace later ones.
    #[test]
    fn a_clock_that_was_ahead_costs_no_snapshot() {
        let place = Place::new();
        let schedule = place.schedule("daily:1");
        assert_eq!(place.step(&schedule, 24 * HOUR), ["auto-2026-11-24T00-00-00Z"]);
        place.write(1);
        assert_eq!(place.step(&schedule, 60), ["auto-2026-11-23T00-01-00Z"]);
    }

    #[test]
    fn manual_snapshots_are_neither_counted_nor_removed() {
        let place = Place::new();
        let schedule = place.schedule("daily:1");
        let moments = place.archive.snapshot_manager();
        for name in ["monday", "auto-monday", "auto-2026-11-23", "2026-11-23T00-00-00Z"] {
            moments.create(name.as_bytes()).unwrap();
        }
        assert!(moments.create(b"auto-2026-11-23T00-00-00Z").is_err());
        assert_eq!(place.step(&schedule, 0).len(), 4, "the newest shows what is there, whoever took it");
        for day in 0..3 {
            place.write(day as u8);
            place.step(&schedule, 24 * HOUR * day);
        }
        let expected =
            ["monday", "auto-monday", "auto-2026-11-23", "2026-11-23T00-00-00Z", "auto-2026-11-25T00-00-00Z"];
        assert_eq!(place.names(), expected);
    }

    #[test]
    fn a_failure_is_shown_and_tried_again() {
        let place = Place::new();
        let schedule = place.schedule("hourly:5");
        let moments = place.archive.snapshot_manager();
        let fail = |at: i64, tried: &mut u32| {
            place.clock.store(BEGIN + at, Ordering::SeqCst);
            schedule.step(&moments, || {
                *tried += 1;
                Err(lockbox::Error::NoSpace("the disk is full".into()))
            });
        };
        let mut tried = 0;
        fail(0, &mut tried);
        let failure = schedule.describe().failure.unwrap();
        assert!(failure.contains("the disk is full") && place.names().is_empty(), "{failure}");
        fail(RETRY_SECONDS - 1, &mut tried);
        assert_eq!(tried, 1, "a minute is left");
        fail(RETRY_SECONDS, &mut tried);
        assert_eq!(tried, 2);
        assert_eq!(place.step(&schedule, 2 * RETRY_SECONDS).len(), 1);
        assert_eq!(schedule.describe().failure, None);
    }

    #[test]
    fn rules_that_keep_nothing_need_no_schedule() {
        assert!(SnapshotSchedule::new(RetentionPolicy::default(), Timestamp::default).is_none());
    }
}
