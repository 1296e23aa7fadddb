//! `lockbox env` and `lockbox run`: variables reach the program and nobody else.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use crate::support::{RunOutput, TestDir, output_of, output_with_input};

const SECRET: &str = "the secret value";

fn with_pass(work_dir: &TestDir, arguments: &[&str]) -> Command {
    let mut command = work_dir.command();
    command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).args(arguments);
    command
}

fn set(work_dir: &TestDir, name: &str, value: &str) -> RunOutput {
    output_with_input(&mut with_pass(work_dir, &["env", "set", "a.lbx", name]), value)
}

#[test]
fn variables_are_kept_and_only_names_are_listed() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    assert_eq!(work_dir.run_ok(&["env", "ls", "a.lbx"]), b"");
    assert_eq!(set(&work_dir, "TOKEN", &format!("{SECRET}\n")).code, 0);
    work_dir.write_passfile("value", "two\nlines");
    work_dir.run_ok(&["env", "set", "a.lbx", "OTHER", "--from", "value"]);
    assert_eq!(work_dir.run_ok(&["env", "ls", "a.lbx"]), b"OTHER\nTOKEN\n");
    assert_eq!(work_dir.run_ok(&["env", "get", "a.lbx", "TOKEN"]), format!("{SECRET}\n").as_bytes());
    assert_eq!(work_dir.run_ok(&["env", "get", "a.lbx", "OTHER"]), b"two\nlines\n");
    // Replaced as a whole; nothing unfinished stays.
    assert_eq!(set(&work_dir, "TOKEN", "short").code, 0);
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "/.lockbox/env/TOKEN"]), b"short");
    let listed = String::from_utf8(work_dir.run_ok(&["ls", "-lR", "a.lbx"])).unwrap();
    assert!(listed.contains("drwx------") && listed.contains("-rw-------"), "{listed}");
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx", ".lockbox/env"]), b"OTHER\nTOKEN\n");
    work_dir.run_ok(&["env", "rm", "a.lbx", "TOKEN"]);
    assert_eq!(work_dir.run_ok(&["env", "ls", "a.lbx"]), b"OTHER\n");
    for command in [["env", "get", "a.lbx", "TOKEN"], ["env", "rm", "a.lbx", "TOKEN"]] {
        let output = work_dir.run(&command);
        assert_eq!((output.code, &output.stderr[..]), (2, "lockbox: the archive has no variable TOKEN\n"));
    }
    for name in ["1A", "A-B", "A=B", "../x", ""] {
        let output = set(&work_dir, name, SECRET);
        assert_eq!(output.code, 1, "{name}");
        assert!(output.stderr.contains("is not a name of a variable") && !output.stderr.contains(SECRET), "{name}");
    }
    // A value in the arguments is not taken.
    assert_eq!(work_dir.run(&["env", "set", "a.lbx", "A", SECRET]).code, 1);
    let output = set(&work_dir, "A", "a\0b");
    assert_eq!((output.code, &output.stderr[..]), (2, "lockbox: the value holds a NUL, which no variable can\n"));
    let output = set(&work_dir, "A", &"x".repeat(70_000));
    assert!(output.code == 2 && output.stderr.contains("longer than 64 KiB"), "{}", output.stderr);
}

#[test]
fn a_program_runs_with_the_variables_and_nothing_else_changes() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    assert_eq!(set(&work_dir, "TOKEN", SECRET).code, 0);
    assert_eq!(set(&work_dir, "HOME", "/elsewhere").code, 0);
    let run = |options: &[&str], script: &str| {
        let command = [&["run", "a.lbx"], options, &["--", "/bin/sh", "-c", script, "name", "an argument"]].concat();
        let mut command = with_pass(&work_dir, &command);
        command.env("PRESENT", "here").env("HOME", "/before");
        output_of(&mut command)
    };
    let output = run(&[], "echo \"$TOKEN $HOME $PRESENT $1\"");
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    assert_eq!(output.stdout, format!("{SECRET} /elsewhere here an argument\n").as_bytes());
    assert_eq!(run(&["--only", "TOKEN"], "echo $TOKEN $HOME").stdout, format!("{SECRET} /before\n").as_bytes());
    let alone = String::from_utf8(run(&["--no-inherit"], "/usr/bin/env | /bin/grep -v '^_=\\|^PWD=\\|^SHLVL='").stdout)
        .unwrap();
    let mut alone: Vec<&str> = alone.lines().collect();
    alone.sort_unstable();
    assert_eq!(alone, ["HOME=/elsewhere", &format!("TOKEN={SECRET}")]);
    assert_eq!(run(&[], "exit 37").code, 37);
    // The program has the archive closed, standard input, core dumps and signals as they were.
    let mut program = with_pass(
        &work_dir,
        &[
            "run",
            "a.lbx",
            "--",
            "/bin/sh",
            "-c",
            "ls -l /proc/self/fd; cat; grep 'SigBlk\\|SigIgn' /proc/self/status; ulimit -c",
        ],
    );
    let mut direct = Command::new("/bin/sh");
    direct.args(["-c", "grep 'SigBlk\\|SigIgn' /proc/self/status; ulimit -c"]);
    let direct = String::from_utf8(output_of(&mut direct).stdout).unwrap();
    let output = output_with_input(&mut program, "what the program reads\n");
    let out = String::from_utf8(output.stdout).unwrap();
    assert!(!out.contains("a.lbx") && out.contains("what the program reads\n"), "{out}");
    assert!(out.ends_with(&direct), "{out} {direct}");

    let output = output_of(&mut with_pass(&work_dir, &["run", "a.lbx", "--", "no-such-program"]));
    assert_eq!(
        (output.code, &output.stderr[..]),
        (127, "lockbox: cannot run no-such-program: No such file or directory\n")
    );
    fs::write(work_dir.path("plain"), "").unwrap();
    assert_eq!(output_of(&mut with_pass(&work_dir, &["run", "a.lbx", "--", "./plain"])).code, 126);
    let output = output_of(&mut with_pass(&work_dir, &["run", "a.lbx", "--only", "MISSING", "--", "true"]));
    assert_eq!((output.code, &output.stderr[..]), (2, "lockbox: the archive has no variable MISSING\n"));
    // Standard input is the program's, so no passphrase is taken from it.
    let output = output_with_input(work_dir.command().args(["run", "a.lbx", "--", "true"]), "correct horse\n");
    assert!(output.code != 0, "{}", output.stderr);
}

#[test]
fn a_signal_reaches_the_program() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let mut command = with_pass(&work_dir, &["run", "a.lbx", "--", "/bin/sh", "-c", "echo ready; read forever"]);
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
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    for variable in ["LOCKBOX_PASSFILE", "LOCKBOX_PASSCOMMAND"] {
        let mut command = work_dir.command();
        let pass = work_dir.path("pass");
        let value = if variable.ends_with("FILE") { pass.into_os_string() } else { "cat pass".into() };
        let output = output_of(command.env(variable, value).args(["run", "a.lbx", "--", "env"]));
        assert_eq!(output.code, 0, "{}", output.stderr);
        let environment = String::from_utf8(output.stdout).unwrap();
        assert!(environment.contains("PATH=") && !environment.contains("LOCKBOX_PASS"), "{environment}");
    }
}
