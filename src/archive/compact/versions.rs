//! Copies all versions of one volume into a new one, each as the differences to the previous
//! version, and compares all versions of two volumes.
//!
//! The versions are the snapshots, oldest first, then the live tree.
//!
//! # Why the new archive preserves the required invariants
//!
//! For each snapshot, oldest first, the live tree of the new archive is changed to equal it, by
//! applying the differences to the previous version; then a snapshot is created. The live tree
//! follows at the end. The new archive thus has a regular history, with commits, snapshots, counts
//! and dead lists created by the regular code, and only differences are written.
//!
//! - *Born* is the generation of the new archive in which the extent was added, since the old
//!   generations do not relate to the new snapshots. An extent added with a version is born after
//!   the previous snapshot was created, and no later than its own, as specification section 8
//!   requires. An extent that remains is not a difference and keeps its record.
//! - A removed extent was in the previous version, so it was born no later than the newest
//!   snapshot, and `Operation::release` moves it to the dead list of that snapshot with its count.
//!   Counts never decrease. The count of a page is therefore the number of extents in all versions
//!   that name it, and is set once, when the page is written (`PageCopier::carry`). Until the last
//!   of them is added the count is too high, which is never observed (COMPACT-2).
//! - A page named by several extents, in one version or in several, is written once, with all
//!   ranges that any of them names (`PageCopier::announce`). The old archive counts such a page at
//!   least twice: an extent in a snapshot keeps its count when it leaves the live tree, and the
//!   extent that names the page instead has another. If a hostile archive contradicts that, the
//!   page is written twice, which is valid.
//! - Trees are copied as they are, including the orphans and pending truncations in snapshots: an
//!   orphan may have a name in the next version. The live tree has none, because the session before
//!   has removed them (COMPACT-1).
//! - Snapshots get new ids from the continuing counter, so an id that a program read from the old
//!   file never denotes another snapshot.
//!
//! # Why comparing differences suffices
//!
//! By induction over the versions. Before the first version both are empty, and its differences are
//! all of its records. If all previous versions are equal, and the step to the next one changes the
//! same keys to the same values in both, then the next version is equal too; unchanged data is in
//! the same nodes and pages as before, because the walk over differences skips only shared ones,
//! and need not be read again. Records that move with the hashes of names are compared entry by
//! entry: each entry added or removed in the old archive is added or removed at its new position in
//! the new one, and the numbers are equal, so there are no others.
//!
//! Extents are equal if their bytes are, wherever they are stored. Their *born* differs: it must be
//! after the new archive's previous snapshot and not after the version itself, which decides
//! between freeing a page and keeping it (specification section 8).

use std::convert::identity;

use lockbox_terminal::display;

use super::{BytesWatch, PageCopier, relay};
use crate::error::{Error, Result};
use crate::format::values::{Extent, SnapshotValue, decode_index, decode_xattrs, encode_index, encode_xattrs};
use crate::format::{Generation, Ino, Key, MAX_VALUE, Pointer, kind};
use crate::frame::Compression;
use crate::fs::name_hash;
use crate::txn::{Difference, DifferenceCursor, Operation, ReadView, View, Volume};

/// Records per batch; their values are at most 3,500 bytes long.
const BATCH: usize = 512;

pub(super) struct ArchiveVersions<'v> {
    volume: &'v Volume,
    snapshots: Vec<(u64, SnapshotValue)>,
}

/// One version with its predecessor; the first has none.
pub(super) struct VersionStep<'v> {
    older: Option<ReadView<'v>>,
    newer: ReadView<'v>,
    /// `None` for the live tree.
    snapshot: Option<SnapshotValue>,
    /// Generation of the commit with this tree.
    generation: Generation,
}

/// Iterator over the differing records of a step.
pub(super) struct VersionDifference<'s> {
    differing: DifferenceCursor<'s>,
    batch: std::vec::IntoIter<Difference>,
}

