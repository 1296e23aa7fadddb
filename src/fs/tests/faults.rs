//! Each operation of the storage fails in its turn, once or from then on, under a scripted
//! workload: the caller gets the error, promises hold, and the next session recovers to an allowed
//! version.

use std::sync::Arc;

use super::crash::{Seen, see};
use super::support::{CREATOR, HAS_LOG, OPTIONS, create_with, fresh, try_create_with, try_open_on, try_open_with};
use crate::env::SeededEnvironment;
use crate::error::{Error, Result};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Creator, FileSystem, FsOptions, RenameMode, SetAttributes, XattrMode, mode};
use crate::storage::simulated::{Fault, FaultClass, FaultPlan, SimulatedStorage};

const OWNER: Creator = Creator { uid: 1000, gid: 1000, umask: None };

/// Kind of a step of the script, which decides the allowed results on a full host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// May be refused for want of space.
    Grows,
    /// Must succeed on a full host.
    Frees,
    /// Like `Frees`, and everything done before is durable when it succeeds.
    Sync,
}

type Step = (&'static str, Kind, fn(&FileSystem) -> Result<()>);

fn ino(fs: &FileSystem, name: &[u8]) -> Result<Ino> {
    fs.lookup(ROOT_INO, name).map(|found| found.ino)
}

fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![seed as u8; length];
    crate::env::Environment::fill_random(&SeededEnvironment::new(seed), &mut bytes[..length / 2]).unwrap();
    bytes
}

fn create(fs: &FileSystem, name: &[u8]) -> Result<()> {
    fs.make_node(ROOT_INO, name, mode::REGULAR | 0o600, 0, OWNER).map(drop)
}

const SCRIPT: &[Step] = &[
    ("create", Kind::Grows, |fs| create(fs, b"a")),
    ("write", Kind::Grows, |fs| fs.write(ino(fs, b"a")?, 0, &bytes(1, 3000))),
    ("create", Kind::Grows, |fs| create(fs, b"b")),
    ("write a lot", Kind::Grows, |fs| fs.write(ino(fs, b"b")?, 0, &bytes(2, 120_000))),
    ("fsync", Kind::Sync, |fs| fs.sync()),
    ("make a directory", Kind::Grows, |fs| fs.make_directory(ROOT_INO, b"d", 0o755, OWNER).map(drop)),
    ("create in it", Kind::Grows, |fs| {
        fs.make_node(ino(fs, b"d")?, b"deep", mode::REGULAR | 0o600, 0, OWNER).map(drop)
    }),
    ("read", Kind::Frees, |fs| fs.read(ino(fs, b"b")?, 40_000, 30_000).map(drop)),
    ("overwrite", Kind::Grows, |fs| fs.write(ino(fs, b"b")?, 50_000, &bytes(3, 9000))),
    ("fsync", Kind::Sync, |fs| fs.sync()),
    ("set an attribute", Kind::Grows, |fs| fs.set_xattr(ino(fs, b"b")?, b"user.note", &bytes(4, 5000), XattrMode::Set)),
    ("truncate", Kind::Frees, |fs| {
        let set = SetAttributes { size: Some(60_000), ..SetAttributes::default() };
        fs.set_attributes(ino(fs, b"b")?, &set).map(drop)
    }),
    ("delete", Kind::Frees, |fs| fs.unlink(ROOT_INO, b"a")),
    ("fsync", Kind::Sync, |fs| fs.sync()),
    ("maintain", Kind::Frees, |fs| fs.maintain().map(drop)),
    ("erase", Kind::Sync, |fs| fs.volume.erase_all()),
    ("create", Kind::Grows, |fs| create(fs, b"c")),
    ("write beyond the room", Kind::Grows, |fs| fs.write(ino(fs, b"c")?, 0, &bytes(5, 5_000_000))),
    ("fsync", Kind::Sync, |fs| fs.sync()),
    ("exchange", Kind::Grows, |fs| fs.rename(ROOT_INO, b"b", ROOT_INO, b"c", RenameMode::Exchange)),
    ("overwrite", Kind::Grows, |fs| fs.write(ino(fs, b"b")?, 100, &bytes(6, 200))),
    ("fsync", Kind::Sync, |fs| fs.sync()),
    ("link", Kind::Grows, |fs| fs.link(ino(fs, b"b")?, ROOT_INO, b"link").map(drop)),
    ("make a symlink", Kind::Grows, |fs| fs.make_symlink(ROOT_INO, b"symlink", &[b'x'; 3000], OWNER).map(drop)),
    ("replace in another directory", Kind::Grows, |fs| {
        fs.rename(ROOT_INO, b"link", ino(fs, b"d")?, b"deep", RenameMode::Replace)
    }),
    ("leave a whiteout", Kind::Grows, |fs| {
        fs.rename(ino(fs, b"d")?, b"deep", ROOT_INO, b"back", RenameMode::Whiteout(OWNER))
    }),
    ("copy", Kind::Grows, |fs| fs.copy_range(ino(fs, b"c")?, 0, ino(fs, b"b")?, 9000, 40_000, false).map(drop)),
    ("punch", Kind::Grows, |fs| fs.zero_range(ino(fs, b"b")?, 100_000, 200_000, true, false)),
    ("zero", Kind::Grows, |fs| fs.zero_range(ino(fs, b"b")?, 400_001, 5000, false, false)),
    ("extend", Kind::Grows, |fs| {
        let set = SetAttributes { size: Some(6_000_000), mode: Some(0o4711), ..SetAttributes::default() };
        fs.set_attributes(ino(fs, b"b")?, &set).map(drop)
    }),
    ("remove an attribute", Kind::Frees, |fs| fs.remove_xattr(ino(fs, b"c")?, b"user.note")),
    ("delete a lot", Kind::Frees, |fs| fs.unlink(ROOT_INO, b"b")),
    ("fsync", Kind::Sync, |fs| fs.sync()),
    ("close", Kind::Sync, |fs| fs.close()),
];

