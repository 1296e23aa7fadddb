//! What people do wrong, and what they are told: the exit code and the whole sentence.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use crate::support::{TestDir, noise, output_of};

/// Of nothing: made for these tests.
const IDENTITY: &str = "AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33";
const RECIPIENT: &str = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p";
const SSH_PUBLIC: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIL7oTscC233vsH4tLjUojBJRqlt+UkA+UDVcM5ODw5MS somebody";
/// As its file begins; what is secret of it is not needed.
const SSH_PRIVATE: &str = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA";

/// The arguments, the exit code, and what is said on standard error.
const TABLE: &[(&[&str], i32, &str)] = &[
    // Private and public halves taken for each other.
    (
        &["key", "add", "a.lbx", "--recipient", IDENTITY],
        2,
        "this is an identity, which is secret: pass its recipient (age1...), which 'age-keygen -y' prints\n",
    ),
    (
        &["key", "add", "a.lbx", "--recipient", SSH_PRIVATE],
        2,
        "this is a private key, which is secret: pass its public key, usually the file of the same name with .pub\n",
    ),
    (
        &["key", "add", "a.lbx", "--recipient-file", "id"],
        2,
        "this is a private key, which is secret: pass its public key, usually the file of the same name with .pub\n",
    ),
    (
        &["ls", "a.lbx", "--identity", "id.pub"],
        2,
        "id.pub: it is a public key, which cannot decrypt: pass the private key\n",
    ),
    (
        &["ls", "a.lbx", "--identity", "recipient"],
        2,
        "recipient: it is a recipient, which cannot decrypt: pass the identity (AGE-SECRET-KEY-1...)\n",
    ),
    // Recipients that are none.
    (
        &["key", "add", "a.lbx", "--recipient", "age1foo"],
        2,
        "not an age recipient: its checksum is wrong; it was not copied completely or exactly\n",
    ),
    (
        &["key", "add", "a.lbx", "--recipient", "somebody"],
        2,
        "no age recipient: it begins with age1, or is an SSH public key (ssh-ed25519 or ssh-rsa)\n",
    ),
    (
        &["key", "add", "a.lbx", "--recipient", "id.pub"],
        1,
        "--recipient takes the recipient itself; --recipient-file reads it from id.pub\n",
    ),
    // Nothing where a passphrase should be.
    (&["ls", "a.lbx", "--passfile", "empty"], 2, "empty has no passphrase: it is empty\n"),
    (&["ls", "a.lbx", "--passcommand", "true"], 2, "the passcommand printed no passphrase\n"),
    (&["passwd", "a.lbx", "--new-passfile", "empty"], 2, "empty has no passphrase: it is empty\n"),
    (
        &["key", "ls", "a.lbx", "--passfile", "wrong"],
        10,
        "a.lbx: wrong passphrase or key (it opens with: SSH key, age recipient, passphrase)\n",
    ),
    // Labels.
    (
        &["key", "rm", "a.lbx", "phone"],
        2,
        "no key slot has the label phone: those with a label are usb stick, laptop\n",
    ),
    (&["key", "rm", "unlabelled.lbx", "phone"], 2, "no key slot has the label phone: none has a label\n"),
    // What is there already.
    (&["extract", "a.lbx", "--to", "out"], 2, "one already exists in out; use --force to replace it\n"),
    (&["create", "a.lbx"], 2, "a.lbx already exists and was not changed\n"),
    (&["header", "backup", "a.lbx", "out/one"], 2, "out/one already exists and was not changed: choose another name\n"),
    (
        &["key", "add", "a.lbx", "--new-keyfile", "out/one", "--generate"],
        2,
        "out/one already exists and was not changed: without --generate the existing file is added\n",
    ),
    (
        &["add", "a.lbx", "one"],
        2,
        "one: file exists; use --force to replace it\nlockbox: 1 object was not copied in full; see above\n",
    ),
    // Arguments that look as if they could be there.
    (&["share", "one", "two"], 1, "a link shares one item: share them one by one, or a directory with all of them\n"),
    (&["mount"], 1, "the following required arguments were not provided"),
    (&["ls", "out"], 11, "out: not a lockbox archive: it is a directory\n"),
    (&["receive", "somewhere"], 20, "this is not a one-time link: "),
    (&["snapshot", "ls", "out"], 2, "out is not the mount point of an archive\n"),
    (&["umount", "out"], 2, "out is not mounted\n"),
];

