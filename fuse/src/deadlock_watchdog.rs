//! Self-deadlock watchdog: aborts a daemon blocked on its own mount.
//!
//! A thread of the daemon that asks the kernel for something below the daemon's own mount may leave
//! no thread to answer. Only SIGKILL ends such a daemon, and every umount(8) and sync(1) of the
//! machine waits for it. Normally this cannot happen: all files that are needed later are opened
//! before the mount, and the mount agent does every other lookup. The watchdog covers the rest,
//! such as a file of the mount that a user bind-mounts over the archive's own name.
//!
//! # Proof of a deadlock
//! A thread of this process in the kernel's FUSE wait function waits for some FUSE connection.
//! Threads of the daemon use none except the connections that hold its own files (archive, rollback
//! state, socket, log, program). Therefore:
//! 1  A thread that is in that wait in [`SAMPLES`] samples in a row, without running in between,
//!    waits for a connection that does not answer it.
//! 2  While a connection has no request in flight, no thread waits for it. If in one of those
//!    samples this holds for every connection with files of the daemon, the thread waits for none
//!    of them: it waits for this mount, or on a path that the daemon does not use.
//! 3  A file that arrived with a request, such as a backup's, may lie on any connection, and its
//!    request count is out of reach by then. So nothing is proved while such a file is in use
//!    ([`ForeignFileUse`]).
//!
//! A slow or hanging host is therefore never mistaken for a deadlock. Answering requests of this
//! process with an error would detect it sooner, but needs an event loop that still reads; in the
//! deadlocks seen there is none, or it waits for a lock of the blocked thread. The watchdog thread
//! takes no lock and opens no path except its own process's files in /proc and the request counts
//! in fusectl(5), by directories that are held open.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use nix::sys::stat::{major, minor};
use rustix::fs::{CWD, Dir, Mode, OFlags, fstat, fstatfs, openat};

use crate::kernel;
use crate::shutdown::{MountControl, MountEvent, MountHandle};

/// Interval between samples.
const PERIOD: Duration = Duration::from_secs(2);
/// Consecutive samples that prove a deadlock.
const SAMPLES: u32 = 4;
/// Kernel function in which a thread waits for a FUSE reply, and the functions that it may be
/// inlined into.
const WAIT_FUNCTIONS: [&str; 4] =
    ["request_wait_answer", "__fuse_request_send", "__fuse_simple_request", "fuse_simple_request"];
const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;
/// Magic numbers of overlayfs and ecryptfs, which hide the file system below them.
const STACKED: [u64; 2] = [0x794c_7630, 0xf15f];

pub(crate) struct DeadlockWatchdog {
    /// Directory in /proc that the sandbox must leave accessible.
    pub(crate) tasks: OwnedFd,
    /// Directories in fusectl(5) that the sandbox must leave accessible, one for each FUSE
    /// connection that holds files of the daemon.
    pub(crate) hosts: Vec<OwnedFd>,
    pub(crate) foreign_files: ForeignFileUse,
    blocked: HashMap<String, BlockedThread>,
}

/// Number of operations in progress on files that arrived with requests.
#[derive(Clone, Default)]
pub(crate) struct ForeignFileUse(Arc<AtomicUsize>);

impl ForeignFileUse {
    /// Counts an operation until the guard is dropped. Drop the guard after closing the file,
    /// because the close is also a request to that file system.
    pub(crate) fn track(&self) -> ForeignFileGuard {
        self.0.fetch_add(1, Ordering::SeqCst);
        ForeignFileGuard(self.clone())
    }
}

pub(crate) struct ForeignFileGuard(ForeignFileUse);

impl Drop for ForeignFileGuard {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Thread in the FUSE wait function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BlockedThread {
    /// Context switches so far; an unchanged number means that the thread did not run.
    switches: u64,
    samples: u32,
    /// In at least one sample no host connection had a request in flight.
    hosts_idle: bool,
}

impl BlockedThread {
    fn observe(earlier: Option<&BlockedThread>, switches: u64, hosts_idle: bool) -> BlockedThread {
        match earlier {
            Some(earlier) if earlier.switches == switches => {
                BlockedThread { switches, samples: earlier.samples + 1, hosts_idle: hosts_idle || earlier.hosts_idle }
            }
            _ => BlockedThread { switches, samples: 1, hosts_idle },
        }
    }

