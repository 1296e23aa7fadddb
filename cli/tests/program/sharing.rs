//! One-time links without a daemon: what is wrong is said before anything is asked of one.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::thread;

use nix::sys::signal::Signal;

use crate::support::{TestDir, names, noise, output_of, output_with_input};
use crate::terminal::got;

const FRAGMENT: &str = "qypqxpq9qcrsszg2pvxq6rs0zqg3yyc5z5tpwxqergd3c8g7rusqgpqyee";

fn link() -> String {
    // Nobody listens on the discard port.
    format!("http://127.0.0.1:9/s/1482719382210#{FRAGMENT}")
}

#[test]
fn a_link_that_is_damaged_is_told_before_anybody_is_asked() {
    let work_dir = TestDir::new();
    for (text, told) in [
        (link().replace("qypq", "qypp"), "damaged link"),
        (link()[..80].to_owned(), "damaged link"),
        (link().split('#').next().unwrap().to_owned(), "the part after '#' is missing"),
        ("hello".to_owned(), "this is not a one-time link"),
        (String::new(), "this is not a one-time link"),
    ] {
        let output = output_with_input(work_dir.command().arg("receive"), &text);
        assert_eq!(output.code, 20, "{text}");
        assert!(output.stderr.contains(told), "{text}: {}", output.stderr);
        assert!(!output.stderr.contains(&FRAGMENT[8..30]), "the message repeats the link: {}", output.stderr);
    }
}

#[test]
fn a_daemon_that_does_not_answer_is_named() {
    let work_dir = TestDir::new();
    let output = output_with_input(work_dir.command().arg("receive"), &link());
    assert_eq!(output.code, 21);
    assert_eq!(
        output.stderr,
        "lockbox: the share daemon at http://127.0.0.1:9 cannot be reached: Connection refused\n"
    );
    fs::write(work_dir.path("file"), "x").unwrap();
    let output = work_dir.run(&["share", "file"]);
    assert_eq!(output.code, 21);
    assert!(output.stderr.contains("no share daemon runs on this machine"), "{}", output.stderr);
    let output = work_dir.run(&["share", "file", "--socket", "none.sock"]);
    assert_eq!(output.code, 21);
    assert!(output.stderr.contains("none.sock cannot be reached: No such file"), "{}", output.stderr);
}

#[test]
fn what_a_hostile_server_says_drives_no_terminal_and_fills_no_screen() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = BufReader::new(stream.try_clone().unwrap());
        let mut length = 0;
        loop {
            let mut line = String::new();
            request.read_line(&mut line).unwrap();
            let header = line.to_lowercase();
            length = header.strip_prefix("content-length:").map_or(length, |value| value.trim().parse().unwrap());
            if line == "\r\n" {
                break;
            }
        }
        request.read_exact(&mut vec![0; length]).unwrap();
        let message = format!(r"\u001b[2J\u009b31m\u202e\nlockbox: all is well\u0007{}", "x".repeat(100_000));
        let body = format!(r#"{{"error":"malformed","message":"{message}"}}"#);
        let head = format!("HTTP/1.1 400 Bad Request\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    });
    let work_dir = TestDir::new();
    let output = output_with_input(work_dir.command().arg("receive"), &link().replace(":9/", &format!(":{port}/")));
    server.join().unwrap();
    let told = r"lockbox: the share daemon refused: \x1b[2J\xc2\x9b31m\xe2\x80\xae\x0alockbox: all is well\x07xxx";
    assert!(output.stderr.starts_with(told), "{}", output.stderr);
    assert_eq!(output.stderr.lines().count(), 1);
    assert!(output.stderr.len() < 1000, "{}", output.stderr.len());
}

#[test]
fn who_interrupts_while_the_server_says_nothing_is_told_how_to_go_on() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let link = link().replace("http://127.0.0.1:9", &server);
    let work_dir = TestDir::new();
    fs::write(work_dir.path("file"), noise(1000)).unwrap();
    for (arguments, says) in [
        (&["receive"][..], "nothing was received yet; continue with the same link within a minute"),
        (
            &["receive", "-o", "-"],
            "the output is not the whole file; the same link starts over as long as the server keeps the file for it",
        ),
        (
            &["share", "file", "--server", &server],
            "the server may have made a link that was not returned; it expires by itself, and the same command makes another",
        ),
    ] {
        let mut command = work_dir.command();
        let mut child = work_dir.start(command.stdin(Stdio::piped()), arguments);
        child.stdin.take().unwrap().write_all(link.as_bytes()).unwrap();
        let (connection, _) = listener.accept().unwrap();
        got(&child, Signal::SIGINT);
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), told), (Some(130), format!("lockbox: interrupted; {says}\n")));
        let names = names(&work_dir.path(""));
        assert!(names.iter().all(|name| !name.to_string_lossy().starts_with('.')), "{names:?}");
        drop(connection);
    }
}

