//! `mount -o remount`: changes what the kernel alone decides about a living mount.
//!
//! mount(8) passes everything that fstab and the kernel's table say beside what the user asked for. What belongs to the
//! daemon (memory, profiles, the passphrase) stays as it was; only the kernel's flags change.

use std::path::Path;

use lockbox::control::{self, Request, Response};
use lockbox_host::daemons;
use lockbox_host::point::Point;
use nix::mount::MsFlags;
use nix::unistd::geteuid;

use crate::exit::Failure;
use crate::options::Options;

/// What the kernel's table shows for a FUSE mount; mount(8) hands it back.
const SHOWN: [&str; 5] = ["user_id=", "group_id=", "max_read=", "blksize=", "subtype="];

/// The flags to remount with, or none when the lists do not ask for it.
pub fn requested<S: AsRef<str>>(lists: &[S]) -> Result<Option<MsFlags>, Failure> {
    let all = || lists.iter().flat_map(|list| list.as_ref().split(','));
    if !all().any(|option| option == "remount") {
        return Ok(None);
    }
    let rest: Vec<&str> =
        all().filter(|&option| option != "remount" && !SHOWN.iter().any(|shown| option.starts_with(shown))).collect();
    Ok(Some(flags(&rest, Options::parse(&rest)?)))
}

/// The kernel's table names only what is switched off, so here, unlike at mounting, silence means `suid`, `dev` and
/// noted access times.
fn flags(given: &[&str], mut options: Options) -> MsFlags {
    let last =
        |on: &[&str], off: &str| given.iter().rfind(|&option| on.contains(option) || *option == off) != Some(&off);
    options.suid = last(&["suid", "set-id", "set_id"], "nosuid");
    options.dev = last(&["dev", "devices"], "nodev");
    options.access_times = last(&["relatime"], "noatime");
    options.mount_flags()
}

/// What a mount that somebody else made keeps: that user chooses what is in it, and may have put it where another one was.
fn kept(mounted_by: Option<u32>, own: u32) -> MsFlags {
    match mounted_by {
        Some(user) if user == own => MsFlags::empty(),
        _ => MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
    }
}

/// Changes the mount at `point`, an absolute path without links. When this returns for a read-only mount, all that was written before is durable.
pub fn remount(point: &Path, flags: MsFlags) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::mount(format!("cannot remount {}: {e}", point.display()));
    let held = Point::of(point).map_err(failed)?;
    let mounted = match held.mounted_at(point).map_err(failed)? {
        Some(mounted) if mounted.is_archive() => mounted,
        _ => return Err(Failure::mount(format!("no archive is mounted at {}", point.display()))),
    };
    let flags = flags | kept(mounted.user, geteuid().as_raw());
    // Whose mount it is says the kernel; a daemon of anybody else may claim what it likes.
    let places = mounted.user.map_or_else(daemons::places, daemons::places_of);
    let daemons = places.iter().map(control::running).collect::<Result<Vec<_>, _>>()?.concat();
    let daemon = daemons.iter().find(|(_, status)| Path::new(&status.mount_point) == point);
    let read_only = flags.contains(MsFlags::MS_RDONLY);
    if !read_only && daemon.is_some_and(|(_, status)| status.read_only) {
        return Err(Failure::mount(format!(
            "{} was mounted read-only, so the archive is not open for writing: unmount it and mount it again",
            point.display()
        )));
    }
    // The kernel hands its dirty pages to the daemon on the way to read-only.
    nix::mount::mount(None::<&str>, &held.link(), None::<&str>, flags | MsFlags::MS_REMOUNT, None::<&str>)
        .map_err(|e| failed(e.into()))?;
    match daemon {
        Some((socket, status)) if read_only => match control::ask(socket, status.uid, &Request::Sync)? {
            Response::Done => Ok(()),
            other => Err(Failure::other(format!(
                "{} is read-only, but not all of it is durable: {}",
                point.display(),
                other.complaint()
            ))),
        },
        None if read_only => Err(Failure::other(format!(
            "{} is read-only, but its daemon is not found and was not asked to make all of it durable",
            point.display()
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinary_mount_is_no_remount() {
        assert_eq!(requested(&["ro,noexec"]).unwrap(), None);
    }

    #[test]
    fn what_the_kernel_shows_is_taken_back_and_only_flags_change() {
        let list = "ro,noatime,remount,user_id=0,group_id=0,default_permissions,allow_other,memory=64M";
        assert_eq!(requested(&[list]).unwrap(), Some(MsFlags::MS_RDONLY | MsFlags::MS_NOATIME));
        let list = "ro,nosuid,nodev,relatime,remount,user_id=1000";
        let noted = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        assert_eq!(requested(&[list]).unwrap(), Some(noted), "a mount with atime=open shows no noatime");
        let list = "rw,nosuid,nodev,noatime,remount,set-id,devices";
        assert_eq!(requested(&[list]).unwrap(), Some(MsFlags::MS_NOATIME), "in words that mount(8) passes on");
        let list = "rw,nosuid,nodev,noexec,noatime,remount,user_id=1000";
        let all = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
        assert_eq!(requested(&[list]).unwrap(), Some(all));
    }

    #[test]
    fn the_mount_of_another_user_gets_no_rights() {
        let without = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        assert_eq!([kept(Some(0), 0), kept(Some(1000), 0), kept(None, 0)], [MsFlags::empty(), without, without]);
    }

    #[test]
    fn an_unknown_option_is_refused_here_too() {
        assert!(requested(&["remount,blksize"]).is_err());
    }
}
