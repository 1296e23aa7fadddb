//! Retries of transient errors: backoff, time limit, and the clock that both read.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::range_source::RemoteResult;
use crate::transport::{self, AttemptClock};
#[cfg(test)]
pub(crate) use tests::SimulatedClock;

const MIN_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 100 });
/// An outage of hours costs a request a minute, and its end is noticed a minute later.
pub(crate) const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Longest real pause: outages of tests are counted in attempts.
const MAX_REAL_PAUSE: Duration = if cfg!(test) { Duration::from_millis(5) } else { Duration::MAX };

pub(crate) trait RetryClock: Send + Sync {
    fn now(&self) -> Instant;

    /// Waits for `pause`, or until `is_over`, which changes before a [`RetryClock::wake`].
    fn sleep(&self, pause: Duration, is_over: &dyn Fn() -> bool);

    fn wake(&self) {}
}

#[derive(Default)]
pub(crate) struct HostClock {
    lock: Mutex<()>,
    woken: Condvar,
}

impl RetryClock for HostClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep(&self, pause: Duration, is_over: &dyn Fn() -> bool) {
        self.woken.wait_while_for(&mut self.lock.lock(), |()| !is_over(), pause.min(MAX_REAL_PAUSE));
    }

    fn wake(&self) {
        // A sleeper that has not begun to wait sees the change.
        drop(self.lock.lock());
        self.woken.notify_all();
    }
}

/// Exponential backoff with a time limit that counts from the silence that ended the first failed
/// attempt: one that takes longer than the limit while bytes move, such as a large body on a slow
/// link, is repeated nevertheless.
///
/// A server that asks for a pause gets it: the limit does not end the wait for a pause of a minute
/// at most, once. The attempt after it has the whole limit.
pub(crate) struct Backoff {
    silent_since: Option<Instant>,
    pause: Duration,
    has_extended: bool,
}

impl Backoff {
    fn new(silent_since: Option<Instant>) -> Backoff {
        Backoff { silent_since, ..Backoff::from_pause(MIN_PAUSE) }
    }

    pub(crate) fn from_pause(pause: Duration) -> Backoff {
        Backoff { silent_since: None, pause, has_extended: false }
    }

    /// Returns the time until which the first byte of an attempt has to move. None without a limit,
    /// and for a caller that makes one attempt only.
    fn deadline(&self, now: Instant, timeout: Option<Duration>) -> Option<Instant> {
        let since = self.silent_since.filter(|_| !self.has_extended);
        transport::deadline(since.unwrap_or(now), timeout)
    }

    /// Returns the next pause without a limit: pauses double, have jitter, and are longer than
    /// `asked`, the pause that the server asks for.
    pub(crate) fn next_pause(&mut self, asked: Option<Duration>) -> Duration {
        let pause = self.pause.mul_f64(0.5 + random_fraction() / 2.0);
        self.pause = (self.pause * 2).min(MAX_PAUSE);
        asked.map_or(pause, |asked| asked + pause.min(asked))
    }

    /// Returns the pause after an attempt that failed at `now`, with no byte moved since
    /// `silent_since`. None when the time is over.
    fn pause(
        &mut self,
        silent_since: Instant,
        now: Instant,
        timeout: Option<Duration>,
        asked: Option<Duration>,
    ) -> Option<Duration> {
        let since = *self.silent_since.get_or_insert(silent_since);
        let left = timeout.map(|timeout| timeout.saturating_sub(now.saturating_duration_since(since)));
        let pause = self.next_pause(asked);
        match (left, asked) {
            (Some(left), None) => (pause <= left).then_some(pause),
            (Some(left), Some(asked)) if pause > left => {
                let is_extended = asked <= MAX_PAUSE && timeout != Some(Duration::ZERO);
                (is_extended && !std::mem::replace(&mut self.has_extended, true)).then_some(pause)
            }
            _ => Some(pause),
        }
    }
}

/// Retries transient errors until the timeout, which is read again after each attempt. The waits of
/// each attempt end with it, too (PROGRESS-2).
pub(crate) fn with_retry<T>(
    timeout: &dyn Fn() -> Option<Duration>,
    attempt: &mut dyn FnMut() -> RemoteResult<T>,
) -> RemoteResult<T> {
    with_retry_on(None, &HostClock::default(), timeout, attempt)
}

