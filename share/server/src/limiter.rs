//! Rate limiter per client. Its table has a fixed size for any number of clients.
//!
//! Every client has a bucket, stored as the time at which it will be full again (GCRA). The buckets
//! are in a table of sets of eight slots; when a set is full, the bucket nearest to full is
//! evicted, because its loss permits the fewest requests.

use std::hash::Hasher;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use clap::Args;
use parking_lot::Mutex;
use siphasher::sip::SipHasher13;

/// Slots for one client's bucket: a full set is rare while most of the table is in use.
const WAYS: usize = 8;
/// 8,192 sets of 8 slots of 16 bytes are 1 MiB, and limit 65,536 clients at a time.
const SETS: usize = 8192;
/// Fraction of a client's burst that a miss costs, so that guessing slows down soon.
const MISS_COST: u32 = 4;

#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// Requests in a minute that one address (IPv6: one /64) may make; 0 for no limit
    #[arg(long = "requests-per-minute", value_name = "N", default_value_t = Rates::default().per_minute)]
    pub per_minute: u32,
    /// Requests that one address may make at once
    #[arg(long, value_name = "N", default_value_t = Rates::default().burst, value_parser = clap::value_parser!(u32).range(1..))]
    pub burst: u32,
    /// Wrong claims in a minute, of all clients, until the clients that made one must wait
    #[arg(long, value_name = "N", default_value_t = Rates::default().misses_per_minute)]
    pub misses_per_minute: u32,
}

impl Default for Rates {
    fn default() -> Rates {
        Rates { per_minute: 120, burst: 40, misses_per_minute: 600 }
    }
}

/// Client as the limiter distinguishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClientId {
    /// Client of the Unix socket: never limited, because the socket's mode restricts access.
    Local,
    /// An IPv4 address, or the first 64 bits of an IPv6 address.
    Network(u64),
}

impl ClientId {
    /// The client at an address. An IPv4 address written as IPv6 is the IPv4 address.
    pub fn at(address: IpAddr) -> ClientId {
        ClientId::Network(match address.to_canonical() {
            IpAddr::V4(v4) => u64::from(v4.to_bits()),
            // None of these is below 2^32, where the IPv4 addresses are: 0::/32 is no network of
            // clients.
            IpAddr::V6(v6) => (v6.to_bits() >> 64) as u64,
        })
    }
}

/// Bucket of one client: its key, and the time at which it will be full again, in microseconds
/// after the limiter's start. Zero is an empty slot.
#[derive(Clone, Copy, Default)]
struct Slot {
    key: u64,
    full_at: u64,
}

pub struct Limiter {
    rates: Rates,
    start: Instant,
    secret: [u8; 16],
    sets: Box<[Mutex<[Slot; WAYS]>]>,
    misses: Mutex<u64>,
}

/// The request is refused; it may be made again after this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimited(pub Duration);

impl Limiter {
    /// Creates a limiter. `secret` is random, so that no client can aim at slots of the table.
    pub fn new(rates: Rates, secret: [u8; 16]) -> Limiter {
        let sets = (0..SETS).map(|_| Mutex::default()).collect();
        Limiter { rates, start: Instant::now(), secret, sets, misses: Mutex::new(0) }
    }

    pub fn bytes(&self) -> usize {
        self.sets.len() * size_of::<Mutex<[Slot; WAYS]>>()
    }

    /// Counts `cost` requests; more than a burst counts as a burst.
    ///
    /// # Errors
    /// When the client asked too often; then nothing was counted.
    pub fn admit(&self, client: ClientId, cost: u32) -> Result<(), RateLimited> {
        self.admit_at(client, cost, self.now())
    }

    /// Refunds a cost counted by [`Limiter::admit`].
    pub fn give_back(&self, client: ClientId, cost: u32) {
        if !self.is_unlimited(client) {
            let credit = u64::from(cost) * self.interval();
            // At least 1: zero is an empty slot.
            self.with_bucket(client, |slot| slot.full_at = slot.full_at.saturating_sub(credit).max(1));
        }
    }

