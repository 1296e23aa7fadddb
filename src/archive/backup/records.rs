//! Copies the records and pages of a version to a backup: everything into a new file (BACKUP-2), or
//! the changes since the version in the file (BACKUP-4), published in one commit (BACKUP-3); and
//! verifies the result by reading both.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::{BackupSource, BackupStep, BackupWatch, Sample, batch, extent, in_backup};
use crate::archive::OpenOptions;
use crate::archive::compact::versions::bytes;
use crate::archive::compact::{PageCopier, relay};
use crate::env::SystemEnvironment;
use crate::error::{Error, Result};
use crate::format::record::BackupOrigin;
use crate::format::values::Extent;
use crate::format::{BLOCK, Generation, Key, Pointer, kind};
use crate::fs::FileSystem;
use crate::keys::header::Header;
use crate::storage::Storage;
use crate::txn::{Pinned, View, Volume};

/// Records per batch; their values are at most 3,500 bytes long.
const BATCH: usize = 512;
/// Records scanned between two progress reports.
const ANNOUNCED: u32 = 65_536;

/// Records and adopted pages of one operation; the pages are already written.
type RecordBatch = (Vec<(Key, Vec<u8>)>, Vec<(Pointer, u32)>);

/// Returns the number of bytes of file data copied.
pub(super) fn copy(from: &Volume, pinned: &Pinned, to: &Volume, watch: &mut BackupWatch<'_>) -> Result<u64> {
    let view = from.view(pinned.state());
    let mut pages = PageCopier::new(from, pinned.state(), to, in_backup);
    let (mut at, mut total) = (Key::MIN, 0);
    while let Some(next) = announce(&view, at, &mut pages, &mut total)? {
        at = next;
        watch(BackupStep::Copying { done: 0, total: Some(total) })?;
    }
    let (mut next, mut done) = (Key::MIN, 0);
    let read = |hand_on: &mut dyn FnMut(RecordBatch) -> Result<()>| {
        loop {
            let mut records = batch(&view, &mut next, Key::MAX, BATCH)?;
            if records.is_empty() {
                return Ok(());
            }
            let mut adopted = Vec::new();
            for (key, value) in records.iter_mut().filter(|(key, _)| key.kind == kind::EXTENT) {
                done += pages.carry(*key, value, &mut adopted)?;
                watch(BackupStep::Copying { done, total: Some(total) })?;
            }
            hand_on((records, adopted))?;
        }
    };
    relay(read, |(records, adopted): RecordBatch| {
        // A reference count above 1 changes at most three records.
        let count = records.len() as u64 + 3 * adopted.len() as u64;
        let inserted = to.operate(count, false, |op| {
            adopted.iter().try_for_each(|(page, extents)| op.adopt(page, *extents))?;
            records.iter().try_for_each(|(key, value)| op.insert(*key, value).map(drop))
        });
        inserted.map_err(in_backup)
    })?;
    let marked = to.operate(pinned.sessions() as u64, false, |op| op.becomes_backup_of(pinned));
    marked.and_then(|()| to.close()).map_err(in_backup)?;
    Ok(done)
}

/// Announces the extents among the next records; returns the key to continue with, `None` at the
/// end.
fn announce(view: &View<'_>, from: Key, pages: &mut PageCopier<'_>, total: &mut u64) -> Result<Option<Key>> {
    let (mut seen, mut next) = (0, None);
    view.scan(from, Key::MAX, &mut |key, value| {
        if let Some(extent) = extent(key, value)? {
            *total += u64::from(extent.length);
            pages.announce(&extent)?;
        }
        seen += 1;
        if seen < ANNOUNCED {
            return Ok(ControlFlow::Continue(()));
        }
        next = key.next();
        Ok(ControlFlow::Break(()))
    })?;
    Ok(next)
}

/// Maximum records changed by one operation: with their values and dirty nodes some 100 MiB.
const MOST_RECORDS: usize = 100_000;
/// Maximum pages added by it, as by any transaction.
const MOST_PAGES: usize = 16_384;
/// Maximum bytes of its values in memory.
const MOST_BYTES: usize = 64 << 20;
/// Ranges that are compared in sequence, with a common prefetch of their nodes.
const RANGES: usize = 64;
/// Records per read of an update.
const UPDATE_BATCH: usize = 4096;

/// Prepared operation; its pages are already written.
#[derive(Default)]
pub(super) struct PreparedUpdate {
    adopted: Vec<(Pointer, u32)>,
    changes: Vec<RecordChange>,
    bytes: usize,
    copied: u64,
}

struct RecordChange {
    key: Key,
    /// Extent in the backup.
    old: Option<Extent>,
    /// `None` for a removed record.
    new: Option<Vec<u8>>,
}

