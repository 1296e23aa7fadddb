//! Seals frames into pages and opens pages into frames: cells compressed, prologue and body bound to their place.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use zstd::bulk::{Compressor, Decompressor};

use crate::crypto::SecretKey;
use crate::crypto::aead::{NONCE, TAG, XaesKey};
use crate::crypto::kdf::hkdf;
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::page::{CellTable, PROLOGUE, PackedItem, PageKind, Prologue, encode_data_body};
use crate::format::record::RECORD_PLAIN;
use crate::format::{
    ArchiveId, BLOCK, FORMAT_VERSION, Generation, MAX_DATA, NODE_BLOCKS, NODE_CAPACITY, PAGE_OVERHEAD, Pointer, Run,
    Tag,
};

/// log2 of the cell size; decided by measurement (bench/README.md).
pub(crate) const CELL_LOG2: u8 = 15;

const CELL: usize = 1 << CELL_LOG2;

/// Bytes that tell whether compression can pay. A tenth of the time of a cell, and enough for zstd to find repetitions.
const PROBE: usize = 4096;

/// How hard a page is compressed.
#[derive(Clone, Copy)]
enum Effort {
    /// zstd's fastest regular level. Source text here: 4.74 fold at 400 MB/s (level 3: 4.93 at 342, level -3: 3.56 at 495).
    Regular,
    /// Without entropy coding of literals, for data whose repetitions are all there is to gain. Half noise, half zeros here: 1.98 fold at
    /// 2,070 MB/s (level 1: as small, at 789).
    Fast,
}

impl Effort {
    fn level(self) -> i32 {
        match self {
            Effort::Regular => 1,
            Effort::Fast => -3,
        }
    }
}

/// First byte of the sealed body: nonce, sealed prologue, its tag.
const BODY: usize = NONCE + PROLOGUE + TAG;

/// Seals and opens the pages and commit records of one archive.
pub(crate) struct PageCipher {
    pages: XaesKey,
    records: XaesKey,
    archive: ArchiveId,
    environment: Arc<dyn Environment>,
}

/// A frame before sealing: its body without padding and what the prologue will say of it.
pub(crate) struct PlainPage {
    pub kind: PageKind,
    pub compressed: bool,
    pub plain_length: u32,
    pub owner: u64,
    pub position: u64,
    pub body: Vec<u8>,
}

impl PlainPage {
    /// Blocks that the sealed page takes.
    pub(crate) fn blocks(&self) -> u64 {
        match (self.kind, self.compressed) {
            // Specification 6.1: a node page is raw in 4 blocks or compressed in fewer, however small the node is.
            (PageKind::Node, false) => NODE_BLOCKS,
            _ => blocks_of(self.body.len()),
        }
    }
}

fn blocks_of(body: usize) -> u64 {
    ((body + PAGE_OVERHEAD) as u64).div_ceil(BLOCK)
}

/// A page ready to be written at `run`.
pub(crate) struct SealedPage {
    pub pointer: Pointer,
    pub bytes: Vec<u8>,
}

/// An opened and authenticated page.
pub(crate) struct OpenedPage {
    pub prologue: Prologue,
    /// The page as it was read, opened in place, or a decompressed node.
    buffer: Vec<u8>,
    body: Range<usize>,
}

impl OpenedPage {
    /// The body without padding and, for nodes, decompressed.
    pub(crate) fn body(&self) -> &[u8] {
        &self.buffer[self.body.clone()]
    }

    /// The body in a vector of its own; moves it to the front of the buffer.
    pub(crate) fn into_body(mut self) -> Vec<u8> {
        self.buffer.truncate(self.body.end);
        self.buffer.drain(..self.body.start);
        self.buffer
    }
}

