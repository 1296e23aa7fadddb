//! Partial file of a download: hidden and private in the target directory, renamed when it is
//! complete.
//!
//! A restart without resuming writes a second file and keeps the first until the second is
//! complete. If neither is completed, the next call keeps the longer one; it must hold the lock of
//! the file without `RESTARTED` in its name.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use lockbox_share_protocol::token;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, FallocateFlags, RenameFlags, fallocate, renameat2};
use nix::unistd::geteuid;
use sha2::{Digest as _, Sha256};

use crate::history::NOTE_RETENTION;
use crate::{Error, Result, meta};

/// Maximum number appended to a name before the user must choose another.
const MAX_NUMBER: u32 = 1000;

/// Around the note's name in the name of a file that is being received.
const PREFIX: &str = ".lockbox-";
const SUFFIX: &str = ".part";
/// Before the suffix, when there is an earlier one that is not gone on with.
const RESTARTED: &str = ".anew";
/// Characters of a note's name.
const NOTE_LEN: usize = 32;

#[derive(Clone, Debug)]
pub enum ReceiveTarget {
    /// A file of this name, which may be replaced or not.
    File { path: PathBuf, replace: bool },
    /// A file of the sender's name in this directory, with a number when the name is taken.
    Directory { path: PathBuf, replace: bool },
}

impl ReceiveTarget {
    pub(crate) fn directory(&self) -> PathBuf {
        let directory = match self {
            ReceiveTarget::File { path, .. } => path.parent().unwrap_or(Path::new("")),
            ReceiveTarget::Directory { path, .. } => path,
        };
        if directory.as_os_str().is_empty() { PathBuf::from(".") } else { directory.to_owned() }
    }
}

/// Gets the tar of a directory and the sender's name for it; returns the path of the directory.
pub type Unpack<'a> = dyn Fn(&mut File, &str) -> Result<PathBuf> + 'a;

/// A file without its name yet. It stays when it is dropped unfinished, to be gone on with.
pub(crate) struct PartialFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    previous: Option<Box<PartialFile>>,
}

impl PartialFile {
    /// Opens the partial file named by `note` in `directory`: the existing one with `resume`,
    /// otherwise an empty one next to it. Errors: when the directory cannot be written, when
    /// another program receives the same link there, or when the file belongs to another user: a
    /// user with write access to the directory could have created a file there, or a link to
    /// another file of this user, and would read or choose the received content.
    pub(crate) fn open(directory: &Path, note: &str, resume: bool) -> Result<PartialFile> {
        let path = |restarted| directory.join(format!("{PREFIX}{note}{restarted}{SUFFIX}"));
        let mut kept = PartialFile::open_locked(path(""), directory)?;
        let restarted = path(RESTARTED);
        if restarted.symlink_metadata().is_ok() {
            let left = PartialFile::open_locked(restarted.clone(), directory)?;
            if left.length()? > kept.length()? {
                let failed = Error::io(format!("cannot write in {}", directory.display()));
                fs::rename(&left.path, &kept.path).map_err(failed)?;
                kept.file = left.file;
            } else {
                left.discard();
            }
        }
        if resume || kept.length()? == 0 {
            return Ok(kept);
        }
        Ok(PartialFile { previous: Some(Box::new(kept)), ..PartialFile::open_locked(restarted, directory)? })
    }

    /// Opens or makes a file of this name, for this program alone.
    fn open_locked(path: PathBuf, directory: &Path) -> Result<PartialFile> {
        let mut options = File::options();
        options.read(true).write(true).create(true).mode(0o600).custom_flags(nix::libc::O_NOFOLLOW);
        let failed = || Error::io(format!("cannot write in {}", directory.display()));
        let file = options.open(&path).map_err(failed())?;
        let found = file.metadata().map_err(failed())?;
        let alone = found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0 && found.nlink() == 1;
        if !found.is_file() || !alone {
            return Err(Error::Invalid(format!("{} is not a file of this user alone: remove it", path.display())));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(locked_error()),
            Err(fs::TryLockError::Error(error)) => return Err(failed()(error)),
        }
        let partial = PartialFile { path, file, previous: None };
        // The program that held it until now may have given its name to another one, or removed it.
        verify_path(&partial.file, &partial.path).map_err(|_| locked_error())?;
        Ok(partial)
    }

    /// Returns path and length of the earlier file, which is kept until this one is complete.
    pub(crate) fn previous(&self) -> Option<(&Path, u64)> {
        let previous = self.previous.as_ref()?;
        Some((&previous.path, previous.length().ok()?))
    }

