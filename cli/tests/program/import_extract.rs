//! Copying trees in and out: everything that an archive keeps of a file comes back, and nothing goes beyond the target.

use std::ffi::OsStr;
use std::fs::{self, File, FileTimes, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use lockbox::archive::Archive;
use lockbox::crypto::Passphrase;
use lockbox::exchange::{self, Filter, ImportOptions, ProblemCause};
use lockbox::fs::Creator;
use lockbox::keys;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, XattrFlags};

use crate::support::{PASSPHRASE, TestDir, await_free, describe, names, noise};

fn set_time(path: &Path, seconds: i64, nanos: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanos };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// A tree with every kind of object that this machine lets us make.
pub(crate) fn make_tree(root: &Path) {
    let mode = |name: &str, bits: u32| fs::set_permissions(root.join(name), fs::Permissions::from_mode(bits)).unwrap();
    fs::create_dir_all(root.join("dir/empty")).unwrap();
    fs::create_dir_all(root.join("closed/inside")).unwrap();
    fs::create_dir_all(root.join("a/deep/er/path/than/most")).unwrap();
    fs::write(root.join("empty"), "").unwrap();
    fs::write(root.join("tiny"), "tiny").unwrap();
    fs::write(root.join("a/deep/er/path/than/most/text"), "line\n".repeat(20_000)).unwrap();
    fs::write(root.join("dir/large"), noise(3_000_001)).unwrap();
    fs::write(root.join("closed/inside/file"), "behind a closed door").unwrap();
    fs::write(root.join(OsStr::from_bytes(b"odd \xff\x01\nname")), "odd").unwrap();

    let sparse = File::create(root.join("sparse")).unwrap();
    sparse.write_all_at(b"begin", 0).unwrap();
    sparse.write_all_at(b"middle", 9 << 20).unwrap();
    sparse.set_len((64 << 20) + 123).unwrap();
    File::create(root.join("hole")).unwrap().set_len(1 << 20).unwrap();

    fs::hard_link(root.join("tiny"), root.join("dir/tiny again")).unwrap();
    fs::hard_link(root.join("tiny"), root.join("and again")).unwrap();
    symlink("tiny", root.join("link")).unwrap();
    symlink("/nowhere/at/all", root.join("dir/dangling")).unwrap();
    symlink("..", root.join("dir/up")).unwrap();
    mknod(&root.join("fifo"), SFlag::S_IFIFO, Mode::from_bits_truncate(0o640), 0).unwrap();
    // Containers often refuse devices.
    let _ = mknod(&root.join("device"), SFlag::S_IFCHR, Mode::from_bits_truncate(0o600), makedev(1, 3));
    for (name, value) in [("user.comment", &b"with\0zero"[..]), ("user.empty", b"")] {
        // Some host file systems have none.
        let _ = rustix::fs::setxattr(root.join("tiny"), name, value, XattrFlags::empty());
        let _ = rustix::fs::setxattr(root.join("dir"), name, value, XattrFlags::empty());
    }
    // u::rw-,u:1234:rwx,g::r--,m::r-x,o::---
    let entries = [(1u16, 6u16, u32::MAX), (2, 7, 1234), (4, 4, u32::MAX), (16, 5, u32::MAX), (32, 0, u32::MAX)];
    let entry =
        |(tag, bits, id): (u16, u16, u32)| [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat();
    let acl = [vec![2, 0, 0, 0], entries.map(entry).concat()].concat();
    for (name, path) in [("access", "dir/large"), ("access", "fifo"), ("access", "dir"), ("default", "dir")] {
        let _ = rustix::fs::setxattr(root.join(path), format!("system.posix_acl_{name}"), &acl, XattrFlags::empty());
    }
    if nix::unistd::geteuid().is_root() {
        let _ = rustix::fs::lsetxattr(root.join("link"), "trusted.mark", b"root's", XattrFlags::empty());
        nix::unistd::chown(&root.join("dir/large"), Some(12_345.into()), Some(54_321.into())).unwrap();
    }
    mode("tiny", 0o4751);
    mode("empty", 0o000);
    mode("dir/empty", 0o1777);
    set_time(&root.join("dir/large"), -1_000_000, 999_999_999);
    set_time(&root.join("link"), 1_000_000_000, 1);
    set_time(&root.join("closed/inside"), 5, 6);
    set_time(&root.join("dir"), 1_234_567_890, 123_456_789);
    mode("closed/inside", 0o500);
    mode("closed", if nix::unistd::geteuid().is_root() { 0o000 } else { 0o500 });
}

/// Lets the temporary directory be removed.
pub(crate) fn reopen(root: &Path) {
    for name in ["closed", "closed/inside"] {
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(0o700)).unwrap();
    }
}

