//! Crash-simulating storage: records unsynced operations; a crash drops, reorders or tears them in
//! sectors of 512 bytes.
//!
//! Medium and host cache are modelled separately. In addition to
//! [`MemoryStorage`](super::MemoryStorage):
//!
//! HOST-1  An operation is pending until a successful barrier; a crash keeps any subset of the
//!     pending ones, in any order, in parts. A successful `sync_range` takes its bytes out of the
//!     pending writes: they are on the medium.
//! HOST-2  Punches, allocations and length changes persist independently of data: each may survive
//!     where an earlier write did not.
//! HOST-3  After a failed barrier or sync of a range the written data is *clean but lost*: reads
//!     see it until it is evicted, and no later barrier writes it to the medium. (ext4 and XFS
//!     behave so after a failed writeback.)
//! HOST-4  The death of a process loses nothing of the cache and makes nothing durable.
//! HOST-5  Storage with atomic barriers (STORAGE-4) keeps all pending operations or none in a
//!     crash, and none when the process dies.
//! HOST-6  Copy-on-write storage needs new space for each write, even over allocated ranges; the
//!     space of replaced or freed blocks is available after a barrier (`fault`).

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::memory::{HOST_BLOCK, SparseImage};
use crate::error::{Error, Result};
use crate::storage::{Storage, end_of};

mod fault;
mod trace;

pub(crate) use fault::{Fault, FaultClass, FaultPlan};
pub(crate) use trace::{Trace, TraceReplay};

/// Bytes that a medium writes atomically.
pub(crate) const SECTOR: u64 = 512;

#[derive(Clone, Debug)]
pub(crate) enum OpKind {
    Write { offset: u64, data: Arc<[u8]> },
    Punch { offset: u64, length: u64 },
    Allocate { offset: u64, length: u64 },
    SetLen(u64),
    SyncRange { offset: u64, data: Arc<[u8]> },
    Barrier,
}

/// Operation not covered by a barrier; numbers ascend in call order.
#[derive(Clone, Debug)]
pub(crate) struct PendingOp {
    pub(crate) number: u64,
    pub(crate) kind: OpKind,
}

pub(crate) enum Fate {
    Drop,
    Keep,
    /// Keeps only the parts for which the function returns true, counted from 0: sectors of a
    /// write, blocks of a punch or allocation. A write that grew the storage grows it completely,
    /// with zeros for lost parts. A length change is one part.
    Torn(Box<dyn Fn(u64) -> bool>),
    /// Like `Torn`, but lost sectors of a write hold garbage.
    Garbage(Box<dyn Fn(u64) -> bool>),
}

type Hook = Arc<dyn Fn(&OpKind) + Send + Sync>;
type ReadFault = Box<dyn Fn(u64, usize) -> bool + Send + Sync>;

/// Sparse file on a host that can lose power.
pub(crate) struct SimulatedStorage {
    state: Mutex<State>,
    hook: RwLock<Option<Hook>>,
    read_fault: RwLock<Option<ReadFault>>,
}

#[derive(Clone, Default)]
struct State {
    medium: SparseImage,
    /// Content that reads see: the medium with all pending operations, and lost blocks as written.
    cache: SparseImage,
    pending: Vec<PendingOp>,
    /// Blocks that are clean but lost (HOST-3).
    lost: BTreeSet<u64>,
    capacity: Option<u64>,
    pending_upload_bytes: u64,
    /// Set for atomic barriers (HOST-5).
    ordered: bool,
    /// Set when the sync of a range is a barrier.
    syncs_by_barriers: bool,
    fail_barrier: bool,
    /// Space of a copy-on-write host (HOST-6).
    room: Option<fault::CowSpace>,
    faults: Option<fault::ActiveFault>,
    trace: Option<Trace>,
    numbered: u64,
    writes: u64,
    barriers: u64,
    /// Maximum bytes of writes pending at once.
    max_pending: u64,
    pending_bytes: u64,
}

impl SimulatedStorage {
    pub(crate) fn new() -> Arc<SimulatedStorage> {
        Self::with_state(State::default())
    }

    /// Sets the bytes reported as pending upload.
    pub(crate) fn set_pending_upload(&self, bytes: u64) {
        self.state.lock().pending_upload_bytes = bytes;
    }

    /// Creates a storage with `bytes` on the medium.
    pub(crate) fn from_contents(bytes: &[u8]) -> Arc<SimulatedStorage> {
        Self::on_medium(SparseImage::from_bytes(bytes), None, false)
    }

