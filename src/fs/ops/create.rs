//! mknod, create, mkdir, symlink.

use crate::error::Result;
use crate::format::Ino;
use crate::fs::{Attributes, Creator, FileSystem};

impl FileSystem {
    /// Regular file, FIFO, socket or device, by the type bits of `mode` (none: regular). In a set-gid directory the group is inherited.
    pub fn make_node(&self, directory: Ino, name: &[u8], mode: u32, rdev: u32, creator: Creator) -> Result<Attributes> {
        let _ = (directory, name, mode, rdev, creator);
        todo!()
    }

    /// Like `make_node` for a regular file, and counts one open handle for it in the same step.
    pub fn create_and_open(&self, directory: Ino, name: &[u8], mode: u32, creator: Creator) -> Result<Attributes> {
        let _ = (directory, name, mode, creator);
        todo!()
    }

    pub fn make_directory(&self, directory: Ino, name: &[u8], mode: u32, creator: Creator) -> Result<Attributes> {
        let _ = (directory, name, mode, creator);
        todo!()
    }

    /// Target of 1..=4095 bytes.
    pub fn make_symlink(&self, directory: Ino, name: &[u8], target: &[u8], creator: Creator) -> Result<Attributes> {
        let _ = (directory, name, target, creator);
        todo!()
    }

    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        let _ = ino;
        todo!()
    }
}
