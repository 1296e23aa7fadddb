//! Parses times and sizes, a number with the letter of a unit, and formats sizes, rates, durations
//! and points in time.

use std::fmt;
use std::time::Duration;

/// Parses `90`, `90s`, `10m`, `12h` or `2d`.
pub fn time(text: &str) -> Option<Duration> {
    Span::parse(text).map(Span::time)
}

/// The letters of units of time, their seconds and their words.
const TIMES: [(char, u64, &str); 4] =
    [('d', 86_400, "day"), ('h', 3600, "hour"), ('m', 60, "minute"), ('s', 1, "second")];

/// Time span in the unit of its input: `2d` is shown as two days, not as 48 hours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    count: u64,
    /// One of [`TIMES`].
    unit: (char, u64, &'static str),
}

impl Span {
    /// Reads `90` (seconds), `90s`, `10m`, `12h` or `2d`.
    pub fn parse(text: &str) -> Option<Span> {
        let (digits, letter) = match text.char_indices().next_back() {
            Some((at, letter)) if !letter.is_ascii_digit() => (&text[..at], letter),
            _ => (text, 's'),
        };
        let unit = *TIMES.iter().find(|(known, _, _)| *known == letter)?;
        let count = digits.parse::<u64>().ok()?;
        count.checked_mul(unit.1)?;
        Some(Span { count, unit })
    }

    /// In the largest unit of which the seconds are whole ones.
    pub fn of_seconds(seconds: u64) -> Span {
        let fits = |(_, length, _): &(char, u64, &str)| seconds > 0 && seconds.is_multiple_of(*length);
        let unit = TIMES.into_iter().find(fits).unwrap_or(TIMES[3]);
        Span { count: seconds / unit.1, unit }
    }

    pub fn time(self) -> Duration {
        Duration::from_secs(self.count * self.unit.1)
    }

    /// Formats the time like `2 days`.
    pub fn words(self) -> String {
        let plural = if self.count == 1 { "" } else { "s" };
        format!("{} {}{plural}", self.count, self.unit.2)
    }
}

/// `2d`, as [`Span::parse`] reads it.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.count, self.unit.0)
    }
}

/// Prefixes of the units, each 1024 times the one before.
const UNITS: &str = "KMGT";

/// Parses bytes, or `64K`, `64M`, `1G` or `2T`, of 1024 each; small letters mean the same.
pub fn size(text: &str) -> Option<u64> {
    let (digits, power) = match text.char_indices().next_back() {
        Some((at, letter)) if !letter.is_ascii_digit() => (&text[..at], UNITS.find(letter.to_ascii_uppercase())? + 1),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << (10 * power))
}

/// Formats like `20 KiB`: in the largest unit of which there are at least ten, without a fraction.
pub fn readable(bytes: u64) -> String {
    let powers = (1..).zip(UNITS.chars()).map(|(power, letter)| (bytes >> (10 * power), letter));
    match powers.take_while(|(count, _)| *count >= 10).last() {
        Some((count, letter)) => format!("{count} {letter}iB"),
        None => format!("{bytes} bytes"),
    }
}

/// Returns a rate such as `20 MiB/s`; none for less than a second, which is not significant.
pub fn rate(bytes: u64, time: Duration) -> Option<String> {
    (time.as_secs() > 0).then(|| format!("{}/s", readable((bytes as f64 / time.as_secs_f64()) as u64)))
}

/// Formats like `12 s`, `3 min 5 s` or `2 h 10 min`: in two units at most, without a fraction.
pub fn lasting(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..60 => format!("{seconds} s"),
        seconds @ ..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Formats seconds since 1970 like `2026-11-21 09:30:00`, in UTC.
pub fn utc(seconds: i64) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60)
}

/// Returns the year, month and day of a day counted from 1970-01-01, in the proleptic Gregorian
/// calendar. Years are counted from March, so that the leap day is the last of a year; 719,468 days
/// lie between 0000-03-01 and 1970-01-01.
pub fn civil(days: i64) -> (i64, i64, i64) {
    let days = days.saturating_add(719_468);
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, seconds) in
            [("0", 0), ("90", 90), ("90s", 90), ("10m", 600), ("12h", 43_200), ("7d", 604_800), ("30d", 2_592_000)]
        {
            assert_eq!(time(text), Some(Duration::from_secs(seconds)), "{text}");
        }
        for text in [
            "",
            "m",
            "10 m",
            "-1",
            "-1m",
            "1.5h",
            "10M",
            "1w",
            "99999999999999999999",
            "99999999999999999d",
            "\u{1f4a3}",
        ] {
            assert_eq!(time(text), None, "{text:?}");
        }
    }

    #[test]
    fn times_are_told_in_the_unit_in_which_they_were_named() {
        for (text, words) in [
            ("2d", "2 days"),
            ("48h", "48 hours"),
            ("1h", "1 hour"),
            ("15m", "15 minutes"),
            ("90", "90 seconds"),
            ("1s", "1 second"),
        ] {
            let span = Span::parse(text).unwrap();
            assert_eq!(span.words(), words);
            assert_eq!(Span::parse(&span.to_string()), Some(span));
        }
        for (seconds, text) in [(172_800, "2d"), (7200, "2h"), (900, "15m"), (901, "901s"), (90_000, "25h"), (0, "0s")]
        {
            assert_eq!(Span::of_seconds(seconds).to_string(), text);
        }
    }

    #[test]
    fn sizes_are_shown_in_the_unit_that_fits() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (10_239, "10239 bytes"),
            (10_240, "10 KiB"),
            (256 << 20, "256 MiB"),
            (10_239 << 20, "10239 MiB"),
            (20 << 40, "20 TiB"),
            (u64::MAX, "16777215 TiB"),
        ] {
            assert_eq!(readable(bytes), text);
        }
    }

    #[test]
    fn rates_and_times_are_shown_in_the_units_that_fit() {
        let second = Duration::from_secs(1);
        assert_eq!(rate(3 << 30, 12 * second).as_deref(), Some("256 MiB/s"));
        assert_eq!(rate(100, Duration::from_millis(1500)).as_deref(), Some("66 bytes/s"));
        assert_eq!(rate(u64::MAX, second).as_deref(), Some("16777215 TiB/s"));
        assert_eq!(rate(3 << 30, Duration::from_millis(999)), None);
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min 0 s"),
            (3599, "59 min 59 s"),
            (3600, "1 h 0 min"),
            (100_000, "27 h 46 min"),
        ] {
            assert_eq!(lasting(seconds * second), text);
        }
    }

    #[test]
    fn sizes_have_units_of_1024() {
        for (text, bytes) in [("7", 7), ("1k", 1 << 10), ("64M", 64 << 20), ("1g", 1 << 30), ("2T", 2 << 40)] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["", "M", "1 M", "1MB", "-1", "1.5G", "1P", "99999999999T"] {
            assert_eq!(size(text), None, "{text:?}");
        }
    }

    #[test]
    fn times_are_shown_in_utc() {
        for (seconds, shown) in [
            (0, "1970-01-01 00:00:00"),
            (-1, "1969-12-31 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_709_209_296, "2024-02-29 12:21:36"),
            (4_107_542_399, "2100-02-28 23:59:59"),
            (4_107_542_400, "2100-03-01 00:00:00"),
        ] {
            assert_eq!(utc(seconds), shown);
        }
    }
}
