use std::os::unix::fs::PermissionsExt;

use super::*;

fn place() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.lbx");
    (directory, path)
}

fn create(path: &Path) -> Result<FileStorage> {
    FileStorage::create(&HostEntry::of(path).unwrap())
}

#[test]
fn a_new_file_is_private_and_never_replaces_another() {
    let (_directory, path) = place();
    let storage = create(&path).unwrap();
    HostEntry::of(&path).unwrap().sync_directory().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    drop(storage);
    let error = create(&path).err().unwrap();
    assert!(error.to_string().ends_with("a.lbx exists and is not overwritten"), "{error}");
}

#[test]
fn one_writer_excludes_everybody_and_readers_share() {
    let (_directory, path) = place();
    let writer = create(&path).unwrap();
    for mode in [LockMode::Shared, LockMode::Exclusive] {
        let error = FileStorage::open(&path, mode).err().unwrap();
        assert!(matches!(&error, Error::InUse(text) if text.ends_with("in use by another process")), "{error}");
    }
    drop(writer);
    let first = FileStorage::open(&path, LockMode::Shared).unwrap();
    let second = FileStorage::open(&path, LockMode::Shared).unwrap();
    assert!(first.read_only() && second.read_only());
    assert!(matches!(FileStorage::open(&path, LockMode::Exclusive), Err(Error::InUse(_))));
    drop((first, second));
    assert!(!FileStorage::open(&path, LockMode::Exclusive).unwrap().read_only());
}

#[test]
fn only_regular_files_are_opened() {
    let (directory, path) = place();
    assert!(matches!(FileStorage::open(&path, LockMode::Shared), Err(Error::NotFound)));
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for mode in [LockMode::Shared, LockMode::Exclusive] {
        assert!(matches!(FileStorage::open(&path, mode), Err(Error::NotArchive(_))));
        assert!(matches!(FileStorage::open(directory.path(), mode), Err(Error::NotArchive(_))));
    }
}

#[test]
fn a_reader_cannot_write() {
    let (_directory, path) = place();
    drop(create(&path).unwrap());
    let reader = FileStorage::open(&path, LockMode::Shared).unwrap();
    assert!(reader.write_at(0, b"x").is_err());
}

#[test]
fn reads_back_what_was_written_and_refuses_to_read_beyond() {
    let (_directory, path) = place();
    let storage = create(&path).unwrap();
    storage.write_at(5000, b"hello").unwrap();
    storage.barrier().unwrap();
    storage.evict(4096, 4096).unwrap();
    let mut out = [0; 5];
    storage.read_at(5000, &mut out).unwrap();
    assert_eq!(&out, b"hello");
    let error = storage.read_at(5001, &mut out).err().unwrap();
    assert!(matches!(&error, Error::Damaged(text) if text.starts_with("archive is truncated")), "{error}");
}

#[test]
fn allocation_grows_and_holes_are_found_where_the_host_knows_them() {
    let (_directory, path) = place();
    let storage = create(&path).unwrap();
    storage.allocate(0, 1 << 20).unwrap();
    assert_eq!(storage.len().unwrap(), 1 << 20);
    storage.set_len(4 << 20).unwrap();
    storage.write_at(2 << 20, &[1; 8192]).unwrap();
    storage.barrier().unwrap();
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(range) = storage.next_data(at).unwrap() {
        at = range.end;
        found.push(range);
    }
    assert!(found.iter().any(|range| range.start <= 2 << 20 && range.end >= (2 << 20) + 8192), "{found:?}");
    match storage.punch(2 << 20, 8192) {
        Ok(()) => {
            let mut out = [9; 8192];
            storage.read_at(2 << 20, &mut out).unwrap();
            assert_eq!(out, [0; 8192]);
        }
        Err(Error::Unsupported(_)) => {}
        Err(error) => panic!("{error}"),
    }
    assert_eq!(storage.next_data(4 << 20).unwrap(), None);
}