#[test]
fn a_tree_comes_back_with_everything() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    make_tree(&work_dir.path("tree"));
    if !nix::unistd::geteuid().is_root() {
        // Its owner cannot read it either.
        fs::set_permissions(work_dir.path("tree/empty"), fs::Permissions::from_mode(0o400)).unwrap();
    }
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    work_dir.run_ok(&["extract", "a.lbx", "--to", "out", "--privileges"]);
    let (before, after) = (describe(&work_dir.path("tree")), describe(&work_dir.path("out/tree")));
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    for (path, object) in &before {
        assert!(object == &after[path], "{}: {:?} {:?}", path.display(), short(object), short(&after[path]));
    }
    assert_eq!(names(&work_dir.path("out")), ["tree"]);
    let blocks = fs::metadata(work_dir.path("out/tree/sparse")).unwrap().blocks();
    assert!(blocks * 512 < 1 << 20, "holes stay holes: {blocks}");
    reopen(&work_dir.path("tree"));
    reopen(&work_dir.path("out/tree"));
}

fn short(object: &crate::support::Object) -> crate::support::Object {
    let mut object = object.clone();
    object.content.truncate(20);
    object
}

#[test]
fn a_part_of_an_archive_is_extracted_under_its_last_name() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::create_dir_all(work_dir.path("tree/sub/dir")).unwrap();
    fs::write(work_dir.path("tree/sub/dir/file"), "content").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree", "--to", "/new/place"]);
    work_dir.run_ok(&["extract", "a.lbx", "new/place/tree/sub/", "/new/place/tree/sub/dir/file", "--to", "out"]);
    assert_eq!(names(&work_dir.path("out")), ["file", "sub"]);
    assert_eq!(fs::read(work_dir.path("out/sub/dir/file")).unwrap(), b"content");
    let output = work_dir.run(&["extract", "a.lbx", "nothing", "--to", "other"]);
    assert_eq!((output.code, output.stderr.as_str()), (2, "lockbox: the archive has no nothing\n"));
    assert!(!work_dir.path("other").exists());
}

#[test]
fn add_and_backup_compress_as_they_are_told() {
    let work_dir = TestDir::new();
    fs::create_dir(work_dir.path("tree")).unwrap();
    fs::write(work_dir.path("tree/text"), include_str!("import_extract.rs").repeat(400)).unwrap();
    let length = |name: &str| fs::metadata(work_dir.path(name)).unwrap().len();
    for level in ["off", "fast", "default", "best"] {
        work_dir.create_archive(&format!("{level}.lbx"));
        work_dir.run_ok(&["add", "--compress", level, &format!("{level}.lbx"), "tree"]);
        let out = format!("out-{level}");
        work_dir.run_ok(&["extract", &format!("{level}.lbx"), "--to", &out]);
        assert_eq!(
            fs::read(work_dir.path("tree/text")).unwrap(),
            fs::read(work_dir.path(&out).join("tree/text")).unwrap()
        );
    }
    assert!(length("off.lbx") > length("fast.lbx") && length("default.lbx") > length("best.lbx"));
    work_dir.create_archive("copy.lbx");
    work_dir.run_ok(&["backup", "--compress", "best", "tree", "copy.lbx"]);
    assert!(length("copy.lbx") < length("default.lbx"));
    let refused = work_dir.run(&["backup", "--compress", "best", "best.lbx", "other.lbx"]);
    assert_eq!(
        (refused.code, refused.stderr.as_str()),
        (1, "lockbox: --compress is for directories; best.lbx is an archive, and is backed up whole\n")
    );
    assert_eq!(work_dir.run(&["add", "--compress", "strong", "off.lbx", "tree"]).code, 1);
}

