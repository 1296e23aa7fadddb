//! Admission control: limits of concurrent connections and requests, in total and per client.
//!
//! A client that only waits does not block the others. The rules are numbered, and cited where each
//! is implemented:
//!
//! 1. The Unix socket has slots of its own (`LOCAL_CONNECTIONS`), which no client of the network
//!    can take. Together with the network's they never need more descriptors than the process has
//!    (`connections_that_fit`).
//! 2. A client (an IPv4 address, 64 bits of an IPv6 address) has at most a quarter of the network's
//!    slots. A listed proxy serves many clients and is bound by the total alone.
//! 3. A connection without a complete request head (in the TLS handshake, in the head, between two
//!    requests) is evicted when its slot is needed. When all slots are taken, the oldest such
//!    connection of the client with the most slots is evicted; when a client has its quarter, the
//!    oldest of its own. Connections of proxies are evicted last.
//! 4. The fewer slots are free, the shorter the time for a head: all of `head_timeout` while half
//!    of the slots are free, a tenth when none is.
//! 5. A request in flight keeps its slot until its response was written; it has time-outs of its
//!    own: for a message, for the parts of an upload, and for a client that accepts less of a
//!    response than 1 KiB/s (`worker`).
//! 6. Uploads, batches and watchers, which cost more than a connection, have limits per client of
//!    their own.
//!
//! [`ConnectionSlots`] implements 1 to 5, [`ConcurrencyLimit`] 6.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::limiter::ClientId;

/// The client, or the proxy, that opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SlotOwner {
    /// A listed proxy; its connections carry the requests of many clients.
    Proxy,
    Client(ClientId),
}

pub(super) struct ConnectionSlots {
    all: usize,
    each: usize,
    head_timeout: Duration,
    taken: Mutex<SlotTable>,
}

#[derive(Default)]
struct SlotTable {
    all: usize,
    owners: HashMap<SlotOwner, OwnerSlots>,
    /// Connections without a whole head, by the order in which they began to wait for one.
    heads: BTreeMap<u64, (Instant, Arc<SlotState>)>,
    last: u64,
    /// Slots and oldest such connection of each owner that has one. The last owner loses one.
    order: BTreeSet<(usize, Reverse<u64>, SlotOwner)>,
}

#[derive(Default)]
struct OwnerSlots {
    slots: usize,
    heads: BTreeSet<u64>,
}

/// State of one connection; changed only under the lock of the slot table.
struct SlotState {
    slot_owner: SlotOwner,
    /// Number in the order of waiting for a request head; 0 while a request is in flight.
    head: AtomicU64,
    is_gone: AtomicBool,
    leave: Notify,
}

impl SlotTable {
    fn change(&mut self, slot_owner: SlotOwner, change: impl FnOnce(&mut OwnerSlots)) {
        let owner_slots = self.owners.entry(slot_owner).or_default();
        let rank = |owner_slots: &OwnerSlots| {
            let slots = if slot_owner == SlotOwner::Proxy { 0 } else { owner_slots.slots };
            owner_slots.heads.first().map(|oldest| (slots, Reverse(*oldest), slot_owner))
        };
        if let Some(before) = rank(owner_slots) {
            self.order.remove(&before);
        }
        change(owner_slots);
        if let Some(after) = rank(owner_slots) {
            self.order.insert(after);
        }
        if owner_slots.slots == 0 {
            self.owners.remove(&slot_owner);
        }
    }

    fn begin_head(&mut self, state: &Arc<SlotState>) {
        self.last += 1;
        let number = self.last;
        state.head.store(number, Relaxed);
        self.heads.insert(number, (Instant::now(), state.clone()));
        self.change(state.slot_owner, |owner_slots| {
            owner_slots.heads.insert(number);
        });
    }

    fn end_head(&mut self, state: &SlotState) {
        let number = state.head.swap(0, Relaxed);
        if self.heads.remove(&number).is_some() {
            self.change(state.slot_owner, |owner_slots| {
                owner_slots.heads.remove(&number);
            });
        }
    }

    fn give_back(&mut self, state: &SlotState) {
        if !state.is_gone.swap(true, Relaxed) {
            self.end_head(state);
            self.change(state.slot_owner, |owner_slots| owner_slots.slots -= 1);
            self.all -= 1;
        }
    }

    /// Takes the slot of a connection without a head; it ends as soon as its task runs.
    fn evict(&mut self, number: u64) {
        if let Some((_, state)) = self.heads.get(&number).cloned() {
            self.give_back(&state);
            state.leave.notify_one();
        }
    }
}

impl ConnectionSlots {
    /// `all` slots, of which one client has at most `each`.
    pub(super) fn new(all: usize, each: usize, head_timeout: Duration) -> Arc<ConnectionSlots> {
        Arc::new(ConnectionSlots { all, each, head_timeout, taken: Mutex::default() })
    }

