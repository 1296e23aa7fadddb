//! Access to an archive: header copies, key slots, header backups, and the user's rollback state.
//! Unlocks it: finds its volume key with the given secrets, and lists the secrets that it accepts.
//!
//! It sees `txn` and `frame`, because a change of the header ends with a commit that carries its
//! number (HEADER-4), and the rollback state is compared with the chain of commits (SEEN-2). It
//! sees no `fs`.

pub(crate) mod change;
pub(crate) mod header;
pub(crate) mod rollback;
pub(crate) mod slots;

pub use change::{
    KeyAbout, KeyAccess, KeyInfo, KeyName, PassphraseChange, Restored, add, backup_header, change_passphrase,
    check_place, list, list_all, list_unlocked, new_key_file, new_passphrase, new_recovery_code, remove, repair_header,
    restore_header, set_passphrase,
};
pub(crate) use change::{LEAST_MEMORY, listed};
pub use rollback::{
    Fingerprint, PlaceName, RollbackGuard, RollbackOptions, is_known_place, remember_place, seen_directory,
    state_directory,
};
pub use slots::{KeyKind, NewKey, Secrets, UnlockLimits};

use std::path::Path;

use crate::crypto::{Passphrase, SecretKey};
use crate::error::{Error, Result};
use crate::format::ArchiveId;
use crate::storage::{ArchiveSource, LockMode, Storage};
use header::{Header, read_header};
use slots::OpenedSlot;

/// Unlocked volume key and the id of its archive; a mounting command passes it to the daemon.
pub struct UnlockedKey {
    pub(crate) archive: ArchiveId,
    pub(crate) volume_key: SecretKey,
    /// A slot opened it of a kind that can be made with a public key alone.
    pub(crate) by_recipient: bool,
}

impl UnlockedKey {
    fn of(header: &Header, opened: OpenedSlot) -> UnlockedKey {
        let by_recipient = slots::is_recipient(header, opened.slot);
        UnlockedKey { archive: header.framing().archive, volume_key: opened.volume_key, by_recipient }
    }

    /// The header of the archive that this key is of, authenticated. Errors: as [`Header::read`];
    /// `Damaged` when it is another archive's, or was altered.
    pub(crate) fn read_header(&self, storage: &dyn Storage) -> Result<Header> {
        let header = Header::read(storage)?;
        if header.framing().archive != self.archive {
            return Err(Error::damaged("the archive was replaced by another one after it was unlocked"));
        }
        header.authenticate(&self.volume_key)?;
        Ok(header)
    }

    /// Copies the key for another component that opens the archive repeatedly.
    pub fn copy(&self) -> UnlockedKey {
        UnlockedKey {
            archive: self.archive,
            volume_key: SecretKey::new(*self.volume_key.bytes()),
            by_recipient: self.by_recipient,
        }
    }

    pub(crate) fn fingerprint(&self) -> Fingerprint {
        Fingerprint::new(&self.volume_key, &self.archive)
    }

