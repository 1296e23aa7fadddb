//! Gives each connection its place, and takes the place back from a connection that only waits when another one needs it (`permits`, rules 1 to 5).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::limiter::Client;

/// The client, or the proxy, that opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Guest {
    /// A listed proxy, whose connections are those of many.
    Proxy,
    /// A client that speaks for itself.
    Client(Client),
}

/// Permits for the connections of one kind of socket.
pub(super) struct Seats {
    all: usize,
    each: usize,
    head_timeout: Duration,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    crowds: HashMap<Guest, Crowd>,
    /// Connections without a whole head, by the order in which they began to wait for one.
    heads: BTreeMap<u64, (Instant, Arc<Sitter>)>,
    last: u64,
    /// Of each crowd with such connections: how many places it has, and the oldest of them. The last one has to give one up.
    order: BTreeSet<(usize, Reverse<u64>, Guest)>,
}

/// The connections of one guest.
#[derive(Default)]
struct Crowd {
    seats: usize,
    heads: BTreeSet<u64>,
}

/// What the house knows of a connection; changed under its lock only.
struct Sitter {
    guest: Guest,
    /// Its number among those who wait for a head; 0 while a request is under way.
    head: AtomicU64,
    is_gone: AtomicBool,
    leave: Notify,
}

impl Taken {
    /// Changes a crowd and its place in the order.
    fn change(&mut self, guest: Guest, change: impl FnOnce(&mut Crowd)) {
        let crowd = self.crowds.entry(guest).or_default();
        let rank = |crowd: &Crowd| {
            let seats = if guest == Guest::Proxy { 0 } else { crowd.seats };
            crowd.heads.first().map(|oldest| (seats, Reverse(*oldest), guest))
        };
        if let Some(before) = rank(crowd) {
            self.order.remove(&before);
        }
        change(crowd);
        if let Some(after) = rank(crowd) {
            self.order.insert(after);
        }
        if crowd.seats == 0 {
            self.crowds.remove(&guest);
        }
    }

    fn begin_head(&mut self, sitter: &Arc<Sitter>) {
        self.last += 1;
        let number = self.last;
        sitter.head.store(number, Relaxed);
        self.heads.insert(number, (Instant::now(), sitter.clone()));
        self.change(sitter.guest, |crowd| {
            crowd.heads.insert(number);
        });
    }

    fn end_head(&mut self, sitter: &Sitter) {
        let number = sitter.head.swap(0, Relaxed);
        if self.heads.remove(&number).is_some() {
            self.change(sitter.guest, |crowd| {
                crowd.heads.remove(&number);
            });
        }
    }

    fn give_back(&mut self, sitter: &Sitter) {
        if !sitter.is_gone.swap(true, Relaxed) {
            self.end_head(sitter);
            self.change(sitter.guest, |crowd| crowd.seats -= 1);
            self.all -= 1;
        }
    }

    /// Takes the place of a connection without a head; it ends as soon as its task runs.
    fn evict(&mut self, number: u64) {
        if let Some((_, sitter)) = self.heads.get(&number).cloned() {
            self.give_back(&sitter);
            sitter.leave.notify_one();
        }
    }
}

impl Seats {
    /// `all` places, of which one client has at most `each`.
    pub(super) fn new(all: usize, each: usize, head_timeout: Duration) -> Arc<Seats> {
        Arc::new(Seats { all, each, head_timeout, taken: Mutex::default() })
    }

    /// None when neither a place is free nor anybody holds one without a request.
    pub(super) fn take(self: &Arc<Seats>, guest: Guest) -> Option<Arc<Seat>> {
        let mut taken = self.taken.lock();
        if let Guest::Client(_) = guest
            && let Some(crowd) = taken.crowds.get(&guest)
            && crowd.seats >= self.each
        {
            let oldest = *crowd.heads.first()?;
            taken.evict(oldest);
        }
        if taken.all >= self.all {
            let (_, Reverse(oldest), _) = *taken.order.last()?;
            taken.evict(oldest);
        }
        let sitter =
            Arc::new(Sitter { guest, head: AtomicU64::new(0), is_gone: AtomicBool::new(false), leave: Notify::new() });
        taken.all += 1;
        taken.change(guest, |crowd| crowd.seats += 1);
        taken.begin_head(&sitter);
        drop(taken);
        Some(Arc::new(Seat { seats: self.clone(), sitter, was_answered: AtomicBool::new(false) }))
    }

    /// The time that a head may take while so many places are taken.
    fn patience(&self, taken: usize) -> Duration {
        let free = self.all.saturating_sub(taken) as f64 / self.all.max(1) as f64;
        self.head_timeout.mul_f64((2.0 * free).clamp(0.1, 1.0))
    }

    /// Ends those who take longer. To be called every second; while half of the places are free, the connections' own timers are enough.
    pub(super) fn end_slow(&self, now: Instant) {
        let mut taken = self.taken.lock();
        let patience = self.patience(taken.all);
        if patience >= self.head_timeout {
            return;
        }
        let slow = taken.heads.iter().take_while(|(_, (since, _))| now.saturating_duration_since(*since) >= patience);
        let slow: Vec<u64> =
            slow.filter(|(_, (_, sitter))| sitter.guest != Guest::Proxy).map(|(number, _)| *number).collect();
        for number in slow {
            taken.evict(number);
        }
    }
}

/// A place that was taken; given back when it is dropped.
pub(super) struct Seat {
    seats: Arc<Seats>,
    sitter: Arc<Sitter>,
    /// The answer ended, but may not be handed over yet.
    was_answered: AtomicBool,
}

