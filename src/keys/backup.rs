//! Copies the header of an archive to a file of its own, and puts such a copy back.

use std::sync::Arc;

use super::change::{KeyAccess, VerifiedVolume, commit_header, open_commits};
use super::header::{self, Header, read_header};
use super::rollback::{self, RollbackCheck};
use super::{RollbackGuard, slots};
use crate::crypto::SecretKey;
use crate::crypto::kdf::constant_time_eq;
use crate::env::SystemEnvironment;
use crate::error::{Error, Result};
use crate::format::header::{FEATURE_LOG, Framing, HEADER_BYTES};
use crate::frame::PageCipher;
use crate::storage::{ArchiveSource, LockMode, Storage};
use crate::txn;

/// Sequence numbers of a restored header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Header sequence number of the backup.
    pub backup: u64,
    /// The highest that the archive had already.
    pub known: u64,
}

/// The newer whole header copy, [`HEADER_BYTES`] long. Needs neither key nor lock.
///
/// # Errors
/// As [`super::kinds`].
pub fn backup_header<'a>(site: impl Into<ArchiveSource<'a>>) -> Result<Vec<u8>> {
    let header = read_header(site)?;
    Ok(header.copy_bytes().to_vec())
}

/// Writes the header in `backup` to both places of the archive. The secrets must open a key slot of
/// the backup.
///
/// # Errors
/// `Invalid` for an invalid backup or one of another archive, `Older` when the archive's keys were
/// changed since and that is not accepted (`seen.accept_older`), `Damaged`, `InUse`, `WrongKey`.
pub fn restore_header<'a>(
    site: impl Into<ArchiveSource<'a>>,
    backup: &[u8],
    access: &KeyAccess<'_>,
) -> Result<Restored> {
    let storage = site.into().open(LockMode::Exclusive)?;
    let backup = read_backup(backup)?;
    let mine = backup.framing().clone();
    backup.check_writable()?;
    let found = Header::read(&*storage).ok();
    let misfit = |error| found.as_ref().and_then(|found| misfit(found.framing(), &mine)).unwrap_or(error);
    let opened = slots::unlock(&backup, access.secrets, &access.limits).map_err(misfit)?;
    let volume_key = &opened.volume_key;
    backup.authenticate(volume_key)?;
    header::check_known(&*storage, &mine.archive, volume_key)?;
    // An attacker can put any header there; only one that the archive's own key authenticates
    // counts.
    let present = found.as_ref().filter(|found| found.authenticate(volume_key).is_ok());
    if let Some(present) = present {
        present.check_writable()?;
    }
    // The log feature is a fact of the file: a present header gives it better than a backup of
    // another time, and without a header the log itself does.
    let features = match present {
        Some(present) => present.framing().features,
        None => mine.features | features_of_file(storage.clone(), mine.archive, volume_key)?,
    };
    let beside = Framing { features, ..mine.clone() };

    let looked = RollbackCheck::at(&access.seen, volume_key, &mine.archive);
    let looked = looked.opened_by_recipient(slots::is_recipient(&backup, opened.slot));
    let volume = open_commits(storage.clone(), &beside, volume_key, true, &looked).map_err(|error| match error {
        Error::Damaged(reason) => misfit(Error::damaged(format!(
            "the header backup is of another archive, or the archive's commits are lost as well: {reason}"
        ))),
        error => error,
    })?;
    looked.judge_places(&access.seen, Some(&volume))?;
    let whole = present.map(|header| header.framing().copy);
    let remembered = looked.seen.as_ref().map_or(0, rollback::RollbackState::header_sequence);
    let numbered = present.map_or(0, |header| header.framing().sequence);
    let known = numbered.max(volume.durable().header_sequence).max(remembered);
    // Two copies of the archive with separate key changes may have headers of the same number.
    let newest = mine.sequence > known
        || (mine.sequence == known && present.is_none_or(|present| present.slots() == backup.slots()));
    if !newest && !access.seen.accept_older {
        return Err(Error::Older(format!(
            "the header backup (number {}) is older than the archive's keys (number {known}): a passphrase or key that was changed or \
             removed since then would open it again",
            mine.sequence
        )));
    }
    // A header that replaces a newer one needs a higher number, or every program would take it for
    // an older one put back.
    let next = known.checked_add(1).ok_or_else(|| Error::damaged("the archive's header has the highest number"))?;
    let sequence = if newest { mine.sequence } else { next };
    let framing = Framing { sequence, ..beside };
    header::write_over(&*storage, whole, &framing, &backup.slots(), volume_key)?;
    looked.places().remember(Some(&volume));
    let current = VerifiedVolume { volume, looked, replace: false };
    let newest = commit_header(storage, &framing, volume_key, current);
    RollbackGuard::new(newest.volume, sequence, newest.looked, newest.replace).remember();
    Ok(Restored { backup: mine.sequence, known })
}

/// Returns the feature bits derived from an archive without a header (specification 3.7).
fn features_of_file(storage: Arc<dyn Storage>, archive: [u8; 16], volume_key: &SecretKey) -> Result<u64> {
    let cipher = PageCipher::new(volume_key, archive, true, Arc::new(SystemEnvironment));
    Ok(if txn::has_entries(storage, cipher)? { FEATURE_LOG } else { 0 })
}

/// Returns the reason why a backup cannot belong to the archive whose (unauthenticated) header was
/// found.
fn misfit(found: &Framing, mine: &Framing) -> Option<Error> {
    if found.archive != mine.archive {
        return Some(Error::invalid("the header backup is of another archive"));
    }
    (!constant_time_eq(&found.commitment, &mine.commitment)).then(|| {
        Error::invalid(
            "the header backup is from before the archive was given a new volume key: it opens older copies only",
        )
    })
}

fn read_backup(bytes: &[u8]) -> Result<Header> {
    let refused = |why: &str| Error::invalid(format!("this is no usable header backup: {why}"));
    if bytes.len() != HEADER_BYTES {
        return Err(refused(&format!("it has {} bytes instead of {HEADER_BYTES}", bytes.len())));
    }
    Header::of_copy(bytes).map_err(|error| match error {
        Error::NotArchive(_) => refused("it does not begin like a header"),
        Error::Damaged(reason) => refused(&format!("it is damaged ({reason})")),
        error => error,
    })
}
