//! Snapshot operations on an unmounted archive, or through the daemon of a mounted one.
use std::collections::HashSet;
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::archive::{Archive, ArchiveId, BackupReport, Generation, Snapshot};
use lockbox::error::Timestamp;
use lockbox::keys::Fingerprint;
use lockbox_host::control::{
    self, ActionResult, ExpectedSnapshots, PathDifference, RefusalReason, Request, Response, SnapshotName, Status,
    TreePath,
};
use lockbox_host::{DAMAGED, NO_SPACE, OTHER, Spinner, code, located, mounts, shown};
use rustix::fs::{Mode, OFlags, RenameFlags, ResolveFlags};
use serde_json::json;

use crate::exit::Failure;
use crate::open_archive::{ArchiveArgs, WriterArgs};
use crate::output::Output;
use crate::runtime;

const INTERRUPTED: &str =
    "interrupted; the snapshots are removed, and the next mount or 'lockbox purge' frees the rest of their space";

/// Removes the snapshots that `choose` names from an archive that is not mounted, and frees their
/// space.
pub(crate) fn remove_from_file(
    args: &ArchiveArgs,
    writer: WriterArgs,
    choose: &mut dyn FnMut(&[Snapshot]) -> lockbox::Result<Vec<u64>>,
) -> Result<(), Failure> {
    let (archive, interrupt) = args.write_watched(writer)?;
    let _working = Spinner::at("Removing...");
    let removed = archive.snapshot_manager().remove(choose);
    let removed = removed.and_then(|()| archive.finish_removals(&mut || interrupt.check()));
    // Closing erases the freed space.
    let closed = archive.close();
    match removed {
        Err(error @ Error::Interrupted(_)) => {
            closed.map_err(|error| args.failure(error))?;
            Err(Failure::new(code(&error), INTERRUPTED))
        }
        removed => removed.and(closed).map_err(|error| args.failure(error)),
    }
}

/// Source of an archive's snapshots: the daemon that serves it, or the file.
pub(crate) enum SnapshotBackend<'a> {
    Mounted(Box<Mounted>),
    File(Box<Archive>, &'a ArchiveArgs),
}

impl SnapshotBackend<'_> {
    pub(crate) fn of(args: &ArchiveArgs) -> Result<SnapshotBackend<'_>, Failure> {
        Ok(match Mounted::find(args)? {
            Some(mounted) => SnapshotBackend::Mounted(Box::new(mounted)),
            None => SnapshotBackend::File(Box::new(args.read()?), args),
        })
    }

    /// Lists snapshots, the oldest first; with `held`, each with the space that it holds.
    pub(crate) fn list(&self, held: bool) -> Result<Vec<Snapshot>, Failure> {
        match self {
            SnapshotBackend::Mounted(mounted) => mounted.list(held),
            SnapshotBackend::File(archive, args) => {
                let all = if held { archive.snapshots() } else { archive.snapshot_manager().list() };
                all.map_err(|error| args.failure(error))
            }
        }
    }

    /// Returns the bytes that removing those of `all` with these ids frees.
    pub(crate) fn held(&self, all: &[Snapshot], ids: &HashSet<u64>) -> Result<u64, Failure> {
        let is_in = |id| ids.contains(&id);
        match self {
            SnapshotBackend::Mounted(mounted) => {
                let ranges = id_ranges(all.iter().map(|snapshot| snapshot.id), is_in);
                let told = control::query_held_bytes(&mounted.socket, mounted.status.uid, ranges, None);
                told.map_err(|error| Failure::of(mounted.point(), &error))
            }
            SnapshotBackend::File(archive, args) => {
                archive.snapshot_manager().held_bytes(&is_in).map_err(|error| args.failure(error))
            }
        }
    }
}

/// Returns a set of ids as inclusive ranges. Neighbours among the ascending `all` are merged, since
/// no id between them can ever exist again.
fn id_ranges(all: impl Iterator<Item = u64>, is_in: impl Fn(u64) -> bool) -> Vec<(u64, u64)> {
    let (mut ranges, mut goes_on) = (Vec::<(u64, u64)>::new(), false);
    for id in all {
        let was = std::mem::replace(&mut goes_on, is_in(id));
        match ranges.last_mut() {
            Some(last) if goes_on && was => last.1 = id,
            _ if goes_on => ranges.push((id, id)),
            _ => {}
        }
    }
    ranges
}

/// Prints the last line about a set: the bytes that removing all of it frees.
pub(crate) fn together(count: usize, bytes: u64, json: bool, out: &mut Output) -> Result<(), Failure> {
    if json {
        return out.json(&json!({ "snapshots": count, "held_bytes": bytes }));
    }
    let bytes = out.reader.size(bytes);
    out.line(&match count {
        0 => "no snapshot would be removed".to_owned(),
        1 => format!("1 snapshot; removing it frees {bytes}"),
        _ => format!("{count} snapshots; removing all of them frees {bytes}"),
    })
}