/// Checkpoints come after 24 commits: they are made due early in the script, so that their writes
/// meet faults, too.
fn prepare(storage: &Arc<SimulatedStorage>, environment: &Arc<SeededEnvironment>) -> Arc<FileSystem> {
    let fs = create_with(storage.clone(), environment.clone(), OPTIONS);
    for n in 0..20 {
        fs.set_xattr(ROOT_INO, b"user.round", &[n], XattrMode::Set).unwrap();
        fs.sync().unwrap();
    }
    drop(fs);
    // With hardly any cache, so that the script reads.
    try_open_with(storage.clone(), environment.clone(), 1).unwrap()
}

/// Returns the state before the script and after each of its steps, without a fault.
fn healthy_states() -> Vec<Seen> {
    let environment = Arc::new(SeededEnvironment::new(1));
    let fs = prepare(&SimulatedStorage::new(), &environment);
    let mut states = vec![see(&fs).0];
    for (name, _, step) in SCRIPT {
        match step(&fs) {
            Ok(()) | Err(Error::NotFound | Error::NoAttribute) => states.push(see(&fs).0),
            Err(error) => panic!("{name} failed by itself: {error}"),
        }
    }
    states
}

/// Runs the script once with a plan. Returns whether the fault of the plan occurred. Until then
/// every step gives the state of `healthy`, which is taken from there and not read again.
fn run(plan: FaultPlan, healthy: &[Seen]) -> bool {
    let environment = Arc::new(SeededEnvironment::new(1));
    let storage = SimulatedStorage::new();
    let fs = prepare(&storage, &environment);
    let mut states = vec![healthy[0].clone()];
    let mut promised = 0;
    let mut latched: Option<String> = None;
    storage.inject(Some(plan));
    for (name, kind, step) in SCRIPT {
        let done = step(&fs);
        states.push(match storage.injected() {
            0 => healthy[states.len()].clone(),
            _ => storage.without_faults(|| see(&fs).0),
        });
        match done {
            Ok(()) => {
                assert!(latched.is_none() || *kind != Kind::Sync, "{name} succeeded after {latched:?}");
                if *kind == Kind::Sync {
                    promised = states.len() - 1;
                }
            }
            Err(Error::NotFound | Error::NoAttribute) => {}
            Err(error) => {
                assert!(storage.injected() > 0, "{name} failed by itself: {error}");
                let reason = fs.volume.pager().sticky_error().reason().map(str::to_owned);
                if matches!(error, Error::WriteFailed(_)) {
                    assert!(latched.is_some(), "{name}: the first caller learns no cause: {error}");
                }
                if *kind == Kind::Grows && matches!(error, Error::NoSpace(_)) {
                    let [.., before, after] = &states[..] else { unreachable!("the state before is kept") };
                    assert_eq!(before, after, "{name} was refused and done in part");
                }
                judge_error(name, *kind, plan, &error, &reason);
                latched = reason;
            }
        }
    }
    let met = storage.injected() > 0;
    storage.inject(None);
    let is_latched = fs.volume.pager().sticky_error().check().is_err();
    assert_eq!(is_latched, latched.is_some(), "a latch that nobody was told about");
    if met && matches!(plan.class, FaultClass::Barrier)
        || met && plan.class == FaultClass::Write && plan.fault != Fault::NoSpace
    {
        assert!(is_latched, "a failed write or barrier has to latch");
    }
    if plan.class == FaultClass::Write && plan.fault == Fault::NoSpace {
        assert!(!is_latched, "a refusal for want of space latched");
    }
    if plan.class == FaultClass::Write && plan.fault == Fault::NoSpace && !plan.lasting {
        assert_eq!(promised, states.len() - 1, "one refusal for want of space was not got over");
    }
    drop(fs);
    // The next session finds the host's cache, or after a power failure the synced data and some of
    // the rest.
    let cut = storage.crash_random(&mut || environment.next_u64());
    for storage in [cut, storage.process_death()] {
        let fs = try_open_on(storage.clone(), environment.clone()).unwrap();
        let seen = see(&fs).0;
        assert!(states[promised..].contains(&seen), "not a moment since the last fsync:\n{seen}");
        let findings = fs.check_structure(true).unwrap();
        assert!(findings.is_empty(), "{findings:?}");
        assert!(fs.volume.check_space(true, &mut |_, _| {}).unwrap().is_empty());
        create(&fs, b"afterwards").unwrap();
        fs.close().unwrap();
    }
    met
}

