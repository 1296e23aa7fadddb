//! Tars in and out: what GNU tar makes of ours, what we make of GNU tar's, and what is refused.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use lockbox::archive::Archive;
use lockbox::crypto::Passphrase;
use lockbox::fs::ROOT_INO;
use lockbox::fs::{Creator, XattrMode};
use lockbox::keys;

use crate::support::{PASSPHRASE, RunOutput, TestDir, await_free, describe};

fn tar(arguments: &[&str], directory: &Path) -> Vec<u8> {
    let output = Command::new("tar").args(arguments).current_dir(directory).env("TZ", "UTC").output().unwrap();
    assert!(output.status.success(), "tar {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn import(work_dir: &TestDir, arguments: &[&str], input: &[u8]) -> RunOutput {
    let mut command = work_dir.command();
    command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).arg("import-tar").args(arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A refusal does not wait for the rest.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    RunOutput { code: output.status.code().unwrap(), stdout: output.stdout, stderr }
}

fn imported(work_dir: &TestDir, arguments: &[&str], input: &[u8]) {
    let output = import(work_dir, arguments, input);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
}

/// Everything but what this test's own directories have for times.
fn same(work_dir: &TestDir, one: &str, other: &str) {
    let (one, other) = (describe(&work_dir.path(one)), describe(&work_dir.path(other)));
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    for (path, object) in one.iter().filter(|(path, _)| !path.as_os_str().is_empty()) {
        assert!(*object == other[path], "{}", path.display());
    }
}

fn tree(work_dir: &TestDir) {
    let root = work_dir.path("tree");
    crate::import_extract::make_tree(&root);
    let long = "a name that is longer than the hundred bytes which a header has for it ".repeat(3);
    fs::create_dir_all(root.join(&long).join("ü")).unwrap();
    fs::write(root.join(&long).join("ü/file"), "long").unwrap();
    std::os::unix::fs::symlink(&long, root.join("long link")).unwrap();
    fs::hard_link(root.join(&long).join("ü/file"), root.join("long again")).unwrap();
    fs::set_permissions(root.join("empty"), fs::Permissions::from_mode(0o400)).unwrap();
    crate::import_extract::reopen(&root);
}

#[test]
fn a_tree_goes_through_tars_in_both_directions() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    tree(&work_dir);
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    let ours = work_dir.run_ok(&["export-tar", "a.lbx"]);
    assert_eq!(ours.len() % 10_240, 0);
    assert!(ours.len() < 8 << 20, "holes are not written: {}", ours.len());
    fs::write(work_dir.path("ours.tar"), &ours).unwrap();
    // Out: GNU tar sees the same tree, and unpacks it.
    let listed = |file: &str| {
        let verbose =
            ["--list", "--verbose", "--numeric-owner", "--full-time", "--quoting-style=escape", "--file", file];
        let text = String::from_utf8(tar(&verbose, &work_dir.path(""))).unwrap();
        // tar leaves out zeros at the end of a time, and fills a column up to the widest entry that it has shown so far.
        let unfilled = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut lines: Vec<String> = text.lines().filter(|line| !line.ends_with(" ./")).map(unfilled).collect();
        lines.sort();
        lines
    };
    let theirs = [
        "--create",
        "--format=posix",
        "--sparse",
        "--xattrs",
        "--acls",
        "--numeric-owner",
        "--file",
        "theirs.tar",
        "tree",
    ];
    tar(&theirs, &work_dir.path(""));
    // Which of several names comes first is up to the program.
    let without_links = |lines: Vec<String>| -> Vec<String> {
        let several = ["tiny", "and again", "tiny again", "long again", "/file"];
        lines.into_iter().filter(|line| !several.iter().any(|name| line.contains(name))).collect()
    };
    assert_eq!(without_links(listed("ours.tar")), without_links(listed("theirs.tar")));
    fs::create_dir(work_dir.path("out")).unwrap();
    let unpack = [
        "--extract",
        "--xattrs",
        "--xattrs-include=*",
        "--acls",
        "--same-permissions",
        "--numeric-owner",
        "--delay-directory-restore",
    ];
    tar(&[&unpack[..], &["--file", "../ours.tar"]].concat(), &work_dir.path("out"));
    same(&work_dir, "tree", "out/tree");
    // In: their formats, and ours, come back the same.
    let formats = ["posix", "gnu", "oldgnu", "posix --sparse-version=0.0", "posix --sparse-version=0.1", "ours"];
    for (number, format) in formats.iter().enumerate() {
        let archive = format!("{number}.lbx");
        work_dir.create_archive(&archive);
        let input = match *format {
            "ours" => ours.clone(),
            // The old formats have no place for attributes.
            format => {
                let format = format!("--format={format}");
                let mut arguments = vec!["--create", "--sparse", "--file", "-"];
                arguments.extend(format.split(' '));
                if format.contains("posix") {
                    arguments.extend(["--xattrs", "--xattrs-include=*", "--acls"]);
                }
                arguments.push("tree");
                tar(&arguments, &work_dir.path(""))
            }
        };
        imported(&work_dir, &[&archive, "--to", "in"], &input);
        let out = format!("out{number}");
        work_dir.run_ok(&["extract", &archive, "in/tree", "--to", &out, "--privileges"]);
        if format.contains("gnu") {
            let (ours, theirs) =
                (describe(&work_dir.path("tree")), describe(&work_dir.path(Path::new(&out).join("tree"))));
            for (path, object) in &ours {
                let (mode, links, content) = (object.mode, object.links, &object.content);
                let found = &theirs[path];
                assert!(
                    (mode, links, content) == (found.mode, found.links, &found.content),
                    "{format} {}",
                    path.display()
                );
            }
        } else {
            same(&work_dir, "tree", &format!("{out}/tree"));
        }
        work_dir.run_ok(&["check", "--full", &archive]);
    }
}