#[test]
fn zeros_are_written_behind_the_end_only() {
    let (_directory, path) = place();
    let storage = create(&path).unwrap();
    storage.write_at(0, &[5; 100]).unwrap();
    storage.extend_with_zeros(200_000).unwrap();
    assert_eq!(storage.len().unwrap(), 200_000);
    let mut out = [9; 200];
    storage.read_at(0, &mut out).unwrap();
    assert!(out[..100] == [5; 100] && out[100..] == [0; 100]);
}

#[test]
fn notices_that_the_file_was_removed_or_replaced_or_cut() {
    let (directory, path) = place();
    let storage = create(&path).unwrap();
    storage.write_at(0, &[1; 8192]).unwrap();
    storage.check_identity().unwrap();
    storage.set_len(4096).unwrap();
    storage.check_identity().unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    assert!(matches!(storage.check_identity(), Err(Error::Damaged(_))));
    // The file is not extended either, which would hide the loss.
    for refused in [storage.write_at(4096, &[1]), storage.allocate(0, 8192), storage.set_len(4096)] {
        assert!(matches!(refused, Err(Error::Damaged(_))));
    }
    assert_eq!(storage.len().unwrap(), 100);
    OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let aside = directory.path().join("b.lbx");
    // After a rename the file can still be found, whatever replaced it at its path.
    fs::rename(&path, &aside).unwrap();
    storage.check_identity().unwrap();
    fs::write(&path, [0; 4096]).unwrap();
    storage.check_identity().unwrap();
    fs::rename(&aside, &path).unwrap();
    storage.check_identity().unwrap();
    assert!(!storage.is_unlinked());
    fs::write(&aside, [0; 4096]).unwrap();
    fs::rename(&aside, &path).unwrap();
    assert!(storage.is_unlinked());
    assert!(matches!(storage.check_identity(), Err(Error::Damaged(_))));
    fs::remove_file(&path).unwrap();
    assert!(matches!(storage.check_identity(), Err(Error::Damaged(_))));
}

#[test]
fn the_name_is_looked_up_where_it_was_whatever_hides_the_path() {
    let (place, _) = place();
    let (directory, path) = (place.path().join("host"), place.path().join("host/a.lbx"));
    fs::create_dir(&directory).unwrap();
    let storage = create(&path).unwrap();
    // Like a mount over the directory.
    let aside = place.path().join("aside");
    fs::rename(&directory, &aside).unwrap();
    fs::create_dir(&directory).unwrap();
    fs::write(&path, b"what hides it").unwrap();
    storage.check_identity().unwrap();
    // A link created at the name later is not followed, since it may point below the mount.
    let elsewhere = place.path().join("elsewhere");
    fs::rename(aside.join("a.lbx"), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, aside.join("a.lbx")).unwrap();
    assert!(!storage.name.as_ref().unwrap().refers_to(&storage.file).unwrap());
    storage.check_identity().unwrap();
    fs::remove_file(aside.join("a.lbx")).unwrap();
    fs::remove_file(&elsewhere).unwrap();
    let Err(Error::Damaged(reason)) = storage.check_identity() else { panic!("it is gone") };
    assert!(reason.ends_with("was removed"), "{reason}");
}

#[test]
fn a_link_to_the_file_is_followed() {
    let (place, path) = place();
    drop(create(&path).unwrap());
    let link = place.path().join("link");
    std::os::unix::fs::symlink("a.lbx", &link).unwrap();
    let storage = FileStorage::open(&link, LockMode::Exclusive).unwrap();
    storage.check_identity().unwrap();
    fs::remove_file(&path).unwrap();
    assert!(matches!(storage.check_identity(), Err(Error::Damaged(_))));
}

#[test]
fn only_a_disk_of_ext4_or_xfs_syncs_ranges() {
    let (disk, server) = (rustix::fs::makedev(254, 1), rustix::fs::makedev(0, 50));
    for host_type in RANGE_SYNC_TYPES {
        assert!(has_range_sync(Some(host_type), disk));
        assert!(!has_range_sync(Some(host_type), server), "9p reports the type of its server");
    }
    assert!(!has_range_sync(Some(BTRFS), disk) && !has_range_sync(Some(NFS), server) && !has_range_sync(None, disk));
}

