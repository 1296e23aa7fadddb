//! Writer session: replay of the spool (SPOOL-3), acquire, commit, release.
//!
//! The record numbers alone decide which writer may commit: a number belongs to the writer that
//! creates the object of that name. A writer acquires the archive with a record of its own at the
//! next number, which is never removed: the previous writer finds the number of its next commit
//! taken, however long it slept. Clocks and leases decide nothing; they only inform users.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use lockbox::{Error, Result};
use rangemap::RangeSet;

use super::inventory::CollectReport;
use super::layout::{
    self, Incarnation, MAP_ENTRY_BYTES, MAX_BLOCKS, MAX_CHECKPOINT, MAX_TOMBSTONES, RecordBody, RecordKind,
    TRAILER_BYTES, Tombstone, Trailer, WriterIdentity,
};
use super::map::{BlockMap, MapEntry, ObjectId, object_entries};
use super::objects::{MAX_LIST_ENTRIES, object_path, parse_path, random_bytes};
use super::spool::UploadSpool;
use super::store::{BucketStore, CreateOutcome, MARKER};
use super::version::BucketVersion;
use crate::hex;
use crate::range_source::RemoteError;

const HOUR: u64 = 3600;
/// Maximum objects removed at once: a hostile list may name many millions.
const MAX_REMOVED: usize = 1 << 20;
/// Minimum attempts of an acquisition that loses races, and their minimum duration if the store's
/// timeout is infinite.
const MIN_ATTEMPTS: usize = 16;
const MIN_ACQUIRE_TIME: Duration = Duration::from_secs(30);
/// Acquisitions between full orphan scans after a clean close: an overtaken writer may have
/// uploaded more after the last scan.
const FULL_SCAN_INTERVAL: u64 = 16;
/// A checkpoint is written when the changes exceed this size and an eighth of the map.
const MIN_CHANGES_BYTES: usize = 64 << 10;
const MAX_CHANGES_BYTES: usize = 1 << 20;

/// End of the year 9999: bound for displaying an untrusted time.
const MAX_TIME: u64 = 253_402_300_799;

/// Adjacent pages stored in the record itself.
pub(super) struct InlinePages {
    pub(super) block: u64,
    pub(super) pages: Vec<u8>,
}

impl InlinePages {
    pub(super) fn blocks(&self) -> Range<u64> {
        self.block..self.block + self.pages.len() as u64 / layout::BLOCK
    }
}

/// Joins the pages of all runs: copied by run, since these may be the eight megabytes of a segment.
pub(super) fn join_pages(runs: &[InlinePages]) -> Vec<u8> {
    runs.iter().map(|run| run.pages.as_slice()).collect::<Vec<_>>().concat()
}

/// Writer with the newest record.
pub(crate) struct WriterSession {
    pub(super) store: Arc<BucketStore>,
    pub(super) incarnation: Incarnation,
    writer: [u8; 16],
    owner: WriterIdentity,
    pub(super) newest: Trailer,
    map: BlockMap,
    /// Tombstones of durable records.
    tombstones: Vec<Tombstone>,
    /// Objects that no record names: the next record declares them dead.
    orphans: Vec<ObjectId>,
    /// Uploaded checkpoints that no record names.
    uploaded: Vec<ObjectId>,
    /// Last time sent by the store, and when; None if its last response had none.
    clock: Option<(u64, Instant)>,
    /// Record that was sent without a confirmation.
    in_doubt: Option<PendingRecord>,
    fenced: bool,
    /// Message for the user about the acquisition.
    pub(super) notice: Option<String>,
    /// Minimum size of the changes, in bytes, for a checkpoint.
    pub(super) least_changes: usize,
    /// Maximum size of a checkpoint: [`MAX_CHECKPOINT`], except in tests.
    pub(super) most_checkpoint: u64,
}

struct PendingRecord {
    bytes: Arc<Vec<u8>>,
    trailer: Trailer,
    map: BlockMap,
    tombstones: Vec<Tombstone>,
}

