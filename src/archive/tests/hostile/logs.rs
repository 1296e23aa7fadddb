//! Hostile logs: entries with wrong files, pages or order.

use std::sync::Arc;

use super::super::super::fuzzing::{Forge, ForgedEntry, exercise, open_on};
use super::cases::{Cases, DIRECTORY, INLINE, LINK, MISSING, NOISE, ROOT, TEXT, first};
use super::objects::{HEALTHY, NEIGHBOURS, inline_file};
use super::{contents, nothing_is_lost};
use crate::env::stride;
use crate::error::Error;
use crate::format::log::{DroppedRange, LogEntry, LogMark, LogPiece};
use crate::format::record::Root;
use crate::format::values::{Extent, InodeValue};
use crate::format::{BLOCK, Generation, Ino, Key, LOG, MAX_OFFSET, MIN_BLOCKS, Pointer, ROOT_INO, Run, TreeId, kind};
use crate::fs::mode;
use crate::storage::MemoryStorage;

/// Inode of the fifo, the last one of the sample.
const FIFO: u64 = 11;

pub(super) fn add(cases: &mut Cases) {
    heads(cases);
    pieces(cases);
    records(cases);
    extents(cases);
    places(cases);
}

/// Adds a case that must be refused or reported.
fn bad(cases: &mut Cases, name: &str, change: impl FnOnce(&mut Forge)) {
    cases.of(Forge::with_log(), format!("log: {name}"), true, change);
}

/// Adds a case that must be tolerated.
fn borne(cases: &mut Cases, name: &str, change: impl FnOnce(&mut Forge)) {
    cases.of(Forge::with_log(), format!("log: {name}"), false, change);
}

pub(super) fn piece(ino: u64, offset: u64, data: &[u8]) -> LogPiece {
    LogPiece { ino: Ino(ino), offset, data: data.to_vec() }
}

pub(super) fn range(ino: u64, start: u64, end: u64) -> DroppedRange {
    DroppedRange { ino: Ino(ino), start, end }
}

/// Adds a valid entry with changes.
pub(super) fn honest(forge: &mut Forge) -> &mut ForgedEntry {
    let entry = forge.entry();
    entry.says.pieces.push(piece(NOISE, 100, b"said by the log"));
    entry
}

pub(super) fn inode_key(ino: u64) -> Key {
    Key::new(ino, kind::INODE, 0)
}

/// Returns a modified inode of the sample.
fn changed(forge: &mut Forge, ino: u64, change: impl FnOnce(&mut InodeValue)) -> Vec<u8> {
    let mut inode = InodeValue::decode(forge.value(inode_key(ino))).unwrap();
    change(&mut inode);
    inode.encode().to_vec()
}

/// Sets the records of the only entry, sorted by key.
fn with_records(forge: &mut Forge, mut records: Vec<(Key, Option<Vec<u8>>)>) -> &mut LogEntry {
    records.sort_by_key(|(key, _)| *key);
    let says = &mut forge.entry().says;
    says.records = records;
    says
}

/// Invalid numbers and positions that lose nothing.
fn heads(cases: &mut Cases) {
    for (name, number) in [("a number twice", 1u32), ("a number that goes back", 2)] {
        borne(cases, name, |forge| {
            honest(forge);
            honest(forge);
            let last = honest(forge);
            last.on_head.push((24, number.to_le_bytes().to_vec()));
            if number == 1 {
                last.on_head.push((32, vec![0; 16]));
            }
        });
    }
    borne(cases, "a first entry in the middle", |forge| honest(forge).block = Some(LOG.0 + 100));
    borne(cases, "an entry that names another one before it", |forge| {
        honest(forge);
        honest(forge).on_head.push((32, vec![3; 16]));
    });
    borne(cases, "entries of another record of this commit", |forge| {
        honest(forge).on_head.push((8, vec![3; 16]));
        honest(forge).on_head.push((8, vec![3; 16]));
    });
    borne(cases, "entries of an older commit", |forge| {
        honest(forge).on_head.push((0, vec![1, 0, 0, 0, 0, 0, 0, 0]));
        honest(forge).on_head.push((0, vec![1, 0, 0, 0, 0, 0, 0, 0]));
    });
    borne(cases, "an entry over the body of the one before", |forge| {
        let large = vec![7; 20_000];
        forge.entry().says.pieces.push(piece(NOISE, 0, &large));
        honest(forge).block = Some(LOG.0 + 2);
        forge.entries[1].on_head.push((24, vec![1, 0, 0, 0]));
        forge.entries[1].on_head.push((32, vec![0; 16]));
    });
    borne(cases, "the last entry torn", |forge| {
        honest(forge);
        honest(forge).torn = true;
    });
    borne(cases, "255 entries that say nothing", |forge| {
        for _ in LOG.0..LOG.1 {
            forge.entry();
        }
    });
    borne(cases, "a log that is pending in a session that ended", |forge| {
        pend(forge, -1);
        forge.record.closed = true;
    });
}

