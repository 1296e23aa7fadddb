//! Reads every example and unit below `packaging/`: no user may lead a mount of root's to a directory that is not that user's own.
//!
//! Root resolves the path of a mount point. Where a parent of it belongs to a user, that user can put a link in its place, and root mounts what the user
//! chose over whatever the link leads to. So each parent is a directory that belongs to root wherever it exists, or the user mounts it, without
//! root's rights.

#![allow(clippy::unwrap_used)] // a failed step fails the test

use std::fs;
use std::path::{Path, PathBuf};

/// Directories that belong to root and in which no other user may make a name, on every machine that follows the Filesystem Hierarchy Standard; and
/// the one that automount(8) makes.
const OF_ROOT: [&str; 5] = ["/", "/mnt", "/run", "/media", "/auto/lockbox"];

/// Examples and units in which nothing is mounted.
const WITHOUT_MOUNT: [&str; 5] = [
    "auto.master.d-lockbox.autofs",
    "lockbox-share.service",
    "lockbox-backup@.service",
    "lockbox-backup@.timer",
    "lockbox-backup-failed@.service",
];

/// A mount that an example makes.
#[derive(Debug)]
struct Example {
    file: String,
    point: PathBuf,
    /// mount(8) or pam_mount(8) makes it with the rights of the user alone.
    by_user: bool,
}

fn files() -> Vec<PathBuf> {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging");
    let directories = [packaging.join("examples"), packaging.join("systemd"), packaging.join("lockbox-share")];
    let below =
        |directory: &PathBuf| fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let mut files: Vec<PathBuf> = directories.iter().flat_map(below).collect();
    files.extend(below(&packaging).into_iter().filter(|path| path.extension().is_some_and(|end| end == "service")));
    files.retain(|path| path.is_file());
    files
}

/// The lines that are not comments, with the fields of each.
fn fields(text: &str) -> impl Iterator<Item = Vec<&str>> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| line.split_whitespace().collect())
}

/// The value of an attribute of an element of XML, or of a setting of a unit.
fn values<'a>(text: &'a str, before: &str, after: char) -> Vec<&'a str> {
    text.match_indices(before).map(|(at, _)| text[at + before.len()..].split(after).next().unwrap()).collect()
}

/// None for a file of a kind that is not known.
fn mounts(name: &str, text: &str) -> Option<Vec<(String, bool)>> {
    let by_root = |point: &str| (point.to_owned(), false);
    if WITHOUT_MOUNT.contains(&name) || name.ends_with(".json") || name.ends_with(".yml") {
        let is_without =
            !text.contains("-t lockbox") && !text.contains("fstype=lockbox") && !text.contains("lockbox mount");
        return is_without.then(Vec::new);
    }
    Some(match name {
        "fstab" => fields(text)
            .map(|fields| (fields[1].to_owned(), fields[3].split(',').any(|word| ["user", "users"].contains(&word))))
            .collect(),
        "auto.lockbox" => fields(text).map(|fields| by_root(&format!("/auto/lockbox/{}", fields[0]))).collect(),
        "pam_mount.conf.xml" => text
            .split("<volume")
            .skip(1)
            .map(|volume| (values(volume, "mountpoint=\"", '"')[0].to_owned(), volume.contains("noroot=\"1\"")))
            .collect(),
        _ if name.ends_with(".mount") || name.ends_with(".automount") => {
            values(text, "\nWhere=", '\n').into_iter().map(by_root).collect()
        }
        _ if name.ends_with(".service") => values(text, "DIRECTORY=", '\n').into_iter().map(by_root).collect(),
        _ => return None,
    })
}

fn examples() -> Vec<Example> {
    let mut found = Vec::new();
    for path in files() {
        let file = path.file_name().unwrap().to_str().unwrap().to_owned();
        let text = fs::read_to_string(&path).unwrap();
        let mounts = mounts(&file, &text).unwrap_or_else(|| panic!("{file}: say here what it mounts"));
        let silent = WITHOUT_MOUNT.contains(&&file[..]) || file.ends_with(".json") || file.ends_with(".yml");
        assert!(silent || !mounts.is_empty(), "{file}: no mount was found in it");
        found.extend(mounts.into_iter().map(|(point, by_user)| Example {
            file: file.clone(),
            point: point.into(),
            by_user,
        }));
    }
    found
}

#[test]
fn no_parent_of_a_mount_point_of_an_example_belongs_to_a_user() {
    let examples = examples();
    assert!(examples.len() >= 8, "{examples:?}");
    for example in examples.iter().filter(|example| !example.by_user) {
        let Example { file, point, .. } = example;
        assert!(point.is_absolute() && point.components().all(|part| part.as_os_str() != ".."), "{file}: {point:?}");
        let parent = point.parent().unwrap();
        assert!(
            OF_ROOT.iter().any(|root| parent == Path::new(root)),
            "{file}: {point:?}: root mounts below {parent:?}, which may belong to a user"
        );
    }
}

/// Where /var is a file system of its own, systemd would mount the archive first, and the rollback state would be looked for in the directory below.
#[test]
fn a_mount_at_boot_waits_for_the_rollback_state() {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging");
    let read = |path: &str| fs::read_to_string(packaging.join(path)).unwrap();
    let (table, unit) = (read("examples/fstab"), read("systemd/mnt-secrets.mount"));
    // The unit names the line of fstab(5) that is equivalent to it.
    let equivalent = unit.lines().filter_map(|line| line.strip_prefix('#')).filter(|line| line.contains(" lockbox "));
    let lines = fields(&table).chain(equivalent.map(|line| line.split_whitespace().collect()));
    let options: Vec<Vec<&str>> = lines.map(|fields| fields[3].split(',').collect()).collect();
    let by_root: Vec<_> = options.iter().filter(|options| !options.contains(&"user")).collect();
    assert_eq!(by_root.len(), 3);
    for options in by_root {
        assert!(options.contains(&"x-systemd.requires-mounts-for=/var/lib/lockbox"), "{options:?}");
    }
    assert_eq!(values(&unit, "\nRequiresMountsFor=", '\n'), ["/var/lib/lockbox"]);
}

/// The file of a backup is replaced by a new one with the same owner and mode: chown(2) to another user needs CAP_CHOWN, and chmod(2) of a file of
/// another user CAP_FOWNER.
#[test]
fn the_backup_unit_may_replace_a_file_of_another_user() {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging");
    let unit = fs::read_to_string(packaging.join("systemd/lockbox-backup@.service")).unwrap();
    let kept: Vec<&str> =
        values(&unit, "\nCapabilityBoundingSet=", '\n').into_iter().flat_map(str::split_whitespace).collect();
    for needed in ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER"] {
        assert!(kept.contains(&needed), "{needed}: {kept:?}");
    }
}

#[test]
fn the_reader_finds_what_an_example_must_not_do() {
    let bad = mounts("pam_mount.conf.xml", "<volume user=\"*\" mountpoint=\"/home/%(USER)/secrets\" />").unwrap();
    assert_eq!(bad, [("/home/%(USER)/secrets".to_owned(), false)]);
    let lines = "/a.lbx /home/ann/box lockbox noauto 0 0\n/a.lbx /home/ann/box lockbox noauto,user 0 0\n";
    let by_user: Vec<bool> = mounts("fstab", lines).unwrap().into_iter().map(|(_, by_user)| by_user).collect();
    assert_eq!(by_user, [false, true]);
    assert!(mounts("new.example", "").is_none());
    assert!(mounts("alerts.yml", "mount -t lockbox").is_none());
}
