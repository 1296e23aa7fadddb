//! Finds every authentic page of an archive's file by its prologue, without any root or record; and
//! the surviving log entries, and the leaves over which they are applied (specification 9.4, 9.5,
//! 10.2); and the surviving snapshots, with the leaves reachable from their roots.
//!
//! # Invariants
//! LAID-1  Valid entries form a chain from the first block of the log, each naming its predecessor,
//!     and end at the first one that does not open: each contains the changes since its
//!     predecessor, so without it the rest is not a state of the archive. Entries name the
//!     generation g and the tag of the record that they extend. If that record survived with
//!     another tag, or is closed, they belong to another history.
//! LAID-2  Entries contain the changes to the tree of g before any later commit: g + 1 includes
//!     them. They are therefore applied over leaves known to be reachable at g. The result is newer
//!     than these leaves, and older than any leaves of a commit after g, which are tried first and
//!     are never overridden by an entry. A record after g that names these entries as pending
//!     includes none of them and has the tree of g: then they are applied over its leaves.
//! LAID-3  Without leaves known to be reachable at g, entries are applied over leaves of the newest
//!     version before it. This is usually the same tree, since a commit of an idle archive writes
//!     no node; but commits in between may have been destroyed without a trace, and a file may then
//!     mix bytes of an older commit and of entries. The result is therefore reported as unproved,
//!     as everything is when the log shows that the newest commit is lost (RESCUE-3).
//! KEPT-1  The content of a snapshot is exactly the set reachable from its root: each node opens
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

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::{RescueState, SnapshotCondition};
use crate::error::{Error, Result};
use crate::format::log::{LOG_BLOCKS, LogEntry, LogMark};
use crate::format::node::{self, NodeEntries};
use crate::format::page::{PageKind, Prologue};
use crate::format::record::{CommitRecord, Root};
use crate::format::values::SnapshotValue;
use crate::format::{BLOCK, Generation, Ino, Key, LOG, Pointer, RESERVED, Run, Tag, TreeId, kind};
use crate::frame::{OpenedPage, PageCipher, claimed_tag};
use crate::fs::LogPieces;
use crate::pager::Pager;
use crate::storage::Storage;

/// Size of one read, in bytes.
const WINDOW: u64 = 1 << 20;

/// Calls `page` for every address with a block that opens as a prologue for that address. Every
/// block is tried, also within pages: a page that was partly overwritten may contain a newer one.
/// Holes are skipped. `progress` is called with the bytes done and the length of the file; its
/// error ends the scan. Returns the number of blocks that the host could not read.
pub(crate) fn scan(
    storage: &dyn Storage,
    cipher: &PageCipher,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    page: &mut dyn FnMut(Run, &Prologue) -> Result<()>,
) -> Result<u64> {
    let length = storage.len()? / BLOCK * BLOCK;
    let (mut at, mut unreadable) = (0, 0);
    while at < length {
        let Some(data) = storage.next_data(at)? else { break };
        at = data.start / BLOCK * BLOCK;
        let end = data.end.next_multiple_of(BLOCK).min(length);
        while at < end {
            let count = (end - at).min(WINDOW);
            scan_window(storage, cipher, at, count, &mut unreadable, page)?;
            at += count;
            progress(at, length)?;
        }
    }
    progress(length, length)?;
    Ok(unreadable)
}

