//! Commands that are stopped: what they say is kept and taken back is so, and nothing of a half-done extraction stays; and what a terminal shows of them.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{TestDir, names, noise, stop};
use crate::terminal::{Shown, got, last_line};

/// An archive that takes a moment to be extracted.
fn filled() -> TestDir {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::create_dir(work_dir.path("tree")).unwrap();
    for n in 0..8 {
        fs::write(work_dir.path(format!("tree/{n}")), noise(8 << 20)).unwrap();
    }
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    fs::write(work_dir.path("small"), "small").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "small"]);
    work_dir
}

/// Whether there is a stage with something in it.
fn begun(work_dir: &TestDir, to: &str) -> bool {
    let entries = fs::read_dir(work_dir.path(to)).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(".lockbox-extract-"))
        .any(|stage| fs::read_dir(stage.path()).is_ok_and(|content| content.count() > 0))
}

/// Starts the command and sends the signal once it writes; how it ended, unless it was done before.
fn stopped(work_dir: &TestDir, arguments: &[&str], to: &str, signal: Signal) -> Option<(Option<i32>, String)> {
    stop(work_dir.start(&mut work_dir.command(), arguments), signal, || begun(work_dir, to))
}

#[test]
fn an_interrupted_extraction_leaves_nothing_behind() {
    let work_dir = filled();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let output = (0..200).find_map(|n| {
            let to = format!("out{n}{signal}");
            let output = stopped(&work_dir, &["extract", "a.lbx", "--to", &to], &to, signal)?;
            assert_eq!(names(&work_dir.path(&to)), [""; 0]);
            Some(output)
        });
        let (code, stderr) = output.expect("no extraction could be stopped");
        assert_eq!(
            (code, stderr.as_str()),
            (Some(128 + signal as i32), "lockbox: interrupted; nothing was extracted; the same command starts over\n")
        );
    }
}

#[test]
fn what_a_killed_extraction_left_goes_with_the_next_one() {
    let work_dir = filled();
    for _ in 0..200 {
        let _ = fs::remove_dir_all(work_dir.path("out"));
        let killed = stopped(&work_dir, &["extract", "a.lbx", "--to", "out"], "out", Signal::SIGKILL);
        // It may have put one item or everything in its place by then.
        if killed.is_none() || !begun(&work_dir, "out") || names(&work_dir.path("out")).len() > 1 {
            continue;
        }
        work_dir.run_ok(&["extract", "a.lbx", "small", "--to", "out"]);
        assert_eq!(names(&work_dir.path("out")), ["small"]);
        return;
    }
    panic!("no extraction could be killed");
}

#[test]
fn an_interrupted_rescue_keeps_whole_files_alone() {
    let work_dir = filled();
    for n in 0..20 {
        let to = format!("out{n}");
        let Some((code, stderr)) = stopped(&work_dir, &["rescue", "a.lbx", "--to", &to], &to, Signal::SIGTERM) else {
            continue;
        };
        assert_eq!(code, Some(128 + Signal::SIGTERM as i32));
        assert!(stderr.contains(&format!("stays in {to}; ")) || names(&work_dir.path(&to)).is_empty(), "{stderr}");
        for name in names(&work_dir.path(&to)) {
            assert!(name == "tree" || name == "small", "{name:?}");
        }
        for name in names(&work_dir.path(&to).join("tree")) {
            let (ours, theirs) = (work_dir.path("tree").join(&name), work_dir.path(&to).join("tree").join(&name));
            assert!(fs::read(ours).unwrap() == fs::read(theirs).unwrap(), "{name:?}");
        }
        return;
    }
    panic!("no rescue could be stopped");
}

/// How a command is stopped half-way, and what is to be found then.
struct Case {
    arguments: &'static [&'static str],
    /// What the terminal shows when it is half-way, one of these.
    shows: &'static [&'static str],
    says: &'static str,
    /// What is so then.
    holds: fn(&TestDir),
    /// Doing it again as the sentence says completes it.
    goes_on: fn(&TestDir),
}

