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
    let place = &home.place;
    fs::create_dir(place.path("tree")).unwrap();
    fs::write(place.path("gone"), noise(9 << 20)).unwrap();
    fs::write(place.path("kept"), noise(1 << 20)).unwrap();
    for number in 0..40 {
        fs::write(place.path(format!("tree/{number}")), format!("{number}")).unwrap();
    }
    // Each in objects of its own.
    home.good(&["add", &home.address, "tree"]);
    home.good(&["add", &home.address, "gone", "kept"]);
    home.good(&["snapshot", "create", &home.address, "before"]);
    home.good(&["rm", &home.within("/kept")]);
    home.good(&["snapshot", "create", &home.address, "later"]);
    home.good(&["snapshot", "rm", &home.address, "before"]);
    home.good(&["mkdir", &home.within("/empty")]);
}

fn number(json: &str, field: &str) -> u64 {
    let found: serde_json::Value = serde_json::from_str(json).unwrap();
    found[field].as_u64().unwrap()
}

/// Files and snapshots, but for what these hold, which changes with the place of nodes.
fn listed(home: &Home) -> (String, Vec<String>) {
    let snapshots = home.good(&["snapshot", "ls", &home.address]);
    let names = snapshots.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect();
    (home.good(&["ls", "-lR", &home.address]), names)
}

/// Objects that are needed and those that nothing names.
fn kept_objects(home: &Home) -> (u64, u64) {
    let json = home.good(&["remote", "check", "--full", "--json", &home.address]);
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
        let dry = home.good(&["compact", "--dry-run", "--json", address]);
        assert!(number(&dry, "length_before") > number(&dry, "length_after"), "{dry}");
        assert_eq!(listed(&home), before);
        let done = home.good(&["compact", "--json", address]);
        assert!(number(&done, "length_before") > number(&done, "length_after"), "{done}");
        assert_eq!(listed(&home), before);
        assert!(home.found("gone") == noise(9 << 20) && home.found("tree/7") == b"7");
        assert!(home.good(&["check", "--full", address]).contains("sound"));
        assert_eq!(kept_objects(&home).1, 0);
        // It goes on as any, and whoever saw it before is not alarmed; nothing is gained by doing it again.
        home.good(&["rm", &home.within("/gone")]);
        home.good(&["mkdir", &home.within("/more")]);
        let told = home.good(&["compact", address]);
        assert!(told.contains(" in the store before, "), "{told}");
        assert_eq!(home.good(&["ls", address]), "empty\nmore\ntree\n");
        home.good(&["backup", address, "copy.lbx"]);
    }
}

#[test]
fn an_archive_gets_a_new_key_where_it_lives_and_dropped_ones_open_nothing() {
    for home in homes() {
        let (place, address) = (&home.place, home.address.as_str());
        filled(&home);
        home.good(&["key", "add", address, "--new-keyfile=key", "--generate", "--label=stick"]);
        home.good(&["header", "backup", address, "old-header"]);
        let before = listed(&home);
        let dry = home.good(&["key", "rekey", address, "--dry-run", "--drop=stick"]);
        assert!(dry.contains("dropped  1 key file \"stick\"") && dry.contains("Nothing was written."), "{dry}");
        home.good(&["ls", address, "--keyfile=key"]);
        // A key that is not there, and one that does not open it.
        assert_eq!(home.run(&["key", "rekey", address, "--drop=none"]).code, 2);
        place.secret("wrong", "wrong");
        assert_eq!(home.run(&["key", "rekey", address, "--passfile=wrong"]).code, 10);
        let told = home.good(&["key", "rekey", address, "--drop=stick"]);
        assert!(told.contains("in the store before") && told.contains("which stay for a day"), "{told}");
        assert_eq!(home.run(&["ls", address, "--keyfile=key"]).code, 10);
        assert_eq!(listed(&home), before);
        assert!(home.found("gone") == noise(9 << 20));
        assert!(home.good(&["check", "--full", address]).contains("sound"));
        assert_eq!(kept_objects(&home).1, 0);
        let old = home.run(&["header", "restore", address, "old-header"]);
        assert!(
            old.code == 2 && old.complaint.contains("from before the archive was given a new volume key"),
            "{old:?}"
        );
        home.good(&["mkdir", &home.within("/more")]);
    }
}

