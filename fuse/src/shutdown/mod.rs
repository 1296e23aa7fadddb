//! Shutdown of a mount. [`Shutdown`] is its only owner: every cause of an end, and every failed
//! start, takes the same path.
//!
//! # Order
//! 1  The mount is removed. A busy mount stays (the reply to a polite stop), or is detached and
//!    served until its last user is gone or the deadline passes. At the deadline the kernel writes
//!    back its caches, and the connection is aborted. An unmount that failed before is repeated
//!    after that: the abort frees the mount agent, and a dead mount point would remain.
//!
//!    With the last user of a removed mount the kernel aborts the connection, and writes nothing:
//!    it discards its pages, and the requests that no event loop has read. There are none, because
//!    the last user wrote them: close(2) returns when the WRITEs are answered, and so does the end
//!    of a shared mapping since Linux 6.16. Before, a mapping that outlived its descriptor leaves
//!    WRITEs in flight. So there the removal waits for them ([`MountHandle`]). The mount stays if
//!    they do not arrive in time: it then ends at the deadline, or by the next stop request. A
//!    removal by another program still loses them, and so does the last user of a detached mount.
//!
//! 2  The event loops have ended: no request is in flight any more.
//! 3  The archive is closed. If it is not certain that the loops have ended, it is only made
//!    durable, because nothing may follow a close record.
//! 4  The mount agent is dismissed, by dropping the owner. Before that, the agent would log that
//!    the archive was not closed.

mod mount_handle;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use lockbox::archive::Archive;
use lockbox_host::control::{self, Response};
use lockbox_host::remote;
use nix::sys::signal::Signal;
use parking_lot::Mutex;

use crate::Failure;
use crate::mount_agent::UnmountOutcome;

pub(crate) use mount_handle::{AttachedMount, MountHandle};

/// Event that the thread waiting for the end of a mount receives.
pub(crate) enum MountEvent {
    /// The event loops have ended, after any kind of unmount.
    LoopsEnded(io::Result<()>),
    Signal(Signal),
    Stop {
        lazy: bool,
        /// Unmount even if the mount holds the last copy of the archive.
        abandon: bool,
        /// End the mount in seconds, although files are open.
        force: bool,
        answer: Sender<Response>,
    },
    /// The mount ends if it is unused. The reason is for the log.
    Idle(&'static str),
    /// The daemon deadlocked on its own mount, and its connection is aborted.
    Deadlocked,
    /// The machine is about to sleep. The channel is closed when the archive is closed.
    Sleep(Sender<SuspendReply>),
}

/// Negative result of an unmount before a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SuspendReply {
    Busy,
}

/// Time for the writeback before a forced end: the kernel holds some tens of MiB at most, and sends
/// them page by page.
const WRITEBACK_TIME: Duration = Duration::from_secs(10);

/// Time of a forced end for programs to close their files, and then for the writeback. The store
/// has another second ([`remote::SpoolRequest`]), so that all takes less than five.
const FORCED_GRACE: Duration = Duration::from_secs(1);

/// Time for the event loops of a mount that failed to start to end.
const LOOPS_END_TIME: Duration = Duration::from_secs(2);

/// Reason that is reported when the kernel refuses to unmount.
const BUSY: &str = "something below it is open, is a program's working directory, or is mounted over or below it";

/// Reason that is reported when the archive's file has no name any more.
const LAST_COPY: &str = "the archive's file was removed or replaced, and only this mount still has its content: copy the files \
     out of it, then use 'lockbox umount --abandon'";

/// The archive, until the shutdown takes it.
pub(crate) type ArchiveSlot = Arc<Mutex<Option<Archive>>>;

/// Owner of a mount's shutdown, from before the mount exists.
pub(crate) struct Shutdown {
    slot: ArchiveSlot,
    inbox: Receiver<MountEvent>,
    /// None before the mount exists.
    pub(crate) mount: Option<Arc<MountHandle>>,
    /// Event loops were started and use the archive until they have ended.
    pub(crate) loops_started: bool,
    remote: Option<RemoteShutdown>,
}

