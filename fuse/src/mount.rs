//! Mounts and unmounts the FUSE device: directly as root, otherwise through fusermount3; and checks
//! the mount point.
//!
//! fuser could do both. But its owner check would also refuse the kernel's own threads, which send
//! cached times to a user's mount as uid 0, and a comma in its FSName would inject mount options.
//! The kernel checks access to the mount (with or without `allow_other`).
//!
//! # Hidden files
//! A mount must not hide files of the daemon. The daemon holds all of them open and would continue.
//! Other programs would no longer find them: the archive (to copy it), the log, the control socket
//! of `lockbox umount`, and the rollback state. Therefore the user must ask for it
//! (`over-archive`).
//!
//! # Owner of the mount point
//! The owner of an archive chooses its content, with owners and modes. Without any right, an
//! archive can hold a copy of /etc in which all files belong to root and one more user has uid 0.
//! If root mounts it with `allow_other` on a directory of root's, its author becomes root. The
//! author may also choose the directory, if the path leads through a directory in which the author
//! can create a link.
//!
//! So root mounts another user's file only on an empty directory that this user owns: that user
//! could have created everything that a program then finds there. The option `trust-owner` lifts
//! the rule.
//!
//! The owner is that of the open archive file, and the directory is checked through the descriptor
//! on which it is mounted. So no user can replace either in between. Only for an archive in a
//! directory (`file:///`) the owner is that of the path. The mount command also checks by path
//! before it asks for a passphrase; that check only gives an early message.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lockbox_host::control::{receive_with_descriptors, send_with_descriptors};
use lockbox_host::daemons::{self, user_name};
use lockbox_host::located::real_path;
use lockbox_host::mount_options::MountOptions;
use lockbox_host::mounts::{self, Mounted, Mountpoint, Numbers, PinnedMount};
use lockbox_host::remote;
use nix::errno::Errno;
use nix::mount::MsFlags;
use nix::unistd::{getegid, geteuid};
use rustix::thread::CapabilitySet;

use crate::{Failure, MountProgram};

pub const DEVICE: &str = "/dev/fuse";
/// Ends each message about the device.
const ADVICE: &str =
    ", or start the container with '--device /dev/fuse'; 'lockbox doctor' checks the requirements of mounting";
const FUSERMOUNT: &str = "fusermount3";
/// Path at which umount(8) looks for the helper.
const UMOUNT_PROGRAM: &str = "/sbin/umount.lockbox";

/// Parameters of a mount.
#[derive(Clone, Copy, Debug)]
pub struct Mount<'a> {
    /// Name of the archive in the mount table.
    pub source: &'a OsStr,
    /// File system type, shown as `fuse.SUBTYPE`.
    pub subtype: &'a str,
    /// Absolute path without links.
    pub point: &'a Path,
    pub allow_other: bool,
    pub flags: MsFlags,
    /// User that must own the mount point, which must then be empty ([`check_owner`]).
    pub point_owner: Option<u32>,
}

/// Reason for a failed unmount.
#[derive(Debug)]
pub enum UnmountError {
    /// Files are open below it, or it is a working directory.
    Busy,
    Other(String),
}