/// With RWF_DSYNC and with a barrier.
#[test]
fn a_synced_range_keeps_its_bytes_and_its_neighbours() {
    for has_range_sync in [true, false] {
        let (_directory, path) = place();
        let storage = FileStorage { has_range_sync, ..create(&path).unwrap() };
        storage.write_at(0, &[1; 3000]).unwrap();
        storage.write_at(1000, &[2; 1000]).unwrap();
        storage.sync_range(1000, &[2; 1000]).unwrap();
        let mut out = [0; 3000];
        storage.read_at(0, &mut out).unwrap();
        assert_eq!(out.map(usize::from).iter().sum::<usize>(), 4000);
        assert_eq!(out[1000..2000], [2; 1000]);
        assert_eq!(storage.len().unwrap(), 3000);
    }
}

/// Returns a storage that takes its host for NFS, and its directory.
fn on_nfs() -> (tempfile::TempDir, FileStorage) {
    let (directory, path) = place();
    let storage = FileStorage { host_type: Some(NFS), ..create(&path).unwrap() };
    (directory, storage)
}

#[test]
fn no_barrier_of_nfs_succeeds_after_a_failed_write() {
    let (_directory, storage) = on_nfs();
    storage.write_at(0, b"data").unwrap();
    storage.barrier().unwrap();
    let refused: Result<()> = storage.lost_writes.watch(|| Err(Error::NoSpace("full".into())));
    refused.unwrap_err();
    for _ in 0..2 {
        let error = storage.barrier().unwrap_err();
        assert!(matches!(&error, Error::Io { source, .. } if source.to_string().starts_with(MAY_BE_LOST)), "{error:?}");
    }
}

/// A call that has taken the error of an earlier write notes it before a sync decides.
#[test]
fn a_sync_waits_for_failed_calls_in_flight() {
    for (has_range_sync, syncs_range) in [(false, false), (true, false), (true, true)] {
        let (_directory, path) = place();
        let storage = FileStorage { has_range_sync, ..create(&path).unwrap() };
        storage.write_at(0, b"data").unwrap();
        let (begun, begin) = std::sync::mpsc::channel();
        let (fail, failing) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let storage = &storage;
            let taker = scope.spawn(move || {
                storage.sync(|| {
                    begun.send(()).unwrap();
                    failing.recv().unwrap();
                    Err(io::Error::from_raw_os_error(libc::EIO))
                })
            });
            begin.recv().unwrap();
            let sync =
                scope.spawn(move || if syncs_range { storage.sync_range(0, b"data") } else { storage.barrier() });
            // Until the sync waits for the call.
            while storage.lost_writes.in_flight.try_read().is_some() && !sync.is_finished() {
                std::thread::yield_now();
            }
            fail.send(()).unwrap();
            taker.join().unwrap().unwrap_err();
            sync.join().unwrap().unwrap_err();
        });
    }
}

#[test]
fn growth_of_nfs_is_synced_zeros() {
    let (_directory, storage) = on_nfs();
    storage.write_at(0, b"data").unwrap();
    storage.extend_with_zeros(200_000).unwrap();
    assert_eq!(storage.len().unwrap(), 200_000);
    let mut out = [1; 8];
    storage.read_at(199_992, &mut out).unwrap();
    assert_eq!(out, [0; 8]);
    storage.barrier().unwrap();
}

