//! Possible states after a crash at each point of a run: every prefix, each write lost or torn,
//! reordered subsets, killed processes, failed barriers.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::super::support::{HAS_LOG, ORDERED};
use super::copies::{self, Copying};
use super::history::{Allowed, Recorder, Wanted};
use super::judge;
use super::seen::Seen;
use super::workload::{self, Run};
use crate::archive::BackupSource;
use crate::env::SeededEnvironment;
use crate::format::ROOT_INO;
use crate::fs::{Creator, FileSystem, mode};
use crate::storage::simulated::{Fate, SimulatedStorage, Trace, TraceReplay};

/// Sampling divisor of writes if more than this are pending at once (a burst); every prefix is
/// still tried.
const MANY: usize = 40;
/// Sampling divisor of states with a second crash, during recovery.
const DOUBLE_EVERY: u64 = 40;
/// Second crashes tried for each of those.
const DOUBLES: u64 = 8;
/// Sampling divisors of states with a restore although none was interrupted, and with a backup.
const RESTORED_EVERY: u64 = 32;
const BACKED_UP_EVERY: u64 = 16;
/// Divisor of the states for a backup of a run, compared to its archive.
const COPY_SHARE: u64 = 8;

#[derive(Clone, Copy)]
pub(super) struct Plan {
    /// Maximum states of one seed; beyond it they are sampled at random.
    pub(super) states: u64,
    /// Barriers of the storage are atomic.
    pub(super) ordered: bool,
}

/// Counts of the tried states.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) seeds: u64,
    pub(super) states: u64,
    /// States after a second crash, during or after the recovery from the first.
    pub(super) doubles: u64,
    pub(super) process_deaths: u64,
    pub(super) failed_barriers: u64,
    pub(super) read_errors: u64,
    /// Recoveries that fell back one commit, and those that found a closed archive.
    pub(super) fallbacks: u64,
    pub(super) closed: u64,
    pub(super) fsyncs: u64,
    /// Snapshots whose content was compared with the tree of their time.
    pub(super) snapshots: u64,
    /// Restores and backups of the runs.
    pub(super) restores: u64,
    pub(super) backups: u64,
    /// Restores after a crash, some of which complete an interrupted one.
    pub(super) restored: u64,
    pub(super) completed: u64,
    /// States of backup files, and how many had the previous version, the new one, and none yet.
    pub(super) copies: u64,
    pub(super) copies_old: u64,
    pub(super) copies_new: u64,
    pub(super) copies_begun: u64,
    /// Backups after a crash, of the archive or of their file.
    pub(super) backed_up: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: &Tally) {
        self.seeds += other.seeds;
        self.states += other.states;
        self.doubles += other.doubles;
        self.process_deaths += other.process_deaths;
        self.failed_barriers += other.failed_barriers;
        self.read_errors += other.read_errors;
        self.fallbacks += other.fallbacks;
        self.closed += other.closed;
        self.fsyncs += other.fsyncs;
        self.snapshots += other.snapshots;
        self.restores += other.restores;
        self.backups += other.backups;
        self.restored += other.restored;
        self.completed += other.completed;
        self.copies += other.copies;
        self.copies_old += other.copies_old;
        self.copies_new += other.copies_new;
        self.copies_begun += other.copies_begun;
        self.backed_up += other.backed_up;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} states in {} seeds, {} fsyncs; {} second crashes, {} dead processes, {} failed barriers, {} read errors in recovery, {} snapshots; \
             {} restores and {} backups: {} restores again, {} of interrupted ones, {} states of backups' files ({} old, {} new, {} begun), {} backups again",
            self.states,
            self.seeds,
            self.fsyncs,
            self.doubles,
            self.process_deaths,
            self.failed_barriers,
            self.read_errors,
            self.snapshots,
            self.restores,
            self.backups,
            self.restored,
            self.completed,
            self.copies,
            self.copies_old,
            self.copies_new,
            self.copies_begun,
            self.backed_up
        )
    }
}