fn judge_error(name: &str, kind: Kind, plan: FaultPlan, error: &Error, latched: &Option<String>) {
    // A full host is noticed when the file grows. If it takes back allocated blocks, the commit
    // fails.
    let promise_broken = matches!(plan.class, FaultClass::Write | FaultClass::Barrier);
    if let Some(reason) = latched {
        assert!(
            plan.fault != Fault::NoSpace || plan.class == FaultClass::Barrier,
            "{name}: full host latched: {reason}"
        );
    }
    match error {
        Error::WriteFailed(reason) => {
            assert!(latched.as_ref() == Some(reason), "two reasons: {latched:?} and {reason}");
        }
        Error::NoSpace(_) => {
            assert_eq!(plan.fault, Fault::NoSpace, "{name}: {error}");
            let refusable = kind == Kind::Grows || promise_broken || plan.class == FaultClass::SetLen;
            assert!(refusable, "{name} must work on a full host: {error}");
        }
        Error::Io { .. } => assert_ne!(plan.fault, Fault::NoSpace, "{name}: {error}"),
        error => panic!("{name}: {error}"),
    }
}

/// Every turn of a class until the script runs through without a fault.
fn every_turn(class: FaultClass, fault: Fault) {
    let mut turns = 0;
    for (lasting, has_log) in [(false, false), (true, false), (false, true), (true, true)] {
        HAS_LOG.set(has_log);
        let healthy = healthy_states();
        for count in 0.. {
            let plan = FaultPlan { class, count, fault, lasting };
            let met = std::panic::catch_unwind(|| run(plan, &healthy)).unwrap_or_else(|panic| {
                println!("violation: {plan:?}");
                std::panic::resume_unwind(panic)
            });
            if !met {
                break;
            }
            turns += 1;
        }
    }
    println!("summary: {turns} faults: {class:?} with {fault:?}");
    assert!(turns > 0, "the script never met {class:?}");
}

#[test]
fn a_write_that_fails() {
    every_turn(FaultClass::Write, Fault::Eio);
}

#[test]
fn a_write_that_is_cut_short() {
    every_turn(FaultClass::Write, Fault::Short);
}

/// A host that takes back blocks that it had allocated (copy-on-write, thin provisioning, quotas):
/// once is got over, and from then on every write of data is refused until a commit cannot be
/// finished.
#[test]
fn a_write_to_allocated_blocks_without_space() {
    every_turn(FaultClass::Write, Fault::NoSpace);
}

#[test]
fn a_barrier_that_fails() {
    every_turn(FaultClass::Barrier, Fault::Eio);
    every_turn(FaultClass::Barrier, Fault::NoSpace);
}

/// A full host: growth, allocation and punching are refused.
#[test]
fn a_host_without_space() {
    every_turn(FaultClass::Room, Fault::NoSpace);
    every_turn(FaultClass::Allocate, Fault::NoSpace);
    every_turn(FaultClass::Punch, Fault::NoSpace);
    every_turn(FaultClass::SetLen, Fault::NoSpace);
}

#[test]
fn growth_punching_and_cutting_that_fail() {
    every_turn(FaultClass::Allocate, Fault::Eio);
    every_turn(FaultClass::Punch, Fault::Eio);
    every_turn(FaultClass::SetLen, Fault::Eio);
}

