//! The new file beside the old one: made, removed when it is not finished, given the old one's metadata and its name.
//!
//! Root may do this in a directory that belongs to somebody else, who can exchange what any name there means at any moment. So nothing is
//! done to what a path names: both files are open, owner, mode and attributes go from descriptor to descriptor, and names are looked up in the
//! directory that was opened once (`storage/host_entry.rs`).
//!
//! The last step is the only one that a name decides. A rename after comparing would still let what was put in the new file's place
//! between the two calls take the place of the archive, which would be lost. So the two names are exchanged, at one moment, which loses nothing
//! whatever they mean; then both are compared with the descriptors. Only when the archive's name is the new file's and the other one the old
//! file's is the old file's name removed; otherwise the exchange is taken back. What comes between that comparison and the removal can only make
//! the removal hit an entry that somebody else put there. Where the host cannot exchange, the names are compared, renamed, and compared again:
//! there whoever can write the directory can make the archive lose its name, as they can with rm(1).

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Gid, Mode, Stat, Uid, XattrFlags};
use rustix::io::Errno;

use lockbox_terminal::display;

use crate::env::Environment;
use crate::error::{Error, Refusal, Result};
use crate::storage::{FileStorage, HostEntry, LockMode, Storage, host_call};

/// Bytes of the old name in the new one: together with the rest at most 255.
const NAME: usize = 200;
/// Digits of the random part.
const DIGITS: usize = 16;

/// Says whether a name is that of a file.
type Look<'a> = &'a mut dyn FnMut(&HostEntry, &FileStorage) -> io::Result<bool>;

/// The archive under its name, locked.
pub(in crate::archive) struct Old {
    entry: HostEntry,
    storage: Arc<FileStorage>,
}

/// The old file that stayed beside the new one, and why.
#[derive(Debug)]
pub(in crate::archive) struct Left {
    path: PathBuf,
    error: io::Error,
}

impl Left {
    /// The old file is an older copy of the archive, which the next run removes; after a change of the volume key it is what the old keys open.
    ///
    /// # Errors
    /// After such a change, for which the archive was written anew.
    pub(in crate::archive) fn tell(self, old: &Old, rekeyed: bool) -> Result<()> {
        let Left { path, error } = self;
        if rekeyed {
            let (archive, path) = (old.shown(), path.display());
            return Err(Error::io(
                format!(
                    "{archive} has its new volume key, but the file as it was before, which the old keys open, is still there: remove {path}"
                ),
                error,
            ));
        }
        tracing::warn!(%error, path = %path.display(), "cannot remove the archive as it was before");
        Ok(())
    }
}

/// The unfinished file; removed when dropped before it has the old one's name.
pub(in crate::archive) struct Beside {
    storage: Arc<FileStorage>,
    entry: HostEntry,
    finished: std::cell::Cell<bool>,
}

impl Old {
    /// # Errors
    /// As [`FileStorage::open`].
    pub(in crate::archive) fn open(path: &Path) -> Result<Old> {
        let entry = HostEntry::of(path).map_err(|e| Error::io(format!("opening {}", path.display()), e))?;
        let storage = Arc::new(FileStorage::open_entry(&entry, LockMode::Exclusive)?);
        Ok(Old { entry, storage })
    }

    pub(in crate::archive) fn storage(&self) -> &Arc<FileStorage> {
        &self.storage
    }

    fn shown(&self) -> std::path::Display<'_> {
        self.entry.path().display()
    }

    /// Names that the file has.
    pub(in crate::archive) fn links(&self) -> Result<u64> {
        Ok(stat(&self.storage, &self.entry)?.st_nlink)
    }

    /// Another name would go on naming the old file, and the two would part unnoticed.
    pub(super) fn check_names(&self, break_links: bool) -> Result<()> {
        let links = self.links()?;
        if links > 1 && !break_links {
            return Err(Error::Refused(Refusal::Links { path: self.shown().to_string(), links }));
        }
        Ok(())
    }

    /// Length and bytes on the disk.
    pub(super) fn sizes(&self) -> Result<(u64, u64)> {
        sizes(&self.storage, &self.entry)
    }

    /// The name that the file has.
    pub(in crate::archive) fn entry(&self) -> &HostEntry {
        &self.entry
    }

    /// Somebody put another file in the place of one of ours, which must not be lost.
    fn taken(&self) -> Error {
        Error::InUse(format!("another file took the place of {} meanwhile; nothing was changed", self.shown()))
    }
}

