//! Content of files: coherence, ways of writing, holes, sizes, deletion.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use nix::libc::{EFBIG, ENOENT, ESTALE, O_DIRECT};
use rustix::fs::{Mode, OFlags};

use crate::support::{Map, Mount, awaited, code, create, noise, open_with, python, read_at};

/// read(2), write(2) and shared memory maps of a file work on the same pages of the kernel: each sees the changes of
/// the others at once, within a process and between processes. A map does not grow a file.
#[test]
fn maps_reads_and_writes_are_coherent() {
    let mount = Mount::new();
    let file = create(mount.path("file"));
    file.set_len(8192).unwrap();
    let map = Map::new(&file, 8192);
    for round in 0..100_u8 {
        let at = usize::from(round) * 71;
        map.set(at, round + 1);
        assert_eq!(read_at(&file, at as u64, 1), [round + 1]);
        file.write_all_at(&[round + 2], 8000).unwrap();
        assert_eq!(map.get(8000), round + 2);
    }
    let mut child = python(
        "import mmap, sys\n\
         file = open(sys.argv[1], 'r+b')\n\
         map = mmap.mmap(file.fileno(), 8192)\n\
         map[100] = 42\n\
         print(map[200], file.read(1)[0], flush=True)\n\
         sys.stdin.read(1)\n\
         print(map[300], flush=True)\n",
        &[&mount.path("file")],
    );
    map.set(200, 7);
    map.set(0, 9);
    let mut said = [0; 4];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"7 9\n");
    assert_eq!(map.get(100), 42);
    file.write_all_at(&[55], 300).unwrap();
    child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    let mut said = String::new();
    child.stdout.as_mut().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "55\n");
    assert!(child.wait().unwrap().success());
    assert_eq!(file.metadata().unwrap().len(), 8192);
}

/// O_DIRECT is accepted with any offset, length and address, bypasses the kernel's cache, and agrees with it: when a
/// write(2) returned, each side sees the data of the other. It makes nothing durable by itself. Asynchronous writes, by
/// io_submit(2) or io_uring(7), agree only with other I/O that bypasses the cache: a cached read of the same bytes
/// during such an access may leave the old ones in the cache.
#[test]
fn direct_io_needs_no_alignment_and_is_coherent() {
    let mount = Mount::new();
    let file = create(mount.path("file"));
    file.write_all_at(&noise(1, 200_000), 0).unwrap();
    let direct = open_with(mount.path("file"), O_DIRECT).unwrap();
    let mut expected = noise(1, 200_000);
    assert!(read_at(&direct, 0, 200_000) == expected);
    for (offset, length) in [(0, 4096), (777, 1234), (131_071, 3), (199_999, 5000), (65_536, 100_000)] {
        let data = noise(offset, length);
        direct.write_all_at(&data, offset).unwrap();
        expected.resize(expected.len().max(offset as usize + length), 0);
        expected[offset as usize..][..length].copy_from_slice(&data);
        assert!(read_at(&file, 0, expected.len()) == expected, "after {length} bytes at {offset}");
        file.write_all_at(&[1, 2, 3], offset + 1).unwrap();
        expected[offset as usize + 1..][..3].copy_from_slice(&[1, 2, 3]);
        assert!(read_at(&direct, 0, expected.len()) == expected, "after a write at {offset}");
    }
    let mut one = [0; 1];
    assert_eq!(direct.read_at(&mut one, expected.len() as u64).unwrap(), 0);
}

/// Each write(2) with O_APPEND goes to the current end of the file, also when several processes append: nothing is
/// overwritten or torn.
#[test]
fn appending_loses_nothing() {
    let mount = Mount::new();
    let path = mount.path("log");
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let path = &path;
            scope.spawn(move || {
                let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
                for number in 0..500 {
                    file.write_all(format!("{writer} {number:04} {}\n", "x".repeat(90)).as_bytes()).unwrap();
                }
            });
        }
    });
    let content = fs::read_to_string(&path).unwrap();
    for writer in 0..4 {
        let mine: Vec<_> = content.lines().filter(|line| line.starts_with(&writer.to_string())).collect();
        assert_eq!(mine.len(), 500);
        for (number, line) in mine.iter().enumerate() {
            assert_eq!(*line, format!("{writer} {number:04} {}", "x".repeat(90)));
        }
    }
}

