//! `lockbox edit`: what the editor changed comes back with everything else as it was, and nothing stays outside.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::thread;

use nix::sys::signal::Signal;
use rustix::fs::XattrFlags;
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

use crate::support::{Ended, Place, describe, end, names, stop};

/// An archive with a file `dir/note` of two names, and `plain`.
fn filled() -> Place {
    let place = Place::new();
    place.archive("a.lbx");
    fs::create_dir_all(place.path("dir")).unwrap();
    fs::create_dir(place.path("private")).unwrap();
    fs::write(place.path("dir/note"), "one\n").unwrap();
    fs::write(place.path("plain"), "one\n").unwrap();
    fs::hard_link(place.path("dir/note"), place.path("dir/again")).unwrap();
    symlink("plain", place.path("link")).unwrap();
    fs::set_permissions(place.path("plain"), fs::Permissions::from_mode(0o2751)).unwrap();
    // Some host file systems have none.
    let _ = rustix::fs::setxattr(place.path("plain"), "user.comment", b"kept", XattrFlags::empty());
    place.good(&["add", "a.lbx", "dir", "plain", "link"]);
    place
}

fn edit(place: &Place, path: &str, editor: &str) -> Ended {
    let mut command = place.command();
    command.env("LOCKBOX_PASSFILE", place.path("pass")).env("VISUAL", editor);
    let ended = end(command.args(["edit", &format!("a.lbx:{path}"), "--in", "private"]));
    if !ended.complaint.contains("the edited text is in") {
        assert_eq!(names(&place.path("private")), [""; 0], "{ended:?}");
    }
    ended
}

fn text(place: &Place, path: &str) -> String {
    String::from_utf8(place.good(&["cat", "a.lbx", path])).unwrap()
}

#[test]
fn what_was_changed_comes_back_and_nothing_else_changes() {
    let place = filled();
    // Puts another file in the place of this one.
    let changed = edit(&place, "plain", "sed -i s/one/two/");
    assert_eq!((changed.code, changed.complaint.as_str()), (0, ""));
    assert_eq!(text(&place, "plain"), "two\n");
    let changed = edit(&place, "dir/note", "sed -i '$a more'");
    assert_eq!((changed.code, changed.complaint.as_str()), (0, ""));
    assert_eq!(text(&place, "dir/again"), "one\nmore\n");
    place.good(&["extract", "a.lbx", "--to", "out", "--privileges"]);
    let (before, after) = (describe(&place.path("plain")), describe(&place.path("out/plain")));
    let (before, after) = (before.values().next().unwrap(), after.values().next().unwrap());
    assert_eq!((before.mode, before.owner, &before.xattrs), (after.mode, after.owner, &after.xattrs));
    assert_ne!(before.modified, after.modified);
    assert_eq!(describe(&place.path("out/dir"))[std::path::Path::new("note")].links, 2);
    place.good(&["check", "--full", "a.lbx"]);
}

#[test]
fn what_is_missing_is_made_when_something_was_written() {
    let place = filled();
    assert_eq!(edit(&place, "dir/new", "true").code, 0);
    assert_eq!(place.run(&["cat", "a.lbx", "dir/new"]).code, 2);
    assert_eq!(edit(&place, "dir/new", "echo text >").code, 0, "words of the shell");
    assert_eq!(text(&place, "dir/new"), "text\n");
}

#[test]
fn without_a_change_or_a_good_end_everything_stays() {
    let place = filled();
    let listed = || place.good(&["ls", "-R", "--json", "a.lbx"]);
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
        let ended = edit(&place, path, editor);
        assert_eq!(ended.code, code, "{path} {editor}: {}", ended.complaint);
        assert!(ended.complaint.contains(words), "{path} {editor}: {}", ended.complaint);
        assert!(listed() == before, "{path} {editor}");
    }
}

/// What a command kept of what was edited.
fn kept(complaint: &str) -> PathBuf {
    let (_, kept) =
        complaint.trim_end().rsplit_once("; the edited text is in ").unwrap_or_else(|| panic!("{complaint}"));
    kept.into()
}

