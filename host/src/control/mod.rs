//! Control protocol of a daemon: message types of its socket, server and client.
//!
//! One connection carries one request and one final response, each a line of JSON. Before the final
//! response the daemon may send partial results, and actions for the client to execute; the client
//! replies to each action with one [`ActionResult`]. The socket lies in a directory of mode 0700
//! that belongs to the daemon's user, so only that user and root can connect.

mod client;
mod server;
mod socket_paths;

pub use client::{
    ExpectedSnapshots, ListedSnapshot, PAGE, connect_within, exchange_messages, list_daemons, list_snapshots,
    query_held_bytes, send_request, send_request_with_file, send_with_descriptors,
};
pub use lockbox_remote::RequestStats;
pub use server::{ClientConnection, ControlListener, ControlServer, listen, receive_with_descriptors};
pub use socket_paths::{OwnRuntimeDir, RuntimeDir, SUFFIX, own_runtime_dir_below, runtime_dirs_below};

use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::iter;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lockbox_terminal::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use lockbox::error::{CacheStats, LogStats};

/// Longest line that either side reads; bounds memory against a hostile peer.
const MAX_LINE: u64 = 64 << 10;
/// Maximum descriptors attached to a message; the kernel closes further ones.
const MAX_DESCRIPTORS: usize = 4;

/// Longest text that a client keeps of a response, in bytes; the longest path has as many.
const MAX_TEXT: usize = 4096;

/// Request of a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub enum Request {
    Status,
    /// Unmount, commit, close. The response is sent when the archive is closed; then the daemon
    /// exits.
    /// With `lazy` a busy mount is detached and served until its last user has closed it; the
    /// response is sent at once. Refused when the archive's file is unlinked, because its content
    /// is lost when the mount ends; `abandon` overrides this. With `force` a busy mount ends within
    /// seconds: open files fail, and data that a store does not accept is kept on this machine.
    Stop {
        lazy: bool,
        #[serde(default)]
        abandon: bool,
        #[serde(default)]
        force: bool,
    },
    /// Commit now. The response is sent when the commit is durable.
    Sync,
    /// Commit, then erase all free space. The response is sent when the erasure is complete.
    Purge,
    /// Create a snapshot of the current state. The response is sent when it is durable.
    SnapshotCreate {
        name: SnapshotName,
    },
    /// List at most [`PAGE`] snapshots, oldest first, with ids above `after`; with `held`,
    /// including the bytes that each one holds.
    SnapshotList {
        after: u64,
        held: bool,
    },
    /// Compute the bytes reachable only through snapshots with ids in these inclusive ranges.
    SnapshotHeld {
        ranges: Vec<(u64, u64)>,
    },
    /// Copy the current state into the locked file sent with this request. With `whole` the file is
    /// new, otherwise it is a backup to be updated. With `verify` the copy is read back and
    /// compared: all of its records, and `percent` of its file data (all without it). The response
    /// is sent when it is durable; the work is aborted when the client disconnects.
    Backup {
        whole: bool,
        verify: bool,
        #[serde(default)]
        percent: Option<u8>,
    },
    /// Remove the snapshots with these ids. The response is sent when the removal is durable; their
    /// space is freed later. Ids of snapshots that no longer exist are ignored. With `among`,
    /// nothing is removed if one of that set no longer exists.
    SnapshotRemove {
        ids: Vec<u64>,
        among: Option<ExpectedSnapshots>,
    },
    /// Compare two snapshots, or a snapshot with the current state; the result is sent in several
    /// responses.
    SnapshotDiff {
        older: SnapshotName,
        newer: Option<SnapshotName>,
    },
    /// Restore these paths of a snapshot, or everything, in place or into the directory `to`. The
    /// client executes the renames that the daemon requests; the work is aborted when it
    /// disconnects. The final response is sent when the result is durable.
    SnapshotRestore {
        name: SnapshotName,
        paths: Vec<TreePath>,
        to: Option<TreePath>,
    },
}

/// Result of an action that the daemon requested: `None` for success, otherwise the error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActionResult {
    pub errno: Option<i32>,
}

