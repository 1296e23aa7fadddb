//! Files added in bulk equal files created one by one, and refused files leave no traces.

use std::collections::BTreeMap;

use super::support::{CREATOR, NAME_KEY, OPTIONS, add_files, assert_sound, crash, fresh, fresh_with, list, reopen};
use crate::env::{Environment, SeededEnvironment};
use crate::error::{Error, Timestamp};
use crate::format::{Ino, Key, ROOT_INO, kind};
use crate::fs::{
    Compression, FileSystem, FsOptions, MAX_SMALL_FILE, NewFile, SetAttributes, SetTime, SyncProfile, XattrMode, mode,
};

fn new_file<'a>(directory: Ino, name: &'a [u8], content: &'a [u8]) -> NewFile<'a> {
    NewFile {
        directory,
        name,
        mode: 0o4751,
        uid: CREATOR.uid,
        gid: CREATOR.gid,
        atime: Some(Timestamp { seconds: 5, nanos: 6 }),
        mtime: Some(Timestamp { seconds: 7, nanos: 8 }),
        xattrs: &[],
        content,
    }
}

/// Names and contents of every length that is kept in another way, half of them compressible.
fn contents(count: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
    let dice = SeededEnvironment::new(3);
    let lengths = [0, 1, 256, 257, 1024, 4096, 16_384, 20_000, MAX_SMALL_FILE as usize];
    let content = |n: usize| {
        let mut bytes = vec![n as u8; lengths[n % lengths.len()]];
        if n.is_multiple_of(2) {
            dice.fill_random(&mut bytes).unwrap();
        }
        bytes
    };
    (0..count).map(|n| (format!("file {n}").into_bytes(), content(n))).collect()
}

/// Attributes of a file but for its times of change and birth, its attribute `user.a`, and its
/// content.
type Seen = (Vec<u8>, u32, u32, u64, u64, Timestamp, Timestamp, Option<Vec<u8>>, Vec<u8>);

fn see(fs: &FileSystem, directory: Ino) -> Vec<Seen> {
    let look = |(name, ino, _): (Vec<u8>, Ino, u64)| {
        let is = fs.attributes(ino).unwrap();
        let content = fs.read(ino, 0, 1 << 20).unwrap();
        (name, is.mode, is.uid, is.size, is.blocks, is.atime, is.mtime, fs.xattr(ino, b"user.a").ok(), content)
    };
    list(fs, directory, 0).unwrap().into_iter().map(look).collect()
}

#[test]
fn files_added_in_bulk_are_what_files_made_one_by_one_are() {
    for (pack, compression) in
        [(true, Compression::Default), (false, Compression::Best), (true, Compression::Off), (true, Compression::Fast)]
    {
        let (storage, fs) = fresh_with(1, NAME_KEY, FsOptions { pack, compression, ..OPTIONS });
        // More than one operation takes, by number and by bytes.
        let files = contents(1500);
        let one = fs.make_directory(ROOT_INO, b"one", 0o755, CREATOR).unwrap().ino;
        let bulk = fs.make_directory(ROOT_INO, b"bulk", 0o755, CREATOR).unwrap().ino;
        let xattrs = [(b"user.a".to_vec(), vec![1; 3000]), (b"trusted.b".to_vec(), vec![2; 10])];
        let xattrs_of = |n: usize| if n % 100 == 3 { &xattrs[..] } else { &[] };
        for (n, (name, content)) in files.iter().enumerate() {
            let made = fs.make_node(one, name, mode::REGULAR | 0o4751, 0, CREATOR).unwrap();
            fs.write(made.ino, 0, content).unwrap();
            for (name, value) in xattrs_of(n) {
                fs.set_xattr(made.ino, name, value, XattrMode::Set).unwrap();
            }
            let time = |seconds, nanos| Some(SetTime::To(Timestamp { seconds, nanos }));
            let set = SetAttributes { atime: time(5, 6), mtime: time(7, 8), ..SetAttributes::default() };
            fs.set_attributes(made.ino, &set).unwrap();
        }
        let new: Vec<NewFile<'_>> = files
            .iter()
            .enumerate()
            .map(|(n, (name, content))| NewFile { xattrs: xattrs_of(n), ..new_file(bulk, name, content) })
            .collect();
        let inos: Vec<Ino> = add_files(&fs, &new).unwrap().into_iter().map(|added| added.unwrap()).collect();
        assert!(inos.is_sorted(), "created in the order given");
        let expected = see(&fs, one);
        assert!(see(&fs, bulk) == expected);
        let fs = reopen(&storage, fs);
        assert!(see(&fs, bulk) == expected);
        assert_sound(&fs);
        // They can be changed like any others.
        for ino in inos.iter().step_by(3) {
            fs.write(*ino, 100, b"new").unwrap();
        }
        for (name, _) in files.iter().step_by(4) {
            fs.unlink(bulk, name).unwrap();
        }
        let fs = reopen(&storage, fs);
        assert_sound(&fs);
        assert_eq!(&fs.read(inos[3], 100, 3).unwrap(), b"new");
    }
}

