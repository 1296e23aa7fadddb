//! Configuration of a daemon.

use std::ffi::OsString;
use std::path::Path;

use lockbox_host::mount_options::MountOptions;
use serde::{Deserialize, Serialize};

/// Configuration that the mount command passes to the daemon: the archive, its mount point and its
/// options. Paths are absolute and may have any encoding.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DaemonConfig {
    pub archive: OsString,
    pub point: OsString,
    pub options: MountOptions,
    pub verbose: bool,
    /// The mount point was created for this mount and is removed after the unmount.
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
