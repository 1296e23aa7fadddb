//! `mount -o remount`: changes mount flags that the kernel alone enforces.
//!
//! mount(8) passes all options of fstab and of the kernel's table along with the requested ones.
//! Settings of the daemon (memory, profiles, the passphrase) stay unchanged; only the kernel's
//! flags change.

use std::path::Path;

use lockbox::control::{self, Request, Response};
use lockbox_host::daemons;
use lockbox_host::mountpoint::Mountpoint;
use nix::mount::MsFlags;
use nix::unistd::geteuid;

use crate::exit::Failure;
use crate::options::MountOptions;

/// Options in the kernel's table of a FUSE mount, which mount(8) passes back.
const SHOWN: [&str; 5] = ["user_id=", "group_id=", "max_read=", "blksize=", "subtype="];

/// Flags, the option that sets each, and those that clear it.
const FLAGS: [(MsFlags, &str, &[&str]); 4] = [
    (MsFlags::MS_NOSUID, "nosuid", &["suid", "set-id", "set_id"]),
    (MsFlags::MS_NODEV, "nodev", &["dev", "devices"]),
    (MsFlags::MS_NOEXEC, "noexec", &["exec"]),
    (MsFlags::MS_NOATIME, "noatime", &["relatime"]),
];

/// Change of a mount's flags; flags that are in neither set stay unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagChange {
    set: MsFlags,
    unset: MsFlags,
}

impl FlagChange {
    /// Applies the change to the flags in the kernel's table.
    fn apply(self, words: &[String]) -> MsFlags {
        let mut flags = MsFlags::empty();
        let all = FLAGS.iter().map(|(flag, word, _)| (*flag, *word)).chain([(MsFlags::MS_RDONLY, "ro")]);
        for (flag, word) in all {
            flags.set(flag, words.iter().any(|shown| shown == word));
        }
        (flags - self.unset) | self.set
    }
}

/// Returns the requested change, or None if the lists do not request a remount. `command_line`: the
/// options on mount(8)'s command line, of which it passes on only those that differ from the
/// kernel's defaults.
///
/// Flags that are not named stay unchanged. mount(8) merges the requested options with the fstab
/// line. Only without such a line it uses the kernel's table, or nothing when both names are given.
/// So a flag that the mount has by our default, such as nosuid and nodev, is missing in the list.
/// Taking its absence for its opposite would grant rights to files that another user put into the
/// archive.
pub fn parse_request<S: AsRef<str>>(lists: &[S], command_line: &[String]) -> Result<Option<FlagChange>, Failure> {
    let all = || lists.iter().flat_map(|list| list.as_ref().split(','));
    if !all().any(|option| option == "remount") {
        return Ok(None);
    }
    let rest: Vec<&str> =
        all().filter(|&option| option != "remount" && !SHOWN.iter().any(|shown| option.starts_with(shown))).collect();
    let read_only = MountOptions::parse(&rest)?.read_only;
    let mut change = FlagChange { set: MsFlags::empty(), unset: MsFlags::empty() };
    if read_only {
        change.set |= MsFlags::MS_RDONLY;
    } else if rest.contains(&"rw") {
        change.unset |= MsFlags::MS_RDONLY;
    }
    let words: Vec<&str> = rest.into_iter().chain(command_line.iter().map(String::as_str)).collect();
    for (flag, set, unset) in FLAGS {
        match words.iter().rfind(|&word| *word == set || unset.contains(word)) {
            Some(word) if *word == set => change.set |= flag,
            Some(_) => change.unset |= flag,
            None => {}
        }
    }
    Ok(Some(change))
}

/// Returns the flags that a mount of another user must keep: that user chooses its content, and may
/// have replaced another mount with it.
fn required_flags(mounted_by: Option<u32>, own: u32) -> MsFlags {
    match mounted_by {
        Some(user) if user == own => MsFlags::empty(),
        _ => MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
    }
}

