//! Damage of every kind to a small archive: reads return the written data or an error; each rescued
//! object is one version.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::sample::{OWNER, Sample, cipher, expected, fresh, noise, put, sample};
use crate::env::{SeededEnvironment, stride};
use crate::format::header::HEADER_BYTES;
use crate::format::node::{self, NodeEntries};
use crate::format::page::PageKind;
use crate::format::{BLOCK, Generation, HEADER_START, Ino, RING_SLOTS, ROOT_INO, Run, TreeId, slot_block};
use crate::fs::{RenameMode, mode};
use crate::pager::Pager;
use crate::rescue::scan::{open_found, scan};
use crate::rescue::{
    LaterCommits, RescueOptions, RescueProgress, RescueReport, RescueState, RescuedObject, rescue_from,
};
use crate::storage::{MemoryStorage, Storage};

const B: usize = BLOCK as usize;

/// Returns every authentic page.
pub(super) fn pages(bytes: &[u8]) -> Vec<Run> {
    let mut runs = Vec::new();
    let storage = MemoryStorage::from_contents(bytes.to_vec());
    scan(&storage, &cipher(), &mut |_, _| Ok(()), &mut |run, _| {
        runs.push(run);
        Ok(())
    })
    .unwrap();
    runs
}

struct Outcome {
    whole: BTreeSet<Vec<u8>>,
    not_whole: BTreeSet<Vec<u8>>,
    /// Complete objects that are reported as older or as unproved.
    doubted: usize,
    newest: Generation,
    later: LaterCommits,
    complete: bool,
}

/// Rescues, and compares every object reported as complete with its content in the reported
/// generation and, unless reported as older, in the newest one. A rescue reported as complete must
/// equal the newest one, object by object.
fn rescue(sample: &Sample, bytes: Vec<u8>, what: &str) -> Outcome {
    let target = tempfile::tempdir().unwrap();
    let to = target.path().join("to");
    let mut told = Vec::new();
    // Progress never decreases and never exceeds the total.
    let mut far = 0;
    let progress = &mut |progress: &RescueProgress<'_>| {
        if let RescueProgress::Writing(progress, all) = progress {
            assert!(
                far <= progress.passed.files && progress.passed.files <= all.files,
                "{what}: {progress:?} of {all:?}"
            );
            far = progress.passed.files;
        }
        Ok(())
    };
    let options = RescueOptions { to: to.clone(), partial: true, privileges: false, snapshot: None };
    let report = rescue_from(
        Arc::new(MemoryStorage::from_contents(bytes)),
        cipher(),
        &SeededEnvironment::new(4),
        &options,
        &mut |item| {
            told.push((item.state, item.path.to_vec(), item.ino, item.generation, item.older || item.unproved));
            Ok(())
        },
        progress,
    )
    .unwrap();
    assert!(report.problems.is_empty(), "{what}: {:?}", report.problems);
    let mut outcome = Outcome {
        whole: BTreeSet::new(),
        not_whole: BTreeSet::new(),
        doubted: 0,
        newest: report.newest,
        later: report.later,
        complete: report.complete(),
    };
    for (state, path, ino, generation, doubted) in told {
        let shown = String::from_utf8_lossy(&path).into_owned();
        if state != RescueState::Whole {
            outcome.not_whole.insert(path);
            continue;
        }
        outcome.doubted += usize::from(doubted);
        let told_of = if doubted { vec![generation] } else { vec![generation, report.newest] };
        for generation in told_of.into_iter().filter(|_| ino != ROOT_INO) {
            let then = sample.at(generation).values().find(|seen| seen.ino == ino);
            let then = then.unwrap_or_else(|| panic!("{what}: {shown} did not exist in generation {}", generation.0));
            assert!(content(&to, &path) == then.content, "{what}: {shown} as of generation {}", generation.0);
        }
        outcome.whole.insert(path);
    }
    if outcome.complete {
        let state = sample.at(report.newest);
        for (path, seen) in state {
            let shown = String::from_utf8_lossy(path);
            assert!(content(&to, &path[1..]) == seen.content, "{what}: complete, but for {shown}");
        }
        assert_eq!(count_below(&to), state.len(), "{what}: complete, and more than that");
    }
    if outcome.later == LaterCommits::Never {
        assert_eq!(sample.at(report.newest), sample.newest(), "{what}: newer commits are denied");
    }
    outcome
}

