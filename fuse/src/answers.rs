//! Answers what is asked at the daemon's control socket.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::SystemTime;

use lockbox::Result;
use lockbox::archive::Archive;
use lockbox::control::{Caches, Request, Response, Status};
use lockbox::fs::FileSystem;
use nix::unistd::geteuid;
use parking_lot::Mutex;

use crate::adapter::Activity;
use crate::ending::{Event, Slot};
use crate::task::Task;

/// What the answers are taken from.
pub(crate) struct Answers {
    task: Task,
    slot: Slot,
    activity: Arc<Activity>,
    events: Mutex<Sender<Event>>,
    since: i64,
    /// The newest commit when the mount began.
    first_generation: u64,
    /// What /proc says of this process, opened before the sandbox took /proc away.
    own_status: Option<File>,
}

impl Answers {
    pub(crate) fn new(
        task: Task,
        slot: Slot,
        activity: Arc<Activity>,
        events: Sender<Event>,
        own_status: Option<File>,
    ) -> Answers {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let since = now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        let first_generation = slot.lock().as_ref().map_or(0, |archive| archive.file_system().generation().0);
        Answers { task, slot, activity, events: Mutex::new(events), since, first_generation, own_status }
    }

    pub(crate) fn respond(&self, request: &Request) -> Response {
        match request {
            Request::Status => match self.slot.lock().as_ref() {
                Some(archive) => Response::Status(Box::new(self.status(archive))),
                None => closing(),
            },
            Request::Sync => self.done(FileSystem::make_durable),
            Request::Purge => self.done(FileSystem::purge),
            Request::Stop { lazy } => {
                let (answer, answered) = mpsc::channel();
                let _ = self.events.lock().send(Event::Stop { lazy: *lazy, answer });
                answered.recv().unwrap_or_else(|_| closing())
            }
        }
    }

    /// Without the slot, which the end of the mount takes, while `work` runs.
    fn done(&self, work: impl FnOnce(&FileSystem) -> Result<()>) -> Response {
        let fs = self.slot.lock().as_ref().map(|archive| Arc::clone(archive.file_system()));
        match fs.map(|fs| work(&fs)) {
            Some(Ok(())) => Response::Done,
            Some(Err(error)) => Response::Failed { message: error.to_string() },
            None => closing(),
        }
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
            dirty_bytes: usage.volatile_bytes,
            log: usage.log,
            open_files: self.activity.open_files(),
            open_directories: self.activity.open_directories(),
            memory_bytes: usage.memory(),
            memory_limit: options.memory,
            peak_resident_bytes: self.own_status.as_ref().map_or(0, peak_resident_bytes),
            file_bytes: usage.file_bytes,
            used_bytes: usage.used_bytes,
            caches: Caches { cells: usage.cells, heads: usage.heads, nodes: usage.nodes },
            latched: usage.latched,
            fallback: usage.fallback,
        }
    }
}

fn closing() -> Response {
    Response::Failed { message: "the archive is being closed".into() }
}

/// Of this program alone: getrusage(2) would count the memory of the mounting command, which derived a key before it started the daemon.
fn peak_resident_bytes(own_status: &File) -> u64 {
    let mut text = [0; 4096];
    let length = own_status.read_at(&mut text, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&text[..length]);
    lockbox_host::proc::kib(&text, "VmHWM").unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_this_process_is_read() {
        let peak = peak_resident_bytes(&File::open("/proc/self/status").unwrap());
        assert!((1 << 20..1 << 40).contains(&peak), "{peak}");
        assert_eq!(peak_resident_bytes(&File::open("/proc/self/cmdline").unwrap()), 0);
    }
}
