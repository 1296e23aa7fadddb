//! Serves one mounted archive, from opening it to the order that ends the mount.
//!
//! # Order of starting
//! Whatever is needed later is opened before the mount is there: the mount may lie over it, and looking below its own mount is what the
//! daemon must never do, since the answer would be its own (see [`crate::watch`]). After the mount no path is opened but in /proc, /sys and
//! /dev, over which nothing is mounted ([`crate::hidden`]).
//! 1  The process that fetches the archive; the namespaces in which the mount is to be, which whoever has a second thread cannot join; the archive with
//!    its directory, what is remembered of it, the control socket, the bus, the process that unmounts.
//! 2  The mount, and the kernel's files for it.
//! 3  The sandbox, before any other thread.
//! 4  The event loops, and whatever else runs.
//!
//! How it stops is said in [`crate::ending`].
//!
//! A handler that panics aborts the process (`panic = "abort"` in every profile that ships): no commit can follow.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, SystemTime};

use fuser::SessionACL;
use lockbox::Error;
use lockbox::archive::{Archive, Keep, OpenOptions};
use lockbox::control::{self, SocketName};
use lockbox::error::Timestamp;
use lockbox::keys::UnlockedKey;
use lockbox_host::namespaces::Namespaces;
use lockbox_host::remote::{self, Access};
use lockbox_host::{Program, code, daemons, harden};
use nix::sys::signal::{SigSet, Signal};
use parking_lot::Mutex;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::thread::CapabilitySet;

use crate::adapter::{Activity, Adapter, Followed, Manner, Shown, snapshot_dir};
use crate::answers::{Answers, Living};
use crate::callers::Callers;
use crate::ending::{Attached, Elsewhere, End, Event, Place, Slot};
use crate::exit::{Failure, Mounting};
use crate::fetcher;
use crate::follow::{self, Failing, Follow};
use crate::former;
use crate::idle::{self, Watcher};
use crate::journal::Target;
use crate::kernel_cache::KernelCache;
use crate::moments;
use crate::mount::Mount;
use crate::options::Options;
use crate::pace::Pace;
use crate::point_owner;
use crate::sandbox::{self, Reach};
use crate::schedule::Schedule;
use crate::suspend;
use crate::task::Task;
use crate::ticker::Ticker;
use crate::unmounter::Unmounter;
use crate::watch::Watch;
use crate::{capabilities, filter, kernel};

