//! Makes rescued objects on the host: complete before they get their name, known by descriptor (EXTRACT-1), never through a link.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};

use super::index::{LeafIndex, Piece, Version};
use super::object::Object;
use super::scan::as_damage;
use crate::error::{Error, Result};
use crate::exchange::LeftOut;
use crate::exchange::attributes::{self, Phase};
use crate::exchange::host::{apply, apply_at, host_error};
use crate::exchange::staging_dir::{Stage, identity_of, make_directory, make_special};
use crate::exchange::write_all;
use crate::format::{Ino, MAX_DATA, MAX_OFFSET};
use crate::fs::mode;
use crate::pager::Pager;
use crate::storage::{Identity, host_call};

/// Name of what is being made in the stage.
const UNFINISHED: &[u8] = b"unfinished";

/// Where an object comes from.
pub(super) struct Source<'a> {
    pub(super) index: &'a mut LeafIndex,
    pub(super) pager: &'a Pager,
    pub(super) version: &'a Version,
    pub(super) ino: Ino,
    /// For messages.
    pub(super) path: &'a [u8],
    /// What is left out of it.
    pub(super) left: &'a mut LeftOut,
    /// Told how many bytes of it were written; its error ends the rescue.
    pub(super) written: &'a mut dyn FnMut(u64) -> Result<()>,
}

/// What was made, and what of its metadata could not be set.
pub(super) struct Made {
    pub(super) bytes: u64,
    pub(super) metadata: Result<()>,
    /// None for a device that is left out.
    pub(super) identity: Option<Identity>,
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
    match object.file_type() {
        mode::REGULAR => file(source, object, lenient, stage, (at, name)),
        mode::SYMLINK | mode::FIFO | mode::SOCKET | mode::CHARACTER | mode::BLOCK => {
            special(source, object, stage, (at, name))
        }
        other => Err(Error::damaged(format!("its type is unknown: mode={other:o}"))),
    }
}

/// What is not opened; `user.` attributes such objects do not have.
fn special(source: Source<'_>, object: &Object, stage: &Stage, (at, name): (&OwnedFd, &[u8])) -> Result<Made> {
    let stat = object.attributes(source.ino);
    if source.left.withholds_object(source.path, stat.mode) {
        return Ok(Made { bytes: 0, metadata: Ok(()), identity: None });
    }
    let own = stage.directory();
    let target = || object.target((source.index, source.version), (source.pager, source.ino));
    let held = make_special(own, UNFINISHED, &stat, target)?;
    let metadata = apply_at(&held, own, UNFINISHED, &source.left.granted(source.path, &stat));
    let host = attributes::Object::Held(held.as_fd());
    attributes::put(&object.xattrs, &host, Phase::AfterMode, source.path, source.left);
    let identity = Some(identity_of(&held)?);
    finished(stage, place(stage, at, name).map(|()| Made { bytes: 0, metadata, identity }))
}

/// Takes away what did not get its name.
fn finished(stage: &Stage, placed: Result<Made>) -> Result<Made> {
    if placed.is_err()
        && let Err(errno) = rustix::fs::unlinkat(stage.directory(), UNFINISHED, AtFlags::empty())
    {
        tracing::warn!(%errno, "cannot remove an unfinished copy");
    }
    placed
}

/// An empty file that has no name yet but in the stage.
fn begin(stage: &Stage) -> Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(stage.directory(), UNFINISHED, flags, Mode::RUSR | Mode::WUSR).map_err(host_error("cannot make"))
}

fn file(
    source: Source<'_>,
    object: &Object,
    lenient: bool,
    stage: &Stage,
    (at, name): (&OwnedFd, &[u8]),
) -> Result<Made> {
    let host = begin(stage)?;
    let made = fill(source, object, lenient, &host);
    finished(stage, made.and_then(|made| place(stage, at, name).map(|()| made)))
}

fn fill(source: Source<'_>, object: &Object, lenient: bool, host: &OwnedFd) -> Result<Made> {
    let stat = object.attributes(source.ino);
    let (mut end, mut written) = (0, 0);
    let bytes =
        object.content((source.index, source.version), (source.pager, source.ino), lenient, &mut |offset, data| {
            end = end.max(offset + data.len() as u64);
            write_all(host, data, offset)?;
            written += data.len() as u64;
            (source.written)(written)
        })?;
    // Of an inode whose record is lost the size is not known: its end is that of what is left.
    let size = if object.is_stand_in() { end } else { stat.size };
    host_call::set_length(host, size).map_err(host_error("cannot set the size"))?;
    let target = attributes::Object::open(host);
    attributes::put(&object.xattrs, &target, Phase::BeforeMode, source.path, source.left);
    let metadata = apply(host, &source.left.granted(source.path, &stat));
    attributes::put(&object.xattrs, &target, Phase::AfterMode, source.path, source.left);
    Ok(Made { bytes, metadata, identity: Some(identity_of(host)?) })
}

/// Makes a file of what pages say themselves to be its bytes, younger ones over older ones; answers how many pieces could be read.
pub(super) fn pieces(pieces: &[Piece], pager: &Pager, stage: &Stage, at: &OwnedFd, name: &[u8]) -> Result<u64> {
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
            empty => empty.insert(begin(stage)?),
        };
        write_all(host, &bytes, piece.offset)?;
        written += 1;
    }
    if host.is_some() {
        place(stage, at, name)?;
    }
    Ok(written)
}

/// Gives what is finished its name, if nothing has it.
fn place(stage: &Stage, at: &OwnedFd, name: &[u8]) -> Result<()> {
    stage.place(UNFINISHED, at, name).map_err(host_error("cannot move it into place"))
}

/// Makes a directory and opens it: in the stage, since somebody else may change the directory where it goes.
pub(super) fn directory(stage: &Stage, at: &OwnedFd, name: &[u8]) -> Result<OwnedFd> {
    let made = make_directory(stage.directory(), UNFINISHED)?;
    place(stage, at, name).inspect_err(|_| {
        // It is empty.
        let _ = rustix::fs::unlinkat(stage.directory(), UNFINISHED, AtFlags::REMOVEDIR);
    })?;
    Ok(made)
}
