//! Headers: a copy that was lost or altered, an older one, and the end of the file.

use std::path::Path;

use super::keys::{Case, key_file};
use super::*;
use crate::archive::{FindingKind, KeyAccess, OpenOptions, SeenOptions, Severity};
use crate::format::ROOT_INO;
use crate::fs::mode;

/// The bytes of both copies of the header.
fn copies(path: &Path) -> [Vec<u8>; 2] {
    let bytes = std::fs::read(path).unwrap();
    HEADER_START.map(|start| bytes[(start * BLOCK) as usize..][..HEADER_BYTES].to_vec())
}

fn put_back(path: &Path, copies: &[Vec<u8>; 2]) {
    let mut bytes = std::fs::read(path).unwrap();
    for (start, copy) in HEADER_START.iter().zip(copies) {
        bytes[(start * BLOCK) as usize..][..HEADER_BYTES].copy_from_slice(copy);
    }
    std::fs::write(path, bytes).unwrap();
}

/// One small file; without `closed` the session ends as a crash would end it.
fn fill_a_little(case: &Case, closed: bool) {
    let archive = case.try_open(&secrets("first"), &SeenOptions::default()).unwrap();
    let fs = archive.file_system();
    let owner = Creator { uid: 0, gid: 0, umask: None };
    let made = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o644, 0, owner).unwrap();
    fs.write(made.ino, 0, b"content").unwrap();
    fs.sync().unwrap();
    if closed {
        archive.close().unwrap();
    }
}

fn read_only() -> OpenOptions {
    OpenOptions { read_only: true, ..OpenOptions::default() }
}

/// What a full check finds: kind and severity.
fn findings(case: &Case, key: &UnlockedKey) -> Vec<(FindingKind, Severity, String)> {
    let archive = Archive::open(&case.path(), key, &read_only()).unwrap();
    let report = archive.check(true, &mut |_, _| {}).unwrap();
    report.findings.into_iter().map(|finding| (finding.kind, finding.severity, finding.detail)).collect()
}

/// Who has no key can make the checksum right, but not the MAC.
fn with_checksum(mut copy: Vec<u8>) -> Vec<u8> {
    use sha2::Digest;
    copy[4064..4096].fill(0);
    let sum: [u8; 32] = sha2::Sha256::digest(&copy).into();
    copy[4064..4096].copy_from_slice(&sum);
    copy
}

/// H3: whichever copy it is and however it was altered; an opening for writing mends it, or a command that does nothing else.
#[test]
fn a_copy_of_the_header_that_was_lost_or_altered_is_found_and_mended() {
    let case = Case::new();
    fill_a_little(&case, true);
    let key = Archive::unlock(&case.path(), &passphrase("first")).unwrap();
    let whole = std::fs::read(case.path()).unwrap();
    let [first, second] = copies(&case.path());
    assert_eq!(findings(&case, &key), []);
    let flipped = |copy: &[u8], at: usize| {
        let mut copy = copy.to_vec();
        copy[at] ^= 1;
        copy
    };
    let older = Framing { sequence: 0, copy: 1, ..Header::of_copy(&second).unwrap().framing().clone() };
    let older = header::encode_copy(&older, &Header::of_copy(&second).unwrap().slots(), 1, &key.volume_key);
    let spoilt: [([Vec<u8>; 2], &str); 7] = [
        ([vec![0; HEADER_BYTES], second.clone()], "copy 0 of the header is lost (header copy 0 has no magic)"),
        ([first.clone(), vec![0; HEADER_BYTES]], "copy 1 of the header is lost (header copy 1 has no magic)"),
        ([flipped(&first, 9000), second.clone()], "copy 0 of the header is lost (header checksum differs: copy=0)"),
        ([first.clone(), flipped(&second, 70)], "copy 1 of the header is lost (header checksum differs: copy=1)"),
        ([first.clone(), older], "copy 1 of the header is older than the other one: number 0 instead of 1"),
        // The MAC alone, a feature bit that may be ignored.
        ([first.clone(), with_checksum(flipped(&second, 4040))], "copy 1 of the header was altered"),
        ([first.clone(), with_checksum(flipped(&second, 40))], "copy 1 of the header was altered"),
    ];
    for (copies, what) in spoilt {
        put_back(&case.path(), &copies);
        let found = findings(&case, &key);
        assert!(
            matches!(&found[..], [(FindingKind::Header, Severity::Minor, said)] if said.starts_with(what)),
            "{found:?}"
        );
        let said = Archive::repair_header(&case.path(), &key, &SeenOptions::default()).unwrap();
        assert_eq!(said, Some(format!("{what}; it was written anew from the other copy")));
        assert!(std::fs::read(case.path()).unwrap() == whole, "{what}: something else was changed");

        put_back(&case.path(), &copies);
        let archive = Archive::open(&case.path(), &key, &OpenOptions::default()).unwrap();
        assert_eq!(archive.info().unwrap().mended, [said.unwrap()]);
        assert_eq!(archive.check(true, &mut |_, _| {}).unwrap().findings, []);
        drop(archive);
        assert!(std::fs::read(case.path()).unwrap() == whole, "{what}");
    }
    assert_eq!(Archive::repair_header(&case.path(), &key, &SeenOptions::default()).unwrap(), None);
}

/// An older header with one copy is refused before the other copy is written from it.
#[test]
fn an_older_header_is_not_written_to_the_other_copy() {
    let case = Case::new();
    let before = copies(&case.path());
    let first = secrets("first");
    let access = KeyAccess { seen: SeenOptions::default(), ..case.access(&first) };
    Archive::add_key(&case.path(), &access, &NewKey::KeyFile(&key_file()), "").unwrap();
    put_back(&case.path(), &[before[0].clone(), vec![0; HEADER_BYTES]]);
    let put = std::fs::read(case.path()).unwrap();
    assert!(matches!(case.try_open(&first, &SeenOptions::default()), Err(Error::Older(_))));
    let key = Archive::unlock(&case.path(), &passphrase("first")).unwrap();
    let repaired = Archive::repair_header(&case.path(), &key, &SeenOptions::default());
    assert!(matches!(repaired, Err(Error::Older(_))));
    assert!(std::fs::read(case.path()).unwrap() == put, "something was written");
}

#[test]
fn a_part_of_a_block_behind_the_archive_is_told_and_cut_off() {
    let case = Case::new();
    let key = Archive::unlock(&case.path(), &passphrase("first")).unwrap();
    let whole = std::fs::read(case.path()).unwrap();
    // Whole blocks may be what a crash left.
    for (more, part) in [(1, Some(1)), (4095, Some(4095)), (8192, None), (8193, Some(1))] {
        std::fs::write(case.path(), [&whole[..], &vec![7; more]].concat()).unwrap();
        let said = part.map(|part| format!("the file ends with a part of a block ({part} bytes)"));
        match (&findings(&case, &key)[..], &said) {
            ([], None) => {}
            ([(FindingKind::Length, Severity::Minor, found)], Some(said)) if found.starts_with(said) => {}
            (found, _) => panic!("{more}: {found:?}"),
        }
        let archive = Archive::open(&case.path(), &key, &OpenOptions::default()).unwrap();
        let mended = archive.info().unwrap().mended;
        assert_eq!(mended.len(), usize::from(part.is_some()), "{more}: {mended:?}");
        archive.close().unwrap();
        assert!(std::fs::read(case.path()).unwrap() == whole, "{more}");
    }
}
