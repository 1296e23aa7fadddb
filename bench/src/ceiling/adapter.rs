//! FUSE adapter of the in-memory store, shaped like lockbox's: same replies, same timeouts.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, KernelConfig, LockOwner,
    OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use lockbox_fuse::event_loop::{LONG_BYTES, LoopScheduler};
use lockbox_fuse::kernel;

use crate::store::{Content, New, Result, Store};

const FOR_EVER: Duration = Duration::from_secs(1 << 30);
const GENERATION: Generation = Generation(0);
/// Size reported by statfs: 1 TiB in blocks of 4 KiB.
const BLOCKS: u64 = 1 << 28;

pub(crate) struct Adapter {
    store: Store,
    scheduler: LoopScheduler,
}

impl Adapter {
    pub(crate) fn new(loops: usize, queue: OwnedFd) -> Adapter {
        Adapter { store: Store::default(), scheduler: LoopScheduler::new(loops, queue) }
    }

    fn new_inode(&self, request: &Request, mode: u32) -> New {
        let kind = match mode & 0o170_000 {
            0o010_000 => FileType::NamedPipe,
            0o020_000 => FileType::CharDevice,
            0o040_000 => FileType::Directory,
            0o060_000 => FileType::BlockDevice,
            0o120_000 => FileType::Symlink,
            0o140_000 => FileType::Socket,
            _ => FileType::RegularFile,
        };
        let owner = (request.uid(), request.gid());
        New { kind, permissions: mode, owner, rdev: 0, target: Vec::new(), open: false }
    }
}

fn reply_entry(result: Result<FileAttr>, reply: ReplyEntry) {
    match result {
        Ok(attributes) => reply.entry(&FOR_EVER, &attributes, GENERATION),
        Err(error) => reply.error(error),
    }
}

