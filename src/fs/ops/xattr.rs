//! Extended attributes: any namespace, values up to 64 KiB.

use std::ops::{ControlFlow, Range};

use crate::error::{Error, Result};
use crate::format::values::{
    InodeValue, MAX_XATTR, XATTR_PIECE, XattrEntry, decode_xattrs, encode_xattrs, inode_flags,
};
use crate::format::{Ino, Key, MAX_NAME, MAX_VALUE, kind};
use crate::fs::directory::name_hash;
use crate::fs::{FileSystem, XattrMode, inode};
use crate::txn::{Operation, View};

/// Longest value inside the record: two of them with the longest names still share one leaf value of 3,500 bytes.
const MAX_INSIDE: usize = 1024;
/// Records that writing or removing one value changes at most: its entry and its pieces.
pub(super) const RECORDS_OF_VALUE: u64 = 1 + MAX_XATTR.div_ceil(XATTR_PIECE) as u64;

impl FileSystem {
    /// # Errors
    /// `NoAttribute`.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        check_name(name)?;
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let inode = inode::load(view, ino)?;
        let entries = load(view, &inode, record_key(&self.name_key, ino, name))?;
        let entry = entries.into_iter().find(|entry| entry.name == name).ok_or(Error::NoAttribute)?;
        if entry.piece == 0 {
            return Ok(entry.value);
        }
        let mut value = Vec::with_capacity(entry.length as usize);
        let pieces = pieces(ino, &entry);
        view.scan(pieces.start, pieces.end, &mut |key, bytes| {
            if (key.sub - pieces.start.sub) * XATTR_PIECE as u64 == value.len() as u64 {
                value.extend_from_slice(bytes);
            }
            Ok(ControlFlow::Continue(()))
        })?;
        if value.len() != entry.length as usize {
            return Err(Error::damaged(format!("an attribute's value is incomplete: inode={}", ino.0)));
        }
        Ok(value)
    }

    /// # Errors
    /// `Exists` (Create), `NoAttribute` (Replace), `AttributeTooLarge` beyond 64 KiB, `RangeTooSmall` for names beyond 255.
    pub fn set_xattr(&self, ino: Ino, name: &[u8], value: &[u8], how: XattrMode) -> Result<()> {
        check_name(name)?;
        if value.len() > MAX_XATTR {
            return Err(Error::AttributeTooLarge);
        }
        // The inode, the old value and the new one.
        self.volume.operate(1 + 2 * RECORDS_OF_VALUE, false, |op| {
            let now = self.environment.now();
            let mut inode = inode::load(op.view(), ino)?;
            let key = record_key(&self.name_key, ino, name);
            let mut entries = load(op.view(), &inode, key)?;
            let old = entries.iter().position(|entry| entry.name == name).map(|at| entries.remove(at));
            match (how, &old) {
                (XattrMode::Create, Some(_)) => return Err(Error::Exists),
                (XattrMode::Replace, None) => return Err(Error::NoAttribute),
                _ => {}
            }
            if let Some(old) = old {
                remove_pieces(op, ino, &old)?;
            }
            entries.push(store_value(op, ino, &mut inode, name, value)?);
            let record = encode_xattrs(&entries);
            if record.len() > MAX_VALUE {
                // Three long values under the same keyed 64-bit hash: not to be found without the key.
                return Err(Error::NoSpace("too many attributes share one hash".into()));
            }
            op.insert(key, &record)?;
            inode.flags |= inode_flags::HAS_XATTRS;
            inode.ctime = now;
            inode::store(op, ino, &inode)
        })?;
        self.finish_change()
    }

    /// Names, each followed by NUL, as listxattr(2) wants them.
    pub fn list_xattrs(&self, ino: Ino) -> Result<Vec<u8>> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let mut names = Vec::new();
        if inode::load(view, ino)?.flags & inode_flags::HAS_XATTRS == 0 {
            return Ok(names);
        }
        let all = records(ino);
        view.scan(all.start, all.end, &mut |_, value| {
            for entry in decode_xattrs(value)? {
                names.extend_from_slice(&entry.name);
                names.push(0);
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(names)
    }

    /// # Errors
    /// `NoAttribute`.
    pub fn remove_xattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        // The inode and the old value.
        self.volume.operate(1 + RECORDS_OF_VALUE, true, |op| {
            let now = self.environment.now();
            let mut inode = inode::load(op.view(), ino)?;
            if !remove_entry(op, &self.name_key, ino, &mut inode, name)? {
                return Err(Error::NoAttribute);
            }
            inode.ctime = now;
            inode::store(op, ino, &inode)
        })?;
        self.finish_change()
    }
}

