//! Damaged archives as their users meet them: check, rescue, compact, purge.

use std::fs;
use std::io::Write;

use lockbox::archive::Archive;
use lockbox::crypto::Passphrase;
use lockbox::fs::Creator;
use lockbox::fs::ROOT_INO;
use lockbox::keys;

use crate::support::{PASSPHRASE, Place, describe, noise};

const B: usize = 4096;

/// An archive with a small tree, and the tree.
fn filled(place: &Place) {
    fs::create_dir_all(place.path("tree/below")).unwrap();
    fs::write(place.path("tree/large"), noise(400_000)).unwrap();
    for n in 0..5 {
        fs::write(place.path(format!("tree/below/small{n}")), noise(500 + n)).unwrap();
    }
    dress(place);
    place.archive("a.lbx");
    place.good(&["add", "a.lbx", "tree"]);
}

/// Attributes, and a list by which user 1234 may read: user object, that user, group object, mask, others.
fn dress(place: &Place) {
    let entry = |tag: u16, permissions: u16, id: u32| {
        [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let entries = [(1, 6, u32::MAX), (2, 4, 1234), (4, 4, u32::MAX), (0x10, 4, u32::MAX), (0x20, 0, u32::MAX)];
    let list = [2u32.to_le_bytes().to_vec(), entries.map(|(tag, bits, id)| entry(tag, bits, id)).concat()].concat();
    let set = |path: &str, name: &str, value: &[u8]| {
        rustix::fs::setxattr(place.path(path), name, value, rustix::fs::XattrFlags::empty())
    };
    set("tree/large", "user.note", b"of the file").unwrap();
    set("tree/large", "system.posix_acl_access", &list).unwrap();
    set("tree/below", "user.note", b"of the directory").unwrap();
    set("tree/below", "system.posix_acl_default", &list).unwrap();
    if nix::unistd::geteuid().is_root() {
        set("tree/below/small0", "trusted.note", b"of root").unwrap();
    }
}

fn spoil(place: &Place, blocks: impl IntoIterator<Item = usize>) {
    let mut bytes = fs::read(place.path("a.lbx")).unwrap();
    for block in blocks {
        bytes[block * B..(block + 1) * B].fill(0xEE);
    }
    fs::write(place.path("a.lbx"), bytes).unwrap();
}

#[test]
fn an_archive_without_records_and_with_one_header_copy_is_rescued_whole() {
    let place = Place::new();
    filled(&place);
    spoil(&place, (0..65).chain(353..385));
    assert_eq!(place.run(&["check", "a.lbx"]).code, 12);
    let out = place.good(&["rescue", "a.lbx", "--to", "out", "--privileges"]);
    let out = String::from_utf8(out).unwrap();
    assert!(out.contains("whole    tree/large") && out.contains("0 partial, 0 lost"), "{out}");
    assert!(out.ends_with(": complete; newer ones may have been lost without a trace\n"), "{out}");
    assert_eq!(describe(&place.path("tree")), describe(&place.path("out/tree")));
    let again = place.run(&["rescue", "a.lbx", "--to", "out"]);
    assert_eq!(again.code, 2);
    assert!(again.complaint.contains("not empty"), "{}", again.complaint);
}

/// Makes two files durable and loses a byte of each page that came with the second one; between, `rests` steps of the clock.
fn spoil_the_last_commit(place: &Place, rests: usize) {
    let path = place.archive("a.lbx");
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
    let place = Place::new();
    spoil_the_last_commit(&place, 0);
    for _ in 0..2 {
        let checked = place.run(&["check", "--full", "a.lbx"]);
        assert_eq!(checked.code, 0, "{}", checked.complaint);
        let out = String::from_utf8(checked.out).unwrap();
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
            assert!(checked.complaint.contains(part), "{}", checked.complaint);
        }
    }
    for command in [&["check", "--json", "a.lbx"][..], &["info", "--json", "a.lbx"]] {
        let told: serde_json::Value = serde_json::from_slice(&place.run(command).out).unwrap();
        assert!(told["fallback"].as_str().unwrap().contains("or damaged since"), "{told}");
    }
    assert_eq!(place.run(&["ls", "a.lbx"]).out, b"kept\n");
    // Who writes says it for the last time.
    fs::write(place.path("file"), "content").unwrap();
    assert!(place.run(&["add", "a.lbx", "file"]).complaint.contains("is incomplete"));
    place.good(&["check", "--full", "a.lbx"]);
}

#[test]
fn a_commit_that_came_to_rest_is_damaged_and_not_undone() {
    let place = Place::new();
    spoil_the_last_commit(&place, 1);
    for command in [&["check", "a.lbx"][..], &["check", "--full", "a.lbx"], &["ls", "a.lbx"]] {
        let ended = place.run(command);
        assert_eq!((ended.code, ended.out.as_slice()), (12, &b""[..]), "{}", ended.complaint);
        assert!(ended.complaint.contains("damaged archive"), "{}", ended.complaint);
    }
}

#[test]
fn lost_data_is_named_by_check_and_by_rescue() {
    let place = Place::new();
    filled(&place);
    let whole = fs::read(place.path("a.lbx")).unwrap();
    let mut named = 0;
    for block in (353..whole.len() / B).step_by(8) {
        fs::write(place.path("a.lbx"), &whole).unwrap();
        if whole[block * B..(block + 1) * B].iter().all(|&byte| byte == 0) {
            continue;
        }
        spoil(&place, [block]);
        let checked = place.run(&["check", "--full", "a.lbx"]);
        if !checked.complaint.contains("(/tree/large): bytes") {
            continue;
        }
        assert_eq!(checked.code, 12);
        let to = format!("out{block}");
        let rescued = place.run(&["rescue", "a.lbx", "--to", &to, "--partial", "--privileges", "--json"]);
        assert_eq!(rescued.code, 12, "{}", rescued.complaint);
        let out = String::from_utf8(rescued.out).unwrap();
        let items: Vec<serde_json::Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let large = items.iter().find(|item| item["path"] == "tree/large").unwrap();
        assert_eq!(large["state"], "partial");
        assert_eq!(items.last().unwrap()["summary"]["partial"], 1);
        assert!(!place.path(format!("{to}/tree/large")).exists());
        let part = fs::read(place.path(format!("{to}/partial/{}", large["inode"]))).unwrap();
        assert_eq!(part.len(), 400_000);
        assert!(part != noise(400_000));
        assert_eq!(describe(&place.path("tree/below")), describe(&place.path(format!("{to}/tree/below"))));
        named += 1;
        if named == 2 {
            return;
        }
    }
    panic!("no block of the file was hit");
}

#[test]
fn compact_and_purge_leave_the_content_as_it_was() {
    let place = Place::new();
    filled(&place);
    for _ in 0..2 {
        place.good(&["add", "--force", "a.lbx", "tree"]);
    }
    place.good(&["purge", "a.lbx"]);
    let sizes = |arguments: &[&str]| -> serde_json::Value { serde_json::from_slice(&place.good(arguments)).unwrap() };
    let dry = sizes(&["compact", "--dry-run", "--json", "a.lbx"]);
    let done = sizes(&["compact", "--json", "a.lbx"]);
    assert_eq!(dry["length_before"], done["length_before"]);
    assert!(done["length_after"].as_u64() <= done["length_before"].as_u64());
    place.good(&["check", "--full", "a.lbx"]);
    place.good(&["extract", "a.lbx", "--to", "out", "--privileges"]);
    assert_eq!(describe(&place.path("tree")), describe(&place.path("out/tree")));
}

#[test]
fn a_lost_copy_of_the_header_is_named_by_check_and_mended_by_it_or_by_the_next_writer() {
    let place = Place::new();
    filled(&place);
    let whole = fs::read(place.path("a.lbx")).unwrap();
    let said = "lockbox: a.lbx: copy 1 of the header is lost (header copy 1 has no magic); it was rewritten from the other copy\n";
    spoil(&place, 320..353);
    let checked = place.run(&["check", "--full", "a.lbx"]);
    assert_eq!(checked.code, 12);
    assert!(checked.complaint.contains("copy 1 of the header is lost"), "{}", checked.complaint);
    let checked = place.run(&["check", "--json", "a.lbx"]);
    let report: serde_json::Value = serde_json::from_slice(&checked.out).unwrap();
    let finding = &report["findings"][0];
    assert_eq!((&finding["kind"], &finding["severity"]), (&"header".into(), &"minor".into()));
    let repaired = place.run(&["check", "--repair-header", "a.lbx"]);
    assert_eq!((repaired.code, repaired.complaint.as_str()), (0, said));
    assert!(fs::read(place.path("a.lbx")).unwrap() == whole);

    spoil(&place, 320..353);
    fs::OpenOptions::new().append(true).open(place.path("a.lbx")).and_then(|mut file| file.write_all(b"more")).unwrap();
    assert_eq!(place.run(&["check", "a.lbx"]).code, 12);
    // A part of a block alone is what a crash leaves: told, and no damage.
    assert_eq!(place.run(&["check", "--repair-header", "a.lbx"]).code, 0);
    let noted = place.run(&["check", "--json", "a.lbx"]);
    let report: serde_json::Value = serde_json::from_slice(&noted.out).unwrap();
    assert_eq!((noted.code, &report["sound"], &report["findings"]), (0, &true.into(), &serde_json::json!([])));
    let note = &report["notes"][0];
    assert_eq!((&note["kind"], &note["severity"]), (&"length".into(), &"note".into()));
    assert!(noted.complaint.starts_with("lockbox: note: the file ends with a partial block"), "{}", noted.complaint);
    spoil(&place, 320..353);
    let purged = place.run(&["purge", "a.lbx"]);
    assert!(purged.code == 0 && purged.complaint.starts_with(said), "{}", purged.complaint);
    assert!(purged.complaint.contains("a partial block of 4 bytes"), "{}", purged.complaint);
    place.good(&["check", "--full", "a.lbx"]);
}
