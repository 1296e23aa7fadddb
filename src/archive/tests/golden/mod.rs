//! Golden archives of format version 1 (`tests/data/golden`): every later program reads the content
//! in the manifests, and refuses the damaged variants as recorded.

mod backup;
mod snapshots;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::super::fuzzing::{Forge, OWNER, create_on, noise, open_on};
use super::super::{Archive, CompactOptions, OpenOptions};
use super::sample::cipher;
use super::{ARCHIVE, archive, key, opens};
use crate::crypto::identity::Recipient;
use crate::crypto::kdf::KdfCost;
use crate::crypto::{KeyFile, NoPrompts, Passphrase, Prompts, RecoveryCode, SecretKey};
use crate::env::{Environment, SeededEnvironment};
use crate::error::{Error, Result};
use crate::format::record::DeltaList;
use crate::format::{BLOCK, HEADER_START, Ino, LOG, RING_SLOTS, ROOT_INO, Run, TreeId, slot_block};
use crate::frame::{PageCipher, delta_page};
use crate::fs::{FileSystem, RenameMode, SetAttributes, SetTime, XattrMode, mode};
use crate::keys::UnlockLimits;
use crate::keys::header::Header;
use crate::keys::slots::{self, NewKey, Secrets, SlotAddress};
use crate::storage::MemoryStorage;

const PASSPHRASES: [(usize, &str); 3] = [(0, "golden one"), (5, "golden two"), (31, "golden thirty-one")];

const GOLDEN: [&str; 7] = ["objects", "unclosed", "deep", "keys", "log", "snapshots", "backup"];

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the content by path in hexadecimal, since names may have any bytes.
fn listing(fs: &FileSystem) -> Result<Value> {
    let mut objects = BTreeMap::new();
    let mut pending = vec![(Vec::new(), ROOT_INO)];
    while let Some((path, ino)) = pending.pop() {
        let attributes = fs.attributes(ino)?;
        let kind = attributes.mode & mode::TYPE;
        let content = match kind {
            mode::REGULAR => fs.read(ino, 0, attributes.size as usize)?,
            mode::SYMLINK => fs.read_link(ino)?,
            _ => Vec::new(),
        };
        let mut xattrs = BTreeMap::new();
        for name in fs.list_xattrs(ino)?.split(|&b| b == 0).filter(|name| !name.is_empty()) {
            xattrs.insert(hex(name), hex(&Sha256::digest(fs.xattr(ino, name)?)));
        }
        if kind == mode::DIRECTORY {
            fs.list_directory(ino, 2, u64::MAX, false, &mut |entry, _| {
                pending.push(([&path[..], b"/", entry.name].concat(), entry.ino));
                std::ops::ControlFlow::Continue(())
            })?;
        }
        let size = if kind == mode::DIRECTORY { 0 } else { attributes.size };
        let links = if kind == mode::DIRECTORY { 0 } else { attributes.links };
        objects.insert(
            hex(&path),
            json!({
                "ino": ino.0, "mode": attributes.mode, "uid": attributes.uid, "gid": attributes.gid, "links": links,
                "size": size, "rdev": attributes.rdev, "sha256": hex(&Sha256::digest(&content)), "xattrs": xattrs,
                "mtime": [attributes.mtime.seconds, i64::from(attributes.mtime.nanos)],
            }),
        );
    }
    Ok(json!(objects))
}

/// Returns the result of opening these bytes and reading everything.
fn outcome(bytes: &[u8]) -> String {
    let storage = Arc::new(MemoryStorage::from_contents(bytes.to_vec()));
    match Header::read(&*storage).and_then(|_| open_on(storage, true)).and_then(|fs| listing(&fs)) {
        Ok(_) => "read".into(),
        Err(error) => error.to_string(),
    }
}

/// Returns the result of opening for writing and reading everything.
fn written(bytes: &[u8]) -> String {
    match open_on(Arc::new(MemoryStorage::from_contents(bytes.to_vec())), false).and_then(|fs| listing(&fs)) {
        Ok(_) => "read".into(),
        Err(error) => error.to_string(),
    }
}

fn file(fs: &FileSystem, directory: Ino, name: &[u8], content: &[u8]) -> Ino {
    let made = fs.make_node(directory, name, mode::REGULAR | 0o640, 0, OWNER).unwrap();
    fs.write(made.ino, 0, content).unwrap();
    made.ino
}

