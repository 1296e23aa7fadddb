//! Turns the mounting command into a daemon by running the program again, and tells when the mount answers.
//!
//! The mounting command has unlocked the archive, with the memory that takes. It hands the namespaces that the daemon is to join, if any, the
//! task (a line of JSON) and the key to the daemon's standard input and waits for one line of JSON on its standard output. Nothing secret is ever in
//! arguments, environment or files.

use std::ffi::CStr;
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lockbox::keys::UnlockedKey;
use lockbox_host::harden;
use lockbox_host::located::{Located, in_time};
use lockbox_host::mountpoint::Mountpoint;
use lockbox_host::namespaces::Namespaces;
use lockbox_host::secrets;
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::exit::Failure;
use crate::journal::{self, Target};
use crate::mount;
use crate::session;
use crate::task::Task;

/// The hidden argument that makes the program the daemon.
pub const ARGUMENT: &str = "--daemon";
/// A task with two paths of 4 KiB in JSON and the key fit several times.
const MAX_TASK: u64 = 256 << 10;

#[derive(Serialize, Deserialize)]
enum Report {
    Ready { notices: Vec<String> },
    Failed(Failure),
}

/// The name of every process of this program: those that it starts through /proc/self/exe would be called `exe`.
const NAME: &CStr = c"mount.lockbox";

/// The process's name, no core dumps and no tracing of this process, as many open files as allowed, and no death at a limit on the size of files: the write
/// that meets it fails, and that counts as no space.
pub fn harden() {
    harden::outlive_size_limits();
    // Each may be refused in a sandbox; the archive is still better mounted than not.
    let _ = nix::sys::prctl::set_name(NAME);
    let _ = harden::keep_out_of_core_dumps();
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// Closes whatever the program that started this one had open and did not mean to hand over. All that is handed over is standard input,
/// output and error, and is read by now. Not to be called while this program has anything open.
pub fn close_inherited() {
    // SAFETY: descriptors from 3 up belong to no value of this process: it has opened nothing that it has not closed again.
    // An old kernel refuses the call; then they stay open, as they were.
    let _ = unsafe { nix::libc::syscall(nix::libc::SYS_close_range, 3u32, u32::MAX, 0u32) };
}

/// The mount point as an absolute path without links. A dead mount of ours that lies there is taken away first.
pub fn prepare_point(path: &Path) -> Result<PathBuf, Failure> {
    let failed = |e: io::Error| Failure::mount(format!("mount point {}: {e}", path.display()));
    // The kernel may answer for the attributes of a dead root from its cache; only statfs always asks the daemon.
    let asked = path.to_path_buf();
    let question = move || {
        nix::sys::statvfs::statvfs(&asked)?;
        asked.metadata()?.is_dir().then(|| asked.canonicalize()).transpose()
    };
    // Only an archive's daemon is known to answer at once.
    let answered = match Located::of(path).is_ok_and(|located| located.mount().is_some()) {
        true => in_time(question).unwrap_or_else(|| Err(silent())),
        false => question(),
    };
    match answered {
        Ok(Some(point)) => return Ok(point),
        Ok(None) => return Err(Failure::mount(format!("mount point {} is not a directory", path.display()))),
        // ECONNABORTED is what the question gets that was under way when the daemon died.
        Err(e) if [Some(Errno::ENOTCONN as i32), Some(Errno::ECONNABORTED as i32)].contains(&e.raw_os_error()) => {}
        Err(e) => return Err(failed(e)),
    }
    // The dead directory itself cannot be resolved, its parent can.
    let absolute = std::path::absolute(path).map_err(failed)?;
    let point = match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => parent.canonicalize().map_err(failed)?.join(name),
        _ => absolute,
    };
    let held = Mountpoint::of(&point).map_err(failed)?;
    match held.mounted_at(&point).map_err(failed)? {
        Some(dead) if dead.is_archive() => {}
        _ => return Err(Failure::mount(format!("a dead mount that is not ours lies at {}", point.display()))),
    }
    if let Err(error) = mount::detach(&held, &point) {
        return Err(Failure::mount(format!("cannot take away the dead mount at {}: {error:?}", point.display())));
    }
    prepare_point(&point)
}

/// Error for a mount point that does not answer.
fn silent() -> io::Error {
    let why = "the archive that is mounted there does not answer: the process that serves it is stopped or stuck; 'lockbox umount --lazy' takes that mount away";
    io::Error::new(io::ErrorKind::TimedOut, why)
}

