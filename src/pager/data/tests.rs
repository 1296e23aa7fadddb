//! Reads of arbitrary ranges, the storage reads they cause, and the damage they detect.

use super::*;
use crate::crypto::SecretKey;
use crate::env::{Environment, SeededEnvironment, variable};
use crate::format::page::PackedItem;
use crate::format::{Generation, Ino, MAX_DATA, Run};
use crate::frame::{self, CHUNK_LOG2, Compression, PageCipher, PlainPage};
use crate::storage::{CountingStorage, Storage};

const CHUNK: usize = 1 << CHUNK_LOG2;

fn flip(storage: &CountingStorage, at: u64) {
    let mut byte = [0];
    storage.memory.read_at(at, &mut byte).unwrap();
    storage.memory.write_at(at, &[byte[0] ^ 0x10]).unwrap();
}

fn cipher() -> PageCipher {
    PageCipher::new(&SecretKey::new([1; 32]), [2; 16], false, Arc::new(SeededEnvironment::new(3)))
}

fn storage() -> Arc<CountingStorage> {
    Arc::new(CountingStorage::default())
}

fn pager(storage: &Arc<CountingStorage>, cache: usize) -> Pager {
    Pager::new(storage.clone(), cipher(), cache)
}

fn write(pager: &Pager, page: &PlainPage<'_>, address: u64) -> Pointer {
    let sealed = pager.seal(page, Run::new(address, page.blocks()), Generation(17)).unwrap();
    pager.write_page(&sealed).unwrap();
    sealed.pointer
}

fn noise(length: usize) -> Vec<u8> {
    let mut out = vec![0; length];
    SeededEnvironment::new(length as u64).fill_random(&mut out).unwrap();
    out
}

/// Alternating chunks of noise and text, so that raw and compressed ones are adjacent.
fn mixed(length: usize) -> Vec<u8> {
    let mut out = noise(length);
    for (number, chunk) in out.chunks_mut(CHUNK).enumerate() {
        if number % 3 == 1 {
            chunk.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 64) as u8);
        }
    }
    out
}

fn read(pager: &Pager, pointer: &Pointer, range: Range<usize>) -> Result<Vec<u8>> {
    let mut out = vec![0xEE; range.len()];
    pager.read_data(pointer, range.start as u32, &mut out)?;
    Ok(out)
}

fn head(pager: &Pager, pointer: &Pointer) -> Arc<DataHead> {
    PageReader::open(pager, pointer, 0, 0).unwrap().head().unwrap()
}

#[test]
fn any_range_reads_as_it_was_written() {
    let seed = variable("SEED").unwrap_or(11);
    println!("SEED={seed}");
    let random = SeededEnvironment::new(seed);
    let storage = storage();
    let pager = pager(&storage, 100_000);
    let mut pages = Vec::new();
    let mut address = 400;
    for length in [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, MAX_DATA - 1, MAX_DATA] {
        for data in [noise(length), vec![7; length], mixed(length)] {
            let page = frame::data_page(9, 0, &data, Compression::Default);
            let pointer = write(&pager, &page, address);
            address += page.blocks();
            pages.push((pointer, data));
        }
    }
    for (pointer, data) in &pages {
        assert_eq!(read(&pager, pointer, 0..data.len()).unwrap(), *data);
        assert!(read(&pager, pointer, 0..0).unwrap().is_empty());
        for range in [0..data.len() + 1, data.len()..data.len() + 1, data.len() + CHUNK..data.len() + CHUNK + 1] {
            assert!(read(&pager, pointer, range).unwrap_err().to_string().contains("extent reaches beyond its page"));
        }
    }
    for _ in 0..2000 {
        let (pointer, data) = &pages[random.next_u64() as usize % pages.len()];
        let mut ends = [random.next_u64() as usize % (data.len() + 1), random.next_u64() as usize % (data.len() + 1)];
        if random.next_u64().is_multiple_of(2) {
            ends = ends.map(|end| end.next_multiple_of(CHUNK).min(data.len()));
        }
        ends.sort_unstable();
        assert_eq!(read(&pager, pointer, ends[0]..ends[1]).unwrap(), data[ends[0]..ends[1]], "{ends:?}");
    }
    assert!(pager.chunks.bytes() <= 75_000 && pager.heads.bytes() <= 25_000);
}

