//! In-memory node: leaf entries over one value heap, or children of an internal node.

use std::sync::OnceLock;

use super::Child;
use crate::format::node::{self, INTERNAL_ENTRY, LEAF_ENTRY, NODE_HEAD, NodeHead};
use crate::format::{Generation, Key, NODE_CAPACITY, Pointer};

/// Fill of the left half of a split when the newest entry is the last one, or the last of its
/// object and kind. Ascending keys then fill their nodes, and a tenth is left for values that grow.
const ASCENDING_FILL: usize = NODE_CAPACITY / 10 * 9;
/// Heap garbage in bytes below which a leaf is not compacted.
const MAX_GARBAGE: usize = 512;
/// Spare entries and bytes of values in the copy of a leaf: enough for most operations.
const SPARE: (usize, usize) = (4, 512);

#[derive(Clone)]
pub(crate) struct Node {
    /// Transaction that created this node; for a loaded node the generation of its page.
    pub(crate) born: Generation,
    /// Pointer of the page, set once when a commit has written it.
    pub(crate) stored: OnceLock<Pointer>,
    pub(super) tree: u8,
    pub(super) level: u8,
    pub(super) lower: Key,
    pub(super) upper: Key,
    pub(super) body: Body,
}

#[derive(Clone)]
pub(super) enum Body {
    Leaf(Leaf),
    /// Children by lower fence. The first key is the node's lower fence; a child's upper fence is
    /// the next key or the node's upper fence.
    Internal(Vec<(Key, Child)>),
}

/// Tree, level and fences that a parent requires of a child.
pub(super) type Bounds = NodeHead;

impl Bounds {
    pub(super) fn root(tree: u8, level: u8) -> Bounds {
        Bounds { tree, level, lower: Key::MIN, upper: Key::MAX }
    }
}

impl Node {
    pub(super) fn new(born: Generation, bounds: Bounds, body: Body) -> Node {
        let Bounds { tree, level, lower, upper } = bounds;
        Node { born, stored: OnceLock::new(), tree, level, lower, upper, body }
    }

    pub(super) fn clone_for(&self, born: Generation) -> Node {
        Node::new(born, self.bounds(), self.body.clone())
    }

    pub(super) fn bounds(&self) -> Bounds {
        Bounds { tree: self.tree, level: self.level, lower: self.lower, upper: self.upper }
    }

    pub(super) fn encoded_size(&self) -> usize {
        NODE_HEAD
            + match &self.body {
                Body::Leaf(leaf) => leaf.encoded_size(),
                Body::Internal(children) => children.len() * INTERNAL_ENTRY,
            }
    }

    /// Returns the estimated memory in bytes.
    pub(super) fn memory(&self) -> usize {
        size_of::<Node>()
            + match &self.body {
                Body::Leaf(leaf) => leaf.entries.capacity() * size_of::<Entry>() + leaf.heap.capacity(),
                Body::Internal(children) => children.capacity() * size_of::<(Key, Child)>(),
            }
    }

    pub(super) fn is_empty(&self) -> bool {
        match &self.body {
            Body::Leaf(leaf) => leaf.entries.is_empty(),
            Body::Internal(children) => children.is_empty(),
        }
    }

    /// Returns the children of an internal node; a leaf has none.
    pub(super) fn children(&self) -> &[(Key, Child)] {
        match &self.body {
            Body::Leaf(_) => &[],
            Body::Internal(children) => children,
        }
    }

    pub(super) fn child_bounds(&self, slot: usize) -> Bounds {
        let children = self.children();
        Bounds {
            tree: self.tree,
            level: self.level - 1,
            lower: children[slot].0,
            upper: children.get(slot + 1).map_or(self.upper, |next| next.0),
        }
    }

