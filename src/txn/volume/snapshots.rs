//! Kept roots: taking, listing and destroying snapshots (specification section 8).

use std::ops::ControlFlow;

use super::Volume;
use crate::error::{Error, Result};
use crate::format::values::{DeadValue, SnapshotValue};
use crate::format::{Generation, Key, TreeId, kind};
use crate::txn::commit::Purpose;
use crate::txn::kept::snapshots_of;
use crate::txn::references::following;

/// Dead-list entries handled by one operation.
const DESTROY_STEP: usize = 256;

impl Volume {
    /// Keeps the present content under `name`; durable when it returns. Answers the snapshot's id.
    pub(crate) fn take_snapshot(&self, name: &[u8]) -> Result<u64> {
        if name.is_empty() || name.len() > 255 {
            return Err(Error::NameTooLong);
        }
        let id = self.committer.as_leader(|chain| {
            // No operation may come between the commit and the record that keeps its root, so the writers wait.
            let mut transaction = self.writer.lock();
            self.mark_staged();
            self.committer.commit_locked(Purpose::Drain, chain, &mut transaction)?;
            let durable = self.durable();
            let root = durable.roots[TreeId::Live];
            transaction.operate(false, |operation| {
                let id = operation.counters.next_snapshot;
                let value = SnapshotValue {
                    generation: durable.generation,
                    time: self.medium.environment.now(),
                    root,
                    inodes: operation.counters.inodes,
                    name: name.to_vec(),
                };
                operation.changed = true;
                operation.counters.next_snapshot = following(id)?;
                operation.counters.newest_snapshot = durable.generation;
                operation.counters.newest_snapshot_id = id;
                let key = Key::new(id, kind::SNAPSHOT, 0);
                let edits = &mut operation.global_edits;
                operation.trees.snapshots.insert(&self.medium.store, edits, key, &value.encode())?;
                Ok(id)
            })
        })?;
        self.commit()?;
        Ok(id)
    }

    /// All snapshots by ascending id; one with an empty name is being destroyed and its tree must not be read.
    pub(crate) fn snapshots(&self) -> Result<Vec<(u64, SnapshotValue)>> {
        snapshots_of(&self.state(), &self.medium.store)
    }

    /// Forgets a snapshot and frees, in bounded steps, what only it shows. Safe to repeat after a crash in the middle:
    /// the record goes last.
    pub(crate) fn destroy_snapshot(&self, id: u64) -> Result<()> {
        let all = self.snapshots()?;
        let Some(position) = all.iter().position(|(other, _)| *other == id) else { return Err(Error::NotFound) };
        let before = position.checked_sub(1).map(|i| (all[i].0, all[i].1.generation));
        let newest = position + 1 == all.len();
        self.operate(2, true, |operation| {
            operation.changed = true;
            if newest {
                // From now on what leaves the live tree belongs to the snapshot before, if it is as old as that, and else to nobody.
                let (newest_id, generation) = before.unwrap_or((0, Generation(0)));
                operation.counters.newest_snapshot = generation;
                operation.counters.newest_snapshot_id = newest_id;
            }
            // The empty name says, also after a crash, that the tree is not whole any more.
            let value = SnapshotValue { name: Vec::new(), ..all[position].1.clone() }.encode();
            let edits = &mut operation.global_edits;
            operation.trees.snapshots.insert(&self.medium.store, edits, Key::new(id, kind::SNAPSHOT, 0), &value)
        })?;
        while self.destroy_step(id, before)? {}
        self.operate(1, true, |operation| {
            operation.changed = true;
            let edits = &mut operation.global_edits;
            operation.trees.snapshots.remove(&self.medium.store, edits, Key::new(id, kind::SNAPSHOT, 0))
        })?;
        self.commit()?;
        Ok(())
    }

    /// Moves or drops some entries of the dead list of `id`; answers whether there were any.
    fn destroy_step(&self, id: u64, before: Option<(u64, Generation)>) -> Result<bool> {
        self.operate(DESTROY_STEP as u64, true, |operation| {
            let mut entries = Vec::new();
            let from = Key::new(id, kind::DEAD, 0);
            let to = Key::new(id, kind::DEAD, u64::MAX);
            operation.trees.references.scan(&self.medium.store, from, to, &mut |key, value| {
                entries.push((key, DeadValue::decode(value)?));
                Ok(if entries.len() < DESTROY_STEP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
            })?;
            for (key, dead) in &entries {
                operation.changed = true;
                let edits = &mut operation.global_edits;
                operation.trees.references.remove(&self.medium.store, edits, *key)?;
                match before {
                    Some((older, generation)) if dead.born <= generation => {
                        let key = Key::new(older, kind::DEAD, key.sub);
                        let edits = &mut operation.global_edits;
                        operation.trees.references.insert(&self.medium.store, edits, key, &dead.encode())?;
                    }
                    _ => operation.drop_count(dead.run)?,
                }
            }
            Ok(!entries.is_empty())
        })
    }
}
