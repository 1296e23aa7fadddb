//! Life of one mount: wait until the previous daemon has released the archive, open it, mount it,
//! serve it, close it.
//!
//! # Order of starting
//! All files that are needed later are opened before the mount, which may cover them. The daemon
//! must never look below its own mount, where it would wait for its own reply (see
//! [`crate::deadlock_watchdog`]). After the mount it opens no paths except in /proc, /sys and /dev,
//! which no mount covers ([`mount::check_covered_files`]).
//! 1  The fetcher process. The namespaces of the mount, which a process with a second thread cannot
//!    join. The archive with its directory and rollback state, the control socket, and the mount
//!    agent, which connects to the bus.
//! 2  The mount, and the kernel's files for it.
//! 3  The sandbox, before any other thread.
//! 4  The event loops, and the other threads.
//!
//! The order of stopping is described in [`crate::shutdown`].
//!
//! # Wait for the previous daemon
//! The archive's lock is polled: a thread that blocks on it in the kernel could not be cancelled,
//! and would hold the file and take the lock while the daemon opens the archive. The wait depends
//! on the holder:
//!
//! - A daemon that serves a mount is not awaited.
//! - A daemon that reports that it is closing the archive gets the time that closing takes.
//! - Any other holder gets a few seconds: a command that just started runs longer than a user waits
//!   at a prompt.
//!
//! A handler that panics aborts the process (`panic = "abort"` in every release profile): no commit
//! can follow.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use fuser::SessionACL;
use lockbox::Error;
use lockbox::archive::{Archive, OpenOptions, RetentionPolicy};
use lockbox::error::Timestamp;
use lockbox::fs::FileSystem;
use lockbox::keys::UnlockedKey;
use lockbox_host::control::{self, SocketName, Status};
use lockbox_host::daemons::{Holder, holder};
use lockbox_host::mount_options::MountOptions;
use lockbox_host::mounts::{self, Mounted};
use lockbox_host::namespaces::Namespaces;
use lockbox_host::remote::{self, Access};
use lockbox_host::{IN_USE, Program, code, daemons, proc, shown};
use nix::sys::signal::{SigSet, Signal};
use parking_lot::Mutex;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::thread::CapabilitySet;

use crate::adapter::{Activity, Adapter, CurrentVersion, ReplicaFs, ServeOptions, effective_snapshot_dir};
use crate::auto_unmount;
use crate::control_handler::{ControlHandler, DaemonState};
use crate::deadlock_watchdog::DeadlockWatchdog;
use crate::event_loop::LoopScheduler;
use crate::fetcher;
use crate::kernel_cache::KernelCache;
use crate::logging::LogTarget;
use crate::mount::{self, Mount};
use crate::mount_agent::{AgentTasks, MountAgent, ProcessInfoClient};
use crate::replica::{self, ReplicaConfig, ReplicaFailure};
use crate::sandbox::{self, SandboxPaths};
use crate::shutdown::{ArchiveSlot, AttachedMount, MountEvent, MountHandle, RemoteShutdown, Shutdown};
use crate::snapshot_requests;
use crate::ticker::{SnapshotSchedule, Ticker};
use crate::{DaemonConfig, Failure, MountProgram, filter, kernel};

