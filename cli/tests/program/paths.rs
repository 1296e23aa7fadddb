//! Commands on paths in an archive: what they do, what they refuse, and that a refusal leaves all as it was.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use crate::import_extract::{make_tree, reopen};
use crate::support::{TestDir, describe, names, noise};

/// An archive `a.lbx` with some directories and files.
fn filled() -> TestDir {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::create_dir_all(work_dir.path("top/sub/deep")).unwrap();
    for (name, text) in [("top/one", "1"), ("top/two", "2"), ("top/sub/three", "3"), ("top/sub/deep/four", "4")] {
        fs::write(work_dir.path(name), text).unwrap();
    }
    work_dir.run_ok(&["add", "a.lbx", "top"]);
    work_dir
}

/// Every path of the archive, sorted.
fn tree(work_dir: &TestDir, archive: &str) -> Vec<String> {
    let listed = String::from_utf8(work_dir.run_ok(&["ls", "-R", "--json", archive])).unwrap();
    let path = |line: &str| {
        let object: serde_json::Value = serde_json::from_str(line).unwrap();
        object["path"].as_str().unwrap().to_owned()
    };
    let mut paths: Vec<String> = listed.lines().map(path).collect();
    paths.sort();
    paths
}

fn text(work_dir: &TestDir, archive: &str, path: &str) -> String {
    String::from_utf8(work_dir.run_ok(&["cat", archive, path])).unwrap()
}

/// Runs what must fail with this code and these words, and change nothing.
fn refused(work_dir: &TestDir, arguments: &[&str], code: i32, words: &str) {
    let before = tree(work_dir, "a.lbx");
    let output = work_dir.run(arguments);
    assert_eq!(output.code, code, "{arguments:?}: {}", output.stderr);
    assert!(output.stderr.contains(words), "{arguments:?}: {}", output.stderr);
    assert_eq!(output.stderr.lines().count(), 1, "{arguments:?}: {}", output.stderr);
    assert_eq!(tree(work_dir, "a.lbx"), before, "{arguments:?}");
}

#[test]
fn directories_are_made_moved_and_removed_with_what_is_below() {
    let work_dir = filled();
    work_dir.run_ok(&["mkdir", "a.lbx:new", "a.lbx:/new/er"]);
    work_dir.run_ok(&["mkdir", "-p", "a.lbx:x/y/z", "a.lbx:new"]);
    work_dir.run_ok(&["mv", "a.lbx:top/one", "a.lbx:/top/sub", "a.lbx:x/y"]);
    work_dir.run_ok(&["mv", "a.lbx:top/two", "a.lbx:second"]);
    let expected = [
        "/new",
        "/new/er",
        "/second",
        "/top",
        "/x",
        "/x/y",
        "/x/y/one",
        "/x/y/sub",
        "/x/y/sub/deep",
        "/x/y/sub/deep/four",
        "/x/y/sub/three",
        "/x/y/z",
    ];
    assert_eq!(tree(&work_dir, "a.lbx"), expected);
    assert_eq!(text(&work_dir, "a.lbx", "x/y/sub/deep/four"), "4");
    work_dir.run_ok(&["rm", "-r", "a.lbx:x", "a.lbx:x/y/sub", "a.lbx:second", "a.lbx:new"]);
    assert_eq!(tree(&work_dir, "a.lbx"), ["/top"]);
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}

#[test]
fn names_are_bytes() {
    let work_dir = filled();
    let argument = |name: &[u8]| OsString::from_vec([b"a.lbx:", name].concat());
    let odd = b"odd \xff\n:name";
    work_dir.run_ok(&[OsStr::new("mv"), OsStr::new("a.lbx:top/one"), &argument(odd)]);
    let listed = work_dir.run_ok(&[OsStr::new("cat"), OsStr::new("a.lbx"), OsStr::from_bytes(odd)]);
    assert_eq!(listed, b"1");
    work_dir.run_ok(&[OsStr::new("rm"), &argument(odd)]);
    assert!(!tree(&work_dir, "a.lbx").iter().any(|path| path.starts_with("/odd")));
}

