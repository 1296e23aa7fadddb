//! Layers sealed for one batch, with the room that was promised to them.

use std::sync::Arc;

use super::batch::Batch;
use super::content::Content;
use super::file::StagedFile;
use super::layer::Layer;
use crate::format::Ino;
use crate::txn::Reservation;

/// What was sealed for one batch.
#[derive(Default)]
pub(in crate::fs) struct Sealed {
    layers: Vec<(Ino, Arc<Layer>)>,
    files: Vec<Arc<StagedFile>>,
    room: Option<Reservation>,
}

impl Sealed {
    pub(super) fn add(
        &mut self,
        file: &Arc<StagedFile>,
        seal: impl FnOnce(&mut Content) -> Option<(Arc<Layer>, Option<Reservation>)>,
    ) {
        let Some((layer, room)) = file.with(seal) else { return };
        self.layers.push((file.ino(), layer));
        self.files.push(file.clone());
        match (&mut self.room, room) {
            (Some(room), Some(more)) => room.absorb(more),
            (room, more) => *room = room.take().or(more),
        }
    }

    /// The layers, in the order of the files' numbers, and the room for writing them.
    pub(in crate::fs) fn parts(&mut self) -> (&[(Ino, Arc<Layer>)], &mut Option<Reservation>) {
        (&self.layers, &mut self.room)
    }

    /// Bytes of all layers.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.layers.iter().map(|(_, layer)| layer.bytes()).sum()
    }

    pub(in crate::fs) fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Puts the layers back under what is newer: their batch could not be written.
    pub(in crate::fs) fn thaw(&mut self, batch: &Arc<Batch>) {
        for file in &self.files {
            file.with(|content| content.thaw(batch, &mut self.room));
        }
    }
}
