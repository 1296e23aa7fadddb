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
/// What is asked for first, and when a reader has gone on for long: a tenth of a second at a gigabit. With it four readers fit into what is kept in memory of another machine's file (48 MiB).
const FIRST: u64 = 2 << 20;
const MOST: u64 = 12 << 20;

/// Somebody who reads a file.
struct Stream {
    ino: Ino,
    /// Behind what was read, and behind what was asked for.
    next: u64,
    asked: u64,
    following: u32,
    window: u64,
}

#[derive(Default)]
pub(super) struct Ahead {
    /// The one that read last is the last.
    streams: Mutex<Vec<Stream>>,
}

impl Ahead {
    /// What to ask for because this is read now: bytes of the file behind it, or nothing.
    pub(super) fn behind(&self, ino: Ino, read: &Range<u64>) -> Range<u64> {
        let mut streams = self.streams.lock();
        let follows = |stream: &Stream| {
            stream.ino == ino && read.start.abs_diff(stream.next) <= SLACK && read.end + SLACK > stream.next
        };
        let Some(at) = streams.iter().rposition(follows) else {
            if streams.len() == STREAMS {
                streams.remove(0);
            }
            streams.push(Stream { ino, next: read.end, asked: read.end, following: 0, window: FIRST });
            return 0..0;
        };
        let mut stream = streams.remove(at);
        stream.following = stream.following.saturating_add(1);
        stream.next = stream.next.max(read.end);
        stream.asked = stream.asked.max(stream.next);
        let mut ask = 0..0;
        // In large parts: neighbours in the archive may be anywhere in one, and are asked for together.
        if stream.following >= FOLLOWING && stream.asked - stream.next <= stream.window / 2 {
            ask = stream.asked..stream.next + stream.window;
            stream.asked = ask.end;
            stream.window = (stream.window * 2).min(MOST);
        }
        streams.push(stream);
        ask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn who_reads_on_is_read_ahead_of_without_gaps_and_nothing_is_asked_for_twice() {
        let ahead = Ahead::default();
        let mut asked = 0..0;
        for at in (0..64 * MIB).step_by(128 << 10) {
            let ask = ahead.behind(Ino(5), &(at..at + (128 << 10)));
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
    fn requests_that_overtake_each_other_are_of_one_reader_and_jumps_of_none() {
        let ahead = Ahead::default();
        let piece = 256u64 << 10;
        let mut asked = 0;
        // Each second one comes before the one in front of it.
        for pair in 0..64 {
            for number in [2 * pair + 1, 2 * pair] {
                let ask = ahead.behind(Ino(5), &(number * piece..(number + 1) * piece));
                asked += ask.end - ask.start;
            }
        }
        assert!(asked >= 32 * MIB, "{asked}");
        for at in [900, 100, 500, 300, 700, 50, 870, 222] {
            assert_eq!(ahead.behind(Ino(6), &(at * MIB..at * MIB + 4096)), 0..0, "a jump to {at}");
        }
        // Another file has nothing to do with it.
        assert_eq!(ahead.behind(Ino(7), &(128 * piece..129 * piece)), 0..0);
    }
}
