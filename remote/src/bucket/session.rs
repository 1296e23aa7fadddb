//! One writer of an archive in a bucket, from its coming to its going.
//!
//! Who writes is decided by the numbers of records alone: a number is taken by whoever makes the object of that name, and by nobody after. A writer
//! comes with a record of its own at the next number, which is never removed: the writer before finds the number of its next commit taken,
//! however long it slept. Clocks and leases decide nothing; they only tell people who is there.

use std::collections::HashSet;
use std::time::{Duration, Instant, SystemTime};

use lockbox::{Error, Result};
use std::sync::Arc;

use super::inventory::Collected;
use super::layout::{self, Dead, Incarnation, Kind, MAX_BLOCKS, MAX_CHECKPOINT, MAX_DEAD, Owner, Said, Trailer};
use super::map::Map;
use super::object_names::{hex, path, random, unhex};
use super::object_ref::{Entry, Hash, Id, Place};
use super::objects::LISTED;
use super::spool::Spool;
use super::spool_replay::{self, Resent};
use super::store::{MARKER, Outcome, Store};
use super::version::Moment;
use crate::range_source::Trouble;

/// Seconds for which what a newer record needs no more stays: a reader of the moment before may be at it.
pub(crate) const GRACE: u64 = 24 * 3600;
const HOUR: u64 = 3600;
/// Objects that are removed at once at most: a stranger's list may name many millions.
const MOST_CLEANED: usize = 1 << 20;
/// Times that a writer begins anew because others came as well, at least; and for how long when it waits for the store without end.
const TRIES: usize = 16;
const COMING: Duration = Duration::from_secs(30);
/// Of so many writers that come, one looks for what nobody names although the one before went as it should: who was overtaken may have sent more than was found then.
const THOROUGH: u64 = 16;
/// A checkpoint is made when what changed since the last one has more bytes than this, or than an eighth of the map.
const CHANGES: usize = 64 << 10;
const MOST_CHANGES: usize = 1 << 20;
/// Of one run in changes and in checkpoints.
const RUN_BYTES: usize = 20;

/// The end of the year 9999: what a stranger wrote is told as a time.
const LAST_TIME: u64 = 253_402_300_799;

/// Pages that a record itself has: neighbours in the archive.
pub(super) struct Inline {
    pub(super) block: u64,
    pub(super) pages: Vec<u8>,
}

/// A writer whose record is the newest.
pub(crate) struct Session {
    pub(super) store: Arc<Store>,
    pub(super) incarnation: Incarnation,
    writer: [u8; 16],
    owner: Owner,
    newest: Trailer,
    map: Map,
    /// What durable records say is dead.
    dead: Vec<Dead>,
    /// What no record names: the next one calls it dead.
    left: Vec<Id>,
    /// Checkpoints that were sent and that no record names.
    made: Vec<Id>,
    /// What the store's clock said last, and when; None when its last answer did not tell.
    clock: Option<(u64, Instant)>,
    /// A record that was sent and of which the store has not said whether it is there.
    undecided: Option<Sent>,
    fenced: bool,
    /// What its user should know about its coming.
    notice: Option<String>,
    /// Bytes of changes after which a checkpoint is made at the earliest.
    pub(super) least_changes: usize,
    /// Bytes that a checkpoint has at most: [`MAX_CHECKPOINT`], but in tests.
    pub(super) most_checkpoint: u64,
}

struct Sent {
    bytes: Arc<Vec<u8>>,
    trailer: Trailer,
    map: Map,
    dead: Vec<Dead>,
}

impl Session {
    /// Comes to the archive here, which is made when there is none.
    ///
    /// # Errors
    /// `InUse` when another writer is there, as far as its newest record tells, and `take_over` was not said; `Unsupported` for a store that
    /// cannot tell two writers apart; those of requests; `Damaged`.
    pub(super) fn open(store: Arc<Store>, owner: Owner, take_over: bool) -> Result<Session> {
        let incarnation = incarnation(&store)?;
        Session::open_at(store, incarnation, owner, take_over)
    }

