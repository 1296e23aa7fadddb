//! Times a step and the most memory that the process held during it, and prints both as a row.

use std::fs;
use std::io::Write;
use std::time::Instant;

use crate::Outcome;

/// Rows of one scenario, printed as they come.
pub(crate) struct Report;

impl Report {
    pub(crate) fn new(title: &str, place: &crate::Place) -> Outcome<Report> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "\n{title}, memory={}M, load {}", place.memory, load())?;
        writeln!(out, "\n| step | result | peak memory, MiB |\n|---|---:|---:|")?;
        Ok(Report)
    }

    /// Runs a step and prints its milliseconds; answers them with what the step did.
    pub(crate) fn time<R>(&self, step: &str, f: impl FnOnce() -> Outcome<R>) -> Outcome<(f64, R)> {
        let (millis, result, peak) = measure(f)?;
        self.row(step, &format!("{millis:.1} ms"), Some(peak))?;
        Ok((millis, result))
    }

    /// The same for `count` equal steps, in microseconds of one.
    pub(crate) fn each<R>(&self, step: &str, count: usize, f: impl FnOnce() -> Outcome<R>) -> Outcome<f64> {
        let (millis, _, peak) = measure(f)?;
        let micros = millis * 1000.0 / count as f64;
        self.row(step, &format!("{micros:.2} us each"), Some(peak))?;
        Ok(micros)
    }

    pub(crate) fn row(&self, step: &str, result: &str, peak: Option<u64>) -> Outcome<()> {
        let peak = peak.map_or(String::new(), |kib| format!("{:.0}", kib as f64 / 1024.0));
        Ok(writeln!(std::io::stdout().lock(), "| {step} | {result} | {peak} |")?)
    }
}

fn measure<R>(f: impl FnOnce() -> Outcome<R>) -> Outcome<(f64, R, u64)> {
    // Forgets the peak of what was before; a kernel that refuses tells the peak of the whole run.
    let _ = fs::write("/proc/self/clear_refs", "5");
    let began = Instant::now();
    let result = f()?;
    Ok((began.elapsed().as_secs_f64() * 1000.0, result, peak_kib()?))
}

fn peak_kib() -> Outcome<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no peak in /proc/self/status")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

fn load() -> String {
    fs::read_to_string("/proc/loadavg")
        .map_or(String::new(), |line| line.split(' ').take(3).collect::<Vec<_>>().join(" "))
}

/// The middle one of several.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
