//! Whole archives that are authentic and invalid: the input edits records, nodes and the commit
//! record of a valid one, and every user operation is executed on the result. Errors are correct
//! results; panics, hangs and unbounded memory are not.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::super::Backups;
use super::decoders::{filled, plain_page};
use super::forge::{ARCHIVE, Forge, OWNER, key, open_on, overwrite};
use crate::archive::check;
use crate::env::SeededEnvironment;
use crate::error::{Error, Refusal, Result};
use crate::exchange::{OfflineNamespace, Restore, compare};
use crate::format::header::HEADER_BYTES;
use crate::format::log::{DroppedRange, LogMark, LogPiece};
use crate::format::values::{Extent, is_valid_name};
use crate::format::{BLOCK, Generation, HEADER_START, Ino, Key, LOG, ROOT_INO, kind};
use crate::frame::{PageCipher, PageContent};
use crate::fs::{Creator, FileSystem, RenameMode, SetAttributes, SnapshotInfo, XattrMode, mode};
use crate::rescue::{RescueOptions, rescue_from};
use crate::storage::{MemoryStorage, Storage};

const MAKER: Creator = Creator { uid: 0, gid: 0, umask: None };

/// Maximum edits of one input.
const MOST_EDITS: usize = 16;
/// Maximum objects that a walk examines.
const MOST_OBJECTS: usize = 500;
/// Maximum snapshots that are read.
const MOST_SNAPSHOTS: usize = 3;
/// Bytes read at each position of a file.
const PIECE: u64 = 64 << 10;
/// Maximum steps of one snapshot operation. The sample has 20 objects.
const MOST_STEPS: usize = 20_000;

/// Iterator over the edits of an input: (operation, operands, bytes).
struct Edits<'a>(&'a [u8]);

impl<'a> Iterator for Edits<'a> {
    type Item = (u8, [u8; 6], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (head, rest) = self.0.split_first_chunk::<8>()?;
        let length = usize::from(head[7]).min(rest.len());
        let (bytes, rest) = rest.split_at(length);
        self.0 = rest;
        Some((head[0], filled(&head[1..7]), bytes))
    }
}

fn edit(forge: &mut Forge, operation: u8, operands: [u8; 6], bytes: &[u8], nodes: &mut Vec<(usize, usize, Vec<u8>)>) {
    let [tree, a, b, c, d, e] = operands.map(usize::from);
    let tree = if tree < 128 { 0 } else { tree % 5 };
    let records = &mut forge.trees[tree];
    let at = (a | b << 8).checked_rem(records.len()).unwrap_or(0);
    match operation % 16 {
        0 if !records.is_empty() => overwrite(&mut records[at].1, c | d << 8, bytes),
        1 if !records.is_empty() => records[at].1 = bytes.to_vec(),
        2 => {
            let sub = u64::from_le_bytes(filled(bytes));
            let key = Key::new((c | d << 8) as u64, e as u8, sub);
            records.push((key, bytes.get(8..).unwrap_or_default().to_vec()));
            records.sort_by_key(|(key, _)| *key);
        }
        3 if !records.is_empty() => drop(records.remove(at)),
        4 if !records.is_empty() => {
            let (kind, number) = (c as u8, u64::from_le_bytes(filled(bytes)));
            match d % 3 {
                0 => records[at].0.object = number,
                1 => records[at].0.sub = number,
                _ => records[at].0.kind = kind,
            }
            if e % 2 == 0 {
                records.sort_by_key(|(key, _)| *key);
            }
        }
        5 => nodes.push((a, c | d << 8, bytes.to_vec())),
        6 => {
            let (at, bytes) = ((a | b << 8) % 384, bytes.to_vec());
            forge.on_record = Some(Box::new(move |plain| overwrite(plain, at, &bytes)));
        }
        7 if !records.is_empty() => {
            // The same value under another key: shared and cyclic references.
            let (from, to) = (at, (c | d << 8) % records.len());
            records[to].1 = records[from].1.clone();
        }
        8 => forge.leaf_bytes = 400 + (a | b << 8) % 15_000,
        9 => {
            // An extent of a page of any kind and content.
            let Some(page) = plain_page(bytes).filter(|page| page.blocks() <= 64) else { return };
            let pointer = forge.page(page);
            let mut extents = forge.live().iter_mut().filter(|(key, _)| key.kind == kind::EXTENT);
            if let Some((_, value)) = extents.nth(a % 8) {
                let born = Generation(c as u64);
                *value = Extent { page: pointer, start: d as u32, length: e as u32 * 97 + 1, born }.encode().to_vec();
            }
        }
        10 if a % 2 == 0 => {
            // A snapshot of the state after the previous edits, or one with a misplaced root.
            let mut root = forge.live_root();
            root.level ^= u8::from(b % 4 == 0);
            let name = [&b"kept"[..], &bytes[..bytes.len().min(200)]].concat();
            if is_valid_name(&name) {
                forge.snapshot((c | d << 8) as u64, root, &name);
            }
        }
        11..=15 => edit_log(forge, operation % 16 - 11, operands, bytes),
        _ => forge.honest_space = false,
    }
}

