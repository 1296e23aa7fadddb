//! Snapshots of an archive, by their names and ids.

use std::sync::Arc;

use lockbox_terminal::display;

use super::retention::{Keep, KeepRule};
use super::{Archive, OpenOptions};
use crate::error::{Error, Refusal, Result};
use crate::format::Timestamp;
use crate::format::values::SnapshotValue;
use crate::fs::FileSystem;
use crate::keys::{SeenOptions, UnlockedKey};
use crate::storage::Site;
use crate::txn::Pinned;

/// A moment that the archive keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Rises from one to the next, and is never given again.
    pub id: u64,
    pub name: Vec<u8>,
    pub time: Timestamp,
    pub inodes: u64,
    /// Bytes that nothing else shows: what removing this one alone gives back. None where nobody asked, since it takes time.
    pub held_bytes: Option<u64>,
}

impl Snapshot {
    fn of((id, value): (u64, SnapshotValue)) -> Snapshot {
        let SnapshotValue { name, time, inodes, .. } = value;
        Snapshot { id, name, time, inodes, held_bytes: None }
    }
}

impl Archive {
    /// As [`Archive::open_seen`], for reading what the snapshot of this name shows.
    ///
    /// # Errors
    /// `Refused` when there is none, `Invalid` unless the archive is opened for reading.
    pub fn open_snapshot<'a>(
        site: impl Into<Site<'a>>,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen: &SeenOptions,
        name: &[u8],
    ) -> Result<Archive> {
        if !options.read_only {
            return Err(Error::invalid("a snapshot can only be read"));
        }
        Archive::open_at(site.into(), key, options, seen, None, Some(name)).map_err(|error| named(error, name))
    }

    /// The moments that the archive keeps, for whoever works on them beside other users of the archive.
    pub fn moments(&self) -> Moments {
        Moments { fs: Arc::clone(&self.fs) }
    }

    /// Those that the archive has, the oldest first, with what they hold.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let all = self.fs.snapshots()?.into_iter();
        Ok(all.map(|(id, value, held)| Snapshot { held_bytes: Some(held), ..Snapshot::of((id, value)) }).collect())
    }

    /// What the snapshot of this name shows, beside the live tree: for reading, and only as long as nobody removes the snapshot.
    ///
    /// # Errors
    /// `Refused` when there is none.
    pub fn moment(&self, name: &[u8]) -> Result<Arc<FileSystem>> {
        self.moments().moment(name)
    }

    /// As [`Moments::create`].
    ///
    /// # Errors
    /// Those of that.
    pub fn take_snapshot(&self, name: &[u8]) -> Result<()> {
        self.moments().create(name)
    }

    /// Removes the snapshots of these names, all or, unless a crash or a full host comes between several steps of 128, none; then frees in steps what only they showed; `go_on` is asked before each one. When that ends it, the
    /// snapshots are gone, and a later session or purge frees the rest.
    ///
    /// # Errors
    /// `Refused` when there is none of a name.
    pub fn remove_snapshots(&self, names: &[Vec<u8>], go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.moments().remove(&mut |all| {
            let mut ids = Vec::new();
            for name in names {
                let same = all.iter().filter(|snapshot| snapshot.name == *name);
                let before = ids.len();
                ids.extend(same.map(|snapshot| snapshot.id));
                if ids.len() == before {
                    return Err(named(Error::NotFound, name));
                }
            }
            Ok(ids)
        })?;
        self.finish_removals(go_on)
    }

    /// Frees in steps what removed snapshots alone showed; `go_on` is asked before each one.
    ///
    /// # Errors
    /// That of `go_on`: a later session or purge frees the rest.
    pub fn finish_removals(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.fs.finish_removals(go_on)
    }
}

/// The moments of an archive that is open, also while it is mounted: nothing here keeps the archive from being closed, which ends what is under way.
#[derive(Clone)]
pub struct Moments {
    fs: Arc<FileSystem>,
}

/// What there is at one moment, while others go on changing the archive.
pub struct Now {
    fs: Arc<FileSystem>,
    _pinned: Option<Pinned>,
}

impl Now {
    pub fn file_system(&self) -> &Arc<FileSystem> {
        &self.fs
    }
}

impl Moments {
    #[cfg(test)]
    pub(super) fn of(fs: Arc<FileSystem>) -> Moments {
        Moments { fs }
    }

