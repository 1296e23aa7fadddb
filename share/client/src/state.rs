//! Files in which a user's programs remember things: private, replaced whole, never half written.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

use crate::error::{Error, Result};

/// A file of this kind has some hundred bytes for each share.
const MAX_BYTES: u64 = 16 << 20;

/// Makes a directory, and those above it, for this user alone.
pub(crate) fn make_directory(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(Error::io(format!("cannot make the directory {}", path.display())))
}

/// Reads a file; None when there is none.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
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

/// Writes a file beside its place, makes it durable and renames it.
pub(crate) fn write(path: &Path, value: &impl Serialize) -> Result<()> {
    let failed = || Error::io(format!("cannot write {}", path.display()));
    let text = serde_json::to_vec_pretty(value).map_err(|error| Error::Invalid(error.to_string()))?;
    let text = Zeroizing::new(text);
    let beside = path.with_extension("new");
    let _ = fs::remove_file(&beside);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&beside).map_err(failed())?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed())?;
    fs::rename(&beside, path).map_err(failed())?;
    match path.parent() {
        Some(directory) => File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed()),
        None => Ok(()),
    }
}
