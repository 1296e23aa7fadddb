//! The file in which what is remembered of one archive lies, sealed.
//!
//! Its directory is opened once, when the archive is: later the archive may be mounted over it, and a daemon that looks below its own
//! mount waits for itself. So a directory that could not be had then is not tried again.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;

use super::{ENTRY, HEAD, MARK, Seen, TRAIL, shown};
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

/// Where one archive is remembered, and the key that seals it.
pub(crate) struct SeenFile {
    directory: rustix::io::Result<OwnedFd>,
    name: String,
    /// For messages.
    path: PathBuf,
    key: XaesKey,
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat(CWD, path, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            DirBuilder::new().recursive(true).mode(0o700).create(path)?;
            Ok(openat(CWD, path, flags, Mode::empty())?)
        }
        opened => Ok(opened?),
    }
}

impl SeenFile {
    pub(crate) fn new(directory: &Path, volume_key: &SecretKey, archive: &ArchiveId) -> SeenFile {
        let name: String =
            hkdf(volume_key, archive, NAME_LABEL).bytes()[..16].iter().map(|b| format!("{b:02x}")).collect();
        SeenFile {
            directory: open_directory(directory).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            path: directory.join(format!("{name}.seen")),
            name,
            key: XaesKey::new(&hkdf(volume_key, archive, KEY_LABEL)),
        }
    }

    /// None when nothing is remembered.
    ///
    /// # Errors
    /// `Io`, `Damaged` when the file was altered.
    pub(crate) fn load(&self) -> Result<Option<Seen>> {
        let failed = |e| Error::io(format!("cannot read {}", shown(&self.path)), e);
        let mut bytes = Vec::new();
        // Without a directory there is nothing to read; that nothing can be remembered is told when it is tried.
        let Ok(directory) = &self.directory else { return Ok(None) };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(directory, format!("{}.seen", self.name), flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(failed(e.into())),
            Ok(file) => File::from(file)
                .take((NONCE + HEAD + MARK * TRAIL + ENTRY + TAG) as u64 + 1)
                .read_to_end(&mut bytes)
                .map_err(failed)?,
        };
        let altered = || Error::damaged(format!("{} was altered", shown(&self.path)));
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE>().ok_or_else(altered)?;
        let (sealed, tag) = sealed.split_last_chunk::<TAG>().ok_or_else(altered)?;
        let mut plain = sealed.to_vec();
        self.key.open(nonce, AAD, &mut plain, tag).map_err(|_| altered())?;
        Seen::decode(&plain).map(Some)
    }

    /// Replaces what is remembered (SEEN-4).
    pub(crate) fn save(&self, seen: &Seen, environment: &dyn Environment) -> Result<()> {
        let failed = |e| Error::io(format!("cannot write {}", shown(&self.path)), e);
        let mut nonce = [0; NONCE];
        environment.fill_random(&mut nonce)?;
        let mut sealed = seen.encode();
        let tag = self.key.seal(&nonce, AAD, &mut sealed);
        let directory = self.directory.as_ref().map_err(|&errno| failed(errno.into()))?;
        // The nonce is random, so is the name: two processes do not meet, and no link of somebody else is followed.
        let suffix: String = nonce[..8].iter().map(|b| format!("{b:02x}")).collect();
        let temporary = format!("{}.{suffix}.new", self.name);
        let write = || -> io::Result<()> {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let mut file = File::from(openat(directory, &temporary, flags, Mode::RUSR | Mode::WUSR)?);
            file.write_all(&[&nonce[..], &sealed, &tag].concat())?;
            file.sync_all()?;
            renameat(directory, &temporary, directory, format!("{}.seen", self.name))?;
            // File systems without the notion answer EINVAL; the rename stands all the same.
            let _ = host_call::sync_directory(directory);
            Ok(())
        };
        write().map_err(|e| {
            // It may not exist.
            let _ = unlinkat(directory, &temporary, AtFlags::empty());
            failed(e)
        })
    }
}