/// Adds a valid entry of a commit so many before the newest one, which has it pending.
pub(super) fn pend(forge: &mut Forge, behind: i64) {
    let generation = Generation(forge.record.generation.0.wrapping_add_signed(behind));
    let head = || (0, [&generation.0.to_le_bytes()[..], &[5; 16]].concat());
    honest(forge).on_head.push(head());
    // Nonces are seeded, so the tag is the same each time.
    let mut other = Forge::with_log();
    honest(&mut other).on_head.push(head());
    let bytes = other.finish();
    let end = ((LOG.0 + 1) * BLOCK) as usize;
    let entry = bytes[end - 16..end].try_into().unwrap();
    forge.record.pending = Some(LogMark { generation, record: [5; 16], number: 1, entry });
}

fn pieces(cases: &mut Cases) {
    for (name, ino) in [
        ("nobody", MISSING),
        ("a directory", DIRECTORY),
        ("the root", ROOT),
        ("a link", LINK),
        ("a fifo", FIFO),
        ("the last inode number", (1 << 48) - 1),
    ] {
        borne(cases, &format!("pieces of {name}"), |forge| {
            let says = &mut forge.entry().says;
            says.pieces = vec![piece(ino, 0, b"of nothing"), piece(ino, 1 << 40, b"far behind")];
            says.dropped = vec![range(ino, 0, u64::MAX)];
        });
    }
    for (name, offset) in [("the last byte of all", MAX_OFFSET - 1), ("a byte at 2^62", 1 << 62)] {
        for ino in [INLINE, NOISE] {
            borne(cases, &format!("{name} in {ino}"), |forge| {
                forge.entry().says.pieces = vec![piece(ino, offset, b"x")]
            });
        }
    }
    borne(cases, "thousands of pieces of one frame", |forge| {
        forge.entry().says.pieces = (0..15_000).map(|n| piece(NOISE, 3 * n, b"x")).collect();
    });
    borne(cases, "thousands of pieces of one frame, cut once each", |forge| {
        forge.entry().says.pieces = (0..5000).map(|n| piece(NOISE, 3 * n, b"xx")).collect();
        forge.entry().says.dropped = (0..5000).map(|n| range(NOISE, 3 * n, 3 * n + 1)).collect();
    });
    borne(cases, "thousands of pieces, each of a frame of its own", |forge| {
        forge.entry().says.pieces = (0..3000).map(|n| piece(NOISE, n << 17, b"x")).collect();
    });
    borne(cases, "one byte again and again", |forge| {
        for n in 0..250 {
            forge.entry().says.pieces = vec![piece(NOISE, 131_071 - n % 2, &[n as u8; 3])];
        }
    });
    borne(cases, "an entry as long as the log", |forge| {
        forge.entry().says.pieces = vec![piece(NOISE, 77, &vec![5; 255 * 4096 - 120 - 32 - 20])];
    });
    borne(cases, "thousands of cuts of nothing", |forge| {
        forge.entry().says.dropped = (0..40_000).map(|n| range(1 + n % 50, n, u64::MAX)).collect();
    });
    borne(cases, "pieces over inline data and behind it", |forge| {
        forge.entry().says.pieces = vec![piece(INLINE, 3, b"over"), piece(INLINE, 4000, b"behind")];
    });
    borne(cases, "pieces of an inode that goes with the same entry", |forge| {
        let says = with_records(forge, vec![(inode_key(NOISE), None)]);
        says.pieces.push(piece(NOISE, 0, b"left"));
    });
}

