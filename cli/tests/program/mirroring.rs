//! `lockbox add --mirror`, and patterns: the archive becomes what the source is, and nothing goes that nobody meant to go.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use lockbox::archive::Archive;
use lockbox::crypto::Passphrase;
use lockbox::exchange::{self, Filter, ImportOptions, ImportReport};
use lockbox::fs::Creator;
use lockbox::keys;
use nix::sys::stat::{Mode, SFlag, mknod};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, XattrFlags};
use serde_json::Value;

use crate::support::{Dice, PASSPHRASE, TestDir, await_free, describe};

fn set_time(path: &Path, seconds: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: 7 };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

fn json(work_dir: &TestDir, arguments: &[&str]) -> Value {
    serde_json::from_slice(&work_dir.run_ok(arguments)).unwrap()
}

/// Inode numbers by path: the same number is the same object, not one written anew.
fn inodes(work_dir: &TestDir) -> BTreeMap<String, u64> {
    let listed = String::from_utf8(work_dir.run_ok(&["ls", "-R", "--json", "a.lbx"])).unwrap();
    let entry = |line: &str| {
        let object: Value = serde_json::from_str(line).unwrap();
        (object["path"].as_str().unwrap().to_owned(), object["ino"].as_u64().unwrap())
    };
    listed.lines().map(entry).collect()
}

fn extracted_as(work_dir: &TestDir, source: &str, out: &str) {
    work_dir.run_ok(&["extract", "a.lbx", source, "--to", out]);
    let (ours, theirs) = (describe(&work_dir.path(Path::new(out).join(source))), describe(&work_dir.path(source)));
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    for (path, object) in &theirs {
        assert_eq!(object, &ours[path], "{}", path.display());
    }
}

#[test]
fn a_mirror_writes_what_differs_and_deletes_what_is_gone() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let tree = work_dir.path("tree");
    fs::create_dir_all(tree.join("dir/sub")).unwrap();
    for name in ["same", "content", "mode", "gone", "dir/gone too", "dir/sub/deep", "becomes dir", "dir/attribute"] {
        fs::write(tree.join(name), name).unwrap();
    }
    fs::create_dir_all(tree.join("becomes file/below")).unwrap();
    fs::create_dir(tree.join("gone dir")).unwrap();
    fs::write(tree.join("gone dir/file"), "").unwrap();
    fs::hard_link(tree.join("same"), tree.join("dir/same again")).unwrap();
    fs::hard_link(tree.join("content"), tree.join("apart later")).unwrap();
    symlink("same", tree.join("link")).unwrap();
    mknod(&tree.join("fifo"), SFlag::S_IFIFO, Mode::from_bits_truncate(0o640), 0).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree", "pass"]);
    let before = inodes(&work_dir);

    fs::write(tree.join("content"), "other content").unwrap();
    fs::remove_file(tree.join("apart later")).unwrap();
    fs::write(tree.join("apart later"), "content").unwrap();
    fs::set_permissions(tree.join("mode"), fs::Permissions::from_mode(0o600)).unwrap();
    let attribute = rustix::fs::setxattr(tree.join("dir/attribute"), "user.note", b"new", XattrFlags::empty());
    fs::remove_file(tree.join("gone")).unwrap();
    fs::remove_file(tree.join("dir/gone too")).unwrap();
    fs::remove_dir_all(tree.join("gone dir")).unwrap();
    fs::remove_dir_all(tree.join("becomes file")).unwrap();
    fs::write(tree.join("becomes file"), "a file now").unwrap();
    fs::remove_file(tree.join("becomes dir")).unwrap();
    fs::create_dir(tree.join("becomes dir")).unwrap();
    fs::write(tree.join("becomes dir/new"), "new").unwrap();
    fs::remove_file(tree.join("link")).unwrap();
    symlink("content", tree.join("link")).unwrap();
    set_time(&tree.join("dir"), 1_000_000_000);

    let told = String::from_utf8(work_dir.run_ok(&["add", "a.lbx", "tree", "--mirror", "--dry-run"])).unwrap();
    for line in [
        "delete  /tree/gone\n",
        "delete  /tree/gone dir with 1 entries\n",
        "delete  /tree/becomes file with 1 entries\n",
        "replace /tree/content\n",
        "replace /tree/link\n",
        "update  /tree/mode\n",
    ] {
        assert!(told.contains(line), "{line:?} is not in {told}");
    }
    assert!(!told.contains("/tree/same\n") && !told.contains("deep"), "{told}");
    assert_eq!(inodes(&work_dir), before, "a dry run changes nothing");

    let report = json(&work_dir, &["add", "a.lbx", "tree", "--mirror", "--json"]);
    // gone, gone too, gone dir and its file, becomes file and its directory, becomes dir as a file.
    assert_eq!(report["deleted"], 7, "{report}");
    assert_eq!(report["updated"], if attribute.is_ok() { 2 } else { 1 }, "{report}");
    let after = inodes(&work_dir);
    for kept in ["same", "dir/same again", "mode", "fifo", "dir/attribute", "dir/sub/deep", "dir"] {
        let path = format!("/tree/{kept}");
        assert_eq!(before[&path], after[&path], "{kept} was written anew");
    }
    assert_ne!(before["/tree/content"], after["/tree/content"]);
    assert!(after.contains_key("/pass"), "what is beside the source stays");
    extracted_as(&work_dir, "tree", "out");

    let again = json(&work_dir, &["add", "a.lbx", "tree", "--mirror", "--json"]);
    let counts = ["files", "symlinks", "links", "others", "bytes", "updated", "deleted"].map(|key| again[key].clone());
    assert_eq!(counts, [0; 7].map(Value::from), "nothing is left to do: {again}");
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}

