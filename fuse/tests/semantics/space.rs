//! Full disks, the limit of the size, and what df(1) tells.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use nix::libc::ENOSPC;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rustix::fs::{FallocateFlags, fallocate, statvfs};

use crate::support::{Mount, code, create, noise};

const MIB: u64 = 1 << 20;

fn available(mount: &Mount) -> u64 {
    let s = statvfs(mount.root()).unwrap();
    s.f_bavail * s.f_frsize
}

/// Fills a file until there is no space; the bytes that were taken. What the kernel accepted first shows at fsync(2).
fn fill(mount: &Mount, name: &str, most: u64) -> (u64, i32) {
    let mut file = match File::create(mount.path(name)) {
        Ok(file) => file,
        Err(error) => return (0, code::<()>(Err(error))),
    };
    for step in 0..most / MIB {
        let result = file.write_all(&noise(step, MIB as usize)).and_then(|()| file.sync_all());
        if result.is_err() {
            return (step * MIB, code(result));
        }
    }
    (most, 0)
}

/// Everything that must go on at the limit, as on a full disk.
fn full_but_alive(mount: &mut Mount) {
    let free = available(mount);
    let (taken, error) = fill(mount, "filler", free + 8 * MIB);
    assert_eq!(error, ENOSPC);
    assert!(taken + free / 8 + 2 * MIB > free, "{taken} bytes were taken of {free}");
    assert!(available(mount) < 3 * MIB, "{} bytes are left", available(mount));
    File::open(mount.root()).unwrap().sync_all().unwrap();
    assert!(fs::read(mount.path("kept")).unwrap() == noise(99, 2_000_000));
    fs::remove_file(mount.path("filler")).unwrap();
    File::open(mount.root()).unwrap().sync_all().unwrap();
    let mut tries = 0;
    while available(mount) + free / 8 + 2 * MIB < free {
        File::open(mount.root()).unwrap().sync_all().unwrap();
        tries += 1;
        assert!(tries < 100_000, "{} of {free} bytes came back", available(mount));
    }
    assert_eq!(fill(mount, "again", free / 2).1, 0);
    fs::remove_file(mount.path("again")).unwrap();
    mount.remount();
    assert!(fs::read(mount.path("kept")).unwrap() == noise(99, 2_000_000));
}

/// The option `size-limit` bounds the file of the archive as a quota does: beyond it writing gets ENOSPC, while
/// deleting, fsync(2) and unmounting still work, and the space of deleted files can be used again. An archive that is
/// larger already does not grow.
#[test]
fn the_size_limit_holds() {
    let mut mount = Mount::with("size-limit=24M");
    fs::write(mount.path("kept"), noise(99, 2_000_000)).unwrap();
    for _ in 0..2 {
        full_but_alive(&mut mount);
        assert!(fs::metadata(mount.archive()).unwrap().len() <= 24 * MIB);
    }
    fill(&mount, "filler", 16 * MIB);
    mount.remount_with("size-limit=8M");
    let length = fs::metadata(mount.archive()).unwrap().len();
    assert!(length > 16 * MIB);
    assert_eq!(fill(&mount, "more", 16 * MIB).1, ENOSPC);
    assert!(fs::metadata(mount.archive()).unwrap().len() <= length.next_multiple_of(MIB));
    mount.check();
}

