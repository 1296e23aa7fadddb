//! Large, deep and contended directories: the work that they cost, and that no rename makes a loop.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::support::{CREATOR, OPTIONS, assert_sound, crash, create_with, fresh, list, open_on, open_within};
use crate::env::{SeededEnvironment, variable};
use crate::error::Error;
use crate::format::{Ino, ROOT_INO, TreeId};
use crate::fs::directory::{DirectoryEditor, EntryTarget};
use crate::fs::{FileSystem, RenameMode, inode, mode};
use crate::storage::CountingStorage;

fn name(number: u64) -> Vec<u8> {
    format!("entry-{number:07}").into_bytes()
}

/// Gives one file this many names in a directory, a thousand in each operation.
fn fill(fs: &FileSystem, directory: Ino, count: u64) {
    let file = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
    for first in (0..count).step_by(1000) {
        fs.volume
            .operate(3000, false, |op| {
                let now = fs.environment.now();
                let mut parent = DirectoryEditor::load(op.view(), &fs.name_key, directory)?;
                let mut linked = inode::load(op.view(), file)?;
                for number in first..first + 1000 {
                    parent.insert(op, &name(number), EntryTarget::of(file, &linked))?;
                    linked.links += 1;
                }
                parent.store(op, now)?;
                inode::store(op, file, &linked)
            })
            .unwrap();
    }
}

