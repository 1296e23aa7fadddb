//! Hostile archives whose records are consistent with each other and describe invalid objects.

use super::super::super::fuzzing::{ARCHIVE, Forge, key};
use super::cases::{Cases, DIRECTORY, INLINE, LINK, NOISE, ROOT};
use crate::archive::create::name_key;
use crate::format::values::{IndexEntry, InodeValue, ListEntry, NO_TRIM, encode_index, encode_list};
use crate::format::{Ino, Key, Timestamp, TreeId, kind};
use crate::fs::{index_key, list_key, mode};

/// Adds both records of an entry, and counts it.
pub(super) fn enter(forge: &mut Forge, directory: u64, name: &[u8], ino: u64, file_type: u8) {
    let mut sequence = 0;
    forge.inode(directory, |inode| {
        sequence = inode.next_sequence.max(3);
        inode.next_sequence = sequence + 1;
        inode.size += 1;
        inode.links += u32::from(file_type == 4);
    });
    let hash_key = name_key(&key(), &ARCHIVE);
    let entry = IndexEntry { name: name.to_vec(), file_type, sequence, ino: Ino(ino) };
    forge.put(TreeId::Live, index_key(&hash_key, Ino(directory), name), &encode_index(&[entry]));
    forge.put(
        TreeId::Live,
        list_key(Ino(directory), sequence),
        &encode_list(&ListEntry { name, file_type, ino: Ino(ino) }),
    );
}

pub(super) fn object(forge: &mut Forge, ino: u64, file_mode: u32, change: impl FnOnce(&mut InodeValue)) {
    let time = Timestamp { seconds: 1_700_000_000, nanos: 0 };
    let mut inode = InodeValue { mode: file_mode, links: 1, trim: NO_TRIM, next_piece: 1, ..InodeValue::default() };
    (inode.atime, inode.mtime, inode.ctime, inode.btime) = (time, time, time, time);
    if file_mode & mode::TYPE == mode::DIRECTORY {
        (inode.links, inode.parent, inode.next_sequence) = (2, Ino(ROOT), 3);
    }
    change(&mut inode);
    forge.put(TreeId::Live, Key::new(ino, kind::INODE, 0), &inode.encode());
    forge.record.inodes += 1;
}

/// Names in the root that a hostile sibling must not remove, with their content.
pub(super) const NEIGHBOURS: [&str; 3] = ["neighbour", "before", "after"];
pub(super) const HEALTHY: &[u8] = b"healthy";

const DIR: u32 = mode::DIRECTORY | 0o755;
const FILE: u32 = mode::REGULAR | 0o644;

pub(super) fn inline_file(forge: &mut Forge, directory: u64, name: &[u8], ino: u64, content: &[u8]) {
    object(forge, ino, FILE, |inode| (inode.size, inode.bytes) = (content.len() as u64, content.len() as u64));
    forge.put(TreeId::Live, Key::new(ino, kind::INLINE, 0), content);
    enter(forge, directory, name, ino, 8);
}

pub(super) fn add(cases: &mut Cases) {
    circles(cases);
    contents(cases);
    names(cases);
    numbers(cases);
}

