//! Another user may change the directory of an archive: files created by this program are
//! identified by descriptor, never by path.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::super::{Archive, CompactOptions, CompactStep, CreateOptions, OpenOptions};
use super::passphrase;
use super::sample::{Expected, expected, noise, put};
use crate::crypto::kdf::KdfCost;
use crate::error::{Error, Result};
use crate::format::ROOT_INO;
use crate::fs::Creator;
use crate::keys::{self, UnlockedKey};

/// Owner of the archive when root runs the tests.
const SOMEBODY: u32 = 4321;

/// World-readable archive, of another user if we are root, and a private file of ours that must not
/// be touched.
struct Place {
    directory: tempfile::TempDir,
    key: UnlockedKey,
    content: Expected,
}

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("box")).unwrap();
        let path = directory.path().join("box/a.lbx");
        let creator = Creator { uid: 1000, gid: 1000, umask: None };
        Archive::create(&path, &passphrase("p"), &CreateOptions { kdf: KdfCost::TEST, creator }).unwrap();
        let key = keys::unlock(&path, &passphrase("p")).unwrap();
        let archive = Archive::open(&path, &key, &OpenOptions::default()).unwrap();
        put(archive.file_system(), ROOT_INO, b"file", &noise(1, 100_000));
        let content = expected(archive.file_system());
        archive.close().unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o664)).unwrap();
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(SOMEBODY), Some(SOMEBODY)).unwrap();
        }
        fs::write(directory.path().join("victim"), "private").unwrap();
        fs::set_permissions(directory.path().join("victim"), fs::Permissions::from_mode(0o600)).unwrap();
        Place { directory, key, content }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Compacts while `swap` is called once, at `at`.
    fn compact(&self, at: CompactStep, swap: &dyn Fn()) -> Result<()> {
        let mut step = |step| {
            if step == at {
                swap();
            }
            Ok(())
        };
        Archive::compact(&self.path("box/a.lbx"), &self.key, &CompactOptions::default(), &mut step).map(drop)
    }

    /// Returns the name of the unfinished file in `directory`.
    fn unfinished(&self, directory: &str) -> OsString {
        let names = fs::read_dir(self.path(directory)).unwrap().map(|entry| entry.unwrap().file_name());
        names.into_iter().find(|name| name.to_string_lossy().contains(".compact-")).unwrap()
    }

    fn assert_victim_untouched(&self) {
        let metadata = self.path("victim").symlink_metadata().unwrap();
        let own = nix::unistd::geteuid().as_raw();
        assert_eq!((metadata.mode() & 0o7777, metadata.uid(), metadata.nlink()), (0o600, own, 1));
        assert_eq!(fs::read(self.path("victim")).unwrap(), b"private");
    }

    fn assert_whole(&self, path: &Path) {
        let archive = Archive::open(path, &self.key, &OpenOptions::default()).unwrap();
        assert!(expected(archive.file_system()) == self.content);
        archive.close().unwrap();
    }
}

#[test]
fn a_link_in_place_of_the_new_file_gives_its_target_away_to_nobody() {
    for at in [CompactStep::Created, CompactStep::Verified] {
        println!("{at:?}");
        let place = Place::new();
        let before = fs::read(place.path("box/a.lbx")).unwrap();
        let swapped = place.compact(at, &|| {
            let new = place.path("box").join(place.unfinished("box"));
            fs::rename(&new, place.path("box/away")).unwrap();
            symlink(place.path("victim"), &new).unwrap();
        });
        place.assert_victim_untouched();
        assert!(matches!(&swapped, Err(Error::InUse(_))), "{swapped:?}");
        assert!(fs::read(place.path("box/a.lbx")).unwrap() == before);
    }
}

#[test]
fn what_was_put_in_place_of_the_new_file_does_not_become_the_archive() {
    let place = Place::new();
    let before = fs::read(place.path("box/a.lbx")).unwrap();
    let swapped = place.compact(CompactStep::Prepared, &|| {
        let new = place.path("box").join(place.unfinished("box"));
        fs::rename(&new, place.path("box/away")).unwrap();
        fs::write(&new, "somebody's").unwrap();
    });
    assert!(matches!(&swapped, Err(Error::InUse(_))), "{swapped:?}");
    assert!(fs::read(place.path("box/a.lbx")).unwrap() == before);
    let foreign = place.path("box").join(place.unfinished("box"));
    assert_eq!(fs::read(foreign).unwrap(), b"somebody's", "what is not ours stays");
    place.assert_whole(&place.path("box/a.lbx"));
}

/// The directory is moved away, and another one with the same names takes its path.
#[test]
fn another_directory_under_the_path_is_left_alone() {
    for at in [CompactStep::Created, CompactStep::Verified, CompactStep::Prepared] {
        println!("{at:?}");
        let place = Place::new();
        fs::create_dir(place.path("other")).unwrap();
        let compacted = place.compact(at, &|| {
            for name in [place.unfinished("box"), "a.lbx".into()] {
                fs::hard_link(place.path("victim"), place.path("other").join(&name)).unwrap();
            }
            fs::rename(place.path("box"), place.path("moved")).unwrap();
            symlink("other", place.path("box")).unwrap();
        });
        compacted.unwrap();
        assert_eq!(fs::read_dir(place.path("other")).unwrap().count(), 2, "nothing was removed or replaced");
        fs::remove_dir_all(place.path("other")).unwrap();
        place.assert_victim_untouched();
        assert_eq!(fs::read_dir(place.path("moved")).unwrap().count(), 1);
        let metadata = place.path("moved/a.lbx").symlink_metadata().unwrap();
        assert_eq!(metadata.mode() & 0o7777, 0o664);
        if nix::unistd::geteuid().is_root() {
            assert_eq!(metadata.uid(), SOMEBODY);
        }
        place.assert_whole(&place.path("moved/a.lbx"));
    }
}
