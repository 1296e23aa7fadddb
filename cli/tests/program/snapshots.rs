//! `lockbox snapshot` and `--snapshot` as their users meet them.

use std::fs;

use crate::import_extract::make_tree;
use crate::support::{TestDir, describe, noise};

fn text(out: Vec<u8>) -> String {
    String::from_utf8(out).unwrap()
}

/// Two moments of a tree, and a third one that is there now; copies of the first two lie beside.
fn moments() -> TestDir {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let tree = work_dir.path("tree");
    make_tree(&tree);
    fs::write(tree.join("both"), noise(2_000_000)).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    assert_eq!(text(work_dir.run_ok(&["snapshot", "create", "a.lbx", "first"])), "first\n");
    work_dir.run_ok(&["extract", "a.lbx", "--to", "at first", "--privileges"]);
    fs::remove_dir_all(tree.join("a")).unwrap();
    fs::rename(tree.join("dir"), tree.join("renamed")).unwrap();
    fs::write(tree.join("tiny"), "another one, which is longer").unwrap();
    work_dir.run_ok(&["add", "--mirror", "a.lbx", "tree"]);
    work_dir.run_ok(&["snapshot", "create", "a.lbx", "second"]);
    work_dir.run_ok(&["extract", "a.lbx", "--to", "at second", "--privileges"]);
    fs::remove_dir_all(&tree).unwrap();
    fs::create_dir(&tree).unwrap();
    work_dir.run_ok(&["add", "--mirror", "--from-empty", "--delete-most", "a.lbx", "tree"]);
    work_dir
}

fn assert_extracts(work_dir: &TestDir, name: &str) {
    let to = format!("again {name}");
    work_dir.run_ok(&["extract", "a.lbx", "--snapshot", name, "--to", &to, "--privileges"]);
    assert!(
        describe(&work_dir.path(&to).join("tree")) == describe(&work_dir.path(format!("at {name}/tree"))),
        "{name}"
    );
    fs::remove_dir_all(work_dir.path(&to)).unwrap();
}

#[test]
fn what_was_there_at_a_snapshot_is_read_by_every_command_that_reads() {
    let work_dir = moments();
    assert_extracts(&work_dir, "first");
    assert_extracts(&work_dir, "second");
    assert_eq!(text(work_dir.run_ok(&["cat", "a.lbx", "--snapshot", "first", "tree/tiny"])), "tiny");
    assert_eq!(text(work_dir.run_ok(&["ls", "a.lbx", "tree/renamed/empty", "--snapshot", "second"])), "");
    assert_eq!(text(work_dir.run_ok(&["ls", "a.lbx", "--snapshot", "first"])), "tree\n");
    assert_eq!(text(work_dir.run_ok(&["ls", "a.lbx", "tree"])), "");
    let tar = work_dir.run_ok(&["export-tar", "a.lbx", "--snapshot", "second", "tree/tiny"]);
    assert!(tar.windows(28).any(|window| window == b"another one, which is longer"));
    // Removed in any order, the others stay.
    work_dir.run_ok(&["snapshot", "rm", "a.lbx", "first"]);
    assert_extracts(&work_dir, "second");
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    work_dir.run_ok(&["snapshot", "rm", "a.lbx", "second"]);
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    assert_eq!(text(work_dir.run_ok(&["snapshot", "ls", "a.lbx"])), "");
}

