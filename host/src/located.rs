//! Resolves the path of an archive: to the mount to which it leads, without a question to the
//! daemon that serves it, and to the names under which its user remembers the archive's place.
//!
//! # Why nothing here waits for a daemon
//! stat(2), access(2), realpath(3) and every step below a directory send a request to the file
//! system; a stopped daemon never answers, and the kernel's copy of a mount's root expires. The
//! kernel answers alone: openat(2) with O_PATH for the last part of a path, which is the root of
//! the mount there; /proc/self/fdinfo for the number of the mount, /proc/self/fd for a path; and
//! its table of mounts. So [`Located::of`] walks one part of the path at a time, looks each mount
//! that it enters up in the table, and takes no step below the root of an archive's mount. Links
//! are read in directories that it may ask.
//!
//! There are two waits: for other file systems on the path, as in any program; and, for a limited
//! time, for a daemon when the path continues *below* its mount, which only the daemon can resolve
//! ([`real_path`]).

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use lockbox::keys::PlaceName;
use rustix::fs::{CWD, Mode, OFlags, openat, readlinkat};
use rustix::io::Errno;

use crate::mounts::{self, Mounted, mount_number};
use crate::remote;

/// A stopped or stuck daemon leaves every call on its mount waiting for ever; one that runs answers
/// at once.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// Links on one path, as the kernel counts them.
const MAX_LINKS: usize = 40;

/// Asks in a thread of its own, as nothing else can end the waiting for a daemon that is stopped;
/// None after [`ANSWER_DEADLINE`].
pub fn in_time<T: Send + 'static>(question: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(question()));
    receiver.recv_timeout(ANSWER_DEADLINE).ok()
}

/// A path without links as far as it can be resolved without a question to the daemon of an
/// archive, and the mount in which that ends.
#[derive(Debug)]
pub struct Located {
    /// Path of the place where the walk ended.
    place: PathBuf,
    /// Parts of the path that lie below that place, in a mount.
    below: PathBuf,
    mount: Option<Mounted>,
    /// The place is a directory: a file, too, can be mounted by itself.
    is_directory: bool,
}

impl Located {
    /// # Errors
    /// The errors of the host, as when the path leads nowhere.
    pub fn of(path: &Path) -> io::Result<Located> {
        let mut walk = Walk::new(path)?;
        while let Some(part) = walk.left.pop() {
            walk.step(&part)?;
        }
        Located::at(walk)
    }

    fn at(walk: Walk) -> io::Result<Located> {
        let Walk { at, mount, below, .. } = walk;
        // The kernel answers this for an open file without asking the daemon.
        let again = openat(CWD, link_to(at.as_fd()), OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        Ok(Located { place: path_of(at.as_fd())?, below, mount, is_directory: again.is_ok() })
    }

    /// Returns the archive's mount at which the path leads, or in which.
    pub fn mount(&self) -> Option<&Mounted> {
        self.mount.as_ref()
    }

    /// Returns the archive's mount when this is its mount point.
    pub fn mounted_here(&self) -> Option<&Mounted> {
        let is_root = self.is_directory && self.below.as_os_str().is_empty();
        self.mount.as_ref().filter(|mount| is_root && self.place == mount.point)
    }

    /// Returns the path; links that lie in a mount are not followed.
    pub fn path(&self) -> PathBuf {
        if self.below.as_os_str().is_empty() { self.place.clone() } else { self.place.join(&self.below) }
    }
}

/// Resolves a path to one without links. The daemon of an archive is asked only when the path leads
/// on below its mount, because it alone can resolve that.
///
/// # Errors
/// The errors of the host; `TimedOut` when that daemon does not answer.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    let located = Located::of(path)?;
    let real = located.path();
    if located.below.as_os_str().is_empty() {
        return Ok(real);
    }
    in_time(move || real.canonicalize()).unwrap_or_else(|| Err(ErrorKind::TimedOut.into()))
}

/// Returns the path as a daemon with another working directory knows it. The last part is not
/// looked at: it may be the mount of a dead daemon.
pub fn canonical(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let named = absolute.parent().zip(absolute.file_name());
    let resolved = named.and_then(|(parent, name)| Some(real_path(parent).ok()?.join(name)));
    resolved.unwrap_or(absolute)
}

