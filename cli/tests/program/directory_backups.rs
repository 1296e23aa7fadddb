//! `lockbox backup` of a directory: each run is a snapshot of an archive, in a file and in a store, and no run costs one that came before.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::living_elsewhere::CREATE;
use crate::support::{PASSPHRASE, TestDir, describe, names, noise, stop};

/// The archive in a file, and in a directory of objects.
fn destinations(work_dir: &TestDir) -> [String; 2] {
    let store = format!("file://{}", work_dir.path("store").display());
    let both = ["b.lbx".to_owned(), store];
    both.iter().for_each(|at| drop(work_dir.run_ok(&[&["create", at], &CREATE[..]].concat())));
    both
}

fn tree(work_dir: &TestDir) {
    fs::create_dir_all(work_dir.path("tree/dir")).unwrap();
    for name in ["one", "two", "three", "dir/four"] {
        fs::write(work_dir.path("tree").join(name), name).unwrap();
    }
}

fn backed_up(work_dir: &TestDir, arguments: &[&str]) -> Value {
    serde_json::from_slice(&work_dir.run_ok(&[&["backup", "--json"], arguments].concat())).unwrap()
}

fn name(run: &Value) -> String {
    run["snapshot"].as_str().unwrap().to_owned()
}

fn snapshots(work_dir: &TestDir, at: &str) -> Vec<String> {
    snapshot_names(work_dir.run_ok(&["snapshot", "ls", "--json", at]))
}

fn snapshot_names(listed: Vec<u8>) -> Vec<String> {
    String::from_utf8(listed)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["name"].as_str().unwrap().to_owned())
        .collect()
}

fn refused(work_dir: &TestDir, arguments: &[&str], code: i32, why: &str) {
    let output = work_dir.run(arguments);
    assert!(output.code == code && output.stderr.contains(why), "{output:?}");
}

#[test]
fn each_run_is_a_snapshot_of_the_whole_directory() {
    let work_dir = TestDir::new();
    tree(&work_dir);
    for (number, at) in destinations(&work_dir).iter().enumerate() {
        let first = backed_up(&work_dir, &["tree", at]);
        assert!(name(&first).starts_with("backup-20") && name(&first).ends_with('Z'), "{first}");
        assert_eq!((&first["files"], &first["removed_snapshots"]), (&4.into(), &Value::Array(vec![])));
        let before = describe(&work_dir.path("tree"));
        fs::write(work_dir.path("tree/one"), "one and more").unwrap();
        fs::rename(work_dir.path("tree/two"), work_dir.path("tree/dir/two")).unwrap();
        fs::remove_file(work_dir.path("tree/three")).unwrap();
        fs::write(work_dir.path("tree/new"), "new").unwrap();
        let second = backed_up(&work_dir, &["--verify", "tree", at]);
        assert_eq!((&second["verified"], &second["deleted"]), (&true.into(), &2.into()), "{second}");
        let third = backed_up(&work_dir, &["tree", at]);
        assert_eq!(third["files"], 0, "nothing has changed");
        let made = [name(&first), name(&second), name(&third)];
        assert_eq!(snapshots(&work_dir, at), made);
        for (run, tree) in [(&made[0], &before), (&made[2], &describe(&work_dir.path("tree")))] {
            let out = format!("out{number}-{run}");
            work_dir.run_ok(&["extract", "--snapshot", run, "--to", &out, at]);
            assert_eq!(&describe(&work_dir.path(Path::new(&out).join("tree"))), tree);
        }
        let changes = String::from_utf8(work_dir.run_ok(&["snapshot", "diff", at, &made[0], &made[1]])).unwrap();
        assert_eq!(changes, "A tree/dir/two\nA tree/new\nM tree/one\nD tree/three\nD tree/two\n");
        assert_eq!(work_dir.run_ok(&["snapshot", "diff", at, &made[1], &made[2]]), b"");
        fs::remove_dir_all(work_dir.path("tree")).unwrap();
        tree(&work_dir);
    }
}

#[test]
fn pruning_keeps_what_the_rules_say_and_what_no_backup_made() {
    let work_dir = TestDir::new();
    tree(&work_dir);
    for at in destinations(&work_dir) {
        work_dir.run_ok(&["snapshot", "create", &at, "monday"]);
        let made: Vec<Value> = (0..3).map(|_| backed_up(&work_dir, &["tree", &at])).collect();
        let last = backed_up(&work_dir, &["--keep-last", "2", "tree", &at]);
        let gone: Vec<Value> = made[..2].iter().map(|run| run["snapshot"].clone()).collect();
        assert_eq!(last["removed_snapshots"], Value::Array(gone));
        assert_eq!(snapshots(&work_dir, &at), ["monday".to_owned(), name(&made[2]), name(&last)]);
        work_dir.run_ok(&["check", "--full", &at]);
    }
}

