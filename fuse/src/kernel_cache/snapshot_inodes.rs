//! Inode numbers of `.snapshots`: each snapshot that was looked up is a view, with a number of its
//! own in this mount.
//!
//! # Invariants
//! VIEW-1  The upper 16 bits of an inode number are 0 in the live tree, the view's number inside a
//!     snapshot, and all ones for `.snapshots` itself. The lower 48 are the archive's inode number,
//!     which has no more (`MAX_INO`, enforced by every decoder; a larger one is damage, never
//!     another file). So no two inodes of a mount share a number, and `cmp`(1), hard links and
//!     `du`(1) are right within a view.
//! VIEW-2  A view's number belongs to one snapshot as long as the kernel knows an inode of it.
//!     Numbers are assigned in order. They are reused only when all are used up, and then only
//!     numbers that the kernel has forgotten. Until then a forgotten one is kept, because an NFS
//!     server may return to it.
//! VIEW-3  The generation of a view's inodes is the number of its snapshot, which is unique in the
//!     archive. So an old file handle, even from another mount, either finds the same snapshot or
//!     is stale. A snapshot with a number of more than 32 bits has no view, since the kernel
//!     compares no more.
//!
//! A view takes a few words of memory and holds no resource of the archive.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fuser::Generation;
use lockbox::fs::SnapshotId;
use lockbox::fs::{Ino, MAX_INO, ROOT_INO};
use lockbox::{Error, Result};
use parking_lot::RwLock;

/// Timeout of names in `.snapshots` and of that directory's attributes (KERNEL-10).
pub(crate) const SNAPSHOT_NAME_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of names and attributes inside a snapshot (KERNEL-10).
pub(crate) const SNAPSHOT_CONTENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Bits of an inode number of the archive.
const INO_BITS: u32 = MAX_INO.count_ones();
/// Upper part of the inode number of `.snapshots`.
const DIRECTORY: u16 = u16::MAX;

/// Part of the mount to which an inode number belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InodeKind {
    Live,
    /// `.snapshots` itself.
    Directory,
    /// Inode inside a snapshot.
    View(MountedView, Ino),
}

/// Snapshot with its view number in this mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MountedView {
    number: u16,
    id: u32,
}

impl MountedView {
    pub(crate) fn snapshot(self) -> SnapshotId {
        SnapshotId(self.id.into())
    }

    /// Returns the generation of the view's inodes (VIEW-3).
    pub(crate) fn generation(self) -> Generation {
        Generation(self.id.into())
    }

    /// Returns the kernel's number for an inode of the snapshot. Errors: `Damaged` if the archive's
    /// number has too many bits (VIEW-1).
    pub(crate) fn kernel_number(self, ino: Ino) -> Result<u64> {
        match ino.0 {
            number @ 1..=MAX_INO => Ok(u64::from(self.number) << INO_BITS | number),
            number => Err(Error::damaged(format!("an inode number is out of bounds: inode={number}"))),
        }
    }
}

pub(crate) const fn snapshot_dir_number() -> u64 {
    (DIRECTORY as u64) << INO_BITS | 1
}

pub(crate) fn is_live(number: u64) -> bool {
    number <= MAX_INO
}

#[derive(Default)]
pub(crate) struct ViewTable(RwLock<ViewMap>);

#[derive(Default)]
struct ViewMap {
    known: BTreeMap<u16, ViewEntry>,
    by_snapshot: HashMap<u32, u16>,
}

struct ViewEntry {
    id: u32,
    /// Lookup count: lookups sent to the kernel, less those that it forgot.
    lookups: AtomicU64,
    /// Highest inode number of the archive that the kernel may know.
    highest: AtomicU64,
    /// The kernel may have pages of a file or a link: one was opened or read.
    was_read: AtomicBool,
}

/// Lookups of one reply. If the request fails the kernel sees none of them, so all are undone
/// unless the reply is sent: a view that counts as known for ever would keep its number for ever
/// (VIEW-2).
pub(crate) struct LookupBatch<'a> {
    views: &'a ViewTable,
    numbers: Vec<u64>,
}

impl LookupBatch<'_> {
    /// Counts a lookup as [`ViewTable::add_lookup`] does.
    pub(crate) fn add(&mut self, view: MountedView, number: u64) -> Result<()> {
        self.views.add_lookup(view, number)?;
        self.adopt(number);
        Ok(())
    }

    /// Takes over a lookup that is already counted.
    pub(crate) fn adopt(&mut self, number: u64) {
        self.numbers.push(number);
    }

    /// Undoes the last lookup, which did not fit into the reply.
    pub(crate) fn undo_last(&mut self) {
        if let Some(number) = self.numbers.pop() {
            self.views.forget(number, 1);
        }
    }

    pub(crate) fn commit(mut self) {
        self.numbers.clear();
    }
}

impl Drop for LookupBatch<'_> {
    fn drop(&mut self) {
        self.numbers.drain(..).for_each(|number| self.views.forget(number, 1));
    }
}

