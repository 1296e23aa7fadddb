//! Counts the open handles that may write, per inode and in all, and remembers what the kernel keeps of an inode that has some.
//!
//! # Block counts
//! With each WRITE the block count may change behind the kernel's back. Attributes that it may not keep would be asked for with each
//! write(2), which takes longer than the write itself; and what it asked for makes it look whether the file has capabilities, since another
//! client might have set some. So it keeps what GETATTR told it. It is told at once when another change of the content makes that wrong, and
//! by the clock when a WRITE does: a file that grows with each write(2) would be asked about with each. close(2) makes it forget the count. A reply that crosses the telling does no harm: who is asked says so before looking ([`Writers::ask`]), so that a change made
//! meanwhile is told, and the kernel drops replies to what it asked before it was told.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockbox::error::Timestamp;
use parking_lot::Mutex;

/// Of an inode with writers: the newest ctime that came with a program's change of attributes. Locked until a change is made, so that of
/// two the second one knows the first.
pub(super) type NewestCtime = Mutex<Option<Timestamp>>;

/// What an inode with writers counts at least (KERNEL-7).
const MIN_BLOCKS: u64 = 1;

/// Enough that event loops seldom meet.
const SHARDS: u64 = 16;

/// While an inode has a writer its block count may change, and only then can the kernel hold dirty pages.
pub(super) struct Writers {
    shards: Vec<Mutex<HashMap<u64, WrittenInode>>>,
    open: AtomicUsize,
}

/// An inode with writers.
struct WrittenInode {
    handles: u32,
    cached: CachedBlocks,
    /// Content came by WRITE since what the kernel keeps was compared.
    written: bool,
    /// The kernel has asked for attributes since there is a writer.
    asked: bool,
    newest_ctime: Arc<NewestCtime>,
    /// Bytes of a WRITE that was refused, of which whoever writes is to be told (KERNEL-12); 0 for none.
    refused: usize,
}

/// What the kernel keeps of the inode's attributes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CachedBlocks {
    Unknown,
    /// An answer is on its way.
    Requested,
    /// This many blocks; [`MIN_BLOCKS`] also stands for fewer.
    Blocks(u64),
}

impl CachedBlocks {
    pub(super) fn matches(self, blocks: u64) -> bool {
        self == CachedBlocks::Blocks(blocks)
    }
}

impl WrittenInode {
    fn of(cached: CachedBlocks) -> WrittenInode {
        WrittenInode { handles: 0, cached, written: false, asked: false, newest_ctime: Arc::default(), refused: 0 }
    }
}

impl Default for Writers {
    fn default() -> Writers {
        Writers { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), open: AtomicUsize::new(0) }
    }
}

impl Writers {
    fn shard(&self, ino: u64) -> &Mutex<HashMap<u64, WrittenInode>> {
        &self.shards[(ino % SHARDS) as usize]
    }

    /// Returns whether this is the inode's first writer.
    pub(super) fn add(&self, ino: u64) -> bool {
        let mut inodes = self.shard(ino).lock();
        let written = inodes.entry(ino).or_insert_with(|| WrittenInode::of(CachedBlocks::Unknown));
        written.handles += 1;
        self.open.fetch_add(1, Ordering::SeqCst);
        written.handles == 1
    }