impl WriterSession {
    /// Acquires the archive, created if it does not exist. Errors: `InUse` when another writer
    /// appears active by its newest record and `take_over` is not set; `Unsupported` for a store
    /// that cannot tell two writers apart; errors of requests; `Damaged`.
    pub(super) fn open(store: Arc<BucketStore>, owner: WriterIdentity, take_over: bool) -> Result<WriterSession> {
        let incarnation = open_or_create_incarnation(&store)?;
        WriterSession::open_at(store, incarnation, owner, take_over)
    }

    /// Acquires an existing archive. Errors: as of [`WriterSession::open`]; `Io` of the kind
    /// `NotFound` when there is none.
    pub(super) fn open_existing(
        store: Arc<BucketStore>,
        owner: WriterIdentity,
        take_over: bool,
    ) -> Result<WriterSession> {
        let incarnation = store.existing_incarnation()?;
        WriterSession::open_at(store, incarnation, owner, take_over)
    }

    fn open_at(
        store: Arc<BucketStore>,
        incarnation: Incarnation,
        owner: WriterIdentity,
        take_over: bool,
    ) -> Result<WriterSession> {
        // Harmless where the store carries it out: the same bytes.
        store.check_conditional_create(MARKER, &layout::encode_marker(&incarnation))?;
        store.open_spool(&incarnation)?;
        let refused = store.spool().map(|spool| replay(&store, spool, &incarnation)).transpose()?;
        let notice = (refused == Some(true)).then(|| refused_notice(&store.name));
        match WriterSession::acquire(&store, incarnation, &owner, take_over) {
            Ok(session) => Ok(WriterSession { notice, ..session }),
            // The refused data has been set aside, so no later call would report it.
            Err(error) => Err(notice.map_or(error.clone(), |notice| with_notice(notice, error))),
        }
    }

    fn acquire(
        store: &Arc<BucketStore>,
        incarnation: Incarnation,
        owner: &WriterIdentity,
        take_over: bool,
    ) -> Result<WriterSession> {
        let (mut before, mut lost) = (BucketVersion::load_newest(store, &incarnation)?, 0);
        let until = Instant::now() + store.timeout.unwrap_or(MIN_ACQUIRE_TIME);
        loop {
            if let Some(before) = &before
                && before.trailer.kind != RecordKind::Close
                && !take_over
                && !owner.outlives(&before.writer)
            {
                return Err(in_use(store, owner, before));
            }
            if let Some(session) = WriterSession::try_acquire(store, incarnation, owner, before)? {
                return Ok(session);
            }
            lost += 1;
            if lost >= MIN_ATTEMPTS && Instant::now() >= until {
                return Err(Error::InUse(format!(
                    "{}: other writers commit too often to take over; try again when they write less",
                    store.name
                )));
            }
            before = BucketVersion::load_newest_racing(store, &incarnation)?;
        }
    }

