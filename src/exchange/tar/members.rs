//! Reads a tar stream member by member: metadata from the header and the extended headers before
//! it, then the content.

use std::io::{self, ErrorKind, Read};

use lockbox_terminal::display;

use super::header::{self, ChecksummedHeader, ExtendedHeader, HeaderType, MemberType};
use super::pax::{self, SparseMap};
use super::{BLOCK, MAX_RECORDS};
use crate::error::{Error, Result, Timestamp};
use crate::fs::mode;

/// Longest name, in bytes.
const MAX_LONG_NAME: u64 = 1 << 20;
/// Maximum number of different keys in global records.
const MAX_GLOBALS: usize = 100;
/// Magic numbers of compressed files that users may pass instead of a tar.
const COMPRESSED: [(&[u8], &str); 5] =
    [(b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"LZIP", "lzip")];

#[derive(Debug)]
pub(super) struct Member {
    /// Name as stored in the tar.
    pub(super) name: Vec<u8>,
    /// Components of the path, without `..`; empty for the top of the tree.
    pub(super) path: Vec<Vec<u8>>,
    pub(super) kind: MemberKind,
    pub(super) permissions: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) modified: Timestamp,
    pub(super) accessed: Option<Timestamp>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Access control lists that are malformed, or name unknown users.
    pub(super) strange: Vec<&'static [u8]>,
}

#[derive(Debug)]
pub(super) enum MemberKind {
    File(SparseMap),
    Directory,
    Symlink(Vec<u8>),
    /// Hard link to the file at this path.
    Link(Vec<Vec<u8>>),
    /// FIFO or device with its type bits and encoded device number.
    Node(u32, u32),
}

pub(super) struct Members<'a> {
    input: &'a mut dyn Read,
    /// Unread bytes of the current member, including padding.
    remaining: u64,
    padding: u64,
    /// Records that apply to all members that follow.
    globals: pax::Records,
    begun: bool,
}

impl<'a> Members<'a> {
    pub(super) fn new(input: &'a mut dyn Read) -> Members<'a> {
        Members { input, remaining: 0, padding: 0, globals: Vec::new(), begun: false }
    }

    /// Returns the next member; `None` at the end mark. Errors: `Invalid` for a bad tar, `Io`.
    pub(super) fn next(&mut self) -> Result<Option<Member>> {
        let mut announced = ExtendedHeader::default();
        let mut consumed = 0;
        loop {
            self.skip(self.remaining + self.padding)?;
            (self.remaining, self.padding) = (0, 0);
            let Some(header) = self.header()? else { return Ok(None) };
            let named = |error: Error| in_member(&header.path(), error);
            let size = || header.size().map_err(named);
            match HeaderType::of(header.flag()).map_err(named)? {
                HeaderType::Records => {
                    let size = size()?;
                    // Limit for all headers before one member together.
                    announced.records.extend(pax::parse(&self.body(size, MAX_RECORDS - consumed)?)?);
                    pax::bound_records(announced.records.len())?;
                    consumed += size;
                }
                HeaderType::GlobalRecords => self.globals(size()?)?,
                HeaderType::LongName => announced.name = Some(without_nuls(self.body(size()?, MAX_LONG_NAME)?)),
                HeaderType::LongLink => announced.link = Some(without_nuls(self.body(size()?, MAX_LONG_NAME)?)),
                HeaderType::Label => self.begin(size()?)?,
                HeaderType::Member(kind) => {
                    let own = std::mem::take(&mut announced.records);
                    announced.records = self.globals.iter().cloned().chain(own).collect();
                    return self.member(kind, &header, &announced).map(Some).map_err(named);
                }
            }
        }
    }

    /// Reads content of the current member. Errors: `Invalid` at its end, or in a cut-off stream.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        if self.remaining == 0 {
            return Err(cut_off());
        }
        let wanted = buffer.len().min(usize::try_from(self.remaining).unwrap_or(usize::MAX));
        match self.input.read(&mut buffer[..wanted]) {
            Ok(0) if wanted > 0 => Err(cut_off()),
            Ok(length) => {
                self.remaining -= length as u64;
                Ok(length)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(0),
            Err(error) => Err(cannot_read(error)),
        }
    }

