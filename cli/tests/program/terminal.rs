//! Runs the program with standard error on a terminal whose output the test holds back, as Ctrl-S does: the program waits at the next line that it shows.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{FlowArg, tcflow};
use nix::unistd::Pid;

/// Columns of the terminal: room for a whole line.
const WIDTH: u16 = 200;

/// A program, and what its terminal showed.
pub(crate) struct Shown {
    child: Child,
    terminal: OwnedFd,
    kept: File,
    pub(crate) text: String,
}

impl Shown {
    pub(crate) fn start(command: &mut Command) -> Shown {
        let size = Winsize { ws_row: 24, ws_col: WIDTH, ws_xpixel: 0, ws_ypixel: 0 };
        let pair = openpty(&size, None).unwrap();
        command.env("TERM", "xterm").stderr(Stdio::from(pair.slave.try_clone().unwrap()));
        let child = command.spawn().unwrap();
        // The command keeps a descriptor of its own, with which the terminal would never end.
        command.stderr(Stdio::null());
        Shown { child, terminal: pair.slave, kept: pair.master.into(), text: String::new() }
    }

    /// Lets the program go on line by line until what it shows is so; false when it is done before.
    pub(crate) fn until(&mut self, so: impl Fn(&str) -> bool) -> bool {
        loop {
            tcflow(&self.terminal, FlowArg::TCOON).unwrap();
            while !self.is_shown() {
                if self.child.try_wait().unwrap().is_some() {
                    return false;
                }
            }
            tcflow(&self.terminal, FlowArg::TCOOFF).unwrap();
            self.read();
            if so(&self.text) {
                return true;
            }
        }
    }

    /// Sends the signal, and lets the program go on when it has got it; its exit code and all that the terminal showed.
    pub(crate) fn interrupt(self, signal: Signal) -> (i32, String) {
        got(&self.child, signal);
        self.end()
    }

    /// The exit code, and all that the terminal showed.
    pub(crate) fn end(mut self) -> (i32, String) {
        tcflow(&self.terminal, FlowArg::TCOON).unwrap();
        while self.child.try_wait().unwrap().is_none() {
            if self.is_shown() {
                self.read();
            }
        }
        while self.is_shown() {
            self.read();
        }
        (self.child.wait().unwrap().code().unwrap_or(-1), self.text)
    }

    /// Whether there is something to read; waits a moment for it.
    fn is_shown(&self) -> bool {
        let mut kept = [PollFd::new(self.kept.as_fd(), PollFlags::POLLIN)];
        poll(&mut kept, PollTimeout::from(10_u8)).unwrap() > 0
    }

    fn read(&mut self) {
        let mut piece = [0; 4096];
        let length = self.kept.read(&mut piece).unwrap();
        self.text.push_str(&String::from_utf8_lossy(&piece[..length]));
    }
}

/// Sends the signal to a program that watches for signals, and waits until it has it: its thread for them took it, and waits again. A program that is
/// done gets none.
pub(crate) fn got(child: &Child, signal: Signal) {
    let process = format!("/proc/{}", child.id());
    let read = |path: String| std::fs::read_to_string(path).unwrap_or_default();
    let thread = loop {
        let threads = std::fs::read_dir(format!("{process}/task")).unwrap();
        let names = threads.flatten().map(|thread| thread.path().display().to_string());
        if let Some(thread) = names.into_iter().find(|path| read(format!("{path}/comm")) == "signals\n") {
            break thread;
        }
        let state = read(format!("{process}/stat"));
        if state.rsplit_once(')').is_none_or(|(_, rest)| rest.starts_with(" Z")) {
            return;
        }
        std::thread::yield_now();
    };
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
    let waits = || {
        let status = read(format!("{process}/status"));
        let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap_or("0").trim().to_owned();
        let is_pending = u64::from_str_radix(&pending, 16).unwrap() & (1 << (signal as i32 - 1)) != 0;
        let state = read(format!("{thread}/stat"));
        // Gone with the program, or asleep.
        !is_pending && state.rsplit_once(')').is_none_or(|(_, rest)| !rest.starts_with(" R"))
    };
    while !waits() {
        std::thread::yield_now();
    }
}

/// The last line of what a terminal showed, without what was drawn over.
pub(crate) fn last_line(text: &str) -> &str {
    let text = text.trim_end_matches(['\r', '\n']);
    let line = &text[text.rfind(['\r', '\n']).map_or(0, |at| at + 1)..];
    // Behind the last of what moves and wipes.
    match line.rfind('\u{1b}') {
        Some(at) => line[at..].find(|c: char| c.is_ascii_alphabetic()).map_or("", |end| &line[at + end + 1..]),
        None => line,
    }
}