/// What the name of an unfinished file begins with that is to become `entry`; `what` is made.
fn prefix(entry: &HostEntry, what: &str) -> Vec<u8> {
    let name = entry.name().as_bytes();
    [b".", &name[..name.len().min(NAME)], b".", what.as_bytes(), b"-"].concat()
}

/// Looks at what killed runs left behind: files of that name which nobody holds. Removes those that are `superseded`, and answers the names of the others,
/// fit to be shown.
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
        let left = match FileStorage::open_entry(&entry, LockMode::Exclusive) {
            Ok(left) => Arc::new(left),
            // Another run is about it.
            Err(Error::InUse(_)) => continue,
            Err(error) => {
                tracing::warn!(%error, name = shown, "cannot look at what an earlier run may have left");
                continue;
            }
        };
        match superseded(left.clone()) {
            Ok(true) => {
                if let Err(error) = entry.remove(&*left) {
                    tracing::warn!(%error, name = shown, "cannot remove what an earlier run left");
                }
            }
            Ok(false) | Err(_) => others.push(shown),
        }
    }
    others
}

impl Beside {
    /// Makes an empty file beside `entry`, with a name that says what is made for that.
    pub(in crate::archive) fn new(entry: &HostEntry, what: &str, environment: &dyn Environment) -> Result<Beside> {
        let mut random = [0; 8];
        environment.fill_random(&mut random)?;
        let mut name = prefix(entry, what);
        name.extend_from_slice(format!("{:016x}", u64::from_le_bytes(random)).as_bytes());
        let beside = entry.sibling(std::ffi::OsStr::from_bytes(&name).to_owned());
        let entry = beside.map_err(|e| Error::io(format!("writing beside {}", entry.path().display()), e))?;
        let storage = Arc::new(FileStorage::create(&entry)?);
        Ok(Beside { storage, entry, finished: std::cell::Cell::new(false) })
    }

    pub(super) fn storage(&self) -> &FileStorage {
        &self.storage
    }

    pub(in crate::archive) fn shared(&self) -> Arc<FileStorage> {
        self.storage.clone()
    }

    pub(super) fn sizes(&self) -> Result<(u64, u64)> {
        sizes(&self.storage, &self.entry)
    }

