//! Interpolation search within a node, followed by exponential search.
//!
//! Binary search touches a distant position in each step, which costs a cache miss per step when
//! there are many nodes. Hashes of names are evenly distributed, and so are most inode numbers and
//! offsets: the position of a key between the first and the last one gives a close guess. For any
//! other distribution the search takes at most twice the steps of binary search, because each step
//! away from the guess doubles.

use crate::format::Key;

/// Returns the number of entries for which `before` holds, like `partition_point`; `key` lies
/// between them and the others.
pub(super) fn position<T>(sorted: &[T], key_of: impl Fn(&T) -> Key, key: Key, before: impl Fn(Key) -> bool) -> usize {
    let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else { return 0 };
    let before = |entry: &T| before(key_of(entry));
    let guess = guess(key_of(first), key_of(last), sorted.len(), key);
    let mut step = 1;
    let (low, high) = if before(&sorted[guess]) {
        // `before` holds for all entries below `low`.
        let mut low = guess + 1;
        while low + step <= sorted.len() && before(&sorted[low + step - 1]) {
            low += step;
            step *= 2;
        }
        (low, (low + step - 1).min(sorted.len()))
    } else {
        // `before` holds for no entry from `high` on.
        let mut high = guess;
        while high >= step && !before(&sorted[high - step]) {
            high -= step;
            step *= 2;
        }
        ((high + 1).saturating_sub(step), high)
    };
    low + sorted[low..high].partition_point(before)
}

/// Returns the interpolated position among `count` evenly distributed keys.
fn guess(first: Key, last: Key, count: usize, key: Key) -> usize {
    let (low, high, sought) = if first.object != last.object {
        (first.object, last.object, key.object)
    } else if first.kind == last.kind && first.sub != last.sub {
        (first.sub, last.sub, key.sub)
    } else {
        return count / 2;
    };
    let part = (sought.clamp(low, high) - low) as f64 / (high - low) as f64;
    ((part * (count - 1) as f64) as usize).min(count - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_as_halving(mut keys: Vec<Key>) {
        keys.sort_unstable();
        keys.dedup();
        let neighbours = |key: &Key| {
            let (down, up) = (key.sub.checked_sub(1), key.sub.checked_add(1));
            [down, up].into_iter().flatten().map(|sub| Key { sub, ..*key }).chain([*key]).collect::<Vec<_>>()
        };
        let sought: Vec<_> = keys.iter().flat_map(neighbours).chain([Key::MIN, Key::MAX, Key::new(5, 3, 9)]).collect();
        for key in sought {
            let below = position(&keys, |key| *key, key, |other| other < key);
            assert_eq!(below, keys.partition_point(|other| *other < key), "{key:?} in {keys:?}");
            let through = position(&keys, |key| *key, key, |other| other <= key);
            assert_eq!(through, keys.partition_point(|other| *other <= key), "{key:?} in {keys:?}");
        }
    }

    #[test]
    fn a_place_is_found_however_keys_are_spread() {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for count in [0, 1, 2, 3, 7, 64, 150] {
            assert_as_halving((0..count).map(|_| Key::new(next(), (next() % 9) as u8, next())).collect());
            assert_as_halving((0..count).map(|_| Key::new(7, 2, next())).collect());
            assert_as_halving((0..count).map(|n| Key::new(7, 2, n)).collect());
            assert_as_halving((0..count).map(|n| Key::new(100 + n / 3, (n % 3) as u8, 0)).collect());
            assert_as_halving((0..count).map(|n| Key::new(7, (n % 3) as u8, next() % 50)).collect());
            // Worst-case distribution: each key is twice the previous one.
            assert_as_halving((0..count.min(64)).map(|n| Key::new(7, 2, 1 << n)).collect());
            assert_as_halving((0..count.min(64)).map(|n| Key::new(u64::MAX - (1 << n), 2, 0)).collect());
            assert_as_halving((0..count).map(|n| Key::new(7, 2, n)).chain([Key::MIN, Key::MAX]).collect());
        }
    }

    #[test]
    fn steps_are_bounded_where_the_guess_is_wrong() {
        for far in [Key::new(0, 0, 0), Key::new(9, 9, u64::MAX)] {
            let mut keys: Vec<_> = (0..4096).map(|n| Key::new(5, 5, n)).chain([far]).collect();
            keys.sort_unstable();
            for key in keys.clone() {
                let steps = std::cell::Cell::new(0);
                position(
                    &keys,
                    |key| *key,
                    key,
                    |other| {
                        steps.set(steps.get() + 1);
                        other < key
                    },
                );
                assert!(steps.get() <= 2 * 13 + 2, "{} steps to {key:?}", steps.get());
            }
        }
    }
}
