//! `lockbox compact` as its users meet it: killed, stopped, and beside older copies.

use std::fs;
use std::os::unix::fs::MetadataExt;

use nix::sys::signal::Signal;

use crate::support::{TestDir, noise, stop};

const OLDER: i32 = 16;

fn names(work_dir: &TestDir) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(work_dir.path("box")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// An archive that takes a moment to be written anew, alone in its directory.
fn filled() -> TestDir {
    let work_dir = TestDir::new();
    fs::create_dir(work_dir.path("box")).unwrap();
    work_dir.create_archive("box/a.lbx");
    for n in 0..6 {
        fs::write(work_dir.path(format!("file{n}")), noise(8 << 20)).unwrap();
        work_dir.run_ok(&["add", "box/a.lbx", &format!("file{n}")]);
    }
    work_dir
}

/// Starts a compaction and sends the signal as soon as the new file lies beside the old one; the exit code, unless it was done before.
fn interrupted(work_dir: &TestDir, signal: Signal) -> Option<(Option<i32>, String)> {
    stop(work_dir.start(&mut work_dir.command(), &["compact", "box/a.lbx"]), signal, || names(work_dir).len() >= 2)
}

#[test]
fn a_terminated_compaction_leaves_the_archive_alone_and_no_file_beside_it() {
    let work_dir = filled();
    for _ in 0..10 {
        let before = fs::read(work_dir.path("box/a.lbx")).unwrap();
        let Some((code, stderr)) = interrupted(&work_dir, Signal::SIGTERM) else { continue };
        assert!(code.is_some() && stderr.contains("the archive is unchanged"), "{code:?} {stderr}");
        assert_eq!(names(&work_dir), ["a.lbx"]);
        assert!(fs::read(work_dir.path("box/a.lbx")).unwrap() == before);
        return;
    }
    panic!("no compaction could be stopped");
}

#[test]
fn a_killed_compaction_leaves_a_whole_archive_and_the_next_one_clears_up() {
    let work_dir = filled();
    for _ in 0..10 {
        let before = fs::read(work_dir.path("box/a.lbx")).unwrap();
        let inode = |name: &str| fs::metadata(work_dir.path("box").join(name)).unwrap().ino();
        let old = inode("a.lbx");
        if interrupted(&work_dir, Signal::SIGKILL).is_none() || names(&work_dir).len() < 2 {
            continue;
        }
        // Between the exchange of the names and its removal, the old file has the other name.
        let old_name = names(&work_dir).into_iter().find(|name| inode(name) == old).expect("the old file is gone");
        assert!(fs::read(work_dir.path("box").join(&old_name)).unwrap() == before);
        work_dir.run_ok(&["check", "--full", "box/a.lbx"]);
        work_dir.run_ok(&["compact", "box/a.lbx"]);
        assert_eq!(names(&work_dir), ["a.lbx"]);
        work_dir.run_ok(&["check", "--full", "box/a.lbx"]);
        for n in 0..6 {
            let name = format!("file{n}");
            assert!(work_dir.run_ok(&["cat", "box/a.lbx", &name]) == fs::read(work_dir.path(&name)).unwrap());
        }
        if old_name == "a.lbx" {
            return;
        }
    }
    panic!("no compaction could be killed before the exchange of the names");
}

#[test]
fn the_archive_as_it_was_before_a_compaction_is_an_older_copy() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::write(work_dir.path("file"), noise(300_000)).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "file"]);
    fs::copy(work_dir.path("a.lbx"), work_dir.path("before.lbx")).unwrap();
    work_dir.run_ok(&["compact", "a.lbx"]);
    for command in ["info", "compact", "purge", "check"] {
        let output = work_dir.run(&[command, "before.lbx"]);
        assert_eq!(output.code, OLDER, "{command}: {}", output.stderr);
    }
    work_dir.run_ok(&["add", "--force", "a.lbx", "file"]);
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    // What is only read page by page may be of any age.
    work_dir.run_ok(&["rescue", "before.lbx", "--to", "out"]);
    assert!(fs::read(work_dir.path("out/file")).unwrap() == noise(300_000));
}
