//! Puts records that lie at hashes of names in their places under another volume key, whose hashes differ.

use crate::error::{Error, Result};
use crate::format::values::{decode_index, decode_xattrs, encode_index, encode_xattrs};
use crate::format::{Ino, Key, MAX_VALUE, kind};
use crate::fs::name_hash;
use crate::txn::{Operation, View};

/// The new key of name hashes, if it is another one.
pub(super) struct Names {
    new: Option<[u8; 16]>,
}

impl Names {
    pub(super) fn new(old: &[u8; 16], new: &[u8; 16]) -> Names {
        Names { new: (old != new).then_some(*new) }
    }

    /// Whether a record lies elsewhere in the new archive.
    pub(super) fn moves(&self, key: Key) -> bool {
        self.new.is_some() && matches!(key.kind, kind::DIR_INDEX | kind::XATTR)
    }

    /// Puts the entries of a record that moves beside those that are at their new places already.
    pub(super) fn insert(&self, op: &mut Operation<'_>, key: Key, value: &[u8]) -> Result<()> {
        for (place, entry) in self.entries(key, value)? {
            let mut record = op.view().get(place, |there| Ok(there.to_vec()))?.unwrap_or_default();
            record.extend_from_slice(&entry);
            if record.len() > MAX_VALUE {
                return Err(Error::Unsupported(format!("too many names share one hash: inode={}", key.object)));
            }
            op.insert(place, &record)?;
        }
        Ok(())
    }

    /// Whether every entry of the old record is at its new place, and how many there are.
    pub(super) fn find(&self, new: View<'_>, key: Key, value: &[u8]) -> Result<Option<u64>> {
        let entries = self.entries(key, value)?;
        for (place, entry) in &entries {
            let there = new.get(*place, |there| split(*place, there))?.unwrap_or_default();
            if !there.iter().any(|(_, other)| other == entry) {
                return Ok(None);
            }
        }
        Ok(Some(entries.len() as u64))
    }

    /// Entries of a record of the new archive.
    pub(super) fn count(key: Key, value: &[u8]) -> Result<u64> {
        Ok(split(key, value)?.len() as u64)
    }

    fn entries(&self, key: Key, value: &[u8]) -> Result<Vec<(Key, Vec<u8>)>> {
        let Some(new) = &self.new else { return Ok(Vec::new()) };
        let place = |name: &[u8]| Key::new(key.object, key.kind, name_hash(new, Ino(key.object), name));
        Ok(split(key, value)?.into_iter().map(|(name, entry)| (place(&name), entry)).collect())
    }
}

/// Names and encoded entries of a record.
fn split(key: Key, value: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    if key.kind == kind::DIR_INDEX {
        let entries = decode_index(value)?.into_iter();
        return Ok(entries.map(|entry| (entry.name.clone(), encode_index(std::slice::from_ref(&entry)))).collect());
    }
    let entries = decode_xattrs(value)?.into_iter();
    Ok(entries.map(|entry| (entry.name.clone(), encode_xattrs(std::slice::from_ref(&entry)))).collect())
}
