//! Dirty data in log entries: pieces written to an entry, and their replay (specification 9.4,
//! 9.5).

use std::collections::BTreeMap;

use super::dirty_content::TouchedFrames;
use super::{INLINE_GROUPS, Layer, WHOLE_GROUPS, WriteBuffer};
use crate::error::{Error, Result};
use crate::format::log::{LogEntry, LogPiece, piece_length};
use crate::format::{Ino, kind};
use crate::fs::inode;
use crate::fs::types::mode;
use crate::txn::{Reservation, View, groups_for};

/// Valid pieces of several log entries, by inode.
#[derive(Default)]
pub(crate) struct LogPieces(BTreeMap<Ino, Layer>);

impl LogPieces {
    /// Collects the pieces of entries in their order. Of each entry it first drops ranges, then
    /// inodes that were removed, then puts its pieces over older ones.
    pub(crate) fn of(entries: &[LogEntry]) -> LogPieces {
        let mut all: BTreeMap<Ino, Layer> = BTreeMap::new();
        for entry in entries {
            for dropped in &entry.dropped {
                if let Some(layer) = all.get_mut(&dropped.ino) {
                    layer.remove(dropped.start..dropped.end);
                }
            }
            for (key, _) in entry.records.iter().filter(|(key, value)| key.kind == kind::INODE && value.is_none()) {
                all.remove(&Ino(key.object));
            }
            for piece in &entry.pieces {
                all.entry(piece.ino).or_default().put(piece.offset, &piece.data);
            }
        }
        all.retain(|_, layer| !layer.is_empty());
        LogPieces(all)
    }

    /// Returns the bytes of one file with their offsets, ascending.
    pub(crate) fn of_file(&self, ino: Ino) -> impl Iterator<Item = (u64, &[u8])> {
        self.0.get(&ino).into_iter().flat_map(Layer::iter)
    }

    pub(in crate::fs) fn len(&self) -> u64 {
        self.0.values().map(Layer::pieces).sum()
    }

    /// Returns the maximum groups for writing all of it back, in any state of the files.
    pub(in crate::fs) fn groups(&self) -> u64 {
        let frames = self.0.values().flat_map(|layer| layer.frames().values());
        frames.map(|frame| groups_for(frame.bytes(), frame.pieces.len() as u64).min(WHOLE_GROUPS) + INLINE_GROUPS).sum()
    }
}

impl WriteBuffer {
    /// Returns the dirty pieces that are in no log entry, if an entry with `capacity` bytes can
    /// hold them, and marks them as logged. The caller holds the writers' lock, so nothing is
    /// published meanwhile, and the pieces are consistent with the published state (STAGE-3).
    pub(in crate::fs) fn take_log_pieces(&self, capacity: usize) -> Option<Vec<LogPiece>> {
        let state = self.volume.state();
        let _gate = self.gate.write();
        let mut files = self.files();
        files.retain(|file| file.with_content(|content| !content.is_logged()));
        let (mut pieces, mut length) = (Vec::new(), 0);
        for file in &files {
            let unlogged = file.with_content(|content| {
                content.drop_published(&state);
                content.unlogged()
            });
            for (offset, data) in unlogged.iter() {
                length += piece_length(data.len());
                if length > capacity {
                    return None;
                }
                pieces.push(LogPiece { ino: file.ino(), offset, data: data.to_vec() });
            }
        }
        files.iter().for_each(|file| file.with_content(|content| content.mark_logged()));
        Some(pieces)
    }

    /// Returns whether every dirty byte is in a log entry.
    pub(in crate::fs) fn is_logged(&self) -> bool {
        self.files().iter().all(|file| file.with_content(|content| content.is_logged()))
    }

    /// Replays pieces of log entries into the buffer; `view` has the records of the entries. A
    /// writer passes the space for all of them in `reserved`.
    ///
    /// # Errors
    /// `NoSpace` when `reserved` is too small. For a writer, `Damaged` for a damaged inode.
    pub(in crate::fs) fn restore_from_log(
        &self,
        pieces: &LogPieces,
        view: View<'_>,
        mut reserved: Option<Reservation>,
    ) -> Result<()> {
        let writes = reserved.is_some();
        for (ino, layer) in &pieces.0 {
            let has_bytes = match inode::find(view, *ino) {
                // An orphan in reclaim has hidden extents, and no bytes either.
                Ok(Some(inode)) => inode.mode & mode::TYPE == mode::REGULAR && (inode.links > 0 || inode.trim > 0),
                // A removed file has no bytes.
                Ok(None) => false,
                // LOG-6: a reader of this file gets the error.
                Err(Error::Damaged(_)) if !writes => true,
                Err(error) => return Err(error),
            };
            if !has_bytes {
                continue;
            }
            let entry = self.file(*ino);
            let accepted = entry.with_content(|content| {
                layer.iter().all(|(offset, data)| {
                    if !writes {
                        content.put(offset, data);
                        return true;
                    }
                    // One at a time, as they were written: each piece of a frame has its own space.
                    let parts = [(offset, data)];
                    let touched = TouchedFrames::new(&parts, true);
                    let mut own = reserved.as_mut().map(|all| all.split(touched.shortfall(content)));
                    content.accept(&touched, &parts, &mut own)
                })
            });
            if !accepted {
                return Err(Error::NoSpace("no room for what the log says of files".into()));
            }
        }
        if writes {
            self.volume.mark_staged();
        }
        Ok(())
    }
}
