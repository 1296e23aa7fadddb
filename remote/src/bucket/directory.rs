//! Object store in a directory of this host or of a mounted file system.
//!
//! An object gets its name by a hard link, which fails if the name exists, after all its bytes are
//! durable; a file system without hard links is rejected. All access is relative to the opened
//! directory: a name replaced by a link leads nowhere else.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::UNIX_EPOCH;

use lockbox::storage::host_call;
use lockbox::{Error, Result};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, linkat, mkdirat, openat2, statat, unlinkat};
use rustix::io::Errno;

use super::objects::{ListedObject, ObjectCreation, ObjectRange, ObjectStore, UnreadableDir};
use crate::DirectoryTrust;
use crate::hex;
use crate::http::printable;
use crate::range_source::{RemoteError, RemoteResult};

/// First character of the names of temporary objects, which are never listed.
const TEMP_PREFIX: char = '.';
/// Maximum directory depth of a list.
const MAX_DEPTH: usize = 32;
/// Random bytes in a temporary name.
const RANDOM_BYTES: usize = 16;
const RESOLVE_BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

pub(crate) struct DirectoryStore {
    root: OwnedFd,
    /// Set while unnamed files (`O_TMPFILE`) may be supported.
    has_tmpfile: bool,
}

impl DirectoryStore {
    /// Opens the store. For a writer, creates a missing directory, but not its parents.
    pub(crate) fn open(path: &Path, writer: Option<DirectoryTrust>) -> Result<DirectoryStore> {
        let failed = |error: Errno| match error {
            // The store of this address is missing, and no file of a command.
            Errno::NOENT => RemoteError::NotFound.into_error(&path.display().to_string()),
            _ => Error::io(format!("cannot open {}", path.display()), error.into()),
        };
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let follow = if writer == Some(DirectoryTrust::Untrusted) { OFlags::NOFOLLOW } else { OFlags::empty() };
        let opened = match rustix::fs::open(path, flags | follow, Mode::empty()) {
            Err(Errno::NOENT) if writer.is_some() => {
                let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
                    return Err(failed(Errno::NOENT));
                };
                let above = rustix::fs::open(above, flags, Mode::empty()).map_err(failed)?;
                create_dir_durable(&above, name).map_err(failed)?;
                rustix::fs::openat(&above, name, flags | OFlags::NOFOLLOW, Mode::empty())
            }
            opened => opened,
        };
        match opened {
            Ok(root) => Ok(DirectoryStore { root, has_tmpfile: true }),
            Err(Errno::NOTDIR) => Err(Error::NotArchive(format!(
                "{} is not a directory of an archive's objects; for an archive in a file, use its path",
                path.display()
            ))),
            Err(error) => Err(failed(error)),
        }
    }

    /// Opens a directory of objects; returns None if it does not exist.
    fn open_directory(&self, path: &str) -> RemoteResult<Option<OwnedFd>> {
        match open_beneath(&self.root, path, OFlags::DIRECTORY) {
            Ok(directory) => Ok(Some(directory)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(from_errno(error)),
        }
    }

    /// Opens the parent directory of an object, created if missing, and returns the object's name
    /// in it.
    fn open_parent(&self, name: &str, create: bool) -> RemoteResult<(OwnedFd, String)> {
        let (above, last) = name.rsplit_once('/').unwrap_or(("", name));
        let mut at = open_beneath(&self.root, ".", OFlags::DIRECTORY).map_err(from_errno)?;
        for part in above.split('/').filter(|part| !part.is_empty()) {
            let next = match open_beneath(&at, part, OFlags::DIRECTORY) {
                Err(Errno::NOENT) if create => {
                    create_dir_durable(&at, part).map_err(from_errno)?;
                    open_beneath(&at, part, OFlags::DIRECTORY)
                }
                next => next,
            };
            at = next.map_err(from_errno)?;
        }
        Ok((at, last.to_owned()))
    }
}

/// Opens a file or directory for reading.
fn open_beneath(at: &OwnedFd, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    openat2(at, path, flags, Mode::empty(), RESOLVE_BENEATH)
}

struct ListRequest<'a> {
    prefix: &'a str,
    after: &'a str,
    most: usize,
}

