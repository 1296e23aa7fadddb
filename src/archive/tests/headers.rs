//! Headers and commits: a header replayed after a change of keys, a lost or altered copy, and the
//! end of the file.

use std::path::Path;

use super::key_changes::{Case, key_file};
use super::*;
use crate::archive::{FindingKind, OpenOptions, Severity};
use crate::crypto::SecretKey;
use crate::env::seeds;
use crate::format::ROOT_INO;
use crate::format::header::Framing;
use crate::frame::PageCipher;
use crate::fs::mode;
use crate::keys::header::{self, Header};
use crate::keys::rollback::RollbackCheck;
use crate::keys::{KeyAccess, KeyName, RollbackOptions, change};
use crate::storage::{FileStorage, LockMode};
use crate::txn::Volume;

/// Returns the bytes of both copies of the header.
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

/// HEADER-5: a newer header may contain required information for older programs. One that the
/// archive's key does not authenticate contains none.
#[test]
fn no_header_is_restored_over_that_of_a_later_program() {
    let case = Case::new();
    let backup = keys::backup_header(&case.path()).unwrap();
    let first = secrets("first");
    let own = keys::unlock(&case.path(), &passphrase("first")).unwrap().volume_key;
    let present = Header::read(&FileStorage::open(&case.path(), LockMode::Shared).unwrap()).unwrap();
    let later = Framing { features: present.framing().features | 2, ..present.framing().clone() };
    for (key, is_genuine) in [(&own, true), (&SecretKey::new([1; 32]), false)] {
        let storage = FileStorage::open(&case.path(), LockMode::Exclusive).unwrap();
        header::write_over(&storage, None, &later, &present.slots(), key).unwrap();
        drop(storage);
        let bytes = std::fs::read(case.path()).unwrap();
        let restored = keys::restore_header(&case.path(), &backup, &case.access(&first)).map(drop);
        if !is_genuine {
            restored.unwrap();
            keys::unlock(&case.path(), &passphrase("first")).unwrap();
            continue;
        }
        assert!(
            matches!(&restored, Err(Error::UnsupportedVersion(text)) if text.contains("feature bits: 1")),
            "{restored:?}"
        );
        assert!(std::fs::read(case.path()).unwrap() == bytes, "something was written");
    }
}

/// HEADER-4: also without rollback state, and before any other write.
#[test]
fn a_header_from_before_any_change_of_keys_is_refused_at_once() {
    let add =
        |path: &Path, access: &KeyAccess<'_>| keys::add(path, access, &NewKey::KeyFile(&key_file()), "stick").map(drop);
    let change = |path: &Path, access: &KeyAccess<'_>| {
        keys::change_passphrase(path, access, &passphrase("second"), KdfCost::TEST).map(drop)
    };
    let set = |path: &Path, access: &KeyAccess<'_>| {
        keys::set_passphrase(path, access, None, &passphrase("second"), KdfCost::TEST).map(drop)
    };
    let remove = |path: &Path, access: &KeyAccess<'_>| {
        add(path, access)?;
        keys::remove(path, access, &KeyName::parse("stick")).map(drop)
    };
    let restore = |path: &Path, access: &KeyAccess<'_>| {
        let backup = keys::backup_header(path)?;
        add(path, access)?;
        let access = KeyAccess { seen: RollbackOptions { accept_older: true, ..access.seen.clone() }, ..*access };
        keys::restore_header(path, &backup, &access).map(drop)
    };
    type Change<'a> = (&'a str, &'a dyn Fn(&Path, &KeyAccess<'_>) -> crate::Result<()>);
    let changes: [Change<'_>; 5] =
        [("add", &add), ("passwd", &change), ("set", &set), ("rm", &remove), ("restore", &restore)];
    for (name, change) in changes {
        for closed in [true, false] {
            let case = Case::new();
            fill_a_little(&case, closed);
            let before = copies(&case.path());
            let first = secrets("first");
            let nobody = RollbackOptions::default();
            change(&case.path(), &KeyAccess { seen: nobody.clone(), ..case.access(&first) }).unwrap();
            let after = copies(&case.path());
            put_back(&case.path(), &before);
            let opened = case.try_open(&first, &nobody);
            assert!(
                matches!(&opened, Err(Error::OlderCopy(text)) if text.contains("header")),
                "{name}, closed={closed}"
            );
            put_back(&case.path(), &after);
            let with = if ["passwd", "set"].contains(&name) { secrets("second") } else { first };
            let key = keys::unlock_with(&case.path(), &with, &UnlockLimits::default()).unwrap();
            let options = OpenOptions { read_only: true, ..OpenOptions::default() };
            let archive = Archive::open(&case.path(), &key, &options).unwrap();
            assert_eq!(archive.info().unwrap().closed, closed, "{name}");
            assert_eq!(archive.check(true, &mut |_| {}).unwrap().findings, [], "{name}, closed={closed}");
            let ino = archive.file_system().lookup(ROOT_INO, b"file").unwrap().ino;
            assert_eq!(archive.file_system().read(ino, 0, 100).unwrap(), b"content");
        }
    }
}

