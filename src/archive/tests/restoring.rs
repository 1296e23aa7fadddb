//! Restore from a snapshot: complete despite concurrent changes, with correct counts and dead
//! lists.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use super::super::create::name_key;
use super::comparing::World;
use super::sample::{OWNER, cipher, create_on, fresh, noise, open_on, put};
use super::snapshot_faults::{is_full_host, plans};
use super::{ARCHIVE, key};
use crate::env::{SeededEnvironment, seeds, stride};
use crate::error::{Error, Result};
use crate::exchange::{Entries, LiveNamespace, OfflineNamespace, Restore, RestoreReport, compare, resolve};
use crate::format::values::inode_flags;
use crate::format::{Ino, ROOT_INO, Timestamp};
use crate::fs::{
    Attributes, Compression, FileSystem, FsOptions, RenameMode, SetAttributes, SetTime, SyncProfile, XattrMode, mode,
};
use crate::storage::simulated::{Fault, FaultPlan, SimulatedStorage};
use crate::txn::{OpenOptions, Volume};

/// Prefix of the names of stages, and their mark.
const STAGE: &[u8] = b".lockbox-restore";
const MARK: &[u8] = b"trusted.lockbox.restore";

/// Separator in a description, before the part that other paths may change.
const NAMES: &str = " names ";

/// Restorable properties by path; files with several hard links list their names.
type Described = BTreeMap<Vec<u8>, String>;

fn describe(fs: &FileSystem) -> Described {
    let mut all = Described::new();
    let mut first = HashMap::new();
    let root = fs.attributes(ROOT_INO).unwrap();
    all.insert(Vec::new(), one(fs, &root, b"", &mut first));
    below(fs, ROOT_INO, b"", &mut first, &mut all);
    all
}

fn one(fs: &FileSystem, is: &Attributes, path: &[u8], first: &mut HashMap<Ino, Vec<u8>>) -> String {
    let content = match is.mode & mode::TYPE {
        mode::REGULAR => fs.read(is.ino, 0, is.size as usize).unwrap(),
        mode::SYMLINK => fs.read_link(is.ino).unwrap(),
        _ => Vec::new(),
    };
    let mut text = format!(
        "{:o} {} {} {} {} {:?} {:?} {:?}",
        is.mode, is.uid, is.gid, is.rdev, is.size, is.atime, is.mtime, is.btime
    );
    let mut digest = DefaultHasher::new();
    digest.write(&content);
    write!(text, " {:016x}", digest.finish()).unwrap();
    if is.mode & mode::TYPE == mode::REGULAR {
        let mut at = 0;
        while let Ok(data) = fs.next_data(is.ino, at) {
            at = fs.next_hole(is.ino, data).unwrap();
            write!(text, " {data}..{at}").unwrap();
        }
    }
    let list = fs.list_xattrs(is.ino).unwrap();
    let mut names: Vec<&[u8]> = list.split(|&byte| byte == 0).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    for name in names {
        write!(text, " {name:?}={:?}", fs.xattr(is.ino, name).unwrap()).unwrap();
    }
    // Hard links of one file have the same first name.
    let first = first.entry(is.ino).or_insert_with(|| path.to_vec());
    write!(text, "{NAMES}{} {first:?}", is.links).unwrap();
    text
}

fn below(fs: &FileSystem, directory: Ino, path: &[u8], first: &mut HashMap<Ino, Vec<u8>>, all: &mut Described) {
    for (name, attributes) in list_entries(fs, directory) {
        let path = if path.is_empty() { name } else { [path, b"/", &name].concat() };
        all.insert(path.clone(), one(fs, &attributes, &path, first));
        if attributes.is_directory() {
            below(fs, attributes.ino, &path, first, all);
        }
    }
}

/// Returns the entries of a directory, sorted by name.
fn list_entries(fs: &FileSystem, directory: Ino) -> Vec<(Vec<u8>, Attributes)> {
    let (mut all, mut entries) = (Vec::new(), Entries::new(fs, directory).unwrap());
    while let Some(entry) = entries.next_entry() {
        let entry = entry.unwrap();
        all.push((entry.name.to_vec(), *entry.attributes));
    }
    all.sort_by(|(one, _), (other, _)| one.cmp(other));
    all
}

/// Returns the objects at and below a path, without properties that depend on its surroundings.
fn part(all: &Described, path: &[u8]) -> Described {
    let is_in = |other: &[u8]| other == path || (other.starts_with(path) && other.get(path.len()) == Some(&b'/'));
    all.iter().filter(|(other, _)| is_in(other)).map(|(path, text)| (path.clone(), text.clone())).collect()
}

