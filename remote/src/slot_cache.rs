//! What of a file is in memory: slots of 64 KiB, the least used ones dropped, and which are on their way.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use lru::LruCache;

/// Bytes of a slot.
pub(crate) const SLOT: u64 = 64 << 10;
/// Slots in memory: 48 MiB, twice what is fetched ahead.
pub(crate) const KEPT: NonZeroUsize = NonZeroUsize::new(768).unwrap();
/// Least and most slots that are fetched ahead of somebody who reads one after the other: 24 MiB are under way for a tenth of a second at
/// two gigabits.
const LEAST_AHEAD: u64 = 4;
const MOST_AHEAD: u64 = 384;
/// Slots that a page of file data lies in at most.
const OF_A_PAGE: u64 = 4;
/// Slots of one request ahead: 1 MiB, so that a connection's start costs little and many are under way side by side.
pub(crate) const PART: u64 = 16;
/// How many are watched for reading one after the other.
const STREAMS: usize = 16;

pub(crate) type Slot = Arc<[u8]>;

/// What is in memory and under way, under one lock.
pub(crate) struct Shelf {
    slots: LruCache<u64, Slot>,
    coming: HashSet<u64>,
    streams: Vec<Stream>,
}

/// Somebody who reads one slot after the other.
struct Stream {
    /// Where it began, and behind the last slot that was read.
    began: u64,
    next: u64,
    /// Behind the last slot that was asked for ahead.
    ahead: u64,
    window: u64,
}

impl Shelf {
    pub(crate) fn new() -> Shelf {
        Shelf { slots: LruCache::new(KEPT), coming: HashSet::new(), streams: Vec::new() }
    }

    /// A shelf with those slots that `keeps` says are the same there.
    pub(crate) fn kept(&self, keeps: impl Fn(u64) -> bool) -> Shelf {
        let mut kept = Shelf::new();
        // The one that was used last is put last.
        for (slot, bytes) in self.slots.iter().rev().filter(|(slot, _)| keeps(**slot)) {
            kept.slots.put(*slot, Arc::clone(bytes));
        }
        kept
    }

    pub(crate) fn get(&mut self, slot: u64) -> Option<Slot> {
        self.slots.get(&slot).cloned()
    }

    pub(crate) fn is_coming(&self, slot: u64) -> bool {
        self.coming.contains(&slot)
    }

    #[cfg(test)]
    pub(crate) fn coming(&self) -> usize {
        self.coming.len()
    }

    /// Whether any of them is neither here nor under way.
    pub(crate) fn lacks(&self, slots: &Range<u64>) -> bool {
        slots.clone().any(|slot| !self.slots.contains(&slot) && !self.coming.contains(&slot))
    }

    /// Notes that the slots at the start of `wanted` which are neither here nor under way are under way now, and gives them: neighbours.
    pub(crate) fn claim(&mut self, wanted: Range<u64>) -> Range<u64> {
        let is_missing = |slot: &u64| self.lacks(&(*slot..slot + 1));
        let start = wanted.clone().find(is_missing).unwrap_or(wanted.end);
        let end = (start..wanted.end).find(|slot| !is_missing(slot)).unwrap_or(wanted.end);
        self.coming.extend(start..end);
        start..end
    }

    /// What was under way is here, or is not to be had.
    pub(crate) fn arrived(&mut self, claimed: Range<u64>, slots: &[Slot]) {
        for (slot, bytes) in claimed.clone().zip(slots) {
            self.slots.put(slot, Arc::clone(bytes));
        }
        self.coming.retain(|slot| !claimed.contains(slot));
    }

    pub(crate) fn forget(&mut self, slots: Range<u64>) {
        // An archive can have more slots than memory has.
        let gone: Vec<u64> = self.slots.iter().map(|(slot, _)| *slot).filter(|slot| slots.contains(slot)).collect();
        gone.iter().for_each(|slot| drop(self.slots.pop(slot)));
    }

