//! Runtime directories with the sockets of running daemons, and the directory for the next daemon.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Separator between the usual name of the runtime directory, if another user has taken it, and a
/// random suffix.
pub const SUFFIX: &str = ".";

/// Runtime directory, and the owner of the daemons in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDir {
    pub runtime: PathBuf,
    pub owner: u32,
}

/// Runtime directory for a user's next daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnRuntimeDir {
    Ready(PathBuf),
    /// Must be created, with a mode that excludes other users.
    Missing(PathBuf),
    /// Owned by another user, or accessible to others: must not be used. A directory with this
    /// name, [`SUFFIX`] and a random part must be created.
    NotPrivate(PathBuf),
}

impl OwnRuntimeDir {
    pub fn ready(self) -> Option<PathBuf> {
        match self {
            OwnRuntimeDir::Ready(path) => Some(path),
            OwnRuntimeDir::Missing(_) | OwnRuntimeDir::NotPrivate(_) => None,
        }
    }
}

/// Returns the runtime directory for the next daemon of `user`; system paths are below `root`:
/// - `$XDG_RUNTIME_DIR` if it belongs to the user (su(1) and sudo(8) may keep that of another
///   user),
/// - else `/run` for root,
/// - else `/tmp/lockbox-UID` if it is private to the user,
/// - else a private directory `/tmp/lockbox-UID.SUFFIX`: another user may have created the name
///   without a suffix first.
///
/// Only this user and root can create a directory that this user owns, under any name.
pub fn own_runtime_dir_below(root: &Path, xdg_runtime_dir: Option<&OsStr>, user: u32) -> OwnRuntimeDir {
    let is_ours = |path: &PathBuf| path.metadata().is_ok_and(|found| found.is_dir() && found.uid() == user);
    if let Some(directory) =
        xdg_runtime_dir.map(PathBuf::from).filter(|directory| directory.is_absolute()).filter(is_ours)
    {
        return OwnRuntimeDir::Ready(directory);
    }
    if user == 0 {
        return OwnRuntimeDir::Ready(root.join("run"));
    }
    let path = root.join(fallback(user));
    // Any user may create this name in /tmp first: a foreign directory or a symbolic link is
    // refused.
    match fs::symlink_metadata(&path) {
        Ok(_) if is_private(&path, user) => OwnRuntimeDir::Ready(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => OwnRuntimeDir::Missing(path),
        _ => match suffixed(root, user).next() {
            Some(own) => OwnRuntimeDir::Ready(own),
            None => OwnRuntimeDir::NotPrivate(path),
        },
    }
}

/// Returns the private directories `/tmp/lockbox-UID.SUFFIX` of the user, sorted by name.
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

/// Returns the runtime directories that may contain a user's daemons, that of the user's next mount
/// first; system paths are below `root`. A shell with `XDG_RUNTIME_DIR` thus finds a daemon that
/// was started without it (at boot, by cron), and the other way round.
///
/// For root, the directories of all users are included. A user's unusual `XDG_RUNTIME_DIR` is not
/// found by other users.
pub fn runtime_dirs_below(root: &Path, xdg_runtime_dir: Option<&OsStr>, user: u32) -> Vec<RuntimeDir> {
    let mut found: Vec<RuntimeDir> = Vec::new();
    let mut add = |runtime: PathBuf| {
        // Compared by device and inode, not by name: /run may be named /var/run.
        let same = |other: &RuntimeDir| fs::metadata(&other.runtime).ok().zip(fs::metadata(&runtime).ok());
        let known = found.iter().filter_map(same).any(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()));
        if !known && runtime.is_dir() {
            found.push(RuntimeDir { runtime, owner: user });
        }
    };
    if let Some(directory) = xdg_runtime_dir.map(PathBuf::from).filter(|directory| directory.is_absolute()) {
        add(directory);
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
            // Directories of other users are not examined here: they may be mounts that never
            // answer.
            if owner == user { add(runtime) } else { others.push(RuntimeDir { runtime, owner }) }
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
    // Only in /tmp can another user have the name without a suffix.
    let number = if prefix.is_empty() { number } else { number.split(SUFFIX).next()? };
    number.parse().ok()
}

impl RuntimeDir {
    /// Returns whether the directory of sockets belongs to its user: in a shared parent, any user
    /// may have created it.
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
        let chosen =
            |directory: Option<&Path>| own_runtime_dir_below(root.path(), directory.map(Path::as_os_str), user);
        let own = root.path().join(fallback(user));
        assert_eq!(chosen(None), OwnRuntimeDir::Missing(own.clone()));
        assert_eq!(chosen(Some(Path::new("relative"))), OwnRuntimeDir::Missing(own.clone()));
        fs::create_dir_all(&own).unwrap();
        std::os::unix::fs::chown(&own, Some(user), None).unwrap();
        for (mode, private) in [(0o750, false), (0o700, true)] {
            set_mode(&own, mode);
            assert_eq!(chosen(None).ready().is_some(), private, "{mode:o}");
        }
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(directory.path(), Some(user), None).unwrap();
        assert_eq!(chosen(Some(directory.path())), OwnRuntimeDir::Ready(directory.path().to_path_buf()));
        let elsewhere = root.path().join("elsewhere");
        fs::rename(&own, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &own).unwrap();
        assert_eq!(chosen(None), OwnRuntimeDir::NotPrivate(own.clone()), "a link, which anybody may have made");
        // Another one of this user's then; not one that another user made, nor a link.
        let beside = |suffix: &str| root.path().join(format!("{}{SUFFIX}{suffix}", fallback(user)));
        std::os::unix::fs::symlink(&elsewhere, beside("a")).unwrap();
        fs::create_dir(beside("b")).unwrap();
        set_mode(&beside("b"), 0o755);
        assert_eq!(chosen(None), OwnRuntimeDir::NotPrivate(own));
        fs::create_dir(beside("c")).unwrap();
        std::os::unix::fs::chown(beside("c"), Some(user), None).unwrap();
        set_mode(&beside("c"), 0o700);
        assert_eq!(chosen(None), OwnRuntimeDir::Ready(beside("c")));
        assert!(runtime_dirs_below(root.path(), None, user).iter().any(|place| place.runtime == beside("c")));
        assert_eq!(own_runtime_dir_below(root.path(), None, 0), OwnRuntimeDir::Ready(root.path().join("run")));
        if me == 0 {
            let others = Some(directory.path().as_os_str());
            assert_eq!(own_runtime_dir_below(root.path(), others, 0), OwnRuntimeDir::Ready(root.path().join("run")));
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
        let directory = root.path().join("run/user/1000");
        let shown = |user, directory: Option<&Path>| -> Vec<(String, u32)> {
            let places = runtime_dirs_below(root.path(), directory.map(Path::as_os_str), user);
            let relative = |place: &RuntimeDir| place.runtime.strip_prefix(root.path()).unwrap().display().to_string();
            places.iter().map(|place| (relative(place), place.owner)).collect()
        };
        let own = [("run/user/1000".to_owned(), 1000), ("tmp/lockbox-1000".to_owned(), 1000)];
        assert_eq!(shown(1000, None), own);
        assert_eq!(shown(1000, Some(&directory)), own);
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
