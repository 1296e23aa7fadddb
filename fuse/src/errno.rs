//! The one table that turns an error of the core into an errno.

use lockbox::Error;
use nix::errno::Errno;

/// What the caller of the system call gets. Damage and host errors also go to the log, since an errno
/// cannot name the page; the latch does not, or every later write would.
pub fn errno(error: &Error) -> fuser::Errno {
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
        // The latch makes the archive read-only: programs know how to live with EROFS. Why it did is told once, as EIO, to who was met by
        // the failure or asks for durability next.
        Error::ReadOnly(_) | Error::WriteFailed(_) => Errno::EROFS,
        // Another writer took over where the archive lives: it can be read as it was.
        Error::InUse(_) => Errno::EROFS,
        Error::Interrupted(_) => Errno::EINTR,
        // What was opened on a server is not there any more.
        Error::Io { source, .. } if source.kind() == std::io::ErrorKind::StaleNetworkFileHandle => Errno::ESTALE,
        Error::NotArchive(_)
        | Error::UnsupportedVersion(_)
        | Error::WrongKey
        | Error::Damaged(_)
        | Error::Older(_)
        | Error::Forked(_)
        | Error::Replaced(_)
        | Error::Io { .. } => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
