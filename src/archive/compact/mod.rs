//! Compacts an archive: rewrites it into a new file without free space, and replaces the old file.
//!
//! # Order
//!
//! COMPACT-1  The old file is locked for writing and opened for reading: it is not modified until
//!     the new file has its name. Before that, a regular session replays its log and frees
//!     everything pending, because the new file is copied from the trees: first from the snapshots,
//!     then from the live tree (see `versions.rs`).
//! COMPACT-2  The new file is created in the same directory, locked, and filled with the content
//!     and a closed record. It is not an archive yet: its header is zero.
//! COMPACT-3  It is verified from the medium: every page, count and entry on its own, then record
//!     by record and byte by byte against the old file, the live tree and each snapshot. Data that
//!     a version shares with the previous one is read once (`versions.rs` proves that this
//!     suffices).
//! COMPACT-4  Owner, mode and extended attributes, fsync, the header with its key slots, fsync,
//!     exchange of the names, fsync of the directory, removal of the old file's name, fsync of the
//!     directory. A crash therefore leaves the old or the new archive under the name, and at most
//!     one leftover file. The next run removes a leftover without a header (COMPACT-2) or with a
//!     partial one; one that the archive continues from its newest commit; and one with byte for
//!     byte the content of the archive, as after a kill between header and exchange. Any other file
//!     may belong to another program, or is the old file after a rekey, which cannot be opened with
//!     the new key alone. It is kept.
//! COMPACT-5  Nothing is done to the object that a path currently denotes, and no other file can
//!     become the archive: see `replace.rs`.
//! COMPACT-6  For a storage that is not a file, its opener excludes other writers, and the storage
//!     replaces its content atomically (STORAGE-5) after COMPACT-1 to 3: there is no name and no
//!     leftover. Remote file data is read once for the comparison, which authenticates everything
//!     in all versions.

pub(super) mod replace;
pub(super) mod versions;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;

use super::create::name_key;
use super::{Archive, OpenOptions};
use crate::env::SystemEnvironment;
use crate::error::{Error, Result};
use crate::format::header::{FEATURE_LOG, Framing};
use crate::format::page::{Chunk, PackedItem, PageKind};
use crate::format::values::Extent;
use crate::format::{BLOCK, Ino, Key, MAX_OFFSET, MIN_BLOCKS, Pointer};
use crate::frame::{self, Compression, OpenedPage, PageCipher, PageContent, PlainPage};
use crate::fs::{FileSystem, join_ranges};
use crate::keys::header::{self, Header, Slots};
use crate::keys::rollback::RollbackCheck;
use crate::keys::{RollbackGuard, RollbackOptions, UnlockedKey};
use crate::storage::{ArchiveSource, FileStorage, Storage};
use crate::txn::{self, Ancestry, Mark, State, Volume};
use versions::NameRehash;

/// Word in the name of an unfinished file.
const UNFINISHED: &str = "compact";

#[derive(Clone, Debug, Default)]
pub struct CompactOptions {
    /// Only estimate.
    pub dry_run: bool,
    /// Compact a file with several hard links, although the others keep the old file.
    pub break_links: bool,
    /// Compression of all file data; `None` leaves whole pages unchanged.
    pub compression: Option<Compression>,
    /// Rollback state of the user: an older copy or a fork is refused as by [`Archive::open_seen`].
    pub seen: RollbackOptions,
}

/// Progress; bytes of file data, of the estimate `total`. Data in several snapshots counts once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactStep {
    Created,
    Copying {
        done: u64,
        total: u64,
    },
    Copied,
    Verifying {
        done: u64,
        total: u64,
    },
    Verified,
    /// Only the replacement follows.
    Prepared,
    Replaced,
}

/// Sizes on the host in bytes: length of the file, and disk usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactReport {
    pub length_before: u64,
    pub disk_before: u64,
    /// After a dry run: the size of the pages in use, slightly more than after compaction.
    pub length_after: u64,
    pub disk_after: u64,
}

