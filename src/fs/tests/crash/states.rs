//! What a crash at each point of a run may leave: every prefix, each write lost or torn, reordered subsets, dead processes, failed barriers.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::super::support::HAS_LOG;
use super::judge;
use super::workload::{self, Kept, Run, Seen, see};
use crate::env::SeededEnvironment;
use crate::format::{Generation, ROOT_INO};
use crate::fs::{Creator, mode};
use crate::storage::simulated::{Fate, Replay, SimulatedStorage};

/// One write in so many is looked at when more than this are pending at once (a burst): every prefix still is.
const MANY: usize = 40;
/// One state in so many dies a second time, while it recovers.
const DOUBLE_EVERY: u64 = 40;
/// Second crashes tried for each of those.
const DOUBLES: u64 = 8;

#[derive(Clone, Copy)]
pub(super) struct Plan {
    /// States of one seed at most; fewer are picked at random.
    pub(super) states: u64,
}

/// What was tried.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) seeds: u64,
    pub(super) states: u64,
    /// States after a second crash, during or after the recovery from the first.
    pub(super) doubles: u64,
    pub(super) process_deaths: u64,
    pub(super) failed_barriers: u64,
    pub(super) read_errors: u64,
    /// Recoveries that went back one commit, and those that found a closed archive.
    pub(super) fallbacks: u64,
    pub(super) closed: u64,
    pub(super) fsyncs: u64,
    /// Snapshots whose content was compared with what the tree was when they were taken.
    pub(super) snapshots: u64,
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
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} states in {} seeds, {} fsyncs; {} second crashes, {} dead processes, {} failed barriers, {} read errors in recovery, {} snapshots",
            self.states,
            self.seeds,
            self.fsyncs,
            self.doubles,
            self.process_deaths,
            self.failed_barriers,
            self.read_errors,
            self.snapshots
        )
    }
}

/// How a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All that was asked for is on the medium.
    Whole,
    /// Nothing since the last barrier is.
    Nothing,
    /// All but this operation.
    Without(usize),
    /// This operation alone.
    Only(usize),
    /// All, but of this operation some sectors.
    Torn(usize),
    /// All, but of this operation some blocks.
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

