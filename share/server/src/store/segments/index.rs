//! Index of the newest record of each share: a hash table on disk that grows one page at a time,
//! with a small write-back cache.
//!
//! The index is scratch data. Each start rebuilds it from the segments, so it needs no barrier and
//! nothing in it is trusted across a crash. Linear hashing: with level L and s pages split, a hash
//! belongs to page `hash mod 2^L`, or `hash mod 2^(L+1)` when the former is below s. Full pages
//! continue in overflow pages, which are in a second file.

use std::io;
use std::sync::Arc;

use crate::store::env::DiskFile;

/// Bytes of a page: small, because nearly every access touches a random page for 16 bytes of it.
const PAGE: usize = 1024;
/// Before the entries: number of entries u32, next overflow page u32 (0 for none), zeros.
const HEAD: usize = 16;
const ENTRY: usize = 16;
const ENTRIES: usize = (PAGE - HEAD) / ENTRY;
/// Average entries of a page before one more is split: at 0.7 of their space few pages overflow.
const TARGET: u64 = (ENTRIES * 7 / 10) as u64;
/// Tells a page of the overflow file from one of the main file.
const OVERFLOW: u32 = 1 << 31;
const EMPTY: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) segment: u32,
    pub(crate) at: u32,
}

pub(crate) struct Index {
    files: [Arc<dyn DiskFile>; 2],
    /// Pages of the main file: 2^level + split.
    level: u32,
    split: u32,
    overflow: u32,
    spare: Vec<u32>,
    entries: u64,
    /// A split that failed half way lost entries: from then on everything is refused.
    broken: bool,
    /// Direct-mapped: which page each slot holds.
    tags: Vec<u32>,
    dirty: Vec<bool>,
    cache: Vec<u8>,
}

impl Index {
    /// Creates an empty index in two empty files, with a cache of `pages` pages.
    pub(crate) fn new(files: [Arc<dyn DiskFile>; 2], pages: usize) -> io::Result<Index> {
        let pages = pages.max(8);
        let mut index = Index {
            files,
            level: 0,
            split: 0,
            overflow: 1,
            spare: Vec::new(),
            entries: 0,
            broken: false,
            tags: vec![EMPTY; pages],
            dirty: vec![false; pages],
            cache: vec![0; pages * PAGE],
        };
        index.add(0)?;
        Ok(index)
    }