/// Returns the rescued content at a path: that of a file, or the target of a link.
fn content(to: &Path, path: &[u8]) -> Vec<u8> {
    let host = to.join(Path::new(std::ffi::OsStr::from_bytes(path)));
    let found = std::fs::symlink_metadata(&host).unwrap_or_else(|error| panic!("{}: {error}", host.display()));
    if found.is_symlink() {
        return std::fs::read_link(&host).unwrap().as_os_str().as_bytes().to_vec();
    }
    if found.is_file() { std::fs::read(&host).unwrap() } else { Vec::new() }
}

fn count_below(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() && !path.is_symlink() { 1 + count_below(&path) } else { 1 }).sum()
}

fn judge(sample: &Sample, bytes: Vec<u8>, what: &str) {
    sample.judge(bytes.clone(), what);
    rescue(sample, bytes, what);
}

#[test]
fn an_undamaged_archive_is_rescued_whole() {
    let sample = sample();
    assert_eq!(sample.judge(sample.bytes.clone(), "nothing"), 0);
    let outcome = rescue(&sample, sample.bytes.clone(), "nothing");
    assert!(outcome.complete && outcome.not_whole.is_empty());
    // The root, and every path but the second hard link of a file.
    assert_eq!(outcome.whole.len(), sample.newest().len());
}

/// A few bytes of each block: nonce, sealed prologue, tags, body, end.
#[test]
fn flipped_bytes_are_noticed_wherever_they_are() {
    let sample = sample();
    let mut flipped = 0;
    let whole = MemoryStorage::from_contents(sample.bytes.clone());
    let heads: BTreeSet<u64> = pages(&sample.bytes).iter().map(|run| run.address).chain(HEADER_START).collect();
    for block in interesting(&sample) {
        let every: &[usize] = &[0, 11, 12, 23, 24, 71, 72, 87, 88, 104, 2047, 4032, 4064, 4080, 4095];
        let offsets = if heads.contains(&(block as u64)) { every } else { &[0, 2047, 4095] };
        for offset in offsets {
            flip(&sample, &whole, block * B + offset);
            flipped += 1;
        }
    }
    println!("summary: {flipped} trials: bytes flipped");
}

/// Returns blocks in use, and some of the others.
fn interesting(sample: &Sample) -> Vec<usize> {
    let mut blocks: BTreeSet<u64> = pages(&sample.bytes).iter().flat_map(|run| run.address..run.end()).collect();
    blocks.extend(HEADER_START.iter().flat_map(|start| [*start, start + 1, start + 32]));
    blocks.extend((0..RING_SLOTS).map(slot_block));
    let all = (sample.bytes.len() / B) as u64;
    blocks.extend((0..all).step_by(16));
    blocks.into_iter().filter(|block| *block < all).map(|block| block as usize).collect()
}

