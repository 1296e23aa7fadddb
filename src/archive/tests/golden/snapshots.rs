//! The golden archive with snapshots: the content of each, regardless of later changes of live tree
//! and log, and the extent of damage.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::super::super::fuzzing::{OWNER, create_on, noise, open_on};
use super::super::{archive, unhex};
use super::{PASSPHRASES, damaged, file, freeze, frozen, hex, listing, outcome, settled, without_rest_of_log, written};
use crate::crypto::kdf::KdfCost;
use crate::error::Result;
use crate::format::values::{Extent, SnapshotValue};
use crate::format::{Ino, Key, Pointer, ROOT_INO, TreeId, kind};
use crate::fs::{FileSystem, RenameMode, SetAttributes, XattrMode};
use crate::storage::MemoryStorage;

const NOT_UTF8: &[u8] = b"\xff not UTF-8 \n";

/// Clones of one range in a file: more than one removal step takes off a dead list.
const CLONES: u64 = 280;

/// Returns the manifest of the readable snapshots, oldest first, each with its given listing.
fn manifest_of(fs: &FileSystem, listings: &[(&[u8], Value)]) -> Value {
    let kept = fs.volume.readable_snapshots().unwrap();
    assert_eq!(kept.len(), listings.len());
    let each = |((id, value), (name, objects)): (&(u64, SnapshotValue), &(&[u8], Value))| {
        assert_eq!(value.name, *name);
        json!({
            "id": id, "name": hex(name), "time": [value.time.seconds, i64::from(value.time.nanos)], "inodes": value.inodes,
            "objects": objects,
        })
    };
    kept.iter().zip(listings).map(each).collect()
}

/// Archives frozen before snapshots could be read have no list of them.
pub(super) fn assert_shown(fs: &FileSystem, manifest: &Value, archive: &str) {
    let Some(wanted) = manifest.as_array() else { return };
    let names: Vec<Vec<u8>> = wanted.iter().map(|one| unhex(&one["name"])).collect();
    let shown: Vec<(&[u8], Value)> =
        names.iter().map(|name| (&name[..], listing(&fs.open_snapshot(name).unwrap()).unwrap())).collect();
    assert_eq!(manifest_of(fs, &shown), *manifest, "{archive}");
}

/// Returns, by name, the results of reading everything in these snapshots.
pub(super) fn outcomes<'a>(bytes: &[u8], names: impl Iterator<Item = &'a String>) -> Value {
    let read = |name: &String| -> Result<Value> {
        let fs = open_on(Arc::new(MemoryStorage::from_contents(bytes.to_vec())), true)?;
        listing(&*fs.open_snapshot(&unhex(&json!(name)))?)
    };
    let said =
        |name: &String| (name.clone(), json!(read(name).map_or_else(|error| error.to_string(), |_| "read".into())));
    Value::Object(names.map(said).collect())
}

