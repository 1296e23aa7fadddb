//! Snapshot diff and restore in a running mount.
//!
//! # Rename through the kernel
//! The kernel assumes that all name changes pass through it (KERNEL-5). So a restore makes its
//! client rename the finished tree into place, through the kernel and with the client's rights. All
//! other steps run here, hidden from the kernel or reported to it (KERNEL-11). If the client
//! disconnects, the restore ends: each path then has either its old content or all of the
//! snapshot's.
//!
//! The snapshot that is taken first includes all writes that returned before the request. Open
//! files keep their inode; data written to a replaced file is lost with it.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use lockbox::archive::SnapshotManager;
use lockbox::control::{ClientConnection, PathDifference, Response, SnapshotName, TreePath};
use lockbox::error::{Refusal, Timestamp};
use lockbox::exchange::{LiveNamespace, PathChange, PathChangeKind, Restore, compare};
use lockbox::format::Ino;
use lockbox::fs::{Creator, FileSystem};
use lockbox::{Error, Result};
use lockbox_terminal::display;
use nix::unistd::{getegid, geteuid};
use parking_lot::Mutex;

use crate::kernel_cache::KernelCache;

/// Time for a client's rename, which may wait for other users of the directory. A stopped client
/// must not keep the staging directory for ever.
const RENAME_TIME: Duration = Duration::from_secs(60);
/// Interval at which a waiting request checks that its client is connected.
const CLIENT_POLL: Duration = Duration::from_millis(200);
/// Approximate size of one response line with differences.
const LINE_BYTES: usize = 32 << 10;
/// Maximum number of differences in memory: about 300 MiB at a measured 310 bytes each.
const MAX_HELD: usize = 1_000_000;

/// Serializes restores and comparisons: a restore would treat another one's staging directory as a
/// leftover, and a comparison takes memory.
#[derive(Default)]
pub(crate) struct OperationLocks {
    restore: Mutex<()>,
    comparison: Mutex<()>,
}

/// Acquires the lock, or fails once the client has disconnected.
fn acquire<'a>(turn: &'a Mutex<()>, client: &ClientConnection) -> Result<impl Drop + 'a> {
    loop {
        if let Some(held) = turn.try_lock_for(CLIENT_POLL) {
            return Ok(held);
        }
        check_client(client)?;
    }
}

/// # Errors
/// `Interrupted` if the client has disconnected.
fn check_client(client: &ClientConnection) -> Result<()> {
    if client.is_gone() { Err(Error::Interrupted(0)) } else { Ok(()) }
}

/// Sends the differences from `older` to `newer`, or to the live tree.
pub(crate) fn send_differences(
    (fs, moments): (&FileSystem, &SnapshotManager),
    locks: &OperationLocks,
    client: &ClientConnection,
    older: &SnapshotName,
    newer: Option<&SnapshotName>,
) -> Result<Response> {
    let found = differences((fs, moments), locks, client, older, newer)?;
    // The client may read slowly: only the differences themselves are still held.
    let go_on = &|| fs.check_closing().and_then(|()| check_client(client));
    let mut found = found.into_iter().peekable();
    while found.peek().is_some() {
        let mut bytes = 0;
        let line = std::iter::from_fn(|| {
            bytes += encoded_length(found.peek()?);
            // A single difference always fits.
            if bytes > LINE_BYTES && bytes > encoded_length(found.peek()?) { None } else { found.next() }
        });
        client.send_interruptible(&Response::Differing { found: line.collect() }, go_on)?;
    }
    Ok(Response::Done)
}

/// Estimates the encoded size of a difference.
fn encoded_length(difference: &PathDifference) -> usize {
    96 + 2 * difference.path.0.len() + difference.from.as_ref().map_or(0, |from| 2 * from.0.len())
}

