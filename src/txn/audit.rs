//! Recomputes from the trees which blocks are in use and how often each page is referenced: for
//! `check`, and to rebuild a lost space map.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use super::allocator::Allocator;
use super::allocator::in_space;
use super::commit::CommitTail;
use super::findings::{Finding, FindingKind, Severity, known, last_ino};
use super::operation::reference_count;
use super::state::{State, VolumeContext, is_being_removed, snapshot_tree, snapshots_of};
use crate::btree::{LostNode, NodeStore, Tree};
use crate::error::{Error, Result};
use crate::format::space::{REGION_WORDS, RegionBits};
use crate::format::values::{DeadValue, Extent, ReferenceValue};
use crate::format::{Key, Pointer, REGION_BLOCKS, Run, TreeId, kind};

/// Findings reported at most; a broken archive would otherwise fill the memory with sentences.
const MAX_FINDINGS: usize = 1000;

/// A page of file data, or one that a dead list keeps.
struct NamedPage {
    /// Pointer of the first extent, of the live tree or else of a snapshot; dead lists have only
    /// the run.
    pointer: Option<Pointer>,
    /// Snapshot of that extent.
    shown_by: Option<u64>,
    blocks: u64,
    /// Extents and dead-list entries that name it.
    names: u64,
    /// Bytes of file data that it was found to have; 0 when it was not opened, or does not open.
    plain: u32,
}

/// Result of the walk over all trees. Memory grows with the number of data pages (about 130 bytes
/// each).
#[derive(Default)]
struct Census {
    used: BTreeMap<u64, Box<RegionBits>>,
    used_blocks: u64,
    pages: HashMap<u64, NamedPage>,
    findings: Vec<Finding>,
    /// Findings that a walk over the files reports better, with file names.
    of_files: Vec<Finding>,
    /// Parts of the trees could not be read, so pages missing from the census may still exist.
    incomplete: bool,
    /// The greatest sequence of a dead list.
    last_dead: Option<u64>,
}

pub(crate) struct Audit {
    pub(crate) findings: Vec<Finding>,
    /// Losses in the tree of files and in file data, which `FileSystem::walk_structure` reports
    /// with inodes and paths.
    pub(crate) of_files: Vec<Finding>,
    pub(crate) data: DataPages,
}

/// Which pages of file data were read whole and are sound, after a full audit.
pub(crate) struct DataPages(HashMap<u64, NamedPage>);

impl DataPages {
    /// Returns whether the bytes of an extent were read and authenticated with the very tag that it
    /// names.
    pub(crate) fn hold(&self, extent: &Extent) -> bool {
        let end = u64::from(extent.start) + u64::from(extent.length);
        self.0
            .get(&extent.page.run.address)
            .is_some_and(|page| page.pointer == Some(extent.page) && end <= u64::from(page.plain))
    }
}

impl Census {
    fn find(&mut self, finding: Finding) {
        push_bounded(&mut self.findings, finding);
    }

    fn find_of_files(&mut self, finding: Finding) {
        push_bounded(&mut self.of_files, finding);
    }

    fn space(&mut self, severity: Severity, flaw: &str, block: u64) {
        self.find(Finding::new(FindingKind::Space, severity, format!("{flaw}: block={block}")).at_block(block));
    }

    fn lose(&mut self, tree: TreeId, lost: &LostNode) {
        self.incomplete = true;
        match tree {
            TreeId::Live => {
                let text = format!("records cannot be read: {}", lost.error);
                let finding = Finding::new(FindingKind::RecordsLost, Severity::Lost, text);
                self.find_of_files(finding.on_page(&lost.pointer));
            }
            tree => self.find(Finding::of_index(tree, &lost.pointer, &lost.error)),
        }
    }

