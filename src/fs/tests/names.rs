//! The namespace compared with a model under random operations, and the errors that programs rely
//! on.

use std::mem::discriminant;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::model::{Model, Node};
use super::support::{CREATOR, NAME_KEY, OPTIONS, assert_sound, crash, fresh, fresh_with, list, reopen};
use crate::env::{Environment, SeededEnvironment, seeds};
use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::format::{Ino, Key, ROOT_INO, kind};
use crate::fs::directory::{COLLIDING_KEY, MAX_LINKS};
use crate::fs::{FileSystem, FsOptions, RenameMode, SetAttributes, SetTime, SyncProfile, XattrMode, inode, mode};
use crate::storage::MemoryStorage;

/// Random operations on a file system and the model.
pub(super) struct Driver {
    storage: Arc<MemoryStorage>,
    pub(super) fs: Arc<FileSystem>,
    pub(super) model: Model,
    dice: SeededEnvironment,
    /// Numbers ever given out, so that gone ones are used too.
    pub(super) known: Vec<Ino>,
}

pub(super) fn assert_same<T: std::fmt::Debug>(is: &Result<T>, wanted: &Result<()>, what: &str) {
    match (is, wanted) {
        (Ok(_), Ok(())) => {}
        (Err(is), Err(wanted)) if discriminant(is) == discriminant(wanted) => {}
        _ => panic!("{what}: is {is:?}, wanted {wanted:?}"),
    }
}

impl Driver {
    pub(super) fn new(seed: u64, name_key: [u8; 16]) -> Driver {
        let (storage, fs) = fresh_with(seed, name_key, OPTIONS);
        let mut model = Model::new(&fs.attributes(ROOT_INO).unwrap());
        model.assert_equal(&fs);
        Driver { storage, fs, model, dice: SeededEnvironment::new(seed), known: vec![ROOT_INO] }
    }

    pub(super) fn below(&self, bound: usize) -> usize {
        (self.dice.next_u64() % bound as u64) as usize
    }

    /// One of those that exist, now and then one that is gone.
    fn any(&self) -> Ino {
        if self.below(20) == 0 {
            return self.known[self.below(self.known.len())];
        }
        let all: Vec<Ino> = self.model.nodes.keys().copied().collect();
        all[self.below(all.len())]
    }

    fn directory(&self) -> Ino {
        if self.below(20) == 0 {
            return self.any();
        }
        let all: Vec<Ino> =
            self.model.nodes.iter().filter(|(_, node)| node.is_directory()).map(|(&ino, _)| ino).collect();
        all[self.below(all.len())]
    }

    fn name(&self) -> Vec<u8> {
        match self.below(12) {
            0 => vec![b'x'; 255],
            1 => b"\xff\xfe odd".to_vec(),
            n => vec![b'a' + n as u8],
        }
    }

    /// A directory and, mostly, a name that it has.
    fn entry(&self) -> (Ino, Vec<u8>) {
        let directory = self.directory();
        match self.model.nodes.get(&directory) {
            Some(node) if !node.entries.is_empty() && self.below(8) > 0 => {
                (directory, node.entries[self.below(node.entries.len())].0.clone())
            }
            _ => (directory, self.name()),
        }
    }

    pub(super) fn step(&mut self) {
        match self.below(17) {
            0..=3 => self.create(),
            4 => self.link(),
            5 | 6 => self.remove(),
            7..=9 => self.rename(),
            10 => self.handle(),
            11 => self.change_mode(),
            12 | 13 => self.xattr(),
            _ => self.content(),
        }
        self.model.assert_equal(&self.fs);
    }

