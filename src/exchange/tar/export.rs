//! Writes a part of an archive as a tar stream: complete, or one directory for sharing with other
//! people; and packs a host directory for sharing.

use std::collections::HashMap;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::vec;

use lockbox_terminal::display;
use rustix::fs::{CWD, FileType, Mode, OFlags, Stat};
use tar::{EntryType, Header};

use super::pax::{self, SparseMap};
use super::{ACLS, BLOCK, MAX_RECORDS, RECORD, XATTR};
use crate::error::{Error, Result};
use crate::exchange::attributes::{HostName, HostVersion, host_error, read_at, split_names, timestamps, version};
use crate::exchange::staging_dir::open_directory;
use crate::exchange::walk::{ArchiveWalk, ContentPrefetch, TreeWalk, WalkStep};
use crate::exchange::{CopyCounts, CopyTally, Entries, Filter, ListingEntry, Progress, path_ops, split_device_number};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, mode};
use crate::storage::names;

/// Size of one read from the archive, in bytes.
const PIECE: usize = 1 << 20;
/// Longest name in a header; longer ones get a pax record.
const MAX_SHORT_NAME: usize = 100;
/// Largest owner and size that seven and eleven octal digits hold; larger ones get a pax record.
const MAX_OWNER: u32 = 0o7_777_777;
const MAX_SIZE: u64 = 0o77_777_777_777;
/// End mark and padding.
static ZEROS: [u8; RECORD as usize] = [0; RECORD as usize];

/// Result of an export.
#[derive(Debug, Default)]
pub struct TarExport {
    pub copied: CopyCounts,
    /// Skipped sockets, which a tar cannot represent.
    pub sockets: u64,
}

/// Writes each path recursively, under its path from the root; without paths, everything.
///
/// # Errors
/// `Invalid` for a missing path, before anything is written. Later errors leave a stream without
/// end mark, which readers reject as incomplete.
pub fn export_tar(
    fs: &FileSystem,
    paths: &[Vec<u8>],
    filter: &Filter,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(&Progress<'_>),
) -> Result<TarExport> {
    let everything = [Vec::new()];
    let mut tops = Vec::new();
    for requested in if paths.is_empty() { &everything } else { paths } {
        let attributes = path_ops::resolve_argument(fs, requested)?;
        tops.push((path_ops::components(requested)?.join(&b'/'), attributes));
    }
    let trees = tops.iter().map(|(_, attributes)| *attributes);
    let mut export = Exporter::new(fs, trees, filter, out, progress);
    for (path, attributes) in tops {
        export.top(path, &attributes)?;
    }
    export.out.end()?;
    Ok(TarExport { copied: export.copied, sockets: export.skipped })
}

/// Writes the directory at `path` for sharing: below `name`, and without local metadata, see
/// [`PaxMember::bare`].
///
/// # Errors
/// `Invalid` for a missing path and `NotDirectory`, before anything is written; later ones as for
/// [`export_tar`].
pub fn export_tree(fs: &FileSystem, path: &[u8], name: &[u8], out: &mut dyn Write) -> Result<PackReport> {
    let attributes = path_ops::resolve_argument(fs, path)?;
    if !attributes.is_directory() {
        return Err(Error::NotDirectory);
    }
    let (filter, mut progress) = (Filter::default(), |_: &Progress<'_>| {});
    let mut export =
        Exporter { bare: true, ..Exporter::new(fs, [attributes].into_iter(), &filter, out, &mut progress) };
    export.top(name.to_vec(), &attributes)?;
    export.out.end()?;
    Ok(PackReport { copied: export.copied, special: export.skipped })
}

/// Result of packing a directory for sharing.
#[derive(Debug, Default)]
pub struct PackReport {
    pub copied: CopyCounts,
    /// Skipped sockets, FIFOs and devices.
    pub special: u64,
}

struct CountingWriter<'a> {
    out: &'a mut dyn Write,
    written: u64,
}

impl<'a> CountingWriter<'a> {
    fn new(out: &'a mut dyn Write) -> CountingWriter<'a> {
        CountingWriter { out, written: 0 }
    }

    fn end(&mut self) -> Result<()> {
        self.bytes(&ZEROS[..2 * BLOCK])?;
        self.fill(RECORD)?;
        self.out.flush().map_err(|error| Error::io("cannot write the tar", error))
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|error| Error::io("cannot write the tar", error))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Writes zeros up to the next multiple, at most a record.
    fn fill(&mut self, multiple: u64) -> Result<()> {
        self.bytes(&ZEROS[..(self.written.next_multiple_of(multiple) - self.written) as usize])
    }
}

struct Exporter<'a> {
    fs: &'a FileSystem,
    prefetch: ContentPrefetch<'a>,
    filter: &'a Filter,
    progress: &'a mut dyn FnMut(&Progress<'_>),
    out: CountingWriter<'a>,
    copied: CopyCounts,
    /// Objects that a tar cannot represent, or that are not shared.
    skipped: u64,
    tally: CopyTally,
    /// First paths of files with several hard links.
    links: HashMap<Ino, Vec<u8>>,
    /// Length of the path prefix that the user named; the filter's paths begin below it.
    top_length: usize,
    /// For sharing: without local metadata.
    bare: bool,
}

