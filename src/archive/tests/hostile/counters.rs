//! Counters of records that would make the next change reuse existing ids: opening for writing is
//! refused (specification 9.1, rules 13 to 16).

use std::sync::Arc;

use super::super::super::fuzzing::{Forge, OWNER, create_on, open_on, with_header};
use super::cases::{Cases, INLINE, NOISE, first};
use super::logs::{honest, inode_key, refused_unwritten, storage};
use crate::archive::check;
use crate::error::Error;
use crate::format::header::FEATURE_LOG;
use crate::format::record::BackupOrigin;
use crate::format::values::{DeadValue, SnapshotValue};
use crate::format::{Generation, Key, REGION_BLOCKS, ROOT_INO, Run, TreeId, kind};
use crate::fs::{FileSystem, mode};
use crate::txn::FindingKind;

/// Wrong counter.
struct Wrong {
    name: &'static str,
    /// Part of the error message, and of the finding.
    told: &'static str,
    forge: Forge,
}

pub(super) fn add(cases: &mut Cases) {
    for Wrong { name, forge, .. } in all() {
        cases.of(forge, name, true, |_| {});
    }
}

/// Returns the contents of an archive whose snapshots 1 to 3 keep data; the second one is being
/// removed.
fn with_snapshots() -> Forge {
    let storage = Arc::new(with_header(FEATURE_LOG).unwrap());
    let fs = create_on(storage.clone(), 1).unwrap();
    let files = [b"one", b"two", b"six"].map(|name| {
        let ino = fs.make_node(ROOT_INO, name, mode::REGULAR | 0o640, 0, OWNER).unwrap().ino;
        fs.write(ino, 0, &[7; 30_000]).unwrap();
        ino
    });
    for (name, ino) in [&b"first"[..], b"second", b"third"].into_iter().zip(files) {
        fs.take_snapshot(name).unwrap();
        fs.write(ino, 0, &[8; 30_000]).unwrap();
        fs.sync().unwrap();
    }
    fs.close().unwrap();
    drop(fs);
    let mut forge = Forge::of(storage.contents()).unwrap();
    snapshot(&mut forge, 2, |snapshot| snapshot.name.clear());
    forge
}

fn snapshot(forge: &mut Forge, id: u64, change: impl FnOnce(&mut SnapshotValue)) {
    let records = &mut forge.trees[TreeId::Snapshots as usize - 1];
    let value = &mut records.iter_mut().find(|(key, _)| key.object == id).expect("it was taken").1;
    let mut changed = SnapshotValue::decode(value).unwrap();
    change(&mut changed);
    *value = changed.encode();
}

