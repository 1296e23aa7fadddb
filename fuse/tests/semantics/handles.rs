//! File handles, which NFS servers and some backup programs use in place of names.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;

use nix::libc::{ESTALE, O_DIRECTORY, O_RDONLY, O_RDWR};
use rustix::fs::{AtFlags, CWD, statat};

use crate::support::{Handle, Mount, awaited, code, create};

/// name_to_handle_at(2) gives a handle that open_by_handle_at(2) takes as long as the file exists: after renames, after
/// the kernel forgot the file, and after another mount. The handle of a file that was deleted gets ESTALE for ever.
#[test]
fn handles_last_as_long_as_their_file() {
    let mut mount = Mount::new();
    fs::create_dir_all(mount.path("a/b")).unwrap();
    fs::write(mount.path("a/b/file"), "content").unwrap();
    fs::write(mount.path("gone"), "gone").unwrap();
    let (file, gone) = (Handle::of(&mount.path("a/b/file")), Handle::of(&mount.path("gone")));
    let ino = fs::metadata(mount.path("a/b/file")).unwrap().ino();
    fs::remove_file(mount.path("gone")).unwrap();
    for round in 0..4 {
        let root = File::open(mount.root()).unwrap();
        let mut opened = file.open(&root, O_RDWR).unwrap();
        let mut content = String::new();
        opened.read_to_string(&mut content).unwrap();
        assert_eq!((content.as_str(), opened.metadata().unwrap().ino()), ("content", ino));
        // The daemon hears of the close a moment later.
        assert!(awaited(|| code(gone.open(&root, O_RDONLY)) == ESTALE), "round {round}");
        drop((root, opened));
        match round {
            0 => mount.drop_caches(),
            1 => mount.remount(),
            _ => {
                fs::rename(mount.path("a/b/file"), mount.path("a/moved"))
                    .or_else(|_| fs::create_dir(mount.path("c")))
                    .unwrap();
                create(mount.path("new"));
                mount.crash();
                fs::create_dir_all(mount.path("a/b")).unwrap();
                if !mount.path("a/b/file").exists() {
                    fs::rename(mount.path("a/moved"), mount.path("a/b/file")).unwrap();
                }
            }
        }
    }
}

/// From the handle of a directory the kernel finds the way up to the root by `..` alone, and the names on it. With this an
/// NFS server can export a mount; exports(5) then needs `fsid=`, as for every file system without a device.
#[test]
fn directories_are_connected_from_their_handles() {
    let mut mount = Mount::new();
    fs::create_dir_all(mount.path("a/b/c/d")).unwrap();
    create(mount.path("a/b/c/d/file"));
    let handle = Handle::of(&mount.path("a/b/c/d"));
    let inos: Vec<u64> =
        ["a/b/c/d", "a/b/c", "a/b", "a", ""].iter().map(|name| fs::metadata(mount.path(name)).unwrap().ino()).collect();
    for round in 0..3 {
        let root = File::open(mount.root()).unwrap();
        let directory = handle.open(&root, O_RDONLY | O_DIRECTORY).unwrap();
        for (level, ino) in inos.iter().enumerate() {
            let path = format!("./{}", "../".repeat(level));
            assert_eq!(statat(&directory, path, AtFlags::empty()).unwrap().st_ino, *ino, "level {level}");
        }
        assert!(statat(&directory, "file", AtFlags::empty()).is_ok());
        let path = fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&directory))).unwrap();
        assert_eq!(path, mount.path("a/b/c/d"), "the kernel knows the name of each directory");
        drop((root, directory));
        if round == 0 { mount.drop_caches() } else { mount.remount() }
    }
    let root = File::open(mount.root()).unwrap();
    fs::remove_file(mount.path("a/b/c/d/file")).unwrap();
    fs::remove_dir(mount.path("a/b/c/d")).unwrap();
    mount.drop_caches();
    assert_eq!(code(handle.open(&root, O_RDONLY | O_DIRECTORY)), ESTALE);
    assert!(statat(CWD, mount.path("a/b/c"), AtFlags::empty()).is_ok());
}
