//! Runs `format-spec/vectors/seal.json`: keys, slots, headers, pages and records sealed by another
//! implementation.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use crate::crypto::kdf::{KdfCost, argon2id, hkdf, hmac_sha256};
use crate::crypto::{Passphrase, SecretKey, wrap};
use crate::env::SeededEnvironment;
use crate::error::Result;
use crate::format::header::{self, SLOT_PASSPHRASE, decode_passphrase_slot};
use crate::format::log::{EntryHead, LogEntry};
use crate::format::page::PageKind;
use crate::format::{ArchiveId, FORMAT_VERSION, Generation, Pointer, Run, Tag};
use crate::frame::PageCipher;

struct Seals {
    file: Value,
    archive: ArchiveId,
    volume_key: SecretKey,
}

impl Seals {
    fn read() -> Seals {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("format-spec/vectors/seal.json");
        let file: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let archive = fixed(&file["archive"]);
        let volume_key = SecretKey::new(fixed(&file["volume_key"]));
        Seals { file, archive, volume_key }
    }

    fn cipher(&self) -> PageCipher {
        PageCipher::new(&self.volume_key, self.archive, true, Arc::new(SeededEnvironment::new(1)))
    }

    fn all(&self, part: &str) -> &[Value] {
        let vectors = self.file[part].as_array().unwrap();
        assert!(!vectors.is_empty());
        vectors
    }
}

fn unhex(value: &Value) -> Vec<u8> {
    let byte = |digits: &str| u8::from_str_radix(digits, 16).unwrap();
    let mut out = Vec::new();
    for group in value.as_str().unwrap().split_whitespace() {
        match group.split_once('*') {
            Some((digits, count)) => out.resize(out.len() + count.parse::<usize>().unwrap(), byte(digits)),
            None => out.extend((0..group.len() / 2).map(|i| byte(&group[2 * i..2 * i + 2]))),
        }
    }
    out
}

