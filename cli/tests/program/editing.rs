//! `lockbox edit`: what the editor changed comes back with everything else as it was, and nothing stays outside.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::thread;

use nix::sys::signal::Signal;
use rustix::fs::XattrFlags;
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

use crate::support::{RunOutput, TestDir, describe, names, output_of, stop};

/// An archive with a file `dir/note` of two names, and `plain`.
fn filled() -> TestDir {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::create_dir_all(work_dir.path("dir")).unwrap();
    fs::create_dir(work_dir.path("private")).unwrap();
    fs::write(work_dir.path("dir/note"), "one\n").unwrap();
    fs::write(work_dir.path("plain"), "one\n").unwrap();
    fs::hard_link(work_dir.path("dir/note"), work_dir.path("dir/again")).unwrap();
    symlink("plain", work_dir.path("link")).unwrap();
    fs::set_permissions(work_dir.path("plain"), fs::Permissions::from_mode(0o2751)).unwrap();
    // Some host file systems have none.
    let _ = rustix::fs::setxattr(work_dir.path("plain"), "user.comment", b"kept", XattrFlags::empty());
    work_dir.run_ok(&["add", "a.lbx", "dir", "plain", "link"]);
    work_dir
}

fn edit(work_dir: &TestDir, path: &str, editor: &str) -> RunOutput {
    let mut command = work_dir.command();
    command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).env("VISUAL", editor);
    let output = output_of(command.args(["edit", &format!("a.lbx:{path}"), "--in", "private"]));
    if !output.stderr.contains("the edited text is in") {
        assert_eq!(names(&work_dir.path("private")), [""; 0], "{output:?}");
    }
    output
}

fn text(work_dir: &TestDir, path: &str) -> String {
    String::from_utf8(work_dir.run_ok(&["cat", "a.lbx", path])).unwrap()
}

#[test]
fn what_was_changed_comes_back_and_nothing_else_changes() {
    let work_dir = filled();
    // Puts another file in the place of this one.
    let changed = edit(&work_dir, "plain", "sed -i s/one/two/");
    assert_eq!((changed.code, changed.stderr.as_str()), (0, ""));
    assert_eq!(text(&work_dir, "plain"), "two\n");
    let changed = edit(&work_dir, "dir/note", "sed -i '$a more'");
    assert_eq!((changed.code, changed.stderr.as_str()), (0, ""));
    assert_eq!(text(&work_dir, "dir/again"), "one\nmore\n");
    work_dir.run_ok(&["extract", "a.lbx", "--to", "out", "--privileges"]);
    let (before, after) = (describe(&work_dir.path("plain")), describe(&work_dir.path("out/plain")));
    let (before, after) = (before.values().next().unwrap(), after.values().next().unwrap());
    assert_eq!((before.mode, before.owner, &before.xattrs), (after.mode, after.owner, &after.xattrs));
    assert_ne!(before.modified, after.modified);
    assert_eq!(describe(&work_dir.path("out/dir"))[std::path::Path::new("note")].links, 2);
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}

#[test]
fn what_is_missing_is_made_when_something_was_written() {
    let work_dir = filled();
    assert_eq!(edit(&work_dir, "dir/new", "true").code, 0);
    assert_eq!(work_dir.run(&["cat", "a.lbx", "dir/new"]).code, 2);
    assert_eq!(edit(&work_dir, "dir/new", "echo text >").code, 0, "words of the shell");
    assert_eq!(text(&work_dir, "dir/new"), "text\n");
}

#[test]
fn without_a_change_or_a_good_end_everything_stays() {
    let work_dir = filled();
    let listed = || work_dir.run_ok(&["ls", "-R", "--json", "a.lbx"]);
    let before = listed();
    for (path, editor, code, words) in [
        ("plain", "true", 0, ""),
        ("plain", "touch", 0, ""),
        (
            "plain",
            "sh -c 'echo more >> \"$1\"; exit 3' sh",
            2,
            "the editor ended with exit code 3; nothing was changed",
        ),
        ("plain", "sh -c 'kill -KILL $$' sh", 2, "the editor was killed; nothing was changed\n"),
        ("dir/new", "sh -c 'kill -KILL $$' sh", 2, "the editor was killed; nothing was changed\n"),
        ("plain", "sh -c 'rm \"$1\"' sh", 2, "cannot read the edited file"),
        ("plain", "sh -c 'rm \"$1\"; mkdir \"$1\"' sh", 2, "left no regular file"),
        ("dir", "true", 2, "is a directory"),
        ("link", "true", 2, "not a regular file"),
        ("no/where", "true", 2, "the archive has no no"),
        ("", "true", 2, "the root of an archive is not a file"),
    ] {
        let output = edit(&work_dir, path, editor);
        assert_eq!(output.code, code, "{path} {editor}: {}", output.stderr);
        assert!(output.stderr.contains(words), "{path} {editor}: {}", output.stderr);
        assert!(listed() == before, "{path} {editor}");
    }
}

