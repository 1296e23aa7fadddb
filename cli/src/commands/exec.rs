//! `lockbox exec`: runs a program on an archive that is mounted for it and its children alone.
//!
//! # Visibility of the content
//! The mount is made in a private mount namespace, without propagation to others. So it can be
//! reached only by:
//!
//! - processes of that namespace: this command, the daemon, the program and its children;
//! - processes that may inspect these through /proc: processes of root, and of the same user.
//!
//! Processes that have the passphrase or the key (the mount program and the daemon) may be
//! inspected by root alone, as with any mount ([`lockbox_host::namespaces`]).
//!
//! # End of the mount
//! Every descendant of the program is inherited by this process when its parent ends. So when no
//! child is left, the mount has no user left. If this process is killed, a socket of the daemon
//! hangs up ([`Namespaces`]), and the daemon unmounts after ten seconds without use.
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, IsTerminal};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use lockbox_host::namespaces::Namespaces;
use lockbox_host::proc::{self, CoreLimit};
use lockbox_host::secrets::{self, Cache, Sources};
use lockbox_host::{daemons, mounts, shown};
use lockbox_terminal::display;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::mount::MsFlags;
use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getegid, geteuid, mkdtemp};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::commands::{mount, umount};
use crate::exit::{self, Failure, NOT_FOUND, NOT_RUNNABLE};
use crate::{interrupt, output};

/// Run a program with the archive mounted privately for it
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive file
    archive: PathBuf,
    /// Options as in mount(8), such as ro, snapshot=NAME or memory=SIZE
    #[arg(short = 'o', value_name = "OPTIONS", action = clap::ArgAction::Append)]
    options: Vec<String>,
    #[command(flatten)]
    sources: Sources,
    #[command(flatten)]
    cache: Cache,
    /// The program and its arguments; it begins in the root of the archive
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Ends with the exit code of the program, 128 and the signal's number when a signal ended it.
pub(crate) fn run(args: &Args, cores: CoreLimit) -> Result<(), Failure> {
    args.sources.passphrase.check()?;
    // This process sees no secret: the mount program asks for it. Its children have the original
    // limits.
    cores.restore();
    let _ = nix::sys::prctl::set_dumpable(true);
    proc::undo_outliving_size_limits();
    let signals = noted_signals()?;
    let place = TempMountpoint::make()?;
    let (socket, theirs) = UnixStream::pair().map_err(|error| Failure::host("cannot create a socket", &error))?;
    let mut mounting = mount::named_program();
    mounting.arg("--for-program").stdout(OwnedFd::from(theirs));
    for options in &args.options {
        mounting.arg("-o").arg(options);
    }
    mounting.args(args.sources.arguments()).args(args.cache.arguments()).arg("--").arg(&args.archive).arg(&place.0);
    // Content of a pipe or a file is for the program.
    if !io::stdin().is_terminal() {
        mounting.stdin(Stdio::null());
    }
    // Started outside of the namespaces: see [`lockbox_host::namespaces`]. It waits for them before
    // it does anything.
    let mut begun = mounting.spawn().map_err(|error| cannot_run(mounting.get_program(), &error))?;
    // A user namespace is entered by a process with one thread.
    let entered = enter_namespaces().and_then(|namespaces| Ok((namespaces, Watch::begin(signals, &place.0)?)));
    let (namespaces, watch) = entered.inspect_err(|_| {
        let _ = begun.kill().and_then(|()| begun.wait());
    })?;
    // If it has ended already it has reported the reason.
    let _ = Namespaces::send(Some(&namespaces), &socket);
    let mounted = begun.wait().map_err(|error| cannot_run(mounting.get_program(), &error))?;
    if !mounted.success() {
        // It has reported the reason.
        return Err(Failure::new(exit::of_program(mounted), ""));
    }
    if let Some(number) = args.sources.passphrase.passfd {
        close_inherited(number);
    }
    // Files written into a directory outside of the archive would stay there, readable by others.
    if !mounts::at(&place.0).is_ok_and(|at| at.is_some_and(|mounted| mounted.is_archive())) {
        return Err(Failure::mount("mount failed; program not started"));
    }
    let ran = watch.check().and_then(|()| go(args, &place.0, &watch));
    // Any user that is left entered through /proc.
    let unmounted = umount::run(&umount::Args::of(place.0.clone(), false));
    let status = ran?;
    unmounted?;
    match exit::of_program(status) {
        0 => Ok(()),
        code => Err(Failure::new(code, "")),
    }
}