/// Writes one small file; without `closed` the session ends like a crash.
fn fill_a_little(case: &Case, closed: bool) {
    let archive = case.try_open(&secrets("first"), &RollbackOptions::default()).unwrap();
    let fs = archive.file_system();
    let owner = Creator { uid: 0, gid: 0, umask: None };
    let made = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o644, 0, owner).unwrap();
    fs.write(made.ino, 0, b"content").unwrap();
    fs.sync().unwrap();
    if closed {
        archive.close().unwrap();
    }
}

/// Returns the framing of [`with_commits`] with this number.
fn numbered(sequence: u64) -> Framing {
    Framing { sequence, ..Header::read(&*with_commits()).unwrap().framing().clone() }
}

/// Returns an archive whose first session was closed; "old" opens it.
fn with_commits() -> Arc<MemoryStorage> {
    let memory = Arc::new(archive(&[(0, "old", KdfCost::TEST)]));
    let cipher = PageCipher::new(&key(), ARCHIVE, true, Arc::new(SeededEnvironment::new(5)));
    let volume = Volume::create(memory.clone(), cipher, Arc::new(SeededEnvironment::new(6)), 1).unwrap();
    volume.commit().unwrap();
    volume.close().unwrap();
    memory
}

/// HEADER-4: a failure of the commit is reported, and does not undo the change.
#[test]
fn a_change_of_keys_stands_also_without_its_commit() {
    let volume = change::open_commits(with_commits(), &numbered(1), &key(), true, &RollbackCheck::default()).unwrap();
    let before = change::VerifiedVolume { volume, looked: RollbackCheck::default(), replace: false };
    let without = Arc::new(archive(&[(0, "new", KdfCost::TEST)]));
    let after = change::commit_header(without.clone(), &numbered(2), &key(), before);
    assert_eq!(after.volume.durable().header_sequence, 1);
    assert!(opens(&*without, "new"));
}

/// HEADER-4: after power failure at any time, no record refers to a newer header than the one in
/// use, so no crash looks like a replayed header; and one set of keys opens the archive.
#[test]
fn a_power_cut_anywhere_before_the_commit_that_follows_new_keys_looks_like_no_older_header() {
    let mut cuts = 0;
    let framing = numbered(1);
    for seed in seeds(0..=5) {
        let chance = Arc::new(SeededEnvironment::new(seed));
        let memory = with_commits();
        let record_of = |storage: Arc<dyn Storage>| {
            let volume = change::open_commits(storage, &framing, &key(), true, &RollbackCheck::default()).unwrap();
            (volume.durable().header_sequence, volume)
        };
        let storage = SimulatedStorage::from_contents(&memory.contents());
        let (number, before) = record_of(storage.clone());
        assert_eq!(number, 1);
        let images = crash_images(&storage, &chance, true, 3);
        let new = slot(0, "new", KdfCost::TEST);
        Header::read(&*storage).unwrap().replace_slots(&*storage, &[(0, (SLOT_PASSPHRASE, new))], &key()).unwrap();
        let before = change::VerifiedVolume { volume: before, looked: RollbackCheck::default(), replace: false };
        change::commit_header(storage.clone(), &numbered(2), &key(), before);
        storage.on_op(Box::new(|_| {}));
        assert_eq!(record_of(storage.clone()).0, 2);
        for image in images.lock().drain(..) {
            cuts += 1;
            assert_ne!(opens(&*image, "new"), opens(&*image, "old"), "exactly one of the two opens it");
            let used = Header::read(&*image).unwrap().framing().sequence;
            assert!(record_of(image).0 <= used);
        }
    }
    assert!(cuts > 200, "only {cuts}");
}

fn read_only() -> OpenOptions {
    OpenOptions { read_only: true, ..OpenOptions::default() }
}

/// Returns the findings of a full check: kind and severity.
fn findings(case: &Case, key: &UnlockedKey) -> Vec<(FindingKind, Severity, String)> {
    let archive = Archive::open(&case.path(), key, &read_only()).unwrap();
    let report = archive.check(true, &mut |_| {}).unwrap();
    report.findings.into_iter().map(|finding| (finding.kind, finding.severity, finding.detail)).collect()
}

/// Returns the notes of a check, for normal states after a crash.
fn notes(case: &Case, key: &UnlockedKey) -> Vec<(FindingKind, Severity, String)> {
    let archive = Archive::open(&case.path(), key, &read_only()).unwrap();
    let report = archive.check(false, &mut |_| {}).unwrap();
    report.notes.into_iter().map(|finding| (finding.kind, finding.severity, finding.detail)).collect()
}

