//! The only source of time and randomness.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result, Timestamp};

/// Time and randomness, so that a test can replay both.
pub trait Environment: Send + Sync {
    fn now(&self) -> Timestamp;
    /// Processor time that this thread has used: what other programs do meanwhile, and who sets the clock, does not count.
    fn processor_time(&self) -> Duration;
    /// Fills `out` with unpredictable bytes.
    ///
    /// # Errors
    /// [`Error::Io`] when the system has no randomness; nothing may be sealed then.
    fn fill_random(&self, out: &mut [u8]) -> Result<()>;
}

/// The machine's clock and random generator.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemEnvironment;

impl Environment for SystemEnvironment {
    fn now(&self) -> Timestamp {
        Timestamp::from_system(SystemTime::now())
    }

    fn processor_time(&self) -> Duration {
        let used = clock_gettime(ClockId::ThreadCPUTime);
        // Neither can be negative, and nanoseconds are fewer than a billion.
        Duration::new(used.tv_sec.max(0).unsigned_abs(), u32::try_from(used.tv_nsec).unwrap_or(0))
    }

    fn fill_random(&self, out: &mut [u8]) -> Result<()> {
        getrandom::fill(out).map_err(|e| Error::io("reading randomness", std::io::Error::other(e)))
    }
}

/// A replayable environment for tests: SplitMix64 from a seed, a clock that ticks 1 us a call. Never for real archives.
#[derive(Debug)]
pub struct SeededEnvironment {
    state: AtomicU64,
    clock: AtomicU64,
}

impl SeededEnvironment {
    pub fn new(seed: u64) -> Self {
        SeededEnvironment { state: AtomicU64::new(seed), clock: AtomicU64::new(0) }
    }

    /// The next 64 bits of SplitMix64 (Steele, Lea, Flood 2014).
    pub fn next_u64(&self) -> u64 {
        let mut z = self.state.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

impl Environment for SeededEnvironment {
    fn now(&self) -> Timestamp {
        let ticks = self.clock.fetch_add(1, Ordering::Relaxed);
        Timestamp { seconds: 1_700_000_000 + (ticks / 1_000_000) as i64, nanos: (ticks % 1_000_000) as u32 * 1000 }
    }

    fn processor_time(&self) -> Duration {
        Duration::from_micros(self.clock.fetch_add(1, Ordering::Relaxed))
    }

    fn fill_random(&self, out: &mut [u8]) -> Result<()> {
        for piece in out.chunks_mut(8) {
            piece.copy_from_slice(&self.next_u64().to_le_bytes()[..piece.len()]);
        }
        Ok(())
    }
}