fn assert_same(one: &Described, other: &Described, what: &str) {
    for path in one.keys().chain(other.keys()) {
        let cut = |text: Option<&String>| text.map(|text| text.chars().take(300).collect::<String>());
        let (one, other) = (one.get(path), other.get(path));
        assert!(one == other, "{what}: {}\n{:?}\n{:?}", String::from_utf8_lossy(path), cut(one), cut(other));
    }
}

fn assert_sound(fs: &FileSystem, what: &str) {
    let findings = fs.check_structure(true).unwrap();
    assert_eq!(findings.len(), 0, "{what}: {findings:?}");
    assert_eq!(fs.volume.check_space(true, &mut |_, _| {}).unwrap(), [], "{what}");
}

fn restore(fs: &FileSystem, name: &[u8], paths: &[&[u8]], to: Option<&[u8]>) -> Result<RestoreReport> {
    restore_while(fs, name, paths, to, &mut || Ok(()))
}

fn restore_while(
    fs: &FileSystem,
    name: &[u8],
    paths: &[&[u8]],
    to: Option<&[u8]>,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<RestoreReport> {
    let moment = fs.open_snapshot(name)?;
    let paths: Vec<Vec<u8>> = paths.iter().map(|path| path.to_vec()).collect();
    Restore::prepare(fs, &moment, &paths, to, &mut OfflineNamespace(fs, OWNER))?.run(go_on)
}

fn remove_snapshots(fs: &FileSystem, name: Option<&[u8]>) {
    let all = fs.snapshots().unwrap();
    let wanted = all.iter().filter(|(_, snapshot, _)| name.is_none_or(|name| snapshot.name == name));
    let ids: Vec<u64> = wanted.map(|(id, ..)| *id).collect();
    fs.remove_snapshots(&ids).unwrap();
    fs.finish_removals(&mut || Ok(())).unwrap();
    fs.purge().unwrap();
}

fn set_times(fs: &FileSystem, ino: Ino, seconds: i64) {
    let time = |seconds| Some(SetTime::To(Timestamp { seconds, nanos: 77 }));
    let set = SetAttributes { atime: time(seconds), mtime: time(seconds + 1), ..SetAttributes::default() };
    fs.set_attributes(ino, &set).unwrap();
}

/// Access control list: owner all, user 7 reads, group and mask read, others nothing.
fn list() -> Vec<u8> {
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, u32::MAX), (2, 4, 7), (4, 4, u32::MAX), (0x10, 4, u32::MAX), (0x20, 0, u32::MAX)];
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// Creates every kind of object below `tree`, and a file outside of it.
fn fill(fs: &FileSystem) {
    let tree = fs.make_directory(ROOT_INO, b"tree", 0o2750, OWNER).unwrap().ino;
    let deep = fs.make_directory(tree, b"deep", 0o711, OWNER).unwrap().ino;
    let empty = fs.make_directory(deep, b"empty", 0, OWNER).unwrap().ino;
    for n in 0..10u64 {
        put(fs, deep, format!("small{n}").as_bytes(), &noise(n, 1 + 700 * n as usize));
    }
    let large = put(fs, tree, b"large", &noise(20, 700_000));
    put(fs, tree, b"text", &b"all work and no play\n".repeat(20_000));
    let sparse = put(fs, tree, b"sparse", b"begin");
    fs.write(sparse, 3_000_000, &noise(21, 100_000)).unwrap();
    fs.truncate(sparse, 9_000_001, &mut |_| {}).unwrap();
    fs.link(large, deep, b"another name").unwrap();
    fs.link(large, ROOT_INO, b"outside").unwrap();
    fs.make_symlink(tree, b"link", b"deep/small1", OWNER).unwrap();
    fs.make_symlink(tree, b"long", &[b'x'; 4000], OWNER).unwrap();
    fs.make_node(tree, b"device", mode::CHARACTER | 0o600, 5 << 20 | 7, OWNER).unwrap();
    fs.make_node(tree, b"fifo", mode::FIFO | 0o644, 0, OWNER).unwrap();
    fs.make_node(tree, b"socket", mode::SOCKET | 0o600, 0, OWNER).unwrap();
    put(fs, tree, b"nothing", b"");
    put(fs, tree, b"new\nline \xff", b"odd");
    let set = SetAttributes { mode: Some(0o6711), uid: Some(0), gid: Some(42), ..SetAttributes::default() };
    fs.set_attributes(large, &set).unwrap();
    fs.set_xattr(large, b"security.capability", &[1; 20], XattrMode::Set).unwrap();
    fs.set_xattr(large, b"user.long", &noise(3, 9000), XattrMode::Set).unwrap();
    fs.set_xattr(sparse, b"system.posix_acl_access", &list(), XattrMode::Set).unwrap();
    fs.set_xattr(deep, b"system.posix_acl_default", &list(), XattrMode::Set).unwrap();
    fs.set_xattr(ROOT_INO, b"user.root", b"x", XattrMode::Set).unwrap();
    put(fs, ROOT_INO, b"file", &noise(4, 20_000));
    for (n, ino) in [large, sparse, empty, deep, tree, ROOT_INO].into_iter().enumerate() {
        set_times(fs, ino, 1000 * (n as i64 + 1));
    }
}

