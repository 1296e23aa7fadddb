//! Changes the passphrase.

use std::path::Path;
use std::sync::Arc;

use super::header::Header;
use super::open::{LEAST_MEMORY, seen_file};
use super::seen::{self, Looked};
use super::{Archive, SeenOptions, UnlockLimits, Witness, slots};
use crate::crypto::Passphrase;
use crate::crypto::kdf::KdfCost;
use crate::env::SystemEnvironment;
use crate::error::Result;
use crate::frame::PageCipher;
use crate::storage::{FileStorage, LockMode};
use crate::txn::{self, Volume};

impl Archive {
    /// Replaces the slot that `old` opens by one for `new`, in both header copies, one after the other with barriers.
    ///
    /// # Errors
    /// As [`Archive::unlock`]; `InUse` while the archive is open elsewhere.
    pub fn change_passphrase(path: &Path, old: &Passphrase, new: &Passphrase, kdf: KdfCost) -> Result<()> {
        Archive::change_passphrase_within(path, old, new, kdf, &UnlockLimits::default(), &SeenOptions::default())
    }

    /// Like [`Archive::change_passphrase`] with other limits for the old slot, and compares with what this user remembers.
    pub fn change_passphrase_within(
        path: &Path,
        old: &Passphrase,
        new: &Passphrase,
        kdf: KdfCost,
        limits: &UnlockLimits,
        seen_options: &SeenOptions,
    ) -> Result<()> {
        let storage = Arc::new(FileStorage::open(path, LockMode::Exclusive)?);
        let mut header = Header::read(&*storage)?;
        let opened = slots::unlock(&header, old, limits)?;
        let volume_key = &opened.secret.volume_key;
        header.authenticate(volume_key)?;
        header.check_writable()?;
        let label = opened.secret.label.clone();
        let archive = header.framing().archive;
        let sequence = header.framing().sequence;
        // Only read: what a change of the passphrase needs is that this is no older copy, in which the change would be lost.
        let environment = Arc::new(SystemEnvironment);
        let cipher = PageCipher::new(volume_key, archive, environment.clone());
        let looked = Looked::into(seen_file(seen_options, volume_key, &archive));
        let options = txn::OpenOptions { read_only: true, memory: LEAST_MEMORY };
        let volume = Volume::open_seen(storage.clone(), cipher, environment, sequence, &options, looked.mark())?;
        let replace = seen::judge(&volume, sequence, looked.seen.as_ref(), seen_options)?;

        let block = slots::make(&archive, opened.slot, new, kdf, volume_key, label, &SystemEnvironment)?;
        // A crash between the two copies must find the other one whole.
        header.repair(&*storage, volume_key)?;
        header.replace_slot(&*storage, opened.slot, &block, volume_key)?;
        // Both copies have reached the medium (U3).
        Witness::new(volume, sequence + 1, looked, replace).remember();
        Ok(())
    }
}