#[test]
fn the_list_tells_names_times_and_what_removing_gives_back() {
    let work_dir = moments();
    let lines = text(work_dir.run_ok(&["snapshot", "ls", "a.lbx"]));
    let ends: Vec<&str> = lines.lines().filter_map(|line| line.split("  ").last()).collect();
    assert_eq!(ends, ["first", "second"]);
    let used = || -> u64 {
        let info: serde_json::Value = serde_json::from_slice(&work_dir.run_ok(&["info", "--json", "a.lbx"])).unwrap();
        info["used_bytes"].as_u64().unwrap()
    };
    let before = used();
    let listed: Vec<serde_json::Value> = text(work_dir.run_ok(&["snapshot", "ls", "--json", "a.lbx"]))
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(listed[0]["name"], "first");
    assert!(
        listed[0]["time"].as_str().unwrap().ends_with('Z')
            && listed[0]["inodes"].as_u64() > listed[1]["inodes"].as_u64()
    );
    // Each has its own copy of the 3 MB of `dir/large`, as a mirror makes it of what was renamed; what both have is in neither sum.
    let held = |listed: &serde_json::Value| listed["held_bytes"].as_u64().unwrap();
    assert!(listed.iter().all(|one| (3_000_000..4_000_000).contains(&held(one))), "{listed:?}");
    work_dir.run_ok(&["snapshot", "rm", "a.lbx", "first"]);
    let listed: serde_json::Value =
        serde_json::from_slice(&work_dir.run_ok(&["snapshot", "ls", "--json", "a.lbx"])).unwrap();
    assert!((5_000_000..6_000_000).contains(&held(&listed)), "{listed}");
    work_dir.run_ok(&["snapshot", "rm", "a.lbx", "second"]);
    assert!(used() + 8_000_000 <= before);
}

/// What two of them show and nothing else, as well as what each one does.
#[test]
fn before_a_set_is_removed_it_is_told_what_that_gives_back() {
    let work_dir = moments();
    let told = |arguments: &[&str]| -> Vec<serde_json::Value> {
        let lines = text(work_dir.run_ok(arguments));
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let info = || told(&["info", "--json", "a.lbx"])[0]["used_bytes"].as_u64().unwrap();
    let both = told(&["snapshot", "ls", "--json", "a.lbx", "fir*", "second"]);
    let alone: u64 = both[..2].iter().map(|one| one["held_bytes"].as_u64().unwrap()).sum();
    let held = both[2]["held_bytes"].as_u64().unwrap();
    assert!(both.len() == 3 && both[2]["snapshots"] == 2 && held > alone + 1_900_000, "{both:?}");
    // The same of those that would be removed, by names or rules, and nothing is.
    let all = text(work_dir.run_ok(&["snapshot", "ls", "a.lbx", "*"]));
    let dry = text(work_dir.run_ok(&["snapshot", "rm", "--dry-run", "a.lbx", "*"]));
    assert_eq!(all, dry);
    assert_eq!(told(&["info", "--json", "a.lbx"])[0]["snapshots_held_bytes"], held);
    assert!(
        text(work_dir.run_ok(&["info", "a.lbx"])).contains(&format!("\nSnapshots              2, {held} bytes held\n"))
    );
    let last = format!("2 snapshots; removing all of them frees {held} bytes");
    assert_eq!(all.lines().last(), Some(last.as_str()));
    assert_eq!(text(work_dir.run_ok(&["snapshot", "ls", "a.lbx", "second", "second"])).lines().count(), 2);
    let one = told(&["snapshot", "rm", "--dry-run", "--json", "a.lbx", "first"]);
    assert!(one[0]["name"] == "first" && one[0]["held_bytes"] == one[1]["held_bytes"], "{one:?}");
    let plan = told(&["snapshot", "prune", "--dry-run", "--json", "--keep-last", "1", "a.lbx"]);
    assert_eq!(plan[2], one[1]);
    let plan = text(work_dir.run_ok(&["snapshot", "prune", "--dry-run", "--keep-last", "1", "a.lbx"]));
    assert!(plan.lines().last().unwrap().starts_with("1 snapshot; removing it frees "), "{plan}");
    let plan = text(work_dir.run_ok(&["snapshot", "prune", "--dry-run", "--keep-last", "2", "a.lbx"]));
    assert!(plan.ends_with("\nno snapshot would be removed\n"), "{plan}");
    for command in ["ls", "rm"] {
        let output = work_dir.run(&["snapshot", command, "a.lbx", "first", "other"]);
        assert!(output.code == 2 && output.stderr.contains("has no snapshot 'other'"), "{output:?}");
    }
    assert_eq!(text(work_dir.run_ok(&["snapshot", "ls", "a.lbx"])).lines().count(), 2);
    let before = info();
    work_dir.run_ok(&["snapshot", "rm", "a.lbx", "*"]);
    // Nodes of the trees that list it come and go beside.
    assert!((before - info()).abs_diff(held) < 200_000, "{before} {} {held}", info());
}

#[test]
fn a_name_is_a_time_by_default_and_given_once() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let name = text(work_dir.run_ok(&["snapshot", "create", "a.lbx"]));
    assert!(name.len() == 21 && name.starts_with("20") && name.ends_with("Z\n") && !name.contains(':'), "{name}");
    work_dir.run_ok(&["snapshot", "create", "a.lbx", "kept"]);
    for (name, stderr) in [
        ("kept", "the archive has a snapshot 'kept' already"),
        ("a/b", "no slash"),
        ("..", "neither '.' nor '..'"),
        ("", "1 to 255 bytes"),
        (&"x".repeat(256), "1 to 255 bytes"),
    ] {
        let output = work_dir.run(&["snapshot", "create", "a.lbx", name]);
        assert!(output.code == 2 && output.stderr.contains(stderr), "{name}: {output:?}");
    }
    for arguments in [
        &["ls", "a.lbx", "--snapshot", "other"][..],
        &["cat", "a.lbx", "--snapshot", "", "x"],
        &["snapshot", "rm", "a.lbx", "kept", "other"],
    ] {
        let output = work_dir.run(arguments);
        assert!(output.code == 2 && output.stderr.contains("has no snapshot"), "{output:?}");
    }
    assert_eq!(text(work_dir.run_ok(&["snapshot", "ls", "a.lbx"])).lines().count(), 2);
}

