//! Compares a backup with the moment that it says it shows, by reading both.

use std::sync::Arc;

use super::{BackupSource, BackupStep, BackupWatch, batch, extent};
use crate::archive::OpenOptions;
use crate::archive::compact::compare::has_same_bytes;
use crate::env::SystemEnvironment;
use crate::error::{Error, Result};
use crate::format::Key;
use crate::format::values::Extent;
use crate::fs::FileSystem;
use crate::keys::header::Header;
use crate::storage::Storage;
use crate::txn::Volume;

/// Records compared at once.
const BATCH: usize = 512;

pub(super) fn verify(source: &BackupSource, file: &Arc<dyn Storage>, watch: &mut BackupWatch<'_>) -> Result<()> {
    file.barrier()?;
    file.evict(0, file.len()?)?;
    let sequence = Header::read(&**file)?.framing().sequence;
    let volume = source.volume().read_copy(file.clone(), sequence, super::MEMORY)?;
    if volume.origin() != Some(*source.origin()) {
        return Err(Error::damaged("the backup is of another moment than it was made of"));
    }
    let total = source.volume().durable().used_blocks.saturating_mul(crate::format::BLOCK);
    let read = &mut |done| watch(BackupStep::Verifying { done, total: 2 * total });
    compare(source, &volume, read)?;
    // Each page that the records name was read by now.
    let mut findings = volume.check_space(false, &mut |_, _| {})?;
    let options = OpenOptions { read_only: true, ..OpenOptions::default() }.file_system_options();
    let fs = FileSystem::new(volume, Arc::new(SystemEnvironment), source.fs.name_key, options)?;
    findings.extend(fs.check_structure(false, &mut |_, _| {})?.1);
    match findings.first() {
        None => Ok(()),
        Some(finding) => Err(Error::damaged(format!("the backup is not sound: {finding}"))),
    }
}

fn compare(source: &BackupSource, backup: &Volume, read: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
    let state = backup.state();
    let (ours, theirs) = (source.volume().view(source.pinned.state()), backup.view(&state));
    let (mut next, mut other, mut done) = (Key::MIN, Key::MIN, 0);
    loop {
        let (one, two) = (batch(&ours, &mut next, Key::MAX, BATCH)?, batch(&theirs, &mut other, Key::MAX, BATCH)?);
        if one.len() != two.len() {
            return Err(Error::damaged("the backup has another number of records"));
        }
        if one.is_empty() {
            return Ok(());
        }
        for ((key, value), (there, copy)) in one.iter().zip(&two) {
            let same = key == there
                && match extent(*key, value)? {
                    None => value == copy,
                    Some(extent) => {
                        done += u64::from(extent.length);
                        read(done)?;
                        let copy = Extent::decode(copy)?;
                        (extent.length, extent.born) == (copy.length, copy.born)
                            && has_same_bytes(source.volume(), backup, &extent, &copy)?
                    }
                };
            if !same {
                return Err(Error::damaged(format!("the backup differs: inode={} kind={}", key.object, key.kind)));
            }
        }
    }
}
