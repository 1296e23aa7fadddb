//! Seed corpus of the fuzzers: valid encodings of each kind, from the sample and from values that
//! the sample lacks.

use std::sync::Arc;

use super::decoders::RECIPIENT;
use super::forge::Forge;
use crate::crypto::identity::Recipient;
use crate::crypto::{NoPrompts, Prompts, RecoveryCode, SecretKey};
use crate::env::SeededEnvironment;
use crate::format::header::{
    self, Description, Framing, KdfParameters, KeySlot, PassphraseSlot, Rewrap, SEALED_KEY, SLOT_AGE,
};
use crate::format::log::{DroppedRange, EntryHead, LogEntry, LogMark, LogPiece, entry_blocks};
use crate::format::node::{NodeHead, encode_internal, encode_leaf};
use crate::format::page::{PackedItem, PageKind, Prologue, encode_head};
use crate::format::record::{DeltaList, Root};
use crate::format::values::{DeadValue, HistoryValue, ReferenceValue, SnapshotValue};
use crate::format::{Generation, Ino, Key, Pointer, Run, Timestamp, TreeId, kind, space};

fn pointer() -> Pointer {
    Pointer { run: Run::new(500, 4), generation: Generation(3), tag: [4; 16] }
}

/// Returns the values of these record kinds in the sample, each after `prefix`.
fn of_sample(kinds: &[u8], prefix: &[u8]) -> Vec<Vec<u8>> {
    let forge = Forge::new();
    let records = forge.trees.iter().flatten().filter(|(key, _)| kinds.contains(&key.kind));
    records.map(|(_, value)| [prefix, value].concat()).collect()
}

fn values() -> Vec<Vec<u8>> {
    let root = Root { pointer: pointer(), level: 1 };
    let generation = Generation(9);
    let time = Timestamp { seconds: -5, nanos: 7 };
    let snapshot = SnapshotValue { generation, time, root, inodes: 8, name: b"daily".to_vec() };
    let history = HistoryValue { session: [3; 16], last: generation, last_tag: [5; 16] };
    let mut all = of_sample(&[kind::INODE], &[0]);
    all.extend(of_sample(&[kind::EXTENT], &[1]));
    all.push([&[2][..], &ReferenceValue { run_blocks: 33, count: 2 }.encode()].concat());
    all.push([&[3][..], &DeadValue { run: Run::new(500, 33), born: generation }.encode()].concat());
    all.push([&[4][..], &snapshot.encode()].concat());
    all.push([&[5][..], &history.encode()].concat());
    all
}

/// Returns a block with the selector in front, limited to the length of an input: the last bytes of
/// a block are assumed to be zeros.
fn chosen(choice: u8, block: &[u8]) -> Vec<u8> {
    [&[choice], &block[..block.len().min(4095)]].concat()
}

fn headers() -> Vec<Vec<u8>> {
    let framing = Framing {
        copy: 0,
        features: 0,
        archive: [7; 16],
        sequence: 3,
        commitment: [1; 32],
        slots: [1; 32],
        mac: [2; 32],
    };
    let encoded = header::encode_framing(&framing);
    vec![chosen(0, &encoded), chosen(3, &encoded)]
}

/// Includes the fields alone, padded with zeros, so that more mutations hit a field.
fn framings() -> Vec<Vec<u8>> {
    const FIELDS: usize = 136;
    let short = headers().into_iter().map(|seed| seed[..=FIELDS].to_vec());
    headers().into_iter().chain(short).collect()
}

/// Includes each slot without most of its random bytes.
fn slots() -> Vec<Vec<u8>> {
    let kdf = KdfParameters { memory_kib: 65_536, passes: 3, lanes: 1 };
    let slot = PassphraseSlot { salt: [1; 32], kdf, commitment: [2; 32], nonce: [3; 24], sealed: vec![4; 528] };
    let mut blocks = vec![(7, header::encode_passphrase_slot(&slot, &[5; 3464]))];
    let (salt, commitment, nonce, sealed, ephemeral) = ([1; 32], [2; 32], [3; 24], [4; SEALED_KEY], [6; 32]);
    let kinds = [(0, 2, Some(kdf)), (1, 3, None), (2, 4, None), (3, 17, Some(kdf)), (4, 18, None), (5, 19, None)];
    for (choice, kind, kdf) in kinds {
        let age = if kind == SLOT_AGE { vec![8; 200] } else { Vec::new() };
        let slot = KeySlot { salt, kdf, commitment, nonce, sealed, ephemeral, age };
        blocks.push((choice, slot.encode(kind, &[5; 4096])));
    }
    blocks.push((6, [0; 4096]));
    let mut seeds: Vec<_> = blocks.iter().map(|(choice, block)| chosen(*choice, block)).collect();
    seeds.extend(blocks.iter().map(|(choice, block)| chosen(*choice, &block[..400])));
    let created = Timestamp { seconds: 9, nanos: 1 };
    for rewrap in
        [Rewrap::Public([7; 32]), Rewrap::Recipient(RECIPIENT.into()), Rewrap::Recipient("ssh-ed25519 AA".into())]
    {
        let description = Description { created, label: "label".into(), rewrap };
        let plain = description.encode().expect("a short description");
        seeds.extend([chosen(8, &plain), chosen(8, &plain[..120])]);
    }
    let code = RecoveryCode::generate(&SeededEnvironment::new(3)).expect("seeded bytes");
    seeds.push(chosen(9, code.text().as_bytes()));
    seeds
}

