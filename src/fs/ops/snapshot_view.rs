//! Reads a snapshot, request by request, concurrently with the live tree.
//!
//! Dirty data and log entries over the live tree are not used: they are keyed by inode number and
//! belong to the files that have those numbers now. The content of a snapshot was published and
//! committed when it was taken.

use std::ops::ControlFlow;

use super::attributes::{LookupTarget, find, stale_to_not_found};
use super::create::link_target;
use super::file_data::{read_published, resize_buffer};
use super::listing::{Described, list, load_directory};
use super::seek::FileLayout;
use super::xattr;
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, DirectoryEntry, SnapshotId, directory, inode};
use crate::txn::{Reading, Volume};

/// One snapshot, read like the live tree by [`super::FileSystem`], with the same inode numbers. It
/// is only an id and pins nothing: each call looks the snapshot up, and pins the pages that it
/// reads until it returns.
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
    pub(super) fn new(volume: &'a Volume, name_key: &'a [u8; 16], id: SnapshotId) -> SnapshotView<'a> {
        SnapshotView { volume, name_key, id }
    }

    pub fn id(&self) -> SnapshotId {
        self.id
    }

    fn reading(&self) -> Result<Reading<'a>> {
        Reading::of_snapshot(self.volume, self.id.0)
    }

    /// See [`FileSystem::lookup`](crate::fs::FileSystem::lookup).
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
        let reading = self.reading()?;
        inode::load(reading.view(), ino).map(|inode| Attributes::of_published(ino, &inode))
    }

    /// Returns the target of a symlink.
    ///
    /// # Errors
    /// `Invalid` for anything but a symlink.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        let reading = self.reading()?;
        link_target(self.volume, reading.view(), ino)
    }

    /// See [`FileSystem::read_into`](crate::fs::FileSystem::read_into).
    pub fn read_into(&self, ino: Ino, offset: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize> {
        let reading = self.reading()?;
        let inode = inode::load_regular(reading.view(), ino)?;
        let end = offset.saturating_add(length as u64).min(inode.size).max(offset);
        let out = resize_buffer(buffer, (end - offset) as usize);
        read_published(self.volume, reading.view(), ino, &inode, &(offset..end), out, false)?;
        Ok(out.len())
    }

    /// See [`FileSystem::next_data`](crate::fs::FileSystem::next_data).
    pub fn next_data(&self, ino: Ino, offset: u64) -> Result<u64> {
        let reading = self.reading()?;
        FileLayout::at(reading.view(), ino, offset, Vec::new())?.next_data(offset)?.ok_or(Error::NoSuchRange)
    }

    /// See [`FileSystem::next_hole`](crate::fs::FileSystem::next_hole).
    pub fn next_hole(&self, ino: Ino, offset: u64) -> Result<u64> {
        let reading = self.reading()?;
        FileLayout::at(reading.view(), ino, offset, Vec::new())?.next_hole(offset)
    }

    /// Returns the value of an extended attribute.
    ///
    /// # Errors
    /// `NoAttribute`, `Unsupported` for a namespace that is not stored.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let reading = self.reading()?;
        xattr::read(reading.view(), self.name_key, ino, name)
    }

    /// See [`FileSystem::list_xattrs_for`](crate::fs::FileSystem::list_xattrs_for).
    pub fn list_xattrs_for(&self, ino: Ino, is_trusted: &dyn Fn() -> bool) -> Result<Vec<u8>> {
        let reading = self.reading()?;
        xattr::list(reading.view(), ino, is_trusted)
    }

    /// See [`FileSystem::directory_bound`](crate::fs::FileSystem::directory_bound).
    pub fn directory_bound(&self, directory: Ino) -> Result<u64> {
        let reading = self.reading()?;
        Ok(load_directory(reading.view(), directory)?.next_sequence)
    }

    /// See [`FileSystem::list_directory`](crate::fs::FileSystem::list_directory).
    pub fn list_directory(
        &self,
        directory: Ino,
        cookie: u64,
        bound: u64,
        with_attributes: bool,
        f: &mut dyn FnMut(&DirectoryEntry<'_>, Option<&Attributes>) -> ControlFlow<()>,
    ) -> Result<()> {
        let reading = self.reading()?;
        let attributes = |ino: Ino, inode: &_| Ok(Attributes::of_published(ino, inode));
        let attributes: Option<&Described<'_>> = if with_attributes { Some(&attributes) } else { None };
        list(reading.view(), directory, cookie, bound, attributes, f)
    }
}
