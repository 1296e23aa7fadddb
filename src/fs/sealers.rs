//! Writes the frames of a large layer on several threads at once: whoever waits for a commit waits for all processors, not for one.

use std::thread;

use parking_lot::Mutex;

use super::batch::Plan;
use super::layer::Frame;
use super::plan::Planner;
use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::txn::{Reservation, UnnamedPages};

/// Frames for each thread at least: one takes 20 us and more, starting a thread about 50.
const ENOUGH: usize = 32;

/// Frames that a thread takes at once.
const STRIDE: usize = 8;

/// More threads would wait for the space map and for the host.
const MOST: usize = 8;

/// What the threads share.
struct Work<'a> {
    next: usize,
    room: &'a mut Option<Reservation>,
    written: &'a mut UnnamedPages,
    /// By the index of the first frame.
    done: Vec<(usize, Plan)>,
    failed: Option<Error>,
}

/// How many threads this machine runs at once.
pub(super) fn processors() -> usize {
    thread::available_parallelism().map_or(1, |count| count.get().min(MOST))
}

/// As [`Planner::frame`] for each of the frames, ascending.
pub(super) fn write_frames(
    planner: &mut Planner<'_>,
    plan: &mut Plan,
    inode: &InodeValue,
    frames: &[(u64, &Frame)],
) -> Result<()> {
    let threads = planner.threads.min(frames.len() / ENOUGH);
    if threads < 2 {
        return frames.iter().try_for_each(|(number, frame)| planner.frame(plan, inode, *number, frame));
    }
    let (volume, options, view) = (planner.volume, planner.options, planner.view);
    let (room, written) = (&mut *planner.room, &mut planner.written);
    let shared = Mutex::new(Work { next: 0, room, written, done: Vec::new(), failed: None });
    let (ino, end) = (plan.ino, plan.end);
    let seal = || {
        loop {
            let mut work = shared.lock();
            let first = work.next;
            if work.failed.is_some() || first >= frames.len() {
                return;
            }
            let mine = &frames[first..(first + STRIDE).min(frames.len())];
            work.next = first + mine.len();
            let held = mine.iter().map(|(_, frame)| frame.held).sum();
            let mut room = work.room.as_mut().map(|room| room.split(held));
            drop(work);
            let mut part = Plan::new(ino, end);
            let written = UnnamedPages::new(volume);
            let mut own = Planner { volume, options, view, room: &mut room, threads: 1, written };
            let result = mine.iter().try_for_each(|(number, frame)| own.frame(&mut part, inode, *number, frame));
            let written = own.written;
            let mut work = shared.lock();
            work.written.absorb(written);
            if let (Some(all), Some(left)) = (work.room.as_mut(), room) {
                all.absorb(left);
            }
            match result {
                Ok(()) => work.done.push((first, part)),
                Err(error) => drop(work.failed.get_or_insert(error)),
            }
        }
    };
    thread::scope(|scope| {
        // This thread is one of them, and does the work of those that cannot be started.
        for _ in 1..threads {
            if thread::Builder::new().name("sealer".into()).spawn_scoped(scope, seal).is_err() {
                break;
            }
        }
        seal();
    });
    let Work { mut done, failed, .. } = shared.into_inner();
    done.sort_unstable_by_key(|(first, _)| *first);
    for (_, part) in done {
        plan.pieces.extend(part.pieces);
        plan.cuts += part.cuts;
        plan.fills |= part.fills;
    }
    failed.map_or(Ok(()), Err)
}