/// What a command kept of what was edited.
fn kept(stderr: &str) -> PathBuf {
    let (_, kept) = stderr.trim_end().rsplit_once("; the edited text is in ").unwrap_or_else(|| panic!("{stderr}"));
    kept.into()
}

/// Sends it when the editor is at work.
fn stopped(work_dir: &TestDir, editor: &str, signal: Signal) -> (Option<i32>, String) {
    let mut command = work_dir.command();
    command.env("EDITOR", format!("sh -c '{editor}; : > begun; exec sleep 600' sh"));
    let child = work_dir.start(&mut command, &["edit", "a.lbx:plain", "--in", "private"]);
    let output = stop(child, signal, || work_dir.path("begun").exists()).unwrap();
    fs::remove_file(work_dir.path("begun")).unwrap();
    output
}

#[test]
fn a_signal_ends_the_editor_and_keeps_only_what_was_typed() {
    let work_dir = filled();
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let output = stopped(&work_dir, "true", signal);
        assert_eq!(output, (Some(code), "lockbox: interrupted; nothing was changed\n".into()));
        assert_eq!(names(&work_dir.path("private")), [""; 0]);
        // Written by the editor, or in what it keeps beside the file.
        for (typed, name) in [("echo more >> \"$1\"", "plain"), ("echo more > \"$1.swp\"", "plain.swp")] {
            let (output, stderr) = stopped(&work_dir, typed, signal);
            assert_eq!(output, Some(code));
            assert!(stderr.starts_with("lockbox: interrupted; nothing was changed; "), "{stderr}");
            let kept = work_dir.path(kept(&stderr)).with_file_name(name);
            assert!(fs::read_to_string(&kept).unwrap().ends_with("more\n"), "{stderr}");
            fs::remove_dir_all(kept.parent().unwrap()).unwrap();
        }
        assert_eq!(text(&work_dir, "plain"), "one\n");
    }
}

#[test]
fn what_was_typed_outlives_an_editor_that_is_killed() {
    let work_dir = filled();
    for path in ["plain", "dir/new"] {
        let output = edit(&work_dir, path, "sh -c 'echo more >> \"$1\"; kill -KILL $$' sh");
        assert_eq!(output.code, 2);
        assert!(output.stderr.starts_with("lockbox: the editor was killed; nothing was changed; "), "{output:?}");
        assert!(fs::read_to_string(work_dir.path(kept(&output.stderr))).unwrap().ends_with("more\n"));
    }
    assert_eq!(text(&work_dir, "plain"), "one\n");
}

#[test]
fn signals_of_the_keyboard_are_the_editors_business() {
    let work_dir = filled();
    let output = edit(&work_dir, "plain", "sh -c 'kill -INT $PPID; kill -QUIT $PPID; echo more >> \"$1\"' sh");
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    assert_eq!(text(&work_dir, "plain"), "one\nmore\n");
}

#[test]
fn what_cannot_be_written_back_is_kept_and_named() {
    let work_dir = filled();
    // Nobody can write to an archive that became another file's.
    let output = edit(&work_dir, "plain", "sh -c 'echo more >> \"$1\"; : > a.lbx' sh");
    assert_ne!(output.code, 0);
    let kept = kept(&output.stderr);
    assert_eq!(fs::read_to_string(work_dir.path(kept)).unwrap(), "one\nmore\n", "{}", output.stderr);
}

#[test]
fn what_cannot_be_compared_is_kept_and_named() {
    let work_dir = filled();
    // Nobody but root without limits reads what its owner may not read.
    let unreadable = || {
        if nix::unistd::geteuid().is_root() {
            let readers = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
            readers.iter().for_each(|reader| remove_capability_from_bounding_set(reader).unwrap());
        }
        edit(&work_dir, "plain", "sh -c 'echo two > \"$1\"; chmod 000 \"$1\"' sh")
    };
    let output = thread::scope(|scope| scope.spawn(unreadable).join().unwrap());
    assert_eq!(output.code, 2);
    let kept = work_dir.path(kept(&output.stderr));
    fs::set_permissions(&kept, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::read_to_string(kept).unwrap(), "two\n", "{}", output.stderr);
}

