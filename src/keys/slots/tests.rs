//! Tests of the slots. The vectors are those of `format-spec/vectors/slots.json`: keys and sealed
//! bytes of another implementation for each kind of slot, step by step.

use super::super::header::empty_slots;
use super::*;
use crate::archive::tests::{unhex, vectors};
use crate::crypto::wrap;
use crate::format::header::{Framing, encode};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

const MIB: u32 = 1024;

fn price(slot: &Option<(u64, u32)>) -> Option<Price> {
    slot.map(|(cost, mib)| Price { cost, memory_kib: mib * MIB })
}

fn trials(slots: &[Option<(u64, u32)>], together_mib: u32, processors: usize) -> Trials<'_, Option<(u64, u32)>> {
    Trials { processors, ..Trials::new(slots, price, u64::from(together_mib * MIB)) }
}

/// Returns the number of concurrent trials, group by group.
fn groups(slots: &[Option<(u64, u32)>], together_mib: u32, processors: usize) -> Vec<usize> {
    let mut trials = trials(slots, together_mib, processors);
    std::iter::from_fn(|| trials.group().map(<[_]>::len)).collect()
}

#[test]
fn derivations_run_side_by_side_as_processors_and_memory_allow() {
    let slots = [Some((1536, 512)); 5];
    assert_eq!(groups(&slots, 4096, 2), [1, 2, 2]);
    assert_eq!(groups(&slots, 4096, 16), [1, 4]);
    assert_eq!(groups(&slots, 1535, 16), [1, 2, 2]);
    assert_eq!(groups(&slots, 1023, 16), [1; 5]);
    assert_eq!(groups(&slots, 0, 16), [1; 5], "one runs whatever it takes");
    assert_eq!(groups(&slots, 4096, 1), [1; 5]);
    assert_eq!(groups(&[], 4096, 2), [0; 0]);
}

#[test]
fn what_may_ask_somebody_is_tried_alone_and_before() {
    let slots = [None, None, Some((3, 1)), Some((3, 1)), Some((3, 1))];
    assert_eq!(groups(&slots, 4096, 8), [1, 1, 1, 2]);
}

/// In units of cost, for any slots: the time at which a right secret is reported, when its
/// group has ended.
#[test]
fn no_right_secret_is_told_later_than_one_after_the_other() {
    let mut states = 1u64;
    let mut random = |below: u64| {
        states = states.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (states >> 33) % below
    };
    let mut together = 0;
    for round in 0..2000 {
        let mut costs: Vec<u64> = (0..=random(12)).map(|_| 1 + random(4).pow(4)).collect();
        costs.sort_unstable();
        let slots: Vec<_> = costs.iter().map(|&cost| Some((cost, cost as u32))).collect();
        let (most, processors) = (random(200) as u32, 1 + random(8) as usize);
        let mut trials = trials(&slots, most, processors);
        let (mut ended, mut in_turn, mut tried) = (0, 0, 0);
        while let Some(group) = trials.group() {
            let memory: u64 = group.iter().flatten().map(|&(cost, _)| cost).sum();
            assert!(group.len() == 1 || memory <= u64::from(most), "round {round}: {costs:?}");
            assert!(group.len() <= processors);
            ended += group.iter().flatten().map(|&(cost, _)| cost).max().unwrap();
            assert!(ended <= in_turn + costs[tried], "round {round}: {costs:?}");
            in_turn += memory;
            tried += group.len();
            together += usize::from(group.len() > 1);
        }
        assert_eq!(tried, costs.len());
    }
    assert!(together > 1000, "few ran side by side: {together}");
}

#[test]
fn a_group_runs_at_once_and_answers_in_order() {
    let slots = [Some((1, 1)), Some((1, 1)), Some((1, 2)), Some((1, 3))];
    let (running, changed) = (Mutex::new(0), Condvar::new());
    let mut trials = trials(&slots, 6, 3);
    assert_eq!(trials.next(|_| ()).unwrap().len(), 1);
    let tried = trials.next(|slot| {
        *running.lock().unwrap() += 1;
        changed.notify_all();
        // Ends when all are there.
        let deadline = Duration::from_secs(60);
        let waited = changed.wait_timeout_while(running.lock().unwrap(), deadline, |running| *running < 3);
        assert!(!waited.unwrap().1.timed_out(), "they do not run at once");
        slot.unwrap().1
    });
    let answers: Vec<u32> = tried.unwrap().into_iter().map(|(_, answer)| answer).collect();
    assert_eq!(answers, [1, 2, 3]);
    assert!(trials.next(|_| ()).is_none());
}

fn fixed<const N: usize>(value: &serde_json::Value) -> [u8; N] {
    unhex(value).try_into().unwrap()
}

fn secrets_of(vector: &serde_json::Value) -> Secrets {
    let given = |name: &str| vector[name].as_str();
    Secrets {
        passphrase: given("passphrase").map(|text| Passphrase::new(text.into())),
        key_file: given("key_file").map(|_| KeyFile::read(&unhex(&vector["key_file"])[..]).unwrap()),
        recovery_code: given("recovery_code").map(|text| RecoveryCode::parse(text.as_bytes()).unwrap()),
        ..Secrets::default()
    }
}

