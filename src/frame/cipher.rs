//! Page encryption: seals and opens prologue, body or head, and chunks, each bound to its location
//! (specification 4.2 and 5). Log entries likewise, head and body bound to each other (9.4).

use std::ops::Range;
use std::sync::Arc;

use super::{PageContent, PlainPage, decompress};
use crate::crypto::SecretKey;
use crate::crypto::aead::{NONCE, PageKey, TAG, XaesKey};
use crate::crypto::kdf::hkdf;
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::log::{ENTRY_HEAD, EntryHead, entry_capacity};
use crate::format::page::{
    Chunk, ChunkTable, PROLOGUE, PackedItem, PageKind, Prologue, decode_chunk_table, encode_head,
};
use crate::format::record::RECORD_PLAIN;
use crate::format::{
    ArchiveId, BLOCK, FORMAT_VERSION, Generation, LOG, NODE_CAPACITY, PAGE_OVERHEAD, Pointer, Run, Tag, array_at,
};

/// Offset of the sealed body or head: after nonce, sealed prologue and its tag.
const MAIN: usize = NONCE + PROLOGUE + TAG;

const NOT_AUTHENTIC: &str = "page failed authentication";
pub(crate) const WRONG_KIND: &str = "page of another kind";

/// Seals and opens the pages and commit records of one archive.
pub(crate) struct PageCipher {
    pages: XaesKey,
    records: XaesKey,
    /// Key of the log; `None` for an archive without a log.
    log: Option<XaesKey>,
    archive: ArchiveId,
    environment: Arc<dyn Environment>,
}

pub(crate) struct SealedPage {
    pub pointer: Pointer,
    pub bytes: Vec<u8>,
}

pub(crate) struct OpenedPage {
    pub prologue: Prologue,
    /// Page as read and decrypted in place, or a decompressed node.
    buffer: Vec<u8>,
    body: Range<usize>,
    table: Option<ChunkTable>,
}

impl OpenedPage {
    /// Returns the body without padding, decompressed for nodes; for a data page all chunks as
    /// stored.
    pub(crate) fn body(&self) -> &[u8] {
        &self.buffer[self.body.clone()]
    }

    pub(crate) fn into_body(mut self) -> Vec<u8> {
        self.buffer.truncate(self.body.end);
        self.buffer.drain(..self.body.start);
        self.buffer
    }

    /// Returns the head of a data page. Errors: `Damaged` for a page of another kind.
    pub(crate) fn table(&self) -> Result<&ChunkTable> {
        self.table.as_ref().ok_or_else(|| Error::damaged("page holds no file data"))
    }

    pub(crate) fn read_chunk(&self, chunk: usize) -> Result<Vec<u8>> {
        let missing = || Error::damaged(format!("data page has no chunk {chunk}"));
        let entry = self.table()?.chunks.get(chunk).ok_or_else(missing)?;
        let stored = entry.at as usize..(entry.at + entry.stored) as usize;
        let mut plain = vec![0; entry.plain_length as usize];
        plain_chunk(entry, self.body().get(stored).ok_or_else(missing)?, &mut plain)?;
        Ok(plain)
    }
}

/// Decompresses the decrypted bytes of a chunk into `out`, which has the chunk's plain length.
pub(crate) fn plain_chunk(chunk: &Chunk, stored: &[u8], out: &mut [u8]) -> Result<()> {
    if out.len() != chunk.plain_length as usize || stored.len() != chunk.stored as usize {
        return Err(Error::damaged(format!("chunk has another length: stored={} plain={}", stored.len(), out.len())));
    }
    if chunk.raw {
        out.copy_from_slice(stored);
        return Ok(());
    }
    decompress(stored, out).map_err(|error| Error::damaged(format!("a chunk does not decompress: {error}")))
}

/// Authenticated head of a data page, needed to open its chunks. The pointer's tag binds it to the
/// page, and it contains the tag of every chunk.
pub(crate) struct DataHead {
    nonce: [u8; NONCE],
    prologue: [u8; PROLOGUE],
    /// Chunk table without packed items, which file reads do not need.
    pub(crate) table: ChunkTable,
    /// Offset of the first chunk within the page.
    first: usize,
}

