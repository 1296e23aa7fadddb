//! Index of surviving leaves of the live tree, with the generations in which each is known to have
//! been reachable.
//!
//! # Invariants
//! RESCUE-1  A node is reachable from the generation of its page until it is replaced, and never
//!     again. It is therefore known to be reachable from that generation to the latest one of an
//!     authentic node (or record) that references it, by tag, at a position with the same fences.
//! RESCUE-2  Leaves with known lifetimes that share a generation g were in the tree together at g.
//!     Only such leaves are read together.
//! RESCUE-3  Let N be the newest generation of any surviving node or record, or that an entry of
//!     the log extends. Records in leaves known to be reachable at N are the newest known;
//!     everything else may have had a newer version that was destroyed, with or without a trace.
//!     The tree of N is therefore complete if and only if such leaves cover all keys. Of commits
//!     after N only data can survive, or a ring slot that proves that there was none.
//!
//! Memory: about 130 bytes for each node page of any age (one for some 50 files), 60 for each inode
//! number, and for each page of an inode that no leaf describes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use lockbox_terminal::display;

use super::LaterCommits;
use super::scan::{
    KnownSnapshots, LogOverlay, SnapshotRoots, SurvivingLog, as_damage, find_page, ignoring_damage, scan, visit_leaves,
};
use crate::error::{Error, Refusal, Result};
use crate::format::node::{self, NodeEntries, NodeView};
use crate::format::page::{PackedItem, PageKind, Prologue};
use crate::format::record::CommitRecord;
use crate::format::{BLOCK, Generation, Ino, Key, Pointer, RING_SLOTS, Run, Tag, TreeId, slot_block};
use crate::frame::OpenedPage;
use crate::pager::{Pager, ShardedCache};

/// Size of the leaf cache, in bytes.
const KEPT: usize = 4 << 20;

struct SurvivingNode {
    pointer: Pointer,
    level: u8,
    lower: Key,
    upper: Key,
    /// RESCUE-1: the last generation in which the node is known to be reachable.
    last: Generation,
}

/// Leaves that were reachable together, sorted by key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LeafSet {
    pub(super) generation: Generation,
    pub(super) leaves: Vec<u32>,
    /// The log is applied over the leaves (LAID-2).
    pub(super) logged: bool,
}

impl LeafSet {
    /// Returns the number of parts in which the records are read, in key order.
    pub(super) fn parts(&self) -> usize {
        self.leaves.len().max(usize::from(self.logged))
    }
}

/// Data pages of an inode, from their own headers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OrphanPages {
    pub(super) count: u64,
    pub(super) bytes: u64,
    /// Lowest and highest generation of the pages.
    first: Generation,
    pub(super) last: Generation,
}

impl OrphanPages {
    fn add(&mut self, generation: Generation, bytes: u32) {
        self.first = if self.count == 0 { generation } else { self.first.min(generation) };
        self.last = self.last.max(generation);
        self.count += 1;
        self.bytes += u64::from(bytes);
    }

    /// Returns the last generation in which a page was committed. A page that is newer than every
    /// commit may never have been part of one.
    fn last_until(&self, newest: Generation) -> Generation {
        [self.last, self.first].into_iter().find(|generation| *generation <= newest).unwrap_or_default()
    }
}

/// Part of a page, with file and offset from the page's own header.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataPiece {
    pub(super) page: Pointer,
    pub(super) offset: u64,
    /// Offset in the page.
    pub(super) start: u32,
    pub(super) length: u32,
}

/// All leaves of the live tree by lower fence, and the other results of the scan.
pub(super) struct LeafIndex {
    pager: Arc<Pager>,
    leaves: Vec<SurvivingNode>,
    /// Binary tree over `leaves` for overlap queries: maximum upper fence below each of its nodes.
    greatest: Vec<Key>,
    cache: ShardedCache<u32, Arc<Vec<u8>>>,
    /// All inodes with a record in a leaf, ascending.
    pub(super) inodes: Vec<u64>,
    /// Data pages of inodes without a record in any leaf.
    pub(super) data: HashMap<u64, OrphanPages>,
    pub(super) pages: u64,
    pub(super) unreadable: u64,
    /// RESCUE-3: N.
    pub(super) newest: Generation,
    pub(super) later: LaterCommits,
    pub(super) log: LogOverlay,
    pub(super) known_snapshots: KnownSnapshots,
}