#[test]
fn nothing_comes_to_a_disk_unless_it_is_told_to() {
    let work_dir = filled();
    let mut command = work_dir.command();
    command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).env("XDG_RUNTIME_DIR", "/proc/self").env("EDITOR", "false");
    let output = output_of(command.args(["edit", "a.lbx:plain"]));
    assert_eq!(output.code, 2);
    assert!(output.stderr.starts_with("lockbox: /proc/self is not in memory"), "{}", output.stderr);
    assert!(output.stderr.contains("--in"), "{}", output.stderr);
}

#[test]
fn a_directory_where_others_rename_is_no_place_for_what_is_edited() {
    let work_dir = filled();
    let mode = |mode| fs::set_permissions(work_dir.path("private"), fs::Permissions::from_mode(mode)).unwrap();
    mode(0o777);
    let refused = edit(&work_dir, "plain", "sed -i s/one/two/");
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("other users may rename entries of"), "{}", refused.stderr);
    mode(0o1777);
    assert_eq!(edit(&work_dir, "plain", "sed -i s/one/two/").code, 0);
    assert_eq!(text(&work_dir, "plain"), "two\n");
    // Nor one that others rename with all that is in it.
    fs::create_dir(work_dir.path("private/inner")).unwrap();
    mode(0o777);
    let mut command = work_dir.command();
    command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).env("VISUAL", "false");
    let refused = output_of(command.args(["edit", "a.lbx:plain", "--in", "private/inner"]));
    assert!(refused.stderr.contains("or of a directory above it: set XDG_RUNTIME_DIR, or name"), "{}", refused.stderr);
    fs::remove_dir(work_dir.path("private/inner")).unwrap();
    mode(0o700);
}

#[test]
fn where_no_directory_is_in_memory_one_is_asked_for() {
    let work_dir = filled();
    let mut command = work_dir.command();
    command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).env("EDITOR", "false");
    let output = output_of(command.args(["edit", "a.lbx:plain", "--in", "none"]));
    assert_eq!(output.code, 2);
    assert_eq!(
        output.stderr,
        "lockbox: cannot use none: No such file or directory; name a directory with --in, which may be on a disk\n"
    );
    // As su(1) leaves it behind: another user's, which the daemons of this one pass over too.
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(work_dir.path("private"), Some(12_345), None).unwrap();
        command = work_dir.command();
        command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).env("XDG_RUNTIME_DIR", work_dir.path("private"));
        let output = output_of(command.env("EDITOR", "sed -i s/one/two/").args(["edit", "a.lbx:plain"]));
        let is_in_memory =
            rustix::fs::statfs("/run").is_ok_and(|found| [0x0102_1994, 0x8584_58f6].contains(&found.f_type));
        assert_eq!(output.code == 0, is_in_memory, "{}", output.stderr);
        assert!(is_in_memory || output.stderr.starts_with("lockbox: /run is not in memory"), "{}", output.stderr);
    }
}

#[test]
fn a_pipe_that_the_editor_leaves_is_not_waited_for() {
    let work_dir = filled();
    let left = edit(&work_dir, "plain", "sh -c 'mkfifo \"$(dirname \"$0\")/pipe\"'");
    assert!(left.code == 0 && is_quiet_or_early(&left.stderr), "{left:?}");
}

/// Nothing, or the advice that follows when an editor changed nothing within two seconds.
fn is_quiet_or_early(stderr: &str) -> bool {
    stderr.is_empty() || stderr.starts_with("lockbox: the editor returned at once and changed nothing")
}

#[test]
fn an_editor_inherits_nothing_that_tells_where_passphrases_are() {
    let work_dir = filled();
    let edited = edit(&work_dir, "plain", "env >environment; true");
    assert!(edited.code == 0 && is_quiet_or_early(&edited.stderr), "{edited:?}");
    let environment = fs::read_to_string(work_dir.path("environment")).unwrap();
    assert!(environment.contains("VISUAL=") && !environment.contains("LOCKBOX_PASS"), "{environment}");
}