pub(crate) struct RemoteShutdown {
    /// Called before the archive is closed: a caller that still waits for the store, because the
    /// connection could not be aborted, gets an error, and data that the store does not accept is
    /// kept on this machine.
    pub(crate) stop_waiting: remote::SpoolRequest,
    /// Ends the fetcher process once the archive is closed, before the end of the mount is
    /// reported.
    pub(crate) stop_fetcher: remote::FetcherShutdown,
}

impl Shutdown {
    pub(crate) fn new(slot: ArchiveSlot, inbox: Receiver<MountEvent>, remote: Option<RemoteShutdown>) -> Shutdown {
        Shutdown { slot, inbox, mount: None, loops_started: false, remote }
    }

    /// Serves until the event loops have ended. After a stop request the mount is ended by force
    /// when `timeout` has passed. Background work stops waiting for a remote store too, because no
    /// caller is left.
    pub(crate) fn wait(&self, timeout: Duration) -> ServeOutcome {
        let outcome = match &self.mount {
            Some(mount) => {
                let hooks = ArchiveHooks {
                    stop_waiting: &|forced| self.stop_waiting(forced),
                    is_last_copy: &|| self.is_last_copy(),
                };
                serve_events(&self.inbox, &**mount, timeout, hooks)
            }
            None => ServeOutcome::default(),
        };
        self.stop_waiting(outcome.forced);
        outcome
    }

    /// Closes the archive after the mount has ended, and reports the result to all stop requests.
    pub(crate) fn close(mut self, outcome: ServeOutcome, mut server: control::ControlServer) -> Result<(), Failure> {
        // Suspend delays are released when the archive is closed.
        let ServeOutcome { stopped, aborted, abandoned, sleeping: _sleeping, forced: _ } = outcome;
        let closed = self.close_archive(!aborted);
        // Before the replies, so that a client can mount again at once.
        server.close();
        // Stop requests may have arrived after the event loops ended. `ControlHandler` rejects
        // requests that are still in flight and send an event from now on: no receiver is left.
        let inbox = std::mem::replace(&mut self.inbox, mpsc::channel().1);
        let late = inbox.try_iter().filter_map(|event| match event {
            MountEvent::Stop { answer, .. } => Some(answer),
            _ => None,
        });
        for client in stopped.into_iter().chain(late) {
            let _ = client.send(match &closed {
                Ok(0) => Response::Done,
                Ok(bytes) => Response::Unsent { bytes: *bytes },
                // The user accepted the loss (`--abandon`).
                Err(_) if abandoned => Response::Done,
                Err(failure) => Response::Failed { message: failure.message.clone() },
            });
        }
        drop(inbox);
        server.finish();
        closed.map(drop)
    }

    /// Ends a mount that failed to start, at any stage. Returns `failure`, unless closing the
    /// archive also failed.
    pub(crate) fn abandon(self, failure: Failure) -> Result<(), Failure> {
        if let Some(mount) = &self.mount {
            mount.unmount(true);
            // If the kernel's abort file could not be opened, the connection ends with this
            // process.
            let _ = force_end(&**mount, WRITEBACK_TIME);
        }
        self.close_archive(!self.loops_started || self.wait_for_loops()).and(Err(failure))
    }

    /// Returns whether the archive's file has no name any more, so that its content is lost with
    /// this mount.
    fn is_last_copy(&self) -> bool {
        self.slot.lock().as_ref().is_some_and(Archive::is_unlinked)
    }

    fn stop_waiting(&self, is_forced: bool) {
        if let Some(remote) = &self.remote {
            (remote.stop_waiting)(is_forced);
        }
    }

    /// Closes the archive, with a close record only if no event loop can change it any more.
    /// Returns the bytes that are kept on this machine because the remote store did not accept
    /// them.
    fn close_archive(&self, loops_ended: bool) -> Result<u64, Failure> {
        self.stop_waiting(false);
        // Released at once: meanwhile a status request is answered that the archive is being
        // closed.
        let archive = self.slot.lock().take();
        let closed = match archive {
            Some(archive) if loops_ended => archive.close_telling(),
            Some(archive) => archive.file_system().make_durable().and_then(|()| archive.pending_upload_bytes()),
            None => Ok(0),
        };
        if let Some(remote) = &self.remote {
            (remote.stop_fetcher)();
        }
        let unsent = closed?;
        if unsent > 0 {
            tracing::warn!(
                "the store did not accept the last writes: {unsent} bytes are stored on this machine for the next mount"
            );
        }
        Ok(unsent)
    }

