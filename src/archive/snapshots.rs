//! Snapshots of an archive, by name and id; and the retention policy, which selects the snapshots
//! of a series to keep: the newest ones, and one for each of the last hours, days, weeks, months
//! and years.
//!
//! Periods are in UTC; weeks are ISO 8601 weeks, beginning on Monday. Per rule, the newest snapshot
//! of each of the last N periods that have any is kept, and a snapshot kept by any rule is kept. A
//! period without a snapshot thus removes nothing, and the current time is not used: a series that
//! is not continued loses nothing more.
//!
//! Newer means created later, regardless of the clock, and a later period is one that contains a
//! newer snapshot. A clock that was ahead for a while therefore costs no snapshot that is created
//! after it was corrected; the newest one is kept by every rule.

use std::collections::BTreeSet;
use std::sync::Arc;

use lockbox_terminal::{civil, display};
use serde::{Deserialize, Serialize};

use super::{Archive, OpenOptions};
use crate::error::{Error, Refusal, Result, Timestamp};
use crate::format::values::SnapshotValue;
use crate::fs::FileSystem;
use crate::keys::{RollbackOptions, UnlockedKey};
use crate::storage::ArchiveSource;
use crate::txn::Pinned;

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
        seen: &RollbackOptions,
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
    /// Commits and pins the current state. While the result exists, no data of that state or of a
    /// snapshot existing now is reused or erased. If the archive may be closed meanwhile, the
    /// caller must hold [`FileSystem::hold_open`] for longer.
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

    /// Returns a read-only file system of the snapshot of this name, concurrently with the live
    /// tree. It is valid until the snapshot is removed.
    ///
    /// # Errors
    /// `Refused` when it does not exist.
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
        let name = self.create_numbered(BEFORE_RESTORE, now)?;
        let mut choose = |all: &[Snapshot]| -> Result<Vec<u64>> {
            let made = all.iter().rev().filter(|one| is_numbered(&one.name, BEFORE_RESTORE)).skip(RESTORES_KEPT);
            Ok(made.filter(|one| one.name != restored).map(|one| one.id).collect())
        };
        // Usually there is nothing to remove, and a removal is a commit.
        if !choose(&self.list()?)?.is_empty() {
            self.remove(&mut choose)?;
        }
        Ok(name)
    }

    /// Creates the snapshot of a backup of a directory, of which everything was copied if
    /// `is_complete`; returns its name, which [`SnapshotManager::prune_backups`] recognizes.
    ///
    /// # Errors
    /// As [`SnapshotManager::create`].
    pub fn create_backup(&self, now: Timestamp, is_complete: bool) -> Result<Vec<u8>> {
        self.create_numbered(if is_complete { BACKUP } else { INCOMPLETE_BACKUP }, now)
    }

    /// Creates a snapshot named after the time and, if there is one of this second, a number.
    fn create_numbered(&self, prefix: &str, now: Timestamp) -> Result<Vec<u8>> {
        let name = format!("{prefix}{}", name_of_time(now));
        let (mut candidate, mut number) = (name.clone(), 1u64);
        loop {
            match self.create(candidate.as_bytes()) {
                Err(Error::Refused(Refusal::SnapshotExists { .. })) => number += 1,
                created => return created.map(|()| candidate.into_bytes()),
            }
            candidate = format!("{name}-{number}");
        }
    }

    /// Creates a snapshot of the current state; durable on return. It uses no space until something
    /// changes.
    ///
    /// # Errors
    /// `Refused` when the name exists or is reserved for [`SnapshotManager::take_scheduled`];
    /// `Invalid` for an invalid name and when the archive is being closed; `ReadOnly`, `NoSpace`,
    /// `WriteFailed`.
    pub fn create(&self, name: &[u8]) -> Result<()> {
        if time_of_scheduled(name).is_some() {
            return Err(Error::Refused(Refusal::NameOfSchedule { name: display(name) }));
        }
        self.create_any(name)
    }

    /// Creates a scheduled snapshot, named after the time `now`, unless one exists in this period
    /// of `rule` or nothing has changed since the newest snapshot. Then removes the scheduled
    /// snapshots that `keep` does not keep. Returns whether the period has a snapshot.
    ///
    /// `collect` is called before a snapshot is created, to fetch writes that others still cache.
    ///
    /// # Errors
    /// That of `collect`; `WriteFailed`, `NoSpace`, `Damaged`; `Invalid` when the archive is being
    /// closed.
    pub fn take_scheduled(
        &self,
        rule: RetentionRule,
        keep: &RetentionPolicy,
        now: Timestamp,
        collect: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        let period = rule.period_of(now);
        let is_of_period = |one: &Snapshot| time_of_scheduled(&one.name).is_some_and(|at| rule.period_of(at) == period);
        if !self.list()?.iter().any(is_of_period) {
            if !self.fs.differs_from_newest_snapshot()? {
                return Ok(false);
            }
            collect()?;
            self.create_scheduled(now)?;
        }
        // Also after a snapshot of an earlier session, which may have had other rules or have ended
        // before pruning.
        self.prune(keep, &[&|one| time_of_scheduled(&one.name)])?;
        Ok(true)
    }

    pub(crate) fn create_scheduled(&self, now: Timestamp) -> Result<()> {
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

    /// Removes snapshots of backups ([`SnapshotManager::create_backup`]) that `keep` does not keep,
    /// and returns their names. Other snapshots are ignored. Complete and incomplete backups are
    /// two series, so that an incomplete one never takes the place of a complete one.
    ///
    /// # Errors
    /// As [`SnapshotManager::remove`].
    pub fn prune_backups(&self, keep: &RetentionPolicy) -> Result<Vec<Vec<u8>>> {
        let [complete, incomplete] = [BACKUP, INCOMPLETE_BACKUP]
            .map(|prefix| move |one: &Snapshot| is_numbered(&one.name, prefix).then_some(one.time));
        self.prune(keep, &[&complete, &incomplete])
    }

    /// Prunes each series: the snapshots that have a time in it.
    fn prune(&self, keep: &RetentionPolicy, series: &[&TimeInSeries]) -> Result<Vec<Vec<u8>>> {
        let mut removed = Vec::new();
        self.remove(&mut |all| {
            let mut gone = Vec::new();
            for time in series {
                let (members, times): (Vec<&Snapshot>, Vec<Timestamp>) =
                    all.iter().filter_map(|one| Some((one, time(one)?))).unzip();
                let kept = keep.kept_by(&times);
                gone.extend(members.into_iter().zip(kept).filter(|(_, rules)| rules.is_empty()).map(|(one, _)| one));
            }
            removed = gone.iter().map(|one| one.name.clone()).collect();
            Ok(gone.iter().map(|one| one.id).collect())
        })?;
        Ok(removed)
    }
}