/// Opens, mounts, calls `ready` with notices for the user, serves, calls `ending` and closes.
pub fn serve(
    config: &DaemonConfig,
    key: &UnlockedKey,
    namespaces: Option<Namespaces>,
    ready: impl FnOnce(&[String]) -> Result<(), Failure>,
    ending: impl FnOnce(),
) -> Result<(), Failure> {
    let signals = block_signals()?;
    if !proc::lock_memory() {
        tracing::info!("the limit on locked memory does not allow keeping keys out of swap");
    }
    let path = config.archive();
    let (host, mut place) = if remote::is_remote(path) {
        let MountOptions { read_only, take_over, .. } = config.options;
        let access = if read_only { Access::Read } else { Access::Write { take_over } };
        let log = LogTarget::of(&config.options);
        let fetched = fetcher::start(path, &config.options.remote, access, &log, config.options.sandbox);
        (None, fetched.map_err(|error| remote_in_use_failure(path, take_over, error))?)
    } else {
        let directory = File::open(path.parent().unwrap_or(Path::new("/")))
            .map_err(|e| Failure::other(format!("cannot open the directory of {}: {e}", path.display())))?;
        (Some(directory.into()), remote::ArchiveLocation::file(path))
    };
    // In the namespaces of `lockbox exec` only that command's program sees the mount, on a
    // directory that was created for it.
    let is_alone = namespaces.is_some();
    let command = namespaces.map(Namespaces::join).transpose();
    let command = command.map_err(|e| Failure::mount(format!("cannot enter the namespace of the program: {e}")))?;
    let (options, seen) = (config.options.open_options(), config.options.seen_options());
    let archive = match &config.options.snapshot {
        None => Archive::open_seen(place.source(), key, &options, &seen),
        Some(name) => Archive::open_snapshot(place.source(), key, &options, &seen, name.as_bytes()),
    };
    let archive = archive.map_err(|e| in_use_failure(config, e))?;
    let owner = archive.owner()?.or_else(|| mount::owner_by_path(path)).filter(|_| !is_alone);
    let info = archive.info()?;
    let mut notices: Vec<String> = place.notice().map(str::to_owned).into_iter().chain(info.notices()).collect();
    let replica = config.options.follow.filter(|_| config.options.snapshot.is_none());
    let replica = replica.zip(place.version_follower.take()).map(|(every, fetcher)| {
        let (key, options) = (key.copy(), OpenOptions { read_only: true, ..options });
        ReplicaConfig { fetcher, every, key, options, seen }
    });
    let fs = Arc::clone(archive.file_system());
    let witness = Arc::clone(archive.witness());
    let slot: ArchiveSlot = Arc::new(Mutex::new(Some(archive)));

    let (events, inbox) = mpsc::channel();
    let remote = place
        .spool_request
        .clone()
        .zip(place.fetcher_shutdown.clone())
        .map(|(leave, end)| RemoteShutdown { stop_waiting: end_syncs_before(leave, &fs), stop_fetcher: end });
    let mut end = Shutdown::new(Arc::clone(&slot), inbox, remote);
    let point_owner = mount::required_owner(owner, &config.options);
    let host = ArchiveHost { directory: host, point_owner, remote_status: place.traffic_query.clone(), replica };
    let served = start(config, &slot, host, signals, &events, &mut end).and_then(|running| {
        if config.options.lock_on_suspend {
            let (cache, mount) = (Arc::clone(&running.cache), Arc::clone(&running.mount));
            let file_systems: auto_unmount::FileSystems = match running.current_version.clone() {
                Some(current_version) => Arc::new(move || current_version.file_systems()),
                None => {
                    let fs = Arc::clone(&fs);
                    Arc::new(move || vec![Arc::clone(&fs)])
                }
            };
            let target = auto_unmount::SuspendTarget { file_systems, cache, mount, events: events.clone() };
            notices.extend(auto_unmount::lock_on_suspend(target).err());
        }
        for sentence in &notices {
            tracing::warn!("{sentence}");
        }
        ready(&notices)?;
        let thread_failed = |e| Failure::system(format!("cannot start a thread: {e}"));
        let RunningMount { server, mount, cache, activity, schedule, current_version: _ } = running;
        let scheduled = schedule.zip(snapshot_requests::open_snapshots(&slot));
        let _ticker = (!config.options.read_only)
            .then(|| Ticker::start(fs, witness, cache, mount, config.options.sync_profile(), scheduled))
            .transpose()
            .map_err(thread_failed)?;
        let idle = config.options.idle.map(Duration::from_secs);
        let watch = || {
            let clock = auto_unmount::time_since_boot;
            auto_unmount::watch_activity(idle, command, clock, activity, events.clone())
        };
        let _watcher = (idle.is_some() || is_alone).then(watch).transpose().map_err(thread_failed)?;
        let ended = end.wait(config.options.stop_timeout());
        ending();
        Ok((server, ended))
    });
    match served {
        Ok((server, ended)) => end.close(ended, server),
        Err(failure) => end.abandon(failure),
    }
}

