//! Polls a remote archive for new versions and serves them.
//!
//! A mount in use polls every `follow=`; an idle one every minute, which is less than the day for
//! which a version can be read (BUCKET-4 of lockbox-remote). A version that cannot be opened is not
//! served: the mount stays at its version, logs that once, and tries again.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lockbox::Result;
use lockbox::archive::{Archive, OpenOptions};
use lockbox::keys::{RollbackOptions, UnlockedKey};
use lockbox_host::remote::{ArchiveLocation, VersionFollower};
use parking_lot::Mutex;

use crate::adapter::{Activity, CurrentVersion};
use crate::auto_unmount::time_since_boot;
use crate::shutdown::ArchiveSlot;

/// Polling interval of an idle mount.
const IDLE_PERIOD: Duration = Duration::from_secs(60);
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Archive to poll, and how to open it.
pub(crate) struct ReplicaConfig {
    pub(crate) fetcher: VersionFollower,
    pub(crate) every: Duration,
    pub(crate) key: UnlockedKey,
    pub(crate) options: OpenOptions,
    pub(crate) seen: RollbackOptions,
}

/// Polling schedule; independent of a clock.
struct PollTimer {
    every: Duration,
    next: Duration,
    next_idle: Duration,
}

impl PollTimer {
    fn new(every: Duration, now: Duration) -> PollTimer {
        PollTimer { every, next: now + every, next_idle: now + IDLE_PERIOD }
    }

    fn is_due(&self, now: Duration, used: bool) -> bool {
        now >= self.next_idle || (used && now >= self.next)
    }

    fn record_poll(&mut self, now: Duration, failed: bool) {
        self.next_idle = now + IDLE_PERIOD.max(self.every);
        self.next = now + if failed { self.every.max(RETRY_DELAY) } else { self.every };
    }
}

/// Why new versions cannot be served; None while they can.
pub(crate) type ReplicaFailure = Arc<Mutex<Option<String>>>;

/// Starts the thread, which ends with the process or the mount.
pub(crate) fn start(
    config: ReplicaConfig,
    current: Arc<CurrentVersion>,
    slot: ArchiveSlot,
    activity: Arc<Activity>,
    failure_slot: ReplicaFailure,
) -> std::io::Result<()> {
    let run = move || run(config, &current, &slot, &activity, &failure_slot);
    thread::Builder::new().name("follow".into()).spawn(run).map(drop)
}

fn run(
    mut config: ReplicaConfig,
    current: &CurrentVersion,
    slot: &ArchiveSlot,
    activity: &Activity,
    failure_slot: &Mutex<Option<String>>,
) {
    let ReplicaConfig { fetcher, every, key, options, seen } = &mut config;
    let mut timer = PollTimer::new(*every, time_since_boot());
    // A request since the last poll counts for the next one.
    let mut used = false;
    loop {
        let is_requested = current.idle.wait_for_request((*every).min(Duration::from_secs(1)));
        used |= activity.take_replica_flag() || activity.open_files() > 0;
        if !is_requested && !timer.is_due(time_since_boot(), used) {
            continue;
        }
        let was_idle = !used && !is_requested;
        used = false;
        let result = fetcher(&mut |place| publish_version(place, key, (options, seen), current, slot));
        match was_idle {
            true => current.idle.close(),
            false if is_requested => current.idle.open(),
            false => {}
        }
        if slot.lock().is_none() {
            return;
        }
        timer.record_poll(time_since_boot(), result.is_err());
        let failure = result.err().map(|error| error.to_string());
        let mut failure_slot = failure_slot.lock();
        match (&*failure_slot, &failure) {
            (Some(_), None) => tracing::warn!("the archive is followed again"),
            (before, Some(why)) if before.as_ref() != Some(why) => {
                tracing::warn!("cannot show newer changes of the archive, so the mount keeps its earlier state: {why}");
            }
            _ => {}
        }
        *failure_slot = failure;
    }
}

fn publish_version(
    place: &ArchiveLocation,
    key: &UnlockedKey,
    (options, seen): (&OpenOptions, &RollbackOptions),
    current: &CurrentVersion,
    slot: &ArchiveSlot,
) -> Result<()> {
    // Reused, because the sandbox denies access to the rollback state.
    let witness = slot.lock().as_ref().map(|current| Arc::clone(current.witness()));
    let Some(witness) = witness else { return Ok(()) };
    let archive = Archive::open_again(place.source(), key, options, seen, &witness)?;
    let fs = Arc::clone(archive.file_system());
    // For `status`, which queries no other process.
    if let Err(error) = fs.look_at_snapshots() {
        tracing::debug!("the snapshots cannot be counted: {error}");
    }
    let before = {
        let mut slot = slot.lock();
        // Otherwise the mount has ended.
        slot.as_mut().map(|current| std::mem::replace(current, archive))
    };
    if before.is_some() {
        current.publish(fs);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_in_use_polls_often_and_an_idle_one_still_polls() {
        let second = Duration::from_secs(1);
        let mut timer = PollTimer::new(second, Duration::ZERO);
        assert!(!timer.is_due(Duration::from_millis(999), true));
        assert!(timer.is_due(second, true) && !timer.is_due(second, false));
        timer.record_poll(second * 2, false);
        assert!(timer.is_due(second * 3, true) && !timer.is_due(second * 61, false));
        assert!(timer.is_due(second * 62, false));
        // An unreachable server is given time.
        timer.record_poll(second * 100, true);
        assert!(!timer.is_due(second * 109, true) && timer.is_due(second * 110, true));
        // The idle period is never shorter than the requested interval.
        let mut hourly = PollTimer::new(second * 3600, Duration::ZERO);
        hourly.record_poll(second, false);
        assert!(!hourly.is_due(second * 3600, true) && hourly.is_due(second * 3601, false));
    }
}