/// Destroys the tree like a bad script.
fn wreck(fs: &FileSystem) {
    let tree = fs.lookup(ROOT_INO, b"tree").unwrap().ino;
    let deep = fs.lookup(tree, b"deep").unwrap().ino;
    fs.unlink(tree, b"text").unwrap();
    fs.write(fs.lookup(tree, b"large").unwrap().ino, 100_000, &noise(30, 200_000)).unwrap();
    fs.truncate(fs.lookup(tree, b"sparse").unwrap().ino, 3_040_000, &mut |_| {}).unwrap();
    fs.unlink(deep, b"small3").unwrap();
    fs.unlink(deep, b"another name").unwrap();
    fs.rename(deep, b"small4", ROOT_INO, b"small4", RenameMode::NoReplace).unwrap();
    fs.unlink(ROOT_INO, b"file").unwrap();
    fs.make_directory(ROOT_INO, b"file", 0o755, OWNER).unwrap();
    put(fs, deep, b"more", &noise(31, 50_000));
    fs.remove_xattr(ROOT_INO, b"user.root").unwrap();
    fs.set_xattr(ROOT_INO, b"user.other", b"y", XattrMode::Set).unwrap();
    fs.set_attributes(ROOT_INO, &SetAttributes { mode: Some(0o700), ..SetAttributes::default() }).unwrap();
}

#[test]
fn the_whole_tree_comes_back_and_outlives_the_snapshots() {
    let (_, fs) = fresh(1);
    fill(&fs);
    fs.take_snapshot(b"good").unwrap();
    let expected = describe(&fs);
    wreck(&fs);
    fs.take_snapshot(b"before").unwrap();
    let wrecked = describe(&fs);
    fs.purge().unwrap();
    let report = restore(&fs, b"good", &[], None).unwrap();
    assert!(report.copied.files > 10 && report.copied.links == 2 && report.deleted > 20, "{report:?}");
    assert_same(&describe(&fs), &expected, "restored");
    assert_eq!(compare(&fs.open_snapshot(b"good").unwrap(), &fs, &mut |_| Ok(())).unwrap(), []);
    assert_sound(&fs, "with both snapshots");
    restore(&fs, b"before", &[], None).unwrap();
    assert_same(&describe(&fs), &wrecked, "and back");
    restore(&fs, b"good", &[], None).unwrap();
    remove_snapshots(&fs, Some(b"good"));
    assert_sound(&fs, "without the source");
    assert_same(&describe(&fs), &expected, "without the source");
    assert_same(&describe(&fs.open_snapshot(b"before").unwrap()), &wrecked, "the other one");
    remove_snapshots(&fs, None);
    assert_sound(&fs, "without snapshots");
    assert_same(&describe(&fs), &expected, "without snapshots");
    fs.close().unwrap();
}

#[test]
fn large_files_share_their_pages_with_the_snapshot() {
    let (_, fs) = fresh(1);
    let large = noise(1, 8 << 20);
    put(&fs, ROOT_INO, b"large", &large);
    fs.take_snapshot(b"good").unwrap();
    fs.unlink(ROOT_INO, b"large").unwrap();
    fs.purge().unwrap();
    let before = fs.volume.allocator().space().1 * 4096;
    restore(&fs, b"good", &[b"large"], None).unwrap();
    fs.purge().unwrap();
    let more = (fs.volume.allocator().space().1 * 4096).saturating_sub(before);
    assert!(more < 300_000, "{more} bytes more");
    // Written to, the two diverge.
    let ino = fs.lookup(ROOT_INO, b"large").unwrap().ino;
    fs.write(ino, 1 << 20, &[7; 100_000]).unwrap();
    fs.make_durable().unwrap();
    let moment = fs.open_snapshot(b"good").unwrap();
    let kept = moment.lookup(ROOT_INO, b"large").unwrap();
    assert!(moment.read(kept.ino, 0, large.len()).unwrap() == large);
    assert_sound(&fs, "written to");
    remove_snapshots(&fs, None);
    assert_sound(&fs, "without the snapshot");
    assert!(fs.read(ino, 0, 1 << 20).unwrap() == large[..1 << 20]);
}