    /// Returns whether the event loops end in time.
    fn wait_for_loops(&self) -> bool {
        let until = Instant::now() + LOOPS_END_TIME;
        loop {
            match self.inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(MountEvent::LoopsEnded(ended)) => return ended.is_ok(),
                Err(error) => return error == RecvTimeoutError::Disconnected,
                Ok(_) => {}
            }
        }
    }
}

impl Drop for Shutdown {
    fn drop(&mut self) {
        if let Some(mount) = &self.mount {
            // Other threads may hold the handle for longer than this owner lives, so dropping it
            // would not dismiss the agent.
            mount.dismiss();
        }
    }
}

pub(crate) trait MountControl {
    /// Unmounts; with `detach` also if the mount is busy.
    fn unmount(&self, detach: bool) -> UnmountOutcome;

    /// Makes the kernel write back its cached pages of open files. Returns whether that finished
    /// within `limit`.
    fn write_back(&self, limit: Duration) -> bool;

    /// Fails every request, so that the event loops end.
    fn abort(&self) -> io::Result<()>;
}

#[derive(Default)]
pub(crate) struct ServeOutcome {
    /// Stop requests that wait for the result.
    pub(crate) stopped: Vec<Sender<Response>>,
    /// Suspend delays, released when they are dropped.
    pub(crate) sleeping: Vec<Sender<SuspendReply>>,
    /// It is unknown whether the event loops have ended: the deadline passed and the connection
    /// could not be aborted, or a loop failed.
    pub(crate) aborted: bool,
    /// The user gave up the content of a removed archive.
    pub(crate) abandoned: bool,
    /// The end was ordered by force.
    pub(crate) forced: bool,
}

/// Handles events until the event loops have ended.
fn serve_events(
    inbox: &Receiver<MountEvent>,
    mount: &impl MountControl,
    timeout: Duration,
    hooks: ArchiveHooks<'_>,
) -> ServeOutcome {
    let mut state = ShutdownState::new(mount, timeout, hooks);
    loop {
        let event = match state.deadline {
            Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        if let Some(ended) = state.handle_event(event) {
            return ServeOutcome { aborted: ended == LoopState::Unknown, ..state.outcome };
        }
    }
}

/// Whether the event loops are known to have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoopState {
    Ended,
    Unknown,
}

struct ShutdownState<'a, M> {
    mount: &'a M,
    /// Time for which a busy mount is served after a stop request.
    timeout: Duration,
    deadline: Option<Instant>,
    /// This program removed the mount.
    ordered: bool,
    /// The mount was removed while it was busy, and its users are still served.
    detached: bool,
    /// `aborted` is set at the end.
    outcome: ServeOutcome,
    /// Result of the last attempt to unmount an unused archive; a repeated one is not logged.
    last_idle: Option<UnmountOutcome>,
    hooks: ArchiveHooks<'a>,
}

#[derive(Clone, Copy)]
struct ArchiveHooks<'a> {
    /// Called when no caller gets a reply any more, so that a loop stops waiting for a remote
    /// store; with `true` in a forced end.
    stop_waiting: &'a dyn Fn(bool),
    /// Returns whether the mount holds the last copy.
    is_last_copy: &'a dyn Fn() -> bool,
}

impl<'a, M> ShutdownState<'a, M> {
    fn new(mount: &'a M, timeout: Duration, hooks: ArchiveHooks<'a>) -> ShutdownState<'a, M> {
        ShutdownState {
            mount,
            timeout,
            deadline: None,
            ordered: false,
            detached: false,
            outcome: ServeOutcome::default(),
            last_idle: None,
            hooks,
        }
    }
}

