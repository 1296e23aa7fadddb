//! Stale pages: packed pages that lost some of their references, and hold bytes of deleted files
//! until the rest is repacked.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::format::{Pointer, Run};

/// Pages noted at once: about 1 MiB of memory.
const LIMIT: usize = 8192;

/// Ticks after which a page is due: noted just before the first, it is one interval old at the
/// second.
const DUE: u8 = 2;

/// Packed pages with a part that is no longer referenced, noted in memory. Notes are hints: a page
/// that is noted without need is checked and dropped. A page must not be missing, so
/// STALE-1  a page is noted by the publication of the operation that took a part away, and dropped
///     by the one that freed it;
/// STALE-2  a caller that takes a page out to check it notes it again unless it is whole, gone, or
///     replaced;
/// STALE-3  notes that find no space, and those of a session that ended without closing, are
///     recovered by a search of the tree.
#[derive(Default)]
pub(crate) struct StalePages {
    pages: Mutex<Pages>,
}

#[derive(Default)]
struct Pages {
    /// By address: the page, and ticks since it was noted.
    noted: BTreeMap<u64, (Pointer, u8)>,
    /// STALE-3
    overflowed: bool,
}

impl StalePages {
    pub(crate) fn note(&self, page: Pointer) {
        let mut pages = self.pages.lock();
        let known = pages.noted.get(&page.run.address).map(|(known, _)| *known);
        if known.is_none() && pages.noted.len() >= LIMIT {
            pages.overflowed = true;
        } else if known != Some(page) {
            // For a page that is noted already the time runs from the first removed part.
            pages.noted.insert(page.run.address, (page, 0));
        }
    }

    /// Notes a page again that was taken out, or that was found in a possibly outdated state: an
    /// existing note for the same place is newer and stays.
    pub(crate) fn note_again(&self, page: Pointer) {
        let mut pages = self.pages.lock();
        if pages.noted.len() < LIMIT {
            pages.noted.entry(page.run.address).or_insert((page, 0));
        } else {
            pages.overflowed = true;
        }
    }

    /// Returns whether the notes have space for `more`.
    pub(crate) fn has_room(&self, more: usize) -> bool {
        self.pages.lock().noted.len() + more <= LIMIT
    }

    /// An interval is over.
    pub(crate) fn tick(&self) {
        for (_, ticks) in self.pages.lock().noted.values_mut() {
            *ticks = ticks.saturating_add(1);
        }
    }

    /// All that is noted now is due.
    pub(crate) fn hurry(&self) {
        for (_, ticks) in self.pages.lock().noted.values_mut() {
            *ticks = DUE;
        }
    }

    /// Removes and returns up to `limit` pages that are due.
    pub(crate) fn take_due(&self, limit: usize) -> Vec<Pointer> {
        let mut pages = self.pages.lock();
        let due: Vec<Pointer> =
            pages.noted.values().filter(|(_, ticks)| *ticks >= DUE).map(|(page, _)| *page).take(limit).collect();
        for page in &due {
            pages.noted.remove(&page.run.address);
        }
        due
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pages.lock().noted.is_empty()
    }

    /// Returns whether notes found no space since the last call.
    pub(crate) fn take_overflow(&self) -> bool {
        std::mem::take(&mut self.pages.lock().overflowed)
    }

    /// STALE-1
    pub(super) fn published(&self, stale: &[Pointer], freed: &[Run]) {
        for page in stale {
            self.note(*page);
        }
        let mut pages = self.pages.lock();
        for run in freed {
            pages.noted.remove(&run.address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(address: u64) -> Pointer {
        Pointer { run: Run::new(address, 1), ..Pointer::NULL }
    }

    #[test]
    fn a_page_is_due_after_two_ticks_and_dropped_when_it_is_freed() {
        let notes = StalePages::default();
        notes.published(&[page(100), page(200)], &[]);
        notes.tick();
        notes.note(page(100));
        assert!(notes.take_due(8).is_empty());
        notes.tick();
        notes.published(&[page(300)], &[page(200).run]);
        assert_eq!(notes.take_due(8), [page(100)]);
        notes.published(&[page(400)], &[page(400).run]);
        notes.hurry();
        assert_eq!(notes.take_due(8), [page(300)]);
        assert!(notes.is_empty());
    }

    #[test]
    fn notes_beyond_the_limit_are_told() {
        let notes = StalePages::default();
        for address in 0..=LIMIT as u64 {
            assert!(!notes.take_overflow());
            notes.note(page(address));
        }
        assert!(notes.take_overflow() && !notes.take_overflow() && !notes.has_room(1));
    }
}
