//! Dealings with mount(8): its exit codes; options and names that it does not pass on; and
//! `mount -o remount`.
//!
//! # Swallowed options
//! libmount passes a helper only the options that differ from the kernel's defaults: `-o suid,dev`
//! disappears unless it is combined with `user` or `users`. Our defaults are the opposite (nosuid,
//! nodev), so these options would be lost silently. They are read where mount(8) read them: in the
//! command line of the parent process and in fstab(5). This is good enough for an error message,
//! not for granting rights. The options that grant them are our own, `set-id` and `devices`, which
//! mount(8) passes on.
//!
//! # Remount
//! mount(8) passes all options of fstab and of the kernel's table along with the requested ones.
//! Settings of the daemon (memory, profiles, the passphrase) stay unchanged; only the flags that
//! the kernel alone enforces change.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use lockbox_host::control::{self, Request, Response};
use lockbox_host::mount_options::MountOptions;
use lockbox_host::mounts::{Mountpoint, unescape};
use lockbox_host::{USAGE, daemons};
use nix::mount::MsFlags;
use nix::unistd::{geteuid, getppid};

use crate::Failure;

/// Exit codes of mount(8): wrong usage, a system error, and a failed mount.
const USAGE_CODE: u8 = 1;
const SYSTEM_CODE: u8 = 2;
const FAILED_CODE: u8 = 32;

/// Directories in which mount(8), automount daemons and systemd look for mount programs.
const SYSTEM_DIRECTORIES: [&str; 2] = ["/sbin", "/usr/sbin"];

/// Returns whether mount(8) is the caller, judging by the name of the call: a path in a system
/// directory. The program then uses the exit codes of mount(8), which passes them on as its own.
pub fn is_caller(name: Option<&OsStr>) -> bool {
    name.and_then(|name| Path::new(name).parent())
        .is_some_and(|directory| SYSTEM_DIRECTORIES.iter().any(|system| directory == Path::new(system)))
}

/// Converts to an exit code of mount(8).
pub fn exit_code(failure: &Failure) -> u8 {
    match failure.code {
        USAGE => USAGE_CODE,
        _ if failure.system => SYSTEM_CODE,
        _ => FAILED_CODE,
    }
}

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
    let read_only = MountOptions::parse(&rest).map_err(Failure::usage)?.read_only;
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
    // On the way to read-only the kernel sends its dirty pages to the daemon. Before Linux 6.16 it
    // does not wait for their arrival; the request below does.
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
            "{} is read-only, but its daemon was not found, so recent changes may not be durable yet",
            point.display()
        ))),
        _ => Ok(()),
    }
}

/// Returns the options on the command line of mount(8), including those that it does not pass on;
/// empty if another program is the parent.
pub fn command_line_options() -> Vec<String> {
    let command_line = parent_command();
    let lists = MountCommand::read(&command_line).map(|mount| mount.lists).unwrap_or_default();
    let words = lists.iter().flat_map(|list| list.split(|&byte| byte == b','));
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

fn parent_command() -> Vec<u8> {
    std::fs::read(format!("/proc/{}/cmdline", getppid())).unwrap_or_default()
}

/// Rejects `suid` and `dev` that mount(8) swallowed.
///
/// # Errors
/// Usage error that names the option to use instead.
pub fn check_swallowed_options(options: &MountOptions, archive: &Path, point: &Path) -> Result<(), Failure> {
    let command_line = parent_command();
    let Some(mount) = MountCommand::read(&command_line) else { return Ok(()) };
    let table = std::fs::read(mount.table.unwrap_or(Path::new(FSTAB))).unwrap_or_default();
    let lists = fstab_options(&table, archive, point).into_iter().chain(mount.lists);
    let words: Vec<&[u8]> = lists.flat_map(|list| list.split(|&byte| byte == b',')).collect();
    let last = |on: &[u8], off: &[u8]| words.iter().rfind(|&&word| word == on || word == off) == Some(&on);
    for (word, off, have, ours) in
        [("suid", "nosuid", options.suid, "set-id"), ("dev", "nodev", options.dev, "devices")]
    {
        if !have && last(word.as_bytes(), off.as_bytes()) {
            return Err(Failure::usage(format!(
                "mount(8) does not pass the option {word} on, so it would have no effect: write {ours} instead"
            )));
        }
    }
    Ok(())
}

struct MountCommand<'a> {
    lists: Vec<&'a [u8]>,
    table: Option<&'a Path>,
}