/// Opens, mounts, calls `ready` (with what the user should know about the opening), serves, calls `ending` and closes.
pub fn serve(
    task: &Task,
    key: &UnlockedKey,
    namespaces: Option<Namespaces>,
    ready: impl FnOnce(&[String]) -> Result<(), Failure>,
    ending: impl FnOnce(),
) -> Result<(), Failure> {
    let signals = block_signals()?;
    if !harden::lock_memory() {
        tracing::info!("the limit on locked memory does not allow keeping keys out of swap");
    }
    let path = task.archive();
    let (host, mut place) = if remote::is_remote(path) {
        let Options { read_only, take_over, .. } = task.options;
        let access = if read_only { Access::Read } else { Access::Write { take_over } };
        let log = Target::of(&task.options);
        let fetched = fetcher::start(path, &task.options.remote, access, &log, task.options.sandbox);
        (None, fetched.map_err(|error| elsewhere_in_use(path, take_over, error))?)
    } else {
        let directory = File::open(path.parent().unwrap_or(Path::new("/")))
            .map_err(|e| Failure::other(format!("cannot open the directory of {}: {e}", path.display())))?;
        (Some(directory.into()), remote::ArchiveLocation::file(path))
    };
    // In the namespaces of `lockbox exec` the mount is seen by that command's program alone, at a directory that was made for it.
    let is_alone = namespaces.is_some();
    if let Some(namespaces) = namespaces {
        namespaces.join().map_err(|e| Failure::mount(format!("cannot enter the namespace of the program: {e}")))?;
    }
    let (options, seen) = (task.options.open_options(), task.options.seen_options());
    let archive = match &task.options.snapshot {
        None => Archive::open_seen(place.site(), key, &options, &seen),
        Some(name) => Archive::open_snapshot(place.site(), key, &options, &seen, name.as_bytes()),
    };
    let archive = archive.map_err(|e| in_use(task, e))?;
    let owner = archive.owner()?.or_else(|| point_owner::owner_by_path(path)).filter(|_| !is_alone);
    let info = archive.info()?;
    let mut notices: Vec<String> = place.notice().map(str::to_owned).into_iter().chain(info.notices()).collect();
    let follow = task.options.follow.filter(|_| task.options.snapshot.is_none());
    let follow = follow.zip(place.take_following()).map(|(every, following)| {
        let (key, options) = (key.copy(), OpenOptions { read_only: true, ..options });
        Follow { following, every, key, options, seen }
    });
    let fs = Arc::clone(archive.file_system());
    let witness = Arc::clone(archive.witness());
    let slot: Slot = Arc::new(Mutex::new(Some(archive)));

    let (events, inbox) = mpsc::channel();
    let elsewhere = place.leaving().zip(place.ending()).map(|(leave, end)| Elsewhere { leave, end });
    let mut end = End::of(Arc::clone(&slot), inbox, elsewhere);
    let bus = task.options.lock_on_suspend.then(suspend::connect);
    let point_owner = point_owner::required(owner, &task.options);
    let host = Host { directory: host, point_owner, telling: place.telling(), follow };
    let served = start(task, &slot, host, signals, &events, &mut end).and_then(|running| {
        if let Some(bus) = bus {
            let (cache, place) = (Arc::clone(&running.cache), Arc::clone(&running.place));
            let showing: suspend::Showing = match running.shown.clone() {
                Some(shown) => Arc::new(move || shown.file_systems()),
                None => {
                    let fs = Arc::clone(&fs);
                    Arc::new(move || vec![Arc::clone(&fs)])
                }
            };
            notices.extend(suspend::start(suspend::Target { showing, cache, place, events: events.clone() }, bus));
        }
        for sentence in &notices {
            tracing::warn!("{sentence}");
        }
        ready(&notices)?;
        let thread_failed = |e| Failure::system(format!("cannot start a thread: {e}"));
        let Running { server, place, cache, activity, schedule, shown: _ } = running;
        let scheduled = schedule.zip(moments::of(&slot));
        let _ticker = (!task.options.read_only)
            .then(|| Ticker::start(fs, witness, cache, place, task.options.sync_profile(), scheduled))
            .transpose()
            .map_err(thread_failed)?;
        let idle = task.options.idle.map(Duration::from_secs);
        let _watcher = idle
            .map(|limit| Watcher::start(limit, idle::since_boot, activity, events.clone()))
            .transpose()
            .map_err(thread_failed)?;
        let ended = end.wait(task.options.stop_timeout());
        ending();
        Ok((server, ended))
    });
    match served {
        Ok((server, ended)) => end.close(ended, server),
        Err(failure) => end.abandon(failure),
    }
}

/// Where the archive is.
struct Host {
    /// Of the archive's file, when it is one of this host.
    directory: Option<OwnedFd>,
    /// User that must own the mount point.
    point_owner: Option<u32>,
    telling: Option<remote::TrafficQuery>,
    /// Of one that is shown as it is written elsewhere.
    follow: Option<Follow>,
}

struct Running {
    server: control::Server,
    place: Arc<Place>,
    cache: Arc<KernelCache>,
    activity: Arc<Activity>,
    schedule: Option<Arc<Schedule>>,
    /// Of a mount that follows.
    shown: Option<Arc<Shown>>,
}

/// What is there before the mount is.
struct Prepared {
    listening: control::Listening,
    unmounter: Unmounter,
    callers: Callers,
    /// What /proc says of this process.
    own_status: Option<File>,
    /// The mount namespace.
    namespace: u64,
    /// None where it could prove nothing.
    watch: Option<Watch>,
    seen: Option<OwnedFd>,
}

