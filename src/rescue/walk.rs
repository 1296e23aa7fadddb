//! Walks over all named objects from the root, then over unnamed ones, and writes the complete
//! ones.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;

use rustix::fs::AtFlags;

use super::index::{DataPiece, LeafIndex, LeafSet};
use super::object::{self, ObjectSource, RescuedInode};
use super::scan::ignoring_damage;
use super::{PARTIAL, RescueOptions, RescueProgress, RescueReport, RescueState, RescuedObject, UNNAMED};
use crate::error::{Error, Result};
use crate::exchange::attributes::{self, Phase, apply, host_error, is_root};
use crate::exchange::staging_dir::{StagingDir, identity_of, link_again, open_again};
use crate::exchange::walk::{self, WalkStep};
use crate::exchange::{FileTotals, Problem, Progress, SkippedItems};
use crate::format::values::decode_list;
use crate::format::{Generation, Ino, Key, MAX_INO, ROOT_INO, kind};
use crate::fs::{Attributes, mode};
use crate::pager::Pager;
use crate::storage::FileIdentity;

/// Names and values.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

struct RescueWalk<'a> {
    index: LeafIndex,
    pager: &'a Pager,
    stage: &'a StagingDir,
    /// Directory for incomplete files, if requested.
    partial: Option<LostFoundDirectory>,
    item: &'a mut dyn FnMut(&RescuedObject<'_>) -> Result<()>,
    progress: &'a mut dyn FnMut(&RescueProgress<'_>) -> Result<()>,
    report: RescueReport,
    /// Inodes already processed: 16 bytes each.
    seen: HashSet<u64>,
    /// Type and generation in the entry of each object for which the host refused a name.
    refused: HashMap<u64, (Option<u8>, Generation)>,
    /// Upper bound of the number of objects, for progress.
    objects: u64,
    /// First copies of files with several hard links: path and identity.
    links: HashMap<u64, (Vec<u8>, FileIdentity)>,
    /// Incomplete files: state, and generation of the version.
    incomplete: HashMap<u64, (RescueState, Generation)>,
    /// Names of inodes of which only data survived.
    named_orphans: BTreeMap<u64, Vec<Vec<u8>>>,
    /// Directories with a mode that denies access to their owner; it is set at the end.
    closed: Vec<(Vec<u8>, FileIdentity, Attributes, Xattrs)>,
    path: Vec<u8>,
}

/// Cursor over the surviving entries of a directory, leaf by leaf.
struct PartialDirectory {
    ino: Ino,
    version: LeafSet,
    /// Next part of the version.
    part: usize,
    entries: VecDeque<(Vec<u8>, u8, Ino)>,
    /// Last generation in which the entries are known to have existed.
    known: Generation,
}

impl PartialDirectory {
    fn of(ino: Ino, version: LeafSet) -> PartialDirectory {
        PartialDirectory { ino, version, part: 0, entries: VecDeque::new(), known: Generation(0) }
    }

    /// Returns the next entry; after an error it continues with the next leaf.
    fn next(&mut self, index: &mut LeafIndex) -> Result<Option<(Vec<u8>, u8, Ino)>> {
        while self.entries.is_empty() {
            let part = self.part;
            if part >= self.version.parts() {
                return Ok(None);
            }
            self.part += 1;
            self.known = self.version.leaves.get(part).map_or(Generation(0), |&leaf| index.last(leaf));
            let entries = &mut self.entries;
            visit_entries(index, (&self.version, part), self.ino, &mut |name, file_type, ino| {
                entries.push_back((name.to_vec(), file_type, ino));
            })?;
        }
        Ok(self.entries.pop_front())
    }
}

struct RescuedDirectory {
    host: OwnedFd,
    object: Option<RescuedInode>,
}

enum FindOutcome {
    /// A version newer than any complete one proves that the inode was deleted.
    Deleted,
    Whole {
        object: RescuedInode,
        version: LeafSet,
        failed: Option<String>,
    },
    /// Surviving parts, with the inode record if there is one, and the reason for which it is not
    /// complete.
    Rest {
        object: Option<RescuedInode>,
        version: LeafSet,
        reason: String,
    },
}