#[test]
fn a_read_that_fails() {
    every_turn(FaultClass::Read, Fault::Eio);
}

/// The first caller that asks for durability gets the cause of a loss, also of one in the
/// background; later callers get the error of the read-only archive.
#[test]
fn the_first_write_or_fsync_after_a_failure_tells_its_cause() {
    let failing = |class| FaultPlan { class, count: 0, fault: Fault::Eio, lasting: false };
    let cases = [
        ("fsync", FaultClass::Barrier),
        ("write-out", FaultClass::Write),
        ("maintain", FaultClass::Barrier),
        ("write", FaultClass::Barrier),
    ];
    for (who, class) in cases {
        let environment = Arc::new(SeededEnvironment::new(9));
        let storage = SimulatedStorage::new();
        let fs = create_with(storage.clone(), environment, FsOptions { max_dirty_bytes: 1 << 20, ..OPTIONS });
        create(&fs, b"a").unwrap();
        let file = ino(&fs, b"a").unwrap();
        fs.write(file, 0, &bytes(1, 50_000)).unwrap();
        if matches!(who, "maintain" | "write") {
            // Blocks freed by the second commit wait for one more, which an idle archive makes
            // automatically.
            fs.sync().unwrap();
            fs.write(file, 0, &bytes(2, 50_000)).unwrap();
            fs.sync().unwrap();
        }
        storage.inject(Some(failing(class)));
        if matches!(who, "maintain" | "write") {
            fs.maintain().unwrap_err();
        }
        let met = match who {
            // Dirty data exceeds its limit, and the write that notices is accepted all the same;
            // the next one is not.
            "write-out" => (0..40).find_map(|n| fs.write(file, n * 50_000, &bytes(3, 40_000)).err()),
            "write" => fs.write(file, 0, &bytes(3, 100)).err(),
            _ => None,
        };
        assert_eq!(met.is_some(), class == FaultClass::Write || who == "write", "{who}");
        let first = met.map_or_else(|| fs.sync(), Err);
        assert_eq!(storage.injected(), 1, "{who}");
        assert!(
            matches!(&first, Err(Error::Io { source, .. }) if source.raw_os_error() == Some(5)),
            "{who}: {first:?}"
        );
        for _ in 0..2 {
            assert!(matches!(fs.sync(), Err(Error::WriteFailed(_))), "{who}");
        }
        assert!(matches!(create(&fs, b"b"), Err(Error::WriteFailed(_))), "{who}");
    }
}

/// All callers that one commit was to serve learn why it failed.
#[test]
fn callers_that_share_a_failed_commit_all_learn_the_cause() {
    let storage = SimulatedStorage::new();
    let fs = create_with(storage.clone(), Arc::new(SeededEnvironment::new(10)), OPTIONS);
    create(&fs, b"a").unwrap();
    let begun: Vec<_> = (0..3).map(|_| fs.begin_sync().unwrap()).collect();
    storage.inject(Some(FaultPlan { class: FaultClass::Barrier, count: 0, fault: Fault::Eio, lasting: false }));
    for begun in begun {
        let told = fs.finish_sync(begun);
        assert!(matches!(told, Err(Error::Io { .. })), "{told:?}");
    }
    assert!(matches!(fs.sync(), Err(Error::WriteFailed(_))));
}

/// Long targets are pages, and many of them wait for a barrier, so one is made early. Its failure
/// is reported to the next operation and not to the link, which was created.
#[test]
fn a_long_symlink_that_was_made_is_not_called_failed() {
    let storage = SimulatedStorage::new();
    let fs = create_with(storage.clone(), Arc::new(SeededEnvironment::new(5)), OPTIONS);
    storage.inject(Some(FaultPlan { class: FaultClass::Barrier, count: 0, fault: Fault::Eio, lasting: true }));
    // A target of noise takes two blocks, so the bound of 16 MiB is met on the way.
    for number in 0..2100 {
        let name = format!("l{number}");
        let target: Vec<u8> = bytes(number, 8000)[..4000].iter().map(|&byte| byte.max(1)).collect();
        if let Err(error) = fs.make_symlink(ROOT_INO, name.as_bytes(), &target, CREATOR) {
            println!("{number}: {error}");
            assert!(number > 2000, "{error}");
            assert!(matches!(fs.lookup(ROOT_INO, name.as_bytes()), Err(Error::NotFound)), "{name} was made");
            return;
        }
    }
    panic!("no early barrier was made");
}

