//! Mount agent: a second process that unmounts, flushes and reads /proc for the sandboxed daemon.
//!
//! It is also the process that looks below the mount, where the daemon would wait for its own
//! reply. It starts before the mount, which may hide its files (program, libraries, log). It knows
//! the mount point and no secret.
//!
//! # Protocol
//! - Standard input is a socket. An order is one byte, the reply a line of JSON. The first message
//!   sets the mount's numbers.
//! - Standard output is a second socket, for queries about groups, capabilities and pending signals
//!   of the processes that make requests ([`ProcessInfoClient`]). The sandbox removes /proc of
//!   other processes, because root could read the memory of the whole machine there. A flush
//!   occupies the order connection for as long as the event loops accept pages, and the event
//!   loops make these queries: hence a second socket.
//! - With `lock-on-suspend` the agent subscribes to logind, and relays its sleep signals: see
//!   [`SleepRelay`].
//! - The agent receives the listener of the daemon's system call filter, and answers and logs the
//!   refused calls ([`crate::filter`]).
//! - It has a process group of its own. Under an automounter it stays in the automounter's group,
//!   because autofs blocks all other processes at the mount point until the mount is acknowledged,
//!   and during its expiry (see [`crate::daemon`]).
//! - It ends when the daemon closes the sockets, however the daemon ends. A daemon that closed the
//!   archive says goodbye first. Without a goodbye, as after SIGKILL, the agent is the only
//!   process left to log that the archive was not closed.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::{fs, thread};

use lockbox::Error;
use lockbox_host::mounts::{self, CreatedMountpoint, Mounted, Numbers};
use nix::sys::signal::SigSet;
use nix::unistd::getpgrp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::dbus::{SleepClient, SleepRelay};
use crate::filter;
use crate::logging::{self, LogTarget};
use crate::mount::{self, UnmountError};

/// Hidden argument that runs the program as the mount agent.
pub const ARGUMENT: &str = "--unmounter";
/// Argument that has the agent remove the mount point after the unmount.
const REMOVE_POINT: &str = "made";
/// Argument that has the agent subscribe to logind's sleep signals.
const WATCH_SLEEPS: &str = "sleeps";

const UNMOUNT: u8 = b'u';
const DETACH: u8 = b'd';
const FLUSH: u8 = b'f';
const PROBE: u8 = b'l';
/// Reply: a byte, with a socket of the [`SleepRelay`] if the agent watches sleeps.
const OPEN_RELAY: u8 = b's';
/// Followed by a byte with the listener of the daemon's filter; no reply.
const FILTER_LISTENER: u8 = b'r';
/// No reply.
const GOODBYE: u8 = b'g';

/// Report of a failed request to the agent, with the remedy.
const GONE: &str =
    "the daemon's process that unmounts is gone; 'fusermount3 -u' on the mount point unmounts, and nothing is lost";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum UnmountOutcome {
    /// Our mount does not exist any more.
    Gone,
    /// The mount is in use, or another mount covers it.
    Busy,
    Detached,
    Failed(String),
}

/// Unmounts the mount with these numbers, at whatever path it is now; with `detach` also if it is
/// busy.
fn unmount(mount: Numbers, detach: bool) -> UnmountOutcome {
    let top = match find_topmost(mounts::table(), mount) {
        Ok(top) => top,
        Err(unmounted) => return unmounted,
    };
    match mount::unmount(&top, false) {
        Ok(()) => return UnmountOutcome::Gone,
        Err(UnmountError::Busy) if detach => {}
        Err(error) => return error.into(),
    }
    match mount::unmount(&top, true) {
        Ok(()) => UnmountOutcome::Detached,
        Err(error) => error.into(),
    }
}

impl From<UnmountError> for UnmountOutcome {
    fn from(error: UnmountError) -> UnmountOutcome {
        match error {
            UnmountError::Busy => UnmountOutcome::Busy,
            UnmountError::Other(message) => UnmountOutcome::Failed(message),
        }
    }
}

