//! Golden archives through the library's interface, whichever cipher engine it was built with: it reads what the first version sealed, and what it
//! adds is read again. That both engines agree on every message is a unit test.

#![allow(clippy::unwrap_used)] // a failed step fails the test

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use lockbox::archive::{Archive, OpenOptions};
use lockbox::crypto::Passphrase;
use lockbox::fs::{Creator, FileSystem, mode};
use lockbox::fs::{Ino, ROOT_INO};
use lockbox::keys;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(fs: &FileSystem, ino: Ino, length: usize) -> Vec<u8> {
    let mut content = Vec::new();
    let length = fs.read_into(ino, 0, length, &mut content).unwrap();
    content.truncate(length);
    content
}

/// Compares the regular files below a directory with the manifest; returns their number.
fn compare(fs: &FileSystem, directory: Ino, path: &[u8], objects: &Value) -> usize {
    let mut entries = Vec::new();
    fs.list_directory(directory, 2, u64::MAX, false, &mut |entry, _| {
        entries.push(([path, b"/", entry.name].concat(), entry.ino));
        ControlFlow::Continue(())
    })
    .unwrap();
    let mut files = 0;
    for (path, ino) in entries {
        let attributes = fs.attributes(ino).unwrap();
        match attributes.mode & mode::TYPE {
            mode::DIRECTORY => files += compare(fs, ino, &path, objects),
            mode::REGULAR => {
                let content = read(fs, ino, attributes.size as usize);
                let recorded = &objects[hex(&path)]["sha256"];
                assert_eq!(*recorded, hex(&Sha256::digest(content)), "{}", path.escape_ascii());
                files += 1;
            }
            _ => {}
        }
    }
    files
}

#[test]
fn golden_archives_are_read_and_written_on() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden");
    let directory = tempfile::tempdir().unwrap();
    for (name, least) in [("objects", 10), ("log", 6)] {
        let manifest: Value = serde_json::from_slice(&fs::read(golden.join(format!("{name}.json"))).unwrap()).unwrap();
        let path = directory.path().join(name);
        let packed = fs::read(golden.join(format!("{name}.lbx.zst"))).unwrap();
        fs::write(&path, zstd::decode_all(&packed[..]).unwrap()).unwrap();
        let key = keys::unlock(&path, &Passphrase::new(b"golden one".to_vec())).unwrap();
        let open =
            |read_only| Archive::open(&path, &key, &OpenOptions { read_only, ..OpenOptions::default() }).unwrap();
        let archive = open(true);
        assert!(compare(archive.file_system(), ROOT_INO, b"", &manifest["objects"]) >= least, "{name}");
        assert!(archive.check(true, &mut |_| {}).unwrap().findings.is_empty(), "{name}");
        drop(archive);
        let archive = open(false);
        let fs = archive.file_system();
        let creator = Creator { uid: 0, gid: 0, umask: None };
        let added = fs.make_node(ROOT_INO, b"added", mode::REGULAR | 0o600, 0, creator).unwrap().ino;
        fs.write(added, 0, name.as_bytes()).unwrap();
        archive.close().unwrap();
        let archive = open(true);
        assert_eq!(read(archive.file_system(), added, 100), name.as_bytes());
        assert!(archive.check(true, &mut |_| {}).unwrap().findings.is_empty(), "{name}");
    }
}
