//! Finds objects of an archive by path, and shows names that may hold any byte.

use lockbox_terminal::display;

use crate::error::{Error, Result};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, FileSystem};

/// The object at `path`, taken from the root. Empty parts and `.` are skipped; `..` and symbolic links are not followed.
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

/// The object at a path that somebody gave, who is told when there is none.
pub(super) fn resolve_given(fs: &FileSystem, path: &[u8]) -> Result<Attributes> {
    resolve(fs, path).map_err(|error| match error {
        Error::NotFound | Error::NotDirectory => Error::invalid(format!("the archive has no {}", display(path))),
        error => error,
    })
}

/// None for what is not there.
pub(super) fn if_there<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Err(Error::NotFound) => Ok(None),
        found => found.map(Some),
    }
}

/// The names of a path within the archive.
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

/// The directory at `path`; what is missing of it is made with `make`.
pub(super) fn resolve_or_make(
    fs: &FileSystem,
    path: &[u8],
    mut make: impl FnMut(Ino, &[u8]) -> Result<Attributes>,
) -> Result<Ino> {
    let mut directory = ROOT_INO;
    for name in components(path)? {
        let found = if_there(fs.lookup(directory, name))?.map_or_else(|| make(directory, name), Ok)?;
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
