//! Generators of random values and of damaged encodings for the property tests of this layer, and
//! the named vectors of `format-spec/vectors`, run against its decoders and encoders.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::header::{self, Description, KeySlot, PassphraseSlot, Rewrap};
use super::ids::{Generation, Key, MAX_PAGE_BLOCKS, Pointer, Run, Timestamp, TreeId};
use super::log::{ENTRY_HEAD, EntryHead, LogEntry, LogMark};
use super::node::{self, NodeEntries, key_at, put_key};
use super::page::{self, Prologue};
use super::record::{BackupOrigin, CommitRecord, DeltaList, Root};
use super::space;
use super::values::{
    DeadValue, Extent, HistoryValue, InodeValue, ListEntry, ReferenceValue, SnapshotValue, decode_index, decode_list,
    decode_xattrs, encode_index, encode_list, encode_xattrs,
};
use crate::error::{Error, Result};

/// JSON form of a decoded structure, and its bytes when encoded again.
type Rendered = (Value, Vec<u8>);

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes groups of hexadecimal digits; `hh*n` repeats one byte.
fn unhex(text: &str) -> Vec<u8> {
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    let mut out = Vec::new();
    for group in text.split_whitespace() {
        match group.split_once('*') {
            Some((digits, count)) => out.resize(out.len() + count.parse::<usize>().unwrap(), byte(digits.as_bytes())),
            None => out.extend(group.as_bytes().chunks(2).map(byte)),
        }
    }
    out
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn of_pointer(pointer: &Pointer) -> Value {
    if pointer.is_null() {
        return Value::Null;
    }
    json!({"address": pointer.run.address, "blocks": pointer.run.blocks, "generation": pointer.generation.0, "tag": hex(&pointer.tag)})
}

fn of_key(key: Key) -> Value {
    json!([key.object, key.kind, key.sub])
}

fn of_time(time: Timestamp) -> Value {
    json!([time.seconds, time.nanos])
}

fn of_root(root: &Root) -> Value {
    json!({"pointer": of_pointer(&root.pointer), "level": root.level})
}

fn of_runs(runs: &[Run]) -> Value {
    runs.iter().map(|run| json!([run.address, run.blocks])).collect()
}

/// Returns the bytes as an array; a vector of another length is refused before a decoder of fixed
/// arrays runs.
fn fixed<const N: usize>(bytes: &[u8]) -> Result<[u8; N]> {
    bytes.try_into().map_err(|_| Error::damaged("wrong length"))
}

fn prologue(bytes: &[u8]) -> Result<Rendered> {
    let it = Prologue::decode(&fixed(bytes)?)?;
    let value = json!({
        "kind": it.kind as u8, "compressed": it.compressed, "blocks": it.blocks, "stored_length": it.stored_length,
        "plain_length": it.plain_length, "generation": it.generation.0, "owner": it.owner, "position": it.position,
    });
    Ok((value, it.encode().to_vec()))
}

fn data_head(bytes: &[u8], vector: &Value) -> Result<Rendered> {
    let known = |name: &str| vector[name].as_u64().unwrap() as u32;
    let table = page::decode_chunk_table(bytes, known("stored_length"), known("plain_length"))?;
    let chunks: Value = table
        .chunks
        .iter()
        .map(|chunk| {
            json!({"at": chunk.at, "stored": chunk.stored, "raw": chunk.raw, "plain_length": chunk.plain_length, "tag": hex(&chunk.tag)})
        })
        .collect();
    let items: Value = table
        .items
        .iter()
        .map(|item| json!({"ino": item.ino.0, "offset": item.offset, "start": item.start, "length": item.length}))
        .collect();
    let entries: Vec<_> = table.chunks.iter().map(|chunk| (chunk.stored, chunk.raw, chunk.tag)).collect();
    let again = page::encode_head(table.chunk_size.ilog2() as u8, &entries, &table.items, bytes.len());
    Ok((json!({"cell_size": table.chunk_size, "cells": chunks, "items": items}), again))
}

fn tree_node(bytes: &[u8]) -> Result<Rendered> {
    let view = node::decode(bytes)?;
    let (entries, again): (Value, _) = match view.entries {
        NodeEntries::Leaf(entries) => (
            entries.iter().map(|(key, value)| json!([of_key(*key), hex(value)])).collect(),
            node::encode_leaf(&view.head, entries.into_iter()),
        ),
        NodeEntries::Internal(entries) => (
            entries.iter().map(|(key, pointer)| json!([of_key(*key), of_pointer(pointer)])).collect(),
            node::encode_internal(&view.head, entries.into_iter()),
        ),
    };
    let head = view.head;
    let value = json!({
        "level": head.level, "tree": head.tree, "lower": of_key(head.lower), "upper": of_key(head.upper), "entries": entries,
    });
    Ok((value, again))
}

fn inode(bytes: &[u8]) -> Result<Rendered> {
    let it = InodeValue::decode(bytes)?;
    let value = json!({
        "mode": it.mode, "uid": it.uid, "gid": it.gid, "links": it.links, "size": it.size, "bytes": it.bytes,
        "atime": of_time(it.atime), "mtime": of_time(it.mtime), "ctime": of_time(it.ctime), "btime": of_time(it.btime),
        "rdev": it.rdev, "flags": it.flags, "parent": it.parent.0, "next_sequence": it.next_sequence, "trim": it.trim,
        "next_piece": it.next_piece,
    });
    Ok((value, it.encode().to_vec()))
}

fn directory_index(bytes: &[u8]) -> Result<Rendered> {
    let entries = decode_index(bytes)?;
    let value = entries
        .iter()
        .map(|it| json!({"name": text(&it.name), "type": it.file_type, "sequence": it.sequence, "ino": it.ino.0}))
        .collect();
    Ok((value, encode_index(&entries)))
}

fn directory_list(bytes: &[u8]) -> Result<Rendered> {
    let it: ListEntry<'_> = decode_list(bytes)?;
    Ok((json!({"name": text(it.name), "type": it.file_type, "ino": it.ino.0}), encode_list(&it)))
}

fn xattr(bytes: &[u8]) -> Result<Rendered> {
    let entries = decode_xattrs(bytes)?;
    let value = entries
        .iter()
        .map(|it| json!({"name": text(&it.name), "length": it.length, "piece": it.piece, "value": hex(&it.value)}))
        .collect();
    Ok((value, encode_xattrs(&entries)))
}

fn snapshot(bytes: &[u8]) -> Result<Rendered> {
    let it = SnapshotValue::decode(bytes)?;
    let value = json!({
        "generation": it.generation.0, "time": of_time(it.time), "root": of_root(&it.root), "inodes": it.inodes,
        "name": text(&it.name),
    });
    Ok((value, it.encode()))
}

fn record(bytes: &[u8]) -> Result<Rendered> {
    let it = CommitRecord::decode(bytes)?;
    let allocated: Value = it
        .allocated
        .iter()
        .map(|(run, tag)| json!({"address": run.address, "blocks": run.blocks, "tag": hex(tag)}))
        .collect();
    let freed: Value = it.freed.iter().map(|run| json!({"address": run.address, "blocks": run.blocks})).collect();
    let value = json!({
        "generation": it.generation.0, "previous_tag": hex(&it.previous_tag), "session": hex(&it.session),
        "session_first": it.session_first.0, "header_sequence": it.header_sequence, "time": of_time(it.time),
        "two_barrier": it.two_barrier, "closed": it.closed, "roots": TreeId::ALL.map(|tree| of_root(&it.roots[tree])),
        "next_ino": it.next_ino, "inodes": it.inodes, "used_blocks": it.used_blocks, "total_blocks": it.total_blocks,
        "next_dead": it.next_dead, "next_snapshot": it.next_snapshot, "newest_snapshot": it.newest_snapshot.0,
        "newest_snapshot_id": it.newest_snapshot_id, "checkpoint": it.checkpoint.0,
        "delta_list": of_pointer(&it.delta_list), "allocated": allocated, "freed": freed,
        "pending": it.pending.as_ref().map(of_mark), "origin": it.origin.as_ref().map(of_origin),
    });
    Ok((value, it.encode()))
}

fn of_origin(it: &BackupOrigin) -> Value {
    json!({
        "session": hex(&it.session), "first": it.first.0, "generation": it.generation.0, "tag": hex(&it.tag),
        "time": of_time(it.time),
    })
}

fn of_mark(it: &LogMark) -> Value {
    json!({"generation": it.generation.0, "tag": hex(&it.record), "number": it.number, "entry_tag": hex(&it.entry)})
}

/// Decodes head and body, concatenated.
fn log_entry(bytes: &[u8]) -> Result<Rendered> {
    let (head, body) = bytes.split_at(ENTRY_HEAD.min(bytes.len()));
    let head = EntryHead::decode(head)?;
    assert_eq!(body.len(), head.length as usize, "a vector has the body that its head says");
    let it = LogEntry::decode(body)?;
    let ranges: Value =
        it.dropped.iter().map(|range| json!({"ino": range.ino.0, "first": range.start, "end": range.end})).collect();
    let records: Value =
        it.records.iter().map(|(key, value)| json!([of_key(*key), value.as_deref().map(hex)])).collect();
    let pieces: Value = it
        .pieces
        .iter()
        .map(|piece| json!({"ino": piece.ino.0, "offset": piece.offset, "data": hex(&piece.data)}))
        .collect();
    let value = json!({
        "generation": head.generation.0, "tag": hex(&head.record), "number": head.number, "length": head.length,
        "previous": hex(&head.previous), "time": of_time(head.time), "blocks": head.blocks,
        "next_ino": it.next_ino, "inodes": it.inodes, "ranges": ranges, "records": records, "pieces": pieces,
    });
    Ok((value, [&head.encode()[..], &it.encode()].concat()))
}

fn region(bytes: &[u8]) -> Result<Rendered> {
    let bits = space::decode(bytes)?;
    let mut runs: Vec<[usize; 2]> = Vec::new();
    for block in (0..bits.len() * 64).filter(|block| bits[block / 64] >> (block % 64) & 1 == 1) {
        match runs.last_mut() {
            Some([first, length]) if *first + *length == block => *length += 1,
            _ => runs.push([block, 1]),
        }
    }
    Ok((json!(runs), space::encode(&bits)))
}

fn header_copy(bytes: &[u8], copy: u8) -> Result<Rendered> {
    let it = header::decode(bytes, copy)?;
    let slots: Vec<[u8; 4096]> = it.bytes[4096..].chunks_exact(4096).map(|slot| slot.try_into().unwrap()).collect();
    let value = json!({
        "copy": it.framing.copy, "archive": hex(&it.framing.archive), "sequence": it.framing.sequence,
        "commitment": hex(&it.framing.commitment), "slots": it.framing.slots, "mac": hex(&it.framing.mac),
        "features": it.framing.features, "read_only_features": it.read_only_features(), "compatible_features": it.compatible_features(),
    });
    Ok((value, header::encode(&it.framing, slots.as_slice().try_into().unwrap())))
}

fn passphrase_slot(bytes: &[u8]) -> Result<Rendered> {
    let it: PassphraseSlot = header::decode_passphrase_slot(bytes)?;
    let value = json!({
        "salt": hex(&it.salt), "memory_kib": it.kdf.memory_kib, "passes": it.kdf.passes, "lanes": it.kdf.lanes,
        "commitment": hex(&it.commitment), "nonce": hex(&it.nonce), "sealed": hex(&it.sealed),
    });
    let padding = bytes[632..].try_into().unwrap();
    Ok((value, header::encode_passphrase_slot(&it, padding).to_vec()))
}

fn key_slot(bytes: &[u8], kind: u8) -> Result<Rendered> {
    let it = KeySlot::decode(bytes, kind)?;
    let value = json!({
        "salt": hex(&it.salt), "kdf": it.kdf.map(|kdf| [kdf.memory_kib, kdf.passes, kdf.lanes]), "commitment": hex(&it.commitment),
        "nonce": hex(&it.nonce), "sealed": hex(&it.sealed), "ephemeral": hex(&it.ephemeral), "age": hex(&it.age),
    });
    Ok((value, it.encode(kind, &fixed(bytes)?).to_vec()))
}

fn description(bytes: &[u8]) -> Result<Rendered> {
    let it = Description::decode(bytes)?;
    let (public, recipient) = match &it.rewrap {
        Rewrap::Public(public) => (Some(hex(public)), None),
        Rewrap::Recipient(text) => (None, Some(text.clone())),
    };
    let value = json!({"created": of_time(it.created), "label": it.label, "public": public, "recipient": recipient});
    Ok((value, it.encode()?.to_vec()))
}

/// Decodes `bytes` as the named structure; `vector` has further inputs of the reader.
fn render(structure: &str, bytes: &[u8], vector: &Value) -> Result<Rendered> {
    match structure {
        "pointer" => Pointer::decode(&fixed(bytes)?).map(|it| (of_pointer(&it), it.encode().to_vec())),
        "key" => {
            let key = key_at(&fixed::<{ node::KEY }>(bytes)?, 0);
            let mut again = Vec::new();
            put_key(&mut again, key);
            Ok((of_key(key), again))
        }
        "prologue" => prologue(bytes),
        "data_head" => data_head(bytes, vector),
        "node" => tree_node(bytes),
        "inode" => inode(bytes),
        "extent" => Extent::decode(bytes).map(|it| {
            let value =
                json!({"page": of_pointer(&it.page), "start": it.start, "length": it.length, "born": it.born.0});
            (value, it.encode().to_vec())
        }),
        "directory_index" => directory_index(bytes),
        "directory_list" => directory_list(bytes),
        "xattr" => xattr(bytes),
        "reference" => ReferenceValue::decode(bytes)
            .map(|it| (json!({"run_blocks": it.run_blocks, "count": it.count}), it.encode().to_vec())),
        "dead" => DeadValue::decode(bytes).map(|it| {
            let value = json!({"address": it.run.address, "blocks": it.run.blocks, "born": it.born.0});
            (value, it.encode().to_vec())
        }),
        "snapshot" => snapshot(bytes),
        "history" => HistoryValue::decode(bytes).map(|it| {
            let value = json!({"session": hex(&it.session), "last": it.last.0, "last_tag": hex(&it.last_tag)});
            (value, it.encode().to_vec())
        }),
        "record" => record(bytes),
        "log_entry" => log_entry(bytes),
        "delta_list" => DeltaList::decode(bytes).map(|it| {
            let value =
                json!({"next": of_pointer(&it.next), "allocated": of_runs(&it.allocated), "freed": of_runs(&it.freed)});
            (value, it.encode())
        }),
        "space" => region(bytes),
        "header" => header_copy(bytes, vector["copy"].as_u64().unwrap() as u8),
        "passphrase_slot" => passphrase_slot(bytes),
        "key_slot" => key_slot(bytes, vector["kind"].as_u64().unwrap() as u8),
        "description" => description(bytes),
        other => panic!("no decoder for {other}"),
    }
}

fn verdict(error: &Error) -> &'static str {
    match error {
        Error::NotArchive(_) => "not an archive",
        Error::UnsupportedVersion(_) => "unsupported",
        Error::Damaged(_) => "damaged",
        other => panic!("a decoder must not fail with {other:?}"),
    }
}

