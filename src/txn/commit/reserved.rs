//! Writes the pages of a commit itself: nodes and lists, for which space is reserved.

use std::sync::Arc;

use crate::btree::Tree;
use crate::error::{Error, Result};
use crate::format::record::Root;
use crate::format::{Generation, Pointer, Run, Tag, TreeId};
use crate::frame::{self, PlainPage};
use crate::txn::allocator::Allocator;
use crate::txn::context::VolumeContext;

pub(super) struct ReservedPages {
    pub(super) allocator: Arc<Allocator>,
    pub(super) medium: Arc<VolumeContext>,
}

impl ReservedPages {
    /// Writes the nodes that are not stored yet, children first, each next to the one before it;
    /// they are added to `allocated`. The blocks of the first one that the host has no room for are
    /// left in `unwritten`: the next attempt begins with that node, and takes them (TXN-9).
    pub(super) fn flush_tree(
        &self,
        tree: &Tree,
        id: TreeId,
        generation: Generation,
        from_reserved: u64,
        allocated: &mut Vec<(Run, Tag)>,
        unwritten: &mut Option<Run>,
    ) -> Result<Root> {
        tree.flush(&self.medium.store, &mut |level, encoded| {
            let page = frame::node_page(id as u8, level, encoded);
            let run = match unwritten.take().filter(|run| run.blocks == page.blocks()) {
                Some(run) => run,
                None => self.allocator.allocate_node(page.blocks(), from_reserved)?,
            };
            let sealed = self.medium.pager.seal(&page, run, generation)?;
            match self.medium.pager.write_page(&sealed) {
                Err(error @ Error::NoSpace(_)) => {
                    *unwritten = Some(run);
                    Err(error)
                }
                written => {
                    written?;
                    allocated.push((sealed.pointer.run, sealed.pointer.tag));
                    Ok(sealed.pointer)
                }
            }
        })
    }

    /// Writes a page of at most four blocks; calls `taken` before the write, so that a partly
    /// written page is known.
    pub(super) fn write(
        &self,
        page: &PlainPage<'_>,
        generation: Generation,
        from_reserved: u64,
        taken: &mut dyn FnMut(Run, Tag),
    ) -> Result<Pointer> {
        let run = self.allocator.allocate_node(page.blocks(), from_reserved)?;
        let sealed = self.medium.pager.seal(page, run, generation)?;
        taken(sealed.pointer.run, sealed.pointer.tag);
        self.medium.pager.write_page(&sealed)?;
        Ok(sealed.pointer)
    }
}
