//! Serves one mounted archive from opening to closing, and stops it in the order that loses nothing.
//!
//! # Order of stopping
//! 1  Unmount, which makes the kernel write its pages to us. A busy mount stays (the answer to a polite stop) or is
//!    detached and served until its last user is gone or the deadline passes.
//! 2  Join the event loops: no request is under way any more.
//! 3  Close the archive: commit, erase, closed record.
//! 4  Take the control socket away, answer those who asked to stop, say good-bye to the process that unmounts, exit.
//!
//! A handler that panics aborts the process (`panic = "abort"` in every profile that ships): no commit can follow.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use fuser::SessionACL;
use lockbox::Error;
use lockbox::archive::{Archive, UnlockedKey};
use lockbox::control::{self, Response};
use lockbox::fs::FileSystem;
use nix::sys::signal::{SigSet, Signal};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::adapter::{Adapter, Shared};
use crate::answers::Answers;
use crate::callers::Callers;
use crate::ending::{self, Ending};
use crate::exit::Failure;
use crate::former;
use crate::idle::{self, Watcher};
use crate::journal::Target;
use crate::mount::{self, Mount};
use crate::mountinfo;
use crate::options::Options;
use crate::pace::Pace;
use crate::sandbox::{self, Reach};
use crate::stop::Place;
use crate::suspend::{self, Slept};
use crate::ticker::Ticker;
use crate::unmounter::Unmounter;
use crate::{kernel, runtime};

/// How long event loops of a mount that failed to start may take to end.
const LAST_REQUESTS: Duration = Duration::from_secs(2);

/// What to serve where. Paths are absolute; they go to the daemon as they are, whatever their encoding.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    pub archive: OsString,
    pub point: OsString,
    pub options: Options,
    pub verbose: bool,
}

impl Task {
    pub fn archive(&self) -> &Path {
        Path::new(&self.archive)
    }

    pub fn point(&self) -> &Path {
        Path::new(&self.point)
    }
}

/// What the thread that waits for the end is told.
pub(crate) enum Event {
    /// The event loops have ended: unmounted by whomever.
    Ended(std::io::Result<()>),
    Signal(Signal),
    Stop {
        lazy: bool,
        answer: Sender<Response>,
    },
    /// Nobody used the mount for the time of `idle=`.
    Idle,
    /// The machine is about to sleep; a closed channel says that the archive is closed.
    Sleep(Sender<Slept>),
}

/// The archive until somebody closes it.
pub(crate) type Slot = Arc<Mutex<Option<Archive>>>;

