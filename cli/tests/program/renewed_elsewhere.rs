//! What rewrites an archive that lives at an address as a whole, or puts a part of it back; and what is saved of a damaged one there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::Ordering;

use nix::sys::signal::Signal;

use crate::living_elsewhere::{CREATE, Ending, Home, editor, homes};
use crate::support::{names, noise, stop};

/// An archive with a file that is gone, a snapshot that shows another one, and files that are there.
fn filled(home: &Home) {
    home.create();
    let work_dir = &home.work_dir;
    fs::create_dir(work_dir.path("tree")).unwrap();
    fs::write(work_dir.path("gone"), noise(9 << 20)).unwrap();
    fs::write(work_dir.path("kept"), noise(1 << 20)).unwrap();
    for number in 0..40 {
        fs::write(work_dir.path(format!("tree/{number}")), format!("{number}")).unwrap();
    }
    // Each in objects of its own.
    home.run_ok(&["add", &home.address, "tree"]);
    home.run_ok(&["add", &home.address, "gone", "kept"]);
    home.run_ok(&["snapshot", "create", &home.address, "before"]);
    home.run_ok(&["rm", &home.within("/kept")]);
    home.run_ok(&["snapshot", "create", &home.address, "later"]);
    home.run_ok(&["snapshot", "rm", &home.address, "before"]);
    home.run_ok(&["mkdir", &home.within("/empty")]);
}

fn number(json: &str, field: &str) -> u64 {
    let found: serde_json::Value = serde_json::from_str(json).unwrap();
    found[field].as_u64().unwrap()
}

/// Files and snapshots, but for what these hold, which changes with the place of nodes.
fn listed(home: &Home) -> (String, Vec<String>) {
    let snapshots = home.run_ok(&["snapshot", "ls", &home.address]);
    let names = snapshots.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect();
    (home.run_ok(&["ls", "-lR", &home.address]), names)
}

/// Objects that are needed and those that nothing names.
fn kept_objects(home: &Home) -> (u64, u64) {
    let json = home.run_ok(&["remote", "check", "--full", "--json", &home.address]);
    let found: serde_json::Value = serde_json::from_str(&json).unwrap();
    let count = |what: &str| found[what]["objects"].as_u64().unwrap();
    assert!(found["sound"].as_bool().unwrap(), "{json}");
    (count("needed"), count("unnamed"))
}

#[test]
fn an_archive_is_compacted_where_it_lives() {
    for home in homes() {
        let address = home.address.as_str();
        filled(&home);
        let before = listed(&home);
        let dry = home.run_ok(&["compact", "--dry-run", "--json", address]);
        assert!(number(&dry, "length_before") > number(&dry, "length_after"), "{dry}");
        assert_eq!(listed(&home), before);
        let done = home.run_ok(&["compact", "--json", address]);
        assert!(number(&done, "length_before") > number(&done, "length_after"), "{done}");
        assert_eq!(listed(&home), before);
        assert!(home.found("gone") == noise(9 << 20) && home.found("tree/7") == b"7");
        assert!(home.run_ok(&["check", "--full", address]).contains("sound"));
        assert_eq!(kept_objects(&home).1, 0);
        // It goes on as any, and whoever saw it before is not alarmed; nothing is gained by doing it again.
        home.run_ok(&["rm", &home.within("/gone")]);
        home.run_ok(&["mkdir", &home.within("/more")]);
        let told = home.run_ok(&["compact", address]);
        assert!(told.contains(" in the store before, "), "{told}");
        assert_eq!(home.run_ok(&["ls", address]), "empty\nmore\ntree\n");
        home.run_ok(&["backup", address, "copy.lbx"]);
    }
}

#[test]
fn an_archive_gets_a_new_key_where_it_lives_and_dropped_ones_open_nothing() {
    for home in homes() {
        let (work_dir, address) = (&home.work_dir, home.address.as_str());
        filled(&home);
        home.run_ok(&["key", "add", address, "--new-keyfile=key", "--generate", "--label=stick"]);
        home.run_ok(&["header", "backup", address, "old-header"]);
        let before = listed(&home);
        let dry = home.run_ok(&["key", "rekey", address, "--dry-run", "--drop=stick"]);
        assert!(dry.contains("dropped  1 key file \"stick\"") && dry.contains("Nothing was written."), "{dry}");
        home.run_ok(&["ls", address, "--keyfile=key"]);
        // A key that is not there, and one that does not open it.
        assert_eq!(home.run(&["key", "rekey", address, "--drop=none"]).code, 2);
        work_dir.write_passfile("wrong", "wrong");
        assert_eq!(home.run(&["key", "rekey", address, "--passfile=wrong"]).code, 10);
        let told = home.run_ok(&["key", "rekey", address, "--drop=stick"]);
        assert!(told.contains("in the store before") && told.contains("which stay for the grace period"), "{told}");
        assert_eq!(home.run(&["ls", address, "--keyfile=key"]).code, 10);
        assert_eq!(listed(&home), before);
        assert!(home.found("gone") == noise(9 << 20));
        assert!(home.run_ok(&["check", "--full", address]).contains("sound"));
        assert_eq!(kept_objects(&home).1, 0);
        let old = home.run(&["header", "restore", address, "old-header"]);
        assert!(old.code == 2 && old.stderr.contains("from before the archive was given a new volume key"), "{old:?}");
        home.run_ok(&["mkdir", &home.within("/more")]);
    }
}