/// A full dump and one of what changed, in each way in which GNU tar writes the lists of directories.
#[test]
fn incremental_dumps_of_gnu_tar_are_imported() {
    let work_dir = TestDir::new();
    for (number, format) in ["gnu", "oldgnu", "posix", "gnu --incremental"].iter().enumerate() {
        let (tree, archive) = (format!("tree{number}"), format!("{number}.lbx"));
        work_dir.create_archive(&archive);
        fs::create_dir_all(work_dir.path(&tree).join("sub")).unwrap();
        fs::write(work_dir.path(&tree).join("one"), "one").unwrap();
        fs::write(work_dir.path(&tree).join("sub/two"), "two").unwrap();
        let format = format!("--format={format}");
        let list = format!("--listed-incremental=list{number}");
        let mut arguments: Vec<&str> = ["--create", "--file", "-"].into_iter().chain(format.split(' ')).collect();
        if !format.contains("incremental") {
            arguments.push(&list);
        }
        arguments.push(&tree);
        let full = tar(&arguments, &work_dir.path(""));
        fs::write(work_dir.path(&tree).join("three"), "three").unwrap();
        let next = tar(&arguments, &work_dir.path(""));
        imported(&work_dir, &[&archive], &full);
        imported(&work_dir, &[&archive, "--force"], &next);
        let found = work_dir.run_ok(&["ls", "-R", &archive, &tree]);
        assert_eq!(found, format!("{tree}:\none\nsub\nthree\n\n{tree}/sub:\ntwo\n").as_bytes(), "{format}");
        let paths = ["one", "sub/two", "three"].map(|name| format!("{tree}/{name}"));
        let contents = work_dir.run_ok(&["cat", &archive, &paths[0], &paths[1], &paths[2]]);
        assert_eq!(contents, b"onetwothree", "{format}");
    }
}

#[test]
fn a_part_is_exported_under_its_path() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::create_dir_all(work_dir.path("tree/sub")).unwrap();
    fs::write(work_dir.path("tree/sub/file"), "content").unwrap();
    fs::write(work_dir.path("tree/sub/file.o"), "object").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree", "pass"]);
    fs::write(
        work_dir.path("out.tar"),
        work_dir.run_ok(&["export-tar", "a.lbx", "/tree/sub/", "pass", "--exclude", "*.o"]),
    )
    .unwrap();
    assert_eq!(tar(&["--list", "--file", "out.tar"], &work_dir.path("")), b"tree/sub/\ntree/sub/file\npass\n");
    let output = work_dir.run(&["export-tar", "a.lbx", "nothing"]);
    assert_eq!((output.code, &output.stderr[..], output.stdout.len()), (2, "lockbox: the archive has no nothing\n", 0));
}

/// Makes what an import works in, with the mark that one sets or without.
fn stage(path: &Path, is_marked: bool) {
    let key = keys::unlock(path, &Passphrase::new(PASSPHRASE.into())).unwrap();
    let archive = Archive::open(path, &key, &Default::default()).unwrap();
    let (fs, creator) = (archive.file_system(), Creator { uid: 0, gid: 0, umask: None });
    let stage = fs.make_directory(ROOT_INO, b".lockbox-import-tar", 0o700, creator).unwrap().ino;
    let rest = fs.create_and_open(stage, b"rest", 0o600, creator).unwrap().ino;
    fs.write(rest, 0, b"rest").unwrap();
    fs.release(rest).unwrap();
    if is_marked {
        fs.set_xattr(stage, b"user.lockbox.import-tar", b"", XattrMode::Set).unwrap();
    }
    archive.close().unwrap();
    await_free(path);
}