fn records(cases: &mut Cases) {
    bad(cases, "no root directory", |forge| {
        with_records(forge, vec![(inode_key(ROOT), None)]);
    });
    bad(cases, "a root that is a file with pieces", |forge| {
        let root = changed(forge, ROOT, |inode| inode.mode = mode::REGULAR | 0o644);
        with_records(forge, vec![(inode_key(ROOT), Some(root))]).pieces.push(piece(ROOT, 0, b"in the root"));
    });
    bad(cases, "a directory that is a file with pieces", |forge| {
        let directory = changed(forge, DIRECTORY, |inode| inode.mode = mode::REGULAR | 0o644);
        with_records(forge, vec![(inode_key(DIRECTORY), Some(directory))]).pieces.push(piece(DIRECTORY, 0, b"x"));
    });
    bad(cases, "an inode that no name leads to", |forge| {
        let value = forge.value(inode_key(NOISE)).clone();
        with_records(forge, vec![(inode_key(MISSING), Some(value))]).pieces.push(piece(MISSING, 0, b"x"));
    });
    bad(cases, "an inode at the end of the numbers", |forge| {
        let value = forge.value(inode_key(INLINE)).clone();
        with_records(forge, vec![(inode_key(u64::MAX), Some(value))]);
    });
    for (name, value) in [("empty", vec![]), ("cut", vec![1; 100]), ("of ones", vec![0xff; 144])] {
        bad(cases, &format!("an inode value that is {name}, with pieces, among neighbours"), move |forge| {
            inline_file(forge, ROOT, b"before", 50, HEALTHY);
            inline_file(forge, ROOT, b"after", 51, HEALTHY);
            with_records(forge, vec![(inode_key(NOISE), Some(value))]).pieces.push(piece(NOISE, 0, b"x"));
        });
    }
    bad(cases, "living inodes among the orphans", |forge| {
        let orphan = |ino| (Key::new(0, kind::ORPHAN, ino), Some(Vec::new()));
        with_records(forge, [ROOT, DIRECTORY, INLINE, NOISE, u64::MAX].map(orphan).into());
    });
    bad(cases, "an orphan that is missing", |forge| {
        with_records(forge, vec![(Key::new(0, kind::ORPHAN, MISSING), Some(Vec::new()))]);
    });
    bad(cases, "a trim record of nobody", |forge| {
        with_records(forge, vec![(Key::new(0, kind::TRIM, MISSING), Some(Vec::new()))]);
    });
    borne(cases, "a trim offset before pieces", |forge| {
        let value = changed(forge, NOISE, |inode| (inode.trim, inode.size, inode.bytes) = (4096, 4096, 4096));
        let records = vec![(inode_key(NOISE), Some(value)), (Key::new(0, kind::TRIM, NOISE), Some(Vec::new()))];
        with_records(forge, records).pieces.push(piece(NOISE, 9000, b"behind it"));
    });
    borne(cases, "a size of 2^63 - 1 with pieces", |forge| {
        let value = changed(forge, NOISE, |inode| inode.size = i64::MAX as u64);
        with_records(forge, vec![(inode_key(NOISE), Some(value))]).pieces.push(piece(NOISE, 1 << 50, b"x"));
    });
    bad(cases, "inline data of 3,500 bytes for a file of extents", |forge| {
        with_records(forge, vec![(Key::new(NOISE, kind::INLINE, 0), Some(vec![7; 3500]))]);
    });
    bad(cases, "all records gone", |forge| {
        let all = forge.live().iter().map(|(key, _)| (*key, None)).collect();
        with_records(forge, all);
    });
    borne(cases, "thousands of records gone that are not there", |forge| {
        with_records(forge, (1000..50_000).map(|ino| (inode_key(ino), None)).collect());
    });
    bad(cases, "thousands of new inodes", |forge| {
        let value = forge.value(inode_key(INLINE)).clone();
        with_records(forge, (1000..7000).map(|ino| (inode_key(ino), Some(value.clone()))).collect());
    });
    bad(cases, "inodes in use beyond all", |forge| honest(forge).says.inodes = u64::MAX);
    borne(cases, "no inode number left", |forge| honest(forge).says.next_ino = 1 << 48);
    borne(cases, "the next inode before the others", |forge| honest(forge).says.next_ino = 0);
    bad(cases, "a name that leads out", |forge| {
        let key = first(forge, ROOT, kind::DIR_LIST);
        let value = [&[4, 8], &INLINE.to_le_bytes()[..], b"../x"].concat();
        with_records(forge, vec![(key, Some(value))]);
    });
}

