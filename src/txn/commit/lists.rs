//! Page lists of a commit (allocated and freed) that do not fit into its record.

use std::sync::Arc;

use super::chain_tail::CommitTail;
use super::reserved::ReservedPages;
use crate::btree::Node;
use crate::error::{Error, Result};
use crate::format::page::PageKind;
use crate::format::record::{CommitRecord, DeltaList};
use crate::format::{Pointer, Run};
use crate::frame;
use crate::pager::Pager;
use crate::txn::writer::LIST_PAGE_ENTRIES;

/// Moves the lists of a long commit into list pages, last first since each names the next; the
/// record names the pages, also after a failure.
pub(super) fn write_lists(
    pages: &ReservedPages,
    record: &mut CommitRecord,
    next: &mut CommitTail,
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
        let listed = &mut record.allocated;
        let pointer = pages.write(&page, record.generation, from_promised, &mut |run, tag| {
            listed.push((run, tag));
            *promised -= from_promised;
        })?;
        record.delta_list = pointer;
        record.used_blocks = record.used_blocks.saturating_add(pointer.run.blocks);
        next.list_pages.push(pointer.run);
    }
    record.two_barrier = true;
    let mut all = allocated;
    all.extend(record.allocated.iter().map(|(run, _)| *run));
    Ok((all, freed))
}

/// Reads the lists of a record, its list pages included.
pub(in crate::txn) fn read_lists(pager: &Pager, record: &CommitRecord) -> Result<(Vec<Run>, Vec<Run>, Vec<Run>)> {
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

/// Returns the pages of nodes that a transaction replaced. All are stored: they belong to earlier
/// commits, and commits do not overlap.
pub(super) fn pages_of(nodes: &[Arc<Node>]) -> Result<Vec<Run>> {
    nodes
        .iter()
        .map(|node| {
            let pointer = node.stored.get();
            pointer.map(|p| p.run).ok_or_else(|| Error::damaged("a replaced node was never written"))
        })
        .collect()
}