/// Edits the log, if there is one.
fn edit_log(forge: &mut Forge, operation: u8, operands: [u8; 6], bytes: &[u8]) {
    let [a, b, c, d, e, f] = operands.map(usize::from);
    if !forge.has_log() {
        return;
    }
    let number = u64::from_le_bytes(filled(bytes));
    let rest = bytes.get(8..).unwrap_or_default();
    let copied = {
        let records = forge.live();
        (a | b << 8).checked_rem(records.len()).map(|at| records[at].clone())
    };
    if operation == 0 && a % 4 != 3 {
        let says = &mut forge.entry().says;
        says.inodes = says.inodes.wrapping_add(b as u64);
        return;
    }
    if operation == 0 {
        // The record names a pending log, of an earlier commit or of itself.
        let generation = Generation(forge.record.generation.0.wrapping_sub(b as u64 % 3));
        let (record, entry) = ([c as u8; 16], [d as u8; 16]);
        forge.record.pending = Some(LogMark { generation, record, number: e as u32 + 1, entry });
        return;
    }
    let Some(last) = forge.entries.last_mut() else { return };
    let says = &mut last.says;
    match operation {
        1 => {
            // A record of the tree with some bytes changed, or a removal.
            let Some((mut key, mut value)) = copied else { return };
            overwrite(&mut value, c | d << 8, bytes);
            if f % 4 == 1 {
                key.object = e as u64;
            }
            says.records.push((key, (f % 4 != 3).then_some(value)));
            says.records.sort_by_key(|(key, _)| *key);
            says.records.dedup_by_key(|(key, _)| *key);
        }
        2 => {
            // Pieces at equal distances.
            let apart = if d % 2 == 0 { 1 + rest.len() as u64 } else { 1 << (d % 20) };
            for n in 0..1 + c as u64 {
                let data = if rest.is_empty() { vec![e as u8] } else { rest.to_vec() };
                says.pieces.push(LogPiece { ino: Ino(a as u64), offset: number.wrapping_add(n * apart), data });
            }
            says.pieces.sort_by_key(|piece| (piece.ino, piece.offset));
        }
        3 => {
            let end = if rest.is_empty() { u64::MAX } else { number.wrapping_add(u64::from_le_bytes(filled(rest))) };
            says.dropped.push(DroppedRange { ino: Ino(a as u64), start: number, end });
        }
        _ => match b % 4 {
            0 => last.on_head.push((c % 64, bytes.to_vec())),
            1 => last.on_body.push((c | d << 8, bytes.to_vec())),
            2 => last.block = Some(LOG.0 + e as u64),
            _ => last.torn = true,
        },
    }
}

/// Returns the archive that an input describes.
fn forged(data: &[u8]) -> Vec<u8> {
    // Half of the inputs have a log, as in the other target.
    let mut forge = if data.len() % 2 == 1 { Forge::with_log() } else { Forge::new() };
    let mut nodes = Vec::new();
    for (operation, operands, bytes) in Edits(data).take(MOST_EDITS) {
        edit(&mut forge, operation, operands, bytes, &mut nodes);
    }
    if !nodes.is_empty() {
        let mut count = 0;
        forge.on_page = Some(Box::new(move |page| {
            for (_, at, bytes) in nodes.iter().filter(|(number, ..)| *number == count) {
                match &mut page.content {
                    PageContent::Body(body) => overwrite(body, *at, bytes),
                    PageContent::Chunks { .. } => {}
                }
            }
            count += 1;
        }));
    }
    forge.finish()
}

pub(super) fn whole(data: &[u8]) {
    let bytes = forged(data);
    exercise(&bytes, (data.len() / 2).is_multiple_of(2));
}

