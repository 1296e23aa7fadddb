//! Conversion between the types of FUSE and of the core, with the only table from errors to errno,
//! and the replies shared by several requests.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    FileAttr, FileType, Generation, INodeNo, OpenAccMode, OpenFlags, RenameFlags, ReplyData, ReplyEmpty, ReplyLseek,
    ReplyWrite, ReplyXattr, TimeOrNow,
};
use lockbox::error::Timestamp;
use lockbox::exchange::{device_number, split_device_number};
use lockbox::fs::Ino;
use lockbox::fs::{Attributes, Creator, FileSystem, RenameMode, SetTime, XattrMode, mode};
use lockbox::{Error, Result};
use nix::errno::Errno;

/// Preferred I/O size: the archive's block.
const BLOCK: u32 = 4096;

/// Inode numbers are never reused, so every inode has the same generation, also for NFS.
pub(crate) const GENERATION: Generation = Generation(0);

pub(crate) fn ino(number: INodeNo) -> Ino {
    Ino(number.0)
}

pub(crate) fn may_write(flags: OpenFlags) -> bool {
    flags.acc_mode() != OpenAccMode::O_RDONLY
}

pub(crate) fn updates_atime(flags: OpenFlags) -> bool {
    flags.acc_mode() != OpenAccMode::O_WRONLY && flags.0 & nix::libc::O_NOATIME == 0
}

pub(crate) fn to_file_attr(a: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(a.ino.0),
        size: a.size,
        blocks: a.blocks,
        atime: to_system(a.atime),
        mtime: to_system(a.mtime),
        ctime: to_system(a.ctime),
        crtime: to_system(a.btime),
        kind: file_type(a.mode),
        // The mask leaves 12 bits.
        perm: (a.mode & mode::PERMISSIONS) as u16,
        nlink: a.links,
        uid: a.uid,
        gid: a.gid,
        rdev: to_kernel_device(a.rdev),
        blksize: BLOCK,
        flags: 0,
    }
}

/// Returns the entry for a missing name with a timeout: inode number 0; other fields are ignored.
pub(crate) fn negative_entry() -> FileAttr {
    to_file_attr(&Attributes { mode: mode::REGULAR, ..Attributes::default() })
}

fn file_type(mode: u32) -> FileType {
    match mode & mode::TYPE {
        mode::SOCKET => FileType::Socket,
        mode::SYMLINK => FileType::Symlink,
        mode::BLOCK => FileType::BlockDevice,
        mode::DIRECTORY => FileType::Directory,
        mode::CHARACTER => FileType::CharDevice,
        mode::FIFO => FileType::NamedPipe,
        _ => FileType::RegularFile,
    }
}

/// Converts a time. One that SystemTime cannot hold becomes 1970: an unusual program wrote it.
fn to_system(time: Timestamp) -> SystemTime {
    let whole = Duration::from_secs(time.seconds.unsigned_abs());
    let shifted = if time.seconds < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
    shifted.and_then(|t| t.checked_add(Duration::from_nanos(time.nanos.into()))).unwrap_or(UNIX_EPOCH)
}

/// Converts a time. fuser turns the kernel's (seconds, nanoseconds) before 1970 into `EPOCH -
/// (|seconds| + nanoseconds)`, which is undone here: nanoseconds always count forward.
fn to_timestamp(time: SystemTime) -> Timestamp {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => {
            Timestamp { seconds: i64::try_from(after.as_secs()).unwrap_or(i64::MAX), nanos: after.subsec_nanos() }
        }
        Err(before) => {
            let before = before.duration();
            let seconds = 0i64.checked_sub_unsigned(before.as_secs()).unwrap_or(i64::MIN);
            Timestamp { seconds, nanos: before.subsec_nanos() }
        }
    }
}

pub(crate) fn to_set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::To(to_timestamp(time)),
    }
}

/// Converts rename flags. With RENAME_NOREPLACE the kernel has already checked that the name is
/// free, because all name changes pass through it (KERNEL-5). So that flag adds nothing to
/// RENAME_WHITEOUT; the kernel has refused the other combinations.
pub(crate) fn rename_mode(flags: RenameFlags, creator: Creator) -> Result<RenameMode> {
    if flags.is_empty() {
        Ok(RenameMode::Replace)
    } else if flags == RenameFlags::RENAME_NOREPLACE {
        Ok(RenameMode::NoReplace)
    } else if flags == RenameFlags::RENAME_EXCHANGE {
        Ok(RenameMode::Exchange)
    } else if flags.difference(RenameFlags::RENAME_NOREPLACE) == RenameFlags::RENAME_WHITEOUT {
        Ok(RenameMode::Whiteout(creator))
    } else {
        Err(Error::invalid(format!("rename flags: flags={flags}")))
    }
}

/// Operation of fallocate(2).
pub(crate) enum Allocation {
    Plain {
        keep_size: bool,
    },
    /// Makes a hole, which reads as zeros: also FALLOC_FL_PUNCH_HOLE.
    Zero {
        keep_size: bool,
    },
}

