//! Files that got more blocks in writeback than their dirty data counted, for invalidation of
//! cached attributes.
//!
//! Many small pieces of a frame go into one page, which then covers the holes between them
//! (`plan`). Before that is published the file has the blocks of its pieces, and afterwards
//! the blocks of the page, so attributes returned before are outdated. A file is reported only after its batch
//! is published: from then on every count includes the page.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::format::Ino;
use crate::fs::write_buffer::FilePlan;
use crate::txn::{Publication, Volume};

/// Unreported files, with the publications that make them grow.
#[derive(Default)]
pub(super) struct BlockCountChanges(Mutex<HashMap<Ino, Vec<Publication>>>);

impl BlockCountChanges {
    /// Records the files that a batch will make grow, before the batch is applied.
    pub(super) fn record(&self, publication: &Publication, plans: &[FilePlan]) {
        for plan in plans.iter().filter(|plan| plan.fills_holes) {
            let mut files = self.0.lock();
            let growing = files.entry(plan.ino).or_default();
            // A published one is reported together with this one, so the list stays short in an
            // archive whose caller never asks.
            growing.retain(|older| !older.is_set());
            growing.push(publication.clone());
        }
    }

    /// Returns each file with a publication in the newest state once.
    pub(super) fn take(&self, volume: &Volume) -> Vec<Ino> {
        let mut files = self.0.lock();
        if files.is_empty() {
            return Vec::new();
        }
        let state = volume.state();
        let mut taken = Vec::new();
        files.retain(|ino, growing| {
            let before = growing.len();
            growing.retain(|publication| !publication.is_in(&state));
            if growing.len() < before {
                taken.push(*ino);
            }
            !growing.is_empty()
        });
        taken
    }
}
