//! Limits of concurrent connections and requests, in total and per client.
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
//!    oldest of its own. Those of proxies are evicted last.
//! 4. The fewer slots are free, the shorter the time for a head: all of `head_timeout` while half
//!    of the slots are free, a tenth when none is.
//! 5. A request in flight keeps its slot until its response was written; it has time-outs of its
//!    own: for a message, for the parts of an upload, and for a client that accepts less of a
//!    response than 1 KiB/s (`guard`).
//! 6. Uploads, batches and watchers, which cost more than a connection, have limits per client of
//!    their own.
//!
//! `admission` implements 1 to 5; [`ConcurrencyLimit`] implements 6.

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
    /// `all` permits, of which one client takes at most `each`: so one that holds its requests back
    /// does not stop the others.
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