#[test]
fn an_import_merges_and_replaces_only_when_told() {
    let work_dir = TestDir::new();
    let path = work_dir.create_archive("a.lbx");
    fs::create_dir(work_dir.path("tree")).unwrap();
    fs::write(work_dir.path("tree/one"), "old").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    fs::write(work_dir.path("tree/one"), "new").unwrap();
    fs::write(work_dir.path("tree/two"), "two").unwrap();
    let input = tar(&["--create", "--file", "-", "tree"], &work_dir.path(""));
    let output = import(&work_dir, &["a.lbx"], &input);
    assert_eq!(
        (output.code, &output.stderr[..]),
        (2, "lockbox: nothing was imported: tree/one already exists; use --force to replace it\n")
    );
    assert_eq!(work_dir.run_ok(&["ls", "-R", "a.lbx"]), b"/:\ntree\n\n/tree:\none\n");
    imported(&work_dir, &["a.lbx", "--force"], &input);
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "tree/one", "tree/two"]), b"newtwo");
    // What a killed import left is taken away by the next one.
    stage(&path, true);
    imported(&work_dir, &["a.lbx", "--to", "again"], &input);
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx"]), b"again\ntree\n");
    // A member that comes again replaces the one before, as in a tar that was appended to.
    tar(&["--create", "--file", "twice.tar", "tree"], &work_dir.path(""));
    fs::write(work_dir.path("tree/one"), "newest").unwrap();
    tar(&["--append", "--file", "twice.tar", "tree/one"], &work_dir.path(""));
    imported(&work_dir, &["a.lbx", "--to", "twice"], &fs::read(work_dir.path("twice.tar")).unwrap());
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "twice/tree/one"]), b"newest");
    // The import would delete it with its own directory.
    fs::create_dir(work_dir.path(".lockbox-import-tar")).unwrap();
    fs::write(work_dir.path(".lockbox-import-tar/file"), "file").unwrap();
    let same_name = tar(&["--create", "--file", "-", ".lockbox-import-tar"], &work_dir.path(""));
    let output = import(&work_dir, &["a.lbx"], &same_name);
    assert!(output.code == 2 && output.stderr.contains("the import itself uses this name"), "{}", output.stderr);
    imported(&work_dir, &["a.lbx", "--to", "below"], &same_name);
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "below/.lockbox-import-tar/file"]), b"file");
    // What somebody else named so is not.
    stage(&path, false);
    let output = import(&work_dir, &["a.lbx", "--to", "more"], &input);
    assert_eq!(output.code, 2);
    assert!(
        output.stderr.contains("has a .lockbox-import-tar in its root that is not from an import"),
        "{}",
        output.stderr
    );
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", ".lockbox-import-tar/rest"]), b"rest");
}

/// One member with a right checksum.
fn member(name: &str, kind: u8, link: &str, size: u64, content: &[u8]) -> Vec<u8> {
    let mut block = vec![0u8; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..107].copy_from_slice(b"0000644");
    block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    block[156] = kind;
    block[157..157 + link.len()].copy_from_slice(link.as_bytes());
    block[257..265].copy_from_slice(b"ustar\x0000");
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block.extend_from_slice(content);
    block.resize(block.len().next_multiple_of(512), 0);
    block
}

fn record(text: &str) -> Vec<u8> {
    let mut length = text.len() + 3;
    while format!("{length} {text}\n").len() != length {
        length += 1;
    }
    format!("{length} {text}\n").into_bytes()
}

fn pax(texts: &[&str]) -> Vec<u8> {
    let records: Vec<u8> = texts.iter().flat_map(|text| record(text)).collect();
    member("x", b'x', "", records.len() as u64, &records)
}

