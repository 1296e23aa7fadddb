//! Decides how a sealed layer becomes pages (inline, packed with other small files, one page a
//! piece, or merged frames), and writes them on all processors.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::thread;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::format::page::ITEM;
use crate::format::values::InodeValue;
use crate::format::{BLOCK, Ino};
use crate::fs::extents::{
    self, FRAME, INLINE, MappedExtent, PACK, PACK_FILES, Packer, SharedPage, compression_of, gaps, join_ranges,
    may_be_packed, packs,
};
use crate::fs::inode;
use crate::fs::types::FsOptions;
use crate::fs::write_buffer::{DirtyPiece, FilePlan, Frame, INLINE_GROUPS, Layer, WritebackBatch};
use crate::txn::{Reservation, UnreferencedPages, View, Volume, groups_for};

/// Minimum frames per thread: one takes 20 to 50 us, starting a thread about 50.
pub(in crate::fs) const MIN_FRAMES_PER_THREAD: usize = 16;

/// Frames that a thread takes at a time.
const STRIDE: usize = 8;

/// Frame content up to this many bytes is rewritten whole: one group of blocks, which a separate
/// page would take too.
const SMALL_FRAME: u64 = 16 * 1024;

/// Maximum pieces of a frame that become a page each: more cost more space than they save.
const MAX_PIECES: usize = 12;

/// Extents beyond which a frame is rewritten whole. Pieces of 4 KiB never reach it: each replaces
/// one, and 32 are a frame.
const MAX_EXTENTS: usize = 32;

/// Maximum ratio of the blocks of a frame's pages to the blocks of its content; beyond it the frame
/// is rewritten whole, which is most of the cost of random writes. With a ratio of 2, an archive of
/// synced overwrites takes more than twice its content.
const MAX_SPREAD: (u64, u64) = (3, 2);

/// Bytes of sealed pages that a batch sealed ahead keeps in memory: more than a full log needs.
const MOST_UNWRITTEN: usize = 4 << 20;

/// Relation of a batch to the next commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchKind {
    Whole,
    /// Sealed ahead of a commit. Where only a barrier makes a log entry durable, an entry would
    /// wait for the pages of this batch, so they stay in memory until the commit names them.
    Ahead,
    /// Data that arrived after a batch ahead of the commit: frames that are rewritten only to save
    /// space are left to a later batch.
    Remainder,
}

pub(super) struct PagePlanner<'a> {
    pub(super) volume: &'a Arc<Volume>,
    pub(super) options: FsOptions,
    pub(super) view: View<'a>,
    pub(super) reserved: &'a mut Option<Reservation>,
    /// Maximum number of threads that write frames.
    pub(super) threads: usize,
    pub(super) kind: BatchKind,
    pub(super) batch: &'a WritebackBatch,
    pub(super) written: UnreferencedPages,
}