impl<'a> Exporter<'a> {
    fn new(
        fs: &'a FileSystem,
        trees: impl Iterator<Item = Attributes>,
        filter: &'a Filter,
        out: &'a mut dyn Write,
        progress: &'a mut dyn FnMut(&Progress<'_>),
    ) -> Exporter<'a> {
        Exporter {
            fs,
            // The filter's paths begin below each tree.
            prefetch: ContentPrefetch::new(fs, filter, trees.map(|attributes| (Vec::new(), attributes))),
            filter,
            progress,
            out: CountingWriter::new(out),
            copied: CopyCounts::default(),
            skipped: 0,
            tally: CopyTally::default(),
            links: HashMap::new(),
            top_length: 0,
            bare: false,
        }
    }

    fn top(&mut self, mut path: Vec<u8>, attributes: &Attributes) -> Result<()> {
        self.top_length = path.len() + usize::from(!path.is_empty());
        self.object(&path, attributes, None)?;
        if !attributes.is_directory() {
            return Ok(());
        }
        // Content of files that the filter excludes is not read.
        let list = if self.filter.is_empty() { Entries::with_contents } else { Entries::new };
        let mut tree = ArchiveWalk::new();
        tree.enter(&path, list(self.fs, attributes.ino)?, ());
        while let Some(step) = tree.next(&mut path) {
            let WalkStep::Entry(ListingEntry { attributes, content, .. }, _) = step? else { continue };
            if self.filter.excludes(&path[self.top_length..], attributes.is_directory()) {
                continue;
            }
            self.object(&path, attributes, content)?;
            if attributes.is_directory() {
                let below = list(self.fs, attributes.ino)?;
                tree.enter(&path, below, ());
            }
        }
        Ok(())
    }

    /// Writes one object; `content` is that of a file that was read ahead.
    fn object(&mut self, path: &[u8], attributes: &Attributes, content: Option<&[u8]>) -> Result<()> {
        self.tally.start_next();
        self.prefetch.advance(self.tally.met.bytes);
        self.report_progress(path, 0);
        self.tally.add_stored_file(attributes);
        let kind = attributes.mode & mode::TYPE;
        let is_shared = matches!(kind, mode::REGULAR | mode::DIRECTORY | mode::SYMLINK);
        if kind == mode::SOCKET || self.bare && !is_shared {
            self.skipped += 1;
            return Ok(());
        }
        if kind != mode::DIRECTORY && attributes.links > 1 {
            if let Some(first) = self.links.get(&attributes.ino).cloned() {
                self.copied.links += 1;
                let attributes = if self.bare { &PaxMember::bare(attributes) } else { attributes };
                return PaxMember::new(path, EntryType::Link, attributes).linked_to(first).write(&mut self.out);
            }
            self.links.insert(attributes.ino, path.to_vec());
        }
        let member = |kind| match self.bare {
            true => Ok(PaxMember::new(path, kind, &PaxMember::bare(attributes))),
            false => PaxMember::new(path, kind, attributes).with_attributes(self.fs, attributes.ino),
        };
        match kind {
            mode::REGULAR => {
                let member = member(EntryType::Regular)?;
                self.copied.files += 1;
                match content {
                    Some(content) => self.read_file(member, path, content),
                    None => self.file(member, path, attributes),
                }
            }
            mode::DIRECTORY => {
                self.copied.directories += 1;
                let name = if path.is_empty() { b"./".to_vec() } else { [path, b"/"].concat() };
                PaxMember { name, ..member(EntryType::Directory)? }.write(&mut self.out)
            }
            mode::SYMLINK => {
                self.copied.symlinks += 1;
                member(EntryType::Symlink)?.linked_to(self.fs.read_link(attributes.ino)?).write(&mut self.out)
            }
            mode::FIFO => {
                self.copied.others += 1;
                member(EntryType::Fifo)?.write(&mut self.out)
            }
            mode::CHARACTER | mode::BLOCK => {
                self.copied.others += 1;
                let kind = if kind == mode::BLOCK { EntryType::Block } else { EntryType::Char };
                let device = Some(split_device_number(attributes.rdev));
                PaxMember { device, ..member(kind)? }.write(&mut self.out)
            }
            _ => Err(Error::damaged(format!("an object of unknown type: mode={:o}", attributes.mode))),
        }
    }

    fn read_file(&mut self, member: PaxMember, path: &[u8], content: &[u8]) -> Result<()> {
        PaxMember { size: content.len() as u64, ..member }.write(&mut self.out)?;
        self.out.bytes(content)?;
        if !content.is_empty() {
            self.report_progress(path, content.len() as u64);
        }
        self.copied.bytes += content.len() as u64;
        self.out.fill(BLOCK as u64)
    }

    fn file(&mut self, mut member: PaxMember, path: &[u8], attributes: &Attributes) -> Result<()> {
        let map = self.map(attributes)?;
        let stored: u64 = map.parts.iter().map(|(_, length)| length).sum();
        let whole = stored == map.size;
        let lines = if whole { Vec::new() } else { map.to_lines() };
        if !whole {
            let (directory, name) = match path.iter().rposition(|&byte| byte == b'/') {
                Some(slash) => path.split_at(slash + 1),
                None => (&b""[..], path),
            };
            // Name under which programs without support for sparse files extract it.
            member.name = [directory, b"GNUSparseFile.0/", name].concat();
            member.name.truncate(MAX_SHORT_NAME);
            member.record("GNU.sparse.major", b"1");
            member.record("GNU.sparse.minor", b"0");
            member.record("GNU.sparse.name", path);
            member.record("GNU.sparse.realsize", map.size.to_string().as_bytes());
        }
        member.size = lines.len() as u64 + stored;
        member.write(&mut self.out)?;
        self.out.bytes(&lines)?;
        for &(start, length) in &map.parts {
            let mut offset = start;
            while offset < start + length {
                let wanted = usize::try_from(start + length - offset).unwrap_or(PIECE).min(PIECE);
                let piece = self.fs.read(attributes.ino, offset, wanted)?;
                if piece.is_empty() {
                    return Err(Error::damaged(format!("the file ends early: size={} end={offset}", map.size)));
                }
                self.out.bytes(&piece)?;
                offset += piece.len() as u64;
                self.report_progress(path, offset);
            }
        }
        self.copied.bytes += map.size;
        self.out.fill(BLOCK as u64)
    }

    fn report_progress(&mut self, path: &[u8], within: u64) {
        let copied = self.copied.progress(path, within);
        (self.progress)(&Progress { passed: self.tally.passed(within), ..copied });
    }

    /// Returns the data ranges of a file. A hole at the end adds an empty one, as in GNU tar.
    fn map(&self, attributes: &Attributes) -> Result<SparseMap> {
        let (ino, size) = (attributes.ino, attributes.size);
        let mut parts = Vec::new();
        let mut end = 0;
        while end < size {
            let start = match self.fs.next_data(ino, end) {
                Err(Error::NoSuchRange) => break,
                start => start?,
            };
            end = self.fs.next_hole(ino, start)?;
            parts.push((start, end - start));
        }
        if end < size {
            parts.push((size, 0));
        }
        Ok(SparseMap { parts, size })
    }
}

