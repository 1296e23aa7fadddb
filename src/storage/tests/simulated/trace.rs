//! Recorded operations of a run, and a replayer that produces the states a crash at any point may
//! leave.
//!
//! An image costs memory for its block list, not its bytes: blocks are shared until one side
//! writes.

use std::sync::Arc;

use super::super::memory::SparseImage;
use super::{Fate, OpKind, PendingOp, SimulatedStorage, State, apply, apply_fate, apply_parts, outside_of};

/// Operations requested since recording began; see [`SimulatedStorage::record`].
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

    /// Records the operation unless the memory limit is reached; earlier operations stay valid.
    pub(super) fn push(&mut self, op: OpKind) {
        let bytes = size_of::<OpKind>() as u64
            + match &op {
                OpKind::Write { data, .. } | OpKind::SyncRange { data, .. } => data.len() as u64,
                _ => 0,
            };
        self.complete &= bytes <= self.left;
        if self.complete {
            self.left -= bytes;
            self.ops.push(op);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.ops.len()
    }

    /// Returns whether no operation was left out because of the memory limit.
    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Returns a replay positioned before the first operation.
    pub(crate) fn replay(&self) -> TraceReplay<'_> {
        TraceReplay { trace: self, at: 0, pending: Vec::new(), medium: self.base.clone() }
    }
}

impl SimulatedStorage {
    /// Records pending and future operations in at most `limit` bytes, until
    /// [`SimulatedStorage::recorded`].
    pub(crate) fn record(&self, limit: u64) {
        let state = &mut *self.state.lock();
        let mut trace = Trace::new(state.medium.clone(), state.capacity, state.ordered, limit);
        state.pending.iter().for_each(|op| trace.push(op.kind.clone()));
        state.trace = Some(trace);
    }

    pub(crate) fn position(&self) -> usize {
        self.state.lock().trace.as_ref().map_or(0, Trace::len)
    }

    pub(crate) fn recorded(&self) -> Option<Trace> {
        self.state.lock().trace.take()
    }

    /// Returns the maximum bytes of writes pending at once.
    pub(crate) fn max_pending(&self) -> u64 {
        self.state.lock().max_pending
    }
}

/// Position in a recorded run.
#[derive(Clone)]
pub(crate) struct TraceReplay<'a> {
    trace: &'a Trace,
    at: usize,
    pending: Vec<OpKind>,
    /// Medium after the last barrier or sync of a range.
    medium: SparseImage,
}

impl TraceReplay<'_> {
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    /// Returns the operations completed that no barrier and no sync of a range covered.
    pub(crate) fn pending(&self) -> &[OpKind] {
        &self.pending
    }

    /// Returns whether the last operation was the sync of a range.
    pub(crate) fn is_after_range_sync(&self) -> bool {
        self.at > 0 && matches!(self.trace.ops.get(self.at - 1), Some(OpKind::SyncRange { .. }))
    }

    /// Returns whether the next operation is a barrier or the sync of a range.
    pub(crate) fn at_barrier(&self) -> bool {
        matches!(self.trace.ops.get(self.at), Some(OpKind::Barrier | OpKind::SyncRange { .. }))
    }

    /// Returns whether a crash keeps all pending operations or none (HOST-5).
    pub(crate) fn has_atomic_barrier(&self) -> bool {
        self.trace.ordered
    }

    /// Advances by one operation; returns false at the end.
    pub(crate) fn advance(&mut self) -> bool {
        match self.trace.ops.get(self.at) {
            None => return false,
            Some(OpKind::Barrier) => self.pending.drain(..).for_each(|op| apply(&mut self.medium, &op)),
            Some(OpKind::SyncRange { offset, data }) => {
                self.medium.put(*offset, data);
                let synced = *offset..*offset + data.len() as u64;
                self.pending = self.pending.iter().flat_map(|op| outside_of(op, &synced)).collect();
            }
            Some(op) => self.pending.push(op.clone()),
        }
        self.at += 1;
        true
    }

    /// Simulates a power loss; `choose` decides each pending operation by index.
    pub(crate) fn power_loss(&self, choose: &mut dyn FnMut(usize) -> Fate) -> Arc<SimulatedStorage> {
        let order = 0..self.pending().len();
        self.power_loss_in_order(order, choose)
    }

    /// Like [`TraceReplay::power_loss`], but applies the operations in the order of `order`.
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

    /// Simulates the death of the process: the cache has everything, the medium the state of the
    /// last barrier.
    pub(crate) fn process_death(&self) -> Arc<SimulatedStorage> {
        SimulatedStorage::with_state(self.state())
    }

    /// Like [`TraceReplay::process_death`], but after a failed writeback of the host: pending data
    /// can be read until it is evicted, and is then lost.
    pub(crate) fn failed_barrier(&self) -> Arc<SimulatedStorage> {
        let mut state = self.state();
        state.drop_pending_data();
        SimulatedStorage::with_state(state)
    }

    /// Simulates a power loss that keeps all pending operations and leaves `tail` after the end.
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

/// Writes the surviving parts to the medium and garbage in place of the others, like sectors that
/// lost power during the write.
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