#[derive(Default)]
struct ScanCollector {
    nodes: Vec<SurvivingNode>,
    inodes: HashSet<u64>,
    data: HashMap<u64, OrphanPages>,
    pages: u64,
    /// Highest generation of all data pages.
    youngest: Generation,
    known_snapshots: SnapshotRoots,
}

impl ScanCollector {
    fn page(&mut self, pager: &Pager, run: Run, prologue: &Prologue) -> Result<()> {
        self.pages += 1;
        if matches!(prologue.kind, PageKind::Data | PageKind::Packed) {
            self.youngest = self.youngest.max(prologue.generation);
        }
        match prologue.kind {
            PageKind::Data => {
                self.data.entry(prologue.owner).or_default().add(prologue.generation, prologue.plain_length);
            }
            PageKind::Packed => {
                for (ino, piece) in pieces_of(pager, run, prologue)? {
                    self.data.entry(ino).or_default().add(prologue.generation, piece.length);
                }
            }
            PageKind::Node if prologue.owner == TreeId::Live as u64 => {
                if let Some((pointer, opened)) = find_page(pager, run)? {
                    self.node(pointer, opened.body())?;
                }
            }
            PageKind::Node if prologue.owner == TreeId::Snapshots as u64 => self.known_snapshots.page(pager, run)?,
            PageKind::Node | PageKind::DeltaList => {}
        }
        Ok(())
    }

    fn node(&mut self, pointer: Pointer, body: &[u8]) -> Result<()> {
        let decoded = ignoring_damage(node::decode(body))?;
        let Some(view) = decoded.filter(|view| view.head.tree == TreeId::Live as u8) else { return Ok(()) };
        if let NodeEntries::Leaf(entries) = &view.entries {
            self.inodes.extend(entries.iter().map(|(key, _)| key.object).filter(|object| *object != 0));
        }
        let (level, lower, upper) = (view.head.level, view.head.lower, view.head.upper);
        self.nodes.push(SurvivingNode { pointer, level, lower, upper, last: pointer.generation });
        Ok(())
    }
}