/// A multiple of a thousand in ENTRIES; the default fills a tree of as many levels as a million.
#[test]
fn entries_of_a_large_directory_cost_no_more_each_than_a_few() {
    let entries = variable("ENTRIES").unwrap_or(200_000);
    let storage = Arc::new(CountingStorage::default());
    let environment = Arc::new(SeededEnvironment::new(21));
    let fs = create_with(storage.clone(), environment.clone(), OPTIONS);
    drop(fs);
    // Large enough that no commit intervenes: the cost of filling is not measured here.
    let fs = open_within(2 << 30, storage.clone(), environment.clone());
    let directory = fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap().ino;
    fill(&fs, directory, entries);
    fs.close().unwrap();
    drop(fs);
    storage.take();
    let fs = open_on(storage.clone(), environment.clone());
    let work = || storage.take().0;
    // The ring has 64 slots.
    assert!(work() < 100, "opening reads too much");
    let levels = fs.volume.durable().roots[TreeId::Live].level + 1;
    assert_eq!(levels, 3, "not a tree like that of a million entries");
    let dice = SeededEnvironment::new(22);
    let bound = fs.directory_bound(directory).unwrap();
    for _ in 0..200 {
        work();
        let number = dice.next_u64() % entries;
        fs.lookup(directory, &name(number)).unwrap();
        let reads = work();
        assert!(reads <= 12, "{reads} reads for one lookup");
        // Sequence numbers begin with 3.
        let mut next = number;
        fs.list_directory(directory, number + 2, bound, false, &mut |entry, _| {
            assert_eq!((entry.name, entry.cookie), (&name(next)[..], next + 3));
            next += 1;
            if next == number + 100 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
        let reads = work();
        assert!(reads <= 12, "{reads} reads for a hundred entries");
    }
    let mut seen = 0;
    let mut cookie = 2;
    while seen < entries {
        let before = seen;
        fs.list_directory(directory, cookie, bound, false, &mut |entry, _| {
            assert_eq!(entry.name, &name(seen)[..]);
            cookie = entry.cookie;
            seen += 1;
            if seen == before + 5000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
        assert!(seen > before);
    }
    // About 200 entries fit a leaf of 16 KiB.
    let reads = work();
    assert!(reads < entries / 50, "{reads} reads for the whole listing");
    for number in (0..entries).step_by(9973) {
        fs.unlink(directory, &name(number)).unwrap();
        assert!(matches!(fs.lookup(directory, &name(number)), Err(Error::NotFound)));
    }
}

#[test]
fn sixty_five_thousand_subdirectories_and_links() {
    const COUNT: u64 = 65_000;
    let (_storage, fs) = fresh(23);
    let parent = fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).unwrap().ino;
    for number in 0..COUNT {
        fs.make_directory(parent, &name(number), 0o755, CREATOR).unwrap();
    }
    assert_eq!(u64::from(fs.attributes(parent).unwrap().links), COUNT + 2);
    let links = fs.make_directory(ROOT_INO, b"links", 0o755, CREATOR).unwrap().ino;
    fill(&fs, links, COUNT);
    assert_eq!(u64::from(fs.lookup(ROOT_INO, b"file").unwrap().links), COUNT + 1);
    assert_eq!(list(&fs, parent, 0).unwrap().len() as u64, COUNT);
    for number in 0..COUNT {
        fs.remove_directory(parent, &name(number)).unwrap();
    }
    assert_eq!(fs.attributes(parent).unwrap().links, 2);
    assert!(list(&fs, parent, 0).unwrap().is_empty());
    assert_sound(&fs);
}

#[test]
fn a_deep_tree_is_moved_and_never_below_itself() {
    const DEPTH: u64 = 5000;
    let (_storage, fs) = fresh(24);
    let mut chain = vec![ROOT_INO];
    for _ in 0..DEPTH {
        let below = fs.make_directory(*chain.last().unwrap(), b"d", 0o755, CREATOR).unwrap().ino;
        chain.push(below);
    }
    let (top, bottom) = (chain[1], *chain.last().unwrap());
    let other = fs.make_directory(ROOT_INO, b"other", 0o755, CREATOR).unwrap().ino;
    assert!(matches!(fs.rename(ROOT_INO, b"d", bottom, b"x", RenameMode::Replace), Err(Error::Invalid(_))));
    fs.make_directory(bottom, b"x", 0o755, CREATOR).unwrap();
    for (from, to) in [((ROOT_INO, b"d"), (bottom, b"x")), ((bottom, b"x"), (ROOT_INO, b"d"))] {
        assert!(matches!(fs.rename(from.0, from.1, to.0, to.1, RenameMode::Exchange), Err(Error::Invalid(_))));
    }
    fs.rename(chain[2500], b"d", other, b"half", RenameMode::Replace).unwrap();
    fs.rename(ROOT_INO, b"d", bottom, b"top", RenameMode::Replace).unwrap();
    assert_eq!(fs.lookup(top, b"..").unwrap().ino, bottom);
    assert_eq!(fs.attributes(chain[2500]).unwrap().links, 2);
    assert!(matches!(fs.rename(ROOT_INO, b"other", top, b"x", RenameMode::Replace), Err(Error::Invalid(_))));
    assert_sound(&fs);
}

/// Ways to the root are looked at and changed in one operation, so that two moves that are right
/// alone cannot make a loop together.
#[test]
fn renames_at_once_never_make_a_loop() {
    const DIRECTORIES: u64 = 6;
    let (_storage, fs) = fresh(25);
    let made: Vec<Ino> = (0..DIRECTORIES)
        .map(|number| fs.make_directory(ROOT_INO, &name(number), 0o755, CREATOR).unwrap().ino)
        .collect();
    let moved = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (fs, made, moved) = (&fs, &made, &moved);
            scope.spawn(move || {
                let dice = SeededEnvironment::new(30 + thread);
                for step in 0..3000_u64 {
                    let pick = || dice.next_u64() % DIRECTORIES;
                    // The current position; a concurrent rename may move it before the rename,
                    // which then does not find it.
                    let place = |of: u64| {
                        let parent = fs.lookup(made[of as usize], b"..").unwrap().ino;
                        let entries = list(fs, parent, 0).unwrap();
                        let name =
                            entries.into_iter().find(|(_, ino, _)| *ino == made[of as usize]).map(|found| found.0);
                        (parent, name.unwrap_or_else(|| b"moved on".to_vec()))
                    };
                    let ((parent, old), (other, new)) = (place(pick()), place(pick()));
                    let to = if dice.next_u64().is_multiple_of(4) { ROOT_INO } else { made[pick() as usize] };
                    let result = match step % 3 {
                        0 => fs.rename(parent, &old, other, &new, RenameMode::Exchange),
                        _ => fs.rename(parent, &old, to, &old, RenameMode::NoReplace),
                    };
                    match result {
                        Ok(()) => drop(moved.fetch_add(1, Ordering::Relaxed)),
                        Err(Error::Invalid(_) | Error::NotFound | Error::Exists) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
    });
    assert!(moved.load(Ordering::Relaxed) > 500, "hardly anything was moved");
    for directory in &made {
        let mut at = *directory;
        let mut steps = 0;
        while at != ROOT_INO {
            at = fs.lookup(at, b"..").unwrap().ino;
            steps += 1;
            assert!(steps <= DIRECTORIES, "a loop");
        }
    }
    assert_sound(&fs);
}

#[test]
fn a_number_lost_in_a_crash_never_means_another_file() {
    let (storage, mut fs) = fresh(26);
    fs.make_node(ROOT_INO, b"kept", 0o600, 0, CREATOR).unwrap();
    fs.sync().unwrap();
    let mut used = std::collections::BTreeSet::new();
    for round in 0..4 {
        for number in 0..100 {
            let made = fs.make_node(ROOT_INO, &name(1000 * round + number), 0o600, 0, CREATOR).unwrap();
            assert!(used.insert(made.ino), "inode {} was lost and came back", made.ino.0);
        }
        fs = crash(&storage, fs);
    }
    assert_eq!(list(&fs, ROOT_INO, 0).unwrap().len(), 1);
    assert_sound(&fs);
}
