//! Accepts the times that the kernel stores of a deleted regular file (KERNEL-4).

use lockbox::fs::{Attributes, SetAttributes, mode};
use lockbox::{Error, Result, format};

/// Accepts cached times of a deleted inode; every other result is passed through. The kernel sends
/// a ctime only for regular files, and ignores the reply; a utimensat(2) that raced with the unlink
/// came before it.
pub(super) fn accept_times(result: Result<Attributes>, ino: format::Ino, set: &SetAttributes) -> Result<Attributes> {
    let times_only = SetAttributes { atime: None, mtime: None, ctime: None, ..*set } == SetAttributes::default();
    match result {
        Err(Error::Stale) if times_only && set.ctime.is_some() => {
            Ok(Attributes { ino, mode: mode::REGULAR, ..Attributes::default() })
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use lockbox::fs::SetTime;

    use super::*;

    const INO: format::Ino = format::Ino(7);

    #[test]
    fn cached_times_of_a_file_that_is_gone_are_accepted() {
        let times = SetAttributes { mtime: Some(SetTime::Now), ctime: Some(SetTime::Now), ..SetAttributes::default() };
        let accepted = accept_times(Err(Error::Stale), INO, &times).unwrap();
        assert_eq!((accepted.ino, accepted.mode, accepted.links), (INO, mode::REGULAR, 0));
    }

    #[test]
    fn every_other_change_of_it_is_refused() {
        let ctime = Some(SetTime::Now);
        for set in [
            SetAttributes { mtime: ctime, ..SetAttributes::default() },
            SetAttributes { ctime, mode: Some(0o600), ..SetAttributes::default() },
            SetAttributes { ctime, size: Some(0), ..SetAttributes::default() },
            SetAttributes { ctime, kill_set_id: true, ..SetAttributes::default() },
        ] {
            assert!(matches!(accept_times(Err(Error::Stale), INO, &set), Err(Error::Stale)), "{set:?}");
        }
        let times = SetAttributes { ctime, ..SetAttributes::default() };
        assert!(matches!(accept_times(Err(Error::Latched(String::new())), INO, &times), Err(Error::Latched(_))));
    }
}
