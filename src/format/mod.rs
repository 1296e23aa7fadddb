//! Archive format: total decoders and encoders, without I/O. Mirrors `format-spec/format.md`
//! chapter by chapter.
//!
//! Here are fields in little-endian order at fixed offsets of structures of verified length, and a
//! bounds-checked reader for bytes of variable length. Callers of the functions for fixed offsets
//! pass a constant offset into an array of constant size (or a slice of one), so their slice
//! accesses cannot fail and the checks are compiled away.

pub(crate) mod header;
pub(crate) mod ids;
pub(crate) mod log;
pub(crate) mod node;
pub(crate) mod page;
pub(crate) mod record;
pub(crate) mod space;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod values;

pub use ids::*;

use crate::error::{Error, Result};

#[inline]
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

#[inline]
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

#[inline]
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

#[inline]
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// Decodes seconds and nanoseconds, 12 bytes.
#[inline]
fn time_at(bytes: &[u8], at: usize, structure: &'static str) -> Result<Timestamp> {
    let time = Timestamp { seconds: i64::from_le_bytes(array_at(bytes, at)), nanos: u32_at(bytes, at + 8) };
    if time.nanos >= 1_000_000_000 {
        return Err(Error::damaged(format!("{structure} has a time beyond its second: nanoseconds={}", time.nanos)));
    }
    Ok(time)
}

#[inline]
fn put<const N: usize>(out: &mut [u8], at: usize, value: [u8; N]) {
    out[at..at + N].copy_from_slice(&value);
}

#[inline]
fn put_time(out: &mut [u8], at: usize, time: Timestamp) {
    put(out, at, time.seconds.to_le_bytes());
    put(out, at + 8, time.nanos.to_le_bytes());
}

#[inline]
fn check_zero(bytes: &[u8], structure: &'static str) -> Result<()> {
    // No early exit: short runs compile to a few wide comparisons.
    if bytes.iter().fold(0, |all, &byte| all | byte) != 0 {
        return Err(Error::damaged(format!("{structure} has a reserved field that is not zero")));
    }
    Ok(())
}

#[inline]
fn exact_array<'a, const N: usize>(bytes: &'a [u8], structure: &'static str) -> Result<&'a [u8; N]> {
    bytes
        .try_into()
        .map_err(|_| Error::damaged(format!("{structure} has a wrong length: bytes={} want={N}", bytes.len())))
}

#[cold]
fn ends_early(structure: &str) -> Error {
    Error::damaged(format!("{structure} ends early"))
}

/// Reader of little-endian values from a slice. Reading past the end is `Damaged`, never a panic.
struct ByteReader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> ByteReader<'a> {
    fn new(bytes: &'a [u8], what: &'static str) -> Self {
        ByteReader { bytes, what }
    }

    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (head, tail) = self.bytes.split_at_checked(count).ok_or_else(|| ends_early(self.what))?;
        self.bytes = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(array_at(self.take(N)?, 0))
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn skip_zeros(&mut self, count: usize) -> Result<()> {
        if self.take(count)?.iter().any(|&b| b != 0) {
            return Err(Error::damaged(format!("{} has a reserved field that is not zero", self.what)));
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        if self.bytes.is_empty() { Ok(()) } else { Err(Error::damaged(format!("{} is too long", self.what))) }
    }
}