#[test]
fn what_is_refused_leaves_everything_as_it_was() {
    let work_dir = filled();
    work_dir.create_archive("b.lbx");
    for (arguments, code, words) in [
        (&["rm", "a.lbx:top/one", "a.lbx:none"][..], 2, "the archive has no none"),
        (&["rm", "a.lbx:top/one/x"], 2, "the archive has no top/one/x"),
        (&["rm", "a.lbx:top/one", "a.lbx:top/sub"], 2, "top/sub is a directory; use -r"),
        (&["rm", "-r", "a.lbx:"], 2, "the root of an archive stays"),
        (&["rm", "a.lbx:"], 2, "the root of an archive stays"),
        (&["rm", "a.lbx:top/../x"], 2, "must not contain '..'"),
        (&["rm", "a.lbx"], 1, "a.lbx is not a path in an archive"),
        (&["rm", "none.lbx:x"], 1, "none.lbx:x is not a path in an archive"),
        (&["rm", "a.lbx:top/one", "b.lbx:x"], 1, "are in two archives"),
        (&["mkdir", "a.lbx:ok", "a.lbx:top"], 2, "top already exists"),
        (&["mkdir", "a.lbx:ok", "a.lbx:no/where"], 2, "the archive has no no"),
        (&["mkdir", "a.lbx:/"], 2, "already exists"),
        (&["mkdir", "-p", "a.lbx:ok", "a.lbx:top/one/x"], 2, "top/one/x: a parent is not a directory"),
        (&["mv", "a.lbx:top/one", "a.lbx:top/two"], 2, "two already exists there; use --force to replace it"),
        (&["mv", "--force", "a.lbx:top/one", "a.lbx:top/one"], 2, "top/one is that already"),
        (&["mv", "a.lbx:top/one", "a.lbx:top/two/"], 2, "top/two/ is not a directory"),
        (&["mv", "a.lbx:top/one", "a.lbx:top/two/x"], 2, "top/two is not a directory"),
        (&["mv", "a.lbx:top/one", "a.lbx:none/x"], 2, "the archive has no none"),
        (&["mv", "a.lbx:top/one", "a.lbx:top/two", "a.lbx:none"], 2, "the archive has no none"),
        (&["mv", "a.lbx:top/one", "a.lbx:none", "a.lbx:top/sub"], 2, "the archive has no none"),
        (&["mv", "a.lbx:top", "a.lbx:top/sub"], 2, "top would be below itself"),
        (&["mv", "a.lbx:top/one", "a.lbx:top", "a.lbx:top/sub"], 2, "top would be below itself"),
        (&["mv", "a.lbx:", "a.lbx:top"], 2, "the root of an archive stays"),
    ] {
        refused(&work_dir, arguments, code, words);
    }
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}

#[test]
fn a_move_replaces_files_with_force_and_directories_never() {
    let work_dir = filled();
    work_dir.run_ok(&["mv", "--force", "a.lbx:top/one", "a.lbx:top/two"]);
    assert_eq!(text(&work_dir, "a.lbx", "top/two"), "1");
    work_dir.run_ok(&["mkdir", "-p", "a.lbx:other/two", "a.lbx:other/sub"]);
    refused(&work_dir, &["mv", "--force", "a.lbx:top/two", "a.lbx:other"], 2, "two is a directory there");
    refused(&work_dir, &["mv", "--force", "a.lbx:top/sub", "a.lbx:other"], 2, "sub is a directory there");
}

#[test]
fn the_room_of_what_was_removed_is_given_back() {
    let work_dir = filled();
    fs::write(work_dir.path("large"), noise(4 << 20)).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "large"]);
    let room = || work_dir.path("a.lbx").metadata().unwrap().blocks() * 512;
    let before = room();
    work_dir.run_ok(&["rm", "a.lbx:large"]);
    assert!(room() + (3 << 20) < before, "{} of {before} bytes are left", room());
}

