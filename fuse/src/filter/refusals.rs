//! Answers the system calls that a filter does not allow, and logs each once by its name.
//!
//! A filter knows numbers and cannot log. So a process outside of the sandbox holds the listener of
//! the filter (seccomp_unotify(2)) and answers every such call with ENOSYS. It never lets one
//! continue, and looks at numbers alone. When this process is gone the kernel gives the same answer
//! by itself: nothing waits for it then.
//!
//! A signal (SECCOMP_RET_TRAP) would need no other process, but a thread that blocks signals, as
//! glibc does around each start of a thread, would be killed by it. SECCOMP_RET_LOG lets the call
//! happen. The kernel's audit log names no call and is not the user's.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc::{self, c_int, c_long};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::names;

/// Different calls that are logged: a process that was led astray may try any number.
const MAX_LOGGED: usize = 256;

/// Calls with an order that says more than their name, and the index of the argument that it is.
const ORDERS: [(c_long, usize); 5] = [
    (libc::SYS_ioctl, 1),
    (libc::SYS_fcntl, 1),
    (libc::SYS_prctl, 0),
    (libc::SYS_socket, 0),
    (libc::SYS_setsockopt, 2),
];

/// Answers until the filter binds no process any more; `tell` gets the name of each call once.
///
/// # Errors
/// The errors of the listener: the kernel answers the calls from then on.
pub(super) fn serve(listener: &OwnedFd, mut log: impl FnMut(&str)) -> io::Result<()> {
    check_sizes()?;
    let mut logged = BTreeSet::new();
    loop {
        let mut events = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        match poll(&mut events, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            other => drop(other?),
        }
        if !events[0].revents().is_some_and(|events| events.contains(PollFlags::POLLIN)) {
            return Ok(());
        }
        let Some(call) = receive(listener)? else { continue };
        answer(listener, call.id)?;
        let number = c_long::from(call.data.nr);
        let order =
            ORDERS.iter().find(|(call, _)| *call == number).map(|&(_, index)| call.data.args[index] & 0xFFFF_FFFF);
        if logged.len() < MAX_LOGGED && logged.insert((number, order)) {
            match order {
                Some(order) => log(&format!("{} {order:#x}", names::name(number))),
                None => log(&names::name(number)),
            }
        }
    }
}

/// Refuses a kernel with larger messages than the buffers here: it would write beyond them.
fn check_sizes() -> io::Result<()> {
    // SAFETY: an array of integers for which all zeros are a value.
    let mut sizes: libc::seccomp_notif_sizes = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes three 16-bit numbers, which is what the struct consists of.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_NOTIF_SIZES, 0, &raw mut sizes) };
    Errno::result(result)?;
    let fits = usize::from(sizes.seccomp_notif) <= size_of::<libc::seccomp_notif>()
        && usize::from(sizes.seccomp_notif_resp) <= size_of::<libc::seccomp_notif_resp>();
    if fits { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
}

/// None when the thread that called was ended meanwhile.
fn receive(listener: &OwnedFd) -> io::Result<Option<libc::seccomp_notif>> {
    // SAFETY: integers alone, for which all zeros are a value; the kernel asks for zeros.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one message, which is no larger than the struct, as `check_sizes` has seen.
    let result: c_int = unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) };
    match Errno::result(result) {
        Ok(_) => Ok(Some(call)),
        Err(Errno::ENOENT | Errno::EINTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Has the call fail with ENOSYS.
fn answer(listener: &OwnedFd, id: u64) -> io::Result<()> {
    let mut refusal = libc::seccomp_notif_resp { id, val: 0, error: -libc::ENOSYS, flags: 0 };
    // SAFETY: the kernel reads one answer, which is no larger than the struct, as `check_sizes` has seen.
    let result: c_int = unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut refusal) };
    match Errno::result(result) {
        Ok(_) | Err(Errno::ENOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
