//! Tries slots in order, and derives the keys of several at once where memory and processors allow
//! it.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread::{self, Builder};

/// Cost and memory of one derivation.
#[derive(Clone, Copy)]
pub(super) struct Price {
    /// In proportion to its time.
    pub(super) cost: u64,
    pub(super) memory_kib: u32,
}

/// Trials that are left, the cheapest first.
pub(super) struct Trials<'a, T> {
    left: &'a [T],
    /// Returns None for a trial without a derivation: it runs alone, since it may prompt the user.
    price: fn(&T) -> Option<Price>,
    /// Memory of all derivations that run side by side.
    together_kib: u64,
    processors: usize,
    /// True after the first derivation was tried.
    begun: bool,
    /// Cost that ran concurrently with other cost so far.
    ahead: u64,
}

impl<'a, T: Sync> Trials<'a, T> {
    pub(super) fn new(all: &'a [T], price: fn(&T) -> Option<Price>, together_kib: u64) -> Trials<'a, T> {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        Trials { left: all, price, together_kib, processors, begun: false, ahead: 0 }
    }

    /// Tries the next group, as many as may run at once, and returns each with its result.
    pub(super) fn next<R: Send>(&mut self, attempt: impl Fn(&T) -> R + Sync) -> Option<Vec<(&'a T, R)>> {
        let (first, others) = self.group()?.split_first()?;
        let attempt = &attempt;
        Some(thread::scope(|scope| {
            let start = |one| Builder::new().name("derivation".into()).spawn_scoped(scope, move || attempt(one));
            let started: Vec<_> = others.iter().map(|one| (one, start(one))).collect();
            let mut tried = vec![(first, attempt(first))];
            tried.extend(started.into_iter().map(|(one, thread)| match thread {
                Ok(thread) => (one, thread.join().unwrap_or_else(|panic| resume_unwind(panic))),
                Err(_) => (one, attempt(one)),
            }));
            tried
        }))
    }

    /// Takes the next group to run. A derivation cannot be stopped, so a right secret waits for its
    /// whole group. The group contains only derivations that end by the time at which the first one
    /// would end if all ran one after the other.
    ///
    /// The first of all runs alone: concurrent derivations share the memory bandwidth and take
    /// longer each, and most archives are opened by the first.
    fn group(&mut self) -> Option<&'a [T]> {
        let mut count = 1;
        if let Some(first) = (self.price)(self.left.first()?) {
            let mut memory = 0;
            let mut fits = |price: Price| {
                memory += u64::from(price.memory_kib);
                memory <= self.together_kib && price.cost <= first.cost + self.ahead
            };
            let most = if self.begun { self.processors } else { 1 };
            self.begun = true;
            let beside = self.left.iter().take(most).map_while(self.price);
            count = beside.take_while(|price| fits(*price)).count().max(1);
        }
        let (group, left) = self.left.split_at(count);
        let costs = group.iter().filter_map(self.price).map(|price| price.cost);
        // The dearest is the last one.
        self.ahead += costs.rev().skip(1).sum::<u64>();
        self.left = left;
        Some(group)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    use super::*;

    const MIB: u32 = 1024;

    fn price(slot: &Option<(u64, u32)>) -> Option<Price> {
        slot.map(|(cost, mib)| Price { cost, memory_kib: mib * MIB })
    }

    fn trials(slots: &[Option<(u64, u32)>], together_mib: u32, processors: usize) -> Trials<'_, Option<(u64, u32)>> {
        Trials { processors, ..Trials::new(slots, price, u64::from(together_mib * MIB)) }
    }

    /// Returns the number of concurrent trials, group by group.
    fn groups(slots: &[Option<(u64, u32)>], together_mib: u32, processors: usize) -> Vec<usize> {
        let mut trials = trials(slots, together_mib, processors);
        std::iter::from_fn(|| trials.group().map(<[_]>::len)).collect()
    }

    #[test]
    fn derivations_run_side_by_side_as_processors_and_memory_allow() {
        let slots = [Some((1536, 512)); 5];
        assert_eq!(groups(&slots, 4096, 2), [1, 2, 2]);
        assert_eq!(groups(&slots, 4096, 16), [1, 4]);
        assert_eq!(groups(&slots, 1535, 16), [1, 2, 2]);
        assert_eq!(groups(&slots, 1023, 16), [1; 5]);
        assert_eq!(groups(&slots, 0, 16), [1; 5], "one runs whatever it takes");
        assert_eq!(groups(&slots, 4096, 1), [1; 5]);
        assert_eq!(groups(&[], 4096, 2), [0; 0]);
    }

    #[test]
    fn what_may_ask_somebody_is_tried_alone_and_before() {
        let slots = [None, None, Some((3, 1)), Some((3, 1)), Some((3, 1))];
        assert_eq!(groups(&slots, 4096, 8), [1, 1, 1, 2]);
    }

    /// In units of cost, for any slots: the time at which a right secret is reported, when its
    /// group has ended.
    #[test]
    fn no_right_secret_is_told_later_than_one_after_the_other() {
        let mut states = 1u64;
        let mut random = |below: u64| {
            states = states.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (states >> 33) % below
        };
        let mut together = 0;
        for round in 0..2000 {
            let mut costs: Vec<u64> = (0..=random(12)).map(|_| 1 + random(4).pow(4)).collect();
            costs.sort_unstable();
            let slots: Vec<_> = costs.iter().map(|&cost| Some((cost, cost as u32))).collect();
            let (most, processors) = (random(200) as u32, 1 + random(8) as usize);
            let mut trials = trials(&slots, most, processors);
            let (mut ended, mut in_turn, mut tried) = (0, 0, 0);
            while let Some(group) = trials.group() {
                let memory: u64 = group.iter().flatten().map(|&(cost, _)| cost).sum();
                assert!(group.len() == 1 || memory <= u64::from(most), "round {round}: {costs:?}");
                assert!(group.len() <= processors);
                ended += group.iter().flatten().map(|&(cost, _)| cost).max().unwrap();
                assert!(ended <= in_turn + costs[tried], "round {round}: {costs:?}");
                in_turn += memory;
                tried += group.len();
                together += usize::from(group.len() > 1);
            }
            assert_eq!(tried, costs.len());
        }
        assert!(together > 1000, "few ran side by side: {together}");
    }

    #[test]
    fn a_group_runs_at_once_and_answers_in_order() {
        let slots = [Some((1, 1)), Some((1, 1)), Some((1, 2)), Some((1, 3))];
        let (running, changed) = (Mutex::new(0), Condvar::new());
        let mut trials = trials(&slots, 6, 3);
        assert_eq!(trials.next(|_| ()).unwrap().len(), 1);
        let tried = trials.next(|slot| {
            *running.lock().unwrap() += 1;
            changed.notify_all();
            // Ends when all are there.
            let deadline = Duration::from_secs(60);
            let waited = changed.wait_timeout_while(running.lock().unwrap(), deadline, |running| *running < 3);
            assert!(!waited.unwrap().1.timed_out(), "they do not run at once");
            slot.unwrap().1
        });
        let answers: Vec<u32> = tried.unwrap().into_iter().map(|(_, answer)| answer).collect();
        assert_eq!(answers, [1, 2, 3]);
        assert!(trials.next(|_| ()).is_none());
    }
}