#[test]
fn every_step_from_the_secret_to_the_volume_key_is_that_of_another_writer() {
    let file = vectors("slots");
    let (archive, volume_key): ([u8; 16], [u8; 32]) = (fixed(&file["archive"]), fixed(&file["volume_key"]));
    let vk = SecretKey::new(volume_key);
    for vector in file["keys"].as_array().unwrap() {
        assert_eq!(*hkdf(&vk, &archive, vector["label"].as_str().unwrap()).bytes(), fixed(&vector["key"]), "{vector}");
    }
    for vector in file["slots"].as_array().unwrap() {
        let name = vector["name"].as_str().unwrap();
        let (kind, number) = (vector["kind"].as_u64().unwrap() as u8, vector["number"].as_u64().unwrap() as usize);
        let block: [u8; 4096] = fixed(&vector["bytes"]);
        let secrets = secrets_of(vector);
        let aad = associated_data(b"lockbox/v1/slot", &archive, number, kind, &block[..CLEAR]);
        assert_eq!(aad, unhex(&vector["associated_data"]), "{name}");
        let k0 = if kind == SLOT_PASSPHRASE {
            let slot = decode_passphrase_slot(&block).unwrap();
            argon2id(secrets.passphrase.as_ref().unwrap(), &slot.salt, kdf_cost(&slot.kdf)).unwrap()
        } else {
            let slot = KeySlot::decode(&block, kind).unwrap();
            key_encryption_key(kind, &slot, &secrets).unwrap().unwrap()
        };
        assert_eq!(*k0.bytes(), fixed::<32>(&vector["k0"]), "{name}");
        let private = rewrap_secret(&k0, &archive);
        assert_eq!(*private.bytes(), fixed::<32>(&vector["rewrap_private"]), "{name}");
        assert_eq!(rewrap_public(&private), fixed::<32>(&vector["rewrap_public"]), "{name}");
        let mut kek = k0;
        if kind & REWRAPPED != 0 {
            let ephemeral = fixed(&vector["ephemeral_public"]);
            assert_eq!(*x25519_shared(&private, &ephemeral).unwrap().bytes(), fixed::<32>(&vector["shared"]), "{name}");
            kek = received(&kek, &archive, &ephemeral).unwrap();
        }
        assert_eq!(*kek.bytes(), fixed::<32>(&vector["kek"]), "{name}");
        assert_eq!(wrap::commitment(&kek, &archive), fixed::<32>(&vector["commitment"]), "{name}");
        assert_eq!(*hkdf(&kek, &archive, "lockbox/v1/slot/wrap").bytes(), fixed::<32>(&vector["wrap_key"]), "{name}");

        let mut framing =
            Framing { copy: 0, features: 0, archive, sequence: 1, commitment: [0; 32], slots: [0; 32], mac: [0; 32] };
        framing.slots[number] = kind;
        let mut blocks = empty_slots();
        blocks[number] = block;
        let header = Header::of_copy(&encode(&framing, &blocks)).unwrap();
        let opened = unlock(&header, &secrets, &UnlockLimits::default()).unwrap();
        assert_eq!((opened.slot, *opened.volume_key.bytes()), (number, volume_key), "{name}");
        let about = description(&header, number, &vk).unwrap();
        assert_eq!(about.label, vector["description"]["label"].as_str().unwrap(), "{name}");
        assert!(matches!(about.rewrap, Rewrap::Public(public) if public == fixed(&vector["rewrap_public"])), "{name}");
        assert!(matches!(unlock(&header, &Secrets::default(), &UnlockLimits::default()), Err(Error::WrongKey)));
    }
}

#[test]
fn recovery_codes_are_read_as_another_writer_wrote_them() {
    let codes = vectors("slots")["recovery_codes"].clone();
    for vector in codes["accepted"].as_array().unwrap() {
        let code = RecoveryCode::parse(vector["text"].as_str().unwrap().as_bytes()).unwrap();
        assert_eq!(code.material().bytes()[..16], unhex(&vector["bytes"]), "{vector}");
    }
    for vector in codes["refused"].as_array().unwrap() {
        assert!(RecoveryCode::parse(vector["text"].as_str().unwrap().as_bytes()).is_err(), "{vector}");
    }
}

/// Specification 3.2 and 3.3: a slot that no writer makes does not lock out a user with the secret
/// of another slot, and is reported to a user with none.
#[test]
fn a_slot_of_an_unknown_kind_or_with_bad_parameters_is_passed_by() {
    let file = vectors("slots");
    let by_name = |name: &str| {
        let slots = file["slots"].as_array().unwrap();
        slots.iter().find(|vector| vector["name"] == name).unwrap().clone()
    };
    let (file_slot, passphrase) = (by_name("a_key_file_alone"), by_name("a_passphrase"));
    let spoil: [(&str, u8, usize, u8); 5] = [
        ("an unknown kind", 99, 0, 0),
        ("passes of 0", 1, 36, 0),
        ("a field that is not zero", 1, 44, 1),
        ("lanes of 17", 1, 40, 17),
        ("another combination of secrets", 17, 46, 1),
    ];
    for (name, kind, at, value) in spoil {
        let mut framing = Framing {
            copy: 0,
            features: 0,
            archive: fixed(&file["archive"]),
            sequence: 1,
            commitment: [0; 32],
            slots: [0; 32],
            mac: [0; 32],
        };
        (framing.slots[0], framing.slots[1]) = (kind, 2);
        let mut blocks = empty_slots();
        (blocks[0], blocks[1]) = (fixed(&passphrase["bytes"]), fixed(&file_slot["bytes"]));
        blocks[0][at] = value;
        let header = Header::of_copy(&encode(&framing, &blocks)).unwrap();
        let both = Secrets { passphrase: Some(Passphrase::new(b"open sesame".to_vec())), ..secrets_of(&file_slot) };
        assert_eq!(unlock(&header, &both, &UnlockLimits::default()).unwrap().slot, 1, "{name}");
        let refused = unlock(&header, &secrets_of(&passphrase), &UnlockLimits::default()).err().unwrap();
        match kind {
            99 => assert!(matches!(refused, Error::WrongKey), "{name}: {refused}"),
            _ => assert!(matches!(refused, Error::Damaged(_)), "{name}: {refused}"),
        }
    }
}