/// Creates every kind of object, attribute and page.
fn fill(fs: &FileSystem) {
    let below = fs.make_directory(ROOT_INO, b"directory", 0o2750, OWNER).unwrap().ino;
    let inline = file(fs, ROOT_INO, b"inline", b"a few bytes");
    file(fs, ROOT_INO, b"empty", b"");
    for n in 0..4 {
        file(fs, below, format!("packed {n}").as_bytes(), &noise(n, 700 + 100 * n as usize));
    }
    let text = file(fs, ROOT_INO, b"text", &b"all work and no play makes jack a dull boy\n".repeat(4000));
    let raw = file(fs, ROOT_INO, b"raw", &noise(40, 40_000));
    let sparse = file(fs, below, b"sparse", b"begin");
    fs.write(sparse, 3 << 40, b"end").unwrap();
    fs.set_attributes(sparse, &SetAttributes { size: Some(9_000_000), ..SetAttributes::default() }).unwrap();
    for (name, length) in [(&b"short"[..], 20), (b"inline", 3500), (b"longest", 4095)] {
        fs.make_symlink(below, &[b"link ", name].concat(), &vec![b'x'; length], OWNER).unwrap();
    }
    fs.make_node(below, b"fifo", mode::FIFO | 0o600, 0, OWNER).unwrap();
    fs.make_node(below, b"socket", mode::SOCKET | 0o700, 0, OWNER).unwrap();
    fs.make_node(below, b"block", mode::BLOCK | 0o660, 8 << 20 | 1, OWNER).unwrap();
    fs.make_node(below, b"character", mode::CHARACTER | 0o666, 1 << 20 | 3, OWNER).unwrap();
    file(fs, below, b"\xff not UTF-8 \n", b"name");
    file(fs, below, &[b'n'; 255], b"longest name");
    fs.link(text, below, b"text too").unwrap();
    fs.set_xattr(inline, b"user.short", b"value", XattrMode::Set).unwrap();
    fs.set_xattr(inline, b"user.empty", b"", XattrMode::Set).unwrap();
    fs.set_xattr(text, b"user.pieces", &noise(7, 20_000), XattrMode::Set).unwrap();
    let list = |entries: &[(u16, u16, u32)]| -> Vec<u8> {
        let entries = entries
            .iter()
            .flat_map(|(tag, bits, id)| [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat());
        2u32.to_le_bytes().into_iter().chain(entries).collect()
    };
    let none = u32::MAX;
    let access = list(&[(1, 6, none), (2, 4, 1001), (4, 4, none), (16, 4, none), (32, 0, none)]);
    fs.set_xattr(raw, b"system.posix_acl_access", &access, XattrMode::Set).unwrap();
    let default = list(&[(1, 7, none), (4, 5, none), (8, 7, 50), (16, 7, none), (32, 0, none)]);
    fs.set_xattr(below, b"system.posix_acl_default", &default, XattrMode::Set).unwrap();
    fs.sync().unwrap();
    // Pages named by two extents, and a fragmented one.
    let copy = file(fs, below, b"copy", b"");
    fs.copy_range(text, 0, copy, 0, 172_000, false).unwrap();
    fs.write(raw, 10_000, b"overwritten").unwrap();
    fs.sync().unwrap();
}

fn objects() -> Vec<u8> {
    let storage = Arc::new(archive(&PASSPHRASES.map(|(slot, text)| (slot, text, KdfCost::TEST))));
    let fs = create_on(storage.clone(), 21).unwrap();
    fill(&fs);
    fs.close().unwrap();
    drop(fs);
    for n in 0..3u8 {
        let fs = open_on(storage.clone(), false).unwrap();
        file(&fs, ROOT_INO, &[b's', b'0' + n], b"of another session");
        fs.close().unwrap();
    }
    storage.contents()
}

/// State after a kill: the last record is not closed and needed one barrier, with an orphan and a
/// trim offset.
fn unclosed() -> Vec<u8> {
    let storage = Arc::new(MemoryStorage::from_contents(objects()));
    let fs = open_on(storage.clone(), false).unwrap();
    let gone = file(&fs, ROOT_INO, b"gone", &noise(50, 9000));
    let cut = file(&fs, ROOT_INO, b"cut", &noise(51, 30_000));
    fs.sync().unwrap();
    fs.open(gone).unwrap();
    fs.unlink(ROOT_INO, b"gone").unwrap();
    fs.set_attributes(cut, &SetAttributes { size: Some(10_000), ..SetAttributes::default() }).unwrap();
    fs.sync().unwrap();
    storage.contents()
}

/// Nodes of several levels, raw and compressed, a two-barrier record with a delta list, and a
/// snapshot.
fn deep() -> Vec<u8> {
    let mut forge = Forge::of(objects()).unwrap();
    forge.leaf_bytes = 1200;
    let root = forge.live_root();
    forge.snapshot(1, root, b"golden");
    let list = DeltaList { allocated: vec![Run::new(390, 1)], ..DeltaList::default() };
    let pointer = forge.page(delta_page(list.encode()));
    forge.record.delta_list = pointer;
    forge.record.allocated = vec![(pointer.run, pointer.tag)];
    forge.record.two_barrier = true;
    forge.record.closed = false;
    forge.build([Some(root), None, None, None])
}

/// State after a kill of an archive with a log: the entries after the newest record contain each
/// kind of change, and no other record includes them. Returns also their number.
fn logged() -> (Vec<u8>, Value) {
    let storage = Arc::new(archive(&PASSPHRASES.map(|(slot, text)| (slot, text, KdfCost::TEST))));
    let fs = create_on(storage.clone(), 23).unwrap();
    let below = fs.make_directory(ROOT_INO, b"directory", 0o750, OWNER).unwrap().ino;
    let small = file(&fs, below, b"small", b"a few bytes");
    let overwritten = file(&fs, ROOT_INO, b"overwritten", &noise(60, 30_000));
    let cut = file(&fs, ROOT_INO, b"cut", &noise(61, 20_000));
    for name in [&b"named"[..], b"replaced", b"removed"] {
        file(&fs, ROOT_INO, name, name);
    }
    file(&fs, below, b"untouched", b"said by the record alone");
    fs.make_durable().unwrap();
    let base = fs.volume.durable().generation;
    let size = |size| SetAttributes { size: Some(size), ..SetAttributes::default() };
    let steps: [&dyn Fn(); 10] = [
        &|| fs.write(overwritten, 10_000, &noise(62, 5000)).unwrap(),
        &|| assert_ne!(file(&fs, below, b"created", b"known to an entry alone"), below),
        &|| fs.rename(ROOT_INO, b"named", ROOT_INO, b"replaced", RenameMode::Replace).unwrap(),
        &|| fs.set_attributes(cut, &size(9000)).map(|_| ()).unwrap(),
        &|| fs.write(cut, 12_000, b"behind a hole").unwrap(),
        &|| fs.set_attributes(overwritten, &size(12_000)).map(|_| ()).unwrap(),
        &|| fs.unlink(ROOT_INO, b"removed").unwrap(),
        &|| fs.set_xattr(below, b"user.logged", b"value", XattrMode::Set).unwrap(),
        &|| fs.write(small, 2, b"FEW").unwrap(),
        // Over a piece of a previous entry, with another change.
        &|| {
            fs.write(overwritten, 10_500, b"once more").unwrap();
            fs.make_symlink(below, b"link", b"../cut", OWNER).map(|_| ()).unwrap();
        },
    ];
    for step in steps {
        step();
        fs.sync().unwrap();
    }
    assert_eq!(fs.volume.durable().generation, base, "an fsync took a commit");
    let log = fs.volume.log_use();
    assert_eq!(log.entries, steps.len() as u64);
    let bytes = without_rest_of_log(storage.contents(), log.used_bytes);
    (bytes, json!({"entries": log.entries, "objects": listing(&fs).unwrap()}))
}

/// Zeros the unused part of the log, so that the file compresses well.
fn without_rest_of_log(mut bytes: Vec<u8>, used: u64) -> Vec<u8> {
    for block in LOG.0 + used / BLOCK..LOG.1 {
        let at = (block * BLOCK) as usize;
        bytes[at..at + BLOCK as usize].copy_from_slice(&filler());
    }
    bytes
}

fn filler() -> Vec<u8> {
    let mut filler = vec![0; BLOCK as usize];
    SeededEnvironment::new(1).fill_random(&mut filler).unwrap();
    filler
}

/// Fills unused slots of the ring with equal random bytes, so that the file compresses well.
fn settled(mut bytes: Vec<u8>) -> Vec<u8> {
    let filler = filler();
    for slot in 0..RING_SLOTS {
        let at = (slot_block(slot) * BLOCK) as usize;
        let block = &mut bytes[at..at + BLOCK as usize];
        if cipher().open_record(slot, block).is_none() {
            block.copy_from_slice(&filler);
        }
    }
    bytes
}

/// Every kind of key, as created and re-wrapped; the manifest has the secret of each slot.
fn keys() -> (Vec<u8>, Value) {
    let word = |text: &str| Passphrase::new(text.as_bytes().to_vec());
    let file = |seed: u8| [[seed; 40], [seed + 1; 40]].concat();
    let read = |seed: u8| KeyFile::read(&file(seed)[..]).unwrap();
    let code = |seed| RecoveryCode::generate(&SeededEnvironment::new(seed)).unwrap();
    let prompts: Arc<dyn Prompts> = Arc::new(NoPrompts);
    let identity = age::x25519::Identity::generate();
    let recipient = Recipient::parse(&identity.to_public().to_string()).unwrap();
    let identity_text = identity.to_string();
    let identity_text = age::secrecy::ExposeSecret::expose_secret(&identity_text);
    let storage = archive(&[(0, "golden one", KdfCost::TEST)]);
    let mut manifest = Vec::new();
    for rewrapped in [false, true] {
        let first = if rewrapped { 17 } else { 1 };
        let (old, new) = (SecretKey::new([5; 32]), key());
        let made_under = if rewrapped { &old } else { &new };
        let seed = first as u8;
        let (one, both) = (read(seed), read(seed + 2));
        let (alone, with) = (word(&format!("alone {first}")), word(&format!("with {first}")));
        let recovery = code(u64::from(seed));
        let ways = [
            (NewKey::Passphrase(&alone, KdfCost::TEST), json!({"passphrase": format!("alone {first}")})),
            (NewKey::KeyFile(&one), json!({"key_file": hex(&file(seed))})),
            (
                NewKey::KeyFileAndPassphrase(&both, &with, KdfCost::TEST),
                json!({"key_file": hex(&file(seed + 2)), "passphrase": format!("with {first}")}),
            ),
            (NewKey::RecoveryCode(&recovery), json!({"recovery_code": recovery.text().as_str()})),
            (NewKey::Recipient(&recipient, &prompts), json!({"identity": identity_text})),
        ];
        for (number, (new_key, mut way)) in ways.into_iter().enumerate() {
            let slot = first + number;
            let label = format!("golden {slot}");
            let place = SlotAddress { archive: &ARCHIVE, slot, volume_key: made_under };
            let mut made = slots::make(&place, &new_key, label.clone(), &SeededEnvironment::new(slot as u64)).unwrap();
            if rewrapped {
                let staging = archive(&[]);
                Header::read(&staging).unwrap().replace_slots(&staging, &[(slot, made)], &old).unwrap();
                let header = Header::read(&staging).unwrap();
                let about = slots::description(&header, slot, &old).unwrap();
                let place = SlotAddress { volume_key: &new, ..place };
                made = slots::rewrap(&place, &header, &about, &prompts, &SeededEnvironment::new(99)).unwrap();
            }
            Header::read(&storage).unwrap().replace_slots(&storage, &[(slot, made)], &new).unwrap();
            (way["slot"], way["label"]) = (json!(slot), json!(label));
            manifest.push(way);
        }
    }
    let storage = Arc::new(storage);
    let fs = create_on(storage.clone(), 21).unwrap();
    file_at_root(&fs);
    fs.close().unwrap();
    (storage.contents(), json!(manifest))
}

fn file_at_root(fs: &FileSystem) {
    file(fs, ROOT_INO, b"file", b"opened with any of the keys");
}

/// Run once, when the kinds of keys were added to the format: its file is frozen.
#[test]
#[ignore = "writes the golden archive of keys anew"]
fn write_golden_keys() {
    let (bytes, ways) = keys();
    let bytes = settled(bytes);
    let fs = open_on(Arc::new(MemoryStorage::from_contents(bytes.clone())), true).unwrap();
    let record = fs.volume.durable();
    let manifest = json!({
        "passphrases": ["golden one"], "keys": ways,
        "generation": record.generation.0, "closed": record.closed, "two_barrier": record.two_barrier,
        "sha256": hex(&Sha256::digest(&bytes)), "objects": listing(&fs).unwrap(), "damaged": [],
    });
    freeze("keys", &bytes, &manifest);
}

/// Run once, when the log was added to the format: its file is frozen.
#[test]
#[ignore = "writes the golden archive with a log anew"]
fn write_golden_log() {
    let (bytes, said) = logged();
    let bytes = settled(bytes);
    let record = open_on(Arc::new(MemoryStorage::from_contents(bytes.clone())), true).unwrap().volume.durable();
    let newest = (slot_block(record.generation.slot()) * BLOCK) as usize;
    let log = (LOG.0 * BLOCK) as usize;
    let with_log = PageCipher::new(&key(), ARCHIVE, true, Arc::new(SeededEnvironment::new(1)));
    let begins = |block: &u64| {
        let at = (block * BLOCK) as usize;
        with_log.open_entry_head(*block, &bytes[at..]).unwrap().is_some()
    };
    let last = ((LOG.0..LOG.1).rfind(begins).unwrap() * BLOCK) as usize;
    let damaged: Vec<Value> = [
        ("head of the first entry", log + 40),
        ("body of the first entry", log + 200),
        ("body of the last entry", last + 200),
        ("newest commit record", newest + 100),
    ]
    .into_iter()
    .map(|(what, at)| {
        let bytes = damaged(&bytes, &[at]);
        json!({"what": what, "flip": [at], "outcome": outcome(&bytes), "written": written(&bytes)})
    })
    .collect();
    let manifest = json!({
        "passphrases": PASSPHRASES.map(|(_, text)| text), "entries": said["entries"],
        "generation": record.generation.0, "closed": record.closed, "two_barrier": record.two_barrier,
        "sha256": hex(&Sha256::digest(&bytes)), "objects": said["objects"], "damaged": damaged,
    });
    freeze("log", &bytes, &manifest);
}

fn freeze(name: &str, bytes: &[u8], manifest: &Value) {
    let mut packed = zstd::bulk::Compressor::new(19).unwrap();
    packed.long_distance_matching(true).unwrap();
    packed.window_log(24).unwrap();
    std::fs::write(directory().join(format!("{name}.lbx.zst")), packed.compress(bytes).unwrap()).unwrap();
    let text = serde_json::to_string_pretty(manifest).unwrap();
    std::fs::write(directory().join(format!("{name}.json")), text + "\n").unwrap();
}

fn frozen(name: &str) -> (Vec<u8>, Value) {
    let manifest = std::fs::read_to_string(directory().join(format!("{name}.json"))).unwrap();
    let packed = std::fs::read(directory().join(format!("{name}.lbx.zst"))).unwrap();
    (zstd::bulk::decompress(&packed, 64 << 20).unwrap(), serde_json::from_str(&manifest).unwrap())
}

/// Returns the secrets that a manifest has for a slot.
fn secrets_of(way: &Value) -> Secrets {
    let unhex = |text: &str| -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    };
    let mut secrets = Secrets {
        passphrase: way["passphrase"].as_str().map(|text| Passphrase::new(text.into())),
        key_file: way["key_file"].as_str().map(|text| KeyFile::read(&unhex(text)[..]).unwrap()),
        recovery_code: way["recovery_code"].as_str().map(|text| RecoveryCode::parse(text.as_bytes()).unwrap()),
        ..Secrets::default()
    };
    if let Some(text) = way["identity"].as_str() {
        let prompts: Arc<dyn Prompts> = Arc::new(NoPrompts);
        secrets.identities.add(text.as_bytes(), "golden", &prompts).unwrap();
    }
    secrets
}