/// At least one of four files of 8 MiB is done, and not all of them. A terminal sees some of what comes quickly.
const SOME_FILES: &[&str] = &["1 file, 8", "1 file, 9", "1 file, 1", "2 files, ", "3 files, "];

/// Each command that shows how far it is, and works on an archive.
const CASES: &[Case] = &[
    Case {
        arguments: &["add", "a.lbx", "more"],
        shows: SOME_FILES,
        says: "everything added so far is complete and stays, and unfinished copies were rolled back; \
               the same command continues, and reports files that already exist",
        holds: some_added,
        goes_on: |work_dir| {
            let there = copied(work_dir, "more").len();
            let again = work_dir.run(&["add", "a.lbx", "more"]);
            assert_eq!((again.code, again.stderr.matches("file exists").count()), (2, there), "{}", again.stderr);
            assert_eq!(copied(work_dir, "more").len(), 4);
        },
    },
    Case {
        arguments: &["add", "--mirror", "a.lbx", "more"],
        shows: SOME_FILES,
        says: "everything added so far is complete and stays, and unfinished copies were rolled back; the same command continues",
        holds: some_added,
        goes_on: |work_dir| {
            work_dir.run_ok(&["add", "--mirror", "a.lbx", "more"]);
            assert_eq!(copied(work_dir, "more").len(), 4);
        },
    },
    Case {
        arguments: &["cp", "-r", "--force", "more", "a.lbx:/"],
        shows: SOME_FILES,
        says: "everything copied so far is complete and stays, and unfinished copies were rolled back; the same command continues",
        holds: some_added,
        goes_on: |work_dir| {
            work_dir.run_ok(&["cp", "-r", "--force", "more", "a.lbx:/"]);
            assert_eq!(copied(work_dir, "more").len(), 4);
        },
    },
    Case {
        arguments: &["cp", "-r", "a.lbx:/tree", "out"],
        shows: SOME_FILES,
        says: "nothing was copied; the same command starts over",
        holds: unchanged,
        goes_on: |work_dir| {
            work_dir.run_ok(&["cp", "-r", "a.lbx:/tree", "out"]);
            assert_eq!(names(&work_dir.path("out")).len(), 4);
        },
    },
    Case {
        arguments: &["extract", "a.lbx", "--to", "out"],
        shows: SOME_FILES,
        says: "nothing was extracted; the same command starts over",
        holds: |work_dir| assert_eq!(names(&work_dir.path("out")), [""; 0]),
        goes_on: |work_dir| {
            work_dir.run_ok(&["extract", "a.lbx", "--to", "out"]);
            assert_eq!(names(&work_dir.path("out")), ["small", "tree"]);
        },
    },
    Case {
        arguments: &["check", "--full", "a.lbx"],
        shows: &[" checked"],
        says: "the check is incomplete, and nothing was changed; the same command starts over",
        holds: unchanged,
        goes_on: |work_dir| {
            let said = work_dir.run_ok(&["check", "--full", "a.lbx"]);
            assert!(String::from_utf8(said).unwrap().starts_with("a.lbx: sound"));
        },
    },
    Case {
        arguments: &["compact", "a.lbx"],
        shows: &[" copied and compared"],
        says: "the archive is unchanged; the same command starts over",
        holds: unchanged,
        goes_on: |work_dir| drop(work_dir.run_ok(&["compact", "a.lbx"])),
    },
    Case {
        arguments: &["key", "rekey", "a.lbx"],
        shows: &[" copied and compared"],
        says: "the archive is unchanged; the same command starts over",
        holds: unchanged,
        goes_on: |work_dir| drop(work_dir.run_ok(&["key", "rekey", "a.lbx"])),
    },
    Case {
        arguments: &["rescue", "a.lbx", "--to", "out"],
        shows: &[" searched"],
        says: "nothing was rescued yet; the same command starts over",
        holds: |work_dir| assert!(!work_dir.path("out").exists() || names(&work_dir.path("out")).is_empty()),
        goes_on: |work_dir| {
            work_dir.run_ok(&["rescue", "a.lbx", "--to", "out"]);
            assert_eq!(names(&work_dir.path("out")), ["small", "tree"]);
        },
    },
    Case {
        arguments: &["backup", "a.lbx", "copy.lbx"],
        shows: &[" copied"],
        says: "the backup is unchanged, or up to date; the same command continues",
        holds: |work_dir| {
            unchanged(work_dir);
            assert!(!work_dir.path("copy.lbx").exists());
        },
        goes_on: |work_dir| {
            work_dir.run_ok(&["backup", "a.lbx", "copy.lbx"]);
            assert_eq!(work_dir.run(&["check", "--full", "copy.lbx"]).code, 0);
        },
    },
];

