//! Source of time and randomness; the only one in the library.

use std::io::PipeReader;
#[cfg(any(test, debug_assertions))]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, fstat, futimens};
use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result, Timestamp};
#[cfg(test)]
pub(crate) use tests::{seeds, stride, variable};

/// Time and randomness, replaceable for reproducible tests.
pub(crate) trait Environment: Send + Sync {
    fn now(&self) -> Timestamp;
    /// Returns the timestamp for a file that changes now. It may come from another clock than
    /// [`Environment::now`], so the two must not be compared.
    fn stamp(&self) -> Timestamp {
        self.now()
    }
    /// Returns the processor time of this thread, independent of other programs and of changes to
    /// the system clock.
    fn processor_time(&self) -> Duration;
    /// Fills `out` with unpredictable bytes. Errors: [`Error::Io`] when the system has no
    /// randomness; nothing may be sealed then.
    fn fill_random(&self, out: &mut [u8]) -> Result<()>;
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SystemEnvironment;

impl Environment for SystemEnvironment {
    fn now(&self) -> Timestamp {
        Timestamp::from_system(SystemTime::now())
    }

    /// Uses the coarse clock of the kernel's file systems, which advances in steps of some
    /// milliseconds.
    fn stamp(&self) -> Timestamp {
        let coarse = clock_gettime(ClockId::RealtimeCoarse);
        timestamp(coarse.tv_sec, coarse.tv_nsec)
    }

    fn processor_time(&self) -> Duration {
        let used = clock_gettime(ClockId::ThreadCPUTime);
        // Neither is negative, and nanoseconds are below 10^9.
        Duration::new(used.tv_sec.max(0).unsigned_abs(), u32::try_from(used.tv_nsec).unwrap_or(0))
    }

    fn fill_random(&self, out: &mut [u8]) -> Result<()> {
        getrandom::fill(out).map_err(|e| Error::io("reading randomness", std::io::Error::other(e)))
    }
}

fn timestamp(seconds: i64, nanos: i64) -> Timestamp {
    // Nanoseconds of the kernel are fewer than a billion.
    Timestamp { seconds, nanos: u32::try_from(nanos).unwrap_or(0) }
}

/// System environment with timestamps ordered consistently with the kernel's.
///
/// Files in a mounted archive get timestamps from two sources: the kernel stamps files that
/// programs write, and this process stamps everything else. A stamp of this process must not be
/// earlier than a previous one of the kernel nor later than a following one, so that programs that
/// compare files, such as make(1), see the true order. No clock that a process can read is the
/// kernel's: the precise clock runs ahead of it by up to a step, and since Linux 6.13 the kernel's
/// runs ahead of the coarse clock, up to the last time that any file system took from the precise
/// clock. Therefore this process lets the kernel stamp a private pipe and uses that timestamp.
#[derive(Debug)]
pub(crate) struct StampingEnvironment {
    stamped: Option<PipeReader>,
}

impl StampingEnvironment {
    /// Falls back to the coarse clock when no file descriptor is available.
    pub(crate) fn new() -> StampingEnvironment {
        StampingEnvironment { stamped: std::io::pipe().ok().map(|(reader, _)| reader) }
    }

    fn stamped(&self) -> Option<Timestamp> {
        let file = self.stamped.as_ref()?;
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        futimens(file, &Timestamps { last_access: now, last_modification: now }).ok()?;
        let stat = fstat(file).ok()?;
        Some(timestamp(stat.st_ctime, i64::try_from(stat.st_ctime_nsec).ok()?))
    }
}

impl Environment for StampingEnvironment {
    fn now(&self) -> Timestamp {
        SystemEnvironment.now()
    }

    fn stamp(&self) -> Timestamp {
        self.stamped().unwrap_or_else(|| SystemEnvironment.stamp())
    }

    fn processor_time(&self) -> Duration {
        SystemEnvironment.processor_time()
    }

