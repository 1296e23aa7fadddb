//! rename with its four modes.

use super::links::Fate;
use crate::error::{Error, Result};
use crate::format::values::{InodeValue, NO_TRIM};
use crate::format::{Ino, Timestamp};
use crate::fs::directory::{ENTRY_RECORDS, Found, check_name};
use crate::fs::{FileSystem, RenameMode, inode, mode};
use crate::txn::Operation;

/// Both parents, both objects, both entries, and a whiteout.
const RENAME_RECORDS: u64 = 5 + 3 * ENTRY_RECORDS;

/// One end of a rename.
#[derive(Clone, Copy)]
struct Place<'a> {
    directory: Ino,
    name: &'a [u8],
}

/// What is found there.
struct Object {
    found: Found,
    inode: InodeValue,
}

impl FileSystem {
    /// Atomic. Refuses to move a directory below itself (`Invalid`).
    pub fn rename(
        &self,
        directory: Ino,
        name: &[u8],
        new_directory: Ino,
        new_name: &[u8],
        rename_mode: RenameMode,
    ) -> Result<()> {
        for name in [name, new_name] {
            if name == b"." || name == b".." {
                return Err(Error::invalid("`.` and `..` cannot be renamed"));
            }
            check_name(name)?;
        }
        let (from, to) = (Place { directory, name }, Place { directory: new_directory, name: new_name });
        // A replaced large file needs the reserve no more than its unlink would.
        let fate = self.volume.operate(RENAME_RECORDS, false, |op| self.rename_in(op, from, to, rename_mode))?;
        self.settle_fate(fate);
        self.finish_change(())
    }

    fn object(&self, op: &Operation<'_>, place: Place<'_>) -> Result<Option<Object>> {
        let Some(found) = self.find_entry(op.view(), place.directory, place.name)? else { return Ok(None) };
        Ok(Some(Object { found, inode: inode::load(op.view(), found.ino)? }))
    }

    fn rename_in(&self, op: &mut Operation<'_>, from: Place<'_>, to: Place<'_>, how: RenameMode) -> Result<Fate> {
        inode::load_directory(op.view(), from.directory)?;
        inode::load_directory(op.view(), to.directory)?;
        let source = self.object(op, from)?.ok_or(Error::NotFound)?;
        let target = self.object(op, to)?;
        if inode::is_directory(&source.inode) && self.is_below(op.view(), to.directory, source.found.ino)? {
            return Err(Error::invalid("a directory cannot be moved below itself"));
        }
        match (how, target) {
            (RenameMode::NoReplace, Some(_)) => Err(Error::Exists),
            (RenameMode::Exchange, None) => Err(Error::NotFound),
            (RenameMode::Exchange, Some(target)) => self.exchange(op, from, to, source, target),
            (_, Some(target)) if target.found.ino == source.found.ino => Ok(Fate::Linked),
            (_, Some(target)) => {
                check_replaceable(&source.inode, &target.inode)?;
                self.move_to(op, from, to, source, Some(target), how == RenameMode::Whiteout)
            }
            (_, None) => self.move_to(op, from, to, source, None, how == RenameMode::Whiteout),
        }
    }

    fn exchange(
        &self,
        op: &mut Operation<'_>,
        from: Place<'_>,
        to: Place<'_>,
        source: Object,
        target: Object,
    ) -> Result<Fate> {
        if source.found.ino == target.found.ino {
            return Ok(Fate::Linked);
        }
        if inode::is_directory(&target.inode) && self.is_below(op.view(), from.directory, target.found.ino)? {
            return Err(Error::invalid("a directory cannot be moved below itself"));
        }
        let now = self.environment.now();
        self.retarget_entry(op, from.directory, from.name, target.found.ino, target.found.file_type)?;
        self.retarget_entry(op, to.directory, to.name, source.found.ino, source.found.file_type)?;
        self.arrived(op, source, from.directory, to.directory, now)?;
        self.arrived(op, target, to.directory, from.directory, now)?;
        for directory in [from.directory, to.directory] {
            let mut parent = inode::load_directory(op.view(), directory)?;
            (parent.mtime, parent.ctime) = (now, now);
            inode::store(op, directory, &parent)?;
        }
        Ok(Fate::Linked)
    }

