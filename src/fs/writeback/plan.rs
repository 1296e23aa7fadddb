//! Decides how a staged layer becomes pages: inline, packed with other small files, piece by piece or frames merged; and writes them.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::extents::{self, FRAME, Mapped};
use crate::fs::packing::{INLINE, PACK, Packer, SharedPage, compresses, packs};
use crate::fs::ranges::{gaps, join};
use crate::fs::types::FsOptions;
use crate::fs::write_buffer::{Frame, INLINE_GROUPS, Layer, MAX_PIECES, Piece, Plan};
use crate::fs::{inode, parallel_writer};
use crate::txn::{Reservation, UnnamedPages, View, Volume, groups_for};

/// Frames for each thread at least: one takes 20 us and more, starting a thread about 50.
const ENOUGH: usize = 32;

/// Frames that a thread takes at once.
const STRIDE: usize = 8;

/// Content of a frame up to this many bytes is rewritten whole: one group of blocks, which a separate page would take too.
const SMALL_FRAME: u64 = 16 * 1024;

/// Writes the pages of a batch.
pub(super) struct Planner<'a> {
    pub(super) volume: &'a Arc<Volume>,
    pub(super) options: FsOptions,
    pub(super) view: View<'a>,
    pub(super) reserved: &'a mut Option<Reservation>,
    /// How many may write frames at once.
    pub(super) threads: usize,
    /// Everything written so far.
    pub(super) written: UnnamedPages,
}

