//! Key ranges of a tree that changed since a version that can no longer be read.
//!
//! # Why nothing else can differ
//! Every node has a generation, which its parent's pointer repeats. A version with a record of
//! generation g consists of nodes of generation g or lower. No later transaction creates a node of
//! such a generation (TXN-4) or reuses one that a version dropped. So a node of generation g or
//! lower existed in that version, with the same fences and the same subtree (`difference.rs` has
//! the induction), and each key between its fences has the same value. Every later insert, removal
//! or change lies between the fences of newer leaves: a leaf that loses a key is rewritten, and so
//! is the neighbour that takes the range of an emptied leaf.

use super::node::{Body, Bounds};
use super::prefetch::MAX_PREFETCH;
use super::{Child, NodeStore, Tree, cursor};
use crate::error::Result;
use crate::format::{Generation, Key};

/// Callback for key ranges `[from, to)`, in ascending order, disjoint and not adjacent.
pub(crate) type RangeVisitor<'a> = dyn FnMut(Key, Key) -> Result<()> + 'a;

struct NewerWalk<'a, 'f> {
    store: &'a NodeStore,
    since: Generation,
    open: Option<(Key, Key)>,
    f: &'a mut RangeVisitor<'f>,
}

impl Tree {
    /// Calls `f` with the key ranges in which this version may differ from its ancestor of
    /// generation `since`. The end `Key::MAX` of a range is the end of the tree.
    pub(crate) fn changed_since(&self, store: &NodeStore, since: Generation, f: &mut RangeVisitor<'_>) -> Result<()> {
        let Some(root) = &self.root else { return f(Key::MIN, Key::MAX) };
        let mut walk = NewerWalk { store, since, open: None, f };
        walk.visit(root, Bounds::root(self.id as u8, self.level))?;
        walk.open.take().map_or(Ok(()), |(from, to)| (walk.f)(from, to))
    }
}

impl NewerWalk<'_, '_> {
    /// Returns whether the child is newer than `since`; unwritten nodes always are.
    fn is_newer(&self, child: &Child) -> bool {
        let stored = match child {
            Child::Stored(pointer) => Some(pointer.generation),
            Child::Resident(node) => node.stored.get().map(|pointer| pointer.generation),
        };
        stored.is_none_or(|generation| generation > self.since)
    }

    fn visit(&mut self, child: &Child, bounds: Bounds) -> Result<()> {
        if !self.is_newer(child) {
            return Ok(());
        }
        if bounds.level == 0 {
            return self.add_range(bounds.lower, bounds.upper);
        }
        cursor::with_node(self.store, child, bounds, |node| match &node.body {
            Body::Leaf(_) => self.add_range(node.lower, node.upper),
            Body::Internal(children) => {
                // Leaves are not read here; the caller reads them when it compares their entries.
                let newer = children.iter().map(|(_, child)| child).filter(|child| self.is_newer(child));
                self.store.prefetch(newer.take(MAX_PREFETCH));
                (0..children.len())
                    .try_for_each(|slot| self.visit(&children[slot].1, node.child_bounds(children, slot)))
            }
        })
    }

    fn add_range(&mut self, lower: Key, upper: Key) -> Result<()> {
        match &mut self.open {
            Some((_, to)) if *to == lower => *to = upper,
            open => {
                if let Some((from, to)) = open.replace((lower, upper)) {
                    (self.f)(from, to)?;
                }
            }
        }
        Ok(())
    }
}
