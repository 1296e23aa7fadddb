//! Finds every authentic page of an archive's file by its prologue, without any root or record.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};
use crate::format::page::Prologue;
use crate::format::{BLOCK, Pointer, RESERVED, Run};
use crate::frame::{OpenedPage, PageCipher, claimed_tag};
use crate::pager::Pager;
use crate::storage::Storage;

/// Size of one read, in bytes.
const WINDOW: u64 = 1 << 20;

/// Result of a scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScanSummary {
    /// Blocks that the host could not read.
    pub(crate) unreadable: u64,
}

/// Calls `page` for every address with a block that opens as a prologue for that address. Every
/// block is tried, also within pages: a page that was partly overwritten may contain a newer one.
/// Holes are skipped. `progress` is called with the bytes done and the length of the file; its
/// error ends the scan.
pub(crate) fn scan(
    storage: &dyn Storage,
    cipher: &PageCipher,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    page: &mut dyn FnMut(Run, &Prologue) -> Result<()>,
) -> Result<ScanSummary> {
    let length = storage.len()? / BLOCK * BLOCK;
    let mut scanned = ScanSummary::default();
    let mut at = 0;
    while at < length {
        let Some(data) = storage.next_data(at)? else { break };
        at = data.start / BLOCK * BLOCK;
        let end = data.end.next_multiple_of(BLOCK).min(length);
        while at < end {
            let count = (end - at).min(WINDOW);
            scan_window(storage, cipher, at, count, &mut scanned, page)?;
            at += count;
            progress(at, length)?;
        }
    }
    progress(length, length)?;
    Ok(scanned)
}

fn scan_window(
    storage: &dyn Storage,
    cipher: &PageCipher,
    at: u64,
    count: u64,
    scanned: &mut ScanSummary,
    page: &mut dyn FnMut(Run, &Prologue) -> Result<()>,
) -> Result<()> {
    let mut bytes = vec![0; count as usize];
    if let Err(error) = storage.read_at(at, &mut bytes) {
        if !matches!(error, Error::Damaged(_) | Error::Io { .. }) {
            return Err(error);
        }
        if count == BLOCK {
            tracing::warn!(%error, block = at / BLOCK, "a block cannot be read");
            scanned.unreadable += 1;
            return Ok(());
        }
        // A bad sector must not hide its neighbours.
        for block in 0..count / BLOCK {
            scan_window(storage, cipher, at + block * BLOCK, BLOCK, scanned, page)?;
        }
        return Ok(());
    }
    for (index, block) in bytes.chunks_exact(BLOCK as usize).enumerate() {
        let address = at / BLOCK + index as u64;
        if RESERVED.iter().any(|&(start, end)| (start..end).contains(&address)) {
            continue;
        }
        match cipher.open_prologue(address, block) {
            Ok(prologue) => page(Run::new(address, prologue.blocks.into()), &prologue)?,
            Err(Error::Damaged(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Opens the whole page of a prologue, and returns it with its pointer.
pub(crate) fn open_found(pager: &Pager, run: Run) -> Result<(Pointer, OpenedPage)> {
    if !run.is_page_space(u64::MAX) {
        return Err(Error::damaged(format!("page lies in header or ring: block={}", run.address)));
    }
    let mut bytes = vec![0; run.bytes() as usize];
    pager.storage().read_at(run.offset(), &mut bytes)?;
    let prologue = pager.cipher().open_prologue(run.address, &bytes)?;
    let short = || Error::damaged(format!("page ends early: block={}", run.address));
    let tag = claimed_tag(&prologue, &bytes).ok_or_else(short)?;
    let pointer = Pointer { run, generation: prologue.generation, tag };
    let opened = pager.cipher().open(&pointer, bytes)?;
    Ok((pointer, opened))
}

/// Maps I/O errors to damage: an unreadable sector is as lost as an altered one.
pub(super) fn as_damage(error: Error) -> Error {
    match error {
        Error::Io { context, source } => Error::damaged(format!("{context}: {source}")),
        error => error,
    }
}

/// Storage of a remote archive: aborts the rescue on the first transport error, which it remembers,
/// instead of treating it as damage.
pub(super) struct StrictStorage {
    storage: Arc<dyn Storage>,
    failed: OnceLock<Error>,
}

impl StrictStorage {
    pub(super) fn of(storage: Arc<dyn Storage>) -> StrictStorage {
        StrictStorage { storage, failed: OnceLock::new() }
    }

    /// Returns the first failed request, regardless of later results.
    ///
    /// # Errors
    /// That of the first failed request.
    pub(super) fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Records an I/O error and returns `Stale`, so that it is not treated as local damage.
    fn record_failure<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match error {
            Error::Io { .. } => {
                let _ = self.failed.set(error);
                Error::Stale
            }
            error => error,
        })
    }
}

impl Storage for StrictStorage {
    fn len(&self) -> Result<u64> {
        self.record_failure(self.storage.len())
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.check().map_err(|_| Error::Stale)?;
        self.record_failure(self.storage.read_at(offset, out))
    }

    fn will_need(&self, offset: u64, length: u64) {
        self.storage.will_need(offset, length);
    }

    fn write_at(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        Err(only_read())
    }

    fn allocate(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(only_read())
    }

    fn punch(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(only_read())
    }

    fn set_len(&self, _length: u64) -> Result<()> {
        Err(only_read())
    }

    fn barrier(&self) -> Result<()> {
        Err(only_read())
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        self.storage.evict(offset, length)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.record_failure(self.storage.next_data(offset))
    }

    fn read_only(&self) -> bool {
        true
    }
}

fn only_read() -> Error {
    Error::ReadOnly("a rescue only reads".into())
}
