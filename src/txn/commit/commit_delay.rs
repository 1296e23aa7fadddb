//! Commit delay: how long the leader waits for more callers (group-commit window).
//!
//! Without waiting, the first of n callers that were served together leads the next commit alone
//! while the others arrive, so commits serve one caller and n - 1 in turn. With a wait of half a
//! commit, each commit serves all n.

use std::time::Duration;

/// Divisor of the last commit's duration: the delay is longer than programs need to write again,
/// and shorter than another commit.
const SHARE: u32 = 2;
/// A slow medium does not keep a single caller waiting for longer.
const MOST: Duration = Duration::from_millis(5);
/// Commits without a wait after one in vain, doubled with each that follows.
const PAUSE: (u32, u32) = (4, 64);

#[derive(Debug, Default)]
pub(super) struct CommitDelay {
    /// Callers of the last commit, and callers that arrived while it ran.
    expected: u64,
    took: Duration,
    /// Commits that begin without waiting.
    paused: u32,
    pause: u32,
}

impl CommitDelay {
    /// Returns the number of callers to wait for and the time limit, when `here` callers want the
    /// commit that is about to begin.
    pub(super) fn plan(&mut self, here: u64) -> Option<(u64, Duration)> {
        if here >= self.expected {
            return None;
        }
        if self.paused > 0 {
            self.paused -= 1;
            return None;
        }
        Some((self.expected, (self.took / SHARE).min(MOST)))
    }

    /// Records the result of a wait.
    pub(super) fn waited(&mut self, in_vain: bool) {
        self.pause = if in_vain { (self.pause * 2).clamp(PAUSE.0, PAUSE.1) } else { 0 };
        self.paused = self.pause;
    }

    /// A commit ended that served so many callers, while others came for the next one.
    pub(super) fn ended(&mut self, served: u64, came: u64, took: Duration) {
        self.expected = served + came;
        self.took = took;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOK: Duration = Duration::from_micros(600);

    #[test]
    fn who_came_together_is_waited_for_and_who_comes_alone_never_waits() {
        let mut joining = CommitDelay::default();
        assert_eq!(joining.plan(1), None);
        joining.ended(1, 0, TOOK);
        assert_eq!(joining.plan(1), None);
        joining.ended(1, 3, TOOK);
        assert_eq!(joining.plan(3), Some((4, TOOK / 2)));
        joining.waited(false);
        joining.ended(4, 0, TOOK);
        assert_eq!(joining.plan(4), None, "all are here");
        assert_eq!(joining.plan(1), Some((4, TOOK / 2)));
        joining.ended(4, 0, Duration::from_secs(1));
        assert_eq!(joining.plan(1), Some((4, MOST)));
    }

    #[test]
    fn waits_in_vain_become_rare() {
        let mut joining = CommitDelay::default();
        joining.ended(1, 1, TOOK);
        let mut waits = 0;
        for _ in 0..1000 {
            if joining.plan(1).is_some() {
                waits += 1;
                joining.waited(true);
            }
            joining.ended(1, 1, TOOK);
        }
        assert!(waits < 25, "{waits}");
    }
}