#[test]
fn a_mirror_brakes_before_most_is_deleted_and_at_an_empty_source() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let tree = work_dir.path("tree");
    fs::create_dir(&tree).unwrap();
    for name in ["a", "b", "c", "d"] {
        fs::write(tree.join(name), name).unwrap();
    }
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    let before = inodes(&work_dir);
    for name in ["b", "c", "d"] {
        fs::remove_file(tree.join(name)).unwrap();
    }
    fs::write(tree.join("a"), "changed").unwrap();
    let output = work_dir.run(&["add", "a.lbx", "tree", "--mirror"]);
    assert_eq!(output.code, 2);
    assert!(output.stderr.contains("would delete /tree/c\n"), "{}", output.stderr);
    assert!(
        output.stderr.contains("nothing was changed: 3 of 5 entries would be deleted, more than half"),
        "{}",
        output.stderr
    );
    fs::remove_file(tree.join("a")).unwrap();
    let output = work_dir.run(&["add", "a.lbx", "tree", "--mirror", "--delete-most"]);
    assert!(output.stderr.contains("tree is empty"), "{}", output.stderr);
    let output = work_dir.run(&["add", "a.lbx", "tree", "--mirror", "--from-empty"]);
    assert!(output.stderr.contains("4 of 5 entries"), "{}", output.stderr);
    // A source that is not there, such as a disk that is not plugged in.
    let output = work_dir.run(&["add", "a.lbx", "tree", "missing", "--mirror", "--from-empty", "--delete-most"]);
    assert_eq!((output.code, &output.stderr[..]), (22, "lockbox: cannot read missing: No such file or directory\n"));
    fs::create_dir_all(work_dir.path("other/tree")).unwrap();
    let output = work_dir.run(&["add", "a.lbx", "tree", "other/tree", "--mirror", "--from-empty", "--delete-most"]);
    assert_eq!((output.code, &output.stderr[..]), (2, "lockbox: two sources would get the name tree\n"));
    assert_eq!(inodes(&work_dir), before, "nothing was changed");
    work_dir.run_ok(&["add", "a.lbx", "tree", "--mirror", "--from-empty", "--delete-most"]);
    assert_eq!(work_dir.run_ok(&["ls", "-R", "a.lbx"]), b"/:\ntree\n\n/tree:\n");
    assert_eq!(work_dir.run(&["add", "a.lbx", "tree", "--delete-most"]).code, 1);
    assert_eq!(work_dir.run(&["add", "a.lbx", "tree", "--mirror", "--force"]).code, 1);
}