#[test]
fn every_key_of_the_golden_archive_opens_its_slot() {
    let (bytes, manifest) = frozen("keys");
    let storage = MemoryStorage::from_contents(bytes);
    let header = Header::read(&storage).unwrap();
    let ways = manifest["keys"].as_array().unwrap();
    let kinds: std::collections::BTreeSet<u8> = header.framing().slots.into_iter().collect();
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 17, 18, 19]);
    for way in ways {
        let (opened, _) = slots::unlock_all(&header, &secrets_of(way), &UnlockLimits::default()).unwrap();
        let slot = way["slot"].as_u64().unwrap() as usize;
        assert!(opened.iter().any(|opened| opened.slot == slot), "{slot}");
        header.authenticate(&opened[0].volume_key).unwrap();
        let about = slots::description(&header, slot, &opened[0].volume_key).unwrap();
        assert_eq!(about.label, way["label"].as_str().unwrap());
    }
}

/// Returns offsets of bytes that are flipped, alone or together.
fn damages(bytes: &[u8]) -> Vec<(&'static str, Vec<usize>)> {
    let storage = Arc::new(MemoryStorage::from_contents(bytes.to_vec()));
    let fs = open_on(storage, true).unwrap();
    let record = fs.volume.durable();
    let root = record.roots[TreeId::Live].pointer.run.offset() as usize;
    let newest = (slot_block(record.generation.slot()) * BLOCK) as usize;
    let copies = |at: usize| HEADER_START.iter().map(|start| (start * BLOCK) as usize + at).collect();
    vec![
        ("magic of both headers", copies(0)),
        ("version of both headers", copies(16)),
        ("a key slot of both headers", copies(5000)),
        ("magic of one header", vec![0]),
        ("newest commit record", vec![newest + 100]),
        ("root of the live tree, prologue", vec![root + 30]),
        ("root of the live tree, body", vec![root + 300]),
        ("root of the live tree, nonce", vec![root]),
    ]
}

