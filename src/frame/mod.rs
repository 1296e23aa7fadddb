//! Page layout before sealing: compression, division into chunks, and number of blocks.

mod cipher;

use std::borrow::Cow;
use std::cell::RefCell;
use std::io;

use serde::{Deserialize, Serialize};
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::find_frame_compressed_size;

pub(crate) use cipher::{
    DataHead, EntryStart, OpenedPage, PageCipher, SealedPage, WRONG_KIND, claimed_tag, plain_chunk,
};

use crate::format::page::{ChunkTable, PackedItem, PageKind, head_length};
use crate::format::{BLOCK, MAX_DATA, NODE_BLOCKS, NODE_CAPACITY, PAGE_OVERHEAD};

/// log2 of the chunk size; decided by measurement (bench/README.md).
pub(crate) const CHUNK_LOG2: u8 = 14;

const CHUNK: usize = 1 << CHUNK_LOG2;

/// log2 of the chunk size of [`Compression::Best`]: one chunk a page. Source text is a fifth
/// smaller than in chunks of 16 KiB, and reading 4 KiB of it decompresses 128 KiB.
const LARGE_CHUNK_LOG2: u8 = MAX_DATA.ilog2() as u8;

/// How much time is spent on smaller data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Compression {
    Off,
    /// Only repetitions are replaced.
    Fast,
    #[default]
    Default,
    /// For archives that are written once and read as a whole: a third of the speed of `Default`,
    /// and larger chunks.
    Best,
}

impl Compression {
    /// All levels with their names, as options of commands and mounts.
    pub const LEVELS: [(&str, Compression); 4] = [
        ("off", Compression::Off),
        ("fast", Compression::Fast),
        ("default", Compression::Default),
        ("best", Compression::Best),
    ];

    fn chunk_log2(self) -> u8 {
        match self {
            Compression::Off | Compression::Fast | Compression::Default => CHUNK_LOG2,
            Compression::Best => LARGE_CHUNK_LOG2,
        }
    }

    /// Returns the level of a page, as far as its chunks show it: `Default` for one written with
    /// `Fast`.
    pub(crate) fn of_page(table: &ChunkTable) -> Compression {
        match table.chunk_size.ilog2() as u8 {
            _ if table.chunks.iter().all(|chunk| chunk.raw) => Compression::Off,
            LARGE_CHUNK_LOG2 => Compression::Best,
            _ => Compression::Default,
        }
    }
}

/// Plain data that fits four blocks uncompressed, after overhead and head. A page of n *
/// `GROUP_DATA` bytes also fits n such groups: it has one fixed part instead of n, and at most n
/// times the chunks of one group, since `GROUP_DATA` is smaller than a chunk.
pub(crate) const GROUP_DATA: usize =
    4 * BLOCK as usize - PAGE_OVERHEAD - head_length((4 * BLOCK as usize).div_ceil(CHUNK), 0);

pub(crate) struct PlainPage<'a> {
    pub kind: PageKind,
    pub compressed: bool,
    pub plain_length: u32,
    pub owner: u64,
    pub position: u64,
    pub content: PageContent<'a>,
}

/// Content after the prologue.
pub(crate) enum PageContent<'a> {
    /// Body of a node or delta list, without padding.
    Body(Vec<u8>),
    /// Chunks of a data page as (stored bytes, raw), and the items that describe their parts.
    Chunks { chunk_log2: u8, chunks: Vec<(Cow<'a, [u8]>, bool)>, items: Vec<PackedItem> },
}

impl PlainPage<'_> {
    /// Returns the bytes of the body, or of all chunks.
    pub(crate) fn stored_length(&self) -> usize {
        match &self.content {
            PageContent::Body(body) => body.len(),
            PageContent::Chunks { chunks, .. } => chunks.iter().map(|(stored, _)| stored.len()).sum(),
        }
    }

    pub(crate) fn blocks(&self) -> u64 {
        match (&self.content, self.kind, self.compressed) {
            // Specification 6.1: a node page is raw in 4 blocks or compressed in fewer, even if the
            // node is small.
            (_, PageKind::Node, false) => NODE_BLOCKS,
            (PageContent::Body(body), ..) => blocks_of(body.len()),
            (PageContent::Chunks { chunks, items, .. }, ..) => {
                data_blocks(self.stored_length(), chunks.len(), items.len())
            }
        }
    }
}

