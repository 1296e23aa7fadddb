//! Writes the pages of a commit itself: nodes and lists, for which room is kept.

use std::sync::Arc;

use crate::btree::Tree;
use crate::error::Result;
use crate::format::record::Root;
use crate::format::{Generation, Pointer, Run, Tag, TreeId};
use crate::frame::{self, PlainPage};
use crate::txn::allocator::Allocator;
use crate::txn::medium::Medium;

pub(super) struct ReservedPages {
    pub(super) allocator: Arc<Allocator>,
    pub(super) medium: Arc<Medium>,
}

impl ReservedPages {
    /// Writes the nodes that are not stored yet, children first, each beside the one before it; they are added to `allocated`.
    pub(super) fn flush_tree(
        &self,
        tree: &Tree,
        id: TreeId,
        generation: Generation,
        from_reserved: u64,
        allocated: &mut Vec<(Run, Tag)>,
    ) -> Result<Root> {
        tree.flush(&self.medium.store, &mut |level, encoded| {
            let page = frame::node_page(id as u8, level, encoded);
            self.write(&page, generation, from_reserved, &mut |run, tag| allocated.push((run, tag)))
        })
    }

    /// Writes a page of at most four blocks; `taken` is told before, so that what is written in part is known.
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
