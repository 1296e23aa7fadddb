//! In-memory model of a POSIX namespace, compared with the file system.

use std::collections::{BTreeMap, HashSet};

use super::support::list;
use crate::error::{Error, Result, Timestamp};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, FileSystem, RenameMode, mode};

/// One inode.
#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    pub(super) mode: u32,
    pub(super) links: u32,
    pub(super) gid: u32,
    pub(super) rdev: u32,
    pub(super) parent: Ino,
    /// In the order of the listing.
    pub(super) entries: Vec<(Vec<u8>, Ino)>,
    pub(super) target: Vec<u8>,
    pub(super) content: Vec<u8>,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) mtime: Timestamp,
    pub(super) ctime: Timestamp,
}

impl Node {
    pub(super) fn is_directory(&self) -> bool {
        self.mode & mode::TYPE == mode::DIRECTORY
    }

    fn position(&self, name: &[u8]) -> Option<usize> {
        self.entries.iter().position(|(other, _)| other == name)
    }

    pub(super) fn get(&self, name: &[u8]) -> Option<Ino> {
        self.position(name).map(|at| self.entries[at].1)
    }

    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = offset + bytes.len();
        self.content.resize(self.content.len().max(end), 0);
        self.content[offset..end].copy_from_slice(bytes);
    }

    /// Everything but the times, which are answered.
    fn assert_equal(&self, fs: &FileSystem, ino: Ino) -> Attributes {
        let is = fs.attributes(ino).unwrap();
        assert_eq!(
            (is.ino, is.mode, is.links, is.gid, is.rdev),
            (ino, self.mode, self.links, self.gid, self.rdev),
            "attributes of {ino:?}"
        );
        if self.is_directory() && self.links > 0 {
            let listed: Vec<_> = list(fs, ino, 0).unwrap().into_iter().map(|(name, ino, _)| (name, ino)).collect();
            assert_eq!(listed, self.entries, "entries of {ino:?}");
            assert_eq!(fs.lookup(ino, b"..").unwrap().ino, self.parent, "parent of {ino:?}");
            for (name, child) in &self.entries {
                assert_eq!(fs.lookup(ino, name).unwrap().ino, *child);
            }
        }
        match self.mode & mode::TYPE {
            mode::SYMLINK => assert_eq!(fs.read_link(ino).unwrap(), self.target),
            mode::REGULAR => {
                assert_eq!(is.size, self.content.len() as u64, "size of {ino:?}");
                assert!(fs.read(ino, 0, self.content.len()).unwrap() == self.content, "content of {ino:?}");
            }
            _ => {}
        }
        let mut names = Vec::new();
        for (name, value) in &self.xattrs {
            assert_eq!(&fs.xattr(ino, name).unwrap(), value);
            names.push(name.clone());
        }
        let all = fs.list_xattrs(ino).unwrap();
        let mut listed: Vec<_> = all.split_inclusive(|&b| b == 0).map(|name| name[..name.len() - 1].to_vec()).collect();
        listed.sort();
        assert_eq!(listed, names, "attributes of {ino:?}");
        is
    }
}

#[derive(Clone, Default)]
pub(super) struct Model {
    pub(super) nodes: BTreeMap<Ino, Node>,
    pub(super) open: HashSet<Ino>,
    /// Inodes whose ctime the last operation moved, and whether also mtime.
    touched: BTreeMap<Ino, bool>,
}

impl Model {
    pub(super) fn new(root: &Attributes) -> Model {
        let mut model = Model::default();
        let node = Node { mode: root.mode, links: 2, gid: root.gid, parent: ROOT_INO, ..Node::default() };
        model.nodes.insert(ROOT_INO, node);
        model.touched.insert(ROOT_INO, true);
        model
    }

    pub(super) fn touch(&mut self, ino: Ino, content: bool) {
        *self.touched.entry(ino).or_default() |= content;
    }

    pub(super) fn directory(&self, ino: Ino) -> Result<&Node> {
        match self.nodes.get(&ino) {
            None => Err(Error::NotFound),
            Some(node) if !node.is_directory() => Err(Error::NotDirectory),
            Some(node) if node.links == 0 => Err(Error::NotFound),
            Some(node) => Ok(node),
        }
    }

