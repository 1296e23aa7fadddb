//! Records of names (section 7): of a directory entry, by name hash and by sequence number; of
//! xattrs, with values stored inline or in separate pieces.

use crate::error::{Error, Result};
use crate::format::ids::{Ino, MAX_INO, MAX_NAME};
use crate::format::{ByteReader, ends_early, u64_at};

/// Bytes of an index entry without its name: name length, type, sequence, inode.
const INDEX_HEAD: usize = 18;
/// Bytes of a list record without its name: name length, type, inode.
const LIST_HEAD: usize = 10;
/// Maximum type: types are the top four bits of a 16-bit mode.
const MAX_TYPE: u8 = 15;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IndexEntry {
    pub name: Vec<u8>,
    pub file_type: u8,
    pub sequence: u64,
    pub ino: Ino,
}

/// Returns whether a directory may have an entry of this name: 1..=255 bytes without NUL and slash,
/// not `.` or `..`.
pub(crate) fn is_valid_name(name: &[u8]) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name != b"."
        && name != b".."
        && !name.iter().any(|&byte| byte == 0 || byte == b'/')
}

/// Index entry that borrows the record.
struct RawEntry<'a> {
    name: &'a [u8],
    file_type: u8,
    sequence: u64,
    ino: Ino,
}

#[inline]
fn split_entry(value: &[u8]) -> Result<(RawEntry<'_>, &[u8])> {
    let short = || ends_early("directory index");
    let (head, rest) = value.split_first_chunk::<INDEX_HEAD>().ok_or_else(short)?;
    let (name, rest) = rest.split_at_checked(usize::from(head[0])).ok_or_else(short)?;
    let entry = RawEntry { name, file_type: head[1], sequence: u64_at(head, 2), ino: Ino(u64_at(head, 10)) };
    check_target(entry.file_type, entry.ino)?;
    Ok((entry, rest))
}

#[inline]
fn check_target(file_type: u8, ino: Ino) -> Result<()> {
    if file_type > MAX_TYPE || ino.0 == 0 || ino.0 > MAX_INO {
        return Err(Error::damaged(format!("directory entry has a wrong target: type={file_type} inode={}", ino.0)));
    }
    Ok(())
}

fn check_name(name: &[u8]) -> Result<()> {
    if is_valid_name(name) { Ok(()) } else { Err(Error::damaged("directory entry has an impossible name")) }
}

pub(crate) fn encode_index(entries: &[IndexEntry]) -> Vec<u8> {
    let mut out = Vec::with_capacity(entries.iter().map(|entry| INDEX_HEAD + entry.name.len()).sum());
    for entry in entries {
        debug_assert!(is_valid_name(&entry.name));
        out.extend_from_slice(&[entry.name.len() as u8, entry.file_type]);
        out.extend_from_slice(&entry.sequence.to_le_bytes());
        out.extend_from_slice(&entry.ino.0.to_le_bytes());
        out.extend_from_slice(&entry.name);
    }
    out
}

pub(crate) fn decode_index(mut value: &[u8]) -> Result<Vec<IndexEntry>> {
    let mut entries = Vec::new();
    while !value.is_empty() {
        let (entry, rest) = split_entry(value)?;
        check_name(entry.name)?;
        let RawEntry { name, file_type, sequence, ino } = entry;
        entries.push(IndexEntry { name: name.to_vec(), file_type, sequence, ino });
        value = rest;
    }
    Ok(entries)
}

/// Finds one name in a directory-index record without building the list.
pub(crate) fn find_in_index(mut value: &[u8], name: &[u8]) -> Result<Option<(Ino, u8, u64)>> {
    while !value.is_empty() {
        let (entry, rest) = split_entry(value)?;
        if entry.name == name {
            return Ok(Some((entry.ino, entry.file_type, entry.sequence)));
        }
        value = rest;
    }
    Ok(None)
}

/// Directory-list record; the name borrows the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListEntry<'a> {
    pub name: &'a [u8],
    pub file_type: u8,
    pub ino: Ino,
}

pub(crate) fn encode_list(entry: &ListEntry<'_>) -> Vec<u8> {
    debug_assert!(is_valid_name(entry.name));
    let mut out = Vec::with_capacity(LIST_HEAD + entry.name.len());
    out.extend_from_slice(&[entry.name.len() as u8, entry.file_type]);
    out.extend_from_slice(&entry.ino.0.to_le_bytes());
    out.extend_from_slice(entry.name);
    out
}