/// Returns `None` if there are too many changes for one commit.
pub(super) fn prepare(
    from: &Volume,
    pinned: &Pinned,
    base: &BackupOrigin,
    backup: &Volume,
    watch: &mut BackupWatch<'_>,
) -> Result<Option<PreparedUpdate>> {
    let (state, shown) = (pinned.state(), backup.state());
    let (ours, theirs) = (from.view(state), backup.view(&shown));
    let mut prepared = PreparedUpdate::default();
    let mut fits = true;
    // Extents are compared by birth, a generation of this history. Nodes with another history are
    // all read.
    let since = if pinned.counts_on_since(base)? { base.generation } else { Generation(0) };
    let mut compare = |ranges: &[(Key, Key)]| {
        if !fits {
            return Ok(());
        }
        theirs.prefetch(ranges).map_err(in_backup)?;
        for (lower, upper) in ranges {
            let mut walk = PairedRanges { at: *lower, upper: *upper, ours: &ours, theirs: &theirs };
            while fits && let Some((new, old)) = walk.next()? {
                // The rest of a long range.
                if walk.at < walk.upper {
                    theirs.prefetch(&[(walk.at, walk.upper)]).map_err(in_backup)?;
                }
                prepared.compare(new, old, base.generation)?;
                fits = prepared.changes.len() <= MOST_RECORDS && prepared.bytes <= MOST_BYTES;
                watch(BackupStep::Copying { done: 0, total: None })?;
            }
        }
        Ok(())
    };
    let mut ranges = Vec::new();
    ours.changed_since(since, &mut |lower, upper| {
        ranges.push((lower, upper));
        if ranges.len() < RANGES { Ok(()) } else { compare(&std::mem::take(&mut ranges)) }
    })?;
    compare(&ranges)?;
    if !fits {
        return Ok(None);
    }
    let placed = prepared.place(&mut PageCopier::new(from, state, backup, in_backup), watch)?;
    Ok(placed.then_some(prepared))
}

impl PreparedUpdate {
    /// Compares the records of a key range: `new` in the source, `old` in the backup.
    fn compare(&mut self, new: RecordList, old: RecordList, base: Generation) -> Result<()> {
        let (mut new, mut old) = (new.into_iter().peekable(), old.into_iter().peekable());
        loop {
            let order = match (new.peek(), old.peek()) {
                (Some((key, _)), Some((other, _))) => key.cmp(other),
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (None, None) => return Ok(()),
            };
            let new = if order.is_le() { new.next() } else { None };
            let old = if order.is_ge() { old.next() } else { None };
            let Some(key) = new.as_ref().or(old.as_ref()).map(|(key, _)| *key) else { return Ok(()) };
            self.note(key, new.map(|(_, value)| value), old.map(|(_, value)| value), base)?;
        }
    }

    fn note(&mut self, key: Key, new: Option<Vec<u8>>, old: Option<Vec<u8>>, base: Generation) -> Result<()> {
        let decoded = |value: &Option<Vec<u8>>| value.as_ref().map_or(Ok(None), |value| extent(key, value));
        let (extent, there) = (decoded(&new)?, decoded(&old).map_err(in_backup)?);
        let same = match (&extent, &there) {
            (Some(extent), there) if extent.born <= base => {
                if there.is_none_or(|there| (there.length, there.born) != (extent.length, extent.born)) {
                    let detail = format!("an extent of its origin is missing: inode={} offset={}", key.object, key.sub);
                    return Err(in_backup(Error::damaged(detail)));
                }
                true
            }
            (None, None) => new == old,
            _ => false,
        };
        if !same {
            self.bytes += new.as_ref().map_or(0, Vec::len);
            self.changes.push(RecordChange { key, old: there, new });
        }
        Ok(())
    }

    /// Writes the pages of new extents; returns false if there are too many.
    fn place(&mut self, pages: &mut PageCopier<'_>, watch: &mut BackupWatch<'_>) -> Result<bool> {
        let (mut total, mut named) = (0, HashSet::new());
        for RecordChange { key, new, .. } in &self.changes {
            if let Some(new) = new
                && let Some(extent) = extent(*key, new)?
            {
                total += u64::from(extent.length);
                named.insert(extent.page.run.address);
                pages.announce(&extent)?;
            }
        }
        if named.len() > MOST_PAGES {
            return Ok(false);
        }
        for RecordChange { key, new, .. } in &mut self.changes {
            let Some(new) = new.as_mut().filter(|_| key.kind == kind::EXTENT) else { continue };
            self.copied += pages.carry(*key, new, &mut self.adopted)?;
            watch(BackupStep::Copying { done: self.copied, total: Some(total) })?;
        }
        Ok(true)
    }

    /// Commits the prepared changes; returns the number of bytes of file data copied.
    pub(super) fn publish(self, backup: &Volume, pinned: &Pinned) -> Result<u64> {
        let changed = backup.operate_on_backup(|op| {
            self.adopted.iter().try_for_each(|(page, extents)| op.adopt(page, *extents))?;
            for RecordChange { key, old, new } in &self.changes {
                match new {
                    Some(new) => drop(op.insert(*key, new)?),
                    None => drop(op.remove(*key)?),
                }
                if let Some(old) = old {
                    op.release(&old.page, old.born)?;
                }
            }
            op.becomes_backup_of(pinned)
        });
        changed.map_err(in_backup)?;
        backup.close().map_err(in_backup)?;
        Ok(self.copied)
    }
}