impl PagePlanner<'_> {
    /// Plans and writes the layers in the given order (ascending numbers, so that files created
    /// together are packed together).
    pub(super) fn plan(mut self, layers: &[(Ino, Arc<Layer>)]) -> Result<(Vec<FilePlan>, UnreferencedPages)> {
        let mut plans = Vec::with_capacity(layers.len());
        let mut packer = Packer::new(self.options, PACK_FILES);
        if self.volume.is_remote() {
            self.prefetch_old_pages(layers)?;
        }
        for (ino, layer) in layers {
            let Some(inode) = inode::find(self.view, *ino)? else { continue };
            let mut plan = FilePlan::new(*ino, layer.end(), inode);
            if let Some(content) = self.inline(&plan, &inode, layer)? {
                plan.inline = Some(content);
                plan.cuts = extents::measure(self.view, *ino, 0..inode.trim, u64::MAX)?.0;
            } else if let Some(content) = self.packable_content(&inode, layer) {
                plan.cuts = extents::measure(self.view, *ino, 0..inode.trim.min(plan.end), u64::MAX)?.0;
                packer.add(inode.uid, inode.flags, content.len(), (plans.len(), content));
            } else {
                self.frames(&mut plan, &inode, layer)?;
            }
            plans.push(plan);
        }
        for page in packer.pages() {
            self.pack(&mut plans, &page)?;
        }
        Ok((plans, self.written))
    }

    /// Prefetches all data that [`Self::merge_contents`] will read of old pages: one round trip to
    /// a remote archive instead of one for each piece.
    fn prefetch_old_pages(&self, layers: &[(Ino, Arc<Layer>)]) -> Result<()> {
        let mut expected = Vec::new();
        for (ino, layer) in layers {
            let Some(inode) = inode::find(self.view, *ino)?.filter(|inode| inode.bytes > 0) else { continue };
            for (number, frame) in layer.frames() {
                let (base, range) = (number * FRAME, number * FRAME..((number + 1) * FRAME).min(inode.trim));
                let mapped = extents::find_overlapping(self.view, *ino, range.clone(), usize::MAX)?;
                // Merges for which no space is found are prefetched in vain.
                let layouts = choose_layouts(&piece_ranges(base, frame), &mapped, &range, self.kind);
                let runs = if let Some(Layout::Ranges(runs)) = layouts.first() { &runs[..] } else { &[] };
                let parts = runs.iter().flat_map(|run| old_parts(base, frame, &mapped, run));
                expected.extend(
                    parts.map(|(old, part)| (old.extent.page, old.start_of(&part), (part.end - part.start) as u32)),
                );
            }
        }
        self.volume.prefetch_data(expected.iter().map(|(page, start, length)| (page, *start, *length)));
        Ok(())
    }

    /// Reserves space for a page of `bytes` bytes. The space exists (STAGE-4), with two exceptions:
    /// an earlier failed attempt to write the layer used it up and other threads took it after its
    /// release, or the old data of a frame is unreadable. Then the page uses the reserve of
    /// deletes, because no commit is possible without it.
    fn reservation_for(&mut self, bytes: usize) -> Result<&mut Reservation> {
        let held = self.reserved.as_ref().map_or(0, Reservation::groups);
        let missing = groups_for(bytes as u64, 1).saturating_sub(held);
        if missing > 0 {
            self.volume.reserve_spare_accepted(missing).ok_or_else(no_space)?.join(self.reserved);
        }
        self.reserved.as_mut().ok_or_else(no_space)
    }

    /// Reserves space that writeback can do without, in addition to the space of the layers.
    fn reserve_more(&mut self, groups: u64) -> Result<()> {
        if groups > 0 {
            self.volume.reserve_spare(groups).ok_or_else(no_space)?.join(self.reserved);
        }
        Ok(())
    }

    /// Returns the whole content of a file that is to be stored inline.
    fn inline(&self, plan: &FilePlan, inode: &InodeValue, layer: &Layer) -> Result<Option<Vec<u8>>> {
        if plan.end > INLINE {
            return Ok(None);
        }
        let whole = as_single_piece(layer).is_some() && plan.end >= inode.size;
        let mut content = Vec::new();
        if !whole {
            if extents::measure(self.view, plan.ino, 0..inode.trim, 1)?.0 > 0 {
                return Ok(None);
            }
            content = extents::load_inline(self.view, plan.ino, inode)?.unwrap_or_default();
        }
        if content.len() as u64 > INLINE {
            return Ok(None);
        }
        content.resize(content.len().max(plan.end as usize), 0);
        for (offset, data) in layer.iter() {
            content[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        }
        Ok(Some(content))
    }

    fn packable_content<'l>(&self, inode: &InodeValue, layer: &'l Layer) -> Option<&'l [u8]> {
        let whole = layer.end() <= PACK && layer.end() >= inode.size;
        if whole && packs(&self.options, inode.flags) { as_single_piece(layer) } else { None }
    }

    fn pack(&mut self, plans: &mut [FilePlan], page: &SharedPage<(usize, &[u8])>) -> Result<()> {
        let files: Vec<_> = page.items.iter().map(|(index, content)| (plans[*index].ino, 0, *content)).collect();
        let volume = self.volume;
        let written = volume.pack(self.reservation_for(page.bytes)?, &files, page.compression)?.sorted();
        for (index, _) in &page.items {
            let plan = &mut plans[*index];
            plan.pieces.extend_from_slice(written.of(plan.ino));
        }
        self.add(written)
    }

    /// Adds pages of the plans, and writes them now unless they have to stay in memory.
    fn add(&mut self, pages: UnreferencedPages) -> Result<()> {
        self.written.absorb(pages);
        let is_ahead = self.kind == BatchKind::Ahead;
        let keeps = is_ahead && !self.volume.has_range_sync();
        if self.written.unwritten_bytes() <= if keeps { MOST_UNWRITTEN } else { 0 } {
            return Ok(());
        }
        self.written.write()?;
        if is_ahead && !keeps && !self.batch.is_awaited() { self.volume.sync_ahead_in_steps() } else { Ok(()) }
    }

    fn frames(&mut self, plan: &mut FilePlan, inode: &InodeValue, layer: &Layer) -> Result<()> {
        // A file has inline data or extents: inline data that the layer does not replace becomes
        // part of its first frame.
        let old = extents::load_inline(self.view, plan.ino, inode)?.unwrap_or_default();
        let gaps = layer.gaps(0..old.len() as u64);
        if !gaps.is_empty() {
            let mut first = layer.frames().get(&0).cloned().unwrap_or_default();
            // Reserved with any frame that was accepted over inline data, which does not spend it
            // (`Frame::own_groups`).
            first.reserved_groups = first.own_groups() + INLINE_GROUPS;
            first.inline = false;
            for gap in &gaps {
                first.put(gap.start as u32, &old[gap.start as usize..gap.end as usize]);
            }
            self.frame(plan, inode, 0, &first)?;
        }
        let rest = layer.frames().iter().filter(|(number, _)| **number > 0 || gaps.is_empty());
        let rest: Vec<(u64, &Frame)> = rest.map(|(number, frame)| (*number, frame)).collect();
        self.write_frames(plan, inode, &rest)
    }

    /// Runs [`Self::frame`] for each of the frames, ascending.
    fn write_frames(&mut self, plan: &mut FilePlan, inode: &InodeValue, frames: &[(u64, &Frame)]) -> Result<()> {
        let threads = self.threads.min(frames.len() / MIN_FRAMES_PER_THREAD);
        if threads < 2 {
            return frames.iter().try_for_each(|(number, frame)| self.frame(plan, inode, *number, frame));
        }
        let PagePlanner { volume, options, view, kind, batch, .. } = *self;
        let planned = &*plan;
        let share = |(_, frame): &(u64, &Frame)| frame.reserved_groups;
        let parts = run_parallel(threads, STRIDE, frames, self.reserved, share, |mine, reserved| {
            let mut part = FilePlan::new(planned.ino, planned.end, *inode);
            let written = UnreferencedPages::new(volume);
            let mut own = PagePlanner { volume, options, view, reserved, threads: 1, kind, batch, written };
            mine.iter().try_for_each(|(number, frame)| own.frame(&mut part, inode, *number, frame))?;
            Ok((part, own.written))
        })?;
        for (part, written) in parts {
            plan.pieces.extend(part.pieces);
            plan.cuts += part.cuts;
            plan.fills_holes |= part.fills_holes;
            self.written.absorb(written);
        }
        Ok(())
    }

    /// Returns the first of `choices` for which there is space. The reservation of the frame covers
    /// the last one; nothing is reserved for the additional space of a merge, which is only an
    /// optimization.
    fn choose_affordable(&mut self, reserved_groups: u64, choices: Vec<Layout>) -> Layout {
        let mut last = Layout::Ranges(Vec::new());
        for layout in choices {
            if self.reserve_more(layout.groups().saturating_sub(reserved_groups)).is_ok() {
                return layout;
            }
            last = layout;
        }
        last
    }

    /// Writes one frame: its pieces as they are, or merged with the data of its extents.
    fn frame(&mut self, plan: &mut FilePlan, inode: &InodeValue, number: u64, frame: &Frame) -> Result<()> {
        if self.kind == BatchKind::Ahead && !self.batch.is_awaited() {
            // A request would otherwise wait until this thread has used up its time slice of some
            // milliseconds. Once a commit waits for the batch, a yield would delay all its callers.
            thread::yield_now();
        }
        let range = number * FRAME..((number + 1) * FRAME).min(inode.trim);
        let mapped = if inode.bytes == 0 {
            Vec::new()
        } else {
            extents::find_overlapping(self.view, plan.ino, range.clone(), usize::MAX)?
        };
        plan.cuts += mapped.len() as u64;
        let base = number * FRAME;
        let staged = piece_ranges(base, frame);
        let volume = self.volume;
        let compression = compression_of(&self.options, inode.flags);
        let layouts = choose_layouts(&staged, &mapped, &range, self.kind);
        let mut runs = match self.choose_affordable(frame.own_groups(), layouts) {
            Layout::Ranges(runs) => runs,
            Layout::Gathered(bytes) => {
                let parts: Vec<_> =
                    staged.iter().zip(&frame.pieces).map(|(at, piece)| (plan.ino, at.start, &piece.data[..])).collect();
                if let Some(pages) = volume.seal_shared(self.reservation_for(bytes as usize)?, &parts, compression)? {
                    plan.pieces.extend_from_slice(pages.pieces());
                    return self.add(pages);
                }
                span(&staged)
            }
        };
        let contents = match self.merge_contents(base, frame, &mapped, &runs) {
            Ok(contents) => contents,
            // Unreadable old data stays in its extents, and the new data needs none of it. A commit
            // covers all files: damage to one must not prevent it. The pieces may need more space
            // than the frame has, which `reservation_for` adds.
            Err(error) if runs != staged => {
                tracing::warn!(ino = plan.ino.0, %error, "cannot read the data around written data");
                runs.clone_from(&staged);
                self.merge_contents(base, frame, &mapped, &runs)?
            }
            Err(error) => return Err(error),
        };
        for (run, data) in runs.iter().zip(contents) {
            plan.fills_holes |= fills_holes(run, &staged, &mapped);
            let pages = volume.seal_data(self.reservation_for(data.len())?, plan.ino, run.start, &data, compression)?;
            plan.pieces.extend_from_slice(pages.pieces());
            self.add(pages)?;
        }
        Ok(())
    }

    /// Returns the contents of the pages over `runs`: the pieces of the frame that begins at
    /// `base`, over the old data.
    fn merge_contents<'f>(
        &self,
        base: u64,
        frame: &'f Frame,
        mapped: &[MappedExtent],
        runs: &[Range<u64>],
    ) -> Result<Vec<Cow<'f, [u8]>>> {
        let mut contents = Vec::with_capacity(runs.len());
        for run in runs {
            let within = |piece: &&DirtyPiece| run.contains(&(base + u64::from(piece.start)));
            let pieces = frame.pieces.iter().filter(within);
            let length = (run.end - run.start) as usize;
            if let Some(whole) = pieces.clone().find(|piece| piece.data.len() == length) {
                contents.push(Cow::Borrowed(&whole.data[..]));
                continue;
            }
            let mut data = vec![0; length];
            for (old, part) in old_parts(base, frame, mapped, run) {
                let out = &mut data[(part.start - run.start) as usize..(part.end - run.start) as usize];
                self.volume.read_data(&old.extent.page, old.start_of(&part), out)?;
            }
            for piece in pieces {
                let at = (base + u64::from(piece.start) - run.start) as usize;
                data[at..at + piece.data.len()].copy_from_slice(&piece.data);
            }
            contents.push(Cow::Owned(data));
        }
        Ok(contents)
    }
}