/// The one that works on [`with_a_lost_header`].
/// Of many files, so that there is a moment between the first and the last.
const RESCUE: Case = Case {
    arguments: &["rescue", "a.lbx", "--to", "out"],
    shows: &["2 files, ", "3 files, ", "4 files, ", "5 files, ", "6 files, "],
    says: "everything rescued so far is complete and stays in out; to start over, remove out or name another directory",
    holds: |work_dir| {
        let (ours, theirs) = (work_dir.path("tree"), work_dir.path("out/tree"));
        let found = names(&theirs);
        assert!((1..MANY).contains(&found.len()), "{found:?}");
        assert!(found.iter().all(|name| fs::read(ours.join(name)).unwrap() == fs::read(theirs.join(name)).unwrap()));
    },
    goes_on: |work_dir| {
        assert_eq!(work_dir.run(&["rescue", "a.lbx", "--to", "out"]).code, 2);
        work_dir.run_ok(&["rescue", "a.lbx", "--to", "other"]);
        assert_eq!(names(&work_dir.path("other/tree")).len(), MANY);
    },
};

/// Files of [`with_many_files`].
const MANY: usize = 16;

fn with_many_files() -> TestDir {
    trees_of(MANY)
}

const REPAIR: Case = Case {
    arguments: &["check", "--full", "--repair-header", "a.lbx"],
    shows: &[" checked"],
    says: "the check is incomplete, and only the header was changed; the same command starts over",
    holds: unchanged,
    goes_on: |work_dir| drop(work_dir.run_ok(&["check", "--full", "--repair-header", "a.lbx"])),
};

/// As [`trees`], but for a copy of the header of the archive.
fn with_a_lost_header() -> TestDir {
    let work_dir = trees();
    let mut bytes = fs::read(work_dir.path("a.lbx")).unwrap();
    bytes[5000] ^= 1;
    fs::write(work_dir.path("a.lbx"), bytes).unwrap();
    work_dir
}

fn trees() -> TestDir {
    trees_of(4)
}

/// An archive with a tree of so many files, and a tree that is not in it.
fn trees_of(files: usize) -> TestDir {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    for tree in ["tree", "more"] {
        fs::create_dir(work_dir.path(tree)).unwrap();
        for n in 0..files {
            fs::write(work_dir.path(format!("{tree}/{n}")), noise((8 << 20) + n)).unwrap();
        }
    }
    fs::write(work_dir.path("small"), "small").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "tree", "small"]);
    fs::copy(work_dir.path("a.lbx"), work_dir.path("before")).unwrap();
    work_dir
}

/// Names in a directory of the archive, which is sound; what is there is whole.
fn copied(work_dir: &TestDir, tree: &str) -> Vec<String> {
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    let listed = String::from_utf8(work_dir.run_ok(&["ls", "a.lbx", tree])).unwrap();
    let names: Vec<String> = listed.lines().map(str::to_owned).collect();
    for name in &names {
        let path = format!("{tree}/{name}");
        assert!(work_dir.run_ok(&["cat", "a.lbx", &path]) == fs::read(work_dir.path(&path)).unwrap(), "{path}");
    }
    names
}

