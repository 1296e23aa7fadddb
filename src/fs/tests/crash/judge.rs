//! Opens what a crash left as a user would, and compares it with what was promised.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::super::support::{cipher, try_open_on};
use super::workload::{Seen, see};
use crate::env::SeededEnvironment;
use crate::error::Error;
use crate::format::page::PageKind;
use crate::format::values::Extent;
use crate::format::{BLOCK, Generation, Key, MIN_BLOCKS, RESERVED, kind};
use crate::fs::FileSystem;
use crate::storage::Storage;
use crate::storage::simulated::{Class, Fault, FaultPlan, SimulatedStorage};

/// Opens; everything promised must hold. The answer has what the user sees.
pub(super) fn open(
    storage: &Arc<SimulatedStorage>,
    environment: &Arc<SeededEnvironment>,
    allowed: &[(usize, Seen)],
    promised: Generation,
) -> (Arc<FileSystem>, Seen) {
    let fs = try_open_on(storage.clone(), environment.clone()).unwrap_or_else(|error| panic!("does not open: {error}"));
    let generation = fs.volume.durable().generation;
    assert!(generation >= promised, "commit {} was acknowledged, {} found", promised.0, generation.0);
    // Specification 9.1: a reader refuses a file that is shorter than the record that it trusts says.
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

/// Structure, counts and space are exact; reclaim and the sweep change nothing that a user sees and leave nothing behind.
pub(super) fn inspect(fs: &FileSystem, seen: &Seen, environment: &Arc<SeededEnvironment>, deep: bool) {
    let (_, findings) = fs.check_structure(true, &mut |_, _| {}).unwrap();
    assert!(findings.is_empty(), "structure: {findings:?}");
    let findings = fs.volume.check_space(true, &mut |_, _| {}).unwrap();
    assert!(findings.is_empty(), "space: {findings:?}");
    if !deep {
        return;
    }
    while fs.maintain().unwrap() {}
    let (after, reachable) = see(fs);
    assert!(after == *seen, "maintenance changed the tree from\n{seen}\nto\n{after}");
    // What was unlinked while open is gone.
    assert_eq!(fs.volume.state().inodes(), reachable.len() as u64, "inodes that nobody can reach");
    fs.volume.erase_all().unwrap();
    let findings = fs.volume.check_space(true, &mut |_, _| {}).unwrap();
    assert!(findings.is_empty(), "space after maintenance: {findings:?}");
    assert_nothing_else_readable(fs, environment);
}

/// After the sweep no block outside of the accepted root opens as a page of file data.
fn assert_nothing_else_readable(fs: &FileSystem, environment: &Arc<SeededEnvironment>) {
    let state = fs.volume.state();
    let mut used = HashSet::new();
    let view = fs.volume.view(&state);
    view.scan(Key::MIN, Key::MAX, &mut |key, value| {
        if key.kind == kind::EXTENT {
            used.insert(Extent::decode(value)?.page.run.address);
        }
        Ok(ControlFlow::Continue(()))
    })
    .unwrap();
    let cipher = cipher(environment.clone());
    let storage = fs.volume.pager().storage();
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

/// A read that fails during recovery ends it with an error and must not look like a torn commit. Answers whether there was such a read.
pub(super) fn survives_a_read_error(
    storage: &Arc<SimulatedStorage>,
    environment: &Arc<SeededEnvironment>,
    turn: u64,
) -> bool {
    storage.inject(Some(FaultPlan { class: Class::Read, count: turn, fault: Fault::Eio, lasting: false }));
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