    fn create(&mut self) {
        let (directory, name) = (self.directory(), self.name());
        let mut node = Node { gid: CREATOR.gid, ..Node::default() };
        let made = match self.below(6) {
            0 | 1 => {
                node.mode = mode::DIRECTORY | 0o750;
                self.fs.make_directory(directory, &name, 0o750, CREATOR)
            }
            2 => {
                node.mode = mode::SYMLINK | 0o777;
                node.target = vec![b't'; [1, 100, 3500, 3501, 4095][self.below(5)]];
                self.fs.make_symlink(directory, &name, &node.target, CREATOR)
            }
            3 => {
                (node.mode, node.rdev) = (mode::BLOCK | 0o600, 8 << 20 | 1);
                self.fs.make_node(directory, &name, node.mode, node.rdev, CREATOR)
            }
            4 => {
                node.mode = mode::REGULAR | 0o644;
                let made = self.fs.create_and_open(directory, &name, 0o644, CREATOR);
                if let Ok(made) = &made {
                    self.model.open.insert(made.ino);
                }
                made
            }
            _ => {
                node.mode = mode::REGULAR | 0o600;
                self.fs.make_node(directory, &name, 0o600, 77, CREATOR)
            }
        };
        let ino = made.as_ref().ok().map(|made| made.ino);
        self.known.extend(ino);
        let wanted = self.model.create(directory, &name, node, ino);
        assert_same(&made, &wanted, &format!("create {name:?} in {directory:?}"));
    }

    fn link(&mut self) {
        let (ino, directory, name) = (self.any(), self.directory(), self.name());
        let is = self.fs.link(ino, directory, &name);
        let wanted = self.model.link(ino, directory, &name);
        assert_same(&is, &wanted, &format!("link {ino:?} to {name:?} in {directory:?}"));
    }

    fn remove(&mut self) {
        let (directory, name) = self.entry();
        let is_directory = self.model.find(directory, &name).is_ok_and(|ino| self.model.nodes[&ino].is_directory())
            != (self.below(8) == 0);
        let is = match is_directory {
            true => self.fs.remove_directory(directory, &name),
            false => self.fs.unlink(directory, &name),
        };
        let wanted = self.model.remove(directory, &name, is_directory);
        assert_same(&is, &wanted, &format!("remove {name:?} from {directory:?}"));
    }

