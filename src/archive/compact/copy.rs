//! Writes the content of one volume into a new one, and compares the two by reading both.

use super::names::Names;
use super::pages::Pages;
use super::records::Records;
use crate::error::{Error, Result};
use crate::format::values::Extent;
use crate::format::{Ino, Key, kind};
use crate::txn::{State, Volume};

/// Called now and then with (bytes of file data done); an error ends the work.
pub(super) type Watch<'a> = dyn FnMut(u64) -> Result<()> + 'a;

/// Copies what is kept of the live tree, and the history of sessions.
pub(super) fn copy(from: &Volume, state: &State, to: &Volume, names: &Names, watch: &mut Watch<'_>) -> Result<()> {
    let mut pages = Pages::new(from, state, to);
    let mut records = Records::new(from, state)?;
    loop {
        let batch = records.batch()?;
        if batch.is_empty() {
            break;
        }
        for (_, value) in batch.iter().filter(|(key, _)| key.kind == kind::EXTENT) {
            pages.announce(&Extent::decode(value)?)?;
        }
        watch(0)?;
    }
    copy_history(from, to)?;
    let mut records = Records::new(from, state)?;
    let mut done = 0;
    loop {
        let mut batch = records.batch()?;
        if batch.is_empty() {
            break;
        }
        let mut adopted = Vec::new();
        for (key, value) in batch.iter_mut().filter(|(key, _)| key.kind == kind::EXTENT) {
            let extent = Extent::decode(value)?;
            let placed = pages.place(Ino(key.object), key.sub, &extent)?;
            adopted.extend(placed.adopt.map(|extents| (placed.page, extents)));
            *value = Extent { page: placed.page, start: placed.start, ..extent }.encode().to_vec();
            done += u64::from(extent.length);
            watch(done)?;
        }
        // A reference count above 1 changes three records at most.
        let count = batch.len() as u64 + 3 * adopted.len() as u64;
        to.operate(count, false, |op| {
            for (page, extents) in &adopted {
                op.adopt(page, *extents)?;
            }
            batch.iter().try_for_each(|(key, value)| match names.moves(*key) {
                true => names.insert(op, *key, value),
                false => op.insert(*key, value).map(drop),
            })
        })?;
        watch(done)?;
    }
    to.close()
}

fn copy_history(from: &Volume, to: &Volume) -> Result<()> {
    for part in from.history()?.chunks(512) {
        to.operate(part.len() as u64, false, |op| {
            part.iter().try_for_each(|(key, value)| op.insert_history(*key, value))
        })?;
    }
    Ok(())
}

/// Reads both: the same records, and the same bytes behind every extent.
///
/// # Errors
/// `Damaged` naming the inode that differs.
pub(super) fn compare(from: &Volume, to: &Volume, names: &Names, watch: &mut Watch<'_>) -> Result<()> {
    let (old_state, new_state) = (from.state(), to.state());
    let mut old = Walk::new(Records::new(from, &old_state)?);
    let mut new = Walk::new(Records::new(to, &new_state)?);
    let differs = |key: Key| Error::damaged(format!("the new archive differs: inode={} kind={}", key.object, key.kind));
    let (mut done, mut moved, mut found) = (0, 0, 0);
    loop {
        let ours = old.next(|key, value| match names.moves(key) {
            true => {
                moved += names.find(to.view(&new_state), key, value)?.ok_or_else(|| differs(key))?;
                Ok(false)
            }
            false => Ok(true),
        })?;
        let theirs = new.next(|key, value| match names.moves(key) {
            true => {
                found += Names::count(key, value)?;
                Ok(false)
            }
            false => Ok(true),
        })?;
        let ((key, ours), (other, theirs)) = match (ours, theirs) {
            (Some(ours), Some(theirs)) => (ours, theirs),
            (None, None) if moved == found => return Ok(()),
            _ => return Err(Error::damaged("the new archive has another number of records")),
        };
        let same = key == other
            && match key.kind {
                kind::EXTENT => same_bytes(from, to, &ours, &theirs)?,
                _ => ours == theirs,
            };
        if !same {
            return Err(differs(key));
        }
        if key.kind == kind::EXTENT {
            done += u64::from(Extent::decode(&ours)?.length);
            watch(done)?;
        }
    }
}

/// One record after the other.
struct Walk<'a> {
    records: Records<'a>,
    batch: std::vec::IntoIter<(Key, Vec<u8>)>,
}

impl<'a> Walk<'a> {
    fn new(records: Records<'a>) -> Walk<'a> {
        Walk { records, batch: Vec::new().into_iter() }
    }

    /// The next record that `wanted` says yes to; None at the end.
    fn next(&mut self, mut wanted: impl FnMut(Key, &[u8]) -> Result<bool>) -> Result<Option<(Key, Vec<u8>)>> {
        loop {
            for (key, value) in self.batch.by_ref() {
                if wanted(key, &value)? {
                    return Ok(Some((key, value)));
                }
            }
            self.batch = self.records.batch()?.into_iter();
            if self.batch.len() == 0 {
                return Ok(None);
            }
        }
    }
}

fn same_bytes(from: &Volume, to: &Volume, ours: &[u8], theirs: &[u8]) -> Result<bool> {
    let (ours, theirs) = (Extent::decode(ours)?, Extent::decode(theirs)?);
    if (ours.length, ours.born) != (theirs.length, theirs.born) {
        return Ok(false);
    }
    let (mut one, mut other) = (vec![0; ours.length as usize], vec![0; ours.length as usize]);
    from.read_data(&ours.page, ours.start, &mut one)?;
    to.read_data(&theirs.page, theirs.start, &mut other)?;
    Ok(one == other)
}
