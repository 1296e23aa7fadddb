//! Prompts on the terminal without echo.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use zeroize::Zeroizing;

use super::Bytes;
use super::error::{Error, Result};

const TERMINAL: &str = "/dev/tty";
/// Longest line that a terminal passes on, with its end; it drops further input.
const MOST_LINE: usize = 4096;
/// Signals that by default end or stop a program, and would leave the terminal without echo.
const SIGNALS: [Signal; 5] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGTSTP];

/// Prompts on the terminal without echo.
///
/// # Errors
/// Without a terminal.
pub fn ask(question: &str) -> Result<Bytes> {
    let question = lockbox_terminal::sentence(question);
    let terminal = OpenOptions::new().read(true).write(true).open(TERMINAL);
    let line = terminal.and_then(|terminal| NoEchoTerminal::over(&terminal)?.ask(&question));
    let mut line = line.map_err(|e| Error::host("cannot ask on the terminal", &e))?;
    cut_paste_marks(&mut line);
    match line.pop() {
        Some(b'\n') if line.len() + 2 < MOST_LINE => Ok(line),
        Some(b'\n') => Err(Error::source("a terminal passes on no line of this length; use a file")),
        _ => {
            // The question stands there without an end of its line.
            let _ = OpenOptions::new().write(true).open(TERMINAL).and_then(|mut terminal| terminal.write_all(b"\n"));
            Err(Error::source("nothing was typed"))
        }
    }
}

/// Marks that a terminal puts around pasted text, when a program before this one left that mode on.
const PASTE_MARKS: [&[u8]; 2] = [b"\x1b[200~", b"\x1b[201~"];

/// Cuts the marks out where they stand: the user does not see them.
fn cut_paste_marks(line: &mut Bytes) {
    for mark in PASTE_MARKS {
        while let Some(at) = line.windows(mark.len()).position(|bytes| bytes == mark) {
            // Within its own memory; the bytes after the new end are wiped with the rest.
            line.copy_within(at + mark.len().., at);
            let left = line.len() - mark.len();
            line[left..].fill(0);
            line.truncate(left);
        }
    }
}

/// Terminal without echo. Its settings are restored however the question ends, by a signal too.
struct NoEchoTerminal<'a> {
    terminal: &'a File,
    before: Termios,
    /// The signals that this thread had blocked.
    blocked: SigSet,
    signals: SignalFd,
}