/// A full disk is an error of the request that finds no room, ENOSPC, and of no other: durable data stays, deleting and
/// unmounting work, and freed space is used: the space of deleted files can be used again at once, since a writer
/// without room waits for pending frees. Since the kernel accepts writes before the daemon sees them, the error may
/// come at fsync(2) or close(2); a program that asks for neither meets it soon with write(2), if it opened the file for
/// writing alone. Only deletes and commits may use the last MiB.
#[test]
fn a_full_host_loses_nothing() {
    let host = Host::new(48 * MIB);
    let mut mount = Mount::at(tempfile::Builder::new().tempdir_in(&host.0).unwrap(), "");
    fs::write(mount.path("kept"), noise(99, 2_000_000)).unwrap();
    full_but_alive(&mut mount);
    // The room that others take on the host is gone here too.
    let before = available(&mount);
    fs::write(mount.outside("other"), noise(1, 8 << 20)).unwrap();
    let after = available(&mount);
    assert!(before >= after + 7 * MIB, "{before} bytes before, {after} after");
    // Whoever never asks; 2 GiB at most.
    let mut log = File::create(mount.path("log")).unwrap();
    assert_eq!(fill(&mount, "filler", 64 * MIB).1, ENOSPC);
    let piece = noise(7, 64 << 10);
    let met = (0..32_768).find_map(|_| log.write_all(&piece).err());
    assert_eq!(met.and_then(|error| error.raw_os_error()), Some(ENOSPC));
    drop(log);
    fs::remove_file(mount.path("log")).unwrap();
    fs::remove_file(mount.path("filler")).unwrap();
    mount.check();
    drop(mount);
}

/// df(1) and statfs(2) show the space for writing: free space in the archive's file, and the growth that the host and
/// `size-limit` allow. The available space that they show, about 2 MiB and 3.5 percent less than the free space, can be
/// written to one file in large requests even if none of it compresses, and requested with fallocate(2), as long as the
/// free space is not in fragments. Many small files, and writes of some KiB here and there, take more. The number of
/// free inodes is the number that fits into the free space. A written file counts at once, not only when it is
/// committed.
#[test]
fn statistics_tell_the_truth() {
    let mount = Mount::with("size-limit=40M");
    let before = statvfs(mount.root()).unwrap();
    let (free, total) = (before.f_bfree * before.f_frsize, before.f_blocks * before.f_frsize);
    assert!(total <= 40 * MIB && total > 30 * MIB && free > 30 * MIB, "{free} of {total}");
    assert!(before.f_bavail < before.f_bfree && before.f_namemax == 255 && before.f_ffree > 10_000);
    let mut file = create(mount.path("file"));
    file.write_all(&noise(1, 10 << 20)).unwrap();
    drop(file);
    let after = statvfs(mount.root()).unwrap();
    let taken = (before.f_bavail - after.f_bavail) * after.f_frsize;
    // What is shown allows for nodes that a single file does not need.
    assert!((10 * MIB - 64 * 1024..12 * MIB).contains(&taken), "{taken} bytes are taken");
    let used = (after.f_blocks - after.f_bfree) - (before.f_blocks - before.f_bfree);
    assert!((10 * MIB..12 * MIB).contains(&(used * after.f_frsize)), "{used} blocks are used");
    drop(mount);
    for request in [1 << 20, 128 << 10] {
        all_that_is_available_can_be_written(request);
    }
}

fn all_that_is_available_can_be_written(request: usize) {
    let mut mount = Mount::with("size-limit=40M");
    let available = available(&mount);
    let mut file = create(mount.path("file"));
    fallocate(&file, FallocateFlags::empty(), 0, available).unwrap();
    for offset in (0..available).step_by(request) {
        let length = (available - offset).min(request as u64) as usize;
        file.write_all(&noise(offset, length)).unwrap();
    }
    file.sync_all().unwrap();
    assert_eq!(file.metadata().unwrap().len(), available);
    assert!(self::available(&mount) < 2 * MIB, "{} of {available} bytes are left", self::available(&mount));
    drop(file);
    mount.check();
}

/// A small file system in memory, for an archive that is to find its host full.
struct Host(PathBuf);

impl Host {
    fn new(bytes: u64) -> Host {
        let point = tempfile::Builder::new().prefix("lockbox-semantics.").tempdir().unwrap().keep();
        let host = Host(point);
        let data = format!("size={bytes}");
        mount(Some("tmpfs"), &host.0, Some("tmpfs"), MsFlags::empty(), Some(data.as_str())).unwrap();
        host
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
        let _ = fs::remove_dir(&self.0);
    }
}
