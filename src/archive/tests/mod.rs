//! Header copies and key slots: damage, tampering, hostile parameters, and a crash at any write of
//! a change.

mod backed_up_anew;
mod backup_faults;
mod backups;
mod checking;
mod compacted_snapshots;
mod compaction;
mod comparing;
mod counted;
mod damage;
mod damaged_commit;
mod erasure;
mod flipped_snapshots;
mod golden;
mod headers;
mod hostile;
mod importing;
mod key_changes;
mod key_slots;
mod repacking;
mod rescued_log;
mod rescued_snapshots;
mod restoring;
pub(crate) mod sample;
mod smallest;
mod snapshot_faults;
mod snapshots;
mod swapped;

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Archive, CreateOptions};
use crate::crypto::kdf::KdfCost;
use crate::crypto::{Passphrase, SecretKey};
use crate::env::{Environment, SeededEnvironment, seeds};
use crate::error::{Error, Refusal};
use crate::format::header::{
    FEATURE_LOG, Framing, HEADER_BYTES, KdfParameters, PassphraseSlot, SLOT_PASSPHRASE, encode_passphrase_slot,
};
use crate::format::{BLOCK, HEADER_START, MIN_BLOCKS};
use crate::fs::Creator;
use crate::keys::header::{self, Header, SlotBlock, empty_slots};
use crate::keys::slots::{self, NewKey, Secrets, SlotAddress};
use crate::keys::{self, UnlockLimits, UnlockedKey};
use crate::storage::simulated::{OpKind, SimulatedStorage};
use crate::storage::{MemoryStorage, Storage};

/// Loads a file of `format-spec/vectors`.
pub(crate) fn vectors(name: &str) -> serde_json::Value {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("format-spec/vectors");
    serde_json::from_str(&std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap()).unwrap()
}

/// Decodes groups of hexadecimal digits; `hh*n` repeats one byte.
pub(crate) fn unhex(value: &serde_json::Value) -> Vec<u8> {
    let byte = |digits: &str| u8::from_str_radix(digits, 16).unwrap();
    let group = |group: &str| match group.split_once('*') {
        Some((digits, count)) => vec![byte(digits); count.parse().unwrap()],
        None => (0..group.len() / 2).map(|i| byte(&group[2 * i..2 * i + 2])).collect(),
    };
    value.as_str().unwrap().split_whitespace().flat_map(group).collect()
}

const ARCHIVE: [u8; 16] = [7; 16];
const KEY: [u8; 32] = [9; 32];

fn passphrase(text: &str) -> Passphrase {
    Passphrase::new(text.as_bytes().to_vec())
}

fn secrets(text: &str) -> Secrets {
    Secrets::from(passphrase(text))
}

fn key() -> SecretKey {
    SecretKey::new(KEY)
}

fn slot(number: usize, text: &str, kdf: KdfCost) -> SlotBlock {
    let environment = SeededEnvironment::new(number as u64);
    let place = SlotAddress { archive: &ARCHIVE, slot: number, volume_key: &key() };
    slots::make(&place, &NewKey::Passphrase(&passphrase(text), kdf), "label".into(), &environment).unwrap().1
}

/// Returns an archive file with both header copies and nothing else.
fn archive(entries: &[(usize, &str, KdfCost)]) -> MemoryStorage {
    let storage = MemoryStorage::new();
    storage.set_len(MIN_BLOCKS * BLOCK).unwrap();
    let mut blocks = empty_slots();
    let mut kinds = [0; 32];
    for block in blocks.iter_mut() {
        SeededEnvironment::new(1).fill_random(block).unwrap();
    }
    for &(number, text, kdf) in entries {
        blocks[number] = slot(number, text, kdf);
        kinds[number] = SLOT_PASSPHRASE;
    }
    let framing = Framing {
        copy: 0,
        features: FEATURE_LOG,
        archive: ARCHIVE,
        sequence: 1,
        commitment: header::commitment(&key(), &ARCHIVE),
        slots: kinds,
        mac: [0; 32],
    };
    #[allow(clippy::needless_range_loop)] // the number is used beside the place
    for copy in 0..2 {
        header::write_copy(&storage, &framing, &blocks, copy, &key()).unwrap();
    }
    storage
}

