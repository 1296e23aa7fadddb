//! Store that fails, or runs a hook, at the request of a given number.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::super::objects::{ListedObject, ObjectCreation, ObjectRange, ObjectStore};
use super::simulated::World;
use crate::range_source::{RemoteError, RemoteResult};

/// A store that carries out so many requests and no more, the last of them perhaps without an
/// answer; or on which something happens before one of them.
struct Counting {
    objects: Box<dyn ObjectStore>,
    asked: Arc<AtomicU64>,
    end: u64,
    how: How,
}

pub(super) enum How {
    /// The process was killed before the request.
    Dies,
    /// It was carried out, and nobody heard the answer any more.
    Silent,
    /// Somebody else came in between.
    Meets(Mutex<Option<Box<dyn FnOnce() + Send>>>),
    /// Nobody answers for the time of so many requests, which are carried out (or not).
    Away(u64, bool),
}

impl Counting {
    fn ask<T>(&self, ask: impl Fn(&dyn ObjectStore) -> RemoteResult<T>) -> RemoteResult<T> {
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        let killed = || Err(RemoteError::Denied("it was killed".into()));
        match &self.how {
            How::Dies if number >= self.end => killed(),
            How::Silent if number > self.end => killed(),
            How::Silent if number == self.end => {
                let _ = ask(&*self.objects);
                killed()
            }
            How::Meets(other) if number == self.end => {
                let other = other.lock().take();
                other.into_iter().for_each(|meet| meet());
                ask(&*self.objects)
            }
            How::Away(count, carried_out) if (self.end..self.end + count).contains(&number) => {
                if *carried_out {
                    let _ = ask(&*self.objects);
                }
                Err(RemoteError::Transient("no answer".into()))
            }
            _ => ask(&*self.objects),
        }
    }
}

impl ObjectStore for Counting {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.ask(|objects| objects.create(name, bytes))
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.ask(|objects| objects.get(name, part))
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.ask(|objects| objects.list(prefix, after, most))
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.ask(|objects| objects.remove(name))
    }
}

pub(super) fn counting(world: &Arc<World>, end: u64, how: How) -> (Box<dyn ObjectStore>, Arc<AtomicU64>) {
    let asked = Arc::new(AtomicU64::new(0));
    (Box::new(Counting { objects: world.store(2), asked: asked.clone(), end, how }), asked)
}
