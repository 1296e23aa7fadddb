//! Daemons of mounted archives: their sockets, the holder of an archive, and the daemon named by an
//! argument.
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread::{self, ScopedJoinHandle};

use lockbox_host::control::{self, Status};
pub(crate) use lockbox_host::located::canonical;
use lockbox_host::located::{Located, real_path, root_at};
use lockbox_host::mounts::{self, Mounted};
use lockbox_host::{daemons, shown};
use lockbox_terminal::advice;
use nix::unistd::geteuid;

use crate::exit::Failure;

/// A daemon that answered, with its socket.
pub(crate) type Daemon = (PathBuf, Status);

/// Returns every daemon of this user, for root of all users, whose reported mount is confirmed by
/// the kernel's table; the user's own first.
pub(crate) fn believed() -> Result<Vec<Daemon>, Failure> {
    let table = mounts::all();
    let believed = daemons()?.into_iter().filter(|(_, status)| is_believed(status, &table));
    Ok(believed.map(|(socket, status)| (socket, daemons::located(status, &table))).collect())
}

/// Asks all places concurrently, so that a slow one delays no other.
fn daemons() -> Result<Vec<Daemon>, Failure> {
    let me = geteuid().as_raw();
    let places = daemons::all_places();
    let answers: Vec<_> = thread::scope(|scope| {
        let asked: Vec<_> = places.iter().map(|place| scope.spawn(|| control::list_daemons(place))).collect();
        asked.into_iter().map(ScopedJoinHandle::join).collect()
    });
    let mut found = Vec::new();
    for (place, answer) in places.iter().zip(answers) {
        match answer {
            Ok(Ok(running)) => found.extend(running),
            Ok(Err(error)) if place.owner == me => return Err(error.into()),
            // Changes by other users to their own directory are no reason to show nothing.
            Ok(Err(_)) | Err(_) => {}
        }
    }
    found.sort_by_key(|(_, status)| status.uid != me);
    Ok(found)
}

/// Returns the daemon that serves the mount at this path, or, when it is this user's own, the
/// archive in the file that has this name.
///
/// A mount is recognised by its numbers and an archive by the numbers of its file; either may have
/// had other names when the mount began. The path is opened without a request to its file system,
/// so that a daemon which does not answer blocks no caller.
pub(crate) fn find(canonical: &Path, given: &Path) -> Result<Option<Daemon>, Failure> {
    let believed = believed()?;
    let table = mounts::all();
    let at_point = |point: &Path| believed.iter().find(|(_, status)| status.mount_point_path() == point).cloned();
    if let Some(found) = at_point(canonical) {
        return Ok(Some(found));
    }
    // A link may lead to a mount.
    if let Some(mounted) = root_at(given, &table) {
        return Ok(at_point(&mounted.point));
    }
    // The links on the way to a dead mount cannot be followed; those to a live one or to an archive
    // can.
    let real = match real_path(given) {
        Ok(real) => real,
        Err(error) if error.kind() == ErrorKind::TimedOut => return Err(unresolved(given)),
        Err(_) => return Ok(None),
    };
    let me = geteuid().as_raw();
    let Ok(name) = daemons::socket_name(&real) else { return Ok(None) };
    // The archive name of another user's daemon is that daemon's own claim, in a directory of that
    // user.
    Ok(believed.into_iter().find(|(socket, status)| status.uid == me && name.is_of(socket)))
}

/// Returns whether the daemon serves the file system of a mount, which may be a bind mount.
pub(crate) fn serves(status: &Status, mounted: &Mounted, table: &[Mounted]) -> bool {
    let device = match status.mount_device {
        // An older daemon reports no numbers.
        0 => daemons::mount_of(status, table).map(|served| served.device),
        device => Some(device),
    };
    device == Some(mounted.device)
}

/// Returns the reason why an argument is neither a usable mount point nor an archive.
pub(crate) fn not_found(canonical: &Path, given: &Path) -> Failure {
    let table = mounts::all();
    let at = shown(given);
    let real = real_path(given).unwrap_or_else(|_| canonical.to_path_buf());
    let named = |mounted: &Mounted| mounted.is_archive() && [canonical, &real].contains(&&*mounted.source);
    let Some(mounted) = table.iter().rfind(|mounted| named(mounted)) else {
        return Failure::other(format!("{at} is not mounted"));
    };
    Failure::other(other_file(&at, mounted, &believed().unwrap_or_default(), &table))
}