/// Header with its pax records.
struct PaxMember {
    name: Vec<u8>,
    kind: EntryType,
    attributes: Attributes,
    link: Vec<u8>,
    device: Option<(u32, u32)>,
    size: u64,
    records: Vec<u8>,
}

impl PaxMember {
    /// Returns the attributes without owners, access time, and bits that grant privileges.
    fn bare(attributes: &Attributes) -> Attributes {
        let mode = attributes.mode & (mode::TYPE | mode::ACCESS);
        Attributes { mode, uid: 0, gid: 0, atime: attributes.mtime, ..*attributes }
    }

    fn new(path: &[u8], kind: EntryType, attributes: &Attributes) -> PaxMember {
        let attributes = *attributes;
        let mut member = PaxMember {
            name: path.to_vec(),
            kind,
            attributes,
            link: Vec::new(),
            device: None,
            size: 0,
            records: Vec::new(),
        };
        member.record("mtime", pax::time(attributes.mtime).as_bytes());
        member.record("atime", pax::time(attributes.atime).as_bytes());
        member
    }

    fn record(&mut self, key: &str, value: &[u8]) {
        pax::push(&mut self.records, key.as_bytes(), value);
    }

    fn linked_to(mut self, target: Vec<u8>) -> PaxMember {
        self.link = target;
        self
    }