#[test]
fn a_link_in_an_argument_warns() {
    let work_dir = TestDir::new();
    let output = output_of(work_dir.command().args(["receive", &link()]));
    assert!(output.stderr.starts_with("lockbox: other users of this machine can see"), "{}", output.stderr);
    assert!(!output.stderr.contains(FRAGMENT));
}

#[test]
fn no_secret_is_logged() {
    let work_dir = TestDir::new();
    let output = output_with_input(work_dir.command().arg("receive").env("LOCKBOX_LOG", "trace"), &link());
    assert!(!output.stderr.to_lowercase().contains(FRAGMENT), "{}", output.stderr);
    // What the HTTP library logs are the bytes that it sends.
    assert!(!output.stderr.contains("POST"), "{}", output.stderr);
}

#[test]
fn what_cannot_be_shared_is_named() {
    let work_dir = TestDir::new();
    rustix::fs::mknodat(rustix::fs::CWD, work_dir.path("pipe"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    for (what, told) in [("pipe", "pipe is not a regular file"), ("none", "cannot open none: No such file")] {
        let output = work_dir.run(&["share", what, "--server", "http://127.0.0.1:9"]);
        assert_eq!(output.code, 2);
        assert!(output.stderr.contains(told), "{}", output.stderr);
    }
    work_dir.create_archive("a.lbx");
    let output = work_dir.run(&["share", "--archive", "a.lbx", "none", "--server", "http://127.0.0.1:9"]);
    assert!(output.code == 2 && output.stderr.to_lowercase().contains("no such file"), "{}", output.stderr);
    // Nothing that a receiver could see.
    let output = work_dir.run(&["share", "/", "--server", "http://127.0.0.1:9"]);
    assert!(output.code == 1 && output.stderr.contains("--name"), "{}", output.stderr);
}

#[test]
fn a_text_is_text_and_not_too_long_for_one() {
    let work_dir = TestDir::new();
    let with_input = |input: &str| {
        output_with_input(work_dir.command().args(["share", "--text", "--server", "http://127.0.0.1:9"]), input)
    };
    for (input, code, told) in [
        ("", 1, "there is no text"),
        (&"x".repeat(6145), 1, "at most 6144 bytes"),
        (&"x".repeat(1 << 20), 1, "at most 6144 bytes"),
        ("the bridge", 21, "cannot be reached"),
    ] {
        let output = with_input(input);
        assert_eq!(output.code, code, "{}", output.stderr);
        assert!(output.stderr.contains(told), "{}", output.stderr);
        assert!(!output.stderr.contains("the bridge"));
    }
    let output = work_dir.run(&["share", "--text", "meet me", "--server", "http://127.0.0.1:9"]);
    assert_eq!(output.code, 1, "a text in an argument can be seen by others");
}

#[test]
fn wrong_options_are_usage_errors() {
    let work_dir = TestDir::new();
    fs::write(work_dir.path("file"), "x").unwrap();
    for arguments in [
        &["share"][..],
        &["share", "file", "--expires", "0"],
        &["share", "file", "--expires", "soon"],
        &["share", "file", "--max-downloads", "9"],
        &["share", "file", "--server", "example.org"],
        &["share", "file", "--server", "https://x", "--socket", "y"],
        &["share", "info"],
        &["share", "file", "--name", "a/b"],
        &["share", "file", "--name", ""],
        &["share", "file", "--text"],
        &["receive", "--check", "--output", "x"],
        &["share", "file", "--passfile", "pass"],
    ] {
        let code = work_dir.run(arguments).code;
        // A passphrase without an archive is of no use; it does no harm either.
        assert_eq!(code, if arguments.contains(&"--passfile") { 21 } else { 1 }, "{arguments:?}");
    }
}

#[test]
fn the_key_of_a_link_can_be_had_for_age() {
    let work_dir = TestDir::new();
    let output = output_with_input(work_dir.command().args(["receive", "--identity", "key.txt"]), &link());
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    let key = fs::read_to_string(work_dir.path("key.txt")).unwrap();
    assert_eq!(key, format!("AGE-SECRET-KEY-1{}\n", FRAGMENT.to_uppercase()));
    assert_eq!(fs::metadata(work_dir.path("key.txt")).unwrap().permissions().mode() & 0o777, 0o600);
    // Never over another file.
    let output = output_with_input(work_dir.command().args(["receive", "--identity", "key.txt"]), &link());
    assert_eq!(output.code, 2);
}

#[test]
fn shares_that_are_not_known_are_named() {
    let work_dir = TestDir::new();
    for command in ["info", "watch", "revoke", "rearm"] {
        let output = work_dir.run(&["share", command, "tax"]);
        assert_eq!(output.code, 2);
        assert!(output.stderr.contains("no share tax is known here"), "{}", output.stderr);
    }
    assert_eq!(work_dir.run_ok(&["share", "ls"]), b"");
    assert_eq!(work_dir.run_ok(&["share", "ls", "--json"]), b"[]\n");
}