/// The exhaustive run; `tests/RELIABILITY.md` has the command. Bytes of blocks with a header, a
/// record or an authentic page are flipped one by one; in any other block all at once: such a block
/// must not be read, so the damage must not be reported.
#[test]
#[ignore = "takes minutes"]
fn every_flipped_byte_is_noticed() {
    let sample = sample();
    let blocks = sample.bytes.len() / B;
    let mut used: BTreeSet<u64> = pages(&sample.bytes).iter().flat_map(|run| run.address..run.end()).collect();
    used.extend(HEADER_START.iter().flat_map(|start| *start..start + (HEADER_BYTES / B) as u64));
    used.extend((0..RING_SLOTS).map(slot_block));
    let next = AtomicUsize::new(0);
    let one_by_one = AtomicUsize::new(0);
    let every = || {
        let whole = MemoryStorage::from_contents(sample.bytes.clone());
        loop {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                return;
            }
            let range = block * B..(block + 1) * B;
            if used.contains(&(block as u64)) {
                one_by_one.fetch_add(B, Ordering::Relaxed);
                range.for_each(|offset| flip(&sample, &whole, offset));
            } else {
                let flipped: Vec<u8> = sample.bytes[range.clone()].iter().map(|byte| byte ^ 0x10).collect();
                let damaged = whole.clone();
                damaged.write_at(range.start as u64, &flipped).unwrap();
                assert_eq!(sample.judge_storage(damaged, &format!("all of block {block}")), 0);
            }
        }
    };
    std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(every))));
    let one_by_one = one_by_one.into_inner();
    let together = sample.bytes.len() - one_by_one;
    println!(
        "summary: {} trials: bytes flipped one by one, and all of the other {together} by block",
        one_by_one + together / B
    );
}

fn flip(sample: &Sample, whole: &MemoryStorage, offset: usize) {
    let flipped = whole.clone();
    flipped.write_at(offset as u64, &[sample.bytes[offset] ^ 0x10]).unwrap();
    sample.judge_storage(flipped, &format!("byte {offset} of block {}", offset / B));
}

#[test]
fn zeroed_blocks_cost_what_lay_there_and_nothing_else() {
    let sample = sample();
    let mut lost = 0;
    println!("summary: {} trials: blocks zeroed", interesting(&sample).len());
    for block in interesting(&sample) {
        let mut bytes = sample.bytes.clone();
        bytes[block * B..(block + 1) * B].fill(0);
        lost += sample.judge(bytes.clone(), &format!("block {block} zeroed"));
        rescue(&sample, bytes, &format!("block {block} zeroed"));
    }
    assert!(lost > 0, "no block mattered");
}

#[test]
fn swapped_pages_do_not_stand_in_for_each_other() {
    let sample = sample();
    let pages = pages(&sample.bytes);
    let mut swapped = 0;
    for (index, one) in pages.iter().enumerate() {
        for other in pages[index + 1..].iter().filter(|other| other.blocks == one.blocks) {
            let mut bytes = sample.bytes.clone();
            let (a, b) = (one.offset() as usize, other.offset() as usize);
            for at in 0..one.bytes() as usize {
                bytes.swap(a + at, b + at);
            }
            judge(&sample, bytes, &format!("pages {} and {} swapped", one.address, other.address));
            swapped += 1;
        }
    }
    println!("summary: {swapped} trials: pages swapped");
    assert!(swapped > 10, "only {swapped} pairs");
}

/// Replays blocks from an older copy of the file, as an attacker can.
#[test]
fn older_blocks_do_not_stand_in_for_newer_ones() {
    let sample = sample();
    let mut replaced = 0;
    for block in 0..sample.earlier.len() / B {
        let range = block * B..(block + 1) * B;
        if sample.earlier[range.clone()] != sample.bytes[range.clone()] {
            let mut bytes = sample.bytes.clone();
            bytes[range.clone()].copy_from_slice(&sample.earlier[range]);
            judge(&sample, bytes, &format!("block {block} put back"));
            replaced += 1;
        }
    }
    println!("summary: {} trials: blocks and rings replaced by older ones", replaced + 2);
    assert!(replaced > 5, "only {replaced} blocks");
    // All pages of the older copy under the newer records, and vice versa.
    for pages_from in [&sample.earlier, &sample.bytes] {
        let ring_from = if std::ptr::eq(pages_from, &sample.bytes) { &sample.earlier } else { &sample.bytes };
        let mut bytes = pages_from.clone();
        for slot in 0..RING_SLOTS {
            let at = slot_block(slot) as usize * B;
            bytes[at..at + B].copy_from_slice(&ring_from[at..at + B]);
        }
        judge(&sample, bytes, "pages and records of different copies");
    }
}

