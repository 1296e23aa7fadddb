//! Serves what lies in `.snapshots` of the root: the directory itself, and what each snapshot shows, for reading.
//!
//! The directory is no part of the archive, so nothing in it can be made, changed or removed, and the name is taken in the root: making something of this
//! name is `Exists`, as it is for any directory that is there. Every other change gets EROFS. From a snapshot into the live tree nothing is linked
//! (EXDEV), and copy_file_range(2) copies (EXDEV, upon which the kernel does it by reading).
//!
//! A request asks for the snapshot of its view anew ([`lockbox::fs::SnapshotView`]): one that was removed is ESTALE.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;

use fuser::{
    FileAttr, FileHandle, FopenFlags, Generation, INodeNo, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyXattr,
};
use lockbox::format::{Ino, ROOT_INO};
use lockbox::fs::{Attributes, FileSystem, KeptSnapshot, SnapshotId, SnapshotView, mode};
use lockbox::{Error, Result};

use super::context::Adapter;
use super::listings::or_the_others;
use super::reply::{full, reply_xattr};
use super::seek;
use crate::convert::{self, GENERATION, writes};
use crate::errno::errno;
use crate::kernel_cache::FOR_EVER;
use crate::kernel_cache::snapshot_inodes::{
    CONTENT_LIFETIME, NAMES_LIFETIME, Place, View, Views, directory_number, is_live,
};
use crate::options::SnapshotDir;

/// The name in the root.
const NAME: &[u8] = b".snapshots";
/// Its place in a listing of the root, behind all entries: the greatest that an off_t has.
const LAST_COOKIE: u64 = i64::MAX as u64;
/// Cookies of `.` and `..` in the directory; those of snapshots are their numbers behind these.
const DOTS: u64 = 2;

/// What the option asks for, unless the archive has an entry of that name: whoever made it is to find it.
pub fn snapshot_dir(fs: &FileSystem, asked: SnapshotDir) -> SnapshotDir {
    if asked == SnapshotDir::Off || matches!(fs.lookup(ROOT_INO, NAME), Err(Error::NotFound)) {
        return asked;
    }
    tracing::warn!("the archive has an entry .snapshots of its own, so snapshots are not found there in this mount");
    SnapshotDir::Off
}

/// An inode in `.snapshots`, or that directory.
pub(super) struct Kept<'a> {
    adapter: &'a Adapter,
    number: u64,
}

/// What it is; looked up with each request.
enum Object<'a> {
    Directory,
    Shown(Shown<'a>),
}

/// An inode that a snapshot shows.
struct Shown<'a> {
    view: View,
    snapshot: SnapshotView<'a>,
    ino: Ino,
}

/// What the kernel is told of an inode, and how long it may believe name and attributes.
type Entry = (FileAttr, Generation);