/// Opens, mounts, calls `ready` (with what the user should know about the opening), serves, calls `ending` and closes.
pub fn serve(
    task: &Task,
    key: &UnlockedKey,
    ready: impl FnOnce(&[String]) -> Result<(), Failure>,
    ending: impl FnOnce(),
) -> Result<(), Failure> {
    let signals = block_signals()?;
    if !lockbox_secrets::lock_memory() {
        tracing::info!("the limit on locked memory does not allow keeping keys out of swap");
    }
    let host: OwnedFd = File::open(task.archive().parent().unwrap_or(Path::new("/")))
        .map_err(|e| Failure::other(format!("cannot open the directory of {}: {e}", task.archive().display())))?
        .into();
    let archive = Archive::open_seen(task.archive(), key, &task.options.open_options(), &task.options.seen_options())
        .map_err(|e| in_use(task, e))?;
    let mut notices: Vec<String> = archive.info()?.fallback.into_iter().collect();
    let fs = Arc::clone(archive.file_system());
    let witness = Arc::clone(archive.witness());
    let slot: Slot = Arc::new(Mutex::new(Some(archive)));

    let (events, inbox) = mpsc::channel();
    let started = start(task, &slot, host, signals, &events);
    let place = started.as_ref().ok().map(|running| Arc::clone(&running.place));
    let served = started.and_then(|running| {
        if task.options.lock_on_suspend {
            notices.extend(watch_sleep(&running, Arc::clone(&fs), &events));
        }
        for sentence in &notices {
            tracing::warn!("{sentence}");
        }
        ready(&notices).inspect_err(|_| {
            running.place.unmount(true);
            ending::wait(&inbox, &*running.place, Duration::ZERO, Some(Instant::now()));
        })?;
        let thread_failed = |e| Failure::system(format!("cannot start a thread: {e}"));
        let (shared, place) = (Arc::clone(&running.shared), Arc::clone(&running.place));
        let _ticker = (!task.options.read_only)
            .then(|| Ticker::start(fs, witness, shared, place, task.options.sync_profile()))
            .transpose()
            .map_err(thread_failed)?;
        let idle = task.options.idle.map(Duration::from_secs);
        let _watcher = idle
            .map(|limit| Watcher::start(limit, idle::since_boot, running.shared, events.clone()))
            .transpose()
            .map_err(thread_failed)?;
        let ended = ending::wait(&inbox, &*running.place, task.options.stop_timeout(), None);
        ending();
        Ok((running.server, ended))
    });
    let archive = slot.lock().take();
    let closed = match served {
        // Who waits to sleep is let go when the archive is closed.
        Ok((server, Ending { stopped, aborted, sleeping: _sleeping })) => {
            let closed = match archive {
                // Event loops that could not be ended may still change the archive: no closed record may follow.
                Some(archive) if aborted => archive.file_system().make_durable().map_err(Failure::from),
                Some(archive) => archive.close().map_err(Failure::from),
                None => Ok(()),
            };
            answer(server, stopped, &closed);
            closed
        }
        Err(failure) => close_unserved(archive, &inbox).and(Err(failure)),
    };
    // Other threads may hold it beyond the end of this one, so that dropping it would say nothing.
    if let Some(place) = place {
        place.dismiss();
    }
    closed
}

/// Closes the archive of a mount that failed to start.
fn close_unserved(archive: Option<Archive>, inbox: &Receiver<Event>) -> Result<(), Failure> {
    // Event loops that were started may still be at work, and nothing may follow a closed record.
    let last = inbox.recv_timeout(LAST_REQUESTS);
    let over = matches!(last, Ok(Event::Ended(Ok(()))) | Err(RecvTimeoutError::Disconnected));
    match archive {
        Some(archive) if over => archive.close()?,
        Some(archive) => archive.file_system().make_durable()?,
        None => {}
    }
    Ok(())
}

/// A sentence for the user when this machine cannot tell that it sleeps.
fn watch_sleep(running: &Running, fs: Arc<FileSystem>, events: &Sender<Event>) -> Option<String> {
    let (shared, place) = (Arc::clone(&running.shared), Arc::clone(&running.place));
    let address = std::env::var("DBUS_SYSTEM_BUS_ADDRESS").ok();
    suspend::start(suspend::Target { fs, shared, place, events: events.clone() }, address)
}

struct Running {
    server: control::Server,
    place: Arc<Place>,
    shared: Arc<Shared>,
}

