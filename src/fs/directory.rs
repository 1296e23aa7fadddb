//! Edits and searches the two records of a directory entry (specification 7).
//!
//! # Invariants
//! NAME-1  Every entry has one index entry (found by the hash of its name) and one list record (at
//!     its sequence number) that agree.
//! NAME-2  A directory's size is the number of its entries, its links are 2 plus the number of its
//!     subdirectories.
//! NAME-3  A sequence number is never reused for another entry; renaming within the directory and
//!     replacing the target keep it.
//! NAME-4  A directory without a name has no entries and gets none.
//! NAME-5  An entry is followed, listed with attributes and changed only if its inode has the type
//!     in the entry and, for a directory, the entry's directory as its parent. So every directory
//!     that is reached has one path to the root: a key holder can write cycles and entries of other
//!     directories' children, but they are never followed, and removing such a name removes nothing
//!     else.

use std::hash::Hasher;
use std::ops::{ControlFlow, Range};

use siphasher::sip::SipHasher24;

use super::{inode, mode};
use crate::error::{Error, Result, Timestamp};
use crate::format::values::{
    IndexEntry, InodeValue, ListEntry, decode_index, encode_index, encode_list, find_in_index,
};
use crate::format::{Ino, Key, MAX_NAME, MAX_VALUE, ROOT_INO, kind};
use crate::txn::{Operation, View};

/// First sequence number of a directory: 1 and 2 are the cookies of `.` and `..`.
pub(crate) const FIRST_SEQUENCE: u64 = 3;
/// One less than the greatest u32, which some programs take as "unknown".
pub(crate) const MAX_LINKS: u32 = u32::MAX - 1;
pub(crate) const DIRECTORY_TYPE: u8 = file_type(mode::DIRECTORY);

pub(crate) const fn file_type(mode: u32) -> u8 {
    ((mode & mode::TYPE) >> 12) as u8
}

/// With this key every directory and inode has only four different name hashes.
#[cfg(test)]
pub(crate) const COLLIDING_KEY: [u8; 16] = [0xC0; 16];

/// Returns the hash under which the entry or attribute `name` of `owner` is stored.
pub(crate) fn name_hash(key: &[u8; 16], owner: Ino, name: &[u8]) -> u64 {
    let mut hasher = SipHasher24::new_with_key(key);
    hasher.write(&owner.0.to_le_bytes());
    hasher.write(name);
    let hash = hasher.finish();
    #[cfg(test)]
    if *key == COLLIDING_KEY {
        return hash % 4;
    }
    hash
}

/// Refuses invalid names. `.` and `..` pass: each operation has its own error for them.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() {
        return Err(Error::NotFound);
    }
    if name.len() > MAX_NAME {
        return Err(Error::NameTooLong);
    }
    if name.iter().any(|&byte| byte == b'/' || byte == 0) {
        return Err(Error::invalid("a name contains a slash or NUL"));
    }
    Ok(())
}

pub(crate) fn check_new_name(name: &[u8]) -> Result<()> {
    check_name(name)?;
    if is_dot(name) { Err(Error::Exists) } else { Ok(()) }
}