#[test]
fn paths_come_back_with_the_directories_above_them() {
    let (_, fs) = fresh(1);
    fill(&fs);
    fs.take_snapshot(b"good").unwrap();
    let expected = describe(&fs);
    wreck(&fs);
    let tree = fs.lookup(ROOT_INO, b"tree").unwrap().ino;
    // A file in place of a directory, nothing in place of a file, and a path below another path.
    restore(&fs, b"good", &[b"file", b"/tree/deep/", b"tree/deep/small3", b"tree/text"], None).unwrap();
    let now = describe(&fs);
    for path in [&b"file"[..], b"tree/deep/small3", b"tree/deep/small4", b"tree/text", b"tree/deep/empty"] {
        assert_same(&part(&now, path), &part(&expected, path), "a path");
    }
    assert!(!now.contains_key(&b"tree/deep/more"[..]) && now.contains_key(&b"small4"[..]));
    assert_eq!(fs.lookup(ROOT_INO, b"tree").unwrap().ino, tree, "what is above stays");
    assert!(now[&b"tree/large"[..]] != expected[&b"tree/large"[..]], "what was not asked for stays");

    // Without any of the directories above it.
    let found = fs.lookup(ROOT_INO, b"tree").unwrap();
    fs.rename(ROOT_INO, b"tree", ROOT_INO, b"away", RenameMode::NoReplace).unwrap();
    restore(&fs, b"good", &[b"tree/deep/small5"], None).unwrap();
    let now = describe(&fs);
    assert_same(&part(&now, b"tree/deep/small5"), &part(&expected, b"tree/deep/small5"), "alone");
    assert_eq!(now.keys().filter(|path| path.starts_with(b"tree")).count(), 3);
    let attributes = |fs: &FileSystem| {
        let deep = resolve(fs, b"tree/deep").unwrap();
        (deep.mode, deep.uid, deep.mtime, fs.list_xattrs(deep.ino).unwrap())
    };
    assert_eq!(attributes(&fs), attributes(&fs.open_snapshot(b"good").unwrap()));
    assert_sound(&fs, "paths");
    assert!(found.is_directory());

    fs.unlink(resolve(&fs, b"tree/deep").unwrap().ino, b"small5").unwrap();
    let tree = fs.lookup(ROOT_INO, b"tree").unwrap().ino;
    fs.remove_directory(tree, b"deep").unwrap();
    put(&fs, tree, b"deep", b"no longer a directory");
    let before = describe(&fs);
    for (paths, complaint) in [
        (&[&b"tree/deep/small1"[..]][..], "no longer a directory"),
        (&[b"none"], "the snapshot has no none"),
        (&[b"file/below"], "the snapshot has no file/below"),
        (&[b"tree/../x"], "'..'"),
    ] {
        let refused = restore(&fs, b"good", paths, None).unwrap_err();
        assert!(matches!(&refused, Error::Invalid(text) if text.contains(complaint)), "{refused}");
    }
    assert!(matches!(restore(&fs, b"none", &[], None), Err(Error::NotFound)));
    let unchanged = |now: Described| now.into_iter().filter(|(path, _)| !path.is_empty()).collect::<Described>();
    assert_same(&unchanged(describe(&fs)), &unchanged(before), "refused");
}

#[test]
fn another_directory_takes_them_and_loses_nothing() {
    let (_, fs) = fresh(1);
    fill(&fs);
    fs.take_snapshot(b"good").unwrap();
    let expected = describe(&fs);
    wreck(&fs);
    let wrecked = describe(&fs);
    restore(&fs, b"good", &[], Some(b"/back/here")).unwrap();
    for directory in ["back", "back/here"] {
        let made = resolve(&fs, directory.as_bytes()).unwrap();
        assert_eq!((made.uid, made.gid), (OWNER.uid, OWNER.gid), "{directory}");
    }
    let now = describe(&fs);
    let moved = |path: &[u8]| -> Described {
        let prefix = b"back/here/".len();
        let part = part(&now, &[b"back/here/", path].concat());
        part.into_iter().map(|(path, text)| (path[prefix..].to_vec(), text)).collect()
    };
    for path in [&b"tree"[..], b"file"] {
        assert_same(&alike(moved(path)), &alike(part(&expected, path)), "elsewhere");
    }
    assert!(now[&b"back/here/outside"[..]].ends_with(&format!("{NAMES}3 {:?}", b"back/here/outside")));
    assert!(now[&b"back/here/tree/large"[..]].ends_with(&format!("{NAMES}3 {:?}", b"back/here/outside")));
    for path in [&b"tree"[..], b"file", b"small4", b"outside"] {
        assert_same(&part(&now, path), &part(&wrecked, path), "what is there");
    }
    let again = restore(&fs, b"good", &[b"file"], Some(b"back/here"));
    assert!(matches!(again, Err(Error::Invalid(text)) if text.contains("file already exists")));
    let twice = restore(&fs, b"good", &[b"tree/deep", b"tree/text", b"file"], Some(b"else"));
    assert!(twice.is_ok());
    assert!(matches!(restore(&fs, b"good", &[b"file"], Some(b"file/x")), Ok(_) | Err(Error::NotDirectory)));
    assert_sound(&fs, "elsewhere");
    assert_same(&describe(&fs.open_snapshot(b"good").unwrap()), &expected, "the snapshot");
}

