//! Which leaves of the live tree survive, and in which generations each is known to have been part of it.
//!
//! # Invariants
//! RESCUE-1  A node is part of the tree from the generation of its page until something replaces it, and never again. So it is known to be part of
//!     it from that generation to the latest one of an authentic node (or record) that names it, by tag, in a place with the same fences.
//! RESCUE-2  Leaves whose known lifetimes share a generation g were in the tree together at g. Only such leaves are read together.
//! RESCUE-3  Let N be the newest generation of any surviving node or record, or that an entry of the log extends. What leaves known to be part of the tree at N say is the newest that is
//!     known; of everything else a newer version may have been destroyed, with or without a trace. So nothing is missing from the tree of N
//!     when such leaves cover all keys, and only then. Of commits after N only data can be left, or a ring slot that shows there was none.
//!
//! Memory: about 130 bytes for each node page of any age (one for some 50 files), 60 for each inode number met, and for each page of an inode
//! that no leaf describes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use lockbox_terminal::display;

use super::Later;
use super::log::{FoundLog, LaidLog};
use super::scan::{as_damage, open_found, scan};
use super::snapshots::{self, FoundRoots, Kept};
use crate::error::{Error, Refusal, Result};
use crate::format::data_head::PackedItem;
use crate::format::node::{self, NodeEntries, NodeView};
use crate::format::page::{PageKind, Prologue};
use crate::format::record::CommitRecord;
use crate::format::{BLOCK, Generation, Ino, Key, Pointer, RING_SLOTS, Run, Tag, TreeId, slot_block};
use crate::frame::OpenedPage;
use crate::pager::{Pager, ShardedCache};

/// Bytes of leaves that are kept.
const KEPT: usize = 4 << 20;

/// A surviving node.
struct Node {
    pointer: Pointer,
    level: u8,
    lower: Key,
    upper: Key,
    /// RESCUE-1: the last generation in which it is known to be part of the tree.
    last: Generation,
}

/// Leaves that belong together, in the order of their keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Version {
    pub(super) generation: Generation,
    pub(super) leaves: Vec<u32>,
    /// With the log over them (LAID-2).
    pub(super) logged: bool,
}

impl Version {
    /// How many parts its records are read in, in the order of their keys.
    pub(super) fn parts(&self) -> usize {
        self.leaves.len().max(usize::from(self.logged))
    }
}

/// What pages of file data say of an inode themselves.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pages {
    pub(super) count: u64,
    pub(super) bytes: u64,
    /// Of the oldest and the youngest of them.
    first: Generation,
    pub(super) last: Generation,
}

impl Pages {
    fn add(&mut self, generation: Generation, bytes: u32) {
        self.first = if self.count == 0 { generation } else { self.first.min(generation) };
        self.last = self.last.max(generation);
        self.count += 1;
        self.bytes += u64::from(bytes);
    }

    /// A page that is younger than every commit may never have been part of one.
    fn last_until(&self, newest: Generation) -> Generation {
        [self.last, self.first].into_iter().find(|generation| *generation <= newest).unwrap_or_default()
    }
}

/// A part of a page that says itself which bytes of which file it has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) page: Pointer,
    /// In the file.
    pub(super) offset: u64,
    /// In the page.
    pub(super) start: u32,
    pub(super) length: u32,
}

/// All leaves of the live tree by lower fence, and what else the scan met.
pub(super) struct LeafIndex {
    pager: Arc<Pager>,
    leaves: Vec<Node>,
    /// A binary tree over `leaves`: the greatest upper fence below each of its nodes, for searches of overlaps.
    greatest: Vec<Key>,
    cache: ShardedCache<u32, Arc<Vec<u8>>>,
    /// Numbers of all inodes that a leaf has a record of, ascending.
    pub(super) inodes: Vec<u64>,
    /// Of the inodes that no leaf has a record of.
    pub(super) data: HashMap<u64, Pages>,
    pub(super) pages: u64,
    pub(super) unreadable: u64,
    /// RESCUE-3: N.
    pub(super) newest: Generation,
    pub(super) later: Later,
    pub(super) log: LaidLog,
    pub(super) kept: Kept,
}

/// Collects while the file is scanned.
#[derive(Default)]
struct Collected {
    nodes: Vec<Node>,
    inodes: HashSet<u64>,
    data: HashMap<u64, Pages>,
    pages: u64,
    /// Of all pages of file data.
    youngest: Generation,
    kept: FoundRoots,
}

