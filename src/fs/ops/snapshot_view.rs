//! Reads what a snapshot shows, request by request, beside the live tree.
//!
//! Nothing that lies over the live tree is asked for: staged data, and what the log says, are known by inode number and belong to the files that have
//! those numbers now. What a snapshot shows was published and committed when it was taken.

use std::ops::ControlFlow;

use super::attributes::{Found, find, or_not_found};
use super::create::link_target;
use super::file_data::{read_published, room};
use super::listing::{Described, list, load_directory};
use super::seek::Layout;
use super::xattr;
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, DirectoryEntry, SnapshotId, directory, inode};
use crate::txn::{Reading, Volume};

/// One snapshot, read as [`super::FileSystem`] reads the live tree, with the same inode numbers. It is a number and pins nothing: each call looks the snapshot
/// up, and what it reads stays until it answers.
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

    /// As [`FileSystem::lookup`](crate::fs::FileSystem::lookup).
    ///
    /// # Errors
    /// As there.
    pub fn lookup(&self, directory: Ino, name: &[u8]) -> Result<Attributes> {
        let reading = self.reading()?;
        let view = reading.view();
        let (ino, inode) = match find(view, self.name_key, directory, name)? {
            Found::Dots(ino) => (ino, inode::load(view, ino).map_err(or_not_found)?),
            Found::Entry(target) => (target.ino, directory::follow(view, directory, target)?),
        };
        Ok(Attributes::of_published(ino, &inode))
    }

    /// # Errors
    /// `Stale` also when there is no such inode.
    pub fn attributes(&self, ino: Ino) -> Result<Attributes> {
        let reading = self.reading()?;
        inode::load(reading.view(), ino).map(|inode| Attributes::of_published(ino, &inode))
    }

    /// # Errors
    /// `Invalid` for anything but a symlink.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        let reading = self.reading()?;
        link_target(self.volume, reading.view(), ino)
    }

    /// As [`FileSystem::read_into`](crate::fs::FileSystem::read_into).
    ///
    /// # Errors
    /// As there.
    pub fn read_into(&self, ino: Ino, offset: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize> {
        let reading = self.reading()?;
        let inode = inode::load_regular(reading.view(), ino)?;
        let end = offset.saturating_add(length as u64).min(inode.size).max(offset);
        let out = room(buffer, (end - offset) as usize);
        read_published(self.volume, reading.view(), ino, &inode, &(offset..end), out, false)?;
        Ok(out.len())
    }

    /// As [`FileSystem::next_data`](crate::fs::FileSystem::next_data).
    ///
    /// # Errors
    /// As there.
    pub fn next_data(&self, ino: Ino, offset: u64) -> Result<u64> {
        let reading = self.reading()?;
        Layout::at(reading.view(), ino, offset, Vec::new())?.next_data(offset)?.ok_or(Error::NoSuchRange)
    }

    /// As [`FileSystem::next_hole`](crate::fs::FileSystem::next_hole).
    ///
    /// # Errors
    /// As there.
    pub fn next_hole(&self, ino: Ino, offset: u64) -> Result<u64> {
        let reading = self.reading()?;
        Layout::at(reading.view(), ino, offset, Vec::new())?.next_hole(offset)
    }

    /// # Errors
    /// `NoAttribute`, `Unsupported` for a namespace that is not kept.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let reading = self.reading()?;
        xattr::read(reading.view(), self.name_key, ino, name)
    }

    /// As [`FileSystem::list_xattrs_for`](crate::fs::FileSystem::list_xattrs_for).
    pub fn list_xattrs_for(&self, ino: Ino, is_trusted: &dyn Fn() -> bool) -> Result<Vec<u8>> {
        let reading = self.reading()?;
        xattr::list(reading.view(), ino, is_trusted)
    }

    /// As [`FileSystem::directory_bound`](crate::fs::FileSystem::directory_bound).
    pub fn directory_bound(&self, directory: Ino) -> Result<u64> {
        let reading = self.reading()?;
        Ok(load_directory(reading.view(), directory)?.next_sequence)
    }

    /// As [`FileSystem::list_directory`](crate::fs::FileSystem::list_directory).
    ///
    /// # Errors
    /// As there.
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
