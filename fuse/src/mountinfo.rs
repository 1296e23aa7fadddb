//! Reads the kernel's table of mounts.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use nix::sys::stat::makedev;

/// The file system type as the kernel shows it.
pub const TYPE: &str = "fuse.lockbox";

/// One line of /proc/self/mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// The kernel's number of the mount.
    pub id: u64,
    pub device: u64,
    pub point: PathBuf,
    pub file_system: String,
    /// Who made a FUSE mount.
    pub user: Option<u32>,
}

/// The mount on top at `point`, which must be an absolute path without links.
pub fn at(point: &Path) -> io::Result<Option<Mounted>> {
    Ok(table()?.into_iter().rfind(|m| m.point == point))
}

/// All mounts, a later one over an earlier one at the same point.
pub fn table() -> io::Result<Vec<Mounted>> {
    let table = fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|&b| b == b'\n').filter_map(parse).collect())
}

fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|&b| b == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let device = std::str::from_utf8(fields.nth(1)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let device = makedev(major.parse().ok()?, minor.parse().ok()?);
    let point = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
    // Optional fields end at a dash; type, source and the file system's options follow.
    let mut rest = fields.skip_while(|&field| field != b"-").skip(1);
    let file_system = String::from_utf8_lossy(rest.next()?).into_owned();
    let options = String::from_utf8_lossy(rest.nth(1).unwrap_or_default()).into_owned();
    let user = options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok());
    Some(Mounted { id, device, point, file_system, user })
}

/// Undoes the kernel's `\ooo` for space, tab, newline and backslash.
pub(crate) fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal = |b: &u8| (b'0'..=b'7').contains(b).then(|| u32::from(b - b'0'));
        if *first == b'\\'
            && let [a, b, c, after @ ..] = tail
            && let (Some(a), Some(b), Some(c)) = (octal(a), octal(b), octal(c))
            && let Ok(byte) = u8::try_from(a << 6 | b << 3 | c)
        {
            bytes.push(byte);
            rest = after;
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_escapes_and_optional_fields_is_read() {
        let line =
            br"36 35 0:42 / /mnt/a\040b rw,nosuid shared:1 master:2 - fuse.lockbox /x.lbx rw,user_id=7,group_id=0";
        let mounted = parse(line).unwrap();
        assert_eq!(mounted.point, Path::new("/mnt/a b"));
        assert_eq!((mounted.id, mounted.device), (36, makedev(0, 42)));
        assert_eq!(mounted.file_system, TYPE);
        assert_eq!(mounted.user, Some(7));
    }

    #[test]
    fn a_short_line_is_skipped() {
        assert_eq!(parse(b"36 35 0:42 / /mnt"), None);
        assert_eq!(parse(b""), None);
    }
}