fn prepare(task: &Task, host: Option<&OwnedFd>) -> Result<Prepared, Failure> {
    let archive = task.archive();
    let reads_elsewhere = task.options.read_only && remote::is_remote(archive);
    let name = match reads_elsewhere {
        true => Ok(SocketName::of_reader(archive.as_os_str(), task.point())),
        false => daemons::socket_name(archive),
    };
    let name = name.map_err(|e| Failure::other(format!("cannot look at {}: {e}", archive.display())))?;
    let listening = control::listen(&daemons::ready_directory()?, &name)?;
    let own_status = File::open("/proc/self/status").ok();
    let seen = task.options.seen_options().directory.and_then(|path| File::open(path).ok()).map(OwnedFd::from);
    let (unmounter, callers) = Unmounter::start(task.point(), task.made, &Target::of(&task.options))
        .map_err(|e| Failure::system(format!("cannot start the process that unmounts: {e}")))?;
    let place = |path: &Path| openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok();
    let (log, program) = (task.options.log.as_deref().and_then(place), place(Path::new("/proc/self/exe")));
    let stderr = std::io::stderr();
    // Somebody may have mounted it there alone, as containers do: then its directory lies elsewhere. An address leads nowhere.
    let file = place(archive);
    let held = [host, file.as_ref(), Some(listening.directory()), seen.as_ref(), log.as_ref(), program.as_ref()];
    let files = held.into_iter().flatten().map(AsFd::as_fd).chain([stderr.as_fd()]);
    let watch =
        Watch::prepare(files).inspect_err(|error| tracing::info!("the daemon does not watch itself: {error}")).ok();
    let namespace = daemons::mount_namespace();
    Ok(Prepared { listening, unmounter, callers, own_status, namespace, watch, seen })
}

/// Starts the control socket, the mount, the event loops and the thread that takes signals.
fn start(
    task: &Task,
    slot: &Slot,
    host: Host,
    signals: SigSet,
    events: &Sender<Event>,
    end: &mut End,
) -> Result<Running, Failure> {
    let Host { directory: host, point_owner, telling, follow } = host;
    let fs = slot.lock().as_ref().map(|archive| Arc::clone(archive.file_system()));
    let fs = fs.ok_or_else(|| Failure::other("the archive is closed"))?;
    let (cache, activity) = (Arc::new(KernelCache::of(follow.is_some())), Arc::new(Activity::default()));
    let profile = task.options.sync_profile();
    let Prepared { listening, unmounter, callers, own_status, namespace, watch, seen } = prepare(task, host.as_ref())?;
    let mount = Mount {
        source: &task.archive,
        subtype: "lockbox",
        point: task.point(),
        allow_other: task.options.allow_other,
        flags: task.options.mount_flags(),
        point_owner,
    };
    let Attached { place, connection, read_ahead } = Place::attach(&mount, unmounter, Arc::clone(&cache))?;
    end.mounted(Arc::clone(&place));
    if task.options.sandbox {
        let tasks = watch.as_ref().map(Watch::tasks);
        confine(&Reach { sockets: listening.directory(), seen: seen.as_ref(), tasks }, &place);
    }
    let thread_failed = |e: std::io::Error| Failure::system(format!("cannot start a thread: {e}"));
    // A mount for reading changes nothing.
    let keep = if task.options.read_only { Keep::default() } else { task.options.snapshots };
    let schedule = Schedule::new(keep, || Timestamp::from_system(SystemTime::now())).map(Arc::new);
    let failing = follow.as_ref().map(|_| Failing::default());
    let server = {
        let living = Living {
            activity: Arc::clone(&activity),
            place: Arc::clone(&place),
            cache: Arc::clone(&cache),
            schedule: schedule.clone(),
            namespace,
            telling,
            following: failing.clone(),
            strangers: watch.as_ref().map(Watch::strangers).unwrap_or_default(),
        };
        let answers = Answers::new(task.clone(), Arc::clone(slot), living, events.clone(), own_status);
        listening.serve(move |request, client| answers.respond(&request, client))?
    };
    let Options { access_times, threads, snapshot_dir: asked, .. } = task.options;
    let manner = Manner { profile, access_times, snapshot_dir: snapshot_dir(&fs, asked) };
    let loops = threads.unwrap_or_else(|| kernel::default_threads(false));
    let pace = Pace::new(loops, connection.try_clone().map_err(thread_failed)?);
    let adapter = Adapter::new(fs, Arc::clone(&cache), Arc::clone(&activity), host, callers, manner, pace)
        .map_err(thread_failed)?;
    let config = kernel::session_config(loops);
    let ended = events.clone();
    let shown = match follow.zip(failing) {
        None => {
            serve_requests(adapter, connection, config, &cache, ended, end)?;
            None
        }
        Some((follow, failing)) => {
            let shown = Arc::new(Shown::new(adapter, asked));
            serve_requests(Followed(Arc::clone(&shown)), connection, config, &cache, ended, end)?;
            let (slot, activity) = (Arc::clone(slot), Arc::clone(&activity));
            follow::start(follow, Arc::clone(&shown), slot, activity, failing).map_err(thread_failed)?;
            Some(shown)
        }
    };
    place.look().map_err(|e| Failure::mount(format!("{} does not answer: {e}", task.point().display())))?;
    if let Some(read_ahead) = read_ahead {
        let _ = read_ahead.raise();
    }
    if let Some(watch) = watch {
        watch.start(Arc::clone(&place), events.clone()).map_err(thread_failed)?;
    }
    let events = events.clone();
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            while let Ok(signal) = signals.wait() {
                if events.send(Event::Signal(signal)).is_err() {
                    return;
                }
            }
        })
        .map_err(thread_failed)?;
    Ok(Running { server, place, cache, activity, schedule, shown })
}

