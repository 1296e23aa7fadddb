//! Another program cuts, replaces or removes the archive's file under a file system that is in use.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::support::{OPTIONS, create_with, try_open_on};
use crate::env::SeededEnvironment;
use crate::error::Error;
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Creator, FileSystem, mode};
use crate::storage::{FileStorage, HostEntry, LockMode};

const OWNER: Creator = Creator { uid: 1, gid: 1, umask: None };

struct Place {
    _directory: tempfile::TempDir,
    path: PathBuf,
    environment: Arc<SeededEnvironment>,
}

/// A file system with a large file in a real file of the host.
fn begin() -> (Place, Arc<FileSystem>, Ino, Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.lbx");
    let environment = Arc::new(SeededEnvironment::new(7));
    let fs = create_with(
        Arc::new(FileStorage::create(&HostEntry::of(&path).unwrap()).unwrap()),
        environment.clone(),
        OPTIONS,
    );
    let made = fs.make_node(ROOT_INO, b"large", mode::REGULAR | 0o600, 0, OWNER).unwrap();
    let mut content = vec![0; 3_000_000];
    crate::env::Environment::fill_random(&*environment, &mut content).unwrap();
    fs.write(made.ino, 0, &content).unwrap();
    fs.sync().unwrap();
    drop(fs);
    // With empty caches except for nodes that changes need, so that reading content reads the file.
    let fs =
        try_open_on(Arc::new(FileStorage::open(&path, LockMode::Exclusive).unwrap()), environment.clone()).unwrap();
    assert_eq!(fs.read(made.ino, 0, 10).unwrap(), content[..10]);
    (Place { _directory: directory, path, environment }, fs, made.ino, content)
}

/// Checks that every change fails from now on with the same error, which contains `what`.
fn assert_latched(fs: &FileSystem, ino: Ino, what: &str) {
    // The first one learns the cause, which may be the write.
    let first = fs.write(ino, 0, b"new").and_then(|()| fs.sync());
    let Err(Error::Damaged(cause)) = first else { panic!("an fsync into a lost file succeeded") };
    assert!(cause.contains(what), "{cause}");
    let Err(Error::WriteFailed(reason)) = fs.sync() else { panic!("an fsync into a lost file succeeded") };
    assert!(reason.contains(what), "{reason}");
    for _ in 0..2 {
        assert!(matches!(fs.sync(), Err(Error::WriteFailed(again)) if again == reason));
        let made = fs.make_node(ROOT_INO, b"more", mode::REGULAR | 0o600, 0, OWNER);
        assert!(matches!(made, Err(Error::WriteFailed(again)) if again == reason));
    }
    assert!(matches!(fs.maintain(), Err(Error::WriteFailed(again)) if again == reason));
    assert!(fs.close().is_err());
}

fn cut(path: &Path, length: u64) {
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(length).unwrap();
}

/// No wrong bytes are read, nothing is written after the truncated end, and the archive is refused
/// afterwards.
#[test]
fn a_file_that_is_cut_under_the_mount_latches_and_shows_no_wrong_byte() {
    let (place, fs, ino, content) = begin();
    let length = fs::metadata(&place.path).unwrap().len();
    let left = 2_400_000;
    assert!(length > left + 2_000_000);
    cut(&place.path, left);
    let mut lost = 0;
    for at in (0..content.len()).step_by(100_000) {
        match fs.read(ino, at as u64, 100_000) {
            Ok(read) => assert!(read == content[at..at + 100_000], "wrong bytes at {at}"),
            Err(Error::Damaged(reason)) => {
                assert!(reason.contains("truncated"), "{reason}");
                lost += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(lost > 0);
    assert_latched(&fs, ino, "truncated");
    assert_eq!(fs::metadata(&place.path).unwrap().len(), left, "written behind the cut");
    drop(fs);
    let storage = Arc::new(FileStorage::open(&place.path, LockMode::Exclusive).unwrap());
    let opened = try_open_on(storage, place.environment);
    assert!(matches!(opened, Err(Error::Damaged(reason)) if reason.contains("truncated")));
}

/// The same is noticed without any change, by the background work.
#[test]
fn background_work_notices_that_the_file_was_cut() {
    let (place, fs, ino, _) = begin();
    cut(&place.path, 2_000_000);
    let Err(Error::Damaged(reason)) = fs.maintain() else { panic!("not noticed") };
    assert!(reason.contains("truncated"), "{reason}");
    assert_latched_already(&fs, ino);
}

fn assert_latched_already(fs: &FileSystem, ino: Ino) {
    // No caller got the error before.
    assert!(matches!(fs.write(ino, 0, b"new"), Err(Error::Damaged(_))));
    assert!(matches!(fs.write(ino, 0, b"new"), Err(Error::WriteFailed(_))));
    assert!(matches!(fs.sync(), Err(Error::WriteFailed(_))));
}

#[test]
fn a_file_that_was_replaced_or_removed_takes_no_more_promises() {
    let (place, fs, ino, content) = begin();
    let other = place.path.with_extension("other");
    fs::write(&other, b"another file").unwrap();
    fs::rename(&other, &place.path).unwrap();
    assert!(fs.read(ino, 0, content.len()).unwrap() == content, "the open file is still whole");
    assert_latched(&fs, ino, "replaced");
    assert_eq!(fs::read(&place.path).unwrap(), b"another file");
    let (place, fs, ino, _) = begin();
    fs::remove_file(&place.path).unwrap();
    assert_latched(&fs, ino, "removed");
}

/// A moved file still has a name, so that written data can be found: work continues.
#[test]
fn a_file_that_was_moved_is_written_on() {
    let (place, fs, ino, _) = begin();
    let moved = place.path.with_extension("moved");
    fs::rename(&place.path, &moved).unwrap();
    fs.write(ino, 0, b"new").unwrap();
    fs.sync().unwrap();
    fs.close().unwrap();
    drop(fs);
    let storage = Arc::new(FileStorage::open(&moved, LockMode::Exclusive).unwrap());
    let fs = try_open_on(storage, place.environment).unwrap();
    assert_eq!(fs.read(ino, 0, 3).unwrap(), b"new");
}