/// Sends it when the editor is at work.
fn stopped(place: &Place, editor: &str, signal: Signal) -> (Option<i32>, String) {
    let mut command = place.command();
    command.env("EDITOR", format!("sh -c '{editor}; : > begun; exec sleep 600' sh"));
    let child = place.start(&mut command, &["edit", "a.lbx:plain", "--in", "private"]);
    let ended = stop(child, signal, || place.path("begun").exists()).unwrap();
    fs::remove_file(place.path("begun")).unwrap();
    ended
}

#[test]
fn a_signal_ends_the_editor_and_keeps_only_what_was_typed() {
    let place = filled();
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let ended = stopped(&place, "true", signal);
        assert_eq!(ended, (Some(code), "lockbox: interrupted; nothing was changed\n".into()));
        assert_eq!(names(&place.path("private")), [""; 0]);
        // Written by the editor, or in what it keeps beside the file.
        for (typed, name) in [("echo more >> \"$1\"", "plain"), ("echo more > \"$1.swp\"", "plain.swp")] {
            let (ended, complaint) = stopped(&place, typed, signal);
            assert_eq!(ended, Some(code));
            assert!(complaint.starts_with("lockbox: interrupted; nothing was changed; "), "{complaint}");
            let kept = place.path(kept(&complaint)).with_file_name(name);
            assert!(fs::read_to_string(&kept).unwrap().ends_with("more\n"), "{complaint}");
            fs::remove_dir_all(kept.parent().unwrap()).unwrap();
        }
        assert_eq!(text(&place, "plain"), "one\n");
    }
}

#[test]
fn what_was_typed_outlives_an_editor_that_is_killed() {
    let place = filled();
    for path in ["plain", "dir/new"] {
        let ended = edit(&place, path, "sh -c 'echo more >> \"$1\"; kill -KILL $$' sh");
        assert_eq!(ended.code, 2);
        assert!(ended.complaint.starts_with("lockbox: the editor was killed; nothing was changed; "), "{ended:?}");
        assert!(fs::read_to_string(place.path(kept(&ended.complaint))).unwrap().ends_with("more\n"));
    }
    assert_eq!(text(&place, "plain"), "one\n");
}

#[test]
fn signals_of_the_keyboard_are_the_editors_business() {
    let place = filled();
    let ended = edit(&place, "plain", "sh -c 'kill -INT $PPID; kill -QUIT $PPID; echo more >> \"$1\"' sh");
    assert_eq!((ended.code, ended.complaint.as_str()), (0, ""));
    assert_eq!(text(&place, "plain"), "one\nmore\n");
}

#[test]
fn what_cannot_be_written_back_is_kept_and_named() {
    let place = filled();
    // Nobody can write to an archive that became another file's.
    let ended = edit(&place, "plain", "sh -c 'echo more >> \"$1\"; : > a.lbx' sh");
    assert_ne!(ended.code, 0);
    let kept = kept(&ended.complaint);
    assert_eq!(fs::read_to_string(place.path(kept)).unwrap(), "one\nmore\n", "{}", ended.complaint);
}

#[test]
fn what_cannot_be_compared_is_kept_and_named() {
    let place = filled();
    // Nobody but root without limits reads what its owner may not read.
    let unreadable = || {
        if nix::unistd::geteuid().is_root() {
            let readers = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
            readers.iter().for_each(|reader| remove_capability_from_bounding_set(reader).unwrap());
        }
        edit(&place, "plain", "sh -c 'echo two > \"$1\"; chmod 000 \"$1\"' sh")
    };
    let ended = thread::scope(|scope| scope.spawn(unreadable).join().unwrap());
    assert_eq!(ended.code, 2);
    let kept = place.path(kept(&ended.complaint));
    fs::set_permissions(&kept, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::read_to_string(kept).unwrap(), "two\n", "{}", ended.complaint);
}

