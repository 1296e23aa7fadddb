//! What the commands say of another archive at a place where this user had one.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use serde_json::Value;

use crate::living_elsewhere::{CREATE, Home, homes};
use crate::support::{Ended, Place, end};

const OTHER: i32 = 16;

/// Of nothing: made for these tests.
const IDENTITY: &str = "AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33";
const RECIPIENT: &str = "age1t7rxyev2z3rw82stdlrrepyc39nvn86l5078zqkf5uasdy86jp6svpy7pa";

fn refused(ended: &Ended) -> bool {
    ended.code == OTHER && ended.out.is_empty() && ended.complaint.contains("--accept-other")
}

/// A user of another machine.
fn stranger(place: &Place) -> Command {
    let mut command = place.command();
    command.env("XDG_STATE_HOME", place.path("strangers")).env("LOCKBOX_PASSFILE", place.path("pass"));
    command
}

fn fingerprint(place: &Place, archive: &str) -> String {
    let ended = end(stranger(place).args(["info", "--json", archive]));
    let info: Value = serde_json::from_slice(&ended.out).unwrap();
    info["fingerprint"].as_str().unwrap().to_owned()
}

#[test]
fn two_archives_of_one_passphrase_cannot_be_exchanged() {
    let place = Place::new();
    place.secret("new", "another one");
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
    place.archive("a.lbx");
    place.archive("b.lbx");
    fs::write(place.path("file"), "one").unwrap();
    place.good(&["add", "a.lbx", "file"]);
    place.good(&["add", "b.lbx", "file"]);
    let (first, second) = (fs::read(place.path("a.lbx")).unwrap(), fs::read(place.path("b.lbx")).unwrap());
    fs::write(place.path("a.lbx"), &second).unwrap();
    fs::write(place.path("b.lbx"), &first).unwrap();
    for command in commands {
        let ended = place.run(command);
        assert!(refused(&ended), "{command:?}: {ended:?}");
        assert!(ended.complaint.contains("opened it before, at another place"), "{}", ended.complaint);
    }
    let kept = place.run(&["info", "--accept-older", "--accept-fork", "a.lbx"]);
    assert!(refused(&kept), "no other option accepts it: {kept:?}");
    assert!(fs::read(place.path("a.lbx")).unwrap() == second && !place.path("copy.lbx").exists());
    // Put back, all is as it was.
    fs::write(place.path("a.lbx"), &first).unwrap();
    fs::write(place.path("b.lbx"), &second).unwrap();
    place.good(&["ls", "a.lbx"]);
    place.good(&["ls", "b.lbx"]);
    for (number, command) in commands.iter().enumerate() {
        let name = format!("{number}.lbx");
        let command: Vec<&str> = command.iter().map(|word| if *word == "a.lbx" { &name } else { *word }).collect();
        fs::write(place.path(&name), &first).unwrap();
        place.good(&["ls", &name]);
        fs::write(place.path(&name), &second).unwrap();
        // Commands before this one have seen newer commits of the second archive.
        let accept = ["--accept-other", "--accept-older", "--accept-fork"];
        let accepted = place.run(&[&command[..], &accept].concat());
        assert_eq!(accepted.code, 0, "{command:?}: {}", accepted.complaint);
        let _ = fs::remove_dir_all(place.path("out"));
        let _ = fs::remove_file(place.path("copy.lbx"));
    }
}