/// Every way in which a run may end at this point.
fn ends(point: &Replay<'_>, mut each: impl FnMut(End)) {
    let pending = point.pending().len();
    each(End::Whole);
    if pending == 1 {
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

/// Parts that survive, at random: any, or all but one, or those before a cut.
fn some_parts(dice: &SeededEnvironment, unit: u64) -> Box<dyn Fn(u64) -> bool> {
    let (how, bits, cut) = (dice.next_u64() % 4, dice.next_u64(), dice.next_u64() % 40);
    Box::new(move |part| match (how, part / unit) {
        (0, part) => bits >> (part % 64) & 1 == 1,
        (1, part) => part != cut % 8,
        (2, part) => part < cut,
        (_, part) => part >= cut % 8,
    })
}

fn make(point: &Replay<'_>, end: End, dice: &SeededEnvironment) -> Arc<SimulatedStorage> {
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

/// Any subset, in parts, in any order; how many survive differs from loss to loss.
fn random_loss(point: &Replay<'_>, dice: &SeededEnvironment) -> Arc<SimulatedStorage> {
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

/// Records the run of a seed and judges the states that crashes of it leave.
pub(super) fn explore(seed: u64, plan: Plan) -> Tally {
    HAS_LOG.set(!seed.is_multiple_of(4));
    let run = workload::run(seed);
    let mut all = 0;
    let mut point = run.trace.replay();
    loop {
        ends(&point, |_| all += 1);
        if !point.advance() {
            break;
        }
    }
    let dice = Arc::new(SeededEnvironment::new(seed ^ 0xDEAD_BEEF_0000_0000));
    let mut tally = Tally { seeds: 1, fsyncs: run.promises() as u64, ..Tally::default() };
    let mut point = run.trace.replay();
    loop {
        let mut chosen = Vec::new();
        ends(&point, |end| {
            if all <= plan.states || dice.next_u64() % all < plan.states {
                chosen.push(end);
            }
        });
        for end in chosen {
            let judged = catch_unwind(AssertUnwindSafe(|| judge_end(&run, &point, end, &dice, &mut tally)));
            if let Err(panic) = judged {
                println!("violation: SEED={seed} STATES={} position={} end={end:?}", plan.states, point.position());
                resume_unwind(panic);
            }
        }
        if !point.advance() {
            return tally;
        }
    }
}

fn judge_end(run: &Run, point: &Replay<'_>, end: End, dice: &Arc<SeededEnvironment>, tally: &mut Tally) {
    let (range, promised) = run.allowed(point.position());
    let allowed = &run.states[range];
    let storage = make(point, end, dice);
    // What recovery seals must not repeat the nonces of the run.
    let environment = Arc::new(SeededEnvironment::new(dice.next_u64()));
    tally.states += 1;
    tally.process_deaths += u64::from(end == End::ProcessDeath);
    tally.failed_barriers += u64::from(end == End::FailedBarrier);
    if dice.next_u64().is_multiple_of(16) {
        tally.read_errors += u64::from(judge::survives_a_read_error(&storage, &environment, dice.next_u64() % 70));
    }
    if dice.next_u64().is_multiple_of(DOUBLE_EVERY) {
        die_again(&storage, (allowed, promised), &run.kept, &environment, dice, tally);
        return;
    }
    let (fs, seen) = judge::open(&storage, &environment, allowed, promised);
    tally.fallbacks += u64::from(fs.volume.fallback().is_some());
    tally.closed += u64::from(fs.volume.durable().closed);
    let deep = dice.next_u64().is_multiple_of(8);
    tally.snapshots += judge::inspect((&fs, &seen), &storage, &run.kept, &environment, deep);
}

/// The session that recovers is killed by a power cut as well, at any of its operations, also after it made promises of its own.
fn die_again(
    storage: &Arc<SimulatedStorage>,
    (allowed, promised): (&[(usize, Seen)], Generation),
    kept: &Kept,
    environment: &Arc<SeededEnvironment>,
    dice: &Arc<SeededEnvironment>,
    tally: &mut Tally,
) {
    storage.record(64 << 20);
    let (fs, first) = judge::open(storage, environment, allowed, promised);
    let opened = storage.position();
    tally.snapshots += judge::inspect((&fs, &first), storage, kept, environment, true);
    let made = fs.make_node(
        ROOT_INO,
        b"of the second session",
        mode::REGULAR | 0o600,
        0,
        Creator { uid: 1, gid: 1, umask: None },
    );
    let made = made.unwrap();
    let created = see(&fs).0;
    fs.write(made.ino, 0, &[42; 5000]).unwrap();
    let written = see(&fs).0;
    fs.sync().unwrap();
    let (acknowledged, generation) = (storage.position(), fs.volume.durable().generation);
    if dice.next_u64().is_multiple_of(2) {
        fs.close().unwrap();
    }
    drop(fs);
    let trace = storage.recorded().expect("the storage records");
    let mut point = trace.replay();
    let every = (trace.len() as u64 / DOUBLES).max(1);
    loop {
        if dice.next_u64().is_multiple_of(every) || point.position() == acknowledged {
            let mut end = Vec::new();
            ends(&point, |one| end.push(one));
            let end = end[(dice.next_u64() % end.len() as u64) as usize];
            let second = make(&point, end, dice);
            let environment = Arc::new(SeededEnvironment::new(dice.next_u64()));
            let own = [(0, first.clone()), (0, created.clone()), (0, written.clone())];
            let (fs, seen) = if point.position() >= acknowledged {
                judge::open(&second, &environment, &own[2..], generation)
            } else if point.position() >= opened {
                // What recovery has shown to somebody does not go away again.
                judge::open(&second, &environment, &own, promised)
            } else {
                judge::open(&second, &environment, allowed, promised)
            };
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