impl Seat {
    /// A whole head came. None when the place is another's by now.
    pub(super) fn request(self: &Arc<Seat>) -> Option<UnderWay> {
        let mut taken = self.seats.taken.lock();
        if self.sitter.is_gone.load(Relaxed) {
            return None;
        }
        taken.end_head(&self.sitter);
        self.was_answered.store(false, Relaxed);
        Some(UnderWay(self.clone()))
    }

    /// Everything that was written is with the kernel: after an answer, the next head is waited for.
    pub(super) fn flushed(&self) {
        if self.was_answered.swap(false, Relaxed) {
            let mut taken = self.seats.taken.lock();
            if !self.sitter.is_gone.load(Relaxed) && self.sitter.head.load(Relaxed) == 0 {
                taken.begin_head(&self.sitter);
            }
        }
    }

    /// Ends when another has the place.
    pub(super) async fn is_needed(&self) {
        self.sitter.leave.notified().await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.taken.lock().give_back(&self.sitter);
    }
}

/// A request from its head to the end of its answer.
pub(super) struct UnderWay(Arc<Seat>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.was_answered.store(true, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Duration = Duration::from_secs(10);

    fn client(number: u64) -> Guest {
        Guest::Client(Client::Network(number))
    }

    fn is_gone(seat: &Seat) -> bool {
        seat.sitter.is_gone.load(Relaxed)
    }

    #[test]
    fn who_only_waits_makes_room_the_oldest_of_the_largest_crowd_first() {
        let seats = Seats::new(6, 4, WHOLE);
        let single = seats.take(client(9)).unwrap();
        let crowd: Vec<_> = (0..3).map(|_| seats.take(client(5)).unwrap()).collect();
        let others: Vec<_> = (0..2).map(|number| seats.take(client(number)).unwrap()).collect();
        let newcomer = seats.take(client(7)).unwrap();
        assert!(is_gone(&crowd[0]) && !is_gone(&crowd[1]) && !is_gone(&single));
        // Of crowds of the same size the one that waits longest, whatever its address.
        let second = seats.take(client(8)).unwrap();
        assert!(is_gone(&crowd[1]) && !is_gone(&single));
        let _third = seats.take(client(3)).unwrap();
        assert!(is_gone(&single) && ![&newcomer, &second, &others[0], &crowd[2]].into_iter().any(|seat| is_gone(seat)));
        assert!(crowd[0].request().is_none());
    }

    #[test]
    fn a_client_has_its_part_and_replaces_only_its_own() {
        let seats = Seats::new(8, 2, WHOLE);
        let other = seats.take(client(1)).unwrap();
        let first = seats.take(client(5)).unwrap();
        let under_way = first.request().unwrap();
        let second = seats.take(client(5)).unwrap();
        let third = seats.take(client(5)).unwrap();
        assert!(is_gone(&second) && !is_gone(&first) && !is_gone(&other));
        let also_under_way = third.request().unwrap();
        assert!(seats.take(client(5)).is_none(), "both of its places have requests under way");
        // Only what was handed over is over.
        drop(under_way);
        assert!(seats.take(client(5)).is_none());
        first.flushed();
        assert!(seats.take(client(5)).is_some() && is_gone(&first));
        drop(also_under_way);
    }

    #[test]
    fn proxies_are_bound_by_the_sum_alone_and_go_last() {
        let seats = Seats::new(4, 1, WHOLE);
        let proxies: Vec<_> = (0..3).map(|_| seats.take(Guest::Proxy).unwrap()).collect();
        let stranger = seats.take(client(1)).unwrap();
        let more = seats.take(Guest::Proxy).unwrap();
        assert!(is_gone(&stranger) && !proxies.iter().any(|seat| is_gone(seat)));
        let _stranger = seats.take(client(2)).unwrap();
        assert!(is_gone(&proxies[0]) && !is_gone(&more));
    }

    #[test]
    fn a_full_house_has_less_patience() {
        let seats = Seats::new(10, 10, WHOLE);
        let mut held: Vec<_> = (0..5).map(|_| seats.take(client(1)).unwrap()).collect();
        let later = Instant::now() + Duration::from_secs(9);
        seats.end_slow(later);
        assert!(!held.iter().any(|seat| is_gone(seat)));
        held.extend((0..3).map(|_| seats.take(client(1)).unwrap()));
        let busy = held[0].request().unwrap();
        let proxy = seats.take(Guest::Proxy).unwrap();
        seats.end_slow(Instant::now() + Duration::from_millis(1900));
        assert!(!held.iter().any(|seat| is_gone(seat)));
        seats.end_slow(Instant::now() + Duration::from_millis(2100));
        assert!(held[1..].iter().all(|seat| is_gone(seat)) && !is_gone(&held[0]) && !is_gone(&proxy));
        drop(busy);
        assert_eq!(seats.patience(10), Duration::from_secs(1));
    }

    #[test]
    fn all_places_come_back() {
        let seats = Seats::new(3, 2, WHOLE);
        for round in 0..100u64 {
            let held: Vec<_> = (0..5).filter_map(|number| seats.take(client((round + number) % 4))).collect();
            let _under_way: Vec<_> = held.iter().step_by(2).filter_map(|seat| seat.request()).collect();
            held.iter().for_each(|seat| seat.flushed());
        }
        let taken = seats.taken.lock();
        assert!(taken.all == 0 && taken.crowds.is_empty() && taken.heads.is_empty() && taken.order.is_empty());
    }
}
