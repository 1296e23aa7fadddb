//! Creates an archive.

use std::path::Path;
use std::sync::Arc;

use super::{Archive, CreateOptions, OpenOptions};
use crate::crypto::kdf::{KdfCost, argon2id, calibrate, hkdf};
use crate::crypto::{Passphrase, SecretKey};
use crate::env::{Environment, SystemEnvironment};
use crate::error::{Error, Result};
use crate::format::ArchiveId;
use crate::format::header::{FEATURE_LOG, Framing, SLOT_EMPTY};
use crate::frame::PageCipher;
use crate::fs::FileSystem;
use crate::keys::RollbackOptions;
use crate::keys::header::{self, random_slots};
use crate::keys::rollback::KnownPlaces;
use crate::keys::slots::{self, NewKey, SlotAddress};
use crate::storage::{FileStorage, HostEntry, Storage};
use crate::txn::Volume;

/// Sequence number of a header that was never changed.
const FIRST_SEQUENCE: u64 = 1;

impl Archive {
    /// Creates `path` (which must not exist), syncs it and its directory, and closes it. A failure
    /// leaves no file behind.
    pub fn create(path: &Path, passphrase: &Passphrase, options: &CreateOptions) -> Result<()> {
        Archive::create_seen(path, passphrase, options, &RollbackOptions::default())
    }

    /// Creates an archive like [`Archive::create`], and remembers it at its path, replacing the
    /// memory of a previous archive there, since this user requested the creation.
    pub fn create_seen(
        path: &Path,
        passphrase: &Passphrase,
        options: &CreateOptions,
        seen: &RollbackOptions,
    ) -> Result<()> {
        let cannot = |what: &str| {
            let context = format!("{what} {}", path.display());
            move |e| Error::io(context, e)
        };
        let entry = HostEntry::of(path).map_err(cannot("creating"))?;
        let file = Arc::new(FileStorage::create(&entry)?);
        let storage: Arc<dyn Storage> = file.clone();
        let filled = fill(&storage, passphrase, options, seen);
        let synced = |created| {
            entry.sync_directory().map_err(cannot("syncing the directory of"))?;
            Ok(created)
        };
        let created = filled.and_then(synced).inspect_err(|_| {
            if let Err(error) = entry.remove(&*file) {
                tracing::warn!(%error, "cannot remove the unfinished archive");
            }
        })?;
        created.remember();
        Ok(())
    }

    /// Creates an archive in an empty storage for a user with rollback state, and closes it. Its
    /// durability is that of the storage: the caller calls [`NewArchive::remember`] once the
    /// storage is durable.
    pub fn create_in(
        storage: &Arc<dyn Storage>,
        passphrase: &Passphrase,
        options: &CreateOptions,
        seen: &RollbackOptions,
    ) -> Result<NewArchive> {
        if !storage.is_empty()? {
            return Err(Error::Exists);
        }
        fill(storage, passphrase, options, seen)
    }

    /// Returns key derivation costs of about `millis` on this machine when idle, with at most
    /// `memory_limit_kib`.
    pub fn calibrate(millis: u64, memory_limit_kib: u32) -> KdfCost {
        calibrate_by(&SystemEnvironment, millis, memory_limit_kib)
    }
}

/// Archive that was just created.
pub struct NewArchive(KnownPlaces);

impl NewArchive {
    /// Remembers the archive at its places, in place of the previous ones (PLACE-4).
    pub fn remember(&self) {
        self.0.remember(None);
    }
}

/// Calibrates by processor time: wall time would choose a cheap derivation on a busy machine, and
/// an archive keeps it permanently. One lane is one thread, so its processor time is complete.
fn calibrate_by(environment: &dyn Environment, millis: u64, memory_limit_kib: u32) -> KdfCost {
    let passphrase = Passphrase::new(b"calibration".to_vec());
    calibrate(millis, memory_limit_kib, |cost| {
        let start = environment.processor_time();
        // A cost that this machine refuses counts as too slow.
        if argon2id(&passphrase, &[0; 32], cost).is_err() {
            return u64::MAX;
        }
        let used = environment.processor_time().saturating_sub(start);
        u64::try_from(used.as_millis()).unwrap_or(u64::MAX)
    })
}