/// Name prefix of scheduled snapshots.
const SCHEDULED: &str = "auto-";

/// Time of a snapshot in a series, if it belongs to that.
type TimeInSeries<'a> = dyn Fn(&Snapshot) -> Option<Timestamp> + 'a;

/// Name prefixes of snapshots of backups of a directory.
const BACKUP: &str = "backup-";
const INCOMPLETE_BACKUP: &str = "backup-incomplete-";

/// Name prefix of snapshots that are created before a restore.
const BEFORE_RESTORE: &str = "before-restore-";

/// Number of them to keep: each holds the replaced content of its restore, deleted files included.
const RESTORES_KEPT: usize = 5;

/// Returns a time such as `2026-11-23T05-42-03Z`, valid as a file name on every system.
pub fn name_of_time(time: Timestamp) -> String {
    format!("{}Z", time.utc().replace(' ', "T").replace(':', "-"))
}

fn name_of_scheduled(time: Timestamp) -> Vec<u8> {
    format!("{SCHEDULED}{}", name_of_time(time)).into_bytes()
}

/// Returns the time in the name of a scheduled snapshot; `None` for other names.
pub(crate) fn time_of_scheduled(name: &[u8]) -> Option<Timestamp> {
    time_of_name(std::str::from_utf8(name).ok()?.strip_prefix(SCHEDULED)?)
}