#[test]
fn truncated_files_are_refused_and_what_is_left_is_rescued() {
    let sample = sample();
    println!("summary: {} trials: truncated", 2 * interesting(&sample).len());
    for block in interesting(&sample) {
        let what = format!("truncated at block {block}");
        for length in [block * B, block * B + 1000] {
            sample.judge(sample.bytes[..length].to_vec(), &what);
        }
        rescue(&sample, sample.bytes[..block * B].to_vec(), &what);
    }
}

#[test]
fn header_copies_and_ring_slots_may_be_destroyed() {
    let sample = sample();
    for start in HEADER_START {
        let mut bytes = sample.bytes.clone();
        bytes[start as usize * B..(start as usize + 33) * B].fill(0xEE);
        assert_eq!(sample.judge(bytes, "a header copy"), 0);
    }
    let newest = sample.states.keys().next_back().unwrap();
    println!("summary: {} trials: header copies and ring slots destroyed", HEADER_START.len() as u64 + RING_SLOTS + 2);
    for slot in 0..RING_SLOTS {
        let at = slot_block(slot) as usize * B;
        let mut bytes = sample.bytes.clone();
        bytes[at..at + B].fill(0xEE);
        let failed = sample.judge(bytes, &format!("ring slot {slot}"));
        assert!(failed == 0 || slot == newest.slot(), "slot {slot}");
    }
    let mut bytes = sample.bytes.clone();
    for slot in 0..RING_SLOTS {
        let at = slot_block(slot) as usize * B;
        bytes[at..at + B].fill(0xEE);
    }
    let outcome = rescue(&sample, bytes.clone(), "no records");
    assert!(outcome.complete);
    assert_eq!(outcome.whole.len(), sample.newest().len());
    for start in HEADER_START {
        bytes[start as usize * B..(start as usize + 33) * B].fill(0xEE);
    }
    assert!(rescue(&sample, bytes, "no records, no headers").complete);
}

/// A file of many extents whose leaves were written at different times: without the parent nodes it
/// is not proved that they were reachable together.
#[test]
fn leaves_of_different_generations_are_never_mixed() {
    let (storage, fs) = super::sample::fresh(9);
    let ino = super::sample::put(&fs, crate::format::ROOT_INO, b"large", b"x");
    // Small distant writes: hundreds of extents, several leaves.
    for n in 0..600u64 {
        fs.write(ino, n * 12_288, &n.to_le_bytes()).unwrap();
    }
    fs.sync().unwrap();
    let mut states = std::collections::BTreeMap::new();
    states.insert(fs.volume.durable().generation, super::sample::expected(&fs));
    fs.write(ino, 599 * 12_288, b"changed at the end").unwrap();
    fs.sync().unwrap();
    states.insert(fs.volume.durable().generation, super::sample::expected(&fs));
    let sample = Sample { bytes: storage.contents(), earlier: Vec::new(), states };
    let nodes: Vec<Run> = pages(&sample.bytes).into_iter().filter(|run| run.blocks <= 4).collect();
    for page in nodes {
        let mut bytes = sample.bytes.clone();
        for slot in 0..RING_SLOTS {
            let at = slot_block(slot) as usize * B;
            bytes[at..at + B].fill(0xEE);
        }
        bytes[page.offset() as usize..][..page.bytes() as usize].fill(0);
        rescue(&sample, bytes, &format!("page {} zeroed", page.address));
    }
    assert!(sample.states.keys().next().unwrap() > &Generation(1));
}

