//! Extracts an untrusted tar into a new host directory, which appears when it is complete; imports
//! a tar into an archive, by a staging directory that is moved into place after the tar has ended
//! correctly.
//!
//! The author of an untrusted tar controls names, content, times and whether a file is executable.
//! All objects belong to the extracting user and are private to it. Devices, FIFOs and symbolic
//! links that lead out of the directory are not created, so nothing can be written outside of it.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;

use lockbox_terminal::display;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::members::{Member, MemberKind, Members, in_member};
use super::pax::SparseMap;
use crate::env::SystemEnvironment;
use crate::error::{Error, Refusal, Result, Timestamp};
use crate::exchange::attributes::{SkippedItems, host_error, times};
use crate::exchange::extract::write_all;
use crate::exchange::path_ops::{self, delete_tree, none_if_missing, resolve_or_create};
use crate::exchange::staging_dir::{StagingDir, identity_of, link_again, make_directory, make_special, open_again};
use crate::exchange::walk::join;
use crate::exchange::{CopyCounts, Entries, Progress, import};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, Creator, FileSystem, RenameMode, SetAttributes, SetTime, XattrMode, mode};
use crate::storage::{FileIdentity, host_call};

/// Size of one read from the tar and one write to the host, in bytes.
const PIECE: usize = 256 << 10;
/// Maximum depth of directories: each level has its own descriptor and name.
const MAX_DEPTH: usize = 1000;
/// Maximum number of names to try.
const MAX_NUMBER: u32 = 1000;

/// Result of an extraction.
#[derive(Debug, Default)]
pub struct UnpackReport {
    pub copied: CopyCounts,
    /// Name of the new directory.
    pub name: Vec<u8>,
    /// Skipped devices and FIFOs.
    pub special: u64,
    /// Skipped symbolic links that lead out of the directory.
    pub strays: u64,
}

/// Extracts the single directory of a tar into the host directory `to`, under the first unused name
/// that `called` returns for 1, 2 and so on; `None` ends the names. `go_on` is called frequently.
///
/// # Errors
/// `Invalid` for anything but a complete tar of one directory, `Exists` when no name is left,
/// failures of the host, and that of `go_on`: nothing was created then.
pub fn unpack_tar(
    input: &mut dyn Read,
    to: &Path,
    called: &dyn Fn(u32) -> Option<Vec<u8>>,
    go_on: &dyn Fn() -> Result<()>,
) -> Result<UnpackReport> {
    let stage = StagingDir::new(to, &SystemEnvironment)?;
    let mut unpack = Unpacker {
        stage: &stage,
        report: UnpackReport::default(),
        directories: HashMap::new(),
        files: HashMap::new(),
        piece: vec![0; PIECE],
        go_on,
    };
    let mut members = Members::new(input);
    while let Some(member) = members.next()? {
        unpack.member(&member, &mut members).map_err(|error| match error {
            Error::Io { context, source } => {
                Error::Io { context: format!("{}: {context}", display(&member.name)), source }
            }
            error => in_member(&member.name, error),
        })?;
    }
    unpack.times()?;
    let top = unpack.top()?;
    // Durable before it has a name, and before the tar is deleted.
    host_call::sync_file_system(stage.directory()).map_err(host_error("cannot write the directory"))?;
    (unpack.go_on)()?;
    let mut report = unpack.report;
    report.name = place(&stage, &top, called)?;
    host_call::sync_directory(stage.target()).map_err(host_error("cannot write the directory"))?;
    Ok(report)
}

fn place(stage: &StagingDir, top: &[u8], called: &dyn Fn(u32) -> Option<Vec<u8>>) -> Result<Vec<u8>> {
    for number in 1..MAX_NUMBER {
        let Some(name) = called(number) else { break };
        match stage.place(top, stage.target(), &name) {
            Ok(()) => return Ok(name),
            Err(Errno::EXIST | Errno::NOTEMPTY) => {}
            Err(errno) => return Err(host_error("cannot move it into place")(errno)),
        }
    }
    Err(Error::Exists)
}

