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

/// Answers until no process has the filter any more; `log` gets the name of each call once. Errors:
/// failures of the listener: from then on the kernel answers the calls.
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
                Some(order) => log(&format!("{} {order:#x}", call_name(number))),
                None => log(&call_name(number)),
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

macro_rules! named {
    ($($call:ident),* $(,)?) => { &[$((libc::$call, stringify!($call))),*] };
}

/// Calls of all architectures that the filter supports.
#[rustfmt::skip]
const EVERYWHERE: &[(c_long, &str)] = named![
    SYS_accept, SYS_accept4, SYS_acct, SYS_add_key, SYS_adjtimex, SYS_bind, SYS_bpf, SYS_brk,
    SYS_capget, SYS_capset, SYS_chdir, SYS_chroot, SYS_clock_adjtime, SYS_clock_getres,
    SYS_clock_gettime, SYS_clock_nanosleep, SYS_clock_settime, SYS_clone, SYS_clone3, SYS_close,
    SYS_close_range, SYS_connect, SYS_copy_file_range, SYS_delete_module, SYS_dup, SYS_dup3,
    SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_epoll_pwait2, SYS_eventfd2, SYS_execve,
    SYS_execveat, SYS_exit, SYS_exit_group, SYS_faccessat, SYS_faccessat2, SYS_fadvise64,
    SYS_fallocate, SYS_fanotify_init, SYS_fanotify_mark, SYS_fchdir, SYS_fchmod, SYS_fchmodat,
    SYS_fchown, SYS_fchownat, SYS_fcntl, SYS_fdatasync, SYS_fgetxattr, SYS_finit_module,
    SYS_flistxattr, SYS_flock, SYS_fremovexattr, SYS_fsconfig, SYS_fsetxattr, SYS_fsmount,
    SYS_fsopen, SYS_fspick, SYS_fstat, SYS_fstatfs, SYS_fsync, SYS_ftruncate, SYS_futex,
    SYS_futex_waitv, SYS_get_mempolicy, SYS_get_robust_list, SYS_getcpu, SYS_getcwd, SYS_getdents64,
    SYS_getegid, SYS_geteuid, SYS_getgid, SYS_getgroups, SYS_getitimer, SYS_getpeername,
    SYS_getpgid, SYS_getpid, SYS_getppid, SYS_getpriority, SYS_getrandom, SYS_getresgid,
    SYS_getresuid, SYS_getrusage, SYS_getsid, SYS_getsockname, SYS_getsockopt, SYS_gettid,
    SYS_gettimeofday, SYS_getuid, SYS_getxattr, SYS_init_module, SYS_inotify_add_watch,
    SYS_inotify_init1, SYS_inotify_rm_watch, SYS_io_cancel, SYS_io_destroy, SYS_io_getevents,
    SYS_io_setup, SYS_io_submit, SYS_io_uring_enter, SYS_io_uring_register, SYS_io_uring_setup,
    SYS_ioctl, SYS_ioprio_get, SYS_ioprio_set, SYS_kcmp, SYS_kexec_file_load, SYS_kexec_load,
    SYS_keyctl, SYS_kill, SYS_landlock_add_rule, SYS_landlock_create_ruleset,
    SYS_landlock_restrict_self, SYS_lgetxattr, SYS_linkat, SYS_listen, SYS_listxattr,
    SYS_llistxattr, SYS_lookup_dcookie, SYS_lremovexattr, SYS_lseek, SYS_lsetxattr, SYS_madvise,
    SYS_mbind, SYS_membarrier, SYS_memfd_create, SYS_memfd_secret, SYS_migrate_pages, SYS_mincore,
    SYS_mkdirat, SYS_mknodat, SYS_mlock, SYS_mlock2, SYS_mlockall, SYS_mmap, SYS_mount,
    SYS_mount_setattr, SYS_move_mount, SYS_move_pages, SYS_mprotect, SYS_mq_getsetattr,
    SYS_mq_notify, SYS_mq_open, SYS_mq_timedreceive, SYS_mq_timedsend, SYS_mq_unlink, SYS_mremap,
    SYS_mseal, SYS_msgctl, SYS_msgget, SYS_msgrcv, SYS_msgsnd, SYS_msync, SYS_munlock,
    SYS_munlockall, SYS_munmap, SYS_name_to_handle_at, SYS_nanosleep, SYS_newfstatat,
    SYS_nfsservctl, SYS_open_by_handle_at, SYS_open_tree, SYS_openat, SYS_openat2,
    SYS_perf_event_open, SYS_personality, SYS_pidfd_getfd, SYS_pidfd_open, SYS_pidfd_send_signal,
    SYS_pipe2, SYS_pivot_root, SYS_pkey_alloc, SYS_pkey_free, SYS_pkey_mprotect, SYS_ppoll,
    SYS_prctl, SYS_pread64, SYS_preadv, SYS_preadv2, SYS_prlimit64, SYS_process_madvise,
    SYS_process_mrelease, SYS_process_vm_readv, SYS_process_vm_writev, SYS_pselect6, SYS_ptrace,
    SYS_pwrite64, SYS_pwritev, SYS_pwritev2, SYS_quotactl, SYS_quotactl_fd, SYS_read, SYS_readahead,
    SYS_readlinkat, SYS_readv, SYS_reboot, SYS_recvfrom, SYS_recvmmsg, SYS_recvmsg,
    SYS_remap_file_pages, SYS_removexattr, SYS_renameat2, SYS_request_key, SYS_restart_syscall,
    SYS_rseq, SYS_rt_sigaction, SYS_rt_sigpending, SYS_rt_sigprocmask, SYS_rt_sigqueueinfo,
    SYS_rt_sigreturn, SYS_rt_sigsuspend, SYS_rt_sigtimedwait, SYS_rt_tgsigqueueinfo,
    SYS_sched_get_priority_max, SYS_sched_get_priority_min, SYS_sched_getaffinity,
    SYS_sched_getattr, SYS_sched_getparam, SYS_sched_getscheduler, SYS_sched_rr_get_interval,
    SYS_sched_setaffinity, SYS_sched_setattr, SYS_sched_setparam, SYS_sched_setscheduler,
    SYS_sched_yield, SYS_seccomp, SYS_semctl, SYS_semget, SYS_semop, SYS_semtimedop, SYS_sendfile,
    SYS_sendmmsg, SYS_sendmsg, SYS_sendto, SYS_set_mempolicy, SYS_set_mempolicy_home_node,
    SYS_set_robust_list, SYS_set_tid_address, SYS_setdomainname, SYS_setfsgid, SYS_setfsuid,
    SYS_setgid, SYS_setgroups, SYS_sethostname, SYS_setitimer, SYS_setns, SYS_setpgid,
    SYS_setpriority, SYS_setregid, SYS_setresgid, SYS_setresuid, SYS_setreuid, SYS_setsid,
    SYS_setsockopt, SYS_settimeofday, SYS_setuid, SYS_setxattr, SYS_shmat, SYS_shmctl, SYS_shmdt,
    SYS_shmget, SYS_shutdown, SYS_sigaltstack, SYS_signalfd4, SYS_socket, SYS_socketpair,
    SYS_splice, SYS_statfs, SYS_statx, SYS_swapoff, SYS_swapon, SYS_symlinkat, SYS_sync, SYS_syncfs,
    SYS_sysinfo, SYS_syslog, SYS_tee, SYS_tgkill, SYS_timer_create, SYS_timer_delete,
    SYS_timer_getoverrun, SYS_timer_gettime, SYS_timer_settime, SYS_timerfd_create,
    SYS_timerfd_gettime, SYS_timerfd_settime, SYS_times, SYS_tkill, SYS_truncate, SYS_umask,
    SYS_umount2, SYS_uname, SYS_unlinkat, SYS_unshare, SYS_userfaultfd, SYS_utimensat, SYS_vhangup,
    SYS_vmsplice, SYS_wait4, SYS_waitid, SYS_write, SYS_writev,
];