    pub(crate) fn entries(&self) -> u64 {
        self.entries
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.pages() + u64::from(self.overflow)) * PAGE as u64
    }

    fn pages(&self) -> u64 {
        (1 << self.level) + u64::from(self.split)
    }

    fn page_of(&self, hash: u64) -> u32 {
        let low = (hash & ((1 << self.level) - 1)) as u32;
        if low < self.split { (hash & ((2 << self.level) - 1)) as u32 } else { low }
    }

    /// All places noted under `hash`; more than one only when 64 bits collide.
    pub(crate) fn find(&mut self, hash: u64) -> io::Result<Locations> {
        let mut found = Locations::default();
        let mut page = self.page_of(hash);
        loop {
            let bytes = self.load(page)?;
            for entry in entries(bytes).filter(|entry| hash_of(entry) == hash) {
                found.push(location_of(entry));
            }
            let Some(following) = next(bytes) else { return Ok(found) };
            page = following;
        }
    }

    /// Reserves disk space for the next [`Index::insert`] of `hash`. Errors: the disk's error; the
    /// entries of the index are unchanged.
    pub(crate) fn reserve(&mut self, hash: u64) -> io::Result<()> {
        if self.entries >= self.pages() * TARGET {
            self.grow()?;
        }
        self.make_room(hash)
    }

    fn make_room(&mut self, hash: u64) -> io::Result<()> {
        let mut page = self.page_of(hash);
        loop {
            let bytes = self.load(page)?;
            if count(bytes) < ENTRIES {
                return Ok(());
            }
            let Some(following) = next(bytes) else { break };
            page = following;
        }
        let fresh = self.overflow_page()?;
        self.load(page)?;
        self.change(page, |bytes| bytes[4..8].copy_from_slice(&(fresh & !OVERFLOW).to_le_bytes()));
        Ok(())
    }

    pub(crate) fn insert(&mut self, hash: u64, location: Location) -> io::Result<()> {
        let mut page = self.page_of(hash);
        loop {
            let bytes = self.load(page)?;
            if count(bytes) < ENTRIES {
                self.change(page, |bytes| put(bytes, hash, location));
                self.entries += 1;
                return Ok(());
            }
            page = match next(bytes) {
                Some(following) => following,
                // The caller did not reserve: take the space now.
                None => {
                    self.make_room(hash)?;
                    self.page_of(hash)
                }
            };
        }
    }

    /// Moves an entry that is there; false when it is not.
    pub(crate) fn replace(&mut self, hash: u64, old: Location, new: Option<Location>) -> io::Result<bool> {
        let mut page = self.page_of(hash);
        loop {
            let bytes = self.load(page)?;
            let place = entries(bytes).position(|entry| hash_of(entry) == hash && location_of(entry) == old);
            if let Some(place) = place {
                self.change(page, |bytes| match new {
                    Some(new) => write_entry(bytes, place, hash, new),
                    None => {
                        let last = count(bytes) - 1;
                        bytes.copy_within(HEAD + last * ENTRY..HEAD + (last + 1) * ENTRY, HEAD + place * ENTRY);
                        bytes[..4].copy_from_slice(&(last as u32).to_le_bytes());
                    }
                });
                self.entries -= u64::from(new.is_none());
                return Ok(true);
            }
            let Some(following) = next(bytes) else { return Ok(false) };
            page = following;
        }
    }

    fn grow(&mut self) -> io::Result<()> {
        let old = self.split;
        let new = old + (1 << self.level);
        self.add(new)?;
        self.broken = true;
        let all = self.empty(old)?;
        self.split += 1;
        if self.split == 1 << self.level {
            self.level += 1;
            self.split = 0;
        }
        self.entries -= all.len() as u64;
        self.broken = false;
        for (hash, location) in all {
            // Half of them go to either page; overflow pages that they need were just given back.
            self.insert(hash, location).inspect_err(|_| self.broken = true)?;
        }
        Ok(())
    }

    /// Takes everything out of a page and its overflow pages.
    fn empty(&mut self, page: u32) -> io::Result<Vec<(u64, Location)>> {
        let (mut all, mut page) = (Vec::with_capacity(ENTRIES), page);
        loop {
            let bytes = self.load_broken(page)?;
            all.extend(entries(bytes).map(|entry| (hash_of(entry), location_of(entry))));
            let following = next(bytes);
            self.change(page, |bytes| bytes[..HEAD].fill(0));
            if page & OVERFLOW != 0 {
                self.spare.push(page);
            }
            let Some(following) = following else { return Ok(all) };
            page = following;
        }
    }

    fn overflow_page(&mut self) -> io::Result<u32> {
        if let Some(page) = self.spare.pop() {
            self.load(page)?;
            self.change(page, |bytes| bytes[..HEAD].fill(0));
            return Ok(page);
        }
        let page = self.overflow | OVERFLOW;
        self.add(page)?;
        self.overflow += 1;
        Ok(page)
    }

    /// Writes an empty page: takes the disk's space before anything depends on it.
    fn add(&mut self, page: u32) -> io::Result<()> {
        let slot = self.evict(page)?;
        self.file(page).write_at(&[0; PAGE], offset(page))?;
        self.cache[slot * PAGE..(slot + 1) * PAGE].fill(0);
        self.tags[slot] = page;
        Ok(())
    }

    fn file(&self, page: u32) -> &Arc<dyn DiskFile> {
        &self.files[usize::from(page & OVERFLOW != 0)]
    }

    fn slot(&self, page: u32) -> usize {
        // Overflow pages are spread by an odd factor, or they would stand on the first main pages.
        let number = if page & OVERFLOW != 0 { page.wrapping_mul(0x9E37_79B1) } else { page };
        number as usize % self.tags.len()
    }

    /// Frees the slot that `page` belongs to.
    fn evict(&mut self, page: u32) -> io::Result<usize> {
        let slot = self.slot(page);
        let old = self.tags[slot];
        if old != EMPTY && old != page && self.dirty[slot] {
            self.file(old).write_at(&self.cache[slot * PAGE..(slot + 1) * PAGE], offset(old))?;
            self.dirty[slot] = false;
        }
        Ok(slot)
    }

    fn load(&mut self, page: u32) -> io::Result<&[u8]> {
        if self.broken {
            return Err(io::Error::other("the index broke when the disk failed before"));
        }
        self.load_broken(page)
    }

    fn load_broken(&mut self, page: u32) -> io::Result<&[u8]> {
        let slot = self.slot(page);
        if self.tags[slot] != page {
            self.evict(page)?;
            // Until the page was read the slot holds none.
            self.tags[slot] = EMPTY;
            let file = Arc::clone(self.file(page));
            let bytes = &mut self.cache[slot * PAGE..(slot + 1) * PAGE];
            if file.read_at(bytes, offset(page))? != PAGE || count(bytes) > ENTRIES {
                return Err(io::Error::other("the index was changed by another program"));
            }
            self.tags[slot] = page;
            self.dirty[slot] = false;
        }
        Ok(&self.cache[slot * PAGE..(slot + 1) * PAGE])
    }

    /// Changes the page that was loaded just before.
    fn change(&mut self, page: u32, change: impl FnOnce(&mut [u8])) {
        let slot = self.slot(page);
        debug_assert_eq!(self.tags[slot], page);
        self.dirty[slot] = true;
        change(&mut self.cache[slot * PAGE..(slot + 1) * PAGE]);
    }
}