    fn with_attributes(mut self, fs: &FileSystem, ino: Ino) -> Result<PaxMember> {
        for name in split_names(&fs.list_xattrs(ino)?) {
            let value = fs.xattr(ino, name)?;
            if let Some((key, _)) = ACLS.iter().find(|(_, list)| *list == name) {
                let text =
                    pax::acl_to_text(&value).ok_or_else(|| Error::damaged("an access control list is malformed"))?;
                self.record(key, text.as_bytes());
            } else {
                pax::push(&mut self.records, &[XATTR.as_bytes(), &pax::escaped(name)].concat(), &value);
            }
            if self.records.len() as u64 > MAX_RECORDS / 2 {
                return Err(Error::Unsupported(format!("{}: too many attributes for a tar", display(&self.name))));
            }
        }
        Ok(self)
    }

    /// Writes the records and the header. Fields that do not fit there are zero, because a pax
    /// record has the value.
    fn write(mut self, out: &mut CountingWriter<'_>) -> Result<()> {
        let Attributes { uid, gid, mtime, .. } = self.attributes;
        for (key, name) in [("path", &self.name), ("linkpath", &self.link)] {
            if name.len() > MAX_SHORT_NAME {
                pax::push(&mut self.records, key.as_bytes(), name);
            }
        }
        for (key, id) in [("uid", uid), ("gid", gid)] {
            if id > MAX_OWNER {
                self.record(key, id.to_string().as_bytes());
            }
        }
        if self.size > MAX_SIZE {
            self.record("size", self.size.to_string().as_bytes());
        }
        let mut records = Header::new_ustar();
        put_name(&mut records.as_old_mut().name, b"././@PaxHeader");
        records.set_entry_type(EntryType::XHeader);
        records.set_mode(0o644);
        records.set_size(self.records.len() as u64);
        records.set_cksum();
        out.bytes(records.as_bytes())?;
        out.bytes(&self.records)?;
        out.fill(BLOCK as u64)?;
        let mut header = Header::new_ustar();
        put_name(&mut header.as_old_mut().name, &self.name);
        put_name(&mut header.as_old_mut().linkname, &self.link);
        header.set_entry_type(self.kind);
        header.set_mode(self.attributes.mode & mode::PERMISSIONS);
        header.set_uid(if uid > MAX_OWNER { 0 } else { uid.into() });
        header.set_gid(if gid > MAX_OWNER { 0 } else { gid.into() });
        header.set_mtime(u64::try_from(mtime.seconds).unwrap_or(0).min(MAX_SIZE));
        header.set_size(if self.size > MAX_SIZE { 0 } else { self.size });
        let (major, minor) = self.device.unwrap_or_default();
        let number = |error| Error::io("cannot write a device number", error);
        header.set_device_major(major).map_err(number)?;
        header.set_device_minor(minor).map_err(number)?;
        header.set_cksum();
        out.bytes(header.as_bytes())
    }
}

fn put_name(field: &mut [u8; MAX_SHORT_NAME], name: &[u8]) {
    let length = name.len().min(MAX_SHORT_NAME);
    field[..length].copy_from_slice(&name[..length]);
}

/// Size of one read from the host, in bytes.
const PACK_PIECE: usize = 256 << 10;
/// Maximum bytes of a file with unreported size, such as one of /proc: its size precedes its
/// content, which must therefore be buffered.
const MAX_UNSTATED: usize = 64 << 20;

