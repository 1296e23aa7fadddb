//! Messages of the daemon's control socket (status, stop) and the client side of it.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Result;

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
    let _ = (runtime, archive_id);
    todo!()
}

/// Sends one request to a daemon and waits for the answer (one line of JSON each way).
pub fn ask(socket: &Path, request: &Request) -> Result<Response> {
    let _ = (socket, request);
    todo!()
}

/// Every daemon that answers in `runtime/lockbox`, with its socket; dead sockets are skipped.
pub fn running(runtime: &Path) -> Result<Vec<(PathBuf, Status)>> {
    let _ = runtime;
    todo!()
}