/// Created directory, and the time that it gets when it is complete.
struct UnpackedDirectory {
    identity: FileIdentity,
    modified: Option<Timestamp>,
}

struct Unpacker<'a> {
    stage: &'a StagingDir,
    report: UnpackReport,
    /// Directories by their paths below the stage (EXTRACT-1).
    directories: HashMap<Vec<u8>, UnpackedDirectory>,
    /// Files by their paths, for later hard links to them.
    files: HashMap<Vec<u8>, FileIdentity>,
    piece: Vec<u8>,
    go_on: &'a dyn Fn() -> Result<()>,
}

impl Unpacker<'_> {
    fn member(&mut self, member: &Member, members: &mut Members<'_>) -> Result<()> {
        (self.go_on)()?;
        if member.path.len() > MAX_DEPTH {
            return Err(Error::invalid(format!("it lies below more than {MAX_DEPTH} directories")));
        }
        let path = member.path.join(&b'/');
        let Some((name, above)) = member.path.split_last() else {
            return Err(Error::invalid("it has no directory of its own"));
        };
        if above.is_empty() && !matches!(member.kind, MemberKind::Directory) {
            return Err(Error::invalid("it is outside of the directory"));
        }
        if let MemberKind::Directory = member.kind {
            self.directory(&member.path)?;
            if let Some(created) = self.directories.get_mut(&path) {
                created.modified = Some(member.modified);
            }
            return Ok(());
        }
        let at = self.directory(above)?;
        match &member.kind {
            MemberKind::File(map) => {
                let created = self.file(&at, name, member, map, members)?;
                self.files.insert(path, created);
            }
            MemberKind::Link(first) => {
                let first = first.join(&b'/');
                let created = self.files.get(&first).ok_or_else(|| {
                    Error::invalid(format!("it links to '{}', which is not an earlier file", display(&first)))
                })?;
                link_again(self.stage.directory(), &first, *created, &at, name)?;
                self.report.copied.links += 1;
            }
            MemberKind::Symlink(target) if leads_out(target, above.len()) => self.report.strays += 1,
            MemberKind::Symlink(target) => {
                let attributes = Attributes { mode: mode::SYMLINK, ..Attributes::default() };
                make_special(&at, name, &attributes, || Ok(target.clone()))?;
                let times = times(member.modified, member.modified);
                rustix::fs::utimensat(&at, &name[..], &times, AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(host_error("cannot set the times"))?;
                self.report.copied.symlinks += 1;
            }
            MemberKind::Node(..) => self.report.special += 1,
            MemberKind::Directory => {}
        }
        Ok(())
    }

    /// Returns the directory of this path; creates missing ones.
    fn directory(&mut self, names: &[Vec<u8>]) -> Result<OwnedFd> {
        let root = self.stage.directory();
        let path = names.join(&b'/');
        if let Some(created) = self.directories.get(&path) {
            return open_again(root, &path, created.identity);
        }
        let Some((name, above)) = names.split_last() else {
            return root.try_clone().map_err(|error| Error::io("cannot open the directory", error));
        };
        let above = self.directory(above)?;
        let created = make_directory(&above, name)?;
        self.directories.insert(path, UnpackedDirectory { identity: identity_of(&created)?, modified: None });
        self.report.copied.directories += 1;
        Ok(created)
    }

    fn file(
        &mut self,
        at: &OwnedFd,
        name: &[u8],
        member: &Member,
        map: &SparseMap,
        members: &mut Members<'_>,
    ) -> Result<FileIdentity> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let host =
            rustix::fs::openat(at, name, flags, Mode::RUSR | Mode::WUSR).map_err(host_error("cannot create it"))?;
        for &(start, length) in &map.parts {
            let mut offset = start;
            while offset < start + length {
                (self.go_on)()?;
                let wanted = usize::try_from(start + length - offset).unwrap_or(PIECE).min(PIECE);
                let read = members.read(&mut self.piece[..wanted])?;
                write_all(&host, &self.piece[..read], offset)?;
                offset += read as u64;
            }
        }
        host_call::set_length(&host, map.size).map_err(host_error("cannot set the size"))?;
        if member.permissions & 0o100 != 0 {
            rustix::fs::fchmod(&host, Mode::RWXU).map_err(host_error("cannot set the mode"))?;
        }
        let times = times(member.modified, member.modified);
        rustix::fs::futimens(&host, &times).map_err(host_error("cannot set the times"))?;
        self.report.copied.files += 1;
        self.report.copied.bytes += map.size;
        identity_of(&host)
    }

    /// Sets the times of directories, which each created entry has changed.
    fn times(&self) -> Result<()> {
        for (path, created) in &self.directories {
            if let Some(modified) = created.modified {
                let directory = open_again(self.stage.directory(), path, created.identity)?;
                let times = times(modified, modified);
                rustix::fs::futimens(&directory, &times).map_err(host_error("cannot set the times"))?;
            }
        }
        Ok(())
    }

    fn top(&self) -> Result<Vec<u8>> {
        let mut tops = self.directories.keys().filter(|path| !path.contains(&b'/'));
        match (tops.next(), tops.next()) {
            (Some(top), None) => Ok(top.clone()),
            _ => Err(Error::invalid("the tar does not hold one directory")),
        }
    }
}