/// Returns whether the name is one of [`SnapshotManager::create_numbered`]: the prefix, a time and,
/// within the same second, a number.
fn is_numbered(name: &[u8], prefix: &str) -> bool {
    let text = std::str::from_utf8(name).ok().and_then(|name| name.strip_prefix(prefix));
    let parts = text.and_then(|text| text.split_once('Z'));
    parts.is_some_and(|(time, number)| {
        let is_number = |text: &str| text.parse::<u64>().is_ok_and(|number| number > 1);
        let is_numbered = number.is_empty() || number.strip_prefix('-').is_some_and(is_number);
        is_numbered && time_of_name(&format!("{time}Z")).is_some()
    })
}

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

fn named(error: Error, name: &[u8]) -> Error {
    match error {
        Error::NotFound => Error::Refused(Refusal::NoSnapshot { name: display(name) }),
        Error::Exists => Error::Refused(Refusal::SnapshotExists { name: display(name) }),
        error => error,
    }
}

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// Rule for which a snapshot is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RetentionRule {
    /// It is among the newest.
    Last,
    /// It is the newest one of its period.
    Hourly,
    Daily,
    Weekly,
    Monthly,
    Yearly,
}

impl RetentionRule {
    /// All rules, shortest period first.
    pub const ALL: [RetentionRule; 6] = [
        RetentionRule::Last,
        RetentionRule::Hourly,
        RetentionRule::Daily,
        RetentionRule::Weekly,
        RetentionRule::Monthly,
        RetentionRule::Yearly,
    ];

    /// Returns the name of the rule: `last`, `hourly` and so on.
    pub fn word(self) -> &'static str {
        match self {
            RetentionRule::Last => "last",
            RetentionRule::Hourly => "hourly",
            RetentionRule::Daily => "daily",
            RetentionRule::Weekly => "weekly",
            RetentionRule::Monthly => "monthly",
            RetentionRule::Yearly => "yearly",
        }
    }

    /// Returns the number of the period that contains this time; for [`RetentionRule::Last`] each
    /// second is a period.
    pub fn period_of(self, time: Timestamp) -> i64 {
        let seconds = time.seconds;
        match self {
            RetentionRule::Last => seconds,
            RetentionRule::Hourly => seconds.div_euclid(HOUR),
            RetentionRule::Daily => seconds.div_euclid(DAY),
            // 1970 began on a Thursday, three days into its week.
            RetentionRule::Weekly => (seconds.div_euclid(DAY) + 3).div_euclid(7),
            RetentionRule::Monthly => {
                let (year, month, _) = civil(seconds.div_euclid(DAY));
                12 * year + month - 1
            }
            RetentionRule::Yearly => civil(seconds.div_euclid(DAY)).0,
        }
    }

    pub fn beginning_of(self, period: i64) -> Timestamp {
        let seconds = match self {
            RetentionRule::Last => period,
            RetentionRule::Hourly => period.saturating_mul(HOUR),
            RetentionRule::Daily => period.saturating_mul(DAY),
            RetentionRule::Weekly => period.saturating_mul(7).saturating_sub(3).saturating_mul(DAY),
            RetentionRule::Monthly => first_day(period.div_euclid(12), period.rem_euclid(12) + 1).saturating_mul(DAY),
            RetentionRule::Yearly => first_day(period, 1).saturating_mul(DAY),
        };
        Timestamp { seconds, nanos: 0 }
    }
}

/// Returns the days from 1970 to the first of a month of the Gregorian calendar. Years are counted
/// from March, so that the leap day is the last day.
fn first_day(year: i64, month: i64) -> i64 {
    let (year, months) = if month > 2 { (year, month - 3) } else { (year.saturating_sub(1), month + 9) };
    let leaps = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    // March to July and August to December have 153 days each.
    year.saturating_mul(365).saturating_add(leaps + (153 * months + 2) / 5 - 719_468)
}

/// Number of snapshots that each rule keeps; 0 for an unused rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetentionPolicy([u32; 6]);

impl RetentionPolicy {
    #[must_use]
    pub fn with(mut self, rule: RetentionRule, count: u32) -> RetentionPolicy {
        self.0[rule as usize] = count;
        self
    }

    /// Returns the rules in use, shortest period first.
    pub fn rules(&self) -> impl Iterator<Item = (RetentionRule, u32)> {
        RetentionRule::ALL.into_iter().zip(self.0).filter(|(_, count)| *count > 0)
    }

    pub fn has_rules(&self) -> bool {
        self.rules().next().is_some()
    }

