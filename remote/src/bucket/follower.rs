//! A reader that goes on with the writer of an archive: from one moment of it to the next.
//!
//! # Invariants
//! FOLLOW-1  Each moment is a file of its own, with the map of one record: nothing that is read of it is of another. Who reads one goes on reading it, as long as what it needs is
//!     there: a day after newer records need it no more (BUCKET-4).
//! FOLLOW-2  Moments come in the order of their records, none of them twice. A record whose predecessor is not the one that was read last, where that is the one before it, is
//!     none of this archive's.
//! FOLLOW-3  What one moment keeps of another lies at the same place of the same object (BUCKET-1).
//!
//! That nothing is found under the next number is an answer only for so long: the record of it may have been there and been removed. So who looked last an hour ago asks for the
//! newest number; by the clock that goes on while the machine sleeps, since a writer elsewhere goes on too.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lockbox::{Error, Result};
use rustix::time::{ClockId, clock_gettime};

use super::layout::{Said, Trailer};
use super::map::Map;
use super::object_ref::{Entry, Hash};
use super::store::Store;
use super::version::{Moment, Reading};
use crate::remote_file::{RemoteFile, told_later};

/// After this time without a list one is asked for.
const LIST_AGAIN: Duration = Duration::from_secs(3600);

pub(crate) struct Follower {
    store: Arc<Store>,
    /// The newest record that was read.
    trailer: Trailer,
    /// Its checkpoint's map, and what lies elsewhere than that says.
    checkpoint: (Option<(Hash, u64)>, Map),
    changes: Vec<Entry>,
    reading: Arc<Reading>,
    file: Arc<RemoteFile>,
    /// The number of the record that the file is of.
    moment: u64,
    /// When the newest number was asked for.
    listed: Duration,
}

/// Since the machine's start.
pub(super) fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.try_into().unwrap_or_default(), time.tv_nsec.try_into().unwrap_or_default())
}

impl Follower {
    /// Of a reader that has `file` open, which has what `reading` has of `moment`; all since `listed`, when the newest number was asked for.
    pub(super) fn of(moment: Moment, reading: Arc<Reading>, file: RemoteFile, listed: Duration) -> Follower {
        let Moment { trailer, checkpoint, changes, .. } = moment;
        let (store, file, moment) = (reading.blocks.store.clone(), Arc::new(file), trailer.sequence);
        Follower {
            store,
            checkpoint: (trailer.checkpoint, checkpoint),
            trailer,
            changes,
            reading,
            file,
            moment,
            listed,
        }
    }

    /// The archive as it was when it was looked at last.
    pub(crate) fn file(&self) -> &Arc<RemoteFile> {
        &self.file
    }

    /// The number of that moment: it grows.
    pub(crate) fn moment(&self) -> u64 {
        self.moment
    }

    /// Looks whether there is a newer moment, which is the one of [`Follower::file`] from then on. One request when there is none.
    ///
    /// # Errors
    /// Those of requests, of which the next call may be answered; `Damaged` for a record that is none, or of another archive.
    pub(crate) fn look(&mut self) -> Result<()> {
        self.look_by(&now)
    }

    /// By a clock. What it says after an answer tells how old that may be: the machine may have slept before it asked.
    pub(super) fn look_by(&mut self, now: &dyn Fn() -> Duration) -> Result<()> {
        let next = self.store.record(&self.reading.blocks.incarnation, self.trailer.sequence + 1)?;
        if let Some((trailer, _)) = &next
            && trailer.before != self.trailer.hash
        {
            return Err(self.torn("a record that does not follow upon the one before it"));
        }
        let (sequence, hash) = match &next {
            None if now().saturating_sub(self.listed) < LIST_AGAIN => return Ok(()),
            None => (self.trailer.sequence, self.trailer.hash),
            Some((trailer, _)) => (trailer.sequence, trailer.hash),
        };
        let listed = now();
        let done = match self.store.newest(&self.reading.blocks.incarnation)? {
            Some(newest) if newest > sequence => {
                let moment = Moment::newest(&self.store, &self.reading.blocks.incarnation)?;
                let moment = moment.ok_or_else(|| self.torn("no record any more"))?;
                if moment.trailer.sequence == sequence + 1 && moment.trailer.before != hash {
                    return Err(self.torn("a record that does not follow upon the one before it"));
                }
                self.go_to(moment)
            }
            Some(newest) if newest == sequence => match next {
                None => Ok(()),
                Some((trailer, said)) => {
                    let moment = self.moment_of(trailer, said)?;
                    self.go_to(moment)
                }
            },
            _ => Err(self.torn("an older state than it had")),
        };
        // Whoever could not go there has not looked: by the next look the record behind this moment may be gone.
        if done.is_ok() {
            self.listed = listed;
        }
        done
    }

    fn torn(&self, what: &str) -> Error {
        Error::damaged(format!("{}: it has {what}", self.store.name))
    }

    fn moment_of(&self, trailer: Trailer, said: Said) -> Result<Moment> {
        let known = (self.checkpoint.0, &self.checkpoint.1);
        Moment::after(&self.store, &self.reading.blocks.incarnation, known, trailer, said)
    }

    fn go_to(&mut self, moment: Moment) -> Result<()> {
        let is_same = moment.trailer.checkpoint == self.checkpoint.0
            && moment.trailer.length == self.trailer.length
            && moment.changes == self.changes;
        // Of a writer that came, went, or had nothing to say.
        if is_same {
            self.reading.blocks.sequence.store(moment.trailer.sequence, Ordering::Release);
            self.trailer = moment.trailer;
            return Ok(());
        }
        if moment.trailer.length == 0 {
            return Err(self.torn("nothing in it any more"));
        }
        let reading = Arc::new(Reading::of(self.store.clone(), self.reading.blocks.incarnation, &moment));
        let start = reading.start_after(&self.reading, self.file.start());
        let start = start.map_err(|trouble| told_later(&self.store.name, trouble))?;
        let file = self.file.succeeded(Box::new(reading.clone()), reading.version(), start);
        let Moment { trailer, checkpoint, changes, .. } = moment;
        self.checkpoint = (trailer.checkpoint, checkpoint);
        (self.reading, self.file, self.changes, self.moment) = (reading, Arc::new(file), changes, trailer.sequence);
        self.trailer = trailer;
        Ok(())
    }
}
