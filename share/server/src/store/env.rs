//! Environment of a store: time, randomness and the directory of its files. Tests put others in the
//! place of clock and directory.
//!
//! The store's clock never runs backwards, and a step of the machine's clock does not move it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lockbox_share_protocol::token::Handle;
use nix::time::{ClockId, clock_gettime};

use super::barrier_group::Syncable;
use super::{Result, StoreError};

/// Milliseconds of store time: it starts near the wall clock's, and drifts when that is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct StoreTime(pub u64);

impl StoreTime {
    pub fn after(self, period: Duration) -> StoreTime {
        StoreTime(self.0.saturating_add(u64::try_from(period.as_millis()).unwrap_or(u64::MAX)))
    }
}

/// A point in time for people: milliseconds since 1970 by the wall clock. Nothing is decided by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WallTime(pub u64);

impl WallTime {
    pub fn seconds(self) -> u64 {
        self.0 / 1000
    }
}

/// Source of time, which tests replace.
pub trait Clock: Send + Sync {
    /// Milliseconds since a fixed point in time, sleep of the machine included; cannot be set.
    fn steady(&self) -> u64;
    /// Milliseconds since 1970, as the machine is set at this moment.
    fn wall(&self) -> WallTime;
    /// Names the run of the machine within which `steady` can be compared.
    fn boot(&self) -> String;
}

#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn steady(&self) -> u64 {
        // Linux has had this clock since 2.6.39, so the call cannot fail; zero would stop time and
        // not turn it back.
        clock_gettime(ClockId::CLOCK_BOOTTIME)
            .map_or(0, |t| t.tv_sec().unsigned_abs() * 1000 + t.tv_nsec().unsigned_abs() / 1_000_000)
    }

    fn wall(&self) -> WallTime {
        WallTime(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64))
    }

    fn boot(&self) -> String {
        fs::read_to_string("/proc/sys/kernel/random/boot_id").map_or(String::new(), |id| id.trim().to_owned())
    }
}

/// The store's clock: the saved time plus the time elapsed since.
pub struct StoreClock {
    clock: Arc<dyn Clock>,
    /// Store time at `steady` zero.
    base: u64,
}

impl StoreClock {
    pub fn fresh(clock: Arc<dyn Clock>) -> StoreClock {
        let base = clock.wall().0.saturating_sub(clock.steady());
        StoreClock { clock, base }
    }

    /// Resumes from the time that an earlier process saved. Within the same boot that is exact,
    /// even if the wall clock was set. After a reboot the wall clock's difference counts, and never
    /// less than zero: a clock that was set meanwhile cannot be told from elapsed time.
    pub fn resume(clock: Arc<dyn Clock>, saved: &str) -> Option<StoreClock> {
        let mut parts = saved.split_whitespace();
        let mut number = || parts.next()?.parse::<u64>().ok();
        let (time, steady, wall) = (number()?, number()?, number()?);
        let now = clock.steady();
        let gone = if parts.next()? == clock.boot() && now >= steady {
            now - steady
        } else {
            clock.wall().0.saturating_sub(wall)
        };
        let base = time.saturating_add(gone).saturating_sub(now);
        Some(StoreClock { clock, base })
    }

    /// Returns the text that [`StoreClock::resume`] reads.
    pub fn saved(&self) -> String {
        let steady = self.clock.steady();
        format!("{} {} {} {}\n", self.base.saturating_add(steady), steady, self.clock.wall().0, self.clock.boot())
    }

    pub fn now(&self) -> StoreTime {
        StoreTime(self.base.saturating_add(self.clock.steady()))
    }

    /// The moment by the wall clock as it is set now.
    pub fn wall(&self, time: StoreTime) -> WallTime {
        let now = i128::from(self.now().0);
        let wall = i128::from(self.clock.wall().0) + i128::from(time.0) - now;
        WallTime(u64::try_from(wall.max(0)).unwrap_or(u64::MAX))
    }
}

pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut out = [0; N];
    getrandom::fill(&mut out).map_err(|error| StoreError::Unavailable(format!("no randomness: {error}")))?;
    Ok(out)
}

/// A handle with random digits, without bias.
///
/// # Errors
/// `Invalid` when a part is out of range, `Unavailable` without randomness.
pub fn random_handle(routing: u8, digits: u32) -> Result<Handle> {
    let limit = 10u64.pow(digits.min(12));
    let bound = u64::MAX - u64::MAX % limit;
    loop {
        let number = u64::from_le_bytes(random()?);
        if number < bound {
            return Handle::new(routing, digits, number % limit)
                .ok_or(StoreError::Invalid("a handle has a routing digit and 6 to 12 random digits"));
        }
    }
}

/// Flat directory of files. Writes are durable after the file's `sync`, names after that of the
/// directory.
pub(crate) trait Disk: Send + Sync {
    fn list(&self) -> io::Result<Vec<String>>;
    /// A new file, or an empty one in place of an old one.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    fn remove(&self, name: &str) -> io::Result<()>;
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    fn names(&self) -> Arc<dyn Syncable>;
}

/// An open file. Its name may go meanwhile.
pub(crate) trait DiskFile: Syncable {
    /// Fewer bytes than asked for mean the end of the file.
    fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<usize>;
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    fn length(&self) -> io::Result<u64>;
}

/// A directory that only its owner reads.
pub(crate) struct DirectoryDisk {
    path: PathBuf,
    names: Arc<Names>,
}

impl DirectoryDisk {
    pub(crate) fn open(path: &Path) -> io::Result<DirectoryDisk> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Ok(DirectoryDisk { path: path.into(), names: Arc::new(Names(File::open(path)?)) })
    }
}

/// Open directory: a barrier without a free descriptor would fail, and latch the store.
struct Names(File);

impl Syncable for Names {
    fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }
}

struct HostFile(File);

impl Syncable for HostFile {
    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}

impl DiskFile for HostFile {
    fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < out.len() {
            match self.0.read_at(&mut out[filled..], at + filled as u64) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
}

impl Disk for DirectoryDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        fs::read_dir(&self.path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let path = self.path.join(name);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)?;
        Ok(Arc::new(HostFile(file)))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(HostFile(OpenOptions::new().read(true).write(true).open(self.path.join(name))?)))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn names(&self) -> Arc<dyn Syncable> {
        self.names.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opening would fail without a free descriptor.
    #[test]
    fn a_barrier_of_names_does_not_open_the_directory() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("store");
        let disk = DirectoryDisk::open(&path).unwrap();
        fs::rename(&path, parent.path().join("elsewhere")).unwrap();
        assert!(File::open(&path).is_err());
        disk.names().sync().unwrap();
    }
}