/// Returns an age file for the tested identity, one for no identity, and recipients of every kind.
fn identities() -> Vec<Vec<u8>> {
    let recipient = Recipient::parse(RECIPIENT).expect("a recipient");
    let prompts: Arc<dyn Prompts> = Arc::new(NoPrompts);
    let sealed = recipient.seal(&SecretKey::new([5; 32]), &prompts).expect("an age file");
    let nobody = b"age-encryption.org/v1\n-> X25519 qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqo\nqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqo\n--- qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqo\n";
    let mut seeds = vec![chosen(0, &sealed), chosen(0, nobody)];
    let recipients = [
        RECIPIENT,
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMe36GNRqUL7p72AX7MbeDZbt16C42sa3jgLVNA31N5R test",
        include_str!("../tests/key_slots/hybrid_recipient"),
    ];
    seeds.extend(recipients.iter().map(|text| chosen(1, text.as_bytes())));
    seeds
}

fn records() -> Vec<Vec<u8>> {
    let mut record = Forge::new().record;
    let plain = record.encode();
    record.allocated = (0..9).map(|n| (Run::new(400 + n, 1), [n as u8; 16])).collect();
    record.freed = vec![Run::new(500, 300), Run::new(900, 1)];
    let lists = record.encode();
    record.pending = Some(LogMark { generation: Generation(2), record: [6; 16], number: 3, entry: [7; 16] });
    vec![plain, lists, record.encode()]
}

fn deltas() -> Vec<Vec<u8>> {
    let runs = vec![Run::new(500, 300), Run::new(900, 1)];
    let lists = [DeltaList::default(), DeltaList { next: pointer(), allocated: runs.clone(), freed: runs }];
    lists.iter().map(DeltaList::encode).collect()
}

/// Returns entries with no, few and many items of each kind; one record is a removal.
fn entries() -> Vec<Vec<u8>> {
    let live = Forge::new().trees[0].clone();
    let entry = |count: u64| {
        let few = count as usize;
        let records = live.iter().take(few).map(|(key, value)| (*key, Some(value.clone())));
        let gone = (Key::new(1 << 40, kind::INODE, 0), None);
        let piece = |n| LogPiece { ino: Ino(n / 2 + 2), offset: 4096 * n, data: vec![n as u8; 5] };
        LogEntry {
            next_ino: 1 << 41,
            inodes: 12,
            dropped: (0..count).map(|n| DroppedRange { ino: Ino(n + 2), start: n, end: u64::MAX }).collect(),
            records: records.chain([gone]).take(few).collect(),
            pieces: (0..count).map(piece).collect(),
        }
    };
    let all = [0, 1, 3, live.len() as u64 + 1].into_iter().map(|count| {
        let body = entry(count).encode();
        let head = EntryHead {
            generation: Generation(3),
            record: [1; 16],
            number: 2,
            length: body.len() as u32,
            previous: [2; 16],
            time: Timestamp { seconds: 9, nanos: 1 },
            blocks: entry_blocks(body.len()) as u16,
        };
        [&head.encode()[..], &body].concat()
    });
    all.collect()
}

fn prologues() -> Vec<Vec<u8>> {
    let node = Prologue {
        kind: PageKind::Node,
        compressed: true,
        blocks: 1,
        stored_length: 300,
        plain_length: 900,
        generation: Generation(8),
        owner: 1,
        position: 0,
    };
    let data = Prologue { kind: PageKind::Data, compressed: false, owner: 4, position: 8192, ..node };
    let root = Root { pointer: pointer(), level: 3 };
    vec![node.encode().to_vec(), data.encode().to_vec(), pointer().encode().to_vec(), root.encode().to_vec()]
}