impl NoEchoTerminal<'_> {
    fn over(terminal: &File) -> io::Result<NoEchoTerminal<'_>> {
        let before = tcgetattr(terminal)?;
        let blocked = SigSet::thread_get_mask()?;
        // Signals blocked before end nothing: passed on, they would only arrive again and again.
        let watched: SigSet = SIGNALS.into_iter().filter(|signal| !blocked.contains(*signal)).collect();
        let signals = SignalFd::with_flags(&watched, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let blocked = watched.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let quiet = NoEchoTerminal { terminal, before, blocked, signals };
        quiet.silence()?;
        Ok(quiet)
    }

    /// Sets line editing by the terminal and Ctrl-C as a signal, overriding earlier settings.
    fn silence(&self) -> nix::Result<()> {
        let mut quiet = self.before.clone();
        quiet.local_flags.remove(LocalFlags::ECHO);
        quiet.local_flags.insert(LocalFlags::ECHONL | LocalFlags::ICANON | LocalFlags::ISIG);
        tcsetattr(self.terminal, SetArg::TCSANOW, &quiet)
    }

    fn restore(&self) {
        // A terminal that is gone needs nothing.
        let _ = tcsetattr(self.terminal, SetArg::TCSANOW, &self.before);
    }

    /// Returns a line with its end, or the text typed before an end of input.
    fn ask(&self, question: &str) -> io::Result<Bytes> {
        let mut terminal = self.terminal;
        // Allocated in full: a growing buffer leaves copies in memory.
        let mut line = Zeroizing::new(Vec::with_capacity(2 * MOST_LINE));
        let mut part = Zeroizing::new([0; MOST_LINE]);
        terminal.write_all(question.as_bytes())?;
        while !line.ends_with(b"\n") && line.len() < MOST_LINE {
            let mut ready = [
                PollFd::new(terminal.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut ready, PollTimeout::NONE) {
                Err(Errno::EINTR) => continue,
                waited => waited?,
            };
            if let Some(came) = self.signals.read_signal()? {
                self.pass_on(Signal::try_from(came.ssi_signo as i32)?)?; // at most 64
                terminal.write_all(question.as_bytes())?;
                line.clear();
                continue;
            }
            match terminal.read(&mut part[..]) {
                Ok(0) => break,
                Ok(count) => line.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(line)
    }

    /// Applies the default action of a signal; returns when it was ignored, or when a stopped
    /// program continues.
    fn pass_on(&self, signal: Signal) -> io::Result<()> {
        self.restore();
        let mut terminal = self.terminal;
        let _ = terminal.write_all(b"\n");
        let watched = self.blocked.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        raise(signal)?;
        watched.thread_set_mask()?;
        Ok(self.silence()?)
    }
}

impl Drop for NoEchoTerminal<'_> {
    fn drop(&mut self) {
        self.restore();
        let _ = self.blocked.thread_set_mask();
    }
}

/// Returns whether there is a terminal to prompt on, regardless of standard input.
pub(crate) fn has_terminal() -> bool {
    File::open(TERMINAL).is_ok()
}

/// Shows a text of our own, which may be a secret.
///
/// # Errors
/// Without a terminal.
pub(crate) fn show(text: &str) -> Result<()> {
    let terminal = OpenOptions::new().write(true).open(TERMINAL);
    let shown = terminal.and_then(|mut terminal| terminal.write_all(text.as_bytes()));
    shown.map_err(|e| Error::host("cannot ask on the terminal", &e))
}

/// Asks for a line that others may see. None without a terminal.
pub fn ask_openly(question: &str) -> Option<String> {
    let mut terminal = OpenOptions::new().read(true).write(true).open(TERMINAL).ok()?;
    terminal.write_all(lockbox_terminal::sentence(question).as_bytes()).ok()?;
    let mut line = String::new();
    BufReader::new(terminal.take(MOST_LINE as u64)).read_line(&mut line).ok()?;
    Some(line.trim_end_matches(['\n', '\r']).to_owned())
}

/// Prompts for one of two choices, with echo; `no` may have a name too. Returns None without a
/// terminal.
pub fn confirm_openly(question: &str, yes: &str, no: Option<&str>) -> Option<bool> {
    let choice = no.map_or_else(|| format!("[y: {yes}, n]"), |no| format!("[y: {yes}, n: {no}]"));
    Some(is_yes(&ask_openly(&format!("{question} {choice} "))?))
}

pub fn is_yes(answer: &str) -> bool {
    ["y", "yes"].iter().any(|word| answer.trim().eq_ignore_ascii_case(word))
}

/// Prompts a second time, since the input is not shown.
pub(crate) fn again(first: Bytes) -> Result<Bytes> {
    let second = ask("The same again: ")?;
    if *first != *second {
        return Err(Error::source("the two passphrases differ; nothing was changed"));
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use nix::pty::openpty;

    use super::*;

    #[test]
    fn what_marks_a_pasted_text_is_no_part_of_it() {
        for (typed, kept) in [
            (&b"\x1b[200~secret\x1b[201~\n"[..], &b"secret\n"[..]),
            (b"one\x1b[200~two\x1b[201~three\n", b"onetwothree\n"),
            (b"\x1b[201~\x1b[200~\x1b[200~a\n", b"a\n"),
            (b"\x1b[20~a[200~\n", b"\x1b[20~a[200~\n"),
            (b"", b""),
        ] {
            let mut line = Bytes::new(typed.to_vec());
            cut_paste_marks(&mut line);
            assert_eq!(&**line, kept);
        }
    }

    #[test]
    fn a_signal_that_was_blocked_before_is_not_asked_about_again_and_again() {
        let pair = openpty(None, None).unwrap();
        let (mut keyboard, terminal) = (File::from(pair.master), File::from(pair.slave));
        let (answer, answered) = mpsc::channel();
        // With the thread goes the signal that is blocked in it.
        thread::spawn(move || {
            SigSet::from(Signal::SIGHUP).thread_block().unwrap();
            raise(Signal::SIGHUP).unwrap();
            let typed = NoEchoTerminal::over(&terminal).and_then(|quiet| quiet.ask("Passphrase: "));
            answer.send(typed.map(|line| line.to_vec()).map_err(|error| error.kind())).unwrap();
        });
        keyboard.write_all(b"secret\n").unwrap();
        assert_eq!(answered.recv_timeout(Duration::from_secs(60)), Ok(Ok(b"secret\n".to_vec())));
    }
}
