//! In-memory inodes: a sharded map, file content in pieces, directories in creation order.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use fuser::{Errno, FileAttr, FileType, INodeNo};
use parking_lot::{Mutex, MutexGuard, RwLock};

/// Bytes of file content per allocation, as large as lockbox's frames.
pub(crate) const PIECE: usize = 128 << 10;
const SHARDS: u64 = 16;
const ROOT: u64 = 1;
/// First cookie of an entry: `.` and `..` have 1 and 2.
const FIRST_COOKIE: u64 = 3;

pub(crate) type Result<T> = std::result::Result<T, Errno>;

pub(crate) struct Inode {
    pub(crate) attributes: FileAttr,
    pub(crate) content: Content,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    open: u32,
}

pub(crate) enum Content {
    /// An absent piece is a hole.
    File(Vec<Option<Box<[u8]>>>),
    Directory(Directory),
    Symlink(Vec<u8>),
    Special,
}

#[derive(Default)]
pub(crate) struct Directory {
    by_name: HashMap<Vec<u8>, u64>,
    pub(crate) by_cookie: BTreeMap<u64, Entry>,
    pub(crate) parent: u64,
    next: u64,
}

#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) name: Vec<u8>,
    pub(crate) ino: u64,
    pub(crate) kind: FileType,
}

impl Directory {
    fn new(parent: u64) -> Directory {
        Directory { parent, next: FIRST_COOKIE, ..Directory::default() }
    }

    fn get(&self, name: &[u8]) -> Option<&Entry> {
        self.by_name.get(name).and_then(|cookie| self.by_cookie.get(cookie))
    }

    fn insert(&mut self, entry: Entry) {
        self.by_name.insert(entry.name.clone(), self.next);
        self.by_cookie.insert(self.next, entry);
        self.next += 1;
    }

    fn remove(&mut self, name: &[u8]) -> Option<Entry> {
        self.by_name.remove(name).and_then(|cookie| self.by_cookie.remove(&cookie))
    }
}

impl Inode {
    pub(crate) fn directory(&mut self) -> Result<&mut Directory> {
        match &mut self.content {
            Content::Directory(directory) => Ok(directory),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn pieces(&mut self) -> Result<&mut Vec<Option<Box<[u8]>>>> {
        match &mut self.content {
            Content::File(pieces) => Ok(pieces),
            _ => Err(Errno::EINVAL),
        }
    }

    fn touch(&mut self) {
        let now = SystemTime::now();
        self.attributes.mtime = now;
        self.attributes.ctime = now;
    }

    pub(crate) fn read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>> {
        let end = self.attributes.size.min(offset.saturating_add(length as u64));
        let mut data = Vec::with_capacity(end.saturating_sub(offset) as usize);
        let pieces = self.pieces()?;
        let mut at = offset;
        while at < end {
            let (index, start) = ((at / PIECE as u64) as usize, (at % PIECE as u64) as usize);
            let count = (PIECE - start).min((end - at) as usize);
            match pieces.get(index) {
                Some(Some(piece)) => data.extend_from_slice(&piece[start..start + count]),
                _ => data.resize(data.len() + count, 0),
            }
            at += count as u64;
        }
        Ok(data)
    }

    pub(crate) fn write(&mut self, offset: u64, mut data: &[u8]) -> Result<()> {
        let end = offset.checked_add(data.len() as u64).ok_or(Errno::EFBIG)?;
        let pieces = self.pieces()?;
        let mut at = offset;
        while !data.is_empty() {
            let (index, start) = ((at / PIECE as u64) as usize, (at % PIECE as u64) as usize);
            let count = (PIECE - start).min(data.len());
            if pieces.len() <= index {
                pieces.resize(index + 1, None);
            }
            let piece = pieces[index].get_or_insert_with(|| vec![0; PIECE].into_boxed_slice());
            piece[start..start + count].copy_from_slice(&data[..count]);
            data = &data[count..];
            at += count as u64;
        }
        self.attributes.size = self.attributes.size.max(end);
        self.attributes.blocks = self.attributes.size.div_ceil(512);
        Ok(())
    }

    pub(crate) fn resize(&mut self, size: u64) -> Result<()> {
        let pieces = self.pieces()?;
        pieces.truncate(size.div_ceil(PIECE as u64) as usize);
        let start = (size % PIECE as u64) as usize;
        if start > 0
            && let Some(Some(piece)) = pieces.get_mut((size / PIECE as u64) as usize)
        {
            piece[start..].fill(0);
        }
        self.attributes.size = size;
        self.attributes.blocks = size.div_ceil(512);
        Ok(())
    }
}

/// All inodes. No two inode locks are ever held together; the kernel's directory locks order the
/// rest.
pub(crate) struct Store {
    shards: Vec<RwLock<HashMap<u64, Arc<Mutex<Inode>>>>>,
    next: AtomicU64,
}

impl Default for Store {
    fn default() -> Store {
        let store = Store { shards: (0..SHARDS).map(|_| RwLock::default()).collect(), next: AtomicU64::new(ROOT) };
        let owner = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        let kind = FileType::Directory;
        store.create(ROOT, New { kind, permissions: 0o755, owner, rdev: 0, target: Vec::new(), open: false });
        store
    }
}

/// Parameters of a new inode.
pub(crate) struct New {
    pub(crate) kind: FileType,
    pub(crate) permissions: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) rdev: u32,
    pub(crate) target: Vec<u8>,
    pub(crate) open: bool,
}

impl Store {
    fn shard(&self, ino: u64) -> &RwLock<HashMap<u64, Arc<Mutex<Inode>>>> {
        &self.shards[(ino % SHARDS) as usize]
    }

