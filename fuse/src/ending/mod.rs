//! The end of a mount has one owner, [`End`]: whoever or whatever ends it, and wherever its start failed, it goes the same way.
//!
//! # Order
//! 1  The mount is taken away, which makes the kernel write its pages to us. A busy one stays (the answer to a polite stop), or is detached
//!    and served until its last user is gone or the deadline passes; then its users are cut off, after the kernel handed over what it caches.
//! 2  The event loops have ended: no request is under way any more.
//! 3  The archive is closed. While it is not certain that the loops have ended, it is only made durable: no closed record may be followed.
//! 4  The process that unmounts is told so, which is what dropping the owner does. Until then it would say in the log that the archive was
//!    not closed.

mod event;
mod handover;
mod place;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use lockbox::archive::Archive;
use lockbox::control::{self, Response};
use lockbox_host::remote;
use nix::sys::signal::Signal;
use parking_lot::Mutex;

use crate::exit::Failure;
use crate::unmounter::Unmounted;

pub(crate) use event::{Event, Slept};
pub(crate) use place::{ARRIVAL, Attached, Place};

/// What those who are cut off have written gets this long to arrive: some tens of MiB that the kernel holds at most, page by page.
const HAND_OVER: Duration = Duration::from_secs(10);

/// How long the event loops of a mount that failed to start may take to end.
const LAST_REQUESTS: Duration = Duration::from_secs(2);

/// Why the kernel refuses to unmount, as far as a daemon knows.
const BUSY: &str = "something below it is open, is a program's working directory, or is mounted over or below it";

/// Reason for which a mount stays when its archive has no name any more.
const LAST_COPY: &str = "the archive's file was removed or replaced, and only this mount still has its content: copy the files \
     out of it, then use 'lockbox umount --abandon'";

/// The archive until the end of its mount takes it.
pub(crate) type Slot = Arc<Mutex<Option<Archive>>>;

/// Owns the end of a mount, from before there is one.
pub(crate) struct End {
    slot: Slot,
    inbox: Receiver<Event>,
    /// None before there is a mount.
    place: Option<Arc<Place>>,
    /// Event loops were started: the archive is theirs until they have ended.
    loops: bool,
    elsewhere: Option<Elsewhere>,
}

/// The end of a mount whose archive is at an address.
pub(crate) struct Elsewhere {
    /// Before the archive is closed: nobody is left who waits for the store's word, and what it does not take is kept on this machine.
    pub(crate) leave: remote::SpoolRequest,
    /// Ends the process that writes there, once the archive is closed: who is told that the mount has ended finds nobody there.
    pub(crate) end: remote::FetcherShutdown,
}

impl End {
    pub(crate) fn of(slot: Slot, inbox: Receiver<Event>, elsewhere: Option<Elsewhere>) -> End {
        End { slot, inbox, place: None, loops: false, elsewhere }
    }

    /// From now on there is a mount.
    pub(crate) fn mounted(&mut self, place: Arc<Place>) {
        self.place = Some(place);
    }

    /// From now on event loops use the archive.
    pub(crate) fn loops_start(&mut self) {
        self.loops = true;
    }

    /// Serves until the event loops have ended; after an order to stop, the mount's users are cut off when `timeout` has passed. What the daemon does by itself and
    /// waits for a store with ends, too: nobody is left who is answered.
    pub(crate) fn wait(&self, timeout: Duration) -> Ending {
        let ending = match &self.place {
            Some(place) => {
                let asked = Asked { leave: &|| self.leave(), is_last_copy: &|| self.is_last_copy() };
                wait(&self.inbox, &**place, timeout, asked)
            }
            None => Ending { stopped: Vec::new(), sleeping: Vec::new(), aborted: false, abandoned: false },
        };
        self.leave();
        ending
    }

    /// Closes the archive of a mount that ended, and tells all who asked for the end how it went.
    pub(crate) fn close(mut self, ending: Ending, mut server: control::Server) -> Result<(), Failure> {
        // Those who hold up the machine's sleep are released when the archive is closed.
        let Ending { stopped, aborted, abandoned, sleeping: _sleeping } = ending;
        let closed = self.close_archive(!aborted);
        // Before the answer, so that who waited for it can mount again at once.
        server.close();
        // Some may have asked after the event loops had ended. A request that is under way still and asks from now on is refused by `Answers`:
        // nobody would take its event.
        let inbox = std::mem::replace(&mut self.inbox, mpsc::channel().1);
        let late = inbox.try_iter().filter_map(|event| match event {
            Event::Stop { answer, .. } => Some(answer),
            _ => None,
        });
        for asked in stopped.into_iter().chain(late) {
            let _ = asked.send(match &closed {
                Ok(0) => Response::Done,
                Ok(bytes) => Response::Unsent { bytes: *bytes },
                // The loss is what was asked for.
                Err(_) if abandoned => Response::Done,
                Err(failure) => Response::Failed { message: failure.message.clone() },
            });
        }
        drop(inbox);
        server.finish();
        closed.map(drop)
    }

