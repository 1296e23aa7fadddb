//! The bucket's invariants on a simulated store.

mod captive_portal;
mod clouds;
mod expired;
mod follower;
mod golden;
mod interleavings;
mod inventory;
mod long_sessions;
mod nth_request;
mod orphans;
mod partial_reader;
mod probe;
mod replacement;
mod request_counts;
mod retries;
mod schedules;
mod simulated;
mod slow_links;
mod spool;
mod upload;
mod vectors;
mod writable;

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use lockbox::Result;
use lockbox::storage::Storage;

use self::simulated::World;
use super::layout::WriterIdentity;
use super::objects::ObjectStore;
use super::store::BucketStore;
use super::{Bucket, BucketWriter};
use crate::RemoteOptions;

/// Default grace period in seconds.
const GRACE: u64 = super::store::GRACE.as_secs();

impl BucketWriter {
    /// Opens the archive as [`crate::open_writable`] does.
    fn open(
        objects: Box<dyn ObjectStore>,
        name: String,
        options: &RemoteOptions,
        take_over: bool,
    ) -> Result<BucketWriter> {
        let writer = BucketWriter::acquire(objects, name, options, take_over)?;
        while writer.remove_expired() {}
        Ok(writer)
    }
}

impl Bucket {
    fn wait_settled(&self) {
        if let Some(buffer) = &self.buffer {
            buffer.wait_uploads(false).unwrap();
        }
    }
}

fn seed(default: u64) -> u64 {
    let seed = std::env::var("SEED").map_or(default, |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    seed
}

fn store(world: &Arc<World>, actor: u64) -> Arc<BucketStore> {
    Arc::new(store_of(world, actor))
}

fn store_of(world: &Arc<World>, actor: u64) -> BucketStore {
    BucketStore::new(world.store(actor), "s3://b/p".into(), Some(Duration::ZERO))
}

/// A storage that is changed, and the bytes that it has to have.
struct Compared<'a> {
    storage: &'a dyn Storage,
    now: &'a mut Vec<u8>,
}

impl Compared<'_> {
    fn punch(&mut self, offset: u64, length: u64) -> Result<()> {
        self.storage.punch(offset, length)?;
        let all = self.now.len();
        self.now[(offset as usize).min(all)..((offset + length) as usize).min(all)].fill(0);
        Ok(())
    }

    fn set_len(&mut self, length: u64) -> Result<()> {
        self.storage.set_len(length)?;
        self.now.resize(length as usize, 0);
        Ok(())
    }

    fn allocate(&mut self, offset: u64, length: u64) -> Result<()> {
        self.storage.allocate(offset, length)?;
        self.now.resize(self.now.len().max((offset + length) as usize), 0);
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.storage.write_at(offset, data)?;
        let (start, end) = (offset as usize, offset as usize + data.len());
        self.now.resize(self.now.len().max(end), 0);
        self.now[start..end].copy_from_slice(data);
        Ok(())
    }
}

/// Of a machine that has no name: nobody is known to be gone.
fn somebody() -> WriterIdentity {
    WriterIdentity { host: "host".into(), ..WriterIdentity::default() }
}

fn options() -> RemoteOptions {
    RemoteOptions {
        timeout: Some(Duration::ZERO),
        cache_directory: None,
        cache_bytes: Some(0),
        ..RemoteOptions::default()
    }
}

/// Runs `work` in another thread, and returns when that has ended or sleeps, which it does who
/// waits for a lock that the caller's thread holds.
///
/// A thread that sleeps for a moment for another reason makes the order of the two another one,
/// which has to be as right.
fn run_until_it_waits(work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let (tell, message) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        tell.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
        work();
    });
    let status = Path::new("/proc").join(message.recv().unwrap()).join("status");
    // Some when it sleeps: how often it went to sleep by itself.
    let sleeps = || {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name).map(|it| it.trim().to_owned()));
        field("State:").filter(|state| state.starts_with('S')).and_then(|_| field("voluntary_ctxt_switches:"))
    };
    let mut before = None;
    while !thread.is_finished() {
        let now = sleeps();
        if now.is_some() && now == before {
            break;
        }
        before = now;
        std::thread::yield_now();
    }
    thread
}
