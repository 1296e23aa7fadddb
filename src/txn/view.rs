//! Read access to one version of the tree of files.

use crate::btree::{DifferenceVisitor, Finger, LostVisitor, NodeStore, RangeVisitor, ScanVisitor, Tree};
use crate::error::Result;
use crate::format::{Generation, Key};

/// Read access to one version of the live tree; the same for readers and inside an operation.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) tree: &'a Tree,
    pub(crate) store: &'a NodeStore,
    /// Belongs to this version of the tree.
    pub(crate) finger: Option<&'a Finger>,
}

impl View<'_> {
    pub(crate) fn get<R>(&self, key: Key, f: impl FnOnce(&[u8]) -> Result<R>) -> Result<Option<R>> {
        match self.finger {
            Some(finger) => self.tree.get_near(self.store, finger, key, f),
            None => self.tree.get(self.store, key, f),
        }
    }

    pub(crate) fn floor<R>(&self, key: Key, f: impl FnOnce(Key, &[u8]) -> Result<R>) -> Result<Option<R>> {
        match self.finger {
            Some(finger) => self.tree.floor_near(self.store, finger, key, f),
            None => self.tree.floor(self.store, key, f),
        }
    }

    pub(crate) fn scan(&self, from: Key, to: Key, f: &mut ScanVisitor<'_>) -> Result<()> {
        match self.finger {
            Some(finger) => self.tree.scan_near(self.store, finger, from, to, f),
            None => self.tree.scan(self.store, from, to, f),
        }
    }

    /// What differs from an older version of the same archive, without reading what both share: see [`Tree::differences`].
    pub(crate) fn differences(&self, older: &View<'_>, f: &mut DifferenceVisitor<'_>) -> Result<()> {
        self.tree.differences(older.tree, self.store, f)
    }

    /// The ranges of keys outside of which this is what the version of generation `since` was, from which it comes: see [`Tree::changed_since`].
    pub(crate) fn changed_since(&self, since: Generation, f: &mut RangeVisitor<'_>) -> Result<()> {
        self.tree.changed_since(self.store, since, f)
    }

    /// Every entry that can still be read; `lost` gets each node that cannot.
    pub(crate) fn scan_surviving(
        &self,
        f: &mut dyn FnMut(Key, &[u8]) -> Result<()>,
        lost: &mut LostVisitor<'_>,
    ) -> Result<()> {
        self.tree.scan_surviving(self.store, f, lost)
    }
}
