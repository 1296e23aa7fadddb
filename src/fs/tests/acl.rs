//! Access control lists and extended attributes as ext4 has them.

use super::support::{CREATOR, assert_sound, fresh, list, reopen};
use crate::error::{Error, Timestamp};
use crate::format::values::inode_flags;
use crate::format::{Ino, ROOT_INO};
use crate::fs::ops::BIRTH;
use crate::fs::{Attributes, Creator, FileSystem, SetAttributes, SetTime, XattrMode, inode, mode};

pub(super) const ACCESS: &[u8] = b"system.posix_acl_access";
pub(super) const DEFAULT: &[u8] = b"system.posix_acl_default";
const NONE: u32 = u32::MAX;

/// A list as the kernel hands it over: (tag, permissions, number).
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    value
}

/// u::rwx,u:7:rwx,g::r-x,m::MASK,o::OTHERS
pub(super) fn named(mask: u16, others: u16) -> Vec<u8> {
    acl(&[(1, 7, NONE), (2, 7, 7), (4, 5, NONE), (16, mask, NONE), (32, others, NONE)])
}

fn minimal(owner: u16, group: u16, others: u16) -> Vec<u8> {
    acl(&[(1, owner, NONE), (4, group, NONE), (32, others, NONE)])
}

fn masked(umask: u32) -> Creator {
    Creator { umask: Some(umask), ..CREATOR }
}

fn set(fs: &FileSystem, ino: Ino, name: &[u8], value: &[u8]) -> crate::error::Result<()> {
    fs.set_xattr(ino, name, value, XattrMode::Set)
}

fn file(fs: &FileSystem, directory: Ino, name: &[u8], mode: u32, umask: u32) -> Attributes {
    fs.make_node(directory, name, mode, 0, masked(umask)).unwrap()
}

fn bits(fs: &FileSystem, ino: Ino) -> u32 {
    fs.attributes(ino).unwrap().mode & mode::PERMISSIONS
}

fn has_xattrs(fs: &FileSystem, ino: Ino) -> bool {
    let state = fs.volume.state();
    inode::load(fs.volume.view(&state), ino).unwrap().flags & inode_flags::HAS_XATTRS != 0
}

#[test]
fn without_a_default_list_the_umask_decides() {
    let (_storage, fs) = fresh(101);
    assert_eq!(bits(&fs, file(&fs, ROOT_INO, b"f", 0o6777, 0o027).ino), 0o6750);
    let directory = fs.make_directory(ROOT_INO, b"d", 0o1777, masked(0o777)).unwrap();
    assert_eq!(directory.mode, mode::DIRECTORY | 0o1000);
    let opened = fs.create_and_open(ROOT_INO, b"o", 0o666, masked(0o022)).unwrap();
    assert_eq!(opened.mode, mode::REGULAR | 0o644);
    fs.release(opened.ino).unwrap();
    assert_eq!(fs.make_symlink(ROOT_INO, b"s", b"t", masked(0o777)).unwrap().mode, mode::SYMLINK | 0o777);
    // Another list, or another attribute, is no default list.
    set(&fs, ROOT_INO, ACCESS, &named(7, 7)).unwrap();
    set(&fs, ROOT_INO, b"user.a", b"").unwrap();
    assert_eq!(bits(&fs, file(&fs, ROOT_INO, b"g", 0o666, 0o077).ino), 0o600);
    assert_eq!(bits(&fs, fs.make_node(ROOT_INO, b"exact", 0o777, 0, CREATOR).unwrap().ino), 0o777);
    assert_sound(&fs);
}

