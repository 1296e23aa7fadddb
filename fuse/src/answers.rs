//! Answers what is asked at the daemon's control socket.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::SystemTime;

use lockbox::Result;
use lockbox::archive::{Archive, Moments};
use lockbox::control::{Caches, Client, Follows, Request, Response, Status};
use lockbox::error::Timestamp;
use lockbox::fs::FileSystem;
use lockbox_host::remote::TrafficQuery;
use nix::unistd::geteuid;
use parking_lot::Mutex;

use crate::adapter::Activity;
use crate::backups;
use crate::ending::{Event, Place, Slot};
use crate::follow::Failing;
use crate::kernel_cache::KernelCache;
use crate::moments;
use crate::restores::{self, Turns};
use crate::schedule::Schedule;
use crate::task::Task;
use crate::watch::Strangers;

/// What there is while the mount lives.
pub(crate) struct Living {
    pub(crate) activity: Arc<Activity>,
    pub(crate) place: Arc<Place>,
    pub(crate) cache: Arc<KernelCache>,
    /// None when it takes no snapshots by itself.
    pub(crate) schedule: Option<Arc<Schedule>>,
    /// The mount namespace of this process.
    pub(crate) namespace: u64,
    /// None for an archive that is a file of this host.
    pub(crate) telling: Option<TrafficQuery>,
    /// Of a mount that follows.
    pub(crate) following: Option<Failing>,
    /// Told of work with files that came with requests.
    pub(crate) strangers: Strangers,
}

