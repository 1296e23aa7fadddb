//! Pages whose plain content is the fuzzer's, sealed as a holder of the key would: kind, lengths,
//! head, chunks, nodes, delta lists.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use super::decoders::filled;
use super::forge;
use crate::crypto::SecretKey;
use crate::env::SeededEnvironment;
use crate::format::data_head::PackedItem;
use crate::format::page::PageKind;
use crate::format::record::DeltaList;
use crate::format::{BLOCK, Generation, Ino, NODE_CAPACITY, Run, node};
use crate::frame::{PageCipher, PageContent, PlainPage};
use crate::pager::Pager;
use crate::storage::{MemoryStorage, Storage};

/// Address with space for the longest page after the first blocks.
const ADDRESS: u64 = 400;

fn cipher() -> &'static PageCipher {
    static CIPHER: OnceLock<PageCipher> = OnceLock::new();
    CIPHER.get_or_init(|| {
        PageCipher::new(&SecretKey::new([9; 32]), forge::ARCHIVE, true, Arc::new(SeededEnvironment::new(1)))
    })
}

/// Decodes an input into a page: kind, compression, lengths, owner, position, chunks, then its
/// bytes.
pub(in crate::archive::fuzzing) fn plain_page(data: &[u8]) -> Option<PlainPage<'static>> {
    let (head, rest) = data.split_first_chunk::<24>()?;
    let kind = match head[0] % 4 {
        0 => PageKind::Node,
        1 => PageKind::Data,
        2 => PageKind::Packed,
        _ => PageKind::DeltaList,
    };
    let plain_length = u32::from_le_bytes(filled(&head[4..8]));
    let (owner, position) = (u64::from_le_bytes(filled(&head[8..16])), u64::from_le_bytes(filled(&head[16..24])));
    let compressed = head[1] & 1 == 1;
    let content = match kind {
        PageKind::Node | PageKind::DeltaList => PageContent::Body(rest[..rest.len().min(NODE_CAPACITY)].to_vec()),
        PageKind::Data | PageKind::Packed => {
            // The encoder accepts only valid heads; invalid ones are tested by the target `head`.
            let count = usize::from(head[2]) % 32 + 1;
            let cells = rest.chunks(rest.len().div_ceil(count).max(1)).take(32);
            let cells = cells.map(|cell| (Cow::Owned(cell.to_vec()), head[1] & 2 == 2)).collect();
            let items = (0..head[3] % 4).map(|n| PackedItem {
                ino: Ino(owner.wrapping_add(u64::from(n))),
                offset: position,
                start: plain_length / 4 * u32::from(n),
                length: plain_length / 4,
            });
            PageContent::Cells { cell_log2: 12 + head[1] / 4 % 6, cells, items: items.collect() }
        }
    };
    if let PageContent::Cells { cells, .. } = &content
        && cells.is_empty()
    {
        return None;
    }
    Some(PlainPage { kind, compressed, plain_length, owner, position, content })
}

pub(super) fn page(data: &[u8]) {
    let Some(plain) = plain_page(data) else { return };
    if plain.blocks() > 64 {
        return;
    }
    let run = Run::new(ADDRESS, plain.blocks());
    let sealed = cipher().seal(&plain, run, Generation(5)).expect("a page of its own length");
    let _ = cipher().open_prologue(ADDRESS, &sealed.bytes);
    if let Ok(opened) = cipher().open(&sealed.pointer, sealed.bytes.clone()) {
        match opened.prologue.kind {
            PageKind::Node => drop(node::decode(opened.body())),
            PageKind::DeltaList => drop(DeltaList::decode(opened.body())),
            PageKind::Data | PageKind::Packed => {
                let cells = opened.table().map_or(0, |table| table.cells.len());
                for cell in 0..=cells {
                    let _ = opened.read_cell(cell);
                }
            }
        }
    }
    read_as_file_data(&sealed.pointer, sealed.bytes);
}

/// Reads like a file read: first the head, then the requested chunks.
fn read_as_file_data(pointer: &crate::format::Pointer, bytes: Vec<u8>) {
    let storage = MemoryStorage::new();
    let placed = storage
        .set_len((ADDRESS + pointer.run.blocks) * BLOCK)
        .and_then(|()| storage.write_at(ADDRESS * BLOCK, &bytes));
    placed.expect("memory takes a page");
    let cipher = PageCipher::new(&SecretKey::new([9; 32]), forge::ARCHIVE, true, Arc::new(SeededEnvironment::new(1)));
    let pager = Pager::new(Arc::new(storage), cipher, 1 << 20);
    for (start, length) in [(0, 1), (0, 131_072), (4095, 2), (16_383, 20_000), (131_071, 1)] {
        let _ = pager.read_data(pointer, start, &mut vec![0; length]);
    }
}
