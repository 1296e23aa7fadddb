//! `lockbox env` and `lockbox run`: variables reach the program and nobody else.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use crate::support::{Ended, Place, end, end_with_input};

const SECRET: &str = "the secret value";

fn with_pass(place: &Place, arguments: &[&str]) -> Command {
    let mut command = place.command();
    command.env("LOCKBOX_PASSFILE", place.path("pass")).args(arguments);
    command
}

fn set(place: &Place, name: &str, value: &str) -> Ended {
    end_with_input(&mut with_pass(place, &["env", "set", "a.lbx", name]), value)
}

#[test]
fn variables_are_kept_and_only_names_are_listed() {
    let place = Place::new();
    place.archive("a.lbx");
    assert_eq!(place.good(&["env", "ls", "a.lbx"]), b"");
    assert_eq!(set(&place, "TOKEN", &format!("{SECRET}\n")).code, 0);
    place.secret("value", "two\nlines");
    place.good(&["env", "set", "a.lbx", "OTHER", "--from", "value"]);
    assert_eq!(place.good(&["env", "ls", "a.lbx"]), b"OTHER\nTOKEN\n");
    assert_eq!(place.good(&["env", "get", "a.lbx", "TOKEN"]), format!("{SECRET}\n").as_bytes());
    assert_eq!(place.good(&["env", "get", "a.lbx", "OTHER"]), b"two\nlines\n");
    // Replaced as a whole; nothing unfinished stays.
    assert_eq!(set(&place, "TOKEN", "short").code, 0);
    assert_eq!(place.good(&["cat", "a.lbx", "/.lockbox/env/TOKEN"]), b"short");
    let listed = String::from_utf8(place.good(&["ls", "-lR", "a.lbx"])).unwrap();
    assert!(listed.contains("drwx------") && listed.contains("-rw-------"), "{listed}");
    assert_eq!(place.good(&["ls", "a.lbx", ".lockbox/env"]), b"OTHER\nTOKEN\n");
    place.good(&["env", "rm", "a.lbx", "TOKEN"]);
    assert_eq!(place.good(&["env", "ls", "a.lbx"]), b"OTHER\n");
    for command in [["env", "get", "a.lbx", "TOKEN"], ["env", "rm", "a.lbx", "TOKEN"]] {
        let ended = place.run(&command);
        assert_eq!((ended.code, &ended.complaint[..]), (2, "lockbox: the archive has no variable TOKEN\n"));
    }
    for name in ["1A", "A-B", "A=B", "../x", ""] {
        let ended = set(&place, name, SECRET);
        assert_eq!(ended.code, 1, "{name}");
        assert!(ended.complaint.contains("is not a name of a variable") && !ended.complaint.contains(SECRET), "{name}");
    }
    // A value in the arguments is not taken.
    assert_eq!(place.run(&["env", "set", "a.lbx", "A", SECRET]).code, 1);
    let ended = set(&place, "A", "a\0b");
    assert_eq!((ended.code, &ended.complaint[..]), (2, "lockbox: the value holds a NUL, which no variable can\n"));
    let ended = set(&place, "A", &"x".repeat(70_000));
    assert!(ended.code == 2 && ended.complaint.contains("longer than 64 KiB"), "{}", ended.complaint);
}

#[test]
fn a_program_runs_with_the_variables_and_nothing_else_changes() {
    let place = Place::new();
    place.archive("a.lbx");
    assert_eq!(set(&place, "TOKEN", SECRET).code, 0);
    assert_eq!(set(&place, "HOME", "/elsewhere").code, 0);
    let run = |options: &[&str], script: &str| {
        let command = [&["run", "a.lbx"], options, &["--", "/bin/sh", "-c", script, "name", "an argument"]].concat();
        let mut command = with_pass(&place, &command);
        command.env("PRESENT", "here").env("HOME", "/before");
        end(&mut command)
    };
    let ended = run(&[], "echo \"$TOKEN $HOME $PRESENT $1\"");
    assert_eq!((ended.code, ended.complaint.as_str()), (0, ""));
    assert_eq!(ended.out, format!("{SECRET} /elsewhere here an argument\n").as_bytes());
    assert_eq!(run(&["--only", "TOKEN"], "echo $TOKEN $HOME").out, format!("{SECRET} /before\n").as_bytes());
    let alone =
        String::from_utf8(run(&["--no-inherit"], "/usr/bin/env | /bin/grep -v '^_=\\|^PWD=\\|^SHLVL='").out).unwrap();
    let mut alone: Vec<&str> = alone.lines().collect();
    alone.sort_unstable();
    assert_eq!(alone, ["HOME=/elsewhere", &format!("TOKEN={SECRET}")]);
    assert_eq!(run(&[], "exit 37").code, 37);
    // The program has the archive closed, standard input, core dumps and signals as they were.
    let mut program = with_pass(
        &place,
        &["run", "a.lbx", "--", "/bin/sh", "-c", "ls -l /proc/self/fd; cat; grep SigBlk /proc/self/status; ulimit -c"],
    );
    let mut direct = Command::new("/bin/sh");
    direct.args(["-c", "grep SigBlk /proc/self/status; ulimit -c"]);
    let direct = String::from_utf8(end(&mut direct).out).unwrap();
    let ended = end_with_input(&mut program, "what the program reads\n");
    let out = String::from_utf8(ended.out).unwrap();
    assert!(!out.contains("a.lbx") && out.contains("what the program reads\n"), "{out}");
    assert!(out.ends_with(&direct), "{out} {direct}");

    let ended = end(&mut with_pass(&place, &["run", "a.lbx", "--", "no-such-program"]));
    assert_eq!(
        (ended.code, &ended.complaint[..]),
        (127, "lockbox: cannot run no-such-program: No such file or directory\n")
    );
    fs::write(place.path("plain"), "").unwrap();
    assert_eq!(end(&mut with_pass(&place, &["run", "a.lbx", "--", "./plain"])).code, 126);
    let ended = end(&mut with_pass(&place, &["run", "a.lbx", "--only", "MISSING", "--", "true"]));
    assert_eq!((ended.code, &ended.complaint[..]), (2, "lockbox: the archive has no variable MISSING\n"));
    // Standard input is the program's, so no passphrase is taken from it.
    let ended = end_with_input(place.command().args(["run", "a.lbx", "--", "true"]), "correct horse\n");
    assert!(ended.code != 0, "{}", ended.complaint);
}

#[test]
fn a_signal_reaches_the_program() {
    let place = Place::new();
    place.archive("a.lbx");
    let mut command = with_pass(&place, &["run", "a.lbx", "--", "/bin/sh", "-c", "echo ready; read forever"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
    assert_eq!(line, "ready\n");
    let id = nix::unistd::Pid::from_raw(child.id().try_into().unwrap());
    nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(15));
}

/// `run`, and with user namespaces `exec`, whose case is on real mounts.
#[test]
fn a_program_inherits_nothing_that_tells_where_passphrases_are() {
    let place = Place::new();
    place.archive("a.lbx");
    for variable in ["LOCKBOX_PASSFILE", "LOCKBOX_PASSCOMMAND"] {
        let mut command = place.command();
        let pass = place.path("pass");
        let value = if variable.ends_with("FILE") { pass.into_os_string() } else { "cat pass".into() };
        let ended = end(command.env(variable, value).args(["run", "a.lbx", "--", "env"]));
        assert_eq!(ended.code, 0, "{}", ended.complaint);
        let environment = String::from_utf8(ended.out).unwrap();
        assert!(environment.contains("PATH=") && !environment.contains("LOCKBOX_PASS"), "{environment}");
    }
}
