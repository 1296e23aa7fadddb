//! Verifies the whole live tree: entries, inodes, links, extents and attributes agree with each
//! other.
//!
//! Memory grows with the archive, about 64 bytes per inode: names can only be counted when all
//! directories have been seen.

use std::collections::{HashMap, HashSet};

use super::acl::{Acl, AclKind};
use super::directory::{self, DIRECTORY_TYPE, DirectoryRecord, EntryTarget, FIRST_SEQUENCE, file_type, name_hash};
use super::ops::{BIRTH, MAX_TARGET, load_value};
use super::types::mode;
use crate::error::{Error, Result};
use crate::format::values::{
    Extent, InodeValue, NO_TRIM, XATTR_PIECE, XattrEntry, decode_index, decode_list, decode_xattrs, inode_flags,
};
use crate::format::{Generation, Ino, Key, MAX_DATA, MAX_INO, MAX_OFFSET, ROOT_INO, kind};
use crate::txn::{DataPages, Finding, FindingKind, Lost, Severity, View, Volume};

/// Limit of the report; one damaged node may lead to millions of findings.
const MAX_FINDINGS: usize = 1000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StructureCounts {
    pub(crate) inodes: u64,
    pub(crate) directories: u64,
    /// Plain bytes of all files and symlinks, without holes.
    pub(crate) bytes: u64,
}

pub(crate) struct StructureReport {
    pub(crate) counts: StructureCounts,
    pub(crate) findings: Vec<Finding>,
    /// First blocks of the data pages that are reported as lost with the file.
    pub(crate) lost_pages: HashSet<u64>,
}

#[derive(Clone, Copy)]
pub(crate) enum DataReading<'a> {
    Nothing,
    /// All data that extents reference.
    All,
    /// All data except pages that an audit found sound already.
    But(&'a DataPages),
}

/// Summary of an inode, until all names are counted.
#[derive(Default)]
struct InodeSummary {
    /// An inode record exists (else only names).
    exists: bool,
    file_type: u8,
    links: u32,
    /// Number of names found, and the type in their entries.
    names: u32,
    named_type: Option<u8>,
    /// For a directory: the parent in its inode, the directory of its entry, and the number of
    /// subdirectories found in it.
    parent: Ino,
    named_in: Ino,
    subdirectories: u32,
}

/// Records of the object at the scan position.
#[derive(Default)]
struct ObjectRecords {
    ino: Ino,
    inode: Option<InodeValue>,
    inline: bool,
    extents: u64,
    /// Some extents are before the trim offset; hidden ones count as freed.
    shows_extents: bool,
    /// End of the previous extent.
    covered: u64,
    bytes: u64,
    /// Target of a symbolic link, as far as it was read: in full checks, or when it is inline.
    target: Vec<u8>,
    indexed: u64,
    listed: u64,
    has_xattrs: bool,
    /// Incomplete attribute values in pieces: piece id -> missing bytes.
    pieces: HashMap<u32, u64>,
}

struct StructureWalk<'a> {
    volume: &'a Volume,
    name_key: &'a [u8; 16],
    view: View<'a>,
    reading: DataReading<'a>,
    /// No extent can be born later.
    newest: Generation,
    /// Buffer for data that is read only to verify it.
    buffer: Vec<u8>,
    known: HashMap<Ino, InodeSummary>,
    orphans: HashSet<Ino>,
    trims: HashSet<Ino>,
    object: ObjectRecords,
    counts: StructureCounts,
    findings: Vec<Finding>,
    lost_pages: HashSet<u64>,
}

