//! Snapshots: named versions of the whole tree, views for reading them, and differences between two
//! versions by inode.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::attributes::{AttributeLoader, LookupTarget, find, list, stale_to_not_found};
use super::file_data::{FileLayout, read_published, resize_buffer};
use super::names::link_target;
use super::xattr;
use crate::error::{Error, Result};
use crate::format::values::{Extent, InodeValue, SnapshotValue, decode_list};
use crate::format::{Ino, Pointer, kind};
use crate::fs::{Attributes, DirectoryEntry, FileSystem, SnapshotId, SnapshotInfo, directory, extents, inode};
use crate::txn::{Choice, Pinned, ReadView, Volume};

impl FileSystem {
    /// Takes a snapshot of the current version; durable on return. Data deleted before is not in
    /// it, except for files that are still open, and for inodes that are damaged or found no space
    /// to be reclaimed. Errors: `Exists` when another snapshot has the name, `Invalid` for an
    /// invalid name and when the archive is being closed, `ReadOnly`, `NoSpace`, `WriteFailed`.
    pub(crate) fn take_snapshot(&self, name: &[u8]) -> Result<()> {
        let _work = self.shutdown_gate.enter()?;
        self.check_snapshots_writable()?;
        // Background work reports what is left.
        let _left = self.reclaim.run_queued(&|| self.shutdown_gate.check_open())?;
        // Dirty data may replace packed files, so it is written before stale pages are searched.
        // Data accepted meanwhile, and changes of the repacking, are written once more: so little
        // is left to the commit, which blocks writers, that they wait no longer than for an fsync.
        self.commit_all()?;
        self.repack.run_noted(&self.shutdown_gate)?;
        self.commit_all()?;
        self.volume.take_snapshot(name).map(drop).map_err(|error| self.volume.error_for(error))
    }

    /// Commits and pins the current version. Errors of a commit; `Invalid` when the archive is
    /// being closed.
    pub(crate) fn pin(&self) -> Result<Pinned> {
        let _work = self.shutdown_gate.enter()?;
        self.pin_held_open()
    }

    /// Pins the current version, for a caller that holds [`FileSystem::hold_open`] longer than the
    /// pin. Errors of a commit.
    pub(crate) fn pin_held_open(&self) -> Result<Pinned> {
        if !self.volume.read_only() {
            // Leaves little to the commit, which blocks writers.
            self.commit_all()?;
        }
        self.volume.pin().map_err(|error| self.volume.error_for(error))
    }