#[test]
fn a_small_read_reads_one_cell_and_the_next_one_of_it_nothing() {
    let storage = storage();
    let pager = pager(&storage, 1 << 20);
    let data = noise(MAX_DATA);
    let pointer = write(&pager, &frame::data_page(9, 0, &data, Compression::Default), 400);
    storage.take();
    read(&pager, &pointer, 5 * CHUNK + 100..5 * CHUNK + 200).unwrap();
    assert_eq!(storage.take(), (2, 4096 + CHUNK as u64), "the first block with the head, and a chunk");
    read(&pager, &pointer, 5 * CHUNK + 4096..6 * CHUNK).unwrap();
    assert_eq!(storage.take(), (0, 0));
    read(&pager, &pointer, 0..4096).unwrap();
    assert_eq!(storage.take(), (1, CHUNK as u64), "the head is kept");
    // Whole chunks are read with one request and not cached.
    let kept = pager.chunks.bytes();
    assert_eq!(read(&pager, &pointer, 0..MAX_DATA).unwrap(), data);
    assert_eq!(storage.take(), (1, MAX_DATA as u64));
    assert_eq!(pager.chunks.bytes(), kept);
}

#[test]
fn the_raw_cells_of_a_full_page_begin_at_blocks() {
    let storage = storage();
    let pager = pager(&storage, 1 << 20);
    let data = noise(MAX_DATA);
    let pointer = write(&pager, &frame::data_page(9, 0, &data, Compression::Default), 400);
    let head = head(&pager, &pointer);
    assert_eq!(head.stored_range(&(0..MAX_DATA / CHUNK)), 4096..4096 + MAX_DATA);
}

#[test]
fn a_head_longer_than_a_block_is_read_whole() {
    let storage = storage();
    let data = noise(1000);
    let item = |start| PackedItem { ino: Ino(5), offset: 0, start, length: 1 };
    let items: Vec<PackedItem> = (0..400).map(item).collect();
    let pointer = write(&pager(&storage, 1 << 20), &frame::packed_page(&data, &items, Compression::Off), 400);
    assert_eq!(read(&pager(&storage, 1 << 20), &pointer, 0..1000).unwrap(), data);
}

/// Damage is detected by reads of the damaged part, anywhere in the page; the rest stays readable.
#[test]
fn a_flipped_bit_is_noticed_where_it_is_read() {
    for far in [false, true] {
        a_flipped_bit_is_noticed(&Arc::new(CountingStorage::new(far)));
    }
}

fn a_flipped_bit_is_noticed(storage: &Arc<CountingStorage>) {
    let data = mixed(5 * CHUNK + 100);
    let pointer = write(&pager(storage, 1 << 20), &frame::data_page(9, 0, &data, Compression::Default), 400);
    let (first, end) = (pointer.run.offset(), pointer.run.offset() + pointer.run.bytes());
    let head = head(&pager(storage, 1 << 20), &pointer);
    let chunks = head.table.chunks.len();
    for chunk in 0..chunks {
        let place = head.stored_range(&(chunk..chunk + 1));
        flip(storage, first + place.end as u64 - 1);
        let damaged = pager(storage, 1 << 20);
        for other in 0..chunks {
            for within in [0..CHUNK, 1..CHUNK] {
                let range = other * CHUNK + within.start..(other * CHUNK + within.end).min(data.len());
                let found = read(&damaged, &pointer, range.clone());
                if other == chunk {
                    let text = found.unwrap_err().to_string();
                    assert!(text.ends_with(&format!("block=400 generation=17 chunk={chunk}")), "{text}");
                } else {
                    assert_eq!(found.unwrap(), data[range]);
                }
            }
        }
        assert!(read(&damaged, &pointer, 0..data.len()).is_err());
        assert!(damaged.open_page(&pointer).is_err());
        flip(storage, first + place.end as u64 - 1);
    }
    let chunks_at = head.stored_range(&(0..1)).start as u64;
    for at in (first..first + chunks_at).step_by(13).chain([first + chunks_at - 1]) {
        flip(storage, at);
        assert!(read(&pager(storage, 1 << 20), &pointer, 0..10).is_err(), "at={}", at - first);
        flip(storage, at);
    }
    assert_eq!(read(&pager(storage, 1 << 20), &pointer, 0..data.len()).unwrap(), data);
    // In a truncated archive the remaining pages can be read, and missing ones are damage.
    storage.memory.set_len(end - 4096).unwrap();
    let truncated = pager(storage, 1 << 20);
    assert_eq!(read(&truncated, &pointer, 0..CHUNK).unwrap(), data[..CHUNK]);
    assert!(matches!(read(&truncated, &pointer, 0..data.len()), Err(Error::Damaged(_))));
    assert!(matches!(truncated.open_page(&pointer), Err(Error::Damaged(_))));
}