/// HEADER-4: a crash in any sector of a change of keys is noted and is not damage; the same bytes
/// without a change in progress are damage.
#[test]
fn what_a_crash_leaves_of_a_header_is_noted_and_is_no_damage() {
    let case = Case::new();
    fill_a_little(&case, true);
    let first = secrets("first");
    let before = std::fs::read(case.path()).unwrap();
    let old = copies(&case.path());
    let access = KeyAccess { seen: RollbackOptions::default(), ..case.access(&first) };
    keys::add(&case.path(), &access, &NewKey::KeyFile(&key_file()), "").unwrap();
    let (after, new) = (std::fs::read(case.path()).unwrap(), copies(&case.path()));
    let key = keys::unlock(&case.path(), &passphrase("first")).unwrap();
    // Sectors of the new copy that reached the medium, among the differing ones.
    let torn = |copy: usize, reached: &dyn Fn(usize) -> bool| {
        let mut mixed = old[copy].clone();
        for at in (0..HEADER_BYTES).step_by(512).filter(|at| reached(*at)) {
            mixed[at..at + 512].copy_from_slice(&new[copy][at..at + 512]);
        }
        mixed
    };
    let differing: Vec<usize> =
        (0..HEADER_BYTES).step_by(512).filter(|at| old[0][*at..at + 512] != new[0][*at..at + 512]).collect();
    assert!(differing.len() > 4, "{differing:?}");
    let judge = |file: &[u8], copies: &[Vec<u8>; 2], is_noted: bool, what: &str| {
        std::fs::write(case.path(), file).unwrap();
        put_back(&case.path(), copies);
        let (found, noted) = (findings(&case, &key), notes(&case, &key));
        let both = [&found[..], &noted[..]].concat();
        let [(FindingKind::Header, severity, _)] = &both[..] else {
            panic!("{what}: {found:?} {noted:?}");
        };
        assert_eq!((*severity == Severity::Note, noted.len()), (is_noted, usize::from(is_noted)), "{what}: {found:?}");
    };
    for sector in &differing {
        let some = |at: usize| at == *sector;
        let all_but = |at: usize| at != *sector;
        for reached in [&some as &dyn Fn(usize) -> bool, &all_but] {
            // The records refer to the old header until both copies are written.
            judge(&before, &[torn(0, reached), old[1].clone()], true, &format!("copy 0, sector {sector}"));
            judge(&before, &[new[0].clone(), torn(1, reached)], true, &format!("copy 1, sector {sector}"));
            judge(&after, &[new[0].clone(), torn(1, reached)], false, &format!("copy 1 later, sector {sector}"));
        }
    }
    judge(&before, &[new[0].clone(), old[1].clone()], true, "between the copies");
    judge(&after, &[new[0].clone(), old[1].clone()], false, "an older copy put back");
    // One flipped bit is not a rewritten sector.
    for at in [30, 200, 4096 + 7, HEADER_BYTES - 1] {
        let mut copy = old[0].clone();
        copy[at] ^= 1;
        judge(&before, &[copy, old[1].clone()], false, &format!("a bit of byte {at}"));
    }
}

/// Corrects the checksum, which is possible without the key, but not the MAC.
fn with_checksum(mut copy: Vec<u8>) -> Vec<u8> {
    use sha2::Digest;
    copy[4064..4096].fill(0);
    let sum: [u8; 32] = sha2::Sha256::digest(&copy).into();
    copy[4064..4096].copy_from_slice(&sum);
    copy
}

/// HEADER-3: for either copy and any alteration; repaired by opening for writing, or by a command
/// that does nothing else.
#[test]
fn a_copy_of_the_header_that_was_lost_or_altered_is_found_and_mended() {
    let case = Case::new();
    fill_a_little(&case, true);
    let key = keys::unlock(&case.path(), &passphrase("first")).unwrap();
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
    let spoilt: [([Vec<u8>; 2], &str); 8] = [
        ([vec![0; HEADER_BYTES], second.clone()], "copy 0 of the header is lost (header copy 0 has no magic)"),
        ([first.clone(), vec![0; HEADER_BYTES]], "copy 1 of the header is lost (header copy 1 has no magic)"),
        ([flipped(&first, 9000), second.clone()], "copy 0 of the header is lost (header checksum differs: copy=0)"),
        ([first.clone(), flipped(&second, 70)], "copy 1 of the header is lost (header checksum differs: copy=1)"),
        ([first.clone(), older], "copy 1 of the header is older than the other one: number 0 instead of 1"),
        // A newer program would not leave everything else unchanged, including the number.
        ([first.clone(), flipped(&second, 17)], "copy 1 of the header is lost (its version was altered)"),
        // Only the MAC, and a feature bit that may be ignored.
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
        let said = keys::repair_header(&case.path(), &key, &RollbackOptions::default()).unwrap();
        assert_eq!(said, Some(format!("{what}; it was rewritten from the other copy")));
        assert!(std::fs::read(case.path()).unwrap() == whole, "{what}: something else was changed");

        put_back(&case.path(), &copies);
        let archive = Archive::open(&case.path(), &key, &OpenOptions::default()).unwrap();
        assert_eq!(archive.info().unwrap().mended, [said.unwrap()]);
        assert_eq!(archive.check(true, &mut |_| {}).unwrap().findings, []);
        drop(archive);
        assert!(std::fs::read(case.path()).unwrap() == whole, "{what}");
    }
    assert_eq!(keys::repair_header(&case.path(), &key, &RollbackOptions::default()).unwrap(), None);
}

