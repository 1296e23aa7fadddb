//! Shows a line on the terminal during a long operation.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Delay before the line is shown; shorter operations show nothing.
const PATIENCE: Duration = Duration::from_secs(1);
/// ANSI: carriage return, erase to end of line.
const WIPE: &str = "\r\x1b[K";

/// Line on standard error, erased on drop.
pub struct Spinner(Option<(Sender<()>, JoinHandle<()>)>);

impl Spinner {
    /// Shows that a key is derived. Nothing is shown unless `shows`, which is for persons at a
    /// terminal only.
    pub fn deriving(shows: bool) -> Spinner {
        if shows { Spinner::on(io::stderr(), PATIENCE, "Deriving the key...") } else { Spinner(None) }
    }

    /// Shows a sign of work without known progress; used only when nothing else is written on the
    /// terminal meanwhile.
    pub fn at(sentence: &'static str) -> Spinner {
        if io::stderr().is_terminal() { Spinner::on(io::stderr(), PATIENCE, sentence) } else { Spinner(None) }
    }

    fn on(mut terminal: impl Write + Send + 'static, patience: Duration, sentence: &'static str) -> Spinner {
        let (done, ends) = channel::<()>();
        let started = thread::Builder::new().name("working".into()).spawn(move || {
            if ends.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                // If the terminal is gone there is no reader.
                let _ = terminal.write_all(sentence.as_bytes()).and_then(|()| terminal.flush());
                let _ = ends.recv();
                let _ = terminal.write_all(WIPE.as_bytes()).and_then(|()| terminal.flush());
            }
        });
        // Without a thread nothing is shown, and the work is done nevertheless.
        Spinner(started.ok().map(|thread| (done, thread)))
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some((done, thread)) = self.0.take() {
            drop(done);
            // The next message must not be wiped.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends written bytes to the thread.
    struct Screen(Sender<Vec<u8>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).unwrap();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_takes_long_is_said_and_wiped_when_it_is_done() {
        let (screen, shown) = channel();
        let working = Spinner::on(Screen(screen), Duration::ZERO, "At work...");
        assert_eq!(shown.recv().unwrap(), b"At work...");
        drop(working);
        assert_eq!(shown.iter().collect::<Vec<_>>().concat(), WIPE.as_bytes());
    }

    #[test]
    fn what_is_done_soon_is_not_said() {
        let (screen, shown) = channel();
        drop(Spinner::on(Screen(screen), Duration::MAX, "At work..."));
        assert_eq!(shown.iter().count(), 0);
    }
}