impl<'v> ArchiveVersions<'v> {
    pub(super) fn of(volume: &'v Volume) -> Result<ArchiveVersions<'v>> {
        Ok(ArchiveVersions { volume, snapshots: volume.readable_snapshots()? })
    }

    pub(super) fn count(&self) -> usize {
        self.snapshots.len() + 1
    }

    /// Returns whether the snapshots of both have equal names and times. Their content is not
    /// compared.
    pub(super) fn are_named_as(&self, other: &ArchiveVersions<'_>) -> bool {
        let named = |(_, snapshot): &(u64, SnapshotValue)| (snapshot.name.clone(), snapshot.time);
        self.snapshots.iter().map(named).eq(other.snapshots.iter().map(named))
    }

    pub(super) fn step(&self, number: usize) -> Result<VersionStep<'v>> {
        let reading = |number: usize| match self.snapshots.get(number) {
            Some((id, _)) => ReadView::of_snapshot(self.volume, *id),
            None => Ok(ReadView::of(self.volume, self.volume.state())),
        };
        let snapshot = self.snapshots.get(number).map(|(_, snapshot)| snapshot.clone());
        let of_snapshot = snapshot.as_ref().map(|snapshot| snapshot.generation);
        Ok(VersionStep {
            older: number.checked_sub(1).map(reading).transpose()?,
            newer: reading(number)?,
            generation: of_snapshot.unwrap_or_else(|| self.volume.durable().generation),
            snapshot,
        })
    }
}

impl VersionStep<'_> {
    pub(super) fn older(&self) -> Option<View<'_>> {
        self.older.as_ref().map(ReadView::view)
    }

    pub(super) fn newer(&self) -> View<'_> {
        self.newer.view()
    }

    pub(super) fn walk(&self) -> VersionDifference<'_> {
        let differing = self.newer().differences_since(self.older().as_ref());
        VersionDifference { differing, batch: Vec::new().into_iter() }
    }

    /// Adds the snapshot's name to a damage error, because removing that snapshot is the remedy.
    pub(super) fn named(&self, error: Error) -> Error {
        match (error, &self.snapshot) {
            (Error::Damaged(reason), Some(snapshot)) => {
                Error::damaged(format!("snapshot {}: {reason}", display(&snapshot.name)))
            }
            (error, _) => error,
        }
    }
}

impl VersionDifference<'_> {
    /// Returns the next differences; `None` at the end.
    pub(super) fn batch(&mut self) -> Result<Option<Vec<Difference>>> {
        loop {
            let mut batch = self.differing.batch(BATCH)?;
            if batch.is_empty() {
                return Ok(None);
            }
            batch.retain(|difference| is_carried(difference.key));
            if !batch.is_empty() {
                return Ok(Some(batch));
            }
        }
    }

    /// Returns the next difference that `wanted` accepts; `None` at the end. Must not be mixed with
    /// [`Self::batch`].
    pub(super) fn next(&mut self, mut wanted: impl FnMut(&Difference) -> Result<bool>) -> Result<Option<Difference>> {
        loop {
            for difference in self.batch.by_ref() {
                if wanted(&difference)? {
                    return Ok(Some(difference));
                }
            }
            let Some(batch) = self.batch()? else { return Ok(None) };
            self.batch = batch.into_iter();
        }
    }
}

/// Returns whether records with this key are copied. Object number 0 does not exist; its records
/// other than orphans and trims are stray (specification 6.2).
fn is_carried(key: Key) -> bool {
    key.object != 0 || matches!(key.kind, kind::ORPHAN | kind::TRIM)
}

/// Copies all versions, and the history of sessions.
pub(super) fn copy(
    from: &Volume,
    to: &Volume,
    names: &NameRehash,
    compression: Option<Compression>,
    watch: &mut BytesWatch<'_>,
) -> Result<()> {
    let versions = ArchiveVersions::of(from)?;
    let state = from.state();
    let mut pages = PageCopier { compression, ..PageCopier::new(from, &state, to, identity) };
    for number in 0..versions.count() {
        let step = versions.step(number)?;
        announce(&step, &mut pages, watch).map_err(|error| step.named(error))?;
    }
    copy_history(from, to)?;
    let mut replay = VersionReplay { pages, to, names, done: 0, watch };
    for number in 0..versions.count() {
        let step = versions.step(number)?;
        replay.step(&step).map_err(|error| step.named(error))?;
        if let Some(snapshot) = &step.snapshot {
            to.take_snapshot_again(snapshot)?;
        }
    }
    to.close()
}

