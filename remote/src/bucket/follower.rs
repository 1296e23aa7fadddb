//! Follower: a reader that moves to newer versions as the writer commits.
//!
//! # Invariants
//! FOLLOW-1  Each version is a file of its own, with the map of one record: a read never mixes
//!     versions. Readers of an old version can continue as long as its objects exist: a day after
//!     newer records stopped needing them (BUCKET-4).
//! FOLLOW-2  Versions appear in the order of their records, none twice. A record that directly
//!     follows the last one read must name it as its predecessor, or it belongs to another archive.
//! FOLLOW-3  Content that one version shares with another is at the same position of the same
//!     object (BUCKET-1).
//!
//! The absence of the next number is conclusive only for a limited time: its record may have been
//! written and removed again. A follower that last listed an hour ago therefore asks for the newest
//! number. The clock includes suspended time, because a remote writer continues while this machine
//! sleeps.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lockbox::{Error, Result};
use rustix::time::{ClockId, clock_gettime};

use super::layout::{RecordBody, Trailer};
use super::map::BlockMap;
use super::object_ref::{Hash, MapEntry};
use super::store::BucketStore;
use super::version::{BucketVersion, VersionReader};
use crate::remote_file::RemoteFile;

/// Interval after which the newest number is listed again.
const LIST_INTERVAL: Duration = Duration::from_secs(3600);

pub(crate) struct Follower {
    store: Arc<BucketStore>,
    /// Newest record read.
    trailer: Trailer,
    /// The checkpoint of that record with its map, and the changes since.
    checkpoint: (Option<(Hash, u64)>, BlockMap),
    changes: Vec<MapEntry>,
    reader: Arc<VersionReader>,
    file: Arc<RemoteFile>,
    /// Sequence of the record that the file shows.
    sequence: u64,
    /// Time of the last list.
    listed: Duration,
}

/// Returns the time since boot, including suspended time.
pub(super) fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.try_into().unwrap_or_default(), time.tv_nsec.try_into().unwrap_or_default())
}

impl Follower {
    /// Creates a follower of an open `file` with its `reader` of a version. `listed` is the time
    /// of the list before.
    pub(super) fn new(
        moment: BucketVersion,
        reader: Arc<VersionReader>,
        file: RemoteFile,
        listed: Duration,
    ) -> Follower {
        let BucketVersion { trailer, checkpoint, changes, .. } = moment;
        let (store, file, sequence) = (reader.blocks.store.clone(), Arc::new(file), trailer.sequence);
        Follower {
            store,
            checkpoint: (trailer.checkpoint, checkpoint),
            trailer,
            changes,
            reader,
            file,
            sequence,
            listed,
        }
    }

    /// Returns the archive at the version of the last poll.
    pub(crate) fn file(&self) -> &Arc<RemoteFile> {
        &self.file
    }

    /// Returns the sequence of that version; it increases.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Polls for a newer version, which [`Follower::file`] returns from then on. Costs one request
    /// if there is none.
    ///
    /// # Errors
    /// Errors of requests, after which a later call may succeed; `Damaged` for an invalid record,
    /// or one of another archive.
    pub(crate) fn poll(&mut self) -> Result<()> {
        self.poll_by(&now)
    }

    /// Polls with a given clock. The clock is read after each response, because the machine may
    /// have been suspended before the request.
    pub(super) fn poll_by(&mut self, now: &dyn Fn() -> Duration) -> Result<()> {
        let next = self.store.read_record(&self.reader.blocks.incarnation, self.trailer.sequence + 1)?;
        if let Some((trailer, _)) = &next
            && trailer.previous != self.trailer.hash
        {
            return Err(self.inconsistent("a record that does not follow upon the one before it"));
        }
        let (sequence, hash) = match &next {
            None if now().saturating_sub(self.listed) < LIST_INTERVAL => return Ok(()),
            None => (self.trailer.sequence, self.trailer.hash),
            Some((trailer, _)) => (trailer.sequence, trailer.hash),
        };
        let listed = now();
        let done = match self.store.newest_sequence(&self.reader.blocks.incarnation)? {
            Some(newest) if newest > sequence => {
                let moment = BucketVersion::load_newest(&self.store, &self.reader.blocks.incarnation)?;
                let moment = moment.ok_or_else(|| self.inconsistent("no record any more"))?;
                if moment.trailer.sequence == sequence + 1 && moment.trailer.previous != hash {
                    return Err(self.inconsistent("a record that does not follow upon the one before it"));
                }
                self.switch_to(moment)
            }
            Some(newest) if newest == sequence => match next {
                None => Ok(()),
                Some((trailer, said)) => {
                    let moment = self.load_version(trailer, said)?;
                    self.switch_to(moment)
                }
            },
            _ => Err(self.inconsistent("an older state than it had")),
        };
        // A failed switch does not count as a list: the record after this version may be gone by
        // the next poll.
        if done.is_ok() {
            self.listed = listed;
        }
        done
    }

    fn inconsistent(&self, what: &str) -> Error {
        Error::damaged(format!("{}: it has {what}", self.store.name))
    }

    fn load_version(&self, trailer: Trailer, said: RecordBody) -> Result<BucketVersion> {
        let known = (self.checkpoint.0, &self.checkpoint.1);
        BucketVersion::load_reusing(&self.store, &self.reader.blocks.incarnation, known, trailer, said)
    }

    fn switch_to(&mut self, moment: BucketVersion) -> Result<()> {
        let is_same = moment.trailer.checkpoint == self.checkpoint.0
            && moment.trailer.length == self.trailer.length
            && moment.changes == self.changes;
        // Record of an open, a close or an empty commit.
        if is_same {
            self.reader.blocks.sequence.store(moment.trailer.sequence, Ordering::Release);
            self.trailer = moment.trailer;
            return Ok(());
        }
        if moment.trailer.length == 0 {
            return Err(self.inconsistent("nothing in it any more"));
        }
        let reader = Arc::new(VersionReader::new(self.store.clone(), self.reader.blocks.incarnation, &moment));
        let start = reader.start_reusing(&self.reader, self.file.start());
        let start = start.map_err(|error| error.into_deferred_error(&self.store.name))?;
        let file = self.file.with_version(Box::new(reader.clone()), reader.version(), start);
        let BucketVersion { trailer, checkpoint, changes, .. } = moment;
        self.checkpoint = (trailer.checkpoint, checkpoint);
        (self.reader, self.file, self.changes, self.sequence) = (reader, Arc::new(file), changes, trailer.sequence);
        self.trailer = trailer;
        Ok(())
    }
}
