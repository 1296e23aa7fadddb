//! Remembered places: their bytes, their files, and the verdicts on other archives at a place.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::known_places::{Known, PlaceName};
use super::{Fingerprint, RollbackCheck, RollbackOptions, remember_place};
use crate::crypto::SecretKey;
use crate::env::SeededEnvironment;
use crate::error::{Error, Result, Timestamp};
use crate::format::Generation;
use crate::frame::PageCipher;
use crate::storage::simulated::SimulatedStorage;
use crate::txn::{self, Mark, Volume};

const ONE: [u8; 16] = [1; 16];
const TWO: [u8; 16] = [2; 16];

fn key(number: u8) -> SecretKey {
    SecretKey::new([number; 32])
}

/// A user's home.
struct User {
    home: tempfile::TempDir,
}

impl User {
    fn new() -> User {
        User { home: tempfile::tempdir().unwrap() }
    }

    fn directory(&self) -> PathBuf {
        self.home.path().join("lockbox/seen")
    }

    fn options(&self, places: &[&str]) -> RollbackOptions {
        let places = places.iter().map(|place| PlaceName::of_path(Path::new(place))).collect();
        RollbackOptions { directory: Some(self.directory()), places, ..RollbackOptions::default() }
    }

    /// Opens an archive as a command does that has no commits of it.
    fn open(&self, places: &[&str], number: u8, archive: [u8; 16]) -> Result<()> {
        open(&self.options(places), number, archive)
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<_> = fs::read_dir(self.directory()).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }
}

fn open(options: &RollbackOptions, number: u8, archive: [u8; 16]) -> Result<()> {
    let looked = RollbackCheck::at(options, &key(number), &archive);
    looked.judge_places(options, None)?;
    looked.places.remember(None);
    Ok(())
}

fn is_replaced(result: &Result<()>) -> bool {
    matches!(result, Err(Error::Replaced(_)))
}

#[test]
fn another_archive_at_a_known_place_is_refused_until_it_is_accepted() {
    let user = User::new();
    user.open(&["/a"], 1, ONE).unwrap();
    user.open(&["/b"], 2, TWO).unwrap();
    for _ in 0..2 {
        let swapped = user.open(&["/a"], 2, TWO);
        assert!(is_replaced(&swapped), "{swapped:?}");
        let facts = swapped.unwrap_err().to_string();
        let shown = [Fingerprint::new(&key(1), &ONE), Fingerprint::new(&key(2), &TWO)].map(|print| print.to_string());
        assert!(facts.contains("/a") && shown.iter().all(|print| facts.contains(print)), "{facts}");
    }
    // Nothing was changed by the refusals, and a copy at another place is the same archive.
    user.open(&["/a"], 1, ONE).unwrap();
    user.open(&["/copy of a"], 1, ONE).unwrap();
    let accepting = RollbackOptions { accept_other: true, ..user.options(&["/a"]) };
    open(&accepting, 2, TWO).unwrap();
    user.open(&["/a"], 2, TWO).unwrap();
    assert!(is_replaced(&user.open(&["/a"], 1, ONE)), "a place has one archive");
}

#[test]
fn an_archive_with_a_copied_id_is_another_one() {
    let user = User::new();
    user.open(&["/a"], 1, ONE).unwrap();
    let forged = user.open(&["/a"], 3, ONE);
    assert!(is_replaced(&forged) && forged.unwrap_err().to_string().contains("another volume key"));
}

/// PLACE-1
#[test]
fn every_name_of_a_place_is_compared_and_remembered() {
    let user = User::new();
    user.open(&["/link", "/a"], 1, ONE).unwrap();
    // The attacker put a link in the place of /a.
    assert!(is_replaced(&user.open(&["/link", "/a", "/evil"], 3, ONE)));
    assert!(is_replaced(&user.open(&["/new alias", "/a", "/evil"], 3, ONE)));
    assert!(is_replaced(&user.open(&["/link"], 3, ONE)));
    user.open(&["/evil"], 1, ONE).unwrap();
}