    fn rename(&mut self) {
        let (directory, name) = self.entry();
        let (new_directory, new_name) = match self.below(4) {
            0 => (directory, self.name()),
            1 => (self.directory(), self.name()),
            _ => self.entry(),
        };
        let how = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange, RenameMode::Whiteout(CREATOR)];
        let how = if self.below(3) == 0 { how[self.below(4)] } else { RenameMode::Replace };
        let is = self.fs.rename(directory, &name, new_directory, &new_name, how);
        let left = match (how, &is) {
            (RenameMode::Whiteout(_), Ok(())) => self.fs.lookup(directory, &name).ok().map(|left| left.ino),
            _ => None,
        };
        self.known.extend(left);
        let wanted = self.model.rename((directory, &name), (new_directory, &new_name), how, left);
        let what = format!("rename {name:?} of {directory:?} to {new_name:?} of {new_directory:?} {how:?}");
        assert_same(&is, &wanted, &what);
    }

    fn handle(&mut self) {
        let ino = self.any();
        if self.model.open.contains(&ino) {
            self.fs.release(ino).unwrap();
            self.model.release(ino);
        } else if self.model.nodes.contains_key(&ino) {
            self.fs.open(ino).unwrap();
            self.model.open.insert(ino);
        }
    }

    fn change_mode(&mut self) {
        let (ino, mode) = (self.any(), [0o755, 0o2775, 0o1777][self.below(3)]);
        let set = SetAttributes { mode: Some(mode), ..SetAttributes::default() };
        match (self.fs.set_attributes(ino, &set), self.model.nodes.get_mut(&ino)) {
            (Ok(_), Some(node)) => {
                node.mode = (node.mode & mode::TYPE) | mode;
                self.model.touch(ino, false);
            }
            (Err(Error::Stale), None) => {}
            (is, _) => panic!("change the mode of {ino:?}: {is:?}"),
        }
    }

    fn xattr(&mut self) {
        let (ino, mut name) = (self.any(), [b"user.", &self.name()[..]].concat());
        name.truncate(255);
        let value = vec![b'v'; [0, 10, 1024, 1025, 3000, 3001, 65_536][self.below(7)]];
        let has = self.model.nodes.get(&ino).map(|node| node.xattrs.contains_key(&name));
        if self.below(3) == 0 {
            let wanted = match has {
                None => Err(Error::Stale),
                Some(false) => Err(Error::NoAttribute),
                Some(true) => Ok(()),
            };
            assert_same(&self.fs.remove_xattr(ino, &name), &wanted, "remove xattr");
            if let (Ok(()), Some(node)) = (wanted, self.model.nodes.get_mut(&ino)) {
                node.xattrs.remove(&name);
                self.model.touch(ino, false);
            }
            return;
        }
        let how = [XattrMode::Set, XattrMode::Create, XattrMode::Replace][self.below(3)];
        let is = self.fs.set_xattr(ino, &name, &value, how);
        let wanted = match (has, how) {
            (None, _) => Err(Error::Stale),
            (Some(true), XattrMode::Create) => Err(Error::Exists),
            (Some(false), XattrMode::Replace) => Err(Error::NoAttribute),
            // Three long values under one of the four hashes of the colliding key.
            _ if matches!(is, Err(Error::NoSpace(_))) && self.fs.name_key == COLLIDING_KEY => return,
            _ => Ok(()),
        };
        assert_same(&is, &wanted, "set xattr");
        if let (Ok(()), Some(node)) = (wanted, self.model.nodes.get_mut(&ino)) {
            node.xattrs.insert(name, value);
            self.model.touch(ino, false);
        }
    }

    /// Writes, truncates, and clones parts. These do not change times, which the kernel adapter
    /// sets.
    fn content(&mut self) {
        let is_regular =
            |ino: &Ino| self.model.nodes.get(ino).is_some_and(|node| node.mode & mode::TYPE == mode::REGULAR);
        let Some(ino) = [self.any(), self.any(), self.any()].into_iter().find(is_regular) else { return };
        let before = self.model.nodes[&ino].content.len();
        match self.below(4) {
            0 => {
                let size = self.below(before + 5000);
                self.fs.truncate(ino, size as u64, &mut |_| {}).unwrap();
                self.model.node(ino).content.resize(size, 0);
            }
            1 => {
                let Some(target) =
                    [self.any(), self.any()].into_iter().find(|other| is_regular(other) && *other != ino)
                else {
                    return;
                };
                let aligned = [1, 4096][self.below(2)];
                let (from, to) = (self.below(3) * aligned, self.below(3) * aligned);
                let copied = self.fs.copy_range(ino, from as u64, target, to as u64, 200_000, false).unwrap() as usize;
                let part = self.model.nodes[&ino].content.get(from..from + copied).unwrap_or_default().to_vec();
                assert_eq!(part.len(), before.saturating_sub(from).min(200_000));
                self.model.node(target).write(to, &part);
            }
            _ => {
                let offset = self.below(before + 3000).min(150_000);
                let mut bytes = vec![0; [10, 900, 5000, 40_000][self.below(4)]];
                SeededEnvironment::new(self.dice.next_u64()).fill_random(&mut bytes).unwrap();
                self.fs.write(ino, offset as u64, &bytes).unwrap();
                self.model.node(ino).write(offset, &bytes);
            }
        }
    }

    /// Reopens the file system without its handles; with `close` after an orderly end, else from
    /// the last commit.
    pub(super) fn open_again(mut self, close: bool) -> Driver {
        for ino in self.model.open.clone() {
            self.fs.release(ino).unwrap();
            self.model.release(ino);
        }
        self.fs.sync().unwrap();
        let again = if close { reopen } else { crash };
        self.fs = again(&self.storage, self.fs);
        self.model.assert_equal(&self.fs);
        assert_sound(&self.fs);
        let findings = self.fs.volume.check_space(true, &mut |_, _| {}).unwrap();
        assert!(findings.is_empty(), "{findings:#?}");
        self
    }
}

fn run(seed: u64, name_key: [u8; 16], steps: usize) {
    let mut driver = Driver::new(seed, name_key);
    for step in 1..=steps {
        driver.step();
        if step % 100 == 0 {
            assert_sound(&driver.fs);
        }
        if step % 250 == 0 {
            driver = driver.open_again(step % 500 == 0);
        }
    }
}

#[test]
fn random_operations_leave_what_posix_says() {
    for seed in seeds(1..=2) {
        run(seed, NAME_KEY, 1500);
    }
}

#[test]
fn names_that_share_a_hash_are_told_apart() {
    for seed in seeds(11..=13) {
        run(seed, COLLIDING_KEY, 1000);
    }
}

