//! Signals that end a command: the first lets it take back what is not complete, another one ends it at once.
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use lockbox::Error;
use nix::sys::signal::{SigSet, Signal};

use crate::exit::Failure;

/// From its start on SIGINT, SIGTERM and SIGHUP are only noted.
pub(crate) struct Interrupt {
    /// The number of the signal that came, or 0.
    signal: Arc<AtomicU8>,
}

impl Interrupt {
    /// Before any other thread is started, and after the last question: a prompt can be left as usual.
    pub(crate) fn watch() -> Result<Interrupt, Failure> {
        let signal = Arc::new(AtomicU8::new(0));
        let noted = signal.clone();
        on_signal(move |came| {
            if noted.swap(came, Ordering::Relaxed) != 0 {
                std::process::exit((128 + came).into());
            }
        })?;
        Ok(Interrupt { signal })
    }

    /// Ends the operation that asks when a signal came.
    pub(crate) fn check(&self) -> lockbox::Result<()> {
        match self.signal.load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => Err(Error::Interrupted(signal)),
        }
    }
}

/// Calls `act` with the number of each SIGINT, SIGTERM and SIGHUP from now on, in a thread of its own, but for what nohup(1) or a shell had
/// ignored. No other thread may exist yet: it would get the signals.
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

/// Whether a signal was ignored when the program was started.
pub(crate) fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    lockbox_host::proc::bits(&status, "SigIgn").unwrap_or(0) & (1 << (signal - 1)) != 0
}