#[test]
fn what_is_refused_is_refused_alone() {
    let (storage, fs) = fresh(2);
    let directory = fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap().ino;
    let file = fs.make_node(directory, b"there", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
    let long = vec![1; MAX_SMALL_FILE as usize + 1];
    let list_of = [(b"system.posix_acl_access".to_vec(), vec![0; 4])];
    let content = [7; 3000];
    let new = [
        new_file(directory, b"first", &content),
        new_file(directory, b"there", &content),
        new_file(directory, b"twice", &content),
        new_file(directory, b"twice", &content),
        new_file(Ino(4711), b"nowhere", &content),
        new_file(file, b"in a file", &content),
        new_file(directory, b"a/b", &content),
        new_file(directory, b"..", &content),
        new_file(directory, &[b'n'; 256], &content),
        new_file(directory, b"long", &long),
        NewFile { xattrs: &list_of, ..new_file(directory, b"with a list", &content) },
        new_file(directory, b"last", &content),
    ];
    let before = fs.volume.state().inodes();
    let added = add_files(&fs, &new).unwrap();
    assert!(matches!(
        &added[..],
        [
            Ok(_),
            Err(Error::Exists),
            Ok(_),
            Err(Error::Exists),
            Err(Error::NotFound),
            Err(Error::NotDirectory),
            Err(Error::Invalid(_)),
            Err(Error::Exists),
            Err(Error::NameTooLong),
            Err(Error::FileTooLarge),
            Err(Error::Unsupported(_)),
            Ok(_),
        ]
    ));
    let names: Vec<Vec<u8>> = list(&fs, directory, 0).unwrap().into_iter().map(|entry| entry.0).collect();
    assert_eq!(names, [&b"there"[..], b"first", b"twice", b"last"]);
    let fs = reopen(&storage, fs);
    assert_sound(&fs);
    assert!(fs.volume.check_space(true, &mut |_, _| {}).unwrap().is_empty());
    for index in [0, 2, 11] {
        assert_eq!(fs.read(*added[index].as_ref().unwrap(), 0, 4000).unwrap(), content);
    }
    assert_eq!(fs.volume.state().inodes(), before + 3);
}

#[test]
fn a_full_archive_takes_what_fits_and_stays_sound() {
    let (storage, fs) = fresh(3);
    fs.sync().unwrap();
    let (blocks, _) = fs.volume.allocator().space();
    fs.volume.allocator().limit_size((blocks + 1200) * 4096);
    let directory = fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap().ino;
    let dice = SeededEnvironment::new(4);
    let mut contents = BTreeMap::new();
    let mut refused = false;
    for round in 0..200 {
        let made: Vec<(Vec<u8>, Vec<u8>)> = (0..10)
            .map(|n| {
                let mut content = vec![0; 9000];
                dice.fill_random(&mut content).unwrap();
                (format!("{round} {n}").into_bytes(), content)
            })
            .collect();
        let new: Vec<NewFile<'_>> = made.iter().map(|(name, content)| new_file(directory, name, content)).collect();
        match add_files(&fs, &new) {
            Ok(added) => assert!(added.iter().all(Result::is_ok)),
            Err(Error::NoSpace(_)) => refused = true,
            Err(error) => panic!("{error}"),
        }
        contents.extend(made);
        if refused {
            break;
        }
    }
    assert!(refused, "the limit was never met");
    let there = list(&fs, directory, 0).unwrap();
    assert!(there.len() > 50);
    let fs = reopen(&storage, fs);
    for (name, ino, _) in there {
        assert!(fs.read(ino, 0, 10_000).unwrap() == contents[&name]);
    }
    assert_sound(&fs);
    assert!(fs.volume.check_space(true, &mut |_, _| {}).unwrap().is_empty());
}

#[test]
fn a_directory_that_is_removed_gets_no_files() {
    let (_, fs) = fresh(5);
    let directory = fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap().ino;
    fs.remove_directory(ROOT_INO, b"d").unwrap();
    let added = add_files(&fs, &[new_file(directory, b"a", &[1; 2000])]).unwrap();
    assert!(matches!(added[..], [Err(Error::NotFound)]));
    assert_sound(&fs);
}

/// The state may change between the checks and the operation: of two batches with the same names
/// each name is given once.
#[test]
fn threads_that_add_the_same_names_share_them() {
    let (storage, fs) = fresh(6);
    let directory = fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap().ino;
    let names: Vec<Vec<u8>> = (0..400).map(|n| format!("{n}").into_bytes()).collect();
    let added: Vec<usize> = std::thread::scope(|scope| {
        let add = |own: u8| {
            let content = vec![own; 1500];
            let mut count = 0;
            for names in names.chunks(20) {
                let new: Vec<NewFile<'_>> = names.iter().map(|name| new_file(directory, name, &content)).collect();
                for added in add_files(&fs, &new).unwrap() {
                    match added {
                        Ok(_) => count += 1,
                        Err(error) => assert!(matches!(error, Error::Exists)),
                    }
                }
            }
            count
        };
        let threads: Vec<_> = (1..4).map(|own| scope.spawn(move || add(own))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(added.iter().sum::<usize>(), names.len());
    let fs = reopen(&storage, fs);
    for (_, ino, _) in list(&fs, directory, 0).unwrap() {
        let content = fs.read(ino, 0, 2000).unwrap();
        assert!(content.len() == 1500 && content.iter().all(|byte| *byte == content[0]));
        let extent = Key::new(ino.0, kind::EXTENT, 0);
        let state = fs.volume.state();
        assert!(fs.volume.view(&state).get(extent, |_| Ok(())).unwrap().is_some());
    }
    assert_sound(&fs);
    assert!(fs.volume.check_space(true, &mut |_, _| {}).unwrap().is_empty());
}

/// Under sync=always the added files are durable, also when an error ends the rest.
#[test]
fn what_was_added_before_an_error_is_durable_where_every_change_is() {
    let (storage, fs) = fresh_with(7, NAME_KEY, FsOptions { sync: SyncProfile::Always, ..OPTIONS });
    let directory = fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap().ino;
    let (blocks, _) = fs.volume.allocator().space();
    fs.volume.allocator().limit_size((blocks + 800) * 4096);
    let dice = SeededEnvironment::new(8);
    let made: Vec<(Vec<u8>, Vec<u8>)> = (0..500)
        .map(|n| {
            let mut content = vec![0; 12_000];
            dice.fill_random(&mut content).unwrap();
            (format!("{n}").into_bytes(), content)
        })
        .collect();
    let new: Vec<NewFile<'_>> = made.iter().map(|(name, content)| new_file(directory, name, content)).collect();
    let mut added = Vec::new();
    assert!(matches!(fs.add_files(&new, &mut added), Err(Error::NoSpace(_))));
    assert!(added.len() > 50 && added.len() < new.len(), "{} of {} were added", added.len(), new.len());
    let fs = crash(&storage, fs);
    let there: BTreeMap<Vec<u8>, Ino> =
        list(&fs, directory, 0).unwrap().into_iter().map(|(name, ino, _)| (name, ino)).collect();
    let told = made.iter().zip(added).map(|((name, _), ino)| (name.clone(), ino.unwrap())).collect();
    assert_eq!(there, told);
    assert_sound(&fs);
}

#[test]
fn files_that_are_refused_use_up_no_numbers() {
    let (_, fs) = fresh(9);
    let directory = fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap().ino;
    let made = contents(50);
    let new: Vec<NewFile<'_>> = made.iter().map(|(name, content)| new_file(directory, name, content)).collect();
    let odd: Vec<NewFile<'_>> = new.iter().skip(1).step_by(2).copied().collect();
    let node = |name: &[u8]| fs.make_node(ROOT_INO, name, mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino.0;
    let first = node(b"a");
    assert!(add_files(&fs, &odd).unwrap().iter().all(Result::is_ok));
    assert_eq!(node(b"b"), first + 26);
    // Half of them are there.
    let added = add_files(&fs, &new).unwrap();
    assert_eq!(added.iter().filter(|added| matches!(added, Err(Error::Exists))).count(), 25);
    assert_eq!(node(b"c"), first + 26 + 26);
    assert!(add_files(&fs, &new).unwrap().iter().all(|added| matches!(added, Err(Error::Exists))));
    assert_eq!(node(b"d2"), first + 26 + 26 + 1);
    for (name, ino, _) in list(&fs, directory, 0).unwrap() {
        let content = &made.iter().find(|(made, _)| *made == name).unwrap().1;
        assert!(fs.read(ino, 0, 1 << 20).unwrap() == *content);
    }
    assert_sound(&fs);
}

/// An operation is bounded by all that it takes, not by content alone.
#[test]
fn attributes_count_towards_the_length_of_an_operation() {
    let (_, fs) = fresh(10);
    let directory = fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap().ino;
    let xattrs: Vec<(Vec<u8>, Vec<u8>)> =
        (0..10).map(|n| (format!("user.{n}").into_bytes(), vec![n; 60_000])).collect();
    let made = contents(8);
    let new = |from: usize, xattrs| -> Vec<NewFile<'_>> {
        made[from..].iter().map(|(name, content)| NewFile { xattrs, ..new_file(directory, name, content) }).collect()
    };
    let steps = |new: &[NewFile<'_>]| {
        let before = fs.volume.state().sequence;
        assert!(add_files(&fs, new).unwrap().iter().all(Result::is_ok));
        fs.volume.state().sequence - before
    };
    let alone = steps(&new(7, &xattrs[..]));
    assert_eq!(steps(&new(4, &[])[..3]), alone, "three small files are one batch");
    assert!(steps(&new(0, &xattrs[..])[..4]) >= 2 * alone, "four files of 600 KB were one batch");
    assert_sound(&fs);
}