fn fill(
    storage: &Arc<dyn Storage>,
    passphrase: &Passphrase,
    options: &CreateOptions,
    seen: &RollbackOptions,
) -> Result<NewArchive> {
    let environment = Arc::new(SystemEnvironment);
    let mut archive: ArchiveId = [0; 16];
    environment.fill_random(&mut archive)?;
    let volume_key = random_key(&*environment)?;
    let places = KnownPlaces::at(seen, &volume_key, &archive);
    places.announce();
    let mut blocks = random_slots(&*environment)?;
    let mut slots = [SLOT_EMPTY; 32];
    let address = SlotAddress { archive: &archive, slot: 0, volume_key: &volume_key };
    let new = NewKey::Passphrase(passphrase, options.kdf);
    (slots[0], blocks[0]) = slots::make(&address, &new, String::new(), &*environment)?;
    let framing = Framing {
        copy: 0,
        features: FEATURE_LOG,
        archive,
        sequence: FIRST_SEQUENCE,
        commitment: header::commitment(&volume_key, &archive),
        slots,
        mac: [0; 32],
    };
    header::write_over(&**storage, None, &framing, &blocks, &volume_key)?;

    let cipher = PageCipher::new(&volume_key, archive, true, environment.clone());
    let volume = Volume::create(storage.clone(), cipher, environment.clone(), FIRST_SEQUENCE)?;
    let open = OpenOptions::default();
    let fs = FileSystem::new(volume, environment, name_key(&volume_key, &archive), open.file_system_options())?;
    fs.format(options.creator)?;
    fs.close()?;
    storage.barrier()?;
    Ok(NewArchive(places))
}

pub(super) fn random_key(environment: &dyn Environment) -> Result<SecretKey> {
    let mut bytes = zeroize::Zeroizing::new([0; 32]);
    environment.fill_random(&mut *bytes)?;
    Ok(SecretKey::new(*bytes))
}

/// Returns the key of the name hashes: the first 16 bytes of the derivation.
pub(super) fn name_key(volume_key: &SecretKey, archive: &ArchiveId) -> [u8; 16] {
    let mut key = [0; 16];
    key.copy_from_slice(&hkdf(volume_key, archive, "lockbox/v1/name").bytes()[..16]);
    key
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::error::Timestamp;

    /// A busy machine: each look at the clock on the wall is an hour after the last one, and a derivation takes 600 ms of the processor.
    #[derive(Default)]
    struct Busy {
        looks: AtomicU64,
    }

    impl Environment for Busy {
        fn now(&self) -> Timestamp {
            let looks = self.looks.fetch_add(1, Ordering::Relaxed);
            Timestamp { seconds: 3600 * looks as i64, nanos: 0 }
        }

        fn processor_time(&self) -> Duration {
            Duration::from_millis(600 * self.looks.fetch_add(1, Ordering::Relaxed))
        }

        fn fill_random(&self, out: &mut [u8]) -> Result<()> {
            out.fill(0);
            Ok(())
        }
    }

    #[test]
    fn a_busy_machine_chooses_the_same_key_derivation_as_an_idle_one() {
        let floor = KdfCost::FLOOR;
        assert_eq!(calibrate_by(&Busy::default(), 1000, u32::MAX), KdfCost { passes: 5, ..floor });
    }

    #[test]
    fn processor_time_stands_still_while_a_thread_waits() {
        let before = SystemEnvironment.processor_time();
        // Another thread works so long.
        let works = || while SystemEnvironment.processor_time() < Duration::from_millis(300) {};
        std::thread::spawn(works).join().unwrap();
        let waited = SystemEnvironment.processor_time() - before;
        assert!(waited < Duration::from_millis(200), "{waited:?}");
        argon2id(&Passphrase::new(b"word".to_vec()), &[0; 32], KdfCost { memory_kib: 16 << 10, ..KdfCost::FLOOR })
            .unwrap();
        assert!(SystemEnvironment.processor_time() - before > waited, "nothing was counted");
    }
}
