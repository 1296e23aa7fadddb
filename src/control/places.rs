//! Where the daemons of this user, or for root those of everybody, keep their sockets.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A runtime directory and the user whose daemons it may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub runtime: PathBuf,
    pub owner: u32,
}

/// The places where a user's daemons may be, that of the user's own mounts first: a daemon that was started without the
/// variable `XDG_RUNTIME_DIR` (at boot, by cron) is found by a shell that has it, and the other way round. Root gets those
/// of all users too; a user who sets the variable to an unusual directory is found by nobody else.
pub fn places(xdg_runtime_dir: Option<&OsStr>, user: u32) -> Vec<Place> {
    places_below(Path::new("/"), xdg_runtime_dir, user)
}

fn places_below(root: &Path, xdg_runtime_dir: Option<&OsStr>, user: u32) -> Vec<Place> {
    let mut found: Vec<Place> = Vec::new();
    let mut add = |runtime: PathBuf, owner: u32| {
        // By what they are, not by name: /run may be named /var/run.
        let same = |other: &Place| fs::metadata(&other.runtime).ok().zip(fs::metadata(&runtime).ok());
        let known = found.iter().filter_map(same).any(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()));
        if !known && runtime.is_dir() {
            found.push(Place { runtime, owner });
        }
    };
    if let Some(given) = xdg_runtime_dir.map(PathBuf::from).filter(|given| given.is_absolute()) {
        add(given, user);
    }
    if user != 0 {
        add(root.join(format!("run/user/{user}")), user);
        add(root.join(format!("tmp/lockbox-{user}")), user);
        return found;
    }
    add(root.join("run"), 0);
    for (directory, prefix) in [("run/user", ""), ("tmp", "lockbox-")] {
        let mut users: Vec<u32> = names(&root.join(directory)).filter_map(|name| numbered(&name, prefix)).collect();
        users.sort_unstable();
        for user in users {
            add(root.join(directory).join(format!("{prefix}{user}")), user);
        }
    }
    found
}

fn names(directory: &Path) -> impl Iterator<Item = OsString> {
    directory.read_dir().into_iter().flatten().flatten().map(|entry| entry.file_name())
}

fn numbered(name: &OsStr, prefix: &str) -> Option<u32> {
    name.to_str()?.strip_prefix(prefix)?.parse().ok()
}

impl Place {
    /// Whether the directory of sockets there belongs to its user: in a shared parent anybody may have made it.
    pub(super) fn is_genuine(&self, sockets: &Path) -> bool {
        fs::symlink_metadata(sockets).is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == self.owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_few_places_and_root_has_everybodys() {
        let root = tempfile::tempdir().unwrap();
        for directory in ["run/user/1000", "run/user/7", "run/user/x", "tmp/lockbox-1000", "tmp/lockbox-mount.Ab3"] {
            fs::create_dir_all(root.path().join(directory)).unwrap();
        }
        let given = root.path().join("run/user/1000");
        let shown = |user, given: Option<&Path>| -> Vec<(String, u32)> {
            let places = places_below(root.path(), given.map(Path::as_os_str), user);
            let relative = |place: &Place| place.runtime.strip_prefix(root.path()).unwrap().display().to_string();
            places.iter().map(|place| (relative(place), place.owner)).collect()
        };
        let own = [("run/user/1000".to_owned(), 1000), ("tmp/lockbox-1000".to_owned(), 1000)];
        assert_eq!(shown(1000, None), own);
        assert_eq!(shown(1000, Some(&given)), own);
        let all = [("run".into(), 0), ("run/user/7".into(), 7), own[0].clone(), own[1].clone()];
        assert_eq!(shown(0, None), all);
        assert_eq!(shown(0, Some(Path::new("relative"))), all);
    }
}
