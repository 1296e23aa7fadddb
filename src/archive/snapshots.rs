//! Snapshots of an archive, by name and id.

use std::sync::Arc;

use lockbox_terminal::display;

use super::retention::{RetentionPolicy, RetentionRule};
use super::{Archive, OpenOptions};
use crate::error::{Error, Refusal, Result};
use crate::format::Timestamp;
use crate::format::values::SnapshotValue;
use crate::fs::FileSystem;
use crate::keys::{SeenOptions, UnlockedKey};
use crate::storage::ArchiveSource;
use crate::txn::Pinned;

/// Snapshot of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Monotonically increasing; never reused.
    pub id: u64,
    pub name: Vec<u8>,
    pub time: Timestamp,
    pub inodes: u64,
    /// Bytes reachable from no other version: removing only this snapshot frees them. `None` if not
    /// computed, since it takes time.
    pub held_bytes: Option<u64>,
}

impl Snapshot {
    fn of((id, value): (u64, SnapshotValue)) -> Snapshot {
        let SnapshotValue { name, time, inodes, .. } = value;
        Snapshot { id, name, time, inodes, held_bytes: None }
    }
}

impl Archive {
    /// Opens the snapshot of this name for reading, like [`Archive::open_seen`].
    ///
    /// # Errors
    /// `Refused` when it does not exist, `Invalid` unless the archive is opened for reading.
    pub fn open_snapshot<'a>(
        site: impl Into<ArchiveSource<'a>>,
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

    /// Returns a manager of the archive's snapshots, for use concurrently with other users of the
    /// archive.
    pub fn snapshot_manager(&self) -> SnapshotManager {
        SnapshotManager { fs: Arc::clone(&self.fs) }
    }

