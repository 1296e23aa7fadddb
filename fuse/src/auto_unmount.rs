//! Unmounts an archive by itself: when it was not used for the time of `idle=`, when `lockbox exec`
//! was killed, and before the machine sleeps (`lock-on-suspend`).
//!
//! # Rules of an idle mount: no request for that time, and no open handle
//! 1  The clock runs while the machine is suspended: an archive forgotten overnight is locked in
//!    the morning.
//! 2  Time counts from the last request and the last close. An open handle counts as use even
//!    without requests, because replies from the kernel's caches are not visible here.
//! 3  A busy mount is never detached: the kernel is asked for a plain unmount, which it refuses
//!    while there is a working directory, a mount or a memory map below. Then the mount stays and
//!    the unmount is retried.
//!
//! # Sleep
//! A busy mount keeps its key, because its users could not continue without it. Everything is saved
//! instead, and plaintext is dropped: in the seconds that logind grants the daemon drops its caches
//! and the kernel's cached pages. Pages that programs lock or map writable may stay.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use lockbox::fs::FileSystem;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::time::{ClockId, clock_gettime};

use crate::adapter::Activity;
use crate::dbus::SleepClient;
use crate::kernel_cache::{ARRIVAL, KernelCache};
use crate::shutdown::{MountEvent, MountHandle, SuspendReply};
use crate::ticker::Ticker;

/// Idle time after which the mount of a `lockbox exec` that was killed ends.
const KILLED_IDLE: Duration = Duration::from_secs(10);

/// Interval between attempts that the kernel refuses, unless the idle time is shorter.
const RETRY_PERIOD: Duration = Duration::from_secs(60);

/// Returns the time since boot, including suspends (CLOCK_BOOTTIME).
pub(crate) fn time_since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[derive(Clone, Copy, Debug, Default)]
struct ActivitySample {
    used: bool,
    /// Files or directories are open.
    open: bool,
}

/// Decides when a mount is idle; independent of a clock.
#[derive(Debug)]
struct IdleTimer {
    limit: Duration,
    quiet_since: Duration,
    /// Time of the next attempt at the earliest.
    next: Duration,
}

impl IdleTimer {
    fn new(limit: Duration, now: Duration) -> IdleTimer {
        IdleTimer { limit, quiet_since: now, next: now }
    }

    /// Adds a sample and returns whether to unmount now.
    fn update(&mut self, now: Duration, sample: ActivitySample) -> bool {
        if sample.used || sample.open {
            self.quiet_since = now;
            self.next = now;
        }
        if now.saturating_sub(self.quiet_since) < self.limit || now < self.next {
            return false;
        }
        self.next = now + self.limit.min(RETRY_PERIOD);
        true
    }
}

/// Sends [`MountEvent::Idle`] after `idle` without activity, measured by `clock`, until the ticker
/// is dropped. `command` is a socket that hangs up when `lockbox exec` ends. That command unmounts
/// before it ends, so a hang-up means that it was killed; the idle time is [`KILLED_IDLE`] then.
pub(crate) fn watch_activity(
    idle: Option<Duration>,
    command: Option<OwnedFd>,
    clock: impl Fn() -> Duration + Send + 'static,
    activity: Arc<Activity>,
    events: Sender<MountEvent>,
) -> io::Result<Ticker> {
    let idle = idle.unwrap_or(Duration::MAX);
    let mut timer = IdleTimer::new(idle, clock());
    Ticker::start_each_second("idle", move || {
        let mut reason = "the archive was not used for the time of idle=";
        if command.as_ref().is_some_and(has_hung_up) {
            reason = "the command that mounted it was killed";
            timer.limit = idle.min(KILLED_IDLE);
        }
        let open = activity.is_open();
        if timer.update(clock(), ActivitySample { used: activity.take_idle_flag(), open }) {
            // Without a receiver the mount is at its end.
            let _ = events.send(MountEvent::Idle(reason));
        }
    })
}