impl ViewTable {
    /// Resolves an inode number. Errors: `Stale` for a number without a view: the kernel may use a
    /// file handle of another mount.
    pub(crate) fn resolve(&self, number: u64) -> Result<InodeKind> {
        if is_live(number) {
            return Ok(InodeKind::Live);
        }
        if number == snapshot_dir_number() {
            return Ok(InodeKind::Directory);
        }
        let upper = (number >> INO_BITS) as u16;
        let table = self.0.read();
        let known = table.known.get(&upper).ok_or(Error::Stale)?;
        Ok(InodeKind::View(MountedView { number: upper, id: known.id }, Ino(number & MAX_INO)))
    }

    /// Returns the view of a snapshot, and counts a lookup of its root; see
    /// [`ViewTable::add_lookup`]. Errors: `Unsupported` for a snapshot that can have no view
    /// (VIEW-3), `NoSpace` if the kernel knows inodes of all view numbers.
    pub(crate) fn open(&self, id: SnapshotId) -> Result<MountedView> {
        let id = u32::try_from(id.0).ok().filter(|id| *id > 0);
        let id = id.ok_or_else(|| Error::Unsupported("views of snapshots with numbers of more than 32 bits".into()))?;
        let mut table = self.0.write();
        let number = match table.by_snapshot.get(&id) {
            Some(number) => *number,
            None => table.add(id)?,
        };
        let view = MountedView { number, id };
        table.add_lookup(view, ROOT_INO.0).map(|()| view)
    }

    /// Starts the lookups of one reply.
    pub(crate) fn begin_lookups(&self) -> LookupBatch<'_> {
        LookupBatch { views: self, numbers: Vec::new() }
    }

    /// Counts a lookup before it is sent to the kernel. `number` is the archive's inode number or
    /// the kernel's. Errors: `Stale` if the number belongs to another view by now (VIEW-2).
    pub(crate) fn add_lookup(&self, view: MountedView, number: u64) -> Result<()> {
        self.0.read().add_lookup(view, number)
    }

    /// Records that the kernel may cache pages of a file or a link of the view.
    pub(crate) fn mark_read(&self, view: MountedView) {
        let table = self.0.read();
        if let Some(known) = table.known.get(&view.number).filter(|known| known.id == view.id) {
            known.was_read.store(true, Ordering::Release);
        }
    }

    /// Removes lookups: the kernel dropped the inode, or never saw the reply.
    pub(crate) fn forget(&self, number: u64, lookups: u64) {
        if let Some(known) = self.0.read().known.get(&((number >> INO_BITS) as u16)) {
            let reduce = |count: u64| Some(count.saturating_sub(lookups));
            let _before = known.lookups.fetch_update(Ordering::AcqRel, Ordering::Acquire, reduce);
        }
    }

    /// Removes one lookup of any inode of the view, as [`ViewTable::forget`].
    pub(crate) fn remove_lookup(&self, view: MountedView) {
        self.forget(u64::from(view.number) << INO_BITS, 1);
    }

    /// Returns the view bits of numbers that the kernel may know, each with the highest inode
    /// number. Views of which it may have pages come first.
    pub(crate) fn known_to_kernel(&self) -> Vec<(u64, u64)> {
        let table = self.0.read();
        let in_use = table.known.iter().filter(|(_, known)| known.lookups.load(Ordering::Acquire) > 0);
        let (mut first, then): (Vec<_>, Vec<_>) = in_use.partition(|(_, known)| known.was_read.load(Ordering::Acquire));
        first.extend(then);
        let numbers = |(number, known): (&u16, &ViewEntry)| {
            (u64::from(*number) << INO_BITS, known.highest.load(Ordering::Acquire))
        };
        first.into_iter().map(numbers).collect()
    }
}

impl ViewMap {
    /// Assigns a number (VIEW-2).
    fn add(&mut self, id: u32) -> Result<u16> {
        let next = self.known.last_key_value().map_or(1, |(last, _)| last + 1);
        let number = if next < DIRECTORY { next } else { self.reclaim_number()? };
        let (lookups, highest) = (AtomicU64::new(0), AtomicU64::new(0));
        self.known.insert(number, ViewEntry { id, lookups, highest, was_read: AtomicBool::new(false) });
        self.by_snapshot.insert(id, number);
        Ok(number)
    }

    fn reclaim_number(&mut self) -> Result<u16> {
        let forgotten = self.known.iter().find(|(_, known)| known.lookups.load(Ordering::Acquire) == 0);
        let Some((number, known)) = forgotten.map(|(number, known)| (*number, known.id)) else {
            return Err(Error::NoSpace("the kernel uses all inode numbers of snapshots".into()));
        };
        self.by_snapshot.remove(&known);
        Ok(number)
    }

