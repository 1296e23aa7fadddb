//! Changes the passphrase.

use std::path::Path;

use super::header::Header;
use super::{Archive, UnlockLimits, slots};
use crate::crypto::Passphrase;
use crate::crypto::kdf::KdfCost;
use crate::env::SystemEnvironment;
use crate::error::Result;
use crate::storage::{FileStorage, LockMode};

impl Archive {
    /// Replaces the slot that `old` opens by one for `new`, in both header copies, one after the other with barriers.
    ///
    /// # Errors
    /// As [`Archive::unlock`]; `InUse` while the archive is open elsewhere.
    pub fn change_passphrase(path: &Path, old: &Passphrase, new: &Passphrase, kdf: KdfCost) -> Result<()> {
        Archive::change_passphrase_within(path, old, new, kdf, &UnlockLimits::default())
    }

    /// Like [`Archive::change_passphrase`] with other limits for the old slot.
    pub fn change_passphrase_within(
        path: &Path,
        old: &Passphrase,
        new: &Passphrase,
        kdf: KdfCost,
        limits: &UnlockLimits,
    ) -> Result<()> {
        let storage = FileStorage::open(path, LockMode::Exclusive)?;
        let mut header = Header::read(&storage)?;
        let opened = slots::unlock(&header, old, limits)?;
        let volume_key = &opened.secret.volume_key;
        header.authenticate(volume_key)?;
        let label = opened.secret.label.clone();
        let archive = header.framing().archive;
        let block = slots::make(&archive, opened.slot, new, kdf, volume_key, label, &SystemEnvironment)?;
        // A crash between the two copies must find the other one whole.
        header.repair(&storage, volume_key)?;
        header.replace_slot(&storage, opened.slot, &block, volume_key)
    }
}
