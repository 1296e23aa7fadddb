//! A failing or full host at each operation of creating and removing snapshots, and of pinning and
//! reading a version for a backup: the error is returned, a snapshot exists completely or not at
//! all, other snapshots lose nothing, and the next attempt succeeds.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::{Backups, RetentionPolicy, RetentionRule, SnapshotManager};
use super::backups::{on, shown};
use super::sample::{Expected, expected, expected_in, fresh, noise, open_on, put};
use super::snapshots::change;
use crate::env::{SeededEnvironment, stride};
use crate::error::{Error, Result};
use crate::format::ROOT_INO;
use crate::fs::FileSystem;
use crate::storage::simulated::{Fault, FaultClass, FaultPlan, SimulatedStorage};
use crate::storage::{MemoryStorage, Storage};

/// Returns every fault of a class of operations of the host, once and permanently.
pub(super) fn plans() -> impl Iterator<Item = FaultPlan> {
    let faults = [
        (FaultClass::Write, Fault::Eio),
        (FaultClass::Write, Fault::Short),
        (FaultClass::Write, Fault::NoSpace),
        (FaultClass::Barrier, Fault::Eio),
        (FaultClass::Barrier, Fault::NoSpace),
        (FaultClass::Room, Fault::NoSpace),
        (FaultClass::Allocate, Fault::Eio),
        (FaultClass::Allocate, Fault::NoSpace),
        (FaultClass::Punch, Fault::Eio),
        (FaultClass::SetLen, Fault::Eio),
        (FaultClass::SetLen, Fault::NoSpace),
        (FaultClass::Read, Fault::Eio),
    ];
    let both = |(class, fault)| [false, true].map(|lasting| FaultPlan { class, count: 0, fault, lasting });
    faults.into_iter().flat_map(both)
}

/// Returns whether the plan only has a host that is full and cannot take back space.
pub(super) fn is_full_host(plan: FaultPlan) -> bool {
    plan.fault == Fault::NoSpace && !matches!(plan.class, FaultClass::Write | FaultClass::Barrier)
}

type Kept = BTreeMap<Vec<u8>, Expected>;

fn kept(fs: &FileSystem) -> Kept {
    let all = fs.list_snapshots().unwrap().into_iter();
    all.map(|kept| (kept.name, expected_in(&fs.snapshot_view(kept.id)))).collect()
}

/// Archive with three snapshots with exclusive data each, and a backup of it.
struct World {
    bytes: Vec<u8>,
    live: Expected,
    kept: Kept,
    backup: Vec<u8>,
    /// Content of the backup.
    earlier: Expected,
}

impl World {
    fn new() -> World {
        let (storage, fs) = fresh(1);
        let dice = SeededEnvironment::new(1);
        put(&fs, ROOT_INO, b"written", &noise(1, 60_000));
        for name in [&b"one"[..], b"two", b"three"] {
            (0..20).for_each(|_| change(&fs, &dice));
            put(&fs, ROOT_INO, name, &noise(2, 30_000));
            fs.take_snapshot(name).unwrap();
            fs.unlink(ROOT_INO, name).unwrap();
        }
        (0..20).for_each(|_| change(&fs, &dice));
        let backup = Arc::new(MemoryStorage::new());
        let source = Backups::of(fs.clone(), storage.clone()).pin().unwrap();
        source.fill(&(backup.clone() as Arc<dyn Storage>), &mut on).unwrap();
        drop(source);
        let earlier = expected(&fs);
        (0..20).for_each(|_| change(&fs, &dice));
        fs.make_durable().unwrap();
        let (live, kept) = (expected(&fs), kept(&fs));
        fs.close().unwrap();
        World { bytes: storage.contents(), live, kept, backup: backup.contents(), earlier }
    }
}

/// Operation under test.
struct Work {
    name: &'static str,
    /// It frees space, so a full host must not prevent it.
    frees: bool,
    run: fn(&World, &Arc<FileSystem>, &Arc<SimulatedStorage>) -> Result<()>,
    /// Snapshots that exist afterwards.
    leaves: &'static [&'static str],
}

fn back_up(world: &World, fs: &Arc<FileSystem>, storage: &Arc<SimulatedStorage>, whole: bool) -> Result<()> {
    let source = Backups::of(fs.clone(), storage.clone()).pin()?;
    let file = Arc::new(if whole { MemoryStorage::new() } else { MemoryStorage::from_contents(world.backup.clone()) });
    let place: Arc<dyn Storage> = file.clone();
    let done = match whole {
        true => source.fill(&place, &mut on).map(drop),
        false => source.bring_up_to_date(&place, &mut on).map(|done| assert!(done.is_some())),
    };
    match done {
        Ok(()) => storage.without_faults(|| assert!(shown(&*file) == expected(fs))),
        // Without a header it is not an archive.
        Err(_) if whole => assert!(crate::keys::header::Header::read(&*file).is_err()),
        Err(_) => assert!(shown(&*file) == world.earlier, "a backup that was not brought up to date"),
    }
    done
}

