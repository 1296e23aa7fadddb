//! Starts the daemon by executing the program again, and reports when the mount answers.
//!
//! The mount command has unlocked the archive, with the memory that this takes. It writes the
//! namespaces that the daemon is to join, if any, the configuration (a line of JSON) and the key to
//! the daemon's standard input, and waits for one line of JSON on its standard output. Secrets are
//! never in arguments, environment or files.
//!
//! # Process group
//! Before the daemon opens the archive, it leaves the session of the mount command. After that no
//! signal of the terminal reaches it: neither an interrupt nor the hangup when the shell ends. The
//! agent, the fetcher and the broker start later, each in a process group of its own
//! ([`crate::logging`]). An interrupt before that ends the mount command and the daemon, when
//! nothing is open yet. One between that and the report ends the mount command alone: the report
//! then has no reader, so the daemon unmounts and ends.
//!
//! An automount is different. While its mount or its expiry is pending, autofs blocks every process
//! at the mount point that is not in the automounter's process group. So systemd and automount(8)
//! run mount(8) in their own group, which the daemon inherits and recognizes in the kernel's table
//! of mounts ([`mounts::is_called_by_automounter`]). Two processes stay in it until they end:
//! - The daemon, which opens the mount point before and after mount(2). It cannot leave later,
//!   because its system call filter refuses setsid(2).
//! - The agent, which probes the mount and unmounts it when it expires.
//!
//! The fetcher and the broker never open the mount point, so they leave.
//!
//! The group of an automounter has a terminal only with `automount --foreground`. An interrupt or a
//! hangup there stops the automounter and its mounts. The daemon blocks these signals before it
//! opens the archive, and closes the archive at one. The agent starts with these signals blocked,
//! blocks all others first, and unmounts for the daemon. If another signal ends it before that,
//! the mount fails. A job of a shell is not in such a group, so a mount from a shell is not an
//! automount even if its mount point lies on autofs.

use std::ffi::{CStr, OsStr, OsString};
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lockbox::keys::UnlockedKey;
use lockbox_host::located::{Located, in_time};
use lockbox_host::mounts::{self, Mountpoint};
use lockbox_host::namespaces::Namespaces;
use lockbox_host::{proc, secrets};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::logging::{self, LogTarget};
use crate::mount::{self, UnmountError};
use crate::{DaemonConfig, Failure, session};

/// Hidden argument that runs the program as the daemon.
pub const ARGUMENT: &str = "--daemon";
/// Maximum input: several times a configuration with two paths of 4 KiB in JSON, and the key.
const MAX_CONFIG: u64 = 256 << 10;

#[derive(Serialize, Deserialize)]
enum StartReport {
    Ready { notices: Vec<String> },
    Failed(Failure),
}

/// Name of every process of this program; processes started through /proc/self/exe would be called
/// `exe`.
const NAME: &CStr = c"mount.lockbox";

