//! Mounts and unmounts the FUSE device: directly as root, otherwise through fusermount3.
//!
//! fuser could do both. But its owner check would also refuse the kernel's own threads, which send
//! cached times to a user's mount as uid 0, and a comma in its FSName would inject mount options.
//! The kernel checks access to the mount (with or without `allow_other`).

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use lockbox_host::mountpoint::{Mountpoint, PinnedMount};
use lockbox_host::mounts::{self, Mounted, Numbers};
use nix::errno::Errno;
use nix::mount::MsFlags;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg};
use nix::unistd::{getegid, geteuid};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::thread::CapabilitySet;

use crate::exit::Failure;
use crate::mountpoint_check;

pub const DEVICE: &str = "/dev/fuse";
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
    /// User that must own the mount point, which must then be empty ([`crate::mountpoint_check`]).
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
            return Err(Failure::mount(format!("{DEVICE} is missing: load the kernel module with 'modprobe fuse'")));
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
            Err(e) => return Err(failed(format!("cannot open {DEVICE}"), e)),
        };
        let point = Mountpoint::of(self.point).and_then(|point| Ok((point.mode()?, point)));
        let (mode, point) = point.map_err(|e| failed(format!("cannot read {}", self.point.display()), e))?;
        self.check_owner(&point).map_err(AttachError::Failed)?;
        let mut data = format!(
            "fd={},rootmode={mode:o},user_id={},group_id={},default_permissions,subtype={}",
            device.as_raw_fd(),
            geteuid(),
            getegid(),
            self.subtype
        );
        if self.allow_other {
            data.push_str(",allow_other");
        }
        match nix::mount::mount(Some(self.source), &point.link(), Some("fuse"), self.flags, Some(data.as_str())) {
            Ok(()) => Ok(device),
            Err(Errno::EPERM) => Err(AttachError::NotPermitted),
            Err(e) => Err(failed(format!("cannot mount at {}", self.point.display()), e.into())),
        }
    }

    fn check_owner(&self, held: &Mountpoint) -> Result<(), Failure> {
        self.point_owner.map_or(Ok(()), |owner| mountpoint_check::check_owner(held, self.point, owner))
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
                complaint => complaint.to_owned(),
            })),
        }
    }

    fn fusermount_options(&self) -> std::ffi::OsString {
        let mut options = Vec::new();
        for (flag, set, clear) in [
            (MsFlags::MS_RDONLY, "ro", "rw"),
            (MsFlags::MS_NOSUID, "nosuid", "suid"),
            (MsFlags::MS_NODEV, "nodev", "dev"),
            (MsFlags::MS_NOEXEC, "noexec", "exec"),
            (MsFlags::MS_NOATIME, "noatime", "atime"),
        ] {
            options.extend_from_slice(if self.flags.contains(flag) { set } else { clear }.as_bytes());
            options.push(b',');
        }
        if self.allow_other {
            options.extend_from_slice(b"allow_other,");
        }
        options.extend_from_slice(b"default_permissions,subtype=");
        options.extend_from_slice(self.subtype.as_bytes());
        options.extend_from_slice(b",fsname=");
        for &byte in self.source.as_bytes() {
            if matches!(byte, b',' | b'\\') {
                options.push(b'\\');
            }
            options.push(byte);
        }
        std::ffi::OsString::from_vec(options)
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
    let mut byte = [0u8];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!(std::os::fd::RawFd);
    let message = loop {
        match recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Ok(message) => break message,
            Err(Errno::EINTR) => {}
            Err(_) => return None,
        }
    };
    for control in message.cmsgs().ok()? {
        if let ControlMessageOwned::ScmRights(descriptors) = control
            && let Some(&descriptor) = descriptors.first()
        {
            // SAFETY: the kernel has just installed this descriptor for this message, so it has no
            // other owner; the space above has room for one, so there is no second one to lose.
            return Some(unsafe { OwnedFd::from_raw_fd(descriptor) });
        }
    }
    None
}

/// Sends a descriptor with a byte without meaning.
pub(crate) fn send_descriptor(socket: &UnixStream, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
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
        tracing::debug!("umount(8) was not told of umount.lockbox");
    }
}

/// Opens the root of the mount with these numbers if no other mount covers it. A user with write
/// access to its path may have replaced it since the table was read: with a FIFO, on which open
/// would block, or a link to a device that acts on open. So nothing but that mount is opened.
pub fn open_root(mount: Numbers) -> io::Result<OwnedFd> {
    held_root(mount)?.reopen()
}

/// Holds the root without a request to its daemon.
pub fn held_root(mount: Numbers) -> io::Result<Mountpoint> {
    let found = mounts::table()?.into_iter().find(|mounted| mounted.numbers() == mount);
    let point = found.ok_or(io::ErrorKind::NotFound)?.point;
    let held = Mountpoint::of(&point)?;
    match held.mounted_at(&point)? {
        Some(mounted) if mounted.numbers() == mount => Ok(held),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

#[cfg(test)]
mod tests {
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
}
