//! The kernel's caches of a mount (attributes, names, pages, unlinked inodes) and the rules that
//! replies must follow.
//!
//! The kernel asks once and then trusts its caches, because only the mount changes an archive. So
//! it is notified of every change that it did not request ([`KernelCache`]), and its unwritten
//! state is taken into account.
//!
//! # Rules of the writeback cache
//! KERNEL-1  The kernel owns size, mtime and ctime of regular files: a WRITE changes no times,
//!     SETATTR stores the times that it carries.
//! KERNEL-2  A cached WRITE carries any open handle and no credentials: handle modes and O_APPEND
//!     are never checked, and a handle opened only for writing receives READs.
//! KERNEL-3  The kernel holds dirty pages of an inode only while the inode has a writer.
//! KERNEL-4  After the unlink of the last name the kernel still sends the times of the deleted
//!     file. They are accepted: it would keep an error for the next syncfs(2), which would fail
//!     although nothing is wrong.
//! KERNEL-5  Name replies never expire, not even for a missing name, because only the kernel
//!     changes names. If a missing name could expire, a concurrent lookup would drop it while
//!     another process creates the file. The new file's inode would then go with its last close,
//!     and a LOOKUP reply from before the last WRITE would restore it with its old size, which the
//!     kernel trusts (KERNEL-1): the next append would overwrite data. Attributes expire on their
//!     own.
//! KERNEL-6  An open looks up the name first and then opens the inode. A rename in between must not
//!     delete the file that was found: after ESTALE the kernel looks up once more, but the next
//!     rename may be as quick. So a file that lost its last name to a rename is held open until
//!     FORGET, which the kernel sends when it drops the inode.
//! KERNEL-7  A count of 0 blocks means that a file has no data, and backup programs rely on it (GNU
//!     tar -S stores zeros). Only the kernel knows of dirty pages (KERNEL-3), and it does not count
//!     them: so an inode with a writer reports at least one block. Blocks added by WRITEs are
//!     reported by the ticker.
//! KERNEL-8  The kernel stamps mtime and ctime of a regular file in memory when it requests a
//!     change of content, and stores them later if they differ from the last stored times. So they
//!     are not stamped here as well: such a stamp could contradict
//!     times that the kernel has already stored. The
//!     kernel reads the times before it sends them, without waiting for a concurrent truncate(2) or
//!     touch(1), so older times may arrive after newer ones and are ignored. It stores them by a
//!     handle; utimensat(2) sets times without one. Times that are stamped here are ordered with
//!     the kernel's (`Environment::stamp`).
//! KERNEL-9  A removed directory still exists for processes that work in it, have it open or hold a
//!     path to it. Of these the kernel reports nothing but FORGET. So the directory is held open
//!     until then, as in KERNEL-6. Only its attributes can be requested; the kernel itself answers
//!     that it is empty and that nothing can be created in it.
//! KERNEL-10  The content of a snapshot never changes, so its names, attributes and pages stay
//!     valid while the snapshot exists. It can be removed without a request of the kernel. So a
//!     name in `.snapshots` expires after a second: then the kernel asks, learns that the snapshot
//!     is gone, and drops everything cached below it. A process inside the snapshot meets the end
//!     with the next request that the caches cannot answer: names and attributes there expire after
//!     a minute, which costs a tree walk nothing. Pages of open files, and of links, can be read
//!     until the kernel drops them: they are what the snapshot contained. A missing name in
//!     `.snapshots` is not cached. KERNEL-5 concerns names that are created; in a snapshot none
//!     are.
//! KERNEL-11  The kernel keeps size and times of a file from its first reply on (KERNEL-1). So it
//!     must not see the files that a restore builds before they are complete: the directory in
//!     which they are built rejects all requests. Names that other processes may use are changed by
//!     the kernel on behalf of the restore (KERNEL-5). The kernel is notified of the restore's own
//!     names, of files that lose one of several names, and of the root's attributes. Directories
//!     and files below a replaced path are ESTALE once they are deleted, unless they are open;
//!     inode numbers are never reused, so no name ever leads to another file.
//! KERNEL-12  Data in the kernel's cache was acknowledged to its writer before a WRITE that may
//!     fail. The kernel reports such a failure with fsync(2) and close(2) only, so a program that
//!     calls neither would write on for ever and lose all of it. But for each write(2) the kernel
//!     needs the file's mode, through the writer's handle. So after a failed WRITE its attributes
//!     are invalidated, and a write-only handle is answered with the error for as long as it
//!     persists. Handles that also read are passed over: read(2) asks in the same way.
//! KERNEL-13  Remote writes change a replica mount without a request of the kernel, and no event
//!     says which inodes changed. So there names, missing names and attributes expire after a
//!     second, and the daemon owns size and times, unlike KERNEL-1: nothing is written in the
//!     mount, so 2, 3, 5 and 8 do not apply. Cached pages of a file are dropped when its size or
//!     mtime is seen to differ, and by each open(2), since both can be set back. The cached size is
//!     dropped then too, or new content would be cut to the length of the old. An inode number
//!     names the same file in all versions, because numbers are never reused.

mod invalidation;
pub(crate) mod snapshot_inodes;
mod times;
mod unlinked;
mod writers;

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use fuser::{FopenFlags, Notifier};

use snapshot_inodes::ViewTable;
use unlinked::UnlinkedInodes;
use writers::Writers;

/// Effectively no expiry: only the mount itself changes an archive. 34 years, because the kernel
/// computes in jiffies.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// Timeout of entries that change without a request of the kernel (KERNEL-13).
const REPLICA_TIMEOUT: Duration = Duration::from_secs(1);

/// State of one mount's caches in the kernel, and the channel that invalidates them.
#[derive(Default)]
pub struct KernelCache {
    writers: Writers,
    pub(crate) unlinked: UnlinkedInodes,
    pub(crate) views: ViewTable,
    /// Directory that rejects all requests; 0 for none (KERNEL-11).
    hidden: AtomicU64,
    /// The mount shows remote writes (KERNEL-13).
    pub(crate) is_replica: bool,
    /// Set once the session exists.
    notifier: OnceLock<Notifier>,
}

impl KernelCache {
    /// `is_replica`: the mount shows remote writes.
    pub(crate) fn new(is_replica: bool) -> KernelCache {
        KernelCache { is_replica, ..KernelCache::default() }
    }

    /// Returns the timeout of names, missing names and attributes.
    pub(crate) fn entry_timeout(&self) -> Duration {
        if self.is_replica { REPLICA_TIMEOUT } else { FOR_EVER }
    }

    /// Returns the flags for the reply to an open.
    pub(crate) fn open_flags(&self) -> FopenFlags {
        if self.is_replica { FopenFlags::empty() } else { FopenFlags::FOPEN_KEEP_CACHE }
    }

    /// Sets the channel for invalidations.
    pub(crate) fn set_notifier(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    /// Returns whether any inode has a writable handle: without one the kernel holds no dirty pages
    /// (KERNEL-3).
    pub(crate) fn has_any_writer(&self) -> bool {
        self.writers.has_any()
    }

    pub(crate) fn has_writer(&self, ino: u64) -> bool {
        self.writers.has_writer(ino)
    }
}