#[test]
fn the_first_run_makes_the_archive_and_its_secret_opens_it() {
    let work_dir = TestDir::new();
    tree(&work_dir);
    let first = backed_up(&work_dir, &["--quiet", "tree", "new.lbx"]);
    assert_eq!(snapshots(&work_dir, "new.lbx"), [name(&first)]);
    let said = work_dir.run_ok(&["backup", "--verify=20", "tree", "new.lbx"]);
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains(" bytes of it verified (20%, chosen at random)\n"), "{said}");
    // As when its disk is not mounted any more.
    fs::rename(work_dir.path("new.lbx"), work_dir.path("away.lbx")).unwrap();
    refused(&work_dir, &["backup", "tree", "new.lbx"], 2, "new.lbx is missing, although an archive was there: ");
    assert!(!work_dir.path("new.lbx").exists());
    work_dir.write_passfile("code", "abandon");
    refused(&work_dir, &["backup", "--recovery-code", "code", "tree", "other.lbx"], 1, "begins with a passphrase");
    assert!(!work_dir.path("other.lbx").exists());
}

#[test]
fn what_looks_like_a_mistake_changes_nothing() {
    let work_dir = TestDir::new();
    tree(&work_dir);
    work_dir.create_archive("b.lbx");
    let run = name(&backed_up(&work_dir, &["tree", "b.lbx"]));
    for name in ["one", "two", "dir/four"] {
        fs::remove_file(work_dir.path("tree").join(name)).unwrap();
    }
    fs::remove_dir(work_dir.path("tree/dir")).unwrap();
    refused(&work_dir, &["backup", "tree", "b.lbx"], 2, "more than half (if that is right: --delete-most)");
    fs::create_dir(work_dir.path("empty")).unwrap();
    for to in ["b.lbx", "none.lbx"] {
        refused(&work_dir, &["backup", "empty", to], 2, "empty is empty; mount its file system, or use --from-empty");
    }
    assert!(!work_dir.path("none.lbx").exists());
    assert_eq!(snapshots(&work_dir, "b.lbx"), [run.as_str()]);
    assert_eq!(work_dir.run_ok(&["snapshot", "diff", "b.lbx", &run]), b"");
    let done = backed_up(&work_dir, &["--delete-most", "tree", "b.lbx"]);
    assert_eq!(done["deleted"], 4);
    backed_up(&work_dir, &["--from-empty", "empty", "b.lbx"]);
    assert_eq!(snapshots(&work_dir, "b.lbx").len(), 3);
}

#[test]
fn directories_and_archives_are_not_backed_up_over_each_other() {
    let work_dir = TestDir::new();
    tree(&work_dir);
    work_dir.create_archive("a.lbx");
    work_dir.run_ok(&["backup", "a.lbx", "of-a.lbx"]);
    let before = fs::read(work_dir.path("of-a.lbx")).unwrap();
    refused(&work_dir, &["backup", "tree", "of-a.lbx"], 2, "of-a.lbx is the backup of an archive, and stays one");
    assert!(fs::read(work_dir.path("of-a.lbx")).unwrap() == before);
    work_dir.run_ok(&["backup", "a.lbx", "of-a.lbx"]);
    work_dir.create_archive("b.lbx");
    backed_up(&work_dir, &["tree", "b.lbx"]);
    refused(&work_dir, &["backup", "a.lbx", "b.lbx"], 2, "it is, or is a backup of, another archive");
    refused(&work_dir, &["backup", "--keep-daily", "7", "a.lbx", "of-a.lbx"], 1, "--keep-* is for directories");
    for option in ["--one-file-system", "--from-empty", "--delete-most", "--exclude=x"] {
        refused(&work_dir, &["backup", option, "a.lbx", "of-a.lbx"], 1, "is for directories; a.lbx is an archive");
    }
    refused(&work_dir, &["backup", "tree", "-"], 1, "not a stream");
    let store = format!("file://{}", work_dir.path("tree/deep/store").display());
    for within in ["tree/b.lbx", "tree/deep/b.lbx", &store] {
        refused(&work_dir, &["backup", "tree", within], 1, "lies in the directory that is to be backed up");
    }
    assert_eq!(names(&work_dir.path("tree")), ["dir", "one", "three", "two"]);
}