    fn on_medium(medium: SparseImage, capacity: Option<u64>, ordered: bool) -> Arc<SimulatedStorage> {
        Self::with_state(State { cache: medium.clone(), medium, capacity, ordered, ..State::default() })
    }

    fn with_state(state: State) -> Arc<SimulatedStorage> {
        Arc::new(SimulatedStorage { state: Mutex::new(state), hook: RwLock::new(None), read_fault: RwLock::new(None) })
    }

    /// Sets the host capacity in bytes of allocated blocks, like
    /// [`MemoryStorage::set_capacity`](super::MemoryStorage::set_capacity).
    pub(crate) fn set_capacity(&self, bytes: Option<u64>) {
        self.state.lock().capacity = bytes;
    }

    /// Makes the host copy-on-write (HOST-6) with `free` bytes left; `None` ends that.
    pub(crate) fn set_room(&self, free: Option<u64>) {
        self.state.lock().set_room(free);
    }

    /// Makes each sync of a range a barrier.
    pub(crate) fn sync_by_barriers(&self) {
        self.state.lock().syncs_by_barriers = true;
    }

    /// Makes all following barriers atomic (STORAGE-4).
    pub(crate) fn make_barriers_atomic(&self) {
        self.state.lock().ordered = true;
    }

    /// Returns the bytes of allocated blocks in the cache.
    pub(crate) fn allocated(&self) -> u64 {
        self.state.lock().cache.allocated()
    }

    /// Returns the content that reads see.
    pub(crate) fn contents(&self) -> Vec<u8> {
        self.state.lock().cache.to_bytes()
    }

    /// Returns the content after a crash that loses all pending operations.
    pub(crate) fn medium_contents(&self) -> Vec<u8> {
        self.state.lock().medium.to_bytes()
    }

    pub(crate) fn pending(&self) -> Vec<PendingOp> {
        self.state.lock().pending.clone()
    }

    /// Returns the number of successful writes.
    pub(crate) fn writes(&self) -> u64 {
        self.state.lock().writes
    }

    /// Returns the number of successful barriers and syncs of ranges.
    pub(crate) fn barriers(&self) -> u64 {
        self.state.lock().barriers
    }

    /// Simulates a power loss: returns a new storage with the medium and the pending operations
    /// that `choose` keeps, in call order. Does not change `self`.
    pub(crate) fn crash(&self, choose: &mut dyn FnMut(&PendingOp) -> Fate) -> Arc<SimulatedStorage> {
        let state = self.state.lock();
        Self::after_crash(&state, 0..state.pending.len(), choose)
    }

    /// Like [`SimulatedStorage::crash`], but applies the operations in the order of `order`,
    /// indices of [`SimulatedStorage::pending`].
    pub(crate) fn crash_in_order(
        &self,
        order: &[usize],
        choose: &mut dyn FnMut(&PendingOp) -> Fate,
    ) -> Arc<SimulatedStorage> {
        Self::after_crash(&self.state.lock(), order.iter().copied(), choose)
    }

    /// Simulates a random power loss: every pending operation is dropped, kept or torn
    /// independently, in shuffled order. The share of survivors varies from none to all, so that
    /// "all but one" also happens among hundreds.
    pub(crate) fn crash_random(&self, rng: &mut dyn FnMut() -> u64) -> Arc<SimulatedStorage> {
        let state = self.state.lock();
        let mut order: Vec<usize> = (0..state.pending.len()).collect();
        for last in (1..order.len()).rev() {
            order.swap(last, (rng() % (last as u64 + 1)) as usize);
        }
        let (survival, tearing) = (rng() % 17, rng() % 4);
        Self::after_crash(&state, order.into_iter(), &mut |_| {
            if rng() % 16 < tearing {
                let mut bits = [0; 4];
                bits.fill_with(&mut *rng);
                // 256 parts are a write of 128 KiB; longer ones repeat the pattern.
                Fate::Torn(Box::new(move |part| bits[(part / 64 % 4) as usize] >> (part % 64) & 1 == 1))
            } else if rng() % 16 < survival {
                Fate::Keep
            } else {
                Fate::Drop
            }
        })
    }

    fn after_crash(
        state: &State,
        order: impl Iterator<Item = usize>,
        choose: &mut dyn FnMut(&PendingOp) -> Fate,
    ) -> Arc<SimulatedStorage> {
        if state.ordered {
            // A crash during the last barrier: it took effect or not.
            let is_kept = state.pending.first().is_some_and(|op| matches!(choose(op), Fate::Keep));
            let image = if is_kept { &state.cache } else { &state.medium };
            return Self::on_medium(image.clone(), state.capacity, true);
        }
        let mut medium = state.medium.clone();
        for op in order.filter_map(|index| state.pending.get(index)) {
            apply_fate(&mut medium, &op.kind, &choose(op));
        }
        Self::on_medium(medium, state.capacity, false)
    }

