//! Metadata of host files: reads and sets owner, mode, times and device numbers by descriptor.

use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{AtFlags, Gid, Mode, Stat, Timespec, Timestamps, Uid};
use rustix::io::Errno;

use crate::error::{Error, Result, Timestamp};
use crate::fs::{Attributes, Creator, SetAttributes, SetTime, mode};

/// Encodes a device number as the archive stores it (specification 7.1).
pub fn device_number(major: u32, minor: u32) -> u32 {
    major << 20 | minor & 0xF_FFFF
}

/// Decodes a stored device number into major and minor number.
pub fn split_device_number(rdev: u32) -> (u32, u32) {
    (rdev >> 20, rdev & 0xF_FFFF)
}

/// Returns a conversion from errno with this context. A file that exceeds the host's size limit is
/// an error of that file alone, not a full disk.
pub(crate) fn host_error(context: &str) -> impl Fn(Errno) -> Error + '_ {
    move |errno| match errno {
        Errno::FBIG => Error::FileTooLarge,
        errno => Error::io(context, errno.into()),
    }
}

/// Returns a path of an open file, for calls that do not accept its descriptor.
pub(crate) fn descriptor_path(file: impl AsFd) -> String {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())
}

/// Returns the times of last access and last modification.
pub(crate) fn timestamps(stat: &Stat) -> (Timestamp, Timestamp) {
    let time = |seconds: i64, nanos: u64| Timestamp { seconds, nanos: nanos as u32 }; // below 10^9
    (time(stat.st_atime, stat.st_atime_nsec), time(stat.st_mtime, stat.st_mtime_nsec))
}

/// Returns the creator of an imported object: the owner of its host file.
pub(super) fn creator_of(stat: &Stat) -> Creator {
    Creator { uid: stat.st_uid, gid: stat.st_gid, umask: None }
}

/// Returns whether a host file was modified between two stat calls, as far as its times show.
pub(super) fn was_written(before: &Stat, after: &Stat) -> bool {
    let version = |stat: &Stat| (stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
    version(before) != version(after)
}

/// Returns whether an open host file has another size than it had before.
pub(super) fn has_other_size(file: impl AsFd, before: &Stat) -> Result<bool> {
    let now = rustix::fs::fstat(file).map_err(host_error("cannot read"))?;
    Ok(now.st_size != before.st_size)
}

/// Reads into the buffer and returns the number of bytes, 0 at the end of the file.
pub(super) fn read_at(file: impl AsFd, buffer: &mut [u8], offset: u64) -> Result<usize> {
    loop {
        match rustix::io::pread(&file, &mut *buffer, offset) {
            Err(Errno::INTR) => {}
            other => return other.map_err(host_error("cannot read")),
        }
    }
}

/// Returns the metadata to copy from a host file, without the size.
pub(crate) fn attributes_of(stat: &Stat) -> SetAttributes {
    let (atime, mtime) = timestamps(stat);
    SetAttributes {
        mode: Some(stat.st_mode & mode::PERMISSIONS),
        uid: Some(stat.st_uid),
        gid: Some(stat.st_gid),
        atime: Some(SetTime::To(atime)),
        mtime: Some(SetTime::To(mtime)),
        ..SetAttributes::default()
    }
}

/// Sets owner, mode and times of an open host file, in the order in which no call undoes another.
pub(crate) fn apply(file: impl AsFd, attributes: &Attributes) -> Result<()> {
    let owned = is_root();
    if owned {
        let (uid, gid) = owner(attributes);
        rustix::fs::fchown(&file, uid, gid).map_err(host_error("cannot set the owner"))?;
    }
    rustix::fs::fchmod(&file, permissions(attributes, owned)).map_err(host_error("cannot set the mode"))?;
    rustix::fs::futimens(&file, &times(attributes)).map_err(host_error("cannot set the times"))
}

/// Sets owner, mode and times of an object opened with `O_PATH`: symbolic links (which have no
/// mode), FIFOs, sockets and devices. `name` is used for the times only, which are harmless if it
/// denotes another object by now.
pub(crate) fn apply_at(held: impl AsFd, directory: impl AsFd, name: &[u8], attributes: &Attributes) -> Result<()> {
    let owned = is_root();
    if owned {
        let (uid, gid) = owner(attributes);
        rustix::fs::chownat(&held, "", uid, gid, AtFlags::EMPTY_PATH).map_err(host_error("cannot set the owner"))?;
    }
    if attributes.mode & mode::TYPE != mode::SYMLINK {
        rustix::fs::chmod(descriptor_path(&held), permissions(attributes, owned))
            .map_err(host_error("cannot set the mode"))?;
    }
    rustix::fs::utimensat(&directory, name, &times(attributes), AtFlags::SYMLINK_NOFOLLOW)
        .map_err(host_error("cannot set the times"))
}

fn owner(attributes: &Attributes) -> (Option<Uid>, Option<Gid>) {
    // chown(2) interprets the greatest number as "unchanged".
    let uid = (attributes.uid != u32::MAX).then(|| Uid::from_raw(attributes.uid));
    let gid = (attributes.gid != u32::MAX).then(|| Gid::from_raw(attributes.gid));
    (uid, gid)
}

/// Returns the permissions to set, without set-ID bits for another owner, which would grant the
/// privileges of the extracting user.
fn permissions(attributes: &Attributes, owned: bool) -> Mode {
    let set_id = mode::SET_UID | mode::SET_GID;
    let own = owned
        || (attributes.uid == nix::unistd::geteuid().as_raw() && attributes.gid == nix::unistd::getegid().as_raw());
    Mode::from_raw_mode(attributes.mode & mode::PERMISSIONS & if own { u32::MAX } else { !set_id })
}

fn times(attributes: &Attributes) -> Timestamps {
    let time = |time: Timestamp| Timespec { tv_sec: time.seconds, tv_nsec: time.nanos.into() };
    Timestamps { last_access: time(attributes.atime), last_modification: time(attributes.mtime) }
}

pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_number_keeps_both_halves() {
        for (major, minor) in [(0, 0), (8, 1), (4095, 0xF_FFFF), (259, 70_000)] {
            assert_eq!(split_device_number(device_number(major, minor)), (major, minor));
        }
    }
}
