//! Rollback state: its bytes, its file, and the verdicts on older copies, forks and everything that
//! a crash may leave.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use super::{EntryMark, RollbackCheck, RollbackGuard, RollbackOptions, RollbackState, RollbackStateFile, TRAIL, judge};
use crate::crypto::SecretKey;
use crate::env::{Environment, SeededEnvironment, seeds};
use crate::error::{Error, Result, Timestamp};
use crate::format::log::{EntryHead, LogEntry, entry_blocks};
use crate::format::{BLOCK, Generation, Key, LOG, kind};
use crate::frame::PageCipher;
use crate::pager::Pager;
use crate::storage::Storage;
use crate::storage::simulated::SimulatedStorage;
use crate::txn::{self, Mark, Volume};

const ARCHIVE: [u8; 16] = [7; 16];

fn key() -> SecretKey {
    SecretKey::new([9; 32])
}

fn file(directory: &Path) -> RollbackStateFile {
    RollbackStateFile::new(directory, &key(), &ARCHIVE)
}

/// One user's memory and the source of its randomness.
struct User {
    home: tempfile::TempDir,
    environment: Arc<SeededEnvironment>,
}

impl User {
    fn new(seed: u64) -> User {
        println!("seed {seed}");
        User { home: tempfile::tempdir().unwrap(), environment: Arc::new(SeededEnvironment::new(seed)) }
    }

    fn below(&self, bound: u64) -> u64 {
        self.environment.next_u64() % bound
    }

    fn options(&self) -> RollbackOptions {
        RollbackOptions { directory: Some(self.home.path().join("lockbox")), ..RollbackOptions::default() }
    }

    fn create(&self) -> Arc<SimulatedStorage> {
        let storage = SimulatedStorage::new();
        let volume = Volume::create_for_records(storage.clone(), self.cipher(), self.environment.clone(), 1).unwrap();
        volume.commit().unwrap();
        volume.close().unwrap();
        storage
    }

    fn cipher(&self) -> PageCipher {
        PageCipher::new(&key(), ARCHIVE, true, self.environment.clone())
    }

    /// Like [`crate::archive::Archive::open_seen`], on simulated storage.
    fn open_with(
        &self,
        storage: &Arc<SimulatedStorage>,
        read_only: bool,
        options: &RollbackOptions,
    ) -> Result<(Arc<Volume>, RollbackGuard)> {
        let looked = RollbackCheck::at(options, &key(), &ARCHIVE);
        let open = txn::OpenOptions { read_only, memory: 32 << 20 };
        let environment = self.environment.clone();
        let volume = Volume::open_seen(storage.clone(), self.cipher(), environment, 1, &open, looked.mark())?;
        let replace = judge(&volume, 1, looked.seen.as_ref(), options, read_only)?;
        let witness = RollbackGuard::new(volume.clone(), 1, looked, replace);
        match volume.take_logged() {
            Some(logged) if read_only => volume.replay_read_only(&logged, &mut |_| Ok(()))?,
            Some(logged) => volume.replay(&logged, 0, &mut |_| Ok(()))?,
            None => {}
        }
        witness.remember();
        Ok((volume, witness))
    }

    fn open(&self, storage: &Arc<SimulatedStorage>) -> Result<(Arc<Volume>, RollbackGuard)> {
        self.open_with(storage, false, &self.options())
    }

    /// Any of the records, as pages of the tree are all that matters here.
    fn change(&self, volume: &Volume) {
        let ino = 2 + self.below(50);
        let value = self.environment.next_u64().to_le_bytes();
        volume.operate(1, false, |operation| operation.insert(Key::new(ino, kind::INLINE, 0), &value)).unwrap();
    }

    /// A change that is durable by an entry of the log, when the session has committed before.
    fn log(&self, volume: &Volume) {
        self.change(volume);
        volume.sync_wanted(volume.want_commit().unwrap()).unwrap();
    }