#[test]
fn dots_and_impossible_names_get_the_answers_of_linux() {
    let (_storage, fs) = fresh(1);
    let sub = fs.make_directory(ROOT_INO, b"sub", 0o755, CREATOR).unwrap().ino;
    for dot in [&b"."[..], b".."] {
        assert!(matches!(fs.make_directory(sub, dot, 0o755, CREATOR), Err(Error::Exists)));
        assert!(matches!(fs.rename(sub, dot, ROOT_INO, b"x", RenameMode::Replace), Err(Error::Invalid(_))));
    }
    assert!(matches!(fs.unlink(sub, b"."), Err(Error::Invalid(_))));
    assert!(matches!(fs.unlink(sub, b".."), Err(Error::IsDirectory)));
    assert!(matches!(fs.remove_directory(sub, b"."), Err(Error::Invalid(_))));
    assert!(matches!(fs.remove_directory(sub, b".."), Err(Error::NotEmpty)));
    assert!(matches!(fs.make_node(sub, &[b'n'; 256], 0o644, 0, CREATOR), Err(Error::NameTooLong)));
    assert!(matches!(fs.lookup(sub, b""), Err(Error::NotFound)));
    assert_eq!(fs.lookup(sub, b".").unwrap().ino, sub);
    assert_eq!(fs.lookup(ROOT_INO, b"..").unwrap().ino, ROOT_INO);
    let file = fs.make_node(sub, b"f", 0o600, 0, CREATOR).unwrap().ino;
    assert_eq!(fs.lookup(file, b".").unwrap().ino, file);
    assert!(matches!(fs.lookup(file, b".."), Err(Error::NotDirectory)));
}

#[test]
fn a_set_gid_directory_hands_its_group_down() {
    let (_storage, fs) = fresh(2);
    let sub = fs.make_directory(ROOT_INO, b"sub", 0o2770, crate::fs::Creator { uid: 1, gid: 50, umask: None }).unwrap();
    assert_eq!((sub.gid, sub.mode), (50, mode::DIRECTORY | 0o2770));
    let below = fs.make_directory(sub.ino, b"below", 0o700, CREATOR).unwrap();
    assert_eq!((below.gid, below.mode), (50, mode::DIRECTORY | 0o2700));
    let file = fs.make_node(sub.ino, b"file", 0o600, 0, CREATOR).unwrap();
    assert_eq!((file.uid, file.gid, file.mode), (CREATOR.uid, 50, mode::REGULAR | 0o600));
}

#[test]
fn a_listing_ends_although_its_entries_are_renamed() {
    let (_storage, fs) = fresh(3);
    for n in 0..50 {
        fs.make_node(ROOT_INO, format!("f{n}").as_bytes(), 0o600, 0, CREATOR).unwrap();
    }
    let bound = fs.directory_bound(ROOT_INO).unwrap();
    let mut seen = Vec::new();
    let mut cookie = 0;
    loop {
        let mut entry = None;
        fs.list_directory(ROOT_INO, cookie, bound, false, &mut |found, attributes| {
            assert!(attributes.is_none());
            entry = Some((found.name.to_vec(), found.cookie));
            ControlFlow::Break(())
        })
        .unwrap();
        let Some((name, at)) = entry else { break };
        assert!(at > cookie);
        cookie = at;
        if at > 2 {
            fs.rename(ROOT_INO, &name, ROOT_INO, &[b"new-", &name[..]].concat(), RenameMode::Replace).unwrap();
        }
        // A file that is new since the start is not among them.
        fs.make_node(ROOT_INO, format!("later{at}").as_bytes(), 0o600, 0, CREATOR).unwrap();
        seen.push(name);
    }
    let wanted: Vec<Vec<u8>> =
        [b".".to_vec(), b"..".to_vec()].into_iter().chain((0..50).map(|n| format!("f{n}").into_bytes())).collect();
    assert_eq!(seen, wanted);
}

#[test]
fn an_unlinked_inode_lives_until_its_last_handle_is_closed() {
    let (_storage, fs) = fresh(4);
    let ino = fs.create_and_open(ROOT_INO, b"f", 0o600, CREATOR).unwrap().ino;
    fs.unlink(ROOT_INO, b"f").unwrap();
    assert_eq!(fs.attributes(ino).unwrap().links, 0);
    assert!(matches!(fs.link(ino, ROOT_INO, b"g"), Err(Error::NotFound)));
    assert_sound(&fs);
    fs.release(ino).unwrap();
    while fs.maintain().unwrap() && fs.attributes(ino).is_ok() {}
    assert!(matches!(fs.attributes(ino), Err(Error::Stale)));
    assert_sound(&fs);
}