    /// Returns the SHA-256 of the earlier bytes if they are exactly `size`; does not seek.
    pub(crate) fn digest_if_complete(&self, size: u64) -> Option<token::Digest> {
        let file = self.previous.as_ref().map_or(&self.file, |previous| &previous.file);
        if file.metadata().ok()?.len() != size {
            return None;
        }
        let (mut hash, mut at) = (Sha256::new(), 0);
        let mut buffer = vec![0; 64 << 10];
        loop {
            match file.read_at(&mut buffer, at).ok()? {
                0 => return (at == size).then(|| token::Digest::new(hash.finalize().into())),
                count => {
                    hash.update(&buffer[..count]);
                    at += count as u64;
                }
            }
        }
    }

    /// Discards the restarted download and returns the earlier one.
    pub(crate) fn into_previous(mut self) -> PartialFile {
        match self.previous.take() {
            Some(previous) => {
                self.discard();
                *previous
            }
            None => self,
        }
    }

    pub(crate) fn truncate(&self, length: u64) -> Result<()> {
        self.file.set_len(length).map_err(Error::io("cannot write the download"))
    }

    pub(crate) fn length(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(Error::io("cannot read the partial download"))?.len())
    }

    /// Keeps the whole pieces of `piece` bytes that were received before, out of at most `size`
    /// bytes, and returns their length. The next byte to be read is the first.
    pub(crate) fn truncate_to_multiple(&mut self, piece: u64, size: u64) -> Result<u64> {
        let failed = || Error::io("cannot read the partial download");
        let length = self.length()?.min(size) / piece * piece;
        self.file.set_len(length).map_err(failed())?;
        self.file.seek(SeekFrom::Start(0)).map_err(failed())?;
        Ok(length)
    }

    /// Reads the first `length` bytes for their digest; the next byte to be written is behind them.
    pub(crate) fn hash_prefix(&mut self, length: u64) -> Result<Sha256> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 64 << 10];
        let mut input = (&mut self.file).take(length);
        loop {
            match input.read(&mut buffer).map_err(Error::io("cannot read the partial download"))? {
                0 => return Ok(hash),
                count => hash.update(&buffer[..count]),
            }
        }
    }

    /// Reserves space for `size` bytes, so that a full disk is reported before the download.
    #[expect(clippy::disallowed_methods, reason = "the place that repeats it")]
    pub(crate) fn reserve(&self, size: u64) -> Result<()> {
        let Ok(length) = i64::try_from(size) else { return Ok(()) };
        if length == 0 {
            return Ok(());
        }
        loop {
            match fallocate(&self.file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, length) {
                Err(Errno::EINTR) => {}
                // A host that cannot reserve tells by writing.
                Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => return Ok(()),
                Err(errno) => return Err(Error::io("no space left for the file")(errno.into())),
            }
        }
    }

    /// Makes the content durable and gives the file its name.
    pub(crate) fn finish(mut self, to: &ReceiveTarget, sent_name: &str) -> Result<ReceivedFile> {
        let failed = || Error::io("cannot write the download");
        self.file.flush().and_then(|()| self.file.sync_all()).map_err(failed())?;
        verify_path(&self.file, &self.path)?;
        let path = match to {
            ReceiveTarget::File { path, replace } => {
                self.rename(path, *replace)?;
                path.clone()
            }
            ReceiveTarget::Directory { path: directory, replace } => {
                self.rename_numbered(directory, &meta::safe_name(sent_name), *replace)?
            }
        };
        verify_path(&self.file, &path)?;
        File::open(to.directory()).and_then(|directory| directory.sync_all()).map_err(failed())?;
        if let Some(previous) = self.previous {
            previous.discard();
        }
        Ok(ReceivedFile { path, file: self.file })
    }

    fn rename_numbered(&self, directory: &Path, name: &str, replace: bool) -> Result<PathBuf> {
        let mut path = directory.join(name);
        for number in 2..MAX_NUMBER {
            match self.rename(&path, replace) {
                Err(Error::Exists(_)) => path = directory.join(meta::numbered_name(name, number)),
                other => return other.map(|()| path),
            }
        }
        Err(Error::Exists(path.display().to_string()))
    }

    fn rename(&self, to: &Path, replace: bool) -> Result<()> {
        let failed = |error: io::Error| Error::io(format!("cannot write {}", to.display()))(error);
        if replace {
            return fs::rename(&self.path, to).map_err(failed);
        }
        let exists = || Error::Exists(to.display().to_string());
        match renameat2(AT_FDCWD, &self.path, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
            Ok(()) => Ok(()),
            Err(Errno::EEXIST) => Err(exists()),
            // Some file systems do not know the flag; a link is never made over a file either.
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) => match fs::hard_link(&self.path, to) {
                Ok(()) => fs::remove_file(&self.path).map_err(failed),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(exists()),
                // Others have no links: looked at first, which leaves a moment's gap.
                Err(error) if has_no_links(&error) => match to.symlink_metadata() {
                    Ok(_) => Err(exists()),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => fs::rename(&self.path, to).map_err(failed),
                    Err(error) => Err(failed(error)),
                },
                Err(error) => Err(failed(error)),
            },
            Err(errno) => Err(failed(errno.into())),
        }
    }

    /// Removes this file, but not that of an earlier download.
    pub(crate) fn discard(self) {
        // Nothing is lost but space, and the failure that led here is the one to tell.
        let _ = fs::remove_file(&self.path);
    }

    /// Removes this file and that of an earlier download.
    pub(crate) fn discard_all(mut self) {
        if let Some(previous) = self.previous.take() {
            previous.discard();
        }
        self.discard();
    }
}