#[test]
fn patterns_leave_out_and_protect() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let tree = work_dir.path("tree");
    fs::create_dir_all(tree.join("src/old")).unwrap();
    fs::create_dir(tree.join("target")).unwrap();
    for name in ["src/a.c", "src/a.o", "src/keep.o", "src/old/b.c", "src/old/b.o", "target/big"] {
        fs::write(tree.join(name), name).unwrap();
    }
    let patterns = ["--exclude", "*.o", "--exclude", "/target", "--include", "keep.o"];
    work_dir.run_ok(&[&["add", "a.lbx", "tree"], &patterns[..]].concat());
    let names = |work_dir: &TestDir| inodes(work_dir).into_keys().collect::<Vec<_>>();
    let listed = ["/tree", "/tree/src", "/tree/src/a.c", "/tree/src/keep.o", "/tree/src/old", "/tree/src/old/b.c"];
    assert_eq!(names(&work_dir), listed);
    // What is in the archive already and left out of the mirror stays, with the directories above it.
    work_dir.run_ok(&["add", "a.lbx", "tree", "--mirror"]);
    fs::remove_dir_all(tree.join("target")).unwrap();
    fs::remove_dir_all(tree.join("src/old")).unwrap();
    fs::remove_file(tree.join("src/a.o")).unwrap();
    work_dir.run_ok(&[&["add", "a.lbx", "tree", "--mirror"], &patterns[..]].concat());
    assert_eq!(
        names(&work_dir),
        [
            "/tree",
            "/tree/src",
            "/tree/src/a.c",
            "/tree/src/a.o",
            "/tree/src/keep.o",
            "/tree/src/old",
            "/tree/src/old/b.o",
            "/tree/target",
            "/tree/target/big"
        ]
    );
    work_dir.write_passfile("rules", "# a comment\n*\n!*/\n!*.c");
    work_dir.run_ok(&["extract", "a.lbx", "--to", "out", "--exclude-from", "rules"]);
    assert_eq!(describe(&work_dir.path("out/tree/src")).len(), 3, "the directory, a.c and old");
    work_dir.run_ok(&["extract", "a.lbx", "tree/src", "--to", "part", "--exclude", "/old", "--exclude", "tree"]);
    assert_eq!(crate::support::names(&work_dir.path("part/src")), ["a.c", "a.o", "keep.o"]);
    let output = work_dir.run(&["add", "a.lbx", "tree", "--exclude", "a{b"]);
    assert_eq!(output.code, 1);
    assert!(output.stderr.starts_with("lockbox: 'a{b' is not a pattern: unclosed"), "{}", output.stderr);
    assert_eq!(work_dir.run(&["add", "a.lbx", "tree", "--include", "a"]).code, 1);
}

#[test]
fn sources_that_lie_in_each_other_may_have_hard_links() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::create_dir_all(work_dir.path("a/b")).unwrap();
    fs::write(work_dir.path("a/b/one"), "one").unwrap();
    fs::hard_link(work_dir.path("a/b/one"), work_dir.path("a/b/two")).unwrap();
    for _ in 0..3 {
        work_dir.run_ok(&["add", "a.lbx", "--mirror", "a", "a/b"]);
    }
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "a/b/one", "a/b/two", "b/one", "b/two"]), b"oneoneoneone");
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}

#[test]
fn a_file_that_comes_with_two_sources_leaves_no_temporary_name() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::create_dir(work_dir.path("dir")).unwrap();
    fs::write(work_dir.path("dir/one"), "one").unwrap();
    fs::hard_link(work_dir.path("dir/one"), work_dir.path("dir/two")).unwrap();
    for _ in 0..2 {
        work_dir.run_ok(&["add", "a.lbx", "--force", "dir", "dir/one"]);
        assert_eq!(work_dir.run_ok(&["ls", "a.lbx"]), b"dir\none\n");
    }
    work_dir.run_ok(&["add", "a.lbx", "--force", "dir/one", "dir", "dir/two"]);
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx"]), b"dir\none\ntwo\n");
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx", "dir"]), b"one\ntwo\n");
}

fn opened(path: &Path) -> Archive {
    let key = keys::unlock(path, &Passphrase::new(PASSPHRASE.into())).unwrap();
    Archive::open(path, &key, &Default::default()).unwrap()
}

/// Plans, has the host changed, and mirrors.
fn mirrored(archive: &Archive, sources: &[PathBuf], meanwhile: impl FnOnce()) -> ImportReport {
    let mut options = ImportOptions {
        to: Vec::new(),
        name: None,
        follow: false,
        replace: false,
        creator: Creator { uid: 0, gid: 0, umask: None },
        filter: Filter::default(),
        one_file_system: false,
        mirror: None,
    };
    options.mirror = Some(exchange::plan_mirror(archive.file_system(), sources, &options, None).unwrap());
    meanwhile();
    exchange::import(archive.file_system(), archive.identity(), sources, &options, &mut |_| Ok(())).unwrap()
}