impl Archive {
    /// Compacts the archive at this path (symbolic links are followed), including its snapshots.
    /// `step` reports the progress; its error aborts with everything unchanged.
    ///
    /// # Errors
    /// - `InUse` while another process has it open,
    /// - `Refused` for a file with several hard links,
    /// - `Damaged` when a page of the live tree or of a snapshot does not open,
    /// - `NoSpace`,
    /// - `Replaced`, `OlderCopy` and `ForkedCopy` unless they are accepted,
    /// - `Unsupported` for a storage that cannot be replaced.
    pub fn compact<'a>(
        site: impl Into<ArchiveSource<'a>>,
        key: &UnlockedKey,
        options: &CompactOptions,
        step: &mut dyn FnMut(CompactStep) -> Result<()>,
    ) -> Result<CompactReport> {
        rewrite(site.into(), key, options, &mut CompactTarget::same, step)
    }
}

/// Periodic callback with the bytes of file data done; its error aborts.
type BytesWatch<'a> = dyn FnMut(u64) -> Result<()> + 'a;

/// Header and key of the new file.
pub(super) struct CompactTarget {
    pub(super) key: UnlockedKey,
    pub(super) framing: Framing,
    pub(super) slots: Slots,
}

impl CompactTarget {
    fn same(header: &Header, key: &UnlockedKey) -> Result<CompactTarget> {
        Ok(CompactTarget { key: key.copy(), framing: with_log(header.framing()), slots: header.slots() })
    }
}

/// Returns the framing of a new file, which has a log. If the old file had none, the header number
/// grows, so that the old header cannot be substituted to hide the log.
pub(super) fn with_log(framing: &Framing) -> Framing {
    let sequence = framing.sequence + u64::from(!framing.has_log());
    Framing { features: framing.features | FEATURE_LOG, sequence, ..framing.clone() }
}

/// Writes the content into a new archive that `prepare` describes, after checking that the archive
/// may be opened, and replaces the old one.
pub(super) fn rewrite(
    site: ArchiveSource<'_>,
    key: &UnlockedKey,
    options: &CompactOptions,
    prepare: PrepareTarget<'_>,
    step: &mut dyn FnMut(CompactStep) -> Result<()>,
) -> Result<CompactReport> {
    match site {
        ArchiveSource::File(path) => rewrite_file(path, key, options, prepare, step),
        ArchiveSource::Storage(storage) => rewrite_storage(storage, key, options, prepare, step),
    }
}

fn rewrite_file(
    path: &Path,
    key: &UnlockedKey,
    options: &CompactOptions,
    prepare: PrepareTarget<'_>,
    step: &mut dyn FnMut(CompactStep) -> Result<()>,
) -> Result<CompactReport> {
    let real = std::fs::canonicalize(path).map_err(|e| Error::io(format!("cannot find {}", path.display()), e))?;
    let file = replace::OldArchive::open(&real)?;
    file.check_names(options.break_links)?;
    let mut before = SourceArchive::look(file.storage.clone(), key, options)?;
    let sizes = replace::sizes(&file.storage, &file.entry)?;
    if options.dry_run {
        return Ok(report(sizes, (before.used, before.used)));
    }
    before.settle()?;
    let target = prepare(&before.header, key)?;
    let (old, total) = (&before.archive, before.used);
    let superseded =
        &mut |leftover| is_superseded(leftover, key, old, &mut |done| step(CompactStep::Verifying { done, total }));
    for name in replace::remove_leftovers(&file.entry, UNFINISHED, superseded) {
        tracing::warn!(
            name,
            "this file is next to the archive, and may have content that the archive lacks, or be the archive from before 'key rekey': \
             check it, then remove it"
        );
    }
    let new_file = replace::UnfinishedFile::new(&file.entry, UNFINISHED)?;
    step(CompactStep::Created)?;
    let new = before.copy(new_file.storage.clone(), &target, true, step)?;
    new_file.copy_metadata(&file)?;
    step(CompactStep::Prepared)?;
    file.check_names(options.break_links)?;
    write_header(&*new_file.storage, &target)?;
    before.announce(&target, &options.seen);
    let retained = new_file.replace(&file)?;
    let rekeyed = before.remember(new, &target, &options.seen);
    if let Some(retained) = retained {
        retained.report(&file, rekeyed)?;
    }
    let after = replace::sizes(&new_file.storage, &new_file.entry)?;
    // The replacement is complete and can no longer be aborted.
    let _ = step(CompactStep::Replaced);
    Ok(report(sizes, after))
}