    /// Keeps the archive from being closed while the guard lives.
    ///
    /// # Errors
    /// `Invalid` when it is being closed.
    pub fn hold_open(&self) -> Result<impl Drop + '_> {
        self.shutdown_gate.enter()
    }

    /// Fails when the archive is being closed. Long work calls it regularly, so that closing does
    /// not wait for the rest of the work.
    ///
    /// # Errors
    /// `Invalid` when the archive is being closed.
    pub fn check_closing(&self) -> Result<()> {
        self.shutdown_gate.check_open()
    }

    /// Returns whether anything changed since the newest snapshot; true without one. Commits
    /// accepted data for that. Errors of [`FileSystem::make_durable`]; `Damaged`.
    pub(crate) fn differs_from_newest_snapshot(&self) -> Result<bool> {
        let _work = self.shutdown_gate.enter()?;
        if self.volume.writer().is_dirty() {
            self.commit_all()?;
        }
        self.volume.differs_from_newest_snapshot()
    }

    /// Opens the snapshot of this name as a read-only file system. The snapshot must not be removed
    /// while it is in use. Errors: `NotFound` when there is none.
    pub(crate) fn open_snapshot(&self, name: &[u8]) -> Result<Arc<FileSystem>> {
        FileSystem::new(self.volume.snapshot_view(name)?, self.environment.clone(), self.name_key, self.options)
    }

    /// Opens a pinned version as a read-only file system. The pin has to be held as long as it is
    /// in use. Errors of reading its root.
    pub(crate) fn open_pinned(&self, pinned: &Pinned) -> Result<Arc<FileSystem>> {
        FileSystem::new(self.volume.pinned_view(pinned), self.environment.clone(), self.name_key, self.options)
    }

    /// Returns the readable snapshots, the oldest first, with their numbers and the bytes that
    /// removing each one alone would free.
    pub(crate) fn snapshots(&self) -> Result<Vec<(u64, SnapshotValue, u64)>> {
        let mut all = Vec::new();
        for (id, snapshot) in self.volume.readable_snapshots()? {
            all.push((id, snapshot, self.volume.held_by_snapshots(&|other| other == id)?));
        }
        Ok(all)
    }

    /// Returns the readable snapshots with unique names, the oldest first.
    pub fn list_snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        // Names are unique, but a key holder can write duplicates: the newest one counts.
        let mut newest = BTreeMap::new();
        for (id, snapshot) in self.volume.readable_snapshots()? {
            newest.insert(snapshot.name, (id, snapshot.time));
        }
        let to_info = |(name, (id, time))| SnapshotInfo { id: SnapshotId(id), name, time };
        let mut all: Vec<SnapshotInfo> = newest.into_iter().map(to_info).collect();
        all.sort_unstable_by_key(|snapshot| snapshot.id);
        Ok(all)
    }

    /// Returns the id of the snapshot of this name.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn snapshot_named(&self, name: &[u8]) -> Result<SnapshotId> {
        self.volume.snapshot_named(name).map(|(id, _)| SnapshotId(id))
    }

    /// Returns a view of a snapshot. The snapshot may be removed already, which each request
    /// detects.
    pub fn snapshot_view(&self, id: SnapshotId) -> SnapshotView<'_> {
        SnapshotView { volume: &self.volume, name_key: &self.name_key, id }
    }

    /// Removes the snapshots that `choose` selects from the existing ones. The removal is durable
    /// on return, but the space is freed later ([`FileSystem::finish_removals`]). No snapshot is
    /// taken or removed between the choice and the removal. Errors of `choose`, with nothing
    /// removed; `ReadOnly`, `NoSpace`, `WriteFailed`; `Invalid` when the archive is being closed.
    pub(crate) fn remove_chosen_snapshots(&self, choose: Choice<'_>) -> Result<()> {
        let _work = self.shutdown_gate.enter()?;
        self.check_snapshots_writable()?;
        self.volume.forget_snapshots(choose)?;
        self.commit_all()
    }

    fn check_snapshots_writable(&self) -> Result<()> {
        match self.volume.read_only() {
            true => Err(Error::ReadOnly("the archive is opened for reading".into())),
            false => Ok(()),
        }
    }

    /// Frees the space that only removed snapshots used, in steps; `go_on` is called before each.
    /// The background work of a mount does the rest.
    pub(crate) fn finish_removals(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let _work = self.shutdown_gate.enter()?;
        self.finish_removals_in(go_on)
    }

    /// Frees like [`Self::finish_removals`], for a caller inside the shutdown gate.
    pub(in crate::fs) fn finish_removals_in(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        while self.volume.removal_step()? {
            self.shutdown_gate.check_open()?;
            go_on()?;
        }
        Ok(())
    }
}

/// An inode with records that differ between two versions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangedInode {
    pub(crate) ino: Ino,
    /// A change of the inode record itself.
    pub(crate) attributes: bool,
    /// A change in extents, inline data or the trim offset. The bytes may still be the same.
    pub(crate) content: bool,
    pub(crate) xattrs: bool,
    /// Entries of this directory that only the older version has, by name.
    pub(crate) removed_entries: Vec<(Vec<u8>, Ino)>,
    /// Entries that only the newer version has.
    pub(crate) added_entries: Vec<(Vec<u8>, Ino)>,
}

impl ChangedInode {
    /// Returns whether the content was only repacked, and nothing else changed.
    pub(crate) fn is_only_repacked(&self) -> bool {
        let entries = self.removed_entries.len() + self.added_entries.len();
        !self.attributes && !self.content && !self.xattrs && entries == 0
    }
}

