//! Writes the content of one volume into a new one, and compares the two by reading both.

use std::ops::ControlFlow;

use super::pages::Pages;
use super::records::Records;
use crate::error::{Error, Result};
use crate::format::values::Extent;
use crate::format::{Ino, Key, kind};
use crate::txn::{State, Volume};

/// Called now and then with (bytes of file data done); an error ends the work.
pub(super) type Watch<'a> = dyn FnMut(u64) -> Result<()> + 'a;

/// Copies what is kept of the live tree, and the history of sessions.
pub(super) fn copy(from: &Volume, state: &State, to: &Volume, watch: &mut Watch<'_>) -> Result<()> {
    let mut pages = Pages::new(from, to);
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
            batch.iter().try_for_each(|(key, value)| op.insert(*key, value).map(drop))
        })?;
        watch(done)?;
    }
    to.close()
}

fn copy_history(from: &Volume, to: &Volume) -> Result<()> {
    let mut history = Vec::new();
    from.history().scan(from.store(), Key::MIN, Key::MAX, &mut |key, value| {
        history.push((key, value.to_vec()));
        Ok(ControlFlow::Continue(()))
    })?;
    for part in history.chunks(512) {
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
pub(super) fn compare(from: &Volume, to: &Volume, watch: &mut Watch<'_>) -> Result<()> {
    let (old_state, new_state) = (from.state(), to.state());
    let (mut old, mut new) = (Records::new(from, &old_state)?, Records::new(to, &new_state)?);
    let mut done = 0;
    loop {
        // Both walks count their records alike, so their batches are those of the same keys.
        let (old, new) = (old.batch()?, new.batch()?);
        if old.len() != new.len() {
            return Err(Error::damaged("the new archive has another number of records"));
        }
        if old.is_empty() {
            return Ok(());
        }
        for ((key, ours), (other, theirs)) in old.iter().zip(&new) {
            let same = key == other
                && match key.kind {
                    kind::EXTENT => same_bytes(from, to, ours, theirs)?,
                    _ => ours == theirs,
                };
            if !same {
                return Err(Error::damaged(format!("the new archive differs: inode={} kind={}", key.object, key.kind)));
            }
            if key.kind == kind::EXTENT {
                done += u64::from(Extent::decode(ours)?.length);
                watch(done)?;
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
    from.pager().read_data(&ours.page, ours.start, &mut one)?;
    to.pager().read_data(&theirs.page, theirs.start, &mut other)?;
    Ok(one == other)
}