#[test]
fn nothing_is_made_in_a_removed_directory() {
    let (_storage, fs) = fresh(5);
    let sub = fs.make_directory(ROOT_INO, b"sub", 0o755, CREATOR).unwrap().ino;
    fs.open(sub).unwrap();
    fs.remove_directory(ROOT_INO, b"sub").unwrap();
    assert!(matches!(fs.make_node(sub, b"f", 0o600, 0, CREATOR), Err(Error::NotFound)));
    fs.list_directory(sub, 0, fs.directory_bound(sub).unwrap(), true, &mut |entry, _| panic!("{entry:?}")).unwrap();
    for name in [&b"."[..], b"..", b"f"] {
        assert!(matches!(fs.lookup(sub, name), Err(Error::Stale)));
    }
    assert_eq!(
        fs.set_attributes(sub, &SetAttributes { mode: Some(0o700), ..SetAttributes::default() }).unwrap().links,
        0
    );
    assert_sound(&fs);
    assert!(matches!(fs.rename(sub, b"a", ROOT_INO, b"b", RenameMode::Replace), Err(Error::NotFound)));
    fs.release(sub).unwrap();
    assert!(matches!(fs.make_node(sub, b"f", 0o600, 0, CREATOR), Err(Error::NotFound)));
    while fs.maintain().unwrap() && fs.attributes(sub).is_ok() {}
    assert!(matches!(fs.directory_bound(sub), Err(Error::NotFound)));
    assert!(list(&fs, ROOT_INO, 0).unwrap().is_empty());
    assert_sound(&fs);
}

#[test]
fn links_are_limited() {
    let (_storage, fs) = fresh(6);
    let ino = fs.make_node(ROOT_INO, b"f", 0o600, 0, CREATOR).unwrap().ino;
    let set_links = |ino: Ino, links: u32| {
        fs.volume
            .operate(1, false, |op| {
                let value = InodeValue { links, ..inode::load(op.view(), ino)? };
                inode::store(op, ino, &value)
            })
            .unwrap();
    };
    set_links(ino, MAX_LINKS - 1);
    assert_eq!(fs.link(ino, ROOT_INO, b"g").unwrap().links, MAX_LINKS);
    assert!(matches!(fs.link(ino, ROOT_INO, b"h"), Err(Error::TooManyLinks)));
    set_links(ROOT_INO, MAX_LINKS);
    assert!(matches!(fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR), Err(Error::TooManyLinks)));
}