/// Under another volume key too, which changes where names are found.
#[test]
fn snapshots_come_into_a_file_that_is_written_anew() {
    let work_dir = moments();
    let listed = text(work_dir.run_ok(&["snapshot", "ls", "a.lbx"]));
    let names_and_times = |listed: &str| -> Vec<(String, String)> {
        let fields = listed.lines().map(|line| (line.split("  ").next().unwrap(), line.split("  ").last().unwrap()));
        fields.map(|(time, name)| (time.to_owned(), name.to_owned())).collect()
    };
    for arguments in [&["compact", "--dry-run", "a.lbx"][..], &["compact", "a.lbx"], &["key", "rekey", "a.lbx"]] {
        work_dir.run_ok(arguments);
        assert_eq!(names_and_times(&text(work_dir.run_ok(&["snapshot", "ls", "a.lbx"]))), names_and_times(&listed));
        assert_extracts(&work_dir, "first");
        assert_extracts(&work_dir, "second");
        assert_eq!(text(work_dir.run_ok(&["ls", "a.lbx", "tree"])), "");
        work_dir.run_ok(&["check", "--full", "a.lbx"]);
    }
    // What held space there gives it back here.
    work_dir.run_ok(&["snapshot", "rm", "a.lbx", "first"]);
    assert_extracts(&work_dir, "second");
    work_dir.run_ok(&["snapshot", "rm", "a.lbx", "second"]);
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    let info: serde_json::Value = serde_json::from_slice(&work_dir.run_ok(&["info", "--json", "a.lbx"])).unwrap();
    assert!(info["used_bytes"].as_u64().unwrap() < 300_000, "{info}");
}