/// State after a kill: content of every kind is in snapshots only, one snapshot is half removed,
/// and the log has entries.
fn kept() -> (Vec<u8>, Value) {
    let storage = Arc::new(archive(&PASSPHRASES.map(|(slot, text)| (slot, text, KdfCost::TEST))));
    let fs = create_on(storage.clone(), 25).unwrap();
    let mut listings: Vec<(&[u8], Value)> = Vec::new();
    let mut take = |name: &'static [u8], listed: bool| {
        let now = listing(&fs).unwrap();
        fs.take_snapshot(name).unwrap();
        if listed {
            listings.push((name, now));
        }
    };
    let size = |size| SetAttributes { size: Some(size), ..SetAttributes::default() };
    let clone_to = |from: Ino, to: Ino, numbers: std::ops::Range<u64>| {
        for n in numbers {
            fs.copy_range(from, 0, to, n * 20_000, 15_000, false).unwrap();
        }
    };

    let below = fs.make_directory(ROOT_INO, b"directory", 0o750, OWNER).unwrap().ino;
    let small = file(&fs, below, b"small", b"a few bytes");
    let overwritten = file(&fs, ROOT_INO, b"overwritten", &noise(70, 30_000));
    let cut = file(&fs, ROOT_INO, b"cut", &noise(71, 20_000));
    let cloned = file(&fs, ROOT_INO, b"cloned", &noise(72, 60_000));
    fs.sync().unwrap();
    let clones = file(&fs, ROOT_INO, b"clones", b"");
    clone_to(cloned, clones, 0..CLONES / 2);
    for name in [&b"named"[..], b"replaced", b"removed"] {
        file(&fs, ROOT_INO, name, &noise(73, 6_000));
    }
    fs.make_symlink(below, b"link", b"small", OWNER).unwrap();
    fs.set_xattr(below, b"user.note", b"of the first", XattrMode::Set).unwrap();
    take(b"first", true);

    fs.write(overwritten, 10_000, &noise(74, 5_000)).unwrap();
    fs.set_attributes(cut, &size(9_000)).unwrap();
    fs.rename(ROOT_INO, b"named", ROOT_INO, b"replaced", RenameMode::Replace).unwrap();
    fs.unlink(ROOT_INO, b"removed").unwrap();
    let clone = file(&fs, below, b"clone", b"");
    fs.copy_range(cloned, 0, clone, 0, 60_000, false).unwrap();
    fs.write(small, 2, b"FEW").unwrap();
    fs.set_xattr(below, b"user.note", &noise(75, 5_000), XattrMode::Set).unwrap();
    take(NOT_UTF8, true);

    // Half of the next snapshot's exclusive data is older than the previous snapshot, and half is
    // not.
    clone_to(cloned, clones, CLONES / 2..CLONES);
    file(&fs, ROOT_INO, b"brief", b"in one snapshot, which is being removed");
    take(b"half removed", false);

    fs.unlink(ROOT_INO, b"brief").unwrap();
    fs.set_attributes(clones, &size(0)).unwrap();
    fs.unlink(ROOT_INO, b"cloned").unwrap();
    fs.write(clone, 4_000, b"no clone any more").unwrap();
    let open = file(&fs, ROOT_INO, b"open", &noise(76, 9_000));
    fs.open(open).unwrap();
    fs.unlink(ROOT_INO, b"open").unwrap();
    take(b"orphan", true);

    let removed = fs.snapshot_named(b"half removed").unwrap();
    fs.remove_snapshots(&[removed.0]).unwrap();
    assert!(fs.volume.removal_step().unwrap());
    fs.unlink(below, b"clone").unwrap();
    fs.write(overwritten, 0, b"not in any of them").unwrap();
    fs.make_durable().unwrap();

    let (base, before) = (fs.volume.durable().generation, fs.volume.log_use().entries);
    let steps: [&dyn Fn(); 4] = [
        &|| fs.write(small, 0, b"of the log").unwrap(),
        &|| fs.write(overwritten, 12_000, &noise(77, 3_000)).unwrap(),
        &|| fs.unlink(ROOT_INO, b"replaced").unwrap(),
        &|| assert_ne!(file(&fs, below, b"created", b"known to an entry alone"), below),
    ];
    for step in steps {
        step();
        fs.sync().unwrap();
    }
    assert_eq!(fs.volume.durable().generation, base, "an fsync took a commit");
    let log = fs.volume.log_use();
    let entries = log.entries - before;
    assert_eq!(entries, steps.len() as u64);
    let bytes = without_rest_of_log(storage.contents(), log.used_bytes);
    let snapshots = manifest_of(&fs, &listings);
    (bytes, json!({"entries": entries, "objects": listing(&fs).unwrap(), "snapshots": snapshots}))
}

/// Returns the values of one record kind of an object.
fn values(fs: &FileSystem, object: u64, kind: u8) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let keep = &mut |_: Key, value: &[u8]| {
        all.push(value.to_vec());
        Ok(ControlFlow::Continue(()))
    };
    let state = fs.volume.state();
    fs.volume.view(&state).scan(Key::new(object, kind, 0), Key::new(object, kind + 1, 0), keep).unwrap();
    all
}

