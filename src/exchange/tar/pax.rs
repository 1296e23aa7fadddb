//! Pax records, `LENGTH KEY=VALUE\n`, where the length includes the whole record and a value may
//! contain any byte; and the encodings of their values: times, access control lists as tar programs
//! write them (`user::rw-,user:1000:r--,group::r--,mask::r--,other::---`), and maps of sparse
//! files, validated before anything is written.

use std::fmt::Write;
use std::io::Read;

use nix::unistd::{Group, User};

use super::BLOCK;
use crate::error::{Error, Result, Timestamp};

/// Maximum records of one member: a file's attributes have names of 64 KiB together; times, owners
/// and ranges of sparse files are few in comparison.
const MOST: usize = 1 << 16;

/// Keys and values in stream order.
pub(super) type Records = Vec<(Vec<u8>, Vec<u8>)>;

/// Parses a sequence of records. Errors: `Invalid` for anything but complete records, and for more
/// of them than any real member has.
pub(super) fn parse(mut bytes: &[u8]) -> Result<Records> {
    let mut records = Records::new();
    while !bytes.is_empty() {
        let (record, rest) = split_record(bytes).ok_or_else(|| Error::invalid("a pax header is malformed"))?;
        records.push(record);
        bound_records(records.len())?;
        bytes = rest;
    }
    Ok(records)
}

/// Checks the number of records. Errors: `Invalid` for more records than any real member has: each
/// takes more memory than space in the tar.
pub(super) fn bound_records(records: usize) -> Result<()> {
    match records {
        0..=MOST => Ok(()),
        _ => Err(Error::invalid("the tar has more records for one member than any real one")),
    }
}

type Record = (Vec<u8>, Vec<u8>);

fn split_record(bytes: &[u8]) -> Option<(Record, &[u8])> {
    // A length of more digits would exceed any buffer.
    let space = bytes.iter().take(20).position(|&byte| byte == b' ')?;
    let length = usize::try_from(decimal(&bytes[..space])?).ok()?;
    let record = bytes.get(space + 1..length)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|&byte| byte == b'=')?;
    Some(((record[..equals].to_vec(), record[equals + 1..].to_vec()), &bytes[length..]))
}

pub(super) fn push(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // Space, equals sign and newline.
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length.to_string().len() + rest != length {
        length = length.to_string().len() + rest;
    }
    for part in [length.to_string().as_bytes(), b" ", key, b"=", value, b"\n"] {
        out.extend_from_slice(part);
    }
}

pub(super) fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Parses seconds with an optional fraction, truncated to nanoseconds.
pub(super) fn parse_time(text: &[u8]) -> Option<Timestamp> {
    let magnitude = text.strip_prefix(b"-");
    let mut parts = magnitude.unwrap_or(text).splitn(2, |&byte| byte == b'.');
    let seconds = i64::try_from(decimal(parts.next()?)?).ok()?;
    let mut nanos = 0;
    if let Some(fraction) = parts.next().filter(|fraction| !fraction.is_empty()) {
        decimal(&fraction[..fraction.len().min(9)])?;
        for place in 0..9 {
            nanos = nanos * 10 + u32::from(fraction.get(place).copied().unwrap_or(b'0').wrapping_sub(b'0'));
        }
    }
    Some(match (magnitude.is_some(), nanos) {
        (false, nanos) => Timestamp { seconds, nanos },
        (true, 0) => Timestamp { seconds: -seconds, nanos },
        (true, nanos) => Timestamp { seconds: -seconds - 1, nanos: 1_000_000_000 - nanos },
    })
}

pub(super) fn time(time: Timestamp) -> String {
    let Timestamp { seconds, nanos } = time;
    match (seconds < 0, nanos) {
        (_, 0) => seconds.to_string(),
        (false, nanos) => format!("{seconds}.{nanos:09}"),
        // `seconds + 1` is negated, because i64::MIN has no positive counterpart.
        (true, nanos) => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos),
    }
}

/// Escapes attribute names as GNU tar does, because they may contain the sign that ends a key.
pub(super) fn escaped(name: &[u8]) -> Vec<u8> {
    let escape = |byte: &u8| match byte {
        b'%' => b"%25".to_vec(),
        b'=' => b"%3D".to_vec(),
        byte => vec![*byte],
    };
    name.iter().flat_map(escape).collect()
}

pub(super) fn unescaped(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&first, after)) = rest.split_first() {
        let (byte, next) = match (rest.strip_prefix(b"%25"), rest.strip_prefix(b"%3D")) {
            (Some(next), _) => (b'%', next),
            (_, Some(next)) => (b'=', next),
            _ => (first, after),
        };
        out.push(byte);
        rest = next;
    }
    out
}

const ACL_VERSION: u32 = 2;
const ACL_ENTRY: usize = 8;
/// Id of entries without a qualifier.
const UNDEFINED_ID: u32 = u32::MAX;