/// Path that differs between two versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathDifference {
    pub path: TreePath,
    /// Path in the older version, for a renamed object.
    #[serde(default)]
    pub from: Option<TreePath>,
    /// Kind of the change, in the words of `lockbox snapshot diff --json`; `changed` likewise.
    pub change: String,
    #[serde(default)]
    pub changed: bool,
}

/// Response of the daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "kebab-case")]
pub enum Response {
    Status(Box<Status>),
    Done,
    /// Success like `Done`, but this many bytes of the last writes are stored on this machine and
    /// not yet uploaded.
    Unsent {
        bytes: u64,
    },
    /// A busy mount was detached and is served until its last user has closed it; then the archive
    /// is closed.
    Detached,
    Busy {
        message: String,
    },
    Failed {
        message: String,
    },
    /// One page of snapshots; `more` when further pages follow.
    Snapshots {
        snapshots: Vec<ListedSnapshot>,
        more: bool,
    },
    /// Bytes that removing the requested snapshots would free.
    Held {
        bytes: u64,
    },
    /// Result of a backup; `None` when too much has changed since the version in the file, and
    /// nothing was written.
    BackedUp {
        done: Option<BackupDone>,
    },
    /// Some of the differences; more of these responses follow, or `Done`.
    Differing {
        found: Vec<PathDifference>,
    },
    /// Name of the snapshot that was created before a restore.
    Kept {
        name: SnapshotName,
    },
    /// Action for the client: rename within the mount, with paths relative to its root. The target
    /// does not exist or, with `exchange`, both paths are exchanged.
    Rename {
        from: TreePath,
        to: TreePath,
        exchange: bool,
    },
    /// Action for the client: create a directory in the mount.
    MakeDirectory {
        path: TreePath,
    },
    /// Refusal of a snapshot or backup request, with the reason.
    Refused {
        why: RefusalReason,
        message: String,
    },
}

/// Completed backup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackupDone {
    pub seconds: i64,
    pub nanos: u32,
    pub generation: u64,
    pub copied_bytes: u64,
    /// Bytes of file data that were verified; `None` without a verification, and from a daemon that
    /// verifies all.
    pub verified_bytes: Option<u64>,
}

/// Machine-readable reason of a refusal, as far as clients distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalReason {
    NoSpace,
    Damaged,
    /// The set of snapshots that the client chose from has changed.
    Changed,
    /// The destination file is not a backup of this archive, or writing it failed.
    Destination,
    DamagedBackup,
    Interrupted,
    #[serde(other)]
    Other,
}

/// Prefix of the daemon's message for a line that it cannot parse.
const NOT_UNDERSTOOD: &str = "request not understood";

impl Response {
    /// Returns the error message of an unexpected response.
    pub fn failure_message(&self) -> String {
        match self {
            Response::Failed { message } if message.starts_with(NOT_UNDERSTOOD) => {
                "the daemon of this mount is older than this program and does not support the request; unmount the archive and mount it again".into()
            }
            Response::Failed { message } | Response::Busy { message } | Response::Refused { message, .. } => message.clone(),
            _ => "unexpected response from the daemon".into(),
        }
    }

