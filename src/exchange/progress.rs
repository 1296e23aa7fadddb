//! How much there is to copy, and how much of that a copy has passed.
//!
//! Both are met by one [`Tally`]: regular files with their sizes, holes counted, each file once however many names it has. So a copy has not passed more
//! than there was when it was counted, unless the tree grew meanwhile.

use std::collections::HashSet;

use rustix::fs::Stat;

use crate::fs::{Attributes, mode};

/// Regular files and the bytes of their content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub files: u64,
    pub bytes: u64,
}

/// The files that were met.
#[derive(Default)]
pub(super) struct Tally {
    met: Amount,
    /// Without what was met last, which is still being copied.
    passed: Amount,
    /// What has further names: its device and its inode.
    several: HashSet<(u64, u64)>,
}

impl Tally {
    /// The next object: what was met before is done with, copied or not.
    pub(super) fn next(&mut self) {
        self.passed = self.met;
    }

    pub(super) fn meet_host(&mut self, stat: &Stat) {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.meet(stat.st_mode, (stat.st_dev, stat.st_ino), stat.st_nlink == 1, size);
    }

    pub(super) fn meet_stored(&mut self, attributes: &Attributes) {
        self.meet(attributes.mode, (0, attributes.ino.0), attributes.links == 1, attributes.size);
    }

    fn meet(&mut self, mode: u32, id: (u64, u64), has_one_name: bool, size: u64) {
        if mode & mode::TYPE == mode::REGULAR && (has_one_name || self.several.insert(id)) {
            self.met.files += 1;
            // The sizes of an archive are its word.
            self.met.bytes = self.met.bytes.saturating_add(size);
        }
    }

    /// All that was met.
    pub(super) fn met(&self) -> Amount {
        self.met
    }

    /// With so much of what was met last, at most as much as that has.
    pub(super) fn passed(&self, within: u64) -> Amount {
        Amount { bytes: self.passed.bytes.saturating_add(within).min(self.met.bytes), ..self.passed }
    }
}
