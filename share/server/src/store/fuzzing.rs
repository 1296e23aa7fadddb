//! Replays segment files that somebody made up: compiled for the fuzzer and for the tests of
//! hostile files only.
//!
//! An input is a file as it is, or a list of records that get the checksums which their place asks
//! for: nearly every other input would end at the first checksum.

use std::sync::Arc;
use std::time::Duration;

use lockbox_share_protocol::token::{Auth, ClaimId, Digest, Handle, Verifier};

use super::env::StoreTime;
use super::record::{CapsuleRef, FIXED, RecordPosition, encode, seal};
use super::segments::fuzzing::head;
use super::segments::{SegmentSettings, SegmentStore};
use super::share::{Key, Share};
use super::simulated::{ManualClock, SimulatedDisk};
use super::{Durability, NewShare, ShareStore, SpoolEntry, StoreMaintenance};

const NONCE: u64 = 0x1234_5678_9abc_def0;
/// The input is a whole file.
const RAW: u8 = 0;

/// Opens a store over what the input says, uses it, and opens it again.
///
/// # Panics
/// When the store does not stand on what a second start finds: that is the finding.
pub fn segment(data: &[u8]) {
    let Some((&kind, rest)) = data.split_first() else { return };
    let file = if kind == RAW { rest.to_vec() } else { forge(kind, rest) };
    let disk = Arc::new(SimulatedDisk::new());
    disk.plant("segment-00000003", file);
    let clock = Arc::new(ManualClock::new());
    let settings = SegmentSettings {
        durability: Durability::Periodic,
        background: None,
        clock: clock.clone(),
        cache: 1,
        ..SegmentSettings::default()
    };
    let open = || SegmentStore::open_on(disk.clone(), None, &settings).expect("a sound disk opens");
    let first = open();
    let live = first.stats().live;
    drop(first);
    let second = open();
    assert_eq!(second.stats().live, live, "a second replay differs");
    // What was deposited before cannot keep others from being deposited, claimed and cleaned away.
    let Some(handle) = Handle::new(1, 12, 5) else { return };
    let auth = Auth::new([7; 32]);
    let share = NewShare {
        auth: auth.verifier(),
        owner: Verifier::new([0; 32]),
        ttl: Duration::from_secs(60),
        claims: 1,
        capsule: bytes::Bytes::from_static(b"content"),
        payload: None,
    };
    second.create(handle, share).wait().expect("a handle of a fresh key is free");
    second.sweep().expect("a sound disk is swept");
    second.compact().expect("a sound disk is compacted");
    let live = second.stats().live;
    drop(second);
    let third = open();
    assert_eq!(third.stats().live, live, "a replay after a compaction differs");
    let claimed = third.claim(handle, &auth, ClaimId::new([1; 16])).wait().expect("what was deposited is there");
    assert_eq!(claimed.capsule, "content");
    clock.pass(Duration::from_secs(3600));
    third.sweep().expect("a sound disk is swept");
}

/// A file whose head and records are sealed: for each record two bytes of length, then what stands
/// behind the checksum.
fn forge(kind: u8, mut rest: &[u8]) -> Vec<u8> {
    let shard = kind % 4;
    let mut file = head(NONCE, 28_333_400, kind & 0x10 != 0, shard);
    while let Some((length, body)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(body.len());
        let (record, behind) = body.split_at(length);
        rest = behind;
        let at = file.len() as u64;
        let mut bytes = vec![0; 8];
        bytes.extend_from_slice(record);
        bytes.resize(bytes.len().max(FIXED).next_multiple_of(8), 0);
        // Of its own shard, or it would be passed over.
        bytes[31] = bytes[31] & !3 | shard;
        seal(&mut bytes, RecordPosition { nonce: NONCE, at });
        file.extend_from_slice(&bytes);
    }
    file
}

