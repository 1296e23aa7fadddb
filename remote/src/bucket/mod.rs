//! Archives that live in an object store: below one prefix a log of records, and segments and checkpoints that those name.
//!
//! # Invariants
//! BUCKET-1  Every object is made once, under a name that nothing else is ever given, and is never changed. So an answer that comes late, twice or of a process
//!     that is gone harms nothing, and what was read once is never stale.
//! BUCKET-2  The archive is what its newest record says: one object, so a commit is there as a whole or not at all. Its success is the store's word about
//!     that object; no other answer is taken for one (PROOF-1).
//! BUCKET-3  At most one writer's commits follow upon another: each number is taken once, records of writers that came are never removed, and a writer whose
//!     number was taken commits nothing more.
//! BUCKET-4  An object that a record names is removed only when a durable one has called it dead for as long as a reader may look at an older one, and no name is used again.
//!     What no record names is taken back by who made it, or called dead by the next record.
//! BUCKET-5  What comes from the store has bounds, and is compared with the hash that names it before it is believed to be whole; whether it is authentic is for the tags of
//!     the archive.

mod azure;
mod block_cache;
mod blocks;
mod directory;
mod follower;
mod inventory;
mod layout;
mod map;
mod metered;
mod object_names;
mod object_ref;
mod objects;
mod owner;
mod parallel;
mod partial_reader;
mod probe;
mod response;
mod s3;
mod session;
mod spool;
mod spool_replay;
mod store;
#[cfg(test)]
mod tests;
mod upload;
mod version;
mod writable;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use lockbox::storage::Storage;
use lockbox::{Error, Result};

pub(crate) use self::azure::Azure;
pub(crate) use self::directory::Directory;
pub(crate) use self::follower::Follower;
pub use self::inventory::{Amount, Collected, Examined, Newest, Step, Stored};
pub(crate) use self::inventory::{archives, compare, examine};
use self::layout::Owner;
pub(crate) use self::objects::Objects;
use self::partial_reader::Salvage;
pub(crate) use self::probe::probe;
pub(crate) use self::s3::S3;
use self::session::Session;
pub use self::spool::Unsent;
use self::spool::{Spool, Spooled};
pub(crate) use self::spool::{forget, unsent};
use self::store::Store;
use self::upload::Staged;
use self::version::{Moment, Reading};
pub(crate) use self::writable::Living;
use crate::Options;
use crate::metrics::{Counted, Counts};
use crate::range_source::Trouble;
use crate::remote_file::RemoteFile;

/// How long somebody who leaves without a backup waits for the removal of what went up.
const RETREAT: Duration = Duration::from_secs(5);

/// The archive whose objects these are, as its newest record says, with who goes on from there. None when there is no archive.
///
/// # Errors
/// As [`crate::open`].
pub(crate) fn open(objects: Box<dyn Objects>, name: String, options: &Options) -> Result<Option<Follower>> {
    let Some(Found { moment, reading, counts, listed }) = find(objects, name, options)? else { return Ok(None) };
    let (name, reading) = (reading.blocks.store.name.clone(), Arc::new(reading));
    let file = RemoteFile::of(Box::new(reading.clone()), name, options, counts)?;
    Ok(Some(Follower::of(moment, reading, file, listed)))
}

/// The same of which objects may be gone, as it is now: see [`Salvage`].
///
/// # Errors
/// As of [`open`].
pub(crate) fn salvage(objects: Box<dyn Objects>, name: String, options: &Options) -> Result<Option<RemoteFile>> {
    // Whoever reads the archive as a whole is not to find zeros there.
    let options = Options { cache_bytes: Some(0), ..options.clone() };
    let Some(Found { reading, counts, .. }) = find(objects, name, &options)? else { return Ok(None) };
    let name = reading.blocks.store.name.clone();
    RemoteFile::of(Box::new(Salvage::of(reading)), name, &options, counts).map(Some)
}

/// The archive as a writer of this host made it and the store does not have it.
///
/// # Errors
/// As of [`open`]; `Io` of the kind `NotFound` when nothing is kept of the archive that is there.
pub(crate) fn open_unsent(objects: Box<dyn Objects>, name: String, options: &Options) -> Result<RemoteFile> {
    let nothing = || Error::request(format!("{name}: nothing is kept here"), std::io::ErrorKind::NotFound);
    let directory = options.spool_directory.as_deref().ok_or_else(nothing)?;
    let store = Store::new(objects, name.clone(), options.timeout);
    let spool = Spool::of_last(directory, &name, &store.known()?)?;
    // The store's cache has what the store has under the numbers that these records have.
    let options = Options { cache_bytes: Some(0), ..options.clone() };
    let objects = Spooled { inner: store.objects, spool: Arc::new(OnceLock::from(spool)) };
    let found = find(Box::new(objects), name.clone(), &options)?.ok_or_else(nothing)?;
    RemoteFile::of(Box::new(found.reading), name, &options, found.counts)
}