    fn is_deadlocked(&self) -> bool {
        self.samples >= SAMPLES && self.hosts_idle
    }
}

impl DeadlockWatchdog {
    /// Opens the files in /proc and /sys that sampling needs. `files` are the files that this
    /// process depends on. Call it before the mount exists. Fails if /proc cannot be read,
    /// or if the file system of one of the files does not reveal whether it is an idle FUSE
    /// connection: nothing could be proved.
    pub(crate) fn prepare<'a>(
        files: impl IntoIterator<Item = std::os::fd::BorrowedFd<'a>>,
    ) -> io::Result<DeadlockWatchdog> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let tasks = openat(CWD, "/proc/self/task", flags, Mode::empty())?;
        let mut hosts = Vec::new();
        for file in files {
            let kind = fstatfs(file)?.f_type as u64;
            if STACKED.contains(&kind) {
                return Err(io::ErrorKind::Unsupported.into());
            }
            if kind == FUSE_SUPER_MAGIC {
                // The kernel's numbering: a connection on top of a disk has a block device number.
                let device = fstat(file)?.st_dev;
                let number = major(device) << 20 | minor(device);
                let path = format!("/sys/fs/fuse/connections/{number}");
                let host = openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
                // An unreadable count would prove nothing.
                kernel::unanswered_requests(&host)?;
                hosts.push(host);
            }
        }
        Ok(DeadlockWatchdog { tasks, hosts, foreign_files: ForeignFileUse::default(), blocked: HashMap::new() })
    }

    /// Starts the thread, which samples until the process ends or is deadlocked. Fails if
    /// the thread cannot be started.
    pub(crate) fn start(mut self, mount: Arc<MountHandle>, events: Sender<MountEvent>) -> io::Result<()> {
        let run = move || {
            while !self.check() {
                thread::sleep(PERIOD);
            }
            tracing::error!(
                "the daemon waited for itself: one of its own files is below its mount; the connection is aborted, and writes that the kernel \
                 had not flushed are lost"
            );
            // Sent before the abort, so that the end of the loops is attributed to it.
            let _ = events.send(MountEvent::Deadlocked);
            if let Err(error) = mount.abort() {
                // Last resort: the connection ends with the process, and the archive is as after a
                // power cut.
                tracing::error!("the connection to the kernel cannot be aborted ({error}): the daemon ends");
                std::process::abort();
            }
        };
        thread::Builder::new().name("watch".into()).spawn(run).map(drop)
    }

    /// Takes a sample and returns whether this process is deadlocked.
    fn check(&mut self) -> bool {
        let threads = self.blocked_threads().unwrap_or_default();
        if threads.is_empty() {
            self.blocked.clear();
            return false;
        }
        // Read after the threads were seen waiting, so that their requests are counted.
        let hosts_idle = self.hosts_idle();
        let seen = |(thread, switches): (String, u64)| {
            let thread_state = BlockedThread::observe(self.blocked.get(&thread), switches, hosts_idle);
            (thread, thread_state)
        };
        self.blocked = threads.into_iter().map(seen).collect();
        self.blocked.values().any(BlockedThread::is_deadlocked)
    }

    /// Returns whether no connection that this process may use has a request in flight, except its
    /// own.
    fn hosts_idle(&self) -> bool {
        self.foreign_files.0.load(Ordering::SeqCst) == 0 && self.hosts.iter().all(is_idle)
    }

    /// Returns the threads of this process that wait for a FUSE reply, with their context switches.
    fn blocked_threads(&self) -> io::Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        for entry in Dir::read_from(self.tasks.as_fd())? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            // The thread may have exited meanwhile.
            let Ok(function) = self.read_proc(&name, "wchan") else { continue };
            if WAIT_FUNCTIONS.contains(&function.trim())
                && let Ok(status) = self.read_proc(&name, "status")
            {
                found.push((name, context_switches(&status)));
            }
        }
        Ok(found)
    }

    fn read_proc(&self, thread: &str, file: &str) -> io::Result<String> {
        let path = format!("{thread}/{file}");
        let mut text = String::new();
        let opened = openat(&self.tasks, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        File::from(opened).read_to_string(&mut text)?;
        Ok(text)
    }
}

fn is_idle(host: &OwnedFd) -> bool {
    match kernel::unanswered_requests(host) {
        Ok(count) => count == 0,
        // A closed connection has no requests, and no files in fusectl(5).
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

fn context_switches(status: &str) -> u64 {
    let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
    counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_thread_that_never_ran_and_waits_for_no_host_is_proof() {
        let samples = |seen: &[(u64, bool)]| {
            let mut thread_state = None;
            for &(switches, idle) in seen {
                thread_state = Some(BlockedThread::observe(thread_state.as_ref(), switches, idle));
            }
            thread_state.unwrap().is_deadlocked()
        };
        assert!(samples(&[(7, true); SAMPLES as usize]));
        assert!(!samples(&[(7, true); SAMPLES as usize - 1]));
        assert!(!samples(&[(7, false); 1000]), "the host has work, perhaps this one");
        assert!(samples(&[(7, false), (7, true), (7, false), (7, false)]), "idle once is enough");
        assert!(!samples(&[(7, true), (8, true), (9, true), (10, true), (11, true)]), "slow, and answered");
    }

    #[test]
    fn nothing_is_proved_while_a_foreign_file_is_in_use() {
        let home = File::open("/proc").unwrap();
        let watchdog = DeadlockWatchdog::prepare([home.as_fd()]).unwrap();
        assert!(watchdog.hosts_idle());
        let foreign_files = watchdog.foreign_files.clone();
        let (one, other) = (foreign_files.track(), foreign_files.track());
        assert!(!watchdog.hosts_idle());
        drop(one);
        assert!(!watchdog.hosts_idle());
        drop(other);
        assert!(watchdog.hosts_idle());
    }

    #[test]
    fn a_connection_is_idle_without_requests_and_after_its_end() {
        let connection = tempfile::tempdir().unwrap();
        let host = OwnedFd::from(File::open(connection.path()).unwrap());
        let waiting = connection.path().join("waiting");
        for (count, idle) in [("0\n", true), ("3\n", false), ("", false)] {
            std::fs::write(&waiting, count).unwrap();
            assert_eq!(is_idle(&host), idle, "{count:?}");
        }
        std::fs::remove_file(waiting).unwrap();
        assert!(is_idle(&host));
    }

    #[test]
    fn a_process_without_fuse_has_no_suspects() {
        let home = File::open("/proc").unwrap();
        let mut watchdog = DeadlockWatchdog::prepare([home.as_fd()]).unwrap();
        assert!(watchdog.hosts.is_empty());
        for _ in 0..SAMPLES + 1 {
            assert!(!watchdog.check());
        }
        let own = watchdog.read_proc(&nix::unistd::gettid().to_string(), "status").unwrap();
        assert!(own.contains("nonvoluntary_ctxt_switches:"), "{own}");
        assert_eq!(context_switches("Name:\tx\nvoluntary_ctxt_switches:\t3\nnonvoluntary_ctxt_switches:\t4\n"), 7);
    }
}