/// End of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All requested writes are on the medium.
    Whole,
    /// No pending write is on the medium.
    Nothing,
    /// All except this operation.
    Without(usize),
    /// This operation alone.
    Only(usize),
    /// All, except some sectors of this operation.
    Torn(usize),
    /// All, except some blocks of this operation.
    TornBlocks(usize),
    /// All, but some sectors of this operation hold garbage.
    Garbage(usize),
    /// Any part of any operation, in any order.
    Random,
    ProcessDeath,
    FailedBarrier,
    ZeroTail,
    GarbageTail,
}

/// Returns every possible end of a run at this point.
fn ends(point: &TraceReplay<'_>, mut each: impl FnMut(End)) {
    let pending = point.pending().len();
    if point.has_atomic_barrier() {
        each(End::Nothing);
        if point.at_barrier() {
            // It was carried out, but no caller got the result.
            each(End::Whole);
        }
        return;
    }
    each(End::Whole);
    if pending == 1 || (pending > 1 && point.is_after_range_sync()) {
        each(End::Nothing);
    }
    let step = pending.div_ceil(MANY).max(1);
    for index in (pending % step..pending).step_by(step) {
        if pending > 1 {
            each(End::Without(index));
            each(End::Only(index));
        }
        each(End::Torn(index));
        each(End::TornBlocks(index));
        each(End::Garbage(index));
    }
    if pending > 1 {
        (0..4).for_each(|_| each(End::Random));
    }
    if pending > 0 {
        each(End::ProcessDeath);
    }
    if point.at_barrier() {
        each(End::FailedBarrier);
        each(End::ZeroTail);
        each(End::GarbageTail);
    }
}

/// Selects surviving parts at random: any, or all but one, or those before a cut.
fn some_parts(dice: &SeededEnvironment, unit: u64) -> Box<dyn Fn(u64) -> bool> {
    let (how, bits, cut) = (dice.next_u64() % 4, dice.next_u64(), dice.next_u64() % 40);
    Box::new(move |part| match (how, part / unit) {
        (0, part) => bits >> (part % 64) & 1 == 1,
        (1, part) => part != cut % 8,
        (2, part) => part < cut,
        (_, part) => part >= cut % 8,
    })
}

fn make(point: &TraceReplay<'_>, end: End, dice: &SeededEnvironment) -> Arc<SimulatedStorage> {
    let one = |chosen: usize, fate: &mut dyn FnMut() -> Fate| {
        point.power_loss(&mut |index| if index == chosen { fate() } else { Fate::Keep })
    };
    match end {
        End::Whole => point.power_loss(&mut |_| Fate::Keep),
        End::Nothing => point.power_loss(&mut |_| Fate::Drop),
        End::Without(index) => one(index, &mut || Fate::Drop),
        End::Only(chosen) => point.power_loss(&mut |index| if index == chosen { Fate::Keep } else { Fate::Drop }),
        End::Torn(index) => one(index, &mut || Fate::Torn(some_parts(dice, 1))),
        End::TornBlocks(index) => one(index, &mut || Fate::Torn(some_parts(dice, 8))),
        End::Garbage(index) => one(index, &mut || Fate::Garbage(some_parts(dice, 1))),
        End::Random => random_loss(point, dice),
        End::ProcessDeath => point.process_death(),
        End::FailedBarrier => point.failed_barrier(),
        End::ZeroTail => point.with_tail(&[0; 10_000]),
        End::GarbageTail => point.with_tail(&[0xA7; 10_000]),
    }
}

