//! Reads fstab(5): the options that are for mount(8), systemd and desktops and have no effect on an
//! archive, and the archives by the names that stand there.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use lockbox_host::mounts::unescape;

/// The table of this machine.
pub const TABLE: &str = "/etc/fstab";

/// Words that mount(8) passes on although they are for itself, and those that say what this file system does anyway or
/// what FUSE cannot do: they are in people's fstab, and none of them makes a mount less strict than was asked for.
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

/// Settings of the same kind. `helper`, `uhelper` and `user` stand in libmount's table of mounts.
const SETTINGS: [&str; 5] = ["comment", "helper", "uhelper", "user", "fstype"];

/// Whether the option is none of ours and may be passed over.
pub fn is_for_others(option: &str) -> bool {
    if option.starts_with("x-") || option.starts_with("X-") {
        return true;
    }
    match option.split_once('=') {
        Some((name, _)) => SETTINGS.contains(&name),
        None => WORDS.contains(&option) || option == "comment",
    }
}

/// Returns the archives of a table that are the file `archive` and belong on `point`, as the table
/// names them. mount(8) resolves symbolic links before it calls this program, so the name that its
/// user knows stands there alone.
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
    fn words_and_settings_of_others_are_told_from_ours() {
        for option in ["users", "x-systemd.automount", "x-systemd.idle-timeout=1min", "comment=a b", "uhelper=lockbox"]
        {
            assert!(is_for_others(option), "{option}");
        }
        for option in ["users=1", "passfile", "nosymfollow", "context=x", "fsname=x", "xino", ""] {
            assert!(!is_for_others(option), "{option}");
        }
    }
}
