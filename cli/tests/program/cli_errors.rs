//! What goes wrong: a clear sentence, the right exit code, nothing lost.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use lockbox::storage::{FileStorage, LockMode};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::support::{PASSPHRASE, RunOutput, TestDir, names, noise, output_of, output_with_input};

/// Exit code and exact message.
#[track_caller]
fn fails(output: &RunOutput, code: i32, stderr: &str) {
    assert_eq!((output.code, output.stderr.as_str()), (code, format!("lockbox: {stderr}\n").as_str()));
}

#[test]
fn a_wrong_command_line_is_a_usage_error() {
    let work_dir = TestDir::new();
    for arguments in [&["frobnicate"][..], &[], &["ls"], &["create", "a.lbx", "--kdf-lanes", "17"]] {
        assert_eq!(work_dir.run(arguments).code, 1, "{arguments:?}");
    }
    assert_eq!(work_dir.run(&["--help"]).code, 0);
    assert_eq!(work_dir.run(&["--version"]).code, 0);
}

#[test]
fn a_weak_key_derivation_needs_a_word() {
    let work_dir = TestDir::new();
    for weak in [&["--kdf-memory", "63"][..], &["--kdf-passes", "2"]] {
        let output = work_dir.run(&[&["create", "a.lbx"], weak].concat());
        fails(&output, 1, "the key derivation is weaker than 64 MiB and 3 passes; --weak-kdf allows it for tests");
        assert!(!work_dir.path("a.lbx").exists());
    }
}

#[test]
fn an_existing_file_is_never_overwritten_by_create() {
    let work_dir = TestDir::new();
    fs::write(work_dir.path("a.lbx"), "precious").unwrap();
    let output = work_dir.run(&["create", "a.lbx", "--kdf-memory", "1", "--weak-kdf"]);
    fails(&output, 2, "a.lbx already exists and was not changed");
    assert_eq!(fs::read(work_dir.path("a.lbx")).unwrap(), b"precious");
}

#[test]
fn with_json_an_error_is_an_object_on_standard_error() {
    let work_dir = TestDir::new();
    let error = |arguments: &[&str]| {
        let output = work_dir.run(arguments);
        assert!(output.stdout.is_empty() && output.stderr.lines().count() == 1, "{output:?}");
        let object: serde_json::Value = serde_json::from_str(&output.stderr).unwrap();
        let error = object["error"].clone();
        assert_eq!(error["exit_code"], output.code);
        (
            error["kind"].as_str().unwrap().to_owned(),
            error["message"].as_str().unwrap().to_owned(),
            error["advice"].clone(),
        )
    };
    let (kind, message, advice) = error(&["ls", "--json", "a.lbx"]);
    assert_eq!((&*kind, &*message), ("no-archive", "cannot open a.lbx: No such file or directory"));
    assert!(advice.is_null());
    let (kind, message, advice) = error(&["ls", "--json", "a.lbx", "--recursively"]);
    assert!(kind == "usage" && message.starts_with("unexpected argument '--recursively'"), "{message}");
    assert!(advice.as_str().is_some_and(|advice| message.ends_with(advice)), "{message} {advice}");
    let (kind, message, advice) = error(&["ls", "--json", "--remote=allow-private,timeout=1s", "http://127.0.0.1:1/a"]);
    assert!(kind == "other" && message.contains("allow-http") && advice.is_null(), "{message} {advice}");
    work_dir.create_archive("a.lbx");
    let (kind, message, advice) = error(&["diff", "--json", "a.lbx", "none"]);
    assert_eq!((&*kind, &*message), ("no-source", "cannot read none: No such file or directory"));
    assert!(advice.is_null());
    let (kind, message, advice) = error(&["snapshot", "restore", "--json", "a.lbx", "none"]);
    assert!(kind == "other" && message.starts_with("the archive has no snapshot 'none'"), "{message}");
    assert_eq!(advice, "'lockbox snapshot ls' lists its snapshots");
    // Without the option it is a line for people, and an argument after -- is not the option.
    fails(&work_dir.run(&["ls", "b.lbx", "--", "--json"]), 19, "cannot open b.lbx: No such file or directory");
}

#[test]
fn a_missing_archive_is_named() {
    let work_dir = TestDir::new();
    for command in ["ls", "info", "check", "passwd"] {
        fails(&work_dir.run(&[command, "a.lbx"]), 19, "cannot open a.lbx: No such file or directory");
    }
}

#[test]
fn other_files_are_not_taken_for_archives() {
    let work_dir = TestDir::new();
    fs::write(work_dir.path("text"), "some text\n".repeat(1000)).unwrap();
    fs::write(work_dir.path("empty"), "").unwrap();
    fs::create_dir(work_dir.path("directory")).unwrap();
    for name in ["text", "empty", "directory"] {
        let output = work_dir.run(&["ls", name]);
        assert_eq!(output.code, 11);
        assert!(output.stderr.starts_with(&format!("lockbox: {name}: not a lockbox archive: ")), "{output:?}");
    }
    assert_eq!(fs::read(work_dir.path("text")).unwrap(), "some text\n".repeat(1000).as_bytes());
}