impl DataHead {
    /// Returns the byte range of `chunks` (not empty) within the page.
    pub(crate) fn stored_range(&self, chunks: &Range<usize>) -> Range<usize> {
        let (start, last) = (self.table.chunks[chunks.start], self.table.chunks[chunks.end - 1]);
        self.first + start.at as usize..self.first + (last.at + last.stored) as usize
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of::<DataHead>() + self.table.chunks.len() * size_of::<Chunk>()
    }
}

/// Start of a page: the decrypted prologue, verified against the pointer.
pub(crate) struct PageStart {
    pub(crate) prologue: Prologue,
    plain: [u8; PROLOGUE],
    key: PageKey,
}

impl PageStart {
    /// Returns the offset after the body or head and its tag.
    pub(crate) fn main_end(&self) -> usize {
        MAIN + self.prologue.main_length() + TAG
    }
}

/// Associated data: label || version u32 || archive id || block address u64 || prologue plaintext
/// (48, except for the prologue itself) || chunk u8 (for chunks). Of a log entry: the same up to
/// the address || head plaintext (64, for the body).
struct Aad {
    bytes: [u8; 111],
    length: usize,
}

impl Aad {
    fn new(label: &[u8], archive: &ArchiveId, address: u64) -> Aad {
        let mut aad = Aad { bytes: [0; 111], length: 0 };
        aad.put(label);
        aad.put(&FORMAT_VERSION.to_le_bytes());
        aad.put(archive);
        aad.put(&address.to_le_bytes());
        aad
    }

    fn of_prologue(archive: &ArchiveId, address: u64) -> Aad {
        Aad::new(b"lockbox/v1/prologue", archive, address)
    }

    /// Builds the associated data of the message that the pointer's tag authenticates.
    fn of_main(kind: PageKind, archive: &ArchiveId, address: u64, prologue: &[u8; PROLOGUE]) -> Aad {
        let data = matches!(kind, PageKind::Data | PageKind::Packed);
        let mut aad = Aad::new(if data { b"lockbox/v1/head" } else { b"lockbox/v1/body" }, archive, address);
        aad.put(prologue);
        aad
    }

    /// Builds the associated data of chunk 0; `set_chunk` changes the chunk number.
    fn of_chunks(archive: &ArchiveId, address: u64, prologue: &[u8; PROLOGUE]) -> Aad {
        let mut aad = Aad::new(b"lockbox/v1/cell", archive, address);
        aad.put(prologue);
        aad.put(&[0]);
        aad
    }

    fn of_entry_head(archive: &ArchiveId, address: u64) -> Aad {
        Aad::new(b"lockbox/v1/log/head", archive, address)
    }

    fn of_entry_body(archive: &ArchiveId, address: u64, head: &[u8; ENTRY_HEAD]) -> Aad {
        let mut aad = Aad::new(b"lockbox/v1/log/body", archive, address);
        aad.put(head);
        aad
    }

    fn set_chunk(&mut self, chunk: usize) {
        self.bytes[self.length - 1] = chunk as u8; // below 32
    }

