//! Specification section 9.3: the space map's values as bytes.

use super::ids::REGION_BLOCKS;
use crate::error::Result;

/// Words of a region's bitmap; bit i of the region is bit `i % 64` of word `i / 64`, set when the block belongs to a page.
pub const REGION_WORDS: usize = REGION_BLOCKS as usize / 64;

/// One bit per block of a region.
pub type RegionBits = [u64; REGION_WORDS];

/// The shorter of the two encodings.
pub fn encode(bits: &RegionBits) -> Vec<u8> {
    let _ = bits;
    todo!()
}

pub fn decode(value: &[u8]) -> Result<Box<RegionBits>> {
    let _ = value;
    todo!()
}