    pub(super) fn find(&self, directory: Ino, name: &[u8]) -> Result<Ino> {
        self.directory(directory)?.get(name).ok_or(Error::NotFound)
    }

    pub(super) fn node(&mut self, ino: Ino) -> &mut Node {
        self.nodes.get_mut(&ino).unwrap()
    }

    pub(super) fn add_entry(&mut self, directory: Ino, name: &[u8], ino: Ino) {
        self.node(directory).entries.push((name.to_vec(), ino));
        self.enter(directory, ino);
    }

    pub(super) fn remove_entry(&mut self, directory: Ino, name: &[u8]) -> Ino {
        let at = self.node(directory).position(name).unwrap();
        let (_, ino) = self.node(directory).entries.remove(at);
        self.leave(directory, ino);
        ino
    }

    /// Lets an entry name another inode, in its place.
    pub(super) fn set_entry(&mut self, directory: Ino, name: &[u8], ino: Ino) {
        let at = self.node(directory).position(name).unwrap();
        let old = std::mem::replace(&mut self.node(directory).entries[at].1, ino);
        self.leave(directory, old);
        self.enter(directory, ino);
    }

    fn enter(&mut self, directory: Ino, ino: Ino) {
        if self.nodes[&ino].is_directory() {
            self.node(directory).links += 1;
            self.node(ino).parent = directory;
        }
        self.touch(directory, true);
        self.touch(ino, false);
    }

    /// Drops the expected time change of an inode that is checked in another way.
    pub(super) fn forget_touch(&mut self, ino: Ino) {
        self.touched.remove(&ino);
    }

    fn leave(&mut self, directory: Ino, ino: Ino) {
        if self.nodes[&ino].is_directory() {
            self.node(directory).links -= 1;
        }
        self.touch(directory, true);
        self.touch(ino, false);
    }

    /// `ino` is the number that the file system gave, if it made the object.
    pub(super) fn create(&mut self, directory: Ino, name: &[u8], mut node: Node, ino: Option<Ino>) -> Result<()> {
        let parent = self.directory(directory)?;
        if parent.get(name).is_some() {
            return Err(Error::Exists);
        }
        let inherits = parent.mode & mode::SET_GID != 0;
        if inherits {
            node.gid = parent.gid;
        }
        node.links = 1;
        if node.is_directory() {
            node.links = 2;
            node.mode |= if inherits { mode::SET_GID } else { 0 };
        }
        let ino = ino.expect("the file system refused what the model makes");
        assert!(self.nodes.insert(ino, node).is_none(), "number used twice: {ino:?}");
        self.touch(ino, true);
        self.add_entry(directory, name, ino);
        Ok(())
    }

    pub(super) fn link(&mut self, ino: Ino, directory: Ino, name: &[u8]) -> Result<()> {
        let node = self.nodes.get(&ino).ok_or(Error::NotFound)?;
        if node.is_directory() {
            return Err(Error::NotPermitted);
        }
        if self.directory(directory)?.get(name).is_some() {
            return Err(Error::Exists);
        }
        if node.links == 0 {
            return Err(Error::NotFound);
        }
        self.node(ino).links += 1;
        self.add_entry(directory, name, ino);
        Ok(())
    }

    pub(super) fn drop_name(&mut self, ino: Ino) {
        let node = self.node(ino);
        node.links = if node.is_directory() { 0 } else { node.links - 1 };
        if node.links == 0 && !self.open.contains(&ino) {
            self.nodes.remove(&ino);
        }
    }

    pub(super) fn remove(&mut self, directory: Ino, name: &[u8], want_directory: bool) -> Result<()> {
        let ino = self.find(directory, name)?;
        match (self.nodes[&ino].is_directory(), want_directory) {
            (true, false) => return Err(Error::IsDirectory),
            (false, true) => return Err(Error::NotDirectory),
            _ => {}
        }
        if !self.nodes[&ino].entries.is_empty() {
            return Err(Error::NotEmpty);
        }
        self.remove_entry(directory, name);
        self.drop_name(ino);
        Ok(())
    }

