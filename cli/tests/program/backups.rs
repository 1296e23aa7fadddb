//! `lockbox backup` into files that it must not replace: each is refused by what it is, and stays as it was, with nothing beside it.

use std::fs;

use crate::support::{Ended, Place, end, names};

/// Gives the archive's only file this content.
fn write(place: &Place, name: &str, content: &str) {
    fs::write(place.path("file"), content).unwrap();
    place.good(&["add", "--force", name, "file"]);
}

/// As somebody who remembers nothing of any archive.
fn elsewhere(place: &Place, arguments: &[&str]) -> Ended {
    let state = tempfile::tempdir_in(place.path("..")).unwrap();
    let mut command = place.command();
    command.env("LOCKBOX_PASSFILE", place.path("pass")).env("XDG_STATE_HOME", state.path()).args(arguments);
    end(&mut command)
}

/// The backup is refused with this sentence, and neither it nor its directory has changed.
fn assert_refused(place: &Place, archive: &str, destination: &str, why: &str) {
    let (before, beside) = (fs::read(place.path(destination)).unwrap(), names(&place.path(".")));
    let ended = elsewhere(place, &["backup", archive, destination]);
    assert_eq!(ended.code, 2, "{ended:?}");
    assert_eq!(ended.complaint, format!("lockbox: {destination}: {why}; it was left unchanged\n"));
    assert!(ended.out.is_empty() && fs::read(place.path(destination)).unwrap() == before);
    assert_eq!(names(&place.path(".")), beside);
}

fn text(ended: Ended) -> String {
    assert_eq!(ended.code, 0, "{ended:?}");
    String::from_utf8(ended.out).unwrap()
}

#[test]
fn no_file_is_replaced_that_is_not_a_backup_of_the_archive() {
    let place = Place::new();
    place.archive("a.lbx");
    place.archive("other.lbx");
    write(&place, "a.lbx", "content");
    place.good(&["backup", "other.lbx", "of-other.lbx"]);
    for other in ["other.lbx", "of-other.lbx"] {
        assert_refused(&place, "a.lbx", other, "it is, or is a backup of, another archive");
    }
    assert_refused(&place, "a.lbx", "file", "it is not an archive");
    fs::write(place.path("empty"), "").unwrap();
    assert_refused(&place, "a.lbx", "empty", "it is not an archive");
    // A copy by other means is as good as the archive to who has nothing else.
    fs::copy(place.path("a.lbx"), place.path("copied.lbx")).unwrap();
    let own = "it is an archive of its own, or a backup that was written to since";
    assert_refused(&place, "a.lbx", "copied.lbx", own);
    place.good(&["backup", "a.lbx", "written.lbx"]);
    assert_eq!(elsewhere(&place, &["add", "written.lbx", "pass"]).code, 0);
    assert_refused(&place, "a.lbx", "written.lbx", own);
}

#[test]
fn a_backup_of_a_later_moment_or_of_another_line_is_not_replaced() {
    let place = Place::new();
    place.archive("a.lbx");
    write(&place, "a.lbx", "first");
    place.good(&["backup", "a.lbx", "old.lbx"]);
    fs::copy(place.path("a.lbx"), place.path("apart.lbx")).unwrap();
    write(&place, "a.lbx", "second");
    fs::copy(place.path("a.lbx"), place.path("earlier.lbx")).unwrap();
    write(&place, "a.lbx", "third");
    place.good(&["backup", "a.lbx", "new.lbx"]);
    assert_refused(&place, "earlier.lbx", "new.lbx", "it is newer than the archive");
    // More was written to it than to the archive, and none of that is there.
    for n in 0..10 {
        let content = format!("apart {n}");
        fs::write(place.path("file"), &content).unwrap();
        assert_eq!(elsewhere(&place, &["add", "--force", "apart.lbx", "file"]).code, 0);
    }
    assert_refused(&place, "apart.lbx", "new.lbx", "it has commits that the archive lacks: the two have diverged");
    // The one from before both is one of either.
    assert_eq!(elsewhere(&place, &["backup", "apart.lbx", "old.lbx"]).code, 0);
    assert_eq!(text(elsewhere(&place, &["cat", "old.lbx", "file"])), "apart 9");
}

#[test]
fn a_backup_with_other_keys_than_the_archive_is_not_replaced() {
    let place = Place::new();
    place.archive("a.lbx");
    write(&place, "a.lbx", "content");
    fs::copy(place.path("a.lbx"), place.path("before.lbx")).unwrap();
    place.secret("second", "another one");
    let kdf = ["--kdf-memory", "1", "--kdf-passes", "1", "--weak-kdf"];
    place.good(&[&["key", "add", "a.lbx", "--new-passfile", "second", "--label", "second"][..], &kdf].concat());
    place.good(&["backup", "a.lbx", "copy.lbx"]);
    // Who has an archive of before would take a key away that somebody opens the backup with.
    let keys = "its keys are newer than the archive's keys";
    assert_refused(&place, "before.lbx", "copy.lbx", keys);
    let opened = |passfile: &str| {
        let mut command = place.command();
        command.env("LOCKBOX_PASSFILE", place.path(passfile)).args(["key", "test", "copy.lbx"]);
        end(&mut command).code
    };
    assert_eq!((opened("pass"), opened("second")), (0, 0));
    // The other way round the backup follows.
    place.good(&["key", "rm", "a.lbx", "second"]);
    place.good(&["backup", "a.lbx", "copy.lbx"]);
    assert_eq!((opened("pass"), opened("second")), (0, 10));

    place.good(&["key", "rekey", "a.lbx"]);
    let why = "it has an earlier volume key: choose another file, or remove it";
    assert_refused(&place, "a.lbx", "copy.lbx", why);
    assert_refused(&place, "before.lbx", "a.lbx", why);
    place.good(&["backup", "a.lbx", "next.lbx"]);
    assert_eq!(text(place.run(&["cat", "next.lbx", "file"])), "content");
}

/// What is brought up to date in its place is that under all of its names.
#[test]
fn a_backup_with_several_names_is_brought_up_to_date_under_all_of_them() {
    let place = Place::new();
    place.archive("a.lbx");
    write(&place, "a.lbx", "first");
    place.good(&["backup", "a.lbx", "copy.lbx"]);
    fs::hard_link(place.path("copy.lbx"), place.path("linked.lbx")).unwrap();
    write(&place, "a.lbx", "second");
    let told = String::from_utf8(place.good(&["backup", "a.lbx", "copy.lbx"])).unwrap();
    assert!(told.contains("only the changes were copied"), "{told}");
    for name in ["copy.lbx", "linked.lbx"] {
        assert_eq!(text(place.run(&["cat", name, "file"])), "second");
    }
    // Another name of the archive itself is no place for a backup of it.
    fs::hard_link(place.path("a.lbx"), place.path("same.lbx")).unwrap();
    let ended = place.run(&["backup", "a.lbx", "same.lbx"]);
    assert!(ended.code == 1 && ended.complaint.contains("same.lbx is the archive itself"), "{ended:?}");
}
