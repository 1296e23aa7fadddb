//! Terminal of the user: prompts without echo, for new passphrases too (warns when one is weak, and
//! generates one on request), and a line during long operations.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use zeroize::Zeroizing;
use zxcvbn::zxcvbn;

use super::{Bytes, Error, Result};
use crate::shown;

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
    let mut line = line.map_err(|e| no_answer(&e))?;
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

/// Shows a text of our own, which may be a secret. Errors: without a terminal.
fn show(text: &str) -> Result<()> {
    let terminal = OpenOptions::new().write(true).open(TERMINAL);
    let shown = terminal.and_then(|mut terminal| terminal.write_all(text.as_bytes()));
    shown.map_err(|e| no_answer(&e))
}

/// Returns the reason why a terminal could not be asked.
fn no_answer(error: &io::Error) -> Error {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENXIO | Errno::ENOENT) => {
            Error::source("no terminal for the passphrase prompt; use --passfile FILE")
        }
        _ => Error::host("cannot prompt on the terminal", error),
    }
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
pub(crate) fn confirm_openly(question: &str, yes: &str, no: Option<&str>) -> Option<bool> {
    let choice = no.map_or_else(|| format!("[y: {yes}, n]"), |no| format!("[y: {yes}, n: {no}]"));
    Some(is_yes(&ask_openly(&format!("{question} {choice} "))?))
}

pub fn is_yes(answer: &str) -> bool {
    ["y", "yes"].iter().any(|word| answer.trim().eq_ignore_ascii_case(word))
}

/// Prompts a second time, since the input is not shown.
fn again(first: Bytes) -> Result<Bytes> {
    let second = ask("Repeat it: ")?;
    if *first != *second {
        return Err(Error::source("the two passphrases differ; nothing was changed"));
    }
    Ok(first)
}

/// Guesses below which a passphrase is weak, and zxcvbn's own bound for slow hashes.
///
/// A guess takes a core and some hundred MiB of memory for a second. A machine with 64 cores and
/// enough memory needs five years for this many, and a hundred such machines need three weeks: more
/// than most archives are worth to an attacker with a copy. Users with stronger attackers have a
/// generated passphrase, which cannot be found by trying.
const ENOUGH: u64 = 10_000_000_000;

/// Number of tries for a generated passphrase: it is new to its user.
const TYPING_TRIES: u32 = 3;

/// Reads a new passphrase of the archive at `path`, typed twice. With `advice` a weak one is
/// reported before it is typed again, and may be taken nevertheless; an empty one is replaced by a
/// generated one. Errors: without a terminal, and when the two differ.
pub(crate) fn choose_passphrase(path: &Path, advice: bool) -> Result<Bytes> {
    let name = shown(path);
    if !advice {
        return again(ask(&format!("New passphrase of {name}: "))?);
    }
    loop {
        let typed = ask(&format!("New passphrase of {name} (Enter for a generated one): "))?;
        if typed.is_empty() {
            return generated();
        }
        let is_wanted = |warning| ask_openly(&format!("{warning} Use it anyway? [y/N] ")).is_some_and(|it| is_yes(&it));
        if warning(&typed, path).is_none_or(is_wanted) {
            return again(typed);
        }
    }
}

/// Shows a new passphrase and prompts for it, which proves that it was read.
fn generated() -> Result<Bytes> {
    let words = lockbox::keys::new_passphrase().map_err(|error| Error::source(error.to_string()))?;
    for text in ["Write this passphrase down; it is not shown again:\n\n    ", &words, "\n\n"] {
        show(text)?;
    }
    let mut question = "Type it: ";
    for _ in 0..TYPING_TRIES {
        let typed = ask(question)?;
        if **typed == *words.as_bytes() {
            return Ok(typed);
        }
        question = "It does not match. Type it exactly as shown: ";
    }
    Err(Error::source("the typed passphrase is not the generated one; nothing was changed"))
}

/// Returns the sentence about a weak passphrase of the archive at `path`.
pub(crate) fn warning(typed: &[u8], path: &Path) -> Option<String> {
    let many = match guesses(typed, path) {
        ENOUGH.. => return None,
        1_000_000_000.. => "some billion",
        1_000_000.. => "some million",
        1_000.. => "some thousand",
        _ => "a few",
    };
    Some(format!("This passphrase is weak: {many} guesses find it."))
}

/// Estimates the number of guesses that find a passphrase of the archive at `path`.
///
/// The library copies its input, in parts and in lower case, and does not wipe the copies. They lie
/// in the same memory as the passphrase until its key is derived. The program ends seconds later,
/// leaves no core dump, may be inspected by root alone, and keeps its memory out of swap where it
/// may ([`crate::proc`]).
///
/// The remaining risk is unencrypted swap space, which may hold the copies as it may hold the
/// buffers of the terminal: `lockbox doctor` warns of it. So a weaker estimate of our own would not
/// be safer.
fn guesses(typed: &[u8], path: &Path) -> u64 {
    // Bytes that are not text count by the character.
    let typed = Zeroizing::new(String::from_utf8_lossy(typed).into_owned());
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    zxcvbn(&typed, &[&name]).guesses()
}

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
        if shows { Spinner::at("Deriving the key...") } else { Spinner(None) }
    }

    /// Shows a sign of work without known progress; used only when nothing else is written on the
    /// terminal meanwhile.
    pub fn at(sentence: &'static str) -> Spinner {
        match lockbox_terminal::is_animated() {
            true => Spinner::on(io::stderr(), PATIENCE, sentence),
            false => Spinner(None),
        }
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
        let (answer, answered) = channel();
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

    #[test]
    fn what_guessers_try_first_is_weak_and_what_was_thrown_with_dice_is_not() {
        let guesses = |typed: &str| guesses(typed.as_bytes(), Path::new("Tax records.lbx"));
        for weak in [
            "password",
            "P@ssw0rd1",
            "hunter2",
            "tax records",
            "Tax Records",
            "qwertyuiop",
            "19840512",
            "aaaaaaaaaaaa",
            " ",
            "é",
        ] {
            assert!((1..ENOUGH).contains(&guesses(weak)), "{weak}: {}", guesses(weak));
        }
        for strong in
            ["mural stardust acid pluck", "correct horse battery staple", "vK8#qLw2x!Zp", "Grüße aus Übersee an Ölaf 7"]
        {
            assert!(guesses(strong) >= ENOUGH, "{strong}: {}", guesses(strong));
        }
    }

    #[test]
    fn any_bytes_are_estimated() {
        for odd in
            [&b"\xff\xfe\x00\x80"[..], "\u{200e}日本語\u{1f469}".as_bytes(), &[b'1'; 4000], "ß".repeat(2000).as_bytes()]
        {
            assert!(guesses(odd, Path::new("/")) > 0);
        }
    }

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
