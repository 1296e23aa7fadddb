//! Layers sealed for one batch, with the space that was promised to them.

use std::sync::Arc;

use super::batch::Batch;
use super::dirty_content::Content;
use super::dirty_file::StagedFile;
use super::layer::Layer;
use crate::format::Ino;
use crate::txn::{Reservation, Volume};

/// What was sealed for one batch.
#[derive(Default)]
pub(in crate::fs) struct Sealed {
    layers: Vec<(Ino, Arc<Layer>)>,
    files: Vec<Arc<StagedFile>>,
    reserved: Option<Reservation>,
}

impl Sealed {
    pub(super) fn add(
        &mut self,
        file: &Arc<StagedFile>,
        seal: impl FnOnce(&mut Content) -> Option<(Arc<Layer>, Option<Reservation>)>,
    ) {
        let Some((layer, reserved)) = file.with(seal) else { return };
        self.layers.push((file.ino(), layer));
        self.files.push(file.clone());
        if let Some(more) = reserved {
            more.join(&mut self.reserved);
        }
    }

    /// The layers, in the order of the files' numbers, and the space for writing them.
    pub(in crate::fs) fn parts(&mut self) -> (&[(Ino, Arc<Layer>)], &mut Option<Reservation>) {
        (&self.layers, &mut self.reserved)
    }

    /// Bytes of all layers.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.layers.iter().map(|(_, layer)| layer.bytes()).sum()
    }

    pub(in crate::fs) fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Drops what is published by now.
    pub(in crate::fs) fn drop_published(&self, volume: &Volume) {
        self.files.iter().for_each(|file| file.drop_published(volume));
    }

    /// Puts the layers back under what is newer: their batch could not be written.
    pub(in crate::fs) fn unseal(&mut self, batch: &Arc<Batch>) {
        for file in &self.files {
            file.with(|content| content.unseal(batch, &mut self.reserved));
        }
    }
}
