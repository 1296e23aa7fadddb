//! Writes the moments of one volume into a new one, each as what differs from the one before.
//!
//! # Why the new archive keeps what it has to
//! For each snapshot, the oldest first, its tree is made the live tree of the new archive, by changing what differs from the moment before it; then a snapshot
//! is taken there; at the end comes the live tree. So the new archive has a history like any other, whose commits, snapshots, counts and dead lists were
//! made by the code that always makes them, and only what differs is written again.
//!
//! - *Born* is the generation of the new archive in which the extent came, not that of the old one, whose numbers say nothing of these snapshots. An extent
//!   that comes with a moment is born after the snapshot before it was taken, and no later than its own, which is what specification section 8 asks for.
//!   One that stays from moment to moment is no difference and keeps its record.
//! - An extent that goes was shown by the moment before, so it was born no later than the newest snapshot, and `Operation::release` puts it on the dead list of
//!   that one with its count. No count is ever taken away. So the count of a page is the number of extents that come with any moment and name it, and is set
//!   once, when the page is written (`Pages::carry`). Until the last of them has come it says too much, which nobody sees (COMPACT-2).
//! - A page that several extents name, in one moment or in several, is written once, with all that any of them names (`Pages::announce`). The old archive counts
//!   such a page at least twice: an extent that a snapshot shows keeps its count when it leaves the live tree, and one that names the page in its place
//!   has another. Where a hostile archive says otherwise the page is written twice, which is as sound.
//! - Trees are taken as they are, those of snapshots with the orphans and the cuts of their moments: an orphan may have got a name in the next one. Of
//!   the live tree none are left, because the session before has removed them (COMPACT-1).
//! - Snapshots get new numbers, from the counter that goes on: one that a program knows of the old file never comes to mean another snapshot.

use std::convert::identity;

use super::Watch;
use super::names::Names;
use super::pages::Pages;
use super::versions::{Moments, Step};
use crate::archive::relay::relay;
use crate::error::Result;
use crate::format::values::Extent;
use crate::format::{Pointer, kind};
use crate::txn::{Difference, Operation, Volume};

/// Copies all moments, and the history of sessions.
pub(super) fn copy(from: &Volume, to: &Volume, names: &Names, watch: &mut Watch<'_>) -> Result<()> {
    let moments = Moments::of(from)?;
    let state = from.state();
    let mut pages = Pages::new(from, &state, to, identity);
    for number in 0..moments.count() {
        let step = moments.step(number)?;
        announce(&step, &mut pages, watch).map_err(|error| step.named(error))?;
    }
    copy_history(from, to)?;
    let mut replay = Replay { pages, to, names, done: 0, watch };
    for number in 0..moments.count() {
        let step = moments.step(number)?;
        replay.step(&step).map_err(|error| step.named(error))?;
        if let Some(kept) = step.kept() {
            to.take_snapshot_again(kept)?;
        }
    }
    to.close()
}

fn announce(step: &Step<'_>, pages: &mut Pages<'_>, watch: &mut Watch<'_>) -> Result<()> {
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

struct Replay<'a, 'w> {
    pages: Pages<'a>,
    to: &'a Volume,
    names: &'a Names,
    /// Bytes of file data.
    done: u64,
    watch: &'a mut Watch<'w>,
}

/// What one operation changes; its pages are written.
type Part = (Vec<Difference>, Vec<(Pointer, u32)>);

impl Replay<'_, '_> {
    fn step(&mut self, step: &Step<'_>) -> Result<()> {
        let Replay { pages, to, names, done, watch } = self;
        let mut walk = step.walk();
        let read = |hand_on: &mut dyn FnMut(Part) -> Result<()>| {
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
        relay(read, |(batch, adopted): Part| {
            // Each with an entry of a dead list; a reference count above 1 changes three records at most.
            let records = 2 * batch.len() as u64 + 3 * adopted.len() as u64;
            to.operate(records, false, |op| {
                adopted.iter().try_for_each(|(page, extents)| op.adopt(page, *extents))?;
                batch.iter().try_for_each(|difference| change(op, names, difference))
            })
        })
    }
}

fn change(op: &mut Operation<'_>, names: &Names, difference: &Difference) -> Result<()> {
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

/// Its page is placed already, and counted.
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
