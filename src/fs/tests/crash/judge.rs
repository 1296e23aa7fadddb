//! Opens a crashed archive like a user would, and compares it with the promises.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::super::support::{NAME_KEY, OPTIONS, cipher, try_open_on};
use super::history::{Allowed, Wanted};
use super::seen::{Seen, see, see_tree};
use super::workload::Kept;
use crate::env::SeededEnvironment;
use crate::error::Error;
use crate::format::page::PageKind;
use crate::format::values::Extent;
use crate::format::{BLOCK, Key, MIN_BLOCKS, RESERVED, kind};
use crate::fs::FileSystem;
use crate::storage::Storage;
use crate::storage::simulated::{Fault, FaultClass, FaultPlan, SimulatedStorage};
use crate::txn::{OpenOptions, Volume};

/// Opens the archive and checks every promise. Returns the visible tree.
pub(super) fn open(
    storage: &Arc<SimulatedStorage>,
    environment: &Arc<SeededEnvironment>,
    Allowed { states: allowed, promised }: Allowed<'_>,
) -> (Arc<FileSystem>, Seen) {
    let fs = try_open_on(storage.clone(), environment.clone()).unwrap_or_else(|error| panic!("does not open: {error}"));
    let generation = fs.volume.durable().generation;
    assert!(generation >= promised, "commit {} was acknowledged, {} found", promised.0, generation.0);
    // Specification 9.1: a reader refuses a file that is shorter than the length in the record that
    // it trusts.
    let (length, blocks) = (storage.len().unwrap(), fs.volume.durable().total_blocks);
    assert!(length >= blocks * BLOCK, "commit {} is of {blocks} blocks, the file of {length} bytes", generation.0);
    let (seen, _) = see(&fs);
    let known = allowed.iter().rev().any(|(_, state)| *state == seen);
    if !known {
        let nearest = &allowed.last().expect("something is always allowed").1;
        panic!("tree of no allowed moment ({} allowed); the last is\n{nearest}\nfound is\n{seen}", allowed.len());
    }
    (fs, seen)
}

/// Checks that structure, counts and space are exact, and that reclaim and the sweep change nothing
/// visible and leave no remains. Returns the number of snapshots checked.
pub(super) fn inspect(
    (fs, seen): (&FileSystem, &Seen),
    storage: &Arc<SimulatedStorage>,
    kept: &Kept,
    environment: &Arc<SeededEnvironment>,
    deep: bool,
) -> u64 {
    assert_sound(fs, "recovered");
    if !deep {
        return 0;
    }
    assert_kept(&shown(fs, storage, environment), kept);
    while fs.maintain().unwrap() {}
    let (after, reachable) = see(fs);
    assert!(after == *seen, "maintenance changed the tree from\n{seen}\nto\n{after}");
    // Inodes unlinked while open are removed.
    assert_eq!(fs.volume.state().inodes(), reachable.len() as u64, "inodes that nobody can reach");
    fs.volume.erase_all().unwrap();
    assert_sound(fs, "maintained");
    let shown = shown(fs, storage, environment);
    assert_nothing_else_readable(fs, &shown, storage, environment);
    assert_kept(&shown, kept)
}

/// Checks the trees alone.
fn assert_sound(fs: &FileSystem, what: &str) {
    let findings = fs.check_structure(true).unwrap();
    assert!(findings.is_empty(), "structure, {what}: {findings:?}");
    let findings = fs.volume.check_space(true, &mut |_, _| {}).unwrap();
    assert!(findings.is_empty(), "space, {what}: {findings:?}");
}

/// Completes an interrupted restore by the same one; the result outlives the snapshots. Returns
/// whether the snapshot exists.
pub(super) fn restores(
    fs: &FileSystem,
    wanted: &Wanted,
    storage: &Arc<SimulatedStorage>,
    kept: &Kept,
    environment: &Arc<SeededEnvironment>,
) -> bool {
    let all = fs.volume.readable_snapshots().unwrap();
    if !all.iter().any(|(_, snapshot)| snapshot.name == wanted.snapshot) {
        return false;
    }
    wanted.restore(fs, &kept[&wanted.snapshot], &|| {}, &mut |_| Ok(()));
    assert_sound(fs, "restored");
    assert_kept(&shown(fs, storage, environment), kept);
    let restored = see_tree(fs).0;
    fs.remove_snapshots(&all.iter().map(|(id, _)| *id).collect::<Vec<_>>()).unwrap();
    fs.finish_removals(&mut || Ok(())).unwrap();
    while fs.maintain().unwrap() {}
    assert_sound(fs, "without snapshots");
    assert!(see_tree(fs).0 == restored, "what was restored went with the snapshots");
    fs.volume.erase_all().unwrap();
    assert_nothing_else_readable(fs, &shown(fs, storage, environment), storage, environment);
    true
}