    /// What to fetch because these slots are read now: ranges, each one request. `end` is behind the file's last slot.
    pub(crate) fn ahead(&mut self, read: Range<u64>, end: u64) -> Vec<Range<u64>> {
        let follows = |stream: &Stream| (stream.next.saturating_sub(1)..=stream.next + 1).contains(&read.start);
        // Of two that met, the one that is further ahead.
        let following = self.streams.iter().enumerate().filter(|(_, stream)| follows(stream));
        let Some((at, _)) = following.max_by_key(|(_, stream)| stream.ahead) else {
            if self.streams.len() == STREAMS {
                self.streams.remove(0);
            }
            self.streams.push(Stream { began: read.start, next: read.end, ahead: read.end, window: LEAST_AHEAD });
            return Vec::new();
        };
        // The one that was read last is dropped last.
        let mut stream = self.streams.remove(at);
        let mut parts = Vec::new();
        if read.end > stream.next {
            stream.next = read.end;
            stream.ahead = stream.ahead.max(read.end);
            let until = (read.end + stream.window).min(end);
            // Head and cells of one page are no stream. Not slot by slot: a request costs a round trip.
            let is_due = stream.ahead + stream.window / 2 <= until || (until == end && stream.ahead < end);
            if is_due && stream.next - stream.began > OF_A_PAGE {
                stream.window = (stream.window * 2).min(MOST_AHEAD);
                let until = (read.end + stream.window).min(end);
                while stream.ahead < until {
                    let part = stream.ahead..(stream.ahead + PART).min(until);
                    stream.ahead = part.end;
                    parts.push(part);
                }
            }
        }
        self.streams.push(stream);
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_reads_on_is_read_ahead_of_and_who_jumps_is_not() {
        let mut shelf = Shelf::new();
        for slot in [500, 3, 900, 77] {
            assert_eq!(shelf.ahead(slot..slot + 1, 1000), Vec::new());
        }
        // Head and cells of a page.
        for read in [300..301, 300..302, 302..304] {
            assert_eq!(shelf.ahead(read, 1000), Vec::new());
        }
        let mut asked = HashSet::new();
        for slot in 4..600 {
            for part in shelf.ahead(slot..slot + 1, 1000) {
                assert!(part.end - part.start <= PART && part.end <= 1000);
                part.for_each(|ahead| assert!(asked.insert(ahead), "{ahead} is asked for once"));
            }
            let most = asked.iter().max().copied().unwrap_or_default();
            assert!(most < slot + 1 + MOST_AHEAD + PART);
        }
        assert!((610..780).all(|slot| asked.contains(&slot)));
    }

    #[test]
    fn what_is_kept_is_dropped_in_the_order_of_its_use() {
        let mut shelf = Shelf::new();
        let slot: Slot = vec![0; 4].into();
        let all = 0..KEPT.get() as u64;
        assert_eq!(shelf.claim(all.clone()), all);
        shelf.arrived(all.clone(), &vec![slot.clone(); KEPT.get()]);
        assert!(shelf.get(0).is_some());
        let mut kept = shelf.kept(|slot| slot != 7);
        assert!(kept.get(7).is_none() && kept.claim(7..8) == (7..8));
        // One takes the place of the one that is not kept, the next one that of the least used.
        kept.arrived(7..8, std::slice::from_ref(&slot));
        kept.arrived(2000..2001, &[slot]);
        assert!(kept.get(0).is_some() && kept.get(1).is_none() && kept.get(2).is_some());
    }

    #[test]
    fn a_slot_is_fetched_by_one_at_a_time() {
        let mut shelf = Shelf::new();
        assert_eq!(shelf.claim(3..8), 3..8);
        assert_eq!(shelf.claim(1..6), 1..3);
        assert_eq!(shelf.claim(3..8), 8..8);
        let slot: Slot = vec![0; 4].into();
        shelf.arrived(3..8, &[slot]);
        assert!(shelf.get(3).is_some() && !shelf.is_coming(4));
        assert_eq!(shelf.claim(3..8), 4..8);
    }
}