    /// Splits an overfull node into two that fit and returns the right half. `newest` is the
    /// position of the entry that made it overfull.
    ///
    /// Two halves always suffice (TREE-5): the node held at most `NODE_CAPACITY` before one entry
    /// was added or grew, and an entry takes at most 3,519 bytes, so the larger half of a split in
    /// the middle has at most (16,238 + 3,519) / 2 + 3,519 bytes of entries. A split for ascending
    /// keys leaves at most nine tenths on the left, and on the right a tenth and at most two
    /// entries, or less than half.
    pub(super) fn split(&mut self, newest: usize) -> Node {
        let total = self.encoded_size() - NODE_HEAD;
        let right = match &mut self.body {
            Body::Leaf(leaf) => {
                let count = leaf.entries.len();
                let (limit, most) = if leaf.ends_group(newest) && leaf.size_through(newest) > total / 2 {
                    (ASCENDING_FILL, newest + 1)
                } else {
                    (total / 2, count)
                };
                let mut left = 0;
                let fitting = leaf.entries.iter().take_while(|entry| {
                    left += LEAF_ENTRY + usize::from(entry.length);
                    left <= limit
                });
                let at = fitting.count().min(most).clamp(1, count - 1);
                Body::Leaf(leaf.split_off(at))
            }
            Body::Internal(children) => {
                let count = children.len();
                let limit = if newest + 1 == count { ASCENDING_FILL } else { total / 2 };
                Body::Internal(children.split_off((limit / INTERNAL_ENTRY).clamp(1, count - 1)))
            }
        };
        let lower = match &right {
            Body::Leaf(leaf) => leaf.entries[0].key,
            Body::Internal(children) => children[0].0,
        };
        let bounds = Bounds { lower, ..self.bounds() };
        self.upper = lower;
        Node::new(self.born, bounds, right)
    }

    pub(super) fn merge(left: &Node, right: &Node, born: Generation) -> Node {
        let body = match (&left.body, &right.body) {
            (Body::Leaf(a), Body::Leaf(b)) => Body::Leaf(Leaf::from_entries(a.iter().chain(b.iter()))),
            (Body::Internal(a), Body::Internal(b)) => Body::Internal(a.iter().chain(b).cloned().collect()),
            // Neighbours have the level that their parent requires (TREE-4), and the level
            // determines the kind of body.
            _ => unreachable!("neighbours of different levels"),
        };
        Node::new(born, Bounds { upper: right.upper, ..left.bounds() }, body)
    }

    /// Encodes a leaf, or an internal node whose children are at `pointers`.
    pub(super) fn encode(&self, pointers: &[Pointer]) -> Vec<u8> {
        match &self.body {
            Body::Leaf(leaf) => node::encode_leaf(&self.bounds(), leaf.iter()),
            Body::Internal(children) => node::encode_internal(
                &self.bounds(),
                children.iter().map(|child| child.0).zip(pointers.iter().copied()),
            ),
        }
    }
}

/// Returns the slot of the child that covers `key`. Keys below the first slot map to it; only scans
/// ask for those.
pub(super) fn slot_of(children: &[(Key, Child)], key: Key) -> usize {
    position(children, |child| child.0, key, |other| other <= key).saturating_sub(1)
}

/// Location of a value in the heap.
#[derive(Clone, Copy)]
struct Entry {
    key: Key,
    offset: u32,
    length: u16,
}

impl Entry {
    fn range(&self) -> std::ops::Range<usize> {
        self.offset as usize..self.offset as usize + usize::from(self.length)
    }
}

/// Sorted entries over one heap, so that copying a leaf is two memory copies.
#[derive(Default)]
pub(super) struct Leaf {
    entries: Vec<Entry>,
    heap: Vec<u8>,
    /// Bytes of the heap that entries use; the rest is garbage.
    live: usize,
}

impl Clone for Leaf {
    /// Without spare space, the insert for which the copy is made would copy it again, into twice
    /// the memory.
    fn clone(&self) -> Leaf {
        let mut copy = Leaf {
            entries: Vec::with_capacity(self.entries.len() + SPARE.0),
            heap: Vec::with_capacity(self.heap.len() + SPARE.1),
            live: self.live,
        };
        copy.entries.extend_from_slice(&self.entries);
        copy.heap.extend_from_slice(&self.heap);
        copy
    }
}