#[test]
fn a_tree_that_was_removed_by_mistake_comes_back() {
    let work_dir = moments();
    let told = text(work_dir.run_ok(&["snapshot", "diff", "a.lbx", "first", "second"]));
    let lines: Vec<&str> = told.lines().collect();
    assert!(
        lines.contains(&"D tree/dir") && lines.contains(&"A tree/renamed") && lines.contains(&"M tree/tiny"),
        "{told}"
    );
    assert!(lines.is_sorted_by_key(|line| &line[2..]) && !told.contains("tree/both"), "{told}");
    let now = text(work_dir.run_ok(&["snapshot", "diff", "a.lbx", "second"]));
    assert!(now.lines().all(|line| line.starts_with("D tree/") || line == "M tree"), "{now}");

    let before = text(work_dir.run_ok(&["snapshot", "restore", "a.lbx", "first", "tree"]));
    assert!(before.starts_with("before-restore-20") && before.ends_with("Z\n"), "{before}");
    assert_eq!(text(work_dir.run_ok(&["snapshot", "diff", "a.lbx", "first"])), "");
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    work_dir.run_ok(&["snapshot", "rm", "a.lbx", "first"]);
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    work_dir.run_ok(&["extract", "a.lbx", "--to", "back", "--privileges"]);
    assert!(describe(&work_dir.path("back/tree")) == describe(&work_dir.path("at first/tree")));

    // Beside what is there, and all of it.
    assert_eq!(
        text(work_dir.run_ok(&["snapshot", "restore", "a.lbx", "second", "tree/renamed", "--to", "beside"])),
        ""
    );
    let again = work_dir.run(&["snapshot", "restore", "a.lbx", "second", "tree/renamed", "--to", "/beside/"]);
    assert!(again.code == 2 && again.stderr.contains("renamed already exists"), "{again:?}");
    assert_eq!(text(work_dir.run_ok(&["ls", "a.lbx", "beside"])), "renamed\n");
    work_dir.run_ok(&["snapshot", "restore", "a.lbx", before.trim_end()]);
    assert_eq!(text(work_dir.run_ok(&["ls", "a.lbx"])), "tree\n");
    assert_eq!(text(work_dir.run_ok(&["ls", "a.lbx", "tree"])), "");
    work_dir.run_ok(&["snapshot", "restore", "a.lbx", "second", "/"]);
    assert_extracts(&work_dir, "second");
    let kept = text(work_dir.run_ok(&["snapshot", "ls", "a.lbx"]));
    assert_eq!(kept.lines().filter(|line| line.contains("  before-restore-")).count(), 3, "{kept}");
    work_dir.run_ok(&["check", "--full", "a.lbx"]);

    for (arguments, stderr) in [
        (&["snapshot", "restore", "a.lbx", "none"][..], "has no snapshot 'none'"),
        (&["snapshot", "restore", "a.lbx", "second", "tree/none"], "the snapshot has no tree/none"),
        (&["snapshot", "diff", "a.lbx", "second", "none"], "has no snapshot 'none'"),
    ] {
        let output = work_dir.run(arguments);
        assert!(output.code == 2 && output.stderr.contains(stderr), "{output:?}");
    }
    assert_eq!(text(work_dir.run_ok(&["snapshot", "ls", "a.lbx"])), kept, "what is refused takes no snapshot");
}

/// What a script reads instead of guessing: the name that was given, what was there before a restore, and what is gone.
#[test]
fn json_tells_what_was_taken_restored_and_removed() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let told = |arguments: &[&str]| -> Vec<serde_json::Value> {
        let lines = text(work_dir.run_ok(arguments));
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    fs::write(work_dir.path("file"), "content").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "file"]);
    let taken = told(&["snapshot", "create", "--json", "a.lbx"]);
    let name = taken[0]["name"].as_str().unwrap();
    assert!(name.len() == 20 && name.ends_with('Z') && taken.len() == 1, "{taken:?}");
    let invalid = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"caf\xe9");
    let out = work_dir.run_ok(&["snapshot".as_ref(), "create".as_ref(), "--json".as_ref(), "a.lbx".as_ref(), invalid]);
    let taken: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(taken, serde_json::json!({ "name": "caf\u{fffd}", "name_hex": "636166e9" }));

    work_dir.run_ok(&["add", "a.lbx", "pass"]);
    let beside = told(&["snapshot", "restore", "--json", "--to", "beside", "a.lbx", name]);
    assert_eq!(beside, [serde_json::json!({ "before": null })]);
    let restored = told(&["snapshot", "restore", "--json", "a.lbx", name]);
    let before = restored[0]["before"].as_str().unwrap();
    assert!(restored.len() == 1 && before.starts_with("before-restore-20"), "{restored:?}");
    assert_eq!(text(work_dir.run_ok(&["ls", "a.lbx", "--snapshot", before])), "beside\nfile\npass\n");
    let refused = work_dir.run(&["snapshot", "restore", "--json", "--to", "beside", "a.lbx", "none"]);
    assert!(refused.code == 2 && refused.stdout.is_empty(), "{refused:?}");

    let listed = told(&["snapshot", "ls", "--json", "a.lbx"]);
    let gone = told(&["snapshot", "rm", "--json", "a.lbx", "before-*", "20*", name]);
    assert_eq!(gone.len(), 2, "{gone:?}");
    for (gone, listed) in gone.iter().zip([&listed[0], &listed[2]]) {
        let same = ["name", "time", "inodes"].map(|key| gone[key] == listed[key]);
        assert!(same == [true; 3] && gone["held_bytes"].is_null(), "{gone} {listed}");
    }
    let refused = work_dir.run(&["snapshot", "rm", "--json", "a.lbx", "20*"]);
    assert!(refused.code == 2 && refused.stdout.is_empty(), "{refused:?}");
    assert_eq!(work_dir.run_ok(&["snapshot", "rm", "a.lbx", "caf*"]), b"");
}

