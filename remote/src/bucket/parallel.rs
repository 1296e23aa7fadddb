//! Requests that need not wait for each other, several of them under way at once.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

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

/// What so many answer, all of them asked at once.
pub(super) fn all<T: Send + Sync>(name: &str, count: usize, ask: impl Fn(usize) -> T + Sync) -> Vec<T> {
    #[cfg(test)]
    let is_last_first = ORDER.with_borrow_mut(|order| order.as_mut().is_some_and(|order| order()));
    #[cfg(not(test))]
    let is_last_first = false;
    let (answers, next): (Vec<OnceLock<T>>, _) = ((0..count).map(|_| OnceLock::new()).collect(), AtomicUsize::new(0));
    by_many(name, count, || {
        while let Some(behind) = count.checked_sub(next.fetch_add(1, Ordering::Relaxed) + 1) {
            let number = if is_last_first { behind } else { count - 1 - behind };
            let _ = answers[number].set(ask(number));
        }
    });
    answers.into_iter().filter_map(OnceLock::into_inner).collect()
}