/// Inputs to begin with.
pub fn segment_seeds() -> Vec<Vec<u8>> {
    let new = NewShare {
        auth: Verifier::new([1; 32]),
        owner: Verifier::new([2; 32]),
        ttl: Duration::from_secs(900),
        claims: 2,
        capsule: bytes::Bytes::from_static(b"capsule"),
        payload: Some(SpoolEntry { id: [5; 16], length: 9, digest: Digest::new([6; 32]) }),
    };
    let share = Share::new(&new, StoreTime(1_700_000_000_000));
    let mut used = Share { version: 2, ..share };
    used.claims.take(&ClaimId::new([8; 16]), StoreTime(1_700_000_000_005), None);
    let mut records = Vec::new();
    let mut file = head(NONCE, 28_333_400, false, 0);
    let contents =
        [(share, CapsuleRef::Here(&b"capsule"[..])), (used, CapsuleRef::At(64)), (used, CapsuleRef::Nowhere)];
    for (share, content) in contents {
        let mut bytes = Vec::new();
        encode(&Key([0; 16]), &share, content, RecordPosition { nonce: NONCE, at: file.len() as u64 }, &mut bytes);
        records.extend_from_slice(&(bytes.len() as u16 - 8).to_le_bytes());
        records.extend_from_slice(&bytes[8..]);
        file.extend_from_slice(&bytes);
    }
    let input = |kind: u8, bytes: &[u8]| [&[kind][..], bytes].concat();
    vec![
        input(RAW, &file),
        input(RAW, &file[..file.len() - 9]),
        input(4, &records),
        input(0x11, &records),
        input(5, &records[..records.len() / 2]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the fuzzer begins with, and some of what it makes of it.
    #[test]
    fn hostile_segments_are_replayed_without_harm() {
        let mut random = crate::seeded::fresh_numbers();
        for input in segment_seeds() {
            segment(&input);
            for _ in 0..60 {
                let mut changed = input.clone();
                for _ in 0..1 + random() % 4 {
                    let at = random() % changed.len();
                    changed[at] = [0, 1, 0x7f, 0xff, random() as u8][random() % 5];
                }
                segment(&changed);
            }
        }
    }

    /// A record that names content of another length is moved as one whose content is gone: its
    /// copy would be no record.
    #[test]
    fn content_of_another_length_is_not_taken_along() {
        for (bytes, place) in [(8u32, 64u32), (300, 64), (2000, 64), (0, 64), (7, 72)] {
            let input = segment_seeds().remove(2);
            let (first, rest) = input[1..].split_at(2 + usize::from(u16::from_le_bytes([input[1], input[2]])));
            let mut second = rest[..2 + usize::from(u16::from_le_bytes([rest[0], rest[1]]))].to_vec();
            // Behind the length of two bytes stands what follows the checksum.
            second[2 + 120 - 8..2 + 124 - 8].copy_from_slice(&bytes.to_le_bytes());
            second[2 + 124 - 8..2 + 128 - 8].copy_from_slice(&place.to_le_bytes());
            // The first one again and again, so that there is enough to remove.
            segment(&[&input[..1], &first.repeat(20), &second].concat());
        }
    }

    /// The minute in which a segment ends is rounded up, for the last one to a time that no clock
    /// has.
    #[test]
    fn a_share_that_ends_with_time_itself_is_kept() {
        for expires in [u64::MAX, u64::MAX / 60_000 * 60_000, u64::MAX - 60_000, u64::MAX / 3_600_000 * 3_600_000 + 1] {
            let mut input = segment_seeds().remove(2);
            // Behind kind and length stands what follows the checksum.
            input[3 + 40 - 8..3 + 48 - 8].copy_from_slice(&expires.to_le_bytes());
            segment(&input);
            // Enough of it that is dead, so that it moves.
            let length = 2 + usize::from(u16::from_le_bytes([input[1], input[2]]));
            segment(&[&input[..1], &input[1..1 + length].repeat(20)].concat());
        }
    }

    /// A file that looks like the start of a record everywhere costs no hash of a whole record at
    /// each place.
    #[test]
    fn a_file_of_false_starts_is_given_up() {
        let mut file = head(NONCE, 28_333_400, false, 0);
        file.resize(8 << 20, 0);
        for at in (64..file.len() - 16).step_by(8) {
            file[at..at + 4].copy_from_slice(&8192u32.to_le_bytes());
        }
        segment(&[&[RAW][..], &file].concat());
    }
}