/// Returns nodes of any age and tree: level, tree, generation, and the inodes with records in a
/// leaf.
fn nodes(bytes: &[u8]) -> Vec<(Run, u8, u64, Generation, BTreeSet<u64>)> {
    let storage = Arc::new(MemoryStorage::from_contents(bytes.to_vec()));
    let pager = Pager::new(storage.clone(), cipher(), 1 << 20);
    let mut found = Vec::new();
    scan(&*storage, &cipher(), &mut |_, _| Ok(()), &mut |run, prologue| {
        if prologue.kind == PageKind::Node {
            let (_, page) = open_found(&pager, run)?;
            let view = node::decode(page.body())?;
            let inodes = match view.entries {
                NodeEntries::Leaf(entries) => entries.iter().map(|(key, _)| key.object).collect(),
                NodeEntries::Internal(_) => BTreeSet::new(),
            };
            found.push((run, view.head.level, prologue.owner, prologue.generation, inodes));
        }
        Ok(())
    })
    .unwrap();
    found
}

/// Returns leaves of any age and tree, and the inodes with records in them.
fn leaves(bytes: &[u8]) -> Vec<(Run, BTreeSet<u64>)> {
    let leaves = nodes(bytes).into_iter().filter(|(_, level, ..)| *level == 0);
    leaves.map(|(run, .., inodes)| (run, inodes)).collect()
}

fn zero(bytes: &mut [u8], run: Run) {
    bytes[run.offset() as usize..][..run.bytes() as usize].fill(0);
}

/// Reports by inode: state, path, generation; and the content of `partial`.
type Told = std::collections::BTreeMap<u64, (RescueState, Vec<u8>, Generation)>;

/// Rescues to `to` below the directory.
fn rescue_below(
    directory: &Path,
    bytes: Vec<u8>,
    partial: bool,
    tell: &mut dyn FnMut(&RescuedObject<'_>),
) -> RescueReport {
    let options = RescueOptions { to: directory.join("to"), partial, privileges: false, snapshot: None };
    let storage = Arc::new(MemoryStorage::from_contents(bytes));
    let item = &mut |item: &RescuedObject<'_>| {
        tell(item);
        Ok(())
    };
    rescue_from(storage, cipher(), &SeededEnvironment::new(4), &options, item, &mut |_| Ok(())).unwrap()
}

fn rescue_partial(bytes: Vec<u8>, partial: bool) -> (Told, impl Fn(Ino) -> Option<Vec<u8>>) {
    let target = tempfile::tempdir().unwrap();
    let mut told = Told::new();
    let report = rescue_below(target.path(), bytes, partial, &mut |item| {
        told.insert(item.ino.0, (item.state, item.path.to_vec(), item.generation));
    });
    assert!(report.problems.is_empty() && !report.complete(), "{:?}", report.problems);
    let part = move |ino: Ino| std::fs::read(target.path().join(format!("to/partial/{}", ino.0))).ok();
    (told, part)
}

/// Without any leaf only the pages' own headers describe a file: they contain all of its bytes, and
/// perhaps some after a truncation.
#[test]
fn files_that_nothing_describes_are_put_together_from_their_pages() {
    let sample = sample();
    let mut bytes = sample.bytes.clone();
    leaves(&sample.bytes).into_iter().for_each(|(run, _)| zero(&mut bytes, run));
    let (told, part) = rescue_partial(bytes.clone(), true);
    let mut compared = 0;
    for seen in sample.newest().values().filter(|seen| seen.mode & mode::TYPE == mode::REGULAR) {
        // The content of shorter files was in the leaves.
        if seen.content.len() <= 256 {
            continue;
        }
        let (state, path, generation) = &told[&seen.ino.0];
        assert_eq!((*state, &path[..]), (RescueState::Partial, format!("unnamed/{}", seen.ino.0).as_bytes()));
        assert!(generation.0 > 0);
        let left = part(seen.ino).unwrap();
        assert!(left.len() >= seen.content.len() && left[..seen.content.len()] == seen.content, "inode {}", seen.ino.0);
        compared += 1;
    }
    assert!(compared >= 8, "only {compared} files");
    let (told, part) = rescue_partial(bytes, false);
    assert!(told.values().any(|(state, ..)| *state == RescueState::Partial));
    assert!(told.keys().all(|ino| part(Ino(*ino)).is_none()), "written without being asked");
}