impl Mount<'_> {
    /// Mounts and returns the connection to the kernel.
    pub fn attach(&self) -> Result<OwnedFd, Failure> {
        if !Path::new(DEVICE).exists() {
            return Err(Failure::mount(format!(
                "{DEVICE} is missing: load the kernel module with 'modprobe fuse'{ADVICE}"
            )));
        }
        if geteuid().is_root() || may_mount() {
            match self.attach_directly() {
                // Root of a container without the capability: the set-uid program may still do it.
                Err(AttachError::NotPermitted) => {}
                Err(AttachError::Failed(failure)) => return Err(failure),
                Ok(device) => return Ok(device),
            }
        }
        self.attach_through_fusermount()
    }

    fn attach_directly(&self) -> Result<OwnedFd, AttachError> {
        let failed = |what: String, e: io::Error| AttachError::Failed(Failure::mount(format!("{what}: {e}")));
        let device: OwnedFd = match OpenOptions::new().read(true).write(true).open(DEVICE) {
            Ok(file) => file.into(),
            Err(e) if e.raw_os_error() == Some(Errno::EPERM as i32) => return Err(AttachError::NotPermitted),
            Err(e) => return Err(AttachError::Failed(Failure::mount(format!("cannot open {DEVICE}: {e}{ADVICE}")))),
        };
        let point = Mountpoint::of(self.point).and_then(|point| Ok((point.mode()?, point)));
        let (mode, point) = point.map_err(|e| failed(format!("cannot read {}", self.point.display()), e))?;
        self.check_owner(&point).map_err(AttachError::Failed)?;
        let allow_other = if self.allow_other { ",allow_other" } else { "" };
        let data = format!(
            "fd={},rootmode={mode:o},user_id={},group_id={},default_permissions,subtype={}{allow_other}",
            device.as_raw_fd(),
            geteuid(),
            getegid(),
            self.subtype
        );
        match nix::mount::mount(Some(self.source), &point.link(), Some("fuse"), self.flags, Some(data.as_str())) {
            Ok(()) => Ok(device),
            Err(Errno::EPERM) => Err(AttachError::NotPermitted),
            Err(e) => Err(failed(format!("cannot mount at {}", self.point.display()), e.into())),
        }
    }

    fn check_owner(&self, held: &Mountpoint) -> Result<(), Failure> {
        self.point_owner.map_or(Ok(()), |owner| check_owner(held, self.point, owner))
    }

    /// Mounts through fusermount3, which gets one end of a socket as standard input and sends the
    /// opened device through it.
    fn attach_through_fusermount(&self) -> Result<OwnedFd, Failure> {
        let failed = |e: io::Error| Failure::mount(format!("cannot run {FUSERMOUNT}: {e}"));
        if self.point_owner.is_some() {
            // The program takes a path instead of a descriptor. Root comes here only without the
            // right to mount, which that program then lacks too.
            let held = Mountpoint::of(self.point);
            let held = held.map_err(|e| Failure::mount(format!("cannot read {}: {e}", self.point.display())))?;
            self.check_owner(&held)?;
        }
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let mut child = Command::new(FUSERMOUNT)
            .arg("-o")
            .arg(self.fusermount_options())
            .arg("--")
            .arg(self.point)
            .env("_FUSE_COMMFD", "0")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| match e.kind() {
                io::ErrorKind::NotFound => {
                    Failure::mount(format!("{FUSERMOUNT} is missing: install the package fuse3, or mount as root"))
                }
                _ => failed(e),
            })?;
        let received = receive_descriptor(&ours);
        drop(ours);
        let mut complaint = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            let _ = stderr.read_to_string(&mut complaint);
        }
        let status = child.wait().map_err(failed)?;
        match received {
            Some(device) if status.success() => Ok(device),
            _ => Err(Failure::mount(match complaint.trim() {
                "" => format!("{FUSERMOUNT} failed: {status}"),
                complaint if complaint.contains(DEVICE) => format!("{complaint}{ADVICE}"),
                complaint => complaint.to_owned(),
            })),
        }
    }

    fn fusermount_options(&self) -> OsString {
        let flags = [
            (MsFlags::MS_RDONLY, "ro", "rw"),
            (MsFlags::MS_NOSUID, "nosuid", "suid"),
            (MsFlags::MS_NODEV, "nodev", "dev"),
            (MsFlags::MS_NOEXEC, "noexec", "exec"),
            (MsFlags::MS_NOATIME, "noatime", "atime"),
        ];
        let flags = flags.map(|(flag, set, clear)| if self.flags.contains(flag) { set } else { clear }).join(",");
        let allow_other = if self.allow_other { ",allow_other" } else { "" };
        let options = format!("{flags}{allow_other},default_permissions,subtype={},fsname=", self.subtype);
        let mut options = options.into_bytes();
        for &byte in self.source.as_bytes() {
            if matches!(byte, b',' | b'\\') {
                options.push(b'\\');
            }
            options.push(byte);
        }
        OsString::from_vec(options)
    }
}

