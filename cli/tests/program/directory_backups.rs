//! `lockbox backup` of a directory: each run is a snapshot of an archive, in a file and in a store, and no run costs one that came before.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::living_elsewhere::CREATE;
use crate::support::{Ended, PASSPHRASE, Place, describe, names, noise, stop};

/// The archive in a file, and in a directory of objects.
fn destinations(place: &Place) -> [String; 2] {
    let store = format!("file://{}", place.path("store").display());
    let both = ["b.lbx".to_owned(), store];
    both.iter().for_each(|at| drop(place.good(&[&["create", at], &CREATE[..]].concat())));
    both
}

fn tree(place: &Place) {
    fs::create_dir_all(place.path("tree/dir")).unwrap();
    for name in ["one", "two", "three", "dir/four"] {
        fs::write(place.path("tree").join(name), name).unwrap();
    }
}

fn backed_up(place: &Place, arguments: &[&str]) -> Value {
    serde_json::from_slice(&place.good(&[&["backup", "--json"], arguments].concat())).unwrap()
}

fn name(run: &Value) -> String {
    run["snapshot"].as_str().unwrap().to_owned()
}

fn snapshots(place: &Place, at: &str) -> Vec<String> {
    let listed = String::from_utf8(place.good(&["snapshot", "ls", "--json", at])).unwrap();
    listed
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["name"].as_str().unwrap().to_owned())
        .collect()
}

fn refused(place: &Place, arguments: &[&str], code: i32, why: &str) {
    let Ended { code: ended, complaint, .. } = place.run(arguments);
    assert!(ended == code && complaint.contains(why), "{ended}: {complaint}");
}

#[test]
fn each_run_is_a_snapshot_of_the_whole_directory() {
    let place = Place::new();
    tree(&place);
    for (number, at) in destinations(&place).iter().enumerate() {
        let first = backed_up(&place, &["tree", at]);
        assert!(name(&first).starts_with("backup-20") && name(&first).ends_with('Z'), "{first}");
        assert_eq!((&first["files"], &first["removed_snapshots"]), (&4.into(), &Value::Array(vec![])));
        let before = describe(&place.path("tree"));
        fs::write(place.path("tree/one"), "one and more").unwrap();
        fs::rename(place.path("tree/two"), place.path("tree/dir/two")).unwrap();
        fs::remove_file(place.path("tree/three")).unwrap();
        fs::write(place.path("tree/new"), "new").unwrap();
        let second = backed_up(&place, &["--verify", "tree", at]);
        assert_eq!((&second["verified"], &second["deleted"]), (&true.into(), &2.into()), "{second}");
        let third = backed_up(&place, &["tree", at]);
        assert_eq!(third["files"], 0, "nothing has changed");
        let made = [name(&first), name(&second), name(&third)];
        assert_eq!(snapshots(&place, at), made);
        for (run, tree) in [(&made[0], &before), (&made[2], &describe(&place.path("tree")))] {
            let out = format!("out{number}-{run}");
            place.good(&["extract", "--snapshot", run, "--to", &out, at]);
            assert_eq!(&describe(&place.path(Path::new(&out).join("tree"))), tree);
        }
        let changes = String::from_utf8(place.good(&["snapshot", "diff", at, &made[0], &made[1]])).unwrap();
        assert_eq!(changes, "A tree/dir/two\nA tree/new\nM tree/one\nD tree/three\nD tree/two\n");
        assert_eq!(place.good(&["snapshot", "diff", at, &made[1], &made[2]]), b"");
        fs::remove_dir_all(place.path("tree")).unwrap();
        tree(&place);
    }
}

#[test]
fn pruning_keeps_what_the_rules_say_and_what_no_backup_made() {
    let place = Place::new();
    tree(&place);
    for at in destinations(&place) {
        place.good(&["snapshot", "create", &at, "monday"]);
        let made: Vec<Value> = (0..3).map(|_| backed_up(&place, &["tree", &at])).collect();
        let last = backed_up(&place, &["--keep-last", "2", "tree", &at]);
        let gone: Vec<Value> = made[..2].iter().map(|run| run["snapshot"].clone()).collect();
        assert_eq!(last["removed_snapshots"], Value::Array(gone));
        assert_eq!(snapshots(&place, &at), ["monday".to_owned(), name(&made[2]), name(&last)]);
        place.good(&["check", "--full", &at]);
    }
}

#[test]
fn the_first_run_makes_the_archive_and_its_secret_opens_it() {
    let place = Place::new();
    tree(&place);
    let first = backed_up(&place, &["--quiet", "tree", "new.lbx"]);
    assert_eq!(snapshots(&place, "new.lbx"), [name(&first)]);
    let said = place.good(&["backup", "--verify=20", "tree", "new.lbx"]);
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains(" bytes of it verified (20%, chosen at random)\n"), "{said}");
    // As when its disk is not mounted any more.
    fs::rename(place.path("new.lbx"), place.path("away.lbx")).unwrap();
    refused(&place, &["backup", "tree", "new.lbx"], 2, "new.lbx is missing, although an archive was there: ");
    assert!(!place.path("new.lbx").exists());
    place.secret("code", "abandon");
    refused(&place, &["backup", "--recovery-code", "code", "tree", "other.lbx"], 1, "begins with a passphrase");
    assert!(!place.path("other.lbx").exists());
}

