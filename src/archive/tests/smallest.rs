//! The archive of the specification's section 16, written by another implementation: it is valid,
//! and can be written to.

use super::*;
use crate::archive::OpenOptions;
use crate::format::ROOT_INO;
use crate::fs::mode;

#[test]
fn the_smallest_archive_of_the_specification_is_sound_and_can_be_written() {
    let vector = vectors("smallest");
    let mut bytes = vec![0; vector["length"].as_u64().unwrap() as usize];
    for piece in vector["pieces"].as_array().unwrap() {
        let (at, piece) = (piece["at"].as_u64().unwrap() as usize, unhex(&piece["bytes"]));
        bytes[at..at + piece.len()].copy_from_slice(&piece);
    }
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a.lbx");
    std::fs::write(&path, bytes).unwrap();
    let key = keys::unlock(&path, &passphrase(vector["passphrase"].as_str().unwrap())).unwrap();
    let sound = || {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let archive = Archive::open(&path, &key, &options).unwrap();
        let report = archive.check(true, &mut |_| {}).unwrap();
        assert_eq!(report.findings, []);
        (report.inodes, report.blocks, archive.info().unwrap().closed)
    };
    assert_eq!(sound(), (1, 1, true));
    let archive = Archive::open(&path, &key, &OpenOptions::default()).unwrap();
    let owner = Creator { uid: 0, gid: 0, umask: None };
    let made = archive.file_system().make_node(ROOT_INO, b"file", mode::REGULAR | 0o644, 0, owner).unwrap();
    archive.file_system().write(made.ino, 0, b"content").unwrap();
    archive.close().unwrap();
    assert_eq!(sound().0, 2);
}
