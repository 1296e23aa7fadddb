//! The store's four calls with patience, and the names of an archive's objects.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use lockbox::{Error, Result};
use parking_lot::Mutex;

use super::layout::{self, Incarnation, MAX_SAID, Said, TRAILER_BYTES, Trailer};
use super::map::Map;
use super::object_names::{hex, id_of, path, what};
use super::object_ref::{Hash, Id, Place};
use super::objects::{Barred, Created, LISTED, Listed, Objects, Part};
use super::parallel::{all, both, by_many};
use super::spool::{Spool, Spooled};
use crate::range_source::Trouble;
use crate::remote_file::{patiently, told};

pub(super) const MARKER: &str = "lockbox";
/// Bytes of a record's end that come with the first request for it, and with that of who opens: what the writer who went left for who comes (less than what two round
/// trips cost on most links).
const TAIL: u64 = 256 << 10;
const FIRST_TAIL: u64 = 768 << 10;
/// Objects that are looked through: four thousand lists, some minutes of them.
const MOST_LISTED: usize = if cfg!(test) { 20_000 } else { 4_000_000 };
/// From one round of attempts of who insists to the next.
const AGAIN: Duration = if cfg!(test) { Duration::from_millis(1) } else { Duration::from_secs(1) };
/// From one look at whether somebody leaves to the next.
const LOOKS: Duration = Duration::from_millis(100);
/// Records that a writer makes, at most, while somebody who wants to take over looks for the newest: each is two ways, and so is the looking.
const BEHIND: u64 = 4;
/// Removals under way at once, and how many make one more worth its start.
const REMOVING: usize = 8;
const REMOVED_BY_ONE: usize = 4;

/// The objects below one prefix.
#[derive(Clone)]
pub(crate) struct Store {
    pub(super) objects: Arc<dyn Objects>,
    /// For messages.
    pub(super) name: String,
    pub(super) timeout: Option<Duration>,
    patience: Arc<Patience>,
    /// Where what the store does not take is kept, once it is known of which archive.
    spool: Arc<OnceLock<Spool>>,
    spools: Option<PathBuf>,
    /// What came with the record that was read last.
    tail: Arc<Mutex<Option<Tail>>>,
}

/// How long whoever asks waits.
#[derive(Default)]
struct Patience {
    /// Whoever asks is on the way out: nothing is asked twice.
    hurries: AtomicBool,
    /// What is to be made is sent until the store has decided.
    insists: AtomicBool,
    /// Since when whoever insists does not any more.
    leaves: OnceLock<Instant>,
}

/// An archive, and the number of its newest record where that is known.
type Looked = (Incarnation, Option<u64>);

/// The last pages of a record.
struct Tail {
    sequence: u64,
    /// Of them the first, counted as a block of the record, and their bytes.
    at: u32,
    bytes: Vec<u8>,
}

impl Tail {
    /// Of the end of a record, in which so many bytes stand behind the pages.
    fn of(trailer: &Trailer, end: &[u8], behind: usize) -> Option<Tail> {
        let before = trailer.bytes().checked_sub(end.len() as u64)?;
        let at = before.div_ceil(layout::BLOCK);
        let pages = end.get((at * layout::BLOCK - before) as usize..end.len() - behind)?;
        let is_so = pages.len() as u64 == u64::from(trailer.blocks).checked_sub(at)? * layout::BLOCK;
        let at = u32::try_from(at).ok().filter(|_| is_so && !pages.is_empty())?;
        Some(Tail { sequence: trailer.sequence, at, bytes: pages.to_vec() })
    }

    /// So many bytes from this place on, when it has them.
    fn part(&self, place: &Place, length: u64) -> Option<&[u8]> {
        let behind = place.at.checked_sub(self.at).filter(|_| place.id == Id::Log(self.sequence))?;
        let from = u64::from(behind) * layout::BLOCK;
        self.bytes.get(usize::try_from(from).ok()?..usize::try_from(from + length).ok()?)
    }
}

/// What became of an object that somebody wanted to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is durable; by the store's clock, where that answered.
    Made(Option<u64>),
    /// The name has other content.
    Taken,
}

impl Store {
    pub(super) fn new(objects: Box<dyn Objects>, name: String, timeout: Option<Duration>) -> Store {
        let patience = Arc::default();
        let spool = Arc::new(OnceLock::new());
        Store { objects: objects.into(), name, timeout, patience, spool, spools: None, tail: Arc::default() }
    }

    /// The same, with a directory for what it does not take of an archive that is written to.
    pub(super) fn with_spool_in(self, directory: Option<&Path>) -> Store {
        let objects = Arc::new(Spooled { inner: self.objects, spool: self.spool.clone() });
        Store { objects, spools: directory.map(Path::to_owned), ..self }
    }

