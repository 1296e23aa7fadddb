//! Answers fsync without an event loop that waits for each caller.
//!
//! A commit serves all who came before it began, but only as many can come as there are loops to take their requests. So one
//! caller at a time is led by the loop that took its request, which costs no hand-over; who comes meanwhile is counted in and
//! left to a thread, which leads commit after commit until nobody is left. Where a commit waits for a store elsewhere, perhaps for as long as that is away, a hand-over is nothing
//! beside it and a loop is: there the thread leads all of them.
//!
//! # Rules
//! 1  A caller is counted in by the loop that took its request: the commit that serves it begins afterwards, and sees all that
//!    was answered before.
//! 2  Who is counted in while another leads is answered by the thread, which is called when that lead ends. So nobody is
//!    forgotten: who leads and who waits are decided under one lock.
//! 3  The thread ends with the adapter, after the last event loop, and answers all before.
//! 4  Commits of the thread count as long work (rule 4 of `pace`): a change may have to wait for one.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use fuser::ReplyEmpty;
use lockbox::fs::{BegunSync, FileSystem};
use parking_lot::{Condvar, Mutex};

use super::reply::reply_empty;
use crate::event_loop::{InFlight, Pace};

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Lead {
    #[default]
    Nobody,
    Loop,
    Thread,
}

#[derive(Default)]
struct State {
    lead: Lead,
    waiting: Vec<(BegunSync, ReplyEmpty)>,
    ended: bool,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    called: Condvar,
}

/// The callers of fsync of one mount.
pub(super) struct Syncs {
    fs: Arc<FileSystem>,
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
    /// Commits wait for another machine.
    elsewhere: bool,
}

impl Syncs {
    /// # Errors
    /// Those of starting a thread.
    pub(super) fn start(fs: Arc<FileSystem>, pace: Arc<Pace>, elsewhere: bool) -> std::io::Result<Syncs> {
        let queue = Arc::new(Queue::default());
        let (of_thread, its_queue) = (Arc::clone(&fs), Arc::clone(&queue));
        let thread = thread::Builder::new().name("syncs".into()).spawn(move || serve(&of_thread, &its_queue, &pace))?;
        Ok(Syncs { fs, queue, thread: Some(thread), elsewhere })
    }

    /// Replies when everything done so far is durable; the loop may be back at the kernel's queue long before.
    pub(super) fn answer(&self, in_flight: &InFlight<'_>, reply: ReplyEmpty) {
        let begun = match self.fs.begin_sync() {
            Ok(begun) => begun,
            Err(error) => return reply_empty(Err(error), reply),
        };
        {
            let mut state = self.queue.state.lock();
            if self.elsewhere || state.lead != Lead::Nobody {
                state.waiting.push((begun, reply));
                if state.lead == Lead::Nobody {
                    state.lead = Lead::Thread;
                    self.queue.called.notify_one();
                }
                return;
            }
            state.lead = Lead::Loop;
        }
        in_flight.long();
        reply_empty(self.fs.finish_sync(begun), reply);
        let mut state = self.queue.state.lock();
        if state.waiting.is_empty() {
            state.lead = Lead::Nobody;
        } else {
            state.lead = Lead::Thread;
            self.queue.called.notify_one();
        }
    }
}

fn serve(fs: &FileSystem, queue: &Queue, pace: &Pace) {
    let mut state = queue.state.lock();
    loop {
        while state.lead != Lead::Thread {
            if state.ended {
                return;
            }
            queue.called.wait(&mut state);
        }
        if state.waiting.is_empty() {
            state.lead = Lead::Nobody;
            continue;
        }
        let callers = std::mem::take(&mut state.waiting);
        drop(state);
        let _long = pace.elsewhere();
        // The first leads; the others were counted in before that commit began, or need one more.
        for (begun, reply) in callers {
            reply_empty(fs.finish_sync(begun), reply);
        }
        state = queue.state.lock();
    }
}

impl Drop for Syncs {
    fn drop(&mut self) {
        self.queue.state.lock().ended = true;
        self.queue.called.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