    /// Ends a mount that failed to start, however far that came. The answer is `failure`, unless the archive could not be closed either.
    pub(crate) fn abandon(self, failure: Failure) -> Result<(), Failure> {
        if let Some(place) = &self.place {
            place.unmount(true);
            // Without the kernel's file for it the connection ends with this process.
            let _ = cut_off(&**place);
        }
        self.close_archive(!self.loops || self.loops_end()).and(Err(failure))
    }

    /// Returns whether the archive's file has no name any more: its content is lost when this mount
    /// ends.
    fn is_last_copy(&self) -> bool {
        self.slot.lock().as_ref().is_some_and(Archive::is_nameless)
    }

    /// Nobody is left who waits for a store's word.
    fn leave(&self) {
        if let Some(elsewhere) = &self.elsewhere {
            (elsewhere.leave)();
        }
    }

    /// With a closed record once no event loop can change the archive any more, as none may follow that. Gives the bytes that this machine keeps because the store of an
    /// archive at an address did not take them.
    fn close_archive(&self, loops_ended: bool) -> Result<u64, Failure> {
        self.leave();
        // Let go at once: who asks for the status meanwhile is told that the archive is being closed.
        let archive = self.slot.lock().take();
        let closed = match archive {
            Some(archive) if loops_ended => archive.close_telling(),
            Some(archive) => archive.file_system().make_durable().and_then(|()| archive.kept_back()),
            None => Ok(0),
        };
        if let Some(elsewhere) = &self.elsewhere {
            (elsewhere.end)();
        }
        let kept = closed?;
        if kept > 0 {
            tracing::warn!(
                "the store did not take what was written last: {kept} bytes are kept on this machine for the next mount"
            );
        }
        Ok(kept)
    }

    /// Whether the event loops end in time.
    fn loops_end(&self) -> bool {
        let until = Instant::now() + LAST_REQUESTS;
        loop {
            match self.inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Event::Ended(ended)) => return ended.is_ok(),
                Err(error) => return error == RecvTimeoutError::Disconnected,
                Ok(_) => {}
            }
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some(place) = &self.place {
            // Other threads may hold the place beyond the end of this one, so that dropping it would say nothing.
            place.dismiss();
        }
    }
}

/// What ending does to the mount.
pub(crate) trait Mount {
    /// With `detach` also when it is busy.
    fn unmount(&self, detach: bool) -> Unmounted;

    /// Has the kernel write what it caches of open files. Answers whether that ended within `limit`.
    fn hand_over(&self, limit: Duration) -> bool;

    /// Has every request fail, so that the event loops end.
    fn abort(&self) -> io::Result<()>;
}

/// How serving ended.
pub(crate) struct Ending {
    /// Those who asked to stop and want to know how it went.
    pub(crate) stopped: Vec<Sender<Response>>,
    /// Those who hold up the machine's sleep until they are dropped.
    pub(crate) sleeping: Vec<Sender<Slept>>,
    /// Nobody knows that the event loops have ended: the deadline passed and the connection could not be aborted, or a loop failed.
    pub(crate) aborted: bool,
    /// The content of a removed archive was given up by order.
    pub(crate) abandoned: bool,
}

/// Serves until the event loops have ended.
fn wait(inbox: &Receiver<Event>, mount: &impl Mount, timeout: Duration, asked: Asked<'_>) -> Ending {
    let mut course = Course::new(mount, timeout, asked);
    loop {
        let event = match course.deadline {
            Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        if let Some(loops) = course.take(event) {
            let Course { stopped, sleeping, abandoned, .. } = course;
            return Ending { stopped, sleeping, aborted: matches!(loops, Loops::Unknown), abandoned };
        }
    }
}

/// What became of the event loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loops {
    Ended,
    Unknown,
}

