//! zstd compression of cells and nodes: thread-local contexts, effort levels and bounded output.

use std::cell::RefCell;
use std::io;

use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::find_frame_compressed_size;

/// Sample size in bytes that decides whether compression can pay: a tenth of the time of a cell,
/// and enough for zstd to find repetitions.
const PROBE: usize = 4096;

/// Compression effort for a page.
#[derive(Clone, Copy)]
pub(super) enum Effort {
    /// zstd's fastest regular level. Source text here: 4.74 fold at 400 MB/s (level 3: 4.93 at 342,
    /// level -3: 3.56 at 495).
    Regular,
    /// Without entropy coding of literals, for data that shrinks by repetitions only. Half noise,
    /// half zeros here: 1.98 fold at 2,070 MB/s (level 1: as small, at 789).
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
    // Contexts take some hundred KiB and are expensive to set up: one of each per thread that seals
    // or opens.
    static COMPRESSORS: RefCell<[Option<Compressor<'static>>; 2]> = const { RefCell::new([None, None]) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Returns the compressed bytes if there are at most `most`. `None` otherwise, and on failure,
/// because compression is optional.
pub(super) fn compress(data: &[u8], most: usize, effort: Effort) -> Option<Vec<u8>> {
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
pub(super) fn decompress(data: &[u8], out: &mut [u8]) -> io::Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