/// Returns names at the root that a restore uses if they are unused.
fn stages(fs: &FileSystem) -> Vec<Vec<u8>> {
    list_entries(fs, ROOT_INO).into_iter().map(|(name, _)| name).filter(|name| name.starts_with(STAGE)).collect()
}

/// Creates the leftovers of an interrupted restore.
fn leave_stage(fs: &FileSystem, name: &[u8]) -> Ino {
    let made = fs.make_directory(ROOT_INO, name, 0o700, OWNER).unwrap().ino;
    fs.set_xattr(made, MARK, b"1", XattrMode::Set).unwrap();
    put(fs, made, b"new", b"half built");
    made
}

#[test]
fn what_only_looks_like_a_leftover_is_the_users() {
    let (_, fs) = fresh(1);
    put(&fs, ROOT_INO, b"file", b"x");
    fs.take_snapshot(b"good").unwrap();
    let mine = fs.make_directory(ROOT_INO, b".lockbox-restore-1", 0o755, OWNER).unwrap().ino;
    fs.make_directory(ROOT_INO, STAGE, 0o755, OWNER).unwrap();
    put(&fs, ROOT_INO, b".lockbox-restore-2", b"mine");
    leave_stage(&fs, b".lockbox-restore-3");
    // The mark alone does not make a stage.
    fs.set_xattr(fs.make_directory(ROOT_INO, b"marked", 0o700, OWNER).unwrap().ino, MARK, b"1", XattrMode::Set)
        .unwrap();
    restore(&fs, b"good", &[b"file"], None).unwrap();
    assert_eq!(stages(&fs).len(), 3, "what was left is gone: {:?}", stages(&fs));
    assert_eq!(fs.lookup(ROOT_INO, b".lockbox-restore-1").unwrap().ino, mine);
    assert!(fs.lookup(ROOT_INO, b"marked").is_ok());
    assert!(fs.lookup(ROOT_INO, STAGE).is_ok(), "an empty directory is the user's too");
    restore(&fs, b"good", &[], None).unwrap();
    assert_eq!(stages(&fs).len(), 0, "the snapshot does not have them");
}

#[test]
fn objects_of_a_stages_name_come_back_and_leftovers_in_a_snapshot_do_not() {
    let (_, fs) = fresh(1);
    put(&fs, ROOT_INO, b"file", b"x");
    let mut own: Vec<Vec<u8>> = vec![STAGE.to_vec()];
    own.extend((1..=3).map(|n| format!(".lockbox-restore-{n}").into_bytes()));
    for name in &own[..3] {
        put(&fs, fs.make_directory(ROOT_INO, name, 0o755, OWNER).unwrap().ino, b"mine", name);
    }
    put(&fs, ROOT_INO, &own[3], b"a file of mine");
    fs.take_snapshot(b"own").unwrap();
    let expected = describe(&fs);
    leave_stage(&fs, b".lockbox-restore-4");
    fs.take_snapshot(b"with").unwrap();
    let all = |paths: &[&[u8]], name: &[u8], is_there: bool| {
        for own in &own {
            let found = fs.lookup(ROOT_INO, own).unwrap();
            if found.is_directory() {
                fs.unlink(found.ino, b"mine").unwrap();
                fs.remove_directory(ROOT_INO, own).unwrap();
            } else {
                fs.unlink(ROOT_INO, own).unwrap();
            }
            if is_there {
                put(&fs, ROOT_INO, own, b"in the way");
            }
        }
        restore(&fs, name, paths, None).unwrap();
        let without_root = |all: Described| all.into_iter().skip(1).collect::<Described>();
        assert_same(&without_root(describe(&fs)), &without_root(expected.clone()), "own names");
    };
    let paths: Vec<&[u8]> = own.iter().map(Vec::as_slice).collect();
    for name in [b"own", &b"with"[..]] {
        for is_there in [false, true] {
            all(&[], name, is_there);
            all(&paths, name, is_there);
        }
    }
    for path in [&b".lockbox-restore-4"[..], b".lockbox-restore-4/new"] {
        let refused = restore(&fs, b"with", &[path], None);
        assert!(matches!(&refused, Err(Error::Invalid(text)) if text.contains("interrupted")), "{refused:?}");
    }
    // A target directory is not a stage either.
    for name in [STAGE, b".lockbox-restore-4", b".lockbox-restore-5"] {
        restore(&fs, b"with", &[b"file"], Some(&[name, b"/below"].concat())).unwrap();
        assert!(resolve(&fs, &[name, b"/below/file"].concat()).is_ok(), "{}", String::from_utf8_lossy(name));
    }
    assert_sound(&fs, "own names");
}