/// What has come of the events so far.
struct Course<'a, M> {
    mount: &'a M,
    /// How long users are served after a signal.
    timeout: Duration,
    deadline: Option<Instant>,
    /// The mount went by order of this program.
    ordered: bool,
    /// It went while it was in use, and its users are served.
    detached: bool,
    stopped: Vec<Sender<Response>>,
    sleeping: Vec<Sender<Slept>>,
    /// The content of a removed archive was given up by order.
    abandoned: bool,
    /// Why the last attempt of `idle=` changed nothing, which is logged once and not with each
    /// attempt.
    idle: Option<Unmounted>,
    asked: Asked<'a>,
}

/// Functions of the archive that the end of a mount needs.
#[derive(Clone, Copy)]
struct Asked<'a> {
    /// Called when no program gets an answer any more, so that a loop that waits for a store goes
    /// on.
    leave: &'a dyn Fn(),
    /// Returns whether the mount has the last copy.
    is_last_copy: &'a dyn Fn() -> bool,
}

impl<'a, M> Course<'a, M> {
    /// Of a mount that nobody has asked to end.
    fn new(mount: &'a M, timeout: Duration, asked: Asked<'a>) -> Course<'a, M> {
        let (stopped, sleeping) = (Vec::new(), Vec::new());
        Course {
            mount,
            timeout,
            deadline: None,
            ordered: false,
            detached: false,
            stopped,
            sleeping,
            abandoned: false,
            idle: None,
            asked,
        }
    }
}

impl<M: Mount> Course<'_, M> {
    /// The answer ends the wait.
    fn take(&mut self, event: Result<Event, RecvTimeoutError>) -> Option<Loops> {
        match event {
            Ok(Event::Ended(Ok(()))) | Err(RecvTimeoutError::Disconnected) => {
                if !self.ordered {
                    tracing::warn!(
                        "another program took the mount away or aborted its connection: the archive is closed"
                    );
                }
                return Some(Loops::Ended);
            }
            Ok(Event::Ended(Err(error))) => {
                // One loop may have failed alone, or not even started: the others still answer, and nobody joins them.
                tracing::error!("the connection to the kernel ended: {error}");
                if let Err(error) = cut_off(self.mount) {
                    tracing::warn!("the connection to the kernel cannot be aborted: {error}");
                }
                return Some(Loops::Unknown);
            }
            Ok(Event::Signal(signal)) => self.signal(signal),
            Ok(Event::Stop { lazy, abandon, answer }) => self.stop(lazy, abandon, answer),
            // Told in the log by who found it.
            Ok(Event::WaitsForItself) => self.ordered = true,
            // No deadline for either: what keeps a mount alive that is gone from here, such as a bind of it, is served on.
            Ok(Event::Idle) => self.idle(),
            Ok(Event::Sleep(answer)) => match self.unmount_kept() {
                Unmounted::Gone => self.sleeping.push(answer),
                Unmounted::Busy | Unmounted::Detached => drop(answer.send(Slept::Busy)),
                Unmounted::Failed(message) => {
                    tracing::error!("the archive is not locked before the machine sleeps: {message}");
                    let _ = answer.send(Slept::Busy);
                }
            },
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!("files are still open after {} s: their users are cut off", self.timeout.as_secs());
                let cut = cut_off(self.mount);
                // Where they cannot be cut off, who waits for a store is answered by what is kept on this machine: else nothing ends.
                (self.asked.leave)();
                if cut.is_err() {
                    return Some(Loops::Unknown);
                }
                self.deadline = None;
            }
        }
        None
    }

    fn unmount(&mut self, detach: bool) -> Unmounted {
        let unmounted = self.mount.unmount(detach);
        self.ordered |= matches!(unmounted, Unmounted::Gone | Unmounted::Detached);
        self.detached |= unmounted == Unmounted::Detached;
        unmounted
    }

    /// Ends an unused mount; the watch tries again when that cannot be done.
    fn idle(&mut self) {
        let unmounted = self.unmount_kept();
        if self.idle.as_ref() == Some(&unmounted) {
            return;
        }
        match &unmounted {
            Unmounted::Gone => tracing::warn!("the archive was not used for the time of idle=: unmounted"),
            Unmounted::Failed(message) => tracing::error!("cannot unmount the idle archive: {message}; trying again"),
            Unmounted::Busy | Unmounted::Detached => {
                tracing::warn!("cannot unmount the idle archive: {BUSY}; trying again");
            }
        }
        self.idle = Some(unmounted);
    }

    /// Unmounts politely, unless the content would be lost by that.
    fn unmount_kept(&mut self) -> Unmounted {
        if (self.asked.is_last_copy)() { Unmounted::Failed(LAST_COPY.into()) } else { self.unmount(false) }
    }

    fn signal(&mut self, signal: Signal) {
        tracing::warn!("{signal}: stopping");
        if (self.asked.is_last_copy)() {
            tracing::error!("the archive's file was removed: its content is lost");
        }
        // Whoever sends the signal wants an end: also after a failure the connection is aborted at the deadline.
        if let Unmounted::Failed(message) = self.unmount(true) {
            tracing::error!("{message}");
        }
        // A second signal ends the wait for those who still use it.
        let rest = if self.deadline.is_some() { Duration::ZERO } else { self.timeout };
        self.deadline = Some(Instant::now() + rest);
    }

    fn stop(&mut self, lazy: bool, abandon: bool, answer: Sender<Response>) {
        if (self.asked.is_last_copy)() {
            if !abandon {
                drop(answer.send(Response::Failed { message: LAST_COPY.into() }));
                return;
            }
            self.abandoned = true;
        }
        match self.unmount(lazy) {
            Unmounted::Failed(message) => drop(answer.send(Response::Failed { message })),
            // Its users may take for ever; nobody who asks for a lazy end waits for them.
            Unmounted::Gone | Unmounted::Detached if lazy && self.detached => drop(answer.send(Response::Detached)),
            // Somebody mounted over it, when that was to be lazy.
            Unmounted::Busy => {
                drop(answer.send(Response::Busy { message: BUSY.into() }));
            }
            Unmounted::Gone | Unmounted::Detached => {
                self.deadline.get_or_insert(Instant::now() + self.timeout);
                self.stopped.push(answer);
            }
        }
    }
}

