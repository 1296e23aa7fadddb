//! Simulated disk, clock and store: the disk stops at a chosen step and loses or tears writes that
//! no barrier covered, the tests turn the clock, and the simplest store that obeys the rules keeps
//! shares in memory.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use lockbox_share_protocol::token::Handle;
use parking_lot::Mutex;

use crate::store::barrier_group::{PendingReply, Syncable};
use crate::store::contract::{NewShare, Periods, ShareTimes, StoreMaintenance, StoreStats};
use crate::store::env::{Clock, Disk, DiskFile, StoreClock, WallTime, random};
use crate::store::share::{Key, Share, ShareBackend, StepReply, StoreTiming};
use crate::store::{Result, StoreError};

#[derive(Clone, Default)]
struct Node {
    content: Vec<u8>,
    durable: Vec<u8>,
    /// Writes since the last barrier.
    pending: Vec<(u64, Vec<u8>)>,
}

#[derive(Clone)]
enum NameStep {
    Set(String, usize),
    Remove(String),
    Rename(String, String),
}

#[derive(Default)]
struct World {
    nodes: Vec<Node>,
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    pending_names: Vec<NameStep>,
    steps: u64,
    stop_at: Option<u64>,
    /// Bytes that may be written until the disk is full.
    room: Option<u64>,
    read_only: bool,
    failing_barriers: bool,
}

impl World {
    /// Counts one step; an error when the machine stands still. The step at which it stops may
    /// happen in part.
    fn step(&mut self) -> io::Result<bool> {
        self.steps += 1;
        match self.stop_at {
            Some(at) if self.steps > at => Err(io::Error::other("the machine stands still")),
            Some(at) => Ok(self.steps == at),
            None => Ok(false),
        }
    }

    fn name(&mut self, step: NameStep) -> io::Result<()> {
        if self.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        self.step()?;
        apply(&mut self.names, &step);
        self.pending_names.push(step);
        Ok(())
    }
}

fn apply(names: &mut BTreeMap<String, usize>, step: &NameStep) {
    match step {
        NameStep::Set(name, node) => {
            names.insert(name.clone(), *node);
        }
        NameStep::Remove(name) => {
            names.remove(name);
        }
        NameStep::Rename(from, to) => {
            if let Some(node) = names.remove(from) {
                names.insert(to.clone(), node);
            }
        }
    }
}

fn write(content: &mut Vec<u8>, bytes: &[u8], at: u64) {
    let at = at as usize;
    if content.len() < at + bytes.len() {
        content.resize(at + bytes.len(), 0);
    }
    content[at..at + bytes.len()].copy_from_slice(bytes);
}

/// See the module.
pub(crate) struct SimulatedDisk(Arc<Mutex<World>>);

impl SimulatedDisk {
    pub(crate) fn new() -> SimulatedDisk {
        SimulatedDisk(Arc::default())
    }

    /// Steps (writes, barriers, changes of names) until now.
    #[cfg(test)]
    pub(crate) fn steps(&self) -> u64 {
        self.0.lock().steps
    }

    /// The machine stops at the step with this number, counted from the start of the disk.
    #[cfg(test)]
    pub(crate) fn stop_at(&self, step: u64) {
        self.0.lock().stop_at = Some(step);
    }

    #[cfg(test)]
    pub(crate) fn set_room(&self, room: Option<u64>) {
        self.0.lock().room = room;
    }

    #[cfg(test)]
    pub(crate) fn set_read_only(&self, read_only: bool) {
        self.0.lock().read_only = read_only;
    }

    #[cfg(test)]
    pub(crate) fn fail_barriers(&self) {
        self.0.lock().failing_barriers = true;
    }

    /// Bytes of all files with this beginning.
    #[cfg(test)]
    pub(crate) fn bytes(&self, beginning: &str) -> usize {
        let world = self.0.lock();
        world
            .names
            .iter()
            .filter(|(name, _)| name.starts_with(beginning))
            .map(|(_, n)| world.nodes[*n].content.len())
            .sum()
    }

    /// Puts a file there, durable.
    pub(crate) fn plant(&self, name: &str, content: Vec<u8>) {
        let mut world = self.0.lock();
        let node = world.nodes.len();
        world.nodes.push(Node { durable: content.clone(), content, pending: Vec::new() });
        world.names.insert(name.into(), node);
        world.durable_names.insert(name.into(), node);
    }

