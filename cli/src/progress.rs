//! Progress display on a terminal: amount done, rate, time left, and a line at the end.
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use lockbox::exchange::{FileTotals, Progress};
use lockbox_terminal::{display, quantity};

use crate::output;

/// Cost of a file in addition to its content, in bytes of content that take as long to copy.
const COST_OF_A_FILE: u64 = 32 << 10;

/// Progress line on standard error that is removed when the work is done. Nothing is shown if that
/// is not a terminal.
pub(crate) struct Bar {
    line: Option<ProgressBar>,
    began: Instant,
    part: Cell<Option<Part>>,
    total: Arc<Total>,
}

/// Amount to copy.
#[derive(Default)]
struct Total {
    amount: OnceLock<FileTotals>,
    /// Set when the count is not needed any more.
    unwanted: AtomicBool,
}

/// Part of the work with a count of its own: scanning, then copying.
#[derive(Clone, Copy)]
struct Part {
    verb: &'static str,
    began: Instant,
    /// Bytes that existed before a resumed download began.
    from: u64,
}

impl Bar {
    /// `quiet`: the user wants no signs of work.
    pub(crate) fn new(quiet: bool) -> Bar {
        let is_shown = !quiet && lockbox_terminal::is_animated();
        let line = if is_shown { ProgressBar::no_length() } else { ProgressBar::hidden() };
        let line = (!line.is_hidden()).then(|| match ProgressStyle::with_template("{wide_msg}") {
            Ok(style) => line.with_style(style),
            Err(_) => line,
        });
        Bar { line, began: Instant::now(), part: Cell::new(None), total: Arc::default() }
    }

    /// Lets `count` find the amount to copy, as long as the function passed to it returns true,
    /// concurrently with the work, which must not wait for it. So `count` may hang where the work
    /// itself would not.
    pub(crate) fn count(&self, count: impl FnOnce(&dyn Fn() -> bool) -> Option<FileTotals> + Send + 'static) {
        if self.line.is_none() {
            return;
        }
        let total = self.total.clone();
        let counting = move || {
            if let Some(amount) = count(&|| !total.unwanted.load(Ordering::Relaxed)) {
                let _ = total.amount.set(amount);
            }
        };
        // Without a thread for it there is no total.
        let _ = thread::Builder::new().name("count".into()).spawn(counting);
    }

    pub(crate) fn expect(&self, amount: FileTotals) {
        let _ = self.total.amount.set(amount);
    }

    /// Files that are copied, of so many as were counted.
    pub(crate) fn copied(&self, verb: &'static str, progress: &Progress<'_>) {
        self.show(verb, progress.bytes, |done| {
            let copied = amount(progress.files, progress.bytes);
            let passed = self.total.amount.get().and_then(|total| passed(done, &progress.passed, total));
            format!("{copied} {verb}{}{}: {}", rate(done), passed.unwrap_or_default(), display(progress.path))
        });
    }

    /// Shows bytes, and the total where that is known.
    pub(crate) fn bytes(&self, verb: &'static str, bytes: u64, total: impl Into<Option<u64>>) {
        self.show(verb, bytes, |done| {
            let bytes = quantity::readable(bytes);
            match total.into() {
                Some(total) => {
                    format!("{bytes} of {} {verb}{}{}", quantity::readable(total), rate(done), left(done, total))
                }
                None => format!("{bytes} {verb}{}", rate(done)),
            }
        });
    }

    pub(crate) fn entries(&self, verb: &'static str, entries: u64, total: u64) {
        self.show(verb, entries, |done| format!("{entries} of {total} entries {verb}{}", left(done, total)));
    }

    fn show(&self, verb: &'static str, count: u64, told: impl FnOnce(&Done) -> String) {
        let Some(line) = &self.line else { return };
        let part = self.part.get().filter(|part| part.verb == verb);
        let part = part.unwrap_or_else(|| Part { verb, began: Instant::now(), from: count });
        self.part.set(Some(part));
        line.set_message(told(&Done { count, new: count.saturating_sub(part.from), time: part.began.elapsed() }));
    }

    pub(crate) fn wipe(&self) {
        self.wiper()();
    }

    /// The same for a thread that ends the program.
    pub(crate) fn wiper(&self) -> impl Fn() + Send + 'static + use<> {
        let line = self.line.clone();
        move || line.iter().for_each(ProgressBar::finish_and_clear)
    }

    /// Prints the last line of a command that reports its amount in no other way.
    pub(crate) fn done(&self, verb: &str, files: Option<u64>, bytes: u64) {
        self.wipe();
        if self.line.is_some() {
            output::show(&ended(verb, files, bytes, self.began.elapsed()));
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.total.unwanted.store(true, Ordering::Relaxed);
        self.wipe();
    }
}

/// Finished part of the work.
struct Done {
    count: u64,
    /// Bytes without those that existed before.
    new: u64,
    time: Duration,
}

fn amount(files: u64, bytes: u64) -> String {
    format!("{}, {}", output::count(files, "file"), quantity::readable(bytes))
}

fn rate(done: &Done) -> String {
    quantity::rate(done.new, done.time).map_or_else(String::new, |rate| format!(", {rate}"))
}