#[test]
fn a_default_list_replaces_the_umask_and_is_inherited() {
    let (storage, fs) = fresh(102);
    let top = fs.make_directory(ROOT_INO, b"top", 0o755, CREATOR).unwrap().ino;
    set(&fs, top, DEFAULT, &named(7, 0)).unwrap();
    assert_eq!(bits(&fs, top), 0o755, "a default list changes no mode");
    let below = file(&fs, top, b"f", 0o666, 0o777);
    assert_eq!(below.mode, mode::REGULAR | 0o660);
    let inherited = acl(&[(1, 6, NONE), (2, 7, 7), (4, 5, NONE), (16, 6, NONE), (32, 0, NONE)]);
    assert_eq!(fs.xattr(below.ino, ACCESS).unwrap(), inherited);
    assert!(matches!(fs.xattr(below.ino, DEFAULT), Err(Error::NoAttribute)));
    for kind in [mode::FIFO, mode::SOCKET, mode::CHARACTER] {
        let node = file(&fs, top, &kind.to_le_bytes().map(|b| b | 1), kind | 0o600, 0);
        assert_eq!(node.mode, kind | 0o600, "a mask of nothing");
        assert!(fs.xattr(node.ino, ACCESS).is_ok());
    }
    let directory = fs.make_directory(top, b"d", 0o2777, masked(0o777)).unwrap();
    assert_eq!(directory.mode & mode::PERMISSIONS, 0o2770);
    assert_eq!(fs.xattr(directory.ino, DEFAULT).unwrap(), named(7, 0));
    assert_eq!(fs.xattr(directory.ino, ACCESS).unwrap(), named(7, 0));
    let link = fs.make_symlink(top, b"s", b"t", masked(0)).unwrap();
    assert_eq!((link.mode, has_xattrs(&fs, link.ino)), (mode::SYMLINK | 0o777, false));
    let exact = fs.make_directory(top, b"exact", 0o777, CREATOR).unwrap();
    assert_eq!((exact.mode, has_xattrs(&fs, exact.ino)), (mode::DIRECTORY | 0o777, false));
    // On files, a list that a mode can express is removed and only the mode stays.
    set(&fs, top, DEFAULT, &minimal(7, 5, 1)).unwrap();
    let plain = file(&fs, top, b"plain", 0o666, 0o777);
    assert_eq!((bits(&fs, plain.ino), has_xattrs(&fs, plain.ino)), (0o640, false));
    let fs = reopen(&storage, fs);
    assert_eq!(fs.xattr(below.ino, ACCESS).unwrap(), inherited);
    assert_sound(&fs);
}

#[test]
fn the_longest_list_is_inherited_twice() {
    let (_storage, fs) = fresh(103);
    let mut entries = vec![(1, 7, NONE)];
    entries.extend((0..507).map(|id| (2, 5, id)));
    entries.extend([(4, 5, NONE), (16, 5, NONE), (32, 0, NONE)]);
    let long = acl(&entries);
    assert_eq!(long.len(), 4092);
    set(&fs, ROOT_INO, DEFAULT, &long).unwrap();
    let directory = fs.make_directory(ROOT_INO, b"d", 0o777, masked(0)).unwrap();
    assert_eq!(fs.xattr(directory.ino, DEFAULT).unwrap(), long);
    assert_eq!(fs.xattr(directory.ino, ACCESS).unwrap(), long);
    let changed = fs.set_attributes(directory.ino, &SetAttributes { mode: Some(0o700), ..Default::default() }).unwrap();
    assert_eq!(changed.mode, mode::DIRECTORY | 0o700);
    assert_sound(&fs);
    entries.insert(1, (2, 5, 900));
    assert!(matches!(set(&fs, ROOT_INO, DEFAULT, &acl(&entries)), Err(Error::AttributeTooLarge)));
}