/// Cached data of a remote archive may be of another history: a store that was reset and written on
/// has other content at the same addresses.
#[test]
fn a_page_of_another_machine_that_is_not_as_it_should_be_is_read_from_where_it_lies() {
    let data = noise(3 * CHUNK);
    for far in [true, false] {
        let storage = Arc::new(CountingStorage::new(far));
        let pager = pager(&storage, 1 << 20);
        let write_over = |data: &[u8]| {
            write(&pager, &frame::data_page(9, 0, &noise(2 * CHUNK), Compression::Default), 400);
            storage.freeze();
            write(&pager, &frame::data_page(9, 0, data, Compression::Default), 400)
        };
        let page = write_over(&data);
        assert_eq!(read(&pager, &page, 0..3 * CHUNK).is_ok_and(|found| found == data), far);
        let page = write_over(&data[1..]);
        assert_eq!(pager.open_page(&page).is_ok(), far);
    }
}

#[test]
fn an_older_version_of_a_page_is_refused_also_when_its_head_was_kept() {
    let storage = storage();
    let pager = pager(&storage, 1 << 20);
    let (old, new) = (noise(2 * CHUNK), mixed(2 * CHUNK));
    let before = write(&pager, &frame::data_page(9, 0, &old, Compression::Off), 400);
    assert_eq!(read(&pager, &before, 0..2 * CHUNK).unwrap(), old);
    let mut bytes = vec![0; before.run.bytes() as usize];
    storage.read_at(before.run.offset(), &mut bytes).unwrap();
    let now = write(&pager, &frame::data_page(9, 0, &new, Compression::Off), 400);
    assert_eq!(read(&pager, &now, 0..2 * CHUNK).unwrap(), new);
    assert!(read(&pager, &before, 0..2 * CHUNK).is_err(), "the old head does not open new chunks");
    // The second chunk as it was before is put back under the new head.
    let at = head(&pager, &now).stored_range(&(1..2)).start;
    storage.write_at(now.run.offset() + at as u64, &bytes[at..]).unwrap();
    assert_eq!(read(&pager, &now, 0..CHUNK).unwrap(), new[..CHUNK]);
    assert!(read(&pager, &now, CHUNK..2 * CHUNK).is_err());
    storage.write_at(now.run.offset(), &bytes).unwrap();
    assert!(read(&Pager::new(storage.clone(), cipher(), 0), &now, 0..CHUNK).is_err());
}

#[test]
fn only_pages_of_file_data_are_read_as_such() {
    let storage = storage();
    let pager = pager(&storage, 1 << 20);
    let pointer = write(&pager, &frame::delta_page(noise(5000)), 400);
    assert!(read(&pager, &pointer, 0..10).unwrap_err().to_string().contains("page of another kind"));
    let reserved = Pointer { run: Run::new(321, 2), ..pointer };
    assert!(read(&pager, &reserved, 0..10).unwrap_err().to_string().contains("header, ring or log"));
}

/// On remote storage one page costs one request; for several pages, missing ones are prefetched
/// even if their heads are cached.
#[test]
fn remote_pages_are_prefetched_unless_one_request_suffices() {
    let storage = Arc::new(CountingStorage::new(true));
    let writer = pager(&storage, 1 << 20);
    let pages =
        [400, 500].map(|at| write(&writer, &frame::data_page(9, 0, &noise(MAX_DATA), Compression::Default), at));
    let pager = pager(&storage, 1 << 20);
    let part = (5 * CHUNK + 100) as u32;
    let place = |page: &Pointer, blocks: Range<u64>| {
        page.run.offset() + blocks.start * BLOCK..page.run.offset() + blocks.end * BLOCK
    };
    let chunk = CHUNK as u64 / BLOCK;
    pager.prefetch_data([(&pages[0], part, 10)].into_iter());
    assert_eq!(storage.take_hints(), [place(&pages[0], 0..1 + 6 * chunk)]);
    pages.iter().for_each(|page| drop(read(&pager, page, 0..10).unwrap()));
    let both = pages.each_ref().map(|page| (page, part, 10));
    pager.prefetch_data(both.into_iter());
    assert_eq!(storage.take_hints(), pages.each_ref().map(|page| place(page, 1 + 5 * chunk..1 + 6 * chunk)));
    // A single page is requested by its reader, and cached pages are not requested.
    pager.prefetch_data([both[1]].into_iter());
    assert_eq!(storage.take_hints(), []);
    read(&pager, &pages[0], part as usize..part as usize + 10).unwrap();
    pager.prefetch_data(both.into_iter());
    assert_eq!(storage.take_hints(), [place(&pages[1], 1 + 5 * chunk..1 + 6 * chunk)]);
}