#[test]
fn adding_merges_directories_and_replaces_files_only_when_told() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::create_dir(work_dir.path("tree")).unwrap();
    fs::write(work_dir.path("tree/one"), "old").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    fs::write(work_dir.path("tree/one"), "new").unwrap();
    fs::write(work_dir.path("tree/two"), "two").unwrap();
    let output = work_dir.run(&["add", "a.lbx", "tree"]);
    assert_eq!(output.code, 2);
    assert_eq!(
        output.stderr,
        "lockbox: tree/one: file exists; use --force to replace it\nlockbox: 1 object was not copied in full; see above\n"
    );
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "tree/one", "tree/two"]), b"oldtwo");
    work_dir.run_ok(&["add", "a.lbx", "tree", "--force"]);
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "tree/one", "tree/two"]), b"newtwo");
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx", "tree"]), b"one\ntwo\n");
}

#[test]
fn what_cannot_be_read_is_named_and_the_rest_is_added() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let output = work_dir.run(&["add", "a.lbx", "missing", "pass"]);
    assert_eq!(output.code, 22);
    assert!(
        output.stderr.starts_with("lockbox: missing: cannot read: No such file or directory\n"),
        "{}",
        output.stderr
    );
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx"]), b"pass\n");
    let output = work_dir.run(&["add", "a.lbx", "a.lbx"]);
    assert_eq!(output.code, 2);
    assert!(output.stderr.starts_with("lockbox: a.lbx: the archive cannot hold itself\n"), "{}", output.stderr);
}

/// The copy is kept as it was read, and the user is told.
#[test]
fn a_file_that_changes_meanwhile_is_reported() {
    let work_dir = TestDir::new();
    let path = work_dir.create_archive("a.lbx");
    fs::create_dir(work_dir.path("tree")).unwrap();
    fs::write(work_dir.path("tree/log"), vec![b'a'; 3 << 20]).unwrap();
    fs::write(work_dir.path("tree/restored"), vec![b'a'; 3 << 20]).unwrap();
    fs::write(work_dir.path("tree/other"), "other").unwrap();
    let key = keys::unlock(&path, &Passphrase::new(PASSPHRASE.into())).unwrap();
    let archive = Archive::open(&path, &key, &Default::default()).unwrap();
    let options = ImportOptions {
        to: Vec::new(),
        name: None,
        follow: false,
        replace: false,
        creator: Creator { uid: 0, gid: 0, umask: None },
        filter: Filter::default(),
        one_file_system: false,
        mirror: None,
    };
    let (log, restored, probe) = (work_dir.path("tree/log"), work_dir.path("tree/restored"), work_dir.path("probe"));
    // Before Linux 6.13 change times advance once per tick, and changes in one tick are alike.
    let changed_at = |path: &Path| path.metadata().map(|file| (file.ctime(), file.ctime_nsec())).unwrap();
    loop {
        fs::write(&probe, "probe").unwrap();
        if changed_at(&probe) != changed_at(&restored) {
            break;
        }
        std::thread::yield_now();
    }
    let (mut appended, mut calls) = (false, 0);
    let report = exchange::import(
        archive.file_system(),
        archive.identity(),
        &[work_dir.path("tree")],
        &options,
        &mut |progress| {
            if progress.path.ends_with(b"/log") && progress.bytes > 0 && !appended {
                appended = true;
                OpenOptions::new().append(true).open(&log).unwrap().write_all(b"more").unwrap();
            }
            calls += u32::from(progress.path.ends_with(b"/restored"));
            // With the same size and modification time as before; the first call precedes the file.
            if progress.path.ends_with(b"/restored") && calls == 2 {
                let file = OpenOptions::new().write(true).open(&restored).unwrap();
                let time = file.metadata().unwrap().modified().unwrap();
                file.write_all_at(b"new", (3 << 20) - 3).unwrap();
                file.set_modified(time).unwrap();
            }
            Ok(())
        },
    )
    .unwrap();
    assert_eq!(report.copied.files, 3);
    let mut changed: Vec<_> = report.problems.iter().map(|problem| problem.path.as_slice()).collect();
    changed.sort_unstable();
    assert_eq!(changed.len(), 2);
    assert!(changed[0].ends_with(b"tree/log") && changed[1].ends_with(b"tree/restored"));
    assert!(report.problems.iter().all(|problem| matches!(problem.cause, ProblemCause::Changed)));
    archive.close().unwrap();
    await_free(&path);
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "tree/log"]), vec![b'a'; 3 << 20]);
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "tree/other"]), b"other");
}

