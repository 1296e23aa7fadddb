//! Unlocks and opens an archive.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use super::check::partial_block;
use super::create::name_key;
use super::header::Header;
use super::seen::{self, Looked, SeenFile};
use super::{Archive, Info, KeyKind, OpenOptions, Secrets, SeenOptions, UnlockLimits, UnlockedKey, Witness, slots};
use crate::crypto::{Passphrase, SecretKey};
use crate::env::StampingEnvironment;
use crate::error::{Error, Result};
use crate::format::{ArchiveId, BLOCK, FORMAT_VERSION, ROOT_INO};
use crate::frame::PageCipher;
use crate::fs::FileSystem;
use crate::storage::{FileStorage, LockMode, Storage};
use crate::txn::{self, Volume};

/// Below this the caches of the layers have no room to work in.
pub(super) const LEAST_MEMORY: u64 = 16 << 20;

impl Archive {
    /// Reads the header and tries `secrets` on every key slot that they may open, the cheapest first. Needs no lock.
    ///
    /// # Errors
    /// `NotFound`/`Io`, `NotArchive`, `UnsupportedVersion`, `Damaged` (both header copies), `WrongKey`, `Unsupported` when a slot
    /// costs more than the limits, `Invalid` when an identity or its plugin fails and nothing else opens.
    pub fn unlock_with(path: &Path, secrets: &Secrets, limits: &UnlockLimits) -> Result<UnlockedKey> {
        let header = Header::read(&Unlocked::open(path)?)?;
        let opened = slots::unlock(&header, secrets, limits)?;
        header.authenticate(&opened.volume_key)?;
        Ok(UnlockedKey { archive: header.framing().archive, volume_key: opened.volume_key })
    }

    /// [`Archive::unlock_with`] a passphrase and the default limits.
    pub fn unlock(path: &Path, passphrase: &Passphrase) -> Result<UnlockedKey> {
        Archive::unlock_within(path, passphrase, &UnlockLimits::default())
    }

    /// [`Archive::unlock_with`] a passphrase.
    pub fn unlock_within(path: &Path, passphrase: &Passphrase, limits: &UnlockLimits) -> Result<UnlockedKey> {
        Archive::unlock_with(path, &Secrets::from(Passphrase::new(passphrase.bytes().to_vec())), limits)
    }

    /// Number and kind of each key slot in use, readable without a key: tells what to ask for.
    pub fn key_kinds(path: &Path) -> Result<Vec<(u8, KeyKind)>> {
        Ok(slots::kinds(&Header::read(&Unlocked::open(path)?)?))
    }

    /// Whether `key`, which was kept somewhere, is the archive's: authenticates the header under it.
    ///
    /// # Errors
    /// As [`Archive::identify`]; `WrongKey` for the key of another archive, or one from before its keys were changed.
    fn check_key(path: &Path, key: &UnlockedKey) -> Result<()> {
        let header = Header::read(&Unlocked::open(path)?)?;
        if header.framing().archive != key.archive {
            return Err(Error::WrongKey);
        }
        header.authenticate(&key.volume_key)
    }

    /// The key that was kept somewhere as these bytes, if it is still the archive's.
    pub fn accept_kept(path: &Path, kept: &[u8]) -> Option<UnlockedKey> {
        let key = UnlockedKey::from_bytes(kept).ok()?;
        Archive::check_key(path, &key).ok().map(|()| key)
    }

    /// Whether a key slot wants a key file and a passphrase together. A header that cannot be read wants nothing.
    pub fn wants_both(path: &Path) -> bool {
        let kinds = Archive::key_kinds(path).unwrap_or_default();
        kinds.iter().any(|(_, kind)| *kind == KeyKind::KeyFileAndPassphrase)
    }

    /// The archive's id, readable without a key.
    pub fn identify(path: &Path) -> Result<ArchiveId> {
        Ok(Header::read(&Unlocked::open(path)?)?.framing().archive)
    }

    /// Whether nobody holds the archive in a way that keeps it from being opened. Somebody may take it right after.
    ///
    /// # Errors
    /// What keeps the file itself from being opened or locked.
    pub fn is_free(path: &Path, read_only: bool) -> Result<bool> {
        FileStorage::is_free(path, if read_only { LockMode::Shared } else { LockMode::Exclusive })
    }

    /// Locks and opens; a writable open recovers, and mends what is outside of the pages ([`Info::mended`] tells what).
    pub fn open(path: &Path, key: &UnlockedKey, options: &OpenOptions) -> Result<Archive> {
        Archive::open_seen(path, key, options, &SeenOptions::default())
    }

