//! Verifies the whole live tree: entries, inodes, links, extents and attributes agree with each other.
//!
//! Memory grows with the archive, about 64 bytes per inode: names can only be counted when all directories have been seen.

mod names;

use std::collections::{HashMap, HashSet};

use super::acl::{Acl, AclKind};
use super::directory::{self, DIRECTORY_TYPE, DirectoryRecord, FIRST_SEQUENCE, Target, file_type, name_hash};
use super::ops::{BIRTH, MAX_TARGET, value_of_entry};
use super::types::mode;
use crate::error::{Error, Result};
use crate::format::values::{
    Extent, InodeValue, NO_TRIM, XATTR_PIECE, XattrEntry, decode_index, decode_list, decode_xattrs, inode_flags,
};
use crate::format::{Generation, Ino, Key, MAX_DATA, MAX_INO, MAX_OFFSET, kind};
use crate::txn::{DataPages, Finding, FindingKind, Lost, Severity, View, Volume};

/// More than anybody reads; what follows from one damaged node may be millions.
const MAX_FINDINGS: usize = 1000;

/// What the walk over the live tree counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StructureCounts {
    pub(crate) inodes: u64,
    pub(crate) directories: u64,
    /// Plain bytes of all files and symlinks, without holes.
    pub(crate) bytes: u64,
}

/// What the walk found.
pub(crate) struct Structure {
    pub(crate) counts: StructureCounts,
    pub(crate) findings: Vec<Finding>,
    /// First blocks of the pages of file data that are told to be lost, of which file.
    pub(crate) lost_pages: HashSet<u64>,
}

/// How much of the file data is read.
#[derive(Clone, Copy)]
pub(crate) enum Reading<'a> {
    Nothing,
    /// Everything that an extent names.
    All,
    /// What an audit did not find sound already.
    But(&'a DataPages),
}

/// What is remembered of an inode until all names are counted.
#[derive(Default)]
struct Known {
    /// There is an inode record (else only names).
    exists: bool,
    file_type: u8,
    links: u32,
    /// Names that were found, and the type that they say.
    names: u32,
    named_type: Option<u8>,
    /// Of a directory: the parent that it says, the one where its name was found, the subdirectories found in it.
    parent: Ino,
    named_in: Ino,
    subdirectories: u32,
}

/// The records of the object that the scan is at.
#[derive(Default)]
struct Object {
    ino: Ino,
    inode: Option<InodeValue>,
    inline: bool,
    extents: u64,
    /// Some of them lie before the trim offset; what lies behind it is as good as gone.
    shows_extents: bool,
    /// End of the extent before.
    covered: u64,
    bytes: u64,
    /// What is known of a symbolic link's target, in full checks and when it lies in the tree.
    target: Vec<u8>,
    indexed: u64,
    listed: u64,
    has_xattrs: bool,
    /// Attribute values in pieces: piece id -> bytes that are still missing.
    pieces: HashMap<u32, u64>,
}

struct Walk<'a> {
    volume: &'a Volume,
    /// Key of the name hashes.
    name_key: &'a [u8; 16],
    view: View<'a>,
    reading: Reading<'a>,
    /// Nothing that is there can have been made later.
    newest: Generation,
    /// Takes the data that is read only to see that it can be.
    buffer: Vec<u8>,
    known: HashMap<Ino, Known>,
    orphans: HashSet<Ino>,
    trims: HashSet<Ino>,
    object: Object,
    counts: StructureCounts,
    findings: Vec<Finding>,
    lost_pages: HashSet<u64>,
}

