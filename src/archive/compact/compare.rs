//! Compares all versions of two volumes by reading both.
//!
//! # Why comparing differences suffices
//!
//! By induction over the versions. Before the first version both are empty, and its differences are
//! all of its records. If all previous versions are equal, and the step to the next one changes the
//! same keys to the same values in both, then the next version is equal too; unchanged data is in
//! the same nodes and pages as before, because the walk over differences skips only shared ones,
//! and need not be read again. Records that move with the hashes of names are compared entry by
//! entry: each entry added or removed in the old archive is added or removed at its new position in
//! the new one, and the numbers are equal, so there are no others.
//!
//! Extents are equal if their bytes are, wherever they are stored. Their *born* differs: it must be
//! after the new archive's previous snapshot and not after the version itself, which decides
//! between freeing a page and keeping it (specification section 8).

use super::BytesWatch;
use super::names::{EntryCounts, NameRehash};
use super::versions::{ArchiveVersions, VersionStep};
use crate::error::{Error, Result};
use crate::format::values::Extent;
use crate::format::{Generation, Key, kind};
use crate::txn::Volume;

/// Compares all versions: equal records, and equal bytes of every extent.
///
/// # Errors
/// `Damaged` naming the inode that differs.
pub(in crate::archive) fn compare(
    from: &Volume,
    to: &Volume,
    names: &NameRehash,
    watch: &mut BytesWatch<'_>,
) -> Result<()> {
    let (old, new) = (ArchiveVersions::of(from)?, ArchiveVersions::of(to)?);
    if !old.are_named_as(&new) {
        return Err(Error::damaged("the new archive has other snapshots"));
    }
    let mut comparison = Comparison { from, to, names, before: Generation(0), done: 0, watch };
    for number in 0..old.count() {
        let (ours, theirs) = (old.step(number)?, new.step(number)?);
        comparison.step(&ours, &theirs).map_err(|error| ours.named(error))?;
        comparison.before = theirs.generation();
    }
    Ok(())
}

struct Comparison<'a, 'w> {
    from: &'a Volume,
    to: &'a Volume,
    names: &'a NameRehash,
    /// Generation of the previous version in the new archive.
    before: Generation,
    /// Bytes of file data compared.
    done: u64,
    watch: &'a mut BytesWatch<'w>,
}

fn differs(key: Key) -> Error {
    Error::damaged(format!("the new archive differs: inode={} kind={}", key.object, key.kind))
}

impl Comparison<'_, '_> {
    fn step(&mut self, ours: &VersionStep<'_>, theirs: &VersionStep<'_>) -> Result<()> {
        let names = self.names;
        let (mut old, mut new) = (ours.walk(), theirs.walk());
        let (mut moved, mut found) = (EntryCounts::default(), EntryCounts::default());
        loop {
            let one = old.next(|difference| match names.moves(difference.key) {
                true => {
                    let there = names.find(theirs.older(), theirs.newer(), difference)?;
                    moved.add(there.ok_or_else(|| differs(difference.key))?);
                    Ok(false)
                }
                false => Ok(true),
            })?;
            let other = new.next(|difference| match names.moves(difference.key) {
                true => {
                    found.add(NameRehash::count(difference)?);
                    Ok(false)
                }
                false => Ok(true),
            })?;
            let (one, other) = match (one, other) {
                (Some(one), Some(other)) => (one, other),
                (None, None) if moved == found => return Ok(()),
                _ => return Err(Error::damaged("the new archive has another number of records")),
            };
            let key = one.key;
            let same = key == other.key
                && one.old.is_some() == other.old.is_some()
                && match (&one.new, &other.new) {
                    (Some(value), Some(new_value)) if key.kind == kind::EXTENT => {
                        self.same_bytes(value, new_value, theirs.generation())?
                    }
                    (value, new_value) => value == new_value,
                };
            if !same {
                return Err(differs(key));
            }
            (self.watch)(self.done)?;
        }
    }

    fn same_bytes(&mut self, ours: &[u8], theirs: &[u8], moment: Generation) -> Result<bool> {
        let (ours, theirs) = (Extent::decode(ours)?, Extent::decode(theirs)?);
        if ours.length != theirs.length || theirs.born <= self.before || theirs.born > moment {
            return Ok(false);
        }
        self.done += u64::from(ours.length);
        Ok(bytes(self.from, &ours)? == bytes(self.to, &theirs)?)
    }
}

/// Returns the bytes of an extent.
pub(in crate::archive) fn bytes(volume: &Volume, extent: &Extent) -> Result<Vec<u8>> {
    let mut bytes = vec![0; extent.length as usize];
    volume.read_data(&extent.page, extent.start, &mut bytes)?;
    Ok(bytes)
}
