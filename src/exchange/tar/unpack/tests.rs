//! A packed directory is extracted unchanged, and an untrusted tar stays within its directory or is
//! refused.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::*;
use crate::exchange::pack_tree;
use crate::exchange::tar::BLOCK;

const FILE: u8 = b'0';
const LINK: u8 = b'1';
const SYMLINK: u8 = b'2';
const DIRECTORY: u8 = b'5';

fn member(name: &str, kind: u8, link: &str, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_mode(0o6777);
    header.set_size(content.len() as u64);
    header.set_mtime(1_000_000_000);
    header.as_old_mut().linkflag[0] = kind;
    header.set_cksum();
    let mut bytes = [&header.as_bytes()[..], content].concat();
    bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
    bytes
}

fn unpack(place: &Path, mut tar: &[u8]) -> Result<UnpackReport> {
    unpack_tar(
        &mut tar,
        place,
        &|number| match number {
            1 => Some(b"got".to_vec()),
            2 => Some(b"got (2)".to_vec()),
            _ => None,
        },
        &|| Ok(()),
    )
}

fn unpack_members(place: &Path, members: &[Vec<u8>]) -> Result<UnpackReport> {
    unpack(place, &[members.concat(), vec![0; 2 * BLOCK]].concat())
}

/// Returns the entries of a directory, except its own content.
fn names(place: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_was_packed_comes_out_again_and_is_private() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("folder");
    let long = "n".repeat(200);
    fs::create_dir_all(folder.join("in").join(&long)).unwrap();
    fs::create_dir(folder.join("empty")).unwrap();
    fs::write(folder.join("in").join(&long).join("file"), vec![7; 700_000]).unwrap();
    fs::write(folder.join("run"), "#!").unwrap();
    fs::set_permissions(folder.join("run"), fs::Permissions::from_mode(0o6777)).unwrap();
    fs::hard_link(folder.join("run"), folder.join("same")).unwrap();
    symlink("../run", folder.join("in/link")).unwrap();
    symlink("/etc/passwd", folder.join("stray")).unwrap();
    let mut tar = Vec::new();
    pack_tree(&folder, b"given", &mut tar).unwrap();
    let to = place.path().join("to");
    fs::create_dir(&to).unwrap();
    for (name, others) in [("got", &["got"][..]), ("got (2)", &["got", "got (2)"])] {
        let report = unpack(&to, &tar).unwrap();
        assert_eq!((report.name.as_slice(), report.strays), (name.as_bytes(), 1));
        assert_eq!(names(&to), others);
        let got = to.join(name);
        assert_eq!(names(&got), ["empty", "in", "run", "same"]);
        assert_eq!(fs::read(got.join("in").join(&long).join("file")).unwrap(), vec![7; 700_000]);
        assert_eq!(fs::read_link(got.join("in/link")).unwrap(), Path::new("../run"));
        let mode = |path: &str| fs::metadata(got.join(path)).unwrap().mode() & 0o7777;
        assert_eq!([mode(""), mode("in"), mode("run"), mode("empty")], [0o700; 4]);
        assert_eq!(fs::metadata(got.join("in").join(&long).join("file")).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(fs::metadata(got.join("run")).unwrap().ino(), fs::metadata(got.join("same")).unwrap().ino());
        for path in ["", "in", "run"] {
            let modified = |folder: &Path| fs::metadata(folder.join(path)).unwrap().modified().unwrap();
            assert_eq!(modified(&got), modified(&folder), "{path}");
        }
    }
    assert!(matches!(unpack(&to, &tar), Err(Error::Exists)));
    assert_eq!(names(&to), ["got", "got (2)"]);
}

#[test]
fn nothing_comes_out_of_a_tar_that_is_cut_off() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("file"), vec![7; 5000]).unwrap();
    let mut tar = Vec::new();
    pack_tree(&folder, b"given", &mut tar).unwrap();
    let to = place.path().join("to");
    fs::create_dir(&to).unwrap();
    // Zeros up to the end of the record follow the end mark.
    let end = tar.iter().rposition(|&byte| byte != 0).unwrap().next_multiple_of(BLOCK);
    for length in (0..=end).step_by(97) {
        assert!(unpack(&to, &tar[..length]).is_err(), "{length}");
        assert_eq!(names(&to), [] as [&str; 0]);
    }
}