#[test]
fn hostile_tars_are_refused_and_leave_nothing() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let end = vec![0u8; 1024];
    let file = |name: &str| member(name, b'0', "", 2, b"hi");
    let long = "x".repeat(300);
    let cases: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("'/etc/passwd' is an absolute path", vec![file("/etc/passwd")]),
        ("'a/../../b' leads out of its directory", vec![file("a/../../b")]),
        ("is an absolute path", vec![pax(&["path=/etc/passwd"]), file("fine")]),
        (
            "its parent 'link' is not a directory in the tar",
            vec![member("link", b'2', "/etc", 0, b""), file("link/passwd")],
        ),
        ("'../out' leads out of its directory", vec![file("fine"), member("hard", b'1', "../out", 0, b"")]),
        ("'/etc/shadow' is an absolute path", vec![member("hard", b'1', "/etc/shadow", 0, b"")]),
        (
            "it links to 'missing', which is not earlier in the tar",
            vec![file("fine"), member("hard", b'1', "missing", 0, b"")],
        ),
        ("it is a hard link to a directory", vec![member("d/", b'5', "", 0, b""), member("hard", b'1', "d", 0, b"")]),
        ("it would replace a directory", vec![member("d/", b'5', "", 0, b""), file("d")]),
        ("the tar is cut off", vec![file("fine"), member("large", b'0', "", 0o77_777_777_777, b"short")]),
        ("the tar is cut off", vec![pax(&["size=9223372036854770000"]), file("huge")]),
        ("its size is impossible", vec![pax(&["size=9223372036854775807"]), file("huge")]),
        ("its record size is not a number", vec![pax(&["size=-1"]), file("fine")]),
        ("more than any real one", vec![member("x", b'x', "", 0o77_777_777_777, b"")]),
        ("more than any real one", vec![member("x", b'L', "", 1 << 30, b"")]),
        ("a pax header is malformed", vec![member("x", b'x', "", 7, b"9999 a="), file("fine")]),
        ("one name or size for all", vec![member("g", b'g', "", 11, &record("path=ab")), file("fine")]),
        ("name too long", vec![pax(&[&format!("path={long}")]), file("fine")]),
        ("continues another tar volume", vec![member("rest", b'M', "", 2, b"hi")]),
        ("a list of names of an old GNU tar", vec![member("names", b'N', "", 2, b"hi")]),
        ("type 'Z' is unknown", vec![member("odd", b'Z', "", 0, b"")]),
        (
            "the map of a sparse file",
            vec![
                pax(&["GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.realsize=9", "GNU.sparse.name=s"]),
                member("s", b'0', "", 512, b"1\n5\n900\n"),
            ],
        ),
        (
            "the map of a sparse file",
            vec![pax(&["GNU.sparse.map=0,5,3,5", "GNU.sparse.size=99"]), member("s", b'0', "", 10, b"0123456789")],
        ),
        (
            "more parts than any real one",
            vec![
                pax(&["GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.realsize=9"]),
                member("s", b'0', "", 512, b"99999999\n"),
            ],
        ),
        (
            "its device number is not valid",
            vec![pax(&["SCHILY.devmajor=99999", "SCHILY.devminor=1"]), member("dev", b'3', "", 0, b"")],
        ),
    ];
    for (expected, members) in &cases {
        let mut input = [&file("before")[..], &members.concat(), &end].concat();
        if *expected == "the tar is cut off" {
            input.truncate(input.len() - end.len());
        }
        let output = import(&work_dir, &["a.lbx", "--to", "new"], &input);
        assert_eq!(output.code, 2, "{expected}: {}", output.stderr);
        assert!(
            output.stderr.contains(expected) && output.stderr.lines().count() == 1,
            "{expected}: {}",
            output.stderr
        );
        assert_eq!(work_dir.run_ok(&["ls", "-R", "a.lbx"]), b"/:\n", "{expected}");
    }
    let whole = [file("before"), end.clone()].concat();
    for (expected, input) in [
        ("the input is empty, not a tar", &b""[..]),
        ("the input is not a tar", &[b'x'; 2000][..]),
        ("the tar is compressed: unpack it with 'zstd -dc' first", b"\x28\xb5\x2f\xfd and so on"),
        ("the tar is cut off: it ends before its end mark", &whole[..1024]),
        ("the tar is cut off: it ends before its end mark", &whole[..513]),
        ("the tar is damaged: a header's checksum is wrong", &[&whole[..1024], &[7; 512]].concat()),
    ] {
        let output = import(&work_dir, &["a.lbx"], input);
        assert_eq!((output.code, output.stderr), (2, format!("lockbox: {expected}\n")));
    }
    assert_eq!(work_dir.run_ok(&["ls", "-R", "a.lbx"]), b"/:\n");
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    // The passphrase is not in the tar.
    let mut command = work_dir.command();
    let output = crate::support::output_with_input(command.args(["import-tar", "a.lbx"]), "a passphrase\n");
    assert!(output.code != 0 && !output.stderr.contains("a passphrase"), "{}", output.stderr);
}
