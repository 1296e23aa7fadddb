//! Verifies an open archive.

use super::Archive;
use crate::error::Result;

/// What `check` found.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// Blocks in use by pages.
    pub blocks: u64,
    pub inodes: u64,
    pub directories: u64,
    pub bytes: u64,
    /// One sentence each; empty means sound.
    pub findings: Vec<String>,
}

impl Archive {
    /// Verifies structure (quick) or every page, reference and count (full). `progress` gets (done, total), first in blocks for the
    /// pages and the space, then in inodes for the tree of files.
    pub fn check(&self, full: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<CheckReport> {
        let mut findings = self.fs.volume.check_space(full, progress)?;
        let (counts, structure) = self.fs.check_structure(full, progress)?;
        findings.extend(structure);
        let record = self.fs.volume.durable();
        Ok(CheckReport {
            blocks: record.used_blocks,
            inodes: counts.inodes,
            directories: counts.directories,
            bytes: counts.bytes,
            findings,
        })
    }
}