/// Returns the mount of an archive whose mount point a path leads to, as the table has it. Its
/// daemon is not asked. Where a directory on the way cannot be searched, the path counts as it was
/// written.
pub fn root_at<'a>(path: &Path, table: &'a [Mounted]) -> Option<&'a Mounted> {
    match Located::of(path) {
        Ok(located) => {
            let here = located.mounted_here()?;
            table.iter().find(|mounted| mounted.numbers() == here.numbers())
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let absolute = std::path::absolute(path).ok()?;
            table.iter().rfind(|mounted| mounted.is_archive() && mounted.point == absolute)
        }
        Err(_) => None,
    }
}

struct Walk {
    at: OwnedFd,
    /// The mount of an archive in which `at` is.
    mount: Option<Mounted>,
    /// Rest of the path that was not walked, as it leads on in that mount.
    below: PathBuf,
    /// Parts that are still to be walked, the next one last.
    left: Vec<OsString>,
    links: usize,
}

impl Walk {
    fn new(path: &Path) -> io::Result<Walk> {
        if path.as_os_str().is_empty() {
            return Err(ErrorKind::NotFound.into());
        }
        let at = open(CWD, OsStr::new("."), OFlags::empty())?;
        let mut walk = Walk { mount: archive_at(at.as_fd())?, at, below: PathBuf::new(), left: Vec::new(), links: 0 };
        walk.go_on(path);
        Ok(walk)
    }

    /// Puts the parts of `path` before the remaining parts.
    fn go_on(&mut self, path: &Path) {
        let parts = path.components().rev().filter(|part| *part != Component::CurDir);
        self.left.extend(parts.map(|part| part.as_os_str().to_owned()));
    }

    fn enter(&mut self, at: OwnedFd) -> io::Result<()> {
        self.mount = archive_at(at.as_fd())?;
        self.at = at;
        Ok(())
    }

