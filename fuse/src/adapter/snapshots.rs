//! Serves `.snapshots`: the directory itself, and the content of each snapshot, read-only.
//!
//! The directory is not part of the archive, so nothing in it can be created, changed or removed.
//! Its name is taken in the root: creating it fails with `Exists`, as for any existing directory.
//! Every other change fails with EROFS. Hard links from a snapshot into the live tree fail with
//! EXDEV, and so does copy_file_range(2), after which the kernel copies by reading.
//!
//! Each request looks up the snapshot of its view ([`lockbox::fs::SnapshotView`]): a removed one is
//! ESTALE.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;

use fuser::{
    FileAttr, FileHandle, FopenFlags, Generation, INodeNo, OpenFlags, ReplyAttr, ReplyData, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyXattr,
};
use lockbox::fs::{Attributes, FileSystem, SnapshotId, SnapshotView, mode};
use lockbox::fs::{Ino, ROOT_INO};
use lockbox::{Error, Result};
use lockbox_host::mount_options::SnapshotDir;

use super::content::{self, stop_if_full, tolerate_damage};
use super::context::{Adapter, SNAPSHOT_DIR_NAME};
use crate::convert::{self, GENERATION, errno, may_write, reply_offset, reply_xattr};
use crate::kernel_cache::FOR_EVER;
use crate::kernel_cache::snapshot_inodes::{
    InodeKind, MountedView, SNAPSHOT_CONTENT_TIMEOUT, SNAPSHOT_NAME_TIMEOUT, is_live, snapshot_dir_number,
};

/// Directory offset of `.snapshots`: `i64::MAX`, after all entries.
const LAST_COOKIE: u64 = i64::MAX as u64;
/// Offsets of `.` and `..`; the offset of a snapshot is its number plus this.
const DOTS: u64 = 2;

/// Returns the option's value, or `Off` if the archive has an entry of that name, which must stay
/// reachable.
pub(crate) fn effective_snapshot_dir(fs: &FileSystem, option: SnapshotDir) -> SnapshotDir {
    if option == SnapshotDir::Off || matches!(fs.lookup(ROOT_INO, SNAPSHOT_DIR_NAME), Err(Error::NotFound)) {
        return option;
    }
    tracing::warn!("the archive has an entry .snapshots of its own, so snapshots are not found there in this mount");
    SnapshotDir::Off
}

/// Inode in `.snapshots`, or that directory itself.
pub(super) struct SnapshotInode<'a> {
    adapter: &'a Adapter,
    number: u64,
}

/// Kind of such an inode, determined by each request.
enum SnapshotObject<'a> {
    Directory,
    Inode(ViewInode<'a>),
}

/// Inode in the content of a snapshot.
struct ViewInode<'a> {
    view: MountedView,
    snapshot: SnapshotView<'a>,
    ino: Ino,
}

/// Attributes and generation of a directory entry, as sent to the kernel.
type EntryAttributes = (FileAttr, Generation);