/// Like [`with_retry`] on a clock, for a caller that has waited without a response since
/// `silent_since`. A sleep ends when the timeout becomes zero.
pub(crate) fn with_retry_on<T>(
    silent_since: Option<Instant>,
    clock: &dyn RetryClock,
    timeout: &dyn Fn() -> Option<Duration>,
    attempt: &mut dyn FnMut() -> RemoteResult<T>,
) -> RemoteResult<T> {
    let mut backoff = Backoff::new(silent_since);
    loop {
        let bytes = AttemptClock::new(backoff.deadline(clock.now(), timeout()));
        match AttemptClock::run(Some(bytes.clone()), &mut *attempt) {
            Err(error) if error.is_transient() => {
                match backoff.pause(bytes.silent_since(), clock.now(), timeout(), error.retry_after()) {
                    Some(pause) => clock.sleep(pause, &|| timeout() == Some(Duration::ZERO)),
                    None => return Err(error),
                }
            }
            other => return other,
        }
    }
}

fn random_fraction() -> f64 {
    f64::from(getrandom::u32().unwrap_or(u32::MAX / 2)) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::range_source::RemoteError;

    /// Clock that a sleep advances.
    pub(crate) struct SimulatedClock(Mutex<Instant>);

    impl SimulatedClock {
        pub(crate) fn new() -> SimulatedClock {
            SimulatedClock(Mutex::new(Instant::now()))
        }
    }

    impl RetryClock for SimulatedClock {
        fn now(&self) -> Instant {
            *self.0.lock()
        }

        fn sleep(&self, pause: Duration, _is_over: &dyn Fn() -> bool) {
            *self.0.lock() += pause;
        }
    }

    #[test]
    fn an_attempt_that_takes_long_is_repeated_all_the_same() {
        let (mut backoff, limit) = (Backoff::new(None), Some(Duration::from_secs(30)));
        let first = Instant::now() + Duration::from_secs(54);
        assert!(backoff.pause(first, first, limit, None).is_some(), "it had no second chance");
        let later = first + Duration::from_secs(20);
        assert!(backoff.pause(later, later, limit, None).is_some());
        let late = first + Duration::from_secs(31);
        assert_eq!(backoff.pause(late, late, limit, None), None);
        assert_eq!(
            Backoff::new(None).pause(first, first, Some(Duration::ZERO), None),
            None,
            "no patience: one attempt"
        );
        let mut hard = Backoff::new(None);
        for number in 0..100 {
            let now = first + Duration::from_secs(1000 * number);
            assert!(hard.pause(now, now, None, None).is_some_and(|pause| pause <= MAX_PAUSE));
        }
        // The time is over meanwhile: no new attempt.
        let now = first + Duration::from_secs(100_000);
        assert_eq!(hard.pause(now, now, Some(Duration::ZERO), None), None);
    }

    #[test]
    fn a_pause_of_zero_is_not_a_request_to_wait() {
        let mut attempts = 0;
        let failed = with_retry_on(None, &SimulatedClock::new(), &|| Some(Duration::from_secs(30)), &mut || {
            attempts += 1;
            let busy = RemoteError::Busy { why: "status 503".into(), after: Duration::ZERO };
            if attempts < 1000 { Err(busy) } else { Ok(()) }
        });
        assert!(failed.is_err(), "{attempts} attempts within the limit");
    }

    #[test]
    fn silence_before_the_first_failure_counts_for_the_timeout() {
        let (began, limit) = (Instant::now(), Some(Duration::from_secs(30)));
        let mut backoff = Backoff::new(None);
        assert_eq!(backoff.deadline(began, limit), Some(began + Duration::from_secs(30)));
        assert!(backoff.pause(began, began + Duration::from_secs(20), limit, None).is_some());
        let second = began + Duration::from_secs(20);
        assert_eq!(backoff.deadline(second, limit), Some(began + Duration::from_secs(30)), "the rest of the time");
        assert_eq!(backoff.pause(second, began + Duration::from_secs(30), limit, None), None);
        let waited = Backoff::new(Some(began));
        assert_eq!(waited.deadline(second, limit), Some(began + Duration::from_secs(30)));
        assert_eq!(waited.deadline(second, Some(Duration::ZERO)), None, "one attempt has the stall limit");
    }
}
