//! A second process that unmounts, flushes and reads /proc for the daemon, which may not do so itself once it is in its sandbox.
//!
//! It also is the one that looks below the mount: a daemon that does so waits for an answer of its
//! own. It starts before the mount is there, which may hide its files (the program, its libraries,
//! the log), knows the mount point and no secret, takes one byte per order on its standard input,
//! which is a socket, and answers there with a line of JSON; the first order tells it the mount's
//! numbers. It also answers and names the system calls that the daemon's filter refuses
//! ([`crate::filter`]). Its standard output is a second socket, for questions about callers. It
//! ends when the daemon does, however that ends: the sockets are closed then. A daemon that closed
//! the archive says good-bye before; when it did not, as after SIGKILL, this process is the only
//! one left to say so in the log.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

use lockbox_host::mountpoint::CreatedMountpoint;
use lockbox_host::mounts::{self, Mounted, Numbers};
use nix::sys::signal::SigSet;
use serde::{Deserialize, Serialize};

use crate::callers::{self, Callers};
use crate::filter;
use crate::journal::{self, Target};
use crate::login;
use crate::mount::{self, UnmountError};

/// The hidden argument that makes the program the unmounter.
pub const ARGUMENT: &str = "--unmounter";
/// The argument that says that the mount point goes with the mount.
const MADE: &str = "made";

const POLITELY: u8 = b'u';
const DETACH: u8 = b'd';
const FLUSH: u8 = b'f';
const LOOK: u8 = b'l';
/// Is answered with a byte, and a descriptor when there is a bus.
const DIAL: u8 = b's';
/// Is followed by a byte with the listener of the daemon's filter, and has no answer.
const REFUSALS: u8 = b'r';
/// Has no answer.
const GOOD_BYE: u8 = b'g';

/// What became of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Unmounted {
    /// Our mount is not there any more.
    Gone,
    /// Somebody uses it, or mounted over it.
    Busy,
    Detached,
    Failed(String),
}

/// Unmounts the mount with these numbers, wherever it is by now; with `detach` also when it is
/// busy.
pub(crate) fn unmount(mount: Numbers, detach: bool) -> Unmounted {
    let top = match on_top(mounts::table(), mount) {
        Ok(top) => top,
        Err(unmounted) => return unmounted,
    };
    match mount::unmount(&top, false) {
        Ok(()) => return Unmounted::Gone,
        Err(UnmountError::Busy) if detach => {}
        Err(error) => return error.into(),
    }
    match mount::unmount(&top, true) {
        Ok(()) => Unmounted::Detached,
        Err(error) => error.into(),
    }
}

impl From<UnmountError> for Unmounted {
    fn from(error: UnmountError) -> Unmounted {
        match error {
            UnmountError::Busy => Unmounted::Busy,
            UnmountError::Other(message) => Unmounted::Failed(message),
        }
    }
}

/// Returns our mount with the path that it has by now when it is on top there, else the answer that
/// is given without an attempt.
fn on_top(table: io::Result<Vec<Mounted>>, mount: Numbers) -> Result<Mounted, Unmounted> {
    // Nobody knows: who takes that for gone would leave an archive open that is believed to be closed.
    let table = table.map_err(|error| Unmounted::Failed(format!("the table of mounts cannot be read: {error}")))?;
    match table.iter().find(|mounted| mounted.numbers() == mount) {
        // What is mounted on its root has the same path.
        Some(ours) if !table.iter().any(|other| other.parent == ours.id && other.point == ours.point) => {
            Ok(ours.clone())
        }
        None if !table.iter().any(|mounted| mounted.device == mount.device) => Err(Unmounted::Gone),
        // Mounted over, or only a bind of it is left: what is there is not ours to take away, and we are still served.
        _ => Err(Unmounted::Busy),
    }
}

/// Makes the kernel write the dirty pages of the mount. Answers whether it is on top at its path.
pub(crate) fn flush(mount: Numbers) -> bool {
    let Ok(root) = mount::open_root(mount) else { return false };
    flush_open(&root);
    true
}