fn extents(cases: &mut Cases) {
    let mut extent = |name: &str, change: &dyn Fn(&mut Extent)| {
        bad(cases, name, |forge| {
            let key = first(forge, NOISE, kind::EXTENT);
            let mut extent = Extent::decode(forge.value(key)).unwrap();
            change(&mut extent);
            with_records(forge, vec![(key, Some(extent.encode().to_vec()))]);
        });
    };
    extent("an extent in the header", &|extent| extent.page.run = Run::new(4, 5));
    extent("an extent in the ring", &|extent| extent.page.run = Run::new(353, 5));
    extent("an extent in the log", &|extent| extent.page.run = Run::new(LOG.0 + 100, 5));
    extent("an extent behind the file", &|extent| extent.page.run.address = 1 << 40);
    extent("an extent at the end of all blocks", &|extent| extent.page.run.address = (1 << 48) - 1);
    extent("an extent of another generation", &|extent| extent.page.generation = Generation(1 << 60));
    extent("an extent with another tag", &|extent| extent.page.tag = [1; 16]);
    extent("an extent of 65,535 blocks", &|extent| extent.page.run.blocks = 65_535);
    extent("an extent of nothing", &|extent| extent.length = 0);
    extent("an extent without page", &|extent| extent.page = Pointer::NULL);
    bad(cases, "an extent value that is cut, among neighbours", |forge| {
        inline_file(forge, ROOT, b"before", 50, HEALTHY);
        inline_file(forge, ROOT, b"after", 51, HEALTHY);
        let key = first(forge, NOISE, kind::EXTENT);
        with_records(forge, vec![(key, Some(vec![1; 9]))]).pieces.push(piece(NOISE, 0, b"x"));
    });
    bad(cases, "an extent of a page of nodes", |forge| {
        let root = forge.live_root();
        let value = Extent { page: root.pointer, start: 0, length: 4096, born: Generation(1) }.encode().to_vec();
        let key = first(forge, NOISE, kind::EXTENT);
        with_records(forge, vec![(key, Some(value))]);
    });
    bad(cases, "two files that have each other's extents, which overlap", |forge| {
        let (noise, text) = (first(forge, NOISE, kind::EXTENT), first(forge, TEXT, kind::EXTENT));
        let (of_noise, of_text) = (forge.value(noise).clone(), forge.value(text).clone());
        let more = (Key { sub: 5, ..noise }, Some(of_noise.clone()));
        with_records(forge, vec![(noise, Some(of_text)), (text, Some(of_noise)), more]);
    });
    bad(cases, "an extent at offset 2^64 - 1", |forge| {
        let key = first(forge, NOISE, kind::EXTENT);
        let value = forge.value(key).clone();
        with_records(forge, vec![(Key { sub: u64::MAX, ..key }, Some(value))]);
    });
    bad(cases, "hundreds of extents of one page", |forge| {
        let key = first(forge, NOISE, kind::EXTENT);
        let value = forge.value(key).clone();
        with_records(forge, (0..900).map(|n| (Key { sub: n << 20, ..key }, Some(value.clone()))).collect());
    });
    bad(cases, "an extent that goes, of a page counted 2^32 - 1 times", |forge| {
        let key = first(forge, NOISE, kind::EXTENT);
        let run = Extent::decode(forge.value(key)).unwrap().page.run;
        let count = [(run.blocks as u32).to_le_bytes(), u32::MAX.to_le_bytes()].concat();
        forge.put(TreeId::References, Key::new(0, kind::REFERENCE, run.address), &count);
        with_records(forge, vec![(key, None)]);
    });
    bad(cases, "an extent that comes, of a page counted 2^32 - 1 times", |forge| {
        let key = first(forge, NOISE, kind::EXTENT);
        let value = forge.value(key).clone();
        let run = Extent::decode(&value).unwrap().page.run;
        let count = [(run.blocks as u32).to_le_bytes(), u32::MAX.to_le_bytes()].concat();
        forge.put(TreeId::References, Key::new(0, kind::REFERENCE, run.address), &count);
        with_records(forge, vec![(Key { sub: 1 << 30, ..key }, Some(value))]);
    });
}

