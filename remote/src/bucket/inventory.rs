//! Inventory of a store without a key: lists the archives below a prefix, and checks the objects of
//! one.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use lockbox::{Error, Result};
use lockbox_terminal::display;
use rangemap::RangeSet;

use super::block_cache::{WholeObjects, has_expected_content};
use super::layout::{self, BLOCK, Incarnation, RecordKind, TRAILER_BYTES};
use super::map::ObjectId;
use super::objects::{
    ListedObject, ObjectCreation, ObjectRange, ObjectStore, UnreadableDir, describe, object_path, parse_path,
};
use super::store::{BucketStore, MARKER};
use super::version::BucketVersion;
use crate::RemoteOptions;
use crate::hex;
use crate::range_source::{RemoteError, RemoteResult};

/// Maximum restarts when a concurrent writer commits during the scan.
const MAX_ATTEMPTS: usize = 8;

/// Progress callback, called for each slow request with bytes done and total bytes if they are
/// known; an error cancels the operation.
pub type ProgressFn<'a> = dyn FnMut(u64, u64) -> Result<()> + 'a;

/// Number and total size of objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObjectTotals {
    pub objects: u64,
    pub bytes: u64,
}

impl ObjectTotals {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// Archive in a store, or an unreadable directory.
#[derive(Debug)]
pub struct StoredArchive {
    pub address: String,
    /// All objects of the archive, needed or not.
    pub amount: ObjectTotals,
    /// Time of its newest record by the store's clock, in seconds since 1970.
    pub time: Option<u64>,
    /// Its newest record; None before the first commit.
    pub newest: Result<Option<NewestRecord>>,
}

/// Summary of the newest record of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewestRecord {
    pub number: u64,
    /// Length of the archive in bytes.
    pub length: u64,
    /// Machine of a writer that has not closed the archive.
    pub writer: Option<String>,
}

/// Object store restricted to a further prefix.
pub(super) struct PrefixedStore {
    pub(super) objects: Arc<dyn ObjectStore>,
    pub(super) prefix: String,
}

impl ObjectStore for PrefixedStore {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.objects.create(&format!("{}{name}", self.prefix), bytes)
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.objects.get(&format!("{}{name}", self.prefix), part)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.list_tolerant(prefix, after, most, &mut |_, error| Err(error))
    }

    fn list_tolerant(
        &self,
        prefix: &str,
        after: &str,
        most: usize,
        on_unreadable: &mut UnreadableDir<'_>,
    ) -> RemoteResult<Vec<ListedObject>> {
        let stripped = |name: &str| name.get(self.prefix.len()..).unwrap_or_default().to_owned();
        let mut own = |name: &str, error| on_unreadable(&stripped(name), error);
        let after = if after.is_empty() { String::new() } else { format!("{}{after}", self.prefix) };
        let mut listed = self.objects.list_tolerant(&format!("{}{prefix}", self.prefix), &after, most, &mut own)?;
        listed.iter_mut().for_each(|object| object.name = stripped(&object.name));
        Ok(listed)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.objects.remove(&format!("{}{name}", self.prefix))
    }
}

/// Objects of one incarnation, summarised from a list.
#[derive(Default)]
struct ObjectSummary {
    amount: ObjectTotals,
    /// Time of the first listed record.
    newest: Option<Option<u64>>,
}

/// Lists the archives by name, with the address that `address` derives from the name. Unreadable
/// directories, with unknown content, follow. Errors: errors of requests and of `step`;
/// `Unsupported` for more objects than the limit.
pub(crate) fn list_archives(
    objects: Box<dyn ObjectStore>,
    address: &dyn Fn(&str) -> String,
    options: &RemoteOptions,
    step: &mut ProgressFn<'_>,
) -> Result<Vec<StoredArchive>> {
    let objects: Arc<dyn ObjectStore> = objects.into();
    let below = |prefix: &str| PrefixedStore { objects: objects.clone(), prefix: prefix.to_owned() };
    let store = BucketStore::new(Box::new(below("")), display(address("").as_bytes()), options.timeout);
    // Keyed by archive name and incarnation: a prefix that was emptied and reused may have two.
    let mut summaries: BTreeMap<(String, String), ObjectSummary> = BTreeMap::new();
    let mut markers: Vec<(String, u64)> = Vec::new();
    let mut on_unreadable: BTreeMap<String, RemoteError> = BTreeMap::new();
    let mut record_unreadable = |name: &str, error| {
        on_unreadable.insert(name.to_owned(), error);
        Ok(())
    };
    store.walk_tolerant("", &mut record_unreadable, &mut |object| {
        step(0, 0)?;
        if let Some(above) = object.name.strip_suffix(MARKER)
            && (above.is_empty() || above.ends_with('/'))
        {
            markers.push((above.to_owned(), object.bytes));
        } else if let Some((above, incarnation, kind)) = split_object_name(&object.name) {
            let summary = summaries.entry((above.to_owned(), incarnation.to_owned())).or_default();
            summary.amount.add(object.bytes);
            if kind == "log" {
                summary.newest.get_or_insert(object.time);
            }
        }
        Ok(())
    })?;
    let mut found = Vec::new();
    let address = |above: &str| address(above.trim_end_matches('/'));
    let place =
        |above: &str| BucketStore::new(Box::new(below(above)), display(address(above).as_bytes()), options.timeout);
    for (above, bytes) in markers {
        step(0, 0)?;
        let store = place(&above);
        let mut stored = StoredArchive {
            address: address(&above),
            amount: ObjectTotals { objects: 1, bytes },
            time: None,
            newest: Ok(None),
        };
        match store.existing_incarnation() {
            Ok(incarnation) => {
                if let Some(summary) = summaries.get(&(above, hex(&incarnation))) {
                    stored.amount.objects += summary.amount.objects;
                    stored.amount.bytes = stored.amount.bytes.saturating_add(summary.amount.bytes);
                    stored.time = summary.newest.flatten();
                }
                stored.newest = read_newest(&store, &incarnation);
            }
            // It was removed meanwhile.
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => stored.newest = Err(error),
        }
        found.push(stored);
    }
    for (above, error) in on_unreadable {
        found.push(StoredArchive {
            address: address(&above),
            amount: ObjectTotals::default(),
            time: None,
            newest: Err(place(&above).to_error(error)),
        });
    }
    Ok(found)
}