fn blocks_of(bytes: usize) -> u64 {
    ((bytes + PAGE_OVERHEAD) as u64).div_ceil(BLOCK)
}

fn data_blocks(stored: usize, chunks: usize, items: usize) -> u64 {
    blocks_of(head_length(chunks, items) + stored)
}

/// Creates a node page: raw, or one zstd frame if that saves a block.
pub(crate) fn node_page(tree: u8, level: u8, encoded: Vec<u8>) -> PlainPage<'static> {
    let plain_length = encoded.len() as u32;
    let most = NODE_CAPACITY - BLOCK as usize;
    // A commit compresses every changed node while its callers wait. In most nodes the tags are the
    // incompressible part, so better coding of the rest saves no block: a leaf of extents takes 2
    // blocks at 19 us as at 36 (level 1), one of names 2 at 18 as at 29. Only a full internal node
    // takes one more (3 at 25 us, 2 at 40).
    let (compressed, body) = match compress(&encoded, most, Effort::Fast) {
        Some(smaller) => (true, smaller),
        None => (false, encoded),
    };
    let content = PageContent::Body(body);
    PlainPage { kind: PageKind::Node, compressed, plain_length, owner: tree.into(), position: level.into(), content }
}

/// Creates a data page of `data` (1..=128 KiB) at `offset` of inode `ino`. Compresses it chunk by
/// chunk if a probe shows that at least one block is saved.
pub(crate) fn data_page(ino: u64, offset: u64, data: &[u8], compression: Compression) -> PlainPage<'_> {
    let content = split_chunks(data, Vec::new(), compression);
    let plain_length = data.len() as u32;
    PlainPage { kind: PageKind::Data, compressed: false, plain_length, owner: ino, position: offset, content }
}

pub(crate) fn packed_page<'a>(data: &'a [u8], items: &[PackedItem], compression: Compression) -> PlainPage<'a> {
    let content = split_chunks(data, items.to_vec(), compression);
    let plain_length = data.len() as u32;
    PlainPage { kind: PageKind::Packed, compressed: false, plain_length, owner: 0, position: 0, content }
}

pub(crate) fn delta_page(encoded: Vec<u8>) -> PlainPage<'static> {
    let plain_length = encoded.len() as u32;
    let content = PageContent::Body(encoded);
    PlainPage { kind: PageKind::DeltaList, compressed: false, plain_length, owner: 0, position: 0, content }
}

/// Divides data into chunks and compresses those that benefit.
fn split_chunks(data: &[u8], items: Vec<PackedItem>, compression: Compression) -> PageContent<'_> {
    debug_assert!(!data.is_empty() && data.len() <= MAX_DATA);
    let chunk_log2 = compression.chunk_log2();
    let size = 1 << chunk_log2;
    let count = data.len().div_ceil(size);
    let raw_blocks = data_blocks(data.len(), count, items.len());
    let compressed = |effort: Effort| {
        // A chunk that shrinks by less than a sixteenth is not worth decompressing on every read.
        let smaller = |chunk: &[u8]| compress(chunk, chunk.len() - chunk.len() / 16, effort);
        let chunks: Vec<(Cow<'_, [u8]>, bool)> = data.chunks(size).map(|chunk| choose(chunk, smaller(chunk))).collect();
        let stored = chunks.iter().map(|(bytes, _)| bytes.len()).sum();
        (data_blocks(stored, count, items.len()), chunks)
    };
    if compression > Compression::Off && raw_blocks > 1 {
        if data.len() <= 2 * BLOCK as usize {
            // Pages of small overwrites take at least one block: if fast compression reaches one
            // block, no other is better.
            let (blocks, chunks) = compressed(Effort::Fast);
            if blocks == 1 {
                return PageContent::Chunks { chunk_log2, chunks, items };
            }
        }
        if let Some(effort) = probe(data, compression) {
            let (blocks, chunks) = compressed(effort);
            if blocks < raw_blocks {
                return PageContent::Chunks { chunk_log2, chunks, items };
            }
        }
    }
    let chunks = data.chunks(size).map(|chunk| (Cow::Borrowed(chunk), true)).collect();
    PageContent::Chunks { chunk_log2, chunks, items }
}

