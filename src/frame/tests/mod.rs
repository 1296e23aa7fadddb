mod vectors;

use std::sync::Arc;

use super::*;
use crate::crypto::SecretKey;
use crate::crypto::aead::{NONCE, TAG};
use crate::env::{Environment, SeededEnvironment};
use crate::error::{Error, Result};
use crate::format::page::ChunkTable;
use crate::format::record::RECORD_PLAIN;
use crate::format::{Generation, Ino, Pointer, Run};

const GENERATION: Generation = Generation(17);

/// Returns the maximum number of blocks of a data page of `length` plain bytes, stored raw.
fn worst_case_blocks(length: usize) -> u64 {
    data_blocks(length, length.div_ceil(CHUNK), 0)
}

fn cipher() -> PageCipher {
    PageCipher::new(&SecretKey::new([1; 32]), [2; 16], true, Arc::new(SeededEnvironment::new(3)))
}

fn noise(length: usize) -> Vec<u8> {
    let mut out = vec![0; length];
    SeededEnvironment::new(length as u64).fill_random(&mut out).unwrap();
    out
}

/// Lines with some repetition, as source text has.
fn text(length: usize) -> Vec<u8> {
    let random = SeededEnvironment::new(5);
    let mut out = Vec::new();
    while out.len() < length {
        let word = ["let ", "page", "\n    ", "self.", "(bytes)", "?;", "0x"][random.next_u64() as usize % 7];
        out.extend_from_slice(word.as_bytes());
    }
    out.truncate(length);
    out
}

fn seal_at(cipher: &PageCipher, page: &PlainPage<'_>, address: u64) -> SealedPage {
    let sealed = cipher.seal(page, Run::new(address, page.blocks()), GENERATION).unwrap();
    assert_eq!(sealed.bytes.len() as u64, sealed.pointer.run.bytes());
    sealed
}

fn damage(result: Result<OpenedPage>) -> String {
    match result {
        Err(Error::Damaged(text)) => text,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("a wrong page was accepted"),
    }
}

fn read_back(page: &PlainPage<'_>) -> Vec<u8> {
    let cipher = cipher();
    let sealed = seal_at(&cipher, page, 400);
    let opened = cipher.open(&sealed.pointer, sealed.bytes).unwrap();
    (0..opened.table().unwrap().chunks.len()).flat_map(|chunk| opened.read_chunk(chunk).unwrap()).collect()
}

fn table_of(page: &PlainPage<'_>) -> ChunkTable {
    let cipher = cipher();
    let sealed = seal_at(&cipher, page, 400);
    cipher.open(&sealed.pointer, sealed.bytes).unwrap().table().unwrap().clone()
}

/// Opens the head from as many of the page's bytes as it needs.
fn head_of(cipher: &PageCipher, pointer: &Pointer, bytes: &[u8]) -> Result<DataHead> {
    let page_start = cipher.open_start(pointer, bytes)?;
    cipher.open_head(pointer, &page_start, &mut bytes[..page_start.main_end()].to_vec())
}

#[test]
fn data_comes_back_whatever_its_size_and_nature() {
    for length in [1, 100, 3964, 3965, 4096, CHUNK, CHUNK + 1, 70_000, MAX_DATA] {
        for data in [noise(length), text(length), vec![0; length]] {
            for compression in [Compression::Off, Compression::Fast, Compression::Default, Compression::Best] {
                let page = data_page(9, 4096, &data, compression);
                assert!(page.blocks() <= worst_case_blocks(length));
                assert_eq!(read_back(&page), data);
            }
        }
    }
}

#[test]
fn more_effort_makes_smaller_pages_and_the_best_has_one_chunk() {
    // Source text, which has more structure than repeated words.
    let data = include_bytes!("mod.rs");
    let stored = |compression| data_page(9, 0, data, compression).stored_length();
    let levels = Compression::LEVELS.map(|(_, level)| level);
    assert!(levels.is_sorted_by_key(|level| std::cmp::Reverse(stored(*level))), "{:?}", levels.map(stored));
    let large = text(MAX_DATA);
    let page = data_page(9, 0, &large, Compression::Best);
    assert!(matches!(page.content, PageContent::Chunks { ref chunks, .. } if chunks.len() == 1));
}

