//! A golden archive through the program: whichever cipher engine it was built with, it reads what others sealed.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::support::TestDir;

#[test]
fn the_program_reads_a_golden_archive() {
    assert!(files_read("objects") >= 10);
}

#[test]
fn the_program_reads_a_golden_archive_with_a_log() {
    assert!(files_read("log") >= 6);
}

#[test]
fn the_program_reads_a_golden_bucket() {
    let (work_dir, manifest, passfile) = golden("objects");
    let bucket = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/golden/bucket").canonicalize().unwrap();
    assert!(compared(&work_dir, &manifest, &passfile, &format!("file://{}", bucket.display())) >= 10);
}

/// What was acknowledged and is lost is never called sound, and what looks like an interrupted write is told as that or damage.
#[test]
fn a_check_tells_what_a_damaged_log_lost() {
    let (work_dir, manifest, passfile) = golden("log");
    let whole = fs::read(work_dir.path("golden.lbx")).unwrap();
    let check = |json: bool| {
        let mut command = work_dir.command();
        // Whoever remembers the whole archive, or another damaged one, is told that this is an older copy, and no more.
        let memory = work_dir.path("memory");
        drop(fs::remove_dir_all(&memory));
        command
            .env("XDG_STATE_HOME", &memory)
            .env("LOCKBOX_PASSFILE", &passfile)
            .args(["check", "--full", "golden.lbx"])
            .args(json.then_some("--json"));
        let output = command.output().unwrap();
        (output.status.code().unwrap(), output.stdout, String::from_utf8(output.stderr).unwrap())
    };
    for case in manifest["damaged"].as_array().unwrap() {
        let mut bytes = whole.clone();
        for at in case["flip"].as_array().unwrap() {
            bytes[at.as_u64().unwrap() as usize] ^= 0xFF;
        }
        fs::write(work_dir.path("golden.lbx"), bytes).unwrap();
        let what = case["what"].as_str().unwrap();
        let (code, told, stderr) = check(false);
        let (_, json, _) = check(true);
        let json: Value = serde_json::from_slice(&json).unwrap();
        if what == "body of the last entry" {
            let told = String::from_utf8(told).unwrap();
            assert!(code == 0 && told.contains("newer changes may be missing"), "{what}: {code} {told}");
            let fallback = json["fallback"].as_str().unwrap();
            assert!(fallback.contains("is incomplete: it was interrupted, or damaged since"), "{fallback}");
            assert_eq!(json["sound"], true);
            continue;
        }
        assert_eq!(code, 12, "{what}: {stderr}");
        assert!(stderr.contains("durable data is lost") && stderr.contains("lockbox rescue"), "{stderr}");
        assert_eq!(
            (&json["sound"], &json["findings"][0]["kind"]),
            (&Value::from(false), &Value::from("log")),
            "{what}"
        );
        assert_eq!(json["findings"][0]["severity"], "lost");
    }
}

/// A golden archive as golden.lbx in a place of its own, what is recorded of it, and the file of its passphrase.
fn golden(name: &str) -> (TestDir, Value, PathBuf) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/golden");
    let manifest: Value = serde_json::from_slice(&fs::read(golden.join(format!("{name}.json"))).unwrap()).unwrap();
    let work_dir = TestDir::new();
    let packed = fs::read(golden.join(format!("{name}.lbx.zst"))).unwrap();
    fs::write(work_dir.path("golden.lbx"), zstd::decode_all(&packed[..]).unwrap()).unwrap();
    let passfile = work_dir.write_passfile("golden pass", "golden one");
    (work_dir, manifest, passfile)
}

/// Compares regular files with what is recorded of them; answers how many.
fn files_read(name: &str) -> usize {
    let (work_dir, manifest, passfile) = golden(name);
    compared(&work_dir, &manifest, &passfile, "golden.lbx")
}

fn compared(work_dir: &TestDir, manifest: &Value, passfile: &Path, archive: &str) -> usize {
    let mut read = 0;
    for (path, object) in manifest["objects"].as_object().unwrap() {
        // Regular files, named in hexadecimal; names that are no UTF-8 are another test's.
        let bytes = (0..path.len()).step_by(2).map(|at| u8::from_str_radix(&path[at..at + 2], 16).unwrap());
        let Ok(name) = String::from_utf8(bytes.collect()) else { continue };
        if object["mode"].as_u64().unwrap() & 0o170_000 != 0o100_000 || object["size"].as_u64().unwrap() > 1 << 20 {
            continue;
        }
        let mut command = work_dir.command();
        command.env("LOCKBOX_PASSFILE", passfile).env("XDG_CACHE_HOME", work_dir.path("cache"));
        let output = command.args(["cat", archive, &name]).output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let digest: String = Sha256::digest(&output.stdout).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(object["sha256"], digest, "{name}");
        read += 1;
    }
    read
}
