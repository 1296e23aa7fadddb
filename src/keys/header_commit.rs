//! Header updates: verify the archive, write the header, commit its new number (HEADER-4).

use std::sync::Arc;

use super::header::{Header, read_header};
use super::rollback::{self, RollbackCheck, RollbackState};
use super::slots::{self, OpenedSlot};
use super::{SeenOptions, UnlockedKey};
use crate::crypto::SecretKey;
use crate::env::SystemEnvironment;
use crate::error::Result;
use crate::format::header::Framing;
use crate::frame::PageCipher;
use crate::storage::{ArchiveSource, LockMode, Storage};
use crate::txn::{self, Volume};

/// Least memory in bytes: with less the caches of the layers cannot work, and a change of the
/// header needs no more.
pub(crate) const LEAST_MEMORY: u64 = 16 << 20;

/// An archive that may be changed, as far as its user knows.
pub(crate) struct VerifiedVolume {
    pub(crate) volume: Arc<Volume>,
    pub(crate) looked: RollbackCheck,
    /// The rollback state was contradicted, and the user accepted that.
    pub(crate) replace: bool,
}

impl VerifiedVolume {
    /// Verifies, by reading only, that this is not an older copy of the archive, in which a change
    /// of the header would be lost. The header must be authentic.
    ///
    /// # Errors
    /// `Replaced`, `Older` and `Forked` unless accepted, `Damaged` when no commit can be trusted.
    pub(crate) fn verify(
        storage: Arc<dyn Storage>,
        header: &Header,
        volume_key: &SecretKey,
        seen: &SeenOptions,
        by_recipient: bool,
    ) -> Result<VerifiedVolume> {
        header.check_writable()?;
        let looked = RollbackCheck::at(seen, volume_key, &header.framing().archive).opened_by_recipient(by_recipient);
        let sequence = header.framing().sequence;
        let volume = open(storage, header.framing(), volume_key, true, &looked)?;
        let replace = looked.admit(&volume, sequence, seen, false)?;
        warn_first_use(&looked);
        Ok(VerifiedVolume { volume, looked, replace })
    }
}

/// Checks, for commands that read the header alone, whether a header with a higher number is known:
/// from the rollback state and, if no other process writes the archive, from its newest commit.
/// Damage there is no reason to hide the keys.
///
/// # Errors
/// `Replaced` and `Older` unless accepted.
pub(crate) fn check_age(
    site: ArchiveSource<'_>,
    header: &Header,
    opened: &OpenedSlot,
    seen: &SeenOptions,
) -> Result<()> {
    let (sequence, volume_key) = (header.framing().sequence, &opened.volume_key);
    let looked = RollbackCheck::at(seen, volume_key, &header.framing().archive);
    let looked = looked.opened_by_recipient(slots::is_recipient(header, opened.slot));
    let volume =
        site.open(LockMode::Shared).and_then(|storage| open(storage, header.framing(), volume_key, true, &looked)).ok();
    looked.judge_places(seen, volume.as_deref())?;
    looked.places().remember(volume.as_deref());
    warn_first_use(&looked);
    if seen.accept_older {
        return Ok(());
    }
    let committed = volume.map_or(0, |volume| volume.durable().header_sequence);
    let known = committed.max(looked.seen.as_ref().map_or(0, RollbackState::header_sequence));
    // Another process may have changed the keys since the header was read.
    if sequence < known && read_header(site)?.framing().sequence < known {
        return Err(rollback::older_header(sequence, known));
    }
    Ok(())
}

fn warn_first_use(looked: &RollbackCheck) {
    if let Some(sentence) = looked.first_use() {
        tracing::warn!("{sentence}");
    }
}

/// Compares an archive with the memory of its place, for a command that opens it in its own way, as
/// damaged as it is. Nothing is remembered.
///
/// # Errors
/// `Replaced` unless accepted.
pub fn check_place(key: &UnlockedKey, seen: &SeenOptions) -> Result<()> {
    let looked = RollbackCheck::at(seen, &key.volume_key, &key.archive).opened_by_recipient(key.by_recipient);
    looked.judge_places(seen, None)
}

/// Opens the commits of an archive under this header.
pub(crate) fn open(
    storage: Arc<dyn Storage>,
    framing: &Framing,
    volume_key: &SecretKey,
    read_only: bool,
    looked: &RollbackCheck,
) -> Result<Arc<Volume>> {
    let environment = Arc::new(SystemEnvironment);
    let cipher = PageCipher::new(volume_key, framing.archive, framing.has_log(), environment.clone());
    let options = txn::OpenOptions { read_only, memory: LEAST_MEMORY };
    Volume::open_seen(storage, cipher, environment, framing.sequence, &options, looked.mark())
}

/// HEADER-4: commits the number of this header, which is on the medium in both copies. Returns the
/// newest commit, to be remembered.
///
/// The change of the keys is complete before this call. So an error that prevents the commit (a
/// full disk, damage in the space map) is reported, but the change has succeeded: the next commit
/// of any process makes up for it.
pub(crate) fn commit_header(
    storage: Arc<dyn Storage>,
    framing: &Framing,
    volume_key: &SecretKey,
    before: VerifiedVolume,
) -> VerifiedVolume {
    let committed = open(storage, framing, volume_key, false, &before.looked)
        .and_then(|volume| volume.record_header().map(|()| volume));
    match committed {
        Ok(volume) => VerifiedVolume { volume, ..before },
        Err(error) => {
            tracing::warn!(
                "the keys are changed, but no commit could be made that says so ({error}): until the next one, the header of before could \
                 be put back unnoticed, and its keys would open the archive again"
            );
            before
        }
    }
}

/// Rewrites the copy of the header that is lost, altered or older than the other one, and returns a
/// sentence about it; None when both are in order. Nothing else is changed.
///
/// # Errors
/// Like opening the archive for writing.
pub fn repair_header<'a>(
    site: impl Into<ArchiveSource<'a>>,
    key: &UnlockedKey,
    seen: &SeenOptions,
) -> Result<Option<String>> {
    let storage = site.into().open(LockMode::Exclusive)?;
    let mut header = key.read_header(&*storage)?;
    VerifiedVolume::verify(storage.clone(), &header, &key.volume_key, seen, key.by_recipient)?;
    header.repair(&*storage, &key.volume_key)
}