/// A range of a file that was never written is a hole, reads as zeros and takes no space. st_blocks counts the bytes
/// outside of holes in units of 512, before compression, and is never 0 for a file with data, as programs that look for
/// holes expect. While a file is open for writing it is at least 1, because data may be in flight, and counts written
/// data a second or two later; after the last close it is exact.
#[test]
fn holes_take_no_space_and_data_counts_in_full() {
    let mut mount = Mount::new();
    let sparse = create(mount.path("sparse"));
    sparse.set_len(1 << 40).unwrap();
    assert_eq!(sparse.metadata().unwrap().blocks(), 1);
    let hole = create(mount.path("hole"));
    hole.set_len(1 << 40).unwrap();
    drop(hole);
    await_blocks(&mount.path("hole"), 0);
    let written = create(mount.path("written"));
    written.write_all_at(b"x", 0).unwrap();
    assert_ne!(fs::metadata(mount.path("written")).unwrap().blocks(), 0);
    sparse.write_all_at(&noise(1, 4096), 1 << 39).unwrap();
    sparse.sync_all().unwrap();
    await_blocks(&mount.path("sparse"), 8);
    sparse.write_all_at(&noise(2, 4096), 1 << 38).unwrap();
    sparse.sync_all().unwrap();
    assert!(read_at(&sparse, (1 << 39) - 4096, 12_288)[..4096] == [0; 4096]);
    fs::write(mount.path("even"), vec![7; 1 << 20]).unwrap();
    fs::write(mount.path("tiny"), "x").unwrap();
    drop((sparse, written));
    for _ in 0..2 {
        assert_eq!(fs::metadata(mount.path("even")).unwrap().blocks(), 2048);
        assert_eq!(fs::metadata(mount.path("tiny")).unwrap().blocks(), 1);
        assert_eq!(fs::metadata(mount.path("sparse")).unwrap().blocks(), 16);
        mount.remount();
    }
    assert!(fs::metadata(mount.archive()).unwrap().len() < 16 << 20);
}

/// Waits until the file counts so many.
fn await_blocks(path: &Path, blocks: u64) {
    let counted = || fs::metadata(path).unwrap().blocks();
    assert!(awaited(|| counted() == blocks), "{} counts {} blocks, not {blocks}", path.display(), counted());
}

/// Of small pieces written close together, more than 12 in 128 KiB, the holes between them are filled when they are stored.
/// st_blocks counts them from a second or two after that on.
#[test]
fn holes_between_many_small_pieces_are_filled_and_then_counted() {
    let mut mount = Mount::new();
    // Else they may be stored without the sync.
    let stopped = mount.stop_clock();
    let pieces = create(mount.path("pieces"));
    for block in (0..32).step_by(2) {
        pieces.write_all_at(&noise(block, 4096), block * 4096).unwrap();
    }
    // Any close has the kernel ask for the blocks again, so the rest is done with a descriptor that stays open.
    let reader = File::open(mount.path("pieces")).unwrap();
    drop(pieces);
    let blocks = |mount: &Mount| fs::metadata(mount.path("pieces")).unwrap().blocks();
    assert_eq!(blocks(&mount), 16 * 8);
    reader.sync_all().unwrap();
    drop(stopped);
    // The kernel holds an answer for ever that was right when it was given.
    await_blocks(&mount.path("pieces"), 31 * 8);
    drop(reader);
    for _ in 0..2 {
        assert_eq!(blocks(&mount), 31 * 8);
        mount.remount();
    }
}

/// Data that truncate(2) cuts off is gone at once, and reads as zeros when the file grows again.
#[test]
fn what_was_cut_off_does_not_come_back() {
    let mut mount = Mount::new();
    let file = create(mount.path("file"));
    file.write_all_at(&noise(1, 5_000_000), 0).unwrap();
    file.set_len(1_234_567).unwrap();
    file.set_len(5_000_000).unwrap();
    drop(file);
    for _ in 0..2 {
        let found = fs::read(mount.path("file")).unwrap();
        assert!(found[..1_234_567] == noise(1, 5_000_000)[..1_234_567]);
        assert!(found.len() == 5_000_000 && found[1_234_567..].iter().all(|byte| *byte == 0));
        mount.remount();
    }
    mount.check();
}

