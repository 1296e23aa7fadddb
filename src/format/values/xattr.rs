//! Xattr record: values stored inline or in separate pieces (section 7).

use crate::error::{Error, Result};
use crate::format::codec::ByteReader;
use crate::format::ids::MAX_NAME;

/// Maximum length of an attribute value in bytes.
pub const MAX_XATTR: usize = 65_536;
/// Length of every piece of a long value except the last, in bytes.
pub const XATTR_PIECE: usize = 3_000;

/// Bytes of an entry without name and value: name length, flags, value length, piece id.
const HEAD: usize = 10;
const IN_PIECES: u8 = 1;

/// Entry of an xattr record. `piece == 0` means an inline value, otherwise pieces of 3,000 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XattrEntry {
    pub name: Vec<u8>,
    pub length: u32,
    pub piece: u32,
    pub value: Vec<u8>,
}

pub fn encode_xattrs(entries: &[XattrEntry]) -> Vec<u8> {
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

pub fn decode_xattrs(value: &[u8]) -> Result<Vec<XattrEntry>> {
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
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::format::strategies::{mutated, name, noise};

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
        fn no_input_panics(bytes in noise(300), damaged in mutated(encode_xattrs(&entries()))) {
            let _ = decode_xattrs(&bytes);
            let _ = decode_xattrs(&damaged);
        }
    }
}