#[test]
fn nothing_comes_to_a_disk_unless_it_is_told_to() {
    let place = filled();
    let mut command = place.command();
    command.env("LOCKBOX_PASSFILE", place.path("pass")).env("XDG_RUNTIME_DIR", "/proc/self").env("EDITOR", "false");
    let ended = end(command.args(["edit", "a.lbx:plain"]));
    assert_eq!(ended.code, 2);
    assert!(ended.complaint.starts_with("lockbox: /proc/self is not in memory"), "{}", ended.complaint);
    assert!(ended.complaint.contains("--in"), "{}", ended.complaint);
}

#[test]
fn a_directory_where_others_rename_is_no_place_for_what_is_edited() {
    let place = filled();
    let mode = |mode| fs::set_permissions(place.path("private"), fs::Permissions::from_mode(mode)).unwrap();
    mode(0o777);
    let refused = edit(&place, "plain", "sed -i s/one/two/");
    assert_eq!(refused.code, 2);
    assert!(refused.complaint.contains("other users may rename entries of"), "{}", refused.complaint);
    mode(0o1777);
    assert_eq!(edit(&place, "plain", "sed -i s/one/two/").code, 0);
    assert_eq!(text(&place, "plain"), "two\n");
    // Nor one that others rename with all that is in it.
    fs::create_dir(place.path("private/inner")).unwrap();
    mode(0o777);
    let mut command = place.command();
    command.env("LOCKBOX_PASSFILE", place.path("pass")).env("VISUAL", "false");
    let refused = end(command.args(["edit", "a.lbx:plain", "--in", "private/inner"]));
    assert!(
        refused.complaint.contains("or of a directory above it: set XDG_RUNTIME_DIR, or name"),
        "{}",
        refused.complaint
    );
    fs::remove_dir(place.path("private/inner")).unwrap();
    mode(0o700);
}

#[test]
fn where_no_directory_is_in_memory_one_is_asked_for() {
    let place = filled();
    let mut command = place.command();
    command.env("LOCKBOX_PASSFILE", place.path("pass")).env("EDITOR", "false");
    let ended = end(command.args(["edit", "a.lbx:plain", "--in", "none"]));
    assert_eq!(ended.code, 2);
    assert_eq!(
        ended.complaint,
        "lockbox: cannot use none: No such file or directory; name a directory with --in, which may be on a disk\n"
    );
    // As su(1) leaves it behind: another user's, which the daemons of this one pass over too.
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(place.path("private"), Some(12_345), None).unwrap();
        command = place.command();
        command.env("LOCKBOX_PASSFILE", place.path("pass")).env("XDG_RUNTIME_DIR", place.path("private"));
        let ended = end(command.env("EDITOR", "sed -i s/one/two/").args(["edit", "a.lbx:plain"]));
        let is_in_memory =
            rustix::fs::statfs("/run").is_ok_and(|found| [0x0102_1994, 0x8584_58f6].contains(&found.f_type));
        assert_eq!(ended.code == 0, is_in_memory, "{}", ended.complaint);
        assert!(is_in_memory || ended.complaint.starts_with("lockbox: /run is not in memory"), "{}", ended.complaint);
    }
}

#[test]
fn a_pipe_that_the_editor_leaves_is_not_waited_for() {
    let place = filled();
    let left = edit(&place, "plain", "sh -c 'mkfifo \"$(dirname \"$0\")/pipe\"'");
    assert!(left.code == 0 && is_quiet_or_early(&left.complaint), "{left:?}");
}

/// Nothing, or the advice that follows when an editor changed nothing within two seconds.
fn is_quiet_or_early(complaint: &str) -> bool {
    complaint.is_empty() || complaint.starts_with("lockbox: the editor returned at once and changed nothing")
}

#[test]
fn an_editor_inherits_nothing_that_tells_where_passphrases_are() {
    let place = filled();
    let edited = edit(&place, "plain", "env >environment; true");
    assert!(edited.code == 0 && is_quiet_or_early(&edited.complaint), "{edited:?}");
    let environment = fs::read_to_string(place.path("environment")).unwrap();
    assert!(environment.contains("VISUAL=") && !environment.contains("LOCKBOX_PASS"), "{environment}");
}
