//! Archives of a later version: every command that opens one refuses it by name, and none changes it.

use std::collections::BTreeSet;
use std::fs;

use sha2::{Digest, Sha256};

use crate::support::{TestDir, output_with_input};

const UNSUPPORTED: i32 = 11;
const BLOCK: usize = 4096;
/// Copies of the header begin here, and have so many blocks.
const COPIES: [usize; 2] = [0, 320 * BLOCK];
const HEADER: usize = 33 * BLOCK;
const FEATURES: usize = 24;
const CHECKSUM: usize = 4064;

/// One line for each way into an archive. `file` and `new` are there, `out` is not. That `header restore` refuses what the archive's key vouches for is
/// shown where there is that key (`no_header_is_restored_over_that_of_a_later_program`).
const WAYS: &str = "\
add a.lbx file
add --mirror a.lbx file
extract a.lbx --to out
ls a.lbx
cat a.lbx file
cp file a.lbx:/other
cp a.lbx:/file out
mv a.lbx:/file a.lbx:/other
rm a.lbx:/file
mkdir a.lbx:/directory
edit --in . a.lbx:/file
diff file a.lbx:/file
run a.lbx -- true
env set --from file a.lbx NAME
env get a.lbx NAME
env ls a.lbx
env rm a.lbx NAME
key ls a.lbx
key test a.lbx
key add a.lbx --new-passfile new --kdf-memory 1 --kdf-passes 1 --weak-kdf
key recovery a.lbx
key rm a.lbx 0
key rekey a.lbx
key rekey --dry-run a.lbx
passwd a.lbx --new-passfile new --kdf-memory 1 --kdf-passes 1 --weak-kdf
recovery a.lbx --new-passfile new --recovery-code file
header backup a.lbx out
share --server http://localhost:1 --archive a.lbx file
export-tar a.lbx
import-tar a.lbx
snapshot create a.lbx now
snapshot ls a.lbx
snapshot rm a.lbx before
snapshot prune --keep-last 1 a.lbx
snapshot diff a.lbx before
snapshot restore a.lbx before
backup a.lbx out
info a.lbx
check a.lbx
check --full a.lbx
check --repair-header a.lbx
rescue a.lbx --to out
compact a.lbx
compact --dry-run a.lbx
purge a.lbx
purge --snapshots a.lbx";

/// Those that open none of an archive, and those that mount: `case_unknown_versions_and_features_are_refused` has these.
const OTHERS: [&str; 12] = [
    "create",
    "umount",
    "status",
    "forget",
    "receive",
    "doctor",
    "cache",
    "remote",
    "completions",
    "help",
    "mount",
    "exec",
];

/// The archive as a program would leave it that knows another incompatible feature.
fn of_a_later_version(mut bytes: Vec<u8>) -> Vec<u8> {
    for start in COPIES {
        let copy = &mut bytes[start..start + HEADER];
        copy[FEATURES] |= 2;
        copy[CHECKSUM..CHECKSUM + 32].fill(0);
        let sum = Sha256::digest(&copy);
        copy[CHECKSUM..CHECKSUM + 32].copy_from_slice(&sum);
    }
    bytes
}

#[test]
fn every_command_refuses_an_archive_of_a_later_version_and_leaves_it_as_it_is() {
    let work_dir = TestDir::new();
    let archive = work_dir.create_archive("a.lbx");
    fs::write(work_dir.path("file"), "content").unwrap();
    work_dir.write_passfile("new", "another one");
    work_dir.run_ok(&["add", "a.lbx", "file"]);
    work_dir.run_ok(&["snapshot", "create", "a.lbx", "before"]);
    let later = of_a_later_version(fs::read(&archive).unwrap());
    fs::write(&archive, &later).unwrap();
    for way in WAYS.lines() {
        let mut command = work_dir.command();
        command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).env("EDITOR", "true").args(way.split(' '));
        let output = output_with_input(&mut command, "");
        assert_eq!(output.code, UNSUPPORTED, "{way}: {}", output.stderr);
        assert!(output.stdout.is_empty(), "{way} said {:?}", String::from_utf8_lossy(&output.stdout));
        assert!(output.stderr.contains("a.lbx") && output.stderr.contains("feature"), "{way}: {}", output.stderr);
        assert!(fs::read(&archive).unwrap() == later, "{way} changed the archive");
        assert!(!work_dir.path("out").exists(), "{way} made something");
    }
}

/// A new command stands in one of the lists.
#[test]
fn every_command_is_known_to_open_archives_or_not() {
    let help = String::from_utf8(TestDir::new().run_ok(&["--help"])).unwrap();
    // Commands are those that a line of two spaces begins with.
    let listed =
        help.lines().filter_map(|line| line.strip_prefix("  ")).filter(|line| line.starts_with(char::is_alphabetic));
    let listed: BTreeSet<&str> = listed.filter_map(|line| line.split(' ').next()).collect();
    let known: BTreeSet<&str> = WAYS.lines().filter_map(|way| way.split(' ').next()).chain(OTHERS).collect();
    assert_eq!(listed, known);
}