/// Starts the event loops.
fn serve_requests(
    filesystem: impl fuser::Filesystem + 'static,
    connection: OwnedFd,
    config: fuser::Config,
    cache: &KernelCache,
    events: Sender<Event>,
    end: &mut End,
) -> Result<(), Failure> {
    let session = fuser::Session::from_fd(filesystem, connection, SessionACL::All, config)
        .map_err(|e| Failure::mount(format!("the kernel did not accept the connection: {e}")))?;
    cache.connect(session.notifier());
    end.loops_start();
    thread::Builder::new()
        .name("session".into())
        .spawn(move || {
            let _ = events.send(Event::Ended(session.run()));
        })
        .map_err(|e| Failure::system(format!("cannot start a thread: {e}")))?;
    Ok(())
}

/// Comes before any thread. A machine that refuses a part of it gets its mount all the same, and a line in the log.
fn confine(reach: &Reach<'_>, place: &Place) {
    match sandbox::enter(reach) {
        Ok(true) => {}
        Ok(false) => tracing::info!("this kernel has no Landlock: the daemon runs without a sandbox"),
        Err(error) => tracing::warn!("the sandbox was refused: {error}"),
    }
    if let Err(error) = capabilities::keep_only(CapabilitySet::IPC_LOCK) {
        tracing::warn!("the daemon keeps its capabilities: {error}");
    }
    if let Err(error) = filter::enter(filter::Process::Daemon, |listener| place.name_refusals(listener)) {
        tracing::warn!("the filter of system calls was refused: {error}");
    }
}

/// Blocked before any thread starts, so that all inherit it and one thread can wait for them.
fn block_signals() -> Result<SigSet, Failure> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block().map_err(|e| Failure::other(format!("cannot block signals: {e}")))?;
    Ok(signals)
}

/// What kept somebody from coming to an archive at an address.
fn elsewhere_in_use(address: &Path, takes_over: bool, error: Error) -> Failure {
    match &error {
        Error::InUse(why) if !takes_over => Failure::new(
            code(&error),
            format!("{why}; the mount option take-over goes on in its place, and ro only reads"),
        ),
        _ => Mounting::failure(address, error),
    }
}

/// Names the holder of an archive when its daemon can be asked.
fn in_use(task: &Task, error: Error) -> Failure {
    match error {
        Error::InUse(_) => former::serving(task.archive()).unwrap_or_else(|| error.into()),
        _ => error.into(),
    }
}
