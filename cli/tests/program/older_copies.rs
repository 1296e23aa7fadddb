//! What the commands say of an archive that is not the one seen before.

use std::fs;

use serde_json::Value;

use crate::support::{Place, end};

const OLDER: i32 = 16;

fn commands() -> Vec<Vec<&'static str>> {
    let mut commands: Vec<Vec<&str>> =
        ["info", "ls", "check", "compact", "purge"].iter().map(|name| vec![*name, "a.lbx"]).collect();
    commands.push(vec!["check", "--full", "a.lbx"]);
    commands.push(vec!["cat", "a.lbx", "file"]);
    commands.push(vec!["extract", "a.lbx", "--to", "out"]);
    commands.push(vec!["add", "a.lbx", "pass", "--force"]);
    commands.push(vec![
        "passwd",
        "a.lbx",
        "--new-passfile",
        "new",
        "--kdf-memory",
        "1",
        "--kdf-passes",
        "1",
        "--weak-kdf",
    ]);
    commands
}

#[test]
fn every_command_refuses_an_older_copy_and_accepts_it_when_told() {
    for (number, command) in commands().into_iter().enumerate() {
        let place = Place::new();
        place.archive("a.lbx");
        fs::write(place.path("file"), "one").unwrap();
        place.secret("new", "another one");
        place.good(&["add", "a.lbx", "file"]);
        fs::copy(place.path("a.lbx"), place.path("backup")).unwrap();
        fs::write(place.path("file"), "two").unwrap();
        place.good(&["add", "a.lbx", "file", "--force"]);
        fs::copy(place.path("backup"), place.path("a.lbx")).unwrap();

        let ended = place.run(&command);
        assert_eq!(ended.code, OLDER, "{number}: {command:?}: {}", ended.complaint);
        assert!(ended.out.is_empty() && ended.complaint.contains("--accept-older"), "{}", ended.complaint);
        assert!(fs::read(place.path("backup")).unwrap() == fs::read(place.path("a.lbx")).unwrap());
        let accepted = place.run(&[&command[..], &["--accept-older"]].concat());
        assert_eq!(accepted.code, 0, "{command:?}: {}", accepted.complaint);
        if command[0] != "passwd" {
            // It is the one that is remembered now.
            place.good(&["cat", "a.lbx", "file"]);
        }
    }
}

#[test]
fn a_fork_is_named_and_both_files_stay_as_they_are() {
    let place = Place::new();
    place.archive("a.lbx");
    fs::write(place.path("file"), "one").unwrap();
    place.good(&["add", "a.lbx", "file"]);
    fs::copy(place.path("a.lbx"), place.path("b.lbx")).unwrap();
    place.good(&["add", "a.lbx", "pass"]);
    // Another machine, with a memory of its own.
    let mut other = place.command();
    other.env("XDG_STATE_HOME", place.path("other")).env("LOCKBOX_PASSFILE", place.path("pass"));
    assert_eq!(end(other.args(["add", "b.lbx", "file", "--to", "/elsewhere"])).code, 0);
    let before = fs::read(place.path("b.lbx")).unwrap();
    for flags in [&[][..], &["--accept-older"]] {
        let ended = place.run(&[&["ls", "b.lbx"], flags].concat());
        assert_eq!(ended.code, OLDER);
        assert!(
            ended.complaint.contains("diverged") && ended.complaint.contains("--accept-fork"),
            "{}",
            ended.complaint
        );
    }
    assert!(before == fs::read(place.path("b.lbx")).unwrap());
    assert_eq!(place.run(&["ls", "b.lbx", "--accept-fork"]).code, 0);
    assert_eq!(place.run(&["ls", "a.lbx"]).code, OLDER);
}