/// Returns our mount with its current path if it is the topmost one there, else the outcome without
/// an attempt.
fn find_topmost(table: io::Result<Vec<Mounted>>, mount: Numbers) -> Result<Mounted, UnmountOutcome> {
    // Unknown: if this counted as gone, an archive that is reported as closed would stay open.
    let table =
        table.map_err(|error| UnmountOutcome::Failed(format!("the table of mounts cannot be read: {error}")))?;
    match table.iter().find(|mounted| mounted.numbers() == mount) {
        // A mount on its root has the same path.
        Some(ours) if !table.iter().any(|other| other.parent == ours.id && other.point == ours.point) => {
            Ok(ours.clone())
        }
        None if !table.iter().any(|mounted| mounted.device == mount.device) => Err(UnmountOutcome::Gone),
        // The mount is covered, or only a bind mount of it is left: the topmost mount is not ours
        // to remove, and ours is still served.
        _ => Err(UnmountOutcome::Busy),
    }
}

/// Makes the kernel write the dirty pages of the mount. Returns whether it is the topmost mount at
/// its path. Errors are not reported: the daemon writes the data and meets them itself.
#[expect(clippy::disallowed_methods, reason = "the mount of this daemon, not its host")]
fn flush(mount: Numbers) -> bool {
    let Ok(root) = mount::open_root(mount) else { return false };
    let _ = rustix::io::retry_on_intr(|| rustix::fs::syncfs(&root));
    true
}

