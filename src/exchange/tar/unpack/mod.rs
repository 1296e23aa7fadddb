//! Extracts an untrusted tar into a new host directory, which appears when it is complete.
//!
//! The author of the tar controls names, content, times and whether a file is executable. All
//! objects belong to the extracting user and are private to it. Devices, FIFOs and symbolic links
//! that lead out of the directory are not created, so nothing can be written outside of it.

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;

use lockbox_terminal::display;

use super::members::{Member, MemberKind, Members};
use super::pax::SparseMap;
use crate::env::SystemEnvironment;
use crate::error::{Error, Result, Timestamp};
use crate::exchange::CopyCounts;
use crate::exchange::attributes::host_error;
use crate::exchange::extract::write_all;
use crate::exchange::staging_dir::{StagingDir, identity_of, link_again, make_directory, make_special, open_again};
use crate::fs::{Attributes, mode};
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
        let shown = display(&member.name);
        unpack.member(member, &mut members).map_err(|error| match error {
            Error::Invalid(detail) if !detail.starts_with("the tar ") => {
                Error::invalid(format!("member '{shown}' of the tar: {detail}"))
            }
            Error::Io { context, source } => Error::Io { context: format!("{shown}: {context}"), source },
            error => error,
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
    fn member(&mut self, mut member: Member, members: &mut Members<'_>) -> Result<()> {
        (self.go_on)()?;
        if member.path.len() > MAX_DEPTH {
            return Err(Error::invalid(format!("it lies below more than {MAX_DEPTH} directories")));
        }
        let path = member.path.join(&b'/');
        let Some(name) = member.path.pop() else {
            return Err(Error::invalid("it has no directory of its own"));
        };
        if member.path.is_empty() && !matches!(member.kind, MemberKind::Directory) {
            return Err(Error::invalid("it lies beside the directory"));
        }
        if let MemberKind::Directory = member.kind {
            self.directory(&member.path.iter().chain([&name]).map(|name| &name[..]).collect::<Vec<_>>())?;
            if let Some(created) = self.directories.get_mut(&path) {
                created.modified = Some(member.modified);
            }
            return Ok(());
        }
        let at = self.directory(&member.path.iter().map(|name| &name[..]).collect::<Vec<_>>())?;
        match &member.kind {
            MemberKind::File(map) => {
                let created = self.file(&at, &name, &member, map, members)?;
                self.files.insert(path, created);
            }
            MemberKind::Link(first) => {
                let first = first.join(&b'/');
                let created = self.files.get(&first).ok_or_else(|| {
                    Error::invalid(format!("it links to '{}', which is no file before it", display(&first)))
                })?;
                link_again(self.stage.directory(), &first, *created, &at, &name)?;
                self.report.copied.links += 1;
            }
            MemberKind::Symlink(target) if leads_out(target, member.path.len()) => self.report.strays += 1,
            MemberKind::Symlink(target) => {
                let attributes = Attributes { mode: mode::SYMLINK, ..Attributes::default() };
                make_special(&at, &name, &attributes, || Ok(target.clone()))?;
                set_times(&at, &name, member.modified)?;
                self.report.copied.symlinks += 1;
            }
            MemberKind::Node(..) => self.report.special += 1,
            MemberKind::Directory => {}
        }
        Ok(())
    }

    /// Returns the directory of this path; creates missing ones.
    fn directory(&mut self, names: &[&[u8]]) -> Result<OwnedFd> {
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
            rustix::fs::openat(at, name, flags, Mode::RUSR | Mode::WUSR).map_err(host_error("cannot make it"))?;
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
        rustix::fs::futimens(&host, &timestamps(member.modified)).map_err(host_error("cannot set the times"))?;
        self.report.copied.files += 1;
        self.report.copied.bytes += map.size;
        identity_of(&host)
    }

    /// Sets the times of directories, which each created entry has changed.
    fn times(&self) -> Result<()> {
        for (path, created) in &self.directories {
            if let Some(modified) = created.modified {
                let directory = open_again(self.stage.directory(), path, created.identity)?;
                rustix::fs::futimens(&directory, &timestamps(modified)).map_err(host_error("cannot set the times"))?;
            }
        }
        Ok(())
    }

    /// Returns the name of the single directory.
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

fn timestamps(modified: Timestamp) -> Timestamps {
    let time = Timespec { tv_sec: modified.seconds, tv_nsec: modified.nanos.into() };
    Timestamps { last_access: time, last_modification: time }
}

fn set_times(at: &OwnedFd, name: &[u8], modified: Timestamp) -> Result<()> {
    let set = rustix::fs::utimensat(at, name, &timestamps(modified), AtFlags::SYMLINK_NOFOLLOW);
    set.map_err(host_error("cannot set the times"))
}

#[cfg(test)]
mod tests;
