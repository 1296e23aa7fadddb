//! Event loops at a queue in memory, with requests of every length.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::*;

/// Longer than any machine needs: a request that is never answered fails its test by name.
const FOR_EVER: Duration = Duration::from_secs(120);

/// A request of a test.
enum Request {
    /// Answered at once.
    Short,
    /// Announced as long; waits until the gate opens.
    Long(Arc<Gate>),
    /// Blocks as well, but is not announced.
    Unannounced(Arc<Gate>),
    /// Takes so many rounds of nothing, announced when there are many.
    Work(u32),
    End,
}

/// Opens once.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *self.0.lock() = true;
        self.1.notify_all();
    }

    #[track_caller]
    fn wait(&self) {
        let until = Instant::now() + FOR_EVER;
        let mut open = self.0.lock();
        while !*open {
            assert!(!self.1.wait_until(&mut open, until).timed_out() || *open, "it was never answered");
        }
    }
}

/// The kernel's queue; which of several waiting loops is woken must not matter.
#[derive(Default)]
struct Requests {
    requests: Mutex<VecDeque<(Request, Arc<Gate>)>>,
    arrived: Condvar,
    answered: AtomicUsize,
    /// Loops between taking a request and answering it, now and at most.
    busy: AtomicUsize,
    most_busy: AtomicUsize,
}

impl Requests {
    /// Queues a request; the gate opens when it is answered.
    fn put(&self, request: Request) -> Arc<Gate> {
        let answered = Arc::new(Gate::default());
        self.requests.lock().push_back((request, answered.clone()));
        self.arrived.notify_one();
        answered
    }

    fn take(&self) -> (Request, Arc<Gate>) {
        let mut requests = self.requests.lock();
        loop {
            match requests.pop_front() {
                Some(request) => return request,
                None => self.arrived.wait(&mut requests),
            }
        }
    }
}

impl super::RequestQueue for Arc<Requests> {
    fn has_request(&self) -> bool {
        !self.requests.lock().is_empty()
    }
}

struct Loops {
    queue: Arc<Requests>,
    scheduler: Arc<LoopScheduler>,
    threads: Vec<JoinHandle<()>>,
}

impl Loops {
    fn start(count: usize) -> Loops {
        let queue = Arc::new(Requests::default());
        let scheduler = Arc::new(LoopScheduler::new(count, queue.clone()));
        let threads = (0..count)
            .map(|_| {
                let (queue, scheduler) = (queue.clone(), scheduler.clone());
                thread::spawn(move || serve(&queue, &scheduler))
            })
            .collect();
        Loops { queue, scheduler, threads }
    }

    /// Ends all loops, which proves that all of them return, and checks that nothing is left.
    fn end(self) {
        let ends: Vec<_> = self.threads.iter().map(|_| self.queue.put(Request::End)).collect();
        ends.iter().for_each(|end| end.wait());
        let count = self.threads.len();
        for thread in self.threads {
            thread.join().unwrap();
        }
        assert!(self.queue.most_busy.load(Ordering::SeqCst) <= count);
        let state = self.scheduler.state.lock();
        assert_eq!((state.working, state.parked, state.woken, state.long), (0, 0, 0, 0));
    }

    /// Waits until all loops but one are parked, which is where short requests lead.
    #[track_caller]
    fn settle(&self) {
        let until = Instant::now() + FOR_EVER;
        loop {
            self.queue.put(Request::Short).wait();
            let state = self.scheduler.state.lock();
            if state.parked + 1 == state.loops && state.woken == 0 {
                return;
            }
            assert!(
                Instant::now() < until,
                "{} of {} loops stay away, {} called",
                state.parked,
                state.loops,
                state.woken
            );
        }
    }
}

fn serve(queue: &Requests, scheduler: &LoopScheduler) {
    loop {
        let (request, answered) = queue.take();
        if matches!(request, Request::End) {
            answered.open();
            return;
        }
        let in_flight = scheduler.begin_request();
        let busy = queue.busy.fetch_add(1, Ordering::SeqCst) + 1;
        queue.most_busy.fetch_max(busy, Ordering::SeqCst);
        match request {
            Request::Long(gate) => {
                in_flight.mark_long();
                gate.wait();
            }
            Request::Unannounced(gate) => gate.wait(),
            Request::Work(rounds) => {
                if rounds > 1000 {
                    in_flight.mark_long();
                }
                (0..rounds).for_each(|round| {
                    std::hint::black_box(round);
                });
            }
            Request::Short | Request::End => {}
        }
        queue.busy.fetch_sub(1, Ordering::SeqCst);
        queue.answered.fetch_add(1, Ordering::SeqCst);
        answered.open();
        // After the reply, as in the adapter.
        drop(in_flight);
    }
}

#[test]
fn short_requests_leave_one_loop_at_the_queue() {
    let loops = Loops::start(4);
    // Returns only when three of four are parked.
    loops.settle();
    loops.end();
}

