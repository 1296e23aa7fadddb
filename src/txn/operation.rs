//! One change of the archive, atomic: works on its own copy of the trees, published whole or dropped.

use super::View;
use crate::error::Result;
use crate::format::{Generation, Ino, Key, Pointer};

/// The working copy of an operation; see [`super::Volume::operate`].
pub(crate) struct Operation<'v> {
    _volume: &'v super::Volume,
}

impl Operation<'_> {
    /// The live tree as changed so far.
    pub(crate) fn view(&self) -> View<'_> {
        todo!()
    }

    /// The open transaction: `born` of every new extent.
    pub(crate) fn generation(&self) -> Generation {
        todo!()
    }

    /// Inserts or replaces a record of the live tree; answers whether it was there.
    pub(crate) fn insert(&mut self, key: Key, value: &[u8]) -> Result<bool> {
        let _ = (key, value);
        todo!()
    }

    pub(crate) fn remove(&mut self, key: Key) -> Result<bool> {
        let _ = key;
        todo!()
    }

    /// A number never used before; counts the inode as in use.
    pub(crate) fn allocate_ino(&mut self) -> Result<Ino> {
        todo!()
    }

    /// The inode's last record is gone.
    pub(crate) fn inode_gone(&mut self) {
        todo!()
    }

    /// A page just written by `Volume::write_data` or `write_packed` is now named by `extents` (>= 1) extents.
    pub(crate) fn adopt(&mut self, page: &Pointer, extents: u32) -> Result<()> {
        let _ = (page, extents);
        todo!()
    }

    /// `more` further extents name the page (clone, split). Call before the `release` of what they replace.
    pub(crate) fn share(&mut self, page: &Pointer, more: u32) -> Result<()> {
        let _ = (page, more);
        todo!()
    }

    /// An extent that named the page, born in `born`, left the live tree.
    pub(crate) fn release(&mut self, page: &Pointer, born: Generation) -> Result<()> {
        let _ = (page, born);
        todo!()
    }
}
