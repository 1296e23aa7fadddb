//! Writers, readers and garbage collection in every order of their requests: a new reader finds
//! exactly the acknowledged commits.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lockbox::storage::Storage;
use parking_lot::Mutex;

use super::super::block_cache::BlockFetcher;
use super::super::layout::{BLOCK, RecordKind, encode_segment};
use super::super::map::{MapEntry, ObjectId, ObjectRef};
use super::super::objects::random_bytes;
use super::super::open;
use super::super::session::{InlinePages, WriterSession};
use super::super::spool::{UploadSpool, pending_uploads};
use super::super::store::BucketStore;
use super::super::version::{BucketVersion, VersionReader};
use super::super::version::{Follower, now};
use super::GRACE;
use super::simulated::{Dice, World};
use super::{options, seed, somebody, store, store_of};
use crate::range_source::{RangeSource, RemoteError};

const BLOCKS: u64 = 12;

/// What each block has: the number of the commit that wrote it, 0 for none.
type View = [u64; BLOCKS as usize];

#[derive(Default)]
struct Truth {
    /// What the archive is after a commit, and the commit before it.
    attempts: HashMap<u64, (View, u64)>,
    /// The newest commit that was acknowledged.
    acknowledged: u64,
    commits: u64,
    reads: u64,
    removed: u64,
    followed: u64,
    /// Commits that the store did not take, and writers that came with such ones and sent them, or
    /// found that they were too late.
    kept: u64,
    sent: u64,
    refused: u64,
    /// All of them, in their order.
    requests: Vec<String>,
}

impl Truth {
    /// Whether `commit` has all that `older` wrote.
    fn follows(&self, commit: u64, older: u64) -> bool {
        let mut at = commit;
        while at != older && at != 0 {
            at = self.attempts[&at].1;
        }
        at == older
    }
}

fn block(number: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK as usize];
    block[..8].copy_from_slice(&number.to_le_bytes());
    block
}

/// Reads all, and says what is wrong with it. None where nothing could be read.
fn look(world: &Arc<World>, actor: u64, truth: &Mutex<Truth>) -> Option<View> {
    let begun = world.with(|state| state.clock);
    let acknowledged = truth.lock().acknowledged;
    let store = store(world, actor);
    let incarnation = store.read_incarnation().ok()??.unwrap();
    let newest = BucketVersion::load_newest(&store, &incarnation);
    let is_late = || world.with(|state| state.clock) - begun >= GRACE;
    let moment = match newest {
        Ok(found) => found,
        Err(lockbox::Error::Damaged(_)) if is_late() => return None,
        Err(lockbox::Error::Damaged(why)) => panic!("{why}"),
        Err(_) => return None,
    };
    let Some(moment) = moment else {
        assert_eq!(acknowledged, 0, "an acknowledged commit is gone");
        return None;
    };
    let reading = VersionReader::new(store, incarnation, &moment);
    let bytes = match reading.read_start(BLOCKS * BLOCK) {
        Ok((_, bytes)) => bytes,
        Err(RemoteError::Changed) => {
            assert!(is_late(), "what a reader needs was removed under it");
            return None;
        }
        Err(RemoteError::Damaged(why)) => panic!("{why}"),
        Err(_) => return None,
    };
    let mut view = View::default();
    for (found, block) in view.iter_mut().zip(bytes.chunks(BLOCK as usize)) {
        *found = u64::from_le_bytes(block[..8].try_into().unwrap());
    }
    let mut truth = truth.lock();
    truth.reads += 1;
    match view[0] {
        0 => assert_eq!(acknowledged, 0, "an acknowledged commit is gone"),
        commit => {
            assert_eq!(truth.attempts[&commit].0, view, "parts of two commits");
            assert!(truth.follows(commit, acknowledged), "{acknowledged} was acknowledged, {commit} is found");
        }
    }
    Some(view)
}

