//! Key slots of every kind: each opens with its own secret only, alone and re-wrapped; order, cost,
//! damage.

use std::sync::Arc;

use age::secrecy::ExposeSecret;

use super::*;
use crate::crypto::identity::Recipient;
use crate::crypto::{KeyFile, NoPrompts, Prompts, RecoveryCode};
use crate::format::header::{Description, Rewrap};
use crate::keys::slots::{KeyKind, description, kinds, rewrap, unlock_all};

/// OpenSSH key pair created for this test.
const SSH_PRIVATE: &[u8] = include_bytes!("ssh_ed25519");
const SSH_PUBLIC: &str = include_str!("ssh_ed25519.pub");
/// Hybrid recipient of the age crate's tests.
const HYBRID: &str = include_str!("hybrid_recipient");

fn key_file(seed: u8) -> KeyFile {
    KeyFile::read(&[[seed; 32], [1; 32]].concat()[..]).unwrap()
}

fn code(seed: u64) -> RecoveryCode {
    RecoveryCode::generate(&SeededEnvironment::new(seed)).unwrap()
}

fn prompts() -> Arc<dyn Prompts> {
    Arc::new(NoPrompts)
}

/// All kinds, in slots that are not adjacent; `identity` is the age slot's.
fn all_kinds(identity: &age::x25519::Identity) -> (MemoryStorage, [KeyKind; 6]) {
    let storage = archive(&[(1, "word", KdfCost::TEST)]);
    let recipient = Recipient::parse(&identity.to_public().to_string()).unwrap();
    let ssh = Recipient::parse(SSH_PUBLIC).unwrap();
    let prompts = prompts();
    let changes: Vec<_> = [
        (3, NewKey::KeyFile(&key_file(2))),
        (4, NewKey::KeyFileAndPassphrase(&key_file(3), &passphrase("both"), KdfCost::TEST)),
        (9, NewKey::RecoveryCode(&code(4))),
        (30, NewKey::Recipient(&recipient, &prompts)),
        (31, NewKey::Recipient(&ssh, &prompts)),
    ]
    .into_iter()
    .map(|(slot, new)| {
        let place = SlotAddress { archive: &ARCHIVE, slot, volume_key: &key() };
        (slot, slots::make(&place, &new, format!("label {slot}"), &SeededEnvironment::new(slot as u64)).unwrap())
    })
    .collect();
    Header::read(&storage).unwrap().replace_slots(&storage, &changes, &key()).unwrap();
    use KeyKind::{Age, KeyFile, KeyFileAndPassphrase, Passphrase, RecoveryCode, SshKey};
    (storage, [Passphrase, KeyFile, KeyFileAndPassphrase, RecoveryCode, Age, SshKey])
}

fn identity_secrets(content: &[u8]) -> Secrets {
    let mut secrets = Secrets::default();
    secrets.identities.add(content, "identity", &prompts()).unwrap();
    secrets
}

/// Returns the secrets, each with the slot that it opens.
fn ways(identity: &age::x25519::Identity) -> Vec<(usize, Secrets)> {
    let file = |seed, word: Option<&str>| Secrets {
        key_file: Some(key_file(seed)),
        passphrase: word.map(passphrase),
        ..Secrets::default()
    };
    vec![
        (1, secrets("word")),
        (3, file(2, None)),
        (4, file(3, Some("both"))),
        (9, Secrets { recovery_code: Some(code(4)), ..Secrets::default() }),
        (30, identity_secrets(identity.to_string().expose_secret().as_bytes())),
        (31, identity_secrets(SSH_PRIVATE)),
    ]
}

fn wrong() -> Vec<Secrets> {
    vec![
        secrets("both"),
        secrets(""),
        Secrets::default(),
        Secrets { key_file: Some(key_file(3)), ..Secrets::default() },
        Secrets { key_file: Some(key_file(3)), passphrase: Some(passphrase("wore")), ..Secrets::default() },
        Secrets { key_file: Some(key_file(4)), passphrase: Some(passphrase("both")), ..Secrets::default() },
        Secrets { recovery_code: Some(code(5)), ..Secrets::default() },
        identity_secrets(age::x25519::Identity::generate().to_string().expose_secret().as_bytes()),
    ]
}

