//! Ends a daemon that waits for itself: its own thread asks the kernel for something below its own mount, and nobody is left to answer.
//!
//! Such a daemon cannot be killed by less than SIGKILL, and every umount(8) and sync(1) of the machine waits for it. It is not to happen:
//! all that is needed later is held open before the mount is there, and what has to be looked up is looked up by the other process. This is
//! for the rest, such as a file of the mount that somebody binds over the archive's own name.
//!
//! # What proves it
//! A thread of this process that waits in the kernel's FUSE code for an answer waits for some FUSE connection. No thread of a mount's daemon
//! has business with one, except with those on which its own files lie (the archive, what is remembered, the socket, the log, the program).
//! So:
//! 1  A thread that is in that wait at [`SAMPLES`] looks in a row, and did not run in between, waits for a connection that does not answer it.
//! 2  At a moment when a connection has no request under way, nobody waits for that one. When that is so, at one of those looks, for each
//!    connection that our files lie on, the thread does not wait there: it waits for us, or on a path that it has no business with.
//! 3  A file that came with a request, such as a backup's, may lie on any connection, whose count is out of reach by then. So nothing is proved while
//!    somebody works with one ([`ForeignFileUse`]).
//!
//! A host that hangs is therefore never taken for it, and one that is merely slow neither. Answering requests of our own process with an
//! error at once would be quicker, but only while a loop is there to read them, and the ones that end in this state have none, or one that
//! waits for a lock of the thread that asks. This thread takes no lock and opens no path but its process's own in /proc.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use nix::sys::stat::{major, minor};
use rustix::fs::{CWD, Dir, Mode, OFlags, fstat, fstatfs, openat};

use crate::shutdown::{MountControl, MountEvent, MountHandle};

/// From one look to the next.
const PERIOD: Duration = Duration::from_secs(2);
/// So many looks in a row.
const SAMPLES: u32 = 4;
/// The function that a thread sleeps in while it waits for a FUSE answer, and those that it may be a part of.
const WAIT_FUNCTIONS: [&str; 4] =
    ["request_wait_answer", "__fuse_request_send", "__fuse_simple_request", "fuse_simple_request"];
const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;
/// overlayfs and ecryptfs, which do not tell what lies below them.
const STACKED: [u64; 2] = [0x794c_7630, 0xf15f];

/// What is looked at, held open.
pub(crate) struct DeadlockWatchdog {
    tasks: OwnedFd,
    /// How many requests are under way on the connections that our own files lie on.
    hosts: Vec<File>,
    foreign_files: ForeignFileUse,
    blocked: HashMap<String, BlockedThread>,
}

/// Counts those who work with files that came with requests.
#[derive(Clone, Default)]
pub(crate) struct ForeignFileUse(Arc<AtomicUsize>);

impl ForeignFileUse {
    /// Somebody does until the answer is dropped, which has to be after the file is closed: that asks its file system, too.
    pub(crate) fn begin(&self) -> ForeignFileGuard {
        self.0.fetch_add(1, Ordering::SeqCst);
        ForeignFileGuard(self.clone())
    }