/// See [`super::FileSystem::walk_structure`].
pub(super) fn walk_structure(
    volume: &Volume,
    name_key: &[u8; 16],
    reading: Reading<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Structure> {
    let state = volume.state();
    let view = volume.view(&state);
    let mut walk = Walk {
        volume,
        name_key,
        view,
        reading,
        newest: volume.open_generation(),
        buffer: Vec::new(),
        known: HashMap::new(),
        orphans: HashSet::new(),
        trims: HashSet::new(),
        object: Object::default(),
        counts: StructureCounts::default(),
        findings: Vec::new(),
        lost_pages: HashSet::new(),
    };
    let mut lost = Vec::new();
    view.scan_surviving(
        &mut |key, value| {
            if Ino(key.object) != walk.object.ino {
                walk.finish_object();
                walk.object.ino = Ino(key.object);
                if walk.counts.inodes.is_multiple_of(1024) {
                    progress(walk.counts.inodes, state.inodes());
                }
            }
            match walk.record(key, value) {
                Err(Error::Damaged(detail)) => {
                    walk.find(Finding::new(FindingKind::Record, Severity::Wrong, detail).of_inode(Ino(key.object)));
                    Ok(())
                }
                other => other,
            }
        },
        &mut |node| {
            let (lower, upper) = (node.lower, node.upper);
            let last = upper.object - u64::from((upper.kind, upper.sub) == (0, 0) && upper.object > lower.object);
            let (first, last) = (lower.object, last.min(MAX_INO));
            let text = format!("records of inodes {first} to {last} cannot be read: {}", node.error);
            let finding = Finding::new(FindingKind::RecordsLost, Severity::Lost, text);
            lost.push(finding.on_page(&node.pointer).losing(Lost::Inodes(Ino(first), Ino(last))));
            Ok(())
        },
    )?;
    walk.finish_object();
    for finding in lost {
        walk.find(finding);
    }
    walk.judge_names();
    walk.judge_reachability();
    if walk.counts.inodes != state.inodes() {
        let text = format!("the archive counts {} inodes, but has {}", state.inodes(), walk.counts.inodes);
        walk.find(Finding::new(FindingKind::Counter, Severity::Minor, text));
    }
    walk.name_findings()?;
    progress(state.inodes(), state.inodes());
    let Walk { counts, findings, lost_pages, .. } = walk;
    Ok(Structure { counts, findings, lost_pages })
}

impl Walk<'_> {
    fn find(&mut self, finding: Finding) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        } else if self.findings.len() == MAX_FINDINGS {
            self.findings.push(Finding::new(FindingKind::More, Severity::Wrong, "there are more findings"));
        }
    }

    fn find_of(&mut self, kind: FindingKind, ino: Ino, detail: &str) {
        self.find(Finding::new(kind, Severity::Wrong, detail).of_inode(ino));
    }

    fn find_here(&mut self, kind: FindingKind, detail: &str) {
        self.find_of(kind, self.object.ino, detail);
    }

    fn record(&mut self, key: Key, value: &[u8]) -> Result<()> {
        if key.object == 0 {
            match key.kind {
                kind::ORPHAN => drop(self.orphans.insert(Ino(key.sub))),
                kind::TRIM => drop(self.trims.insert(Ino(key.sub))),
                _ => {
                    let text = format!("unknown record of kind {}", key.kind);
                    self.find(Finding::new(FindingKind::Record, Severity::Wrong, text));
                }
            }
            if !value.is_empty() {
                let text = format!("a record of kind {} has a value", key.kind);
                self.find(Finding::new(FindingKind::Record, Severity::Wrong, text));
            }
            return Ok(());
        }
        if matches!(key.kind, kind::INODE | kind::INLINE) && key.sub != 0 {
            self.find_here(FindingKind::Record, "has a record with a key that no writer gives it");
            return Ok(());
        }
        if key.kind == kind::INODE {
            self.object.inode = Some(InodeValue::decode(value)?);
            return Ok(());
        }
        if self.object.inode.is_none() {
            self.find_here(FindingKind::Inode, "has records, but no inode");
            // Said once per object.
            self.object.inode = Some(InodeValue { trim: NO_TRIM, ..InodeValue::default() });
        }
        match key.kind {
            kind::INLINE => {
                self.object.inline = true;
                self.object.bytes += value.len() as u64;
                if self.is_symlink() {
                    self.object.target.extend_from_slice(value);
                }
            }
            kind::XATTR => self.xattrs(key, value)?,
            kind::XATTR_PIECE => self.xattr_piece(key, value),
            kind::DIR_INDEX => self.index(key, value)?,
            kind::DIR_LIST => self.entry(key, value)?,
            kind::EXTENT => self.extent(key, value)?,
            _ => self.find_here(FindingKind::Record, "has a record of an unknown kind"),
        }
        Ok(())
    }

    fn xattrs(&mut self, key: Key, value: &[u8]) -> Result<()> {
        self.object.has_xattrs = true;
        let entries = decode_xattrs(value)?;
        if entries.is_empty() {
            self.find_here(FindingKind::Attribute, "has an empty attribute record");
        }
        // A record has the few names of one hash, so a name that is there twice is there twice in it.
        if entries.iter().enumerate().any(|(at, entry)| entries[..at].iter().any(|other| other.name == entry.name)) {
            self.find_here(FindingKind::Attribute, "has two attributes of one name");
        }
        for entry in entries {
            if name_hash(self.name_key, self.object.ino, &entry.name) != key.sub {
                self.find_here(FindingKind::Attribute, "an attribute is not where its name's hash says");
            }
            if entry.name == BIRTH {
                self.find_here(FindingKind::Attribute, "an attribute has the name under which the birth time is told");
            }
            if entry.piece != 0 && self.object.pieces.insert(entry.piece, u64::from(entry.length)).is_some() {
                self.find_here(FindingKind::Attribute, "two attributes share pieces");
            }
            if let Some(kind) = AclKind::of_name(&entry.name) {
                self.list(kind, entry)?;
            }
        }
        Ok(())
    }

    /// What `acl` promises of stored lists.
    fn list(&mut self, kind: AclKind, entry: XattrEntry) -> Result<()> {
        let mode = self.object.inode.map_or(0, |inode| inode.mode);
        let value = value_of_entry(self.view, self.object.ino, entry)?;
        let (file_type, bits) = (mode & mode::TYPE, mode & mode::ACCESS);
        match Acl::parse(&value) {
            Ok(Some(list)) if kind == AclKind::Access && (list.is_minimal() || list.mode_bits() != bits) => {
                self.find_here(FindingKind::Attribute, "its access control list disagrees with its mode");
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => self.find_here(FindingKind::Attribute, "has a malformed access control list"),
        }
        if file_type == mode::SYMLINK || (kind == AclKind::Default && file_type != mode::DIRECTORY) {
            self.find_here(FindingKind::Attribute, "has an access control list that its type cannot have");
        }
        Ok(())
    }

    fn xattr_piece(&mut self, key: Key, value: &[u8]) {
        let missing = self.object.pieces.get_mut(&((key.sub >> 32) as u32));
        // All pieces but the last are full, so what is left always is a whole number of them and the last.
        match missing {
            Some(missing) if value.len() as u64 == (*missing).min(XATTR_PIECE as u64) && !value.is_empty() => {
                *missing -= value.len() as u64;
            }
            _ => self.find_here(FindingKind::Attribute, "a piece of an attribute is out of place"),
        }
    }

    fn index(&mut self, key: Key, value: &[u8]) -> Result<()> {
        let entries = decode_index(value)?;
        if entries.is_empty() {
            self.find_here(FindingKind::Entry, "has an empty index record");
        }
        for entry in &entries {
            self.object.indexed += 1;
            if name_hash(self.name_key, self.object.ino, &entry.name) != key.sub {
                self.find_here(FindingKind::Entry, "an entry is not where its name's hash says");
            }
        }
        Ok(())
    }

    /// A list record, with its index entry: as many of either, and each list record with its own index entry, is one to one.
    fn entry(&mut self, key: Key, value: &[u8]) -> Result<()> {
        let entry = decode_list(value)?;
        let directory = self.object.ino;
        self.object.listed += 1;
        let next = self.object.inode.map_or(0, |inode| inode.next_sequence);
        if !(FIRST_SEQUENCE..next).contains(&key.sub) {
            self.find_here(FindingKind::Entry, "an entry's sequence number is out of range");
        }
        let target = Target { ino: entry.ino, file_type: entry.file_type };
        let indexed = directory::find(self.view, self.name_key, directory, entry.name)?;
        if indexed != Some(DirectoryRecord { target, sequence: key.sub }) {
            self.find_here(FindingKind::Entry, "an entry's two records disagree");
        }
        if target.is_directory() {
            self.known.entry(directory).or_default().subdirectories += 1;
        }
        let known = self.known.entry(target.ino).or_default();
        known.names += 1;
        known.named_in = directory;
        if known.named_type.is_some_and(|other| other != target.file_type) {
            self.find_of(FindingKind::Name, target.ino, "its names say different types");
        } else {
            known.named_type = Some(target.file_type);
        }
        Ok(())
    }

    fn extent(&mut self, key: Key, value: &[u8]) -> Result<()> {
        let extent = Extent::decode(value)?;
        let trim = self.object.inode.map_or(NO_TRIM, |inode| inode.trim);
        let (offset, length) = (key.sub, u64::from(extent.length));
        let end = offset.saturating_add(length);
        self.object.extents += 1;
        self.object.shows_extents |= offset < trim;
        if offset < self.object.covered {
            self.find_here(FindingKind::Extent, "extents overlap");
        }
        if end > MAX_OFFSET {
            self.find_here(FindingKind::Extent, "an extent reaches beyond the greatest offset");
        }
        if length == 0 || u64::from(extent.start) + length > MAX_DATA as u64 {
            self.find_here(FindingKind::Extent, "an extent reaches beyond a page");
        }
        if extent.born > self.newest {
            self.find_here(FindingKind::Extent, "an extent was made by a commit that is yet to come");
        }
        self.object.covered = end;
        self.object.bytes += end.min(trim).saturating_sub(offset);
        if length <= MAX_DATA as u64 {
            self.read_extent(offset, &extent)?;
        }
        Ok(())
    }

    /// Reads what nobody read yet. Targets of links that do not lie in the tree are read again: they are short and few.
    fn read_extent(&mut self, offset: u64, extent: &Extent) -> Result<()> {
        let is_symlink = self.is_symlink();
        match self.reading {
            Reading::Nothing => return Ok(()),
            Reading::But(pages) if !is_symlink && pages.hold(extent) => return Ok(()),
            Reading::But(_) | Reading::All => {}
        }
        self.buffer.resize(extent.length as usize, 0);
        match self.volume.read_data(&extent.page, extent.start, &mut self.buffer) {
            Err(error @ (Error::Damaged(_) | Error::Io { .. })) => {
                let length = u64::from(extent.length);
                let last = offset.saturating_add(length).saturating_sub(1);
                let text = format!("bytes {offset} to {last} are lost: {error}");
                let finding = Finding::new(FindingKind::DataLost, Severity::Lost, text).of_inode(self.object.ino);
                self.find(finding.on_page(&extent.page).losing(Lost::Bytes { offset, length }));
                if self.lost_pages.len() < MAX_FINDINGS {
                    self.lost_pages.insert(extent.page.run.address);
                }
            }
            read => {
                read?;
                if is_symlink && self.object.target.len() < MAX_DATA {
                    self.object.target.extend_from_slice(&self.buffer);
                }
            }
        }
        Ok(())
    }

    fn is_symlink(&self) -> bool {
        self.object.inode.is_some_and(|inode| inode.mode & mode::TYPE == mode::SYMLINK)
    }

    /// All records of the object were seen.
    fn finish_object(&mut self) {
        let object = std::mem::take(&mut self.object);
        let Some(inode) = object.inode else { return };
        self.object.ino = object.ino;
        self.counts.inodes += 1;
        self.counts.bytes += object.bytes;
        let is_directory = file_type(inode.mode) == DIRECTORY_TYPE;
        self.counts.directories += u64::from(is_directory);
        let known = self.known.entry(object.ino).or_default();
        known.exists = true;
        known.file_type = file_type(inode.mode);
        known.links = inode.links;
        known.parent = inode.parent;
        // An orphan is taken to pieces in steps: what is left of it need not agree.
        if !self.orphans.contains(&object.ino) {
            self.judge_object(&object, &inode);
        }
        self.object = Object::default();
    }

    fn judge_object(&mut self, object: &Object, inode: &InodeValue) {
        let has_content = matches!(inode.mode & mode::TYPE, mode::REGULAR | mode::SYMLINK);
        let is_directory = file_type(inode.mode) == DIRECTORY_TYPE;
        let is_symlink = inode.mode & mode::TYPE == mode::SYMLINK;
        let impossible = !(1..=MAX_TARGET as u64).contains(&inode.size);
        use FindingKind::{Attribute, Entry, Inode};
        let wrong = [
            (object.indexed != object.listed, Entry, "has a different number of index and list entries"),
            (object.inline && object.shows_extents, Inode, "has inline data and extents"),
            (!has_content && (object.inline || object.extents > 0), Inode, "has data, but is of a type without"),
            (!is_directory && object.indexed + object.listed > 0, Entry, "has entries, but is not a directory"),
            (is_directory && inode.size != object.listed, Entry, "its size is not the number of its entries"),
            (inode.bytes != object.bytes, Inode, "its bytes are not those of its extents and inline data"),
            (
                object.has_xattrs != (inode.flags & inode_flags::HAS_XATTRS != 0),
                Attribute,
                "its attribute flag is wrong",
            ),
            (object.pieces.values().any(|&missing| missing > 0), Attribute, "an attribute's value is incomplete"),
            (
                object.pieces.keys().any(|&piece| piece >= inode.next_piece),
                Attribute,
                "a piece number is not yet given out",
            ),
            ((inode.trim != NO_TRIM) != self.trims.contains(&object.ino), Inode, "its trim mark is wrong"),
            (is_symlink && inode.size != inode.bytes, Inode, "its target is incomplete"),
            (is_symlink && impossible, Inode, "its target has an impossible length"),
            (is_symlink && object.target.contains(&0), Inode, "its target has a byte that no path has"),
        ];
        for (_, kind, detail) in wrong.into_iter().filter(|(is_wrong, ..)| *is_wrong) {
            self.find_here(kind, detail);
        }
    }
}
