//! What a mount shows of the archive's snapshots.

use std::fs::{self, File, Permissions};
use std::io::Read;
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use lockbox::Error;
use lockbox::fs::FileSystem;
use lockbox::fs::ROOT_INO;
use nix::libc::{EACCES, EEXIST, EIO, ENODATA, EROFS, ESTALE, EXDEV, O_DIRECTORY, O_RDONLY};
use rustix::fs::{XattrFlags, getxattr, setxattr};

use crate::support::{Handle, Map, Mount, awaited, code, create, noise, open_with};

/// In the root there is a directory .snapshots, found by name and listed with the mount option `snapshot-dir=shown`
/// only. It lists the snapshots; each is the tree at its time, with its modes, owners, attributes and times, regardless
/// of later writes, removals and purges. If the archive has an entry of that name, programs find that entry.
#[test]
fn a_snapshot_shows_the_tree_as_it_was() {
    let mut mount = Mount::new();
    fs::create_dir(mount.path("directory")).unwrap();
    fs::write(mount.path("directory/file"), noise(1, 300_000)).unwrap();
    fs::write(mount.path("small"), "before").unwrap();
    fs::set_permissions(mount.path("small"), Permissions::from_mode(0o640)).unwrap();
    setxattr(mount.path("small"), "user.note", b"before", XattrFlags::empty()).unwrap();
    let before = fs::metadata(mount.path("small")).unwrap();
    mount.take_snapshot("kept");
    let file = create(mount.path("directory/file"));
    file.write_all_at(&noise(2, 200_000), 50_000).unwrap();
    fs::write(mount.path("small"), "after, and longer").unwrap();
    fs::set_permissions(mount.path("small"), Permissions::from_mode(0o600)).unwrap();
    setxattr(mount.path("small"), "user.note", b"after", XattrFlags::empty()).unwrap();
    fs::write(mount.path("new"), "new").unwrap();
    for step in 0..3 {
        let kept = |name: &str| mount.path(".snapshots/kept").join(name);
        assert!(fs::read(kept("directory/file")).unwrap() == noise(1, 300_000), "step {step}");
        assert_eq!(fs::read_to_string(kept("small")).unwrap(), "before");
        let now = fs::metadata(kept("small")).unwrap();
        assert_eq!((now.mode(), now.len(), now.mtime_nsec()), (before.mode(), before.len(), before.mtime_nsec()));
        let mut value = [0; 20];
        assert_eq!(getxattr(kept("small"), "user.note", &mut value).unwrap(), 6);
        assert_eq!(&value[..6], b"before");
        assert!(!kept("new").exists());
        let listed = |path| -> Vec<_> { fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect() };
        assert_eq!(listed(mount.path(".snapshots")), ["kept"]);
        assert!(!listed(mount.root()).contains(&".snapshots".into()));
        match step {
            0 => file.sync_all().unwrap(),
            _ => {
                let _ = fs::remove_dir_all(mount.path("directory"));
                mount.drop_caches();
            }
        }
    }
    drop(file);
    mount.remount_with("snapshot-dir=shown");
    assert!(fs::read_dir(mount.root()).unwrap().any(|entry| entry.unwrap().file_name() == ".snapshots"));
    mount.remount_with("snapshot-dir=off");
    fs::write(mount.path(".snapshots"), "mine").unwrap();
    mount.remount_with("snapshot-dir=shown");
    assert_eq!(fs::read_to_string(mount.path(".snapshots")).unwrap(), "mine");
    mount.check();
}

/// Nothing in .snapshots can be made, changed, removed or moved out of it (EROFS); modes decide about reading, and for
/// access(2) about writing too. A link out of it gets EXDEV, and creating an entry of that name in the root EEXIST.
#[test]
fn a_snapshot_cannot_be_changed() {
    let mut mount = Mount::new();
    fs::write(mount.path("file"), "content").unwrap();
    mount.take_snapshot("kept");
    let kept = mount.path(".snapshots/kept");
    let file = kept.join("file");
    assert_eq!(code(open_with(&file, 0)), EROFS);
    assert_eq!(code(fs::write(kept.join("new"), "")), EROFS);
    assert_eq!(code(fs::create_dir(mount.path(".snapshots/new"))), EROFS);
    assert_eq!(code(fs::remove_file(&file)), EROFS);
    assert_eq!(code(fs::remove_dir(&kept)), EROFS);
    assert_eq!(code(fs::rename(&file, mount.path("out"))), EROFS);
    assert_eq!(code(fs::rename(mount.path("file"), kept.join("in"))), EROFS);
    assert_eq!(code(fs::rename(mount.path(".snapshots"), mount.path("out"))), EROFS);
    assert_eq!(code(fs::set_permissions(&file, Permissions::from_mode(0o600))), EROFS);
    assert_eq!(code(setxattr(&file, "user.a", b"b", XattrFlags::empty())), EROFS);
    assert_eq!(code(getxattr(&file, "user.a", &mut [0; 9])), ENODATA);
    assert_eq!(code(fs::hard_link(&file, mount.path("out"))), EXDEV);
    assert_eq!(code(fs::create_dir(mount.path(".snapshots"))), EEXIST);
    assert_eq!(fs::copy(&file, mount.path("out")).unwrap(), 7);
    assert_eq!(fs::read_to_string(mount.path("out")).unwrap(), "content");
    mount.check();
}