/// Lists a directory tree in the order of full names; a directory sorts as its name with a slash.
/// `above` is the directory's name with its slash. Directories without matching names are not
/// opened.
fn list_below(
    directory: &OwnedFd,
    above: &str,
    request: &ListRequest<'_>,
    depth: usize,
    listed: &mut Vec<ListedObject>,
    on_unreadable: &mut UnreadableDir<'_>,
) -> RemoteResult<()> {
    let mut entries = Vec::new();
    let read = Dir::read_from(directory).and_then(|entries| entries.collect::<rustix::io::Result<Vec<_>>>());
    let read = match read {
        Ok(read) => read,
        Err(error) => return on_unreadable(above, from_errno(error)),
    };
    for entry in read {
        let Ok(name) = entry.file_name().to_str() else { continue };
        if name.starts_with(TEMP_PREFIX) || name == "." || name == ".." {
            continue;
        }
        let is_directory = match entry.file_type() {
            FileType::Unknown => statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir()),
            kind => kind.is_dir(),
        };
        let slash = if is_directory { "/" } else { "" };
        let whole = format!("{above}{name}{slash}");
        let is_requested = match is_directory {
            // Something below it may begin so, and be behind that.
            true => {
                (whole.starts_with(request.prefix) || request.prefix.starts_with(&whole))
                    && (*whole > *request.after || request.after.starts_with(&whole))
            }
            false => whole.starts_with(request.prefix) && *whole > *request.after,
        };
        if is_requested {
            entries.push(whole);
        }
    }
    entries.sort_unstable();
    for whole in entries {
        if listed.len() >= request.most {
            break;
        }
        let name = whole[above.len()..].trim_end_matches('/');
        if whole.ends_with('/') {
            match open_beneath(directory, name, OFlags::DIRECTORY) {
                Ok(below) if depth > 0 => list_below(&below, &whole, request, depth - 1, listed, on_unreadable)?,
                Ok(_) => {
                    let why = "its directories are nested deeper than object names allow";
                    on_unreadable(&whole, RemoteError::Unsupported(why.into()))?;
                }
                // Removed, or something else by now.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(error) => on_unreadable(&whole, from_errno(error))?,
            }
            continue;
        }
        match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => listed.push(ListedObject {
                bytes: u64::try_from(stat.st_size).unwrap_or_default(),
                time: u64::try_from(stat.st_mtime).ok(),
                name: whole,
            }),
            Err(Errno::NOENT) => {}
            Err(error) => on_unreadable(above, from_errno(error))?,
        }
    }
    Ok(())
}

/// Creates a directory durably: its objects would be lost with it.
fn create_dir_durable(above: &OwnedFd, name: impl rustix::path::Arg) -> rustix::io::Result<()> {
    match mkdirat(above, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => host_call::sync(above),
        Err(error) => Err(error),
    }
}

impl ObjectStore for DirectoryStore {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        let (parent, name) = self.open_parent(name, true)?;
        let temp = TempObject::new(&parent, self.has_tmpfile).map_err(from_errno)?;
        let date = temp.write(bytes).map_err(|error| from_io(&error))?;
        let linked = temp.link(&parent, &name);
        temp.unlink(&parent);
        let creation = match linked {
            Ok(()) => ObjectCreation::Created(date),
            // It may be the caller's own, of an attempt with a lost result.
            Err(Errno::EXIST) => ObjectCreation::Exists,
            Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS) => {
                return Err(RemoteError::Unsupported(
                    "its file system has no hard links, without which two writers could destroy each other's work"
                        .into(),
                ));
            }
            Err(error) => return Err(from_errno(error)),
        };
        host_call::sync(&parent).map_err(from_errno)?;
        Ok(creation)
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        // A FIFO would be waited for.
        let file = open_beneath(&self.root, name, OFlags::NONBLOCK).map_err(from_errno)?;
        let mut file = File::from(file);
        let metadata = file.metadata().map_err(|error| from_io(&error))?;
        if !metadata.is_file() {
            return Err(RemoteError::Unsupported("there is something else in an object's place".into()));
        }
        let range = part.of_length(metadata.len())?;
        let (count, mut bytes) = (range.end - range.start, Vec::new());
        let read = file.seek(SeekFrom::Start(range.start)).and_then(|_| file.take(count).read_to_end(&mut bytes));
        read.map_err(|error| from_io(&error))?;
        Ok(bytes)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.list_tolerant(prefix, after, most, &mut |_, error| Err(error))
    }

    fn list_tolerant(
        &self,
        prefix: &str,
        after: &str,
        most: usize,
        on_unreadable: &mut UnreadableDir<'_>,
    ) -> RemoteResult<Vec<ListedObject>> {
        let (above, _) = prefix.rsplit_once('/').unwrap_or(("", prefix));
        let mut listed = Vec::new();
        if let Some(directory) = self.open_directory(if above.is_empty() { "." } else { above })? {
            let above = if above.is_empty() { String::new() } else { format!("{above}/") };
            let request = ListRequest { prefix, after, most };
            list_below(&directory, &above, &request, MAX_DEPTH, &mut listed, on_unreadable)?;
        }
        Ok(listed)
    }

    /// A file that cannot be removed now is left to the next writer.
    fn sweep(&self, above: &str) -> RemoteResult<()> {
        let Some(directory) = self.open_directory(above)? else { return Ok(()) };
        for entry in Dir::read_from(&directory).map_err(from_errno)? {
            let entry = entry.map_err(from_errno)?;
            let Some(digits) = entry.file_name().to_str().ok().and_then(|name| name.strip_prefix(TEMP_PREFIX)) else {
                continue;
            };
            if digits.len() == 2 * RANDOM_BYTES && digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                let _ = unlinkat(&directory, entry.file_name(), AtFlags::empty());
            }
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        let (parent, name) = match self.open_parent(name, false) {
            Err(RemoteError::NotFound) => return Ok(()),
            parent => parent?,
        };
        match unlinkat(&parent, &*name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(from_errno(error)),
        }
    }
}