pub(crate) fn is_dot(name: &[u8]) -> bool {
    name == b"." || name == b".."
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryTarget {
    pub(crate) ino: Ino,
    pub(crate) file_type: u8,
}

impl EntryTarget {
    pub(crate) fn of(ino: Ino, inode: &InodeValue) -> EntryTarget {
        EntryTarget { ino, file_type: file_type(inode.mode) }
    }

    pub(crate) fn is_directory(self) -> bool {
        self.file_type == DIRECTORY_TYPE
    }
}

/// Returns the inode of an entry of `directory` in the same version (NAME-5). Errors: `Damaged`
/// when it is missing, of another type, or a directory with another parent.
pub(crate) fn load_target(view: View<'_>, directory: Ino, target: EntryTarget) -> Result<InodeValue> {
    let inode = inode::load_named(view, target.ino)?;
    match is_consistent_target(directory, target, &inode) {
        true => Ok(inode),
        false => Err(Error::damaged(format!("an entry does not match its inode: inode={}", target.ino.0))),
    }
}

/// Returns whether a directory has entries, according to its inode or its list. The size in the
/// inode alone is not sufficient to delete them.
pub(crate) fn has_entries(view: View<'_>, ino: Ino, inode: &InodeValue) -> Result<bool> {
    Ok(inode.size != 0 || has_records(view, list_key(ino, 0)..Key::new(ino.0, kind::DIR_LIST + 1, 0))?)
}

pub(super) fn has_records(view: View<'_>, keys: Range<Key>) -> Result<bool> {
    let mut any = false;
    view.scan(keys.start, keys.end, &mut |_, _| {
        any = true;
        Ok(ControlFlow::Break(()))
    })?;
    Ok(any)
}

/// Loads a directory; `NotFound` when it is removed. One that is removed but still open has no
/// links.
pub(super) fn load_directory(view: View<'_>, ino: Ino) -> Result<InodeValue> {
    let inode = inode::find(view, ino)?.ok_or(Error::NotFound)?;
    if inode.mode & mode::TYPE != mode::DIRECTORY {
        return Err(Error::NotDirectory);
    }
    Ok(inode)
}

/// Returns whether the inode may be the target of an entry of `directory` (NAME-5).
pub(crate) fn is_consistent_target(directory: Ino, target: EntryTarget, inode: &InodeValue) -> bool {
    let is_in_place = !target.is_directory() || (inode.parent == directory && target.ino != ROOT_INO);
    file_type(inode.mode) == target.file_type && is_in_place
}

/// Contents of the two records of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectoryRecord {
    pub(crate) target: EntryTarget,
    pub(crate) sequence: u64,
}

pub(crate) fn index_key(hash_key: &[u8; 16], directory: Ino, name: &[u8]) -> Key {
    Key::new(directory.0, kind::DIR_INDEX, name_hash(hash_key, directory, name))
}

pub(crate) fn list_key(directory: Ino, sequence: u64) -> Key {
    Key::new(directory.0, kind::DIR_LIST, sequence)
}

pub(crate) fn find(
    view: View<'_>,
    hash_key: &[u8; 16],
    directory: Ino,
    name: &[u8],
) -> Result<Option<DirectoryRecord>> {
    let found = view.get(index_key(hash_key, directory, name), |value| find_in_index(value, name))?;
    Ok(found
        .flatten()
        .map(|(ino, file_type, sequence)| DirectoryRecord { target: EntryTarget { ino, file_type }, sequence }))
}

pub(crate) fn put_in_index(op: &mut Operation<'_>, key: Key, name: &[u8], found: DirectoryRecord) -> Result<()> {
    let DirectoryRecord { target: EntryTarget { ino, file_type }, sequence } = found;
    let mut entries = op.view().get(key, decode_index)?.unwrap_or_default();
    entries.retain(|entry| entry.name != name);
    entries.push(IndexEntry { name: name.to_vec(), file_type, sequence, ino });
    let value = encode_index(&entries);
    if value.len() > MAX_VALUE {
        // 13 names with the same keyed 64-bit hash: infeasible to find without the key.
        return Err(Error::NoSpace("too many names share one hash".into()));
    }
    op.insert(key, &value).map(drop)
}

pub(crate) fn put_in_list(op: &mut Operation<'_>, directory: Ino, name: &[u8], found: DirectoryRecord) -> Result<()> {
    let DirectoryRecord { target: EntryTarget { ino, file_type }, sequence } = found;
    op.insert(list_key(directory, sequence), &encode_list(&ListEntry { name, file_type, ino })).map(drop)
}

/// A directory that an operation changes. Its records are written at once, its inode by `store`.
pub(crate) struct DirectoryEditor<'k> {
    name_key: &'k [u8; 16],
    pub(crate) ino: Ino,
    pub(crate) inode: InodeValue,
}

