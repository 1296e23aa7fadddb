//! Types of tar headers; the only code that decides whether content follows a header.

use lockbox_terminal::display;

use crate::error::{Error, Result};

/// Type of a header.
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

/// Type of an object.
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
    /// Returns the type for a header's flag.
    ///
    /// # Errors
    /// `Invalid` for a flag that is known and not supported, and for an unknown one, because it is
    /// unclear whether content follows.
    pub(super) fn of(flag: u8) -> Result<HeaderType> {
        let unsupported = |what: &str| Error::invalid(format!("{what}, which is not supported"));
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
            b'M' => return Err(Error::invalid("it goes on from another volume, and there is only this one")),
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
