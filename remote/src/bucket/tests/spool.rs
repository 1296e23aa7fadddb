//! Upload spool: refused data is kept, sent first or kept for its user, and never lost or
//! reordered.

use std::error::Error as _;
use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use parking_lot::{Condvar, Mutex};
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::super::layout::Incarnation;
use super::super::map::ObjectId;
use super::super::objects::{ListedObject, ObjectCreation, ObjectRange, ObjectStore, object_path};
use super::super::session::WriterSession;
use super::super::spool::{MAX_ENTRY, PendingUpload, UploadSpool, discard, pending_uploads};
use super::super::writable::BucketWriter;
use super::super::{Bucket, collect_garbage, open_pending_upload, open_store};
use super::GRACE;
use super::nth_request::{How, counting};
use super::simulated::World;
use super::writable::{NAME, found, living, made, published, whole};
use super::{Compared, options, somebody, store};
use crate::RemoteOptions;
use crate::range_source::{RemoteError, RemoteResult};

const HERE: Incarnation = [7; 16];

fn at(place: &Path) -> RemoteOptions {
    RemoteOptions { spool_directory: Some(place.to_owned()), ..options() }
}

/// A mount's writer of this host.
fn mounted(world: &Arc<World>, place: &Path) -> Result<BucketWriter> {
    let living = BucketWriter::open(world.store(2), NAME.into(), &at(place), true)?;
    living.retry_forever();
    Ok(living)
}

fn is_away(world: &World, away: bool) {
    world.with(|state| state.away = away);
}

/// What this host alone has.
fn read(world: &Arc<World>, place: &Path) -> Result<Vec<u8>> {
    open_pending_upload(world.store(9), NAME.into(), &at(place)).map(|file| whole(&file))
}

fn kept(place: &Path) -> Vec<PendingUpload> {
    pending_uploads(place).unwrap()
}

/// Two commits of a mount that leaves while its store is away: within a record, and with segments.
/// Gives what the archive is to be.
fn leave(world: &Arc<World>, place: &Path, base: &[u8]) -> Vec<u8> {
    let mut now = base.to_vec();
    let living = mounted(world, place).unwrap();
    living.write_at(4096, &[0xB1; 4096]).unwrap();
    now[4096..8192].fill(0xB1);
    is_away(world, true);
    living.spool_on_timeout(None);
    living.barrier().unwrap();
    living.write_at(8192, &vec![0xB2; 10 << 20]).unwrap();
    now.resize(8192 + (10 << 20), 0);
    now[8192..].fill(0xB2);
    living.barrier().unwrap();
    assert!(whole(&living) == now, "what is kept is read");
    assert!(living.pending_upload_bytes().unwrap() > 10 << 20);
    drop(living);
    now
}

#[test]
fn what_a_store_did_not_take_is_sent_by_the_next_writer_here_before_anything_else() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let base = made(&world, 3);
    let now = leave(&world, place.path(), &base);
    let waiting = kept(place.path());
    assert!(waiting.len() == 1 && !waiting[0].refused && !waiting[0].used && waiting[0].address == NAME, "{waiting:?}");
    // Another one that finds the store away loses nothing of it.
    assert!(mounted(&world, place.path()).is_err());
    assert_eq!(kept(place.path()), waiting);
    is_away(&world, false);
    assert!(found(&world) == base);
    assert!(read(&world, place.path()).unwrap() == now, "it can be looked at before");
    let next = mounted(&world, place.path()).unwrap();
    assert!(next.notice().is_none());
    assert!(found(&world) == now && whole(&next) == now);
    assert_eq!(next.pending_upload_bytes().unwrap(), 0);
    next.write_at(0, &[7; 4096]).unwrap();
    next.barrier().unwrap();
    drop(next);
    assert!(found(&world)[..4096] == [7; 4096] && found(&world)[4096..] == now[4096..]);
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "an empty file says nothing");
    assert!(matches!(read(&world, place.path()), Err(Error::Io { .. })));
    // Every other kind of writer sends it, too.
    let base = found(&world);
    let now = leave(&world, place.path(), &base);
    is_away(&world, false);
    drop(Bucket::open(world.store(3), NAME.into(), &at(place.path()), true).unwrap());
    assert!(found(&world) == now);
}

/// A barrier of which the result is awaited would hang without the limit.
#[test]
fn a_mount_that_ends_by_force_keeps_at_once_what_it_would_wait_for_without_end() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    made(&world, 3);
    let endless = RemoteOptions { timeout: None, ..at(place.path()) };
    let living = BucketWriter::open(world.store(2), NAME.into(), &endless, true).unwrap();
    living.retry_forever();
    living.write_at(0, &[5; 4096]).unwrap();
    is_away(&world, true);
    living.spool_on_timeout(Some(Duration::ZERO));
    living.barrier().unwrap();
    drop(living);
    is_away(&world, false);
    assert!(read(&world, place.path()).unwrap()[..4096] == [5; 4096]);
    assert_eq!(kept(place.path()).len(), 1);
}

