//! Answers refused system calls through the filter's listener, and logs each once by name.
//!
//! A filter knows only numbers and cannot log. So a process outside of the sandbox holds the
//! filter's listener (seccomp_unotify(2)) and answers every refused call with ENOSYS. It never lets
//! one continue, and looks only at numbers. If this process is gone, the kernel gives the same
//! answer by itself, so no call blocks.
//!
//! A signal (SECCOMP_RET_TRAP) would need no other process, but would kill a thread that blocks
//! signals, as glibc does whenever it starts a thread. SECCOMP_RET_LOG would let the call happen.
//! The kernel's audit log does not name calls and is not readable for the user.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc::{self, c_int, c_long};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::names;

/// Maximum number of different calls that are logged: a compromised process may try any number.
const MAX_LOGGED: usize = 256;

/// Calls whose command argument says more than their name, with the index of that argument.
const ORDERS: [(c_long, usize); 5] = [
    (libc::SYS_ioctl, 1),
    (libc::SYS_fcntl, 1),
    (libc::SYS_prctl, 0),
    (libc::SYS_socket, 0),
    (libc::SYS_setsockopt, 2),
];

/// Answers until no process has the filter any more; `log` gets the name of each call once.
///
/// # Errors
/// Errors of the listener: from then on the kernel answers the calls.
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
        refuse_call(listener, call.id)?;
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

/// Rejects a kernel with larger messages than the buffers here: it would write beyond them.
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

/// Returns None if the calling thread has ended meanwhile.
fn receive(listener: &OwnedFd) -> io::Result<Option<libc::seccomp_notif>> {
    // SAFETY: integers alone, for which all zeros are a value; the kernel asks for zeros.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one message, which is no larger than the struct, as `check_sizes`
    // has seen.
    let result: c_int = unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) };
    match Errno::result(result) {
        Ok(_) => Ok(Some(call)),
        Err(Errno::ENOENT | Errno::EINTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Makes the call fail with ENOSYS.
fn refuse_call(listener: &OwnedFd, id: u64) -> io::Result<()> {
    let mut refusal = libc::seccomp_notif_resp { id, val: 0, error: -libc::ENOSYS, flags: 0 };
    // SAFETY: the kernel reads one answer, which is no larger than the struct, as `check_sizes`
    // has seen.
    let result: c_int = unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut refusal) };
    match Errno::result(result) {
        Ok(_) | Err(Errno::ENOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