impl Adapter {
    /// Returns None for an inode of the live tree.
    pub(super) fn snapshot_inode(&self, number: INodeNo) -> Option<SnapshotInode<'_>> {
        (!is_live(number.0)).then_some(SnapshotInode { adapter: self, number: number.0 })
    }

    pub(super) fn reply_snapshot_dir(&self, reply: ReplyEntry) {
        match self.snapshot_dir_attributes() {
            // The name never disappears, but the content may change.
            Ok(attributes) => reply.entry_with_ttls(&SNAPSHOT_NAME_TIMEOUT, &FOR_EVER, &attributes, GENERATION),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Owner and group are those of the root, the times those of the newest snapshot.
    fn snapshot_dir_attributes(&self) -> Result<FileAttr> {
        let root = self.fs.attributes(ROOT_INO)?;
        let snapshots = self.fs.list_snapshots()?;
        let time = snapshots.last().map_or(root.btime, |newest| newest.time);
        let attributes = Attributes {
            ino: Ino(snapshot_dir_number()),
            mode: mode::DIRECTORY | 0o555,
            links: u32::try_from(snapshots.len()).unwrap_or(u32::MAX).saturating_add(2),
            size: 4096,
            blocks: 8,
            atime: time,
            mtime: time,
            ctime: time,
            ..root
        };
        Ok(convert::to_file_attr(&attributes))
    }

    /// Adds `.snapshots` after all entries of the root, if it is to be listed.
    pub(super) fn list_snapshot_dir(
        &self,
        directory: INodeNo,
        offset: u64,
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<()> {
        let is_shown = directory.0 == ROOT_INO.0 && self.options.snapshot_dir == SnapshotDir::Shown;
        if is_shown && offset < LAST_COOKIE {
            let (name, attributes) = (OsStr::from_bytes(SNAPSHOT_DIR_NAME), self.snapshot_dir_attributes()?);
            let _full = reply.add(attributes.ino, LAST_COOKIE, name, &SNAPSHOT_NAME_TIMEOUT, &attributes, GENERATION);
        }
        Ok(())
    }
}

impl<'a> SnapshotInode<'a> {
    /// Errors: `Stale` for an inode that is not part of this mount.
    fn resolve_object(&self) -> Result<SnapshotObject<'a>> {
        let Adapter { fs, options, .. } = self.adapter;
        match self.adapter.cache.views.resolve(self.number)? {
            _ if options.snapshot_dir == SnapshotDir::Off => Err(Error::Stale),
            InodeKind::Live => Err(Error::Stale),
            InodeKind::Directory => Ok(SnapshotObject::Directory),
            InodeKind::View(view, ino) => {
                Ok(SnapshotObject::Inode(ViewInode { view, snapshot: fs.snapshot_view(view.snapshot()), ino }))
            }
        }
    }

    /// Errors: `Invalid` for `.snapshots`, which does not support the request.
    fn view_inode(&self) -> Result<ViewInode<'a>> {
        match self.resolve_object()? {
            SnapshotObject::Inode(view_inode) => Ok(view_inode),
            SnapshotObject::Directory => Err(Error::invalid("not asked of a directory")),
        }
    }

    pub(super) fn lookup(&self, name: &OsStr, reply: ReplyEntry) {
        let is_view = matches!(self.resolve_object(), Ok(SnapshotObject::Inode(_)));
        let lifetime = if is_view { SNAPSHOT_CONTENT_TIMEOUT } else { SNAPSHOT_NAME_TIMEOUT };
        match self.lookup_entry(name.as_bytes()) {
            Ok((attributes, generation)) => {
                reply.entry_with_ttls(&SNAPSHOT_CONTENT_TIMEOUT, &lifetime, &attributes, generation)
            }
            // KERNEL-10: the name may appear later in `.snapshots`, but not in a snapshot.
            Err(Error::NotFound) if is_view => {
                reply.entry_with_ttls(&lifetime, &lifetime, &convert::negative_entry(), GENERATION);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Looks up a name and counts the lookup.
    fn lookup_entry(&self, name: &[u8]) -> Result<EntryAttributes> {
        match (self.resolve_object()?, name) {
            (SnapshotObject::Directory, b".") => Ok((self.adapter.snapshot_dir_attributes()?, GENERATION)),
            (SnapshotObject::Directory, b"..") => {
                let root = self.adapter.fs.attributes(ROOT_INO)?;
                Ok((self.adapter.cache.to_file_attr(&root), GENERATION))
            }
            (SnapshotObject::Directory, name) => {
                self.adapter.lookup_snapshot_root(self.adapter.fs.snapshot_named(name)?)
            }
            (SnapshotObject::Inode(ViewInode { ino: ROOT_INO, .. }), b"..") => {
                Ok((self.adapter.snapshot_dir_attributes()?, GENERATION))
            }
            (SnapshotObject::Inode(view_inode), name) => {
                let attributes = view_inode.to_file_attr(&view_inode.snapshot.lookup(view_inode.ino, name)?)?;
                self.adapter.cache.views.add_lookup(view_inode.view, attributes.ino.0)?;
                Ok((attributes, view_inode.view.generation()))
            }
        }
    }

    pub(super) fn getattr(&self, reply: ReplyAttr) {
        let attributes = self.resolve_object().and_then(|object| match object {
            SnapshotObject::Directory => Ok((SNAPSHOT_NAME_TIMEOUT, self.adapter.snapshot_dir_attributes()?)),
            SnapshotObject::Inode(view_inode) => Ok((
                SNAPSHOT_CONTENT_TIMEOUT,
                view_inode.to_file_attr(&view_inode.snapshot.attributes(view_inode.ino)?)?,
            )),
        });
        match attributes {
            Ok((lifetime, attributes)) => reply.attr(&lifetime, &attributes),
            Err(error) => reply.error(errno(&error)),
        }
    }

    pub(super) fn readlink(&self, reply: ReplyData) {
        let read = |view_inode: ViewInode<'_>| {
            self.adapter.cache.views.mark_read(view_inode.view);
            view_inode.snapshot.read_link(view_inode.ino)
        };
        match self.view_inode().and_then(read) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Opens a file. Nothing is held open; the handle is 0.
    pub(super) fn open(&self, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.view_inode().and_then(|view_inode| {
            if may_write(flags) || flags.0 & nix::libc::O_TRUNC != 0 {
                return Err(Error::ReadOnly("the content of a snapshot".into()));
            }
            self.adapter.cache.views.mark_read(view_inode.view);
            view_inode.snapshot.attributes(view_inode.ino)
        });
        match opened {
            Ok(_) => {
                self.adapter.activity.file_opened();
                reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    pub(super) fn release(&self, reply: ReplyEmpty) {
        self.adapter.activity.file_closed();
        reply.ok();
    }

    pub(super) fn read(&self, offset: u64, size: u32, reply: ReplyData) {
        self.adapter.fs.with_read_buffer(|buffer| {
            let read = |view_inode: ViewInode<'_>| {
                view_inode.snapshot.read_into(view_inode.ino, offset, size as usize, buffer)
            };
            match self.view_inode().and_then(read) {
                Ok(count) => reply.data(&buffer[..count]),
                Err(error) => reply.error(errno(&error)),
            }
        });
    }

    pub(super) fn lseek(&self, offset: i64, whence: i32, reply: ReplyLseek) {
        let found = self.view_inode().and_then(|ViewInode { snapshot, ino, .. }| {
            content::resolve_seek(offset, whence, &|from| snapshot.next_data(ino, from), &|from| {
                snapshot.next_hole(ino, from)
            })
        });
        reply_offset(found, reply);
    }

    pub(super) fn getxattr(&self, name: &OsStr, size: u32, reply: ReplyXattr) {
        let value = self.resolve_object().and_then(|object| match object {
            SnapshotObject::Directory => Err(Error::NoAttribute),
            SnapshotObject::Inode(view_inode) => view_inode.snapshot.xattr(view_inode.ino, name.as_bytes()),
        });
        reply_xattr(value, size, reply);
    }

    pub(super) fn listxattr(&self, is_trusted: &dyn Fn() -> bool, size: u32, reply: ReplyXattr) {
        let names = self.resolve_object().and_then(|object| match object {
            SnapshotObject::Directory => Ok(Vec::new()),
            SnapshotObject::Inode(view_inode) => view_inode.snapshot.list_xattrs_for(view_inode.ino, is_trusted),
        });
        reply_xattr(names, size, reply);
    }

    /// Returns the end of a listing that starts now.
    pub(super) fn listing_bound(&self) -> Result<u64> {
        match self.resolve_object()? {
            // Snapshot numbers increase and are unique, so a snapshot taken meanwhile is listed
            // once.
            SnapshotObject::Directory => Ok(u64::MAX),
            SnapshotObject::Inode(view_inode) => view_inode.snapshot.directory_bound(view_inode.ino),
        }
    }

    pub(super) fn list(&self, offset: u64, bound: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        let view_inode = match self.resolve_object()? {
            SnapshotObject::Directory => return self.list_snapshots(offset, reply),
            SnapshotObject::Inode(view_inode) => view_inode,
        };
        let (views, generation) = (&self.adapter.cache.views, view_inode.view.generation());
        let (mut any, mut failed, mut lookups) = (false, Ok(()), views.begin_lookups());
        let listed =
            view_inode.snapshot.list_directory(view_inode.ino, offset, bound, true, &mut |entry, attributes| {
                let Some(a) = attributes else {
                    tracing::warn!(inode = entry.ino.0, "a listing of a snapshot leaves out a damaged entry");
                    return ControlFlow::Continue(());
                };
                let name = OsStr::from_bytes(entry.name);
                // The kernel ignores the attributes of these two.
                let is_dots = entry.cookie <= DOTS;
                let described = match entry.name {
                    b".." if view_inode.ino == ROOT_INO => self.adapter.snapshot_dir_attributes(),
                    _ => view_inode.to_file_attr(a),
                };
                let counted = described.and_then(|a| match is_dots {
                    true => Ok(a),
                    false => lookups.add(view_inode.view, a.ino.0).map(|()| a),
                });
                match counted {
                    Ok(a) => {
                        any = true;
                        let is_full = reply.add(a.ino, entry.cookie, name, &SNAPSHOT_CONTENT_TIMEOUT, &a, generation);
                        if is_full && !is_dots {
                            lookups.undo_last();
                        }
                        stop_if_full(is_full)
                    }
                    Err(error) => {
                        failed = Err(error);
                        ControlFlow::Break(())
                    }
                }
            });
        tolerate_damage(listed.and(failed), any, INodeNo(self.number))?;
        lookups.commit();
        Ok(())
    }

    fn list_snapshots(&self, offset: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        if offset < DOTS {
            let (own, root) = (self.adapter.snapshot_dir_attributes()?, self.adapter.fs.attributes(ROOT_INO)?);
            for (cookie, name, attributes) in [(1, ".", own), (DOTS, "..", self.adapter.cache.to_file_attr(&root))] {
                if offset < cookie
                    && reply.add(attributes.ino, cookie, name, &SNAPSHOT_NAME_TIMEOUT, &attributes, GENERATION)
                {
                    return Ok(());
                }
            }
        }
        let mut lookups = self.adapter.cache.views.begin_lookups();
        for snapshot in self.adapter.fs.list_snapshots()? {
            let cookie = snapshot.id.0.saturating_add(DOTS).min(LAST_COOKIE);
            if cookie <= offset {
                continue;
            }
            let found = self.adapter.lookup_snapshot_root(snapshot.id);
            let Some((attributes, generation)) = skip_unreadable(found, snapshot.id)? else { continue };
            lookups.adopt(attributes.ino.0);
            let name = OsStr::from_bytes(&snapshot.name);
            // The reply has one timeout for name and attributes.
            if reply.add(attributes.ino, cookie, name, &SNAPSHOT_NAME_TIMEOUT, &attributes, generation) {
                lookups.undo_last();
                break;
            }
        }
        lookups.commit();
        Ok(())
    }
}

/// Returns None for a snapshot that cannot be shown, with a log line; looking up its name reports
/// the error.
fn skip_unreadable(found: Result<EntryAttributes>, id: SnapshotId) -> Result<Option<EntryAttributes>> {
    match found {
        // It was removed meanwhile.
        Err(Error::Stale) => Ok(None),
        Err(error @ (Error::Damaged(_) | Error::Unsupported(_))) => {
            tracing::warn!(snapshot = id.0, %error, "a listing of the snapshots leaves out an unreadable snapshot");
            Ok(None)
        }
        found => found.map(Some),
    }
}

impl Adapter {
    /// Looks up the root of a snapshot and counts the lookup.
    fn lookup_snapshot_root(&self, id: SnapshotId) -> Result<EntryAttributes> {
        let attributes = self.fs.snapshot_view(id).attributes(ROOT_INO)?;
        let view = self.cache.views.open(id)?;
        let view_inode = ViewInode { view, snapshot: self.fs.snapshot_view(id), ino: ROOT_INO };
        view_inode
            .to_file_attr(&attributes)
            .map(|attributes| (attributes, view.generation()))
            .inspect_err(|_| self.cache.views.remove_lookup(view))
    }
}

impl ViewInode<'_> {
    /// Converts attributes, with the inode number of this mount.
    fn to_file_attr(&self, a: &Attributes) -> Result<FileAttr> {
        let ino = Ino(self.view.kernel_number(a.ino)?);
        Ok(convert::to_file_attr(&Attributes { ino, ..*a }))
    }
}