/// Returns whether a link was refused because the file system makes none.
fn has_no_links(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EPERM | Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::EINVAL | Errno::EMLINK))
}

/// A file that arrived whole and has its name.
pub(crate) struct ReceivedFile {
    pub(crate) path: PathBuf,
    file: File,
}

impl ReceivedFile {
    pub(crate) fn unpack(&mut self, unpack: &Unpack<'_>, sent_name: &str) -> Result<PathBuf> {
        self.file.seek(SeekFrom::Start(0)).map_err(Error::io("cannot read the download"))?;
        unpack(&mut self.file, sent_name)
    }

    /// Removes the file, unless another file replaced it.
    pub(crate) fn remove(self) {
        if verify_path(&self.file, &self.path).is_ok() {
            // What is left over is whole, and says what it is.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Checks that `path` names this file: a user with write access to the directory may have replaced
/// it, and a rename knows only names.
fn verify_path(file: &File, path: &Path) -> Result<()> {
    let failed = || Error::io("cannot write the download");
    let mine = file.metadata().map_err(failed())?;
    match path.symlink_metadata() {
        Ok(there) if (there.dev(), there.ino()) == (mine.dev(), mine.ino()) => Ok(()),
        Ok(_) => Err(Error::Damaged(format!("another process put another file at {}", path.display()))),
        Err(error) => Err(failed()(error)),
    }
}

fn locked_error() -> Error {
    Error::Invalid("another program is receiving this link in the same directory".into())
}

/// Removes empty and expired files of this user's earlier downloads in `directory`. Returns the
/// others, except files that another program is receiving and files of the note `own`.
pub(crate) fn sweep(directory: &Path, own: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut kept = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let note = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX));
        let note = note.map(|note| note.strip_suffix(RESTARTED).unwrap_or(note));
        let digits = |note: &str| note.len() == NOTE_LEN && note.bytes().all(|b| b.is_ascii_hexdigit());
        if !note.is_some_and(|note| digits(note) && note != own) {
            continue;
        }
        let path = directory.join(&name);
        let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
        let Ok(file) = File::options().read(true).write(true).custom_flags(flags).open(&path) else { continue };
        let Ok(metadata) = file.metadata() else { continue };
        let mine = metadata.is_file() && metadata.uid() == geteuid().as_raw();
        if !mine || file.try_lock().is_err() {
            continue;
        }
        let over = metadata.modified().is_ok_and(|at| at.elapsed().is_ok_and(|elapsed| elapsed > NOTE_RETENTION));
        if metadata.len() > 0 && !over {
            kept.push(path);
        } else {
            // Only the name: in a directory where others rename, they could remove what has it as
            // well.
            let _ = fs::remove_file(&path);
        }
    }
    kept.sort();
    kept
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use super::*;