/// PLACE-4
#[test]
fn what_is_being_put_in_place_and_what_it_replaces_are_both_known_until_one_is_seen() {
    for (first, other) in [((1, ONE), (2, TWO)), ((2, TWO), (1, ONE))] {
        let user = User::new();
        user.open(&["/a"], 1, ONE).unwrap();
        RollbackCheck::at(&user.options(&["/a"]), &key(2), &TWO).places.announce();
        user.open(&["/a"], first.0, first.1).unwrap();
        assert!(is_replaced(&user.open(&["/a"], other.0, other.1)));
    }
    // Of an unknown place nothing is announced: the command may fail.
    let user = User::new();
    RollbackCheck::at(&user.options(&["/a"]), &key(2), &TWO).places.announce();
    user.open(&["/a"], 1, ONE).unwrap();
    // A command that ended before the file had its name leaves the previous archive known, whatever
    // is announced next.
    for number in 3..6 {
        RollbackCheck::at(&user.options(&["/a"]), &key(number), &TWO).places.announce();
    }
    user.open(&["/a"], 1, ONE).unwrap();
}

#[test]
fn what_a_command_of_the_user_put_there_is_known() {
    let user = User::new();
    user.open(&["/a"], 1, ONE).unwrap();
    remember_place(&user.options(&["/a"]), TWO, Fingerprint::new(&key(2), &TWO));
    user.open(&["/a"], 2, TWO).unwrap();
    assert!(is_replaced(&user.open(&["/a"], 1, ONE)));
}

#[test]
fn a_memory_that_is_lost_or_altered_is_a_first_use_and_no_alarm() {
    let user = User::new();
    user.open(&["/a"], 1, ONE).unwrap();
    let place = user.files().into_iter().find(|file| file.extension().is_some_and(|name| name == "place")).unwrap();
    let whole = fs::read(&place).unwrap();
    for at in 0..whole.len() {
        let mut altered = whole.clone();
        altered[at] ^= 1;
        fs::write(&place, altered).unwrap();
        assert!(RollbackCheck::at(&user.options(&["/a"]), &key(2), &TWO).places.are_new(), "byte {at}");
    }
    // It is remembered again.
    user.open(&["/a"], 2, TWO).unwrap();
    assert!(is_replaced(&user.open(&["/a"], 1, ONE)));
    fs::remove_file(&place).unwrap();
    user.open(&["/a"], 1, ONE).unwrap();
    // The file of one place is invalid in the place of another one.
    user.open(&["/b"], 2, TWO).unwrap();
    let other =
        user.files().into_iter().find(|file| file.extension().is_some_and(|name| name == "place") && *file != place);
    fs::copy(&place, other.unwrap()).unwrap();
    user.open(&["/b"], 2, TWO).unwrap();
    // The user's key.
    let key_file = user.directory().join("places.key");
    for content in [&b"short"[..], &[7; 33]] {
        fs::write(&key_file, content).unwrap();
        user.open(&["/a"], 2, TWO).unwrap();
        assert_eq!(fs::read(&key_file).unwrap(), content, "nothing is written over it");
    }
    fs::remove_file(&key_file).unwrap();
    user.open(&["/a"], 2, TWO).unwrap();
    assert!(is_replaced(&user.open(&["/a"], 1, ONE)));
}

#[test]
fn the_files_are_private_and_say_nothing_without_the_key_beside_them() {
    use std::os::unix::fs::PermissionsExt;
    let user = User::new();
    user.open(&["/srv/user/diary.lbx"], 1, ONE).unwrap();
    let files = user.files();
    assert_eq!(files.len(), 2, "{files:?}");
    for file in files {
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let content = fs::read(&file).unwrap();
        let print = Fingerprint::new(&key(1), &ONE).to_string();
        let has = |what: &[u8]| content.windows(what.len()).any(|window| window == what);
        assert!(!has(b"diary") && !has(&ONE) && !has(print.as_bytes()));
    }
}

#[test]
fn without_a_directory_or_places_nothing_is_compared() {
    let user = User::new();
    for options in [RollbackOptions { directory: None, ..user.options(&["/a"]) }, user.options(&[])] {
        open(&options, 1, ONE).unwrap();
        open(&options, 2, TWO).unwrap();
    }
    // One that cannot be made.
    fs::write(user.home.path().join("file"), "").unwrap();
    let blocked = RollbackOptions { directory: Some(user.home.path().join("file/below")), ..user.options(&["/a"]) };
    open(&blocked, 1, ONE).unwrap();
    open(&blocked, 2, TWO).unwrap();
}

