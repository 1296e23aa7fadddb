//! Additional directories of the target: for objects without a name, and for incomplete files.

use std::os::fd::OwnedFd;

use rustix::fs::AtFlags;

use super::super::RescueState;
use super::super::index::LeafSet;
use super::super::object::Object;
use super::super::write::{self, ObjectSource};
use super::Walk;
use crate::error::{Error, Result};
use crate::exchange::host::host_error;
use crate::format::Ino;
use crate::fs::mode;

/// Additional directory of the target, created on first use.
pub(in crate::rescue) struct LostFoundDirectory {
    pub(super) name: Vec<u8>,
    pub(in crate::rescue) host: Option<OwnedFd>,
}

impl LostFoundDirectory {
    pub(super) fn new(name: &str) -> LostFoundDirectory {
        LostFoundDirectory { name: name.into(), host: None }
    }
}

impl Walk<'_> {
    pub(super) fn write_incomplete_file(
        &mut self,
        ino: Ino,
        object: Option<Object>,
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
        object: Option<Object>,
        version: &LeafSet,
    ) -> Result<()> {
        let object = object.unwrap_or_else(|| Object::stand_in(mode::REGULAR | 0o600));
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
    pub(in crate::rescue) fn open_lost_found(&mut self, special: &mut LostFoundDirectory) -> Result<()> {
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
