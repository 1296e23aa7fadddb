//! Verifies the whole live tree: entries, inodes, links, extents and attributes agree with each other.
//!
//! Memory grows with the archive, about 64 bytes per inode: names can only be counted when all directories have been seen.

use std::collections::{HashMap, HashSet};

use super::acl::{Acl, AclKind};
use super::directory::{self, DIRECTORY_TYPE, FIRST_SEQUENCE, Found, Target, file_type, name_hash};
use super::ops::{BIRTH, value_of_entry};
use super::{FileSystem, mode};
use crate::error::{Error, Result};
use crate::format::values::{
    Extent, InodeValue, NO_TRIM, XATTR_PIECE, XattrEntry, decode_index, decode_list, decode_xattrs, inode_flags,
};
use crate::format::{Ino, Key, MAX_DATA, MAX_INO, MAX_OFFSET, ROOT_INO, kind};
use crate::txn::View;

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
    /// End of the extent before.
    covered: u64,
    bytes: u64,
    indexed: u64,
    listed: u64,
    has_xattrs: bool,
    /// Attribute values in pieces: piece id -> bytes that are still missing.
    pieces: HashMap<u32, u64>,
}

struct Walk<'a> {
    fs: &'a FileSystem,
    view: View<'a>,
    full: bool,
    /// Takes the data that is read only to see that it can be.
    buffer: Vec<u8>,
    known: HashMap<Ino, Known>,
    orphans: HashSet<Ino>,
    trims: HashSet<Ino>,
    object: Object,
    counts: StructureCounts,
    findings: Vec<String>,
}

impl FileSystem {
    /// Walks the live tree of the newest version. A finding is a sentence; none means sound. `full` also reads every page of file data
    /// through the extents that name it. `progress` gets (done, total) inodes.
    ///
    /// # Errors
    /// Only what makes going on impossible; a node or page that cannot be read is a finding like others.
    pub(crate) fn check_structure(
        &self,
        full: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(StructureCounts, Vec<String>)> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let mut walk = Walk {
            fs: self,
            view,
            full,
            buffer: Vec::new(),
            known: HashMap::new(),
            orphans: HashSet::new(),
            trims: HashSet::new(),
            object: Object::default(),
            counts: StructureCounts::default(),
            findings: Vec::new(),
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
                        walk.find(format!("inode {}: {detail}", key.object));
                        Ok(())
                    }
                    other => other,
                }
            },
            &mut |lower, upper, error| {
                let last = upper.object - u64::from((upper.kind, upper.sub) == (0, 0) && upper.object > lower.object);
                let range = format!("inodes {} to {}", lower.object, last.min(MAX_INO));
                lost.push(format!("records of {range} cannot be read: {error}"));
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
            let counted = walk.counts.inodes;
            walk.find(format!("the archive counts {} inodes, but has {counted}", state.inodes()));
        }
        walk.name_findings()?;
        progress(state.inodes(), state.inodes());
        Ok((walk.counts, walk.findings))
    }
}