fn fixed<const N: usize>(value: &Value) -> [u8; N] {
    unhex(value).try_into().unwrap()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

fn pointer(value: &Value) -> Pointer {
    Pointer {
        run: Run::new(number(&value["address"]), number(&value["blocks"])),
        generation: Generation(number(&value["generation"])),
        tag: fixed(&value["tag"]),
    }
}

#[test]
fn keys_are_those_of_the_labels() {
    let seals = Seals::read();
    for vector in seals.all("keys") {
        let key = hkdf(&seals.volume_key, &seals.archive, vector["label"].as_str().unwrap());
        assert_eq!(*key.bytes(), fixed::<32>(&vector["key"]), "{vector}");
    }
}

#[test]
fn a_passphrase_opens_a_slot_of_another_writer() {
    let seals = Seals::read();
    for vector in seals.all("passphrase_slots") {
        let block = unhex(&vector["bytes"]);
        let slot = decode_passphrase_slot(&block).unwrap();
        let passphrase = Passphrase::new(vector["passphrase"].as_str().unwrap().into());
        let cost = KdfCost { memory_kib: slot.kdf.memory_kib, passes: slot.kdf.passes, lanes: slot.kdf.lanes };
        let kek = argon2id(&passphrase, &slot.salt, cost).unwrap();
        assert_eq!(*kek.bytes(), fixed::<32>(&vector["kek"]));
        assert_eq!(wrap::commitment(&kek, &seals.archive), slot.commitment);
        let place = [number(&vector["number"]) as u8, SLOT_PASSPHRASE];
        let aad =
            [&b"lockbox/v1/slot"[..], &FORMAT_VERSION.to_le_bytes(), &seals.archive, &place, &block[..80]].concat();
        let secret = wrap::unwrap(&kek, &seals.archive, &slot.nonce, &aad, &slot.sealed).unwrap();
        assert_eq!(secret.volume_key.bytes(), seals.volume_key.bytes());
        assert_eq!(secret.label, vector["label"].as_str().unwrap());
    }
}

#[test]
fn the_header_mac_is_that_of_another_writer() {
    let seals = Seals::read();
    let key = hkdf(&seals.volume_key, &seals.archive, "lockbox/v1/header");
    for vector in seals.all("headers") {
        let parsed = header::decode(&unhex(&vector["bytes"]), number(&vector["copy"]) as u8).unwrap();
        assert_eq!(hmac_sha256(&key, &header::mac_input(&parsed.bytes)), parsed.framing.mac);
    }
}

#[test]
fn pages_of_another_writer_open_where_their_pointer_says() {
    let seals = Seals::read();
    for vector in seals.all("pages") {
        let opened = seals.cipher().open(&pointer(&vector["pointer"]), unhex(&vector["bytes"])).unwrap();
        let (found, want) = (opened.prologue, &vector["prologue"]);
        assert_eq!(found.kind as u64, number(&want["kind"]));
        assert_eq!(found.compressed, want["compressed"].as_bool().unwrap());
        assert_eq!(u64::from(found.stored_length), number(&want["stored_length"]));
        assert_eq!((found.owner, found.position), (number(&want["owner"]), number(&want["position"])));
        // An opened node is decompressed already; the vector has the stored body.
        if found.kind == PageKind::Node {
            assert_eq!(opened.body().len(), 42);
            continue;
        }
        assert_eq!(opened.body(), unhex(&vector["body"]));
        if let Some(data) = vector.get("data") {
            let chunks = opened.table().unwrap().chunks.len();
            let plain: Vec<u8> = (0..chunks).flat_map(|chunk| opened.read_chunk(chunk).unwrap()).collect();
            assert_eq!(plain, unhex(data));
        }
    }
}

#[test]
fn pages_open_nowhere_else() {
    let seals = Seals::read();
    for vector in seals.all("pages_refused") {
        let result = seals.cipher().open(&pointer(&vector["pointer"]), unhex(&vector["bytes"]));
        assert!(result.is_err(), "{}", vector["name"]);
    }
}

#[test]
fn records_open_in_their_slot_only() {
    let seals = Seals::read();
    for vector in seals.all("records") {
        let (plain, tag) = seals.cipher().open_record(number(&vector["slot"]), &unhex(&vector["bytes"])).unwrap();
        assert_eq!(plain, unhex(&vector["plain"]));
        assert_eq!(tag, fixed::<16>(&vector["tag"]));
    }
    for vector in seals.all("records_refused") {
        let opened = seals.cipher().open_record(number(&vector["slot"]), &unhex(&vector["bytes"]));
        assert!(opened.is_none(), "{}", vector["name"]);
    }
}

/// Opens the entry in `bytes`; returns head, body and tag, or `None` when a seal does not open.
fn opened_entry(seals: &Seals, vector: &Value) -> Result<Option<(EntryHead, LogEntry, Tag)>> {
    let (block, bytes) = (number(&vector["block"]), unhex(&vector["bytes"]));
    let Some(begun) = seals.cipher().open_entry_head(block, &bytes)? else { return Ok(None) };
    let Some((body, tag)) = seals.cipher().open_entry_body(&begun, block, bytes)? else { return Ok(None) };
    Ok(Some((begun.head, LogEntry::decode(&body)?, tag)))
}

#[test]
fn log_entries_open_at_their_block_only() {
    let seals = Seals::read();
    for vector in seals.all("log_entries") {
        let (head, entry, tag) = opened_entry(&seals, vector).unwrap().unwrap();
        assert_eq!(head.encode()[..], unhex(&vector["head"]));
        let (body, padded) = (entry.encode(), unhex(&vector["body"]));
        assert_eq!((&body[..], body.len()), (&padded[..body.len()], head.length as usize));
        assert_eq!(tag, fixed::<16>(&vector["tag"]));
    }
    for vector in seals.all("log_entries_refused") {
        let refused = opened_entry(&seals, vector);
        let opens = vector["name"] == "an_entry_with_padding_that_is_not_zero";
        assert!(if opens { refused.is_err() } else { matches!(refused, Ok(None)) }, "{}", vector["name"]);
    }
}
