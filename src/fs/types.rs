//! The vocabulary of the file system: attributes, requests and entries, free of kernel types.

use crate::error::{CacheStats, LogStats, SnapshotStats};
use crate::format::{Ino, Timestamp};

/// File type and permission bits as in POSIX `st_mode`.
pub mod mode {
    pub const TYPE: u32 = 0o170000;
    pub const SOCKET: u32 = 0o140000;
    pub const SYMLINK: u32 = 0o120000;
    pub const REGULAR: u32 = 0o100000;
    pub const BLOCK: u32 = 0o060000;
    pub const DIRECTORY: u32 = 0o040000;
    pub const CHARACTER: u32 = 0o020000;
    pub const FIFO: u32 = 0o010000;
    pub const SET_UID: u32 = 0o4000;
    pub const SET_GID: u32 = 0o2000;
    pub const STICKY: u32 = 0o1000;
    pub const PERMISSIONS: u32 = 0o7777;
    /// What a umask takes away and an access control list is tied to.
    pub const ACCESS: u32 = 0o777;
}

/// What stat(2) tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    pub ino: Ino,
    pub mode: u32,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    /// Bytes of a file or symlink target; of a directory a multiple of its entries.
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

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    Now,
    To(Timestamp),
}

/// What setattr is to change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttributes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
    pub ctime: Option<SetTime>,
    /// Clears set-id bits as a write by an ordinary user does (kernel's KILL_SUIDGID): set-gid only where the group may execute.
    pub kill_set_id: bool,
    /// With `kill_set_id`, clears set-gid in any case.
    pub kill_set_gid: bool,
    /// Whoever asks brings mtime and ctime of a regular file himself, now or later: what is not given stays.
    pub brings_times: bool,
}

/// Who creates an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Creator {
    pub uid: u32,
    pub gid: u32,
    /// Bits taken from the mode unless the directory has a default access control list, which then decides instead.
    /// None keeps the mode exactly as given and inherits no list, as copies that bring their own permissions want it.
    pub umask: Option<u32>,
}

/// What rename does with an existing target.
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
    /// Where to go on after this entry.
    pub cookie: u64,
}

/// Number of a snapshot, never given to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId(pub u64);

/// A snapshot that can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptSnapshot {
    pub id: SnapshotId,
    pub name: Vec<u8>,
    pub time: Timestamp,
}

/// What statfs(2) tells, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Statistics {
    pub total: u64,
    /// Taken by nothing.
    pub free: u64,
    /// What of it file data may take: less than `free` by what is kept for deletes, commits and the unmount.
    pub available: u64,
    /// In use and free together.
    pub inodes: u64,
    pub free_inodes: u64,
}

/// What an open archive takes and how its caches do, in bytes.
#[derive(Clone, Debug)]
pub struct Usage {
    /// Decrypted pieces of file data.
    pub cells: CacheStats,
    /// Opened heads of data pages.
    pub heads: CacheStats,
    /// Nodes of trees.
    pub nodes: CacheStats,
    /// What no commit has begun to make durable.
    pub dirty_bytes: u64,
    /// What of it a power cut would take; 0 when the log has the rest.
    pub volatile_bytes: u64,
    pub log: LogStats,
    /// None when nobody has looked, or who looked found damage.
    pub snapshots: Option<SnapshotStats>,
    /// The part of the space map that is loaded.
    pub map_bytes: u64,
    /// Length of the archive's file and what of it is in use; None while the space map is busy.
    pub file_bytes: Option<u64>,
    pub used_bytes: Option<u64>,
    /// Why the archive became read-only.
    pub latched: Option<String>,
    /// Why the newest commit was left out when the archive was opened.
    pub fallback: Option<String>,
}

/// How durable things are without fsync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SyncProfile {
    Never,
    #[default]
    Periodic,
    Always,
}

/// How a file system is opened.
#[derive(Clone, Copy, Debug)]
pub struct FsOptions {
    /// Bytes of staged file data at most.
    pub staged_bytes: u64,
    pub sync: SyncProfile,
    /// Pack small files into shared pages.
    pub pack: bool,
    pub compress: bool,
}