    /// The same to one that is there.
    ///
    /// # Errors
    /// As of [`Session::open`]; `Io` of the kind `NotFound` when there is none.
    pub(super) fn open_known(store: Arc<Store>, owner: Owner, take_over: bool) -> Result<Session> {
        let incarnation = store.known()?;
        Session::open_at(store, incarnation, owner, take_over)
    }

    fn open_at(store: Arc<Store>, incarnation: Incarnation, owner: Owner, take_over: bool) -> Result<Session> {
        // Harmless where the store carries it out: the same bytes.
        store.probe(MARKER, &layout::encode_marker(&incarnation))?;
        store.open_spool(&incarnation)?;
        let resent = store.spool().map(|spool| spool_replay::resend(&store, spool, &incarnation)).transpose()?;
        let notice = (resent == Some(Resent::Refused)).then(|| refused(&store.name));
        match Session::come_in_turn(&store, incarnation, &owner, take_over) {
            Ok(session) => Ok(Session { notice, ..session }),
            // It is told now or never: what was refused is out of the way.
            Err(error) => Err(notice.map_or(error.clone(), |notice| told_with(notice, error))),
        }
    }

    fn come_in_turn(store: &Arc<Store>, incarnation: Incarnation, owner: &Owner, take_over: bool) -> Result<Session> {
        let (mut before, mut lost) = (Moment::newest(store, &incarnation)?, 0);
        let until = Instant::now() + store.timeout.unwrap_or(COMING);
        loop {
            if let Some(before) = &before
                && before.trailer.kind != Kind::Close
                && !take_over
                && !owner.survives(&before.owner)
            {
                return Err(in_use(store, before));
            }
            if let Some(session) = Session::come(store, incarnation, owner, before)? {
                return Ok(session);
            }
            lost += 1;
            if lost >= TRIES && Instant::now() >= until {
                return Err(Error::InUse(format!(
                    "{}: others write there without a pause, and none was long enough to come between; try again when they write less",
                    store.name
                )));
            }
            before = Moment::newest_of_a_race(store, &incarnation)?;
        }
    }

    /// None when another one came first.
    fn come(
        store: &Arc<Store>,
        incarnation: Incarnation,
        owner: &Owner,
        before: Option<Moment>,
    ) -> Result<Option<Session>> {
        let writer = random()?;
        // A list that is full may have been cut.
        let is_orderly =
            before.as_ref().is_none_or(|before| before.trailer.kind == Kind::Close && before.dead.len() < MAX_DEAD);
        let (map, dead, newest) = match before {
            Some(Moment { trailer, map, dead, .. }) => (map, together(dead), trailer),
            None => (Map::default(), Vec::new(), nothing(incarnation)),
        };
        let mut session = Session {
            store: store.clone(),
            incarnation,
            writer,
            owner: owner.clone(),
            newest,
            map,
            dead,
            left: Vec::new(),
            made: Vec::new(),
            clock: None,
            undecided: None,
            fenced: false,
            notice: None,
            least_changes: CHANGES,
            most_checkpoint: MAX_CHECKPOINT,
        };
        let (map, length) = (session.map.clone(), session.newest.length);
        match session.record(map, Vec::new(), length, Kind::Open) {
            Ok(()) => {}
            Err(_) if session.fenced => return Ok(None),
            Err(error) => return Err(error),
        }
        // Who looked for the newest record a day ago may have been given a number that was free again: then there are higher ones, and this record is
        // nothing (rule 1). The newest is never removed, so it is seen.
        let newest = store.newest(&incarnation)?.unwrap_or(0);
        let ours = session.newest.sequence;
        if newest < ours {
            return Err(Error::Unsupported(format!(
                "{}: the store does not list what was just written there",
                store.name
            )));
        }
        if newest == ours && (!is_orderly || session.newest.epoch.is_multiple_of(THOROUGH)) {
            session.store.sweep(&incarnation)?;
            session.left = session.find_left()?;
        }
        Ok((newest == ours).then_some(session))
    }