    /// Notes may lie in another directory of the state than the one of this call: that there is
    /// none here proves nothing.
    #[test]
    fn what_nothing_can_be_added_to_is_swept_and_the_rest_told() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("in");
        fs::create_dir(&directory).unwrap();
        let part = |digit: &str| directory.join(format!("{PREFIX}{}{SUFFIX}", digit.repeat(NOTE_LEN)));
        let restarted = directory.join(format!("{PREFIX}{}{RESTARTED}{SUFFIX}", "a".repeat(NOTE_LEN)));
        for (path, content) in [
            (part("a"), "stopped"),
            (part("b"), "over"),
            (part("c"), ""),
            (part("d"), "received"),
            (restarted.clone(), "x"),
        ] {
            fs::write(path, content).unwrap();
        }
        let over = File::options().write(true).open(part("b")).unwrap();
        over.set_modified(std::time::SystemTime::now() - NOTE_RETENTION - Duration::from_secs(60)).unwrap();
        fs::write(directory.join(".lockbox-mine.part"), "not of this program").unwrap();
        fs::write(place.path().join("precious"), "linked").unwrap();
        std::os::unix::fs::symlink("../precious", part("e")).unwrap();
        let held = File::options().write(true).open(part("d")).unwrap();
        held.try_lock().unwrap();
        assert_eq!(sweep(&directory, &"a".repeat(NOTE_LEN)), [] as [PathBuf; 0]);
        assert_eq!(sweep(&directory, ""), [restarted, part("a")]);
        let names: Vec<bool> = ["a", "b", "c", "d"].map(|digit| part(digit).exists()).into();
        assert_eq!(names, [true, false, false, true]);
        assert_eq!(fs::read(place.path().join("precious")).unwrap(), b"linked");
        assert!(directory.join(".lockbox-mine.part").exists());
    }

    fn received(directory: &Path) -> PartialFile {
        let mut partial = PartialFile::open(directory, "n", false).unwrap();
        partial.file.write_all(b"new").unwrap();
        partial
    }

    #[test]
    fn nothing_is_replaced_unless_told() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a.txt");
        fs::write(&path, "old").unwrap();
        let exactly = |replace| ReceiveTarget::File { path: path.clone(), replace };
        assert!(matches!(received(place.path()).finish(&exactly(false), "x"), Err(Error::Exists(_))));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        let inside = ReceiveTarget::Directory { path: place.path().into(), replace: false };
        assert_eq!(received(place.path()).finish(&inside, "/x/a.txt").unwrap().path, place.path().join("a (2).txt"));
        assert_eq!(received(place.path()).finish(&inside, "a.txt").unwrap().path, place.path().join("a (3).txt"));
        received(place.path()).finish(&exactly(true), "x").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn a_symbolic_link_in_the_way_is_not_followed() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("precious"), "old").unwrap();
        std::os::unix::fs::symlink("precious", place.path().join(".lockbox-n.part")).unwrap();
        assert!(PartialFile::open(place.path(), "n", false).is_err());
        assert_eq!(fs::read(place.path().join("precious")).unwrap(), b"old");
    }

    #[test]
    fn a_file_that_somebody_made_before_is_not_written() {
        let place = tempfile::tempdir().unwrap();
        let part = place.path().join(".lockbox-n.part");
        let refused = |what: &str| {
            let told = PartialFile::open(place.path(), "n", true).map(drop).unwrap_err().to_string();
            assert!(told.contains("not a file of this user alone"), "{what}: {told}");
            fs::remove_file(&part).unwrap();
        };
        // Another name of a precious file, which would be cut to nothing.
        fs::write(place.path().join("precious"), "old").unwrap();
        fs::hard_link(place.path().join("precious"), &part).unwrap();
        refused("hard link");
        assert_eq!(fs::read(place.path().join("precious")).unwrap(), b"old");
        nix::unistd::mkfifo(&part, nix::sys::stat::Mode::S_IRWXU).unwrap();
        refused("pipe");
        if geteuid().is_root() {
            drop(received(place.path()));
            std::os::unix::fs::chown(&part, Some(65_534), None).unwrap();
            refused("another user's");
        }
        fs::write(&part, "readable").unwrap();
        fs::set_permissions(&part, fs::Permissions::from_mode(0o644)).unwrap();
        refused("others may read it");
    }

    #[test]
    fn a_file_that_was_put_in_its_place_does_not_get_the_name() {
        let place = tempfile::tempdir().unwrap();
        let partial = received(place.path());
        fs::rename(place.path().join(".lockbox-n.part"), place.path().join("away")).unwrap();
        fs::write(place.path().join(".lockbox-n.part"), "false").unwrap();
        fs::write(place.path().join("a.txt"), "old").unwrap();
        let target = ReceiveTarget::File { path: place.path().join("a.txt"), replace: true };
        let told = partial.finish(&target, "x").map(drop).unwrap_err();
        assert!(matches!(told, Error::Damaged(_)), "{told}");
        assert_eq!(fs::read(place.path().join("a.txt")).unwrap(), b"old");
    }

    #[test]
    fn one_program_receives_at_a_time() {
        let place = tempfile::tempdir().unwrap();
        let first = received(place.path());
        for resume in [true, false] {
            let told = PartialFile::open(place.path(), "n", resume).map(drop).unwrap_err().to_string();
            assert!(told.contains("another program"), "{told}");
        }
        drop(first);
        let mut again = PartialFile::open(place.path(), "n", true).unwrap();
        assert_eq!(again.truncate_to_multiple(2, 9).unwrap(), 2);
        again.discard();
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }
}