/// Converts the mode of fallocate(2). Collapsing and inserting ranges moves whole blocks of a block
/// device and is not supported.
pub(crate) fn allocation(mode: i32) -> Result<Allocation> {
    const KEEP_SIZE: i32 = nix::libc::FALLOC_FL_KEEP_SIZE;
    const PUNCH: i32 = nix::libc::FALLOC_FL_PUNCH_HOLE | KEEP_SIZE;
    const ZERO: i32 = nix::libc::FALLOC_FL_ZERO_RANGE;
    const ZERO_KEEP: i32 = ZERO | KEEP_SIZE;
    match mode {
        0 | KEEP_SIZE => Ok(Allocation::Plain { keep_size: mode != 0 }),
        ZERO | ZERO_KEEP | PUNCH => Ok(Allocation::Zero { keep_size: mode != ZERO }),
        _ => Err(Error::Unsupported(format!("fallocate mode: mode={mode:#x}"))),
    }
}

/// Converts xattr flags: XATTR_CREATE is 1, XATTR_REPLACE 2.
pub(crate) fn xattr_mode(flags: i32) -> Result<XattrMode> {
    match flags {
        0 => Ok(XattrMode::Set),
        1 => Ok(XattrMode::Create),
        2 => Ok(XattrMode::Replace),
        _ => Err(Error::invalid(format!("xattr flags: flags={flags}"))),
    }
}

/// Converts a device number of FUSE (the kernel's `new_encode_dev`: 12 bits major within 20 bits
/// minor) to the archive's.
pub(crate) fn from_kernel_device(device: u32) -> u32 {
    device_number((device & 0xF_FF00) >> 8, (device & 0xFF) | (device >> 12 & 0xF_FF00))
}

fn to_kernel_device(rdev: u32) -> u32 {
    let (major, minor) = split_device_number(rdev);
    (minor & 0xFF) | major << 8 | (minor & 0xF_FF00) << 12
}

/// Returns the errno for the caller. Damage and host errors are also logged, since an errno cannot
/// name the page. The latch is not, or every later write would be.
pub(crate) fn errno(error: &Error) -> fuser::Errno {
    if matches!(error, Error::Damaged(_) | Error::Io { .. }) {
        let source = std::error::Error::source(error);
        tracing::error!(source = source.map(tracing::field::display), "{error}");
    }
    fuser::Errno::from_i32(code(error) as i32)
}

fn code(error: &Error) -> Errno {
    match error {
        Error::NotFound => Errno::ENOENT,
        Error::Exists => Errno::EEXIST,
        Error::NotDirectory => Errno::ENOTDIR,
        Error::IsDirectory => Errno::EISDIR,
        Error::NotEmpty => Errno::ENOTEMPTY,
        Error::NameTooLong => Errno::ENAMETOOLONG,
        Error::Invalid(_) | Error::Refused(_) => Errno::EINVAL,
        Error::PermissionDenied => Errno::EACCES,
        Error::NotPermitted => Errno::EPERM,
        Error::FileTooLarge => Errno::EFBIG,
        Error::TooManyLinks => Errno::EMLINK,
        Error::NoAttribute => Errno::ENODATA,
        Error::AttributeTooLarge => Errno::E2BIG,
        Error::RangeTooSmall => Errno::ERANGE,
        Error::Stale => Errno::ESTALE,
        Error::NoSuchRange => Errno::ENXIO,
        Error::Unsupported(_) => Errno::EOPNOTSUPP,
        Error::NoSpace(_) => Errno::ENOSPC,
        // The latch makes the archive read-only, and programs handle EROFS. The cause is reported
        // once, as EIO, to the caller that met the failure or that requests durability next.
        Error::ReadOnly(_) | Error::WriteFailed(_) => Errno::EROFS,
        // Another writer took over the remote archive: the old state stays readable.
        Error::InUse(_) => Errno::EROFS,
        Error::Interrupted(_) => Errno::EINTR,
        // A file opened on a server does not exist any more.
        Error::Io { source, .. } if source.kind() == std::io::ErrorKind::StaleNetworkFileHandle => Errno::ESTALE,
        Error::NotArchive(_)
        | Error::UnsupportedVersion(_)
        | Error::WrongKey
        | Error::Damaged(_)
        | Error::OlderCopy(_)
        | Error::ForkedCopy(_)
        | Error::Replaced(_)
        | Error::Io { .. } => Errno::EIO,
    }
}

pub(crate) fn reply_empty(result: Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    }
}

pub(crate) fn reply_content(fs: &FileSystem, number: Ino, offset: u64, size: usize, reply: ReplyData) {
    fs.with_read_buffer(|buffer| match fs.read_into(number, offset, size, buffer) {
        Ok(count) => reply.data(&buffer[..count]),
        Err(error) => reply.error(errno(&error)),
    });
}

