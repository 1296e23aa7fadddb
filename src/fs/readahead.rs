//! Reads ahead of whoever reads a file from one end to the other, where a read takes a way to another machine and back.
//!
//! The kernel reads a MiB ahead at most, unless root has it read more, and neighbours in a file lie apart in the archive: what comes next only the file's extents tell.
//! All of it is a hint ([`crate::storage::Storage::will_need`]): who reads waits for nothing but what it reads, and what it does not read after all has cost the way of it.

use std::ops::Range;

use parking_lot::Mutex;

use crate::format::Ino;

/// Readers that are told apart.
const STREAMS: usize = 16;
/// The kernel's requests overtake each other by so much.
const SLACK: u64 = 1 << 20;
/// Reads that follow upon each other before more than they want is asked for.
const FOLLOWING: u32 = 2;
/// What is asked for first.
const FIRST: u64 = 2 << 20;
/// What is asked for ahead of all readers together, when they have gone on for long: twice what is under way on a link of a gigabit and a tenth of a second, since it is asked
/// for in parts and comes in any order, and half of what is kept in memory of another machine's file (48 MiB).
const MOST: u64 = 24 << 20;
/// Reads of all readers after which one that did not read shares this with the others no more.
const RESTING: u64 = 64;

/// Somebody who reads a file.
struct Stream {
    ino: Ino,
    /// Where it began, behind what was read, and behind what was asked for.
    began: u64,
    next: u64,
    asked: u64,
    /// From here on all was asked for; the largest number when nothing was.
    expected: u64,
    following: u32,
    /// The read that was its last, counted over all.
    turn: u64,
}

#[derive(Default)]
struct Streams {
    /// The one that read last is the last.
    streams: Vec<Stream>,
    turn: u64,
}

#[derive(Default)]
pub(super) struct Ahead {
    streams: Mutex<Streams>,
}

impl Ahead {
    /// What to ask for because this is read now: bytes of the file behind it, or nothing. And whether all that is read now was asked for before.
    pub(super) fn behind(&self, ino: Ino, read: &Range<u64>) -> (Range<u64>, bool) {
        let Streams { streams, turn } = &mut *self.streams.lock();
        *turn += 1;
        let follows = |stream: &Stream| {
            stream.ino == ino && read.start.abs_diff(stream.next) <= SLACK && read.end + SLACK > stream.next
        };
        let Some(at) = streams.iter().rposition(follows) else {
            if streams.len() == STREAMS {
                streams.remove(0);
            }
            let Range { start: began, end } = *read;
            streams.push(Stream { ino, began, next: end, asked: end, expected: u64::MAX, following: 0, turn: *turn });
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
        let reads = |other: &&Stream| other.following >= FOLLOWING && *turn - other.turn <= RESTING;
        let most = MOST / (1 + streams.iter().filter(reads).count() as u64);
        // Twice what it has read so far: who stops has cost no more than that.
        let window = (2 * stream.next.saturating_sub(stream.began)).min(most).max(FIRST.min(most));
        let ahead = stream.asked - stream.next;
        let mut ask = 0..0;
        // In large parts: neighbours in the archive may be anywhere in one, and are asked for together.
        if stream.following >= FOLLOWING && ahead + (window / 4).max(FIRST / 2) <= window {
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
        let ahead = Ahead::default();
        let (mut asked, mut named) = (0..0, None);
        for at in (0..64 * MIB).step_by(128 << 10) {
            let (ask, is_expected) = ahead.behind(Ino(5), &(at..at + (128 << 10)));
            assert_eq!(is_expected, named.is_some_and(|named| named <= at), "at {at}");
            if !ask.is_empty() {
                named.get_or_insert(ask.start);
            }
            if ask.is_empty() {
                continue;
            }
            assert!(asked.end == ask.start || asked.is_empty(), "{asked:?}, and then {ask:?}");
            assert!(ask.start >= at && ask.end <= at + (128 << 10) + MOST, "{ask:?} at {at}");
            asked = asked.start.max(ask.start)..ask.end;
        }
        assert!(asked.end > 64 * MIB + MOST / 2);
    }

    #[test]
    fn what_is_asked_for_grows_with_what_was_read_and_is_shared_by_all_who_read() {
        let ahead = Ahead::default();
        let piece = 128u64 << 10;
        let mut asked = [0; 4];
        for number in 0..1024 {
            for (reader, asked) in (0..).zip(&mut asked) {
                let read = number * piece..(number + 1) * piece;
                let (ask, _) = ahead.behind(Ino(5 + reader), &read);
                *asked = ask.end.max(*asked);
                let most = (2 * read.end).clamp(FIRST, MOST / if number > 10 { 4 } else { 1 });
                assert!(asked.saturating_sub(read.end) <= most, "{ask:?} by {reader} at {read:?}");
            }
        }
        // When the others rest, one has all of it.
        for number in 1024..2048 {
            asked[0] = ahead.behind(Ino(5), &(number * piece..(number + 1) * piece)).0.end.max(asked[0]);
        }
        assert!(asked[0] >= 2048 * piece + MOST * 3 / 4);
    }

    #[test]
    fn requests_that_overtake_each_other_are_of_one_reader_and_jumps_of_none() {
        let ahead = Ahead::default();
        let piece = 256u64 << 10;
        let mut asked = 0;
        // Each second one comes before the one in front of it.
        for pair in 0..64 {
            for number in [2 * pair + 1, 2 * pair] {
                let (ask, _) = ahead.behind(Ino(5), &(number * piece..(number + 1) * piece));
                asked += ask.end - ask.start;
            }
        }
        assert!(asked >= 32 * MIB, "{asked}");
        for at in [900, 100, 500, 300, 700, 50, 870, 222] {
            assert_eq!(ahead.behind(Ino(6), &(at * MIB..at * MIB + 4096)), (0..0, false), "a jump to {at}");
        }
        // Another file has nothing to do with it.
        assert_eq!(ahead.behind(Ino(7), &(128 * piece..129 * piece)), (0..0, false));
    }
}