/// What the answers are taken from.
pub(crate) struct Answers {
    task: Task,
    slot: Slot,
    living: Living,
    events: Mutex<Sender<Event>>,
    turns: Turns,
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
        living: Living,
        events: Sender<Event>,
        own_status: Option<File>,
    ) -> Answers {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let since = now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        if let Some(Err(error)) = slot.lock().as_ref().map(|archive| archive.file_system().look_at_snapshots()) {
            tracing::warn!("the snapshots cannot be counted: {error}");
        }
        let first_generation = slot.lock().as_ref().map_or(0, |archive| archive.file_system().generation().0);
        Answers {
            task,
            slot,
            living,
            events: Mutex::new(events),
            turns: Turns::default(),
            since,
            first_generation,
            own_status,
        }
    }

    pub(crate) fn respond(&self, request: &Request, asking: Client) -> Response {
        let _at_work = asking.file.is_some().then(|| self.living.strangers.begin());
        // Its file is to be closed before that ends.
        let client = asking;
        match request {
            Request::Status => {
                // Without the slot: another process is asked.
                let remote = self.living.telling.as_ref().and_then(|tell| tell());
                match self.slot.lock().as_ref() {
                    Some(archive) => Response::Status(Box::new(Status { remote, ..self.status(archive) })),
                    None => closing(),
                }
            }
            Request::Sync => self.done(FileSystem::make_durable),
            Request::Purge => self.done(FileSystem::purge),
            Request::SnapshotCreate { name } => self.about_snapshots(true, |moments| {
                let collected = moments::collect(&self.living.place, &self.living.cache);
                moments::done(collected.and_then(|()| moments.create(&name.0)))
            }),
            Request::SnapshotList { after, held } => self.about_snapshots(false, |all| {
                moments::list(all, *after, *held).unwrap_or_else(|error| moments::refused(&error))
            }),
            Request::SnapshotHeld { ranges } => self.about_snapshots(false, |moments| moments::held(moments, ranges)),
            Request::SnapshotRemove { ids, among } => {
                self.about_snapshots(true, |moments| moments::remove(moments, ids, *among))
            }
            Request::SnapshotDiff { older, newer } => {
                let Some(fs) = self.file_system() else { return closing() };
                self.about_snapshots(false, |moments| {
                    let collected = moments::collect(&self.living.place, &self.living.cache);
                    let tell =
                        || restores::tell_differences((&fs, moments), &self.turns, &client, older, newer.as_ref());
                    collected.and_then(|()| tell()).unwrap_or_else(|error| moments::refused(&error))
                })
            }
            Request::SnapshotRestore { name, paths, to } => {
                let Some(fs) = self.file_system() else { return closing() };
                self.about_snapshots(true, |moments| {
                    let wanted = restores::Wanted { name, paths, to: to.as_ref() };
                    let now = Timestamp::from_system(SystemTime::now());
                    let cache = &self.living.cache;
                    let restore = || restores::restore((&fs, moments), (&self.turns, cache), &client, &wanted, now);
                    let collected = moments::collect(&self.living.place, cache);
                    collected.and_then(|()| restore()).unwrap_or_else(|error| moments::refused(&error))
                })
            }
            Request::Backup { whole, verify } => {
                let backups = self.slot.lock().as_ref().map(Archive::backups);
                let Some(backups) = backups else { return closing() };
                let how = backups::How { whole: *whole, verify: *verify };
                moments::collect(&self.living.place, &self.living.cache)
                    .and_then(|()| backups::make(backups, how, client))
                    .unwrap_or_else(|error| moments::refused(&error))
            }
            Request::Stop { lazy, abandon } => {
                let (answer, answered) = mpsc::channel();
                let _ = self.events.lock().send(Event::Stop { lazy: *lazy, abandon: *abandon, answer });
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

    /// None once the archive is being closed.
    fn file_system(&self) -> Option<Arc<FileSystem>> {
        self.slot.lock().as_ref().map(|archive| Arc::clone(archive.file_system()))
    }

    fn about_snapshots(&self, changes: bool, work: impl FnOnce(&Moments) -> Response) -> Response {
        match moments::read_only(&self.task.options).filter(|_| changes) {
            Some(refused) => refused,
            None => moments::of(&self.slot).map_or_else(closing, |moments| work(&moments)),
        }
    }

    /// Nothing that asks the host: a mount whose host fails has to be found, and ended.
    fn status(&self, archive: &Archive) -> Status {
        let fs = archive.file_system();
        let usage = fs.usage();
        let generation = fs.generation().0;
        let Task { archive: path, point, options, .. } = &self.task;
        let mount = self.living.place.numbers();
        let mut status = Status {
            pid: std::process::id(),
            uid: geteuid().as_raw(),
            archive_id: archive.id().iter().map(|byte| format!("{byte:02x}")).collect(),
            fingerprint: archive.fingerprint().to_string(),
            mount_id: mount.id,
            mount_device: mount.device,
            mount_namespace: self.living.namespace,
            read_only: options.read_only,
            options: options.to_string(),
            since: self.since,
            generation,
            commits: generation.saturating_sub(self.first_generation),
            dirty_bytes: usage.volatile_bytes,
            log: usage.log,
            open_files: self.living.activity.open_files(),
            open_directories: self.living.activity.open_directories(),
            memory_bytes: usage.memory(),
            memory_limit: options.memory,
            peak_resident_bytes: self.own_status.as_ref().map_or(0, peak_resident_bytes),
            file_bytes: usage.file_bytes,
            used_bytes: usage.used_bytes,
            caches: Caches { cells: usage.cells, heads: usage.heads, nodes: usage.nodes },
            snapshots: usage.snapshots.map(|snapshots| snapshots.count),
            newest_snapshot: usage.snapshots.and_then(|snapshots| snapshots.newest).map(|newest| newest.seconds),
            schedule: self.living.schedule.as_ref().map(|schedule| schedule.describe()),
            latched: usage.latched,
            fallback: usage.fallback,
            remote: None,
            follows: self
                .living
                .following
                .as_ref()
                .map(|failing| Follows { committed: fs.committed().seconds, failure: failing.lock().clone() }),
            ..Status::default()
        };
        status.set_archive(Path::new(path));
        status.set_mount_point(Path::new(point));
        status
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