/// Content that must not be compressed is not, even if it is written before the copy of its file is
/// complete.
#[test]
fn what_must_not_be_compressed_never_is() {
    let (_, fs) = fresh(1);
    let text = b"all work and no play\n".repeat(900);
    let names: Vec<Vec<u8>> = (0..20).map(|n| format!("file{n}").into_bytes()).collect();
    for name in &names {
        let ino = put(&fs, ROOT_INO, name, b"");
        let plain = inode_flags::NO_COMPRESS | inode_flags::NO_PACK;
        fs.truncate(ino, 0, &mut |inode| inode.flags |= plain).unwrap();
        fs.write(ino, 0, &text).unwrap();
        fs.truncate(ino, 5_000_000, &mut |_| {}).unwrap();
    }
    fs.take_snapshot(b"good").unwrap();
    names.iter().for_each(|name| fs.unlink(ROOT_INO, name).unwrap());
    fs.purge().unwrap();
    let before = fs.volume.allocator().space().1;
    restore_while(&fs, b"good", &[], None, &mut || fs.make_durable()).unwrap();
    fs.purge().unwrap();
    let more = fs.volume.allocator().space().1 - before;
    assert!(more >= 20 * text.len() as u64 / 4096, "{more} blocks for {} bytes", 20 * text.len());
}

/// Removes properties that other paths may change: other names of a file.
fn alike(all: Described) -> Described {
    let cut = |text: String| text.split(NAMES).next().unwrap_or_default().to_owned();
    all.into_iter().map(|(path, text)| (path, cut(text))).collect()
}

/// Checks that each top of the tree has its old content, or that of the snapshot.
fn assert_old_or_new(fs: &FileSystem, old: &Described, new: &Described, what: &str) {
    let now = describe(fs);
    for top in [&b"tree"[..], b"file"] {
        let (now, old, new) = (alike(part(&now, top)), alike(part(old, top)), alike(part(new, top)));
        assert!(now == old || now == new, "{what}: {} is neither", String::from_utf8_lossy(top));
    }
}

#[test]
fn interrupted_anywhere_each_path_is_old_or_new_and_again_completes_it() {
    let mut steps = 0;
    for stop in (0..).step_by(2) {
        let (storage, fs) = fresh(1);
        fill(&fs);
        fs.take_snapshot(b"good").unwrap();
        let expected = describe(&fs);
        wreck(&fs);
        let wrecked = describe(&fs);
        let mut count = 0;
        let mut cut = None;
        let ended = restore_while(&fs, b"good", &[], None, &mut || {
            count += 1;
            if count <= stop {
                return Ok(());
            }
            // Power fails here, after a commit of the completed part.
            fs.make_durable()?;
            cut = Some(storage.contents());
            Err(Error::Interrupted(2))
        });
        let Some(contents) = cut else {
            steps = stop;
            break;
        };
        assert!(matches!(ended, Err(Error::Interrupted(2))));
        assert_eq!(stages(&fs).len(), 0, "it cleans up");
        assert_old_or_new(&fs, &wrecked, &expected, "interrupted");
        let left = open_on(Arc::new(crate::storage::MemoryStorage::from_contents(contents)), false, 5).unwrap();
        assert_eq!(stages(&left).len(), 1, "step {stop} leaves a stage");
        assert_old_or_new(&left, &wrecked, &expected, "after a crash");
        for fs in [&fs, &left] {
            restore(fs, b"good", &[], None).unwrap();
            assert_same(&describe(fs), &expected, "again");
            if stop % 9 == 0 {
                assert_sound(fs, "again");
                remove_snapshots(fs, None);
                assert_sound(fs, "without the snapshot");
                assert_same(&describe(fs), &expected, "without the snapshot");
            }
        }
    }
    assert!(steps > 25, "{steps}");
}

fn open(storage: Arc<SimulatedStorage>, environment: &Arc<SeededEnvironment>) -> Arc<FileSystem> {
    let options = OpenOptions { read_only: false, memory: 32 << 20 };
    let volume = Volume::open(storage, cipher(), environment.clone(), 1, &options).unwrap();
    let options = FsOptions {
        max_dirty_bytes: 8 << 20,
        sync: SyncProfile::Periodic,
        pack: true,
        compression: Compression::Default,
    };
    FileSystem::new(volume, environment.clone(), name_key(&key(), &ARCHIVE), options).unwrap()
}

