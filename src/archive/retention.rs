//! Retention policy: selects the snapshots of a series to keep, namely the newest ones, and one for
//! each of the last hours, days, weeks, months and years.
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

use lockbox_terminal::civil;
use serde::{Deserialize, Serialize};

use crate::error::Timestamp;

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

    /// Returns the beginning of the period.
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
    /// Adds a rule.
    #[must_use]
    pub fn with(mut self, rule: RetentionRule, count: u32) -> RetentionPolicy {
        self.0[rule as usize] = count;
        self
    }

    pub fn count(&self, rule: RetentionRule) -> u32 {
        self.0[rule as usize]
    }

    /// Returns the rules in use, shortest period first.
    pub fn rules(&self) -> impl Iterator<Item = (RetentionRule, u32)> {
        RetentionRule::ALL.into_iter().zip(self.0).filter(|(_, count)| *count > 0)
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
