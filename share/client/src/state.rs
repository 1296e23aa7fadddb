//! Files in which a user's programs remember things: private, replaced whole, never half written.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

use crate::error::{Error, Result};

/// A file of this kind has some hundred bytes for each share.
const MAX_BYTES: u64 = 16 << 20;
/// Time for which the note of a claimed link is kept. Shares live for a week at most, unless the
/// server allows more.
pub(crate) const NOTE_RETENTION: Duration = Duration::from_secs(30 * 86_400);

/// Makes a directory, and those above it, for this user alone.
pub(crate) fn create_private_directory(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(Error::io(format!("cannot make the directory {}", path.display())))
}

/// Removes files that were not modified for `age`; a failed removal is retried by the next call.
pub(crate) fn sweep(directory: &Path, age: Duration) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let modified = entry.metadata().and_then(|metadata| metadata.modified());
        if modified.is_ok_and(|modified| modified.elapsed().is_ok_and(|elapsed| elapsed > age)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Reads a file; None when there is none.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let shown = path.display();
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(format!("cannot open {shown}"))(error)),
    };
    let mut text = Zeroizing::new(Vec::with_capacity(64 << 10));
    file.take(MAX_BYTES).read_to_end(&mut text).map_err(Error::io(format!("cannot read {shown}")))?;
    // The parser's message may repeat what it read, and that is secret.
    let value = serde_json::from_slice(&text);
    value.map(Some).map_err(|_| Error::Invalid(format!("{shown} is damaged; move it away to begin anew")))
}

/// Replaces a file atomically: writes a temporary file, syncs it and renames it.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let failed = || Error::io(format!("cannot write {}", path.display()));
    let text = serde_json::to_vec_pretty(value).map_err(|error| Error::Invalid(error.to_string()))?;
    let text = Zeroizing::new(text);
    let temporary = path.with_extension("new");
    let _ = fs::remove_file(&temporary);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&temporary).map_err(failed())?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed())?;
    fs::rename(&temporary, path).map_err(failed())?;
    match path.parent() {
        Some(directory) => File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn only_old_files_are_swept() {
        let place = tempfile::tempdir().unwrap();
        let day = Duration::from_secs(86_400);
        for (name, days) in [("old", 9), ("new", 7)] {
            write_json(&place.path().join(name), &1).unwrap();
            let file = File::options().write(true).open(place.path().join(name)).unwrap();
            file.set_modified(SystemTime::now() - day * days).unwrap();
        }
        sweep(place.path(), day * 8);
        assert_eq!(read_json::<u8>(&place.path().join("old")).unwrap(), None);
        assert_eq!(read_json::<u8>(&place.path().join("new")).unwrap(), Some(1));
    }
}