/// Checks that the mount is the topmost one at its path and answers.
fn probe(mount: Numbers) -> UnmountOutcome {
    match mount::held_root(mount).and_then(|root| root.mode()) {
        Ok(_) => UnmountOutcome::Busy,
        Err(error) if error.kind() == io::ErrorKind::NotFound => UnmountOutcome::Gone,
        Err(error) => UnmountOutcome::Failed(error.to_string()),
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct AgentTasks {
    /// Removes the mount point once the archive is closed.
    pub(crate) remove_point: bool,
    /// Relays logind's sleep signals.
    pub(crate) watch_sleeps: bool,
}

/// Daemon's side of the connection to the agent.
pub(crate) struct MountAgent {
    child: Child,
    orders: BufReader<UnixStream>,
}

impl MountAgent {
    /// Starts the agent and returns when it is ready. `log` is where it logs a daemon that died.
    pub(crate) fn start(
        point: &Path,
        tasks: AgentTasks,
        log: &LogTarget<'_>,
    ) -> io::Result<(MountAgent, ProcessInfoClient)> {
        let (orders, their_orders) = UnixStream::pair()?;
        let (questions, their_questions) = UnixStream::pair()?;
        let remove_point = if tasks.remove_point { REMOVE_POINT } else { "" };
        let watch_sleeps = if tasks.watch_sleeps { WATCH_SLEEPS } else { "" };
        let arguments = [ARGUMENT.as_ref(), point.as_os_str(), remove_point.as_ref(), watch_sleeps.as_ref()];
        let mut command = logging::process_command(&arguments, log);
        if mounts::is_called_by_automounter(point) {
            command.process_group(getpgrp().as_raw());
        }
        let child = command.stdin(OwnedFd::from(their_orders)).stdout(OwnedFd::from(their_questions)).spawn()?;
        let mut agent = MountAgent { child, orders: BufReader::new(orders) };
        let mut ready = String::new();
        agent.orders.read_line(&mut ready)?;
        if ready != "ready\n" {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok((agent, ProcessInfoClient::new(questions)))
    }

    /// Tells the agent the numbers of the mount; it executes no order before that.
    pub(crate) fn set_mount(&mut self, mount: Numbers) -> io::Result<()> {
        self.orders.get_ref().write_all(&[mount.id.to_le_bytes(), mount.device.to_le_bytes()].concat())
    }

    /// Checks that the mount answers. Errors: the kernel's error, or that another mount is there.
    pub(crate) fn probe(&mut self) -> io::Result<()> {
        match self.ask(PROBE)? {
            UnmountOutcome::Busy => Ok(()),
            UnmountOutcome::Failed(message) => Err(io::Error::other(message)),
            UnmountOutcome::Gone | UnmountOutcome::Detached => Err(io::Error::other("something else is mounted there")),
        }
    }

    pub(crate) fn unmount(&mut self, detach: bool) -> UnmountOutcome {
        match self.ask(if detach { DETACH } else { UNMOUNT }) {
            Ok(unmounted) => unmounted,
            Err(error) => UnmountOutcome::Failed(format!("{GONE}: {error}")),
        }
    }

    /// Makes the kernel write its dirty pages to the daemon. Returns whether the mount is the
    /// topmost one at its point. Fails if the agent is gone: then data without fsync is not
    /// durable before the end of the mount.
    pub(crate) fn flush(&mut self) -> lockbox::Result<bool> {
        let answer = self.ask(FLUSH).map_err(|error| Error::io(GONE, error))?;
        Ok(answer == UnmountOutcome::Busy)
    }

    /// Connects to the agent's relay of sleep signals.
    pub(crate) fn watch_sleeps(&mut self) -> io::Result<SleepClient> {
        let mut orders = self.orders.get_ref();
        orders.write_all(&[OPEN_RELAY])?;
        let relay = mount::receive_descriptor(orders).ok_or(io::ErrorKind::NotConnected)?;
        Ok(SleepClient(relay.into()))
    }

    /// Sends the listener of the daemon's system call filter. The agent answers and logs refused
    /// calls.
    pub(crate) fn send_filter_listener(&mut self, listener: &OwnedFd) -> io::Result<()> {
        let mut orders = self.orders.get_ref();
        orders.write_all(&[FILTER_LISTENER])?;
        mount::send_descriptor(orders, listener.as_fd())
    }

    fn ask(&mut self, order: u8) -> io::Result<UnmountOutcome> {
        self.orders.get_ref().write_all(&[order])?;
        let mut line = String::new();
        if self.orders.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for MountAgent {
    fn drop(&mut self) {
        // The agent may be gone already. An agent without a mount takes this for its end.
        let _ = self.orders.get_ref().write_all(&[GOODBYE]);
        let _ = self.orders.get_ref().shutdown(Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// Runs the agent process: serves orders until the daemon is gone.
pub fn run() -> io::Result<()> {
    // A supervisor that stops the whole group means the daemon, which still needs this process
    // then.
    SigSet::all().thread_block()?;
    let mut arguments = std::env::args_os().skip(2);
    let point = arguments.next().map(PathBuf::from).ok_or(io::ErrorKind::InvalidInput)?;
    let remove_point = arguments.next().is_some_and(|word| word == REMOVE_POINT);
    let watch_sleeps = arguments.next().is_some_and(|word| word == WATCH_SLEEPS);
    let log = arguments.next().map(PathBuf::from);
    // Opened while nothing is mounted on it.
    let remove_point = remove_point.then(|| CreatedMountpoint::of(&point)).transpose()?;
    // Opened now, because the mount may hide it.
    logging::start_process(log.as_deref())?;
    let mut orders = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let questions = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    // Not joined: it ends with this process, and without it the daemon's queries are answered as
    // unknown.
    thread::Builder::new().name("callers".into()).spawn(move || serve_process_info(questions))?;
    let mut relay = watch_sleeps.then(SleepRelay::prepare);
    orders.write_all(b"ready\n")?;
    let (mut id, mut device) = ([0; 8], [0; 8]);
    if orders.read_exact(&mut id).and_then(|()| orders.read_exact(&mut device)).is_err() {
        // There was no mount, and nothing was lost.
        return Ok(());
    }
    let mount = Numbers { id: u64::from_le_bytes(id), device: u64::from_le_bytes(device) };
    let exit = serve_orders(&mut orders, relay.as_mut(), |order| match order {
        FLUSH if flush(mount) => UnmountOutcome::Busy,
        FLUSH => UnmountOutcome::Gone,
        PROBE => probe(mount),
        UNMOUNT | DETACH => unmount(mount, order == DETACH),
        _ => UnmountOutcome::Failed(format!("unknown order {order}")),
    });
    match exit {
        PeerExit::Orderly => remove_point.iter().for_each(CreatedMountpoint::remove),
        PeerExit::Lost => tracing::error!(
            "{}: the daemon ended without closing the archive; changes that were not durable are lost",
            point.display()
        ),
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerExit {
    Orderly,
    /// Without a goodbye.
    Lost,
}

fn serve_orders(
    orders: &mut UnixStream,
    mut relay: Option<&mut SleepRelay>,
    mut execute: impl FnMut(u8) -> UnmountOutcome,
) -> PeerExit {
    let mut order = [0];
    loop {
        match orders.read(&mut order) {
            Ok(1) if order[0] == GOODBYE => return PeerExit::Orderly,
            Ok(1) if order[0] == OPEN_RELAY => {
                let connection = relay.as_mut().ok_or(io::ErrorKind::PermissionDenied.into());
                if send_connection(orders, connection.and_then(|relay| relay.open())).is_err() {
                    return PeerExit::Lost;
                }
            }
            Ok(1) if order[0] == FILTER_LISTENER => filter::log_refusals(orders, "daemon"),
            // The daemon may die before it reads the reply.
            Ok(1) if send_outcome(orders, &execute(order[0])).is_ok() => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return PeerExit::Lost,
        }
    }
}

/// Sends the connection with a byte, or the byte alone.
fn send_connection(mut orders: &UnixStream, connection: io::Result<UnixStream>) -> io::Result<()> {
    match connection {
        Ok(connection) => mount::send_descriptor(orders, connection.as_fd()),
        Err(_) => orders.write_all(&[0]),
    }
}

fn send_outcome(orders: &mut UnixStream, unmounted: &UnmountOutcome) -> io::Result<()> {
    let mut line = serde_json::to_vec(unmounted)?;
    line.push(b'\n');
    orders.write_all(&line)
}

/// Upper bound of the forwarded lines: 65,536 groups of up to ten digits.
const MAX_STATUS: u32 = 1 << 20;
/// Lines of /proc/PID/status that are forwarded.
const LINES: [&str; 7] = ["Groups:", "CapEff:", "SigPnd:", "ShdPnd:", "SigBlk:", "SigIgn:", "SigCgt:"];
/// SIGSTOP, SIGTSTP, SIGTTIN and SIGTTOU as bits of a signal set.
const STOP_SIGNALS: u64 = 0b1111 << 18;

/// Connection to the process that reads /proc.
pub struct ProcessInfoClient(Mutex<UnixStream>);

impl ProcessInfoClient {
    pub(crate) fn new(connection: UnixStream) -> ProcessInfoClient {
        ProcessInfoClient(Mutex::new(connection))
    }

    /// Returns groups, capabilities and signals of a thread; empty if /proc or the agent does not
    /// answer.
    pub(crate) fn status(&self, thread: u32) -> ProcessStatus {
        request_status(&mut self.0.lock(), thread).unwrap_or_default()
    }
}

/// Selected lines of /proc/PID/status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessStatus(String);

impl ProcessStatus {
    fn of(thread: u32) -> ProcessStatus {
        ProcessStatus::select(&fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default())
    }

    pub(crate) fn select(text: &str) -> ProcessStatus {
        let selected = text.lines().filter(|line| LINES.iter().any(|name| line.starts_with(name)));
        ProcessStatus(selected.flat_map(|line| [line, "\n"]).collect())
    }

    fn field(&self, name: &str) -> &str {
        self.0.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
    }

    pub(crate) fn groups(&self) -> impl Iterator<Item = u32> {
        self.field(LINES[0]).split_whitespace().filter_map(|group| group.parse().ok())
    }

    /// Returns whether a capability, by its number in linux/capability.h, is effective.
    pub(crate) fn has_capability(&self, capability: u32) -> bool {
        self.mask(LINES[1]) >> capability & 1 == 1
    }

    /// Returns whether a signal is pending that ends the process or that it handles. A stop that it
    /// does not handle continues the system call.
    pub(crate) fn has_interrupting_signal(&self) -> bool {
        let [thread, process, blocked, ignored, caught] = [2, 3, 4, 5, 6].map(|line| self.mask(LINES[line]));
        (thread | process) & !blocked & !ignored & (!STOP_SIGNALS | caught) != 0
    }

    fn mask(&self, name: &str) -> u64 {
        u64::from_str_radix(self.field(name), 16).unwrap_or(0)
    }
}

fn request_status(connection: &mut UnixStream, thread: u32) -> io::Result<ProcessStatus> {
    connection.write_all(&thread.to_le_bytes())?;
    let mut length = [0; 4];
    connection.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_STATUS {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length as usize];
    connection.read_exact(&mut text)?;
    String::from_utf8(text).map(ProcessStatus).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Answers queries until the peer closes the connection.
pub(crate) fn serve_process_info(mut connection: UnixStream) -> io::Result<()> {
    let mut thread = [0; 4];
    loop {
        connection.read_exact(&mut thread)?;
        let ProcessStatus(text) = ProcessStatus::of(u32::from_le_bytes(thread));
        let length = u32::try_from(text.len()).ok().filter(|length| *length <= MAX_STATUS).unwrap_or(0);
        connection.write_all(&length.to_le_bytes())?;
        connection.write_all(&text.as_bytes()[..length as usize])?;
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sys::stat::makedev;

    use super::*;

    #[test]
    fn a_mount_is_gone_only_when_the_table_of_mounts_says_so() {
        let ours = Numbers { id: 7, device: makedev(0, 7) };
        // Mounts with their ids, parents, devices and mount points.
        let resolved = |table: &[(u64, u64, u64, &str)]| {
            let mounted = |&(id, parent, device, at): &(u64, u64, u64, &str)| {
                mounts::parse(format!("{id} {parent} 0:{device} / {at} rw - {} a.lbx rw", mounts::TYPE).as_bytes())
                    .unwrap()
            };
            find_topmost(Ok(table.iter().map(mounted).collect()), ours).map(|found| found.point)
        };
        let root = (1, 0, 1, "/");
        assert_eq!(resolved(&[root, (7, 1, 7, "/mnt/a")]), Ok("/mnt/a".into()));
        assert_eq!(resolved(&[root, (7, 1, 7, "/renamed/a")]), Ok("/renamed/a".into()), "wherever it is by now");
        assert_eq!(
            resolved(&[root, (7, 1, 7, "/mnt/a"), (9, 7, 9, "/mnt/a")]),
            Err(UnmountOutcome::Busy),
            "mounted over"
        );
        assert_eq!(
            resolved(&[root, (7, 1, 7, "/mnt/a"), (9, 7, 9, "/mnt/a/b")]),
            Ok("/mnt/a".into()),
            "the kernel says that it is busy"
        );
        assert_eq!(resolved(&[root, (9, 1, 7, "/mnt/b")]), Err(UnmountOutcome::Busy), "a bind of it");
        assert_eq!(resolved(&[root, (7, 1, 9, "/mnt/a")]), Err(UnmountOutcome::Gone), "another one with its number");
        assert_eq!(resolved(&[root]), Err(UnmountOutcome::Gone));
        let unread = find_topmost(Err(io::ErrorKind::PermissionDenied.into()), ours);
        assert!(matches!(unread, Err(UnmountOutcome::Failed(_))), "{unread:?}");
    }

    /// Returns how the agent sees the daemon's end, and the orders that it received.
    fn peer_exit(daemon: impl FnOnce(UnixStream)) -> (PeerExit, Vec<u8>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        daemon(ours);
        let mut orders_seen = Vec::new();
        let exit = serve_orders(&mut theirs, None, |order| {
            orders_seen.push(order);
            UnmountOutcome::Busy
        });
        (exit, orders_seen)
    }

    #[test]
    fn a_killed_daemon_differs_from_an_orderly_exit() {
        assert_eq!(peer_exit(drop), (PeerExit::Lost, vec![]));
        let under_way = |mut orders: UnixStream| orders.write_all(&[FLUSH]).unwrap();
        assert_eq!(peer_exit(under_way), (PeerExit::Lost, vec![FLUSH]), "the answer cannot be sent");
        let orderly = |orders: UnixStream| {
            let child = Command::new("true").spawn().unwrap();
            drop(MountAgent { child, orders: BufReader::new(orders) });
        };
        assert_eq!(peer_exit(orderly), (PeerExit::Orderly, vec![]));
    }

    #[test]
    fn an_agent_that_watches_no_sleeps_lends_no_connection() {
        let (daemon, mut agent) = UnixStream::pair().unwrap();
        (&daemon).write_all(&[OPEN_RELAY, GOODBYE]).unwrap();
        assert_eq!(serve_orders(&mut agent, None, |_| UnmountOutcome::Busy), PeerExit::Orderly);
        assert!(mount::receive_descriptor(&daemon).is_none());
    }

    #[test]
    fn a_connection_is_sent_or_reported_missing() {
        let (daemon, agent) = UnixStream::pair().unwrap();
        let (mut bus, end) = UnixStream::pair().unwrap();
        send_connection(&agent, Ok(end)).unwrap();
        mount::receive_descriptor(&daemon).map(UnixStream::from).unwrap().write_all(b"x").unwrap();
        bus.read_exact(&mut [0]).unwrap();
        send_connection(&agent, Err(io::ErrorKind::NotFound.into())).unwrap();
        assert!(mount::receive_descriptor(&daemon).is_none());
    }

    #[test]
    fn groups_and_capabilities_are_found() {
        let status =
            ProcessStatus::select("Name:\tGroups: 7\nGroups:\t4 24 1000 \nCapInh:\t0\nCapEff:\t0000000000000010\n");
        assert_eq!(status.groups().collect::<Vec<_>>(), [4, 24, 1000]);
        assert!(status.has_capability(4) && !status.has_capability(5));
        assert_eq!(ProcessStatus::default().groups().count(), 0);
        assert!(!ProcessStatus::select("CapEff:\tnothing").has_capability(0));
    }

    #[test]
    fn signals_that_end_the_process_or_are_handled_interrupt() {
        let interrupts = |pending: u64, shared: u64, blocked: u64, ignored: u64, caught: u64| {
            let text = format!(
                "SigQ:\t0/9\nSigPnd:\t{pending:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
            );
            ProcessStatus::select(&text).has_interrupting_signal()
        };
        let [int, kill, stop, last] = [2, 9, 20, 64].map(|signal: u64| 1 << (signal - 1));
        for signal in [int, kill, last] {
            assert!(interrupts(signal, 0, 0, 0, 0) && interrupts(0, signal, 0, 0, 0));
            assert!(interrupts(signal, 0, 0, 0, signal), "handled");
        }
        assert!(!interrupts(0, 0, 0, 0, int));
        assert!(!interrupts(int, int, int, 0, int) && !interrupts(int, int, 0, int, 0));
        assert!(interrupts(int | kill, 0, int, 0, 0));
        assert!(!interrupts(stop, stop, 0, 0, 0) && interrupts(0, stop, 0, 0, stop));
        assert!(!ProcessStatus::default().has_interrupting_signal());
    }

    #[test]
    fn the_client_returns_the_status_in_proc() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(move || serve_process_info(theirs));
        let outside = ProcessInfoClient::new(ours);
        // The blocked signals of another thread change while it starts threads.
        let own = nix::unistd::gettid().as_raw().cast_unsigned();
        for thread in [own, 0] {
            assert_eq!(outside.status(thread), ProcessStatus::of(thread));
        }
        assert_ne!(outside.status(own), ProcessStatus::default());
        drop(outside);
        assert!(serving.join().unwrap().is_err(), "it ends with the connection");
    }

    #[test]
    fn a_closed_connection_gives_an_empty_status() {
        let (ours, _) = UnixStream::pair().unwrap();
        assert_eq!(ProcessInfoClient::new(ours).status(std::process::id()), ProcessStatus::default());
    }
}