fn work_dir() -> TestDir {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    work_dir.create_archive("unlabelled.lbx");
    work_dir.write_passfile("empty", "");
    work_dir.write_passfile("wrong", "incorrect");
    work_dir.write_passfile("id", SSH_PRIVATE);
    // As ssh-keygen and people leave them: for everybody to read.
    for (name, content) in [("id.pub", SSH_PUBLIC), ("recipient", RECIPIENT), ("one", "1"), ("two", "2")] {
        fs::write(work_dir.path(name), format!("{content}\n")).unwrap();
        fs::set_permissions(work_dir.path(name), fs::Permissions::from_mode(0o644)).unwrap();
    }
    fs::create_dir(work_dir.path("out")).unwrap();
    fs::write(work_dir.path("out/one"), "precious").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "one"]);
    work_dir.run_ok(&["key", "add", "a.lbx", "--recipient", RECIPIENT, "--label", "usb stick"]);
    let labelled = work_dir.run(&["key", "add", "a.lbx", "--recipient-file", "id.pub", "--label", "laptop"]);
    assert_eq!(labelled.code, 0, "{labelled:?}");
    work_dir
}

#[test]
fn what_is_done_wrong_is_told_as_what_it_is() {
    let work_dir = work_dir();
    let told = || [&["ls", "-lR", "a.lbx"][..], &["key", "ls", "a.lbx"]].map(|command| work_dir.run_ok(command));
    let before = told();
    let mut wrong = Vec::new();
    for (arguments, code, said) in TABLE {
        let output = work_dir.run(arguments);
        let stderr = output.stderr.strip_prefix("lockbox: ").unwrap_or(&output.stderr);
        let fits = if said.ends_with('\n') { stderr == *said } else { stderr.contains(said) };
        if output.code != *code || !fits {
            wrong.push(format!("{arguments:?}\n  {code} {said}  {} {stderr}", output.code));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(told(), before, "none of it changed the archive");
    assert_eq!(fs::read(work_dir.path("out/one")).unwrap(), b"precious");
}

#[test]
fn no_secret_that_is_given_by_mistake_is_shown() {
    let work_dir = work_dir();
    for secret in [IDENTITY, &IDENTITY.to_lowercase(), SSH_PRIVATE] {
        for option in ["--recipient", "--recipient-file", "--identity"] {
            let output = work_dir.run(&["key", "add", "a.lbx", option, secret]);
            assert_ne!(output.code, 0);
            let middle = &secret[20..40];
            let shown = output.stderr.contains(middle);
            // The name of a file that cannot be read is shown.
            assert!(!shown || option != "--recipient", "{output:?}");
        }
    }
}

#[test]
fn keys_are_called_by_their_names() {
    let work_dir = work_dir();
    let listed = String::from_utf8(work_dir.run_ok(&["key", "ls", "a.lbx"])).unwrap();
    let kinds: Vec<&str> = listed.lines().map(|line| line[4..28].trim_end()).collect();
    assert_eq!(kinds, ["passphrase", "age recipient", "SSH key"]);
}

/// Whoever reads may stop when it has seen enough, as `head` does.
#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    // More than a pipe holds.
    fs::write(work_dir.path("lines"), "a line of it\n".repeat(100_000)).unwrap();
    fs::write(work_dir.path("noise"), noise(1 << 20)).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "lines", "noise"]);
    for arguments in [&["cat", "a.lbx", "lines"][..], &["export-tar", "a.lbx"], &["backup", "a.lbx", "-"]] {
        let mut command = work_dir.command();
        command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).args(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = Vec::new();
        BufReader::new(child.stdout.take().unwrap()).read_until(b'\n', &mut first).unwrap();
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        // As shells show a program that SIGPIPE ended.
        assert_eq!((child.wait().unwrap().code(), &*stderr), (Some(141), ""), "{arguments:?}");
    }
    // Nobody has read anything of what these say.
    for arguments in [&["ls", "a.lbx"][..], &["info", "a.lbx"], &["--help"], &["--version"], &["completions", "bash"]] {
        let mut command = work_dir.command();
        command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).args(arguments);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = output_of(command.stdout(writer).stderr(Stdio::piped()));
        assert_eq!((output.code, &*output.stderr), (141, ""), "{arguments:?}");
    }
}

