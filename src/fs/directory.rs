//! Edits and searches the two records of a directory entry: by keyed name hash for lookup, by sequence number for listing (specification 7).

use std::hash::Hasher;

use siphasher::sip::SipHasher24;

use super::FileSystem;
use super::inode;
use crate::error::{Error, Result};
use crate::format::values::{
    IndexEntry, InodeValue, ListEntry, decode_index, encode_index, encode_list, find_in_index,
};
use crate::format::{Ino, Key, MAX_VALUE, Timestamp, kind};
use crate::txn::{Operation, View};

/// An entry as lookup finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) ino: Ino,
    pub(crate) file_type: u8,
    pub(crate) sequence: u64,
}

/// Records that one entry takes: index and list, beside the inodes of the directory and the object.
pub(crate) const ENTRY_RECORDS: u64 = 2;

/// Checks a name that is to be created, moved or removed; `.` and `..` are the caller's to refuse.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
        return Err(Error::invalid("impossible file name"));
    }
    if name.len() > 255 {
        return Err(Error::NameTooLong);
    }
    Ok(())
}

impl FileSystem {
    /// SipHash-2-4 of `number || name` under the archive's name key; xattr names use it too.
    pub(crate) fn name_hash(&self, owner: Ino, name: &[u8]) -> u64 {
        let mut hasher = SipHasher24::new_with_key(&self.name_key);
        hasher.write(&owner.0.to_le_bytes());
        hasher.write(name);
        hasher.finish()
    }

    fn index_key(&self, directory: Ino, name: &[u8]) -> Key {
        Key::new(directory.0, kind::DIR_INDEX, self.name_hash(directory, name))
    }

    pub(crate) fn find_entry(&self, view: View<'_>, directory: Ino, name: &[u8]) -> Result<Option<Found>> {
        let found = view.get(self.index_key(directory, name), |value| find_in_index(value, name))?.flatten();
        Ok(found.map(|(ino, file_type, sequence)| Found { ino, file_type, sequence }))
    }

    /// Adds an entry that is known not to exist; the directory's count and times change in `inode`, which the caller stores.
    pub(crate) fn add_entry(
        &self,
        op: &mut Operation<'_>,
        directory: Ino,
        inode: &mut InodeValue,
        name: &[u8],
        ino: Ino,
        file_type: u8,
        now: Timestamp,
    ) -> Result<()> {
        let sequence = inode.next_sequence;
        let key = self.index_key(directory, name);
        let mut entries = op.view().get(key, decode_index)?.unwrap_or_default();
        entries.push(IndexEntry { name: name.to_vec(), file_type, sequence, ino });
        let value = encode_index(&entries);
        if value.len() > MAX_VALUE {
            // More than a dozen names with the same keyed 64-bit hash: cannot be brought about without the key.
            return Err(Error::NoSpace("too many names with one hash".into()));
        }
        op.insert(key, &value)?;
        let list = encode_list(&ListEntry { name, file_type, ino });
        op.insert(Key::new(directory.0, kind::DIR_LIST, sequence), &list)?;
        inode.next_sequence += 1;
        inode.size += 1;
        inode.mtime = now;
        inode.ctime = now;
        Ok(())
    }

    /// Takes an entry out; the directory's count and times change in `inode`, which the caller stores.
    pub(crate) fn remove_entry(
        &self,
        op: &mut Operation<'_>,
        directory: Ino,
        inode: &mut InodeValue,
        name: &[u8],
        now: Timestamp,
    ) -> Result<()> {
        let key = self.index_key(directory, name);
        let mut entries = op.view().get(key, decode_index)?.unwrap_or_default();
        let position = entries.iter().position(|entry| entry.name == name).ok_or(Error::NotFound)?;
        let entry = entries.remove(position);
        if entries.is_empty() {
            op.remove(key)?;
        } else {
            op.insert(key, &encode_index(&entries))?;
        }
        op.remove(Key::new(directory.0, kind::DIR_LIST, entry.sequence))?;
        inode.size = inode.size.saturating_sub(1);
        inode.mtime = now;
        inode.ctime = now;
        Ok(())
    }

    /// Lets an existing entry name another object, keeping its place in the listing.
    pub(crate) fn retarget_entry(
        &self,
        op: &mut Operation<'_>,
        directory: Ino,
        name: &[u8],
        ino: Ino,
        file_type: u8,
    ) -> Result<()> {
        let key = self.index_key(directory, name);
        let mut entries = op.view().get(key, decode_index)?.unwrap_or_default();
        let entry = entries.iter_mut().find(|entry| entry.name == name).ok_or(Error::NotFound)?;
        entry.ino = ino;
        entry.file_type = file_type;
        let sequence = entry.sequence;
        op.insert(key, &encode_index(&entries))?;
        let list = encode_list(&ListEntry { name, file_type, ino });
        op.insert(Key::new(directory.0, kind::DIR_LIST, sequence), &list)?;
        Ok(())
    }

    /// Whether `directory` is `ancestor` or lies below it.
    pub(crate) fn is_below(&self, view: View<'_>, directory: Ino, ancestor: Ino) -> Result<bool> {
        let mut at = directory;
        loop {
            if at == ancestor {
                return Ok(true);
            }
            let parent = inode::load(view, at)?.parent;
            if parent == at || at == crate::format::ROOT_INO {
                return Ok(false);
            }
            at = parent;
        }
    }
}
