//! Adds many small files at once: their pages are packed and written first, then one operation
//! references them all.
//!
//! # Invariants
//! BULK-1  A batch is one operation: readers and crashes see all of its files, each whole, or none
//!     of them (TXN-6).
//! BULK-2  Packed pages contain inode numbers, so the numbers of a batch are allocated before; they
//!     are never used otherwise, even if the batch fails.
//! BULK-3  A page of a batch has as many counts as files that the operation references; a page
//!     without any is given back.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::names::{NewObject, new_inode};
use super::xattr::{RECORDS_OF_VALUE, put_entry};
use crate::error::{Error, Result, Timestamp};
use crate::format::values::{InodeValue, MAX_XATTR, find_in_index, inode_flags};
use crate::format::{Ino, Key, MAX_DATA};
use crate::fs::directory::{self, DirectoryEditor, DirectoryRecord, EntryTarget, check_new_name, put_in_list};
use crate::fs::extents::{INLINE, PACK, PACK_FILES, Packer, SharedPage, SharedPages};
use crate::fs::writeback::run_parallel;
use crate::fs::{Creator, FileSystem, XattrMode, extents, inode, mode};
use crate::txn::{Operation, Reservation, UnreferencedPages, View, Volume, groups_for};

/// Maximum content of a file that can be added in bulk, which is the limit for packing.
pub(crate) const MAX_SMALL_FILE: u64 = PACK;

/// Maximum files of one operation. An operation copies each changed node once, about five for a
/// single file: with this many files the nodes cost little compared to the files, and the writers'
/// lock is not held for long.
const BATCH_FILES: usize = 1024;
/// Maximum content and attributes of one operation: some pages for each processor to seal.
const BATCH_BYTES: usize = 16 * MAX_DATA;
/// Records of a new file without its attributes: inode, index, list, and content with a page's
/// share of a count.
const RECORDS: u64 = 5;
/// Minimum pages per thread: sealing one takes 100 us and more, starting a thread about 50.
const MIN_PAGES_PER_THREAD: usize = 2;

/// A regular file to be created, with its attributes and content. Of the directory it inherits only
/// the storage flags (packed, compressed), neither permissions nor anything else.
#[derive(Clone, Copy, Debug)]
pub struct NewFile<'a> {
    pub directory: Ino,
    pub name: &'a [u8],
    /// Permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// `None` means now.
    pub atime: Option<Timestamp>,
    pub mtime: Option<Timestamp>,
    /// Names and values of attributes that satisfy [`FileSystem::is_plain_xattr`].
    pub xattrs: &'a [(Vec<u8>, Vec<u8>)],
    /// At most 32 KiB.
    pub content: &'a [u8],
}

impl NewFile<'_> {
    /// Attributes count too: they may be much larger than the content.
    fn bytes(&self) -> usize {
        self.content.len() + self.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>()
    }
}