#[test]
fn links_lead_nowhere_out_of_the_target() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::create_dir(work_dir.path("trap")).unwrap();
    fs::write(work_dir.path("trap/file"), "from the archive").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "trap"]);
    fs::create_dir(work_dir.path("outside")).unwrap();
    fs::create_dir(work_dir.path("out")).unwrap();
    symlink("../outside", work_dir.path("out/trap")).unwrap();
    assert_eq!(work_dir.run(&["extract", "a.lbx", "--to", "out"]).code, 2);
    assert_eq!(work_dir.run(&["extract", "a.lbx", "--to", "out", "--force"]).code, 2);
    assert!(names(&work_dir.path("outside")).is_empty());
    assert_eq!(names(&work_dir.path("out")), ["trap"]);
    // A source that is a link is kept as one, unless it is to be followed.
    symlink("trap", work_dir.path("shortcut")).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "shortcut"]);
    work_dir.run_ok(&["add", "a.lbx", "shortcut", "--follow", "--to", "followed"]);
    assert_eq!(
        work_dir.run_ok(&["ls", "-R", "a.lbx", "followed"]),
        b"followed:\nshortcut\n\nfollowed/shortcut:\nfile\n"
    );
    assert!(String::from_utf8(work_dir.run_ok(&["ls", "-l", "a.lbx"])).unwrap().contains("shortcut -> trap\n"));
}

#[test]
fn programs_can_read_what_is_printed() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::create_dir(work_dir.path("tree")).unwrap();
    let odd = work_dir.path("tree").join(OsStr::from_bytes(b"odd\xff"));
    let file = File::create(&odd).unwrap();
    file.write_all_at(b"12345", 0).unwrap();
    file.set_times(FileTimes::new().set_modified(UNIX_EPOCH + Duration::new(1_709_209_296, 7))).unwrap();
    fs::set_permissions(&odd, fs::Permissions::from_mode(0o640)).unwrap();
    let json = |arguments: &[&str]| -> Vec<serde_json::Value> {
        let out = String::from_utf8(work_dir.run_ok(arguments)).unwrap();
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let added = &json(&["add", "a.lbx", "tree", "--json"])[0];
    assert_eq!((&added["files"], &added["directories"], &added["bytes"]), (&1.into(), &1.into(), &5.into()));
    let listed = json(&["ls", "-R", "--json", "a.lbx"]);
    assert_eq!(listed.len(), 2);
    assert_eq!((&listed[0]["path"], &listed[0]["type"]), (&"/tree".into(), &"directory".into()));
    assert_eq!(listed[1]["name_hex"], "6f6464ff");
    assert_eq!((&listed[1]["mode"], &listed[1]["size"]), (&"0640".into(), &5.into()));
    assert_eq!(listed[1]["mtime"], "2024-02-29T12:21:36.000000007Z");
    let info = &json(&["info", "--json", "a.lbx"])[0];
    assert_eq!((&info["format_version"], &info["closed"]), (&1.into(), &true.into()));
    assert_eq!(info["key_slots"][0]["kind"], "passphrase");
    let checked = &json(&["check", "--full", "--json", "a.lbx"])[0];
    assert_eq!((&checked["sound"], &checked["inodes"]), (&true.into(), &3.into()));
    let extracted = &json(&["extract", "a.lbx", "--to", "out", "--json"])[0];
    assert_eq!((&extracted["files"], &extracted["bytes"]), (&1.into(), &5.into()));
    let long = work_dir.run_ok(&["ls", "-l", "a.lbx", "tree"]);
    assert!(long.ends_with(b" 5 2024-02-29 12:21:36 UTC odd\xff\n"), "{}", String::from_utf8_lossy(&long));
}
