//! Encoding of space map values (specification 9.3).

use super::ids::REGION_BLOCKS;
use super::{ends_early, exact_array, u16_at};
use crate::error::{Error, Result};

/// Words of a region's bitmap. Bit i of the region is bit `i % 64` of word `i / 64`, set when the
/// block belongs to a page.
pub(crate) const REGION_WORDS: usize = REGION_BLOCKS as usize / 64;

pub(crate) type RegionBits = [u64; REGION_WORDS];

const BITMAP: u8 = 0;
const RUNS: u8 = 1;
const BITMAP_BYTES: usize = REGION_BLOCKS as usize / 8;
/// Encoded length of a run in bytes: first block and length.
const RUN: usize = 4;
/// Maximum number of runs for which the list is shorter than the bitmap: 3 + 4 x 255 < 1,025 <= 3 +
/// 4 x 256.
const MAX_RUNS: usize = (1 + BITMAP_BYTES - 3) / RUN;

/// Encodes a bitmap in the shorter of the two forms.
pub(crate) fn encode(bits: &RegionBits) -> Vec<u8> {
    let count = Runs { bits, at: 0 }.take(MAX_RUNS + 1).count();
    if count > MAX_RUNS {
        let mut out = Vec::with_capacity(1 + BITMAP_BYTES);
        out.push(BITMAP);
        // Little-endian words put block i into bit i mod 8 of byte i / 8.
        out.extend(bits.iter().flat_map(|word| word.to_le_bytes()));
        return out;
    }
    let mut out = Vec::with_capacity(3 + RUN * count);
    out.push(RUNS);
    out.extend_from_slice(&(count as u16).to_le_bytes());
    for (first, length) in (Runs { bits, at: 0 }) {
        out.extend_from_slice(&(first as u16).to_le_bytes());
        out.extend_from_slice(&(length as u16).to_le_bytes());
    }
    out
}

/// # Errors
/// `Damaged` for an unknown encoding, another length, or runs out of order, empty or beyond the
/// region.
pub(crate) fn decode(value: &[u8]) -> Result<Box<RegionBits>> {
    match value.split_first() {
        Some((&BITMAP, bitmap)) => {
            let bitmap: &[u8; BITMAP_BYTES] = exact_array(bitmap, "space bitmap")?;
            let mut bits = Box::new([0; REGION_WORDS]);
            for (word, bytes) in bits.iter_mut().zip(bitmap.as_chunks().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            Ok(bits)
        }
        Some((&RUNS, runs)) => decode_runs(runs),
        _ => Err(Error::damaged("space value has an unknown encoding")),
    }
}

fn decode_runs(bytes: &[u8]) -> Result<Box<RegionBits>> {
    let (count, runs) = bytes.split_first_chunk::<2>().ok_or_else(|| ends_early("space value"))?;
    let count = usize::from(u16::from_le_bytes(*count));
    if runs.len() != RUN * count {
        return Err(Error::damaged(format!("space value has a wrong length: runs={count} bytes={}", runs.len())));
    }
    let mut bits = Box::new([0; REGION_WORDS]);
    let mut free_from = 0;
    for run in runs.chunks_exact(RUN) {
        let (first, length) = (usize::from(u16_at(run, 0)), usize::from(u16_at(run, 2)));
        if first < free_from || length == 0 || first + length > REGION_BLOCKS as usize {
            return Err(Error::damaged(format!("space value has a wrong run: first={first} blocks={length}")));
        }
        free_from = first + length;
        set(&mut bits, first, free_from);
    }
    Ok(bits)
}

/// Sets the non-empty range `first..end` word by word.
fn set(bits: &mut RegionBits, first: usize, end: usize) {
    let (from, to) = (first / 64, (end - 1) / 64);
    for (index, word) in bits.iter_mut().enumerate().take(to + 1).skip(from) {
        let low = if index == from { u64::MAX << (first % 64) } else { u64::MAX };
        let high = if index == to { u64::MAX >> (63 - (end - 1) % 64) } else { u64::MAX };
        *word |= low & high;
    }
}

/// Iterator over the maximal runs of set bits as (first, length), ascending.
struct Runs<'a> {
    bits: &'a RegionBits,
    at: usize,
}