    /// One session of some commits, closed.
    fn session(&self, storage: &Arc<SimulatedStorage>) {
        let (volume, witness) = self.open(storage).unwrap();
        for _ in 0..=self.below(4) {
            self.change(&volume);
            volume.commit().unwrap();
        }
        volume.close().unwrap();
        witness.remember();
    }
}

/// A crashed archive, and the bytes of the rollback state at that moment.
type Image = (Arc<SimulatedStorage>, Vec<u8>);

fn copy(storage: &SimulatedStorage) -> Arc<SimulatedStorage> {
    SimulatedStorage::from_contents(&storage.contents())
}

fn mark(session: u8, first: u64, generation: u64) -> Mark {
    Mark {
        session: [session; 16],
        first: Generation(first),
        generation: Generation(generation),
        tag: [generation as u8; 16],
    }
}

#[test]
fn a_memory_survives_its_file_and_reveals_nothing() {
    let user = User::new(1);
    let directory = user.home.path().join("state/lockbox");
    let seen = RollbackState {
        time: Timestamp { seconds: 1_700_000_000, nanos: 5 },
        header_sequence: 3,
        trail: (0..TRAIL as u64).map(|i| mark(i as u8, 1000 - 10 * i, 1005 - 10 * i)).collect(),
        entry: Some(EntryMark { number: 7, tag: [8; 16] }),
    };
    assert_eq!(file(&directory).load().unwrap(), None);
    file(&directory).save(&seen, &*user.environment).unwrap();
    assert_eq!(file(&directory).load().unwrap(), Some(seen.clone()));
    let entries: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [path] = &entries[..] else { panic!("{entries:?}") };
    assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);
    // Neither the archive's id nor a session shows.
    assert!(!path.to_string_lossy().contains("07070707"));
    let bytes = std::fs::read(path).unwrap();
    assert!(!bytes.windows(16).any(|window| window == ARCHIVE || window == [1; 16]));
    // An attacker that alters it makes the user forget, not remember wrongly.
    for at in 0..bytes.len() {
        let mut altered = bytes.clone();
        altered[at] ^= 1;
        assert!(matches!(RollbackState::decode(&altered), Err(Error::Damaged(_)) | Ok(_)));
        if at % 97 == 0 {
            std::fs::write(path, &altered).unwrap();
            assert!(matches!(file(&directory).load(), Err(Error::Damaged(_))), "at={at}");
        }
    }
    for length in [0, 10, 40, bytes.len() - 1] {
        std::fs::write(path, &bytes[..length]).unwrap();
        assert!(matches!(file(&directory).load(), Err(Error::Damaged(_))));
    }
    let options = RollbackOptions { directory: Some(directory), ..RollbackOptions::default() };
    assert!(RollbackCheck::at(&options, &key(), &ARCHIVE).seen.is_none(), "a warning, no error");
}

#[test]
fn what_is_remembered_goes_where_it_was_whatever_hides_the_path() {
    let user = User::new(3);
    let (directory, aside) = (user.home.path().join("seen"), user.home.path().join("aside"));
    let seen = RollbackState {
        time: Timestamp { seconds: 1, nanos: 0 },
        header_sequence: 3,
        trail: vec![mark(1, 2, 3)],
        entry: None,
    };
    let opened = file(&directory);
    std::fs::rename(&directory, &aside).unwrap();
    std::fs::create_dir(&directory).unwrap();
    opened.save(&seen, &*user.environment).unwrap();
    assert_eq!(opened.load().unwrap(), Some(seen.clone()));
    assert_eq!(file(&aside).load().unwrap(), Some(seen));
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
}

#[test]
fn a_directory_that_cannot_be_written_costs_no_open() {
    let user = User::new(2);
    let storage = user.create();
    let blocked = user.home.path().join("file");
    std::fs::write(&blocked, b"").unwrap();
    let options = RollbackOptions { directory: Some(blocked.join("below")), ..RollbackOptions::default() };
    let (_, witness) = user.open_with(&storage, false, &options).unwrap();
    witness.remember();
}