/// Compacts a storage that is not a file (COMPACT-6).
fn rewrite_storage(
    storage: &Arc<dyn Storage>,
    key: &UnlockedKey,
    options: &CompactOptions,
    prepare: PrepareTarget<'_>,
    step: &mut dyn FnMut(CompactStep) -> Result<()>,
) -> Result<CompactReport> {
    let sizes = |storage: &dyn Storage| Ok::<_, Error>((storage.len()?, storage.allocated()?));
    let mut before = SourceArchive::look(storage.clone(), key, options)?;
    let sizes_before = sizes(&**storage)?;
    if options.dry_run {
        return Ok(report(sizes_before, (before.used, before.used)));
    }
    before.settle()?;
    let target = prepare(&before.header, key)?;
    let next = storage.begin_replace()?;
    step(CompactStep::Created)?;
    let new = before.copy(next.storage(), &target, false, step)?;
    step(CompactStep::Prepared)?;
    write_header(&*next.storage(), &target)?;
    let after = sizes(&*next.storage())?;
    before.announce(&target, &options.seen);
    next.publish()?;
    before.remember(new, &target, &options.seen);
    let _ = step(CompactStep::Replaced);
    Ok(report(sizes_before, after))
}

/// Callback that chooses header and key of the new archive.
type PrepareTarget<'a> = &'a mut dyn FnMut(&Header, &UnlockedKey) -> Result<CompactTarget>;

/// Lengths and bytes on the host.
type Sizes = (u64, u64);

fn report((length_before, disk_before): Sizes, (length_after, disk_after): Sizes) -> CompactReport {
    CompactReport { length_before, disk_before, length_after, disk_after }
}

struct SourceArchive<'a> {
    storage: Arc<dyn Storage>,
    key: &'a UnlockedKey,
    header: Header,
    looked: RollbackCheck,
    /// The rollback state contradicted the archive, and that was accepted.
    replace: bool,
    archive: Arc<FileSystem>,
    /// Bytes in use, unverified. Progress counts every byte twice.
    used: u64,
    compression: Option<Compression>,
}