/// Changes the mount at `point`, an absolute path without links. When this returns for a read-only
/// mount, all earlier writes are durable.
pub fn remount(point: &Path, change: FlagChange) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::mount(format!("cannot remount {}: {e}", point.display()));
    let held = Mountpoint::of(point).map_err(failed)?;
    let mounted = match held.mounted_at(point).map_err(failed)? {
        Some(mounted) if mounted.is_archive() => mounted,
        _ => return Err(Failure::mount(format!("no archive is mounted at {}", point.display()))),
    };
    let flags = change.apply(&mounted.words) | required_flags(mounted.user, geteuid().as_raw());
    // The kernel knows the mount's user; the claim of another user's daemon does not count.
    let places = mounted.user.map_or_else(daemons::places, daemons::places_of);
    let daemons = places.iter().map(control::list_daemons).collect::<Result<Vec<_>, _>>()?.concat();
    let daemon = daemons.iter().find(|(_, status)| daemons::mount_of(status, std::slice::from_ref(&mounted)).is_some());
    let read_only = flags.contains(MsFlags::MS_RDONLY);
    if !read_only && daemon.is_some_and(|(_, status)| status.read_only) {
        return Err(Failure::mount(format!(
            "{} was mounted read-only, so the archive is not open for writing: unmount it and mount it again",
            point.display()
        )));
    }
    // On the way to read-only the kernel sends its dirty pages to the daemon.
    nix::mount::mount(None::<&str>, &held.link(), None::<&str>, flags | MsFlags::MS_REMOUNT, None::<&str>)
        .map_err(|e| failed(e.into()))?;
    match daemon {
        Some((socket, status)) if read_only => match control::send_request(socket, status.uid, &Request::Sync)? {
            Response::Done => Ok(()),
            other => Err(Failure::other(format!(
                "{} is read-only, but not all of it is durable: {}",
                point.display(),
                other.failure_message()
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

    const RIGHTS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);

    /// Returns the flags after a remount with this list, of a mount with these options in the
    /// kernel's table, by a mount(8) with this command line.
    fn after(list: &str, words: &str, command_line: &str) -> MsFlags {
        let split = |list: &str| list.split(',').map(str::to_owned).collect::<Vec<_>>();
        parse_request(&[list], &split(command_line)).unwrap().unwrap().apply(&split(words))
    }

    #[test]
    fn an_ordinary_mount_is_no_remount() {
        assert_eq!(parse_request(&["ro,noexec"], &[]).unwrap(), None);
    }

    #[test]
    fn options_of_the_kernel_are_ignored_and_only_flags_change() {
        let list = "ro,noatime,remount,user_id=0,group_id=0,default_permissions,allow_other,memory=64M";
        assert_eq!(after(list, "rw,noatime", "remount,ro"), MsFlags::MS_RDONLY | MsFlags::MS_NOATIME);
        let list = "ro,nosuid,nodev,relatime,remount,user_id=1000";
        let noted = MsFlags::MS_RDONLY | RIGHTS;
        assert_eq!(after(list, "rw,nosuid,nodev,relatime", ""), noted, "a mount with atime=open shows no noatime");
        let words = "rw,nosuid,nodev,noatime";
        let list = "rw,nosuid,nodev,noatime,remount,set-id,devices";
        assert_eq!(after(list, words, ""), MsFlags::MS_NOATIME, "in words that mount(8) passes on");
        let all = RIGHTS | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
        assert_eq!(after("rw,nosuid,nodev,noexec,noatime,remount,user_id=1000", words, ""), all);
        let list = "rw,noatime,remount,user_id=0";
        let command_line = "remount,suid,dev,exec";
        assert_eq!(
            after(list, "rw,nosuid,nodev,noexec,noatime", command_line),
            MsFlags::MS_NOATIME,
            "kept by mount(8)"
        );
    }

    #[test]
    fn unnamed_flags_stay_unchanged() {
        let words = "rw,nosuid,nodev,noexec,noatime";
        let all = RIGHTS | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
        for (list, command_line) in [
            // By the fstab line, by both names, and by direct callers of this program.
            ("ro,allow_other,remount,x-systemd.automount", "remount,ro"),
            ("ro,remount", "remount,ro"),
            ("remount,ro", ""),
        ] {
            assert_eq!(after(list, words, command_line), all | MsFlags::MS_RDONLY, "{list}");
        }
        assert_eq!(after("remount,exec", "ro,nosuid,nodev,noexec", ""), RIGHTS | MsFlags::MS_RDONLY);
        assert_eq!(after("remount,rw", "ro", ""), MsFlags::empty(), "a mount that was given the rights");
        assert_eq!(after("rw,remount,set-id", "rw", "remount,nosuid"), MsFlags::MS_NOSUID, "what was said last");
    }

    #[test]
    fn the_mount_of_another_user_gets_no_rights() {
        let without = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        assert_eq!(
            [required_flags(Some(0), 0), required_flags(Some(1000), 0), required_flags(None, 0)],
            [MsFlags::empty(), without, without]
        );
    }

    #[test]
    fn an_unknown_option_is_refused_here_too() {
        assert!(parse_request(&["remount,blksize"], &[]).is_err());
    }
}