#[test]
fn an_older_copy_is_refused_until_it_is_accepted() {
    for seed in seeds(10..=17) {
        let user = User::new(seed);
        let storage = user.create();
        let mut copies = Vec::new();
        for _ in 0..1 + user.below(6) {
            copies.push(copy(&storage));
            user.session(&storage);
        }
        for (age, old) in copies.iter().enumerate() {
            for read_only in [true, false] {
                let before = old.contents();
                let error = user.open_with(&copy(old), read_only, &user.options()).err().unwrap();
                assert!(
                    matches!(&error, Error::OlderCopy(text) if text.contains("discards all later changes") && !text.contains("accept")),
                    "age={age}: {error}"
                );
                assert!(old.contents() == before);
                // A fork is something else, and accepting it does not cover this.
                let options = RollbackOptions { accept_fork: true, ..user.options() };
                assert!(user.open_with(&copy(old), read_only, &options).is_err());
            }
        }
        // The newest one still opens.
        user.open(&storage).unwrap();
        let old = copy(&copies[0]);
        user.open_with(&old, false, &RollbackOptions { accept_older: true, ..user.options() }).unwrap();
        user.open(&old).unwrap();
    }
}

#[test]
fn copies_written_apart_are_refused_until_that_is_accepted() {
    let mut shorter = 0;
    for seed in seeds(40..=51) {
        let (user, other) = (User::new(seed), User::new(seed + 1000));
        let storage = user.create();
        for _ in 0..user.below(4) {
            user.session(&storage);
        }
        let apart = copy(&storage);
        // With odd seeds the other one is shorter. With even ones it is mostly longer, up to so
        // long that the ring has no common record.
        let (own, others) = if seed % 2 == 1 { (6, 1) } else { (1 + user.below(3), 1 + other.below(40)) };
        (0..own).for_each(|_| user.session(&storage));
        (0..others).for_each(|_| other.session(&apart));
        shorter += u64::from(others < own);
        for read_only in [true, false] {
            let error = user.open_with(&apart, read_only, &user.options()).err().unwrap();
            assert!(
                matches!(&error, Error::ForkedCopy(text) if text.contains("diverged") && !text.contains("accept")),
                "{error}"
            );
            let older = RollbackOptions { accept_older: true, ..user.options() };
            assert!(matches!(user.open_with(&apart, read_only, &older), Err(Error::ForkedCopy(_))));
        }
        user.open_with(&apart, false, &RollbackOptions { accept_fork: true, ..user.options() }).unwrap();
        user.open(&apart).unwrap();
        assert!(user.open(&storage).is_err(), "now the first one is the fork");
    }
    assert!(shorter >= 6);
}

/// The archive after a commit and after each of five entries of its log, and the writer with its
/// rollback guard.
fn logged(user: &User) -> (Vec<Arc<SimulatedStorage>>, Arc<Volume>, RollbackGuard) {
    let storage = user.create();
    let (volume, witness) = user.open(&storage).unwrap();
    user.change(&volume);
    volume.commit().unwrap();
    let mut copies = vec![copy(&storage)];
    for _ in 0..5 {
        user.log(&volume);
        copies.push(copy(&storage));
    }
    assert_eq!(volume.log_use().entries, 5);
    (copies, volume, witness)
}