/// Nested directories that contain each other, and entries of another type than their inode.
fn circles(cases: &mut Cases) {
    cases.bad("a directory that holds itself twice", |forge| {
        object(forge, 50, DIR, |_| {});
        enter(forge, ROOT, b"self", 50, 4);
        enter(forge, 50, b"one", 50, 4);
        enter(forge, 50, b"two", 50, 4);
    });
    cases.bad("two directories that hold each other", |forge| {
        object(forge, 50, DIR, |inode| inode.parent = Ino(51));
        object(forge, 51, DIR, |inode| inode.parent = Ino(50));
        enter(forge, ROOT, b"first", 50, 4);
        enter(forge, 50, b"x", 51, 4);
        enter(forge, 50, b"y", 51, 4);
        enter(forge, 51, b"x", 50, 4);
        enter(forge, 51, b"y", 50, 4);
    });
    cases.bad("a directory that holds the root", |forge| {
        object(forge, 50, DIR, |_| {});
        enter(forge, ROOT, b"up", 50, 4);
        enter(forge, 50, b"root", 1, 4);
        enter(forge, 50, b"root2", 1, 4);
    });
    cases.bad("a tower of doubled directories", |forge| {
        for level in 0..40u64 {
            object(forge, 50 + level, DIR, |inode| inode.parent = Ino(if level == 0 { ROOT } else { 49 + level }));
            let above = if level == 0 { ROOT } else { 49 + level };
            enter(forge, above, b"left", 50 + level, 4);
            enter(forge, above, b"right", 50 + level, 4);
        }
        inline_file(forge, 89, b"leaf", 99, b"x");
    });
    cases.borne("directories 200 deep", |forge| {
        for level in 0..200u64 {
            let above = if level == 0 { ROOT } else { 49 + level };
            object(forge, 50 + level, DIR, |inode| inode.parent = Ino(above));
            enter(forge, above, &[b'd'; 200], 50 + level, 4);
        }
        forge.record.next_ino = 10_000;
    });
    for (name, entry_type, file_mode) in [
        ("a directory whose entry says file", 8, DIR),
        ("a file whose entry says directory", 4, FILE),
        ("a link whose entry says directory", 4, mode::SYMLINK | 0o777),
        ("a link whose entry says file", 8, mode::SYMLINK | 0o777),
        ("a device whose entry says file", 8, mode::BLOCK | 0o666),
        ("an object of no type", 0, 0o644),
        ("an object of an unknown type", 15, 0o170_644),
    ] {
        cases.bad(name, |forge| {
            object(forge, 50, file_mode, |inode| (inode.size, inode.bytes) = (4, 4));
            forge.put(TreeId::Live, Key::new(50, kind::INLINE, 0), b"/etc");
            enter(forge, ROOT, b"a", 50, entry_type);
            inline_file(forge, ROOT, b"neighbour", 51, HEALTHY);
        });
    }
}

/// Files, links and attributes that declare content which they do not have.
fn contents(cases: &mut Cases) {
    for (name, size) in
        [("holes that call themselves dense", 1u64 << 26), ("a file larger than any host takes", 1 << 62)]
    {
        cases.bad(name, |forge| {
            // The host's limit ends the larger one before anything is written.
            let bytes = if size == 1 << 26 { size } else { 7 };
            object(forge, 50, FILE, |inode| (inode.size, inode.bytes) = (size, bytes));
            enter(forge, ROOT, b"bomb", 50, 8);
            inline_file(forge, ROOT, b"neighbour", 51, HEALTHY);
        });
    }
    cases.borne("variables that a shell would not have", |forge| {
        object(forge, 50, mode::DIRECTORY | 0o700, |_| {});
        enter(forge, ROOT, b".lockbox", 50, 4);
        object(forge, 51, mode::DIRECTORY | 0o700, |inode| inode.parent = Ino(50));
        enter(forge, 50, b"env", 51, 4);
        let names: [&[u8]; 8] =
            [b"LD_PRELOAD", b"PATH", b"A=B", b"GOOD", b"NUL", b"\x1b[31m", b"BASH_FUNC_x%%", b"LINK"];
        for (n, name) in names.into_iter().enumerate() {
            inline_file(forge, 51, name, 52 + n as u64, if name == b"NUL" { b"a\0b" } else { b"/tmp/evil" });
        }
        object(forge, 70, FILE, |inode| inode.size = i64::MAX as u64);
        enter(forge, 51, b"HUGE", 70, 8);
    });
    cases.bad("a target of a link that is a hole", |forge| {
        object(forge, 50, mode::SYMLINK | 0o777, |inode| inode.size = i64::MAX as u64);
        enter(forge, ROOT, b"link", 50, 10);
        inline_file(forge, ROOT, b"neighbour", 51, HEALTHY);
    });
    cases.bad("a file of no bytes that has some", |forge| {
        forge.inode(NOISE, |inode| inode.bytes = 0);
    });
    cases.bad("inline data that bytes deny", |forge| forge.inode(INLINE, |inode| inode.bytes = 5000));
}