/// Failures are not reported to the caller: as the daemon that has to write the data, the caller
/// meets them itself.
#[expect(clippy::disallowed_methods, reason = "the mount of this daemon, not its host")]
fn flush_open(root: impl AsFd) {
    let _ = rustix::io::retry_on_intr(|| rustix::fs::syncfs(&root));
}

/// Whether the mount is on top at its path and answers.
fn look(mount: Numbers) -> Unmounted {
    match mount::held_root(mount).and_then(|root| root.mode()) {
        Ok(_) => Unmounted::Busy,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Unmounted::Gone,
        Err(error) => Unmounted::Failed(error.to_string()),
    }
}

/// The daemon's side.
pub(crate) struct Unmounter {
    child: Child,
    /// None once there is nothing more to be ordered.
    orders: Option<BufReader<UnixStream>>,
}

impl Unmounter {
    /// Returns when the process waits for orders and questions. `log` is where it says that the daemon is gone.
    /// With `made` it removes the mount point once the archive is closed.
    pub(crate) fn start(point: &Path, made: bool, log: &Target<'_>) -> io::Result<(Unmounter, Callers)> {
        let (orders, their_orders) = UnixStream::pair()?;
        let (questions, their_questions) = UnixStream::pair()?;
        let stderr = if matches!(log, Target::Terminal) { Stdio::inherit() } else { Stdio::null() };
        let child = Command::new("/proc/self/exe")
            .arg0("mount.lockbox")
            .arg(ARGUMENT)
            .arg(point)
            .arg(if made { MADE } else { "" })
            .args(journal::argument(log))
            // A terminal's interrupt is for the daemon alone.
            .process_group(0)
            .stdin(OwnedFd::from(their_orders))
            .stdout(OwnedFd::from(their_questions))
            .stderr(stderr)
            .spawn()?;
        let mut unmounter = Unmounter { child, orders: Some(BufReader::new(orders)) };
        let mut ready = String::new();
        if let Some(orders) = &mut unmounter.orders {
            orders.read_line(&mut ready)?;
        }
        if ready != "ready\n" {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok((unmounter, Callers::over(questions)))
    }

    /// Tells it of the mount. Before that there is nothing that it can do.
    pub(crate) fn mounted(&mut self, mount: Numbers) -> io::Result<()> {
        let orders = self.orders.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        orders.get_ref().write_all(&[mount.id.to_le_bytes(), mount.device.to_le_bytes()].concat())
    }

    /// Whether the mount answers.
    ///
    /// # Errors
    /// What the kernel said instead, or that another mount is there.
    pub(crate) fn look(&mut self) -> io::Result<()> {
        match self.ask(LOOK)? {
            Unmounted::Busy => Ok(()),
            Unmounted::Failed(message) => Err(io::Error::other(message)),
            Unmounted::Gone | Unmounted::Detached => Err(io::Error::other("something else is mounted there")),
        }
    }

    pub(crate) fn unmount(&mut self, detach: bool) -> Unmounted {
        match self.ask(if detach { DETACH } else { POLITELY }) {
            Ok(unmounted) => unmounted,
            Err(error) => Unmounted::Failed(format!("the process that unmounts does not answer: {error}")),
        }
    }

    /// Makes the kernel write its dirty pages to the daemon. Answers whether the mount is on top at its point.
    ///
    /// # Errors
    /// When the process is gone: then nothing is durable any more without fsync before the end.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        Ok(self.ask(FLUSH)? == Unmounted::Busy)
    }