/// The program must not inherit a passphrase. Descriptors that this process opened itself are
/// close-on-exec, so they are left alone.
fn close_inherited(number: RawFd) {
    let described = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
    let flags = described.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| i32::from_str_radix(octal.trim(), 8).ok());
    if flags.is_some_and(|flags| !OFlag::from_bits_retain(flags).contains(OFlag::O_CLOEXEC)) {
        let _ = nix::unistd::close(number);
    }
}

/// Runs the program, and returns when no child is left.
fn go(args: &Args, point: &Path, watch: &Watch) -> Result<ExitStatus, Failure> {
    let cannot = |what: &str, errno: Errno| Failure::system(format!("cannot {what}: {}", errno.desc()));
    nix::sys::prctl::set_child_subreaper(true).map_err(|errno| cannot("inherit processes", errno))?;
    let Some((program, arguments)) = args.command.split_first() else { return Err(Failure::usage("which program?")) };
    let mut command = Command::new(program);
    let child = secrets::withhold(&mut command).args(arguments).current_dir(point).env("PWD", point).spawn();
    let child = child.map_err(|error| cannot_run(program, &error))?;
    let child = Pid::from_raw(child.id() as i32); // process ids are below 2^22
    watch.begun(child);
    let (mut status, mut waits) = (None, false);
    loop {
        let look = (status.is_some() && !waits).then_some(WaitPidFlag::WNOHANG);
        match waitpid(None, look) {
            Ok(WaitStatus::Exited(pid, code)) if pid == child => status = Some(ExitStatus::from_raw(code << 8)),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => {
                status = Some(ExitStatus::from_raw(signal as i32));
            }
            Ok(WaitStatus::StillAlive) => {
                watch.now(OTHERS);
                waits = true;
                continue;
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(Errno::ECHILD) => break,
            Err(errno) => return Err(cannot("wait for the program", errno)),
        }
        if status.is_some() && !waits {
            watch.now(ENDED);
        }
    }
    watch.now(ENDED);
    status.ok_or_else(|| Failure::other("lost the program's exit status"))
}

fn cannot_run(program: &OsStr, error: &io::Error) -> Failure {
    let code = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_RUNNABLE };
    Failure::new(code, format!("cannot run {}: {error}", display(program.as_bytes())))
}

/// Temporary mount point, removed on drop.
struct TempMountpoint(PathBuf);

impl TempMountpoint {
    fn make() -> Result<TempMountpoint, Failure> {
        let runtime = daemons::ready_directory()?;
        let made = mkdtemp(&runtime.join("lockbox-exec.XXXXXX")).map_err(|errno| {
            Failure::host(format!("cannot create a directory in {}", shown(&runtime)), &errno.into())
        })?;
        Ok(TempMountpoint(made))
    }
}

impl Drop for TempMountpoint {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Hides later mounts of this process from others. Without the capability to mount, it enters a
/// user namespace that grants it, in which every file and process keeps its owner.
fn enter_namespaces() -> Result<Namespaces, Failure> {
    let (user, group) = (geteuid(), getegid());
    let of_user = match unshare(CloneFlags::CLONE_NEWNS) {
        Ok(()) => false,
        Err(Errno::EPERM) => {
            let forbidden = |error: io::Error| {
                Failure::mount(format!(
                    "users cannot make namespaces on this machine ({error}): run this as root, or enable user namespaces, see \
                     user_namespaces(7); 'lockbox mount' needs none"
                ))
            };
            unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS).map_err(|errno| forbidden(errno.into()))?;
            // user_namespaces(7): a process that may not change groups outside must give that up
            // before it maps them.
            fs::write("/proc/self/setgroups", "deny").map_err(forbidden)?;
            fs::write("/proc/self/uid_map", format!("{user} {user} 1")).map_err(forbidden)?;
            fs::write("/proc/self/gid_map", format!("{group} {group} 1")).map_err(forbidden)?;
            true
        }
        Err(errno) => return Err(Failure::host("cannot create a mount namespace", &errno.into())),
    };
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    nix::mount::mount(None::<&str>, "/", None::<&str>, private, None::<&str>)
        .map_err(|errno| Failure::host("cannot keep mounts private", &errno.into()))?;
    Namespaces::own(of_user).map_err(|error| Failure::host("cannot open the namespaces", &error))
}

/// Values in place of the program's process id: not started yet; ended; ended, with other processes
/// that it started still awaited.
const NONE: i32 = 0;
const ENDED: i32 = -1;
const OTHERS: i32 = -2;