/// A host that transfers a few bytes at a time and is interrupted every other time.
#[test]
fn short_and_interrupted_transfers_are_continued() {
    let mut host = Vec::new();
    let mut turn = 0;
    let mut interrupted = move || {
        turn += 1;
        if turn % 2 == 1 { Err(io::Error::from(io::ErrorKind::Interrupted)) } else { Ok(()) }
    };
    let data: Vec<u8> = (0..100).collect();
    let mut write = |data: &[u8], at: u64| {
        interrupted()?;
        assert_eq!(at, 7 + host.len() as u64);
        let count = data.len().min(9);
        host.extend_from_slice(&data[..count]);
        Ok(count)
    };
    write_fully(&mut write, 7, &data).unwrap();
    assert_eq!(host, data);
    let mut out = [0; 120];
    let mut read = |out: &mut [u8], at: u64| {
        interrupted()?;
        let rest = &host[at as usize - 7..];
        let count = rest.len().min(out.len()).min(9);
        out[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    };
    assert_eq!(read_fully(&mut read, 7, &mut out).unwrap(), 100);
    assert_eq!(out[..100], data);
}

#[test]
fn a_transfer_that_fails_in_the_middle_or_makes_no_progress_is_an_error() {
    for (number, kind) in [(5, None), (28, Some(io::ErrorKind::StorageFull))] {
        let mut left = 10;
        let mut write = |data: &[u8], _: u64| {
            let count = data.len().min(left);
            left -= count;
            if count == 0 { Err(io::Error::from_raw_os_error(number)) } else { Ok(count) }
        };
        let error = write_fully(&mut write, 0, &[0; 20]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(number));
        assert!(kind.is_none_or(|kind| error.kind() == kind));
    }
    assert_eq!(write_fully(&mut |_, _| Ok(0), 0, &[1]).unwrap_err().kind(), io::ErrorKind::WriteZero);
    let mut failing = |_: &mut [u8], _: u64| Err(io::Error::from_raw_os_error(5));
    assert!(read_fully(&mut failing, 0, &mut [0; 4]).is_err());
}

/// Found by measuring under load: a thread interrupted between reading the length and its bound
/// took another thread's growth for a truncation, and the archive became read-only.
#[test]
fn a_file_that_grows_or_is_cut_by_another_thread_meanwhile_is_not_damaged() {
    let min_length = AtomicU64::new(100);
    let mut length = 100;
    // Grown right after its length was read.
    let grown = check_length(&min_length, &mut || {
        let seen = length;
        length += 50;
        min_length.fetch_max(length, Ordering::SeqCst);
        Ok(seen)
    });
    grown.unwrap();
    // Truncated right before, by this process.
    let mut cut = false;
    let by_us = check_length(&min_length, &mut || {
        if !std::mem::replace(&mut cut, true) {
            min_length.fetch_min(70, Ordering::SeqCst);
        }
        Ok(70)
    });
    by_us.unwrap();
    // Truncated by another program.
    let error = check_length(&min_length, &mut || Ok(60)).unwrap_err();
    assert!(matches!(&error, Error::Damaged(text) if text.contains("length=60 needed=70")), "{error}");
}

/// The same with threads and a real file.
#[test]
fn concurrent_growth_is_not_reported_as_truncation() {
    let (_directory, path) = place();
    let storage = create(&path).unwrap();
    storage.allocate(0, 4096).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..20_000).for_each(|_| storage.write_at(0, &[1; 64]).unwrap()));
        }
        scope.spawn(|| (1..5_000_u64).for_each(|n| storage.allocate(n * 4096, 4096).unwrap()));
    });
}

#[test]
fn concurrent_growth_and_shrinking_are_not_reported_as_truncation() {
    const STEP: u64 = 4096;
    let (_directory, path) = place();
    let storage = create(&path).unwrap();
    storage.allocate(0, STEP).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers = [0, 1].map(|at| {
            let (storage, stop) = (&storage, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    storage.write_at(at, &[1])?;
                }
                storage.check_identity()
            })
        });
        let resizer = scope.spawn(|| {
            for round in 0..200 {
                for step in 1..100 {
                    storage.allocate(step * STEP, STEP).unwrap();
                }
                storage.set_len(STEP * (1 + round % 3)).unwrap();
            }
        });
        // The flag is set before a failure of the resizer is passed on, or the scope would wait forever.
        let resized = resizer.join();
        stop.store(true, Ordering::SeqCst);
        for writer in writers {
            writer.join().unwrap().unwrap();
        }
        resized.unwrap();
    });
}