fn some_added(work_dir: &TestDir) {
    let names = copied(work_dir, "more");
    assert!((1..4).contains(&names.len()), "{names:?}");
}

fn unchanged(work_dir: &TestDir) {
    assert!(fs::read(work_dir.path("a.lbx")).unwrap() == fs::read(work_dir.path("before")).unwrap());
    let names = names(&work_dir.path(""));
    let ours = ["a.lbx", "before", "lockbox", "more", "pass", "small", "state", "tree"];
    assert!(names.iter().all(|name| ours.contains(&name.to_str().unwrap())), "{names:?}");
}

/// The command of a case, interrupted half-way: what it worked on, its exit code, and what was shown. It may be done before its signal comes, and a rescue
/// may have begun to write, which is another case: then again.
fn half_way(make: fn() -> TestDir, case: &Case) -> (TestDir, i32, String) {
    // Beside other tests it is done in time again and again.
    for _ in 0..100 {
        let work_dir = make();
        let mut command = work_dir.command();
        command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).args(case.arguments).stdout(Stdio::null());
        let mut shown = Shown::start(&mut command);
        if shown.until(|text| case.shows.iter().any(|half| text.contains(half))) {
            let (code, text) = shown.interrupt(Signal::SIGINT);
            let is_late = case.shows == [" searched"] && text.contains(RESCUE.says);
            if code != 0 && !is_late {
                return (work_dir, code, text);
            }
        }
    }
    panic!("{:?} could not be stopped", case.arguments);
}

fn interrupted(make: fn() -> TestDir, case: &Case) {
    let (work_dir, code, text) = half_way(make, case);
    assert_eq!(code, 128 + Signal::SIGINT as i32, "{:?}: {text}", case.arguments);
    assert_eq!(last_line(&text), format!("lockbox: interrupted; {}", case.says), "{:?}", case.arguments);
    (case.holds)(&work_dir);
    (case.goes_on)(&work_dir);
}

#[test]
fn whoever_interrupts_is_told_what_was_kept_and_how_to_go_on_and_that_is_true() {
    for case in CASES {
        interrupted(trees, case);
    }
}

#[test]
fn whoever_interrupts_a_rescue_is_told_that_whole_files_stay() {
    interrupted(with_many_files, &RESCUE);
}

#[test]
fn whoever_interrupts_a_check_that_wrote_the_header_anew_is_told_that() {
    interrupted(with_a_lost_header, &REPAIR);
}

#[test]
fn a_tar_that_does_not_go_on_is_not_waited_for_when_the_import_is_interrupted() {
    let work_dir = trees();
    let tar = work_dir.run_ok(&["export-tar", "a.lbx", "tree"]);
    let mut command = work_dir.command();
    command.stdin(Stdio::piped());
    let mut child = work_dir.start(&mut command, &["import-tar", "a.lbx", "--to", "more"]);
    let mut input = child.stdin.take().unwrap();
    // What the pipe does not hold was read.
    input.write_all(&tar[..tar.len() / 2]).unwrap();
    got(&child, Signal::SIGINT);
    let output = child.wait_with_output().unwrap();
    drop(input);
    let says = "lockbox: interrupted; nothing was imported, and the received part was rolled back; \
                the same command with the whole tar starts over\n";
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(130), says));
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx"]), b"small\ntree\n");
    fs::write(work_dir.path("whole.tar"), tar).unwrap();
    let mut command = work_dir.command();
    command.stdin(fs::File::open(work_dir.path("whole.tar")).unwrap());
    assert!(work_dir.start(&mut command, &["import-tar", "a.lbx", "--to", "more"]).wait().unwrap().success());
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx", "more/tree"]), b"0\n1\n2\n3\n");
}