/// Files in .snapshots have st_dev of the mount and inode numbers beyond 2^48 that are theirs as long as the mount lasts. A file handle works as long
/// as the mount and the snapshot do, that of a directory which the kernel forgot only with snapshot-dir=shown; afterwards it gets ESTALE
/// or the same file, never another one.
#[test]
fn numbers_and_handles_of_snapshots_are_their_own() {
    let mut mount = Mount::with("snapshot-dir=shown");
    fs::create_dir(mount.path("directory")).unwrap();
    for content in ["first", "second"] {
        fs::write(mount.path("directory/file"), content).unwrap();
        mount.take_snapshot(content);
    }
    let kept = |mount: &Mount, name: &str| mount.path(".snapshots").join(name).join("directory/file");
    let numbers: Vec<u64> = [kept(&mount, "first"), kept(&mount, "second"), mount.path("directory/file")]
        .iter()
        .map(|path| fs::metadata(path).unwrap())
        .inspect(|found| assert_eq!(found.dev(), fs::metadata(mount.root()).unwrap().dev()))
        .map(|found| found.ino())
        .collect();
    assert!(numbers[0] != numbers[1] && numbers[..2].iter().all(|number| *number > 1 << 48), "{numbers:x?}");
    assert_eq!(numbers[0] & ((1 << 48) - 1), numbers[2]);
    let handle = Handle::of(&kept(&mount, "first"));
    let directory = Handle::of(kept(&mount, "first").parent().unwrap());
    let content = |mount: &Mount| {
        let mut content = String::new();
        handle.open(&File::open(mount.root()).unwrap(), O_RDONLY).map(|mut file| {
            file.read_to_string(&mut content).unwrap();
            content
        })
    };
    let open_directory = |mount: &Mount| directory.open(&File::open(mount.root()).unwrap(), O_RDONLY | O_DIRECTORY);
    for _ in 0..2 {
        assert_eq!(content(&mount).unwrap(), "first");
        let opened = open_directory(&mount).unwrap();
        let path = fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&opened))).unwrap();
        assert_eq!(path, mount.path(".snapshots/first/directory"));
        drop(opened);
        mount.drop_caches();
        assert_eq!(fs::metadata(kept(&mount, "first")).unwrap().ino(), numbers[0]);
        mount.drop_caches();
    }
    mount.remount_with("");
    assert_eq!(code(content(&mount)), ESTALE, "no view has the number");
    // The other one comes first now, so it has the number that the first one had.
    assert_eq!(fs::metadata(kept(&mount, "second")).unwrap().ino(), numbers[0]);
    assert_eq!(code(content(&mount)), ESTALE, "another snapshot has the number");
    mount.drop_caches();
    assert_eq!(code(content(&mount)), ESTALE);
    mount.remount();
    assert!(kept(&mount, "first").exists());
    assert_eq!(content(&mount).unwrap(), "first");
    // A program that another test starts has our descriptors for the moment before its exec.
    let is_stale = awaited(|| {
        mount.drop_caches();
        code(open_directory(&mount)) == ESTALE
    });
    assert!(is_stale, "the root does not list the way");
}

/// A restore in a mount changes only names: restored files are created in a directory of the root, named
/// .lockbox-restore- and a number, and renamed to their paths. Until the restore is complete, that directory cannot be
/// opened (EACCES). Open files and mappings keep their previous content; later writes to them reach no file that has a
/// name.
#[test]
fn a_restore_changes_names_alone() {
    let mut mount = Mount::new();
    fs::create_dir(mount.path("directory")).unwrap();
    fs::write(mount.path("directory/file"), noise(1, 20_000)).unwrap();
    mount.take_snapshot("kept");
    fs::write(mount.path("directory/file"), noise(2, 30_000)).unwrap();
    let file = open_with(mount.path("directory/file"), 0).unwrap();
    let map = Map::new(&file, 30_000);
    let mut looked = 0;
    mount.restore("kept", &mut |from, to| {
        // Of what is renamed, one name is in the directory of the restore.
        let stage = [from, to].into_iter().find_map(|path| {
            let first = path.split('/').next()?;
            first.starts_with(".lockbox-restore-").then(|| mount.path(first))
        });
        let building = stage.unwrap().join("building");
        assert_eq!(code(fs::read_dir(&building)), EACCES);
        assert_eq!(code(fs::metadata(building.join("0"))), EACCES);
        assert!(fs::read(mount.path("directory/file")).unwrap() == noise(2, 30_000));
        looked += 1;
    });
    assert_eq!(looked, 1);
    assert!(fs::read(mount.path("directory/file")).unwrap() == noise(1, 20_000));
    let mut held = vec![0; 30_000];
    file.read_exact_at(&mut held, 0).unwrap();
    assert!(held == noise(2, 30_000) && (0..30_000).all(|at| map.get(at) == held[at]));
    file.write_all_at(b"to nobody", 0).unwrap();
    file.sync_all().unwrap();
    assert_eq!(map.get(0), b't');
    mount.drop_caches();
    assert!(fs::read(mount.path("directory/file")).unwrap() == noise(1, 20_000));
    drop((file, map));
    mount.check();
}