    /// Segments and checkpoints that nobody names and nobody will: the writer who made them has been overtaken, and a name is not used again. They are
    /// removed as all that is dead is, for a record of before may have named them.
    fn find_left(&self) -> Result<Vec<Id>> {
        // Of records there are none to be found.
        let mut named: HashSet<Id> = self.dead.iter().map(|dead| dead.id).chain(self.map.objects()).collect();
        named.extend(self.newest.checkpoint.map(|(hash, _)| Id::Checkpoint(hash)));
        let mut left = Vec::new();
        for (part, id) in [("seg", Id::Segment as fn(Hash) -> Id), ("map", Id::Checkpoint)] {
            let prefix = format!("{}/{part}/", hex(&self.incarnation));
            let mut after = String::new();
            // Whoever's names follow those that can be: a store that has ever more of them is not followed.
            for _ in 0..=(named.len() + MAX_DEAD) / LISTED + 1 {
                let listed = self.store.list(&prefix, &after, LISTED)?;
                let names = listed.iter().filter_map(|object| unhex(object.name.strip_prefix(&prefix)?));
                left.extend(names.map(id).filter(|id| !named.contains(id)));
                match listed.last() {
                    // A store that lists the same names for ever is not followed.
                    Some(last) if listed.len() == LISTED && last.name > after && left.len() < MAX_DEAD => {
                        after.clone_from(&last.name);
                    }
                    _ => break,
                }
            }
        }
        Ok(left)
    }

    /// Runs of a map from which on it is made anew before it has more than a checkpoint takes.
    pub(super) fn most_runs(&self) -> usize {
        self.most_checkpoint as usize / 2 / RUN_BYTES
    }

    pub(super) fn map(&self) -> &Map {
        &self.map
    }

    /// Of the newest record.
    pub(super) fn sequence(&self) -> u64 {
        self.newest.sequence
    }

    /// That the newest record counts from.
    pub(super) fn checkpoint(&self) -> Option<(Hash, u64)> {
        self.newest.checkpoint
    }

    /// Of the archive, in bytes.
    pub(super) fn length(&self) -> u64 {
        self.newest.length
    }

    /// Makes the archive what `map` and `inline` say: durable when this returns, all of it or nothing.
    ///
    /// # Errors
    /// `InUse` when another writer took over: nothing is committed from then on. Those of requests: then it is not known whether this is
    /// durable, and nothing else can be committed before [`Session::settle`] knows.
    pub(super) fn commit(&mut self, map: Map, inline: Vec<Inline>, length: u64, kind: Kind) -> Result<()> {
        if self.is_undecided() {
            return Err(Error::invalid("the store has not decided about the commit before"));
        }
        self.record(map, inline, length, kind)
    }