/// Converts a list from the kernel's format to text, with numeric ids; `None` if it is malformed.
pub(super) fn acl_to_text(value: &[u8]) -> Option<String> {
    let (head, rest) = value.split_first_chunk::<4>()?;
    let (entries, []) = rest.as_chunks::<ACL_ENTRY>() else { return None };
    if u32::from_le_bytes(*head) != ACL_VERSION {
        return None;
    }
    let mut text = String::new();
    for &[t0, t1, p0, p1, i0, i1, i2, i3] in entries {
        let id = u32::from_le_bytes([i0, i1, i2, i3]).to_string();
        let (word, id) = match u16::from_le_bytes([t0, t1]) {
            0x01 => ("user", ""),
            0x02 => ("user", &id[..]),
            0x04 => ("group", ""),
            0x08 => ("group", &id[..]),
            0x10 => ("mask", ""),
            0x20 => ("other", ""),
            _ => return None,
        };
        let bits = u16::from_le_bytes([p0, p1]);
        let letter = |bit: u16, letter: char| if bits & bit != 0 { letter } else { '-' };
        let comma = if text.is_empty() { "" } else { "," };
        // Writing to a String does not fail.
        let _ = write!(text, "{comma}{word}:{id}:{}{}{}", letter(4, 'r'), letter(2, 'w'), letter(1, 'x'));
    }
    Some(text)
}

/// Converts text to the kernel's format; `None` if it is malformed or has an unknown name.
pub(super) fn acl_from_text(text: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(text).ok()?;
    let entries = text.split([',', '\n']).map(|entry| entry.split('#').next().unwrap_or_default().trim());
    let entries = entries.filter(|entry| !entry.is_empty()).map(parse_acl_entry);
    let mut entries = entries.collect::<Option<Vec<_>>>()?;
    // The kernel requires this order.
    entries.sort_by_key(|&(tag, _, id)| (tag, id));
    let mut value = ACL_VERSION.to_le_bytes().to_vec();
    for (tag, bits, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&bits.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    Some(value)
}

fn parse_acl_entry(entry: &str) -> Option<(u16, u16, u32)> {
    let fields: Vec<&str> = entry.split(':').collect();
    let (word, name, letters, number) = match fields[..] {
        [word, name, letters] => (word, name, letters, None),
        // The number of the name, as star and bsdtar write it.
        [word, name, letters, number] => (word, name, letters, Some(number)),
        // mask:rwx and other:rwx, which have no name field.
        [word, letters] => (word, "", letters, None),
        _ => return None,
    };
    let (tag, named) = match word {
        "user" | "u" => (0x01, Some(0x02)),
        "group" | "g" => (0x04, Some(0x08)),
        "mask" | "m" => (0x10, None),
        "other" | "o" => (0x20, None),
        _ => return None,
    };
    let mut bits = 0;
    for letter in letters.chars() {
        bits |= match letter {
            'r' => 4,
            'w' => 2,
            'x' => 1,
            '-' => 0,
            _ => return None,
        };
    }
    if name.is_empty() {
        return Some((tag, bits, UNDEFINED_ID));
    }
    let known = || match tag {
        0x01 => User::from_name(name).ok().flatten().map(|user| user.uid.as_raw()),
        _ => Group::from_name(name).ok().flatten().map(|group| group.gid.as_raw()),
    };
    let id = number.and_then(|number| number.parse().ok()).or_else(|| name.parse().ok()).or_else(known)?;
    Some((named?, bits, id))
}

/// Maximum ranges of a file: their map takes 16 MiB of memory.
const MAX_PARTS: usize = 1 << 20;
/// Maximum digits of a line in a map.
const MAX_DIGITS: usize = 20;

/// Offsets and lengths of the stored ranges, ascending and disjoint, and the size of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SparseMap {
    pub(super) parts: Vec<(u64, u64)>,
    pub(super) size: u64,
}

impl SparseMap {
    pub(super) fn whole(size: u64) -> SparseMap {
        SparseMap { parts: if size > 0 { vec![(0, size)] } else { Vec::new() }, size }
    }

    /// Validates a map. Errors: `Invalid` for ranges out of order or beyond the end, or if their
    /// sum is not `stored`.
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

    /// Encodes the map as version 1.0 has it before the data, padded to whole blocks.
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
pub(super) fn read_map_lines(input: &mut dyn Read) -> Result<(Vec<(u64, u64)>, u64)> {
    let mut lines = SparseLines { input, block: [0; BLOCK], at: BLOCK, consumed: 0 };
    let count = lines.number()?;
    let count = usize::try_from(count).ok().filter(|&count| count <= MAX_PARTS).ok_or_else(too_many)?;
    let parts = (0..count).map(|_| Ok((lines.number()?, lines.number()?))).collect::<Result<_>>()?;
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
        decimal(&digits).ok_or_else(|| Error::invalid("the map of a sparse file is malformed"))
    }
}

