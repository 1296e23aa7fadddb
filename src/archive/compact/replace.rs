//! The new file beside the old one: made, removed when it is not finished, given the old one's metadata and its name.

use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::super::display;
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::storage::{FileStorage, LockMode};

/// Bytes of the old name in the new one: together with the rest at most 255.
const NAME: usize = 200;
/// Digits of the random part.
const DIGITS: usize = 16;

/// The unfinished file; removed when dropped before it has the old one's name.
pub(super) struct Beside {
    storage: Arc<FileStorage>,
    path: PathBuf,
    finished: std::cell::Cell<bool>,
}

/// Somebody may have put another file there meanwhile, which must not be lost.
pub(super) fn check_same(path: &Path, locked: &FileStorage) -> Result<()> {
    if locked.is_at(path)? {
        return Ok(());
    }
    Err(Error::InUse(format!("another file took the place of {} meanwhile; nothing was changed", path.display())))
}

/// Length and bytes on the disk.
pub(super) fn sizes(path: &Path) -> Result<(u64, u64)> {
    let metadata = metadata(path)?;
    Ok((metadata.len(), metadata.blocks() * 512))
}

/// Another name would go on naming the old file, and the two would part unnoticed.
pub(super) fn check_names(path: &Path, break_links: bool) -> Result<()> {
    let links = metadata(path)?.nlink();
    if links > 1 && !break_links {
        return Err(Error::invalid(format!(
            "{} has {links} names (hard links), and the others would keep the old file: remove them, or use --break-links",
            path.display()
        )));
    }
    Ok(())
}

fn metadata(path: &Path) -> Result<fs::Metadata> {
    fs::metadata(path).map_err(|e| Error::io(format!("examining {}", path.display()), e))
}

/// What the name of an unfinished file of this archive begins with.
fn prefix(path: &Path) -> Vec<u8> {
    let name = path.file_name().unwrap_or_default().as_bytes();
    [b".", &name[..name.len().min(NAME)], b".compact-"].concat()
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// Removes what a killed run left behind: files of that name which nobody holds.
pub(super) fn remove_leftovers(path: &Path) {
    let prefix = prefix(path);
    let Ok(entries) = fs::read_dir(parent(path)) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let random = name.as_bytes().strip_prefix(&prefix[..]);
        let ours = random.is_some_and(|r| r.len() == DIGITS && r.iter().all(u8::is_ascii_hexdigit));
        if ours
            && FileStorage::open(&entry.path(), LockMode::Exclusive).is_ok()
            && let Err(error) = fs::remove_file(entry.path())
        {
            tracing::warn!(%error, path = %entry.path().display(), "cannot remove what an earlier run left");
        }
    }
}

impl Beside {
    pub(super) fn new(path: &Path, environment: &dyn Environment) -> Result<Beside> {
        let mut random = [0; 8];
        environment.fill_random(&mut random)?;
        let mut name = prefix(path);
        name.extend_from_slice(format!("{:016x}", u64::from_le_bytes(random)).as_bytes());
        let path = parent(path).join(std::ffi::OsString::from_vec(name));
        let storage = Arc::new(FileStorage::create(&path)?);
        Ok(Beside { storage, path, finished: std::cell::Cell::new(false) })
    }

    pub(super) fn storage(&self) -> &FileStorage {
        &self.storage
    }

    pub(super) fn shared(&self) -> Arc<FileStorage> {
        self.storage.clone()
    }

    /// Owner, mode and extended attributes (access control lists among them) of the old file; then everything is synced.
    pub(super) fn take_after(&self, old: &Path) -> Result<()> {
        let cannot = |what: &str| {
            let context = format!("cannot give the new file the {what} of {}", old.display());
            move |e| Error::io(context, e)
        };
        let (from, own) = (metadata(old)?, metadata(&self.path)?);
        if (from.uid(), from.gid()) != (own.uid(), own.gid()) {
            std::os::unix::fs::chown(&self.path, Some(from.uid()), Some(from.gid())).map_err(cannot("owner"))?;
        }
        // Inherited from the directory: with the old mode they would let in whom the old file did not.
        let names = xattr_names(old)?;
        for name in xattr_names(&self.path)? {
            if name.starts_with(b"system.posix_acl_") && !names.contains(&name) {
                let list = cannot("access control list");
                rustix::fs::lremovexattr(&self.path, &name[..]).map_err(|errno| list(errno.into()))?;
            }
        }
        let mode = fs::Permissions::from_mode(from.mode() & 0o7777);
        fs::set_permissions(&self.path, mode).map_err(cannot("mode"))?;
        for name in names {
            let attribute = format!("attribute {}", display(&name));
            let value = xattr(old, &name).map_err(|e| cannot(&attribute)(e.into()))?;
            if xattr(&self.path, &name).is_ok_and(|own| own == value) {
                continue;
            }
            rustix::fs::lsetxattr(&self.path, &name[..], &value, XattrFlags::empty())
                .map_err(|e| cannot(&attribute)(e.into()))?;
        }
        let synced = File::open(&self.path).and_then(|file| file.sync_all());
        synced.map_err(|e| Error::io(format!("syncing {}", self.path.display()), e))
    }

    /// K4
    pub(super) fn replace(&self, old: &Path) -> Result<()> {
        fs::rename(&self.path, old).map_err(|e| Error::io(format!("cannot replace {}", old.display()), e))?;
        self.finished.set(true);
        // The new file has the name: an error now must not look as if nothing was done.
        if let Err(error) = self.storage.sync_directory() {
            tracing::warn!(%error, path = %old.display(), "the new file may lose its name to the old one when the power fails");
        }
        Ok(())
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.finished.get()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(%error, path = %self.path.display(), "cannot remove the unfinished file");
        }
    }
}

fn xattr_names(path: &Path) -> Result<Vec<Vec<u8>>> {
    // The kernel's limit of the list.
    let mut names = vec![0; 64 << 10];
    match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(length) => {
            Ok(names[..length].split(|&b| b == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect())
        }
        Err(Errno::NOTSUP) => Ok(Vec::new()),
        Err(errno) => Err(Error::io(format!("reading the attributes of {}", path.display()), errno.into())),
    }
}

fn xattr(path: &Path, name: &[u8]) -> std::result::Result<Vec<u8>, Errno> {
    let mut value = vec![0; 64 << 10];
    let length = rustix::fs::lgetxattr(path, name, &mut value[..])?;
    value.truncate(length);
    Ok(value)
}
