//! link, unlink, rmdir.

use crate::error::{Error, Result};
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::directory::{ENTRY_RECORDS, check_name};
use crate::fs::reclaim::removed;
use crate::fs::{Attributes, FileSystem, inode};
use crate::txn::Operation;

/// What became of an inode that lost a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Linked,
    Gone(Ino),
    /// Unlinked, to be reclaimed later: in steps, or when its last handle is closed.
    Orphan(Ino),
}

impl FileSystem {
    /// At most 2^32 - 2 links; directories refuse with `NotPermitted`.
    pub fn link(&self, ino: Ino, directory: Ino, name: &[u8]) -> Result<Attributes> {
        if name == b"." || name == b".." {
            return Err(Error::Exists);
        }
        check_name(name)?;
        let inode = self.volume.operate(2 + ENTRY_RECORDS, false, |op| {
            let mut parent = inode::load_directory(op.view(), directory)?;
            let mut inode = inode::load(op.view(), ino)?;
            if inode::is_directory(&inode) {
                return Err(Error::NotPermitted);
            }
            if self.find_entry(op.view(), directory, name)?.is_some() {
                return Err(Error::Exists);
            }
            if inode.links == 0 {
                return Err(Error::NotFound);
            }
            if inode.links >= u32::MAX - 1 {
                return Err(Error::TooManyLinks);
            }
            let now = self.environment.now();
            inode.links += 1;
            inode.ctime = now;
            let file_type = (inode.mode >> 12) as u8;
            self.add_entry(op, directory, &mut parent, name, ino, file_type, now)?;
            inode::store(op, directory, &parent)?;
            inode::store(op, ino, &inode)?;
            Ok(inode)
        })?;
        self.finish_change(self.overlaid(ino, &inode))
    }

    /// The last link of a file that is not open frees it at once when small, else in steps.
    pub fn unlink(&self, directory: Ino, name: &[u8]) -> Result<()> {
        if name == b"." || name == b".." {
            return Err(Error::IsDirectory);
        }
        check_name(name)?;
        // Entry, parent and inode, or all records of a small file.
        let fate = self.volume.operate(3 + ENTRY_RECORDS, true, |op| {
            let mut parent = inode::load_directory(op.view(), directory)?;
            let found = self.find_entry(op.view(), directory, name)?.ok_or(Error::NotFound)?;
            let inode = inode::load(op.view(), found.ino)?;
            if inode::is_directory(&inode) {
                return Err(Error::IsDirectory);
            }
            let now = self.environment.now();
            self.remove_entry(op, directory, &mut parent, name, now)?;
            inode::store(op, directory, &parent)?;
            self.drop_link(op, found.ino, inode, now)
        })?;
        self.settle_fate(fate);
        self.finish_change(())
    }

    pub fn remove_directory(&self, directory: Ino, name: &[u8]) -> Result<()> {
        match name {
            b"." => return Err(Error::invalid("a directory cannot remove itself")),
            b".." => return Err(Error::NotEmpty),
            _ => check_name(name)?,
        }
        let fate = self.volume.operate(3 + ENTRY_RECORDS, true, |op| {
            let mut parent = inode::load_directory(op.view(), directory)?;
            let found = self.find_entry(op.view(), directory, name)?.ok_or(Error::NotFound)?;
            let inode = inode::load(op.view(), found.ino)?;
            if !inode::is_directory(&inode) {
                return Err(Error::NotDirectory);
            }
            if inode.size != 0 {
                return Err(Error::NotEmpty);
            }
            let now = self.environment.now();
            self.remove_entry(op, directory, &mut parent, name, now)?;
            parent.links -= 1;
            inode::store(op, directory, &parent)?;
            self.drop_directory(op, found.ino, inode)
        })?;
        self.settle_fate(fate);
        self.finish_change(())
    }

    /// One name of a file went; the last one removes it, or makes it an orphan while it is open or large.
    pub(super) fn drop_link(
        &self,
        op: &mut Operation<'_>,
        ino: Ino,
        mut inode: InodeValue,
        now: crate::format::Timestamp,
    ) -> Result<Fate> {
        inode.links = inode.links.saturating_sub(1);
        inode.ctime = now;
        inode::store(op, ino, &inode)?;
        if inode.links > 0 {
            return Ok(Fate::Linked);
        }
        // Decided under the writers' lock: an open that comes later can only follow a lookup, which finds no name any more.
        let open = self.handles.is_open(ino);
        Ok(if removed(op, ino, &inode, open)? { Fate::Gone(ino) } else { Fate::Orphan(ino) })
    }

    /// An empty directory goes at once, open or not: nothing can be read from it or created in it any more.
    pub(super) fn drop_directory(&self, op: &mut Operation<'_>, ino: Ino, mut inode: InodeValue) -> Result<Fate> {
        inode.links = 0;
        inode::store(op, ino, &inode)?;
        Ok(if removed(op, ino, &inode, false)? { Fate::Gone(ino) } else { Fate::Orphan(ino) })
    }

    /// After the operation is published: forgets what is staged, or queues what is to be reclaimed.
    pub(super) fn settle_fate(&self, fate: Fate) {
        match fate {
            Fate::Linked => {}
            Fate::Gone(ino) => self.forget_staged(ino),
            Fate::Orphan(ino) => {
                if !self.handles.is_open(ino) {
                    self.queue_reclaim(ino);
                }
            }
        }
    }
}