impl FileSystem {
    /// Calls `f` with each inode that has records different from the version of `older`, by
    /// ascending number. Takes time in proportion to the differences. Numbers are never reused,
    /// also across a crash (`Operation::set_aside_inos`, `Volume::open`), so an inode with records
    /// on both sides is the same object. Errors: `Invalid` when the two are not versions of one
    /// open archive; read errors.
    ///
    /// One changed small file has the other files of its packed page repacked, over a hundred with
    /// 1 KiB. Their bytes are compared here, by extents: no inode is looked up, and mostly the two
    /// pages are read once.
    pub(crate) fn changes_since(
        &self,
        older: &FileSystem,
        f: &mut dyn FnMut(ChangedInode) -> Result<()>,
    ) -> Result<()> {
        if !self.volume.shares_pages_with(&older.volume) {
            return Err(Error::invalid("only moments of one archive can be compared"));
        }
        // Files whose newest bytes are only in memory: the trees do not show them.
        let mut dirty = self.write_buffer.files().into_iter().map(|file| file.ino()).peekable();
        let (state, older_state) = (self.volume.state(), older.volume.state());
        let mut repacked = RepackedContent::default();
        let mut last: Option<ChangedInode> = None;
        self.volume.view(&state).differences(&older.volume.view(&older_state), &mut |key, old, new| {
            // Inode 0 has the lists for reclaim.
            if key.object == 0 {
                return Ok(ControlFlow::Continue(()));
            }
            let ino = Ino(key.object);
            if last.as_ref().is_none_or(|last| last.ino != ino) {
                last.take().map_or(Ok(()), &mut *f)?;
                while let Some(before) = dirty.next_if(|dirty| *dirty < ino) {
                    f(ChangedInode { ino: before, content: true, ..ChangedInode::default() })?;
                }
            }
            let changed = last.get_or_insert_with(|| {
                let content = dirty.next_if_eq(&ino).is_some();
                ChangedInode { ino, content, ..ChangedInode::default() }
            });
            match key.kind {
                kind::INODE => {
                    changed.attributes = true;
                    // Hidden extents have no records of their own.
                    let trim = |value: &[u8]| InodeValue::decode(value).map(|inode| inode.trim);
                    changed.content |= old.map(trim).transpose()? != new.map(trim).transpose()?;
                }
                // Other attributes mostly show a difference without any reading of content.
                kind::EXTENT
                    if !changed.attributes
                        && !changed.content
                        && repacked.is_equal(&self.volume, key.sub, old, new)? => {}
                kind::EXTENT | kind::INLINE => changed.content = true,
                kind::XATTR | kind::XATTR_PIECE => changed.xattrs = true,
                // Each entry is in the list and in the index (NAME-1).
                kind::DIR_LIST => {
                    let named = |value: &[u8]| decode_list(value).map(|entry| (entry.name.to_vec(), entry.ino));
                    let (old, new) = (old.map(named).transpose()?, new.map(named).transpose()?);
                    if old != new {
                        changed.removed_entries.extend(old);
                        changed.added_entries.extend(new);
                    }
                }
                _ => {}
            }
            Ok(ControlFlow::Continue(()))
        })?;
        last.map_or(Ok(()), &mut *f)?;
        dirty.try_for_each(|ino| f(ChangedInode { ino, content: true, ..ChangedInode::default() }))
    }
}

/// Comparison of extents before and after a repack (REPACK-1).
#[derive(Default)]
struct RepackedContent {
    old: RecentPages,
    new: RecentPages,
}

impl RepackedContent {
    /// Returns whether two extent values at `offset` may be parts of packed pages, and have equal
    /// bytes.
    fn is_equal(&mut self, volume: &Volume, offset: u64, old: Option<&[u8]>, new: Option<&[u8]>) -> Result<bool> {
        let (Some(old), Some(new)) = (old, new) else { return Ok(false) };
        let (old, new) = (Extent::decode(old)?, Extent::decode(new)?);
        let is_candidate = old.length == new.length && extents::may_be_packed(offset, old.length);
        Ok(is_candidate && self.old.part(volume, &old)? == self.new.part(volume, &new)?)
    }
}

/// Content of the pages that were read last. Files packed together mostly have ascending numbers,
/// but files of several owners or compressions alternate.
#[derive(Default)]
struct RecentPages(VecDeque<PageContent>);

struct PageContent {
    page: Pointer,
    length: usize,
    bytes: Zeroizing<Vec<u8>>,
}

impl RecentPages {
    const MOST: usize = 4;

    fn part(&mut self, volume: &Volume, extent: &Extent) -> Result<&[u8]> {
        let Extent { page, start, length, .. } = *extent;
        let known = self.0.iter().position(|content| content.page == page);
        let at = match known {
            Some(at) => at,
            None => {
                let oldest = if self.0.len() < Self::MOST { None } else { self.0.pop_front() };
                let mut bytes = oldest.map_or_else(Zeroizing::default, |content| content.bytes);
                let length = volume.read_all_data(&page, &mut bytes)?;
                self.0.push_back(PageContent { page, length, bytes });
                self.0.len() - 1
            }
        };
        let content = &self.0[at];
        let part = start as usize..start as usize + length as usize;
        content.bytes[..content.length].get(part).ok_or_else(|| page.damaged("extent reaches beyond its page"))
    }
}

