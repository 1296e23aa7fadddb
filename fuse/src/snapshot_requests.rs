//! Handles snapshot requests of a running mount, with comparisons and restores.
//!
//! # Order of a creation
//! 1  The kernel writes back the data that programs wrote before the request
//!    ([`MountHandle::collect_within`]), for [`CREATE_TIME`] at most: with programs that write
//!    without end that is not proved, and the daemon logs a warning.
//! 2  The snapshot contains all accepted data, dirty or not ([`SnapshotManager::create`]); the
//!    reply is sent when it is durable.
//!
//! So every write(2) that returned before the request is in the snapshot, from any program and
//! whether or not the file is still open. A restore deletes data, so it waits for [`COLLECT_TIME`]
//! and is refused without that proof. Nothing proves that before Linux 6.16 if the kernel's count
//! of requests is out of reach: the request then waits a second.
//!
//! Comparisons, backups and scheduled snapshots delete nothing. They wait a second and continue,
//! with a warning if nothing is proved ([`collect_or_warn`]).
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

use lockbox::archive::{Archive, Snapshot, SnapshotManager};
use lockbox::error::{Refusal, Timestamp};
use lockbox::exchange::{LiveNamespace, PathChange, PathChangeKind, Restore, compare};
use lockbox::fs::Ino;
use lockbox::fs::{Creator, FileSystem};
use lockbox::{Error, Result};
use lockbox_host::control::{
    ClientConnection, ExpectedSnapshots, ListedSnapshot, PAGE, PathDifference, RefusalReason, Response, SnapshotName,
    TreePath,
};
use lockbox_host::mount_options::MountOptions;
use lockbox_terminal::display;
use nix::unistd::{getegid, geteuid};
use parking_lot::Mutex;

use crate::kernel_cache::{ARRIVAL, KernelCache};
use crate::shutdown::{ArchiveSlot, MountHandle};

/// Returns the snapshots of the archive while it is open, without holding the slot, which the
/// shutdown takes.
pub(crate) fn open_snapshots(slot: &ArchiveSlot) -> Option<SnapshotManager> {
    slot.lock().as_ref().map(Archive::snapshot_manager)
}

/// Collects earlier writes of programs, as [`MountHandle::collect`]. Without a writer the kernel
/// has none (KERNEL-3).
pub(crate) fn collect_writes(mount: &MountHandle, cache: &KernelCache) -> Result<bool> {
    if cache.writers.has_any() { mount.collect() } else { Ok(true) }
}

/// Time for earlier writes of programs to arrive before a snapshot or a restore: 16 MiB, the limit
/// of the kernel's cache of a mount by root, at less than 300 KiB/s.
pub(crate) const COLLECT_TIME: Duration = Duration::from_secs(60);

/// The same before a snapshot, which deletes nothing.
pub(crate) const CREATE_TIME: Duration = Duration::from_secs(10);

/// Collects all earlier writes of programs within `limit`. Errors: `Invalid` if some may still be
/// in flight; a restore would delete them.
pub(crate) fn collect_all_writes(mount: &MountHandle, cache: &KernelCache, limit: Duration) -> Result<()> {
    if !cache.writers.has_any() || mount.collect_within(limit)? {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "cannot collect the last writes of programs: the archive did not receive all of them within {} s; try again \
         when programs write less, or close the files that are open for writing",
        limit.as_secs()
    )))
}

/// Collects earlier writes as [`collect_writes`] for `reader`, which continues without the writes
/// that did not arrive: it deletes nothing.
pub(crate) fn collect_or_warn(mount: &MountHandle, cache: &KernelCache, reader: &str) -> Result<()> {
    if !collect_writes(mount, cache)? {
        warn_of_missing(reader, ARRIVAL);
    }
    Ok(())
}

/// Collects like [`collect_all_writes`] for a snapshot, which is taken in any case.
pub(crate) fn collect_for_snapshot(mount: &MountHandle, cache: &KernelCache, limit: Duration) -> Result<()> {
    if cache.writers.has_any() && !mount.collect_within(limit)? {
        warn_of_missing("the snapshot", limit);
    }
    Ok(())
}

fn warn_of_missing(reader: &str, limit: Duration) {
    tracing::warn!(
        "{reader} may lack the last writes of programs: their arrival was not seen within {} s",
        limit.as_secs()
    );
}

