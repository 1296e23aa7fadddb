//! zstd on cells and nodes: contexts of each thread, how hard to try, and bounded output.

use std::cell::RefCell;
use std::io;

use zstd::bulk::{Compressor, Decompressor};

/// Bytes that tell whether compression can pay. A tenth of the time of a cell, and enough for zstd to find repetitions.
const PROBE: usize = 4096;

/// How hard a page is compressed.
#[derive(Clone, Copy)]
pub(super) enum Effort {
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

thread_local! {
    // Contexts are some hundred KiB and dear to set up: one of each for every thread that seals or opens.
    static COMPRESSORS: RefCell<[Option<Compressor<'static>>; 2]> = const { RefCell::new([None, None]) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// The compressed bytes when they are at most `most`, else None: compression is an economy, so its failure is no error.
pub(super) fn compress(data: &[u8], most: usize, effort: Effort) -> Option<Vec<u8>> {
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

/// Decompresses what must fill `out` exactly; nothing is allocated from what the data say.
pub(super) fn decompress(data: &[u8], out: &mut [u8]) -> io::Result<()> {
    DECOMPRESSOR.with_borrow_mut(|slot| {
        let decompressor = match slot {
            Some(decompressor) => decompressor,
            None => slot.insert(Decompressor::new()?),
        };
        let length = decompressor.decompress_to_buffer(data, out)?;
        if length == out.len() { Ok(()) } else { Err(io::Error::other("wrong length")) }
    })
}

/// How hard to try: not at all when no sample from the middle or the head shrinks. The head alone misleads: archives of compressed files and
/// media begin with a header that shrinks, or the other way round.
pub(super) fn probe(data: &[u8]) -> Option<Effort> {
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