/// A surviving directory provides the name of a file whose inode is lost.
#[test]
fn a_name_is_told_of_a_file_of_which_only_data_is_left() {
    let (storage, fs) = fresh(21);
    let (content, inos): (Vec<_>, Vec<_>) = (0..400u64)
        .map(|n| {
            let content = noise(n, 600 + n as usize);
            let ino = put(&fs, ROOT_INO, format!("file{n}").as_bytes(), &content);
            (content, ino)
        })
        .unzip();
    fs.sync().unwrap();
    assert_eq!(expected(&fs).len(), 400);
    let whole = storage.contents();
    let mut bytes = whole.clone();
    // The root's entries are in other leaves than the last files.
    let lost = leaves(&whole).into_iter().filter(|(_, inodes)| inodes.contains(&inos[390].0)).collect::<Vec<_>>();
    assert!(!lost.is_empty() && lost.iter().all(|(_, inodes)| !inodes.contains(&ROOT_INO.0)));
    lost.iter().for_each(|(run, _)| zero(&mut bytes, *run));
    let (told, part) = rescue_partial(bytes, true);
    assert_eq!(&told[&inos[390].0].1[..], b"file390");
    assert_eq!(told[&inos[390].0].0, RescueState::Partial);
    assert_eq!(part(inos[390]).as_deref(), Some(&content[390][..]));
    assert!(told.values().filter(|(state, ..)| *state == RescueState::Whole).count() > 100);
}

/// A user looks for a file by the name that is known, which need not be the first.
#[test]
fn every_hard_link_of_an_incomplete_file_is_reported() {
    let (storage, fs) = fresh(22);
    // Every fourth file is short enough to be inline in the leaf.
    let length = |n: u64| if n.is_multiple_of(4) { 100 } else { 600 };
    let inos: Vec<_> =
        (0..400).map(|n| put(&fs, ROOT_INO, format!("file{n}").as_bytes(), &noise(n, length(n)))).collect();
    let (inline, paged) = (inos[388], inos[390]);
    for (ino, name) in [(inline, "link388"), (paged, "link390")] {
        fs.link(ino, ROOT_INO, name.as_bytes()).unwrap();
    }
    fs.sync().unwrap();
    let whole = storage.contents();
    let check = |damaged: &[Run], expected: &[(Ino, RescueState, &str, &str)]| {
        let mut bytes = whole.clone();
        damaged.iter().for_each(|run| zero(&mut bytes, *run));
        let target = tempfile::tempdir().unwrap();
        let mut told = Vec::new();
        rescue_below(target.path(), bytes, false, &mut |item| {
            told.push((item.ino, item.state, String::from_utf8(item.path.to_vec()).unwrap()));
        });
        for &(ino, state, first, second) in expected {
            let names = told.iter().filter(|(told, ..)| *told == ino);
            let names: BTreeSet<_> = names.map(|(_, state, name)| (*state as u8, &name[..])).collect();
            assert_eq!(names, BTreeSet::from([(state as u8, first), (state as u8, second)]), "{damaged:?}");
        }
    };
    let nodes: Vec<Run> = nodes(&whole).into_iter().map(|(run, ..)| run).collect();
    let data: Vec<Run> = pages(&whole).into_iter().filter(|run| !nodes.contains(run)).collect();
    assert!(!data.is_empty());
    check(&data, &[(paged, RescueState::Partial, "file390", "link390")]);
    let leaves: Vec<Run> = leaves(&whole)
        .into_iter()
        .filter(|(_, of)| of.contains(&inline.0) || of.contains(&paged.0))
        .map(|(run, _)| run)
        .collect();
    assert!(!leaves.is_empty());
    check(
        &leaves,
        &[(inline, RescueState::Lost, "file388", "link388"), (paged, RescueState::Partial, "file390", "link390")],
    );
}