/// SEEN-5: the record is the same in all of them.
#[test]
fn a_copy_that_lacks_the_last_entries_of_the_log_is_an_older_one() {
    let user = User::new(90);
    let (copies, _volume, witness) = logged(&user);
    witness.remember();
    // Every byte of the last one by random ones.
    let cut = copy(&copies[5]);
    let entry = (LOG.0..LOG.1).rfind(|&block| {
        let mut bytes = vec![0; BLOCK as usize];
        copies[5].read_at(block * BLOCK, &mut bytes).unwrap();
        user.cipher().open_entry_head(block, &bytes).unwrap().is_some()
    });
    let mut noise = vec![0; BLOCK as usize];
    user.environment.fill_random(&mut noise).unwrap();
    cut.write_at(entry.unwrap() * BLOCK, &noise).unwrap();
    for (number, old) in copies[..5].iter().chain([&cut]).enumerate() {
        for read_only in [true, false] {
            let before = old.contents();
            let error = user.open_with(old, read_only, &user.options()).err().unwrap();
            let told = matches!(&error, Error::OlderCopy(text) if text.contains("and 5 entries of its log"));
            assert!(told, "{number}: {error}");
            // But for room at the end that no record names, which an opening for writing cuts off.
            assert!(before.starts_with(&old.contents()));
            let fork = RollbackOptions { accept_fork: true, ..user.options() };
            assert!(user.open_with(old, read_only, &fork).is_err());
        }
    }
    user.open_with(&copies[5], true, &user.options()).unwrap();
    user.open_with(&copies[2], false, &RollbackOptions { accept_older: true, ..user.options() }).unwrap();
    user.open(&copies[2]).unwrap();
}

/// LINEAGE-1: the last one may be in the host's cache alone.
#[test]
fn a_reader_remembers_the_entry_before_the_last() {
    let writer = User::new(91);
    let (copies, ..) = logged(&writer);
    for seen in 1..=5 {
        let user = User::new(92);
        let open = |number: usize| user.open_with(&copies[number], true, &user.options()).map(drop);
        open(seen).unwrap();
        open(seen - 1).unwrap();
        for (number, _) in copies.iter().enumerate().take(seen - 1) {
            assert!(matches!(open(number), Err(Error::OlderCopy(_))), "{number} of {seen}");
        }
        // Remembering more entries is an advance.
        open(5).unwrap();
        open(4).unwrap();
        assert!(open(3).is_err());
    }
}

/// SEEN-5: the same number and another tag; and a session that began on a copy without the
/// remembered entry.
#[test]
fn a_log_that_was_written_apart_is_a_fork() {
    let user = User::new(93);
    let (copies, volume, witness) = logged(&user);
    witness.remember();
    let record = volume.durable_point().unwrap().mark;
    let other = copy(&copies[0]);
    let pager = Pager::new(other.clone(), user.cipher(), 1 << 20);
    let body = LogEntry { next_ino: 100, inodes: 1, ..LogEntry::default() }.encode();
    let (mut previous, mut address) = ([0; 16], LOG.0);
    for number in 1..=6 {
        let blocks = entry_blocks(body.len());
        let head = EntryHead {
            generation: record.generation,
            record: record.tag,
            number,
            length: body.len() as u32,
            previous,
            time: Timestamp::default(),
            blocks: blocks as u16,
        };
        previous = pager.write_entry(&head, address, &body).unwrap();
        address += blocks;
    }
    for read_only in [true, false] {
        assert!(matches!(user.open_with(&other, read_only, &user.options()), Err(Error::ForkedCopy(_))));
    }
    for (entries, fork) in [(5, false), (4, true), (0, true)] {
        let stranger = User::new(94 + entries as u64);
        let apart = copy(&copies[entries]);
        for _ in 0..3 {
            stranger.session(&apart);
            let looked = RollbackCheck::at(&user.options(), &key(), &ARCHIVE);
            let open = txn::OpenOptions { read_only: true, memory: 32 << 20 };
            let volume = Volume::open(apart.clone(), user.cipher(), user.environment.clone(), 1, &open).unwrap();
            let judged = judge(&volume, 1, looked.seen.as_ref(), &user.options(), true);
            assert_eq!(matches!(judged, Err(Error::ForkedCopy(_))), fork, "{entries}: {judged:?}");
            assert!(fork || judged.is_ok());
        }
    }
}