    fn record(&mut self, mut map: Map, inline: Vec<Inline>, length: u64, kind: Kind) -> Result<()> {
        if self.fenced {
            return self.settle();
        }
        let sequence = self.newest.sequence + 1;
        placed(&inline, sequence).iter().for_each(|entry| map.lay(entry));
        let pages: Vec<u8> = inline.into_iter().flat_map(|run| run.pages).collect();
        let mut gone = map.forget_dead();
        gone.extend(&self.left);
        // Its pages are forgotten above, when it has some.
        if self.newest.sequence > 0 && self.newest.kind != Kind::Open && self.newest.blocks == 0 {
            gone.push(Id::Log(self.newest.sequence));
        }
        let mut checkpoint = self.newest.checkpoint;
        let changes = map.changes();
        let most = (map.runs() * RUN_BYTES / 8).clamp(self.least_changes, MOST_CHANGES);
        let changes = if changes.len() * RUN_BYTES > most {
            gone.extend(checkpoint.map(|(hash, _)| Id::Checkpoint(hash)));
            let (bytes, hash) = layout::encode_checkpoint(&self.incarnation, &random()?, sequence, &map.entries());
            // No reader takes a longer one.
            if bytes.len() as u64 > self.most_checkpoint {
                let name = &self.store.name;
                return Err(Error::invalid(format!(
                    "{name}: the archive lies in more pieces than a store can have of it"
                )));
            }
            let length = bytes.len() as u64;
            self.made.push(Id::Checkpoint(hash));
            if self.store.create(&path(&self.incarnation, &Id::Checkpoint(hash)), &Arc::new(bytes))? == Outcome::Taken {
                return Err(Error::damaged(format!(
                    "{}: a checkpoint of the same name with other content",
                    self.store.name
                )));
            }
            checkpoint = Some((hash, length));
            map.checkpointed();
            Vec::new()
        } else {
            changes
        };
        let mut dead = self.dead.clone();
        dead.extend(gone.into_iter().map(|id| Dead::of(id, 0)));
        let mut dead = together(dead);
        // What is left out is found by the next writer, who sees that the list is full; but for records, whose names tell nobody whether they are needed.
        dead.truncate(MAX_DEAD);
        let trailer = Trailer {
            kind,
            sequence,
            epoch: self.newest.epoch + u64::from(kind == Kind::Open),
            writer: self.writer,
            nonce: random()?,
            time: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            before: self.newest.hash,
            checkpoint,
            length,
            ..nothing(self.incarnation)
        };
        let said = Said { changes, dead, owner: self.owner.clone() };
        let (bytes, trailer) = layout::encode_record(&trailer, &pages, &said);
        // What no reader takes is not sent: it would be the archive for ever.
        Trailer::decode(&bytes[bytes.len() - layout::TRAILER_BYTES..], &self.incarnation)?;
        self.undecided = Some(Sent { bytes: Arc::new(bytes), trailer, map, dead: said.dead });
        self.settle()
    }

    /// Whether a record was sent of which the store has not said whether it is there.
    pub(super) fn is_undecided(&self) -> bool {
        self.undecided.is_some() && !self.fenced
    }

    /// Whether there is nothing that this writer can still say: it has gone, another one came, or nobody knows what became of its last record.
    pub(super) fn is_over(&self) -> bool {
        self.fenced || self.undecided.is_some() || self.newest.kind == Kind::Close
    }

    /// Says in a record of its own that nobody writes here any more; the archive is as it was.
    ///
    /// # Errors
    /// As of [`Session::commit`].
    pub(super) fn close(&mut self) -> Result<()> {
        self.commit(self.map.clone(), Vec::new(), self.length(), Kind::Close)
    }

    /// Has the store decide about the record that was sent last.
    ///
    /// # Errors
    /// As of [`Session::commit`].
    pub(super) fn settle(&mut self) -> Result<()> {
        if self.fenced {
            let kept = match self.store.spool().map_or(0, Spool::bytes) {
                0 => "",
                _ => "; what was written last is kept on this machine, see 'lockbox remote unsent'",
            };
            return Err(Error::InUse(format!("{}: another writer took over{kept}", self.store.name)));
        }
        let Some(sent) = &self.undecided else { return Ok(()) };
        let name = path(&self.incarnation, &Id::Log(sent.trailer.sequence));
        match self.store.create(&name, &sent.bytes)? {
            Outcome::Taken => {
                self.fenced = true;
                if sent.trailer.kind == Kind::Commit {
                    self.keep_refused(&name, &sent.bytes);
                }
                return self.settle();
            }
            Outcome::Made(date) => self.clock = date.map(|date| (date, Instant::now())),
        }
        if let Some(Sent { trailer, map, dead, .. }) = self.undecided.take() {
            (self.newest, self.map, self.dead) = (trailer, map, dead);
            self.left.clear();
            self.made.clear();
        }
        self.date();
        // What waited here while the store did not answer is there. Of a file that stays the next writer finds that, too.
        if let Some(spool) = self.store.spool()
            && let Err(error) = spool.clear()
        {
            tracing::debug!(%error, "what was sent is kept on");
        }
        Ok(())
    }

    /// What another writer came before is for its user to read (SPOOL-4): whatever of it went up stays in the store for a day.
    fn keep_refused(&self, name: &str, bytes: &[u8]) {
        let Some(spool) = self.store.spool() else { return };
        match spool.keep_refused(name, bytes) {
            Ok(()) => tracing::warn!("{}", refused(&self.store.name)),
            Err(error) => tracing::warn!("{}: what was written last is lost: {error}", self.store.name),
        }
    }