#[test]
fn an_output_that_is_full_is_no_space_left() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::write(work_dir.path("one"), noise(1 << 20)).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "one"]);
    for arguments in [
        &["cat", "a.lbx", "one"][..],
        &["ls", "a.lbx"],
        &["info", "a.lbx", "--json"],
        &["check", "a.lbx"],
        &["export-tar", "a.lbx"],
        &["backup", "a.lbx", "-"],
        &["key", "ls", "a.lbx"],
        &["completions", "bash"],
        &["--help"],
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = work_dir.command();
        let output = output_of(
            command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).args(arguments).stdout(full).stderr(Stdio::piped()),
        );
        assert_eq!(output.code, 14, "{arguments:?} {output:?}");
        assert!(output.stderr.contains("No space left on device"), "{arguments:?} {output:?}");
    }
    // A limit on the size of files is a full disk.
    let limited = |arguments: &str| {
        let mut shell = Command::new("sh");
        shell.current_dir(work_dir.path("")).env("LOCKBOX_PASSFILE", work_dir.path("pass")).stdin(Stdio::null());
        shell.env("XDG_RUNTIME_DIR", work_dir.path("")).env("XDG_STATE_HOME", work_dir.path("state"));
        let script = format!("trap '' XFSZ; ulimit -f 64; exec \"$0\" {arguments}");
        output_of(shell.args(["-c", &script, env!("CARGO_BIN_EXE_lockbox")]))
    };
    for arguments in ["backup a.lbx b.lbx", "compact a.lbx", "header backup a.lbx a.hdr", "key rekey a.lbx"] {
        let output = limited(arguments);
        assert_eq!(output.code, 14, "{arguments} {output:?}");
        for made in ["b.lbx", "a.hdr"] {
            assert!(!work_dir.path(made).exists(), "{arguments} left {made}");
        }
    }
    // Also to what is copied out, where the rest goes on: a file system such as FAT has room for other files.
    fs::write(work_dir.path("small"), "small").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "small"]);
    for (arguments, there) in [
        ("extract a.lbx --to out", "out/small"),
        ("cp a.lbx:/one copy", ""),
        ("rescue a.lbx --to rescued", "rescued/small"),
        ("export-tar a.lbx >a.tar", ""),
        ("cat a.lbx one >copy", ""),
    ] {
        let output = limited(arguments);
        assert_eq!(output.code, 14, "{arguments} {output:?}");
        assert!(work_dir.path(there).exists(), "{arguments} {output:?}");
    }
    let output = {
        let mut shell = Command::new("sh");
        shell.current_dir(work_dir.path("")).env("LOCKBOX_PASSFILE", work_dir.path("pass"));
        output_of(shell.args([
            "-c",
            "trap '' XFSZ; ulimit -f 64; exec \"$0\" compact a.lbx",
            env!("CARGO_BIN_EXE_lockbox"),
        ]))
    };
    assert_eq!(
        output.stderr,
        "lockbox: no space left for the new file next to a.lbx; the archive is unchanged, and 'lockbox compact --dry-run' shows how much is needed\n"
    );
}