/// Files of programs from before the log, and of this one for an archive without entries.
#[test]
fn what_has_no_entry_is_remembered_as_before() {
    let seen =
        RollbackState { time: Timestamp::default(), header_sequence: 3, trail: vec![mark(1, 2, 3)], entry: None };
    let bytes = seen.encode();
    assert_eq!((bytes[0], bytes.len()), (1, 80));
    assert_eq!(RollbackState::decode(&bytes).unwrap(), seen);
    let with_entry = RollbackState { entry: Some(EntryMark { number: 1, tag: [9; 16] }), ..seen };
    let bytes = with_entry.encode();
    assert_eq!((bytes[0], bytes.len()), (2, 104));
    assert_eq!(RollbackState::decode(&bytes).unwrap(), with_entry);
    // Number 0, a reserved field, too short, too long.
    for (at, byte) in [(80, 0), (84, 1)] {
        let mut wrong = bytes.clone();
        wrong[at] = byte;
        assert!(RollbackState::decode(&wrong).is_err());
    }
    assert!(
        RollbackState::decode(&bytes[..103]).is_err() && RollbackState::decode(&[&bytes[..], &[0]].concat()).is_err()
    );
}

/// Sessions of other machines, also more of them than the ring holds, are no reason for an alarm.
#[test]
fn sessions_of_other_machines_are_no_fork() {
    let (user, other) = (User::new(80), User::new(81));
    let storage = user.create();
    for _ in 0..4 {
        user.session(&storage);
        for _ in 0..1 + other.below(50) {
            other.session(&storage);
        }
    }
    user.open_with(&storage, true, &user.options()).unwrap();
}

/// SEEN-1, SEEN-2: power cuts and process deaths at any storage operation, with the memory as it
/// was at that moment, are never an alarm.
#[test]
fn no_crash_raises_an_alarm() {
    let mut crashes = 0;
    for seed in seeds(100..=106) {
        let user = User::new(seed);
        let mut storage = user.create();
        for _ in 0..25 {
            // Crash points of this session, each with the rollback state at that time.
            let images: Arc<parking_lot::Mutex<Vec<Image>>> = Arc::default();
            let state = user.options().directory.unwrap();
            let remembered = {
                let state = state.clone();
                move || match std::fs::read_dir(&state).ok().and_then(|mut all| all.next()) {
                    Some(entry) => std::fs::read(entry.unwrap().path()).unwrap(),
                    None => Vec::new(),
                }
            };
            let hook = {
                let (weak, images, remembered) = (Arc::downgrade(&storage), images.clone(), remembered.clone());
                let chance = SeededEnvironment::new(user.environment.next_u64());
                move |_: &crate::storage::simulated::OpKind| {
                    let Some(storage) = weak.upgrade() else { return };
                    if chance.next_u64().is_multiple_of(3) && images.lock().len() < 12 {
                        let crashed = match chance.next_u64() % 3 {
                            0 => storage.process_death(),
                            _ => storage.crash_random(&mut || chance.next_u64()),
                        };
                        images.lock().push((crashed, remembered()));
                    }
                }
            };
            storage.on_op(Box::new(hook));
            let (volume, witness) = user.open(&storage).unwrap();
            for _ in 0..1 + user.below(6) {
                user.change(&volume);
                match user.below(6) {
                    0 => {}
                    1 => witness.remember(),
                    2 | 3 => user.log(&volume),
                    _ => drop(volume.commit().unwrap()),
                }
            }
            if user.below(2) == 0 {
                volume.close().unwrap();
                witness.remember();
            }
            storage.on_op(Box::new(|_| {}));
            drop((volume, witness));
            let now = remembered();
            let path = std::fs::read_dir(&state).unwrap().next().unwrap().unwrap().path();
            let images = std::mem::take(&mut *images.lock());
            for (image, bytes) in &images {
                crashes += 1;
                if bytes.is_empty() {
                    std::fs::remove_file(&path).unwrap();
                } else {
                    std::fs::write(&path, bytes).unwrap();
                }
                // A reader first, and then the power fails: a record that it saw in the host's
                // cache may be lost (LINEAGE-1).
                if user.below(2) == 0 {
                    let reader = user.open_with(image, true, &user.options());
                    if let Err(error) = reader {
                        panic!("alarm for a reader: {error}");
                    }
                    let later = image.crash_random(&mut || user.environment.next_u64());
                    if let Err(error) = user.open(&later) {
                        panic!("alarm after a reader: {error}");
                    }
                } else if let Err(error) = user.open(image) {
                    panic!("alarm: {error}");
                }
                // The file may have been recreated under the same name.
                std::fs::write(&path, &now).unwrap();
            }
            // Goes on after a last power cut.
            storage = storage.crash_random(&mut || user.environment.next_u64());
        }
    }
    println!("{crashes} crashes");
    assert!(crashes > 1000);
}