/// Resources at the archive's location.
struct ArchiveHost {
    /// Directory of a local archive file.
    directory: Option<OwnedFd>,
    point_owner: Option<u32>,
    remote_status: Option<remote::TrafficQuery>,
    replica: Option<ReplicaConfig>,
}

struct RunningMount {
    server: control::ControlServer,
    mount: Arc<MountHandle>,
    cache: Arc<KernelCache>,
    activity: Arc<Activity>,
    schedule: Option<Arc<SnapshotSchedule>>,
    current_version: Option<Arc<CurrentVersion>>,
}

/// Resources that are opened before the mount.
struct Preparation {
    listening: control::ControlListener,
    agent: MountAgent,
    process_info: ProcessInfoClient,
    /// `/proc/self/status`.
    own_status: Option<File>,
    /// Mount namespace of this process.
    namespace: u64,
    /// None if it could prove nothing.
    watchdog: Option<DeadlockWatchdog>,
    seen: Option<OwnedFd>,
}

fn prepare(config: &DaemonConfig, host: Option<&OwnedFd>) -> Result<Preparation, Failure> {
    let archive = config.archive();
    let reads_elsewhere = config.options.read_only && remote::is_remote(archive);
    let name = match reads_elsewhere {
        true => Ok(SocketName::of_reader(archive.as_os_str(), config.point())),
        false => daemons::socket_name(archive),
    };
    let name = name.map_err(|e| Failure::other(format!("cannot inspect {}: {e}", archive.display())))?;
    let listening =
        control::listen(&daemons::ready_directory()?, &name).map_err(|error| in_use_failure(config, error))?;
    let own_status = File::open("/proc/self/status").ok();
    let seen = config.options.seen_options().directory.and_then(|path| File::open(path).ok()).map(OwnedFd::from);
    let tasks = AgentTasks { remove_point: config.made, watch_sleeps: config.options.lock_on_suspend };
    let (agent, process_info) = MountAgent::start(config.point(), tasks, &LogTarget::of(&config.options))
        .map_err(|e| Failure::system(format!("cannot start the process that unmounts: {e}")))?;
    let open_path = |path: &Path| openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok();
    let (log, program) = (config.options.log.as_deref().and_then(open_path), open_path(Path::new("/proc/self/exe")));
    let stderr = std::io::stderr();
    // The file may be a mount point itself, as in containers: then its directory lies on another
    // file system. An address cannot be opened.
    let file = open_path(archive);
    let held = [host, file.as_ref(), Some(listening.directory()), seen.as_ref(), log.as_ref(), program.as_ref()];
    let files = held.into_iter().flatten().map(AsFd::as_fd).chain([stderr.as_fd()]);
    let watchdog = DeadlockWatchdog::prepare(files)
        .inspect_err(|error| tracing::info!("the daemon does not watch itself: {error}"))
        .ok();
    let namespace = daemons::mount_namespace();
    Ok(Preparation { listening, agent, process_info, own_status, namespace, watchdog, seen })
}

/// Returns `leave`, which makes barriers succeed without the store, such that no caller of a sync
/// takes that for durability (LIVING-6).
fn end_syncs_before(leave: remote::SpoolRequest, fs: &Arc<FileSystem>) -> remote::SpoolRequest {
    // Not kept beyond the close of the archive.
    let fs = Arc::downgrade(fs);
    Arc::new(move |is_forced| {
        if let Some(fs) = fs.upgrade() {
            fs.end_syncs();
        }
        leave(is_forced);
    })
}