    fn fill_random(&self, out: &mut [u8]) -> Result<()> {
        SystemEnvironment.fill_random(out)
    }
}

/// Reproducible environment for tests: SplitMix64 from a seed, and a clock that advances 1 us per
/// call. Not for real archives.
#[cfg(any(test, debug_assertions))]
#[derive(Debug)]
pub(crate) struct SeededEnvironment {
    state: AtomicU64,
    clock: AtomicU64,
}

#[cfg(any(test, debug_assertions))]
impl SeededEnvironment {
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

    pub(crate) fn new(seed: u64) -> Self {
        SeededEnvironment { state: AtomicU64::new(seed), clock: AtomicU64::new(0) }
    }

    /// Returns the next 64 bits of SplitMix64 (Steele, Lea, Flood 2014).
    pub(crate) fn next_u64(&self) -> u64 {
        let state = self.state.fetch_add(Self::STEP, Ordering::Relaxed);
        Self::mix(state.wrapping_add(Self::STEP))
    }

    fn mix(mut z: u64) -> u64 {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

#[cfg(any(test, debug_assertions))]
impl Environment for SeededEnvironment {
    fn now(&self) -> Timestamp {
        let ticks = self.clock.fetch_add(1, Ordering::Relaxed);
        Timestamp { seconds: 1_700_000_000 + (ticks / 1_000_000) as i64, nanos: (ticks % 1_000_000) as u32 * 1000 }
    }

    fn processor_time(&self) -> Duration {
        Duration::from_micros(self.clock.fetch_add(1, Ordering::Relaxed))
    }

    fn fill_random(&self, out: &mut [u8]) -> Result<()> {
        // One claim of the state: tests fill hundreds of megabytes.
        let claimed = Self::STEP.wrapping_mul(out.len().div_ceil(8) as u64);
        let mut state = self.state.fetch_add(claimed, Ordering::Relaxed);
        let mut next = || {
            state = state.wrapping_add(Self::STEP);
            Self::mix(state).to_le_bytes()
        };
        let (words, rest) = out.as_chunks_mut::<8>();
        words.iter_mut().for_each(|word| *word = next());
        if !rest.is_empty() {
            rest.copy_from_slice(&next()[..rest.len()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    /// Returns a parameter of a random test from the environment: SEED, STEPS, STATES.
    pub(crate) fn variable(name: &str) -> Option<u64> {
        std::env::var(name).ok().map(|value| value.parse().expect("a number"))
    }

    /// Returns the step between two faults or damaged blocks that are tried: `usually`, or 1 with
    /// `FAULTS=all`.
    pub(crate) fn stride(usually: usize) -> usize {
        if std::env::var_os("FAULTS").is_some_and(|wanted| wanted == "all") { 1 } else { usually }
    }

    /// Returns the seeds of a random test: the defaults, the one in SEED, or as many as SEEDS from
    /// the first default on. Prints each when its turn begins.
    pub(crate) fn seeds(usual: std::ops::RangeInclusive<u64>) -> impl Iterator<Item = u64> {
        let first = *usual.start();
        let many = variable("SEEDS").map_or(usual, |count| first..=first + count.max(1) - 1);
        variable("SEED").map_or(many, |seed| seed..=seed).inspect(|seed| println!("SEED={seed}"))
    }

    impl SeededEnvironment {
        pub(crate) fn advance(&self, seconds: u64) {
            self.clock.fetch_add(seconds * 1_000_000, Ordering::Relaxed);
        }
    }

    fn changed(file: &OwnedFd) -> Timestamp {
        let stat = fstat(file).unwrap();
        timestamp(stat.st_ctime, stat.st_ctime_nsec as i64)
    }

    /// The kernel stamps new files from its coarse clock, and files whose times were read from the
    /// precise one.
    #[test]
    fn stamps_are_in_order_with_those_of_the_kernel() {
        let environment = StampingEnvironment::new();
        let mut last = environment.stamp();
        for round in 0..5000 {
            let file = memfd_create("stamped", MemfdFlags::CLOEXEC).unwrap();
            let made = changed(&file);
            rustix::io::write(&file, b"x").unwrap();
            let times = [made, changed(&file), environment.stamp()];
            for time in times {
                assert!(last <= time, "round {round}: {last:?} and then {time:?} of {times:?}");
                last = time;
            }
        }
    }
}
