//! What the kernel caches of a mount, and what that asks of whoever answers it: attributes, names, pages, and inodes without a name.
//!
//! The kernel asks once and then believes: nobody but the mount changes an archive. So what changes without its doing it is told
//! ([`KernelCache`]), and what it holds back is taken into account.
//!
//! # Rules of the writeback cache
//! KERNEL-1  The kernel owns size, mtime and ctime of regular files: a WRITE touches no times, SETATTR stores what it is given.
//! KERNEL-2  A cached WRITE carries any open handle and no credentials: handle modes and O_APPEND are never looked at, and a
//!     handle opened for writing only receives READs.
//! KERNEL-3  The kernel holds dirty pages of an inode only while the inode has a writer.
//! KERNEL-4  After the unlink of a last name it still brings the times of the file that is gone. They are accepted: it would
//!     keep an error for the next syncfs(2), which would fail though nothing is wrong.
//! KERNEL-5  Every name is answered for ever, a missing one too: nobody but the kernel changes names. A missing name that
//!     expires is dropped by whoever looks it up while another creates it; the new file's inode then goes with its last
//!     close, and an answer to a LOOKUP that was given before the last WRITE brings it back with the size of then, which
//!     the kernel trusts (KERNEL-1): the next append would overwrite. Attributes expire on their own.
//! KERNEL-6  Who opens a name looks it up first and opens the inode then. A rename in between must not end the file that was
//!     found: ESTALE makes the kernel look once more, but the next rename may be as quick. So a file whose last name a
//!     rename took is held open until FORGET, which the kernel sends when it drops the inode.
//! KERNEL-7  A count of 0 blocks says that a file has no data, and backup programs believe it (GNU tar -S stores zeros). Of dirty
//!     pages (KERNEL-3) only the kernel knows, and it does not count them: so an inode with a writer has one block at least. What WRITEs
//!     add to its count is told by the clock.
//! KERNEL-8  It stamps mtime and ctime of a regular file in memory when it asks for a change of content, and stores them later if they are
//!     not what it stored before. So nobody else stamps them then: that would stay behind what it has stored already. It reads what it
//!     stores before it asks, without waiting for a truncate(2) or touch(1) under way, so older times may come after newer ones: they
//!     change nothing. It stores them by a handle, and utimensat(2) sets others without one. What is stamped here is in order with the kernel's stamps (`Environment::stamp`).
//! KERNEL-9  A directory that was removed is still there for whoever works in it, has it open or holds a path to it: of these the kernel tells
//!     nothing but FORGET. So it is held open until then, as in KERNEL-6. What may be asked of it is its attributes; the kernel answers
//!     by itself that nothing is in it and nothing can be made there.
//! KERNEL-10  What a snapshot shows never changes, so names, attributes and pages of it are right as long as it is there. It can be removed without
//!     the kernel's doing. So a name in `.snapshots` is believed for a second: then the kernel asks, is told that it is gone, and drops what it knew
//!     below it. Who is inside already meets the end with the next request that the kernel does not answer by itself: names and attributes
//!     are believed for a minute, which costs a walk nothing. Pages of files that are open, and of links, can be read until the kernel drops
//!     them: they are what the snapshot showed. A missing name in `.snapshots` is not kept at all. KERNEL-5 is about names that are made; in a
//!     snapshot none are.
//! KERNEL-11  It keeps size and times of a file from when it first hears of it (KERNEL-1). So it hears nothing of what a restore builds until that is whole: the
//!     directory in which it is built answers no question. Names that others may use, the restore has changed by the kernel (KERNEL-5); of those that are its own, of files
//!     that lose one of several names and of the root's attributes the kernel is told. Directories and files below what was replaced are ESTALE once they are
//!     deleted, unless they are open; numbers are given once, so no name ever leads to something else.
//! KERNEL-12  What it took into its cache was accepted for whoever wrote it, before a WRITE that may be refused. It tells of that with fsync(2) and close(2)
//!     alone, so a program that asks for neither would write on for ever, and all of it would be lost. But for each write(2) it wants to know the mode of the
//!     file, by the handle of who writes. So after a refusal it is made to ask, and whoever can only write is answered with the reason for as long as there
//!     is one. Handles that also read are passed over: read(2) asks in the same way.
//! KERNEL-13  What is written elsewhere changes a mount that follows it without the kernel's doing, and nobody tells it what of it. So there it believes names, and that there is
//!     none, and attributes for a second, and leaves size and times to us, unlike KERNEL-1: nothing is written there, so none of 2, 3, 5 and 8 applies. Pages of a file are dropped
//!     when it is seen to have another size or mtime, and by each open(2), since both can be set back;
//!     what it believes of the size is taken from it then, too, or it would cut what it reads of the new content to the length of the old. Its number names the same file in all moments, for numbers are given once.

mod attributes;
mod names;
mod pages;
mod restore_invalidation;
pub(crate) mod snapshot_inodes;
mod times;
mod unlinked;
mod unlinked_times;
mod writers;

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use fuser::{FopenFlags, Notifier};

use snapshot_inodes::ViewTable;
use unlinked::UnlinkedInodes;
use writers::Writers;

/// As good as for ever: nothing changes an archive but the mount itself. 34 years; the kernel computes in jiffies.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// How long it believes what may change without its doing (KERNEL-13).
const REPLICA_TIMEOUT: Duration = Duration::from_secs(1);

/// What is known of one mount's caches in the kernel, and the way to tell it what is wrong there.
#[derive(Default)]
pub struct KernelCache {
    writers: Writers,
    pub(crate) unlinked: UnlinkedInodes,
    pub(crate) views: ViewTable,
    /// A directory that answers no question; 0 for none (KERNEL-11).
    hidden: AtomicU64,
    /// Another one's changes are shown (KERNEL-13).
    pub(crate) is_replica: bool,
    /// Set once the session is there.
    notifier: OnceLock<Notifier>,
}

impl KernelCache {
    /// `follows`: of a mount that shows what is written elsewhere.
    pub(crate) fn new(is_replica: bool) -> KernelCache {
        KernelCache { is_replica, ..KernelCache::default() }
    }

    /// How long a name, or that there is none of it, and attributes are believed.
    pub(crate) fn entry_timeout(&self) -> Duration {
        if self.is_replica { REPLICA_TIMEOUT } else { FOR_EVER }
    }

    /// What the kernel is told when a file is opened.
    pub(crate) fn open_flags(&self) -> FopenFlags {
        if self.is_replica { FopenFlags::empty() } else { FopenFlags::FOPEN_KEEP_CACHE }
    }

    /// From now on there is somebody to tell.
    pub(crate) fn set_notifier(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    /// Whether any inode has a handle that may write: without one the kernel holds no dirty pages (KERNEL-3).
    pub(crate) fn has_any_writer(&self) -> bool {
        self.writers.has_any()
    }

    pub(crate) fn has_writer(&self, ino: u64) -> bool {
        self.writers.has(ino)
    }
}
