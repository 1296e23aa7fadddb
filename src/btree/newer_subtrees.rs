//! The parts of a tree that are newer than a version that cannot be read any more.
//!
//! # Why nothing else can differ
//! Every node names its generation, which its parent's pointer repeats. A version whose record has generation g consists of nodes of g and before, and no
//! transaction after it makes a node of such a number again (TXN-4) or takes up one again that a version gave up. So a node of g or before was there
//! in that version, with its fences and all below it (`difference.rs` has the induction), and each key between its fences has the value that it had. What came,
//! went or changed since lies between the fences of newer leaves: a leaf that loses a key is made anew, and so is the neighbour that takes the range of one that is emptied.

use super::node::{Body, Bounds};
use super::prefetch::MAX_PREFETCH;
use super::{Child, NodeStore, Tree, cursor};
use crate::error::Result;
use crate::format::{Generation, Key};

/// Gets ranges of keys `[from, to)`, ascending and not touching each other.
pub(crate) type RangeVisitor<'a> = dyn FnMut(Key, Key) -> Result<()> + 'a;

struct NewerWalk<'a, 'f> {
    store: &'a NodeStore,
    since: Generation,
    open: Option<(Key, Key)>,
    f: &'a mut RangeVisitor<'f>,
}

impl Tree {
    /// Calls `f` with the ranges of keys outside of which this version equals the one of generation `since`, from which it comes. A range's end of
    /// `Key::MAX` is the end of the tree.
    pub(crate) fn changed_since(&self, store: &NodeStore, since: Generation, f: &mut RangeVisitor<'_>) -> Result<()> {
        let Some(root) = &self.root else { return f(Key::MIN, Key::MAX) };
        let mut walk = NewerWalk { store, since, open: None, f };
        walk.visit(root, Bounds::root(self.id as u8, self.level))?;
        walk.open.take().map_or(Ok(()), |(from, to)| (walk.f)(from, to))
    }
}

impl NewerWalk<'_, '_> {
    /// What no commit has written is newer than all.
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
                // Leaves among them are not read here, but by whoever compares what is in them.
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