/// Checks that each snapshot has the tree of its time. Returns the number of snapshots.
fn assert_kept(shown: &[Shown], kept: &Kept) -> u64 {
    for (name, fs) in shown {
        let (shown, expected) = (see_tree(fs).0, &kept[name]);
        let name = String::from_utf8_lossy(name);
        assert!(shown == *expected, "snapshot {name} shows\n{shown}\ninstead of\n{expected}");
    }
    shown.len() as u64
}

/// Name of a snapshot and a mount of it.
type Shown = (Vec<u8>, Arc<FileSystem>);

/// Opens each snapshot by its name, as a mount of it alone would show it.
fn shown(fs: &FileSystem, storage: &Arc<SimulatedStorage>, environment: &Arc<SeededEnvironment>) -> Vec<Shown> {
    let options = OpenOptions { read_only: true, memory: 4 << 20 };
    let all = fs.volume.readable_snapshots().unwrap().into_iter();
    let open = |name: Vec<u8>| {
        let volume =
            Volume::open(storage.clone(), cipher(environment.clone()), environment.clone(), 1, &options).unwrap();
        volume.show_snapshot(&name).unwrap();
        (name, FileSystem::new(volume, environment.clone(), NAME_KEY, OPTIONS).unwrap())
    };
    all.map(|(_, snapshot)| open(snapshot.name)).collect()
}

/// Checks that after the sweep no block outside of the accepted root and its snapshots opens as a
/// page of file data or an entry of the log.
fn assert_nothing_else_readable(
    fs: &FileSystem,
    shown: &[Shown],
    storage: &Arc<SimulatedStorage>,
    environment: &Arc<SeededEnvironment>,
) {
    let mut used = HashSet::new();
    let mut note = |fs: &FileSystem| {
        let state = fs.volume.state();
        let view = fs.volume.view(&state);
        view.scan(Key::MIN, Key::MAX, &mut |key, value| {
            if key.kind == kind::EXTENT {
                used.insert(Extent::decode(value)?.page.run.address);
            }
            Ok(ControlFlow::Continue(()))
        })
        .unwrap();
    };
    note(fs);
    shown.iter().for_each(|(_, fs)| note(fs));
    assert!(
        !fs.volume.pager().cipher().has_log() || !fs.volume.pager().has_entries().unwrap(),
        "an entry of the log is readable"
    );
    let cipher = cipher(environment.clone());
    let mut bytes = vec![0; BLOCK as usize];
    for block in RESERVED[0].1..storage.len().unwrap() / BLOCK {
        if (RESERVED[1].0..MIN_BLOCKS).contains(&block) {
            continue;
        }
        storage.read_at(block * BLOCK, &mut bytes).unwrap();
        if bytes.iter().take(64).all(|byte| *byte == 0) {
            continue;
        }
        if let Ok(prologue) = cipher.open_prologue(block, &bytes) {
            let data = matches!(prologue.kind, PageKind::Data | PageKind::Packed);
            assert!(!data || used.contains(&block), "data that no commit names is readable: block={block}");
        }
    }
}

/// Checks that a failing read during recovery ends it with an error and does not pass for a torn
/// commit. Returns whether there was such a read.
pub(super) fn survives_a_read_error(
    storage: &Arc<SimulatedStorage>,
    environment: &Arc<SeededEnvironment>,
    turn: u64,
) -> bool {
    storage.inject(Some(FaultPlan { class: FaultClass::Read, count: turn, fault: Fault::Eio, lasting: false }));
    let opened = try_open_on(storage.clone(), environment.clone());
    let met = storage.injected() > 0;
    storage.inject(None);
    match opened {
        Err(Error::Io { .. }) if met => true,
        Ok(_) if !met => false,
        Ok(_) => panic!("read error {turn} was overlooked"),
        Err(error) => panic!("read error {turn} gave another error: {error}"),
    }
}
