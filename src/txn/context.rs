//! Shared context of a volume: pager, node store, published versions, clock and randomness.

use std::sync::Arc;

use super::state::Versions;
use crate::btree::NodeStore;
use crate::env::Environment;
use crate::pager::Pager;

pub(super) struct VolumeContext {
    pub(super) pager: Arc<Pager>,
    pub(super) store: NodeStore,
    pub(super) versions: Versions,
    pub(super) environment: Arc<dyn Environment>,
}
