//! Names the commit for `--version`: of the checkout, or of LOCKBOX_COMMIT where the sources have none.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=LOCKBOX_COMMIT");
    let build = match env::var("PROFILE").as_deref() {
        Ok("release") => commit(),
        // A development build would be compiled again after each commit.
        _ => "development build".to_owned(),
    };
    println!("cargo:rustc-env=LOCKBOX_BUILD={build}");
}

fn commit() -> String {
    if let Ok(commit) = env::var("LOCKBOX_COMMIT") {
        return format!("commit {commit}");
    }
    for file in ["HEAD", "logs/HEAD"] {
        let path = Path::new("../.git").join(file);
        if path.exists() {
            println!("cargo:rerun-if-changed={}", path.display());
        }
    }
    let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    let commit = output.ok().filter(|output| output.status.success());
    let commit = commit.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    commit.map_or("unknown commit".to_owned(), |commit| format!("commit {commit}"))
}
