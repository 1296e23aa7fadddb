//! Findings of a probe for stores that break one rule, and the objects that it leaves.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::super::objects::{ListedObject, ObjectCreation, ObjectRange, ObjectStore};
use super::simulated::World;
use crate::diagnostics::probe_store;
use crate::range_source::{RemoteError, RemoteResult};

/// Names of what does not work or could be better, and how the store is afterwards.
fn probed(world: &Arc<World>, objects: &dyn ObjectStore) -> (Vec<&'static str>, Vec<&'static str>) {
    let mut findings = Vec::new();
    probe_store(objects, Some(Duration::ZERO), &mut findings, &mut || Ok(())).unwrap();
    world.with(|state| assert!(state.keeps || state.objects.is_empty(), "{:?}", state.objects.keys()));
    let named = |works: bool| {
        let of = findings.iter().filter(|finding| finding.works == works && finding.advice.is_some());
        of.map(|finding| finding.name).collect()
    };
    assert!(findings.iter().all(|finding| finding.works || finding.advice.is_some()));
    (named(false), named(true))
}

/// A store that does one thing otherwise.
struct Odd {
    objects: Box<dyn ObjectStore>,
    how: How,
    asked: AtomicUsize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    ReadOnly,
    NoClock,
    /// The first creation of a name and the one after.
    TwoWinners,
    WholeObjects,
    Unordered,
    ListsLate,
    KeepsReading,
}

impl ObjectStore for Odd {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        match (self.how, self.objects.create(name, bytes)?) {
            (How::ReadOnly, _) => {
                self.objects.remove(name)?;
                Err(RemoteError::Denied("you may not".into()))
            }
            (How::NoClock, ObjectCreation::Created(_)) => Ok(ObjectCreation::Created(None)),
            // Not the one that comes after the first, but in the race.
            (How::TwoWinners, ObjectCreation::Exists) if asked > 2 => Ok(ObjectCreation::Created(Some(1))),
            (_, created) => Ok(created),
        }
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        match (self.how, part) {
            (How::WholeObjects, ObjectRange::Range(..)) => self.objects.get(name, ObjectRange::All(u64::MAX)),
            (How::KeepsReading, _) => match self.objects.get(name, part) {
                Err(RemoteError::NotFound) => Ok(vec![0]),
                got => got,
            },
            _ => self.objects.get(name, part),
        }
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        let mut listed = self.objects.list(prefix, after, most)?;
        match self.how {
            How::Unordered => listed.reverse(),
            How::ListsLate => listed.truncate(listed.len().saturating_sub(1)),
            _ => {}
        }
        Ok(listed)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.objects.remove(name)
    }
}

#[test]
fn each_thing_that_a_store_does_otherwise_is_found_by_its_name_and_nothing_is_left() {
    let none: [&str; 0] = [];
    // The simulated clock is years behind.
    let world = World::new(1, 0);
    assert_eq!(probed(&world, &*world.store(1)), (none.into(), vec!["clock"]));
    for (how, bad, advice) in [
        (How::ReadOnly, &none[..], &["writes"][..]),
        (How::NoClock, &none, &["clock"]),
        (How::TwoWinners, &["one writer"], &["clock"]),
        (How::WholeObjects, &["ranges"], &["clock"]),
        (How::Unordered, &["order"], &["clock"]),
        (How::ListsLate, &["order"], &["clock"]),
        (How::KeepsReading, &none, &["clock", "removal"]),
    ] {
        let world = World::new(1, 0);
        let odd = Odd { objects: world.store(1), how, asked: AtomicUsize::new(0) };
        let found = probed(&world, &odd);
        assert_eq!((&found.0[..], &found.1[..]), (bad, advice));
    }
    let world = World::new(1, 0);
    world.with(|state| state.overwrites = true);
    assert_eq!(probed(&world, &*world.store(1)).0[..2], ["conditions", "one writer"]);
    let world = World::new(1, 0);
    world.with(|state| state.keeps = true);
    assert_eq!(probed(&world, &*world.store(1)), (none.into(), vec!["clock", "removal"]));
    let world = World::new(1, 0);
    world.with(|state| state.away = true);
    assert_eq!(probed(&world, &*world.store(1)), (vec!["lists"], none.into()));
}

#[test]
fn who_is_interrupted_between_any_two_requests_leaves_nothing() {
    let mut stops = 0;
    loop {
        let world = World::new(1, 0);
        let (mut asked, mut findings) = (0, Vec::new());
        let done = probe_store(&*world.store(1), Some(Duration::ZERO), &mut findings, &mut || {
            asked += 1;
            if asked > stops { Err(lockbox::Error::Interrupted(2)) } else { Ok(()) }
        });
        world.with(|state| assert!(state.objects.is_empty(), "{stops}: {:?}", state.objects.keys()));
        if done.is_ok() {
            break;
        }
        stops += 1;
    }
    assert!(stops >= 5, "it was asked {stops} times");
}