/// Ids in a request: with 20 digits each they fit into a line that a daemon reads.
const IDS: usize = 2000;

/// A daemon that serves the archive.
pub(crate) struct Mounted {
    socket: PathBuf,
    status: Status,
}

impl Mounted {
    /// Returns the daemon of the argument, when that is a mount point or an archive that this user
    /// has mounted; None for a file to be opened.
    pub(crate) fn find(archive: &ArchiveArgs) -> Result<Option<Mounted>, Failure> {
        let mounted = Mounted::find_any(&archive.archive)?;
        if mounted.is_none() && archive.archive.is_dir() {
            return Err(Failure::other(format!("{} is not the mount point of an archive", shown(&archive.archive))));
        }
        Ok(mounted)
    }

    /// The same; None also for a directory that is not a mount point.
    pub(crate) fn find_any(path: &Path) -> Result<Option<Mounted>, Failure> {
        if let Some((socket, status)) = runtime::find(&runtime::canonical(path), path)? {
            return Ok(Some(Mounted { socket, status }));
        }
        // Checked before access: a mount that was lost, or belongs to another user, returns no
        // error that tells these apart.
        if let Some(mounted) = located::root_at(path, &mounts::all()) {
            return Err(runtime::unanswered(mounted));
        }
        Ok(None)
    }

    pub(crate) fn mount_point(&self) -> PathBuf {
        self.status.mount_point_path()
    }

    fn point(&self) -> String {
        shown(&self.mount_point())
    }

    pub(crate) fn create(&self, name: &[u8]) -> Result<(), Failure> {
        self.request_done(&Request::SnapshotCreate { name: SnapshotName(name.to_vec()) })
    }

    pub(crate) fn list(&self, held: bool) -> Result<Vec<Snapshot>, Failure> {
        let all = control::list_snapshots(&self.socket, self.status.uid, held)
            .map_err(|error| Failure::of(self.point(), &error))?;
        let snapshot = |listed: control::ListedSnapshot| Snapshot {
            id: listed.id,
            time: listed.time(),
            inodes: listed.inodes,
            held_bytes: listed.held_bytes,
            name: listed.name.0,
        };
        Ok(all.into_iter().map(snapshot).collect())
    }

    pub(crate) fn purge(&self) -> Result<(), Failure> {
        self.request_done(&Request::Purge)
    }

    /// Removes the snapshots with these ids; missing ones are skipped.
    pub(crate) fn remove(&self, ids: &[u64]) -> Result<(), Failure> {
        let mut chunks = ids.chunks(IDS);
        chunks.try_for_each(|ids| self.request_done(&Request::SnapshotRemove { ids: ids.to_vec(), among: None }))
    }

    /// Removes the snapshots with these ids, which were chosen among `all`. If one of `all` is
    /// gone, nothing more is removed, and the result is false.
    pub(crate) fn remove_among(&self, ids: &[u64], all: &[Snapshot]) -> Result<bool, Failure> {
        let mut gone: HashSet<u64> = HashSet::new();
        for chunk in ids.chunks(IDS) {
            let left = all.iter().map(|snapshot| snapshot.id).filter(|id| !gone.contains(id));
            match self
                .ask(&Request::SnapshotRemove { ids: chunk.to_vec(), among: Some(ExpectedSnapshots::of(left)) })?
            {
                Response::Done => {}
                Response::Refused { why: RefusalReason::Changed, .. } => return Ok(false),
                other => return Err(self.failure(&other)),
            }
            gone.extend(chunk);
        }
        Ok(true)
    }

    pub(crate) fn holds(&self, file: impl AsFd) -> bool {
        // The mount point is an ordinary directory when the mount is detached and the daemon still
        // works.
        rustix::fs::fstat(file).is_ok_and(|file| file.st_dev == self.status.mount_device)
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.status.uid == nix::unistd::geteuid().as_raw()
    }

    pub(crate) fn fingerprint(&self) -> Option<Fingerprint> {
        Fingerprint::parse(&self.status.fingerprint)
    }

    pub(crate) fn archive_id(&self) -> Result<ArchiveId, Failure> {
        let digits = SnapshotName::try_from(self.status.archive_id.clone()).ok();
        let id = digits.and_then(|bytes| ArchiveId::try_from(bytes.0).ok());
        id.ok_or_else(|| Failure::other("the daemon did not report the id of its archive"))
    }