fn no_space() -> Error {
    Error::NoSpace("no room is left for staged data".into())
}

fn as_single_piece(layer: &Layer) -> Option<&[u8]> {
    let mut pieces = layer.iter();
    let (offset, data) = pieces.next()?;
    (offset == 0 && pieces.next().is_none()).then_some(data)
}

/// Returns the parts of old extents that a page over `run` has to include.
fn old_parts<'m>(
    base: u64,
    frame: &Frame,
    mapped: &'m [MappedExtent],
    run: &Range<u64>,
) -> impl Iterator<Item = (&'m MappedExtent, Range<u64>)> {
    let part = |old: &'m MappedExtent| (old, old.offset.max(run.start)..old.end().min(run.end));
    let is_covered = move |part: &Range<u64>| {
        frame
            .pieces
            .iter()
            .map(|piece| piece.range(base))
            .any(|piece| piece.start <= part.start && piece.end >= part.end)
    };
    mapped.iter().map(part).filter(move |(_, part)| !part.is_empty() && !is_covered(part))
}

fn piece_ranges(base: u64, frame: &Frame) -> Vec<Range<u64>> {
    frame.pieces.iter().map(|piece| piece.range(base)).collect()
}

/// Returns whether a page over `run` covers holes between the pieces and the extents.
fn fills_holes(run: &Range<u64>, pieces: &[Range<u64>], mapped: &[MappedExtent]) -> bool {
    if pieces.contains(run) {
        return false;
    }
    let there = pieces.iter().cloned().chain(mapped.iter().map(|old| old.offset..old.end()));
    let within = there.map(|part| part.start.max(run.start)..part.end.min(run.end)).filter(|part| !part.is_empty());
    length(&join_ranges(within.collect())) < run.end - run.start
}

