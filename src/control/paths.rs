//! Paths in the status of a daemon: text, and additionally bytes if the path is not UTF-8.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::{PathBytes, Status};

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
