//! What an archive in a store costs, as far as it is exact: requests and bytes. `bench/remote.sh` measures the rest beside it.

use std::sync::Arc;

use lockbox::archive::{Archive, CreateOptions, OpenOptions};
use lockbox::crypto::Passphrase;
use lockbox::crypto::kdf::KdfCost;
use lockbox::exchange::resolve;
use lockbox::format::ROOT_INO;
use lockbox::fs::{Creator, mode};
use lockbox::keys::{Secrets, UnlockLimits, UnlockedKey, unlock_with};
use lockbox::storage::Storage;

use super::super::living::Living;
use super::super::session::Session;
use super::super::{Bucket, open};
use super::simulated::{Dice, World};
use super::{options, somebody, store};

const NAME: &str = "s3://b/p";
/// Of a page of file data: a head and 128 KiB.
const PAGE: u64 = 33 * 4096;
const CREATOR: Creator = Creator { uid: 1, gid: 1, umask: None };

fn passphrase() -> Passphrase {
    Passphrase::new(b"a passphrase".to_vec())
}

/// What nothing makes smaller.
fn noise(dice: &mut Dice, bytes: usize) -> Vec<u8> {
    let mut noise = Vec::with_capacity(bytes + 4);
    while noise.len() < bytes {
        noise.extend_from_slice(&(dice.below(1 << 31) as u32).to_le_bytes()[..3]);
    }
    noise.truncate(bytes);
    noise
}

fn reader(world: &Arc<World>) -> Arc<dyn Storage> {
    Arc::new(open(world.store(9), NAME.into(), &options()).unwrap().unwrap())
}

fn writer(world: &Arc<World>) -> Arc<dyn Storage> {
    Arc::new(Living::open(world.store(1), NAME.into(), &options(), true).unwrap())
}

/// Requests by their first word, and bytes to the store and from it, since the last call.
#[derive(Debug, Default, PartialEq)]
struct Spent {
    creations: usize,
    reads: usize,
    lists: usize,
    others: usize,
    sent: u64,
    came: u64,
}

fn spent(world: &World) -> Spent {
    world.with(|state| {
        let mut spent =
            Spent { sent: std::mem::take(&mut state.sent), came: std::mem::take(&mut state.came), ..Spent::default() };
        for line in std::mem::take(&mut state.requests) {
            match line.split(' ').nth(2) {
                Some("create") => spent.creations += 1,
                Some("get") => spent.reads += 1,
                Some("list") => spent.lists += 1,
                _ => spent.others += 1,
            }
        }
        spent
    })
}

/// An archive in the store with one file of noise.
fn archive(world: &Arc<World>, bytes: usize) -> UnlockedKey {
    let mut bucket = Bucket::open(world.store(1), NAME.into(), &options(), true).unwrap();
    let storage = bucket.fresh().unwrap();
    Archive::create_in(&storage, &passphrase(), &CreateOptions { kdf: KdfCost::FLOOR, creator: CREATOR }).unwrap();
    drop(storage);
    bucket.publish().unwrap();
    let key = unlock_with(&reader(world), &Secrets::from(passphrase()), &UnlockLimits::default()).unwrap();
    let storage = writer(world);
    let archive = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    let file = fs.make_node(ROOT_INO, b"large", mode::REGULAR | 0o600, 0, CREATOR).unwrap();
    let mut dice = Dice::of(1);
    for at in (0..bytes).step_by(1 << 20) {
        fs.write(file.ino, at as u64, &noise(&mut dice, (bytes - at).min(1 << 20))).unwrap();
    }
    fs.sync().unwrap();
    archive.close().unwrap();
    drop(storage);
    spent(world);
    key
}

