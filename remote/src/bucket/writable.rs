//! An archive that lives in a bucket, open for writing: each barrier is one record.
//!
//! # Invariants
//! LIVING-1  A barrier succeeds when the store has said that its record is there, and never else. What the record says is then found by whoever looks, from anywhere
//!     and with nothing but the bucket.
//! LIVING-2  A barrier that fails leaves the archive as the last one made it, or as this one was to make it. The second can only be when the store did not say what
//!     became of the record, which the same bytes were sent for as long as there was time: that is told. In either case nothing is written from then on, so no later
//!     record can build upon one that nobody knows of. For who insists (a mount) there is no such end: the barrier waits with the frozen record until the store has said
//!     what became of it, or until this process goes, and then the record lies on this host.
//! LIVING-3  Once another writer came no barrier succeeds, and the archive is the other one's: it can still be read as it was.
//! LIVING-4  Who goes takes back what no record names, and says in a last record that nobody writes here any more. That nobody heard it costs nothing but a question:
//!     the next writer on another machine has to say that it takes over.
//! LIVING-5  What is to take the place of all that is there goes up unnamed, and one record names it, with the last word of its writer (STORAGE-5): before that record it
//!     is garbage, and what was there is needed; from then on what was there is dead, and stays for its day for whoever reads it.
//! LIVING-6  Whoever leaves (a mount that nobody uses any more) waits for the store once more. What that does not take then lies on this host, in the order in which the next
//!     writer sends it (SPOOL-1 to 3), and the barrier returns: nobody is left who could tell others that it is durable. What is remembered of the archive does not have
//!     it ([`Storage::kept_back`]).

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockbox::storage::{Storage, Successor};
use lockbox::{Error, Result};
use parking_lot::Mutex;

use super::layout::{Kind, Owner};
use super::object_ref::Id;
use super::objects::Objects;
use super::session::Session;
use super::spool::Spool;
use super::store::Store;
use super::upload::Staged;
use super::{RETREAT, for_writing};
use crate::Options;
use crate::metrics::{Counted, Counts, Traffic};

/// How often a writer removes what has been dead for a day, and how much then: more than one makes dead that commits each second.
const CLEANED: Duration = Duration::from_secs(20);
const CLEANED_AT_ONCE: usize = 32;

/// Blocks that who goes writes anew because little of their objects is needed, beside as many as it wrote: 64 MiB.
const GATHERED: u64 = 64 << 8;

/// See above.
pub(crate) struct Living {
    pub(super) staged: Staged,
    options: Options,
    store: Arc<Store>,
    session: Mutex<Session>,
    /// What was to take the place of this and did not: what went up of it, and what was being sent.
    given_up: Mutex<(Vec<Id>, Vec<Id>)>,
    /// When dead objects were looked for last.
    pub(super) cleaned: Mutex<Instant>,
    counts: Arc<Counts>,
}

impl Living {
    /// Comes as a writer to the archive there.
    ///
    /// # Errors
    /// As of [`crate::change`].
    pub(crate) fn open(objects: Box<dyn Objects>, name: String, options: &Options, take_over: bool) -> Result<Living> {
        let counts = Arc::new(Counts::default());
        let objects = Counted { counts: counts.clone(), inner: objects };
        let store = for_writing(Box::new(objects), name, options);
        let mut session = Session::open_known(store.clone(), Owner::here(), take_over)?;
        if session.length() == 0 {
            session.close()?;
            let name = &store.name;
            return Err(Error::NotArchive(format!("{name}: a writer came and has not committed anything yet")));
        }
        session.clean();
        Living::of(session, options, counts)
    }

    pub(super) fn of(session: Session, options: &Options, counts: Arc<Counts>) -> Result<Living> {
        let staged = Staged::new(&session, options, false)?;
        let (store, cleaned) = (session.store.clone(), Mutex::new(Instant::now()));
        Ok(Living {
            staged,
            options: options.clone(),
            store,
            session: Mutex::new(session),
            given_up: Mutex::default(),
            cleaned,
            counts,
        })
    }

    /// From now on a barrier waits for as long as the store does not answer, and what was written with it: nobody is told that it failed who could be told later that it
    /// succeeded. Reads go on.
    pub(crate) fn insist(&self) {
        self.store.insist();
    }

    /// From now on a barrier waits for the store once more. What it does not take is kept on this host, and the barrier has done what it can: nobody is there any more to
    /// whom durable means more than that. The next writer here sends it (SPOOL-2).
    pub(crate) fn leave(&self) {
        self.store.leave();
    }

    /// What its user should know about its coming.
    pub(crate) fn notice(&self) -> Option<String> {
        self.session.lock().notice().map(str::to_owned)
    }

    /// What was asked of the store.
    pub(crate) fn traffic(&self) -> Traffic {
        Traffic { unsent: self.unsent(), ..self.counts.traffic(0) }
    }

    fn unsent(&self) -> u64 {
        self.store.spool().map_or(0, Spool::bytes)
    }

