//! Open writable handles, per inode and in total, with the block counts that the kernel caches of
//! these inodes, and the late times that it stores for them (KERNEL-8).
//!
//! # Block counts
//! Each WRITE may change the block count without the kernel's knowledge. If its attributes expired
//! at once, the kernel would request them with each write(2), which takes longer than the write
//! itself. It would then also check for file capabilities, since another client might have set
//! some. So the kernel keeps the attributes of GETATTR. They are invalidated at once after other
//! changes of the content, and by the ticker after a WRITE: a file that grows with each write(2)
//! would otherwise cause a GETATTR each time. close(2) makes the kernel forget the count. A reply
//! that crosses an invalidation is harmless: the request is recorded before the lookup
//! ([`Writers::begin_getattr`]), so that a concurrent change is reported, and the kernel drops
//! replies to requests from before an invalidation.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use lockbox::error::Timestamp;
use lockbox::fs::{Attributes, FileSystem, Ino, SetAttributes, SetTime, mode};
use lockbox::{Error, Result};
use parking_lot::Mutex;

use super::KernelCache;

/// Newest ctime that a program set on an inode with writers. Locked until a change is made, so that
/// of two changes the second one sees the first.
pub(super) type NewestCtime = Mutex<Option<Timestamp>>;

/// Minimum block count of an inode with writers (KERNEL-7).
const MIN_BLOCKS: u64 = 1;

/// Number of shards, so that event loops seldom contend.
const SHARDS: usize = 16;

/// Inodes with writers: only their block counts may change, and only of them the kernel can hold
/// dirty pages.
#[derive(Default)]
pub(crate) struct Writers {
    shards: [Mutex<HashMap<u64, WrittenInode>>; SHARDS],
    open: AtomicUsize,
}

#[derive(Default)]
struct WrittenInode {
    handles: u32,
    cached: CachedBlocks,
    /// A WRITE came since the cached count was last compared.
    written: bool,
    /// The kernel has requested attributes since the first writer.
    was_requested: bool,
    newest_ctime: Arc<NewestCtime>,
    /// Size of a failed WRITE that the writer must learn of (KERNEL-12); 0 for none.
    refused: usize,
}

/// Block count that the kernel caches.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum CachedBlocks {
    #[default]
    Unknown,
    /// A reply is in flight.
    Requested,
    /// This count; [`MIN_BLOCKS`] also stands for fewer.
    Blocks(u64),
}

impl CachedBlocks {
    pub(super) fn matches(self, blocks: u64) -> bool {
        self == CachedBlocks::Blocks(blocks)
    }
}

impl Writers {
    fn shard(&self, ino: u64) -> &Mutex<HashMap<u64, WrittenInode>> {
        &self.shards[ino as usize % SHARDS]
    }

    /// Adds a writer and returns whether it is the inode's first.
    pub(super) fn add(&self, ino: u64) -> bool {
        let mut inodes = self.shard(ino).lock();
        let written = inodes.entry(ino).or_default();
        written.handles += 1;
        self.open.fetch_add(1, Ordering::SeqCst);
        written.handles == 1
    }

    /// Adds the writer of a CREATE, whose reply carries attributes without expiry.
    pub(super) fn add_created(&self, ino: u64, blocks: u64) {
        let mut inodes = self.shard(ino).lock();
        let cached = CachedBlocks::Blocks(blocks.max(MIN_BLOCKS));
        let written = inodes.entry(ino).or_insert_with(|| WrittenInode { cached, ..WrittenInode::default() });
        if written.handles > 0 {
            // The file already has a writer, and the reply may cross its writes.
            written.cached = CachedBlocks::Requested;
        }
        written.handles += 1;
        self.open.fetch_add(1, Ordering::SeqCst);
    }

    /// Removes a writer. After the last one it returns the cached count if that may be wrong and
    /// must be invalidated. The kernel itself forgets the count with each close(2), so also the
    /// count of a CREATE reply, but not a count that it requested since.
    pub(super) fn remove(&self, ino: u64) -> Option<CachedBlocks> {
        let mut inodes = self.shard(ino).lock();
        let Entry::Occupied(mut entry) = inodes.entry(ino) else { return None };
        entry.get_mut().handles -= 1;
        self.open.fetch_sub(1, Ordering::SeqCst);
        if entry.get().handles > 0 {
            return None;
        }
        let WrittenInode { cached, written, was_requested, .. } = entry.remove();
        let wrong = written && cached != CachedBlocks::Unknown
            || matches!(cached, CachedBlocks::Requested | CachedBlocks::Blocks(MIN_BLOCKS));
        (was_requested && wrong).then_some(cached)
    }