/// Selects any subset, in parts, in any order; the share of survivors differs from crash to crash.
fn random_loss(point: &TraceReplay<'_>, dice: &SeededEnvironment) -> Arc<SimulatedStorage> {
    let mut order: Vec<usize> = (0..point.pending().len()).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, (dice.next_u64() % (last as u64 + 1)) as usize);
    }
    let (survival, tearing) = (dice.next_u64() % 17, dice.next_u64() % 4);
    point.power_loss_in_order(order.into_iter(), &mut |_| {
        if dice.next_u64() % 16 < tearing {
            Fate::Torn(some_parts(dice, 1))
        } else if dice.next_u64() % 16 < survival {
            Fate::Keep
        } else {
            Fate::Drop
        }
    })
}

/// Records the run of a seed and checks the states after its crashes.
pub(super) fn explore(seed: u64, plan: Plan) -> Tally {
    HAS_LOG.set(!seed.is_multiple_of(4));
    ORDERED.set(plan.ordered);
    let run = workload::run(seed);
    let dice = Arc::new(SeededEnvironment::new(seed ^ 0xDEAD_BEEF_0000_0000));
    let mut tally = Tally {
        seeds: 1,
        fsyncs: run.history.promises() as u64,
        restores: run.history.restores() as u64,
        backups: run.copies.len() as u64,
        ..Tally::default()
    };
    each_end(&run.trace, plan.states, &dice, &mut |point, end| {
        let judged = catch_unwind(AssertUnwindSafe(|| judge_end(&run, point, end, &dice, &mut tally)));
        if let Err(panic) = judged {
            println!("violation: SEED={seed} STATES={} position={} end={end:?}", plan.states, point.position());
            resume_unwind(panic);
        }
    });
    if !run.copies.is_empty() {
        judge_copies(&run, seed, plan, &mut tally);
    }
    tally
}