    /// Returns None if another writer was first.
    fn try_acquire(
        store: &Arc<BucketStore>,
        incarnation: Incarnation,
        owner: &WriterIdentity,
        before: Option<BucketVersion>,
    ) -> Result<Option<WriterSession>> {
        let writer = random_bytes()?;
        // A list that is full may have been cut.
        let is_orderly = before
            .as_ref()
            .is_none_or(|before| before.trailer.kind == RecordKind::Close && before.tombstones.len() < MAX_TOMBSTONES);
        let (map, dead, newest) = match before {
            Some(BucketVersion { trailer, map, tombstones: dead, .. }) => (map, coalesce_tombstones(dead), trailer),
            None => (BlockMap::default(), Vec::new(), initial_trailer(incarnation)),
        };
        let mut session = WriterSession {
            store: store.clone(),
            incarnation,
            writer,
            owner: owner.clone(),
            newest,
            map,
            tombstones: dead,
            orphans: Vec::new(),
            uploaded: Vec::new(),
            clock: None,
            in_doubt: None,
            fenced: false,
            notice: None,
            least_changes: MIN_CHANGES_BYTES,
            most_checkpoint: MAX_CHECKPOINT,
        };
        let (map, length) = (session.map.clone(), session.newest.length);
        match session.commit(map, Vec::new(), length, RecordKind::Open) {
            Err(_) if session.fenced => return Ok(None),
            written => written?,
        }
        // A list of a day ago may have yielded a number that has become free again: then higher
        // ones exist, and this record is void (rule 1). The newest record is never removed, so it
        // is seen.
        let newest = store.newest_sequence(&incarnation)?.unwrap_or(0);
        let ours = session.newest.sequence;
        if newest < ours {
            return Err(Error::Unsupported(format!(
                "{}: the store does not list record {ours}, although it was just written; use another store",
                store.name
            )));
        }
        if newest == ours && (!is_orderly || session.newest.epoch.is_multiple_of(FULL_SCAN_INTERVAL)) {
            session.store.sweep(&incarnation)?;
            session.orphans = session.find_orphans()?;
        }
        Ok((newest == ours).then_some(session))
    }

    /// Finds segments and checkpoints that no record names or will name: their writer has been
    /// overtaken, and names are not reused. They are removed like all dead objects, since an
    /// earlier record may have named them.
    fn find_orphans(&self) -> Result<Vec<ObjectId>> {
        // Records are never orphans, whatever the store lists: names outside of the prefix are skipped.
        let mut named: HashSet<ObjectId> = self.map.objects_with_sizes().map(|(id, _)| id).collect();
        named.extend(self.tombstones.iter().map(|dead| dead.id));
        named.extend(self.newest.checkpoint.map(|(hash, _)| ObjectId::Checkpoint(hash)));
        let mut left = Vec::new();
        for part in ["seg", "map"] {
            let prefix = format!("{}/{part}/", hex(&self.incarnation));
            let mut after = String::new();
            // A store with ever more names is not followed.
            for _ in 0..=(named.len() + MAX_TOMBSTONES) / MAX_LIST_ENTRIES + 1 {
                let listed = self.store.list(&prefix, &after, MAX_LIST_ENTRIES)?;
                let names = listed.iter().map(|object| &object.name).filter(|name| name.starts_with(&prefix));
                let ids = names.filter_map(|name| parse_path(&self.incarnation, name));
                left.extend(ids.filter(|id| !named.contains(id)));
                match listed.last() {
                    // A store that lists the same names for ever is not followed.
                    Some(last)
                        if listed.len() == MAX_LIST_ENTRIES && last.name > after && left.len() < MAX_TOMBSTONES =>
                    {
                        after.clone_from(&last.name);
                    }
                    _ => break,
                }
            }
        }
        Ok(left)
    }

    /// Returns the number of runs above which the map is repacked, before it exceeds a checkpoint:
    /// each object counts as [`OBJECT_RUNS`](layout::OBJECT_RUNS) more. Half of a checkpoint is
    /// left for dirty blocks that split runs.
    pub(super) fn most_runs(&self) -> usize {
        self.most_checkpoint as usize / 2 / MAP_ENTRY_BYTES
    }

    pub(super) fn map(&self) -> &BlockMap {
        &self.map
    }