    /// Like [`Archive::open`], and compares with what this user remembers of the archive.
    ///
    /// # Errors
    /// `Older` and `Forked` unless they are accepted.
    pub fn open_seen(
        path: &Path,
        key: &UnlockedKey,
        options: &OpenOptions,
        seen_options: &SeenOptions,
    ) -> Result<Archive> {
        if options.memory < LEAST_MEMORY {
            return Err(Error::invalid(format!("memory={} is below {LEAST_MEMORY} bytes", options.memory)));
        }
        let lock = if options.read_only { LockMode::Shared } else { LockMode::Exclusive };
        let storage = Arc::new(FileStorage::open(path, lock)?);
        let mut header = Header::read(&*storage)?;
        if header.framing().archive != key.archive {
            return Err(Error::damaged("another archive took the place of the one that was unlocked"));
        }
        header.authenticate(&key.volume_key)?;
        if !options.read_only {
            header.check_writable()?;
        }
        let length = storage.len()?;
        let environment = Arc::new(StampingEnvironment::new());
        let cipher = PageCipher::new(&key.volume_key, key.archive, environment.clone());
        let fs_options = options.file_system_options();
        let volume_options =
            txn::OpenOptions { read_only: options.read_only, memory: options.memory - fs_options.staged_bytes };
        let sequence = header.framing().sequence;
        let looked = Looked::into(seen_file(seen_options, &key.volume_key, &key.archive));
        let mark = looked.mark();
        let volume = Volume::open_seen(storage.clone(), cipher, environment.clone(), sequence, &volume_options, mark)?;
        let replace = seen::judge(&volume, sequence, looked.seen.as_ref(), seen_options)?;
        let mut mended = Vec::new();
        if !options.read_only {
            // Before the first record carries the number, and not from an older header that was just refused.
            mended.extend(header.repair(&*storage, &key.volume_key)?);
            mended.extend(partial_block(length).map(|what| format!("{what}; that was cut off")));
        }
        let header_flaw = header.flaw(&key.volume_key);
        let witness = Arc::new(Witness::new(volume.clone(), header.settled_sequence(), looked, replace));
        if let Some(limit) = options.size_limit {
            volume.limit_size(limit);
        }
        let fs = FileSystem::new(volume, environment, name_key(&key.volume_key, &key.archive), fs_options)?;
        // Who mounts learns of a damaged root here, with its name, and not from the kernel.
        fs.attributes(ROOT_INO)?;
        let slots = header.framing().slots;
        let key_slots = (0..).zip(slots).filter(|(_, kind)| *kind != 0).collect();
        // Under the lock the path names the file that was opened.
        let metadata = std::fs::metadata(path).map_err(|e| Error::io(format!("cannot read {}", path.display()), e))?;
        witness.remember();
        let identity = (metadata.dev(), metadata.ino());
        Ok(Archive { fs, storage, identity, archive: key.archive, witness, key_slots, header_flaw, mended })
    }

    pub fn id(&self) -> ArchiveId {
        self.archive
    }

    pub fn info(&self) -> Result<Info> {
        let volume = &self.fs.volume;
        let record = volume.durable();
        Ok(Info {
            archive: self.archive,
            format_version: FORMAT_VERSION,
            generation: record.generation,
            session: record.session,
            committed: record.time,
            closed: record.closed,
            inodes: volume.state().inodes(),
            file_bytes: self.storage.len()?,
            used_bytes: volume.space().1.saturating_mul(BLOCK), // the archive's word
            key_slots: self.key_slots.clone(),
            fallback: volume.fallback(),
            mended: self.mended.clone(),
        })
    }

    /// Commits, erases free space and writes the closed record; a read-only archive is just left.
    pub fn close(self) -> Result<()> {
        if !self.storage.read_only() {
            self.fs.close()?;
            self.witness.remember();
        }
        Ok(())
    }
}

pub(super) fn seen_file(options: &SeenOptions, volume_key: &SecretKey, archive: &ArchiveId) -> Option<SeenFile> {
    options.directory.as_deref().map(|directory| SeenFile::new(directory, volume_key, archive))
}

/// The archive file without a lock: enough to read the header, which survives a concurrent change of one copy.
pub(super) struct Unlocked {
    file: File,
    length: u64,
}

impl Unlocked {
    pub(super) fn open(path: &Path) -> Result<Unlocked> {
        let failed = |source| Error::io(format!("cannot open {}", path.display()), source);
        // A FIFO would block the open for ever, so the kind is looked at first.
        let metadata = std::fs::metadata(path).map_err(failed)?;
        if metadata.is_dir() {
            return Err(Error::NotArchive("it is a directory".into()));
        }
        if !metadata.is_file() {
            return Err(Error::NotArchive("it is no regular file".into()));
        }
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.size();
        Ok(Unlocked { file, length })
    }
}

impl Storage for Unlocked {
    fn len(&self) -> Result<u64> {
        Ok(self.length)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset).map_err(|e| Error::io("cannot read the header", e))
    }

    fn write_at(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        Err(refuse_write())
    }

    fn allocate(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(refuse_write())
    }

    fn punch(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(refuse_write())
    }

    fn set_len(&self, _length: u64) -> Result<()> {
        Err(refuse_write())
    }

    fn barrier(&self) -> Result<()> {
        Err(refuse_write())
    }

    fn evict(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<std::ops::Range<u64>>> {
        Ok((offset < self.length).then_some(offset..self.length))
    }

    fn read_only(&self) -> bool {
        true
    }
}

fn refuse_write() -> Error {
    Error::ReadOnly("the file is not locked".into())
}