    /// Has what the store does not take of this archive kept, where there is a directory for it.
    ///
    /// # Errors
    /// As of [`Spool::open`].
    pub(super) fn open_spool(&self, incarnation: &Incarnation) -> Result<()> {
        let Some(directory) = self.spools.as_deref() else { return Ok(()) };
        if let Some(spool) = Spool::open(directory, &self.name, incarnation)? {
            self.spool.get_or_init(|| spool);
        }
        Ok(())
    }

    pub(super) fn spool(&self) -> Option<&Spool> {
        self.spool.get()
    }

    /// From now on nothing that fails is tried again.
    pub(super) fn hurry(&self) {
        self.patience.hurries.store(true, Ordering::Relaxed);
    }

    /// From now on an object that is to be made is sent until the store has said what became of it, or somebody hurries.
    pub(super) fn insist(&self) {
        self.patience.insists.store(true, Ordering::Relaxed);
    }

    /// From now on what the store does not take in time is kept here, for the next writer to send (SPOOL-2). Whoever waits without end, or cannot keep anything, waits on.
    pub(super) fn leave(&self) {
        if self.timeout.is_some() && self.spool().is_some() {
            self.patience.leaves.get_or_init(Instant::now);
        }
    }

    fn insists(&self) -> bool {
        self.patience.insists.load(Ordering::Relaxed)
    }

    fn hurries(&self) -> bool {
        self.patience.hurries.load(Ordering::Relaxed)
    }

    /// A call that may be repeated.
    fn ask<T>(
        &self,
        call: &mut dyn FnMut(&dyn Objects) -> std::result::Result<T, Trouble>,
    ) -> std::result::Result<T, Trouble> {
        self.patiently(&mut || call(&*self.objects))
    }

    /// Tries again what may pass. Who hurries is not kept by what began before, nor by a time without end: the attempt that runs is the last.
    pub(super) fn patiently<T>(
        &self,
        attempt: &mut dyn FnMut() -> std::result::Result<T, Trouble>,
    ) -> std::result::Result<T, Trouble> {
        patiently(&|| if self.hurries() { Some(Duration::ZERO) } else { self.timeout }, attempt)
    }

    pub(super) fn told(&self, trouble: Trouble) -> Error {
        told(&self.name, trouble)
    }

    /// The incarnation of the archive here; None when there is none.
    pub(super) fn incarnation(&self) -> std::result::Result<Option<Result<Incarnation>>, Trouble> {
        match self.ask(&mut |objects| objects.get(MARKER, Part::All(layout::MARKER_BYTES as u64))) {
            Ok(bytes) => Ok(Some(layout::decode_marker(&bytes))),
            Err(Trouble::Gone) => Ok(None),
            Err(trouble) => Err(trouble),
        }
    }

    /// The same, and the number of the newest record when that was found beside it: no name of an archive's objects comes before its own, unless others lie there.
    pub(super) fn look(&self) -> std::result::Result<Option<Result<Looked>>, Trouble> {
        // That it fails is told when it is asked for again.
        let list = || self.objects.list("", "", 1).ok().and_then(|listed| listed.into_iter().next());
        let (incarnation, first) = both(|| self.incarnation(), "list", list);
        let first = first.flatten();
        Ok(incarnation?.map(|incarnation| {
            let incarnation = incarnation?;
            let id = first.and_then(|first| id_of(&incarnation, &first.name));
            let number = id.and_then(|id| if let Id::Log(number) = id { Some(number) } else { None });
            Ok((incarnation, number))
        }))
    }

    /// Makes an object, repeating the same bytes until the store has decided. That a name is taken is no verdict: what is there may be
    /// ours, of an answer that was lost. Of whoever leaves it is made when it is kept here.
    ///
    /// # Errors
    /// Those of requests. After one it is not known whether the object is or will be there.
    pub(super) fn create(&self, name: &str, bytes: &Arc<Vec<u8>>) -> Result<Outcome> {
        match self.spool() {
            Some(spool) if spool.holds_back() => spool.keep(name, bytes, true).map(|()| Outcome::Made(None)),
            Some(spool) if self.insists() => self.create_beside(spool, name, bytes),
            _ => self.try_create(name, bytes),
        }
    }

