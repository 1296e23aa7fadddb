//! Checkpoints: the space map written into its tree, as a part of a commit that may always be left
//! out.
//!
//! ENOSPC must not latch, so a checkpoint takes only space that is free. One that the host refuses
//! all the same (copy-on-write, thin provisioning, quotas) is undone: no record names it yet, and
//! the checkpoint before it counts until another one is made (TXN-7).

use super::chain_tail::{CommitReason, CommitTail};
use super::lists::pages_of;
use super::reserved::ReservedPages;
use crate::btree::{Edits, Tree};
use crate::error::{Error, Result};
use crate::format::record::{CommitRecord, Root};
use crate::format::space::RegionBits;
use crate::format::{Generation, Key, Run, Tag, TreeId, kind, space};

/// A checkpoint is due after this many commits; the ring holds 64, recovery may need one more than
/// this many.
const EVERY: u64 = 24;

/// A checkpoint that is written and that no record names yet.
pub(super) struct Checkpoint {
    pub(super) tree: Tree,
    pub(super) root: Root,
    pub(super) allocated: Vec<(Run, Tag)>,
    pub(super) freed: Vec<Run>,
    /// Groups left of its promise.
    pub(super) promised: u64,
    /// The regions that it wrote, which differ from the checkpoint before.
    pub(super) regions: Vec<(u64, RegionBits)>,
}

impl Checkpoint {
    /// Writes a checkpoint if one is due and there is space for it. The checkpoint of a commit
    /// without changes (`empty`) must fit into the record, so that only the checkpoint has to be
    /// undone with the record.
    pub(super) fn write_if_due(
        pages: &ReservedPages,
        purpose: CommitReason,
        chain: &CommitTail,
        generation: Generation,
        empty: bool,
    ) -> Result<Option<Checkpoint>> {
        let age = generation.0.saturating_sub(chain.checkpoint.0);
        let wanted = chain.force_checkpoint || age >= EVERY || !chain.list_pages.is_empty();
        if !wanted || matches!(purpose, CommitReason::Truncate | CommitReason::Close) {
            return Ok(None);
        }
        let Some(begun) = pages.allocator.begin_checkpoint()? else { return Ok(None) };
        let mut made = Checkpoint {
            tree: (*begun.base).clone(),
            root: Root::default(),
            allocated: Vec::new(),
            freed: Vec::new(),
            promised: begun.promised,
            regions: begun.regions,
        };
        let written = made.write(pages, generation);
        made.promised = begun.promised.saturating_sub(made.allocated.len() as u64);
        let fits = CommitRecord::lists_fit(made.allocated.len(), made.freed.len() + chain.list_pages.len());
        match written {
            Ok(()) if !empty || fits => {
                made.tree.forget_written();
                Ok(Some(made))
            }
            Ok(()) | Err(Error::NoSpace(_)) => {
                let taken = made.allocated.into_iter().map(|(run, _)| run).collect();
                pages.allocator.undo_checkpoint(made.regions, taken, made.promised)?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Updates the space tree to the state after the previous commit (SPACE-4).
    fn write(&mut self, pages: &ReservedPages, generation: Generation) -> Result<()> {
        let mut edits = Edits::new(generation);
        for (number, bits) in &self.regions {
            let key = Key::new(*number, kind::SPACE, 0);
            if bits.iter().all(|word| *word == 0) {
                self.tree.remove(&pages.medium.store, &mut edits, key)?;
            } else {
                self.tree.insert(&pages.medium.store, &mut edits, key, &space::encode(bits))?;
            }
        }
        self.freed = pages_of(&edits.superseded)?;
        let mut unwritten = None;
        let flushed = pages.flush_tree(&self.tree, TreeId::Space, generation, 1, &mut self.allocated, &mut unwritten);
        // Pages that may be written in part are given back with the rest.
        self.allocated.extend(unwritten.map(|run| (run, Tag::default())));
        self.root = flushed?;
        Ok(())
    }
}
