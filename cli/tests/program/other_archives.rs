//! What the commands say of another archive at a place where this user had one.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use serde_json::Value;

use crate::living_elsewhere::{CREATE, Home, homes};
use crate::support::{RunOutput, TestDir, output_of};

const OTHER: i32 = 16;

/// Of nothing: made for these tests.
const IDENTITY: &str = "AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33";
const RECIPIENT: &str = "age1t7rxyev2z3rw82stdlrrepyc39nvn86l5078zqkf5uasdy86jp6svpy7pa";

fn refused(output: &RunOutput) -> bool {
    output.code == OTHER && output.stdout.is_empty() && output.stderr.contains("--accept-other")
}

/// A user of another machine.
fn stranger(work_dir: &TestDir) -> Command {
    let mut command = work_dir.command();
    command.env("XDG_STATE_HOME", work_dir.path("strangers")).env("LOCKBOX_PASSFILE", work_dir.path("pass"));
    command
}

fn fingerprint(work_dir: &TestDir, archive: &str) -> String {
    let output = output_of(stranger(work_dir).args(["info", "--json", archive]));
    let info: Value = serde_json::from_slice(&output.stdout).unwrap();
    info["fingerprint"].as_str().unwrap().to_owned()
}

#[test]
fn two_archives_of_one_passphrase_cannot_be_exchanged() {
    let work_dir = TestDir::new();
    work_dir.write_passfile("new", "another one");
    let kdf = ["--kdf-memory=1", "--kdf-passes=1", "--weak-kdf"];
    let commands: &[&[&str]] = &[
        &["ls", "a.lbx"],
        &["info", "a.lbx"],
        &["cat", "a.lbx", "file"],
        &["add", "a.lbx", "pass"],
        &["check", "--full", "a.lbx"],
        &["check", "--repair-header", "a.lbx"],
        &["extract", "a.lbx", "--to", "out"],
        &["rescue", "a.lbx", "--to", "saved"],
        &["backup", "a.lbx", "copy.lbx"],
        &["compact", "a.lbx"],
        &["purge", "a.lbx"],
        &["snapshot", "ls", "a.lbx"],
        &["key", "ls", "a.lbx"],
        &["key", "test", "a.lbx"],
        &["key", "rekey", "a.lbx"],
        &["passwd", "a.lbx", "--new-passfile", "new", kdf[0], kdf[1], kdf[2]],
    ];
    work_dir.create_archive("a.lbx");
    work_dir.create_archive("b.lbx");
    fs::write(work_dir.path("file"), "one").unwrap();
    work_dir.run_ok(&["add", "a.lbx", "file"]);
    work_dir.run_ok(&["add", "b.lbx", "file"]);
    let (first, second) = (fs::read(work_dir.path("a.lbx")).unwrap(), fs::read(work_dir.path("b.lbx")).unwrap());
    fs::write(work_dir.path("a.lbx"), &second).unwrap();
    fs::write(work_dir.path("b.lbx"), &first).unwrap();
    for command in commands {
        let output = work_dir.run(command);
        assert!(refused(&output), "{command:?}: {output:?}");
        assert!(output.stderr.contains("opened it before, at another place"), "{}", output.stderr);
    }
    let kept = work_dir.run(&["info", "--accept-older", "--accept-fork", "a.lbx"]);
    assert!(refused(&kept), "no other option accepts it: {kept:?}");
    assert!(fs::read(work_dir.path("a.lbx")).unwrap() == second && !work_dir.path("copy.lbx").exists());
    // Put back, all is as it was.
    fs::write(work_dir.path("a.lbx"), &first).unwrap();
    fs::write(work_dir.path("b.lbx"), &second).unwrap();
    work_dir.run_ok(&["ls", "a.lbx"]);
    work_dir.run_ok(&["ls", "b.lbx"]);
    for (number, command) in commands.iter().enumerate() {
        let name = format!("{number}.lbx");
        let command: Vec<&str> = command.iter().map(|word| if *word == "a.lbx" { &name } else { *word }).collect();
        fs::write(work_dir.path(&name), &first).unwrap();
        work_dir.run_ok(&["ls", &name]);
        fs::write(work_dir.path(&name), &second).unwrap();
        // Commands before this one have seen newer commits of the second archive.
        let accept = ["--accept-other", "--accept-older", "--accept-fork"];
        let accepted = work_dir.run(&[&command[..], &accept].concat());
        assert_eq!(accepted.code, 0, "{command:?}: {}", accepted.stderr);
        let _ = fs::remove_dir_all(work_dir.path("out"));
        let _ = fs::remove_file(work_dir.path("copy.lbx"));
    }
}