    pub(super) fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Gives what is dead since an unknown time the time that the store's clock showed last: durable records said it before. What a machine that was suspended thinks the
    /// time is would be too early.
    fn date(&mut self) {
        if let Some((date, _)) = self.clock {
            self.dead.iter_mut().filter(|dead| dead.since == 0).for_each(|dead| dead.since = date);
        }
    }

    /// Takes back what went up and no record names: `made` and checkpoints are removed, as far as the store does that before `until`. The next record calls dead what is left
    /// of it, and what is still being sent. Whether the store answers.
    pub(super) fn take_back(&mut self, mut made: Vec<Id>, sending: Vec<Id>, until: Instant) -> bool {
        made.append(&mut self.made);
        let (left, trouble) = self.store.remove(&self.incarnation, &made, Some(until));
        self.left.extend(left.into_iter().chain(sending));
        !matches!(trouble, Some(Trouble::Passing(_)))
    }

    /// Removes what durable records have called dead for longer than the grace. By the store's clock; one that went back removes nothing.
    /// What cannot be removed now is left for the next writer. Gives how many are removed, and what was in the way.
    pub(super) fn clean(&mut self) -> (u64, Option<Trouble>) {
        self.remove_dead(&self.due(MOST_CLEANED))
    }

    /// What is to be removed now, so many at most.
    pub(super) fn due(&self, most: usize) -> Vec<Id> {
        let Some(now) = self.clock.map(|(date, at)| date + at.elapsed().as_secs()) else { return Vec::new() };
        let is_due = |dead: &Dead| now.checked_sub(dead.since).is_some_and(|age| age >= GRACE);
        self.dead.iter().filter(|dead| is_due(dead)).flat_map(|dead| dead.ids()).take(most).collect()
    }

    /// Removes what is due, as [`Session::clean`] does.
    pub(super) fn remove_dead(&mut self, due: &[Id]) -> (u64, Option<Trouble>) {
        let (left, trouble) = self.store.remove(&self.incarnation, due, None);
        let gone: HashSet<Id> = due.iter().filter(|id| !left.contains(id)).copied().collect();
        let stays = |dead: &Dead| -> Vec<Dead> {
            match dead.more > 0 && dead.ids().any(|id| gone.contains(&id)) {
                true => dead.ids().filter(|id| !gone.contains(id)).map(|id| Dead::of(id, dead.since)).collect(),
                false => Some(*dead).filter(|dead| !gone.contains(&dead.id)).into_iter().collect(),
            }
        };
        self.dead = together(self.dead.iter().flat_map(stays).collect());
        ((due.len() - left.len()) as u64, trouble)
    }

    /// Cleans, looks for what no record names, which is dead from now on, and goes.
    ///
    /// # Errors
    /// As of [`Session::commit`]; what cannot be listed or removed.
    pub(super) fn collect(mut self) -> Result<Collected> {
        let (removed, trouble) = self.clean();
        let found = self.store.sweep(&self.incarnation).and_then(|()| self.find_left());
        // It goes in any case, or would be in the way of the next one.
        if let Ok(found) = &found {
            self.left.clone_from(found);
        }
        if !self.left.is_empty() {
            // The record that says it first is dated by its own answer, and that stands in the next one: the day of what was found begins now.
            self.commit(self.map.clone(), Vec::new(), self.length(), Kind::Commit)?;
        }
        self.close()?;
        if let Some(trouble) = trouble {
            return Err(self.store.told(trouble));
        }
        Ok(Collected {
            removed,
            found: found?.len() as u64,
            waiting: self.dead.iter().map(|dead| u64::from(dead.more) + 1).sum(),
            notice: self.notice,
        })
    }

    /// Makes a segment.
    ///
    /// # Errors
    /// Those of requests.
    pub(super) fn make_segment(store: &Store, incarnation: &Incarnation, id: &Id, bytes: &Arc<Vec<u8>>) -> Result<()> {
        match store.create(&path(incarnation, id), bytes)? {
            Outcome::Made(_) => Ok(()),
            Outcome::Taken => {
                Err(Error::damaged(format!("{}: a segment of the same name with other content", store.name)))
            }
        }
    }
}

