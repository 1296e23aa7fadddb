//! Kernel requests: one request, one call of the core, one reply. [`crate::kernel_cache`] tracks
//! the kernel's caches of the replies.
//!
//! The kernel uses the inode numbers of the core, which are never reused. So there is no lookup
//! table, FORGET matters only for KERNEL-6 and KERNEL-9, and the generation is 0, which also keeps
//! NFS handles valid for ever. Inodes in `.snapshots` have other numbers (VIEW-1) and are served by
//! `snapshots`.

mod content;
mod context;
mod interrupt_watch;
mod privileges;
mod replica_fs;
mod snapshots;
mod sync;

pub use context::{Activity, Adapter, ServeOptions};
pub use replica_fs::{CurrentVersion, ReplicaFs};
pub(crate) use snapshots::effective_snapshot_dir;

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use crate::convert::{GENERATION, errno, ino, may_write, reply_content, reply_copied, reply_empty, reply_xattr};
use crate::event_loop::{LONG_BYTES, ReadQueue};
use crate::kernel_cache::FOR_EVER;
use crate::{convert, kernel};
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, FopenFlags, INodeNo, IoctlFlags, KernelConfig, LockOwner,
    OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use lockbox::Error;
use lockbox::fs::{Creator, SetAttributes, SyncProfile, mode};
use privileges::RequestCredentials;

const STATFS_BLOCK: u32 = 4096;

/// Handle of write-only opens (KERNEL-12); all others are 0.
const ONLY_WRITES: FileHandle = FileHandle(1);

fn handle_for(flags: OpenFlags) -> FileHandle {
    if flags.acc_mode() == OpenAccMode::O_WRONLY { ONLY_WRITES } else { FileHandle(0) }
}

/// Returns owner and umask of a new file. With DONT_MASK the umask is applied here.
fn creator(request: &Request, umask: u32) -> Creator {
    Creator { uid: request.uid(), gid: request.gid(), umask: Some(umask) }
}