/// Each operation of the host fails in turn, once or permanently; then the restore is repeated, or
/// the process is killed, or the power fails. For the whole tree, and for paths.
#[test]
fn after_each_fault_and_a_crash_each_path_is_old_or_new_and_again_completes_it() {
    let storage = SimulatedStorage::new();
    let fs = create_on(storage.clone(), 1);
    fill(&fs);
    fs.take_snapshot(b"good").unwrap();
    let expected = describe(&fs);
    wreck(&fs);
    let wrecked = describe(&fs);
    fs.close().unwrap();
    let bytes = storage.contents();
    let everything_or_some: [&[&[u8]]; 2] = [&[], &[b"tree", b"file"]];
    for paths in everything_or_some {
        let assert_new = |fs: &FileSystem, what: &str| {
            let now = describe(fs);
            match paths {
                [] => assert_same(&now, &expected, what),
                paths => paths.iter().for_each(|top| {
                    assert_same(&alike(part(&now, top)), &alike(part(&expected, top)), what);
                }),
            }
        };
        let mut met = 0;
        for plan in plans() {
            for count in (0..).step_by(stride(29)) {
                let (plan, environment) = (FaultPlan { count, ..plan }, Arc::new(SeededEnvironment::new(count + 1)));
                let storage = SimulatedStorage::from_contents(&bytes);
                let fs = open(storage.clone(), &environment);
                storage.inject(Some(plan));
                // Frequent commits, so that faults affect each part.
                let mut calls = 0;
                let ended = restore_while(&fs, b"good", paths, None, &mut || {
                    calls += 1;
                    if calls % 4 == 0 { fs.make_durable() } else { Ok(()) }
                });
                let is_met = storage.injected() > 0;
                storage.inject(None);
                let latched = fs.volume.latched().is_some();
                match &ended {
                    Ok(_) => {}
                    Err(Error::NoSpace(_)) => assert_eq!(plan.fault, Fault::NoSpace, "{plan:?}"),
                    Err(Error::Io { .. }) => assert_ne!(plan.fault, Fault::NoSpace, "{plan:?}"),
                    Err(Error::WriteFailed(_)) => assert!(latched && !is_full_host(plan), "{plan:?}"),
                    Err(error) => panic!("{plan:?}: {error}"),
                }
                assert!(is_met || ended.is_ok(), "{ended:?}");
                if !is_met {
                    break;
                }
                met += 1;
                let what = format!("{plan:?}");
                let images = [storage.crash_random(&mut || environment.next_u64()), storage.process_death()];
                assert_old_or_new(&fs, &wrecked, &expected, &what);
                if !latched {
                    restore(&fs, b"good", paths, None).unwrap();
                    assert_new(&fs, &what);
                }
                drop(fs);
                for storage in images {
                    let fs = open(storage, &environment);
                    assert_old_or_new(&fs, &wrecked, &expected, &what);
                    assert_same(&describe(&fs.open_snapshot(b"good").unwrap()), &expected, &what);
                    restore(&fs, b"good", paths, None).unwrap();
                    assert_new(&fs, &what);
                    assert_sound(&fs, "again");
                    remove_snapshots(&fs, None);
                    assert_sound(&fs, "without the snapshot");
                    assert_new(&fs, "without the snapshot");
                }
            }
        }
        println!(
            "summary: {met} faults: during a restore of {}",
            if paths.is_empty() { "everything" } else { "paths" }
        );
        assert!(met > 20, "{met}");
    }
}

/// Restores of random snapshots between random changes; snapshots are created and removed.
#[test]
fn any_snapshot_comes_back_at_any_time() {
    for seed in seeds(1..=4) {
        let (_, fs) = fresh(seed);
        let world = World { fs, dice: SeededEnvironment::new(seed) };
        let fs = &world.fs;
        let mut kept: Vec<(Vec<u8>, Described)> = Vec::new();
        for round in 0..14u64 {
            for _ in 0..world.below(40) {
                world.change();
            }
            let name = format!("{round}").into_bytes();
            fs.take_snapshot(&name).unwrap();
            kept.push((name, describe(fs)));
            if world.below(3) == 0 {
                fs.purge().unwrap();
            }
            if kept.len() > 4 {
                let (gone, _) = kept.remove(world.below(5) as usize);
                remove_snapshots(fs, Some(&gone));
            }
            let (name, expected) = &kept[world.below(kept.len() as u64) as usize];
            restore(fs, name, &[], None).unwrap();
            assert_same(&describe(fs), expected, &format!("seed {seed}, round {round}"));
            for (name, expected) in &kept {
                assert_same(&describe(&fs.open_snapshot(name).unwrap()), expected, "a snapshot");
            }
            assert_sound(fs, &format!("seed {seed}, round {round}"));
        }
        let last = describe(fs);
        remove_snapshots(fs, None);
        assert_sound(fs, "without snapshots");
        assert_same(&describe(fs), &last, "without snapshots");
    }
}