#[test]
fn sending_may_end_at_any_request_and_nothing_of_it_is_lost() {
    let all = {
        let place = tempfile::tempdir().unwrap();
        let world = World::new(1, 0);
        leave(&world, place.path(), &made(&world, 3));
        is_away(&world, false);
        let (objects, asked) = counting(&world, u64::MAX, How::Dies);
        drop(BucketWriter::open(objects, NAME.into(), &at(place.path()), true).unwrap());
        asked.load(Ordering::Relaxed)
    };
    assert!(all > 10, "{all}");
    for end in 0..all {
        for how in [How::Dies, How::Silent, How::Away(1, true), How::Away(1, false)] {
            let place = tempfile::tempdir().unwrap();
            let world = World::new(1, 0);
            let now = leave(&world, place.path(), &made(&world, 3));
            is_away(&world, false);
            let (objects, _) = counting(&world, end, how);
            drop(BucketWriter::open(objects, NAME.into(), &at(place.path()), true));
            let next = mounted(&world, place.path()).unwrap();
            assert!(next.notice().is_none(), "request {end} of {all}");
            assert!(found(&world) == now, "request {end} of {all}");
            drop(next);
            assert_eq!(kept(place.path()), [], "request {end} of {all}");
        }
    }
}

#[test]
fn who_comes_first_is_never_overtaken_by_what_was_kept() {
    // The other one comes before, or between any two requests of the sending.
    let mut refused = 0;
    for end in 0..40 {
        let place = tempfile::tempdir().unwrap();
        let world = World::new(1, 0);
        let now = leave(&world, place.path(), &made(&world, 3));
        is_away(&world, false);
        let other = world.clone();
        let meet = move || {
            let living = living(&other, 5).unwrap();
            living.write_at(0, &[9; 4096]).unwrap();
            living.barrier().unwrap();
            // A day later the numbers of its records are free again.
            other.with(|state| state.clock += GRACE + 60);
            for byte in 10..13 {
                living.write_at(0, &[byte; 4096]).unwrap();
                living.barrier().unwrap();
            }
            drop(living);
        };
        let (objects, _) = counting(&world, end, How::Meets(Mutex::new(Some(Box::new(meet)))));
        let next = BucketWriter::open(objects, NAME.into(), &at(place.path()), true);
        let there = found(&world);
        assert!(there[..4096] == [12; 4096] || there == now, "request {end}: a commit that was acknowledged is gone");
        let is_sent = there[4096..] == now[4096..];
        let Ok(next) = next else { continue };
        assert_eq!(next.notice().is_none(), is_sent, "request {end}");
        assert_eq!(next.pending_upload_bytes().unwrap(), 0, "what is of another writer's time is told once");
        drop(next);
        if !is_sent {
            refused += 1;
            let here = kept(place.path());
            assert!(here.len() == 1 && here[0].refused, "request {end}: {here:?}");
            assert!(read(&world, place.path()).unwrap() == now, "request {end}: what was written here can be read");
        }
    }
    assert!(refused > 3, "{refused}");
}

#[test]
fn what_another_writer_came_before_is_kept_for_who_wrote_it() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let mut now = made(&world, 3);
    let overtaken = mounted(&world, place.path()).unwrap();
    overtaken.write_at(0, &[0xC1; 4096]).unwrap();
    overtaken.write_at(8192, &vec![0xC2; 10 << 20]).unwrap();
    now[..4096].fill(0xC1);
    now.resize(8192 + (10 << 20), 0);
    now[8192..].fill(0xC2);
    drop(living(&world, 3).unwrap());
    let there = found(&world);
    let message = overtaken.barrier().unwrap_err();
    assert!(matches!(&message, Error::InUse(why) if why.contains("lockbox remote unsent")), "{message}");
    assert!(overtaken.pending_upload_bytes().unwrap() > 0);
    drop(overtaken);
    assert!(found(&world) == there);
    assert!(read(&world, place.path()).unwrap() == now);
    // It is in nobody's way, and what is kept next is beside it.
    let again = leave(&world, place.path(), &there);
    assert_eq!(kept(place.path()).iter().map(|unsent| unsent.refused).filter(|refused| *refused).count(), 1);
    is_away(&world, false);
    drop(mounted(&world, place.path()).unwrap());
    assert!(found(&world) == again);
    assert_eq!(discard(place.path(), "s3://b/other").unwrap(), []);
    assert_eq!(discard(place.path(), NAME).unwrap().len(), 1);
    assert_eq!(kept(place.path()), []);
}