#[test]
fn a_wrong_password_changes_nothing() {
    let work_dir = TestDir::new();
    let archive = work_dir.create_archive("a.lbx");
    let before = fs::read(&archive).unwrap();
    work_dir.write_passfile("wrong", "incorrect horse");
    for arguments in
        [&["ls", "a.lbx"][..], &["add", "a.lbx", "pass"], &["extract", "a.lbx", "--to", "out"], &["check", "a.lbx"]]
    {
        let output = output_of(work_dir.command().args(arguments).args(["--passfile", "wrong"]));
        fails(&output, 10, "a.lbx: wrong passphrase or key");
    }
    // Whoever changes keys is told what else there is.
    let change = ["passwd", "a.lbx", "--new-passfile", "pass", "--kdf-memory", "1", "--weak-kdf"];
    let output = output_of(work_dir.command().args(change).args(["--passfile", "wrong"]));
    fails(&output, 10, "a.lbx: wrong passphrase or key (it opens with: passphrase)");
    assert!(fs::read(&archive).unwrap() == before);
    assert!(!work_dir.path("out").exists());
}

#[test]
fn a_truncated_archive_is_damaged_and_left_alone() {
    let work_dir = TestDir::new();
    let archive = work_dir.create_archive("a.lbx");
    let whole = fs::read(&archive).unwrap();
    for length in [1000, 135_168, 384 * 4096] {
        fs::write(&archive, &whole[..length]).unwrap();
        for arguments in [&["ls", "a.lbx"][..], &["add", "a.lbx", "pass"]] {
            fails(
                &work_dir.run(arguments),
                12,
                &format!("a.lbx: damaged archive: the file is truncated: bytes={length} least=1576960"),
            );
        }
        assert!(fs::read(&archive).unwrap() == whole[..length]);
    }
}

#[test]
fn an_unknown_version_is_named() {
    let work_dir = TestDir::new();
    let archive = work_dir.create_archive("a.lbx");
    let mut bytes = fs::read(&archive).unwrap();
    for copy in [0, 320 * 4096] {
        bytes[copy + 16] = 2;
    }
    fs::write(&archive, &bytes).unwrap();
    let output = work_dir.run(&["ls", "a.lbx"]);
    assert_eq!(output.code, 11);
    assert!(output.stderr.starts_with("lockbox: a.lbx: unsupported archive: "), "{output:?}");
    assert!(output.stderr.contains('2'), "{output:?}");
}

#[test]
fn a_damaged_header_copy_is_repaired_and_two_are_damage() {
    let work_dir = TestDir::new();
    let archive = work_dir.create_archive("a.lbx");
    let flip = |offsets: &[usize]| {
        let mut bytes = fs::read(&archive).unwrap();
        for &offset in offsets {
            bytes[offset] ^= 1;
        }
        fs::write(&archive, &bytes).unwrap();
    };
    let headers = || fs::read(&archive).unwrap()[..33 * 4096].to_vec();
    let whole = headers();
    flip(&[5000]);
    work_dir.run_ok(&["ls", "a.lbx"]);
    assert!(headers() != whole, "reading repairs nothing");
    assert_eq!(work_dir.run(&["add", "a.lbx", "pass"]).code, 0);
    assert!(headers() == whole, "writing does");
    flip(&[5000, 320 * 4096 + 5000]);
    let output = work_dir.run(&["ls", "a.lbx"]);
    assert_eq!(output.code, 12, "{output:?}");
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let work_dir = TestDir::new();
    let output = work_dir.run(&["create", "missing/a.lbx", "--kdf-memory", "1", "--weak-kdf"]);
    assert_eq!(output.code, 2);
    assert!(output.stderr.contains("missing/a.lbx: No such file or directory"), "{output:?}");
    // Root may write into any directory but this.
    let closed = if nix::unistd::geteuid().is_root() { "/proc/self".into() } else { work_dir.path("closed") };
    if !closed.exists() {
        fs::create_dir(&closed).unwrap();
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    }
    let archive = closed.join("a.lbx");
    let output = work_dir.run(&["create", archive.to_str().unwrap(), "--kdf-memory", "1", "--weak-kdf"]);
    assert_eq!(output.code, 2, "{output:?}");
    assert!(output.stderr.contains(archive.to_str().unwrap()), "{output:?}");
}