fn reply_empty(result: Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

fn reply_xattr(result: Result<Vec<u8>>, size: u32, reply: ReplyXattr) {
    match result {
        Ok(data) if size == 0 => reply.size(data.len() as u32),
        Ok(data) if data.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(data) => reply.data(&data),
        Err(error) => reply.error(error),
    }
}

fn time(time: TimeOrNow) -> SystemTime {
    match time {
        TimeOrNow::SpecificTime(time) => time,
        TimeOrNow::Now => SystemTime::now(),
    }
}

impl fuser::Filesystem for Adapter {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        kernel::negotiate(config, false);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _in_flight = self.scheduler.begin_request();
        reply_entry(self.store.lookup(parent.0, name.as_bytes()), reply);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let _in_flight = self.scheduler.begin_request();
        match self.store.attributes(number.0) {
            Ok(attributes) => reply.attr(&FOR_EVER, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let _in_flight = self.scheduler.begin_request();
        let set = self.store.with(number.0, |inode| {
            if let Some(size) = size {
                inode.resize(size)?;
            }
            let a = &mut inode.attributes;
            a.perm = mode.map_or(a.perm, |bits| (bits & 0o7777) as u16);
            a.uid = uid.unwrap_or(a.uid);
            a.gid = gid.unwrap_or(a.gid);
            a.atime = atime.map_or(a.atime, time);
            a.mtime = mtime.map_or(a.mtime, time);
            a.ctime = ctime.unwrap_or_else(SystemTime::now);
            Ok(*a)
        });
        match set {
            Ok(attributes) => reply.attr(&FOR_EVER, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        let _in_flight = self.scheduler.begin_request();
        let target = self.store.with(number.0, |inode| match &inode.content {
            Content::Symlink(target) => Ok(target.clone()),
            _ => Err(Errno::EINVAL),
        });
        match target {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(error),
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
        let _in_flight = self.scheduler.begin_request();
        let new = New { rdev, ..self.new_inode(request, mode & !umask) };
        reply_entry(self.store.make(parent.0, name.as_bytes(), new), reply);
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let _in_flight = self.scheduler.begin_request();
        let new = New { kind: FileType::Directory, ..self.new_inode(request, mode & !umask) };
        reply_entry(self.store.make(parent.0, name.as_bytes(), new), reply);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let _in_flight = self.scheduler.begin_request();
        let target = target.as_os_str().as_bytes().to_vec();
        let new = New { kind: FileType::Symlink, target, ..self.new_inode(request, 0o777) };
        reply_entry(self.store.make(parent.0, name.as_bytes(), new), reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _in_flight = self.scheduler.begin_request();
        reply_empty(self.store.remove(parent.0, name.as_bytes()), reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _in_flight = self.scheduler.begin_request();
        reply_empty(self.store.remove(parent.0, name.as_bytes()), reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _in_flight = self.scheduler.begin_request();
        if !flags.is_empty() {
            return reply.error(Errno::EINVAL);
        }
        reply_empty(self.store.rename((parent.0, name.as_bytes()), (new_parent.0, new_name.as_bytes())), reply);
    }

    fn link(&self, _: &Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _in_flight = self.scheduler.begin_request();
        reply_entry(self.store.link(number.0, parent.0, name.as_bytes()), reply);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let _in_flight = self.scheduler.begin_request();
        let new = New { kind: FileType::RegularFile, open: true, ..self.new_inode(request, mode & !umask) };
        match self.store.make(parent.0, name.as_bytes(), new) {
            Ok(a) => reply.created(&FOR_EVER, &a, GENERATION, FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let _in_flight = self.scheduler.begin_request();
        match self.store.open(number.0) {
            Ok(()) => reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE),
            Err(error) => reply.error(error),
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
        let in_flight = self.scheduler.begin_request();
        if size as usize >= LONG_BYTES {
            in_flight.mark_long();
        }
        match self.store.with(number.0, |inode| inode.read(offset, size as usize)) {
            Ok(data) => reply.data(&data),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let in_flight = self.scheduler.begin_request();
        if data.len() >= LONG_BYTES {
            in_flight.mark_long();
        }
        match self.store.with(number.0, |inode| inode.write(offset, data)) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        let _in_flight = self.scheduler.begin_request();
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let _in_flight = self.scheduler.begin_request();
        reply_empty(self.store.release(number.0), reply);
    }

    /// Replies with success, not ENOSYS: the request is part of the cost of an fsync through FUSE.
    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let _in_flight = self.scheduler.begin_request();
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let _in_flight = self.scheduler.begin_request();
        reply.ok();
    }

    fn readdirplus(&self, _: &Request, number: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let _in_flight = self.scheduler.begin_request();
        // Collected first: one inode lock at a time. A reply never holds more than 4 KiB / 152
        // entries and some.
        let listed = self.store.with(number.0, |inode| {
            let directory = inode.directory()?;
            let dots = [(1, number.0, b".".to_vec()), (2, directory.parent, b"..".to_vec())];
            let dots = dots.into_iter().filter(|(cookie, ..)| *cookie > offset);
            let entries = directory.by_cookie.range(offset + 1..);
            let entries = entries.map(|(cookie, entry)| (*cookie, entry.ino, entry.name.clone()));
            Ok(dots.chain(entries).take(1024).collect::<Vec<_>>())
        });
        let entries = match listed {
            Ok(entries) => entries,
            Err(error) => return reply.error(error),
        };
        for (cookie, ino, name) in entries {
            let Ok(a) = self.store.attributes(ino) else { continue };
            if reply.add(a.ino, cookie, OsStr::from_bytes(&name), &FOR_EVER, &a, GENERATION) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let _in_flight = self.scheduler.begin_request();
        reply.statfs(BLOCKS, BLOCKS, BLOCKS, BLOCKS, BLOCKS, 4096, 255, 4096);
    }

    fn setxattr(&self, _: &Request, number: INodeNo, name: &OsStr, value: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        let _in_flight = self.scheduler.begin_request();
        let set = self.store.with(number.0, |inode| {
            inode.xattrs.insert(name.as_bytes().to_vec(), value.to_vec());
            Ok(())
        });
        reply_empty(set, reply);
    }

    fn getxattr(&self, _: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let _in_flight = self.scheduler.begin_request();
        let value = self.store.with(number.0, |inode| inode.xattrs.get(name.as_bytes()).cloned().ok_or(Errno::ENODATA));
        reply_xattr(value, size, reply);
    }

    fn listxattr(&self, _: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let _in_flight = self.scheduler.begin_request();
        let names = self.store.with(number.0, |inode| {
            Ok(inode.xattrs.keys().flat_map(|name| [name.as_slice(), b"\0"].concat()).collect::<Vec<u8>>())
        });
        reply_xattr(names, size, reply);
    }
}
