//! `lockbox backup` into files that it must not replace: each is refused by what it is, and stays as it was, with nothing beside it.

use std::fs;

use crate::support::{RunOutput, TestDir, names, output_of};

/// Gives the archive's only file this content.
fn write(work_dir: &TestDir, name: &str, content: &str) {
    fs::write(work_dir.path("file"), content).unwrap();
    work_dir.run_ok(&["add", "--force", name, "file"]);
}

/// As somebody who remembers nothing of any archive.
fn elsewhere(work_dir: &TestDir, arguments: &[&str]) -> RunOutput {
    let state = tempfile::tempdir_in(work_dir.path("..")).unwrap();
    let mut command = work_dir.command();
    command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).env("XDG_STATE_HOME", state.path()).args(arguments);
    output_of(&mut command)
}

/// The backup is refused with this sentence, and neither it nor its directory has changed.
fn assert_refused(work_dir: &TestDir, archive: &str, destination: &str, why: &str) {
    let (before, beside) = (fs::read(work_dir.path(destination)).unwrap(), names(&work_dir.path(".")));
    let output = elsewhere(work_dir, &["backup", archive, destination]);
    assert_eq!(output.code, 2, "{output:?}");
    assert_eq!(output.stderr, format!("lockbox: {destination}: {why}; it was left unchanged\n"));
    assert!(output.stdout.is_empty() && fs::read(work_dir.path(destination)).unwrap() == before);
    assert_eq!(names(&work_dir.path(".")), beside);
}

fn text(output: RunOutput) -> String {
    assert_eq!(output.code, 0, "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn no_file_is_replaced_that_is_not_a_backup_of_the_archive() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    work_dir.create_archive("other.lbx");
    write(&work_dir, "a.lbx", "content");
    work_dir.run_ok(&["backup", "other.lbx", "of-other.lbx"]);
    for other in ["other.lbx", "of-other.lbx"] {
        assert_refused(&work_dir, "a.lbx", other, "it is, or is a backup of, another archive");
    }
    assert_refused(&work_dir, "a.lbx", "file", "it is not an archive");
    fs::write(work_dir.path("empty"), "").unwrap();
    assert_refused(&work_dir, "a.lbx", "empty", "it is not an archive");
    // A copy by other means is as good as the archive to who has nothing else.
    fs::copy(work_dir.path("a.lbx"), work_dir.path("copied.lbx")).unwrap();
    let own = "it is an archive of its own, or a backup that was written to since";
    assert_refused(&work_dir, "a.lbx", "copied.lbx", own);
    work_dir.run_ok(&["backup", "a.lbx", "written.lbx"]);
    assert_eq!(elsewhere(&work_dir, &["add", "written.lbx", "pass"]).code, 0);
    assert_refused(&work_dir, "a.lbx", "written.lbx", own);
}

#[test]
fn a_backup_of_a_later_moment_or_of_another_line_is_not_replaced() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    write(&work_dir, "a.lbx", "first");
    work_dir.run_ok(&["backup", "a.lbx", "old.lbx"]);
    fs::copy(work_dir.path("a.lbx"), work_dir.path("apart.lbx")).unwrap();
    write(&work_dir, "a.lbx", "second");
    fs::copy(work_dir.path("a.lbx"), work_dir.path("earlier.lbx")).unwrap();
    write(&work_dir, "a.lbx", "third");
    work_dir.run_ok(&["backup", "a.lbx", "new.lbx"]);
    assert_refused(&work_dir, "earlier.lbx", "new.lbx", "it is newer than the archive");
    // More was written to it than to the archive, and none of that is there.
    for n in 0..10 {
        let content = format!("apart {n}");
        fs::write(work_dir.path("file"), &content).unwrap();
        assert_eq!(elsewhere(&work_dir, &["add", "--force", "apart.lbx", "file"]).code, 0);
    }
    assert_refused(&work_dir, "apart.lbx", "new.lbx", "it has commits that the archive lacks: the two have diverged");
    // The one from before both is one of either.
    assert_eq!(elsewhere(&work_dir, &["backup", "apart.lbx", "old.lbx"]).code, 0);
    assert_eq!(text(elsewhere(&work_dir, &["cat", "old.lbx", "file"])), "apart 9");
}

#[test]
fn a_backup_with_other_keys_than_the_archive_is_not_replaced() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    write(&work_dir, "a.lbx", "content");
    fs::copy(work_dir.path("a.lbx"), work_dir.path("before.lbx")).unwrap();
    work_dir.write_passfile("second", "another one");
    let kdf = ["--kdf-memory", "1", "--kdf-passes", "1", "--weak-kdf"];
    work_dir.run_ok(&[&["key", "add", "a.lbx", "--new-passfile", "second", "--label", "second"][..], &kdf].concat());
    work_dir.run_ok(&["backup", "a.lbx", "copy.lbx"]);
    // Who has an archive of before would take a key away that somebody opens the backup with.
    let keys = "its keys are newer than the archive's keys";
    assert_refused(&work_dir, "before.lbx", "copy.lbx", keys);
    let opened = |passfile: &str| {
        let mut command = work_dir.command();
        command.env("LOCKBOX_PASSFILE", work_dir.path(passfile)).args(["key", "test", "copy.lbx"]);
        output_of(&mut command).code
    };
    assert_eq!((opened("pass"), opened("second")), (0, 0));
    // The other way round the backup follows.
    work_dir.run_ok(&["key", "rm", "a.lbx", "second"]);
    work_dir.run_ok(&["backup", "a.lbx", "copy.lbx"]);
    assert_eq!((opened("pass"), opened("second")), (0, 10));

    work_dir.run_ok(&["key", "rekey", "a.lbx"]);
    let why = "it has an earlier volume key: choose another file, or remove it";
    assert_refused(&work_dir, "a.lbx", "copy.lbx", why);
    assert_refused(&work_dir, "before.lbx", "a.lbx", why);
    work_dir.run_ok(&["backup", "a.lbx", "next.lbx"]);
    assert_eq!(text(work_dir.run(&["cat", "next.lbx", "file"])), "content");
}

/// What is brought up to date in its place is that under all of its names.
#[test]
fn a_backup_with_several_names_is_brought_up_to_date_under_all_of_them() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    write(&work_dir, "a.lbx", "first");
    work_dir.run_ok(&["backup", "a.lbx", "copy.lbx"]);
    fs::hard_link(work_dir.path("copy.lbx"), work_dir.path("linked.lbx")).unwrap();
    write(&work_dir, "a.lbx", "second");
    let told = String::from_utf8(work_dir.run_ok(&["backup", "a.lbx", "copy.lbx"])).unwrap();
    assert!(told.contains("only the changes were copied"), "{told}");
    for name in ["copy.lbx", "linked.lbx"] {
        assert_eq!(text(work_dir.run(&["cat", name, "file"])), "second");
    }
    // Another name of the archive itself is no place for a backup of it.
    fs::hard_link(work_dir.path("a.lbx"), work_dir.path("same.lbx")).unwrap();
    let output = work_dir.run(&["backup", "a.lbx", "same.lbx"]);
    assert!(output.code == 1 && output.stderr.contains("same.lbx is the archive itself"), "{output:?}");
}