    /// By a thread of its own: a request that nobody answers has minutes for a large object, and whoever leaves meanwhile does not wait for its end. What it still does then
    /// is what the next writer does, too.
    fn create_beside(&self, spool: &Spool, name: &str, bytes: &Arc<Vec<u8>>) -> Result<Outcome> {
        let (sender, answer) = mpsc::channel();
        let (store, named, object) = (self.clone(), name.to_owned(), bytes.clone());
        let started = thread::Builder::new().name("create".into()).spawn(move || {
            // Nobody may be waiting any more.
            let _ = sender.send(store.try_create(&named, &object));
        });
        if let Err(error) = started {
            return Err(Error::io("cannot start a thread that sends", error));
        }
        loop {
            match answer.recv_timeout(LOOKS) {
                Ok(outcome) => return outcome,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::request("a thread that sends has ended", io::ErrorKind::Other));
                }
            }
            let left = self.patience.leaves.get().zip(self.timeout);
            if left.is_some_and(|(since, timeout)| since.elapsed() >= timeout) {
                return spool.keep(name, bytes, true).map(|()| Outcome::Made(None));
            }
        }
    }

    fn try_create(&self, name: &str, bytes: &[u8]) -> Result<Outcome> {
        loop {
            match self.attempt(name, bytes) {
                // No trouble decides. Who is refused may be let in again, a full store may get room, and what a store or somebody before it says of a token that
                // expired, of a slow connection, or of a bucket that is being moved looks like an answer that never changes.
                Err(trouble) if self.insists() => {
                    if self.keep_meanwhile(name, bytes)? {
                        return Ok(Outcome::Made(None));
                    }
                    if self.hurries() {
                        return Err(self.told(trouble));
                    }
                    let why = trouble.words();
                    tracing::warn!("{}: nothing is durable until the store takes it: {why}", self.name);
                    thread::sleep(AGAIN);
                }
                outcome => return outcome.map_err(|trouble| self.told(trouble)),
            }
        }
    }

    fn attempt(&self, name: &str, bytes: &[u8]) -> std::result::Result<Outcome, Trouble> {
        if let Created::Made(date) = self.ask(&mut |objects| objects.create(name, bytes))? {
            return Ok(Outcome::Made(date));
        }
        // The end of each object has a hash or a nonce, and the hash of a record's pages.
        let most = bytes.len().min(TRAILER_BYTES) as u64;
        let there = self.ask(&mut |objects| objects.get(name, Part::Last(most)))?;
        // A shorter object ends as any does that it is the end of.
        let is_ours = there.len() as u64 == most && bytes.ends_with(&there);
        Ok(if is_ours { Outcome::Made(None) } else { Outcome::Taken })
    }

    /// Keeps what the store did not take yet: a machine that ends now has it for the next writer. Whether that is enough.
    fn keep_meanwhile(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        let Some(spool) = self.spool() else { return Ok(false) };
        let leaves = self.patience.leaves.get().is_some();
        match spool.keep(name, bytes, leaves) {
            Err(error) if leaves => return Err(error),
            Err(error) => tracing::debug!(%error, "it is in memory alone"),
            Ok(()) => {}
        }
        Ok(leaves)
    }

    /// Finds out whether the store refuses a second object of a name: without that two writers cannot be told apart.
    ///
    /// # Errors
    /// `Unsupported`; those of requests.
    pub(super) fn probe(&self, name: &str, bytes: &[u8]) -> Result<()> {
        match self.ask(&mut |objects| objects.create(name, bytes)).map_err(|trouble| self.told(trouble))? {
            Created::Exists => Ok(()),
            Created::Made(_) => Err(Error::Unsupported(format!(
                "{}: the store overwrites what is there although it was asked not to (If-None-Match), so two writers could destroy each other's work",
                self.name
            ))),
        }
    }

    pub(super) fn get(&self, name: &str, part: Part) -> std::result::Result<Vec<u8>, Trouble> {
        self.ask(&mut |objects| objects.get(name, part))
    }

    /// Removes objects, several at once, until `until`. None is asked for twice, and no more are when the store refuses one or does not answer: it would do so with
    /// thousands, each in its time. Gives those that may be there still, and what was in the way.
    pub(super) fn remove(
        &self,
        incarnation: &Incarnation,
        ids: &[Id],
        until: Option<Instant>,
    ) -> (HashSet<Id>, Option<Trouble>) {
        let left = Mutex::new((ids.iter().copied().collect::<HashSet<Id>>(), None));
        let next = AtomicUsize::new(0);
        let work = || {
            while left.lock().1.is_none() && until.is_none_or(|until| Instant::now() < until) {
                let Some(id) = ids.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                let removed = self.objects.remove(&path(incarnation, id));
                let (left, trouble) = &mut *left.lock();
                match removed {
                    Ok(()) => drop(left.remove(id)),
                    Err(why) => *trouble = Some(why),
                }
            }
        };
        by_many("remove", (ids.len() / REMOVED_BY_ONE).min(REMOVING), work);
        left.into_inner()
    }

    /// Removes what writers who have been overtaken began and never named.
    ///
    /// # Errors
    /// Those of requests.
    pub(super) fn sweep(&self, incarnation: &Incarnation) -> Result<()> {
        ["log", "seg", "map"].iter().try_for_each(|part| {
            let above = format!("{}/{part}", hex(incarnation));
            self.ask(&mut |objects| objects.sweep(&above)).map_err(|trouble| self.told(trouble))
        })
    }

    pub(super) fn list(&self, prefix: &str, after: &str, most: usize) -> Result<Vec<Listed>> {
        self.ask(&mut |objects| objects.list(prefix, after, most)).map_err(|trouble| self.told(trouble))
    }

    /// Shows all objects whose names begin so.
    ///
    /// # Errors
    /// Those of requests, and that of `visit`; a store that lists the same names again, or ever more of them, is not followed.
    pub(super) fn walk(&self, prefix: &str, visit: &mut dyn FnMut(Listed) -> Result<()>) -> Result<()> {
        self.walk_what_can_be(prefix, &mut |_, trouble| Err(trouble), visit)
    }

    /// The same but for what is in directories that cannot be looked into, see [`Objects::list_what_can_be`].
    pub(super) fn walk_what_can_be(
        &self,
        prefix: &str,
        barred: &mut Barred<'_>,
        visit: &mut dyn FnMut(Listed) -> Result<()>,
    ) -> Result<()> {
        let (mut after, mut seen) = (String::new(), 0);
        loop {
            let listed = self.ask(&mut |objects| objects.list_what_can_be(prefix, &after, LISTED, barred));
            let listed = listed.map_err(|trouble| self.told(trouble))?;
            seen += listed.len();
            if seen > MOST_LISTED {
                return Err(Error::Unsupported(format!("{}: it has more objects than are looked through", self.name)));
            }
            let is_full = listed.len() == LISTED;
            for object in listed {
                if object.name <= after {
                    return Err(self.told(Trouble::Unusable("what it lists is not in the order of its bytes".into())));
                }
                after.clone_from(&object.name);
                visit(object)?;
            }
            if !is_full {
                return Ok(());
            }
        }
    }

    /// The incarnation of the archive here.
    ///
    /// # Errors
    /// `Io` of the kind `NotFound` when there is none; those of requests; `Damaged`.
    pub(super) fn known(&self) -> Result<Incarnation> {
        match self.incarnation().map_err(|trouble| self.told(trouble))? {
            Some(incarnation) => incarnation,
            None => Err(self.told(Trouble::Gone)),
        }
    }

    /// The number of the newest record; None when there is none.
    ///
    /// # Errors
    /// Those of requests; `Damaged` for a name that is none.
    pub(super) fn newest(&self, incarnation: &Incarnation) -> Result<Option<u64>> {
        self.ask(&mut |objects| newest(objects, incarnation)).map_err(|trouble| self.told(trouble))
    }

    /// A record, but for its pages. None when there is none of this number.
    ///
    /// # Errors
    /// Those of requests; `Damaged`.
    pub(super) fn record(&self, incarnation: &Incarnation, sequence: u64) -> Result<Option<(Trailer, Said)>> {
        self.record_with(incarnation, sequence, TAIL)
    }

    /// The same with more of its pages: who opens the archive needs what they have.
    ///
    /// # Errors
    /// As of [`Store::record`].
    pub(super) fn first_record(&self, incarnation: &Incarnation, sequence: u64) -> Result<Option<(Trailer, Said)>> {
        self.record_with(incarnation, sequence, FIRST_TAIL)
    }

    /// The last one of the next few records, of which none is known to be there: they are asked for side by side, so it was the newest one way to the store ago, unless
    /// there are more.
    ///
    /// # Errors
    /// As of [`Store::record`].
    pub(super) fn record_behind(&self, incarnation: &Incarnation, sequence: u64) -> Result<Option<(Trailer, Said)>> {
        let answers = all("record", BEHIND as usize, |number| self.record(incarnation, sequence + 1 + number as u64));
        Ok(answers.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().next_back())
    }

    fn record_with(&self, incarnation: &Incarnation, sequence: u64, most: u64) -> Result<Option<(Trailer, Said)>> {
        let name = path(incarnation, &Id::Log(sequence));
        let tail = match self.get(&name, Part::Last(most)) {
            Ok(tail) => tail,
            Err(Trouble::Gone) => return Ok(None),
            Err(trouble) => return Err(self.told(trouble)),
        };
        let short = || Error::damaged(format!("{}: a record that ends too early", self.name));
        let at = tail.len().checked_sub(TRAILER_BYTES).ok_or_else(short)?;
        let trailer = Trailer::decode(&tail[at..], incarnation)?;
        if trailer.sequence != sequence {
            return Err(Error::damaged(format!("{}: a record lies under another's number", self.name)));
        }
        let needed = trailer.said_bytes() as usize + TRAILER_BYTES;
        let whole;
        let tail = if needed <= tail.len() {
            *self.tail.lock() = Tail::of(&trailer, &tail, needed);
            &tail[tail.len() - needed..]
        } else {
            debug_assert!(needed as u64 <= MAX_SAID + TRAILER_BYTES as u64);
            whole = self.get(&name, Part::Last(needed as u64)).map_err(|trouble| self.told(trouble))?;
            if whole.len() != needed {
                return Err(short());
            }
            &whole[..]
        };
        let said = layout::decode_said(&trailer, &tail[..needed - TRAILER_BYTES])?;
        Ok(Some((trailer, said)))
    }

    /// The map that a record's changes count from.
    ///
    /// # Errors
    /// Those of requests; `Damaged`.
    pub(super) fn checkpoint(&self, incarnation: &Incarnation, checkpoint: Option<(Hash, u64)>) -> Result<Map> {
        let Some((hash, length)) = checkpoint else { return Ok(Map::default()) };
        let bytes = match self.get(&path(incarnation, &Id::Checkpoint(hash)), Part::All(length)) {
            Ok(bytes) => bytes,
            Err(Trouble::Gone) => return Err(self.missing(&Id::Checkpoint(hash))),
            Err(trouble) => return Err(self.told(trouble)),
        };
        let mut map = Map::default();
        layout::decode_checkpoint(incarnation, &hash, &bytes)?.iter().for_each(|entry| map.lay(entry));
        map.checkpointed();
        Ok(map)
    }

    pub(super) fn missing(&self, id: &Id) -> Error {
        Error::damaged(format!("{}: {}", self.name, missing(id)))
    }

    /// The record that came with pages last.
    pub(super) fn has_of(&self) -> Option<Id> {
        self.tail.lock().as_ref().map(|tail| Id::Log(tail.sequence))
    }

    /// Fills `out` with blocks of an object when they came along with a record.
    pub(super) fn has(&self, place: &Place, out: &mut [u8]) -> bool {
        let tail = self.tail.lock();
        let here = tail.as_ref().and_then(|tail| tail.part(place, out.len() as u64));
        if let Some(here) = here {
            out.copy_from_slice(here);
        }
        here.is_some()
    }

    /// So many bytes of an object's blocks from a place on, which the record `sequence` needs.
    pub(super) fn blocks(
        &self,
        incarnation: &Incarnation,
        sequence: &AtomicU64,
        place: &Place,
        length: u64,
    ) -> std::result::Result<Vec<u8>, Trouble> {
        let here = self.tail.lock().as_ref().and_then(|tail| tail.part(place, length).map(<[u8]>::to_vec));
        if let Some(here) = here {
            return Ok(here);
        }
        let part = Part::Range(u64::from(place.at) * layout::BLOCK, length);
        match self.objects.get(&path(incarnation, &place.id), part) {
            Ok(bytes) if bytes.len() as u64 == length => Ok(bytes),
            Ok(_) => Err(Trouble::Damaged(format!("{} is shorter than it was made", what(&place.id)))),
            // The newest record is never removed, and what it needs neither.
            Err(Trouble::Gone) if newest(&*self.objects, incarnation)? == Some(sequence.load(Ordering::Acquire)) => {
                Err(Trouble::Damaged(missing(&place.id)))
            }
            // It was needed no more for a day.
            Err(Trouble::Gone) => Err(Trouble::Changed),
            Err(trouble) => Err(trouble),
        }
    }
}

/// The number of the newest record; None when there is none.
fn newest(objects: &dyn Objects, incarnation: &Incarnation) -> std::result::Result<Option<u64>, Trouble> {
    let prefix = format!("{}/log/", hex(incarnation));
    let listed = objects.list(&prefix, "", 1)?;
    let Some(first) = listed.first() else { return Ok(None) };
    let number = first.name.strip_prefix(&prefix).filter(|name| name.len() == 16);
    match number.and_then(|number| u64::from_str_radix(number, 16).ok()) {
        Some(complement) => Ok(Some(u64::MAX - complement)),
        None => Err(Trouble::Damaged("an object in the log that is no record of it".into())),
    }
}

fn missing(id: &Id) -> String {
    format!("{} is missing, which its newest record needs", what(id))
}
