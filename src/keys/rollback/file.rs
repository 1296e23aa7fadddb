//! Sealed files in which a user's memory of archives lies: one for each archive, and for each
//! place.
//!
//! Its directory is opened once, when the archive is: later the archive may be mounted over it, and
//! a daemon that looks below its own mount waits for itself. So a directory that could not be had
//! then is not tried again.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, linkat, openat, renameat, renameat_with, unlinkat};
use rustix::io::Errno;

use super::{ENTRY, HEAD, MARK, RollbackState, TRAIL, shown};
use crate::crypto::SecretKey;
use crate::crypto::aead::{NONCE, TAG, XaesKey};
use crate::crypto::kdf::hkdf;
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::ArchiveId;
use crate::storage::host_call;

/// Label of the key that seals the file.
const KEY_LABEL: &str = "lockbox/v1/seen";
/// Label of the file's name.
const NAME_LABEL: &str = "lockbox/v1/seen/name";
/// Associated data: there is one kind of message under the key.
const AAD: &[u8] = b"lockbox/v1/seen";

/// A sealed file of the user's memory of archives, by its name in an open directory.
pub(super) struct SealedFile {
    directory: rustix::io::Result<OwnedFd>,
    name: String,
    /// For messages.
    path: PathBuf,
    key: XaesKey,
    aad: Vec<u8>,
}

/// Location of one archive's rollback state, and the key that seals it.
pub(crate) struct RollbackStateFile {
    sealed: SealedFile,
}

pub(super) fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat(CWD, path, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            DirBuilder::new().recursive(true).mode(0o700).create(path)?;
            Ok(openat(CWD, path, flags, Mode::empty())?)
        }
        opened => Ok(opened?),
    }
}

impl SealedFile {
    /// `aad` begins with a label that no other kind of file under the same key has.
    pub(super) fn new(directory: &Path, name: String, key: XaesKey, aad: Vec<u8>) -> SealedFile {
        SealedFile {
            directory: open_directory(directory).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            path: directory.join(&name),
            name,
            key,
            aad,
        }
    }

    /// The opened content, of at most `most` bytes; None when there is no file.
    ///
    /// # Errors
    /// `Io`, `Damaged` when the file was altered.
    pub(super) fn load(&self, most: usize) -> Result<Option<Vec<u8>>> {
        // Without a directory there is nothing to read; the failure is reported on the first write.
        let Ok(directory) = &self.directory else { return Ok(None) };
        let read = read_in(directory, &self.name, NONCE + most + TAG);
        let Some(bytes) = read.map_err(|e| Error::io(format!("cannot read {}", shown(&self.path)), e))? else {
            return Ok(None);
        };
        let altered = || Error::damaged(format!("{} was altered", shown(&self.path)));
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE>().ok_or_else(altered)?;
        let (sealed, tag) = sealed.split_last_chunk::<TAG>().ok_or_else(altered)?;
        let mut plain = sealed.to_vec();
        self.key.open(nonce, &self.aad, &mut plain, tag).map_err(|_| altered())?;
        Ok(Some(plain))
    }

    /// Replaces the file (SEEN-4).
    pub(super) fn save(&self, mut sealed: Vec<u8>, environment: &dyn Environment) -> Result<()> {
        let failed = |e| Error::io(format!("cannot write {}", shown(&self.path)), e);
        let mut nonce = [0; NONCE];
        environment.fill_random(&mut nonce)?;
        let tag = self.key.seal(&nonce, &self.aad, &mut sealed);
        let directory = self.directory.as_ref().map_err(|&errno| failed(errno.into()))?;
        let bytes = [&nonce[..], &sealed, &tag].concat();
        write_in(directory, &self.name, &nonce[..8], &bytes, true).map_err(failed)
    }
}

/// Reads a file of the directory, and of a longer one `most + 1` bytes; None when it is missing.
pub(super) fn read_in(directory: &OwnedFd, name: &str, most: usize) -> io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match openat(directory, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e.into()),
        Ok(file) => {
            let mut bytes = Vec::new();
            File::from(file).take(most as u64 + 1).read_to_end(&mut bytes)?;
            Ok(Some(bytes))
        }
    }
}

/// Writes a whole file of the directory, durably: in the place of one that is there, or else
/// failing with `AlreadyExists`.
pub(super) fn write_in(directory: &OwnedFd, name: &str, random: &[u8], bytes: &[u8], replaces: bool) -> io::Result<()> {
    // The name is random: two processes do not collide, and no link of another user is followed.
    let suffix: String = random.iter().map(|b| format!("{b:02x}")).collect();
    let stem = name.split('.').next().unwrap_or(name);
    let temporary = format!("{stem}.{suffix}.new");
    let write = || -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut file = File::from(openat(directory, &temporary, flags, Mode::RUSR | Mode::WUSR)?);
        file.write_all(bytes)?;
        file.sync_all()?;
        match replaces {
            true => renameat(directory, &temporary, directory, name)?,
            false => match renameat_with(directory, &temporary, directory, name, RenameFlags::NOREPLACE) {
                // File systems without the flag have hard links instead.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    linkat(directory, &temporary, directory, name, AtFlags::empty())?;
                    unlinkat(directory, &temporary, AtFlags::empty())?;
                }
                named => named?,
            },
        }
        // File systems without the notion answer EINVAL; the name stands all the same.
        let _ = host_call::sync_directory(directory);
        Ok(())
    };
    write().inspect_err(|_| {
        let _ = unlinkat(directory, &temporary, AtFlags::empty());
    })
}

impl RollbackStateFile {
    pub(crate) fn new(directory: &Path, volume_key: &SecretKey, archive: &ArchiveId) -> RollbackStateFile {
        let name: String =
            hkdf(volume_key, archive, NAME_LABEL).bytes()[..16].iter().map(|b| format!("{b:02x}")).collect();
        let key = XaesKey::new(&hkdf(volume_key, archive, KEY_LABEL));
        RollbackStateFile { sealed: SealedFile::new(directory, format!("{name}.seen"), key, AAD.to_vec()) }
    }

    /// None when nothing is remembered.
    ///
    /// # Errors
    /// `Io`, `Damaged` when the file was altered.
    pub(crate) fn load(&self) -> Result<Option<RollbackState>> {
        self.sealed.load(HEAD + MARK * TRAIL + ENTRY)?.map(|plain| RollbackState::decode(&plain)).transpose()
    }

    /// Replaces the remembered state (SEEN-4).
    pub(crate) fn save(&self, seen: &RollbackState, environment: &dyn Environment) -> Result<()> {
        self.sealed.save(seen.encode(), environment)
    }
}