    fn mark(&mut self, run: Run, total: u64) {
        if !run.is_page_space(total) {
            let text = format!("page outside of the archive: block={} blocks={}", run.address, run.blocks);
            self.find(Finding::new(FindingKind::Space, Severity::Wrong, text).at_block(run.address));
            return;
        }
        self.used_blocks += run.blocks;
        for block in run.address..run.end() {
            let bits = self.used.entry(block / REGION_BLOCKS).or_insert_with(|| Box::new([0; REGION_WORDS]));
            let (word, bit) = ((block % REGION_BLOCKS / 64) as usize, block % 64);
            let twice = bits[word] >> bit & 1 == 1;
            bits[word] |= 1 << bit;
            if twice {
                self.space(Severity::Wrong, "block is part of two pages", block);
            }
        }
    }

    fn uses(&self, run: Run) -> bool {
        (run.address..run.end()).any(|block| self.has(block))
    }

    fn has(&self, block: u64) -> bool {
        let bits = self.used.get(&(block / REGION_BLOCKS));
        bits.is_some_and(|bits| bits[(block % REGION_BLOCKS / 64) as usize] >> (block % 64) & 1 == 1)
    }

    /// Notes a page that a snapshot shows: it adds no count, but is read like pages of the live
    /// tree. Returns whether all pointers to the page agree.
    fn show(&mut self, pointer: Pointer, id: u64) -> bool {
        let Some(page) = self.pages.get_mut(&pointer.run.address) else { return true };
        if page.pointer.is_none() {
            (page.pointer, page.shown_by) = (Some(pointer), Some(id));
        }
        page.pointer == Some(pointer)
    }

    /// One more name of a page; marks its blocks the first time.
    fn name(&mut self, run: Run, pointer: Option<Pointer>, total: u64) {
        let new = NamedPage { pointer: None, shown_by: None, blocks: run.blocks, names: 0, plain: 0 };
        let page = self.pages.entry(run.address).or_insert(new);
        page.names += 1;
        page.pointer = page.pointer.or(pointer);
        let (first, same) = (page.names == 1, page.blocks == run.blocks);
        if first {
            self.mark(run, total);
        } else if !same {
            self.space(Severity::Wrong, "page is named with two lengths", run.address);
        }
    }
}

/// Trees of one version, and the allocator to compare them with.
pub(super) struct Auditor<'v> {
    pub(super) allocator: &'v Allocator,
    pub(super) medium: &'v VolumeContext,
    pub(super) state: Arc<State>,
}

