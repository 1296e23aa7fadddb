//! Read view: several searches in one version; searches near each other share a descent.
//!
//! # Why a snapshot is whole while it is read
//! Its record is looked up in a published version, and that version is held as long as its tree is
//! used. Where the record has a name, no page that the tree reaches is free: pages that leave the
//! live tree go to a dead list. Removal of a snapshot clears the name by one operation and frees
//! pages by later ones.
//!
//! Those operations follow the held version, so their pages stay as they are until it is released
//! (TXN-1). A later look-up of the record finds no name. So nothing has to be held between two
//! requests, and a stored file number keeps no blocks in use.
//!
//! Nodes and chunks in memory are shared with readers of the live tree: they are identified by
//! address, generation and tag of their page, stored nodes never change (TREE-2), and the content
//! that such a pointer names never does (READ-2).

use std::sync::Arc;

use super::state::State;
use super::view::View;
use super::volume::Volume;
use crate::btree::{Finger, Tree};
use crate::error::Result;

/// Owns the version together with the place in it, so that neither is used with another.
pub(crate) struct ReadView<'v> {
    volume: &'v Volume,
    state: Arc<State>,
    /// Tree of a snapshot, read in place of the version's live tree.
    kept: Option<Tree>,
    finger: Finger,
}

impl<'v> ReadView<'v> {
    pub(crate) fn of(volume: &'v Volume, state: Arc<State>) -> ReadView<'v> {
        ReadView { volume, state, kept: None, finger: Finger::default() }
    }

    /// Returns a view of the snapshot with this id.
    ///
    /// # Errors
    /// `Stale` when it is gone, or its removal has begun.
    pub(crate) fn of_snapshot(volume: &'v Volume, id: u64) -> Result<ReadView<'v>> {
        let state = volume.state();
        let kept = Some(volume.snapshot_tree(&state, id)?);
        Ok(ReadView { volume, state, kept, finger: Finger::default() })
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    pub(crate) fn view(&self) -> View<'_> {
        let live = self.volume.view(&self.state);
        View { finger: Some(&self.finger), tree: self.kept.as_ref().unwrap_or(live.tree), ..live }
    }
}
