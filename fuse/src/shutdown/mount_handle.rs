//! Handle of the mount: flushes, unmounts, detaches and aborts it.
//!
//! # Writeback
//! syncfs(2) needs an open file of the mount, and none can be opened once the mount is detached.
//! But dropping the cached pages of an inode writes them first, by WRITE requests that the event
//! loops answer. That blocks, hence a thread ([`KernelWriteback`]), which is abandoned if the
//! kernel or the loops hang.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use fuser::INodeNo;
use lockbox_host::mounts::{Mountpoint, Numbers};
use nix::mount::MsFlags;
use parking_lot::Mutex;

use crate::Failure;
use crate::dbus::SleepClient;
use crate::kernel::{self, ReadAhead, WriteBackLimit};
use crate::kernel_cache::{ARRIVAL, KernelCache};
use crate::mount::{self, Mount};
use crate::mount_agent::{MountAgent, UnmountOutcome};

/// Limit of a flush that has to wait: locking before a sleep must fit into logind's five seconds.
const FLUSH_TIME: Duration = Duration::from_secs(2);

/// Limit for an unmount to wait for a flush and for WRITEs in flight: no other event is handled
/// meanwhile, and a forced end must take less than five seconds.
const UNMOUNT_TIME: Duration = Duration::from_secs(1);

/// Limit for dismissing the agent; every order finishes sooner unless the kernel hangs.
const DISMISS_TIME: Duration = Duration::from_secs(2);

/// State of the mount and access to its connection. The lock also prevents the periodic flush,
/// which opens the root briefly, from making the mount look busy.
pub(crate) struct MountHandle {
    pub(crate) numbers: Numbers,
    /// The kernel's file that aborts the connection, opened while no other connection can have its
    /// number.
    abort: Option<File>,
    state: Mutex<MountState>,
    /// None for a user's mount, which keeps the kernel's limit of dirty pages, and for a read-only
    /// one.
    write_back_limit: Option<WriteBackLimit>,
    writeback: KernelWriteback,
    /// For [`MountHandle::collect_within`], which may be at work for long after its limit: a forced
    /// end must not wait for it.
    collection: KernelWriteback,
}

pub(crate) struct AttachedMount {
    pub(crate) handle: Arc<MountHandle>,
    pub(crate) connection: OwnedFd,
    /// None without the right to change it: the read-ahead of a user's mount stays at 128 KiB.
    pub(crate) read_ahead: Option<ReadAhead>,
}

struct MountState {
    is_mounted: bool,
    /// None once it was dismissed.
    agent: Option<MountAgent>,
}

impl MountHandle {
    /// Mounts, identifies the mount by the directory opened at its mount point, and opens the
    /// kernel's files for it.
    pub(crate) fn attach(
        mount: &Mount<'_>,
        mut agent: MountAgent,
        cache: Arc<KernelCache>,
    ) -> Result<AttachedMount, Failure> {
        let lost = |reason: String| {
            Failure::mount(format!("the mount at {} cannot be found: {reason}", mount.point.display()))
        };
        let failed = |e: io::Error| lost(e.to_string());
        // Opened before the mount, which may cover a part of its own path.
        let above = mount.point.parent().zip(mount.point.file_name());
        let above = above.map(|(path, name)| Ok((Mountpoint::of(path)?, name))).transpose().map_err(failed)?;
        let connection = mount.attach()?;
        let held = above.map_or_else(|| Mountpoint::of(mount.point), |(above, name)| open_entry(&above, name));
        let held = held.map_err(failed)?;
        let found = match held.mounted_at(mount.point) {
            Ok(Some(mounted)) => agent
                .set_mount(mounted.numbers())
                .map(|()| mounted.numbers())
                .map_err(|e| format!("the process that unmounts is gone ({e})")),
            Ok(None) => Err("it is not in the table of mounts".into()),
            Err(error) => Err(error.to_string()),
        };
        let numbers = found.map_err(|what| {
            let _ = mount::detach(&held, mount.point);
            lost(what)
        })?;
        let device = numbers.device;
        let is_writable = !mount.flags.contains(MsFlags::MS_RDONLY);
        let write_back_limit = is_writable.then(|| WriteBackLimit::of(device).ok()).flatten();
        let state = Mutex::new(MountState { is_mounted: true, agent: Some(agent) });
        let connection_dir = kernel::open_connection_dir(device).ok();
        let abort = connection_dir.as_ref().and_then(|directory| kernel::open_abort(directory).ok());
        if let Some(directory) = connection_dir {
            cache.set_connection_dir(directory);
        }
        let (writeback, collection) = (KernelWriteback::new(Arc::clone(&cache)), KernelWriteback::new(cache));
        let handle = Arc::new(MountHandle { numbers, abort, state, write_back_limit, writeback, collection });
        Ok(AttachedMount { handle, connection, read_ahead: ReadAhead::of(device).ok() })
    }

