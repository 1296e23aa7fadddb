//! Scripts that the packages run when they are removed: commits that no store has yet are never removed with them.

#![allow(clippy::unwrap_used)] // a failed step fails the test

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

const FORGOTTEN: &str = "7f3a.seen";

/// Script of the Debian package.
fn postrm() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/debian/postrm")).unwrap()
}

/// Script of the RPM package, the last part of its description.
fn post_uninstall() -> String {
    let spec = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/rpm/lockbox.spec")).unwrap();
    let (_, script) = spec.split_once("\n%postun\n").expect("the script");
    assert!(!script.contains('%') && !script.contains('\\'), "rpm would change it");
    script.to_owned()
}

/// Root directory of a system on which archives were used.
fn system() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for directory in ["run", "usr/sbin", "var/lib/lockbox/unsent", "var/lib/lockbox-share/shares"] {
        fs::create_dir_all(root.path().join(directory)).unwrap();
    }
    fs::write(state(&root).join(FORGOTTEN), b"remembered").unwrap();
    root
}

fn state(root: &TempDir) -> std::path::PathBuf {
    root.path().join("var/lib/lockbox")
}

/// Runs a script with `argument` on the system below `root`; returns the text on standard error.
fn run(script: &str, argument: &str, root: &TempDir) -> String {
    let below = |text: String, name: &str| text.replace(name, &format!("{}{name}", root.path().display()));
    let script = ["/var/lib/", "/usr/sbin/", "/run/"].into_iter().fold(script.to_owned(), below);
    let output = Command::new("sh").args(["-c", &script, "script", argument]).output().unwrap();
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn removing_a_package_keeps_commits_that_no_store_has() {
    for (script, argument, forgets) in
        [(postrm(), "purge", true), (postrm(), "remove", false), (post_uninstall(), "0", false)]
    {
        for name in ["0a.unsent", "0a-99.refused"] {
            let root = system();
            let commit = state(&root).join("unsent").join(name);
            fs::write(&commit, b"commit").unwrap();
            let said = run(&script, argument, &root);
            assert_eq!(fs::read(&commit).unwrap(), b"commit", "{argument} {name}");
            assert_eq!(state(&root).join(FORGOTTEN).exists(), !forgets, "{argument}");
            let is_told =
                said.contains(state(&root).join("unsent").to_str().unwrap()) && said.contains("remote collect");
            assert_eq!(is_told, argument != "remove", "{said}");
        }
    }
}

#[test]
fn purging_without_such_commits_leaves_nothing() {
    let root = system();
    File::create(state(&root).join("unsent/0a.unsent")).unwrap();
    assert_eq!(run(&postrm(), "purge", &root), "");
    assert!(!state(&root).exists() && !root.path().join("var/lib/lockbox-share").exists());
    assert_eq!(run(&postrm(), "purge", &root), "", "there is nothing");
}

/// The daemon of a mount goes on after its program was removed, and keeps there what its store does not take.
#[test]
fn purging_keeps_the_file_of_a_daemon_that_runs() {
    let root = system();
    let path = state(&root).join("unsent/0a.unsent");
    let held = File::create(&path).unwrap();
    held.lock().unwrap();
    assert!(run(&postrm(), "purge", &root).contains("unsent"));
    assert!(path.exists());
}