/// Splits the name of an object into the archive's name with its slash, the incarnation and the
/// kind.
fn split_object_name(name: &str) -> Option<(&str, &str, &str)> {
    let (path, kind) = name.rsplit_once('/')?.0.rsplit_once('/')?;
    let (above, incarnation) = path.split_at(path.rfind('/').map_or(0, |at| at + 1));
    let is_incarnation = incarnation.len() == 32 && incarnation.bytes().all(|digit| digit.is_ascii_hexdigit());
    (is_incarnation && ["log", "seg", "map"].contains(&kind)).then_some((above, incarnation, kind))
}

fn read_newest(store: &BucketStore, incarnation: &Incarnation) -> Result<Option<NewestRecord>> {
    let Some(number) = store.newest_sequence(incarnation)? else { return Ok(None) };
    // Removed meanwhile: there is a newer one, which the next look finds.
    let Some((trailer, body)) = store.read_record(incarnation, number)? else { return Ok(None) };
    let writer = (trailer.kind != RecordKind::Close).then_some(body.writer.host);
    Ok(Some(NewestRecord { number, length: trailer.length, writer }))
}

/// Result of checking the objects of an archive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectCheck {
    /// Sequence of the newest record.
    pub number: u64,
    pub needed: ObjectTotals,
    /// Faults, one sentence each.
    pub faults: Vec<String>,
    /// Objects declared dead, to be removed after a day.
    pub dead: ObjectTotals,
    /// Objects that no record names: of an active writer, or of an interrupted one.
    pub unnamed: ObjectTotals,
    /// Records kept so that their numbers stay taken.
    pub records: ObjectTotals,
    /// Bytes read and compared.
    pub read: u64,
}

/// Checks that all objects of the newest record exist with their original length; with `whole`,
/// also their content. Errors: errors of requests and of `step`; `NotArchive`; `Damaged` when no
/// newest record can be read.
pub(crate) fn check_objects(
    objects: Box<dyn ObjectStore>,
    name: String,
    options: &RemoteOptions,
    whole: bool,
    step: &mut ProgressFn<'_>,
) -> Result<ObjectCheck> {
    let store = BucketStore::new(objects, name, options.timeout);
    let incarnation = store.existing_incarnation()?;
    check_incarnation(&store, &incarnation, whole, None, step)
}

/// Like [`check_objects`] with the content, for an archive of objects; None if the archive is one
/// object. Objects that `received` has a verdict about are not read again.
pub(crate) fn verify_objects(
    objects: Box<dyn ObjectStore>,
    name: String,
    options: &RemoteOptions,
    received: Option<&WholeObjects>,
    step: &mut ProgressFn<'_>,
) -> Result<Option<ObjectCheck>> {
    let store = BucketStore::new(objects, name, options.timeout);
    let Some((incarnation, _)) = store.find_archive()? else { return Ok(None) };
    check_incarnation(&store, &incarnation, true, received, step).map(Some)
}

fn check_incarnation(
    store: &BucketStore,
    incarnation: &Incarnation,
    whole: bool,
    received: Option<&WholeObjects>,
    step: &mut ProgressFn<'_>,
) -> Result<ObjectCheck> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let version = BucketVersion::load_newest(store, incarnation)?;
        let version = version.ok_or_else(|| store.nothing_committed())?;
        let check = check_version(store, incarnation, &version, whole, received, step)?;
        // A missing object may have been removed since: check again if the writer has committed.
        let is_final = check.faults.is_empty() || attempts == MAX_ATTEMPTS;
        if is_final || store.newest_sequence(incarnation)? == Some(check.number) {
            return Ok(check);
        }
    }
}