    /// As [`Limiter::admit`], for a request that may turn out to be a guess.
    ///
    /// # Errors
    /// Also when the budget of misses is used up and this client missed not long ago.
    pub(crate) fn admit_claim(&self, client: ClientId) -> Result<(), RateLimited> {
        self.admit_claim_at(client, self.now())
    }

    /// Counts a guess that was wrong.
    pub fn missed(&self, client: ClientId) {
        self.missed_at(client, self.now());
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX / 2)
    }

    /// Microseconds between two requests in the long run.
    fn interval(&self) -> u64 {
        60_000_000 / u64::from(self.rates.per_minute.max(1))
    }

    fn is_unlimited(&self, client: ClientId) -> bool {
        self.rates.per_minute == 0 || client == ClientId::Local
    }

    fn depth(&self) -> u64 {
        self.interval() * u64::from(self.rates.burst.max(1))
    }

    fn admit_claim_at(&self, client: ClientId, now: u64) -> Result<(), RateLimited> {
        if self.is_unlimited(client) {
            return Ok(());
        }
        // The budget of a minute has no whole miss left.
        let missed = self.misses.lock().saturating_sub(now);
        if 60_000_000u64.saturating_sub(missed) < self.miss_interval() {
            let owed = self.with_bucket(client, |slot| slot.full_at.saturating_sub(now));
            if owed > self.depth() / u64::from(MISS_COST) / 2 {
                return Err(RateLimited(Duration::from_micros(owed)));
            }
        }
        self.admit_at(client, 1, now)
    }

    fn admit_at(&self, client: ClientId, cost: u32, now: u64) -> Result<(), RateLimited> {
        if self.is_unlimited(client) {
            return Ok(());
        }
        let cost = u64::from(cost.min(self.rates.burst.max(1))) * self.interval();
        let depth = self.depth();
        self.with_bucket(client, |slot| {
            let full_at = slot.full_at.max(now) + cost;
            let over = (full_at - now).saturating_sub(depth);
            if over > 0 {
                return Err(RateLimited(Duration::from_micros(over)));
            }
            slot.full_at = full_at;
            Ok(())
        })
    }

    fn missed_at(&self, client: ClientId, now: u64) {
        if self.rates.per_minute == 0 {
            return;
        }
        let interval = self.miss_interval();
        let mut misses = self.misses.lock();
        *misses = ((*misses).max(now) + interval).min(now + 60_000_000 + interval);
        drop(misses);
        if client != ClientId::Local {
            let depth = self.depth();
            self.with_bucket(client, |slot| {
                slot.full_at = (slot.full_at.max(now) + depth / u64::from(MISS_COST)).min(now + depth);
            });
        }
    }

    fn miss_interval(&self) -> u64 {
        60_000_000 / u64::from(self.rates.misses_per_minute.max(1))
    }

    /// Runs `change` on the client's bucket, which is full if it was not known.
    fn with_bucket<R>(&self, client: ClientId, change: impl FnOnce(&mut Slot) -> R) -> R {
        let mut hasher = SipHasher13::new_with_key(&self.secret);
        if let ClientId::Network(number) = client {
            hasher.write_u64(number);
        }
        let key = hasher.finish();
        let mut set = self.sets[(key as usize) % SETS].lock();
        let at = set.iter().position(|slot| slot.key == key && slot.full_at != 0).unwrap_or_else(|| {
            let (at, _) = set.iter().enumerate().min_by_key(|(_, slot)| slot.full_at).unwrap_or((0, &set[0]));
            set[at] = Slot { key, full_at: 0 };
            at
        });
        change(&mut set[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn limiter() -> Limiter {
        Limiter::new(Rates::default(), [7; 16])
    }

    fn admitted(limiter: &Limiter, client: ClientId, now: u64, requests: u32) -> u32 {
        (0..requests).map(|_| u32::from(limiter.admit_at(client, 1, now).is_ok())).sum()
    }

    fn address(text: &str) -> ClientId {
        ClientId::at(text.parse().unwrap())
    }

    #[test]
    fn forty_at_once_and_then_two_a_second() {
        let limiter = limiter();
        let client = address("192.0.2.1");
        assert_eq!(admitted(&limiter, client, SECOND, 100), 40);
        assert_eq!(limiter.admit_at(client, 1, SECOND), Err(RateLimited(Duration::from_millis(500))));
        assert_eq!(admitted(&limiter, client, 11 * SECOND, 100), 20);
        // A minute's requests however they are spread, after the burst.
        let later = |second: u64| admitted(&limiter, client, (11 + second) * SECOND, 10);
        assert_eq!((1..=60).map(later).sum::<u32>(), 120);
    }

    #[test]
    fn a_network_of_64_bits_is_one_client() {
        let limiter = limiter();
        let sum: u32 =
            (0..200).map(|n| admitted(&limiter, address(&format!("2001:db8:1:2::{n:x}:{n:x}")), SECOND, 1)).sum();
        assert_eq!(sum, 40);
        assert_eq!(admitted(&limiter, address("2001:db8:1:3::1"), SECOND, 1), 1);
        assert_eq!(address("::ffff:192.0.2.1"), address("192.0.2.1"));
    }

    #[test]
    fn ten_million_clients_take_no_memory_and_do_not_free_one_that_is_limited() {
        let limiter = limiter();
        let before = limiter.bytes();
        assert!(before <= 2 << 20, "{before}");
        let limited = address("192.0.2.1");
        assert_eq!(admitted(&limiter, limited, SECOND, 100), 40);
        let mut extra = 0;
        for number in 0..10_000_000u64 {
            // A tenth of a microsecond each: all within a second.
            let now = SECOND + number / 10;
            let _ = limiter.admit_at(ClientId::Network(1 << 40 | number), 1, now);
            if number % 100_000 == 0 {
                extra += admitted(&limiter, limited, now, 100);
            }
        }
        assert!(extra <= 2, "{extra} requests over the limit while others filled the table");
        assert_eq!(limiter.bytes(), before);
    }

    #[test]
    fn misses_of_everybody_make_those_who_missed_wait_and_nobody_else() {
        let limiter = limiter();
        let guesser = address("198.51.100.9");
        for number in 0..600u64 {
            limiter.missed_at(ClientId::Network(1 << 33 | number), SECOND);
        }
        limiter.missed_at(guesser, SECOND);
        assert!(limiter.admit_claim_at(guesser, SECOND).is_err());
        assert!(limiter.admit_claim_at(address("192.0.2.77"), SECOND).is_ok());
        // The budget comes back with time.
        assert!(limiter.admit_claim_at(guesser, 10 * SECOND).is_ok());
    }

    #[test]
    fn a_guesser_is_slowed_down_by_its_own_misses() {
        let limiter = limiter();
        let guesser = address("198.51.100.9");
        let mut tried = 0;
        while limiter.admit_claim_at(guesser, SECOND).is_ok() {
            limiter.missed_at(guesser, SECOND);
            tried += 1;
        }
        assert_eq!(tried, 4);
    }

    #[test]
    fn a_batch_costs_its_items_and_at_most_a_burst() {
        let limiter = limiter();
        let client = address("192.0.2.1");
        assert!(limiter.admit_at(client, 100, SECOND).is_ok());
        assert!(limiter.admit_at(client, 1, SECOND).is_err());
    }

    #[test]
    fn what_is_given_back_was_not_counted() {
        let limiter = limiter();
        let client = address("192.0.2.1");
        for _ in 0..1000 {
            assert!(limiter.admit(client, 1).is_ok());
            limiter.give_back(client, 1);
        }
    }

    #[test]
    fn off_means_off_and_the_unix_socket_is_never_limited() {
        let off = Limiter::new(Rates { per_minute: 0, ..Rates::default() }, [7; 16]);
        assert_eq!(admitted(&off, address("192.0.2.1"), SECOND, 1000), 1000);
        assert_eq!(admitted(&limiter(), ClientId::Local, SECOND, 1000), 1000);
    }
}
