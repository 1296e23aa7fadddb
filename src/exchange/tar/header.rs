//! Decodes headers of a tar member: checksum, numbers and names of the main header, from untrusted
//! bytes; its type, on which alone it depends whether content follows; and the pax records, long
//! name and long link target of extended headers before it.

use tar::Header;

use lockbox_terminal::display;

use super::{ACLS, BLOCK, XATTR, pax};
use crate::error::{Error, Result, Timestamp};
use crate::exchange::attributes::device_number;

/// Offsets and lengths.
type SparseParts = Vec<(u64, u64)>;

/// Header with a valid checksum; its fields are not validated.
pub(super) struct ChecksummedHeader(Header);

impl ChecksummedHeader {
    /// Returns `None` if the checksum is wrong.
    pub(super) fn new(block: &[u8; BLOCK]) -> Option<ChecksummedHeader> {
        let header = Header::from_byte_slice(block).clone();
        let stated = number(&header.as_old().cksum)?;
        // The checksum field counts as spaces.
        let outside = block[..148].iter().chain(&block[156..]);
        let sum = outside.clone().map(|&byte| i64::from(byte)).sum::<i64>() + 8 * i64::from(b' ');
        // Some old programs summed bytes as signed.
        let signed = outside.map(|&byte| i64::from(byte as i8)).sum::<i64>() + 8 * i64::from(b' ');
        (stated == sum || stated == signed).then_some(ChecksummedHeader(header))
    }

    pub(super) fn flag(&self) -> u8 {
        self.0.as_old().linkflag[0]
    }

    pub(super) fn path(&self) -> Vec<u8> {
        self.0.path_bytes().into_owned()
    }

    pub(super) fn link(&self) -> Vec<u8> {
        self.0.link_name_bytes().unwrap_or_default().into_owned()
    }

    pub(super) fn mode(&self) -> Result<u32> {
        in_range(number(&self.0.as_old().mode), "mode")
    }

    pub(super) fn uid(&self) -> Result<u32> {
        in_range(number(&self.0.as_old().uid), "owner")
    }

    pub(super) fn gid(&self) -> Result<u32> {
        in_range(number(&self.0.as_old().gid), "group")
    }

    pub(super) fn size(&self) -> Result<u64> {
        in_range(number(&self.0.as_old().size), "size")
    }

    pub(super) fn modified(&self) -> Result<i64> {
        in_range(number(&self.0.as_old().mtime), "time")
    }

    pub(super) fn device(&self) -> Result<(u32, u32)> {
        let (major, minor) = match (self.0.as_ustar(), self.0.as_gnu()) {
            (Some(header), _) => (&header.dev_major, &header.dev_minor),
            (None, Some(header)) => (&header.dev_major, &header.dev_minor),
            (None, None) => return Err(Error::invalid("a device without numbers")),
        };
        Ok((in_range(number(major), "device")?, in_range(number(minor), "device")?))
    }

    /// Returns the data ranges of a sparse file in GNU tar's old format, as far as this header
    /// contains them, whether more follow, and the file's size.
    pub(super) fn sparse(&self) -> Result<(SparseParts, bool, u64)> {
        let header = self.0.as_gnu().ok_or_else(|| Error::invalid("a sparse file without a map"))?;
        let parts = header.sparse.iter().map(|part| (&part.offset[..], &part.numbytes[..]));
        Ok((sparse_parts(parts)?, header.is_extended(), in_range(number(&header.realsize), "size")?))
    }
}

/// Returns the data ranges in a continuation block of a sparse map, and whether more follow.
pub(super) fn sparse_continued(block: &[u8; BLOCK]) -> Result<(SparseParts, bool)> {
    let mut more = tar::GnuExtSparseHeader::new();
    more.as_mut_bytes().copy_from_slice(block);
    let parts = more.sparse().iter().map(|part| (&part.offset[..], &part.numbytes[..]));
    Ok((sparse_parts(parts)?, more.is_extended()))
}

fn sparse_parts<'a>(parts: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Result<SparseParts> {
    parts
        .take_while(|(offset, _)| offset[0] != 0)
        .map(|(offset, length)| Ok((in_range(number(offset), "map")?, in_range(number(length), "map")?)))
        .collect()
}