fn announce(step: &VersionStep<'_>, pages: &mut PageCopier<'_>, watch: &mut BytesWatch<'_>) -> Result<()> {
    let mut walk = step.walk();
    while let Some(batch) = walk.batch()? {
        for value in batch.iter().filter(|one| one.key.kind == kind::EXTENT).filter_map(|one| one.new.as_ref()) {
            pages.announce(&Extent::decode(value)?)?;
        }
        watch(0)?;
    }
    Ok(())
}

struct VersionReplay<'a, 'w> {
    pages: PageCopier<'a>,
    to: &'a Volume,
    names: &'a NameRehash,
    /// Bytes of file data copied.
    done: u64,
    watch: &'a mut BytesWatch<'w>,
}

/// Changes of one operation; its pages are already written.
type DifferenceBatch = (Vec<Difference>, Vec<(Pointer, u32)>);

impl VersionReplay<'_, '_> {
    fn step(&mut self, step: &VersionStep<'_>) -> Result<()> {
        let VersionReplay { pages, to, names, done, watch } = self;
        let mut walk = step.walk();
        let read = |hand_on: &mut dyn FnMut(DifferenceBatch) -> Result<()>| {
            while let Some(mut batch) = walk.batch()? {
                let mut adopted = Vec::new();
                for Difference { key, new, .. } in batch.iter_mut().filter(|one| one.key.kind == kind::EXTENT) {
                    let Some(value) = new else { continue };
                    *done += pages.carry(*key, value, &mut adopted)?;
                    watch(*done)?;
                }
                hand_on((batch, adopted))?;
                watch(*done)?;
            }
            Ok(())
        };
        relay(read, |(batch, adopted): DifferenceBatch| {
            // Each with a dead list entry; a reference count above 1 changes at most three records.
            let records = 2 * batch.len() as u64 + 3 * adopted.len() as u64;
            to.operate(records, false, |op| {
                adopted.iter().try_for_each(|(page, extents)| op.adopt(page, *extents))?;
                batch.iter().try_for_each(|difference| change(op, names, difference))
            })
        })
    }
}

fn change(op: &mut Operation<'_>, names: &NameRehash, difference: &Difference) -> Result<()> {
    let Difference { key, new, .. } = difference;
    if names.moves(*key) {
        return names.change(op, difference);
    }
    if key.kind == kind::EXTENT {
        return change_extent(op, difference);
    }
    let is_inode = key.kind == kind::INODE && key.sub == 0;
    match new {
        Some(value) if !op.insert(*key, value)? && is_inode => op.inode_made(),
        None if op.remove(*key)? && is_inode => op.inode_gone(),
        _ => {}
    }
    Ok(())
}

/// Changes an extent; its page is already written and counted.
fn change_extent(op: &mut Operation<'_>, Difference { key, new, .. }: &Difference) -> Result<()> {
    let replaced = op.view().get(*key, Extent::decode)?;
    match new {
        Some(value) => {
            let extent = Extent { born: op.generation(), ..Extent::decode(value)? };
            op.insert(*key, &extent.encode())?;
        }
        None => drop(op.remove(*key)?),
    }
    replaced.map_or(Ok(()), |extent| op.release(&extent.page, extent.born))
}

fn copy_history(from: &Volume, to: &Volume) -> Result<()> {
    for part in from.history()?.chunks(512) {
        to.operate(part.len() as u64, false, |op| {
            part.iter().try_for_each(|(key, value)| op.insert_history(*key, value))
        })?;
    }
    Ok(())
}