    /// Returns the rules that keep each snapshot, for the times of all in order of creation.
    /// Snapshots without a rule are to be removed.
    pub fn kept_by(&self, times: &[Timestamp]) -> Vec<Vec<RetentionRule>> {
        let mut kept = vec![Vec::new(); times.len()];
        for (rule, count) in self.rules() {
            let (mut remaining, mut periods) = (count, BTreeSet::new());
            for (time, kept) in times.iter().zip(&mut kept).rev() {
                if remaining > 0 && (periods.insert(rule.period_of(*time)) || rule == RetentionRule::Last) {
                    remaining -= 1;
                    kept.push(rule);
                }
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::{Environment, SeededEnvironment, variable};

    impl SnapshotManager {
        pub(in crate::archive) fn of(fs: Arc<FileSystem>) -> SnapshotManager {
            SnapshotManager { fs }
        }
    }

    #[test]
    fn a_name_by_default_is_a_time_without_colons() {
        assert_eq!(name_of_time(Timestamp { seconds: 1, nanos: 5 }), "1970-01-01T00-00-01Z");
    }

    #[test]
    fn only_names_of_restores_and_of_backups_are_taken_for_those() {
        for name in ["before-restore-2026-11-23T05-42-03Z", "before-restore-2026-11-23T05-42-03Z-2"] {
            assert!(is_numbered(name.as_bytes(), BEFORE_RESTORE), "{name}");
            assert!(!is_numbered(name.as_bytes(), BACKUP), "{name}");
        }
        assert!(is_numbered(b"backup-2026-11-27T03-00-00Z", BACKUP) && !is_numbered(b"backup-monday", BACKUP));
        for name in [
            "before-restore-",
            "before-restore-monday",
            "before-restore-2026-11-23T05-42-03",
            "before-restore-2026-11-23T05-42-03Z-",
            "before-restore-2026-11-23T05-42-03Z-1",
            "before-restore-2026-11-23T05-42-03Z2",
            "auto-2026-11-23T05-42-03Z",
        ] {
            assert!(!is_numbered(name.as_bytes(), BEFORE_RESTORE), "{name}");
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

    fn at(year: i64, month: i64, day: i64, hour: i64) -> Timestamp {
        Timestamp { seconds: (first_day(year, month) + day - 1) * DAY + hour * HOUR, nanos: 0 }
    }

    #[test]
    fn periods_are_those_of_the_calendar() {
        for (time, text) in [
            (at(1970, 1, 1, 0), "1970-01-01 00:00:00"),
            (at(2024, 2, 29, 23), "2024-02-29 23:00:00"),
            (at(2026, 12, 31, 7), "2026-12-31 07:00:00"),
            (at(2100, 3, 1, 0), "2100-03-01 00:00:00"),
            (at(1969, 12, 31, 23), "1969-12-31 23:00:00"),
        ] {
            assert_eq!(time.utc(), text);
            for rule in RetentionRule::ALL {
                let period = rule.period_of(time);
                let (begins, ends) = (rule.beginning_of(period), rule.beginning_of(period + 1));
                assert!(begins <= time && time < ends, "{rule:?} {text}");
                assert_eq!(rule.period_of(begins), period, "{rule:?} {text}");
                let last = Timestamp { seconds: ends.seconds - 1, nanos: 999_999_999 };
                assert_eq!(rule.period_of(last), period, "{rule:?} {text}");
            }
        }
        // ISO 8601: the week of 2026-12-31 has the first days of 2027, and ends on a Sunday.
        let week = |time| RetentionRule::Weekly.period_of(time);
        assert_eq!(week(at(2026, 12, 28, 0)), week(at(2027, 1, 3, 23)));
        assert_eq!(week(at(2027, 1, 3, 23)) + 1, week(at(2027, 1, 4, 0)));
        for day in (-800_000..800_000).step_by(53) {
            let (year, month, _) = civil(day);
            let (next_year, next) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
            assert!(first_day(year, month) <= day && day < first_day(next_year, next), "{day}");
        }
        for rule in RetentionRule::ALL {
            for seconds in [i64::MIN, i64::MAX] {
                assert!(rule.beginning_of(rule.period_of(Timestamp { seconds, nanos: 0 })).seconds <= seconds);
            }
        }
    }

    #[test]
    fn what_rules_keep_of_a_series() {
        // The oldest first, and what keeps each under three sets of rules.
        let series = [
            (at(2025, 12, 31, 23), ["", "yearly", ""]),
            (at(2026, 10, 31, 12), ["", "monthly", ""]),
            (at(2026, 11, 20, 9), ["daily", "", ""]),
            (at(2026, 11, 22, 8), ["", "", ""]),
            (at(2026, 11, 22, 20), ["daily", "weekly", ""]),
            (at(2026, 11, 23, 5), ["hourly", "", "last"]),
            (at(2026, 11, 23, 6), ["hourly,daily", "weekly,monthly,yearly", "last,hourly"]),
        ];
        let times: Vec<_> = series.iter().map(|(time, _)| *time).collect();
        let none = RetentionPolicy::default();
        let sets = [
            none.with(RetentionRule::Hourly, 2).with(RetentionRule::Daily, 3),
            none.with(RetentionRule::Weekly, 2).with(RetentionRule::Monthly, 2).with(RetentionRule::Yearly, 9),
            none.with(RetentionRule::Last, 2).with(RetentionRule::Hourly, 1),
        ];
        for (number, keep) in sets.iter().enumerate() {
            let kept = keep.kept_by(&times);
            let words = |rules: &Vec<RetentionRule>| rules.iter().map(|rule| rule.word()).collect::<Vec<_>>().join(",");
            let expected: Vec<_> = series.iter().map(|(_, expected)| expected[number]).collect();
            assert_eq!(kept.iter().map(words).collect::<Vec<_>>(), expected, "{number}");
        }
        assert!(none.kept_by(&times).iter().all(Vec::is_empty), "no rule keeps nothing");
        // The clock was a day ahead for the second one.
        let back = [at(2026, 1, 1, 0), at(2026, 1, 2, 0), at(2026, 1, 1, 1), at(2026, 1, 1, 2)];
        let kept = |rule, count| {
            let kept = none.with(rule, count).kept_by(&back);
            kept.iter().map(|rules| !rules.is_empty()).collect::<Vec<_>>()
        };
        assert_eq!(kept(RetentionRule::Daily, 1), [false, false, false, true]);
        assert_eq!(kept(RetentionRule::Daily, 2), [false, true, false, true]);
        assert_eq!(kept(RetentionRule::Last, 2), [false, false, true, true]);
    }

    /// The same said otherwise: by counting, for each snapshot alone.
    fn is_kept(rule: RetentionRule, count: u32, times: &[Timestamp], at: usize) -> bool {
        let newer = times[at + 1..].iter().map(|time| rule.period_of(*time));
        if rule == RetentionRule::Last {
            return newer.count() < count as usize;
        }
        let newer: BTreeSet<i64> = newer.collect();
        !newer.contains(&rule.period_of(times[at])) && newer.len() < count as usize
    }

    #[test]
    fn rules_keep_the_newest_of_the_last_periods_that_have_any() {
        let seed = variable("SEED").unwrap_or(20_261_123);
        println!("SEED={seed}");
        let dice = SeededEnvironment::new(seed);
        let below = |bound: u64| dice.next_u64() % bound;
        for _ in 0..300 {
            // From seconds to years apart.
            let spread = 1 << (6 + below(24));
            let base = dice.now().seconds - 500_000_000;
            let mut all: Vec<Timestamp> = (0..below(40))
                .map(|_| Timestamp { seconds: base + below(spread) as i64, nanos: below(2) as u32 })
                .collect();
            // Mostly the clock went on, and sometimes it was set.
            if below(4) > 0 {
                all.sort_unstable();
            }
            let mut keep = RetentionPolicy::default();
            for rule in RetentionRule::ALL {
                keep = keep.with(rule, (below(9) as u32).saturating_sub(3));
            }
            for (at, rules) in keep.kept_by(&all).into_iter().enumerate() {
                let expected = keep.rules().filter(|(rule, count)| is_kept(*rule, *count, &all, at));
                assert_eq!(rules, expected.map(|(rule, _)| rule).collect::<Vec<_>>(), "{at} of {all:?}, {keep:?}");
            }
        }
    }
}