impl Runs<'_> {
    /// Returns the first block from `at` on whose bit differs from `value`, or the end of the
    /// region.
    fn next_unlike(&self, at: usize, value: bool) -> usize {
        let flip = if value { u64::MAX } else { 0 };
        let mut keep = u64::MAX << (at % 64);
        for (index, word) in self.bits.iter().enumerate().skip(at / 64) {
            let unlike = (word ^ flip) & keep;
            if unlike != 0 {
                return index * 64 + unlike.trailing_zeros() as usize;
            }
            keep = u64::MAX;
        }
        REGION_BLOCKS as usize
    }
}

impl Iterator for Runs<'_> {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<(usize, usize)> {
        let first = self.next_unlike(self.at, false);
        if first == REGION_BLOCKS as usize {
            return None;
        }
        self.at = self.next_unlike(first, true);
        Some((first, self.at - first))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::format::tests::{mutated, noise};

    fn bits(set_blocks: impl IntoIterator<Item = usize>) -> RegionBits {
        let mut bits = [0; REGION_WORDS];
        for block in set_blocks {
            bits[block / 64] |= 1 << (block % 64);
        }
        bits
    }

    #[test]
    fn few_runs_are_listed() {
        assert_eq!(encode(&bits([])), [1, 0, 0]);
        assert_eq!(encode(&bits([65, 66, 67, 8191])), [1, 2, 0, 65, 0, 3, 0, 0xff, 0x1f, 1, 0]);
        assert_eq!(encode(&bits(0..8192)), [1, 1, 0, 0, 0, 0, 0x20]);
    }

    #[test]
    fn many_runs_become_a_bitmap() {
        assert_eq!(encode(&bits((0..255).map(|i| 2 * i))).len(), 3 + 4 * 255);
        let encoded = encode(&bits((0..256).map(|i| 2 * i)));
        assert_eq!((encoded.len(), &encoded[..2]), (1025, &[0, 0x55][..]));
    }

    #[test]
    fn runs_ascend_are_disjoint_and_stay_in_the_region() {
        let runs = |list: &[(u16, u16)]| {
            let mut value = vec![1, list.len() as u8, 0];
            for (first, length) in list {
                value.extend([first.to_le_bytes(), length.to_le_bytes()].concat());
            }
            decode(&value)
        };
        assert!(runs(&[(0, 2), (2, 3)]).is_ok(), "adjacent");
        for list in [&[(5, 1), (0, 1)][..], &[(0, 2), (1, 1)], &[(3, 0)], &[(8191, 2)], &[(u16::MAX, u16::MAX)]] {
            assert!(runs(list).is_err(), "{list:?}");
        }
    }

    #[test]
    fn unknown_encodings_and_wrong_lengths_are_refused() {
        for value in [&[][..], &[2], &[1], &[1, 0], &[1, 0, 0, 0], &[1, 1, 0, 0, 0, 1], &[0; 1024], &[0; 1026]] {
            assert!(decode(value).is_err(), "{value:?}");
        }
        assert!(decode(&[0; 1025]).is_ok());
    }

    proptest! {
        #[test]
        fn regions_round_trip(runs in vec((0..8192usize, 1..200usize), 0..60), dense in vec(any::<u64>(), REGION_WORDS)) {
            let sparse = bits(runs.into_iter().flat_map(|(first, length)| first..(first + length).min(8192)));
            let dense: RegionBits = dense.try_into().unwrap();
            prop_assert_eq!(*decode(&encode(&sparse)).unwrap(), sparse);
            prop_assert_eq!(*decode(&encode(&dense)).unwrap(), dense);
        }

        #[test]
        fn no_input_panics(bytes in noise(1100), damaged in mutated(encode(&bits([1, 2, 3, 70, 8000])))) {
            let _ = decode(&bytes);
            let _ = decode(&damaged);
        }
    }
}
