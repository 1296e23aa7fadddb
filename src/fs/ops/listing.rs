//! readdir by sequence number.

use std::ops::ControlFlow;

use super::attributes::attributes_of;
use crate::error::{Error, Result};
use crate::format::values::{InodeValue, ListEntry, decode_list};
use crate::format::{Ino, ROOT_INO};
use crate::fs::directory::{self, DIRECTORY_TYPE, EntryTarget, FIRST_SEQUENCE, list_key};
use crate::fs::write_buffer::ContentSize;
use crate::fs::{Attributes, DirectoryEntry, FileSystem, inode, mode};
use crate::txn::{ReadView, State, View};

/// Cookie of `.`.
const SELF_COOKIE: u64 = 1;
/// Cookie of `..`.
const PARENT_COOKIE: u64 = 2;

impl FileSystem {
    /// Returns the bound of a listing that starts now: the directory's next sequence number.
    pub fn directory_bound(&self, directory: Ino) -> Result<u64> {
        let state = self.volume.state();
        Ok(load_directory(self.volume.view(&state), directory)?.next_sequence)
    }

    /// Calls `f` with the entries after `cookie` (0 at the start) and before `bound`: `.` (cookie
    /// 1), `..` (cookie 2), then the entries in creation order. With `with_attributes` each has its
    /// attributes, except for entries that must not be followed (NAME-5) or that have a damaged
    /// inode. All entries of one call are from one version. `f` must not call this file system's
    /// changing operations: it runs while the version is read.
    ///
    /// # Errors
    /// `Damaged` also when an unreadable entry was skipped: `f` got the others all the same.
    pub fn list_directory(
        &self,
        directory: Ino,
        cookie: u64,
        bound: u64,
        with_attributes: bool,
        f: &mut dyn FnMut(&DirectoryEntry<'_>, Option<&Attributes>) -> ControlFlow<()>,
    ) -> Result<()> {
        // Checked before the version is taken: data accepted until then is in that version, unless
        // some is dirty.
        let nothing_dirty = self.write_buffer.is_empty();
        let reading = ReadView::of(&self.volume, self.volume.state());
        let attributes = |ino: Ino, inode: &InodeValue| match nothing_dirty {
            true => Ok(Attributes::of_published(ino, inode)),
            false => self.load_listed_attributes(reading.state(), ino, inode),
        };
        let attributes: Option<&AttributeLoader<'_>> = if with_attributes { Some(&attributes) } else { None };
        list(reading.view(), directory, cookie, bound, attributes, f)
    }

    fn load_listed_attributes(&self, state: &State, ino: Ino, inode: &InodeValue) -> Result<Attributes> {
        if inode.mode & mode::TYPE != mode::REGULAR {
            return Ok(Attributes::of_published(ino, inode));
        }
        // Dirty data belongs to the newest version: if that is a later one by now, all attributes
        // are taken from it. An inode removed meanwhile is taken from the older version, which has
        // it.
        let published = || Ok(Attributes::of_published(ino, inode));
        let (newest, dirty) = match self.write_buffer.load_dirty_inode(ino) {
            Err(Error::Stale) => return published(),
            looked => looked?,
        };
        if newest.sequence != state.sequence {
            match self.attributes(ino) {
                Err(Error::Stale) => return published(),
                newest => return newest,
            }
        }
        let content_size = dirty.map_or_else(|| ContentSize::published(inode), |(_, content_size)| content_size);
        Ok(attributes_of(ino, inode, content_size))
    }
}

/// Returns the attributes of a listed inode.
pub(super) type AttributeLoader<'a> = dyn Fn(Ino, &InodeValue) -> Result<Attributes> + 'a;

/// Lists like [`FileSystem::list_directory`], with the attributes that `attributes` returns for
/// each existing inode.
pub(super) fn list(
    view: View<'_>,
    directory: Ino,
    cookie: u64,
    bound: u64,
    attributes: Option<&AttributeLoader<'_>>,
    f: &mut dyn FnMut(&DirectoryEntry<'_>, Option<&Attributes>) -> ControlFlow<()>,
) -> Result<()> {
    // A removed directory that is still open lists nothing, not even itself.
    let listed = match load_directory(view, directory) {
        Ok(listed) if listed.links > 0 => listed,
        Ok(_) | Err(Error::NotFound) => return Ok(()),
        Err(error) => return Err(error),
    };
    let load_attributes = |ino: Ino, load: &dyn Fn() -> Result<InodeValue>| -> Result<Option<Attributes>> {
        let Some(attributes) = attributes else { return Ok(None) };
        match load().and_then(|inode| attributes(ino, &inode)) {
            Ok(attributes) => Ok(Some(attributes)),
            Err(Error::Damaged(_)) => Ok(None),
            Err(error) => Err(error),
        }
    };
    // `.` and `..` are not stored as entries: their types are known, or read from the inode.
    let parent = if directory == ROOT_INO { ROOT_INO } else { listed.parent };
    for (ino, name, place) in [(directory, &b"."[..], SELF_COOKIE), (parent, b"..", PARENT_COOKIE)] {
        if cookie < place {
            let entry = DirectoryEntry { ino, file_type: DIRECTORY_TYPE, name, cookie: place };
            let found = load_attributes(ino, &|| inode::load_named(view, ino))?;
            if f(&entry, found.as_ref()).is_break() {
                return Ok(());
            }
        }
    }
    let from = cookie.saturating_add(1).max(FIRST_SEQUENCE);
    if from >= bound {
        return Ok(());
    }
    let mut unreadable = Ok(());
    view.scan(list_key(directory, from), list_key(directory, bound), &mut |key, value| {
        let ListEntry { name, file_type, ino } = match decode_list(value) {
            Ok(entry) => entry,
            Err(error) => {
                unreadable = Err(error);
                return Ok(ControlFlow::Continue(()));
            }
        };
        let found = load_attributes(ino, &|| directory::load_target(view, directory, EntryTarget { ino, file_type }))?;
        Ok(f(&DirectoryEntry { ino, file_type, name, cookie: key.sub }, found.as_ref()))
    })?;
    unreadable
}

/// Loads a directory; `NotFound` when it is removed. One that is removed but still open has no
/// links.
pub(super) fn load_directory(view: View<'_>, ino: Ino) -> Result<InodeValue> {
    let inode = inode::find(view, ino)?.ok_or(Error::NotFound)?;
    if inode.mode & mode::TYPE != mode::DIRECTORY {
        return Err(Error::NotDirectory);
    }
    Ok(inode)
}
