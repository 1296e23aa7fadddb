//! Group commit: many changes share one barrier, and each waits for the first barrier that began
//! after it.
//!
//! There is no fixed delay. While one barrier runs, changes collect for the next; a lone change
//! waits for its own barrier only.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::sync::{Condvar, Mutex};
use super::{Result, StoreError};

pub(crate) trait Syncable: Send + Sync {
    /// Makes earlier writes durable. Errors: the medium's error; after it no write since the last
    /// barrier may be relied on.
    fn sync(&self) -> std::io::Result<()>;
}

/// Numbers a barrier. Everything noted under it is durable when it is done.
type Epoch = u64;

/// Dirty files of the next barrier, and the tasks that wait for it.
pub(crate) struct BarrierGroup {
    state: Mutex<GroupState>,
    wanted: Condvar,
    /// Held during a barrier: if a later one ended first, tasks of the earlier one would wake too
    /// soon.
    lead: Mutex<()>,
}

#[derive(Default)]
struct GroupState {
    /// Epoch of the next barrier, which covers all new writes.
    next: Epoch,
    done: Epoch,
    dirty: Vec<Arc<dyn Syncable>>,
    waiters: Vec<(Epoch, Waker)>,
    /// A task waits for `next`.
    urgent: bool,
    failed: Option<String>,
    stopped: bool,
    barriers: u64,
    micros: u64,
}

pub(crate) struct BarrierTicket {
    group: Arc<BarrierGroup>,
    epoch: Epoch,
    /// The waker that waits already.
    waiting: Option<Waker>,
}

impl GroupState {
    /// Errors: `Unavailable` after a failed barrier (Store rule 9).
    fn check(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), |why| Err(StoreError::Unavailable(why)))
    }
}

impl BarrierGroup {
    pub(crate) fn new() -> Arc<BarrierGroup> {
        Arc::new(BarrierGroup {
            state: Mutex::new(GroupState { next: 1, ..GroupState::default() }),
            wanted: Condvar::new(),
            lead: Mutex::new(()),
        })
    }

    /// Notes that `target` was written, and gives the number of the barrier that covers it. `noted`
    /// is the number that an earlier call gave for the same target: it need not be listed twice.
    pub(crate) fn note(&self, target: &Arc<dyn Syncable>, noted: Epoch) -> Epoch {
        let mut state = self.state.lock();
        if noted != state.next {
            state.dirty.push(Arc::clone(target));
        }
        state.next
    }

    /// A ticket for the barrier `epoch`, or None when it is done.
    pub(crate) fn ticket(self: &Arc<Self>, epoch: Epoch) -> Option<BarrierTicket> {
        let mut state = self.state.lock();
        if epoch <= state.done && state.failed.is_none() {
            return None;
        }
        if epoch == state.next && !state.urgent {
            state.urgent = true;
            self.wanted.notify_one();
        }
        Some(BarrierTicket { group: Arc::clone(self), epoch, waiting: None })
    }

    /// A ticket for everything that was noted until now.
    pub(crate) fn ticket_for_all(self: &Arc<Self>) -> Option<BarrierTicket> {
        let next = self.state.lock().next;
        self.ticket(next)
    }

    /// Errors: `Unavailable` after a failed barrier.
    pub(crate) fn check(&self) -> Result<()> {
        self.state.lock().check()
    }

    /// Refuses all further changes with the given reason, and wakes all waiting tasks.
    pub(crate) fn latch(&self, why: String) {
        let mut state = self.state.lock();
        state.failed.get_or_insert(why);
        let waiters = std::mem::take(&mut state.waiters);
        drop(state);
        waiters.into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// How many targets wait for a barrier.
    pub(crate) fn unsynced(&self) -> usize {
        self.state.lock().dirty.len()
    }

    /// Barriers so far, and the microseconds that they took.
    pub(crate) fn stats(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.barriers, state.micros)
    }

