//! Reads the kernel's table of mounts.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use lockbox::control::Status;
use nix::sys::stat::makedev;
use nix::unistd::geteuid;

/// The file system type of an archive as the kernel shows it.
pub const TYPE: &str = "fuse.lockbox";

/// One line of /proc/self/mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// The kernel's number of the mount, which another one gets when this one is gone.
    pub id: u64,
    /// Number of the mount that contains this one.
    pub parent: u64,
    /// The file system's device number: that of a bind mount is the same.
    pub device: u64,
    pub point: PathBuf,
    /// Options of the mount itself, such as `nosuid`, without those of its file system.
    pub words: Vec<String>,
    /// The archive, as it was named at mounting.
    pub source: PathBuf,
    /// User that created a FUSE mount.
    pub user: Option<u32>,
    pub file_system: String,
}

impl Mounted {
    pub fn is_archive(&self) -> bool {
        self.file_system == TYPE
    }

    pub fn numbers(&self) -> Numbers {
        Numbers { id: self.id, device: self.device }
    }
}

/// Numbers that tell a mount from every other one, even when it is moved or a directory above it is
/// renamed. The kernel gives the id of a mount that is gone to another one, but the device number
/// not before the file system has ended too, with which its daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    pub id: u64,
    pub device: u64,
}

/// Returns the mount that a daemon serves, at its current place.
///
/// In the daemon's own mount namespace it is known by its numbers. In another one a mount that was
/// copied into it has another id, so the device number alone counts there, and of several mounts
/// the one at the daemon's path. A daemon that reports no numbers is an older one, which is found
/// by its path.
pub fn of_daemon<'a>(table: &'a [Mounted], status: &Status, namespace: u64) -> Option<&'a Mounted> {
    let point = status.mount_point_path();
    let of_it = |mounted: &&Mounted| mounted.is_archive() && mounted.device == status.mount_device;
    if status.mount_device == 0 {
        return table.iter().rfind(|mounted| mounted.point == point).filter(|mounted| mounted.is_archive());
    }
    if [0, namespace].contains(&status.mount_namespace) {
        return table.iter().filter(of_it).find(|mounted| mounted.id == status.mount_id);
    }
    let mut there = table.iter().filter(of_it);
    there.clone().find(|mounted| mounted.point == point).or_else(|| there.next_back())
}

/// Returns all mounts of this process's namespace, a later one over an earlier one at the same
/// point.
///
/// # Errors
/// When /proc is not there.
pub fn table() -> io::Result<Vec<Mounted>> {
    let table = fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|&b| b == b'\n').filter_map(parse).collect())
}

/// The same, empty if /proc is missing.
pub fn all() -> Vec<Mounted> {
    table().unwrap_or_default()
}

/// Returns the mounts of archives that this user created; for root, those of all users.
pub fn mine() -> Vec<Mounted> {
    let me = geteuid();
    let mine = |mounted: &Mounted| mounted.is_archive() && (me.is_root() || mounted.user == Some(me.as_raw()));
    all().into_iter().filter(mine).collect()
}

/// Returns the mount on top at `point`, which must be an absolute path without links.
///
/// # Errors
/// As [`table`].
pub fn at(point: &Path) -> io::Result<Option<Mounted>> {
    Ok(table()?.into_iter().rfind(|mounted| mounted.point == point))
}

/// Returns another mount of the same file system, such as the original of a bind mount.
pub fn twin<'a>(table: &'a [Mounted], mounted: &Mounted) -> Option<&'a Mounted> {
    table.iter().find(|other| other.is_archive() && other.device == mounted.device && other.id != mounted.id)
}

/// Parses a line of the table.
pub fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|&b| b == b' ');
    let mut text = || std::str::from_utf8(fields.next()?).ok();
    let (id, parent, device) = (text()?.parse().ok()?, text()?.parse().ok()?, text()?);
    let (major, minor) = device.split_once(':')?;
    let device = makedev(major.parse().ok()?, minor.parse().ok()?);
    let point = path(fields.nth(1)?);
    let words = String::from_utf8_lossy(fields.next()?).split(',').map(str::to_owned).collect();
    // Optional fields end at a dash; type, source and the file system's options follow.
    let mut rest = fields.skip_while(|&field| field != b"-").skip(1);
    let file_system = String::from_utf8_lossy(rest.next()?).into_owned();
    let source = path(rest.next()?);
    let options = String::from_utf8_lossy(rest.next().unwrap_or_default()).into_owned();
    let user = options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok());
    Some(Mounted { id, parent, device, point, words, source, user, file_system })
}

