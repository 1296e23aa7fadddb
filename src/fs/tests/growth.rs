//! Space of an archive while parts of it are overwritten repeatedly, and of files that are replaced
//! or unlinked while open.

use super::support::{CREATOR, assert_sound, fresh};
use crate::env::{Environment, SeededEnvironment};
use crate::error::Error;
use crate::format::ROOT_INO;
use crate::format::values::NO_TRIM;
use crate::fs::extents::FRAME;
use crate::fs::reclaim::STEP;
use crate::fs::writeback::FREED_BYTES;
use crate::fs::{RenameMode, SetAttributes, extents, inode, mode};

const SMALL: u64 = 4096;
const FILE: u64 = 8 << 20;

/// Every block of the file is overwritten six times on average, each write made durable by itself.
/// Live parts of old pages, pending frees, the reserve of the next commit and all nodes together
/// never exceed the size of the content.
#[test]
fn synced_overwrites_never_take_twice_what_is_live() {
    let (storage, fs) = fresh(7);
    let dice = SeededEnvironment::new(8);
    let mut bytes = vec![0; FILE as usize];
    dice.fill_random(&mut bytes).unwrap();
    let file = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
    fs.write(file, 0, &bytes).unwrap();
    fs.sync().unwrap();
    let mut most = 0;
    for write in 0..6 * FILE / SMALL {
        let at = dice.next_u64() % (FILE / SMALL) * SMALL;
        let part = &mut bytes[at as usize..(at + SMALL) as usize];
        dice.fill_random(part).unwrap();
        fs.write(file, at, part).unwrap();
        fs.sync().unwrap();
        most = most.max(storage.allocated());
        if write % 1024 == 0 {
            println!(
                "{write} writes: {:.2} of the content, at most {:.2}",
                storage.allocated() as f64 / FILE as f64,
                most as f64 / FILE as f64
            );
        }
    }
    assert!(most <= 2 * FILE, "{:.2} times the content", most as f64 / FILE as f64);
    assert!(fs.read(file, 0, FILE as usize).unwrap() == bytes);
}

/// Nothing is synced: the writes themselves make the replaced data free.
#[test]
fn replaced_data_that_is_not_synced_takes_a_bounded_space() {
    let (storage, fs) = fresh(9);
    let dice = SeededEnvironment::new(10);
    let mut bytes = vec![0; (1 << 20) + 20 * 4096];
    dice.fill_random(&mut bytes).unwrap();
    let live = 24 << 20;
    let file = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
    let mut most = 0;
    for round in 0..20 {
        for at in (0..live).step_by(1 << 20) {
            fs.write(file, at, &bytes[round * 4096..][..1 << 20]).unwrap();
            most = most.max(storage.allocated());
        }
    }
    // Pages that the open commit, the last one and the one before it freed, and dirty data twice.
    let bound = live + 3 * FREED_BYTES + fs.options.max_dirty_bytes * 2;
    assert!(most <= bound, "{most} of {bound}");
}

#[test]
fn a_file_replaced_while_open_is_gone_with_its_last_handle() {
    let (_, fs) = fresh(11);
    for round in 0..1000_u32 {
        let made = fs.create_and_open(ROOT_INO, b"new", 0o600, CREATOR).unwrap().ino;
        fs.write(made, 0, &round.to_le_bytes().repeat(5000)).unwrap();
        let old = fs.lookup(ROOT_INO, b"file").ok().map(|old| old.ino);
        old.iter().for_each(|old| fs.open(*old).unwrap());
        fs.rename(ROOT_INO, b"new", ROOT_INO, b"file", RenameMode::Replace).unwrap();
        fs.release(made).unwrap();
        if let Some(old) = old {
            fs.release(old).unwrap();
            assert!(matches!(fs.attributes(old), Err(Error::Stale)), "round {round}");
        }
    }
    assert!(!fs.has_pending_reclaim().unwrap());
}

/// The name may be removed before or after the content.
#[test]
fn content_cut_off_an_unlinked_file_is_freed_while_the_file_is_open() {
    for unlinked_first in [true, false] {
        let (_, fs) = fresh(12);
        let ino = fs.create_and_open(ROOT_INO, b"file", 0o600, CREATOR).unwrap().ino;
        for number in 0..2 * STEP {
            fs.write(ino, number * 2 * FRAME, &[number as u8; 5000]).unwrap();
        }
        fs.sync().unwrap();
        let unlink = || fs.unlink(ROOT_INO, b"file").unwrap();
        if unlinked_first {
            unlink();
        }
        fs.set_attributes(ino, &SetAttributes { size: Some(0), ..SetAttributes::default() }).unwrap();
        if !unlinked_first {
            unlink();
        }
        for _ in 0..3 {
            while fs.maintain().unwrap() {}
            fs.make_durable().unwrap();
        }
        let state = fs.volume.state();
        let view = fs.volume.view(&state);
        assert_eq!(inode::load(view, ino).unwrap().trim, NO_TRIM, "unlinked_first={unlinked_first}");
        assert_eq!(extents::find_overlapping(view, ino, 0..u64::MAX, 1).unwrap(), []);
        let used = fs.volume.allocator().blocks().used;
        assert!(used < STEP / 4, "unlinked_first={unlinked_first}: {used} blocks are in use");
        drop(state);
        assert_sound(&fs);
        fs.release(ino).unwrap();
        assert!(matches!(fs.attributes(ino), Err(Error::Stale)));
    }
}