/// An archive as its newest record says.
struct Found {
    moment: Moment,
    reading: Reading,
    counts: Arc<Counts>,
    /// When it was looked for.
    listed: Duration,
}

fn find(objects: Box<dyn Objects>, name: String, options: &Options) -> Result<Option<Found>> {
    let counts = Arc::new(Counts::default());
    let objects = Counted { counts: counts.clone(), inner: objects };
    let store = Arc::new(Store::new(Box::new(objects), name, options.timeout));
    let listed = follower::now();
    let (incarnation, number) = match store.look() {
        Ok(Some(found)) => found?,
        Ok(None) => return Ok(None),
        Err(Trouble::Refused(_)) if store.objects.hides() => return Ok(None),
        Err(trouble) => return Err(store.told(trouble)),
    };
    let moment = Moment::newest_of(&store, &incarnation, number)?.filter(|moment| moment.trailer.length > 0);
    let Some(moment) = moment else {
        let why = "a writer came and has not committed anything yet";
        return Err(Error::NotArchive(format!("{}: {why}", store.name)));
    };
    let reading = Reading::of(store, incarnation, &moment);
    Ok(Some(Found { moment, reading, counts, listed }))
}

/// Removes what is needed no more, as a writer who comes, cleans and goes.
///
/// # Errors
/// As of [`crate::write`]; `Io` of the kind `NotFound` where there is no archive.
pub(crate) fn collect(
    objects: Box<dyn Objects>,
    name: String,
    options: &Options,
    take_over: bool,
) -> Result<Collected> {
    let store = for_writing(objects, name, options);
    Session::open_known(store, Owner::here(), take_over)?.collect()
}

/// With what this host keeps for it.
fn for_writing(objects: Box<dyn Objects>, name: String, options: &Options) -> Arc<Store> {
    Arc::new(Store::new(objects, name, options.timeout).with_spool_in(options.spool_directory.as_deref()))
}

/// A writer of an archive in a bucket: nobody sees any of what is written before [`Bucket::publish`].
pub struct Bucket {
    session: Session,
    options: Options,
    staged: Option<Arc<Staged>>,
    /// There is nothing left to do for it.
    gone: bool,
}

impl Bucket {
    /// Comes as a writer to the archive there, or to the empty prefix.
    pub(crate) fn open(objects: Box<dyn Objects>, name: String, options: &Options, take_over: bool) -> Result<Bucket> {
        let mut session = Session::open(for_writing(objects, name, options), Owner::here(), take_over)?;
        session.clean();
        Ok(Bucket { session, options: options.clone(), staged: None, gone: false })
    }

    /// What its user should know about its coming.
    pub fn notice(&self) -> Option<&str> {
        self.session.notice()
    }

    /// What is there now, to be written to; None for an empty prefix.
    ///
    /// # Errors
    /// Those of requests.
    pub fn existing(&mut self) -> Result<Option<Arc<dyn Storage>>> {
        if self.session.length() == 0 {
            return Ok(None);
        }
        self.stage(false).map(Some)
    }

    /// An empty archive's place, to be filled. What was written before is given up.
    ///
    /// # Errors
    /// Those of requests.
    pub fn fresh(&mut self) -> Result<Arc<dyn Storage>> {
        self.stage(true)
    }

    fn stage(&mut self, empty: bool) -> Result<Arc<dyn Storage>> {
        self.take_back();
        let staged = Arc::new(Staged::new(&self.session, &self.options, empty)?);
        self.staged = Some(staged.clone());
        Ok(staged)
    }

    /// Gives up what was written. Whether the store answers.
    fn take_back(&mut self) -> bool {
        let Some(staged) = self.staged.take() else { return true };
        let (made, sending) = staged.abandon();
        self.session.take_back(made, sending, Instant::now() + RETREAT)
    }

    /// Returns when nothing is under way.
    #[cfg(test)]
    fn settled(&self) {
        if let Some(staged) = &self.staged {
            staged.settle(false).unwrap();
        }
    }

    /// Makes the archive what was written, and goes: durable when this returns, all of it or nothing.
    ///
    /// # Errors
    /// `InUse` when another writer took over; those of requests. Then the archive is as it was, or as it was to be when the answer was lost.
    pub fn publish(mut self) -> Result<()> {
        let Some(staged) = self.staged.take() else { return Ok(()) };
        let done = staged.publish(&mut self.session);
        // A record whose fate is not known may name what went up.
        self.gone = done.is_ok() || self.session.is_undecided();
        self.staged = Some(staged);
        done
    }
}

/// Without having published: the archive is as it was, and the next writer finds nobody here. Somebody waits for it, perhaps without a network: each request is made once,
/// and none after one that nobody answered. Without the last record the next writer finds what is left.
impl Drop for Bucket {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        self.session.store.hurry();
        if self.take_back() {
            let _ = self.session.close();
        }
    }
}
