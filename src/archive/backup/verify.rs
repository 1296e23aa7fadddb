//! Verifies a backup by comparing it with its source version, reading both.

use std::sync::Arc;

use super::{BackupSource, BackupStep, BackupWatch, batch, extent, in_backup};
use crate::archive::OpenOptions;
use crate::archive::compact::compare::bytes;
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
    super::settle(&**file)?;
    let sequence = Header::read(&**file).map_err(in_backup)?.framing().sequence;
    let volume = source.volume().read_copy(file.clone(), sequence, super::MEMORY).map_err(in_backup)?;
    if volume.origin() != Some(*source.origin()) {
        return Err(differs("it is of another moment than it was made of"));
    }
    let total = source.volume().durable().used_blocks.saturating_mul(crate::format::BLOCK);
    let read = &mut |done| watch(BackupStep::Verifying { done, total });
    compare(source, &volume, read)?;
    // Every page named by the records was read before.
    let mut findings = volume.check_space(false, &mut |_, _| {}).map_err(in_backup)?;
    let options = OpenOptions { read_only: true, ..OpenOptions::default() }.file_system_options();
    let fs = FileSystem::new(volume, Arc::new(SystemEnvironment), source.fs.name_key, options).map_err(in_backup)?;
    findings.extend(fs.check_structure(false, &mut |_, _| {}).map_err(in_backup)?.1);
    match findings.first() {
        None => Ok(()),
        Some(finding) => Err(differs(format!("it is not sound: {finding}"))),
    }
}

fn differs(detail: impl Into<String>) -> Error {
    in_backup(Error::damaged(detail))
}

fn compare(source: &BackupSource, backup: &Volume, read: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
    let state = backup.state();
    let (ours, theirs) = (source.volume().view(source.pinned.state()), backup.view(&state));
    let (mut next, mut other, mut done) = (Key::MIN, Key::MIN, 0);
    loop {
        let one = batch(&ours, &mut next, Key::MAX, BATCH)?;
        let two = batch(&theirs, &mut other, Key::MAX, BATCH).map_err(in_backup)?;
        if one.len() != two.len() {
            return Err(differs("it has another number of records"));
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
                        let copy = Extent::decode(copy).map_err(in_backup)?;
                        (extent.length, extent.born) == (copy.length, copy.born)
                            && bytes(source.volume(), &extent)? == bytes(backup, &copy).map_err(in_backup)?
                    }
                };
            if !same {
                return Err(differs(format!("it differs: inode={} kind={}", key.object, key.kind)));
            }
        }
    }
}