    fn put(&mut self, part: &[u8]) {
        self.bytes[self.length..self.length + part.len()].copy_from_slice(part);
        self.length += part.len();
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// Builds `lockbox/v1/commit` || version u32 || archive id || slot index u8.
fn record_aad(archive: &ArchiveId, slot: u64) -> [u8; 38] {
    let mut aad = [0; 38];
    aad[..17].copy_from_slice(b"lockbox/v1/commit");
    aad[17..21].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    aad[21..37].copy_from_slice(archive);
    aad[37] = slot as u8; // below 64
    aad
}

impl PageCipher {
    /// Derives the keys of an archive; `volume_key` is not kept.
    pub(crate) fn new(
        volume_key: &SecretKey,
        archive: ArchiveId,
        has_log: bool,
        environment: Arc<dyn Environment>,
    ) -> PageCipher {
        PageCipher {
            log: has_log.then(|| XaesKey::new(&hkdf(volume_key, &archive, "lockbox/v1/log"))),
            pages: XaesKey::new(&hkdf(volume_key, &archive, "lockbox/v1/page")),
            records: XaesKey::new(&hkdf(volume_key, &archive, "lockbox/v1/commit")),
            archive,
            environment,
        }
    }

    pub(crate) fn without_log(self) -> PageCipher {
        PageCipher { log: None, ..self }
    }

    pub(crate) fn has_log(&self) -> bool {
        self.log.is_some()
    }

    fn nonce(&self) -> Result<[u8; NONCE]> {
        let mut nonce = [0; NONCE];
        self.environment.fill_random(&mut nonce)?;
        Ok(nonce)
    }

    /// Seals `page` for the blocks `run` (exactly `page.blocks()` long) under a new random nonce.
    /// Errors: `Io` when there is no randomness.
    pub(crate) fn seal(&self, page: &PlainPage, run: Run, generation: Generation) -> Result<SealedPage> {
        if run.blocks != page.blocks() {
            return Err(Error::invalid(format!("page of {} blocks sealed for {}", page.blocks(), run.blocks)));
        }
        let prologue = Prologue {
            kind: page.kind,
            compressed: page.compressed,
            blocks: run.blocks as u16,
            stored_length: page.stored_length() as u32,
            plain_length: page.plain_length,
            generation,
            owner: page.owner,
            position: page.position,
        };
        let plain = prologue.encode();
        let nonce = self.nonce()?;
        let key = self.pages.page_key(&nonce);

        let length = run.bytes() as usize;
        let mut bytes = Vec::with_capacity(length);
        bytes.extend_from_slice(&nonce);
        bytes.extend_from_slice(&plain);
        let tag = key.seal_prologue(Aad::of_prologue(&self.archive, run.address).bytes(), &mut bytes[NONCE..]);
        bytes.extend_from_slice(&tag);
        let end = MAIN + prologue.main_length();
        match &page.content {
            PageContent::Body(body) => bytes.extend_from_slice(body),
            PageContent::Chunks { chunk_log2, chunks, items } => {
                bytes.resize(end + TAG, 0); // room for the head, which is sealed last: it names the chunks' tags
                let mut aad = Aad::of_chunks(&self.archive, run.address, &plain);
                let mut entries = Vec::with_capacity(chunks.len());
                for (chunk, (stored, raw)) in chunks.iter().enumerate() {
                    let at = bytes.len();
                    bytes.extend_from_slice(stored);
                    aad.set_chunk(chunk);
                    let tag = key.seal_chunk(chunk, aad.bytes(), &mut bytes[at..]);
                    entries.push((stored.len() as u32, *raw, tag));
                }
                let head = encode_head(*chunk_log2, &entries, items, prologue.main_length());
                bytes[MAIN..end].copy_from_slice(&head);
            }
        }
        if bytes.len() < length {
            bytes.resize(length, 0); // padding of a body, and room for its tag: `blocks()` counts both
        }
        let aad = Aad::of_main(page.kind, &self.archive, run.address, &plain);
        let tag = key.seal_body(aad.bytes(), &mut bytes[MAIN..end]);
        bytes[end..end + TAG].copy_from_slice(&tag);
        Ok(SealedPage { pointer: Pointer { run, generation, tag }, bytes })
    }

    /// Opens the prologue in the first 88 bytes or more of a page and compares it with the pointer.
    /// Errors: `Damaged("page failed authentication: block=.. generation=..")`, or naming the field
    /// that differs from the pointer.
    pub(crate) fn open_start(&self, pointer: &Pointer, bytes: &[u8]) -> Result<PageStart> {
        let Run { address, blocks } = pointer.run;
        let page_start = self.open_start_at(address, bytes, |_| pointer.damaged(NOT_AUTHENTIC))?;
        let prologue = &page_start.prologue;
        if u64::from(prologue.blocks) != blocks {
            return Err(pointer.damaged(format_args!("page has {} blocks, not {blocks}", prologue.blocks)));
        }
        if prologue.generation != pointer.generation {
            return Err(pointer.damaged(format_args!("page is of generation {}", prologue.generation.0)));
        }
        Ok(page_start)
    }

    fn open_start_at(&self, address: u64, bytes: &[u8], failed: impl Fn(Error) -> Error) -> Result<PageStart> {
        if bytes.len() < MAIN {
            return Err(Error::damaged(format!("no room for a page: block={address}")));
        }
        let key = self.pages.page_key(&array_at(bytes, 0));
        let mut plain: [u8; PROLOGUE] = array_at(bytes, NONCE);
        let tag = array_at(bytes, NONCE + PROLOGUE);
        key.open_prologue(Aad::of_prologue(&self.archive, address).bytes(), &mut plain, &tag).map_err(failed)?;
        Ok(PageStart { prologue: Prologue::decode(&plain)?, plain, key })
    }

    /// Opens body or head in place; `bytes` starts with the page and reaches at least to
    /// `page_start.main_end()`.
    fn open_main<'a>(&self, pointer: &Pointer, page_start: &PageStart, bytes: &'a mut [u8]) -> Result<&'a mut [u8]> {
        let end = page_start.main_end() - TAG;
        let tag: Tag = array_at(bytes, end);
        if tag != pointer.tag {
            return Err(pointer.damaged("page has another tag than its pointer"));
        }
        let aad = Aad::of_main(page_start.prologue.kind, &self.archive, pointer.run.address, &page_start.plain);
        let main = &mut bytes[MAIN..end];
        page_start.key.open_body(aad.bytes(), main, &tag).map_err(|_| pointer.damaged(NOT_AUTHENTIC))?;
        Ok(main)
    }