/// Returns all ends of a recording; a random sample if there are too many.
fn each_end(trace: &Trace, states: u64, dice: &SeededEnvironment, each: &mut dyn FnMut(&TraceReplay<'_>, End)) {
    let mut all = 0;
    let mut point = trace.replay();
    loop {
        ends(&point, |_| all += 1);
        if !point.advance() {
            break;
        }
    }
    let mut point = trace.replay();
    loop {
        let mut chosen = Vec::new();
        ends(&point, |end| {
            if all <= states || dice.next_u64() % all < states {
                chosen.push(end);
            }
        });
        chosen.into_iter().for_each(|end| each(&point, end));
        if !point.advance() {
            return;
        }
    }
}

fn judge_end(run: &Run, point: &TraceReplay<'_>, end: End, dice: &Arc<SeededEnvironment>, tally: &mut Tally) {
    let allowed = run.history.allowed(point.position());
    let storage = make(point, end, dice);
    // Pages sealed by recovery must not repeat the nonces of the run.
    let environment = Arc::new(SeededEnvironment::new(dice.next_u64()));
    tally.states += 1;
    tally.process_deaths += u64::from(end == End::ProcessDeath);
    tally.failed_barriers += u64::from(end == End::FailedBarrier);
    if dice.next_u64().is_multiple_of(16) {
        tally.read_errors += u64::from(judge::survives_a_read_error(&storage, &environment, dice.next_u64() % 70));
    }
    let interrupted = run.history.restore_at(point.position());
    if dice.next_u64().is_multiple_of(DOUBLE_EVERY) {
        die_again(run, &storage, allowed, interrupted, &environment, dice, tally);
        return;
    }
    let (fs, seen) = judge::open(&storage, &environment, allowed);
    tally.fallbacks += u64::from(fs.volume.fallback().is_some());
    tally.closed += u64::from(fs.volume.durable().closed);
    let deep = dice.next_u64().is_multiple_of(8);
    tally.snapshots += judge::inspect((&fs, &seen), &storage, &run.kept, &environment, deep);
    // From another random sequence: the backups differ from run to run.
    let aside = Arc::new(SeededEnvironment::new(dice.next_u64()));
    if aside.next_u64().is_multiple_of(BACKED_UP_EVERY) {
        tally.backed_up += u64::from(back_up_again(run, &fs, &storage, point.position(), &aside));
    }
    let every = if interrupted.is_some() { 4 } else { RESTORED_EVERY };
    if dice.next_u64().is_multiple_of(every)
        && let Some(wanted) = interrupted.cloned().or_else(|| any_snapshot(run, dice))
        && judge::restores(&fs, &wanted, &storage, &run.kept, &environment)
    {
        tally.restored += 1;
        tally.completed += u64::from(interrupted.is_some());
    }
}

/// Restores everything from a snapshot of the run.
fn any_snapshot(run: &Run, dice: &SeededEnvironment) -> Option<Wanted> {
    let count = run.kept.len().max(1) as u64;
    run.kept.keys().nth((dice.next_u64() % count) as usize).map(|name| Wanted::everything(name))
}

/// Crashes the archive, and the file of its last backup unless that was done, and brings the backup
/// up to the recovered version.
fn back_up_again(
    run: &Run,
    fs: &Arc<FileSystem>,
    storage: &Arc<SimulatedStorage>,
    position: usize,
    dice: &Arc<SeededEnvironment>,
) -> bool {
    let last = run.copies.iter().rev().find(|copying| copying.pinned <= position && copying.leaves_file());
    let Some(copying) = last else { return false };
    let until = if position >= copying.ended { u64::MAX } else { dice.next_u64() % (copying.trace.len() as u64 + 1) };
    let mut point = copying.trace.replay();
    while (point.position() as u64) < until && point.advance() {}
    let (file, whole) = match until {
        u64::MAX => (make(&point, End::Whole, dice), true),
        _ => (random_loss(&point, dice), point.position() == copying.trace.len()),
    };
    let found = copies::judge(&file, &copying.allowed(whole), dice);
    let source = copies::pin(fs, storage);
    copies::go_on(&source, &copies::shown(source.generation(), fs), &file, found.as_ref(), dice);
    drop(source);
    let findings = fs.volume.check_space(true, &mut |_, _| {}).unwrap();
    assert!(findings.is_empty(), "space beside a backup: {findings:?}");
    true
}

/// Checks the states of the files of all backups of a run. The next backup is one of the state at
/// the end of the run.
fn judge_copies(run: &Run, seed: u64, plan: Plan, tally: &mut Tally) {
    let mut end = run.trace.replay();
    while end.advance() {}
    let dice = Arc::new(SeededEnvironment::new(seed ^ 0xBAC0_BAC0_0000_0000));
    let storage = make(&end, End::Whole, &dice);
    let environment = Arc::new(SeededEnvironment::new(dice.next_u64()));
    let (fs, _) = judge::open(&storage, &environment, run.history.allowed(end.position()));
    let source = copies::pin(&fs, &storage);
    let shows = copies::shown(source.generation(), &fs);
    for (number, copying) in run.copies.iter().enumerate() {
        let states = if plan.states == u64::MAX { u64::MAX } else { plan.states / COPY_SHARE };
        each_end(&copying.trace, states, &dice, &mut |point, end| {
            let judged =
                catch_unwind(AssertUnwindSafe(|| judge_copy(copying, point, end, (&source, &shows), &dice, tally)));
            if let Err(panic) = judged {
                println!("violation: SEED={seed} backup {number} position={} end={end:?}", point.position());
                resume_unwind(panic);
            }
        });
    }
}

fn judge_copy(
    copying: &Copying,
    point: &TraceReplay<'_>,
    end: End,
    (source, shows): (&BackupSource, &Seen),
    dice: &Arc<SeededEnvironment>,
    tally: &mut Tally,
) {
    let whole = point.position() == copying.trace.len();
    let file = make(point, end, dice);
    let environment = Arc::new(SeededEnvironment::new(dice.next_u64()));
    let found = copies::judge(&file, &copying.allowed(whole), &environment);
    tally.states += 1;
    tally.copies += 1;
    match &found {
        None => tally.copies_begun += 1,
        Some(found) if copying.is_old(found) => tally.copies_old += 1,
        Some(_) => tally.copies_new += 1,
    }
    if found.is_some() && dice.next_u64().is_multiple_of(16) {
        copies::take_its_place(&file, &environment);
    }
    if !dice.next_u64().is_multiple_of(8) {
        return;
    }
    tally.backed_up += 1;
    file.record(64 << 20);
    let brought = copies::go_on(source, shows, &file, found.as_ref(), &environment);
    // A power failure kills the continued backup as well; for a new file nothing is recorded.
    let trace = file.recorded().expect("the storage records");
    let (new, mut allowed) = ([Some(shows.clone())], copying.allowed(whole));
    allowed.extend_from_slice(&new);
    let every = (trace.len() as u64 / DOUBLES).max(1);
    let mut point = trace.replay();
    while point.advance() {
        if dice.next_u64().is_multiple_of(every) {
            let second = random_end(&point, dice);
            let done = point.position() == trace.len() && Arc::ptr_eq(&brought, &file);
            copies::judge(&second, if done { &new[..] } else { &allowed[..] }, &environment);
            tally.states += 1;
            tally.copies += 1;
            tally.doubles += 1;
        }
    }
}

/// Returns the storage after one of the ends at this point.
fn random_end(point: &TraceReplay<'_>, dice: &SeededEnvironment) -> Arc<SimulatedStorage> {
    let mut all = Vec::new();
    ends(point, |one| all.push(one));
    make(point, all[(dice.next_u64() % all.len() as u64) as usize], dice)
}

/// A power failure also kills the session that recovers, at any of its operations, even after it
/// made promises of its own, and while it completes an interrupted restore.
fn die_again(
    run: &Run,
    storage: &Arc<SimulatedStorage>,
    allowed: Allowed<'_>,
    interrupted: Option<&Wanted>,
    environment: &Arc<SeededEnvironment>,
    dice: &Arc<SeededEnvironment>,
    tally: &mut Tally,
) {
    let kept = &run.kept;
    storage.record(64 << 20);
    let (fs, first) = judge::open(storage, environment, allowed);
    let opened = storage.position();
    tally.snapshots += judge::inspect((&fs, &first), storage, kept, environment, true);
    // A state that recovery returned once is not lost again.
    let recorder = Recorder::resumed(&fs, storage, dice, (opened, first), allowed.promised);
    let made = fs.make_node(
        ROOT_INO,
        b"of-the-second-session",
        mode::REGULAR | 0o600,
        0,
        Creator { uid: 1, gid: 1, umask: None },
    );
    recorder.note();
    fs.write(made.unwrap().ino, 0, &[42; 5000]).unwrap();
    recorder.sync();
    let acknowledged = storage.position();
    if let Some(wanted) = interrupted
        && fs.snapshot_named(&wanted.snapshot).is_ok()
    {
        recorder.restore(wanted, &kept[&wanted.snapshot]);
        tally.restored += 1;
        tally.completed += 1;
    }
    if dice.next_u64().is_multiple_of(2) {
        fs.close().unwrap();
        recorder.promise();
    }
    let own = recorder.ended();
    drop(fs);
    let trace = storage.recorded().expect("the storage records");
    let mut point = trace.replay();
    let every = (trace.len() as u64 / DOUBLES).max(1);
    loop {
        if dice.next_u64().is_multiple_of(every) || point.position() == acknowledged {
            let second = random_end(&point, dice);
            let environment = Arc::new(SeededEnvironment::new(dice.next_u64()));
            let allowed = if point.position() >= opened { own.allowed(point.position()) } else { allowed };
            let (fs, seen) = judge::open(&second, &environment, allowed);
            let deep = dice.next_u64().is_multiple_of(8);
            tally.snapshots += judge::inspect((&fs, &seen), &second, kept, &environment, deep);
            tally.states += 1;
            tally.doubles += 1;
        }
        if !point.advance() {
            return;
        }
    }
}
