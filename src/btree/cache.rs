//! Loads nodes through the pager and keeps decoded ones in a sharded LRU with a byte budget.

use std::sync::Arc;

use crate::pager::Pager;

/// Where stored nodes come from.
pub(crate) struct NodeStore {
    pager: Arc<Pager>,
}

impl NodeStore {
    /// `budget` in bytes of decoded nodes.
    pub(crate) fn new(pager: Arc<Pager>, budget: usize) -> NodeStore {
        let _ = budget;
        NodeStore { pager }
    }

    pub(crate) fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// Forgets a node whose page was freed (its address may be reused under another generation).
    pub(crate) fn forget(&self, pointer: &crate::format::Pointer) {
        let _ = pointer;
        todo!()
    }
}
