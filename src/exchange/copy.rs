//! Copies objects within an archive; file data is shared with the original.

use std::collections::HashSet;
use std::io::{ErrorKind, Read};

use lockbox_terminal::display;

use super::CopyCounts;
use super::deletion::delete_tree;
use super::path_ops::{CopyDestination, refuse_below, refuse_in_the_way};
use super::path_ops::{components, none_if_missing, resolve_argument};
use super::snapshot::Builder;
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, RenameMode, SetAttributes, SetTime};

/// Prefix of the temporary name of a copy that replaces an object; a number follows.
const BESIDE: &str = ".lockbox-copy-";
/// Size of one read of new content, in bytes.
const PIECE: usize = 1 << 20;

/// Copies each path recursively to the destination, with owners, modes, times and attributes. Hard
/// links among the copies are preserved. `go_on` is called before each object and periodically
/// within it. On failure the incomplete copy of one path is removed; completed ones remain.
///
/// # Errors
/// `Invalid` or `Refused`, with nothing copied, for a missing path, the root, a directory into
/// itself, two objects of one name, and an existing target (with `replace` only directories are
/// refused).
pub fn copy(
    fs: &FileSystem,
    paths: &[Vec<u8>],
    to: &CopyDestination,
    replace: bool,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<CopyCounts> {
    let directory = resolve_argument(fs, &to.directory)?.ino;
    let mut names = HashSet::new();
    let mut copies = Vec::new();
    for path in paths {
        let object = resolve_argument(fs, path)?;
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
        let existing = none_if_missing(fs.lookup(directory, &name))?;
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
        placed.map_err(|error| remove_incomplete(fs, directory, &built, error))?;
    }
    Ok(builder.copied)
}

/// Replaces the content of a regular file with the remaining bytes of `content` and sets its
/// modification time to the present; other metadata is unchanged. After a crash the file has its
/// old content or all of the new one. For a file with several hard links, which are preserved, this
/// holds only for the part that one commit contains.
///
/// # Errors
/// As for a missing path. The file then has its old content, unless it has several hard links.
pub fn rewrite(fs: &FileSystem, path: &[u8], content: &mut dyn Read) -> Result<()> {
    let file = resolve_argument(fs, path)?;
    if file.links > 1 {
        return fill(fs, file.ino, content);
    }
    let mut names = components(path)?;
    let name = names.pop().ok_or(Error::IsDirectory)?;
    let directory = resolve_argument(fs, &names.join(&b"/"[..]))?.ino;
    let built = free_name(fs, directory)?;
    let mut nothing = || Ok(());
    let made = Builder::new(fs, fs, &mut nothing).object(&file, directory, &built);
    let placed = made.and_then(|made| {
        fill(fs, made, content)?;
        fs.rename(directory, &built, directory, name, RenameMode::Replace)
    });
    placed.map_err(|error| remove_incomplete(fs, directory, &built, error))
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

/// Returns an unused name in the directory.
fn free_name(fs: &FileSystem, directory: Ino) -> Result<Vec<u8>> {
    let mut number = 0u32;
    loop {
        let name = format!("{BESIDE}{number}").into_bytes();
        match none_if_missing(fs.lookup(directory, &name))? {
            None => return Ok(name),
            // Left over from an interrupted copy.
            Some(_) => number += 1,
        }
    }
}

/// Removes an incomplete object, and returns the error.
fn remove_incomplete(fs: &FileSystem, directory: Ino, name: &[u8], error: Error) -> Error {
    let delete = |found: Attributes| delete_tree(fs, directory, name, &found).map(drop);
    let removed = none_if_missing(fs.lookup(directory, name)).and_then(|found| found.map_or(Ok(()), delete));
    if let Err(second) = removed {
        tracing::warn!(error = %second, "cannot remove an unfinished copy");
    }
    error
}
