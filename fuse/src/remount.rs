//! `mount -o remount`: changes what the kernel alone decides about a living mount.
//!
//! mount(8) passes everything that fstab and the kernel's table say beside what the user asked for. What belongs to the
//! daemon (memory, profiles, the passphrase) stays as it was; only the kernel's flags change.

use std::path::Path;

use lockbox::control::{self, Request, Response};
use lockbox_host::daemons;
use lockbox_host::mountpoint::Mountpoint;
use nix::mount::MsFlags;
use nix::unistd::geteuid;

use crate::exit::Failure;
use crate::options::Options;

/// What the kernel's table shows for a FUSE mount; mount(8) hands it back.
const SHOWN: [&str; 5] = ["user_id=", "group_id=", "max_read=", "blksize=", "subtype="];

/// Flags, the word that sets each, and those that take it away.
const FLAGS: [(MsFlags, &str, &[&str]); 4] = [
    (MsFlags::MS_NOSUID, "nosuid", &["suid", "set-id", "set_id"]),
    (MsFlags::MS_NODEV, "nodev", &["dev", "devices"]),
    (MsFlags::MS_NOEXEC, "noexec", &["exec"]),
    (MsFlags::MS_NOATIME, "noatime", &["relatime"]),
];

/// What a remount makes of a mount's flags; those that are in neither stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    set: MsFlags,
    unset: MsFlags,
}

impl Change {
    /// The flags of a mount of which the kernel's table has these words.
    fn of(self, words: &[String]) -> MsFlags {
        let mut flags = MsFlags::empty();
        let all = FLAGS.iter().map(|(flag, word, _)| (*flag, *word)).chain([(MsFlags::MS_RDONLY, "ro")]);
        for (flag, word) in all {
            flags.set(flag, words.iter().any(|shown| shown == word));
        }
        (flags - self.unset) | self.set
    }
}

/// What to change, or none when the lists do not ask for a remount. `asked` is what mount(8) was asked for, of which it passes on only what differs from
/// the kernel's defaults.
///
/// Of what is not named nothing is changed. mount(8) merges what is asked for with the line of fstab, and only where that has none with the kernel's
/// table, or with nothing when it is given both names. So a flag that the mount has without anybody having named it, as nosuid and nodev, is missing
/// there, and who takes that for its opposite gives rights to what a stranger put into the archive.
pub fn requested<S: AsRef<str>>(lists: &[S], asked: &[String]) -> Result<Option<Change>, Failure> {
    let all = || lists.iter().flat_map(|list| list.as_ref().split(','));
    if !all().any(|option| option == "remount") {
        return Ok(None);
    }
    let rest: Vec<&str> =
        all().filter(|&option| option != "remount" && !SHOWN.iter().any(|shown| option.starts_with(shown))).collect();
    let read_only = Options::parse(&rest)?.read_only;
    let mut change = Change { set: MsFlags::empty(), unset: MsFlags::empty() };
    if read_only {
        change.set |= MsFlags::MS_RDONLY;
    } else if rest.contains(&"rw") {
        change.unset |= MsFlags::MS_RDONLY;
    }
    let given: Vec<&str> = rest.into_iter().chain(asked.iter().map(String::as_str)).collect();
    for (flag, set, unset) in FLAGS {
        match given.iter().rfind(|&word| *word == set || unset.contains(word)) {
            Some(word) if *word == set => change.set |= flag,
            Some(_) => change.unset |= flag,
            None => {}
        }
    }
    Ok(Some(change))
}

/// What a mount that somebody else made keeps: that user chooses what is in it, and may have put it where another one was.
fn kept(mounted_by: Option<u32>, own: u32) -> MsFlags {
    match mounted_by {
        Some(user) if user == own => MsFlags::empty(),
        _ => MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
    }
}

/// Changes the mount at `point`, an absolute path without links. When this returns for a read-only mount, all that was written before is durable.
pub fn remount(point: &Path, change: Change) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::mount(format!("cannot remount {}: {e}", point.display()));
    let held = Mountpoint::of(point).map_err(failed)?;
    let mounted = match held.mounted_at(point).map_err(failed)? {
        Some(mounted) if mounted.is_archive() => mounted,
        _ => return Err(Failure::mount(format!("no archive is mounted at {}", point.display()))),
    };
    let flags = change.of(&mounted.words) | kept(mounted.user, geteuid().as_raw());
    // Whose mount it is says the kernel; a daemon of anybody else may claim what it likes.
    let places = mounted.user.map_or_else(daemons::places, daemons::places_of);
    let daemons = places.iter().map(control::running).collect::<Result<Vec<_>, _>>()?.concat();
    let daemon = daemons.iter().find(|(_, status)| daemons::mount_of(status, std::slice::from_ref(&mounted)).is_some());
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

    const RIGHTS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);

    /// The flags after a remount with this list, of a mount with these words in the kernel's table, by a mount(8) that was asked for so much.
    fn after(list: &str, words: &str, asked: &str) -> MsFlags {
        let split = |list: &str| list.split(',').map(str::to_owned).collect::<Vec<_>>();
        requested(&[list], &split(asked)).unwrap().unwrap().of(&split(words))
    }

    #[test]
    fn an_ordinary_mount_is_no_remount() {
        assert_eq!(requested(&["ro,noexec"], &[]).unwrap(), None);
    }

    #[test]
    fn what_the_kernel_shows_is_taken_back_and_only_flags_change() {
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
        let asked = "remount,suid,dev,exec";
        assert_eq!(after(list, "rw,nosuid,nodev,noexec,noatime", asked), MsFlags::MS_NOATIME, "kept by mount(8)");
    }

    #[test]
    fn what_nobody_names_stays_as_it_was() {
        let words = "rw,nosuid,nodev,noexec,noatime";
        let all = RIGHTS | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
        for (list, asked) in [
            // By fstab's line, by both names, and by who calls this program.
            ("ro,allow_other,remount,x-systemd.automount", "remount,ro"),
            ("ro,remount", "remount,ro"),
            ("remount,ro", ""),
        ] {
            assert_eq!(after(list, words, asked), all | MsFlags::MS_RDONLY, "{list}");
        }
        assert_eq!(after("remount,exec", "ro,nosuid,nodev,noexec", ""), RIGHTS | MsFlags::MS_RDONLY);
        assert_eq!(after("remount,rw", "ro", ""), MsFlags::empty(), "a mount that was given the rights");
        assert_eq!(after("rw,remount,set-id", "rw", "remount,nosuid"), MsFlags::MS_NOSUID, "what was said last");
    }

    #[test]
    fn the_mount_of_another_user_gets_no_rights() {
        let without = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        assert_eq!([kept(Some(0), 0), kept(Some(1000), 0), kept(None, 0)], [MsFlags::empty(), without, without]);
    }

    #[test]
    fn an_unknown_option_is_refused_here_too() {
        assert!(requested(&["remount,blksize"], &[]).is_err());
    }
}
