//! Read access to one version of the tree of files.

use std::ops::ControlFlow;

use crate::btree::{
    DifferenceVisitor, DifferenceWalk, Finger, LostVisitor, NodeStore, RangeVisitor, ScanVisitor, Tree,
};
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

impl<'a> View<'a> {
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

    /// See [`Tree::fences_before`].
    pub(crate) fn fences_before(&self, key: Key, f: &mut dyn FnMut(Key) -> ControlFlow<()>) -> Result<()> {
        self.tree.fences_before(self.store, key, f)
    }

    /// Visits the differences from an older version of the same archive, without reading shared
    /// nodes: see [`Tree::differences`].
    pub(crate) fn differences(&self, older: &View<'_>, f: &mut DifferenceVisitor<'_>) -> Result<()> {
        self.tree.differences(older.tree, self.store, f)
    }

    /// Visits the key ranges that may differ from the ancestor of generation `since`: see
    /// [`Tree::changed_since`].
    pub(crate) fn changed_since(&self, since: Generation, f: &mut RangeVisitor<'_>) -> Result<()> {
        self.tree.changed_since(self.store, since, f)
    }

    /// Requests the nodes of these ranges together, if the archive is remote: see
    /// [`Tree::prefetch`].
    pub(crate) fn prefetch(&self, ranges: &[(Key, Key)]) -> Result<()> {
        self.tree.prefetch(self.store, ranges)
    }

    /// Returns the differences as a cursor; without an older version, every record of this one.
    pub(crate) fn differences_since(&self, older: Option<&View<'a>>) -> DifferenceCursor<'a> {
        DifferenceCursor { walk: self.tree.differences_since(older.map(|older| older.tree)), store: self.store }
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

/// A record that differs between two versions, with both values.
#[derive(Debug)]
pub(crate) struct Difference {
    pub(crate) key: Key,
    pub(crate) old: Option<Vec<u8>>,
    pub(crate) new: Option<Vec<u8>>,
}

/// Cursor over the differences of two versions, by ascending key.
pub(crate) struct DifferenceCursor<'a> {
    walk: DifferenceWalk<'a>,
    store: &'a NodeStore,
}

impl DifferenceCursor<'_> {
    /// Up to `most` further records; fewer only at the end.
    pub(crate) fn batch(&mut self, most: usize) -> Result<Vec<Difference>> {
        let mut batch = Vec::new();
        self.walk.resume(self.store, &mut |key, old, new| {
            batch.push(Difference { key, old: old.map(<[u8]>::to_vec), new: new.map(<[u8]>::to_vec) });
            Ok(if batch.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        Ok(batch)
    }
}