    fn move_to(
        &self,
        op: &mut Operation<'_>,
        from: Place<'_>,
        to: Place<'_>,
        source: Object,
        target: Option<Object>,
        whiteout: bool,
    ) -> Result<Fate> {
        let now = self.environment.now();
        let Found { ino, file_type, .. } = source.found;
        // The parents are loaded anew for each step: both ends may be the same directory.
        if whiteout {
            let device = self.make_whiteout(op, now)?;
            self.retarget_entry(op, from.directory, from.name, device, (mode::CHARACTER >> 12) as u8)?;
            let mut parent = inode::load_directory(op.view(), from.directory)?;
            (parent.mtime, parent.ctime) = (now, now);
            inode::store(op, from.directory, &parent)?;
        } else {
            let mut parent = inode::load_directory(op.view(), from.directory)?;
            self.remove_entry(op, from.directory, &mut parent, from.name, now)?;
            inode::store(op, from.directory, &parent)?;
        }
        let mut fate = Fate::Linked;
        let mut parent = inode::load_directory(op.view(), to.directory)?;
        match target {
            Some(target) => {
                // A new sequence number: who lists the directory meanwhile sees the old entry or the new one.
                self.remove_entry(op, to.directory, &mut parent, to.name, now)?;
                self.add_entry(op, to.directory, &mut parent, to.name, ino, file_type, now)?;
                if inode::is_directory(&target.inode) {
                    parent.links -= 1;
                    inode::store(op, to.directory, &parent)?;
                    fate = self.drop_directory(op, target.found.ino, target.inode)?;
                } else {
                    inode::store(op, to.directory, &parent)?;
                    fate = self.drop_link(op, target.found.ino, target.inode, now)?;
                }
            }
            None => {
                self.add_entry(op, to.directory, &mut parent, to.name, ino, file_type, now)?;
                inode::store(op, to.directory, &parent)?;
            }
        }
        self.arrived(op, source, from.directory, to.directory, now)?;
        Ok(fate)
    }

    /// The object's own records after it moved: ctime, and for a directory its parent and both parents' link counts.
    fn arrived(&self, op: &mut Operation<'_>, object: Object, old: Ino, new: Ino, now: Timestamp) -> Result<()> {
        let Object { found, mut inode } = object;
        inode.ctime = now;
        if inode::is_directory(&inode) && old != new {
            inode.parent = new;
            let mut parent = inode::load_directory(op.view(), old)?;
            parent.links -= 1;
            inode::store(op, old, &parent)?;
            let mut parent = inode::load_directory(op.view(), new)?;
            parent.links = parent.links.checked_add(1).ok_or(Error::TooManyLinks)?;
            inode::store(op, new, &parent)?;
        }
        inode::store(op, found.ino, &inode)
    }

    /// A 0:0 character device owned by root: what an overlay takes for "deleted here".
    fn make_whiteout(&self, op: &mut Operation<'_>, now: Timestamp) -> Result<Ino> {
        let ino = op.allocate_ino()?;
        let inode = InodeValue {
            mode: mode::CHARACTER,
            links: 1,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            trim: NO_TRIM,
            next_piece: 1,
            ..InodeValue::default()
        };
        inode::store(op, ino, &inode)?;
        Ok(ino)
    }
}

fn check_replaceable(source: &InodeValue, target: &InodeValue) -> Result<()> {
    match (inode::is_directory(source), inode::is_directory(target)) {
        (true, false) => Err(Error::NotDirectory),
        (false, true) => Err(Error::IsDirectory),
        (true, true) if target.size != 0 => Err(Error::NotEmpty),
        _ => Ok(()),
    }
}