    /// Takes a slot; evicts an idle connection if none is free. `None` if all have requests in
    /// flight.
    pub(super) fn take(self: &Arc<ConnectionSlots>, slot_owner: SlotOwner) -> Option<Arc<ConnectionSlot>> {
        let mut taken = self.taken.lock();
        if let SlotOwner::Client(_) = slot_owner
            && let Some(owner_slots) = taken.owners.get(&slot_owner)
            && owner_slots.slots >= self.each
        {
            let oldest = *owner_slots.heads.first()?;
            taken.evict(oldest);
        }
        if taken.all >= self.all {
            let (_, Reverse(oldest), _) = *taken.order.last()?;
            taken.evict(oldest);
        }
        let state = Arc::new(SlotState {
            slot_owner,
            head: AtomicU64::new(0),
            is_gone: AtomicBool::new(false),
            leave: Notify::new(),
        });
        taken.all += 1;
        taken.change(slot_owner, |owner_slots| owner_slots.slots += 1);
        taken.begin_head(&state);
        drop(taken);
        Some(Arc::new(ConnectionSlot { slots: self.clone(), state, was_answered: AtomicBool::new(false) }))
    }

    /// The time that a head may take while so many places are taken.
    fn patience(&self, taken: usize) -> Duration {
        let free = self.all.saturating_sub(taken) as f64 / self.all.max(1) as f64;
        self.head_timeout.mul_f64((2.0 * free).clamp(0.1, 1.0))
    }

    /// Evicts connections whose head is overdue. Call it every second; while half of the slots are
    /// free, the connections' own timers are enough.
    pub(super) fn end_slow(&self, now: Instant) {
        let mut taken = self.taken.lock();
        let patience = self.patience(taken.all);
        if patience >= self.head_timeout {
            return;
        }
        let slow = taken.heads.iter().take_while(|(_, (since, _))| now.saturating_duration_since(*since) >= patience);
        let clients = slow.filter(|(_, (_, state))| state.slot_owner != SlotOwner::Proxy);
        let numbers: Vec<u64> = clients.map(|(number, _)| *number).collect();
        for number in numbers {
            taken.evict(number);
        }
    }
}

/// A place that was taken; given back when it is dropped.
pub(super) struct ConnectionSlot {
    slots: Arc<ConnectionSlots>,
    state: Arc<SlotState>,
    /// The answer ended, but may not be handed over yet.
    was_answered: AtomicBool,
}

impl ConnectionSlot {
    /// Begins a request after its head was received. `None` when the slot was evicted.
    pub(super) fn request(self: &Arc<ConnectionSlot>) -> Option<ActiveRequest> {
        let mut taken = self.slots.taken.lock();
        if self.state.is_gone.load(Relaxed) {
            return None;
        }
        taken.end_head(&self.state);
        self.was_answered.store(false, Relaxed);
        Some(ActiveRequest(self.clone()))
    }

    /// Notes that the kernel has all writes: after an answer, the next head is waited for.
    pub(super) fn flushed(&self) {
        if self.was_answered.swap(false, Relaxed) {
            let mut taken = self.slots.taken.lock();
            if !self.state.is_gone.load(Relaxed) && self.state.head.load(Relaxed) == 0 {
                taken.begin_head(&self.state);
            }
        }
    }

    pub(super) async fn evicted(&self) {
        self.state.leave.notified().await;
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.slots.taken.lock().give_back(&self.state);
    }
}

pub(super) struct ActiveRequest(Arc<ConnectionSlot>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.was_answered.store(true, Relaxed);
    }
}

pub(super) struct ConcurrencyLimit {
    all: usize,
    each: usize,
    taken: Mutex<PermitCounts>,
}

#[derive(Default)]
struct PermitCounts {
    all: usize,
    clients: HashMap<ClientId, usize>,
}

/// Leave for one request; it is given back when it is dropped.
pub(super) struct ConcurrencyPermit {
    permits: Arc<ConcurrencyLimit>,
    client: ClientId,
}

impl ConcurrencyLimit {
    /// `all` permits, at most `each` for one client: a slow one does not stop the others.
    pub(super) fn new(all: usize, each: usize) -> Arc<ConcurrencyLimit> {
        Arc::new(ConcurrencyLimit { all, each, taken: Mutex::default() })
    }

    pub(super) fn take(self: &Arc<ConcurrencyLimit>, client: ClientId) -> Option<ConcurrencyPermit> {
        let mut taken = self.taken.lock();
        if taken.all >= self.all {
            return None;
        }
        let clients = taken.clients.entry(client).or_default();
        if *clients >= self.each {
            return None;
        }
        *clients += 1;
        taken.all += 1;
        Some(ConcurrencyPermit { permits: self.clone(), client })
    }
}

