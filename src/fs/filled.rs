//! Which files write-out gave more blocks than their staged data said: for whoever keeps the count that it was told before.
//!
//! Many small pieces of a frame go into one page, which then covers the holes between them (`plan`). Until that is published the file has
//! the blocks of its pieces, and afterwards those of the page. Who asks before and keeps the answer has to be told after; so a file is named
//! no earlier than its batch is seen to be published, from when on every answer counts the page.

use parking_lot::Mutex;
use std::collections::HashMap;

use super::FileSystem;
use super::batch::Plan;
use crate::format::Ino;
use crate::txn::Publication;

/// Files that nobody was told of yet, and the publications that fill them.
#[derive(Default)]
pub(super) struct Filled(Mutex<HashMap<Ino, Vec<Publication>>>);

impl Filled {
    /// Notes what a batch that is about to be named will fill.
    pub(super) fn note(&self, publication: &Publication, plans: &[Plan]) {
        for plan in plans.iter().filter(|plan| plan.fills) {
            let mut files = self.0.lock();
            let filling = files.entry(plan.ino).or_default();
            // One that is over is told of together with this one, so that an archive that nobody asks keeps little.
            filling.retain(|older| !older.is_set());
            filling.push(publication.clone());
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
        files.retain(|ino, filling| {
            let before = filling.len();
            filling.retain(|publication| !publication.is_in(&state));
            if filling.len() < before {
                told.push(*ino);
            }
            !filling.is_empty()
        });
        told
    }
}