    /// LIVING-2: what is known after a failure.
    fn told(session: &Session, error: Error) -> Error {
        match error {
            Error::Io { context, source } if session.is_undecided() => {
                let known = "whether the last change is in the archive is not known; all before it is";
                Error::Io { context: format!("{context}; {known}"), source }
            }
            error => error,
        }
    }

    /// LIVING-4. A barrier that waits for the store makes its last attempts.
    pub(crate) fn go(&self) {
        self.store.hurry();
        let session = &mut *self.session.lock();
        // Whoever sends what is kept here says the last word, too.
        if self.store.spool().is_some_and(Spool::holds_back) {
            return;
        }
        // A record whose fate is not known may name what went up last.
        if session.is_undecided() {
            return;
        }
        let (made, sending) = std::mem::take(&mut *self.given_up.lock());
        if !session.take_back(made, sending, Instant::now() + RETREAT) || session.is_over() {
            return;
        }
        if self.staged.is_committed() {
            let most = GATHERED + self.staged.written();
            let gathered = self.staged.gather_sparse(session.most_runs(), most);
            let gathered = gathered.and_then(|()| self.staged.gather_first());
            let closed = gathered.and_then(|()| self.staged.commit(session, Kind::Close));
            if closed.is_ok() || session.is_over() {
                return;
            }
            if let Err(error) = closed {
                tracing::info!("{}: it is left as it was last written: {error}", self.store.name);
            }
        }
        let (made, sending) = self.staged.abandon();
        if session.take_back(made, sending, Instant::now() + RETREAT) {
            let _ = session.close();
        }
    }
}

impl Drop for Living {
    fn drop(&mut self) {
        self.go();
    }
}

/// LIVING-5
struct Next<'a> {
    living: &'a Living,
    staged: Arc<Staged>,
    /// Whether a record may name what went up.
    named: bool,
}

impl Successor for Next<'_> {
    fn storage(&self) -> Arc<dyn Storage> {
        self.staged.clone()
    }

    fn publish(mut self: Box<Self>) -> Result<()> {
        let living = self.living;
        let mut session = living.session.lock();
        let done = self.staged.publish(&mut session);
        self.named = done.is_ok() || session.is_undecided();
        if self.named {
            living.staged.end();
        }
        done.map_err(|error| Living::told(&session, error))
    }
}

impl Drop for Next<'_> {
    fn drop(&mut self) {
        if !self.named {
            let (mut made, mut sending) = self.staged.abandon();
            let given_up = &mut *self.living.given_up.lock();
            given_up.0.append(&mut made);
            given_up.1.append(&mut sending);
        }
    }
}

impl Storage for Living {
    fn len(&self) -> Result<u64> {
        self.staged.len()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.staged.read_at(offset, out)
    }

    fn is_far(&self) -> bool {
        true
    }

    fn will_need(&self, offset: u64, length: u64) {
        self.staged.will_need(offset, length);
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.staged.write_at(offset, data)
    }

    fn allocate(&self, offset: u64, length: u64) -> Result<()> {
        self.staged.allocate(offset, length)
    }

    fn punch(&self, offset: u64, length: u64) -> Result<()> {
        self.staged.punch(offset, length)
    }

    fn set_len(&self, length: u64) -> Result<()> {
        self.staged.set_len(length)
    }

    /// LIVING-1
    fn barrier(&self) -> Result<()> {
        let mut session = self.session.lock();
        // A map that no reader takes would be durable.
        if self.staged.is_scattered(session.most_runs()) {
            self.staged.gather_sparse(session.most_runs(), u64::MAX)?;
        }
        let done = self.staged.commit(&mut session, Kind::Commit);
        done.map_err(|error| Living::told(&session, error))?;
        let mut cleaned = self.cleaned.lock();
        if cleaned.elapsed() >= CLEANED && !self.store.spool().is_some_and(Spool::holds_back) {
            *cleaned = Instant::now();
            let due = session.due(CLEANED_AT_ONCE);
            // What is in the way is met by the next one.
            if self.staged.lets_go_of(&due) {
                let _ = session.remove_dead(&due);
            }
        }
        Ok(())
    }

    fn ordered(&self) -> bool {
        true
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        // What is on its way cannot be read from the store yet.
        let _session = self.session.lock();
        self.staged.evict(offset, length)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.staged.next_data(offset)
    }

    fn allocated(&self) -> Result<u64> {
        self.staged.allocated()
    }

    fn kept_back(&self) -> Result<u64> {
        Ok(self.unsent())
    }

    /// LIVING-5
    fn succeed(&self) -> Result<Box<dyn Successor + '_>> {
        // What was written here goes with what is here, and not as what nobody names.
        self.barrier()?;
        let session = self.session.lock();
        let staged = Arc::new(Staged::new(&session, &self.options, true)?);
        Ok(Box::new(Next { living: self, staged, named: false }))
    }

    fn read_only(&self) -> bool {
        false
    }
}