impl<'a> MountCommand<'a> {
    /// Parses a command line of /proc, which has a zero after each word.
    fn read(command_line: &'a [u8]) -> Option<MountCommand<'a>> {
        MountCommand::parse(&command_line.split(|&byte| byte == 0).collect::<Vec<_>>())
    }

    /// Returns None if the command is another program.
    fn parse(command_line: &[&'a [u8]]) -> Option<MountCommand<'a>> {
        let (program, arguments) = command_line.split_first()?;
        if program.rsplit(|&byte| byte == b'/').next() != Some(b"mount") {
            return None;
        }
        let mut parsed = MountCommand { lists: Vec::new(), table: None };
        let mut arguments = arguments.iter().copied();
        while let Some(argument) = arguments.next() {
            let (name, value) = match argument {
                b"--options" => (b'o', arguments.next()),
                b"--fstab" => (b'T', arguments.next()),
                [b'-', b'-', long @ ..] => match (long.strip_prefix(b"options="), long.strip_prefix(b"fstab=")) {
                    (Some(list), _) => (b'o', Some(list)),
                    (_, Some(table)) => (b'T', Some(table)),
                    _ => continue,
                },
                // Flags without a value may precede the option letter in one argument.
                [b'-', letters @ ..] => match letters.iter().position(|letter| b"oT".contains(letter)) {
                    Some(at) if at + 1 == letters.len() => (letters[at], arguments.next()),
                    Some(at) => (letters[at], Some(&letters[at + 1..])),
                    None => continue,
                },
                _ => continue,
            };
            match (name, value) {
                (b'o', Some(list)) => parsed.lists.push(list),
                (_, Some(table)) => parsed.table = Some(Path::new(std::ffi::OsStr::from_bytes(table))),
                _ => {}
            }
        }
        Some(parsed)
    }
}

/// Returns the options field of the fstab line for this archive and mount point.
fn fstab_options<'a>(table: &'a [u8], archive: &Path, point: &Path) -> Option<&'a [u8]> {
    table.split(|&byte| byte == b'\n').find_map(|line| {
        let mut fields = line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
        let (source, target, _, options) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let is = |field: &[u8], path: &Path| unescape(field) == path.as_os_str().as_bytes();
        (is(source, archive) && is(target, point)).then_some(options)
    })
}

/// The system's table of file systems.
pub const FSTAB: &str = "/etc/fstab";

/// Returns the names in the table of the archive that is the file `archive` and is mounted on
/// `point`. mount(8) resolves symbolic links before it calls this program, so only the table has
/// the name that the user knows.
pub fn names_in_fstab(table: &[u8], archive: &Path, point: &Path) -> Vec<PathBuf> {
    let path = |field: &[u8]| PathBuf::from(OsString::from_vec(unescape(field)));
    let same = |a: &Path, b: &Path| a == b || a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b));
    let lines = table.split(|&byte| byte == b'\n');
    let named = lines.filter_map(|line| {
        let mut fields = line.split(|byte| b" \t".contains(byte)).filter(|field| !field.is_empty());
        let (name, on) = (fields.next()?, fields.next()?);
        (name.first() != Some(&b'#') && same(&path(on), point)).then(|| path(name))
    });
    named.filter(|name| same(name, archive)).collect()
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

    fn lists(parent_command: &str) -> Option<(String, Option<&Path>)> {
        let words: Vec<&[u8]> = parent_command.split(' ').map(str::as_bytes).collect();
        let parsed = MountCommand::parse(&words)?;
        Some((String::from_utf8(parsed.lists.join(&b'|')).unwrap(), parsed.table))
    }

    #[test]
    fn the_lists_of_mount_8_are_read_as_it_reads_them() {
        for (parent_command, expected) in [
            ("mount -t lockbox -o suid,dev /a /b", "suid,dev"),
            ("/bin/mount -vosuid /a /b -o dev", "suid|dev"),
            ("mount --options suid --options=dev /a", "suid|dev"),
            ("mount -a", ""),
        ] {
            assert_eq!(lists(parent_command).unwrap().0, expected, "{parent_command}");
        }
        assert_eq!(lists("mount -T /x /b").unwrap().1, Some(Path::new("/x")));
        assert!(lists("bash -o suid").is_none());
        assert!(lists("").is_none());
    }

    #[test]
    fn the_line_of_the_table_is_the_one_of_both_names() {
        let table = b"# suid\n/a.lbx /b ext4 nodev 0 0\n/a\\040b.lbx /b lockbox noauto,suid 0 0\nshort";
        let line = |archive: &str| fstab_options(table, Path::new(archive), Path::new("/b"));
        assert_eq!(line("/a b.lbx"), Some(&b"noauto,suid"[..]));
        assert_eq!(line("/a.lbx"), Some(&b"nodev"[..]));
        assert_eq!(line("/c.lbx"), None);
    }

    #[test]
    fn an_archive_is_found_by_the_name_that_fstab_has_for_it() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().canonicalize().unwrap().join(name);
        std::fs::create_dir(at("mnt")).unwrap();
        std::fs::create_dir(at("other")).unwrap();
        std::fs::write(at("evil"), "").unwrap();
        std::os::unix::fs::symlink("evil", at("a b.lbx")).unwrap();
        let escaped = at("a\\040b.lbx");
        let line =
            |name: &Path, point: &str| format!("{}\t{}  lockbox noauto 0 0\n", name.display(), at(point).display());
        let comment = format!("# {}", line(&escaped, "mnt"));
        let table = [comment, line(&escaped, "mnt"), line(&at("evil"), "other"), line(&at("missing"), "mnt")].concat();
        assert_eq!(names_in_fstab(table.as_bytes(), &at("evil"), &at("mnt")), [at("a b.lbx")]);
        assert!(
            names_in_fstab(table.as_bytes(), &at("mnt"), &at("mnt")).is_empty(),
            "another archive on the mount point"
        );
    }

    #[test]
    fn a_call_by_a_path_of_mount_8_uses_its_codes() {
        for (name, expected) in [
            ("/sbin/mount.lockbox", true),
            ("/usr/sbin/mount.fuse.lockbox", true),
            ("mount.lockbox", false),
            ("./mount.lockbox", false),
            ("/usr/local/bin/mount-lockbox", false),
            ("/usr/sbin/x/mount.lockbox", false),
        ] {
            assert_eq!(is_caller(Some(OsStr::new(name))), expected, "{name}");
        }
        assert!(!is_caller(None));
        for (failure, code) in [
            (Failure::usage("x"), 1),
            (Failure::system("x"), 2),
            (Failure::other("x"), 32),
            (Failure::mount("x"), 32),
            (Failure::new(lockbox_host::WRONG_KEY, "x"), 32),
        ] {
            assert_eq!(exit_code(&failure), code);
        }
    }
}
