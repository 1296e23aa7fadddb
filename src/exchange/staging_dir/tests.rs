//! Staging directories: an unlocked one is removed, a locked one remains, and a directory put in
//! its place is not touched.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::*;
use crate::env::SystemEnvironment;

fn stage(target: &Path) -> StagingDir {
    StagingDir::new(target, &SystemEnvironment).unwrap()
}

fn entries(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Leaves a stage like a killed process: unlocked, with its content.
fn abandon(stage: StagingDir) -> PathBuf {
    let path = stage.path.clone();
    fs::write(path.join("plain"), "text").unwrap();
    fs::create_dir_all(path.join("closed/0/inside")).unwrap();
    symlink("/", path.join("closed/0/root")).unwrap();
    fs::set_permissions(path.join("closed/0"), fs::Permissions::from_mode(0o000)).unwrap();
    fs::set_permissions(path.join("closed"), fs::Permissions::from_mode(0o500)).unwrap();
    let copy = stage.directory.try_clone().unwrap();
    rustix::fs::flock(&copy, FlockOperation::Unlock).unwrap();
    std::mem::forget(stage);
    path
}

#[test]
fn what_a_killed_extraction_left_goes_with_the_next_one_and_what_is_in_use_stays() {
    let target = tempfile::tempdir().unwrap();
    let living = stage(target.path());
    let left = abandon(stage(target.path()));
    let file = target.path().join(format!("{PREFIX}0123456789abcdef"));
    fs::write(&file, "a file of this name").unwrap();
    fs::create_dir(target.path().join(format!("{PREFIX}other"))).unwrap();
    let next = stage(target.path());
    assert!(!left.exists());
    assert!(living.path.exists() && next.path.exists() && file.exists());
    drop((living, next));
    assert_eq!(entries(target.path()), [format!("{PREFIX}0123456789abcdef"), format!("{PREFIX}other")]);
}

/// A user with the right to rename in the target could give the name to a directory of ours that
/// they cannot empty.
#[test]
fn nothing_is_swept_where_others_can_rename() {
    let target = tempfile::tempdir().unwrap();
    let left = abandon(stage(target.path()));
    for (mode, swept) in [(0o777, false), (0o770, false), (0o1777, true)] {
        fs::set_permissions(target.path(), fs::Permissions::from_mode(mode)).unwrap();
        sweep(target.path());
        assert_eq!(left.exists(), !swept, "{mode:o}");
    }
    if nix::unistd::geteuid().is_root() {
        let left = abandon(stage(target.path()));
        fs::set_permissions(target.path(), fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(target.path(), Some(4321), None).unwrap();
        sweep(target.path());
        assert!(left.exists(), "the directory of somebody else");
    }
}

#[test]
fn a_tree_of_any_depth_and_with_any_names_is_removed() {
    let target = tempfile::tempdir().unwrap();
    let stage = stage(target.path());
    let mut at = stage.directory.try_clone().unwrap();
    for name in ["0", "1", "2"] {
        rustix::fs::mkdirat(&stage.directory, name, Mode::RWXU).unwrap();
    }
    for depth in 0..2000 {
        rustix::fs::mkdirat(&at, "deeper", Mode::RWXU).unwrap();
        at = rustix::fs::openat(&at, "deeper", DIRECTORY, Mode::empty()).unwrap();
        if depth % 100 == 0 {
            rustix::fs::mkdirat(&at, "1", Mode::RWXU).unwrap();
        }
    }
    drop(stage);
    assert_eq!(entries(target.path()), [""; 0]);
}

/// Another directory in place of the new one would be filled, given away and emptied.
#[test]
fn another_directory_in_place_of_the_new_one_is_not_taken() {
    let target = tempfile::tempdir().unwrap();
    let precious = target.path().join("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("file"), "precious").unwrap();
    for link in [false, true] {
        let mut made = Vec::new();
        let stage = StagingDir::make(target.path(), &SystemEnvironment, &mut |name| {
            made.push(name.to_owned());
            if made.len() == 1 {
                let path = target.path().join(name);
                fs::rename(&path, target.path().join("away")).unwrap();
                match link {
                    true => symlink("precious", &path).unwrap(),
                    false => fs::rename(&precious, &path).unwrap(),
                }
            }
        });
        let stage = stage.unwrap();
        assert_eq!(stage.name, made[1], "another name was tried");
        drop(stage);
        if !link {
            fs::rename(target.path().join(&made[0]), &precious).unwrap();
        }
        assert_eq!(fs::read(precious.join("file")).unwrap(), b"precious");
        fs::remove_dir(target.path().join("away")).unwrap();
    }
}

#[test]
fn the_stage_is_removed_and_nothing_that_has_its_name_by_now() {
    let target = tempfile::tempdir().unwrap();
    let precious = target.path().join("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("file"), "precious").unwrap();
    let stage = stage(target.path());
    fs::write(stage.path.join("plain"), "text").unwrap();
    let path = stage.path.clone();
    fs::rename(&path, target.path().join("away")).unwrap();
    fs::rename(&precious, &path).unwrap();
    drop(stage);
    assert_eq!(fs::read(path.join("file")).unwrap(), b"precious");
    assert_eq!(entries(&target.path().join("away")), [""; 0], "what was extracted is gone");
}

#[test]
fn what_was_made_is_known_again_and_nothing_else_in_its_place() {
    let target = tempfile::tempdir().unwrap();
    let root: OwnedFd = fs::File::open(target.path()).unwrap().into();
    let made = make_directory(&root, b"made").unwrap();
    let identity = identity_of(&made).unwrap();
    open_again(&root, b"made", identity).unwrap();
    fs::rename(target.path().join("made"), target.path().join("away")).unwrap();
    fs::create_dir(target.path().join("made")).unwrap();
    assert!(matches!(open_again(&root, b"made", identity), Err(Error::InUse(_))));

    fs::write(target.path().join("first"), "first").unwrap();
    let first = identity_of(fs::File::open(target.path().join("first")).unwrap()).unwrap();
    link_again(&root, b"first", first, &made, b"second").unwrap();
    assert_eq!(fs::read(target.path().join("away/second")).unwrap(), b"first");
    fs::write(target.path().join("other"), "private").unwrap();
    fs::remove_file(target.path().join("first")).unwrap();
    symlink("other", target.path().join("first")).unwrap();
    for _ in 0..2 {
        assert!(matches!(link_again(&root, b"first", first, &made, b"third"), Err(Error::InUse(_))));
        fs::rename(target.path().join("other"), target.path().join("first")).unwrap_or_default();
    }
    assert_eq!(entries(&target.path().join("away")), ["second"]);

    symlink("other", target.path().join("link")).unwrap();
    open_created(&root, b"link", FileType::Symlink).unwrap();
    assert!(matches!(open_created(&root, b"first", FileType::Fifo), Err(Error::InUse(_))), "a file in place of a FIFO");
    assert_eq!(fs::metadata(target.path().join("first")).unwrap().nlink(), 1);
}
