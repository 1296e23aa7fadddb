//! Copies all versions of one volume into a new one, each as the differences to the previous
//! version.
//!
//! # Why the new archive preserves the required invariants
//!
//! For each snapshot, oldest first, the live tree of the new archive is changed to equal it, by
//! applying the differences to the previous version; then a snapshot is created. The live tree
//! follows at the end. The new archive thus has a regular history, with commits, snapshots, counts
//! and dead lists created by the regular code, and only differences are written.
//!
//! - *Born* is the generation of the new archive in which the extent was added, since the old
//!   generations do not relate to the new snapshots. An extent added with a version is born after
//!   the previous snapshot was created, and no later than its own, as specification section 8
//!   requires. An extent that remains is not a difference and keeps its record.
//! - A removed extent was in the previous version, so it was born no later than the newest
//!   snapshot, and `Operation::release` moves it to the dead list of that snapshot with its count.
//!   Counts never decrease. The count of a page is therefore the number of extents in all versions
//!   that name it, and is set once, when the page is written (`PageCopier::carry`). Until the last
//!   of them is added the count is too high, which is never observed (COMPACT-2).
//! - A page named by several extents, in one version or in several, is written once, with all
//!   ranges that any of them names (`PageCopier::announce`). The old archive counts such a page at
//!   least twice: an extent in a snapshot keeps its count when it leaves the live tree, and the
//!   extent that names the page instead has another. If a hostile archive contradicts that, the
//!   page is written twice, which is valid.
//! - Trees are copied as they are, including the orphans and pending truncations in snapshots: an
//!   orphan may have a name in the next version. The live tree has none, because the session before
//!   has removed them (COMPACT-1).
//! - Snapshots get new ids from the continuing counter, so an id that a program read from the old
//!   file never denotes another snapshot.

use std::convert::identity;

use super::BytesWatch;
use super::names::NameRehash;
use super::pages::PageCopier;
use super::versions::{ArchiveVersions, VersionStep};
use crate::archive::relay::relay;
use crate::error::Result;
use crate::format::values::Extent;
use crate::format::{Pointer, kind};
use crate::txn::{Difference, Operation, Volume};

/// Copies all versions, and the history of sessions.
pub(super) fn copy(from: &Volume, to: &Volume, names: &NameRehash, watch: &mut BytesWatch<'_>) -> Result<()> {
    let moments = ArchiveVersions::of(from)?;
    let state = from.state();
    let mut pages = PageCopier::new(from, &state, to, identity);
    for number in 0..moments.count() {
        let step = moments.step(number)?;
        announce(&step, &mut pages, watch).map_err(|error| step.named(error))?;
    }
    copy_history(from, to)?;
    let mut replay = VersionReplay { pages, to, names, done: 0, watch };
    for number in 0..moments.count() {
        let step = moments.step(number)?;
        replay.step(&step).map_err(|error| step.named(error))?;
        if let Some(snapshot) = step.snapshot() {
            to.take_snapshot_again(snapshot)?;
        }
    }
    to.close()
}

fn announce(step: &VersionStep<'_>, pages: &mut PageCopier<'_>, watch: &mut BytesWatch<'_>) -> Result<()> {
    let mut walk = step.walk();
    loop {
        let batch = walk.batch()?;
        if batch.is_empty() {
            return Ok(());
        }
        for value in batch.iter().filter(|one| one.key.kind == kind::EXTENT).filter_map(|one| one.new.as_ref()) {
            pages.announce(&Extent::decode(value)?)?;
        }
        watch(0)?;
    }
}

struct VersionReplay<'a, 'w> {
    pages: PageCopier<'a>,
    to: &'a Volume,
    names: &'a NameRehash,
    /// Bytes of file data copied.
    done: u64,
    watch: &'a mut BytesWatch<'w>,
}

/// Changes of one operation; its pages are already written.
type DifferenceBatch = (Vec<Difference>, Vec<(Pointer, u32)>);

impl VersionReplay<'_, '_> {
    fn step(&mut self, step: &VersionStep<'_>) -> Result<()> {
        let VersionReplay { pages, to, names, done, watch } = self;
        let mut walk = step.walk();
        let read = |hand_on: &mut dyn FnMut(DifferenceBatch) -> Result<()>| {
            loop {
                let mut batch = walk.batch()?;
                if batch.is_empty() {
                    return Ok(());
                }
                let mut adopted = Vec::new();
                for Difference { key, new, .. } in batch.iter_mut().filter(|one| one.key.kind == kind::EXTENT) {
                    let Some(value) = new else { continue };
                    *done += pages.carry(*key, value, &mut adopted)?;
                    watch(*done)?;
                }
                hand_on((batch, adopted))?;
                watch(*done)?;
            }
        };
        relay(read, |(batch, adopted): DifferenceBatch| {
            // Each with a dead list entry; a reference count above 1 changes at most three records.
            let records = 2 * batch.len() as u64 + 3 * adopted.len() as u64;
            to.operate(records, false, |op| {
                adopted.iter().try_for_each(|(page, extents)| op.adopt(page, *extents))?;
                batch.iter().try_for_each(|difference| change(op, names, difference))
            })
        })
    }
}

fn change(op: &mut Operation<'_>, names: &NameRehash, difference: &Difference) -> Result<()> {
    let Difference { key, new, .. } = difference;
    if names.moves(*key) {
        return names.change(op, difference);
    }
    if key.kind == kind::EXTENT {
        return change_extent(op, difference);
    }
    let is_inode = key.kind == kind::INODE && key.sub == 0;
    match new {
        Some(value) if !op.insert(*key, value)? && is_inode => op.inode_made(),
        None if op.remove(*key)? && is_inode => op.inode_gone(),
        _ => {}
    }
    Ok(())
}

/// Changes an extent; its page is already written and counted.
fn change_extent(op: &mut Operation<'_>, Difference { key, new, .. }: &Difference) -> Result<()> {
    let replaced = op.view().get(*key, Extent::decode)?;
    match new {
        Some(value) => {
            let extent = Extent { born: op.generation(), ..Extent::decode(value)? };
            op.insert(*key, &extent.encode())?;
        }
        None => drop(op.remove(*key)?),
    }
    replaced.map_or(Ok(()), |extent| op.release(&extent.page, extent.born))
}

fn copy_history(from: &Volume, to: &Volume) -> Result<()> {
    for part in from.history()?.chunks(512) {
        to.operate(part.len() as u64, false, |op| {
            part.iter().try_for_each(|(key, value)| op.insert_history(*key, value))
        })?;
    }
    Ok(())
}