    /// Checks that the mount answers. The agent does this: this process would deadlock while all
    /// event loops are busy. Fails if the mount does not answer or the agent is gone.
    pub(crate) fn probe(&self) -> io::Result<()> {
        self.state.lock().agent.as_mut().ok_or(io::ErrorKind::NotConnected)?.probe()
    }

    /// Connects to the agent's relay of logind's sleep signals. Fails if the agent is gone
    /// or does not watch sleeps.
    pub(crate) fn watch_sleeps(&self) -> io::Result<SleepClient> {
        self.state.lock().agent.as_mut().ok_or(io::ErrorKind::NotConnected)?.watch_sleeps()
    }

    /// Returns whether the agent was dismissed. A dismissal in progress holds the lock until its
    /// end, so it is true once the agent's relay has ended.
    pub(crate) fn is_dismissed(&self) -> bool {
        self.state.lock().agent.is_none()
    }

    /// Sends the listener of this process's system call filter to the agent. Fails if the
    /// agent is gone.
    pub(crate) fn send_filter_listener(&self, listener: &OwnedFd) -> io::Result<()> {
        self.state.lock().agent.as_mut().ok_or(io::ErrorKind::NotConnected)?.send_filter_listener(listener)
    }

    /// Sets the kernel's limit of dirty pages.
    pub(crate) fn limit_write_back(&self, programs_sync: bool) {
        if let Some(limit) = &self.write_back_limit {
            // The kernel accepted it when the mount began; if it does not now, an fsync may wait
            // longer.
            let _ = limit.set(programs_sync);
        }
    }

    /// Makes the kernel write its dirty pages to us. Pages that it cannot write stay dirty and are
    /// retried by the next flush. Fails if the agent is gone.
    pub(crate) fn flush(&self) -> lockbox::Result<()> {
        self.flush_within(FLUSH_TIME)
    }

    /// Flushes like [`MountHandle::flush`]; without a path to the mount it ends after `limit`.
    fn flush_within(&self, limit: Duration) -> lockbox::Result<()> {
        if !self.flush_by_path()? {
            // Pages that arrive after the limit are still in flight and not lost.
            self.writeback.run(limit);
        }
        Ok(())
    }

    /// Flushes like [`MountHandle::flush`], and returns when the flushed pages have arrived, which
    /// syncfs(2) does not wait for. Returns false if that is unknown after [`ARRIVAL`], the time
    /// that the periodic commit waits ([`KernelCache::await_writes`]). Not to be called from an
    /// event loop. Fails if the agent is gone.
    pub(crate) fn collect(&self) -> lockbox::Result<bool> {
        self.flush()?;
        Ok(self.writeback.cache.await_writes(Instant::now() + ARRIVAL))
    }

    /// Collects like [`MountHandle::collect`], then waits up to `limit` for a proof. Other programs
    /// may keep requests in flight without end, so the pages of all written files are dropped:
    /// since Linux 6.16 that waits for their own WRITEs alone. Before, it waits for the count.
    /// Returns false if writes from before the call may still be in flight; true also if neither
    /// the release nor the count can prove anything, as in some containers.
    pub(crate) fn collect_within(&self, limit: Duration) -> lockbox::Result<bool> {
        self.flush_within(FLUSH_TIME.min(limit))?;
        let cache = &self.writeback.cache;
        let has_arrived = cache.await_writes(Instant::now() + ARRIVAL.min(limit));
        Ok(has_arrived || !cache.can_prove_arrival() || self.collection.run(limit))
    }

    /// Flushes with syncfs(2). Returns false if no path leads to the mount.
    fn flush_by_path(&self) -> lockbox::Result<bool> {
        let mut state = self.state.lock();
        if !state.is_mounted {
            return Ok(false);
        }
        state.agent.as_mut().map_or(Ok(false), MountAgent::flush)
    }