fn path(field: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescape(field)))
}

/// Undoes the `\ooo` for space, tab, newline and backslash that the kernel and fstab write.
pub fn unescape(field: &[u8]) -> Vec<u8> {
    let mut parts = field.split(|&b| b == b'\\');
    let mut bytes = parts.next().unwrap_or_default().to_vec();
    for part in parts {
        match part {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', rest @ ..] => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                bytes.extend_from_slice(rest);
            }
            _ => {
                bytes.push(b'\\');
                bytes.extend_from_slice(part);
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_escapes_and_optional_fields_is_read() {
        let line = br"36 35 0:42 / /mnt/a\040b\134c rw,nosuid shared:1 master:2 - fuse.lockbox /x\040y.lbx rw,user_id=7,group_id=0";
        let mounted = parse(line).unwrap();
        assert_eq!(mounted.point, Path::new("/mnt/a b\\c"));
        assert_eq!(mounted.source, Path::new("/x y.lbx"));
        assert_eq!(mounted.user, Some(7));
        assert_eq!((mounted.id, mounted.parent, mounted.device), (36, 35, makedev(0, 42)));
        assert!(mounted.is_archive());
    }

    #[test]
    fn the_words_of_a_mount_are_told_from_those_of_its_file_system() {
        let table = b"3\n6 1 0:41 / /mnt rw,noexec - tmpfs x rw\n36 6 0:42 / /mnt/a ro,nosuid,nodev shared:1 - fuse.lockbox /x rw,user_id=7\n";
        let words = |id| {
            table.split(|&b| b == b'\n').filter_map(parse).find(|mounted| mounted.id == id).map(|mounted| mounted.words)
        };
        assert_eq!(words(36).unwrap(), ["ro", "nosuid", "nodev"]);
        assert_eq!(words(3), None);
        assert_eq!(words(42), None);
    }

    #[test]
    fn other_and_short_lines_are_no_archives() {
        assert!(!parse(b"36 35 0:42 / /mnt rw - fuse.lockboxfs x rw").unwrap().is_archive());
        assert_eq!(parse(b"36 35 0:42 / /mnt"), None);
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn a_daemon_is_found_by_its_numbers_wherever_its_mount_is() {
        let line = |id: u64, minor: u64, point: &str| {
            format!("{id} 1 0:{minor} / {point} rw - fuse.lockbox /a.lbx rw,user_id=7")
        };
        let table: Vec<Mounted> = [line(36, 42, "/new/a"), line(37, 43, "/old/a"), line(38, 42, "/bind")]
            .iter()
            .filter_map(|line| parse(line.as_bytes()))
            .collect();
        let status = Status {
            mount_point: "/old/a".into(),
            mount_id: 36,
            mount_device: makedev(0, 42),
            mount_namespace: 5,
            ..Status::default()
        };
        let found = |status: &Status, namespace| of_daemon(&table, status, namespace).map(|mounted| mounted.id);
        assert_eq!(found(&status, 5), Some(36), "a directory above it was renamed, and another mount has its path");
        assert_eq!(
            found(&Status { mount_id: 39, ..status.clone() }, 5),
            None,
            "it was taken away, and its bind is another one"
        );
        assert_eq!(found(&Status { mount_id: 9, ..status.clone() }, 6), Some(38), "copied into another namespace");
        let copied = Status { mount_id: 9, mount_point: "/new/a".into(), ..status.clone() };
        assert_eq!(found(&copied, 6), Some(36));
        assert_eq!(found(&Status { mount_device: 0, ..status }, 5), Some(37), "an older daemon tells its path alone");
    }

    #[test]
    fn what_is_no_escape_stays() {
        assert_eq!(unescape(br"\\040\400\04\x\"), br"\ \400\04\x\");
    }
}
