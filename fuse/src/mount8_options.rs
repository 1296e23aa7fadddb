//! Detects the options `suid` and `dev`, which mount(8) does not pass on, and rejects them by name.
//!
//! libmount passes a helper only the options that differ from the kernel's defaults: `-o suid,dev`
//! disappears unless it is combined with `user` or `users`. Our defaults are the opposite (nosuid,
//! nodev), so these options would be lost silently. They are read where mount(8) read them: in the
//! command line of the parent process and in fstab. This is good enough for an error message, not
//! for granting rights. The options that grant them are our own, `set-id` and `devices`, which
//! mount(8) passes on.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use lockbox_host::mounts::unescape;
use nix::unistd::getppid;

use crate::exit::Failure;
use crate::options::MountOptions;

/// Returns the options on the command line of mount(8), including those that it does not pass on;
/// empty if another program is the parent.
pub fn command_line_options() -> Vec<String> {
    let command_line = parent_command();
    let command_line: Vec<&[u8]> = command_line.split(|&byte| byte == 0).collect();
    let lists = MountCommand::parse(&command_line).map(|mount| mount.lists).unwrap_or_default();
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
pub fn check(options: &MountOptions, archive: &Path, point: &Path) -> Result<(), Failure> {
    let command_line = parent_command();
    let command_line: Vec<&[u8]> = command_line.split(|&byte| byte == 0).collect();
    let Some(mount) = MountCommand::parse(&command_line) else { return Ok(()) };
    let table = std::fs::read(mount.table.unwrap_or(Path::new("/etc/fstab"))).unwrap_or_default();
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
