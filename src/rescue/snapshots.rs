//! Surviving snapshots, and the leaves reachable from their roots.
//!
//! # Invariants
//! KEPT-1  The content of a snapshot is exactly what is reachable from its root: each node opens
//!     with the tag in its parent, at the level and with the fences of its position. Lost nodes are
//!     not substituted with nodes found otherwise, since nothing else distinguishes the content of
//!     a snapshot from data deleted before or after. Its leaves are therefore of one version, and
//!     their records are proved.
//! KEPT-2  The list of snapshots is proved by the newest commit record, if no later commit left a
//!     trace (RESCUE-3). Otherwise the newest root of their tree that opens is used: since then a
//!     snapshot may have been removed and its data deleted, and others may have been created.
//!
//! For the live tree, leaves that are reachable only from a snapshot are treated like all older
//! leaves: RESCUE-1 to 3 decide when they are used, and that this is reported.

use std::collections::HashMap;

use super::scan::{as_damage, open_found};
use super::{RescueState, SnapshotCondition};
use crate::error::{Error, Result};
use crate::format::node::{self, NodeEntries};
use crate::format::page::PageKind;
use crate::format::record::{CommitRecord, Root};
use crate::format::values::SnapshotValue;
use crate::format::{Generation, Key, Pointer, Run, Tag, TreeId, kind};
use crate::frame::OpenedPage;
use crate::pager::Pager;

/// Reference to a node, with the expected properties.
struct NodeReference {
    pointer: Pointer,
    tree: TreeId,
    level: u8,
    lower: Key,
    upper: Key,
}

impl NodeReference {
    fn of_root(tree: TreeId, root: &Root) -> NodeReference {
        NodeReference { pointer: root.pointer, tree, level: root.level, lower: Key::MIN, upper: Key::MAX }
    }

    /// Reads the node; `Damaged` if it does not open or does not match.
    fn open(&self, pager: &Pager) -> Result<Vec<u8>> {
        if self.pointer.is_null() {
            return Err(Error::damaged("it has no tree"));
        }
        let page = pager.read_page(&self.pointer, PageKind::Node).map_err(as_damage);
        let body = page.map(OpenedPage::into_body)?;
        let head = node::decode(&body)?.head;
        if (head.tree, head.level, head.lower, head.upper) != (self.tree as u8, self.level, self.lower, self.upper) {
            return Err(Error::damaged(format!(
                "another node is where it should be: block={}",
                self.pointer.run.address
            )));
        }
        Ok(body)
    }

    fn children(&self, children: &[(Key, Pointer)]) -> Vec<NodeReference> {
        let upper = |number: usize| children.get(number + 1).map_or(self.upper, |(next, _)| *next);
        let place = |(number, (lower, pointer)): (usize, &(Key, Pointer))| NodeReference {
            pointer: *pointer,
            tree: self.tree,
            // A node with children is above level 0: its decoder checks that.
            level: self.level.saturating_sub(1),
            lower: *lower,
            upper: upper(number),
        };
        children.iter().enumerate().map(place).collect()
    }
}

/// Callback for a surviving leaf: pointer, fences, records.
pub(super) type LeafVisitor<'a> = dyn FnMut(Pointer, (Key, Key), &[(Key, &[u8])]) -> Result<()> + 'a;

/// Calls `f` with every surviving leaf below the root; returns the reason for the first missing one
/// (KEPT-1).
pub(super) fn leaves(pager: &Pager, tree: TreeId, root: &Root, f: &mut LeafVisitor<'_>) -> Result<Option<String>> {
    let mut lost = None;
    let mut places = vec![NodeReference::of_root(tree, root)];
    while let Some(place) = places.pop() {
        let body = match place.open(pager) {
            Err(Error::Damaged(reason)) => {
                lost.get_or_insert(reason);
                continue;
            }
            opened => opened?,
        };
        match node::decode(&body)?.entries {
            NodeEntries::Leaf(records) => f(place.pointer, (place.lower, place.upper), &records)?,
            NodeEntries::Internal(children) => places.extend(place.children(&children).into_iter().rev()),
        }
    }
    Ok(lost)
}

#[derive(Default)]
pub(super) struct SnapshotRoots {
    /// Possible roots, with the generations of their pages.
    roots: Vec<(Generation, Root)>,
    any: bool,
}

impl SnapshotRoots {
    pub(super) fn page(&mut self, pager: &Pager, run: Run) -> Result<()> {
        self.any = true;
        let (pointer, opened) = match open_found(pager, run) {
            Err(Error::Damaged(_) | Error::Io { .. }) => return Ok(()),
            found => found?,
        };
        if let Ok(head) = node::decode(opened.body()).map(|view| view.head)
            && head.tree == TreeId::Snapshots as u8
            && (head.lower, head.upper) == (Key::MIN, Key::MAX)
        {
            self.roots.push((pointer.generation, Root { pointer, level: head.level }));
        }
        Ok(())
    }
}