/// The kernel throws away what it still caches when its connection is aborted, so that is taken first.
fn cut_off(mount: &impl Mount) -> io::Result<()> {
    if !mount.hand_over(HAND_OVER) {
        tracing::error!("the kernel did not hand over all that it caches of open files: what is missing is lost");
    }
    mount.abort()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::Write;
    use std::path::PathBuf;
    use std::thread;

    use lockbox::archive::{CreateOptions, KdfCost, OpenOptions};
    use lockbox::control::{Request, SocketName};
    use lockbox::crypto::Passphrase;
    use lockbox::format::ROOT_INO;
    use lockbox::fs::Creator;
    use lockbox::keys;
    use nix::unistd::geteuid;

    use super::*;
    use crate::journal;

    /// Answers with what it is told to and remembers what was asked of it.
    struct Played {
        unmounted: Unmounted,
        /// Told that the loops have ended once the connection is aborted, as the kernel would see to.
        ended: Option<Sender<Event>>,
        asked: RefCell<Vec<&'static str>>,
    }

    impl Mount for Played {
        fn unmount(&self, detach: bool) -> Unmounted {
            self.asked.borrow_mut().push(if detach { "detach" } else { "unmount" });
            self.unmounted.clone()
        }

        fn hand_over(&self, _: Duration) -> bool {
            self.asked.borrow_mut().push("hand over");
            true
        }

        fn abort(&self) -> io::Result<()> {
            self.asked.borrow_mut().push("abort");
            match &self.ended {
                Some(ended) => ended.send(Event::Ended(Ok(()))).map_err(io::Error::other),
                None => Err(io::ErrorKind::NotFound.into()),
            }
        }
    }

    /// A log in memory.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, event: &[u8]) -> io::Result<usize> {
            self.0.lock().write(event)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What is logged of these events unless more is asked for.
    fn logged(script: Vec<Event>) -> String {
        logged_when(Unmounted::Gone, script)
    }

    /// The same of a mount to which each attempt does this.
    fn logged_when(unmounted: Unmounted, script: Vec<Event>) -> String {
        let log = Log::default();
        let writer = log.clone();
        let builder = tracing_subscriber::fmt().with_env_filter(journal::filter(false));
        let subscriber = builder.with_target(false).with_ansi(false).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || played(unmounted, false, 60, script));
        let bytes = log.0.lock().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn the_log_tells_who_ended_the_mount() {
        let ended = || Event::Ended(Ok(()));
        let told = logged(vec![Event::Signal(Signal::SIGTERM), ended()]);
        assert!(told.contains("SIGTERM: stopping") && !told.contains("another program"), "{told}");
        let (answer, _answered) = mpsc::channel();
        assert_eq!(logged(vec![Event::Stop { lazy: false, abandon: false, answer }, ended()]), "");
        let told = logged(vec![ended()]);
        assert!(told.contains("WARN another program took the mount away"), "{told}");
        assert_eq!(logged(vec![Event::WaitsForItself, ended()]), "", "the watch tells");
    }

    /// An attempt comes every minute, and the reason is the same mostly.
    #[test]
    fn an_idle_mount_that_cannot_be_ended_is_logged_once_and_tried_again() {
        let idle = || vec![Event::Idle, Event::Idle, Event::Idle, Event::Ended(Ok(()))];
        for (unmounted, words) in [
            (Unmounted::Busy, "WARN cannot unmount the idle archive: something below it is open"),
            (Unmounted::Failed("no helper".into()), "ERROR cannot unmount the idle archive: no helper; trying again"),
        ] {
            let told = logged_when(unmounted.clone(), idle());
            assert_eq!(told.matches(words).count(), 1, "{told}");
            assert_eq!(played(unmounted, false, 60, idle()).1, ["unmount"; 3]);
        }
    }

    /// What the end was, and what was asked of the mount until then.
    fn played(unmounted: Unmounted, abortable: bool, timeout: u64, script: Vec<Event>) -> (Ending, Vec<&'static str>) {
        let (events, inbox) = mpsc::channel();
        for event in script {
            events.send(event).unwrap();
        }
        let mount = Played { unmounted, ended: abortable.then_some(events), asked: RefCell::default() };
        let asked = Asked { leave: &|| mount.asked.borrow_mut().push("leave"), is_last_copy: &|| false };
        let ending = wait(&inbox, &mount, Duration::from_secs(timeout), asked);
        (ending, mount.asked.into_inner())
    }

    #[test]
    fn who_uses_a_detached_mount_is_cut_off_at_the_deadline_and_keeps_what_was_written() {
        let (ending, asked) = played(Unmounted::Detached, true, 0, vec![Event::Signal(Signal::SIGTERM)]);
        assert_eq!(asked, ["detach", "hand over", "abort", "leave"]);
        assert!(!ending.aborted, "the loops have ended");
    }

    #[test]
    fn a_second_signal_ends_the_wait() {
        let signals = vec![Event::Signal(Signal::SIGTERM), Event::Signal(Signal::SIGTERM)];
        let (_, asked) = played(Unmounted::Detached, true, 86_400, signals);
        assert_eq!(asked, ["detach", "detach", "hand over", "abort", "leave"]);
    }

    #[test]
    fn loops_that_ended_well_leave_the_archive_to_be_closed() {
        let (ending, asked) = played(Unmounted::Gone, false, 60, vec![Event::Ended(Ok(()))]);
        assert!(asked.is_empty() && !ending.aborted);
    }

    #[test]
    fn when_a_loop_fails_the_others_are_cut_off_and_not_taken_for_ended() {
        for abortable in [true, false] {
            let script = vec![Event::Ended(Err(io::ErrorKind::WouldBlock.into()))];
            let (ending, asked) = played(Unmounted::Gone, abortable, 60, script);
            assert_eq!(asked, ["hand over", "abort"]);
            assert!(ending.aborted);
        }
    }

    #[test]
    fn a_lazy_stop_of_a_busy_mount_is_answered_at_once_and_its_users_are_served_until_a_signal_comes() {
        let mount = Played { unmounted: Unmounted::Detached, ended: None, asked: RefCell::default() };
        let timeout = Duration::from_secs(60);
        let mut course = Course::new(&mount, timeout, Asked { leave: &|| {}, is_last_copy: &|| false });
        let (answer, answered) = mpsc::channel();
        let stop = |lazy| Ok(Event::Stop { lazy, abandon: false, answer: answer.clone() });
        assert_eq!(course.take(stop(true)), None);
        assert_eq!((course.deadline, course.stopped.len()), (None, 0));
        assert!(matches!(answered.try_recv(), Ok(Response::Detached)));
        assert_eq!(course.take(Ok(Event::Signal(Signal::SIGTERM))), None);
        let deadline = course.deadline.unwrap();
        assert!(deadline > Instant::now(), "the first signal");
        assert_eq!(course.take(stop(true)), None);
        assert!(matches!(answered.try_recv(), Ok(Response::Detached)));
        assert_eq!(course.take(stop(false)), None);
        assert_eq!((course.deadline, course.stopped.len()), (Some(deadline), 1));
        assert!(answered.try_recv().is_err(), "who wants an end is answered when the archive is closed");
    }

    #[test]
    fn the_last_copy_of_an_archive_goes_by_order_alone() {
        let mount = Played { unmounted: Unmounted::Gone, ended: None, asked: RefCell::default() };
        let mut course = Course::new(&mount, Duration::from_secs(60), Asked { leave: &|| {}, is_last_copy: &|| true });
        let (answer, answered) = mpsc::channel();
        let stop = |lazy, abandon| Ok(Event::Stop { lazy, abandon, answer: answer.clone() });
        for lazy in [false, true] {
            assert_eq!(course.take(stop(lazy, false)), None);
            let Ok(Response::Failed { message }) = answered.try_recv() else { panic!("{lazy}: it is not refused") };
            assert!(message.contains("copy the files out") && message.contains("--abandon"), "{message}");
        }
        let (sleep, slept) = mpsc::channel();
        assert_eq!(course.take(Ok(Event::Sleep(sleep))), None);
        assert_eq!(slept.try_recv(), Ok(Slept::Busy));
        assert_eq!(course.take(Ok(Event::Idle)), None);
        assert!(mount.asked.borrow().is_empty(), "nothing was taken away");
        assert_eq!(course.take(stop(false, true)), None);
        assert_eq!((mount.asked.borrow().clone(), course.stopped.len()), (vec!["unmount"], 1));
        assert_eq!(course.take(Ok(Event::Signal(Signal::SIGTERM))), None);
        assert_eq!(*mount.asked.borrow(), ["unmount", "detach"], "a machine that goes down is not held up");
    }

    /// The slot is what the status is read from. That it is free while the archive is still there is seen in one of many closes.
    #[test]
    fn nobody_who_asks_waits_for_the_close() {
        let place = tempfile::tempdir().unwrap();
        let passphrase = Passphrase::new(b"a passphrase".to_vec());
        let creator = Creator { uid: 0, gid: 0, umask: None };
        let is_seen = |number: u32| {
            let path = place.path().join(format!("{number}.lbx"));
            Archive::create(&path, &passphrase, &CreateOptions { kdf: KdfCost::TEST, creator }).unwrap();
            let key = keys::unlock(&path, &passphrase).unwrap();
            let archive = loop {
                match Archive::open(&path, &key, &OpenOptions::default()) {
                    // A process that another test begins has what was open here, with its lock, until it executes.
                    Err(lockbox::Error::InUse(_)) => thread::yield_now(),
                    opened => break opened.unwrap(),
                }
            };
            let fs = archive.file_system();
            let file = fs.create_and_open(ROOT_INO, b"file", 0o644, creator).unwrap().ino;
            fs.write(file, 0, &vec![1; 4 << 20]).unwrap();
            fs.release(file).unwrap();
            let is_there = Arc::downgrade(fs);
            let slot: Slot = Arc::new(Mutex::new(Some(archive)));
            let asked = Arc::clone(&slot);
            let asking = thread::spawn(move || {
                while is_there.strong_count() > 0 {
                    if asked.try_lock().is_some_and(|archive| archive.is_none()) && is_there.strong_count() > 0 {
                        return true;
                    }
                }
                false
            });
            End::of(slot, mpsc::channel().1, None).close_archive(true).unwrap();
            asking.join().unwrap()
        };
        assert!((0..50).any(is_seen));
    }

    #[test]
    fn who_asks_for_the_end_after_the_event_loops_ended_is_answered() {
        let runtime = tempfile::tempdir().unwrap();
        let (events, inbox) = mpsc::channel();
        let (asks, asked) = mpsc::channel();
        let listening = control::listen(runtime.path(), &SocketName::of_address("a".as_ref())).unwrap();
        let server = listening
            .serve(move |_, _| {
                let (answer, answered) = mpsc::channel();
                events.send(Event::Stop { lazy: false, abandon: false, answer }).unwrap();
                asks.send(()).unwrap();
                answered.recv().unwrap_or(Response::Failed { message: "nobody answered".into() })
            })
            .unwrap();
        let socket: PathBuf = server.socket().into();
        let client = thread::spawn(move || {
            control::ask(&socket, geteuid().as_raw(), &Request::Stop { lazy: false, abandon: false })
        });
        asked.recv().unwrap();
        let (done, ended) = mpsc::channel();
        thread::spawn(move || {
            let ending = Ending { stopped: Vec::new(), sleeping: Vec::new(), aborted: false, abandoned: false };
            End::of(Slot::default(), inbox, None).close(ending, server).unwrap();
            done.send(()).unwrap();
        });
        ended.recv_timeout(Duration::from_secs(60)).expect("the daemon waits for ever for a request that waits for it");
        assert!(matches!(client.join().unwrap(), Ok(Response::Done)));
    }
}