/// Up to four locations: more shares under one 64-bit hash do not happen, and would not be found.
#[derive(Default)]
pub(crate) struct Locations {
    locations: [Option<Location>; 4],
    length: usize,
}

impl Locations {
    fn push(&mut self, location: Location) {
        if let Some(place) = self.locations.get_mut(self.length) {
            *place = Some(location);
            self.length += 1;
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Location> {
        self.locations.iter().flatten().copied()
    }
}

fn offset(page: u32) -> u64 {
    u64::from(page & !OVERFLOW) * PAGE as u64
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn count(page: &[u8]) -> usize {
    word(page, 0) as usize
}

/// The overflow page in which a page continues.
fn next(page: &[u8]) -> Option<u32> {
    Some(word(page, 4)).filter(|next| *next != 0).map(|next| next | OVERFLOW)
}

fn entries(page: &[u8]) -> impl Iterator<Item = &[u8]> {
    page[HEAD..HEAD + count(page) * ENTRY].as_chunks::<ENTRY>().0.iter().map(<[u8; ENTRY]>::as_slice)
}

fn hash_of(entry: &[u8]) -> u64 {
    u64::from(word(entry, 0)) | u64::from(word(entry, 4)) << 32
}

fn location_of(entry: &[u8]) -> Location {
    Location { segment: word(entry, 8), at: word(entry, 12) }
}

fn put(page: &mut [u8], hash: u64, location: Location) {
    let place = count(page);
    write_entry(page, place, hash, location);
    page[..4].copy_from_slice(&(place as u32 + 1).to_le_bytes());
}

fn write_entry(page: &mut [u8], place: usize, hash: u64, location: Location) {
    let entry = &mut page[HEAD + place * ENTRY..HEAD + (place + 1) * ENTRY];
    entry[..8].copy_from_slice(&hash.to_le_bytes());
    entry[8..12].copy_from_slice(&location.segment.to_le_bytes());
    entry[12..].copy_from_slice(&location.at.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::super::simulated::SimulatedDisk;
    use super::*;
    use crate::store::env::Disk;

    fn index(pages: usize) -> Index {
        let disk = SimulatedDisk::new();
        Index::new([disk.create("main").unwrap(), disk.create("overflow").unwrap()], pages).unwrap()
    }

    #[test]
    fn the_index_agrees_with_a_map_whatever_its_cache_holds() {
        for pages in [8, 64, 100_000] {
            let mut index = index(pages);
            let mut model: HashMap<u64, Location> = HashMap::new();
            let mut random = crate::seeded::numbers(0x1234_5678_9abc_def0);
            for step in 0..40_000u32 {
                let state = random();
                // Few distinct values in the high half, so that entries that exist are met again.
                let hash = (state >> 33) % 20_000;
                let hash = hash.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                let new = Location { segment: step, at: step ^ 5 };
                match model.get(&hash).copied() {
                    Some(old) if state & 0x300 == 0 => {
                        assert!(index.replace(hash, old, None).unwrap());
                        model.remove(&hash);
                    }
                    Some(old) => {
                        assert!(index.replace(hash, old, Some(new)).unwrap());
                        model.insert(hash, new);
                    }
                    None => {
                        index.reserve(hash).unwrap();
                        index.insert(hash, new).unwrap();
                        model.insert(hash, new);
                    }
                }
            }
            assert_eq!(index.entries(), model.len() as u64);
            for number in 0..20_000u64 {
                let hash = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                let found: Vec<_> = index.find(hash).unwrap().iter().collect();
                assert_eq!(found, model.get(&hash).copied().into_iter().collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn hashes_that_collide_are_all_found() {
        let mut index = index(8);
        for at in 0..3 {
            index.insert(7, Location { segment: 1, at }).unwrap();
        }
        assert_eq!(index.find(7).unwrap().iter().count(), 3);
        assert!(!index.replace(7, Location { segment: 2, at: 0 }, None).unwrap());
    }
}
