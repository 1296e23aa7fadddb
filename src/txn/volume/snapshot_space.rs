//! Snapshot space usage: the space that removal of a set of snapshots would free.
//!
//! # Why the dead lists suffice
//! A page that neither a remaining snapshot nor the live tree shows is named by entries of dead
//! lists alone: as many as its count. Such an entry, on the list of snapshot s with birth b, stands
//! for a reference in s and in every older snapshot whose generation is b or later; generations
//! rise with ids.
//!
//! Each removal moves the entry to the snapshot before, or drops it when that is older than b
//! (specification section 8). So when a whole set is removed, in any order, the entry moves to the
//! newest remaining snapshot before s. It is dropped exactly when s is removed and b is later than
//! that snapshot, or there is none. A page is freed when all entries of its count are dropped.
//!
//! A removal that has begun and not ended continues anyway: its snapshot is in every set, and pages
//! that are freed without the others are not counted.

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

/// Dropped entries of a page with several counts: all that the set drops, and those dropped in any
/// case.
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
    /// Returns the bytes of the pages that only snapshots of this set show, one or several of them.
    /// The result is an estimate: each piece of a list is read in the version current at that time,
    /// so that no freed page waits for the end.
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