/// Goes on with whoever writes: its moments come in order, and each has what was acknowledged when
/// it was looked for.
fn follow(world: &Arc<World>, actor: u64, truth: &Mutex<Truth>) {
    let begun = world.with(|state| state.clock);
    let is_late = || world.with(|state| state.clock) - begun >= GRACE;
    let mut last = 0;
    let mut shown = |follower: &Follower, acknowledged: u64| {
        let mut bytes = vec![0; (BLOCKS * BLOCK) as usize];
        follower.file().read_at(0, &mut bytes).unwrap();
        let mut view = View::default();
        for (found, block) in view.iter_mut().zip(bytes.chunks(BLOCK as usize)) {
            *found = u64::from_le_bytes(block[..8].try_into().unwrap());
        }
        let mut truth = truth.lock();
        truth.followed += 1;
        assert_eq!(truth.attempts[&view[0]].0, view, "parts of two commits");
        assert!(truth.follows(view[0], acknowledged), "{acknowledged} was acknowledged, {} is found", view[0]);
        assert!(truth.follows(view[0], last), "{last} was shown, then {}", view[0]);
        last = view[0];
    };
    let acknowledged = truth.lock().acknowledged;
    let mut follower = match open(world.store(actor), "s3://b/p".into(), &options()) {
        Ok(Some(follower)) => follower,
        Err(lockbox::Error::Damaged(why)) if !is_late() => panic!("{why}"),
        _ => return,
    };
    shown(&follower, acknowledged);
    for _ in 0..4 {
        let acknowledged = truth.lock().acknowledged;
        // As long as the machine was awake in the store's time.
        let passed = || Duration::from_secs(world.with(|state| state.clock) - begun);
        match follower.poll_by(&|| now() + passed()) {
            Ok(()) => {}
            Err(lockbox::Error::Damaged(why)) if !is_late() => panic!("{why}"),
            Err(_) => continue,
        }
        shown(&follower, acknowledged);
    }
}

/// `place`: where this one keeps what the store does not take.
fn write(world: &Arc<World>, actor: u64, place: Option<&Path>, truth: &Mutex<Truth>, dice: &mut Dice) {
    let store = store_of(world, actor).with_spool_directory(place);
    let kept = |store: &BucketStore| store.spool().map_or(0, UploadSpool::bytes);
    let waits = place.is_some_and(|place| pending_uploads(place).unwrap().iter().any(|unsent| !unsent.refused));
    let Ok(mut session) = WriterSession::open(Arc::new(store), somebody(), true) else { return };
    session.least_changes = 20 * dice.below(8) as usize;
    // What the session says is there.
    let reading = VersionReader {
        blocks: BlockFetcher {
            store: session.store.clone(),
            incarnation: session.incarnation,
            sequence: Arc::new(session.newest.sequence.into()),
            whole: None,
        },
        map: session.map().clone(),
        length: session.newest.length,
        tag: String::new(),
    };
    let Ok((_, bytes)) = reading.read_start(BLOCKS * BLOCK) else { return };
    let mut view = View::default();
    for (found, block) in view.iter_mut().zip(bytes.chunks(BLOCK as usize)) {
        *found = u64::from_le_bytes(block[..8].try_into().unwrap());
    }
    {
        // What a writer was shown when it came was durable.
        let mut truth = truth.lock();
        if !truth.follows(truth.acknowledged, view[0]) {
            assert!(truth.follows(view[0], truth.acknowledged), "a writer came to what was overtaken");
            truth.acknowledged = view[0];
        }
        if waits {
            let count = if session.notice.is_none() { &mut truth.sent } else { &mut truth.refused };
            *count += 1;
        }
    }
    for _ in 0..=dice.below(4) {
        if place.is_some() && dice.one_in(2) {
            session.store.retry_forever();
            session.store.spool_on_timeout(None);
        }
        if dice.one_in(3) {
            let before = world.with(|state| state.objects.len());
            session.remove_expired();
            truth.lock().removed += before.saturating_sub(world.with(|state| state.objects.len())) as u64;
        }
        let parent = view[0];
        let commit = {
            let mut truth = truth.lock();
            truth.commits += 1;
            truth.commits
        };
        let mut map = session.map().clone();
        let mut inline = vec![];
        let mut segment = vec![];
        view[0] = commit;
        inline.push(InlinePages { block: 0, pages: block(commit) });
        for number in 1..BLOCKS {
            match dice.below(6) {
                0 => inline.push(InlinePages { block: number, pages: block(commit) }),
                1 => segment.push(number),
                2 if dice.one_in(3) => {
                    map.assign(&MapEntry { blocks: number..number + 1, place: None });
                    view[number as usize] = 0;
                    continue;
                }
                _ => continue,
            }
            view[number as usize] = commit;
        }
        if !segment.is_empty() {
            let runs: Vec<_> = segment.iter().map(|number| *number..number + 1).collect();
            let pages: Vec<u8> = segment.iter().flat_map(|_| block(commit)).collect();
            let (bytes, hash) = encode_segment(&session.incarnation, &random_bytes().unwrap(), &runs, &pages);
            let id = ObjectId::Segment(hash);
            if WriterSession::create_segment(&session.store, &session.incarnation, &id, &Arc::new(bytes), false)
                .is_err()
            {
                return;
            }
            for (at, blocks) in (0..).zip(runs) {
                map.assign(&MapEntry { blocks, place: Some(ObjectRef { id, blocks: segment.len() as u32, at }) });
            }
        }
        truth.lock().attempts.insert(commit, (view, parent));
        let kind = if dice.one_in(4) { RecordKind::Close } else { RecordKind::Commit };
        let mut done = session.commit(map, inline, BLOCKS * BLOCK, kind);
        for _ in 0..dice.below(4) {
            if done.is_ok() || !session.is_in_doubt() {
                break;
            }
            done = session.resolve_pending();
        }
        if done.is_err() {
            return;
        }
        // It is nowhere else.
        if kept(&session.store) > 0 {
            truth.lock().kept += 1;
            continue;
        }
        let mut truth = truth.lock();
        // Who was overtaken after its commit may hear of it late.
        if !truth.follows(truth.acknowledged, commit) {
            truth.acknowledged = commit;
        }
        if kind == RecordKind::Close {
            return;
        }
    }
}