    /// Makes all noted writes durable on this thread. Errors: `Unavailable`, and the group is
    /// latched.
    pub(crate) fn barrier(&self) -> Result<()> {
        let _lead = self.lead.lock();
        let (epoch, dirty) = {
            let mut state = self.state.lock();
            state.check()?;
            state.urgent = false;
            let epoch = state.next;
            state.next += 1;
            (epoch, std::mem::take(&mut state.dirty))
        };
        let begun = Instant::now();
        for target in &dirty {
            if let Err(error) = target.sync() {
                let why = format!("a barrier failed: {error}");
                self.latch(why.clone());
                return Err(StoreError::Unavailable(why));
            }
        }
        let took = begun.elapsed();
        let mut state = self.state.lock();
        state.done = epoch;
        if !dirty.is_empty() {
            state.barriers += 1;
            state.micros += took.as_micros() as u64;
        }
        let ready: Vec<_> = state.waiters.extract_if(.., |(waits_for, _)| *waits_for <= epoch).collect();
        drop(state);
        ready.into_iter().for_each(|(_, waker)| waker.wake());
        Ok(())
    }

    /// Runs barriers until [`BarrierGroup::stop`]: at once when a task waits, else every `period`.
    pub(crate) fn run(&self, period: Option<Duration>) {
        loop {
            let mut state = self.state.lock();
            while !state.urgent && !state.stopped {
                match period {
                    Some(period) => {
                        if self.wanted.wait_for(&mut state, period).timed_out() && !state.dirty.is_empty() {
                            break;
                        }
                    }
                    None => self.wanted.wait(&mut state),
                }
            }
            let is_stopped = state.stopped;
            drop(state);
            if is_stopped || self.barrier().is_err() {
                return;
            }
        }
    }

    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.wanted.notify_all();
    }
}

impl BarrierTicket {
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        let mut state = self.group.state.lock();
        if state.failed.is_some() || self.epoch <= state.done {
            return Poll::Ready(state.check());
        }
        let waker = context.waker();
        if !self.waiting.as_ref().is_some_and(|waiting| waiting.will_wake(waker)) {
            state.waiters.push((self.epoch, waker.clone()));
            self.waiting = Some(waker.clone());
        }
        Poll::Pending
    }
}

/// Await it on any runtime, or [`PendingReply::wait`] for it without one. The change was made when
/// the call returned; dropping this neither undoes nor hastens it.
#[must_use = "an answer may be given only after it was awaited"]
pub struct PendingReply<T>(ReplyState<T>);

enum ReplyState<T> {
    /// `None` after it was taken.
    Ready(Option<Result<T>>),
    Durable(Option<Result<T>>, BarrierTicket),
    Remote(Pin<Box<dyn Future<Output = Result<T>> + Send>>),
}

impl<T> PendingReply<T> {
    pub fn ready(answer: Result<T>) -> PendingReply<T> {
        PendingReply(ReplyState::Ready(Some(answer)))
    }

    /// An answer, errors with it, that is given after the barrier of `ticket`.
    pub(crate) fn after(answer: Result<T>, ticket: Option<BarrierTicket>) -> PendingReply<T> {
        PendingReply(match ticket {
            Some(ticket) => ReplyState::Durable(Some(answer), ticket),
            None => ReplyState::Ready(Some(answer)),
        })
    }

    pub fn remote(answer: impl Future<Output = Result<T>> + Send + 'static) -> PendingReply<T> {
        PendingReply(ReplyState::Remote(Box::pin(answer)))
    }

    /// Blocks the thread until the reply; for programs without a runtime.
    ///
    /// # Errors
    /// The errors of the call.
    pub fn wait(mut self) -> Result<T>
    where
        T: Unpin,
    {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        if let ReplyState::Ready(answer) = &mut self.0 {
            return take(answer);
        }
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(answer) = Pin::new(&mut self).poll(&mut context) {
                return answer;
            }
            std::thread::park();
        }
    }
}

impl<T: Unpin> Future for PendingReply<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        match &mut self.0 {
            ReplyState::Ready(answer) => Poll::Ready(take(answer)),
            ReplyState::Durable(answer, ticket) => ticket.poll(context).map(|done| done.and_then(|()| take(answer))),
            ReplyState::Remote(answer) => answer.as_mut().poll(context),
        }
    }
}

fn take<T>(answer: &mut Option<Result<T>>) -> Result<T> {
    answer.take().unwrap_or_else(|| Err(StoreError::Unavailable("an answer was asked for twice".into())))
}
