//! Counted totals equal the final progress of a copy, regardless of skipped objects.

use std::fs::File;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::sample::{create_on, header_bytes, noise};
use crate::exchange::{
    ExtractOptions, FileTotals, Filter, ImportOptions, Progress, count_archive_files, count_host_files, export_tar,
    extract, import, plan_mirror,
};
use crate::fs::{Creator, FileSystem};
use crate::storage::MemoryStorage;

/// Without excluded files: two small files, one with holes, one with two hard links, and one in
/// another directory.
const WHOLE: FileTotals = FileTotals { files: 5, bytes: 12_000 + 7 + HOLES + LARGE + 5 };
const HOLES: u64 = 8 << 20;
const LARGE: u64 = 3 << 20;

fn options() -> ImportOptions {
    let creator = Creator { uid: 0, gid: 0, umask: None };
    let filter = Filter::new(|path, _| path.ends_with(b"left-out"));
    ImportOptions {
        to: b"/".to_vec(),
        name: None,
        follow: false,
        replace: false,
        creator,
        filter,
        one_file_system: false,
        mirror: None,
    }
}

fn tree(host: &Path) -> PathBuf {
    let top = host.join("top");
    std::fs::create_dir_all(top.join("below/left-out")).unwrap();
    std::fs::write(top.join("small"), noise(1, 12_000)).unwrap();
    std::fs::write(top.join("left-out"), noise(2, 500)).unwrap();
    std::fs::write(top.join("below/left-out/other"), noise(3, 500)).unwrap();
    std::fs::write(top.join("below/few"), "5 345").unwrap();
    std::fs::write(top.join("large"), noise(4, LARGE as usize)).unwrap();
    std::fs::hard_link(top.join("large"), top.join("below/large")).unwrap();
    let holes = File::create(top.join("holes")).unwrap();
    holes.set_len(HOLES).unwrap();
    holes.write_all_at(b"data", HOLES / 2).unwrap();
    std::fs::write(top.join("seven"), "7 of it").unwrap();
    symlink("large", top.join("link")).unwrap();
    top
}

/// Records the progress of a copy, which never decreases and never exceeds the total.
fn watched(most: FileTotals, last: &mut FileTotals) -> impl FnMut(&Progress<'_>) {
    move |progress| {
        let FileTotals { files, bytes } = progress.passed;
        assert!(last.files <= files && files <= most.files, "{files} of {most:?}");
        assert!(last.bytes <= bytes && bytes <= most.bytes, "{bytes} of {most:?}");
        *last = progress.passed;
    }
}

/// Returns the progress of an import before the last object, which is not a file.
fn imported(fs: &FileSystem, sources: &[PathBuf], options: &ImportOptions) -> FileTotals {
    let most = count_host_files(sources, options, &|| true).unwrap();
    let mut last = FileTotals::default();
    let mut watch = watched(most, &mut last);
    import(fs, None, sources, options, &mut |progress| {
        watch(progress);
        Ok(())
    })
    .unwrap();
    drop(watch);
    assert_eq!(last, most);
    last
}

#[test]
fn a_copy_passes_what_was_counted() {
    let host = tempfile::tempdir().unwrap();
    // The last object is a directory, so all files are completed when the copy reaches it.
    let end = host.path().join("z-end");
    std::fs::create_dir(&end).unwrap();
    let sources = [tree(host.path()), end];
    let fs = create_on(Arc::new(MemoryStorage::from_contents(header_bytes())), 1);
    assert_eq!(imported(&fs, &sources, &options()), WHOLE);
    // Everything exists: nothing is copied, and each file is completed.
    assert_eq!(imported(&fs, &sources, &options()), WHOLE);
    std::fs::write(sources[0].join("seven"), "8 by now").unwrap();
    let mut mirror = ImportOptions { filter: Filter::default(), ..options() };
    mirror.mirror = Some(plan_mirror(&fs, &sources, &mirror, None).unwrap());
    let all = FileTotals { files: WHOLE.files + 2, bytes: WHOLE.bytes + 1 + 1000 };
    assert_eq!(imported(&fs, &sources, &mirror), all);

    let stored = |paths: &[Vec<u8>], filter: &Filter| count_archive_files(&fs, paths, filter, &|| true).unwrap();
    for (paths, filter, most) in [
        (vec![], Filter::default(), all),
        (vec![], options().filter, FileTotals { bytes: WHOLE.bytes + 1, ..WHOLE }),
        (vec![b"top".to_vec(), b"z-end".to_vec()], Filter::default(), all),
        (vec![b"top/below".to_vec(), b"z-end".to_vec()], options().filter, FileTotals { files: 2, bytes: LARGE + 5 }),
    ] {
        assert_eq!(stored(&paths, &filter), most);
        let mut last = FileTotals::default();
        export_tar(&fs, &paths, &filter, &mut std::io::sink(), &mut watched(most, &mut last)).unwrap();
        assert_eq!(last, most);
        let to = tempfile::tempdir().unwrap();
        let extracting = ExtractOptions { to: to.path().into(), name: None, replace: false, filter, privileges: false };
        let mut last = FileTotals::default();
        let mut watch = watched(most, &mut last);
        extract(&fs, &paths, &extracting, &mut |progress| {
            watch(progress);
            Ok(())
        })
        .unwrap();
        drop(watch);
        assert_eq!(last, most);
    }
}

#[test]
fn a_count_ends_when_nobody_wants_it_and_in_a_tree_that_is_too_deep_for_it() {
    let host = tempfile::tempdir().unwrap();
    let top = tree(host.path());
    assert_eq!(count_host_files(std::slice::from_ref(&top), &options(), &|| false), None);
    let fs = create_on(Arc::new(MemoryStorage::from_contents(header_bytes())), 1);
    import(&fs, None, std::slice::from_ref(&top), &options(), &mut |_| Ok(())).unwrap();
    assert_eq!(count_archive_files(&fs, &[], &Filter::default(), &|| false), None);
    // A missing source is only missing in the sum.
    let missing = host.path().join("missing");
    assert_eq!(
        count_host_files(&[missing, top.join("seven")], &options(), &|| true),
        Some(FileTotals { files: 1, bytes: 7 })
    );
    assert_eq!(
        count_archive_files(&fs, &[b"missing".to_vec()], &Filter::default(), &|| true),
        Some(FileTotals::default())
    );
    let deep = (0..150).fold(host.path().join("deep"), |path, _| path.join("d"));
    std::fs::create_dir_all(&deep).unwrap();
    assert_eq!(count_host_files(&[host.path().join("deep")], &options(), &|| true), None);
}
