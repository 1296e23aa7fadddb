//! Refuses the daemon the system calls that lead out of it, once it has all that it needs (seccomp).
//!
//! Landlock binds files and TCP. What it leaves, on all kernels or on older ones, is here: new sockets of whatever family, connections,
//! messages to an address, programs, signals to others, the memory of others, modes, owners and attributes by path, and interfaces of the
//! kernel that none of our code uses and that have been its weak spots.
//!
//! # Why this breaks no mount
//! It is a list of what is refused, not of what is allowed: a C library or kernel that does an allowed thing by a new call finds that call
//! allowed. What is on it fails with EPERM, as a container would have it, and nobody is killed. Each connection that is needed later is there
//! when the filter is put on, and what may have to be made anew (the bus) or is another program's (fusermount3) is the other process's work.
//! A kernel or a machine that refuses the filter, or one that it cannot be written for, goes without.
//!
//! It binds the thread that puts it on and those that this one starts: so it comes before any other thread, as Landlock does.

use std::collections::BTreeMap;

use nix::libc::{self, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

/// Refused whatever the arguments are.
const REFUSED: &[c_long] = &[
    // Others: where to, what with.
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_tkill,
    libc::SYS_kcmp,
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    // What a file is, beside its content, which is all that Landlock asks about.
    libc::SYS_fchmodat,
    FCHMODAT2,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    SETXATTRAT,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    REMOVEXATTRAT,
    // The tree of mounts and other views of the machine.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_open_by_handle_at,
    // The kernel itself.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_personality,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_syslog,
];

/// Calls that the crate has no names for yet; the numbers are those of all kinds of machines.
const FCHMODAT2: c_long = 452;
const SETXATTRAT: c_long = 463;
const REMOVEXATTRAT: c_long = 466;

/// Orders of fcntl(2) by which the kernel is made to signal somebody: F_SETOWN, F_SETSIG, F_SETOWN_EX.
const SIGNALLING: [u64; 3] = [8, 10, 15];
/// The same of ioctl(2), and those that type into a terminal: FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX.
const TYPING: [u64; 4] = [0x8901, 0x8902, 0x5412, 0x541C];

/// Those of signals name a process first: one's own may be signalled, which abort(3) does.
const SIGNALS: [c_long; 4] = [libc::SYS_kill, libc::SYS_tgkill, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo];

/// The second way of naming calls on x86-64, with numbers of its own for some of those above.
#[cfg(target_arch = "x86_64")]
const X32: i64 = 0x4000_0000;

/// Older calls for what is refused above, which other machines do not have.
#[cfg(target_arch = "x86_64")]
const OLD_NAMES: [c_long; 8] = [
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
];

/// Puts the filter on this thread and all that it starts.
///
/// # Errors
/// What the kernel, or the machine's kind, has against it: nothing is refused then.
pub(crate) fn enter() -> Result<(), String> {
    let program = program(std::process::id()).map_err(|error| error.to_string())?;
    seccompiler::apply_filter(&program).map_err(|error| match error {
        seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error.to_string(),
        other => other.to_string(),
    })
}

fn program(own: u32) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = REFUSED.iter().map(|&call| (call, Vec::new())).collect();
    let unless = |argument, length, value| {
        SeccompCondition::new(argument, length, SeccompCmpOp::Ne, value).and_then(|is| SeccompRule::new(vec![is]))
    };
    for call in SIGNALS {
        rules.insert(call, vec![unless(0, SeccompCmpArgLen::Dword, own.into())?]);
    }
    // The limits of one's own process go by no number.
    rules.insert(libc::SYS_prlimit64, vec![unless(0, SeccompCmpArgLen::Dword, 0)?]);
    for (call, orders) in [(libc::SYS_fcntl, &SIGNALLING[..]), (libc::SYS_ioctl, &TYPING[..])] {
        let is = |&order| {
            SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, order)
                .and_then(|is| SeccompRule::new(vec![is]))
        };
        rules.insert(call, orders.iter().map(is).collect::<Result<_, _>>()?);
    }
    // Of a descriptor, not of a path.
    rules.insert(libc::SYS_utimensat, vec![unless(1, SeccompCmpArgLen::Qword, 0)?]);
    // To the other end of a connection, not to an address.
    rules.insert(libc::SYS_sendto, vec![unless(4, SeccompCmpArgLen::Qword, 0)?]);
    #[cfg(target_arch = "x86_64")]
    {
        rules.extend(OLD_NAMES.map(|call| (call, Vec::new())));
        let again: Vec<_> = rules.iter().map(|(call, rules)| (call | X32, rules.clone())).collect();
        rules.extend(again);
        rules.extend((512..=547).map(|call| (call | X32, Vec::new())));
    }
    let kind = TargetArch::try_from(std::env::consts::ARCH)?;
    let refusal = SeccompAction::Errno(libc::EPERM as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, refusal, kind)?.try_into()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
    use std::process::Command;

    use nix::errno::Errno;
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::{Pid, getppid};

    use super::*;

    /// In a thread of its own, which does not get rid of the filter again.
    #[test]
    fn what_leads_out_is_refused_and_what_a_mount_does_is_not() {
        let place = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(place.path().join("socket")).unwrap();
        let log = UnixDatagram::bind(place.path().join("log")).unwrap();
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let connected = UnixDatagram::unbound().unwrap();
        connected.connect(place.path().join("log")).unwrap();
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let at = |name: &str| place.path().join(name);
        std::thread::scope(|scope| {
            let confined = scope.spawn(|| {
                enter().unwrap();
                let refused = |result: std::io::Result<()>, what: &str| {
                    assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EPERM), "{what}");
                };
                refused(UnixStream::connect(at("socket")).map(drop), "connect to a path");
                refused(UnixDatagram::unbound().map(drop), "a datagram socket");
                refused(std::net::UdpSocket::bind("127.0.0.1:0").map(drop), "UDP");
                refused(std::net::TcpListener::bind("127.0.0.1:0").map(drop), "TCP");
                refused(UnixStream::pair().map(drop), "a pair");
                refused(connected.send_to(b"x", at("log")).map(drop), "a message to an address");
                refused(Command::new("true").spawn().map(drop), "a program");
                let errno = |result: nix::Result<()>| result.map_err(std::io::Error::from);
                refused(errno(kill(getppid(), None)), "asking for a signal to another process");
                refused(errno(kill(Pid::from_raw(child.id() as i32), Signal::SIGKILL)), "a signal to a child");
                refused(errno(nix::mount::umount("/nonexistent")), "unmounting");
                let mode = std::os::unix::fs::PermissionsExt::from_mode(0o4755);
                refused(std::fs::set_permissions(at("log"), mode), "a mode by path");
                refused(std::os::unix::fs::chown(at("log"), Some(0), None), "an owner by path");
                let attribute = rustix::fs::setxattr(at("log"), "user.a", b"x", rustix::fs::XattrFlags::empty());
                refused(attribute.map_err(std::io::Error::from), "an attribute by path");
                let times = nix::sys::stat::utimes(
                    &at("log"),
                    &nix::sys::time::TimeVal::new(0, 0),
                    &nix::sys::time::TimeVal::new(0, 0),
                );
                refused(errno(times), "times by path");
                // SAFETY: none of these gets a pointer that the kernel would follow, and each is refused before it does anything.
                let raw =
                    |call: c_long, argument: libc::c_ulong| unsafe { libc::syscall(call, argument, 0, 0, 0, 0, 0) };
                for (call, what) in [
                    (libc::SYS_ptrace, "ptrace"),
                    (libc::SYS_process_vm_readv, "the memory of others"),
                    (libc::SYS_pidfd_open, "a handle of a process"),
                    (libc::SYS_io_uring_setup, "io_uring"),
                    (libc::SYS_execveat, "execveat"),
                    (libc::SYS_bpf, "bpf"),
                    (libc::SYS_unshare, "namespaces"),
                    (libc::SYS_shmget, "shared memory"),
                    (libc::SYS_prlimit64, "limits of others"),
                ] {
                    assert_eq!(raw(call, 1), -1, "{what}");
                    assert_eq!(Errno::last(), Errno::EPERM, "{what}");
                }
                let order = |call: c_long, order: u64| {
                    // SAFETY: no pointer is passed.
                    unsafe { libc::syscall(call, ours.as_raw_fd(), order, 0, 0, 0, 0) }
                };
                for (call, orders) in [(libc::SYS_fcntl, &SIGNALLING[..]), (libc::SYS_ioctl, &TYPING[..])] {
                    for &number in orders {
                        assert_eq!((order(call, number), Errno::last()), (-1, Errno::EPERM), "order {number}");
                    }
                }
                #[cfg(target_arch = "x86_64")]
                for call in [X32 | libc::SYS_socket, X32 | 520] {
                    assert_eq!((raw(call, 0), Errno::last()), (-1, Errno::EPERM), "by the other numbers");
                }

                // What was there before goes on.
                ours.write_all(b"question").unwrap();
                connected.send(b"line").unwrap();
                assert!(kill(Pid::this(), None).is_ok(), "our own process");
                std::thread::spawn(|| ()).join().unwrap();
                let file = File::create(at("file")).unwrap();
                file.sync_all().unwrap();
                file.set_modified(std::time::SystemTime::now()).unwrap();
                rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
                assert!(nix::poll::poll(&mut [], nix::poll::PollTimeout::ZERO).is_ok());
                assert!(listener.as_fd().as_raw_fd() > 0);
            });
            confined.join().unwrap();
        });
        let mut question = [0; 8];
        theirs.read_exact(&mut question).unwrap();
        assert_eq!(log.recv(&mut [0; 8]).unwrap(), 4);
        assert!(UnixStream::pair().is_ok(), "other threads are not bound");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