    /// Opens the head of a data page in place; `bytes` holds the page's first
    /// `page_start.main_end()` bytes. Errors: `Damaged` when it fails authentication, the page is
    /// not a data page, or fields are inconsistent.
    pub(crate) fn open_head(&self, pointer: &Pointer, page_start: &PageStart, bytes: &mut [u8]) -> Result<DataHead> {
        if !page_start.prologue.has_chunks() {
            return Err(pointer.damaged(WRONG_KIND));
        }
        let mut table = self.open_table(pointer, page_start, bytes)?;
        table.items = Vec::new();
        let nonce = array_at(bytes, 0);
        Ok(DataHead { nonce, prologue: page_start.plain, table, first: page_start.main_end() })
    }

    /// Returns the items of a packed page, from its first `page_start.main_end()` bytes; empty for
    /// a page of another kind.
    pub(crate) fn open_items(
        &self,
        pointer: &Pointer,
        page_start: &PageStart,
        bytes: &mut [u8],
    ) -> Result<Vec<PackedItem>> {
        Ok(self.open_table(pointer, page_start, bytes)?.items)
    }

    fn open_table(&self, pointer: &Pointer, page_start: &PageStart, bytes: &mut [u8]) -> Result<ChunkTable> {
        if bytes.len() < page_start.main_end() {
            return Err(Error::damaged(format!("data head ends early: block={}", pointer.run.address)));
        }
        let prologue = page_start.prologue;
        let head = self.open_main(pointer, page_start, bytes)?;
        let table = decode_chunk_table(head, prologue.stored_length, prologue.plain_length)?;
        if (prologue.kind == PageKind::Packed) == table.items.is_empty() {
            return Err(Error::damaged(format!("page has items of another kind: block={}", pointer.run.address)));
        }
        Ok(table)
    }

    /// Opens consecutive chunks in place; `bytes` has the range `head.stored_range(chunks)`.
    /// Errors: `Damaged` when one fails authentication; its bytes are then zeroed.
    pub(crate) fn open_chunks(
        &self,
        pointer: &Pointer,
        head: &DataHead,
        chunks: Range<usize>,
        bytes: &mut [u8],
    ) -> Result<()> {
        let key = self.pages.page_key(&head.nonce);
        self.open_chunks_with(&key, pointer, &head.prologue, &head.table, chunks, bytes)
    }

    fn open_chunks_with(
        &self,
        key: &PageKey,
        pointer: &Pointer,
        prologue: &[u8; PROLOGUE],
        table: &ChunkTable,
        chunks: Range<usize>,
        mut bytes: &mut [u8],
    ) -> Result<()> {
        let mut aad = Aad::of_chunks(&self.archive, pointer.run.address, prologue);
        for chunk in chunks {
            let entry = &table.chunks[chunk];
            let Some((stored, rest)) = bytes.split_at_mut_checked(entry.stored as usize) else {
                return Err(Error::damaged(format!("chunk {chunk} ends early: block={}", pointer.run.address)));
            };
            aad.set_chunk(chunk);
            key.open_chunk(chunk, aad.bytes(), stored, &entry.tag).map_err(|_| {
                let (block, generation) = (pointer.run.address, pointer.generation.0);
                Error::damaged(format!("{NOT_AUTHENTIC}: block={block} generation={generation} chunk={chunk}"))
            })?;
            bytes = rest;
        }
        Ok(())
    }

