//! Differences between two versions by inode, derived from the parts of their trees that are not
//! shared.

use std::ops::ControlFlow;

use crate::error::{Error, Result};
use crate::format::values::decode_list;
use crate::format::{Ino, kind};
use crate::fs::FileSystem;

/// An inode with records that differ between two versions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangedInode {
    pub(crate) ino: Ino,
    /// A change in extents or inline data. The bytes may be the same on another page: small files
    /// are repacked.
    pub(crate) content: bool,
    pub(crate) xattrs: bool,
    /// Entries of this directory that only the older version has, by name.
    pub(crate) removed_entries: Vec<(Vec<u8>, Ino)>,
    /// Entries that only the newer version has.
    pub(crate) added_entries: Vec<(Vec<u8>, Ino)>,
}

impl FileSystem {
    /// Calls `f` with each inode that has records different from the version of `older`, by
    /// ascending number. Takes time in proportion to the differences. Numbers are never reused,
    /// also across a crash (`Operation::set_aside_inos`, `Volume::open`), so an inode with records
    /// on both sides is the same object.
    ///
    /// # Errors
    /// `Invalid` when the two are not versions of one open archive; read errors.
    pub(crate) fn changes_since(
        &self,
        older: &FileSystem,
        f: &mut dyn FnMut(ChangedInode) -> Result<()>,
    ) -> Result<()> {
        if !self.volume.shares_pages_with(&older.volume) {
            return Err(Error::invalid("only moments of one archive can be compared"));
        }
        // Files whose newest bytes are only in memory: the trees do not show them.
        let mut staged = self.write_buffer.files().into_iter().map(|file| file.ino()).peekable();
        let (state, older_state) = (self.volume.state(), older.volume.state());
        let mut last: Option<ChangedInode> = None;
        self.volume.view(&state).differences(&older.volume.view(&older_state), &mut |key, old, new| {
            // Inode 0 has the lists for reclaim.
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
                        changed.removed_entries.extend(old);
                        changed.added_entries.extend(new);
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
