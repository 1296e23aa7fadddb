//! What the mounting command has the daemon do.

use std::ffi::OsString;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::options::MountOptions;

/// What to serve where. Paths are absolute; they go to the daemon as they are, whatever their encoding.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DaemonConfig {
    pub archive: OsString,
    pub point: OsString,
    pub options: MountOptions,
    pub verbose: bool,
    /// The mount point was made for this mount, and goes with it.
    #[serde(default)]
    pub made: bool,
}

impl DaemonConfig {
    pub fn archive(&self) -> &Path {
        Path::new(&self.archive)
    }

    pub fn point(&self) -> &Path {
        Path::new(&self.point)
    }
}