/// Parses octal digits between spaces and NULs (an empty field is zero), or GNU tar's big-endian
/// number with a mark in the first byte.
fn number(field: &[u8]) -> Option<i64> {
    match field.split_first() {
        Some((&first, rest)) if first & 0x80 != 0 => {
            // The bit below the mark is the sign.
            let start = if first & 0x40 != 0 { i128::from(first as i8) } else { i128::from(first & 0x3f) };
            // At most 12 bytes.
            let value = rest.iter().fold(start, |value, &byte| value << 8 | i128::from(byte));
            i64::try_from(value).ok()
        }
        _ => {
            let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
            let digits = field[..end].trim_ascii();
            digits.iter().try_fold(0i64, |value, &byte| match byte {
                b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(byte - b'0')),
                _ => None,
            })
        }
    }
}

fn in_range<T: TryFrom<i64>>(number: Option<i64>, field: &str) -> Result<T> {
    number
        .and_then(|number| T::try_from(number).ok())
        .ok_or_else(|| Error::invalid(format!("its {field} is not a valid number")))
}

/// Attributes by name, and names of access control lists that could not be parsed.
type HeaderXattrs = (Vec<(Vec<u8>, Vec<u8>)>, Vec<&'static [u8]>);

/// Contents of the extended headers before a member.
#[derive(Default)]
pub(super) struct ExtendedHeader {
    pub(super) records: pax::Records,
    pub(super) name: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
}

impl ExtendedHeader {
    /// Returns the last record of a key, which takes precedence.
    pub(super) fn value(&self, key: &str) -> Option<&[u8]> {
        self.records.iter().rev().find(|(name, _)| name == key.as_bytes()).map(|(_, value)| &value[..])
    }

    pub(super) fn number<T: TryFrom<u64>>(&self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let number = pax::decimal(value).and_then(|number| T::try_from(number).ok());
        number.map(Some).ok_or_else(|| Error::invalid(format!("its record {key} is not a number")))
    }

    pub(super) fn time(&self, key: &str) -> Result<Option<Timestamp>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        pax::parse_time(value).map(Some).ok_or_else(|| Error::invalid(format!("its record {key} is not a time")))
    }

    pub(super) fn device(&self, header: &ChecksummedHeader) -> Result<u32> {
        let (major, minor) = match (self.number("SCHILY.devmajor")?, self.number("SCHILY.devminor")?) {
            (Some(major), Some(minor)) => (major, minor),
            _ => header.device()?,
        };
        if major >= 1 << 12 || minor >= 1 << 20 {
            return Err(Error::invalid("its device number is not valid on this system"));
        }
        Ok(device_number(major, minor))
    }

    /// Returns the attributes in records, and the names of lists that could not be parsed.
    pub(super) fn attributes(&self) -> HeaderXattrs {
        let (mut found, mut strange) = (Vec::new(), Vec::new());
        for (key, value) in &self.records {
            if let Some(name) = key.strip_prefix(XATTR.as_bytes()) {
                found.push((pax::unescaped(name), value.clone()));
            } else if let Some((_, name)) = ACLS.iter().find(|(word, _)| key == word.as_bytes()) {
                match pax::acl_from_text(value) {
                    Some(list) => found.push((name.to_vec(), list)),
                    None => strange.push(*name),
                }
            }
        }
        (found, strange)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeaderType {
    Member(MemberType),
    /// Pax records for the next member, or for all members that follow.
    Records,
    GlobalRecords,
    /// Name of the next member, or its link target.
    LongName,
    LongLink,
    /// Label of a tape.
    Label,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberType {
    File,
    /// Sparse file with its map in the header, as old GNU tar writes it.
    SparseFile,
    Link,
    Symlink,
    CharacterDevice,
    BlockDevice,
    Directory,
    /// Directory of an incremental dump of GNU tar, followed by the list of its entries.
    DumpedDirectory,
    Fifo,
}

impl HeaderType {
    /// Returns the type for a header's flag. Errors: `Invalid` for a flag that is known and not
    /// supported, and for an unknown one, because it is unclear whether content follows.
    pub(super) fn of(flag: u8) -> Result<HeaderType> {
        let unsupported = |feature: &str| Error::invalid(format!("{feature}, which is not supported"));
        Ok(HeaderType::Member(match flag {
            // '7' is a contiguous file; the layout is up to the host.
            b'0' | b'\0' | b'7' => MemberType::File,
            b'1' => MemberType::Link,
            b'2' => MemberType::Symlink,
            b'3' => MemberType::CharacterDevice,
            b'4' => MemberType::BlockDevice,
            b'5' => MemberType::Directory,
            b'6' => MemberType::Fifo,
            b'D' => MemberType::DumpedDirectory,
            b'S' => MemberType::SparseFile,
            // 'X' is Solaris' flag from before POSIX chose 'x'.
            b'x' | b'X' => return Ok(HeaderType::Records),
            b'g' => return Ok(HeaderType::GlobalRecords),
            b'K' => return Ok(HeaderType::LongLink),
            b'L' => return Ok(HeaderType::LongName),
            b'V' => return Ok(HeaderType::Label),
            b'A' => return Err(unsupported("it is an access control list of Solaris")),
            b'E' => return Err(unsupported("it is an extended attribute of Solaris")),
            b'I' => return Err(unsupported("it is an inode of star without its content")),
            b'M' => return Err(Error::invalid("it continues another tar volume, which is not supported")),
            b'N' => return Err(unsupported("it is a list of names of an old GNU tar")),
            flag => return Err(Error::invalid(format!("type '{}' is unknown", display(&[flag])))),
        }))
    }
}

impl MemberType {
    /// Returns whether the stated size is the number of bytes that follow. Programs also state a
    /// size for the other types, such as that of a link's target; skipping so many bytes would lose
    /// the next members.
    pub(super) fn has_content(self) -> bool {
        match self {
            MemberType::File | MemberType::SparseFile | MemberType::DumpedDirectory => true,
            MemberType::Link | MemberType::Symlink | MemberType::Directory => false,
            MemberType::CharacterDevice | MemberType::BlockDevice | MemberType::Fifo => false,
        }
    }

    /// Returns the type under this name: programs without a directory type ended directory names
    /// with a slash.
    pub(super) fn named(self, name: &[u8]) -> MemberType {
        match self {
            MemberType::File if name.ends_with(b"/") => MemberType::Directory,
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_binary_with_a_sign() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"\0\0\0\0"), Some(0));
        assert_eq!(number(b"77777777777 "), Some(0o77_777_777_777));
        assert_eq!(number(b"\x80\0\0\0\0\0\0\x02\0\0\0\0"), Some(2 << 32));
        assert_eq!(number(&[0xff; 12]), Some(-1));
        assert_eq!(number(b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), None);
        assert_eq!(number(b"12x"), None);
        assert_eq!(number(b"89"), None);
    }

    /// Flags of POSIX (ustar, pax), GNU tar, Solaris and star; whether bytes follow, None for what is refused.
    const ALL: [(u8, Option<bool>); 22] = [
        (b'\0', Some(true)),
        (b'0', Some(true)),
        (b'1', Some(false)),
        (b'2', Some(false)),
        (b'3', Some(false)),
        (b'4', Some(false)),
        (b'5', Some(false)),
        (b'6', Some(false)),
        (b'7', Some(true)),
        (b'x', Some(true)),
        (b'g', Some(true)),
        (b'D', Some(true)),
        (b'K', Some(true)),
        (b'L', Some(true)),
        (b'M', None),
        (b'N', None),
        (b'S', Some(true)),
        (b'V', Some(true)),
        (b'X', Some(true)),
        (b'A', None),
        (b'E', None),
        (b'I', None),
    ];

    #[test]
    fn every_flag_is_on_the_list_or_unknown() {
        for flag in 0..=u8::MAX {
            let found = HeaderType::of(flag);
            let follows = match found {
                Ok(HeaderType::Member(kind)) => Some(kind.has_content()),
                Ok(_) => Some(true),
                Err(_) => None,
            };
            match ALL.iter().find(|(known, _)| *known == flag) {
                Some((_, expected)) => assert_eq!(follows, *expected, "{flag}"),
                None => assert!(found.unwrap_err().to_string().contains("is unknown"), "{flag}"),
            }
        }
    }

    #[test]
    fn a_file_with_the_name_of_a_directory_is_one() {
        assert_eq!(MemberType::File.named(b"d/"), MemberType::Directory);
        assert_eq!(MemberType::File.named(b"d"), MemberType::File);
        assert_eq!(MemberType::Symlink.named(b"d/"), MemberType::Symlink);
    }
}