/// Pages within the log, and references to them.
fn places(cases: &mut Cases) {
    bad(cases, "a snapshot whose root is an entry", |forge| {
        honest(forge);
        let page = Pointer { run: Run::new(LOG.0, 1), generation: Generation(1), tag: [0; 16] };
        forge.snapshot(1, Root { pointer: page, level: 0 }, b"daily");
    });
    bad(cases, "an allocated page in it", |forge| {
        honest(forge);
        forge.record.allocated = vec![(Run::new(LOG.0, 4), [1; 16])];
    });
    bad(cases, "a count of its blocks", |forge| {
        let value = [255u32.to_le_bytes(), 2u32.to_le_bytes()].concat();
        forge.put(TreeId::References, Key::new(0, kind::REFERENCE, LOG.0), &value);
    });
    bad(cases, "a space map that has it in use", |forge| {
        honest(forge);
        forge.honest_space = false;
        let value = [&[1, 1, 0][..], &(LOG.0 as u16).to_le_bytes(), &255u16.to_le_bytes()].concat();
        forge.trees[4] = vec![(Key::new(0, kind::SPACE, 0), value)];
    });
    borne(cases, "pages freed in it and around it", |forge| {
        honest(forge);
        forge.record.freed = vec![Run::new(LOG.0, 255), Run::new(0, 400), Run::new(LOG.1 - 1, 3)];
    });
    // Full, with a snapshot, which does not contain any of it.
    borne(cases, "a full one beside a snapshot", |forge| {
        let root = forge.live_root();
        forge.snapshot(1, root, b"daily");
        for n in 0..85 {
            forge.entry().says.pieces = vec![piece(NOISE, n * 7000, &[n as u8; 9000])];
        }
    });
}

pub(super) fn storage(forge: Forge) -> Arc<MemoryStorage> {
    Arc::new(MemoryStorage::from_contents(forge.finish()))
}

/// Checks that a writer is refused with this message, and has written nothing.
pub(super) fn refused_unwritten(storage: &Arc<MemoryStorage>, name: &str, told: &str) {
    let before = storage.contents();
    match open_on(storage.clone(), false).map(drop) {
        Err(Error::Damaged(text)) => assert!(text.contains(told), "{name}: {text}"),
        opened => panic!("{name}: {opened:?}"),
    }
    assert!(storage.contents() == before, "{name}: it was written to");
}

/// Control: a valid entry is applied by readers and writers, and remains.
#[test]
fn an_honest_entry_of_a_forged_log_is_sound_and_counts() {
    let forged = |pending: bool| {
        let mut forge = Forge::with_log();
        let value = changed(&mut forge, NOISE, |inode| inode.mode = mode::REGULAR | 0o600);
        if pending {
            pend(&mut forge, -1);
        } else {
            honest(&mut forge).says.records.push((inode_key(NOISE), Some(value)));
        }
        forge
    };
    for pending in [false, true] {
        assert_eq!(exercise(&forged(pending).finish(), false), 0, "pending: {pending}");
        let storage = storage(forged(pending));
        for read_only in [true, false, true] {
            let fs = open_on(storage.clone(), read_only).unwrap();
            assert_eq!(fs.read(Ino(NOISE), 100, 15).unwrap(), b"said by the log", "pending: {pending}");
            let mode = if pending { 0o640 } else { 0o600 };
            assert_eq!(fs.attributes(Ino(NOISE)).unwrap().mode, mode::REGULAR | mode);
            fs.close().unwrap();
        }
    }
}