impl<'k> DirectoryEditor<'k> {
    /// Loads the directory. `NotFound` when it was removed (NAME-4): the caller has it as a working
    /// directory or by a handle.
    pub(crate) fn load(view: View<'_>, name_key: &'k [u8; 16], ino: Ino) -> Result<DirectoryEditor<'k>> {
        let inode = load_directory(view, ino)?;
        if inode.links == 0 {
            return Err(Error::NotFound);
        }
        Ok(DirectoryEditor { name_key, ino, inode })
    }

    /// Appends an entry. Changes 2 records.
    pub(crate) fn insert(&mut self, op: &mut Operation<'_>, name: &[u8], target: EntryTarget) -> Result<()> {
        let found = self.allocate_sequence(target)?;
        self.put(op, name, found)
    }

    /// Allocates a sequence number at the end for an entry, and counts it; the caller puts both
    /// records.
    pub(crate) fn allocate_sequence(&mut self, target: EntryTarget) -> Result<DirectoryRecord> {
        self.count_subdirectory(None, Some(target))?;
        let sequence = self.inode.next_sequence;
        // Sequence numbers are never reused; only a forged archive has one at the end of its range.
        let next = sequence.checked_add(1);
        self.inode.next_sequence = next.ok_or_else(|| Error::damaged("a directory has used up its numbers"))?;
        self.inode.size = self.inode.size.saturating_add(1);
        Ok(DirectoryRecord { target, sequence })
    }

    /// Removes an entry that `find` returned in the same operation. Changes 2 records.
    pub(crate) fn remove(&mut self, op: &mut Operation<'_>, name: &[u8], found: DirectoryRecord) -> Result<()> {
        self.count_subdirectory(Some(found.target), None)?;
        self.inode.size = self.inode.size.saturating_sub(1);
        self.remove_from_index(op, name)?;
        op.remove(list_key(self.ino, found.sequence)).map(drop)
    }

    /// Makes an entry reference another inode. Changes 2 records.
    pub(crate) fn retarget(
        &mut self,
        op: &mut Operation<'_>,
        name: &[u8],
        found: DirectoryRecord,
        target: EntryTarget,
    ) -> Result<()> {
        self.count_subdirectory(Some(found.target), Some(target))?;
        self.put(op, name, DirectoryRecord { target, ..found })
    }

    /// Gives an entry another, free name; its position in the listing stays. Changes 3 records.
    pub(crate) fn rename(
        &mut self,
        op: &mut Operation<'_>,
        name: &[u8],
        new_name: &[u8],
        found: DirectoryRecord,
    ) -> Result<()> {
        self.remove_from_index(op, name)?;
        self.put(op, new_name, found)
    }

    /// Writes the inode of the changed directory. Changes 1 record.
    pub(crate) fn store(&mut self, op: &mut Operation<'_>, now: Timestamp) -> Result<()> {
        self.inode.mtime = now;
        self.inode.ctime = now;
        inode::store(op, self.ino, &self.inode)
    }

    fn count_subdirectory(&mut self, old: Option<EntryTarget>, new: Option<EntryTarget>) -> Result<()> {
        match (old.is_some_and(EntryTarget::is_directory), new.is_some_and(EntryTarget::is_directory)) {
            (false, true) if self.inode.links >= MAX_LINKS => return Err(Error::TooManyLinks),
            (false, true) => self.inode.links += 1,
            (true, false) => self.inode.links = self.inode.links.saturating_sub(1),
            _ => {}
        }
        Ok(())
    }

    /// Writes both records of an entry, and replaces records of the same name and sequence number.
    fn put(&self, op: &mut Operation<'_>, name: &[u8], found: DirectoryRecord) -> Result<()> {
        put_in_index(op, index_key(self.name_key, self.ino, name), name, found)?;
        put_in_list(op, self.ino, name, found)
    }

    fn remove_from_index(&self, op: &mut Operation<'_>, name: &[u8]) -> Result<()> {
        let key = index_key(self.name_key, self.ino, name);
        let mut entries = op.view().get(key, decode_index)?.unwrap_or_default();
        entries.retain(|entry| entry.name != name);
        if entries.is_empty() {
            op.remove(key)?;
        } else {
            op.insert(key, &encode_index(&entries))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_hash_is_siphash_2_4_of_owner_and_name() {
        // The reference vector of SipHash-2-4 for the bytes 0..15 under the key 0..16 (Aumasson and
        // Bernstein, appendix A).
        let key: [u8; 16] = std::array::from_fn(|i| i as u8);
        let name: Vec<u8> = (8..15).collect();
        assert_eq!(name_hash(&key, Ino(0x0706_0504_0302_0100), &name), 0xa129_ca61_49be_45e5);
    }

    #[test]
    fn impossible_names_are_refused() {
        assert!(matches!(check_name(b""), Err(Error::NotFound)));
        assert!(matches!(check_name(&[b'a'; 256]), Err(Error::NameTooLong)));
        assert!(matches!(check_name(b"a/b"), Err(Error::Invalid(_))));
        assert!(matches!(check_name(b"a\0"), Err(Error::Invalid(_))));
        assert!(check_name(&[0xff; 255]).is_ok());
    }
}