    fn header(&mut self) -> Result<Option<ChecksummedHeader>> {
        let first = !std::mem::replace(&mut self.begun, true);
        let block = self.read_up_to(BLOCK as u64)?;
        match block.len() {
            0 if first => return Err(Error::invalid("the input is empty, not a tar")),
            0 => return Err(cut_off()),
            _ => {}
        }
        if first && let Some((_, program)) = COMPRESSED.iter().find(|(magic, _)| block.starts_with(magic)) {
            return Err(Error::invalid(format!("the tar is compressed: unpack it with '{program} -dc' first")));
        }
        let Ok(block) = <[u8; BLOCK]>::try_from(block) else {
            return Err(if first { Error::invalid("the input is not a tar") } else { cut_off() });
        };
        if block.iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        let wrong = if first { "the input is not a tar" } else { "the tar is damaged: a header's checksum is wrong" };
        ChecksummedHeader::new(&block).map(Some).ok_or_else(|| Error::invalid(wrong))
    }

    /// Reads `size` bytes, or fewer at the end of the input. Memory grows with the received bytes,
    /// not with the stated size.
    fn read_up_to(&mut self, size: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(BLOCK);
        (&mut *self.input).take(size).read_to_end(&mut bytes).map_err(cannot_read)?;
        Ok(bytes)
    }

    fn begin(&mut self, size: u64) -> Result<()> {
        // Includes the padding, so that nothing below overflows.
        let end = size.checked_next_multiple_of(BLOCK as u64).filter(|&end| i64::try_from(end).is_ok());
        let end = end.ok_or_else(|| Error::invalid("its size is impossible"))?;
        (self.remaining, self.padding) = (size, end - size);
        Ok(())
    }

    /// Reads the whole content of an extended header.
    fn body(&mut self, size: u64, most: u64) -> Result<Vec<u8>> {
        if size > most {
            return Err(Error::invalid(format!("the tar has a header of {size} bytes, more than any real one")));
        }
        self.begin(size)?;
        let bytes = self.read_up_to(size)?;
        if (bytes.len() as u64) < size {
            return Err(cut_off());
        }
        self.remaining = 0;
        Ok(bytes)
    }

    fn globals(&mut self, size: u64) -> Result<()> {
        for (key, value) in pax::parse(&self.body(size, MAX_LONG_NAME)?)? {
            if matches!(&key[..], b"path" | b"linkpath" | b"size") || key.starts_with(b"GNU.sparse.") {
                return Err(Error::invalid("the tar has one name or size for all that follows"));
            }
            self.globals.retain(|(known, _)| *known != key);
            self.globals.push((key, value));
            // They are copied for each member.
            let bytes: usize = self.globals.iter().map(|(key, value)| key.len() + value.len()).sum();
            if self.globals.len() > MAX_GLOBALS || bytes as u64 > MAX_LONG_NAME {
                return Err(Error::invalid("the tar has more global records than any real one"));
            }
        }
        Ok(())
    }

    fn skip(&mut self, length: u64) -> Result<()> {
        let skipped = io::copy(&mut (&mut *self.input).take(length), &mut io::sink()).map_err(cannot_read)?;
        if skipped < length { Err(cut_off()) } else { Ok(()) }
    }

    fn member(&mut self, kind: MemberType, header: &ChecksummedHeader, announced: &ExtendedHeader) -> Result<Member> {
        let name = announced.value("GNU.sparse.name").or_else(|| announced.value("path")).map(<[u8]>::to_vec);
        let name = name.or_else(|| announced.name.clone()).unwrap_or_else(|| header.path());
        let link = announced.value("linkpath").map(<[u8]>::to_vec);
        let link = link.or_else(|| announced.link.clone()).unwrap_or_else(|| header.link());
        let kind = kind.named(&name);
        let size = match (kind.has_content(), announced.number("size")) {
            (false, _) => 0,
            (true, announced) => announced?.map_or_else(|| header.size(), Ok)?,
        };
        self.begin(size)?;
        let path = components(&name)?;
        let kind = match kind {
            MemberType::File => MemberKind::File(self.map(announced, size)?),
            MemberType::SparseFile => MemberKind::File(self.old_map(header)?),
            MemberType::Link => MemberKind::Link(components(&link)?),
            MemberType::Symlink if link.is_empty() || link.contains(&0) => {
                return Err(Error::invalid("a link to nothing"));
            }
            MemberType::Symlink => MemberKind::Symlink(link),
            MemberType::CharacterDevice => MemberKind::Node(mode::CHARACTER, announced.device(header)?),
            MemberType::BlockDevice => MemberKind::Node(mode::BLOCK, announced.device(header)?),
            // A dump's list contains only names; each dumped entry is a member too.
            MemberType::Directory | MemberType::DumpedDirectory => MemberKind::Directory,
            MemberType::Fifo => MemberKind::Node(mode::FIFO, 0),
        };
        if path.is_empty() && !matches!(kind, MemberKind::Directory) {
            return Err(Error::invalid("it has no name"));
        }
        let (xattrs, strange) = announced.attributes();
        Ok(Member {
            name,
            path,
            kind,
            permissions: header.mode()? & mode::PERMISSIONS,
            uid: announced.number("uid")?.map_or_else(|| header.uid(), Ok)?,
            gid: announced.number("gid")?.map_or_else(|| header.gid(), Ok)?,
            modified: match announced.time("mtime")? {
                Some(time) => time,
                None => Timestamp { seconds: header.modified()?, nanos: 0 },
            },
            accessed: announced.time("atime")?,
            xattrs,
            strange,
        })
    }