/// Writes `directory` recursively, under `name`; symbolic links are not followed. Any concurrent
/// change is an error, because the result could be an inconsistent mixture.
///
/// # Errors
/// `InUse` naming the changed object, and failures of the host. A stream that ends by an error has
/// no end mark.
pub fn pack_tree(directory: &Path, name: &[u8], out: &mut dyn Write) -> Result<PackReport> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top =
        rustix::fs::openat(CWD, directory, flags, Mode::empty()).map_err(host_error("cannot open the directory"))?;
    let mut pack = Packer { out: CountingWriter::new(out), report: PackReport::default(), links: HashMap::new() };
    let mut path = name.to_vec();
    let (names, directory) = pack.enter(top, &path)?;
    let mut walk = TreeWalk::new();
    walk.enter(&path, names, directory);
    while let Some(step) = walk.step(&mut path, |names| names.next().map(Ok), |name| name) {
        match step? {
            WalkStep::Entry(name, directory) => {
                let below = pack.entry(&directory.state.host, &name, &path).map_err(|error| named(&path, error))?;
                if let Some((names, directory)) = below {
                    walk.enter(&path, names, directory);
                }
            }
            WalkStep::Leave(directory) => {
                if version(&stat_of(&directory.state.host)?) != directory.state.before {
                    return Err(changed(&path));
                }
            }
        }
    }
    pack.out.end()?;
    Ok(pack.report)
}

fn stat_of(file: &OwnedFd) -> Result<Stat> {
    rustix::fs::fstat(file).map_err(host_error("cannot examine it"))
}

fn changed(path: &[u8]) -> Error {
    Error::InUse(format!("{} changed while it was read", display(path)))
}

fn named(path: &[u8], error: Error) -> Error {
    match error {
        Error::Io { context, source } if !context.starts_with("cannot write the tar") => {
            Error::Io { context: format!("{}: {context}", display(path)), source }
        }
        error => error,
    }
}

struct PackedDirectory {
    host: OwnedFd,
    before: HostVersion,
}

/// Directory to descend into, with the names in it.
type PackedLevel = (vec::IntoIter<Vec<u8>>, PackedDirectory);

struct Packer<'a> {
    out: CountingWriter<'a>,
    report: PackReport,
    /// First paths of files with several hard links.
    links: HashMap<HostVersion, Vec<u8>>,
}

impl Packer<'_> {
    fn enter(&mut self, host: OwnedFd, path: &[u8]) -> Result<PackedLevel> {
        let stat = stat_of(&host)?;
        let mut names = names(&host).map_err(host_error("cannot read the directory"))?;
        names.sort();
        let name = [path, b"/"].concat();
        PaxMember { name, ..PaxMember::new(path, EntryType::Directory, &bare(&stat)) }.write(&mut self.out)?;
        self.report.copied.directories += 1;
        Ok((names.into_iter(), PackedDirectory { host, before: version(&stat) }))
    }

    fn entry(&mut self, at: &OwnedFd, name: &[u8], path: &[u8]) -> Result<Option<PackedLevel>> {
        let host = HostName { directory: at.as_fd(), name, follow: false };
        let stat = host.stat().map_err(host_error("cannot examine it"))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => self.enter(open_directory(at, name)?, path).map(Some),
            FileType::Symlink => {
                let target = host.link_target()?;
                self.report.copied.symlinks += 1;
                let member = PaxMember::new(path, EntryType::Symlink, &bare(&stat)).linked_to(target);
                member.write(&mut self.out).map(|()| None)
            }
            FileType::RegularFile => self.file(at, name, path).map(|()| None),
            _ => {
                self.report.special += 1;
                Ok(None)
            }
        }
    }

    fn file(&mut self, at: &OwnedFd, name: &[u8], path: &[u8]) -> Result<()> {
        let host = HostName { directory: at.as_fd(), name, follow: false };
        let file = host.open(OFlags::empty()).map_err(host_error("cannot open it"))?;
        let stat = stat_of(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(changed(path));
        }
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&version(&stat)) {
                self.report.copied.links += 1;
                let member = PaxMember::new(path, EntryType::Link, &bare(&stat)).linked_to(first.clone());
                return member.write(&mut self.out);
            }
            self.links.insert(version(&stat), path.to_vec());
        }
        let unstated = if stat.st_size == 0 { unstated_content(&file)? } else { Vec::new() };
        let size = u64::try_from(stat.st_size).unwrap_or_default().max(unstated.len() as u64);
        PaxMember { size, ..PaxMember::new(path, EntryType::Regular, &bare(&stat)) }.write(&mut self.out)?;
        self.out.bytes(&unstated)?;
        let mut piece = vec![0; PACK_PIECE];
        let mut at = unstated.len() as u64;
        loop {
            let length = read_at(&file, &mut piece, at)?;
            at += length as u64;
            // The member must have exactly the stated size, and that of the file.
            if at > size || (length == 0 && at < size) {
                return Err(changed(path));
            }
            if length == 0 {
                break;
            }
            self.out.bytes(&piece[..length])?;
        }
        self.out.fill(BLOCK as u64)?;
        if version(&stat_of(&file)?) != version(&stat) {
            return Err(changed(path));
        }
        self.report.copied.files += 1;
        self.report.copied.bytes += size;
        Ok(())
    }
}

