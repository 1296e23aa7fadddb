//! rename(2) with its flags, and what is built on it.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, chown};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nix::libc::{EEXIST, EINVAL, ENOENT, ENOTEMPTY};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rustix::fs::{Mode, OFlags, RenameFlags, XattrFlags, renameat_with};
use rustix::io::Errno;

use crate::support::{Mount, StopGuard, code, create};

/// rename(2) is atomic: opening the new name finds the old file or the new one, never none. Each
/// other operation on names is atomic as well: it happens as a whole or, when it returns an error,
/// not at all.
#[test]
fn a_replaced_name_is_never_absent() {
    let mut mount = Mount::new();
    fs::write(mount.path("name"), "0".repeat(5000)).unwrap();
    let (stop, seen) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let stopped = StopGuard(&stop);
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let content = fs::read(mount.path("name")).unwrap();
                assert!(content.len() == 5000 && content.iter().all(|byte| *byte == content[0]));
                seen.fetch_add(1, Ordering::SeqCst);
            }
        });
        for round in 1.. {
            fs::write(mount.path("new"), (round % 10).to_string().repeat(5000)).unwrap();
            fs::rename(mount.path("new"), mount.path("name")).unwrap();
            // On a busy machine the reader begins late.
            if round >= 400 && (seen.load(Ordering::SeqCst) > 0 || reader.is_finished()) {
                break;
            }
        }
        drop(stopped);
        reader.join().unwrap();
    });
    // Between finding the name and opening what it means the file lives on, however many renames come between.
    let found = rustix::fs::open(mount.path("name"), OFlags::PATH, Mode::empty()).unwrap();
    let before = fs::read(mount.path("name")).unwrap();
    fs::write(mount.path("new"), "another").unwrap();
    fs::rename(mount.path("new"), mount.path("name")).unwrap();
    assert!(fs::read(format!("/proc/self/fd/{}", found.as_raw_fd())).unwrap() == before);
    drop(found);
    assert_eq!(fs::read_to_string(mount.path("name")).unwrap(), "another");
    fs::create_dir_all(mount.path("full/below")).unwrap();
    fs::create_dir(mount.path("empty")).unwrap();
    assert_eq!(code(fs::rename(mount.path("empty"), mount.path("full"))), ENOTEMPTY);
    assert!(mount.path("empty").is_dir() && mount.path("full/below").is_dir());
    mount.check();
}

/// renameat2(2) knows RENAME_NOREPLACE (EEXIST when the new name is taken), RENAME_EXCHANGE (both must exist) and
/// RENAME_WHITEOUT, which leaves a character device 0:0 of the caller in place of the old name and combines with
/// RENAME_NOREPLACE. Each is atomic.
#[test]
fn flags_of_rename() {
    let mut mount = Mount::new();
    let root = File::open(mount.root()).unwrap();
    let rename = |old: &str, new: &str, flags| code(renameat_with(&root, old, &root, new, flags));
    fs::write(mount.path("a"), "a").unwrap();
    fs::write(mount.path("b"), "b").unwrap();
    fs::create_dir(mount.path("directory")).unwrap();
    assert_eq!(rename("a", "b", RenameFlags::NOREPLACE), EEXIST);
    assert_eq!(rename("a", "c", RenameFlags::NOREPLACE), 0);
    assert_eq!(rename("c", "b", RenameFlags::EXCHANGE), 0);
    assert_eq!(fs::read_to_string(mount.path("b")).unwrap(), "a");
    assert_eq!(rename("c", "missing", RenameFlags::EXCHANGE), ENOENT);
    assert_eq!(rename("c", "directory", RenameFlags::EXCHANGE), 0);
    assert!(mount.path("c").is_dir() && mount.path("directory").is_file());
    assert_eq!(rename("b", "moved", RenameFlags::WHITEOUT), 0);
    let left = fs::symlink_metadata(mount.path("b")).unwrap();
    assert!(left.file_type().is_char_device() && left.rdev() == 0);
    assert_eq!(fs::read_to_string(mount.path("moved")).unwrap(), "a");
    // Of the caller, whose directory it is not.
    fs::rename(mount.path("c"), mount.path("theirs")).unwrap();
    chown(mount.path("theirs"), Some(7), Some(7)).unwrap();
    fs::write(mount.path("theirs/file"), "b").unwrap();
    let both = RenameFlags::WHITEOUT | RenameFlags::NOREPLACE;
    assert_eq!(rename("theirs/file", "moved", both), EEXIST);
    assert_eq!(rename("theirs/file", "theirs/other", both), 0);
    drop(root);
    mount.remount();
    let left = fs::symlink_metadata(mount.path("theirs/file")).unwrap();
    assert!(left.file_type().is_char_device() && left.rdev() == 0);
    assert_eq!((left.uid(), left.gid(), left.mode() & 0o7777), (0, 0, 0));
    assert_eq!(fs::read_to_string(mount.path("theirs/other")).unwrap(), "b");
    mount.check();
}

