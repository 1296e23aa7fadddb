//! Verifies an open archive.

use super::Archive;
use crate::error::Result;

/// What `check` found.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    pub pages: u64,
    pub inodes: u64,
    pub directories: u64,
    pub bytes: u64,
    /// One sentence each; empty means sound.
    pub findings: Vec<String>,
}

impl Archive {
    /// Verifies structure (quick) or every page, reference and count (full); `progress` gets (done, total) blocks.
    pub fn check(&self, full: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<CheckReport> {
        // The tree first: what it cannot reach need not be counted.
        let (counts, mut findings) = self.fs.check_structure(full, progress)?;
        findings.extend(self.fs.volume.check_space(full, progress)?);
        Ok(CheckReport {
            pages: self.fs.volume.space().1,
            inodes: counts.inodes,
            directories: counts.directories,
            bytes: counts.bytes,
            findings,
        })
    }
}
