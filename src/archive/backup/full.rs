//! Full backup: copies everything into a new file (BACKUP-2).

use std::ops::ControlFlow;

use super::{BackupStep, BackupWatch, batch, extent, in_backup};
use crate::archive::compact::pages::PageCopier;
use crate::archive::relay::relay;
use crate::error::Result;
use crate::format::{Key, Pointer, kind};
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
