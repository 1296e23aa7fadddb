//! Measures steps in wall time, processor time and peak memory, and prints one row for each.

use std::fs;
use std::io::Write;
use std::time::Instant;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::Outcome;

/// Rows of one scenario, printed as they come.
pub(crate) struct Report;

impl Report {
    pub(crate) fn new(title: &str, place: &crate::Place) -> Outcome<Report> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "\n{title}, memory={}M, load {}", place.memory, load())?;
        writeln!(out, "\n| step | result | processor time | peak memory, MiB |\n|---|---:|---:|---:|")?;
        Ok(Report)
    }

    /// Runs a step and prints its milliseconds; returns them with its result.
    pub(crate) fn time<R>(&self, step: &str, f: impl FnOnce() -> Outcome<R>) -> Outcome<(f64, R)> {
        let (result, cost) = measure(f)?;
        self.line(step, &format!("{:.1} ms", cost.millis), Some(&cost))?;
        Ok((cost.millis, result))
    }

    /// Runs `count` equal steps and prints the microseconds of one.
    pub(crate) fn each<R>(&self, step: &str, count: usize, f: impl FnOnce() -> Outcome<R>) -> Outcome<f64> {
        let (_, cost) = measure(f)?;
        let micros = cost.millis * 1000.0 / count as f64;
        self.line(step, &format!("{micros:.2} us each"), Some(&cost))?;
        Ok(micros)
    }

    /// Prints a result that was not measured as a step.
    pub(crate) fn row(&self, step: &str, result: &str) -> Outcome<()> {
        self.line(step, result, None)
    }

    fn line(&self, step: &str, result: &str, cost: Option<&Cost>) -> Outcome<()> {
        let (processor, peak) = match cost {
            Some(cost) => (format!("{:.0} ms", cost.processor), format!("{:.0}", cost.peak as f64 / 1024.0)),
            None => Default::default(),
        };
        Ok(writeln!(std::io::stdout().lock(), "| {step} | {result} | {processor} | {peak} |")?)
    }
}

/// Cost of a step.
struct Cost {
    millis: f64,
    /// Milliseconds of all threads, including the kernel: least affected by other programs.
    processor: f64,
    /// KiB.
    peak: u64,
}

fn measure<R>(f: impl FnOnce() -> Outcome<R>) -> Outcome<(R, Cost)> {
    // Resets the peak; a kernel that refuses reports the peak of the whole run.
    let _ = fs::write("/proc/self/clear_refs", "5");
    let (began, before) = (Instant::now(), processor_millis()?);
    let result = f()?;
    let millis = began.elapsed().as_secs_f64() * 1000.0;
    Ok((result, Cost { millis, processor: processor_millis()? - before, peak: peak_kib()? }))
}

fn processor_millis() -> Outcome<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let millis = |time: TimeVal| time.num_microseconds() as f64 / 1000.0;
    Ok(millis(usage.user_time()) + millis(usage.system_time()))
}

fn peak_kib() -> Outcome<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    Ok(lockbox_host::proc::kib(&status, "VmHWM").ok_or("no peak in /proc/self/status")?)
}

fn load() -> String {
    fs::read_to_string("/proc/loadavg")
        .map_or(String::new(), |line| line.split(' ').take(3).collect::<Vec<_>>().join(" "))
}

/// Returns the median.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