    /// Returns all snapshots, oldest first, with the bytes that each one holds.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let all = self.fs.snapshots()?.into_iter();
        Ok(all.map(|(id, value, held)| Snapshot { held_bytes: Some(held), ..Snapshot::of((id, value)) }).collect())
    }

    /// Returns a read-only file system of the snapshot of this name, concurrently with the live
    /// tree. It is valid until the snapshot is removed.
    ///
    /// # Errors
    /// `Refused` when it does not exist.
    pub fn snapshot_view(&self, name: &[u8]) -> Result<Arc<FileSystem>> {
        self.snapshot_manager().snapshot_view(name)
    }

    /// Creates a snapshot, see [`SnapshotManager::create`].
    ///
    /// # Errors
    /// As there.
    pub fn take_snapshot(&self, name: &[u8]) -> Result<()> {
        self.snapshot_manager().create(name)
    }

    /// Removes the snapshots of these names, then frees their exclusive data in steps; `go_on` is
    /// called before each step. Its error ends the freeing: the snapshots are removed, and a later
    /// session or purge frees the rest.
    ///
    /// The removal is atomic, unless it needs several steps of 128 and a crash or a full host
    /// interrupts it.
    ///
    /// # Errors
    /// `Refused` when a name does not exist.
    pub fn remove_snapshots(&self, names: &[Vec<u8>], go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.snapshot_manager().remove(&mut |all| {
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

    /// Frees the exclusive data of removed snapshots in steps; `go_on` is called before each one.
    ///
    /// # Errors
    /// That of `go_on`: a later session or purge frees the rest.
    pub fn finish_removals(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.fs.finish_removals(go_on)
    }
}

/// Manages the snapshots of an open archive, also while it is mounted. It does not prevent the
/// archive from being closed, which aborts operations in progress.
#[derive(Clone)]
pub struct SnapshotManager {
    fs: Arc<FileSystem>,
}

/// Pinned current state, while other users continue to change the archive.
pub struct PinnedState {
    fs: Arc<FileSystem>,
    _pinned: Option<Pinned>,
}

impl PinnedState {
    pub fn file_system(&self) -> &Arc<FileSystem> {
        &self.fs
    }
}

impl SnapshotManager {
    #[cfg(test)]
    pub(super) fn of(fs: Arc<FileSystem>) -> SnapshotManager {
        SnapshotManager { fs }
    }

    /// Commits and pins the current state. While the result exists, no data of that state or of a
    /// snapshot existing now is reused or erased. If the archive may be closed meanwhile, the
    /// caller must hold [`FileSystem::work`] for longer.
    ///
    /// # Errors
    /// Errors of a commit.
    pub fn pin_current(&self) -> Result<PinnedState> {
        // A read-only archive does not change.
        if self.fs.volume.read_only() {
            return Ok(PinnedState { fs: Arc::clone(&self.fs), _pinned: None });
        }
        let pinned = self.fs.pin_held_open()?;
        Ok(PinnedState { fs: self.fs.open_pinned(&pinned)?, _pinned: Some(pinned) })
    }

    /// Returns a read-only file system of a snapshot, see [`Archive::snapshot_view`].
    ///
    /// # Errors
    /// As there.
    pub fn snapshot_view(&self, name: &[u8]) -> Result<Arc<FileSystem>> {
        self.fs.open_snapshot(name).map_err(|error| named(error, name))
    }

    /// Creates a snapshot before a restore, under an unused name that says so; returns the name.
    /// Removes older ones of this kind beyond the newest [`RESTORES_KEPT`], but for the one that is
    /// `restored` now.
    ///
    /// # Errors
    /// As [`SnapshotManager::create`] and [`SnapshotManager::remove`].
    pub fn create_before_restore(&self, restored: &[u8], now: Timestamp) -> Result<Vec<u8>> {
        let name = format!("{BEFORE_RESTORE}{}", name_of_time(now));
        for number in 1u64.. {
            let name = if number == 1 { name.clone() } else { format!("{name}-{number}") }.into_bytes();
            match self.create(&name) {
                // Another restore within the same second.
                Err(Error::Refused(Refusal::SnapshotExists { .. })) => {}
                created => return created.and_then(|()| self.prune_before_restores(restored)).map(|()| name),
            }
        }
        Err(Error::Exists)
    }

    fn prune_before_restores(&self, restored: &[u8]) -> Result<()> {
        let mut choose = |all: &[Snapshot]| {
            let made = all.iter().rev().filter(|one| is_before_restore(&one.name)).skip(RESTORES_KEPT);
            Ok(made.filter(|one| one.name != restored).map(|one| one.id).collect())
        };
        // Usually there is nothing to remove, and a removal is a commit.
        let gone: Vec<u64> = choose(&self.list()?)?;
        if gone.is_empty() { Ok(()) } else { self.remove(&mut choose) }
    }

    /// Creates a snapshot of the current state; durable on return. It uses no space until something
    /// changes.
    ///
    /// # Errors
    /// `Refused` when the name exists or is reserved for [`SnapshotManager::create_scheduled`];
    /// `Invalid` for an invalid name and when the archive is being closed; `ReadOnly`, `NoSpace`,
    /// `WriteFailed`.
    pub fn create(&self, name: &[u8]) -> Result<()> {
        if time_of_scheduled(name).is_some() {
            return Err(Error::Refused(Refusal::NameOfSchedule { name: display(name) }));
        }
        self.create_any(name)
    }

    /// Creates a snapshot named after the time `now` for [`time_of_scheduled`].
    ///
    /// # Errors
    /// As [`SnapshotManager::create`].
    pub fn create_scheduled(&self, now: Timestamp) -> Result<()> {
        self.create_any(&name_of_scheduled(now))
    }

    fn create_any(&self, name: &[u8]) -> Result<()> {
        self.fs.take_snapshot(name).map_err(|error| named(error, name))
    }

    /// Returns all snapshots, oldest first, without the bytes that they hold.
    pub fn list(&self) -> Result<Vec<Snapshot>> {
        Ok(self.fs.volume.readable_snapshots()?.into_iter().map(Snapshot::of).collect())
    }

    /// Returns the bytes reachable only from snapshots of this set: removing all of them frees so
    /// many. Unknown ids are ignored.
    pub fn held_bytes(&self, is_in: &dyn Fn(u64) -> bool) -> Result<u64> {
        self.fs.volume.held_by_snapshots(is_in)
    }

    /// Removes the snapshots with the ids that `choose` returns for the given list; durable on
    /// return, and their exclusive data is freed in the background. Choice and removal are atomic
    /// with respect to other creations and removals. Unknown ids are ignored.
    ///
    /// # Errors
    /// That of `choose`, with nothing removed; `ReadOnly`, `NoSpace`, `WriteFailed`, `Invalid` when
    /// the archive is being closed.
    pub fn remove(&self, choose: &mut dyn FnMut(&[Snapshot]) -> Result<Vec<u64>>) -> Result<()> {
        self.fs.remove_chosen_snapshots(&mut |all| {
            let all: Vec<Snapshot> = all.iter().cloned().map(Snapshot::of).collect();
            let mut ids = choose(&all)?;
            ids.sort_unstable();
            ids.dedup();
            Ok(ids)
        })
    }

    /// Removes scheduled snapshots ([`SnapshotManager::create_scheduled`]) that `keep` does not
    /// keep, and returns their number. Other snapshots are ignored.
    ///
    /// # Errors
    /// As [`SnapshotManager::remove`].
    pub fn prune_scheduled(&self, keep: &RetentionPolicy) -> Result<usize> {
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

    /// Returns whether a scheduled snapshot exists in the period of `rule` that contains `now`.
    pub fn has_scheduled(&self, rule: RetentionRule, now: Timestamp) -> Result<bool> {
        let period = rule.period_of(now);
        let all = self.list()?;
        Ok(all.iter().filter_map(|one| time_of_scheduled(&one.name)).any(|time| rule.period_of(time) == period))
    }

    /// Returns whether anything has changed since the newest snapshot; true without one. Commits
    /// accepted data first.
    ///
    /// # Errors
    /// `WriteFailed`, `NoSpace`, `Damaged`; `Invalid` when the archive is being closed.
    pub fn has_changed_since(&self) -> Result<bool> {
        self.fs.differs_from_newest_snapshot()
    }
}

/// Name prefix of scheduled snapshots.
const SCHEDULED: &str = "auto-";

/// Name prefix of snapshots that are created before a restore.
const BEFORE_RESTORE: &str = "before-restore-";

/// Number of those that are kept: each holds what its restore replaced, deleted files included.
const RESTORES_KEPT: usize = 5;

/// Returns a time such as `2026-11-23T05-42-03Z`, valid as a file name on every system.
pub fn name_of_time(time: Timestamp) -> String {
    format!("{}Z", time.utc().replace(' ', "T").replace(':', "-"))
}

fn name_of_scheduled(time: Timestamp) -> Vec<u8> {
    format!("{SCHEDULED}{}", name_of_time(time)).into_bytes()
}

/// Returns the time in the name of a scheduled snapshot; `None` for other names.
pub fn time_of_scheduled(name: &[u8]) -> Option<Timestamp> {
    time_of_name(std::str::from_utf8(name).ok()?.strip_prefix(SCHEDULED)?)
}

/// Returns whether the name is one of [`SnapshotManager::create_before_restore`]: a time and,
/// within the same second, a number.
fn is_before_restore(name: &[u8]) -> bool {
    let text = std::str::from_utf8(name).ok().and_then(|name| name.strip_prefix(BEFORE_RESTORE));
    let parts = text.and_then(|text| text.split_once('Z'));
    parts.is_some_and(|(time, number)| {
        let number = number.strip_prefix('-').map(str::parse::<u64>);
        time_of_name(&format!("{time}Z")).is_some() && number.is_none_or(|number| number.is_ok_and(|number| number > 1))
    })
}

/// The inverse of [`name_of_time`].
fn time_of_name(text: &str) -> Option<Timestamp> {
    let (day, time) = text.strip_suffix('Z')?.split_once('T')?;
    let mut numbers = day.splitn(3, '-').chain(time.splitn(3, '-')).map(|part| part.parse::<i64>().ok());
    let mut next = || numbers.next().flatten();
    let (year, month, day, hour, minute, second) = (next()?, next()?, next()?, next()?, next()?, next()?);
    let sound = (0..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !sound || [(hour, 23), (minute, 59), (second, 59)].iter().any(|(number, most)| !(0..=*most).contains(number)) {
        return None;
    }
    let first = RetentionRule::Monthly.beginning_of(12 * year + month - 1).seconds;
    let time = Timestamp { seconds: first + ((day - 1) * 24 + hour) * 3600 + minute * 60 + second, nanos: 0 };
    // Only the canonical form is accepted: no invalid days of a month, signs or missing zeros.
    (name_of_time(time) == text).then_some(time)
}

/// Adds the snapshot's name to an error about it.
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
    fn only_names_of_restores_are_taken_for_those() {
        for name in ["before-restore-2026-11-23T05-42-03Z", "before-restore-2026-11-23T05-42-03Z-2"] {
            assert!(is_before_restore(name.as_bytes()), "{name}");
        }
        for name in [
            "before-restore-",
            "before-restore-monday",
            "before-restore-2026-11-23T05-42-03",
            "before-restore-2026-11-23T05-42-03Z-",
            "before-restore-2026-11-23T05-42-03Z-1",
            "before-restore-2026-11-23T05-42-03Z2",
            "auto-2026-11-23T05-42-03Z",
        ] {
            assert!(!is_before_restore(name.as_bytes()), "{name}");
        }
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