/// How the pieces of a frame become pages.
#[derive(Debug, PartialEq, Eq)]
enum Layout {
    /// A page over each range, with the old data between the pieces.
    Ranges(Vec<Range<u64>>),
    /// All pieces on one page, of so many bytes with its items.
    Gathered(u64),
}

impl Layout {
    fn groups(&self) -> u64 {
        match self {
            Layout::Ranges(runs) => groups_of(runs),
            Layout::Gathered(bytes) => groups_for(*bytes, 1),
        }
    }
}

/// Returns the layouts of a frame, of which the first is the best and the last always affordable.
/// Every piece lies within a range of each `Ranges`.
fn choose_layouts(
    pieces: &[Range<u64>],
    mapped: &[MappedExtent],
    visible: &Range<u64>,
    kind: BatchKind,
) -> Vec<Layout> {
    let shown = |old: &MappedExtent| old.offset.max(visible.start)..old.end().min(visible.end);
    // Parts of the visible extents that no piece replaces.
    let mut rest = Vec::new();
    let mut pages = BTreeMap::new();
    for old in mapped {
        let parts = gaps(shown(old), pieces.iter().cloned());
        if !parts.is_empty() {
            // Of a page shared with other files the own part counts.
            let own = u64::from(old.extent.length).div_ceil(BLOCK);
            let run = old.extent.page.run;
            pages.insert(run.address, if may_be_packed(old.offset, old.extent.length) { own } else { run.blocks });
        }
        rest.extend(parts);
    }
    let (new, old) = (length(pieces), length(&rest));
    // COPY-1, and repacking: the beginning of a file is not gathered.
    let gathers = (2..=MAX_EXTENTS).contains(&pieces.len()) && pieces[0].start >= PACK;
    let added =
        if gathers { blocks_over(new) } else { pieces.iter().map(|piece| blocks_over(piece.end - piece.start)).sum() };
    let saves_space =
        new >= old || MAX_SPREAD.1 * (pages.values().sum::<u64>() + added) > MAX_SPREAD.0 * blocks_over(new + old);
    let merge = old > 0
        && (pieces.len() + rest.len() > MAX_EXTENTS
            || new + old <= SMALL_FRAME
            || (saves_space && kind != BatchKind::Remainder));
    let merged = || {
        let mut all = pieces.to_vec();
        all.extend(rest.iter().cloned());
        let joined = join_ranges(all);
        Layout::Ranges(if joined.len() > MAX_PIECES { span(&joined) } else { joined })
    };
    // The write buffer reserves space for each piece as a page, or for the frame as one page if
    // that is less (`Frame::groups_with`).
    let separate = if gathers {
        Some(Layout::Gathered(new + (pieces.len() * ITEM) as u64))
    } else {
        (pieces.len() <= MAX_PIECES).then(|| Layout::Ranges(pieces.to_vec()))
    };
    [merge.then(merged), separate, Some(Layout::Ranges(span(pieces)))].into_iter().flatten().collect()
}