#[test]
fn the_checkpoint_of_a_refused_record_stays_in_the_store() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let base = made(&world, 3);
    let store = open_store(world.store(2), NAME.into(), &at(place.path()));
    let mut session = WriterSession::open_existing(store, somebody(), true).unwrap();
    session.least_changes = 0;
    let overtaken = BucketWriter::from_session(session, &at(place.path()), Arc::default()).unwrap();
    overtaken.write_at(0, &[0xC1; 4096]).unwrap();
    drop(living(&world, 3).unwrap());
    assert!(matches!(overtaken.barrier(), Err(Error::InUse(_))));
    drop(overtaken);
    assert!(read(&world, place.path()).unwrap() == [&[0xC1; 4096], &base[4096..]].concat());
}

#[test]
fn who_only_collects_is_told_too_that_another_writer_came_before_what_was_kept() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let mut now = made(&world, 3);
    leave(&world, place.path(), &now);
    is_away(&world, false);
    let other = living(&world, 3).unwrap();
    Compared { storage: &other, now: &mut now }.write(0, &[0xD1; 4096]).unwrap();
    other.barrier().unwrap();
    drop(other);
    let message = collect_garbage(world.store(2), NAME.into(), &at(place.path()), false).unwrap().notice;
    assert!(message.as_ref().is_some_and(|message| message.contains("lockbox remote unsent")), "{message:?}");
    assert!(found(&world) == now);
}

#[test]
fn whatever_comes_after_what_is_held_back_is_held_back_too() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let base = made(&world, 3);
    let living = mounted(&world, place.path()).unwrap();
    living.write_at(0, &[1; 4096]).unwrap();
    is_away(&world, true);
    living.spool_on_timeout(None);
    living.barrier().unwrap();
    is_away(&world, false);
    living.write_at(4096, &[2; 4096]).unwrap();
    living.barrier().unwrap();
    drop(living);
    assert!(found(&world) == base, "a record was sent whose predecessor the store does not have");
    drop(mounted(&world, place.path()).unwrap());
    assert!(found(&world) == [&[1; 4096], &[2; 4096], &base[8192..]].concat());
}

/// Lets those who wait end, also when something fails.
struct Back<'a>(&'a World);

impl Drop for Back<'_> {
    fn drop(&mut self) {
        is_away(self.0, false);
    }
}

/// The file as a machine that lost its power has it.
fn copied(place: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(place).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

#[test]
fn a_commit_that_waits_for_the_store_survives_the_machine() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let mut now = made(&world, 3);
    let living = mounted(&world, place.path()).unwrap();
    living.write_at(0, &[0xD1; 4096]).unwrap();
    now[..4096].fill(0xD1);
    is_away(&world, true);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| living.barrier());
        let _back = Back(&world);
        let is_kept = || kept(place.path()).iter().any(|unsent| unsent.bytes > 4096 && unsent.used);
        while !is_kept() {
            std::thread::yield_now();
        }
        let copy = copied(place.path());
        assert!(matches!(discard(place.path(), NAME), Err(Error::InUse(_))), "it may still be sent");
        assert_eq!(living.pending_upload_bytes().unwrap(), 0, "the barrier has not said so");
        is_away(&world, false);
        waiting.join().unwrap().unwrap();
        assert!(found(&world) == now);
        // Whoever was told nothing sends what is there already.
        drop(BucketWriter::open(world.store(4), NAME.into(), &at(copy.path()), true).unwrap());
        assert!(found(&world) == now);
        assert_eq!(kept(copy.path()), []);
    });
    assert_eq!(kept(place.path()), [], "what the store took is not kept");
}

/// Returns a mount's writer of an archive in more runs than are allowed, and the bytes that it has to
/// have.
fn scattered(world: &Arc<World>, options: &RemoteOptions) -> (BucketWriter, Vec<u8>) {
    // Longer than the start that is in memory.
    let mut now = vec![7; 600 * 4096];
    published(world, &now);
    let store = open_store(world.store(2), NAME.into(), options);
    let mut session = WriterSession::open_existing(store, somebody(), true).unwrap();
    session.most_checkpoint = 8 * 2 * 20;
    let living = BucketWriter::from_session(session, options, Arc::default()).unwrap();
    living.retry_forever();
    for block in (0..20).step_by(2) {
        Compared { storage: &living, now: &mut now }.write(block * 4096, &[0xA0; 4096]).unwrap();
    }
    (living, now)
}

#[test]
fn a_barrier_of_scattered_data_waits_for_the_store() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let (living, now) = scattered(&world, &at(place.path()));
    is_away(&world, true);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| living.barrier());
        let _back = Back(&world);
        let is_kept = || kept(place.path()).iter().any(|unsent| unsent.bytes > 4096 && unsent.used);
        while !is_kept() && !waiting.is_finished() {
            std::thread::yield_now();
        }
        is_away(&world, false);
        waiting.join().unwrap().unwrap();
    });
    assert!(found(&world) == now);
    living.write_at(0, &[0xA1; 4096]).unwrap();
    living.barrier().unwrap();
    assert!(!living.buffer.is_scattered(8), "it is repacked once the store is back");
    assert!(found(&world) == [&[0xA1; 4096], &now[4096..]].concat());
}

