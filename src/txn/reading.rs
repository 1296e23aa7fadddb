//! Several searches in one version: those near each other share a descent.

use std::sync::Arc;

use super::state::State;
use super::view::View;
use super::volume::Volume;
use crate::btree::Finger;

/// Owns the version together with the place in it, so that neither is used with another.
pub(crate) struct Reading<'v> {
    volume: &'v Volume,
    state: Arc<State>,
    finger: Finger,
}

impl<'v> Reading<'v> {
    pub(crate) fn of(volume: &'v Volume, state: Arc<State>) -> Reading<'v> {
        Reading { volume, state, finger: Finger::default() }
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    pub(crate) fn view(&self) -> View<'_> {
        View { finger: Some(&self.finger), ..self.volume.view(&self.state) }
    }
}