    fn is_active(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

/// Work with a file that came with a request.
pub(crate) struct ForeignFileGuard(ForeignFileUse);

impl Drop for ForeignFileGuard {
    fn drop(&mut self) {
        let ForeignFileUse(count) = &self.0;
        count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A thread in that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BlockedThread {
    /// How often it was put to sleep: a number that stays says that it did not run.
    switches: u64,
    samples: u32,
    /// At one of them, no host had a request under way.
    hosts_idle: bool,
}

impl BlockedThread {
    /// The same thread at another look.
    fn observe(earlier: Option<&BlockedThread>, switches: u64, hosts_idle: bool) -> BlockedThread {
        match earlier {
            Some(earlier) if earlier.switches == switches => BlockedThread {
                switches: switches,
                samples: earlier.samples + 1,
                hosts_idle: hosts_idle || earlier.hosts_idle,
            },
            _ => BlockedThread { switches: switches, samples: 1, hosts_idle },
        }
    }

    fn is_deadlocked(&self) -> bool {
        self.samples >= SAMPLES && self.hosts_idle
    }
}

impl DeadlockWatchdog {
    /// `files` are those on which this process depends. To be called before the mount is there.
    ///
    /// # Errors
    /// When /proc cannot be read, or what holds one of them does not tell whether it is an idle FUSE connection: nothing could be proved.
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
                // As the kernel counts: a connection over a disk has a device of that kind.
                let device = fstat(file)?.st_dev;
                let number = major(device) << 20 | minor(device);
                hosts.push(File::open(format!("/sys/fs/fuse/connections/{number}/waiting"))?);
            }
        }
        Ok(DeadlockWatchdog { tasks, hosts, foreign_files: ForeignFileUse::default(), blocked: HashMap::new() })
    }

    /// The directory that has to stay within reach.
    pub(crate) fn tasks(&self) -> &OwnedFd {
        &self.tasks
    }

    /// Whom it is to be told of.
    pub(crate) fn foreign_files(&self) -> ForeignFileUse {
        self.foreign_files.clone()
    }

    /// Looks until the process ends, or until it has to.
    ///
    /// # Errors
    /// Those of starting a thread.
    pub(crate) fn start(mut self, mount: Arc<MountHandle>, events: Sender<MountEvent>) -> io::Result<()> {
        let run = move || {
            while !self.check() {
                thread::sleep(PERIOD);
            }
            tracing::error!(
                "the daemon waited for itself: something of its own lies below its mount; the connection is aborted, and what the kernel had \
                 not handed over is lost"
            );
            // Told before, so that the end is known to be ours.
            let _ = events.send(MountEvent::Deadlocked);
            if let Err(error) = mount.abort() {
                // All that is left: the connection ends with the process, and the archive is as after a power cut.
                tracing::error!("the connection to the kernel cannot be aborted ({error}): the daemon ends");
                std::process::abort();
            }
        };
        thread::Builder::new().name("watch".into()).spawn(run).map(drop)
    }

    /// Whether this process waits for itself.
    fn check(&mut self) -> bool {
        let threads: Vec<(String, u64)> = self.blocked_threads().unwrap_or_default();
        if threads.is_empty() {
            self.blocked.clear();
            return false;
        }
        // After the threads were seen waiting, so that their requests would be counted.
        let hosts_idle = self.hosts_idle();
        let seen = |(thread, switches): (String, u64)| {
            let thread_state = BlockedThread::observe(self.blocked.get(&thread), switches, hosts_idle);
            (thread, thread_state)
        };
        self.blocked = threads.into_iter().map(seen).collect();
        self.blocked.values().any(BlockedThread::is_deadlocked)
    }

    /// Whether nobody waits for any connection but ours, as far as this process has business with others.
    fn hosts_idle(&self) -> bool {
        !self.foreign_files.is_active() && self.hosts.iter().all(is_idle)
    }

    /// Threads of this process that wait for a FUSE answer, and how often they were put to sleep until now.
    fn blocked_threads(&self) -> io::Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        for entry in Dir::read_from(self.tasks.as_fd())? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            // One that ended meanwhile waits for nothing.
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

fn is_idle(request_count: &File) -> bool {
    let mut text = [0; 32];
    // A connection that is gone has nobody waiting, and reads as nothing.
    request_count.read_at(&mut text, 0).is_ok_and(|length| matches!(text[..length].trim_ascii(), b"0" | b""))
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
    fn nothing_is_proved_while_somebody_works_with_a_file_that_came_with_a_request() {
        let home = File::open("/proc").unwrap();
        let watchdog = DeadlockWatchdog::prepare([home.as_fd()]).unwrap();
        assert!(watchdog.hosts_idle());
        let foreign_files = watchdog.foreign_files();
        let (one, other) = (foreign_files.begin(), foreign_files.begin());
        assert!(!watchdog.hosts_idle());
        drop(one);
        assert!(!watchdog.hosts_idle());
        drop(other);
        assert!(watchdog.hosts_idle());
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