/// Faults while an archive is made: an error, no panic.
#[test]
fn creation_with_faults() {
    let mut turns = 0;
    for class in [FaultClass::Write, FaultClass::Barrier, FaultClass::Allocate, FaultClass::SetLen] {
        for fault in [Fault::Eio, Fault::NoSpace] {
            for count in 0.. {
                let storage = SimulatedStorage::new();
                storage.inject(Some(FaultPlan { class, count, fault, lasting: count % 2 == 1 }));
                let made = try_create_with(storage.clone(), Arc::new(SeededEnvironment::new(1)), OPTIONS);
                if storage.injected() == 0 {
                    made.unwrap();
                    break;
                }
                turns += 1;
                match made {
                    Err(Error::Io { .. }) => assert_eq!(fault, Fault::Eio),
                    Err(Error::NoSpace(_)) => assert_eq!(fault, Fault::NoSpace),
                    // A second, smaller step of growth may do, and a second attempt of a write.
                    Ok(_) => {
                        let again = class == FaultClass::Allocate || class == FaultClass::Write && count % 2 == 0;
                        assert!(again && fault == Fault::NoSpace, "{class:?} {count} was overlooked")
                    }
                    Err(error) => panic!("{class:?} {count}: {error}"),
                }
            }
        }
    }
    println!("summary: {turns} faults: during creation");
}

/// Faults while a session recovers from a crash: the archive stays as good as it was.
#[test]
fn recovery_with_faults() {
    let environment = Arc::new(SeededEnvironment::new(2));
    let storage = SimulatedStorage::new();
    let fs = prepare(&storage, &environment);
    let mut states = Vec::new();
    for (_, _, step) in &SCRIPT[..9] {
        step(&fs).unwrap();
    }
    let promised = fs.volume.durable().generation;
    states.push(see(&fs).0);
    let before = {
        let opened = try_open_on(storage.crash(&mut |_| crate::storage::simulated::Fate::Drop), environment.clone());
        see(&opened.unwrap()).0
    };
    states.push(before);
    // Stopped in the middle of a commit, with a record whose pages are not all there.
    storage.inject(Some(FaultPlan { class: FaultClass::Barrier, count: 0, fault: Fault::Eio, lasting: true }));
    fs.sync().unwrap_err();
    drop(fs);
    storage.inject(None);
    let mut turns = 0;
    for class in [
        FaultClass::Read,
        FaultClass::Write,
        FaultClass::Barrier,
        FaultClass::Punch,
        FaultClass::SetLen,
        FaultClass::Allocate,
    ] {
        for (fault, lasting) in [(Fault::Eio, false), (Fault::Eio, true), (Fault::NoSpace, true)] {
            for count in 0.. {
                let crashed = storage.process_death();
                crashed.inject(Some(FaultPlan { class, count, fault, lasting }));
                let recovered = try_open_on(crashed.clone(), environment.clone()).and_then(|fs| {
                    while fs.maintain()? {}
                    fs.volume.erase_all()
                });
                let met = crashed.injected() > 0;
                crashed.inject(None);
                match recovered {
                    Err(Error::WriteFailed(_) | Error::Io { .. } | Error::NoSpace(_)) if met => {}
                    Ok(()) => {}
                    Err(error) => panic!("{class:?} {fault:?} {count}: {error}"),
                }
                for again in [crashed.crash_random(&mut || environment.next_u64()), crashed] {
                    let fs = try_open_on(again, environment.clone())
                        .unwrap_or_else(|error| panic!("{class:?} {fault:?} {count}: {error}"));
                    assert!(fs.volume.durable().generation >= promised);
                    assert!(states.contains(&see(&fs).0), "{class:?} {fault:?} {count}");
                    assert!(fs.volume.check_space(true, &mut |_, _| {}).unwrap().is_empty());
                }
                if !met {
                    break;
                }
                turns += 1;
            }
        }
    }
    println!("summary: {turns} faults: during recovery");
    assert!(turns > 100);
}

/// The order of findings does not put the word that there are more before them.
#[test]
fn that_there_are_more_findings_is_told_last() {
    use crate::fs::inode;
    use crate::txn::FindingKind;

    let (_, fs) = fresh(31);
    for n in 0..1100_u32 {
        let name = format!("{n}").into_bytes();
        let ino = fs.make_node(ROOT_INO, &name, mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
        let change = fs.volume.operate(1, false, |op| {
            let mut value = inode::load(op.view(), ino)?;
            value.links += 1;
            inode::store(op, ino, &value)
        });
        change.unwrap();
    }
    let findings = fs.check_structure(false).unwrap();
    let more: Vec<usize> = (0..findings.len()).filter(|n| findings[*n].kind == FindingKind::More).collect();
    assert_eq!(more, [findings.len() - 1]);
}
