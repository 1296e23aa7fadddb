//! Which files write-out gave more blocks than their staged data said: for whoever keeps the count that it was told before.
//!
//! Many small pieces of a frame go into one page, which then covers the holes between them (`plan`). Until that is published the file has
//! the blocks of its pieces, and afterwards those of the page. Who asks before and keeps the answer has to be told after; so a file is named
//! no earlier than its batch is seen to be published, from when on every answer counts the page.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::format::Ino;
use crate::fs::write_buffer::Plan;
use crate::txn::{Publication, Volume};

/// Files that nobody was told of yet, and the publications that make them grow.
#[derive(Default)]
pub(super) struct Grown(Mutex<HashMap<Ino, Vec<Publication>>>);

impl Grown {
    /// Notes what a batch that is about to be named will make grow.
    pub(super) fn note(&self, publication: &Publication, plans: &[Plan]) {
        for plan in plans.iter().filter(|plan| plan.grows) {
            let mut files = self.0.lock();
            let growing = files.entry(plan.ino).or_default();
            // One that is over is told of together with this one, so that an archive that nobody asks keeps little.
            growing.retain(|older| !older.is_set());
            growing.push(publication.clone());
        }
    }

    /// The files whose publications are in the newest state, each once.
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