/// What `create` made for the storage, with nothing but the user's public key.
#[test]
fn an_archive_made_with_the_public_key_alone_is_refused_in_place_of_the_known_one() {
    let work_dir = TestDir::new();
    work_dir.write_passfile("id", IDENTITY);
    work_dir.create_archive("a.lbx");
    work_dir.run_ok(&["key", "add", "a.lbx", "--recipient", RECIPIENT]);
    fs::write(work_dir.path("diary"), "one").unwrap();
    let mine = |words: &[&str]| output_of(work_dir.command().args(words).arg("--identity=id"));
    assert_eq!(mine(&["add", "a.lbx", "diary"]).code, 0);
    // The attacker, whose archive has the id of the user's as well.
    work_dir.write_passfile("evil pass", "evil");
    let attacker = |words: &[&str]| {
        let output = output_of(stranger(&work_dir).env("LOCKBOX_PASSFILE", work_dir.path("evil pass")).args(words));
        assert_eq!(output.code, 0, "{words:?}: {}", output.stderr);
    };
    attacker(&[&["create", "evil.lbx"][..], &CREATE].concat());
    attacker(&["key", "add", "evil.lbx", "--recipient", RECIPIENT]);
    let known = fs::read(work_dir.path("a.lbx")).unwrap();
    fs::copy(work_dir.path("evil.lbx"), work_dir.path("a.lbx")).unwrap();
    fs::write(work_dir.path("secret"), "a secret").unwrap();
    for words in
        [&["ls", "a.lbx"][..], &["add", "a.lbx", "secret"], &["check", "--full", "a.lbx"], &["key", "ls", "a.lbx"]]
    {
        let output = mine(words);
        assert!(refused(&output) && output.stderr.contains("a public key is enough"), "{words:?}: {output:?}");
    }
    attacker(&["extract", "evil.lbx", "--to", "nothing"]);
    assert!(!work_dir.path("nothing/secret").exists());
    fs::write(work_dir.path("a.lbx"), known).unwrap();
    assert_eq!(mine(&["ls", "a.lbx"]).stdout, b"diary\n");
}

#[test]
fn the_first_use_by_a_recipient_is_told_once_with_what_can_be_compared() {
    let work_dir = TestDir::new();
    work_dir.write_passfile("id", IDENTITY);
    work_dir.create_archive("a.lbx");
    work_dir.run_ok(&["key", "add", "a.lbx", "--recipient", RECIPIENT]);
    let print = fingerprint(&work_dir, "a.lbx");
    let first = |state: &str, words: &[&str]| {
        output_of(work_dir.command().env("XDG_STATE_HOME", work_dir.path(state)).args(words).arg("--identity=id"))
    };
    for (state, words) in [
        ("one", &["ls", "a.lbx"][..]),
        ("two", &["key", "ls", "a.lbx"]),
        ("three", &["add", "a.lbx", "pass", "--force"]),
    ] {
        let told = first(state, words);
        assert!(told.code == 0 && told.stderr.contains("first use") && told.stderr.contains(&print), "{told:?}");
        assert_eq!(told.stderr.lines().count(), 1, "{}", told.stderr);
        assert_eq!(first(state, words).stderr, "", "{words:?}");
        // `key ls` opens no archive, and remembers its place alone.
        if words[0] != "key" {
            fs::copy(work_dir.path("a.lbx"), work_dir.path("copy.lbx")).unwrap();
            assert_eq!(first(state, &["ls", "copy.lbx"]).stderr, "", "it is the same one at another place");
        }
    }
    // Who made it, and whose passphrase opens it, has nothing to compare.
    assert_eq!(first("state", &["ls", "a.lbx"]).stderr, "");
    let by_passphrase = output_of(work_dir.command().env("XDG_STATE_HOME", work_dir.path("four")).args([
        "ls",
        "a.lbx",
        "--passfile=pass",
    ]));
    assert_eq!((by_passphrase.code, by_passphrase.stderr.as_str()), (0, ""));
    // Without a place for a memory nothing is told, each time.
    let mut homeless = work_dir.command();
    homeless.env_remove("XDG_STATE_HOME").env_remove("HOME").args(["ls", "a.lbx", "--identity=id"]);
    if !nix::unistd::geteuid().is_root() {
        assert_eq!(output_of(&mut homeless).stderr, "");
    }
}

#[test]
fn what_the_users_own_commands_put_there_is_known() {
    let work_dir = TestDir::new();
    let make = |name: &str| work_dir.run_ok(&[&["create", name][..], &CREATE].concat());
    make("a.lbx");
    work_dir.run_ok(&["add", "a.lbx", "pass"]);
    // Made anew under the name.
    fs::rename(work_dir.path("a.lbx"), work_dir.path("old.lbx")).unwrap();
    make("a.lbx");
    work_dir.run_ok(&["ls", "a.lbx"]);
    work_dir.run_ok(&["ls", "old.lbx"]);
    work_dir.run_ok(&["compact", "a.lbx"]);
    work_dir.run_ok(&["key", "rekey", "a.lbx"]);
    work_dir.run_ok(&["ls", "a.lbx"]);
    // A backup under a name that another archive had.
    make("b.lbx");
    fs::remove_file(work_dir.path("b.lbx")).unwrap();
    work_dir.run_ok(&["backup", "old.lbx", "b.lbx"]);
    assert_eq!(work_dir.run(&["ls", "b.lbx"]).code, 0);
    // The name alone is not enough: this was done by other means.
    fs::rename(work_dir.path("old.lbx"), work_dir.path("a.lbx")).unwrap();
    assert!(refused(&work_dir.run(&["ls", "a.lbx"])));
    assert_eq!(work_dir.run(&["ls", "a.lbx", "--accept-other"]).code, 0);
    work_dir.run_ok(&["ls", "a.lbx"]);
}

