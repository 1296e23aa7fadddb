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
        let findings = self.fs.volume.check_space(full, progress)?;
        let record = self.fs.volume.durable();
        Ok(CheckReport { pages: 0, inodes: record.inodes, directories: 0, bytes: 0, findings })
    }
}
