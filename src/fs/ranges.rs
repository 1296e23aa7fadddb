//! Sets of ranges: union and difference.

use std::ops::Range;

/// Sorts the ranges and joins overlapping and adjacent ones.
pub(crate) fn join<T: Copy + Ord>(mut ranges: Vec<Range<T>>) -> Vec<Range<T>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<T>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// Returns the parts of `range` that no range of `others` (ascending) overlaps.
pub(crate) fn gaps(range: Range<u64>, others: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut gaps = Vec::new();
    let mut at = range.start;
    for other in others.filter(|other| other.end > range.start && other.start < range.end) {
        if other.start > at {
            gaps.push(at..other.start);
        }
        at = at.max(other.end);
    }
    if at < range.end {
        gaps.push(at..range.end);
    }
    gaps
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init)] // a list of ranges that has one
    use super::*;

    #[test]
    fn what_overlaps_or_touches_is_one_range() {
        assert_eq!(join(vec![7..9, 0..3, 3..4, 1..2, 8..12_u64]), [0..4, 7..12]);
        assert_eq!(join(vec![5..6, 0..9_u32]), [0..9]);
        assert_eq!(join(Vec::<Range<u32>>::new()), []);
    }

    #[test]
    fn gaps_are_what_no_other_range_overlaps() {
        let gaps_in = |range, others: &[Range<u64>]| gaps(range, others.iter().cloned());
        assert_eq!(gaps_in(10..20, &[0..5, 8..12, 12..14, 15..16, 19..30, 40..41]), [14..15, 16..19]);
        assert_eq!(gaps_in(10..20, &[]), [10..20]);
        assert_eq!(gaps_in(10..20, &[5..25]), []);
        assert_eq!(gaps_in(10..10, &[]), []);
    }
}
