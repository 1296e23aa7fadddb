//! Looks for what is new in an archive that is written elsewhere, and has it shown.
//!
//! While the mount is used, every `follow=`; while it is not, every minute, which is less than the day for which a moment can be read (BUCKET-4 of lockbox-remote). What cannot be
//! opened is not shown: the mount stays at its moment, says so in the log once, and tries again.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lockbox::Result;
use lockbox::archive::{Archive, OpenOptions};
use lockbox::keys::{SeenOptions, UnlockedKey};
use lockbox_host::remote::{ArchiveLocation, VersionFollower};
use parking_lot::Mutex;

use crate::adapter::{Activity, Shown};
use crate::ending::Slot;
use crate::idle::since_boot;

/// From one look to the next while nobody uses the mount.
const SELDOM: Duration = Duration::from_secs(60);
/// After one that failed.
const AGAIN: Duration = Duration::from_secs(10);

/// What is opened, and how.
pub(crate) struct Follow {
    pub(crate) following: VersionFollower,
    pub(crate) every: Duration,
    pub(crate) key: UnlockedKey,
    pub(crate) options: OpenOptions,
    pub(crate) seen: SeenOptions,
}

/// When to look; knows no clock.
struct Looks {
    every: Duration,
    next: Duration,
    seldom: Duration,
}

impl Looks {
    fn new(every: Duration, now: Duration) -> Looks {
        Looks { every, next: now + every, seldom: now + SELDOM }
    }

    fn are_due(&self, now: Duration, used: bool) -> bool {
        now >= self.seldom || (used && now >= self.next)
    }

    fn looked(&mut self, now: Duration, failed: bool) {
        self.seldom = now + SELDOM.max(self.every);
        self.next = now + if failed { self.every.max(AGAIN) } else { self.every };
    }
}

/// Why what is new cannot be shown; None while it can.
pub(crate) type Failing = Arc<Mutex<Option<String>>>;

/// Starts the thread, which ends with the process or the mount.
pub(crate) fn start(
    follow: Follow,
    shown: Arc<Shown>,
    slot: Slot,
    activity: Arc<Activity>,
    failing: Failing,
) -> std::io::Result<()> {
    let run = move || run(follow, &shown, &slot, &activity, &failing);
    thread::Builder::new().name("follow".into()).spawn(run).map(drop)
}

fn run(mut follow: Follow, shown: &Shown, slot: &Slot, activity: &Activity, failing: &Mutex<Option<String>>) {
    let Follow { following, every, key, options, seen } = &mut follow;
    let mut looks = Looks::new(*every, since_boot());
    // A use that came in between counts for the next look.
    let mut used = false;
    loop {
        thread::sleep((*every).min(Duration::from_secs(1)));
        used |= activity.take_followed() || activity.open_files() > 0;
        if !looks.are_due(since_boot(), used) {
            continue;
        }
        used = false;
        let looked = following(&mut |place| show(place, key, (options, seen), shown, slot));
        if slot.lock().is_none() {
            return;
        }
        looks.looked(since_boot(), looked.is_err());
        let failure = looked.err().map(|error| error.to_string());
        let mut failing = failing.lock();
        match (&*failing, &failure) {
            (Some(_), None) => tracing::warn!("the archive is followed again"),
            (before, Some(why)) if before.as_ref() != Some(why) => {
                tracing::warn!("what is new in the archive cannot be shown, so it stays as it was: {why}");
            }
            _ => {}
        }
        *failing = failure;
    }
}

fn show(
    place: &ArchiveLocation,
    key: &UnlockedKey,
    (options, seen): (&OpenOptions, &SeenOptions),
    shown: &Shown,
    slot: &Slot,
) -> Result<()> {
    // What it remembers of the archive is out of the sandbox's reach by now.
    let witness = slot.lock().as_ref().map(|current| Arc::clone(current.witness()));
    let Some(witness) = witness else { return Ok(()) };
    let archive = Archive::open_again(place.site(), key, options, seen, &witness)?;
    let fs = Arc::clone(archive.file_system());
    // For the status, which asks nobody.
    if let Err(error) = fs.look_at_snapshots() {
        tracing::debug!("the snapshots cannot be counted: {error}");
    }
    let before = {
        let mut slot = slot.lock();
        // Else the mount has ended.
        slot.as_mut().map(|current| std::mem::replace(current, archive))
    };
    if before.is_some() {
        shown.go_on(fs);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_used_looks_often_and_nobody_looks_never() {
        let second = Duration::from_secs(1);
        let mut looks = Looks::new(second, Duration::ZERO);
        assert!(!looks.are_due(Duration::from_millis(999), true));
        assert!(looks.are_due(second, true) && !looks.are_due(second, false));
        looks.looked(second * 2, false);
        assert!(looks.are_due(second * 3, true) && !looks.are_due(second * 61, false));
        assert!(looks.are_due(second * 62, false));
        // A server that is away is given time.
        looks.looked(second * 100, true);
        assert!(!looks.are_due(second * 109, true) && looks.are_due(second * 110, true));
        // Seldom is not more often than it was asked for.
        let mut hourly = Looks::new(second * 3600, Duration::ZERO);
        hourly.looked(second, false);
        assert!(!hourly.are_due(second * 3600, true) && hourly.are_due(second * 3601, false));
    }
}
