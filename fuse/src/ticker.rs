//! The daemon's clock: background steps every second, and in `sync=periodic` a flush and commit every five.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lockbox::archive::Witness;
use lockbox::fs::{FileSystem, SyncProfile};
use lockbox::{Error, Result};

use crate::adapter::Shared;
use crate::stop::Place;

const STEP: Duration = Duration::from_secs(1);
/// The loss window of `sync=periodic` is this plus one flush.
const COMMIT: Duration = Duration::from_secs(5);
/// Until the next time an older copy could pass for the newest; each time costs an fsync beside the archive.
const REMEMBER: Duration = Duration::from_secs(60);
/// Background steps in a row before the clock is looked at again.
const STEPS: u32 = 64;

/// A running clock; dropping it stops and joins the thread.
pub(crate) struct Ticker {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    pub(crate) fn start(
        fs: Arc<FileSystem>,
        witness: Arc<Witness>,
        shared: Arc<Shared>,
        place: Arc<Place>,
        profile: SyncProfile,
    ) -> std::io::Result<Ticker> {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new().name("ticker".into()).spawn(move || {
            let mut clock = Clock { fs, shared, place, last_error: String::new() };
            let mut committed = Instant::now();
            let mut remembered = Instant::now();
            while stopped.recv_timeout(STEP) == Err(RecvTimeoutError::Timeout) {
                if profile == SyncProfile::Periodic && committed.elapsed() >= COMMIT {
                    let done = clock.commit();
                    clock.report(done);
                    committed = Instant::now();
                }
                let done = clock.maintain();
                clock.report(done);
                if remembered.elapsed() >= REMEMBER {
                    witness.remember();
                    remembered = Instant::now();
                }
            }
        })?;
        Ok(Ticker { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Clock {
    fs: Arc<FileSystem>,
    shared: Arc<Shared>,
    place: Arc<Place>,
    last_error: String,
}

impl Clock {
    /// Flushes the kernel's pages, then commits. No lock of the file system is held: the flush arrives as requests.
    fn commit(&mut self) -> Result<()> {
        // Without a writer the kernel has nothing (F3), and opening the root would make `umount` fail as busy.
        let flushed = if self.shared.writers.any() { self.place.flush() } else { Ok(()) };
        // Asked of the file system: it knows of a change from the moment it is accepted, also of one that comes during a commit.
        let committed = if self.fs.is_dirty() { self.fs.sync() } else { Ok(()) };
        committed.and(flushed.map_err(|e| Error::io("the process that flushes the mount does not answer", e)))
    }

    fn maintain(&mut self) -> Result<()> {
        for _ in 0..STEPS {
            if !self.fs.maintain()? {
                break;
            }
        }
        Ok(())
    }

    /// The same error every second is logged once.
    fn report(&mut self, done: Result<()>) {
        let Err(error) = done else { return };
        let message = error.to_string();
        if message != self.last_error {
            tracing::error!("background work failed: {message}");
            self.last_error = message;
        }
    }
}
