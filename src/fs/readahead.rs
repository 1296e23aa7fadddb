//! Sequential readahead from remote archives, where each read costs a network round trip.
//!
//! The kernel reads at most one MiB ahead by default, and neighbours in a file are apart in the
//! archive: only the file's extents tell the blocks that come next. All requests are hints
//! ([`crate::storage::Storage::will_need`]): a reader waits only for the data that it reads, and
//! unused readahead costs only its transfer.

use std::ops::Range;

use parking_lot::Mutex;

use crate::format::Ino;

/// Maximum number of streams that are tracked.
const MAX_STREAMS: usize = 16;
/// Distance by which the kernel's requests overtake each other.
const REORDER_WINDOW: u64 = 1 << 20;
/// Sequential reads before readahead begins.
const MIN_SEQUENTIAL_READS: u32 = 2;
/// First readahead window.
const INITIAL_WINDOW: u64 = 2 << 20;
/// Maximum bytes of readahead for all streams together: twice the bytes in flight on a link of a
/// gigabit and a tenth of a second, since they are requested in parts and arrive in any order, and
/// half of the memory cache of a remote file (48 MiB).
const MAX_WINDOW: u64 = 24 << 20;
/// Reads of all streams after which an idle stream loses its share of the window.
const IDLE_READS: u64 = 64;

/// One sequential reader of a file.
struct ReadStream {
    ino: Ino,
    /// Offsets of the first read, the end of the reads, and the end of the requests.
    began: u64,
    next: u64,
    asked: u64,
    /// Start of the range that was requested without gaps; the largest number if none was.
    expected: u64,
    following: u32,
    /// Number of the stream's last read, counted over all streams.
    turn: u64,
}

#[derive(Default)]
struct StreamTable {
    /// Ordered by last read, most recent last.
    streams: Vec<ReadStream>,
    turn: u64,
}

#[derive(Default)]
pub(super) struct Readahead {
    streams: Mutex<StreamTable>,
}

impl Readahead {
    /// Records a read. Returns the range of the file to prefetch, possibly empty, and whether all
    /// of `read` was prefetched before.
    pub(super) fn record_read(&self, ino: Ino, read: &Range<u64>) -> (Range<u64>, bool) {
        let StreamTable { streams, turn } = &mut *self.streams.lock();
        *turn += 1;
        let follows = |stream: &ReadStream| {
            stream.ino == ino
                && read.start.abs_diff(stream.next) <= REORDER_WINDOW
                && read.end + REORDER_WINDOW > stream.next
        };
        let Some(at) = streams.iter().rposition(follows) else {
            if streams.len() == MAX_STREAMS {
                streams.remove(0);
            }
            let Range { start: began, end } = *read;
            streams.push(ReadStream {
                ino,
                began,
                next: end,
                asked: end,
                expected: u64::MAX,
                following: 0,
                turn: *turn,
            });
            return (0..0, false);
        };
        let mut stream = streams.remove(at);
        let is_expected = read.start >= stream.expected && read.end <= stream.asked;
        stream.following = stream.following.saturating_add(1);
        stream.turn = *turn;
        stream.next = stream.next.max(read.end);
        if stream.asked < stream.next {
            (stream.asked, stream.expected) = (stream.next, u64::MAX);
        }
        let reads = |other: &&ReadStream| other.following >= MIN_SEQUENTIAL_READS && *turn - other.turn <= IDLE_READS;
        let most = MAX_WINDOW / (1 + streams.iter().filter(reads).count() as u64);
        // Twice the bytes read so far, so an abandoned stream has cost no more than that.
        let window = (2 * stream.next.saturating_sub(stream.began)).min(most).max(INITIAL_WINDOW.min(most));
        let ahead = stream.asked - stream.next;
        let mut ask = 0..0;
        // In large parts: neighbours may be anywhere in the archive, and one request fetches them
        // together.
        if stream.following >= MIN_SEQUENTIAL_READS && ahead + (window / 4).max(INITIAL_WINDOW / 2) <= window {
            if stream.expected == u64::MAX {
                stream.expected = stream.asked;
            }
            ask = stream.asked..stream.next + window;
            stream.asked = ask.end;
        }
        streams.push(stream);
        (ask, is_expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn who_reads_on_is_read_ahead_of_without_gaps_and_nothing_is_asked_for_twice() {
        let ahead = Readahead::default();
        let (mut asked, mut named) = (0..0, None);
        for at in (0..64 * MIB).step_by(128 << 10) {
            let (ask, is_expected) = ahead.record_read(Ino(5), &(at..at + (128 << 10)));
            assert_eq!(is_expected, named.is_some_and(|named| named <= at), "at {at}");
            if !ask.is_empty() {
                named.get_or_insert(ask.start);
            }
            if ask.is_empty() {
                continue;
            }
            assert!(asked.end == ask.start || asked.is_empty(), "{asked:?}, and then {ask:?}");
            assert!(ask.start >= at && ask.end <= at + (128 << 10) + MAX_WINDOW, "{ask:?} at {at}");
            asked = asked.start.max(ask.start)..ask.end;
        }
        assert!(asked.end > 64 * MIB + MAX_WINDOW / 2);
    }

    #[test]
    fn what_is_asked_for_grows_with_what_was_read_and_is_shared_by_all_who_read() {
        let ahead = Readahead::default();
        let piece = 128u64 << 10;
        let mut asked = [0; 4];
        for number in 0..1024 {
            for (reader, asked) in (0..).zip(&mut asked) {
                let read = number * piece..(number + 1) * piece;
                let (ask, _) = ahead.record_read(Ino(5 + reader), &read);
                *asked = ask.end.max(*asked);
                let most = (2 * read.end).clamp(INITIAL_WINDOW, MAX_WINDOW / if number > 10 { 4 } else { 1 });
                assert!(asked.saturating_sub(read.end) <= most, "{ask:?} by {reader} at {read:?}");
            }
        }
        // With the others idle, one stream has the whole window.
        for number in 1024..2048 {
            asked[0] = ahead.record_read(Ino(5), &(number * piece..(number + 1) * piece)).0.end.max(asked[0]);
        }
        assert!(asked[0] >= 2048 * piece + MAX_WINDOW * 3 / 4);
    }

    #[test]
    fn requests_that_overtake_each_other_are_of_one_reader_and_jumps_of_none() {
        let ahead = Readahead::default();
        let piece = 256u64 << 10;
        let mut asked = 0;
        // Every second request overtakes the one before it.
        for pair in 0..64 {
            for number in [2 * pair + 1, 2 * pair] {
                let (ask, _) = ahead.record_read(Ino(5), &(number * piece..(number + 1) * piece));
                asked += ask.end - ask.start;
            }
        }
        assert!(asked >= 32 * MIB, "{asked}");
        for at in [900, 100, 500, 300, 700, 50, 870, 222] {
            assert_eq!(ahead.record_read(Ino(6), &(at * MIB..at * MIB + 4096)), (0..0, false), "a jump to {at}");
        }
        // Another file has no stream.
        assert_eq!(ahead.record_read(Ino(7), &(128 * piece..129 * piece)), (0..0, false));
    }
}
