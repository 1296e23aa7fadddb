//! Answers what is asked at the daemon's control socket.

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::SystemTime;

use lockbox::archive::Archive;
use lockbox::control::{Caches, Request, Response, Status};
use lockbox::fs::FileSystem;
use nix::sys::resource::{UsageWho, getrusage};
use nix::unistd::geteuid;
use parking_lot::Mutex;

use crate::adapter::Shared;
use crate::session::{Event, Slot, Task};

/// What the answers are taken from.
pub(crate) struct Answers {
    task: Task,
    slot: Slot,
    shared: Arc<Shared>,
    events: Mutex<Sender<Event>>,
    since: i64,
    /// The newest commit when the mount began.
    first_generation: u64,
}

impl Answers {
    pub(crate) fn new(task: Task, slot: Slot, shared: Arc<Shared>, events: Sender<Event>) -> Answers {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let since = now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        let first_generation = slot.lock().as_ref().map_or(0, |archive| archive.file_system().generation().0);
        Answers { task, slot, shared, events: Mutex::new(events), since, first_generation }
    }

    pub(crate) fn respond(&self, request: &Request) -> Response {
        match request {
            Request::Status => match self.slot.lock().as_ref() {
                Some(archive) => Response::Status(Box::new(self.status(archive))),
                None => closing(),
            },
            Request::Sync => match self.file_system().map(|fs| fs.make_durable()) {
                Some(Ok(())) | None => Response::Done,
                Some(Err(error)) => Response::Failed { message: error.to_string() },
            },
            Request::Purge => match self.file_system().map(|fs| fs.purge()) {
                Some(Ok(())) => Response::Done,
                Some(Err(error)) => Response::Failed { message: error.to_string() },
                None => closing(),
            },
            Request::Stop { lazy } => {
                let (answer, answered) = mpsc::channel();
                let _ = self.events.lock().send(Event::Stop { lazy: *lazy, answer });
                answered.recv().unwrap_or(Response::Done)
            }
        }
    }

    fn file_system(&self) -> Option<Arc<FileSystem>> {
        self.slot.lock().as_ref().map(|archive| Arc::clone(archive.file_system()))
    }

    /// Nothing that asks the host: a mount whose host fails has to be found, and ended.
    fn status(&self, archive: &Archive) -> Status {
        let fs = archive.file_system();
        let usage = fs.usage();
        let generation = fs.generation().0;
        let Task { archive: path, point, options, .. } = &self.task;
        Status {
            pid: std::process::id(),
            uid: geteuid().as_raw(),
            archive: path.to_string_lossy().into_owned(),
            archive_id: archive.id().iter().map(|byte| format!("{byte:02x}")).collect(),
            mount_point: point.to_string_lossy().into_owned(),
            read_only: options.read_only,
            options: options.to_string(),
            since: self.since,
            generation,
            commits: generation.saturating_sub(self.first_generation),
            dirty_bytes: usage.dirty_bytes,
            open_files: self.shared.activity.open_files(),
            open_directories: self.shared.activity.open_directories(),
            memory_bytes: usage.memory(),
            memory_limit: options.memory,
            peak_resident_bytes: peak_resident_bytes(),
            file_bytes: usage.file_bytes,
            used_bytes: usage.used_bytes,
            caches: Caches { cells: usage.cells, heads: usage.heads, nodes: usage.nodes },
            latched: usage.latched,
        }
    }
}

fn closing() -> Response {
    Response::Failed { message: "the archive is being closed".into() }
}

fn peak_resident_bytes() -> u64 {
    // In KiB on Linux.
    getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| u64::try_from(usage.max_rss()).unwrap_or(0) << 10)
}
