//! Commands that write plain files and are stopped: nothing of a half-done extraction stays.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Place, names, noise, stop};

/// An archive that takes a moment to be extracted.
fn filled() -> Place {
    let place = Place::new();
    place.archive("a.lbx");
    fs::create_dir(place.path("tree")).unwrap();
    for n in 0..8 {
        fs::write(place.path(format!("tree/{n}")), noise(8 << 20)).unwrap();
    }
    place.good(&["add", "a.lbx", "tree"]);
    fs::write(place.path("small"), "small").unwrap();
    place.good(&["add", "a.lbx", "small"]);
    place
}

/// Whether there is a stage with something in it.
fn begun(place: &Place, to: &str) -> bool {
    let entries = fs::read_dir(place.path(to)).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(".lockbox-extract-"))
        .any(|stage| fs::read_dir(stage.path()).is_ok_and(|content| content.count() > 0))
}

/// Starts the command and sends the signal once it writes; how it ended, unless it was done before.
fn stopped(place: &Place, arguments: &[&str], to: &str, signal: Signal) -> Option<(Option<i32>, String)> {
    stop(place.start(&mut place.command(), arguments), signal, || begun(place, to))
}

#[test]
fn an_interrupted_extraction_leaves_nothing_behind() {
    let place = filled();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let ended = (0..200).find_map(|n| {
            let to = format!("out{n}{signal}");
            let ended = stopped(&place, &["extract", "a.lbx", "--to", &to], &to, signal)?;
            assert_eq!(names(&place.path(&to)), [""; 0]);
            Some(ended)
        });
        let (code, complaint) = ended.expect("no extraction could be stopped");
        assert_eq!(
            (code, complaint.as_str()),
            (Some(128 + signal as i32), "lockbox: interrupted; nothing was extracted\n")
        );
    }
}

#[test]
fn what_a_killed_extraction_left_goes_with_the_next_one() {
    let place = filled();
    for _ in 0..200 {
        let _ = fs::remove_dir_all(place.path("out"));
        if stopped(&place, &["extract", "a.lbx", "--to", "out"], "out", Signal::SIGKILL).is_none() {
            continue;
        }
        assert!(begun(&place, "out"), "nothing was left");
        place.good(&["extract", "a.lbx", "small", "--to", "out"]);
        assert_eq!(names(&place.path("out")), ["small"]);
        return;
    }
    panic!("no extraction could be killed");
}

#[test]
fn an_interrupted_rescue_keeps_whole_files_alone() {
    let place = filled();
    for n in 0..20 {
        let to = format!("out{n}");
        let Some((code, complaint)) = stopped(&place, &["rescue", "a.lbx", "--to", &to], &to, Signal::SIGTERM) else {
            continue;
        };
        assert_eq!(code, Some(128 + Signal::SIGTERM as i32));
        assert!(complaint.ends_with(&format!("stays in {to}\n")), "{complaint}");
        for name in names(&place.path(&to)) {
            assert!(name == "tree" || name == "small", "{name:?}");
        }
        for name in names(&place.path(&to).join("tree")) {
            let (ours, theirs) = (place.path("tree").join(&name), place.path(&to).join("tree").join(&name));
            assert!(fs::read(ours).unwrap() == fs::read(theirs).unwrap(), "{name:?}");
        }
        return;
    }
    panic!("no rescue could be stopped");
}

/// As nohup(1) does.
#[test]
fn a_signal_that_was_ignored_before_is_ignored() {
    let place = filled();
    let arguments =
        ["-c", r#"trap '' HUP; exec "$0" "$@""#, env!("CARGO_BIN_EXE_lockbox"), "extract", "a.lbx", "--to", "out"];
    let mut shell = Command::new("sh");
    shell.current_dir(place.path("")).env("XDG_RUNTIME_DIR", place.path("")).env("XDG_STATE_HOME", place.path("state"));
    let child = place.start(shell.arg0("sh").stdin(Stdio::null()), &arguments);
    while !begun(&place, "out") && !place.path("out/tree").exists() {
        std::thread::yield_now();
    }
    // It may be done by now, and is not waited for yet.
    kill(Pid::from_raw(child.id() as i32), Signal::SIGHUP).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!((ended.status.code(), ended.stderr.as_slice()), (Some(0), &b""[..]));
    assert_eq!(names(&place.path("out")), ["small", "tree"]);
}
