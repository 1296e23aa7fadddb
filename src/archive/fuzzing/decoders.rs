//! Decoders of single structures: a decoded value encodes to the same bytes if the encoding is
//! unique, and decodes to the same value again.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use sha2::{Digest, Sha256};

use super::forge;
use crate::crypto::identity::Recipient;
use crate::crypto::{Identities, NoPrompts, Prompts, RecoveryCode, SecretKey};
use crate::env::SeededEnvironment;
use crate::format::header::{self, DESCRIPTION_PLAIN, Description, HEADER_BYTES, KeySlot};
use crate::format::log::{ENTRY_HEAD, EntryHead, LOG_BLOCKS, LogEntry, entry_capacity};
use crate::format::node::{self, NodeEntries};
use crate::format::page::{
    POINTER, PROLOGUE, PackedItem, PageKind, Prologue, decode_chunk_table, encode_head, head_length,
};
use crate::format::record::{CommitRecord, DeltaList, RECORD_PLAIN, Root};
use crate::format::values::{
    DeadValue, Extent, HistoryValue, InodeValue, MAX_XATTR, ReferenceValue, SnapshotValue, decode_index, decode_list,
    decode_xattrs, encode_index, encode_list, encode_xattrs, find_in_index, is_valid_name,
};
use crate::format::{BLOCK, Generation, Ino, MAX_DATA, NODE_CAPACITY, Pointer, Run, space as space_map};
use crate::frame::{PageCipher, PageContent, PlainPage};
use crate::fs::acl::Acl;
use crate::keys::rollback::{Known, RollbackState};
use crate::pager::Pager;
use crate::storage::{MemoryStorage, Storage};

const FRAMING: usize = 4096;
const CHECKSUM: std::ops::Range<usize> = 4064..4096;
/// Feature bits that programs of this version ignore; they are not part of the framing.
const OPTIONAL_FEATURES: std::ops::Range<usize> = 32..48;

/// Identity of [`RECIPIENT`].
const IDENTITY: &[u8] = b"AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33";
pub(super) const RECIPIENT: &str = "age1t7rxyev2z3rw82stdlrrepyc39nvn86l5078zqkf5uasdy86jp6svpy7pa";

/// Returns the input, padded with zeros.
pub(super) fn filled<const N: usize>(data: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    let length = data.len().min(N);
    out[..length].copy_from_slice(&data[..length]);
    out
}

/// Decodes the input as a framing block; its checksum is corrected, except in inputs that request a
/// wrong one.
pub(super) fn header(data: &[u8]) {
    let Some((&choice, data)) = data.split_first() else { return };
    let copy = choice & 1;
    if choice & 2 != 0 {
        let _ = header::decode(data, copy);
        return;
    }
    let mut bytes = vec![0; HEADER_BYTES];
    bytes[..FRAMING].copy_from_slice(&filled::<FRAMING>(data));
    bytes[CHECKSUM].fill(0);
    let sum = Sha256::digest(&bytes);
    bytes[CHECKSUM].copy_from_slice(&sum);
    let Ok(parsed) = header::decode(&bytes, copy) else { return };
    bytes[OPTIONAL_FEATURES].fill(0);
    let encoded = header::encode(&parsed.framing, &[[0; 4096]; 32]);
    assert!(encoded[..CHECKSUM.start] == bytes[..CHECKSUM.start], "a header is encoded otherwise");
    assert_eq!(header::decode(&encoded, copy).map(|again| again.framing).ok(), Some(parsed.framing));
}

/// Decodes the framing block without its checksum, which takes most of the time of [`header`].
pub(super) fn framing(data: &[u8]) {
    let Some((&choice, data)) = data.split_first() else { return };
    let copy = choice & 1;
    if choice & 2 != 0 {
        let _ = (header::recognize(data, copy), header::decode_framing(data, copy));
        return;
    }
    let mut block: [u8; FRAMING] = filled(data);
    if header::recognize(&block, copy).is_err() {
        return;
    }
    let Ok(parsed) = header::decode_framing(&block, copy) else { return };
    block[OPTIONAL_FEATURES].fill(0);
    block[CHECKSUM].fill(0);
    let encoded = header::encode_framing(&parsed);
    assert!(encoded == block, "a framing block is encoded otherwise");
    assert!(header::recognize(&encoded, copy).is_ok());
    assert_eq!(header::decode_framing(&encoded, copy).ok(), Some(parsed));
}

