//! Random writes, clones, deletions, snapshots, restores and destructions against a model, with
//! exact counts and space after each stage.
//!
//! `SEED=17 STEPS=100000 cargo test -p lockbox --lib txn::tests::model` goes on for longer.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::support::*;
use crate::env::{seeds, variable};
use crate::storage::MemoryStorage;
use crate::txn::state::snapshot_tree;
use crate::txn::{View, Volume};

struct Snapshots(BTreeMap<u64, Content>);

fn check_all(volume: &Volume, live: &Content, snapshots: &Snapshots) {
    assert_live(volume, live);
    let listed = volume.snapshots().unwrap();
    assert_eq!(listed.iter().map(|(id, _)| *id).collect::<Vec<_>>(), snapshots.0.keys().copied().collect::<Vec<_>>());
    for (id, value) in &listed {
        let tree = snapshot_tree(value);
        assert_content(volume, View { tree: &tree, store: volume.store(), finger: None }, &snapshots.0[id]);
    }
    assert_sound(volume);
}

fn destroy_some(volume: &Volume, snapshots: &mut Snapshots, dice: &Dice) {
    let ids: Vec<u64> = snapshots.0.keys().copied().collect();
    let id = ids[dice.below(ids.len() as u64) as usize];
    volume.destroy_snapshot(id).unwrap();
    snapshots.0.remove(&id);
}

/// Snapshots that there are at once at most.
const MOST: usize = 20;

/// Answers how many snapshots there were at once.
fn run(seed: u64, steps: u64) -> usize {
    let mut most = 0;
    let dice = Dice::new(seed);
    let storage = Arc::new(MemoryStorage::new());
    let mut volume = create(storage.clone(), &dice);
    let mut live = Content::new();
    let mut snapshots = Snapshots(BTreeMap::new());
    for step in 0..steps {
        let target = (2 + dice.below(6), dice.below(12));
        match dice.below(100) {
            0..45 => {
                let (seed, length) = (dice.0.next_u64(), 1 + dice.below(40_000) as usize);
                put(&volume, target.0, target.1, seed, length).unwrap();
                live.insert(target, (seed, length));
            }
            45..60 => {
                let removed = delete(&volume, target.0, target.1).unwrap();
                assert_eq!(removed, live.remove(&target).is_some());
            }
            60..72 => {
                let from = (2 + dice.below(6), dice.below(12));
                let state = volume.state();
                if clone(&volume, volume.view(&state), from, target).unwrap() {
                    live.insert(target, live[&from]);
                }
            }
            72..78 => {
                // Restore one slot from a snapshot.
                let all = volume.snapshots().unwrap();
                if !all.is_empty() {
                    let (id, value) = &all[dice.below(all.len() as u64) as usize];
                    let from = (2 + dice.below(6), dice.below(12));
                    let tree = snapshot_tree(value);
                    if clone(&volume, View { tree: &tree, store: volume.store(), finger: None }, from, target).unwrap()
                    {
                        live.insert(target, snapshots.0[id][&from]);
                    }
                }
            }
            78..87 if snapshots.0.len() < MOST => {
                let id = volume.take_snapshot(format!("of step {step}").as_bytes()).unwrap();
                snapshots.0.insert(id, live.clone());
                most = most.max(snapshots.0.len());
            }
            87..91 if !snapshots.0.is_empty() => {
                destroy_some(&volume, &mut snapshots, &dice);
            }
            91..95 => {
                volume.commit().unwrap();
            }
            95..97 => {
                volume.maintain().unwrap();
            }
            97 => {
                volume.close().unwrap();
                drop(volume);
                volume = open(storage.clone(), &dice);
            }
            _ => {}
        }
        if step % 40 == 39 {
            check_all(&volume, &live, &snapshots);
        }
    }
    check_all(&volume, &live, &snapshots);
    while !snapshots.0.is_empty() {
        destroy_some(&volume, &mut snapshots, &dice);
    }
    for (file, slot) in live.keys() {
        assert!(delete(&volume, *file, *slot).unwrap());
    }
    assert_sound(&volume);
    volume.close().unwrap();
    let volume = open(storage, &dice);
    // Nothing is left but the nodes of the history and space trees.
    assert!(volume.allocator().space().1 <= 16, "blocks leaked: {:?}", volume.allocator().space());
    most
}

#[test]
fn snapshots_clones_and_destruction_keep_content_counts_and_space_exact() {
    let steps = variable("STEPS").unwrap_or(500);
    let most = seeds(1..=6).map(|seed| run(seed, steps)).max();
    assert_eq!(most, Some(MOST), "as many as there are to be");
}
