//! Specification section 9.3: the space map's values as bytes.

use super::ids::REGION_BLOCKS;
use super::reader::Reader;
use crate::error::{Error, Result};

/// Words of a region's bitmap; bit i of the region is bit `i % 64` of word `i / 64`, set when the block belongs to a page.
pub const REGION_WORDS: usize = REGION_BLOCKS as usize / 64;

/// One bit per block of a region.
pub type RegionBits = [u64; REGION_WORDS];

/// The shorter of the two encodings.
pub fn encode(bits: &RegionBits) -> Vec<u8> {
    let bit = |i: usize| bits[i / 64] >> (i % 64) & 1 == 1;
    let mut runs: Vec<(u16, u16)> = Vec::new();
    let mut at = 0;
    let total = REGION_BLOCKS as usize;
    // A bitmap takes 1,025 bytes: more than 255 runs never pay.
    while at < total && runs.len() <= 255 {
        if !bit(at) {
            at += if at % 64 == 0 && bits[at / 64] == 0 { 64 } else { 1 };
            continue;
        }
        let start = at;
        while at < total && bit(at) {
            at += 1;
        }
        runs.push((start as u16, (at - start) as u16));
    }
    let mut out = Vec::with_capacity(1025);
    if runs.len() <= 255 {
        out.push(1);
        out.extend_from_slice(&(runs.len() as u16).to_le_bytes());
        for (start, length) in runs {
            out.extend_from_slice(&start.to_le_bytes());
            out.extend_from_slice(&length.to_le_bytes());
        }
    } else {
        out.push(0);
        for word in bits {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }
    out
}

pub fn decode(value: &[u8]) -> Result<Box<RegionBits>> {
    let mut reader = Reader::new(value, "space map value");
    let mut bits = Box::new([0; REGION_WORDS]);
    match reader.u8()? {
        0 => {
            for word in bits.iter_mut() {
                *word = reader.u64()?;
            }
        }
        1 => {
            let mut before = 0;
            for _ in 0..reader.u16()? {
                let (start, length) = (usize::from(reader.u16()?), usize::from(reader.u16()?));
                if start < before || length == 0 || start + length > REGION_BLOCKS as usize {
                    return Err(Error::damaged("space map value has impossible runs"));
                }
                before = start + length;
                for block in start..before {
                    bits[block / 64] |= 1 << (block % 64);
                }
            }
        }
        other => return Err(Error::damaged(format!("space map value has unknown encoding {other}"))),
    }
    reader.finish()?;
    Ok(bits)
}
