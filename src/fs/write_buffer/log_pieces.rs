//! Staged data in entries of the log: what an entry takes, and what comes back from it (specification 9.4, 9.5).

use std::collections::BTreeMap;

use super::dirty_content::Touched;
use super::{INLINE_GROUPS, Layer, Staging, WHOLE_GROUPS};
use crate::error::{Error, Result};
use crate::format::log::{LogEntry, LogPiece, piece_length};
use crate::format::{Ino, kind};
use crate::fs::inode;
use crate::fs::types::mode;
use crate::txn::{Reservation, View, groups_for};

/// The pieces of several entries that count, by inode.
#[derive(Default)]
pub(crate) struct LoggedPieces(BTreeMap<Ino, Layer>);

impl LoggedPieces {
    /// Entries in their order: first what counts no more, then records that go, then pieces over older ones.
    pub(crate) fn of(entries: &[LogEntry]) -> LoggedPieces {
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
        LoggedPieces(all)
    }

    /// Bytes of one file with their offsets, ascending.
    pub(crate) fn of_file(&self, ino: Ino) -> impl Iterator<Item = (u64, &[u8])> {
        self.0.get(&ino).into_iter().flat_map(Layer::iter)
    }

    pub(in crate::fs) fn len(&self) -> u64 {
        self.0.values().map(Layer::pieces).sum()
    }

    /// Groups that writing all of it out takes at most, whatever the files are.
    pub(in crate::fs) fn groups(&self) -> u64 {
        let frames = self.0.values().flat_map(|layer| layer.frames().values());
        frames.map(|frame| groups_for(frame.bytes(), frame.pieces.len() as u64).min(WHOLE_GROUPS) + INLINE_GROUPS).sum()
    }
}

impl Staging {
    /// The staged pieces that no entry has, when an entry has `capacity` bytes for them; from then on they count as logged. The caller holds the
    /// writers' lock, so nothing is published meanwhile, and what is answered is one moment with what is published (STAGE-3).
    pub(in crate::fs) fn log(&self, capacity: usize) -> Option<Vec<LogPiece>> {
        let state = self.volume.state();
        let _gate = self.gate.write();
        let mut files = self.files();
        files.retain(|file| file.with(|content| !content.is_logged()));
        let (mut pieces, mut length) = (Vec::new(), 0);
        for file in &files {
            let unlogged = file.with(|content| {
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
        files.iter().for_each(|file| file.with(|content| content.mark_logged()));
        Some(pieces)
    }

    /// Whether no byte is staged that no entry has.
    pub(in crate::fs) fn is_logged(&self) -> bool {
        self.files().iter().all(|file| file.with(|content| content.is_logged()))
    }

    /// Accepts pieces that were staged when their entry was written; `view` has the records of the entries. For who writes, `reserved` is room for all.
    ///
    /// # Errors
    /// `NoSpace` when `reserved` does not suffice. `Damaged` for an inode that is, for who writes.
    pub(in crate::fs) fn restore(
        &self,
        pieces: &LoggedPieces,
        view: View<'_>,
        mut reserved: Option<Reservation>,
    ) -> Result<()> {
        let writes = reserved.is_some();
        for (ino, layer) in &pieces.0 {
            let has_bytes = match inode::find(view, *ino) {
                // Nor has one that is being taken to pieces, whose extents are hidden.
                Ok(Some(inode)) => inode.mode & mode::TYPE == mode::REGULAR && (inode.links > 0 || inode.trim > 0),
                // A file that went has no bytes.
                Ok(None) => false,
                // LOG-6: whoever asks for it is told.
                Err(Error::Damaged(_)) if !writes => true,
                Err(error) => return Err(error),
            };
            if !has_bytes {
                continue;
            }
            let entry = self.entry(*ino);
            let accepted = entry.with(|content| {
                layer.iter().all(|(offset, data)| {
                    if !writes {
                        content.put(offset, data);
                        return true;
                    }
                    // One by one, as they were written: each piece of a frame has room of its own.
                    let parts = [(offset, data)];
                    let touched = Touched::new(&parts, true);
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