#[test]
fn a_header_is_saved_and_put_back_where_the_archive_lives() {
    for home in homes() {
        let (work_dir, address) = (&home.work_dir, home.address.as_str());
        home.create();
        home.run_ok(&["header", "backup", address, "saved"]);
        assert_eq!(fs::metadata(work_dir.path("saved")).unwrap().len(), 132 << 10);
        work_dir.write_passfile("new", "another one");
        home.run_ok(&["passwd", address, "--new-passfile=new", CREATE[0], CREATE[1], CREATE[2]]);
        let older = home.run(&["header", "restore", address, "saved"]);
        assert_eq!(older.code, 16, "{}", older.stderr);
        let told = home.run_ok(&["header", "restore", address, "saved", "--accept-older"]);
        assert!(told.contains("open the archive again"), "{told}");
        home.run_ok(&["ls", address]);
        assert_eq!(home.run(&["ls", address, "--passfile=new"]).code, 10);
        assert!(home.run_ok(&["check", "--repair-header", address]).contains("sound"));
        home.run_ok(&["mkdir", &home.within("/more")]);
    }
}

#[test]
fn nobody_is_overtaken_by_who_rewrites_without_being_told_to_or_without_the_key() {
    let rewriters: [&[&str]; 4] =
        [&["compact"], &["key", "rekey"], &["check", "--repair-header"], &["header", "restore", "ADDRESS", "saved"]];
    for rewriter in rewriters {
        let home = Home::directory();
        home.create();
        home.run_ok(&["header", "backup", &home.address, "saved"]);
        let mut arguments: Vec<&str> = rewriter.to_vec();
        match arguments.iter_mut().find(|argument| **argument == "ADDRESS") {
            Some(work_dir) => *work_dir = &home.address,
            None => arguments.push(&home.address),
        }
        let mut child = editor(&home);
        let told = home.run(&arguments);
        assert!(told.code == 13 && told.stderr.contains("--take-over goes on in its place"), "{told:?}");
        arguments.push("--take-over");
        if rewriter == ["compact"] {
            home.work_dir.write_passfile("wrong", "wrong");
            assert_eq!(home.run(&["compact", "--take-over", &home.address, "--passfile=wrong"]).code, 10);
        }
        home.run_ok(&arguments);
        fs::write(home.work_dir.path("go"), "").unwrap();
        let output = child.wait_with_output_of();
        assert!(output.0 == Some(13) && output.1.contains("another writer took over"), "{output:?}");
        assert_eq!(home.run_ok(&["ls", &home.address]), "");
    }
    let home = Home::directory();
    let none = home.run(&["compact", &home.address]);
    assert!(none.code == 19 && !home.work_dir.path("objects").exists(), "{none:?}");
    for arguments in [&["compact", "https://host.invalid/a"][..], &["key", "rekey", "https://host.invalid/a"]] {
        let web = home.run(arguments);
        assert!(web.code == 2 && web.stderr.contains("a web server can only be read"), "{web:?}");
    }
    home.work_dir.create_archive("a.lbx");
    let file = home.run(&["compact", "a.lbx", "--take-over"]);
    assert!(file.code == 1 && file.stderr.contains("--take-over is for archives in object stores"), "{file:?}");
}