/// What goes to standard output is stopped while nobody reads it.
#[test]
fn an_output_that_nobody_reads_is_not_waited_for_when_its_command_is_interrupted() {
    let work_dir = trees();
    for (arguments, says) in [
        (["backup", "a.lbx", "-"], "the output is not a complete archive; the same command starts over"),
        (["export-tar", "a.lbx", "tree"], "the output is not a complete tar; the same command starts over"),
    ] {
        let mut command = work_dir.command();
        command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).args(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = child.stdout.take().unwrap();
        let mut written = vec![0; 1 << 20];
        out.read_exact(&mut written).unwrap();
        got(&child, Signal::SIGTERM);
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), told), (Some(143), format!("lockbox: interrupted; {says}\n")));
        out.read_to_end(&mut written).unwrap();
        let whole = work_dir.run_ok(&arguments);
        assert!(written.len() < whole.len());
        unchanged(&work_dir);
        // Nobody takes it for whole.
        fs::write(work_dir.path("cut"), written).unwrap();
        match arguments[0] {
            "backup" => assert_ne!(work_dir.run(&["check", "cut"]).code, 0),
            _ => {
                let mut command = work_dir.command();
                command.stdin(fs::File::open(work_dir.path("cut")).unwrap());
                let refused =
                    work_dir.start(&mut command, &["import-tar", "a.lbx", "--to", "x"]).wait_with_output().unwrap();
                assert_eq!(refused.status.code(), Some(2));
            }
        }
        fs::remove_file(work_dir.path("cut")).unwrap();
    }
}

#[test]
fn copies_within_an_archive_that_are_interrupted_are_whole_or_not_there() {
    let work_dir = trees();
    let arguments = ["cp", "-r", "a.lbx:/tree", "a.lbx:/small", "a.lbx:/new"];
    for _ in 0..50 {
        let _ = work_dir.run(&["rm", "-r", "a.lbx:/new"]);
        work_dir.run_ok(&["mkdir", "a.lbx:/new"]);
        let child = work_dir.start(&mut work_dir.command(), &arguments);
        got(&child, Signal::SIGINT);
        let output = child.wait_with_output().unwrap();
        if output.status.code() == Some(0) {
            continue;
        }
        let says = "lockbox: interrupted; everything copied so far is complete and stays, and unfinished copies were rolled back; \
                    continue with the same command and --force\n";
        assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(130), says));
        work_dir.run_ok(&["check", "--full", "a.lbx"]);
        let there = String::from_utf8(work_dir.run_ok(&["ls", "a.lbx", "new"])).unwrap();
        assert!(there.lines().all(|name| name == "tree" || name == "small"), "{there}");
        if there.contains("tree") {
            assert_eq!(work_dir.run_ok(&["ls", "a.lbx", "new/tree"]), b"0\n1\n2\n3\n");
        }
        return;
    }
    panic!("no copy could be stopped");
}

/// What a person sees, and nobody else.
#[test]
fn a_terminal_shows_how_far_it_is_and_one_line_at_the_end() {
    let work_dir = trees();
    let run = |arguments: &[&str]| {
        let mut command = work_dir.command();
        command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).args(arguments).stdout(Stdio::piped());
        let (code, text) = Shown::start(&mut command).end();
        assert_eq!(code, 0, "{arguments:?}: {text}");
        text
    };
    for (arguments, part, end) in [
        (&["add", "a.lbx", "more"][..], "1 file, 8192 KiB added", "added 4 files, 32 MiB"),
        (&["cp", "-r", "a.lbx:/more", "out"], "1 file, 8192 KiB copied", "copied 4 files, 32 MiB"),
        (&["extract", "a.lbx", "--to", "out2"], "1 file, ", "extracted 9 files, 64 MiB"),
    ] {
        let text = run(arguments);
        assert!(text.contains(part), "{arguments:?}: {text}");
        assert!(last_line(&text).starts_with(end), "{arguments:?}: {text}");
        assert_eq!(text.matches(end).count(), 1, "{text}");
    }
    // Standard output says it.
    for (arguments, part) in [
        (&["check", "--full", "a.lbx"][..], " MiB checked"),
        (&["compact", "a.lbx"], " MiB copied and compared"),
        (&["rescue", "a.lbx", "--to", "rescued"], " MiB searched"),
        (&["backup", "a.lbx", "--verify", "copy.lbx"], " MiB compared"),
    ] {
        let text = run(arguments);
        assert!(text.contains(part) && text.contains(" %)"), "{arguments:?}: {text}");
        assert_eq!(last_line(&text), "", "{arguments:?}");
    }
    for arguments in [&["extract", "--quiet", "a.lbx", "--to", "quiet"][..], &["check", "--full", "--quiet", "a.lbx"]] {
        assert_eq!(run(arguments), "", "{arguments:?}");
    }
    // A script is told nothing.
    work_dir.run_ok(&["extract", "a.lbx", "--to", "script"]);
}