impl Auditor<'_> {
    /// Findings when nothing changes meanwhile; see `Volume::audit`. `contradictions` are the
    /// findings about the counters.
    pub(super) fn audit(
        &self,
        chain: &CommitTail,
        contradictions: Vec<Finding>,
        full: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Audit> {
        let mut census = Census { findings: contradictions, ..Census::default() };
        self.count_everything(chain, &mut census)?;
        let tree = self.allocator.tree();
        let total = self.allocator.total();
        self.walk_nodes(&tree, TreeId::Space, total, &mut census)?;
        find_strays(&self.medium.store, &self.state, &tree, &mut |finding| census.find(finding))?;
        let compared = self.compare_space(&mut census);
        report(compared, FindingKind::Space, &mut census)?;
        if let Some(last) = census.last_dead.filter(|last| *last >= self.state.counters.next_dead) {
            let next = self.state.counters.next_dead;
            // Entries keep their sequences when they go to the snapshot before: each must be the
            // only one.
            let text = format!("the next dead-list entry is {next}, but {last} is there");
            if census.findings.iter().all(|finding| finding.detail != text) {
                census.find(Finding::new(FindingKind::Counter, Severity::Wrong, text));
            }
        }
        let compared = self.compare_counts(&mut census);
        report(compared, FindingKind::Count, &mut census)?;
        // Before the pages are read: pages that only a snapshot shows are named by its extents.
        let checked = self.check_snapshots(&mut census, total);
        report(checked, FindingKind::Snapshot, &mut census)?;
        if full {
            self.open_data_pages(&mut census, progress)?;
        }
        Ok(Audit { findings: census.findings, of_files: census.of_files, data: DataPages(census.pages) })
    }

    fn walk_nodes(&self, tree: &Tree, id: TreeId, total: u64, census: &mut Census) -> Result<()> {
        let lost = self.visit_nodes(tree, &mut |pointer| census.mark(pointer.run, total))?;
        lost.iter().for_each(|node| census.lose(id, node));
        Ok(())
    }

    /// Calls `f` with the pointer of every node; returns the nodes that cannot be read.
    fn visit_nodes(&self, tree: &Tree, f: &mut dyn FnMut(&Pointer)) -> Result<Vec<LostNode>> {
        let mut lost = Vec::new();
        let visit = &mut |pointer: &Pointer, _| {
            f(pointer);
            Ok(())
        };
        tree.visit_pages(&self.medium.store, visit, &mut |node| {
            lost.push(node);
            Ok(())
        })?;
        Ok(lost)
    }

    /// Everything but the space tree itself.
    fn count_everything(&self, chain: &CommitTail, census: &mut Census) -> Result<()> {
        let total = self.allocator.total();
        let trees = &self.state.trees;
        for (tree, id) in trees.each() {
            self.walk_nodes(tree, id, total, census)?;
        }
        for run in &chain.list_pages {
            census.mark(*run, total);
        }
        // The nodes that these pass by were told when their pages were visited.
        let extents = &mut |key: Key, value: &[u8]| {
            if key.kind == kind::EXTENT && key.object != 0 {
                match Extent::decode(value) {
                    Ok(extent) => census.name(extent.page.run, Some(extent.page), total),
                    Err(error) => {
                        census.incomplete = true;
                        let text = format!("inode {}: {error}", key.object);
                        census.find_of_files(Finding::new(FindingKind::Record, Severity::Wrong, text));
                    }
                }
            }
            Ok(())
        };
        trees.live.scan_surviving(&self.medium.store, extents, &mut |_| Ok(()))?;
        let dead = &mut |key: Key, value: &[u8]| {
            if key.kind == kind::DEAD {
                census.last_dead = census.last_dead.max(Some(key.sub));
                match DeadValue::decode(value) {
                    Ok(dead) => census.name(dead.run, None, total),
                    Err(error) => {
                        census.incomplete = true;
                        census.find(Finding::new(FindingKind::Record, Severity::Wrong, error.to_string()));
                    }
                }
            }
            Ok(())
        };
        trees.references.scan_surviving(&self.medium.store, dead, &mut |_| Ok(()))
    }

    fn compare_space(&self, census: &mut Census) -> Result<()> {
        for number in 0..self.allocator.total().div_ceil(REGION_BLOCKS) {
            let known = self.allocator.used_bits(number)?;
            let found = census.used.get(&number).map_or([0; REGION_WORDS], |bits| **bits);
            for (word, (known, found)) in known.iter().zip(found.iter()).enumerate() {
                let base = number * REGION_BLOCKS + word as u64 * 64;
                // An unreadable part may name this page.
                if known & !found != 0 && !census.incomplete {
                    let block = base + u64::from((known & !found).trailing_zeros());
                    census.space(Severity::Minor, "space map says used, but no page is there", block);
                }
                if found & !known != 0 {
                    let block = base + u64::from((found & !known).trailing_zeros());
                    census.space(Severity::Wrong, "space map says free, but a page is there", block);
                }
            }
        }
        let counted = self.allocator.used_blocks();
        if counted != census.used_blocks && !census.incomplete {
            let text = format!("blocks in use are counted wrong: record={counted} found={}", census.used_blocks);
            census.find(Finding::new(FindingKind::Counter, Severity::Minor, text));
        }
        Ok(())
    }

    fn compare_counts(&self, census: &mut Census) -> Result<()> {
        let tree = &self.state.trees.references;
        let mut wrong = Vec::new();
        let find = |severity, text: String, block| Finding::new(FindingKind::Count, severity, text).at_block(block);
        for (address, page) in &census.pages {
            let count = reference_count(tree, &self.medium.store, *address)?;
            let named = page.names;
            if count != named && !census.incomplete {
                let text = format!("page is counted wrong: block={address} record={count} found={named}");
                // A page that is counted too often is never freed; the other way round it is freed
                // too early.
                let severity = if count < named { Severity::Wrong } else { Severity::Minor };
                wrong.push(find(severity, text, *address));
            }
        }
        let counts = &mut |key: Key, value: &[u8]| {
            if key.kind != kind::REFERENCE {
                return Ok(());
            }
            let nothing = |block| find(Severity::Minor, format!("a count is kept for no page: block={block}"), block);
            let value = match ReferenceValue::decode(value) {
                Ok(value) => value,
                Err(error) => {
                    wrong.push(find(Severity::Wrong, error.to_string(), key.sub));
                    return Ok(());
                }
            };
            let Some(end) = key.sub.checked_add(u64::from(value.run_blocks)) else {
                wrong.push(nothing(key.sub));
                return Ok(());
            };
            let mut at = key.sub;
            while at < end {
                let Some(page) = census.pages.get(&at) else {
                    if !census.incomplete {
                        wrong.push(nothing(at));
                    }
                    break;
                };
                at += page.blocks;
            }
            Ok(())
        };
        tree.scan_surviving(&self.medium.store, counts, &mut |_| Ok(()))?;
        wrong.sort_by_key(|finding| finding.block);
        wrong.into_iter().for_each(|finding| census.find(finding));
        Ok(())
    }

    /// Reads every page of file data, once.
    fn open_data_pages(&self, census: &mut Census, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let mut addresses: Vec<u64> = census.pages.keys().copied().collect();
        addresses.sort_unstable();
        let mut done = 0;
        for address in addresses {
            let Some(page) = census.pages.get_mut(&address) else { continue };
            done += page.blocks;
            let shown_by = page.shown_by;
            if let Some(pointer) = page.pointer {
                match self.open_data_page(&pointer) {
                    Ok(plain) => page.plain = plain,
                    Err(error) if error.is_page_loss() => match shown_by {
                        Some(id) => {
                            let text = format!("snapshot {id} shows file data that cannot be read: {error}");
                            let finding = Finding::new(FindingKind::Snapshot, Severity::Lost, text);
                            census.find(finding.on_page(&pointer));
                        }
                        None => {
                            let finding = Finding::new(FindingKind::DataLost, Severity::Lost, error.to_string());
                            census.find_of_files(finding.on_page(&pointer));
                        }
                    },
                    Err(error) => return Err(error),
                }
            }
            progress(done, census.used_blocks);
        }
        Ok(())
    }

    /// Answers how many bytes of file data it has.
    fn open_data_page(&self, pointer: &Pointer) -> Result<u32> {
        let opened = self.medium.pager.open_page(pointer)?;
        if !opened.prologue.has_chunks() {
            return Err(Error::damaged(format!("page of another kind: block={}", pointer.run.address)));
        }
        let table = opened.table()?;
        for chunk in 0..table.chunks.len() {
            opened.read_chunk(chunk)?;
        }
        Ok(table.plain_length)
    }

    /// Checks that every page of a snapshot is still in use, and that every dead-list page is in
    /// its snapshot.
    fn check_snapshots(&self, census: &mut Census, total: u64) -> Result<()> {
        let find = |severity, text: String| Finding::new(FindingKind::Snapshot, severity, text);
        for (id, snapshot) in snapshots_of(&self.state.trees.snapshots, &self.medium.store)? {
            if is_being_removed(&snapshot) {
                continue;
            }
            let tree = snapshot_tree(&snapshot);
            let (mut shown, mut torn) = (HashSet::new(), Vec::new());
            // Entries younger than the snapshot claims to be go to no dead list when they leave the
            // live tree.
            let mut younger = None;
            let lost = self.visit_nodes(&tree, &mut |pointer| {
                shown.insert(pointer.run);
                younger = younger.or((pointer.generation > snapshot.generation).then_some(pointer.run.address));
            })?;
            let whole = lost.is_empty();
            for node in lost {
                let text = format!("records of snapshot {id} cannot be read: {}", node.error);
                census.find(find(Severity::Lost, text).on_page(&node.pointer));
            }
            let extents = &mut |key: Key, value: &[u8]| {
                if key.kind == kind::EXTENT && key.object != 0 {
                    let Extent { page, born, .. } = Extent::decode(value)?;
                    shown.insert(page.run);
                    younger = younger.or((born > snapshot.generation).then_some(page.run.address));
                    if !census.show(page, id) {
                        torn.push(page.run.address);
                    }
                }
                Ok(())
            };
            let scanned = tree.scan_surviving(&self.medium.store, extents, &mut |_| Ok(()));
            let whole = whole && scanned.is_ok();
            report(scanned, FindingKind::Snapshot, census)?;
            if let Some(block) = younger {
                let of = snapshot.generation.0;
                let text = format!("snapshot {id} is of commit {of}, but shows a page of a later one: block={block}");
                census.find(find(Severity::Wrong, text).at_block(block));
            }
            if known(last_ino(&tree, &self.medium.store))?.is_some_and(|ino| ino >= self.state.counters.next_ino) {
                let text = format!("snapshot {id} shows an inode number that was not yet given out");
                census.find(find(Severity::Wrong, text));
            }
            for block in torn {
                let text = format!("snapshot {id} shows a page that others know by another tag: block={block}");
                census.find(find(Severity::Wrong, text).at_block(block));
            }
            let unused =
                |run: &Run| !(run.is_page_space(total) && (run.address..run.end()).all(|block| census.has(block)));
            let mut unused: Vec<u64> = shown.iter().filter(|run| unused(run)).map(|run| run.address).collect();
            unused.sort_unstable();
            if census.incomplete {
                unused.clear();
            }
            for block in unused {
                let text = format!("snapshot {id} shows a page that is not in use: block={block}");
                census.find(find(Severity::Wrong, text).at_block(block));
            }
            // An unreadable part may keep or show any page.
            if whole && !census.incomplete {
                self.check_dead_list(id, &shown, census)?;
            }
        }
        Ok(())
    }

    /// Finds dead-list pages that the snapshot does not show. They stay for ever: they cost space,
    /// and deleted data in them can still be read with the key.
    fn check_dead_list(&self, id: u64, shown: &HashSet<Run>, census: &mut Census) -> Result<()> {
        let key = |sub| Key { object: id, kind: kind::DEAD, sub };
        let listed = &mut |_: Key, value: &[u8]| {
            // An entry that does not decode was reported when references were counted.
            if let Ok(DeadValue { run, .. }) = DeadValue::decode(value)
                && !shown.contains(&run)
            {
                let text = format!("snapshot {id} keeps a page that it does not show: block={}", run.address);
                census.find(Finding::new(FindingKind::Snapshot, Severity::Minor, text).at_block(run.address));
            }
            Ok(ControlFlow::Continue(()))
        };
        let scanned = self.state.trees.references.scan(&self.medium.store, key(0), key(u64::MAX), listed);
        report(scanned, FindingKind::Snapshot, census)
    }

    /// Rebuilds the space map from the trees, when records of the chain since the checkpoint are
    /// lost. Reads every node.
    pub(super) fn rebuild_space(&self, chain: &mut CommitTail) -> Result<()> {
        chain.list_pages.clear();
        chain.force_checkpoint = true;
        let mut census = Census::default();
        self.count_everything(chain, &mut census)?;
        if let Some(finding) = census.findings.first().or(census.of_files.first()) {
            return Err(Error::damaged(format!("the space map cannot be rebuilt: {finding}")));
        }
        // The old map's own pages are given up; they wait like everything that the next commit
        // replaces.
        let mut old = Vec::new();
        for node in self.visit_nodes(&self.allocator.give_up_map(), &mut |pointer| old.push(pointer.run))? {
            tracing::warn!("the old space map is not whole: {}", node.error);
        }
        // Blocks that a record or the old map itself gives as free are free only where no tree has
        // a page.
        let (allocator, durable, total) = (self.allocator, self.medium.versions.durable(), self.allocator.total());
        let free = |run: &Run| in_space(*run, total, &self.medium.pager) && !census.uses(*run);
        allocator.recover_pending_frees(durable.generation, durable.freed.iter().copied().filter(free).collect());
        allocator.recover_pending_frees(durable.generation, old.into_iter().filter(free).collect());
        // The newest record still names them, and the next opening verifies them: list pages above
        // all.
        let listed = durable.allocated.iter().map(|(run, _)| *run).filter(free);
        allocator.recover_pending_frees(durable.generation, listed.collect());
        let used = |number| census.used.get(&number).map_or([0; REGION_WORDS], |bits| **bits);
        allocator.rebuild(census.used_blocks, used)
    }
}

