//! PROOF-1 on real connections: a portal replaces one response of the store, for each response.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use url::Url;

use super::super::store::ORDER;
use super::super::{Bucket, BucketWriter, check_objects, collect_garbage, open};
use super::GRACE;
use super::clouds::{CLOUDS, Server, objects};
use super::writable::whole;
use crate::RemoteOptions;
use crate::address::Cloud;

const NAME: &str = "s3://b/p";
const STATUSES: [u16; 8] = [200, 204, 206, 302, 403, 404, 412, 507];
const BLOCK: usize = 4096;
const BLOCKS: u8 = 20;
const WORDS: &str = "is not from this store";

fn options(timeout: Duration) -> RemoteOptions {
    RemoteOptions { timeout: Some(timeout), cache_directory: None, cache_bytes: Some(0), ..RemoteOptions::default() }
}

/// For more than one answer of a portal.
fn patient() -> RemoteOptions {
    options(Duration::from_secs(60))
}

/// A store with an archive of which some objects have been dead for more than a day.
struct Prepared {
    cloud: Cloud,
    server: Arc<Server>,
    endpoint: Url,
    objects: BTreeMap<String, Vec<u8>>,
    bytes: Vec<u8>,
}

impl Prepared {
    /// `is_bare`: the store sends no request ids.
    fn new(cloud: Cloud, is_bare: bool) -> Prepared {
        // One request after the other, so that the number of one names it.
        ORDER.set(Some(Box::new(|| false)));
        let (server, endpoint) = Server::start(cloud);
        server.is_bare.store(is_bare, Ordering::Relaxed);
        let mut prepared = Prepared { cloud, server, endpoint, objects: BTreeMap::new(), bytes: Vec::new() };
        let mut bucket = Bucket::open(prepared.store(), NAME.into(), &patient(), true).unwrap();
        prepared.bytes = (1..=BLOCKS).flat_map(|number| [number; BLOCK]).collect();
        bucket.create_empty().unwrap().write_at(0, &prepared.bytes).unwrap();
        bucket.publish().unwrap();
        for number in 1..=2 {
            let living = prepared.acquire().unwrap();
            living.write_at(0, &[number; BLOCK]).unwrap();
            living.barrier().unwrap();
            prepared.bytes[..BLOCK].fill(number);
        }
        prepared.server.clock.fetch_add(2 * GRACE, Ordering::Relaxed);
        prepared.objects = prepared.server.objects.lock().clone();
        prepared
    }

    fn store(&self) -> Box<dyn super::super::ObjectStore> {
        objects(self.cloud, &self.endpoint)
    }

    fn acquire(&self) -> Result<BucketWriter> {
        BucketWriter::open(self.store(), NAME.into(), &patient(), true)
    }

    /// The bytes that somebody finds who has nothing but the store, which nothing stands before.
    fn found(&self) -> Vec<u8> {
        let portal = self.server.portal.lock().take();
        let bytes = whole(&**open(self.store(), NAME.into(), &patient()).unwrap().unwrap().file());
        *self.server.portal.lock() = portal;
        bytes
    }

    /// Does `work` with what was prepared, each time with a portal's answer to another one of its
    /// requests. Each request meets two statuses or three; all of them with `FAULTS=all`.
    fn at_each_request(&self, work: impl Fn(&str)) {
        let step = if std::env::var_os("FAULTS").is_some_and(|wanted| wanted == "all") { 1 } else { 3 };
        let mut met = 0;
        for (number, status) in STATUSES.into_iter().enumerate() {
            for at in (number % step..).step_by(step) {
                self.server.objects.lock().clone_from(&self.objects);
                *self.server.portal.lock() = Some((at, status));
                work(&format!("{:?}, status {status} in place of answer {at}", self.cloud));
                if self.server.portal.lock().take().is_some() {
                    break;
                }
                met += 1;
            }
        }
        assert!(met >= STATUSES.len() * 4 / step, "only {met} requests met the portal");
    }
}

fn stores() -> impl Iterator<Item = Prepared> {
    CLOUDS
        .into_iter()
        .map(|cloud| (cloud, false))
        .chain([(Cloud::S3, true)])
        .map(|(cloud, bare)| Prepared::new(cloud, bare))
}

#[test]
fn nothing_that_was_acknowledged_is_lost_to_a_portals_answer_and_its_writer_goes_on() {
    for store in stores() {
        store.at_each_request(|when| {
            let mut now = store.bytes.clone();
            let living = store.acquire().unwrap_or_else(|error| panic!("{when}: {error}"));
            for number in 100..102 {
                let offset = usize::from(number - 100) * BLOCK;
                living.write_at(offset as u64, &[number; BLOCK]).unwrap();
                now[offset..offset + BLOCK].fill(number);
                living.barrier().unwrap_or_else(|error| panic!("{when}: {error}"));
                assert!(store.found() == now, "{when}: what a barrier acknowledged is not there");
            }
            drop(living);
            assert!(store.found() == now, "{when}: the writer went");
            let portal = store.server.portal.lock().take();
            let examined = check_objects(store.store(), NAME.into(), &patient(), true, &mut |_, _| Ok(())).unwrap();
            assert_eq!(examined.faults, [""; 0], "{when}");
            *store.server.portal.lock() = portal;
        });
    }
}

#[test]
fn an_opening_and_a_read_go_on_after_a_portals_answer() {
    for store in stores() {
        store.at_each_request(|when| {
            let opened = open(store.store(), NAME.into(), &patient());
            let opened = opened.unwrap_or_else(|error| panic!("{when}: {error}")).expect("an archive");
            assert!(whole(&**opened.file()) == store.bytes, "{when}");
        });
    }
}

#[test]
fn who_has_no_patience_is_told_that_a_portals_answer_is_none_of_the_store() {
    for store in stores() {
        let impatient = options(Duration::ZERO);
        store.at_each_request(|when| {
            let opened = open(store.store(), NAME.into(), &impatient).map(|opened| opened.expect("an archive"));
            let read = opened.and_then(|opened| {
                let mut bytes = vec![0; store.bytes.len()];
                opened.file().read_at(0, &mut bytes).map(|()| bytes)
            });
            match read {
                Ok(bytes) => assert!(bytes == store.bytes, "{when}"),
                Err(Error::Io { context, source }) => {
                    assert!(context.contains(WORDS), "{when}: {context}");
                    assert_eq!(source.kind(), std::io::ErrorKind::TimedOut, "{when}: {context}");
                }
                Err(error) => panic!("{when}: {error}"),
            }
        });
    }
}

#[test]
fn what_a_portal_says_is_gone_is_removed_by_the_next_collection() {
    for store in stores() {
        let remaining = || store.server.objects.lock().keys().filter(|name| store.objects.contains_key(*name)).count();
        let clean = || collect_garbage(store.store(), NAME.into(), &patient(), true);
        clean().unwrap();
        let (kept, all) = (remaining(), store.objects.len());
        assert!(kept < all, "nothing was dead: {kept} of {all}");
        store.at_each_request(|when| {
            if let Err(error) = clean() {
                // Nothing is removed twice by one collection, and it says so.
                assert!(matches!(error, Error::Io { .. }) && error.to_string().contains(WORDS), "{when}: {error}");
            }
            let portal = store.server.portal.lock().take();
            clean().unwrap_or_else(|error| panic!("{when}: {error}"));
            assert_eq!(remaining(), kept, "{when}: what is dead is still there");
            assert!(store.found() == store.bytes, "{when}");
            *store.server.portal.lock() = portal;
        });
    }
}