#[test]
fn an_archive_in_use_is_not_disturbed() {
    let work_dir = TestDir::new();
    let archive = work_dir.create_archive("a.lbx");
    let reading = FileStorage::open(&archive, LockMode::Shared).unwrap();
    work_dir.run_ok(&["ls", "a.lbx"]);
    for arguments in [&["add", "a.lbx", "pass"][..], &["passwd", "a.lbx"]] {
        let output = work_dir.run(arguments);
        assert_eq!(output.code, 13, "{output:?}");
        assert!(output.stderr.contains("in use"), "{output:?}");
    }
    drop(reading);
    // A program that another test starts may hold what it inherits of the reader until it runs: this lock waits for that.
    let writing = File::options().read(true).write(true).open(&archive).unwrap();
    let whole = libc::flock { l_type: libc::F_WRLCK as libc::c_short, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    fcntl(&writing, FcntlArg::F_OFD_SETLKW(&whole)).unwrap();
    for command in ["ls", "info", "check"] {
        assert_eq!(work_dir.run(&[command, "a.lbx"]).code, 13);
    }
}

#[test]
fn an_existing_target_is_left_and_no_stage_stays() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::write(work_dir.path("one"), "archived").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "one", "pass"]);
    fs::create_dir(work_dir.path("out")).unwrap();
    fs::write(work_dir.path("out/one"), "precious").unwrap();
    let output = work_dir.run(&["extract", "a.lbx", "--to", "out"]);
    fails(&output, 2, "one already exists in out; use --force to replace it");
    assert_eq!(names(&work_dir.path("out")), ["one"]);
    assert_eq!(fs::read(work_dir.path("out/one")).unwrap(), b"precious");
    work_dir.run_ok(&["extract", "a.lbx", "--to", "out", "--force"]);
    assert_eq!(names(&work_dir.path("out")), ["one", "pass"]);
    assert_eq!(fs::read(work_dir.path("out/one")).unwrap(), b"archived");
}

/// A limit on the file's size is a full disk to the archive.
#[test]
fn a_full_disk_loses_nothing_that_was_there() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::write(work_dir.path("one"), "kept").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "one"]);
    fs::write(work_dir.path("large"), noise(16 << 20)).unwrap();
    let mut shell = Command::new("sh");
    shell.current_dir(work_dir.path("")).env("LOCKBOX_PASSFILE", work_dir.path("pass"));
    // In units of 512 bytes: 6 MiB. The signal that goes with the limit is ignored.
    shell.args(["-c", "trap '' XFSZ; ulimit -f 12288; exec \"$0\" add a.lbx large", env!("CARGO_BIN_EXE_lockbox")]);
    let output = output_of(&mut shell);
    assert_eq!(output.code, 14, "{output:?}");
    assert!(output.stderr.contains("no space left"), "{output:?}");
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx"]), b"one\n");
    assert_eq!(work_dir.run_ok(&["cat", "a.lbx", "one"]), b"kept");
    work_dir.run_ok(&["check", "--full", "a.lbx"]);
}

#[test]
fn passphrases_come_from_every_source_but_the_command_line() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let ls = || {
        let mut command = work_dir.command();
        command.args(["ls", "a.lbx"]);
        command
    };
    assert_eq!(output_of(ls().args(["--passfile", "pass"])).code, 0);
    assert_eq!(output_of(ls().env("LOCKBOX_PASSCOMMAND", "cat pass")).code, 0);
    assert_eq!(output_with_input(&mut ls(), PASSPHRASE).code, 0);
    assert_eq!(output_with_input(&mut ls(), &format!("{PASSPHRASE}\n")).code, 0);
    assert_eq!(output_with_input(&mut ls(), &format!("{PASSPHRASE}\n\n")).code, 10);
    fails(
        &output_with_input(&mut ls(), "\n"),
        2,
        "standard input had no passphrase: use --passfile, LOCKBOX_PASSCOMMAND or a terminal",
    );
    fails(&output_of(ls().env("LOCKBOX_PASSCOMMAND", "exit 3")), 2, "LOCKBOX_PASSCOMMAND failed: exit status: 3");
    fs::set_permissions(work_dir.path("pass"), fs::Permissions::from_mode(0o644)).unwrap();
    fails(
        &output_of(ls().args(["--passfile", "pass"])),
        2,
        "pass may be read by others (mode 0644): protect it with 'chmod 600', or allow it with --passfile-any",
    );
    assert_eq!(output_of(ls().args(["--passfile", "pass", "--passfile-any"])).code, 0);
}

#[test]
fn a_changed_passphrase_opens_and_the_old_one_does_not() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    work_dir.run_ok(&["add", "a.lbx", "pass"]);
    work_dir.write_passfile("new", "battery staple");
    let cheap = ["--kdf-memory", "1", "--kdf-passes", "1", "--weak-kdf"];
    work_dir.run_ok(&[&["passwd", "a.lbx", "--new-passfile", "new"], &cheap[..]].concat());
    assert_eq!(work_dir.run(&["ls", "a.lbx"]).code, 10);
    let output = output_of(work_dir.command().args(["ls", "a.lbx", "--passfile", "new"]));
    assert_eq!((output.code, &output.stdout[..]), (0, &b"pass\n"[..]));
    // Both from standard input, one a line.
    let output = output_with_input(
        work_dir.command().args(["passwd", "a.lbx"]).args(cheap),
        &format!("battery staple\n{PASSPHRASE}\n"),
    );
    assert_eq!(output.code, 0, "{output:?}");
    assert_eq!(work_dir.run_ok(&["ls", "a.lbx"]), b"pass\n");
}

#[test]
fn nothing_mounted_is_not_unmounted() {
    let work_dir = TestDir::new();
    fs::create_dir(work_dir.path("directory")).unwrap();
    let output = work_dir.run(&["umount", "directory"]);
    assert_eq!(output.code, 2);
    assert_eq!(output.stderr, "lockbox: directory is not mounted\n");
}