/// Head and chunks of an uncached page are read at once from remote storage, unless most bytes
/// between them would be useless.
#[test]
fn another_machine_is_asked_once_for_head_and_cells() {
    for (far, whole) in [(true, 1), (false, 2)] {
        let storage = Arc::new(CountingStorage::new(far));
        let content = noise(MAX_DATA);
        let page = write(&pager(&storage, 1 << 20), &frame::data_page(9, 0, &content, Compression::Default), 400);
        for (part, requests) in [(0..MAX_DATA, whole), (MAX_DATA / 2..MAX_DATA, whole), (5 * CHUNK..5 * CHUNK + 10, 2)]
        {
            let pager = pager(&storage, 1 << 20);
            storage.take();
            assert_eq!(read(&pager, &page, part.clone()).unwrap(), content[part.clone()]);
            assert_eq!(storage.take().0, requests, "{part:?} of a storage that is far: {far}");
            // With a cached head only chunks are read.
            let all = read(&pager, &page, 0..MAX_DATA).unwrap();
            assert_eq!((all, storage.take()), (content.clone(), (1, MAX_DATA as u64)));
        }
    }
}

#[test]
fn a_cold_read_is_prefetched() {
    let storage = storage();
    let writer = pager(&storage, 1 << 20);
    let half: Vec<u8> = noise(MAX_DATA)
        .chunks(512)
        .enumerate()
        .flat_map(|(n, part)| if n % 2 == 0 { part.to_vec() } else { vec![0; 512] })
        .collect();
    let raw = write(&writer, &frame::data_page(9, 0, &noise(MAX_DATA), Compression::Default), 400);
    let compressed = write(&writer, &frame::data_page(9, 0, &half, Compression::Default), 500);
    let small = write(&writer, &frame::data_page(9, 0, &noise(9000), Compression::Default), 600);
    assert!(compressed.run.blocks < raw.run.blocks && small.run.blocks == 3);
    for (page, parts) in [
        (
            &raw,
            &[5 * CHUNK + 100..5 * CHUNK + 200, 0..4096, 0..MAX_DATA, 3 * CHUNK..5 * CHUNK, MAX_DATA - 1..MAX_DATA][..],
        ),
        (&compressed, &[5 * CHUNK + 100..5 * CHUNK + 200, 0..4096, 0..MAX_DATA, 7 * CHUNK..8 * CHUNK]),
        (&small, &[0..1, 5000..9000]),
    ] {
        for part in parts {
            let pager = pager(&storage, 1 << 20);
            storage.take();
            pager.prefetch_data([(page, part.start as u32, part.len() as u32)].into_iter());
            assert_eq!(storage.take(), (0, 0), "a hint reads nothing");
            let hinted: Vec<u64> = storage
                .take_hints()
                .iter()
                .inspect(|hint| {
                    assert!(page.run.offset() <= hint.start && hint.end <= page.run.offset() + page.run.bytes())
                })
                .flat_map(|hint| hint.start / BLOCK..hint.end.div_ceil(BLOCK))
                .collect();
            storage.take_blocks();
            read(&pager, page, part.clone()).unwrap();
            let wanted: Vec<u64> = storage.take_blocks().into_keys().collect();
            assert!(wanted.iter().all(|block| hinted.contains(block)), "{part:?}: {wanted:?} of {hinted:?}");
            if page == &raw {
                assert_eq!(hinted, wanted, "{part:?}");
            }
            pager.prefetch_data([(page, part.start as u32, part.len() as u32)].into_iter());
            assert_eq!(storage.take_hints(), [], "once the head is known nothing has to be guessed");
        }
    }
    // Adjacent pages are prefetched together, others alone.
    let next = write(&writer, &frame::data_page(9, 0, &noise(MAX_DATA), Compression::Default), raw.run.end());
    let fresh = pager(&storage, 1 << 20);
    fresh.prefetch_data([&raw, &next, &small].map(|page| (page, 0, MAX_DATA as u32)).into_iter());
    let of = |run: Run| run.offset()..run.offset() + run.bytes();
    assert_eq!(storage.take_hints(), [of(raw.run).start..of(next.run).end, of(small.run)]);
    // Extents may be forged.
    let pager = pager(&storage, 1 << 20);
    for (start, length) in [(u32::MAX, u32::MAX), (0, 0), (u32::MAX, 0)] {
        pager.prefetch_data([(&raw, start, length), (&compressed, start, length)].into_iter());
    }
    let beyond = |hint: &Range<u64>| hint.end > compressed.run.offset() + compressed.run.bytes();
    assert!(!storage.take_hints().iter().any(beyond));
}
