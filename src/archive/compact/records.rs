//! The records of a live tree that a compacted archive keeps: without orphans, and with cuts carried out.

use std::collections::HashSet;
use std::ops::ControlFlow;

use crate::error::Result;
use crate::format::values::{Extent, InodeValue, NO_TRIM};
use crate::format::{Key, kind};
use crate::txn::{State, Volume};

/// Records handed out at once; their values are 3,500 bytes at most.
const BATCH: usize = 512;

/// Walks over the kept records in the order of their keys.
pub(super) struct Records<'a> {
    volume: &'a Volume,
    state: &'a State,
    orphans: HashSet<u64>,
    cut: HashSet<u64>,
    /// The cut inode that the walk is in, and its trim offset.
    trim: (u64, u64),
    next: Option<Key>,
}

impl<'a> Records<'a> {
    pub(super) fn new(volume: &'a Volume, state: &'a State) -> Result<Records<'a>> {
        let (mut orphans, mut cut) = (HashSet::new(), HashSet::new());
        volume.view(state).scan(Key::MIN, Key::new(1, 0, 0), &mut |key, _| {
            match key.kind {
                kind::ORPHAN => drop(orphans.insert(key.sub)),
                kind::TRIM => drop(cut.insert(key.sub)),
                _ => {}
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(Records { volume, state, orphans, cut, trim: (0, NO_TRIM), next: Some(Key::new(1, 0, 0)) })
    }

    /// Inodes that are kept.
    pub(super) fn inodes(&self) -> u64 {
        self.state.inodes().saturating_sub(self.orphans.len() as u64)
    }

    /// The next records; empty at the end.
    pub(super) fn batch(&mut self) -> Result<Vec<(Key, Vec<u8>)>> {
        let mut batch = Vec::new();
        let Some(from) = self.next.take() else { return Ok(batch) };
        let (volume, state) = (self.volume, self.state);
        volume.view(state).scan(from, Key::MAX, &mut |key, value| {
            if let Some(value) = self.kept(key, value)? {
                batch.push((key, value));
            }
            if batch.len() < BATCH {
                return Ok(ControlFlow::Continue(()));
            }
            self.next = key.next();
            Ok(ControlFlow::Break(()))
        })?;
        Ok(batch)
    }

    fn kept(&mut self, key: Key, value: &[u8]) -> Result<Option<Vec<u8>>> {
        if self.orphans.contains(&key.object) {
            return Ok(None);
        }
        if !self.cut.contains(&key.object) {
            return Ok(Some(value.to_vec()));
        }
        match key.kind {
            kind::INODE => {
                let inode = InodeValue::decode(value)?;
                self.trim = (key.object, inode.trim);
                Ok(Some(InodeValue { trim: NO_TRIM, ..inode }.encode().to_vec()))
            }
            kind::EXTENT if self.trim.0 == key.object => {
                let extent = Extent::decode(value)?;
                let left = self.trim.1.saturating_sub(key.sub).min(extent.length.into());
                let length = left as u32; // at most the extent's
                Ok((length > 0).then(|| Extent { length, ..extent }.encode().to_vec()))
            }
            _ => Ok(Some(value.to_vec())),
        }
    }
}
