//! What became of each inode between two moments, told from what their trees do not share.

use std::ops::ControlFlow;

use crate::error::{Error, Result};
use crate::format::values::decode_list;
use crate::format::{Ino, kind};
use crate::fs::FileSystem;

/// An inode of which some record differs between two moments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangedInode {
    pub(crate) ino: Ino,
    /// Something of what extents or inline data say. It may be the same bytes on another page: those of small files are packed anew.
    pub(crate) content: bool,
    pub(crate) xattrs: bool,
    /// Entries that only the older moment has in this directory, by name.
    pub(crate) gone: Vec<(Vec<u8>, Ino)>,
    /// Those that only the newer one has.
    pub(crate) come: Vec<(Vec<u8>, Ino)>,
}

impl FileSystem {
    /// Calls `f` with each inode of which any record differs from the moment that `older` shows, by ascending number. Takes time by what differs.
    /// A number means one inode for ever: numbers are given once, also across a crash (`Operation::set_aside_inos`, `Volume::open`), so an inode with
    /// records on both sides is the same object.
    ///
    /// # Errors
    /// `Invalid` when the two are not moments of one open archive; what reading meets.
    pub(crate) fn changes_since(
        &self,
        older: &FileSystem,
        f: &mut dyn FnMut(ChangedInode) -> Result<()>,
    ) -> Result<()> {
        if !self.volume.shares_pages_with(&older.volume) {
            return Err(Error::invalid("only moments of one archive can be compared"));
        }
        // Files of which the newest bytes are in memory alone: the trees do not tell of them.
        let mut staged = self.staging.files().into_iter().map(|file| file.ino()).peekable();
        let (state, older_state) = (self.volume.state(), older.volume.state());
        let mut last: Option<ChangedInode> = None;
        self.volume.view(&state).differences(&older.volume.view(&older_state), &mut |key, old, new| {
            // Inode 0 has the lists of what is to be reclaimed.
            if key.object == 0 {
                return Ok(ControlFlow::Continue(()));
            }
            let ino = Ino(key.object);
            if last.as_ref().is_none_or(|last| last.ino != ino) {
                last.take().map_or(Ok(()), &mut *f)?;
                while let Some(before) = staged.next_if(|staged| *staged < ino) {
                    f(ChangedInode { ino: before, content: true, ..ChangedInode::default() })?;
                }
            }
            let changed = last.get_or_insert_with(|| {
                let content = staged.next_if_eq(&ino).is_some();
                ChangedInode { ino, content, ..ChangedInode::default() }
            });
            match key.kind {
                kind::EXTENT | kind::INLINE => changed.content = true,
                kind::XATTR | kind::XATTR_PIECE => changed.xattrs = true,
                // Each entry is in the list and in the index (NAME-1).
                kind::DIR_LIST => {
                    let named = |value: &[u8]| decode_list(value).map(|entry| (entry.name.to_vec(), entry.ino));
                    let (old, new) = (old.map(named).transpose()?, new.map(named).transpose()?);
                    if old != new {
                        changed.gone.extend(old);
                        changed.come.extend(new);
                    }
                }
                _ => {}
            }
            Ok(ControlFlow::Continue(()))
        })?;
        last.map_or(Ok(()), &mut *f)?;
        staged.try_for_each(|ino| f(ChangedInode { ino, content: true, ..ChangedInode::default() }))
    }
}
