//! Copies all of a moment into a new file (BACKUP-2).

use std::ops::ControlFlow;

use super::{BackupStep, BackupWatch, batch, extent, in_backup};
use crate::archive::compact::pages::Pages;
use crate::archive::relay::relay;
use crate::error::Result;
use crate::format::{Key, Pointer, kind};
use crate::txn::{Pinned, View, Volume};

/// Records handed on at once; their values are 3,500 bytes at most.
const BATCH: usize = 512;
/// Records looked at before the watch is told.
const ANNOUNCED: u32 = 65_536;

/// What one operation takes over; its pages are written.
type Part = (Vec<(Key, Vec<u8>)>, Vec<(Pointer, u32)>);

/// Answers how many bytes of file data were copied.
pub(super) fn copy(from: &Volume, pinned: &Pinned, to: &Volume, watch: &mut BackupWatch<'_>) -> Result<u64> {
    let view = from.view(pinned.state());
    let mut pages = Pages::new(from, pinned.state(), to, in_backup);
    let (mut at, mut total) = (Key::MIN, 0);
    while let Some(next) = announce(&view, at, &mut pages, &mut total)? {
        at = next;
        watch(BackupStep::Copying { done: 0, total: Some(total) })?;
    }
    let (mut next, mut done) = (Key::MIN, 0);
    let read = |hand_on: &mut dyn FnMut(Part) -> Result<()>| {
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
    relay(read, |(records, adopted): Part| {
        // A reference count above 1 changes three records at most.
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

/// Announces the extents among the next records; answers where to go on, None at the end.
fn announce(view: &View<'_>, from: Key, pages: &mut Pages<'_>, total: &mut u64) -> Result<Option<Key>> {
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
