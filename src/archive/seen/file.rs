//! The file in which what is remembered of one archive lies, sealed.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{HEAD, MARK, Seen, TRAIL, shown};
use crate::crypto::SecretKey;
use crate::crypto::aead::{NONCE, TAG, XaesKey};
use crate::crypto::kdf::hkdf;
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::ArchiveId;

/// Label of the key that seals the file.
const KEY_LABEL: &str = "lockbox/v1/seen";
/// Label of the file's name.
const NAME_LABEL: &str = "lockbox/v1/seen/name";
/// Associated data: there is one kind of message under the key.
const AAD: &[u8] = b"lockbox/v1/seen";

/// Where one archive is remembered, and the key that seals it.
pub(in crate::archive) struct SeenFile {
    directory: PathBuf,
    path: PathBuf,
    key: XaesKey,
}

impl SeenFile {
    pub(in crate::archive) fn new(directory: &Path, volume_key: &SecretKey, archive: &ArchiveId) -> SeenFile {
        let name: String =
            hkdf(volume_key, archive, NAME_LABEL).bytes()[..16].iter().map(|b| format!("{b:02x}")).collect();
        SeenFile {
            directory: directory.to_path_buf(),
            path: directory.join(format!("{name}.seen")),
            key: XaesKey::new(&hkdf(volume_key, archive, KEY_LABEL)),
        }
    }

    /// None when nothing is remembered.
    ///
    /// # Errors
    /// `Io`, `Damaged` when the file was altered.
    pub(in crate::archive) fn load(&self) -> Result<Option<Seen>> {
        let failed = |e| Error::io(format!("cannot read {}", shown(&self.path)), e);
        let mut bytes = Vec::new();
        match File::open(&self.path) {
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(None),
            Err(e) => return Err(failed(e)),
            Ok(file) => {
                file.take((NONCE + HEAD + MARK * TRAIL + TAG) as u64 + 1).read_to_end(&mut bytes).map_err(failed)?
            }
        };
        let altered = || Error::damaged(format!("{} was altered", shown(&self.path)));
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE>().ok_or_else(altered)?;
        let (sealed, tag) = sealed.split_last_chunk::<TAG>().ok_or_else(altered)?;
        let mut plain = sealed.to_vec();
        self.key.open(nonce, AAD, &mut plain, tag).map_err(|_| altered())?;
        Seen::decode(&plain).map(Some)
    }

    /// Replaces what is remembered (U4).
    pub(in crate::archive) fn save(&self, seen: &Seen, environment: &dyn Environment) -> Result<()> {
        let failed = |e| Error::io(format!("cannot write {}", shown(&self.path)), e);
        let mut nonce = [0; NONCE];
        environment.fill_random(&mut nonce)?;
        let mut sealed = seen.encode();
        let tag = self.key.seal(&nonce, AAD, &mut sealed);
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).map_err(failed)?;
        // The nonce is random, so is the name: two processes do not meet, and no link of somebody else is followed.
        let suffix: String = nonce[..8].iter().map(|b| format!("{b:02x}")).collect();
        let temporary = self.path.with_extension(format!("{suffix}.new"));
        let write = || -> io::Result<()> {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
            file.write_all(&[&nonce[..], &sealed, &tag].concat())?;
            file.sync_all()?;
            fs::rename(&temporary, &self.path)?;
            // File systems without the notion answer EINVAL; the rename stands all the same.
            let _ = File::open(&self.directory)?.sync_all();
            Ok(())
        };
        write().map_err(|e| {
            // It may not exist.
            let _ = fs::remove_file(&temporary);
            failed(e)
        })
    }
}
