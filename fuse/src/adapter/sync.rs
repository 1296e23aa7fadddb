//! fsync without blocking an event loop for each caller.
//!
//! A commit serves all callers that came before it began, but only as many can come as there are
//! loops to take their requests. So the loop that took the request leads the commit for one caller
//! at a time, without a hand-over. Further callers are queued for a thread, which leads commit
//! after commit until the queue is empty. If commits wait for a remote store, a hand-over is cheap
//! compared with a blocked loop: the thread then leads all of them.
//!
//! # Rules
//! 1  A caller is registered by the loop that took its request: the commit that serves it begins
//!    afterwards, and includes everything that was acknowledged before.
//! 2  A caller queued while another leads is answered by the thread, which is woken when that lead
//!    ends. No caller is lost, because leader and queue change under one lock.
//! 3  The thread ends with the adapter, after the last event loop, and answers all queued callers
//!    before.
//! 4  Commits of the thread count as long work (rule 4 of `event_loop`): a change may have to wait
//!    for one.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use fuser::ReplyEmpty;
use lockbox::fs::{FileSystem, PendingSync};
use parking_lot::{Condvar, Mutex};

use crate::convert::reply_empty;
use crate::event_loop::{InFlight, LoopScheduler};

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
    waiting: Vec<(PendingSync, ReplyEmpty)>,
    ended: bool,
}

#[derive(Default)]
struct SharedQueue {
    state: Mutex<State>,
    called: Condvar,
}

/// Queue of the fsync callers of one mount.
pub(super) struct SyncQueue {
    fs: Arc<FileSystem>,
    queue: Arc<SharedQueue>,
    thread: Option<JoinHandle<()>>,
    /// Commits wait for a remote store.
    is_remote: bool,
}

impl SyncQueue {
    /// # Errors
    /// Fails if the thread cannot be started.
    pub(super) fn start(
        fs: Arc<FileSystem>,
        scheduler: Arc<LoopScheduler>,
        is_remote: bool,
    ) -> std::io::Result<SyncQueue> {
        let queue = Arc::new(SharedQueue::default());
        let (of_thread, its_queue) = (Arc::clone(&fs), Arc::clone(&queue));
        let thread =
            thread::Builder::new().name("syncs".into()).spawn(move || serve(&of_thread, &its_queue, &scheduler))?;
        Ok(SyncQueue { fs, queue, thread: Some(thread), is_remote })
    }

    /// Replies when all previous changes are durable. The loop may return to the kernel's queue
    /// long before.
    pub(super) fn submit(&self, in_flight: &InFlight<'_>, reply: ReplyEmpty) {
        let begun = match self.fs.begin_sync() {
            Ok(begun) => begun,
            Err(error) => return reply_empty(Err(error), reply),
        };
        {
            let mut state = self.queue.state.lock();
            if self.is_remote || state.leader != Leader::Idle {
                state.waiting.push((begun, reply));
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
        while state.leader != Leader::Thread {
            if state.ended {
                return;
            }
            queue.called.wait(&mut state);
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
        for (begun, reply) in callers {
            reply_empty(fs.finish_sync(begun), reply);
        }
        state = queue.state.lock();
    }
}

impl Drop for SyncQueue {
    fn drop(&mut self) {
        self.queue.state.lock().ended = true;
        self.queue.called.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