    /// Truncates all texts to [`MAX_TEXT`], so that a hostile daemon cannot fill the screen.
    fn truncate_texts(&mut self) {
        let cut = |text: &mut String| text.truncate(text.floor_char_boundary(MAX_TEXT));
        match self {
            Response::Status(status) => {
                let Status { archive, archive_id, mount_point, options, latched, fallback, schedule, follows, .. } =
                    &mut **status;
                // Hexadecimal fields were bounded when they were parsed.
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
            // Names and paths are bounded by their types.
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

/// Status of a mounted archive, as its daemon reports it. Fields that an older daemon does not send
/// are absent or 0.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Process and user id of the daemon; [`send_request`] replaces them with the socket's peer
    /// credentials.
    pub pid: u32,
    pub uid: u32,
    /// Path or address of the archive when the mount began, as text; `archive_hex` has the bytes
    /// when it is not UTF-8. [`Status::archive_path`] reads both.
    pub archive: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub archive_hex: Option<PathBytes>,
    pub archive_id: String,
    /// Unforgeable fingerprint of the archive, as `lockbox info` shows it; empty if the daemon does
    /// not send it.
    pub fingerprint: String,
    /// Path of the mount point when the mount began, in the same two forms. The mount or a parent
    /// directory may have been moved since; clients therefore find it by `mount_id` and
    /// `mount_device`.
    pub mount_point: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mount_point_hex: Option<PathBytes>,
    /// Mount id in the daemon's mount namespace, and device number of the file system, which is
    /// unique while the daemon serves it; 0 if unknown.
    pub mount_id: u64,
    pub mount_device: u64,
    /// Inode number of the daemon's mount namespace; 0 if unknown.
    pub mount_namespace: u64,
    pub read_only: bool,
    pub options: String,
    /// Start of the mount, in seconds since 1970.
    pub since: i64,
    pub generation: u64,
    /// Commits since the start of the mount.
    pub commits: u64,
    pub dirty_bytes: u64,
    /// Open file handles; a mapped file counts while its handle is open.
    pub open_files: u64,
    pub open_directories: u64,
    pub caches: CacheStatus,
    pub log: LogStats,
    /// Memory in bytes that counts against `memory_limit`, the option `memory=`.
    pub memory_bytes: u64,
    pub memory_limit: u64,
    /// Peak resident memory of the daemon, in bytes.
    pub peak_resident_bytes: u64,
    /// Length of the archive's file and bytes in use; `None` while they are being changed.
    pub file_bytes: Option<u64>,
    pub used_bytes: Option<u64>,
    /// Number of snapshots, and time of the newest one in seconds since 1970; `None` if unknown.
    pub snapshots: Option<u64>,
    pub newest_snapshot: Option<i64>,
    /// `None` for a mount without scheduled snapshots.
    pub schedule: Option<ScheduleStatus>,
    /// Reason for which the archive became read-only.
    pub latched: Option<String>,
    /// Reason for which recovery skipped the newest commit when the mount began.
    pub fallback: Option<String>,
    /// Request metrics of a remote archive; `None` for a local file, and if the fetcher does not
    /// report them.
    pub remote: Option<RequestStats>,
    /// Replication state of a mount that follows a remote writer.
    pub follows: Option<ReplicaStatus>,
}

/// Commit that a read-only mount shows while it follows a remote writer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReplicaStatus {
    /// Time of the commit, in seconds since 1970.
    pub committed: i64,
    /// Reason for which newer commits cannot be shown.
    pub failure: Option<String>,
}

/// Snapshot schedule of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScheduleStatus {
    /// Rules in the syntax of the mount option.
    pub rules: String,
    /// Time in seconds since 1970 after which a change triggers the next snapshot.
    pub next: i64,
    /// Reason for the failure of the last attempt.
    pub failure: Option<String>,
}

/// Cache statistics of a daemon.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheStatus {
    /// Decrypted chunks of file data.
    pub cells: CacheStats,
    /// Opened heads of data pages.
    pub heads: CacheStats,
    /// Tree nodes.
    pub nodes: CacheStats,
}

/// Name of a mounted archive's socket. It is derived from the archive's location and not from its
/// id: a backup or a remote version has the id of its origin and may be mounted at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketName(String);

impl SocketName {
    /// Returns the name for a local file, from its device and inode numbers. No other file can have
    /// these while a daemon has the file open.
    pub fn of_file(file: &Metadata) -> SocketName {
        SocketName(format!("{:x}-{:x}.sock", file.dev(), file.ino()))
    }

    /// Returns the name for an address: a hash, because a socket's path is limited to about 100
    /// bytes.
    pub fn of_address(address: &OsStr) -> SocketName {
        SocketName::of_hash(Sha256::new().chain_update(address.as_encoded_bytes()))
    }