fn flip(storage: &MemoryStorage, offset: u64) {
    let mut byte = [0];
    storage.read_at(offset, &mut byte).unwrap();
    storage.write_at(offset, &[byte[0] ^ 1]).unwrap();
}

fn opens(storage: &dyn Storage, text: &str) -> bool {
    let header = Header::read(storage).unwrap();
    match slots::unlock(&header, &secrets(text), &UnlockLimits::default()) {
        Ok(opened) => {
            header.authenticate(&opened.volume_key).unwrap();
            assert_eq!(opened.volume_key.bytes(), &KEY);
            true
        }
        Err(Error::WrongKey) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn every_slot_opens_with_its_own_passphrase_only() {
    let storage = archive(&[(0, "one", KdfCost::TEST), (31, "two", KdfCost::TEST)]);
    assert!(opens(&storage, "one") && opens(&storage, "two"));
    assert!(!opens(&storage, "three") && !opens(&storage, ""));
}

#[test]
fn either_copy_may_be_damaged_and_is_repaired() {
    #[allow(clippy::needless_range_loop)] // the number is used beside the place
    for copy in 0..2 {
        let start = HEADER_START[copy] * BLOCK;
        // Magic, version, sequence, a slot in use, an empty slot, MAC, checksum.
        for offset in [0, 16, 64, 4096 + 50, 20 * 4096, 4040, 4070] {
            let storage = archive(&[(0, "one", KdfCost::TEST)]);
            let whole = storage.contents();
            flip(&storage, start + offset);
            assert!(opens(&storage, "one"), "copy={copy} offset={offset}");
            Header::read(&storage).unwrap().repair(&storage, &key()).unwrap();
            assert!(storage.contents() == whole, "copy={copy} offset={offset}");
        }
    }
}

#[test]
fn two_damaged_copies_are_damage_and_no_wrong_password() {
    let storage = archive(&[(0, "one", KdfCost::TEST)]);
    for start in HEADER_START {
        flip(&storage, start * BLOCK + 5000);
    }
    assert!(matches!(Header::read(&storage), Err(Error::Damaged(_))));
}

#[test]
fn other_files_later_versions_and_short_files_are_told_apart() {
    let other = MemoryStorage::from_contents(b"PK\x03\x04 not an archive".repeat(100));
    assert!(matches!(Header::read(&other), Err(Error::NotArchive(_))));
    assert!(matches!(Header::read(&MemoryStorage::new()), Err(Error::NotArchive(_))));

    let storage = archive(&[(0, "one", KdfCost::TEST)]);
    let whole = storage.contents();
    for length in [100, 4096, HEADER_BYTES, 320 * 4096, whole.len() - 1] {
        let short = MemoryStorage::from_contents(whole[..length].to_vec());
        let error = Header::read(&short).err().unwrap();
        assert!(matches!(&error, Error::Damaged(detail) if detail.contains("truncated")), "{length}: {error}");
    }
    // Zeros at the end of the magic may be missing, and a truncated version is not another version.
    for length in 0..=24 {
        let short = MemoryStorage::from_contents(whole[..length].to_vec());
        let error = Header::read(&short).err().unwrap();
        assert!(matches!(error, Error::Damaged(_)) == (length >= 12), "{length}: {error}");
        assert!(matches!(error, Error::NotArchive(_)) == (length < 12), "{length}: {error}");
    }
    for start in HEADER_START {
        storage.write_at(start * BLOCK + 16, &2u32.to_le_bytes()).unwrap();
    }
    assert!(matches!(Header::read(&storage), Err(Error::UnsupportedVersion(_))));
    let short = MemoryStorage::from_contents(storage.contents()[..20].to_vec());
    assert!(matches!(Header::read(&short), Err(Error::UnsupportedVersion(_))));
}

/// Without the key one can compute the checksum but not the MAC.
#[test]
fn a_forged_newer_copy_is_refused() {
    let storage = archive(&[(0, "one", KdfCost::TEST)]);
    let header = Header::read(&storage).unwrap();
    let framing = Framing { sequence: 9, ..header.framing().clone() };
    let forged = crate::format::header::encode(&framing, &empty_slots());
    storage.write_at(0, &forged).unwrap();
    let header = Header::read(&storage).unwrap();
    assert_eq!(header.framing().sequence, 9);
    assert!(matches!(header.authenticate(&key()), Err(Error::Damaged(_))));
}

#[test]
fn the_cost_of_all_trials_together_is_bounded() {
    let storage = archive(&[(3, "one", KdfCost::TEST), (4, "two", KdfCost { memory_kib: 4096, passes: 3, lanes: 1 })]);
    let header = Header::read(&storage).unwrap();
    // 1 MiB for the first, rounded up, and 12 for the second.
    let tight = UnlockLimits { cost_mib: 12, ..UnlockLimits::default() };
    assert!(slots::unlock(&header, &secrets("one"), &tight).is_ok(), "the cheap slot is tried first");
    let error = slots::unlock(&header, &secrets("two"), &tight).err().unwrap();
    assert!(matches!(&error, Error::Refused(Refusal::KdfCost { slot: 4, most_cost: 12, .. })), "{error}");
    assert!(slots::unlock(&header, &secrets("two"), &UnlockLimits::raised(13)).is_ok());
}

#[test]
fn every_slot_is_tried_however_many_run_side_by_side() {
    let cost = |mib: u32, passes| KdfCost { memory_kib: mib * 1024, passes, lanes: 1 };
    let slots = [(0, "one", cost(2, 1)), (3, "two", cost(1, 1)), (7, "same", cost(1, 1)), (8, "three", cost(2, 1))];
    let storage = archive(&[&slots[..], &[(30, "same", cost(1, 3)), (31, "same", KdfCost::TEST)]].concat());
    let header = Header::read(&storage).unwrap();
    for together_mib in [0, 1, 3, 64] {
        let limits = UnlockLimits { together_mib, ..UnlockLimits::default() };
        for (slot, word, _) in slots {
            let opened = slots::unlock_all(&header, &secrets(word), &limits).unwrap();
            let numbers: Vec<usize> = opened.0.iter().map(|opened| opened.slot).collect();
            // Cheapest first, regardless of which ended first.
            assert_eq!((numbers, opened.1), (if word == "same" { vec![7, 31, 30] } else { vec![slot] }, true));
        }
        assert!(matches!(slots::unlock(&header, &secrets("wrong"), &limits), Err(Error::WrongKey)));
        // Slots beyond the budget are not tried concurrently with those within it.
        let tight = UnlockLimits { cost_mib: 7, ..limits };
        let (opened, all) = slots::unlock_all(&header, &secrets("same"), &tight).unwrap();
        assert_eq!((opened.len(), all), (2, false));
        let refused = slots::unlock(&header, &secrets("wrong"), &tight).err();
        assert!(matches!(refused, Some(Error::Refused(Refusal::KdfCost { slot: 30, .. }))), "{refused:?}");
    }
}

/// Would run for minutes and take 4 GiB if anything were derived.
#[test]
fn thirty_two_hostile_slots_are_refused_before_any_work() {
    let clear = |memory_kib, passes| {
        let kdf = KdfParameters { memory_kib, passes, lanes: 1 };
        let slot = PassphraseSlot { salt: [1; 32], kdf, commitment: [2; 32], nonce: [3; 24], sealed: vec![0; 528] };
        encode_passphrase_slot(&slot, &[0; 3464])
    };
    // The most expensive one that the format allows; one that takes all memory; bounds that the
    // format does not allow.
    for (memory_kib, passes) in [(4 << 20, 64), (4 << 20, 1), (u32::MAX, 1), (1 << 20, u32::MAX), (0, 1), (8, 0)] {
        let storage = archive(&[(0, "one", KdfCost::TEST)]);
        let header = Header::read(&storage).unwrap();
        let framing = Framing { sequence: 2, slots: [SLOT_PASSPHRASE; 32], ..header.framing().clone() };
        let mut blocks = empty_slots();
        blocks.iter_mut().for_each(|block| *block = clear(memory_kib, passes));
        for copy in 0..2 {
            header::write_copy(&storage, &framing, &blocks, copy, &key()).unwrap();
        }
        let header = Header::read(&storage).unwrap();
        let limits = UnlockLimits { together_mib: u64::MAX, ..UnlockLimits::default() };
        let error = slots::unlock(&header, &secrets("one"), &limits).err().unwrap();
        // Bounds are checked first (specification 3.2): a value out of bounds is damaged,
        // regardless of its cost.
        let bearable = memory_kib == 4 << 20;
        assert!(matches!(error, Error::Refused(Refusal::KdfCost { .. })) == bearable, "{memory_kib} {passes}: {error}");
        assert!(matches!(error, Error::Damaged(_)) != bearable, "{memory_kib} {passes}: {error}");
    }
}

/// Returns possible images after a crash at each operation of the storage from now on: after
/// process death only, if `deaths`, and after power failure.
fn crash_images(
    storage: &Arc<SimulatedStorage>,
    chance: &Arc<SeededEnvironment>,
    deaths: bool,
    cuts: usize,
) -> Arc<Mutex<Vec<Arc<SimulatedStorage>>>> {
    let images: Arc<Mutex<Vec<_>>> = Arc::default();
    let (weak, kept, chance) = (Arc::downgrade(storage), images.clone(), chance.clone());
    storage.on_op(Box::new(move |_: &OpKind| {
        let Some(storage) = weak.upgrade() else { return };
        let death = deaths.then(|| storage.process_death());
        kept.lock().extend(death);
        for _ in 0..cuts {
            kept.lock().push(storage.crash_random(&mut || chance.next_u64()));
        }
    }));
    images
}

/// HEADER-1 on a medium that tears and reorders: a power failure or process death at any write or
/// barrier of a change leaves one passphrase, in both directions, and an archive that opened once
/// without a further change opens again after the repair.
#[test]
fn a_power_cut_anywhere_in_a_change_leaves_one_passphrase() {
    let slots = [slot(0, "old", KdfCost::TEST), slot(0, "new", KdfCost::TEST)];
    let mut cuts = 0;
    for seed in seeds(0..=11) {
        let chance = Arc::new(SeededEnvironment::new(seed));
        let storage = SimulatedStorage::from_contents(&archive(&[(0, "old", KdfCost::TEST)]).contents());
        for change in 0..4 {
            let images = crash_images(&storage, &chance, true, 4);
            let mut header = Header::read(&*storage).unwrap();
            header.repair(&*storage, &key()).unwrap();
            header.replace_slots(&*storage, &[(0, (SLOT_PASSPHRASE, slots[(change + 1) % 2]))], &key()).unwrap();
            storage.on_op(Box::new(|_| {}));
            for image in images.lock().drain(..) {
                cuts += 1;
                let new = opens(&*image, "new");
                assert_ne!(new, opens(&*image, "old"), "exactly one of the two opens it");
                Header::read(&*image).unwrap().repair(&*image, &key()).unwrap();
                let again = image.crash_random(&mut || chance.next_u64());
                assert_eq!(opens(&*again, "new"), new);
            }
        }
    }
    assert!(cuts > 200, "only {cuts}");
}

/// Only the older or damaged copy is repaired, and only after a barrier that made the other one
/// durable.
#[test]
fn a_repair_never_leaves_less_than_one_whole_copy() {
    for seed in seeds(0..=19) {
        let chance = Arc::new(SeededEnvironment::new(seed));
        let memory = archive(&[(0, "one", KdfCost::TEST)]);
        let damaged = HEADER_START[(seed % 2) as usize] * BLOCK + 5 * 4096;
        flip(&memory, damaged);
        let storage = SimulatedStorage::from_contents(&memory.contents());
        let images = crash_images(&storage, &chance, false, 1);
        Header::read(&*storage).unwrap().repair(&*storage, &key()).unwrap();
        storage.on_op(Box::new(|_| {}));
        assert!(!images.lock().is_empty());
        for image in images.lock().iter() {
            assert!(opens(&**image, "one"));
        }
    }
}

/// After any failure of a creation no file remains.
#[test]
fn a_creation_that_fails_leaves_nothing() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a.lbx");
    // More memory than the format allows: fails after the creation of the file.
    let kdf = KdfCost { memory_kib: u32::MAX, ..KdfCost::TEST };
    let options = CreateOptions { kdf, creator: Creator { uid: 0, gid: 0, umask: None } };
    assert!(Archive::create(&path, &passphrase("one"), &options).is_err());
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    // A foreign file is not touched.
    std::fs::write(&path, b"mine").unwrap();
    let options = CreateOptions { kdf: KdfCost::TEST, ..options };
    assert!(Archive::create(&path, &passphrase("one"), &options).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
}

/// HEADER-1: after any torn write of a change, the archive opens with the old or the new
/// passphrase, and the next opening for writing repairs it.
#[test]
fn a_change_torn_anywhere_leaves_one_whole_copy() {
    let storage = archive(&[(0, "old", KdfCost::TEST)]);
    let before = storage.contents();
    let new = slot(0, "new", KdfCost::TEST);
    Header::read(&storage).unwrap().replace_slots(&storage, &[(0, (SLOT_PASSPHRASE, new))], &key()).unwrap();
    let after = storage.contents();
    assert!(opens(&storage, "new") && !opens(&storage, "old"));
    let copies = HEADER_START.map(|start| start as usize * BLOCK as usize);
    for (first, second) in [(copies[0], copies[1])] {
        for torn in [0, 512, 4096, 4608, HEADER_BYTES - 512, HEADER_BYTES] {
            // Copy 0 is being written.
            let mut bytes = before.clone();
            bytes[first..first + torn].copy_from_slice(&after[first..first + torn]);
            check_torn(bytes);
            // Copy 0 passed its barrier, copy 1 is being written.
            let mut bytes = before.clone();
            bytes[first..first + HEADER_BYTES].copy_from_slice(&after[first..first + HEADER_BYTES]);
            bytes[second..second + torn].copy_from_slice(&after[second..second + torn]);
            check_torn(bytes);
        }
    }
}

fn check_torn(bytes: Vec<u8>) {
    let storage = MemoryStorage::from_contents(bytes);
    let new = opens(&storage, "new");
    assert_ne!(new, opens(&storage, "old"), "exactly one of the two opens it");
    Header::read(&storage).unwrap().repair(&storage, &key()).unwrap();
    for copy in HEADER_START {
        // Without the other copy, the same passphrase opens it.
        let alone = MemoryStorage::from_contents(storage.contents());
        flip(&alone, copy * BLOCK + 9000);
        assert_eq!(opens(&alone, "new"), new);
    }
}

#[test]
fn an_unlocked_key_survives_its_way_through_a_pipe() {
    let sent = UnlockedKey { archive: ARCHIVE, volume_key: key(), by_recipient: false };
    let received = UnlockedKey::from_bytes(&sent.to_bytes()).unwrap();
    assert_eq!((received.archive, received.volume_key.bytes()), (ARCHIVE, &KEY));
    assert!(UnlockedKey::from_bytes(&[0; 47]).is_err() && UnlockedKey::from_bytes(&[0; 49]).is_err());
}
