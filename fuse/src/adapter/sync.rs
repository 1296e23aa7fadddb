//! fsync without blocking an event loop for each caller.
//!
//! A commit serves all callers that came before it began. If each occupied a loop, only as many
//! could come as there are loops. So the loop that took the request leads the commit for one caller
//! at a time, without a hand-over. Further callers are queued for a thread, which leads commit
//! after commit until the queue is empty. If commits wait for a remote store, a hand-over is cheap
//! compared with a blocked loop: the thread then leads all of them.
//!
//! # Rules
//! 1  A caller is registered by the loop that took its request: the commit that serves it begins
//!    afterwards, and includes everything that was acknowledged before.
//! 2  A caller queued while another leads is answered by the thread, which is woken when that lead
//!    ends. No caller is lost, because leader and queue change under one lock.
//! 3  The threads end with the adapter, after the last event loop. All queued callers are answered
//!    before.
//! 4  Commits of the thread count as long work (rule 4 of `event_loop`): a change may have to wait
//!    for one.
//! 5  When the log is nearly full, another thread seals dirty data ahead of the commit that empties
//!     it. No caller waits for that thread, and the callers of the commit wait less.
//! 6  A caller that waits for a store can be interrupted ([`InterruptWatch`]); its ticket is waited
//!    on all the same.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use fuser::{ReplyEmpty, Request};
use lockbox::fs::{FileSystem, PendingSync};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::interrupt_watch::{InterruptWatch, WaitingCaller, WatchTimes};
use crate::convert::{errno, reply_empty};
use crate::event_loop::{InFlight, LoopScheduler};
use crate::mount_agent::ProcessInfoClient;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Leader {
    #[default]
    Idle,
    EventLoop,
    Thread,
}

#[derive(Default)]
struct State {
    leader: Leader,
    waiting: Vec<(PendingSync, Arc<WaitingCaller>)>,
    /// The log is nearly full (rule 5).
    seals_ahead: bool,
    ended: bool,
}

#[derive(Default)]
struct SharedQueue {
    state: Mutex<State>,
    called: Condvar,
    /// `seals_ahead` or `ended` was set.
    sealing: Condvar,
}

impl SharedQueue {
    fn call_seal_ahead(&self, state: &mut State, fs: &FileSystem) {
        if !state.seals_ahead && fs.should_seal_ahead() {
            state.seals_ahead = true;
            self.sealing.notify_one();
        }
    }
}

/// Queue of the fsync callers of one mount.
pub(super) struct SyncQueue {
    fs: Arc<FileSystem>,
    queue: Arc<SharedQueue>,
    threads: Vec<JoinHandle<()>>,
    /// None unless commits wait for a remote store.
    interrupts: Option<InterruptWatch>,
}

impl SyncQueue {
    /// `process_info`: of the callers, if commits wait for a remote store.
    ///
    /// # Errors
    /// Fails if a thread cannot be started.
    pub(super) fn start(
        fs: Arc<FileSystem>,
        scheduler: Arc<LoopScheduler>,
        process_info: Option<Arc<ProcessInfoClient>>,
    ) -> std::io::Result<SyncQueue> {
        let has_signal =
            |info: Arc<ProcessInfoClient>| move |thread: u32| info.status(thread).has_interrupting_signal();
        let interrupts =
            process_info.map(|info| InterruptWatch::start(WatchTimes::DEFAULT, has_signal(info))).transpose()?;
        let queue = Arc::new(SharedQueue::default());
        let mut syncs = SyncQueue { fs, queue, threads: Vec::new(), interrupts };
        syncs.spawn("syncs", move |fs, queue| serve(fs, queue, &scheduler))?;
        syncs.spawn("seal-ahead", seal_ahead)?;
        Ok(syncs)
    }

    fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce(&FileSystem, &SharedQueue) + Send + 'static,
    ) -> std::io::Result<()> {
        let (fs, queue) = (Arc::clone(&self.fs), Arc::clone(&self.queue));
        self.threads.push(thread::Builder::new().name(name.into()).spawn(move || run(&fs, &queue))?);
        Ok(())
    }

    /// Replies when all previous changes are durable. The loop may return to the kernel's queue
    /// long before.
    pub(super) fn submit(&self, request: &Request, in_flight: &InFlight<'_>, reply: ReplyEmpty) {
        let begun = match self.fs.begin_sync() {
            Ok(begun) => begun,
            Err(error) => return reply_empty(Err(error), reply),
        };
        {
            let mut state = self.queue.state.lock();
            if self.interrupts.is_some() || state.leader != Leader::Idle {
                let caller = WaitingCaller::new(request.pid(), |outcome| match outcome {
                    Ok(()) => reply.ok(),
                    Err(error) => reply.error(error),
                });
                if let Some(interrupts) = &self.interrupts {
                    interrupts.register(&caller);
                }
                state.waiting.push((begun, caller));
                if state.leader == Leader::Idle {
                    state.leader = Leader::Thread;
                    self.queue.called.notify_one();
                }
                return;
            }
            state.leader = Leader::EventLoop;
        }
        in_flight.mark_long();
        reply_empty(self.fs.finish_sync(begun), reply);
        let mut state = self.queue.state.lock();
        self.queue.call_seal_ahead(&mut state, &self.fs);
        if state.waiting.is_empty() {
            state.leader = Leader::Idle;
        } else {
            state.leader = Leader::Thread;
            self.queue.called.notify_one();
        }
    }
}

fn serve(fs: &FileSystem, queue: &SharedQueue, scheduler: &LoopScheduler) {
    let mut state = queue.state.lock();
    loop {
        queue.called.wait_while(&mut state, |state| state.leader != Leader::Thread && !state.ended);
        if state.leader != Leader::Thread {
            return;
        }
        if state.waiting.is_empty() {
            state.leader = Leader::Idle;
            continue;
        }
        let callers = std::mem::take(&mut state.waiting);
        drop(state);
        let _long = scheduler.begin_long_work();
        // The first one leads; the others were registered before that commit began, or need one
        // more.
        for (begun, caller) in callers {
            caller.answer(fs.finish_sync(begun).map_err(|error| errno(&error)));
        }
        state = queue.state.lock();
        queue.call_seal_ahead(&mut state, fs);
    }
}

/// Seals dirty data ahead of a commit, each time that it is called (rule 5).
fn seal_ahead(fs: &FileSystem, queue: &SharedQueue) {
    let mut state = queue.state.lock();
    while !state.ended {
        if state.seals_ahead {
            MutexGuard::unlocked(&mut state, || fs.seal_ahead());
            state.seals_ahead = false;
        } else {
            queue.sealing.wait(&mut state);
        }
    }
}

impl Drop for SyncQueue {
    fn drop(&mut self) {
        self.queue.state.lock().ended = true;
        self.queue.called.notify_one();
        self.queue.sealing.notify_one();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