/// A file can have 2^63 - 1 bytes, the largest offset of the system, and be sparse up to its last byte. Appending to
/// such a file gets EFBIG.
#[test]
fn offsets_up_to_the_last_are_right() {
    let mut mount = Mount::new();
    let last = i64::MAX as u64 - 1;
    let offsets = [0, (1 << 31) - 2, (1 << 32) - 2, (1 << 43) + 5, (1 << 52) - 1, (1 << 62) - 3, last - 4096, last - 3];
    let file = create(mount.path("file"));
    for offset in offsets {
        file.write_all_at(&offset.to_le_bytes()[..4], offset).unwrap();
    }
    assert_eq!(file.metadata().unwrap().len(), i64::MAX as u64);
    let mut appending = OpenOptions::new().append(true).open(mount.path("file")).unwrap();
    assert_eq!(code(appending.write_all(b"x")), EFBIG);
    file.set_len(i64::MAX as u64 - 1).unwrap();
    file.set_len(i64::MAX as u64).unwrap();
    file.write_all_at(&(last - 3).to_le_bytes()[3..4], last).unwrap();
    drop(appending);
    drop(file);
    mount.remount();
    let file = File::open(mount.path("file")).unwrap();
    assert_eq!(file.metadata().unwrap().len(), i64::MAX as u64);
    for offset in offsets {
        assert_eq!(read_at(&file, offset, 4), offset.to_le_bytes()[..4], "at {offset}");
    }
    assert_eq!(read_at(&file, 1 << 61, 4096), [0; 4096]);
    drop(file);
    mount.check();
}

/// A file that was unlinked while it is open can be read, written and mapped until the last descriptor is closed. It
/// cannot get a name again (linkat(2) gets ENOENT). Then its space is free; after a crash such files are gone.
#[test]
fn unlinked_open_files_live_until_closed() {
    let mut mount = Mount::new();
    let file = create(mount.path("file"));
    file.write_all_at(&noise(1, 3_000_000), 0).unwrap();
    let used = |mount: &Mount| {
        let s = rustix::fs::statvfs(mount.root()).unwrap();
        (s.f_blocks - s.f_bfree) * s.f_frsize
    };
    file.sync_all().unwrap();
    let full = used(&mount);
    fs::remove_file(mount.path("file")).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    file.write_all_at(b"still", 10).unwrap();
    mount.drop_caches();
    assert_eq!(read_at(&file, 10, 5), b"still");
    let by_descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
    let linked = rustix::fs::linkat(
        rustix::fs::CWD,
        by_descriptor.as_str(),
        rustix::fs::CWD,
        mount.path("again"),
        rustix::fs::AtFlags::SYMLINK_FOLLOW,
    );
    assert_eq!(code(linked), ENOENT);
    drop(file);
    // The daemon hears of the close a moment later.
    let is_given_back = awaited(|| {
        File::open(mount.root()).unwrap().sync_all().unwrap();
        used(&mount) + 2_900_000 <= full
    });
    assert!(is_given_back, "{} of {full} bytes are used", used(&mount));
    let file = create(mount.path("lost"));
    file.write_all_at(&noise(1, 3_000_000), 0).unwrap();
    fs::remove_file(mount.path("lost")).unwrap();
    file.sync_all().unwrap();
    mount.crash();
    drop(file);
    assert_eq!(fs::read_dir(mount.root()).unwrap().count(), 0);
    mount.check();
}

/// A descriptor that was opened with O_PATH does not hold a file open: when the last name of the file was unlinked,
/// opening it by that descriptor through /proc/self/fd gets ESTALE, where ext4 still opens it. A file whose last name was
/// taken by a rename is opened.
#[test]
fn a_descriptor_of_a_path_holds_no_unlinked_file() {
    let mut mount = Mount::new();
    for name in ["unlinked", "replaced", "other"] {
        fs::write(mount.path(name), name).unwrap();
    }
    let path_only = |name| rustix::fs::open(mount.path(name), OFlags::PATH, Mode::empty()).unwrap();
    let (unlinked, replaced) = (path_only("unlinked"), path_only("replaced"));
    let again = |descriptor: &OwnedFd| fs::read(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
    assert_eq!(again(&unlinked).unwrap(), b"unlinked");
    fs::remove_file(mount.path("unlinked")).unwrap();
    fs::rename(mount.path("other"), mount.path("replaced")).unwrap();
    // It was open for reading and writing until just now.
    assert!(awaited(|| code(again(&unlinked)) == ESTALE));
    assert_eq!(again(&replaced).unwrap(), b"replaced");
    drop((unlinked, replaced));
    mount.check();
}
