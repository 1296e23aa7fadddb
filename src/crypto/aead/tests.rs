use shake::Shake128;
use shake::digest::{ExtendableOutput, Update, XofReader};

use super::portable::Portable;
use super::system::System;
use super::*;
use crate::env::SeededEnvironment;

fn vectors() -> serde_json::Value {
    serde_json::from_str(include_str!("../../../format-spec/vectors/xaes-256-gcm.json")).unwrap()
}

fn unhex(value: &serde_json::Value) -> Vec<u8> {
    let text = value.as_str().unwrap();
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

fn seals_the_published_messages<E: Engine>() {
    for vector in vectors()["messages"].as_array().unwrap() {
        let xaes = Xaes::<E>::new(&unhex(&vector["key"]).try_into().unwrap());
        let nonce = unhex(&vector["nonce"]).try_into().unwrap();
        let (aad, plaintext) = (unhex(&vector["aad"]), unhex(&vector["plaintext"]));
        let mut data = plaintext.clone();
        let tag = xaes.seal(&nonce, &aad, &mut data);
        assert_eq!([&data[..], &tag].concat(), unhex(&vector["sealed"]), "{}", vector["rule"]);
        xaes.open(&nonce, &aad, &mut data, &tag).unwrap();
        assert_eq!(data, plaintext);
    }
}

fn accumulates_the_published_digest<E: Engine>() {
    let vector = &vectors()["accumulated"];
    let mut source = Shake128::default().finalize_xof();
    let mut draw = |count: usize| {
        let mut out = vec![0; count];
        source.read(&mut out);
        out
    };
    let mut digest = Shake128::default();
    for _ in 0..vector["iterations"].as_u64().unwrap() {
        let xaes = Xaes::<E>::new(&draw(32).try_into().unwrap());
        let nonce = draw(24).try_into().unwrap();
        let length = draw(1)[0].into();
        let mut data = draw(length);
        let length = draw(1)[0].into();
        let tag = xaes.seal(&nonce, &draw(length), &mut data);
        digest.update(&data);
        digest.update(&tag);
    }
    let mut out = [0; 32];
    digest.finalize_xof().read(&mut out);
    assert_eq!(out[..], unhex(&vector["digest"]));
}

#[test]
fn both_engines_seal_as_published() {
    seals_the_published_messages::<System>();
    seals_the_published_messages::<Portable>();
}

#[test]
fn both_engines_accumulate_as_published() {
    accumulates_the_published_digest::<System>();
    accumulates_the_published_digest::<Portable>();
}

#[test]
fn one_engine_opens_what_the_other_sealed() {
    let random = SeededEnvironment::new(7);
    for length in [0, 1, 15, 16, 17, 48, 255, 4056, 5000] {
        let bytes = |count: usize| (0..count).map(|_| random.next_u64() as u8).collect::<Vec<_>>();
        let key: [u8; 32] = bytes(32).try_into().unwrap();
        let nonce: [u8; NONCE] = bytes(24).try_into().unwrap();
        let (aad, plain) = (bytes(length % 61), bytes(length));
        let (one, two) = (Xaes::<System>::new(&key).messages(&nonce), Xaes::<Portable>::new(&key).messages(&nonce));
        for message in [0, 1, 2, 33] {
            let (mut a, mut b) = (plain.clone(), plain.clone());
            let tags = (one.seal(message, &aad, &mut a), two.seal(message, &aad, &mut b));
            assert_eq!((&a, tags.0), (&b, tags.1));
            two.open(message, &aad, &mut a, &tags.0).unwrap();
            one.open(message, &aad, &mut b, &tags.1).unwrap();
            assert!(a == plain && b == plain);
        }
    }
}

fn key() -> XaesKey {
    XaesKey::new(&SecretKey::new([9; 32]))
}

#[test]
fn the_messages_of_a_page_differ_and_every_bit_of_the_nonce_counts() {
    for nonce in [[1; NONCE], [0xff; NONCE]] {
        let page = key().page_key(&nonce);
        let mut sealed = vec![[0; 48]; 2 + MAX_CHUNKS];
        let mut tags = Vec::new();
        for (message, data) in sealed.iter_mut().enumerate() {
            tags.push(match message {
                0 => page.seal_prologue(b"", data),
                1 => page.seal_body(b"", data),
                _ => page.seal_chunk(message - 2, b"", data),
            });
        }
        let open = |page: &PageKey, message: usize, data: &mut [u8], tag| match message {
            0 => page.open_prologue(b"", data, tag),
            1 => page.open_body(b"", data, tag),
            _ => page.open_chunk(message - 2, b"", data, tag),
        };
        // The prologue is plain XAES.
        let mut plain = [0; 48];
        assert_eq!((key().seal(&nonce, b"", &mut plain), plain), (tags[0], sealed[0]));
        for message in 0..sealed.len() {
            for other in 0..sealed.len() {
                assert_eq!(open(&page, message, &mut sealed[other].clone(), &tags[other]).is_ok(), message == other);
            }
        }
        for bit in 0..NONCE * 8 {
            let mut altered = nonce;
            altered[bit / 8] ^= 1 << (bit % 8);
            let page = key().page_key(&altered);
            for message in 0..sealed.len() {
                assert!(open(&page, message, &mut sealed[message].clone(), &tags[message]).is_err());
            }
        }
        for message in 0..sealed.len() {
            open(&page, message, &mut sealed[message], &tags[message]).unwrap();
            assert_eq!(sealed[message], [0; 48]);
        }
    }
}

#[test]
fn a_failed_opening_leaves_nothing_readable() {
    let mut data = *b"secret plaintext";
    let mut tag = key().seal(&[1; NONCE], b"aad", &mut data);
    tag[15] ^= 1;
    let error = key().open(&[1; NONCE], b"aad", &mut data, &tag).unwrap_err();
    assert_eq!(error.to_string(), "damaged archive: authentication failed");
    assert_eq!(data, [0; 16]);
}

#[test]
#[should_panic(expected = "sealed once")]
fn a_page_key_never_seals_a_message_twice() {
    let page = key().page_key(&[1; NONCE]);
    page.seal_chunk(31, b"", &mut [0; 16]);
    page.seal_chunk(31, b"", &mut [1; 16]);
}

#[test]
#[should_panic(expected = "at most 32 chunks")]
fn a_page_key_has_no_message_for_a_cell_too_many() {
    key().page_key(&[1; NONCE]).seal_chunk(MAX_CHUNKS, b"", &mut [0; 16]);
}