/// Returns whether this process has the right to mount; an ordinary user may have it in a user
/// namespace.
fn may_mount() -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

enum AttachError {
    NotPermitted,
    Failed(Failure),
}

/// Receives the descriptor that is attached to the next byte.
pub(crate) fn receive_descriptor(socket: &UnixStream) -> Option<OwnedFd> {
    receive_with_descriptors(socket, &mut [0]).ok()?.1.into_iter().next()
}

/// Sends a descriptor with a byte without meaning.
pub(crate) fn send_descriptor(socket: &UnixStream, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    send_with_descriptors(socket, &[0], &[descriptor]).map(drop)
}

/// Unmounts exactly the mount that was found in the table. With `detach` also if it is busy; it
/// then ends with its last user.
pub fn unmount(mounted: &Mounted, detach: bool) -> Result<(), UnmountError> {
    let point = &mounted.point;
    let failed = |e: &dyn std::fmt::Display| UnmountError::Other(format!("cannot unmount {}: {e}", point.display()));
    let unmounted = match PinnedMount::of(mounted).map_err(|e| failed(&e))? {
        Some(held) if detach => held.detach(),
        Some(held) => held.unmount(),
        // It was moved, or another mount covers it.
        None => return Err(UnmountError::Busy),
    };
    match unmounted {
        Ok(()) => Ok(()),
        Err(Errno::EBUSY) => Err(UnmountError::Busy),
        Err(Errno::EPERM) => unmount_through_fusermount(point, detach),
        Err(e) => Err(failed(&e)),
    }
}

/// Detaches the held mount, even if it is busy; `point` is its path.
pub fn detach(held: &Mountpoint, point: &Path) -> Result<(), UnmountError> {
    match held.detach() {
        Ok(()) => Ok(()),
        // The program lets users unmount their own mounts only.
        Err(Errno::EPERM) => unmount_through_fusermount(point, true),
        Err(e) => Err(UnmountError::Other(format!("cannot unmount {}: {e}", point.display()))),
    }
}