pub(crate) fn decode_list(value: &[u8]) -> Result<ListEntry<'_>> {
    let (head, name) = value.split_first_chunk::<LIST_HEAD>().ok_or_else(|| ends_early("directory list"))?;
    if usize::from(head[0]) != name.len() {
        return Err(Error::damaged(format!(
            "directory list has a wrong length: name={} bytes={}",
            head[0],
            name.len()
        )));
    }
    let entry = ListEntry { name, file_type: head[1], ino: Ino(u64_at(head, 2)) };
    check_target(entry.file_type, entry.ino)?;
    check_name(name)?;
    Ok(entry)
}

/// Maximum length of an attribute value in bytes.
pub(crate) const MAX_XATTR: usize = 65_536;
/// Length of every piece of a long value except the last, in bytes.
pub(crate) const XATTR_PIECE: usize = 3_000;

/// Bytes of an entry without name and value: name length, flags, value length, piece id.
const HEAD: usize = 10;
const IN_PIECES: u8 = 1;

/// Entry of an xattr record. `piece == 0` means an inline value, otherwise pieces of 3,000 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct XattrEntry {
    pub name: Vec<u8>,
    pub length: u32,
    pub piece: u32,
    pub value: Vec<u8>,
}

pub(crate) fn encode_xattrs(entries: &[XattrEntry]) -> Vec<u8> {
    let mut out = Vec::with_capacity(entries.iter().map(|entry| HEAD + entry.name.len() + entry.value.len()).sum());
    for entry in entries {
        debug_assert!((1..=MAX_NAME).contains(&entry.name.len()) && entry.length as usize <= MAX_XATTR);
        debug_assert!(if entry.piece == 0 {
            entry.value.len() == entry.length as usize
        } else {
            entry.value.is_empty()
        });
        out.push(entry.name.len() as u8);
        out.push(if entry.piece == 0 { 0 } else { IN_PIECES });
        out.extend_from_slice(&entry.length.to_le_bytes());
        out.extend_from_slice(&entry.piece.to_le_bytes());
        out.extend_from_slice(&entry.name);
        out.extend_from_slice(&entry.value);
    }
    out
}

