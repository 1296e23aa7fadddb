//! Environment variables stored in an archive: the directory `/.lockbox/env`, with one file per
//! variable, named after it.
use lockbox::Error;
use lockbox::archive::Archive;
use lockbox::exchange::{Entries, resolve};
use lockbox::format::{Ino, ROOT_INO};
use lockbox::fs::{Attributes, FileSystem, RenameMode, mode};
use lockbox_terminal::display;
use zeroize::Zeroizing;

use crate::exit::Failure;
use crate::open_archive::creator;

/// Directory of the variables, for people.
pub(crate) const DIRECTORY: &str = "/.lockbox/env";
const PARTS: [&[u8]; 2] = [b".lockbox", b"env"];
/// Under this name a new value is written before it takes its place; no variable can have it.
const UNFINISHED: &[u8] = b".new";
/// The kernel's limit of one variable with its name is 128 KiB.
pub(crate) const MAX_VALUE: usize = 64 << 10;
const MAX_NAME: usize = 255;

/// Refuses a name that is not valid in every shell.
pub(crate) fn check_name(name: &str) -> Result<(), Failure> {
    let begins = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
    if begins && name.len() <= MAX_NAME && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "'{}' is no name of a variable: letters, digits and underscores, at most {MAX_NAME}, not beginning with a digit",
        display(name.as_bytes())
    )))
}

/// Returns the names, sorted. Other objects in the directory are not variables: a file that a
/// program left there through a mount, for example.
pub(crate) fn names(archive: &Archive) -> Result<Vec<String>, Error> {
    let fs = archive.file_system();
    let Some(directory) = directory(fs)? else { return Ok(Vec::new()) };
    let mut names = Vec::new();
    for entry in Entries::new(fs, directory)? {
        let entry = entry?;
        if entry.attributes.mode & mode::TYPE == mode::REGULAR
            && let Ok(name) = String::from_utf8(entry.name)
            && check_name(&name).is_ok()
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

pub(crate) fn get(archive: &Archive, name: &str) -> Result<Zeroizing<Vec<u8>>, Failure> {
    check_name(name)?;
    let fs = archive.file_system();
    let found = find(fs, name)?;
    if found.size > MAX_VALUE as u64 {
        return Err(Failure::other(format!("{DIRECTORY}/{name} is longer than {} KiB", MAX_VALUE >> 10)));
    }
    let value = Zeroizing::new(fs.read(found.ino, 0, MAX_VALUE)?);
    if value.contains(&0) {
        return Err(Failure::other(format!("{DIRECTORY}/{name} holds a NUL, which no variable can")));
    }
    Ok(value)
}

/// Sets a variable: the old or the new value exists at any moment.
pub(crate) fn set(archive: &Archive, name: &str, value: &[u8]) -> Result<(), Failure> {
    check_name(name)?;
    let fs = &**archive.file_system();
    let creator = creator();
    let mut at = ROOT_INO;
    for part in PARTS {
        let found = match fs.lookup(at, part) {
            Err(Error::NotFound) => fs.make_directory(at, part, 0o700, creator)?,
            other => other?,
        };
        if !found.is_directory() {
            return Err(Failure::other(format!("{} of the archive is no directory", display(part))));
        }
        at = found.ino;
    }
    match fs.unlink(at, UNFINISHED) {
        Ok(()) | Err(Error::NotFound) => {}
        Err(error) => return Err(error.into()),
    }
    let made = fs.create_and_open(at, UNFINISHED, 0o600, creator)?;
    let written = fs.write(made.ino, 0, value);
    fs.release(made.ino)?;
    written?;
    Ok(fs.rename(at, UNFINISHED, at, name.as_bytes(), RenameMode::Replace)?)
}

pub(crate) fn remove(archive: &Archive, name: &str) -> Result<(), Failure> {
    check_name(name)?;
    let fs = archive.file_system();
    find(fs, name)?;
    match directory(fs)? {
        Some(directory) => Ok(fs.unlink(directory, name.as_bytes())?),
        None => Err(missing(name)),
    }
}

fn directory(fs: &FileSystem) -> Result<Option<Ino>, Error> {
    match resolve(fs, DIRECTORY.as_bytes()) {
        Err(Error::NotFound) => Ok(None),
        Err(error) => Err(error),
        Ok(found) if found.is_directory() => Ok(Some(found.ino)),
        Ok(_) => Err(Error::NotDirectory),
    }
}

fn find(fs: &FileSystem, name: &str) -> Result<Attributes, Failure> {
    let found = match directory(fs)? {
        Some(directory) => fs.lookup(directory, name.as_bytes()),
        None => Err(Error::NotFound),
    };
    match found {
        Ok(found) if found.mode & mode::TYPE == mode::REGULAR => Ok(found),
        Ok(_) => Err(Failure::other(format!("{DIRECTORY}/{name} is no file"))),
        Err(Error::NotFound) => Err(missing(name)),
        Err(error) => Err(Failure::of(format_args!("{DIRECTORY}/{name}"), &error)),
    }
}

fn missing(name: &str) -> Failure {
    Failure::other(format!("the archive has no variable {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_shells() {
        for good in ["A", "_", "a_1", "PATH", &"x".repeat(255)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "1A", "A-B", "A=B", "a/b", "..", ".new", "ä", "A B", "A\n", &"x".repeat(256)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
