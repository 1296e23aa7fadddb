//! Moves records at hashes of names to the hashes of another volume key.

use crate::error::{Error, Result};
use crate::format::values::{decode_index, decode_xattrs, encode_index, encode_xattrs};
use crate::format::{Ino, Key, MAX_VALUE, kind};
use crate::fs::name_hash;
use crate::txn::{Difference, Operation, View};

/// Key of the new name hashes, if it differs.
pub(in crate::archive) struct NameRehash {
    new: Option<[u8; 16]>,
}

impl NameRehash {
    pub(in crate::archive) fn new(old: &[u8; 16], new: &[u8; 16]) -> NameRehash {
        NameRehash { new: (old != new).then_some(*new) }
    }

    /// Returns whether a record has another key in the new archive.
    pub(super) fn moves(&self, key: Key) -> bool {
        self.new.is_some() && matches!(key.kind, kind::DIR_INDEX | kind::XATTR)
    }

    /// Removes the entries of a moving record from their new positions, or adds them to the entries
    /// there.
    pub(super) fn change(&self, op: &mut Operation<'_>, difference: &Difference) -> Result<()> {
        let EntryChanges { gone, come } = EntryChanges::of(difference)?;
        for (name, entry) in gone {
            let place = self.place(difference.key, &name);
            let mut remaining = op.view().get(place, |there| split(place, there))?.unwrap_or_default();
            if let Some(at) = remaining.iter().position(|(_, other)| *other == entry) {
                remaining.remove(at);
            }
            let record: Vec<u8> = remaining.into_iter().flat_map(|(_, entry)| entry).collect();
            if record.is_empty() {
                op.remove(place)?
            } else {
                op.insert(place, &record)?
            };
        }
        for (name, entry) in come {
            let place = self.place(difference.key, &name);
            let mut record = op.view().get(place, |there| Ok(there.to_vec()))?.unwrap_or_default();
            record.extend_from_slice(&entry);
            if record.len() > MAX_VALUE {
                return Err(Error::Unsupported(format!("too many names share one hash: inode={}", place.object)));
            }
            op.insert(place, &record)?;
        }
        Ok(())
    }

    /// Returns the numbers of added and removed entries of a record of the old archive, after
    /// checking that each is added or removed at its new position in the new archive.
    pub(super) fn find(
        &self,
        older: Option<View<'_>>,
        newer: View<'_>,
        difference: &Difference,
    ) -> Result<Option<EntryCounts>> {
        let is_in = |view: View<'_>, (name, entry): &(Vec<u8>, Vec<u8>)| {
            let place = self.place(difference.key, name);
            let there = view.get(place, |there| split(place, there))?.unwrap_or_default();
            Ok::<_, Error>(there.iter().any(|(_, other)| other == entry))
        };
        let was_in = |entry| older.map_or(Ok(false), |older| is_in(older, entry));
        let changed = EntryChanges::of(difference)?;
        for entry in &changed.gone {
            if !was_in(entry)? || is_in(newer, entry)? {
                return Ok(None);
            }
        }
        for entry in &changed.come {
            if was_in(entry)? || !is_in(newer, entry)? {
                return Ok(None);
            }
        }
        Ok(Some(changed.numbers()))
    }

    /// Returns the numbers for a record of the new archive.
    pub(super) fn count(difference: &Difference) -> Result<EntryCounts> {
        EntryChanges::of(difference).map(|changed| changed.numbers())
    }

    fn place(&self, key: Key, name: &[u8]) -> Key {
        let hash = |new: &[u8; 16]| Key::new(key.object, key.kind, name_hash(new, Ino(key.object), name));
        self.new.as_ref().map_or(key, hash)
    }
}

/// Numbers of removed and added entries.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EntryCounts {
    gone: u64,
    come: u64,
}

impl EntryCounts {
    pub(super) fn add(&mut self, more: EntryCounts) {
        self.gone += more.gone;
        self.come += more.come;
    }
}

/// Entries of a record only in the older, and only in the newer version.
struct EntryChanges {
    gone: Vec<(Vec<u8>, Vec<u8>)>,
    come: Vec<(Vec<u8>, Vec<u8>)>,
}

impl EntryChanges {
    fn of(Difference { key, old, new }: &Difference) -> Result<EntryChanges> {
        let entries = |value: &Option<Vec<u8>>| value.as_ref().map_or(Ok(Vec::new()), |value| split(*key, value));
        let (mut gone, mut come) = (entries(old)?, entries(new)?);
        let stays = |entry: &_| gone.contains(entry) && come.contains(entry);
        let staying: Vec<_> = gone.iter().filter(|entry| stays(entry)).cloned().collect();
        gone.retain(|entry| !staying.contains(entry));
        come.retain(|entry| !staying.contains(entry));
        Ok(EntryChanges { gone, come })
    }

    fn numbers(&self) -> EntryCounts {
        EntryCounts { gone: self.gone.len() as u64, come: self.come.len() as u64 }
    }
}

/// Returns names and encoded entries of a record.
fn split(key: Key, value: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    if key.kind == kind::DIR_INDEX {
        let entries = decode_index(value)?.into_iter();
        return Ok(entries.map(|entry| (entry.name.clone(), encode_index(std::slice::from_ref(&entry)))).collect());
    }
    let entries = decode_xattrs(value)?.into_iter();
    Ok(entries.map(|entry| (entry.name.clone(), encode_xattrs(std::slice::from_ref(&entry)))).collect())
}
