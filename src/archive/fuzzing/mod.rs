//! Entry points for fuzzers: each accepts any bytes, and panics if an invariant is violated.
//! Part of tests and debug builds only.

mod decoders;
mod forge;
mod seeds;
mod whole;

pub use seeds::seeds;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use crate::error::Error;
use crate::format::header::FEATURE_LOG;
use crate::format::{Ino, ROOT_INO};
use crate::fs::{FileSystem, RenameMode, SetAttributes, XattrMode, mode};
use crate::storage::simulated::SimulatedStorage;
#[cfg(test)]
pub(in crate::archive) use forge::*;
pub(in crate::archive) use forge::{OWNER, create_on, open_on, with_header};
#[cfg(test)]
pub(in crate::archive) use whole::exercise;

/// Fuzz target: a panic for an input is a finding.
pub type FuzzTarget = fn(&[u8]);

/// All targets of the library by name.
pub const TARGETS: [(&str, FuzzTarget); 20] = [
    ("header", decoders::header),
    ("framing", decoders::framing),
    ("slot", decoders::slot),
    ("identity", decoders::identity),
    ("record", decoders::record),
    ("delta", decoders::delta),
    ("entry", decoders::entry),
    ("prologue", decoders::prologue),
    ("head", decoders::head),
    ("node", decoders::node),
    ("directory", decoders::directory),
    ("values", decoders::values),
    ("xattr", decoders::xattr),
    ("space", decoders::space),
    ("acl", decoders::acl),
    ("seen", decoders::seen),
    ("known", decoders::known),
    ("page", decoders::page),
    ("whole", whole::whole),
    ("operations", operations),
];

