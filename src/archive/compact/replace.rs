//! Replacement of a file by a new one: creation, cleanup, transfer of metadata, and exchange of the
//! names.
//!
//! Root may do this in a directory of another user, and this user can change the object behind any
//! name at any time. Nothing is therefore done to the object that a path denotes: both files are
//! open; owner, mode and attributes are transferred between descriptors; and names are looked up in
//! the directory that was opened once (`storage/host_entry.rs`).
//!
//! Only the last step depends on names. A rename after a comparison would let an object put in the
//! new file's place between the two calls replace the archive, which would be lost. The two names
//! are therefore exchanged atomically, which loses nothing in any case; then both are compared with
//! the descriptors. The old file's name is removed only if the archive's name denotes the new file
//! and the other name the old one; otherwise the exchange is undone. A change between that
//! comparison and the removal can only remove an entry that another process put there. If the host
//! does not support the exchange, the names are compared, renamed, and compared again; then a user
//! with write access to the directory can make the archive lose its name, as with rm(1).

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Gid, Mode, Stat, Uid, XattrFlags};
use rustix::io::Errno;

use lockbox_terminal::display;

use crate::env::{Environment, SystemEnvironment};
use crate::error::{Error, Refusal, Result};
use crate::storage::{FileStorage, HostEntry, LockMode, Storage, host_call};

/// Bytes of the old name in the new one: together with the rest at most 255.
const NAME: usize = 200;
/// Digits of the random part.
const DIGITS: usize = 16;

type NameCheck<'a> = &'a mut dyn FnMut(&HostEntry, &FileStorage) -> io::Result<bool>;

/// Archive file under its name, locked.
pub(in crate::archive) struct OldArchive {
    pub(in crate::archive) entry: HostEntry,
    pub(in crate::archive) storage: Arc<FileStorage>,
}

/// Old file that could not be removed after the replacement, with the reason.
#[derive(Debug)]
pub(in crate::archive) struct RetainedOldFile {
    path: PathBuf,
    error: io::Error,
}

impl RetainedOldFile {
    /// Logs a warning: the old file is an older copy of the archive, which the next run removes.
    /// After a change of the volume key it can still be opened with the old keys. Errors: after
    /// such a change, because removing the access of the old keys was the purpose of the rewrite.
    pub(in crate::archive) fn report(self, old: &OldArchive, rekeyed: bool) -> Result<()> {
        let RetainedOldFile { path, error } = self;
        if rekeyed {
            let (archive, path) = (old.shown(), path.display());
            return Err(Error::io(
                format!(
                    "{archive} has its new volume key, but the previous file still exists and the old keys open it: remove {path}"
                ),
                error,
            ));
        }
        tracing::warn!(%error, path = %path.display(), "cannot remove the previous file of the archive");
        Ok(())
    }
}

/// Unfinished file, removed on drop until it has the old file's name.
pub(in crate::archive) struct UnfinishedFile {
    pub(in crate::archive) storage: Arc<FileStorage>,
    pub(super) entry: HostEntry,
    finished: std::cell::Cell<bool>,
}

impl OldArchive {
    /// Opens and locks the file. Errors: as [`FileStorage::open`].
    pub(in crate::archive) fn open(path: &Path) -> Result<OldArchive> {
        let entry = HostEntry::of(path).map_err(|e| Error::io(format!("opening {}", path.display()), e))?;
        let storage = Arc::new(FileStorage::open_entry(&entry, LockMode::Exclusive)?);
        Ok(OldArchive { entry, storage })
    }

    fn shown(&self) -> std::path::Display<'_> {
        self.entry.path().display()
    }

    pub(in crate::archive) fn links(&self) -> Result<u64> {
        Ok(stat(&self.storage, &self.entry)?.st_nlink)
    }

    /// Refuses several hard links: the others would keep the old file, and the copies would diverge
    /// unnoticed.
    pub(super) fn check_names(&self, break_links: bool) -> Result<()> {
        let links = self.links()?;
        if links > 1 && !break_links {
            return Err(Error::Refused(Refusal::Links { path: self.shown().to_string(), links }));
        }
        Ok(())
    }

    /// Returns the error for a foreign file under one of our names, which must not be lost.
    fn name_taken_error(&self) -> Error {
        Error::InUse(format!("another file replaced {} meanwhile; nothing was changed", self.shown()))
    }
}

/// Returns the prefix of an unfinished file's name for `entry`; the second argument is its purpose.
fn prefix(entry: &HostEntry, what: &str) -> Vec<u8> {
    let name = entry.name().as_bytes();
    [b".", &name[..name.len().min(NAME)], b".", what.as_bytes(), b"-"].concat()
}