impl SourceArchive<'_> {
    fn look<'a>(
        storage: Arc<dyn Storage>,
        key: &'a UnlockedKey,
        options: &CompactOptions,
    ) -> Result<SourceArchive<'a>> {
        let seen = &options.seen;
        let header = key.read_header(&*storage)?;
        header.check_writable()?;
        let looked = RollbackCheck::at(seen, &key.volume_key, &key.archive).opened_by_recipient(key.by_recipient);
        let archive = open(storage.clone(), key, header.framing(), looked.mark(), true)?;
        let replace = looked.admit(&archive.volume, header.framing().sequence, seen, false)?;
        if let Some(sentence) = looked.first_use() {
            tracing::warn!("{sentence}");
        }
        let used =
            archive.volume.durable().used_blocks.saturating_add(MIN_BLOCKS).saturating_mul(BLOCK).min(MAX_OFFSET);
        Ok(SourceArchive { storage, key, header, looked, replace, archive, used, compression: options.compression })
    }

    /// COMPACT-1: runs a regular session that completes the work of an interrupted one.
    fn settle(&mut self) -> Result<()> {
        let old = &self.archive;
        if old.volume.lays_log() || old.has_pending_reclaim()? || old.volume.has_begun_removals()? {
            self.header.repair(&*self.storage, &self.key.volume_key)?;
            let mended = self.open(false)?;
            mended.finish_removals(&mut || Ok(()))?;
            mended.close()?;
            self.archive = self.open(true)?;
        }
        Ok(())
    }

    fn open(&self, read_only: bool) -> Result<Arc<FileSystem>> {
        open(self.storage.clone(), self.key, self.header.framing(), self.looked.mark(), read_only)
    }

    /// COMPACT-2 and 3. With `each_page`, every page is also verified on its own before the
    /// comparison.
    fn copy(
        &self,
        storage: Arc<dyn Storage>,
        target: &CompactTarget,
        each_page: bool,
        step: &mut dyn FnMut(CompactStep) -> Result<()>,
    ) -> Result<Arc<Volume>> {
        let (old, total) = (&*self.archive, self.used);
        let watch = &mut |done| step(CompactStep::Copying { done, total });
        let new = fill(old, storage.clone(), target, self.compression, watch)?;
        step(CompactStep::Copied)?;
        verify(old, storage, target, each_page, &mut |done| step(CompactStep::Verifying { done, total }))?;
        step(CompactStep::Verified)?;
        Ok(new)
    }

    /// Announces a change of the volume key to the user's memory of places (PLACE-4).
    fn announce(&self, target: &CompactTarget, seen: &RollbackOptions) {
        if target.framing.commitment != self.header.framing().commitment {
            RollbackCheck::of_successor(seen, &target.key.volume_key, &target.key.archive).places.announce();
        }
    }

    /// Updates the rollback state: the archive before this run is an older copy from now on.
    /// Returns whether the archive has a new key.
    fn remember(self, new: Arc<Volume>, target: &CompactTarget, seen: &RollbackOptions) -> bool {
        let rekeyed = target.framing.commitment != self.header.framing().commitment;
        if !rekeyed {
            let sequence = self.header.durable_sequence().max(target.framing.sequence);
            RollbackGuard::new(new, sequence, self.looked, self.replace).remember();
        } else {
            // Also under the old key: a copy from before is an older one for readers that have it.
            RollbackGuard::new(new.clone(), target.framing.sequence, self.looked, self.replace).remember();
            let looked = RollbackCheck::of_successor(seen, &target.key.volume_key, &target.key.archive);
            looked.places.remember(Some(&new));
            RollbackGuard::new(new, target.framing.sequence, looked, false).remember();
        }
        rekeyed
    }
}

/// Returns whether a leftover file has nothing that the archive lacks (COMPACT-4).
fn is_superseded(
    leftover: Arc<FileStorage>,
    key: &UnlockedKey,
    archive: &FileSystem,
    watch: &mut BytesWatch<'_>,
) -> Result<bool> {
    if !header::is_begun(&*leftover)? {
        return Ok(true);
    }
    let header = Header::read(&*leftover)?;
    if header.framing().archive != key.archive {
        return Ok(false);
    }
    header.authenticate(&key.volume_key)?;
    let leftover = open(leftover, key, header.framing(), None, true)?;
    let Some(newest) = leftover.volume.opened_at() else { return Ok(false) };
    if archive.volume.descent_from(&newest)? == Ancestry::Descendant {
        return Ok(true);
    }
    // The log of another program's file may contain more than its trees.
    if leftover.volume.lays_log() {
        return Ok(false);
    }
    let names = NameRehash::new(&archive.name_key, &leftover.name_key);
    versions::compare(&archive.volume, &leftover.volume, &names, watch).map(|()| true)
}

/// Writes the header, which completes the archive after its content was verified (COMPACT-4).
fn write_header(storage: &dyn Storage, target: &CompactTarget) -> Result<()> {
    let key = &target.key.volume_key;
    header::write_over(storage, None, &target.framing, &target.slots, key)?;
    storage.evict(0, storage.len()?)?;
    let written = Header::read(storage)?;
    written.authenticate(key)?;
    match written.flaw(key) {
        None => Ok(()),
        Some(flaw) => Err(Error::damaged(format!("the new archive is not sound: {flaw}"))),
    }
}

/// Opens the volume read-only (COMPACT-1); usually nothing is written, although the lock permits
/// it.
fn open(
    storage: Arc<dyn Storage>,
    key: &UnlockedKey,
    framing: &Framing,
    seen: Option<&Mark>,
    read_only: bool,
) -> Result<Arc<FileSystem>> {
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    let environment = Arc::new(SystemEnvironment);
    let cipher = PageCipher::new(&key.volume_key, key.archive, framing.has_log(), environment.clone());
    let volume_options = txn::OpenOptions { read_only, memory: options.memory / 2 };
    let volume = Volume::open_seen(storage, cipher, environment.clone(), framing.sequence, &volume_options, seen)?;
    FileSystem::new(volume, environment, name_key(&key.volume_key, &key.archive), options.file_system_options())
}