#[test]
fn a_header_from_before_a_change_of_the_passphrase_is_refused() {
    const HEADERS: [std::ops::Range<usize>; 2] = [0..33 * 4096, 320 * 4096..353 * 4096];
    let place = Place::new();
    let path = place.archive("a.lbx");
    place.secret("new", "another one");
    let before = fs::read(&path).unwrap();
    let change = ["passwd", "a.lbx", "--new-passfile", "new", "--kdf-memory", "1", "--kdf-passes", "1", "--weak-kdf"];
    assert_eq!(place.run(&change).code, 0);
    let mut bytes = fs::read(&path).unwrap();
    for range in HEADERS {
        bytes[range.clone()].copy_from_slice(&before[range]);
    }
    fs::write(&path, bytes).unwrap();
    // Who saw the change, and who remembers nothing.
    for home in ["state", "another"] {
        for words in [&["ls", "a.lbx"][..], &["key", "ls", "a.lbx"], &["key", "test", "a.lbx"]] {
            let mut command = place.command();
            command.env("XDG_STATE_HOME", place.path(home)).env("LOCKBOX_PASSFILE", place.path("pass"));
            let ended = end(command.args(words));
            assert_eq!(ended.code, OLDER, "{words:?}: {}", ended.complaint);
            assert!(ended.out.is_empty() && ended.complaint.contains("header"), "{}", ended.complaint);
        }
    }
    for words in [["key", "ls"], ["key", "test"]] {
        let accepted = place.run(&[words[0], words[1], "a.lbx", "--accept-older"]);
        assert!(accepted.code == 0 && !accepted.out.is_empty(), "{words:?}: {}", accepted.complaint);
    }
}

#[test]
fn info_shows_the_commit_that_can_be_compared() {
    let place = Place::new();
    place.archive("a.lbx");
    let show = || -> Value { serde_json::from_slice(&place.good(&["info", "--json", "a.lbx"])).unwrap() };
    let first = show();
    assert_eq!(first["session"].as_str().unwrap().len(), 32);
    place.good(&["add", "a.lbx", "pass"]);
    let second = show();
    assert!(second["generation"].as_u64() > first["generation"].as_u64());
    assert_ne!(second["session"], first["session"]);
}

#[test]
fn a_state_directory_that_cannot_be_made_costs_one_warning() {
    let place = Place::new();
    place.archive("a.lbx");
    let mut command = place.command();
    command.env("XDG_STATE_HOME", place.path("pass")).env("LOCKBOX_PASSFILE", place.path("pass"));
    let ended = end(command.args(["add", "a.lbx", "pass"]));
    assert_eq!(ended.code, 0);
    assert_eq!(ended.complaint.matches("would not be noticed").count(), 1, "{}", ended.complaint);
}

/// The golden archive's newest record is the same whether entries of its log are there or not.
#[test]
fn a_copy_without_the_last_entries_of_the_log_is_refused() {
    let place = Place::new();
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/golden/log.lbx.zst");
    let whole = zstd::decode_all(&fs::read(golden).unwrap()[..]).unwrap();
    let passfile = place.secret("golden pass", "golden one");
    let run = |arguments: &[&str]| {
        let ended = place.command().env("LOCKBOX_PASSFILE", &passfile).args(arguments).output().unwrap();
        (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
    };
    fs::write(place.path("a.lbx"), &whole).unwrap();
    assert_eq!(run(&["ls", "a.lbx"]).0, Some(0));
    // The last three of ten: a reader remembers the ninth. What overwrites them is what the log has behind them.
    let mut cut = whole.clone();
    let log = 65 * 4096..320 * 4096;
    let filler = whole[log.end - 4096..log.end].to_vec();
    let used = log.clone().step_by(4096).rfind(|&at| whole[at..at + 4096] != filler).unwrap();
    for block in 0..3 {
        cut[used - 4096 * block..][..4096].copy_from_slice(&filler);
    }
    fs::write(place.path("a.lbx"), &cut).unwrap();
    for command in [&["ls", "a.lbx"][..], &["check", "a.lbx"], &["cat", "a.lbx", "cut"], &["purge", "a.lbx"]] {
        let (code, complaint) = run(command);
        assert_eq!(code, Some(OLDER), "{command:?}: {complaint}");
        assert!(complaint.contains("entries of its log") && complaint.contains("--accept-older"), "{complaint}");
        // But for room at the end that no record names, which an opening for writing cuts off.
        assert!(cut.starts_with(&fs::read(place.path("a.lbx")).unwrap()));
    }
    assert_eq!(run(&["ls", "a.lbx", "--accept-older"]).0, Some(0));
    assert_eq!(run(&["ls", "a.lbx"]).0, Some(0), "it is the one that is remembered now");
}