/// Returns the reason why the name of the archive of a mount does not lead to its daemon.
fn other_file(at: &str, mounted: &Mounted, believed: &[Daemon], table: &[Mounted]) -> String {
    let (user, point) = (mounted.user.map_or_else(|| "unknown".into(), daemons::user_name), shown(&mounted.point));
    if mounted.user != Some(geteuid().as_raw()) {
        format!(
            "{at} is not mounted by this user; user {user} has a mount of this name at {point}: name it by its mount point"
        )
    } else if believed.iter().any(|(_, status)| serves(status, mounted, table)) {
        format!(
            "{at} is not the file that was mounted at {point} under this name: name the mounted archive by that directory"
        )
    } else {
        format!("no daemon answers for the mount of {at} at {point}: name it by that directory")
    }
}

/// Returns the reason why a path below a mount is not resolved.
fn unresolved(given: &Path) -> Failure {
    match Located::of(given).ok().as_ref().and_then(Located::mount) {
        Some(mounted) => unanswered(mounted),
        None => Failure::other(format!("cannot look up {}: a file system on its path does not answer", shown(given))),
    }
}

/// Returns the reason why a mount in the kernel's table cannot be asked.
pub(crate) fn unanswered(mounted: &Mounted) -> Failure {
    let point = shown(&mounted.point);
    let me = geteuid();
    match mounted.user.filter(|user| !me.is_root() && *user != me.as_raw()) {
        Some(user) => {
            let name = daemons::user_name(user);
            let senders = if user == 0 { name.clone() } else { format!("{name} and root") };
            Failure::other(format!(
                "{point} was mounted by user {name}: only {senders} may send requests to its daemon"
            ))
        }
        None => Failure::other(format!(
            "no daemon answers for {point}: it died, is stopped or cannot be reached from here; {} shows which",
            advice("lockbox umount", mounted.point.as_os_str().as_bytes())
        )),
    }
}

/// A daemon of another user may report anything: the mount that it names must be that user's in the
/// kernel's table.
fn is_believed(status: &Status, table: &[Mounted]) -> bool {
    status.uid == geteuid().as_raw()
        || daemons::mount_of(status, table)
            .is_some_and(|mounted| mounted.user == Some(status.uid) && mounted.source == status.archive_path())
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let renamed = Status { mount_point: "/old/a".into(), mount_id: 36, mount_device: 42, ..status.clone() };
        assert!(is_believed(&renamed, &table(other)), "a directory above its mount was renamed");
        assert!(!is_believed(&Status { mount_device: 43, ..renamed }, &table(other)));
        assert!(is_believed(&Status { uid: geteuid().as_raw(), ..status }, &[]));
    }

    #[test]
    fn a_bind_mount_of_an_archive_that_was_replaced_has_a_daemon() {
        let me = geteuid().as_raw();
        let line = |id, device, point| {
            format!("{id} 35 {device} / {point} rw - fuse.lockbox /a.lbx rw,user_id={me},group_id=0")
        };
        // The last one is of a daemon that died.
        let lines = [line(36, "0:42", "/mnt/a"), line(37, "0:42", "/mnt/bind"), line(38, "0:43", "/mnt/a")];
        let table: Vec<Mounted> = lines.iter().filter_map(|line| mounts::parse(line.as_bytes())).collect();
        let status =
            Status { uid: me, mount_point: "/mnt/a".into(), mount_id: 36, mount_device: 42, ..Status::default() };
        let daemons = [(PathBuf::from("socket"), status)];
        let why = |mounted| other_file("a.lbx", mounted, &daemons, &table);
        assert!(why(&table[1]).contains("is not the file that was mounted at /mnt/bind"), "{}", why(&table[1]));
        assert!(why(&table[2]).contains("no daemon answers"), "{}", why(&table[2]));
    }
}
