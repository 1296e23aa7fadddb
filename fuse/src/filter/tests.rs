use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::Command;
use std::sync::mpsc;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};

use super::*;

fn raw(call: c_long, arguments: [c_ulong; 6]) -> Errno {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: no argument is a pointer that the kernel could follow, and no descriptor is open:
    // each call is refused before it does anything, and where it is not, it fails.
    match unsafe { libc::syscall(call, a, b, c, d, e, f) } {
        -1 => Errno::last(),
        _ => Errno::from_raw(0),
    }
}

/// Runs `confined` in a thread with the filter, which cannot be removed. Returns the names of
/// refused calls.
fn confine(process: ConfinedProcess, confined: impl FnOnce() + Send) -> Vec<String> {
    let (sender, listener) = mpsc::channel();
    thread::scope(|scope| {
        let naming = scope.spawn(move || {
            let (mut names, listener): (Vec<String>, OwnedFd) = (Vec::new(), listener.recv().unwrap());
            refusals::serve(&listener, |name| names.push(name.to_owned())).unwrap();
            names
        });
        let work = scope.spawn(move || {
            let entered = enter(process, |listener| sender.send(listener.try_clone()?).map_err(io::Error::other));
            assert_eq!(entered, Ok(RefusalLogging::Logged));
            confined();
        });
        work.join().unwrap();
        naming.join().unwrap()
    })
}

fn refused(result: std::io::Result<()>, what: &str) {
    assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ENOSYS), "{what}");
}

