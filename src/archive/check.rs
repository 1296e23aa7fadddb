//! Verifies an open archive.

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
