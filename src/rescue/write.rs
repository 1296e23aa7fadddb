//! Writes rescued objects to the host: complete before they get their name, identified by
//! descriptor (EXTRACT-1), without following links.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};

use super::index::{DataPiece, LeafIndex, LeafSet};
use super::object::RescuedInode;
use super::scan::as_damage;
use crate::error::{Error, Result};
use crate::exchange::SkippedItems;
use crate::exchange::attributes::{self, Phase};
use crate::exchange::host::{apply, apply_at, host_error};
use crate::exchange::staging_dir::{StagingDir, identity_of, make_directory, make_special};
use crate::exchange::write_all;
use crate::format::{Ino, MAX_DATA, MAX_OFFSET};
use crate::fs::mode;
use crate::pager::Pager;
use crate::storage::{FileIdentity, host_call};

/// Name of the incomplete object in the staging directory.
const UNFINISHED: &[u8] = b"unfinished";

/// Source of a rescued object.
pub(super) struct ObjectSource<'a> {
    pub(super) index: &'a mut LeafIndex,
    pub(super) pager: &'a Pager,
    pub(super) version: &'a LeafSet,
    pub(super) ino: Ino,
    /// Path for messages.
    pub(super) path: &'a [u8],
    /// Skipped metadata.
    pub(super) skipped: &'a mut SkippedItems,
    /// Called with the number of bytes written; its error ends the rescue.
    pub(super) written: &'a mut dyn FnMut(u64) -> Result<()>,
}

/// Written object, and the result of setting its metadata.
pub(super) struct WrittenObject {
    pub(super) bytes: u64,
    pub(super) metadata: Result<()>,
    /// `None` for a device that was skipped.
    pub(super) identity: Option<FileIdentity>,
}

/// Creates a file, link or special file under its name.
///
/// # Errors
/// `Damaged` for an incomplete version, with nothing created, and failures of the host.
pub(super) fn object(
    source: ObjectSource<'_>,
    object: &RescuedInode,
    lenient: bool,
    stage: &StagingDir,
    (at, name): (&OwnedFd, &[u8]),
) -> Result<WrittenObject> {
    match object.file_type() {
        mode::REGULAR => file(source, object, lenient, stage, (at, name)),
        mode::SYMLINK | mode::FIFO | mode::SOCKET | mode::CHARACTER | mode::BLOCK => {
            special(source, object, stage, (at, name))
        }
        other => Err(Error::damaged(format!("its type is unknown: mode={other:o}"))),
    }
}

/// Creates an object that is not opened; such objects cannot have `user.` attributes.
fn special(
    source: ObjectSource<'_>,
    object: &RescuedInode,
    stage: &StagingDir,
    (at, name): (&OwnedFd, &[u8]),
) -> Result<WrittenObject> {
    let stat = object.attributes(source.ino);
    if source.skipped.withholds_object(source.path, stat.mode) {
        return Ok(WrittenObject { bytes: 0, metadata: Ok(()), identity: None });
    }
    let own = stage.directory();
    let target = || object.target((source.index, source.version), (source.pager, source.ino));
    let held = make_special(own, UNFINISHED, &stat, target)?;
    let metadata = apply_at(&held, own, UNFINISHED, &source.skipped.granted(source.path, &stat));
    let host = attributes::XattrObject::Held(held.as_fd());
    attributes::set_for_phase(&object.xattrs, &host, Phase::AfterMode, source.path, source.skipped);
    let identity = Some(identity_of(&held)?);
    finished(stage, place(stage, at, name).map(|()| WrittenObject { bytes: 0, metadata, identity }))
}

/// Removes an object that did not get its name.
fn finished(stage: &StagingDir, result: Result<WrittenObject>) -> Result<WrittenObject> {
    if result.is_err()
        && let Err(errno) = rustix::fs::unlinkat(stage.directory(), UNFINISHED, AtFlags::empty())
    {
        tracing::warn!(%errno, "cannot remove an unfinished copy");
    }
    result
}

/// Creates an empty file in the staging directory.
fn begin(stage: &StagingDir) -> Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(stage.directory(), UNFINISHED, flags, Mode::RUSR | Mode::WUSR).map_err(host_error("cannot make"))
}

fn file(
    source: ObjectSource<'_>,
    object: &RescuedInode,
    lenient: bool,
    stage: &StagingDir,
    (at, name): (&OwnedFd, &[u8]),
) -> Result<WrittenObject> {
    let host = begin(stage)?;
    let created = fill(source, object, lenient, &host);
    finished(stage, created.and_then(|created| place(stage, at, name).map(|()| created)))
}

fn fill(source: ObjectSource<'_>, object: &RescuedInode, lenient: bool, host: &OwnedFd) -> Result<WrittenObject> {
    let stat = object.attributes(source.ino);
    let (mut end, mut written) = (0, 0);
    let bytes =
        object.content((source.index, source.version), (source.pager, source.ino), lenient, &mut |offset, data| {
            end = end.max(offset + data.len() as u64);
            write_all(host, data, offset)?;
            written += data.len() as u64;
            (source.written)(written)
        })?;
    // Without an inode record the size is unknown: the end of the surviving data is used.
    let size = if object.is_stand_in() { end } else { stat.size };
    host_call::set_length(host, size).map_err(host_error("cannot set the size"))?;
    let target = attributes::XattrObject::open(host);
    attributes::set_for_phase(&object.xattrs, &target, Phase::BeforeMode, source.path, source.skipped);
    let metadata = apply(host, &source.skipped.granted(source.path, &stat));
    attributes::set_for_phase(&object.xattrs, &target, Phase::AfterMode, source.path, source.skipped);
    Ok(WrittenObject { bytes, metadata, identity: Some(identity_of(host)?) })
}

/// Creates a file from data pages' own headers, newer pieces over older ones; returns the number of
/// pieces written.
pub(super) fn pieces(
    pieces: &[DataPiece],
    pager: &Pager,
    stage: &StagingDir,
    at: &OwnedFd,
    name: &[u8],
) -> Result<u64> {
    let mut host = None;
    let mut written = 0;
    let mut bytes = Vec::new();
    for piece in pieces {
        // Only a holder of the key can have sealed an invalid header.
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

/// Renames the complete object to its name, if that is unused.
fn place(stage: &StagingDir, at: &OwnedFd, name: &[u8]) -> Result<()> {
    stage.place(UNFINISHED, at, name).map_err(host_error("cannot move it into place"))
}

/// Creates a directory and opens it: in the staging directory, since other users may be able to
/// modify the target.
pub(super) fn directory(stage: &StagingDir, at: &OwnedFd, name: &[u8]) -> Result<OwnedFd> {
    let created = make_directory(stage.directory(), UNFINISHED)?;
    place(stage, at, name).inspect_err(|_| {
        // It is empty.
        let _ = rustix::fs::unlinkat(stage.directory(), UNFINISHED, AtFlags::REMOVEDIR);
    })?;
    Ok(created)
}