/// Without a limit a read of the store would hang.
#[test]
fn a_mount_that_ends_keeps_scattered_data_without_reading_the_store() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let (living, now) = scattered(&world, &RemoteOptions { timeout: None, ..at(place.path()) });
    is_away(&world, true);
    living.spool_on_timeout(Some(Duration::ZERO));
    living.barrier().unwrap();
    drop(living);
    is_away(&world, false);
    assert!(read(&world, place.path()).unwrap() == now);
}

#[test]
fn who_waits_without_end_keeps_nothing_back() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    made(&world, 3);
    let hard = RemoteOptions { timeout: None, ..at(place.path()) };
    let living = BucketWriter::open(world.store(2), NAME.into(), &hard, true).unwrap();
    living.spool_on_timeout(None);
    living.write_at(0, &[1; 4096]).unwrap();
    living.barrier().unwrap();
    assert_eq!(living.pending_upload_bytes().unwrap(), 0);
}

#[test]
fn what_does_not_follow_upon_what_is_there_is_not_sent() {
    // The store lost its newest records.
    for case in ["older", "grown"] {
        let place = tempfile::tempdir().unwrap();
        let world = World::new(1, 0);
        let base = made(&world, 3);
        let older = world.with(|state| state.objects.clone());
        let first = living(&world, 3).unwrap();
        first.write_at(0, &[5; 4096]).unwrap();
        first.barrier().unwrap();
        drop(first);
        leave(&world, place.path(), &found(&world));
        is_away(&world, false);
        match case {
            "older" => world.with(|state| state.objects = older),
            // With records of the same numbers.
            _ => {
                world.with(|state| state.objects = older);
                let other = living(&world, 4).unwrap();
                for _ in 0..2 {
                    other.write_at(0, &base[..4096]).unwrap();
                    other.barrier().unwrap();
                }
            }
        }
        let next = mounted(&world, place.path()).unwrap();
        assert!(next.notice().is_some(), "{case}");
        assert!(found(&world) == base, "{case}");
        drop(next);
        let here = kept(place.path());
        assert!(here.len() == 1 && here[0].refused, "{case}");
    }
}

#[test]
fn what_waits_for_one_archive_is_not_sent_to_another_one_of_its_address() {
    // Of another store, or made anew where that was.
    let place = tempfile::tempdir().unwrap();
    let (world, other) = (World::new(1, 0), World::new(2, 0));
    let now = leave(&world, place.path(), &made(&world, 3));
    let base = made(&other, 2);
    assert!(read(&other, place.path()).is_err());
    let next = mounted(&other, place.path()).unwrap();
    assert!(next.notice().is_none() && next.pending_upload_bytes().unwrap() == 0);
    drop(next);
    assert!(found(&other) == base);
    is_away(&world, false);
    drop(mounted(&world, place.path()).unwrap());
    assert!(found(&world) == now);
}

#[test]
fn a_file_with_an_altered_byte_is_kept_and_its_writer_fails() {
    let place = tempfile::tempdir().unwrap();
    let objects: Vec<(String, Vec<u8>)> = (1..4u8).map(|number| (format!("name-{number}"), vec![number; 40])).collect();
    let (path, bytes) = spooled(place.path(), &objects);
    let (head, entry) = (16 + NAME.len() + 32, 48 + 6 + 40);
    assert_eq!(bytes.len(), head + 3 * entry);
    let names = |content: &[u8]| {
        fs::write(&path, content).unwrap();
        let opened = UploadSpool::open(place.path(), NAME, &HERE);
        let names = opened.map(|spool| spool.unwrap().names());
        assert!(names.is_err() || content.len() <= head || fs::read(&path).unwrap() == content);
        names.map_err(|error| error.to_string())
    };
    let wanted: Vec<&str> = objects.iter().map(|(name, _)| name.as_str()).collect();
    for at in 0..bytes.len() {
        let message = names(&flipped(&bytes, at)).unwrap_err();
        assert!(message.contains("cannot send the unsent data"), "altered at {at}: {message}");
    }
    // An append makes the header durable before it writes an entry.
    for length in 1..=head {
        assert!(names(&bytes[..length]).unwrap().is_empty(), "cut to {length}");
    }
    for length in head + 1..=bytes.len() {
        match (length - head) % entry {
            0 => assert_eq!(names(&bytes[..length]).unwrap(), wanted[..(length - head) / entry]),
            _ => assert!(names(&bytes[..length]).is_err(), "cut to {length}"),
        }
    }
}