    /// Commits the content given by `map` and `inline`; atomic, and durable on return. Errors:
    /// `InUse` when another writer took over: nothing is committed from then on. Errors of
    /// requests: then the commit is in doubt, and no other one is possible before
    /// [`WriterSession::resolve_pending`] succeeds.
    pub(super) fn commit(
        &mut self,
        mut map: BlockMap,
        inline: Vec<InlinePages>,
        length: u64,
        kind: RecordKind,
    ) -> Result<()> {
        if self.is_in_doubt() {
            return Err(Error::invalid("the store has not decided about the commit before"));
        }
        if self.fenced {
            return self.resolve_pending();
        }
        let sequence = self.newest.sequence + 1;
        inline_entries(&inline, sequence).iter().for_each(|entry| map.assign(entry));
        let pages = join_pages(&inline);
        drop(inline);
        let mut gone = map.take_unreferenced();
        gone.extend(&self.orphans);
        // Its pages are forgotten above, when it has some.
        if self.newest.sequence > 0 && self.newest.kind != RecordKind::Open && self.newest.blocks == 0 {
            gone.push(ObjectId::Log(self.newest.sequence));
        }
        let mut checkpoint = self.newest.checkpoint;
        let changes = map.changes();
        let most = (map.runs() * MAP_ENTRY_BYTES / 8).clamp(self.least_changes, MAX_CHANGES_BYTES);
        let changes = if changes.len() * MAP_ENTRY_BYTES > most {
            gone.extend(checkpoint.map(|(hash, _)| ObjectId::Checkpoint(hash)));
            let (bytes, hash) =
                layout::encode_checkpoint(&self.incarnation, &random_bytes()?, sequence, &map.entries());
            // No reader takes a longer one.
            if bytes.len() as u64 > self.most_checkpoint {
                let name = &self.store.name;
                return Err(Error::invalid(format!("{name}: the archive is too fragmented for a bucket")));
            }
            let length = bytes.len() as u64;
            self.uploaded.push(ObjectId::Checkpoint(hash));
            if self.store.create(&object_path(&self.incarnation, &ObjectId::Checkpoint(hash)), &Arc::new(bytes))?
                == CreateOutcome::Conflict
            {
                return Err(Error::damaged(format!("{}: another checkpoint has the same name", self.store.name)));
            }
            checkpoint = Some((hash, length));
            map.reset_changes(RangeSet::new());
            Vec::new()
        } else {
            changes
        };
        let mut dead = self.tombstones.clone();
        dead.extend(gone.into_iter().map(|id| Tombstone::new(id, 0)));
        let mut dead = coalesce_tombstones(dead);
        // The next writer sees that the list is full and finds the omitted objects; but not omitted
        // records, whose names do not tell whether they are needed.
        dead.truncate(MAX_TOMBSTONES);
        let trailer = Trailer {
            kind,
            sequence,
            epoch: self.newest.epoch + u64::from(kind == RecordKind::Open),
            writer: self.writer,
            nonce: random_bytes()?,
            time: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            previous: self.newest.hash,
            checkpoint,
            length,
            ..initial_trailer(self.incarnation)
        };
        let body = RecordBody { changes, tombstones: dead, writer: self.owner.clone() };
        let (bytes, trailer) = layout::encode_record(&trailer, &pages, &body);
        // A record that readers reject must not be sent: it would define the archive forever.
        Trailer::decode(&bytes[bytes.len() - layout::TRAILER_BYTES..], &self.incarnation)?;
        self.in_doubt = Some(PendingRecord { bytes: Arc::new(bytes), trailer, map, tombstones: body.tombstones });
        self.resolve_pending()
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        self.in_doubt.is_some() && !self.fenced
    }

    /// Returns whether this writer cannot commit any more: it has closed, lost the archive, or its
    /// last record is in doubt.
    pub(super) fn is_over(&self) -> bool {
        self.fenced || self.in_doubt.is_some() || self.newest.kind == RecordKind::Close
    }

    /// Releases the archive with a record of its own and unchanged content.
    pub(super) fn close(&mut self) -> Result<()> {
        self.commit(self.map.clone(), Vec::new(), self.newest.length, RecordKind::Close)
    }

