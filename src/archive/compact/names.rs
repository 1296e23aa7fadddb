//! Puts records that lie at hashes of names in their places under another volume key, whose hashes differ.

use crate::error::{Error, Result};
use crate::format::values::{decode_index, decode_xattrs, encode_index, encode_xattrs};
use crate::format::{Ino, Key, MAX_VALUE, kind};
use crate::fs::name_hash;
use crate::txn::{Difference, Operation, View};

/// The new key of name hashes, if it is another one.
pub(in crate::archive) struct Names {
    new: Option<[u8; 16]>,
}

impl Names {
    pub(in crate::archive) fn new(old: &[u8; 16], new: &[u8; 16]) -> Names {
        Names { new: (old != new).then_some(*new) }
    }

    /// Whether a record lies elsewhere in the new archive.
    pub(super) fn moves(&self, key: Key) -> bool {
        self.new.is_some() && matches!(key.kind, kind::DIR_INDEX | kind::XATTR)
    }

    /// Takes the entries of a record that moves away from their new places, or puts them beside those that are there already.
    pub(super) fn change(&self, op: &mut Operation<'_>, difference: &Difference) -> Result<()> {
        let Changed { gone, come } = Changed::of(difference)?;
        for (name, entry) in gone {
            let place = self.place(difference.key, &name);
            let mut left = op.view().get(place, |there| split(place, there))?.unwrap_or_default();
            if let Some(at) = left.iter().position(|(_, other)| *other == entry) {
                left.remove(at);
            }
            let record: Vec<u8> = left.into_iter().flat_map(|(_, entry)| entry).collect();
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

    /// How many entries of a record of the old archive come and go, if each does so at its new place in the new archive.
    pub(super) fn find(
        &self,
        older: Option<View<'_>>,
        newer: View<'_>,
        difference: &Difference,
    ) -> Result<Option<Numbers>> {
        let is_in = |view: View<'_>, (name, entry): &(Vec<u8>, Vec<u8>)| {
            let place = self.place(difference.key, name);
            let there = view.get(place, |there| split(place, there))?.unwrap_or_default();
            Ok::<_, Error>(there.iter().any(|(_, other)| other == entry))
        };
        let was_in = |entry| older.map_or(Ok(false), |older| is_in(older, entry));
        let changed = Changed::of(difference)?;
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

    /// The same number of a record of the new archive.
    pub(super) fn count(difference: &Difference) -> Result<Numbers> {
        Changed::of(difference).map(|changed| changed.numbers())
    }

    fn place(&self, key: Key, name: &[u8]) -> Key {
        let hash = |new: &[u8; 16]| Key::new(key.object, key.kind, name_hash(new, Ino(key.object), name));
        self.new.as_ref().map_or(key, hash)
    }
}

/// How many entries go and come.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Numbers {
    gone: u64,
    come: u64,
}

impl Numbers {
    pub(super) fn add(&mut self, more: Numbers) {
        self.gone += more.gone;
        self.come += more.come;
    }
}

/// Entries that only the older moment has in a record, and those that only the newer one has.
struct Changed {
    gone: Vec<(Vec<u8>, Vec<u8>)>,
    come: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Changed {
    fn of(Difference { key, old, new }: &Difference) -> Result<Changed> {
        let entries = |value: &Option<Vec<u8>>| value.as_ref().map_or(Ok(Vec::new()), |value| split(*key, value));
        let (mut gone, mut come) = (entries(old)?, entries(new)?);
        let stays = |entry: &_| gone.contains(entry) && come.contains(entry);
        let staying: Vec<_> = gone.iter().filter(|entry| stays(entry)).cloned().collect();
        gone.retain(|entry| !staying.contains(entry));
        come.retain(|entry| !staying.contains(entry));
        Ok(Changed { gone, come })
    }

    fn numbers(&self) -> Numbers {
        Numbers { gone: self.gone.len() as u64, come: self.come.len() as u64 }
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