/// Returns offsets, each in a page that is not in the live tree.
fn damages(fs: &FileSystem) -> Vec<(&'static str, usize)> {
    let at = |page: Pointer, byte: usize| page.run.offset() as usize + byte;
    let root = |name: &[u8]| fs.volume.snapshot_named(name).unwrap().1.root.pointer;
    let first = fs.open_snapshot(b"first").unwrap();
    let of = |name: &[u8]| {
        let values = values(&first, first.lookup(ROOT_INO, name).unwrap().ino.0, kind::EXTENT);
        Extent::decode(&values[0]).unwrap().page
    };
    let snapshots = fs.volume.durable().roots[TreeId::Snapshots].pointer;
    vec![
        ("root of the first snapshot", at(root(b"first"), 30)),
        ("root of the last snapshot", at(root(b"orphan"), 300)),
        ("content that one snapshot shows", at(of(b"removed"), 300)),
        ("content that every snapshot shows", at(of(b"cloned"), 300)),
        ("root of the tree of snapshots", at(snapshots, 30)),
    ]
}

/// Run once, when snapshots could be read: its file is frozen.
#[test]
#[ignore = "writes the golden archive with snapshots anew"]
fn write_golden_snapshots() {
    let (bytes, said) = kept();
    let bytes = settled(bytes);
    let fs = open_on(Arc::new(MemoryStorage::from_contents(bytes.clone())), true).unwrap();
    let record = fs.volume.durable();
    let names: Vec<String> =
        said["snapshots"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().into()).collect();
    let damaged: Vec<Value> = damages(&fs)
        .into_iter()
        .map(|(what, at)| {
            let bytes = damaged(&bytes, &[at]);
            json!({
                "what": what, "flip": [at], "outcome": outcome(&bytes), "written": written(&bytes),
                "snapshots": outcomes(&bytes, names.iter()),
            })
        })
        .collect();
    let manifest = json!({
        "passphrases": PASSPHRASES.map(|(_, text)| text), "entries": said["entries"],
        "generation": record.generation.0, "closed": record.closed, "two_barrier": record.two_barrier,
        "sha256": hex(&Sha256::digest(&bytes)), "objects": said["objects"], "snapshots": said["snapshots"], "damaged": damaged,
    });
    freeze("snapshots", &bytes, &manifest);
}

/// Checks that the archive has the promised content, which comparing listings does not.
#[test]
fn the_golden_archive_with_snapshots_has_what_it_is_for() {
    let (bytes, manifest) = frozen("snapshots");
    let fs = open_on(Arc::new(MemoryStorage::from_contents(bytes)), true).unwrap();
    let all = fs.volume.snapshots().unwrap();
    let names: Vec<&[u8]> = all.iter().map(|(_, snapshot)| &snapshot.name[..]).collect();
    assert_eq!(names, [&b"first"[..], NOT_UTF8, b"", b"orphan"]);
    let dead: Vec<u64> = all.iter().map(|(id, _)| fs.volume.dead_entries(*id).unwrap()).collect();
    assert!(dead.iter().all(|entries| *entries > 0) && dead[1] > 100, "{dead:?}");
    let orphans = |name: &[u8]| values(&fs.open_snapshot(name).unwrap(), 0, kind::ORPHAN).len();
    assert_eq!([&b"first"[..], NOT_UTF8, b"orphan"].map(orphans), [0, 0, 1]);
    // Each snapshot has content that neither the live tree nor another one has.
    let listings: Vec<&Value> = manifest["snapshots"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| &one["objects"])
        .chain([&manifest["objects"]])
        .collect();
    assert_eq!(listings.iter().map(|one| one.to_string()).collect::<BTreeSet<_>>().len(), 4);
}
