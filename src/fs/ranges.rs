//! Sets of ranges.

use std::ops::Range;

/// Sorts and joins what overlaps or touches.
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
}