impl<M: MountControl> ShutdownState<'_, M> {
    /// Handles one event. A returned state ends the wait.
    fn handle_event(&mut self, event: Result<MountEvent, RecvTimeoutError>) -> Option<LoopState> {
        match event {
            Ok(MountEvent::LoopsEnded(Ok(()))) | Err(RecvTimeoutError::Disconnected) => {
                if !self.ordered {
                    tracing::warn!(
                        "another program unmounted the archive or aborted its connection: the archive is closed"
                    );
                }
                return Some(LoopState::Ended);
            }
            Ok(MountEvent::LoopsEnded(Err(error))) => {
                // A single loop may have failed or not started: the others still reply and are not
                // joined.
                tracing::error!("the connection to the kernel ended: {error}");
                if let Err(error) = force_end(self.mount, WRITEBACK_TIME) {
                    tracing::warn!("the connection to the kernel cannot be aborted: {error}");
                }
                return Some(LoopState::Unknown);
            }
            Ok(MountEvent::Signal(received)) => self.handle_signal(received),
            Ok(MountEvent::Stop { lazy, abandon, force, answer }) => self.handle_stop(lazy, abandon, force, answer),
            // The watchdog has already logged it.
            Ok(MountEvent::Deadlocked) => self.ordered = true,
            // No deadline for either: a mount that lives on as a bind mount is still served.
            Ok(MountEvent::Idle(reason)) => self.handle_idle(reason),
            Ok(MountEvent::Sleep(answer)) => match self.unmount_unless_last_copy() {
                UnmountOutcome::Gone => self.outcome.sleeping.push(answer),
                UnmountOutcome::Busy | UnmountOutcome::Detached => drop(answer.send(SuspendReply::Busy)),
                UnmountOutcome::Failed(message) => {
                    tracing::error!("the archive is not locked before the machine sleeps: {message}");
                    let _ = answer.send(SuspendReply::Busy);
                }
            },
            Err(RecvTimeoutError::Timeout) => {
                let (grace, writeback) =
                    if self.outcome.forced { (FORCED_GRACE, FORCED_GRACE) } else { (self.timeout, WRITEBACK_TIME) };
                tracing::warn!("files still open after {} s; forcing unmount", grace.as_secs());
                let cut = force_end(self.mount, writeback);
                // If the connection cannot be aborted, waits for the remote store end with the
                // data kept on this machine; otherwise the mount would never end.
                (self.hooks.stop_waiting)(self.outcome.forced);
                if !self.ordered {
                    self.detach();
                }
                if cut.is_err() {
                    return Some(LoopState::Unknown);
                }
                self.deadline = None;
            }
        }
        None
    }

    fn unmount(&mut self, detach: bool) -> UnmountOutcome {
        let unmounted = self.mount.unmount(detach);
        self.ordered |= matches!(unmounted, UnmountOutcome::Gone | UnmountOutcome::Detached);
        self.detached |= unmounted == UnmountOutcome::Detached;
        unmounted
    }

    /// Unmounts an unused mount; the sender of the event tries again if that fails.
    fn handle_idle(&mut self, reason: &str) {
        if self.ordered {
            return;
        }
        let unmounted = self.unmount_unless_last_copy();
        if self.last_idle.as_ref() == Some(&unmounted) {
            return;
        }
        match &unmounted {
            UnmountOutcome::Gone => tracing::warn!("unmounted: {reason}"),
            UnmountOutcome::Failed(message) => {
                tracing::error!("cannot unmount the unused archive: {message}; trying again")
            }
            UnmountOutcome::Busy | UnmountOutcome::Detached => {
                tracing::warn!("cannot unmount the unused archive: {BUSY}; trying again");
            }
        }
        self.last_idle = Some(unmounted);
    }

    /// Unmounts politely, unless that would lose the last copy.
    fn unmount_unless_last_copy(&mut self) -> UnmountOutcome {
        if (self.hooks.is_last_copy)() { UnmountOutcome::Failed(LAST_COPY.into()) } else { self.unmount(false) }
    }

    fn handle_signal(&mut self, signal: Signal) {
        tracing::warn!("{signal}: stopping");
        if (self.hooks.is_last_copy)() {
            tracing::error!("the archive's file was removed: its content is lost");
        }
        self.detach();
        // A second signal ends the wait at once.
        let rest = if self.deadline.is_some() { Duration::ZERO } else { self.timeout };
        self.deadline = Some(Instant::now() + rest);
    }

    /// Unmounts for a sender that wants an end: the connection is aborted at the deadline even if
    /// unmounting failed.
    fn detach(&mut self) {
        if let UnmountOutcome::Failed(message) = self.unmount(true) {
            tracing::error!("{message}");
        }
    }

    fn handle_stop(&mut self, lazy: bool, abandon: bool, force: bool, answer: Sender<Response>) {
        if (self.hooks.is_last_copy)() {
            if !abandon {
                drop(answer.send(Response::Failed { message: LAST_COPY.into() }));
                return;
            }
            self.outcome.abandoned = true;
        }
        if force {
            tracing::warn!("an end by force was ordered: stopping");
            self.outcome.forced = true;
            let until = Instant::now() + FORCED_GRACE;
            self.detach();
            self.deadline = Some(self.deadline.map_or(until, |at| at.min(until)));
            self.outcome.stopped.push(answer);
            return;
        }
        match self.unmount(lazy) {
            UnmountOutcome::Failed(message) => drop(answer.send(Response::Failed { message })),
            // The remaining users may take for ever, so a lazy stop does not wait for them.
            UnmountOutcome::Gone | UnmountOutcome::Detached if lazy && self.detached => {
                drop(answer.send(Response::Detached))
            }
            // Another mount covers it, in case of a lazy stop.
            UnmountOutcome::Busy => {
                drop(answer.send(Response::Busy { message: BUSY.into() }));
            }
            UnmountOutcome::Gone | UnmountOutcome::Detached => {
                self.deadline.get_or_insert(Instant::now() + self.timeout);
                self.outcome.stopped.push(answer);
            }
        }
    }
}

