//! Attributes, requests and entries of the file system, free of kernel types.

use crate::error::{CacheStats, LogStats, SnapshotStats};
use crate::format::{Ino, Timestamp};
pub use crate::txn::Compression;

/// File type and permission bits of `st_mode`; the format stores the numbers of Linux.
pub mod mode {
    pub use nix::libc::{
        S_IFBLK as BLOCK, S_IFCHR as CHARACTER, S_IFDIR as DIRECTORY, S_IFIFO as FIFO, S_IFLNK as SYMLINK,
        S_IFMT as TYPE, S_IFREG as REGULAR, S_IFSOCK as SOCKET, S_ISGID as SET_GID, S_ISUID as SET_UID,
        S_ISVTX as STICKY,
    };

    pub const PERMISSIONS: u32 = 0o7777;
    /// Bits that a umask clears and an access control list is tied to.
    pub(crate) const ACCESS: u32 = 0o777;
}

/// Attributes of an inode, as in stat(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    pub ino: Ino,
    pub mode: u32,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    /// Bytes of a file or symlink target; for a directory a multiple of its number of entries.
    pub size: u64,
    /// 512-byte units of logical data without holes; never 0 for a file with data.
    pub blocks: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
}

impl Attributes {
    pub fn is_directory(&self) -> bool {
        self.mode & mode::TYPE == mode::DIRECTORY
    }
}

/// New value of a timestamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    Now,
    To(Timestamp),
}

/// Changes requested by setattr.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttributes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
    pub ctime: Option<SetTime>,
    /// Clears set-id bits like a write by an ordinary user (kernel's KILL_SUIDGID): set-gid only if
    /// the group may execute.
    pub kill_set_id: bool,
    /// With `kill_set_id`, clears set-gid in any case.
    pub kill_set_gid: bool,
    /// The caller sets mtime and ctime of a regular file itself, now or later: times that are
    /// `None` stay.
    pub keeps_times: bool,
}

/// Owner and umask of a new object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Creator {
    pub uid: u32,
    pub gid: u32,
    /// Bits cleared in the mode, unless the directory has a default access control list, which then
    /// decides instead. `None` keeps the exact mode and inherits no list, for copies that set their
    /// own permissions.
    pub umask: Option<u32>,
}

/// Treatment of an existing target in rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    Replace,
    NoReplace,
    Exchange,
    /// Leaves a 0:0 character device of this creator in place of the source.
    Whiteout(Creator),
}

/// xattr set flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrMode {
    Set,
    Create,
    Replace,
}

/// One listed directory entry.
#[derive(Clone, Copy, Debug)]
pub struct DirectoryEntry<'a> {
    pub ino: Ino,
    /// `mode >> 12`.
    pub file_type: u8,
    pub name: &'a [u8],
    /// Cookie at which the listing continues after this entry.
    pub cookie: u64,
}

/// Number of a snapshot, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId(pub u64);

/// A readable snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    pub id: SnapshotId,
    pub name: Vec<u8>,
    pub time: Timestamp,
}

/// Space and inode counts in bytes, as in statfs(2).
#[derive(Clone, Copy, Debug)]
pub struct Statistics {
    pub total: u64,
    /// Unallocated space.
    pub free: u64,
    /// Part of `free` that file data may use: without the reserve for deletes, commits and the
    /// unmount.
    pub available: u64,
    /// Used and free inodes together.
    pub inodes: u64,
    pub free_inodes: u64,
}

/// Memory, cache and space usage of an open archive, in bytes.
#[derive(Clone, Debug)]
pub struct Usage {
    /// Decrypted chunks of file data.
    pub chunks: CacheStats,
    /// Opened heads of data pages.
    pub heads: CacheStats,
    /// Nodes of trees.
    pub nodes: CacheStats,
    /// Data that no commit has begun to make durable.
    pub dirty_bytes: u64,
    /// Part of `dirty_bytes` that a power failure would lose; 0 when the log has the rest.
    pub volatile_bytes: u64,
    pub log: LogStats,
    /// `None` before the first look at the snapshots, or when it found damage.
    pub snapshots: Option<SnapshotStats>,
    /// Loaded part of the space map.
    pub map_bytes: u64,
    /// Length of the archive's file, and the used part of it; `None` while the space map is busy.
    pub file_bytes: Option<u64>,
    pub used_bytes: Option<u64>,
    /// Reason why the archive became read-only.
    pub latched: Option<String>,
    /// Reason why the newest commit was left out when the archive was opened.
    pub fallback: Option<String>,
}

/// Durability of changes without fsync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SyncProfile {
    Never,
    #[default]
    Periodic,
    Always,
}

/// Options for opening a file system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FsOptions {
    /// Maximum dirty file data in bytes.
    pub max_dirty_bytes: u64,
    pub sync: SyncProfile,
    /// Pack small files into shared pages.
    pub pack: bool,
    pub compression: Compression,
}
