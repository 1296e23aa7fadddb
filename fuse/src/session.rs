//! Serves one mounted archive from opening to closing, and stops it in the order that loses nothing.
//!
//! # Order of starting
//! Whatever is needed later is opened before the mount is there: the mount may lie over it, and looking below its own mount is what the
//! daemon must never do, since the answer would be its own (see [`crate::watch`]). After the mount no path is opened but in /proc, /sys and
//! /dev, over which nothing is mounted ([`crate::hidden`]).
//! 1  The archive with its directory, what is remembered of it, the control socket, the bus, the process that unmounts.
//! 2  The mount, and the kernel's files for it.
//! 3  The sandbox, before any other thread.
//! 4  The event loops, and whatever else runs.
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
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use fuser::SessionACL;
use lockbox::Error;
use lockbox::archive::Archive;
use lockbox::control::{self, Response};
use lockbox::keys::UnlockedKey;
use lockbox_host::{daemons, harden, mounts};
use nix::sys::signal::{SigSet, Signal};
use parking_lot::Mutex;
use rustix::fs::{CWD, Mode, OFlags, openat};
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
use crate::options::Options;
use crate::pace::Pace;
use crate::sandbox::{self, Reach};
use crate::stop::Place;
use crate::suspend::{self, Slept};
use crate::ticker::Ticker;
use crate::unmounter::Unmounter;
use crate::watch::Watch;
use crate::{filter, kernel};

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
    /// The daemon waits for itself, and its connection is aborted.
    WaitsForItself,
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
    if !harden::lock_memory() {
        tracing::info!("the limit on locked memory does not allow keeping keys out of swap");
    }
    let host: OwnedFd = File::open(task.archive().parent().unwrap_or(Path::new("/")))
        .map_err(|e| Failure::other(format!("cannot open the directory of {}: {e}", task.archive().display())))?
        .into();
    let archive = Archive::open_seen(task.archive(), key, &task.options.open_options(), &task.options.seen_options())
        .map_err(|e| in_use(task, e))?;
    let info = archive.info()?;
    let mut notices: Vec<String> = info.fallback.into_iter().chain(info.mended).collect();
    let fs = Arc::clone(archive.file_system());
    let witness = Arc::clone(archive.witness());
    let slot: Slot = Arc::new(Mutex::new(Some(archive)));

    let (events, inbox) = mpsc::channel();
    let bus = task.options.lock_on_suspend.then(suspend::connect);
    let started = start(task, &slot, host, signals, &events);
    let place = started.as_ref().ok().map(|running| Arc::clone(&running.place));
    let served = started.and_then(|running| {
        if let Some(bus) = bus {
            let (fs, shared, place) = (Arc::clone(&fs), Arc::clone(&running.shared), Arc::clone(&running.place));
            notices.extend(suspend::start(suspend::Target { fs, shared, place, events: events.clone() }, bus));
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
            answer(server, inbox, stopped, &closed);
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

struct Running {
    server: control::Server,
    place: Arc<Place>,
    shared: Arc<Shared>,
}

/// What is there before the mount is.
struct Prepared {
    listening: control::Listening,
    unmounter: Unmounter,
    callers: Callers,
    /// What /proc says of this process.
    own_status: Option<File>,
    /// None where it could prove nothing.
    watch: Option<Watch>,
    seen: Option<OwnedFd>,
}

fn prepare(task: &Task, id: &[u8; 16], host: &OwnedFd) -> Result<Prepared, Failure> {
    let listening = control::listen(&daemons::ready_directory()?, id)?;
    let own_status = File::open("/proc/self/status").ok();
    let seen = task.options.seen_options().directory.and_then(|path| File::open(path).ok()).map(OwnedFd::from);
    let (unmounter, callers) = Unmounter::start(task.point(), &Target::of(&task.options))
        .map_err(|e| Failure::system(format!("cannot start the process that unmounts: {e}")))?;
    let place = |path: &Path| openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok();
    let (log, program) = (task.options.log.as_deref().and_then(place), place(Path::new("/proc/self/exe")));
    let stderr = std::io::stderr();
    let held = [Some(host), Some(listening.directory()), seen.as_ref(), log.as_ref(), program.as_ref()];
    let files = held.into_iter().flatten().map(AsFd::as_fd).chain([stderr.as_fd()]);
    let watch =
        Watch::prepare(files).inspect_err(|error| tracing::info!("the daemon does not watch itself: {error}")).ok();
    Ok(Prepared { listening, unmounter, callers, own_status, watch, seen })
}

/// Starts the control socket, the mount, the event loops and the thread that takes signals.
fn start(task: &Task, slot: &Slot, host: OwnedFd, signals: SigSet, events: &Sender<Event>) -> Result<Running, Failure> {
    let info = slot.lock().as_ref().map(Archive::info).transpose()?;
    let id = info.map(|info| info.archive).unwrap_or_default();
    let fs = slot.lock().as_ref().map(|archive| Arc::clone(archive.file_system()));
    let fs = fs.ok_or_else(|| Failure::other("the archive is closed"))?;
    let shared = Arc::new(Shared::default());
    let profile = task.options.sync_profile();
    let Prepared { listening, unmounter, callers, own_status, watch, seen } = prepare(task, &id, &host)?;
    let device = Mount {
        source: &task.archive,
        subtype: "lockbox",
        point: task.point(),
        allow_other: task.options.allow_other,
        flags: task.options.mount_flags(),
    }
    .attach()?;
    let (place, read_ahead) = found(task, unmounter, Arc::clone(&shared))?;
    let place = Arc::new(place);
    if task.options.sandbox {
        let tasks = watch.as_ref().map(Watch::tasks);
        confine(&Reach { sockets: listening.directory(), seen: seen.as_ref(), tasks });
    }
    let failed = |failure: Failure| {
        place.unmount(true);
        failure
    };
    let thread_failed = |e: std::io::Error| failed(Failure::system(format!("cannot start a thread: {e}")));
    let server = {
        let answers = Answers::new(task.clone(), Arc::clone(slot), Arc::clone(&shared), events.clone(), own_status);
        listening.serve(move |request| answers.respond(&request)).map_err(|error| failed(error.into()))?
    };
    let Options { access_times, threads, .. } = task.options;
    let pace = Pace::new(threads, device.try_clone().map_err(thread_failed)?);
    let adapter =
        Adapter::new(fs, Arc::clone(&shared), host, callers, profile, access_times, pace).map_err(thread_failed)?;
    let config = kernel::session_config(threads);
    let session = fuser::Session::from_fd(adapter, device, SessionACL::All, config)
        .map_err(|e| failed(Failure::mount(format!("the kernel did not accept the connection: {e}"))))?;
    let _ = shared.notifier.set(session.notifier());
    let ended = events.clone();
    thread::Builder::new()
        .name("session".into())
        .spawn(move || {
            let _ = ended.send(Event::Ended(session.run()));
        })
        .map_err(thread_failed)?;
    place.look().map_err(|e| failed(Failure::mount(format!("{} does not answer: {e}", task.point().display()))))?;
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
    Ok(Running { server, place, shared })
}

/// Finds the mount that was just made, and opens what the kernel has for it.
fn found(
    task: &Task,
    mut unmounter: Unmounter,
    shared: Arc<Shared>,
) -> Result<(Place, Option<kernel::ReadAhead>), Failure> {
    let lost = |what: String| {
        let _ = mount::unmount(task.point(), true);
        Failure::mount(format!("the mount at {} cannot be found: {what}", task.point().display()))
    };
    let mounted = mounts::at(task.point()).map_err(|e| lost(e.to_string()))?;
    let device = mounted.ok_or_else(|| lost("it is not in the table of mounts".into()))?.device;
    // Only root may: a user's mount reads ahead 128 KiB, and has the kernel's bound of what waits to be written.
    let read_ahead = kernel::ReadAhead::of(device).ok();
    if !task.options.read_only {
        let _ = kernel::bound_write_back(device);
    }
    unmounter.mounted(device).map_err(|e| lost(format!("the process that unmounts is gone ({e})")))?;
    Ok((Place::new(kernel::open_abort(device).ok(), unmounter, shared), read_ahead))
}

/// Comes before any thread. A machine that refuses a part of it gets its mount all the same, and a line in the log.
fn confine(reach: &Reach<'_>) {
    match sandbox::enter(reach) {
        Ok(true) => {}
        Ok(false) => tracing::info!("this kernel has no Landlock: the daemon runs without a sandbox"),
        Err(error) => tracing::warn!("the sandbox was refused: {error}"),
    }
    if let Err(error) = filter::enter() {
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

/// Tells all who asked for the end how it went; `inbox` also has those who asked after the event loops had ended.
fn answer(
    mut server: control::Server,
    inbox: Receiver<Event>,
    stopped: Vec<Sender<Response>>,
    closed: &Result<(), Failure>,
) {
    // Before the answer, so that who waited for it can mount again at once.
    server.close();
    let late = inbox.try_iter().filter_map(|event| match event {
        Event::Stop { answer, .. } => Some(answer),
        _ => None,
    });
    for asked in stopped.into_iter().chain(late) {
        let _ = asked.send(match closed {
            Ok(()) => Response::Done,
            Err(failure) => Response::Failed { message: failure.message.clone() },
        });
    }
    // A request that is under way still and asks from now on is refused by `Answers`: nobody would take its event.
    drop(inbox);
    server.finish();
}

/// Names the holder of an archive when its daemon can be asked.
fn in_use(task: &Task, error: Error) -> Failure {
    match error {
        Error::InUse(_) => former::serving(task.archive()).unwrap_or_else(|| error.into()),
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use lockbox::control::Request;
    use nix::unistd::geteuid;

    use super::*;

    #[test]
    fn who_asks_for_the_end_after_the_event_loops_ended_is_answered() {
        let runtime = tempfile::tempdir().unwrap();
        let (events, inbox) = mpsc::channel();
        let (asks, asked) = mpsc::channel();
        let listening = control::listen(runtime.path(), &[1; 16]).unwrap();
        let server = listening
            .serve(move |_| {
                let (answer, answered) = mpsc::channel();
                events.send(Event::Stop { lazy: false, answer }).unwrap();
                asks.send(()).unwrap();
                answered.recv().unwrap_or(Response::Failed { message: "nobody answered".into() })
            })
            .unwrap();
        let socket: PathBuf = server.socket().into();
        let client = thread::spawn(move || control::ask(&socket, geteuid().as_raw(), &Request::Stop { lazy: false }));
        asked.recv().unwrap();
        let (done, ended) = mpsc::channel();
        thread::spawn(move || {
            answer(server, inbox, Vec::new(), &Ok(()));
            done.send(()).unwrap();
        });
        ended.recv_timeout(Duration::from_secs(60)).expect("the daemon waits for ever for a request that waits for it");
        assert!(matches!(client.join().unwrap(), Ok(Response::Done)));
    }
}
