//! Handles requests from the daemon's control socket.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, SystemTime};

use lockbox::archive::{Archive, BackupDestination, BackupReport, Backups, SnapshotManager};
use lockbox::error::Timestamp;
use lockbox::fs::FileSystem;
use lockbox::{Error, Result};
use lockbox_host::control::{BackupDone, CacheStatus, ClientConnection, ReplicaStatus, Request, Response, Status};
use lockbox_host::remote::TrafficQuery;
use nix::unistd::geteuid;

use crate::adapter::Activity;
use crate::deadlock_watchdog::ForeignFileUse;
use crate::kernel_cache::KernelCache;
use crate::replica::ReplicaFailure;
use crate::shutdown::{ArchiveSlot, MountEvent, MountHandle};
use crate::snapshot_requests::{self, OperationLocks};
use crate::ticker::SnapshotSchedule;
use crate::{DaemonConfig, Failure};

/// State of a running mount, as far as control requests need it.
pub(crate) struct DaemonState {
    pub(crate) activity: Arc<Activity>,
    pub(crate) mount: Arc<MountHandle>,
    pub(crate) cache: Arc<KernelCache>,
    /// None without the option `snapshots=`.
    pub(crate) schedule: Option<Arc<SnapshotSchedule>>,
    /// Mount namespace of this process.
    pub(crate) namespace: u64,
    /// Request statistics of a remote archive; None for a local file.
    pub(crate) remote_status: Option<TrafficQuery>,
    /// Why new versions cannot be shown; None unless the mount is a replica (`follow=`).
    pub(crate) replica_failure: Option<ReplicaFailure>,
    /// Reports work on file descriptors that arrived with requests to the deadlock watchdog.
    pub(crate) foreign_files: ForeignFileUse,
}

pub(crate) struct ControlHandler {
    config: DaemonConfig,
    slot: ArchiveSlot,
    state: DaemonState,
    events: Sender<MountEvent>,
    locks: OperationLocks,
    mounted_at: i64,
    /// Generation of the newest commit when the mount started.
    first_generation: u64,
    /// `/proc/self/status`, opened before the sandbox took /proc away.
    own_status: Option<File>,
    /// [`snapshot_requests::COLLECT_TIME`], less in tests.
    collect_time: Duration,
}

impl ControlHandler {
    pub(crate) fn new(
        config: DaemonConfig,
        slot: ArchiveSlot,
        state: DaemonState,
        events: Sender<MountEvent>,
        own_status: Option<File>,
    ) -> ControlHandler {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let mounted_at = now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        if let Some(Err(error)) = slot.lock().as_ref().map(|archive| archive.file_system().look_at_snapshots()) {
            tracing::warn!("the snapshots cannot be counted: {error}");
        }
        let first_generation = slot.lock().as_ref().map_or(0, |archive| archive.file_system().generation().0);
        ControlHandler {
            config,
            slot,
            state,
            events,
            locks: OperationLocks::default(),
            mounted_at,
            first_generation,
            own_status,
            collect_time: snapshot_requests::COLLECT_TIME,
        }
    }