/// Returns whether a symbolic link in a directory of this depth below the top leads out of it. `..`
/// is accepted only at the beginning, where it denotes directories of the tar; after a name its
/// meaning would depend on other links.
fn leads_out(target: &[u8], depth: usize) -> bool {
    let names = target.split(|&byte| byte == b'/').filter(|name| !matches!(*name, b"" | b"."));
    let up = names.clone().take_while(|name| *name == b"..").count();
    target.starts_with(b"/") || up >= depth || names.skip(up).any(|name| name == b"..")
}

/// Staging directory in the root of the archive. The next import removes one of a killed import.
const STAGE: &[u8] = b".lockbox-import-tar";
/// Extended attribute that marks an import's directory; a user's directory of that name has none.
const MARK: &[u8] = b"user.lockbox.import-tar";

#[derive(Clone, Debug)]
pub struct TarImportOptions {
    /// Target directory in the archive; created if missing.
    pub to: Vec<u8>,
    /// Replace existing objects, except directories.
    pub replace: bool,
    /// Owner of directories that have members below them but are not members.
    pub creator: Creator,
}

/// Result of a tar import.
#[derive(Debug, Default)]
pub struct TarImport {
    pub copied: CopyCounts,
    /// Extended attributes that the archive does not store.
    pub skipped: SkippedItems,
}