#[test]
fn names_that_a_terminal_would_obey_are_told_in_one_line() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    work_dir.run_ok(&["snapshot", "create", "a.lbx", "empty"]);
    fs::create_dir(work_dir.path("tree")).unwrap();
    fs::write(work_dir.path("tree").join("one\nD two\x1b[2J"), "x").unwrap();
    let invalid = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"caf\xe9");
    fs::write(work_dir.path("tree").join(invalid), "x").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    let told = text(work_dir.run_ok(&["snapshot", "diff", "a.lbx", "empty"]));
    assert_eq!(told, "A tree\nA tree/caf\\xe9\nA tree/one\\x0aD two\\x1b[2J\n");
    let listed: Vec<serde_json::Value> = text(work_dir.run_ok(&["snapshot", "diff", "--json", "a.lbx", "empty"]))
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(listed[1]["path_hex"], "747265652f636166e9");
    assert_eq!((&listed[2]["path"], &listed[2]["change"]), (&"tree/one\nD two\x1b[2J".into(), &"added".into()));
}

#[test]
fn patterns_and_rules_remove_what_they_say() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    for name in ["monday", "tuesday", "work 1", "work 2", "work *"] {
        work_dir.run_ok(&["snapshot", "create", "a.lbx", name]);
    }
    let names = || -> Vec<String> {
        let lines = text(work_dir.run_ok(&["snapshot", "ls", "a.lbx"]));
        lines.lines().filter_map(|line| line.split("  ").last()).map(str::to_owned).collect()
    };
    let output = work_dir.run(&["snapshot", "rm", "a.lbx", "work ?", "sun*"]);
    assert!(output.code == 2 && output.stderr.contains("has no snapshot 'sun*'"), "{output:?}");
    work_dir.run_ok(&["snapshot", "rm", "a.lbx", "work *"]);
    assert_eq!(names(), ["monday", "tuesday", "work 1", "work 2"], "one has that name");
    work_dir.run_ok(&["snapshot", "rm", "a.lbx", "work *", "mon*"]);
    assert_eq!(names(), ["tuesday"]);
    work_dir.run_ok(&["snapshot", "create", "a.lbx", "newest"]);
    for (arguments, stderr) in [
        (&["snapshot", "prune", "a.lbx"][..], "required"),
        (&["snapshot", "prune", "a.lbx", "--dry-run"], "required"),
        (&["snapshot", "prune", "a.lbx", "--keep-daily", "0"], "0 is not in 1"),
    ] {
        let output = work_dir.run(arguments);
        assert!(output.code == 1 && output.stderr.contains(stderr), "{output:?}");
    }
    let dry =
        text(work_dir.run_ok(&["snapshot", "prune", "a.lbx", "--keep-last", "1", "--keep-weekly", "3", "--dry-run"]));
    let ends: Vec<&str> = dry.lines().take(2).map(|line| &line[33..]).collect();
    assert!(dry.starts_with("remove  20") && ends == ["tuesday", "newest  (last, weekly)"], "{dry}");
    assert_eq!(names(), ["tuesday", "newest"]);
    let json = text(work_dir.run_ok(&["snapshot", "prune", "a.lbx", "--keep-yearly", "1", "--json"]));
    let lines: Vec<serde_json::Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&lines[0]["kept"], &lines[0]["name"]), (&false.into(), &"tuesday".into()));
    assert_eq!((&lines[1]["kept"], lines[1]["kept_by"].to_string()), (&true.into(), "[\"yearly\"]".into()));
    assert_eq!(names(), ["newest"]);
    let info: serde_json::Value = serde_json::from_slice(&work_dir.run_ok(&["info", "--json", "a.lbx"])).unwrap();
    assert_eq!((&info["snapshots"], &info["snapshots_held_bytes"]), (&1.into(), &0.into()));
    assert!(text(work_dir.run_ok(&["info", "a.lbx"])).contains("\nSnapshots              1, 0 bytes held\n"));
}