    fn add_lookup(&self, view: MountedView, number: u64) -> Result<()> {
        let known = self.known.get(&view.number).filter(|known| known.id == view.id).ok_or(Error::Stale)?;
        known.highest.fetch_max(number & MAX_INO, Ordering::AcqRel);
        known.lookups.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(views: &ViewTable, view: MountedView, ino: u64) -> u64 {
        let number = view.kernel_number(Ino(ino)).unwrap();
        assert_eq!(views.resolve(number).unwrap(), InodeKind::View(view, Ino(ino)));
        number
    }

    #[test]
    fn numbers_of_views_of_the_live_tree_and_of_the_directory_differ() {
        let views = ViewTable::default();
        let (a, b) = (views.open(SnapshotId(70_000)).unwrap(), views.open(SnapshotId(4)).unwrap());
        assert_eq!(views.open(SnapshotId(70_000)).unwrap(), a, "once given it stays");
        let mut numbers = vec![snapshot_dir_number(), 1, MAX_INO];
        for view in [a, b] {
            numbers.extend([1, 2, MAX_INO].map(|ino| file(&views, view, ino)));
        }
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), count);
        assert_eq!(views.resolve(1).unwrap(), InodeKind::Live);
        assert_eq!(views.resolve(MAX_INO).unwrap(), InodeKind::Live);
        assert_eq!(views.resolve(snapshot_dir_number()).unwrap(), InodeKind::Directory);
        assert_eq!((a.generation(), a.snapshot()), (Generation(70_000), SnapshotId(70_000)));
    }

    #[test]
    fn oversized_numbers_are_refused_and_clash_with_none() {
        let views = ViewTable::default();
        let view = views.open(SnapshotId(1)).unwrap();
        for ino in [0, MAX_INO + 1, u64::MAX] {
            assert!(matches!(view.kernel_number(Ino(ino)), Err(Error::Damaged(_))), "{ino}");
        }
        for id in [0, 1 << 32, u64::MAX] {
            assert!(matches!(views.open(SnapshotId(id)), Err(Error::Unsupported(_))), "{id}");
        }
        for number in [2 << INO_BITS | 1, u64::MAX, snapshot_dir_number() + 1] {
            assert!(matches!(views.resolve(number), Err(Error::Stale)), "{number:x}");
        }
    }

    #[test]
    fn a_number_is_reused_only_after_all_are_used_and_the_kernel_forgot_it() {
        let views = ViewTable::default();
        let all = u64::from(DIRECTORY) - 1;
        let first = views.open(SnapshotId(1)).unwrap();
        let inode = file(&views, first, 9);
        for id in 2..=all {
            views.open(SnapshotId(id)).unwrap();
        }
        assert!(matches!(views.open(SnapshotId(all + 1)), Err(Error::NoSpace(_))));
        views.add_lookup(first, inode).unwrap();
        views.forget(inode, 1);
        assert!(matches!(views.open(SnapshotId(all + 1)), Err(Error::NoSpace(_))), "it was told twice");
        views.forget(inode, 1);
        assert_eq!(views.resolve(inode).unwrap(), InodeKind::View(first, Ino(9)), "a file handle may come back to it");
        assert_eq!(views.known_to_kernel().len() as u64, all - 1);
        let other = views.open(SnapshotId(all + 1)).unwrap();
        assert_eq!(views.resolve(inode).unwrap(), InodeKind::View(other, Ino(9)));
        assert_ne!(other.generation(), first.generation(), "the kernel refuses handles by it");
        assert!(matches!(views.add_lookup(first, inode), Err(Error::Stale)));
        assert!(matches!(views.open(SnapshotId(1)), Err(Error::NoSpace(_))));
    }

    #[test]
    fn lookups_of_a_failed_request_are_undone() {
        let views = ViewTable::default();
        let view = views.open(SnapshotId(1)).unwrap();
        views.remove_lookup(view);
        let number = file(&views, view, 9);
        let mut batch = views.begin_lookups();
        batch.add(view, number).unwrap();
        batch.adopt(file(&views, views.open(SnapshotId(2)).unwrap(), 1));
        assert_eq!(views.known_to_kernel().len(), 2);
        drop(batch);
        assert_eq!(views.known_to_kernel(), []);
        let mut batch = views.begin_lookups();
        batch.add(view, number).unwrap();
        batch.add(view, number).unwrap();
        batch.undo_last();
        batch.commit();
        assert_eq!(views.known_to_kernel().len(), 1);
        views.forget(number, 1);
        assert_eq!(views.known_to_kernel(), []);
    }

    #[test]
    fn views_that_were_read_come_first_and_each_up_to_its_highest_number() {
        let views = ViewTable::default();
        let all: Vec<MountedView> = (1..=3).map(|id| views.open(SnapshotId(id)).unwrap()).collect();
        for ino in [7, 40, 9] {
            views.add_lookup(all[1], file(&views, all[1], ino)).unwrap();
        }
        views.mark_read(all[2]);
        let numbers: Vec<(u64, u64)> =
            views.known_to_kernel().iter().map(|(upper, highest)| (upper >> INO_BITS, *highest)).collect();
        assert_eq!(numbers, [(3, 1), (1, 1), (2, 40)]);
    }
}
