//! Copies all of a moment into a new file (BACKUP-2).

use super::{BackupStep, BackupWatch, batch, extent};
use crate::archive::compact::pages::Pages;
use crate::error::Result;
use crate::format::{Key, kind};
use crate::txn::{Pinned, Volume};

/// Records handed out at once; their values are 3,500 bytes at most.
const BATCH: usize = 512;

/// Answers how many bytes of file data were copied.
pub(super) fn copy(from: &Volume, pinned: &Pinned, to: &Volume, watch: &mut BackupWatch<'_>) -> Result<u64> {
    let view = from.view(pinned.state());
    let mut pages = Pages::new(from, pinned.state(), to);
    let (mut next, mut total) = (Key::MIN, 0);
    loop {
        let records = batch(&view, &mut next, Key::MAX, BATCH)?;
        if records.is_empty() {
            break;
        }
        for (key, value) in &records {
            if let Some(extent) = extent(*key, value)? {
                total += u64::from(extent.length);
                pages.announce(&extent)?;
            }
        }
        watch(BackupStep::Copying { done: 0, total: Some(total) })?;
    }
    let (mut next, mut done) = (Key::MIN, 0);
    loop {
        let mut records = batch(&view, &mut next, Key::MAX, BATCH)?;
        if records.is_empty() {
            break;
        }
        let mut adopted = Vec::new();
        for (key, value) in &mut records {
            if key.kind != kind::EXTENT {
                continue;
            }
            done += pages.carry(*key, value, &mut adopted)?;
            watch(BackupStep::Copying { done, total: Some(total) })?;
        }
        // A reference count above 1 changes three records at most.
        let count = records.len() as u64 + 3 * adopted.len() as u64;
        to.operate(count, false, |op| {
            adopted.iter().try_for_each(|(page, extents)| op.adopt(page, *extents))?;
            records.iter().try_for_each(|(key, value)| op.insert(*key, value).map(drop))
        })?;
    }
    to.operate(pinned.sessions() as u64, false, |op| op.becomes_backup_of(pinned))?;
    to.close()?;
    Ok(done)
}