#[test]
fn an_interrupted_append_leaves_the_entries_before_it() {
    let place = tempfile::tempdir().unwrap();
    let (path, before) = spooled(place.path(), &[("first".into(), vec![1; 40])]);
    // Data of an entry without its header, as long as each part of it.
    for length in [1, 47, 48, 49, 100, 3000] {
        let torn = [vec![0; 48], vec![0xEE; 3000]].concat();
        fs::write(&path, [&before[..], &torn[..length]].concat()).unwrap();
        let spool = UploadSpool::open(place.path(), NAME, &HERE).unwrap().unwrap();
        assert_eq!(spool.names(), ["first"], "{length} bytes");
        spool.append("short", &[2; 40], true).unwrap();
        drop(spool);
        let again = UploadSpool::open(place.path(), NAME, &HERE).unwrap().unwrap();
        assert_eq!(again.names(), ["first", "short"], "{length} bytes");
        assert_eq!(again.object("short").unwrap().unwrap(), [2; 40]);
        assert_eq!(fs::read(&path).unwrap().len(), before.len() + 48 + 5 + 40, "the rest of it is gone");
        drop(again);
    }
}

#[test]
fn a_gap_before_more_than_one_entry_is_damage() {
    let place = tempfile::tempdir().unwrap();
    let (path, before) = spooled(place.path(), &[("first".into(), vec![1; 40])]);
    let cut = before.len() as u64 + MAX_ENTRY;
    let open_at = |length: u64| {
        // Nothing is written: the file has a hole.
        fs::File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        UploadSpool::open(place.path(), NAME, &HERE).map(|spool| spool.unwrap().names())
    };
    assert_eq!(open_at(cut).unwrap(), ["first"]);
    assert!(open_at(cut + 1).is_err());
    assert_eq!(path.metadata().unwrap().len(), cut + 1);
}

#[test]
fn a_zeroed_header_before_a_whole_entry_is_damage() {
    let place = tempfile::tempdir().unwrap();
    let objects: Vec<(String, Vec<u8>)> =
        (1..4u8).map(|number| (object_path(&HERE, &ObjectId::Log(number.into())), vec![number; 40])).collect();
    let (path, bytes) = spooled(place.path(), &objects);
    let (head, name) = (16 + NAME.len() + 32, objects[0].0.len());
    let entry = 48 + name + 40;
    assert_eq!(bytes.len(), head + 3 * entry);
    let zeroed = |number: usize, length: usize| {
        let mut content = bytes.clone();
        content[head + number * entry..][..length].fill(0);
        fs::write(&path, &content).unwrap();
        let opened = UploadSpool::open(place.path(), NAME, &HERE).map(|spool| spool.unwrap().names());
        assert!(opened.is_ok() || fs::read(&path).unwrap() == content);
        opened.map_err(|error| error.source().unwrap().to_string())
    };
    for number in [0, 1] {
        // The header, the name as well, and the whole entry.
        for length in [48, 48 + name, entry] {
            let message = zeroed(number, length).unwrap_err();
            let remedy = format!("truncate -s {} ", head + number * entry);
            assert!(message.contains(&remedy), "entry {number}, {length} bytes: {message}");
        }
    }
    assert_eq!(zeroed(2, 48).unwrap().len(), 2, "an interrupted append");
}

#[test]
fn a_damaged_file_truncated_as_its_error_advises_has_the_entries_before_the_damage() {
    let place = tempfile::tempdir().unwrap();
    let objects: Vec<(String, Vec<u8>)> = (1..4u8).map(|number| (format!("name-{number}"), vec![number; 40])).collect();
    let (path, bytes) = spooled(place.path(), &objects);
    let open = || UploadSpool::open(place.path(), NAME, &HERE).map(|spool| spool.unwrap().names());
    let failure = || open().unwrap_err().source().unwrap().to_string();
    fs::write(&path, flipped(&bytes, bytes.len() - 1)).unwrap();
    let message = failure();
    let (_, remedy) = message.split_once("truncate -s ").unwrap();
    let length = remedy.split(' ').next().unwrap().parse().unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
    assert_eq!(open().unwrap(), ["name-1", "name-2"]);
    fs::write(&path, flipped(&bytes, 0)).unwrap();
    let message = failure();
    assert!(message.contains("move the file away") && !message.contains("truncate"), "{message}");
}