fn damaged(bytes: &[u8], offsets: &[usize]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    offsets.iter().for_each(|&at| out[at] ^= 1);
    out
}

/// Run once for a version of the format: its files are frozen.
#[test]
#[ignore = "writes the golden archives anew, which only a new version of the format may do"]
fn write_golden_archives() {
    std::fs::create_dir_all(directory()).unwrap();
    for (name, bytes) in [("objects", objects()), ("unclosed", unclosed()), ("deep", deep())] {
        let bytes = settled(bytes);
        let fs = open_on(Arc::new(MemoryStorage::from_contents(bytes.clone())), true).unwrap();
        let record = fs.volume.durable();
        let damaged: Vec<Value> = damages(&bytes)
            .into_iter()
            .map(|(what, at)| json!({"what": what, "flip": at, "outcome": outcome(&damaged(&bytes, &at))}))
            .collect();
        let manifest = json!({
            "passphrases": PASSPHRASES.map(|(_, text)| text),
            "generation": record.generation.0, "closed": record.closed, "two_barrier": record.two_barrier,
            "sha256": hex(&Sha256::digest(&bytes)),
            "objects": listing(&fs).unwrap(),
            "damaged": damaged,
        });
        freeze(name, &bytes, &manifest);
    }
}

#[test]
fn golden_archives_are_read_and_refused_as_recorded() {
    for name in GOLDEN {
        let (bytes, manifest) = frozen(name);
        assert_eq!(hex(&Sha256::digest(&bytes)), manifest["sha256"].as_str().unwrap(), "{name} itself was changed");
        let storage = Arc::new(MemoryStorage::from_contents(bytes.clone()));
        for text in manifest["passphrases"].as_array().unwrap() {
            assert!(opens(&*storage, text.as_str().unwrap()), "{name}: {text}");
        }
        assert!(!opens(&*storage, "another"));
        let fs = open_on(storage, true).unwrap();
        let record = fs.volume.durable();
        assert_eq!(record.generation.0, manifest["generation"].as_u64().unwrap());
        assert_eq!(record.closed, manifest["closed"].as_bool().unwrap());
        assert_eq!(record.two_barrier, manifest["two_barrier"].as_bool().unwrap());
        assert_eq!(listing(&fs).unwrap(), manifest["objects"], "{name}");
        snapshots::assert_shown(&fs, &manifest["snapshots"], name);
        assert_eq!(backup::origin(&fs), manifest["backup_of"], "{name}");
        let findings = fs.check_structure(true).unwrap();
        assert!(findings.is_empty(), "{name}: {findings:?}");
        for variant in manifest["damaged"].as_array().unwrap() {
            let offsets: Vec<usize> =
                variant["flip"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap() as usize).collect();
            let damaged = damaged(&bytes, &offsets);
            assert_eq!(outcome(&damaged), variant["outcome"], "{name}: {}", variant["what"]);
            if let Some(outcome) = variant["written"].as_str() {
                assert_eq!(written(&damaged), outcome, "{name}: {}, to be written", variant["what"]);
            }
            if let Some(outcomes) = variant["snapshots"].as_object() {
                assert_eq!(
                    snapshots::outcomes(&damaged, outcomes.keys()),
                    variant["snapshots"],
                    "{name}: {}",
                    variant["what"]
                );
            }
        }
    }
}