/// What `create` made for the storage, with nothing but the user's public key.
#[test]
fn an_archive_made_with_the_public_key_alone_is_refused_in_place_of_the_known_one() {
    let place = Place::new();
    place.secret("id", IDENTITY);
    place.archive("a.lbx");
    place.good(&["key", "add", "a.lbx", "--recipient", RECIPIENT]);
    fs::write(place.path("diary"), "one").unwrap();
    let mine = |words: &[&str]| end(place.command().args(words).arg("--identity=id"));
    assert_eq!(mine(&["add", "a.lbx", "diary"]).code, 0);
    // The attacker, whose archive has the id of the user's as well.
    place.secret("evil pass", "evil");
    let attacker = |words: &[&str]| {
        let ended = end(stranger(&place).env("LOCKBOX_PASSFILE", place.path("evil pass")).args(words));
        assert_eq!(ended.code, 0, "{words:?}: {}", ended.complaint);
    };
    attacker(&[&["create", "evil.lbx"][..], &CREATE].concat());
    attacker(&["key", "add", "evil.lbx", "--recipient", RECIPIENT]);
    let known = fs::read(place.path("a.lbx")).unwrap();
    fs::copy(place.path("evil.lbx"), place.path("a.lbx")).unwrap();
    fs::write(place.path("secret"), "a secret").unwrap();
    for words in
        [&["ls", "a.lbx"][..], &["add", "a.lbx", "secret"], &["check", "--full", "a.lbx"], &["key", "ls", "a.lbx"]]
    {
        let ended = mine(words);
        assert!(refused(&ended) && ended.complaint.contains("a public key is enough"), "{words:?}: {ended:?}");
    }
    attacker(&["extract", "evil.lbx", "--to", "nothing"]);
    assert!(!place.path("nothing/secret").exists());
    fs::write(place.path("a.lbx"), known).unwrap();
    assert_eq!(mine(&["ls", "a.lbx"]).out, b"diary\n");
}

#[test]
fn the_first_use_by_a_recipient_is_told_once_with_what_can_be_compared() {
    let place = Place::new();
    place.secret("id", IDENTITY);
    place.archive("a.lbx");
    place.good(&["key", "add", "a.lbx", "--recipient", RECIPIENT]);
    let print = fingerprint(&place, "a.lbx");
    let first = |state: &str, words: &[&str]| {
        end(place.command().env("XDG_STATE_HOME", place.path(state)).args(words).arg("--identity=id"))
    };
    for (state, words) in [
        ("one", &["ls", "a.lbx"][..]),
        ("two", &["key", "ls", "a.lbx"]),
        ("three", &["add", "a.lbx", "pass", "--force"]),
    ] {
        let told = first(state, words);
        assert!(told.code == 0 && told.complaint.contains("first use") && told.complaint.contains(&print), "{told:?}");
        assert_eq!(told.complaint.lines().count(), 1, "{}", told.complaint);
        assert_eq!(first(state, words).complaint, "", "{words:?}");
        // `key ls` opens no archive, and remembers its place alone.
        if words[0] != "key" {
            fs::copy(place.path("a.lbx"), place.path("copy.lbx")).unwrap();
            assert_eq!(first(state, &["ls", "copy.lbx"]).complaint, "", "it is the same one at another place");
        }
    }
    // Who made it, and whose passphrase opens it, has nothing to compare.
    assert_eq!(first("state", &["ls", "a.lbx"]).complaint, "");
    let by_passphrase =
        end(place.command().env("XDG_STATE_HOME", place.path("four")).args(["ls", "a.lbx", "--passfile=pass"]));
    assert_eq!((by_passphrase.code, by_passphrase.complaint.as_str()), (0, ""));
    // Without a place for a memory nothing is told, each time.
    let mut homeless = place.command();
    homeless.env_remove("XDG_STATE_HOME").env_remove("HOME").args(["ls", "a.lbx", "--identity=id"]);
    if !nix::unistd::geteuid().is_root() {
        assert_eq!(end(&mut homeless).complaint, "");
    }
}