    /// Returns the data ranges of a file: all of it, unless records describe a sparse file.
    fn map(&mut self, announced: &ExtendedHeader, size: u64) -> Result<SparseMap> {
        let no_size = || Error::invalid("it is sparse without a size");
        if let Some(major) = announced.number::<u64>("GNU.sparse.major")? {
            let minor = announced.number::<u64>("GNU.sparse.minor")?;
            if (major, minor) != (1, Some(0)) {
                return Err(Error::invalid("it is sparse in a way that is unknown"));
            }
            let (parts, consumed) = pax::read_map_lines(&mut (&mut *self.input).take(size))?;
            self.remaining -= consumed;
            let whole = announced.number("GNU.sparse.realsize")?.ok_or_else(no_size)?;
            return SparseMap::checked(parts, whole, self.remaining);
        }
        if let Some(text) = announced.value("GNU.sparse.map") {
            let whole = announced.number("GNU.sparse.size")?.ok_or_else(no_size)?;
            return SparseMap::checked(pax::parse_map_commas(text)?, whole, size);
        }
        if let Some(whole) = announced.number("GNU.sparse.size")? {
            let parts = pax::parse_map_records(&announced.records)?;
            if announced.number("GNU.sparse.numblocks")? != Some(parts.len() as u64) {
                return Err(Error::invalid("the map of a sparse file is not whole"));
            }
            return SparseMap::checked(parts, whole, size);
        }
        Ok(SparseMap::whole(size))
    }

    /// Reads the map of GNU tar's own format, which continues in blocks before the content.
    fn old_map(&mut self, header: &ChecksummedHeader) -> Result<SparseMap> {
        let (mut parts, mut more, size) = header.sparse()?;
        while more {
            let block: [u8; BLOCK] = self.read_up_to(BLOCK as u64)?.try_into().map_err(|_| cut_off())?;
            let (next, goes_on) = header::sparse_continued(&block)?;
            parts.extend(next);
            pax::bound_parts(&parts)?;
            more = goes_on;
        }
        SparseMap::checked(parts, size, self.remaining)
    }
}

/// Returns the components of a path. Errors: `Invalid` for a path that leads out of the tree.
fn components(path: &[u8]) -> Result<Vec<Vec<u8>>> {
    let shown = || display(path);
    if path.len() as u64 > MAX_LONG_NAME {
        return Err(Error::invalid("its name is longer than any real one"));
    }
    if path.starts_with(b"/") {
        return Err(Error::invalid(format!("'{}' is an absolute path", shown())));
    }
    if path.contains(&0) {
        return Err(Error::invalid(format!("'{}' holds a NUL", shown())));
    }
    let names = path.split(|&byte| byte == b'/').filter(|name| !matches!(*name, b"" | b"."));
    let names: Vec<Vec<u8>> = names.map(<[u8]>::to_vec).collect();
    if names.iter().any(|name| name == b"..") {
        return Err(Error::invalid(format!("'{}' leads out of its directory", shown())));
    }
    Ok(names)
}

/// Removes the NUL that ends a long name, and the NUL padding that some programs write.
fn without_nuls(mut name: Vec<u8>) -> Vec<u8> {
    name.truncate(name.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1));
    name
}

fn cannot_read(error: io::Error) -> Error {
    Error::io("cannot read the tar", error)
}

fn cut_off() -> Error {
    Error::invalid("the tar is cut off: it ends before its end mark")
}