    /// Lets the daemon write a backup into an open file, and verify this percentage of its file
    /// data. None when too much has changed to update the file incrementally.
    pub(crate) fn back_up(
        &self,
        file: impl AsFd,
        whole: bool,
        verify: Option<u8>,
        destination: &Path,
        go_on: &dyn Fn() -> lockbox::Result<()>,
    ) -> Result<Option<(BackupReport, Option<u64>)>, Failure> {
        let request = Request::Backup { whole, verify: verify.is_some(), percent: verify.filter(|all| *all < 100) };
        match control::send_request_with_file(&self.socket, self.status.uid, &request, file.as_fd(), go_on)? {
            Response::BackedUp { done } => Ok(done.map(|done| {
                let time = Timestamp { seconds: done.seconds, nanos: done.nanos.min(999_999_999) };
                let (generation, copied_bytes) = (Generation(done.generation), done.copied_bytes);
                (BackupReport { time, generation, whole, copied_bytes }, done.verified_bytes)
            })),
            Response::Refused {
                why: why @ (RefusalReason::Destination | RefusalReason::DamagedBackup | RefusalReason::NoSpace),
                message,
            } => {
                let code = match why {
                    RefusalReason::NoSpace => NO_SPACE,
                    RefusalReason::DamagedBackup => DAMAGED,
                    _ => OTHER,
                };
                Err(Failure::new(code, format!("{}: {message}", shown(destination))))
            }
            other => Err(self.failure(&other)),
        }
    }

    /// Calls `found` with the differences, in parts.
    pub(crate) fn compare(
        &self,
        older: &[u8],
        newer: Option<&[u8]>,
        found: &mut dyn FnMut(Vec<PathDifference>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let newer = newer.map(|name| SnapshotName(name.to_vec()));
        let request = Request::SnapshotDiff { older: SnapshotName(older.to_vec()), newer };
        let mut failed = None;
        let end = control::exchange_messages(&self.socket, self.status.uid, &request, &|| Ok(()), &mut |response| {
            let Response::Differing { found: part } = response else { return Ok(ControlFlow::Break(Some(response))) };
            match found(part) {
                Ok(()) => Ok(ControlFlow::Continue(None)),
                Err(failure) => {
                    failed = Some(failure);
                    Ok(ControlFlow::Break(None))
                }
            }
        })?;
        match (failed, end) {
            (Some(failure), _) => Err(failure),
            (None, None | Some(Response::Done)) => Ok(()),
            (None, Some(other)) => Err(self.failure(&other)),
        }
    }

    /// Restores paths from a snapshot; `before` gets the name of the snapshot that is taken first.
    pub(crate) fn restore(
        &self,
        name: &[u8],
        paths: Vec<Vec<u8>>,
        to: Option<&[u8]>,
        before: &mut Option<Vec<u8>>,
        go_on: &dyn Fn() -> lockbox::Result<()>,
    ) -> Result<(), Failure> {
        let point = self.point();
        // This process renames as the daemon requests, and only the user's own daemon is trusted.
        if !self.is_ours() {
            return Err(Failure::other(format!(
                "{point} is mounted by user {}: only that user restores there",
                self.status.uid
            )));
        }
        let tree = MountedTree::open(&self.status.mount_point_path())?;
        let path = |path: Vec<u8>| {
            let path = TreePath(path);
            if path.fits() { Ok(path) } else { Err(Failure::usage("a path is too long for a mounted archive")) }
        };
        let request = Request::SnapshotRestore {
            name: SnapshotName(name.to_vec()),
            paths: paths.into_iter().map(path).collect::<Result<_, Failure>>()?,
            to: to.map(|to| path(to.to_vec())).transpose()?,
        };
        let end = control::exchange_messages(&self.socket, self.status.uid, &request, go_on, &mut |response| {
            Ok(match response {
                Response::Kept { name } => {
                    *before = Some(name.0);
                    ControlFlow::Continue(None)
                }
                Response::Rename { from, to, exchange } => {
                    ControlFlow::Continue(Some(carried(tree.rename(&from.0, &to.0, exchange))))
                }
                Response::MakeDirectory { path } => ControlFlow::Continue(Some(carried(tree.make_directory(&path.0)))),
                end => ControlFlow::Break(end),
            })
        })?;
        match end {
            Response::Done => Ok(()),
            other => Err(self.failure(&other)),
        }
    }

    fn request_done(&self, request: &Request) -> Result<(), Failure> {
        match self.ask(request)? {
            Response::Done => Ok(()),
            other => Err(self.failure(&other)),
        }
    }

    fn ask(&self, request: &Request) -> Result<Response, Failure> {
        let _working = Spinner::at("Waiting for the daemon...");
        Ok(control::send_request(&self.socket, self.status.uid, request)?)
    }

    fn failure(&self, response: &Response) -> Failure {
        let code = match response {
            Response::Refused { why: RefusalReason::NoSpace, .. } => NO_SPACE,
            Response::Refused { why: RefusalReason::Damaged, .. } => DAMAGED,
            _ => OTHER,
        };
        Failure::new(code, format!("{}: {}", self.point(), response.failure_message()))
    }
}

fn carried(result: rustix::io::Result<()>) -> ActionResult {
    ActionResult { errno: result.err().map(rustix::io::Errno::raw_os_error) }
}

/// File system type that fstatfs(2) reports for every FUSE file system.
const FUSE: rustix::fs::FsWord = 0x6573_5546;
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The root of a mount, in which a restore renames and creates directories. Path resolution never
/// leaves the mount.
struct MountedTree(OwnedFd);

impl MountedTree {
    /// Errors: when nothing of a program's is mounted there, as this process sees it.
    fn open(point: &Path) -> Result<MountedTree, Failure> {
        let root = rustix::fs::open(point, DIRECTORY | OFlags::NOFOLLOW, Mode::empty());
        let found = root.and_then(|root| Ok((rustix::fs::fstatfs(&root)?.f_type, root)));
        let cannot = |why: &str| Failure::other(format!("cannot work in {}: {why}", shown(point)));
        match found {
            Ok((FUSE, root)) => Ok(MountedTree(root)),
            Ok(_) => Err(cannot("the archive is not mounted there for this process")),
            Err(errno) => Err(cannot(&lockbox_terminal::without_numbers(std::io::Error::from(errno).to_string()))),
        }
    }