/// Starts the control socket, the mount, the event loops and the signal thread.
fn start(
    config: &DaemonConfig,
    slot: &ArchiveSlot,
    host: ArchiveHost,
    signals: SigSet,
    events: &Sender<MountEvent>,
    end: &mut Shutdown,
) -> Result<RunningMount, Failure> {
    let ArchiveHost { directory: host, point_owner, remote_status, replica } = host;
    let fs = slot.lock().as_ref().map(|archive| Arc::clone(archive.file_system()));
    let fs = fs.ok_or_else(|| Failure::other("the archive is closed"))?;
    let (cache, activity) = (Arc::new(KernelCache::new(replica.is_some())), Arc::new(Activity::default()));
    let profile = config.options.sync_profile();
    let Preparation { listening, agent, process_info, own_status, namespace, watchdog, seen } =
        prepare(config, host.as_ref())?;
    let attachment = Mount {
        source: &config.archive,
        subtype: "lockbox",
        point: config.point(),
        allow_other: config.options.allow_other,
        flags: config.options.mount_flags(),
        point_owner,
    };
    let AttachedMount { handle: mount, connection, read_ahead } =
        MountHandle::attach(&attachment, agent, Arc::clone(&cache))?;
    end.mount = Some(Arc::clone(&mount));
    if config.options.sandbox {
        let tasks = watchdog.as_ref().map(|watchdog| &watchdog.tasks);
        let hosts = watchdog.as_ref().map_or(&[][..], |watchdog| &watchdog.hosts);
        let (sockets, connection) = (listening.directory(), cache.connection_dir());
        confine(&SandboxPaths { sockets, seen: seen.as_ref(), tasks, connection, hosts }, &mount);
    }
    let thread_failed = |e: std::io::Error| Failure::system(format!("cannot start a thread: {e}"));
    // A read-only mount changes nothing.
    let keep = if config.options.read_only { RetentionPolicy::default() } else { config.options.snapshots };
    let schedule = SnapshotSchedule::new(keep, || Timestamp::from_system(SystemTime::now())).map(Arc::new);
    let replica_failure = replica.as_ref().map(|_| ReplicaFailure::default());
    let server = {
        let state = DaemonState {
            activity: Arc::clone(&activity),
            mount: Arc::clone(&mount),
            cache: Arc::clone(&cache),
            schedule: schedule.clone(),
            namespace,
            remote_status,
            replica_failure: replica_failure.clone(),
            foreign_files: watchdog.as_ref().map(|watchdog| watchdog.foreign_files.clone()).unwrap_or_default(),
        };
        let handler = ControlHandler::new(config.clone(), Arc::clone(slot), state, events.clone(), own_status);
        listening.serve(move |request, client| handler.handle(&request, client))?
    };
    let MountOptions { access_times, threads, snapshot_dir: asked, .. } = config.options;
    let serve_options = ServeOptions { profile, access_times, snapshot_dir: effective_snapshot_dir(&fs, asked) };
    let loops = threads.unwrap_or_else(|| kernel::default_threads(false));
    let scheduler = LoopScheduler::new(loops, connection.try_clone().map_err(thread_failed)?);
    let adapter =
        Adapter::new(fs, Arc::clone(&cache), Arc::clone(&activity), host, process_info, serve_options, scheduler)
            .map_err(thread_failed)?;
    let fuse_config = kernel::session_config(loops);
    let ended = events.clone();
    let current_version = match replica.zip(replica_failure) {
        None => {
            serve_requests(adapter, connection, fuse_config, &cache, ended, end)?;
            None
        }
        Some((replica, replica_failure)) => {
            let current_version = Arc::new(CurrentVersion::new(adapter, asked));
            serve_requests(ReplicaFs(Arc::clone(&current_version)), connection, fuse_config, &cache, ended, end)?;
            let (slot, activity) = (Arc::clone(slot), Arc::clone(&activity));
            replica::start(replica, Arc::clone(&current_version), slot, activity, replica_failure)
                .map_err(thread_failed)?;
            Some(current_version)
        }
    };
    mount.probe().map_err(|e| Failure::mount(format!("{} does not answer: {e}", config.point().display())))?;
    if let Some(read_ahead) = read_ahead {
        let _ = read_ahead.raise();
    }
    if let Some(watchdog) = watchdog {
        watchdog.start(Arc::clone(&mount), events.clone()).map_err(thread_failed)?;
    }
    let events = events.clone();
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            while let Ok(signal) = signals.wait() {
                if events.send(MountEvent::Signal(signal)).is_err() {
                    return;
                }
            }
        })
        .map_err(thread_failed)?;
    Ok(RunningMount { server, mount, cache, activity, schedule, current_version })
}

