//! Takes the mount away: when nobody uses it, or detached from the tree while its last users finish.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lockbox_host::mountpoint::Mountpoint;
use lockbox_host::mounts::Numbers;
use nix::mount::MsFlags;
use parking_lot::Mutex;

use super::handover::HandOver;
use crate::exit::Failure;
use crate::kernel::{self, ReadAhead};
use crate::kernel_cache::KernelCache;
use crate::mount::{self, Mount};
use crate::unmounter::{Unmounted, Unmounter};

/// How long a flush may take where it has to wait: with locking before a sleep it has to fit into logind's five seconds.
const FLUSH: Duration = Duration::from_secs(2);

/// What the pages have for their way from the kernel to us.
pub(crate) const ARRIVAL: Duration = Duration::from_secs(1);

/// Between two looks at whether they have arrived.
const LOOK: Duration = Duration::from_millis(2);

/// Longer than any order takes, unless the kernel is stuck.
const LAST_ORDER: Duration = Duration::from_secs(2);

/// Whether our mount is still there, and its connection's end. The lock also keeps the periodic flush, which opens the root for
/// a moment, from making the mount look busy.
pub(crate) struct Place {
    numbers: Numbers,
    /// The kernel's file that aborts the connection, opened while no other connection can have its number.
    abort: Option<File>,
    /// The kernel's file that tells how many requests are not answered yet, opened at the same time.
    waiting: Option<File>,
    mounted: Mutex<Mounted>,
    handover: HandOver,
}

/// A mount that was just made.
pub(crate) struct Attached {
    pub(crate) place: Arc<Place>,
    pub(crate) connection: OwnedFd,
    /// None where only root may change it: a user's mount reads ahead 128 KiB.
    pub(crate) read_ahead: Option<ReadAhead>,
}

struct Mounted {
    there: bool,
    /// None once it was sent away.
    unmounter: Option<Unmounter>,
}