    /// The disk after the process was killed: everything that was written is there.
    #[cfg(test)]
    pub(crate) fn after_kill(&self) -> SimulatedDisk {
        let world = self.0.lock();
        let nodes = world.nodes.clone();
        SimulatedDisk(Arc::new(Mutex::new(World {
            nodes,
            names: world.names.clone(),
            durable_names: world.durable_names.clone(),
            pending_names: world.pending_names.clone(),
            ..World::default()
        })))
    }

    /// Returns the disk after a power cut: each write without a barrier survives, is lost or is
    /// torn, as `random` decides.
    #[cfg(test)]
    pub(crate) fn after_power_cut(&self, random: &mut dyn FnMut() -> u64) -> SimulatedDisk {
        let world = self.0.lock();
        let mut names = world.durable_names.clone();
        for step in &world.pending_names {
            if random().is_multiple_of(2) {
                apply(&mut names, step);
            }
        }
        let nodes = world.nodes.iter().map(|node| {
            let mut content = node.durable.clone();
            for (at, bytes) in &node.pending {
                let kept = match random() % 3 {
                    0 => 0,
                    1 => bytes.len(),
                    _ => random() as usize % (bytes.len() + 1),
                };
                write(&mut content, &bytes[..kept], *at);
            }
            Node { durable: content.clone(), content, pending: Vec::new() }
        });
        SimulatedDisk(Arc::new(Mutex::new(World {
            nodes: nodes.collect(),
            durable_names: names.clone(),
            names,
            ..World::default()
        })))
    }
}

struct SimulatedFile {
    world: Arc<Mutex<World>>,
    node: usize,
}

impl Syncable for SimulatedFile {
    fn sync(&self) -> io::Result<()> {
        let mut world = self.world.lock();
        if world.step()? {
            return Err(io::Error::other("the machine stands still"));
        }
        if world.failing_barriers {
            return Err(io::Error::other("the medium fails"));
        }
        let node = &mut world.nodes[self.node];
        node.durable = node.content.clone();
        node.pending.clear();
        Ok(())
    }
}

impl DiskFile for SimulatedFile {
    fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<usize> {
        let world = self.world.lock();
        let content = &world.nodes[self.node].content;
        let start = usize::try_from(at).unwrap_or(usize::MAX).min(content.len());
        let read = out.len().min(content.len() - start);
        out[..read].copy_from_slice(&content[start..start + read]);
        Ok(read)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut world = self.world.lock();
        if world.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let stops = world.step()?;
        let grows = (at + bytes.len() as u64).saturating_sub(world.nodes[self.node].content.len() as u64);
        let fits = world.room.is_none_or(|room| grows <= room);
        // A write that fails for want of space, or at which the machine stops, happens in part.
        let bytes = if stops || !fits { &bytes[..bytes.len() / 2] } else { bytes };
        if fits && !stops {
            world.room = world.room.map(|room| room - grows);
        }
        let node = &mut world.nodes[self.node];
        write(&mut node.content, bytes, at);
        node.pending.push((at, bytes.to_vec()));
        if !fits {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if stops { Err(io::Error::other("the machine stands still")) } else { Ok(()) }
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.world.lock().nodes[self.node].content.len() as u64)
    }
}

struct Names(Arc<Mutex<World>>);

impl Syncable for Names {
    fn sync(&self) -> io::Result<()> {
        let mut world = self.0.lock();
        if world.step()? {
            return Err(io::Error::other("the machine stands still"));
        }
        world.durable_names = world.names.clone();
        world.pending_names.clear();
        Ok(())
    }
}

impl Disk for SimulatedDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.0.lock().names.keys().cloned().collect())
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let mut world = self.0.lock();
        let node = world.nodes.len();
        world.name(NameStep::Set(name.into(), node))?;
        world.nodes.push(Node::default());
        Ok(Arc::new(SimulatedFile { world: Arc::clone(&self.0), node }))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let node = self.0.lock().names.get(name).copied().ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(SimulatedFile { world: Arc::clone(&self.0), node }))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut world = self.0.lock();
        let node = world.names.get(name).copied().ok_or(io::ErrorKind::NotFound)?;
        world.name(NameStep::Remove(name.into()))?;
        let freed = world.nodes[node].content.len() as u64;
        world.room = world.room.map(|room| room + freed);
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut world = self.0.lock();
        if !world.names.contains_key(from) {
            return Err(io::ErrorKind::NotFound.into());
        }
        world.name(NameStep::Rename(from.into(), to.into()))
    }

    fn names(&self) -> Arc<dyn Syncable> {
        Arc::new(Names(Arc::clone(&self.0)))
    }
}