/// Examines unlocked files of killed runs with that prefix. Removes `superseded` ones; returns the
/// printable names of the others.
pub(in crate::archive) fn remove_leftovers(
    entry: &HostEntry,
    what: &str,
    superseded: &mut dyn FnMut(Arc<FileStorage>) -> Result<bool>,
) -> Vec<String> {
    let prefix = prefix(entry, what);
    let mut others = Vec::new();
    for name in entry.names().unwrap_or_default() {
        let random = name.as_bytes().strip_prefix(&prefix[..]);
        let ours = random.is_some_and(|r| r.len() == DIGITS && r.iter().all(u8::is_ascii_hexdigit));
        if !ours {
            continue;
        }
        let shown = display(name.as_bytes());
        let Ok(entry) = entry.sibling(name) else { continue };
        let retained = match FileStorage::open_entry(&entry, LockMode::Exclusive) {
            Ok(retained) => Arc::new(retained),
            // In use by another run.
            Err(Error::InUse(_)) => continue,
            Err(error) => {
                tracing::warn!(%error, name = shown, "cannot inspect a leftover of an earlier run");
                continue;
            }
        };
        match superseded(retained.clone()) {
            Ok(true) => {
                if let Err(error) = entry.remove(&*retained) {
                    tracing::warn!(%error, name = shown, "cannot remove a leftover of an earlier run");
                }
            }
            Ok(false) | Err(_) => others.push(shown),
        }
    }
    others
}

impl UnfinishedFile {
    /// Creates an empty file in the directory of `entry`, with its purpose in its name.
    pub(in crate::archive) fn new(entry: &HostEntry, what: &str) -> Result<UnfinishedFile> {
        let mut random = [0; 8];
        SystemEnvironment.fill_random(&mut random)?;
        let mut name = prefix(entry, what);
        name.extend_from_slice(format!("{:016x}", u64::from_le_bytes(random)).as_bytes());
        let beside = entry.sibling(std::ffi::OsStr::from_bytes(&name).to_owned());
        let entry = beside.map_err(|e| Error::io(format!("writing beside {}", entry.path().display()), e))?;
        let storage = Arc::new(FileStorage::create(&entry)?);
        Ok(UnfinishedFile { storage, entry, finished: std::cell::Cell::new(false) })
    }

    /// Copies owner, mode and extended attributes (including access control lists) of the old file;
    /// then syncs everything.
    pub(in crate::archive) fn copy_metadata(&self, old: &OldArchive) -> Result<()> {
        let new = &*self.storage;
        let cannot = |property: &str| {
            let context = format!("cannot copy the {property} of {} to the new file", old.shown());
            move |errno: Errno| Error::io(context, errno.into())
        };
        let (from, own) = (stat(&old.storage, &old.entry)?, stat(new, &self.entry)?);
        if (from.st_uid, from.st_gid) != (own.st_uid, own.st_gid) {
            let (uid, gid) = (Uid::from_raw(from.st_uid), Gid::from_raw(from.st_gid));
            rustix::fs::fchown(new, Some(uid), Some(gid)).map_err(cannot("owner"))?;
        }
        // Inherited from the directory: together with the old mode they could grant access that the
        // old file did not.
        let names = xattr_names(&old.storage, &old.entry)?;
        for name in xattr_names(new, &self.entry)? {
            if name.starts_with(b"system.posix_acl_") && !names.contains(&name) {
                rustix::fs::fremovexattr(new, &name[..]).map_err(cannot("access control list"))?;
            }
        }
        rustix::fs::fchmod(new, Mode::from_raw_mode(from.st_mode & 0o7777)).map_err(cannot("mode"))?;
        for name in names {
            let attribute = format!("attribute {}", display(&name));
            let value = xattr(&old.storage, &name).map_err(cannot(&attribute))?;
            if xattr(new, &name).is_ok_and(|own| own == value) {
                continue;
            }
            rustix::fs::fsetxattr(new, &name[..], &value, XattrFlags::empty()).map_err(cannot(&attribute))?;
        }
        host_call::sync(new).map_err(|e| Error::io(format!("syncing {}", self.entry.path().display()), e.into()))
    }

    /// Unlinks the file, so that it is deleted when it is closed, even if the process is killed.
    /// Errors: failures of the host.
    pub(in crate::archive) fn without_name(self) -> Result<Arc<FileStorage>> {
        let removed = self.entry.remove(&*self.storage);
        removed.map_err(|e| Error::io(format!("cannot work in {}", self.entry.path().display()), e))?;
        self.finished.set(true);
        Ok(self.storage.clone())
    }