/// Harmful names, and entries that must not harm their neighbours.
fn names(cases: &mut Cases) {
    cases.borne("names that drive terminals", |forge| {
        let names: [&[u8]; 8] = [
            b"line\nend",
            b"\x1b[2Jclear",
            b"\x1b]0;title\x07",
            b"\xc2\x9b31m",
            b"\xe2\x80\xaertl",
            b"cr\rover",
            b"\xff\xfe\x80",
            b"-rf",
        ];
        for (n, name) in names.into_iter().enumerate() {
            inline_file(forge, ROOT, name, 50 + n as u64, b"x");
        }
        let target = b"\x1b[31mred\n";
        *forge.value(Key::new(LINK, kind::INLINE, 0)) = target.to_vec();
        forge.inode(LINK, |inode| (inode.size, inode.bytes) = (target.len() as u64, target.len() as u64));
    });
    cases.bad("a dangling entry among neighbours", |forge| {
        inline_file(forge, ROOT, b"before", 50, HEALTHY);
        enter(forge, ROOT, b"dangling", 77, 8);
        inline_file(forge, ROOT, b"after", 51, HEALTHY);
    });
    cases.bad("an unreadable inode among neighbours", |forge| {
        inline_file(forge, ROOT, b"before", 50, HEALTHY);
        inline_file(forge, ROOT, b"broken", 52, HEALTHY);
        forge.value(Key::new(52, kind::INODE, 0))[40..44].fill(0xff);
        inline_file(forge, ROOT, b"after", 51, HEALTHY);
    });
    cases.bad("an unreadable entry among neighbours", |forge| {
        inline_file(forge, ROOT, b"before", 50, HEALTHY);
        inline_file(forge, ROOT, b"broken", 52, HEALTHY);
        let is_entry = |(key, _): &&(Key, Vec<u8>)| key.kind == kind::DIR_LIST && key.object == ROOT;
        let key = forge.live().iter().rfind(is_entry).unwrap().0;
        *forge.value(key) = vec![3, 8, 52, 0, 0, 0, 0, 0, 0, 0, b'.', b'.', b'/'];
        inline_file(forge, ROOT, b"after", 51, HEALTHY);
    });
    cases.bad("a name twice", |forge| {
        inline_file(forge, ROOT, b"same", 50, b"first");
        inline_file(forge, ROOT, b"same", 51, b"second");
        inline_file(forge, ROOT, b"neighbour", 52, HEALTHY);
    });
}

/// Extreme times, counts, owners and devices.
fn numbers(cases: &mut Cases) {
    cases.borne("times at both ends", |forge| {
        for (n, seconds) in [i64::MIN, i64::MAX, -1, 253_402_300_800, i64::MAX / 2].into_iter().enumerate() {
            let time = Timestamp { seconds, nanos: 999_999_999 };
            let ino = 50 + n as u64;
            inline_file(forge, ROOT, format!("time{n}").as_bytes(), ino, b"x");
            forge.inode(ino, |inode| (inode.atime, inode.mtime, inode.ctime, inode.btime) = (time, time, time, time));
        }
        let time = Timestamp { seconds: i64::MAX, nanos: 999_999_999 };
        forge.inode(DIRECTORY, |inode| (inode.atime, inode.mtime) = (time, time));
        forge.record.time = time;
    });
    cases.bad("links that lie", |forge| {
        inline_file(forge, ROOT, b"many", 50, b"x");
        forge.inode(50, |inode| inode.links = 4_000_000_000);
        enter(forge, ROOT, b"many too", 50, 8);
        inline_file(forge, ROOT, b"none", 51, b"x");
        forge.inode(51, |inode| inode.links = 0);
        enter(forge, ROOT, b"none too", 51, 8);
    });
    cases.bad("living inodes among the orphans", |forge| {
        for ino in [ROOT, DIRECTORY, INLINE, NOISE, LINK] {
            forge.put(TreeId::Live, Key::new(0, kind::ORPHAN, ino), &[]);
        }
    });
    cases.borne("attributes that lend rights", |forge| {
        inline_file(forge, ROOT, b"setuid", 50, b"#!/bin/sh\n");
        forge.inode(50, |inode| inode.mode = mode::REGULAR | 0o6755);
    });
    cases.borne("devices at the end of the numbers", |forge| {
        object(forge, 50, mode::CHARACTER | 0o666, |inode| inode.rdev = u32::MAX);
        enter(forge, ROOT, b"null", 50, 2);
        object(forge, 51, mode::BLOCK | 0o666, |inode| inode.rdev = 8 << 20);
        enter(forge, ROOT, b"sda", 51, 6);
        object(forge, 52, mode::SOCKET | 0o666, |_| {});
        enter(forge, ROOT, b"socket", 52, 12);
    });
    cases.borne("owners at the end of the numbers", |forge| {
        inline_file(forge, ROOT, b"nobody", 50, b"x");
        forge.inode(50, |inode| (inode.uid, inode.gid) = (u32::MAX, u32::MAX));
        inline_file(forge, ROOT, b"after", 51, HEALTHY);
    });
    cases.borne("the inode numbers at their end", |forge| {
        forge.record.next_ino = (1 << 48) - 1;
    });
}
