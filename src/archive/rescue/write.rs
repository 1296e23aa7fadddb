//! Makes rescued objects on the host: complete before they get their name, entered by descriptor, never through a link.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::super::LeftAttributes;
use super::super::attributes::{self, Turn};
use super::super::extract::write_all;
use super::super::host::{apply, apply_at, host_error, split_device_number};
use super::super::stage::{Stage, open_directory};
use super::index::{LeafIndex, Piece, Version};
use super::object::{Object, as_damage};
use crate::error::{Error, Result};
use crate::format::{Ino, MAX_DATA, MAX_OFFSET};
use crate::fs::mode;
use crate::pager::Pager;

/// Name of the file that is being made in the stage.
const UNFINISHED: &str = "file";

/// Where an object comes from.
pub(super) struct Source<'a> {
    pub(super) index: &'a mut LeafIndex,
    pub(super) pager: &'a Pager,
    pub(super) version: &'a Version,
    pub(super) ino: Ino,
    /// For messages.
    pub(super) path: &'a [u8],
    /// Attributes that the host refuses.
    pub(super) left: &'a mut LeftAttributes,
}

/// What was made, and what of its metadata could not be set.
pub(super) struct Made {
    pub(super) bytes: u64,
    pub(super) metadata: Result<()>,
}

/// Makes a file, link or special file under its name.
///
/// # Errors
/// `Damaged` when this version is not whole: then nothing was made. Others are the host's.
pub(super) fn object(
    source: Source<'_>,
    object: &Object,
    lenient: bool,
    stage: &Stage,
    (at, name): (&OwnedFd, &[u8]),
) -> Result<Made> {
    let stat = object.attributes(source.ino);
    match object.file_type() {
        mode::REGULAR => file(source, object, lenient, stage, (at, name)),
        mode::SYMLINK => {
            let target = object.target((source.index, source.version), (source.pager, source.ino))?;
            rustix::fs::symlinkat(&target[..], at, name).map_err(host_error("cannot make the link"))?;
            Ok(dress(source, object, (at, name)))
        }
        mode::FIFO | mode::SOCKET | mode::CHARACTER | mode::BLOCK => {
            let (major, minor) = split_device_number(stat.rdev);
            let device = rustix::fs::makedev(major, minor);
            let kind = FileType::from_raw_mode(stat.mode);
            rustix::fs::mknodat(at, name, kind, Mode::RUSR | Mode::WUSR, device)
                .map_err(host_error("cannot make the special file"))?;
            Ok(dress(source, object, (at, name)))
        }
        other => Err(Error::damaged(format!("its type is unknown: mode={other:o}"))),
    }
}

/// Owner, mode, times and attributes of an object that is not opened; `user.` attributes such objects do not have.
fn dress(source: Source<'_>, object: &Object, (at, name): (&OwnedFd, &[u8])) -> Made {
    let metadata = apply_at(at, name, &object.attributes(source.ino));
    let host = attributes::Object::Named { directory: at.as_fd(), name, follow: false };
    attributes::put(&object.xattrs, &host, Turn::AfterMode, source.path, source.left);
    Made { bytes: 0, metadata }
}

fn file(
    source: Source<'_>,
    object: &Object,
    lenient: bool,
    stage: &Stage,
    (at, name): (&OwnedFd, &[u8]),
) -> Result<Made> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let host = rustix::fs::openat(stage.directory(), UNFINISHED, flags, Mode::RUSR | Mode::WUSR)
        .map_err(host_error("cannot make"))?;
    let made = fill(source, object, lenient, &host);
    let placed = made.and_then(|made| place(stage, at, name).map(|()| made));
    if placed.is_err()
        && let Err(errno) = rustix::fs::unlinkat(stage.directory(), UNFINISHED, AtFlags::empty())
    {
        tracing::warn!(%errno, "cannot remove an unfinished copy");
    }
    placed
}

fn fill(source: Source<'_>, object: &Object, lenient: bool, host: &OwnedFd) -> Result<Made> {
    let stat = object.attributes(source.ino);
    let mut end = 0;
    let bytes =
        object.content((source.index, source.version), (source.pager, source.ino), lenient, &mut |offset, data| {
            end = end.max(offset + data.len() as u64);
            write_all(host, data, offset)
        })?;
    // Of an inode whose record is lost the size is not known: its end is that of what is left.
    let size = if object.is_stand_in() { end } else { stat.size };
    rustix::fs::ftruncate(host, size).map_err(host_error("cannot set the size"))?;
    let target = attributes::Object::open(host);
    attributes::put(&object.xattrs, &target, Turn::BeforeMode, source.path, source.left);
    let metadata = apply(host, &stat);
    attributes::put(&object.xattrs, &target, Turn::AfterMode, source.path, source.left);
    Ok(Made { bytes, metadata })
}

/// Makes a file of what pages say themselves to be its bytes, younger ones over older ones; answers how many pieces could be read.
pub(super) fn pieces(pieces: &[Piece], pager: &Pager, stage: &Stage, at: &OwnedFd, name: &[u8]) -> Result<u64> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut host = None;
    let mut written = 0;
    let mut bytes = Vec::new();
    for piece in pieces {
        // Only a holder of the key can have sealed a page that lies about that.
        let end = piece.offset.checked_add(piece.length.into());
        if end.is_none_or(|end| end > MAX_OFFSET) || piece.length as usize > MAX_DATA {
            continue;
        }
        bytes.resize(piece.length as usize, 0);
        match pager.read_data(&piece.page, piece.start, &mut bytes).map_err(as_damage) {
            Err(Error::Damaged(_)) => continue,
            read => read?,
        }
        let host = match &mut host {
            Some(host) => host,
            empty => empty.insert(
                rustix::fs::openat(stage.directory(), UNFINISHED, flags, Mode::RUSR | Mode::WUSR)
                    .map_err(host_error("cannot make"))?,
            ),
        };
        write_all(host, &bytes, piece.offset)?;
        written += 1;
    }
    if host.is_some() {
        place(stage, at, name)?;
    }
    Ok(written)
}

/// Gives the finished file its name, if nothing has it.
fn place(stage: &Stage, at: &OwnedFd, name: &[u8]) -> Result<()> {
    let from = stage.directory();
    let placed = match rustix::fs::renameat_with(from, UNFINISHED, at, name, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
            match rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => Err(Errno::EXIST),
                Err(_) => rustix::fs::renameat(from, UNFINISHED, at, name),
            }
        }
        other => other,
    };
    placed.map_err(host_error("cannot move it into place"))
}

/// Makes a directory and opens it.
pub(super) fn directory(at: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
    rustix::fs::mkdirat(&at, name, Mode::RWXU).map_err(host_error("cannot make the directory"))?;
    open_directory(&at, name)
}