#[test]
fn a_header_is_saved_and_put_back_where_the_archive_lives() {
    for home in homes() {
        let (place, address) = (&home.place, home.address.as_str());
        home.create();
        home.good(&["header", "backup", address, "saved"]);
        assert_eq!(fs::metadata(place.path("saved")).unwrap().len(), 132 << 10);
        place.secret("new", "another one");
        home.good(&["passwd", address, "--new-passfile=new", CREATE[0], CREATE[1], CREATE[2]]);
        let older = home.run(&["header", "restore", address, "saved"]);
        assert_eq!(older.code, 16, "{}", older.complaint);
        let told = home.good(&["header", "restore", address, "saved", "--accept-older"]);
        assert!(told.contains("open the archive again"), "{told}");
        home.good(&["ls", address]);
        assert_eq!(home.run(&["ls", address, "--passfile=new"]).code, 10);
        assert!(home.good(&["check", "--repair-header", address]).contains("sound"));
        home.good(&["mkdir", &home.within("/more")]);
    }
}

#[test]
fn nobody_is_overtaken_by_who_rewrites_without_being_told_to_or_without_the_key() {
    let rewriters: [&[&str]; 4] =
        [&["compact"], &["key", "rekey"], &["check", "--repair-header"], &["header", "restore", "ADDRESS", "saved"]];
    for rewriter in rewriters {
        let home = Home::directory();
        home.create();
        home.good(&["header", "backup", &home.address, "saved"]);
        let mut arguments: Vec<&str> = rewriter.to_vec();
        match arguments.iter_mut().find(|argument| **argument == "ADDRESS") {
            Some(place) => *place = &home.address,
            None => arguments.push(&home.address),
        }
        let mut child = editor(&home);
        let told = home.run(&arguments);
        assert!(told.code == 13 && told.complaint.contains("--take-over goes on in its place"), "{told:?}");
        arguments.push("--take-over");
        if rewriter == ["compact"] {
            home.place.secret("wrong", "wrong");
            assert_eq!(home.run(&["compact", "--take-over", &home.address, "--passfile=wrong"]).code, 10);
        }
        home.good(&arguments);
        fs::write(home.place.path("go"), "").unwrap();
        let ended = child.wait_with_output_of();
        assert!(ended.0 == Some(13) && ended.1.contains("another writer took over"), "{ended:?}");
        assert_eq!(home.good(&["ls", &home.address]), "");
    }
    let home = Home::directory();
    let none = home.run(&["compact", &home.address]);
    assert!(none.code == 19 && !home.place.path("objects").exists(), "{none:?}");
    for arguments in [&["compact", "https://host.invalid/a"][..], &["key", "rekey", "https://host.invalid/a"]] {
        let web = home.run(arguments);
        assert!(web.code == 2 && web.complaint.contains("a web server can only be read"), "{web:?}");
    }
    home.place.archive("a.lbx");
    let file = home.run(&["compact", "a.lbx", "--take-over"]);
    assert!(file.code == 1 && file.complaint.contains("--take-over is for archives in object stores"), "{file:?}");
}