/// Runs one file; returns its number of vectors.
fn run_file(file: &Value) -> usize {
    let structure = file["structure"].as_str().unwrap();
    let mut names = BTreeSet::new();
    let (accepted, refused) = (file["accepted"].as_array().unwrap(), file["refused"].as_array().unwrap());
    for vector in accepted {
        let name = vector["name"].as_str().unwrap();
        assert!(names.insert(name), "{structure}: {name} twice");
        let bytes = unhex(vector["bytes"].as_str().unwrap());
        let (value, again) =
            render(structure, &bytes, vector).unwrap_or_else(|error| panic!("{structure}: {name}: {error}"));
        assert_eq!(value, vector["value"], "{structure}: {name}");
        if vector["canonical"] != json!(false) {
            assert_eq!(hex(&again), hex(&bytes), "{structure}: {name}");
        }
    }
    for vector in refused {
        let name = vector["name"].as_str().unwrap();
        assert!(names.insert(name), "{structure}: {name} twice");
        let bytes = unhex(vector["bytes"].as_str().unwrap());
        match render(structure, &bytes, vector) {
            Ok(_) => panic!("{structure}: {name} was accepted"),
            Err(error) => assert_eq!(verdict(&error), vector["as"], "{structure}: {name}: {error}"),
        }
    }
    names.len()
}