    /// Returns the name for a read-only mount of a remote archive. It depends on the mount point,
    /// because several readers may exist at once and do not exclude each other.
    pub fn of_reader(address: &OsStr, point: &Path) -> SocketName {
        let point = point.as_os_str().as_encoded_bytes();
        SocketName::of_hash(
            Sha256::new().chain_update(address.as_encoded_bytes()).chain_update([0]).chain_update(point),
        )
    }

    fn of_hash(hash: Sha256) -> SocketName {
        SocketName(hex(&hash.finalize()[..16]) + ".sock")
    }

    pub fn is_of(&self, socket: &Path) -> bool {
        socket.file_name() == Some(OsStr::new(&self.0))
    }
}

/// Returns the path of a mounted archive's socket: `runtime/lockbox/NAME`.
pub fn socket_path(runtime: &Path, name: &SocketName) -> PathBuf {
    directory(runtime).join(&name.0)
}

fn directory(runtime: &Path) -> PathBuf {
    runtime.join("lockbox")
}

/// Longest name of a snapshot, in bytes.
const MAX_NAME: usize = 255;
/// Longest path, in bytes: two of them and the rest of a message fit into a line. The kernel's
/// limit is 4096.
const MAX_PATH: usize = 12 << 10;

/// Name of a snapshot. Names and paths are sent as bytes in hexadecimal digits, which is lossless
/// and at most twice as long. Paths in the status of a daemon are text, and additionally bytes if
/// the path is not UTF-8.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotName(pub Vec<u8>);

/// Path relative to the root of the mount, without a leading slash.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TreePath(pub Vec<u8>);

/// Path of the host that is not UTF-8.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PathBytes(pub Vec<u8>);

impl TreePath {
    /// Returns whether the path is short enough to be sent.
    pub fn fits(&self) -> bool {
        self.0.len() <= MAX_PATH
    }
}

/// Implements the hexadecimal conversions of a type, with its maximum length in bytes.
macro_rules! as_digits {
    ($($type:ident: $most:expr),+) => { $(
        impl From<$type> for String {
            fn from(sent: $type) -> String {
                hex(&sent.0)
            }
        }

        impl TryFrom<String> for $type {
            type Error = &'static str;

            fn try_from(digits: String) -> Result<$type, &'static str> {
                bytes(&digits, $most).map($type)
            }
        }
    )+ };
}

as_digits!(SnapshotName: MAX_NAME, TreePath: MAX_PATH, PathBytes: MAX_TEXT);

fn bytes(digits: &str, most: usize) -> Result<Vec<u8>, &'static str> {
    if digits.len() > 2 * most || !digits.len().is_multiple_of(2) {
        return Err("a name of such a length does not exist");
    }
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|digit| digit as u8);
    let bytes = digits.as_bytes().chunks_exact(2).map(|pair| Some(digit(&pair[0])? << 4 | digit(&pair[1])?));
    bytes.collect::<Option<Vec<u8>>>().ok_or("a name is hexadecimal digits")
}

impl Status {
    /// Returns the path or address of the archive.
    pub fn archive_path(&self) -> PathBuf {
        path(&self.archive, self.archive_hex.as_ref())
    }

    pub fn set_archive(&mut self, archive: &Path) {
        (self.archive, self.archive_hex) = forms(archive);
    }

    pub fn mount_point_path(&self) -> PathBuf {
        path(&self.mount_point, self.mount_point_hex.as_ref())
    }

    pub fn set_mount_point(&mut self, point: &Path) {
        (self.mount_point, self.mount_point_hex) = forms(point);
    }
}

fn path(text: &str, bytes: Option<&PathBytes>) -> PathBuf {
    bytes.map_or_else(|| PathBuf::from(text), |bytes| PathBuf::from(OsString::from_vec(bytes.0.clone())))
}

fn forms(path: &Path) -> (String, Option<PathBytes>) {
    let bytes = path.to_str().is_none().then(|| PathBytes(path.as_os_str().as_bytes().to_vec()));
    (path.to_string_lossy().into_owned(), bytes)
}

#[cfg(test)]
mod tests;