type RecordList = Vec<(Key, Vec<u8>)>;

/// Iterator over a range of keys in both trees, part by part.
struct PairedRanges<'a> {
    at: Key,
    upper: Key,
    ours: &'a View<'a>,
    theirs: &'a View<'a>,
}

impl PairedRanges<'_> {
    /// Returns the records of both in the next part; `None` at the end.
    fn next(&mut self) -> Result<Option<(RecordList, RecordList)>> {
        if self.at >= self.upper {
            return Ok(None);
        }
        let from = self.at;
        let (mut to, mut other) = (from, from);
        let mut ours = batch(self.ours, &mut to, self.upper, UPDATE_BATCH)?;
        let mut theirs = batch(self.theirs, &mut other, self.upper, UPDATE_BATCH).map_err(in_backup)?;
        // The part ends at the end of the shorter batch.
        self.at = to.min(other);
        ours.retain(|(key, _)| *key < self.at);
        theirs.retain(|(key, _)| *key < self.at);
        Ok(Some((ours, theirs)))
    }
}

/// Returns the number of bytes of file data compared.
pub(super) fn verify(
    source: &BackupSource,
    file: &Arc<dyn Storage>,
    sample: &Sample<'_>,
    watch: &mut BackupWatch<'_>,
) -> Result<u64> {
    super::settle(&**file)?;
    let sequence = Header::read(&**file).map_err(in_backup)?.framing().sequence;
    let volume = source.volume().read_copy(file.clone(), sequence, super::MEMORY).map_err(in_backup)?;
    if volume.origin() != Some(*source.origin()) {
        return Err(differs("it does not have the content of its origin"));
    }
    let total = source.volume().durable().used_blocks.saturating_mul(BLOCK);
    let read = &mut |done| watch(BackupStep::Verifying { done, total });
    let compared = compare(source, &volume, sample, read)?;
    // The sampled pages of file data were read before.
    let mut findings = volume.check_space(false, &mut |_, _| {}).map_err(in_backup)?;
    let options = OpenOptions { read_only: true, ..OpenOptions::default() }.file_system_options();
    let fs = FileSystem::new(volume, Arc::new(SystemEnvironment), source.fs.name_key, options).map_err(in_backup)?;
    findings.extend(fs.check_structure(false).map_err(in_backup)?);
    match findings.first() {
        None => Ok(compared),
        Some(finding) => Err(differs(format!("it is not sound: {finding}"))),
    }
}

fn differs(detail: impl Into<String>) -> Error {
    in_backup(Error::damaged(detail))
}

fn compare(
    source: &BackupSource,
    backup: &Volume,
    sample: &Sample<'_>,
    read: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<u64> {
    let state = backup.state();
    let (ours, theirs) = (source.volume().view(source.pinned.state()), backup.view(&state));
    let (mut next, mut other, mut done, mut compared) = (Key::MIN, Key::MIN, 0, 0);
    loop {
        let one = batch(&ours, &mut next, Key::MAX, BATCH)?;
        let two = batch(&theirs, &mut other, Key::MAX, BATCH).map_err(in_backup)?;
        if one.len() != two.len() {
            return Err(differs("it has another number of records"));
        }
        if one.is_empty() {
            return Ok(compared);
        }
        for ((key, value), (there, copy)) in one.iter().zip(&two) {
            let same = key == there
                && match extent(*key, value)? {
                    None => value == copy,
                    Some(extent) => {
                        done += u64::from(extent.length);
                        read(done)?;
                        let copy = Extent::decode(copy).map_err(in_backup)?;
                        let is_sampled = sample.has_next()?;
                        compared += if is_sampled { u64::from(extent.length) } else { 0 };
                        (extent.length, extent.born) == (copy.length, copy.born)
                            && (!is_sampled
                                || bytes(source.volume(), &extent)? == bytes(backup, &copy).map_err(in_backup)?)
                    }
                };
            if !same {
                return Err(differs(format!("it differs: inode={} kind={}", key.object, key.kind)));
            }
        }
    }
}

/// Reads the records of the current state and the sampled file data; returns the bytes of the
/// latter.
pub(super) fn read_back(volume: &Volume, sample: &Sample<'_>, watch: &mut BackupWatch<'_>) -> Result<u64> {
    let total = volume.durable().used_blocks.saturating_mul(BLOCK);
    let state = volume.state();
    let view = volume.view(&state);
    let (mut next, mut done, mut read) = (Key::MIN, 0, 0);
    loop {
        let records = batch(&view, &mut next, Key::MAX, BATCH).map_err(in_backup)?;
        if records.is_empty() {
            return Ok(read);
        }
        for (key, value) in &records {
            let Some(extent) = extent(*key, value).map_err(in_backup)? else { continue };
            done += u64::from(extent.length);
            watch(BackupStep::Verifying { done, total })?;
            if sample.has_next()? {
                bytes(volume, &extent).map_err(in_backup)?;
                read += u64::from(extent.length);
            }
        }
    }
}