#[test]
fn an_access_list_and_the_mode_follow_each_other() {
    let (_storage, fs) = fresh(104);
    let ino = file(&fs, ROOT_INO, b"f", 0o644, 0).ino;
    let before = fs.attributes(ino).unwrap();
    set(&fs, ino, ACCESS, &named(7, 1)).unwrap();
    let after = fs.attributes(ino).unwrap();
    assert_eq!(after.mode, mode::REGULAR | 0o771);
    assert!(after.ctime > before.ctime && after.mtime == before.mtime);
    let chmod = SetAttributes { mode: Some(0o4610), ..SetAttributes::default() };
    assert_eq!(fs.set_attributes(ino, &chmod).unwrap().mode, mode::REGULAR | 0o4610);
    let narrowed = acl(&[(1, 6, NONE), (2, 7, 7), (4, 5, NONE), (16, 1, NONE), (32, 0, NONE)]);
    assert_eq!(fs.xattr(ino, ACCESS).unwrap(), narrowed);
    // With a size in the same change too.
    let both = SetAttributes { mode: Some(0o755), size: Some(9), ..SetAttributes::default() };
    let is = fs.set_attributes(ino, &both).unwrap();
    assert_eq!((is.mode, is.size), (mode::REGULAR | 0o755, 9));
    assert_eq!(fs.xattr(ino, ACCESS).unwrap(), named(5, 5));
    assert_sound(&fs);
    // A list that a mode can express becomes the mode.
    set(&fs, ino, ACCESS, &minimal(6, 4, 0)).unwrap();
    assert_eq!((bits(&fs, ino), has_xattrs(&fs, ino)), (0o640, false));
    set(&fs, ino, ACCESS, &named(7, 1)).unwrap();
    fs.remove_xattr(ino, ACCESS).unwrap();
    assert_eq!((bits(&fs, ino), has_xattrs(&fs, ino)), (0o771, false));
    fs.remove_xattr(ino, ACCESS).unwrap();
    // No entries stand for no list.
    set(&fs, ino, ACCESS, &named(7, 1)).unwrap();
    set(&fs, ino, ACCESS, b"").unwrap();
    assert!(!has_xattrs(&fs, ino));
    assert_sound(&fs);
}

#[test]
fn a_list_in_the_wrong_place_or_malformed_changes_nothing() {
    let (_storage, fs) = fresh(105);
    let ino = file(&fs, ROOT_INO, b"f", 0o644, 0).ino;
    let link = fs.make_symlink(ROOT_INO, b"s", b"t", CREATOR).unwrap().ino;
    let before = fs.attributes(ino).unwrap();
    assert!(matches!(set(&fs, ino, DEFAULT, &named(7, 7)), Err(Error::PermissionDenied)));
    assert!(matches!(set(&fs, link, ACCESS, &named(7, 7)), Err(Error::Unsupported(_))));
    let without_others = acl(&[(1, 7, NONE), (4, 7, NONE)]);
    for malformed in [&b"x"[..], &named(7, 7)[..20], &without_others] {
        assert!(matches!(set(&fs, ino, ACCESS, malformed), Err(Error::Invalid(_))));
        assert!(matches!(set(&fs, ROOT_INO, DEFAULT, malformed), Err(Error::Invalid(_))));
    }
    assert_eq!(fs.attributes(ino).unwrap(), before);
    assert_sound(&fs);
}

#[test]
fn a_list_set_from_outside_the_group_takes_the_set_gid_bit() {
    let (_storage, fs) = fresh(106);
    let ino = file(&fs, ROOT_INO, b"f", 0o6755, 0).ino;
    let list = |keeps: &dyn Fn(u32) -> bool| {
        fs.set_xattr_for(ino, ACCESS, &named(7, 1), XattrMode::Set, keeps).unwrap();
        bits(&fs, ino)
    };
    assert_eq!(list(&|group| group == CREATOR.gid), 0o6771);
    assert_eq!(list(&|group| group != CREATOR.gid), 0o4771);
    assert_eq!(list(&|_| panic!("not asked without the bit")), 0o4771);
    let directory = fs.make_directory(ROOT_INO, b"d", 0o2755, CREATOR).unwrap().ino;
    fs.set_xattr_for(directory, DEFAULT, &named(7, 1), XattrMode::Set, &|_| false).unwrap();
    assert_eq!(bits(&fs, directory), 0o2755);
    fs.set_xattr_for(directory, ACCESS, &minimal(7, 5, 5), XattrMode::Set, &|_| false).unwrap();
    assert_eq!(bits(&fs, directory), 0o755);
}

