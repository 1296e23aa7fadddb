//! Files without a surviving inode record: their data pages name the inode and offset of their
//! bytes.
//!
//! It is unknown which of these pages belong to one version, or how long the file was. The result
//! is therefore always reported as partial.

use std::collections::HashMap;

use super::index::DataPiece;
use super::walk::Walk;
use super::{RescueProgress, RescueState, UNNAMED, write};
use crate::error::{Error, Result};
use crate::format::Ino;

impl Walk<'_> {
    /// Writes inodes of which only data pages survived, with or without a name.
    pub(super) fn write_orphan_data(&mut self) -> Result<()> {
        let mut remaining = std::mem::take(&mut self.named_orphans);
        let mut unnamed = Vec::new();
        for ino in self.index.data.keys().copied().filter(|ino| !self.seen.contains(ino)) {
            unnamed.push(ino);
        }
        for ino in unnamed {
            // A leaf that covers the inode without having it proves a deletion, unless the leaf is
            // older than the inode.
            let deleted = match self.index.versions(Ino(ino)).first().map(|version| version.generation) {
                Some(generation) => !self.index.existed_after(Ino(ino), generation)?,
                None => false,
            };
            if !deleted {
                remaining.insert(ino, [UNNAMED.as_bytes(), b"/", ino.to_string().as_bytes()].concat());
            }
        }
        if remaining.is_empty() {
            return Ok(());
        }
        let mut pieces = HashMap::new();
        if self.partial.is_some() {
            let progress = &mut self.progress;
            let wanted = remaining.keys().copied().collect();
            pieces = self.index.pieces(&wanted, &mut |done, total| progress(&RescueProgress::Scanning(done, total)))?;
        }
        for (ino, path) in remaining {
            self.path = path;
            let written = self.write_pieces(Ino(ino), &pieces.remove(&ino).unwrap_or_default());
            let written = self.tolerate(written)?.unwrap_or_default();
            let pages = self.index.data.get(&ino).copied().unwrap_or_default();
            let state = if self.partial.is_some() && written == 0 { RescueState::Lost } else { RescueState::Partial };
            let reason = format!(
                "nothing but data is left of it, of one or several versions: pages={} bytes={}",
                pages.count, pages.bytes
            );
            self.report_object(state, Ino(ino), pages.last, false, &reason)?;
        }
        Ok(())
    }

    /// Returns the number of pieces written; none without the option `partial`.
    fn write_pieces(&mut self, ino: Ino, pieces: &[DataPiece]) -> Result<Option<u64>> {
        let Some(mut special) = self.partial.take() else { return Ok(None) };
        let opened = if pieces.is_empty() { Ok(()) } else { self.open_lost_found(&mut special) };
        let written = opened.and_then(|()| match &special.host {
            Some(host) => write::pieces(pieces, self.pager, self.stage, host, ino.0.to_string().as_bytes()),
            None => Ok(0),
        });
        self.partial = Some(special);
        match written {
            Err(Error::Damaged(_)) => Ok(None),
            written => written.map(Some),
        }
    }
}