pub(super) fn run(
    index: LeafIndex,
    pager: &Pager,
    stage: &StagingDir,
    options: &RescueOptions,
    item: &mut dyn FnMut(&RescuedObject<'_>) -> Result<()>,
    progress: &mut dyn FnMut(&RescueProgress<'_>) -> Result<()>,
) -> Result<RescueReport> {
    let report = RescueReport {
        pages: index.pages,
        unreadable_blocks: index.unreadable,
        newest: index.newest,
        index_whole: index.is_whole(),
        entries: index.log.entries,
        entries_lost: index.log.lost,
        later: index.later,
        snapshots: index.known_snapshots.check_all(pager)?,
        snapshots_proved: index.known_snapshots.proved,
        snapshots_lost: index.known_snapshots.lost.clone(),
        skipped: SkippedItems::extracting(options.privileges),
        ..RescueReport::default()
    };
    let objects = (index.inodes.len() + index.data.len()) as u64;
    let mut walk = RescueWalk {
        index,
        pager,
        stage,
        partial: options.partial.then(|| LostFoundDirectory::new(PARTIAL)),
        item,
        progress,
        report,
        seen: HashSet::new(),
        refused: HashMap::new(),
        objects,
        links: HashMap::new(),
        incomplete: HashMap::new(),
        named_orphans: BTreeMap::new(),
        closed: Vec::new(),
        path: Vec::new(),
    };
    walk.named()?;
    walk.unnamed()?;
    walk.write_orphan_data()?;
    walk.close_directories()?;
    Ok(walk.report)
}

impl RescueWalk<'_> {
    fn named(&mut self) -> Result<()> {
        self.seen.insert(ROOT_INO.0);
        let (version, reason) = match self
            .find(ROOT_INO, Generation(0), &mut |walk, object, version| walk.try_directory(object, version, ROOT_INO))?
        {
            FindOutcome::Whole { version, failed, .. } => {
                self.report_complete(ROOT_INO, &version, failed.as_deref())?;
                self.report.directories += 1;
                return self.root(version);
            }
            FindOutcome::Deleted => (self.index.newest_leaves(ROOT_INO), "it is missing".to_owned()),
            FindOutcome::Rest { version, reason, .. } => (version, reason),
        };
        self.report_object(RescueState::Partial, ROOT_INO, version.generation, false, &reason)?;
        self.root(version)
    }

    /// Writes objects without a name, or with none that the host accepted: directories first,
    /// except those below another such directory.
    fn unnamed(&mut self) -> Result<()> {
        let mut special = LostFoundDirectory::new(UNNAMED);
        for pass in 0..3 {
            let inodes = std::mem::take(&mut self.index.inodes);
            for &ino in inodes.iter().filter(|ino| **ino <= MAX_INO) {
                if !self.seen.contains(&ino) && self.is_of_pass(pass, Ino(ino), &inodes)? {
                    self.open_lost_found(&mut special)?;
                    let Some(host) = &special.host else { continue };
                    let host = host.try_clone().map_err(|e| Error::io("cannot open the directory", e))?;
                    self.path = [&special.name[..], b"/", ino.to_string().as_bytes()].concat();
                    let created = self.report.files + self.report.others + self.report.directories;
                    let (named_type, named) = self.refused.remove(&ino).unwrap_or_default();
                    let below = self.entry(&host, ino.to_string().as_bytes(), Ino(ino), named_type, named);
                    self.seen.insert(ino);
                    if let Some((remains, directory)) = self.tolerate(below)? {
                        self.walk(remains, directory)?;
                    }
                    self.report.unnamed +=
                        u64::from(self.report.files + self.report.others + self.report.directories > created);
                }
            }
            self.index.inodes = inodes;
        }
        if special.host.is_some() {
            match rustix::fs::unlinkat(self.stage.target(), &special.name[..], AtFlags::REMOVEDIR) {
                Ok(()) | Err(rustix::io::Errno::NOTEMPTY | rustix::io::Errno::EXIST) => {}
                Err(errno) => return Err(host_error("cannot remove an empty directory")(errno)),
            }
        }
        Ok(())
    }

    fn is_of_pass(&mut self, pass: u32, ino: Ino, inodes: &[u64]) -> Result<bool> {
        if pass == 2 {
            return Ok(true);
        }
        let mut directory = None;
        for version in self.index.versions(ino).into_iter().chain([self.index.newest_leaves(ino)]) {
            directory = ignoring_damage(RescuedInode::load(&mut self.index, &version, ino))?.flatten();
            if directory.is_some() {
                break;
            }
        }
        let Some(directory) = directory.filter(RescuedInode::is_directory) else { return Ok(false) };
        let parent = directory.inode.parent.0;
        let comes_later = !self.seen.contains(&parent) && inodes.binary_search(&parent).is_ok();
        Ok(pass == 1 || !comes_later)
    }

    fn root(&mut self, version: LeafSet) -> Result<()> {
        let host = self.stage.target().try_clone().map_err(|e| Error::io("cannot open the target", e))?;
        self.walk(PartialDirectory::of(ROOT_INO, version), RescuedDirectory { host, object: None })
    }

    fn walk(&mut self, remains: PartialDirectory, directory: RescuedDirectory) -> Result<()> {
        let mut tree = walk::TreeWalk::new();
        tree.enter(&self.path, remains, directory);
        while let Some(step) =
            tree.step(&mut self.path, |remains| remains.next(&mut self.index).transpose(), |(name, ..)| name)
        {
            let below = step.and_then(|step| match step {
                WalkStep::Entry((name, file_type, ino), directory) => {
                    self.entry(&directory.state.host, &name, ino, Some(file_type), directory.entries.known)
                }
                WalkStep::Leave(directory) => self.finish(directory.entries.ino, directory.state).map(|()| None),
            });
            if let Some((remains, directory)) = self.tolerate(below)? {
                tree.enter(&self.path, remains, directory);
            }
        }
        Ok(())
    }

    /// Tries the versions of an inode, newest first; `attempt` fails with `Damaged` for an
    /// incomplete one. The inode's name is in a leaf of generation `named`: older records without
    /// the inode do not prove a deletion.
    fn find(
        &mut self,
        ino: Ino,
        named: Generation,
        attempt: &mut dyn FnMut(&mut Self, &RescuedInode, &LeafSet) -> Result<()>,
    ) -> Result<FindOutcome> {
        let mut failed: Option<String> = None;
        let mut rest = None;
        for version in self.index.versions(ino) {
            let object = match RescuedInode::load(&mut self.index, &version, ino) {
                Ok(None) => {
                    // The inode did not exist yet, or was deleted.
                    let younger = named > version.generation || self.index.existed_after(ino, version.generation)?;
                    if failed.is_none() && !younger {
                        return Ok(FindOutcome::Deleted);
                    }
                    failed = failed.or_else(|| Some("the records that are left are from before it was made".into()));
                    break;
                }
                Ok(Some(object)) if object.inode.links == 0 && failed.is_none() => return Ok(FindOutcome::Deleted),
                Ok(Some(object)) => object,
                Err(Error::Damaged(reason)) => {
                    failed = failed.or(Some(reason));
                    continue;
                }
                Err(error) => return Err(error),
            };
            match attempt(self, &object, &version) {
                Ok(()) => return Ok(FindOutcome::Whole { object, version, failed }),
                Err(Error::Damaged(reason)) => {
                    failed = failed.or(Some(reason));
                    rest = rest.or(Some((object, version)));
                }
                Err(error) => return Err(error),
            }
        }
        let reason = failed.unwrap_or_else(|| "not all leaves that describe it are left".into());
        if let Some((object, version)) = rest {
            return Ok(FindOutcome::Rest { object: Some(object), version, reason });
        }
        let version = self.index.newest_leaves(ino);
        let object = RescuedInode::load(&mut self.index, &version, ino).unwrap_or_default();
        Ok(FindOutcome::Rest { object, version, reason })
    }

    /// Checks that all entries of a directory are readable.
    fn try_directory(&mut self, object: &RescuedInode, version: &LeafSet, ino: Ino) -> Result<()> {
        if !object.is_directory() {
            return Err(Error::damaged("it is not a directory"));
        }
        let mut count = 0;
        for part in 0..version.parts() {
            visit_entries(&mut self.index, (version, part), ino, &mut |_, _, _| count += 1)?;
        }
        if count != object.inode.size {
            return Err(Error::damaged(format!("it has {count} entries instead of {}", object.inode.size)));
        }
        Ok(())
    }

    /// Returns a function that builds the progress report while a file is written.
    fn progress_callback(&self) -> impl Fn(&[u8], u64) -> RescueProgress<'_> + use<> {
        let (files, before) = (self.report.files, self.report.bytes);
        // Some names belong to inodes of which nothing else survived.
        let (passed, all) = (self.objects.min(self.seen.len() as u64), self.objects);
        let objects = |files| FileTotals { files, bytes: 0 };
        move |path, bytes| {
            let progress = Progress { files, bytes: before + bytes, passed: objects(passed), path };
            RescueProgress::Writing(progress, objects(all))
        }
    }

    /// Processes one object. Returns a directory to descend into.
    fn entry(
        &mut self,
        at: &OwnedFd,
        name: &[u8],
        ino: Ino,
        named_type: Option<u8>,
        named: Generation,
    ) -> Result<Option<(PartialDirectory, RescuedDirectory)>> {
        let tell = self.progress_callback();
        (self.progress)(&tell(&self.path, 0))?;
        if !self.seen.insert(ino.0) {
            return self.link(at, name, ino).map(|()| None);
        }
        let written = self.new_object(at, name, ino, named_type, named);
        if written.is_err() && self.stage.take_name_refused() {
            // The host may accept a further hard link, or `unnamed/INO`.
            self.seen.remove(&ino.0);
            self.refused.insert(ino.0, (named_type, named));
        }
        written
    }

    /// Processes an object that has no name on the host yet.
    fn new_object(
        &mut self,
        at: &OwnedFd,
        name: &[u8],
        ino: Ino,
        named_type: Option<u8>,
        named: Generation,
    ) -> Result<Option<(PartialDirectory, RescuedDirectory)>> {
        let tell = self.progress_callback();
        let mut created = None;
        let found = self.find(ino, named, &mut |walk, object, version| {
            if object.is_directory() {
                return walk.try_directory(object, version, ino);
            }
            let (path, skipped, progress) = (&walk.path[..], &mut walk.report.skipped, &mut walk.progress);
            let written = &mut |bytes| progress(&tell(path, bytes));
            let source =
                ObjectSource { index: &mut walk.index, pager: walk.pager, version, ino, path, skipped, written };
            created = Some(object::write_object(source, object, false, walk.stage, (at, name))?);
            Ok(())
        })?;
        match found {
            FindOutcome::Deleted => Ok(None),
            FindOutcome::Whole { object, version, failed } if object.is_directory() => {
                let host = object::directory(self.stage, at, name)?;
                self.report.directories += 1;
                self.report_complete(ino, &version, failed.as_deref())?;
                Ok(Some((PartialDirectory::of(ino, version), RescuedDirectory { host, object: Some(object) })))
            }
            FindOutcome::Whole { object, version, failed } => {
                // `None` for a device that was skipped.
                let Some((created, identity)) =
                    created.and_then(|created| created.identity.map(|which| (created, which)))
                else {
                    return Ok(None);
                };
                if object.file_type() == mode::REGULAR {
                    self.report.files += 1;
                } else {
                    self.report.others += 1;
                }
                // A newer version may have more.
                if object.inode.links > 1 || failed.is_some() {
                    self.links.insert(ino.0, (self.path.clone(), identity));
                }
                self.report_complete(ino, &version, failed.as_deref())?;
                self.report.bytes += created.bytes;
                self.note(created.metadata)?;
                Ok(None)
            }
            FindOutcome::Rest { object, version, reason } => {
                let kind = object.as_ref().map_or(u32::from(named_type.unwrap_or(8)) << 12, RescuedInode::file_type);
                if kind == mode::DIRECTORY {
                    return self.write_incomplete_directory(at, name, ino, object, version, &reason);
                }
                self.write_incomplete_file(ino, object, &version, &reason)?;
                Ok(None)
            }
        }
    }

    /// Creates a directory that is not complete; its surviving entries still name complete files.
    fn write_incomplete_directory(
        &mut self,
        at: &OwnedFd,
        name: &[u8],
        ino: Ino,
        object: Option<RescuedInode>,
        version: LeafSet,
        reason: &str,
    ) -> Result<Option<(PartialDirectory, RescuedDirectory)>> {
        if version.parts() == 0 {
            self.report_object(RescueState::Lost, ino, Generation(0), false, reason)?;
            return Ok(None);
        }
        let host = object::directory(self.stage, at, name)?;
        self.report_object(RescueState::Partial, ino, version.generation, false, reason)?;
        // All leaves, not only those of the version that was most complete.
        let version = self.index.newest_leaves(ino);
        Ok(Some((PartialDirectory::of(ino, version), RescuedDirectory { host, object })))
    }

    /// Creates a further hard link of a file, or reports one more name of an incomplete file.
    fn link(&mut self, at: &OwnedFd, name: &[u8], ino: Ino) -> Result<()> {
        if let Some((first, created)) = self.links.get(&ino.0) {
            link_again(self.stage.target(), first, *created, at, name)?;
            self.report.links += 1;
        } else if let Some(names) = self.named_orphans.get_mut(&ino.0) {
            names.push(self.path.clone());
        } else if let Some((state, generation)) = self.incomplete.get(&ino.0).copied() {
            self.report_object(state, ino, generation, false, "a further hard link of an incomplete file")?;
        }
        Ok(())
    }

    /// Sets the times last, because every created entry changes them.
    fn finish(&mut self, ino: Ino, directory: RescuedDirectory) -> Result<()> {
        let RescuedDirectory { host: created, object: Some(object) } = directory else { return Ok(()) };
        let attributes = object.attributes(ino);
        let xattrs = object.xattrs;
        let host = attributes::XattrObject::open(&created);
        attributes::set_for_phase(&xattrs, &host, Phase::BeforeMode, &self.path, &mut self.report.skipped);
        // Root has access nevertheless, and can set the mode now.
        if attributes.mode & 0o700 != 0o700 && !is_root() {
            self.closed.push((self.path.clone(), identity_of(&created)?, attributes, xattrs));
            return Ok(());
        }
        apply(&created, &attributes)?;
        attributes::set_for_phase(&xattrs, &host, Phase::AfterMode, &self.path, &mut self.report.skipped);
        Ok(())
    }

    fn close_directories(&mut self) -> Result<()> {
        for (path, created, attributes, xattrs) in std::mem::take(&mut self.closed) {
            let opened = open_again(self.stage.target(), &path, created);
            self.path = path;
            let closed = opened.and_then(|directory| {
                apply(&directory, &attributes)?;
                let host = attributes::XattrObject::open(&directory);
                attributes::set_for_phase(&xattrs, &host, Phase::AfterMode, &self.path, &mut self.report.skipped);
                Ok(())
            });
            self.note(closed)?;
        }
        Ok(())
    }

    fn report_complete(&mut self, ino: Ino, version: &LeafSet, failed: Option<&str>) -> Result<()> {
        self.report.older += u64::from(failed.is_some());
        self.report_object(RescueState::Whole, ino, version.generation, failed.is_some(), failed.unwrap_or_default())
    }

    fn report_object(
        &mut self,
        state: RescueState,
        ino: Ino,
        generation: Generation,
        older: bool,
        reason: &str,
    ) -> Result<()> {
        match state {
            RescueState::Whole => {}
            RescueState::Partial => self.report.partial += 1,
            RescueState::Lost => self.report.lost += 1,
        }
        let unproved = state == RescueState::Whole && !older && generation < self.index.newest; // RESCUE-3
        self.report.unproved += u64::from(unproved);
        (self.item)(&RescuedObject { state, path: &self.path, ino, generation, older, unproved, reason })
    }

    fn note(&mut self, result: Result<()>) -> Result<()> {
        self.tolerate(result.map(Some)).map(drop)
    }

    /// Records a failure of one object; returns an error that ends the rescue.
    fn tolerate<T>(&mut self, result: Result<Option<T>>) -> Result<Option<T>> {
        Problem::tolerate(&mut self.report.problems, &self.path, result)
    }
}

