//! Scenarios of many files: small files added, listed, read and extracted; changes of a filled
//! archive; the cost of operations as the number of entries grows. And of one large file: import
//! and extraction compared with a synced copy, and cold and warm range reads.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use lockbox::exchange::{self, Entries, ExtractOptions, Filter, ImportOptions};
use lockbox::fs::{Attributes, FileSystem, Ino, ROOT_INO, RenameMode, SetAttributes, SetTime};

use crate::measure::{
    self, BenchBox, CREATOR, PER_DIRECTORY, Report, Seeded, add, add_each, add_many, forget, median, name,
};
use crate::{Outcome, Place};

const SIZE: usize = 1024;

pub(crate) fn small(place: &Place, files: usize) -> Outcome<()> {
    small_files(place, files, "one repeated byte", &|_| vec![b'x'; SIZE])?;
    small_files(place, files, "text", &|number| measure::text(number as u64 + 1, SIZE))?;
    small_files(place, files, "noise", &|number| measure::noise(number as u64 + 1, SIZE))
}

fn small_files(place: &Place, files: usize, data: &str, content: &dyn Fn(usize) -> Vec<u8>) -> Outcome<()> {
    let report = Report::new(&format!("small: {files} files of 1 KiB, {data}"), place)?;
    let contents: Vec<Vec<u8>> = (0..files).map(content).collect();
    let mut made = BenchBox::new(place, "small")?;
    let fs = made.fs()?;
    let (add, directories) = report.time("add", || add_many(&fs, 0..files, &|number| contents[number].clone()))?;
    let (commit, ()) = report.time("commit", || Ok(fs.make_durable()?))?;
    report.row("add + commit", &format!("{:.1} ms", add + commit))?;
    report.time("list with attributes", || list(&fs, &directories, files))?;
    report.time("five extractions in memory", || (0..5).try_for_each(|_| read_all(&fs, &directories, &contents)))?;
    let options = extract_to(made.directory.join("out"));
    let archive = made.archive()?;
    report.time("extract to a directory", || {
        Ok(exchange::extract(archive.file_system(), &[], &options, &mut |_| Ok(()))?)
    })?;
    drop(fs);
    report.time("close", || made.close())?;
    let (ours, theirs) = (made.bytes()?, tar_zstd(&contents)?);
    let ratio = ours as f64 / theirs as f64;
    report.row("size, compared with tar and zstd -1", &format!("{ours} / {theirs} = {ratio:.2}"))?;
    made.make_cold()?;
    made.open()?;
    let fs = made.fs()?;
    report.time("list with attributes, cold", || list(&fs, &directories, files))?;
    report.time("one extraction in memory, cold", || read_all(&fs, &directories, &contents))?;
    Ok(())
}

fn extract_to(to: PathBuf) -> ExtractOptions {
    ExtractOptions { to, name: None, replace: false, filter: Filter::default(), privileges: false }
}

fn list(fs: &FileSystem, directories: &[Ino], files: usize) -> Outcome<()> {
    let seen = count(fs, directories, |attributes| attributes.size == SIZE as u64)?;
    let tops = count(fs, &[ROOT_INO], Attributes::is_directory)?;
    if (seen, tops) == (files, directories.len()) {
        Ok(())
    } else {
        Err(format!("listed {seen} of {files} files").into())
    }
}

/// Counts the entries of these directories that `is_counted` accepts.
fn count(fs: &FileSystem, directories: &[Ino], is_counted: impl Fn(&Attributes) -> bool) -> Outcome<usize> {
    let mut count = 0;
    for directory in directories {
        let mut entries = Entries::new(fs, *directory)?;
        while let Some(entry) = entries.next_entry() {
            count += usize::from(is_counted(entry?.attributes));
        }
    }
    Ok(count)
}

fn read_all(fs: &FileSystem, directories: &[Ino], contents: &[Vec<u8>]) -> Outcome<()> {
    let mut number = 0;
    for directory in directories {
        let mut entries = Entries::with_contents(fs, *directory)?;
        while let Some(entry) = entries.next_entry() {
            if entry?.content != contents.get(number).map(Vec::as_slice) {
                return Err(format!("file {number} has another content").into());
            }
            number += 1;
        }
    }
    if number == contents.len() { Ok(()) } else { Err(format!("read {number} files").into()) }
}