pub(crate) struct ManualClock {
    steady: AtomicU64,
    wall: AtomicU64,
    boot: AtomicU64,
}

impl ManualClock {
    pub(crate) fn new() -> ManualClock {
        ManualClock { steady: AtomicU64::new(5_000), wall: AtomicU64::new(1_700_000_000_000), boot: AtomicU64::new(1) }
    }

    /// Time goes by.
    pub(crate) fn pass(&self, period: Duration) {
        self.steady.fetch_add(period.as_millis() as u64, Ordering::SeqCst);
        self.wall.fetch_add(period.as_millis() as u64, Ordering::SeqCst);
    }

    /// Sets the wall clock.
    #[cfg(test)]
    pub(crate) fn step(&self, milliseconds: i64) {
        self.wall.fetch_add(milliseconds as u64, Ordering::SeqCst);
    }

    /// Reboots the machine: steady time restarts, and the wall clock advances by `away`.
    #[cfg(test)]
    pub(crate) fn reboot(&self, away: Duration) {
        self.steady.store(1_000, Ordering::SeqCst);
        self.wall.fetch_add(away.as_millis() as u64, Ordering::SeqCst);
        self.boot.fetch_add(1, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn steady(&self) -> u64 {
        self.steady.load(Ordering::SeqCst)
    }

    fn wall(&self) -> WallTime {
        WallTime(self.wall.load(Ordering::SeqCst))
    }

    fn boot(&self) -> String {
        self.boot.load(Ordering::SeqCst).to_string()
    }
}

/// Shares in a map. Everything is as durable as it gets when a call returns.
pub(crate) struct MemoryStore {
    shares: Mutex<HashMap<Key, (Share, Bytes)>>,
    secret: [u8; 16],
    decoy: Share,
    timing: StoreTiming,
}

impl MemoryStore {
    pub(crate) fn new(clock: Arc<dyn Clock>, periods: Periods) -> Result<MemoryStore> {
        Ok(MemoryStore {
            shares: Mutex::new(HashMap::new()),
            secret: random()?,
            decoy: Share::decoy(random()?),
            timing: StoreTiming { clock: StoreClock::fresh(clock), periods },
        })
    }

    /// Removes shares after their audit period.
    #[cfg(test)]
    pub(crate) fn sweep(&self) {
        let now = self.timing.clock.now();
        self.shares.lock().retain(|_, (share, _)| now < share.audit_until(&self.timing.periods));
    }
}

impl ShareBackend for MemoryStore {
    fn deposit(&self, handle: Handle, share: NewShare) -> PendingReply<ShareTimes> {
        let kept = Share::new(&share, self.timing.clock.now());
        PendingReply::ready(match self.shares.lock().entry(Key::of(handle, &self.secret)) {
            Entry::Occupied(_) => Err(StoreError::Taken),
            Entry::Vacant(free) => {
                free.insert((kept, share.capsule));
                Ok(kept.created(&self.timing.clock))
            }
        })
    }

    fn step<T: StepReply>(
        &self,
        handle: Handle,
        mut step: impl FnMut(&StoreTiming, &mut Share) -> Result<T> + Send + 'static,
    ) -> PendingReply<T> {
        let mut shares = self.shares.lock();
        let Some((share, capsule)) = shares.get_mut(&Key::of(handle, &self.secret)) else {
            return PendingReply::ready(step(&self.timing, &mut self.decoy.clone()));
        };
        let mut answer = step(&self.timing, share);
        if let Ok(answer) = &mut answer {
            answer.add_capsule(capsule.clone());
        }
        if self.timing.clock.now() >= share.content_until(&self.timing.periods) {
            *capsule = Bytes::new();
        }
        PendingReply::ready(answer)
    }
}

impl StoreMaintenance for MemoryStore {
    fn stats(&self) -> StoreStats {
        let now = self.timing.clock.now();
        let live =
            self.shares.lock().values().filter(|(share, _)| now < share.content_until(&self.timing.periods)).count();
        StoreStats { live: live as u64, ..StoreStats::default() }
    }

    fn ready(&self) -> Result<()> {
        Ok(())
    }

    fn flush(&self) -> PendingReply<()> {
        PendingReply::ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{Subject, suite};
    use super::*;

    #[test]
    fn the_memory_store_conforms() {
        suite(&|periods| {
            let clock = Arc::new(ManualClock::new());
            let store = MemoryStore::new(clock.clone(), periods).unwrap();
            let store = Arc::new(store);
            Subject { store: store.clone(), clock, sweep: Box::new(move || store.sweep()), counts: true }
        });
    }
}
