//! File data written but not yet sealed: bounded, visible to readers at once.

use super::FileSystem;
use crate::format::Ino;

pub(crate) struct Staging;

impl FileSystem {
    pub(crate) fn staged_size(&self, _ino: Ino) -> Option<(u64, u64)> {
        None
    }

    pub(crate) fn forget_staged(&self, _ino: Ino) {}
}