/// Decodes the content of a slot, or a secret for it, with our own decoders; the first byte selects
/// which.
pub(super) fn slot(data: &[u8]) {
    let Some((&choice, data)) = data.split_first() else { return };
    match choice % 10 {
        0 => key_slot(data, 2),
        1 => key_slot(data, 3),
        2 => key_slot(data, 4),
        3 => key_slot(data, 17),
        4 => key_slot(data, 18),
        5 => key_slot(data, 19),
        6 => {
            let block: [u8; 4096] = filled(data);
            for kind in [0, 1, 20] {
                assert!(KeySlot::decode(&block, kind).is_err(), "a slot of kind {kind} has no such layout");
            }
        }
        7 => passphrase_slot(data),
        8 => description(data),
        _ => {
            if let Ok(code) = RecoveryCode::parse(data) {
                assert!(RecoveryCode::parse(code.text().as_bytes()).is_ok());
            }
        }
    }
}

fn key_slot(data: &[u8], kind: u8) {
    let _ = KeySlot::decode(data, kind);
    let block: [u8; 4096] = filled(data);
    if let Ok(slot) = KeySlot::decode(&block, kind) {
        assert!(slot.encode(kind, &block) == block, "a slot of kind {kind} is encoded otherwise");
    }
}

fn passphrase_slot(data: &[u8]) {
    let _ = header::decode_passphrase_slot(data);
    let block: [u8; 4096] = filled(data);
    let Ok(slot) = header::decode_passphrase_slot(&block) else { return };
    assert!(header::encode_passphrase_slot(&slot, &filled(&block[632..])) == block);
}

/// Decodes a description without its seal.
fn description(data: &[u8]) {
    let plain: [u8; DESCRIPTION_PLAIN] = filled(data);
    if let Ok(description) = Description::decode(&plain) {
        assert_eq!(description.encode().ok(), Some(plain), "a description is encoded otherwise");
    }
}

/// Runs the age library: on the recipient of a description if the first byte is odd, otherwise on
/// the age file of a slot, before anything about it is authenticated.
pub(super) fn identity(data: &[u8]) {
    static IDENTITIES: OnceLock<Identities> = OnceLock::new();
    let Some((&choice, data)) = data.split_first() else { return };
    if choice & 1 != 0 {
        if let Ok(recipient) =
            std::str::from_utf8(data).map_err(drop).and_then(|text| Recipient::parse(text).map_err(drop))
        {
            let again = Recipient::parse(recipient.text()).map(|again| again.text().to_owned());
            assert_eq!(again.ok().as_deref(), Some(recipient.text()), "what is kept of a recipient is another one");
        }
        return;
    }
    let identities = IDENTITIES.get_or_init(|| {
        let mut identities = Identities::default();
        let prompts: Arc<dyn Prompts> = Arc::new(NoPrompts);
        identities.add(IDENTITY, "identity", &prompts).expect("an identity");
        identities
    });
    let _ = identities.open(data);
}

pub(super) fn record(data: &[u8]) {
    let _ = CommitRecord::decode(data);
    let plain: [u8; RECORD_PLAIN] = filled(data);
    if let Ok(record) = CommitRecord::decode(&plain) {
        assert!(record.encode() == plain, "a record is encoded otherwise");
    }
}

pub(super) fn delta(data: &[u8]) {
    if let Ok(list) = DeltaList::decode(data) {
        assert!(list.encode() == data, "a delta list is encoded otherwise");
    }
}

/// Decodes a log entry: its head, followed by its body.
pub(super) fn entry(data: &[u8]) {
    let head: [u8; ENTRY_HEAD] = filled(data);
    if let Ok(decoded) = EntryHead::decode(&head) {
        assert_eq!(decoded.encode(), head);
        let blocks = u64::from(decoded.blocks);
        assert!(blocks <= LOG_BLOCKS && decoded.length as usize <= entry_capacity(blocks));
    }
    let body = data.get(ENTRY_HEAD..).unwrap_or_default();
    let Ok(entry) = LogEntry::decode(body) else { return };
    assert!(entry.encode() == body && entry.length() == body.len(), "an entry is encoded otherwise");
    assert!(entry.records.is_sorted_by(|(one, _), (next, _)| one < next));
    assert!(entry.pieces.is_sorted_by(|one, next| (one.ino, one.end()) <= (next.ino, next.offset)));
    assert!(entry.dropped.iter().all(|range| range.start < range.end));
}

pub(super) fn prologue(data: &[u8]) {
    let bytes: [u8; PROLOGUE] = filled(data);
    if let Ok(prologue) = Prologue::decode(&bytes) {
        assert_eq!(prologue.encode(), bytes);
        let _ = prologue.main_length();
    }
    let bytes: [u8; POINTER] = filled(data);
    if let Ok(pointer) = Pointer::decode(&bytes) {
        assert_eq!(pointer.encode(), bytes);
        let _ = pointer.run.is_page_space(u64::MAX);
    }
    let bytes: [u8; 40] = filled(data);
    if let Ok(root) = Root::decode(&bytes) {
        assert_eq!(root.encode(), bytes);
    }
}