pub(crate) fn read_only_refusal(options: &MountOptions) -> Option<Response> {
    let message = match &options.snapshot {
        Some(name) => format!(
            "snapshot '{}' is mounted here, read-only: the archive's snapshots cannot be changed",
            display(name.as_bytes())
        ),
        None if options.read_only => "the archive is mounted read-only: its snapshots cannot be changed".to_owned(),
        None => return None,
    };
    Some(Response::Refused { why: RefusalReason::Other, message })
}

pub(crate) fn to_response(result: Result<()>) -> Response {
    result.map_or_else(|error| to_refusal(&error), |()| Response::Done)
}

pub(crate) fn to_refusal(error: &Error) -> Response {
    let why = match error {
        Error::NoSpace(_) => RefusalReason::NoSpace,
        Error::Damaged(_) => RefusalReason::Damaged,
        Error::Refused(Refusal::Destination { .. } | Refusal::FailedBackup { .. }) => RefusalReason::Destination,
        Error::Refused(Refusal::DamagedBackup { .. }) => RefusalReason::DamagedBackup,
        Error::Interrupted(_) => RefusalReason::Interrupted,
        _ => RefusalReason::Other,
    };
    let message = match error {
        // The detail is a sentence of its own.
        Error::Invalid(detail) => detail.clone(),
        error => crate::Failure::sentence(error),
    };
    Response::Refused { why, message }
}

pub(crate) fn list_page(snapshots: &SnapshotManager, after: u64, with_held: bool) -> Result<Response> {
    let mut all = snapshots.list()?;
    all.retain(|snapshot| snapshot.id > after);
    let more = all.len() > PAGE;
    all.truncate(PAGE);
    let describe = |snapshot: Snapshot| {
        let held_bytes = with_held.then(|| snapshots.held_bytes(&|id| id == snapshot.id)).transpose()?;
        let Snapshot { id, name, time, inodes, .. } = snapshot;
        Ok(ListedSnapshot {
            id,
            name: SnapshotName(name),
            seconds: time.seconds,
            nanos: time.nanos,
            inodes,
            held_bytes,
        })
    };
    Ok(Response::Snapshots { snapshots: all.into_iter().map(describe).collect::<Result<_>>()?, more })
}

/// Returns the bytes that the snapshots in these id ranges hold together.
pub(crate) fn held_bytes(snapshots: &SnapshotManager, ranges: &[(u64, u64)]) -> Response {
    let bytes = snapshots.held_bytes(&|id| ranges.iter().any(|(first, last)| (*first..=*last).contains(&id)));
    bytes.map_or_else(|error| to_refusal(&error), |bytes| Response::Held { bytes })
}

pub(crate) fn remove_snapshots(snapshots: &SnapshotManager, ids: &[u64], among: Option<ExpectedSnapshots>) -> Response {
    let mut changed = false;
    let removed = snapshots.remove(&mut |all| {
        changed = among.is_some_and(|among| !among.is_whole(all.iter().map(|snapshot| snapshot.id)));
        Ok(if changed { Vec::new() } else { ids.to_vec() })
    });
    match removed {
        Ok(()) if changed => Response::Refused {
            why: RefusalReason::Changed,
            message: "another program removed snapshots at the same time; nothing was removed".into(),
        },
        removed => to_response(removed),
    }
}

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

/// Errors: `Interrupted` if the client has disconnected.
fn check_client(client: &ClientConnection) -> Result<()> {
    if client.is_gone() { Err(Error::Interrupted(0)) } else { Ok(()) }
}