/// Returns the blocks of a page of so many bytes, stored raw.
fn blocks_over(bytes: u64) -> u64 {
    bytes / BLOCK + 1
}

fn length(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

fn groups_of(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| groups_for(range.end - range.start, 1)).sum()
}

fn span(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    match (ranges.first(), ranges.last()) {
        (Some(first), Some(last)) => std::iter::once(first.start..last.end).collect(),
        _ => Vec::new(),
    }
}

/// Maximum threads; more would wait for the space map and for the host.
const MAX_THREADS: usize = 8;

struct WorkQueue<'r, R> {
    next: usize,
    reserved: &'r mut Option<Reservation>,
    /// Results with the index of their first job.
    done: Vec<(usize, R)>,
    failed: Option<Error>,
}

pub(super) fn worker_threads() -> usize {
    // The count takes reading several files of the control group, as long as a fifth of an opening.
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| thread::available_parallelism().map_or(1, |count| count.get().min(MAX_THREADS)))
}

/// Runs all `jobs` on up to `threads` threads. Each thread takes `stride` jobs at a time, with the
/// groups of `reserved` that `share` returns for them, and gives back the rest. Returns the results
/// in the order of the jobs; after an error no more jobs start.
pub(in crate::fs) fn run_parallel<J: Sync, R: Send>(
    threads: usize,
    stride: usize,
    jobs: &[J],
    reserved: &mut Option<Reservation>,
    share: impl Fn(&J) -> u64 + Sync,
    work: impl Fn(&[J], &mut Option<Reservation>) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let shared = Mutex::new(WorkQueue { next: 0, reserved, done: Vec::new(), failed: None });
    let run = || {
        loop {
            let mut state = shared.lock();
            let first = state.next;
            if state.failed.is_some() || first >= jobs.len() {
                return;
            }
            let mine = &jobs[first..(first + stride).min(jobs.len())];
            state.next = first + mine.len();
            let groups = mine.iter().map(&share).sum();
            let mut reserved = state.reserved.as_mut().map(|reserved| reserved.split(groups));
            drop(state);
            let result = work(mine, &mut reserved);
            let mut state = shared.lock();
            if let (Some(all), Some(left)) = (state.reserved.as_mut(), reserved) {
                all.absorb(left);
            }
            match result {
                Ok(done) => state.done.push((first, done)),
                Err(error) => drop(state.failed.get_or_insert(error)),
            }
        }
    };
    thread::scope(|scope| {
        // This thread is a worker too, and does the work of threads that cannot be started.
        for _ in 1..threads {
            if thread::Builder::new().name("sealer".into()).spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    let WorkQueue { mut done, failed, .. } = shared.into_inner();
    done.sort_unstable_by_key(|(first, _)| *first);
    failed.map_or_else(|| Ok(done.into_iter().map(|(_, done)| done).collect()), Err)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init)] // lists of ranges that may have one
    use super::*;
    use crate::format::Run;

    fn pieces(base: u64, pieces: &[(u32, usize)]) -> Vec<Range<u64>> {
        let pieces =
            pieces.iter().map(|(start, length)| DirtyPiece { start: *start, data: vec![1; *length] }).collect();
        piece_ranges(base, &Frame { pieces, ..Frame::default() })
    }

    fn extent(offset: u64, length: u32) -> MappedExtent {
        let extent = crate::format::values::Extent {
            page: crate::format::Pointer::NULL,
            start: 0,
            length,
            born: crate::format::Generation(1),
        };
        MappedExtent { offset, extent }
    }

    fn layouts(pieces: &[Range<u64>], mapped: &[MappedExtent], visible: Range<u64>) -> Vec<Layout> {
        choose_layouts(pieces, mapped, &visible, BatchKind::Whole)
    }

    fn ranges<const N: usize>(ranges: [Range<u64>; N]) -> Layout {
        Layout::Ranges(ranges.to_vec())
    }

    /// An extent that is the whole of its page, at a block of its own.
    fn paged(offset: u64, length: u32) -> MappedExtent {
        let mut mapped = extent(offset, length);
        mapped.extent.page.run = Run { address: 1000 + offset, blocks: blocks_over(length.into()) };
        mapped
    }

    #[test]
    fn an_overwritten_block_becomes_a_page_of_its_own() {
        let old = [paged(FRAME, FRAME as u32)];
        let chosen = layouts(&pieces(FRAME, &[(8192, 4096)]), &old, FRAME..2 * FRAME);
        assert_eq!(chosen[0], ranges([FRAME + 8192..FRAME + 12288]));
    }

    #[test]
    fn small_content_is_merged_or_else_written_by_itself() {
        let old = [extent(0, 8000)];
        let alone = || ranges([8000..8010]);
        assert_eq!(layouts(&pieces(0, &[(8000, 10)]), &old, 0..FRAME), [ranges([0..8010]), alone(), alone()]);
        let large = [extent(0, 30_000)];
        assert_eq!(layouts(&pieces(0, &[(16_000, 10)]), &large, 0..FRAME)[0], ranges([16_000..16_010]));
    }

    #[test]
    fn pieces_behind_the_packed_beginning_share_a_page() {
        let two = |start: u32| [(start, 4096), (start + 8192, 4096)];
        let old = [paged(0, FRAME as u32)];
        let chosen = layouts(&pieces(0, &two(PACK as u32)), &old, 0..FRAME);
        assert_eq!(chosen, [Layout::Gathered(8192 + 2 * ITEM as u64), ranges([PACK..PACK + 12_288])]);
        let chosen = layouts(&pieces(0, &two(4096)), &old, 0..FRAME);
        assert_eq!(chosen[0], ranges([4096..8192, 12_288..16_384]));
    }

    /// A page has 4,096 items at most (specification 5.3), and a frame may have more pieces.
    #[test]
    fn too_many_pieces_become_one_range() {
        let bytes: Vec<(u32, usize)> = (0..65_536).map(|number| (2 * number, 1)).collect();
        let all = pieces(FRAME, &bytes);
        assert_eq!(layouts(&all, &[], FRAME..2 * FRAME), [ranges([FRAME..2 * FRAME - 1])]);
        let chosen = layouts(&all, &[paged(FRAME, FRAME as u32)], FRAME..2 * FRAME);
        assert_eq!(chosen, [ranges([FRAME..2 * FRAME]), ranges([FRAME..2 * FRAME - 1])]);
        assert_eq!(layouts(&all[..MAX_EXTENTS], &[], FRAME..2 * FRAME).len(), 2);
    }

    #[test]
    fn a_frame_in_too_many_extents_is_written_whole() {
        let mut old: Vec<_> = (0..32).map(|number| paged(FRAME + number * 4096, 4096)).collect();
        old.iter_mut().for_each(|mapped| mapped.extent.page.run.blocks = 1);
        let chosen = layouts(&pieces(FRAME, &[(4096, 4096)]), &old, FRAME..2 * FRAME);
        assert_eq!(chosen[0], ranges([FRAME + 4096..FRAME + 8192]));
        let chosen = layouts(&pieces(FRAME, &[(4096, 1000)]), &old, FRAME..2 * FRAME);
        assert_eq!(chosen[0], ranges([FRAME..2 * FRAME]), "33 extents");
        let chosen = choose_layouts(&pieces(FRAME, &[(4096, 1000)]), &old, &(FRAME..2 * FRAME), BatchKind::Remainder);
        assert_eq!(chosen[0], ranges([FRAME..2 * FRAME]), "a bound of extents, not of space");
    }

    #[test]
    fn a_frame_whose_pages_take_too_many_blocks_is_written_whole() {
        // The last piece of each page is what the frame still names of it.
        let mut old: Vec<_> = (0..8).map(|number| paged(FRAME + number * 16_384, 16_384)).collect();
        let piece = pieces(FRAME, &[(0, 4096), (8192, 4096)]);
        assert!(matches!(layouts(&piece, &old, FRAME..2 * FRAME)[0], Layout::Gathered(_)));
        for mapped in &mut old {
            mapped.extent.page.run.blocks = 8;
        }
        assert_eq!(layouts(&piece, &old, FRAME..2 * FRAME)[0], ranges([FRAME..2 * FRAME]));
        assert!(matches!(
            choose_layouts(&piece, &old, &(FRAME..2 * FRAME), BatchKind::Remainder)[0],
            Layout::Gathered(_)
        ));
    }

    #[test]
    fn a_frame_cut_too_often_is_written_whole_and_keeps_its_holes_outside() {
        let cuts: Vec<(u32, usize)> = (0..40).map(|i| (4096 + i * 1000, 10)).collect();
        let chosen = layouts(&pieces(0, &cuts), &[extent(0, 4000)], 0..FRAME);
        assert_eq!(chosen[0], ranges([0..4096 + 39_000 + 10]));
        assert_eq!(chosen[1..], [ranges([4096..4096 + 39_000 + 10])], "what was promised");
    }

    #[test]
    fn merging_leaves_holes_between_runs_and_what_is_hidden_alone() {
        let old = [extent(0, 1000), extent(50_000, 1000), extent(90_000, 1000)];
        let chosen = layouts(&pieces(0, &[(1000, 100)]), &old, 0..90_000);
        assert_eq!(chosen[0], ranges([0..1100, 50_000..51_000]));
    }

    #[test]
    fn a_page_fills_holes_when_neither_pieces_nor_extents_are_all_of_it() {
        let new = pieces(0, &[(100, 100), (300, 100)]);
        assert!(!fills_holes(&(100..200), &new, &[]), "one piece");
        assert!(fills_holes(&(100..400), &new, &[]));
        assert!(!fills_holes(&(100..400), &new, &[extent(150, 200)]), "an extent lies between");
        assert!(fills_holes(&(50..400), &new, &[extent(150, 200)]));
    }
}
