//! Bounds what may be under way at a time, in all and for each client.
//!
//! A client that only waits does not keep the others out. The rules are numbered, and cited where each is kept:
//!
//! 1. The Unix socket has places of its own (`LOCAL_CONNECTIONS`), which no client of the network can take. Together with the network's they
//!    never need more descriptors than the process has (`connections_that_fit`).
//! 2. A client (an IPv4 address, 64 bits of an IPv6 address) has at most a quarter of the network's places for connections. A listed proxy
//!    speaks for many and is bound by the sum alone.
//! 3. A connection that shows no whole head of a request (in the TLS handshake, in the head, between two requests) keeps its place only
//!    while nobody needs it. When all places are taken, the oldest such connection of the client with the most places goes; when a client
//!    has its part, the oldest of its own. Those of proxies go last.
//! 4. The fuller the house, the shorter the time for a head: all of `head_timeout` while half of the places are free, a tenth when none is.
//! 5. A request that is under way keeps its place until its answer was handed over; it ends by clocks of its own: for a message, for the parts
//!    of an upload, and for a client that takes less of an answer than 1 KiB/s (`guard`).
//! 6. Uploads, batches and watchers, which cost more than a connection, have places by client of their own.
//!
//! `slots` keeps 1 to 5; `ConcurrencyLimit` keeps 6.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::limiter::ClientId;

/// Permits for one kind of request.
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
    /// `all` permits, of which one client takes at most `each`: so one that holds its requests back does not stop the others.
    pub(super) fn new(all: usize, each: usize) -> Arc<ConcurrencyLimit> {
        Arc::new(ConcurrencyLimit { all, each, taken: Mutex::default() })
    }

    /// None when all are taken, or this client's.
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