impl Planner<'_> {
    /// Plans the layers in the order given (ascending numbers, so that files created together are packed together).
    pub(super) fn plan(mut self, layers: &[(Ino, Arc<Layer>)]) -> Result<(Vec<Plan>, UnnamedPages)> {
        let mut plans = Vec::with_capacity(layers.len());
        let mut packer = Packer::new(self.options);
        if self.volume.is_far() {
            self.expect(layers)?;
        }
        for (ino, layer) in layers {
            let Some(inode) = inode::find(self.view, *ino)? else { continue };
            let mut plan = Plan::new(*ino, layer.end(), inode);
            if let Some(content) = self.inline(&plan, &inode, layer)? {
                plan.inline = Some(content);
                plan.cuts = extents::measure(self.view, *ino, 0..inode.trim, u64::MAX)?.0;
            } else if let Some(content) = self.packable(&inode, layer) {
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

    /// Names to the medium all that [`Self::contents`] is going to read of old pages: one way to another machine, and not one for each piece.
    fn expect(&self, layers: &[(Ino, Arc<Layer>)]) -> Result<()> {
        let mut expected = Vec::new();
        for (ino, layer) in layers {
            let Some(inode) = inode::find(self.view, *ino)?.filter(|inode| inode.bytes > 0) else { continue };
            for (number, frame) in layer.frames() {
                let (base, range) = (number * FRAME, number * FRAME..((number + 1) * FRAME).min(inode.trim));
                let mapped = extents::overlapping(self.view, *ino, range.clone(), usize::MAX)?;
                // What there is no room for is read for nothing.
                let runs = runs(&staged(base, frame), &mapped, &range).into_iter().next().unwrap_or_default();
                let kept = runs.iter().flat_map(|run| kept(base, frame, &mapped, run));
                expected.extend(
                    kept.map(|(old, part)| (old.extent.page, old.start_of(&part), (part.end - part.start) as u32)),
                );
            }
        }
        self.volume.expect_data(expected.iter().map(|(page, start, length)| (page, *start, *length)));
        Ok(())
    }

    /// Room for a page of so many bytes. There always is some (STAGE-4), unless an earlier attempt to write the layer used it up in vain and
    /// others have got what it gave back.
    fn reservation_for(&mut self, bytes: usize) -> Result<&mut Reservation> {
        let held = self.reserved.as_ref().map_or(0, Reservation::groups);
        self.spare(groups_for(bytes as u64, 1).saturating_sub(held))?;
        self.reserved.as_mut().ok_or_else(no_space)
    }

    /// Room beyond what was promised.
    fn spare(&mut self, groups: u64) -> Result<()> {
        if groups > 0 {
            self.volume.reserve_spare(groups).ok_or_else(no_space)?.join(self.reserved);
        }
        Ok(())
    }

    /// The whole content of a file that is to live in the tree.
    fn inline(&self, plan: &Plan, inode: &InodeValue, layer: &Layer) -> Result<Option<Vec<u8>>> {
        if plan.end > INLINE {
            return Ok(None);
        }
        let whole = single(layer).is_some() && plan.end >= inode.size;
        let mut content = Vec::new();
        if !whole {
            if extents::measure(self.view, plan.ino, 0..inode.trim, 1)?.0 > 0 {
                return Ok(None);
            }
            content = extents::inline(self.view, plan.ino, inode)?.unwrap_or_default();
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

    fn packable<'l>(&self, inode: &InodeValue, layer: &'l Layer) -> Option<&'l [u8]> {
        let whole = layer.end() <= PACK && layer.end() >= inode.size;
        if whole && packs(&self.options, inode.flags) { single(layer) } else { None }
    }

    fn pack(&mut self, plans: &mut [Plan], page: &SharedPage<(usize, &[u8])>) -> Result<()> {
        let files: Vec<_> = page.items.iter().map(|(index, content)| (plans[*index].ino, 0, *content)).collect();
        let volume = self.volume;
        let written = volume.write_packed(self.reservation_for(page.bytes)?, &files, page.compress)?.sorted();
        for (index, _) in &page.items {
            let plan = &mut plans[*index];
            plan.pieces.extend_from_slice(written.of(plan.ino));
        }
        self.written.absorb(written);
        Ok(())
    }

    fn frames(&mut self, plan: &mut Plan, inode: &InodeValue, layer: &Layer) -> Result<()> {
        // A file has inline data or extents: what the layer does not replace of inline data becomes part of its first frame.
        let old = extents::inline(self.view, plan.ino, inode)?.unwrap_or_default();
        let gaps = layer.gaps(0..old.len() as u64);
        if !gaps.is_empty() {
            let mut first = layer.frames().get(&0).cloned().unwrap_or_default();
            // Promised with any frame that was staged over inline data, which does not spend it (`Frame::own_groups`).
            first.held = first.own_groups() + INLINE_GROUPS;
            first.inline = false;
            for gap in gaps {
                first.put(gap.start as u32, &old[gap.start as usize..gap.end as usize]);
            }
            self.frame(plan, inode, 0, &first)?;
        }
        let done = layer.frames().contains_key(&0) && !layer.gaps(0..old.len() as u64).is_empty();
        let rest: Vec<(u64, &Frame)> =
            layer.frames().iter().map(|(number, frame)| (*number, frame)).skip(usize::from(done)).collect();
        self.write_frames(plan, inode, &rest)
    }

    /// As [`Self::frame`] for each of the frames, ascending.
    fn write_frames(&mut self, plan: &mut Plan, inode: &InodeValue, frames: &[(u64, &Frame)]) -> Result<()> {
        let threads = self.threads.min(frames.len() / ENOUGH);
        if threads < 2 {
            return frames.iter().try_for_each(|(number, frame)| self.frame(plan, inode, *number, frame));
        }
        let (volume, options, view, planned) = (self.volume, self.options, self.view, &*plan);
        let share = |(_, frame): &(u64, &Frame)| frame.held;
        let parts = parallel_writer::spread(threads, STRIDE, frames, self.reserved, share, |mine, reserved| {
            let mut part = Plan::new(planned.ino, planned.end, *inode);
            let mut own = Planner { volume, options, view, reserved, threads: 1, written: UnnamedPages::new(volume) };
            mine.iter().try_for_each(|(number, frame)| own.frame(&mut part, inode, *number, frame))?;
            Ok((part, own.written))
        })?;
        for (part, written) in parts {
            plan.pieces.extend(part.pieces);
            plan.cuts += part.cuts;
            plan.grows |= part.grows;
            self.written.absorb(written);
        }
        Ok(())
    }

    /// The first of `choices` that space can be had for. What was promised to the frame is enough for the last one, and for what it adds to
    /// that no promise was made to anybody: a merge is an economy.
    fn affordable(&mut self, held: u64, choices: Vec<Vec<Range<u64>>>) -> Vec<Range<u64>> {
        let mut last = Vec::new();
        for runs in choices {
            if self.spare(cost(&runs).saturating_sub(held)).is_ok() {
                return runs;
            }
            last = runs;
        }
        last
    }

    /// Writes one frame: its pieces each as a page, or merged with what its extents hold.
    fn frame(&mut self, plan: &mut Plan, inode: &InodeValue, number: u64, frame: &Frame) -> Result<()> {
        let range = number * FRAME..((number + 1) * FRAME).min(inode.trim);
        let mapped = if inode.bytes == 0 {
            Vec::new()
        } else {
            extents::overlapping(self.view, plan.ino, range.clone(), usize::MAX)?
        };
        plan.cuts += mapped.len() as u64;
        let base = number * FRAME;
        let staged = staged(base, frame);
        let mut runs = self.affordable(frame.own_groups(), runs(&staged, &mapped, &range));
        let contents = match self.contents(base, frame, &mapped, &runs) {
            Ok(contents) => contents,
            // What cannot be read any more is left where it is, and what was written meanwhile needs none of it. A commit is that of all
            // files: the damage of one must not stop it.
            Err(error) if runs != staged => {
                tracing::warn!(ino = plan.ino.0, %error, "what lies beside written data cannot be read");
                self.spare(cost(&staged).saturating_sub(frame.own_groups()))?;
                runs.clone_from(&staged);
                self.contents(base, frame, &mapped, &runs)?
            }
            Err(error) => return Err(error),
        };
        for (run, data) in runs.iter().zip(contents) {
            plan.grows |= fills(run, &staged, &mapped);
            let volume = self.volume;
            let compress = compresses(&self.options, inode.flags);
            let pages = volume.write_data(self.reservation_for(data.len())?, plan.ino, run.start, &data, compress)?;
            plan.pieces.extend_from_slice(pages.pieces());
            self.written.absorb(pages);
        }
        Ok(())
    }

    /// What the pages over `runs` are to hold: the pieces of the frame that begins at `base`, over what is there.
    fn contents(&self, base: u64, frame: &Frame, mapped: &[Mapped], runs: &[Range<u64>]) -> Result<Vec<Vec<u8>>> {
        let mut contents = Vec::with_capacity(runs.len());
        for run in runs {
            let mut data = vec![0; (run.end - run.start) as usize];
            for (old, part) in kept(base, frame, mapped, run) {
                let out = &mut data[(part.start - run.start) as usize..(part.end - run.start) as usize];
                self.volume.read_data(&old.extent.page, old.start_of(&part), out)?;
            }
            for piece in &frame.pieces {
                let offset = base + u64::from(piece.start);
                if run.contains(&offset) {
                    let at = (offset - run.start) as usize;
                    data[at..at + piece.data.len()].copy_from_slice(&piece.data);
                }
            }
            contents.push(data);
        }
        Ok(contents)
    }
}

fn no_space() -> Error {
    Error::NoSpace("no room is left for staged data".into())
}

/// The layer's bytes when they are one piece from offset 0 on.
fn single(layer: &Layer) -> Option<&[u8]> {
    let mut pieces = layer.iter();
    let (offset, data) = pieces.next()?;
    (offset == 0 && pieces.next().is_none()).then_some(data)
}

/// The parts of old extents that lie in a page over `run` and are read for it.
fn kept<'m>(
    base: u64,
    frame: &Frame,
    mapped: &'m [Mapped],
    run: &Range<u64>,
) -> impl Iterator<Item = (&'m Mapped, Range<u64>)> {
    let part = |old: &'m Mapped| (old, old.offset.max(run.start)..old.end().min(run.end));
    mapped.iter().map(part).filter(move |(_, part)| !part.is_empty() && !covered(base, frame, part.clone()))
}

fn covered(base: u64, frame: &Frame, range: Range<u64>) -> bool {
    frame.pieces.iter().any(|piece| {
        let start = base + u64::from(piece.start);
        start <= range.start && start + piece.data.len() as u64 >= range.end
    })
}

/// Where the pieces of a frame lie in their file.
fn staged(base: u64, frame: &Frame) -> Vec<Range<u64>> {
    let range = |piece: &Piece| {
        let start = base + u64::from(piece.start);
        start..start + piece.data.len() as u64
    };
    frame.pieces.iter().map(range).collect()
}

/// Whether a page over `run` covers holes between the pieces and the extents.
fn fills(run: &Range<u64>, pieces: &[Range<u64>], mapped: &[Mapped]) -> bool {
    if pieces.contains(run) {
        return false;
    }
    let there = pieces.iter().cloned().chain(mapped.iter().map(|old| old.offset..old.end()));
    let within = there.map(|part| part.start.max(run.start)..part.end.min(run.end)).filter(|part| !part.is_empty());
    length(&join(within.collect())) < run.end - run.start
}

/// The ranges to be written as a page each, as choices of which the first is the best and the last always affordable. Every piece lies
/// within a range of each choice.
fn runs(pieces: &[Range<u64>], mapped: &[Mapped], visible: &Range<u64>) -> Vec<Vec<Range<u64>>> {
    let shown = |old: &Mapped| old.offset.max(visible.start)..old.end().min(visible.end);
    // Parts of the visible extents that no piece replaces.
    let rest: Vec<_> = mapped.iter().flat_map(|old| gaps(shown(old), pieces.iter().cloned())).collect();
    let (new, old) = (length(pieces), length(&rest));
    let merge = old > 0 && (pieces.len() + rest.len() > MAX_PIECES || new + old <= SMALL_FRAME || new >= old);
    let merged = || {
        let mut all = pieces.to_vec();
        all.extend(rest.iter().cloned());
        let joined = join(all);
        if joined.len() > MAX_PIECES { span(&joined) } else { joined }
    };
    // Staging holds space for each piece as a page, or for the frame as one page when that is less (`Frame::groups_with`).
    let separate = (pieces.len() <= MAX_PIECES).then(|| pieces.to_vec());
    [merge.then(merged), separate, Some(span(pieces))].into_iter().flatten().collect()
}

fn length(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

fn cost(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| groups_for(range.end - range.start, 1)).sum()
}

fn span(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    match (ranges.first(), ranges.last()) {
        (Some(first), Some(last)) => std::iter::once(first.start..last.end).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init)] // lists of ranges that may have one
    use super::*;

    fn pieces(base: u64, pieces: &[(u32, usize)]) -> Vec<Range<u64>> {
        let pieces = pieces.iter().map(|(start, length)| Piece { start: *start, data: vec![1; *length] }).collect();
        staged(base, &Frame { pieces, ..Frame::default() })
    }

    fn extent(offset: u64, length: u32) -> Mapped {
        let extent = crate::format::values::Extent {
            page: crate::format::Pointer::NULL,
            start: 0,
            length,
            born: crate::format::Generation(1),
        };
        Mapped { offset, extent }
    }

    #[test]
    fn an_overwritten_block_becomes_a_page_of_its_own() {
        let old = [extent(FRAME, FRAME as u32)];
        let runs = runs(&pieces(FRAME, &[(8192, 4096)]), &old, &(FRAME..2 * FRAME));
        assert_eq!(runs[0], [FRAME + 8192..FRAME + 12288]);
    }

    #[test]
    fn small_content_is_merged_or_else_written_by_itself() {
        let old = [extent(0, 8000)];
        let visible = 0..FRAME;
        let alone = vec![8000..8010];
        assert_eq!(runs(&pieces(0, &[(8000, 10)]), &old, &visible), [vec![0..8010], alone.clone(), alone]);
        let large = [extent(0, 30_000)];
        assert_eq!(runs(&pieces(0, &[(16_000, 10)]), &large, &visible)[0], [16_000..16_010]);
    }

    #[test]
    fn a_frame_cut_too_often_is_written_whole_and_keeps_its_holes_outside() {
        let cuts: Vec<(u32, usize)> = (0..20).map(|i| (4096 + i * 1000, 10)).collect();
        let runs = runs(&pieces(0, &cuts), &[extent(0, 4000)], &(0..FRAME));
        assert_eq!(runs[0], [0..4096 + 19_000 + 10]);
        assert_eq!(runs[1..], [[4096..4096 + 19_000 + 10]], "what was promised");
    }

    #[test]
    fn merging_leaves_holes_between_runs_and_what_is_hidden_alone() {
        let old = [extent(0, 1000), extent(50_000, 1000), extent(90_000, 1000)];
        let runs = runs(&pieces(0, &[(1000, 100)]), &old, &(0..90_000));
        assert_eq!(runs[0], [0..1100, 50_000..51_000]);
    }

    #[test]
    fn a_page_fills_holes_when_neither_pieces_nor_extents_are_all_of_it() {
        let new = pieces(0, &[(100, 100), (300, 100)]);
        assert!(!fills(&(100..200), &new, &[]), "one piece");
        assert!(fills(&(100..400), &new, &[]));
        assert!(!fills(&(100..400), &new, &[extent(150, 200)]), "an extent lies between");
        assert!(fills(&(50..400), &new, &[extent(150, 200)]));
    }
}
