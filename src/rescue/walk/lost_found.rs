//! Additional directories of the target: for objects without a name, for incomplete files, and for
//! data pages of inodes without a surviving record.
//!
//! Data pages name the inode and offset of their bytes. It is unknown which of them belong to one
//! version, or how long the file was, so the result is always reported as partial.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use rustix::fs::AtFlags;

use super::super::index::{DataPiece, LeafSet};
use super::super::object::RescuedInode;
use super::super::write::{self, ObjectSource};
use super::super::{RescueProgress, RescueState, UNNAMED};
use super::RescueWalk;
use crate::error::{Error, Result};
use crate::exchange::host::host_error;
use crate::format::Ino;
use crate::fs::mode;

/// Additional directory of the target, created on first use.
pub(super) struct LostFoundDirectory {
    pub(super) name: Vec<u8>,
    pub(super) host: Option<OwnedFd>,
}

impl LostFoundDirectory {
    pub(super) fn new(name: &str) -> LostFoundDirectory {
        LostFoundDirectory { name: name.into(), host: None }
    }
}

impl RescueWalk<'_> {
    pub(super) fn write_incomplete_file(
        &mut self,
        ino: Ino,
        object: Option<RescuedInode>,
        version: &LeafSet,
        reason: &str,
    ) -> Result<()> {
        if object.is_none() && self.index.data.contains_key(&ino.0) {
            self.named_orphans.insert(ino.0, self.path.clone());
            return Ok(());
        }
        let state = if object.is_some() { RescueState::Partial } else { RescueState::Lost };
        self.report_object(state, ino, version.generation, false, reason)?;
        let Some(mut special) = self.partial.take() else { return Ok(()) };
        let written = self.write_partial(&mut special, ino, object, version);
        self.partial = Some(special);
        match written {
            Err(Error::Damaged(_)) => Ok(()),
            other => self.note(other),
        }
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
        let created = write::object(source, &object, true, self.stage, (host, ino.0.to_string().as_bytes()))?;
        created.metadata
    }

    /// Creates the directory; if an object of the archive has its name, another name is used.
    pub(super) fn open_lost_found(&mut self, special: &mut LostFoundDirectory) -> Result<()> {
        let wanted = special.name.clone();
        for attempt in 1..100 {
            if special.host.is_some() {
                return Ok(());
            }
            match write::directory(self.stage, self.stage.target(), &special.name) {
                Ok(host) => special.host = Some(host),
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::AlreadyExists => {
                    special.name = [&wanted[..], format!(".{attempt}").as_bytes()].concat();
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(super) fn remove_if_empty(&mut self, special: &LostFoundDirectory) -> Result<()> {
        if special.host.is_some() {
            match rustix::fs::unlinkat(self.stage.target(), &special.name[..], AtFlags::REMOVEDIR) {
                Ok(()) | Err(rustix::io::Errno::NOTEMPTY | rustix::io::Errno::EXIST) => {}
                Err(errno) => return Err(host_error("cannot remove an empty directory")(errno)),
            }
        }
        Ok(())
    }
}

impl RescueWalk<'_> {
    /// Writes inodes of which only data pages survived, with or without a name.
    pub(super) fn write_orphan_data(&mut self) -> Result<()> {
        let mut remaining = std::mem::take(&mut self.named_orphans);
        let mut unnamed = Vec::new();
        for ino in self.index.data.keys().copied().filter(|ino| !self.seen.contains(ino)) {
            unnamed.push(ino);
        }
        for ino in unnamed {
            // A leaf that covers the inode without having it proves a deletion, unless the leaf is
            // older than the inode.
            let deleted = match self.index.versions(Ino(ino)).first().map(|version| version.generation) {
                Some(generation) => !self.index.existed_after(Ino(ino), generation)?,
                None => false,
            };
            if !deleted {
                remaining.insert(ino, [UNNAMED.as_bytes(), b"/", ino.to_string().as_bytes()].concat());
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
        for (ino, path) in remaining {
            self.path = path;
            let written = self.write_pieces(Ino(ino), &pieces.remove(&ino).unwrap_or_default());
            let written = self.tolerate(written)?.unwrap_or_default();
            let pages = self.index.data.get(&ino).copied().unwrap_or_default();
            let state = if self.partial.is_some() && written == 0 { RescueState::Lost } else { RescueState::Partial };
            let reason = format!(
                "nothing but data is left of it, of one or several versions: pages={} bytes={}",
                pages.count, pages.bytes
            );
            self.report_object(state, Ino(ino), pages.last, false, &reason)?;
        }
        Ok(())
    }

    /// Returns the number of pieces written; none without the option `partial`.
    fn write_pieces(&mut self, ino: Ino, pieces: &[DataPiece]) -> Result<Option<u64>> {
        let Some(mut special) = self.partial.take() else { return Ok(None) };
        let opened = if pieces.is_empty() { Ok(()) } else { self.open_lost_found(&mut special) };
        let written = opened.and_then(|()| match &special.host {
            Some(host) => write::pieces(pieces, self.pager, self.stage, host, ino.0.to_string().as_bytes()),
            None => Ok(0),
        });
        self.partial = Some(special);
        match written {
            Err(Error::Damaged(_)) => Ok(None),
            written => written.map(Some),
        }
    }
}