/// Data of a removed snapshot is not shared: it may be half freed.
#[test]
fn a_snapshot_that_is_being_removed_gives_nothing_back() {
    let (_, fs) = fresh(1);
    put(&fs, ROOT_INO, b"large", &noise(1, 500_000));
    fs.take_snapshot(b"good").unwrap();
    let moment = fs.open_snapshot(b"good").unwrap();
    let all = fs.snapshots().unwrap();
    fs.unlink(ROOT_INO, b"large").unwrap();
    fs.remove_snapshots(&[all[0].0]).unwrap();
    let mut alone = OfflineNamespace(&fs, OWNER);
    let failed = Restore::prepare(&fs, &moment, &[b"large".to_vec()], None, &mut alone).unwrap().run(&mut || Ok(()));
    assert!(matches!(failed, Err(Error::Stale)), "{failed:?}");
    fs.finish_removals(&mut || Ok(())).unwrap();
    fs.purge().unwrap();
    assert_sound(&fs, "removed");
}

/// Client that executes a request after its timeout.
struct Late<'a> {
    fs: &'a FileSystem,
    told: Option<(Vec<u8>, Vec<u8>, bool)>,
    late: usize,
}

impl LiveNamespace for Late<'_> {
    fn rename(&mut self, from: &[u8], to: &[u8], exchange: bool) -> Result<()> {
        self.told = Some((from.to_vec(), to.to_vec(), exchange));
        Err(Error::Interrupted(0))
    }

    fn make_directory(&mut self, path: &[u8]) -> Result<()> {
        OfflineNamespace(self.fs, OWNER).make_directory(path)
    }

    fn number(&mut self) -> u64 {
        77
    }

    fn hide(&mut self, _: Ino) {}

    fn changed_name(&mut self, _: Ino, _: &[u8]) {}

    /// A built object that is no longer needed is being deleted.
    fn changed(&mut self, _: Ino) {
        if let Some((from, to, exchange)) = &self.told {
            let late = OfflineNamespace(self.fs, OWNER).rename(from, to, *exchange);
            assert!(matches!(late, Err(Error::NotFound)), "{late:?}");
            self.late += 1;
        }
    }
}

#[test]
fn a_rename_that_was_given_up_finds_nothing_to_rename() {
    let (_, fs) = fresh(1);
    fill(&fs);
    fs.take_snapshot(b"good").unwrap();
    wreck(&fs);
    let wrecked = describe(&fs);
    let moment = fs.open_snapshot(b"good").unwrap();
    let mut names = Late { fs: &fs, told: None, late: 0 };
    let restored = Restore::prepare(&fs, &moment, &[b"tree".to_vec()], None, &mut names).unwrap().run(&mut || Ok(()));
    assert!(matches!(restored, Err(Error::Interrupted(0))));
    assert!(names.late > 0, "a file with two names is deleted");
    let (from, to, exchange) = names.told.unwrap();
    assert!(from.starts_with(b".lockbox-restore-77/"), "{from:?}");
    assert!(OfflineNamespace(&fs, OWNER).rename(&from, &to, exchange).is_err());
    assert_eq!(stages(&fs).len(), 0);
    let (before, now) = (alike(part(&wrecked, b"tree")), alike(part(&describe(&fs), b"tree")));
    assert_same(&before, &now, "what was not restored");
}

#[test]
fn programs_that_stand_in_a_replaced_directory_neither_end_a_restore_nor_lose_what_they_moved_out() {
    let (_, fs) = fresh(1);
    let tree = fs.make_directory(ROOT_INO, b"tree", 0o755, OWNER).unwrap().ino;
    put(&fs, tree, b"kept", b"good");
    fs.take_snapshot(b"good").unwrap();
    let expected = part(&describe(&fs), b"tree");
    let important = fs.make_directory(tree, b"important", 0o755, OWNER).unwrap().ino;
    put(&fs, important, b"letter", b"to be kept");
    for number in 0..300 {
        put(&fs, tree, format!("bad{number}").as_bytes(), b"bad");
    }
    let (mut asked, mut moved) = (0, false);
    let go_on = &mut || {
        asked += 1;
        // Once the old tree is being deleted, its path denotes another object.
        if fs.lookup(ROOT_INO, b"tree").is_ok_and(|found| found.ino != tree) {
            if !moved {
                fs.rename(tree, b"important", ROOT_INO, b"saved", RenameMode::Replace).unwrap();
                moved = true;
            }
            if fs.attributes(tree).is_ok_and(|found| found.links > 0) {
                put(&fs, tree, format!("new{asked}").as_bytes(), b"of a program");
            }
        }
        Ok(())
    };
    restore_while(&fs, b"good", &[b"tree"], None, go_on).unwrap();
    assert!(moved);
    assert_same(&part(&describe(&fs), b"tree"), &expected, "what was restored");
    assert_eq!(fs.read(fs.lookup(important, b"letter").unwrap().ino, 0, 100).unwrap(), b"to be kept");
    assert_sound(&fs, "beside programs");
    // Everything created at the end is a leftover.
    restore(&fs, b"good", &[b"tree/kept"], None).unwrap();
    assert_eq!(stages(&fs).len(), 0);
}