#[test]
fn reading_a_damaged_file_logs_a_warning() {
    let place = tempfile::tempdir().unwrap();
    let (path, bytes) = spooled(place.path(), &[("first".into(), vec![1; 40]), ("second".into(), vec![2; 40])]);
    let messages = Arc::new(Mutex::new(Vec::new()));
    // With one subscriber alone, another test's thread could switch the message off for all.
    let _second = tracing::dispatcher::Dispatch::new(Messages(Arc::default()));
    let read = |content: &[u8]| {
        fs::write(&path, content).unwrap();
        let opened = || UploadSpool::open_latest(place.path(), NAME, &HERE).unwrap().names();
        let names = tracing::subscriber::with_default(Messages(messages.clone()), opened);
        (names.len(), messages.lock().drain(..).collect::<Vec<_>>())
    };
    assert_eq!(read(&bytes), (2, vec![]));
    assert_eq!(read(&[&bytes[..], &[0; 100]].concat()), (2, vec![]), "an interrupted append");
    let (count, warnings) = read(&flipped(&bytes, bytes.len() - 1));
    assert_eq!((count, warnings.len()), (1, 1), "{warnings:?}");
    assert!(warnings[0].contains("cannot read all unsent data"), "{warnings:?}");
}

/// Subscriber that keeps the messages of one thread.
struct Messages(Arc<Mutex<Vec<String>>>);

impl Subscriber for Messages {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut |field: &Field, value: &dyn Debug| {
            if field.name() == "message" {
                self.0.lock().push(format!("{value:?}"));
            }
        });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_writer_with_refused_data_leaves_the_file_of_a_later_one() {
    let place = tempfile::tempdir().unwrap();
    let open = || UploadSpool::open(place.path(), NAME, &HERE).unwrap().unwrap();
    let overtaken = open();
    overtaken.append_refused("refused", &[1; 40]).unwrap();
    open().append("later", &[2; 40], true).unwrap();
    assert!(overtaken.append("lost", &[3; 40], true).is_err());
    drop(overtaken);
    assert_eq!(open().names(), ["later"]);
}

/// Returns the file of these entries and its content.
fn spooled(place: &Path, objects: &[(String, Vec<u8>)]) -> (PathBuf, Vec<u8>) {
    let spool = UploadSpool::open(place, NAME, &HERE).unwrap().unwrap();
    objects.iter().for_each(|(name, object)| spool.append(name, object, true).unwrap());
    drop(spool);
    let path = fs::read_dir(place).unwrap().next().unwrap().unwrap().path();
    let bytes = fs::read(&path).unwrap();
    (path, bytes)
}

#[test]
fn what_others_can_write_to_is_not_used() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("unsent");
    drop(UploadSpool::open(&directory, NAME, &HERE).unwrap().unwrap());
    // Two writers of one archive: the second goes without.
    let first = UploadSpool::open(&directory, NAME, &HERE).unwrap().unwrap();
    assert!(UploadSpool::open(&directory, NAME, &HERE).unwrap().is_none());
    assert!(UploadSpool::open(&directory, "s3://b/other", &HERE).unwrap().is_some());
    drop(first);
    fs::write(place.path().join("precious"), b"precious").unwrap();
    let name = fs::read_dir(&directory).unwrap().next();
    assert!(name.is_none(), "empty files go");
    let spool = UploadSpool::open(&directory, NAME, &HERE).unwrap().unwrap();
    let name = fs::read_dir(&directory).unwrap().next().unwrap().unwrap().path();
    drop(spool);
    symlink(place.path().join("precious"), &name).unwrap();
    assert!(UploadSpool::open(&directory, NAME, &HERE).unwrap().is_none());
    fs::remove_file(&name).unwrap();
    fs::hard_link(place.path().join("precious"), &name).unwrap();
    assert!(UploadSpool::open(&directory, NAME, &HERE).is_err(), "it may be what waits");
    assert_eq!(fs::read(place.path().join("precious")).unwrap(), b"precious");
    fs::remove_file(&name).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(UploadSpool::open(&directory, NAME, &HERE).unwrap().is_none());
    assert!(pending_uploads(&directory).is_err() && discard(&directory, NAME).is_err());
}

/// A store that answers nothing and does not end it either, until it is let go.
struct Silent {
    inner: Box<dyn ObjectStore>,
    silent: Arc<Mutex<bool>>,
    goes_on: Arc<Condvar>,
}

impl ObjectStore for Silent {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        let mut silent = self.silent.lock();
        while *silent {
            self.goes_on.wait(&mut silent);
        }
        self.inner.create(name, bytes)
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.inner.get(name, part)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.inner.list(prefix, after, most)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.inner.remove(name)
    }
}