/// Bytes of all files below.
fn size(at: &Path) -> u64 {
    // Objects come and go meanwhile.
    let entries = fs::read_dir(at).into_iter().flatten().flatten();
    let of = |path: &Path| match path.symlink_metadata() {
        Ok(file) if file.is_dir() => size(path),
        Ok(file) => file.len(),
        Err(_) => 0,
    };
    entries.map(|entry| of(&entry.path())).sum()
}

#[test]
fn a_stopped_run_leaves_the_snapshots_of_those_before_and_the_next_one_completes_it() {
    let work_dir = TestDir::new();
    tree(&work_dir);
    for (number, at) in destinations(&work_dir).iter().enumerate() {
        let first = name(&backed_up(&work_dir, &["tree", at]));
        let mut complete = 1;
        for signal in [Signal::SIGKILL, Signal::SIGTERM] {
            let stopped = (0..20).any(|attempt| {
                for n in 0..8 {
                    fs::write(work_dir.path(format!("tree/large{n}")), noise((8 << 20) + 8 * attempt + n)).unwrap();
                }
                let begun = size(&work_dir.path("."));
                let child = work_dir.start(&mut work_dir.command(), &["backup", "tree", at]);
                let mut stopped = stop(child, signal, || size(&work_dir.path(".")) > begun + (4 << 20)).is_some();
                if stopped && signal == Signal::SIGKILL {
                    // A reader may warn of a write that the kill interrupted.
                    let listed = work_dir.run(&["snapshot", "ls", "--json", at]);
                    assert_eq!(listed.code, 0, "{}", listed.stderr);
                    let listed = snapshot_names(listed.stdout);
                    // The kill may come after the snapshot, which must be complete then.
                    if listed.len() > complete {
                        stopped = false;
                        let out = format!("out{number}-{attempt}");
                        let late = listed.last().unwrap();
                        assert_eq!(work_dir.run(&["extract", "--snapshot", late, "--to", &out, at]).code, 0);
                        assert_eq!(describe(&work_dir.path(out).join("tree")), describe(&work_dir.path("tree")));
                    }
                }
                complete += usize::from(!stopped);
                stopped
            });
            assert!(stopped, "no run could be stopped");
        }
        let left = snapshots(&work_dir, at);
        assert_eq!((&left[0], left.len()), (&first, complete), "a run that was stopped has no snapshot");
        let out = format!("out{number}");
        work_dir.run_ok(&["extract", "--snapshot", &first, "--to", &out, at]);
        assert_eq!(names(&work_dir.path(&out).join("tree")), ["dir", "one", "three", "two"]);
        let last = name(&backed_up(&work_dir, &["tree", at]));
        let out = format!("out{number}-last");
        work_dir.run_ok(&["extract", "--snapshot", &last, "--to", &out, at]);
        assert_eq!(describe(&work_dir.path(out).join("tree")), describe(&work_dir.path("tree")));
        work_dir.run_ok(&["check", "--full", at]);
        (0..8).for_each(|n| fs::remove_file(work_dir.path(format!("tree/large{n}"))).unwrap());
    }
}

#[test]
fn metrics_are_of_the_last_success() {
    let work_dir = TestDir::new();
    tree(&work_dir);
    work_dir.create_archive("b.lbx");
    let run = |source| work_dir.run(&["backup", "--metrics", "b.prom", source, "b.lbx"]);
    assert_eq!(run("tree").code, 0);
    let text = fs::read_to_string(work_dir.path("b.prom")).unwrap();
    for line in ["lockbox_backup_files{source=\"tree\",destination=\"b.lbx\"} 4", "# EOF"] {
        assert!(text.lines().any(|one| one == line), "{text}");
    }
    let time = "lockbox_backup_last_success_timestamp_seconds{source=\"tree\",destination=\"b.lbx\"} ";
    let time = text.lines().find_map(|line| line.strip_prefix(time)).unwrap();
    assert!(time.parse::<u64>().unwrap() > 1_700_000_000);
    fs::create_dir(work_dir.path("empty")).unwrap();
    assert_eq!(run("empty").code, 2);
    assert_eq!(fs::read_to_string(work_dir.path("b.prom")).unwrap(), text, "a failure leaves it");
    let beside = names(&work_dir.path(".")).into_iter().filter(|name| name.to_string_lossy().starts_with("b.prom"));
    assert_eq!(beside.count(), 1);
    let output = work_dir.run(&["backup", "--metrics", "none/b.prom", "tree", "b.lbx"]);
    assert!(output.code == 2 && output.stderr.contains("the backup is complete; cannot write its metrics"));
    assert!(!PASSPHRASE.is_empty() && !text.contains(PASSPHRASE));
}
