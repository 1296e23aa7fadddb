//! The daemons of mounted archives: where their sockets are, who holds an archive, and which one a user means.
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread::{self, ScopedJoinHandle};

use lockbox::control::{self, Status};
pub(crate) use lockbox_host::located::canonical;
use lockbox_host::located::{Located, real_path};
use lockbox_host::mounts::{self, Mounted};
use lockbox_host::{daemons, shown};
use nix::unistd::geteuid;

use crate::exit::Failure;

/// A daemon that answered, with its socket.
pub(crate) type Daemon = (PathBuf, Status);

/// Every daemon of this user, for root of all users, that serves what it says; the user's own first.
pub(crate) fn believed() -> Result<Vec<Daemon>, Failure> {
    let table = mounts::all();
    Ok(daemons()?.into_iter().filter(|(_, status)| is_believed(status, &table)).collect())
}

/// All places are asked side by side, so that a slow one keeps no other waiting.
fn daemons() -> Result<Vec<Daemon>, Failure> {
    let me = geteuid().as_raw();
    let places = daemons::all_places();
    let answers: Vec<_> = thread::scope(|scope| {
        let asked: Vec<_> = places.iter().map(|place| scope.spawn(|| control::running(place))).collect();
        asked.into_iter().map(ScopedJoinHandle::join).collect()
    });
    let mut found = Vec::new();
    for (place, answer) in places.iter().zip(answers) {
        match answer {
            Ok(Ok(running)) => found.extend(running),
            Ok(Err(error)) if place.owner == me => return Err(error.into()),
            // What others did to their own directory is no reason to show nothing.
            Ok(Err(_)) | Err(_) => {}
        }
    }
    found.sort_by_key(|(_, status)| status.uid != me);
    Ok(found)
}

/// The daemon that serves the mount point of this name, or, when it is this user's own, the archive of this name.
pub(crate) fn find(canonical: &Path, given: &Path) -> Result<Option<Daemon>, Failure> {
    let believed = believed()?;
    if let Some(found) = believed.iter().find(|(_, status)| Path::new(&status.mount_point) == canonical) {
        return Ok(Some(found.clone()));
    }
    // The links on the way to a dead mount cannot be followed; those to a living one or to an archive can.
    let real = match real_path(given) {
        Ok(real) => real,
        Err(error) if error.kind() == ErrorKind::TimedOut => return Err(unresolved(given)),
        Err(_) => return Ok(None),
    };
    // A file that took the place of a mounted one has that one's name, and may be mounted too: whoever serves this very file comes first.
    let name = daemons::socket_name(&real).ok();
    let of_another = |socket: &Path| !name.as_ref().is_some_and(|name| name.is_of(socket));
    let meant = believed.into_iter().filter(|(_, status)| is_meant(status, &real));
    Ok(meant.min_by_key(|(socket, _)| of_another(socket)))
}

/// Which archive it serves says a daemon itself, and even the name in the table of mounts is one that its user chose: for another user's
/// daemon only the place of the mount is certain.
fn is_meant(status: &Status, real: &Path) -> bool {
    let mine = status.uid == geteuid().as_raw();
    real == Path::new(&status.mount_point) || (mine && real == Path::new(&status.archive))
}

/// Why there is nothing to be done with what was given as a mount point or an archive.
pub(crate) fn not_found(canonical: &Path, given: &Path) -> Failure {
    let real = real_path(given).unwrap_or_else(|_| canonical.to_path_buf());
    let at = shown(given);
    let named = |mounted: &Mounted| mounted.is_archive() && [canonical, &real].contains(&&*mounted.source);
    let Some(mounted) = mounts::all().into_iter().rfind(named) else {
        return Failure::other(format!("{at} is neither a mounted archive nor its mount point"));
    };
    let (user, point) = (mounted.user.map_or_else(|| "unknown".into(), daemons::user_name), shown(&mounted.point));
    if mounted.user == Some(geteuid().as_raw()) {
        return Failure::other(format!(
            "no daemon answers for the mount of {at} at {point}: name it by that directory"
        ));
    }
    Failure::other(format!(
        "{at} is not mounted by this user; user {user} has a mount of this name at {point}, and only by its mount point can it be meant"
    ))
}

/// Why a path is not resolved that leads on below a mount.
fn unresolved(given: &Path) -> Failure {
    match Located::of(given).ok().as_ref().and_then(Located::mount) {
        Some(mounted) => unanswered(mounted),
        None => Failure::other(format!("cannot look up {}: a file system on the way does not answer", shown(given))),
    }
}

/// Why nothing can be asked of a mount that is in the kernel's table.
pub(crate) fn unanswered(mounted: &Mounted) -> Failure {
    let point = shown(&mounted.point);
    let me = geteuid();
    match mounted.user.filter(|user| !me.is_root() && *user != me.as_raw()) {
        Some(user) => {
            let user = daemons::user_name(user);
            Failure::other(format!("{point} was mounted by user {user}: only {user} and root may ask its daemon"))
        }
        None => Failure::other(format!(
            "no daemon answers for {point}: it died, is stopped or runs elsewhere; 'lockbox umount {point}' tells which"
        )),
    }
}

/// A daemon of another user may say of itself what it likes: what it serves must be that user's mount in the kernel's table.
fn is_believed(status: &Status, table: &[Mounted]) -> bool {
    let serves = |mounted: &&Mounted| mounted.point == Path::new(&status.mount_point);
    status.uid == geteuid().as_raw()
        || table.iter().rfind(serves).is_some_and(|mounted| {
            mounted.is_archive() && mounted.user == Some(status.uid) && mounted.source == Path::new(&status.archive)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_of_another_user_is_found_by_its_mount_point_only() {
        let mine = geteuid().as_raw();
        let status = |uid| Status { uid, mount_point: "/mnt/a".into(), archive: "/a.lbx".into(), ..Status::default() };
        for (uid, by_archive) in [(mine, true), (mine + 1, false)] {
            assert!(is_meant(&status(uid), Path::new("/mnt/a")));
            assert_eq!(is_meant(&status(uid), Path::new("/a.lbx")), by_archive);
        }
    }

    #[test]
    fn a_daemon_of_another_user_is_believed_only_with_a_mount_of_that_user() {
        let other = geteuid().as_raw() + 1;
        let line = |user| format!("36 35 0:42 / /mnt/a rw - fuse.lockbox /a.lbx rw,user_id={user},group_id=0");
        let table = |user| mounts::parse(line(user).as_bytes()).into_iter().collect::<Vec<_>>();
        let status = Status { uid: other, mount_point: "/mnt/a".into(), archive: "/a.lbx".into(), ..Status::default() };
        assert!(is_believed(&status, &table(other)));
        assert!(!is_believed(&status, &table(other + 1)));
        assert!(!is_believed(&status, &[]));
        assert!(!is_believed(&Status { archive: "/b.lbx".into(), ..status.clone() }, &table(other)));
        assert!(is_believed(&Status { uid: geteuid().as_raw(), ..status }, &[]));
    }
}