#[test]
fn without_the_stores_word_the_archive_is_the_old_one_or_the_new_one() {
    for arguments in [&["compact"][..], &["key", "rekey"]] {
        let home = Home::bucket();
        filled(&home);
        let before = listed(&home);
        home.store.silent.store(true, Ordering::Relaxed);
        let ended = home.run(&[arguments, &["--take-over", &home.address]].concat());
        assert!(ended.code == 17 && ended.complaint.contains("does not answer"), "{ended:?}");
        home.store.silent.store(false, Ordering::Relaxed);
        assert_eq!(listed(&home), before);
        home.good(&["mkdir", "--take-over", &home.within("/after")]);
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
    copy(&home.place.path("objects"), &home.place.path("copied"));
    fs::write(home.place.path("go"), "").unwrap();
    assert_eq!(child.wait_with_output_of().0, Some(0));
    let other = format!("file://{}", home.place.path("copied").display());
    let older = home.run(&["ls", "-lR", &other]);
    assert!(older.code == 16 && older.complaint.contains("older copy"), "{older:?}");
    let accepted = home.run(&["ls", "-lR", &other, "--accept-older"]);
    assert_eq!((accepted.code, String::from_utf8(accepted.out).unwrap()), (0, before.0));
    // Its writer did not say that it went.
    home.good(&["mkdir", &format!("{other}:/theirs"), "--take-over"]);
    home.good(&["check", "--full", &other]);
    // Whoever has seen one of them is told of the other.
    let apart = home.run(&["mkdir", &home.within("/ours")]);
    assert_eq!(apart.code, 16, "{}", apart.complaint);
    assert!(apart.complaint.contains("older copy") || apart.complaint.contains("diverged"), "{apart:?}");
    home.good(&["ls", &other]);
    // A new key parts them for good.
    home.good(&["key", "rekey", &other]);
    home.good(&["check", "--full", &other]);
    assert_eq!(home.run(&["ls", &home.address, "--accept-older", "--accept-fork"]).code, 0);
}

fn segments(home: &Home) -> Vec<PathBuf> {
    let incarnations = fs::read_dir(home.place.path("objects")).unwrap().map(|entry| entry.unwrap().path());
    let found = incarnations.filter_map(|path| fs::read_dir(path.join("seg")).ok()).flatten();
    found.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn who_stops_or_kills_a_rewriting_leaves_the_archive_as_it_was_or_the_new_one() {
    let home = Home::directory();
    home.create();
    fs::create_dir(home.place.path("tree")).unwrap();
    (0..6).for_each(|number| fs::write(home.place.path(format!("tree/{number}")), noise(9 << 20)).unwrap());
    home.good(&["add", &home.address, "tree"]);
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
        let (code, complaint) = stopped.expect("none could be stopped");
        assert_eq!(listed(&home), before);
        if signal == Signal::SIGKILL {
            assert_eq!(code, None);
            home.good(&["remote", "collect", "--take-over", &home.address]);
        } else {
            let says = "lockbox: interrupted; the archive is unchanged; the same command starts over\n";
            assert_eq!((code, complaint.as_str()), (Some(128 + signal as i32), says));
        }
        assert_eq!(kept_objects(&home).1, 0);
    }
    assert!(home.good(&["check", "--full", &home.address]).contains("sound"));
}

#[test]
fn what_is_whole_of_an_archive_is_rescued_from_a_store_that_lacks_objects() {
    let home = Home::directory();
    filled(&home);
    home.good(&["rescue", &home.address, "--to=all"]);
    assert_eq!(names(&home.place.path("all")), ["empty", "gone", "tree"]);
    assert!(fs::read(home.place.path("all/gone")).unwrap() == noise(9 << 20));
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
        assert_eq!(rescued.code, 12, "{}", rescued.complaint);
        assert!(rescued.complaint.contains("is missing") || kept.is_some(), "{}", rescued.complaint);
        let there: Vec<String> =
            names(&home.place.path(&to)).into_iter().map(|name| name.into_string().unwrap()).collect();
        assert!(there.contains(&"tree".to_owned()) && !there.contains(&"gone".to_owned()), "{there:?}");
        assert_eq!(fs::read(home.place.path(format!("{to}/tree/7"))).unwrap(), b"7");
    }
    fs::write(&largest, &object).unwrap();
    home.good(&["rescue", &home.address, "--to=again"]);
}

#[test]
fn a_store_that_does_not_answer_lost_nothing_that_is_rescued() {
    let home = Home::bucket();
    filled(&home);
    // It is past the opening, which reads no more than the start.
    *home.store.answers.lock().unwrap() = Some(9);
    let ended = home.run(&["rescue", &home.address, "--to=lost", "--partial"]);
    *home.store.answers.lock().unwrap() = None;
    assert!(ended.code == 17 && ended.complaint.contains("does not answer"), "{ended:?}");
    assert!(ended.out.is_empty() && !home.place.path("lost/partial").exists());
    home.good(&["rescue", &home.address, "--to=all"]);
}
