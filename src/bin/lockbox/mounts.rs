//! Reads the kernel's table of mounts, as far as archives are in it.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

/// The file system type as the kernel shows it.
const TYPE: &str = "fuse.lockbox";

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// The kernel's number of the mount, which another one gets when this one is gone.
    pub(crate) id: u64,
    /// That of the mount on which it lies.
    pub(crate) parent: u64,
    /// The file system's device number, as `major:minor`: that of a bind mount is the same.
    pub(crate) device: String,
    pub(crate) point: PathBuf,
    /// The archive, as it was named at mounting.
    pub(crate) source: PathBuf,
    /// The user who mounted it.
    pub(crate) user: Option<u32>,
    file_system: String,
}

impl Mounted {
    pub(crate) fn is_archive(&self) -> bool {
        self.file_system == TYPE
    }
}

/// Every mount of this process's namespace, in the order of mounting.
pub(crate) fn all() -> Vec<Mounted> {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    table.split(|&b| b == b'\n').filter_map(parse).collect()
}

/// The mounts of archives that this user made, for root those of all users.
pub(crate) fn mine() -> Vec<Mounted> {
    let me = geteuid();
    let mine = |mounted: &Mounted| mounted.is_archive() && (me.is_root() || mounted.user == Some(me.as_raw()));
    all().into_iter().filter(mine).collect()
}

/// The mount on top at `point`, which must be an absolute path without links.
pub(crate) fn at(point: &Path) -> Option<Mounted> {
    all().into_iter().rfind(|mounted| mounted.point == point)
}

pub(crate) fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|&b| b == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, parent) = (number()?, number()?);
    let device = String::from_utf8_lossy(fields.next()?).into_owned();
    let point = path(fields.nth(1)?);
    // Optional fields end at a dash; type, source and the file system's options follow.
    let mut rest = fields.skip_while(|&field| field != b"-").skip(1);
    let file_system = String::from_utf8_lossy(rest.next()?).into_owned();
    let source = path(rest.next()?);
    let options = String::from_utf8_lossy(rest.next().unwrap_or_default()).into_owned();
    let user = options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok());
    Some(Mounted { id, parent, device, point, source, user, file_system })
}

/// Another mount of the same file system, such as the one that `mounted` is a bind of.
pub(crate) fn twin<'a>(table: &'a [Mounted], mounted: &Mounted) -> Option<&'a Mounted> {
    table.iter().find(|other| other.is_archive() && other.device == mounted.device && other.id != mounted.id)
}

fn path(field: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescape(field)))
}

/// Undoes the kernel's `\ooo` for space, tab, newline and backslash.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut parts = field.split(|&b| b == b'\\');
    let mut bytes = parts.next().unwrap_or_default().to_vec();
    for part in parts {
        let octal = part.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend_from_slice(&part[3..]);
            }
            None => bytes.extend_from_slice(part),
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
        assert_eq!((mounted.id, mounted.parent, &*mounted.device), (36, 35, "0:42"));
        assert!(mounted.is_archive());
    }

    #[test]
    fn other_and_short_lines_are_no_archives() {
        assert!(!parse(b"36 35 0:42 / /mnt rw - fuse.lockboxfs x rw").unwrap().is_archive());
        assert_eq!(parse(b"36 35 0:42 / /mnt"), None);
        assert_eq!(parse(b""), None);
    }
}