#[test]
fn reading_commands_and_add_take_the_archive_with_the_path() {
    let work_dir = filled();
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx:top/sub"]), work_dir.run_ok(&["ls", "a.lbx", "/top/sub"]));
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx:"]), b"top\n");
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx:top/one", "a.lbx:/top/two"]), b"12");
    work_dir.run_ok(&["extract", "a.lbx:top/one", "a.lbx:top/sub", "--to", "out"]);
    assert_eq!(fs::read(work_dir.path("out/sub/deep/four")).unwrap(), b"4");
    assert_eq!(fs::read(work_dir.path("out/one")).unwrap(), b"1");
    work_dir.run_ok(&["add", "a.lbx:new/dir", "pass"]);
    assert!(tree(&work_dir, "a.lbx").contains(&"/new/dir/pass".into()));
    let of_tar = |arguments: &[&str]| work_dir.run_ok(&[&["export-tar"], arguments].concat());
    assert_eq!(of_tar(&["a.lbx:top/sub"]), of_tar(&["a.lbx", "top/sub"]));
    for (arguments, code, words) in [
        (&["add", "a.lbx:new", "pass", "--to", "x"][..], 1, "so --to cannot be used"),
        (&["ls", "a.lbx:top", "a.lbx:new"], 1, "name one file or directory to list"),
        (&["cat", "a.lbx:top/one", "top/two"], 1, "top/two is not a path in an archive"),
        (&["cat", "a.lbx"], 1, "no file of the archive is named"),
        (&["ls", "a.lbx:none"], 2, "none: no such file or directory"),
    ] {
        refused(&work_dir, arguments, code, words);
    }
    // An archive whose own name has a colon is meant as a whole.
    fs::rename(work_dir.path("a.lbx"), work_dir.path("a:b.lbx")).unwrap();
    assert_eq!(work_dir.run_ok(&["cat", "a:b.lbx", "top/one"]), b"1");
    assert_eq!(work_dir.run_ok(&["cat", "a:b.lbx:top/one"]), b"1");
}

#[test]
fn patterns_of_an_extraction_begin_below_each_path_and_for_the_root_at_it() {
    let work_dir = filled();
    work_dir.run_ok(&["add", "a.lbx", "pass"]);
    let patterns = ["--exclude", "/top/sub/deep", "--exclude", "/pass", "--exclude", "one"];
    let expected = ["/top", "/top/sub", "/top/sub/three", "/top/two"];
    for (to, from) in [("plain", &["a.lbx"][..]), ("colon", &["a.lbx:"]), ("slash", &["a.lbx", "/"])] {
        work_dir.run_ok(&[&["extract"], from, &["--to", to], &patterns].concat());
        let found: Vec<String> =
            describe(&work_dir.path(to)).keys().map(|path| format!("/{}", path.display())).collect();
        assert_eq!(found[1..], expected, "{from:?}");
    }
    work_dir.run_ok(&[
        "extract",
        "a.lbx:",
        "a.lbx:top/sub",
        "--to",
        "both",
        "--exclude",
        "/deep",
        "--exclude",
        "/top/sub",
    ]);
    assert!(!work_dir.path("both/top/sub").exists() && work_dir.path("both/top/one").exists());
    assert!(!work_dir.path("both/sub/deep").exists() && work_dir.path("both/sub/three").exists());
}

#[test]
fn copies_go_in_out_and_around() {
    let work_dir = filled();
    fs::write(work_dir.path("file"), "new").unwrap();
    work_dir.run_ok(&["cp", "file", "a.lbx:"]);
    work_dir.run_ok(&["cp", "file", "a.lbx:top/renamed"]);
    work_dir.run_ok(&["cp", "-r", "top", "file", "a.lbx:top/sub"]);
    assert_eq!(text(&work_dir, "a.lbx", "file"), "new");
    assert_eq!(text(&work_dir, "a.lbx", "top/renamed"), "new");
    assert_eq!(text(&work_dir, "a.lbx", "top/sub/top/sub/deep/four"), "4");

    fs::create_dir(work_dir.path("out")).unwrap();
    work_dir.run_ok(&["cp", "a.lbx:file", "a.lbx:top/one", "out"]);
    assert_eq!(fs::read(work_dir.path("out/file")).unwrap(), b"new");
    work_dir.run_ok(&["cp", "a.lbx:top/two", "second"]);
    work_dir.run_ok(&["cp", "-r", "a.lbx:top/sub", "third"]);
    work_dir.run_ok(&["cp", "-r", "a.lbx:", "whole"]);
    assert_eq!(fs::read(work_dir.path("second")).unwrap(), b"2");
    assert_eq!(fs::read(work_dir.path("third/deep/four")).unwrap(), b"4");
    assert_eq!(fs::read(work_dir.path("whole/top/sub/three")).unwrap(), b"3");

    work_dir.run_ok(&["cp", "-r", "a.lbx:top/sub/deep", "a.lbx:file", "a.lbx:top"]);
    work_dir.run_ok(&["cp", "--force", "a.lbx:file", "a.lbx:top/two"]);
    assert_eq!(text(&work_dir, "a.lbx", "top/deep/four"), "4");
    assert_eq!(text(&work_dir, "a.lbx", "top/two"), "new");
    assert_eq!(text(&work_dir, "a.lbx", "top/file"), "new");
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}

