//! Which files write-out gave more blocks than their staged data said: for whoever keeps the count that it was told before.
//!
//! Many small pieces of a frame go into one page, which then covers the holes between them (`plan`). Until that is published the file has
//! the blocks of its pieces, and afterwards those of the page. Who asks before and keeps the answer has to be told after; so a file is named
//! no earlier than its batch is seen to be published, from when on every answer counts the page.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::FileSystem;
use super::batch::{Batch, Plan};
use crate::format::Ino;

/// Files that nobody was told of yet, and the batches that fill them.
#[derive(Default)]
pub(super) struct Filled(Mutex<HashMap<Ino, Vec<Arc<Batch>>>>);

impl Filled {
    /// Notes what a batch that is about to be named will fill.
    pub(super) fn note(&self, batch: &Arc<Batch>, plans: &[Plan]) {
        for plan in plans.iter().filter(|plan| plan.fills) {
            let mut files = self.0.lock();
            let batches = files.entry(plan.ino).or_default();
            // One that is over is told of together with this one, so that an archive that nobody asks keeps little.
            batches.retain(|older| !older.is_over());
            batches.push(Arc::clone(batch));
        }
    }
}

impl FileSystem {
    /// Files whose block count has grown without a call that changed them since this was asked last; for each, attributes that were
    /// told before may be wrong.
    pub fn take_filled(&self) -> Vec<Ino> {
        let mut files = self.filled.0.lock();
        if files.is_empty() {
            return Vec::new();
        }
        let state = self.volume.state();
        let mut told = Vec::new();
        files.retain(|ino, batches| {
            let before = batches.len();
            // What cannot be said now is asked again.
            let done = |batch: &Arc<Batch>| batch.is_done(&self.volume, self.volume.view(&state)).unwrap_or(false);
            batches.retain(|batch| !(batch.is_over() || done(batch)));
            if batches.len() < before {
                told.push(*ino);
            }
            !batches.is_empty()
        });
        told
    }
}
