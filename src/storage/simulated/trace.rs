//! The operations of a run as they were asked for, and a replayer that makes what a crash at any point of it may leave.
//!
//! An image costs the length of its list of blocks, not its bytes: blocks are shared until one side writes.

use std::sync::Arc;

use super::super::sparse_image::SparseImage;
use super::{Fate, OpKind, PendingOp, SimulatedStorage, State, apply, apply_fate, apply_parts};

/// What a storage was asked for since it began to record; see [`SimulatedStorage::record`].
#[derive(Clone)]
pub(crate) struct Trace {
    base: SparseImage,
    ops: Vec<OpKind>,
    capacity: Option<u64>,
    ordered: bool,
    left: u64,
    complete: bool,
}

impl Trace {
    pub(super) fn new(base: SparseImage, capacity: Option<u64>, ordered: bool, limit: u64) -> Trace {
        Trace { base, ops: Vec::new(), capacity, ordered, left: limit, complete: true }
    }

    /// Keeps the operation unless the memory that recording may take is used up; what was recorded before stays right.
    pub(super) fn push(&mut self, op: OpKind) {
        let bytes =
            size_of::<OpKind>() as u64 + if let OpKind::Write { data, .. } = &op { data.len() as u64 } else { 0 };
        self.complete &= bytes <= self.left;
        if self.complete {
            self.left -= bytes;
            self.ops.push(op);
        }
    }

    /// Operations recorded.
    pub(crate) fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether nothing was left out for want of memory.
    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Before the first operation.
    pub(crate) fn replay(&self) -> TraceReplay<'_> {
        TraceReplay { trace: self, at: 0, window: 0, medium: self.base.clone() }
    }
}

impl SimulatedStorage {
    /// Records what is asked for from here on, and what is pending now, in at most `limit` bytes, until [`SimulatedStorage::recorded`].
    pub(crate) fn record(&self, limit: u64) {
        let state = &mut *self.state.lock();
        let mut trace = Trace::new(state.medium.clone(), state.capacity, state.ordered, limit);
        state.pending.iter().for_each(|op| trace.push(op.kind.clone()));
        state.trace = Some(trace);
    }

    /// Operations recorded so far.
    pub(crate) fn position(&self) -> usize {
        self.state.lock().trace.as_ref().map_or(0, Trace::len)
    }

    /// Ends the recording.
    pub(crate) fn recorded(&self) -> Option<Trace> {
        self.state.lock().trace.take()
    }

    /// Most bytes of writes that were waiting for a barrier at any time.
    pub(crate) fn most_pending(&self) -> u64 {
        self.state.lock().most_pending
    }
}

/// A point of a run: so many operations were asked for and returned.
#[derive(Clone)]
pub(crate) struct TraceReplay<'a> {
    trace: &'a Trace,
    at: usize,
    /// First operation behind the last barrier.
    window: usize,
    /// As the last barrier left it.
    medium: SparseImage,
}

impl<'a> TraceReplay<'a> {
    /// Operations that returned.
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    /// Operations that returned since the last barrier.
    pub(crate) fn pending(&self) -> &'a [OpKind] {
        &self.trace.ops[self.window..self.at]
    }

    /// Whether the operation that is asked for next is a barrier.
    pub(crate) fn at_barrier(&self) -> bool {
        matches!(self.trace.ops.get(self.at), Some(OpKind::Barrier))
    }

    /// Whether a crash keeps all pending operations or none (HOST-5).
    pub(crate) fn is_ordered(&self) -> bool {
        self.trace.ordered
    }

    /// Goes on by one operation; false at the end.
    pub(crate) fn advance(&mut self) -> bool {
        match self.trace.ops.get(self.at) {
            None => return false,
            Some(OpKind::Barrier) => {
                self.trace.ops[self.window..self.at].iter().for_each(|op| apply(&mut self.medium, op));
                self.window = self.at + 1;
            }
            Some(_) => {}
        }
        self.at += 1;
        true
    }

    /// Power fails: of each pending operation, by its index, the medium gets what `choose` says.
    pub(crate) fn power_loss(&self, choose: &mut dyn FnMut(usize) -> Fate) -> Arc<SimulatedStorage> {
        let order = 0..self.pending().len();
        self.power_loss_in_order(order, choose)
    }

    /// As [`TraceReplay::power_loss`]; the operations reach the medium in the order of `order`.
    pub(crate) fn power_loss_in_order(
        &self,
        order: impl Iterator<Item = usize>,
        choose: &mut dyn FnMut(usize) -> Fate,
    ) -> Arc<SimulatedStorage> {
        let mut medium = self.medium.clone();
        for index in order {
            apply_fate(&mut medium, &self.pending()[index], &choose(index));
        }
        SimulatedStorage::on_medium(medium, self.trace.capacity, self.trace.ordered)
    }

    /// The process dies: the host's cache has everything, the medium what the last barrier left.
    pub(crate) fn process_death(&self) -> Arc<SimulatedStorage> {
        SimulatedStorage::with_state(self.state())
    }

    /// As [`TraceReplay::process_death`], after the host failed to write its cache back: the data that was pending reads well until it is
    /// evicted and is lost then.
    pub(crate) fn failed_barrier(&self) -> Arc<SimulatedStorage> {
        let mut state = self.state();
        state.lose();
        SimulatedStorage::with_state(state)
    }

    /// Power fails and leaves `tail` behind the end of what all pending operations would have left.
    pub(crate) fn with_tail(&self, tail: &[u8]) -> Arc<SimulatedStorage> {
        let mut medium = self.medium.clone();
        self.pending().iter().for_each(|op| apply(&mut medium, op));
        let end = medium.len();
        medium.put(end, tail);
        SimulatedStorage::on_medium(medium, self.trace.capacity, self.trace.ordered)
    }

    fn state(&self) -> State {
        let mut state = State { medium: self.medium.clone(), cache: self.medium.clone(), ..State::default() };
        state.capacity = self.trace.capacity;
        for op in self.pending() {
            apply(&mut state.cache, op);
            state.pending.push(PendingOp { number: state.numbered, kind: op.clone() });
            state.numbered += 1;
        }
        state
    }
}

/// The parts of a write that `survives` says reach the medium; the others get garbage, as a sector that lost power while it was written.
pub(super) fn apply_garbage(image: &mut SparseImage, op: &OpKind, survives: &dyn Fn(u64) -> bool) {
    apply_parts(image, op, survives);
    let OpKind::Write { offset, data } = op else { return };
    for (number, part) in super::parts(*offset, data.len() as u64, super::SECTOR) {
        if !survives(number) {
            let seed = part.start ^ 0x9E37_79B9_7F4A_7C15;
            let bytes: Vec<u8> = part.clone().map(|at| (at.wrapping_mul(seed) >> 24) as u8).collect();
            image.put(part.start, &bytes);
        }
    }
}
