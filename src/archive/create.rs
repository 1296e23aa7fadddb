//! Creates an archive.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::header::{self, empty_slots};
use super::slots::{self, NewKey, Place};
use super::{Archive, CreateOptions, OpenOptions};
use crate::crypto::kdf::{KdfCost, argon2id, calibrate, hkdf};
use crate::crypto::{Passphrase, SecretKey};
use crate::env::{Environment, SystemEnvironment};
use crate::error::Result;
use crate::format::ArchiveId;
use crate::format::header::{Framing, SLOT_EMPTY};
use crate::frame::PageCipher;
use crate::fs::FileSystem;
use crate::storage::{FileStorage, Storage};
use crate::txn::Volume;

/// Sequence number of a header that was never changed.
const FIRST_SEQUENCE: u64 = 1;

impl Archive {
    /// Creates `path` (which must not exist), syncs it and its directory, and closes it. A failure leaves no file behind.
    pub fn create(path: &Path, passphrase: &Passphrase, options: &CreateOptions) -> Result<()> {
        let storage = Arc::new(FileStorage::create(path)?);
        fill(&storage, passphrase, options).inspect_err(|_| {
            // From here on the file is ours: `FileStorage::create` refuses an existing one.
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(%error, "cannot remove the unfinished archive");
            }
        })
    }

    /// A key derivation that takes about `millis` on this machine and at most `memory_limit_kib`.
    pub fn calibrate(millis: u64, memory_limit_kib: u32) -> KdfCost {
        let passphrase = Passphrase::new(b"calibration".to_vec());
        calibrate(millis, memory_limit_kib, |cost| {
            let start = SystemEnvironment.now();
            // A cost that this machine refuses counts as too slow.
            if argon2id(&passphrase, &[0; 32], cost).is_err() {
                return u64::MAX;
            }
            let end = SystemEnvironment.now();
            let nanos = (end.seconds - start.seconds) * 1_000_000_000 + i64::from(end.nanos) - i64::from(start.nanos);
            // A clock set back meanwhile counts as an instant.
            u64::try_from(nanos).unwrap_or(0) / 1_000_000
        })
    }
}

fn fill(storage: &Arc<FileStorage>, passphrase: &Passphrase, options: &CreateOptions) -> Result<()> {
    let environment = Arc::new(SystemEnvironment);
    let mut archive: ArchiveId = [0; 16];
    environment.fill_random(&mut archive)?;
    let volume_key = random_key(&*environment)?;
    write_header(&**storage, &archive, &volume_key, passphrase, options, &*environment)?;

    let cipher = PageCipher::new(&volume_key, archive, environment.clone());
    let volume = Volume::create(storage.clone(), cipher, environment.clone(), FIRST_SEQUENCE)?;
    let open = OpenOptions::default();
    let fs = FileSystem::new(volume, environment, name_key(&volume_key, &archive), open.file_system_options())?;
    fs.format(options.creator)?;
    fs.close()?;
    storage.barrier()?;
    storage.sync_directory()
}

fn write_header(
    storage: &dyn Storage,
    archive: &ArchiveId,
    volume_key: &SecretKey,
    passphrase: &Passphrase,
    options: &CreateOptions,
    environment: &dyn Environment,
) -> Result<()> {
    let mut blocks = empty_slots();
    for block in blocks.iter_mut() {
        environment.fill_random(block)?;
    }
    let mut kinds = [SLOT_EMPTY; 32];
    let new = NewKey::Passphrase(passphrase, options.kdf);
    (kinds[0], blocks[0]) = slots::make(&Place { archive, slot: 0, volume_key }, &new, String::new(), environment)?;
    let framing = Framing {
        copy: 0,
        archive: *archive,
        sequence: FIRST_SEQUENCE,
        commitment: header::commitment(volume_key, archive),
        slots: kinds,
        mac: [0; 32],
    };
    for copy in 0..2 {
        header::write_copy(storage, &framing, &blocks, copy, volume_key)?;
    }
    Ok(())
}

pub(super) fn random_key(environment: &dyn Environment) -> Result<SecretKey> {
    let mut bytes = zeroize::Zeroizing::new([0; 32]);
    environment.fill_random(&mut *bytes)?;
    Ok(SecretKey::new(*bytes))
}

/// Key of the name hashes: the first 16 bytes of the derivation.
pub(super) fn name_key(volume_key: &SecretKey, archive: &ArchiveId) -> [u8; 16] {
    let mut key = [0; 16];
    key.copy_from_slice(&hkdf(volume_key, archive, "lockbox/v1/name").bytes()[..16]);
    key
}
