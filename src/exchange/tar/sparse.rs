//! Maps of sparse files: the ranges that a tar stores, validated before anything is written.

use std::io::Read;

use super::{BLOCK, pax};
use crate::error::{Error, Result};

/// Maximum ranges of a file: their map takes 16 MiB of memory.
const MAX_PARTS: usize = 1 << 20;
/// Maximum digits of a line in a map.
const MAX_DIGITS: usize = 20;

/// Offsets and lengths of the stored ranges, ascending and disjoint, and the size of the whole
/// file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SparseMap {
    pub(super) parts: Vec<(u64, u64)>,
    pub(super) size: u64,
}

impl SparseMap {
    pub(super) fn whole(size: u64) -> SparseMap {
        SparseMap { parts: if size > 0 { vec![(0, size)] } else { Vec::new() }, size }
    }

    /// Validates a map.
    ///
    /// # Errors
    /// `Invalid` for ranges out of order or beyond the end, or if their sum is not `stored`.
    pub(super) fn checked(parts: Vec<(u64, u64)>, size: u64, stored: u64) -> Result<SparseMap> {
        let wrong = || Error::invalid("the map of a sparse file contradicts itself");
        let (mut end, mut sum) = (0u64, 0u64);
        for &(offset, length) in &parts {
            if offset < end {
                return Err(wrong());
            }
            end = offset.checked_add(length).filter(|&end| end <= size).ok_or_else(wrong)?;
            sum += length;
        }
        if sum != stored || i64::try_from(size).is_err() {
            return Err(wrong());
        }
        Ok(SparseMap { parts, size })
    }

    /// Encodes the map as it precedes the data in version 1.0 of the format, padded to whole
    /// blocks.
    pub(super) fn to_lines(&self) -> Vec<u8> {
        let mut lines = format!("{}\n", self.parts.len()).into_bytes();
        for (offset, length) in &self.parts {
            lines.extend_from_slice(format!("{offset}\n{length}\n").as_bytes());
        }
        lines.resize(lines.len().next_multiple_of(BLOCK), 0);
        lines
    }
}

/// Reads such a map; returns the ranges and the number of bytes read.
pub(super) fn read_lines(input: &mut dyn Read) -> Result<(Vec<(u64, u64)>, u64)> {
    let mut lines = SparseLines { input, block: [0; BLOCK], at: BLOCK, consumed: 0 };
    let count = lines.number()?;
    let count = usize::try_from(count).ok().filter(|&count| count <= MAX_PARTS).ok_or_else(too_many)?;
    let mut parts = Vec::new();
    for _ in 0..count {
        parts.push((lines.number()?, lines.number()?));
    }
    Ok((parts, lines.consumed))
}

fn too_many() -> Error {
    Error::invalid("the map of a sparse file has more parts than any real one")
}

struct SparseLines<'a> {
    input: &'a mut dyn Read,
    block: [u8; BLOCK],
    at: usize,
    consumed: u64,
}

impl SparseLines<'_> {
    fn number(&mut self) -> Result<u64> {
        let mut digits = Vec::new();
        loop {
            if self.at == BLOCK {
                let cut_off = |_| Error::invalid("the map of a sparse file is cut off");
                self.input.read_exact(&mut self.block).map_err(cut_off)?;
                self.at = 0;
                self.consumed += BLOCK as u64;
            }
            let byte = self.block[self.at];
            self.at += 1;
            if byte == b'\n' {
                break;
            }
            digits.push(byte);
            if digits.len() > MAX_DIGITS {
                break;
            }
        }
        pax::decimal(&digits).ok_or_else(|| Error::invalid("the map of a sparse file is malformed"))
    }
}

/// Parses the map of version 0.1: comma-separated numbers.
pub(super) fn parse_commas(text: &[u8]) -> Result<Vec<(u64, u64)>> {
    let numbers: Option<Vec<u64>> =
        text.split(|&byte| byte == b',').take(2 * MAX_PARTS + 1).map(pax::decimal).collect();
    let numbers = numbers.ok_or_else(|| Error::invalid("the map of a sparse file is malformed"))?;
    let (pairs, rest) = numbers.as_chunks::<2>();
    if pairs.len() > MAX_PARTS || !rest.is_empty() {
        return Err(too_many());
    }
    Ok(pairs.iter().map(|&[offset, length]| (offset, length)).collect())
}

/// Parses the map of version 0.0: a record for each offset, followed by one for its length.
pub(super) fn parse_records(records: &pax::Records) -> Result<Vec<(u64, u64)>> {
    let malformed = || Error::invalid("the map of a sparse file is malformed");
    let mut numbers = Vec::new();
    for (key, value) in records {
        let is_length = match &key[..] {
            b"GNU.sparse.offset" => false,
            b"GNU.sparse.numbytes" => true,
            _ => continue,
        };
        if is_length != (numbers.len() % 2 == 1) {
            return Err(malformed());
        }
        numbers.push(pax::decimal(value).ok_or_else(malformed)?);
    }
    let (pairs, rest) = numbers.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(malformed());
    }
    Ok(pairs.iter().map(|&[offset, length]| (offset, length)).collect())
}

/// Refuses a map with too many ranges.
pub(super) fn bound(parts: &[(u64, u64)]) -> Result<()> {
    if parts.len() > MAX_PARTS { Err(too_many()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_comes_back_from_its_lines() {
        let parts = (0..100).map(|n| (n * 10_000, 4096)).chain([(5_000_000, 0)]).collect();
        let map = SparseMap::checked(parts, 5_000_000, 100 * 4096).unwrap();
        let lines = map.to_lines();
        assert_eq!(lines.len() % BLOCK, 0);
        let (parts, consumed) = read_lines(&mut &lines[..]).unwrap();
        assert_eq!((parts, consumed), (map.parts, lines.len() as u64));
        assert_eq!(parse_commas(b"0,5,10,7").unwrap(), [(0, 5), (10, 7)]);
    }

    #[test]
    fn impossible_maps_are_refused() {
        for (parts, size, stored) in [
            (vec![(0, 10), (5, 10)], 100, 20),
            (vec![(0, 10)], 5, 10),
            (vec![(u64::MAX, 10)], u64::MAX, 10),
            (vec![(0, 10)], 10, 20),
            (vec![], u64::MAX, 0),
        ] {
            assert!(SparseMap::checked(parts.clone(), size, stored).is_err(), "{parts:?}");
        }
        for bad in ["x\n", "9999999999\n", "111111111111111111111111111111111111", "2\n1\n2\n"] {
            assert!(read_lines(&mut bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(parse_commas(b"1,2,3").is_err());
        assert!(parse_commas(b"1,,3").is_err());
    }
}