/// Reads a tar to its end mark and puts its members below `options.to`. A later member of the same
/// name replaces an earlier one. Existing directories are merged, and get owner, mode, times and
/// attributes of the member.
///
/// # Errors
/// - `Invalid` for an incomplete or malformed tar, and for a member outside of the tree, below a
///   non-directory, or linked to a missing member,
/// - `Exists` naming the existing object without `replace`,
/// - that of `progress`.
///
/// The archive is unchanged then. `Exists` without a name if the root has a `.lockbox-import-tar`
/// that no import created. After `NoSpace`, `WriteFailed` and `Damaged`, the directory
/// `.lockbox-import-tar` may remain.
pub fn import_tar(
    fs: &FileSystem,
    input: &mut dyn Read,
    options: &TarImportOptions,
    progress: &mut dyn FnMut(&Progress<'_>) -> Result<()>,
) -> Result<TarImport> {
    if path_ops::components(&options.to)?.first().is_some_and(|first| *first == STAGE) {
        return Err(Error::invalid("the import itself uses this directory: import into another one"));
    }
    remove_old_stage(fs)?;
    let private = Creator { umask: None, ..options.creator };
    let created = fs.make_directory(ROOT_INO, STAGE, 0o700, private)?;
    let stage = created.ino;
    let mut import = TarImporter {
        fs,
        options,
        progress,
        stage,
        report: TarImport::default(),
        directories: Vec::new(),
        parent: None,
        piece: vec![0; import::piece_length(fs)],
    };
    let marked = fs.set_xattr(stage, MARK, b"", XattrMode::Set);
    let result = marked.and_then(|()| import.unpack(input)).and_then(|()| import.install());
    let removed = delete_tree(fs, ROOT_INO, STAGE, &created).map(drop);
    let report = import.report;
    result.and(removed).map(|()| report)
}

/// Removes the staging directory of a killed import, and nothing else.
fn remove_old_stage(fs: &FileSystem) -> Result<()> {
    let Some(stage) = none_if_missing(fs.lookup(ROOT_INO, STAGE))? else { return Ok(()) };
    let is_private = stage.mode & (mode::TYPE | mode::PERMISSIONS) == mode::DIRECTORY | 0o700;
    match fs.xattr(stage.ino, MARK) {
        Ok(_) if is_private => delete_tree(fs, ROOT_INO, STAGE, &stage).map(drop),
        Ok(_) | Err(Error::NoAttribute) => Err(Error::Exists),
        Err(error) => Err(error),
    }
}

struct TarImporter<'a> {
    fs: &'a FileSystem,
    options: &'a TarImportOptions,
    progress: &'a mut dyn FnMut(&Progress<'_>) -> Result<()>,
    stage: Ino,
    report: TarImport,
    /// Directories with metadata to set at the end, because each created entry changes the times.
    directories: Vec<(Ino, Member)>,
    /// Directory of the last member: usually also that of the next one.
    parent: Option<(Vec<Vec<u8>>, Ino)>,
    piece: Vec<u8>,
}