    /// Resolves the record in doubt by sending it again. Errors: as of [`WriterSession::commit`].
    pub(super) fn resolve_pending(&mut self) -> Result<()> {
        if self.fenced {
            let hint = match self.store.spool().map_or(0, UploadSpool::bytes) {
                0 => "",
                _ => "; the last writes are stored on this machine, see 'lockbox remote unsent'",
            };
            return Err(Error::InUse(format!("{}: another writer took over{hint}", self.store.name)));
        }
        let Some(pending) = &self.in_doubt else { return Ok(()) };
        let name = object_path(&self.incarnation, &ObjectId::Log(pending.trailer.sequence));
        match self.store.create(&name, &pending.bytes)? {
            CreateOutcome::Conflict => {
                self.fenced = true;
                // The spooled record needs its checkpoint, which a discard would remove.
                if pending.trailer.kind == RecordKind::Commit && self.spool_refused(&name, &pending.bytes) {
                    self.uploaded.clear();
                }
                return self.resolve_pending();
            }
            CreateOutcome::Created(date) => self.clock = date.map(|date| (date, Instant::now())),
        }
        if let Some(PendingRecord { trailer, map, tombstones, .. }) = self.in_doubt.take() {
            (self.newest, self.map, self.tombstones) = (trailer, map, tombstones);
            self.orphans.clear();
            self.uploaded.clear();
        }
        // Durable records have declared the new tombstones. The local clock would be too early after
        // a suspend.
        if let Some((date, _)) = self.clock {
            self.tombstones.iter_mut().filter(|dead| dead.since == 0).for_each(|dead| dead.since = date);
        }
        // The spooled objects are in the store. If the file cannot be emptied, the next writer
        // finds that out.
        if let Some(spool) = self.store.spool()
            && let Err(error) = spool.clear()
        {
            tracing::debug!(%error, "cannot empty the file of data that was sent");
        }
        Ok(())
    }

    /// Spools a record that lost against another writer, for its user to read (SPOOL-4): its
    /// objects stay in the store for a day. Returns whether it is spooled.
    fn spool_refused(&self, name: &str, bytes: &[u8]) -> bool {
        let Some(spool) = self.store.spool() else { return false };
        let spooled = spool.append_refused(name, bytes);
        match &spooled {
            Ok(()) => tracing::warn!("{}", refused_notice(&self.store.name)),
            Err(error) => tracing::warn!(
                "{}: the last writes are lost: cannot store them on this machine: {error}",
                self.store.name
            ),
        }
        spooled.is_ok()
    }

    /// Removes `uploaded` objects and checkpoints that no record names, until the deadline. The
    /// next record declares the rest dead, and `sending`, which are in flight. Returns whether the
    /// store responds.
    pub(super) fn discard_uploads(
        &mut self,
        mut uploaded: Vec<ObjectId>,
        sending: Vec<ObjectId>,
        until: Instant,
    ) -> bool {
        uploaded.append(&mut self.uploaded);
        let (left, error) = self.store.remove(&self.incarnation, &uploaded, Some(until));
        self.orphans.extend(left.into_iter().chain(sending));
        !error.is_some_and(|error| error.is_transient())
    }

    /// Removes objects that durable records declared dead for longer than the grace period, by the
    /// store's clock; after a step back, nothing. Failed removals are left to the next writer.
    /// Returns the number of removed objects and the first error.
    pub(super) fn remove_expired(&mut self) -> (u64, Option<RemoteError>) {
        self.remove_objects(&self.expired(MAX_REMOVED))
    }

    /// Returns the objects to remove now, at most `most`. A hostile record may call objects dead
    /// that it needs: these stay.
    pub(super) fn expired(&self, most: usize) -> Vec<ObjectId> {
        let Some(now) = self.store_time() else { return Vec::new() };
        let grace = self.store.grace.as_secs();
        let is_due = |dead: &Tombstone| now.checked_sub(dead.since).is_some_and(|age| age >= grace);
        let due = self.tombstones.iter().filter(|dead| is_due(dead)).flat_map(|dead| dead.ids());
        let checkpoint = self.newest.checkpoint.map(|(hash, _)| ObjectId::Checkpoint(hash));
        let is_needed = |id: &ObjectId| {
            self.map.references(id) || Some(*id) == checkpoint || *id == ObjectId::Log(self.newest.sequence)
        };
        due.filter(|id| !is_needed(id)).take(most).collect()
    }

