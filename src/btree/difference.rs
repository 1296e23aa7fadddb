//! Difference of two versions of a tree: walks both in parallel and skips shared nodes, so that its
//! cost is proportional to the difference.
//!
//! # Why a shared node need not be visited
//! A pointer names a page by address, generation and tag, and a node is used only if it decrypts
//! and verifies under exactly these (TREE-4 and the seal). Two parents with the same pointer
//! therefore name the same page and load the same bytes. These bytes name the node's children by
//! such pointers in turn, so by induction over the levels the whole subtree is the same. Stored
//! nodes are never changed: a change creates a new node, on a new page with a new tag, and new
//! parents up to the root (TREE-2). A page that was freed and reused has another generation or
//! another tag. So equal pointers imply equal content, and both versions contain everything that
//! the walk skips.
//!
//! # Why no shared node is opened
//! Both sides are walked by ascending keys. Of the two next nodes the one with the lower start is
//! opened; of two with the same start the higher one. A node can only be equal to a node of the
//! other tree with the same level and fences, and none is left there once the other side is past
//! its lower fence. So a node is opened only when no equal one can follow. Opened nodes lie on
//! paths to entries that differ, or next to splits and merges on these paths.
//!
//! # Why ranges of newer leaves contain all changes
//! [`Tree::changed_since`] compares with a version that can no longer be read, by generations
//! alone. Every node has a generation, which its parent's pointer repeats. A version with a record
//! of generation g consists of nodes of generation g or lower. No later transaction creates a node
//! of such a generation (TXN-4) or reuses one that a version dropped. So a node of generation g or
//! lower existed in that version, with the same fences and the same subtree (see the induction
//! above), and each key between its fences has the same value. Every later insert, removal or
//! change lies between the fences of newer leaves: a leaf that loses a key is rewritten, and so is
//! the neighbour that takes the range of an emptied leaf.

use std::cmp::Ordering;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::node::{Body, Bounds, Node};
use super::{Child, NodeStore, ScanVisitor, Tree, cursor};
use crate::error::Result;
use crate::format::{Generation, Key};

/// Callback for a key with different values, with the older and the newer value.
pub(crate) type DifferenceVisitor<'a> = dyn FnMut(Key, Option<&[u8]>, Option<&[u8]>) -> Result<ControlFlow<()>> + 'a;

/// Resumable walk over the differences of two tree versions.
pub(crate) struct DifferenceWalk<'t> {
    old: TreeWalk<'t>,
    new: TreeWalk<'t>,
}

impl Tree {
    /// Calls `f` with every key whose values differ between `older` and this tree, in ascending
    /// order until it breaks. Both are versions of one archive's tree, which `store` reads.
    pub(crate) fn differences(&self, older: &Tree, store: &NodeStore, f: &mut DifferenceVisitor<'_>) -> Result<()> {
        self.differences_since(Some(older)).resume(store, f)
    }

    /// Returns a resumable walk over the differences. Without an older tree every key of this one
    /// differs.
    pub(crate) fn differences_since<'t>(&'t self, older: Option<&'t Tree>) -> DifferenceWalk<'t> {
        DifferenceWalk {
            old: older.map_or(TreeWalk { root: None, open: Vec::new() }, TreeWalk::of),
            new: TreeWalk::of(self),
        }
    }
}

impl DifferenceWalk<'_> {
    /// Calls `f` with further differences until it breaks; the next call continues after that key.
    /// At the end it does not call `f`.
    pub(crate) fn resume(&mut self, store: &NodeStore, f: &mut DifferenceVisitor<'_>) -> Result<()> {
        let DifferenceWalk { old, new } = self;
        loop {
            let flow = match (old.next(), new.next()) {
                (None, None) => return Ok(()),
                (Some(one), None) => old.open_or_visit(store, one, &mut |key, value| f(key, Some(value), None))?,
                (None, Some(other)) => new.open_or_visit(store, other, &mut |key, value| f(key, None, Some(value)))?,
                (Some(WalkItem::Entry(leaf, position)), Some(WalkItem::Entry(other_leaf, other_position))) => {
                    let (key, value) = entry(&leaf, position);
                    let (other_key, other_value) = entry(&other_leaf, other_position);
                    let order = key.cmp(&other_key);
                    let flow = match order {
                        Ordering::Less => f(key, Some(value), None)?,
                        Ordering::Greater => f(other_key, None, Some(other_value))?,
                        Ordering::Equal if value != other_value => f(key, Some(value), Some(other_value))?,
                        Ordering::Equal => ControlFlow::Continue(()),
                    };
                    if order != Ordering::Greater {
                        old.advance();
                    }
                    if order != Ordering::Less {
                        new.advance();
                    }
                    flow
                }
                (Some(one), Some(other)) => {
                    // Entries sort below all node levels.
                    let first = one.lower().cmp(&other.lower()).then_with(|| other.height().cmp(&one.height()));
                    match first {
                        Ordering::Equal if one.is_shared_with(&other) => {
                            old.advance();
                            new.advance();
                            ControlFlow::Continue(())
                        }
                        Ordering::Equal => {
                            old.open(store, one)?;
                            new.open(store, other)?;
                            ControlFlow::Continue(())
                        }
                        Ordering::Less => old.open_or_visit(store, one, &mut |key, value| f(key, Some(value), None))?,
                        Ordering::Greater => {
                            new.open_or_visit(store, other, &mut |key, value| f(key, None, Some(value)))?
                        }
                    }
                }
            };
            if flow.is_break() {
                return Ok(());
            }
        }
    }
}

