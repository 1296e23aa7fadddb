//! Commit records and delta lists: round trips and every refusal of section 9.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::format::tests::{mutated, noise, pointer, run, time};

fn record() -> CommitRecord {
    let pointer = Pointer { run: Run::new(400, 4), generation: Generation(7), tag: [3; 16] };
    CommitRecord {
        generation: Generation(7),
        previous_tag: [1; 16],
        session: [2; 16],
        session_first: Generation(5),
        header_sequence: 1,
        time: Timestamp { seconds: -5, nanos: 999_999_999 },
        two_barrier: true,
        roots: Roots([
            Root { pointer, level: 2 },
            Root::default(),
            Root::default(),
            Root::default(),
            Root { pointer, level: 0 },
        ]),
        next_ino: 20,
        inodes: 19,
        used_blocks: 8,
        total_blocks: 512,
        next_dead: 4,
        next_snapshot: 5,
        newest_snapshot: Generation(6),
        newest_snapshot_id: 3,
        checkpoint: Generation(2),
        delta_list: pointer,
        allocated: vec![(Run::new(400, 4), [9; 16]), (Run::new(404, 64), [8; 16])],
        freed: vec![Run::new(100, 1)],
        ..CommitRecord::default()
    }
}

/// Encodes, changes, decodes.
fn changed(at: usize, bytes: &[u8]) -> Result<CommitRecord> {
    let mut encoded = record().encode();
    encoded[at..at + bytes.len()].copy_from_slice(bytes);
    CommitRecord::decode(&encoded)
}

#[test]
fn a_record_decodes_to_what_was_encoded() {
    let encoded = record().encode();
    assert_eq!(encoded.len(), RECORD_PLAIN);
    assert_eq!(CommitRecord::decode(&encoded).unwrap(), record());
}

#[test]
fn a_record_holds_153_pages_or_459_freed_runs() {
    assert!(CommitRecord::lists_fit(153, 0) && !CommitRecord::lists_fit(153, 1));
    assert!(CommitRecord::lists_fit(0, 459) && !CommitRecord::lists_fit(0, 460));
    let full = CommitRecord { allocated: vec![(Run::new(65, 1), [4; 16]); 153], freed: vec![], ..record() };
    assert_eq!(CommitRecord::decode(&full.encode()).unwrap(), full);
}

#[test]
fn lists_beyond_the_record_are_refused() {
    assert!(changed(376, &154u16.to_le_bytes()).is_err());
    assert!(changed(378, &u16::MAX.to_le_bytes()).is_err());
}

#[test]
fn reserved_bytes_and_unknown_flags_of_a_record_are_refused() {
    for at in [69, 105, 380, 383, 384 + 2 * 24 + 8, RECORD_PLAIN - 1] {
        assert!(changed(at, &[0x80]).is_err(), "at={at}");
    }
    assert!(changed(68, &[4]).is_err() && changed(68, &[16]).is_err());
}

fn origin() -> BackupOrigin {
    let time = Timestamp { seconds: 1_700_000_000, nanos: 5 };
    BackupOrigin { session: [6; 16], first: Generation(2), generation: Generation(4), tag: [5; 16], time }
}

#[test]
fn a_backup_says_of_which_record_it_is_behind_all_else() {
    let pending = Some(LogMark { generation: Generation(6), record: [7; 16], number: 3, entry: [8; 16] });
    for pending in [None, pending] {
        let backup = CommitRecord { origin: Some(origin()), pending, ..record() };
        let encoded = backup.encode();
        assert_eq!(CommitRecord::decode(&encoded).unwrap(), backup);
        let at = LISTS_AT + 2 * ALLOCATED + FREED + pending.map_or(0, |_| PENDING);
        let mut rubbish = encoded.clone();
        rubbish[at + 60] = 1;
        assert!(CommitRecord::decode(&rubbish).is_err());
        let mut of_nothing = encoded.clone();
        of_nothing[at + 24..at + 32].fill(0);
        assert!(CommitRecord::decode(&of_nothing).is_err());
        // Without the flag these bytes must be zero.
        let mut unmarked = encoded;
        unmarked[68] &= !8;
        assert!(CommitRecord::decode(&unmarked).is_err());
    }
}