#[test]
fn a_directory_goes_only_when_that_was_planned() {
    let work_dir = TestDir::new();
    let path = work_dir.create_archive("a.lbx");
    let tree = work_dir.path("tree");
    fs::create_dir_all(tree.join("dir/sub")).unwrap();
    fs::write(tree.join("dir/sub/file"), "kept").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    let archive = opened(&path);
    let report = mirrored(&archive, std::slice::from_ref(&tree), || {
        fs::remove_dir_all(tree.join("dir")).unwrap();
        fs::write(tree.join("dir"), "a file now").unwrap();
    });
    let told: Vec<_> = report.problems.iter().map(ToString::to_string).collect();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].ends_with("its type changed after the plan was made"), "{told:?}");
    assert_eq!(report.deleted, 0);
    archive.close().unwrap();
    await_free(&path);
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "tree/dir/sub/file"]), b"kept");
    work_dir.run_ok(&["add", "a.lbx", "tree", "--mirror", "--delete-most"]);
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "tree/dir"]), b"a file now");
}

#[test]
fn nothing_is_deleted_when_something_of_the_source_cannot_be_read() {
    let work_dir = TestDir::new();
    let path = work_dir.create_archive("a.lbx");
    let (tree, other) = (work_dir.path("tree"), work_dir.path("other"));
    fs::create_dir(&tree).unwrap();
    for name in ["gone", "kept", "too"] {
        fs::write(tree.join(name), name).unwrap();
    }
    fs::write(&other, "other").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree", "other"]);
    fs::remove_file(tree.join("gone")).unwrap();
    let archive = opened(&path);
    let report = mirrored(&archive, &[tree.clone(), other.clone()], || fs::remove_file(&other).unwrap());
    assert_eq!((report.problems.len(), report.deleted, report.deletions_skipped), (1, 0, 1));
    archive.close().unwrap();
    await_free(&path);
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "tree/gone", "other"]), b"goneother");
    // What only changed while it was read, and the archive itself, are no reason to keep anything.
    fs::rename(&path, tree.join("a.lbx")).unwrap();
    let output = work_dir.run(&["add", "tree/a.lbx", "tree", "--mirror", "--json"]);
    assert_eq!(output.code, 2);
    assert!(output.stderr.contains("tree/a.lbx: the archive cannot hold itself\n"), "{}", output.stderr);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["deleted"], &report["deletions_skipped"]), (&Value::from(1), &Value::from(0)), "{report}");
    assert_eq!(work_dir.run_ok(&["ls", "tree/a.lbx", "tree"]), b"kept\ntoo\n");
}

/// Random trees, changed at random between mirrors: each time the archive is what the source is.
#[test]
fn a_mirror_of_a_random_tree_is_equal_to_it() {
    let seed = std::env::var("SEED").map_or(20_261_121, |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    let mut dice = Dice(seed);
    let mut random = |below: u64| dice.next() % below;
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let tree = work_dir.path("tree");
    fs::create_dir(&tree).unwrap();
    for round in 0..6u64 {
        for step in 0..12u64 {
            let parent = if random(2) == 0 { tree.clone() } else { tree.join(format!("n{}", random(6))) };
            let path = parent.join(format!("n{}", random(6)));
            if !parent.is_dir() {
                continue;
            }
            match path.symlink_metadata() {
                Ok(found) if found.is_dir() => fs::remove_dir_all(&path).unwrap(),
                Ok(_) => fs::remove_file(&path).unwrap(),
                Err(_) => {}
            }
            match random(5) {
                0 => fs::create_dir(&path).unwrap(),
                1 => symlink(format!("target {step}"), &path).unwrap(),
                2 => fs::write(&path, vec![b'x'; random(9000) as usize]).unwrap(),
                3 => drop(fs::hard_link(tree.join("n0"), &path)),
                _ => {}
            }
        }
        work_dir.run_ok(&["add", "a.lbx", "tree", "--mirror", "--delete-most", "--from-empty"]);
        extracted_as(&work_dir, "tree", &format!("out{round}"));
    }
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}