/// View of one snapshot, read like the live tree by [`FileSystem`] and concurrently with it, with
/// the same inode numbers. It is only an id and pins nothing: each call looks the snapshot up, and
/// pins the pages that it reads until it returns.
///
/// Dirty data and log entries over the live tree are not used: they are keyed by inode number and
/// belong to the files that have those numbers now. The content of a snapshot was published and
/// committed when it was taken.
///
/// # Errors
/// Each call also fails with `Stale` when the snapshot was removed.
#[derive(Clone, Copy)]
pub struct SnapshotView<'a> {
    volume: &'a Volume,
    name_key: &'a [u8; 16],
    id: SnapshotId,
}

impl<'a> SnapshotView<'a> {
    fn reading(&self) -> Result<ReadView<'a>> {
        ReadView::of_snapshot(self.volume, self.id.0)
    }

    /// See [`FileSystem::lookup`].
    pub fn lookup(&self, directory: Ino, name: &[u8]) -> Result<Attributes> {
        let reading = self.reading()?;
        let view = reading.view();
        let (ino, inode) = match find(view, self.name_key, directory, name)? {
            LookupTarget::Dots(ino) => (ino, inode::load(view, ino).map_err(stale_to_not_found)?),
            LookupTarget::Entry(target) => (target.ino, directory::load_target(view, directory, target)?),
        };
        Ok(Attributes::of_published(ino, &inode))
    }

    /// Returns the attributes.
    ///
    /// # Errors
    /// `Stale` also when there is no such inode.
    pub fn attributes(&self, ino: Ino) -> Result<Attributes> {
        inode::load(self.reading()?.view(), ino).map(|inode| Attributes::of_published(ino, &inode))
    }

    /// Returns the target of a symlink.
    ///
    /// # Errors
    /// `Invalid` for anything but a symlink.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        link_target(self.volume, self.reading()?.view(), ino)
    }

    /// See [`FileSystem::read_into`].
    pub fn read_into(&self, ino: Ino, offset: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize> {
        let reading = self.reading()?;
        let inode = inode::load_regular(reading.view(), ino)?;
        let end = offset.saturating_add(length as u64).min(inode.size).max(offset);
        let out = resize_buffer(buffer, (end - offset) as usize);
        read_published(self.volume, reading.view(), ino, &inode, &(offset..end), out, false)?;
        Ok(out.len())
    }

    /// See [`FileSystem::next_data`].
    pub fn next_data(&self, ino: Ino, offset: u64) -> Result<u64> {
        FileLayout::at(self.reading()?.view(), ino, offset, Vec::new())?.next_data(offset)?.ok_or(Error::NoSuchRange)
    }

    /// See [`FileSystem::next_hole`].
    pub fn next_hole(&self, ino: Ino, offset: u64) -> Result<u64> {
        FileLayout::at(self.reading()?.view(), ino, offset, Vec::new())?.next_hole(offset)
    }

    /// Returns the value of an extended attribute.
    ///
    /// # Errors
    /// `NoAttribute`, `Unsupported` for a namespace that is not stored.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        xattr::read(self.reading()?.view(), self.name_key, ino, name)
    }

    /// See [`FileSystem::list_xattrs_for`].
    pub fn list_xattrs_for(&self, ino: Ino, is_trusted: &dyn Fn() -> bool) -> Result<Vec<u8>> {
        xattr::list(self.reading()?.view(), ino, is_trusted)
    }

    /// See [`FileSystem::directory_bound`].
    pub fn directory_bound(&self, directory: Ino) -> Result<u64> {
        Ok(directory::load_directory(self.reading()?.view(), directory)?.next_sequence)
    }

    /// See [`FileSystem::list_directory`].
    pub fn list_directory(
        &self,
        directory: Ino,
        cookie: u64,
        bound: u64,
        with_attributes: bool,
        f: &mut dyn FnMut(&DirectoryEntry<'_>, Option<&Attributes>) -> ControlFlow<()>,
    ) -> Result<()> {
        let attributes = |ino: Ino, inode: &_| Ok(Attributes::of_published(ino, inode));
        let attributes: Option<&AttributeLoader<'_>> = if with_attributes { Some(&attributes) } else { None };
        list(self.reading()?.view(), directory, cookie, bound, attributes, f)
    }
}
