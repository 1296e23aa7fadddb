//! Where the daemons of this user, or for root those of everybody, keep their sockets, and where the next one puts its own.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Separates the usual name, when another user took it, from the random part of the user's own
/// directory.
pub const SUFFIX: &str = ".";

/// A runtime directory and the user whose daemons it may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub runtime: PathBuf,
    pub owner: u32,
}

/// Where the socket of a user's next daemon goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Runtime {
    Ready(PathBuf),
    /// To be made, with a mode that keeps others out.
    Missing(PathBuf),
    /// Owned by another user, or open to others: not to be used. One of the same name with
    /// [`SUFFIX`] and more is to be made.
    NotPrivate(PathBuf),
}

impl Runtime {
    pub fn ready(self) -> Option<PathBuf> {
        match self {
            Runtime::Ready(path) => Some(path),
            Runtime::Missing(_) | Runtime::NotPrivate(_) => None,
        }
    }
}

/// `$XDG_RUNTIME_DIR` when it is the user's (su(1) and sudo(8) may keep that of another), else
/// `/run` for root, else `/tmp/lockbox-UID` when it is the user's alone, else a directory
/// `/tmp/lockbox-UID.SUFFIX` that is: another user may have made the name without a suffix first.
/// Only this user and root can make a directory that this user owns, under any name.
pub fn runtime(xdg_runtime_dir: Option<&OsStr>, user: u32) -> Runtime {
    runtime_below(Path::new("/"), xdg_runtime_dir, user)
}

fn runtime_below(root: &Path, xdg_runtime_dir: Option<&OsStr>, user: u32) -> Runtime {
    let is_ours = |path: &PathBuf| path.metadata().is_ok_and(|found| found.is_dir() && found.uid() == user);
    if let Some(given) = xdg_runtime_dir.map(PathBuf::from).filter(|given| given.is_absolute()).filter(is_ours) {
        return Runtime::Ready(given);
    }
    if user == 0 {
        return Runtime::Ready(root.join("run"));
    }
    let path = root.join(fallback(user));
    // Anybody may make a name in /tmp first: a directory of somebody else, or a link to one, is not taken.
    match fs::symlink_metadata(&path) {
        Ok(_) if is_private(&path, user) => Runtime::Ready(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Runtime::Missing(path),
        _ => match suffixed(root, user).next() {
            Some(own) => Runtime::Ready(own),
            None => Runtime::NotPrivate(path),
        },
    }
}

/// Directories `/tmp/lockbox-UID.SUFFIX` that belong to the user alone, by name.
fn suffixed(root: &Path, user: u32) -> impl Iterator<Item = PathBuf> {
    let parent = root.join("tmp");
    let prefix = format!("lockbox-{user}{SUFFIX}");
    let mut own: Vec<PathBuf> = names(&parent)
        .filter(|name| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
        .map(|name| parent.join(name))
        .filter(|path| is_private(path, user))
        .collect();
    own.sort_unstable();
    own.into_iter()
}

fn is_private(path: &Path, user: u32) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0)
}

fn fallback(user: u32) -> String {
    format!("tmp/lockbox-{user}")
}

/// The places where a user's daemons may be, that of the user's own mounts first: a daemon that was started without the
/// variable `XDG_RUNTIME_DIR` (at boot, by cron) is found by a shell that has it, and the other way round. Root gets those
/// of all users too; a user who sets the variable to an unusual directory is found by nobody else.
pub fn places(xdg_runtime_dir: Option<&OsStr>, user: u32) -> Vec<Place> {
    places_below(Path::new("/"), xdg_runtime_dir, user)
}

fn places_below(root: &Path, xdg_runtime_dir: Option<&OsStr>, user: u32) -> Vec<Place> {
    let mut found: Vec<Place> = Vec::new();
    let mut add = |runtime: PathBuf| {
        // By what they are, not by name: /run may be named /var/run.
        let same = |other: &Place| fs::metadata(&other.runtime).ok().zip(fs::metadata(&runtime).ok());
        let known = found.iter().filter_map(same).any(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()));
        if !known && runtime.is_dir() {
            found.push(Place { runtime, owner: user });
        }
    };
    if let Some(given) = xdg_runtime_dir.map(PathBuf::from).filter(|given| given.is_absolute()) {
        add(given);
    }
    if user != 0 {
        add(root.join(format!("run/user/{user}")));
        add(root.join(fallback(user)));
        suffixed(root, user).for_each(add);
        return found;
    }
    add(root.join("run"));
    let mut others = Vec::new();
    for (directory, prefix) in [("run/user", ""), ("tmp", "lockbox-")] {
        let numbered = |name: OsString| Some((numbered(&name, prefix)?, name));
        let mut users: Vec<(u32, OsString)> = names(&root.join(directory)).filter_map(numbered).collect();
        users.sort_unstable();
        for (owner, name) in users {
            let runtime = root.join(directory).join(name);
            // What belongs to others is not looked at here: it may be a mount that never answers.
            if owner == user { add(runtime) } else { others.push(Place { runtime, owner }) }
        }
    }
    found.extend(others);
    found
}

