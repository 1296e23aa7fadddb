//! The only table from errors of the core to errno.

use lockbox::Error;
use nix::errno::Errno;

/// Returns the errno for the caller. Damage and host errors are also logged, since an errno cannot
/// name the page. The latch is not, or every later write would be.
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