impl Adapter {
    /// None for an inode of the live tree.
    pub(super) fn kept(&self, number: INodeNo) -> Option<Kept<'_>> {
        (!is_live(number.0)).then_some(Kept { adapter: self, number: number.0 })
    }

    /// The inode that is to be changed.
    ///
    /// # Errors
    /// `ReadOnly` for what lies in `.snapshots`.
    pub(super) fn live(&self, number: INodeNo) -> Result<Ino> {
        if is_live(number.0) { Ok(Ino(number.0)) } else { Err(Error::ReadOnly("what a snapshot shows".into())) }
    }

    /// The directory in which the name is to be made.
    ///
    /// # Errors
    /// As [`Adapter::live`]; `Exists` for `.snapshots`.
    pub(super) fn to_make(&self, parent: INodeNo, name: &OsStr) -> Result<Ino> {
        if self.is_directory(parent, name) { Err(Error::Exists) } else { self.live(parent) }
    }

    /// The directory in which the name is to be removed, or to mean something else.
    ///
    /// # Errors
    /// As [`Adapter::live`], also for `.snapshots`.
    pub(super) fn to_change(&self, parent: INodeNo, name: &OsStr) -> Result<Ino> {
        if self.is_directory(parent, name) {
            return Err(Error::ReadOnly("the directory of the snapshots".into()));
        }
        self.live(parent)
    }

    /// Replies when everything done so far is durable, which what a snapshot shows is by itself.
    pub(super) fn make_durable(&self, number: INodeNo, reply: ReplyEmpty) {
        let in_flight = self.begin();
        match &self.syncs {
            Some(syncs) if is_live(number.0) => syncs.answer(&in_flight, reply),
            _ => reply.ok(),
        }
    }

    /// Whether the name is that of `.snapshots`.
    pub(super) fn is_directory(&self, parent: INodeNo, name: &OsStr) -> bool {
        parent.0 == ROOT_INO.0 && self.snapshot_dir != SnapshotDir::Off && name.as_bytes() == NAME
    }

    pub(super) fn reply_directory(&self, reply: ReplyEntry) {
        match self.directory_attributes() {
            // The name does not go away, what is in it may.
            Ok(attributes) => reply.entry_with_ttls(&NAMES_LIFETIME, &FOR_EVER, &attributes, GENERATION),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Belongs to whom the root belongs to; its times are those of the newest snapshot.
    fn directory_attributes(&self) -> Result<FileAttr> {
        let root = self.fs.attributes(ROOT_INO)?;
        let kept = self.fs.kept_snapshots()?;
        let time = kept.last().map_or(root.btime, |newest| newest.time);
        let attributes = Attributes {
            ino: Ino(directory_number()),
            mode: mode::DIRECTORY | 0o555,
            links: u32::try_from(kept.len()).unwrap_or(u32::MAX).saturating_add(2),
            size: 4096,
            blocks: 8,
            atime: time,
            mtime: time,
            ctime: time,
            ..root
        };
        Ok(convert::attributes(&attributes))
    }

    /// Adds `.snapshots` behind all entries of the root if it is to be listed there.
    pub(super) fn list_last(&self, directory: INodeNo, offset: u64, reply: &mut ReplyDirectory) {
        if self.lists_directory(directory, offset) {
            let _full = reply.add(
                INodeNo(directory_number()),
                LAST_COOKIE,
                fuser::FileType::Directory,
                OsStr::from_bytes(NAME),
            );
        }
    }

    /// The same with attributes.
    pub(super) fn list_last_plus(&self, directory: INodeNo, offset: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        if self.lists_directory(directory, offset) {
            let (number, name, attributes) =
                (INodeNo(directory_number()), OsStr::from_bytes(NAME), self.directory_attributes()?);
            let _full = reply.add(number, LAST_COOKIE, name, &NAMES_LIFETIME, &attributes, GENERATION);
        }
        Ok(())
    }

    fn lists_directory(&self, directory: INodeNo, offset: u64) -> bool {
        directory.0 == ROOT_INO.0 && self.snapshot_dir == SnapshotDir::Shown && offset < LAST_COOKIE
    }

    fn views(&self) -> &Views {
        &self.cache.views
    }
}

impl<'a> Kept<'a> {
    /// # Errors
    /// `Stale` for what is not in this mount.
    fn object(&self) -> Result<Object<'a>> {
        let Adapter { fs, snapshot_dir, .. } = self.adapter;
        match self.adapter.views().place(self.number)? {
            _ if *snapshot_dir == SnapshotDir::Off => Err(Error::Stale),
            Place::Live => Err(Error::Stale),
            Place::Directory => Ok(Object::Directory),
            Place::View(view, ino) => {
                Ok(Object::Shown(Shown { view, snapshot: fs.snapshot_view(view.snapshot()), ino }))
            }
        }
    }

    /// # Errors
    /// `Invalid` for `.snapshots`, of which this cannot be asked.
    fn shown(&self) -> Result<Shown<'a>> {
        match self.object()? {
            Object::Shown(shown) => Ok(shown),
            Object::Directory => Err(Error::invalid("not asked of a directory")),
        }
    }

    pub(super) fn lookup(&self, name: &OsStr, reply: ReplyEntry) {
        let is_shown = matches!(self.object(), Ok(Object::Shown(_)));
        let lifetime = if is_shown { CONTENT_LIFETIME } else { NAMES_LIFETIME };
        match self.find(name.as_bytes()) {
            Ok((attributes, generation)) => {
                reply.entry_with_ttls(&CONTENT_LIFETIME, &lifetime, &attributes, generation)
            }
            // KERNEL-10: it may come in `.snapshots`, and not in what a snapshot shows.
            Err(Error::NotFound) if is_shown => {
                reply.entry_with_ttls(&lifetime, &lifetime, &convert::no_attributes(), GENERATION);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// What a name leads to, of which the kernel counts as told.
    fn find(&self, name: &[u8]) -> Result<Entry> {
        match (self.object()?, name) {
            (Object::Directory, b".") => Ok((self.adapter.directory_attributes()?, GENERATION)),
            (Object::Directory, b"..") => {
                let root = self.adapter.fs.attributes(ROOT_INO)?;
                Ok((self.adapter.cache.told(&root), GENERATION))
            }
            (Object::Directory, name) => self.adapter.root_of(self.adapter.fs.snapshot_named(name)?),
            (Object::Shown(Shown { ino: ROOT_INO, .. }), b"..") => {
                Ok((self.adapter.directory_attributes()?, GENERATION))
            }
            (Object::Shown(shown), name) => {
                let attributes = shown.describe(&shown.snapshot.lookup(shown.ino, name)?)?;
                self.adapter.views().tell(shown.view, attributes.ino.0)?;
                Ok((attributes, shown.view.generation()))
            }
        }
    }

    pub(super) fn getattr(&self, reply: ReplyAttr) {
        let told = self.object().and_then(|object| match object {
            Object::Directory => Ok((NAMES_LIFETIME, self.adapter.directory_attributes()?)),
            Object::Shown(shown) => Ok((CONTENT_LIFETIME, shown.describe(&shown.snapshot.attributes(shown.ino)?)?)),
        });
        match told {
            Ok((lifetime, attributes)) => reply.attr(&lifetime, &attributes),
            Err(error) => reply.error(errno(&error)),
        }
    }

    pub(super) fn readlink(&self, reply: ReplyData) {
        let read = |shown: Shown<'_>| {
            self.adapter.views().read(shown.view);
            shown.snapshot.read_link(shown.ino)
        };
        match self.shown().and_then(read) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Nothing is held open: handles are numbers like all others.
    pub(super) fn open(&self, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.shown().and_then(|shown| match writes(flags) || flags.0 & nix::libc::O_TRUNC != 0 {
            true => Err(Error::ReadOnly("what a snapshot shows".into())),
            false => {
                self.adapter.views().read(shown.view);
                shown.snapshot.attributes(shown.ino)
            }
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
            let read = |shown: Shown<'_>| shown.snapshot.read_into(shown.ino, offset, size as usize, buffer);
            match self.shown().and_then(read) {
                Ok(count) => reply.data(&buffer[..count]),
                Err(error) => reply.error(errno(&error)),
            }
        });
    }

    pub(super) fn lseek(&self, offset: i64, whence: i32, reply: ReplyLseek) {
        let found = self.shown().and_then(|Shown { snapshot, ino, .. }| {
            seek::answer(offset, whence, &|from| snapshot.next_data(ino, from), &|from| snapshot.next_hole(ino, from))
        });
        match found {
            Ok(found) => reply.offset(found),
            Err(error) => reply.error(errno(&error)),
        }
    }

    pub(super) fn getxattr(&self, name: &OsStr, size: u32, reply: ReplyXattr) {
        let value = self.object().and_then(|object| match object {
            Object::Directory => Err(Error::NoAttribute),
            Object::Shown(shown) => shown.snapshot.xattr(shown.ino, name.as_bytes()),
        });
        reply_xattr(value, size, reply);
    }

    pub(super) fn listxattr(&self, is_trusted: &dyn Fn() -> bool, size: u32, reply: ReplyXattr) {
        let names = self.object().and_then(|object| match object {
            Object::Directory => Ok(Vec::new()),
            Object::Shown(shown) => shown.snapshot.list_xattrs_for(shown.ino, is_trusted),
        });
        reply_xattr(names, size, reply);
    }

    /// Where a listing that starts now ends.
    pub(super) fn bound(&self) -> Result<u64> {
        match self.object()? {
            // Numbers ascend, and no two snapshots have one: what comes meanwhile is listed once.
            Object::Directory => Ok(u64::MAX),
            Object::Shown(shown) => shown.snapshot.directory_bound(shown.ino),
        }
    }

    pub(super) fn list(&self, offset: u64, bound: u64, reply: &mut ReplyDirectory) -> Result<()> {
        let Shown { view, snapshot, ino } = match self.object()? {
            Object::Directory => return self.list_snapshots(offset, reply),
            Object::Shown(shown) => shown,
        };
        let (mut any, mut failed) = (false, Ok(()));
        let listed = snapshot.list_directory(ino, offset, bound, false, &mut |entry, _| {
            let number = match entry.name {
                b".." if ino == ROOT_INO => Ok(directory_number()),
                _ => view.kernel_number(entry.ino),
            };
            match number {
                Ok(number) => {
                    any = true;
                    let kind = convert::file_type(entry.file_type.into());
                    full(reply.add(INodeNo(number), entry.cookie, kind, OsStr::from_bytes(entry.name)))
                }
                Err(error) => {
                    failed = Err(error);
                    ControlFlow::Break(())
                }
            }
        });
        or_the_others(listed.and(failed), any, INodeNo(self.number)).map(drop)
    }

    /// With attributes.
    pub(super) fn list_plus(&self, offset: u64, bound: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        let shown = match self.object()? {
            Object::Directory => return self.list_snapshots_plus(offset, reply),
            Object::Shown(shown) => shown,
        };
        let (views, generation) = (self.adapter.views(), shown.view.generation());
        let (mut any, mut failed, mut telling) = (false, Ok(()), views.telling());
        let listed = shown.snapshot.list_directory(shown.ino, offset, bound, true, &mut |entry, attributes| {
            let Some(a) = attributes else {
                tracing::warn!(inode = entry.ino.0, "a listing of a snapshot leaves out a damaged entry");
                return ControlFlow::Continue(());
            };
            let name = OsStr::from_bytes(entry.name);
            // The kernel drops what it is told of these two.
            let is_dots = entry.cookie <= DOTS;
            let described = match entry.name {
                b".." if shown.ino == ROOT_INO => self.adapter.directory_attributes(),
                _ => shown.describe(a),
            };
            let told = described.and_then(|a| match is_dots {
                true => Ok(a),
                false => telling.tell(shown.view, a.ino.0).map(|()| a),
            });
            match told {
                Ok(a) => {
                    any = true;
                    let is_full = reply.add(a.ino, entry.cookie, name, &CONTENT_LIFETIME, &a, generation);
                    if is_full && !is_dots {
                        telling.take_back();
                    }
                    full(is_full)
                }
                Err(error) => {
                    failed = Err(error);
                    ControlFlow::Break(())
                }
            }
        });
        or_the_others(listed.and(failed), any, INodeNo(self.number))?;
        telling.goes_out();
        Ok(())
    }

    /// Those of `.snapshots` that come behind `offset`, with their places.
    fn snapshots_from(&self, offset: u64) -> Result<impl Iterator<Item = (u64, KeptSnapshot)>> {
        let all = self.adapter.fs.kept_snapshots()?.into_iter();
        let placed = all.map(|snapshot| (snapshot.id.0.saturating_add(DOTS).min(LAST_COOKIE), snapshot));
        Ok(placed.filter(move |(cookie, _)| *cookie > offset))
    }

    fn list_snapshots(&self, offset: u64, reply: &mut ReplyDirectory) -> Result<()> {
        for (cookie, number, name) in [(1, directory_number(), "."), (DOTS, ROOT_INO.0, "..")] {
            if offset < cookie && reply.add(INodeNo(number), cookie, fuser::FileType::Directory, name) {
                return Ok(());
            }
        }
        for (cookie, snapshot) in self.snapshots_from(offset)? {
            let view = match self.adapter.views().open(snapshot.id) {
                Err(error) => {
                    left_out(error, snapshot.id)?;
                    continue;
                }
                Ok(view) => view,
            };
            // A listing without attributes tells the kernel no inode.
            self.adapter.views().untell(view);
            let number = INodeNo(view.kernel_number(ROOT_INO)?);
            if reply.add(number, cookie, fuser::FileType::Directory, OsStr::from_bytes(&snapshot.name)) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn list_snapshots_plus(&self, offset: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        if offset < DOTS {
            let (own, root) = (self.adapter.directory_attributes()?, self.adapter.fs.attributes(ROOT_INO)?);
            for (cookie, name, attributes) in [(1, ".", own), (DOTS, "..", self.adapter.cache.told(&root))] {
                if offset < cookie && reply.add(attributes.ino, cookie, name, &NAMES_LIFETIME, &attributes, GENERATION)
                {
                    return Ok(());
                }
            }
        }
        let mut telling = self.adapter.views().telling();
        for (cookie, snapshot) in self.snapshots_from(offset)? {
            let (attributes, generation) = match self.adapter.root_of(snapshot.id) {
                Err(error) => {
                    left_out(error, snapshot.id)?;
                    continue;
                }
                Ok(found) => found,
            };
            telling.counts(attributes.ino.0);
            let name = OsStr::from_bytes(&snapshot.name);
            // One time counts for name and attributes.
            if reply.add(attributes.ino, cookie, name, &NAMES_LIFETIME, &attributes, generation) {
                telling.take_back();
                break;
            }
        }
        telling.goes_out();
        Ok(())
    }
}

/// A snapshot that cannot be shown keeps nobody from the others: a listing leaves it out, says so in the log, and the name leads to the error.
fn left_out(error: Error, id: SnapshotId) -> Result<()> {
    match error {
        // It was removed meanwhile.
        Error::Stale => Ok(()),
        Error::Damaged(_) | Error::Unsupported(_) => {
            tracing::warn!(snapshot = id.0, %error, "a listing of the snapshots leaves out one that cannot be shown");
            Ok(())
        }
        error => Err(error),
    }
}

impl Adapter {
    /// The root of what a snapshot shows, of which the kernel counts as told.
    fn root_of(&self, id: SnapshotId) -> Result<Entry> {
        let attributes = self.fs.snapshot_view(id).attributes(ROOT_INO)?;
        let view = self.views().open(id)?;
        let shown = Shown { view, snapshot: self.fs.snapshot_view(id), ino: ROOT_INO };
        shown
            .describe(&attributes)
            .map(|attributes| (attributes, view.generation()))
            .inspect_err(|_| self.views().untell(view))
    }
}

impl Shown<'_> {
    /// With the numbers of this mount.
    fn describe(&self, a: &Attributes) -> Result<FileAttr> {
        let ino = Ino(self.view.kernel_number(a.ino)?);
        Ok(convert::attributes(&Attributes { ino, ..*a }))
    }
}