/// Adds the name of the member to an error that does not concern the whole tar.
pub(super) fn in_member(name: &[u8], error: Error) -> Error {
    match error {
        Error::Invalid(detail) if !detail.starts_with("the tar ") => {
            Error::invalid(format!("member '{}' of the tar: {detail}", display(name)))
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::env::{Environment, SeededEnvironment, variable};

    /// A header with the fields that it is given and a right checksum.
    fn member(name: &[u8], kind: u8, content: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        header.as_old_mut().linkflag[0] = kind;
        header.set_cksum();
        let mut bytes = [&header.as_bytes()[..], content].concat();
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        bytes
    }

    fn sample() -> Vec<u8> {
        let mut records = Vec::new();
        pax::push(&mut records, b"mtime", b"-12.5");
        pax::push(&mut records, b"SCHILY.acl.access", b"user::rw-,user:7:r--,group::r--,mask::r--,other::---");
        pax::push(&mut records, b"SCHILY.xattr.user.a%3D", b"line\nline");
        let sparse =
            [&b"GNU.sparse.major=1"[..], b"GNU.sparse.minor=0", b"GNU.sparse.realsize=9999", b"GNU.sparse.name=holes"];
        let mut map = Vec::new();
        for record in sparse {
            let equals = record.iter().position(|&byte| byte == b'=').unwrap();
            pax::push(&mut map, &record[..equals], &record[equals + 1..]);
        }
        let mut lines = b"2\n0\n3\n9000\n4\n".to_vec();
        lines.resize(BLOCK, 0);
        lines.extend_from_slice(b"abcdefg");
        let parts = [
            member(b"g", b'g', b"13 comment=x\n"),
            member(b"d/", b'5', b""),
            member(b"x", b'x', &records),
            member(b"d/file", b'0', &[b'f'; 1500]),
            member(b"L", b'L', &[&[b'n'; 200][..], b"\0"].concat()),
            member(b"short", b'0', b"x"),
            member(b"x", b'x', &map),
            member(b"placeholder", b'0', &lines),
            member(b"fifo", b'6', b""),
            vec![0; 2 * BLOCK],
        ];
        parts.concat()
    }

    /// Names, with the number of bytes that came; or the error.
    fn read(mut bytes: &[u8]) -> Result<Vec<(Vec<u8>, u64)>> {
        let mut members = Members::new(&mut bytes);
        let mut found = Vec::new();
        while let Some(member) = members.next()? {
            let mut length = 0;
            if let MemberKind::File(map) = &member.kind {
                let stored: u64 = map.parts.iter().map(|(_, length)| length).sum();
                let mut buffer = [0; 700];
                while length < stored {
                    length += members.read(&mut buffer)? as u64;
                }
            }
            found.push((member.name, length));
        }
        Ok(found)
    }

    #[test]
    fn members_are_read_with_what_stands_before_them() {
        let found = read(&sample()).unwrap();
        let expected: [(&[u8], u64); 5] =
            [(b"d/", 0), (b"d/file", 1500), (&[b'n'; 200], 1), (b"holes", 7), (b"fifo", 0)];
        assert_eq!(found, expected.map(|(name, length)| (name.to_vec(), length)));
        let bytes = sample();
        let mut input = &bytes[..];
        let mut members = Members::new(&mut input);
        members.next().unwrap();
        let file = members.next().unwrap().unwrap();
        assert_eq!(file.modified, Timestamp { seconds: -13, nanos: 500_000_000 });
        assert_eq!(file.xattrs[1], (b"user.a=".to_vec(), b"line\nline".to_vec()));
        assert!(file.strange.is_empty() && file.path == [b"d".to_vec(), b"file".to_vec()]);
    }

    /// Each flag that is read, with a size in the header that is followed by as many bytes only where the type has content. Every member
    /// after it is found (public reports: directories, links and devices whose headers state sizes).
    #[test]
    fn members_after_one_that_states_a_size_are_found() {
        let stating = |flag: u8, size: u64| {
            let mut bytes = member(b"d", flag, b"");
            let mut header = tar::Header::from_byte_slice(&bytes).clone();
            if matches!(flag, b'1' | b'2') {
                header.as_old_mut().linkname[..5].copy_from_slice(b"first");
            }
            header.set_size(size);
            header.set_cksum();
            bytes.copy_from_slice(header.as_bytes());
            bytes
        };
        let expected: [(&[u8], u64); 5] = [(b"first", 3), (b"d", 0), (b"empty", 0), (b"other", 0), (b"after", 3)];
        let expected = expected.map(|(name, length)| (name.to_vec(), length));
        for flag in b'1'..=b'6' {
            for size in [1, 511, 512, 513, 1024, 4096] {
                let parts = [
                    member(b"first", b'0', b"abc"),
                    stating(flag, size),
                    member(b"empty", b'0', b""),
                    member(b"other", b'0', b""),
                    member(b"after", b'0', b"xyz"),
                    vec![0; 2 * BLOCK],
                ];
                assert_eq!(read(&parts.concat()).unwrap(), expected, "{flag} {size}");
            }
        }
        for (flag, name) in [(b'0', &b"d"[..]), (b'\0', b"d"), (b'7', b"d"), (b'D', b"d/"), (b'V', b"label")] {
            let content = [b'c'; 600];
            let parts = [member(name, flag, &content), member(b"after", b'0', b"xyz"), vec![0; 2 * BLOCK]];
            assert_eq!(read(&parts.concat()).unwrap().last(), Some(&(b"after".to_vec(), 3)), "{flag}");
        }
    }

    #[test]
    fn a_sparse_file_of_version_0_0_has_one_record_for_each_number() {
        let sparse = |count: &[u8]| {
            let mut records = Vec::new();
            let numbers: [(&[u8], &[u8]); 4] =
                [(b"offset", b"0"), (b"numbytes", b"3"), (b"offset", b"9000"), (b"numbytes", b"4")];
            pax::push(&mut records, b"GNU.sparse.size", b"9999");
            pax::push(&mut records, b"GNU.sparse.numblocks", count);
            for (key, value) in numbers {
                pax::push(&mut records, &[b"GNU.sparse.", key].concat(), value);
            }
            [member(b"x", b'x', &records), member(b"holes", b'0', b"abcdefg"), vec![0; 2 * BLOCK]].concat()
        };
        let bytes = sparse(b"2");
        let mut input = &bytes[..];
        let found = Members::new(&mut input).next().unwrap().unwrap();
        let MemberKind::File(map) = found.kind else { panic!("{found:?}") };
        assert_eq!(map, SparseMap { parts: vec![(0, 3), (9000, 4)], size: 9999 });
        assert!(read(&sparse(b"3")).is_err());
    }

    #[test]
    fn a_long_name_may_be_filled_up_with_nuls() {
        let long = [&[b'n'; 200][..], &[0; 56]].concat();
        let parts = [member(b"L", b'L', &long), member(b"short", b'0', b"x"), vec![0; 2 * BLOCK]].concat();
        assert_eq!(read(&parts).unwrap(), [(vec![b'n'; 200], 1)]);
        let inside = [member(b"L", b'L', b"a\0b\0"), member(b"short", b'0', b"x"), vec![0; 2 * BLOCK]].concat();
        assert!(read(&inside).is_err());
    }

    /// Checksums are made right again, so that what is behind them is reached.
    #[test]
    fn altered_streams_are_members_or_errors_and_always_end() {
        let seed = variable("SEED").unwrap_or(20_261_121);
        println!("SEED={seed}");
        let environment = SeededEnvironment::new(seed);
        let random = |below: usize| {
            let mut bytes = [0; 8];
            environment.fill_random(&mut bytes).unwrap();
            (u64::from_le_bytes(bytes) % below as u64) as usize
        };
        let whole = sample();
        let began = Instant::now();
        let mut refused = 0;
        for _ in 0..20_000 {
            let mut bytes = whole.clone();
            for _ in 0..=random(3) {
                let at = random(bytes.len());
                bytes[at] = if random(2) == 0 { random(256) as u8 } else { b"0179=\n /.x"[random(10)] };
                let block = at / BLOCK * BLOCK;
                let header = tar::Header::from_byte_slice(&bytes[block..block + BLOCK]);
                if header.as_gnu().is_some() {
                    let mut header = header.clone();
                    header.set_cksum();
                    bytes[block..block + BLOCK].copy_from_slice(header.as_bytes());
                }
            }
            if random(4) == 0 {
                bytes.truncate(random(bytes.len()));
            }
            refused += u32::from(read(&bytes).is_err());
        }
        println!("refused={refused} of 20000 in {:?}", began.elapsed());
        assert!(refused > 1000, "{refused}");
    }
}