/// Sends the differences from `older` to `newer`, or to the live tree.
pub(crate) fn send_differences(
    (fs, snapshots): (&FileSystem, &SnapshotManager),
    locks: &OperationLocks,
    client: &ClientConnection,
    older: &SnapshotName,
    newer: Option<&SnapshotName>,
) -> Result<Response> {
    let go_on = &|| fs.check_closing().and_then(|()| check_client(client));
    let found = {
        let _turn = acquire(&locks.comparison, client)?;
        // Not closed before the end of this block: snapshots pinned here could not be erased.
        let _work = fs.hold_open()?;
        // Taken before the lookup: a concurrent removal then frees nothing that is read here.
        let now = snapshots.pin_current()?;
        let older = snapshots.snapshot_view(&older.0)?;
        let newer = newer.map(|newer| snapshots.snapshot_view(&newer.0)).transpose()?;
        let newer = newer.as_ref().unwrap_or(now.file_system());
        let watch = &mut |held| match held > MAX_HELD {
            true => {
                Err(Error::invalid("too many differences to list from a mount: unmount the archive, and try again"))
            }
            false => go_on(),
        };
        compare(&older, newer, watch)?.into_iter().map(to_difference).collect::<Result<Vec<_>>>()?
    };
    // The client may read slowly: only the differences themselves are still held.
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

fn encoded_length(difference: &PathDifference) -> usize {
    96 + 2 * difference.path.0.len() + difference.from.as_ref().map_or(0, |from| 2 * from.0.len())
}

fn to_difference(PathChange { path, kind, from }: PathChange) -> Result<PathDifference> {
    let (path, from) = (TreePath(path), from.map(TreePath));
    if ![Some(&path), from.as_ref()].into_iter().flatten().all(TreePath::fits) {
        return Err(Error::invalid("a path that differs is too long to list from a mount"));
    }
    let changed = matches!(kind, PathChangeKind::Renamed { changed: true });
    Ok(PathDifference { path, from, change: kind.name().to_owned(), changed })
}

/// Restores these paths of the snapshot `name`; `now` is part of the name of the snapshot that is
/// taken first.
pub(crate) fn restore(
    (fs, snapshots): (&FileSystem, &SnapshotManager),
    (locks, cache): (&OperationLocks, &KernelCache),
    client: &ClientConnection,
    SnapshotName(name): &SnapshotName,
    paths: &[TreePath],
    to: Option<&TreePath>,
    now: Timestamp,
) -> Result<Response> {
    let _turn = acquire(&locks.restore, client)?;
    let view = snapshots.snapshot_view(name)?;
    let paths: Vec<Vec<u8>> = paths.iter().map(|path| path.0.clone()).collect();
    let to = to.map(|to| &to.0[..]);
    let mut names = ClientRenames { client, cache };
    let restored = Restore::prepare(fs, &view, &paths, to, &mut names).and_then(|restore| {
        // A restore to another directory replaces nothing.
        if to.is_none() {
            client.send(&Response::Kept { name: SnapshotName(snapshots.create_before_restore(name, now)?) })?;
        }
        restore.run(&mut || check_client(client))
    });
    match restored {
        Ok(_) => Ok(Response::Done),
        // A concurrently removed snapshot is not damage.
        Err(Error::Damaged(_) | Error::Stale) if snapshots.snapshot_view(name).is_err() => {
            Err(Error::Refused(Refusal::NoSnapshot { name: display(name) }))
        }
        Err(error) => Err(error),
    }
}

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
        self.request_change(&what, &|| format!("create the directory {}", display(path)))
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

#[cfg(test)]
pub(crate) mod tests {
    use lockbox::archive::{CreateOptions, KdfCost, OpenOptions};
    use lockbox::crypto::Passphrase;
    use lockbox::fs::Creator;
    use lockbox::fs::ROOT_INO;
    use lockbox::keys;

    use super::*;

    pub(crate) const CREATOR: Creator = Creator { uid: 0, gid: 0, umask: None };

    /// Returns a writable archive, and its directory.
    pub(crate) fn opened() -> (tempfile::TempDir, Archive) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("box.lbx");
        let passphrase = Passphrase::new(b"a passphrase".to_vec());
        Archive::create(&path, &passphrase, &CreateOptions { kdf: KdfCost::TEST, creator: CREATOR }).unwrap();
        let key = keys::unlock(&path, &passphrase).unwrap();
        let archive = crate::tests::open_when_free(&path, &key, &OpenOptions::default());
        (directory, archive)
    }

    fn ids(snapshots: &SnapshotManager) -> Vec<u64> {
        snapshots.list().unwrap().iter().map(|snapshot| snapshot.id).collect()
    }

    #[test]
    fn a_removal_chosen_from_a_stale_list_removes_nothing() {
        let (_directory, archive) = opened();
        let snapshots = archive.snapshot_manager();
        for name in ["a", "b", "c", "d"] {
            assert!(matches!(to_response(snapshots.create(name.as_bytes())), Response::Done));
        }
        let all = ids(&snapshots);
        let among = Some(ExpectedSnapshots::of(all.iter().copied()));
        // Another client removes a snapshot that the first wants to keep, and a new one is taken.
        assert!(matches!(remove_snapshots(&snapshots, &all[..1], among), Response::Done));
        snapshots.create(b"e").unwrap();
        let refusal = remove_snapshots(&snapshots, &all[1..3], among);
        assert!(matches!(refusal, Response::Refused { why: RefusalReason::Changed, .. }), "{refusal:?}");
        assert_eq!(ids(&snapshots)[..3], all[1..]);
        // Newer snapshots do not invalidate the choice; without a condition, missing ones are
        // skipped.
        let among = Some(ExpectedSnapshots::of(all[1..].iter().copied()));
        assert!(matches!(remove_snapshots(&snapshots, &all[1..2], among), Response::Done));
        assert!(matches!(remove_snapshots(&snapshots, &all[..3], None), Response::Done));
        assert_eq!(ids(&snapshots).len(), 2);
        assert_eq!(archive.file_system().usage().snapshots.unwrap().count, 2);
        archive.close().unwrap();
    }

    #[test]
    fn shared_data_is_held_by_its_snapshots_together() {
        let (_directory, archive) = opened();
        let (fs, snapshots) = (archive.file_system(), archive.snapshot_manager());
        let ino = fs.make_node(ROOT_INO, b"file", 0o600, 0, CREATOR).unwrap().ino;
        let noise: Vec<u8> = (0..1u32 << 16).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        fs.write(ino, 0, &noise).unwrap();
        for name in ["a", "b", "c"] {
            snapshots.create(name.as_bytes()).unwrap();
        }
        fs.unlink(ROOT_INO, b"file").unwrap();
        fs.purge().unwrap();
        let total = |ranges: &[(u64, u64)]| match held_bytes(&snapshots, ranges) {
            Response::Held { bytes } => bytes,
            other => panic!("{other:?}"),
        };
        let all = ids(&snapshots);
        assert!(total(&[(all[0], all[1])]) < 4096 * 8 && total(&[(all[2], all[2]), (all[0], all[0])]) < 4096 * 8);
        assert!(total(&[(all[0], all[0]), (all[1], all[2])]) > 50_000);
        assert_eq!(total(&[(0, u64::MAX)]), total(&[(all[0], all[2])]));
        assert_eq!(total(&[]), 0);
        archive.close().unwrap();
    }

    #[test]
    fn pages_go_on_where_the_last_one_ended() {
        let (_directory, archive) = opened();
        let snapshots = archive.snapshot_manager();
        for number in 0..PAGE + 3 {
            snapshots.create(format!("number {number}").as_bytes()).unwrap();
        }
        let page = |after, held_bytes| match list_page(&snapshots, after, held_bytes).unwrap() {
            Response::Snapshots { snapshots, more } => (snapshots, more),
            other => panic!("{other:?}"),
        };
        let (first, more) = page(0, true);
        assert_eq!((first.len(), more, first[0].held_bytes), (PAGE, true, Some(0)));
        let (rest, more) = page(first[PAGE - 1].id, false);
        assert_eq!((rest.len(), more, rest[0].held_bytes), (3, false, None));
        assert_eq!(rest[2].name, SnapshotName(format!("number {}", PAGE + 2).into_bytes()));
        archive.close().unwrap();
    }

    #[test]
    fn refusals_carry_the_reasons_that_clients_handle() {
        let why = |error: Error| match to_response(Err(error)) {
            Response::Refused { why, message } => (why, message),
            other => panic!("{other:?}"),
        };
        assert_eq!(why(Error::NoSpace("the disk is full".into())).0, RefusalReason::NoSpace);
        assert_eq!(why(Error::Damaged("page".into())).0, RefusalReason::Damaged);
        assert_eq!(
            why(Error::invalid("the archive is being closed")),
            (RefusalReason::Other, "the archive is being closed".into())
        );
        let latched = why(Error::WriteFailed("barrier".into()));
        assert!(
            latched.0 == RefusalReason::Other && latched.1.contains("read-only after a failed write"),
            "{}",
            latched.1
        );
        let refused_by = |list_page: &str| {
            read_only_refusal(&MountOptions::parse(&[list_page]).unwrap()).map(|response| response.failure_message())
        };
        assert_eq!(refused_by("rw"), None);
        assert!(refused_by("ro").unwrap().contains("mounted read-only"));
        assert!(refused_by("snapshot=monday").unwrap().contains("snapshot 'monday' is mounted here"));
    }
}