#[test]
fn long_work_wakes_another_loop_until_all_are_busy() {
    let loops = Loops::start(4);
    let gate = Arc::new(Gate::default());
    for _ in 0..3 {
        // One loop is at the queue, whatever the others wait for.
        loops.queue.put(Request::Short).wait();
        loops.queue.put(Request::Long(gate.clone()));
    }
    // Three wait for the gate; the fourth answers.
    loops.queue.put(Request::Short).wait();
    gate.open();
    loops.end();
}

#[test]
fn unannounced_long_work_delays_others_only_briefly() {
    let loops = Loops::start(3);
    for _ in 0..5 {
        loops.settle();
        let gates = [Arc::new(Gate::default()), Arc::new(Gate::default())];
        for gate in &gates {
            loops.queue.put(Request::Unannounced(gate.clone()));
        }
        // No loop was woken: the loop that answers this returned by itself.
        loops.queue.put(Request::Short).wait();
        gates.iter().for_each(|gate| gate.open());
    }
    loops.end();
}

#[test]
fn during_long_work_every_request_wakes_another_loop() {
    let scheduler = LoopScheduler::new(3, Arc::<Requests>::default());
    let long = scheduler.begin_request();
    long.mark_long();
    // One loop serves, one is parked, one takes the next request: as after a quiet period.
    scheduler.state.lock().parked = 1;
    let second = scheduler.begin_request();
    assert_eq!(scheduler.state.lock().woken, 1);
    // A woken loop is already returning: one is enough.
    second.mark_long();
    assert_eq!(scheduler.state.lock().woken, 1);
    assert_eq!(scheduler.state.lock().long, 2);
    let mut state = scheduler.state.lock();
    (state.parked, state.woken) = (0, 0);
    drop(state);
    drop((second, long));
    assert_eq!(scheduler.state.lock().long, 0);
}

#[test]
fn no_wake_up_is_sent_without_a_parked_loop() {
    let scheduler = LoopScheduler::new(2, Arc::<Requests>::default());
    let (first, second) = (scheduler.begin_request(), scheduler.begin_request());
    first.mark_long();
    second.mark_long();
    assert_eq!(scheduler.state.lock().woken, 0);
    drop((first, second));
}

/// Random lengths, from several senders that wait for their answers, and bursts that do not.
#[test]
fn every_request_is_answered_whatever_their_lengths() {
    let only = std::env::var("SEED").ok().map(|seed| seed.parse::<u64>().unwrap());
    for seed in only.map_or(1..=6, |seed| seed..=seed) {
        println!("SEED={seed}");
        let count = 2 + (seed % 4) as usize;
        let loops = Loops::start(count);
        let sent: usize = thread::scope(|scope| {
            let senders: Vec<_> = (0..4)
                .map(|sender| {
                    let queue = loops.queue.clone();
                    scope.spawn(move || send(&queue, seed * 8 + sender))
                })
                .collect();
            senders.into_iter().map(|sender| sender.join().unwrap()).sum()
        });
        assert_eq!(loops.queue.answered.load(Ordering::SeqCst), sent);
        loops.end();
    }
}

fn send(queue: &Requests, seed: u64) -> usize {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 11
    };
    let mut sent = 0;
    for _ in 0..300 {
        let burst = if next() % 10 == 0 { 8 } else { 1 };
        let waiting: Vec<_> = (0..burst)
            .map(|_| {
                let rounds = match next() % 8 {
                    0 => 200_000,
                    1 => 900,
                    _ => 10,
                };
                queue.put(Request::Work(rounds))
            })
            .collect();
        sent += waiting.len();
        waiting.iter().for_each(|answered| answered.wait());
    }
    sent
}

#[test]
fn reads_leave_the_last_loops() {
    let (_kernel, queue) = UnixStream::pair().unwrap();
    let scheduler = LoopScheduler::new(4, OwnedFd::from(queue));
    let requests: Vec<_> = (0..4)
        .map(|_| {
            let request = scheduler.begin_request();
            (request, ReadQueue::has_to_leave(&scheduler))
        })
        .collect();
    let leaves: Vec<bool> = requests.iter().map(|(_, leaves)| *leaves).collect();
    assert_eq!(leaves, [false, false, true, true]);
}

#[test]
fn stuck_reads_wait_for_each_other_only_beyond_the_threads_and_all_end_with_the_queue() {
    let queue = ReadQueue::default();
    let (began, begins) = mpsc::channel();
    let (release, gate) = mpsc::channel::<()>();
    let gate = Arc::new(Mutex::new(gate));
    let submit = |number: usize| {
        let (began, gate) = (began.clone(), Arc::clone(&gate));
        queue.submit(move || {
            began.send(number).unwrap();
            // Ends when the test drops the other end.
            let _ = gate.lock().recv();
        });
    };
    (0..MAX_READ_THREADS + 3).for_each(submit);
    let mut running: Vec<usize> = (0..MAX_READ_THREADS).map(|_| begins.recv().unwrap()).collect();
    running.sort_unstable();
    assert_eq!(running, (0..MAX_READ_THREADS).collect::<Vec<_>>());
    assert_eq!(queue.0.state.lock().waiting.len(), 3);
    drop(release);
    drop(queue);
    drop(began);
    assert_eq!(begins.iter().count(), 3, "queued reads are served before the end");
}