#[test]
fn without_the_stores_word_the_archive_is_the_old_one_or_the_new_one() {
    for arguments in [&["compact"][..], &["key", "rekey"]] {
        let home = Home::bucket();
        filled(&home);
        let before = listed(&home);
        home.store.silent.store(true, Ordering::Relaxed);
        let output = home.run(&[arguments, &["--take-over", &home.address]].concat());
        assert!(output.code == 17 && output.stderr.contains("does not answer"), "{output:?}");
        home.store.silent.store(false, Ordering::Relaxed);
        assert_eq!(listed(&home), before);
        home.run_ok(&["mkdir", "--take-over", &home.within("/after")]);
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

/// By whatever copies objects, also under a writer.
#[test]
fn copied_objects_are_a_copy_of_the_archive_and_copies_written_apart_are_told() {
    let home = Home::directory();
    filled(&home);
    let before = listed(&home);
    let mut child = editor(&home);
    copy(&home.work_dir.path("objects"), &home.work_dir.path("copied"));
    fs::write(home.work_dir.path("go"), "").unwrap();
    assert_eq!(child.wait_with_output_of().0, Some(0));
    let other = format!("file://{}", home.work_dir.path("copied").display());
    let older = home.run(&["ls", "-lR", &other]);
    assert!(older.code == 16 && older.stderr.contains("older copy"), "{older:?}");
    let accepted = home.run(&["ls", "-lR", &other, "--accept-older"]);
    assert_eq!((accepted.code, String::from_utf8(accepted.stdout).unwrap()), (0, before.0));
    // Its writer did not say that it went.
    home.run_ok(&["mkdir", &format!("{other}:/theirs"), "--take-over"]);
    home.run_ok(&["check", "--full", &other]);
    // Whoever has seen one of them is told of the other.
    let apart = home.run(&["mkdir", &home.within("/ours")]);
    assert_eq!(apart.code, 16, "{}", apart.stderr);
    assert!(apart.stderr.contains("older copy") || apart.stderr.contains("diverged"), "{apart:?}");
    home.run_ok(&["ls", &other]);
    // A new key parts them for good.
    home.run_ok(&["key", "rekey", &other]);
    home.run_ok(&["check", "--full", &other]);
    assert_eq!(home.run(&["ls", &home.address, "--accept-older", "--accept-fork"]).code, 0);
}

fn segments(home: &Home) -> Vec<PathBuf> {
    let incarnations = fs::read_dir(home.work_dir.path("objects")).unwrap().map(|entry| entry.unwrap().path());
    let found = incarnations.filter_map(|path| fs::read_dir(path.join("seg")).ok()).flatten();
    found.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn who_stops_or_kills_a_rewriting_leaves_the_archive_as_it_was_or_the_new_one() {
    let home = Home::directory();
    home.create();
    fs::create_dir(home.work_dir.path("tree")).unwrap();
    (0..6).for_each(|number| fs::write(home.work_dir.path(format!("tree/{number}")), noise(9 << 20)).unwrap());
    home.run_ok(&["add", &home.address, "tree"]);
    let before = listed(&home);
    for (arguments, signal) in [
        (&["compact"][..], Signal::SIGINT),
        (&["key", "rekey"], Signal::SIGTERM),
        (&["compact"], Signal::SIGKILL),
        (&["key", "rekey"], Signal::SIGKILL),
    ] {
        let stopped = (0..50).find_map(|_| {
            let arguments = [arguments, &["--take-over", &home.address]].concat();
            let there = segments(&home).len();
            let mut command = home.command(&arguments);
            let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            stop(child, signal, || segments(&home).len() > there)
        });
        let (code, stderr) = stopped.expect("none could be stopped");
        assert_eq!(listed(&home), before);
        if signal == Signal::SIGKILL {
            assert_eq!(code, None);
            home.run_ok(&["remote", "collect", "--take-over", &home.address]);
        } else {
            let says = "lockbox: interrupted; the archive is unchanged; the same command starts over\n";
            assert_eq!((code, stderr.as_str()), (Some(128 + signal as i32), says));
        }
        assert_eq!(kept_objects(&home).1, 0);
    }
    assert!(home.run_ok(&["check", "--full", &home.address]).contains("sound"));
}

#[test]
fn what_is_whole_of_an_archive_is_rescued_from_a_store_that_lacks_objects() {
    let home = Home::directory();
    filled(&home);
    home.run_ok(&["rescue", &home.address, "--to=all"]);
    assert_eq!(names(&home.work_dir.path("all")), ["empty", "gone", "tree"]);
    assert!(fs::read(home.work_dir.path("all/gone")).unwrap() == noise(9 << 20));
    // The largest one has the large file.
    let largest = segments(&home).into_iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let object = fs::read(&largest).unwrap();
    for kept in [None, Some(object.len() / 2)] {
        match kept {
            None => fs::remove_file(&largest).unwrap(),
            Some(length) => fs::write(&largest, &object[..length]).unwrap(),
        }
        let to = format!("out{kept:?}");
        let rescued = home.run(&["rescue", &home.address, "--to", &to, "--partial"]);
        assert_eq!(rescued.code, 12, "{}", rescued.stderr);
        assert!(rescued.stderr.contains("is missing") || kept.is_some(), "{}", rescued.stderr);
        let there: Vec<String> =
            names(&home.work_dir.path(&to)).into_iter().map(|name| name.into_string().unwrap()).collect();
        assert!(there.contains(&"tree".to_owned()) && !there.contains(&"gone".to_owned()), "{there:?}");
        assert_eq!(fs::read(home.work_dir.path(format!("{to}/tree/7"))).unwrap(), b"7");
    }
    fs::write(&largest, &object).unwrap();
    home.run_ok(&["rescue", &home.address, "--to=again"]);
}

#[test]
fn a_store_that_does_not_answer_lost_nothing_that_is_rescued() {
    let home = Home::bucket();
    filled(&home);
    // It is past the opening, which reads no more than the start.
    *home.store.answers.lock().unwrap() = Some(9);
    let output = home.run(&["rescue", &home.address, "--to=lost", "--partial"]);
    *home.store.answers.lock().unwrap() = None;
    assert!(output.code == 17 && output.stderr.contains("does not answer"), "{output:?}");
    assert!(output.stdout.is_empty() && !home.work_dir.path("lost/partial").exists());
    home.run_ok(&["rescue", &home.address, "--to=all"]);
}
