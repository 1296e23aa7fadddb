//! readdir by sequence number.

use std::ops::ControlFlow;

use super::attributes::attributes_of;
use crate::error::{Error, Result};
use crate::format::values::{InodeValue, ListEntry, decode_list};
use crate::format::{Ino, ROOT_INO};
use crate::fs::directory::{self, DIRECTORY_TYPE, FIRST_SEQUENCE, Target, list_key};
use crate::fs::write_buffer::Presence;
use crate::fs::{Attributes, DirectoryEntry, FileSystem, inode, mode};
use crate::txn::{Reading, State, View};

/// Cookie of `.`.
const SELF_COOKIE: u64 = 1;
/// Cookie of `..`.
const PARENT_COOKIE: u64 = 2;

impl FileSystem {
    /// The bound that a listing started now must not pass: the directory's next sequence number.
    pub fn directory_bound(&self, directory: Ino) -> Result<u64> {
        let state = self.volume.state();
        Ok(load_directory(self.volume.view(&state), directory)?.next_sequence)
    }

    /// Calls `f` with the entries behind `cookie` (0 at the start) and before `bound`: `.` (cookie 1), `..` (cookie 2), then the
    /// entries in creation order, each with its attributes when `with_attributes`, but for those of an entry that must not be followed
    /// (NAME-5), and of one that has damage where they are read. All of one call come from one version. `f` must not call into this file system's changing operations: it runs while the
    /// version is read.
    ///
    /// # Errors
    /// `Damaged` also when an entry was passed over that cannot be read: then `f` got the others all the same.
    pub fn list_directory(
        &self,
        directory: Ino,
        cookie: u64,
        bound: u64,
        with_attributes: bool,
        f: &mut dyn FnMut(&DirectoryEntry<'_>, Option<&Attributes>) -> ControlFlow<()>,
    ) -> Result<()> {
        // Asked before the version is taken: what was accepted until then is in it, unless somebody has staged data.
        let nothing_staged = self.staging.is_empty();
        let reading = Reading::of(&self.volume, self.volume.state());
        let attributes = |ino: Ino, inode: &InodeValue| match nothing_staged {
            true => Ok(Attributes::of_published(ino, inode)),
            false => self.listed_attributes(reading.state(), ino, inode),
        };
        let attributes: Option<&Described<'_>> = if with_attributes { Some(&attributes) } else { None };
        list(reading.view(), directory, cookie, bound, attributes, f)
    }

    fn listed_attributes(&self, state: &State, ino: Ino, inode: &InodeValue) -> Result<Attributes> {
        if inode.mode & mode::TYPE != mode::REGULAR {
            return Ok(attributes_of(ino, inode, Presence::published(inode)));
        }
        // Staged data belongs to the newest version: when that is another one by now, all is taken from there.
        // It was removed meanwhile: the listing is of the older version, which has it.
        let published = || Ok(attributes_of(ino, inode, Presence::published(inode)));
        let (newest, staged) = match self.staging.staged_presence(ino) {
            Err(Error::Stale) => return published(),
            looked => looked?,
        };
        if newest.sequence != state.sequence {
            match self.attributes(ino) {
                Err(Error::Stale) => return published(),
                newest => return newest,
            }
        }
        let presence = staged.map_or_else(|| Presence::published(inode), |(_, presence)| presence);
        Ok(attributes_of(ino, inode, presence))
    }
}

/// What is told of an inode that a listing came to.
pub(super) type Described<'a> = dyn Fn(Ino, &InodeValue) -> Result<Attributes> + 'a;

/// Lists as [`FileSystem::list_directory`] says, with what `attributes` tells of each inode if it is there.
pub(super) fn list(
    view: View<'_>,
    directory: Ino,
    cookie: u64,
    bound: u64,
    attributes: Option<&Described<'_>>,
    f: &mut dyn FnMut(&DirectoryEntry<'_>, Option<&Attributes>) -> ControlFlow<()>,
) -> Result<()> {
    // A directory that was removed while somebody held it lists nothing, not even itself.
    let listed = match load_directory(view, directory) {
        Ok(listed) if listed.links > 0 => listed,
        Ok(_) | Err(Error::NotFound) => return Ok(()),
        Err(error) => return Err(error),
    };
    let described = |ino: Ino, load: &dyn Fn() -> Result<InodeValue>| -> Result<Option<Attributes>> {
        let Some(attributes) = attributes else { return Ok(None) };
        match load().and_then(|inode| attributes(ino, &inode)) {
            Ok(attributes) => Ok(Some(attributes)),
            Err(Error::Damaged(_)) => Ok(None),
            Err(error) => Err(error),
        }
    };
    // `.` and `..` are no entries: what they are is known, or the inode's word.
    let parent = if directory == ROOT_INO { ROOT_INO } else { listed.parent };
    for (ino, name, place) in [(directory, &b"."[..], SELF_COOKIE), (parent, b"..", PARENT_COOKIE)] {
        if cookie < place {
            let entry = DirectoryEntry { ino, file_type: DIRECTORY_TYPE, name, cookie: place };
            let found = described(ino, &|| inode::load_named(view, ino))?;
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
        let found = described(ino, &|| directory::follow(view, directory, Target { ino, file_type }))?;
        Ok(f(&DirectoryEntry { ino, file_type, name, cookie: key.sub }, found.as_ref()))
    })?;
    unreadable
}

/// `NotFound` when it is gone; one that was removed and is held has no links.
pub(super) fn load_directory(view: View<'_>, ino: Ino) -> Result<InodeValue> {
    let inode = inode::find(view, ino)?.ok_or(Error::NotFound)?;
    if inode.mode & mode::TYPE != mode::DIRECTORY {
        return Err(Error::NotDirectory);
    }
    Ok(inode)
}