impl LeafIndex {
    pub(super) fn build(
        pager: Arc<Pager>,
        log: SurvivingLog,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<LeafIndex> {
        let mut found = ScanCollector::default();
        let unreadable =
            scan(&**pager.storage(), pager.cipher(), progress, &mut |run, prologue| found.page(&pager, run, prologue))?;
        let mut nodes = found.nodes;
        let records = surviving_records(&pager);
        learn_lifetimes(&pager, &records, &mut nodes);
        let shown = nodes.iter().map(|node| node.last).chain(records.iter().map(|(record, _)| record.generation));
        let newest = shown.chain([log.newest]).max().unwrap_or_default();
        let log = log.into_overlay(&records);
        found.inodes.extend(log.inodes());
        let later = later_commits(&records, newest, found.youngest);
        nodes.retain(|node| node.level == 0);
        found.data.retain(|ino, _| !found.inodes.contains(ino));
        let known_snapshots = KnownSnapshots::read(&pager, found.known_snapshots, &records, newest)?;
        let mut index = LeafIndex {
            pager,
            leaves: Vec::new(),
            greatest: Vec::new(),
            cache: ShardedCache::new(KEPT),
            inodes: Vec::new(),
            data: found.data,
            pages: found.pages,
            unreadable,
            newest,
            later,
            log,
            known_snapshots,
        };
        index.arrange(nodes, found.inodes);
        Ok(index)
    }

    /// Returns the index of a snapshot: exactly the leaves reachable from its root (KEPT-1),
    /// without data pages that no leaf describes, and without the log, which belongs to the live
    /// tree. The newest generation is that of the snapshot; later commits do not matter. Errors:
    /// `Refused` when no known snapshot has this name, `Damaged` when the list of snapshots may be
    /// incomplete.
    pub(super) fn of_snapshot(mut self, name: &[u8]) -> Result<LeafIndex> {
        let named = self.known_snapshots.all.iter().rev().find(|(_, snapshot)| snapshot.name == name);
        let Some((id, snapshot)) = named.cloned() else {
            return Err(match self.known_snapshots.lost {
                None => Error::Refused(Refusal::NoSnapshot { name: display(name) }),
                Some(reason) => {
                    let name = display(name);
                    Error::damaged(format!("not all snapshots are known, and none that is known is {name}: {reason}"))
                }
            });
        };
        let (mut nodes, mut inodes) = (Vec::new(), HashSet::new());
        visit_leaves(&self.pager, TreeId::Live, &snapshot.root, &mut |pointer, (lower, upper), records| {
            nodes.push(SurvivingNode { pointer, level: 0, lower, upper, last: snapshot.generation });
            inodes.extend(records.iter().map(|(key, _)| key.object).filter(|object| *object != 0));
            Ok(())
        })?;
        self.arrange(nodes, inodes);
        self.cache.clear();
        self.data.clear();
        self.newest = snapshot.generation;
        self.later = LaterCommits::Possible;
        self.log = LogOverlay::default();
        self.known_snapshots = KnownSnapshots { all: vec![(id, snapshot)], lost: None, ..self.known_snapshots };
        Ok(self)
    }

    fn arrange(&mut self, mut leaves: Vec<SurvivingNode>, inodes: HashSet<u64>) {
        leaves.sort_by_key(|node| (node.lower, node.pointer.generation));
        self.inodes = inodes.into_iter().collect();
        self.inodes.sort_unstable();
        let width = leaves.len().next_power_of_two();
        let mut greatest = vec![Key::MIN; 2 * width];
        for (index, node) in leaves.iter().enumerate() {
            greatest[width + index] = node.upper;
        }
        for index in (1..width).rev() {
            greatest[index] = greatest[2 * index].max(greatest[2 * index + 1]);
        }
        (self.leaves, self.greatest) = (leaves, greatest);
    }

    /// Returns the data pieces of `wanted` inodes according to the pages' own headers, oldest
    /// first. Scans the file again.
    pub(super) fn pieces(
        &self,
        wanted: &HashSet<u64>,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<HashMap<u64, Vec<DataPiece>>> {
        let pager = &*self.pager;
        let mut found: HashMap<u64, Vec<DataPiece>> = HashMap::new();
        scan(&**pager.storage(), pager.cipher(), progress, &mut |run, prologue| {
            if prologue.kind == PageKind::Packed || prologue.kind == PageKind::Data && wanted.contains(&prologue.owner)
            {
                for (ino, piece) in pieces_of(pager, run, prologue)?.into_iter().filter(|(ino, _)| wanted.contains(ino))
                {
                    found.entry(ino).or_default().push(piece);
                }
            }
            Ok(())
        })?;
        found.values_mut().for_each(|pieces| pieces.sort_by_key(|piece| piece.page.generation));
        Ok(found)
    }

    /// RESCUE-3: returns whether the surviving leaves cover every key of the tree of N.
    pub(super) fn is_whole(&self) -> bool {
        let all: Vec<u32> = (0..self.leaves.len() as u32).collect();
        self.covering(&all, self.newest, Key::MIN, Key::MAX).is_some()
    }

    /// Returns leaves of any age that overlap `[from, to)`, by lower fence.
    fn overlapping(&self, from: Key, to: Key) -> Vec<u32> {
        let mut found = Vec::new();
        let before = self.leaves.partition_point(|leaf| leaf.lower < to);
        let width = self.greatest.len() / 2;
        let mut stack = vec![(1, 0, width)];
        while let Some((index, start, length)) = stack.pop() {
            if start >= before || self.greatest.get(index).is_none_or(|greatest| *greatest <= from) {
                continue;
            }
            if length == 1 {
                found.push(start as u32);
                continue;
            }
            let half = length / 2;
            stack.push((2 * index + 1, start + half, half));
            stack.push((2 * index, start, half));
        }
        found
    }

    /// Returns the last generation in which the leaf is known to be reachable.
    pub(super) fn last(&self, leaf: u32) -> Generation {
        self.leaves[leaf as usize].last
    }

    /// Returns whether a surviving leaf or a possibly committed data page proves that the inode
    /// existed after `generation`.
    pub(super) fn existed_after(&mut self, ino: Ino, generation: Generation) -> Result<bool> {
        let newest = self.newest;
        if self.data.get(&ino.0).is_some_and(|pages| pages.last_until(newest) > generation) {
            return Ok(true);
        }
        let (from, to) = (Key::new(ino.0, 0, 0), Key::new(ino.0.saturating_add(1), 0, 0));
        for leaf in self.of(ino) {
            let mut found = false;
            if self.leaves[leaf as usize].pointer.generation > generation {
                self.leaf_records(leaf, from, to, &mut |_, _| {
                    found = true;
                    Ok(false)
                })?;
            }
            if found {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn of(&self, ino: Ino) -> Vec<u32> {
        self.overlapping(Key::new(ino.0, 0, 0), Key::new(ino.0.saturating_add(1), 0, 0))
    }

    /// Returns every version of the inode's records that is covered without a gap, newest first
    /// (RESCUE-2).
    pub(super) fn versions(&self, ino: Ino) -> Vec<LeafSet> {
        let all = self.of(ino);
        let generations: BTreeSet<Generation> = all.iter().map(|&leaf| self.last(leaf)).collect();
        let mut versions: Vec<LeafSet> = Vec::new();
        let mut to_lay = self.log.has(ino);
        for generation in generations.into_iter().rev() {
            let (from, to) = (Key::new(ino.0, 0, 0), Key::new(ino.0.saturating_add(1), 0, 0));
            if let Some(leaves) = self.covering(&all, generation, from, to)
                && versions.last().is_none_or(|newer| newer.leaves != leaves)
            {
                if to_lay && generation <= self.log.over {
                    to_lay = false;
                    versions.push(LeafSet { generation, leaves: leaves.clone(), logged: true });
                }
                versions.push(LeafSet { generation, leaves, logged: false });
            }
        }
        versions
    }

    fn covering(&self, all: &[u32], generation: Generation, from: Key, to: Key) -> Option<Vec<u32>> {
        let mut covered = from;
        let mut chosen = Vec::new();
        for &index in all {
            let leaf = &self.leaves[index as usize];
            if leaf.pointer.generation > generation || leaf.last < generation {
                continue;
            }
            let adjoins = if chosen.is_empty() { leaf.lower <= covered } else { leaf.lower == covered };
            if !adjoins {
                return None;
            }
            chosen.push(index);
            covered = leaf.upper;
        }
        (!chosen.is_empty() && covered >= to).then_some(chosen)
    }

    /// Returns the newest leaves that do not overlap, for an inode without a complete version. They
    /// may not have been reachable together.
    pub(super) fn newest_leaves(&self, ino: Ino) -> LeafSet {
        let mut all = self.of(ino);
        all.sort_by_key(|&leaf| std::cmp::Reverse(self.leaves[leaf as usize].last));
        let mut chosen: Vec<u32> = Vec::new();
        for index in all {
            let leaf = &self.leaves[index as usize];
            let free = chosen.iter().map(|&other| &self.leaves[other as usize]);
            if free.into_iter().all(|other| other.upper <= leaf.lower || other.lower >= leaf.upper) {
                chosen.push(index);
            }
        }
        let newest = chosen.iter().map(|&leaf| self.leaves[leaf as usize].last).max();
        chosen.sort_by_key(|&leaf| self.leaves[leaf as usize].lower);
        let logged = newest.is_none_or(|newest| newest <= self.log.over) && self.log.has(ino);
        LeafSet { generation: newest.unwrap_or_default(), leaves: chosen, logged }
    }

    /// Calls `f` with the records of one part of a version in `[from, to)` until it returns false.
    pub(super) fn records(
        &mut self,
        (version, part): (&LeafSet, usize),
        from: Key,
        to: Key,
        f: &mut dyn FnMut(Key, &[u8]) -> Result<bool>,
    ) -> Result<bool> {
        let leaf = version.leaves.get(part).copied();
        if !version.logged {
            return leaf.map_or(Ok(true), |leaf| self.leaf_records(leaf, from, to, f));
        }
        // A leaf and the gap up to the next one, which only the log can have records for.
        let lower = |part: usize| version.leaves.get(part).map(|&leaf| self.leaves[leaf as usize].lower);
        let start = if part == 0 { from } else { lower(part).map_or(from, |lower| from.max(lower)) };
        let end = lower(part + 1).map_or(to, |next| to.min(next));
        let mut laid: BTreeMap<Key, Vec<u8>> = BTreeMap::new();
        if let Some(leaf) = leaf {
            self.leaf_records(leaf, start, end, &mut |key, value| {
                laid.insert(key, value.to_vec());
                Ok(true)
            })?;
        }
        for (key, value) in self.log.records.range(start..end.max(start)) {
            match value {
                Some(value) => drop(laid.insert(*key, value.clone())),
                None => drop(laid.remove(key)),
            }
        }
        for (key, value) in &laid {
            if !f(*key, value)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Calls `f` with the records of one leaf in `[from, to)` until it returns false.
    fn leaf_records(
        &mut self,
        leaf: u32,
        from: Key,
        to: Key,
        f: &mut dyn FnMut(Key, &[u8]) -> Result<bool>,
    ) -> Result<bool> {
        let body = match self.cache.get(&leaf) {
            Some(body) => body,
            None => {
                let pointer = self.leaves[leaf as usize].pointer;
                let page = self.pager.read_page(&pointer, PageKind::Node).map_err(as_damage)?;
                let body = Arc::new(page.into_body());
                self.cache.put(leaf, body.clone(), body.len());
                body
            }
        };
        let NodeEntries::Leaf(entries) = node::decode(&body)?.entries else {
            return Err(Error::damaged("a leaf turned into another node"));
        };
        let first = entries.partition_point(|(key, _)| *key < from);
        for (key, value) in &entries[first..] {
            if *key >= to || !f(*key, value)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns the inodes and byte ranges in a data page's own header; none if it does not open.
fn pieces_of(pager: &Pager, run: Run, prologue: &Prologue) -> Result<Vec<(u64, DataPiece)>> {
    let Some((page, opened)) = find_page(pager, run)? else { return Ok(Vec::new()) };
    if prologue.kind == PageKind::Data {
        let piece = DataPiece { page, offset: prologue.position, start: 0, length: prologue.plain_length };
        return Ok(vec![(prologue.owner, piece)]);
    }
    let Some(table) = ignoring_damage(opened.table())? else { return Ok(Vec::new()) };
    let piece = |item: &PackedItem| DataPiece { page, offset: item.offset, start: item.start, length: item.length };
    Ok(table.items.iter().map(|item| (item.ino.0, piece(item))).collect())
}

/// RESCUE-1, top-down: a node is reachable at least as long as the newest node that references it.
fn learn_lifetimes(pager: &Pager, records: &[(CommitRecord, Tag)], nodes: &mut [SurvivingNode]) {
    let by_address: HashMap<u64, usize> =
        nodes.iter().enumerate().map(|(index, node)| (node.pointer.run.address, index)).collect();
    for (record, _) in records {
        let root = record.roots[TreeId::Live];
        if let Some(&index) = by_address.get(&root.pointer.run.address)
            && nodes[index].pointer == root.pointer
        {
            nodes[index].last = nodes[index].last.max(record.generation);
        }
    }
    let mut order: Vec<usize> = (0..nodes.len()).filter(|&index| nodes[index].level > 0).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(nodes[index].level));
    for parent in order {
        let (pointer, level, upper, last) =
            (nodes[parent].pointer, nodes[parent].level, nodes[parent].upper, nodes[parent].last);
        // The page was readable during the scan. A medium that fails now costs the proof of a
        // lifetime, not the rescue.
        let Ok(body) = pager.read_page(&pointer, PageKind::Node).map(OpenedPage::into_body) else { continue };
        let Ok(NodeView { entries: NodeEntries::Internal(children), .. }) = node::decode(&body) else { continue };
        for (slot, (lower, child)) in children.iter().enumerate() {
            let upper = children.get(slot + 1).map_or(upper, |next| next.0);
            let Some(&index) = by_address.get(&child.run.address) else { continue };
            let node = &mut nodes[index];
            let fits = node.level + 1 == level && (node.lower, node.upper) == (*lower, upper);
            if fits && node.pointer == *child {
                node.last = node.last.max(last);
            }
        }
    }
}

/// RESCUE-3: returns whether there were commits after `newest`. The slot of the next commit keeps
/// the record from 64 commits before until it is overwritten.
fn later_commits(records: &[(CommitRecord, Tag)], newest: Generation, youngest_data: Generation) -> LaterCommits {
    let slot = Generation(newest.0.saturating_add(1)).slot();
    if youngest_data > newest {
        LaterCommits::Seen
    } else if records.iter().any(|(record, _)| record.generation.slot() == slot) {
        LaterCommits::Never
    } else {
        LaterCommits::Possible
    }
}

/// Returns every commit record that opens, with its tag; unreadable and malformed slots are
/// skipped.
fn surviving_records(pager: &Pager) -> Vec<(CommitRecord, Tag)> {
    let mut records = Vec::new();
    for slot in 0..RING_SLOTS {
        let mut bytes = vec![0; BLOCK as usize];
        if pager.storage().read_at(slot_block(slot) * BLOCK, &mut bytes).is_err() {
            continue;
        }
        let opened = pager.cipher().open_record(slot, &bytes);
        let decoded = opened.and_then(|(plain, tag)| Some((CommitRecord::decode(&plain).ok()?, tag)));
        records.extend(decoded.filter(|(record, _)| record.generation.slot() == slot));
    }
    records
}
