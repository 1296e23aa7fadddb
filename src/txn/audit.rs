//! Recomputes from the trees which blocks are in use and how often each page is named: for `check`, and to rebuild a lost space map.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;

use super::Volume;
use super::commit::{Chain, Purpose};
use super::recovery::in_space;
use super::references;
use super::state::State;
use crate::btree::Tree;
use crate::error::{Error, Result};
use crate::format::space::{REGION_WORDS, RegionBits};
use crate::format::values::{DeadValue, Extent, ReferenceValue};
use crate::format::{Key, Pointer, REGION_BLOCKS, Run, kind};

/// Findings reported at most; a broken archive would otherwise fill the memory with sentences.
const MAX_FINDINGS: usize = 1000;

/// What walking all trees found. Memory grows with the number of data pages (about 50 bytes each).
#[derive(Default)]
struct Census {
    used: BTreeMap<u64, Box<RegionBits>>,
    used_blocks: u64,
    /// Data pages and dead pages: address -> (pointer when known, blocks, times named).
    pages: HashMap<u64, (Option<Pointer>, u64, u64)>,
    findings: Vec<String>,
}

impl Census {
    fn find(&mut self, finding: String) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        }
    }

    fn mark(&mut self, run: Run, total: u64) {
        if !run.is_page_space(total) {
            self.find(format!("page outside of the archive: block={} blocks={}", run.address, run.blocks));
            return;
        }
        self.used_blocks += run.blocks;
        for block in run.address..run.end() {
            let bits = self.used.entry(block / REGION_BLOCKS).or_insert_with(|| Box::new([0; REGION_WORDS]));
            let (word, bit) = ((block % REGION_BLOCKS / 64) as usize, block % 64);
            if bits[word] >> bit & 1 == 1 {
                let text = format!("block is part of two pages: block={block}");
                if self.findings.len() < MAX_FINDINGS {
                    self.findings.push(text);
                }
            }
            bits[word] |= 1 << bit;
        }
    }

    fn uses(&self, run: Run) -> bool {
        (run.address..run.end()).any(|block| {
            let bits = self.used.get(&(block / REGION_BLOCKS));
            bits.is_some_and(|bits| bits[(block % REGION_BLOCKS / 64) as usize] >> (block % 64) & 1 == 1)
        })
    }

    /// One more name of a page; marks its blocks the first time.
    fn name(&mut self, run: Run, pointer: Option<Pointer>, total: u64) {
        let entry = self.pages.entry(run.address).or_insert((None, run.blocks, 0));
        entry.2 += 1;
        entry.0 = entry.0.or(pointer);
        let (first, same) = (entry.2 == 1, entry.1 == run.blocks);
        if first {
            self.mark(run, total);
        } else if !same {
            self.find(format!("page is named with two lengths: block={}", run.address));
        }
    }
}