/// Returns the size of the files as an old-style tar archive, compressed as one stream.
fn tar_zstd(contents: &[Vec<u8>]) -> Outcome<u64> {
    let mut stream = zstd::stream::Encoder::new(Vec::new(), 1)?;
    for (number, content) in contents.iter().enumerate() {
        let mut header = [0; 512];
        header[..8].copy_from_slice(&name(number)[..8]);
        header[100..108].copy_from_slice(b"0000644\0");
        header[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
        header[136..148].copy_from_slice(b"15022302000\0");
        header[148..156].copy_from_slice(b"        ");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        stream.write_all(&header)?;
        stream.write_all(content)?;
        stream.write_all(&vec![0; content.len().next_multiple_of(512) - content.len()])?;
    }
    stream.write_all(&[0; 1024])?;
    Ok(stream.finish()?.len() as u64)
}

pub(crate) fn append_delete(place: &Place, files: usize) -> Outcome<()> {
    let (before, report) = (files * 5, Report::new(&format!("append-delete: {files} of each"), place)?);
    let mut made = BenchBox::new(place, "append-delete")?;
    let fs = made.fs()?;
    let content = |number: usize| measure::text(number as u64 + 1, SIZE);
    let (_, directories) = report.time(&format!("add {before} files"), || add_many(&fs, 0..before, &content))?;
    report.time("commit", || Ok(fs.make_durable()?))?;

    // Whole directories at the end, so that names never meet.
    let first = before.next_multiple_of(PER_DIRECTORY);
    report.time("add, one at a time", || add_each(&fs, first..first + files, &content))?;
    let home = |number: usize| directories[number / PER_DIRECTORY];
    report.time("delete", || (0..files).try_for_each(|n| Ok(fs.unlink(home(5 * n), &name(5 * n))?)))?;
    report.time("replace", || {
        (0..files).try_for_each(|n| {
            let number = 5 * n + 1;
            add(&fs, home(number), b"new", &content(number + before))?;
            Ok(fs.rename(home(number), b"new", home(number), &name(number), RenameMode::Replace)?)
        })
    })?;
    report.time("commit of all three", || Ok(fs.make_durable()?))?;
    drop(fs);
    report.time("close", || made.close())?;
    Ok(())
}

/// Number of lookups, and of files created with a commit each; the mean is reported.
const LOOKUPS: usize = 20_000;
const COMMITS: usize = 200;

pub(crate) fn tree(place: &Place, entries: usize) -> Outcome<()> {
    let report = Report::new(&format!("tree: {entries} entries"), place)?;
    let mut made = BenchBox::new(place, "tree")?;
    let fs = made.fs()?;
    let mut directories = Vec::new();
    report.each("create, empty", entries, || {
        directories = add_many(&fs, 0..entries, &|_| Vec::new())?;
        Ok(fs.make_durable()?)
    })?;
    drop(fs);
    report.time("close", || made.close())?;
    report.row("size", &format!("{:.0} bytes each", made.bytes()? as f64 / entries as f64))?;
    made.make_cold()?;
    report.time("open, cold", || made.open())?;
    let fs = made.fs()?;
    let lookups = |seed: u64| {
        let mut random = Seeded::new(seed);
        (0..LOOKUPS).try_for_each(|_| {
            let number = random.below(entries as u64) as usize;
            Ok(fs.lookup(directories[number / PER_DIRECTORY], &name(number)).map(drop)?)
        })
    };
    report.each("lookup at random, nodes read as needed", LOOKUPS, || lookups(1))?;
    report.each("list with attributes", entries, || {
        let seen = count(&fs, &directories, |_| true)?;
        if seen == entries { Ok(()) } else { Err(format!("listed {seen} of {entries}").into()) }
    })?;
    report.each("lookup at random, again", LOOKUPS, || lookups(1))?;
    report.each("create and commit, one at a time", COMMITS, || {
        (0..COMMITS).try_for_each(|n| {
            add(&fs, directories[n % directories.len()], format!("new{n}").as_bytes(), b"")?;
            Ok(fs.make_durable()?)
        })
    })?;
    drop(fs);
    report.time("close again", || made.close())?;
    Ok(())
}

/// Files changed between the two snapshots.
const CHANGES: usize = 100;

pub(crate) fn diff(place: &Place, entries: usize) -> Outcome<()> {
    let report = Report::new(&format!("diff: {CHANGES} changes among {entries} files"), place)?;
    let mut made = BenchBox::new(place, "diff")?;
    let fs = made.fs()?;
    let directories = add_many(&fs, 0..entries, &|number| vec![number as u8; 300])?;
    fs.make_durable()?;
    made.archive()?.snapshot_manager().create(b"a")?;
    let mut random = Seeded::new(1);
    for _ in 0..CHANGES {
        let number = random.below(entries as u64) as usize;
        let ino = fs.lookup(directories[number / PER_DIRECTORY], &name(number))?.ino;
        fs.write(ino, 0, b"changed")?;
        fs.set_attributes(ino, &SetAttributes { mtime: Some(SetTime::Now), ..SetAttributes::default() })?;
    }
    made.archive()?.snapshot_manager().create(b"b")?;
    drop(fs);
    for round in ["cold", "warm", "warm again"] {
        if round == "cold" {
            made.make_cold()?;
        } else {
            made.close()?;
        }
        made.open()?;
        let archive = made.archive()?;
        let (_, read) = report.time(&format!("compare, {round}"), || {
            let snapshots = archive.snapshot_manager();
            let (old, new) = (snapshots.snapshot_view(b"a")?, snapshots.snapshot_view(b"b")?);
            let found = exchange::compare(&old, &new, &mut |_| Ok(()))?.len();
            if found != CHANGES {
                return Err(format!("{found} differences").into());
            }
            Ok((old.usage().nodes.misses, new.usage().nodes.misses))
        })?;
        report.row("nodes read of the older and the newer one", &format!("{} and {}", read.0, read.1))?;
    }
    Ok(())
}

const MIB: usize = 1 << 20;
/// Range reads of each size, cold; ten times as many warm.
const READS: usize = 32;

pub(crate) fn large(place: &Place, size: u64) -> Outcome<()> {
    large_file(place, size, "incompressible", &|part| measure::noise(part + 1, MIB))?;
    large_file(place, size, "text", &|part| measure::text(part + 1, MIB))
}

fn large_file(place: &Place, size: u64, data: &str, content: &dyn Fn(u64) -> Vec<u8>) -> Outcome<()> {
    let report = Report::new(&format!("large: {size} MiB, {data}"), place)?;
    let mut made = BenchBox::new(place, "large")?;
    let source = made.directory.join("source");
    let mut file = File::create(&source)?;
    (0..size).try_for_each(|part| file.write_all(&content(part)))?;
    file.sync_all()?;
    drop(file);

    let copy = made.directory.join("copy");
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
    compare(&report, "add + commit, compared with cp + fsync", size, median(adds), median(copies))?;
    report.time("close", || made.close())?;

    for length in [4096, 64 << 10, MIB] {
        ranges(&report, &mut made, size, length)?;
    }

    let (mut copies, mut extractions) = (Vec::new(), Vec::new());
    for round in 0..3 {
        copies.push(seconds(|| copy_synced(&source, &copy))?);
        fs::remove_file(&copy)?;
        let options = extract_to(made.directory.join(format!("out{round}")));
        let archive = made.archive()?;
        extractions.push(seconds(|| {
            exchange::extract(archive.file_system(), &[], &options, &mut |_| Ok(()))?;
            Ok(File::open(options.to.join("source"))?.sync_all()?)
        })?);
        fs::remove_dir_all(&options.to)?;
    }
    compare(&report, "extract + fsync, compared with cp + fsync", size, median(extractions), median(copies))
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

fn compare(report: &Report, step: &str, size: u64, ours: f64, theirs: f64) -> Outcome<()> {
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
        forget(&made.directory.join("source"))?;
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