#[test]
fn a_copy_within_keeps_everything_and_shares_what_is_stored() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let tree = work_dir.path("tree");
    make_tree(&tree);
    fs::write(tree.join("dir/largest"), noise(16 << 20)).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    let room = || work_dir.path("a.lbx").metadata().unwrap().blocks() * 512;
    let before = room();
    work_dir.run_ok(&["cp", "-r", "a.lbx:tree", "a.lbx:again"]);
    assert!(room() < before + (6 << 20), "{before} bytes became {}", room());
    work_dir.run_ok(&["extract", "a.lbx", "again", "--to", "out", "--privileges"]);
    let (one, other) = (describe(&tree), describe(&work_dir.path("out/again")));
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    for (path, object) in &one {
        assert_eq!(object, &other[path], "{}", path.display());
    }
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    reopen(&tree);
    reopen(&work_dir.path("out/again"));
}

#[test]
fn a_copy_that_is_refused_copies_nothing() {
    let work_dir = filled();
    work_dir.create_archive("b.lbx");
    fs::create_dir(work_dir.path("out")).unwrap();
    fs::write(work_dir.path("two"), "other").unwrap();
    fs::create_dir_all(work_dir.path("other/top")).unwrap();
    fs::write(work_dir.path("other/two"), "another").unwrap();
    let before = names(&work_dir.path(""));
    for (arguments, code, words) in [
        (&["cp", "top", "a.lbx:x"][..], 2, "top is a directory; use -r"),
        (&["cp", "none", "a.lbx:x"], 22, "cannot read none"),
        (&["cp", "two", "pass", "a.lbx:x"], 2, "the archive has no x"),
        (&["cp", "two", "a.lbx:no/x"], 2, "the archive has no no"),
        (&["cp", "two", "a.lbx:x/"], 2, "the archive has no x/"),
        (&["cp", "a.lbx:top/one", "a.lbx:none", "out"], 2, "the archive has no none"),
        (&["cp", "a.lbx:top", "out"], 2, "top is a directory; use -r"),
        (&["cp", "a.lbx:", "out"], 2, "the root of the archive is a directory; use -r"),
        (&["cp", "a.lbx:top/one", "no/x"], 2, "no is not a directory"),
        (&["cp", "a.lbx:top/one", "a.lbx:top/two", "x"], 2, "x is not a directory"),
        (&["cp", "a.lbx:top/two", "."], 2, "two already exists in .; use --force"),
        (&["cp", "a.lbx:top/one", "a.lbx:top/two"], 2, "two already exists there; use --force"),
        (&["cp", "-r", "a.lbx:top", "a.lbx:top/sub"], 2, "top would be below itself"),
        (&["cp", "-r", "a.lbx:", "a.lbx:x"], 2, "cannot be copied into itself"),
        (&["cp", "--force", "a.lbx:top/one", "a.lbx:top/one"], 2, "top/one is that already"),
        (&["cp", "a.lbx:top/one", "b.lbx:x"], 1, "copy with 'lockbox export-tar' of the one"),
        (&["cp", "a.lbx:top/one", "two", "out"], 1, "copy them separately"),
        (&["cp", "two", "out"], 1, "no path is in an archive"),
        (
            &["cp", "-r", "a.lbx:", "none.lbx:"],
            1,
            "none.lbx: does not exist, and the part before its ':' is not an archive",
        ),
        (&["cp", "a.lbx:top/one", "none.lbx:one"], 1, "create it, or choose another name"),
        (&["cp", "--force", "two", "other/two", "a.lbx:top"], 2, "two sources would get the name two"),
        (&["cp", "-r", "top", "other/top", "a.lbx:"], 2, "two sources would get the name top"),
        (&["add", "a.lbx", "two", "pass", "./two"], 2, "two sources would get the name two"),
    ] {
        refused(&work_dir, arguments, code, words);
        assert_eq!(names(&work_dir.path("")), before, "{arguments:?}");
        assert_eq!(fs::read_dir(work_dir.path("out")).unwrap().count(), 0);
    }
    let output = work_dir.run(&["cp", "two", "a.lbx:top"]);
    assert_eq!(output.code, 2);
    assert!(output.stderr.contains("use --force to replace it"), "{}", output.stderr);
    assert_eq!(text(&work_dir, "a.lbx", "top/two"), "2");
    work_dir.run_ok(&["cp", "--force", "two", "a.lbx:top"]);
    assert_eq!(text(&work_dir, "a.lbx", "top/two"), "other");
}