#[test]
fn attributes_change_as_asked_and_nothing_else() {
    let (_storage, fs) = fresh(7);
    let file = fs.make_node(ROOT_INO, b"f", 0o6755, 0, CREATOR).unwrap();
    let none = SetAttributes::default();
    assert!(matches!(fs.set_attributes(ROOT_INO, &SetAttributes { size: Some(0), ..none }), Err(Error::IsDirectory)));
    let huge = SetAttributes { size: Some(1 << 63), ..none };
    assert!(matches!(fs.set_attributes(file.ino, &huge), Err(Error::FileTooLarge)));
    let fifo = fs.make_node(ROOT_INO, b"p", mode::FIFO | 0o600, 0, CREATOR).unwrap();
    assert!(matches!(fs.set_attributes(fifo.ino, &SetAttributes { size: Some(0), ..none }), Err(Error::Invalid(_))));

    let time = crate::error::Timestamp { seconds: -5, nanos: 7 };
    let set = SetAttributes { mtime: Some(SetTime::To(time)), ctime: Some(SetTime::To(time)), ..none };
    let is = fs.set_attributes(file.ino, &set).unwrap();
    assert_eq!((is.mtime, is.ctime, is.atime, is.btime), (time, time, file.atime, file.btime));
    assert_eq!(is.mode, file.mode);

    fs.set_xattr(file.ino, b"security.capability", b"power", XattrMode::Set).unwrap();
    let is = fs.set_attributes(file.ino, &SetAttributes { uid: Some(5), kill_set_id: true, ..none }).unwrap();
    assert_eq!((is.uid, is.gid, is.mode), (5, CREATOR.gid, mode::REGULAR | 0o755));
    assert!(matches!(fs.xattr(file.ino, b"security.capability"), Err(Error::NoAttribute)));

    let chown = fs.set_attributes(file.ino, &SetAttributes { gid: Some(6), mode: Some(0o4755), ..none }).unwrap();
    assert_eq!((chown.gid, chown.mode), (6, mode::REGULAR | 0o4755));
    let strip = SetAttributes { kill_set_id: true, ..none };
    fs.set_attributes(file.ino, &SetAttributes { mode: Some(0o6644), ..none }).unwrap();
    let member = fs.set_attributes(file.ino, &strip).unwrap();
    assert_eq!(member.mode, mode::REGULAR | 0o2644);
    let stranger = fs.set_attributes(file.ino, &SetAttributes { kill_set_gid: true, ..strip }).unwrap();
    assert_eq!(stranger.mode, mode::REGULAR | 0o644);
    fs.set_attributes(file.ino, &SetAttributes { mode: Some(0o4755), ..none }).unwrap();

    let grown = fs.set_attributes(file.ino, &SetAttributes { size: Some(10_000), ..none }).unwrap();
    assert_eq!((grown.size, grown.blocks), (10_000, 0));
    assert!(grown.mtime > time);
    let again = fs.set_attributes(file.ino, &SetAttributes { size: Some(10_000), ..none }).unwrap();
    assert_eq!(again.mtime, grown.mtime);
}

#[test]
fn attribute_names_and_values_are_bounded() {
    let (_storage, fs) = fresh(8);
    let set = |name: &[u8], value: &[u8]| fs.set_xattr(ROOT_INO, name, value, XattrMode::Set);
    assert!(matches!(set(&[b'n'; 256], b""), Err(Error::RangeTooSmall)));
    assert!(matches!(set(b"", b""), Err(Error::Invalid(_))));
    assert!(matches!(set(b"user.a", &[0; 65_537]), Err(Error::AttributeTooLarge)));
    set(b"user.a", &[1; 65_536]).unwrap();
    set(b"user.a", b"short").unwrap();
    assert_eq!(fs.xattr(ROOT_INO, b"user.a").unwrap(), b"short");
    assert_sound(&fs);
}

#[test]
fn with_sync_always_a_change_survives_at_once() {
    let options = FsOptions { sync: SyncProfile::Always, ..OPTIONS };
    let (storage, fs) = fresh_with(9, NAME_KEY, options);
    fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap();
    let fs = crash(&storage, fs);
    let directory = fs.lookup(ROOT_INO, b"d").unwrap().ino;
    fs.make_symlink(directory, b"s", &[b't'; 4000], CREATOR).unwrap();
    fs.rename(directory, b"s", ROOT_INO, b"s", RenameMode::Replace).unwrap();
    fs.remove_directory(ROOT_INO, b"d").unwrap();
    let fs = crash(&storage, fs);
    assert!(matches!(fs.lookup(ROOT_INO, b"d"), Err(Error::NotFound)));
    let link = fs.lookup(ROOT_INO, b"s").unwrap();
    assert_eq!((link.size, link.blocks), (4000, 8));
    assert_eq!(fs.read_link(link.ino).unwrap(), [b't'; 4000]);
    assert_sound(&fs);
}

#[test]
fn check_names_what_disagrees() {
    let (_storage, fs) = fresh(10);
    let directory = fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap().ino;
    let file = fs.make_node(directory, b"f", 0o600, 0, CREATOR).unwrap().ino;
    let damage = |ino: Ino, change: &dyn Fn(&mut InodeValue)| {
        let kept = inode::load(fs.volume.view(&fs.volume.state()), ino).unwrap();
        let store = |value: InodeValue| fs.volume.operate(1, false, |op| inode::store(op, ino, &value)).unwrap();
        let mut value = kept;
        change(&mut value);
        store(value);
        let findings = fs.check_structure(false).unwrap();
        store(kept);
        assert_sound(&fs);
        findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    };
    assert_eq!(damage(file, &|inode| inode.links = 2), "inode 3 (/d/f): its links are not the number of its names");
    assert_eq!(damage(directory, &|inode| inode.size = 2), "inode 2 (/d): its size is not the number of its entries");
    assert!(damage(directory, &|inode| inode.parent = Ino(3)).contains("its parent is not the directory"));
    assert!(damage(file, &|inode| inode.bytes = 1).contains("its bytes are not the sum"));
    assert!(damage(file, &|inode| inode.mode = mode::FIFO).contains("its type differs from"));
    assert!(damage(file, &|inode| inode.flags = 1).contains("attribute flag is wrong"));
}