    /// Simulates the death of the process (HOST-4): returns a new storage with the same medium,
    /// cache and pending operations, so that a later crash loses unsynced data. Faults, counters
    /// and the hook are reset.
    pub(crate) fn process_death(&self) -> Arc<SimulatedStorage> {
        let state = self.state.lock().clone();
        if state.ordered {
            return Self::on_medium(state.medium, state.capacity, true);
        }
        Self::with_state(State { fail_barrier: false, faults: None, trace: None, writes: 0, barriers: 0, ..state })
    }

    /// Makes the next barrier fail with EIO and lose the data written before it (HOST-3); length
    /// changes, punches and allocations stay pending.
    pub(crate) fn fail_next_barrier(&self) {
        self.state.lock().fail_barrier = true;
    }

    /// Makes reads (offset, length) fail with EIO if `fails` returns true; `None` ends that.
    pub(crate) fn fail_reads(&self, fails: Option<Box<dyn Fn(u64, usize) -> bool + Send + Sync>>) {
        *self.read_fault.write() = fails;
    }

    /// Calls `hook` before each operation without holding a lock; it may crash this storage. A hook
    /// that owns the storage leaks it.
    pub(crate) fn on_op(&self, hook: Box<dyn Fn(&OpKind) + Send + Sync>) {
        *self.hook.write() = Some(hook.into());
    }

    fn announce(&self, op: &OpKind) {
        let hook = self.hook.read().clone();
        if let Some(hook) = hook {
            hook(op);
        }
    }
}

fn apply(image: &mut SparseImage, op: &OpKind) {
    match op {
        OpKind::Write { offset, data } => image.put(*offset, data),
        OpKind::Punch { offset, length } => image.punch(*offset, *length),
        OpKind::Allocate { offset, length } => image.allocate(*offset, *length),
        OpKind::SetLen(length) => image.set_len(*length),
        OpKind::SyncRange { .. } | OpKind::Barrier => {}
    }
}

/// Returns the parts of a pending operation outside of the range `synced`, which is on the medium.
/// Only writes have such parts, so a crash may punch what was synced: no caller punches there.
fn outside_of(kind: &OpKind, synced: &Range<u64>) -> Vec<OpKind> {
    let OpKind::Write { offset, data } = kind else { return vec![kind.clone()] };
    let (start, end) = (*offset, offset + data.len() as u64);
    let parts = [start..end.min(synced.start), start.max(synced.end)..end];
    let part = |part: Range<u64>| OpKind::Write {
        offset: part.start,
        data: data[(part.start - start) as usize..(part.end - start) as usize].into(),
    };
    parts.into_iter().filter(|part| !part.is_empty()).map(part).collect()
}

fn apply_fate(image: &mut SparseImage, op: &OpKind, fate: &Fate) {
    match fate {
        Fate::Drop => {}
        Fate::Keep => apply(image, op),
        Fate::Torn(survives) => apply_parts(image, op, survives),
        Fate::Garbage(survives) => trace::apply_garbage(image, op, survives),
    }
}

fn parts(offset: u64, length: u64, unit: u64) -> impl Iterator<Item = (u64, Range<u64>)> {
    let end = offset.saturating_add(length);
    let mut start = offset;
    std::iter::from_fn(move || {
        let part = start..(start - start % unit).saturating_add(unit).min(end);
        start = part.end;
        (part.start < part.end).then_some(part)
    })
    .enumerate()
    .map(|(number, part)| (number as u64, part))
}

fn apply_parts(image: &mut SparseImage, op: &OpKind, survives: &dyn Fn(u64) -> bool) {
    match op {
        OpKind::Write { offset, data } => {
            let end = offset + data.len() as u64;
            if image.len() < end {
                image.set_len(end);
            }
            for (_, part) in parts(*offset, data.len() as u64, SECTOR).filter(|(number, _)| survives(*number)) {
                image.put(part.start, &data[(part.start - offset) as usize..(part.end - offset) as usize]);
            }
        }
        OpKind::Punch { offset, length } => {
            // Past the end there is nothing to punch; this also bounds the parts of an unlimited
            // punch.
            let length = (*length).min(image.len().saturating_sub(*offset));
            for (_, part) in parts(*offset, length, HOST_BLOCK).filter(|(number, _)| survives(*number)) {
                image.punch(part.start, part.end - part.start);
            }
        }
        OpKind::Allocate { offset, length } => {
            for (_, part) in parts(*offset, *length, HOST_BLOCK).filter(|(number, _)| survives(*number)) {
                image.allocate(part.start, part.end - part.start);
            }
        }
        OpKind::SetLen(_) if survives(0) => apply(image, op),
        OpKind::SetLen(_) | OpKind::SyncRange { .. } | OpKind::Barrier => {}
    }
}

