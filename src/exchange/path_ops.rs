//! Removes, makes and moves what an archive has, by path. Everything is checked before anything is changed, so what is refused leaves all as it was.

use std::collections::HashSet;

use lockbox_terminal::display;

use super::deletion::delete_tree;
use super::path::{components, if_there, resolve, resolve_given, resolve_or_make};
use crate::error::{Error, Refusal, Result};
use crate::format::Ino;
use crate::fs::{Attributes, Creator, FileSystem, RenameMode};

/// The mode of a directory that somebody asks for by its path.
const DIRECTORY_MODE: u32 = 0o755;

/// Where objects go that are moved or copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The path of a directory that is there.
    pub directory: Vec<u8>,
    /// What the one object is called in it; None for names of their own.
    pub name: Option<Vec<u8>>,
}

impl Destination {
    /// Into `target` when that is a directory; else one object gets that path. A symbolic link is no directory, wherever it points to.
    ///
    /// # Errors
    /// `Invalid` when several objects cannot go there, or there is no directory above it.
    pub fn of(fs: &FileSystem, target: &[u8], several: bool) -> Result<Destination> {
        let missing = |path: &[u8]| Error::invalid(format!("the archive has no {}", display(path)));
        let no_directory = |path: &[u8]| Error::invalid(format!("{} is no directory", display(path)));
        match if_there(resolve(fs, target)) {
            Ok(Some(found)) if found.is_directory() => {
                return Ok(Destination { directory: target.to_vec(), name: None });
            }
            Ok(Some(_)) if several || target.ends_with(b"/") => return Err(no_directory(target)),
            Ok(None) if several || target.ends_with(b"/") => return Err(missing(target)),
            Ok(_) => {}
            Err(Error::NotDirectory) => return Err(no_directory(parent_of(target)?.0.as_slice())),
            Err(error) => return Err(error),
        }
        let (directory, name) = parent_of(target)?;
        match if_there(resolve(fs, &directory))? {
            None => Err(missing(&directory)),
            Some(found) if !found.is_directory() => Err(no_directory(&directory)),
            Some(_) => Ok(Destination { directory, name: Some(name) }),
        }
    }
}

/// The path of the directory above, and the name in it.
fn parent_of(path: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
    let mut names = components(path)?;
    let Some(name) = names.pop() else { return Err(Error::invalid("the root of an archive stays where it is")) };
    Ok((names.join(&b"/"[..]), name.to_vec()))
}

/// An object by the directory that has it.
struct Named {
    parent: Ino,
    name: Vec<u8>,
    attributes: Attributes,
}

impl Named {
    fn at(fs: &FileSystem, path: &[u8]) -> Result<Named> {
        let (directory, name) = parent_of(path)?;
        let attributes = resolve_given(fs, path)?;
        Ok(Named { parent: resolve(fs, &directory)?.ino, name, attributes })
    }
}

/// Removes each of the paths with everything below it; answers how many objects that was.
///
/// # Errors
/// `Invalid` for a path that is not there and for the root, with nothing removed. Another error comes in the middle.
pub fn remove(fs: &FileSystem, paths: &[Vec<u8>]) -> Result<u64> {
    let doomed = paths.iter().map(|path| Named::at(fs, path)).collect::<Result<Vec<_>>>()?;
    doomed.iter().try_fold(0, |count, Named { parent, name, .. }| {
        // One of the paths may lie below another one, or be it.
        let found = match fs.lookup(*parent, name) {
            Err(Error::NotFound | Error::Stale) => return Ok(count),
            found => found?,
        };
        Ok(count + delete_tree(fs, *parent, name, &found)?)
    })
}

/// Makes a directory at each of the paths; with `parents` what is missing above it too, and one that is there is as good.
///
/// # Errors
/// `Invalid` for what is in the way or missing. Directories that were made before stay.
pub fn make_directories(fs: &FileSystem, paths: &[Vec<u8>], parents: bool, creator: Creator) -> Result<()> {
    let mut make = |parent, name: &[u8]| fs.make_directory(parent, name, DIRECTORY_MODE, creator);
    paths.iter().try_for_each(|path| {
        let told = |error| match error {
            Error::Exists => Error::invalid(format!("{} is there already", display(path))),
            Error::NotDirectory => Error::invalid(format!("{} leads through what is no directory", display(path))),
            error => error,
        };
        if parents {
            return resolve_or_make(fs, path, &mut make).map(drop).map_err(told);
        }
        // The root is there already.
        let (above, name) = parent_of(path).map_err(|_| told(Error::Exists))?;
        make(resolve_given(fs, &above)?.ino, &name).map(drop).map_err(told)
    })
}

/// Gives each object of the paths its place at the destination.
///
/// # Errors
/// `Invalid` or `Refused`, with nothing moved, for a path that is not there, the root, a directory that would come to lie below itself, two objects of one
/// name, and for what is in the way: anything, or with `replace` directories. Another error comes in the middle.
pub fn rename(fs: &FileSystem, paths: &[Vec<u8>], to: &Destination, replace: bool) -> Result<()> {
    let directory = resolve_given(fs, &to.directory)?.ino;
    let mut names = HashSet::new();
    let mut moves = Vec::new();
    for path in paths {
        let from = Named::at(fs, path)?;
        let name = to.name.clone().unwrap_or_else(|| from.name.clone());
        if !names.insert(name.clone()) {
            return Err(Error::invalid(format!("two objects would get the name {}", display(&name))));
        }
        if from.attributes.is_directory() {
            refuse_below(path, &to.directory)?;
        }
        if let Some(existing) = if_there(fs.lookup(directory, &name))? {
            if existing.ino == from.attributes.ino {
                return Err(Error::invalid(format!("{} is that already", display(path))));
            }
            refuse_in_the_way(&name, &existing, replace)?;
        }
        moves.push((from, name));
    }
    let mode = if replace { RenameMode::Replace } else { RenameMode::NoReplace };
    moves.iter().try_for_each(|(from, name)| fs.rename(from.parent, &from.name, directory, name, mode))
}

/// Links do not lead anywhere here, and directories have one name: paths tell it all.
pub(super) fn refuse_below(path: &[u8], directory: &[u8]) -> Result<()> {
    match components(directory)?.starts_with(&components(path)?) {
        true => Err(Error::invalid(format!("{} would come to lie below itself", display(path)))),
        false => Ok(()),
    }
}

pub(super) fn refuse_in_the_way(name: &[u8], existing: &Attributes, replace: bool) -> Result<()> {
    let name = display(name);
    match existing.is_directory() {
        true => Err(Error::invalid(format!("{name} is a directory there, and those are not replaced"))),
        false if replace => Ok(()),
        false => Err(Error::Refused(Refusal::InTheWay { what: format!("{name} exists already there") })),
    }
}