#[test]
fn what_looks_like_a_mistake_changes_nothing() {
    let place = Place::new();
    tree(&place);
    place.archive("b.lbx");
    let run = name(&backed_up(&place, &["tree", "b.lbx"]));
    for name in ["one", "two", "dir/four"] {
        fs::remove_file(place.path("tree").join(name)).unwrap();
    }
    fs::remove_dir(place.path("tree/dir")).unwrap();
    refused(&place, &["backup", "tree", "b.lbx"], 2, "more than half (if that is right: --delete-most)");
    fs::create_dir(place.path("empty")).unwrap();
    for to in ["b.lbx", "none.lbx"] {
        refused(&place, &["backup", "empty", to], 2, "empty is empty; mount its file system, or use --from-empty");
    }
    assert!(!place.path("none.lbx").exists());
    assert_eq!(snapshots(&place, "b.lbx"), [run.as_str()]);
    assert_eq!(place.good(&["snapshot", "diff", "b.lbx", &run]), b"");
    let done = backed_up(&place, &["--delete-most", "tree", "b.lbx"]);
    assert_eq!(done["deleted"], 4);
    backed_up(&place, &["--from-empty", "empty", "b.lbx"]);
    assert_eq!(snapshots(&place, "b.lbx").len(), 3);
}

#[test]
fn directories_and_archives_are_not_backed_up_over_each_other() {
    let place = Place::new();
    tree(&place);
    place.archive("a.lbx");
    place.good(&["backup", "a.lbx", "of-a.lbx"]);
    let before = fs::read(place.path("of-a.lbx")).unwrap();
    refused(&place, &["backup", "tree", "of-a.lbx"], 2, "of-a.lbx is the backup of an archive, and stays one");
    assert!(fs::read(place.path("of-a.lbx")).unwrap() == before);
    place.good(&["backup", "a.lbx", "of-a.lbx"]);
    place.archive("b.lbx");
    backed_up(&place, &["tree", "b.lbx"]);
    refused(&place, &["backup", "a.lbx", "b.lbx"], 2, "it is, or is a backup of, another archive");
    refused(&place, &["backup", "--keep-daily", "7", "a.lbx", "of-a.lbx"], 1, "--keep-* is for directories");
    for option in ["--one-file-system", "--from-empty", "--delete-most", "--exclude=x"] {
        refused(&place, &["backup", option, "a.lbx", "of-a.lbx"], 1, "is for directories; a.lbx is an archive");
    }
    refused(&place, &["backup", "tree", "-"], 1, "not a stream");
    let store = format!("file://{}", place.path("tree/deep/store").display());
    for within in ["tree/b.lbx", "tree/deep/b.lbx", &store] {
        refused(&place, &["backup", "tree", within], 1, "lies in the directory that is to be backed up");
    }
    assert_eq!(names(&place.path("tree")), ["dir", "one", "three", "two"]);
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
    let place = Place::new();
    tree(&place);
    for (number, at) in destinations(&place).iter().enumerate() {
        let first = name(&backed_up(&place, &["tree", at]));
        let mut complete = 1;
        for signal in [Signal::SIGKILL, Signal::SIGTERM] {
            let stopped = (0..20).any(|attempt| {
                for n in 0..8 {
                    fs::write(place.path(format!("tree/large{n}")), noise((8 << 20) + 8 * attempt + n)).unwrap();
                }
                let begun = size(&place.path("."));
                let child = place.start(&mut place.command(), &["backup", "tree", at]);
                let stopped = stop(child, signal, || size(&place.path(".")) > begun + (4 << 20)).is_some();
                complete += usize::from(!stopped);
                stopped
            });
            assert!(stopped, "no run could be stopped");
        }
        let left = snapshots(&place, at);
        assert_eq!((&left[0], left.len()), (&first, complete), "a run that was stopped has no snapshot");
        let out = format!("out{number}");
        place.good(&["extract", "--snapshot", &first, "--to", &out, at]);
        assert_eq!(names(&place.path(&out).join("tree")), ["dir", "one", "three", "two"]);
        let last = name(&backed_up(&place, &["tree", at]));
        let out = format!("out{number}-last");
        place.good(&["extract", "--snapshot", &last, "--to", &out, at]);
        assert_eq!(describe(&place.path(out).join("tree")), describe(&place.path("tree")));
        place.good(&["check", "--full", at]);
        (0..8).for_each(|n| fs::remove_file(place.path(format!("tree/large{n}"))).unwrap());
    }
}

#[test]
fn metrics_are_of_the_last_success() {
    let place = Place::new();
    tree(&place);
    place.archive("b.lbx");
    let run = |source| place.run(&["backup", "--metrics", "b.prom", source, "b.lbx"]);
    assert_eq!(run("tree").code, 0);
    let text = fs::read_to_string(place.path("b.prom")).unwrap();
    for line in ["lockbox_backup_files{source=\"tree\",destination=\"b.lbx\"} 4", "# EOF"] {
        assert!(text.lines().any(|one| one == line), "{text}");
    }
    let time = "lockbox_backup_last_success_timestamp_seconds{source=\"tree\",destination=\"b.lbx\"} ";
    let time = text.lines().find_map(|line| line.strip_prefix(time)).unwrap();
    assert!(time.parse::<u64>().unwrap() > 1_700_000_000);
    fs::create_dir(place.path("empty")).unwrap();
    assert_eq!(run("empty").code, 2);
    assert_eq!(fs::read_to_string(place.path("b.prom")).unwrap(), text, "a failure leaves it");
    let beside = names(&place.path(".")).into_iter().filter(|name| name.to_string_lossy().starts_with("b.prom"));
    assert_eq!(beside.count(), 1);
    let ended = place.run(&["backup", "--metrics", "none/b.prom", "tree", "b.lbx"]);
    assert!(ended.code == 2 && ended.complaint.contains("the backup is complete; cannot write its metrics"));
    assert!(!PASSPHRASE.is_empty() && !text.contains(PASSPHRASE));
}
