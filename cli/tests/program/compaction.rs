//! `lockbox compact` as its users meet it: killed, stopped, and beside older copies.

use std::fs;

use nix::sys::signal::Signal;

use crate::support::{Place, noise, stop};

const OLDER: i32 = 16;

fn names(place: &Place) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(place.path("box")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// An archive that takes a moment to be written anew, alone in its directory.
fn filled() -> Place {
    let place = Place::new();
    fs::create_dir(place.path("box")).unwrap();
    place.archive("box/a.lbx");
    for n in 0..6 {
        fs::write(place.path(format!("file{n}")), noise(8 << 20)).unwrap();
        place.good(&["add", "box/a.lbx", &format!("file{n}")]);
    }
    place
}

/// Starts a compaction and sends the signal as soon as the new file lies beside the old one; the exit code, unless it was done before.
fn interrupted(place: &Place, signal: Signal) -> Option<(Option<i32>, String)> {
    stop(place.start(&mut place.command(), &["compact", "box/a.lbx"]), signal, || names(place).len() >= 2)
}

#[test]
fn a_terminated_compaction_leaves_the_archive_alone_and_no_file_beside_it() {
    let place = filled();
    for _ in 0..10 {
        let before = fs::read(place.path("box/a.lbx")).unwrap();
        let Some((code, complaint)) = interrupted(&place, Signal::SIGTERM) else { continue };
        assert!(code.is_some() && complaint.contains("the archive is unchanged"), "{code:?} {complaint}");
        assert_eq!(names(&place), ["a.lbx"]);
        assert!(fs::read(place.path("box/a.lbx")).unwrap() == before);
        return;
    }
    panic!("no compaction could be stopped");
}

#[test]
fn a_killed_compaction_leaves_a_whole_archive_and_the_next_one_clears_up() {
    let place = filled();
    for _ in 0..10 {
        let before = fs::read(place.path("box/a.lbx")).unwrap();
        if interrupted(&place, Signal::SIGKILL).is_none() || names(&place).len() < 2 {
            continue;
        }
        assert!(fs::read(place.path("box/a.lbx")).unwrap() == before);
        place.good(&["check", "--full", "box/a.lbx"]);
        place.good(&["compact", "box/a.lbx"]);
        assert_eq!(names(&place), ["a.lbx"]);
        place.good(&["check", "--full", "box/a.lbx"]);
        for n in 0..6 {
            let name = format!("file{n}");
            assert!(place.good(&["cat", "box/a.lbx", &name]) == fs::read(place.path(&name)).unwrap());
        }
        return;
    }
    panic!("no compaction could be killed");
}

#[test]
fn the_archive_as_it_was_before_a_compaction_is_an_older_copy() {
    let place = Place::new();
    place.archive("a.lbx");
    fs::write(place.path("file"), noise(300_000)).unwrap();
    place.good(&["add", "a.lbx", "file"]);
    fs::copy(place.path("a.lbx"), place.path("before.lbx")).unwrap();
    place.good(&["compact", "a.lbx"]);
    for command in ["info", "compact", "purge", "check"] {
        let ended = place.run(&[command, "before.lbx"]);
        assert_eq!(ended.code, OLDER, "{command}: {}", ended.complaint);
    }
    place.good(&["add", "--force", "a.lbx", "file"]);
    place.good(&["check", "--full", "a.lbx"]);
    // What is only read page by page may be of any age.
    place.good(&["rescue", "before.lbx", "--to", "out"]);
    assert!(fs::read(place.path("out/file")).unwrap() == noise(300_000));
}