    /// A writer of an inode that CREATE answers with attributes to keep for ever.
    pub(super) fn add_created(&self, ino: u64, blocks: u64) {
        let mut inodes = self.shard(ino).lock();
        let written =
            inodes.entry(ino).or_insert_with(|| WrittenInode::of(CachedBlocks::Blocks(blocks.max(MIN_BLOCKS))));
        if written.handles > 0 {
            // Not so new: somebody else writes it already, and the answer may cross what he does.
            written.cached = CachedBlocks::Requested;
        }
        written.handles += 1;
        self.open.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns what the kernel keeps after the last writer, if that may be wrong, which it then is to be told. By itself it forgets the count with
    /// each close(2), hence what came with the answer to CREATE, but not what it has asked for since.
    pub(super) fn remove(&self, ino: u64) -> Option<CachedBlocks> {
        let mut inodes = self.shard(ino).lock();
        let Entry::Occupied(mut entry) = inodes.entry(ino) else { return None };
        entry.get_mut().handles -= 1;
        self.open.fetch_sub(1, Ordering::SeqCst);
        if entry.get().handles > 0 {
            return None;
        }
        let WrittenInode { cached, written, asked, .. } = entry.remove();
        let wrong = written && cached != CachedBlocks::Unknown
            || matches!(cached, CachedBlocks::Requested | CachedBlocks::Blocks(MIN_BLOCKS));
        (asked && wrong).then_some(cached)
    }

    pub(super) fn has(&self, ino: u64) -> bool {
        self.has_any() && self.shard(ino).lock().contains_key(&ino)
    }

    pub(super) fn has_any(&self) -> bool {
        self.open.load(Ordering::SeqCst) > 0
    }

    /// Those that have writers, in no order.
    pub(super) fn inodes(&self) -> Vec<u64> {
        self.shards.iter().flat_map(|shard| shard.lock().keys().copied().collect::<Vec<_>>()).collect()
    }

    fn with<R>(&self, ino: u64, f: impl FnOnce(&mut WrittenInode) -> R) -> Option<R> {
        if !self.has_any() {
            return None;
        }
        self.shard(ino).lock().get_mut(&ino).map(f)
    }

    /// What there is to know of an inode's times, when it has writers.
    pub(super) fn newest_ctime(&self, ino: u64) -> Option<Arc<NewestCtime>> {
        self.with(ino, |written| Arc::clone(&written.newest_ctime))
    }

    /// What to tell of an inode that has so many blocks.
    pub(super) fn reported_blocks(&self, ino: u64, blocks: u64) -> u64 {
        if self.has(ino) { blocks.max(MIN_BLOCKS) } else { blocks }
    }

    /// The kernel wants attributes that it may keep. Comes before they are looked up.
    pub(super) fn begin_getattr(&self, ino: u64) {
        self.with(ino, |written| {
            written.asked = true;
            if written.cached == CachedBlocks::Unknown {
                written.cached = CachedBlocks::Requested;
            }
        });
    }

    /// The inode has so many blocks: how many to tell the kernel, and whether it may keep the answer. When not, what it keeps from before is
    /// wrong too: it is to be told.
    pub(super) fn finish_getattr(&self, ino: u64, blocks: u64) -> (u64, bool) {
        let answer_blocks = |WrittenInode { cached, .. }: &mut WrittenInode| {
            let answer_blocks = blocks.max(MIN_BLOCKS);
            let agrees = *cached == CachedBlocks::Requested || *cached == CachedBlocks::Blocks(answer_blocks);
            *cached = if agrees { CachedBlocks::Blocks(answer_blocks) } else { CachedBlocks::Unknown };
            (answer_blocks, agrees)
        };
        self.with(ino, answer_blocks).unwrap_or((blocks, true))
    }

    /// Whether the kernel keeps a block count, or may be about to.
    pub(super) fn has_cached_blocks(&self, ino: u64) -> bool {
        self.with(ino, |written| written.cached != CachedBlocks::Unknown).unwrap_or(false)
    }

    /// Content came by WRITE. Comes after the change, so that whoever is not noted here asks after it.
    pub(super) fn record_write(&self, ino: u64) {
        self.with(ino, |written| written.written = written.cached != CachedBlocks::Unknown);
    }

    /// A WRITE of so many bytes was refused, or with 0 would be accepted now.
    pub(super) fn set_refused(&self, ino: u64, bytes: usize) {
        self.with(ino, |written| written.refused = bytes);
    }

    pub(super) fn refused(&self, ino: u64) -> usize {
        self.with(ino, |written| written.refused).unwrap_or(0)
    }

    /// The inodes to which content came since the last call.
    pub(super) fn take_written(&self) -> Vec<u64> {
        let mut taken = Vec::new();
        for shard in self.shards.iter().filter(|_| self.has_any()) {
            let mut inodes = shard.lock();
            taken.extend(inodes.iter_mut().filter_map(|(ino, w)| std::mem::take(&mut w.written).then_some(*ino)));
        }
        taken
    }

    /// The content changed, and the inode has so many blocks by now, if that is known: answers whether the kernel is to be told.
    pub(super) fn forget_wrong_blocks(&self, ino: u64, blocks: Option<u64>) -> bool {
        let wrong = |WrittenInode { cached, .. }: &mut WrittenInode| {
            let wrong = match *cached {
                CachedBlocks::Unknown => false,
                CachedBlocks::Requested => true,
                CachedBlocks::Blocks(known) => Some(known) != blocks.map(|blocks| blocks.max(MIN_BLOCKS)),
            };
            if wrong {
                *cached = CachedBlocks::Unknown;
            }
            wrong
        };
        self.with(ino, wrong).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_has_writers_until_the_last_is_removed() {
        let writers = Writers::default();
        assert!(writers.add(5));
        assert!(!writers.add(5));
        assert!(writers.has(5));
        assert!(!writers.has(6));
        writers.add(7);
        let mut inodes = writers.inodes();
        inodes.sort_unstable();
        assert_eq!(inodes, [5, 7]);
        assert!(writers.remove(7).is_none() && writers.remove(5).is_none());
        assert!(writers.has(5));
        writers.remove(5);
        assert!(!writers.has(5));
        assert!(!writers.has_any());
        writers.remove(5);
        assert!(!writers.has_any());
    }

    #[test]
    fn the_kernel_keeps_a_block_count_until_it_is_wrong() {
        let writers = Writers::default();
        assert_eq!(writers.finish_getattr(5, 8), (8, true), "without a writer nothing changes");
        writers.add(5);
        assert!(!writers.has_cached_blocks(5) && !writers.forget_wrong_blocks(5, Some(8)));
        writers.begin_getattr(5);
        assert!(writers.has_cached_blocks(5));
        assert_eq!(writers.finish_getattr(5, 8), (8, true));
        assert!(!writers.forget_wrong_blocks(5, Some(8)), "overwritten");
        assert!(writers.forget_wrong_blocks(5, Some(16)) && !writers.has_cached_blocks(5));
        assert!(!writers.forget_wrong_blocks(5, Some(24)), "told once");
        writers.begin_getattr(5);
        writers.finish_getattr(5, 24);
        assert!(writers.forget_wrong_blocks(5, None), "not known any more");
    }

    #[test]
    fn the_attributes_of_a_created_file_are_kept_until_it_is_written() {
        let writers = Writers::default();
        writers.add_created(5, 0);
        assert!(writers.has(5) && writers.has_cached_blocks(5));
        assert!(writers.forget_wrong_blocks(5, Some(8)) && !writers.has_cached_blocks(5));
        // Another program created what was there by then.
        writers.add_created(5, 8);
        assert!(writers.forget_wrong_blocks(5, Some(8)), "it may have been told less");
        writers.remove(5);
        writers.remove(5);
        assert!(!writers.has_any());
    }

    #[test]
    fn an_answer_that_a_change_crosses_is_not_kept() {
        let writers = Writers::default();
        writers.add(5);
        writers.begin_getattr(5);
        assert!(writers.forget_wrong_blocks(5, Some(16)));
        assert!(!writers.finish_getattr(5, 8).1);
        // Of two answers that differ nobody knows which one arrives last.
        writers.begin_getattr(5);
        writers.begin_getattr(5);
        assert!(writers.finish_getattr(5, 8).1 && !writers.finish_getattr(5, 16).1 && !writers.has_cached_blocks(5));
    }
    /// KERNEL-7.
    #[test]
    fn an_inode_with_writers_has_a_block_until_the_last_is_gone() {
        let writers = Writers::default();
        writers.add_created(5, 0);
        assert!(writers.remove(5).is_none(), "it has forgotten what CREATE said");
        writers.add_created(5, 0);
        assert_eq!(
            (writers.reported_blocks(5, 0), writers.reported_blocks(5, 3), writers.reported_blocks(6, 0)),
            (1, 3, 0)
        );
        writers.begin_getattr(5);
        assert_eq!(writers.finish_getattr(5, 0), (1, true));
        assert!(
            !writers.forget_wrong_blocks(5, Some(0)) && !writers.forget_wrong_blocks(5, Some(1)),
            "the kernel knows that"
        );
        writers.add(5);
        assert!(writers.remove(5).is_none(), "one is left");
        assert!(writers.remove(5).is_some_and(|cached| cached.matches(1)), "the kernel keeps 1");
        assert_eq!((writers.reported_blocks(5, 0), writers.finish_getattr(5, 0)), (0, (0, true)));
        writers.add_created(5, 0);
        writers.begin_getattr(5);
        assert!(writers.forget_wrong_blocks(5, Some(2)));
        assert!(writers.remove(5).is_none(), "it keeps nothing");
        // An answer that is on its way may say either.
        writers.add(5);
        writers.begin_getattr(5);
        assert!(writers.remove(5).is_some_and(|cached| !cached.matches(0) && !cached.matches(1)));
    }

    #[test]
    fn what_is_written_is_compared_by_the_clock_and_at_the_last_close() {
        let writers = Writers::default();
        writers.record_write(5);
        writers.add(5);
        writers.record_write(5);
        assert!(writers.take_written().is_empty(), "the kernel keeps nothing");
        writers.begin_getattr(5);
        writers.record_write(5);
        assert!(writers.finish_getattr(5, 8).1, "it may keep that until the clock comes");
        assert_eq!((writers.take_written(), writers.take_written()), (vec![5], vec![]));
        assert!(!writers.forget_wrong_blocks(5, Some(8)), "overwritten");
        writers.record_write(5);
        assert!(
            writers.has_cached_blocks(5) && writers.remove(5).is_some_and(|cached| cached.matches(8)),
            "the clock did not come"
        );
        writers.add(5);
        writers.begin_getattr(5);
        writers.finish_getattr(5, 8);
        assert!(writers.remove(5).is_none(), "nothing was written");
    }
}
