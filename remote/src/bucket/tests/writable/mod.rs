//! Storage with one record per barrier: a new reader finds all data of successful barriers after a
//! crash or a takeover at any request.

mod concurrent_writes;
mod costs;
mod crash;
mod offline;

use std::sync::Arc;

use lockbox::keys::RollbackOptions;
use lockbox::storage::Storage;
use lockbox::{Error, Result};

pub(super) use self::crash::overtaken;
use super::super::objects::ObjectStore;
use super::super::session::WriterSession;
use super::super::writable::BucketWriter;
use super::super::{Bucket, DirectoryStore, open};
use super::GRACE;
use super::simulated::{Dice, World};
use super::{Compared, options, seed, somebody};
use crate::DirectoryTrust;

pub(super) const NAME: &str = "s3://b/p";

pub(super) fn whole(storage: &dyn Storage) -> Vec<u8> {
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(0, &mut bytes).unwrap();
    bytes
}

/// What somebody finds who has nothing but the bucket.
pub(super) fn found(world: &Arc<World>) -> Vec<u8> {
    whole(&**open(world.store(9), NAME.into(), &options()).unwrap().unwrap().file())
}

pub(super) fn living(world: &Arc<World>, actor: u64) -> Result<BucketWriter> {
    BucketWriter::open(world.store(actor), NAME.into(), &options(), true)
}

/// An archive of so many blocks, each of its number.
pub(super) fn made(world: &Arc<World>, blocks: u8) -> Vec<u8> {
    let bytes: Vec<u8> = (1..=blocks).flat_map(|number| [number; 4096]).collect();
    published(world, &bytes);
    bytes
}

/// An archive of these bytes.
pub(super) fn published(world: &Arc<World>, bytes: &[u8]) {
    let mut bucket = Bucket::open(world.store(1), NAME.into(), &options(), true).unwrap();
    bucket.create_empty().unwrap().write_at(0, bytes).unwrap();
    bucket.publish().unwrap();
}

/// The same that a writer came to and went from: what who comes next finds in the newest record is
/// nothing, whoever came before.
fn left(world: &Arc<World>, blocks: u8) -> Vec<u8> {
    let bytes = made(world, blocks);
    drop(living(world, 1).unwrap());
    bytes
}

pub(super) fn spent(world: &World) -> Vec<String> {
    world.with(|state| std::mem::take(&mut state.requests))
}

/// Changes the storage and the model alike.
fn change(dice: &mut Dice, storage: &dyn Storage, now: &mut Vec<u8>) -> Result<()> {
    let length = 1 + if dice.one_in(8) { dice.below(6 << 20) } else { dice.below(30_000) };
    let aligned = if dice.one_in(3) { 1 } else { 4096 };
    let offset = dice.below(3 << 20) / aligned * aligned;
    let mut compared = Compared { storage, now };
    match dice.below(10) {
        0 => compared.punch(offset, length),
        1 => compared.set_len(offset + 4096),
        2 => compared.allocate(offset, length),
        _ => {
            let data = dice.noise(length as usize);
            compared.write(offset, &data)
        }
    }
}

#[test]
fn what_a_barrier_said_is_read_by_a_fresh_machine_and_nothing_else_is() {
    let first = seed(1);
    for seed in first..first + 12 {
        let mut dice = Dice::of(seed);
        let world = World::new(seed, 0);
        let mut durable = made(&world, 3);
        for _ in 0..3 {
            let mut session = WriterSession::open(super::store(&world, 1), somebody(), true).unwrap();
            // Checkpoints now and then.
            session.least_changes = 20 * dice.below(30) as usize;
            session.remove_expired();
            let mut storage = BucketWriter::from_session(session, &options(), Arc::default()).unwrap();
            storage.buffer.rebase_after = dice.below(4) * 500;
            let mut now = durable.clone();
            for _ in 0..4 + dice.below(8) {
                for _ in 0..dice.below(12) {
                    change(&mut dice, &storage, &mut now).unwrap();
                }
                assert!(whole(&storage) == now, "seed {seed}: the writer");
                assert!(found(&world) == durable, "seed {seed}: before the barrier");
                storage.barrier().unwrap();
                durable.clone_from(&now);
                assert!(found(&world) == durable, "seed {seed}: after it");
                assert!(whole(&storage) == now, "seed {seed}: the writer after it");
                if dice.one_in(4) {
                    storage.evict(0, u64::MAX).unwrap();
                    assert!(whole(&storage) == now, "seed {seed}: the writer by the store");
                }
            }
            // What no barrier covered goes with the writer.
            change(&mut dice, &storage, &mut now).unwrap();
            drop(storage);
            assert!(found(&world) == durable, "seed {seed}: afterwards");
            world.with(|state| state.clock += dice.below(2 * GRACE));
        }
    }
}