    /// Has it connect to the bus of the system: the daemon's sandbox connects nowhere.
    pub(crate) fn dial(&mut self) -> io::Result<UnixStream> {
        let orders = self.orders.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.get_ref();
        (&mut &*orders).write_all(&[DIAL])?;
        mount::receive_descriptor(orders).map(UnixStream::from).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Sends the listener of the daemon's filter of system calls: refused calls are answered and
    /// named there.
    pub(crate) fn name_refusals(&mut self, listener: &OwnedFd) -> io::Result<()> {
        let orders = self.orders.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.get_ref();
        (&mut &*orders).write_all(&[REFUSALS])?;
        mount::send_descriptor(orders, listener.as_fd())
    }

    fn ask(&mut self, order: u8) -> io::Result<Unmounted> {
        let orders = self.orders.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        orders.get_ref().write_all(&[order])?;
        let mut line = String::new();
        if orders.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Unmounter {
    fn drop(&mut self) {
        if let Some(orders) = self.orders.take() {
            // When that process is gone nobody needs to know. One that was told of no mount takes this for its end.
            let _ = orders.get_ref().write_all(&[GOOD_BYE]);
        }
        let _ = self.child.wait();
    }
}

/// The other process: serves orders until the daemon is gone.
pub fn run() -> io::Result<()> {
    // A supervisor that stops the whole group means the daemon, which still needs this process then.
    SigSet::all().thread_block()?;
    let mut arguments = std::env::args_os().skip(2);
    let point = arguments.next().map(PathBuf::from).ok_or(io::ErrorKind::InvalidInput)?;
    let made = arguments.next().is_some_and(|word| word == MADE);
    let log = arguments.next().map(PathBuf::from);
    // While nothing is mounted on it.
    let made = made.then(|| CreatedMountpoint::of(&point)).transpose()?;
    // Opened while it is there: the mount may hide it.
    journal::start(&journal::target(log.as_deref()), false).map_err(|failure| io::Error::other(failure.message))?;
    let mut orders = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let questions = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    // Not waited for: it ends with this process, and without it the daemon is answered that nothing is known.
    thread::Builder::new().name("callers".into()).spawn(move || callers::serve(questions))?;
    orders.write_all(b"ready\n")?;
    let (mut id, mut device) = ([0; 8], [0; 8]);
    if orders.read_exact(&mut id).and_then(|()| orders.read_exact(&mut device)).is_err() {
        // There was no mount, and nothing was lost.
        return Ok(());
    }
    let mount = Numbers { id: u64::from_le_bytes(id), device: u64::from_le_bytes(device) };
    let parting = take_orders(&mut orders, |order| match order {
        FLUSH if flush(mount) => Unmounted::Busy,
        FLUSH => Unmounted::Gone,
        LOOK => look(mount),
        POLITELY | DETACH => unmount(mount, order == DETACH),
        _ => Unmounted::Failed(format!("there is no order {order}")),
    });
    match parting {
        Parting::GoodBye => made.iter().for_each(CreatedMountpoint::remove),
        Parting::Lost => tracing::error!(
            "{}: the daemon is gone without closing the archive; what was not durable is lost",
            point.display()
        ),
    }
    Ok(())
}

/// How the daemon went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parting {
    GoodBye,
    /// Without a word.
    Lost,
}

fn take_orders(orders: &mut UnixStream, mut carry_out: impl FnMut(u8) -> Unmounted) -> Parting {
    let mut order = [0];
    loop {
        match orders.read(&mut order) {
            Ok(1) if order[0] == GOOD_BYE => return Parting::GoodBye,
            Ok(1) if order[0] == DIAL => {
                if hand_over(orders, login::dial()).is_err() {
                    return Parting::Lost;
                }
            }
            Ok(1) if order[0] == REFUSALS => filter::name_refusals(orders, "daemon"),
            // It may die before it takes the answer.
            Ok(1) if answer(orders, &carry_out(order[0])).is_ok() => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return Parting::Lost,
        }
    }
}

/// Sends the connection with a byte, or the byte alone.
fn hand_over(mut orders: &UnixStream, connection: io::Result<UnixStream>) -> io::Result<()> {
    match connection {
        Ok(connection) => mount::send_descriptor(orders, connection.as_fd()),
        Err(_) => orders.write_all(&[0]),
    }
}

fn answer(orders: &mut UnixStream, unmounted: &Unmounted) -> io::Result<()> {
    let mut line = serde_json::to_vec(unmounted)?;
    line.push(b'\n');
    orders.write_all(&line)
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::makedev;

    use super::*;

    #[test]
    fn a_mount_is_gone_only_when_the_table_of_mounts_says_so() {
        let ours = Numbers { id: 7, device: makedev(0, 7) };
        // Mounts with their parents, file systems and points.
        let said = |table: &[(u64, u64, u64, &str)]| {
            let mounted = |&(id, parent, device, at): &(u64, u64, u64, &str)| {
                mounts::parse(format!("{id} {parent} 0:{device} / {at} rw - {} a.lbx rw", mounts::TYPE).as_bytes())
                    .unwrap()
            };
            on_top(Ok(table.iter().map(mounted).collect()), ours).map(|found| found.point)
        };
        let root = (1, 0, 1, "/");
        assert_eq!(said(&[root, (7, 1, 7, "/mnt/a")]), Ok("/mnt/a".into()));
        assert_eq!(said(&[root, (7, 1, 7, "/renamed/a")]), Ok("/renamed/a".into()), "wherever it is by now");
        assert_eq!(said(&[root, (7, 1, 7, "/mnt/a"), (9, 7, 9, "/mnt/a")]), Err(Unmounted::Busy), "mounted over");
        assert_eq!(
            said(&[root, (7, 1, 7, "/mnt/a"), (9, 7, 9, "/mnt/a/b")]),
            Ok("/mnt/a".into()),
            "the kernel says that it is busy"
        );
        assert_eq!(said(&[root, (9, 1, 7, "/mnt/b")]), Err(Unmounted::Busy), "a bind of it");
        assert_eq!(said(&[root, (7, 1, 9, "/mnt/a")]), Err(Unmounted::Gone), "another one with its number");
        assert_eq!(said(&[root]), Err(Unmounted::Gone));
        let unread = on_top(Err(io::ErrorKind::PermissionDenied.into()), ours);
        assert!(matches!(unread, Err(Unmounted::Failed(_))), "{unread:?}");
    }

    /// Answers how the other process sees the daemon's end, and the orders that it was given.
    fn parted(daemon: impl FnOnce(UnixStream)) -> (Parting, Vec<u8>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        daemon(ours);
        let mut given = Vec::new();
        let parting = take_orders(&mut theirs, |order| {
            given.push(order);
            Unmounted::Busy
        });
        (parting, given)
    }

    #[test]
    fn a_daemon_that_is_killed_is_told_from_one_that_closed_the_archive() {
        assert_eq!(parted(drop), (Parting::Lost, vec![]));
        let under_way = |mut orders: UnixStream| orders.write_all(&[FLUSH]).unwrap();
        assert_eq!(parted(under_way), (Parting::Lost, vec![FLUSH]), "the answer cannot be sent");
        let orderly = |orders: UnixStream| {
            let child = Command::new("true").spawn().unwrap();
            drop(Unmounter { child, orders: Some(BufReader::new(orders)) });
        };
        assert_eq!(parted(orderly), (Parting::GoodBye, vec![]));
    }

    #[test]
    fn a_connection_is_handed_over_or_known_to_be_missing() {
        let (daemon, unmounter) = UnixStream::pair().unwrap();
        let (mut bus, end) = UnixStream::pair().unwrap();
        hand_over(&unmounter, Ok(end)).unwrap();
        mount::receive_descriptor(&daemon).map(UnixStream::from).unwrap().write_all(b"x").unwrap();
        bus.read_exact(&mut [0]).unwrap();
        hand_over(&unmounter, Err(io::ErrorKind::NotFound.into())).unwrap();
        assert!(mount::receive_descriptor(&daemon).is_none());
    }
}