/// Starts the daemon and returns when the mount answers, with what the user should know. In `namespaces` who made them has to look for that.
pub fn launch(task: &Task, key: &UnlockedKey, namespaces: Option<&Namespaces>) -> Result<Vec<String>, Failure> {
    let failed = |e: io::Error| Failure::system(format!("cannot start the daemon: {e}"));
    let before = task.point().metadata().map_err(failed)?.dev();
    let (stdin, theirs) = UnixStream::pair().map_err(failed)?;
    let mut command = Command::new("/proc/self/exe");
    // It asks nobody, and a command may hold what is nobody's business.
    let mut child = secrets::withhold(&mut command)
        .arg0("mount.lockbox")
        .arg(ARGUMENT)
        .arg(&task.archive)
        .arg(&task.point)
        // One arena for each thread would keep 10 MiB of what it was given beside `memory=`, and serve nobody faster (bench/results/2026-11-25-evening.md).
        .env("MALLOC_ARENA_MAX", "2")
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut line = serde_json::to_vec(task).map_err(|e| failed(e.into()))?;
    line.push(b'\n');
    // When the daemon is dead already its exit status says more than a broken pipe.
    let _ = Namespaces::send(namespaces, &stdin)
        .and_then(|()| (&stdin).write_all(&line))
        .and_then(|()| (&stdin).write_all(&key.to_bytes()));
    drop(stdin);
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line).map_err(failed)?;
    }
    if line.is_empty() {
        let status = child.wait().map_err(failed)?;
        return Err(Failure::other(format!("the daemon died while starting: {status}")));
    }
    match serde_json::from_str(&line).map_err(|e| failed(e.into()))? {
        Report::Failed(failure) => Err(failure),
        Report::Ready { notices } => {
            let point = task.point();
            let answers = namespaces.is_some()
                || (point.metadata().is_ok_and(|m| m.dev() != before) && nix::sys::statvfs::statvfs(point).is_ok());
            if answers { Ok(notices) } else { Err(Failure::mount(format!("{} does not answer", point.display()))) }
        }
    }
}

/// The daemon's side: reads its task, serves it, and reports on standard output whether it came to serving.
pub fn run() -> Result<(), Failure> {
    close_inherited();
    let mut reported = false;
    let result = serve(&mut reported);
    match (&result, reported) {
        // The mounting command prints it; this process has nobody to talk to.
        (Err(failure), false) => drop(report(&Report::Failed(failure.clone()))),
        (Err(failure), true) => tracing::error!("{failure}"),
        (Ok(()), _) => {}
    }
    result
}

fn serve(reported: &mut bool) -> Result<(), Failure> {
    let failed = |e: io::Error| Failure::system(format!("cannot start the daemon: {e}"));
    // Refused only when this process leads a group already, as under a supervisor: then it needs no new session.
    let _ = unistd::setsid();
    std::env::set_current_dir("/").map_err(failed)?;
    let (namespaces, task, key) = read_task().map_err(failed)?;
    let null = OpenOptions::new().read(true).write(true).open("/dev/null").map_err(failed)?;
    unistd::dup2_stdin(&null).map_err(|e| failed(e.into()))?;
    let log = journal::start(&Target::of(&task.options), task.verbose)?;
    let ready = |notices: &[String]| {
        report(&Report::Ready { notices: notices.to_vec() }).map_err(failed)?;
        *reported = true;
        // A failed allocation, an overflown stack and an abort in C code are told there and nowhere else.
        let closed = unistd::dup2_stdout(&null).and_then(|()| unistd::dup2_stderr(log.as_ref().unwrap_or(&null)));
        closed.map_err(|e| failed(e.into()))
    };
    session::serve(&task, &key, namespaces, ready, || {})
}

fn report(report: &Report) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(&line)?;
    stdout.flush()
}

/// Reads unbuffered and into memory reserved beforehand, so that the key is in one place and wiped there.
fn read_task() -> io::Result<(Option<Namespaces>, Task, UnlockedKey)> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_TASK as usize));
    let stdin = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let namespaces = Namespaces::receive(&stdin)?;
    stdin.take(MAX_TASK).read_to_end(&mut bytes)?;
    let line = bytes.iter().position(|&b| b == b'\n').ok_or(io::ErrorKind::UnexpectedEof)?;
    let task = serde_json::from_slice(&bytes[..line])?;
    let key = UnlockedKey::from_bytes(&bytes[line + 1..]).map_err(io::Error::other)?;
    Ok((namespaces, task, key))
}