#[test]
fn check_finds_lists_that_lie() {
    let (_storage, fs) = fresh(107);
    let ino = file(&fs, ROOT_INO, b"f", 0o644, 0).ino;
    set(&fs, ino, ACCESS, &named(4, 4)).unwrap();
    let finding = |name: &[u8], value: &[u8]| {
        let put = |value: &[u8]| {
            fs.volume.operate(9, false, |op| {
                let mut inode = inode::load(op.view(), ino)?;
                crate::fs::ops::put_entry(op, &fs.name_key, ino, &mut inode, name, value, XattrMode::Set)?;
                inode::store(op, ino, &inode)
            })
        };
        put(value).unwrap();
        let findings = fs.check_structure(false).unwrap();
        findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    };
    assert_eq!(finding(ACCESS, &named(5, 4)), "inode 2 (/f): its access control list disagrees with its mode");
    assert_eq!(finding(ACCESS, &[7; 3000]), "inode 2 (/f): has a malformed access control list");
    // A malformed list is an error for callers that need it, not a guess.
    let chmod = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
    assert!(matches!(fs.set_attributes(ino, &chmod), Err(Error::Damaged(_))));
    assert!(finding(DEFAULT, &named(4, 4)).contains("that its type cannot have"));
    assert!(finding(BIRTH, b"1.0").contains("reserved name of the birth time"));
}

#[test]
fn other_namespaces_are_refused_and_known_ones_kept() {
    let (_storage, fs) = fresh(108);
    for name in [&b"system.nfs4_acl"[..], b"system.posix_acl", b"os2.name", b"plain", b"user", b"btrfs.compression"] {
        assert!(matches!(set(&fs, ROOT_INO, name, b"v"), Err(Error::Unsupported(_))), "{name:?}");
        assert!(matches!(fs.xattr(ROOT_INO, name), Err(Error::Unsupported(_))), "{name:?}");
        assert!(matches!(fs.remove_xattr(ROOT_INO, name), Err(Error::Unsupported(_))), "{name:?}");
    }
    assert!(matches!(set(&fs, ROOT_INO, b"user.", b"v"), Err(Error::Invalid(_))));
    let longest = [b"user.", &[b'n'; 250][..]].concat();
    for name in [&longest[..], b"trusted.a", b"security.a", b"user.\xff\x01"] {
        assert!(matches!(fs.set_xattr(ROOT_INO, name, b"v", XattrMode::Replace), Err(Error::NoAttribute)));
        fs.set_xattr(ROOT_INO, name, b"v", XattrMode::Create).unwrap();
        assert!(matches!(fs.set_xattr(ROOT_INO, name, b"v", XattrMode::Create), Err(Error::Exists)));
        fs.set_xattr(ROOT_INO, name, b"w", XattrMode::Replace).unwrap();
        assert_eq!(fs.xattr(ROOT_INO, name).unwrap(), b"w");
    }
    let names = |list: Vec<u8>| {
        let mut names: Vec<Vec<u8>> = list.split(|&b| b == 0).map(<[u8]>::to_vec).filter(|n| !n.is_empty()).collect();
        names.sort();
        names
    };
    assert_eq!(names(fs.list_xattrs(ROOT_INO).unwrap()).len(), 4);
    let shown = names(fs.list_xattrs_for(ROOT_INO, &|| false).unwrap());
    assert_eq!(shown, [b"security.a".to_vec(), longest, b"user.\xff\x01".to_vec()]);
    fs.remove_xattr(ROOT_INO, b"trusted.a").unwrap();
    fs.list_xattrs_for(ROOT_INO, &|| panic!("nothing is hidden")).unwrap();
    for ino in [
        fs.make_symlink(ROOT_INO, b"s", b"t", CREATOR).unwrap().ino,
        file(&fs, ROOT_INO, b"p", mode::FIFO | 0o600, 0).ino,
        file(&fs, ROOT_INO, b"c", mode::CHARACTER | 0o600, 0).ino,
    ] {
        set(&fs, ino, b"trusted.a", &[1; 65_536]).unwrap();
        assert_eq!(fs.xattr(ino, b"trusted.a").unwrap(), [1; 65_536]);
    }
    assert_sound(&fs);
}