impl Leaf {
    pub(super) fn from_entries<'a>(source: impl Iterator<Item = (Key, &'a [u8])> + Clone) -> Leaf {
        let (count, bytes) = source.clone().fold((0, 0), |(count, bytes), (_, value)| (count + 1, bytes + value.len()));
        let mut leaf = Leaf { entries: Vec::with_capacity(count), heap: Vec::with_capacity(bytes), live: bytes };
        for (key, value) in source {
            let offset = leaf.append(value);
            leaf.entries.push(Entry { key, offset, length: value.len() as u16 });
        }
        leaf
    }

    fn encoded_size(&self) -> usize {
        self.entries.len() * LEAF_ENTRY + self.live
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Keys of one file's extents ascend even if other files follow.
    fn ends_group(&self, position: usize) -> bool {
        let group = |entry: &Entry| (entry.key.object, entry.key.kind);
        self.entries.get(position + 1).is_none_or(|next| group(next) != group(&self.entries[position]))
    }

    fn size_through(&self, position: usize) -> usize {
        self.entries[..=position].iter().map(|entry| LEAF_ENTRY + usize::from(entry.length)).sum()
    }

    pub(super) fn entry(&self, position: usize) -> (Key, &[u8]) {
        let entry = &self.entries[position];
        (entry.key, &self.heap[entry.range()])
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = (Key, &[u8])> + Clone {
        self.entries.iter().map(|entry| (entry.key, &self.heap[entry.range()]))
    }

    pub(super) fn count_below(&self, key: Key) -> usize {
        position(&self.entries, |entry| entry.key, key, |other| other < key)
    }

    pub(super) fn floor(&self, key: Key) -> Option<(Key, &[u8])> {
        let count = position(&self.entries, |entry| entry.key, key, |other| other <= key);
        Some(self.entry(count.checked_sub(1)?))
    }

    fn find(&self, key: Key) -> Result<usize, usize> {
        let position = self.count_below(key);
        match self.entries.get(position) {
            Some(entry) if entry.key == key => Ok(position),
            _ => Err(position),
        }
    }

    pub(super) fn get(&self, key: Key) -> Option<&[u8]> {
        Some(self.entry(self.find(key).ok()?).1)
    }

    /// Inserts or replaces an entry; returns its position and whether the key existed. The value
    /// has at most `MAX_VALUE` bytes.
    pub(super) fn put(&mut self, key: Key, value: &[u8]) -> (usize, bool) {
        let length = value.len() as u16;
        self.live += value.len();
        let result = match self.find(key) {
            Ok(position) => {
                let old = self.entries[position];
                self.live -= usize::from(old.length);
                let offset = if length <= old.length {
                    self.heap[old.offset as usize..][..value.len()].copy_from_slice(value);
                    old.offset
                } else {
                    self.append(value)
                };
                self.entries[position] = Entry { key, offset, length };
                (position, true)
            }
            Err(position) => {
                let offset = self.append(value);
                self.entries.insert(position, Entry { key, offset, length });
                (position, false)
            }
        };
        self.compact();
        result
    }

    pub(super) fn remove(&mut self, key: Key) -> bool {
        let Ok(position) = self.find(key) else { return false };
        self.live -= usize::from(self.entries.remove(position).length);
        self.compact();
        true
    }

    /// Appends a value to the heap and returns its offset, which fits: a heap stays below three
    /// nodes' worth of bytes before it is compacted.
    fn append(&mut self, value: &[u8]) -> u32 {
        let offset = self.heap.len() as u32;
        self.heap.extend_from_slice(value);
        offset
    }

    fn compact(&mut self) {
        if self.heap.len() > 2 * self.live + MAX_GARBAGE {
            *self = Leaf::from_entries(self.iter());
        }
    }

    fn split_off(&mut self, at: usize) -> Leaf {
        let right = Leaf::from_entries(self.iter().skip(at));
        *self = Leaf::from_entries(self.iter().take(at));
        right
    }
}

/// Interpolation search within a node, followed by exponential search.
///
/// Binary search touches a distant position in each step, which costs a cache miss per step when
/// there are many nodes. Hashes of names are evenly distributed, and so are most inode numbers and
/// offsets: the position of a key between the first and the last one gives a close guess. For any
/// other distribution the search takes at most twice the steps of binary search, because each step
/// away from the guess doubles.
///
/// Returns the number of entries for which `before` holds, like `partition_point`; `key` lies
/// between them and the others.
fn position<T>(sorted: &[T], key_of: impl Fn(&T) -> Key, key: Key, before: impl Fn(Key) -> bool) -> usize {
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
