//! Parses fstab(5): options that are meant for mount(8), systemd and desktops, and the names of
//! archives.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use lockbox_host::mounts::unescape;

/// The system's table.
pub const TABLE: &str = "/etc/fstab";

/// Options that mount(8) passes on although they are meant for it, and those that state this file
/// system's default or that FUSE cannot do. They occur in fstab files, and ignoring them makes no
/// mount less strict than requested.
const WORDS: [&str; 32] = [
    "_netdev",
    "async",
    "atime",
    "auto",
    "default_permissions",
    "defaults",
    "diratime",
    "group",
    "iversion",
    "lazytime",
    "loud",
    "mand",
    "noauto",
    "nodiratime",
    "nogroup",
    "noiversion",
    "nolazytime",
    "nomand",
    "noowner",
    "norelatime",
    "nostrictatime",
    "nouser",
    "nousers",
    "owner",
    "relatime",
    "silent",
    "strictatime",
    "user",
    "users",
    "acl",
    "user_xattr",
    "nonempty",
];

/// Options with a value of the same kind. `helper`, `uhelper` and `user` occur in libmount's table
/// of mounts.
const SETTINGS: [&str; 5] = ["comment", "helper", "uhelper", "user", "fstype"];

/// Returns whether the option is meant for another program and can be ignored.
pub fn is_for_others(option: &str) -> bool {
    if option.starts_with("x-") || option.starts_with("X-") {
        return true;
    }
    match option.split_once('=') {
        Some((name, _)) => SETTINGS.contains(&name),
        None => WORDS.contains(&option) || option == "comment",
    }
}

/// Returns the names in the table of the archive that is the file `archive` and is mounted on
/// `point`. mount(8) resolves symbolic links before it calls this program, so only the table has
/// the name that the user knows.
pub fn names_of(table: &[u8], archive: &Path, point: &Path) -> Vec<PathBuf> {
    let path = |field: &[u8]| PathBuf::from(OsString::from_vec(unescape(field)));
    let same = |a: &Path, b: &Path| a == b || a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b));
    let lines = table.split(|&byte| byte == b'\n');
    let named = lines.filter_map(|line| {
        let mut fields = line.split(|byte| b" \t".contains(byte)).filter(|field| !field.is_empty());
        let (name, on) = (fields.next()?, fields.next()?);
        (name.first() != Some(&b'#') && same(&path(on), point)).then(|| path(name))
    });
    named.filter(|name| same(name, archive)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_found_by_the_name_that_fstab_has_for_it() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().canonicalize().unwrap().join(name);
        std::fs::create_dir(at("mnt")).unwrap();
        std::fs::create_dir(at("other")).unwrap();
        std::fs::write(at("evil"), "").unwrap();
        std::os::unix::fs::symlink("evil", at("a b.lbx")).unwrap();
        let escaped = at("a\\040b.lbx");
        let line =
            |name: &Path, point: &str| format!("{}\t{}  lockbox noauto 0 0\n", name.display(), at(point).display());
        let comment = format!("# {}", line(&escaped, "mnt"));
        let table = [comment, line(&escaped, "mnt"), line(&at("evil"), "other"), line(&at("missing"), "mnt")].concat();
        assert_eq!(names_of(table.as_bytes(), &at("evil"), &at("mnt")), [at("a b.lbx")]);
        assert!(names_of(table.as_bytes(), &at("mnt"), &at("mnt")).is_empty(), "another archive on the mount point");
    }

    #[test]
    fn options_of_other_programs_differ_from_ours() {
        for option in ["users", "x-systemd.automount", "x-systemd.idle-timeout=1min", "comment=a b", "uhelper=lockbox"]
        {
            assert!(is_for_others(option), "{option}");
        }
        for option in ["users=1", "passfile", "nosymfollow", "context=x", "fsname=x", "xino", ""] {
            assert!(!is_for_others(option), "{option}");
        }
    }
}