/// Opening for writing gives the same result as reading, and the content is preserved by a writing
/// session.
#[test]
fn golden_archives_are_written_on() {
    for name in GOLDEN {
        let (bytes, manifest) = frozen(name);
        let storage = Arc::new(MemoryStorage::from_contents(bytes));
        let fs = open_on(storage.clone(), false).unwrap();
        assert_eq!(listing(&fs).unwrap(), manifest["objects"], "{name}");
        let root = fs.attributes(ROOT_INO).unwrap();
        file(&fs, ROOT_INO, b"added", b"by a later program");
        let mtime = Some(SetTime::To(root.mtime));
        fs.set_attributes(ROOT_INO, &SetAttributes { mtime, ..SetAttributes::default() }).unwrap();
        fs.close().unwrap();
        drop(fs);
        let fs = open_on(storage, true).unwrap();
        assert_eq!(backup::origin(&fs), Value::Null, "{name}: who writes to a backup makes it an archive");
        let mut now = listing(&fs).unwrap();
        assert_eq!(now.as_object_mut().unwrap().remove(&hex(b"/added")).unwrap()["size"], 18, "{name}");
        assert_eq!(now, manifest["objects"], "{name}, written");
        snapshots::assert_shown(&fs, &manifest["snapshots"], name);
        let mut findings = fs.check_structure(true).unwrap();
        if name != "deep" {
            // Its delta list names a page that never existed.
            findings.extend(fs.volume.check_space(true, &mut |_, _| {}).unwrap());
        }
        assert!(findings.is_empty(), "{name}: {findings:?}");
    }
}