fn serve_requests(
    filesystem: impl fuser::Filesystem + 'static,
    connection: OwnedFd,
    fuse_config: fuser::Config,
    cache: &KernelCache,
    events: Sender<MountEvent>,
    end: &mut Shutdown,
) -> Result<(), Failure> {
    let notifications =
        connection.try_clone().map_err(|e| Failure::system(format!("cannot duplicate the connection: {e}")))?;
    let session = fuser::Session::from_fd(filesystem, connection, SessionACL::All, fuse_config)
        .map_err(|e| Failure::mount(format!("the kernel did not accept the connection: {e}")))?;
    cache.set_notifier(session.notifier(), notifications);
    end.loops_started = true;
    thread::Builder::new()
        .name("session".into())
        .spawn(move || {
            let _ = events.send(MountEvent::LoopsEnded(session.run()));
        })
        .map_err(|e| Failure::system(format!("cannot start a thread: {e}")))?;
    Ok(())
}

/// Enters the sandbox; call it before any other thread starts. If the machine refuses a part of it,
/// the mount continues with a log line.
fn confine(reach: &SandboxPaths<'_>, mount: &MountHandle) {
    match sandbox::enter(reach) {
        Ok(true) => {}
        Ok(false) => tracing::info!("this kernel has no Landlock: the daemon runs without a sandbox"),
        Err(error) => tracing::warn!("the sandbox was refused: {error}"),
    }
    if let Err(error) = sandbox::keep_capabilities(CapabilitySet::IPC_LOCK) {
        tracing::warn!("the daemon keeps its capabilities: {error}");
    }
    if let Err(error) = filter::enter(filter::ConfinedProcess::Daemon, |listener| mount.send_filter_listener(listener))
    {
        tracing::warn!("the filter of system calls was refused: {error}");
    }
}

/// Blocks signals before any thread starts, so that all threads inherit the mask and one can wait
/// for them.
fn block_signals() -> Result<SigSet, Failure> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block().map_err(|e| Failure::other(format!("cannot block signals: {e}")))?;
    Ok(signals)
}

fn remote_in_use_failure(address: &Path, takes_over: bool, error: Error) -> Failure {
    match &error {
        Error::InUse(why) if !takes_over => Failure::new(
            code(&error),
            format!("{why}; the mount option take-over goes on in its place, and ro only reads"),
        ),
        _ => MountProgram::failure(address, error),
    }
}

/// Names the holder of an archive if its daemon answers.
fn in_use_failure(config: &DaemonConfig, error: Error) -> Failure {
    if matches!(error, Error::InUse(_))
        && let Holder::Serves(status) = holder(config.archive())
    {
        return serving_failure(&status);
    }
    error.into()
}

const SHORT_WAIT: Duration = Duration::from_secs(3);
/// Limit for a closing daemon: the last commit takes seconds, erasing deleted data may take more.
const CLOSING_WAIT: Duration = Duration::from_secs(30);
/// Polling interval of the archive's lock.
const POLL: Duration = Duration::from_millis(5);

/// Returns when the archive is free, or after the limit; opening it then reports the holder. Before
/// it waits it calls `print_message`.
///
/// # Errors
/// Fails if a daemon of this user has the archive mounted.
pub fn wait_until_free(archive: &Path, read_only: bool, print_message: impl Fn(&str)) -> Result<(), Failure> {
    // An error of the check is reported when the archive is opened.
    let mut free = || Archive::is_free(archive, read_only).unwrap_or(true);
    wait_with(&|| holder(archive), &mut free, print_message)
}

fn wait_with(
    holder: &dyn Fn() -> Holder,
    free: &mut dyn FnMut() -> bool,
    print_message: impl Fn(&str),
) -> Result<(), Failure> {
    let found = holder();
    if let Holder::Serves(status) = &found
        && (is_mounted(status, &mounts::all()) || daemons::is_out_of_sight(status))
    {
        return Err(serving_failure(status));
    }
    if !free() {
        print_message(
            "the archive is still locked, probably by the daemon of its previous mount: waiting for the lock",
        );
        wait_free(free, SHORT_WAIT, CLOSING_WAIT, || matches!(holder(), Holder::Closes));
    } else if matches!(found, Holder::Nobody) {
        return Ok(());
    }
    // The next daemon reuses the previous one's socket path; after releasing the lock a daemon
    // removes the socket almost at once.
    poll_until(SHORT_WAIT, &mut || !matches!(holder(), Holder::Closes));
    Ok(())
}