/// Executes every user operation on an archive; returns the number of operations that failed.
pub(in crate::archive) fn exercise(bytes: &[u8], rescue: bool) -> usize {
    let mut refusals = 0;
    match open_on(Arc::new(MemoryStorage::from_contents(bytes.to_vec())), true) {
        Err(_) => refusals += 1,
        Ok(fs) => {
            refusals += walk(&fs);
            refusals += fs.list_snapshots().map_or(1, |kept| {
                let walked = |one: &SnapshotInfo| fs.open_snapshot(&one.name).map_or(1, |view| walk(&view));
                kept.iter().take(MOST_SNAPSHOTS).map(walked).sum()
            });
            for full in [false, true] {
                refusals += check(&fs, full, &mut |_| {}).map_or(1, |report| report.findings.len());
            }
            refusals += usize::from(fs.volume.lost().is_some() || !fs.volume.lost_pages().is_empty());
            let _ = fs.statistics(1 << 30);
        }
    }
    let storage = Arc::new(MemoryStorage::from_contents(bytes.to_vec()));
    match open_on(storage.clone(), false) {
        Err(_) => refusals += 1,
        Ok(fs) => refusals += change(&fs, &storage).iter().filter(|result| is_damage(result)).count(),
    }
    for start in HEADER_START {
        let header = (start * BLOCK) as usize..(start * BLOCK) as usize + HEADER_BYTES;
        let mut now = vec![0; header.len()];
        storage.read_at(header.start as u64, &mut now).expect("the header is there");
        assert!(now == bytes[header], "a change of files wrote into the header at block {start}");
    }
    if rescue {
        refusals += rescued(bytes, None) + rescued(bytes, Some(b"kept"));
    }
    refusals
}

fn is_damage(result: &Result<()>) -> bool {
    matches!(result, Err(Error::Damaged(_) | Error::Refused(Refusal::DamagedBackup { .. })))
}

/// Walks over all named objects like a program: each directory once, files in parts.
fn walk(fs: &FileSystem) -> usize {
    let mut failures = 0;
    let mut seen = HashSet::new();
    let mut pending = vec![ROOT_INO];
    while let Some(ino) = pending.pop() {
        if seen.len() >= MOST_OBJECTS || !seen.insert(ino) {
            continue;
        }
        let Ok(attributes) = fs.attributes(ino) else {
            failures += 1;
            continue;
        };
        let size = attributes.size;
        let result = match attributes.mode & mode::TYPE {
            mode::DIRECTORY => list(fs, ino, &mut pending),
            mode::REGULAR => [0, size / 2, size.saturating_sub(PIECE), 400_000]
                .into_iter()
                .try_for_each(|at| fs.read(ino, at, PIECE as usize).map(drop))
                .and_then(|()| fs.next_data(ino, 0).or_else(benign))
                .and_then(|_| fs.next_hole(ino, 0).or_else(benign))
                .map(drop),
            mode::SYMLINK => fs.read_link(ino).map(drop),
            _ => Ok(()),
        };
        failures += usize::from(result.is_err());
        let names = fs.list_xattrs(ino).unwrap_or_else(|_| {
            failures += 1;
            Vec::new()
        });
        for name in names.split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
            failures += usize::from(fs.xattr(ino, name).is_err());
        }
    }
    failures
}

/// Accepts the error for no data, or no hole, after the end.
fn benign(error: Error) -> Result<u64> {
    if matches!(error, Error::Damaged(_)) { Err(error) } else { Ok(0) }
}