const WORKS: [Work; 5] = [
    Work {
        name: "create",
        frees: false,
        run: |_, fs, _| SnapshotManager::of(fs.clone()).create(b"new"),
        leaves: &["new", "one", "three", "two"],
    },
    Work {
        name: "rm",
        frees: true,
        run: |_, fs, _| {
            let named = |all: &[super::super::Snapshot]| {
                all.iter().filter(|one| one.name == b"two").map(|one| one.id).collect()
            };
            SnapshotManager::of(fs.clone()).remove(&mut |all| Ok(named(all)))?;
            fs.finish_removals(&mut || Ok(()))
        },
        leaves: &["one", "three"],
    },
    Work {
        name: "prune",
        frees: true,
        run: |_, fs, _| {
            let keep = RetentionPolicy::default().with(RetentionRule::Last, 1);
            SnapshotManager::of(fs.clone()).remove(&mut |all| {
                let rules = keep.kept_by(&all.iter().map(|one| one.time).collect::<Vec<_>>());
                Ok(all.iter().zip(rules).filter(|(_, rules)| rules.is_empty()).map(|(one, _)| one.id).collect())
            })?;
            fs.finish_removals(&mut || Ok(()))
        },
        leaves: &["three"],
    },
    Work {
        name: "backup",
        frees: false,
        run: |world, fs, storage| back_up(world, fs, storage, true),
        leaves: &["one", "three", "two"],
    },
    Work {
        name: "next backup",
        frees: false,
        run: |world, fs, storage| back_up(world, fs, storage, false),
        leaves: &["one", "three", "two"],
    },
];

impl Work {
    /// Returns whether it was done, according to the snapshots; checks that each is unchanged.
    fn is_done(&self, world: &World, fs: &FileSystem) -> bool {
        let now = kept(fs);
        for (name, shows) in &now {
            let expected = world.kept.get(name);
            assert!(expected.is_none_or(|expected| expected == shows), "{}", String::from_utf8_lossy(name));
        }
        let done = now.keys().map(Vec::as_slice).eq(self.leaves.iter().map(|name| name.as_bytes()));
        assert!(done || now.keys().eq(world.kept.keys()), "{:?}", now.keys());
        done
    }

    /// `done` is the result of [`Work::is_done`] for the present state.
    fn again(&self, done: bool, world: &World, fs: &Arc<FileSystem>, storage: &Arc<SimulatedStorage>) {
        if self.leaves.len() == world.kept.len() || !done {
            (self.run)(world, fs, storage).unwrap();
        }
        assert!(self.is_done(world, fs));
        fs.finish_removals(&mut || Ok(())).unwrap();
        let findings = fs.check_structure(true).unwrap();
        assert_eq!(findings.len(), 0, "{findings:?}");
        assert_eq!(fs.volume.check_space(true, &mut |_, _| {}).unwrap(), []);
    }
}

fn judge_error(work: &Work, plan: FaultPlan, error: &Error, latched: bool) {
    match error {
        Error::NoSpace(_) => {
            assert_eq!(plan.fault, Fault::NoSpace, "{error}");
            assert!(!(work.frees && is_full_host(plan)), "a full host stops what gives room back: {error}");
        }
        Error::Io { .. } => assert_ne!(plan.fault, Fault::NoSpace, "{error}"),
        Error::WriteFailed(_) => assert!(latched && !is_full_host(plan), "{error}"),
        error => panic!("{error}"),
    }
}

/// Returns whether the fault occurred.
fn turn(world: &World, work: &Work, plan: FaultPlan) -> bool {
    let environment = SeededEnvironment::new(plan.count + 1);
    let storage = SimulatedStorage::from_contents(&world.bytes);
    let fs = open_on(storage.clone(), false, 7).unwrap();
    // Accepted data that is not durable.
    let written = fs.lookup(ROOT_INO, b"written").unwrap().ino;
    fs.write(written, 10_000, &noise(3, 20_000)).unwrap();
    let overwritten = expected(&fs);
    put(&fs, ROOT_INO, b"accepted", &noise(4, 9_000));
    let accepted = expected(&fs);
    fs.forget_plaintext();
    storage.inject(Some(plan));
    let done = (work.run)(world, &fs, &storage);
    let met = storage.injected() > 0;
    storage.inject(None);
    let latched = fs.volume.latched().is_some();
    match &done {
        Ok(()) => assert!(!latched || plan.class != FaultClass::Read),
        Err(error) if met => judge_error(work, plan, error, latched),
        Err(error) => panic!("it failed by itself: {error}"),
    }
    let is_done = work.is_done(world, &fs);
    assert!(is_done || done.is_err());
    let adds = work.leaves.len() > world.kept.len();
    assert!(!adds || is_done == done.is_ok(), "a snapshot is listed that was refused: {done:?}");
    assert!(expected(&fs) == accepted, "what was accepted is read");
    let images = [storage.process_death(), storage.crash_random(&mut || environment.next_u64())];
    if !latched {
        work.again(is_done, world, &fs, &storage);
        assert!(expected(&fs) == accepted);
    }
    drop(fs);
    for image in images {
        let fs = open_on(image.clone(), false, 8).unwrap();
        let live = expected(&fs);
        let is_done = work.is_done(world, &fs);
        match done {
            Ok(()) => assert!(is_done && live == accepted, "what was said to be done is lost"),
            Err(_) => {
                assert!([&world.live, &overwritten, &accepted].contains(&&live), "no moment since the last commit")
            }
        }
        work.again(is_done, world, &fs, &image);
        assert!(expected(&fs) == live);
        fs.close().unwrap();
    }
    met
}

#[test]
fn each_fault_leaves_a_snapshot_whole_or_not_there_and_the_next_attempt_does_it() {
    let world = World::new();
    for work in &WORKS {
        let mut turns = 0;
        for plan in plans() {
            for count in (0..).step_by(stride(4)) {
                let plan = FaultPlan { count, ..plan };
                let met = std::panic::catch_unwind(|| turn(&world, work, plan)).unwrap_or_else(|panic| {
                    println!("violation: {} with {plan:?}", work.name);
                    std::panic::resume_unwind(panic)
                });
                if !met {
                    break;
                }
                turns += 1;
            }
        }
        println!("summary: {turns} faults: during {}", work.name);
        assert!(turns > 10, "{}: {turns}", work.name);
    }
}
