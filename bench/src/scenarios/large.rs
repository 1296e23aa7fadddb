//! One large file: import and extraction compared with a synced copy, and cold and warm range
//! reads.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use lockbox::exchange::{self, ExtractOptions, Filter, ImportOptions};
use lockbox::format::ROOT_INO;

use crate::measure::{self, BenchBox, CREATOR, Report, Seeded, forget, median};
use crate::{Outcome, Place};

const MIB: usize = 1 << 20;
/// Range reads of each size, cold; ten times as many warm.
const READS: usize = 32;

pub(crate) fn run(place: &Place, size: u64) -> Outcome<()> {
    one(place, size, "incompressible", &|part| measure::noise(part + 1, MIB))?;
    one(place, size, "text", &|part| measure::text(part + 1, MIB))
}

fn one(place: &Place, size: u64, data: &str, content: &dyn Fn(u64) -> Vec<u8>) -> Outcome<()> {
    let report = Report::new(&format!("large: {size} MiB, {data}"), place)?;
    let mut made = BenchBox::new(place, "large")?;
    let source = made.directory().join("source");
    let mut file = File::create(&source)?;
    (0..size).try_for_each(|part| file.write_all(&content(part)))?;
    file.sync_all()?;
    drop(file);

    let copy = made.directory().join("copy");
    let (mut copies, mut adds) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        copies.push(seconds(|| copy_synced(&source, &copy))?);
        fs::remove_file(&copy)?;
        let options = ImportOptions {
            to: Vec::new(),
            name: None,
            follow: false,
            replace: true,
            creator: CREATOR,
            filter: Filter::default(),
            one_file_system: false,
            mirror: None,
        };
        let archive = made.archive()?;
        adds.push(seconds(|| {
            exchange::import(
                archive.file_system(),
                archive.identity(),
                std::slice::from_ref(&source),
                &options,
                &mut |_| Ok(()),
            )?;
            Ok(archive.file_system().make_durable()?)
        })?);
    }
    beside(&report, "add + commit, beside cp + fsync", size, median(adds), median(copies))?;
    report.time("close", || made.close())?;

    for length in [4096, 64 << 10, MIB] {
        ranges(&report, &mut made, size, length)?;
    }

    let (mut copies, mut extractions) = (Vec::new(), Vec::new());
    for round in 0..3 {
        copies.push(seconds(|| copy_synced(&source, &copy))?);
        fs::remove_file(&copy)?;
        let options = ExtractOptions {
            to: made.directory().join(format!("out{round}")),
            name: None,
            replace: false,
            filter: Filter::default(),
            privileges: false,
        };
        let archive = made.archive()?;
        extractions.push(seconds(|| {
            exchange::extract(archive.file_system(), &[], &options, &mut |_| Ok(()))?;
            Ok(File::open(options.to.join("source"))?.sync_all()?)
        })?);
        fs::remove_dir_all(&options.to)?;
    }
    beside(&report, "extract + fsync, beside cp + fsync", size, median(extractions), median(copies))
}

fn seconds(f: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
    let began = Instant::now();
    f()?;
    Ok(began.elapsed().as_secs_f64())
}

fn copy_synced(from: &Path, to: &Path) -> Outcome<()> {
    fs::copy(from, to)?;
    Ok(File::open(to)?.sync_all()?)
}

fn beside(report: &Report, step: &str, size: u64, ours: f64, theirs: f64) -> Outcome<()> {
    let rate = |seconds: f64| size as f64 / seconds;
    let text = format!("{:.0} / {:.0} MiB/s = {:.2}", rate(ours), rate(theirs), theirs / ours);
    report.row(step, &text)
}

/// Measures range reads. Cold: the archive is reopened for each read, without the host's page
/// cache.
fn ranges(report: &Report, made: &mut BenchBox, size: u64, length: usize) -> Outcome<()> {
    let mut random = Seeded::new(length as u64);
    let places = (size << 20) / 4096 - length as u64 / 4096;
    let mut buffer = Vec::new();
    let mut cold = Vec::new();
    for _ in 0..READS {
        made.make_cold()?;
        forget(&made.directory().join("source"))?;
        made.open()?;
        let fs = made.fs()?;
        let ino = fs.lookup(ROOT_INO, b"source")?.ino;
        let at = random.below(places) * 4096;
        cold.push(seconds(|| Ok(fs.read_into(ino, at, length, &mut buffer).map(drop)?))? * 1e6);
    }
    let fs = made.fs()?;
    let ino = fs.lookup(ROOT_INO, b"source")?.ino;
    let mut warm = Vec::new();
    for _ in 0..10 * READS {
        let at = random.below(places) * 4096;
        fs.read_into(ino, at, length, &mut buffer)?;
        warm.push(seconds(|| Ok(fs.read_into(ino, at, length, &mut buffer).map(drop)?))? * 1e6);
    }
    let step = format!("read of {} KiB at a random place, cold / warm", length >> 10);
    report.row(&step, &format!("{:.0} / {:.0} us", median(cold), median(warm)))
}
