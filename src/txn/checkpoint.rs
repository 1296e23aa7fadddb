//! Checkpoints: the space map written into its tree, as a part of a commit that may always be left out.
//!
//! ENOSPC must not latch, so a checkpoint takes nothing that may not be there, and one that the host refuses all the same (copy-on-write, thin
//! provisioning, quotas) is taken back: no record names it yet, and the checkpoint before it counts until another one is made (T7).

use super::Volume;
use super::commit::{Chain, Purpose, pages_of};
use crate::btree::{Edits, Tree};
use crate::error::{Error, Result};
use crate::format::record::{CommitRecord, Root};
use crate::format::space::RegionBits;
use crate::format::{Generation, Key, Run, Tag, TreeId, kind, space};

/// A checkpoint is due after this many commits; the ring holds 64, recovery may need one more than this many.
const EVERY: u64 = 24;

/// A checkpoint that is written and that no record names yet.
pub(super) struct Checkpoint {
    pub(super) tree: Tree,
    pub(super) root: Root,
    pub(super) allocated: Vec<(Run, Tag)>,
    pub(super) freed: Vec<Run>,
    /// Groups that are left of what was promised to it.
    pub(super) promised: u64,
    /// The regions that it wrote, which differ from the checkpoint before.
    pub(super) taken: Vec<(u64, RegionBits)>,
}

impl Volume {
    /// Writes a checkpoint that is due; none while there is no room. That of a commit without changes (`empty`) has to fit into the record, so
    /// that nothing but this has to be taken back with the record.
    pub(super) fn checkpoint_if_due(
        &self,
        purpose: Purpose,
        chain: &Chain,
        base: &Tree,
        generation: Generation,
        empty: bool,
    ) -> Result<Option<Checkpoint>> {
        let Some(promised) = self.room_for_checkpoint(purpose, chain, generation) else { return Ok(None) };
        let pending = self.space.lock().pending_regions();
        for number in pending {
            self.load_region(number)?;
        }
        let taken = self.space.lock().take_checkpoint();
        let mut made = Checkpoint {
            tree: base.clone(),
            root: Root::default(),
            allocated: Vec::new(),
            freed: Vec::new(),
            promised,
            taken,
        };
        let root = self.write_checkpoint(&mut made, generation);
        made.promised = promised.saturating_sub(made.allocated.len() as u64);
        let fits = || CommitRecord::lists_fit(made.allocated.len(), made.freed.len() + chain.list_pages.len());
        match root {
            Ok(root) if !empty || fits() => {
                made.root = root;
                made.tree.settle();
                Ok(Some(made))
            }
            Ok(_) | Err(Error::NoSpace(_)) => {
                let pages = made.allocated.into_iter().map(|(run, _)| run).collect();
                self.take_back(made.taken, pages, made.promised)?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Groups promised to a checkpoint that is due.
    fn room_for_checkpoint(&self, purpose: Purpose, chain: &Chain, generation: Generation) -> Option<u64> {
        let age = generation.0.saturating_sub(chain.checkpoint.0);
        let wanted = chain.force_checkpoint || age >= EVERY || !chain.list_pages.is_empty();
        let ends = matches!(purpose, Purpose::Shorten | Purpose::Close);
        if wanted && !ends { self.space.lock().promise_checkpoint() } else { None }
    }

    /// Brings the space tree up to the state after the previous commit (P4).
    fn write_checkpoint(&self, made: &mut Checkpoint, generation: Generation) -> Result<Root> {
        let mut edits = Edits::new(generation);
        for (number, bits) in &made.taken {
            let key = Key::new(*number, kind::SPACE, 0);
            if bits.iter().all(|word| *word == 0) {
                made.tree.remove(&self.store, &mut edits, key)?;
            } else {
                made.tree.insert(&self.store, &mut edits, key, &space::encode(bits))?;
            }
        }
        made.freed = pages_of(&edits.superseded)?;
        self.flush_tree(&made.tree, TreeId::Space, generation, 1, &mut made.allocated, &mut 0)
    }

    /// Undoes a checkpoint that no record names: its regions differ from the one before again, and its pages and what was left of its promise
    /// are given back. Nothing that was taken was dropped meanwhile.
    pub(super) fn take_back(&self, taken: Vec<(u64, RegionBits)>, pages: Vec<Run>, promised: u64) -> Result<()> {
        let sequence = self.published.load().sequence;
        let mut space = self.space.lock();
        for (number, bits) in &taken {
            space.install_rebuilt(*number, bits, &**self.pager.storage())?;
        }
        space.finish_checkpoint();
        space.unreserve(promised);
        space.discard(pages, sequence);
        Ok(())
    }
}