    pub(crate) fn handle(&self, request: &Request, connection: ClientConnection) -> Response {
        let _at_work = connection.file.is_some().then(|| self.state.foreign_files.track());
        // The client's file must be closed before the guard above is dropped.
        let client = connection;
        let only_looks = matches!(request, Request::Status | Request::Stop { .. } | Request::SnapshotList { .. });
        let _in_use = (!only_looks).then(|| self.state.activity.begin_command());
        match request {
            Request::Status => {
                // Runs without the slot's lock: the fetcher process is queried.
                let remote = self.state.remote_status.as_ref().and_then(|status| status());
                match self.slot.lock().as_ref() {
                    Some(archive) => Response::Status(Box::new(Status { remote, ..self.status(archive) })),
                    None => closing_response(),
                }
            }
            Request::Sync => self.run(|fs| self.sync(fs)),
            Request::Purge => self.run(FileSystem::purge),
            Request::SnapshotCreate { name } => self.with_snapshots(true, |snapshots| {
                let limit = self.collect_time.min(snapshot_requests::CREATE_TIME);
                snapshot_requests::collect_for_snapshot(&self.state.mount, &self.state.cache, limit)?;
                snapshots.create(&name.0).map(|()| Response::Done)
            }),
            Request::SnapshotList { after, held } => {
                self.with_snapshots(false, |snapshots| snapshot_requests::list_page(snapshots, *after, *held))
            }
            Request::SnapshotHeld { ranges } => {
                self.with_snapshots(false, |snapshots| Ok(snapshot_requests::held_bytes(snapshots, ranges)))
            }
            Request::SnapshotRemove { ids, among } => {
                self.with_snapshots(true, |snapshots| Ok(snapshot_requests::remove_snapshots(snapshots, ids, *among)))
            }
            Request::SnapshotDiff { older, newer } => {
                let Some(fs) = self.file_system() else { return closing_response() };
                self.with_snapshots(false, |snapshots| {
                    self.collect_or_warn("the comparison")?;
                    snapshot_requests::send_differences((&fs, snapshots), &self.locks, &client, older, newer.as_ref())
                })
            }
            Request::SnapshotRestore { name, paths, to } => {
                let Some(fs) = self.file_system() else { return closing_response() };
                self.with_snapshots(true, |snapshots| {
                    let now = Timestamp::from_system(SystemTime::now());
                    let (mount, cache) = (&*self.state.mount, &*self.state.cache);
                    snapshot_requests::collect_all_writes(mount, cache, self.collect_time)?;
                    let shared = (&self.locks, cache);
                    snapshot_requests::restore((&fs, snapshots), shared, &client, name, paths, to.as_ref(), now)
                })
            }
            Request::Backup { whole, verify, percent } => {
                let backups = self.slot.lock().as_ref().map(Archive::backups);
                let Some(backups) = backups else { return closing_response() };
                let verify = verify.then(|| percent.unwrap_or(100));
                self.collect_or_warn("the backup")
                    .and_then(|()| run_backup(backups, *whole, verify, client))
                    .unwrap_or_else(|error| snapshot_requests::to_refusal(&error))
            }
            Request::Stop { lazy, abandon, force } => {
                let (answer, answered) = mpsc::channel();
                let stop = MountEvent::Stop { lazy: *lazy, abandon: *abandon, force: *force, answer };
                let _ = self.events.send(stop);
                answered.recv().unwrap_or_else(|_| closing_response())
            }
        }
    }

    /// Runs `work` without holding the slot, which the shutdown takes.
    fn run(&self, work: impl FnOnce(&FileSystem) -> Result<()>) -> Response {
        match self.file_system().map(|fs| work(&fs)) {
            Some(Ok(())) => Response::Done,
            Some(Err(error)) => Response::Failed { message: Failure::sentence(&error) },
            None => closing_response(),
        }
    }

    /// Returns None once the archive is being closed.
    fn file_system(&self) -> Option<Arc<FileSystem>> {
        self.slot.lock().as_ref().map(|archive| Arc::clone(archive.file_system()))
    }

    fn with_snapshots(&self, changes: bool, work: impl FnOnce(&SnapshotManager) -> Result<Response>) -> Response {
        if let Some(refused) = snapshot_requests::read_only_refusal(&self.config.options).filter(|_| changes) {
            return refused;
        }
        let Some(snapshots) = snapshot_requests::open_snapshots(&self.slot) else { return closing_response() };
        work(&snapshots).unwrap_or_else(|error| snapshot_requests::to_refusal(&error))
    }

    /// Makes all data durable that programs wrote before the request. Data that arrives after the
    /// limit of the collection is part of a later commit, and is reported.
    fn sync(&self, fs: &FileSystem) -> Result<()> {
        let collected = snapshot_requests::collect_writes(&self.state.mount, &self.state.cache);
        fs.make_durable()?;
        if collected? { Ok(()) } else { Err(Error::io("collect cached writes", io::ErrorKind::TimedOut.into())) }
    }