#[derive(Default)]
pub(super) struct KnownSnapshots {
    /// Sorted by id.
    pub(super) all: Vec<(u64, SnapshotValue)>,
    /// KEPT-2.
    pub(super) proved: bool,
    /// Reason for which there may be others.
    pub(super) lost: Option<String>,
}

impl KnownSnapshots {
    /// Reads the snapshots; `newest` is N of RESCUE-3.
    pub(super) fn read(
        pager: &Pager,
        found: SnapshotRoots,
        records: &[(CommitRecord, Tag)],
        newest: Generation,
    ) -> Result<KnownSnapshots> {
        let recorded = records.iter().map(|(record, _)| (record.generation, record.roots[TreeId::Snapshots], true));
        let scanned = found.roots.into_iter().map(|(generation, root)| (generation, root, false));
        let mut candidates: Vec<(Generation, Root, bool)> = recorded.chain(scanned).collect();
        // A record takes precedence over a node of its generation.
        candidates.sort_by_key(|(generation, _, of_record)| std::cmp::Reverse((*generation, *of_record)));
        let mut known = KnownSnapshots::default();
        for (number, (generation, root, of_record)) in candidates.iter().enumerate() {
            known.proved = number == 0 && *of_record && *generation == newest;
            if root.pointer.is_null() {
                return Ok(known);
            }
            let mut opened = false;
            let lost = leaves(pager, TreeId::Snapshots, root, &mut |_, _, values| {
                opened = true;
                known.take(values);
                Ok(())
            })?;
            known.lost = known.lost.or(lost);
            if opened {
                return Ok(known);
            }
        }
        if found.any && known.lost.is_none() {
            known.lost = Some("no root of the tree of snapshots is left".into());
        }
        Ok(known)
    }

    fn take(&mut self, values: &[(Key, &[u8])]) {
        for (key, value) in values {
            // Stray records are skipped, and removed snapshots must not be read (specification 6.2
            // and 8).
            if key.kind != kind::SNAPSHOT || key.sub != 0 {
                continue;
            }
            match SnapshotValue::decode(value) {
                Ok(snapshot) if snapshot.name.is_empty() => {}
                Ok(snapshot) => self.all.push((key.object, snapshot)),
                Err(error) => drop(self.lost.get_or_insert(error.to_string())),
            }
        }
    }

    pub(super) fn named(&self, name: &[u8]) -> Option<&(u64, SnapshotValue)> {
        self.all.iter().rev().find(|(_, snapshot)| snapshot.name == name)
    }

    /// Checks the tree of each snapshot. Shared nodes are read once: about 60 bytes of memory for
    /// each node.
    pub(super) fn check_all(&self, pager: &Pager) -> Result<Vec<SnapshotCondition>> {
        let mut check_all = ReachabilityCheck { pager, known: HashMap::new() };
        self.all.iter().map(|(id, snapshot)| check_all.snapshot(*id, snapshot)).collect()
    }
}

/// Cache of the reachability check: nodes with the result for all of their descendants.
struct ReachabilityCheck<'a> {
    pager: &'a Pager,
    known: HashMap<Pointer, bool>,
}

impl ReachabilityCheck<'_> {
    fn snapshot(&mut self, id: u64, snapshot: &SnapshotValue) -> Result<SnapshotCondition> {
        let root = NodeReference::of_root(TreeId::Live, &snapshot.root);
        let (state, reason) = match root.open(self.pager) {
            Err(Error::Damaged(reason)) => (RescueState::Lost, reason),
            Ok(_) if self.is_whole(&root)? => (RescueState::Whole, String::new()),
            Ok(_) => (RescueState::Partial, "not all of its index is left".into()),
            Err(error) => return Err(error),
        };
        let SnapshotValue { generation, time, name, .. } = snapshot.clone();
        Ok(SnapshotCondition { id, name, time, generation, state, reason })
    }

    /// Recursion is bounded by the tree's height: a node that opens is one level below its parent.
    fn is_whole(&mut self, place: &NodeReference) -> Result<bool> {
        if let Some(whole) = self.known.get(&place.pointer) {
            return Ok(*whole);
        }
        let mut whole = true;
        match place.open(self.pager) {
            Err(Error::Damaged(_)) => whole = false,
            opened => {
                if let NodeEntries::Internal(children) = node::decode(&opened?)?.entries {
                    for child in place.children(&children) {
                        whole &= self.is_whole(&child)?;
                    }
                }
            }
        }
        self.known.insert(place.pointer, whole);
        Ok(whole)
    }
}