/// Each is copied by itself, and a rescue of what is there now says that there are others.
#[test]
fn rescue_lists_snapshots_and_copies_the_one_that_is_named() {
    let work_dir = moments();
    work_dir.run_ok(&["snapshot", "create", "a.lbx", "\u{1b}[2J"]);
    let copy = |name: &str| {
        let to = format!("rescued {name}");
        let run = work_dir.run(&["rescue", "a.lbx", "--snapshot", name, "--to", &to, "--privileges"]);
        assert!(
            describe(&work_dir.path(&to).join("tree")) == describe(&work_dir.path(format!("at {name}/tree"))),
            "{name}"
        );
        fs::remove_dir_all(work_dir.path(&to)).unwrap();
        (run.code, text(run.stdout))
    };
    for name in ["first", "second"] {
        let (code, out) = copy(name);
        assert!(code == 0 && out.contains(&format!("whole    snapshot {name} of ")), "{out}");
        assert!(out.ends_with(": complete\n"), "{out}");
    }
    let out = text(work_dir.run_ok(&["rescue", "a.lbx", "--to", "live"]));
    assert_eq!(fs::read_dir(work_dir.path("live/tree")).unwrap().count(), 0);
    for line in
        ["whole    snapshot first of ", "whole    snapshot second of ", "whole    snapshot \\x1b[2J of ", "not copied"]
    {
        assert!(out.contains(line), "{out}");
    }
    let out = text(work_dir.run_ok(&["rescue", "a.lbx", "--to", "json", "--json"]));
    let summary: serde_json::Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    let summary = &summary["summary"];
    assert_eq!(
        (&summary["snapshots"][1]["name"], &summary["snapshots"][1]["state"]),
        (&"second".into(), &"whole".into())
    );
    assert_eq!((&summary["snapshots_proved"], &summary["snapshots_lost"]), (&true.into(), &serde_json::Value::Null));
    let missing = work_dir.run(&["rescue", "a.lbx", "--snapshot", "third", "--to", "missing"]);
    assert!(missing.code != 0 && missing.stderr.contains("third"), "{}", missing.stderr);
    assert!(!work_dir.path("missing").exists());
    // Without any commit record.
    let mut bytes = fs::read(work_dir.path("a.lbx")).unwrap();
    for block in (33..65).chain(353..385) {
        bytes[block * 4096..][..4096].fill(0xEE);
    }
    fs::write(work_dir.path("a.lbx"), bytes).unwrap();
    let (code, out) = copy("first");
    assert!(code == 12 && out.contains("some may have been removed since"), "{out}");
}

#[test]
fn a_purge_takes_snapshots_when_it_is_told_to() {
    let work_dir = moments();
    let used = |work_dir: &TestDir| {
        let info: serde_json::Value = serde_json::from_slice(&work_dir.run_ok(&["info", "--json", "a.lbx"])).unwrap();
        (info["snapshots"].as_u64().unwrap(), info["used_bytes"].as_u64().unwrap())
    };
    work_dir.run_ok(&["purge", "a.lbx"]);
    let before = used(&work_dir);
    assert_eq!(before.0, 2);
    work_dir.run_ok(&["purge", "a.lbx", "--snapshots"]);
    let after = used(&work_dir);
    assert!(after.0 == 0 && after.1 < before.1, "{before:?} {after:?}");
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}

/// Of a variable that is not set: `lockbox snapshot restore a.lbx kept "$FILE"`.
#[test]
fn an_empty_path_does_not_bring_everything_back() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    work_dir.run_ok(&["snapshot", "create", "a.lbx", "kept"]);
    work_dir.run_ok(&["add", "a.lbx", "pass"]);
    for paths in [&[""][..], &["pass", ""]] {
        let arguments = [&["snapshot", "restore", "a.lbx", "kept"][..], paths].concat();
        let refused = work_dir.run(&arguments);
        assert!(refused.code == 1 && refused.stdout.is_empty(), "{refused:?}");
    }
    assert_eq!(text(work_dir.run_ok(&["ls", "a.lbx"])), "pass\n");
}
