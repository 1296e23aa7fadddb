//! A store on which something happens at the request of a number.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::super::objects::{Created, Listed, Objects, Part};
use super::simulated::World;
use crate::range_source::Trouble;

/// A store that carries out so many requests and no more, the last of them perhaps without an answer; or on which something happens before one of them.
struct Counting {
    objects: Box<dyn Objects>,
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
    fn ask<T>(&self, ask: impl Fn(&dyn Objects) -> std::result::Result<T, Trouble>) -> std::result::Result<T, Trouble> {
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        let killed = || Err(Trouble::Refused("it was killed".into()));
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
                Err(Trouble::Passing("no answer".into()))
            }
            _ => ask(&*self.objects),
        }
    }
}

impl Objects for Counting {
    fn create(&self, name: &str, bytes: &[u8]) -> std::result::Result<Created, Trouble> {
        self.ask(|objects| objects.create(name, bytes))
    }

    fn get(&self, name: &str, part: Part) -> std::result::Result<Vec<u8>, Trouble> {
        self.ask(|objects| objects.get(name, part))
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> std::result::Result<Vec<Listed>, Trouble> {
        self.ask(|objects| objects.list(prefix, after, most))
    }

    fn remove(&self, name: &str) -> std::result::Result<(), Trouble> {
        self.ask(|objects| objects.remove(name))
    }
}

pub(super) fn counting(world: &Arc<World>, end: u64, how: How) -> (Box<dyn Objects>, Arc<AtomicU64>) {
    let asked = Arc::new(AtomicU64::new(0));
    (Box::new(Counting { objects: world.store(2), asked: asked.clone(), end, how }), asked)
}