pub(super) fn walk_structure(
    volume: &Volume,
    name_key: &[u8; 16],
    reading: DataReading<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<StructureReport> {
    let state = volume.state();
    let view = volume.view(&state);
    let mut walk = StructureWalk {
        volume,
        name_key,
        view,
        reading,
        newest: volume.open_generation(),
        buffer: Vec::new(),
        known: HashMap::new(),
        orphans: HashSet::new(),
        trims: HashSet::new(),
        object: ObjectRecords::default(),
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
            match walk.check_record(key, value) {
                Err(Error::Damaged(detail)) => {
                    walk.report(Finding::new(FindingKind::Record, Severity::Wrong, detail).of_inode(Ino(key.object)));
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
        walk.report(finding);
    }
    walk.check_names();
    walk.check_reachability();
    if walk.counts.inodes != state.inodes() {
        let text = format!("the archive counts {} inodes, but has {}", state.inodes(), walk.counts.inodes);
        walk.report(Finding::new(FindingKind::Counter, Severity::Minor, text));
    }
    walk.set_finding_paths()?;
    progress(state.inodes(), state.inodes());
    let StructureWalk { counts, findings, lost_pages, .. } = walk;
    Ok(StructureReport { counts, findings, lost_pages })
}

impl StructureWalk<'_> {
    fn report(&mut self, finding: Finding) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        } else if self.findings.len() == MAX_FINDINGS {
            self.findings.push(Finding::new(FindingKind::More, Severity::Wrong, "there are more findings"));
        }
    }

    fn report_inode(&mut self, kind: FindingKind, ino: Ino, detail: &str) {
        self.report(Finding::new(kind, Severity::Wrong, detail).of_inode(ino));
    }

    fn report_object(&mut self, kind: FindingKind, detail: &str) {
        self.report_inode(kind, self.object.ino, detail);
    }

    fn check_record(&mut self, key: Key, value: &[u8]) -> Result<()> {
        if key.object == 0 {
            match key.kind {
                kind::ORPHAN => drop(self.orphans.insert(Ino(key.sub))),
                kind::TRIM => drop(self.trims.insert(Ino(key.sub))),
                _ => {
                    let text = format!("unknown record of kind {}", key.kind);
                    self.report(Finding::new(FindingKind::Record, Severity::Wrong, text));
                }
            }
            if !value.is_empty() {
                let text = format!("a record of kind {} has a value", key.kind);
                self.report(Finding::new(FindingKind::Record, Severity::Wrong, text));
            }
            return Ok(());
        }
        if matches!(key.kind, kind::INODE | kind::INLINE) && key.sub != 0 {
            self.report_object(FindingKind::Record, "has a record with a key that no writer gives it");
            return Ok(());
        }
        if key.kind == kind::INODE {
            self.object.inode = Some(InodeValue::decode(value)?);
            return Ok(());
        }
        if self.object.inode.is_none() {
            self.report_object(FindingKind::Inode, "has records, but no inode");
            // Reported once per object.
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
            kind::XATTR => self.check_xattrs(key, value)?,
            kind::XATTR_PIECE => self.check_xattr_piece(key, value),
            kind::DIR_INDEX => self.check_index(key, value)?,
            kind::DIR_LIST => self.check_entry(key, value)?,
            kind::EXTENT => self.check_extent(key, value)?,
            _ => self.report_object(FindingKind::Record, "has a record of an unknown kind"),
        }
        Ok(())
    }

    fn check_xattrs(&mut self, key: Key, value: &[u8]) -> Result<()> {
        self.object.has_xattrs = true;
        let entries = decode_xattrs(value)?;
        if entries.is_empty() {
            self.report_object(FindingKind::Attribute, "has an empty attribute record");
        }
        // A record has the few names of one hash, so duplicate names are within one record.
        if entries.iter().enumerate().any(|(at, entry)| entries[..at].iter().any(|other| other.name == entry.name)) {
            self.report_object(FindingKind::Attribute, "has two attributes of one name");
        }
        for entry in entries {
            if name_hash(self.name_key, self.object.ino, &entry.name) != key.sub {
                self.report_object(FindingKind::Attribute, "an attribute is not where its name's hash says");
            }
            if entry.name == BIRTH {
                self.report_object(FindingKind::Attribute, "an attribute has the reserved name of the birth time");
            }
            if entry.piece != 0 && self.object.pieces.insert(entry.piece, u64::from(entry.length)).is_some() {
                self.report_object(FindingKind::Attribute, "two attributes share pieces");
            }
            if let Some(kind) = AclKind::of_name(&entry.name) {
                self.check_acl(kind, entry)?;
            }
        }
        Ok(())
    }

    /// Checks a stored list against ACL-1 to ACL-3.
    fn check_acl(&mut self, kind: AclKind, entry: XattrEntry) -> Result<()> {
        let mode = self.object.inode.map_or(0, |inode| inode.mode);
        let value = load_value(self.view, self.object.ino, entry)?;
        let (file_type, bits) = (mode & mode::TYPE, mode & mode::ACCESS);
        match Acl::parse(&value) {
            Ok(Some(list)) if kind == AclKind::Access && (list.is_minimal() || list.mode_bits() != bits) => {
                self.report_object(FindingKind::Attribute, "its access control list disagrees with its mode");
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => self.report_object(FindingKind::Attribute, "has a malformed access control list"),
        }
        if file_type == mode::SYMLINK || (kind == AclKind::Default && file_type != mode::DIRECTORY) {
            self.report_object(FindingKind::Attribute, "has an access control list that its type cannot have");
        }
        Ok(())
    }

    fn check_xattr_piece(&mut self, key: Key, value: &[u8]) {
        let missing = self.object.pieces.get_mut(&((key.sub >> 32) as u32));
        // All pieces but the last are full, so the missing length is a whole number of pieces and
        // the last.
        match missing {
            Some(missing) if value.len() as u64 == (*missing).min(XATTR_PIECE as u64) && !value.is_empty() => {
                *missing -= value.len() as u64;
            }
            _ => self.report_object(FindingKind::Attribute, "a piece of an attribute is out of place"),
        }
    }

    fn check_index(&mut self, key: Key, value: &[u8]) -> Result<()> {
        let entries = decode_index(value)?;
        if entries.is_empty() {
            self.report_object(FindingKind::Entry, "has an empty index record");
        }
        for entry in &entries {
            self.object.indexed += 1;
            if name_hash(self.name_key, self.object.ino, &entry.name) != key.sub {
                self.report_object(FindingKind::Entry, "an entry is not where its name's hash says");
            }
        }
        Ok(())
    }

    /// Checks a list record with its index entry. Equal counts, and an index entry of its own for
    /// each list record, make the relation one to one.
    fn check_entry(&mut self, key: Key, value: &[u8]) -> Result<()> {
        let entry = decode_list(value)?;
        let directory = self.object.ino;
        self.object.listed += 1;
        let next = self.object.inode.map_or(0, |inode| inode.next_sequence);
        if !(FIRST_SEQUENCE..next).contains(&key.sub) {
            self.report_object(FindingKind::Entry, "an entry's sequence number is out of range");
        }
        let target = EntryTarget { ino: entry.ino, file_type: entry.file_type };
        let indexed = directory::find(self.view, self.name_key, directory, entry.name)?;
        if indexed != Some(DirectoryRecord { target, sequence: key.sub }) {
            self.report_object(FindingKind::Entry, "an entry's two records disagree");
        }
        if target.is_directory() {
            self.known.entry(directory).or_default().subdirectories += 1;
        }
        let known = self.known.entry(target.ino).or_default();
        known.names += 1;
        known.named_in = directory;
        if known.named_type.is_some_and(|other| other != target.file_type) {
            self.report_inode(FindingKind::Name, target.ino, "its names say different types");
        } else {
            known.named_type = Some(target.file_type);
        }
        Ok(())
    }

    fn check_extent(&mut self, key: Key, value: &[u8]) -> Result<()> {
        let extent = Extent::decode(value)?;
        let trim = self.object.inode.map_or(NO_TRIM, |inode| inode.trim);
        let (offset, length) = (key.sub, u64::from(extent.length));
        let end = offset.saturating_add(length);
        self.object.extents += 1;
        self.object.shows_extents |= offset < trim;
        if offset < self.object.covered {
            self.report_object(FindingKind::Extent, "extents overlap");
        }
        if end > MAX_OFFSET {
            self.report_object(FindingKind::Extent, "an extent reaches beyond the greatest offset");
        }
        if length == 0 || u64::from(extent.start) + length > MAX_DATA as u64 {
            self.report_object(FindingKind::Extent, "an extent reaches beyond a page");
        }
        if extent.born > self.newest {
            self.report_object(FindingKind::Extent, "an extent was made by a commit that is yet to come");
        }
        self.object.covered = end;
        self.object.bytes += end.min(trim).saturating_sub(offset);
        if length <= MAX_DATA as u64 {
            self.read_extent(offset, &extent)?;
        }
        Ok(())
    }

    /// Reads data that was not verified yet. Targets of links with extents are read again: they are
    /// short and few.
    fn read_extent(&mut self, offset: u64, extent: &Extent) -> Result<()> {
        let is_symlink = self.is_symlink();
        match self.reading {
            DataReading::Nothing => return Ok(()),
            DataReading::But(pages) if !is_symlink && pages.hold(extent) => return Ok(()),
            DataReading::But(_) | DataReading::All => {}
        }
        self.buffer.resize(extent.length as usize, 0);
        match self.volume.read_data(&extent.page, extent.start, &mut self.buffer) {
            Err(error) if error.is_page_loss() => {
                let length = u64::from(extent.length);
                let last = offset.saturating_add(length).saturating_sub(1);
                let text = format!("bytes {offset} to {last} are lost: {error}");
                let finding = Finding::new(FindingKind::DataLost, Severity::Lost, text).of_inode(self.object.ino);
                self.report(finding.on_page(&extent.page).losing(Lost::Bytes { offset, length }));
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
        // An orphan is removed in steps: its remains need not agree.
        if !self.orphans.contains(&object.ino) {
            self.check_object(&object, &inode);
        }
        self.object = ObjectRecords::default();
    }

    fn check_object(&mut self, object: &ObjectRecords, inode: &InodeValue) {
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
            (inode.bytes != object.bytes, Inode, "its bytes are not the sum of its extents and inline data"),
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
            self.report_object(kind, detail);
        }
    }
}

/// Checks that need all names: links, parents, reachability; and the paths of findings.
impl StructureWalk<'_> {
    /// Gives each finding about an inode its path, as far as directories lead to it.
    fn set_finding_paths(&mut self) -> Result<()> {
        let mut wanted: HashSet<Ino> = self.findings.iter().filter_map(|finding| finding.inode).collect();
        let mut way: Vec<Ino> = wanted.iter().copied().collect();
        while let Some(ino) = way.pop() {
            let above = self.known.get(&ino).map_or(Ino(0), |known| known.named_in);
            if above.0 > 0 && wanted.insert(above) {
                way.push(above);
            }
        }
        let mut names: HashMap<Ino, (Ino, Vec<u8>)> = HashMap::new();
        let mut name = |key: Key, value: &[u8]| -> Result<()> {
            if key.kind == kind::DIR_LIST
                && key.object > 0
                && let Ok(entry) = decode_list(value)
                && wanted.contains(&entry.ino)
            {
                names.entry(entry.ino).or_insert_with(|| (Ino(key.object), entry.name.to_vec()));
            }
            Ok(())
        };
        self.view.scan_surviving(&mut name, &mut |_| Ok(()))?;
        for finding in &mut self.findings {
            let Some(ino) = finding.inode else { continue };
            let (mut at, mut path) = (ino, Vec::new());
            // A path has at most as many components as there are names: a cycle ends.
            for _ in 0..=names.len() {
                let Some((above, name)) = names.get(&at) else { break };
                path = [b"/", &name[..], &path].concat();
                at = *above;
            }
            finding.path = match at {
                // The root has no entry.
                _ if ino == ROOT_INO => Some(b"/".to_vec()),
                _ if path.is_empty() => None,
                ROOT_INO => Some(path),
                _ => Some([b"...", &path[..]].concat()),
            };
        }
        Ok(())
    }

    /// Checks types, links and parents, after all names were counted.
    fn check_names(&mut self) {
        let known = std::mem::take(&mut self.known);
        let orphans = std::mem::take(&mut self.orphans);
        for ino in &orphans {
            match known.get(ino) {
                Some(known) if known.exists && known.links == 0 && known.names == 0 => {}
                Some(known) if known.exists => self.report_inode(FindingKind::Name, *ino, "is an orphan with names"),
                _ => self.report_inode(FindingKind::Name, *ino, "is an orphan, but missing"),
            }
        }
        for ino in std::mem::take(&mut self.trims) {
            if !known.get(&ino).is_some_and(|known| known.exists) {
                self.report_inode(FindingKind::Inode, ino, "is marked to be cut, but missing");
            }
        }
        for (&ino, known) in &known {
            for finding in check_summary(ino, known, orphans.contains(&ino)) {
                self.report_inode(FindingKind::Name, ino, finding);
            }
        }
        if !known.get(&ROOT_INO).is_some_and(|root| root.exists && root.file_type == DIRECTORY_TYPE) {
            self.report(Finding::new(FindingKind::Name, Severity::Wrong, "there is no root directory"));
        }
        // Hash maps have no stable order. The finding about further findings stays last.
        self.findings.sort_by(|one, other| {
            let last = |finding: &Finding| finding.kind == FindingKind::More;
            let key = |finding: &Finding| (last(finding), finding.inode, finding.kind, finding.lost.clone());
            key(one).cmp(&key(other)).then_with(|| one.detail.cmp(&other.detail))
        });
        self.known = known;
    }

    /// Reports directories in a cycle: they have right links and parents, but no path from the
    /// root.
    fn check_reachability(&mut self) {
        let mut reached: HashSet<Ino> = HashSet::from([ROOT_INO]);
        let mut circles = Vec::new();
        let directories = self.known.iter().filter(|(_, known)| known.exists && known.file_type == DIRECTORY_TYPE);
        for (&ino, _) in directories.filter(|(_, known)| known.names > 0) {
            let mut way = Vec::new();
            let mut seen = HashSet::new();
            let mut at = ino;
            while !reached.contains(&at) && seen.insert(at) {
                way.push(at);
                at = self.known.get(&at).map_or(ROOT_INO, |known| known.named_in);
            }
            if !reached.contains(&at) {
                circles.push(at);
            }
            reached.extend(way);
        }
        for ino in circles {
            self.report_inode(FindingKind::Name, ino, "is in a circle of directories");
        }
    }
}

fn check_summary(ino: Ino, known: &InodeSummary, orphan: bool) -> Vec<&'static str> {
    let is_directory = known.file_type == DIRECTORY_TYPE;
    let wrong = if !known.exists {
        vec![(true, "is named, but missing")]
    } else if orphan {
        Vec::new()
    } else if is_directory {
        let parent = if ino == ROOT_INO { ROOT_INO } else { known.named_in };
        vec![
            (known.names != u32::from(ino != ROOT_INO), "is a directory without or with several names"),
            (known.links != known.subdirectories.saturating_add(2), "its links are not 2 and its subdirectories"),
            (known.parent != parent, "its parent is not the directory that names it"),
        ]
    } else {
        vec![
            (known.names == 0, "has no name and is no orphan"),
            (known.links != known.names, "its links are not the number of its names"),
            (known.parent != Ino(0), "has a parent, but is not a directory"),
        ]
    };
    let mut findings: Vec<&'static str> = wrong.into_iter().filter(|(is_wrong, _)| *is_wrong).map(|(_, f)| f).collect();
    if known.exists && known.named_type.is_some_and(|named| named != known.file_type) {
        findings.push("its type differs from its directory entry");
    }
    findings
}