#[test]
fn hundreds_of_attributes_are_listed_and_a_flood_ends() {
    let (_storage, fs) = fresh(109);
    let ino = file(&fs, ROOT_INO, b"f", 0o644, 0).ino;
    let name = |number: usize| format!("user.{number:0>250}").into_bytes();
    // 256 bytes with the NUL: 256 names are all that can be listed.
    for number in 0..256 {
        set(&fs, ino, &name(number), &number.to_le_bytes()).unwrap();
    }
    assert_eq!(fs.list_xattrs(ino).unwrap().len(), 65_536);
    assert!(matches!(set(&fs, ino, &name(256), b""), Err(Error::NoSpace(_))));
    assert!(matches!(set(&fs, ino, b"user.a", b""), Err(Error::NoSpace(_))));
    set(&fs, ino, &name(7), b"replaced").unwrap();
    fs.remove_xattr(ino, &name(0)).unwrap();
    set(&fs, ino, b"user.a", b"").unwrap();
    assert_eq!(fs.xattr(ino, &name(7)).unwrap(), b"replaced");
    assert_eq!(fs.xattr(ino, &name(255)).unwrap(), 255usize.to_le_bytes());
    assert_sound(&fs);
    fs.unlink(ROOT_INO, b"f").unwrap();
    assert!(list(&fs, ROOT_INO, 0).unwrap().is_empty());
    assert_sound(&fs);
}

#[test]
fn the_birth_time_is_told_and_never_changes() {
    let (_storage, fs) = fresh(110);
    let made = file(&fs, ROOT_INO, b"f", 0o644, 0);
    let told = fs.xattr(made.ino, BIRTH).unwrap();
    assert_eq!(told, format!("{}.{:09}", made.btime.seconds, made.btime.nanos).into_bytes());
    assert!(matches!(set(&fs, made.ino, BIRTH, b"1.0"), Err(Error::NotPermitted)));
    assert!(matches!(fs.remove_xattr(made.ino, BIRTH), Err(Error::NotPermitted)));
    fs.write(made.ino, 0, b"x").unwrap();
    assert_eq!(fs.xattr(made.ino, BIRTH).unwrap(), told);
    assert_eq!(fs.list_xattrs(made.ino).unwrap(), b"");
}

#[test]
fn access_is_noted_after_a_change_and_once_a_day() {
    let (_storage, fs) = fresh(111);
    let ino = file(&fs, ROOT_INO, b"f", 0o644, 0).ino;
    let accessed = || fs.attributes(ino).unwrap().atime;
    assert!(fs.note_access(ino).unwrap());
    let noted = fs.attributes(ino).unwrap();
    assert!(noted.atime > noted.mtime && noted.ctime == noted.mtime);
    assert!(!fs.note_access(ino).unwrap());
    assert_eq!(accessed(), noted.atime);
    set(&fs, ino, b"user.a", b"").unwrap();
    assert!(fs.note_access(ino).unwrap() && accessed() > noted.atime);
    let now = accessed().seconds;
    let ago = |seconds: i64| SetTime::To(Timestamp { seconds: now - seconds, nanos: 0 });
    let read = |atime: i64| {
        let old = Some(ago(1_000_000));
        let times = SetAttributes { atime: Some(ago(atime)), mtime: old, ctime: old, ..SetAttributes::default() };
        fs.set_attributes(ino, &times).unwrap();
        fs.note_access(ino).unwrap()
    };
    assert!(!read(86_000));
    assert!(read(86_400));
    assert!(read(1_000_000));
    assert!(!read(-1_000_000), "a time in the future is newer than any change");
    assert!(matches!(fs.note_access(Ino(99)), Err(Error::Stale)));
}