/// Aborts the connection. The kernel discards cached pages on an abort, so they are written back
/// first.
fn force_end(mount: &impl MountControl, writeback: Duration) -> io::Result<()> {
    if !mount.write_back(writeback) {
        tracing::error!("cached writes may be lost: the kernel did not send all within {} s", writeback.as_secs());
    }
    mount.abort()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::Write;
    use std::thread;

    use lockbox::archive::{CreateOptions, KdfCost, OpenOptions};
    use lockbox::crypto::Passphrase;
    use lockbox::fs::Creator;
    use lockbox::fs::ROOT_INO;
    use lockbox::keys;
    use lockbox_host::control::{Request, SocketName};
    use nix::unistd::geteuid;

    use super::*;
    use crate::logging;

    /// Mount that gives fixed results and records its calls.
    struct FakeMount {
        unmounted: UnmountOutcome,
        /// Reports the end of the loops once the connection is aborted, as the kernel would.
        ended: Option<Sender<MountEvent>>,
        calls: RefCell<Vec<&'static str>>,
    }

    impl MountControl for FakeMount {
        fn unmount(&self, detach: bool) -> UnmountOutcome {
            self.calls.borrow_mut().push(if detach { "detach" } else { "unmount" });
            self.unmounted.clone()
        }

        fn write_back(&self, _: Duration) -> bool {
            self.calls.borrow_mut().push("hand over");
            true
        }

        fn abort(&self) -> io::Result<()> {
            self.calls.borrow_mut().push("abort");
            match &self.ended {
                Some(ended) => ended.send(MountEvent::LoopsEnded(Ok(()))).map_err(io::Error::other),
                None => Err(io::ErrorKind::NotFound.into()),
            }
        }
    }

    /// Log in memory.
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

    /// Returns the log lines of these events at the default level.
    fn logged(script: Vec<MountEvent>) -> String {
        logged_when(UnmountOutcome::Gone, script)
    }

    /// Returns them for a mount on which each unmount has this outcome.
    fn logged_when(unmounted: UnmountOutcome, script: Vec<MountEvent>) -> String {
        let log = Log::default();
        let writer = log.clone();
        let builder = tracing_subscriber::fmt().with_env_filter(logging::level_filter(false));
        let subscriber = builder.with_target(false).with_ansi(false).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || played(unmounted, false, 60, script));
        let bytes = log.0.lock().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn the_log_names_the_cause_of_the_end() {
        let ended = || MountEvent::LoopsEnded(Ok(()));
        let log = logged(vec![MountEvent::Signal(Signal::SIGTERM), ended()]);
        assert!(log.contains("SIGTERM: stopping") && !log.contains("another program"), "{log}");
        let (answer, _answered) = mpsc::channel();
        assert_eq!(logged(vec![MountEvent::Stop { lazy: false, abandon: false, force: false, answer }, ended()]), "");
        let log = logged(vec![ended()]);
        assert!(log.contains("WARN another program unmounted the archive"), "{log}");
        assert_eq!(logged(vec![MountEvent::Deadlocked, ended()]), "", "the watch tells");
    }

    /// An attempt comes at least every minute, mostly with the same reason.
    #[test]
    fn an_idle_mount_that_cannot_be_ended_is_logged_once_and_tried_again() {
        let idle = || MountEvent::Idle("unused");
        let idle_events = || vec![idle(), idle(), idle(), MountEvent::LoopsEnded(Ok(()))];
        for (unmounted, words) in [
            (UnmountOutcome::Busy, "WARN cannot unmount the unused archive: something below it is open"),
            (
                UnmountOutcome::Failed("no helper".into()),
                "ERROR cannot unmount the unused archive: no helper; trying again",
            ),
        ] {
            let log = logged_when(unmounted.clone(), idle_events());
            assert_eq!(log.matches(words).count(), 1, "{log}");
            assert_eq!(played(unmounted, false, 60, idle_events()).1, ["unmount"; 3]);
        }
    }

    /// The programs that have files open in a detached mount may take for ever.
    #[test]
    fn a_detached_mount_is_not_unmounted_again_when_it_is_unused() {
        let (answer, answered) = mpsc::channel();
        let stop = MountEvent::Stop { lazy: true, abandon: false, force: false, answer };
        let script = vec![stop, MountEvent::Idle("unused"), MountEvent::LoopsEnded(Ok(()))];
        assert_eq!(played(UnmountOutcome::Detached, false, 60, script).1, ["detach"]);
        assert!(matches!(answered.recv(), Ok(Response::Detached)));
    }

    /// Returns the outcome, and the calls on the mount until then.
    fn played(
        unmounted: UnmountOutcome,
        abortable: bool,
        timeout: u64,
        script: Vec<MountEvent>,
    ) -> (ServeOutcome, Vec<&'static str>) {
        let (events, inbox) = mpsc::channel();
        for event in script {
            events.send(event).unwrap();
        }
        let mount = FakeMount { unmounted, ended: abortable.then_some(events), calls: RefCell::default() };
        let hooks = ArchiveHooks {
            stop_waiting: &|forced| mount.calls.borrow_mut().push(if forced { "leave soon" } else { "leave" }),
            is_last_copy: &|| false,
        };
        let ending = serve_events(&inbox, &mount, Duration::from_secs(timeout), hooks);
        (ending, mount.calls.into_inner())
    }

    #[test]
    fn a_detached_mount_is_aborted_at_the_deadline_after_writeback() {
        let (ending, calls) = played(UnmountOutcome::Detached, true, 0, vec![MountEvent::Signal(Signal::SIGTERM)]);
        assert_eq!(calls, ["detach", "hand over", "abort", "leave"]);
        assert!(!ending.aborted, "the loops have ended");
    }

    #[test]
    fn a_forced_stop_of_a_busy_mount_ends_it_soon_and_is_answered_when_the_archive_is_closed() {
        for earlier in [None, Some(MountEvent::Signal(Signal::SIGTERM))] {
            let (answer, answered) = mpsc::channel();
            let force = MountEvent::Stop { lazy: false, abandon: false, force: true, answer };
            let was_detached = earlier.is_some();
            let (ending, calls) =
                played(UnmountOutcome::Detached, true, 86_400, earlier.into_iter().chain([force]).collect());
            let expected = ["detach", "detach", "hand over", "abort", "leave soon"];
            assert_eq!(calls, expected[usize::from(!was_detached)..]);
            assert!((ending.forced, ending.aborted, ending.stopped.len()) == (true, false, 1));
            assert!(answered.try_recv().is_err());
        }
    }

    #[test]
    fn an_unmount_that_failed_is_repeated_after_the_abort() {
        let failed = UnmountOutcome::Failed("the agent is busy".into());
        let (ending, calls) = played(failed, true, 0, vec![MountEvent::Signal(Signal::SIGTERM)]);
        assert_eq!(calls, ["detach", "hand over", "abort", "leave", "detach"]);
        assert!(!ending.aborted);
    }

    #[test]
    fn a_second_signal_ends_the_wait() {
        let signals = vec![MountEvent::Signal(Signal::SIGTERM), MountEvent::Signal(Signal::SIGTERM)];
        let (_, calls) = played(UnmountOutcome::Detached, true, 86_400, signals);
        assert_eq!(calls, ["detach", "detach", "hand over", "abort", "leave"]);
    }

    #[test]
    fn loops_that_ended_well_leave_the_archive_to_be_closed() {
        let (ending, calls) = played(UnmountOutcome::Gone, false, 60, vec![MountEvent::LoopsEnded(Ok(()))]);
        assert!(calls.is_empty() && !ending.aborted);
    }

    #[test]
    fn when_a_loop_fails_the_others_are_cut_off_and_not_taken_for_ended() {
        for abortable in [true, false] {
            let script = vec![MountEvent::LoopsEnded(Err(io::ErrorKind::WouldBlock.into()))];
            let (ending, calls) = played(UnmountOutcome::Gone, abortable, 60, script);
            assert_eq!(calls, ["hand over", "abort"]);
            assert!(ending.aborted);
        }
    }

    #[test]
    fn a_lazy_stop_of_a_busy_mount_is_answered_at_once_and_its_users_are_served_until_a_signal_comes() {
        let mount = FakeMount { unmounted: UnmountOutcome::Detached, ended: None, calls: RefCell::default() };
        let timeout = Duration::from_secs(60);
        let mut state =
            ShutdownState::new(&mount, timeout, ArchiveHooks { stop_waiting: &|_| {}, is_last_copy: &|| false });
        let (answer, answered) = mpsc::channel();
        let stop = |lazy| Ok(MountEvent::Stop { lazy, abandon: false, force: false, answer: answer.clone() });
        assert_eq!(state.handle_event(stop(true)), None);
        assert_eq!((state.deadline, state.outcome.stopped.len()), (None, 0));
        assert!(matches!(answered.try_recv(), Ok(Response::Detached)));
        assert_eq!(state.handle_event(Ok(MountEvent::Signal(Signal::SIGTERM))), None);
        let deadline = state.deadline.unwrap();
        assert!(deadline > Instant::now(), "the first signal");
        assert_eq!(state.handle_event(stop(true)), None);
        assert!(matches!(answered.try_recv(), Ok(Response::Detached)));
        assert_eq!(state.handle_event(stop(false)), None);
        assert_eq!((state.deadline, state.outcome.stopped.len()), (Some(deadline), 1));
        assert!(answered.try_recv().is_err(), "who wants an end is answered when the archive is closed");
    }

    #[test]
    fn the_last_copy_of_an_archive_goes_by_order_alone() {
        let mount = FakeMount { unmounted: UnmountOutcome::Gone, ended: None, calls: RefCell::default() };
        let mut state = ShutdownState::new(
            &mount,
            Duration::from_secs(60),
            ArchiveHooks { stop_waiting: &|_| {}, is_last_copy: &|| true },
        );
        let (answer, answered) = mpsc::channel();
        let stop = |lazy, abandon| Ok(MountEvent::Stop { lazy, abandon, force: false, answer: answer.clone() });
        let force = || Ok(MountEvent::Stop { lazy: false, abandon: false, force: true, answer: answer.clone() });
        for order in [stop(false, false), stop(true, false), force()] {
            assert_eq!(state.handle_event(order), None);
            let Ok(Response::Failed { message }) = answered.try_recv() else { panic!("it is not refused") };
            assert!(message.contains("copy the files out") && message.contains("--abandon"), "{message}");
        }
        let (sleep, slept) = mpsc::channel();
        assert_eq!(state.handle_event(Ok(MountEvent::Sleep(sleep))), None);
        assert_eq!(slept.try_recv(), Ok(SuspendReply::Busy));
        assert_eq!(state.handle_event(Ok(MountEvent::Idle("unused"))), None);
        assert!(mount.calls.borrow().is_empty(), "nothing was taken away");
        assert_eq!(state.handle_event(stop(false, true)), None);
        assert_eq!((mount.calls.borrow().clone(), state.outcome.stopped.len()), (vec!["unmount"], 1));
        assert_eq!(state.handle_event(Ok(MountEvent::Signal(Signal::SIGTERM))), None);
        assert_eq!(*mount.calls.borrow(), ["unmount", "detach"], "a machine that goes down is not held up");
    }

    /// The status is read from the slot. One of many closes must show that it is free while the
    /// archive still exists.
    #[test]
    fn a_status_request_does_not_wait_for_the_close() {
        let mount = tempfile::tempdir().unwrap();
        let passphrase = Passphrase::new(b"a passphrase".to_vec());
        let creator = Creator { uid: 0, gid: 0, umask: None };
        let is_seen = |number: u32| {
            let path = mount.path().join(format!("{number}.lbx"));
            Archive::create(&path, &passphrase, &CreateOptions { kdf: KdfCost::TEST, creator }).unwrap();
            let key = keys::unlock(&path, &passphrase).unwrap();
            let archive = crate::tests::open_when_free(&path, &key, &OpenOptions::default());
            let fs = archive.file_system();
            let file = fs.create_and_open(ROOT_INO, b"file", 0o644, creator).unwrap().ino;
            fs.write(file, 0, &vec![1; 4 << 20]).unwrap();
            fs.release(file).unwrap();
            let is_there = Arc::downgrade(fs);
            let slot: ArchiveSlot = Arc::new(Mutex::new(Some(archive)));
            let probed_slot = Arc::clone(&slot);
            let asking = thread::spawn(move || {
                while is_there.strong_count() > 0 {
                    if probed_slot.try_lock().is_some_and(|archive| archive.is_none()) && is_there.strong_count() > 0 {
                        return true;
                    }
                }
                false
            });
            Shutdown::new(slot, mpsc::channel().1, None).close_archive(true).unwrap();
            asking.join().unwrap()
        };
        assert!((0..50).any(is_seen));
    }

    #[test]
    fn who_asks_for_the_end_after_the_event_loops_ended_is_answered() {
        let runtime = tempfile::tempdir().unwrap();
        let (events, inbox) = mpsc::channel();
        let (sent, is_sent) = mpsc::channel();
        let name = SocketName::of_address("a".as_ref());
        let listening = control::listen(runtime.path(), &name).unwrap();
        let server = listening
            .serve(move |_, _| {
                let (answer, answered) = mpsc::channel();
                events.send(MountEvent::Stop { lazy: false, abandon: false, force: false, answer }).unwrap();
                sent.send(()).unwrap();
                answered.recv().unwrap_or(Response::Failed { message: "nobody answered".into() })
            })
            .unwrap();
        let socket = control::socket_path(runtime.path(), &name);
        let client = thread::spawn(move || {
            control::send_request(
                &socket,
                geteuid().as_raw(),
                &Request::Stop { lazy: false, abandon: false, force: false },
            )
        });
        is_sent.recv().unwrap();
        let (done, ended) = mpsc::channel();
        thread::spawn(move || {
            Shutdown::new(ArchiveSlot::default(), inbox, None).close(ServeOutcome::default(), server).unwrap();
            done.send(()).unwrap();
        });
        ended.recv_timeout(Duration::from_secs(60)).expect("the daemon waits for ever for a request that waits for it");
        assert!(matches!(client.join().unwrap(), Ok(Response::Done)));
    }
}
