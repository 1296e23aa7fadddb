//! Knows the options of fstab(5) that are for mount(8), systemd and desktops, and have no effect on an archive.

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

#[cfg(test)]
mod tests {
    use super::*;

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