/// Maximum operations of one input.
const MOST: usize = 60;
/// Maximum bytes of a file: slightly more than three frames.
const MOST_BYTES: usize = 400_000;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct File {
    content: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Files of the root directory; hard links share an entry of `files`.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
struct Model {
    names: BTreeMap<Vec<u8>, Ino>,
    files: BTreeMap<Ino, File>,
}

impl Model {
    fn unlink(&mut self, name: &[u8]) {
        if let Some(ino) = self.names.remove(name)
            && !self.names.values().any(|other| *other == ino)
        {
            self.files.remove(&ino);
        }
    }
}

fn operations(data: &[u8]) {
    // Half of the inputs have a log: then a sync usually writes an entry of it.
    let features = if data.len() % 2 == 1 { FEATURE_LOG } else { 0 };
    let base = with_header(features).expect("a header");
    let mut storage = SimulatedStorage::from_contents(&base.contents());
    let mut fs = create_on(storage.clone(), 1).expect("a new archive");
    let mut model = Model::default();
    // Every state since the last sync: a crash may leave any of them.
    let mut since = vec![model.clone()];
    // Expected content of each snapshot, by name: durable at once.
    let mut kept: BTreeMap<Vec<u8>, Model> = BTreeMap::new();
    for (step, operation) in data.chunks_exact(6).take(MOST).enumerate() {
        match operation[0] % 16 {
            12 | 13 => {
                fs.sync().expect("memory does not fail");
                since.clear();
            }
            14 if operation[1] % 3 == 0 => drop(fs.maintain().expect("memory does not fail")),
            14 => {
                if operation[1] % 3 == 1 {
                    take_snapshot(&fs, &mut kept, &model, operation[2]);
                } else {
                    remove_snapshot(&fs, &mut kept, operation[2]);
                }
                since.clear();
            }
            15 => {
                drop(fs);
                let mut state = u64::from(operation[1]) << 8 | step as u64;
                storage = if operation[2] % 2 == 0 {
                    storage.process_death()
                } else {
                    storage.crash_random(&mut || {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        state >> 11
                    })
                };
                fs = open_on(storage.clone(), false).expect("a crash leaves an archive that opens");
                let found = observe(&fs);
                let at = since.iter().rposition(|state| *state == found);
                assert!(at.is_some(), "step {step}: no state since the last sync looks like this: {:?}", found.names);
                model = found;
                since.clear();
                assert_shown(&fs, &kept);
            }
            _ => apply(&fs, &mut model, operation),
        }
        since.push(model.clone());
    }
    assert_eq!(observe(&fs).names, model.names);
    assert!(observe(&fs) == model, "contents or attributes differ");
    fs.close().expect("memory does not fail");
    drop(fs);
    let fs = open_on(storage, true).expect("a closed archive opens");
    assert!(observe(&fs) == model, "contents or attributes differ after closing");
    assert_shown(&fs, &kept);
    let findings = fs.check_structure(true).expect("a check");
    assert!(findings.is_empty(), "{findings:?}");
    let findings = fs.volume.check_space(true, &mut |_, _| {}).expect("a check");
    assert!(findings.is_empty(), "{findings:?}");
}

fn take_snapshot(fs: &FileSystem, kept: &mut BTreeMap<Vec<u8>, Model>, model: &Model, choice: u8) {
    let name = vec![b'a' + choice % 4];
    match fs.take_snapshot(&name) {
        Ok(()) => assert!(kept.insert(name, model.clone()).is_none(), "a name was given twice"),
        Err(error) => assert!(matches!(error, Error::Exists) && kept.contains_key(&name), "{error}"),
    }
    fs.sync().expect("memory does not fail");
}

/// Removes the selected snapshot, if there is any; its exclusive data is freed at once or left.
fn remove_snapshot(fs: &FileSystem, kept: &mut BTreeMap<Vec<u8>, Model>, choice: u8) {
    if let Some(name) = kept.keys().nth(usize::from(choice >> 1) % kept.len().max(1)).cloned() {
        kept.remove(&name);
        let id = fs.snapshot_named(&name).expect("a snapshot that was taken");
        fs.remove_chosen_snapshots(&mut |_| Ok(vec![id.0])).expect("memory does not fail");
        if choice.is_multiple_of(2) {
            fs.finish_removals(&mut || Ok(())).expect("memory does not fail");
        }
    }
    fs.sync().expect("memory does not fail");
}

fn assert_shown(fs: &FileSystem, kept: &BTreeMap<Vec<u8>, Model>) {
    let names: Vec<Vec<u8>> = fs.list_snapshots().expect("a list").into_iter().map(|one| one.name).collect();
    assert!(names.len() == kept.len() && names.iter().all(|name| kept.contains_key(name)), "{names:?}");
    for (name, shown) in kept {
        assert!(observe(&fs.open_snapshot(name).expect("a snapshot")) == *shown, "a snapshot shows something else");
    }
}

/// Applies one operation to the file system and to the model.
fn apply(fs: &FileSystem, model: &mut Model, operation: &[u8]) {
    let name = vec![b'a' + operation[1] % 6];
    let offset = usize::from(u16::from_le_bytes([operation[2], operation[3]])) * 5;
    let length = usize::from(operation[4]).pow(2);
    let fill = operation[5];
    let Some(&ino) = model.names.get(&name) else {
        let made = fs.make_node(ROOT_INO, &name, mode::REGULAR | 0o600, 0, OWNER).expect("a free name");
        model.names.insert(name, made.ino);
        model.files.insert(made.ino, File::default());
        return;
    };
    let file = model.files.get_mut(&ino).expect("a named file");
    let other = vec![b'a' + operation[5] % 6];
    match operation[0] % 16 {
        0..=3 => {
            let data: Vec<u8> = match fill % 3 {
                0 => vec![fill; length],
                _ => forge::noise(fill.into(), length),
            };
            fs.write(ino, offset as u64, &data).expect("memory does not fail");
            if !data.is_empty() {
                file.content.resize(file.content.len().max(offset + length).min(MOST_BYTES), 0);
                file.content[offset..offset + length].copy_from_slice(&data);
            }
        }
        4 => {
            let set = SetAttributes { size: Some(offset as u64), ..SetAttributes::default() };
            fs.set_attributes(ino, &set).expect("memory does not fail");
            file.content.resize(offset, 0);
        }
        5 | 6 => {
            fs.zero_range(ino, offset as u64, length.max(1) as u64, true, false).expect("memory does not fail");
            let end = (offset + length.max(1)).min(file.content.len());
            if offset < end {
                file.content[offset..end].fill(0);
            }
        }
        7 => {
            fs.unlink(ROOT_INO, &name).expect("a name that is there");
            model.unlink(&name);
        }
        8 => {
            fs.rename(ROOT_INO, &name, ROOT_INO, &other, RenameMode::Replace).expect("a name that is there");
            if model.names.get(&other) != Some(&ino) {
                model.unlink(&other);
                model.names.remove(&name);
                model.names.insert(other, ino);
            }
        }
        9 => match fs.link(ino, ROOT_INO, &other) {
            Ok(_) => assert!(model.names.insert(other, ino).is_none()),
            Err(error) => assert!(matches!(error, Error::Exists) && model.names.contains_key(&other)),
        },
        10 => {
            let key = [b"user.".as_slice(), &other].concat();
            let value = vec![fill; length % 9000];
            fs.set_xattr(ino, &key, &value, XattrMode::Set).expect("memory does not fail");
            file.xattrs.insert(key, value);
        }
        _ => {
            let key = [b"user.".as_slice(), &other].concat();
            assert_eq!(fs.remove_xattr(ino, &key).is_ok(), file.xattrs.remove(&key).is_some());
        }
    }
}

fn observe(fs: &FileSystem) -> Model {
    let mut model = Model::default();
    fs.list_directory(ROOT_INO, 2, u64::MAX, false, &mut |entry, _| {
        assert!(model.names.insert(entry.name.to_vec(), entry.ino).is_none());
        ControlFlow::Continue(())
    })
    .expect("the root lists");
    for &ino in model.names.values() {
        let size = fs.attributes(ino).expect("a named file").size;
        let content = fs.read(ino, 0, size as usize).expect("a named file");
        let names = fs.list_xattrs(ino).expect("a named file");
        let names = names.split(|&byte| byte == 0).filter(|name| !name.is_empty());
        let xattrs = names.map(|name| (name.to_vec(), fs.xattr(ino, name).expect("a listed attribute"))).collect();
        model.files.insert(ino, File { content, xattrs });
    }
    model
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::SeededEnvironment;

    /// What the fuzzers begin with, and simple changes of it.
    #[test]
    fn every_target_takes_its_seeds_and_what_becomes_of_them() {
        let rounds = 200;
        for (name, entry) in TARGETS {
            let seeds = seeds(name);
            assert!(!seeds.is_empty(), "{name} has no seeds");
            let random = SeededEnvironment::new(7);
            for seed in &seeds {
                entry(seed);
            }
            let slow = matches!(name, "whole" | "operations" | "header");
            for _ in 0..if slow { rounds / 10 } else { rounds } {
                let mut input = seeds[random.next_u64() as usize % seeds.len()].clone();
                for _ in 0..random.next_u64() % 4 + 1 {
                    if !input.is_empty() {
                        let at = random.next_u64() as usize % input.len();
                        input[at] = random.next_u64() as u8;
                    }
                }
                if random.next_u64().is_multiple_of(4) {
                    input.truncate(random.next_u64() as usize % (input.len() + 1));
                }
                entry(&input);
            }
        }
    }
}