/// Returns the slots that `secrets` open; checks the key in each.
fn opened(storage: &dyn Storage, secrets: &Secrets, key: &SecretKey) -> Vec<usize> {
    let header = Header::read(storage).unwrap();
    match unlock_all(&header, secrets, &UnlockLimits::default()) {
        Ok((opened, _)) => {
            assert!(opened.iter().all(|slot| slot.volume_key.bytes() == key.bytes()));
            header.authenticate(key).unwrap();
            opened.into_iter().map(|slot| slot.slot).collect()
        }
        Err(Error::WrongKey) => Vec::new(),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn every_kind_opens_with_its_own_secret_only() {
    let identity = age::x25519::Identity::generate();
    let (storage, expected) = all_kinds(&identity);
    let header = Header::read(&storage).unwrap();
    assert_eq!(kinds(&header).into_iter().map(|(_, kind)| kind).collect::<Vec<_>>(), expected);
    for (slot, secrets) in ways(&identity) {
        assert_eq!(opened(&storage, &secrets, &key()), [slot]);
    }
    for secrets in wrong() {
        assert_eq!(opened(&storage, &secrets, &key()), [0; 0]);
    }
}

#[test]
fn labels_and_recipients_are_readable_with_the_volume_key_alone() {
    let identity = age::x25519::Identity::generate();
    let (storage, _) = all_kinds(&identity);
    let header = Header::read(&storage).unwrap();
    for slot in [3, 4, 9, 30] {
        let description = description(&header, slot, &key()).unwrap();
        assert_eq!(description.label, format!("label {slot}"));
        let recipient =
            matches!(&description.rewrap, Rewrap::Recipient(text) if *text == identity.to_public().to_string());
        assert_eq!(recipient, slot == 30);
        assert!(crate::keys::slots::description(&header, slot, &SecretKey::new([1; 32])).is_none());
    }
    assert_eq!(description(&header, 0, &key()), None, "an empty slot has none");
    let bytes = storage.contents();
    for name in ["label", &identity.to_public().to_string()[4..30]] {
        assert!(!bytes.windows(name.len()).any(|window| window == name.as_bytes()), "{name} is readable");
    }
}

/// Programs before descriptions wrote random bytes there.
#[test]
fn a_slot_without_a_description_opens_and_describes_itself() {
    let storage = archive(&[(5, "word", KdfCost::TEST)]);
    let mut block = [0; 4096];
    block.copy_from_slice(Header::read(&storage).unwrap().slot(5));
    SeededEnvironment::new(3).fill_random(&mut block[632..]).unwrap();
    Header::read(&storage).unwrap().replace_slots(&storage, &[(5, (SLOT_PASSPHRASE, block))], &key()).unwrap();
    let header = Header::read(&storage).unwrap();
    assert_eq!(description(&header, 5, &key()), None);
    let opened = slots::unlock(&header, &secrets("word"), &UnlockLimits::default()).unwrap();
    assert_eq!(opened.own.unwrap().label, "label");
}

/// The volume key is replaced with only the old volume key, without secrets.
#[test]
fn every_kind_opens_again_after_it_was_rewrapped_twice() {
    let identity = age::x25519::Identity::generate();
    let (storage, expected) = all_kinds(&identity);
    let mut old = key();
    for round in 1..=2u8 {
        let new = SecretKey::new([100 + round; 32]);
        let header = Header::read(&storage).unwrap();
        let mut blocks = empty_slots();
        let mut framing = Framing { commitment: header::commitment(&new, &ARCHIVE), ..header.framing().clone() };
        for (slot, _) in ways(&identity) {
            let about = description(&header, slot, &old).unwrap();
            let place = SlotAddress { archive: &ARCHIVE, slot, volume_key: &new };
            (framing.slots[slot], blocks[slot]) =
                rewrap(&place, &header, &about, &prompts(), &SeededEnvironment::new(9)).unwrap();
        }
        framing.sequence += 1;
        for copy in 0..2 {
            header::write_copy(&storage, &framing, &blocks, copy, &new).unwrap();
        }
        let header = Header::read(&storage).unwrap();
        assert_eq!(kinds(&header).into_iter().map(|(_, kind)| kind).collect::<Vec<_>>(), expected);
        for (slot, secrets) in ways(&identity) {
            assert_eq!(opened(&storage, &secrets, &new), [slot], "round {round}");
        }
        for secrets in wrong() {
            assert_eq!(opened(&storage, &secrets, &new), [0; 0]);
        }
        old = new;
    }
}

#[test]
fn any_altered_bit_of_a_slot_keeps_it_from_opening_in_silence() {
    let identity = age::x25519::Identity::generate();
    let (storage, _) = all_kinds(&identity);
    for (slot, secrets) in ways(&identity) {
        let start = HEADER_START[0] * BLOCK + (slot as u64 + 1) * BLOCK;
        for at in [0, 33, 44, 46, 50, 85, 110, 151, 2320, 2400, 4095] {
            let copy = MemoryStorage::from_contents(storage.contents());
            flip(&copy, start + at);
            // The other copy is valid: without the checksum this one must fail on its own.
            let mut bytes = vec![0; HEADER_BYTES];
            copy.read_at(HEADER_START[0] * BLOCK, &mut bytes).unwrap();
            bytes[64..72].copy_from_slice(&99u64.to_le_bytes());
            let sum = {
                let mut zeroed = bytes.clone();
                zeroed[4064..4096].fill(0);
                crate::crypto::kdf::sha256(&zeroed)
            };
            bytes[4064..4096].copy_from_slice(&sum);
            copy.write_at(HEADER_START[0] * BLOCK, &bytes).unwrap();
            let header = Header::read(&copy).unwrap();
            assert_eq!(header.framing().sequence, 99);
            let result = slots::unlock(&header, &secrets, &UnlockLimits::default())
                .and_then(|opened| header.authenticate(&opened.volume_key));
            assert!(result.is_err(), "slot {slot} byte {at}");
        }
    }
}

/// A slot without derivation is tried before one with it, regardless of their numbers, and a
/// hostile cost is not paid.
#[test]
fn what_is_derived_comes_last_and_within_the_budget() {
    let storage = archive(&[(0, "word", KdfCost { memory_kib: 4096, passes: 3, lanes: 1 })]);
    let place = SlotAddress { archive: &ARCHIVE, slot: 20, volume_key: &key() };
    let made = slots::make(&place, &NewKey::KeyFile(&key_file(2)), String::new(), &SeededEnvironment::new(1)).unwrap();
    Header::read(&storage).unwrap().replace_slots(&storage, &[(20, made)], &key()).unwrap();
    let header = Header::read(&storage).unwrap();
    let nothing = UnlockLimits { cost_mib: 0, memory_mib: 0, ..UnlockLimits::default() };
    let given = Secrets { key_file: Some(key_file(2)), ..secrets("word") };
    assert_eq!(slots::unlock(&header, &given, &nothing).unwrap().slot, 20);
    let given = Secrets { key_file: Some(key_file(3)), ..secrets("word") };
    assert!(matches!(slots::unlock(&header, &given, &nothing), Err(Error::Refused(Refusal::KdfCost { .. }))));
}

/// A hybrid recipient is the largest that fits: opening it requires hardware, but it can be
/// created, described and re-wrapped without.
#[test]
fn the_largest_native_recipient_fits_a_slot_with_the_longest_label() {
    let recipient = Recipient::parse(HYBRID).unwrap();
    for round in 0..20 {
        let place = SlotAddress { archive: &ARCHIVE, slot: 7, volume_key: &key() };
        let label = "x".repeat(255);
        let (kind, block) = slots::make(
            &place,
            &NewKey::Recipient(&recipient, &prompts()),
            label.clone(),
            &SeededEnvironment::new(round),
        )
        .unwrap();
        let storage = archive(&[(0, "word", KdfCost::TEST)]);
        Header::read(&storage).unwrap().replace_slots(&storage, &[(7, (kind, block))], &key()).unwrap();
        let Description { label: stored, rewrap: Rewrap::Recipient(text), .. } =
            description(&Header::read(&storage).unwrap(), 7, &key()).unwrap()
        else {
            panic!("no recipient");
        };
        assert_eq!((stored, text), (label, HYBRID.trim().to_owned()));
    }
}

#[test]
fn what_is_no_recipient_or_identity_is_refused_without_quoting() {
    let secret = age::x25519::Identity::generate().to_string();
    let secret = secret.expose_secret();
    let malformed = format!("{}x", &secret[..secret.len() - 1]);
    for text in [secret, "age1", "", "ssh-dss AAAA", "ssh-ed25519 !!", "ecdsa-sha2-nistp256 AAAA", "age1qqqq", "word"] {
        let error = Recipient::parse(text).err().unwrap().to_string();
        assert!(!error.contains(&secret[20..]), "{error}");
    }
    let mut identities = crate::crypto::Identities::default();
    for content in [
        &malformed[..],
        "",
        "# only a comment\n",
        "word",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nAA\n",
        "age-encryption.org/v1\n",
    ] {
        let error = identities.add(content.as_bytes(), "the file", &prompts()).err().unwrap().to_string();
        assert!(error.contains("the file") && !error.contains(&malformed[20..]), "{error}");
    }
    let missing = identities.add(b"AGE-PLUGIN-NOWHERE-1QQPHZ8JY\n", "the file", &prompts());
    assert!(missing.is_err());
}