/// Hardens the process: sets its name, disables core dumps and tracing, raises the limit of open
/// files, and survives the file size limit: a write beyond it fails, which counts as no space.
pub fn harden() {
    proc::outlive_size_limits();
    // Each may be refused in a sandbox; a mount without it is still better than none.
    let _ = nix::sys::prctl::set_name(NAME);
    let _ = proc::keep_out_of_core_dumps();
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// Closes the descriptors that the parent leaked to this process. Only standard input, output and
/// error are passed on purpose, and they have been read by now. Not to be called while this program
/// has a file open.
pub fn close_inherited() {
    // SAFETY: descriptors from 3 up belong to no value of this process: it has opened nothing that
    // it has not closed again. An old kernel refuses the call; then they stay open, as they were.
    let _ = unsafe { nix::libc::syscall(nix::libc::SYS_close_range, 3u32, u32::MAX, 0u32) };
}

const UNRESPONSIVE: &str = "the archive that is mounted there does not answer: the process that serves it is stopped or stuck; 'lockbox umount --lazy' detaches that mount";

/// Returns the mount point as an absolute path without links. A dead lockbox mount on it is
/// detached first.
pub fn prepare_point(path: &Path) -> Result<PathBuf, Failure> {
    let failed = |e: io::Error| Failure::mount(format!("mount point {}: {e}", path.display()));
    // The kernel may answer for the attributes of a dead root from its cache; only statfs always
    // asks the daemon.
    let queried = path.to_path_buf();
    let question = move || {
        nix::sys::statvfs::statvfs(&queried)?;
        queried.metadata()?.is_dir().then(|| queried.canonicalize()).transpose()
    };
    // Only an archive's daemon must answer promptly.
    let answer = match Located::of(path).is_ok_and(|located| located.mount().is_some()) {
        true => in_time(question).unwrap_or_else(|| Err(io::Error::new(io::ErrorKind::TimedOut, UNRESPONSIVE))),
        false => question(),
    };
    match answer {
        Ok(Some(point)) => return Ok(point),
        Ok(None) => return Err(Failure::mount(format!("mount point {} is not a directory", path.display()))),
        // ECONNABORTED is the error of a request in flight when the daemon died.
        Err(e) if [Some(Errno::ENOTCONN as i32), Some(Errno::ECONNABORTED as i32)].contains(&e.raw_os_error()) => {}
        Err(e) => return Err(failed(e)),
    }
    // The dead directory itself cannot be resolved, but its parent can.
    let absolute = std::path::absolute(path).map_err(failed)?;
    let point = match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => parent.canonicalize().map_err(failed)?.join(name),
        _ => absolute,
    };
    let held = Mountpoint::of(&point).map_err(failed)?;
    match held.mounted_at(&point).map_err(failed)? {
        Some(dead) if dead.is_archive() => {}
        _ => return Err(Failure::mount(format!("{} is a dead mount of another program", point.display()))),
    }
    mount::detach(&held, &point).map_err(|error| {
        let reason = match error {
            UnmountError::Busy => "its dead mount is in use".to_owned(),
            UnmountError::Other(reason) => reason,
        };
        Failure::mount(format!("mount point {}: {reason}", point.display()))
    })?;
    prepare_point(&point)
}

/// Starts the daemon and returns, with notices for the user, when the mount answers. With
/// `namespaces` the caller must check that itself.
pub fn launch(
    config: &DaemonConfig,
    key: &UnlockedKey,
    namespaces: Option<&Namespaces>,
) -> Result<Vec<String>, Failure> {
    let failed = |e: io::Error| Failure::system(format!("cannot start the daemon: {e}"));
    let before = config.point().metadata().map_err(failed)?.dev();
    let (stdin, theirs) = UnixStream::pair().map_err(failed)?;
    let mut command = Command::new("/proc/self/exe");
    // The daemon prompts for nothing, and a pass command may contain secrets.
    let mut child = secrets::withhold(&mut command)
        .arg0("mount.lockbox")
        .arg(ARGUMENT)
        .arg(&config.archive)
        .arg(&config.point)
        // One arena per thread would take 10 MiB in addition to `memory=`, without a gain in speed
        // (bench/results/2026-11-25-evening.md).
        .env("MALLOC_ARENA_MAX", "2")
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut line = serde_json::to_vec(config).map_err(|e| failed(e.into()))?;
    line.push(b'\n');
    // If the daemon is already dead, its exit status says more than a broken pipe.
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
        StartReport::Failed(failure) => Err(failure),
        StartReport::Ready { notices } => {
            let point = config.point();
            let answers = namespaces.is_some()
                || (point.metadata().is_ok_and(|m| m.dev() != before) && nix::sys::statvfs::statvfs(point).is_ok());
            if answers { Ok(notices) } else { Err(Failure::mount(format!("{} does not answer", point.display()))) }
        }
    }
}

/// Runs the daemon process: reads its configuration, serves the mount, and reports on standard
/// output whether it started.
pub fn run() -> Result<(), Failure> {
    close_inherited();
    let mut reported = false;
    let result = serve(&mut reported);
    match (&result, reported) {
        // The mount command prints it; this process has no terminal.
        (Err(failure), false) => drop(write_report(&StartReport::Failed(failure.clone()))),
        (Err(failure), true) => tracing::error!("{failure}"),
        (Ok(()), _) => {}
    }
    result
}