/// A directory cannot be moved below itself, nor exchanged with one above or below it: EINVAL.
#[test]
fn no_directory_gets_below_itself() {
    let mut mount = Mount::new();
    fs::create_dir_all(mount.path("a/b/c/d")).unwrap();
    let root = File::open(mount.root()).unwrap();
    for (old, new) in [("a", "a/x"), ("a", "a/b/c/d/x"), ("a/b", "a/b/c/x")] {
        assert_eq!(code(fs::rename(mount.path(old), mount.path(new))), EINVAL, "{old} to {new}");
    }
    for (old, new) in [("a", "a/b"), ("a/b/c/d", "a"), ("a/b", "a/b/c/d")] {
        let exchanged = renameat_with(&root, old, &root, new, RenameFlags::EXCHANGE);
        assert_eq!(exchanged, Err(Errno::INVAL), "{old} and {new}");
    }
    assert!(mount.path("a/b/c/d").is_dir());
    drop(root);
    mount.check();
}

/// A mount can be the upper layer of an overlay file system: whiteouts, `trusted.overlay` attributes and types in listings
/// are there.
#[test]
fn an_overlay_can_lie_on_it() {
    let mut mount = Mount::new();
    let (lower, merged) = (mount.outside("lower"), mount.outside("merged"));
    for directory in [&lower, &merged, &mount.path("upper"), &mount.path("work")] {
        fs::create_dir(directory).unwrap();
    }
    fs::create_dir(lower.join("directory")).unwrap();
    for name in ["kept", "removed", "changed", "renamed", "directory/below"] {
        fs::write(lower.join(name), name).unwrap();
    }
    let overlay = Overlay::new(&lower, &mount, &merged);
    fs::remove_file(merged.join("removed")).unwrap();
    fs::write(merged.join("changed"), "now").unwrap();
    fs::rename(merged.join("renamed"), merged.join("again")).unwrap();
    fs::remove_dir_all(merged.join("directory")).unwrap();
    fs::create_dir(merged.join("directory")).unwrap();
    fs::write(merged.join("directory/new"), "new").unwrap();
    let look = || {
        let mut names: Vec<_> = fs::read_dir(&merged).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["again", "changed", "directory", "kept"]);
        assert_eq!(fs::read_to_string(merged.join("changed")).unwrap(), "now");
        assert_eq!(fs::read_to_string(merged.join("again")).unwrap(), "renamed");
        let below: Vec<_> = fs::read_dir(merged.join("directory")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(below, ["new"]);
    };
    look();
    drop(overlay);
    let whiteout = fs::symlink_metadata(mount.path("upper/removed")).unwrap();
    assert!(whiteout.file_type().is_char_device() && whiteout.rdev() == 0);
    assert_eq!(fs::read_to_string(lower.join("changed")).unwrap(), "changed");
    mount.remount();
    let overlay = Overlay::new(&lower, &mount, &merged);
    look();
    drop(overlay);
    rustix::fs::setxattr(mount.path("upper"), "trusted.overlay.test", b"x", XattrFlags::CREATE).unwrap();
    mount.check();
}

/// Taken away when dropped, before the mount below it.
struct Overlay<'a>(&'a Path);

impl Overlay<'_> {
    fn new<'a>(lower: &Path, upper: &Mount, merged: &'a Path) -> Overlay<'a> {
        let data = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.display(),
            upper.path("upper").display(),
            upper.path("work").display()
        );
        mount(Some("overlay"), merged, Some("overlay"), MsFlags::empty(), Some(data.as_str())).unwrap();
        Overlay(merged)
    }
}

impl Drop for Overlay<'_> {
    fn drop(&mut self) {
        let _ = umount2(self.0, MntFlags::empty());
    }
}

/// inotify(7) reports everything that happens, since all changes go through the one mount; it does not report writes of
/// a lower layer of the kernel, such as the writeback of a memory map.
#[test]
fn inotify_sees_the_changes_of_the_mount() {
    use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
    let mount = Mount::new();
    let watch = inotify::init(CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, mount.root(), WatchFlags::ALL_EVENTS).unwrap();
    drop(create(mount.path("file")));
    fs::write(mount.path("file"), "x").unwrap();
    fs::rename(mount.path("file"), mount.path("other")).unwrap();
    fs::remove_file(mount.path("other")).unwrap();
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = Reader::new(&watch, &mut buffer);
    let mut seen = Vec::new();
    while let Ok(event) = reader.next() {
        seen.push((event.events(), event.file_name().map(|name| name.to_str().unwrap().to_owned())));
    }
    for (wanted, name) in [
        (ReadFlags::CREATE, "file"),
        (ReadFlags::MODIFY, "file"),
        (ReadFlags::CLOSE_WRITE, "file"),
        (ReadFlags::MOVED_FROM, "file"),
        (ReadFlags::MOVED_TO, "other"),
        (ReadFlags::DELETE, "other"),
    ] {
        assert!(seen.iter().any(|(events, file)| events.contains(wanted) && file.as_deref() == Some(name)), "{seen:?}");
    }
}