    /// Dismisses the agent after the archive was closed.
    pub(crate) fn dismiss(&self) {
        // A flush before a sleep may hold the lock for ever, and the shutdown must not wait for
        // that.
        let Some(mut state) = self.state.try_lock_for(DISMISS_TIME) else { return };
        state.is_mounted = false;
        drop(state.agent.take());
    }
}

/// Opens the new mount on a directory entry. If that fails, it detaches the mount on that entry and
/// nothing else.
fn open_entry(above: &Mountpoint, name: &OsStr) -> io::Result<Mountpoint> {
    above.entry(name).inspect_err(|_| {
        let _ = above.detach_entry(name);
    })
}

impl super::MountControl for MountHandle {
    /// Waits up to [`UNMOUNT_TIME`] for a flush, which has the root open, and before Linux 6.16 for
    /// WRITEs in flight, which the kernel would discard with the last user (order 1 of
    /// [`super`]). Then the mount stays: it is busy, and `detach` fails.
    fn unmount(&self, detach: bool) -> UnmountOutcome {
        let until = Instant::now() + UNMOUNT_TIME;
        let refuse = |reason: &str| match detach {
            true => UnmountOutcome::Failed(format!("cannot unmount yet: {reason}")),
            false => UnmountOutcome::Busy,
        };
        let Some(mut state) = self.state.try_lock_until(until) else {
            return refuse("the kernel's cache is being flushed");
        };
        if !state.is_mounted {
            return UnmountOutcome::Gone;
        }
        let cache = &self.writeback.cache;
        // Without the kernel's count, a mount with an open file could never be detached.
        if !cache.finish_writeback(until) && cache.connection_dir().is_some() {
            return refuse("the kernel is sending cached writes");
        }
        let unmounted = state.agent.as_mut().map_or(UnmountOutcome::Gone, |agent| agent.unmount(detach));
        state.is_mounted = !matches!(unmounted, UnmountOutcome::Gone | UnmountOutcome::Detached);
        unmounted
    }

    fn write_back(&self, limit: Duration) -> bool {
        self.writeback.run(limit)
    }

    /// Fails if the kernel's abort file could not be opened.
    fn abort(&self) -> io::Result<()> {
        self.abort.as_ref().ok_or(io::ErrorKind::NotFound)?.write_all(b"1")
    }
}

/// Writeback of one connection's pages.
pub(crate) struct KernelWriteback {
    cache: Arc<KernelCache>,
    /// Closed by an abandoned thread when it ends; until then no second thread is started.
    stuck: Mutex<Option<Receiver<()>>>,
}

impl KernelWriteback {
    pub(crate) fn new(cache: Arc<KernelCache>) -> KernelWriteback {
        KernelWriteback { cache, stuck: Mutex::default() }
    }

    /// Returns whether all data written before the call has arrived within `limit`. Not to be
    /// called from an event loop.
    pub(crate) fn run(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let inodes = self.cache.writers.inodes();
        if inodes.is_empty() {
            return true;
        }
        let cache = Arc::clone(&self.cache);
        self.run_job(limit, move || inodes.into_iter().for_each(|ino| cache.drop_pages(INodeNo(ino), 0)))
            && self.cache.finish_writeback(until)
    }

    fn run_job(&self, limit: Duration, job: impl FnOnce() + Send + 'static) -> bool {
        let until = Instant::now() + limit;
        // Another caller may wait longer than this one.
        let Some(mut stuck) = self.stuck.try_lock_until(until) else { return false };
        if let Some(earlier) = stuck.take()
            && !ends_before(&earlier, until)
        {
            *stuck = Some(earlier);
            return false;
        }
        let (end, ended) = mpsc::channel();
        let started = thread::Builder::new().name("handover".into()).spawn(move || {
            job();
            drop(end);
        });
        if let Err(error) = started {
            tracing::error!("cannot start a thread that flushes cached writes: {error}");
            return false;
        }
        let over = ends_before(&ended, until);
        if !over {
            *stuck = Some(ended);
        }
        over
    }
}

