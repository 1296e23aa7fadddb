//! System calls that the daemon and the fetcher may make while they serve.
//!
//! # Allowed calls, and the margin
//! The lists began with the calls made in runs of the mount cases and of the semantics tests. Added
//! are the calls that the C library, the allocator and Rust's runtime may use instead: tomorrow
//! another call may do the work of one that is allowed today. A call is allowed if it can affect
//! only the process itself, its memory, or its open descriptors. Calls with a path are allowed only
//! if Landlock binds them (open, rename, unlink) or if they only return attributes (stat). The one
//! exception is sched_getaffinity(2), which glibc calls with a thread number: it reveals the
//! processors on which another process may run.
//!
//! Never allowed are calls that act on the machine or on other processes: mounts and namespaces,
//! fanotify and inotify, modes, owners and attributes by path, quotas, modules, bpf, perf,
//! io_uring, keys, signals to others, memory of others, clocks, programs.

use nix::libc::{self, c_long};

use ArgumentRule::{Always, Bits, Both, Null, OneOf, OwnPid, Without};

/// Condition on the arguments of an allowed call.
pub(super) enum ArgumentRule {
    Always,
    /// The argument of this index is one of these, as 32 bits.
    OneOf(u8, &'static [u32]),
    /// The argument of this index is null.
    Null(u8),
    /// The argument of this index has none of these bits.
    Without(u8, u32),
    /// Masked with the first number, the argument of this index equals the second one.
    Bits(u8, u32, u32),
    /// The argument of this index is the process's own number.
    OwnPid(u8),
    Both(&'static ArgumentRule, &'static ArgumentRule),
}

/// Calls of later kernels that the crate does not name; their numbers are the same on all
/// architectures.
const FUTEX_WAKE: c_long = 454;
const FUTEX_WAIT: c_long = 455;
const FUTEX_REQUEUE: c_long = 456;

const UNCONDITIONAL: &[c_long] = &[
    // Open descriptors.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_flock,
    libc::SYS_getdents64,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_signalfd4,
    // Open sockets; new connections come only from a listening one.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    // Paths within Landlock's limits, and attributes by path.
    libc::SYS_openat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getcwd,
    // Memory of this process.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
    libc::SYS_munlock,
    libc::SYS_munlockall,
    libc::SYS_mseal,
    libc::SYS_membarrier,
    // Threads of this process.
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    FUTEX_WAKE,
    FUTEX_WAIT,
    FUTEX_REQUEUE,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_wait4,
    libc::SYS_waitid,
    // Signals of this process.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    // Identity, time, randomness.
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_getcpu,
    libc::SYS_getrusage,
    libc::SYS_times,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getrandom,
    libc::SYS_gettimeofday,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
];

/// Older equivalents, which other architectures do not have.
#[cfg(target_arch = "x86_64")]
const LEGACY_CALLS: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_sync_file_range,
    libc::SYS_time,
    libc::SYS_pause,
    libc::SYS_arch_prctl,
];
/// renameat and sync_file_range, which the crate does not name there.
#[cfg(not(target_arch = "x86_64"))]
const LEGACY_CALLS: &[c_long] = &[38, 84];

const PROT_EXEC: u32 = 4;
/// Flags that make a thread: it shares memory, signals and files with its process.
const THREAD: u32 = 0x0001_0000 | 0x100 | 0x800;
/// New namespaces, and a tracer for the new process.
const NEW_NAMESPACES: u32 = 0x7E02_2000;

/// Commands of fcntl(2) on descriptors and locks. Commands that make the kernel signal a process,
/// leases and notifications are missing.
const FCNTL: &[u32] = &[
    0, 1, 2, 3, 4, // F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL
    5, 6, 7, // F_GETLK, F_SETLK, F_SETLKW
    36, 37, 38, // F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW
    1030, 1031, 1032, // F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GETPIPE_SZ
    1034, // F_GET_SEALS
];
/// Commands of ioctl(2): for the FUSE connection, for a terminal that may be the log, and for
/// descriptors.
const IOCTL: &[u32] = &[
    0x8004_E500, // FUSE_DEV_IOC_CLONE
    0x5401,
    0x802C_542A,
    0x5413, // TCGETS, TCGETS2, TIOCGWINSZ
    0x541B,
    0x5421,
    0x5450,
    0x5451, // FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
];
/// Commands of prctl(2): PR_SET_NAME, PR_GET_NAME, PR_GET_DUMPABLE, PR_GET_SECCOMP,
/// PR_CAPBSET_READ, PR_GET_TIMERSLACK, PR_GET_NO_NEW_PRIVS, PR_SET_VMA, PR_GET_AUXV, and
/// PR_SET_NO_NEW_PRIVS, with which `seccompiler` begins to install the second filter.
const PRCTL: &[u32] = &[15, 16, 3, 21, 23, 30, 38, 39, 0x5356_4D41, 0x4155_5856];
/// Sign bit of an int: a process group, or every process.
const NEGATIVE: u32 = 1 << 31;
const SOL_SOCKET: u32 = 1;
/// SO_SNDBUF, SO_RCVBUF, SO_RCVTIMEO and SO_SNDTIMEO with both of their numbers.
const SOCKET_OPTIONS: &[u32] = &[7, 8, 20, 21, 66, 67];