/// Pending uploads are not yet in the remote archive, which would be reported as an older copy.
#[test]
fn what_is_kept_back_is_not_remembered_before_it_is_there() {
    let user = User::new(202);
    let storage = user.create();
    let (volume, witness) = user.open(&storage).unwrap();
    witness.remember();
    let before = copy(&storage);
    user.change(&volume);
    volume.commit().unwrap();
    storage.set_pending_upload(4096);
    witness.remember();
    assert!(user.open(&copy(&before)).is_ok(), "others have no more than this");
    storage.set_pending_upload(0);
    witness.remember();
    assert!(matches!(user.open(&before).err(), Some(Error::OlderCopy(_))));
}

/// SEEN-2: a remembered commit that lost a page is damage; without the memory it would be undone in
/// silence.
#[test]
fn a_remembered_commit_is_not_undone() {
    let user = User::new(200);
    let storage = user.create();
    let (volume, witness) = user.open(&storage).unwrap();
    user.change(&volume);
    volume.commit().unwrap();
    witness.remember();
    let record = volume.durable();
    assert!(!record.two_barrier && !record.closed);
    drop((volume, witness));
    storage.write_at(record.allocated[0].0.offset(), &[0; 64]).unwrap();
    let stranger = User::new(201);
    let undone = stranger.open(&copy(&storage)).unwrap().0.fallback();
    assert!(undone.is_some());
    let error = user.open(&storage).err().unwrap();
    assert!(matches!(&error, Error::Damaged(text) if text.contains("was durable")), "{error}");
}

/// A header put back from before a change of the passphrase revives the old one.
#[test]
fn an_older_header_is_refused() {
    let user = User::new(210);
    let storage = user.create();
    let open = txn::OpenOptions { read_only: true, memory: 32 << 20 };
    let environment: Arc<dyn Environment> = user.environment.clone();
    let volume = Volume::open(storage, user.cipher(), environment, 1, &open).unwrap();
    let none = RollbackOptions::default();
    assert!(!judge(&volume, 1, None, &none, false).unwrap());
    // Remembered alone: nothing was committed since the change.
    let mark = volume.opened_at().unwrap();
    let seen = RollbackState { time: Timestamp::default(), header_sequence: 2, trail: vec![mark], entry: None };
    assert!(
        matches!(judge(&volume, 1, Some(&seen), &none, false), Err(Error::OlderCopy(text)) if text.contains("header"))
    );
    assert!(judge(&volume, 1, Some(&seen), &RollbackOptions { accept_older: true, ..none.clone() }, false).unwrap());
    assert!(!judge(&volume, 2, Some(&seen), &none, false).unwrap());
    // The record alone: nothing was remembered. Its number is 1.
    assert!(matches!(judge(&volume, 0, None, &none, false), Err(Error::OlderCopy(_))));
}