    /// Renames the file to an unused name, durably. Errors: `InUse` when the name is used by now.
    pub(in crate::archive) fn publish(&self, name: &HostEntry) -> Result<()> {
        let shown = name.path().display();
        self.entry.rename_new(name).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => {
                Error::InUse(format!("another process created {shown} meanwhile; it was left unchanged"))
            }
            _ => Error::io(format!("cannot rename the new file to {shown}"), e),
        })?;
        self.finished.set(true);
        name.sync_directory().map_err(|e| Error::io(format!("syncing the directory of {shown}"), e))
    }

    /// Replaces the old file (COMPACT-4). Returns the old file if it could not be removed. Errors:
    /// `InUse` when one of the names denotes another file: then each name denotes its previous
    /// file. If the names were exchanged and cannot be examined, the error describes that.
    pub(in crate::archive) fn replace(&self, old: &OldArchive) -> Result<Option<RetainedOldFile>> {
        self.replace_looking(old, &mut |entry, file| entry.refers_to(file))
    }

    /// [`Self::replace`] with a callback that returns whether a name denotes a file.
    fn replace_looking(&self, old: &OldArchive, is: NameCheck<'_>) -> Result<Option<RetainedOldFile>> {
        let failed = |e| Error::io(format!("cannot replace {}", old.shown()), e);
        let (old_file, new_file) = (&*old.storage, &*self.storage);
        if !(is(&old.entry, old_file).map_err(failed)? && is(&self.entry, new_file).map_err(failed)?) {
            return Err(old.name_taken_error());
        }
        let mut retained = None;
        match self.entry.exchange(&old.entry) {
            Ok(()) => match is(&old.entry, new_file).and_then(|new| Ok(new && is(&self.entry, old_file)?)) {
                Ok(true) => {
                    // The new name must be durable before the old file is removed.
                    let removed = self.entry.sync_directory().and_then(|()| is(&self.entry, old_file));
                    let removed =
                        removed.and_then(|ours| if ours { self.entry.remove(old_file).map(drop) } else { Ok(()) });
                    retained = removed.err().map(|error| RetainedOldFile { path: self.entry.path().to_owned(), error });
                }
                Ok(false) => {
                    self.entry.exchange(&old.entry).map_err(|e| self.exchanged(old, e))?;
                    return Err(old.name_taken_error());
                }
                Err(error) => {
                    self.finished.set(true);
                    return Err(self.exchanged(old, error));
                }
            },
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                self.entry.rename(&old.entry).map_err(failed)?;
                self.finished.set(true);
                if !is(&old.entry, new_file).map_err(|e| self.exchanged(old, e))? {
                    return Err(Error::InUse(format!("another file replaced {}", old.shown())));
                }
            }
            Err(error) => return Err(failed(error)),
        }
        self.finished.set(true);
        // The new file has the name: an error must not look as if nothing was done.
        if let Err(error) = self.entry.sync_directory() {
            tracing::warn!(%error, path = %old.shown(), "the new file may lose its name to the old one when the power fails");
        }
        Ok(retained)
    }

    fn exchanged(&self, old: &OldArchive, error: io::Error) -> Error {
        let (archive, previous) = (old.shown(), self.entry.path().display());
        Error::io(
            format!(
                "{archive} was replaced by the new file, but the replacement cannot be verified; the previous file may be {previous}"
            ),
            error,
        )
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        if !self.finished.get()
            && let Err(error) = self.entry.remove(&*self.storage)
            // On a failure of the medium itself, later writes report it; the next run removes the
            // leftover.
            && !matches!(Errno::from_io_error(&error), Some(Errno::IO | Errno::ROFS))
        {
            tracing::warn!(%error, path = %self.entry.path().display(), "cannot remove the unfinished file");
        }
    }
}

fn stat(file: &FileStorage, entry: &HostEntry) -> Result<Stat> {
    rustix::fs::fstat(file).map_err(|e| Error::io(format!("examining {}", entry.path().display()), e.into()))
}

/// Returns length and disk usage in bytes.
pub(super) fn sizes(file: &FileStorage, entry: &HostEntry) -> Result<(u64, u64)> {
    Ok((file.len()?, stat(file, entry)?.st_blocks.cast_unsigned() * 512))
}

