//! Logs that contradict themselves or their record: opening for writing is refused (specification
//! 10.2, rules 1, 5, 6 and 7).

use super::super::super::fuzzing::{Forge, open_on};
use super::cases::{Cases, INLINE, NOISE};
use super::logs::{honest, inode_key, pend, piece, range, refused_unwritten, storage};
use crate::error::Error;
use crate::format::log::{LogEntry, LogMark};
use crate::format::{Generation, Key, LOG, MAX_OFFSET, kind};

const MOST: &[u8] = &[0xff; 8];

/// Contradiction of a log with the archive, or with itself.
struct Contradiction {
    name: String,
    /// Part of the error message.
    told: &'static str,
    change: Box<dyn FnOnce(&mut Forge)>,
}

fn contradiction(name: &str, told: &'static str, change: impl FnOnce(&mut Forge) + 'static) -> Contradiction {
    Contradiction { name: format!("log: {name}"), told, change: Box::new(change) }
}

pub(super) fn add(cases: &mut Cases) {
    for Contradiction { name, change, .. } in contradictions() {
        cases.of(Forge::with_log(), name, true, change);
    }
}

fn contradictions() -> Vec<Contradiction> {
    let mut all = Vec::new();
    // One field of a head.
    let heads: [(&str, &str, usize, &[u8]); 11] = [
        ("a head of no blocks", "out of bounds", 60, &[0, 0]),
        ("a head of 256 blocks", "out of bounds", 60, &[0, 1]),
        ("a head of 65,535 blocks", "out of bounds", 60, &[0xff, 0xff]),
        ("an entry 0", "out of bounds", 24, &[0; 4]),
        ("a body longer than its blocks", "out of bounds", 28, &[0xff; 4]),
        ("a body one byte longer than its blocks", "out of bounds", 28, &[0x89, 0x0f, 0, 0]), // 4096 - 119
        ("an entry of commit 0", "follows nothing", 0, &[0; 8]),
        ("a first entry behind another", "follows nothing", 32, &[1; 16]),
        ("a head with a reserved byte", "head of a log entry", 63, &[1]),
        ("a time beyond its second", "head of a log entry", 56, &[0xff; 4]),
        ("an entry of commit 2^64 - 1", "is lost", 0, MOST),
    ];
    for (name, told, at, bytes) in heads {
        all.push(contradiction(name, told, move |forge| honest(forge).on_head.push((at, bytes.to_vec()))));
        // An entry that opens is examined at any position.
        all.push(contradiction(&format!("{name}, at the end"), told, move |forge| {
            honest(forge);
            let last = honest(forge);
            last.block = Some(LOG.1 - 1);
            last.on_head = vec![(24, vec![1]), (32, vec![0; 16]), (at, bytes.to_vec())];
        }));
    }
    for (name, length) in [("no bytes", 0u32), ("its counts alone, cut", 31)] {
        all.push(contradiction(&format!("a body of {name}"), "padding", move |forge| {
            honest(forge).on_head.push((28, length.to_le_bytes().to_vec()));
        }));
    }
    for (name, block) in [("behind another", LOG.0 + 1), ("at the end", LOG.1 - 1)] {
        all.push(contradiction(
            &format!("an entry that reaches into the header, {name}"),
            "beyond the log",
            move |forge| {
                honest(forge);
                let last = honest(forge);
                last.block = Some(block);
                last.on_head = vec![(60, vec![255, 0])];
            },
        ));
    }
    for (name, number) in [("one", 3u32), ("many", 200), ("2^32 - 3", u32::MAX)] {
        all.push(contradiction(&format!("a number that skips {name}"), "entry 2 of the log is lost", move |forge| {
            honest(forge);
            honest(forge).on_head.push((24, number.to_le_bytes().to_vec()));
        }));
    }
    all.push(contradiction("a second entry without the first", "entry 1 of the log is lost", |forge| {
        honest(forge).block = Some(LOG.0 + 50);
        forge.entries[0].on_head.push((24, vec![2]));
    }));
    all.push(contradiction("a damaged entry before a whole one", "entry 1 of the log is lost", |forge| {
        honest(forge).torn = true;
        honest(forge);
    }));
    all.push(contradiction("an entry behind the end of a session", "behind the end of its session", |forge| {
        honest(forge);
        forge.record.closed = true;
    }));
    bodies(&mut all);
    pending(&mut all);
    all
}