/// Maximum of one copy_file_range, in whole blocks: the reply counts in 32 bits.
pub(crate) const MAX_COPY: u32 = 1 << 31;

pub(crate) fn reply_copied(result: Result<u64>, reply: ReplyWrite) {
    match result {
        Ok(copied) => reply.written(u32::try_from(copied).unwrap_or(MAX_COPY)),
        Err(error) => reply.error(errno(&error)),
    }
}

pub(crate) fn reply_offset(result: Result<i64>, reply: ReplyLseek) {
    match result {
        Ok(offset) => reply.offset(offset),
        Err(error) => reply.error(errno(&error)),
    }
}

pub(crate) fn reply_xattr(result: Result<Vec<u8>>, size: u32, reply: ReplyXattr) {
    match result {
        // A value is 64 KiB at most; a list of names longer than the kernel's 64 KiB fails below.
        Ok(value) if size == 0 => reply.size(u32::try_from(value.len()).unwrap_or(u32::MAX)),
        Ok(value) if value.len() > size as usize => reply.error(errno(&Error::RangeTooSmall)),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(errno(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_keep_both_halves_across_the_kernels_encoding() {
        for (major, minor) in [(0, 0), (1, 3), (8, 255), (259, 70_000), (4095, 0xF_FFFF)] {
            let rdev = device_number(major, minor);
            assert_eq!(from_kernel_device(to_kernel_device(rdev)), rdev);
        }
        // /dev/null in the kernel's encoding.
        assert_eq!(to_kernel_device(device_number(1, 3)), 0x103);
    }

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        let time = Timestamp { seconds: -2, nanos: 200_000_000 };
        // Value of stat(2): -1.8 s.
        assert_eq!(to_system(time), UNIX_EPOCH - Duration::from_millis(1800));
        // utimensat(2) of the same time after fuser's conversion.
        assert_eq!(to_timestamp(UNIX_EPOCH - Duration::new(2, 200_000_000)), time);
    }

    #[test]
    fn an_impossible_time_is_not_a_panic() {
        to_system(Timestamp { seconds: i64::MIN, nanos: 0 });
        to_system(Timestamp { seconds: i64::MAX, nanos: 999_999_999 });
    }

    #[test]
    fn fallocate_knows_its_modes_and_refuses_to_move_data() {
        assert!(matches!(allocation(0), Ok(Allocation::Plain { keep_size: false })));
        assert!(matches!(allocation(1), Ok(Allocation::Plain { keep_size: true })));
        assert!(matches!(allocation(3), Ok(Allocation::Zero { keep_size: true })));
        assert!(matches!(allocation(0x10), Ok(Allocation::Zero { keep_size: false })));
        assert!(matches!(allocation(0x11), Ok(Allocation::Zero { keep_size: true })));
        for mode in [2, 8, 0x20, 0x40, 0x13] {
            assert!(matches!(allocation(mode), Err(Error::Unsupported(_))), "mode={mode:#x}");
        }
    }

    #[test]
    fn the_earliest_time_comes_through() {
        let earliest = Timestamp { seconds: i64::MIN, nanos: 0 };
        assert_eq!(to_timestamp(to_system(earliest)), earliest);
        assert_eq!(to_timestamp(UNIX_EPOCH - Duration::from_secs(1 << 63)), earliest);
    }

    #[test]
    fn an_exchange_combines_with_nothing() {
        let creator = Creator { uid: 1, gid: 2, umask: None };
        let whiteout = RenameFlags::RENAME_WHITEOUT;
        for flags in [whiteout, whiteout | RenameFlags::RENAME_NOREPLACE] {
            assert_eq!(rename_mode(flags, creator).unwrap(), RenameMode::Whiteout(creator));
        }
        for other in [whiteout, RenameFlags::RENAME_NOREPLACE, RenameFlags::from_bits_retain(1 << 9)] {
            assert!(rename_mode(RenameFlags::RENAME_EXCHANGE | other, creator).is_err());
        }
    }

    #[test]
    fn full_disk_damage_and_latch_differ() {
        assert_eq!(code(&Error::NoSpace(String::new())), Errno::ENOSPC);
        assert_eq!(code(&Error::Damaged("block=1".into())), Errno::EIO);
        assert_eq!(code(&Error::WriteFailed(String::new())), Errno::EROFS);
        assert_eq!(code(&Error::ReadOnly(String::new())), Errno::EROFS);
    }

    #[test]
    fn names_and_attributes_have_their_posix_codes() {
        assert_eq!(code(&Error::NotFound), Errno::ENOENT);
        assert_eq!(code(&Error::NotEmpty), Errno::ENOTEMPTY);
        assert_eq!(code(&Error::NoAttribute), Errno::ENODATA);
        assert_eq!(code(&Error::AttributeTooLarge), Errno::E2BIG);
        assert_eq!(code(&Error::Stale), Errno::ESTALE);
        assert_eq!(code(&Error::Unsupported(String::new())), Errno::EOPNOTSUPP);
    }
}
