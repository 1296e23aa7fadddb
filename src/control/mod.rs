//! Messages of the daemon's control socket (status, sync, purge, stop), its server and its client.
//!
//! One connection carries one request and one answer, each a line of JSON. The socket lies in a directory of mode 0700
//! that belongs to the daemon's user, so only that user and root reach it.

mod client;
mod server;

pub use client::{ask, running};
pub use server::{Server, serve};

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Longest line that either side reads, so that a stranger's stream cannot fill the memory.
const MAX_LINE: u64 = 64 << 10;

/// What a client asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub enum Request {
    Status,
    /// Unmount, commit, close; the answer comes when the archive is closed, then the daemon exits.
    /// With `lazy` a busy mount is detached and served until its last user is gone.
    Stop {
        lazy: bool,
    },
    /// Commit now; answered when durable.
    Sync,
    /// Commit, then erase everything that is free; answered when done.
    Purge,
}

/// What the daemon answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "kebab-case")]
pub enum Response {
    Status(Status),
    Done,
    Busy { message: String },
    Failed { message: String },
}

/// A mounted archive as its daemon describes itself.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    pub pid: u32,
    pub archive: String,
    pub archive_id: String,
    pub mount_point: String,
    pub read_only: bool,
    pub options: String,
    pub generation: u64,
    pub dirty_bytes: u64,
}

/// Where the socket of an archive lies: `runtime/lockbox/<hex id>.sock`.
pub fn socket_path(runtime: &Path, archive_id: &[u8; 16]) -> PathBuf {
    let mut name = String::with_capacity(37);
    for byte in archive_id {
        // Writing to a String never fails.
        let _ = write!(name, "{byte:02x}");
    }
    name.push_str(".sock");
    directory(runtime).join(name)
}

fn directory(runtime: &Path) -> PathBuf {
    runtime.join("lockbox")
}

#[cfg(test)]
mod tests;
