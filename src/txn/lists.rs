//! The lists of pages that came and went with a commit, when its record is too short for them.

use std::sync::atomic::Ordering;

use super::Volume;
use super::commit::{Chain, Frozen};
use crate::error::{Error, Result};
use crate::format::page::PageKind;
use crate::format::record::{CommitRecord, DeltaList};
use crate::format::{Pointer, Run};
use crate::frame;

/// Entries of one list page of four blocks: (16,280 - 40) / 8.
const LIST_PAGE_ENTRIES: usize = 2000;

impl Volume {
    /// Promises room for the list pages while no operation can come between: from now on others reserve against the next transaction's lists.
    /// `SpaceMap::reserve` left that room; should it not be there all the same, the commit takes what it finds.
    pub(super) fn promise_lists(&self, frozen: &mut Frozen, chain: &Chain) {
        let dirty = self.dirty_nodes.load(Ordering::Relaxed).max(0).unsigned_abs() as usize;
        let allocated = frozen.allocated.len() + dirty;
        // A checkpoint frees the list pages since the last one, and as many nodes of its tree at most as it makes.
        let freed = frozen.freed.len() + frozen.superseded.len() + chain.list_pages.len();
        if CommitRecord::lists_fit(allocated, freed) {
            return;
        }
        let pages = allocated.div_ceil(LIST_PAGE_ENTRIES) + freed.div_ceil(LIST_PAGE_ENTRIES);
        if self.space.lock().promise(pages as u64) {
            frozen.lists = pages as u64;
        }
    }

    /// Moves the lists of a long commit into list pages, last first since each names the next; the record names the pages.
    pub(super) fn write_lists(
        &self,
        record: &mut CommitRecord,
        next: &mut Chain,
        promised: &mut u64,
    ) -> Result<(Vec<Run>, Vec<Run>)> {
        let allocated: Vec<Run> = std::mem::take(&mut record.allocated).into_iter().map(|(run, _)| run).collect();
        let freed = std::mem::take(&mut record.freed);
        let mut lists: Vec<DeltaList> = allocated
            .chunks(LIST_PAGE_ENTRIES)
            .map(|part| DeltaList { next: Pointer::NULL, allocated: part.to_vec(), freed: Vec::new() })
            .chain(freed.chunks(LIST_PAGE_ENTRIES).map(|part| DeltaList {
                next: Pointer::NULL,
                allocated: Vec::new(),
                freed: part.to_vec(),
            }))
            .collect();
        while let Some(mut list) = lists.pop() {
            list.next = record.delta_list;
            let page = frame::delta_page(list.encode());
            let from_promised = (*promised).min(1);
            let pointer = self.write_reserved(&page, record.generation, from_promised)?;
            *promised -= from_promised;
            record.delta_list = pointer;
            record.allocated.push((pointer.run, pointer.tag));
            record.used_blocks = record.used_blocks.saturating_add(pointer.run.blocks);
            next.list_pages.push(pointer.run);
        }
        record.two_barrier = true;
        let mut all = allocated;
        all.extend(record.allocated.iter().map(|(run, _)| *run));
        Ok((all, freed))
    }

    /// Reads the lists of a record, its list pages included.
    pub(super) fn read_lists(
        pager: &crate::pager::Pager,
        record: &CommitRecord,
    ) -> Result<(Vec<Run>, Vec<Run>, Vec<Run>)> {
        let mut allocated: Vec<Run> = record.allocated.iter().map(|(run, _)| *run).collect();
        let mut freed = record.freed.clone();
        let mut pages = Vec::new();
        let mut pointer = record.delta_list;
        // The record lists every list page, so a longer chain is damage.
        while !pointer.is_null() {
            if pages.len() >= record.allocated.len() {
                return Err(Error::damaged(format!("list pages of commit {} do not end", record.generation.0)));
            }
            let list = DeltaList::decode(pager.read_page(&pointer, PageKind::DeltaList)?.body())?;
            pages.push(pointer.run);
            allocated.extend(list.allocated);
            freed.extend(list.freed);
            pointer = list.next;
        }
        Ok((allocated, freed, pages))
    }
}
