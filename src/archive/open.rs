//! Unlocks and opens an archive.

use std::path::Path;
use std::sync::Arc;

use super::check::partial_block;
use super::create::name_key;
use super::{Archive, ArchiveInfo, OpenOptions};
use crate::env::StampingEnvironment;
use crate::error::{Error, Result};
use crate::format::{ArchiveId, BLOCK, FORMAT_VERSION, ROOT_INO};
use crate::frame::PageCipher;
use crate::fs::FileSystem;
use crate::keys::rollback::RollbackCheck;
use crate::keys::{Fingerprint, LEAST_MEMORY, RollbackGuard, SeenOptions, UnlockedKey};
use crate::storage::{ArchiveSource, FileIdentity, FileStorage, LockMode};
use crate::txn::{self, Volume};

impl Archive {
    /// Returns whether no other process holds a conflicting lock at the moment.
    ///
    /// # Errors
    /// Failures to open or lock the file itself.
    pub fn is_free(path: &Path, read_only: bool) -> Result<bool> {
        FileStorage::is_free(path, if read_only { LockMode::Shared } else { LockMode::Exclusive })
    }

    /// Locks and opens; opening for writing recovers, and repairs data outside of pages (reported
    /// in [`ArchiveInfo::mended`]).
    pub fn open<'a>(site: impl Into<ArchiveSource<'a>>, key: &UnlockedKey, options: &OpenOptions) -> Result<Archive> {
        Archive::open_seen(site, key, options, &SeenOptions::default())
    }

    /// Opens an archive like [`Archive::open`], and compares it with the rollback state of this
    /// user.
    ///
    /// # Errors
    /// `Replaced`, `Older` and `Forked` unless they are accepted.
    pub fn open_seen<'a>(
        site: impl Into<ArchiveSource<'a>>,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen_options: &SeenOptions,
    ) -> Result<Archive> {
        Archive::open_at(site.into(), key, options, seen_options, None, None)
    }

    /// Opens an archive that has continued at its location: compares it with the state that its
    /// `witness` saw, in case the user's rollback state is no longer accessible.
    ///
    /// # Errors
    /// As [`Archive::open_seen`].
    pub fn open_again<'a>(
        site: impl Into<ArchiveSource<'a>>,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen_options: &SeenOptions,
        witness: &RollbackGuard,
    ) -> Result<Archive> {
        Archive::open_at(site.into(), key, options, seen_options, Some(witness.looked()), None)
    }

    /// Opens the newest state, or the snapshot of this name.
    pub(super) fn open_at(
        site: ArchiveSource<'_>,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen_options: &SeenOptions,
        looked: Option<RollbackCheck>,
        snapshot: Option<&[u8]>,
    ) -> Result<Archive> {
        if options.memory < LEAST_MEMORY {
            return Err(Error::invalid(format!("memory={} is below {LEAST_MEMORY} bytes", options.memory)));
        }
        let lock = if options.read_only { LockMode::Shared } else { LockMode::Exclusive };
        let storage = site.open(lock)?;
        if matches!(site, ArchiveSource::Storage(_)) && !options.read_only && storage.read_only() {
            return Err(Error::ReadOnly("the archive can only be read where it is".into()));
        }
        let mut header = key.read_header(&*storage)?;
        if !options.read_only {
            header.check_writable()?;
        }
        let length = storage.len()?;
        let environment = Arc::new(StampingEnvironment::new());
        let cipher = PageCipher::new(&key.volume_key, key.archive, header.framing().has_log(), environment.clone());
        let fs_options = options.file_system_options();
        let volume_options =
            txn::OpenOptions { read_only: options.read_only, memory: options.memory - fs_options.max_dirty_bytes };
        let sequence = header.framing().sequence;
        let looked = looked.unwrap_or_else(|| {
            RollbackCheck::at(seen_options, &key.volume_key, &key.archive).opened_by_recipient(key.by_recipient)
        });
        let mark = looked.mark();
        let volume = Volume::open_seen(storage.clone(), cipher, environment.clone(), sequence, &volume_options, mark)?;
        let replace = looked.admit(&volume, sequence, seen_options, options.read_only)?;
        let first_use = looked.first_use();
        let mut mended = Vec::new();
        if !options.read_only {
            // Before the first record carries the number, and not from an older header that was
            // just refused.
            mended.extend(header.repair(&*storage, &key.volume_key)?);
            mended.extend(partial_block(length).map(|what| format!("{what}; that was cut off")));
        }
        let interrupted = header.is_interrupted(&*storage, &key.volume_key, volume.durable().header_sequence)?;
        let header_flaw = header.flaw(&key.volume_key).map(|flaw| (flaw, interrupted));
        let witness = Arc::new(RollbackGuard::new(volume.clone(), header.durable_sequence(), looked, replace));
        if let Some(limit) = options.size_limit {
            volume.limit_size(limit);
        }
        if let Some(name) = snapshot {
            volume.show_snapshot(name)?;
        }
        let fs = FileSystem::new(volume, environment, name_key(&key.volume_key, &key.archive), fs_options)?;
        // Reports a damaged root now, with its name, instead of through the kernel later.
        fs.attributes(ROOT_INO)?;
        let slots = header.framing().slots;
        let key_slots = (0..).zip(slots).filter(|(_, kind)| *kind != 0).collect();
        let identity = match site {
            // Under the lock the path denotes the file that was opened.
            ArchiveSource::File(path) => Some(FileIdentity::from(
                &rustix::fs::stat(path).map_err(|e| Error::io(format!("cannot read {}", path.display()), e.into()))?,
            )),
            ArchiveSource::Storage(_) => None,
        };
        witness.remember();
        Ok(Archive {
            fs,
            storage,
            identity,
            archive: key.archive,
            fingerprint: key.fingerprint(),
            first_use,
            witness,
            key_slots,
            header_sums: header.sums(&key.volume_key),
            header_flaw,
            mended,
        })
    }

    pub fn id(&self) -> ArchiveId {
        self.archive
    }

    /// Returns the unforgeable fingerprint of the archive.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    pub fn info(&self) -> Result<ArchiveInfo> {
        let volume = &self.fs.volume;
        let record = volume.durable();
        Ok(ArchiveInfo {
            archive: self.archive,
            fingerprint: self.fingerprint,
            first_use: self.first_use.clone(),
            format_version: FORMAT_VERSION,
            generation: record.generation,
            session: record.session,
            committed: record.time,
            closed: record.closed,
            log: volume.has_log(),
            inodes: volume.state().inodes(),
            file_bytes: self.storage.len()?,
            used_bytes: volume.space().1.saturating_mul(BLOCK), // unverified
            key_slots: self.key_slots.clone(),
            backup_of: volume.origin().filter(|_| self.read_only()).map(|origin| (origin.generation, origin.time)),
            fallback: volume.fallback(),
            mended: self.mended.clone(),
        })
    }

    /// Commits, erases free space and writes the closed record; a read-only archive is only closed.
    /// Background tasks are stopped before.
    pub fn close(self) -> Result<()> {
        self.close_telling().map(drop)
    }

    /// Closes the archive like [`Self::close`], and returns [`Archive::pending_upload_bytes`] at the end.
    pub fn close_telling(self) -> Result<u64> {
        self.fs.close()?;
        if !self.storage.read_only() {
            self.witness.remember();
        }
        self.pending_upload_bytes()
    }

    /// Returns the number of durable bytes that other readers cannot see yet
    /// ([`pending_upload_bytes`](crate::storage::Storage::pending_upload_bytes)).
    pub fn pending_upload_bytes(&self) -> Result<u64> {
        self.storage.pending_upload_bytes()
    }
}
