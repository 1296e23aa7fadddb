//! Measuring of the scenarios: a report of steps, seeded content (incompressible noise,
//! compressible text), and a temporary archive, removed on drop.

use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use lockbox::archive::{Archive, CreateOptions, KdfCost, OpenOptions};
use lockbox::crypto::Passphrase;
use lockbox::fs::{Creator, FileSystem, Ino, NewFile, ROOT_INO};
use lockbox::keys::{self, UnlockedKey};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::{Outcome, Place};

/// Rows of one scenario, printed as they come.
pub(crate) struct Report;

impl Report {
    pub(crate) fn new(title: &str, place: &Place) -> Outcome<Report> {
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
    pub(crate) fn each(&self, step: &str, count: usize, f: impl FnOnce() -> Outcome<()>) -> Outcome<()> {
        let (_, cost) = measure(f)?;
        let micros = cost.millis * 1000.0 / count as f64;
        self.line(step, &format!("{micros:.2} us each"), Some(&cost))
    }

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
    let processor = processor_millis()? - before;
    let status = fs::read_to_string("/proc/self/status")?;
    let peak = lockbox_host::proc::kib(&status, "VmHWM").ok_or("no peak in /proc/self/status")?;
    Ok((result, Cost { millis, processor, peak }))
}

fn processor_millis() -> Outcome<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let millis = |time: TimeVal| time.num_microseconds() as f64 / 1000.0;
    Ok(millis(usage.user_time()) + millis(usage.system_time()))
}