    fn collect_or_warn(&self, reader: &str) -> Result<()> {
        snapshot_requests::collect_or_warn(&self.state.mount, &self.state.cache, reader)
    }

    /// Never queries the host: the status of a mount must be available when its host hangs.
    fn status(&self, archive: &Archive) -> Status {
        let fs = archive.file_system();
        let usage = fs.usage();
        let generation = fs.generation().0;
        let DaemonConfig { archive: path, point, options, .. } = &self.config;
        let mount = self.state.mount.numbers;
        let mut status = Status {
            pid: std::process::id(),
            uid: geteuid().as_raw(),
            archive_id: lockbox_terminal::hex(&archive.id()),
            fingerprint: archive.fingerprint().to_string(),
            mount_id: mount.id,
            mount_device: mount.device,
            mount_namespace: self.state.namespace,
            read_only: options.read_only,
            options: options.to_string(),
            since: self.mounted_at,
            generation,
            commits: generation.saturating_sub(self.first_generation),
            dirty_bytes: usage.volatile_bytes,
            log: usage.log,
            open_files: self.state.activity.open_files(),
            open_directories: self.state.activity.open_directories(),
            memory_bytes: usage.memory(),
            memory_limit: options.memory,
            peak_resident_bytes: self.own_status.as_ref().map_or(0, peak_resident_bytes),
            file_bytes: usage.file_bytes,
            used_bytes: usage.used_bytes,
            caches: CacheStatus { cells: usage.chunks, heads: usage.heads, nodes: usage.nodes },
            snapshots: usage.snapshots.map(|snapshots| snapshots.count),
            newest_snapshot: usage.snapshots.and_then(|snapshots| snapshots.newest).map(|newest| newest.seconds),
            schedule: self.state.schedule.as_ref().map(|schedule| schedule.describe()),
            latched: usage.latched,
            fallback: usage.fallback,
            follows: self.state.replica_failure.as_ref().map(|replica_failure| ReplicaStatus {
                committed: fs.commit_time().seconds,
                failure: replica_failure.lock().clone(),
            }),
            ..Status::default()
        };
        status.set_archive(Path::new(path));
        status.set_mount_point(Path::new(point));
        status
    }
}

fn closing_response() -> Response {
    Response::Failed { message: "the archive is being closed".into() }
}

/// Reads the peak of this program alone. getrusage(2) would include the memory of the mount
/// command, which derived a key before it executed the daemon.
fn peak_resident_bytes(own_status: &File) -> u64 {
    let mut text = [0; 4096];
    let length = own_status.read_at(&mut text, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&text[..length]);
    lockbox_host::proc::kib(&text, "VmHWM").unwrap_or(0) << 10
}

/// Backs up a running mount into a file that the client opened, so that the daemon neither resolves
/// the client's paths nor uses its own rights. `verify`: percentage of the file data to read back.
fn run_backup(backups: Backups, whole: bool, verify: Option<u8>, mut client: ClientConnection) -> Result<Response> {
    let Some(file) = client.file.take() else {
        return Err(Error::invalid("the backup request has no file descriptor"));
    };
    let file = BackupDestination::adopt(file)?;
    // A backup without a waiting client must not keep blocks from being freed.
    let watch = &mut |_| if client.is_gone() { Err(Error::Interrupted(0)) } else { Ok(()) };
    let source = backups.pin()?;
    let done = match whole {
        true => Some(source.fill(&file, watch)?),
        false => source.bring_up_to_date(&file, watch)?,
    };
    let verified = verify.filter(|_| done.is_some()).map(|percent| source.verify(&file, percent, watch));
    let verified_bytes = verified.transpose()?;
    let report = |BackupReport { time, generation, copied_bytes, .. }| BackupDone {
        seconds: time.seconds,
        nanos: time.nanos,
        generation: generation.0,
        copied_bytes,
        verified_bytes,
    };
    Ok(Response::BackedUp { done: done.map(report) })
}