    /// 48 or 49 bytes for a private pipe between two processes: archive id, volume key, and a 1
    /// when a recipient's slot opened it.
    pub fn to_bytes(&self) -> zeroize::Zeroizing<Vec<u8>> {
        // Allocated at once: a vector that grows leaves copies behind.
        let mut bytes = zeroize::Zeroizing::new(Vec::with_capacity(49));
        bytes.extend_from_slice(&self.archive);
        bytes.extend_from_slice(self.volume_key.bytes());
        bytes.extend(self.by_recipient.then_some(1));
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<UnlockedKey> {
        let wrong = || Error::invalid(format!("an unlocked key has 48 bytes: given={}", bytes.len()));
        let (archive, key) = bytes.split_first_chunk::<16>().ok_or_else(wrong)?;
        let (key, by_recipient) = match key.split_at_checked(32) {
            Some((key, [])) => (key, false),
            Some((key, [1])) => (key, true),
            _ => return Err(wrong()),
        };
        let key = zeroize::Zeroizing::new(<[u8; 32]>::try_from(key).map_err(|_| wrong())?);
        Ok(UnlockedKey { archive: *archive, volume_key: SecretKey::new(*key), by_recipient })
    }
}

/// Reads the header and tries `secrets` on every key slot that they may open, the cheapest first.
/// Needs no lock.
///
/// # Errors
/// `NotFound`/`Io`, `NotArchive`, `UnsupportedVersion`, `Damaged` (both header copies), `WrongKey`,
/// `Unsupported` when a slot costs more than the limits, `Invalid` when an identity or its plugin
/// fails and nothing else opens.
pub fn unlock_with<'a>(
    site: impl Into<ArchiveSource<'a>>,
    secrets: &Secrets,
    limits: &UnlockLimits,
) -> Result<UnlockedKey> {
    let (header, opened) = open_header(site, secrets, limits)?;
    Ok(UnlockedKey::of(&header, opened))
}

/// The header of the archive there, authenticated by the first slot that the secrets open. Errors:
/// as [`unlock_with`].
pub(crate) fn open_header<'a>(
    site: impl Into<ArchiveSource<'a>>,
    secrets: &Secrets,
    limits: &UnlockLimits,
) -> Result<(Header, OpenedSlot)> {
    let header = read_header(site)?;
    let opened = slots::unlock(&header, secrets, limits)?;
    header.authenticate(&opened.volume_key)?;
    Ok((header, opened))
}

/// [`unlock_with`] a passphrase and the default limits.
pub fn unlock(path: &Path, passphrase: &Passphrase) -> Result<UnlockedKey> {
    unlock_with(path, &Secrets::from(Passphrase::new(passphrase.bytes().to_vec())), &UnlockLimits::default())
}

/// Returns number and kind of each key slot in use, readable without a key: tells which secrets to
/// prompt for.
pub fn kinds<'a>(site: impl Into<ArchiveSource<'a>>) -> Result<Vec<(u8, KeyKind)>> {
    Ok(slots::kinds(&read_header(site)?))
}

/// The key that was kept somewhere as these bytes, if it is still the archive's.
pub fn accept_kept<'a>(site: impl Into<ArchiveSource<'a>>, kept: &[u8]) -> Option<UnlockedKey> {
    let key = UnlockedKey::from_bytes(kept).ok()?;
    let header = read_header(site).ok()?;
    (header.framing().archive == key.archive && header.authenticate(&key.volume_key).is_ok()).then_some(key)
}

/// Returns whether a key slot requires a key file and a passphrase together; false for a header
/// that cannot be read.
pub fn wants_both<'a>(site: impl Into<ArchiveSource<'a>>) -> bool {
    let kinds = kinds(site).unwrap_or_default();
    kinds.iter().any(|(_, kind)| *kind == KeyKind::KeyFileAndPassphrase)
}

/// The archive's id, readable without a key.
pub fn identify<'a>(site: impl Into<ArchiveSource<'a>>) -> Result<ArchiveId> {
    Ok(read_header(site)?.framing().archive)
}

/// Like [`unlock_with`], for an archive that may be truncated or may have a forged newer header
/// copy.
pub fn unlock_damaged<'a>(
    site: impl Into<ArchiveSource<'a>>,
    secrets: &Secrets,
    limits: &UnlockLimits,
) -> Result<UnlockedKey> {
    let storage = site.into().open(LockMode::Shared)?;
    let mut failed = None;
    for header in Header::salvage(&*storage)? {
        let opened = slots::unlock(&header, secrets, limits)
            .and_then(|opened| header.check_commitment(&opened.volume_key).map(|()| opened));
        match opened {
            Ok(opened) => return Ok(UnlockedKey::of(&header, opened)),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    Err(failed.unwrap_or(Error::WrongKey))
}