#[test]
fn compression_is_kept_only_where_it_saves_blocks() {
    let raw = |length| worst_case_blocks(length);
    assert!(data_page(1, 0, &text(MAX_DATA), Compression::Default).blocks() < raw(MAX_DATA) / 2);
    assert_eq!(data_page(1, 0, &text(MAX_DATA), Compression::Off).blocks(), raw(MAX_DATA));
    assert_eq!(data_page(1, 0, &noise(MAX_DATA), Compression::Default).blocks(), raw(MAX_DATA));
    // One block either way: raw, so that reading needs no decompression.
    let short = text(3000);
    let page = data_page(1, 0, &short, Compression::Default);
    assert!(table_of(&page).chunks[0].raw);
    // Chunks are chosen one by one.
    let mixed = [text(CHUNK), noise(CHUNK), text(CHUNK)].concat();
    let page = data_page(1, 0, &mixed, Compression::Default);
    assert_eq!(table_of(&page).chunks.iter().map(|chunk| chunk.raw).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(read_back(&page), mixed);
}

#[test]
fn packed_items_come_back() {
    let items = [
        PackedItem { ino: Ino(5), offset: 0, start: 0, length: 600 },
        PackedItem { ino: Ino(6), offset: 0, start: 600, length: 400 },
    ];
    let data = noise(1000);
    let page = packed_page(&data, &items, Compression::Default);
    assert_eq!(table_of(&page).items, items);
    assert_eq!(read_back(&page), data);
}

#[test]
fn nodes_are_compressed_when_that_saves_a_block() {
    let cipher = cipher();
    for (encoded, blocks) in [(text(NODE_CAPACITY), 1..=3), (noise(NODE_CAPACITY), 4..=4), (noise(100), 1..=1)] {
        let page = node_page(1, 3, encoded.clone());
        assert!(blocks.contains(&page.blocks()), "{}", page.blocks());
        let sealed = seal_at(&cipher, &page, 400);
        let opened = cipher.open(&sealed.pointer, sealed.bytes).unwrap();
        assert_eq!((opened.prologue.owner, opened.prologue.position), (1, 3));
        assert_eq!(opened.body(), encoded);
        assert_eq!(opened.into_body(), encoded);
    }
    let sealed = seal_at(&cipher, &delta_page(noise(5000)), 400);
    assert_eq!(cipher.open(&sealed.pointer, sealed.bytes).unwrap().into_body(), noise(5000));
}

#[test]
fn every_flipped_bit_of_a_page_is_refused() {
    let cipher = cipher();
    let items = [PackedItem { ino: Ino(5), offset: 0, start: 0, length: 12 }];
    let sealed = seal_at(&cipher, &packed_page(b"a small page", &items, Compression::Default), 400);
    assert_eq!(sealed.bytes.len(), 4096);
    for bit in 0..4096 * 8 {
        let mut bytes = sealed.bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        damage(cipher.open(&sealed.pointer, bytes));
    }
    for length in [0, 87, 104, 4095] {
        damage(cipher.open(&sealed.pointer, sealed.bytes[..length].to_vec()));
    }
    assert!(cipher.open(&sealed.pointer, sealed.bytes).is_ok());
}

#[test]
fn a_page_opens_only_in_its_place_and_archive() {
    let cipher = cipher();
    let sealed = seal_at(&cipher, &data_page(9, 0, b"a small page", Compression::Default), 400);
    let moved = Pointer { run: Run::new(401, 1), ..sealed.pointer };
    let text = damage(cipher.open(&moved, sealed.bytes.clone()));
    assert_eq!(text, "page failed authentication: block=401 generation=17");
    assert!(cipher.open_prologue(401, &sealed.bytes).is_err());
    let other = PageCipher::new(&SecretKey::new([1; 32]), [3; 16], true, Arc::new(SeededEnvironment::new(3)));
    damage(other.open(&sealed.pointer, sealed.bytes));
}

#[test]
fn an_authentic_page_that_the_pointer_does_not_mean_is_refused() {
    let cipher = cipher();
    let page = data_page(9, 0, b"a small page", Compression::Default);
    let sealed = seal_at(&cipher, &page, 400);
    let stale = Pointer { generation: Generation(18), ..sealed.pointer };
    assert_eq!(damage(cipher.open(&stale, sealed.bytes.clone())), "page is of generation 17: block=400 generation=18");
    // Sealed again for the same address and generation: only the tag differs.
    let again = seal_at(&cipher, &page, 400);
    assert!(damage(cipher.open(&sealed.pointer, again.bytes)).starts_with("page has another tag"));
    let longer = Pointer { run: Run::new(400, 2), ..sealed.pointer };
    damage(cipher.open(&longer, sealed.bytes.clone()));
    let doubled = [&sealed.bytes[..], &sealed.bytes].concat();
    assert!(damage(cipher.open(&longer, doubled)).starts_with("page has 1 blocks, not 2"));
}

#[test]
fn a_scanner_opens_the_prologue_alone() {
    let cipher = cipher();
    let sealed = seal_at(&cipher, &data_page(9, 8192, &noise(20_000), Compression::Default), 400);
    let prologue = cipher.open_prologue(400, &sealed.bytes[..88]).unwrap();
    assert_eq!((prologue.kind, prologue.owner, prologue.position), (PageKind::Data, 9, 8192));
    assert_eq!((prologue.generation, u64::from(prologue.blocks)), (GENERATION, sealed.pointer.run.blocks));
    assert!(cipher.open_prologue(400, &sealed.bytes[..87]).is_err());
    assert!(cipher.open_prologue(400, &noise(4096)).is_err());
}

#[test]
fn a_record_opens_only_in_its_slot() {
    let cipher = cipher();
    let (bytes, tag) = cipher.seal_record(5, noise(RECORD_PLAIN)).unwrap();
    assert_eq!(bytes.len() as u64, BLOCK);
    assert_eq!(cipher.open_record(5, &bytes), Some((noise(RECORD_PLAIN), tag)));
    assert_eq!(cipher.open_record(6, &bytes), None);
    assert_eq!(cipher.open_record(5, &bytes[..4095]), None);
    for at in 0..bytes.len() {
        let mut altered = bytes.clone();
        altered[at] ^= 0x80;
        assert_eq!(cipher.open_record(5, &altered), None);
    }
    assert!(cipher.seal_record(5, vec![0; 100]).is_err());
}

#[test]
fn no_two_pages_share_a_nonce_or_look_alike() {
    let cipher = cipher();
    let page = data_page(9, 0, &[0; 3000], Compression::Default);
    let (one, two) = (seal_at(&cipher, &page, 400), seal_at(&cipher, &page, 400));
    assert_ne!(one.bytes[..NONCE], two.bytes[..NONCE]);
    assert!(one.bytes.iter().zip(&two.bytes).filter(|(a, b)| a == b).count() < 100);
}

#[test]
fn the_page_space_is_used_to_the_last_byte() {
    assert_eq!(worst_case_blocks(3964), 1);
    assert_eq!(worst_case_blocks(3965), 2);
    assert_eq!(worst_case_blocks(MAX_DATA), 33);
    let cipher = cipher();
    let mut short = data_page(9, 0, b"x", Compression::Off);
    assert!(cipher.seal(&short, Run::new(400, 2), GENERATION).is_err());
    short.kind = PageKind::Node;
    assert_eq!(short.blocks(), NODE_BLOCKS);
}

/// See `allocator::groups_for`: raw data fits its reserved groups, whole or divided into groups.
#[test]
fn a_page_of_any_length_fits_the_groups_promised_for_it() {
    assert_eq!(worst_case_blocks(GROUP_DATA), 4);
    assert_eq!(worst_case_blocks(GROUP_DATA + 1), 5);
    for length in 1..=MAX_DATA {
        assert!(worst_case_blocks(length).div_ceil(4) <= length.div_ceil(GROUP_DATA) as u64, "length={length}");
    }
}

#[test]
fn a_cell_never_decompresses_to_more_than_it_says() {
    let page = data_page(9, 0, &[0; CHUNK], Compression::Default);
    let PageContent::Chunks { chunks, .. } = &page.content else { panic!("no chunks") };
    let mut entry = table_of(&page).chunks[0];
    assert!(!entry.raw);
    let mut out = vec![1; CHUNK];
    plain_chunk(&entry, &chunks[0].0, &mut out).unwrap();
    assert_eq!(out, [0; CHUNK]);
    for lie in [0, 1, CHUNK as u32 - 1, CHUNK as u32 + 1] {
        entry.plain_length = lie;
        assert!(plain_chunk(&entry, &chunks[0].0, &mut vec![0; lie as usize]).is_err());
        assert!(plain_chunk(&entry, &chunks[0].0, &mut vec![0; CHUNK]).is_err());
    }
}

#[test]
fn cells_open_alone_and_any_flipped_bit_of_them_is_refused() {
    let cipher = cipher();
    let data = [noise(CHUNK), text(CHUNK), noise(100)].concat();
    let sealed = seal_at(&cipher, &data_page(9, 0, &data, Compression::Default), 400);
    let head = head_of(&cipher, &sealed.pointer, &sealed.bytes).unwrap();
    let entries = head.table.chunks.clone();
    assert_eq!(entries.iter().map(|chunk| chunk.raw).collect::<Vec<_>>(), [true, false, true]);
    assert_eq!(head.stored_range(&(2..3)).end, sealed.bytes.len(), "chunks reach to the end of the page");
    for (chunk, entry) in entries.iter().enumerate() {
        let place = head.stored_range(&(chunk..chunk + 1));
        let open = |bytes: &mut Vec<u8>| cipher.open_chunks(&sealed.pointer, &head, chunk..chunk + 1, bytes);
        let mut stored = sealed.bytes[place.clone()].to_vec();
        open(&mut stored).unwrap();
        let mut plain = vec![0; entry.plain_length as usize];
        plain_chunk(entry, &stored, &mut plain).unwrap();
        assert_eq!(plain, data[chunk * CHUNK..][..plain.len()]);
        for at in (0..place.len()).step_by(97).chain([place.len() - 1]) {
            let mut altered = sealed.bytes[place.clone()].to_vec();
            altered[at] ^= 1 << (at % 8);
            let error = open(&mut altered).unwrap_err().to_string();
            let said = format!("page failed authentication: block=400 generation=17 chunk={chunk}");
            assert!(error.ends_with(&said), "{error}");
            assert!(altered.iter().all(|&byte| byte == 0), "what did not open stays readable");
        }
        assert!(open(&mut sealed.bytes[place.start..place.end - 1].to_vec()).is_err(), "cut");
    }
}

#[test]
fn a_cell_of_another_place_or_version_is_refused() {
    let cipher = cipher();
    let data = noise(3 * CHUNK);
    let (one, two) = (data_page(9, 0, &data, Compression::Off), data_page(9, 0, &data, Compression::Off));
    let (one, two) = (seal_at(&cipher, &one, 400), seal_at(&cipher, &two, 400));
    let head = head_of(&cipher, &one.pointer, &one.bytes).unwrap();
    let (first, second) = (head.stored_range(&(0..1)), head.stored_range(&(1..2)));
    // Swap two chunks of one page.
    let mut swapped = one.bytes.clone();
    swapped[first.clone()].copy_from_slice(&one.bytes[second.clone()]);
    swapped[second.clone()].copy_from_slice(&one.bytes[first.clone()]);
    assert!(cipher.open_chunks(&one.pointer, &head, 0..1, &mut swapped[first.clone()].to_vec()).is_err());
    damage(cipher.open(&one.pointer, swapped));
    // The same chunk of another version of the page, with the same content, address and generation.
    let mut mixed = one.bytes.clone();
    mixed[second.clone()].copy_from_slice(&two.bytes[second.clone()]);
    assert!(cipher.open_chunks(&one.pointer, &head, 1..2, &mut mixed[second.clone()].to_vec()).is_err());
    assert!(cipher.open_chunks(&one.pointer, &head, 0..1, &mut mixed[first].to_vec()).is_ok());
    damage(cipher.open(&one.pointer, mixed));
    // Everything except nonce and prologue from another version, with the tag that the pointer
    // expects.
    let start = NONCE + 48 + TAG;
    damage(cipher.open(&one.pointer, [&one.bytes[..start], &two.bytes[start..]].concat()));
    damage(cipher.open(&two.pointer, [&one.bytes[..start], &two.bytes[start..]].concat()));
}

#[test]
fn every_flipped_bit_up_to_the_cells_is_refused_by_the_head_alone() {
    let cipher = cipher();
    let sealed = seal_at(&cipher, &data_page(9, 0, &noise(5000), Compression::Off), 400);
    let end = cipher.open_start(&sealed.pointer, &sealed.bytes).unwrap().main_end();
    assert_eq!(end, 8192 - 5000, "the head's padding fills the page");
    for bit in 0..end * 8 {
        let mut bytes = sealed.bytes[..end].to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(head_of(&cipher, &sealed.pointer, &bytes).is_err(), "bit={bit}");
    }
    let page_start = cipher.open_start(&sealed.pointer, &sealed.bytes).unwrap();
    assert!(cipher.open_head(&sealed.pointer, &page_start, &mut sealed.bytes[..end - 1].to_vec()).is_err());
    let list = seal_at(&cipher, &delta_page(noise(5000)), 400);
    let page_start = cipher.open_start(&list.pointer, &list.bytes).unwrap();
    assert!(cipher.open_head(&list.pointer, &page_start, &mut list.bytes.clone()).is_err(), "no data page");
}

/// Specification 5.1: other implementations need not accept more than this.
#[test]
fn what_is_decompressed_is_one_frame_and_nothing_beside_it() {
    let frame = |data: &[u8]| zstd::bulk::compress(data, 1).unwrap();
    let (first, second) = (frame(&[7; 500]), frame(&[8; 500]));
    let skipped = [&SKIPPABLE.to_le_bytes()[..], &3u32.to_le_bytes(), b"abc"].concat();
    let mut out = [0; 500];
    decompress(&first, &mut out).unwrap();
    assert_eq!(out, [7; 500]);
    for wrong in [
        [&skipped[..], &first].concat(),
        [&first[..], &skipped].concat(),
        [&first[..], &[0]].concat(),
        [&first[..], &frame(&[])].concat(),
        first[..first.len() - 1].to_vec(),
        skipped,
        Vec::new(),
    ] {
        assert!(decompress(&wrong, &mut out).is_err(), "{wrong:?}");
    }
    assert!(decompress(&[first, second].concat(), &mut [0; 1000]).is_err());
}
