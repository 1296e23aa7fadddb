//! Signals that end a command: the first lets it undo incomplete work, a second one ends it at
//! once. Commands with nothing to undo declare that, and end at the first.
use std::io::{self, PipeReader, PipeWriter, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockbox::Error;
use lockbox_host::code;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;

use crate::exit::Failure;
use crate::output::complain;
use crate::progress::Bar;

/// Sentence printed when a signal ends the program.
type Words = Box<dyn Fn() -> String + Send>;

/// From its start on SIGINT, SIGTERM and SIGHUP are only noted.
pub(crate) struct Interrupt {
    noted: Arc<SignalState>,
    /// Readable after a signal has arrived.
    came: PipeReader,
}

struct SignalState {
    /// Number of the signal that arrived, or 0.
    signal: AtomicU8,
    words: Mutex<Option<Words>>,
    came: PipeWriter,
}

impl SignalState {
    fn words(&self) -> MutexGuard<'_, Option<Words>> {
        // Nothing panics while it is held.
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn come(&self, signal: u8) {
        // Held to the end: a command that finishes meanwhile waits, and prints nothing.
        let words = self.words();
        if let Some(words) = &*words {
            complain(&format!("interrupted; {}", words()));
            std::process::exit((128 + signal).into());
        }
        if self.signal.swap(signal, Ordering::Relaxed) != 0 {
            std::process::exit((128 + signal).into());
        }
        // The other end is as old as this one.
        let _ = (&self.came).write(&[0]);
    }
}

impl Interrupt {
    /// Starts the watch, before any other thread and after the last prompt: a prompt can be left as
    /// usual.
    pub(crate) fn watch() -> Result<Interrupt, Failure> {
        let (came, writer) = io::pipe().map_err(|error| Failure::host("cannot watch for signals", &error))?;
        let noted = Arc::new(SignalState { signal: AtomicU8::new(0), words: Mutex::new(None), came: writer });
        let watching = noted.clone();
        on_signal(move |signal| watching.come(signal))?;
        Ok(Interrupt { noted, came })
    }

    /// Returns an error, which ends the calling operation, after a signal.
    pub(crate) fn check(&self) -> lockbox::Result<()> {
        match self.noted.signal.load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => Err(Error::Interrupted(signal)),
        }
    }

    /// Until the returned value is dropped, a signal ends the program at once, even while it waits:
    /// for work that needs no undo.
    pub(crate) fn ends_at_once(
        &self,
        bar: &Bar,
        words: impl Fn() -> String + Send + 'static,
    ) -> Result<ImmediateExit<'_>, Failure> {
        let wipe = bar.wiper();
        let mut held = self.noted.words();
        // It may have come before.
        self.check().map_err(|error| failure(&error, &words()))?;
        *held = Some(Box::new(move || {
            wipe();
            words()
        }));
        Ok(ImmediateExit(&self.noted))
    }

    /// Waits for input or its end. Errors: after a signal.
    pub(crate) fn readable(&self, input: &impl AsFd) -> io::Result<()> {
        let mut either = [input.as_fd(), self.came.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        while let Err(errno) = poll(&mut either, PollTimeout::NONE) {
            if errno != Errno::EINTR {
                return Err(errno.into());
            }
        }
        self.check().map_err(io::Error::other)
    }
}

pub(crate) struct ImmediateExit<'a>(&'a SignalState);

impl Drop for ImmediateExit<'_> {
    fn drop(&mut self) {
        *self.0.words() = None;
    }
}

/// Returns the failure of an interrupted command: the data kept or removed, and how to continue.
pub(crate) fn failure(interrupted: &Error, words: &str) -> Failure {
    Failure::new(code(interrupted), format!("interrupted; {words}"))
}

/// Calls `act` with the number of each SIGINT, SIGTERM and SIGHUP from now on, in a thread of its
/// own, except for signals that nohup(1) or a shell had ignored. No other thread may exist yet: it
/// would get the signals.
pub(crate) fn on_signal(act: impl Fn(u8) + Send + 'static) -> Result<(), Failure> {
    let failed = |why: String| Failure::other(format!("cannot watch for signals: {why}"));
    let wanted = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter();
    let signals: SigSet = wanted.filter(|&signal| !is_ignored(signal as i32)).collect();
    signals.thread_block().map_err(|e| failed(e.desc().into()))?;
    let watch = move || {
        while let Ok(signal) = signals.wait() {
            act(signal as u8); // at most 15
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch).map(drop).map_err(|e| failed(e.to_string()))
}

/// Sends a signal to a process, which may have ended already; numbers below 1 stand for none.
pub(crate) fn pass_on(process: i32, signal: i32) {
    if process > 0
        && let Ok(signal) = Signal::try_from(signal)
    {
        let _ = kill(Pid::from_raw(process), signal);
    }
}

/// Returns whether a signal was ignored when the program was started.
pub(crate) fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    lockbox_host::proc::bits(&status, "SigIgn").unwrap_or(0) & (1 << (signal - 1)) != 0
}