fn heads() -> Vec<Vec<u8>> {
    let items = [
        PackedItem { ino: Ino(4), offset: 0, start: 0, length: 100 },
        PackedItem { ino: Ino(5), offset: 7, start: 100, length: 9 },
    ];
    let head =
        |stored: u32, plain: u32, bytes: Vec<u8>| [&stored.to_le_bytes()[..], &plain.to_le_bytes(), &bytes].concat();
    vec![
        head(20_000, 20_000, encode_head(14, &[(16_384, true, [1; 16]), (3616, true, [2; 16])], &[], 100)),
        head(400, 16_385, encode_head(14, &[(399, false, [1; 16]), (1, true, [2; 16])], &items, 200)),
    ]
}

fn nodes() -> Vec<Vec<u8>> {
    let forge = Forge::new();
    let leaf = NodeHead { level: 0, tree: TreeId::Live as u8, lower: Key::MIN, upper: Key::MAX };
    let entries: Vec<(Key, &[u8])> = forge.trees[0].iter().take(12).map(|(key, value)| (*key, &value[..])).collect();
    let internal = NodeHead { level: 2, ..leaf };
    let children = [(Key::MIN, pointer()), (Key::new(7, 1, 0), pointer())];
    vec![
        encode_leaf(&leaf, entries.into_iter()),
        encode_leaf(&leaf, [].into_iter()),
        encode_internal(&internal, children.into_iter()),
    ]
}

