//! Loads one inode from a version of its leaves, with attributes, extended attributes and content
//! checked against each other, and writes it to the host: complete before it gets its name,
//! identified by descriptor (EXTRACT-1), without following links.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};

use super::index::{DataPiece, LeafIndex, LeafSet};
use super::scan::{as_damage, ignoring_damage};
use crate::error::{Error, Result};
use crate::exchange::attributes::{self, Phase, apply, apply_at, host_error};
use crate::exchange::staging_dir::{StagingDir, identity_of, make_directory, make_special};
use crate::exchange::{SkippedItems, write_all};
use crate::format::values::{Extent, InodeValue, NO_TRIM, XATTR_PIECE, decode_xattrs};
use crate::format::{Ino, Key, MAX_DATA, MAX_OFFSET, kind};
use crate::fs::{Attributes, mode};
use crate::pager::Pager;
use crate::storage::{FileIdentity, host_call};

/// Inode without its file data and entries.
pub(super) struct RescuedInode {
    pub(super) inode: InodeValue,
    inline: Option<Vec<u8>>,
    /// Names and values.
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    stand_in: bool,
    /// File data in log entries, which overrides everything else.
    pieces: Vec<(u64, Vec<u8>)>,
}

/// Receiver of file data, with its offset.
pub(super) type DataSink<'a> = dyn FnMut(u64, &[u8]) -> Result<()> + 'a;

impl RescuedInode {
    /// Loads an inode; `None` if this version proves that it does not exist. Errors: `Damaged` for
    /// inconsistent records.
    pub(super) fn load(index: &mut LeafIndex, version: &LeafSet, ino: Ino) -> Result<Option<RescuedInode>> {
        let (mut inode, mut inline, mut entries) = (None, None, Vec::new());
        let mut pieces: HashMap<u64, Vec<u8>> = HashMap::new();
        let mut others = false;
        for part in 0..version.parts() {
            let more = index.records(
                (version, part),
                Key::new(ino.0, 0, 0),
                Key::new(ino.0 + 1, 0, 0),
                &mut |key, value| {
                    others = true;
                    match key.kind {
                        kind::INODE => inode = Some(InodeValue::decode(value)?),
                        kind::INLINE => inline = Some(value.to_vec()),
                        kind::XATTR => entries.extend(decode_xattrs(value)?),
                        kind::XATTR_PIECE => drop(pieces.insert(key.sub, value.to_vec())),
                        _ => return Ok(false),
                    }
                    Ok(true)
                },
            )?;
            if !more {
                break;
            }
        }
        let Some(inode) = inode else {
            return if others { Err(Error::damaged("its inode record is missing")) } else { Ok(None) };
        };
        let mut xattrs = Vec::with_capacity(entries.len());
        for entry in entries {
            if entry.piece == 0 {
                xattrs.push((entry.name, entry.value));
                continue;
            }
            let mut value = Vec::with_capacity(entry.length as usize);
            for number in 0..(entry.length as usize).div_ceil(XATTR_PIECE) as u64 {
                value.extend(pieces.remove(&((u64::from(entry.piece) << 32) + number)).unwrap_or_default());
            }
            if value.len() != entry.length as usize {
                return Err(Error::damaged("the value of an extended attribute is incomplete"));
            }
            xattrs.push((entry.name, value));
        }
        let has_pieces = version.logged && inode.mode & mode::TYPE == mode::REGULAR;
        let pieces = if has_pieces { index.log.pieces(ino) } else { Vec::new() };
        Ok(Some(RescuedInode { inode, inline, xattrs, stand_in: false, pieces }))
    }

    /// Returns a substitute for an inode without a record; `mode` comes from its directory entry.
    pub(super) fn stand_in(mode: u32) -> RescuedInode {
        let inode = InodeValue { mode, links: 1, size: MAX_OFFSET, trim: NO_TRIM, ..InodeValue::default() };
        RescuedInode { inode, inline: None, xattrs: Vec::new(), stand_in: true, pieces: Vec::new() }
    }

    pub(super) fn file_type(&self) -> u32 {
        self.inode.mode & mode::TYPE
    }

    pub(super) fn is_directory(&self) -> bool {
        self.file_type() == mode::DIRECTORY
    }

    pub(super) fn attributes(&self, ino: Ino) -> Attributes {
        let end = self.pieces.last().map_or(0, |(offset, data)| offset + data.len() as u64);
        let published = Attributes::of_published(ino, &self.inode);
        Attributes { size: published.size.max(end), ..published }
    }