#[test]
fn pieces_of_what_is_no_file_count_for_nothing() {
    let before = contents(&open_on(storage(Forge::with_log()), true).unwrap());
    let mut forge = Forge::with_log();
    for ino in [ROOT, DIRECTORY, LINK, FIFO, MISSING] {
        forge.entry().says.pieces.push(piece(ino, 0, b"of nothing"));
    }
    let bytes = forge.finish();
    let fs = open_on(Arc::new(MemoryStorage::from_contents(bytes.clone())), true).unwrap();
    assert!(contents(&fs) == before);
    assert_eq!(fs.read_link(Ino(LINK)).unwrap(), b"../noise");
    nothing_is_lost(bytes, |_| {});
}

/// Damage is limited to the file whose record does not decode (specification 1.2 rule 3); a writer
/// that would overwrite it is refused.
#[test]
fn a_broken_inode_in_the_log_keeps_no_reader_from_its_neighbours() {
    let mut forge = Forge::with_log();
    for (ino, name) in (50..).zip(NEIGHBOURS) {
        inline_file(&mut forge, ROOT, name.as_bytes(), ino, HEALTHY);
    }
    with_records(&mut forge, vec![(inode_key(NOISE), Some(vec![0xff; 144]))]).pieces.push(piece(NOISE, 0, b"x"));
    let storage = storage(forge);
    let fs = open_on(storage.clone(), true).unwrap();
    for name in NEIGHBOURS {
        let found = fs.lookup(ROOT_INO, name.as_bytes()).unwrap();
        assert_eq!(fs.read(found.ino, 0, 100).unwrap(), HEALTHY);
    }
    assert!(matches!(fs.attributes(Ino(NOISE)), Err(Error::Damaged(_))));
    assert!(matches!(open_on(storage, false).map(drop), Err(Error::Damaged(_))));
}

/// Damage of the trees extends no further with log records than without.
#[test]
fn a_damaged_page_keeps_no_reader_from_what_the_log_has_of_others() {
    let forged = |logged: bool| {
        let mut forge = Forge::with_log();
        forge.leaf_bytes = 400;
        forge.record.closed = false;
        let of = |kind: u8, forge: &mut Forge| {
            forge.live().iter().filter(|(key, _)| key.kind == kind).cloned().collect::<Vec<_>>()
        };
        // Into every leaf, and some are emptied.
        let inodes = of(kind::INODE, &mut forge).into_iter().map(|(key, value)| (key, Some(value)));
        let gone = of(kind::XATTR_PIECE, &mut forge).into_iter().map(|(key, _)| (key, None));
        if logged {
            with_records(&mut forge, inodes.chain(gone).collect()).pieces.push(piece(NOISE, 100, b"logged"));
        }
        forge.finish()
    };
    let (plain, logged) = (forged(false), forged(true));
    let mut some = 0;
    for block in (MIN_BLOCKS..plain.len() as u64 / BLOCK).step_by(stride(3)) {
        let seen = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            bytes[(block * BLOCK) as usize + 200] ^= 1;
            let fs = open_on(Arc::new(MemoryStorage::from_contents(bytes)), true).ok()?;
            // Writing a file's dirty data needs more than its inode.
            let others = (ROOT..=FIFO).filter(|ino| *ino != NOISE);
            Some(others.map(|ino| fs.attributes(Ino(ino)).is_ok()).collect::<Vec<_>>())
        };
        let without = seen(&plain);
        assert_eq!(seen(&logged), without, "block {block}");
        some += usize::from(without.is_some_and(|seen| seen.contains(&false)));
    }
    assert!(some > 3, "{some}");
}