/// Parses the map of version 0.1: comma-separated numbers.
pub(super) fn parse_map_commas(text: &[u8]) -> Result<Vec<(u64, u64)>> {
    let numbers: Option<Vec<u64>> = text.split(|&byte| byte == b',').take(2 * MAX_PARTS + 1).map(decimal).collect();
    let numbers = numbers.ok_or_else(|| Error::invalid("the map of a sparse file is malformed"))?;
    let (pairs, rest) = numbers.as_chunks::<2>();
    if pairs.len() > MAX_PARTS || !rest.is_empty() {
        return Err(too_many());
    }
    Ok(pairs.iter().map(|&[offset, length]| (offset, length)).collect())
}

/// Parses the map of version 0.0: a record for each offset, followed by one for its length.
pub(super) fn parse_map_records(records: &Records) -> Result<Vec<(u64, u64)>> {
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
        numbers.push(decimal(value).ok_or_else(malformed)?);
    }
    let (pairs, rest) = numbers.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(malformed());
    }
    Ok(pairs.iter().map(|&[offset, length]| (offset, length)).collect())
}

pub(super) fn bound_parts(parts: &[(u64, u64)]) -> Result<()> {
    if parts.len() > MAX_PARTS { Err(too_many()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_counts_itself_and_may_hold_any_byte() {
        for length in [0, 1, 90, 91, 92, 93, 980, 990, 991, 992, 70_000] {
            let value = vec![b'\n'; length];
            let mut out = Vec::new();
            push(&mut out, b"key", &value);
            push(&mut out, b"next", b"a=b");
            let expected = vec![(b"key".to_vec(), value), (b"next".to_vec(), b"a=b".to_vec())];
            assert_eq!(parse(&out).unwrap(), expected, "{length}");
        }
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let bad: [&[u8]; 8] = [
            b"6 a=b\nx",
            b"99 a=b\n",
            b"5 a=b",
            b"6 a=bb\n",
            b" a=b\n",
            b"-6 a=b\n",
            b"6 aab\n",
            b"99999999999999999999 a=b\n",
        ];
        for bytes in bad {
            assert!(parse(bytes).is_err(), "{}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn times_come_back() {
        for seconds in [i64::MIN + 1, -1_000_000, -2, -1, 0, 1, 1_709_209_296, i64::MAX] {
            for nanos in [0, 1, 500_000_000, 999_999_999] {
                let given = Timestamp { seconds, nanos };
                assert_eq!(parse_time(time(given).as_bytes()), Some(given), "{}", time(given));
            }
        }
        assert_eq!(parse_time(b"12.3456789019"), Some(Timestamp { seconds: 12, nanos: 345_678_901 }));
        for bad in ["", "-", "1e9", "1.x", "+1", "99999999999999999999"] {
            assert_eq!(parse_time(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn names_of_attributes_are_escaped() {
        assert_eq!(escaped(b"user.a=b%25"), b"user.a%3Db%2525");
        assert_eq!(unescaped(b"user.a%3Db%2525%"), b"user.a=b%25%");
    }

    #[test]
    fn a_list_comes_back_from_its_text() {
        let text = "user::rwx,user:7:r--,user:1000:---,group::r-x,group:5:rw-,mask::rwx,other::--x";
        let value = acl_from_text(text.as_bytes()).unwrap();
        assert_eq!(value.len(), 4 + 7 * ACL_ENTRY);
        assert_eq!(acl_to_text(&value).unwrap(), text);
    }

    #[test]
    fn other_programs_ways_of_writing_are_understood() {
        let expected = acl_from_text(b"user::rw-,user:0:r--,group::r--,mask::r--,other::---").unwrap();
        for text in [
            "user::rw-\nuser:root:r--\ngroup::r--\nmask::r--\nother::---\n",
            "u::rw,u:nobody-here:r:0,g::r,m::r,o::-",
            "other:---,mask:r--\t#effective,group::r--,user:root:r--:0,user::rw-",
        ] {
            assert_eq!(acl_from_text(text.as_bytes()).as_ref(), Some(&expected), "{text}");
        }
        for bad in ["user", "user:nobody-here-at-all:rwx", "user::rwz", "mask:7:rwx", "a:b:c:d:e", "king::rwx"] {
            assert_eq!(acl_from_text(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(acl_to_text(b"\x03\0\0\0"), None);
        assert_eq!(acl_to_text(b"\x02\0\0\0\x01"), None);
    }

    #[test]
    fn a_map_comes_back_from_its_lines() {
        let parts = (0..100).map(|n| (n * 10_000, 4096)).chain([(5_000_000, 0)]).collect();
        let map = SparseMap::checked(parts, 5_000_000, 100 * 4096).unwrap();
        let lines = map.to_lines();
        assert_eq!(lines.len() % BLOCK, 0);
        let (parts, consumed) = read_map_lines(&mut &lines[..]).unwrap();
        assert_eq!((parts, consumed), (map.parts, lines.len() as u64));
        assert_eq!(parse_map_commas(b"0,5,10,7").unwrap(), [(0, 5), (10, 7)]);
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
            assert!(read_map_lines(&mut bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(parse_map_commas(b"1,2,3").is_err());
        assert!(parse_map_commas(b"1,,3").is_err());
    }
}