const CONDITIONAL: &[(c_long, ArgumentRule)] = &[
    (libc::SYS_mmap, Without(2, PROT_EXEC)),
    (libc::SYS_mprotect, Without(2, PROT_EXEC)),
    // A thread of this process, not a new process.
    (libc::SYS_clone, Bits(0, THREAD | NEW_NAMESPACES, THREAD)),
    // Signals to the process itself, for abort(3).
    (libc::SYS_kill, OwnPid(0)),
    (libc::SYS_tgkill, OwnPid(0)),
    // Reading the process's own limits.
    (libc::SYS_prlimit64, Both(&OneOf(0, &[0]), &Null(2))),
    (libc::SYS_fcntl, OneOf(1, FCNTL)),
    (libc::SYS_ioctl, OneOf(1, IOCTL)),
    (libc::SYS_prctl, OneOf(0, PRCTL)),
    // By descriptor, not by path.
    (libc::SYS_utimensat, Null(1)),
    // To the peer of a connection, not to an address.
    (libc::SYS_sendto, Null(4)),
    (libc::SYS_setsockopt, Both(&OneOf(1, &[SOL_SOCKET]), &OneOf(2, SOCKET_OPTIONS))),
];

/// Process that the lists are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConfinedProcess {
    Daemon,
    Fetcher,
}

/// TCP over both versions of IP.
const NETWORKS: &[u32] = &[2, 10];
const STREAM: &[u32] = &[1, 1 | 0x800, 1 | 0x8_0000, 1 | 0x800 | 0x8_0000];
const UNIX: &[u32] = &[1];
/// The default protocol and IPPROTO_TCP. Landlock restricts no ports of MPTCP, SCTP and SMC.
const TCP: &[u32] = &[0, 6];
/// SOL_SOCKET, IPPROTO_TCP and IPPROTO_IPV6.
const LEVELS: &[u32] = &[SOL_SOCKET, 6, 41];
/// A message with this flag would connect.
const FAST_OPEN: u32 = 0x2000_0000;

/// Additional calls of the fetcher: it connects to servers, creates socket pairs for the daemon and
/// sends them, and stores files in its own directories.
const FETCHER_UNCONDITIONAL: &[c_long] = &[
    libc::SYS_connect,
    libc::SYS_mkdirat,
    libc::SYS_linkat,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    libc::SYS_statfs,
];
#[cfg(target_arch = "x86_64")]
const FETCHER_LEGACY_CALLS: &[c_long] = &[libc::SYS_mkdir, libc::SYS_readlink];
#[cfg(not(target_arch = "x86_64"))]
const FETCHER_LEGACY_CALLS: &[c_long] = &[];

const FETCHER_CONDITIONAL: &[(c_long, ArgumentRule)] = &[
    (libc::SYS_socket, Both(&OneOf(0, NETWORKS), &Both(&OneOf(1, STREAM), &OneOf(2, TCP)))),
    // A datagram socket of a pair could be connected to any Unix socket with a path.
    (libc::SYS_socketpair, Both(&OneOf(0, UNIX), &OneOf(1, STREAM))),
    (libc::SYS_sendmsg, Without(2, FAST_OPEN)),
    (libc::SYS_setsockopt, OneOf(1, LEVELS)),
    // Checks without a signal that a process exists: it may be another writer on this machine.
    (libc::SYS_kill, Both(&OneOf(1, &[0]), &Without(0, NEGATIVE))),
];

/// Refused with the same error and without a log line: the C library tries it first, and falls back
/// to clone(2). The filter can read only the flags of clone(2).
pub(super) const UNLOGGED: &[c_long] = &[libc::SYS_clone3];

impl ConfinedProcess {
    /// Returns the calls that this process may make; a later entry of a call replaces an earlier
    /// one.
    pub(super) fn allowed(self) -> impl Iterator<Item = (c_long, &'static ArgumentRule)> {
        let is_fetcher = self == ConfinedProcess::Fetcher;
        let (plain, old, conditional) = match is_fetcher {
            true => (FETCHER_UNCONDITIONAL, FETCHER_LEGACY_CALLS, FETCHER_CONDITIONAL),
            false => (&[][..], &[][..], &[][..]),
        };
        let plain = UNCONDITIONAL.iter().chain(LEGACY_CALLS).chain(plain).chain(old).map(|&call| (call, &Always));
        plain.chain(CONDITIONAL.iter().chain(conditional).map(|(call, when)| (*call, when)))
    }
}