    /// Removes objects, as in [`WriterSession::remove_expired`].
    pub(super) fn remove_objects(&mut self, due: &[ObjectId]) -> (u64, Option<RemoteError>) {
        let (left, error) = self.store.remove(&self.incarnation, due, None);
        self.forget_removed(due, &left);
        ((due.len() - left.len()) as u64, error)
    }

    /// Drops the tombstones of the objects of `due` that are not `left`.
    pub(super) fn forget_removed(&mut self, due: &[ObjectId], left: &HashSet<ObjectId>) {
        let gone: HashSet<ObjectId> = due.iter().filter(|id| !left.contains(id)).copied().collect();
        let stays = |dead: &Tombstone| -> Vec<Tombstone> {
            // A run without a removed record stays one.
            if !dead.ids().any(|id| gone.contains(&id)) {
                return vec![*dead];
            }
            dead.ids().filter(|id| !gone.contains(id)).map(|id| Tombstone::new(id, dead.since)).collect()
        };
        self.tombstones = coalesce_tombstones(self.tombstones.iter().flat_map(stays).collect());
    }

    /// Returns the objects that are dead for the grace period by dates of the store. A writer dates
    /// the deaths in its records: a thief of a key that may only add objects could write a record
    /// in which everything died long ago. So an object counts as dead if the newest record with an
    /// age of the grace period, by the store's list, calls it dead.
    fn confirmed_dead(&self) -> Result<Vec<ObjectId>> {
        let mut due = self.expired(MAX_REMOVED);
        let Some(now) = self.store_time().filter(|_| !due.is_empty()) else { return Ok(Vec::new()) };
        let before = now.saturating_sub(self.store.grace.as_secs());
        let sequence = self.store.newest_sequence_before(&self.incarnation, before)?;
        let record = sequence.map(|sequence| self.store.read_record(&self.incarnation, sequence)).transpose()?;
        let Some((_, body)) = record.flatten() else { return Ok(Vec::new()) };
        let dead: HashSet<ObjectId> = body.tombstones.into_iter().flat_map(Tombstone::ids).collect();
        due.retain(|id| dead.contains(id));
        Ok(due)
    }

    /// Returns the time by the store's clock; None if its last response had none.
    fn store_time(&self) -> Option<u64> {
        self.clock.map(|(date, at)| date + at.elapsed().as_secs())
    }

    /// Removes objects that are dead for the grace period, declares orphans dead and closes the
    /// archive. Errors: as of [`WriterSession::commit`]; errors of listing and removing.
    pub(super) fn collect_garbage(mut self) -> Result<CollectReport> {
        let due = self.confirmed_dead();
        let (removed, error) = due.as_deref().map_or((0, None), |due| self.remove_objects(due));
        let found = self.store.sweep(&self.incarnation).and_then(|()| self.find_orphans());
        // It goes in any case, or would be in the way of the next one.
        if let Ok(found) = &found {
            self.orphans.clone_from(found);
        }
        if !self.orphans.is_empty() {
            // The response to this record dates it, and the next record stores that date: the grace
            // period of the orphans begins now.
            self.commit(self.map.clone(), Vec::new(), self.newest.length, RecordKind::Commit)?;
        }
        self.close()?;
        due?;
        if let Some(error) = error {
            return Err(self.store.to_error(error));
        }
        Ok(CollectReport {
            removed,
            found: found?.len() as u64,
            waiting: self.tombstones.iter().map(|dead| u64::from(dead.extra) + 1).sum(),
            notice: self.notice,
        })
    }

