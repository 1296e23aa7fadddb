//! Names and paths in messages: bytes, encoded as hexadecimal digits. The encoding is lossless and
//! at most twice as long. Paths in the status of a daemon are text, and additionally bytes if the
//! path is not UTF-8.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{MAX_TEXT, Status};

/// Longest name of a snapshot, in bytes.
pub(super) const MAX_NAME: usize = 255;
/// Longest path, in bytes: two of them and the rest of a message fit into a line. The kernel's
/// limit is 4096.
const MAX_PATH: usize = 12 << 10;

/// Name of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotName(pub Vec<u8>);

/// Path relative to the root of the mount, without a leading slash.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TreePath(pub Vec<u8>);

/// Path of the host that is not UTF-8.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PathBytes(pub Vec<u8>);

impl TreePath {
    /// Returns whether the path is short enough to be sent.
    pub fn fits(&self) -> bool {
        self.0.len() <= MAX_PATH
    }
}

/// Implements the hexadecimal conversions of a type, with its maximum length in bytes.
macro_rules! as_digits {
    ($($type:ident: $most:expr),+) => { $(
        impl From<$type> for String {
            fn from(sent: $type) -> String {
                digits(&sent.0)
            }
        }

        impl TryFrom<String> for $type {
            type Error = &'static str;

            fn try_from(digits: String) -> Result<$type, &'static str> {
                bytes(&digits, $most).map($type)
            }
        }
    )+ };
}

as_digits!(SnapshotName: MAX_NAME, TreePath: MAX_PATH, PathBytes: MAX_TEXT);

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(digits: &str, most: usize) -> Result<Vec<u8>, &'static str> {
    if digits.len() > 2 * most || !digits.len().is_multiple_of(2) {
        return Err("a name of such a length does not exist");
    }
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|digit| digit as u8);
    let bytes = digits.as_bytes().chunks_exact(2).map(|pair| Some(digit(&pair[0])? << 4 | digit(&pair[1])?));
    bytes.collect::<Option<Vec<u8>>>().ok_or("a name is hexadecimal digits")
}

impl Status {
    /// Returns the path or address of the archive.
    pub fn archive_path(&self) -> PathBuf {
        path(&self.archive, self.archive_hex.as_ref())
    }

    pub fn set_archive(&mut self, archive: &Path) {
        (self.archive, self.archive_hex) = forms(archive);
    }

    pub fn mount_point_path(&self) -> PathBuf {
        path(&self.mount_point, self.mount_point_hex.as_ref())
    }

    pub fn set_mount_point(&mut self, point: &Path) {
        (self.mount_point, self.mount_point_hex) = forms(point);
    }
}

fn path(text: &str, bytes: Option<&PathBytes>) -> PathBuf {
    bytes.map_or_else(|| PathBuf::from(text), |bytes| PathBuf::from(OsString::from_vec(bytes.0.clone())))
}

fn forms(path: &Path) -> (String, Option<PathBytes>) {
    let bytes = path.to_str().is_none().then(|| PathBytes(path.as_os_str().as_bytes().to_vec()));
    (path.to_string_lossy().into_owned(), bytes)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn a_path_comes_back_whatever_its_bytes_are() {
        for path in [&b"/mnt/a"[..], b"/mnt/caf\xe9", b"/\xff\xfe/\n"] {
            let path = Path::new(OsStr::from_bytes(path));
            let mut status = Status::default();
            status.set_archive(path);
            status.set_mount_point(path);
            let line = serde_json::to_string(&status).unwrap();
            assert_eq!(line.contains("_hex"), path.to_str().is_none(), "{line}");
            let back: Status = serde_json::from_str(&line).unwrap();
            assert_eq!((back.archive_path(), back.mount_point_path()), (path.to_owned(), path.to_owned()));
        }
    }

    /// A path of text only is what an older daemon says.
    #[test]
    fn an_older_daemon_is_understood_and_a_longer_path_is_not() {
        let status: Status = serde_json::from_str(r#"{"archive":"/a.lbx","mount_point":"/m"}"#).unwrap();
        assert_eq!((status.archive_path(), status.mount_point_path()), ("/a.lbx".into(), "/m".into()));
        assert_eq!((status.mount_id, status.mount_device), (0, 0));
        let long = format!(r#"{{"archive":"/a","archive_hex":"{}"}}"#, "ff".repeat(5000));
        assert!(serde_json::from_str::<Status>(&long).is_err());
    }
}