impl TarImporter<'_> {
    fn unpack(&mut self, input: &mut dyn Read) -> Result<()> {
        let mut members = Members::new(input);
        while let Some(member) = members.next()? {
            (self.progress)(&self.report.copied.progress(&member.name, 0))?;
            let name = member.name.clone();
            self.member(member, &mut members).map_err(|error| match error {
                Error::NameTooLong | Error::FileTooLarge | Error::TooManyLinks | Error::IsDirectory => {
                    in_member(&name, Error::invalid(error.to_string()))
                }
                error => in_member(&name, error),
            })?;
        }
        Ok(())
    }

    fn member(&mut self, mut member: Member, members: &mut Members<'_>) -> Result<()> {
        let Some(name) = member.path.pop() else {
            self.directories.push((self.stage, member));
            return Ok(());
        };
        let first = member.path.first().unwrap_or(&name);
        if first == STAGE && path_ops::components(&self.options.to)?.is_empty() {
            return Err(Error::invalid(
                "the import itself uses this name: import into another directory of the archive",
            ));
        }
        let parent = self.directory_of(&member.path)?;
        if let Some(existing) = none_if_missing(self.fs.lookup(parent, &name))? {
            match (existing.is_directory(), matches!(member.kind, MemberKind::Directory)) {
                (true, true) => {
                    self.directories.push((existing.ino, member));
                    return Ok(());
                }
                (true, false) => return Err(Error::invalid("it would replace a directory")),
                // A tar that was appended to: the last member takes precedence.
                (false, _) if !self.is_link_to(&member, existing.ino)? => self.fs.unlink(parent, &name)?,
                (false, _) => return Ok(()),
            }
        }
        self.make(member, parent, &name, members)
    }

    fn is_link_to(&self, member: &Member, ino: Ino) -> Result<bool> {
        match &member.kind {
            MemberKind::Link(target) => Ok(self.find(target)?.ino == ino),
            _ => Ok(false),
        }
    }

    fn make(&mut self, member: Member, parent: Ino, name: &[u8], members: &mut Members<'_>) -> Result<()> {
        let creator = Creator { uid: member.uid, gid: member.gid, umask: None };
        match &member.kind {
            MemberKind::Directory => {
                let created = self.fs.make_directory(parent, name, member.permissions, creator)?;
                self.report.copied.directories += 1;
                self.directories.push((created.ino, member));
                Ok(())
            }
            MemberKind::Link(target) => {
                let target = self.find(target)?;
                if target.mode & mode::TYPE == mode::DIRECTORY {
                    return Err(Error::invalid("it is a hard link to a directory"));
                }
                self.fs.link(target.ino, parent, name)?;
                self.report.copied.links += 1;
                Ok(())
            }
            MemberKind::File(map) => {
                let created = self.fs.create_and_open(parent, name, member.permissions, creator)?;
                let filled = self.fill(map, created.ino, &member, members);
                self.fs.release(created.ino)?;
                self.report.copied.files += 1;
                filled
            }
            MemberKind::Symlink(target) => {
                let created = self.fs.make_symlink(parent, name, target, creator)?;
                self.report.copied.symlinks += 1;
                self.metadata(created.ino, &member, SetAttributes::default())
            }
            MemberKind::Node(kind, rdev) => {
                let created = self.fs.make_node(parent, name, kind | member.permissions, *rdev, creator)?;
                self.report.copied.others += 1;
                self.metadata(created.ino, &member, permissions(&member))
            }
        }
    }

    fn fill(&mut self, map: &SparseMap, ino: Ino, member: &Member, members: &mut Members<'_>) -> Result<()> {
        for &(start, length) in &map.parts {
            let mut offset = start;
            while offset < start + length {
                let wanted = usize::try_from(start + length - offset).unwrap_or(usize::MAX).min(self.piece.len());
                // Fill the buffer: short reads of a pipe would be stored inefficiently.
                let mut filled = 0;
                while filled < wanted {
                    filled += members.read(&mut self.piece[filled..wanted])?;
                }
                import::write_piece(self.fs, ino, offset, &self.piece[..wanted])?;
                offset += wanted as u64;
                self.report.copied.bytes += wanted as u64;
                (self.progress)(&self.report.copied.progress(&member.name, 0))?;
            }
        }
        self.metadata(ino, member, SetAttributes { size: Some(map.size), ..permissions(member) })
    }

    /// Sets attributes first, because they change the mode and the times.
    fn metadata(&mut self, ino: Ino, member: &Member, set: SetAttributes) -> Result<()> {
        for (name, value) in &member.xattrs {
            match self.fs.set_xattr(ino, name, value, XattrMode::Set) {
                Err(
                    error @ (Error::Unsupported(_)
                    | Error::AttributeTooLarge
                    | Error::NotPermitted
                    | Error::PermissionDenied
                    | Error::RangeTooSmall
                    | Error::Invalid(_)),
                ) => self.report.skipped.attributes.add(&member.name, name, &error),
                other => other?,
            }
        }
        for name in &member.strange {
            let reason = "it is malformed, or names an unknown user or group";
            self.report.skipped.attributes.add(&member.name, name, &reason);
        }
        let set = SetAttributes {
            uid: Some(member.uid),
            gid: Some(member.gid),
            atime: Some(SetTime::To(member.accessed.unwrap_or(member.modified))),
            mtime: Some(SetTime::To(member.modified)),
            ..set
        };
        self.fs.set_attributes(ino, &set).map(drop)
    }

    /// Returns the directory of this path in the stage; creates directories missing in the tar.
    fn directory_of(&mut self, names: &[Vec<u8>]) -> Result<Ino> {
        if let Some((path, ino)) = &self.parent
            && path == names
        {
            return Ok(*ino);
        }
        let mut at = self.stage;
        for (depth, name) in names.iter().enumerate() {
            let found = match none_if_missing(self.fs.lookup(at, name))? {
                None => self.fs.make_directory(at, name, 0o755, self.options.creator)?,
                Some(found) => found,
            };
            if !found.is_directory() {
                let above = display(&names[..=depth].join(&b'/'));
                return Err(Error::invalid(format!("its parent '{above}' is not a directory in the tar")));
            }
            at = found.ino;
        }
        self.parent = Some((names.to_vec(), at));
        Ok(at)
    }

    /// Returns the object that the tar has at this path.
    fn find(&self, names: &[Vec<u8>]) -> Result<Attributes> {
        let mut at = self.fs.attributes(self.stage)?;
        for name in names {
            at = match self.fs.lookup(at.ino, name) {
                Err(Error::NotFound | Error::NotDirectory) => {
                    let path = display(&names.join(&b'/'));
                    return Err(Error::invalid(format!("it links to '{path}', which is not earlier in the tar")));
                }
                other => other?,
            };
        }
        Ok(at)
    }

    fn install(&mut self) -> Result<()> {
        let to = resolve_or_create(self.fs, &self.options.to, self.options.creator)?;
        self.check_conflicts(self.stage, to)?;
        let merged = self.move_all(self.stage, to)?;
        for (ino, member) in std::mem::take(&mut self.directories) {
            let ino = merged.get(&ino).copied().unwrap_or(ino);
            self.metadata(ino, &member, permissions(&member))?;
        }
        Ok(())
    }

    /// Checks for conflicts. Errors: `Invalid` naming the first conflicting object.
    fn check_conflicts(&self, from: Ino, to: Ino) -> Result<()> {
        let mut levels = vec![(from, to, Vec::new())];
        while let Some((from, to, path)) = levels.pop() {
            let mut entries = Entries::new(self.fs, from)?;
            while let Some(entry) = entries.next_entry() {
                let entry = entry?;
                let mut path = path.clone();
                join(&mut path, entry.name);
                match self.install_step(entry.attributes, to, entry.name)? {
                    InstallStep::Move | InstallStep::Replace => {}
                    InstallStep::Merge(existing) => levels.push((entry.attributes.ino, existing, path)),
                    InstallStep::InTheWay => {
                        let what = format!("nothing was imported: {} already exists", display(&path));
                        return Err(Error::Refused(Refusal::ExistingObject { what }));
                    }
                }
            }
        }
        Ok(())
    }

    /// Moves everything; returns the merged directories: in the tar, and in the archive.
    fn move_all(&self, from: Ino, to: Ino) -> Result<HashMap<Ino, Ino>> {
        let mut merged = HashMap::from([(from, to)]);
        let mut levels = vec![(from, to)];
        while let Some((from, to)) = levels.pop() {
            let mut entries = Entries::new(self.fs, from)?;
            while let Some(entry) = entries.next_entry() {
                let entry = entry?;
                let name = entry.name;
                match self.install_step(entry.attributes, to, name)? {
                    InstallStep::Move => self.fs.rename(from, name, to, name, RenameMode::NoReplace)?,
                    InstallStep::Replace => self.fs.rename(from, name, to, name, RenameMode::Replace)?,
                    InstallStep::Merge(existing) => {
                        merged.insert(entry.attributes.ino, existing);
                        levels.push((entry.attributes.ino, existing));
                    }
                    // The archive has no other users, so `check_conflicts` would have found it.
                    InstallStep::InTheWay => return Err(Error::Exists),
                }
            }
        }
        Ok(merged)
    }

    fn install_step(&self, attributes: &Attributes, to: Ino, name: &[u8]) -> Result<InstallStep> {
        let Some(existing) = none_if_missing(self.fs.lookup(to, name))? else { return Ok(InstallStep::Move) };
        Ok(match (attributes.is_directory(), existing.is_directory()) {
            (true, true) => InstallStep::Merge(existing.ino),
            (false, false) if self.options.replace => InstallStep::Replace,
            _ => InstallStep::InTheWay,
        })
    }
}

fn permissions(member: &Member) -> SetAttributes {
    SetAttributes { mode: Some(member.permissions), ..SetAttributes::default() }
}

/// Action for an entry of the stage.
enum InstallStep {
    Move,
    Replace,
    /// Both are directories.
    Merge(Ino),
    InTheWay,
}