#[test]
fn a_record_of_a_backup_holds_fewer_pages() {
    let of = |pages| CommitRecord {
        origin: Some(origin()),
        allocated: vec![(Run::new(65, 1), [4; 16]); pages],
        freed: vec![],
        ..record()
    };
    assert!(of(150).fits() && !of(151).fits());
    assert_eq!(CommitRecord::decode(&of(150).encode()).unwrap(), of(150));
}

#[test]
fn generation_0_is_no_record() {
    assert!(changed(0, &[0; 8]).is_err());
}

#[test]
fn a_time_beyond_its_second_is_refused() {
    assert!(changed(64, &1_000_000_000u32.to_le_bytes()).is_err());
}

#[test]
fn a_list_names_only_runs_that_exist() {
    assert!(changed(384, &Run::new(400, 0).pack().to_le_bytes()).is_err());
    assert!(changed(384, &Run::new(400, 65).pack().to_le_bytes()).is_err());
    assert!(changed(384 + 48, &Run::new(400, 0).pack().to_le_bytes()).is_err());
    assert!(changed(384 + 48, &Run::new(400, 65).pack().to_le_bytes()).is_ok(), "freed runs may be joined");
}

#[test]
fn a_root_without_a_page_has_level_0() {
    assert_eq!(Root::decode(&[0; 40]).unwrap(), Root::default());
    assert!(Root::decode(&Root { level: 1, ..Root::default() }.encode()).is_err());
    assert!(Root::decode(&Root { level: 16, ..record().roots[TreeId::Live] }.encode()).is_err());
    let mut bytes = record().roots[TreeId::Live].encode();
    bytes[39] = 1;
    assert!(Root::decode(&bytes).is_err());
}

#[test]
fn a_delta_list_fills_its_bytes_exactly() {
    let list = DeltaList { next: Pointer::NULL, allocated: vec![Run::new(65, 1)], freed: vec![Run::new(66, 300)] };
    let encoded = list.encode();
    assert_eq!(encoded.len(), 40 + 16);
    assert_eq!(DeltaList::decode(&encoded).unwrap(), list);
    assert!(DeltaList::decode(&[&encoded[..], &[0]].concat()).is_err());
    assert!(DeltaList::decode(&encoded[..encoded.len() - 1]).is_err());
    assert!(DeltaList::decode(&encoded[..39]).is_err());
    let mut counts = encoded.clone();
    counts[32..40].fill(0xff);
    assert!(DeltaList::decode(&counts).is_err());
}

proptest! {
    #[test]
    fn records_round_trip(
        generation in 1..u64::MAX, time in time(), flags in any::<[bool; 3]>(), roots in vec((pointer(), 0..16u8), 5),
        allocated in vec((run(), any::<[u8; 16]>()), 0..100), freed in vec(run(), 0..150), delta in pointer(),
    ) {
        let mut want = CommitRecord {
            generation: Generation(generation), time, two_barrier: flags[0], closed: flags[1],
            delta_list: delta, allocated, freed, origin: flags[2].then(origin), ..record()
        };
        for (root, (pointer, level)) in want.roots.0.iter_mut().zip(roots) {
            *root = Root { pointer, level };
        }
        prop_assert_eq!(CommitRecord::decode(&want.encode()).unwrap(), want);
    }

    #[test]
    fn delta_lists_round_trip(next in pointer(), allocated in vec(run(), 0..50), freed in vec(run(), 0..50)) {
        let want = DeltaList { next, allocated, freed };
        prop_assert_eq!(DeltaList::decode(&want.encode()).unwrap(), want);
    }

    #[test]
    fn no_input_panics(
        bytes in vec(any::<u8>(), RECORD_PLAIN), noise in noise(200), damaged in mutated(record().encode()),
        delta in mutated(DeltaList { freed: vec![Run::new(1, 1); 3], ..DeltaList::default() }.encode()),
    ) {
        for input in [&bytes, &noise, &damaged, &delta] {
            let _ = CommitRecord::decode(input);
            let _ = DeltaList::decode(input);
        }
    }
}