/// A host may refuse a name, such as one with a colon on a memory card. Here it is taken.
#[test]
fn what_a_host_refuses_by_one_name_is_rescued_by_another() {
    let (storage, fs) = fresh(23);
    put(&fs, ROOT_INO, b"first", b"first");
    let linked = put(&fs, ROOT_INO, b"taken:1", b"linked");
    fs.link(linked, ROOT_INO, b"link").unwrap();
    let file = put(&fs, ROOT_INO, b"taken:2", b"file");
    let directory = fs.make_directory(ROOT_INO, b"taken:3", 0o750, OWNER).unwrap().ino;
    put(&fs, directory, b"below", b"below");
    fs.sync().unwrap();
    let target = tempfile::tempdir().unwrap();
    let to = target.path().join("to");
    let report = rescue_below(target.path(), storage.contents(), false, &mut |item| {
        if item.path == b"first" {
            (1..=3).for_each(|n| std::fs::write(to.join(format!("taken:{n}")), "of the host").unwrap());
        }
    });
    let problems: Vec<_> = report.problems.iter().map(|problem| &problem.path[..]).collect();
    assert_eq!(problems, [&b"taken:1"[..], b"taken:2", b"taken:3"]);
    assert_eq!((report.files, report.directories, report.unnamed), (4, 2, 2));
    for (path, content) in [
        ("link".to_owned(), "linked"),
        (format!("unnamed/{}", file.0), "file"),
        (format!("unnamed/{}/below", directory.0), "below"),
    ] {
        assert_eq!(std::fs::read_to_string(to.join(&path)).ok().as_deref(), Some(content), "{path}");
    }
}

/// A file that gets no name at all is reported once by each.
#[test]
fn what_a_host_refuses_by_every_name_is_reported() {
    let (storage, fs) = fresh(24);
    put(&fs, ROOT_INO, b"first", b"first");
    let [one, two] = [b"taken:1", b"taken:2"].map(|name| put(&fs, ROOT_INO, name, name));
    fs.sync().unwrap();
    let target = tempfile::tempdir().unwrap();
    let to = target.path().join("to");
    let [one, two] = [one, two].map(|ino| format!("unnamed/{}", ino.0));
    let report = rescue_below(target.path(), storage.contents(), false, &mut |item| {
        let take = |name: &str| std::fs::write(to.join(name), "of the host").unwrap();
        match item.path {
            b"first" => ["taken:1", "taken:2"].into_iter().for_each(take),
            path if path == one.as_bytes() => take(&two),
            _ => {}
        }
    });
    let problems: Vec<_> = report.problems.iter().map(|problem| &problem.path[..]).collect();
    assert_eq!(problems, [b"taken:1", b"taken:2", two.as_bytes()]);
    assert_eq!((report.files, report.unnamed), (2, 1));
    assert_eq!(std::fs::read_to_string(to.join(one)).unwrap(), "taken:1");
}