#[test]
fn who_leaves_does_not_wait_for_a_request_that_nobody_answers() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let base = made(&world, 3);
    let (silent, goes_on) = (Arc::new(Mutex::new(false)), Arc::new(Condvar::new()));
    let objects = Silent { inner: world.store(2), silent: silent.clone(), goes_on: goes_on.clone() };
    let living = BucketWriter::open(Box::new(objects), NAME.into(), &at(place.path()), true).unwrap();
    living.retry_forever();
    living.write_at(0, &[0xE1; 4096]).unwrap();
    *silent.lock() = true;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| living.barrier());
        living.spool_on_timeout(None);
        waiting.join().unwrap().unwrap();
    });
    assert!(living.pending_upload_bytes().unwrap() > 0);
    drop(living);
    assert!(found(&world) == base);
    // It is carried out after all, before or after the next writer sends the same.
    for is_late in [true, false] {
        let copy = copied(place.path());
        let now = [&[0xE1; 4096], &base[4096..]].concat();
        if is_late {
            drop(BucketWriter::open(world.store(4), NAME.into(), &at(copy.path()), true).unwrap());
            assert!(found(&world) == now);
            *silent.lock() = false;
            goes_on.notify_all();
        } else {
            let next = BucketWriter::open(world.store(4), NAME.into(), &at(copy.path()), true).unwrap();
            assert!(next.notice().is_none());
        }
        assert!(found(&world) == now);
        assert_eq!(kept(copy.path()), []);
    }
}

/// What is done in place of a creation, and of a request for an object, as long as there is
/// something.
type Instead = Arc<Mutex<Vec<RemoteError>>>;

/// A store whose next answers are no answers.
struct Answering {
    inner: Box<dyn ObjectStore>,
    creations: Instead,
    reads: Instead,
    /// Whether creations are carried out all the same.
    is_done: bool,
}

impl ObjectStore for Answering {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        let instead = self.creations.lock().pop();
        if self.is_done || instead.is_none() {
            let created = self.inner.create(name, bytes)?;
            return instead.map_or(Ok(created), Err);
        }
        instead.map_or_else(|| self.inner.create(name, bytes), Err)
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.reads.lock().pop().map_or_else(|| self.inner.get(name, part), Err)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.inner.list(prefix, after, most)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.inner.remove(name)
    }
}

fn answers(how: impl Fn() -> RemoteError, count: usize) -> Vec<RemoteError> {
    (0..count).map(|_| how()).collect()
}

#[test]
fn a_commit_waits_whatever_the_store_says_that_decides_nothing() {
    // Amazon's says 400 of a token that expired and of a connection that was slow, and a proxy says
    // anything.
    let errors: [fn() -> RemoteError; 5] = [
        || RemoteError::Transient("status 503".into()),
        || RemoteError::Denied("status 403".into()),
        || RemoteError::Unsupported("status 400".into()),
        || RemoteError::NoSpace("no space left".into()),
        || RemoteError::NotFound,
    ];
    for (number, error) in errors.into_iter().enumerate() {
        for (is_done, reads) in [(false, 0), (true, 0), (true, 3)] {
            let place = tempfile::tempdir().unwrap();
            let world = World::new(1, 0);
            let base = made(&world, 3);
            let (creations, read) = (Instead::default(), Instead::default());
            let (inner, reading) = (world.store(2), read.clone());
            let objects = Answering { inner, creations: creations.clone(), reads: reading, is_done };
            let living = BucketWriter::open(Box::new(objects), NAME.into(), &at(place.path()), true).unwrap();
            living.retry_forever();
            living.write_at(0, &[0xF1; 4096]).unwrap();
            *creations.lock() = answers(error, 3);
            *read.lock() = answers(error, reads);
            let done = living.barrier();
            assert!(done.is_ok(), "trouble {number}, done {is_done}, then {reads}: {}", done.unwrap_err());
            assert!(found(&world) == [&[0xF1; 4096], &base[4096..]].concat());
            // Of whoever leaves it is kept.
            living.write_at(4096, &[0xF2; 4096]).unwrap();
            *creations.lock() = answers(error, 1000);
            living.spool_on_timeout(None);
            living.barrier().unwrap();
            drop(living);
            creations.lock().clear();
            drop(mounted(&world, place.path()).unwrap());
            assert!(found(&world) == [&[0xF1; 4096], &[0xF2; 4096], &base[8192..]].concat(), "trouble {number}");
            assert_eq!(kept(place.path()), []);
        }
    }
}

#[test]
fn that_another_writer_came_first_is_told_by_whatever_comes_of_it() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    leave(&world, place.path(), &made(&world, 3));
    is_away(&world, false);
    let other = living(&world, 5).unwrap();
    other.write_at(0, &[9; 4096]).unwrap();
    other.barrier().unwrap();
    // The other one is there still.
    let refused = BucketWriter::open(world.store(2), NAME.into(), &at(place.path()), false).err().unwrap();
    let is_told = |message: &str| message.contains("lockbox remote unsent");
    assert!(matches!(&refused, Error::InUse(why) if is_told(why)), "{refused}");
    drop(other);
}

fn flipped(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut flipped = bytes.to_vec();
    flipped[at] ^= 0x10;
    flipped
}