/// HEADER-5: a copy that a newer program began to write is ignored, and neither overwritten nor
/// lost.
#[test]
fn a_copy_of_the_header_that_a_newer_program_wrote_is_not_written_over() {
    let case = Case::new();
    fill_a_little(&case, true);
    let first = secrets("first");
    let key = keys::unlock(&case.path(), &passphrase("first")).unwrap();
    let copies = copies(&case.path());
    for copy in 0..2 {
        // A version, a suite, a feature, each with the next number.
        for at in [16, 20, 24] {
            let mut newer = copies[copy].clone();
            newer[at] = 2;
            newer[64] += 1;
            let mut put = copies.clone();
            put[copy] = with_checksum(newer);
            put_back(&case.path(), &put);
            let before = std::fs::read(case.path()).unwrap();
            let refused = |what: &str, result: Result<(), Error>| {
                assert!(matches!(result, Err(Error::UnsupportedVersion(_))), "{what} {copy} {at}: {result:?}");
                assert!(std::fs::read(case.path()).unwrap() == before, "{what} {copy} {at}: something was written");
            };
            let seen = RollbackOptions::default();
            refused("open", Archive::open(&case.path(), &key, &OpenOptions::default()).map(drop));
            refused("repair", keys::repair_header(&case.path(), &key, &seen).map(drop));
            let access = KeyAccess { seen, ..case.access(&first) };
            refused("key", keys::add(&case.path(), &access, &NewKey::KeyFile(&key_file()), "").map(drop));
            let found = findings(&case, &key);
            assert!(matches!(&found[..], [(FindingKind::Header, ..)]), "{found:?}");
        }
    }
}

/// An older header with one copy is refused before the other copy is written from it.
#[test]
fn an_older_header_is_not_written_to_the_other_copy() {
    let case = Case::new();
    let before = copies(&case.path());
    let first = secrets("first");
    let access = KeyAccess { seen: RollbackOptions::default(), ..case.access(&first) };
    keys::add(&case.path(), &access, &NewKey::KeyFile(&key_file()), "").unwrap();
    put_back(&case.path(), &[before[0].clone(), vec![0; HEADER_BYTES]]);
    let put = std::fs::read(case.path()).unwrap();
    assert!(matches!(case.try_open(&first, &RollbackOptions::default()), Err(Error::OlderCopy(_))));
    let key = keys::unlock(&case.path(), &passphrase("first")).unwrap();
    let repaired = keys::repair_header(&case.path(), &key, &RollbackOptions::default());
    assert!(matches!(repaired, Err(Error::OlderCopy(_))));
    assert!(std::fs::read(case.path()).unwrap() == put, "something was written");
}

#[test]
fn a_part_of_a_block_behind_the_archive_is_told_and_cut_off() {
    let case = Case::new();
    let key = keys::unlock(&case.path(), &passphrase("first")).unwrap();
    let whole = std::fs::read(case.path()).unwrap();
    // Whole blocks may result from a crash.
    for (more, part) in [(1, Some(1)), (4095, Some(4095)), (8192, None), (8193, Some(1))] {
        std::fs::write(case.path(), [&whole[..], &vec![7; more]].concat()).unwrap();
        let said = part.map(|part| format!("the file ends with a partial block of {part} bytes"));
        assert_eq!(findings(&case, &key), []);
        match (&notes(&case, &key)[..], &said) {
            ([], None) => {}
            ([(FindingKind::Length, Severity::Note, found)], Some(said)) if found.starts_with(said) => {}
            (found, _) => panic!("{more}: {found:?}"),
        }
        let archive = Archive::open(&case.path(), &key, &OpenOptions::default()).unwrap();
        let mended = archive.info().unwrap().mended;
        assert_eq!(mended.len(), usize::from(part.is_some()), "{more}: {mended:?}");
        archive.close().unwrap();
        assert!(std::fs::read(case.path()).unwrap() == whole, "{more}");
    }
}
