//! Copies objects of an archive within it: what is stored is shared and not stored twice.

use std::collections::HashSet;
use std::io::{ErrorKind, Read};

use lockbox_terminal::display;

use super::Copied;
use super::deletion::delete_tree;
use super::path::{components, if_there, resolve_given};
use super::path_ops::{Destination, refuse_below, refuse_in_the_way};
use super::snapshot::Builder;
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, RenameMode, SetAttributes, SetTime};

/// With what the name of a copy begins that is to replace something; a number follows.
const BESIDE: &str = ".lockbox-copy-";
/// Bytes of new content that are read at once.
const PIECE: usize = 1 << 20;

/// Copies each of the paths with everything below it to the destination, with owners, modes, times and attributes; hard links among them stay hard links.
/// `go_on` is asked before each object and now and then within it. What fails in the middle, or is ended by it, takes back the one of the paths that was
/// being copied; those before it stay.
///
/// # Errors
/// `Invalid` or `Refused`, with nothing copied, for a path that is not there, the root, a directory into itself, two objects of one name, and for what is
/// in the way: anything, or with `replace` directories.
pub fn copy(
    fs: &FileSystem,
    paths: &[Vec<u8>],
    to: &Destination,
    replace: bool,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Copied> {
    let directory = resolve_given(fs, &to.directory)?.ino;
    let mut names = HashSet::new();
    let mut copies = Vec::new();
    for path in paths {
        let object = resolve_given(fs, path)?;
        let Some(&own) = components(path)?.last() else {
            return Err(Error::invalid("the root of an archive cannot be copied into itself"));
        };
        let name = to.name.clone().unwrap_or_else(|| own.to_vec());
        if !names.insert(name.clone()) {
            return Err(Error::invalid(format!("two objects would get the name {}", display(&name))));
        }
        if object.is_directory() {
            refuse_below(path, &to.directory)?;
        }
        let existing = if_there(fs.lookup(directory, &name))?;
        if let Some(existing) = &existing {
            if existing.ino == object.ino {
                return Err(Error::invalid(format!("{} is that already", display(path))));
            }
            refuse_in_the_way(&name, existing, replace)?;
        }
        copies.push((object, name, existing.is_some()));
    }
    let mut builder = Builder::new(fs, fs, go_on);
    for (object, name, is_there) in &copies {
        let built = if *is_there { free_name(fs, directory)? } else { name.clone() };
        let placed = builder.tree(object, directory, &built).and_then(|()| match is_there {
            true => fs.rename(directory, &built, directory, name, RenameMode::Replace),
            false => Ok(()),
        });
        placed.map_err(|error| taken_back(fs, directory, &built, error))?;
    }
    Ok(builder.copied)
}

/// Gives a regular file the content that `content` has from where it is, and the present as its time of modification; everything else stays. Whoever opens the archive
/// later finds the old content or all of the new one. Of a file with several names, which stay those of one file, that holds for what one commit takes.
///
/// # Errors
/// As for a path that is not there; the file has its old content then, but when it has several names.
pub fn rewrite(fs: &FileSystem, path: &[u8], content: &mut dyn Read) -> Result<()> {
    let file = resolve_given(fs, path)?;
    if file.links > 1 {
        return fill(fs, file.ino, content);
    }
    let mut names = components(path)?;
    let name = names.pop().ok_or(Error::IsDirectory)?;
    let directory = resolve_given(fs, &names.join(&b"/"[..]))?.ino;
    let built = free_name(fs, directory)?;
    let mut nothing = || Ok(());
    let made = Builder::new(fs, fs, &mut nothing).object(&file, directory, &built);
    let placed = made.and_then(|made| {
        fill(fs, made, content)?;
        fs.rename(directory, &built, directory, name, RenameMode::Replace)
    });
    placed.map_err(|error| taken_back(fs, directory, &built, error))
}

fn fill(fs: &FileSystem, ino: Ino, content: &mut dyn Read) -> Result<()> {
    fs.open(ino)?;
    let filled = write_all(fs, ino, content);
    fs.release(ino)?;
    filled
}

fn write_all(fs: &FileSystem, ino: Ino, content: &mut dyn Read) -> Result<()> {
    fs.set_attributes(ino, &SetAttributes { size: Some(0), ..SetAttributes::default() })?;
    let (mut offset, mut piece) = (0, vec![0; PIECE]);
    loop {
        match content.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => {
                fs.write(ino, offset, &piece[..length])?;
                offset += length as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::io("cannot read the new content", error)),
        }
    }
    let now = SetAttributes { mtime: Some(SetTime::Now), ..SetAttributes::default() };
    fs.set_attributes(ino, &now).map(drop)
}

/// A name that nothing has in the directory.
fn free_name(fs: &FileSystem, directory: Ino) -> Result<Vec<u8>> {
    let mut number = 0u32;
    loop {
        let name = format!("{BESIDE}{number}").into_bytes();
        match if_there(fs.lookup(directory, &name))? {
            None => return Ok(name),
            // Left by a copy that was killed.
            Some(_) => number += 1,
        }
    }
}

/// Removes what is not complete.
fn taken_back(fs: &FileSystem, directory: Ino, name: &[u8], error: Error) -> Error {
    let delete = |found: Attributes| delete_tree(fs, directory, name, &found).map(drop);
    let removed = if_there(fs.lookup(directory, name)).and_then(|found| found.map_or(Ok(()), delete));
    if let Err(second) = removed {
        tracing::warn!(error = %second, "cannot remove an unfinished copy");
    }
    error
}
