//! Archives at addresses: what is kept of them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use serde_json::Value;

use crate::support::{Ended, Place, end};

const CONTENT: usize = 3_000_000;

/// With the caches in the place's directory.
fn run(place: &Place, arguments: &[&str]) -> Ended {
    let mut command = place.command();
    command.env("LOCKBOX_PASSFILE", place.path("pass")).env("XDG_CACHE_HOME", place.path("cache"));
    end(command.args(arguments))
}

fn good(place: &Place, arguments: &[&str]) -> String {
    let ended = run(place, arguments);
    assert_eq!((ended.code, ended.complaint.as_str()), (0, ""), "{arguments:?}");
    String::from_utf8(ended.out).unwrap()
}

/// Reads what is at an address, which says that it is a backup.
fn read(place: &Place, address: &str) {
    let ended = run(place, &["cat", address, "content"]);
    assert_eq!((ended.code, ended.out.len()), (0, CONTENT), "{}", ended.complaint);
}

/// An archive whose backups are at addresses; gives those.
fn backed_up<const N: usize>(place: &Place, names: [&str; N]) -> [String; N] {
    place.archive("a.lbx");
    fs::write(place.path("content"), vec![7; CONTENT]).unwrap();
    place.good(&["add", "a.lbx", "content"]);
    names.map(|name| {
        let address = format!("file://{}", place.path(name).display());
        good(place, &["backup", "a.lbx", &address]);
        address
    })
}

#[test]
fn what_is_kept_on_disk_is_listed_and_removed_and_fetched_again() {
    let place = Place::new();
    let [one, other] = backed_up(&place, ["one", "other"]);
    assert_eq!(good(&place, &["cache", "ls"]), "");
    assert_eq!(good(&place, &["cache", "clear"]), "Nothing was kept.\n");
    assert!(!place.path("cache").exists());
    for address in [&one, &other] {
        read(&place, address);
    }
    let listed = good(&place, &["cache", "ls", "--json"]);
    let listed: Vec<Value> = listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(listed.len(), 2);
    for (object, address) in listed.iter().zip([&one, &other]) {
        assert_eq!(object["address"], address.as_str());
        assert!(object["bytes"].as_u64().unwrap() > 0 && object["used"].as_str().unwrap().ends_with('Z'), "{object}");
        assert!(object["bytes"].as_u64() <= object["most_bytes"].as_u64(), "{object}");
        assert!(place.path("cache/lockbox").join(object["file"].as_str().unwrap()).is_file());
    }
    let lines = good(&place, &["cache", "ls"]);
    let first = lines.lines().next().unwrap();
    assert!(first.contains(&format!("{} bytes  2", listed[0]["bytes"])) && first.ends_with(&one), "{lines}");
    // The Tab key offers what is known, and nothing of it is a question to anybody.
    let offered = good(&place, &["complete", "fish", "--", "cache", "clear", "file://"]);
    assert!(offered.contains(&one) && offered.contains(&other), "{offered}");
    // What is no address stops it before anything is removed.
    let refused = run(&place, &["cache", "clear", &one, "a.lbx"]);
    assert_eq!(refused.code, 2);
    assert!(refused.complaint.contains("a.lbx: addresses begin with"), "{}", refused.complaint);
    let cleared: Value = serde_json::from_str(&good(&place, &["cache", "clear", "--json", &one])).unwrap();
    assert_eq!((&cleared["removed"], &cleared["in_use"]), (&1.into(), &0.into()));
    assert_eq!(cleared["bytes"], listed[0]["bytes"]);
    assert!(good(&place, &["cache", "ls"]).ends_with(&format!("{other}\n")));
    assert_eq!(good(&place, &["cache", "clear", &one]), "Nothing was kept.\n");
    read(&place, &one);
    assert!(good(&place, &["cache", "clear"]).starts_with("What was kept of 2 archives is removed: "));
    assert_eq!(good(&place, &["cache", "ls"]), "");
}

#[test]
fn caches_in_a_directory_that_others_can_write_to_are_not_touched_and_links_are_not_followed() {
    let place = Place::new();
    let [one] = backed_up(&place, ["one"]);
    read(&place, &one);
    let caches = place.path("cache/lockbox");
    let file = fs::read_dir(&caches).unwrap().next().unwrap().unwrap().path();
    // A link in the place of a cache is none, and what it leads to stays.
    fs::rename(&file, place.path("precious")).unwrap();
    symlink(place.path("precious"), &file).unwrap();
    assert_eq!(good(&place, &["cache", "ls"]), "");
    assert_eq!(good(&place, &["cache", "clear"]), "Nothing was kept.\n");
    assert_eq!(good(&place, &["cache", "clear", &one]), "Nothing was kept.\n");
    assert!(place.path("precious").exists() && file.is_symlink());
    fs::remove_file(&file).unwrap();
    fs::rename(place.path("precious"), &file).unwrap();
    fs::set_permissions(&caches, fs::Permissions::from_mode(0o777)).unwrap();
    for arguments in [&["cache", "ls"][..], &["cache", "clear"], &["cache", "clear", &one]] {
        let ended = run(&place, arguments);
        assert_eq!((ended.code, ended.out.len()), (2, 0), "{ended:?}");
        assert!(ended.complaint.contains("not this user's alone"), "{}", ended.complaint);
    }
    assert!(file.is_file());
}