pub(crate) fn decode_xattrs(value: &[u8]) -> Result<Vec<XattrEntry>> {
    let mut reader = ByteReader::new(value, "xattr record");
    let mut entries = Vec::new();
    while reader.remaining() > 0 {
        let (name_length, flags, length, piece) = (reader.u8()?, reader.u8()?, reader.u32()?, reader.u32()?);
        if flags > IN_PIECES || (flags == IN_PIECES) != (piece != 0) {
            return Err(Error::damaged(format!("xattr has wrong flags: flags={flags} piece={piece}")));
        }
        if name_length == 0 || length as usize > MAX_XATTR {
            return Err(Error::damaged(format!("xattr is out of bounds: name={name_length} length={length}")));
        }
        let name = reader.take(usize::from(name_length))?;
        if name.contains(&0) {
            return Err(Error::damaged("xattr has an impossible name"));
        }
        let value = if piece == 0 { reader.take(length as usize)? } else { &[] };
        entries.push(XattrEntry { name: name.to_vec(), length, piece, value: value.to_vec() });
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::tests::{mutated, name, noise};
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn entry(name: &[u8], ino: u64) -> IndexEntry {
        IndexEntry { name: name.to_vec(), file_type: 8, sequence: ino + 3, ino: Ino(ino) }
    }

    #[test]
    fn names_that_share_a_hash_share_a_record() {
        let value = encode_index(&[entry(b"one", 5), entry(b"two", 6)]);
        assert_eq!(find_in_index(&value, b"two").unwrap(), Some((Ino(6), 8, 9)));
        assert_eq!(find_in_index(&value, b"tw").unwrap(), None);
        assert_eq!(find_in_index(&[], b"one").unwrap(), None);
    }

    #[test]
    fn a_directory_has_no_impossible_names() {
        for name in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0"] {
            assert!(!is_valid_name(name), "{name:?}");
            let mut value = vec![name.len() as u8, 8, 7, 0, 0, 0, 0, 0, 0, 0];
            value.extend(name);
            assert!(matches!(decode_list(&value), Err(Error::Damaged(_))), "{name:?}");
            value.splice(2..2, [0; 8]);
            assert!(matches!(decode_index(&value), Err(Error::Damaged(_))), "{name:?}");
        }
        for name in [&b"..."[..], b".a", b"\xff\xfe", &[b'a'; 255]] {
            assert!(is_valid_name(name), "{name:?}");
        }
        assert!(!is_valid_name(&[b'a'; 256]));
    }

    #[test]
    fn an_entry_names_an_inode_and_a_type() {
        for (file_type, ino) in [(16, 1), (8, 0), (8, MAX_INO + 1)] {
            let value = encode_list(&ListEntry { name: b"a", file_type, ino: Ino(ino) });
            assert!(decode_list(&value).is_err());
            let value = encode_index(&[IndexEntry { name: b"a".to_vec(), file_type, sequence: 3, ino: Ino(ino) }]);
            assert!(decode_index(&value).is_err());
            assert!(find_in_index(&value, b"b").is_err());
        }
    }

    #[test]
    fn directory_records_fill_their_bytes_exactly() {
        let value = encode_list(&ListEntry { name: b"name", file_type: 8, ino: Ino(2) });
        assert!(decode_list(&[&value[..], b"s"].concat()).is_err());
        assert!(decode_list(&value[..13]).is_err());
        let value = encode_index(&[entry(b"one", 5)]);
        for end in 1..value.len() {
            assert!(decode_index(&value[..end]).is_err() && find_in_index(&value[..end], b"x").is_err(), "end={end}");
        }
    }

    proptest! {
        #[test]
        fn directory_records_round_trip(names in vec((name(), 0..=15u8, any::<u64>(), 1..=MAX_INO), 0..6)) {
            let entries: Vec<IndexEntry> = names
                .into_iter()
                .map(|(name, file_type, sequence, ino)| IndexEntry { name, file_type, sequence, ino: Ino(ino) })
                .collect();
            let value = encode_index(&entries);
            prop_assert_eq!(&decode_index(&value).unwrap(), &entries);
            for entry in &entries {
                let (ino, file_type, _) = find_in_index(&value, &entry.name).unwrap().unwrap();
                let first = entries.iter().find(|other| other.name == entry.name).unwrap();
                prop_assert_eq!((ino, file_type), (first.ino, first.file_type));
                let list = ListEntry { name: &entry.name, file_type, ino };
                let value = encode_list(&list);
                prop_assert_eq!(decode_list(&value).unwrap(), list);
            }
        }

        #[test]
        fn no_input_panics(bytes in noise(300), damaged in mutated(encode_index(&[entry(b"one", 5), entry(b"two", 6)]))) {
            for input in [&bytes, &damaged] {
                let _ = decode_index(input);
                let _ = decode_list(input);
                let _ = find_in_index(input, b"two");
            }
        }
    }

    fn entries() -> Vec<XattrEntry> {
        vec![
            XattrEntry { name: b"user.a".to_vec(), length: 5, piece: 0, value: b"value".to_vec() },
            XattrEntry { name: b"user.b".to_vec(), length: 65_536, piece: 4, value: vec![] },
        ]
    }

    fn changed(at: usize, bytes: &[u8]) -> Result<Vec<XattrEntry>> {
        let mut value = encode_xattrs(&entries());
        value[at..at + bytes.len()].copy_from_slice(bytes);
        decode_xattrs(&value)
    }

    #[test]
    fn a_value_is_in_the_record_or_in_pieces_never_both() {
        assert_eq!(decode_xattrs(&encode_xattrs(&entries())).unwrap(), entries());
        assert!(changed(1, &[1]).is_err(), "in pieces without an id");
        assert!(changed(6, &[1]).is_err(), "an id without pieces");
        assert!(changed(1, &[2]).is_err(), "an unknown flag");
    }

    #[test]
    fn bounds_of_an_xattr_are_checked() {
        let second = 10 + 6 + 5;
        assert!(changed(second + 2, &65_537u32.to_le_bytes()).is_err());
        assert!(changed(second, &[0]).is_err());
        assert!(changed(second, &[7]).is_err());
        assert!(changed(second + 10, &[0]).is_err());
        assert!(changed(2, &u32::MAX.to_le_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn xattrs_round_trip(entries in vec((name(), vec(any::<u8>(), 0..50), 0..3u32, 0..=65_536u32), 0..5)) {
            let entries: Vec<XattrEntry> = entries
                .into_iter()
                .map(|(name, value, piece, length)| match piece {
                    0 => XattrEntry { name, length: value.len() as u32, piece, value },
                    _ => XattrEntry { name, length, piece, value: vec![] },
                })
                .collect();
            prop_assert_eq!(decode_xattrs(&encode_xattrs(&entries)).unwrap(), entries);
        }

        #[test]
        fn no_xattr_record_panics(bytes in noise(300), damaged in mutated(encode_xattrs(&entries()))) {
            let _ = decode_xattrs(&bytes);
            let _ = decode_xattrs(&damaged);
        }
    }
}
