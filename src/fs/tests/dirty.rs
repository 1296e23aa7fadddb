//! The need of a commit is known at all times: a tick that takes a dirty archive for clean would
//! leave it uncommitted for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::support::{CREATOR, OPTIONS, create_with, open_on};
use crate::env::SeededEnvironment;
use crate::format::ROOT_INO;
use crate::fs::{FsOptions, SyncProfile, mode};
use crate::storage::simulated::{Fate, OpKind, SimulatedStorage};

/// Whatever the commit is doing to the storage when a write or a new name comes, the archive is
/// dirty when the commit is done, and the next commit makes it clean and has the change.
#[test]
fn what_is_accepted_while_a_commit_runs_is_not_taken_for_committed() {
    for named in [false, true] {
        let mut moment = 0;
        loop {
            let storage = SimulatedStorage::new();
            let environment = Arc::new(SeededEnvironment::new(50));
            let fs = create_with(storage.clone(), environment.clone(), OPTIONS);
            let file = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
            fs.write(file, 0, b"before").unwrap();
            fs.sync().unwrap();
            assert!(!fs.is_dirty());
            fs.make_directory(ROOT_INO, b"first", 0o700, CREATOR).unwrap();
            let (met, weak) = (Arc::new(AtomicUsize::new(0)), Arc::downgrade(&fs));
            let counted = met.clone();
            storage.on_op(Box::new(move |op| {
                let changes = matches!(op, OpKind::Write { .. } | OpKind::Barrier);
                if !changes || counted.fetch_add(1, Ordering::SeqCst) != moment {
                    return;
                }
                let Some(fs) = weak.upgrade() else { return };
                if named {
                    fs.make_directory(ROOT_INO, b"second", 0o700, CREATOR).unwrap();
                } else {
                    fs.write(file, 0, b"during").unwrap();
                }
            }));
            fs.sync().unwrap();
            storage.on_op(Box::new(|_| {}));
            let count = met.load(Ordering::SeqCst);
            if count <= moment {
                // A node, the record and a barrier at least.
                assert!(moment >= 3, "only {moment} operations");
                break;
            }
            assert!(fs.is_dirty(), "operation {moment} of the commit, named {named}");
            fs.sync().unwrap();
            assert!(!fs.is_dirty());
            let crashed = open_on(storage.crash(&mut |_| Fate::Drop), environment);
            if named {
                assert!(crashed.lookup(ROOT_INO, b"second").is_ok());
            } else {
                assert_eq!(crashed.read(file, 0, 100).unwrap(), b"during");
            }
            moment += 1;
        }
    }
}

/// `sync=never` promises nothing for fsync(2), but the end of a mount commits all the same.
#[test]
fn saving_commits_in_every_profile() {
    for sync in [SyncProfile::Never, SyncProfile::Periodic, SyncProfile::Always] {
        let storage = SimulatedStorage::new();
        let environment = Arc::new(SeededEnvironment::new(51));
        let fs = create_with(storage.clone(), environment.clone(), FsOptions { sync, ..OPTIONS });
        fs.make_durable().unwrap();
        let file = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
        fs.write(file, 0, &[1; 50_000]).unwrap();
        assert!(fs.dirty_bytes() >= 50_000);
        fs.sync().unwrap();
        assert_eq!(fs.is_dirty(), sync == SyncProfile::Never);
        fs.make_durable().unwrap();
        assert!(!fs.is_dirty());
        assert_eq!(fs.dirty_bytes(), 0);
        let crashed = open_on(storage.crash(&mut |_| Fate::Drop), environment);
        assert_eq!(crashed.read(file, 0, 50_000).unwrap(), [1; 50_000]);
    }
}

/// At the end of a mount a barrier may succeed without the store: then no caller hears of it, while the data is committed all the same.
#[test]
fn a_sync_after_their_end_fails_and_commits_go_on() {
    let storage = SimulatedStorage::new();
    let environment = Arc::new(SeededEnvironment::new(52));
    let fs = create_with(storage.clone(), environment.clone(), OPTIONS);
    let file = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
    fs.write(file, 0, &[1; 50_000]).unwrap();
    let waiting = fs.begin_sync().unwrap();
    fs.end_syncs();
    assert!(matches!(fs.finish_sync(waiting), Err(crate::Error::Io { .. })));
    assert!(fs.sync().is_err());
    fs.make_durable().unwrap();
    let crashed = open_on(storage.crash(&mut |_| Fate::Drop), environment);
    assert_eq!(crashed.read(file, 0, 50_000).unwrap(), [1; 50_000]);
}

