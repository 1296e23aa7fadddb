//! Writers that crash or are taken over at any request.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use parking_lot::Mutex;

use super::super::super::writable::BucketWriter;
use super::super::nth_request::{How, counting};
use super::super::options;
use super::super::simulated::World;
use super::{NAME, found, living, made};

/// Three commits: within a record, with segments, and of holes. Gives what the archive is to be
/// after each that was begun, and how many succeeded.
fn work(storage: &dyn Storage, base: &[u8]) -> (Vec<Vec<u8>>, usize, Result<()>) {
    let mut states = vec![base.to_vec()];
    let mut now = base.to_vec();
    let mut acknowledged = 0;
    let write = |now: &mut Vec<u8>, offset: usize, byte: u8, length: usize| {
        now.resize(now.len().max(offset + length), 0);
        now[offset..offset + length].fill(byte);
        storage.write_at(offset as u64, &vec![byte; length])
    };
    let mut commit = |now: &Vec<u8>| {
        states.push(now.clone());
        storage.barrier()?;
        acknowledged += 1;
        Ok(())
    };
    let mut all = || -> Result<()> {
        write(&mut now, 4096, 0xA1, 5000)?;
        commit(&now)?;
        write(&mut now, 8192, 0xA2, 10 << 20)?;
        write(&mut now, 0, 0xA3, 4096)?;
        commit(&now)?;
        storage.punch(4096, 5 << 20)?;
        now[4096..4096 + (5 << 20)].fill(0);
        storage.set_len(6 << 20)?;
        now.resize(6 << 20, 0);
        commit(&now)
    };
    let done = all();
    (states, acknowledged, done)
}

/// Requests of a writer that nobody disturbs.
fn undisturbed() -> u64 {
    let world = World::new(1, 0);
    let base = made(&world, 3);
    let (objects, asked) = counting(&world, u64::MAX, How::Dies);
    let storage = BucketWriter::open(objects, NAME.into(), &options(), true).unwrap();
    let (states, acknowledged, done) = work(&storage, &base);
    done.unwrap();
    drop(storage);
    assert!(acknowledged == 3 && found(&world) == states[3]);
    asked.load(Ordering::Relaxed)
}

#[test]
fn who_dies_between_any_two_requests_leaves_the_last_commit_or_the_one_that_it_was_at() {
    let all = undisturbed();
    let (mut old, mut new) = (0, 0);
    for end in 0..all {
        for how in [How::Dies, How::Silent] {
            let world = World::new(1, 0);
            let base = made(&world, 3);
            let (objects, _) = counting(&world, end, how);
            let opened = BucketWriter::open(objects, NAME.into(), &options(), true);
            let (states, acknowledged) = match &opened {
                Ok(storage) => {
                    let (states, acknowledged, _) = work(storage, &base);
                    (states, acknowledged)
                }
                Err(_) => (vec![base], 0),
            };
            let there = found(&world);
            let is_old = there == states[acknowledged];
            assert!(is_old || states.get(acknowledged + 1) == Some(&there), "request {end} of {all}");
            if is_old {
                old += 1
            } else {
                new += 1
            }
            // Nothing of what a dead process still does is found, and the next one goes on.
            drop(opened);
            assert!(found(&world) == there, "request {end}");
            let next = living(&world, 3).unwrap();
            next.write_at(0, &[7; 4096]).unwrap();
            next.barrier().unwrap();
            assert!(found(&world)[..4096] == [7; 4096] && found(&world)[4096..] == there[4096..], "request {end}");
        }
    }
    assert!(old > 10 && new > 2, "{old} {new}");
}

/// Another writer comes there and stays; and what it made of the archive, when it came.
pub(in super::super) fn overtaken(world: &Arc<World>) -> (Arc<Mutex<Option<Vec<u8>>>>, How) {
    let theirs = Arc::new(Mutex::new(None));
    let (other, left) = (world.clone(), theirs.clone());
    let meet = Box::new(move || {
        let storage = living(&other, 3).unwrap();
        storage.write_at(4096, &[0xBB; 4096]).unwrap();
        storage.barrier().unwrap();
        *left.lock() = Some(found(&other));
        std::mem::forget(storage);
    });
    (theirs, How::Meets(Mutex::new(Some(meet))))
}

#[test]
fn who_was_taken_over_from_between_any_two_requests_commits_nothing_more() {
    let all = undisturbed();
    let mut fenced = 0;
    for end in 0..all {
        let world = World::new(1, 0);
        let base = made(&world, 3);
        let (theirs, how) = overtaken(&world);
        let (objects, _) = counting(&world, end, how);
        let opened = BucketWriter::open(objects, NAME.into(), &options(), true);
        let done = match &opened {
            Ok(storage) => {
                let (states, acknowledged, done) = work(storage, &base);
                if let Some(theirs) = &*theirs.lock() {
                    // It built upon a commit of the one before, and upon all that were acknowledged
                    // until then.
                    let mut before = theirs.clone();
                    let is_of = |state: &Vec<u8>| {
                        before.clone_from(state);
                        before.resize(before.len().max(8192), 0);
                        before[4096..8192].fill(0xBB);
                        before == *theirs
                    };
                    let built_on = states.iter().position(is_of);
                    assert!(
                        done.is_ok() || built_on == Some(acknowledged),
                        "request {end}: {built_on:?} {acknowledged}"
                    );
                }
                let again = storage.barrier();
                assert!(done.is_ok() || again.is_err(), "request {end}: it writes on");
                done
            }
            Err(error) => Err(error.clone()),
        };
        let theirs = theirs.lock().clone();
        drop(opened);
        if let Some(theirs) = theirs {
            // Else the other one came when nothing was left to commit, or before this one, which
            // took over.
            if let Err(error) = done {
                assert!(matches!(error, Error::InUse(_)), "request {end}: {error}");
                fenced += 1;
                assert!(found(&world) == theirs, "request {end}: it wrote over the other one");
            }
        }
    }
    assert!(fenced >= 4, "{fenced} of {all}");
}