#[test]
fn what_the_users_own_commands_put_there_is_known() {
    let place = Place::new();
    let make = |name: &str| place.good(&[&["create", name][..], &CREATE].concat());
    make("a.lbx");
    place.good(&["add", "a.lbx", "pass"]);
    // Made anew under the name.
    fs::rename(place.path("a.lbx"), place.path("old.lbx")).unwrap();
    make("a.lbx");
    place.good(&["ls", "a.lbx"]);
    place.good(&["ls", "old.lbx"]);
    place.good(&["compact", "a.lbx"]);
    place.good(&["key", "rekey", "a.lbx"]);
    place.good(&["ls", "a.lbx"]);
    // A backup under a name that another archive had.
    make("b.lbx");
    fs::remove_file(place.path("b.lbx")).unwrap();
    place.good(&["backup", "old.lbx", "b.lbx"]);
    assert_eq!(place.run(&["ls", "b.lbx"]).code, 0);
    // The name alone is not enough: this was done by other means.
    fs::rename(place.path("old.lbx"), place.path("a.lbx")).unwrap();
    assert!(refused(&place.run(&["ls", "a.lbx"])));
    assert_eq!(place.run(&["ls", "a.lbx", "--accept-other"]).code, 0);
    place.good(&["ls", "a.lbx"]);
}

#[test]
fn a_key_that_was_renewed_by_another_user_is_known_and_the_archive_from_before_is_older() {
    let place = Place::new();
    place.archive("a.lbx");
    place.good(&["add", "a.lbx", "pass"]);
    let before = fs::read(place.path("a.lbx")).unwrap();
    assert_eq!(end(stranger(&place).args(["key", "rekey", "a.lbx"])).code, 0);
    place.good(&["ls", "a.lbx"]);
    place.good(&["add", "a.lbx", "pass", "--force"]);
    fs::write(place.path("a.lbx"), &before).unwrap();
    assert!(refused(&place.run(&["ls", "a.lbx"])));
    // Who renewed it remembers that as well.
    let older = end(stranger(&place).args(["ls", "a.lbx"]));
    assert!(older.code == OTHER && older.complaint.contains("--accept-older"), "{older:?}");
    assert_eq!(end(stranger(&place).args(["ls", "a.lbx", "--accept-older"])).code, 0);
}

#[test]
fn a_link_to_another_archive_is_refused() {
    let place = Place::new();
    fs::create_dir(place.path("storage")).unwrap();
    place.archive("storage/a.lbx");
    place.archive("storage/b.lbx");
    symlink("storage", place.path("alias")).unwrap();
    place.good(&["ls", "alias/a.lbx"]);
    fs::rename(place.path("storage/a.lbx"), place.path("storage/hidden")).unwrap();
    symlink("b.lbx", place.path("storage/a.lbx")).unwrap();
    for name in ["storage/a.lbx", "alias/a.lbx", "./alias/../storage/a.lbx"] {
        assert!(refused(&place.run(&["ls", name])), "{name}");
    }
    place.good(&["ls", "storage/b.lbx"]);
    // A name that was never used, through the links of the storage.
    symlink("storage", place.path("another alias")).unwrap();
    assert!(refused(&place.run(&["ls", "another alias/a.lbx"])));
}

#[test]
fn what_is_at_an_address_cannot_be_exchanged() {
    for home in homes() {
        let (place, address) = (&home.place, home.address.as_str());
        let other = format!("{address}-other");
        home.create();
        home.good(&[&["create", &other][..], &CREATE].concat());
        home.good(&["add", address, "pass"]);
        exchange(&home);
        for words in
            [&["ls", address][..], &["add", address, "pass", "--force"], &["key", "ls", address], &["check", address]]
        {
            let ended = home.run(words);
            assert!(refused(&ended), "{words:?}: {ended:?}");
        }
        assert_eq!(home.run(&["ls", address, "--accept-other"]).code, 0);
        home.good(&["ls", address]);
        assert!(refused(&home.run(&["ls", &other])));
        exchange(&home);
        home.good(&["ls", &other]);
        // The user removed it, and makes another one.
        assert!(refused(&home.run(&["ls", address])));
        remove(&home);
        let _ = fs::remove_dir_all(place.path("cache"));
        home.create();
        home.good(&["ls", address]);
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
    let _ = fs::remove_dir_all(home.place.path("cache"));
}

fn remove(home: &Home) {
    match home.address.strip_prefix("file://") {
        Some(directory) => fs::remove_dir_all(directory).unwrap(),
        None => home.store.objects.lock().unwrap().retain(|name, _| !name.starts_with("some/name/")),
    }
}