impl FileSystem {
    /// Adds new files, in the given order. Each is added whole or refused; `added` gets its number
    /// or the reason (`Exists`, `NotFound`, ...). Files are published in batches, each atomic.
    ///
    /// # Errors
    /// `NoSpace`, `WriteFailed`, `ReadOnly`, `Damaged`, `Io`: the files without a result in `added`
    /// are not added. Files of earlier batches exist, as durable as without the error.
    pub fn add_files(&self, files: &[NewFile<'_>], added: &mut Vec<Result<Ino>>) -> Result<()> {
        let before = added.len();
        let (mut rest, mut done) = (files, Ok(()));
        while done.is_ok() && !rest.is_empty() {
            let (batch, later) = rest.split_at(batch_length(rest));
            done = self.add_batch(batch, added);
            rest = later;
        }
        // Published batches stay, even after a later error.
        let durable = if added[before..].iter().any(Result::is_ok) { self.finish_change() } else { Ok(()) };
        done.and(durable)
    }

    /// Halves a batch that has no space as a whole, until a single file does not fit.
    fn add_batch(&self, files: &[NewFile<'_>], added: &mut Vec<Result<Ino>>) -> Result<()> {
        match self.try_add(files) {
            Ok(outcomes) => added.extend(outcomes),
            Err(error @ (Error::WriteFailed(_) | Error::ReadOnly(_) | Error::Damaged(_) | Error::Io { .. })) => {
                return Err(error);
            }
            Err(_) if files.len() > 1 => {
                let (first, second) = files.split_at(files.len() / 2);
                self.add_batch(first, added)?;
                self.add_batch(second, added)?;
            }
            Err(error @ Error::NoSpace(_)) => return Err(error),
            Err(error) => added.push(Err(error)),
        }
        Ok(())
    }

    fn try_add(&self, files: &[NewFile<'_>]) -> Result<Vec<Result<Ino>>> {
        let (refused, pages) = self.plan_batch(files)?;
        let accepted = refused.iter().filter(|refused| refused.is_none()).count() as u64;
        if accepted == 0 {
            return Ok(refused.into_iter().flatten().map(Err).collect());
        }
        let paged = || pages.iter().flat_map(|page| &page.items).map(|index| files[*index].content.len() as u64);
        // A file without others to share a page with takes one of its own.
        let (bytes, count) = (paged().sum(), paged().count() as u64);
        let reserved = if count > 0 { Some(self.volume.reserve_data(bytes, count)?) } else { None };
        // BULK-2. After the steps that may fail for lack of space: allocated numbers are never
        // given back.
        let mut next = self.volume.operate(1, false, |op| op.set_aside_inos(accepted))?;
        let number = |refused: &Option<Error>| {
            let own = next;
            next.0 += u64::from(refused.is_none());
            own
        };
        // The entry of a refused file has the number of another one and is not used.
        let inos: Vec<Ino> = refused.iter().map(number).collect();
        let mut written = write_pages(&self.volume, self.writeback.threads, &pages, files, &inos, reserved)?.sorted();
        let records = files.iter().map(|file| RECORDS + file.xattrs.len() as u64 * RECORDS_OF_VALUE).sum();
        self.volume.operate(records, false, |op| {
            let outcome = |(ino, refused): (&Ino, &Option<Error>)| refused.clone().map_or(Ok(*ino), Err);
            let mut outcomes: Vec<Result<Ino>> = inos.iter().zip(&refused).map(outcome).collect();
            self.link_batch(op, files, &mut outcomes, &mut written)?;
            Ok(outcomes)
        })
    }

    /// Decides before the operation: the reason for refusing a file, and the files that share a
    /// page.
    fn plan_batch(&self, files: &[NewFile<'_>]) -> Result<(Vec<Option<Error>>, SharedPages<usize>)> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let mut directories: BTreeMap<Ino, u32> = BTreeMap::new();
        let (mut refused, mut packer) = (Vec::with_capacity(files.len()), Packer::new(self.options, PACK_FILES));
        for (index, file) in files.iter().enumerate() {
            let checked = validate(file).and_then(|()| self.check_target(view, file, &mut directories));
            match checked {
                Ok(flags) => {
                    refused.push(None);
                    if file.content.len() as u64 > INLINE {
                        packer.add(file.uid, flags, file.content.len(), index);
                    }
                }
                Err(error @ (Error::Damaged(_) | Error::Io { .. })) => return Err(error),
                Err(error) => refused.push(Some(error)),
            }
        }
        Ok((refused, packer.pages()))
    }

    /// Returns the flags of the file's directory, or an error if the file cannot be created in this
    /// version.
    fn check_target(&self, view: View<'_>, file: &NewFile<'_>, directories: &mut BTreeMap<Ino, u32>) -> Result<u32> {
        let flags = match directories.entry(file.directory) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                *entry.insert(DirectoryEditor::load(view, &self.name_key, file.directory)?.inode.flags)
            }
        };
        match directory::find(view, &self.name_key, file.directory, file.name)? {
            Some(_) => Err(Error::Exists),
            None => Ok(flags),
        }
    }

    /// Creates the entries of all files that are not refused, then their inodes. Each kind of
    /// record is inserted in the order of its keys, so that leaves are filled one after the other.
    fn link_batch(
        &self,
        op: &mut Operation<'_>,
        files: &[NewFile<'_>],
        outcomes: &mut [Result<Ino>],
        written: &mut UnreferencedPages,
    ) -> Result<()> {
        let now = self.environment.stamp();
        let mut naming = BatchEntries { directories: BTreeMap::new(), index: BTreeMap::new() };
        let mut flags = vec![0; files.len()];
        let mut listed = Vec::with_capacity(files.len());
        for (index, file) in files.iter().enumerate() {
            let Ok(ino) = outcomes[index] else { continue };
            match naming.add_entry(op, &self.name_key, file, ino) {
                Ok((found, inherited)) => {
                    flags[index] = inherited;
                    listed.push((file, found));
                }
                // Created or removed since the check, or twice in the batch. Nothing was changed
                // for it.
                Err(error @ (Error::Exists | Error::NotFound | Error::NotDirectory)) => outcomes[index] = Err(error),
                Err(error) => return Err(error),
            }
        }
        for (key, names) in naming.index {
            names.into_iter().try_for_each(|(name, found)| directory::put_in_index(op, key, name, found))?;
        }
        let changed: BTreeSet<Ino> = listed.iter().map(|(file, _)| file.directory).collect();
        listed.into_iter().try_for_each(|(file, found)| put_in_list(op, file.directory, file.name, found))?;
        let mut changed = naming.directories.into_values().filter(|directory| changed.contains(&directory.ino));
        changed.try_for_each(|mut directory| directory.store(op, now))?;
        let named: BTreeSet<Ino> = outcomes.iter().flatten().copied().collect();
        written.name(op, |piece| named.contains(&piece.ino))?; // BULK-3
        for (index, file) in files.iter().enumerate() {
            let Ok(ino) = outcomes[index] else { continue };
            let creator = Creator { uid: file.uid, gid: file.gid, umask: None };
            let object = NewObject { mode: (file.mode & mode::PERMISSIONS) | mode::REGULAR, rdev: 0, creator };
            let length = file.content.len() as u64;
            let mut value = InodeValue {
                atime: file.atime.unwrap_or(now),
                mtime: file.mtime.unwrap_or(now),
                flags: flags[index],
                size: length,
                bytes: length,
                ..new_inode(object, file.directory, now)
            };
            op.inode_made();
            for (name, content) in file.xattrs {
                put_entry(op, &self.name_key, ino, &mut value, name, content, XattrMode::Create)?;
            }
            inode::store(op, ino, &value)?;
            let pieces = written.of(ino);
            if pieces.is_empty() && length > 0 {
                op.insert(extents::inline_key(ino), file.content)?;
            }
            pieces.iter().try_for_each(|piece| extents::insert_piece(op, piece))?;
        }
        Ok(())
    }
}

/// Entries that a batch adds to its directories, not yet in the tree.
struct BatchEntries<'a> {
    directories: BTreeMap<Ino, DirectoryEditor<'a>>,
    /// Names by the key of their index record.
    index: BTreeMap<Key, Vec<(&'a [u8], DirectoryRecord)>>,
}

impl<'a> BatchEntries<'a> {
    /// Returns the entry for the file, and the storage flags of its directory. An error changes
    /// nothing.
    fn add_entry(
        &mut self,
        op: &Operation<'_>,
        name_key: &'a [u8; 16],
        file: &NewFile<'a>,
        ino: Ino,
    ) -> Result<(DirectoryRecord, u32)> {
        let directory = match self.directories.entry(file.directory) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(DirectoryEditor::load(op.view(), name_key, file.directory)?),
        };
        let key = directory::index_key(name_key, file.directory, file.name);
        let there = op.view().get(key, |value| find_in_index(value, file.name))?.flatten();
        let names = self.index.entry(key).or_default();
        if there.is_some() || names.iter().any(|(name, _)| *name == file.name) {
            return Err(Error::Exists);
        }
        let found = directory.allocate_sequence(EntryTarget { ino, file_type: directory::file_type(mode::REGULAR) })?;
        names.push((file.name, found));
        Ok((found, directory.inode.flags & (inode_flags::NO_PACK | inode_flags::NO_COMPRESS)))
    }
}

fn batch_length(files: &[NewFile<'_>]) -> usize {
    let mut bytes = 0;
    let fitting = files.iter().take(BATCH_FILES).take_while(|file| {
        bytes += file.bytes();
        bytes <= BATCH_BYTES
    });
    fitting.count().max(1)
}

fn validate(file: &NewFile<'_>) -> Result<()> {
    check_new_name(file.name)?;
    if file.content.len() as u64 > MAX_SMALL_FILE {
        return Err(Error::FileTooLarge);
    }
    if [file.atime, file.mtime].into_iter().flatten().any(|time| time.nanos >= 1_000_000_000) {
        return Err(Error::invalid("nanoseconds of a time are out of range"));
    }
    for (name, value) in file.xattrs {
        if !FileSystem::is_plain_xattr(name) {
            return Err(Error::Unsupported("such an attribute of a file that is added in bulk".into()));
        }
        if value.len() > MAX_XATTR {
            return Err(Error::AttributeTooLarge);
        }
    }
    Ok(())
}

/// Seals and writes the pages, on several threads when there are enough.
fn write_pages(
    volume: &Arc<Volume>,
    threads: usize,
    pages: &[SharedPage<usize>],
    files: &[NewFile<'_>],
    inos: &[Ino],
    mut reserved: Option<Reservation>,
) -> Result<UnreferencedPages> {
    let share = |page: &SharedPage<usize>| {
        page.items.iter().map(|index| groups_for(files[*index].content.len() as u64, 1)).sum()
    };
    let mut written = UnreferencedPages::new(volume);
    let parts = run_parallel(
        threads.min(pages.len() / MIN_PAGES_PER_THREAD),
        1,
        pages,
        &mut reserved,
        share,
        |pages, reserved| {
            let mut written = UnreferencedPages::new(volume);
            if let Some(reserved) = reserved {
                for page in pages {
                    let parts: Vec<(Ino, u64, &[u8])> =
                        page.items.iter().map(|i| (inos[*i], 0, files[*i].content)).collect();
                    written.absorb(volume.write_packed(reserved, &parts, page.compression)?);
                }
            }
            Ok(written)
        },
    )?;
    parts.into_iter().for_each(|part| written.absorb(part));
    volume.limit_unsynced()?;
    Ok(written)
}