/// As nohup(1) does.
#[test]
fn a_signal_that_was_ignored_before_is_ignored() {
    let work_dir = filled();
    let arguments =
        ["-c", r#"trap '' HUP; exec "$0" "$@""#, env!("CARGO_BIN_EXE_lockbox"), "extract", "a.lbx", "--to", "out"];
    let mut shell = Command::new("sh");
    shell
        .current_dir(work_dir.path(""))
        .env("XDG_RUNTIME_DIR", work_dir.path(""))
        .env("XDG_STATE_HOME", work_dir.path("state"));
    let mut child = work_dir.start(shell.arg0("sh").stdin(Stdio::null()), &arguments);
    let mut ended = None;
    while ended.is_none() && !begun(&work_dir, "out") && !work_dir.path("out/tree").exists() {
        std::thread::yield_now();
        ended = child.try_wait().unwrap();
    }
    // It may have ended since; its process ID stays valid until it is waited for.
    if ended.is_none() {
        kill(Pid::from_raw(child.id() as i32), Signal::SIGHUP).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
    assert_eq!(names(&work_dir.path("out")), ["small", "tree"]);
}

/// It counts that beside the copying, and the copying waits for the terminal.
#[test]
fn a_copy_shows_how_much_of_what_there_is_it_has_passed() {
    let work_dir = trees();
    fs::write(work_dir.path("a.tar"), work_dir.run_ok(&["export-tar", "a.lbx"])).unwrap();
    for (arguments, of) in [
        (&["extract", "--force", "a.lbx", "--to", "out"][..], " % of 32 MiB)"),
        (&["cp", "-r", "a.lbx:/tree", "copy"], " % of 32 MiB)"),
        (&["export-tar", "a.lbx"], " % of 32 MiB)"),
        (&["add", "--force", "a.lbx", "more"], " % of 32 MiB)"),
        // All of it is passed, and nothing copied.
        (&["add", "--mirror", "a.lbx", "more", "small"], "0 files, 0 bytes added (99 % of 32 MiB)"),
        (&["import-tar", "--force", "a.lbx", "--to", "imported"], " % of 32 MiB)"),
    ] {
        // A copy does not wait for the count, and may end before it on a busy machine.
        let is_shown = (0..50).any(|_| {
            let _ = fs::remove_dir_all(work_dir.path("copy"));
            let mut command = work_dir.command();
            command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).args(arguments).stdout(Stdio::null());
            command.stdin(fs::File::open(work_dir.path("a.tar")).unwrap());
            let mut shown = Shown::start(&mut command);
            let is_shown = shown.until(|text| text.contains(of));
            let (code, text) = shown.end();
            assert_eq!(code, 0, "{arguments:?}: {text}");
            assert!(!text.contains("100 % of 32 MiB)"), "{arguments:?}: {text}");
            is_shown
        });
        assert!(is_shown, "{arguments:?}");
    }
}