/// Waits until the archive is free: up to `moment`, and up to `closing` if the holder then reports
/// that it is closing the archive.
fn wait_free(free: &mut dyn FnMut() -> bool, moment: Duration, closing: Duration, closes: impl Fn() -> bool) {
    if !poll_until(moment, free) && closes() {
        poll_until(closing, free);
    }
}

/// Polls `condition` until it holds or `limit` has passed, and returns whether it holds.
fn poll_until(limit: Duration, condition: &mut dyn FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if start.elapsed() >= limit {
            return false;
        }
        thread::sleep(POLL);
    }
}

/// Checks the mount table: a daemon reports that it serves until it notices that its mount is gone.
fn is_mounted(status: &Status, table: &[Mounted]) -> bool {
    daemons::mount_of(status, table).is_some()
}

fn serving_failure(status: &Status) -> Failure {
    let Status { pid, uid, .. } = status;
    let user = daemons::user_name(*uid);
    let place = match daemons::is_out_of_sight(status) && !is_mounted(status, &mounts::all()) {
        true => "in another namespace, as by 'lockbox exec',",
        false => &format!("at {}", shown(&status.mount_point_path())),
    };
    Failure::new(IN_USE, format!("the archive is already mounted {place} by process {pid} (user {user})"))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_closing_daemon_is_awaited_longer_than_other_holders() {
        let (moment, ever) = (Duration::from_millis(1), Duration::from_secs(600));
        let asked = Cell::new(0);
        let closes = |answer| {
            let asked = &asked;
            move || {
                asked.set(asked.get() + 1);
                answer
            }
        };
        wait_free(&mut || false, moment, ever, closes(false));
        assert_eq!(asked.get(), 1, "it holds the archive for long");
        // Free at the second query.
        wait_free(&mut || asked.get() == 2, moment, ever, closes(true));
        assert_eq!(asked.get(), 2);
        wait_free(&mut || true, ever, ever, closes(true));
        assert_eq!(asked.get(), 2, "a free archive needs no question");
    }

    #[test]
    fn a_free_archive_needs_at_most_two_queries() {
        for (first, most) in [(true, 1), (false, 2)] {
            let asked = Cell::new(0);
            let holder = || {
                asked.set(asked.get() + 1);
                if first || asked.get() > 1 { Holder::Nobody } else { Holder::Closes }
            };
            assert!(wait_with(&holder, &mut || true, |_| panic!("nothing is waited for")).is_ok());
            assert_eq!(asked.get(), most, "first of nobody: {first}");
        }
    }

    #[test]
    fn a_mount_of_another_namespace_is_not_waited_for() {
        let serves = |mount_namespace| {
            let status = Status { mount_namespace, mount_point: "/no/mount".into(), ..Status::default() };
            wait_with(&|| Holder::Serves(Box::new(status.clone())), &mut || true, |_| {})
        };
        let refused = serves(daemons::mount_namespace() + 1).unwrap_err();
        assert!(
            refused.message.contains("mounted in another namespace, as by 'lockbox exec', by process 0"),
            "{refused}"
        );
        for former in [0, daemons::mount_namespace()] {
            assert!(serves(former).is_ok(), "it was taken away");
        }
    }

    #[test]
    fn only_what_the_kernel_still_shows_is_mounted() {
        let status = Status { mount_point: "/mnt/a".into(), ..Status::default() };
        let shown = |file_system: &str, point: &str| {
            [mounts::parse(format!("1 0 0:7 / {point} rw - {file_system} a.lbx rw").as_bytes()).unwrap()]
        };
        assert!(is_mounted(&status, &shown(mounts::TYPE, "/mnt/a")));
        assert!(!is_mounted(&status, &shown(mounts::TYPE, "/mnt/b")));
        assert!(!is_mounted(&status, &shown("tmpfs", "/mnt/a")));
        assert!(!is_mounted(&status, &[]));
    }
}