/// An archive without log gets one by compaction, under a header that counts as newer: the old
/// header, substituted over the new content, is refused.
#[test]
fn compaction_gives_an_archive_of_before_a_log() {
    let (bytes, manifest) = frozen("objects");
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a.lbx");
    std::fs::write(&path, &bytes).unwrap();
    let framing = || {
        let storage = MemoryStorage::from_contents(std::fs::read(&path).unwrap());
        Header::read(&storage).unwrap().framing().clone()
    };
    let old = framing();
    assert!(!old.has_log());
    let key = crate::keys::unlock(&path, &super::passphrase(PASSPHRASES[0].1)).unwrap();
    Archive::compact(&path, &key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
    let new = framing();
    assert!(new.has_log() && new.archive == old.archive);
    assert_eq!(new.sequence, old.sequence + 1);
    let archive = Archive::open(&path, &key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    assert_eq!(listing(fs).unwrap(), manifest["objects"]);
    fs.make_node(ROOT_INO, b"later", mode::REGULAR | 0o600, 0, OWNER).unwrap();
    fs.make_durable().unwrap();
    let entries = fs.usage().log.entries;
    fs.make_node(ROOT_INO, b"synced", mode::REGULAR | 0o600, 0, OWNER).unwrap();
    fs.sync().unwrap();
    assert_eq!(fs.usage().log.entries, entries + 1);
    archive.close().unwrap();
    let mut put_back = std::fs::read(&path).unwrap();
    for start in HEADER_START {
        let header = (start * BLOCK) as usize..((start + 33) * BLOCK) as usize;
        put_back[header.clone()].copy_from_slice(&bytes[header]);
    }
    std::fs::write(&path, put_back).unwrap();
    for read_only in [true, false] {
        let error = Archive::open(&path, &key, &OpenOptions { read_only, ..OpenOptions::default() }).err().unwrap();
        assert!(matches!(&error, Error::OlderCopy(text) if text.contains("header")), "{error}");
    }
}