    fn is_below(&self, mut ino: Ino, ancestor: Ino) -> bool {
        while ino != ancestor && ino != ROOT_INO {
            ino = self.nodes[&ino].parent;
        }
        ino == ancestor
    }

    pub(super) fn rename(
        &mut self,
        (directory, name): (Ino, &[u8]),
        (new_directory, new_name): (Ino, &[u8]),
        how: RenameMode,
        whiteout: Option<Ino>,
    ) -> Result<()> {
        self.directory(directory)?;
        self.directory(new_directory)?;
        let moved = self.find(directory, name)?;
        let existing = self.directory(new_directory)?.get(new_name);
        match (how, existing) {
            (RenameMode::NoReplace, Some(_)) => return Err(Error::Exists),
            (RenameMode::Exchange, None) => return Err(Error::NotFound),
            (_, Some(existing)) if existing == moved => return Ok(()),
            _ => {}
        }
        let is_directory = |ino: Ino| self.nodes[&ino].is_directory();
        if is_directory(moved) && self.is_below(new_directory, moved) {
            return Err(Error::invalid(""));
        }
        if how == RenameMode::Exchange {
            let existing = existing.unwrap();
            if is_directory(existing) && self.is_below(directory, existing) {
                return Err(Error::invalid(""));
            }
            self.set_entry(directory, name, existing);
            self.set_entry(new_directory, new_name, moved);
            return Ok(());
        }
        if let Some(existing) = existing {
            match (is_directory(moved), is_directory(existing)) {
                (true, false) => return Err(Error::NotDirectory),
                (false, true) => return Err(Error::IsDirectory),
                _ if !self.nodes[&existing].entries.is_empty() => return Err(Error::NotEmpty),
                _ => self.set_entry(new_directory, new_name, moved),
            }
        }
        if let RenameMode::Whiteout(creator) = how {
            let left = whiteout.expect("no whiteout");
            let parent = &self.nodes[&directory];
            let gid = if parent.mode & mode::SET_GID != 0 { parent.gid } else { creator.gid };
            let node = Node { mode: mode::CHARACTER, links: 1, gid, ..Node::default() };
            self.nodes.insert(left, node);
            self.touch(left, true);
            self.set_entry(directory, name, left);
        } else if existing.is_none() && directory == new_directory {
            let at = self.node(directory).position(name).unwrap();
            self.node(directory).entries[at].0 = new_name.to_vec();
            self.leave(directory, moved);
            self.enter(directory, moved);
            return Ok(());
        } else {
            self.remove_entry(directory, name);
        }
        match existing {
            Some(existing) => self.drop_name(existing),
            None => self.add_entry(new_directory, new_name, moved),
        }
        Ok(())
    }

    pub(super) fn release(&mut self, ino: Ino) {
        self.open.remove(&ino);
        if self.nodes.get(&ino).is_some_and(|node| node.links == 0) {
            self.nodes.remove(&ino);
        }
    }

    /// Everything that the file system answers is as in the model; times moved exactly where the
    /// last operation touched.
    pub(super) fn assert_equal(&mut self, fs: &FileSystem) {
        while fs.reclaim.step().unwrap() {}
        assert_eq!(fs.volume.state().inodes(), self.nodes.len() as u64, "inodes in use");
        let touched = std::mem::take(&mut self.touched);
        for (&ino, node) in &mut self.nodes {
            let is = node.assert_equal(fs, ino);
            let moved =
                |now: Timestamp, before: Timestamp, touched: bool| if touched { now > before } else { now == before };
            let content = touched.get(&ino).copied();
            assert!(moved(is.ctime, node.ctime, content.is_some()), "ctime of {ino:?} {content:?}");
            assert!(moved(is.mtime, node.mtime, content == Some(true)), "mtime of {ino:?} {content:?}");
            (node.mtime, node.ctime) = (is.mtime, is.ctime);
        }
    }

    /// A snapshot that was taken when this was the model shows all that had a name then.
    pub(super) fn assert_shown(&self, moment: &FileSystem) {
        for (&ino, node) in self.nodes.iter().filter(|(_, node)| node.links > 0) {
            let is = node.assert_equal(moment, ino);
            assert_eq!((is.mtime, is.ctime), (node.mtime, node.ctime), "times of {ino:?}");
        }
    }
}