fn check_version(
    store: &BucketStore,
    incarnation: &Incarnation,
    version: &BucketVersion,
    whole: bool,
    received: Option<&WholeObjects>,
    step: &mut ProgressFn<'_>,
) -> Result<ObjectCheck> {
    let number = version.trailer.sequence;
    let mut check = ObjectCheck { number, ..ObjectCheck::default() };
    let mut there: BTreeMap<ObjectId, u64> = BTreeMap::new();
    store.walk(&format!("{}/", hex(incarnation)), &mut |object| {
        step(0, 0)?;
        if let Some(id) = parse_path(incarnation, &object.name) {
            there.insert(id, object.bytes);
        }
        Ok(())
    })?;
    // Not each of them: a stranger's list may name many millions.
    let (mut records, mut objects): (RangeSet<u64>, HashSet<ObjectId>) = Default::default();
    for dead in &version.tombstones {
        match dead.id.sequence() {
            Some(first) => records.insert(first..first.saturating_add(u64::from(dead.extra) + 1)),
            None => drop(objects.insert(dead.id)),
        }
    }
    let is_dead = |id: &ObjectId| match id {
        ObjectId::Log(sequence) => records.contains(sequence),
        id => objects.contains(id),
    };
    let mut needed: Vec<(ObjectId, ExpectedLength)> =
        version.map.objects_with_sizes().map(|(id, blocks)| (id, ExpectedLength::Blocks(blocks))).collect();
    needed.retain(|(id, _)| *id != ObjectId::Log(number));
    needed.push((ObjectId::Log(number), ExpectedLength::Exactly(version.trailer.bytes())));
    needed.extend(
        version.trailer.checkpoint.map(|(hash, bytes)| (ObjectId::Checkpoint(hash), ExpectedLength::Exactly(bytes))),
    );
    let named: HashSet<ObjectId> = needed.iter().map(|(id, _)| *id).collect();
    for (id, bytes) in &there {
        match id {
            id if named.contains(id) => check.needed.add(*bytes),
            id if is_dead(id) => check.dead.add(*bytes),
            ObjectId::Log(_) => check.records.add(*bytes),
            ObjectId::Segment(_) | ObjectId::Checkpoint(_) => check.unnamed.add(*bytes),
        }
    }
    let total = if whole { check.needed.bytes } else { 0 };
    for (id, shape) in needed {
        let Some(bytes) = there.get(&id) else {
            // Some stores list late.
            match store.get(&object_path(incarnation, &id), ObjectRange::Last(1)) {
                Err(RemoteError::NotFound) => check.faults.push(format!("{} is missing", describe(&id))),
                Err(error) => return Err(store.to_error(error)),
                Ok(_) => check.needed.objects += 1,
            }
            step(check.read, total)?;
            continue;
        };
        if !shape.fits(&id, *bytes) {
            check.faults.push(format!("{} has a wrong length: {bytes} bytes", describe(&id)));
        } else if whole {
            step(check.read, total)?;
            let is_intact = match received.and_then(|received| received.verdict(&id)) {
                Some(verdict) => Ok(verdict),
                None => store
                    .get(&object_path(incarnation, &id), ObjectRange::All(*bytes))
                    .map(|content| has_expected_content(incarnation, &id, &content)),
            };
            match is_intact {
                Ok(true) => {}
                Ok(false) => check.faults.push(format!("{} has altered content", describe(&id))),
                Err(RemoteError::NotFound) => check.faults.push(format!("{} is missing", describe(&id))),
                Err(error) => return Err(store.to_error(error)),
            }
            check.read += bytes;
        }
    }
    check.faults.sort();
    Ok(check)
}

#[derive(Clone, Copy)]
enum ExpectedLength {
    Exactly(u64),
    /// Blocks of pages, followed by a trailer of variable length.
    Blocks(u32),
}

impl ExpectedLength {
    fn fits(self, id: &ObjectId, bytes: u64) -> bool {
        match (self, id) {
            (ExpectedLength::Exactly(wanted), _) => bytes == wanted,
            (ExpectedLength::Blocks(blocks), ObjectId::Segment(_)) => layout::is_segment_length(blocks, bytes),
            (ExpectedLength::Blocks(blocks), _) => {
                let body = bytes.checked_sub(u64::from(blocks) * BLOCK + TRAILER_BYTES as u64);
                body.is_some_and(|body| body <= layout::MAX_BODY)
            }
        }
    }
}

/// Result of a garbage collection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CollectReport {
    /// Removed objects.
    pub removed: u64,
    /// Orphans found, which are dead from now on.
    pub found: u64,
    /// Dead objects still in their grace period.
    pub waiting: u64,
    /// Message for the user about the acquisition.
    pub notice: Option<String>,
}