fn unmount_through_fusermount(point: &Path, detach: bool) -> Result<(), UnmountError> {
    let output = Command::new(FUSERMOUNT)
        .arg("-u")
        .args(detach.then_some("-z"))
        .arg("--")
        .arg(point)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| UnmountError::Other(format!("cannot run {FUSERMOUNT}: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if complaint.ends_with("Device or resource busy") {
        return Err(UnmountError::Busy);
    }
    Err(UnmountError::Other(complaint))
}

/// Registers the mount in libmount's table, so that umount(8) leaves it to umount.lockbox, which
/// waits for the daemon. Needs root, and mount(8), which knows the table's format and lock. If
/// umount.lockbox is missing, umount(8) unmounts by itself.
pub fn register(archive: &Path, point: &Path) {
    if !geteuid().is_root() || !Path::new(UMOUNT_PROGRAM).exists() {
        return;
    }
    let registered = Command::new("mount")
        .args(["--fake", "--internal-only", "-t", mounts::TYPE, "-o", "helper=lockbox,uhelper=lockbox", "--"])
        .args([archive, point])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !registered.is_ok_and(|status| status.success()) {
        tracing::debug!("cannot register umount.lockbox for umount(8)");
    }
}

/// Opens the root of the mount with these numbers if no other mount covers it. A user with write
/// access to its path may have replaced it since the table was read: with a FIFO, on which open
/// would block, or a link to a device that acts on open. So nothing but that mount is opened.
pub(crate) fn open_root(mount: Numbers) -> io::Result<OwnedFd> {
    held_root(mount)?.reopen()
}

/// Holds the root without a request to its daemon.
pub(crate) fn held_root(mount: Numbers) -> io::Result<Mountpoint> {
    let found = mounts::table()?.into_iter().find(|mounted| mounted.numbers() == mount);
    let point = found.ok_or(io::ErrorKind::NotFound)?.point;
    let held = Mountpoint::of(&point)?;
    match held.mounted_at(&point)? {
        Some(mounted) if mounted.numbers() == mount => Ok(held),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Paths that the daemon opens later and that no mount may cover.
const SYSTEM_PATHS: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Checks that a mount on `point`, a path without links, hides no file of the daemon.
///
/// # Errors
/// Names the file that the mount would hide.
pub fn check_covered_files(point: &Path, archive: &Path, options: &MountOptions) -> Result<(), Failure> {
    if let Some(system) = SYSTEM_PATHS.iter().find(|path| Path::new(path).starts_with(point)) {
        return Err(Failure::mount(format!("nothing can be mounted at {}: it holds {system}", point.display())));
    }
    if options.over_archive {
        return Ok(());
    }
    let needed = [
        ("the archive", Some(archive.to_path_buf())),
        ("this user's rollback records", options.seen_options().directory),
        ("the daemon's socket", daemons::ready_directory::<MountProgram>().ok()),
        ("the log", options.log.clone()),
    ];
    for (content, path) in needed {
        if let Some(path) = path.map(|path| resolve_existing(&path))
            && path.starts_with(point)
        {
            return Err(Failure::mount(format!(
                "the mount point {} holds {content}, {}, which the mount would hide: use -o over-archive to mount there anyway",
                point.display(),
                path.display()
            )));
        }
    }
    Ok(())
}

/// Resolves the links of the longest existing ancestor of `path`.
fn resolve_existing(path: &Path) -> PathBuf {
    let resolve = |there: &Path| Some(real_path(there).ok()?.join(path.strip_prefix(there).ok()?));
    path.ancestors().find_map(resolve).unwrap_or_else(|| path.to_path_buf())
}

/// Returns the user that must own the mount point, if the rule applies. `owner`: of the archive;
/// None for a remote one.
pub(crate) fn required_owner(owner: Option<u32>, options: &MountOptions) -> Option<u32> {
    owner.filter(|&owner| geteuid().is_root() && owner != 0 && !options.trust_owner)
}

/// Returns the owner of an archive's file, or of the directory with its objects
/// (`file:///directory`), for which this process has no descriptor.
pub(crate) fn owner_by_path(archive: &Path) -> Option<u32> {
    let local = if remote::is_remote(archive) { remote::directory(archive)? } else { archive.to_path_buf() };
    local.metadata().ok().map(|found| found.uid())
}

/// Checks by path whether the mount would be refused anyway.
///
/// # Errors
/// As of [`check_owner`]. A path that cannot be read is left to the check at the mount.
pub fn check_owner_early(archive: &Path, point: &Path, options: &MountOptions) -> Result<(), Failure> {
    match (required_owner(owner_by_path(archive), options), Mountpoint::of(point)) {
        (Some(owner), Ok(held)) => check_owner(&held, point, owner),
        // The directory would be created, by root.
        (Some(owner), Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(owner_refusal(point, owner, &"the directory would belong to root"))
        }
        _ => Ok(()),
    }
}

/// Checks that the open directory belongs to `owner` and is empty; `path` is for the message.
/// Errors: a sentence that names the option that lifts the rule.
fn check_owner(held: &Mountpoint, path: &Path, owner: u32) -> Result<(), Failure> {
    let cannot_read = |error| Failure::mount(format!("cannot read the mount point {}: {error}", path.display()));
    let found = held.owner().map_err(cannot_read)?;
    if found != owner {
        return Err(owner_refusal(path, owner, &format_args!("the directory belongs to {}", user_name(found))));
    }
    match held.is_empty().map_err(cannot_read)? {
        true => Ok(()),
        false => Err(owner_refusal(path, owner, &"the directory is not empty")),
    }
}

fn owner_refusal(path: &Path, owner: u32, why: &dyn Display) -> Failure {
    let (path, owner) = (path.display(), user_name(owner));
    Failure::mount(format!(
        "cannot mount on {path}: the archive belongs to {owner}, and {why}; root mounts an archive of another user only on an empty directory of that \
         user: mount it as {owner}, or use -o trust-owner"
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[test]
    fn a_mount_is_opened_by_its_numbers_and_no_other_one() {
        let proc = mounts::at(Path::new("/proc")).unwrap().unwrap().numbers();
        let opened = open_root(proc).unwrap();
        assert_eq!(rustix::fs::fstat(opened).unwrap().st_dev, proc.device);
        assert!(open_root(Numbers { device: proc.device + 1, ..proc }).is_err(), "another file system");
        assert!(open_root(Numbers { id: u64::MAX, ..proc }).is_err(), "another mount");
    }

    #[test]
    fn the_name_of_the_archive_cannot_inject_options() {
        let mount = Mount {
            source: OsStr::new(r"/a,allow_other,b\c"),
            subtype: "lockbox",
            point: Path::new("/mnt"),
            allow_other: false,
            flags: MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
            point_owner: None,
        };
        assert_eq!(
            mount.fusermount_options(),
            r"rw,nosuid,nodev,exec,atime,default_permissions,subtype=lockbox,fsname=/a\,allow_other\,b\\c"
        );
    }

    #[test]
    fn hidden_files_are_named_unless_over_archive_is_set() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().canonicalize().unwrap();
        let at = |name: &str| home.join(name);
        std::fs::create_dir_all(at("logs")).unwrap();
        std::os::unix::fs::symlink(at("logs"), at("link")).unwrap();
        let mut options = MountOptions::default();
        let refused = |point: &Path, archive: &str, options: &MountOptions| match check_covered_files(
            point,
            &at(archive),
            options,
        ) {
            Ok(()) => String::new(),
            Err(failure) => failure.message,
        };
        assert!(refused(&home, "a.lbx", &options).contains("holds the archive"));
        assert_eq!(refused(&at("point"), "a.lbx", &options), "");
        assert_eq!(refused(&at("a"), "a.lbx", &options), "", "a name that begins alike");
        options.log = Some(at("link/not/there"));
        assert!(refused(&at("logs"), "a.lbx", &options).contains("holds the log"));
        options.over_archive = true;
        assert_eq!(refused(&home, "a.lbx", &options), "");
        for system in ["/", "/proc", "/sys", "/dev"] {
            assert!(refused(Path::new(system), "a.lbx", &options).contains("nothing can be mounted"), "{system}");
        }
    }

    const USER: u32 = 1234;

    #[test]
    fn root_mounts_another_users_archive_on_an_empty_directory_of_that_user_only() {
        if !geteuid().is_root() {
            println!("not tested: the rule is for root");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let at = |name: &str| place.join(name);
        for (name, owner) in [("own", USER), ("full", USER), ("roots", 0), ("others", USER + 1)] {
            fs::create_dir(at(name)).unwrap();
            chown(at(name), Some(owner), None).unwrap();
        }
        fs::write(at("full/file"), "").unwrap();
        let archive = |name: &str, owner| {
            fs::write(at(name), "").unwrap();
            chown(at(name), Some(owner), None).unwrap();
            at(name)
        };
        let (theirs, roots) = (archive("a.lbx", USER), archive("b.lbx", 0));
        let mut options = MountOptions::default();
        let refused = |archive: &Path, point: &str, options: &MountOptions| {
            check_owner_early(archive, &at(point), options).err().map(|failure| failure.message).unwrap_or_default()
        };
        assert_eq!(refused(&theirs, "own", &options), "");
        assert!(refused(&theirs, "full", &options).contains("the directory is not empty"));
        assert!(refused(&theirs, "roots", &options).contains("the directory belongs to root"));
        assert!(refused(&theirs, "others", &options).contains("the directory belongs to 1235"));
        assert!(refused(&theirs, "missing", &options).contains("would belong to root"));
        for point in ["own", "full", "roots", "others", "missing"] {
            assert_eq!(refused(&roots, point, &options), "", "an archive of root's");
        }
        options.trust_owner = true;
        assert_eq!(refused(&theirs, "roots", &options), "");
        // The open directory is checked, whatever the path leads to by now.
        let held = Mountpoint::of(&at("roots")).unwrap();
        fs::rename(at("roots"), at("away")).unwrap();
        symlink("own", at("roots")).unwrap();
        assert!(check_owner(&held, &at("roots"), USER).is_err());
    }
}