#[test]
fn what_leads_out_is_refused_and_what_a_mount_does_is_not() {
    let place = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(place.path().join("socket")).unwrap();
    let log = UnixDatagram::bind(place.path().join("log")).unwrap();
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let connected = UnixDatagram::unbound().unwrap();
    connected.connect(place.path().join("log")).unwrap();
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let number = child.id();
    let at = |name: &str| place.path().join(name);
    confine(ConfinedProcess::Daemon, || {
        refused(UnixStream::connect(at("socket")).map(drop), "connect to a path");
        refused(UnixDatagram::unbound().map(drop), "a datagram socket");
        refused(std::net::UdpSocket::bind("127.0.0.1:0").map(drop), "UDP");
        refused(std::net::TcpListener::bind("127.0.0.1:0").map(drop), "TCP");
        refused(UnixStream::pair().map(drop), "a pair");
        refused(connected.send_to(b"x", at("log")).map(drop), "a message to an address");
        assert!(Command::new("true").spawn().is_err(), "a program");
        let errno = |result: nix::Result<()>| result.map_err(std::io::Error::from);
        refused(errno(kill(getppid(), None)), "asking for a signal to another process");
        refused(errno(kill(Pid::from_raw(number as i32), Signal::SIGKILL)), "a signal to a child");
        refused(errno(nix::mount::umount("/nonexistent")), "unmounting");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o4755);
        refused(std::fs::set_permissions(at("log"), mode), "a mode by path");
        refused(std::os::unix::fs::chown(at("log"), Some(0), None), "an owner by path");
        let attribute = rustix::fs::setxattr(at("log"), "user.a", b"x", rustix::fs::XattrFlags::empty());
        refused(attribute.map_err(std::io::Error::from), "an attribute by path");
        let never = nix::sys::time::TimeVal::new(0, 0);
        refused(errno(nix::sys::stat::utimes(&at("log"), &never, &never)), "times by path");
        let page = libc::PROT_READ | libc::PROT_EXEC;
        let map = [0, 4096, page as c_ulong, (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as c_ulong, c_ulong::MAX, 0];
        assert_eq!(raw(libc::SYS_mmap, map), Errno::ENOSYS, "memory that can be run");

        // Existing descriptors still work.
        ours.write_all(b"question").unwrap();
        connected.send(b"line").unwrap();
        assert!(kill(Pid::this(), None).is_ok(), "our own process");
        thread::spawn(|| ()).join().unwrap();
        let file = File::create(at("file")).unwrap();
        file.sync_all().unwrap();
        file.set_modified(std::time::SystemTime::now()).unwrap();
        std::fs::rename(at("file"), at("renamed")).unwrap();
        std::fs::remove_file(at("renamed")).unwrap();
        assert_eq!(std::fs::metadata(at("log")).unwrap().len(), 0);
        rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
        assert!(nix::poll::poll(&mut [], nix::poll::PollTimeout::ZERO).is_ok());
        assert!(listener.as_fd().as_raw_fd() > 0);
        assert!(vec![7_u8; 64 << 20].iter().all(|byte| *byte == 7), "memory");
    });
    let mut question = [0; 8];
    theirs.read_exact(&mut question).unwrap();
    assert_eq!(log.recv(&mut [0; 8]).unwrap(), 4);
    assert!(UnixStream::pair().is_ok(), "other threads are not bound");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Calls that a compromised program would try, as tests/mount/inject.py makes a live one do.
const TRIED: &[(c_long, [c_ulong; 6])] = &[
    (libc::SYS_readlinkat, [100, 1, 2, 3, 0, 0]),
    (libc::SYS_chdir, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_fchdir, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_truncate, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_linkat, [100, 1, 100, 1, 0, 0]),
    (libc::SYS_symlinkat, [1, 100, 1, 0, 0, 0]),
    (libc::SYS_mkdirat, [100, 1, 0, 0, 0, 0]),
    (libc::SYS_mknodat, [100, 1, 0x1180, 0, 0, 0]),
    (libc::SYS_fchmod, [1, 0o777, 0, 0, 0, 0]),
    (libc::SYS_fchmodat, [100, 1, 0o777, 0, 0, 0]),
    (452, [100, 1, 0o777, 0, 0, 0]),
    (libc::SYS_fchown, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_fchownat, [100, 1, 0, 0, 0, 0]),
    (libc::SYS_setxattr, [1, 1, 1, 1, 0, 0]),
    (libc::SYS_fsetxattr, [1, 1, 1, 1, 0, 0]),
    (463, [100, 1, 0, 1, 1, 24]),
    (466, [100, 1, 0, 1, 0, 0]),
    (libc::SYS_utimensat, [100, 1, 0, 0, 0, 0]),
    (468, [100, 1, 1, 24, 0, 0]),
    (469, [100, 1, 1, 24, 0, 0]),
    (libc::SYS_socket, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_socket, [16, 3, 0, 0, 0, 0]),
    (libc::SYS_socket, [2, 2, 0, 0, 0, 0]),
    // MPTCP, SCTP and SMC, of which Landlock restricts no ports.
    (libc::SYS_socket, [2, 1, 262, 0, 0, 0]),
    (libc::SYS_socket, [10, 1, 262, 0, 0, 0]),
    (libc::SYS_socket, [2, 1, 132, 0, 0, 0]),
    (libc::SYS_socket, [2, 1, 256, 0, 0, 0]),
    (libc::SYS_socketpair, [1, 2, 0, 1, 0, 0]),
    (libc::SYS_socketpair, [1, 5, 0, 1, 0, 0]),
    (libc::SYS_bind, [1, 1, 1, 0, 0, 0]),
    (libc::SYS_listen, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_io_uring_setup, [8, 1, 0, 0, 0, 0]),
    (libc::SYS_io_uring_enter, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_ptrace, [16, 1, 0, 0, 0, 0]),
    (libc::SYS_process_vm_readv, [1, 1, 1, 1, 1, 0]),
    (libc::SYS_process_vm_writev, [1, 1, 1, 1, 1, 0]),
    (libc::SYS_process_madvise, [1, 1, 1, 1, 0, 0]),
    (libc::SYS_pidfd_open, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_pidfd_getfd, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_pidfd_send_signal, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_kcmp, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_kill, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_kill, [c_ulong::MAX, 0, 0, 0, 0, 0]),
    (libc::SYS_kill, [0, 0, 0, 0, 0, 0]),
    (libc::SYS_tkill, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_tgkill, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_mount, [1, 1, 1, 0, 0, 0]),
    (libc::SYS_umount2, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_fsopen, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_fspick, [100, 1, 0, 0, 0, 0]),
    (libc::SYS_open_tree, [100, 1, 1, 0, 0, 0]),
    (libc::SYS_move_mount, [100, 1, 100, 1, 0, 0]),
    (libc::SYS_mount_setattr, [100, 1, 0, 1, 32, 0]),
    (457, [1, 1, 1, 0, 0, 0]),
    (458, [1, 1, 16, 0, 0, 0]),
    (467, [100, 1, 0, 1, 32, 0]),
    (470, [1, 1, 1, 0, 0, 0]),
    (libc::SYS_pivot_root, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_chroot, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_setns, [100, 0, 0, 0, 0, 0]),
    (libc::SYS_unshare, [0x20000, 0, 0, 0, 0, 0]),
    (libc::SYS_fanotify_init, [0, 0, 0, 0, 0, 0]),
    (libc::SYS_fanotify_init, [0xe00, 0, 0, 0, 0, 0]),
    (libc::SYS_fanotify_init, [4, 0, 0, 0, 0, 0]),
    (libc::SYS_fanotify_mark, [100, 1, 0x20, 100, 1, 0]),
    (libc::SYS_inotify_init1, [0, 0, 0, 0, 0, 0]),
    (libc::SYS_quotactl, [0x800700, 1, 0, 1, 0, 0]),
    (libc::SYS_quotactl_fd, [100, 0x800700, 0, 1, 0, 0]),
    (libc::SYS_setpriority, [0, 1, 0, 0, 0, 0]),
    (libc::SYS_sched_setaffinity, [1, 128, 1, 0, 0, 0]),
    (libc::SYS_sched_setscheduler, [1, 0, 1, 0, 0, 0]),
    (libc::SYS_ioprio_set, [1, 1, 0x4004, 0, 0, 0]),
    (libc::SYS_prlimit64, [1, 7, 0, 1, 0, 0]),
    (libc::SYS_prlimit64, [0, 4, 1, 0, 0, 0]),
    (libc::SYS_setrlimit, [4, 1, 0, 0, 0, 0]),
    (libc::SYS_memfd_create, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_memfd_secret, [0, 0, 0, 0, 0, 0]),
    (libc::SYS_execve, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_execveat, [100, 1, 0, 0, 0x1000, 0]),
    (libc::SYS_clone, [17, 0, 0, 0, 0, 0]),
    (libc::SYS_clone, [0x1000_0000 | 17, 0, 0, 0, 0, 0]),
    (libc::SYS_clone3, [1, 88, 0, 0, 0, 0]),
    (libc::SYS_kexec_load, [0, 0, 1, 0, 0, 0]),
    (libc::SYS_init_module, [1, 1, 1, 0, 0, 0]),
    (libc::SYS_finit_module, [100, 1, 0, 0, 0, 0]),
    (libc::SYS_sethostname, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_add_key, [1, 1, 1, 1, 1, 0]),
    (libc::SYS_request_key, [1, 1, 1, 1, 0, 0]),
    (libc::SYS_keyctl, [0, 1, 0, 0, 0, 0]),
    (libc::SYS_bpf, [0, 1, 64, 0, 0, 0]),
    (libc::SYS_perf_event_open, [1, 0, c_ulong::MAX, c_ulong::MAX, 0, 0]),
    (libc::SYS_userfaultfd, [0, 0, 0, 0, 0, 0]),
    (libc::SYS_syslog, [10, 0, 0, 0, 0, 0]),
    (libc::SYS_name_to_handle_at, [100, 1, 1, 1, 0, 0]),
    (libc::SYS_open_by_handle_at, [100, 1, 0, 0, 0, 0]),
    (libc::SYS_mq_open, [1, 66, 438, 0, 0, 0]),
    (libc::SYS_shmget, [1, 4096, 934, 0, 0, 0]),
    (libc::SYS_msgget, [1, 934, 0, 0, 0, 0]),
    (libc::SYS_semget, [1, 1, 934, 0, 0, 0]),
    (libc::SYS_move_pages, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_acct, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_reboot, [0, 0, 0, 0, 0, 0]),
    (libc::SYS_swapon, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_swapoff, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_settimeofday, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_clock_settime, [0, 1, 0, 0, 0, 0]),
    (libc::SYS_adjtimex, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_setresuid, [0, 0, 0, 0, 0, 0]),
    (libc::SYS_capset, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_capget, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_personality, [0, 0, 0, 0, 0, 0]),
    (libc::SYS_pkey_mprotect, [0, 4096, 5, 0, 0, 0]),
    (libc::SYS_sync, [0, 0, 0, 0, 0, 0]),
    (libc::SYS_syncfs, [100, 0, 0, 0, 0, 0]),
    (libc::SYS_seccomp, [1, 8, 0, 0, 0, 0]),
    (libc::SYS_seccomp, [1, 0, 0, 0, 0, 0]),
    // The host's file system: EXT4_IOC_SHUTDOWN, FIFREEZE, FITHAW, FITRIM, FS_IOC_SETFLAGS,
    // FS_IOC_FSSETXATTR, FICLONE.
    (libc::SYS_ioctl, [c_ulong::MAX, 0x8004_587D, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [c_ulong::MAX, 0xC004_5877, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [c_ulong::MAX, 0xC004_5878, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [c_ulong::MAX, 0xC018_5879, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [c_ulong::MAX, 0x4008_6602, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [c_ulong::MAX, 0x401C_5820, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [c_ulong::MAX, 0x4004_9409, 0, 0, 0, 0]),
    // Calls that type into a terminal or make the kernel signal a process: TIOCSTI, TIOCLINUX,
    // FIOSETOWN, SIOCSPGRP.
    (libc::SYS_ioctl, [c_ulong::MAX, 0x5412, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [c_ulong::MAX, 0x541C, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [c_ulong::MAX, 0x8901, 0, 0, 0, 0]),
    (libc::SYS_ioctl, [c_ulong::MAX, 0x8902, 0, 0, 0, 0]),
    // F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY.
    (libc::SYS_fcntl, [c_ulong::MAX, 8, 0, 0, 0, 0]),
    (libc::SYS_fcntl, [c_ulong::MAX, 10, 0, 0, 0, 0]),
    (libc::SYS_fcntl, [c_ulong::MAX, 15, 0, 0, 0, 0]),
    (libc::SYS_fcntl, [c_ulong::MAX, 1024, 0, 0, 0, 0]),
    (libc::SYS_fcntl, [c_ulong::MAX, 1026, 0, 0, 0, 0]),
    // PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_PTRACER, PR_CAP_AMBIENT.
    (libc::SYS_prctl, [4, 1, 0, 0, 0, 0]),
    (libc::SYS_prctl, [22, 2, 0, 0, 0, 0]),
    (libc::SYS_prctl, [0x5961_6d61, 1, 0, 0, 0, 0]),
    (libc::SYS_prctl, [47, 2, 0, 0, 0, 0]),
    // The first number that no kernel has.
    (0x7FFF, [0, 0, 0, 0, 0, 0]),
];

/// Older calls, and the second way of naming calls on x86-64, with numbers of its own for some.
#[cfg(target_arch = "x86_64")]
const TRIED_THERE: &[(c_long, [c_ulong; 6])] = &[
    (libc::SYS_fork, [0; 6]),
    (libc::SYS_vfork, [0; 6]),
    (libc::SYS_chmod, [1, 0o777, 0, 0, 0, 0]),
    (libc::SYS_chown, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_creat, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_symlink, [1, 1, 0, 0, 0, 0]),
    (libc::SYS_utime, [1, 0, 0, 0, 0, 0]),
    (libc::SYS_iopl, [3, 0, 0, 0, 0, 0]),
    (libc::SYS_ioperm, [0x80, 1, 1, 0, 0, 0]),
    (libc::SYS_modify_ldt, [0, 1, 0, 0, 0, 0]),
    (0x4000_0000 | libc::SYS_getpid, [0; 6]),
    (0x4000_0000 | libc::SYS_socket, [1, 1, 0, 0, 0, 0]),
    (0x4000_0000 | 520, [0; 6]),
];
#[cfg(not(target_arch = "x86_64"))]
const TRIED_THERE: &[(c_long, [c_ulong; 6])] = &[];

/// Calls of the fetcher on its own files and with servers.
const OF_THE_FETCHER: &[c_long] = &[libc::SYS_mkdirat, libc::SYS_linkat, libc::SYS_readlinkat, libc::SYS_kill];

#[test]
fn no_call_that_acts_on_the_machine_is_allowed_to_either_process() {
    for process in [ConfinedProcess::Daemon, ConfinedProcess::Fetcher] {
        let names = confine(process, || {
            for &(call, arguments) in TRIED.iter().chain(TRIED_THERE) {
                if process == ConfinedProcess::Fetcher && OF_THE_FETCHER.contains(&call) {
                    continue;
                }
                assert_eq!(
                    raw(call, arguments),
                    Errno::ENOSYS,
                    "{process:?}: {} {arguments:x?}",
                    refusals::call_name(call)
                );
            }
            // Allowed arguments of the same calls.
            assert_eq!(raw(libc::SYS_prctl, [3, 0, 0, 0, 0, 0]), Errno::from_raw(0));
            assert_ne!(raw(libc::SYS_ioctl, [c_ulong::MAX, 0x5401, 0, 0, 0, 0]), Errno::ENOSYS);
        });
        // Once each, and without the unlogged ones.
        for name in [
            "mount",
            "open_tree_attr",
            "fanotify_init",
            "file_setattr",
            "ioctl 0x8004587d",
            "prctl 0x4",
            "number 32767",
        ] {
            assert_eq!(names.iter().filter(|logged| *logged == name).count(), 1, "{name} in {names:?}");
        }
        assert!(!names.iter().any(|name| name == "clone3" || name == "seccomp"), "{names:?}");
    }
}

#[test]
fn the_fetcher_connects_and_the_daemon_does_not() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    confine(ConfinedProcess::Fetcher, || {
        std::net::TcpStream::connect(address).unwrap().set_nodelay(true).unwrap();
        UnixStream::pair().unwrap();
        refused(UnixDatagram::unbound().map(drop), "another family");
        refused(std::net::UdpSocket::bind("127.0.0.1:0").map(drop), "UDP");
    });
    let names = confine(ConfinedProcess::Daemon, || refused(std::net::TcpStream::connect(address).map(drop), "TCP"));
    assert_eq!(names, ["socket 0x2"]);
}

#[test]
fn a_call_is_refused_without_a_listener() {
    thread::spawn(|| {
        assert_eq!(enter(ConfinedProcess::Daemon, |_| Ok(())), Ok(RefusalLogging::Logged));
        assert_eq!(raw(libc::SYS_mount, [0; 6]), Errno::ENOSYS);
        assert_eq!(raw(libc::SYS_sendmsg, [c_ulong::MAX, 0, 0, 0, 0, 0]), Errno::ENOSYS);
        // A second time in the same thread, as below a process that already has a listener.
        assert_ne!(raw(libc::SYS_getpid, [0; 6]), Errno::ENOSYS);
    })
    .join()
    .unwrap();
}
