//! mknod, create, mkdir, symlink, and the root directory of a new archive.

use crate::error::{Error, Result};
use crate::format::values::{Extent, InodeValue, NO_TRIM, inode_flags};
use crate::format::{Ino, Key, MAX_VALUE, ROOT_INO, kind};
use crate::fs::directory::{ENTRY_RECORDS, check_name};
use crate::fs::{Attributes, Creator, FileSystem, inode, mode};
use crate::txn::{Operation, WrittenPiece};

/// First sequence number of a directory: 0 is the start of a listing, 1 and 2 are `.` and `..`.
const FIRST_SEQUENCE: u64 = 3;
/// Longest symlink target, without the NUL that PATH_MAX counts.
const MAX_TARGET: usize = 4095;
/// Inode, parent inode, entry, and one more for a symlink's target.
const CREATE_RECORDS: u64 = 3 + ENTRY_RECORDS;

impl FileSystem {
    /// Writes the root directory of a new archive (mode 0755, owned by `creator`).
    pub(crate) fn format(&self, creator: Creator) -> Result<()> {
        self.volume.operate(1, false, |op| {
            let ino = op.allocate_ino()?;
            if ino != ROOT_INO {
                return Err(Error::Exists);
            }
            let inode = InodeValue { parent: ROOT_INO, ..self.new_inode(mode::DIRECTORY | 0o755, 0, creator) };
            inode::store(op, ino, &inode)
        })
    }

    fn new_inode(&self, mode: u32, rdev: u32, creator: Creator) -> InodeValue {
        let now = self.environment.now();
        let directory = mode & mode::TYPE == mode::DIRECTORY;
        InodeValue {
            mode,
            uid: creator.uid,
            gid: creator.gid,
            links: if directory { 2 } else { 1 },
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            rdev,
            next_sequence: if directory { FIRST_SEQUENCE } else { 0 },
            trim: NO_TRIM,
            next_piece: 1,
            ..InodeValue::default()
        }
    }

    /// Creates an object and its entry in one operation; `fill` adds what belongs to the object.
    fn create_object(
        &self,
        directory: Ino,
        name: &[u8],
        mode: u32,
        rdev: u32,
        creator: Creator,
        fill: impl FnOnce(&mut Operation<'_>, Ino, &mut InodeValue) -> Result<()>,
    ) -> Result<(Ino, InodeValue)> {
        if name == b"." || name == b".." {
            return Err(Error::Exists);
        }
        check_name(name)?;
        self.volume.operate(CREATE_RECORDS, false, |op| {
            let mut parent = inode::load_directory(op.view(), directory)?;
            if self.find_entry(op.view(), directory, name)?.is_some() {
                return Err(Error::Exists);
            }
            let mut inode = self.new_inode(mode, rdev, creator);
            inode.flags = parent.flags & (inode_flags::NO_PACK | inode_flags::NO_COMPRESS);
            if parent.mode & mode::SET_GID != 0 {
                inode.gid = parent.gid;
                if inode::is_directory(&inode) {
                    inode.mode |= mode::SET_GID;
                }
            }
            if inode::is_directory(&inode) {
                inode.parent = directory;
                parent.links = parent.links.checked_add(1).ok_or(Error::TooManyLinks)?;
            }
            let ino = op.allocate_ino()?;
            fill(op, ino, &mut inode)?;
            inode::store(op, ino, &inode)?;
            let file_type = (inode.mode >> 12) as u8;
            self.add_entry(op, directory, &mut parent, name, ino, file_type, inode.btime)?;
            inode::store(op, directory, &parent)?;
            Ok((ino, inode))
        })
    }

    /// Regular file, FIFO, socket or device, by the type bits of `mode` (none: regular). In a set-gid directory the group is inherited.
    pub fn make_node(&self, directory: Ino, name: &[u8], mode: u32, rdev: u32, creator: Creator) -> Result<Attributes> {
        let file_type = match mode & mode::TYPE {
            0 => mode::REGULAR,
            file_type @ (mode::REGULAR | mode::FIFO | mode::SOCKET | mode::BLOCK | mode::CHARACTER) => file_type,
            _ => return Err(Error::invalid("mknod makes no directories or symlinks")),
        };
        let rdev = if matches!(file_type, mode::BLOCK | mode::CHARACTER) { rdev } else { 0 };
        let mode = file_type | mode & mode::PERMISSIONS;
        let (ino, inode) = self.create_object(directory, name, mode, rdev, creator, |_, _, _| Ok(()))?;
        self.finish_change(inode::attributes(ino, &inode, None))
    }

    /// Like `make_node` for a regular file, and counts one open handle for it in the same step.
    pub fn create_and_open(&self, directory: Ino, name: &[u8], mode: u32, creator: Creator) -> Result<Attributes> {
        let mode = mode::REGULAR | mode & mode::PERMISSIONS;
        let (ino, inode) = self.create_object(directory, name, mode, 0, creator, |_, ino, _| {
            self.handles.open(ino);
            Ok(())
        })?;
        self.finish_change(inode::attributes(ino, &inode, None))
    }

    pub fn make_directory(&self, directory: Ino, name: &[u8], mode: u32, creator: Creator) -> Result<Attributes> {
        let mode = mode::DIRECTORY | mode & mode::PERMISSIONS;
        let (ino, inode) = self.create_object(directory, name, mode, 0, creator, |_, _, _| Ok(()))?;
        self.finish_change(inode::attributes(ino, &inode, None))
    }

    /// Target of 1..=4095 bytes.
    pub fn make_symlink(&self, directory: Ino, name: &[u8], target: &[u8], creator: Creator) -> Result<Attributes> {
        if target.is_empty() {
            return Err(Error::NotFound);
        }
        if target.len() > MAX_TARGET {
            return Err(Error::NameTooLong);
        }
        // A target that does not fit a record is stored like file data; its page is written for the number that the inode is about
        // to get only as a hint to rescue, so any number will do.
        let mut pieces: Vec<WrittenPiece> = Vec::new();
        if target.len() > MAX_VALUE {
            let mut room = self.volume.reserve_data(target.len() as u64, 1)?;
            pieces = self.volume.write_data(&mut room, Ino(0), 0, target, true)?;
        }
        let mode = mode::SYMLINK | 0o777;
        let made = self.create_object(directory, name, mode, 0, creator, |op, ino, inode| {
            inode.size = target.len() as u64;
            inode.bytes = inode.size;
            if pieces.is_empty() {
                op.insert(Key::new(ino.0, kind::INLINE, 0), target)?;
            }
            for piece in &pieces {
                op.adopt(&piece.page, 1)?;
                let extent =
                    Extent { page: piece.page, start: piece.start, length: piece.length, born: op.generation() };
                op.insert(Key::new(ino.0, kind::EXTENT, piece.offset), &extent.encode())?;
            }
            Ok(())
        });
        if made.is_err() {
            self.volume.abandon(&pieces);
        }
        let (ino, inode) = made?;
        self.finish_change(inode::attributes(ino, &inode, None))
    }

    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let inode = inode::load(view, ino)?;
        if inode.mode & mode::TYPE != mode::SYMLINK {
            return Err(Error::invalid("not a symbolic link"));
        }
        if let Some(target) = view.get(Key::new(ino.0, kind::INLINE, 0), |value| Ok(value.to_vec()))? {
            return Ok(target);
        }
        let mut target = vec![0; inode.size.min(MAX_TARGET as u64) as usize];
        self.read_published(view, ino, &inode, &(0..target.len() as u64), &mut target)?;
        Ok(target)
    }
}
