//! Progress of a copy: totals, and how much of them is complete.
//!
//! Both are counted by one [`CopyTally`]: regular files with their sizes including holes, each file
//! once regardless of its hard links. The completed part therefore does not exceed the total that
//! was counted before, unless the tree grew meanwhile.

use std::collections::HashSet;

use rustix::fs::Stat;

use crate::fs::{Attributes, mode};

/// Progress of an import or extraction.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    pub files: u64,
    pub bytes: u64,
    /// Completed part of the total: includes objects that were unchanged or could not be copied.
    pub passed: FileTotals,
    /// Path of the current object.
    pub path: &'a [u8],
}

impl<'a> Progress<'a> {
    /// Returns the progress of a copy without skipped objects.
    pub(crate) fn copied(files: u64, bytes: u64, path: &'a [u8]) -> Progress<'a> {
        Progress { files, bytes, passed: FileTotals { files, bytes }, path }
    }
}

/// Numbers of copied objects by kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct CopyCounts {
    pub files: u64,
    pub directories: u64,
    /// Further hard links of files.
    pub links: u64,
    pub symlinks: u64,
    /// FIFOs, sockets and devices.
    pub others: u64,
    /// Bytes of file content.
    pub bytes: u64,
}

impl CopyCounts {
    /// Returns the progress at `path`, with `within` bytes of the current file, which are not in
    /// the totals yet.
    pub(crate) fn progress<'a>(&self, path: &'a [u8], within: u64) -> Progress<'a> {
        Progress::copied(self.files, self.bytes + within, path)
    }
}

/// Number of regular files and bytes of their content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileTotals {
    pub files: u64,
    pub bytes: u64,
}

/// Counter of files as a copy encounters them.
#[derive(Default)]
pub(super) struct CopyTally {
    met: FileTotals,
    /// Totals without the current object.
    passed: FileTotals,
    /// Files with several hard links, by device and inode number.
    several: HashSet<(u64, u64)>,
}

impl CopyTally {
    /// Completes the current object, whether it was copied or not.
    pub(super) fn start_next(&mut self) {
        self.passed = self.met;
    }

    pub(super) fn add_host_file(&mut self, stat: &Stat) {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.meet(stat.st_mode, (stat.st_dev, stat.st_ino), stat.st_nlink == 1, size);
    }

    pub(super) fn add_stored_file(&mut self, attributes: &Attributes) {
        self.meet(attributes.mode, (0, attributes.ino.0), attributes.links == 1, attributes.size);
    }

    fn meet(&mut self, mode: u32, id: (u64, u64), has_one_name: bool, size: u64) {
        if mode & mode::TYPE == mode::REGULAR && (has_one_name || self.several.insert(id)) {
            self.met.files += 1;
            // Sizes in an archive are unverified.
            self.met.bytes = self.met.bytes.saturating_add(size);
        }
    }

    /// Returns the totals including the current object.
    pub(super) fn met(&self) -> FileTotals {
        self.met
    }

    /// Returns the completed totals, with at most `within` bytes of the current object.
    pub(super) fn passed(&self, within: u64) -> FileTotals {
        FileTotals { bytes: self.passed.bytes.saturating_add(within).min(self.met.bytes), ..self.passed }
    }
}