/// Waits for the channel to be closed; nothing is sent on it.
fn ends_before(ended: &Receiver<()>, until: Instant) -> bool {
    let rest = until.saturating_duration_since(Instant::now());
    ended.recv_timeout(rest) == Err(RecvTimeoutError::Disconnected)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use nix::mount::umount;

    use super::*;
    use crate::shutdown::MountControl;

    impl MountHandle {
        /// Returns the handle of a mount without an agent.
        pub(crate) fn of_cache(cache: Arc<KernelCache>) -> MountHandle {
            MountHandle {
                numbers: Numbers { id: 0, device: 0 },
                abort: None,
                state: Mutex::new(MountState { is_mounted: true, agent: None }),
                write_back_limit: None,
                writeback: KernelWriteback::new(Arc::clone(&cache)),
                collection: KernelWriteback::new(cache),
            }
        }
    }

    #[test]
    fn a_mount_that_cannot_be_opened_is_detached() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let handle = tempfile::tempdir().unwrap();
        let above = handle.path().canonicalize().unwrap();
        let entry = above.join("entry");
        std::fs::write(&entry, b"").unwrap();
        // A mount is opened as a directory, which a file is not.
        nix::mount::mount(Some(&entry), &entry, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        let opened = open_entry(&Mountpoint::of(&above).unwrap(), "entry".as_ref());
        let left = umount(&entry);
        assert!(opened.is_err());
        assert_eq!(left, Err(nix::errno::Errno::EINVAL), "it is no mount point any more");
    }

    /// Directory of a connection with this number of unanswered requests.
    fn connection_with(count: &str) -> tempfile::TempDir {
        let connection = tempfile::tempdir().unwrap();
        std::fs::write(connection.path().join("waiting"), count).unwrap();
        connection
    }

    #[test]
    fn an_unmount_does_not_wait_for_a_flush_without_end() {
        let mount = MountHandle::of_cache(Arc::default());
        let flush = mount.state.lock();
        assert_eq!(mount.unmount(false), UnmountOutcome::Busy);
        let UnmountOutcome::Failed(message) = mount.unmount(true) else { panic!("it is not refused") };
        assert!(message.contains("is being flushed"), "{message}");
        drop(flush);
        assert_eq!(mount.unmount(true), UnmountOutcome::Gone);
    }

    #[test]
    fn before_linux_6_16_no_mount_is_removed_while_writes_are_in_flight() {
        let connection = connection_with("1\n");
        let mount = |drop_waits, waiting| MountHandle::of_cache(Arc::new(KernelCache::of_kernel(drop_waits, waiting)));
        let counts = || Some(connection.path());
        let old = mount(false, counts());
        assert_eq!(old.unmount(false), UnmountOutcome::Busy);
        let UnmountOutcome::Failed(message) = old.unmount(true) else { panic!("it is not refused") };
        assert!(message.contains("sending cached writes"), "{message}");
        assert_eq!(mount(true, counts()).unmount(false), UnmountOutcome::Gone);
        assert_eq!(mount(false, None).unmount(true), UnmountOutcome::Gone, "nothing is known");
        std::fs::write(connection.path().join("waiting"), "0\n").unwrap();
        assert_eq!(old.unmount(false), UnmountOutcome::Gone);
    }

    #[test]
    fn before_linux_6_16_writeback_ends_when_the_writes_have_arrived() {
        let connection = connection_with("1\n");
        let runs = |drop_waits, limit| {
            let cache = KernelCache::of_kernel(drop_waits, Some(connection.path()));
            KernelWriteback::new(Arc::new(cache)).run(limit)
        };
        assert!(!runs(false, Duration::from_millis(50)));
        assert!(runs(true, Duration::from_secs(60)));
        // Replaced as a whole: a count that cannot be read ends the wait.
        let (count, next) = (connection.path().join("waiting"), connection.path().join("next"));
        std::fs::write(&next, "0\n").unwrap();
        let arrives = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            std::fs::rename(next, count).unwrap();
        });
        assert!(runs(false, Duration::from_secs(60)));
        arrives.join().unwrap();
    }

    #[test]
    fn without_a_writer_nothing_is_waited_for() {
        assert!(KernelWriteback::new(Arc::default()).run(Duration::ZERO));
    }

    #[test]
    fn a_stuck_kernel_blocks_no_caller_and_gets_no_second_thread() {
        let writeback = KernelWriteback::new(Arc::default());
        let runs = Arc::new(AtomicUsize::new(0));
        let counts = || {
            let runs = Arc::clone(&runs);
            move || {
                runs.fetch_add(1, Ordering::SeqCst);
            }
        };
        let (go_on, stuck) = mpsc::channel::<()>();
        let waits = move || {
            let _ = stuck.recv();
        };
        assert!(!writeback.run_job(Duration::from_millis(1), waits));
        assert!(!writeback.run_job(Duration::from_millis(1), counts()), "the first is still at it");
        drop(go_on);
        assert!(writeback.run_job(Duration::from_secs(60), counts()));
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }
}