/// Goals: at most 5 requests for an opening; 4 round trips for a page of a tree that nobody knows, one of a tree that is known.
#[test]
fn an_archive_in_a_store_is_opened_with_few_requests_and_a_page_costs_one() {
    let world = World::new(1, 0);
    let key = archive(&world, 64 << 20);
    let storage = reader(&world);
    let opening = spent(&world);
    // The marker, a list, the newest record, and what the file begins with.
    assert_eq!((opening.lists, opening.creations, opening.others), (1, 0, 0));
    assert!(opening.reads <= 4, "{opening:?}");
    let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
    let archive = Archive::open(&storage, &key, &reading).unwrap();
    let fs = archive.file_system();
    let opened = spent(&world);
    let ino = resolve(fs, b"large").unwrap().ino;
    let mut bytes = Vec::new();
    let mut page = |at: u64| {
        bytes.clear();
        fs.read_into(ino, at, 4096, &mut bytes).unwrap();
        spent(&world).reads
    };
    let unknown = page(20 << 20);
    println!("{opened:?}, then {unknown}");
    for at in [50 << 20, 3 << 20, 40 << 20, 11 << 20] {
        let known = page(at);
        println!("{known}");
    }
}

/// Goal: one request up to 4 MiB.
#[test]
fn a_sync_of_an_archive_is_one_request() {
    let world = World::new(1, 0);
    let key = archive(&world, 8 << 20);
    let storage = writer(&world);
    let archive = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    let ino = resolve(fs, b"large").unwrap().ino;
    let mut dice = Dice::of(2);
    for size in [1, 4096, 4096, 4096, 1 << 20, 7 << 19] {
        let at = dice.below((8 << 20) - size);
        fs.write(ino, at, &noise(&mut dice, size as usize)).unwrap();
        spent(&world);
        fs.sync().unwrap();
        let sync = spent(&world);
        println!("{size}: {sync:?}");
        assert_eq!((sync.creations, sync.reads, sync.lists, sync.others), (1, 0, 0, 0), "{size}: {sync:?}");
    }
    fs.sync().unwrap();
    assert_eq!(spent(&world), Spent::default());
}

/// Goal: at most 1.02 times the data.
#[test]
fn what_is_written_goes_up_once_and_with_little_beside_it() {
    let world = World::new(1, 0);
    archive(&world, 1);
    let storage = writer(&world);
    let before = storage.len().unwrap();
    spent(&world);
    let mut dice = Dice::of(3);
    let data = 64 << 20;
    for at in (0..data).step_by(1 << 20) {
        storage.write_at(before + at, &noise(&mut dice, 1 << 20)).unwrap();
    }
    storage.barrier().unwrap();
    let written = spent(&world);
    assert!(written.sent * 1000 <= data * 1002, "{written:?}");
    // Segments of 8 MiB, and the record.
    assert_eq!((written.creations, written.reads, written.lists, written.others), (9, 0, 0, 0));
}

/// Goal for random overwrites, what goes up when writers go included: at most 2.2 times what was written. And what stays is at most three times what is needed.
#[test]
fn random_overwrites_send_little_more_than_twice_what_was_written() {
    let world = World::new(1, 0);
    archive(&world, 1);
    let pages = 400;
    let storage = writer(&world);
    let mut dice = Dice::of(4);
    let page = noise(&mut dice, PAGE as usize);
    let start = storage.len().unwrap();
    for number in 0..pages {
        storage.write_at(start + number * PAGE, &page).unwrap();
    }
    drop(storage);
    spent(&world);
    let mut written = 0;
    for _ in 0..12 {
        let storage = writer(&world);
        for _ in 0..pages / 4 {
            storage.write_at(start + dice.below(pages) * PAGE, &page).unwrap();
            written += PAGE;
        }
        storage.barrier().unwrap();
        drop(storage);
        let session = Session::open(store(&world, 7), somebody(), true).unwrap();
        let needed: u64 = session.map().sized().map(|(_, blocks)| u64::from(blocks)).sum();
        println!("{needed} {}", session.map().live());
    }
    let sent = world.with(|state| state.sent);
    println!("{} of {written}", sent as f64 / written as f64);
    assert!(sent * 10 <= written * 22);
}
