//! Who gives files their times.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, XattrFlags, setxattr, utimensat};

use crate::support::{Mount, create};

/// mtime and ctime.
type Times = ((i64, i64), (i64, i64));

fn times(path: &Path) -> Times {
    let m = fs::symlink_metadata(path).unwrap();
    ((m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec()))
}

/// Times are in the order of the changes: what is changed later, file or directory, has the same time or a later one,
/// whether it was made, written, linked or given attributes. So make(1) sees what is up to date.
#[test]
fn times_are_in_the_order_of_the_changes() {
    let mount = Mount::new();
    fs::create_dir(mount.path("directory")).unwrap();
    create(mount.path("file"));
    create(mount.path("linked"));
    let file = |name: &str| mount.path(name);
    // What stamps, and where its time is seen: of the modification or of the change.
    let stamps: [(&str, &dyn Fn(), &dyn Fn() -> (i64, i64)); 8] = [
        ("create", &|| drop(File::create(file("made")).unwrap()), &|| times(&file("made")).0),
        ("write", &|| fs::write(file("file"), "x").unwrap(), &|| times(&file("file")).0),
        (
            "mkdir",
            &|| {
                let _ = fs::remove_dir(file("directory/new"));
                fs::create_dir(file("directory/new")).unwrap();
            },
            &|| times(&file("directory")).0,
        ),
        (
            "link",
            &|| {
                let _ = fs::remove_file(file("link"));
                fs::hard_link(file("linked"), file("link")).unwrap();
            },
            &|| times(&file("linked")).1,
        ),
        (
            "utimensat of a directory",
            &|| {
                let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
                let both = Timestamps { last_access: now, last_modification: now };
                utimensat(CWD, file("directory"), &both, AtFlags::empty()).unwrap();
            },
            &|| times(&file("directory")).0,
        ),
        (
            "attributes of a directory",
            &|| setxattr(file("directory"), "user.a", b"x", XattrFlags::empty()).unwrap(),
            &|| times(&file("directory")).1,
        ),
        ("chmod", &|| fs::set_permissions(file("linked"), fs::Permissions::from_mode(0o600)).unwrap(), &|| {
            times(&file("linked")).1
        }),
        (
            "symlink",
            &|| {
                let _ = fs::remove_file(file("symlink"));
                symlink("target", file("symlink")).unwrap();
            },
            &|| times(&file("symlink")).0,
        ),
    ];
    for round in 0..10 {
        for (first, before, seen) in &stamps {
            for (second, after, seen_after) in &stamps {
                let _ = fs::remove_file(file("made"));
                before();
                let earlier = seen();
                after();
                let later = seen_after();
                assert!(earlier <= later, "round {round}: {first} at {earlier:?}, and then {second} at {later:?}");
            }
        }
    }
}
