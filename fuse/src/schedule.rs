//! Scheduled snapshots of a running mount, and their removal by retention rules (`snapshots=`).
//!
//! # Rules
//! 1  At most one snapshot is taken per shortest period (hour, day, ...) of the system clock. Names
//!    contain the time, so this also holds across mounts and after the clock was set back.
//! 2  None is taken while the live tree equals the newest snapshot, whether scheduled or manual.
//!    Commits without a change of the tree do not count.
//! 3  Snapshots with other names than the scheduler's are neither counted nor removed: they belong
//!    to the user.
//! 4  A failure is logged once, shown by `status`, and retried after [`RETRY_SECONDS`]. The mount
//!    continues.

use lockbox::archive::{RetentionPolicy, RetentionRule, SnapshotManager};
use lockbox::control;
use lockbox::error::Timestamp;
use parking_lot::Mutex;

use crate::exit::Failure;

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

/// Result of a check.
enum StepOutcome {
    /// The current period has a snapshot.
    Exists,
    /// Nothing has changed since the newest snapshot.
    Unchanged,
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
        let outcome = self.take_due(moments, now, collect);
        let mut state = self.state.lock();
        match outcome {
            Ok(outcome) => {
                let there = matches!(outcome, StepOutcome::Exists);
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

    fn take_due(
        &self,
        moments: &SnapshotManager,
        now: Timestamp,
        collect: impl FnOnce() -> lockbox::Result<()>,
    ) -> lockbox::Result<StepOutcome> {
        if !moments.has_scheduled(self.rule, now)? {
            if !moments.has_changed_since()? {
                return Ok(StepOutcome::Unchanged);
            }
            collect()?;
            moments.create_scheduled(now)?;
        }
        // Also after a snapshot of an earlier mount, which may have had other rules or have ended
        // before pruning.
        moments.prune_scheduled(&self.keep)?;
        Ok(StepOutcome::Exists)
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

/// Formats rules as the option does: `hourly:24,daily:7`.
pub(crate) fn format_rules(keep: &RetentionPolicy) -> String {
    keep.rules().map(|(rule, count)| format!("{}:{count}", rule.word())).collect::<Vec<_>>().join(",")
}

/// Parses one rule of the option. Returns None for an unknown period, or a number outside 1 to
/// 100,000.
pub(crate) fn parse_rule(text: &str) -> Option<(RetentionRule, u32)> {
    let (word, count) = text.split_once(':')?;
    let rule = RetentionRule::ALL.into_iter().find(|rule| *rule != RetentionRule::Last && rule.word() == word)?;
    Some((rule, count.parse().ok().filter(|count| (1..=MAX_COUNT).contains(count))?))
}

/// Upper limit of snapshots per rule.
const MAX_COUNT: u32 = 100_000;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

    use lockbox::archive::Archive;
    use lockbox::format::{Ino, ROOT_INO};

    use super::*;
    use crate::snapshot_requests::tests::{CREATOR, opened};

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
            let keep = rules.split(',').fold(RetentionPolicy::default(), |keep, rule| {
                let (rule, count) = parse_rule(rule).unwrap();
                keep.with(rule, count)
            });
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
    fn rules_are_periods_with_numbers() {
        assert_eq!(parse_rule("weekly:4"), Some((RetentionRule::Weekly, 4)));
        for text in
            ["weekly", "weekly:", "weekly:0", "weekly:100001", "weekly:-1", "last:3", "minutely:3", ":3", "Weekly:3"]
        {
            assert_eq!(parse_rule(text), None, "{text}");
        }
        assert!(SnapshotSchedule::new(RetentionPolicy::default(), Timestamp::default).is_none());
    }
}