impl Walk<'_> {
    fn find(&mut self, finding: String) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        } else if self.findings.len() == MAX_FINDINGS {
            self.findings.push("there are more findings".into());
        }
    }

    fn find_here(&mut self, finding: &str) {
        self.find(format!("inode {}: {finding}", self.object.ino.0));
    }

    fn record(&mut self, key: Key, value: &[u8]) -> Result<()> {
        if key.object == 0 {
            match key.kind {
                kind::ORPHAN => drop(self.orphans.insert(Ino(key.sub))),
                kind::TRIM => drop(self.trims.insert(Ino(key.sub))),
                _ => self.find(format!("unknown record of kind {}", key.kind)),
            }
            return Ok(());
        }
        if key.kind == kind::INODE {
            self.object.inode = Some(InodeValue::decode(value)?);
            return Ok(());
        }
        if self.object.inode.is_none() {
            self.find_here("has records, but no inode");
            // Said once per object.
            self.object.inode = Some(InodeValue { trim: NO_TRIM, ..InodeValue::default() });
        }
        match key.kind {
            kind::INLINE => {
                self.object.inline = true;
                self.object.bytes += value.len() as u64;
            }
            kind::XATTR => self.xattrs(key, value)?,
            kind::XATTR_PIECE => self.xattr_piece(key, value),
            kind::DIR_INDEX => self.index(key, value)?,
            kind::DIR_LIST => self.entry(key, value)?,
            kind::EXTENT => self.extent(key, value)?,
            _ => self.find_here("has a record of an unknown kind"),
        }
        Ok(())
    }

    fn xattrs(&mut self, key: Key, value: &[u8]) -> Result<()> {
        self.object.has_xattrs = true;
        for entry in decode_xattrs(value)? {
            if name_hash(&self.fs.name_key, self.object.ino, &entry.name) != key.sub {
                self.find_here("an attribute is not where its name's hash says");
            }
            if entry.name == BIRTH {
                self.find_here("an attribute has the name under which the birth time is told");
            }
            if entry.piece != 0 && self.object.pieces.insert(entry.piece, u64::from(entry.length)).is_some() {
                self.find_here("two attributes share pieces");
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
                self.find_here("its access control list disagrees with its mode");
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => self.find_here("has a malformed access control list"),
        }
        if file_type == mode::SYMLINK || (kind == AclKind::Default && file_type != mode::DIRECTORY) {
            self.find_here("has an access control list that its type cannot have");
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
            _ => self.find_here("a piece of an attribute is out of place"),
        }
    }

    fn index(&mut self, key: Key, value: &[u8]) -> Result<()> {
        let entries = decode_index(value)?;
        if entries.is_empty() {
            self.find_here("has an empty index record");
        }
        for entry in &entries {
            self.object.indexed += 1;
            if name_hash(&self.fs.name_key, self.object.ino, &entry.name) != key.sub {
                self.find_here("an entry is not where its name's hash says");
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
            self.find_here("an entry's sequence number is out of range");
        }
        let target = Target { ino: entry.ino, file_type: entry.file_type };
        let indexed = directory::find(self.view, &self.fs.name_key, directory, entry.name)?;
        if indexed != Some(Found { target, sequence: key.sub }) {
            self.find_here("an entry's two records disagree");
        }
        if target.is_directory() {
            self.known.entry(directory).or_default().subdirectories += 1;
        }
        let known = self.known.entry(target.ino).or_default();
        known.names += 1;
        known.named_in = directory;
        if known.named_type.is_some_and(|other| other != target.file_type) {
            self.find(format!("inode {}: its names say different types", target.ino.0));
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
        if offset < self.object.covered {
            self.find_here("extents overlap");
        }
        if end > MAX_OFFSET {
            self.find_here("an extent reaches beyond the greatest offset");
        }
        if length == 0 || u64::from(extent.start) + length > MAX_DATA as u64 {
            self.find_here("an extent reaches beyond a page");
        }
        self.object.covered = end;
        self.object.bytes += end.min(trim).saturating_sub(offset);
        if self.full && length <= MAX_DATA as u64 {
            self.buffer.resize(extent.length as usize, 0);
            match self.fs.volume.pager().read_data(&extent.page, extent.start, &mut self.buffer) {
                Err(error @ (Error::Damaged(_) | Error::Io { .. })) => {
                    self.find_here(&format!("bytes {offset} to {} are lost: {error}", end - 1));
                }
                read => read?,
            }
        }
        Ok(())
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
        let wrong = [
            (object.indexed != object.listed, "has a different number of index and list entries"),
            (object.inline && object.extents > 0, "has inline data and extents"),
            (!has_content && (object.inline || object.extents > 0), "has data, but is of a type without"),
            (!is_directory && object.indexed + object.listed > 0, "has entries, but is not a directory"),
            (is_directory && inode.size != object.listed, "its size is not the number of its entries"),
            (inode.bytes != object.bytes, "its bytes are not those of its extents and inline data"),
            (object.has_xattrs != (inode.flags & inode_flags::HAS_XATTRS != 0), "its attribute flag is wrong"),
            (object.pieces.values().any(|&missing| missing > 0), "an attribute's value is incomplete"),
            (object.pieces.keys().any(|&piece| piece >= inode.next_piece), "a piece number is not yet given out"),
            ((inode.trim != NO_TRIM) != self.trims.contains(&object.ino), "its trim mark is wrong"),
            (inode.mode & mode::TYPE == mode::SYMLINK && inode.size != inode.bytes, "its target is incomplete"),
        ];
        for (_, finding) in wrong.iter().filter(|(is_wrong, _)| *is_wrong) {
            self.find_here(finding);
        }
    }

    /// Puts the path behind each inode number that a finding begins with, as far as the directories tell it.
    fn name_findings(&mut self) -> Result<()> {
        let mut wanted: HashSet<Ino> = self.findings.iter().filter_map(|finding| inode_of(finding)).collect();
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
        self.view.scan_surviving(&mut name, &mut |_, _, _| Ok(()))?;
        for finding in &mut self.findings {
            let Some(ino) = inode_of(finding) else { continue };
            let (mut at, mut path) = (ino, Vec::new());
            // No path is longer than there are names: a circle ends.
            for _ in 0..=names.len() {
                let Some((above, name)) = names.get(&at) else { break };
                path = [b"/", &name[..], &path].concat();
                at = *above;
            }
            if !path.is_empty() {
                let from = if at == ROOT_INO { "" } else { "..." };
                let rest = finding.split_off(format!("inode {}", ino.0).len());
                finding.push_str(&format!(" ({from}{}){rest}", String::from_utf8_lossy(&path).escape_debug()));
            }
        }
        Ok(())
    }

    /// Types, links and parents, now that every name was seen.
    fn judge_names(&mut self) {
        let known = std::mem::take(&mut self.known);
        let orphans = std::mem::take(&mut self.orphans);
        for ino in &orphans {
            match known.get(ino) {
                Some(known) if known.exists && known.links == 0 && known.names == 0 => {}
                Some(known) if known.exists => self.find(format!("inode {}: is an orphan with names", ino.0)),
                _ => self.find(format!("inode {}: is an orphan, but missing", ino.0)),
            }
        }
        for (&ino, known) in &known {
            for finding in judge_known(ino, known, orphans.contains(&ino)) {
                self.find(format!("inode {}: {finding}", ino.0));
            }
        }
        if !known.get(&ROOT_INO).is_some_and(|root| root.exists && root.file_type == DIRECTORY_TYPE) {
            self.find("there is no root directory".into());
        }
        // The order of a hash map is not that of the next run.
        self.findings.sort_unstable();
        self.known = known;
    }

    /// Directories that name each other in a circle have right links and parents, but no way from the root.
    fn judge_reachability(&mut self) {
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
            self.find(format!("inode {}: is in a circle of directories", ino.0));
        }
    }
}

fn inode_of(finding: &str) -> Option<Ino> {
    let (number, _) = finding.strip_prefix("inode ")?.split_once(':')?;
    number.parse().ok().map(Ino)
}

fn judge_known(ino: Ino, known: &Known, orphan: bool) -> Vec<&'static str> {
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
        findings.push("its type is not the one that its name says");
    }
    findings
}
