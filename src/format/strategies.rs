//! Generators of random values and of damaged encodings for this layer's property tests.

use proptest::collection::vec;
use proptest::prelude::*;

use super::ids::{Generation, Key, MAX_PAGE_BLOCKS, Pointer, Run, Timestamp};

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