    pub(crate) fn has_writer(&self, ino: u64) -> bool {
        self.has_any() && self.shard(ino).lock().contains_key(&ino)
    }

    /// Returns whether any inode has a writer: without one the kernel holds no dirty pages
    /// (KERNEL-3).
    pub(crate) fn has_any(&self) -> bool {
        self.open.load(Ordering::SeqCst) > 0
    }

    /// Returns the inodes with writers, of which the kernel may hold dirty pages (KERNEL-3), in no
    /// order.
    pub(crate) fn inodes(&self) -> Vec<u64> {
        self.shards.iter().flat_map(|shard| shard.lock().keys().copied().collect::<Vec<_>>()).collect()
    }

    fn with<R>(&self, ino: u64, f: impl FnOnce(&mut WrittenInode) -> R) -> Option<R> {
        if !self.has_any() {
            return None;
        }
        self.shard(ino).lock().get_mut(&ino).map(f)
    }

    pub(super) fn newest_ctime(&self, ino: u64) -> Option<Arc<NewestCtime>> {
        self.with(ino, |written| Arc::clone(&written.newest_ctime))
    }

    pub(super) fn reported_blocks(&self, ino: u64, blocks: u64) -> u64 {
        if self.has_writer(ino) { blocks.max(MIN_BLOCKS) } else { blocks }
    }

    /// Records a request for attributes that the kernel may cache. Call it before they are looked
    /// up.
    pub(super) fn begin_getattr(&self, ino: u64) {
        self.with(ino, |written| {
            written.was_requested = true;
            if written.cached == CachedBlocks::Unknown {
                written.cached = CachedBlocks::Requested;
            }
        });
    }

    /// Returns the block count to report, and whether the kernel may cache it. If not, the count
    /// cached before is wrong too and must be invalidated.
    pub(super) fn finish_getattr(&self, ino: u64, blocks: u64) -> (u64, bool) {
        let answer_blocks = |WrittenInode { cached, .. }: &mut WrittenInode| {
            let answer_blocks = blocks.max(MIN_BLOCKS);
            let agrees = *cached == CachedBlocks::Requested || *cached == CachedBlocks::Blocks(answer_blocks);
            *cached = if agrees { CachedBlocks::Blocks(answer_blocks) } else { CachedBlocks::Unknown };
            (answer_blocks, agrees)
        };
        self.with(ino, answer_blocks).unwrap_or((blocks, true))
    }

    /// Returns whether the kernel caches a block count, or is about to.
    pub(super) fn has_cached_blocks(&self, ino: u64) -> bool {
        self.with(ino, |written| written.cached != CachedBlocks::Unknown).unwrap_or(false)
    }

    /// Records a WRITE. Call it after the change, so that an inode that is not recorded here is
    /// requested after it.
    pub(super) fn record_write(&self, ino: u64) {
        self.with(ino, |written| written.written = written.cached != CachedBlocks::Unknown);
    }

    /// Records the size of a failed WRITE; 0 if it would succeed now.
    pub(crate) fn set_refused(&self, ino: u64, bytes: usize) {
        self.with(ino, |written| written.refused = bytes);
    }

    /// Returns the size of the last failed WRITE, or 0 if there is none or it would succeed now
    /// (KERNEL-12). A smaller one may find space where the kernel's do not.
    pub(crate) fn refused(&self, ino: u64) -> usize {
        self.with(ino, |written| written.refused).unwrap_or(0)
    }

    /// Returns the inodes with WRITEs since the last call.
    pub(super) fn take_written(&self) -> Vec<u64> {
        let mut taken = Vec::new();
        for shard in self.shards.iter().filter(|_| self.has_any()) {
            let mut inodes = shard.lock();
            taken.extend(inodes.iter_mut().filter_map(|(ino, w)| std::mem::take(&mut w.written).then_some(*ino)));
        }
        taken
    }

    /// Compares the cached count with `blocks`, None if unknown. Forgets a wrong one and returns
    /// whether it must be invalidated.
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

impl KernelCache {
    /// Sets attributes as [`FileSystem::set_attributes`]. Times that the kernel stores too late are
    /// ignored, and those of a deleted file are accepted (KERNEL-4).
    pub(crate) fn set_attributes(
        &self,
        fs: &FileSystem,
        ino: Ino,
        set: &SetAttributes,
        by_handle: bool,
    ) -> Result<Attributes> {
        accept_times(self.set_in_order(fs, ino, set, by_handle), ino, set)
    }