/// Records first, of which those with numbers one after the other are one entry when they died within one hour of the store's clock: a writer that commits once a second makes 86,400 in
/// the day for which they stay, and each commit has the list. The last one's time is that of all. None is named twice.
fn together(dead: Vec<Dead>) -> Vec<Dead> {
    let number = |dead: &Dead| if let Id::Log(first) = dead.id { Some(first) } else { None };
    let (mut records, objects): (Vec<Dead>, Vec<Dead>) = dead.into_iter().partition(|dead| number(dead).is_some());
    records.sort_by_key(number);
    let mut all: Vec<Dead> = Vec::new();
    for mut next in records {
        let count = |dead: &Dead| u64::from(dead.more) + 1;
        // Of an enemy's list: each of thousands of runs over each other would be taken apart into all that it names when one of that is removed.
        if let (Some(end), Some(first)) = (all.last().and_then(|last| Some(number(last)? + count(last))), number(&next))
            && first < end
        {
            let Some(more) = u64::from(next.more).checked_sub(end - first) else { continue };
            next = Dead { id: Id::Log(end), more: more as u32, ..next };
        }
        match all.last_mut() {
            Some(last)
                if number(last).map(|first| first + count(last)) == number(&next)
                    && (last.since == 0) == (next.since == 0)
                    && last.since / HOUR == next.since / HOUR
                    && count(last) + u64::from(next.more) <= MAX_BLOCKS.into() =>
            {
                last.more += next.more + 1;
                last.since = last.since.max(next.since);
            }
            _ => all.push(next),
        }
    }
    all.extend(objects);
    all
}

/// Where pages lie that the record of this number has itself.
pub(super) fn placed(inline: &[Inline], sequence: u64) -> Vec<Entry> {
    let count = |run: &Inline| run.pages.len() as u64 / layout::BLOCK;
    let blocks = inline.iter().map(count).sum::<u64>() as u32;
    let mut at = 0;
    let place = |run: &Inline| {
        let entry = Entry {
            blocks: run.block..run.block + count(run),
            place: Some(Place { id: Id::Log(sequence), blocks, at }),
        };
        at += count(run) as u32;
        entry
    };
    inline.iter().map(place).collect()
}

/// The incarnation of the archive here, which is made when there is none.
fn incarnation(store: &Store) -> Result<Incarnation> {
    for _ in 0..TRIES {
        if let Some(found) = store.incarnation().map_err(|trouble| store.told(trouble))? {
            return found;
        }
        let made = random()?;
        match store.create(MARKER, &Arc::new(layout::encode_marker(&made)))? {
            Outcome::Made(_) => return Ok(made),
            Outcome::Taken => {}
        }
    }
    Err(store.told(Trouble::Unusable("what was just written there is not found".into())))
}

/// What is before the first record.
fn nothing(incarnation: Incarnation) -> Trailer {
    Trailer { incarnation, ..Trailer::default() }
}

fn refused(name: &str) -> String {
    format!(
        "{name}: what was written last on this machine came after another writer had taken over, and is kept here alone; 'lockbox remote unsent' tells of it"
    )
}

/// An error with what else its user should know.
fn told_with(notice: String, error: Error) -> Error {
    match error {
        Error::InUse(why) => Error::InUse(format!("{notice}; {why}")),
        Error::Io { context, source } => Error::Io { context: format!("{notice}; {context}"), source },
        error => {
            tracing::warn!("{notice}");
            error
        }
    }
}

fn in_use(store: &Store, before: &Moment) -> Error {
    let host = lockbox_terminal::display(before.owner.host.as_bytes());
    let time = lockbox_terminal::utc(before.trailer.time.min(LAST_TIME) as i64);
    Error::InUse(format!(
        "{}: a writer on {host} has it open, or ended without closing it; its newest record is of {time} UTC",
        store.name
    ))
}