fn eio(what: &str) -> Error {
    Error::io(format!("simulated {what}"), io::Error::from_raw_os_error(nix::libc::EIO))
}

impl State {
    /// Counts an operation and fails it if a fault is due.
    fn fault(&mut self, class: FaultClass) -> Result<()> {
        match &mut self.faults {
            None => Ok(()),
            Some(armed) => armed.meet(class),
        }
    }

    fn fails_on_full_host(&self, offset: u64, length: u64) -> bool {
        self.faults.as_ref().is_some_and(fault::ActiveFault::is_full_host)
            && self.cache.check_capacity(offset, length, Some(0)).is_ok()
    }

    fn perform(&mut self, kind: OpKind) {
        if let Some(trace) = &mut self.trace {
            trace.push(kind.clone());
        }
        if let OpKind::Write { data, .. } = &kind {
            self.pending_bytes += data.len() as u64;
            self.max_pending = self.max_pending.max(self.pending_bytes);
        }
        apply(&mut self.cache, &kind);
        if !self.lost.is_empty() {
            self.mark_dirty_again(&kind);
        }
        self.pending.push(PendingOp { number: self.numbered, kind });
        self.numbered += 1;
    }

    /// Marks lost blocks as dirty again that are completely overwritten or punched.
    fn mark_dirty_again(&mut self, kind: &OpKind) {
        let (start, end) = match kind {
            OpKind::Write { offset, data } => (*offset, offset + data.len() as u64),
            OpKind::Punch { offset, length } => (*offset, offset.saturating_add(*length)),
            OpKind::SetLen(length) => (*length, u64::MAX),
            OpKind::Allocate { .. } | OpKind::SyncRange { .. } | OpKind::Barrier => return,
        };
        self.lost.retain(|block| block * HOST_BLOCK < start || (block + 1) * HOST_BLOCK > end);
    }

    /// Counts a barrier or the sync of a range, or fails it and loses the pending data (HOST-3).
    fn begin_barrier(&mut self) -> Result<()> {
        let mut begun = self.fault(FaultClass::Barrier);
        if std::mem::take(&mut self.fail_barrier) {
            begun = Err(eio("barrier error"));
        }
        match begun {
            Ok(()) => self.barriers += 1,
            Err(_) => self.drop_pending_data(),
        }
        begun
    }

    fn persist_pending(&mut self) {
        if self.lost.is_empty() {
            // The whole cache is now on the medium; shares its blocks without copying.
            self.medium = self.cache.clone();
        } else {
            self.pending.iter().for_each(|op| apply(&mut self.medium, &op.kind));
        }
        self.pending.clear();
        self.pending_bytes = 0;
        if let Some(trace) = &mut self.trace {
            trace.push(OpKind::Barrier);
        }
    }

    fn persist_range(&mut self, offset: u64, data: &Arc<[u8]>) {
        let synced = offset..offset + data.len() as u64;
        self.medium.put(offset, data);
        self.pending = std::mem::take(&mut self.pending)
            .into_iter()
            .flat_map(|op| outside_of(&op.kind, &synced).into_iter().map(move |kind| PendingOp { kind, ..op.clone() }))
            .collect();
        self.pending_bytes = self.pending_bytes.saturating_sub(data.len() as u64);
        if let Some(trace) = &mut self.trace {
            trace.push(OpKind::SyncRange { offset, data: data.clone() });
        }
    }

    /// Drops pending data but keeps metadata (HOST-3).
    fn drop_pending_data(&mut self) {
        for op in &self.pending {
            if let OpKind::Write { offset, data } = &op.kind {
                let end = offset + data.len() as u64;
                self.lost.extend(offset / HOST_BLOCK..end.div_ceil(HOST_BLOCK));
            }
        }
        self.pending.retain(|op| !matches!(op.kind, OpKind::Write { .. }));
        // The host keeps the length to which a lost write grew the file.
        self.pending.push(PendingOp { number: self.numbered, kind: OpKind::SetLen(self.cache.len()) });
        self.numbered += 1;
    }