    /// What is there now, made durable for that. As long as the answer lives, nothing that it or a snapshot of this time shows is used again, nor
    /// erased: where the archive may be closed meanwhile, the caller holds [`FileSystem::work`] for longer.
    ///
    /// # Errors
    /// Those of a commit.
    pub fn now(&self) -> Result<Now> {
        // What is only read does not change.
        if self.fs.volume.read_only() {
            return Ok(Now { fs: Arc::clone(&self.fs), _pinned: None });
        }
        let pinned = self.fs.pin_at_work()?;
        Ok(Now { fs: self.fs.pinned_moment(&pinned)?, _pinned: Some(pinned) })
    }

    /// As [`Archive::moment`].
    ///
    /// # Errors
    /// As there.
    pub fn moment(&self, name: &[u8]) -> Result<Arc<FileSystem>> {
        self.fs.moment(name).map_err(|error| named(error, name))
    }

    /// Keeps what is there before a restore replaces it, under a name that says so and is free; answers the name.
    ///
    /// # Errors
    /// As [`Moments::create`].
    pub fn create_before_restore(&self, now: Timestamp) -> Result<Vec<u8>> {
        let name = format!("before-restore-{}", name_of_time(now));
        for number in 1u64.. {
            let name = if number == 1 { name.clone() } else { format!("{name}-{number}") }.into_bytes();
            match self.create(&name) {
                // Another restore within the same second.
                Err(Error::Refused(Refusal::SnapshotExists { .. })) => {}
                created => return created.map(|()| name),
            }
        }
        Err(Error::Exists)
    }

    /// Keeps what is there now under a name; durable when it returns. It takes no space before something changes.
    ///
    /// # Errors
    /// `Refused` when another one has the name, or it is one that only [`Moments::create_scheduled`] gives; `Invalid` for what is no name and when the archive
    /// is being closed, `ReadOnly`, `NoSpace`, `Latched`.
    pub fn create(&self, name: &[u8]) -> Result<()> {
        if time_of_scheduled(name).is_some() {
            return Err(Error::Refused(Refusal::NameOfSchedule { name: display(name) }));
        }
        self.create_any(name)
    }

    /// Keeps what is there at `now` under the name that says so to [`time_of_scheduled`].
    ///
    /// # Errors
    /// As [`Moments::create`].
    pub fn create_scheduled(&self, now: Timestamp) -> Result<()> {
        self.create_any(&name_of_scheduled(now))
    }

    fn create_any(&self, name: &[u8]) -> Result<()> {
        self.fs.take_snapshot(name).map_err(|error| named(error, name))
    }

    /// Those that there are, the oldest first, without what they hold.
    pub fn list(&self) -> Result<Vec<Snapshot>> {
        Ok(self.fs.volume.readable_snapshots()?.into_iter().map(Snapshot::of).collect())
    }

    /// Bytes that nothing but snapshots of this set shows, be it several of them: what removing all of them gives back. An id that there is not adds nothing.
    pub fn held_bytes(&self, is_in: &dyn Fn(u64) -> bool) -> Result<u64> {
        self.fs.volume.held_by_snapshots(is_in)
    }

    /// Removes those that `choose` names of what there is, by their ids; durable when it returns, and what only they showed is freed in the background.
    /// Nobody takes or removes a snapshot between the choice and the removal. An id that there is not is passed over.
    ///
    /// # Errors
    /// That of `choose`, with nothing removed; `ReadOnly`, `NoSpace`, `Latched`, `Invalid` when the archive is being closed.
    pub fn remove(&self, choose: &mut dyn FnMut(&[Snapshot]) -> Result<Vec<u64>>) -> Result<()> {
        self.fs.remove_chosen_snapshots(&mut |all| {
            let all: Vec<Snapshot> = all.iter().cloned().map(Snapshot::of).collect();
            let mut ids = choose(&all)?;
            ids.sort_unstable();
            ids.dedup();
            Ok(ids)
        })
    }

    /// Removes what `keep` does not keep of those that [`Moments::create_scheduled`] made, and answers how many there were. All others are left out of account.
    ///
    /// # Errors
    /// As [`Moments::remove`].
    pub fn prune_scheduled(&self, keep: &Keep) -> Result<usize> {
        let mut removed = 0;
        self.remove(&mut |all| {
            let scheduled = all.iter().filter_map(|one| Some((one.id, time_of_scheduled(&one.name)?)));
            let (ids, times): (Vec<u64>, Vec<Timestamp>) = scheduled.unzip();
            let kept = keep.kept_by(&times);
            let gone: Vec<u64> =
                ids.into_iter().zip(kept).filter(|(_, rules)| rules.is_empty()).map(|(id, _)| id).collect();
            removed = gone.len();
            Ok(gone)
        })?;
        Ok(removed)
    }