#[test]
fn hostile_members_stay_inside_or_nothing_comes_out() {
    let top = || member("t/", DIRECTORY, "", b"");
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("precious"), "old").unwrap();
    let precious = outside.path().join("precious").to_str().unwrap().to_owned();
    for members in [
        vec![top(), member("t/../x", FILE, "", b"new")],
        vec![top(), member("../x", FILE, "", b"new")],
        vec![top(), member(&precious, FILE, "", b"new")],
        vec![top(), member("x", FILE, "", b"beside")],
        vec![top(), member("u/x", FILE, "", b"beside")],
        vec![top(), member("t", SYMLINK, "/", b"")],
        vec![top(), member("t/a", FILE, "", b"1"), member("t/a", FILE, "", b"2")],
        vec![top(), member("t/a", FILE, "", b"1"), member("t/a/b", FILE, "", b"2")],
        vec![top(), member("t/l", SYMLINK, "d", b""), member("t/l", FILE, "", b"through")],
        vec![
            top(),
            member("t/d/", DIRECTORY, "", b""),
            member("t/l", SYMLINK, "d", b""),
            member("t/l/x", FILE, "", b"2"),
        ],
        vec![top(), member("t/h", LINK, &precious, b"")],
        vec![top(), member("t/h", LINK, "../precious", b"")],
        vec![top(), member("t/l", SYMLINK, "x", b""), member("t/h", LINK, "t/l", b"")],
        vec![top(), member("t/h", LINK, "t", b"")],
        vec![member("./", DIRECTORY, "", b""), member("a", FILE, "", b"x")],
        vec![],
    ] {
        let place = tempfile::tempdir().unwrap();
        let told = unpack_members(place.path(), &members).map(|report| report.copied).unwrap_err();
        assert_eq!(names(place.path()), [] as [&str; 0], "{told}");
    }
    assert_eq!(fs::read(outside.path().join("precious")).unwrap(), b"old");
}

#[test]
fn links_that_lead_out_are_not_made_and_bits_that_lend_rights_are_gone() {
    let place = tempfile::tempdir().unwrap();
    let members = [
        member("t/", DIRECTORY, "", b""),
        member("t/a/", DIRECTORY, "", b""),
        member("t/a/set", FILE, "", b"x"),
        member("t/out", SYMLINK, "..", b""),
        member("t/root", SYMLINK, "/etc/passwd", b""),
        member("t/a/up", SYMLINK, "../..", b""),
        // Inside by its text; its target depends on another link.
        member("t/a/winding", SYMLINK, "x/../y", b""),
        member("t/a/near", SYMLINK, ".././a/set", b""),
        member("t/pipe", b'6', "", b""),
        member("t/device", b'3', "", b""),
    ];
    let report = unpack_members(place.path(), &members).unwrap();
    assert_eq!((report.strays, report.special, report.copied.symlinks), (4, 2, 1));
    assert_eq!(names(&place.path().join("got")), ["a"]);
    assert_eq!(names(&place.path().join("got/a")), ["near", "set"]);
    assert_eq!(fs::metadata(place.path().join("got/a/set")).unwrap().mode() & 0o7777, 0o700);
}

fn records(records: &[(&str, &str)]) -> Vec<u8> {
    let mut body = Vec::new();
    records
        .iter()
        .for_each(|(key, value)| crate::exchange::tar::pax::push(&mut body, key.as_bytes(), value.as_bytes()));
    member("records", b'x', "", &body)
}

/// An input that needs more memory than it has bytes is bounded before it is read.
#[test]
fn deep_paths_and_many_records_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let refused = |what: &str, members: &[Vec<u8>]| {
        let error = unpack_members(place.path(), members).unwrap_err();
        assert!(matches!(&error, Error::Invalid(text) if text.contains(what)), "{what}: {error}");
        assert_eq!(names(place.path()), [""; 0]);
    };
    let deep = |depth: usize| format!("t/{}f", "a/".repeat(depth));
    let file = || member("f", FILE, "", b"content");
    refused("below more than 1000 directories", &[records(&[("path", &deep(40_000))]), file()]);
    refused("longer than any real one", &[records(&[("path", &deep(600_000))]), file()]);
    let many: Vec<(&str, &str)> = std::iter::repeat_n(("a", ""), 40_000).collect();
    refused("more records for one member", &[records(&many), records(&many), file()]);
    let globals = |member: &mut Vec<u8>| {
        let mut header = tar::Header::from_byte_slice(&member[..BLOCK]).clone();
        header.as_old_mut().linkflag[0] = b'g';
        header.set_cksum();
        member[..BLOCK].copy_from_slice(header.as_bytes());
    };
    let value = "v".repeat(600_000);
    let mut two = [records(&[("one", &value)]), records(&[("two", &value)])];
    two.iter_mut().for_each(globals);
    refused("more global records", &[two.concat(), file()]);
    // A depth within the limit is accepted.
    let depth = 300;
    let members = [records(&[("path", &deep(depth))]), file()];
    unpack_members(place.path(), &members).unwrap();
    let at = place.path().join("got").join("a/".repeat(depth)).join("f");
    assert_eq!(fs::read(at).unwrap(), b"content");
}

/// At each call.
#[test]
fn who_is_stopped_leaves_nothing() {
    let place = tempfile::tempdir().unwrap();
    let members = [
        member("t", DIRECTORY, "", b""),
        member("t/one", FILE, "", &[1; 600_000]),
        member("t/two", FILE, "", &[2; 10]),
    ];
    let tar = [members.concat(), vec![0; 2 * BLOCK]].concat();
    for turn in 0.. {
        let asked = std::cell::Cell::new(0);
        let go_on = || {
            asked.set(asked.get() + 1);
            if asked.get() > turn { Err(Error::Interrupted(2)) } else { Ok(()) }
        };
        let done = unpack_tar(&mut &tar[..], place.path(), &|_| Some(b"got".to_vec()), &go_on);
        if done.is_ok() {
            assert!(turn > 6, "{turn}");
            return;
        }
        assert!(matches!(done, Err(Error::Interrupted(2))), "{done:?}");
        assert_eq!(names(place.path()), [""; 0], "turn {turn}");
    }
}