/// Starts the control socket, the mount, the event loops and the thread that takes signals.
fn start(task: &Task, slot: &Slot, host: OwnedFd, signals: SigSet, events: &Sender<Event>) -> Result<Running, Failure> {
    let info = slot.lock().as_ref().map(Archive::info).transpose()?;
    let id = info.map(|info| info.archive).unwrap_or_default();
    let runtime = runtime::directory()?;
    let fs = slot.lock().as_ref().map(|archive| Arc::clone(archive.file_system()));
    let fs = fs.ok_or_else(|| Failure::other("the archive is closed"))?;
    let shared = Arc::new(Shared::default());
    let profile = task.options.sync_profile();
    let device = Mount {
        source: &task.archive,
        subtype: "lockbox",
        point: task.point(),
        allow_other: task.options.allow_other,
        flags: task.options.mount_flags(),
    }
    .attach()?;
    let own_status = File::open("/proc/self/status").ok();
    let (place, callers, read_ahead) = confine(task, &runtime, Arc::clone(&shared))?;
    let place = Arc::new(place);
    let server = {
        let answers = Answers::new(task.clone(), Arc::clone(slot), Arc::clone(&shared), events.clone(), own_status);
        let served = control::serve(&runtime, &id, move |request| answers.respond(&request));
        served.inspect_err(|_| drop(place.unmount(true)))?
    };
    let Options { access_times, threads, .. } = task.options;
    let thread_failed = |e: std::io::Error| {
        place.unmount(true);
        Failure::system(format!("cannot start a thread: {e}"))
    };
    let pace = Pace::new(threads, device.try_clone().map_err(thread_failed)?);
    let adapter =
        Adapter::new(fs, Arc::clone(&shared), host, callers, profile, access_times, pace).map_err(thread_failed)?;
    let config = kernel::session_config(threads);
    let session = fuser::Session::from_fd(adapter, device, SessionACL::All, config).map_err(|e| {
        place.unmount(true);
        Failure::mount(format!("the kernel did not accept the connection: {e}"))
    })?;
    let _ = shared.notifier.set(session.notifier());
    let ended = events.clone();
    thread::Builder::new()
        .name("session".into())
        .spawn(move || {
            let _ = ended.send(Event::Ended(session.run()));
        })
        .map_err(thread_failed)?;
    // Answered by the event loops.
    task.point().metadata().map_err(|e| {
        place.unmount(true);
        Failure::mount(format!("{} does not answer: {e}", task.point().display()))
    })?;
    if let Some(read_ahead) = read_ahead {
        let _ = read_ahead.raise();
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
    Ok(Running { server, place, shared })
}

/// Finds the mount that was just made and enters the sandbox, with a process outside of it that can unmount and read /proc. Comes before any thread.
/// A machine that refuses a part of it gets its mount all the same, and a line in the log.
fn confine(
    task: &Task,
    runtime: &Path,
    shared: Arc<Shared>,
) -> Result<(Place, Callers, Option<kernel::ReadAhead>), Failure> {
    let lost = |what: String| {
        let _ = mount::unmount(task.point(), true);
        Failure::mount(format!("the mount at {} cannot be found: {what}", task.point().display()))
    };
    let mounted = mountinfo::at(task.point()).map_err(|e| lost(e.to_string()))?;
    let device = mounted.ok_or_else(|| lost("it is not in the table of mounts".into()))?.device;
    // The sandbox leaves nothing of /sys. Only root may: a user's mount reads ahead 128 KiB, and has the kernel's bound of what waits to be written.
    let read_ahead = kernel::ReadAhead::of(device).ok();
    if !task.options.read_only {
        let _ = kernel::bound_write_back(device);
    }
    let place = |unmounter| Place::new(PathBuf::from(&task.point), device, unmounter, shared);
    if !task.options.sandbox {
        return Ok((place(None), Callers::Here, read_ahead));
    }
    let (unmounter, callers) = match Unmounter::start(task.point(), device, &Target::of(&task.options)) {
        Ok(started) => started,
        Err(error) => {
            tracing::warn!("the process that unmounts cannot be started ({error}): the daemon runs without a sandbox");
            return Ok((place(None), Callers::Here, read_ahead));
        }
    };
    let reach = Reach {
        archive: PathBuf::from(&task.archive),
        runtime: runtime.to_path_buf(),
        state: task.options.seen_options().directory,
    };
    match sandbox::enter(&reach) {
        Ok(true) => {}
        Ok(false) => tracing::info!("this kernel has no Landlock: the daemon runs without a sandbox"),
        Err(error) => tracing::warn!("the sandbox was refused: {error}"),
    }
    Ok((place(Some(unmounter)), callers, read_ahead))
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

fn answer(mut server: control::Server, stopped: Vec<Sender<Response>>, closed: &Result<(), Failure>) {
    // Before the answer, so that who waited for it can mount again at once.
    server.close();
    for asked in stopped {
        let _ = asked.send(match closed {
            Ok(()) => Response::Done,
            Err(failure) => Response::Failed { message: failure.message.clone() },
        });
    }
    server.finish();
}

/// Names the holder of an archive when its daemon can be asked.
fn in_use(task: &Task, error: Error) -> Failure {
    match error {
        Error::InUse(_) => former::serving(task.archive()).unwrap_or_else(|| error.into()),
        _ => error.into(),
    }
}
