//! A golden archive through the program: whichever cipher engine it was built with, it reads what others sealed.

use std::fs;
use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::support::Place;

#[test]
fn the_program_reads_a_golden_archive() {
    assert!(files_read("objects") >= 10);
}

#[test]
fn the_program_reads_a_golden_archive_with_a_log() {
    assert!(files_read("log") >= 6);
}

/// Compares regular files with what is recorded of them; answers how many.
fn files_read(name: &str) -> usize {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/golden");
    let manifest: Value = serde_json::from_slice(&fs::read(golden.join(format!("{name}.json"))).unwrap()).unwrap();
    let place = Place::new();
    let packed = fs::read(golden.join(format!("{name}.lbx.zst"))).unwrap();
    fs::write(place.path("golden.lbx"), zstd::decode_all(&packed[..]).unwrap()).unwrap();
    let passfile = place.secret("golden pass", "golden one");
    let mut read = 0;
    for (path, object) in manifest["objects"].as_object().unwrap() {
        // Regular files, named in hexadecimal; names that are no UTF-8 are another test's.
        let bytes = (0..path.len()).step_by(2).map(|at| u8::from_str_radix(&path[at..at + 2], 16).unwrap());
        let Ok(name) = String::from_utf8(bytes.collect()) else { continue };
        if object["mode"].as_u64().unwrap() & 0o170_000 != 0o100_000 || object["size"].as_u64().unwrap() > 1 << 20 {
            continue;
        }
        let ended =
            place.command().env("LOCKBOX_PASSFILE", &passfile).args(["cat", "golden.lbx", &name]).output().unwrap();
        assert!(ended.status.success(), "{name}: {}", String::from_utf8_lossy(&ended.stderr));
        let digest: String = Sha256::digest(&ended.stdout).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(object["sha256"], digest, "{name}");
        read += 1;
    }
    read
}
