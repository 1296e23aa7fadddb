//! Compares the counters of a commit record with its trees (specification 9.1 rules 13 to
//! 16).
//!
//! A number that is to be given next is above all that were given. One that is too low makes the
//! next change replace a record that is there: a new file takes over an inode with all that it has,
//! a snapshot inherits the dead list of another one. A snapshot that the record does not name, or
//! names with a lower generation, loses its pages to the next change. So a writer compares before
//! it writes anything. Keys ascend, so the last record of each tree tells; a damaged part proves
//! nothing, and a writer that changes it meets the damage.

use super::finding::{Finding, FindingKind, Severity};
use super::log::Logged;
use super::state::{Counters, Trees, is_being_removed, snapshots_of};
use crate::btree::{NodeStore, Tree};
use crate::error::{Error, Result};
use crate::format::record::CommitRecord;
use crate::format::{Generation, Key, TreeId, kind};

/// Returns the contradictions within the record itself: generations that are not before its own.
pub(super) fn of_record(record: &CommitRecord) -> Vec<Finding> {
    let (generation, session) = (record.generation.0, record.session_first.0);
    let newest = record.newest_snapshot.0;
    let mut wrong = Vec::new();
    if !(1..=generation).contains(&session) {
        wrong.push(format!("commit {generation} is of a session that begins with commit {session}"));
    }
    if generation == 1 && record.previous_tag != [0; 16] {
        wrong.push("commit 1 extends another one".to_owned());
    }
    if newest > generation {
        wrong.push(format!("commit {generation} has a newest snapshot of commit {newest}"));
    }
    if let Some(origin) = record.origin.filter(|origin| origin.generation.0 >= generation) {
        wrong.push(format!("commit {generation} is of a backup of commit {}", origin.generation.0));
    }
    let roots = TreeId::ALL.into_iter().map(|tree| record.roots[tree].pointer.run);
    let pages = roots.chain(record.allocated.iter().map(|(run, _)| *run));
    if let Some(page) = pages.max_by_key(|run| run.end()).filter(|run| run.end() > record.total_blocks) {
        let blocks = record.total_blocks;
        wrong.push(format!("commit {generation} is of a file of {blocks} blocks, but names block {}", page.end() - 1));
    }
    wrong.into_iter().map(finding).collect()
}

/// Returns the contradictions between the counters and the trees of the same version. Reads the
/// last leaf of the trees 1 and 2, and all snapshots.
///
/// # Errors
/// Only errors that are neither damage nor a failed read.
pub(super) fn of_trees(
    counters: &Counters,
    trees: &Trees,
    logged: Option<&Logged>,
    store: &NodeStore,
) -> Result<Vec<Finding>> {
    let mut wrong = Vec::new();
    let in_tree = known(last_ino(&trees.live, store))?.unwrap_or(0);
    let last = in_tree.max(logged.map_or(0, Logged::last_ino));
    if last >= counters.next_ino {
        wrong.push(format!("the next inode number is {}, but inode {last} is there", counters.next_ino));
    }
    of_snapshots(counters, trees, store, &mut wrong)?;
    Ok(wrong.into_iter().map(finding).collect())
}

fn of_snapshots(counters: &Counters, trees: &Trees, store: &NodeStore, wrong: &mut Vec<String>) -> Result<()> {
    let Counters { next_snapshot, next_dead, newest_snapshot, newest_snapshot_id: id, .. } = *counters;
    if let Some(all) = known(snapshots_of(&trees.snapshots, store))? {
        if let Some((last, _)) = all.last().filter(|(last, _)| *last >= next_snapshot) {
            wrong.push(format!("the next snapshot is {next_snapshot}, but snapshot {last} is there"));
        }
        let newest = all.iter().rev().find(|(_, snapshot)| !is_being_removed(snapshot));
        let there = newest.map_or((0, Generation(0)), |(id, snapshot)| (*id, snapshot.generation));
        if there != (id, newest_snapshot) {
            let of = |(id, generation): (u64, Generation)| format!("{id} of commit {}", generation.0);
            let (there, said) = (of(there), of((id, newest_snapshot)));
            wrong.push(format!("the newest snapshot is {there}, but the commit says {said}"));
        }
        let mut before = Generation(0);
        for (id, snapshot) in all.iter().filter(|(_, snapshot)| !is_being_removed(snapshot)) {
            let (generation, root) = (snapshot.generation, snapshot.root.pointer.generation);
            if root > generation {
                wrong.push(format!("snapshot {id} is of commit {}, but its root of commit {}", generation.0, root.0));
            }
            if generation < before {
                let text =
                    format!("snapshot {id} is of commit {}, but one before it of commit {}", generation.0, before.0);
                wrong.push(text);
            }
            before = before.max(generation);
        }
    }
    let lists = &trees.references;
    if let Some(key) = known(last_dead(lists, store, Key::MAX))?.flatten()
        && key.object >= next_snapshot
    {
        wrong.push(format!("the next snapshot is {next_snapshot}, but there is a dead list of {}", key.object));
    }
    if let Some(key) = known(last_dead(lists, store, Key::new(id, kind::DEAD, u64::MAX)))?.flatten()
        && key.object == id
        && key.sub >= next_dead
    {
        wrong.push(format!("the next dead-list entry is {next_dead}, but {} is there", key.sub));
    }
    Ok(())
}

/// Returns the greatest inode number that a record of a known kind has; 0 without any.
pub(super) fn last_ino(live: &Tree, store: &NodeStore) -> Result<u64> {
    let mut at = Key::MAX;
    loop {
        let Some(key) = live.floor(store, at, |key, _| Ok(key))? else { return Ok(0) };
        at = match key {
            Key { object: 0, .. } => return Ok(0),
            Key { kind: kind::INODE..=kind::EXTENT, .. } => return Ok(key.object),
            // Of a kind that is not known, and before or behind all that are.
            Key { object, kind: 0, .. } => Key::new(object - 1, u8::MAX, u64::MAX),
            Key { object, .. } => Key::new(object, kind::EXTENT, u64::MAX),
        };
    }
}

/// Returns the key of the last dead-list entry at or before `at`, unless another record stands
/// there.
fn last_dead(references: &Tree, store: &NodeStore, at: Key) -> Result<Option<Key>> {
    let found = references.floor(store, at, |key, _| Ok(key))?;
    Ok(found.filter(|key| key.kind == kind::DEAD))
}

/// Returns None for a damaged node: it proves nothing. A read that the host refuses is an error.
pub(super) fn known<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(Error::Damaged(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn finding(text: String) -> Finding {
    Finding::new(FindingKind::Counter, Severity::Wrong, text)
}