fn choose(chunk: &[u8], smaller: Option<Vec<u8>>) -> (Cow<'_, [u8]>, bool) {
    match smaller {
        Some(bytes) if bytes.len() < chunk.len() => (Cow::Owned(bytes), false),
        _ => (Cow::Borrowed(chunk), true),
    }
}

/// Sample size in bytes that decides whether compression can pay: a tenth of the time of a chunk,
/// and enough for zstd to find repetitions.
const PROBE: usize = 4096;

#[derive(Clone, Copy)]
enum Effort {
    /// zstd's fastest regular level. Source text in chunks of 16 KiB here: 4.74 fold at 400 MB/s
    /// (level 3: 4.93 at 342, level -3: 3.56 at 495).
    Regular,
    /// Without entropy coding of literals, for data that shrinks by repetitions only. Half noise,
    /// half zeros here: 1.98 fold at 2,070 MB/s (level 1: as small, at 789).
    Fast,
    Best,
}

impl Effort {
    const COUNT: usize = Effort::Best as usize + 1;

    fn level(self) -> i32 {
        match self {
            Effort::Regular => 1,
            Effort::Fast => -3,
            Effort::Best => 9,
        }
    }
}

thread_local! {
    // Contexts take some hundred KiB and are expensive to set up: one of each per thread that seals
    // or opens.
    static COMPRESSORS: RefCell<[Option<Compressor<'static>>; Effort::COUNT]> =
        const { RefCell::new([const { None }; Effort::COUNT]) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Returns the compressed bytes if there are at most `most`. `None` otherwise, and on failure,
/// because compression is optional.
fn compress(data: &[u8], most: usize, effort: Effort) -> Option<Vec<u8>> {
    COMPRESSORS.with_borrow_mut(|slots| {
        let slot = &mut slots[effort as usize];
        if slot.is_none() {
            *slot = Compressor::new(effort.level()).ok();
        }
        // zstd stops when the buffer is full, so no time is spent on the rest of incompressible
        // data.
        let mut out = Vec::with_capacity(most);
        slot.as_mut()?.compress_to_buffer(data, &mut out).ok()?;
        (out.len() <= most).then_some(out)
    })
}

/// First magic number of the sixteen of skippable frames.
const SKIPPABLE: u32 = 0x184D_2A50;

/// Decompresses one frame, which must fill `out` exactly, with no bytes before or after it.
/// Allocates nothing based on the data.
fn decompress(data: &[u8], out: &mut [u8]) -> io::Result<()> {
    // The library accepts concatenated frames and ignores skippable ones.
    let magic = data.first_chunk::<4>().map_or(SKIPPABLE, |magic| u32::from_le_bytes(*magic));
    if magic & !15 == SKIPPABLE || !matches!(find_frame_compressed_size(data), Ok(length) if length == data.len()) {
        return Err(io::Error::other("not one frame"));
    }
    DECOMPRESSOR.with_borrow_mut(|slot| {
        let decompressor = match slot {
            Some(decompressor) => decompressor,
            None => slot.insert(Decompressor::new()?),
        };
        let length = decompressor.decompress_to_buffer(data, out)?;
        if length == out.len() { Ok(()) } else { Err(io::Error::other("wrong length")) }
    })
}

/// Chooses the effort from samples; `None` when neither the middle nor the head shrinks. The head
/// alone misleads: compressed archives and media start with a header that shrinks, or the other way
/// round.
fn probe(data: &[u8], compression: Compression) -> Option<Effort> {
    let size = |sample: &[u8], effort| compress(sample, sample.len() - 1, effort).map(|smaller| smaller.len());
    let strongest = match compression {
        Compression::Off => return None,
        Compression::Fast => Effort::Fast,
        Compression::Default => Effort::Regular,
        Compression::Best => Effort::Best,
    };
    if data.len() <= 2 * PROBE {
        return Some(strongest); // trying is as cheap as probing
    }
    let middle = (data.len() - PROBE) / 2;
    let sample = &data[middle..middle + PROBE];
    let Some(regular) = size(sample, Effort::Regular) else {
        return size(&data[..PROBE], Effort::Regular).map(|_| strongest);
    };
    if compression != Compression::Default {
        return Some(strongest);
    }
    let fast = size(sample, Effort::Fast).unwrap_or(PROBE);
    Some(if fast <= regular + regular / 16 { Effort::Fast } else { Effort::Regular })
}

#[cfg(test)]
mod tests;