/// Removes an attribute if it is there; the caller stores the inode. Changes at most RECORDS_OF_VALUE records.
pub(super) fn remove_entry(
    op: &mut Operation<'_>,
    hash_key: &[u8; 16],
    ino: Ino,
    inode: &mut InodeValue,
    name: &[u8],
) -> Result<bool> {
    let key = record_key(hash_key, ino, name);
    let mut entries = load(op.view(), inode, key)?;
    let Some(at) = entries.iter().position(|entry| entry.name == name) else { return Ok(false) };
    let old = entries.remove(at);
    remove_pieces(op, ino, &old)?;
    if !entries.is_empty() {
        op.insert(key, &encode_xattrs(&entries))?;
        return Ok(true);
    }
    op.remove(key)?;
    let mut is_last = true;
    let all = records(ino);
    op.view().scan(all.start, all.end, &mut |_, _| {
        is_last = false;
        Ok(ControlFlow::Break(()))
    })?;
    if is_last {
        inode.flags &= !inode_flags::HAS_XATTRS;
    }
    Ok(true)
}

fn check_name(name: &[u8]) -> Result<()> {
    match name.len() {
        1..=MAX_NAME if !name.contains(&0) => Ok(()),
        0..=MAX_NAME => Err(Error::invalid("an attribute's name is empty or contains NUL")),
        _ => Err(Error::RangeTooSmall),
    }
}

fn record_key(hash_key: &[u8; 16], ino: Ino, name: &[u8]) -> Key {
    Key::new(ino.0, kind::XATTR, name_hash(hash_key, ino, name))
}

fn records(ino: Ino) -> Range<Key> {
    Key::new(ino.0, kind::XATTR, 0)..Key::new(ino.0, kind::XATTR_PIECE, 0)
}

/// Keys of the pieces of a value that is in pieces.
fn pieces(ino: Ino, entry: &XattrEntry) -> Range<Key> {
    let first = u64::from(entry.piece) << 32;
    let count = (entry.length as usize).div_ceil(XATTR_PIECE) as u64;
    Key::new(ino.0, kind::XATTR_PIECE, first)..Key::new(ino.0, kind::XATTR_PIECE, first + count)
}

/// The entries of a record; an inode without attributes needs no search.
fn load(view: View<'_>, inode: &InodeValue, key: Key) -> Result<Vec<XattrEntry>> {
    if inode.flags & inode_flags::HAS_XATTRS == 0 {
        return Ok(Vec::new());
    }
    Ok(view.get(key, decode_xattrs)?.unwrap_or_default())
}

fn store_value(
    op: &mut Operation<'_>,
    ino: Ino,
    inode: &mut InodeValue,
    name: &[u8],
    value: &[u8],
) -> Result<XattrEntry> {
    let length = value.len() as u32;
    if value.len() <= MAX_INSIDE {
        return Ok(XattrEntry { name: name.to_vec(), length, piece: 0, value: value.to_vec() });
    }
    let piece = inode.next_piece;
    inode.next_piece =
        piece.checked_add(1).ok_or_else(|| Error::NoSpace("an inode's piece numbers are used up".into()))?;
    let entry = XattrEntry { name: name.to_vec(), length, piece, value: Vec::new() };
    let first = pieces(ino, &entry).start;
    for (index, bytes) in value.chunks(XATTR_PIECE).enumerate() {
        op.insert(Key { sub: first.sub + index as u64, ..first }, bytes)?;
    }
    Ok(entry)
}

fn remove_pieces(op: &mut Operation<'_>, ino: Ino, entry: &XattrEntry) -> Result<()> {
    if entry.piece != 0 {
        let Range { start, end } = pieces(ino, entry);
        for sub in start.sub..end.sub {
            op.remove(Key { sub, ..start })?;
        }
    }
    Ok(())
}