/// Several leaves below a root, each rewritten by some of many commits; no freed block is erased
/// yet, like after a crash.
fn with_history(commits: u64) -> Sample {
    let (storage, fs) = fresh(31);
    let mut states = std::collections::BTreeMap::new();
    let mut keep = || {
        fs.sync().unwrap();
        states.insert(fs.volume.durable().generation, expected(&fs));
    };
    keep();
    let directories: Vec<Ino> =
        ["a", "b"].map(|name| fs.make_directory(ROOT_INO, name.as_bytes(), 0o750, OWNER).unwrap().ino).to_vec();
    let mut files = Vec::new();
    for n in 0..240u64 {
        // Two in three are short enough to be inline in the leaf.
        let length = if n.is_multiple_of(3) { 700 } else { 100 + n as usize % 100 };
        let directory = directories[n as usize / 120];
        files.push(put(&fs, directory, format!("file{n}").as_bytes(), &noise(n, length)));
    }
    keep();
    for n in 0..commits {
        let file = ((n * 37 + 1) % 170) as usize;
        fs.write(files[file], 0, &noise(1000 + n, 60)).unwrap();
        match n % 4 {
            0 => drop(put(&fs, directories[n as usize % 2], format!("later{n}").as_bytes(), b"made later")),
            1 => {
                let name = format!("file{}", n + 3);
                let directory = directories[(n as usize + 3) / 120];
                fs.rename(directory, name.as_bytes(), ROOT_INO, name.as_bytes(), RenameMode::NoReplace).unwrap();
            }
            2 => fs.unlink(directories[1], format!("file{}", 239 - n).as_bytes()).unwrap(),
            _ => {}
        }
        keep();
    }
    Sample { bytes: storage.contents(), earlier: Vec::new(), states }
}

fn without_records(bytes: &mut [u8]) {
    (0..RING_SLOTS).for_each(|slot| zero(bytes, Run::new(slot_block(slot), 1)));
}

/// The newest version of each leaf is destroyed while older ones survive: with and without records,
/// and with all other traces of a newer version. The comparison in `rescue` above holds in each
/// case: nothing older is reported as the newest, and nothing incomplete as complete.
#[test]
fn an_older_leaf_never_passes_for_the_newest_unnoticed() {
    let live = TreeId::Live as u64;
    let (mut trials, mut doubted, mut traceless) = (0, 0, 0);
    for commits in [9, 70] {
        let sample = with_history(commits);
        let nodes: Vec<_> = nodes(&sample.bytes).into_iter().filter(|(_, _, tree, ..)| *tree == live).collect();
        let newest = nodes.iter().map(|(_, _, _, generation, _)| *generation).max().unwrap();
        let undamaged = rescue(&sample, sample.bytes.clone(), "nothing");
        assert!(undamaged.complete && undamaged.doubted == 0);
        assert_eq!(undamaged.later, if commits > RING_SLOTS { LaterCommits::Never } else { LaterCommits::Possible });
        for (run, level, _, generation, _) in nodes.iter().step_by(stride(3)) {
            let mut bytes = sample.bytes.clone();
            zero(&mut bytes, *run);
            let what = format!("{commits} commits, node of level {level} and generation {} zeroed", generation.0);
            let outcome = rescue(&sample, bytes.clone(), &what);
            doubted += outcome.doubted;
            without_records(&mut bytes);
            let outcome = rescue(&sample, bytes.clone(), &format!("{what}, no records"));
            doubted += outcome.doubted;
            // All parent nodes as well.
            for (above, level, ..) in &nodes {
                if *level > 0 {
                    zero(&mut bytes, *above);
                }
            }
            rescue(&sample, bytes, &format!("{what}, no nodes above, no records"));
            trials += 3;
        }
        // All traces of the newest commits: the rest is complete as of an older one, and is
        // reported as such.
        for from in newest.0 - 5..=newest.0 {
            let mut bytes = sample.bytes.clone();
            without_records(&mut bytes);
            for (run, _, _, generation, _) in &nodes {
                if generation.0 >= from {
                    zero(&mut bytes, *run);
                }
            }
            let outcome = rescue(&sample, bytes, &format!("{commits} commits, nothing of generation {from} and later"));
            assert!(outcome.newest.0 < from && outcome.later != LaterCommits::Never);
            traceless += usize::from(outcome.complete);
            trials += 1;
        }
    }
    println!("summary: {trials} trials: newer leaves destroyed and older ones left");
    assert!(doubted > 30 && traceless > 0, "{doubted} {traceless}");
}