fn fill(
    old: &FileSystem,
    storage: Arc<dyn Storage>,
    target: &CompactTarget,
    compression: Option<Compression>,
    watch: &mut BytesWatch<'_>,
) -> Result<Arc<Volume>> {
    let environment = Arc::new(SystemEnvironment);
    let key = &target.key;
    let cipher = PageCipher::new(&key.volume_key, key.archive, target.framing.has_log(), environment.clone());
    let new = Volume::continue_from(&old.volume, storage, cipher, environment, target.framing.sequence)?;
    let names = NameRehash::new(&old.name_key, &name_key(&key.volume_key, &key.archive));
    versions::copy(&old.volume, &new, &names, compression, watch)?;
    Ok(new)
}

/// Verifies the new file (COMPACT-3).
fn verify(
    old: &FileSystem,
    storage: Arc<dyn Storage>,
    target: &CompactTarget,
    each_page: bool,
    watch: &mut BytesWatch<'_>,
) -> Result<()> {
    storage.barrier()?;
    storage.evict(0, storage.len()?)?;
    let new = open(storage, &target.key, &target.framing, None, true)?;
    let mut findings = new.volume.check_space(each_page, &mut |_, _| {})?;
    findings.extend(new.check_structure(false)?);
    if let Some(finding) = findings.first() {
        return Err(Error::damaged(format!("the new archive is not sound: {finding}")));
    }
    let names = NameRehash::new(&old.name_key, &new.name_key);
    versions::compare(&old.volume, &new.volume, &names, watch)
}

/// Maximum items of a page (specification 5.3).
const MAX_ITEMS: usize = 4096;

/// Page named by several extents, in one version or in several.
#[derive(Default)]
struct SharedPage {
    /// Named ranges; merged and ascending once the page is written.
    ranges: Vec<Range<u32>>,
    /// Number of extents in all versions.
    extents: u32,
    written: Option<Pointer>,
}

/// Pages of the old archive and their copies. Parts that no extent names are dropped, and a shared
/// page is written once; the pipeline in which that happens has two threads.
///
/// Memory: about 150 bytes for each page that several extents name in any version, since a later
/// version may name a page that was written for an earlier one.
pub(in crate::archive) struct PageCopier<'a> {
    from: &'a Volume,
    state: &'a State,
    to: &'a Volume,
    /// Shared pages by pointer: all versions are in one file, so their pages have different
    /// addresses.
    shared: HashMap<Pointer, SharedPage>,
    /// Last page that was looked up, and whether it is shared: neighbouring extents are often in
    /// one page.
    last: Option<(Pointer, bool)>,
    /// Adds context to an error of the new file.
    said: fn(Error) -> Error,
    /// Compression of the copies; `None` leaves whole pages unchanged.
    compression: Option<Compression>,
}

