//! Messages of the daemon's control socket (status, sync, purge, snapshots, stop), its server and its client.
//!
//! One connection carries one request and one answer, each a line of JSON. Before the answer the daemon may say more: parts of it, and what the client is to do
//! for it, which the client answers with one [`Carried`] each. The socket lies in a directory of mode 0700
//! that belongs to the daemon's user, so only that user and root reach it.

mod client;
mod names;
mod paths;
mod server;
mod snapshots;
mod socket_paths;

pub use client::{ask, ask_with_file, connect_within, converse, running};
pub use names::{Name, PathBytes, TreePath};
pub use server::{Client, Listening, Server, listen};
pub use snapshots::{Among, Listed, PAGE, held, ranges, snapshots};
pub use socket_paths::{Place, Runtime, SUFFIX, places, runtime};

use std::ffi::OsStr;
use std::fmt::Write;
use std::fs::Metadata;
use std::iter;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

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
    /// With `lazy` a busy mount is detached and served until its last user is gone, which is
    /// answered at once. Refused when the archive's file has no name any more, because the end of
    /// the mount is that of its content, except with `abandon`.
    Stop {
        lazy: bool,
        #[serde(default)]
        abandon: bool,
    },
    /// Commit now; answered when durable.
    Sync,
    /// Commit, then erase everything that is free; answered when done.
    Purge,
    /// Keep what is there now; answered when durable.
    SnapshotCreate {
        name: Name,
    },
    /// [`PAGE`] snapshots at most, the oldest first, with ids above `after`; with `held`, what each one holds.
    SnapshotList {
        after: u64,
        held: bool,
    },
    /// What nothing shows but snapshots whose ids lie in one of these ranges, the ends included.
    SnapshotHeld {
        ranges: Vec<(u64, u64)>,
    },
    /// Copy what is there now into the file that comes with this, which is locked: with `whole` it is new, else it is a backup to be brought up to date.
    /// With `verify` it is read back and compared. Answered when it is durable; the work ends when the client goes.
    Backup {
        whole: bool,
        verify: bool,
    },
    /// Remove those with these ids; answered when durable, with what they held still to be freed. An id that is gone is passed over. With `among`,
    /// nothing is removed when one of those is gone.
    SnapshotRemove {
        ids: Vec<u64>,
        among: Option<Among>,
    },
    /// Tell what differs between two snapshots, or between one and now, in several answers.
    SnapshotDiff {
        older: Name,
        newer: Option<Name>,
    },
    /// Bring back what a snapshot shows: these paths of it or everything, in their places or `to` another directory. The client changes names as it is told;
    /// the work ends when it goes. Answered when it is durable.
    SnapshotRestore {
        name: Name,
        paths: Vec<TreePath>,
        to: Option<TreePath>,
    },
}

/// How what the client was told to do ended: None when it is done, else the number of the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    pub errno: Option<i32>,
}

/// A path that differs between two moments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    pub path: TreePath,
    /// The path that it had before, when it was renamed.
    #[serde(default)]
    pub from: Option<TreePath>,
    /// As `lockbox snapshot diff --json` says it, like the next one.
    pub change: String,
    #[serde(default)]
    pub changed: bool,
}

/// What the daemon answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "kebab-case")]
pub enum Response {
    Status(Box<Status>),
    Done,
    /// As `Done`; what was written last is kept on this machine, and not in the store: so many bytes.
    Unsent {
        bytes: u64,
    },
    /// A busy mount is out of the tree and served until its last user is gone; then the archive is closed.
    Detached,
    Busy {
        message: String,
    },
    Failed {
        message: String,
    },
    /// A page of them, and whether there are more.
    Snapshots {
        snapshots: Vec<Listed>,
        more: bool,
    },
    /// What removing the snapshots that were asked about gives back.
    Held {
        bytes: u64,
    },
    /// What the backup shows; None when too much has changed since the moment that the file shows, and nothing was done.
    BackedUp {
        done: Option<BackupDone>,
    },
    /// Some of what differs; more follows, or `Done`.
    Differing {
        found: Vec<Difference>,
    },
    /// A snapshot of what there was before a restore has this name.
    Kept {
        name: Name,
    },
    /// The client is to rename within the mount, by paths from its root: to a path that nothing has or, with `exchange`, to that of an object which gets the
    /// other path.
    Rename {
        from: TreePath,
        to: TreePath,
        exchange: bool,
    },
    /// The client is to make a directory in the mount.
    MakeDirectory {
        path: TreePath,
    },
    /// To what is asked about snapshots and backups: it was not done, and why.
    Refused {
        why: Why,
        message: String,
    },
}