    /// Whether [`Moments::create_scheduled`] made one in the period of `rule` that `now` lies in.
    pub fn has_scheduled(&self, rule: KeepRule, now: Timestamp) -> Result<bool> {
        let period = rule.period_of(now);
        let all = self.list()?;
        Ok(all.iter().filter_map(|one| time_of_scheduled(&one.name)).any(|time| rule.period_of(time) == period))
    }

    /// Whether something was changed since the newest one was taken; true without one. What was accepted is made durable for that.
    ///
    /// # Errors
    /// `Latched`, `NoSpace`, `Damaged`; `Invalid` when the archive is being closed.
    pub fn has_changed_since(&self) -> Result<bool> {
        self.fs.differs_from_newest_snapshot()
    }
}

/// What the names begin with that a mount gives by its schedule.
const SCHEDULED: &str = "auto-";

/// `2026-11-23T05-42-03Z`: as a file may be called everywhere.
pub fn name_of_time(time: Timestamp) -> String {
    format!("{}Z", time.utc().replace(' ', "T").replace(':', "-"))
}

fn name_of_scheduled(time: Timestamp) -> Vec<u8> {
    format!("{SCHEDULED}{}", name_of_time(time)).into_bytes()
}

/// The time in the name of a snapshot that a mount took by its schedule; None for all others.
pub fn time_of_scheduled(name: &[u8]) -> Option<Timestamp> {
    let text = std::str::from_utf8(name).ok()?.strip_prefix(SCHEDULED)?;
    let (day, time) = text.strip_suffix('Z')?.split_once('T')?;
    let mut numbers = day.splitn(3, '-').chain(time.splitn(3, '-')).map(|part| part.parse::<i64>().ok());
    let mut next = || numbers.next().flatten();
    let (year, month, day, hour, minute, second) = (next()?, next()?, next()?, next()?, next()?, next()?);
    let sound = (0..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !sound || [(hour, 23), (minute, 59), (second, 59)].iter().any(|(number, most)| !(0..=*most).contains(number)) {
        return None;
    }
    let first = KeepRule::Monthly.beginning_of(12 * year + month - 1).seconds;
    let time = Timestamp { seconds: first + ((day - 1) * 24 + hour) * 3600 + minute * 60 + second, nanos: 0 };
    // Only one way of writing a time is that of a mount: days of no month, signs and missing zeros are not.
    (name_of_scheduled(time) == name).then_some(time)
}

/// The error with the snapshot's name where it is about that.
fn named(error: Error, name: &[u8]) -> Error {
    match error {
        Error::NotFound => Error::Refused(Refusal::NoSnapshot { name: display(name) }),
        Error::Exists => Error::Refused(Refusal::SnapshotExists { name: display(name) }),
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_by_default_is_a_time_without_colons() {
        assert_eq!(name_of_time(Timestamp { seconds: 1, nanos: 5 }), "1970-01-01T00-00-01Z");
    }

    #[test]
    fn only_names_that_a_mount_gives_are_taken_for_those() {
        for seconds in [0, 1, 951_782_399, 951_782_400, 1_795_412_523, 4_107_542_400, 253_402_300_799] {
            let time = Timestamp { seconds, nanos: 0 };
            assert_eq!(time_of_scheduled(&name_of_scheduled(time)), Some(time));
        }
        for name in [
            "auto",
            "auto-",
            "auto-monday",
            "2026-11-23T05-42-03Z",
            "auto-2026-11-23T05-42-03",
            "auto-2026-11-23T05:42:03Z",
            "auto-2026-11-23T05-42-3Z",
            "auto-2026-11-23T05-42-03Z ",
            "auto-2026-11-23T05-42-03-04Z",
            "auto-2026-11-31T05-42-03Z",
            "auto-2026-13-01T05-42-03Z",
            "auto-2026-11-23T25-42-03Z",
            "auto-2026-11-23T05-60-03Z",
            "auto-+026-11-23T05-42-03Z",
            "auto-99999999999999999-11-23T05-42-03Z",
            "auto-2026-11-9223372036854775807T05-42-03Z",
            "Auto-2026-11-23T05-42-03Z",
        ] {
            assert_eq!(time_of_scheduled(name.as_bytes()), None, "{name}");
        }
    }
}
