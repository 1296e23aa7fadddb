//! Compares the moments of two volumes by reading both.
//!
//! # Why differences are enough
//! By induction over the moments. Nothing is the same in both before the first one, whose differences are all of its records. When the moments before are
//! the same, and the step to the next one changes the same keys to the same values in both, then those are the same too; what neither changes is, by the walk
//! over differences, the very same nodes and pages as before, which need not be read again. Records that move with the hashes of names are compared entry by
//! entry: each that comes or goes in the old archive does so at its new place in the new one, and as many come and go in both, so none does that should not.
//!
//! An extent is the same when its bytes are, wherever they lie. Its *born* is another one: it must lie behind the new archive's snapshot before the
//! moment and not behind that moment itself, which is what decides between freeing a page and keeping it (specification section 8).

use super::Watch;
use super::names::{Names, Numbers};
use super::versions::{Moments, Step};
use crate::error::{Error, Result};
use crate::format::values::Extent;
use crate::format::{Generation, Key, kind};
use crate::txn::Volume;

/// The same moments with the same records, and the same bytes behind every extent.
///
/// # Errors
/// `Damaged` naming the inode that differs.
pub(in crate::archive) fn compare(from: &Volume, to: &Volume, names: &Names, watch: &mut Watch<'_>) -> Result<()> {
    let (old, new) = (Moments::of(from)?, Moments::of(to)?);
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
    names: &'a Names,
    /// Generation of the new archive's moment before.
    before: Generation,
    /// Bytes of file data.
    done: u64,
    watch: &'a mut Watch<'w>,
}

fn differs(key: Key) -> Error {
    Error::damaged(format!("the new archive differs: inode={} kind={}", key.object, key.kind))
}

impl Comparison<'_, '_> {
    fn step(&mut self, ours: &Step<'_>, theirs: &Step<'_>) -> Result<()> {
        let names = self.names;
        let (mut old, mut new) = (ours.walk(), theirs.walk());
        let (mut moved, mut found) = (Numbers::default(), Numbers::default());
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
                    found.add(Names::count(difference)?);
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
                    (Some(value), Some(made)) if key.kind == kind::EXTENT => {
                        self.same_bytes(value, made, theirs.generation())?
                    }
                    (value, made) => value == made,
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

/// What an extent stands for.
pub(in crate::archive) fn bytes(volume: &Volume, extent: &Extent) -> Result<Vec<u8>> {
    let mut bytes = vec![0; extent.length as usize];
    volume.read_data(&extent.page, extent.start, &mut bytes)?;
    Ok(bytes)
}