impl Volume {
    /// Recomputes from the live tree, snapshots and dead lists which blocks are in use and every page's count, and compares with the
    /// space map and reference records; `full` opens every page. Findings are sentences; empty means sound.
    /// Writers wait meanwhile. `progress` gets (blocks done, blocks in use).
    pub(crate) fn check_space(&self, full: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<Vec<String>> {
        if self.read_only {
            return self.audit(&self.commits.lock().chain.clone(), full, progress);
        }
        self.as_leader(|chain| {
            let mut writer = self.writer.lock();
            self.run_commit(Purpose::Changes, chain, Some(&mut writer))?;
            self.audit(chain, full, progress)
        })
    }

    fn audit(&self, chain: &Chain, full: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<Vec<String>> {
        let state = self.state();
        let mut census = Census::default();
        self.count_everything(&state, chain, &mut census)?;
        let tree = self.space_tree.lock().clone();
        let total = self.space.lock().total();
        self.walk_nodes(&tree, total, &mut census)?;
        self.compare_space(&mut census)?;
        self.compare_counts(&state, &mut census)?;
        if full {
            self.open_data_pages(&mut census, progress)?;
        }
        self.check_snapshots(&mut census, total)?;
        Ok(census.findings)
    }

    fn walk_nodes(&self, tree: &Tree, total: u64, census: &mut Census) -> Result<()> {
        let walked = tree.visit_pages(&self.store, true, &mut |pointer, _| {
            census.mark(pointer.run, total);
            Ok(())
        });
        report(walked, census)
    }

    /// Everything but the space tree itself.
    fn count_everything(&self, state: &State, chain: &Chain, census: &mut Census) -> Result<()> {
        let total = self.space.lock().total();
        let trees = &state.trees;
        for tree in [&trees.live, &trees.references, &trees.snapshots, &trees.history] {
            self.walk_nodes(tree, total, census)?;
        }
        for run in &chain.list_pages {
            census.mark(*run, total);
        }
        let scanned = trees.live.scan(&self.store, Key::MIN, Key::MAX, &mut |key, value| {
            if key.kind == kind::EXTENT && key.object != 0 {
                let extent = Extent::decode(value)?;
                census.name(extent.page.run, Some(extent.page), total);
            }
            Ok(ControlFlow::Continue(()))
        });
        report(scanned, census)?;
        let scanned = trees.references.scan(&self.store, Key::MIN, Key::MAX, &mut |key, value| {
            if key.kind == kind::DEAD {
                census.name(DeadValue::decode(value)?.run, None, total);
            }
            Ok(ControlFlow::Continue(()))
        });
        report(scanned, census)
    }

    fn compare_space(&self, census: &mut Census) -> Result<()> {
        let total = self.space.lock().total();
        for number in 0..total.div_ceil(REGION_BLOCKS) {
            self.load_region(number)?;
            let space = self.space.lock();
            let known = space.used_bits(number).copied().unwrap_or([0; REGION_WORDS]);
            drop(space);
            let found = census.used.get(&number).map_or([0; REGION_WORDS], |bits| **bits);
            for (word, (known, found)) in known.iter().zip(found.iter()).enumerate() {
                let base = number * REGION_BLOCKS + word as u64 * 64;
                if known & !found != 0 {
                    let block = base + u64::from((known & !found).trailing_zeros());
                    census.find(format!("space map says used, but no page is there: block={block}"));
                }
                if found & !known != 0 {
                    let block = base + u64::from((found & !known).trailing_zeros());
                    census.find(format!("space map says free, but a page is there: block={block}"));
                }
            }
        }
        let counted = self.space.lock().used_blocks();
        if counted != census.used_blocks {
            census.find(format!("blocks in use are counted wrong: record={counted} found={}", census.used_blocks));
        }
        Ok(())
    }

    fn compare_counts(&self, state: &State, census: &mut Census) -> Result<()> {
        let tree = &state.trees.references;
        let mut wrong = Vec::new();
        for (address, (_, _, named)) in &census.pages {
            let count = references::count(tree, &self.store, *address)?;
            if count != *named {
                wrong.push(format!("page is counted wrong: block={address} record={count} found={named}"));
            }
        }
        let scanned = tree.scan(&self.store, Key::MIN, Key::MAX, &mut |key, value| {
            if key.kind != kind::REFERENCE {
                return Ok(ControlFlow::Continue(()));
            }
            let value = ReferenceValue::decode(value)?;
            let (mut at, end) = (key.sub, key.sub.saturating_add(u64::from(value.run_blocks)));
            while at < end {
                let Some((_, blocks, _)) = census.pages.get(&at) else {
                    wrong.push(format!("a count is kept for no page: block={at}"));
                    break;
                };
                at += blocks;
            }
            Ok(ControlFlow::Continue(()))
        });
        report(scanned, census)?;
        wrong.into_iter().for_each(|finding| census.find(finding));
        Ok(())
    }

    fn open_data_pages(&self, census: &mut Census, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let mut pages: Vec<(u64, Option<Pointer>, u64)> =
            census.pages.iter().map(|(address, (pointer, blocks, _))| (*address, *pointer, *blocks)).collect();
        pages.sort_unstable_by_key(|page| page.0);
        let mut done = 0;
        for (_, pointer, blocks) in pages {
            if let Some(pointer) = pointer {
                match self.open_data_page(&pointer) {
                    Err(Error::Damaged(text)) => census.find(text),
                    other => other?,
                }
            }
            done += blocks;
            progress(done, census.used_blocks);
        }
        Ok(())
    }

    fn open_data_page(&self, pointer: &Pointer) -> Result<()> {
        let opened = self.pager.open_page(pointer)?;
        if !opened.prologue.has_cells() {
            return Err(Error::damaged(format!("page of another kind: block={}", pointer.run.address)));
        }
        for cell in 0..opened.table()?.cells.len() {
            opened.read_cell(cell)?;
        }
        Ok(())
    }

    /// Every page of a kept root must still be in use.
    fn check_snapshots(&self, census: &mut Census, total: u64) -> Result<()> {
        for (id, snapshot) in self.snapshots()? {
            if snapshot.name.is_empty() {
                continue;
            }
            let tree = self.snapshot_tree(&snapshot);
            let mut runs = Vec::new();
            let walked = tree.visit_pages(&self.store, true, &mut |pointer, _| {
                runs.push(pointer.run);
                Ok(())
            });
            report(walked, census)?;
            let scanned = tree.scan(&self.store, Key::MIN, Key::MAX, &mut |key, value| {
                if key.kind == kind::EXTENT && key.object != 0 {
                    runs.push(Extent::decode(value)?.page.run);
                }
                Ok(ControlFlow::Continue(()))
            });
            report(scanned, census)?;
            for run in runs {
                let whole = run.is_page_space(total)
                    && (run.address..run.end()).all(|block| {
                        let word = (block % REGION_BLOCKS / 64) as usize;
                        census
                            .used
                            .get(&(block / REGION_BLOCKS))
                            .is_some_and(|bits| bits[word] >> (block % 64) & 1 == 1)
                    });
                if !whole {
                    census.find(format!("snapshot {id} shows a page that is not in use: block={}", run.address));
                }
            }
        }
        Ok(())
    }

    /// Makes the space map anew from the trees, when records of the chain since the checkpoint are lost. Reads every node.
    pub(super) fn rebuild_space(&self, chain: &mut Chain) -> Result<()> {
        chain.list_pages.clear();
        chain.force_checkpoint = true;
        let state = self.state();
        let mut census = Census::default();
        self.count_everything(&state, chain, &mut census)?;
        if let Some(finding) = census.findings.first() {
            return Err(Error::damaged(format!("the space map cannot be rebuilt: {finding}")));
        }
        // The old map's own pages are given up; they wait like everything that the next commit replaces.
        let mut old = Vec::new();
        let old_tree = std::mem::replace(&mut *self.space_tree.lock(), Tree::empty(crate::format::TreeId::Space));
        let walked = old_tree.visit_pages(&self.store, true, &mut |pointer, _| {
            old.push(pointer.run);
            Ok(())
        });
        if let Err(error) = walked {
            tracing::warn!("the old space map is not whole: {error}");
        }
        let durable = self.durable.load();
        let mut space = self.space.lock();
        space.drop_pending(census.used_blocks);
        // What a record says to be free, and what the old map says of itself, is free only where no tree has a page.
        let total = space.total();
        let free = |run: &Run| in_space(*run, total) && !census.uses(*run);
        space.recover_waiting(durable.generation, durable.freed.iter().copied().filter(free).collect());
        space.recover_waiting(durable.generation, old.into_iter().filter(free).collect());
        // The newest record still names them, and the next opening verifies them: list pages above all.
        let listed = durable.allocated.iter().map(|(run, _)| *run).filter(free);
        space.recover_waiting(durable.generation, listed.collect());
        for number in 0..total.div_ceil(REGION_BLOCKS) {
            let bits = census.used.get(&number).map_or([0; REGION_WORDS], |bits| **bits);
            space.install_rebuilt(number, &bits, &**self.pager.storage())?;
        }
        Ok(())
    }
}

/// Damage becomes a finding; anything else ends the audit.
fn report(result: Result<()>, census: &mut Census) -> Result<()> {
    match result {
        Err(Error::Damaged(text)) => {
            census.find(text);
            Ok(())
        }
        other => other,
    }
}
