//! Files read in bulk have the content of files read one by one; files that need more are left to
//! the caller.

use super::support::{CREATOR, NAME_KEY, OPTIONS, add_files, fresh, fresh_with, reopen};
use crate::env::{Environment, SeededEnvironment};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Compression, FileSystem, FsOptions, MAX_SMALL_FILE, NewFile};

fn read(fs: &FileSystem, files: &[Option<Ino>], buffer: &mut Vec<u8>) -> Vec<Option<Vec<u8>>> {
    let places = fs.read_small_files(files, buffer);
    places.into_iter().map(|place| place.map(|place| buffer[place].to_vec())).collect()
}

/// Adds files of every length that is stored in another way, half of them compressible.
fn add(fs: &FileSystem, count: usize) -> Vec<(Ino, Vec<u8>)> {
    let dice = SeededEnvironment::new(3);
    let lengths = [0, 1, 256, 257, 1024, 4096, 16_384, 20_000, MAX_SMALL_FILE as usize];
    let contents: Vec<(String, Vec<u8>)> = (0..count)
        .map(|n| {
            let mut bytes = vec![n as u8; lengths[n % lengths.len()]];
            if n.is_multiple_of(2) {
                dice.fill_random(&mut bytes).unwrap();
            }
            (format!("f{n}"), bytes)
        })
        .collect();
    let new: Vec<NewFile<'_>> = contents
        .iter()
        .map(|(name, content)| NewFile {
            directory: ROOT_INO,
            name: name.as_bytes(),
            mode: 0o600,
            uid: CREATOR.uid,
            gid: CREATOR.gid,
            atime: None,
            mtime: None,
            xattrs: &[],
            content,
        })
        .collect();
    let inos = add_files(fs, &new).unwrap();
    inos.into_iter().map(Result::unwrap).zip(contents.into_iter().map(|(_, content)| content)).collect()
}

#[test]
fn files_read_together_are_what_each_is() {
    for (pack, compression) in [(true, Compression::Default), (false, Compression::Best), (true, Compression::Off)] {
        let (storage, fs) = fresh_with(1, NAME_KEY, FsOptions { pack, compression, ..OPTIONS });
        let files = add(&fs, 400);
        let fs = reopen(&storage, fs);
        let mut buffer = Vec::new();
        // In any order, with gaps, and twice.
        for stride in [1, 7, 399] {
            let some: Vec<_> = (0..400).map(|n| &files[n * stride % 400]).collect();
            let wanted: Vec<Option<Ino>> = some.iter().map(|(ino, _)| Some(*ino)).collect();
            let found = read(&fs, &wanted, &mut buffer);
            for (found, (ino, content)) in found.iter().zip(some) {
                assert!(found.as_ref() == Some(content), "{ino:?} of {} bytes", content.len());
            }
        }
        assert_eq!(read(&fs, &[None, Some(Ino(u64::MAX)), Some(ROOT_INO)], &mut buffer), [None, None, None]);
    }
}

#[test]
fn files_that_are_dirty_large_or_sparse_are_left_to_the_caller() {
    let (_, fs) = fresh(2);
    let make = |name: &[u8]| {
        let ino = fs.create_and_open(ROOT_INO, name, 0o600, CREATOR).unwrap().ino;
        fs.release(ino).unwrap();
        ino
    };
    let (clean, dirty, large, sparse, cut) =
        (make(b"clean"), make(b"dirty"), make(b"large"), make(b"sparse"), make(b"cut"));
    fs.write(clean, 0, &[1; 1000]).unwrap();
    fs.write(large, 0, &vec![2; MAX_SMALL_FILE as usize + 1]).unwrap();
    fs.write(sparse, 5000, &[3; 1000]).unwrap();
    fs.write(cut, 0, &[4; 2000]).unwrap();
    fs.make_durable().unwrap();
    fs.truncate(cut, 500, &mut |_| {}).unwrap();
    fs.make_durable().unwrap();
    fs.write(dirty, 0, &[5; 1000]).unwrap();
    let mut buffer = Vec::new();
    let found = read(&fs, &[clean, dirty, large, sparse, cut].map(Some), &mut buffer);
    assert_eq!(found, [Some(vec![1; 1000]), None, None, None, Some(vec![4; 500])]);
}
