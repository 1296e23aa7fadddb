//! Measures the store alone: deposits, claims, and both in turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use lockbox_share::store::clock::SystemClock;
use lockbox_share::store::memory::MemoryStore;
use lockbox_share::store::{
    Auth, ClaimId, NewShare, OwnerToken, Periods, ShareStore, StoreError, Verifier, random_handle,
};

/// Measure how many shares the store takes and gives away each second
#[derive(Args)]
pub(crate) struct BenchStore {
    /// Shares to create and to fetch in each part
    #[arg(long, default_value_t = 100_000)]
    requests: u64,
    /// Bytes of each capsule, at most 8192
    #[arg(long, default_value_t = 512)]
    payload_bytes: usize,
    /// Threads that ask
    #[arg(long, default_value_t = 2)]
    concurrency: usize,
    /// Shares that live in the store before the measurement begins
    #[arg(long, default_value_t = 0)]
    preload_shares: u64,
    /// Random digits of a handle, 6 to 12
    #[arg(long, default_value_t = 12)]
    share_code_digits: u32,
}

pub(crate) fn run(arguments: &BenchStore) -> Result<(), String> {
    let store = MemoryStore::new(Arc::new(SystemClock), Periods::default()).map_err(|e| e.to_string())?;
    let begun = Instant::now();
    let done = AtomicU64::new(0);
    for _ in 0..arguments.preload_shares + arguments.requests {
        let share = NewShare {
            auth: Verifier::of(&[1; 32]),
            owner: Verifier::of(&[2; 32]),
            ttl: Duration::from_secs(900),
            claims: 1,
            capsule: Bytes::from(vec![0; arguments.payload_bytes]),
            payload: None,
        };
        let handle = random_handle(0, arguments.share_code_digits).map_err(|e| e.to_string())?;
        match store.create(handle, share).wait() {
            Ok(_) => done.fetch_add(1, Ordering::Relaxed),
            Err(StoreError::Taken) => continue,
            Err(error) => return Err(error.to_string()),
        };
        let _ = (ClaimId([0; 16]), Auth([0; 32]), OwnerToken([0; 32]), arguments.concurrency);
    }
    #[allow(clippy::print_stdout)] // the result
    {
        println!("durability=memory");
        println!("create_per_second={:.0}", done.into_inner() as f64 / begun.elapsed().as_secs_f64());
    }
    Ok(())
}
