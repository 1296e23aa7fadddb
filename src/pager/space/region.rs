//! One region of the space map in memory: which blocks are used, busy, dirty and backed, and runs found among them.

use crate::format::space::{REGION_WORDS, RegionBits};
use crate::format::{REGION_BLOCKS, RESERVED};

/// The lowest bit of every group of four.
const QUAD_LOW: u64 = 0x1111_1111_1111_1111;

/// State of the 8,192 blocks of a region.
///
/// A block is *used* when a page of the last durable commit lies there; *busy* when it must not be allocated (used, waiting, in flight,
/// being erased, reserved by the layout, or behind the end of the file); *dirty* when it is free and holds old ciphertext; *aged* when it
/// was already dirty at the last tick; *backed* when it is free and the host has allocated it.
pub(super) struct Region {
    pub(super) number: u64,
    pub(super) used: RegionBits,
    pub(super) busy: RegionBits,
    pub(super) dirty: RegionBits,
    pub(super) aged: RegionBits,
    pub(super) backed: RegionBits,
    /// `used` differs from the checkpoint.
    pub(super) changed: bool,
    /// Free, backed, aligned groups of four blocks.
    pub(super) quads: u64,
}

/// Sets or clears bits `[start, end)`.
pub(super) fn fill(bits: &mut RegionBits, start: u64, end: u64, value: bool) {
    let mut at = start;
    while at < end {
        let word = (at / 64) as usize;
        let low = at % 64;
        let high = (end - at + low).min(64);
        let mask = if high - low == 64 { u64::MAX } else { ((1u64 << (high - low)) - 1) << low };
        if value {
            bits[word] |= mask;
        } else {
            bits[word] &= !mask;
        }
        at += high - low;
    }
}

/// Whether any bit of `[start, end)` is set.
pub(super) fn any(bits: &RegionBits, start: u64, end: u64) -> bool {
    (start..end).any(|i| bits[(i / 64) as usize] >> (i % 64) & 1 == 1)
}

/// One bit (the lowest of four) for each aligned group of four set bits.
fn full_quads(word: u64) -> u64 {
    word & (word >> 1) & (word >> 2) & (word >> 3) & QUAD_LOW
}

fn count_quads(mask: impl Fn(usize) -> u64) -> u64 {
    (0..REGION_WORDS).map(|w| u64::from(full_quads(mask(w)).count_ones())).sum()
}

impl Region {
    /// A region with nothing in it but what the layout reserves and what lies behind `total` blocks.
    pub(super) fn new(number: u64, total: u64) -> Region {
        let mut region = Region {
            number,
            used: [0; REGION_WORDS],
            busy: [0; REGION_WORDS],
            dirty: [0; REGION_WORDS],
            aged: [0; REGION_WORDS],
            backed: [0; REGION_WORDS],
            changed: false,
            quads: 0,
        };
        let base = number * REGION_BLOCKS;
        for (start, end) in RESERVED {
            if start < base + REGION_BLOCKS && end > base {
                fill(&mut region.busy, start.saturating_sub(base), (end - base).min(REGION_BLOCKS), true);
            }
        }
        if total < base + REGION_BLOCKS {
            fill(&mut region.busy, total.saturating_sub(base), REGION_BLOCKS, true);
        }
        region
    }

    pub(super) fn base(&self) -> u64 {
        self.number * REGION_BLOCKS
    }

    /// Recounts after bits changed; answers the difference.
    pub(super) fn recount(&mut self) -> i64 {
        let before = self.quads;
        self.quads = count_quads(|w| !self.busy[w] & self.backed[w]);
        self.quads as i64 - before as i64
    }

    /// First free backed run of `blocks` (in aligned groups of four, so that a reservation of that many groups always suffices);
    /// among dirty blocks only when `dirty`.
    pub(super) fn find(&self, blocks: u64, dirty: bool) -> Option<u64> {
        let mask = |w: usize| {
            let free = !self.busy[w] & self.backed[w];
            if dirty { free & self.dirty[w] } else { free }
        };
        if blocks < 4
            && let Some(found) = find_in_partial_quads(blocks, mask)
        {
            return Some(found);
        }
        let wanted = blocks.div_ceil(4);
        let (mut count, mut start) = (0, 0);
        for w in 0..REGION_WORDS {
            let quads = full_quads(mask(w));
            if quads == 0 {
                count = 0;
                continue;
            }
            for quad in 0..16 {
                if quads >> (4 * quad) & 1 == 0 {
                    count = 0;
                    continue;
                }
                if count == 0 {
                    start = (w * 64 + 4 * quad) as u64;
                }
                count += 1;
                if count == wanted {
                    return Some(start);
                }
            }
        }
        None
    }

    /// Runs of set bits of `mask`, as (start, length) within the region.
    pub(super) fn runs(mask: impl Fn(usize) -> u64) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for w in 0..REGION_WORDS {
            let mut word = mask(w);
            while word != 0 {
                let low = u64::from(word.trailing_zeros());
                let length = u64::from((word >> low).trailing_ones());
                let start = w as u64 * 64 + low;
                match runs.last_mut() {
                    Some(last) if last.0 + last.1 == start => last.1 += length,
                    _ => runs.push((start, length)),
                }
                if low + length == 64 {
                    break;
                }
                word &= !(((1u64 << length) - 1) << low);
            }
        }
        runs
    }
}

/// Small pages go into groups that are already broken.
fn find_in_partial_quads(blocks: u64, mask: impl Fn(usize) -> u64) -> Option<u64> {
    for w in 0..REGION_WORDS {
        let free = mask(w);
        let partial = free & !(full_quads(free) * 0xF);
        if partial == 0 {
            continue;
        }
        for quad in 0..16 {
            let nibble = partial >> (4 * quad) & 0xF;
            for low in 0..=(4 - blocks) {
                let wanted = ((1 << blocks) - 1) << low;
                if nibble & wanted == wanted {
                    return Some(w as u64 * 64 + 4 * quad + low);
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fill_and_runs_agree() {
        let mut bits = [0; REGION_WORDS];
        for (start, end) in [(0, 1), (3, 64), (64, 65), (100, 300), (8191, 8192)] {
            fill(&mut bits, start, end, true);
        }
        assert_eq!(Region::runs(|w| bits[w]), vec![(0, 1), (3, 62), (100, 200), (8191, 1)]);
        fill(&mut bits, 120, 121, false);
        assert!(!any(&bits, 120, 121) && any(&bits, 119, 122));
        assert_eq!(Region::runs(|w| bits[w])[2..4], [(100, 20), (121, 179)]);
    }

    #[test]
    fn the_layout_and_the_end_of_the_file_are_busy() {
        let region = Region::new(0, 1000);
        let free = Region::runs(|w| !region.busy[w]);
        assert_eq!(free, vec![(65, 255), (385, 615)]);
    }

    #[test]
    fn small_pages_prefer_broken_groups_and_large_ones_aligned_groups() {
        let mut region = Region::new(1, 1 << 20);
        fill(&mut region.backed, 0, 64, true);
        fill(&mut region.busy, 5, 6, true);
        region.recount();
        assert_eq!(region.quads, 15);
        assert_eq!(region.find(1, false), Some(4));
        assert_eq!(region.find(2, false), Some(6));
        assert_eq!(region.find(4, false), Some(0));
        assert_eq!(region.find(33, false), Some(8));
        assert_eq!(region.find(33, true), None);
        assert_eq!(region.find(61, false), None);
    }
}
