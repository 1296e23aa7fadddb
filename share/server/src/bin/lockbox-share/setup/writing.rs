//! Compares a planned file with the one on disk, and writes it atomically.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::asking::Prompter;
use super::files::SetupFile;

/// Relation of a planned file to the one on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileStatus {
    New,
    /// It is there as it would be written.
    Same,
    /// Another one is there.
    Differs,
}

/// The directory that stands for the root.
pub(super) struct TargetRoot<'a> {
    root: &'a Path,
}

impl<'a> TargetRoot<'a> {
    pub(super) fn new(root: &'a Path) -> TargetRoot<'a> {
        TargetRoot { root }
    }

    fn path(&self, file: &SetupFile) -> PathBuf {
        self.root.join(&file.path)
    }

    /// Shows the planned file and its status.
    ///
    /// # Errors
    /// When the existing file cannot be read, or is not a regular file.
    pub(super) fn show(&mut self, file: &SetupFile, person: &mut dyn Prompter) -> Result<FileStatus, String> {
        let path = self.path(file);
        let outcome = match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => FileStatus::New,
            Err(error) => return Err(format!("cannot look at {}: {error}", path.display())),
            Ok(there) if !there.is_file() => {
                return Err(format!("{} is there and no file: it is left as it is", path.display()));
            }
            Ok(_) => match fs::read(&path) {
                Ok(bytes) if bytes == file.text.as_bytes() => FileStatus::Same,
                Ok(_) => FileStatus::Differs,
                Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
            },
        };
        let how = match outcome {
            FileStatus::New => "new",
            FileStatus::Same => "there already, as it should be",
            FileStatus::Differs => "another one is there",
        };
        person.print(&format!("--- {} ({how})", path.display()));
        if outcome != FileStatus::Same {
            person.print(file.text.trim_end());
        }
        Ok(outcome)
    }

    /// Replaces the file atomically.
    ///
    /// # Errors
    /// When the host fails; the existing file is unchanged then.
    pub(super) fn write(&mut self, file: &SetupFile) -> Result<(), String> {
        let path = self.path(file);
        let failed = |error: io::Error| format!("cannot write {}: {error}", path.display());
        let directory = path.parent().unwrap_or(self.root);
        fs::create_dir_all(directory).map_err(failed)?;
        // A name that neither nginx nor systemd reads; left by an interruption, the next call takes
        // it over.
        let partial = directory.join(".lockbox-share-setup.new");
        match fs::remove_file(&partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let mut options = fs::File::options();
        let opened = options.write(true).create_new(true).mode(0o644).open(&partial).map_err(failed)?;
        // Whatever the umask is: proxies read it as users of their own.
        opened.set_permissions(fs::Permissions::from_mode(0o644)).map_err(failed)?;
        let written = (&opened).write_all(file.text.as_bytes()).and_then(|()| opened.sync_all());
        let placed = written.and_then(|()| fs::rename(&partial, &path));
        placed.inspect_err(|_| drop(fs::remove_file(&partial))).map_err(failed)?;
        fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)
    }
}