/// Bodies that open and do not decode.
fn bodies(all: &mut Vec<Contradiction>) {
    let patches: [(&str, usize, &[u8]); 6] = [
        ("2^32 - 1 ranges", 16, &[0xff; 4]),
        ("2^32 - 1 records", 20, &[0xff; 4]),
        ("2^32 - 1 pieces", 24, &[0xff; 4]),
        ("one piece more than there is", 24, &[2]),
        ("a reserved number", 28, &[1]),
        ("a next inode beyond all", 0, MOST),
    ];
    for (name, at, bytes) in patches {
        all.push(contradiction(name, "log entry", move |forge| honest(forge).on_body.push((at, bytes.to_vec()))));
    }
    let mut says = |name: &str, change: fn(&mut LogEntry)| {
        all.push(contradiction(name, "log entry", move |forge| change(&mut honest(forge).says)));
    };
    says("pieces that overlap", |says| says.pieces.push(piece(NOISE, 110, b"and more")));
    says("pieces out of order", |says| says.pieces.push(piece(INLINE, 0, b"before")));
    says("a piece of no bytes", |says| says.pieces.push(piece(NOISE, 5000, b"")));
    says("a piece of inode 0", |says| says.pieces.insert(0, piece(0, 0, b"x")));
    says("a piece beyond the inode numbers", |says| says.pieces.push(piece(1 << 48, 0, b"x")));
    says("a piece beyond all offsets", |says| says.pieces.push(piece(NOISE, MAX_OFFSET, b"x")));
    says("a piece at offset 2^64 - 1", |says| says.pieces.push(piece(NOISE, u64::MAX, b"xx")));
    says("a range without bytes", |says| says.dropped.push(range(NOISE, 7, 7)));
    says("a range that ends before it begins", |says| says.dropped.push(range(NOISE, u64::MAX, 0)));
    says("a range of inode 0", |says| says.dropped.push(range(0, 0, 1)));
    says("a range beyond the inode numbers", |says| says.dropped.push(range(u64::MAX, 0, 1)));
    says("a record twice", |says| says.records = vec![(inode_key(NOISE), None); 2]);
    says("records out of order", |says| says.records = vec![(inode_key(NOISE), None), (inode_key(INLINE), None)]);
    says("a record of a snapshot", |says| says.records.push((Key::new(1, kind::SNAPSHOT, 0), None)));
    says("a record of the space map", |says| says.records.push((Key::new(0, kind::SPACE, 0), Some(vec![1, 0, 0]))));
    says("a record of a count", |says| says.records.push((Key::new(0, kind::REFERENCE, 400), Some(vec![1; 8]))));
    says("a record of an unknown kind", |says| says.records.push((Key::new(INLINE, 99, 0), None)));
    says("a record in a foreign place", |says| says.records.push((Key::new(INLINE, kind::INODE, 1), None)));
    says("the greatest key", |says| says.records.push((Key::MAX, None)));
    says("a value of 3,501 bytes", |says| says.records.push((inode_key(NOISE), Some(vec![0; 3501]))));
}

/// Records that name entries which do not exist.
fn pending(all: &mut Vec<Contradiction>) {
    type Change = fn(&mut LogMark);
    let marks: [(&str, Change); 5] = [
        ("entries of another record", |mark| mark.record = [9; 16]),
        ("entries of commit 0", |mark| mark.generation = Generation(0)),
        ("255 entries", |mark| mark.number = 255),
        ("2^32 - 1 entries", |mark| mark.number = u32::MAX),
        ("entries of the last commit of all", |mark| mark.generation = Generation(u64::MAX)),
    ];
    for (name, change) in marks {
        let name = format!("a commit that waits for {name}");
        all.push(contradiction(&name, "as pending", move |forge| {
            honest(forge);
            let generation = Generation(forge.record.generation.0 - 1);
            let mut mark = LogMark { generation, record: [8; 16], number: 1, entry: [7; 16] };
            change(&mut mark);
            forge.record.pending = Some(mark);
        }));
    }
    // The chain exists and belongs to a commit that never existed.
    all.push(contradiction("a commit that waits for entries of a later one", "is lost", |forge| pend(forge, 1)));
}

/// A writer is refused and has written nothing; a reader is refused, or gets a report of the loss.
#[test]
fn what_contradicts_a_log_is_refused_by_name() {
    for Contradiction { name, told, change } in contradictions() {
        let mut forge = Forge::with_log();
        change(&mut forge);
        let storage = storage(forge);
        refused_unwritten(&storage, &name, told);
        let read = open_on(storage, true).map(|fs| fs.volume.lost().map(str::to_owned));
        let text = match read {
            Ok(lost) => lost.unwrap_or_else(|| panic!("{name}: a reader is told nothing")),
            Err(Error::Damaged(text)) => text,
            Err(error) => panic!("{name}: {error}"),
        };
        assert!(text.contains(told), "{name}: {text}");
    }
}
