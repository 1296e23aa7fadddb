//! Messages of the daemon's control socket (status, sync, purge, stop), its server and its client.
//!
//! One connection carries one request and one answer, each a line of JSON. The socket lies in a directory of mode 0700
//! that belongs to the daemon's user, so only that user and root reach it.

mod client;
mod places;
mod server;

pub use client::{ask, connect_within, running};
pub use places::{Place, Runtime, places, runtime};
pub use server::{Listening, Server, listen};

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{CacheUse, LogUse};

/// Longest line that either side reads, so that a stranger's stream cannot fill the memory.
const MAX_LINE: u64 = 64 << 10;

/// Longest text that a client takes from an answer, in bytes; a path has no more.
const MAX_TEXT: usize = 4096;

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
    Status(Box<Status>),
    Done,
    Busy { message: String },
    Failed { message: String },
}

impl Response {
    /// Nobody's daemon gets to fill a screen.
    fn shorten(&mut self) {
        let cut = |text: &mut String| text.truncate(text.floor_char_boundary(MAX_TEXT));
        match self {
            Response::Status(status) => {
                let Status { archive, archive_id, mount_point, options, latched, fallback, .. } = &mut **status;
                [archive, archive_id, mount_point, options].into_iter().chain(latched).chain(fallback).for_each(cut);
            }
            Response::Busy { message } | Response::Failed { message } => cut(message),
            Response::Done => {}
        }
    }
}

/// A mounted archive as its daemon describes itself. What an older daemon does not tell is absent or 0.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Process and user id of the daemon; [`ask`] puts what the kernel says in their place.
    pub pid: u32,
    pub uid: u32,
    pub archive: String,
    pub archive_id: String,
    pub mount_point: String,
    pub read_only: bool,
    pub options: String,
    /// When the mount began, in seconds since 1970.
    pub since: i64,
    pub generation: u64,
    /// Commits since the mount began.
    pub commits: u64,
    pub dirty_bytes: u64,
    /// Handles that programs have open; a mapped file counts while its handle is open.
    pub open_files: u64,
    pub open_directories: u64,
    pub caches: Caches,
    pub log: LogUse,
    /// Bytes that count against `memory_limit`, the option `memory=`.
    pub memory_bytes: u64,
    pub memory_limit: u64,
    /// The most memory that the daemon ever had resident, in bytes.
    pub peak_resident_bytes: u64,
    /// Length of the archive's file and what of it is in use; None while that is being changed.
    pub file_bytes: Option<u64>,
    pub used_bytes: Option<u64>,
    /// Why the archive became read-only.
    pub latched: Option<String>,
    /// Why the newest commit was left out when the mount began.
    pub fallback: Option<String>,
}

/// The caches of a daemon.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Caches {
    /// Decrypted pieces of file data.
    pub cells: CacheUse,
    /// Opened heads of data pages.
    pub heads: CacheUse,
    /// Nodes of trees.
    pub nodes: CacheUse,
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
