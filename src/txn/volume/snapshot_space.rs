//! Snapshot space usage: the space that removal of a set of snapshots would free.
//!
//! # Why the dead lists tell it
//! A page that no snapshot of the rest shows, nor the live tree, is named by entries of dead lists alone: so many as its count says. Such an entry, on
//! the list of snapshot s with birth b, stands for a name that s shows and that every older one shows whose generation is b or later; generations
//! rise with ids. Each removal hands it to the snapshot before, or drops it when that is older than b (specification section 8). So when all of a set are
//! removed, in whatever order, the entry comes to the newest one before s that stays, and is dropped exactly when s goes and b is later than that, or
//! there is none. A page is freed when all that its count counts is dropped.
//!
//! A removal that has begun and not ended goes on anyway: its snapshot is in every set, and what is freed without the others is not counted.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::Volume;
use crate::error::Result;
use crate::format::values::{DeadValue, SnapshotValue};
use crate::format::{BLOCK, Generation, Key, Run, kind};
use crate::txn::references;
use crate::txn::snapshot_list::{before, is_being_removed, snapshots_of};

/// Dead-list entries read in one version when they are summed up.
const STEP: usize = 4096;

/// Of a page with several counts: entries that the set drops, and how many of them are dropped in any case.
#[derive(Default)]
struct Dropped {
    all: u64,
    anyway: u64,
}

#[derive(Default)]
struct Sum {
    blocks: u64,
    shared: BTreeMap<Run, Dropped>,
}

impl Volume {
    /// Bytes of the pages that snapshots of this set show and nothing else does, be it several of them. It is a figure: each piece of a list is asked for in
    /// the version of its moment, so that no freed page waits for the end.
    pub(crate) fn held_by_snapshots(&self, is_in: &dyn Fn(u64) -> bool) -> Result<u64> {
        let mut sum = Sum::default();
        for (id, snapshot) in self.snapshots()? {
            if is_being_removed(&snapshot) || is_in(id) {
                self.add_list(id, is_in, &mut sum)?;
            }
        }
        let (state, store) = (self.state(), &self.medium.store);
        for (run, dropped) in sum.shared {
            let count = references::count(&state.trees.references, store, run.address)?;
            if dropped.anyway < count && count <= dropped.all {
                sum.blocks = sum.blocks.saturating_add(run.blocks);
            }
        }
        Ok(sum.blocks.saturating_mul(BLOCK))
    }

    fn add_list(&self, id: u64, is_in: &dyn Fn(u64) -> bool, sum: &mut Sum) -> Result<()> {
        let store = &self.medium.store;
        let (mut from, to) = (Key::new(id, kind::DEAD, 0), Key::new(id, kind::DEAD, u64::MAX));
        loop {
            let state = self.state();
            let trees = &state.trees;
            let all = snapshots_of(&trees.snapshots, store)?;
            let stays = stays_before(&all, id, is_in);
            let goes = all.iter().any(|(other, snapshot)| *other == id && is_being_removed(snapshot));
            let heir = before(&all, id).map(|(_, generation)| generation);
            let mut read = 0;
            trees.references.scan(store, from, to, &mut |key, value| {
                let DeadValue { run, born } = DeadValue::decode(value)?;
                let is_newer_than = |generation: Option<Generation>| generation.is_none_or(|it| born > it);
                if is_newer_than(stays) {
                    let anyway = goes && is_newer_than(heir);
                    match references::count(&trees.references, store, run.address)? {
                        1 if anyway => {}
                        1 => sum.blocks = sum.blocks.saturating_add(run.blocks),
                        _ => {
                            let dropped = sum.shared.entry(run).or_default();
                            dropped.all += 1;
                            dropped.anyway += u64::from(anyway);
                        }
                    }
                }
                from.sub = key.sub.saturating_add(1);
                read += 1;
                Ok(if read < STEP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
            })?;
            if read < STEP {
                return Ok(());
            }
        }
    }
}

/// The generation of the newest one before `id` that is neither in the set nor being removed.
fn stays_before(all: &[(u64, SnapshotValue)], id: u64, is_in: &dyn Fn(u64) -> bool) -> Option<Generation> {
    let stays = all.iter().rev().find(|(other, one)| *other < id && !is_being_removed(one) && !is_in(*other));
    stays.map(|(_, snapshot)| snapshot.generation)
}