    fn create(&self, parent: u64, new: New) -> FileAttr {
        let New { kind, permissions, owner, rdev, target, .. } = new;
        let ino = self.next.fetch_add(1, Ordering::Relaxed);
        let now = SystemTime::now();
        let attributes = FileAttr {
            ino: INodeNo(ino),
            size: target.len() as u64,
            blocks: 0,
            atime: now,
            mtime: now,
            ctime: now,
            crtime: now,
            kind,
            perm: (permissions & 0o7777) as u16,
            nlink: if kind == FileType::Directory { 2 } else { 1 },
            uid: owner.0,
            gid: owner.1,
            rdev,
            blksize: 4096,
            flags: 0,
        };
        let content = match kind {
            FileType::Directory => Content::Directory(Directory::new(parent)),
            FileType::RegularFile => Content::File(Vec::new()),
            FileType::Symlink => Content::Symlink(target),
            _ => Content::Special,
        };
        let inode = Inode { attributes, content, xattrs: BTreeMap::new(), open: 0 };
        self.shard(ino).write().insert(ino, Arc::new(Mutex::new(inode)));
        attributes
    }

    pub(crate) fn with<T>(&self, ino: u64, f: impl FnOnce(&mut MutexGuard<'_, Inode>) -> Result<T>) -> Result<T> {
        let inode = self.shard(ino).read().get(&ino).cloned().ok_or(Errno::ENOENT)?;
        f(&mut inode.lock())
    }

    pub(crate) fn attributes(&self, ino: u64) -> Result<FileAttr> {
        self.with(ino, |inode| Ok(inode.attributes))
    }

    pub(crate) fn lookup(&self, parent: u64, name: &[u8]) -> Result<FileAttr> {
        let ino = self.with(parent, |inode| {
            let directory = inode.directory()?;
            match name {
                b"." => Ok(parent),
                b".." => Ok(directory.parent),
                _ => directory.get(name).map(|entry| entry.ino).ok_or(Errno::ENOENT),
            }
        })?;
        self.attributes(ino)
    }

    pub(crate) fn make(&self, parent: u64, name: &[u8], new: New) -> Result<FileAttr> {
        let (kind, open) = (new.kind, new.open);
        let made = self.create(parent, new);
        if let Err(error) = self.enter(parent, name, made.ino.0, kind) {
            self.shard(made.ino.0).write().remove(&made.ino.0);
            return Err(error);
        }
        if open {
            self.open(made.ino.0)?;
        }
        Ok(made)
    }

    fn enter(&self, parent: u64, name: &[u8], ino: u64, kind: FileType) -> Result<()> {
        self.with(parent, |inode| {
            if inode.directory()?.get(name).is_some() {
                return Err(Errno::EEXIST);
            }
            inode.directory()?.insert(Entry { name: name.to_vec(), ino, kind });
            if kind == FileType::Directory {
                inode.attributes.nlink += 1;
            }
            inode.touch();
            Ok(())
        })
    }

    pub(crate) fn link(&self, ino: u64, parent: u64, name: &[u8]) -> Result<FileAttr> {
        let kind = self.attributes(ino)?.kind;
        self.enter(parent, name, ino, kind)?;
        self.with(ino, |inode| {
            inode.attributes.nlink += 1;
            Ok(inode.attributes)
        })
    }

    /// Removes a name; frees the inode with its last name and handle.
    pub(crate) fn remove(&self, parent: u64, name: &[u8]) -> Result<()> {
        let entry = self.with(parent, |inode| inode.directory()?.get(name).cloned().ok_or(Errno::ENOENT))?;
        if entry.kind == FileType::Directory {
            let empty = self.with(entry.ino, |inode| Ok(inode.directory()?.by_cookie.is_empty()))?;
            if !empty {
                return Err(Errno::ENOTEMPTY);
            }
        }
        self.leave(parent, name)?;
        self.with(entry.ino, |inode| {
            let names = if entry.kind == FileType::Directory { 2 } else { 1 };
            inode.attributes.nlink = inode.attributes.nlink.saturating_sub(names);
            Ok(())
        })?;
        self.reap(entry.ino)
    }

    fn leave(&self, parent: u64, name: &[u8]) -> Result<Entry> {
        self.with(parent, |inode| {
            let entry = inode.directory()?.remove(name).ok_or(Errno::ENOENT)?;
            if entry.kind == FileType::Directory {
                inode.attributes.nlink -= 1;
            }
            inode.touch();
            Ok(entry)
        })
    }

    pub(crate) fn rename(&self, from: (u64, &[u8]), to: (u64, &[u8])) -> Result<()> {
        match self.remove(to.0, to.1) {
            Err(error) if error != Errno::ENOENT => return Err(error),
            _ => {}
        }
        let entry = self.leave(from.0, from.1)?;
        self.enter(to.0, to.1, entry.ino, entry.kind)?;
        self.with(entry.ino, |inode| {
            if let Content::Directory(directory) = &mut inode.content {
                directory.parent = to.0;
            }
            Ok(())
        })
    }

    pub(crate) fn open(&self, ino: u64) -> Result<()> {
        self.with(ino, |inode| {
            inode.open += 1;
            Ok(())
        })
    }

    pub(crate) fn release(&self, ino: u64) -> Result<()> {
        self.with(ino, |inode| {
            inode.open = inode.open.saturating_sub(1);
            Ok(())
        })?;
        self.reap(ino)
    }

    fn reap(&self, ino: u64) -> Result<()> {
        let dead = self.with(ino, |inode| Ok(inode.attributes.nlink == 0 && inode.open == 0))?;
        if dead {
            self.shard(ino).write().remove(&ino);
        }
        Ok(())
    }
}