fn xattr_names(file: &FileStorage, entry: &HostEntry) -> Result<Vec<Vec<u8>>> {
    // The kernel's limit of the list.
    let mut names = vec![0; 64 << 10];
    match rustix::fs::flistxattr(file, &mut names[..]) {
        Ok(length) => {
            Ok(names[..length].split(|&b| b == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect())
        }
        Err(Errno::NOTSUP) => Ok(Vec::new()),
        Err(errno) => Err(Error::io(format!("reading the attributes of {}", entry.path().display()), errno.into())),
    }
}

fn xattr(file: &FileStorage, name: &[u8]) -> std::result::Result<Vec<u8>, Errno> {
    let mut value = vec![0; 64 << 10];
    let length = rustix::fs::fgetxattr(file, name, &mut value[..])?;
    value.truncate(length);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Place {
        directory: tempfile::TempDir,
        old: OldArchive,
    }

    impl Place {
        fn new() -> Place {
            let directory = tempfile::tempdir().unwrap();
            fs::write(directory.path().join("a.lbx"), "old").unwrap();
            let old = OldArchive::open(&directory.path().join("a.lbx")).unwrap();
            Place { directory, old }
        }

        fn beside(&self) -> UnfinishedFile {
            let beside = UnfinishedFile::new(&self.old.entry, "compact").unwrap();
            beside.storage.write_at(0, b"new").unwrap();
            beside
        }

        /// Names and contents, without the random part of a name.
        fn content(&self) -> Vec<(String, String)> {
            let read = |entry: fs::DirEntry| {
                let name = entry.file_name().into_string().unwrap();
                (name.split("compact-").next().unwrap().to_owned(), fs::read_to_string(entry.path()).unwrap())
            };
            let mut content: Vec<_> = fs::read_dir(self.directory.path()).unwrap().map(|e| read(e.unwrap())).collect();
            content.sort();
            content
        }
    }

    fn pairs(content: &[(&str, &str)]) -> Vec<(String, String)> {
        content.iter().map(|&(name, text)| (name.to_owned(), text.to_owned())).collect()
    }

    #[test]
    fn the_new_file_takes_the_name_and_nothing_else_stays() {
        let place = Place::new();
        place.beside().replace(&place.old).unwrap();
        assert_eq!(place.content(), pairs(&[("a.lbx", "new")]));
    }

    #[test]
    fn what_is_put_in_place_of_either_file_at_the_last_moment_replaces_nothing_and_is_not_removed() {
        for swapped in ["new", "old"] {
            let place = Place::new();
            let beside = place.beside();
            let mut looks = 0;
            let replaced = beside.replace_looking(&place.old, &mut |entry, file| {
                let found = entry.refers_to(file);
                looks += 1;
                if looks == 2 {
                    let entry = if swapped == "new" { &beside.entry } else { &place.old.entry };
                    fs::rename(entry.path(), place.directory.path().join("away")).unwrap();
                    fs::write(entry.path(), "somebody's").unwrap();
                }
                found
            });
            assert!(matches!(replaced, Err(Error::InUse(_))), "{swapped}: {replaced:?}");
            drop(beside);
            let retained = match swapped {
                "new" => pairs(&[(".a.lbx.", "somebody's"), ("a.lbx", "old"), ("away", "new")]),
                _ => pairs(&[("a.lbx", "somebody's"), ("away", "old")]),
            };
            assert_eq!(place.content(), retained, "{swapped}");
        }
    }

    /// How it ends when the host answers no look from this one on, and what lies there then.
    fn failing_from(look: u32) -> (Result<Option<RetainedOldFile>>, Place) {
        let place = Place::new();
        let mut looks = 0;
        let replaced = place.beside().replace_looking(&place.old, &mut |entry, file| {
            looks += 1;
            if looks >= look { Err(io::Error::other("no answer")) } else { entry.refers_to(file) }
        });
        (replaced, place)
    }

    #[test]
    fn an_error_says_what_was_done() {
        for look in 1..=2 {
            let (replaced, place) = failing_from(look);
            assert!(replaced.unwrap_err().to_string().starts_with("cannot replace"));
            assert_eq!(place.content(), pairs(&[("a.lbx", "old")]), "look {look}");
        }
        for look in 3..=4 {
            let (replaced, place) = failing_from(look);
            let told = replaced.unwrap_err().to_string();
            assert!(told.contains("was replaced by the new file") && told.contains(".a.lbx.compact-"), "{told}");
            assert_eq!(place.content(), pairs(&[(".a.lbx.", "old"), ("a.lbx", "new")]), "look {look}");
        }
    }

    #[test]
    fn an_old_file_that_stays_is_a_failure_where_the_old_keys_open_it() {
        let (replaced, place) = failing_from(5);
        assert_eq!(place.content(), pairs(&[(".a.lbx.", "old"), ("a.lbx", "new")]));
        let retained = replaced.unwrap().unwrap();
        let told = retained.report(&place.old, true).unwrap_err().to_string();
        assert!(
            told.contains("still exists and the old keys open it: remove ") && told.contains(".compact-"),
            "{told}"
        );
        let retained = failing_from(5).0.unwrap().unwrap();
        retained.report(&place.old, false).unwrap();
    }
}