/// Returns the content of a file with unreported size.
fn unstated_content(file: &OwnedFd) -> Result<Vec<u8>> {
    let (mut content, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        match read_at(file, &mut piece, content.len() as u64)? {
            0 => return Ok(content),
            length => content.extend_from_slice(&piece[..length]),
        }
        if content.len() > MAX_UNSTATED {
            return Err(Error::invalid(format!("it states no size and has more than {} MiB", MAX_UNSTATED >> 20)));
        }
    }
}

fn bare(stat: &Stat) -> Attributes {
    let (_, mtime) = timestamps(stat);
    PaxMember::bare(&Attributes { mode: stat.st_mode, mtime, ..Attributes::default() })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// Does something when a part of the stream is written.
    struct Meddling<F: FnMut(&[u8])>(F);

    impl<F: FnMut(&[u8])> Write for Meddling<F> {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            (self.0)(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nothing_is_told_of_owners_and_special_files_are_left_out() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("folder");
        fs::create_dir_all(folder.join("in")).unwrap();
        fs::write(folder.join("in/run"), "#!").unwrap();
        fs::set_permissions(folder.join("in/run"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::hard_link(folder.join("in/run"), folder.join("same")).unwrap();
        symlink("in/run", folder.join("link")).unwrap();
        rustix::fs::mknodat(CWD, folder.join("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let mut tar = Vec::new();
        let packed = pack_tree(&folder, b"given", &mut tar).unwrap();
        let counts = (packed.copied.files, packed.copied.directories, packed.copied.links, packed.copied.symlinks);
        assert_eq!((counts, packed.special), ((1, 2, 1, 1), 1));
        let mut found = Vec::new();
        for entry in tar::Archive::new(&tar[..]).entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.gid().unwrap()), (0, 0));
            assert_eq!(header.mode().unwrap() & 0o7000, 0);
            found.push(String::from_utf8(entry.path_bytes().into_owned()).unwrap());
        }
        assert_eq!(found, ["given/", "given/in/", "given/in/run", "given/link", "given/same"]);
    }

    #[test]
    fn a_file_that_states_no_size_is_packed_whole() {
        let content = fs::read("/proc/version").unwrap();
        let file = fs::File::open("/proc/version").unwrap();
        assert_eq!(file.metadata().unwrap().len(), 0);
        let mut tar = Vec::new();
        let mut pack =
            Packer { out: CountingWriter::new(&mut tar), report: PackReport::default(), links: HashMap::new() };
        let at = rustix::fs::open("/proc", OFlags::DIRECTORY, Mode::empty()).unwrap();
        pack.file(&at, b"version", b"given").unwrap();
        pack.out.end().unwrap();
        let mut archive = tar::Archive::new(&tar[..]);
        let mut packed = Vec::new();
        archive.entries().unwrap().next().unwrap().unwrap().read_to_end(&mut packed).unwrap();
        assert!(packed == content && !content.is_empty());
    }

    #[test]
    fn what_changes_meanwhile_is_told() {
        type Change = fn(&Path);
        let changes: [(&str, Change); 4] = [
            ("given/big", |folder| fs::write(folder.join("big"), "x").unwrap()),
            ("given/big", |folder| {
                fs::File::options().append(true).open(folder.join("big")).unwrap().write_all(b"x").unwrap();
            }),
            ("given", |folder| fs::write(folder.join("another"), "x").unwrap()),
            ("given", |folder| fs::rename(folder.join("later"), folder.join("sooner")).unwrap()),
        ];
        for (what, change) in changes {
            let place = tempfile::tempdir().unwrap();
            let folder = place.path().join("folder");
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("big"), vec![b'x'; 3 * PACK_PIECE]).unwrap();
            fs::write(folder.join("later"), "x").unwrap();
            let mut done = false;
            let mut out = Meddling(|bytes: &[u8]| {
                if bytes.len() == PACK_PIECE && !done {
                    done = true;
                    change(&folder);
                }
            });
            let told = pack_tree(&folder, b"given", &mut out).unwrap_err().to_string();
            assert!(told.contains("changed while it was read") || told.contains("later"), "{what}: {told}");
            assert!(told.contains(what), "{what}: {told}");
        }
    }
}
