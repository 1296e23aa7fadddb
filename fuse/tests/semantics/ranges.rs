//! Ranges of files: allocating, punching, seeking, copying.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};

use nix::libc::{ENOSPC, ENXIO};
use rustix::fs::{FallocateFlags, SeekFrom, copy_file_range, fallocate, seek};

use crate::support::{Mount, code, create, noise, read_at};

const MIB: u64 = 1 << 20;

/// fallocate(2) checks that the range would fit into the space that df(1) shows (ENOSPC otherwise) and extends the
/// file, but does not reserve space for it: an archive is written copy-on-write, so each write takes new space. The
/// range stays a hole until it is written.
#[test]
fn fallocate_checks_the_space() {
    let mut mount = Mount::with("size-limit=32M");
    let file = create(mount.path("file"));
    fallocate(&file, FallocateFlags::empty(), 0, 4 * MIB).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 4 * MIB);
    assert_eq!(code(seek(&file, SeekFrom::Data(0))), ENXIO);
    fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 8 * MIB).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 4 * MIB);
    assert_eq!(code(fallocate(&file, FallocateFlags::empty(), 0, 64 * MIB)), ENOSPC);
    assert_eq!(file.metadata().unwrap().len(), 4 * MIB);
    assert!(read_at(&file, 0, 4 << 20).iter().all(|byte| *byte == 0));
    drop(file);
    mount.check();
}

/// FALLOC_FL_PUNCH_HOLE makes a hole and FALLOC_FL_ZERO_RANGE a range of zeros that takes no space; both free space.
/// The kernel sets their times: before Linux 6.1 it does not change the modification time of a file that does not grow
/// by them.
#[test]
fn holes_are_punched() {
    let mut mount = Mount::new();
    let file = create(mount.path("file"));
    file.write_all_at(&noise(1, 4 << 20), 0).unwrap();
    file.sync_all().unwrap();
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 1000, 2 * MIB).unwrap();
    fallocate(&file, FallocateFlags::ZERO_RANGE, 3 * MIB, 2 * MIB).unwrap();
    let mut expected = noise(1, 4 << 20);
    expected[1000..(2 << 20) + 1000].fill(0);
    expected[3 << 20..].fill(0);
    expected.resize(5 << 20, 0);
    assert!(read_at(&file, 0, 5 << 20) == expected);
    file.sync_all().unwrap();
    assert!(file.metadata().unwrap().blocks() < 2 * 2048 + 100, "{}", file.metadata().unwrap().blocks());
    drop(file);
    mount.remount();
    assert!(fs::read(mount.path("file")).unwrap() == expected);
    mount.check();
}

/// SEEK_DATA and SEEK_HOLE of lseek(2) tell holes from data to the byte, also of data that is not yet written out; the
/// end of the file is a hole, and beyond it is ENXIO.
#[test]
fn holes_are_found() {
    let mut mount = Mount::new();
    let file = create(mount.path("file"));
    file.set_len(10 * MIB).unwrap();
    file.write_all_at(&noise(1, 8192), 4 * MIB).unwrap();
    let look = |file: &File| {
        assert_eq!(seek(file, SeekFrom::Data(0)).unwrap(), 4 * MIB);
        assert_eq!(seek(file, SeekFrom::Hole(4 * MIB)).unwrap(), 4 * MIB + 8192);
        assert_eq!(seek(file, SeekFrom::Hole(0)).unwrap(), 0);
        assert_eq!(seek(file, SeekFrom::Hole(9 * MIB)).unwrap(), 9 * MIB);
        assert_eq!(code(seek(file, SeekFrom::Data(5 * MIB))), ENXIO);
        assert_eq!(code(seek(file, SeekFrom::Hole(10 * MIB))), ENXIO);
    };
    look(&file);
    file.sync_all().unwrap();
    look(&file);
    drop(file);
    mount.remount();
    look(&File::open(mount.path("file")).unwrap());
}

/// copy_file_range(2), which cp(1) uses, shares the copied data: the copy takes hardly any space or time, and writing
/// one of the two files never changes the other. Tiny or unaligned rests are copied.
#[test]
fn copies_share_their_pages() {
    let mut mount = Mount::new();
    let source = create(mount.path("source"));
    source.write_all_at(&noise(1, 16 << 20), 0).unwrap();
    source.sync_all().unwrap();
    let used = || {
        let s = rustix::fs::statvfs(mount.root()).unwrap();
        (s.f_blocks - s.f_bfree) * s.f_frsize
    };
    let before = used();
    let copy = create(mount.path("copy"));
    let (mut from, mut to) = (0, 0);
    while from < 16 * MIB {
        let left = (16 * MIB - from) as usize;
        assert!(copy_file_range(&source, Some(&mut from), &copy, Some(&mut to), left).unwrap() > 0);
    }
    copy.sync_all().unwrap();
    assert!(used() < before + 2 * MIB, "{before} bytes before and {} after", used());
    copy.write_all_at(b"changed", 5 * MIB).unwrap();
    source.write_all_at(b"other", 9 * MIB).unwrap();
    drop((source, copy));
    mount.remount();
    let mut expected = noise(1, 16 << 20);
    expected[9 << 20..][..5].copy_from_slice(b"other");
    assert!(fs::read(mount.path("source")).unwrap() == expected);
    expected = noise(1, 16 << 20);
    expected[5 << 20..][..7].copy_from_slice(b"changed");
    assert!(fs::read(mount.path("copy")).unwrap() == expected);
    mount.check();
}