    /// Creates a segment. Returns false if it `is_divisible` and has to be divided
    /// ([`BucketStore::create_with`]).
    pub(super) fn create_segment(
        store: &BucketStore,
        incarnation: &Incarnation,
        id: &ObjectId,
        bytes: &Arc<Vec<u8>>,
        is_divisible: bool,
    ) -> Result<bool> {
        let created = store.create_with(&object_path(incarnation, id), bytes, is_divisible)?;
        if created == Some(CreateOutcome::Conflict) {
            return Err(Error::damaged(format!("{}: another segment has the same name", store.name)));
        }
        Ok(created.is_some())
    }
}

/// Sorts records before other objects and merges consecutive ones that died within one hour of the
/// store's clock: a writer that commits once a second creates 86,400 in the grace period, and each
/// commit stores the list. A merged entry has the time of its latest record. Removes duplicates of
/// records.
fn coalesce_tombstones(tombstones: Vec<Tombstone>) -> Vec<Tombstone> {
    let number = |dead: &Tombstone| dead.id.sequence();
    let (mut records, objects): (Vec<Tombstone>, Vec<Tombstone>) =
        tombstones.into_iter().partition(|dead| number(dead).is_some());
    records.sort_by_key(number);
    let mut all: Vec<Tombstone> = Vec::new();
    for mut next in records {
        let count = |dead: &Tombstone| u64::from(dead.extra) + 1;
        // A hostile list of thousands of overlapping runs would be expanded when one of their
        // records is removed.
        if let (Some(end), Some(first)) = (all.last().and_then(|last| Some(number(last)? + count(last))), number(&next))
            && first < end
        {
            let Some(extra) = u64::from(next.extra).checked_sub(end - first) else { continue };
            next = Tombstone { id: ObjectId::Log(end), extra: extra as u32, ..next };
        }
        match all.last_mut() {
            Some(last)
                if number(last).map(|first| first + count(last)) == number(&next)
                    && (last.since == 0) == (next.since == 0)
                    && last.since / HOUR == next.since / HOUR
                    && count(last) + u64::from(next.extra) <= MAX_BLOCKS.into() =>
            {
                last.extra += next.extra + 1;
                last.since = last.since.max(next.since);
            }
            _ => all.push(next),
        }
    }
    all.extend(objects);
    all
}

/// Returns the map entries of pages stored in the record of this number.
pub(super) fn inline_entries(inline: &[InlinePages], sequence: u64) -> Vec<MapEntry> {
    object_entries(ObjectId::Log(sequence), &inline.iter().map(InlinePages::blocks).collect::<Vec<_>>())
}

/// Reads the incarnation of the archive, created if it does not exist.
fn open_or_create_incarnation(store: &BucketStore) -> Result<Incarnation> {
    for _ in 0..MIN_ATTEMPTS {
        if let Some(found) = store.read_incarnation().map_err(|error| store.to_error(error))? {
            return found;
        }
        let created = random_bytes()?;
        match store.create(MARKER, &Arc::new(layout::encode_marker(&created)))? {
            CreateOutcome::Created(_) => return Ok(created),
            CreateOutcome::Conflict => {}
        }
    }
    Err(store.to_error(RemoteError::Unsupported("an object that was just written is not found".into())))
}

fn initial_trailer(incarnation: Incarnation) -> Trailer {
    Trailer { incarnation, ..Trailer::default() }
}

fn refused_notice(name: &str) -> String {
    format!(
        "{name}: another writer took over before the last writes of this machine were sent; they are stored here only, see 'lockbox remote unsent'"
    )
}

fn with_notice(notice: String, error: Error) -> Error {
    match error {
        Error::InUse(why) => Error::InUse(format!("{notice}; {why}")),
        Error::Io { context, source } => Error::Io { context: format!("{notice}; {context}"), source },
        error => {
            tracing::warn!("{notice}");
            error
        }
    }
}

