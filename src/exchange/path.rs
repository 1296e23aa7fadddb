//! Resolves paths within an archive.

use lockbox_terminal::display;

use crate::error::{Error, Result};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, FileSystem};

/// Returns the object at `path`, relative to the root. Empty components and `.` are skipped; `..`
/// and symbolic links are not followed.
///
/// # Errors
/// `NotFound`, `NotDirectory`, `Invalid` for a path with `..`.
pub fn resolve(fs: &FileSystem, path: &[u8]) -> Result<Attributes> {
    let mut at = fs.attributes(ROOT_INO)?;
    for name in components(path)? {
        if !at.is_directory() {
            return Err(Error::NotDirectory);
        }
        at = fs.lookup(at.ino, name)?;
    }
    Ok(at)
}

/// Resolves a path from the command line; a missing one is reported as `Invalid` with its name.
pub(super) fn resolve_argument(fs: &FileSystem, path: &[u8]) -> Result<Attributes> {
    resolve(fs, path).map_err(|error| match error {
        Error::NotFound | Error::NotDirectory => Error::invalid(format!("the archive has no {}", display(path))),
        error => error,
    })
}

/// Converts `NotFound` to `None`.
pub(super) fn none_if_missing<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Err(Error::NotFound) => Ok(None),
        found => found.map(Some),
    }
}

/// Returns the components of a path within the archive.
///
/// # Errors
/// `Invalid` for a path with `..`.
pub fn components(path: &[u8]) -> Result<Vec<&[u8]>> {
    let names: Vec<&[u8]> = path.split(|&b| b == b'/').filter(|name| !matches!(*name, b"" | b".")).collect();
    if names.contains(&&b".."[..]) {
        return Err(Error::invalid("a path within the archive must not contain '..'"));
    }
    Ok(names)
}

/// Returns the directory at `path`; creates missing directories with `make`.
pub(super) fn resolve_or_create(
    fs: &FileSystem,
    path: &[u8],
    mut make: impl FnMut(Ino, &[u8]) -> Result<Attributes>,
) -> Result<Ino> {
    let mut directory = ROOT_INO;
    for name in components(path)? {
        let found = none_if_missing(fs.lookup(directory, name))?.map_or_else(|| make(directory, name), Ok)?;
        if !found.is_directory() {
            return Err(Error::NotDirectory);
        }
        directory = found.ino;
    }
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_split_and_never_climbs() {
        assert_eq!(components(b"/a//./b/").unwrap(), [b"a", b"b"]);
        assert!(components(b"/").unwrap().is_empty());
        assert!(components(b"a/../b").is_err());
    }
}