/// Older calls, which other architectures do not have.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const OLD: &[(c_long, &str)] = named![
    SYS__sysctl, SYS_access, SYS_afs_syscall, SYS_alarm, SYS_arch_prctl, SYS_chmod, SYS_chown,
    SYS_creat, SYS_dup2, SYS_epoll_create, SYS_epoll_ctl_old, SYS_epoll_wait, SYS_epoll_wait_old,
    SYS_eventfd, SYS_fork, SYS_futimesat, SYS_get_thread_area, SYS_getdents, SYS_getpgrp,
    SYS_getpmsg, SYS_getrlimit, SYS_inotify_init, SYS_ioperm, SYS_iopl, SYS_lchown, SYS_link,
    SYS_lstat, SYS_mkdir, SYS_mknod, SYS_modify_ldt, SYS_open, SYS_pause, SYS_pipe, SYS_poll,
    SYS_putpmsg, SYS_readlink, SYS_rename, SYS_renameat, SYS_rmdir, SYS_security, SYS_select,
    SYS_set_thread_area, SYS_setrlimit, SYS_signalfd, SYS_stat, SYS_symlink, SYS_sync_file_range,
    SYS_sysfs, SYS_time, SYS_tuxcall, SYS_unlink, SYS_uselib, SYS_ustat, SYS_utime, SYS_utimes,
    SYS_vfork, SYS_vserver,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[(c_long, &str)] = &[(38, "renameat"), (84, "sync_file_range")];

/// Calls that are newer than the crate; since Linux 5.1 numbers are the same on all architectures.
#[rustfmt::skip]
const NEW: &[(c_long, &str)] = &[
    (451, "cachestat"), (452, "fchmodat2"), (453, "map_shadow_stack"), (454, "futex_wake"),
    (455, "futex_wait"), (456, "futex_requeue"), (457, "statmount"), (458, "listmount"),
    (459, "lsm_get_self_attr"), (460, "lsm_set_self_attr"), (461, "lsm_list_modules"),
    (463, "setxattrat"), (464, "getxattrat"), (465, "listxattrat"), (466, "removexattrat"),
    (467, "open_tree_attr"), (468, "file_getattr"), (469, "file_setattr"), (470, "listns"),
    (471, "rseq_slice_yield"),
];

/// Returns the name of a system call, or its number if it has none here.
pub(super) fn call_name(number: c_long) -> String {
    let all = EVERYWHERE.iter().chain(OLD).chain(NEW);
    let found = all.into_iter().find(|(call, _)| *call == number);
    found.map_or_else(|| format!("number {number}"), |(_, name)| name.trim_start_matches("SYS_").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_names_and_unknown_ones_a_number() {
        assert_eq!(call_name(libc::SYS_mount), "mount");
        assert_eq!(call_name(467), "open_tree_attr");
        assert_eq!(call_name(99_999), "number 99999");
        let mut numbers: Vec<_> = EVERYWHERE.iter().chain(OLD).chain(NEW).map(|(number, _)| number).collect();
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|pair| pair[0] != pair[1]), "each is named once");
    }
}
