//! Requests that need not wait for each other, several of them under way at once.

use std::io;
use std::thread;

use lockbox::{Error, Result};

#[cfg(test)]
thread_local! {
    /// Where all requests have one order, and this thread makes one after the other: says of each two that could be under way at once whether the other one is the first.
    pub(super) static ORDER: std::cell::RefCell<Option<Box<dyn FnMut() -> bool>>> = const { std::cell::RefCell::new(None) };
}

/// Has so many threads do the same, the caller's among them. Without the others it takes longer.
pub(super) fn by_many(name: &str, threads: usize, work: impl Fn() + Sync) {
    #[cfg(test)]
    let threads = ORDER.with_borrow(|order| if order.is_some() { 1 } else { threads });
    thread::scope(|scope| {
        for _ in 1..threads {
            let _ = thread::Builder::new().name(name.into()).spawn_scoped(scope, &work);
        }
        work();
    });
}

/// Does both. Nothing comes of the other one where no thread can be started for it.
pub(super) fn both<A, B: Send>(
    one: impl FnOnce() -> A,
    name: &str,
    other: impl FnOnce() -> B + Send,
) -> (A, Option<B>) {
    #[cfg(test)]
    if let Some(is_first) = ORDER.with_borrow_mut(|order| order.as_mut().map(|order| order())) {
        if is_first {
            let other = other();
            return (one(), Some(other));
        }
        let one = one();
        return (one, Some(other()));
    }
    thread::scope(|scope| {
        let other = thread::Builder::new().name(name.into()).spawn_scoped(scope, other);
        let one = one();
        (one, other.ok().and_then(|other| other.join().ok()))
    })
}

/// What so many, each asked by a thread of its own, answer.
///
/// # Errors
/// `Io` when there cannot be as many threads.
pub(super) fn all<T: Send>(name: &str, count: usize, ask: impl Fn(usize) -> T + Sync) -> Result<Vec<T>> {
    #[cfg(test)]
    if let Some(is_last_first) = ORDER.with_borrow_mut(|order| order.as_mut().map(|order| order())) {
        let mut answers: Vec<T> =
            if is_last_first { (0..count).rev().map(ask).collect() } else { (0..count).map(ask).collect() };
        if is_last_first {
            answers.reverse();
        }
        return Ok(answers);
    }
    let cannot = |error| Error::io("cannot start a thread that asks", error);
    let ended = |_| Error::request("a thread that asks has ended", io::ErrorKind::Other);
    thread::scope(|scope| {
        let ask = &ask;
        let start = |number| thread::Builder::new().name(name.into()).spawn_scoped(scope, move || ask(number));
        let asking = (0..count).map(start).collect::<io::Result<Vec<_>>>().map_err(cannot)?;
        asking.into_iter().map(|answer| answer.join().map_err(ended)).collect()
    })
}
