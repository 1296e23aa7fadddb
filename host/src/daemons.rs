//! Daemons of mounted archives: the places of their sockets, and the holder of an archive.

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::control::{self, OwnRuntimeDir, Request, Response, RuntimeDir, SocketName, Status};
use nix::unistd::{Uid, User, geteuid, mkdtemp};

use crate::located::{Located, in_time};
use crate::mounts::{self, Mounted};
use crate::{Failure, remote};

fn given() -> Option<OsString> {
    std::env::var_os("XDG_RUNTIME_DIR")
}

/// Returns the directory of the socket of this user's next mount.
pub fn directory() -> OwnRuntimeDir {
    control::own_runtime_dir_below(Path::new("/"), given().as_deref(), geteuid().as_raw())
}

/// Returns the same as a path, and creates it if it does not exist.
///
/// # Errors
/// When it cannot be created, or other users may enter it.
pub fn ready_directory<P>() -> Result<PathBuf, Failure<P>> {
    if let OwnRuntimeDir::Missing(path) = directory()
        && let Err(e) = DirBuilder::new().mode(0o700).create(&path)
        && e.kind() != ErrorKind::AlreadyExists
    {
        return Err(Failure::other(format!("cannot create {}: {e}", path.display())));
    }
    match directory() {
        OwnRuntimeDir::Ready(path) => Ok(path),
        OwnRuntimeDir::Missing(path) | OwnRuntimeDir::NotPrivate(path) => {
            let mut template = path.clone().into_os_string();
            template.push(control::SUFFIX);
            template.push("XXXXXX");
            mkdtemp(Path::new(&template)).map_err(|errno| {
                let path = path.display();
                Failure::other(format!(
                    "cannot create a directory next to {path}, which is not a private directory of this user: {}",
                    errno.desc()
                ))
            })
        }
    }
}

/// Returns the directories that may hold daemons of users whose daemons this user may ask.
pub fn all_places() -> Vec<RuntimeDir> {
    control::runtime_dirs_below(Path::new("/"), given().as_deref(), geteuid().as_raw())
}

/// Returns the directories that may hold daemons of this user; those of other users are not asked.
pub fn places() -> Vec<RuntimeDir> {
    places_of(geteuid().as_raw())
}

/// Returns the directories that may hold daemons of this owner; none if this process's user may not
/// ask them.
pub fn places_of(owner: u32) -> Vec<RuntimeDir> {
    let mut places = all_places();
    places.retain(|place| place.owner == owner);
    places
}

/// Answer of this user's daemons about one archive.
pub enum Holder {
    Serves(Box<Status>),
    Closes,
    Nobody,
}

/// Returns the number of this process's mount namespace; 0 if it is unknown.
pub fn mount_namespace() -> u64 {
    fs::metadata("/proc/self/ns/mnt").map_or(0, |namespace| namespace.ino())
}

/// Returns whether a mount that is not in this process's table may be in that of another namespace,
/// like those of `lockbox exec`.
pub fn is_out_of_sight(status: &Status) -> bool {
    let own = mount_namespace();
    ![0, own].contains(&status.mount_namespace) && own != 0
}

/// Returns the status with the mount point that the mount has by now, as far as it is in the table.
pub fn located(mut status: Status, table: &[Mounted]) -> Status {
    if let Some(mounted) = mount_of(&status, table) {
        status.set_mount_point(&mounted.point);
    }
    status
}

/// Returns the mount that the daemon serves, at its current place.
pub fn mount_of<'a>(status: &Status, table: &'a [Mounted]) -> Option<&'a Mounted> {
    mounts::of_daemon(table, status, mount_namespace())
}

/// Returns the name of the socket of a daemon that serves the archive at this path or address.
///
/// # Errors
/// When a path does not exist, or is a mount point, which is not asked; `TimedOut` when it lies in
/// an archive whose daemon does not answer.
pub fn socket_name(archive: &Path) -> io::Result<SocketName> {
    if remote::is_remote(archive) {
        return Ok(SocketName::of_address(archive.as_os_str()));
    }
    let located = Located::of(archive)?;
    let real = located.path();
    let found = match located.mount() {
        None => real.metadata(),
        Some(_) if located.mounted_here().is_some() => return Err(ErrorKind::IsADirectory.into()),
        Some(_) => in_time(move || real.metadata()).unwrap_or_else(|| Err(ErrorKind::TimedOut.into())),
    };
    found.map(|file| SocketName::of_file(&file))
}

/// Returns the holder of the archive at this path or address.
pub fn holder(archive: &Path) -> Holder {
    let Ok(name) = socket_name(archive) else { return Holder::Nobody };
    let asked = places().into_iter().find_map(|place| {
        match control::send_request(&control::socket_path(&place.runtime, &name), place.owner, &Request::Status) {
            Ok(Response::Status(status)) => Some(Holder::Serves(Box::new(located(*status, &mounts::all())))),
            Ok(Response::Failed { .. }) => Some(Holder::Closes),
            _ => None,
        }
    });
    asked.unwrap_or(Holder::Nobody)
}

/// Returns a user's name, or the number where it has none.
pub fn user_name(user: u32) -> String {
    User::from_uid(Uid::from_raw(user)).ok().flatten().map_or_else(|| user.to_string(), |user| user.name)
}
