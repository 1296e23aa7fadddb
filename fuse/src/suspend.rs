//! Locks the archive before the machine sleeps: unmounts it, or saves everything and drops
//! plaintext if it is busy.
//!
//! A busy mount keeps its key, because its users could not continue without it. In the seconds that
//! logind grants it drops the daemon's caches and the kernel's cached pages. Pages that programs
//! lock or map writable may stay.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use lockbox::fs::FileSystem;

use crate::kernel_cache::KernelCache;
use crate::logind::{self, LogindClient};
use crate::shutdown::{ARRIVAL, MountEvent, MountHandle, SuspendReply};

/// Time for unmounting and closing, before the remaining data is saved in parallel.
const CLOSE_TIME: Duration = Duration::from_millis(1500);
/// Time for dropping the kernel's pages: together with saving it must fit into logind's five
/// seconds.
const DROP_TIME: Duration = Duration::from_secs(2);
/// Interval between attempts to reconnect to the bus.
const RECONNECT_PERIOD: Duration = Duration::from_secs(30);

/// All file systems of a mount: one, or one per version of a replica.
pub(crate) type FileSystems = Arc<dyn Fn() -> Vec<Arc<FileSystem>> + Send + Sync>;

/// Mount to lock.
pub(crate) struct SuspendTarget {
    pub(crate) file_systems: FileSystems,
    pub(crate) cache: Arc<KernelCache>,
    pub(crate) mount: Arc<MountHandle>,
    pub(crate) events: Sender<MountEvent>,
}

/// Subscription to logind, with the inhibitor lock that delays the next sleep.
pub(crate) struct SleepSubscription {
    login: LogindClient,
    lock: OwnedFd,
}

/// Subscribes via D-Bus, before the mount can shadow the socket.
pub(crate) fn connect() -> io::Result<SleepSubscription> {
    logind::connect().and_then(subscribe)
}

fn subscribe(stream: UnixStream) -> io::Result<SleepSubscription> {
    let mut login = LogindClient::subscribe(stream)?;
    Ok(SleepSubscription { lock: login.delay_sleep()?, login })
}

/// Starts the waiting thread. Returns a sentence for the user if this machine does not announce its
/// sleeps.
pub(crate) fn start(target: SuspendTarget, subscribed: io::Result<SleepSubscription>) -> Option<String> {
    let subscribed = match subscribed {
        Ok(subscribed) => subscribed,
        Err(error) => {
            return Some(format!(
                "lock-on-suspend has no effect: logind cannot be reached ({error}); the archive stays mounted when the machine sleeps"
            ));
        }
    };
    // Not joined: it ends with the process, and so does the lock that it holds.
    let started = thread::Builder::new().name("suspend".into()).spawn(move || run(&target, subscribed));
    started.err().map(|error| format!("lock-on-suspend has no effect: {error}"))
}

fn run(target: &SuspendTarget, mut subscribed: SleepSubscription) {
    loop {
        let SleepSubscription { mut login, lock } = subscribed;
        let Err(error) = serve(target, &mut login, Some(lock));
        tracing::warn!("logind was lost, so the archive stays mounted when the machine sleeps: {error}");
        subscribed = loop {
            thread::sleep(RECONNECT_PERIOD);
            if let Ok(again) = target.mount.connect_bus().and_then(subscribe) {
                tracing::warn!("logind is there again");
                break again;
            }
        };
    }
}

/// Locks before each sleep until the connection fails.
fn serve(
    target: &SuspendTarget,
    login: &mut LogindClient,
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
            tracing::warn!("not all that the kernel had cached of the archive was dropped in time");
        }
        // Pages written meanwhile, or through maps, arrived when they were dropped.
        let saved = saved.and(if all.iter().any(|fs| fs.is_dirty()) { commit() } else { Ok(()) });
        all.iter().for_each(|fs| fs.forget_plaintext());
        if let Err(error) = saved {
            tracing::error!("not everything was saved before the machine slept: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