fn serve(reported: &mut bool) -> Result<(), Failure> {
    let failed = |e: io::Error| Failure::system(format!("cannot start the daemon: {e}"));
    std::env::set_current_dir("/").map_err(failed)?;
    let (namespaces, config, key) = read_config().map_err(failed)?;
    if !mounts::is_called_by_automounter(config.point()) {
        // Fails only if this process already leads a group, as under a supervisor: then it needs
        // no new session.
        let _ = unistd::setsid();
    }
    let null = OpenOptions::new().read(true).write(true).open("/dev/null").map_err(failed)?;
    unistd::dup2_stdin(&null).map_err(|e| failed(e.into()))?;
    let log = logging::start(&LogTarget::of(&config.options), config.verbose)?;
    lockbox_terminal::abort_on_panic();
    let ready = |notices: &[String]| {
        write_report(&StartReport::Ready { notices: notices.to_vec() }).map_err(failed)?;
        *reported = true;
        // A failed allocation, a stack overflow and an abort in C code are reported on standard
        // error only.
        let closed = unistd::dup2_stdout(&null).and_then(|()| unistd::dup2_stderr(log.as_ref().unwrap_or(&null)));
        closed.map_err(|e| failed(e.into()))
    };
    session::serve(&config, &key, namespaces, ready, || {})
}

fn write_report(report: &StartReport) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(&line)?;
    stdout.flush()
}

/// Reads unbuffered into memory reserved beforehand, so that the key exists once and is wiped
/// there.
fn read_config() -> io::Result<(Option<Namespaces>, DaemonConfig, UnlockedKey)> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_CONFIG as usize));
    let stdin = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let namespaces = Namespaces::receive(&stdin)?;
    stdin.take(MAX_CONFIG).read_to_end(&mut bytes)?;
    let line = bytes.iter().position(|&b| b == b'\n').ok_or(io::ErrorKind::UnexpectedEof)?;
    let config = serde_json::from_slice(&bytes[..line])?;
    let key = UnlockedKey::from_bytes(&bytes[line + 1..]).map_err(io::Error::other)?;
    Ok((namespaces, config, key))
}

/// Connection to a service supervisor (sd_notify(3)), if there is one. Start and end of the mount
/// are reported to it in one datagram each.
pub struct Notify(Option<UnixDatagram>);

impl Notify {
    /// Connects to the supervisor. `socket` is the value of NOTIFY_SOCKET: a path, or an abstract
    /// name after `@`.
    ///
    /// # Errors
    /// Fails if the supervisor cannot be reached: the service would never count as started.
    pub fn connect(socket: Option<OsString>) -> Result<Notify, Failure> {
        let Some(name) = socket.filter(|name| !name.is_empty()) else { return Ok(Notify(None)) };
        let connected = socket_address(&name).and_then(|socket_address| {
            let socket = UnixDatagram::unbound()?;
            socket.connect_addr(&socket_address)?;
            Ok(socket)
        });
        match connected {
            Ok(socket) => Ok(Notify(Some(socket))),
            Err(e) => Err(Failure::other(format!("cannot reach the supervisor at {}: {e}", name.to_string_lossy()))),
        }
    }

    pub fn notify_ready(&self, point: &str) {
        self.send_state(&format!("READY=1\nSTATUS=mounted at {}", point.replace('\n', "?")));
    }

    pub fn notify_stopping(&self) {
        self.send_state("STOPPING=1\nSTATUS=closing the archive");
    }

    fn send_state(&self, state: &str) {
        if let Some(socket) = &self.0 {
            // A supervisor that is gone needs no report.
            let _ = socket.send(state.as_bytes());
        }
    }
}

fn socket_address(name: &OsStr) -> std::io::Result<SocketAddr> {
    match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
        _ => SocketAddr::from_pathname(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hear(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    #[test]
    fn start_and_end_are_reported_at_a_path_and_at_an_abstract_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let at_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("lockbox-test-{}", std::process::id());
        let abstract_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        for (socket, listener) in [(path.into_os_string(), at_path), (format!("@{name}").into(), abstract_name)] {
            let notify = Notify::connect(Some(socket)).unwrap();
            notify.notify_ready("/mnt/a\nREADY=0");
            assert_eq!(hear(&listener), "READY=1\nSTATUS=mounted at /mnt/a?READY=0");
            notify.notify_stopping();
            assert!(hear(&listener).starts_with("STOPPING=1\n"));
        }
    }

    #[test]
    fn without_a_supervisor_nothing_is_said_and_with_a_dead_one_nothing_starts() {
        Notify::connect(None).unwrap().notify_ready("/mnt");
        assert!(Notify::connect(Some("/nonexistent/notify".into())).is_err());
    }
}