impl<'a> PageCopier<'a> {
    pub(in crate::archive) fn new(
        from: &'a Volume,
        state: &'a State,
        to: &'a Volume,
        said: fn(Error) -> Error,
    ) -> PageCopier<'a> {
        PageCopier { from, state, to, shared: HashMap::new(), last: None, said, compression: None }
    }

    /// Registers an extent. Must be called for every extent added in any version before the first
    /// page is written.
    pub(in crate::archive) fn announce(&mut self, extent: &Extent) -> Result<()> {
        let is_shared = match self.last {
            Some((page, is_shared)) if page == extent.page => is_shared,
            _ => self.from.count_in(self.state, &extent.page)? > 1,
        };
        self.last = Some((extent.page, is_shared));
        if is_shared {
            let shared = self.shared.entry(extent.page).or_default();
            shared.extents += 1;
            shared.ranges.push(extent.start..extent.start + extent.length);
            if shared.ranges.len() > 64 {
                shared.ranges = join_ranges(std::mem::take(&mut shared.ranges));
            }
        }
        Ok(())
    }

    /// Updates `value`, the extent at `key`, to its page in the new file. Writes the page unless it
    /// is written already; a new page is added to `adopted` with the number of its extents. Returns
    /// the bytes of file data.
    pub(in crate::archive) fn carry(
        &mut self,
        key: Key,
        value: &mut Vec<u8>,
        adopted: &mut Vec<(Pointer, u32)>,
    ) -> Result<u64> {
        let extent = Extent::decode(value)?;
        let (page, start, named_by) = self.place(Ino(key.object), key.sub, &extent)?;
        adopted.extend(named_by.map(|extents| (page, extents)));
        *value = Extent { page, start, ..extent }.encode().to_vec();
        Ok(u64::from(extent.length))
    }

    /// Writes the page of `extent`, unless it is written already. Returns it with the extent's
    /// offset in it and, for a new page, the number of extents that will name it.
    fn place(&mut self, ino: Ino, offset: u64, extent: &Extent) -> Result<(Pointer, u32, Option<u32>)> {
        let Some(shared) = self.shared.get_mut(&extent.page) else {
            let range = extent.start..extent.start + extent.length;
            let page = self.copy(ino, offset, extent, std::slice::from_ref(&range))?;
            return Ok((page, 0, Some(1)));
        };
        if let Some(page) = shared.written {
            return Ok((page, moved(&shared.ranges, extent.start), None));
        }
        shared.ranges = join_ranges(std::mem::take(&mut shared.ranges));
        let (ranges, extents) = (shared.ranges.clone(), shared.extents);
        let page = self.copy(ino, offset, extent, &ranges)?;
        if let Some(shared) = self.shared.get_mut(&extent.page) {
            shared.written = Some(page);
        }
        Ok((page, moved(&ranges, extent.start), Some(extents)))
    }

    fn copy(&self, ino: Ino, offset: u64, extent: &Extent, ranges: &[Range<u32>]) -> Result<Pointer> {
        let opened = self.from.open_page(&extent.page)?;
        if !matches!(opened.prologue.kind, PageKind::Data | PageKind::Packed) {
            return Err(Error::damaged(format!("page of another kind: block={}", extent.page.run.address)));
        }
        let length = opened.table()?.plain_length;
        if ranges.last().is_none_or(|last| last.end > length) {
            return Err(Error::damaged("an extent reaches beyond its page"));
        }
        if self.compression.is_none() && ranges.len() == 1 && ranges[0] == (0..length) {
            return self.to.write_framed(&whole(&opened)?).map_err(self.said);
        }
        let retained = plain(&opened, ranges)?;
        let page = reframed(&opened, ranges, &retained, (ino, offset), self.compression)?;
        self.to.write_framed(&page).map_err(self.said)
    }
}

fn plain(opened: &OpenedPage, ranges: &[Range<u32>]) -> Result<Vec<u8>> {
    let table = opened.table()?;
    let mut plain = Vec::with_capacity(table.plain_length as usize);
    for chunk in 0..table.chunks.len() {
        plain.extend_from_slice(&opened.read_chunk(chunk)?);
    }
    Ok(ranges.iter().map(|range| &plain[range.start as usize..range.end as usize]).collect::<Vec<_>>().concat())
}

/// Copies the whole page without recompressing its chunks.
fn whole(opened: &OpenedPage) -> Result<PlainPage<'_>> {
    let (prologue, table) = (opened.prologue, opened.table()?);
    let stored =
        |chunk: &Chunk| (Cow::Borrowed(&opened.body()[chunk.at as usize..][..chunk.stored as usize]), chunk.raw);
    let chunks = table.chunks.iter().map(stored).collect();
    let chunk_log2 = table.chunk_size.trailing_zeros() as u8; // at most 17
    Ok(PlainPage {
        kind: prologue.kind,
        compressed: false,
        plain_length: prologue.plain_length,
        owner: prologue.owner,
        position: prologue.position,
        content: PageContent::Chunks { chunk_log2, chunks, items: table.items.clone() },
    })
}