fn has_hung_up(socket: &OwnedFd) -> bool {
    let mut events = [PollFd::new(socket.as_fd(), PollFlags::POLLHUP)];
    poll(&mut events, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// Time for unmounting and closing, before the remaining data is saved in parallel.
const CLOSE_TIME: Duration = Duration::from_millis(1500);
/// Time for dropping the kernel's pages: together with saving it must fit into logind's five
/// seconds.
const DROP_TIME: Duration = Duration::from_secs(2);
const RECONNECT_PERIOD: Duration = Duration::from_secs(30);

/// All file systems of a mount: one, or one per version of a replica.
pub(crate) type FileSystems = Arc<dyn Fn() -> Vec<Arc<FileSystem>> + Send + Sync>;

pub(crate) struct SuspendTarget {
    pub(crate) file_systems: FileSystems,
    pub(crate) cache: Arc<KernelCache>,
    pub(crate) mount: Arc<MountHandle>,
    pub(crate) events: Sender<MountEvent>,
}

/// Subscribes to logind, and takes the inhibitor lock that delays the next sleep.
fn subscribe(mount: &MountHandle) -> io::Result<(SleepClient, OwnedFd)> {
    let mut login = mount.watch_sleeps()?;
    let lock = login.delay_sleep()?;
    Ok((login, lock))
}

/// Starts the waiting thread. Errors: a sentence for the user if this machine does not announce its
/// sleeps.
pub(crate) fn lock_on_suspend(target: SuspendTarget) -> Result<(), String> {
    let subscribed = subscribe(&target.mount).map_err(|error| {
        format!(
            "lock-on-suspend has no effect: logind cannot be reached ({error}); the archive stays mounted when the machine sleeps"
        )
    })?;
    // Not joined: it ends with the process, and so does the lock that it holds.
    let started = thread::Builder::new().name("suspend".into()).spawn(move || run(&target, subscribed));
    started.map(drop).map_err(|error| format!("lock-on-suspend has no effect: {error}"))
}

fn run(target: &SuspendTarget, (mut login, mut lock): (SleepClient, OwnedFd)) {
    loop {
        let Err(error) = serve(target, &mut login, Some(lock));
        // The relay ends with the agent, which ends before this process.
        if target.mount.is_dismissed() {
            return;
        }
        tracing::warn!("logind was lost, so the archive stays mounted when the machine sleeps: {error}");
        (login, lock) = loop {
            thread::sleep(RECONNECT_PERIOD);
            if let Ok(again) = subscribe(&target.mount) {
                tracing::warn!("logind is available again");
                break again;
            }
        };
    }
}

/// Locks before each sleep until the connection fails.
fn serve(
    target: &SuspendTarget,
    login: &mut SleepClient,
    mut lock: Option<OwnedFd>,
) -> io::Result<std::convert::Infallible> {
    loop {
        if login.next_sleep_signal()? {
            target.lock();
            drop(lock.take());
        } else if lock.is_none() {
            lock = Some(login.delay_sleep()?);
        }
    }
}

/// Returns whether the archive is closed within `limit`, which closes the channel.
fn closes_within(answered: &Receiver<SuspendReply>, limit: Duration) -> bool {
    match answered.recv_timeout(limit) {
        Err(RecvTimeoutError::Disconnected) => true,
        // No reply: the detached mount lives on, such as in a bind mount or with its last users.
        Ok(SuspendReply::Busy) | Err(RecvTimeoutError::Timeout) => false,
    }
}

impl SuspendTarget {
    /// Returns when the archive is closed, or saved if it is busy.
    fn lock(&self) {
        tracing::info!("the machine is about to sleep");
        let (answer, answered) = mpsc::channel();
        if self.events.send(MountEvent::Sleep(answer)).is_err() || closes_within(&answered, CLOSE_TIME) {
            return;
        }
        tracing::warn!("the archive is in use and stays mounted while the machine sleeps; its content is saved");
        let flushed = self.mount.flush();
        thread::sleep(ARRIVAL);
        let all = (self.file_systems)();
        let commit = || all.iter().try_for_each(|fs| fs.make_durable().map_err(|e| e.to_string()));
        let saved = flushed.map_err(|e| e.to_string()).and(commit());
        let newest = all.iter().map(|fs| fs.newest_inode().0).max().unwrap_or_default();
        if !self.cache.drop_all_pages(newest, Instant::now() + DROP_TIME) {
            tracing::warn!("the kernel did not drop all cached data of the archive in time");
        }
        // Pages written meanwhile, or through maps, arrived when they were dropped.
        let saved = saved.and(commit());
        all.iter().for_each(|fs| fs.forget_plaintext());
        if let Err(error) = saved {
            tracing::error!("cannot save everything before the machine sleeps: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use super::*;

    const USED: ActivitySample = ActivitySample { used: true, open: false };
    const OPEN: ActivitySample = ActivitySample { used: false, open: true };
    const QUIET: ActivitySample = ActivitySample { used: false, open: false };

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn a_mount_is_idle_when_its_time_passed_without_use() {
        let mut timer = IdleTimer::new(seconds(600), seconds(50));
        assert!(!timer.update(seconds(649), QUIET));
        assert!(timer.update(seconds(650), QUIET));
    }

    #[test]
    fn use_and_open_handles_begin_the_time_anew() {
        let mut timer = IdleTimer::new(seconds(600), seconds(0));
        assert!(!timer.update(seconds(599), USED));
        assert!(!timer.update(seconds(1198), QUIET));
        // Open for a week and read only from the kernel's cache.
        for day in 1..=7 {
            assert!(!timer.update(seconds(day * 86_400), OPEN));
        }
        assert!(!timer.update(seconds(7 * 86_400 + 599), QUIET));
        assert!(timer.update(seconds(7 * 86_400 + 600), QUIET));
    }

    #[test]
    fn a_command_is_use_until_it_ends() {
        let activity = Activity::default();
        let command = activity.begin_command();
        assert!(activity.is_open() && !activity.take_idle_flag());
        drop(command);
        assert!(!activity.is_open() && activity.take_idle_flag());
    }

    #[test]
    fn a_night_of_sleep_counts() {
        let mut timer = IdleTimer::new(seconds(600), seconds(0));
        assert!(!timer.update(seconds(5), USED));
        // Between two samples the machine sleeps for eight hours.
        assert!(timer.update(seconds(8 * 3600), QUIET));
        // A request before the first sample after waking up also counts as use.
        let mut timer = IdleTimer::new(seconds(600), seconds(0));
        assert!(!timer.update(seconds(8 * 3600), USED));
    }

    #[test]
    fn after_a_refusal_it_is_tried_again_and_use_puts_that_off() {
        let mut timer = IdleTimer::new(seconds(600), seconds(0));
        assert!(timer.update(seconds(600), QUIET));
        assert!(!timer.update(seconds(601), QUIET));
        assert!(timer.update(seconds(660), QUIET));
        assert!(!timer.update(seconds(700), USED));
        assert!(!timer.update(seconds(720), QUIET));
        assert!(timer.update(seconds(1300), QUIET));
        let mut short = IdleTimer::new(seconds(2), seconds(0));
        assert!(short.update(seconds(2), QUIET) && !short.update(seconds(3), QUIET) && short.update(seconds(4), QUIET));
    }

    #[test]
    fn the_clock_runs_while_the_machine_sleeps() {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        // /proc/uptime includes suspended time too; a container may shift both alike.
        assert!((time_since_boot().as_secs_f64() - uptime).abs() < 60.0);
    }

    #[test]
    fn the_monitor_reports_an_idle_mount_by_the_given_clock() {
        let (events, inbox) = mpsc::channel();
        let now = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let clock = {
            let now = Arc::clone(&now);
            move || Duration::from_secs(now.fetch_add(300, std::sync::atomic::Ordering::SeqCst))
        };
        let watcher = watch_activity(Some(seconds(600)), None, clock, Arc::default(), events).unwrap();
        assert!(matches!(inbox.recv_timeout(seconds(60)), Ok(MountEvent::Idle(_))));
        drop(watcher);
    }

    #[test]
    fn a_mount_ends_when_its_command_was_killed() {
        let (events, inbox) = mpsc::channel();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut command = Command::new("sleep").arg("600").stdin(OwnedFd::from(theirs)).spawn().unwrap();
        let socket = OwnedFd::from(ours);
        assert!(!has_hung_up(&socket));
        command.kill().unwrap();
        command.wait().unwrap();
        let now = std::sync::atomic::AtomicU64::new(0);
        let clock = move || Duration::from_secs(now.fetch_add(4, std::sync::atomic::Ordering::SeqCst));
        let _watcher = watch_activity(None, Some(socket), clock, Arc::default(), events).unwrap();
        for _ in 0..2 {
            let event = inbox.recv_timeout(seconds(60));
            assert!(matches!(event, Ok(MountEvent::Idle("the command that mounted it was killed"))));
        }
    }

    #[test]
    fn sleep_waits_neither_for_a_busy_session_nor_for_one_that_does_not_end() {
        let (answer, answered) = mpsc::channel();
        assert!(!closes_within(&answered, Duration::from_millis(1)), "it does not end");
        answer.send(SuspendReply::Busy).unwrap();
        assert!(!closes_within(&answered, Duration::from_secs(60)), "it is busy");
        drop(answer);
        assert!(closes_within(&answered, Duration::from_secs(60)), "it ended");
    }
}