fn names(directory: &Path) -> impl Iterator<Item = OsString> {
    directory.read_dir().into_iter().flatten().flatten().map(|entry| entry.file_name())
}

fn numbered(name: &OsStr, prefix: &str) -> Option<u32> {
    let number = name.to_str()?.strip_prefix(prefix)?;
    // Only in /tmp another user can have the name without a suffix.
    let number = if prefix.is_empty() { number } else { number.split(SUFFIX).next()? };
    number.parse().ok()
}

impl Place {
    /// Whether the directory of sockets there belongs to its user: in a shared parent anybody may have made it.
    pub(super) fn is_genuine(&self, sockets: &Path) -> bool {
        fs::symlink_metadata(sockets).is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == self.owner)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_next_daemon_has_a_directory_that_is_its_users_alone() {
        let root = tempfile::tempdir().unwrap();
        let me = root.path().metadata().unwrap().uid();
        let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        // Whoever runs this may be root, who has /run whatever lies elsewhere.
        let user = if me == 0 { 1 } else { me };
        let chosen = |given: Option<&Path>| runtime_below(root.path(), given.map(Path::as_os_str), user);
        let own = root.path().join(fallback(user));
        assert_eq!(chosen(None), Runtime::Missing(own.clone()));
        assert_eq!(chosen(Some(Path::new("relative"))), Runtime::Missing(own.clone()));
        fs::create_dir_all(&own).unwrap();
        std::os::unix::fs::chown(&own, Some(user), None).unwrap();
        for (mode, private) in [(0o750, false), (0o700, true)] {
            set_mode(&own, mode);
            assert_eq!(chosen(None).ready().is_some(), private, "{mode:o}");
        }
        let given = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(given.path(), Some(user), None).unwrap();
        assert_eq!(chosen(Some(given.path())), Runtime::Ready(given.path().to_path_buf()));
        let elsewhere = root.path().join("elsewhere");
        fs::rename(&own, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &own).unwrap();
        assert_eq!(chosen(None), Runtime::NotPrivate(own.clone()), "a link, which anybody may have made");
        // Another one of this user's then; not one that another user made, nor a link.
        let beside = |suffix: &str| root.path().join(format!("{}{SUFFIX}{suffix}", fallback(user)));
        std::os::unix::fs::symlink(&elsewhere, beside("a")).unwrap();
        fs::create_dir(beside("b")).unwrap();
        set_mode(&beside("b"), 0o755);
        assert_eq!(chosen(None), Runtime::NotPrivate(own));
        fs::create_dir(beside("c")).unwrap();
        std::os::unix::fs::chown(beside("c"), Some(user), None).unwrap();
        set_mode(&beside("c"), 0o700);
        assert_eq!(chosen(None), Runtime::Ready(beside("c")));
        assert!(places_below(root.path(), None, user).iter().any(|place| place.runtime == beside("c")));
        assert_eq!(runtime_below(root.path(), None, 0), Runtime::Ready(root.path().join("run")));
        if me == 0 {
            let others = Some(given.path().as_os_str());
            assert_eq!(runtime_below(root.path(), others, 0), Runtime::Ready(root.path().join("run")));
        }
    }

    #[test]
    fn a_user_has_few_places_and_root_has_everybodys() {
        let root = tempfile::tempdir().unwrap();
        for directory in [
            "run/user/1000",
            "run/user/7",
            "run/user/x",
            "tmp/lockbox-1000",
            "tmp/lockbox-8.Ab3",
            "tmp/lockbox-mount.Ab3",
        ] {
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
        let all = [
            ("run".into(), 0),
            ("run/user/7".into(), 7),
            own[0].clone(),
            ("tmp/lockbox-8.Ab3".into(), 8),
            own[1].clone(),
        ];
        assert_eq!(shown(0, None), all);
        assert_eq!(shown(0, Some(Path::new("relative"))), all);
    }
}