/// Builds a page of `retained`, the bytes of the ranges; by default compressed like the old page.
fn reframed<'a>(
    opened: &'a OpenedPage,
    ranges: &[Range<u32>],
    retained: &'a [u8],
    (ino, offset): (Ino, u64),
    compression: Option<Compression>,
) -> Result<PlainPage<'a>> {
    let prologue = opened.prologue;
    let table = opened.table()?;
    let mut items = Vec::new();
    let mut at = 0;
    for range in ranges {
        for item in &table.items {
            let (from, to) = (item.start.max(range.start), (item.start + item.length).min(range.end));
            if from < to {
                let offset = item.offset + u64::from(from - item.start);
                items.push(PackedItem { ino: item.ino, offset, start: at + from - range.start, length: to - from });
            }
        }
        if prologue.kind == PageKind::Data {
            let offset = prologue.position + u64::from(range.start);
            items.push(PackedItem { ino: Ino(prologue.owner), offset, start: at, length: range.len() as u32 });
        }
        at += range.len() as u32;
    }
    let compression = compression.unwrap_or_else(|| Compression::of_page(table));
    if prologue.kind == PageKind::Data && ranges.len() == 1 {
        return Ok(frame::data_page(prologue.owner, items[0].offset, retained, compression));
    }
    if items.is_empty() {
        return Ok(frame::data_page(ino.0, offset, retained, compression));
    }
    // Used for rescue only; extents do not need them.
    items.truncate(MAX_ITEMS);
    Ok(frame::packed_page(retained, &items, compression))
}

/// Translates offset `start` of the old page to one that consists of `ranges`.
fn moved(ranges: &[Range<u32>], start: u32) -> u32 {
    let mut at = 0;
    for range in ranges {
        if range.contains(&start) {
            return at + start - range.start;
        }
        at += range.len() as u32;
    }
    start
}

/// Maximum parts in the queue.
const WAITING: usize = 16;

/// Passes each part from `read` to `write`, in order, on a separate thread: one reads and seals
/// pages of file data, the other builds the trees that name them, which takes about as long.
/// Errors: that of `write`, else that of `read`; either ends both. Parts passed on before `read`
/// failed are written.
pub(in crate::archive) fn relay<T: Send>(
    read: impl FnOnce(&mut dyn FnMut(T) -> Result<()>) -> Result<()>,
    write: impl FnMut(T) -> Result<()> + Send,
) -> Result<()> {
    thread::scope(|scope| {
        let (sender, parts) = mpsc::sync_channel(WAITING);
        let writer = thread::Builder::new()
            .name("relay".into())
            .spawn_scoped(scope, || parts.into_iter().try_for_each(write))
            .map_err(|error| Error::io("cannot start a thread", error))?;
        let was_read = read(&mut |part| {
            // The queue is closed when the writer has failed; then the writer's error is returned.
            sender.send(part).map_err(|_| Error::Invalid("the writer thread has ended".into()))
        });
        drop(sender);
        let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        written.and(was_read)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_in_order_and_all_of_them() {
        let mut seen = Vec::new();
        let read = |hand_on: &mut dyn FnMut(u32) -> Result<()>| (0..100).try_for_each(hand_on);
        relay(read, |part| {
            seen.push(part);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn an_error_of_either_ends_both_and_that_of_the_writer_is_told() {
        let failed = |what: &str| Error::Invalid(what.into());
        let mut handed_on = 0;
        let read = |hand_on: &mut dyn FnMut(u32) -> Result<()>| {
            loop {
                hand_on(0)?;
                handed_on += 1;
            }
        };
        let error = relay(read, |_| Err(failed("writer"))).unwrap_err();
        assert!(error.to_string().contains("writer"), "{error}");
        assert!(handed_on <= WAITING + 1);

        let mut written = 0;
        let read = |hand_on: &mut dyn FnMut(u32) -> Result<()>| {
            hand_on(1)?;
            Err(failed("reader"))
        };
        let error = relay(read, |_| {
            written += 1;
            Ok(())
        })
        .unwrap_err();
        assert!(error.to_string().contains("reader") && written == 1, "{error}");
    }
}
