//! Lists the processes that keep a mount busy, as far as /proc shows them to this user.
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use lockbox_host::mounts::{self, Mounted};
use lockbox_host::{daemons, shown};
use lockbox_terminal::display;
use nix::sys::stat::{major, minor};

/// Maximum number of users listed.
const MOST: usize = 5;

/// A process that uses a mount.
pub(crate) struct User {
    pub(crate) pid: u32,
    /// Name of the process, arbitrary bytes chosen by its owner.
    pub(crate) name: OsString,
    pub(crate) kind: Kind,
    pub(crate) path: PathBuf,
}

/// Kind of use of the mount; of several, the one that is easiest to end is reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    WorkingDirectory,
    Root,
    Program,
    File,
    Map,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::WorkingDirectory => "working-directory",
            Kind::Root => "root",
            Kind::Program => "program",
            Kind::File => "file",
            Kind::Map => "map",
        }
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pid, name, path) = (self.pid, display(self.name.as_bytes()), shown(&self.path));
        write!(f, "process {pid} ({name}) ")?;
        match self.kind {
            Kind::WorkingDirectory => write!(f, "has its working directory at {path}"),
            Kind::Root => write!(f, "has its root directory at {path}"),
            Kind::Program => write!(f, "is the program {path}"),
            Kind::File => write!(f, "has {path} open"),
            Kind::Map => write!(f, "has {path} mapped into memory"),
        }
    }
}

/// Describes the users of the mount; None when this user can see none. Does not ask the daemon.
pub(crate) fn by_whom(mounted: &Mounted) -> Option<String> {
    let below = mounts::all().into_iter().filter(|other| other.parent == mounted.id);
    let mut found: Vec<String> =
        below.map(|other| format!("something is mounted at {}", shown(&other.point))).collect();
    found.extend(users(mounted).iter().map(User::to_string));
    let more = found.len().saturating_sub(MOST);
    found.truncate(MOST);
    if more > 0 {
        found.push(format!("and {more} more"));
    }
    (!found.is_empty()).then(|| found.join(", "))
}

pub(crate) fn users(mounted: &Mounted) -> Vec<User> {
    let others = numbers(Path::new("/proc")).filter(|&pid| pid != std::process::id());
    others.filter_map(|pid| use_of(pid, mounted)).collect()
}

/// Returns a process of each other mount namespace in which the file system with this device number
/// is mounted, in words, as far as this user may see them; not of that of its own daemon. Such a
/// mount keeps the file system alive when it is gone here, as one in a container does.
pub(crate) fn users_in_other_namespaces(device: u64, of_daemon: u64) -> Vec<String> {
    let mut seen = vec![daemons::mount_namespace(), of_daemon];
    let mut found = Vec::new();
    for pid in numbers(Path::new("/proc")) {
        let process = Path::new("/proc").join(pid.to_string());
        let Ok(namespace) = process.join("ns/mnt").metadata().map(|namespace| namespace.ino()) else { continue };
        let Ok(table) = fs::read(process.join("mountinfo")) else { continue };
        if seen.contains(&namespace) {
            continue;
        }
        seen.push(namespace);
        if let Some(point) = point_of(&table, device) {
            let name = fs::read(process.join("comm")).unwrap_or_default();
            let (name, point) = (display(name.trim_ascii_end()), shown(&point));
            found.push(format!("process {pid} ({name}) has it at {point}"));
        }
    }
    found
}

fn point_of(table: &[u8], device: u64) -> Option<PathBuf> {
    let mut mounts = table.split(|&byte| byte == b'\n').filter_map(mounts::parse);
    mounts.find(|mounted| mounted.device == device).map(|mounted| mounted.point)
}

fn use_of(pid: u32, mounted: &Mounted) -> Option<User> {
    let process = Path::new("/proc").join(pid.to_string());
    let link = |name: &str, kind| Some((kind, lies_within(&process.join(name), mounted)?));
    let open = || {
        let files = process.join("fd");
        numbers(&files).find_map(|number| lies_within(&files.join(number.to_string()), mounted))
    };
    let (kind, path) = link("cwd", Kind::WorkingDirectory)
        .or_else(|| link("root", Kind::Root))
        .or_else(|| link("exe", Kind::Program))
        .or_else(|| Some((Kind::File, open()?)))
        .or_else(|| Some((Kind::Map, mapped(&fs::read(process.join("maps")).ok()?, mounted)?)))?;
    let name = fs::read(process.join("comm")).unwrap_or_default();
    Some(User { pid, name: OsString::from_vec(name.trim_ascii_end().to_vec()), kind, path })
}