#[test]
fn a_first_use_is_told_once_and_of_recipients_alone() {
    let user = User::new();
    let first = |place: &str, by_recipient| {
        RollbackCheck::at(&user.options(&[place]), &key(1), &ONE).opened_by_recipient(by_recipient).first_use()
    };
    assert!(first("/a", false).is_none(), "a secret that the maker of the archive must have had vouches for it");
    let told = first("/a", true).unwrap();
    assert!(told.contains(&Fingerprint::new(&key(1), &ONE).to_string()), "{told}");
    user.open(&["/a"], 1, ONE).unwrap();
    assert!(first("/a", true).is_none());
    let nowhere = RollbackOptions { directory: None, ..user.options(&["/a"]) };
    assert!(
        RollbackCheck::at(&nowhere, &key(1), &ONE).opened_by_recipient(true).first_use().is_none(),
        "it would be told for ever"
    );
}

/// PLACE-5
#[test]
fn a_new_volume_key_is_known_by_the_history_that_only_a_holder_of_a_key_can_write() {
    let environment = Arc::new(SeededEnvironment::new(5));
    let cipher = |number| PageCipher::new(&key(number), ONE, true, environment.clone());
    let created = |number| {
        let storage = SimulatedStorage::new();
        let volume = Volume::create(storage.clone(), cipher(number), environment.clone(), 1).unwrap();
        for _ in 0..3 {
            volume.commit().unwrap();
        }
        volume.close().unwrap();
        storage
    };
    let reading = txn::OpenOptions { read_only: true, memory: 32 << 20 };
    let opened = |storage: &Arc<SimulatedStorage>, number| {
        Volume::open_seen(storage.clone(), cipher(number), environment.clone(), 1, &reading, None).unwrap()
    };
    let user = User::new();
    let options = user.options(&["/a"]);
    let admit = |storage: &Arc<SimulatedStorage>, number| {
        let looked = RollbackCheck::at(&options, &key(number), &ONE);
        looked.admit(&opened(storage, number), 1, &options, true)
    };
    let old = created(1);
    admit(&old, 1).unwrap();
    // An archive as made by `key rekey` of another machine.
    let renewed = SimulatedStorage::new();
    let volume = Volume::continue_from(&opened(&old, 1), renewed.clone(), cipher(2), environment.clone(), 1).unwrap();
    volume.commit().unwrap();
    volume.close().unwrap();
    // An archive of an attacker that copied the id.
    let forged = created(3);
    assert!(matches!(admit(&forged, 3), Err(Error::Replaced(_))));
    admit(&renewed, 2).unwrap();
    // The old key is that of an older copy now.
    assert!(matches!(admit(&old, 1), Err(Error::Replaced(_))));
    assert!(matches!(admit(&forged, 3), Err(Error::Replaced(_))));
}

#[test]
fn what_is_remembered_of_a_place_decodes_to_itself_and_nothing_else_decodes() {
    let mark = Mark { session: [3; 16], first: Generation(4), generation: Generation(5), tag: [6; 16] };
    let print = |number| Fingerprint::new(&key(number), &ONE);
    for (mark, fingerprints) in [(None, vec![print(1)]), (Some(mark), vec![print(1), print(2)])] {
        let known = Known { time: Timestamp { seconds: -7, nanos: 8 }, archive: ONE, mark, fingerprints };
        let bytes = known.encode();
        assert_eq!(Known::decode(&bytes).unwrap(), known);
        for (at, wrong) in [(0, 2), (1, 0), (1, 3), (2, 2)] {
            let mut altered = bytes.clone();
            altered[at] = wrong;
            assert!(Known::decode(&altered).is_err(), "byte {at}");
        }
        for length in 0..bytes.len() {
            assert!(Known::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
        assert!(Known::decode(&[&bytes[..], &[0]].concat()).is_err());
    }
    assert_eq!(Fingerprint::parse(&print(1).to_string()), Some(print(1)));
    for wrong in ["", "12", "+1234567890123456789012345678901", "g1234567890123456789012345678901"] {
        assert_eq!(Fingerprint::parse(wrong), None);
    }
}
