//! Times at which a store is asked again, on a simulated clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::super::objects::{ListedObject, ObjectCreation, ObjectRange, ObjectStore};
use super::super::store::{BucketStore, CreateOutcome};
use crate::range_source::{RemoteError, RemoteResult};
use crate::retry::{MAX_PAUSE, RetryClock, SimulatedClock};

/// Store that fails for some time, and the times of its requests.
struct Failing {
    clock: Arc<SimulatedClock>,
    until: Instant,
    error: RemoteError,
    asked: Arc<Mutex<Vec<Instant>>>,
}

impl Failing {
    fn answer<T>(&self, answer: T) -> RemoteResult<T> {
        let now = self.clock.now();
        self.asked.lock().push(now);
        if now < self.until { Err(self.error.clone()) } else { Ok(answer) }
    }
}

impl ObjectStore for Failing {
    fn create(&self, _name: &str, _bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.answer(ObjectCreation::Created(None))
    }

    fn get(&self, _name: &str, _part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.answer(Vec::new())
    }

    fn list(&self, _prefix: &str, _after: &str, _most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.answer(Vec::new())
    }

    fn remove(&self, _name: &str) -> RemoteResult<()> {
        self.answer(())
    }
}

/// Returns a store that fails with `error` for `seconds`, and the times of its requests.
fn failing(error: RemoteError, seconds: u64) -> (BucketStore, Arc<Mutex<Vec<Instant>>>) {
    let clock = Arc::new(SimulatedClock::new());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let until = clock.now() + Duration::from_secs(seconds);
    let objects = Failing { clock: clock.clone(), until, error, asked: asked.clone() };
    let store = BucketStore::new(Box::new(objects), "s3://b/p".into(), Some(Duration::from_secs(30)));
    (store.with_clock(clock), asked)
}

fn busy(seconds: u64) -> RemoteError {
    RemoteError::Busy { why: "status 503".into(), after: Duration::from_secs(seconds) }
}

fn gaps(asked: &[Instant]) -> Vec<Duration> {
    asked.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

#[test]
fn a_store_that_asks_for_a_pause_is_not_asked_before_its_end() {
    let (store, asked) = failing(busy(60), 30);
    assert!(matches!(store.create("name", &Arc::new(vec![1])), Ok(CreateOutcome::Created(_))));
    assert_eq!(asked.lock().len(), 2, "{:?}", gaps(&asked.lock()));
    assert!(gaps(&asked.lock())[0] >= Duration::from_secs(60));
    // Without an end, a command fails after the second request, or at once for a longer pause.
    for (seconds, requests) in [(60, 2), (61, 1)] {
        let (store, asked) = failing(busy(seconds), 1 << 20);
        assert!(store.create("name", &Arc::new(vec![1])).is_err());
        assert_eq!(asked.lock().len(), requests);
    }
    // A mount does not give up.
    let (store, asked) = failing(busy(120), 1000);
    store.retry_forever();
    assert!(matches!(store.create("name", &Arc::new(vec![1])), Ok(CreateOutcome::Created(_))));
    assert!(gaps(&asked.lock()).iter().all(|gap| *gap >= Duration::from_secs(120)), "{:?}", gaps(&asked.lock()));
}

#[test]
fn the_pause_of_one_request_holds_for_the_others_of_the_store() {
    let (store, asked) = failing(busy(3600), 3600);
    assert!(store.list("", "", 1).is_err());
    assert!(store.get("name", ObjectRange::All(1)).is_err() && store.create("name", &Arc::new(vec![1])).is_err());
    assert_eq!(asked.lock().len(), 1);
}

#[test]
fn the_pauses_of_a_mount_grow_to_a_minute_whatever_the_failure() {
    let refused = RemoteError::Denied("status 403".into());
    for error in [RemoteError::Transient("no answer".into()), refused, RemoteError::NoSpace("full".into())] {
        let (store, asked) = failing(error, 3600);
        store.retry_forever();
        assert!(matches!(store.create("name", &Arc::new(vec![1])), Ok(CreateOutcome::Created(_))));
        let gaps = gaps(&asked.lock());
        assert!(gaps.len() < 160 && gaps.iter().all(|gap| *gap <= MAX_PAUSE), "{gaps:?}");
        assert!(gaps[gaps.len() - 10..].iter().all(|gap| *gap >= MAX_PAUSE / 2), "{gaps:?}");
    }
}
