//! Compaction: the same content in less space, the old file untouched until the rename, and one of the two at every step.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::super::{Archive, CompactOptions, CompactStep, CreateOptions, OpenOptions, UnlockedKey};
use super::passphrase;
use super::sample::{Expected, expected, noise, put};
use crate::crypto::kdf::KdfCost;
use crate::error::{Error, Result};
use crate::format::{Generation, ROOT_INO};
use crate::fs::Creator;

struct Place {
    directory: tempfile::TempDir,
    key: UnlockedKey,
    content: Expected,
    generation: Generation,
}

impl Place {
    /// An archive with holes: half of what was added is deleted again.
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.lbx");
        let creator = Creator { uid: 1000, gid: 1000, umask: None };
        Archive::create(&path, &passphrase("p"), &CreateOptions { kdf: KdfCost::TEST, creator }).unwrap();
        let key = Archive::unlock(&path, &passphrase("p")).unwrap();
        let archive = Archive::open(&path, &key, &OpenOptions::default()).unwrap();
        let fs = archive.file_system();
        for n in 0..40u64 {
            put(fs, ROOT_INO, format!("large{n}").as_bytes(), &noise(n, 100_000));
            put(fs, ROOT_INO, format!("small{n}").as_bytes(), &noise(n, 700));
        }
        fs.sync().unwrap();
        for n in (0..40).filter(|n| n % 2 == 0) {
            fs.unlink(ROOT_INO, format!("large{n}").as_bytes()).unwrap();
            fs.unlink(ROOT_INO, format!("small{n}").as_bytes()).unwrap();
        }
        let cut = fs.lookup(ROOT_INO, b"large1").unwrap().ino;
        fs.write(cut, 30_000, &noise(3, 5000)).unwrap();
        let content = expected(fs);
        archive.close().unwrap();
        let archive = Archive::open(&path, &key, &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
        let generation = archive.info().unwrap().generation;
        Place { directory, key, content, generation }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("a.lbx")
    }

    fn compact(&self, options: CompactOptions, step: &mut dyn FnMut(CompactStep) -> Result<()>) -> Result<()> {
        Archive::compact(&self.path(), &self.key, &options, step).map(drop)
    }

    /// Opens for writing, as after a crash, compares and checks.
    fn assert_whole(&self, path: &Path) -> Generation {
        let archive = Archive::open(path, &self.key, &OpenOptions::default()).unwrap();
        assert!(expected(archive.file_system()) == self.content);
        let report = archive.check(true, &mut |_, _| {}).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        let generation = archive.info().unwrap().generation;
        archive.close().unwrap();
        generation
    }

    fn names(&self) -> usize {
        fs::read_dir(self.directory.path()).unwrap().count()
    }
}

#[test]
fn a_compacted_archive_is_smaller_and_goes_on_from_the_old_one() {
    let place = Place::new();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o640)).unwrap();
    let report = Archive::compact(&place.path(), &place.key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
    assert!(report.length_after < report.length_before, "{report:?}");
    assert_eq!(place.names(), 1);
    assert_eq!(place.path().metadata().unwrap().permissions().mode() & 0o777, 0o640);
    // The passphrase still opens it.
    assert!(Archive::unlock(&place.path(), &passphrase("p")).is_ok());
    assert!(place.assert_whole(&place.path()) > place.generation);
}

/// At every step the directory is copied as a killed process would leave it.
#[test]
fn a_kill_at_any_step_leaves_the_old_or_the_new_archive() {
    let place = Place::new();
    let copies = tempfile::tempdir().unwrap();
    let mut steps = Vec::new();
    let mut last = None;
    place
        .compact(CompactOptions::default(), &mut |step| {
            // One of each kind, and every eighth while it copies.
            let kind = std::mem::discriminant(&step);
            if last != Some(kind) || steps.len() % 8 == 0 {
                let copy = copies.path().join(steps.len().to_string());
                fs::create_dir(&copy).unwrap();
                for entry in fs::read_dir(place.directory.path()).unwrap() {
                    let entry = entry.unwrap();
                    fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
                }
            }
            last = Some(kind);
            steps.push(step);
            Ok(())
        })
        .unwrap();
    assert!(steps.contains(&CompactStep::Prepared) && steps.last() == Some(&CompactStep::Replaced));
    let mut looked_at = 0;
    for entry in fs::read_dir(copies.path()).unwrap() {
        let copy = entry.unwrap().path();
        place.assert_whole(&copy.join("a.lbx"));
        // The next run removes what this one left.
        Archive::compact(&copy.join("a.lbx"), &place.key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
        assert_eq!(fs::read_dir(&copy).unwrap().count(), 1);
        looked_at += 1;
    }
    assert!(looked_at >= 7, "only {looked_at} steps");
}

#[test]
fn a_compaction_that_is_stopped_leaves_everything_as_it_was() {
    let place = Place::new();
    let before = fs::read(place.path()).unwrap();
    for stop in [CompactStep::Created, CompactStep::Copied, CompactStep::Verified, CompactStep::Prepared] {
        let stopped = place.compact(CompactOptions::default(), &mut |step| {
            if step == stop { Err(Error::invalid("stopped")) } else { Ok(()) }
        });
        assert!(matches!(stopped, Err(Error::Invalid(_))), "{stop:?}");
        assert_eq!(place.names(), 1, "{stop:?}");
        assert!(fs::read(place.path()).unwrap() == before, "{stop:?}");
    }
    place.compact(CompactOptions { dry_run: true, ..CompactOptions::default() }, &mut |_| panic!("a step")).unwrap();
    assert!(fs::read(place.path()).unwrap() == before);
}

#[test]
fn links_are_followed_and_further_names_refused() {
    let place = Place::new();
    let (link, name) = (place.directory.path().join("link"), place.directory.path().join("name"));
    std::os::unix::fs::symlink("a.lbx", &link).unwrap();
    Archive::compact(&link, &place.key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
    assert!(link.symlink_metadata().unwrap().is_symlink());
    fs::hard_link(place.path(), &name).unwrap();
    let refused = place.compact(CompactOptions::default(), &mut |_| Ok(()));
    assert!(matches!(&refused, Err(Error::Invalid(text)) if text.contains("--break-links")), "{refused:?}");
    place.compact(CompactOptions { break_links: true, ..CompactOptions::default() }, &mut |_| Ok(())).unwrap();
    place.assert_whole(&name);
    place.assert_whole(&place.path());
}

#[test]
fn an_open_archive_and_one_with_snapshots_are_refused() {
    let place = Place::new();
    let archive = Archive::open(&place.path(), &place.key, &OpenOptions::default()).unwrap();
    assert!(matches!(place.compact(CompactOptions::default(), &mut |_| Ok(())), Err(Error::InUse(_))));
    archive.file_system().volume.take_snapshot(b"monday").unwrap();
    archive.close().unwrap();
    let refused = place.compact(CompactOptions::default(), &mut |_| Ok(()));
    assert!(matches!(&refused, Err(Error::Unsupported(text)) if text.contains("monday")), "{refused:?}");
    assert_eq!(place.names(), 1);
}