fn load() -> String {
    fs::read_to_string("/proc/loadavg")
        .map_or(String::new(), |line| line.split(' ').take(3).collect::<Vec<_>>().join(" "))
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// xorshift64*, so that every run measures the same bytes.
pub(crate) struct Seeded(u64);

impl Seeded {
    pub(crate) fn new(seed: u64) -> Seeded {
        Seeded(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Seeded::new(seed);
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        out.extend_from_slice(&random.next().to_le_bytes());
    }
    out.truncate(length);
    out
}

/// Words of two to nine letters out of 4,096, the first ones most often, in lines: zstd -1 makes
/// about a third of it.
pub(crate) fn text(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Seeded::new(seed);
    let mut out = Vec::with_capacity(length + 16);
    let mut column = 0;
    while out.len() < length {
        let bits = 1 + random.below(12);
        let number = random.below(1 << bits);
        let mut letters = Seeded::new(number + 1);
        let count = 2 + letters.below(8);
        out.extend((0..count).map(|_| b"etaoinshrdlucmfw"[letters.below(16) as usize]));
        column += count + 1;
        out.push(if column > 72 { b'\n' } else { b' ' });
        column = if column > 72 { 0 } else { column };
    }
    out.truncate(length);
    out
}

pub(crate) const CREATOR: Creator = Creator { uid: 0, gid: 0, umask: None };

/// Files of one directory in the scenarios with many.
pub(crate) const PER_DIRECTORY: usize = 1000;

/// Temporary archive, open except between `make_cold` and `open`.
pub(crate) struct BenchBox {
    pub(crate) directory: PathBuf,
    key: UnlockedKey,
    options: OpenOptions,
    archive: Option<Archive>,
}

impl BenchBox {
    pub(crate) fn new(place: &Place, name: &str) -> Outcome<BenchBox> {
        let directory = place.work.join(format!("lockbox-{name}.{}", std::process::id()));
        fs::create_dir(&directory)?;
        let path = directory.join("box.lbx");
        let passphrase = Passphrase::new(b"a passphrase of the measurements".to_vec());
        // Key derivation happens once per archive and is not measured.
        Archive::create(&path, &passphrase, &CreateOptions { kdf: KdfCost::TEST, creator: CREATOR })?;
        let key = keys::unlock(&path, &passphrase)?;
        let options = OpenOptions { memory: place.memory << 20, ..OpenOptions::default() };
        let archive = Some(Archive::open(&path, &key, &options)?);
        Ok(BenchBox { directory, key, options, archive })
    }

    pub(crate) fn archive(&self) -> Outcome<&Archive> {
        self.archive.as_ref().ok_or_else(|| "the archive is closed".into())
    }

    pub(crate) fn fs(&self) -> Outcome<Arc<FileSystem>> {
        Ok(Arc::clone(self.archive()?.file_system()))
    }

    fn path(&self) -> PathBuf {
        self.directory.join("box.lbx")
    }

    pub(crate) fn close(&mut self) -> Outcome<()> {
        Ok(self.archive.take().map_or(Ok(()), Archive::close)?)
    }

    /// Closes the archive and drops the host's page cache of it.
    pub(crate) fn make_cold(&mut self) -> Outcome<()> {
        self.close()?;
        forget(&self.path())
    }

    pub(crate) fn open(&mut self) -> Outcome<()> {
        self.archive = Some(Archive::open(&self.path(), &self.key, &self.options)?);
        Ok(())
    }

    /// Returns the allocated bytes of the file.
    pub(crate) fn bytes(&self) -> Outcome<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(fs::metadata(self.path())?.blocks() * 512)
    }
}

impl Drop for BenchBox {
    fn drop(&mut self) {
        drop(self.archive.take());
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Syncs a file and drops the host's page cache of it.
pub(crate) fn forget(path: &Path) -> Outcome<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    Ok(posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
}

pub(crate) fn name(number: usize) -> Vec<u8> {
    format!("f{number:07}").into_bytes()
}

pub(crate) fn add(fs: &FileSystem, directory: Ino, name: &[u8], content: &[u8]) -> Outcome<()> {
    let ino = fs.create_and_open(directory, name, 0o644, CREATOR)?.ino;
    fs.write(ino, 0, content)?;
    Ok(fs.release(ino)?)
}

/// Adds files one at a time, in directories of [`PER_DIRECTORY`], and returns the directories.
pub(crate) fn add_each(fs: &FileSystem, files: Range<usize>, content: &dyn Fn(usize) -> Vec<u8>) -> Outcome<Vec<Ino>> {
    by_directory(fs, files, |directory, mut numbers| {
        numbers.try_for_each(|number| add(fs, directory, &name(number), &content(number)))
    })
}

/// Adds files in bulk, in directories of [`PER_DIRECTORY`], and returns the directories.
pub(crate) fn add_many(fs: &FileSystem, files: Range<usize>, content: &dyn Fn(usize) -> Vec<u8>) -> Outcome<Vec<Ino>> {
    by_directory(fs, files, |directory, numbers| {
        let made: Vec<(Vec<u8>, Vec<u8>)> = numbers.map(|number| (name(number), content(number))).collect();
        let new: Vec<NewFile<'_>> = made.iter().map(|(name, content)| new_file(directory, name, content)).collect();
        let mut added = Vec::new();
        fs.add_files(&new, &mut added)?;
        added.into_iter().collect::<Result<Vec<Ino>, _>>()?;
        Ok(())
    })
}

fn new_file<'a>(directory: Ino, name: &'a [u8], content: &'a [u8]) -> NewFile<'a> {
    let Creator { uid, gid, .. } = CREATOR;
    NewFile { directory, name, mode: 0o644, uid, gid, atime: None, mtime: None, xattrs: &[], content }
}

/// Creates the directories; calls `add` with each of them and the numbers of its files.
fn by_directory(
    fs: &FileSystem,
    files: Range<usize>,
    mut add: impl FnMut(Ino, Range<usize>) -> Outcome<()>,
) -> Outcome<Vec<Ino>> {
    let mut directories = Vec::new();
    let mut first = files.start;
    while first < files.end {
        let number = first / PER_DIRECTORY;
        let next = (number + 1).saturating_mul(PER_DIRECTORY).min(files.end);
        let directory = fs.make_directory(ROOT_INO, format!("d{number:05}").as_bytes(), 0o755, CREATOR)?.ino;
        directories.push(directory);
        add(directory, first..next)?;
        first = next;
    }
    Ok(directories)
}
