//! Archives at addresses: what is kept of them, and what servers can do.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::thread;

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

/// A web server of one file, which answers as `answer` says: given the range and whether there was a condition, head lines and the body's bytes.
fn serve(answer: impl Fn(std::ops::Range<usize>, bool) -> (String, Vec<u8>) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/a.lbx", listener.local_addr().unwrap());
    // It ends with the test.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let head: Vec<String> = lines.by_ref().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
            let of =
                |name: &str| head.iter().find_map(|line| line.to_lowercase().strip_prefix(name).map(str::to_owned));
            let range = of("range: bytes=").unwrap();
            let (first, last) = range.split_once('-').unwrap();
            let (head, body) =
                answer(first.parse().unwrap()..last.parse::<usize>().unwrap() + 1, of("if-match:").is_some());
            write!(stream, "HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len()).unwrap();
            let _ = stream.write_all(&body);
        }
    });
    address
}

/// What is found, by name: its state.
fn states(place: &Place, address: &str) -> (i32, BTreeMap<String, String>, String) {
    let ended = run(place, &["doctor", "--json", "--remote", "allow-http,allow-private,timeout=1s", address]);
    let told = String::from_utf8(ended.out).unwrap();
    let object: Value = serde_json::from_str(&told).unwrap_or_else(|_| panic!("{told}{}", ended.complaint));
    assert_eq!(object["ok"], ended.code == 0, "{told}");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let checks = object["checks"].as_array().unwrap();
    let states = checks.iter().map(|check| (text(&check["name"]), text(&check["state"]))).collect();
    (ended.code, states, told)
}

fn only(states: &BTreeMap<String, String>, state: &str) -> Vec<String> {
    states.iter().filter(|(_, it)| *it == state).map(|(name, _)| name.clone()).collect()
}

#[test]
fn doctor_says_what_a_web_server_can_do() {
    let place = Place::new();
    let archive = fs::read(place.archive("a.lbx")).unwrap();
    let part = |archive: &[u8], range: std::ops::Range<usize>, more: &str| {
        let range = range.start..range.end.min(archive.len());
        let (last, length) = (range.end - 1, archive.len());
        let head = format!("206 Partial\r\nContent-Range: bytes {}-{last}/{length}{more}", range.start);
        (head, archive[range].to_vec())
    };
    let good = archive.clone();
    let url = serve(move |range, condition| match condition {
        true => ("412 No".into(), Vec::new()),
        false => part(&good, range, "\r\nETag: \"one\""),
    });
    let (code, found, told) = states(&place, &url);
    assert_eq!((code, only(&found, "advice")), (0, vec!["transport".into()]), "{told}");
    assert_eq!(only(&found, "ok"), ["archive", "conditions", "file", "ranges", "version"], "{told}");
    let passes = archive.clone();
    let url = serve(move |range, _| part(&passes, range, "\r\nETag: \"one\""));
    let (code, found, told) = states(&place, &url);
    assert_eq!((code, only(&found, "advice")), (0, vec!["conditions".into(), "transport".into()]), "{told}");
    let untagged = archive.clone();
    let url = serve(move |range, _| part(&untagged, range, "\r\nETag: W/\"one\""));
    let (code, found, told) = states(&place, &url);
    assert_eq!((code, only(&found, "advice")), (0, vec!["transport".into(), "version".into()]), "{told}");
    let whole = archive.clone();
    let url = serve(move |_, _| ("200 OK\r\nETag: \"one\"".into(), whole.clone()));
    let (code, found, told) = states(&place, &url);
    assert_eq!((code, only(&found, "bad")), (2, vec!["ranges".into()]), "{told}");
    let url = serve(move |range, _| part(&vec![7; 100_000], range, "\r\nETag: \"one\""));
    let (code, found, told) = states(&place, &url);
    assert_eq!((code, only(&found, "bad")), (2, vec!["archive".into()]), "{told}");
    let url = serve(|_, _| ("404 None".into(), Vec::new()));
    let ended = run(&place, &["doctor", "--remote", "allow-http,allow-private", &url]);
    assert_eq!(ended.code, 2);
    assert!(
        String::from_utf8(ended.out).unwrap().contains("bad     file               there is nothing of this name\n")
    );
    assert!(ended.complaint.contains("one thing there keeps lockbox from using it"), "{}", ended.complaint);
    // What an address needs is said as ever.
    let refused = run(&place, &["doctor", "http://127.0.0.1:1/a.lbx"]);
    assert_eq!(refused.code, 2);
    assert!(refused.complaint.contains("needs allow-http"), "{}", refused.complaint);
}

#[test]
fn doctor_tries_a_directory_of_objects_and_leaves_it_as_it_was() {
    let place = Place::new();
    let [one] = backed_up(&place, ["one"]);
    fs::create_dir(place.path("empty")).unwrap();
    let empty = format!("file://{}", place.path("empty").display());
    let names = || fs::read_dir(place.path("one")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let before: std::collections::BTreeSet<_> = names();
    let all = ["archive", "clock", "conditions", "lists", "one writer", "order", "ranges", "removal", "writes"];
    for address in [&empty, &one] {
        let (code, found, told) = states(&place, address);
        assert_eq!((code, &only(&found, "ok")[..]), (0, &all.map(str::to_owned)[..]), "{told}");
        assert_eq!(found.len(), all.len(), "{told}");
        let has = told.contains("there is one, of ");
        assert!(has == (*address == one) && told.contains("there is none yet") == (*address == empty), "{told}");
    }
    assert_eq!(fs::read_dir(place.path("empty")).unwrap().count(), 0);
    assert_eq!(names(), before);
    assert!(!place.path("cache").exists(), "who only looks keeps nothing");
    let missing = run(&place, &["doctor", &format!("file://{}", place.path("none").display())]);
    assert_eq!(missing.code, 2);
    assert!(missing.complaint.contains("none: No such file") && !place.path("none").exists(), "{}", missing.complaint);
}

#[test]
fn doctor_shows_no_credentials() {
    let place = Place::new();
    let mut command = place.command();
    command
        .env("AWS_ACCESS_KEY_ID", "AKIDSHOWN")
        .env("AWS_SECRET_ACCESS_KEY", "s3cr3t")
        .env("AWS_SESSION_TOKEN", "t0k3n");
    // Nobody is there.
    command.env("AWS_ENDPOINT_URL", "http://127.0.0.1:1");
    let ended = end(command.args(["doctor", "--remote", "allow-http,allow-private,timeout=1s", "s3://bucket/name"]));
    let told = String::from_utf8(ended.out).unwrap() + &ended.complaint;
    assert_eq!(ended.code, 2, "{told}");
    assert!(
        told.contains("credentials        found") && told.contains("bad     lists              it does not answer"),
        "{told}"
    );
    assert!(!["AKIDSHOWN", "s3cr3t", "t0k3n", "X-Amz"].iter().any(|secret| told.contains(secret)), "{told}");
}
