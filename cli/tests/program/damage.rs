//! Damaged archives as their users meet them: check, rescue, compact, purge.

use std::fs;
use std::io::Write;

use lockbox::archive::Archive;
use lockbox::crypto::Passphrase;
use lockbox::fs::Creator;
use lockbox::fs::ROOT_INO;
use lockbox::keys;

use crate::support::{PASSPHRASE, TestDir, await_free, describe, noise};

const B: usize = 4096;

/// An archive with a small tree, and the tree.
fn filled(work_dir: &TestDir) {
    fs::create_dir_all(work_dir.path("tree/below")).unwrap();
    fs::write(work_dir.path("tree/large"), noise(400_000)).unwrap();
    for n in 0..5 {
        fs::write(work_dir.path(format!("tree/below/small{n}")), noise(500 + n)).unwrap();
    }
    dress(work_dir);
    work_dir.create_archive("a.lbx");
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
}

/// Attributes, and a list by which user 1234 may read: user object, that user, group object, mask, others.
fn dress(work_dir: &TestDir) {
    let entry = |tag: u16, permissions: u16, id: u32| {
        [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let entries = [(1, 6, u32::MAX), (2, 4, 1234), (4, 4, u32::MAX), (0x10, 4, u32::MAX), (0x20, 0, u32::MAX)];
    let list = [2u32.to_le_bytes().to_vec(), entries.map(|(tag, bits, id)| entry(tag, bits, id)).concat()].concat();
    let set = |path: &str, name: &str, value: &[u8]| {
        rustix::fs::setxattr(work_dir.path(path), name, value, rustix::fs::XattrFlags::empty())
    };
    set("tree/large", "user.note", b"of the file").unwrap();
    set("tree/large", "system.posix_acl_access", &list).unwrap();
    set("tree/below", "user.note", b"of the directory").unwrap();
    set("tree/below", "system.posix_acl_default", &list).unwrap();
    if nix::unistd::geteuid().is_root() {
        set("tree/below/small0", "trusted.note", b"of root").unwrap();
    }
}

fn spoil(work_dir: &TestDir, blocks: impl IntoIterator<Item = usize>) {
    let mut bytes = fs::read(work_dir.path("a.lbx")).unwrap();
    for block in blocks {
        bytes[block * B..(block + 1) * B].fill(0xEE);
    }
    fs::write(work_dir.path("a.lbx"), bytes).unwrap();
}

#[test]
fn an_archive_without_records_and_with_one_header_copy_is_rescued_whole() {
    let work_dir = TestDir::new();
    filled(&work_dir);
    spoil(&work_dir, (0..65).chain(353..385));
    assert_eq!(work_dir.run(&["check", "a.lbx"]).code, 12);
    let out = work_dir.run_ok(&["rescue", "a.lbx", "--to", "out", "--privileges"]);
    let out = String::from_utf8(out).unwrap();
    assert!(out.contains("whole    tree/large") && out.contains("0 partial, 0 lost"), "{out}");
    assert!(out.ends_with(": complete; newer ones may have been lost without a trace\n"), "{out}");
    assert_eq!(describe(&work_dir.path("tree")), describe(&work_dir.path("out/tree")));
    let again = work_dir.run(&["rescue", "a.lbx", "--to", "out"]);
    assert_eq!(again.code, 2);
    assert!(again.stderr.contains("not empty"), "{}", again.stderr);
}

/// Makes two files durable and loses a byte of each page that came with the second one; between, `rests` steps of the clock.
fn spoil_the_last_commit(work_dir: &TestDir, rests: usize) {
    let path = work_dir.create_archive("a.lbx");
    let key = keys::unlock(&path, &Passphrase::new(PASSPHRASE.into())).unwrap();
    let archive = Archive::open(&path, &key, &Default::default()).unwrap();
    let make = |name: &str| {
        let fs = archive.file_system();
        fs.make_node(ROOT_INO, name.as_bytes(), 0o100_644, 0, Creator { uid: 0, gid: 0, umask: None }).unwrap();
        fs.make_durable().unwrap();
        fs::read(&path).unwrap()
    };
    let before = make("kept");
    let mut bytes = make("late");
    for _ in 0..rests {
        archive.file_system().maintain().unwrap();
    }
    drop(archive);
    await_free(&path);
    let now = fs::read(&path).unwrap();
    let pages = (65..bytes.len() / B).filter(|block| !(320..353).contains(block)).map(|block| block * B..block * B + B);
    let came: Vec<_> = pages.filter(|page| before.get(page.clone()) != Some(&bytes[page.clone()])).collect();
    bytes = now;
    for page in came {
        bytes[page.start + 100] ^= 1;
    }
    fs::write(path, bytes).unwrap();
}

/// What a crash leaves and what damage leaves look the same in the newest commit: so both are said, and the verdict is about the one before.
#[test]
fn an_incomplete_commit_is_told_with_when_its_changes_were_made() {
    let work_dir = TestDir::new();
    spoil_the_last_commit(&work_dir, 0);
    for _ in 0..2 {
        let checked = work_dir.run(&["check", "--full", "a.lbx"]);
        assert_eq!(checked.code, 0, "{}", checked.stderr);
        let out = String::from_utf8(checked.stdout).unwrap();
        assert!(
            out.starts_with("a.lbx: sound as commit ") && out.contains(" left it, but newer changes may be missing ("),
            "{out}"
        );
        for part in [
            " is incomplete (",
            "): it was interrupted, or damaged since; commit ",
            " is used, and changes made between ",
            " UTC may be missing\n",
        ] {
            assert!(checked.stderr.contains(part), "{}", checked.stderr);
        }
    }
    for command in [&["check", "--json", "a.lbx"][..], &["info", "--json", "a.lbx"]] {
        let told: serde_json::Value = serde_json::from_slice(&work_dir.run(command).stdout).unwrap();
        assert!(told["fallback"].as_str().unwrap().contains("or damaged since"), "{told}");
    }
    assert_eq!(work_dir.run(&["ls", "a.lbx"]).stdout, b"kept\n");
    // Who writes says it for the last time.
    fs::write(work_dir.path("file"), "content").unwrap();
    assert!(work_dir.run(&["add", "a.lbx", "file"]).stderr.contains("is incomplete"));
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}

#[test]
fn a_commit_that_came_to_rest_is_damaged_and_not_undone() {
    let work_dir = TestDir::new();
    spoil_the_last_commit(&work_dir, 1);
    for command in [&["check", "a.lbx"][..], &["check", "--full", "a.lbx"], &["ls", "a.lbx"]] {
        let output = work_dir.run(command);
        assert_eq!((output.code, output.stdout.as_slice()), (12, &b""[..]), "{}", output.stderr);
        assert!(output.stderr.contains("damaged archive"), "{}", output.stderr);
    }
}

#[test]
fn lost_data_is_named_by_check_and_by_rescue() {
    let work_dir = TestDir::new();
    filled(&work_dir);
    let whole = fs::read(work_dir.path("a.lbx")).unwrap();
    let mut named = 0;
    for block in (353..whole.len() / B).step_by(8) {
        fs::write(work_dir.path("a.lbx"), &whole).unwrap();
        if whole[block * B..(block + 1) * B].iter().all(|&byte| byte == 0) {
            continue;
        }
        spoil(&work_dir, [block]);
        let checked = work_dir.run(&["check", "--full", "a.lbx"]);
        if !checked.stderr.contains("(/tree/large): bytes") {
            continue;
        }
        assert_eq!(checked.code, 12);
        let to = format!("out{block}");
        let rescued = work_dir.run(&["rescue", "a.lbx", "--to", &to, "--partial", "--privileges", "--json"]);
        assert_eq!(rescued.code, 12, "{}", rescued.stderr);
        let out = String::from_utf8(rescued.stdout).unwrap();
        let items: Vec<serde_json::Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let large = items.iter().find(|item| item["path"] == "tree/large").unwrap();
        assert_eq!(large["state"], "partial");
        assert_eq!(items.last().unwrap()["summary"]["partial"], 1);
        assert!(!work_dir.path(format!("{to}/tree/large")).exists());
        let part = fs::read(work_dir.path(format!("{to}/partial/{}", large["inode"]))).unwrap();
        assert_eq!(part.len(), 400_000);
        assert!(part != noise(400_000));
        assert_eq!(describe(&work_dir.path("tree/below")), describe(&work_dir.path(format!("{to}/tree/below"))));
        named += 1;
        if named == 2 {
            return;
        }
    }
    panic!("no block of the file was hit");
}

#[test]
fn compact_and_purge_leave_the_content_as_it_was() {
    let work_dir = TestDir::new();
    filled(&work_dir);
    for _ in 0..2 {
        work_dir.run_ok(&["add", "--force", "a.lbx", "tree"]);
    }
    work_dir.run_ok(&["purge", "a.lbx"]);
    let sizes =
        |arguments: &[&str]| -> serde_json::Value { serde_json::from_slice(&work_dir.run_ok(arguments)).unwrap() };
    let dry = sizes(&["compact", "--dry-run", "--json", "a.lbx"]);
    let done = sizes(&["compact", "--json", "a.lbx"]);
    assert_eq!(dry["length_before"], done["length_before"]);
    assert!(done["length_after"].as_u64() <= done["length_before"].as_u64());
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    work_dir.run_ok(&["extract", "a.lbx", "--to", "out", "--privileges"]);
    assert_eq!(describe(&work_dir.path("tree")), describe(&work_dir.path("out/tree")));
}

#[test]
fn a_lost_copy_of_the_header_is_named_by_check_and_mended_by_it_or_by_the_next_writer() {
    let work_dir = TestDir::new();
    filled(&work_dir);
    let whole = fs::read(work_dir.path("a.lbx")).unwrap();
    let said = "lockbox: a.lbx: copy 1 of the header is lost (header copy 1 has no magic); it was rewritten from the other copy\n";
    spoil(&work_dir, 320..353);
    let checked = work_dir.run(&["check", "--full", "a.lbx"]);
    assert_eq!(checked.code, 12);
    assert!(checked.stderr.contains("copy 1 of the header is lost"), "{}", checked.stderr);
    let checked = work_dir.run(&["check", "--json", "a.lbx"]);
    let report: serde_json::Value = serde_json::from_slice(&checked.stdout).unwrap();
    let finding = &report["findings"][0];
    assert_eq!((&finding["kind"], &finding["severity"]), (&"header".into(), &"minor".into()));
    let repaired = work_dir.run(&["check", "--repair-header", "a.lbx"]);
    assert_eq!((repaired.code, repaired.stderr.as_str()), (0, said));
    assert!(fs::read(work_dir.path("a.lbx")).unwrap() == whole);

    spoil(&work_dir, 320..353);
    fs::OpenOptions::new()
        .append(true)
        .open(work_dir.path("a.lbx"))
        .and_then(|mut file| file.write_all(b"more"))
        .unwrap();
    assert_eq!(work_dir.run(&["check", "a.lbx"]).code, 12);
    // A part of a block alone is what a crash leaves: told, and no damage.
    assert_eq!(work_dir.run(&["check", "--repair-header", "a.lbx"]).code, 0);
    let noted = work_dir.run(&["check", "--json", "a.lbx"]);
    let report: serde_json::Value = serde_json::from_slice(&noted.stdout).unwrap();
    assert_eq!((noted.code, &report["sound"], &report["findings"]), (0, &true.into(), &serde_json::json!([])));
    let note = &report["notes"][0];
    assert_eq!((&note["kind"], &note["severity"]), (&"length".into(), &"note".into()));
    assert!(noted.stderr.starts_with("lockbox: note: the file ends with a partial block"), "{}", noted.stderr);
    spoil(&work_dir, 320..353);
    let purged = work_dir.run(&["purge", "a.lbx"]);
    assert!(purged.code == 0 && purged.stderr.starts_with(said), "{}", purged.stderr);
    assert!(purged.stderr.contains("a partial block of 4 bytes"), "{}", purged.stderr);
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}