#[test]
fn statistics_add_up() {
    let (_storage, fs) = fresh(14);
    let before = fs.statistics(1 << 30).unwrap();
    fs.make_node(ROOT_INO, b"f", 0o600, 0, CREATOR).unwrap();
    let after = fs.statistics(1 << 30).unwrap();
    assert!(before.free >= 1 << 30 && before.total >= before.free);
    assert_eq!(after.inodes - after.free_inodes, 2);
    assert_eq!(before.inodes - before.free_inodes, 1);
}

#[test]
fn an_orphan_that_cannot_be_reclaimed_stops_neither_the_others_nor_closing() {
    let (storage, fs) = fresh(77);
    let damaged = fs.create_and_open(ROOT_INO, b"damaged", 0o644, CREATOR).unwrap().ino;
    let whole = fs.create_and_open(ROOT_INO, b"whole", 0o644, CREATOR).unwrap().ino;
    for name in [&b"damaged"[..], b"whole"] {
        fs.unlink(ROOT_INO, name).unwrap();
    }
    fs.volume.operate(1, true, |op| op.insert(Key::new(damaged.0, kind::INODE, 0), b"?")).unwrap();
    fs.release(damaged).unwrap();
    let busy = fs.write_buffer.file(whole);
    let locked = busy.lock();
    fs.release(whole).unwrap();
    drop(locked);
    drop(busy);
    assert!(fs.attributes(whole).is_ok(), "a locked file is left to background work");
    assert!(matches!(fs.maintain(), Err(Error::Damaged(_))));
    fs.maintain().unwrap();
    assert!(matches!(fs.attributes(whole), Err(Error::Stale)));
    fs.make_directory(ROOT_INO, b"late", 0o755, CREATOR).unwrap();
    assert!(matches!(fs.close(), Err(Error::Damaged(_))));
    let fs = crash(&storage, fs);
    assert!(fs.lookup(ROOT_INO, b"late").is_ok());
}

#[test]
fn an_orphan_that_cannot_be_reclaimed_does_not_keep_a_purge_from_erasing() {
    let (_, fs) = fresh(78);
    let damaged = fs.create_and_open(ROOT_INO, b"damaged", 0o644, CREATOR).unwrap().ino;
    let whole = fs.make_node(ROOT_INO, b"whole", mode::REGULAR | 0o644, 0, CREATOR).unwrap().ino;
    fs.write(whole, 0, &vec![7; 300_000]).unwrap();
    fs.make_durable().unwrap();
    fs.unlink(ROOT_INO, b"damaged").unwrap();
    fs.volume.operate(1, true, |op| op.insert(Key::new(damaged.0, kind::INODE, 0), b"?")).unwrap();
    fs.release(damaged).unwrap();
    fs.unlink(ROOT_INO, b"whole").unwrap();
    assert!(matches!(fs.purge(), Err(Error::Damaged(_))), "it is reported");
    assert!(!fs.volume.has_unerased_blocks(), "free blocks hold old content");
}

/// A pinned version shows the deleted content.
#[test]
fn a_purge_reports_deleted_content_that_is_in_use() {
    let (_, fs) = fresh(79);
    let file = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o644, 0, CREATOR).unwrap().ino;
    fs.write(file, 0, &vec![7; 300_000]).unwrap();
    fs.make_durable().unwrap();
    let reader = fs.volume.state();
    fs.unlink(ROOT_INO, b"file").unwrap();
    assert!(matches!(fs.purge(), Err(Error::InUse(_))));
    drop(reader);
    fs.purge().unwrap();
    assert!(!fs.volume.has_unerased_blocks());
}
