//! Layers sealed for one batch, with the space reserved for them.

use std::sync::Arc;

use super::batch::WritebackBatch;
use super::dirty_content::DirtyContent;
use super::dirty_file::DirtyFile;
use super::layer::Layer;
use crate::format::Ino;
use crate::txn::{Reservation, Volume};

/// Layers sealed for one batch.
#[derive(Default)]
pub(in crate::fs) struct SealedLayers {
    layers: Vec<(Ino, Arc<Layer>)>,
    files: Vec<Arc<DirtyFile>>,
    reserved: Option<Reservation>,
}

impl SealedLayers {
    pub(super) fn add(
        &mut self,
        file: &Arc<DirtyFile>,
        seal: impl FnOnce(&mut DirtyContent) -> Option<(Arc<Layer>, Option<Reservation>)>,
    ) {
        let Some((layer, reserved)) = file.with_content(seal) else { return };
        self.layers.push((file.ino(), layer));
        self.files.push(file.clone());
        if let Some(more) = reserved {
            more.join(&mut self.reserved);
        }
    }

    /// Returns the layers in the order of the files' numbers, and the space for writing them.
    pub(in crate::fs) fn parts(&mut self) -> (&[(Ino, Arc<Layer>)], &mut Option<Reservation>) {
        (&self.layers, &mut self.reserved)
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.layers.iter().map(|(_, layer)| layer.bytes()).sum()
    }

    pub(in crate::fs) fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    pub(in crate::fs) fn drop_published(&self, volume: &Volume) {
        self.files.iter().for_each(|file| file.drop_published(volume));
    }

    /// Puts the layers back under newer data, because the batch could not be written.
    pub(in crate::fs) fn unseal(&mut self, batch: &Arc<WritebackBatch>) {
        for file in &self.files {
            file.with_content(|content| content.unseal(batch, &mut self.reserved));
        }
    }
}
