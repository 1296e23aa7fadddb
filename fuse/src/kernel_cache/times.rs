//! Ignores late times of the kernel that would undo newer ones set by a program (KERNEL-8).

use std::time::SystemTime;

use lockbox::error::Timestamp;
use lockbox::fs::{Attributes, FileSystem, SetAttributes, SetTime};
use lockbox::{Result, format};

use super::{KernelCache, unlinked};

impl KernelCache {
    /// Sets attributes as [`FileSystem::set_attributes`]. Times that the kernel stores too late are
    /// ignored, and those of a deleted file are accepted (KERNEL-4).
    pub(crate) fn set_attributes(
        &self,
        fs: &FileSystem,
        ino: format::Ino,
        set: &SetAttributes,
        by_handle: bool,
    ) -> Result<Attributes> {
        unlinked::accept_times(self.set_in_order(fs, ino, set, by_handle), ino, set)
    }

    /// Ignores late times. The kernel can have unsaved times while a program sets others only for
    /// an inode with writers: it stores them before each close(2) returns.
    fn set_in_order(
        &self,
        fs: &FileSystem,
        ino: format::Ino,
        set: &SetAttributes,
        by_handle: bool,
    ) -> Result<Attributes> {
        // KERNEL-8.
        let change = || fs.set_attributes(ino, &SetAttributes { keeps_times: true, ..*set });
        let (Some(SetTime::To(ctime)), Some(newest)) = (set.ctime, self.writers.newest_ctime(ino.0)) else {
            return change();
        };
        let mut newest = newest.lock();
        if !is_kernel_store(set, by_handle) {
            return change().inspect(|_| *newest = Some(ctime));
        }
        let now = Timestamp::from_system(SystemTime::now());
        if is_stale(ctime, *newest, now) { fs.attributes(ino) } else { change() }
    }
}

/// Returns whether the kernel stores its cached times. It uses any of the inode's writable handles.
/// utimensat(2) of the mtime alone looks the same except for the handle: of the calls that set
/// times only ftruncate(2) comes with a handle.
fn is_kernel_store(set: &SetAttributes, by_handle: bool) -> bool {
    by_handle && set.mtime.is_some() && SetAttributes { mtime: None, ctime: None, ..*set } == SetAttributes::default()
}

/// Returns whether a ctime is outdated. After the clock was set back, the newest one lies in the
/// future and does not count.
fn is_stale(ctime: Timestamp, newest: Option<Timestamp>, now: Timestamp) -> bool {
    newest.is_some_and(|newest| ctime < newest && newest <= now)
}

#[cfg(test)]
mod tests {
    use lockbox::archive::{Archive, CreateOptions, KdfCost, OpenOptions};
    use lockbox::crypto::Passphrase;
    use lockbox::fs::Creator;
    use lockbox::keys;

    use super::*;

    fn at(nanos: u32) -> Timestamp {
        Timestamp { seconds: 1_700_000_000, nanos }
    }

    fn stored(nanos: u32) -> SetAttributes {
        let time = Some(SetTime::To(at(nanos)));
        SetAttributes { mtime: time, ctime: time, ..SetAttributes::default() }
    }

    #[test]
    fn late_times_of_the_kernel_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("box.lbx");
        let passphrase = Passphrase::new(b"a passphrase".to_vec());
        let creator = Creator { uid: 0, gid: 0, umask: None };
        let kdf = KdfCost { memory_kib: 1024, passes: 1, lanes: 1 };
        Archive::create(&path, &passphrase, &CreateOptions { kdf, creator }).unwrap();
        let key = keys::unlock(&path, &passphrase).unwrap();
        let archive = Archive::open(&path, &key, &OpenOptions::default()).unwrap();
        let (fs, cache) = (archive.file_system(), KernelCache::default());
        let ino = fs.create_and_open(format::ROOT_INO, b"file", 0o600, creator).unwrap().ino;
        cache.writers.add(ino.0);
        let set_by = |set: &SetAttributes, by_handle| {
            cache.set_attributes(fs, ino, set, by_handle).map(|a| (a.mtime, a.ctime)).unwrap()
        };
        let set = |set: &SetAttributes| set_by(set, true);
        assert_eq!(set(&stored(5)), (at(5), at(5)));
        assert_eq!(set(&SetAttributes { size: Some(7), ..stored(20) }), (at(20), at(20)));
        assert_eq!(set(&stored(10)), (at(20), at(20)), "the kernel had read it before");
        assert_eq!(set(&stored(30)), (at(30), at(30)));
        // touch -m
        let touched = SetAttributes { mtime: Some(SetTime::To(at(1))), ..stored(40) };
        assert_eq!(set_by(&touched, false), (at(1), at(40)));
        assert_eq!(set(&stored(35)), (at(1), at(40)), "the kernel had read it before");
        let memory = SetAttributes { ctime: Some(SetTime::To(at(50))), ..touched };
        assert_eq!(set(&memory), (at(1), at(50)), "what was set, and a later change of status");
        cache.writers.remove(ino.0);
        assert_eq!(set(&stored(10)), (at(10), at(10)), "only with a writer can it be late");
    }

    #[test]
    fn a_kernel_store_differs_from_times_that_programs_set() {
        assert!(is_kernel_store(&stored(1), true) && !is_kernel_store(&stored(1), false));
        for set in [
            SetAttributes { size: Some(0), ..stored(1) },
            SetAttributes { mode: Some(0o600), mtime: None, ..stored(1) },
            SetAttributes { atime: Some(SetTime::Now), ..stored(1) },
            SetAttributes { mtime: None, ..stored(1) },
        ] {
            assert!(!is_kernel_store(&set, true), "{set:?}");
        }
    }

    #[test]
    fn older_times_are_late_unless_the_clock_was_set_back() {
        assert!(!is_stale(at(5), None, at(9)));
        assert!(is_stale(at(5), Some(at(6)), at(9)));
        assert!(!is_stale(at(6), Some(at(6)), at(9)) && !is_stale(at(7), Some(at(6)), at(9)));
        assert!(!is_stale(at(5), Some(at(20)), at(9)), "20 is still to come");
    }
}