fn in_use(store: &BucketStore, owner: &WriterIdentity, before: &BucketVersion) -> Error {
    let host = lockbox_terminal::display(before.writer.host.as_bytes());
    let time = lockbox_terminal::utc(before.trailer.time.min(MAX_TIME) as i64);
    let process = before.writer.process;
    let state = match owner.program_here(&before.writer) {
        Some(program) => format!("process {process} ({program}) of this machine"),
        None => format!("process {process} there, unless it ended without closing the archive"),
    };
    Error::InUse(format!(
        "{}: a writer on {host} has it open: {state}; its newest record is from {time} UTC",
        store.name
    ))
}

/// Replays the spool before a writer acquires the archive (SPOOL-3). Returns whether objects were
/// refused: another writer was first, or the store's newest record is not the predecessor. Errors:
/// errors of requests: then the spool is unchanged.
fn replay(store: &BucketStore, spool: &UploadSpool, incarnation: &Incarnation) -> Result<bool> {
    let objects = spool.replayable_objects(incarnation);
    let refused = if objects.is_empty() { None } else { first_refused(store, spool, incarnation, &objects)? };
    let Some(first) = refused else {
        spool.clear()?;
        return Ok(false);
    };
    // That its writer had gone says nothing that another one does not say by coming, and has
    // nothing that no record before has.
    let is_last_word = |(name, id): &(String, ObjectId)| match id {
        ObjectId::Log(_) => Ok(decode_trailer(&read_object(spool, name)?, incarnation)?.kind == RecordKind::Close),
        ObjectId::Segment(_) | ObjectId::Checkpoint(_) => Ok(true),
    };
    if objects[first..].iter().map(is_last_word).collect::<Result<Vec<bool>>>()?.into_iter().all(|is_so| is_so) {
        spool.clear()?;
        return Ok(false);
    }
    spool.mark_refused()?;
    Ok(true)
}

fn read_object(spool: &UploadSpool, name: &str) -> Result<Vec<u8>> {
    match spool.object(name) {
        Some(object) => object.map_err(|error| Error::io("cannot read the unsent data", error)),
        None => Err(Error::damaged(format!("the unsent data lacks the object {name}"))),
    }
}

fn decode_trailer(record: &[u8], incarnation: &Incarnation) -> Result<Trailer> {
    Trailer::decode(&record[record.len().saturating_sub(TRAILER_BYTES)..], incarnation)
}

/// Sends the objects that follow the store's newest record. Returns the index of the first refused
/// one.
fn first_refused(
    store: &BucketStore,
    spool: &UploadSpool,
    incarnation: &Incarnation,
    objects: &[(String, ObjectId)],
) -> Result<Option<usize>> {
    let mut newest = store.newest_sequence(incarnation)?.unwrap_or(0);
    // The record that the next one has to follow upon.
    let mut before = None;
    // Segments and checkpoints of the next record.
    let mut parts = Vec::new();
    for (at, (name, id)) in objects.iter().enumerate() {
        let ObjectId::Log(sequence) = *id else {
            parts.push(name);
            continue;
        };
        let bytes = Arc::new(read_object(spool, name)?);
        let trailer = decode_trailer(&bytes, incarnation)?;
        let there = if sequence <= newest { store.read_record(incarnation, sequence)? } else { None };
        let is_there = there.is_some_and(|(there, _)| there.hash == trailer.hash);
        if !is_there {
            if newest + 1 != sequence {
                return Ok(Some(at));
            }
            let follows = match before {
                Some(hash) => hash == trailer.previous,
                None => store.read_record(incarnation, newest)?.is_some_and(|(last, _)| last.hash == trailer.previous),
            };
            if !follows {
                return Ok(Some(at));
            }
            for part in &parts {
                if store.create(part, &Arc::new(read_object(spool, part)?))? == CreateOutcome::Conflict {
                    return Ok(Some(at));
                }
            }
            if store.create(name, &bytes)? == CreateOutcome::Conflict {
                return Ok(Some(at));
            }
            newest = sequence;
        }
        before = Some(trailer.hash);
        parts.clear();
    }
    Ok(None)
}
