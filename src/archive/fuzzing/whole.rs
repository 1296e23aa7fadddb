//! Whole archives that are authentic and wrong: the input edits records, nodes and the commit record of a sound one, and everything that a user
//! may do with an archive is done with the result. Errors are right answers; panics, hangs and bytes without bound are not.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::super::check::check;
use super::decoders::filled;
use super::forge::{Forge, OWNER, open_on};
use super::pages::plain_page;
use crate::env::SeededEnvironment;
use crate::error::{Error, Result};
use crate::format::values::{Extent, is_valid_name};
use crate::format::{Generation, Ino, Key, ROOT_INO, kind};
use crate::frame::{Content, PageCipher};
use crate::fs::{FileSystem, KeptSnapshot, RenameMode, SetAttributes, XattrMode, mode};
use crate::rescue::{RescueOptions, rescue_from};
use crate::storage::{MemoryStorage, Storage};

/// Edits of one input.
const MOST_EDITS: usize = 16;
/// Objects that a walk looks at.
const MOST_OBJECTS: usize = 500;
/// Snapshots that are read.
const MOST_SNAPSHOTS: usize = 3;
/// Bytes read at each place of a file.
const PIECE: u64 = 64 << 10;

/// Splits the input into edits: (operation, operands, bytes).
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

fn overwrite(value: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = value.get_mut(at..) {
        let length = place.len().min(bytes.len());
        place[..length].copy_from_slice(&bytes[..length]);
    }
}

fn edit(forge: &mut Forge, operation: u8, operands: [u8; 6], bytes: &[u8], nodes: &mut Vec<(usize, usize, Vec<u8>)>) {
    let [tree, a, b, c, d, e] = operands.map(usize::from);
    let tree = if tree < 128 { 0 } else { tree % 5 };
    let records = &mut forge.trees[tree];
    let at = (a | b << 8).checked_rem(records.len()).unwrap_or(0);
    match operation % 11 {
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
            // The same value under another key: shared and cyclic things.
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
            // A snapshot of what the edits have made so far, or one with a root that is not where it says.
            let mut root = forge.live_root();
            root.level ^= u8::from(b % 4 == 0);
            let name = [&b"kept"[..], &bytes[..bytes.len().min(200)]].concat();
            if is_valid_name(&name) {
                forge.snapshot((c | d << 8) as u64, root, &name);
            }
        }
        _ => forge.honest_space = false,
    }
}

/// The archive that an input describes.
fn forged(data: &[u8]) -> Vec<u8> {
    let mut forge = Forge::new();
    let mut nodes = Vec::new();
    for (operation, operands, bytes) in Edits(data).take(MOST_EDITS) {
        edit(&mut forge, operation, operands, bytes, &mut nodes);
    }
    if !nodes.is_empty() {
        let mut count = 0;
        forge.on_page = Some(Box::new(move |page| {
            for (_, at, bytes) in nodes.iter().filter(|(number, ..)| *number == count) {
                match &mut page.content {
                    Content::Body(body) => overwrite(body, *at, bytes),
                    Content::Cells { .. } => {}
                }
            }
            count += 1;
        }));
    }
    forge.finish()
}

pub(super) fn whole(data: &[u8]) {
    let bytes = forged(data);
    exercise(&bytes, data.len().is_multiple_of(4));
}

/// Everything that may be asked of an archive. Answers how many of the questions found something wrong.
pub(in crate::archive) fn exercise(bytes: &[u8], rescue: bool) -> usize {
    let mut refusals = 0;
    match open_on(Arc::new(MemoryStorage::from_contents(bytes.to_vec())), true) {
        Err(_) => refusals += 1,
        Ok(fs) => {
            refusals += walk(&fs);
            refusals += fs.kept_snapshots().map_or(1, |kept| {
                let walked = |one: &KeptSnapshot| fs.moment(&one.name).map_or(1, |moment| walk(&moment));
                kept.iter().take(MOST_SNAPSHOTS).map(walked).sum()
            });
            refusals += check(&fs, true, &mut |_| {}).map_or(1, |report| report.findings.len());
            let _ = fs.statistics(1 << 30);
        }
    }
    match open_on(Arc::new(MemoryStorage::from_contents(bytes.to_vec())), false) {
        Err(_) => refusals += 1,
        Ok(fs) => refusals += change(&fs).iter().filter(|result| matches!(result, Err(Error::Damaged(_)))).count(),
    }
    if rescue {
        refusals += rescued(bytes, None) + rescued(bytes, Some(b"kept"));
    }
    refusals
}

/// Looks at everything that has a name, as programs do: each directory once, files in parts.
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

/// There is no data, or no hole, behind the end.
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

/// Changes as a mount would make them; each may be refused.
fn change(fs: &FileSystem) -> Vec<Result<()>> {
    let mut results = Vec::new();
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
    for _ in 0..4 {
        results.push(fs.maintain().map(drop));
    }
    results.push(fs.purge());
    results.push(fs.close());
    results
}

/// Rescues into a directory that is thrown away; nothing may appear beside it. That there is no such snapshot is nothing wrong.
fn rescued(bytes: &[u8], snapshot: Option<&[u8]>) -> usize {
    let parent =
        std::env::temp_dir().join(format!("lockbox-fuzzing-{}-{:?}", std::process::id(), std::thread::current().id()));
    let to = parent.join("to");
    let cipher =
        PageCipher::new(&super::forge::key(), super::forge::ARCHIVE, true, Arc::new(SeededEnvironment::new(4)));
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_contents(bytes.to_vec()));
    let options = RescueOptions { to, partial: true, privileges: false, snapshot: snapshot.map(<[u8]>::to_vec) };
    let report = rescue_from(storage, cipher, &SeededEnvironment::new(6), &options, &mut |_| Ok(()), &mut |_| Ok(()));
    let beside: Vec<_> = std::fs::read_dir(&parent).into_iter().flatten().flatten().map(|e| e.file_name()).collect();
    assert!(beside.iter().all(|name| name == "to"), "rescue wrote beside its target: {beside:?}");
    // Nothing is left of a directory that nobody else uses; what cannot be removed shows in the next run.
    let _ = std::fs::remove_dir_all(&parent);
    match report {
        Err(Error::Refused(_)) => 0,
        report => usize::from(!report.is_ok_and(|report| report.complete())),
    }
}