    /// Opens a whole page read from `pointer.run`, including padding and every chunk, and verifies
    /// it against the pointer. Errors: same as [`PageCipher::open_start`].
    pub(crate) fn open(&self, pointer: &Pointer, mut bytes: Vec<u8>) -> Result<OpenedPage> {
        let (length, blocks) = (bytes.len(), pointer.run.blocks);
        if length as u64 != pointer.run.bytes() || length <= PAGE_OVERHEAD {
            return Err(pointer.damaged(format_args!("page has {length} bytes instead of {blocks} blocks")));
        }
        let page_start = self.open_start(pointer, &bytes)?;
        let prologue = page_start.prologue;
        if prologue.has_chunks() {
            let table = self.open_table(pointer, &page_start, &mut bytes)?;
            let first = page_start.main_end();
            let chunks = 0..table.chunks.len();
            self.open_chunks_with(&page_start.key, pointer, &page_start.plain, &table, chunks, &mut bytes[first..])?;
            return Ok(OpenedPage { prologue, buffer: bytes, body: first..length, table: Some(table) });
        }
        let body = self.open_main(pointer, &page_start, &mut bytes)?;
        let (stored, padding) = body.split_at_checked(prologue.stored_length as usize).ok_or_else(|| {
            pointer.damaged(format_args!("stored length {} exceeds the page", prologue.stored_length))
        })?;
        if padding.iter().any(|&byte| byte != 0) {
            return Err(pointer.damaged("page has padding that is not zero"));
        }
        if !prologue.compressed {
            let body = MAIN..MAIN + stored.len();
            return Ok(OpenedPage { prologue, buffer: bytes, body, table: None });
        }
        let plain_length = prologue.plain_length as usize;
        if plain_length > NODE_CAPACITY {
            return Err(pointer.damaged(format_args!("node of {plain_length} bytes")));
        }
        let mut buffer = vec![0; plain_length];
        decompress(stored, &mut buffer)
            .map_err(|error| pointer.damaged(format_args!("node does not decompress: {error}")))?;
        Ok(OpenedPage { prologue, body: 0..buffer.len(), buffer, table: None })
    }

    /// Opens only the prologue of a page that may start at `address`; for scanners. `first_block`
    /// has at least 88 bytes.
    pub(crate) fn open_prologue(&self, address: u64, first_block: &[u8]) -> Result<Prologue> {
        self.open_start_at(address, first_block, |error| error).map(|page_start| page_start.prologue)
    }

    /// Seals a record's 4,056 plain bytes for ring slot `slot`; returns the 4,096 bytes and the
    /// tag.
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

    /// Opens the content of ring slot `slot`; `None` when it is not authentic (random, torn, or
    /// from another location).
    pub(crate) fn open_record(&self, slot: u64, bytes: &[u8]) -> Option<(Vec<u8>, Tag)> {
        if bytes.len() != BLOCK as usize {
            return None;
        }
        let tag = array_at(bytes, NONCE + RECORD_PLAIN);
        let mut plain = bytes[NONCE..NONCE + RECORD_PLAIN].to_vec();
        self.records.open(&array_at(bytes, 0), &record_aad(&self.archive, slot), &mut plain, &tag).ok()?;
        Some((plain, tag))
    }
}

/// Returns the unverified tag that a pointer to the page with this prologue would have; for
/// scanners, which have no pointer.
pub(crate) fn claimed_tag(prologue: &Prologue, bytes: &[u8]) -> Option<Tag> {
    bytes.get(MAIN + prologue.main_length()..)?.first_chunk().copied()
}

/// Offset of the body: after nonce, sealed head and its tag.
const BODY: usize = NONCE + ENTRY_HEAD + TAG;

pub(crate) struct SealedEntry {
    pub(crate) tag: Tag,
    pub(crate) bytes: Vec<u8>,
}