fn schedule(seed: u64) -> Truth {
    let faults = [0, 10, 25, 60][(seed % 4) as usize];
    let world = World::new(seed, faults);
    let truth = Mutex::new(Truth::default());
    let memory = Path::new("/dev/shm");
    let memory = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let place = (seed % 8 > 3).then(|| tempfile::tempdir_in(memory).unwrap());
    let mut actors: Vec<Box<dyn FnOnce() + Send + '_>> = Vec::new();
    for actor in 1..=5 {
        let (world, truth) = (&world, &truth);
        let mut dice = Dice::of(seed.wrapping_add(actor << 40));
        let place = place.as_ref().map(tempfile::TempDir::path).filter(|_| actor == 3);
        actors.push(Box::new(move || {
            for _ in 0..if place.is_some() { 8 } else { 3 } {
                match actor {
                    4 => drop(look(world, actor, truth)),
                    5 => follow(world, actor, truth),
                    _ => write(world, actor, place, truth, &mut dice),
                }
            }
        }));
    }
    world.play(actors);
    // A fresh machine, and a store that has no faults any more.
    let requests = world.with(|state| {
        state.faults = 0;
        state.requests.clone()
    });
    let found = look(&world, 9, &truth);
    let truth = truth.into_inner();
    assert!(found.is_some() || truth.acknowledged == 0);
    Truth { requests, ..truth }
}

/// `SCHEDULES` says how many; `SEED` is the first one's.
#[test]
fn what_was_acknowledged_is_found_by_a_fresh_reader_in_every_order_of_requests() {
    let first = seed(1);
    let count = std::env::var("SCHEDULES").map_or(2_000, |count| count.parse().unwrap());
    let (mut commits, mut reads, mut removed, mut followed) = (0, 0, 0, 0);
    let (mut kept, mut sent, mut refused) = (0, 0, 0);
    for seed in first..first + count {
        let played = std::panic::catch_unwind(|| schedule(seed));
        let truth = played.unwrap_or_else(|_| panic!("the schedule of SEED={seed}"));
        commits += truth.commits;
        reads += truth.reads;
        removed += truth.removed;
        followed += truth.followed;
        kept += truth.kept;
        sent += truth.sent;
        refused += truth.refused;
    }
    println!(
        "{count} schedules, {commits} commits, {reads} reads, {followed} moments followed, {removed} objects removed"
    );
    println!("{kept} commits kept, {sent} writers sent some, {refused} came too late");
    assert!(commits > count && reads > count && followed > count && removed > 0);
    assert!(count < 2_000 || kept > 0 && sent > 0 && refused > 0);
}

#[test]
fn a_seed_names_one_order_in_which_either_of_two_requests_at_once_is_the_first() {
    // What chance makes of names is no part of it.
    let named = |line: &String| {
        let words: Vec<&str> = line.split(['/', ' ']).filter(|word| word.len() < 32).collect();
        words.join(" ")
    };
    let mut first = [0, 0];
    // Whoever leaves looks at the clock, and has a place.
    for seed in (1..160).filter(|seed| seed % 8 <= 3) {
        let played = schedule(seed).requests;
        let (one, other): (Vec<_>, Vec<_>) =
            (played.iter().map(named).collect(), schedule(seed).requests.iter().map(named).collect());
        assert_eq!(one, other, "SEED={seed}");
        // Where nothing fails, who follows opens with the marker and a list beside it.
        if seed % 4 == 0 {
            let follows = played.iter().filter_map(|line| line.split_once(" 5 ")).map(|(_, what)| what);
            let opens: Vec<&str> = follows.filter(|what| ["get lockbox", "list "].contains(what)).collect();
            opens.chunks(2).for_each(|pair| first[usize::from(pair[0] == "list ")] += 1);
        }
    }
    assert!(first.iter().all(|count| *count > 10), "{first:?}");
}