/// A backup that was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackupDone {
    pub seconds: i64,
    pub nanos: u32,
    pub generation: u64,
    pub copied_bytes: u64,
}

/// Why something was not done, as far as a client acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    NoSpace,
    Damaged,
    /// The snapshots that the choice was made among are not those that there are.
    Changed,
    /// The file is not the backup that it would have to be, or fails.
    Destination,
    DamagedBackup,
    Interrupted,
    #[serde(other)]
    Other,
}

/// What a daemon says, before all else, of a line that it does not know.
const NOT_UNDERSTOOD: &str = "request not understood";

impl Response {
    /// The sentence of an answer that is not the one that was hoped for.
    pub fn complaint(&self) -> String {
        match self {
            Response::Failed { message } if message.starts_with(NOT_UNDERSTOOD) => {
                "the daemon of this mount is older than this program and does not know what is asked: unmount the archive and mount it again".into()
            }
            Response::Failed { message } | Response::Busy { message } | Response::Refused { message, .. } => message.clone(),
            Response::Status(_)
            | Response::Done | Response::Unsent { .. } | Response::Detached
            | Response::Snapshots { .. }
            | Response::Held { .. }
            | Response::BackedUp { .. }
            | Response::Differing { .. }
            | Response::Kept { .. }
            | Response::Rename { .. }
            | Response::MakeDirectory { .. } => "the daemon gave an answer that was not asked for".into(),
        }
    }

    /// Nobody's daemon gets to fill a screen.
    fn shorten(&mut self) {
        let cut = |text: &mut String| text.truncate(text.floor_char_boundary(MAX_TEXT));
        match self {
            Response::Status(status) => {
                let Status { archive, archive_id, mount_point, options, latched, fallback, schedule, follows, .. } =
                    &mut **status;
                // The digits were bounded when they were read.
                let failure = follows.iter_mut().flat_map(|it| &mut it.failure);
                let schedule = schedule.iter_mut().flat_map(|it| iter::once(&mut it.rules).chain(&mut it.failure));
                let texts = [archive, archive_id, mount_point, options]
                    .into_iter()
                    .chain(latched)
                    .chain(fallback)
                    .chain(failure);
                texts.chain(schedule).for_each(cut);
            }
            Response::Busy { message } | Response::Failed { message } | Response::Refused { message, .. } => {
                cut(message)
            }
            // Names and paths are as long as they may be.
            Response::Done
            | Response::Unsent { .. }
            | Response::Detached
            | Response::Snapshots { .. }
            | Response::Held { .. }
            | Response::BackedUp { .. }
            | Response::Differing { .. }
            | Response::Kept { .. }
            | Response::Rename { .. }
            | Response::MakeDirectory { .. } => {}
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
    /// Path or address of the archive when the mount began, as text; in digits when it is not
    /// UTF-8. [`Status::archive_path`] reads both.
    pub archive: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub archive_hex: Option<PathBytes>,
    pub archive_id: String,
    /// Fingerprint that no other archive can have, as `lockbox info` shows it; empty of a daemon
    /// that does not tell.
    pub fingerprint: String,
    /// Path of the mount point when the mount began, in the same two forms. A mount is moved and a
    /// directory above it renamed, so a client looks its numbers up instead.
    pub mount_point: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mount_point_hex: Option<PathBytes>,
    /// The kernel's number of the mount in the namespace of the daemon, and the device number of
    /// its file system, which no other one has while the daemon serves it; 0 where they are not
    /// known.
    pub mount_id: u64,
    pub mount_device: u64,
    /// The number of the mount namespace in which the daemon is, and the mount was made; 0 where that is not known.
    pub mount_namespace: u64,
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
    /// How many snapshots there are, and when the newest one was taken, in seconds since 1970; None where that is not known.
    pub snapshots: Option<u64>,
    pub newest_snapshot: Option<i64>,
    /// None for a mount that takes none by itself.
    pub schedule: Option<Schedule>,
    /// Why the archive became read-only.
    pub latched: Option<String>,
    /// Why the newest commit was left out when the mount began.
    pub fallback: Option<String>,
    /// What was asked of the server of an archive that is no file of this host; None for a file, and where the process that asks does not tell.
    pub remote: Option<Traffic>,
    /// Of a mount that shows what is written elsewhere.
    pub follows: Option<Follows>,
}

/// Of which commit a mount is that follows a writer elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Follows {
    /// When it was made, in seconds since 1970.
    pub committed: i64,
    /// Why what is newer cannot be shown.
    pub failure: Option<String>,
}

/// What was asked of a server since the mount began, as lockbox-remote counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// Requests for parts of files or objects, and for lists.
    pub reads: u64,
    pub lists: u64,
    /// Bytes that came.
    pub bytes: u64,
    /// Pieces that were in memory or on disk.
    pub memory_hits: u64,
    pub disk_hits: u64,
    /// Since when no request was answered, in seconds since 1970; None when the last one was.
    pub offline_since: Option<i64>,
    /// Bytes that this machine keeps because the store did not take them.
    pub unsent: u64,
}