/// Start of an entry: the decrypted head.
pub(crate) struct EntryStart {
    pub(crate) head: EntryHead,
    plain: [u8; ENTRY_HEAD],
    key: PageKey,
}

impl PageCipher {
    fn log_key(&self) -> Result<&XaesKey> {
        self.log.as_ref().ok_or_else(|| Error::invalid("the archive has no log"))
    }

    /// Seals an entry for the blocks from `address` on; `head` has their number and the length of
    /// `body`. Errors: `Io` when there is no randomness, `Invalid` for an archive without a log or
    /// lengths that contradict `head`.
    pub(crate) fn seal_entry(&self, head: &EntryHead, address: u64, body: &[u8]) -> Result<SealedEntry> {
        let room = entry_capacity(head.blocks.into());
        if head.length as usize != body.len() || body.len() > room {
            return Err(Error::invalid(format!("log entry of {} bytes sealed for {} blocks", body.len(), head.blocks)));
        }
        self.seal_entry_parts(&head.encode(), address, body, room)
    }

    /// Seals the given head bytes without validation, and `body` zero-padded to `room` bytes.
    pub(crate) fn seal_entry_parts(
        &self,
        plain: &[u8; ENTRY_HEAD],
        address: u64,
        body: &[u8],
        room: usize,
    ) -> Result<SealedEntry> {
        let nonce = self.nonce()?;
        let key = self.log_key()?.page_key(&nonce);
        let mut bytes = Vec::with_capacity(BODY + room + TAG);
        bytes.extend_from_slice(&nonce);
        bytes.extend_from_slice(plain);
        let tag = key.seal_prologue(Aad::of_entry_head(&self.archive, address).bytes(), &mut bytes[NONCE..]);
        bytes.extend_from_slice(&tag);
        bytes.extend_from_slice(body);
        bytes.resize(BODY + room, 0);
        let tag = key.seal_body(Aad::of_entry_body(&self.archive, address, plain).bytes(), &mut bytes[BODY..]);
        bytes.extend_from_slice(&tag);
        Ok(SealedEntry { tag, bytes })
    }

    /// Opens the head in the first block of an entry; `None` when it is not an entry of this
    /// archive at this address. Errors: `Damaged` for an authentic head that does not decode or
    /// whose entry exceeds the log: only a key holder can have created it.
    pub(crate) fn open_entry_head(&self, address: u64, bytes: &[u8]) -> Result<Option<EntryStart>> {
        let key = self.log_key()?.page_key(&array_at(bytes, 0));
        let mut plain: [u8; ENTRY_HEAD] = array_at(bytes, NONCE);
        let tag = array_at(bytes, NONCE + ENTRY_HEAD);
        if key.open_prologue(Aad::of_entry_head(&self.archive, address).bytes(), &mut plain, &tag).is_err() {
            return Ok(None);
        }
        let head = EntryHead::decode(&plain)?;
        if address + u64::from(head.blocks) > LOG.1 {
            return Err(Error::damaged(format!("log entry reaches beyond the log: block={address}")));
        }
        Ok(Some(EntryStart { head, plain, key }))
    }

    /// Opens the body of an entry from its blocks `bytes`; returns body and tag, or `None` when it
    /// fails authentication. Errors: `Damaged` for non-zero padding.
    pub(crate) fn open_entry_body(
        &self,
        start: &EntryStart,
        address: u64,
        mut bytes: Vec<u8>,
    ) -> Result<Option<(Vec<u8>, Tag)>> {
        let end = BODY + entry_capacity(start.head.blocks.into());
        let tag: Tag = array_at(&bytes, end);
        let aad = Aad::of_entry_body(&self.archive, address, &start.plain);
        if start.key.open_body(aad.bytes(), &mut bytes[BODY..end], &tag).is_err() {
            return Ok(None);
        }
        let stored = BODY + start.head.length as usize;
        if bytes[stored..end].iter().any(|byte| *byte != 0) {
            return Err(Error::damaged(format!("log entry has padding that is not zero: block={address}")));
        }
        bytes.truncate(stored);
        bytes.drain(..BODY);
        Ok(Some((bytes, tag)))
    }
}