fn all() -> Vec<Wrong> {
    let mut all = Vec::new();
    let mut add = |name, told, mut forge: Forge, change: &dyn Fn(&mut Forge)| {
        change(&mut forge);
        all.push(Wrong { name, told, forge });
    };
    add("a next inode that is there", "but inode 11 is there", Forge::new(), &|forge| forge.record.next_ino = 11);
    add("a next inode long ago", "but inode 11 is there", Forge::new(), &|forge| forge.record.next_ino = 2);
    add("no next inode", "the next inode number is 0", Forge::new(), &|forge| forge.record.next_ino = 0);
    add("records of an inode to come", "but inode 40 is there", Forge::new(), &|forge| {
        let extent = forge.value(first(forge, NOISE, kind::EXTENT)).clone();
        forge.put(TreeId::Live, Key::new(40, kind::EXTENT, 0), &extent);
        forge.record.next_ino = 40;
        // Skipped like a record of an unknown kind.
        forge.put(TreeId::Live, Key::new(50, 99, 0), b"for a later version");
        forge.put(TreeId::Live, Key::new(50, 0, 1), b"for a later version");
    });
    add("an inode of the log to come", "but inode 40 is there", Forge::with_log(), &|forge| {
        let inode = forge.value(inode_key(INLINE)).clone();
        honest(forge).says.records.push((inode_key(40), Some(inode)));
    });
    add("an inode of a log that counts less", "but inode 40 is there", Forge::with_log(), &|forge| {
        let inode = forge.value(inode_key(INLINE)).clone();
        let says = &mut honest(forge).says;
        (says.next_ino, says.records) = (40, vec![(inode_key(40), Some(inode))]);
    });
    add("a next snapshot that is there", "but snapshot 3 is there", with_snapshots(), &|forge| {
        forge.record.next_snapshot = 3;
    });
    add("a next snapshot that is being removed", "but snapshot 4 is there", with_snapshots(), &|forge| {
        forge.snapshot(4, Default::default(), b"");
        forge.record.next_snapshot = 4;
    });
    add("a dead list of a snapshot to come", "there is a dead list of 4", with_snapshots(), &|forge| {
        let dead = DeadValue { run: Run::new(400, 1), born: Generation(1) };
        forge.put(TreeId::References, Key::new(4, kind::DEAD, 1), &dead.encode());
    });
    add("no newest snapshot", "the commit says 0 of commit 0", with_snapshots(), &|forge| {
        (forge.record.newest_snapshot, forge.record.newest_snapshot_id) = (Generation(0), 0);
    });
    add("a newest snapshot of commit 0", "the commit says 3 of commit 0", with_snapshots(), &|forge| {
        forge.record.newest_snapshot = Generation(0);
    });
    add("a newest snapshot of an earlier commit", "but the commit says 3 of", with_snapshots(), &|forge| {
        forge.record.newest_snapshot.0 -= 1;
    });
    add("a newest snapshot of number 0", "but the commit says 0 of", with_snapshots(), &|forge| {
        forge.record.newest_snapshot_id = 0;
    });
    add("a newest snapshot that is not the newest", "but the commit says 1 of", with_snapshots(), &|forge| {
        forge.record.newest_snapshot_id = 1;
    });
    add("a newest snapshot that is being removed", "but the commit says 2 of", with_snapshots(), &|forge| {
        forge.record.newest_snapshot_id = 2;
    });
    add("a newest snapshot without one", "the newest snapshot is 0 of commit 0", Forge::new(), &|forge| {
        (forge.record.newest_snapshot, forge.record.newest_snapshot_id) = (Generation(1), 1);
    });
    add("a newest snapshot of a commit to come", "has a newest snapshot of commit", with_snapshots(), &|forge| {
        forge.record.newest_snapshot = forge.record.generation.next();
        let generation = forge.record.newest_snapshot;
        snapshot(forge, 3, |snapshot| snapshot.generation = generation);
    });
    add("a snapshot before its root", "but its root of commit", with_snapshots(), &|forge| {
        snapshot(forge, 1, |snapshot| snapshot.generation = Generation(1));
    });
    add("snapshots that go back", "but one before it of commit", with_snapshots(), &|forge| {
        let generation = forge.record.generation;
        snapshot(forge, 1, |snapshot| snapshot.generation = generation);
    });
    add("a dead-list entry to come", "the next dead-list entry is 1, but", with_snapshots(), &|forge| {
        forge.record.next_dead = 1;
    });
    add("a session after its commit", "of a session that begins with commit", Forge::new(), &|forge| {
        forge.record.session_first = forge.record.generation.next();
    });
    add("a session of commit 0", "of a session that begins with commit 0", Forge::new(), &|forge| {
        forge.record.session_first = Generation(0);
    });
    add("a backup of a commit to come", "is of a backup of commit", Forge::new(), &|forge| {
        let generation = forge.record.generation;
        forge.record.origin = Some(BackupOrigin { first: Generation(1), generation, ..BackupOrigin::default() });
    });
    add("a first commit that extends another one", "commit 1 extends another one", Forge::new(), &|forge| {
        forge.only_record();
        (forge.record.generation, forge.record.session_first) = (Generation(1), Generation(1));
        (forge.record.checkpoint, forge.record.previous_tag) = (Generation(1), [9; 16]);
    });
    add("a file without its last page", "blocks, but names block", Forge::new(), &|forge| {
        forge.on_record = Some(Box::new(|plain| plain[296] = plain[296].wrapping_sub(1)));
    });
    add("a file without a far page", "but a page has block 16387", Forge::new(), &|forge| {
        let value = [&[1, 1, 0][..], &3u16.to_le_bytes(), &1u16.to_le_bytes()].concat();
        forge.more_space = Some((Key::new(2, kind::SPACE, 0), value));
        assert_eq!(2 * REGION_BLOCKS + 3, 16_387);
    });
    all
}

/// Control: correct counters permit writing.
#[test]
fn right_counters_are_written_on() {
    for forge in [Forge::new(), Forge::with_log(), with_snapshots()] {
        let storage = storage(forge);
        let counted = counters_found(&open_on(storage.clone(), true).unwrap());
        assert!(counted.is_empty(), "{counted:?}");
        drop(open_on(storage, false).unwrap());
    }
}

fn counters_found(fs: &FileSystem) -> Vec<String> {
    let findings = check(fs, false, &mut |_| {}).unwrap().findings;
    let counters = findings.into_iter().filter(|finding| finding.kind == FindingKind::Counter);
    // A forged space map lacks pages that only snapshots reference.
    counters.map(|finding| finding.detail).filter(|text| !text.contains("blocks in use are counted")).collect()
}

/// A writer is refused and has written nothing; a reader can open it; a check reports it.
#[test]
fn counters_that_lead_to_what_is_there_are_refused_by_name() {
    for Wrong { name, told, forge } in all() {
        let storage = storage(forge);
        refused_unwritten(&storage, name, told);
        let fs = open_on(storage, true).unwrap_or_else(|error| panic!("{name}: {error}"));
        let found = counters_found(&fs);
        assert!(found.iter().any(|text| text.contains(told)), "{name}: {found:?}");
    }
}

/// Data of snapshots exists after changes and removals, so changes would harm the archives above.
#[test]
fn a_dead_list_gives_no_sequence_twice() {
    let mut forge = with_snapshots();
    let lists = &forge.trees[TreeId::References as usize - 1];
    let dead: Vec<(Key, Vec<u8>)> = lists.iter().filter(|(key, _)| key.kind == kind::DEAD).cloned().collect();
    let (of_removed, of_first): (Vec<_>, Vec<_>) =
        dead.into_iter().filter(|(key, _)| key.object < 3).partition(|(key, _)| key.object == 2);
    let (key, value) = of_removed.first().expect("the second snapshot keeps something");
    assert!(!of_first.is_empty());
    forge.put(TreeId::References, Key::new(1, kind::DEAD, key.sub), value);
    let born = DeadValue { born: Generation(1), ..DeadValue::decode(value).unwrap() };
    forge.put(TreeId::References, *key, &born.encode());
    let fs = open_on(storage(forge), false).unwrap();
    match fs.finish_removals(&mut || Ok(())) {
        Err(Error::Damaged(text)) => assert!(text.contains("dead list of snapshot 1 has entry"), "{text}"),
        removed => panic!("{removed:?}"),
    }
}
