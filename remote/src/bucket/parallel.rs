//! Runs independent requests concurrently.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

#[cfg(test)]
thread_local! {
    /// Deterministic mode of tests: requests run one after the other on this thread, and the
    /// function decides the order of each pair that could run concurrently.
    pub(super) static ORDER: std::cell::RefCell<Option<Box<dyn FnMut() -> bool>>> = const { std::cell::RefCell::new(None) };
}

/// Runs `work` on several threads, including the caller's; on fewer if threads cannot be started.
pub(super) fn run_on_threads(name: &str, threads: usize, work: impl Fn() + Sync) {
    #[cfg(test)]
    let threads = ORDER.with_borrow(|order| if order.is_some() { 1 } else { threads });
    thread::scope(|scope| {
        for _ in 1..threads {
            let _ = thread::Builder::new().name(name.into()).spawn_scoped(scope, &work);
        }
        work();
    });
}

/// Runs both concurrently. The second result is None if no thread could be started.
pub(super) fn run_both<A, B: Send>(
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

/// Calls `ask` with each number below `count` concurrently and collects the results.
pub(super) fn collect_all<T: Send + Sync>(name: &str, count: usize, ask: impl Fn(usize) -> T + Sync) -> Vec<T> {
    #[cfg(test)]
    let is_last_first = ORDER.with_borrow_mut(|order| order.as_mut().is_some_and(|order| order()));
    #[cfg(not(test))]
    let is_last_first = false;
    let (answers, next): (Vec<OnceLock<T>>, _) = ((0..count).map(|_| OnceLock::new()).collect(), AtomicUsize::new(0));
    run_on_threads(name, count, || {
        while let Some(behind) = count.checked_sub(next.fetch_add(1, Ordering::Relaxed) + 1) {
            let number = if is_last_first { behind } else { count - 1 - behind };
            let _ = answers[number].set(ask(number));
        }
    });
    answers.into_iter().filter_map(OnceLock::into_inner).collect()
}