    fn evict(&mut self, offset: u64, end: u64) {
        let evicted: Vec<u64> = self.lost.range(offset / HOST_BLOCK..end.div_ceil(HOST_BLOCK)).copied().collect();
        if evicted.is_empty() {
            return;
        }
        // Dirty data is never dropped: data written since the loss is applied over the medium's
        // content.
        let mut revealed = self.medium.clone();
        self.pending.iter().for_each(|op| apply(&mut revealed, &op.kind));
        for block in evicted {
            self.cache.copy_block(block, &revealed);
            self.lost.remove(&block);
        }
    }
}

impl Storage for SimulatedStorage {
    fn pending_upload_bytes(&self) -> Result<u64> {
        Ok(self.state.lock().pending_upload_bytes)
    }

    fn allocated(&self) -> Result<u64> {
        Ok(SimulatedStorage::allocated(self))
    }

    fn len(&self) -> Result<u64> {
        Ok(self.state.lock().cache.len())
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if self.read_fault.read().as_ref().is_some_and(|fails| fails(offset, out.len())) {
            return Err(eio("read error"));
        }
        let mut state = self.state.lock();
        state.fault(FaultClass::Read)?;
        state.cache.read(offset, out)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        end_of(offset, data.len() as u64)?;
        let op = OpKind::Write { offset, data: data.into() };
        self.announce(&op);
        let mut state = self.state.lock();
        if let Err(error) = state.fault(FaultClass::Write) {
            if state.faults.as_ref().is_some_and(fault::ActiveFault::is_short) {
                // The host accepted a part and then failed.
                let part = data.len() / 2;
                state.perform(OpKind::Write { offset, data: data[..part].into() });
            }
            return Err(error);
        }
        state.cache.check_capacity(offset, data.len() as u64, state.capacity)?;
        state.take_for_write(offset, data.len() as u64)?;
        state.perform(op);
        state.writes += 1;
        Ok(())
    }

    fn allocate(&self, offset: u64, length: u64) -> Result<()> {
        end_of(offset, length)?;
        let op = OpKind::Allocate { offset, length };
        self.announce(&op);
        let mut state = self.state.lock();
        // A full host accepts operations on allocated ranges.
        if !state.fails_on_full_host(offset, length) {
            state.fault(FaultClass::Allocate)?;
        }
        state.cache.check_capacity(offset, length, state.capacity)?;
        state.take_for_allocation(offset, length)?;
        state.perform(op);
        Ok(())
    }

    fn keep_ballast(&self) {
        self.state.lock().keep_ballast();
    }

    fn cut_ballast(&self) -> bool {
        self.state.lock().cut_ballast()
    }

    fn punch(&self, offset: u64, length: u64) -> Result<()> {
        let op = OpKind::Punch { offset, length };
        self.announce(&op);
        let mut state = self.state.lock();
        state.fault(FaultClass::Punch)?;
        let allocated = state.cache.allocated();
        state.perform(op);
        state.give_back(allocated);
        Ok(())
    }

    fn set_len(&self, length: u64) -> Result<()> {
        end_of(length, 0)?;
        let op = OpKind::SetLen(length);
        self.announce(&op);
        let mut state = self.state.lock();
        state.fault(FaultClass::SetLen)?;
        let allocated = state.cache.allocated();
        state.perform(op);
        state.give_back(allocated);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.announce(&OpKind::Barrier);
        let mut state = self.state.lock();
        state.begin_barrier()?;
        state.persist_pending();
        state.unpin();
        Ok(())
    }

    fn sync_range(&self, offset: u64, data: &[u8]) -> Result<()> {
        if !self.has_range_sync() {
            return self.barrier();
        }
        let data: Arc<[u8]> = data.into();
        self.announce(&OpKind::SyncRange { offset, data: data.clone() });
        let mut state = self.state.lock();
        state.begin_barrier()?;
        state.persist_range(offset, &data);
        Ok(())
    }

    fn has_range_sync(&self) -> bool {
        let state = self.state.lock();
        !state.ordered && !state.syncs_by_barriers && state.room.is_none()
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        let end = end_of(offset, length)?;
        self.state.lock().evict(offset, end);
        Ok(())
    }

    fn has_atomic_barrier(&self) -> bool {
        self.state.lock().ordered
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        Ok(self.state.lock().cache.next_data(offset))
    }

    fn read_only(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