/// The first one that is left out leaves a word that there are more.
fn push_bounded(findings: &mut Vec<Finding>, finding: Finding) {
    match findings.len() {
        0..MAX_FINDINGS => findings.push(finding),
        MAX_FINDINGS => findings.push(Finding::new(FindingKind::More, Severity::Wrong, "there are more findings")),
        _ => {}
    }
}

/// Damage becomes a finding; anything else ends the audit.
fn report(result: Result<()>, kind: FindingKind, census: &mut Census) -> Result<()> {
    match result {
        Err(Error::Damaged(text)) => {
            census.find(Finding::new(kind, Severity::Wrong, text));
            Ok(())
        }
        other => other,
    }
}

// ---- records in trees where no writer puts them (specification 6.2); readers skip them ----

/// Returns whether a key of this kind belongs to the tree. The tree of files is checked by the walk
/// over the files.
fn belongs(tree: TreeId, key: Key) -> bool {
    match (tree, key.kind) {
        (TreeId::Live, _) | (TreeId::References, kind::DEAD) => true,
        (TreeId::References, kind::REFERENCE) | (TreeId::History, kind::HISTORY) => key.object == 0,
        (TreeId::Snapshots, kind::SNAPSHOT) | (TreeId::Space, kind::SPACE) => key.sub == 0,
        _ => false,
    }
}