pub(super) fn head(data: &[u8]) {
    let Some((lengths, head)) = data.split_first_chunk::<8>() else { return };
    let word = |at: usize| u32::from_le_bytes(filled(&lengths[at..]));
    let (stored, plain) = (word(0), word(4));
    let Ok(table) = decode_chunk_table(head, stored, plain) else { return };
    let mut ends = 0;
    let mut held = 0;
    for chunk in &table.chunks {
        assert_eq!(chunk.at, ends);
        ends += chunk.stored;
        held += chunk.plain_length;
    }
    assert_eq!((ends, held), (stored, plain));
    assert!(plain as usize <= MAX_DATA);
    let chunks: Vec<_> = table.chunks.iter().map(|chunk| (chunk.stored, chunk.raw, chunk.tag)).collect();
    assert!(head.len() >= head_length(chunks.len(), table.items.len()));
    let log2 = table.chunk_size.trailing_zeros() as u8;
    assert!(encode_head(log2, &chunks, &table.items, head.len()) == head, "a head is encoded otherwise");
}

pub(super) fn node(data: &[u8]) {
    let Ok(view) = node::decode(data) else { return };
    let encoded = match &view.entries {
        NodeEntries::Leaf(entries) => node::encode_leaf(&view.head, entries.iter().copied()),
        NodeEntries::Internal(entries) => node::encode_internal(&view.head, entries.iter().copied()),
    };
    assert!(encoded == data, "a node is encoded otherwise");
}

/// Decodes both records of a directory entry, and looks up an existing name and an arbitrary one.
pub(super) fn directory(data: &[u8]) {
    if let Ok(entry) = decode_list(data) {
        assert!(is_valid_name(entry.name));
        assert!(encode_list(&entry) == data);
    }
    let _ = find_in_index(data, b"name");
    let Ok(entries) = decode_index(data) else { return };
    assert!(encode_index(&entries) == data);
    for entry in &entries {
        assert!(is_valid_name(&entry.name));
        assert!(matches!(find_in_index(data, &entry.name), Ok(Some(_))));
    }
}

/// Decodes values of fixed size; the first byte selects the type.
pub(super) fn values(data: &[u8]) {
    let Some((&choice, value)) = data.split_first() else { return };
    let encoded = match choice % 6 {
        0 => InodeValue::decode(value).map(|v| v.encode().to_vec()),
        1 => Extent::decode(value).map(|v| v.encode().to_vec()),
        2 => ReferenceValue::decode(value).map(|v| v.encode().to_vec()),
        3 => DeadValue::decode(value).map(|v| v.encode().to_vec()),
        4 => SnapshotValue::decode(value).map(|v| v.encode()),
        _ => HistoryValue::decode(value).map(|v| v.encode().to_vec()),
    };
    if let Ok(encoded) = encoded {
        assert!(encoded == value, "a value is encoded otherwise");
    }
}

pub(super) fn xattr(data: &[u8]) {
    let Ok(entries) = decode_xattrs(data) else { return };
    assert!(entries.iter().all(|entry| entry.length as usize <= MAX_XATTR && !entry.name.is_empty()));
    assert!(encode_xattrs(&entries) == data);
}

/// Decodes a region of the space map. It has two encodings, so the values are compared.
pub(super) fn space(data: &[u8]) {
    if let Ok(bits) = space_map::decode(data) {
        assert!(space_map::decode(&space_map::encode(&bits)).is_ok_and(|again| again == bits));
    }
}

pub(super) fn acl(data: &[u8]) {
    let Ok(Some(mut acl)) = Acl::parse(data) else { return };
    let encoded = acl.encode();
    let again = Acl::parse(&encoded).ok().flatten().expect("an encoded list parses");
    assert!(again.encode() == encoded, "a list is encoded otherwise");
    assert_eq!(acl.mode_bits() & !0o777, 0);
    let (inherited, bits) = acl.inherit(0o644);
    assert_eq!(bits & !0o644, 0);
    assert!(inherited.is_none_or(|acl| Acl::parse(&acl.encode()).is_ok()));
    acl.set_mode(0o751);
    assert!(Acl::parse(&acl.encode()).is_ok());
}