/// Effects of signals: the program gets those that its terminal does not send it. While this
/// command waits for processes that the program left, one signal ends the wait. The signal that
/// ended the program may arrive late, and does not end the wait.
#[derive(Clone, Default)]
struct Watch {
    program: Arc<AtomicI32>,
    /// Last signal that arrived and was not yet passed on, or 0.
    came: Arc<AtomicI32>,
}

/// Action on a signal.
#[derive(Debug, PartialEq, Eq)]
enum Act {
    Nothing,
    PassOn(i32),
    Leave,
}

/// Catches signals from here on, except for those that were ignored.
fn noted_signals() -> Result<Signals, Failure> {
    let wanted = [SIGINT, SIGQUIT, SIGTERM, SIGHUP].into_iter().filter(|signal| !interrupt::is_ignored(*signal));
    Signals::new(wanted.collect::<Vec<_>>()).map_err(|error| Failure::host("cannot watch for signals", &error))
}

impl Watch {
    fn begin(mut signals: Signals, point: &Path) -> Result<Watch, Failure> {
        let watch = Watch::default();
        let (noted, point) = (watch.clone(), point.to_path_buf());
        let act = move || {
            for signal in signals.forever() {
                match noted.heard(signal) {
                    Act::Nothing => {}
                    Act::PassOn(signal) => noted.pass_on(signal),
                    Act::Leave => leave(&point, signal),
                }
            }
        };
        let begun = thread::Builder::new().name("signals".into()).spawn(act);
        begun.map_err(|error| Failure::host("cannot watch for signals", &error))?;
        Ok(watch)
    }

    fn heard(&self, signal: i32) -> Act {
        self.came.store(signal, Ordering::SeqCst);
        match self.program.load(Ordering::SeqCst) {
            NONE | ENDED => Act::Nothing,
            OTHERS => Act::Leave,
            _ => self.taken(),
        }
    }

    /// Takes the pending signal. Only one thread gets it and passes it on, so the program gets it
    /// once: this thread, or the thread that starts the program.
    fn taken(&self) -> Act {
        match self.came.swap(0, Ordering::SeqCst) {
            signal @ (SIGTERM | SIGHUP) => Act::PassOn(signal),
            _ => Act::Nothing,
        }
    }

    fn pass_on(&self, signal: i32) {
        interrupt::pass_on(self.program.load(Ordering::SeqCst), signal);
    }

    /// Stores the program's id, and passes it a signal that arrived before.
    fn begun(&self, program: Pid) {
        self.now(program.as_raw());
        if let Act::PassOn(signal) = self.taken() {
            self.pass_on(signal);
        }
    }

    fn now(&self, program: i32) {
        self.program.store(program, Ordering::SeqCst);
    }

    /// Fails if a signal arrived before the program was started, which ends the command.
    fn check(&self) -> Result<(), Failure> {
        match self.came.load(Ordering::SeqCst) {
            0 => Ok(()),
            signal => Err(Failure::new(128 + signal as u8, "interrupted before the program began")), // at most 15
        }
    }
}

/// Detaches the mount and exits after the program; its children continue with their open files.
fn leave(point: &Path, signal: i32) -> ! {
    if let Err(failure) = umount::run(&umount::Args::of(point.to_path_buf(), true)) {
        output::complain(&failure.message);
    }
    let _ = fs::remove_dir(point);
    std::process::exit(128 + signal)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;

    use super::*;

    #[test]
    fn a_signal_that_came_before_the_program_was_known_is_passed_on_once() {
        let watch = Watch::default();
        assert_eq!(watch.heard(SIGTERM), Act::Nothing);
        assert_eq!(watch.check().unwrap_err().code, 143, "nothing was begun");
        let mut program = Command::new("sleep").arg("600").process_group(0).spawn().unwrap();
        watch.begun(Pid::from_raw(program.id() as i32));
        assert_eq!(program.wait().unwrap().signal(), Some(SIGTERM));
        assert_eq!(watch.taken(), Act::Nothing);
    }

    #[test]
    fn a_signal_ends_the_waiting_only_while_others_are_waited_for() {
        let watch = Watch::default();
        watch.now(7);
        assert_eq!(watch.heard(SIGINT), Act::Nothing, "the terminal sends it to the program");
        assert_eq!(watch.heard(SIGHUP), Act::PassOn(SIGHUP));
        for (state, act) in [(ENDED, Act::Nothing), (OTHERS, Act::Leave), (ENDED, Act::Nothing)] {
            watch.now(state);
            assert_eq!(watch.heard(SIGINT), act, "{state}");
        }
    }
}