/// Temporary file without a name, or with an unlisted one where the file system has no unnamed
/// files.
struct TempObject {
    file: File,
    name: Option<String>,
}

impl TempObject {
    fn new(parent: &OwnedFd, has_tmpfile: bool) -> rustix::io::Result<TempObject> {
        let mode = Mode::RUSR | Mode::WUSR;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        if has_tmpfile {
            match openat2(parent, ".", flags | OFlags::TMPFILE, mode, RESOLVE_BENEATH) {
                Ok(file) => return Ok(TempObject { file: file.into(), name: None }),
                Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        let mut random = [0; RANDOM_BYTES];
        getrandom::fill(&mut random).map_err(|_| Errno::AGAIN)?;
        let name = format!("{TEMP_PREFIX}{}", hex(&random));
        let file =
            openat2(parent, &*name, flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, mode, RESOLVE_BENEATH)?;
        Ok(TempObject { file: file.into(), name: Some(name) })
    }

    /// Writes all bytes durably; returns the file system's time in seconds since 1970.
    fn write(&self, bytes: &[u8]) -> std::io::Result<Option<u64>> {
        (&self.file).write_all(bytes)?;
        self.file.sync_all()?;
        Ok(self.file.metadata()?.modified()?.duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs()))
    }

    fn link(&self, parent: &OwnedFd, name: &str) -> rustix::io::Result<()> {
        match &self.name {
            Some(temp) => linkat(parent, &**temp, parent, name, AtFlags::empty()),
            None => {
                let descriptor = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                linkat(rustix::fs::CWD, &*descriptor, parent, name, AtFlags::SYMLINK_FOLLOW)
            }
        }
    }

    fn unlink(&self, parent: &OwnedFd) {
        if let Some(name) = &self.name {
            let _ = unlinkat(parent, &**name, AtFlags::empty());
        }
    }
}

fn from_errno(error: Errno) -> RemoteError {
    from_io(&error.into())
}

/// Maps an I/O error; none of a host's file system is transient.
fn from_io(error: &std::io::Error) -> RemoteError {
    match error.kind() {
        std::io::ErrorKind::NotFound => RemoteError::NotFound,
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            RemoteError::NoSpace(printable(&error.to_string()))
        }
        _ => RemoteError::Denied(printable(&error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn of_eight_who_make_an_object_one_does_and_its_bytes_are_there() {
        for has_tmpfile in [true, false] {
            let parent = tempfile::tempdir().unwrap();
            let root = parent.path().join("new");
            let directory =
                DirectoryStore { has_tmpfile, ..DirectoryStore::open(&root, Some(DirectoryTrust::Trusted)).unwrap() };
            for round in 0..30 {
                let name = format!("inc/log/{round:04}");
                let won = AtomicUsize::new(0);
                std::thread::scope(|scope| {
                    for writer in 0..8_u8 {
                        let (directory, name, won) = (&directory, &name, &won);
                        scope.spawn(move || match directory.create(name, &[writer; 5000]).unwrap() {
                            ObjectCreation::Created(date) => {
                                assert!(date.is_some());
                                won.fetch_add(1, Ordering::Relaxed);
                                assert_eq!(directory.get(name, ObjectRange::Last(1)).unwrap(), [writer]);
                            }
                            ObjectCreation::Exists => {}
                        });
                    }
                });
                assert_eq!(won.into_inner(), 1);
            }
            let listed = directory.list("inc/log/", "inc/log/0009", 5).unwrap();
            assert_eq!((&*listed[0].name, listed[0].bytes, listed.len()), ("inc/log/0010", 5000, 5));
            assert!(listed[0].time.is_some());
            let left = std::fs::read_dir(root.join("inc/log")).unwrap().count();
            assert_eq!(left, 30, "something is left beside the objects");
            assert_eq!(directory.get("inc/log/0000", ObjectRange::Range(4999, 5)).unwrap().len(), 1);
            assert!(matches!(directory.get("inc/log/0000", ObjectRange::All(4999)), Err(RemoteError::Unsupported(_))));
            directory.remove("inc/log/0000").unwrap();
            directory.remove("inc/log/0000").unwrap();
            assert!(matches!(directory.get("inc/log/0000", ObjectRange::All(5000)), Err(RemoteError::NotFound)));
            assert_eq!(directory.list("none/", "", 5).unwrap(), []);
        }
    }

    #[test]
    fn lists_go_through_all_directories_in_the_order_of_whole_names_and_page_by_page() {
        let parent = tempfile::tempdir().unwrap();
        let directory = DirectoryStore::open(parent.path(), Some(DirectoryTrust::Trusted)).unwrap();
        // A directory comes where its name with the slash does, which is neither before nor behind
        // all that begins as it does.
        let mut names =
            ["a", "a.b", "b/lockbox", "b/x/log/1", "b/x/log/2", "b-c/lockbox", "b.c", "c/d/e/f", "lockbox", "ä/ö"];
        for name in names {
            directory.create(name, name.as_bytes()).unwrap();
        }
        std::os::unix::fs::symlink("..", parent.path().join("c/out")).unwrap();
        std::fs::create_dir(parent.path().join("empty")).unwrap();
        names.sort_unstable();
        for most in 1..=names.len() + 2 {
            for prefix in ["", "b", "b/", "b/x", "b/x/log/", "c/d/", "z"] {
                let (mut found, mut after) = (Vec::new(), String::new());
                loop {
                    let listed = directory.list(prefix, &after, most).unwrap();
                    assert!(listed.len() <= most);
                    let Some(last) = listed.last() else { break };
                    after.clone_from(&last.name);
                    found.extend(listed.into_iter().map(|object| object.name).filter(|name| name != "c/out"));
                }
                let request: Vec<&str> = names.iter().copied().filter(|name| name.starts_with(prefix)).collect();
                assert_eq!(found, request, "{prefix} {most}");
            }
        }
    }

    /// That there are too many of them in each other keeps everybody out, root too.
    #[test]
    fn who_looks_around_passes_by_what_cannot_be_looked_into_and_who_writes_does_not() {
        let parent = tempfile::tempdir().unwrap();
        let directory = DirectoryStore::open(parent.path(), Some(DirectoryTrust::Trusted)).unwrap();
        for name in ["a/1", "c/1", "c/2"] {
            directory.create(name, b"x").unwrap();
        }
        std::fs::create_dir_all((0..40).fold(parent.path().join("b"), |path, _| path.join("d"))).unwrap();
        assert!(matches!(directory.list("", "", 9), Err(RemoteError::Unsupported(_))));
        for most in 1..5 {
            let (mut found, mut after, mut unreadable) = (Vec::new(), String::new(), Vec::new());
            loop {
                let mut on_unreadable = |name: &str, _| {
                    unreadable.push(name.to_owned());
                    Ok(())
                };
                let listed = directory.list_tolerant("", &after, most, &mut on_unreadable).unwrap();
                let Some(last) = listed.last() else { break };
                after.clone_from(&last.name);
                found.extend(listed.into_iter().map(|object| object.name));
            }
            assert_eq!(found, ["a/1", "c/1", "c/2"], "{most}");
            assert_eq!(unreadable, [format!("b/{}", "d/".repeat(32))], "{most}");
        }
    }

    #[test]
    fn what_a_creation_that_was_cut_off_left_is_swept_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let directory = DirectoryStore {
            has_tmpfile: false,
            ..DirectoryStore::open(parent.path(), Some(DirectoryTrust::Trusted)).unwrap()
        };
        directory.create("seg/object", b"x").unwrap();
        let (seg, _) = directory.open_parent("seg/object", false).unwrap();
        let cut_off = TempObject::new(&seg, false).unwrap();
        std::fs::write(parent.path().join("seg/.mine"), b"x").unwrap();
        directory.sweep("seg").unwrap();
        directory.sweep("none").unwrap();
        let names = std::fs::read_dir(parent.path().join("seg")).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<std::collections::BTreeSet<_>>(), [".mine".into(), "object".into()].into());
        assert_eq!(cut_off.link(&seg, "late"), Err(Errno::NOENT));
    }

    #[test]
    fn who_follows_a_writer_that_was_killed_sweeps_what_it_began() {
        let parent = tempfile::tempdir().unwrap();
        let come = |take_over| {
            let directory = Box::new(DirectoryStore::open(parent.path(), Some(DirectoryTrust::Trusted)).unwrap());
            crate::bucket::Bucket::open(directory, "file:///a".into(), &crate::RemoteOptions::default(), take_over)
                .unwrap()
        };
        // Killed: it says nothing.
        std::mem::forget(come(false));
        let of_incarnation = |entry: &std::fs::DirEntry| entry.file_type().unwrap().is_dir();
        let found = std::fs::read_dir(parent.path()).unwrap().map(|entry| entry.unwrap()).find(of_incarnation).unwrap();
        let directory = DirectoryStore::open(&found.path(), None).unwrap();
        let (log, _) = directory.open_parent("log/record", false).unwrap();
        let cut_off = TempObject::new(&log, false).unwrap();
        drop(come(true));
        assert_eq!(cut_off.link(&log, "late"), Err(Errno::NOENT));
    }

    #[test]
    fn what_the_host_says_is_told_as_that() {
        for full in [Errno::NOSPC, Errno::DQUOT] {
            assert!(matches!(from_errno(full).into_error("file:///a"), Error::NoSpace(_)));
        }
        // Who may not read the marker is not told that there is none; here, where no one else is
        // root, a link in its place is refused.
        let parent = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("elsewhere", parent.path().join("lockbox")).unwrap();
        let directory = DirectoryStore::open(parent.path(), None).unwrap();
        let opened = crate::bucket::open(Box::new(directory), "file:///a".into(), &crate::RemoteOptions::default());
        let message = opened.err().expect("no refusal").to_string();
        assert!(message.contains("cannot access"), "{message}");
    }

    #[test]
    fn nothing_leads_out_of_the_directory_or_is_waited_for() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("store");
        let directory = DirectoryStore::open(&root, Some(DirectoryTrust::Trusted)).unwrap();
        std::fs::write(parent.path().join("secret"), b"secret").unwrap();
        std::os::unix::fs::symlink("../secret", root.join("link")).unwrap();
        std::os::unix::fs::symlink("..", root.join("out")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, root.join("fifo"), rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        for name in ["link", "out/secret", "../secret", "/etc/passwd", "fifo"] {
            assert!(directory.get(name, ObjectRange::All(100)).is_err(), "{name}");
        }
        assert!(directory.create("out/made", b"x").is_err());
        assert!(!parent.path().join("made").exists());
        assert!(DirectoryStore::open(&root.join("out"), Some(DirectoryTrust::Trusted)).is_ok());
        assert!(matches!(
            DirectoryStore::open(&root.join("out"), Some(DirectoryTrust::Untrusted)),
            Err(Error::NotArchive(_))
        ));
        assert!(directory.remove("out/secret").is_err());
        assert!(parent.path().join("secret").exists());
        assert!(
            DirectoryStore::open(&root.join("a/b"), Some(DirectoryTrust::Trusted)).is_err(),
            "one directory is made, not those above it"
        );
        assert!(matches!(
            DirectoryStore::open(&parent.path().join("secret"), Some(DirectoryTrust::Trusted)),
            Err(Error::NotArchive(_))
        ));
    }
}
