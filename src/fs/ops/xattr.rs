//! Extended attributes: any namespace, values up to 64 KiB.

use std::ops::ControlFlow;

use crate::error::{Error, Result};
use crate::format::values::{InodeValue, XattrEntry, decode_xattrs, encode_xattrs, inode_flags};
use crate::format::{Ino, Key, MAX_VALUE, kind};
use crate::fs::{FileSystem, XattrMode, inode};
use crate::txn::{Operation, View};

/// Longest value, as XATTR_SIZE_MAX.
const MAX_XATTR: usize = 65_536;
/// Longest value inside of the record: longer ones would crowd the nodes that lookups read.
const IN_RECORD: usize = 1024;
/// Bytes of a piece (specification 7).
const PIECE: usize = 3000;
/// A value's pieces, the record and the inode.
const XATTR_RECORDS: u64 = 2 * (MAX_XATTR as u64).div_ceil(PIECE as u64) + 2;

fn piece_key(ino: Ino, piece: u32, index: usize) -> Key {
    Key::new(ino.0, kind::XATTR_PIECE, u64::from(piece) << 32 | index as u64)
}

fn read_value(view: View<'_>, ino: Ino, entry: XattrEntry) -> Result<Vec<u8>> {
    if entry.piece == 0 {
        return Ok(entry.value);
    }
    let mut value = Vec::with_capacity((entry.length as usize).min(MAX_XATTR));
    let range = (piece_key(ino, entry.piece, 0), piece_key(ino, entry.piece, u32::MAX as usize));
    view.scan(range.0, range.1, &mut |_, piece| {
        value.extend_from_slice(piece);
        Ok(if value.len() > MAX_XATTR { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    if value.len() != entry.length as usize {
        return Err(Error::damaged(format!("xattr has a wrong length: inode={}", ino.0)));
    }
    Ok(value)
}

fn remove_pieces(op: &mut Operation<'_>, ino: Ino, entry: &XattrEntry) -> Result<()> {
    if entry.piece != 0 {
        for index in 0..(entry.length as usize).div_ceil(PIECE) {
            op.remove(piece_key(ino, entry.piece, index))?;
        }
    }
    Ok(())
}

fn check_name(name: &[u8]) -> Result<()> {
    match name.len() {
        0 => Err(Error::invalid("empty attribute name")),
        1..=255 => Ok(()),
        _ => Err(Error::RangeTooSmall),
    }
}

impl FileSystem {
    fn xattr_key(&self, ino: Ino, name: &[u8]) -> Key {
        Key::new(ino.0, kind::XATTR, self.name_hash(ino, name))
    }

    /// # Errors
    /// `NoAttribute`.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        // The common answer is "none": one look at the inode, no search.
        if inode::load(view, ino)?.flags & inode_flags::HAS_XATTRS == 0 {
            return Err(Error::NoAttribute);
        }
        let entries = view.get(self.xattr_key(ino, name), decode_xattrs)?.unwrap_or_default();
        let entry = entries.into_iter().find(|entry| entry.name == name).ok_or(Error::NoAttribute)?;
        read_value(view, ino, entry)
    }

    /// # Errors
    /// `Exists` (Create), `NoAttribute` (Replace), `AttributeTooLarge` beyond 64 KiB, `RangeTooSmall` for names beyond 255.
    pub fn set_xattr(&self, ino: Ino, name: &[u8], value: &[u8], how: XattrMode) -> Result<()> {
        check_name(name)?;
        if value.len() > MAX_XATTR {
            return Err(Error::AttributeTooLarge);
        }
        self.volume.operate(XATTR_RECORDS, false, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            let key = self.xattr_key(ino, name);
            let mut entries = op.view().get(key, decode_xattrs)?.unwrap_or_default();
            match entries.iter().position(|entry| entry.name == name) {
                Some(_) if how == XattrMode::Create => return Err(Error::Exists),
                None if how == XattrMode::Replace => return Err(Error::NoAttribute),
                Some(position) => remove_pieces(op, ino, &entries.remove(position))?,
                None => {}
            }
            entries.push(new_entry(op, ino, &mut inode, name, value)?);
            let record = encode_xattrs(&entries);
            if record.len() > MAX_VALUE {
                return Err(Error::NoSpace("too many attribute names with one hash".into()));
            }
            op.insert(key, &record)?;
            inode.flags |= inode_flags::HAS_XATTRS;
            inode.ctime = self.environment.now();
            inode::store(op, ino, &inode)
        })?;
        self.finish_change(())
    }

    /// Names, each followed by NUL, as listxattr(2) wants them.
    pub fn list_xattrs(&self, ino: Ino) -> Result<Vec<u8>> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let mut names = Vec::new();
        if inode::load(view, ino)?.flags & inode_flags::HAS_XATTRS == 0 {
            return Ok(names);
        }
        let range = (Key::new(ino.0, kind::XATTR, 0), Key::new(ino.0, kind::XATTR_PIECE, 0));
        view.scan(range.0, range.1, &mut |_, value| {
            for entry in decode_xattrs(value)? {
                names.extend_from_slice(&entry.name);
                names.push(0);
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(names)
    }

    pub fn remove_xattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        self.volume.operate(XATTR_RECORDS, true, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            let key = self.xattr_key(ino, name);
            let mut entries = op.view().get(key, decode_xattrs)?.unwrap_or_default();
            let position = entries.iter().position(|entry| entry.name == name).ok_or(Error::NoAttribute)?;
            remove_pieces(op, ino, &entries.remove(position))?;
            if entries.is_empty() {
                op.remove(key)?;
                if !has_xattrs(op.view(), ino)? {
                    inode.flags &= !inode_flags::HAS_XATTRS;
                }
            } else {
                op.insert(key, &encode_xattrs(&entries))?;
            }
            inode.ctime = self.environment.now();
            inode::store(op, ino, &inode)
        })?;
        self.finish_change(())
    }
}

fn has_xattrs(view: View<'_>, ino: Ino) -> Result<bool> {
    let mut any = false;
    let range = (Key::new(ino.0, kind::XATTR, 0), Key::new(ino.0, kind::XATTR_PIECE, 0));
    view.scan(range.0, range.1, &mut |_, _| {
        any = true;
        Ok(ControlFlow::Break(()))
    })?;
    Ok(any)
}

fn new_entry(
    op: &mut Operation<'_>,
    ino: Ino,
    inode: &mut InodeValue,
    name: &[u8],
    value: &[u8],
) -> Result<XattrEntry> {
    let mut entry = XattrEntry { name: name.to_vec(), length: value.len() as u32, piece: 0, value: Vec::new() };
    if value.len() <= IN_RECORD {
        entry.value = value.to_vec();
        return Ok(entry);
    }
    entry.piece = inode.next_piece;
    inode.next_piece =
        inode.next_piece.checked_add(1).ok_or_else(|| Error::NoSpace("attribute numbers are used up".into()))?;
    for (index, piece) in value.chunks(PIECE).enumerate() {
        op.insert(piece_key(ino, entry.piece, index), piece)?;
    }
    Ok(entry)
}