impl fuser::Filesystem for Adapter {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        kernel::negotiate(config, self.cache.is_replica);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _in_flight = self.begin_request();
        if let Some(inode) = self.snapshot_inode(parent) {
            return inode.lookup(name, reply);
        }
        if self.is_snapshot_dir(parent, name) {
            return self.reply_snapshot_dir(reply);
        }
        match self.cache.check_visible(parent).and_then(|()| self.fs.lookup(ino(parent), name.as_bytes())) {
            // KERNEL-5.
            Err(Error::NotFound) => {
                let lifetime = self.cache.entry_timeout();
                reply.entry_with_ttls(&lifetime, &lifetime, &convert::negative_entry(), GENERATION);
            }
            found => self.reply_entry(found, reply),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        let in_flight = self.begin_request();
        if let Some(inode) = self.snapshot_inode(number) {
            return inode.getattr(reply);
        }
        if handle == Some(ONLY_WRITES)
            && let bytes @ 1.. = self.cache.writers.refused(number.0)
        {
            in_flight.mark_long();
            match self.fs.check_room(bytes as u64) {
                Ok(()) => self.cache.writers.set_refused(number.0, 0),
                Err(error) => return reply.error(errno(&error)),
            }
        }
        match self.cache.getattr(&self.fs, number) {
            Ok((attributes, lifetime)) => reply.attr(&lifetime, &attributes),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn setattr(
        &self,
        request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let _in_flight = self.begin_change();
        let set = SetAttributes {
            mode: mode.map(|bits| bits & mode::PERMISSIONS),
            uid,
            gid,
            size,
            atime: atime.map(convert::to_set_time),
            mtime: mtime.map(convert::to_set_time),
            ctime: ctime.map(|time| convert::to_set_time(TimeOrNow::SpecificTime(time))),
            ..SetAttributes::default()
        };
        let outcome = self
            .live_inode(number)
            .and_then(|number| self.clear_set_id(request, number, set))
            .and_then(|set| self.cache.set_attributes(&self.fs, ino(number), &set, handle.is_some()));
        self.reply_attributes(outcome, reply);
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        let _in_flight = self.begin_request();
        if let Some(inode) = self.snapshot_inode(number) {
            return inode.readlink(reply);
        }
        match self.fs.read_link(ino(number)) {
            Ok(target) => {
                self.note_access(number);
                reply.data(&target);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let _in_flight = self.begin_change();
        let rdev = convert::from_kernel_device(rdev);
        let created = self.create_parent(parent, name).and_then(|parent| {
            let mode = self.creation_mode(request, parent, mode)?;
            self.fs.make_node(parent, name.as_bytes(), mode, rdev, creator(request, umask))
        });
        self.cache.invalidate_uncertain_names(self.options.profile, &created, &[(parent, name)]);
        self.reply_entry(created, reply);
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let _in_flight = self.begin_change();
        let mode = mode & mode::PERMISSIONS;
        let created = self
            .create_parent(parent, name)
            .and_then(|parent| self.fs.make_directory(parent, name.as_bytes(), mode, creator(request, umask)));
        self.cache.invalidate_uncertain_names(self.options.profile, &created, &[(parent, name)]);
        self.reply_entry(created, reply);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let _in_flight = self.begin_change();
        let target = target.as_os_str().as_bytes();
        let created = self
            .create_parent(parent, name)
            .and_then(|parent| self.fs.make_symlink(parent, name.as_bytes(), target, creator(request, 0)));
        self.cache.invalidate_uncertain_names(self.options.profile, &created, &[(parent, name)]);
        self.reply_entry(created, reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _in_flight = self.begin_change();
        let removed = self.change_parent(parent, name).and_then(|parent| self.fs.unlink(parent, name.as_bytes()));
        self.cache.invalidate_uncertain_names(self.options.profile, &removed, &[(parent, name)]);
        reply_empty(removed, reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _in_flight = self.begin_change();
        let removed = self
            .change_parent(parent, name)
            .and_then(|parent| self.cache.unlinked.remove_directory(&self.fs, parent, name));
        self.cache.invalidate_uncertain_names(self.options.profile, &removed, &[(parent, name)]);
        reply_empty(removed, reply);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _in_flight = self.begin_change();
        let renamed = convert::rename_mode(flags, creator(request, 0)).and_then(|how| {
            let (from, to) = (self.change_parent(parent, name)?, self.change_parent(new_parent, new_name)?);
            self.cache.unlinked.rename(&self.fs, (from, name), (to, new_name), how)
        });
        let names = [(parent, name), (new_parent, new_name)];
        self.cache.invalidate_uncertain_names(self.options.profile, &renamed, &names);
        reply_empty(renamed, reply);
    }

    /// Forgets lookups; the request has no reply, and may be one of many in a batch. Releasing a
    /// replaced file reclaims it, which may wait for a commit.
    fn forget(&self, _: &Request, number: INodeNo, lookups: u64) {
        let _long = self.fs.may_wait().then(|| self.scheduler.begin_long_work());
        if self.snapshot_inode(number).is_some() {
            self.cache.views.forget(number.0, lookups);
        } else if let Err(error) = self.cache.unlinked.forget(&self.fs, ino(number), || self.cache.is_known(number)) {
            tracing::warn!(%error, "a file or directory without a name could not be removed yet");
        }
    }

    fn link(&self, _: &Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _in_flight = self.begin_change();
        let linked = match self.create_parent(parent, name) {
            Ok(_) if self.snapshot_inode(number).is_some() => return reply.error(Errno::EXDEV),
            Ok(parent) => self.fs.link(ino(number), parent, name.as_bytes()),
            Err(error) => Err(error),
        };
        self.cache.invalidate_uncertain_names(self.options.profile, &linked, &[(parent, name)]);
        self.reply_entry(linked, reply);
    }

    /// Creates and opens a file. The file has a writer, so its attributes must not be cached. This
    /// reply has one timeout for name and attributes, which costs a lookup when the name is next
    /// used.
    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let _in_flight = self.begin_change();
        let created = self.create_parent(parent, name).and_then(|parent| {
            let mode = self.creation_mode(request, parent, mode)?;
            self.fs.create_and_open(parent, name.as_bytes(), mode, creator(request, umask))
        });
        self.cache.invalidate_uncertain_names(self.options.profile, &created, &[(parent, name)]);
        match created {
            Ok(a) => {
                self.activity.file_opened();
                // KERNEL-5: the name never expires, and fuser has one timeout for name and
                // attributes.
                let attributes = self.cache.created_attributes(&a, may_write(OpenFlags(flags)));
                let handle = handle_for(OpenFlags(flags));
                reply.created(&FOR_EVER, &attributes, GENERATION, handle, FopenFlags::FOPEN_KEEP_CACHE);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _in_flight = self.begin_request();
        if let Some(inode) = self.snapshot_inode(number) {
            return inode.open(flags, reply);
        }
        match self.open_file(number, flags) {
            Ok((handle, flags)) => reply.opened(handle, flags),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let in_flight = self.begin_request();
        if size as usize >= LONG_BYTES {
            in_flight.mark_long();
        }
        if let Some(inode) = self.snapshot_inode(number) {
            return inode.read(offset, size, reply);
        }
        // Only a remote archive has no host.
        if self.host.is_none() && ReadQueue::has_to_leave(&self.scheduler) {
            let fs = Arc::clone(&self.fs);
            return self.reads.submit(move || reply_content(&fs, ino(number), offset, size as usize, reply));
        }
        reply_content(&self.fs, ino(number), offset, size as usize, reply);
    }

    fn write(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        flags: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let in_flight = self.begin_request();
        if data.len() >= LONG_BYTES || self.fs.may_wait() {
            in_flight.mark_long();
        }
        match self.write_content(number, offset, data, flags) {
            // A request is 1 MiB at most.
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(errno(&error)),
        }
        // The caller continues in parallel, served by another loop.
        if self.fs.may_wait() {
            in_flight.mark_long();
        }
        self.fs.throttle_dirty();
    }

    /// Replies ENOSYS unless `sync=always`: the kernel then stops sending FLUSH, and still writes
    /// its pages before close(2) returns.
    fn flush(&self, request: &Request, number: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        match self.options.profile {
            SyncProfile::Always => self.reply_fsync(request, number, reply),
            SyncProfile::Never | SyncProfile::Periodic => {
                let _in_flight = self.begin_request();
                reply.error(Errno::ENOSYS);
            }
        }
    }

    fn release(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        flags: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(inode) = self.snapshot_inode(number) {
            let _in_flight = self.begin_request();
            return inode.release(reply);
        }
        let _in_flight = self.begin_change();
        self.activity.file_closed();
        if may_write(flags) {
            self.cache.end_writing(&self.fs, number);
        }
        reply_empty(self.fs.release(ino(number)), reply);
    }

    fn fsync(&self, request: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.reply_fsync(request, number, reply);
    }

    fn opendir(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _in_flight = self.begin_request();
        match self.begin_listing(number, flags) {
            Ok(handle) => reply.opened(handle, FopenFlags::empty()),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readdirplus(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let _in_flight = self.begin_request();
        match self.list(number, handle, offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        let _in_flight = self.begin_request();
        self.end_listing(handle);
        reply.ok();
    }

    fn fsyncdir(&self, request: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.reply_fsync(request, number, reply);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        // Does not count as use of the mount: monitors of free space poll this.
        let _in_flight = self.scheduler.begin_request();
        match self.fs.statistics(context::free_bytes(self.host.as_ref())) {
            Ok(s) => {
                let blocks = |bytes: u64| bytes / u64::from(STATFS_BLOCK);
                let (total, free, available) = (blocks(s.total), blocks(s.free), blocks(s.available));
                reply.statfs(total, free, available, s.inodes, s.free_inodes, STATFS_BLOCK, 255, STATFS_BLOCK);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Sets an attribute. Without SETXATTR_EXT the kernel does not say whether an access list is to
    /// clear the set-gid bit, so this is determined here as the kernel would. The kernel drops its
    /// cached attributes and lists by itself after this request and SETATTR.
    fn setxattr(
        &self,
        request: &Request,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let _in_flight = self.begin_change();
        let caller = RequestCredentials::of(request, &self.process_info);
        let set = convert::xattr_mode(flags).and_then(|how| {
            let keeps = |group| caller.keeps_set_gid(group);
            let file = self.live_inode(number)?;
            self.removed_capabilities.forget(file);
            self.fs.set_xattr_for(file, name.as_bytes(), value, how, &keeps)
        });
        reply_empty(set, reply);
    }

    fn getxattr(&self, _: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let _in_flight = self.begin_request();
        if let Some(inode) = self.snapshot_inode(number) {
            return inode.getxattr(name, size, reply);
        }
        reply_xattr(self.fs.xattr(ino(number), name.as_bytes()), size, reply);
    }

    fn listxattr(&self, request: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let _in_flight = self.begin_request();
        let caller = RequestCredentials::of(request, &self.process_info);
        if let Some(inode) = self.snapshot_inode(number) {
            return inode.listxattr(&|| caller.is_administrator(), size, reply);
        }
        reply_xattr(self.fs.list_xattrs_for(ino(number), &|| caller.is_administrator()), size, reply);
    }

    fn removexattr(&self, request: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _in_flight = self.begin_change();
        let removed =
            self.live_inode(number).and_then(|number| self.remove_attribute(request, number, name.as_bytes()));
        reply_empty(removed, reply);
    }

    fn fallocate(
        &self,
        request: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let in_flight = self.begin_request();
        in_flight.mark_long();
        reply_empty(self.allocate_content(request, number, offset, length, mode), reply);
    }

    fn lseek(&self, _: &Request, number: INodeNo, _: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let in_flight = self.begin_request();
        in_flight.mark_long();
        if let Some(inode) = self.snapshot_inode(number) {
            return inode.lseek(offset, whence, reply);
        }
        self.seek_content(number, offset, whence, reply);
    }

    fn copy_file_range(
        &self,
        request: &Request,
        source: INodeNo,
        _: FileHandle,
        from: u64,
        target: INodeNo,
        _: FileHandle,
        to: u64,
        length: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let in_flight = self.begin_request();
        in_flight.mark_long();
        if self.snapshot_inode(source).is_some() && self.snapshot_inode(target).is_none() {
            return reply.error(Errno::EXDEV);
        }
        reply_copied(self.copy_content(request, (source, from), (target, to), length), reply);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        let _in_flight = self.begin_request();
        reply.error(Errno::ENOTTY);
    }
}
