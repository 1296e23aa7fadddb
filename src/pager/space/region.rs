//! In-memory region of the space map: used, busy, dirty and backed blocks, and searches for runs.

use crate::format::REGION_BLOCKS;
use crate::format::space::{REGION_WORDS, RegionBits};

/// Lowest bit of every group of four.
const GROUP_LOW: u64 = 0x1111_1111_1111_1111;

/// State of the 8,192 blocks of a region.
///
/// A block is *used* when a page of the last durable commit lies there; *busy* when it must not be
/// allocated (used, pending free, in flight, being erased, reserved by the layout, or past the end
/// of the file); *dirty* when it is free and holds old ciphertext; *aged* when it was already dirty
/// at the last tick; *backed* when it is free and the host has allocated it.
pub(super) struct Region {
    pub(super) number: u64,
    pub(super) used: RegionBits,
    pub(super) busy: RegionBits,
    pub(super) dirty: RegionBits,
    pub(super) aged: RegionBits,
    pub(super) backed: RegionBits,
    /// Set when `used` differs from the checkpoint.
    pub(super) changed: bool,
    /// Free, backed, aligned groups of four blocks.
    pub(super) groups: u64,
    /// Free, backed blocks outside of such groups.
    loose: u64,
    /// Free, backed blocks that were dirty at the last count. Never too low, since every change to
    /// dirty is followed by a count.
    recyclable: u64,
    /// Start of the range in which a full host refused to allocate every hole.
    pub(super) refused_from: u64,
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

pub(super) fn any(bits: &RegionBits, start: u64, end: u64) -> bool {
    (start..end).any(|i| bits[(i / 64) as usize] >> (i % 64) & 1 == 1)
}

fn ones(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

/// Returns one bit (the lowest of four) for each aligned group of four set bits.
fn full_groups(word: u64) -> u64 {
    word & (word >> 1) & (word >> 2) & (word >> 3) & GROUP_LOW
}

impl Region {
    /// Creates a region in which only layout areas and blocks from `total` on are busy.
    pub(super) fn new(number: u64, total: u64, reserved: &[(u64, u64)]) -> Region {
        let mut region = Region {
            number,
            used: [0; REGION_WORDS],
            busy: [0; REGION_WORDS],
            dirty: [0; REGION_WORDS],
            aged: [0; REGION_WORDS],
            backed: [0; REGION_WORDS],
            changed: false,
            groups: 0,
            loose: 0,
            recyclable: 0,
            refused_from: REGION_BLOCKS,
        };
        let base = number * REGION_BLOCKS;
        for &(start, end) in reserved {
            if start < base + REGION_BLOCKS && end > base {
                fill(&mut region.busy, start.saturating_sub(base), (end - base).min(REGION_BLOCKS), true);
            }
        }
        if total < base + REGION_BLOCKS {
            fill(&mut region.busy, total.saturating_sub(base), REGION_BLOCKS, true);
        }
        region
    }

    pub(super) fn count_used(&self) -> u64 {
        ones(&self.used)
    }

    /// Sets or clears used bits; returns the change in the number of used blocks.
    pub(super) fn set_used(&mut self, start: u64, end: u64, used: bool) -> i64 {
        let words = (start / 64) as usize..end.div_ceil(64) as usize;
        let before = ones(&self.used[words.clone()]);
        fill(&mut self.used, start, end, used);
        ones(&self.used[words]) as i64 - before as i64
    }

    pub(super) fn occupy(&mut self, start: u64, end: u64) {
        fill(&mut self.busy, start, end, true);
        for free in [&mut self.dirty, &mut self.aged, &mut self.backed] {
            fill(free, start, end, false);
        }
    }

    pub(super) fn base(&self) -> u64 {
        self.number * REGION_BLOCKS
    }

    /// Recounts after bits changed; returns the change in the number of free groups.
    pub(super) fn recount(&mut self) -> i64 {
        let before = self.groups;
        let (mut groups, mut blocks, mut recyclable) = (0, 0, 0);
        for word in 0..REGION_WORDS {
            let available = self.available(word);
            groups += u64::from(full_groups(available).count_ones());
            blocks += u64::from(available.count_ones());
            recyclable += u64::from((available & self.dirty[word]).count_ones());
        }
        (self.groups, self.loose, self.recyclable) = (groups, blocks - 4 * groups, recyclable);
        self.groups as i64 - before as i64
    }

    fn available(&self, word: usize) -> u64 {
        !self.busy[word] & self.backed[word]
    }

    /// Finds a first fit of `blocks` free backed blocks; only unerased ones if `dirty`.
    ///
    /// A run starts where free space starts or at a multiple of four, so that it never breaks more
    /// than ceil(blocks / 4) whole groups (SPACE-2): where free space starts in the middle of a
    /// group, that group is already broken.
    pub(super) fn find(&self, blocks: u64, dirty: bool) -> Option<u64> {
        let mask = |w: usize| self.available(w) & if dirty { self.dirty[w] } else { u64::MAX };
        if blocks > if dirty { self.recyclable } else { self.loose + 4 * self.groups } {
            debug_assert!(Region::runs(mask).iter().map(|run| run.1).sum::<u64>() < blocks, "counts are out of date");
            return None;
        }
        if blocks < 4
            && blocks <= self.loose
            && let Some(found) = find_in_partial_groups(blocks, |w| self.available(w), mask)
        {
            return Some(found);
        }
        let mut found = None;
        for_each_run(mask, &mut |start, length| {
            let first = if self.breaks_group(start) { start.next_multiple_of(4) } else { start };
            if start + length >= first + blocks {
                found = Some(first);
            }
            found.is_none()
        });
        found
    }

    /// Returns whether a run from `start` may break an additional whole group: it starts inside a
    /// group and free space does not start there.
    fn breaks_group(&self, start: u64) -> bool {
        !start.is_multiple_of(4) && is_available(self, start - 1)
    }

    /// Returns whether `blocks` free backed blocks lie at `start`, and free space or a group starts
    /// there, as for [`Self::find`].
    pub(super) fn fits_at(&self, start: u64, blocks: u64) -> bool {
        !self.breaks_group(start)
            && start + blocks <= REGION_BLOCKS
            && (start..start + blocks).all(|block| is_available(self, block))
    }

    /// Returns the free groups of four that the host has not completely allocated.
    fn holes(&self, word: usize) -> u64 {
        (full_groups(!self.busy[word]) & !full_groups(self.available(word))) * 0xF
    }

    pub(super) fn first_hole(&self) -> Option<(u64, u64)> {
        let mut found = None;
        for_each_run(|w| self.holes(w), &mut |start, length| {
            found = Some((start, length));
            false
        });
        found
    }

    /// Returns the last run of holes that was not yet requested from the host.
    pub(super) fn last_hole(&self) -> Option<(u64, u64)> {
        let mut found = None;
        for_each_run(|w| self.holes(w), &mut |start, length| {
            let end = (start + length).min(self.refused_from);
            if start < end {
                found = Some((start, end));
            }
            start + length < self.refused_from
        });
        found
    }

    /// Returns runs of set bits of `mask` as (start, length) within the region.
    pub(super) fn runs(mask: impl Fn(usize) -> u64) -> Vec<(u64, u64)> {
        let mut runs = Vec::new();
        for_each_run(mask, &mut |start, length| {
            runs.push((start, length));
            true
        });
        runs
    }
}

fn is_available(region: &Region, block: u64) -> bool {
    region.available((block / 64) as usize) >> (block % 64) & 1 == 1
}

/// Calls `f(start, length)` for the maximal runs of set bits in order until it returns false.
fn for_each_run(mask: impl Fn(usize) -> u64, f: &mut dyn FnMut(u64, u64) -> bool) {
    let mut open: Option<(u64, u64)> = None;
    for w in 0..REGION_WORDS {
        let mut word = mask(w);
        let base = w as u64 * 64;
        if let Some((start, length)) = open {
            // A run that reached the end of the last word continues or ends here.
            let more = u64::from(word.trailing_ones());
            if more == 64 {
                open = Some((start, length + 64));
                continue;
            }
            open = None;
            if !f(start, length + more) {
                return;
            }
            word &= !((1u64 << more) - 1);
        }
        while word != 0 {
            let low = u64::from(word.trailing_zeros());
            let length = u64::from((word >> low).trailing_ones());
            if low + length == 64 {
                open = Some((base + low, length));
                break;
            }
            if !f(base + low, length) {
                return;
            }
            word &= !(((1u64 << length) - 1) << low);
        }
    }
    if let Some((start, length)) = open {
        f(start, length);
    }
}

/// Finds a place for a small page in broken groups; `mask` selects the blocks that may be taken.
fn find_in_partial_groups(blocks: u64, available: impl Fn(usize) -> u64, mask: impl Fn(usize) -> u64) -> Option<u64> {
    for w in 0..REGION_WORDS {
        let partial = mask(w) & !(full_groups(available(w)) * 0xF);
        if partial == 0 {
            continue;
        }
        for group in 0..16 {
            let nibble = partial >> (4 * group) & 0xF;
            for low in 0..=(4 - blocks) {
                let wanted = ((1 << blocks) - 1) << low;
                if nibble & wanted == wanted {
                    return Some(w as u64 * 64 + 4 * group + low);
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::reserved;

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
    fn a_change_of_use_tells_how_many_blocks_it_changed() {
        let mut region = Region::new(1, 1 << 20, reserved(false));
        assert_eq!(region.set_used(60, 70, true), 10);
        assert_eq!(region.set_used(65, 200, true), 130);
        assert_eq!(region.set_used(0, 64, false), -4);
        assert_eq!(region.set_used(0, 64, false), 0);
        assert_eq!(region.count_used(), 136);
        assert_eq!(region.set_used(0, REGION_BLOCKS, true), 8192 - 136);
    }

    #[test]
    fn the_layout_and_the_end_of_the_file_are_busy() {
        let free = |has_log| {
            let region = Region::new(0, 1000, reserved(has_log));
            Region::runs(|w| !region.busy[w])
        };
        assert_eq!(free(false), vec![(65, 255), (385, 615)]);
        assert_eq!(free(true), vec![(385, 615)]);
    }

    #[test]
    fn no_allocation_breaks_more_whole_groups_than_it_was_promised() {
        let mut region = Region::new(1, 1 << 20, reserved(false));
        fill(&mut region.backed, 0, 64, true);
        fill(&mut region.busy, 5, 6, true);
        region.recount();
        assert_eq!(region.groups, 15);
        assert_eq!(region.find(1, false), Some(4));
        assert_eq!(region.find(2, false), Some(6));
        assert_eq!(region.find(4, false), Some(0));
        assert_eq!(region.find(33, false), Some(6), "goes on where free space begins");
        assert_eq!(region.find(33, true), None);
        assert_eq!(region.find(59, false), None);
        fill(&mut region.dirty, 9, 64, true);
        region.recount();
        assert_eq!(region.find(33, true), Some(12), "would break a whole group more at 9");
        assert_eq!(region.find(2, true), Some(12));
    }
}