    fn step(&mut self, part: &OsStr) -> io::Result<()> {
        if part == "/" {
            self.below = PathBuf::new();
            return self.enter(open(CWD, part, OFlags::DIRECTORY)?);
        }
        if self.mount.is_some() {
            return self.step_below(part);
        }
        if part == ".." {
            return self.enter(open(self.at.as_fd(), part, OFlags::DIRECTORY)?);
        }
        match readlinkat(&self.at, part, Vec::new()) {
            Ok(target) => {
                self.links += 1;
                if self.links > MAX_LINKS {
                    return Err(Errno::LOOP.into());
                }
                self.go_on(Path::new(&OsString::from_vec(target.into_bytes())));
                Ok(())
            }
            // Not a link. If more of the name follows, it is a directory, and an automount there is
            // triggered.
            Err(Errno::INVAL) => {
                let kind = if self.left.is_empty() { OFlags::empty() } else { OFlags::DIRECTORY };
                self.enter(open(self.at.as_fd(), part, kind)?)
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// Opens nothing in the mount of an archive. The way up leads by the path of the open
    /// directory, which has no links.
    fn step_below(&mut self, part: &OsStr) -> io::Result<()> {
        if part != ".." {
            self.below.push(part);
        } else if !self.below.pop() {
            let above = path_of(self.at.as_fd())?;
            self.go_on(above.parent().unwrap_or(Path::new("/")));
        }
        Ok(())
    }
}

fn open(at: BorrowedFd<'_>, name: &OsStr, kind: OFlags) -> io::Result<OwnedFd> {
    Ok(openat(at, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC | kind, Mode::empty())?)
}

/// Returns the mount of an archive in which this lies. The table is read after the number, so a
/// mount that was made on the way is in it.
fn archive_at(at: BorrowedFd<'_>) -> io::Result<Option<Mounted>> {
    let id = mount_number(at)?;
    Ok(mounts::table()?.into_iter().find(|mounted| mounted.id == id).filter(Mounted::is_archive))
}

fn path_of(at: BorrowedFd<'_>) -> io::Result<PathBuf> {
    fs::read_link(link_to(at))
}

fn link_to(at: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", at.as_raw_fd())
}

/// Returns the names of an archive's place, as `lockbox::keys::RollbackOptions` wants them: of an
/// address the one spelling, of a path the names that [`paths`] gives.
pub fn place_names(archive: &Path) -> Vec<PlaceName> {
    if let Some(directory) = remote::directory(archive) {
        return paths(&directory).iter().map(|path| PlaceName::of_directory(path)).collect();
    }
    match remote::is_remote(archive) {
        true => remote::spelled(archive).iter().map(|address| PlaceName::of_address(address)).collect(),
        false => paths(archive).iter().map(|path| PlaceName::of_path(path)).collect(),
    }
}

/// Follows a path as the kernel does. Returns one absolute path for each symbolic link on the way
/// (all before the link resolved, the link and all behind it as they are), and at last the path
/// without links. An attacker with write access to a directory on the way changes later names in
/// the list and no earlier one.
///
/// A descriptor in /proc is any file that a caller opened: names there say nothing of a place, and
/// are left out.
fn paths(path: &Path) -> Vec<PathBuf> {
    let Ok(absolute) = std::path::absolute(path) else { return Vec::new() };
    let mut found: Vec<PathBuf> = Vec::new();
    let mut resolved = PathBuf::from("/");
    let parts = |path: &Path| path.components().map(|part| part.as_os_str().to_owned()).collect::<VecDeque<_>>();
    let mut pending: VecDeque<OsString> = parts(&absolute);
    let mut links = 0;
    while let Some(part) = pending.pop_front() {
        match Path::new(&part).components().next() {
            None | Some(Component::CurDir) => continue,
            Some(Component::RootDir | Component::Prefix(_)) => {
                resolved = PathBuf::from("/");
                continue;
            }
            Some(Component::ParentDir) => {
                resolved.pop();
                continue;
            }
            Some(Component::Normal(_)) => {}
        }
        let at = resolved.join(&part);
        let Ok(target) = at.read_link() else {
            resolved = at;
            continue;
        };
        found.push(pending.iter().fold(at, |path, part| path.join(part)));
        links += 1;
        if links > MAX_LINKS {
            break;
        }
        for part in parts(&target).into_iter().rev() {
            pending.push_front(part);
        }
    }
    found.push(resolved);
    found.retain(|path| !path.starts_with("/proc") && !path.starts_with("/dev/fd"));
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_path_without_mounts_of_archives_is_resolved_as_by_realpath() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        fs::create_dir_all(at("a/b/c")).unwrap();
        fs::write(at("a/file"), "").unwrap();
        for (target, name) in
            [("a/b", "link"), ("../a/./b/..", "a/up"), ("loop", "loop"), ("missing", "broken"), ("/proc/self/", "far")]
        {
            symlink(target, at(name)).unwrap();
        }
        for path in [
            "a",
            "a/",
            "a/b/../file",
            "link/c",
            "link/../file",
            "a/up/b/c/",
            "./link/./c",
            "a/file",
            "link",
            "far/fd",
            "a/up/../a/up/up",
        ] {
            let located = Located::of(&at(path)).unwrap();
            assert_eq!(located.path(), at(path).canonicalize().unwrap(), "{path}");
            assert_eq!((located.mount(), located.mounted_here()), (None, None), "{path}");
            assert_eq!(real_path(&at(path)).unwrap(), located.path());
        }
        for path in ["loop", "broken", "missing/c", "a/file/c", "loop/c"] {
            let (here, there) = (Located::of(&at(path)).unwrap_err(), at(path).canonicalize().unwrap_err());
            assert_eq!(here.kind(), there.kind(), "{path}");
        }
        assert_eq!(Located::of(Path::new("..")).unwrap().path(), Path::new("..").canonicalize().unwrap());
        assert_eq!(Located::of(Path::new("/..")).unwrap().path(), Path::new("/"));
        assert_eq!(Located::of(Path::new("")).unwrap_err().kind(), ErrorKind::NotFound);
    }

    /// The host's directory plays the root of a mount: nothing below it exists, and nothing is
    /// looked up.
    #[test]
    fn no_step_is_taken_in_the_mount_of_an_archive() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        fs::create_dir(place.join("point")).unwrap();
        fs::create_dir(place.join("beside")).unwrap();
        let point = place.join("point");
        let id = mount_number(open(CWD, place.as_os_str(), OFlags::empty()).unwrap().as_fd()).unwrap();
        let line = format!("{id} 1 0:42 / {} rw - fuse.lockbox /a.lbx rw,user_id=7", point.display());
        let walked = |path: &str| {
            let mut walk = Walk::new(Path::new("/")).unwrap();
            walk.at = open(CWD, point.as_os_str(), OFlags::empty()).unwrap();
            walk.mount = mounts::parse(line.as_bytes());
            walk.left.clear();
            walk.go_on(Path::new(path));
            while let Some(part) = walk.left.pop() {
                walk.step(&part).unwrap();
            }
            let located = Located::at(walk).unwrap();
            (located.path(), located.mount().is_some(), located.mounted_here().is_some())
        };
        assert_eq!(walked(""), (point.clone(), true, true));
        assert_eq!(walked("missing/x"), (point.join("missing/x"), true, false));
        assert_eq!(walked("missing/.."), (point.clone(), true, true));
        assert_eq!(walked("../beside"), (place.join("beside"), false, false));
        assert_eq!(walked("missing/../../beside"), (place.join("beside"), false, false));
    }

    #[test]
    fn a_question_that_is_answered_is_not_waited_for() {
        assert_eq!(in_time(|| 7), Some(7));
    }

    struct Host {
        directory: tempfile::TempDir,
    }

    impl Host {
        fn new() -> Host {
            Host { directory: tempfile::tempdir().unwrap() }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.directory.path().canonicalize().unwrap().join(name)
        }
    }

    #[test]
    fn a_path_without_links_is_one_name_however_it_is_spelled() {
        let host = Host::new();
        fs::create_dir(host.at("d")).unwrap();
        fs::write(host.at("d/a"), "").unwrap();
        for spelled in ["d/a", "d/../d/a", "./d//a", "d/./a"] {
            assert_eq!(paths(&host.at(spelled)), [host.at("d/a")], "{spelled}");
        }
        // It need not be there.
        assert_eq!(paths(&host.at("new/b")), [host.at("new/b")]);
    }

    /// PLACE-1: under any alias that a user takes, the names before a link that an attacker made
    /// are those without it.
    #[test]
    fn a_link_put_in_place_of_a_file_or_a_directory_leaves_the_name_before_it() {
        let host = Host::new();
        fs::create_dir_all(host.at("storage/d")).unwrap();
        fs::write(host.at("storage/d/a"), "").unwrap();
        symlink(host.at("storage"), host.at("alias")).unwrap();
        let (alias, real) = (host.at("alias/d/a"), host.at("storage/d/a"));
        assert_eq!(paths(&alias), [alias.clone(), real.clone()]);
        // The attacker: the file is a link, then the directory is one.
        fs::rename(host.at("storage/d/a"), host.at("storage/d/other")).unwrap();
        symlink("other", host.at("storage/d/a")).unwrap();
        assert_eq!(paths(&real), [real.clone(), host.at("storage/d/other")]);
        assert_eq!(paths(&alias), [alias.clone(), real.clone(), host.at("storage/d/other")]);
        fs::remove_file(host.at("storage/d/a")).unwrap();
        fs::rename(host.at("storage/d/other"), host.at("storage/d/a")).unwrap();
        fs::rename(host.at("storage/d"), host.at("storage/e")).unwrap();
        symlink("../storage/e", host.at("storage/d")).unwrap();
        for name in [&real, &alias] {
            let found = paths(name);
            assert!(found.contains(&real) && found.last() == Some(&host.at("storage/e/a")), "{found:?}");
        }
    }

    #[test]
    fn links_in_a_circle_end() {
        let host = Host::new();
        symlink("y", host.at("x")).unwrap();
        symlink("x", host.at("y")).unwrap();
        assert!(paths(&host.at("x")).len() <= MAX_LINKS + 2);
    }

    #[test]
    fn a_descriptor_is_no_place() {
        let host = Host::new();
        fs::write(host.at("a"), "").unwrap();
        let file = fs::File::open(host.at("a")).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        assert_eq!(paths(Path::new(&format!("/dev/fd/{number}"))), [host.at("a")]);
    }

    #[test]
    fn addresses_are_places_in_their_one_spelling() {
        let names = |text: &str| place_names(Path::new(text));
        assert_eq!(names("s3://bucket/a.lbx"), [PlaceName::of_address("s3://bucket/a.lbx")]);
        assert_eq!(names("https://Example.org:443/a.lbx"), names("https://example.org/a.lbx"));
        let host = Host::new();
        let directory = host.at("store");
        assert_eq!(names(&format!("file://{}", directory.display())), [PlaceName::of_directory(&directory)]);
        assert_ne!(names(&format!("file://{}", directory.display())), place_names(&directory));
    }
}
