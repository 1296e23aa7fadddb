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
const INITIAL_WINDOW: u64 = 2 << 20;
/// Maximum bytes of readahead for all streams together: twice the bytes in flight on a link of a
/// gigabit and a tenth of a second, since they are requested in parts and arrive in any order, and
/// half of the memory cache of a remote file (48 MiB).
const MAX_WINDOW: u64 = 24 << 20;
/// Reads of all streams after which an idle stream loses its share of the window.
const IDLE_READS: u64 = 64;

struct ReadStream {
    ino: Ino,
    /// Offsets of the first read, the end of the reads, and the end of the requests.
    start: u64,
    read_end: u64,
    requested_end: u64,
    /// Start of the range that was requested without gaps; the largest number if none was.
    requested_start: u64,
    sequential_reads: u32,
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
pub(super) struct Readahead(Mutex<StreamTable>);

impl Readahead {
    /// Records a read. Returns the range of the file to prefetch, possibly empty, and whether all
    /// of `read` was prefetched before.
    pub(super) fn record_read(&self, ino: Ino, read: &Range<u64>) -> (Range<u64>, bool) {
        let StreamTable { streams, turn } = &mut *self.0.lock();
        *turn += 1;
        let follows = |stream: &ReadStream| {
            stream.ino == ino
                && read.start.abs_diff(stream.read_end) <= REORDER_WINDOW
                && read.end + REORDER_WINDOW > stream.read_end
        };
        let Some(at) = streams.iter().rposition(follows) else {
            if streams.len() == MAX_STREAMS {
                streams.remove(0);
            }
            let Range { start, end } = *read;
            streams.push(ReadStream {
                ino,
                start,
                read_end: end,
                requested_end: end,
                requested_start: u64::MAX,
                sequential_reads: 0,
                turn: *turn,
            });
            return (0..0, false);
        };
        let mut stream = streams.remove(at);
        let is_prefetched = read.start >= stream.requested_start && read.end <= stream.requested_end;
        stream.sequential_reads = stream.sequential_reads.saturating_add(1);
        stream.turn = *turn;
        stream.read_end = stream.read_end.max(read.end);
        if stream.requested_end < stream.read_end {
            (stream.requested_end, stream.requested_start) = (stream.read_end, u64::MAX);
        }
        let reads =
            |other: &&ReadStream| other.sequential_reads >= MIN_SEQUENTIAL_READS && *turn - other.turn <= IDLE_READS;
        let most = MAX_WINDOW / (1 + streams.iter().filter(reads).count() as u64);
        // Twice the bytes read so far, so an abandoned stream has cost no more than that.
        let window = (2 * stream.read_end.saturating_sub(stream.start)).min(most).max(INITIAL_WINDOW.min(most));
        let ahead = stream.requested_end - stream.read_end;
        let mut request = 0..0;
        // In large parts: neighbours may be anywhere in the archive, and one request fetches them
        // together.
        if stream.sequential_reads >= MIN_SEQUENTIAL_READS && ahead + (window / 4).max(INITIAL_WINDOW / 2) <= window {
            if stream.requested_start == u64::MAX {
                stream.requested_start = stream.requested_end;
            }
            request = stream.requested_end..stream.read_end + window;
            stream.requested_end = request.end;
        }
        streams.push(stream);
        (request, is_prefetched)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn who_reads_on_is_read_ahead_of_without_gaps_and_nothing_is_asked_for_twice() {
        let ahead = Readahead::default();
        let (mut requested_end, mut named) = (0..0, None);
        for at in (0..64 * MIB).step_by(128 << 10) {
            let (request, is_prefetched) = ahead.record_read(Ino(5), &(at..at + (128 << 10)));
            assert_eq!(is_prefetched, named.is_some_and(|named| named <= at), "at {at}");
            if !request.is_empty() {
                named.get_or_insert(request.start);
            }
            if request.is_empty() {
                continue;
            }
            assert!(
                requested_end.end == request.start || requested_end.is_empty(),
                "{requested_end:?}, and then {request:?}"
            );
            assert!(request.start >= at && request.end <= at + (128 << 10) + MAX_WINDOW, "{request:?} at {at}");
            requested_end = requested_end.start.max(request.start)..request.end;
        }
        assert!(requested_end.end > 64 * MIB + MAX_WINDOW / 2);
    }

    #[test]
    fn what_is_asked_for_grows_with_what_was_read_and_is_shared_by_all_who_read() {
        let ahead = Readahead::default();
        let piece = 128u64 << 10;
        let mut requested_end = [0; 4];
        for number in 0..1024 {
            for (reader, requested_end) in (0..).zip(&mut requested_end) {
                let read = number * piece..(number + 1) * piece;
                let (request, _) = ahead.record_read(Ino(5 + reader), &read);
                *requested_end = request.end.max(*requested_end);
                let most = (2 * read.end).clamp(INITIAL_WINDOW, MAX_WINDOW / if number > 10 { 4 } else { 1 });
                assert!(requested_end.saturating_sub(read.end) <= most, "{request:?} by {reader} at {read:?}");
            }
        }
        // With the others idle, one stream has the whole window.
        for number in 1024..2048 {
            requested_end[0] =
                ahead.record_read(Ino(5), &(number * piece..(number + 1) * piece)).0.end.max(requested_end[0]);
        }
        assert!(requested_end[0] >= 2048 * piece + MAX_WINDOW * 3 / 4);
    }

    #[test]
    fn requests_that_overtake_each_other_are_of_one_reader_and_jumps_of_none() {
        let ahead = Readahead::default();
        let piece = 256u64 << 10;
        let mut requested_end = 0;
        // Every second request overtakes the one before it.
        for pair in 0..64 {
            for number in [2 * pair + 1, 2 * pair] {
                let (request, _) = ahead.record_read(Ino(5), &(number * piece..(number + 1) * piece));
                requested_end += request.end - request.start;
            }
        }
        assert!(requested_end >= 32 * MIB, "{requested_end}");
        for at in [900, 100, 500, 300, 700, 50, 870, 222] {
            assert_eq!(ahead.record_read(Ino(6), &(at * MIB..at * MIB + 4096)), (0..0, false), "a jump to {at}");
        }
        // Another file has no stream.
        assert_eq!(ahead.record_read(Ino(7), &(128 * piece..129 * piece)), (0..0, false));
    }
}
