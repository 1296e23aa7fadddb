//! Slots of further kinds and descriptions: round trips, bounds, damage.

use proptest::prelude::*;

use super::*;
use crate::format::tests::{mutated, noise};

const KINDS: [(u8, bool); 7] = [(2, false), (2, true), (3, false), (4, false), (17, true), (18, true), (19, false)];

fn slot(kind: u8, derives: bool) -> KeySlot {
    KeySlot {
        salt: [1; 32],
        kdf: derives.then_some(KdfParameters { memory_kib: 65536, passes: 3, lanes: 1 }),
        commitment: [2; 32],
        nonce: [3; 24],
        sealed: [4; SEALED_KEY],
        ephemeral: [5; 32],
        age: if kind == SLOT_AGE { vec![6; MAX_AGE_FILE] } else { Vec::new() },
    }
}

fn description(rewrap: Rewrap) -> Description {
    Description { created: Timestamp { seconds: -5, nanos: 7 }, label: "laptop é".into(), rewrap }
}

#[test]
fn a_slot_of_every_kind_decodes_to_what_was_encoded() {
    for (kind, derives) in KINDS {
        let block = slot(kind, derives).encode(kind, &[9; 4096]);
        assert_eq!(KeySlot::decode(&block, kind).unwrap(), slot(kind, derives), "kind {kind}");
        assert_eq!(block[DESCRIPTION_AT..], [9; 4096 - DESCRIPTION_AT], "the description's place is left as it is");
        assert_eq!(block[..CLEAR], slot(kind, derives).clear(kind));
        assert_eq!(KeySlot::decode(&block, kind).unwrap().encode(kind, &block), block);
    }
}

#[test]
fn fields_that_a_kind_does_not_have_are_damage() {
    let refused = |kind: u8, derives: bool, change: &dyn Fn(&mut [u8])| {
        let mut block = slot(kind, derives).encode(kind, &[0; 4096]);
        change(&mut block);
        assert!(matches!(KeySlot::decode(&block, kind), Err(Error::Damaged(_))), "kind {kind}");
    };
    for (kind, derives) in KINDS {
        refused(kind, derives, &|block| block[47] = 1);
        refused(kind, derives, &|block| block[46] = 0);
        refused(kind, derives, &|block| block[46] = 4);
        if !derives {
            refused(kind, derives, &|block| block[32] = 1);
        }
        if kind != SLOT_AGE {
            refused(kind, derives, &|block| block[44] = 1);
        }
    }
    refused(SLOT_AGE, false, &|block| block[44..46].fill(0));
    refused(SLOT_AGE, false, &|block| put(block, 44, (MAX_AGE_FILE as u16 + 1).to_le_bytes()));
    for kind in [0, 1, 5, 16, 20, 255] {
        assert!(KeySlot::decode(&[0; 4096], kind).is_err());
    }
}

#[test]
fn a_description_decodes_to_what_was_encoded() {
    let hybrid = format!("age1tagpq1{}", "qpzry9x8gf2tvdw0s3jn54khce6mua7l".repeat(63));
    for rewrap in [
        Rewrap::Public([8; 32]),
        Rewrap::Recipient("age1qpzry9x8".into()),
        Rewrap::Recipient("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN".into()),
        Rewrap::Recipient(hybrid),
    ] {
        let encoded = description(rewrap.clone()).encode().unwrap();
        assert_eq!(Description::decode(&encoded).unwrap(), description(rewrap));
    }
}

#[test]
fn oversized_descriptions_are_refused() {
    let label = Description { label: "x".repeat(256), ..description(Rewrap::Public([0; 32])) };
    assert!(matches!(label.encode(), Err(Error::Invalid(_))));
    let long = description(Rewrap::Recipient(format!("age1{}", "q".repeat(4000))));
    assert!(matches!(long.encode(), Err(Error::Invalid(_))));
    let longest = Description {
        label: "x".repeat(MAX_LABEL),
        // The hybrid recipient of most characters: 1,249 bytes.
        ..description(Rewrap::Recipient(format!("age1tagpq1{}", "q".repeat(2005))))
    };
    assert_eq!(Description::decode(&longest.encode().unwrap()).unwrap(), longest);
}

#[test]
fn any_other_form_of_a_description_is_damage() {
    let good = description(Rewrap::Recipient("age1qpzry9x8".into())).encode().unwrap();
    for (at, value) in [(8, [0xff; 4]), (12, [9, 9, 12, 0]), (12, [2, 9, 12, 0]), (1700, [1, 0, 0, 0])] {
        let mut plain = good;
        put(&mut plain, at, value);
        assert!(matches!(Description::decode(&plain), Err(Error::Damaged(_))), "at={at}");
    }
    assert!(Description::decode(&good[1..]).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_input_panics(
        bytes in noise(5000),
        damaged in mutated(slot(4, false).encode(4, &[9; 4096]).to_vec()),
        described in mutated(description(Rewrap::Recipient("age1qpzry9x8".into())).encode().unwrap().to_vec()),
    ) {
        for kind in [0, 1, 2, 3, 4, 17, 18, 19] {
            for input in [&bytes, &damaged] {
                if let Ok(slot) = KeySlot::decode(input, kind) {
                    let mut random = [0; 4096];
                    random.copy_from_slice(input);
                    prop_assert_eq!(&slot.encode(kind, &random)[..], &input[..]);
                }
            }
        }
        for input in [&bytes, &described] {
            if let Ok(description) = Description::decode(input) {
                prop_assert_eq!(&description.encode().unwrap()[..], &input[..]);
            }
        }
    }
}
