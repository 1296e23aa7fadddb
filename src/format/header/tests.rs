//! Header copies and slots: round trips, refusals in the order that readers need, damage.

use proptest::prelude::*;

use super::*;
use crate::format::tests::{mutated, noise};

fn framing() -> Framing {
    let mut slots = [SLOT_EMPTY; 32];
    slots[3] = SLOT_PASSPHRASE;
    Framing { copy: 1, features: 0, archive: [7; 16], sequence: 9, commitment: [8; 32], slots, mac: [5; 32] }
}

fn slots() -> Box<[[u8; 4096]; 32]> {
    Box::new(std::array::from_fn(|i| [i as u8; 4096]))
}

/// Applies `change` to an encoded copy and makes the checksum right again.
fn forged(change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = encode(&framing(), &slots());
    change(&mut bytes);
    let sum = checksum(&bytes);
    put(&mut bytes, CHECKSUM_AT, sum);
    bytes
}

#[test]
fn a_copy_decodes_to_what_was_encoded() {
    let bytes = encode(&framing(), &slots());
    assert_eq!(bytes.len(), HEADER_BYTES);
    let parsed = decode(&bytes, 1).unwrap();
    assert_eq!(parsed.framing, framing());
    assert_eq!(parsed.bytes, bytes);
    assert_eq!(&parsed.bytes[4 * 4096..][..4096], &[3; 4096]);
    assert_eq!((parsed.read_only_features(), parsed.compatible_features()), (0, 0));
}

#[test]
fn a_file_without_the_magic_is_not_an_archive() {
    for bytes in [vec![], vec![0x89], vec![0; HEADER_BYTES], b"\x89LOCKBOX\n\r\x1a\n\0\0\0\0".to_vec()] {
        assert!(matches!(decode(&bytes, 0), Err(Error::NotArchive(_))));
    }
}

#[test]
fn another_version_is_refused_before_the_checksum() {
    let mut bytes = encode(&framing(), &slots());
    bytes[VERSION_AT] = 2;
    assert!(matches!(decode(&bytes, 1), Err(Error::UnsupportedVersion(text)) if text.contains("version 2")));
    assert!(matches!(decode(&bytes[..4096], 1), Err(Error::UnsupportedVersion(_))));
}

#[test]
fn another_suite_is_refused() {
    let bytes = forged(|bytes| bytes[SUITE_AT] = 2);
    assert!(matches!(decode(&bytes, 1), Err(Error::UnsupportedVersion(text)) if text.contains("suite 2")));
}

#[test]
fn unknown_incompatible_bits_are_refused_by_name() {
    let bytes = forged(|bytes| (bytes[INCOMPATIBLE_AT], bytes[INCOMPATIBLE_AT + 7]) = (0b100, 0x80));
    assert!(matches!(decode(&bytes, 1), Err(Error::UnsupportedVersion(text)) if text.ends_with("bits: 2 63")));
}

#[test]
fn other_feature_bits_are_handed_to_the_caller() {
    let bytes = forged(|bytes| (bytes[READ_ONLY_AT], bytes[COMPATIBLE_AT]) = (2, 4));
    let parsed = decode(&bytes, 1).unwrap();
    assert_eq!((parsed.read_only_features(), parsed.compatible_features()), (2, 4));
}

#[test]
fn any_flipped_byte_of_a_copy_is_damage() {
    let good = encode(&framing(), &slots());
    for at in [20, 22, 30, 48, 64, 72, 104, 140, 4031, 4032, 4064, 4095, 4096, HEADER_BYTES - 1] {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        assert!(matches!(decode(&bytes, 1), Err(Error::Damaged(_))), "at={at}");
    }
}

#[test]
fn a_copy_in_the_place_of_the_other_is_damage() {
    let bytes = encode(&framing(), &slots());
    assert!(matches!(decode(&bytes, 0), Err(Error::Damaged(_))));
}

#[test]
fn reserved_bytes_of_the_framing_must_be_zero() {
    for at in [23, 136, 4031] {
        let bytes = forged(|bytes| bytes[at] = 1);
        assert!(matches!(decode(&bytes, 1), Err(Error::Damaged(_))), "at={at}");
    }
}

#[test]
fn the_mac_covers_everything_but_mac_and_checksum() {
    let bytes = encode(&framing(), &slots());
    let covered = mac_input(&bytes);
    assert_eq!(covered[..MAC_AT], bytes[..MAC_AT]);
    assert_eq!(covered[MAC_AT..FRAMING_END], [0; 64]);
    assert_eq!(covered[FRAMING_END..], bytes[FRAMING_END..]);
}

#[test]
fn a_passphrase_slot_decodes_to_what_was_encoded() {
    let slot = PassphraseSlot {
        salt: [1; 32],
        kdf: KdfParameters { memory_kib: 65536, passes: 3, lanes: 1 },
        commitment: [2; 32],
        nonce: [3; 24],
        sealed: (0..528).map(|i| i as u8).collect(),
    };
    let mut block = encode_passphrase_slot(&slot, &[9; 3464]);
    assert_eq!(decode_passphrase_slot(&block).unwrap(), slot);
    assert_eq!(block[632..], [9; 3464]);
    block[47] = 1;
    assert!(matches!(decode_passphrase_slot(&block), Err(Error::Damaged(_))));
    assert!(matches!(decode_passphrase_slot(&block[1..]), Err(Error::Damaged(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_input_panics(bytes in noise(5000), damaged in mutated(encode(&framing(), &slots()))) {
        for input in [&bytes, &damaged] {
            let _ = decode(input, 1);
            let _ = decode_passphrase_slot(input);
            let _ = mac_input(input);
        }
    }
}