/// Reports each record that does not belong into its tree. Unreadable nodes are reported by the
/// page count.
fn find_strays(store: &NodeStore, state: &State, space: &Tree, found: &mut dyn FnMut(Finding)) -> Result<()> {
    let trees = &state.trees;
    for (tree, id) in [
        (&trees.references, TreeId::References),
        (&trees.snapshots, TreeId::Snapshots),
        (&trees.history, TreeId::History),
        (space, TreeId::Space),
    ] {
        let look = &mut |key: Key, _: &[u8]| {
            if !belongs(id, key) {
                let (number, Key { object, kind, sub }) = (id as u8, key);
                let text = format!("tree {number} has a record that does not belong there: ({object}, {kind}, {sub})");
                found(Finding::new(FindingKind::Record, Severity::Wrong, text));
            }
            Ok(())
        };
        tree.scan_surviving(store, look, &mut |_| Ok(()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_told_of_once() {
        let mut census = Census::default();
        for block in 0..MAX_FINDINGS as u64 {
            census.space(Severity::Wrong, "a finding", block);
            census.find_of_files(Finding::new(FindingKind::Record, Severity::Wrong, "a finding"));
        }
        let told = |findings: &[Finding]| findings.iter().filter(|finding| finding.kind == FindingKind::More).count();
        assert_eq!((told(&census.findings), told(&census.of_files)), (0, 0));
        for block in 0..5 {
            census.space(Severity::Wrong, "one too many", block);
            census.find_of_files(Finding::new(FindingKind::Record, Severity::Wrong, "one too many"));
        }
        for findings in [&census.findings, &census.of_files] {
            assert_eq!((findings.len(), told(findings)), (MAX_FINDINGS + 1, 1));
            assert_eq!(findings.last().unwrap().kind, FindingKind::More);
        }
    }
}