/// Next item of one side; everything before it was processed.
enum WalkItem {
    Below(Child, Bounds),
    /// Entry of a leaf, by position.
    Entry(Arc<Node>, usize),
}

impl WalkItem {
    fn lower(&self) -> Key {
        match self {
            WalkItem::Below(_, bounds) => bounds.lower,
            WalkItem::Entry(leaf, position) => entry(leaf, *position).0,
        }
    }

    fn height(&self) -> u8 {
        match self {
            WalkItem::Below(_, bounds) => bounds.level + 1,
            WalkItem::Entry(..) => 0,
        }
    }

    fn is_shared_with(&self, other: &WalkItem) -> bool {
        let (WalkItem::Below(one, bounds), WalkItem::Below(other, other_bounds)) = (self, other) else { return false };
        if (bounds.tree, bounds.level, bounds.upper) != (other_bounds.tree, other_bounds.level, other_bounds.upper) {
            return false;
        }
        match (one, other) {
            (Child::Resident(one), Child::Resident(other)) if Arc::ptr_eq(one, other) => true,
            (one, other) => one.pointer().is_some_and(|pointer| Some(pointer) == other.pointer()),
        }
    }
}

fn entry(leaf: &Node, position: usize) -> (Key, &[u8]) {
    match &leaf.body {
        Body::Leaf(leaf) => leaf.entry(position),
        Body::Internal(_) => unreachable!("an entry is an item of a leaf only"),
    }
}

/// Path from the root of one tree to the current position.
struct TreeWalk<'t> {
    /// Root, until it is passed.
    root: Option<(&'t Child, Bounds)>,
    /// Opened nodes with the position of the next item in each.
    open: Vec<(Arc<Node>, usize)>,
}

impl<'t> TreeWalk<'t> {
    fn of(tree: &'t Tree) -> TreeWalk<'t> {
        TreeWalk { root: tree.root(), open: Vec::new() }
    }

    fn next(&mut self) -> Option<WalkItem> {
        if let Some((root, bounds)) = self.root {
            return Some(WalkItem::Below(root.clone(), bounds));
        }
        loop {
            let (node, at) = self.open.last()?;
            match &node.body {
                Body::Leaf(leaf) if *at < leaf.len() => return Some(WalkItem::Entry(node.clone(), *at)),
                Body::Internal(children) if *at < children.len() => {
                    return Some(WalkItem::Below(children[*at].1.clone(), node.child_bounds(*at)));
                }
                _ => self.open.pop(),
            };
        }
    }

    fn advance(&mut self) {
        if self.root.take().is_none()
            && let Some((_, at)) = self.open.last_mut()
        {
            *at += 1;
        }
    }

    /// Replaces `item`, the next one, by its children or entries.
    fn open(&mut self, store: &NodeStore, item: WalkItem) -> Result<()> {
        let WalkItem::Below(child, bounds) = item else { return Ok(()) };
        let node = child.load(store, bounds)?;
        self.advance();
        self.open.push((node, 0));
        Ok(())
    }

    /// Opens the next item; an entry, which the other side lacks, is passed to `f` instead.
    fn open_or_visit(&mut self, store: &NodeStore, item: WalkItem, f: &mut ScanVisitor<'_>) -> Result<ControlFlow<()>> {
        let WalkItem::Entry(leaf, position) = &item else {
            return self.open(store, item).map(ControlFlow::Continue);
        };
        let (key, value) = entry(leaf, *position);
        let flow = f(key, value)?;
        self.advance();
        Ok(flow)
    }
}

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
        let Some((root, bounds)) = self.root() else { return f(Key::MIN, Key::MAX) };
        let mut walk = NewerWalk { store, since, open: None, f };
        walk.visit(root, bounds)?;
        walk.open.take().map_or(Ok(()), |(from, to)| (walk.f)(from, to))
    }
}

impl NewerWalk<'_, '_> {
    fn is_newer(&self, child: &Child) -> bool {
        child.pointer().is_none_or(|pointer| pointer.generation > self.since)
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
                self.store.prefetch(newer.take(cursor::MAX_PREFETCH));
                (0..children.len()).try_for_each(|slot| self.visit(&children[slot].1, node.child_bounds(slot)))
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