impl Collected {
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
            PageKind::Node if prologue.owner == TreeId::Live as u64 => match open_found(pager, run) {
                Ok((pointer, opened)) => self.node(pointer, opened.body())?,
                // Its prologue alone survived.
                Err(Error::Damaged(_) | Error::Io { .. }) => {}
                Err(error) => return Err(error),
            },
            PageKind::Node if prologue.owner == TreeId::Snapshots as u64 => self.kept.page(pager, run)?,
            PageKind::Node | PageKind::DeltaList => {}
        }
        Ok(())
    }

    fn node(&mut self, pointer: Pointer, body: &[u8]) -> Result<()> {
        let view = match node::decode(body) {
            Ok(view) if view.head.tree == TreeId::Live as u8 => view,
            Ok(_) | Err(Error::Damaged(_)) => return Ok(()),
            Err(error) => return Err(error),
        };
        if let NodeEntries::Leaf(entries) = &view.entries {
            self.inodes.extend(entries.iter().map(|(key, _)| key.object).filter(|object| *object != 0));
        }
        let (level, lower, upper) = (view.head.level, view.head.lower, view.head.upper);
        self.nodes.push(Node { pointer, level, lower, upper, last: pointer.generation });
        Ok(())
    }
}

impl LeafIndex {
    pub(super) fn build(
        pager: Arc<Pager>,
        log: FoundLog,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<LeafIndex> {
        let mut found = Collected::default();
        let scanned =
            scan(&**pager.storage(), pager.cipher(), progress, &mut |run, prologue| found.page(&pager, run, prologue))?;
        let mut nodes = found.nodes;
        let records = surviving_records(&pager);
        learn_lifetimes(&pager, &records, &mut nodes);
        let shown = nodes.iter().map(|node| node.last).chain(records.iter().map(|(record, _)| record.generation));
        let newest = shown.chain([log.newest()]).max().unwrap_or_default();
        let log = log.laid(&records);
        found.inodes.extend(log.inodes());
        let later = later_commits(&records, newest, found.youngest);
        nodes.retain(|node| node.level == 0);
        found.data.retain(|ino, _| !found.inodes.contains(ino));
        let kept = Kept::read(&pager, found.kept, &records, newest)?;
        let mut index = LeafIndex {
            pager,
            leaves: Vec::new(),
            greatest: Vec::new(),
            cache: ShardedCache::new(KEPT),
            inodes: Vec::new(),
            data: found.data,
            pages: found.pages,
            unreadable: scanned.unreadable,
            newest,
            later,
            log,
            kept,
        };
        index.arrange(nodes, found.inodes);
        Ok(index)
    }

    /// How many objects there are of which something is left.
    pub(super) fn objects(&self) -> u64 {
        (self.inodes.len() + self.data.len()) as u64
    }

    /// With what the snapshot's root leads to, and nothing else (KEPT-1), in the place of all other leaves, of pages that no leaf describes, and of the
    /// log, which belongs to the live tree. Its generation is the newest then: which commits came later is no matter to it.
    ///
    /// # Errors
    /// `Refused` when none of this name is known, `Damaged` when some of those that there were may not be known.
    pub(super) fn of_snapshot(mut self, name: &[u8]) -> Result<LeafIndex> {
        let Some((id, snapshot)) = self.kept.named(name).cloned() else {
            return Err(match self.kept.lost {
                None => Error::Refused(Refusal::NoSnapshot { name: display(name) }),
                Some(reason) => {
                    let name = display(name);
                    Error::damaged(format!("not all snapshots are known, and none that is known is {name}: {reason}"))
                }
            });
        };
        let (mut nodes, mut inodes) = (Vec::new(), HashSet::new());
        snapshots::leaves(&self.pager, TreeId::Live, &snapshot.root, &mut |pointer, (lower, upper), records| {
            nodes.push(Node { pointer, level: 0, lower, upper, last: snapshot.generation });
            inodes.extend(records.iter().map(|(key, _)| key.object).filter(|object| *object != 0));
            Ok(())
        })?;
        self.arrange(nodes, inodes);
        self.cache.clear();
        self.data.clear();
        self.newest = snapshot.generation;
        self.later = Later::Possible;
        self.log = LaidLog::default();
        self.kept = Kept { all: vec![(id, snapshot)], lost: None, ..self.kept };
        Ok(self)
    }

    fn arrange(&mut self, mut leaves: Vec<Node>, inodes: HashSet<u64>) {
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

    /// What is left of the content of `wanted` inodes by the word of the pages themselves, the oldest first. Scans the file once more.
    pub(super) fn pieces(
        &self,
        wanted: &HashSet<u64>,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<HashMap<u64, Vec<Piece>>> {
        let pager = &*self.pager;
        let mut found: HashMap<u64, Vec<Piece>> = HashMap::new();
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

    /// RESCUE-3: whether every key of the tree of N is in a leaf that is left.
    pub(super) fn is_whole(&self) -> bool {
        let all: Vec<u32> = (0..self.leaves.len() as u32).collect();
        self.covering(&all, self.newest, Key::MIN, Key::MAX).is_some()
    }

    /// Leaves of any age that overlap `[from, to)`, by lower fence.
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

    /// The last generation in which the leaf is known to be part of the tree.
    pub(super) fn last(&self, leaf: u32) -> Generation {
        self.leaves[leaf as usize].last
    }

    /// Whether something says that the inode existed after `generation`: a leaf with a record of it, or a page of its data that a commit
    /// may have named.
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

    /// All leaves that have something of the inode's keys.
    pub(super) fn of(&self, ino: Ino) -> Vec<u32> {
        self.overlapping(Key::new(ino.0, 0, 0), Key::new(ino.0.saturating_add(1), 0, 0))
    }

    /// Every version of the inode's records that is covered without a gap, the newest first (RESCUE-2).
    pub(super) fn versions(&self, ino: Ino) -> Vec<Version> {
        let all = self.of(ino);
        let mut generations: Vec<Generation> = all.iter().map(|&leaf| self.leaves[leaf as usize].last).collect();
        generations.sort_unstable();
        generations.dedup();
        let mut versions: Vec<Version> = Vec::new();
        let mut to_lay = self.log.has(ino);
        for generation in generations.into_iter().rev() {
            let (from, to) = (Key::new(ino.0, 0, 0), Key::new(ino.0.saturating_add(1), 0, 0));
            if let Some(leaves) = self.covering(&all, generation, from, to)
                && versions.last().is_none_or(|newer| newer.leaves != leaves)
            {
                if to_lay && generation <= self.log.over {
                    to_lay = false;
                    versions.push(Version { generation, leaves: leaves.clone(), logged: true });
                }
                versions.push(Version { generation, leaves, logged: false });
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

    /// For what is not whole: the newest leaves that do not overlap, whether or not they belong together.
    pub(super) fn remains(&self, ino: Ino) -> Version {
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
        Version { generation: newest.unwrap_or_default(), leaves: chosen, logged }
    }

    /// Calls `f` with the records of one part of a version in `[from, to)` until it says false.
    pub(super) fn records(
        &mut self,
        (version, part): (&Version, usize),
        from: Key,
        to: Key,
        f: &mut dyn FnMut(Key, &[u8]) -> Result<bool>,
    ) -> Result<bool> {
        let leaf = version.leaves.get(part).copied();
        if !version.logged {
            return leaf.map_or(Ok(true), |leaf| self.leaf_records(leaf, from, to, f));
        }
        // A leaf and what lies between it and the next one, of which the log alone can have records.
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

    /// Calls `f` with the records of one leaf in `[from, to)` until it says false.
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

/// Which bytes of which files a page of file data says to have; none when it does not open.
fn pieces_of(pager: &Pager, run: Run, prologue: &Prologue) -> Result<Vec<(u64, Piece)>> {
    let (page, opened) = match open_found(pager, run) {
        Ok(found) => found,
        Err(Error::Damaged(_) | Error::Io { .. }) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    if prologue.kind == PageKind::Data {
        let piece = Piece { page, offset: prologue.position, start: 0, length: prologue.plain_length };
        return Ok(vec![(prologue.owner, piece)]);
    }
    let items = match opened.table() {
        Ok(table) => &table.items,
        Err(Error::Damaged(_)) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let piece = |item: &PackedItem| Piece { page, offset: item.offset, start: item.start, length: item.length };
    Ok(items.iter().map(|item| (item.ino.0, piece(item))).collect())
}

/// RESCUE-1, from the top down: a node lives at least as long as the youngest of those that name it.
fn learn_lifetimes(pager: &Pager, records: &[(CommitRecord, Tag)], nodes: &mut [Node]) {
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
        // It opened a moment ago; a medium that changes its mind costs a proof, not the rescue.
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

/// RESCUE-3: whether there were commits after `newest`. The slot of the next one keeps the record from 64 commits before until that is written.
fn later_commits(records: &[(CommitRecord, Tag)], newest: Generation, youngest_data: Generation) -> Later {
    let slot = Generation(newest.0.saturating_add(1)).slot();
    if youngest_data > newest {
        Later::Seen
    } else if records.iter().any(|(record, _)| record.generation.slot() == slot) {
        Later::Never
    } else {
        Later::Possible
    }
}

/// Every commit record that opens, with its tag; a slot that cannot be read or decoded has none.
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