/// With `sync=always` each change alone is on the medium when its call returns, without any fsync.
#[test]
fn every_change_is_durable_with_sync_always() {
    use crate::fs::{FileSystem, RenameMode, SetAttributes, XattrMode};
    type Change = fn(&FileSystem, crate::format::Ino);
    let changes: [(&str, Change); 13] = [
        ("create", |fs, _| {
            fs.make_node(ROOT_INO, b"new", mode::REGULAR | 0o600, 0, CREATOR).unwrap();
        }),
        ("mkdir", |fs, _| {
            fs.make_directory(ROOT_INO, b"new", 0o700, CREATOR).unwrap();
        }),
        ("symlink", |fs, _| {
            fs.make_symlink(ROOT_INO, b"new", b"target", CREATOR).unwrap();
        }),
        ("link", |fs, file| {
            fs.link(file, ROOT_INO, b"new").unwrap();
        }),
        ("unlink", |fs, _| fs.unlink(ROOT_INO, b"file").unwrap()),
        ("rmdir", |fs, _| fs.remove_directory(ROOT_INO, b"directory").unwrap()),
        ("rename", |fs, _| fs.rename(ROOT_INO, b"file", ROOT_INO, b"new", RenameMode::Replace).unwrap()),
        ("chmod", |fs, file| {
            let set = SetAttributes { mode: Some(0o640), ..SetAttributes::default() };
            fs.set_attributes(file, &set).unwrap();
        }),
        ("truncate", |fs, file| {
            let set = SetAttributes { size: Some(9), ..SetAttributes::default() };
            fs.set_attributes(file, &set).unwrap();
        }),
        ("setxattr", |fs, file| fs.set_xattr(file, b"user.new", b"value", XattrMode::Set).unwrap()),
        ("removexattr", |fs, file| fs.remove_xattr(file, b"user.old").unwrap()),
        ("punch", |fs, file| fs.zero_range(file, 0, 200_000, true, false).unwrap()),
        ("copy_range", |fs, file| assert_eq!(fs.copy_range(file, 0, file, 400_000, 300_000, false).unwrap(), 300_000)),
    ];
    for (name, change) in changes {
        let storage = SimulatedStorage::new();
        let environment = Arc::new(SeededEnvironment::new(52));
        let options = FsOptions { sync: SyncProfile::Always, ..OPTIONS };
        let fs = create_with(storage.clone(), environment.clone(), options);
        let file = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
        fs.make_directory(ROOT_INO, b"directory", 0o700, CREATOR).unwrap();
        fs.set_xattr(file, b"user.old", b"value", XattrMode::Set).unwrap();
        fs.write(file, 0, &[7; 300_000]).unwrap();
        fs.sync().unwrap();
        let before = state_of(&fs);
        change(&fs, file);
        let after = state_of(&fs);
        assert_ne!(before, after, "{name} changed nothing");
        let crashed = open_on(storage.crash(&mut |_| Fate::Drop), environment);
        assert_eq!(state_of(&crashed), after, "{name} was lost");
    }
}

/// All that the changes above touch.
fn state_of(fs: &crate::fs::FileSystem) -> String {
    let mut text = String::new();
    for name in [&b"file"[..], b"directory", b"new"] {
        let Ok(found) = fs.lookup(ROOT_INO, name) else {
            text.push_str("absent\n");
            continue;
        };
        let xattrs = fs.list_xattrs(found.ino).unwrap_or_default();
        let content = fs.read(found.ino, 0, 1 << 20).unwrap_or_default();
        let sum = content.iter().fold(0_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte) + 1));
        text.push_str(&format!("{found:?} {xattrs:?} {} {sum}\n", content.len()));
    }
    text
}