#[test]
fn every_vector_decodes_or_is_refused_as_it_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("format-spec/vectors");
    let mut structures = BTreeSet::new();
    let mut vectors = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let file: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
            if file["structure"].is_null() || file["structure"] == "seal" {
                continue; // primitives and seals need keys, which this layer does not have: see crypto and frame
            }
            assert_eq!(path.file_stem().unwrap().to_str(), file["structure"].as_str());
            structures.insert(file["structure"].as_str().unwrap().to_owned());
            vectors += run_file(&file);
        }
    }
    assert!(structures.len() >= 20 && vectors >= 310, "structures={} vectors={vectors}", structures.len());
}

pub(super) fn run() -> impl Strategy<Value = Run> {
    (0..1u64 << 48, 1..=MAX_PAGE_BLOCKS).prop_map(|(address, blocks)| Run { address, blocks })
}

pub(super) fn pointer() -> impl Strategy<Value = Pointer> {
    (run(), 1..u64::MAX, any::<[u8; 16]>()).prop_map(|(run, generation, tag)| Pointer {
        run,
        generation: Generation(generation),
        tag,
    })
}

/// Small components, so that neighbours share prefixes.
pub(super) fn key() -> impl Strategy<Value = Key> {
    (0..4u64, 0..4u8, 0..1000u64).prop_map(|(object, kind, sub)| Key { object, kind, sub })
}

pub(super) fn time() -> impl Strategy<Value = Timestamp> {
    (any::<i64>(), 0..1_000_000_000u32).prop_map(|(seconds, nanos)| Timestamp { seconds, nanos })
}

/// A name that a directory entry may have.
pub(super) fn name() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>().prop_map(|b| if b == 0 || b == b'/' || b == b'.' { b'a' } else { b }), 1..=255)
}

/// Changes up to four bytes of an encoding and may cut or extend it.
pub(crate) fn mutated(encoded: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let length = encoded.len().max(1);
    (vec((0..length, any::<u8>()), 0..=4), 0..=length, vec(any::<u8>(), 0..4), 0..4u8).prop_map(
        move |(changes, cut, tail, how)| {
            let mut bytes = encoded.clone();
            for (at, value) in changes {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = value;
                }
            }
            match how {
                0 => bytes.truncate(cut),
                1 => bytes.extend(tail),
                _ => {}
            }
            bytes
        },
    )
}

/// Random bytes of 0..=`longest`.
pub(crate) fn noise(longest: usize) -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..=longest)
}