fn lists() -> Vec<Vec<u8>> {
    let entries =
        [(1u16, 6u16, u32::MAX), (2, 4, 1001), (4, 5, u32::MAX), (8, 4, 77), (16, 7, u32::MAX), (32, 0, u32::MAX)];
    let bytes = |count: usize| -> Vec<u8> {
        let all = entries.iter().take(count).flat_map(|(tag, permissions, id)| {
            [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
        });
        2u32.to_le_bytes().into_iter().chain(all).collect()
    };
    vec![bytes(6), bytes(0), Vec::new()]
}

fn remembered() -> Vec<Vec<u8>> {
    let mut one = vec![0; 32 + 2 * 48];
    (one[0], one[20]) = (1, 2);
    let mut with_entry = [&one[..], &[0; 24]].concat();
    (with_entry[0], with_entry[32 + 2 * 48]) = (2, 5);
    vec![one, with_entry]
}

/// Returns encoded rollback states.
fn known() -> Vec<Vec<u8>> {
    let mut one = vec![0; 88 + 16];
    one[..3].copy_from_slice(&[1, 1, 0]);
    let mut two = vec![0; 88 + 2 * 16];
    two[..3].copy_from_slice(&[1, 2, 1]);
    vec![one, two]
}

fn pages() -> Vec<Vec<u8>> {
    let head = |kind: u8, flags: u8, chunks: u8, items: u8, plain: u32, owner: u64, position: u64| {
        let mut out = vec![kind, flags, chunks, items];
        out.extend(plain.to_le_bytes());
        out.extend(owner.to_le_bytes());
        out.extend(position.to_le_bytes());
        out
    };
    let node = nodes().swap_remove(1);
    let text = b"all work and no play ".repeat(30);
    let squeezed = zstd::bulk::compress(&text, 1).expect("zstd compresses text");
    let packed_node = zstd::bulk::compress(&node, 1).expect("zstd compresses a node");
    vec![
        [head(0, 0, 0, 0, node.len() as u32, 1, 0), node.clone()].concat(),
        [head(0, 1, 0, 0, node.len() as u32, 1, 0), packed_node].concat(),
        [head(1, 2, 0, 0, text.len() as u32, 4, 0), text.clone()].concat(),
        [head(1, 8, 0, 0, text.len() as u32, 4, 0), squeezed].concat(),
        [head(2, 2, 0, 3, text.len() as u32, 4, 0), text].concat(),
        [head(3, 0, 0, 0, 40, 0, 0), vec![0; 40]].concat(),
    ]
}

/// Returns edits of the whole archive: one of each kind, and none.
fn edits() -> Vec<Vec<u8>> {
    let edit = |operation: u8, operands: [u8; 6], bytes: &[u8]| {
        [&[operation][..], &operands, &[bytes.len() as u8], bytes].concat()
    };
    let mut all = vec![Vec::new()];
    for operation in 0..11 {
        all.push(edit(operation, [0, 3, 0, 8, 0, 0], &[1, 2, 3, 4, 5, 6, 7, 8, 9]));
    }
    all.push(edit(9, [0, 0, 0, 5, 0, 6], &pages().swap_remove(2)[..200]));
    all.push([edit(8, [0, 100, 0, 0, 0, 0], &[]), edit(5, [0, 3, 0, 44, 0, 0], &[0xff; 8])].concat());
    all.push(edit(10, [0, 1, 0, 0, 0, 0], &[]));
    // Two snapshots, between which records of the live tree are removed, and one with another
    // level.
    let kept = |id, right, name| edit(10, [0, 0, right, id, 0, 0], name);
    let gone = edit(3, [0, 9, 0, 0, 0, 0], &[]);
    all.push([kept(7, 1, &b""[..]), gone.clone(), kept(8, 1, b" too"), gone].concat());
    all.push(kept(7, 0, b""));
    all.extend(logs(&edit));
    // An input of odd length selects an archive with a log.
    let both = |seed: Vec<u8>| [[&seed[..], &[0]].concat(), seed];
    all.into_iter().flat_map(both).collect()
}

/// Returns edits of log entries, each alone and several in sequence.
fn logs(edit: &impl Fn(u8, [u8; 6], &[u8]) -> Vec<u8>) -> Vec<Vec<u8>> {
    let entry = || edit(11, [0; 6], &[]);
    let at = |offset: u64, data: &[u8]| [&offset.to_le_bytes()[..], data].concat();
    let piece = |ino: u8, offset: u64, data: &[u8]| edit(13, [ino, 0, 0, 0, 0, 0], &at(offset, data));
    let record = |number: u8, how: u8| edit(12, [number, 0, 255, 255, 0, how], &[]);
    let cut = |ino: u8, start: u64, length: &[u8]| edit(14, [ino, 0, 0, 0, 0, 0], &at(start, length));
    let bent = |what: u8, place: u8, bytes: &[u8]| edit(15, [0, what, place, 0, place, 0], bytes);
    vec![
        [entry(), piece(8, 100, b"over an extent"), piece(3, 5000, b"behind inline data")].concat(),
        [entry(), record(0, 0), record(9, 3), record(12, 1)].concat(),
        [entry(), piece(8, 0, &[7; 90]), entry(), cut(8, 10, &[20, 0, 0, 0, 0, 0, 0, 0]), piece(8, 40, b"later")]
            .concat(),
        [entry(), piece(7, 9, b"gone"), entry(), cut(7, 0, &[]), record(20, 3)].concat(),
        [entry(), edit(13, [8, 0, 200, 2, 5, 0], &at(0, b""))].concat(),
        [entry(), edit(13, [8, 0, 60, 19, 5, 0], &at(i64::MAX as u64 - (1 << 25), b""))].concat(),
        [entry(), piece(2, 0, b"of a directory"), piece(40, 0, b"of nobody"), piece(10, 0, b"of a link")].concat(),
        [entry(), bent(0, 24, &[9])].concat(),
        [entry(), bent(1, 20, &[1])].concat(),
        [entry(), entry(), bent(2, 200, &[])].concat(),
        [entry(), bent(3, 0, &[]), entry()].concat(),
        [edit(11, [3, 1, 1, 2, 0, 0], &[]), entry(), piece(8, 0, b"pending")].concat(),
        [edit(10, [0, 0, 1, 7, 0, 0], b""), entry(), piece(8, 0, b"kept before"), record(30, 3)].concat(),
    ]
}

fn sequences() -> Vec<Vec<u8>> {
    let mixed: Vec<u8> = (0..60u8).flat_map(|n| [n, n / 3, n.wrapping_mul(37), n % 5, n.wrapping_mul(11), n]).collect();
    let crash =
        [[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 90, 3], [12, 0, 0, 0, 0, 0], [1, 0, 9, 0, 200, 4], [15, 3, 1, 0, 0, 0]];
    let kept = [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 90, 3],
        [14, 1, 0, 0, 0, 0],
        [0, 0, 3, 0, 200, 5],
        [14, 1, 1, 0, 0, 0],
        [7, 0, 0, 0, 0, 0],
        [15, 3, 1, 0, 0, 0],
        [14, 2, 1, 0, 0, 0],
        [15, 4, 0, 0, 0, 0],
        [14, 0, 0, 0, 0, 0],
    ];
    vec![mixed, crash.concat(), kept.concat(), Vec::new()]
}

/// Returns the seeds of the target with this name; none for an unknown one.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    match target {
        "header" => headers(),
        "framing" => framings(),
        "slot" => slots(),
        "identity" => identities(),
        "record" => records(),
        "delta" => deltas(),
        "entry" => entries(),
        "prologue" => prologues(),
        "head" => heads(),
        "node" => nodes(),
        "directory" => of_sample(&[kind::DIR_INDEX, kind::DIR_LIST], &[]),
        "values" => values(),
        "xattr" => of_sample(&[kind::XATTR], &[]),
        "space" => {
            [of_sample(&[kind::SPACE], &[]), vec![vec![0; 1025], space::encode(&[5; space::REGION_WORDS])]].concat()
        }
        "acl" => lists(),
        "seen" => remembered(),
        "known" => known(),
        "page" => pages(),
        "whole" => edits(),
        "operations" => sequences(),
        _ => Vec::new(),
    }
}