/// Compares all versions: equal records, and equal bytes of every extent. Errors: `Damaged` naming
/// the inode that differs.
pub(in crate::archive) fn compare(
    from: &Volume,
    to: &Volume,
    names: &NameRehash,
    watch: &mut BytesWatch<'_>,
) -> Result<()> {
    let (old, new) = (ArchiveVersions::of(from)?, ArchiveVersions::of(to)?);
    if !old.are_named_as(&new) {
        return Err(Error::damaged("the new archive has other snapshots"));
    }
    let mut comparison = Comparison { from, to, names, before: Generation(0), done: 0, watch };
    for number in 0..old.count() {
        let (ours, theirs) = (old.step(number)?, new.step(number)?);
        comparison.step(&ours, &theirs).map_err(|error| ours.named(error))?;
        comparison.before = theirs.generation;
    }
    Ok(())
}

struct Comparison<'a, 'w> {
    from: &'a Volume,
    to: &'a Volume,
    names: &'a NameRehash,
    /// Generation of the previous version in the new archive.
    before: Generation,
    /// Bytes of file data compared.
    done: u64,
    watch: &'a mut BytesWatch<'w>,
}

fn differs(key: Key) -> Error {
    Error::damaged(format!("the new archive differs: inode={} kind={}", key.object, key.kind))
}

impl Comparison<'_, '_> {
    fn step(&mut self, ours: &VersionStep<'_>, theirs: &VersionStep<'_>) -> Result<()> {
        let names = self.names;
        let (mut old, mut new) = (ours.walk(), theirs.walk());
        let (mut moved, mut found) = (EntryCounts::default(), EntryCounts::default());
        loop {
            let one = old.next(|difference| match names.moves(difference.key) {
                true => {
                    let there = names.find(theirs.older(), theirs.newer(), difference)?;
                    moved.add(there.ok_or_else(|| differs(difference.key))?);
                    Ok(false)
                }
                false => Ok(true),
            })?;
            let other = new.next(|difference| match names.moves(difference.key) {
                true => {
                    found.add(NameRehash::count(difference)?);
                    Ok(false)
                }
                false => Ok(true),
            })?;
            let (one, other) = match (one, other) {
                (Some(one), Some(other)) => (one, other),
                (None, None) if moved == found => return Ok(()),
                _ => return Err(Error::damaged("the new archive has another number of records")),
            };
            let key = one.key;
            let same = key == other.key
                && one.old.is_some() == other.old.is_some()
                && match (&one.new, &other.new) {
                    (Some(value), Some(new_value)) if key.kind == kind::EXTENT => {
                        self.same_bytes(value, new_value, theirs.generation)?
                    }
                    (value, new_value) => value == new_value,
                };
            if !same {
                return Err(differs(key));
            }
            (self.watch)(self.done)?;
        }
    }

    fn same_bytes(&mut self, ours: &[u8], theirs: &[u8], version: Generation) -> Result<bool> {
        let (ours, theirs) = (Extent::decode(ours)?, Extent::decode(theirs)?);
        if ours.length != theirs.length || theirs.born <= self.before || theirs.born > version {
            return Ok(false);
        }
        self.done += u64::from(ours.length);
        Ok(bytes(self.from, &ours)? == bytes(self.to, &theirs)?)
    }
}

pub(in crate::archive) fn bytes(volume: &Volume, extent: &Extent) -> Result<Vec<u8>> {
    let mut bytes = vec![0; extent.length as usize];
    volume.read_data(&extent.page, extent.start, &mut bytes)?;
    Ok(bytes)
}

/// Key of the new name hashes, if it differs.
pub(in crate::archive) struct NameRehash {
    new: Option<[u8; 16]>,
}

impl NameRehash {
    pub(in crate::archive) fn new(old: &[u8; 16], new: &[u8; 16]) -> NameRehash {
        NameRehash { new: (old != new).then_some(*new) }
    }

    /// Returns whether a record has another key in the new archive.
    pub(super) fn moves(&self, key: Key) -> bool {
        self.new.is_some() && matches!(key.kind, kind::DIR_INDEX | kind::XATTR)
    }