fn scan_window(
    storage: &dyn Storage,
    cipher: &PageCipher,
    at: u64,
    count: u64,
    unreadable: &mut u64,
    page: &mut dyn FnMut(Run, &Prologue) -> Result<()>,
) -> Result<()> {
    let mut bytes = vec![0; count as usize];
    if let Err(error) = storage.read_at(at, &mut bytes) {
        if !matches!(error, Error::Damaged(_) | Error::Io { .. }) {
            return Err(error);
        }
        if count == BLOCK {
            tracing::warn!(%error, block = at / BLOCK, "a block cannot be read");
            *unreadable += 1;
            return Ok(());
        }
        // A bad sector must not hide its neighbours.
        for block in 0..count / BLOCK {
            scan_window(storage, cipher, at + block * BLOCK, BLOCK, unreadable, page)?;
        }
        return Ok(());
    }
    for (index, block) in bytes.chunks_exact(BLOCK as usize).enumerate() {
        let address = at / BLOCK + index as u64;
        if RESERVED.iter().any(|&(start, end)| (start..end).contains(&address)) {
            continue;
        }
        match cipher.open_prologue(address, block) {
            Ok(prologue) => page(Run::new(address, prologue.blocks.into()), &prologue)?,
            Err(Error::Damaged(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Opens the whole page of a prologue, and returns it with its pointer.
pub(crate) fn open_found(pager: &Pager, run: Run) -> Result<(Pointer, OpenedPage)> {
    if !run.is_page_space(u64::MAX) {
        return Err(Error::damaged(format!("page lies in header or ring: block={}", run.address)));
    }
    let mut bytes = vec![0; run.bytes() as usize];
    pager.storage().read_at(run.offset(), &mut bytes)?;
    let prologue = pager.cipher().open_prologue(run.address, &bytes)?;
    let short = || Error::damaged(format!("page ends early: block={}", run.address));
    let tag = claimed_tag(&prologue, &bytes).ok_or_else(short)?;
    let pointer = Pointer { run, generation: prologue.generation, tag };
    let opened = pager.cipher().open(&pointer, bytes)?;
    Ok((pointer, opened))
}

/// Opens a page like [`open_found`]; `None` if only its prologue survived.
pub(super) fn find_page(pager: &Pager, run: Run) -> Result<Option<(Pointer, OpenedPage)>> {
    ignoring_damage(open_found(pager, run).map_err(as_damage))
}

/// Maps I/O errors to damage: an unreadable sector is as lost as an altered one.
pub(super) fn as_damage(error: Error) -> Error {
    match error {
        Error::Io { context, source } => Error::damaged(format!("{context}: {source}")),
        error => error,
    }
}

/// Storage of a remote archive: aborts the rescue on the first transport error, which it remembers,
/// instead of treating it as damage.
pub(super) struct StrictStorage {
    storage: Arc<dyn Storage>,
    failed: OnceLock<Error>,
}

impl StrictStorage {
    pub(super) fn of(storage: Arc<dyn Storage>) -> StrictStorage {
        StrictStorage { storage, failed: OnceLock::new() }
    }

    /// Returns the first failed request, regardless of later results. Errors: that of the first
    /// failed request.
    pub(super) fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Records an I/O error and returns `Stale`, so that it is not treated as local damage.
    fn record_failure<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match error {
            Error::Io { .. } => {
                let _ = self.failed.set(error);
                Error::Stale
            }
            error => error,
        })
    }
}

impl Storage for StrictStorage {
    fn len(&self) -> Result<u64> {
        self.record_failure(self.storage.len())
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.check().map_err(|_| Error::Stale)?;
        self.record_failure(self.storage.read_at(offset, out))
    }

    fn will_need(&self, offset: u64, length: u64) {
        self.storage.will_need(offset, length);
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        self.storage.evict(offset, length)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.record_failure(self.storage.next_data(offset))
    }

    fn read_only(&self) -> bool {
        true
    }
}

/// Chain of entries from the first block of the log, and other findings.
#[derive(Default)]
pub(super) struct SurvivingLog {
    entries: Vec<LogEntry>,
    /// Last entry of the chain.
    last: Option<LogMark>,
    /// Highest generation that any entry extends.
    pub(super) newest: Generation,
    /// An entry after the chain extends the same record, so an entry between them is lost.
    lost: bool,
}

impl SurvivingLog {
    /// Reads the log; unreadable blocks have no entries.
    pub(super) fn read(storage: &dyn Storage, cipher: &PageCipher) -> Result<SurvivingLog> {
        let mut found = SurvivingLog::default();
        if !cipher.has_log() {
            return Ok(found);
        }
        let mut bytes = vec![0; (LOG_BLOCKS * BLOCK) as usize];
        for (block, bytes) in (LOG.0..LOG.1).zip(bytes.chunks_exact_mut(BLOCK as usize)) {
            match storage.read_at(block * BLOCK, bytes).map_err(as_damage) {
                Err(Error::Damaged(_)) => bytes.fill(0),
                read => read?,
            }
        }
        let from = |block: u64| &bytes[((block - LOG.0) * BLOCK) as usize..];
        let (mut block, mut extends) = (LOG.0, None);
        while block < LOG.1
            && let Some(begun) = ignoring_damage(cipher.open_entry_head(block, from(block)))?.flatten()
        {
            let (head, number) = (begun.head, found.last.map_or(0, |last| last.number) + 1);
            let end = block + u64::from(head.blocks);
            let record = *extends.get_or_insert((head.generation, head.record));
            let previous = found.last.map_or(Tag::default(), |last| last.entry);
            if (head.generation, head.record) != record || (head.number, head.previous) != (number, previous) {
                break;
            }
            let whole = from(block)[..((end - block) * BLOCK) as usize].to_vec();
            let Some((body, entry)) = ignoring_damage(cipher.open_entry_body(&begun, block, whole))?.flatten() else {
                break;
            };
            let Some(decoded) = ignoring_damage(LogEntry::decode(&body))? else { break };
            found.entries.push(decoded);
            found.last = Some(LogMark { generation: record.0, record: record.1, number, entry });
            block = end;
        }
        found.examine_tail(block, cipher, &from)?;
        Ok(found)
    }

    /// Examines the entry heads after the end of the chain.
    fn examine_tail<'a>(&mut self, block: u64, cipher: &PageCipher, from: &dyn Fn(u64) -> &'a [u8]) -> Result<()> {
        let last = self.last;
        self.newest = last.map_or(Generation(0), |last| last.generation);
        for block in block..LOG.1 {
            let Some(begun) = ignoring_damage(cipher.open_entry_head(block, from(block)))?.flatten() else { continue };
            let head = begun.head;
            // The next entry may be incomplete; an entry after that one was written when it was
            // durable. Entries of an older log are not a loss.
            let whole_to = last.filter(|last| last.is_of(head.generation, head.record)).map_or(0, |last| last.number);
            self.lost |= head.generation >= self.newest && head.number > whole_to + 1;
            self.newest = self.newest.max(head.generation);
        }
        Ok(())
    }

    /// Returns whether the archive is known to have a log.
    pub(super) fn exists(&self) -> bool {
        self.newest > Generation(0)
    }

    /// Decides by the surviving records (LAID-1, LAID-2).
    pub(super) fn into_overlay(mut self, records: &[(CommitRecord, Tag)]) -> LogOverlay {
        let newest = records.iter().map(|(record, _)| record).max_by_key(|record| record.generation);
        // Entries that a later commit includes are not a loss.
        let lost = self.lost && newest.is_none_or(|record| record.generation <= self.newest);
        // Entries that a commit names as pending were durable.
        let has = |pending: LogMark| {
            let last = self.last.filter(|last| last.is_of(pending.generation, pending.record));
            last.is_some_and(|last| last.number >= pending.number)
        };
        let lost = lost || newest.and_then(|record| record.pending).is_some_and(|pending| !has(pending));
        let none = LogOverlay { lost, ..LogOverlay::default() };
        let Some(last) = self.last else { return none };
        let own = records.iter().find(|(record, _)| record.generation == last.generation);
        if own.is_some_and(|(record, tag)| *tag != last.record || record.closed) {
            return none;
        }
        let pending = newest.filter(|record| record.generation > last.generation).and_then(|record| {
            let own = record.pending.filter(|log| log.is_of(last.generation, last.record))?;
            Some((record.generation, own.number))
        });
        if let Some((_, number)) = pending {
            self.entries.truncate(number as usize);
        }
        let mut laid = LogOverlay { over: pending.map_or(last.generation, |(generation, _)| generation), ..none };
        for entry in &self.entries {
            laid.records.extend(entry.records.iter().cloned());
        }
        laid.pieces = LogPieces::of(&self.entries);
        laid.entries = self.entries.len() as u64;
        laid
    }
}

/// Maps `Damaged` to `None`. An authentic structure that does not decode was written by a holder of
/// the key, and is skipped like a lost one.
pub(super) fn ignoring_damage<T>(opened: Result<T>) -> Result<Option<T>> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(Error::Damaged(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Log entries to apply over the leaves of a generation.
#[derive(Default)]
pub(super) struct LogOverlay {
    /// Last generation that they may be applied to.
    pub(super) over: Generation,
    pub(super) records: BTreeMap<Key, Option<Vec<u8>>>,
    pieces: LogPieces,
    pub(super) entries: u64,
    pub(super) lost: bool,
}

impl LogOverlay {
    pub(super) fn inodes(&self) -> impl Iterator<Item = u64> {
        self.records.iter().filter(|(key, value)| key.kind == kind::INODE && value.is_some()).map(|(key, _)| key.object)
    }

    pub(super) fn has(&self, ino: Ino) -> bool {
        let mut records = self.records.range(Key::new(ino.0, 0, 0)..Key::new(ino.0.saturating_add(1), 0, 0));
        records.next().is_some() || self.pieces.of_file(ino).next().is_some()
    }

    /// Returns data of the file with its offsets, ascending.
    pub(super) fn pieces(&self, ino: Ino) -> Vec<(u64, Vec<u8>)> {
        self.pieces.of_file(ino).map(|(offset, data)| (offset, data.to_vec())).collect()
    }
}

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
pub(super) fn visit_leaves(
    pager: &Pager,
    tree: TreeId,
    root: &Root,
    f: &mut LeafVisitor<'_>,
) -> Result<Option<String>> {
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
        let Some((pointer, opened)) = find_page(pager, run)? else { return Ok(()) };
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
            let lost = visit_leaves(pager, TreeId::Snapshots, root, &mut |_, _, values| {
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
        let body = ignoring_damage(place.open(self.pager))?;
        let mut whole = body.is_some();
        if let Some(body) = body
            && let NodeEntries::Internal(children) = node::decode(&body)?.entries
        {
            for child in place.children(&children) {
                whole &= self.is_whole(&child)?;
            }
        }
        self.known.insert(place.pointer, whole);
        Ok(whole)
    }
}
