//! Loads one inode from a version of its leaves: attributes, extended attributes and content,
//! checked against each other.

use std::collections::HashMap;

use super::index::{LeafIndex, LeafSet};
use super::scan::as_damage;
use crate::error::{Error, Result};
use crate::format::values::{Extent, InodeValue, NO_TRIM, XATTR_PIECE, decode_xattrs};
use crate::format::{Ino, Key, MAX_OFFSET, kind};
use crate::fs::{Attributes, mode};
use crate::pager::Pager;

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
    /// Loads an inode; `None` if this version proves that it does not exist.
    ///
    /// # Errors
    /// `Damaged` for inconsistent records.
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

    pub(super) fn is_stand_in(&self) -> bool {
        self.stand_in
    }

    pub(super) fn file_type(&self) -> u32 {
        self.inode.mode & mode::TYPE
    }

    pub(super) fn is_directory(&self) -> bool {
        self.file_type() == mode::DIRECTORY
    }

    /// Returns whether the inode has no name: it was deleted.
    pub(super) fn is_orphan(&self) -> bool {
        self.inode.links == 0
    }

    pub(super) fn attributes(&self, ino: Ino) -> Attributes {
        let end = self.pieces.last().map_or(0, |(offset, data)| offset + data.len() as u64);
        let published = Attributes::of_published(ino, &self.inode);
        Attributes { size: published.size.max(end), ..published }
    }

    /// Passes all data outside of holes to `sink` (specification 7.3); returns the number of bytes.
    /// With `lenient`, unreadable data is skipped.
    ///
    /// # Errors
    /// `Damaged` for the first page that does not open with the named tag, or if the sum differs
    /// from that in the inode.
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

    /// Returns the target of a symbolic link.
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
