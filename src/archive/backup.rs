//! Copies the header of an archive to a file of its own, and puts such a copy back.

use std::path::Path;
use std::sync::Arc;

use super::header::{self, Header};
use super::keys::KeyAccess;
use super::open::{LEAST_MEMORY, Unlocked, seen_file};
use super::seen::{self, Looked};
use super::{Archive, Witness, slots};
use crate::crypto::kdf::equal;
use crate::env::SystemEnvironment;
use crate::error::{Error, Result};
use crate::format::header::{Framing, HEADER_BYTES};
use crate::frame::PageCipher;
use crate::storage::{FileStorage, LockMode};
use crate::txn::{self, Volume};

/// What a restored header is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Header sequence number of the backup.
    pub backup: u64,
    /// The highest that the archive had already.
    pub known: u64,
}

impl Archive {
    /// The newer whole header copy, [`HEADER_BYTES`] long. Needs neither key nor lock.
    ///
    /// # Errors
    /// As [`Archive::key_kinds`].
    pub fn backup_header(path: &Path) -> Result<Vec<u8>> {
        let header = Header::read(&Unlocked::open(path)?)?;
        // As it is: the MAC covers the number of the copy.
        Ok(crate::format::header::encode(header.framing(), &header.slots()))
    }

    /// Writes the header in `backup` to both places of the archive. The secrets are those of the backup's key slots.
    ///
    /// # Errors
    /// `Invalid` for what is no backup or one of another archive, `Older` when the archive's keys were changed since and that is not accepted
    /// (`seen.accept_older`), `Damaged`, `InUse`, `WrongKey`.
    pub fn restore_header(path: &Path, backup: &[u8], access: &KeyAccess<'_>) -> Result<Restored> {
        let storage = Arc::new(FileStorage::open(path, LockMode::Exclusive)?);
        let backup = read_backup(backup)?;
        let present = Header::read(&*storage);
        let mine = backup.framing().clone();
        if let Ok(present) = &present {
            let other = present.framing();
            if other.archive != mine.archive {
                return Err(Error::invalid("the header backup is of another archive"));
            }
            if !equal(&other.commitment, &mine.commitment) {
                return Err(Error::invalid(
                    "the header backup is from before the archive was given a new volume key (lockbox key rekey): it opens older copies only",
                ));
            }
            present.check_writable()?;
        }
        backup.check_writable()?;
        let opened = slots::unlock(&backup, access.secrets, &access.limits)?;
        let volume_key = &opened.volume_key;
        backup.authenticate(volume_key)?;

        let environment = Arc::new(SystemEnvironment);
        let cipher = PageCipher::new(volume_key, mine.archive, environment.clone());
        let looked = Looked::into(seen_file(&access.seen, volume_key, &mine.archive));
        let options = txn::OpenOptions { read_only: true, memory: LEAST_MEMORY };
        let volume = Volume::open_seen(storage.clone(), cipher, environment, mine.sequence, &options, looked.mark());
        let volume = volume.map_err(|error| match error {
            Error::Damaged(reason) => Error::damaged(format!(
                "the header backup is of another archive, or the archive's commits are lost as well: {reason}"
            )),
            error => error,
        })?;
        let present = present.ok().map_or(0, |header| header.framing().sequence);
        let remembered = looked.seen.as_ref().map_or(0, seen::Seen::header_sequence);
        let known = present.max(volume.durable().header_sequence).max(remembered);
        if mine.sequence < known && !access.seen.accept_older {
            return Err(Error::Older(format!(
                "the header backup (number {}) is older than the archive's keys (number {known}): a passphrase or key that was changed or \
                 removed since then would open it again; use --accept-older if that is what you want",
                mine.sequence
            )));
        }
        // What replaces a newer header must count as newer, or every program would take it for an older one put back.
        let sequence = if mine.sequence < known { known + 1 } else { mine.sequence };
        let framing = Framing { sequence, ..mine };
        for copy in 0..2 {
            header::write_copy(&*storage, &framing, &backup.slots(), copy, volume_key)?;
        }
        Witness::new(volume, sequence, looked, false).remember();
        Ok(Restored { backup: mine.sequence, known })
    }
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