/// What a mount does by itself about snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Schedule {
    /// As the option says it.
    pub rules: String,
    /// From when on a change is reason to take the next one, in seconds since 1970.
    pub next: i64,
    /// Why the last attempt failed.
    pub failure: Option<String>,
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

/// The name of the socket of a mounted archive. It says where the archive is and not which: a backup, or what a server shows, has the id of its
/// origin and may be mounted beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketName(String);

impl SocketName {
    /// Of an archive in a file of this host. While a daemon has the file open, no other one gets its numbers.
    pub fn of_file(file: &Metadata) -> SocketName {
        SocketName(format!("{:x}-{:x}.sock", file.dev(), file.ino()))
    }

    /// Of an archive at an address. A hash, because a socket's path has room for about 100 bytes.
    pub fn of_address(address: &OsStr) -> SocketName {
        SocketName::of_hash(Sha256::new().chain_update(address.as_encoded_bytes()))
    }

    /// Of a mount that reads an archive at an address: it is in nobody's way, and there may be several.
    pub fn of_reader(address: &OsStr, point: &Path) -> SocketName {
        let point = point.as_os_str().as_encoded_bytes();
        SocketName::of_hash(
            Sha256::new().chain_update(address.as_encoded_bytes()).chain_update([0]).chain_update(point),
        )
    }

    fn of_hash(hash: Sha256) -> SocketName {
        let mut name = String::with_capacity(37);
        for byte in &hash.finalize()[..16] {
            // Writing to a String never fails.
            let _ = write!(name, "{byte:02x}");
        }
        SocketName(name + ".sock")
    }

    /// Whether the socket at this path has this name.
    pub fn is_of(&self, socket: &Path) -> bool {
        socket.file_name() == Some(OsStr::new(&self.0))
    }
}

/// Where the socket of a mounted archive lies: `runtime/lockbox/NAME`.
pub fn socket_path(runtime: &Path, name: &SocketName) -> PathBuf {
    directory(runtime).join(&name.0)
}

fn directory(runtime: &Path) -> PathBuf {
    runtime.join("lockbox")
}

#[cfg(test)]
mod tests;