/// A damaged snapshot is left out of the list in .snapshots, and its name gets EIO. In a directory, there too, all entries before the damage are listed, and
/// the listing ends with EIO.
#[test]
fn damage_hides_only_what_it_hit() {
    a_damaged_snapshot_hides_no_other_one();
    damage_in_a_directory_of_a_snapshot_hides_only_what_it_hit();
    a_root_that_is_listed_in_part_ends_with_an_error_where_it_lists_snapshots();
}

/// Two snapshots, of which none shares a node with the other one or with the live tree.
fn two_snapshots_of_many_files() -> Mount {
    let mut mount = Mount::new();
    for name in ["first", "second", ""] {
        for number in 0..600 {
            fs::write(mount.path(&format!("{number:0>100}")), name).unwrap();
        }
        fs::set_permissions(mount.root(), Permissions::from_mode(0o700)).unwrap();
        fs::write(mount.path("turn"), name).unwrap();
        if !name.is_empty() {
            mount.take_snapshot(name);
        }
        for number in 0..600 {
            let (old, new) = (mount.path(&format!("{number:0>100}")), mount.path("moved"));
            fs::rename(&old, &new).unwrap();
            fs::rename(&new, &old).unwrap();
        }
    }
    mount
}

/// How many entries are read, and the error that ends them.
fn entries(path: &std::path::Path) -> (usize, i32) {
    let mut entries = fs::read_dir(path).unwrap();
    for count in 0.. {
        match entries.next() {
            Some(Ok(_)) => {}
            Some(Err(error)) => return (count, code::<()>(Err(error))),
            None => return (count, 0),
        }
    }
    unreachable!()
}

fn is_sound(fs: &FileSystem, name: &[u8]) -> bool {
    fs.snapshot_named(name).is_ok_and(|id| fs.snapshot_view(id).attributes(ROOT_INO).is_ok())
}

fn a_damaged_snapshot_hides_no_other_one() {
    let mut mount = two_snapshots_of_many_files();
    mount.damage("", &|fs| {
        let first = fs.snapshot_named(b"first").map(|id| fs.snapshot_view(id).attributes(ROOT_INO));
        matches!(first, Ok(Err(Error::Damaged(_)))) && is_sound(fs, b"second") && fs.attributes(ROOT_INO).is_ok()
    });
    let listed: Vec<_> =
        fs::read_dir(mount.path(".snapshots")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(listed, ["second"]);
    assert_eq!(code(fs::metadata(mount.path(".snapshots/first"))), EIO);
    assert_eq!(fs::read_to_string(mount.path(".snapshots/second/turn")).unwrap(), "second");
}

fn damage_in_a_directory_of_a_snapshot_hides_only_what_it_hit() {
    let mut mount = two_snapshots_of_many_files();
    mount.damage("", &|fs| {
        let Ok(view) = fs.snapshot_named(b"first").map(|id| fs.snapshot_view(id)) else { return false };
        let mut count = 0;
        let listed = view.list_directory(ROOT_INO, 0, u64::MAX, false, &mut |_, _| {
            count += 1;
            ControlFlow::Continue(())
        });
        count > 10 && matches!(listed, Err(Error::Damaged(_)))
    });
    let (count, error) = entries(&mount.path(".snapshots/first"));
    assert!(count > 8 && error == EIO, "{count} entries, then {error}");
}

fn a_root_that_is_listed_in_part_ends_with_an_error_where_it_lists_snapshots() {
    let mut mount = two_snapshots_of_many_files();
    mount.damage("snapshot-dir=shown", &|fs| {
        let mut count = 0;
        let listed = fs.list_directory(ROOT_INO, 0, u64::MAX, false, &mut |_, _| {
            count += 1;
            ControlFlow::Continue(())
        });
        count > 10 && matches!(listed, Err(Error::Damaged(_)))
    });
    let (count, error) = entries(&mount.root());
    assert!(count > 8 && error == EIO, "{count} entries, then {error}");
}