#[test]
fn only_what_is_there_is_changed() {
    let world = World::new(1, 0);
    let none = living(&world, 1).err().unwrap();
    assert!(matches!(&none, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound), "{none}");
    assert_eq!(world.with(|state| state.objects.len()), 0, "nothing is made where nothing is");
    drop(Bucket::open(world.store(1), NAME.into(), &options(), false).unwrap());
    let none = living(&world, 1).err().unwrap();
    assert!(matches!(none, Error::NotArchive(_)), "{none}");
    made(&world, 1);
    let one = living(&world, 1).unwrap();
    let message = BucketWriter::open(world.store(2), NAME.into(), &options(), false).err().unwrap();
    assert!(matches!(&message, Error::InUse(why) if why.contains("a writer on")), "{message}");
    drop(one);
    drop(BucketWriter::open(world.store(2), NAME.into(), &options(), false).unwrap());
}

/// An archive with keys, trees and recovery, made and changed in a directory of objects.
#[test]
fn what_an_archive_synced_is_read_by_a_fresh_machine_in_a_directory() {
    use lockbox::archive::{Archive, CreateOptions, OpenOptions};
    use lockbox::crypto::Passphrase;
    use lockbox::crypto::kdf::KdfCost;
    use lockbox::exchange::resolve;
    use lockbox::fs::ROOT_INO;
    use lockbox::fs::{Creator, mode};
    use lockbox::keys::{Secrets, UnlockLimits, unlock_with};

    let place = tempfile::tempdir().unwrap();
    let objects = || -> Box<dyn ObjectStore> {
        Box::new(DirectoryStore::open(place.path(), Some(DirectoryTrust::Trusted)).unwrap())
    };
    let creator = Creator { uid: 1, gid: 1, umask: None };
    let passphrase = || Passphrase::new(b"a passphrase".to_vec());
    let mut bucket = Bucket::open(objects(), NAME.into(), &options(), false).unwrap();
    let storage = bucket.create_empty().unwrap();
    Archive::create_in(
        &storage,
        &passphrase(),
        &CreateOptions { kdf: KdfCost::FLOOR, creator },
        &RollbackOptions::default(),
    )
    .unwrap();
    assert!(matches!(
        Archive::create_in(
            &storage,
            &passphrase(),
            &CreateOptions { kdf: KdfCost::FLOOR, creator },
            &RollbackOptions::default()
        ),
        Err(Error::Exists)
    ));
    drop(storage);
    bucket.publish().unwrap();
    let read = || -> Arc<dyn Storage> { open(objects(), NAME.into(), &options()).unwrap().unwrap().file().clone() };
    // Neither log nor ring is sent before it says something.
    let sent: u64 = {
        let listed = objects().list("", "", 1000).unwrap();
        listed.iter().map(|object| object.bytes).sum()
    };
    assert!(sent < 400 << 10, "{sent}");
    let key = unlock_with(&read(), &Secrets::from(passphrase()), &UnlockLimits::default()).unwrap();
    let content = |number: u64| vec![number as u8; 30_000];
    let check = |synced: u64| {
        let archive = Archive::open(&read(), &key, &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
        let fs = archive.file_system();
        for number in 0..synced {
            let found = resolve(fs, format!("file{number}").as_bytes()).unwrap();
            assert_eq!(found.size, 30_000);
            let mut bytes = Vec::new();
            fs.read_into(found.ino, 0, 30_000, &mut bytes).unwrap();
            assert!(bytes == content(number), "{number} of {synced}");
        }
        assert!(resolve(fs, format!("file{synced}").as_bytes()).is_err());
    };
    let mut synced = 0;
    for round in 0..3 {
        let living = BucketWriter::open(objects(), NAME.into(), &options(), true).unwrap();
        let storage: Arc<dyn Storage> = Arc::new(living);
        let archive = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
        for _ in 0..5 {
            let name = format!("file{synced}");
            let fs = archive.file_system();
            let made = fs.make_node(ROOT_INO, name.as_bytes(), mode::REGULAR | 0o600, 0, creator).unwrap();
            fs.write(made.ino, 0, &content(synced)).unwrap();
            check(synced);
            fs.sync().unwrap();
            synced += 1;
            check(synced);
        }
        if round == 1 {
            // As if it were killed.
            std::mem::forget((archive, storage));
        } else {
            archive.close().unwrap();
            drop(storage);
        }
        check(synced);
    }
    let archive = Archive::open(&read(), &key, &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
    let report = archive.check(true, &mut |_| {}).unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}