/// Calls `f` with name, type and inode of the entries in one part of a version of a directory. The
/// decoder refuses names that lead out of it.
fn visit_entries(
    index: &mut LeafIndex,
    part: (&LeafSet, usize),
    directory: Ino,
    f: &mut dyn FnMut(&[u8], u8, Ino),
) -> Result<()> {
    let (from, to) = (Key::new(directory.0, kind::DIR_LIST, 0), Key::new(directory.0, kind::DIR_LIST + 1, 0));
    index.records(part, from, to, &mut |_, value| {
        let entry = decode_list(value)?;
        f(entry.name, entry.file_type, entry.ino);
        Ok(true)
    })?;
    Ok(())
}

/// Additional directory of the target, created on first use.
struct LostFoundDirectory {
    name: Vec<u8>,
    host: Option<OwnedFd>,
}

impl LostFoundDirectory {
    fn new(name: &str) -> LostFoundDirectory {
        LostFoundDirectory { name: name.into(), host: None }
    }
}

impl RescueWalk<'_> {
    fn write_incomplete_file(
        &mut self,
        ino: Ino,
        object: Option<RescuedInode>,
        version: &LeafSet,
        reason: &str,
    ) -> Result<()> {
        if object.is_none() && self.index.data.contains_key(&ino.0) {
            self.named_orphans.insert(ino.0, vec![self.path.clone()]);
            return Ok(());
        }
        let state = if object.is_some() { RescueState::Partial } else { RescueState::Lost };
        self.incomplete.insert(ino.0, (state, version.generation));
        self.report_object(state, ino, version.generation, false, reason)?;
        let Some(mut special) = self.partial.take() else { return Ok(()) };
        let written = self.write_partial(&mut special, ino, object, version);
        self.partial = Some(special);
        self.note(ignoring_damage(written).map(drop))
    }

    fn write_partial(
        &mut self,
        special: &mut LostFoundDirectory,
        ino: Ino,
        object: Option<RescuedInode>,
        version: &LeafSet,
    ) -> Result<()> {
        let object = object.unwrap_or_else(|| RescuedInode::stand_in(mode::REGULAR | 0o600));
        if object.file_type() != mode::REGULAR {
            return Ok(());
        }
        self.open_lost_found(special)?;
        let Some(host) = &special.host else { return Ok(()) };
        let tell = self.progress_callback();
        let (path, skipped, progress) = (&self.path[..], &mut self.report.skipped, &mut self.progress);
        let written = &mut |bytes| progress(&tell(path, bytes));
        let source = ObjectSource { index: &mut self.index, pager: self.pager, version, ino, path, skipped, written };
        let created = object::write_object(source, &object, true, self.stage, (host, ino.0.to_string().as_bytes()))?;
        created.metadata
    }

    /// Creates the directory; if an object of the archive has its name, another name is used.
    fn open_lost_found(&mut self, special: &mut LostFoundDirectory) -> Result<()> {
        let wanted = special.name.clone();
        for attempt in 1..100 {
            if special.host.is_some() {
                return Ok(());
            }
            match object::directory(self.stage, self.stage.target(), &special.name) {
                Ok(host) => special.host = Some(host),
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::AlreadyExists => {
                    special.name = [&wanted[..], format!(".{attempt}").as_bytes()].concat();
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes inodes of which only data pages survived, with or without a name.
    fn write_orphan_data(&mut self) -> Result<()> {
        let mut remaining = std::mem::take(&mut self.named_orphans);
        let unnamed: Vec<u64> = self.index.data.keys().copied().filter(|ino| !self.seen.contains(ino)).collect();
        for ino in unnamed {
            // A leaf that covers the inode without having it proves a deletion, unless the leaf is
            // older than the inode.
            let newest = self.index.versions(Ino(ino)).first().map(|version| version.generation);
            let exists = newest.map(|generation| self.index.existed_after(Ino(ino), generation)).transpose()?;
            if exists.unwrap_or(true) {
                remaining.insert(ino, vec![[UNNAMED.as_bytes(), b"/", ino.to_string().as_bytes()].concat()]);
            }
        }
        if remaining.is_empty() {
            return Ok(());
        }
        let mut pieces = HashMap::new();
        if self.partial.is_some() {
            let progress = &mut self.progress;
            let wanted = remaining.keys().copied().collect();
            pieces = self.index.pieces(&wanted, &mut |done, total| progress(&RescueProgress::Scanning(done, total)))?;
        }
        for (ino, names) in remaining {
            self.path = names.first().cloned().unwrap_or_default();
            let written = self.write_pieces(Ino(ino), &pieces.remove(&ino).unwrap_or_default());
            let written = self.tolerate(written)?.unwrap_or_default();
            let pages = self.index.data.get(&ino).copied().unwrap_or_default();
            let state = if self.partial.is_some() && written == 0 { RescueState::Lost } else { RescueState::Partial };
            let reason = format!(
                "only data of it remains, of one or several versions: pages={} bytes={}",
                pages.count, pages.bytes
            );
            for name in names {
                self.path = name;
                self.report_object(state, Ino(ino), pages.last, false, &reason)?;
            }
        }
        Ok(())
    }

    /// Returns the number of pieces written; none without the option `partial`.
    fn write_pieces(&mut self, ino: Ino, pieces: &[DataPiece]) -> Result<Option<u64>> {
        let Some(mut special) = self.partial.take() else { return Ok(None) };
        let opened = if pieces.is_empty() { Ok(()) } else { self.open_lost_found(&mut special) };
        let written = opened.and_then(|()| match &special.host {
            Some(host) => object::write_pieces(pieces, self.pager, self.stage, host, ino.0.to_string().as_bytes()),
            None => Ok(0),
        });
        self.partial = Some(special);
        ignoring_damage(written)
    }
}