/// Returns all differences. The archive is not closed before this returns, because snapshots pinned
/// for it could not be erased.
fn differences(
    (fs, moments): (&FileSystem, &SnapshotManager),
    locks: &OperationLocks,
    client: &ClientConnection,
    older: &SnapshotName,
    newer: Option<&SnapshotName>,
) -> Result<Vec<PathDifference>> {
    let _turn = acquire(&locks.comparison, client)?;
    let _work = fs.hold_open()?;
    // Taken before the lookup: a concurrent removal then frees nothing that is read here.
    let now = moments.pin_current()?;
    let older = moments.snapshot_view(&older.0)?;
    let newer = newer.map(|newer| moments.snapshot_view(&newer.0)).transpose()?;
    let newer = newer.as_ref().unwrap_or(now.file_system());
    let go_on = &mut |held| match held > MAX_HELD {
        true => Err(Error::invalid("too much differs to be told by a mount: unmount the archive, and ask again")),
        false => fs.check_closing().and_then(|()| check_client(client)),
    };
    let to_difference = |PathChange { path, kind, from }| {
        let (path, from) = (TreePath(path), from.map(TreePath));
        if ![Some(&path), from.as_ref()].into_iter().flatten().all(TreePath::fits) {
            return Err(Error::invalid("a path that differs is too long to be told by a mount"));
        }
        let changed = matches!(kind, PathChangeKind::Renamed { changed: true });
        Ok(PathDifference { path, from, change: kind.name().to_owned(), changed })
    };
    compare(&older, newer, go_on)?.into_iter().map(to_difference).collect()
}

/// Paths to restore, and their source and destination.
pub(crate) struct RestoreRequest<'a> {
    pub(crate) name: &'a SnapshotName,
    pub(crate) paths: &'a [TreePath],
    pub(crate) to: Option<&'a TreePath>,
}

/// Restores the paths; `now` is part of the name of the snapshot that is taken first.
pub(crate) fn restore(
    (fs, moments): (&FileSystem, &SnapshotManager),
    (locks, cache): (&OperationLocks, &KernelCache),
    client: &ClientConnection,
    request: &RestoreRequest<'_>,
    now: Timestamp,
) -> Result<Response> {
    let _turn = acquire(&locks.restore, client)?;
    let moment = moments.snapshot_view(&request.name.0)?;
    let paths: Vec<Vec<u8>> = request.paths.iter().map(|path| path.0.clone()).collect();
    let to = request.to.map(|to| &to.0[..]);
    let mut names = ClientRenames { client, cache };
    let restored = Restore::prepare(fs, &moment, &paths, to, &mut names).and_then(|restore| {
        // A restore to another directory replaces nothing.
        if to.is_none() {
            client
                .send(&Response::Kept { name: SnapshotName(moments.create_before_restore(&request.name.0, now)?) })?;
        }
        restore.run(&mut || check_client(client))
    });
    match restored {
        Ok(_) => Ok(Response::Done),
        // A concurrently removed snapshot is not damage.
        Err(Error::Damaged(_) | Error::Stale) if moments.snapshot_view(&request.name.0).is_err() => {
            Err(Error::Refused(Refusal::NoSnapshot { name: display(&request.name.0) }))
        }
        Err(error) => Err(error),
    }
}

/// Changes names through the client.
struct ClientRenames<'a> {
    client: &'a ClientConnection,
    cache: &'a KernelCache,
}

impl ClientRenames<'_> {
    fn request_change(&self, what: &Response, describe: &dyn Fn() -> String) -> Result<()> {
        self.client.request_action(what, describe, RENAME_TIME, &|| check_client(self.client))
    }
}

impl LiveNamespace for ClientRenames<'_> {
    /// The client is this user, or root.
    fn maker(&self) -> Creator {
        Creator { uid: geteuid().as_raw(), gid: getegid().as_raw(), umask: None }
    }

    fn rename(&mut self, from: &[u8], to: &[u8], exchange: bool) -> Result<()> {
        let what = Response::Rename { from: TreePath(from.to_vec()), to: TreePath(to.to_vec()), exchange };
        self.request_change(&what, &|| format!("rename {} to {}", display(from), display(to)))
    }

    fn make_directory(&mut self, path: &[u8]) -> Result<()> {
        let what = Response::MakeDirectory { path: TreePath(path.to_vec()) };
        self.request_change(&what, &|| format!("make the directory {}", display(path)))
    }

    /// Random, because a stopped client may execute an old request at any time.
    fn number(&mut self) -> u64 {
        RandomState::new().build_hasher().finish() >> 1
    }

    fn hide(&mut self, directory: Ino) {
        self.cache.hide_directory(directory);
    }

    fn changed_name(&mut self, directory: Ino, name: &[u8]) {
        self.cache.invalidate_name(directory, name);
    }

    fn changed(&mut self, ino: Ino) {
        self.cache.invalidate_blocks(ino);
    }
}