    /// Ignores late times. The kernel can have unsaved times while a program sets others only for
    /// an inode with writers: it stores them before each close(2) returns.
    fn set_in_order(&self, fs: &FileSystem, ino: Ino, set: &SetAttributes, by_handle: bool) -> Result<Attributes> {
        // KERNEL-8.
        let change = || fs.set_attributes(ino, &SetAttributes { keeps_times: true, ..*set });
        let (Some(SetTime::To(ctime)), Some(newest)) = (set.ctime, self.writers.newest_ctime(ino.0)) else {
            return change();
        };
        let mut newest = newest.lock();
        if !is_kernel_store(set, by_handle) {
            return change().inspect(|_| *newest = Some(ctime));
        }
        let now = Timestamp::from_system(SystemTime::now());
        if is_stale(ctime, *newest, now) { fs.attributes(ino) } else { change() }
    }
}

/// Returns whether the kernel stores its cached times. It uses any of the inode's writable handles.
/// utimensat(2) of the mtime alone looks the same except for the handle: of the calls that set
/// times only ftruncate(2) comes with a handle.
fn is_kernel_store(set: &SetAttributes, by_handle: bool) -> bool {
    by_handle && set.mtime.is_some() && SetAttributes { mtime: None, ctime: None, ..*set } == SetAttributes::default()
}

/// Returns whether a ctime is outdated. After the clock was set back, the newest one lies in the
/// future and does not count.
fn is_stale(ctime: Timestamp, newest: Option<Timestamp>, now: Timestamp) -> bool {
    newest.is_some_and(|newest| ctime < newest && newest <= now)
}

/// Accepts cached times of a deleted inode (KERNEL-4); every other result is passed through. The
/// kernel sends a ctime only for regular files, and ignores the reply; a utimensat(2) that raced
/// with the unlink came before it.
fn accept_times(result: Result<Attributes>, ino: Ino, set: &SetAttributes) -> Result<Attributes> {
    let times_only = SetAttributes { atime: None, mtime: None, ctime: None, ..*set } == SetAttributes::default();
    match result {
        Err(Error::Stale) if times_only && set.ctime.is_some() => {
            Ok(Attributes { ino, mode: mode::REGULAR, ..Attributes::default() })
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use lockbox::archive::{Archive, CreateOptions, KdfCost, OpenOptions};
    use lockbox::crypto::Passphrase;
    use lockbox::fs::Creator;
    use lockbox::keys;

    use super::*;

    #[test]
    fn an_inode_has_writers_until_the_last_is_removed() {
        let writers = Writers::default();
        assert!(writers.add(5));
        assert!(!writers.add(5));
        assert!(writers.has_writer(5));
        assert!(!writers.has_writer(6));
        writers.add(7);
        let mut inodes = writers.inodes();
        inodes.sort_unstable();
        assert_eq!(inodes, [5, 7]);
        assert!(writers.remove(7).is_none() && writers.remove(5).is_none());
        assert!(writers.has_writer(5));
        writers.remove(5);
        assert!(!writers.has_writer(5));
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
        assert!(writers.has_writer(5) && writers.has_cached_blocks(5));
        assert!(writers.forget_wrong_blocks(5, Some(8)) && !writers.has_cached_blocks(5));
        // Another program had already created the file.
        writers.add_created(5, 8);
        assert!(writers.forget_wrong_blocks(5, Some(8)), "it may have been told less");
        writers.remove(5);
        writers.remove(5);
        assert!(!writers.has_any());
    }

    #[test]
    fn an_answer_that_a_change_crosses_is_not_cached() {
        let writers = Writers::default();
        writers.add(5);
        writers.begin_getattr(5);
        assert!(writers.forget_wrong_blocks(5, Some(16)));
        assert!(!writers.finish_getattr(5, 8).1);
        // Of two differing replies it is unknown which one arrives last.
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
        // A reply in flight may say either.
        writers.add(5);
        writers.begin_getattr(5);
        assert!(writers.remove(5).is_some_and(|cached| !cached.matches(0) && !cached.matches(1)));
    }

    #[test]
    fn written_block_counts_are_compared_by_the_ticker_and_at_the_last_close() {
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

    fn at(nanos: u32) -> Timestamp {
        Timestamp { seconds: 1_700_000_000, nanos }
    }

    fn stored(nanos: u32) -> SetAttributes {
        let time = Some(SetTime::To(at(nanos)));
        SetAttributes { mtime: time, ctime: time, ..SetAttributes::default() }
    }

    #[test]
    fn late_times_of_the_kernel_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("box.lbx");
        let passphrase = Passphrase::new(b"a passphrase".to_vec());
        let creator = Creator { uid: 0, gid: 0, umask: None };
        let kdf = KdfCost { memory_kib: 1024, passes: 1, lanes: 1 };
        Archive::create(&path, &passphrase, &CreateOptions { kdf, creator }).unwrap();
        let key = keys::unlock(&path, &passphrase).unwrap();
        let archive = crate::tests::open_when_free(&path, &key, &OpenOptions::default());
        let (fs, cache) = (archive.file_system(), KernelCache::default());
        let ino = fs.create_and_open(lockbox::fs::ROOT_INO, b"file", 0o600, creator).unwrap().ino;
        cache.writers.add(ino.0);
        let set_by = |set: &SetAttributes, by_handle| {
            cache.set_attributes(fs, ino, set, by_handle).map(|a| (a.mtime, a.ctime)).unwrap()
        };
        let set = |set: &SetAttributes| set_by(set, true);
        assert_eq!(set(&stored(5)), (at(5), at(5)));
        assert_eq!(set(&SetAttributes { size: Some(7), ..stored(20) }), (at(20), at(20)));
        assert_eq!(set(&stored(10)), (at(20), at(20)), "the kernel had read it before");
        assert_eq!(set(&stored(30)), (at(30), at(30)));
        // touch -m
        let touched = SetAttributes { mtime: Some(SetTime::To(at(1))), ..stored(40) };
        assert_eq!(set_by(&touched, false), (at(1), at(40)));
        assert_eq!(set(&stored(35)), (at(1), at(40)), "the kernel had read it before");
        let memory = SetAttributes { ctime: Some(SetTime::To(at(50))), ..touched };
        assert_eq!(set(&memory), (at(1), at(50)), "what was set, and a later change of status");
        cache.writers.remove(ino.0);
        assert_eq!(set(&stored(10)), (at(10), at(10)), "only with a writer can it be late");
    }

    #[test]
    fn a_kernel_store_differs_from_times_that_programs_set() {
        assert!(is_kernel_store(&stored(1), true) && !is_kernel_store(&stored(1), false));
        for set in [
            SetAttributes { size: Some(0), ..stored(1) },
            SetAttributes { mode: Some(0o600), mtime: None, ..stored(1) },
            SetAttributes { atime: Some(SetTime::Now), ..stored(1) },
            SetAttributes { mtime: None, ..stored(1) },
        ] {
            assert!(!is_kernel_store(&set, true), "{set:?}");
        }
    }

    #[test]
    fn older_times_are_late_unless_the_clock_was_set_back() {
        assert!(!is_stale(at(5), None, at(9)));
        assert!(is_stale(at(5), Some(at(6)), at(9)));
        assert!(!is_stale(at(6), Some(at(6)), at(9)) && !is_stale(at(7), Some(at(6)), at(9)));
        assert!(!is_stale(at(5), Some(at(20)), at(9)), "20 is still to come");
    }

    const INO: Ino = Ino(7);

    #[test]
    fn cached_times_of_a_file_that_is_gone_are_accepted() {
        let times = SetAttributes { mtime: Some(SetTime::Now), ctime: Some(SetTime::Now), ..SetAttributes::default() };
        let accepted = accept_times(Err(Error::Stale), INO, &times).unwrap();
        assert_eq!((accepted.ino, accepted.mode, accepted.links), (INO, mode::REGULAR, 0));
    }

    #[test]
    fn every_other_change_of_it_is_refused() {
        let ctime = Some(SetTime::Now);
        for set in [
            SetAttributes { mtime: ctime, ..SetAttributes::default() },
            SetAttributes { ctime, mode: Some(0o600), ..SetAttributes::default() },
            SetAttributes { ctime, size: Some(0), ..SetAttributes::default() },
            SetAttributes { ctime, kill_set_id: true, ..SetAttributes::default() },
        ] {
            assert!(matches!(accept_times(Err(Error::Stale), INO, &set), Err(Error::Stale)), "{set:?}");
        }
        let times = SetAttributes { ctime, ..SetAttributes::default() };
        assert!(matches!(
            accept_times(Err(Error::WriteFailed(String::new())), INO, &times),
            Err(Error::WriteFailed(_))
        ));
    }
}
