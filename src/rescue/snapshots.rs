//! Which snapshots are left, and what their roots lead to.
//!
//! # Invariants
//! KEPT-1  What a snapshot shows is what its root leads to: each node opens with the tag that its parent names, at the level and with the fences that its
//!     place has. Nothing that is found in another way is put in the place of what is lost, since nothing else tells what a snapshot shows from what was
//!     deleted before or after. So its leaves are of one moment, and what they say is proved.
//! KEPT-2  Which snapshots there are is proved by the newest commit record, when nothing is left of a later commit (RESCUE-3). Else the newest root of their tree
//!     that opens says it: one of them may have been removed since, and what it showed deleted, and others may have been taken.
//!
//! For the live tree, leaves that only a snapshot still shows are like all leaves of before: RESCUE-1 to 3 say when they count, and that it is told.

use std::collections::HashMap;

use super::scan::{as_damage, open_found};
use super::{KeptSnapshot, RescueState};
use crate::error::{Error, Result};
use crate::format::node::{self, NodeEntries};
use crate::format::page::PageKind;
use crate::format::record::{CommitRecord, Root};
use crate::format::values::SnapshotValue;
use crate::format::{Generation, Key, Pointer, Run, Tag, TreeId, kind};
use crate::frame::OpenedPage;
use crate::pager::Pager;

/// Where a node is named, and what it must be there.
struct Place {
    pointer: Pointer,
    tree: TreeId,
    level: u8,
    lower: Key,
    upper: Key,
}

impl Place {
    fn of_root(tree: TreeId, root: &Root) -> Place {
        Place { pointer: root.pointer, tree, level: root.level, lower: Key::MIN, upper: Key::MAX }
    }

    /// `Damaged` when it does not open, or is another node.
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

    fn children(&self, children: &[(Key, Pointer)]) -> Vec<Place> {
        let upper = |number: usize| children.get(number + 1).map_or(self.upper, |(next, _)| *next);
        let place = |(number, (lower, pointer)): (usize, &(Key, Pointer))| Place {
            pointer: *pointer,
            tree: self.tree,
            // A node that has children is above level 0: its decoder says so.
            level: self.level.saturating_sub(1),
            lower: *lower,
            upper: upper(number),
        };
        children.iter().enumerate().map(place).collect()
    }
}

/// A leaf that is left: where it is, its fences, its records.
pub(super) type Leaf<'a> = dyn FnMut(Pointer, (Key, Key), &[(Key, &[u8])]) -> Result<()> + 'a;

/// Hands over every leaf that the root leads to and that is left; answers why the first of the others is not (KEPT-1).
pub(super) fn leaves(pager: &Pager, tree: TreeId, root: &Root, f: &mut Leaf<'_>) -> Result<Option<String>> {
    let mut lost = None;
    let mut places = vec![Place::of_root(tree, root)];
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

/// What a scan meets of the tree of snapshots.
#[derive(Default)]
pub(super) struct FoundRoots {
    /// With the generations of their pages.
    roots: Vec<(Generation, Root)>,
    any: bool,
}

impl FoundRoots {
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

/// The snapshots that are known.
#[derive(Default)]
pub(super) struct Kept {
    /// By ascending id.
    pub(super) all: Vec<(u64, SnapshotValue)>,
    /// KEPT-2.
    pub(super) proved: bool,
    /// Why there may be others.
    pub(super) lost: Option<String>,
}

impl Kept {
    /// `newest` is that of RESCUE-3.
    pub(super) fn read(
        pager: &Pager,
        found: FoundRoots,
        records: &[(CommitRecord, Tag)],
        newest: Generation,
    ) -> Result<Kept> {
        let recorded = records.iter().map(|(record, _)| (record.generation, record.roots[TreeId::Snapshots], true));
        let scanned = found.roots.into_iter().map(|(generation, root)| (generation, root, false));
        let mut candidates: Vec<(Generation, Root, bool)> = recorded.chain(scanned).collect();
        // What a record says comes before a node of its generation.
        candidates.sort_by_key(|(generation, _, of_record)| std::cmp::Reverse((*generation, *of_record)));
        let mut kept = Kept::default();
        for (number, (generation, root, of_record)) in candidates.iter().enumerate() {
            kept.proved = number == 0 && *of_record && *generation == newest;
            if root.pointer.is_null() {
                return Ok(kept);
            }
            let mut opened = false;
            let lost = leaves(pager, TreeId::Snapshots, root, &mut |_, _, values| {
                opened = true;
                kept.take(values);
                Ok(())
            })?;
            kept.lost = kept.lost.or(lost);
            if opened {
                return Ok(kept);
            }
        }
        if found.any && kept.lost.is_none() {
            kept.lost = Some("no root of the tree of snapshots is left".into());
        }
        Ok(kept)
    }

    fn take(&mut self, values: &[(Key, &[u8])]) {
        for (key, value) in values {
            // Strays are passed by, and what is being removed must not be read (specification 6.2 and 8).
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

    /// The newest of this name.
    pub(super) fn named(&self, name: &[u8]) -> Option<&(u64, SnapshotValue)> {
        self.all.iter().rev().find(|(_, snapshot)| snapshot.name == name)
    }

    /// What is left of each one's tree. What several of them share is read once: about 60 bytes for each node.
    pub(super) fn judge(&self, pager: &Pager) -> Result<Vec<KeptSnapshot>> {
        let mut judge = Judge { pager, known: HashMap::new() };
        self.all.iter().map(|(id, snapshot)| judge.snapshot(*id, snapshot)).collect()
    }
}

/// Finds out which nodes are left with all that is below them.
struct Judge<'a> {
    pager: &'a Pager,
    known: HashMap<Pointer, bool>,
}

impl Judge<'_> {
    fn snapshot(&mut self, id: u64, snapshot: &SnapshotValue) -> Result<KeptSnapshot> {
        let root = Place::of_root(TreeId::Live, &snapshot.root);
        let (state, reason) = match root.open(self.pager) {
            Err(Error::Damaged(reason)) => (RescueState::Lost, reason),
            Ok(_) if self.is_whole(&root)? => (RescueState::Whole, String::new()),
            Ok(_) => (RescueState::Partial, "not all of its index is left".into()),
            Err(error) => return Err(error),
        };
        let SnapshotValue { generation, time, name, .. } = snapshot.clone();
        Ok(KeptSnapshot { id, name, time, generation, state, reason })
    }

    /// As deep as the tree: a node that opens is one level below the one that names it.
    fn is_whole(&mut self, place: &Place) -> Result<bool> {
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