impl Drop for ConcurrencyPermit {
    fn drop(&mut self) {
        let mut taken = self.permits.taken.lock();
        taken.all = taken.all.saturating_sub(1);
        if let Some(clients) = taken.clients.get_mut(&self.client) {
            *clients = clients.saturating_sub(1);
            if *clients == 0 {
                taken.clients.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Duration = Duration::from_secs(10);

    fn client(number: u64) -> SlotOwner {
        SlotOwner::Client(ClientId::Network(number))
    }

    fn is_gone(slot: &ConnectionSlot) -> bool {
        slot.state.is_gone.load(Relaxed)
    }

    #[test]
    fn who_only_waits_makes_room_the_oldest_of_the_largest_crowd_first() {
        let slots = ConnectionSlots::new(6, 4, WHOLE);
        let single = slots.take(client(9)).unwrap();
        let owner_slots: Vec<_> = (0..3).map(|_| slots.take(client(5)).unwrap()).collect();
        let others: Vec<_> = (0..2).map(|number| slots.take(client(number)).unwrap()).collect();
        let newcomer = slots.take(client(7)).unwrap();
        assert!(is_gone(&owner_slots[0]) && !is_gone(&owner_slots[1]) && !is_gone(&single));
        // Of crowds of the same size the one that waits longest, whatever its address.
        let second = slots.take(client(8)).unwrap();
        assert!(is_gone(&owner_slots[1]) && !is_gone(&single));
        let _third = slots.take(client(3)).unwrap();
        assert!(
            is_gone(&single)
                && ![&newcomer, &second, &others[0], &owner_slots[2]].into_iter().any(|slot| is_gone(slot))
        );
        assert!(owner_slots[0].request().is_none());
    }

    #[test]
    fn a_client_has_its_part_and_replaces_only_its_own() {
        let slots = ConnectionSlots::new(8, 2, WHOLE);
        let other = slots.take(client(1)).unwrap();
        let first = slots.take(client(5)).unwrap();
        let active = first.request().unwrap();
        let second = slots.take(client(5)).unwrap();
        let third = slots.take(client(5)).unwrap();
        assert!(is_gone(&second) && !is_gone(&first) && !is_gone(&other));
        let also_under_way = third.request().unwrap();
        assert!(slots.take(client(5)).is_none(), "both of its places have requests under way");
        // Only what was handed over is over.
        drop(active);
        assert!(slots.take(client(5)).is_none());
        first.flushed();
        assert!(slots.take(client(5)).is_some() && is_gone(&first));
        drop(also_under_way);
    }

    #[test]
    fn proxies_are_bound_by_the_sum_alone_and_go_last() {
        let slots = ConnectionSlots::new(4, 1, WHOLE);
        let proxies: Vec<_> = (0..3).map(|_| slots.take(SlotOwner::Proxy).unwrap()).collect();
        let stranger = slots.take(client(1)).unwrap();
        let more = slots.take(SlotOwner::Proxy).unwrap();
        assert!(is_gone(&stranger) && !proxies.iter().any(|slot| is_gone(slot)));
        let _stranger = slots.take(client(2)).unwrap();
        assert!(is_gone(&proxies[0]) && !is_gone(&more));
    }

    #[test]
    fn a_full_house_has_less_patience() {
        let slots = ConnectionSlots::new(10, 10, WHOLE);
        // Before any of them: how long the test takes makes none of them older than it may be.
        let began = Instant::now();
        let mut held: Vec<_> = (0..5).map(|_| slots.take(client(1)).unwrap()).collect();
        slots.end_slow(began + Duration::from_secs(9));
        assert!(!held.iter().any(|slot| is_gone(slot)));
        held.extend((0..3).map(|_| slots.take(client(1)).unwrap()));
        let busy = held[0].request().unwrap();
        let proxy = slots.take(SlotOwner::Proxy).unwrap();
        slots.end_slow(began + Duration::from_millis(1100));
        assert!(!held.iter().any(|slot| is_gone(slot)));
        slots.end_slow(Instant::now() + Duration::from_millis(2100));
        assert!(held[1..].iter().all(|slot| is_gone(slot)) && !is_gone(&held[0]) && !is_gone(&proxy));
        drop(busy);
        assert_eq!(slots.patience(10), Duration::from_secs(1));
    }

    #[test]
    fn all_places_come_back() {
        let slots = ConnectionSlots::new(3, 2, WHOLE);
        for round in 0..100u64 {
            let held: Vec<_> = (0..5).filter_map(|number| slots.take(client((round + number) % 4))).collect();
            let _under_way: Vec<_> = held.iter().step_by(2).filter_map(|slot| slot.request()).collect();
            held.iter().for_each(|slot| slot.flushed());
        }
        let taken = slots.taken.lock();
        assert!(taken.all == 0 && taken.owners.is_empty() && taken.heads.is_empty() && taken.order.is_empty());
    }
}

#[cfg(test)]
mod permits_tests {
    use super::*;

    #[test]
    fn places_are_bounded_in_all_and_for_each_client_and_come_back() {
        let permits = ConcurrencyLimit::new(5, 2);
        let client = ClientId::Network;
        let mut held: Vec<ConcurrencyPermit> = (0..2).map(|_| permits.take(client(1)).unwrap()).collect();
        assert!(permits.take(client(1)).is_none());
        held.extend((0..2).map(|_| permits.take(ClientId::Local).unwrap()));
        held.push(permits.take(client(2)).unwrap());
        assert!(permits.take(client(3)).is_none());
        held.remove(0);
        assert!(permits.take(client(1)).is_some());
        held.clear();
        let taken = permits.taken.lock();
        assert!(taken.all == 0 && taken.clients.is_empty());
    }
}