#[cfg(test)]
mod tests {
    use lockbox_host::control::{self, SnapshotName, SocketName};
    use lockbox_host::mount_options::MountOptions;
    use parking_lot::Mutex;

    use super::*;
    use crate::snapshot_requests::tests::opened;

    /// Handler of a mount with one writer, a kernel as in [`KernelCache::of_kernel`], and a short
    /// limit for writes to arrive.
    fn handler_of(archive: Archive, drop_waits: bool, connection_dir: Option<&Path>) -> ControlHandler {
        let cache = Arc::new(KernelCache::of_kernel(drop_waits, connection_dir));
        let state = DaemonState {
            activity: Arc::default(),
            mount: Arc::new(MountHandle::of_cache(Arc::clone(&cache))),
            cache,
            schedule: None,
            namespace: 0,
            remote_status: None,
            replica_failure: None,
            foreign_files: ForeignFileUse::default(),
        };
        let config = DaemonConfig {
            archive: "a.lbx".into(),
            point: "/mnt".into(),
            options: MountOptions::default(),
            verbose: false,
            made: false,
        };
        let slot = ArchiveSlot::new(Mutex::new(Some(archive)));
        let handler = ControlHandler::new(config, slot, state, mpsc::channel().0, None);
        ControlHandler { collect_time: Duration::from_millis(10), ..handler }
    }

    #[test]
    fn a_sync_reports_writes_that_did_not_arrive() {
        let (directory, archive) = opened();
        let handler = handler_of(archive, true, Some(directory.path()));
        let reply = |count: &str| {
            std::fs::write(directory.path().join("waiting"), count).unwrap();
            handler.run(|fs| handler.sync(fs))
        };
        assert!(matches!(reply("0\n"), Response::Done));
        let Response::Failed { message } = reply("1\n") else { panic!("it succeeded") };
        assert_eq!(message, "collect cached writes: timed out");
    }

    /// Sends a request through a control socket.
    fn reply_to(handler: ControlHandler, request: &Request) -> Response {
        let runtime = tempfile::tempdir().unwrap();
        let name = SocketName::of_address("a".as_ref());
        let listening = control::listen(runtime.path(), &name).unwrap();
        let _server = listening.serve(move |request, client| handler.handle(&request, client)).unwrap();
        control::send_request(&control::socket_path(runtime.path(), &name), geteuid().as_raw(), request).unwrap()
    }

    /// A snapshot is taken in any case: it deletes nothing.
    #[test]
    fn a_restore_is_refused_while_earlier_writes_are_in_flight() {
        let reply = |request: &Request| {
            let (directory, archive) = opened();
            let snapshots = archive.snapshot_manager();
            snapshots.create(b"one").unwrap();
            std::fs::write(directory.path().join("waiting"), "1\n").unwrap();
            let handler = handler_of(archive, false, Some(directory.path()));
            (reply_to(handler, request), snapshots.list().unwrap().len())
        };
        let name = |name: &[u8]| SnapshotName(name.to_vec());
        assert!(matches!(reply(&Request::SnapshotCreate { name: name(b"two") }), (Response::Done, 2)));
        let request = Request::SnapshotRestore { name: name(b"one"), paths: Vec::new(), to: None };
        let (Response::Refused { message, .. }, 1) = reply(&request) else { panic!("it was restored") };
        assert!(message.starts_with("cannot collect the last writes of programs: "), "{message}");
    }

    #[test]
    fn the_peak_of_this_process_is_read() {
        let peak = peak_resident_bytes(&File::open("/proc/self/status").unwrap());
        assert!((1 << 20..1 << 40).contains(&peak), "{peak}");
        assert_eq!(peak_resident_bytes(&File::open("/proc/self/cmdline").unwrap()), 0);
    }
}