fn list(fs: &FileSystem, directory: Ino, pending: &mut Vec<Ino>) -> Result<()> {
    let mut names = Vec::new();
    fs.list_directory(directory, 2, u64::MAX, false, &mut |entry, _| {
        assert!(crate::format::values::is_valid_name(entry.name));
        pending.push(entry.ino);
        names.push(entry.name.to_vec());
        if names.len() < MOST_OBJECTS { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    names.iter().try_for_each(|name| fs.lookup(directory, name).map(drop))
}

/// Changes the archive like a mount; each operation may be refused.
fn change(fs: &Arc<FileSystem>, storage: &Arc<MemoryStorage>) -> Vec<Result<()>> {
    let mut results = vec![fs.take_snapshot(b"taken")];
    let mut children = Vec::new();
    results.push(fs.list_directory(ROOT_INO, 2, u64::MAX, false, &mut |entry, _| {
        children.push((entry.ino, entry.name.to_vec()));
        if children.len() < 8 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }));
    let made = fs.make_node(ROOT_INO, b"made", mode::REGULAR | 0o600, 0, OWNER);
    if let Ok(made) = &made {
        results.push(fs.write(made.ino, 1000, &[7; 5000]));
        results.push(fs.link(made.ino, ROOT_INO, b"linked").map(drop));
    }
    results.push(made.map(drop));
    for (at, (ino, name)) in children.iter().enumerate() {
        results.push(fs.set_xattr(*ino, b"user.new", &[1; 300], XattrMode::Set));
        results.push(match at % 4 {
            0 => fs.unlink(ROOT_INO, name),
            1 => fs.rename(ROOT_INO, name, ROOT_INO, b"renamed", RenameMode::Replace),
            2 => fs.set_attributes(*ino, &SetAttributes { size: Some(5), ..SetAttributes::default() }).map(drop),
            _ => fs.write(*ino, 10, b"written"),
        });
    }
    results.push(fs.sync());
    match fs.list_snapshots() {
        Ok(kept) => {
            let newest = kept.iter().rev().take(MOST_SNAPSHOTS);
            results.extend(newest.map(|one| fs.open_snapshot(&one.name).and_then(|view| restored(fs, &view))));
        }
        Err(error) => results.push(Err(error)),
    }
    results.push(backed_up(fs, storage));
    results.push(fs.remove_chosen_snapshots(&mut |all| Ok(all.iter().rev().map(|(id, _)| *id).take(2).collect())));
    results.push(fs.finish_removals(&mut || Ok(())));
    for _ in 0..4 {
        results.push(fs.maintain().map(drop));
    }
    results.push(fs.purge());
    results.push(fs.close());
    results
}

/// Compares with a snapshot, and restores one path in place and everything into another directory.
fn restored(fs: &FileSystem, view: &FileSystem) -> Result<()> {
    let mut steps = 0;
    let mut go_on = || {
        steps += 1;
        assert!(steps < MOST_STEPS, "it goes on and on");
        Ok(())
    };
    compare(view, fs, &mut |held| {
        assert!(held < MOST_STEPS, "differences without end");
        go_on()
    })?;
    let mut first = None;
    view.list_directory(ROOT_INO, 2, u64::MAX, false, &mut |entry, _| {
        first = Some(entry.name.to_vec());
        ControlFlow::Break(())
    })?;
    let paths: Vec<Vec<u8>> = first.into_iter().collect();
    let in_place =
        Restore::prepare(fs, view, &paths, None, &mut OfflineNamespace(fs, MAKER))?.run(&mut go_on).map(drop);
    let beside =
        Restore::prepare(fs, view, &[], Some(b"restored"), &mut OfflineNamespace(fs, MAKER))?.run(&mut go_on).map(drop);
    in_place.and(beside)
}

/// Makes a backup in memory, and reads it back.
fn backed_up(fs: &Arc<FileSystem>, storage: &Arc<MemoryStorage>) -> Result<()> {
    let source = Backups::of(fs.clone(), storage.clone()).pin()?;
    let file: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    source.fill(&file, &mut |_| Ok(()))?;
    source.verify(&file, 100, &mut |_| Ok(())).map(drop)
}

/// Rescues into a temporary directory; nothing may appear outside of it. A missing snapshot is not
/// a failure.
fn rescued(bytes: &[u8], snapshot: Option<&[u8]>) -> usize {
    let parent =
        std::env::temp_dir().join(format!("lockbox-fuzzing-{}-{:?}", std::process::id(), std::thread::current().id()));
    let to = parent.join("to");
    let cipher = PageCipher::new(&key(), ARCHIVE, true, Arc::new(SeededEnvironment::new(4)));
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_contents(bytes.to_vec()));
    let options = RescueOptions { to, partial: true, privileges: false, snapshot: snapshot.map(<[u8]>::to_vec) };
    let report = rescue_from(storage, cipher, &SeededEnvironment::new(6), &options, &mut |_| Ok(()), &mut |_| Ok(()));
    let beside: Vec<_> = std::fs::read_dir(&parent).into_iter().flatten().flatten().map(|e| e.file_name()).collect();
    assert!(beside.iter().all(|name| name == "to"), "rescue wrote beside its target: {beside:?}");
    // Without other users, nothing of a directory remains; an unremovable object fails the next
    // run.
    let _ = std::fs::remove_dir_all(&parent);
    match report {
        Err(Error::Refused(_)) => 0,
        report => usize::from(!report.is_ok_and(|report| report.complete())),
    }
}
