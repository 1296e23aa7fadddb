//! Bounds-checked cursor used by every decoder of variable-length bytes.

use crate::error::{Error, Result};

/// Reader of little-endian values from a slice. Reading past the end is `Damaged`, never a panic.
pub struct ByteReader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> ByteReader<'a> {
    pub fn new(bytes: &'a [u8], what: &'static str) -> Self {
        ByteReader { bytes, what }
    }

    pub fn remaining(&self) -> usize {
        self.bytes.len()
    }

    pub fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        if count > self.bytes.len() {
            return Err(Error::damaged(format!("{} ends early", self.what)));
        }
        let (head, tail) = self.bytes.split_at(count);
        self.bytes = tail;
        Ok(head)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn i64(&mut self) -> Result<i64> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    /// Consumes `count` bytes that must be zero.
    pub fn skip_zeros(&mut self, count: usize) -> Result<()> {
        if self.take(count)?.iter().any(|&b| b != 0) {
            return Err(Error::damaged(format!("{} has a reserved field that is not zero", self.what)));
        }
        Ok(())
    }

    /// Ends decoding; fails if bytes are left.
    pub fn finish(self) -> Result<()> {
        if self.bytes.is_empty() { Ok(()) } else { Err(Error::damaged(format!("{} is too long", self.what))) }
    }
}