pub(super) fn seen(data: &[u8]) {
    let Ok(seen) = RollbackState::decode(data) else { return };
    let encoded = seen.encode();
    assert!(encoded.len() == data.len());
    assert!(RollbackState::decode(&encoded).is_ok_and(|again| again.encode() == encoded));
}

pub(super) fn known(data: &[u8]) {
    let Ok(known) = Known::decode(data) else { return };
    let encoded = known.encode();
    assert!(encoded.len() == data.len());
    assert!(Known::decode(&encoded).is_ok_and(|again| again.encode() == encoded));
}

/// Address with space for the longest page after the first blocks.
const ADDRESS: u64 = 400;

fn cipher() -> &'static PageCipher {
    static CIPHER: OnceLock<PageCipher> = OnceLock::new();
    CIPHER.get_or_init(|| {
        PageCipher::new(&SecretKey::new([9; 32]), forge::ARCHIVE, true, Arc::new(SeededEnvironment::new(1)))
    })
}

/// Decodes an input into a page: kind, compression, lengths, owner, position, chunks, then its
/// bytes.
pub(in crate::archive::fuzzing) fn plain_page(data: &[u8]) -> Option<PlainPage<'static>> {
    let (head, rest) = data.split_first_chunk::<24>()?;
    let kind = match head[0] % 4 {
        0 => PageKind::Node,
        1 => PageKind::Data,
        2 => PageKind::Packed,
        _ => PageKind::DeltaList,
    };
    let plain_length = u32::from_le_bytes(filled(&head[4..8]));
    let (owner, position) = (u64::from_le_bytes(filled(&head[8..16])), u64::from_le_bytes(filled(&head[16..24])));
    let compressed = head[1] & 1 == 1;
    let content = match kind {
        PageKind::Node | PageKind::DeltaList => PageContent::Body(rest[..rest.len().min(NODE_CAPACITY)].to_vec()),
        PageKind::Data | PageKind::Packed => {
            // The encoder accepts only valid heads; invalid ones are tested by the target `head`.
            let count = usize::from(head[2]) % 32 + 1;
            let chunks = rest.chunks(rest.len().div_ceil(count).max(1)).take(32);
            let chunks = chunks.map(|chunk| (Cow::Owned(chunk.to_vec()), head[1] & 2 == 2)).collect();
            let items = (0..head[3] % 4).map(|n| PackedItem {
                ino: Ino(owner.wrapping_add(u64::from(n))),
                offset: position,
                start: plain_length / 4 * u32::from(n),
                length: plain_length / 4,
            });
            PageContent::Chunks { chunk_log2: 12 + head[1] / 4 % 6, chunks, items: items.collect() }
        }
    };
    if let PageContent::Chunks { chunks, .. } = &content
        && chunks.is_empty()
    {
        return None;
    }
    Some(PlainPage { kind, compressed, plain_length, owner, position, content })
}

pub(super) fn page(data: &[u8]) {
    let Some(plain) = plain_page(data) else { return };
    if plain.blocks() > 64 {
        return;
    }
    let run = Run::new(ADDRESS, plain.blocks());
    let sealed = cipher().seal(&plain, run, Generation(5)).expect("a page of its own length");
    let _ = cipher().open_prologue(ADDRESS, &sealed.bytes);
    if let Ok(opened) = cipher().open(&sealed.pointer, sealed.bytes.clone()) {
        match opened.prologue.kind {
            PageKind::Node => drop(node::decode(opened.body())),
            PageKind::DeltaList => drop(DeltaList::decode(opened.body())),
            PageKind::Data | PageKind::Packed => {
                let chunks = opened.table().map_or(0, |table| table.chunks.len());
                for chunk in 0..=chunks {
                    let _ = opened.read_chunk(chunk);
                }
            }
        }
    }
    read_as_file_data(&sealed.pointer, sealed.bytes);
}

/// Reads like a file read: first the head, then the requested chunks.
fn read_as_file_data(pointer: &crate::format::Pointer, bytes: Vec<u8>) {
    let storage = MemoryStorage::new();
    let placed = storage
        .set_len((ADDRESS + pointer.run.blocks) * BLOCK)
        .and_then(|()| storage.write_at(ADDRESS * BLOCK, &bytes));
    placed.expect("memory takes a page");
    let cipher = PageCipher::new(&SecretKey::new([9; 32]), forge::ARCHIVE, true, Arc::new(SeededEnvironment::new(1)));
    let pager = Pager::new(Arc::new(storage), cipher, 1 << 20);
    for (start, length) in [(0, 1), (0, 131_072), (4095, 2), (16_383, 20_000), (131_071, 1)] {
        let _ = pager.read_data(pointer, start, &mut vec![0; length]);
    }
}
