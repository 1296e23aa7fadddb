//! What the commands say of an archive that is not the one seen before.

use std::fs;

use serde_json::Value;

use crate::support::{TestDir, output_of};

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
        let work_dir = TestDir::new();
        work_dir.create_archive("a.lbx");
        fs::write(work_dir.path("file"), "one").unwrap();
        work_dir.write_passfile("new", "another one");
        work_dir.run_ok(&["add", "a.lbx", "file"]);
        fs::copy(work_dir.path("a.lbx"), work_dir.path("backup")).unwrap();
        fs::write(work_dir.path("file"), "two").unwrap();
        work_dir.run_ok(&["add", "a.lbx", "file", "--force"]);
        fs::copy(work_dir.path("backup"), work_dir.path("a.lbx")).unwrap();

        let output = work_dir.run(&command);
        assert_eq!(output.code, OLDER, "{number}: {command:?}: {}", output.stderr);
        assert!(output.stdout.is_empty() && output.stderr.contains("--accept-older"), "{}", output.stderr);
        assert!(fs::read(work_dir.path("backup")).unwrap() == fs::read(work_dir.path("a.lbx")).unwrap());
        let accepted = work_dir.run(&[&command[..], &["--accept-older"]].concat());
        assert_eq!(accepted.code, 0, "{command:?}: {}", accepted.stderr);
        if command[0] != "passwd" {
            // It is the one that is remembered now.
            work_dir.run_ok(&["cat", "a.lbx", "file"]);
        }
    }
}

#[test]
fn a_fork_is_named_and_both_files_stay_as_they_are() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::write(work_dir.path("file"), "one").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "file"]);
    fs::copy(work_dir.path("a.lbx"), work_dir.path("b.lbx")).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "pass"]);
    // Another machine, with a memory of its own.
    let mut other = work_dir.command();
    other.env("XDG_STATE_HOME", work_dir.path("other")).env("LOCKBOX_PASSFILE", work_dir.path("pass"));
    assert_eq!(output_of(other.args(["add", "b.lbx", "file", "--to", "/elsewhere"])).code, 0);
    let before = fs::read(work_dir.path("b.lbx")).unwrap();
    for flags in [&[][..], &["--accept-older"]] {
        let output = work_dir.run(&[&["ls", "b.lbx"], flags].concat());
        assert_eq!(output.code, OLDER);
        assert!(output.stderr.contains("diverged") && output.stderr.contains("--accept-fork"), "{}", output.stderr);
    }
    assert!(before == fs::read(work_dir.path("b.lbx")).unwrap());
    assert_eq!(work_dir.run(&["ls", "b.lbx", "--accept-fork"]).code, 0);
    assert_eq!(work_dir.run(&["ls", "a.lbx"]).code, OLDER);
}

#[test]
fn a_header_from_before_a_change_of_the_passphrase_is_refused() {
    const HEADERS: [std::ops::Range<usize>; 2] = [0..33 * 4096, 320 * 4096..353 * 4096];
    let work_dir = TestDir::new();
    let path = work_dir.create_archive("a.lbx");
    work_dir.write_passfile("new", "another one");
    let before = fs::read(&path).unwrap();
    let change = ["passwd", "a.lbx", "--new-passfile", "new", "--kdf-memory", "1", "--kdf-passes", "1", "--weak-kdf"];
    assert_eq!(work_dir.run(&change).code, 0);
    let mut bytes = fs::read(&path).unwrap();
    for range in HEADERS {
        bytes[range.clone()].copy_from_slice(&before[range]);
    }
    fs::write(&path, bytes).unwrap();
    // Who saw the change, and who remembers nothing.
    for home in ["state", "another"] {
        for words in [&["ls", "a.lbx"][..], &["key", "ls", "a.lbx"], &["key", "test", "a.lbx"]] {
            let mut command = work_dir.command();
            command.env("XDG_STATE_HOME", work_dir.path(home)).env("LOCKBOX_PASSFILE", work_dir.path("pass"));
            let output = output_of(command.args(words));
            assert_eq!(output.code, OLDER, "{words:?}: {}", output.stderr);
            assert!(output.stdout.is_empty() && output.stderr.contains("header"), "{}", output.stderr);
        }
    }
    for words in [["key", "ls"], ["key", "test"]] {
        let accepted = work_dir.run(&[words[0], words[1], "a.lbx", "--accept-older"]);
        assert!(accepted.code == 0 && !accepted.stdout.is_empty(), "{words:?}: {}", accepted.stderr);
    }
}

#[test]
fn info_shows_the_commit_that_can_be_compared() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let show = || -> Value { serde_json::from_slice(&work_dir.run_ok(&["info", "--json", "a.lbx"])).unwrap() };
    let first = show();
    assert_eq!(first["session"].as_str().unwrap().len(), 32);
    work_dir.run_ok(&["add", "a.lbx", "pass"]);
    let second = show();
    assert!(second["generation"].as_u64() > first["generation"].as_u64());
    assert_ne!(second["session"], first["session"]);
}

#[test]
fn a_state_directory_that_cannot_be_made_costs_one_warning() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let mut command = work_dir.command();
    command.env("XDG_STATE_HOME", work_dir.path("pass")).env("LOCKBOX_PASSFILE", work_dir.path("pass"));
    let output = output_of(command.args(["add", "a.lbx", "pass"]));
    assert_eq!(output.code, 0);
    assert_eq!(output.stderr.matches("would not be noticed").count(), 1, "{}", output.stderr);
}

/// The golden archive's newest record is the same whether entries of its log are there or not.
#[test]
fn a_copy_without_the_last_entries_of_the_log_is_refused() {
    let work_dir = TestDir::new();
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/golden/log.lbx.zst");
    let whole = zstd::decode_all(&fs::read(golden).unwrap()[..]).unwrap();
    let passfile = work_dir.write_passfile("golden pass", "golden one");
    let run = |arguments: &[&str]| {
        let output = work_dir.command().env("LOCKBOX_PASSFILE", &passfile).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    fs::write(work_dir.path("a.lbx"), &whole).unwrap();
    assert_eq!(run(&["ls", "a.lbx"]).0, Some(0));
    // The last three of ten: a reader remembers the ninth. What overwrites them is what the log has behind them.
    let mut cut = whole.clone();
    let log = 65 * 4096..320 * 4096;
    let filler = whole[log.end - 4096..log.end].to_vec();
    let used = log.clone().step_by(4096).rfind(|&at| whole[at..at + 4096] != filler).unwrap();
    for block in 0..3 {
        cut[used - 4096 * block..][..4096].copy_from_slice(&filler);
    }
    fs::write(work_dir.path("a.lbx"), &cut).unwrap();
    for command in [&["ls", "a.lbx"][..], &["check", "a.lbx"], &["cat", "a.lbx", "cut"], &["purge", "a.lbx"]] {
        let (code, stderr) = run(command);
        assert_eq!(code, Some(OLDER), "{command:?}: {stderr}");
        assert!(stderr.contains("entries of its log") && stderr.contains("--accept-older"), "{stderr}");
        // But for room at the end that no record names, which an opening for writing cuts off.
        assert!(cut.starts_with(&fs::read(work_dir.path("a.lbx")).unwrap()));
    }
    assert_eq!(run(&["ls", "a.lbx", "--accept-older"]).0, Some(0));
    assert_eq!(run(&["ls", "a.lbx"]).0, Some(0), "it is the one that is remembered now");
}