thread_local! {
    // Contexts are some hundred KiB and dear to set up: one of each for every thread that seals or opens.
    static COMPRESSORS: RefCell<[Option<Compressor<'static>>; 2]> = const { RefCell::new([None, None]) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// The compressed bytes when they are at most `most`, else None: compression is an economy, so its failure is no error.
fn compress(data: &[u8], most: usize, effort: Effort) -> Option<Vec<u8>> {
    COMPRESSORS.with_borrow_mut(|slots| {
        let slot = &mut slots[effort as usize];
        if slot.is_none() {
            *slot = Compressor::new(effort.level()).ok();
        }
        // zstd stops when the buffer is full, so the rest of what does not shrink is not tried.
        let mut out = Vec::with_capacity(most);
        slot.as_mut()?.compress_to_buffer(data, &mut out).ok()?;
        (out.len() <= most).then_some(out)
    })
}

/// Decompresses what must give exactly `length` bytes; never allocates more.
fn decompress(data: &[u8], length: usize) -> io::Result<Vec<u8>> {
    DECOMPRESSOR.with_borrow_mut(|slot| {
        let decompressor = match slot {
            Some(decompressor) => decompressor,
            None => slot.insert(Decompressor::new()?),
        };
        let mut out = Vec::with_capacity(length);
        decompressor.decompress_to_buffer(data, &mut out)?;
        if out.len() == length { Ok(out) } else { Err(io::Error::other("wrong length")) }
    })
}

/// A node's page: raw, or one zstd frame when that saves a block.
pub(crate) fn node_page(tree: u8, level: u8, encoded: Vec<u8>) -> PlainPage {
    let plain_length = encoded.len() as u32;
    let most = NODE_CAPACITY - BLOCK as usize;
    let (compressed, body) = match compress(&encoded, most, Effort::Regular) {
        Some(smaller) => (true, smaller),
        None => (false, encoded),
    };
    PlainPage { kind: PageKind::Node, compressed, plain_length, owner: tree.into(), position: level.into(), body }
}

/// A data page of `data` (1..=128 KiB) at `offset` of inode `ino`, compressed cell by cell when `compress` and a probe says that it pays
/// (at least one block is saved).
pub(crate) fn data_page(ino: u64, offset: u64, data: &[u8], compress: bool) -> PlainPage {
    let body = data_body(data, &[], compress);
    let plain_length = data.len() as u32;
    PlainPage { kind: PageKind::Data, compressed: false, plain_length, owner: ino, position: offset, body }
}

/// A packed page; `items` name the parts of `data`.
pub(crate) fn packed_page(data: &[u8], items: &[PackedItem], compress: bool) -> PlainPage {
    let body = data_body(data, items, compress);
    let plain_length = data.len() as u32;
    PlainPage { kind: PageKind::Packed, compressed: false, plain_length, owner: 0, position: 0, body }
}

/// A delta list page.
pub(crate) fn delta_page(encoded: Vec<u8>) -> PlainPage {
    let plain_length = encoded.len() as u32;
    PlainPage { kind: PageKind::DeltaList, compressed: false, plain_length, owner: 0, position: 0, body: encoded }
}

/// Bytes of a data body whose cells take `stored` bytes.
fn data_body_length(stored: usize, cells: usize, items: usize) -> usize {
    8 + 4 * cells + 24 * items + stored
}

fn data_body(data: &[u8], items: &[PackedItem], compress_cells: bool) -> Vec<u8> {
    debug_assert!(!data.is_empty() && data.len() <= MAX_DATA);
    let count = data.len().div_ceil(CELL);
    let raw_blocks = blocks_of(data_body_length(data.len(), count, items.len()));
    if compress_cells
        && raw_blocks > 1
        && let Some(effort) = probe(data)
    {
        // A cell that shrinks by less than a sixteenth is not worth decompressing at each read.
        let smaller: Vec<_> =
            data.chunks(CELL).map(|cell| compress(cell, cell.len() - cell.len() / 16, effort)).collect();
        let cells: Vec<(&[u8], bool)> = data.chunks(CELL).zip(&smaller).map(choose).collect();
        let stored = cells.iter().map(|(bytes, _)| bytes.len()).sum();
        if blocks_of(data_body_length(stored, count, items.len())) < raw_blocks {
            return encode_data_body(CELL_LOG2, &cells, items);
        }
    }
    let cells: Vec<(&[u8], bool)> = data.chunks(CELL).map(|cell| (cell, true)).collect();
    encode_data_body(CELL_LOG2, &cells, items)
}

fn choose<'a>((cell, smaller): (&'a [u8], &'a Option<Vec<u8>>)) -> (&'a [u8], bool) {
    match smaller {
        Some(bytes) if bytes.len() < cell.len() => (bytes, false),
        _ => (cell, true),
    }
}

/// How hard to try: not at all when no sample from the middle or the head shrinks. The head alone misleads: archives of compressed files and
/// media begin with a header that shrinks, or the other way round.
fn probe(data: &[u8]) -> Option<Effort> {
    let size = |sample: &[u8], effort| compress(sample, sample.len() - 1, effort).map(|smaller| smaller.len());
    if data.len() <= 2 * PROBE {
        return Some(Effort::Regular); // trying is as cheap as probing
    }
    let middle = (data.len() - PROBE) / 2;
    let sample = &data[middle..middle + PROBE];
    let Some(regular) = size(sample, Effort::Regular) else {
        return size(&data[..PROBE], Effort::Regular).map(|_| Effort::Regular);
    };
    let fast = size(sample, Effort::Fast).unwrap_or(PROBE);
    Some(if fast <= regular + regular / 16 { Effort::Fast } else { Effort::Regular })
}

/// Upper bound of the blocks of a data page of `length` plain bytes, stored raw.
#[cfg(test)]
pub(crate) fn worst_case_blocks(length: usize) -> u64 {
    blocks_of(data_body_length(length, length.div_ceil(CELL), 0))
}

/// Decompresses one cell of an opened data body.
pub(crate) fn read_cell(body: &[u8], table: &CellTable, cell: usize) -> Result<Vec<u8>> {
    let missing = || Error::damaged(format!("data page has no cell {cell}"));
    let entry = table.cells.get(cell).ok_or_else(missing)?;
    let stored = body.get(entry.stored.clone()).ok_or_else(missing)?;
    let length = entry.plain_length as usize;
    if entry.raw {
        return if stored.len() == length { Ok(stored.to_vec()) } else { Err(missing()) };
    }
    decompress(stored, length).map_err(|error| Error::damaged(format!("cell {cell} does not decompress: {error}")))
}

/// `lockbox/v1/prologue` || version u32 || archive id || block address u64.
fn prologue_aad(archive: &ArchiveId, address: u64) -> [u8; 47] {
    let mut aad = [0; 47];
    aad[..19].copy_from_slice(b"lockbox/v1/prologue");
    put_place(&mut aad[19..], archive, address);
    aad
}

/// `lockbox/v1/body` || version u32 || archive id || block address u64 || prologue plaintext (48).
fn body_aad(archive: &ArchiveId, address: u64, prologue: &[u8; PROLOGUE]) -> [u8; 91] {
    let mut aad = [0; 91];
    aad[..15].copy_from_slice(b"lockbox/v1/body");
    put_place(&mut aad[15..43], archive, address);
    aad[43..].copy_from_slice(prologue);
    aad
}

/// `lockbox/v1/commit` || version u32 || archive id || slot index u8.
fn record_aad(archive: &ArchiveId, slot: u64) -> [u8; 38] {
    let mut aad = [0; 38];
    aad[..17].copy_from_slice(b"lockbox/v1/commit");
    aad[17..21].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    aad[21..37].copy_from_slice(archive);
    aad[37] = slot as u8; // below 64
    aad
}

/// version u32 || archive id || block address u64.
fn put_place(out: &mut [u8], archive: &ArchiveId, address: u64) {
    out[..4].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    out[4..20].copy_from_slice(archive);
    out[20..].copy_from_slice(&address.to_le_bytes());
}

/// Copies a fixed field out of a buffer that is known to hold it.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

impl PageCipher {
    /// `volume_key` is only used to derive the page and commit keys.
    pub(crate) fn new(volume_key: &SecretKey, archive: ArchiveId, environment: Arc<dyn Environment>) -> PageCipher {
        PageCipher {
            pages: XaesKey::new(&hkdf(volume_key, &archive, "lockbox/v1/page")),
            records: XaesKey::new(&hkdf(volume_key, &archive, "lockbox/v1/commit")),
            archive,
            environment,
        }
    }

    fn nonce(&self) -> Result<[u8; NONCE]> {
        let mut nonce = [0; NONCE];
        self.environment.fill_random(&mut nonce)?;
        Ok(nonce)
    }

    /// Seals `page` for the blocks `run` (exactly `page.blocks()` long) under a fresh random nonce.
    ///
    /// # Errors
    /// `Io` when there is no randomness.
    pub(crate) fn seal(&self, page: &PlainPage, run: Run, generation: Generation) -> Result<SealedPage> {
        if run.blocks != page.blocks() {
            return Err(Error::invalid(format!("page of {} blocks sealed for {}", page.blocks(), run.blocks)));
        }
        let prologue = Prologue {
            kind: page.kind,
            compressed: page.compressed,
            blocks: run.blocks as u16,
            stored_length: page.body.len() as u32,
            plain_length: page.plain_length,
            generation,
            owner: page.owner,
            position: page.position,
        };
        let prologue = prologue.encode();
        let nonce = self.nonce()?;
        let key = self.pages.page_key(&nonce);

        let length = run.bytes() as usize;
        let mut bytes = Vec::with_capacity(length);
        bytes.extend_from_slice(&nonce);
        bytes.extend_from_slice(&prologue);
        let tag = key.seal_prologue(&prologue_aad(&self.archive, run.address), &mut bytes[NONCE..]);
        bytes.extend_from_slice(&tag);
        bytes.extend_from_slice(&page.body);
        bytes.resize(length - TAG, 0); // never shrinks: `blocks()` counts body and overhead
        let tag = key.seal_body(&body_aad(&self.archive, run.address, &prologue), &mut bytes[BODY..]);
        bytes.extend_from_slice(&tag);
        Ok(SealedPage { pointer: Pointer { run, generation, tag }, bytes })
    }

    /// Opens a whole page read from `pointer.run` and checks it against the pointer.
    ///
    /// # Errors
    /// `Damaged("page failed authentication: block=.. generation=..")`, or naming the field that differs from the pointer.
    pub(crate) fn open(&self, pointer: &Pointer, mut bytes: Vec<u8>) -> Result<OpenedPage> {
        let Run { address, blocks } = pointer.run;
        let place = format_args!("block={address} generation={}", pointer.generation.0);
        let length = bytes.len();
        if length as u64 != pointer.run.bytes() || length <= PAGE_OVERHEAD {
            return Err(Error::damaged(format!("page has {length} bytes instead of {blocks} blocks: {place}")));
        }
        let failed = |_| Error::damaged(format!("page failed authentication: {place}"));
        let key = self.pages.page_key(&field(&bytes, 0));
        let mut plain: [u8; PROLOGUE] = field(&bytes, NONCE);
        let tag = field(&bytes, NONCE + PROLOGUE);
        key.open_prologue(&prologue_aad(&self.archive, address), &mut plain, &tag).map_err(failed)?;
        let prologue = Prologue::decode(&plain)?;
        if u64::from(prologue.blocks) != blocks {
            return Err(Error::damaged(format!("page has {} blocks, not {blocks}: {place}", prologue.blocks)));
        }
        if prologue.generation != pointer.generation {
            return Err(Error::damaged(format!("page is of generation {}: {place}", prologue.generation.0)));
        }
        let tag: Tag = field(&bytes, length - TAG);
        if tag != pointer.tag {
            return Err(Error::damaged(format!("page has another tag than its pointer: {place}")));
        }
        let body = &mut bytes[BODY..length - TAG];
        key.open_body(&body_aad(&self.archive, address, &plain), body, &tag).map_err(failed)?;
        let (stored, padding) = body.split_at_checked(prologue.stored_length as usize).ok_or_else(|| {
            Error::damaged(format!("stored length {} exceeds the page: {place}", prologue.stored_length))
        })?;
        if padding.iter().any(|&byte| byte != 0) {
            return Err(Error::damaged(format!("page has padding that is not zero: {place}")));
        }
        if !prologue.compressed {
            let body = BODY..BODY + stored.len();
            return Ok(OpenedPage { prologue, buffer: bytes, body });
        }
        let plain_length = prologue.plain_length as usize;
        if plain_length > NODE_CAPACITY {
            return Err(Error::damaged(format!("node of {plain_length} bytes: {place}")));
        }
        let buffer = decompress(stored, plain_length)
            .map_err(|error| Error::damaged(format!("node does not decompress: {error}: {place}")))?;
        Ok(OpenedPage { prologue, body: 0..buffer.len(), buffer })
    }

    /// Opens only the prologue of a page that may start at `address`; for scanners. `first_block` has at least 88 bytes.
    pub(crate) fn open_prologue(&self, address: u64, first_block: &[u8]) -> Result<Prologue> {
        if first_block.len() < BODY {
            return Err(Error::damaged(format!("no room for a page: block={address}")));
        }
        let key = self.pages.page_key(&field(first_block, 0));
        let mut plain: [u8; PROLOGUE] = field(first_block, NONCE);
        let tag = field(first_block, NONCE + PROLOGUE);
        key.open_prologue(&prologue_aad(&self.archive, address), &mut plain, &tag)?;
        Prologue::decode(&plain)
    }

    /// Seals a record's 4,056 plain bytes for ring slot `slot`; returns the 4,096 bytes and the tag.
    pub(crate) fn seal_record(&self, slot: u64, plain: Vec<u8>) -> Result<(Vec<u8>, Tag)> {
        if plain.len() != RECORD_PLAIN {
            return Err(Error::invalid(format!("commit record of {} bytes", plain.len())));
        }
        let nonce = self.nonce()?;
        let mut bytes = Vec::with_capacity(BLOCK as usize);
        bytes.extend_from_slice(&nonce);
        bytes.extend_from_slice(&plain);
        let tag = self.records.seal(&nonce, &record_aad(&self.archive, slot), &mut bytes[NONCE..]);
        bytes.extend_from_slice(&tag);
        Ok((bytes, tag))
    }

    /// Opens the content of ring slot `slot`; None when it is not authentic (random, torn, of another place).
    pub(crate) fn open_record(&self, slot: u64, bytes: &[u8]) -> Option<(Vec<u8>, Tag)> {
        if bytes.len() != BLOCK as usize {
            return None;
        }
        let tag = field(bytes, NONCE + RECORD_PLAIN);
        let mut plain = bytes[NONCE..NONCE + RECORD_PLAIN].to_vec();
        self.records.open(&field(bytes, 0), &record_aad(&self.archive, slot), &mut plain, &tag).ok()?;
        Some((plain, tag))
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod vectors;