    /// Renames an object to a path that must not exist or, with `exchange`, to one whose object
    /// gets its path.
    fn rename(&self, from: &[u8], to: &[u8], exchange: bool) -> rustix::io::Result<()> {
        let flags = if exchange { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
        let ((from, name), (to, new_name)) = (self.parent(from)?, self.parent(to)?);
        rustix::fs::renameat_with(&from, name, &to, new_name, flags)
    }

    fn make_directory(&self, path: &[u8]) -> rustix::io::Result<()> {
        let (directory, name) = self.parent(path)?;
        rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o755))
    }

    fn parent<'p>(&self, path: &'p [u8]) -> rustix::io::Result<(OwnedFd, &'p OsStr)> {
        let slash = path.iter().rposition(|&byte| byte == b'/');
        let (directory, name) = slash.map_or((&b"."[..], path), |at| (&path[..at], &path[at + 1..]));
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let opened = rustix::fs::openat2(&self.0, OsStr::from_bytes(directory), DIRECTORY, Mode::empty(), within)?;
        Ok((opened, OsStr::from_bytes(name)))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::io::Errno;

    use super::*;

    fn tree(path: &Path) -> MountedTree {
        MountedTree(rustix::fs::open(path, DIRECTORY, Mode::empty()).unwrap())
    }

    #[test]
    fn names_change_below_the_root_and_lead_nowhere_else() {
        let place = tempfile::tempdir().unwrap();
        let (root, outside) = (place.path().join("root"), place.path().join("outside"));
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(root.join("a/b/file"), "new").unwrap();
        fs::write(root.join("file"), "old").unwrap();
        std::os::unix::fs::symlink(&outside, root.join("link")).unwrap();
        let tree = tree(&root);
        tree.rename(b"a/b/file", b"file", true).unwrap();
        assert_eq!(fs::read_to_string(root.join("file")).unwrap(), "new");
        assert_eq!(fs::read_to_string(root.join("a/b/file")).unwrap(), "old");
        assert_eq!(tree.rename(b"a/b/file", b"file", false), Err(Errno::EXIST));
        assert_eq!(tree.rename(b"a/b/file", b"other", true), Err(Errno::NOENT));
        tree.make_directory(b"a/c").unwrap();
        for away in [&b"link/x"[..], b"../outside/x", b"/etc/x"] {
            assert!(tree.make_directory(away).is_err() && tree.rename(b"file", away, false).is_err());
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_is_no_mount_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let refused = MountedTree::open(place.path()).map(drop).unwrap_err();
        assert!(refused.message.contains("not mounted there"), "{}", refused.message);
    }

    #[test]
    fn a_set_is_told_in_ranges_that_contain_nothing_else() {
        let all = [2, 5, 9, 10, 40, 41];
        let told = |set: &[u64]| id_ranges(all.into_iter(), |id| set.contains(&id));
        assert_eq!(told(&[]), []);
        assert_eq!(told(&all), [(2, 41)]);
        assert_eq!(told(&[2, 9, 10, 41]), [(2, 2), (9, 10), (41, 41)]);
        for set in 0..64u32 {
            let is_in = |at: usize| set >> at & 1 == 1;
            let set: Vec<u64> = all.iter().enumerate().filter(|(at, _)| is_in(*at)).map(|(_, id)| *id).collect();
            let told = told(&set);
            let within = all.into_iter().filter(|id| told.iter().any(|(first, last)| (first..=last).contains(&id)));
            assert_eq!(within.collect::<Vec<_>>(), set);
        }
    }
}