/// Returns the first file of the mount in a process's table of mapped files. The kernel lets only
/// root follow such a file, so the match is by the file system's number, which bind mounts share.
fn mapped(maps: &[u8], mounted: &Mounted) -> Option<PathBuf> {
    let device = format!("{:02x}:{:02x}", major(mounted.device), minor(mounted.device));
    maps.split(|&byte| byte == b'\n').find_map(|line| {
        // Range, rights, offset, device, inode, and the path with its spaces.
        let mut fields = line.splitn(6, |&byte| byte == b' ');
        let of_it = fields.nth(3)? == device.as_bytes();
        let path = fields.nth(1)?.trim_ascii_start();
        let path = Path::new(OsStr::from_bytes(path));
        (of_it && path.starts_with(&mounted.point)).then(|| path.to_path_buf())
    })
}

/// The text of the link is compared first, which costs little. It may name a path below the mount,
/// or an earlier one, so the mount itself decides.
fn lies_within(link: &Path, mounted: &Mounted) -> Option<PathBuf> {
    let target = fs::read_link(link).ok().filter(|target| target.starts_with(&mounted.point))?;
    (mounts::mount_of(link) == Some(mounted.id)).then_some(target)
}

fn numbers(directory: &Path) -> impl Iterator<Item = u32> {
    directory.read_dir().into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn started(command: &mut Command) -> Child {
        command.arg("600").stdin(Stdio::null()).spawn().unwrap()
    }

    /// Uses the scratch directory as the mount's root: only paths below it count.
    fn as_mount(scratch: &Path) -> Mounted {
        let id = mounts::mount_of(scratch).unwrap();
        let mut mounted = mounts::all().into_iter().find(|mounted| mounted.id == id).unwrap();
        mounted.point = scratch.into();
        mounted
    }

    #[test]
    fn a_working_directory_and_an_open_file_are_told_apart() {
        let scratch = tempfile::tempdir().unwrap();
        let mut mounted = as_mount(scratch.path());
        let path = scratch.path().join("a file\u{1b}[2J");
        let file = fs::File::create(&path).unwrap();
        let mut inside = started(Command::new("sleep").current_dir(scratch.path()));
        let mut reads = started(Command::new("sleep").current_dir("/").stdout(file));
        let told = |child: &Child| use_of(child.id(), &mounted);
        // The exec follows a moment after the start.
        while [&inside, &reads].map(told).iter().any(|user| user.as_ref().is_none_or(|user| user.name != "sleep")) {
            std::thread::yield_now();
        }
        let said = |child: &Child| told(child).unwrap().to_string();
        let at = scratch.path().display();
        assert_eq!(said(&inside), format!("process {} (sleep) has its working directory at {at}", inside.id()));
        assert_eq!(said(&reads), format!("process {} (sleep) has {at}/a file\\x1b[2J open", reads.id()));
        mounted.id += 1;
        assert!(use_of(inside.id(), &mounted).is_none(), "another mount of that name");
        for child in [&mut inside, &mut reads] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn what_is_mapped_is_known_by_its_file_system_and_its_path() {
        let mounted = mounts::parse(b"36 35 0:42 / /mnt/a rw - fuse.lockbox /a.lbx rw,user_id=7").unwrap();
        let table = |device: &str, path: &str| {
            format!("7f00-7f10 rw-p 00000000 00:00 0 \n7f20-7f30 r--s 00000000 {device} 12                  {path}\n")
        };
        let found = |device, path| mapped(table(device, path).as_bytes(), &mounted);
        assert_eq!(found("00:2a", "/mnt/a/b c"), Some("/mnt/a/b c".into()));
        assert_eq!(found("00:2b", "/mnt/a/b"), None, "another file system");
        assert_eq!(found("00:2a", "/mnt/ab"), None, "elsewhere, such as in a bind");
        assert_eq!(mapped(b"", &mounted), None);
    }

    #[test]
    fn a_mount_in_another_namespace_is_known_by_its_file_system() {
        let table = b"36 35 0:42 / /mnt/a rw - fuse.lockbox /a.lbx rw,user_id=7\n37 35 0:43 / /in\\040it rw - fuse.lockbox /a.lbx rw\n";
        let device = mounts::parse(b"1 1 0:43 / / rw - x x rw").unwrap().device;
        assert_eq!(point_of(table, device), Some("/in it".into()));
        assert_eq!(point_of(table, device + 1), None);
        assert!(users_in_other_namespaces(u64::MAX, 0).is_empty());
    }

    #[test]
    fn what_a_process_calls_itself_cannot_drive_the_terminal() {
        let user = User {
            pid: 7,
            name: OsString::from_vec(b"x\x1b[31m\ny".to_vec()),
            kind: Kind::Map,
            path: "/mnt/\u{202e}".into(),
        };
        assert_eq!(user.to_string(), "process 7 (x\\x1b[31m\\x0ay) has /mnt/\\xe2\\x80\\xae mapped into memory");
    }
}