/// Returns the share of the total that a copy has passed; None when it has passed more than was
/// counted.
fn passed(done: &Done, passed: &FileTotals, total: &FileTotals) -> Option<String> {
    if passed.files > total.files || passed.bytes > total.bytes {
        return None;
    }
    let work = |amount: &FileTotals| amount.bytes.saturating_add(amount.files.saturating_mul(COST_OF_A_FILE));
    let of = match total.bytes {
        // They may be other objects too.
        0 => String::new(),
        bytes => format!(" of {}", quantity::readable(bytes)),
    };
    Some(share(&Done { count: work(passed), new: work(passed), ..*done }, work(total), &of))
}

/// Returns the share of the total, and the remaining time at the same rate, which is not known in
/// the first second.
fn left(done: &Done, total: u64) -> String {
    share(done, total, "")
}

/// `of`: name of the total, where it is not printed already.
fn share(done: &Done, total: u64, of: &str) -> String {
    let rest = total.saturating_sub(done.count);
    let percent = (done.count.min(total) as f64 * 100.0 / total.max(1) as f64) as u64;
    if done.new == 0 || done.time.as_secs() == 0 {
        return format!(" ({percent} %{of})");
    }
    let seconds = done.time.as_secs_f64() * rest as f64 / done.new as f64;
    // The cast of a float saturates.
    format!(" ({percent} %{of}), {} left", quantity::lasting(Duration::from_secs(seconds.ceil() as u64)))
}

fn ended(verb: &str, files: Option<u64>, bytes: u64, time: Duration) -> String {
    let amount = files.map_or_else(|| quantity::readable(bytes), |files| amount(files, bytes));
    match quantity::rate(bytes, time) {
        Some(rate) => format!("{verb} {amount} in {} ({rate})", quantity::lasting(time)),
        None => format!("{verb} {amount}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn done(count: u64, new: u64, seconds: u64) -> Done {
        Done { count, new, time: Duration::from_secs(seconds) }
    }

    #[test]
    fn the_rest_takes_as_long_as_what_is_done_tells() {
        let half = done(300 * MIB, 300 * MIB, 3);
        assert_eq!(rate(&half) + &left(&half, 600 * MIB), ", 100 MiB/s (50 %), 3 s left");
        let resumed = done(300 * MIB, 100 * MIB, 1);
        assert_eq!(rate(&resumed) + &left(&resumed, 600 * MIB), ", 100 MiB/s (50 %), 3 s left");
        // Unknown values are not printed.
        let begun = done(300 * MIB, 0, 7);
        assert_eq!(left(&begun, 600 * MIB), " (50 %)");
        assert_eq!(left(&done(1, 1, 0), 600), " (0 %)");
        // The total of a compaction is an estimate of the result.
        assert_eq!(left(&done(700, 700, 2), 600), " (100 %), 0 s left");
        assert_eq!(left(&done(0, 0, 2), 0), " (0 %)");
        assert!(left(&done(1, 1, 1 << 40), u64::MAX).ends_with(" min left"));
    }

    #[test]
    fn a_copy_tells_how_much_it_has_passed_until_there_is_more_than_was_counted() {
        let amount = |files, bytes| FileTotals { files, bytes };
        let told = |seconds, done, total| {
            passed(&Done { time: Duration::from_secs(seconds), ..self::done(1, 1, 0) }, &done, &total)
        };
        assert_eq!(told(0, amount(1, 300 * MIB), amount(2, 600 * MIB)).unwrap(), " (50 % of 600 MiB)");
        assert_eq!(told(3, amount(1, 300 * MIB), amount(2, 600 * MIB)).unwrap(), " (50 % of 600 MiB), 3 s left");
        // Where there is little content, files are most of the work.
        assert_eq!(told(2, amount(500, 0), amount(1000, 0)).unwrap(), " (50 %), 2 s left");
        assert_eq!(told(2, amount(500, 10), amount(1000, 2000)).unwrap(), " (49 % of 2000 bytes), 3 s left");
        // A tar, of which the bytes are read.
        assert_eq!(told(0, amount(0, MIB), amount(0, 100 * MIB)).unwrap(), " (1 % of 100 MiB)");
        assert_eq!(told(9, amount(2, 600 * MIB), amount(2, 600 * MIB)).unwrap(), " (100 % of 600 MiB), 0 s left");
        assert_eq!(told(9, amount(2, 600 * MIB + 1), amount(2, 600 * MIB)), None);
        assert_eq!(told(9, amount(3, 5), amount(2, 600 * MIB)), None);
        assert_eq!(told(9, amount(0, 0), amount(0, 0)).unwrap(), " (0 %)");
        assert!(told(1, amount(1, 1), amount(u64::MAX, u64::MAX)).unwrap().starts_with(" (0 % of "));
    }

    #[test]
    fn the_end_tells_how_fast_it_was_unless_it_was_at_once() {
        let seconds = Duration::from_secs;
        assert_eq!(
            ended("added", Some(1204), 3072 * MIB, seconds(12)),
            "added 1204 files, 3072 MiB in 12 s (256 MiB/s)"
        );
        assert_eq!(ended("added", Some(1), 5, seconds(0)), "added 1 file, 5 bytes");
        assert_eq!(ended("received", None, 60 * MIB, seconds(1)), "received 60 MiB in 1 s (60 MiB/s)");
    }

    #[test]
    fn who_wants_no_signs_of_work_gets_none() {
        assert!(Bar::new(true).line.is_none());
    }
}