impl Place {
    /// Mounts, finds the mount by what lies open at its point, and opens what the kernel has for it.
    pub(crate) fn attach(
        mount: &Mount<'_>,
        mut unmounter: Unmounter,
        cache: Arc<KernelCache>,
    ) -> Result<Attached, Failure> {
        let lost =
            |what: String| Failure::mount(format!("the mount at {} cannot be found: {what}", mount.point.display()));
        let failed = |e: io::Error| lost(e.to_string());
        // Before the mount: it may lie over what its own path leads through.
        let above = mount.point.parent().zip(mount.point.file_name());
        let above = above.map(|(path, name)| Ok((Mountpoint::of(path)?, name))).transpose().map_err(failed)?;
        let connection = mount.attach()?;
        let held = above.map_or_else(|| Mountpoint::of(mount.point), |(above, name)| open_mounted(&above, name));
        let held = held.map_err(failed)?;
        let found = match held.mounted_at(mount.point) {
            Ok(Some(mounted)) => unmounter
                .mounted(mounted.numbers())
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
        // Only root may: a user's mount has the kernel's bound of what waits to be written.
        if !mount.flags.contains(MsFlags::MS_RDONLY) {
            let _ = kernel::bound_write_back(device);
        }
        let mounted = Mutex::new(Mounted { there: true, unmounter: Some(unmounter) });
        let (abort, waiting) = (kernel::open_abort(device).ok(), kernel::open_waiting(device).ok());
        let place = Arc::new(Place { numbers, abort, waiting, mounted, handover: HandOver::new(cache) });
        Ok(Attached { place, connection, read_ahead: ReadAhead::of(device).ok() })
    }

    /// Numbers that identify the mount.
    pub(crate) fn numbers(&self) -> Numbers {
        self.numbers
    }

    /// Whether the mount answers. Not asked by this process: while every event loop is busy it would wait for itself.
    pub(crate) fn look(&self) -> io::Result<()> {
        match &mut self.mounted.lock().unmounter {
            Some(unmounter) => unmounter.look(),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// A new connection to the bus of the system.
    ///
    /// # Errors
    /// When nobody answers there.
    pub(crate) fn dial(&self) -> io::Result<UnixStream> {
        self.mounted.lock().unmounter.as_mut().ok_or(io::ErrorKind::NotConnected)?.dial()
    }

    /// Hands over the listener of this process's filter of system calls.
    ///
    /// # Errors
    /// When the other process is gone.
    pub(crate) fn name_refusals(&self, listener: &OwnedFd) -> io::Result<()> {
        self.mounted.lock().unmounter.as_mut().ok_or(io::ErrorKind::NotConnected)?.name_refusals(listener)
    }

    /// Makes the kernel write its dirty pages to us. What it cannot write stays dirty and is tried again the next time.
    ///
    /// # Errors
    /// When the process that flushes for us is gone.
    pub(crate) fn flush(&self) -> io::Result<()> {
        if !self.flush_by_path()? {
            // What does not arrive in time is on its way.
            self.handover.within(FLUSH);
        }
        Ok(())
    }

    /// As [`Place::flush`], and returns when what it sent has arrived: syncfs(2) does not wait for that. The kernel sends a page with a request, and
    /// counts that from before it is sent until it is answered: so once it counts none, all has arrived. While others go on writing that moment may not
    /// come, and some kernels do not tell: then [`ARRIVAL`] has to do, as for the periodic commit. Not to be called from an event loop.
    ///
    /// # Errors
    /// When the process that flushes for us is gone.
    pub(crate) fn collect(&self) -> io::Result<()> {
        self.flush()?;
        let until = Instant::now() + ARRIVAL;
        while Instant::now() < until && !self.waiting.as_ref().is_some_and(none_waits) {
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Answers whether there is a path to our mount.
    fn flush_by_path(&self) -> io::Result<bool> {
        let mut mounted = self.mounted.lock();
        if !mounted.there {
            return Ok(false);
        }
        match &mut mounted.unmounter {
            Some(unmounter) => unmounter.flush(),
            None => Ok(false),
        }
    }

    /// The archive is closed: the process that unmounts is told so and ends.
    pub(crate) fn dismiss(&self) {
        // A flush before a sleep may hold it for ever, and the end is not to wait for that.
        let Some(mut mounted) = self.mounted.try_lock_for(LAST_ORDER) else { return };
        mounted.there = false;
        drop(mounted.unmounter.take());
    }
}

/// Opens what was just mounted on an entry. When it cannot be opened, whatever lies on that entry is taken away, and nothing elsewhere.
fn open_mounted(above: &Mountpoint, name: &OsStr) -> io::Result<Mountpoint> {
    above.entry(name).inspect_err(|_| {
        let _ = above.detach_entry(name);
    })
}

/// Whether the kernel's file says that no request waits for its answer.
fn none_waits(waiting: &File) -> bool {
    let mut text = [0; 16];
    waiting.read_at(&mut text, 0).is_ok_and(|length| text[..length].trim_ascii() == b"0")
}

impl super::Mount for Place {
    /// Unmounts, which makes the kernel write its pages to us first; with `detach` also when busy.
    fn unmount(&self, detach: bool) -> Unmounted {
        let mut mounted = self.mounted.lock();
        if !mounted.there {
            return Unmounted::Gone;
        }
        let unmounted = match &mut mounted.unmounter {
            Some(unmounter) => unmounter.unmount(detach),
            None => Unmounted::Gone,
        };
        mounted.there = !matches!(unmounted, Unmounted::Gone | Unmounted::Detached);
        unmounted
    }

    /// Has the kernel write what it caches of open files, wherever the mount is, and answers whether that ended within `limit`.
    fn hand_over(&self, limit: Duration) -> bool {
        self.handover.within(limit)
    }

    /// Has every request fail, under way or later, so that the event loops end.
    ///
    /// # Errors
    /// When the kernel did not let us have its file for that.
    fn abort(&self) -> io::Result<()> {
        self.abort.as_ref().ok_or(io::ErrorKind::NotFound)?.write_all(b"1")
    }
}

#[cfg(test)]
mod tests {
    use nix::mount::umount;

    use super::*;

    #[test]
    fn a_mount_that_cannot_be_opened_is_taken_away() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let above = place.path().canonicalize().unwrap();
        let entry = above.join("entry");
        std::fs::write(&entry, b"").unwrap();
        // A mount is opened as a directory, which a file is not.
        nix::mount::mount(Some(&entry), &entry, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        let opened = open_mounted(&Mountpoint::of(&above).unwrap(), "entry".as_ref());
        let left = umount(&entry);
        assert!(opened.is_err());
        assert_eq!(left, Err(nix::errno::Errno::EINVAL), "it is no mount point any more");
    }
}