    /// Removes the entries of a moving record from their new positions, or adds them to the entries
    /// there.
    pub(super) fn change(&self, op: &mut Operation<'_>, difference: &Difference) -> Result<()> {
        let EntryChanges { gone, come } = EntryChanges::of(difference)?;
        for (name, entry) in gone {
            let place = self.place(difference.key, &name);
            let mut remaining = op.view().get(place, |there| split(place, there))?.unwrap_or_default();
            if let Some(at) = remaining.iter().position(|(_, other)| *other == entry) {
                remaining.remove(at);
            }
            let record: Vec<u8> = remaining.into_iter().flat_map(|(_, entry)| entry).collect();
            if record.is_empty() {
                op.remove(place)?
            } else {
                op.insert(place, &record)?
            };
        }
        for (name, entry) in come {
            let place = self.place(difference.key, &name);
            let mut record = op.view().get(place, |there| Ok(there.to_vec()))?.unwrap_or_default();
            record.extend_from_slice(&entry);
            if record.len() > MAX_VALUE {
                return Err(Error::Unsupported(format!("too many names share one hash: inode={}", place.object)));
            }
            op.insert(place, &record)?;
        }
        Ok(())
    }

    /// Returns the numbers of added and removed entries of a record of the old archive, after
    /// checking that each is added or removed at its new position in the new archive.
    pub(super) fn find(
        &self,
        older: Option<View<'_>>,
        newer: View<'_>,
        difference: &Difference,
    ) -> Result<Option<EntryCounts>> {
        let is_in = |view: View<'_>, (name, entry): &(Vec<u8>, Vec<u8>)| {
            let place = self.place(difference.key, name);
            let there = view.get(place, |there| split(place, there))?.unwrap_or_default();
            Ok::<_, Error>(there.iter().any(|(_, other)| other == entry))
        };
        let was_in = |entry| older.map_or(Ok(false), |older| is_in(older, entry));
        let changed = EntryChanges::of(difference)?;
        for entry in &changed.gone {
            if !was_in(entry)? || is_in(newer, entry)? {
                return Ok(None);
            }
        }
        for entry in &changed.come {
            if was_in(entry)? || !is_in(newer, entry)? {
                return Ok(None);
            }
        }
        Ok(Some(changed.numbers()))
    }

    pub(super) fn count(difference: &Difference) -> Result<EntryCounts> {
        EntryChanges::of(difference).map(|changed| changed.numbers())
    }

    fn place(&self, key: Key, name: &[u8]) -> Key {
        let hash = |new: &[u8; 16]| Key::new(key.object, key.kind, name_hash(new, Ino(key.object), name));
        self.new.as_ref().map_or(key, hash)
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EntryCounts {
    gone: u64,
    come: u64,
}

impl EntryCounts {
    pub(super) fn add(&mut self, more: EntryCounts) {
        self.gone += more.gone;
        self.come += more.come;
    }
}

/// Entries of a record only in the older, and only in the newer version.
struct EntryChanges {
    gone: Vec<(Vec<u8>, Vec<u8>)>,
    come: Vec<(Vec<u8>, Vec<u8>)>,
}

impl EntryChanges {
    fn of(Difference { key, old, new }: &Difference) -> Result<EntryChanges> {
        let entries = |value: &Option<Vec<u8>>| value.as_ref().map_or(Ok(Vec::new()), |value| split(*key, value));
        let (mut gone, mut come) = (entries(old)?, entries(new)?);
        let stays = |entry: &_| gone.contains(entry) && come.contains(entry);
        let staying: Vec<_> = gone.iter().filter(|entry| stays(entry)).cloned().collect();
        gone.retain(|entry| !staying.contains(entry));
        come.retain(|entry| !staying.contains(entry));
        Ok(EntryChanges { gone, come })
    }

    fn numbers(&self) -> EntryCounts {
        EntryCounts { gone: self.gone.len() as u64, come: self.come.len() as u64 }
    }
}

/// Returns names and encoded entries of a record.
fn split(key: Key, value: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    if key.kind == kind::DIR_INDEX {
        let entries = decode_index(value)?.into_iter();
        return Ok(entries.map(|entry| (entry.name.clone(), encode_index(std::slice::from_ref(&entry)))).collect());
    }
    let entries = decode_xattrs(value)?.into_iter();
    Ok(entries.map(|entry| (entry.name.clone(), encode_xattrs(std::slice::from_ref(&entry)))).collect())
}
