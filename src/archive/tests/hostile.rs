//! Archives that are authentic and say what no writer would: each is refused or read as far as it makes sense, within bounds of memory and
//! processor time, and nothing is written outside of where it was asked for.

mod cases;

use std::fs;
use std::process::Command;

use nix::sys::resource::{Resource, UsageWho, getrusage, setrlimit};
use nix::sys::time::TimeValLike;

use super::super::fuzzing::{ARCHIVE, Forge, exercise, key};
use super::super::{Archive, ExtractOptions, Filter, OpenOptions, RescueOptions, UnlockedKey};
use cases::{Case, cases};

/// Address space beyond what the test's process has when it begins.
const MEMORY: u64 = 256 << 20;

fn kib(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// What the cases are compared with: nothing is wrong with an archive that was only taken apart and put together.
#[test]
fn an_archive_that_was_put_together_again_is_sound() {
    assert_eq!(exercise(&Forge::new().finish(), false), 0);
    let mut deep = Forge::new();
    deep.leaf_bytes = 400;
    assert_eq!(exercise(&deep.finish(), false), 0);
}

/// In a process of its own, whose limits end it when a case is not bounded.
#[test]
fn hostile_archives_are_refused_within_bounds() {
    let test = "archive::tests::hostile::every_case_within_bounds";
    let program = std::env::current_exe().unwrap();
    let output =
        Command::new(program).args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(told.contains("1 passed"), "{told}");
    println!("summary: {}", told.split("summary: ").nth(1).and_then(|rest| rest.lines().next()).unwrap());
}

#[test]
#[ignore = "run by hostile_archives_are_refused_within_bounds, with its limits"]
fn every_case_within_bounds() {
    let all = cases();
    let count = all.len();
    assert!(count >= 100, "only {count} cases");
    let directory = tempfile::tempdir().unwrap();
    let room = kib("VmSize:") * 1024 + MEMORY;
    setrlimit(Resource::RLIMIT_AS, room, room).unwrap();
    let mut wrong = Vec::new();
    for Case { name, refused, bytes } in all {
        // The soft limit ends whatever spins; each case gets its seconds anew.
        let spent = getrusage(UsageWho::RUSAGE_SELF).unwrap().user_time().num_seconds() as u64;
        setrlimit(Resource::RLIMIT_CPU, spent + 30, nix::libc::RLIM_INFINITY).unwrap();
        println!("case {name}");
        let tried = std::panic::catch_unwind(|| {
            let refusals = exercise(&bytes, false);
            on_the_host(directory.path(), &bytes);
            refusals
        });
        match tried {
            Ok(0) if refused => wrong.push(format!("nobody noticed: {name}")),
            Ok(_) => {}
            Err(_) => wrong.push(format!("panicked: {name}")),
        }
    }
    println!("summary: {count} archives");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Extracts and rescues into directories of a directory that has nothing else.
fn on_the_host(directory: &std::path::Path, bytes: &[u8]) {
    let own = directory.join("own");
    // Left by a case that panicked.
    let _ = fs::remove_dir_all(&own);
    fs::create_dir(&own).unwrap();
    let file = own.join("archive");
    fs::write(&file, bytes).unwrap();
    let unlocked = UnlockedKey { archive: ARCHIVE, volume_key: key() };
    let options = OpenOptions { read_only: true, memory: 16 << 20, ..OpenOptions::default() };
    if let Ok(archive) = Archive::open(&file, &unlocked, &options) {
        let options =
            ExtractOptions { to: own.join("extracted"), replace: false, filter: Filter::default(), privileges: true };
        // A refusal is as good as a report.
        let _ = archive.extract(&[], &options, &mut |_| Ok(()));
    }
    let options = RescueOptions { to: own.join("rescued"), partial: true, privileges: true };
    let _ = Archive::rescue(&file, &unlocked, &options, &mut |_| Ok(()), &mut |_| Ok(()));
    let names = |directory: &std::path::Path| -> Vec<_> {
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    };
    for name in names(&own) {
        assert!(["archive", "extracted", "rescued"].iter().any(|known| name == *known), "written outside: {name:?}");
    }
    assert_eq!(names(directory), ["own"]);
    fs::remove_dir_all(&own).unwrap();
}