    /// Passes all data outside of holes to `sink` (specification 7.3); returns the number of bytes.
    /// With `lenient`, unreadable data is skipped. Errors: `Damaged` for the first page that does
    /// not open with the named tag, or if the sum differs from that in the inode.
    pub(super) fn content(
        &self,
        (index, version): (&mut LeafIndex, &LeafSet),
        (pager, ino): (&Pager, Ino),
        lenient: bool,
        sink: &mut DataSink<'_>,
    ) -> Result<u64> {
        let inode = &self.inode;
        let (mut named, mut delivered, mut covered) = (0, 0, 0);
        if let Some(inline) = &self.inline {
            named += inline.len() as u64;
            let length = (inline.len() as u64).min(inode.size);
            sink(0, &inline[..length as usize])?;
            delivered += length;
        }
        let mut page = Vec::new();
        for part in 0..version.parts() {
            let (from, to) = (Key::new(ino.0, kind::EXTENT, 0), Key::new(ino.0, kind::EXTENT + 1, 0));
            let mut extents = Vec::new();
            index.records((version, part), from, to, &mut |key, value| {
                extents.push((key.sub, Extent::decode(value)?));
                Ok(true)
            })?;
            for (offset, extent) in extents {
                let visible = offset.saturating_add(extent.length.into()).min(inode.trim);
                if offset < covered || (self.inline.is_some() && offset < inode.trim) {
                    return Err(Error::damaged("its extents overlap"));
                }
                covered = visible.max(offset);
                named += visible.saturating_sub(offset);
                let end = visible.min(inode.size);
                if end <= offset {
                    continue;
                }
                page.resize((end - offset) as usize, 0);
                match pager.read_data(&extent.page, extent.start, &mut page).map_err(as_damage) {
                    Err(Error::Damaged(_)) if lenient => continue,
                    read => read?,
                }
                sink(offset, &page)?;
                delivered += page.len() as u64;
            }
        }
        // While a truncation is pending, the records after it may or may not be removed; in every
        // other state the sum is exact.
        if !lenient && (named != inode.bytes) && inode.trim == NO_TRIM {
            return Err(Error::damaged(format!("its records name {named} bytes instead of {}", inode.bytes)));
        }
        for (offset, data) in &self.pieces {
            sink(*offset, data)?;
            delivered += data.len() as u64;
        }
        Ok(delivered)
    }

    pub(super) fn target(&self, index: (&mut LeafIndex, &LeafSet), pager: (&Pager, Ino)) -> Result<Vec<u8>> {
        // Specification 7: at most 4,095 bytes; checked before anything is allocated.
        if !(1..=4095).contains(&self.inode.size) {
            return Err(Error::damaged("its target has an impossible length"));
        }
        let mut target = vec![0; self.inode.size as usize];
        let delivered = self.content(index, pager, false, &mut |offset, bytes| {
            target[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
            Ok(())
        })?;
        if delivered != self.inode.size || target.contains(&0) {
            return Err(Error::damaged("its target is incomplete"));
        }
        Ok(target)
    }
}

/// Name of the incomplete object in the staging directory.
const UNFINISHED: &[u8] = b"unfinished";

pub(super) struct ObjectSource<'a> {
    pub(super) index: &'a mut LeafIndex,
    pub(super) pager: &'a Pager,
    pub(super) version: &'a LeafSet,
    pub(super) ino: Ino,
    pub(super) path: &'a [u8],
    pub(super) skipped: &'a mut SkippedItems,
    /// Called with the number of bytes written; its error ends the rescue.
    pub(super) written: &'a mut dyn FnMut(u64) -> Result<()>,
}

pub(super) struct WrittenObject {
    pub(super) bytes: u64,
    pub(super) metadata: Result<()>,
    /// `None` for a device that was skipped.
    pub(super) identity: Option<FileIdentity>,
}

/// Creates a file, link or special file under its name. Errors: `Damaged` for an incomplete
/// version, with nothing created, and failures of the host.
pub(super) fn write_object(
    source: ObjectSource<'_>,
    object: &RescuedInode,
    lenient: bool,
    stage: &StagingDir,
    (at, name): (&OwnedFd, &[u8]),
) -> Result<WrittenObject> {
    match object.file_type() {
        mode::REGULAR => {
            let host = begin(stage)?;
            let created = fill(source, object, lenient, &host);
            finished(stage, created.and_then(|created| place(stage, at, name).map(|()| created)))
        }
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
    let placed = identity_of(&held).and_then(|identity| place(stage, at, name).map(|()| Some(identity)));
    finished(stage, placed.map(|identity| WrittenObject { bytes: 0, metadata, identity }))
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

fn begin(stage: &StagingDir) -> Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(stage.directory(), UNFINISHED, flags, Mode::RUSR | Mode::WUSR).map_err(host_error("cannot make"))
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
    let size = if object.stand_in { end } else { stat.size };
    host_call::set_length(host, size).map_err(host_error("cannot set the size"))?;
    let target = attributes::XattrObject::open(host);
    attributes::set_for_phase(&object.xattrs, &target, Phase::BeforeMode, source.path, source.skipped);
    let metadata = apply(host, &source.skipped.granted(source.path, &stat));
    attributes::set_for_phase(&object.xattrs, &target, Phase::AfterMode, source.path, source.skipped);
    Ok(WrittenObject { bytes, metadata, identity: Some(identity_of(host)?) })
}

/// Creates a file from data pages' own headers, newer pieces over older ones; returns the number of
/// pieces written.
pub(super) fn write_pieces(
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
        if ignoring_damage(pager.read_data(&piece.page, piece.start, &mut bytes).map_err(as_damage))?.is_none() {
            continue;
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