    /// Owner, mode and extended attributes (access control lists among them) of the old file; then everything is synced.
    pub(in crate::archive) fn take_after(&self, old: &Old) -> Result<()> {
        let new = &*self.storage;
        let cannot = |what: &str| {
            let context = format!("cannot give the new file the {what} of {}", old.shown());
            move |errno: Errno| Error::io(context, errno.into())
        };
        let (from, own) = (stat(&old.storage, &old.entry)?, stat(new, &self.entry)?);
        if (from.st_uid, from.st_gid) != (own.st_uid, own.st_gid) {
            let (uid, gid) = (Uid::from_raw(from.st_uid), Gid::from_raw(from.st_gid));
            rustix::fs::fchown(new, Some(uid), Some(gid)).map_err(cannot("owner"))?;
        }
        // Inherited from the directory: with the old mode they would let in whom the old file did not.
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

    /// Takes the name away: the file is gone once nobody has it open, whoever is killed meanwhile.
    ///
    /// # Errors
    /// Those of the host.
    pub(in crate::archive) fn without_name(self) -> Result<Arc<FileStorage>> {
        let removed = self.entry.remove(&*self.storage);
        removed.map_err(|e| Error::io(format!("cannot work in {}", self.entry.path().display()), e))?;
        self.finished.set(true);
        Ok(self.storage.clone())
    }

    /// Gives the file a name that nothing has, durably.
    ///
    /// # Errors
    /// `InUse` when something has it by now.
    pub(in crate::archive) fn publish(&self, name: &HostEntry) -> Result<()> {
        let shown = name.path().display();
        self.entry.rename_new(name).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => {
                Error::InUse(format!("another file took the name {shown} meanwhile; it was left"))
            }
            _ => Error::io(format!("cannot give the new file the name {shown}"), e),
        })?;
        self.finished.set(true);
        name.sync_directory().map_err(|e| Error::io(format!("syncing the directory of {shown}"), e))
    }

    /// COMPACT-4. Returns the old file when it could not be removed.
    ///
    /// # Errors
    /// `InUse` when one of the names is another file's: then each name means what it meant before. When the names were exchanged and cannot be
    /// looked at, that is what the error says.
    pub(in crate::archive) fn replace(&self, old: &Old) -> Result<Option<Left>> {
        self.replace_looking(old, &mut |entry, file| entry.refers_to(file))
    }

    /// `is` says whether a name is that of a file.
    fn replace_looking(&self, old: &Old, is: Look<'_>) -> Result<Option<Left>> {
        let failed = |e| Error::io(format!("cannot replace {}", old.shown()), e);
        let (old_file, new_file) = (&*old.storage, &*self.storage);
        if !(is(&old.entry, old_file).map_err(failed)? && is(&self.entry, new_file).map_err(failed)?) {
            return Err(old.taken());
        }
        let mut left = None;
        match self.entry.exchange(&old.entry) {
            Ok(()) => match is(&old.entry, new_file).and_then(|new| Ok(new && is(&self.entry, old_file)?)) {
                Ok(true) => {
                    // The new name is durable before the old file goes.
                    let removed = self.entry.sync_directory().and_then(|()| is(&self.entry, old_file));
                    let removed =
                        removed.and_then(|ours| if ours { self.entry.remove(old_file).map(drop) } else { Ok(()) });
                    left = removed.err().map(|error| Left { path: self.entry.path().to_owned(), error });
                }
                Ok(false) => {
                    self.entry.exchange(&old.entry).map_err(|e| self.exchanged(old, e))?;
                    return Err(old.taken());
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
                    return Err(Error::InUse(format!("another file took the place of {}", old.shown())));
                }
            }
            Err(error) => return Err(failed(error)),
        }
        self.finished.set(true);
        // The new file has the name: an error now must not look as if nothing was done.
        if let Err(error) = self.entry.sync_directory() {
            tracing::warn!(%error, path = %old.shown(), "the new file may lose its name to the old one when the power fails");
        }
        Ok(left)
    }

    /// What was done, when nobody can tell any more whether it is as it should be.
    fn exchanged(&self, old: &Old, error: io::Error) -> Error {
        let (archive, beside) = (old.shown(), self.entry.path().display());
        Error::io(
            format!(
                "{archive} was replaced by the new file, but whether it still is cannot be told; the file as it was before may be {beside}"
            ),
            error,
        )
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.finished.get()
            && let Err(error) = self.entry.remove(&*self.storage)
            // The medium itself fails, which whoever writes there is told; the next run removes what is left.
            && !matches!(Errno::from_io_error(&error), Some(Errno::IO | Errno::ROFS))
        {
            tracing::warn!(%error, path = %self.entry.path().display(), "cannot remove the unfinished file");
        }
    }
}

fn stat(file: &FileStorage, entry: &HostEntry) -> Result<Stat> {
    rustix::fs::fstat(file).map_err(|e| Error::io(format!("examining {}", entry.path().display()), e.into()))
}

fn sizes(file: &FileStorage, entry: &HostEntry) -> Result<(u64, u64)> {
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
    use crate::env::SystemEnvironment;

    struct Place {
        directory: tempfile::TempDir,
        old: Old,
    }

    impl Place {
        fn new() -> Place {
            let directory = tempfile::tempdir().unwrap();
            fs::write(directory.path().join("a.lbx"), "old").unwrap();
            let old = Old::open(&directory.path().join("a.lbx")).unwrap();
            Place { directory, old }
        }

        fn beside(&self) -> Beside {
            let beside = Beside::new(self.old.entry(), "compact", &SystemEnvironment).unwrap();
            beside.storage().write_at(0, b"new").unwrap();
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
            let left = match swapped {
                "new" => pairs(&[(".a.lbx.", "somebody's"), ("a.lbx", "old"), ("away", "new")]),
                _ => pairs(&[("a.lbx", "somebody's"), ("away", "old")]),
            };
            assert_eq!(place.content(), left, "{swapped}");
        }
    }

    /// How it ends when the host answers no look from this one on, and what lies there then.
    fn failing_from(look: u32) -> (Result<Option<Left>>, Place) {
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
        let left = replaced.unwrap().unwrap();
        let told = left.tell(&place.old, true).unwrap_err().to_string();
        assert!(
            told.contains("which the old keys open, is still there: remove ") && told.contains(".compact-"),
            "{told}"
        );
        let left = failing_from(5).0.unwrap().unwrap();
        left.tell(&place.old, false).unwrap();
    }
}