#[test]
fn a_key_that_was_renewed_by_another_user_is_known_and_the_archive_from_before_is_older() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    work_dir.run_ok(&["add", "a.lbx", "pass"]);
    let before = fs::read(work_dir.path("a.lbx")).unwrap();
    assert_eq!(output_of(stranger(&work_dir).args(["key", "rekey", "a.lbx"])).code, 0);
    work_dir.run_ok(&["ls", "a.lbx"]);
    work_dir.run_ok(&["add", "a.lbx", "pass", "--force"]);
    fs::write(work_dir.path("a.lbx"), &before).unwrap();
    assert!(refused(&work_dir.run(&["ls", "a.lbx"])));
    // Who renewed it remembers that as well.
    let older = output_of(stranger(&work_dir).args(["ls", "a.lbx"]));
    assert!(older.code == OTHER && older.stderr.contains("--accept-older"), "{older:?}");
    assert_eq!(output_of(stranger(&work_dir).args(["ls", "a.lbx", "--accept-older"])).code, 0);
}

#[test]
fn a_link_to_another_archive_is_refused() {
    let work_dir = TestDir::new();
    fs::create_dir(work_dir.path("storage")).unwrap();
    work_dir.create_archive("storage/a.lbx");
    work_dir.create_archive("storage/b.lbx");
    symlink("storage", work_dir.path("alias")).unwrap();
    work_dir.run_ok(&["ls", "alias/a.lbx"]);
    fs::rename(work_dir.path("storage/a.lbx"), work_dir.path("storage/hidden")).unwrap();
    symlink("b.lbx", work_dir.path("storage/a.lbx")).unwrap();
    for name in ["storage/a.lbx", "alias/a.lbx", "./alias/../storage/a.lbx"] {
        assert!(refused(&work_dir.run(&["ls", name])), "{name}");
    }
    work_dir.run_ok(&["ls", "storage/b.lbx"]);
    // A name that was never used, through the links of the storage.
    symlink("storage", work_dir.path("another alias")).unwrap();
    assert!(refused(&work_dir.run(&["ls", "another alias/a.lbx"])));
}

#[test]
fn what_is_at_an_address_cannot_be_exchanged() {
    for home in homes() {
        let (work_dir, address) = (&home.work_dir, home.address.as_str());
        let other = format!("{address}-other");
        home.create();
        home.run_ok(&[&["create", &other][..], &CREATE].concat());
        home.run_ok(&["add", address, "pass"]);
        exchange(&home);
        for words in
            [&["ls", address][..], &["add", address, "pass", "--force"], &["key", "ls", address], &["check", address]]
        {
            let output = home.run(words);
            assert!(refused(&output), "{words:?}: {output:?}");
        }
        assert_eq!(home.run(&["ls", address, "--accept-other"]).code, 0);
        home.run_ok(&["ls", address]);
        assert!(refused(&home.run(&["ls", &other])));
        exchange(&home);
        home.run_ok(&["ls", &other]);
        // The user removed it, and makes another one.
        assert!(refused(&home.run(&["ls", address])));
        remove(&home);
        let _ = fs::remove_dir_all(work_dir.path("cache"));
        home.create();
        home.run_ok(&["ls", address]);
    }
}

/// The store gives each of two archives the other's address.
fn exchange(home: &Home) {
    match home.address.strip_prefix("file://") {
        Some(directory) => {
            let other = format!("{directory}-other");
            let aside = format!("{directory}-aside");
            fs::rename(directory, &aside).unwrap();
            fs::rename(&other, directory).unwrap();
            fs::rename(&aside, &other).unwrap();
        }
        None => {
            let mut objects = home.store.objects.lock().unwrap();
            let renamed = std::mem::take(&mut *objects).into_iter().map(|(name, bytes)| {
                let name = match name.strip_prefix("some/name-other/") {
                    Some(rest) => format!("some/name/{rest}"),
                    None => name.replacen("some/name/", "some/name-other/", 1),
                };
                (name, bytes)
            });
            *objects = renamed.collect();
        }
    }
    let _ = fs::remove_dir_all(home.work_dir.path("cache"));
}

fn remove(home: &Home) {
    match home.address.strip_prefix("file://") {
        Some(directory) => fs::remove_dir_all(directory).unwrap(),
        None => home.store.objects.lock().unwrap().retain(|name, _| !name.starts_with("some/name/")),
    }
}