#[test]
fn nobody_comes_before_what_waits_where_that_cannot_be_read() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |place: &Path, mode: u32| fs::set_permissions(place, fs::Permissions::from_mode(mode)).unwrap();
    for case in ["directory", "link", "version", "header", "entry"] {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("unsent");
        let world = World::new(1, 0);
        let now = leave(&world, &directory, &made(&world, 3));
        is_away(&world, false);
        let file = fs::read_dir(&directory).unwrap().next().unwrap().unwrap().path();
        let bytes = fs::read(&file).unwrap();
        match case {
            "directory" => mode(&directory, 0o770),
            "link" => fs::hard_link(&file, place.path().join("copy")).unwrap(),
            "header" => fs::write(&file, flipped(&bytes, 20)).unwrap(),
            "entry" => fs::write(&file, flipped(&bytes, bytes.len() / 2)).unwrap(),
            // A newer program wrote it, which has other bytes from there on.
            _ => fs::write(&file, [&bytes[..8], &2u32.to_le_bytes(), &bytes[12..]].concat()).unwrap(),
        }
        let before = fs::read(&file).unwrap();
        let requests = world.with(|state| state.objects.len());
        let message = mounted(&world, &directory).err().map(|error| error.to_string());
        assert!(message.as_ref().is_some_and(|message| message.contains("unsent data")), "{case}: {message:?}");
        assert_eq!(world.with(|state| state.objects.len()), requests, "{case}: a writer came");
        assert!(fs::read(&file).unwrap() == before, "{case}");
        match case {
            "directory" => mode(&directory, 0o700),
            "link" => fs::remove_file(place.path().join("copy")).unwrap(),
            _ => fs::write(&file, &bytes).unwrap(),
        }
        let next = mounted(&world, &directory).unwrap();
        assert!(next.notice().is_none(), "{case}");
        assert!(found(&world) == now, "{case}");
    }
}

#[test]
fn a_writer_does_not_overtake_the_one_that_sends_the_unsent_data() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let now = leave(&world, place.path(), &made(&world, 3));
    is_away(&world, false);
    let incarnation = store(&world, 9).existing_incarnation().unwrap();
    let sending = UploadSpool::open(place.path(), NAME, &incarnation).unwrap().unwrap();
    let refused = BucketWriter::open(world.store(4), NAME.into(), &at(place.path()), true).err();
    assert!(matches!(&refused, Some(Error::InUse(why)) if why.contains("unsent data")), "{refused:?}");
    drop(sending);
    let next = mounted(&world, place.path()).unwrap();
    assert!(next.notice().is_none());
    assert!(found(&world) == now);
}

#[test]
fn a_last_word_that_came_too_late_is_no_loss_and_told_as_none() {
    let place = tempfile::tempdir().unwrap();
    let world = World::new(1, 0);
    let base = made(&world, 3);
    let living = mounted(&world, place.path()).unwrap();
    living.write_at(0, &[1; 4096]).unwrap();
    living.barrier().unwrap();
    living.spool_on_timeout(None);
    assert_eq!(living.pending_upload_bytes().unwrap(), 0);
    is_away(&world, true);
    drop(living);
    assert_eq!(kept(place.path()).len(), 1, "that it goes");
    is_away(&world, false);
    drop(super::writable::living(&world, 5).unwrap());
    let next = mounted(&world, place.path()).unwrap();
    assert_eq!(next.notice(), None);
    drop(next);
    assert_eq!(kept(place.path()), []);
    assert!(found(&world) == [&[1; 4096], &base[4096..]].concat());
}

#[test]
fn what_is_thrown_away_is_nothing_that_a_writer_has_taken_up() {
    let place = tempfile::tempdir().unwrap();
    let try_open = || UploadSpool::open(place.path(), NAME, &HERE);
    let open = || try_open().unwrap();
    let count = || fs::read_dir(place.path()).unwrap().count();
    open().unwrap().append("earlier", &[1; 40], true).unwrap();
    let file = fs::read_dir(place.path()).unwrap().next().unwrap().unwrap().path();
    let stem = file.file_name().unwrap().to_str().unwrap().strip_suffix(".unsent").unwrap().to_owned();
    let content = fs::read(&file).unwrap();
    // Thrown away from the oldest on.
    (0..2000).for_each(|number| fs::write(place.path().join(format!("{stem}-{number}.refused")), &content).unwrap());
    fs::write(&file, &content).unwrap();
    let all = count();
    std::thread::scope(|scope| {
        let thrown = scope.spawn(|| discard(place.path(), NAME).unwrap().len());
        while count() == all {
            std::thread::yield_now();
        }
        let writer = try_open();
        assert_eq!(thrown.join().unwrap(), all);
        // It may have been in the way for long.
        let writer = writer.unwrap_or_default().or_else(open).unwrap();
        writer.append("later", &[2; 40], true).unwrap();
        drop(writer);
        assert_eq!(open().unwrap().names(), ["later"]);
    });
}