/// The lines of a comparison that must find something.
fn differing(work_dir: &TestDir, arguments: &[&str]) -> Vec<String> {
    let output = work_dir.run(arguments);
    assert_eq!((output.code, output.stderr.as_str()), (3, ""), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn a_comparison_tells_what_is_not_alike_and_nothing_else() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let tree = work_dir.path("tree");
    make_tree(&tree);
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    for other in ["tree", "a.lbx:tree"] {
        assert_eq!(work_dir.run_ok(&["diff", "--metadata", "a.lbx:tree", other]), b"");
        assert_eq!(work_dir.run_ok(&["diff", "--metadata", other, "a.lbx:tree"]), b"");
    }
    // Another byte, with the size and the time of before.
    let large = tree.join("dir/large");
    let modified = large.metadata().unwrap().modified().unwrap();
    let mut content = fs::read(&large).unwrap();
    content[2_000_000] ^= 1;
    fs::write(&large, content).unwrap();
    fs::File::options().write(true).open(&large).unwrap().set_modified(modified).unwrap();
    fs::write(tree.join("dir/more"), "").unwrap();
    fs::remove_file(tree.join("and again")).unwrap();
    fs::remove_file(tree.join("link")).unwrap();
    symlink("other", tree.join("link")).unwrap();
    fs::remove_file(tree.join("fifo")).unwrap();
    fs::create_dir(tree.join("fifo")).unwrap();
    let at = |path: &str| (format!("a.lbx:/tree/{path}"), format!("tree/{path}"));
    let differ = |what: &str, path: &str| format!("{what} {} and {} differ", at(path).0, at(path).1);
    let expected = [
        "Only in a.lbx:/tree: and again".to_owned(),
        differ("Files", "dir/large"),
        "Only in tree/dir: more".to_owned(),
        format!("File {} is a fifo while file {} is a directory", at("fifo").0, at("fifo").1),
        differ("Symbolic links", "link"),
    ];
    let mut found = differing(&work_dir, &["diff", "a.lbx:tree", "tree"]);
    found.sort();
    let mut expected_sorted = expected.to_vec();
    expected_sorted.sort();
    assert_eq!(found, expected_sorted);

    work_dir.run_ok(&["cp", "--force", "tree/dir/large", "a.lbx:tree/dir/large"]);
    assert_eq!(differing(&work_dir, &["diff", "a.lbx:tree/dir", "tree/dir"]), ["Only in tree/dir: more"]);
    fs::set_permissions(&large, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(work_dir.run_ok(&["diff", "a.lbx:tree/dir/large", "tree/dir/large"]), b"");
    let line = "a.lbx:/tree/dir/large and tree/dir/large differ in mode".to_owned();
    let found = differing(&work_dir, &["diff", "--metadata", "a.lbx:tree/dir/large", "tree/dir/large"]);
    assert!(found[0].starts_with(&line), "{found:?}");
    reopen(&tree);
}

#[test]
fn archives_are_compared_with_each_other_and_json_tells_the_same() {
    let work_dir = filled();
    work_dir.create_archive("b.lbx");
    work_dir.run_ok(&["add", "b.lbx", "top"]);
    work_dir.run_ok(&["rm", "b.lbx:top/one"]);
    work_dir.run_ok(&["cp", "pass", "b.lbx:top/three"]);
    fs::write(work_dir.path("two"), "3").unwrap();
    work_dir.run_ok(&["cp", "--force", "two", "b.lbx:top"]);
    let output = work_dir.run(&["diff", "--json", "a.lbx", "b.lbx"]);
    assert_eq!((output.code, output.stderr.as_str()), (3, ""));
    let objects: Vec<serde_json::Value> =
        String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let expected = [("top/one", "only-first"), ("top/three", "only-second"), ("top/two", "content")];
    let found: Vec<(&str, &str)> =
        objects.iter().map(|o| (o["path"].as_str().unwrap(), o["differs"].as_str().unwrap())).collect();
    assert_eq!(found, expected);
    assert_eq!(differing(&work_dir, &["diff", "a.lbx:top/one", "a.lbx:top/two"]).len(), 1);
    for (arguments, code, words) in [
        (&["diff", "top", "two"][..], 1, "compare them with diff(1)"),
        (&["diff", "a.lbx", "none"], 22, "cannot read none"),
        (&["diff", "a.lbx:none", "top"], 2, "the archive has no none"),
    ] {
        refused(&work_dir, arguments, code, words);
    }
}
